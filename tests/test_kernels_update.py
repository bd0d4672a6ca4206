"""kernels/{adam,sgd,lion}.py: torch's bits, the twin's bits, and no trace of slices."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_tieroffload.kernels import adam, lion, sgd
from lightning_tieroffload.kernels.primitives import NO_F32, NO_U8, NO_U16, LazyKernel
from tests.kernel_cases import KernelCase, assert_same_bits, spread

NUMEL = 16 * 700 + 5  # not a multiple of a block, of a vector, or of eight


def adamw_scalars(**changes: Any) -> adam.AdamScalars:
    return adam.adam_scalars(
        **{"lr": 1.3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 3, "decoupled": True}
        | changes
    )


# Every branch of each rule: (kernel, twin, scalars, number of state arrays).
RULES: dict[str, tuple[LazyKernel, Callable[..., None], Any, int]] = {
    "adamw": (adam.adam_slice, adam.adam_slice_numpy, adamw_scalars(), 2),
    "adamw-maximize-new": (
        adam.adam_slice, adam.adam_slice_numpy, adamw_scalars(step=1, maximize=True, is_new_state=True), 2,
    ),
    "adamw-weights": (adam.adam_slice, adam.adam_slice_numpy, adamw_scalars(moments=adam.MOMENTS_LATER), 2),
    "adamw-moments": (
        adam.adam_slice, adam.adam_slice_numpy, adamw_scalars(moments=adam.MOMENTS_ONLY, betas=(0.3, 0.99)), 2,
    ),
    "adam-l2": (adam.adam_slice, adam.adam_slice_numpy, adamw_scalars(decoupled=False), 2),
    "adam-no-decay": (adam.adam_slice, adam.adam_slice_numpy, adamw_scalars(decoupled=False, weight_decay=0.0), 2),
    "adam-small-beta1": (adam.adam_slice, adam.adam_slice_numpy, adamw_scalars(betas=(0.3, 0.99)), 2),
    "sgd": (sgd.sgd_slice, sgd.sgd_slice_numpy, sgd.sgd_scalars(lr=0.1), 0),
    "sgd-decay": (sgd.sgd_slice, sgd.sgd_slice_numpy, sgd.sgd_scalars(lr=0.1, weight_decay=0.01, maximize=True), 0),
    "sgd-first": (sgd.sgd_slice, sgd.sgd_slice_numpy, sgd.sgd_scalars(lr=0.1, momentum=0.9, is_new_state=True), 1),
    "sgd-momentum": (sgd.sgd_slice, sgd.sgd_slice_numpy, sgd.sgd_scalars(lr=0.1, momentum=0.9, dampening=0.3), 1),
    "sgd-nesterov": (
        sgd.sgd_slice, sgd.sgd_slice_numpy, sgd.sgd_scalars(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), 1,
    ),
    "lion": (
        lion.lion_slice, lion.lion_slice_numpy, lion.lion_scalars(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1), 1,
    ),
    "lion-new": (
        lion.lion_slice, lion.lion_slice_numpy, lion.lion_scalars(lr=1e-4, betas=(0.9, 0.99), is_new_state=True), 1,
    ),
}  # fmt: skip

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"master_form": "split", "grad_format": "bf16"},
    "split-f32-grad": {"master_form": "split"},
    "split-clip-bf16": {
        "master_form": "split", "grad_format": "bf16", "scales": (0.37, 1.0, 0.11), "scale_format": "bf16",
    },
    "f16": {"grad_format": "f16", "scales": (1 / 1024, 0.37), "scale_format": "f16", "copy_format": "f16"},
    "f32-clip": {"scales": (0.37,), "copy_format": "bf16"},
    "bf16-clip-f32": {"grad_format": "bf16", "scales": (0.37, 0.9), "copy_format": "bf16"},
    "split-bf16-once": {"master_form": "split", "grad_format": "bf16", "scales": (0.37,), "ties": "none"},
    "split-bf16-born-ties": {"master_form": "split", "grad_format": "bf16", "ties": "born", "copy_format": "bf16"},
    "split-bf16-hostile": {
        "master_form": "split", "grad_format": "bf16", "scales": (-0.37,), "ties": "none", "hostile": True,
    },
    "split-bf16-rounded": {
        "master_form": "split", "grad_format": "bf16", "scales": (0.37,), "scale_format": "bf16", "ties": "none",
    },
    "hostile": {"hostile": True, "scales": (0.37,)},
    "hostile-split": {"hostile": True, "master_form": "split", "grad_format": "f16"},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_kernel_has_the_bits_of_its_twin(rule: str, form: str) -> None:
    """Whole arrays at once in NumPy, against uneven slices in compiled code."""
    kernel, twin, scalars, num_states = RULES[rule]
    want = KernelCase(NUMEL, num_states=num_states, **FORMS[form])
    have = KernelCase(NUMEL, num_states=num_states, **FORMS[form])
    before = {name: array.copy() for name, array in have.arrays.items()}
    twin(0, NUMEL, *want.args(scalars))
    args = have.args(scalars)
    kernel.prepare(*args)
    for begin, end in ((4096, 8192), (8192, NUMEL), (0, 8), (8, 4096)):
        kernel(begin, end, *args)
    assert_same_bits(want.arrays, have.arrays)
    for name in ("grad_f32", "grad_u16"):  # the gradient is the user's
        assert_same_bits({name: before[name]}, {name: have.arrays[name]})
    changed = "hi" if have.master_form == "split" else "master"
    changed = "first" if rule == "adamw-moments" else changed
    assert (before[changed] != have.arrays[changed]).any()


def test_the_case_of_born_ties_has_them() -> None:
    case = KernelCase(NUMEL, **FORMS["split-bf16-born-ties"])
    assert not case.arrays["ties"].any()
    adam.adam_slice_numpy(0, NUMEL, *case.args(adamw_scalars()))
    assert np.unpackbits(case.arrays["ties"]).sum() >= 6


@pytest.mark.parametrize("moments", [adam.MOMENTS_NOW, adam.MOMENTS_LATER, adam.MOMENTS_ONLY])
@pytest.mark.parametrize("maximize", [False, True])
def test_loops_over_narrow_arrays_turn_the_sign_too(maximize: bool, moments: int) -> None:
    scalars = adamw_scalars(maximize=maximize, moments=moments)
    want, have = (KernelCase(NUMEL, **FORMS["split-bf16-once"]) for _ in range(2))
    adam.adam_slice_numpy(0, NUMEL, *want.args(scalars))
    adam.adam_slice.prepare(*have.args(scalars))
    adam.adam_slice(0, NUMEL, *have.args(scalars))
    assert_same_bits(want.arrays, have.arrays)


def test_preparing_changes_nothing() -> None:
    case, untouched = KernelCase(1000), KernelCase(1000)
    adam.adam_slice.prepare(*case.args(adamw_scalars(is_new_state=True)))
    assert_same_bits(untouched.arrays, case.arrays)


@pytest.mark.parametrize("rule", ["adamw", "sgd-momentum", "lion"])
def test_inner_loops_are_vector_code(rule: str) -> None:
    """A scalar loop is ten times slower, and nothing else would tell."""
    kernel, _, scalars, num_states = RULES[rule]
    assembly = kernel.assembly(*KernelCase(64, num_states=num_states).args(scalars))
    if "xmm" not in assembly:
        pytest.skip("this check reads x86 assembly")
    packed = ["vfmadd", *(["vsqrtps", "vdivps"] if rule == "adamw" else [])]
    for instruction in packed:
        assert any(instruction in line and ("ymm" in line or "zmm" in line) for line in assembly.splitlines())


# --- against torch ---------------------------------------------------------------------------------------------------

needs_fma = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's CPU kernels contract multiply-adds only on AVX2 and AVX512 machines",
)


def steps_of(optimizer_cls: type, settings: dict[str, Any], numel: int, num_steps: int = 6) -> Any:
    """Steps of a torch optimizer on weights of all magnitudes; yields (step, weight before, after, grad, state)."""
    rng = np.random.default_rng(7)
    param = torch.nn.Parameter(torch.from_numpy(spread(rng, numel, -6, 3)))
    optimizer = optimizer_cls([param], **settings)
    for step in range(1, num_steps + 1):
        grad = spread(rng, numel, -6, 3)
        grad[:7] = [0.0, -0.0, 1e-40, -1e-40, 1e18, -1e18, 1e-20]  # first moments stay finite
        before = param.detach().numpy().copy()
        param.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        yield step, before, param.detach().numpy(), grad, optimizer.state[param]


ADAM_SETTINGS = {
    "default": {},
    "decay": {"weight_decay": 0.1, "lr": 3e-4, "betas": (0.9, 0.95)},
    "no-decay": {"weight_decay": 0.0, "eps": 1e-6},
    "maximize": {"maximize": True, "weight_decay": 0.05},
    "beta1-half": {"betas": (0.5, 0.999)},
    "beta1-zero": {"betas": (0.0, 0.99), "lr": 0.1},
    "tensor-lr": {"lr": torch.tensor(1.7e-3)},
}


def run_adam(
    master: np.ndarray,
    grad: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    group: dict[str, Any],
    step: int,
    decoupled: bool,
) -> None:
    scalars = adam.adam_scalars(
        lr=float(group["lr"]), betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"], step=step,
        decoupled=decoupled, maximize=group["maximize"], is_new_state=step == 1,
    )  # fmt: skip
    args = (master, NO_U16, NO_U16, NO_U8, grad, NO_U16, 0, NO_F32, 0, m, v, NO_U16, 1, scalars)
    adam.adam_slice.prepare(*args)
    adam.adam_slice(0, master.size, *args)


@needs_fma
@pytest.mark.parametrize("settings", ADAM_SETTINGS)
@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_has_the_bits_of_torchs_fused_kernel(optimizer_cls: type, settings: str) -> None:
    """w, m and v of 10**5 elements over six steps; v may differ in torch's scalar tail."""
    numel = 100_003
    group = optimizer_cls([torch.zeros(1)], **ADAM_SETTINGS[settings]).defaults
    is_decoupled = optimizer_cls is torch.optim.AdamW
    m, v = np.full(numel, np.nan, np.float32), np.full(numel, np.nan, np.float32)
    ours: np.ndarray | None = None
    for step, before, after, grad, state in steps_of(optimizer_cls, ADAM_SETTINGS[settings] | {"fused": True}, numel):
        ours = before.copy() if ours is None else ours
        run_adam(ours, grad, m, v, group, step, is_decoupled)
        whole = numel // 16 * 16
        want = {"w": after[:whole], "m": state["exp_avg"].numpy()[:whole], "v": state["exp_avg_sq"].numpy()[:whole]}
        assert_same_bits(want, {"w": ours[:whole], "m": m[:whole], "v": v[:whole]})
        tail = {"w": after[whole:], "m": state["exp_avg"].numpy()[whole:], "v": state["exp_avg_sq"].numpy()[whole:]}
        for name, have in {"w": ours, "m": m, "v": v}.items():
            assert np.allclose(tail[name], have[whole:], rtol=1e-6, atol=0)


def one_step(optimizer_cls: type, settings: dict[str, Any], step: int, arrays: dict[str, np.ndarray]) -> Any:
    """(w, m, v) after torch's optimizer has taken this step from this state."""
    param = torch.nn.Parameter(torch.from_numpy(arrays["w"].copy()))
    optimizer = optimizer_cls([param], **settings)
    moments = {"exp_avg": torch.from_numpy(arrays["m"].copy()), "exp_avg_sq": torch.from_numpy(arrays["v"].copy())}
    optimizer.state[param] = {"step": torch.tensor(step - 1.0), **moments}
    param.grad = torch.from_numpy(arrays["g"].copy())
    optimizer.step()
    return param.detach().numpy(), moments["exp_avg"].numpy(), moments["exp_avg_sq"].numpy()


def state_of(kind: str, numel: int) -> dict[str, np.ndarray]:
    """Weights, gradient and moments: of a network in training, of all magnitudes, or with steps as large as weights."""
    rng = np.random.default_rng(11)
    if kind == "ordinary":
        w, g, m = (scale * rng.standard_normal(numel) for scale in (2e-2, 1e-3, 3e-4))
        v = 1e-6 * rng.random(numel)
    elif kind == "norm weights":
        w = 1 + 1e-2 * rng.standard_normal(numel)
        g, m, v = 1e-2 * rng.standard_normal(numel), 3e-3 * rng.standard_normal(numel), 1e-4 * rng.random(numel)
    elif kind == "hard":
        w, g, m = (spread(rng, numel, -6, 3) for _ in range(3))
        v = np.abs(spread(rng, numel, -12, 6))
    else:
        w, g, m = 1e-3 * rng.standard_normal(numel), spread(rng, numel, -4, 0), spread(rng, numel, -4, 0)
        v = m.astype(np.float64) ** 2 * rng.uniform(0.5, 2, numel)
    return {name: np.asarray(array, np.float32) for name, array in {"w": w, "g": g, "m": m, "v": v}.items()}


@needs_fma
@pytest.mark.parametrize("kind", ["ordinary", "norm weights", "hard", "steps like weights"])
@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.Adam])
def test_adam_against_torchs_other_forms(optimizer_cls: type, kind: str) -> None:
    """One step from the same state: moments equal, weights within 1 ulp of max(|w|, 4 |step|), and in no element
    farther from foreach than torch's own fused kernel is. 10**6 elements."""
    numel = 1_000_000  # no scalar tail
    arrays = state_of(kind, numel)
    settings: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
    group = optimizer_cls([torch.zeros(1)], **settings).defaults
    num_ulp_of_step = 0.0
    for step in (2, 1000):
        want, want_m, want_v = one_step(optimizer_cls, {**settings, "foreach": True}, step, arrays)
        loop, _, _ = one_step(optimizer_cls, {**settings, "foreach": False}, step, arrays)
        fused, _, _ = one_step(optimizer_cls, {**settings, "fused": True}, step, arrays)
        w, m, v = (arrays[name].copy() for name in ("w", "m", "v"))
        run_adam(w, arrays["g"], m, v, group, step, optimizer_cls is torch.optim.AdamW)
        assert_same_bits({"m": want_m, "v": want_v, "loop": want}, {"m": m, "v": v, "loop": loop})
        ours = np.abs(w.astype(np.float64) - want)
        theirs = np.abs(fused.astype(np.float64) - want)
        assert (ours <= theirs).all()
        root = np.sqrt(want_v.astype(np.float64) / (1 - group["betas"][1] ** step)) + group["eps"]
        moved = np.abs(group["lr"] / (1 - group["betas"][0] ** step) * want_m / root)
        weight = np.maximum(np.abs(arrays["w"]), np.abs(want))
        assert (ours <= np.spacing(np.maximum(weight, 4 * moved).astype(np.float32))).all()
        num_ulp_of_step = max(num_ulp_of_step, (ours / np.spacing(np.maximum(weight, moved).astype(np.float32))).max())
    if torch.backends.mkl.is_available() and kind in ("hard", "steps like weights"):
        assert num_ulp_of_step > 1  # so that the 4 is needed, and here for a reason


SGD_SETTINGS = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.013, "weight_decay": 0.01, "maximize": True},
    "momentum": {"lr": 0.013, "momentum": 0.9},
    "dampening": {"lr": 0.013, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"lr": 0.013, "momentum": 0.9, "nesterov": True, "maximize": True},
}


@needs_fma
@pytest.mark.parametrize("settings", SGD_SETTINGS)
def test_sgd_has_the_bits_of_torchs_fused_kernel(settings: str) -> None:
    numel = 100_000
    group = torch.optim.SGD([torch.zeros(1)], **SGD_SETTINGS[settings]).defaults
    has_momentum = group["momentum"] != 0
    momentum = np.full(numel, np.nan, np.float32) if has_momentum else NO_F32
    ours: np.ndarray | None = None
    for step, before, after, grad, state in steps_of(torch.optim.SGD, SGD_SETTINGS[settings] | {"fused": True}, numel):
        ours = before.copy() if ours is None else ours
        keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
        scalars = sgd.sgd_scalars(**{key: group[key] for key in keys}, is_new_state=step == 1)
        args = (ours, NO_U16, NO_U16, NO_U8, grad, NO_U16, 0, NO_F32, 0, momentum, NO_F32, NO_U16, 1, scalars)
        sgd.sgd_slice.prepare(*args)
        sgd.sgd_slice(0, numel, *args)
        assert_same_bits({"w": after}, {"w": ours})
        if has_momentum:
            assert_same_bits({"b": state["momentum_buffer"].numpy()}, {"b": momentum})


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, program 1, in the plainest torch."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                exp_avg = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                direction = exp_avg.clone().mul_(beta1).add_(p.grad, alpha=1 - beta1).sign_()
                p.add_(direction, alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@needs_fma
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_has_the_bits_of_the_papers_rule(weight_decay: float) -> None:
    numel = 100_000
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": weight_decay}
    exp_avg = np.full(numel, np.nan, np.float32)
    ours: np.ndarray | None = None
    for step, before, after, grad, state in steps_of(Lion, settings, numel):
        ours = before.copy() if ours is None else ours
        scalars = lion.lion_scalars(**settings, is_new_state=step == 1)
        args = (ours, NO_U16, NO_U16, NO_U8, grad, NO_U16, 0, NO_F32, 0, exp_avg, NO_F32, NO_U16, 1, scalars)
        lion.lion_slice.prepare(*args)
        lion.lion_slice(0, numel, *args)
        assert_same_bits({"w": after, "m": state["exp_avg"].numpy()}, {"w": ours, "m": exp_avg})


@pytest.mark.parametrize("grad_format", ["f32", "bf16", "f16"])
def test_unscale_and_clip_round_as_torch_does_in_place(grad_format: str) -> None:
    """GradScaler's unscale, then clip's ``p.grad.mul_``, in the gradient's own dtype; seen through SGD with lr 1."""
    numel = 20_000
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[grad_format]
    case = KernelCase(
        numel, grad_format=grad_format, scales=(1 / 768, 0.123456789), scale_format=grad_format, num_states=0
    )
    case.arrays["master"][:] = 0
    source = case.arrays["grad_f32"] if grad_format == "f32" else case.arrays["grad_u16"]
    grad = torch.from_numpy(source.copy()).view(dtype)
    found_inf = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, torch.tensor([case.scales[0]]))
    grad.mul_(torch.tensor(case.scales[1]))
    args = case.args(sgd.sgd_scalars(lr=-1.0))
    sgd.sgd_slice.prepare(*args)
    sgd.sgd_slice(0, numel, *args)
    want = grad.float().numpy()
    assert np.array_equal(want, case.arrays["master"])
    once = (torch.from_numpy(source.copy()).view(dtype).float() * (case.scales[0] * case.scales[1])).to(dtype)
    assert (once.float().numpy() != want).any()  # one rounding is not enough, and the test would see it


COMPILES = """
import _thread, sys, threading, time
import numpy as np
from lightning_tieroffload.kernels.split import merge_f32, split_f32

def strike(after_s):
    time.sleep(after_s)
    _thread.interrupt_main()

master = np.arange(64, dtype=np.float32)
hi, lo, ties = np.empty(64, np.uint16), np.empty(64, np.uint16), np.zeros(8, np.uint8)
num_struck = 0
for after_s in np.linspace(0.02, 0.6, int(sys.argv[1])):
    _thread.start_new_thread(strike, (after_s,))
    try:
        split_f32(master, hi, lo, ties)
        time.sleep(1)
    except KeyboardInterrupt:
        num_struck += 1
    back = np.empty_like(master)
    split_f32(master, hi, lo, ties)
    merge_f32(hi, lo, ties, back)
    assert (back == master).all()
assert num_struck == int(sys.argv[1]), num_struck
"""


def test_ctrl_c_leaves_the_compiler_whole(tmp_path: Path) -> None:
    """Nothing is stored, so the first use compiles, for seconds, and is struck in the middle."""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILES, "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_prepared_already_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    args = KernelCase(64, num_states=2).args(adamw_scalars(is_new_state=True))
    adam.adam_slice.prepare(*args)
    monkeypatch.setattr(_thread, "start_new_thread", None)
    adam.adam_slice.prepare(*args)
