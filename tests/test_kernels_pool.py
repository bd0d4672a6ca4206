"""kernels/pool.py, kernels/registry.py and LazyKernel: threads, slices, fork, errors, the edge."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_tieroffload.errors import ConfigError, TierOffloadError, UnsupportedError
from lightning_tieroffload.kernels import adam, pool, registry
from lightning_tieroffload.kernels.pool import KernelPool
from lightning_tieroffload.kernels.split import SplitMaster
from tests.kernel_cases import KernelCase, assert_same_bits, spread

REPO = Path(__file__).parent.parent
WAIT_S = 30.0
ADAMW_GROUP = torch.optim.AdamW([torch.zeros(1)], weight_decay=0.1).defaults


# --- slices and threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
@pytest.mark.parametrize("numel", [1, 4096, 65_536, 65_537, 10_000_000])
def test_slices_cover_everything_once_and_begin_at_multiples(numel: int, num_threads: int) -> None:
    seen: list[tuple[int, int]] = []
    with KernelPool(num_threads) as kernel_pool:
        kernel_pool.run(lambda begin, end: seen.append((begin, end)), numel)
    seen.sort()
    assert [begin for begin, _ in seen] == [0, *(end for _, end in seen[:-1])]
    assert seen[-1][1] == numel
    assert all(begin % pool.SLICE_MULTIPLE == 0 for begin, _ in seen)
    assert len(seen) <= 4 * num_threads


def test_bits_do_not_depend_on_threads_or_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    numel = 300_000 + 13
    results = []
    for num_threads, least in ((1, 1 << 30), (2, 4096), (5, 3 * 4096)):
        monkeypatch.setattr(pool, "_LEAST_SLICE_NUMEL", least)
        case = KernelCase(numel, master_form="split", grad_format="bf16", scales=(0.3,), hostile=True)
        a = case.arrays
        kernel = registry.find_kernel(torch.optim.AdamW, ADAMW_GROUP, torch.float32)
        assert kernel is not None
        with KernelPool(num_threads) as kernel_pool:
            kernel.run(
                kernel_pool, SplitMaster(a["hi"], a["lo"], a["ties"]), a["grad_u16"],
                {"exp_avg": a["first"], "exp_avg_sq": a["second"]}, step=2, group=ADAMW_GROUP, grad_scales=(0.3,),
            )  # fmt: skip
        results.append(a)
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_threads_are_named_bounded_and_lazy() -> None:
    def ours() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in before and t.name.startswith("tieroffload-update-")]

    before = threading.enumerate()
    with KernelPool(3) as kernel_pool:
        assert ours() == []
        names: set[str] = set()
        kernel_pool.run(lambda begin, end: names.add(threading.current_thread().name), 1 << 20)
        assert {t.name for t in ours()} == {f"tieroffload-update-{index}" for index in range(3)}
        assert names <= {t.name for t in ours()}
        assert kernel_pool.num_threads == 3
    assert ours() == []


def test_default_threads_follow_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, expected in ((1, 1), (2, 2), (3, 3), (4, 2), (16, 14)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=num_cores: set(range(100, 100 + n)))
        assert pool.default_num_threads() == expected
        assert KernelPool().num_threads == expected


@pytest.mark.parametrize("num_threads", [0, -1, 1.5, True, "4"])
def test_a_wrong_thread_count_is_refused(num_threads: Any) -> None:
    with pytest.raises(ConfigError, match="num_threads="):
        KernelPool(num_threads)


def test_the_first_error_reaches_the_caller_after_the_last_slice_has_ended() -> None:
    """Nothing may still write the arrays when the caller learns of the failure; slices not begun are dropped."""
    both_in = threading.Barrier(2, timeout=WAIT_S)
    failed = threading.Event()
    ended: list[int] = []

    def work(begin: int, end: int) -> None:
        if begin > 65_536:
            raise AssertionError("a slice was started after the failure")
        both_in.wait()
        if begin == 0:
            failed.set()
            raise ValueError("boom at 0")
        assert failed.wait(WAIT_S)
        ended.append(begin)

    with KernelPool(2) as kernel_pool:
        with pytest.raises(ValueError, match="boom at 0"):
            kernel_pool.run(work, 2 * 65_536)
        assert ended == [65_536]
        done: list[int] = []
        kernel_pool.run(lambda begin, end: done.append(begin), 10)  # the pool is as good as new
        assert done == [0]


def test_slices_that_nobody_began_are_dropped_after_an_error() -> None:
    begun: list[int] = []

    def work(begin: int, end: int) -> None:
        begun.append(begin)
        raise KeyError(begin)

    with KernelPool(1) as kernel_pool, pytest.raises(KeyError):
        kernel_pool.run(work, 4 * 65_536)
    assert begun == [0]


def test_lower_priority_numbers_go_first_then_the_oldest() -> None:
    gate = threading.Event()
    order: list[str] = []
    with KernelPool(1) as kernel_pool:
        first = kernel_pool.submit(lambda begin, end: gate.wait(WAIT_S), 1)
        jobs = [
            kernel_pool.submit(lambda begin, end, name=name: order.append(name), 1, priority=priority)
            for name, priority in (("late", 9), ("b", 5), ("c", 5), ("a", 1))
        ]
        assert not first.done()
        gate.set()
        for job in [first, *jobs]:
            job.result(WAIT_S)
    assert order == ["a", "b", "c", "late"]


def test_many_threads_may_submit_at_once() -> None:
    totals = np.zeros(8, np.int64)
    with KernelPool(2) as kernel_pool:

        def submit(row: int) -> None:
            for _ in range(20):
                counts: list[int] = []
                kernel_pool.run(lambda begin, end, counts=counts: counts.append(end - begin), 200_000)
                totals[row] += sum(counts)

        threads = [threading.Thread(target=submit, args=(row,)) for row in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    assert totals.tolist() == [20 * 200_000] * 8


def test_work_that_submits_work_does_not_wait_for_itself() -> None:
    seen: list[tuple[int, int]] = []
    with KernelPool(1) as kernel_pool:
        kernel_pool.submit(lambda begin, end: kernel_pool.run(lambda b, e: seen.append((b, e)), 100_000), 1).result(
            WAIT_S
        )
    assert seen == [(0, 65_536), (65_536, 100_000)]


def test_close_finishes_what_was_submitted_and_refuses_the_rest() -> None:
    done: list[int] = []
    kernel_pool = KernelPool(2)
    jobs = [kernel_pool.submit(lambda begin, end: done.append(begin), 300_000) for _ in range(10)]
    kernel_pool.close()
    kernel_pool.close()
    assert all(job.done() and job.exception() is None for job in jobs)
    assert len(done) == 10 * 5
    with pytest.raises(TierOffloadError, match="closed"):
        kernel_pool.submit(lambda begin, end: None, 1)


def test_nothing_to_do_is_done_at_once() -> None:
    kernel_pool = KernelPool(2)
    assert kernel_pool.submit(lambda begin, end: pytest.fail("called"), 0).done()
    assert "tieroffload" not in {thread.name for thread in threading.enumerate()}


def test_a_lost_pool_ends_its_threads_and_keeps_no_array() -> None:
    kernel_pool = KernelPool(2)
    array = np.zeros(10)
    kernel_pool.run(lambda begin, end, array=array: array.fill(1), 10)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is None
    crew = kernel_pool._crew()
    threads = list(crew._threads)
    assert len(threads) == 2
    del kernel_pool, crew
    gc.collect()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    """Fork while the parent's threads run and hold their lock: the child works, the parent goes on."""
    with KernelPool(2) as kernel_pool:
        inside, leave = threading.Event(), threading.Event()

        def busy(begin: int, end: int) -> None:
            inside.set()
            leave.wait(WAIT_S)

        job = kernel_pool.submit(busy, 1)
        assert inside.wait(WAIT_S)
        parents_crew = kernel_pool._crew()
        with parents_crew._changed:  # the worst moment to fork
            pid = os.fork()
            if pid == 0:
                ok = False
                try:
                    seen: list[tuple[int, int]] = []
                    kernel_pool.submit(lambda begin, end: seen.append((begin, end)), 70_000).result(WAIT_S)
                    kernel_pool.close()
                    ok = sorted(seen) == [(0, 65_536), (65_536, 70_000)]
                finally:
                    os._exit(0 if ok else 1)
        _, wait_result = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(wait_result) == 0
        leave.set()
        job.result(WAIT_S)


# --- the registry ----------------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    pass


class MyAdamW(torch.optim.AdamW):
    pass


def defaults(optimizer_cls: type, **settings: Any) -> dict[str, Any]:
    return optimizer_cls([torch.zeros(1)], **settings).defaults


LION_GROUP = {"params": [], "lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "initial_lr": 1e-4, "foreach": None}


@pytest.mark.parametrize(
    ("optimizer_cls", "group", "family", "state_names", "uses_step"),
    [
        (torch.optim.AdamW, defaults(torch.optim.AdamW), "adamw", ("exp_avg", "exp_avg_sq"), True),
        (torch.optim.Adam, defaults(torch.optim.Adam), "adam", ("exp_avg", "exp_avg_sq"), True),
        (
            torch.optim.Adam, defaults(torch.optim.Adam, decoupled_weight_decay=True), "adamw",
            ("exp_avg", "exp_avg_sq"), True,
        ),
        (torch.optim.SGD, defaults(torch.optim.SGD), "sgd", (), False),
        (torch.optim.SGD, defaults(torch.optim.SGD, momentum=0.9), "sgd", ("momentum_buffer",), False),
        (Lion, LION_GROUP, "lion", ("exp_avg",), False),
    ],
)  # fmt: skip
def test_known_optimizers_have_a_kernel(
    optimizer_cls: type, group: dict[str, Any], family: str, state_names: tuple[str, ...], uses_step: bool
) -> None:
    for dtype in (torch.float32, "float32"):
        kernel = registry.find_kernel(optimizer_cls, group, dtype)
        assert kernel == registry.UpdateKernel(family, state_names, uses_step)
        assert registry.refusal_reason(optimizer_cls, group, dtype) is None


@pytest.mark.parametrize(
    ("optimizer_cls", "group", "dtype", "reason"),
    [
        (MyAdamW, ADAMW_GROUP, torch.float32, "exact classes"),
        (torch.optim.Adagrad, {}, torch.float32, "no kernel of ours"),
        (torch.optim.AdamW, ADAMW_GROUP, torch.bfloat16, "torch.bfloat16 parameters"),
        (torch.optim.AdamW, ADAMW_GROUP, torch.complex64, "torch.complex64 parameters"),
        (torch.optim.AdamW, ADAMW_GROUP | {"amsgrad": True}, torch.float32, "amsgrad=True"),
        (torch.optim.Adam, ADAMW_GROUP | {"capturable": True}, torch.float32, "capturable=True"),
        (torch.optim.SGD, defaults(torch.optim.SGD) | {"differentiable": True}, torch.float32, "differentiable=True"),
        (Lion, LION_GROUP | {"cautious": True}, torch.float32, "cautious"),
        (Lion, LION_GROUP | {"eps": 1e-8}, torch.float32, "eps"),
        (Lion, {"lr": 1e-4, "betas": (0.9, 0.99)}, torch.float32, "lacks weight_decay"),
        (Lion, LION_GROUP | {"betas": (0.9, 0.99, 0.999)}, torch.float32, "3 betas"),
    ],
)
def test_what_we_do_not_know_is_refused_with_a_reason(
    optimizer_cls: type, group: dict[str, Any], dtype: Any, reason: str
) -> None:
    assert registry.find_kernel(optimizer_cls, group, dtype) is None
    sentence = registry.refusal_reason(optimizer_cls, group, dtype)
    assert sentence is not None
    assert reason in sentence
    assert 'optimizer_kernel="torch"' in sentence


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_kernel_follows_its_optimizer_through_changing_groups(optimizer_cls: type) -> None:
    """Several steps with a scheduler's lr, as the engine would run them, equal to the fused optimizer."""
    numel = 160_000
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "fused": True}
    if optimizer_cls is torch.optim.SGD:
        settings["momentum"] = 0.9
    rng = np.random.default_rng(3)
    param = torch.nn.Parameter(torch.from_numpy(spread(rng, numel, -3, 1)))
    optimizer = optimizer_cls([param], **settings)
    master = param.detach().numpy().copy()
    kernel = registry.find_kernel(optimizer_cls, optimizer.param_groups[0], param.dtype)
    assert kernel is not None
    states = {name: np.full(numel, np.nan, np.float32) for name in kernel.state_names}
    wire = np.zeros(numel, np.uint16)
    with KernelPool(2) as kernel_pool:
        for step in range(1, 5):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.01 / step) if step == 3 else 0.01 / step
            grad = spread(rng, numel, -3, 1)
            param.grad = torch.from_numpy(grad.copy()).mul_(0.5)
            optimizer.step()
            kernel.run(
                kernel_pool, master, grad, states, step=step, group=optimizer.param_groups[0], grad_scales=[0.5],
                wire=wire, is_new_state=step == 1,
            )  # fmt: skip
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert_same_bits({"w": param.detach().numpy()}, {"w": master})
        for name, state in states.items():
            assert_same_bits({name: optimizer.state[param][name].numpy()}, {name: state})
    assert np.array_equal(torch.from_numpy(master).bfloat16().view(torch.uint16).numpy(), wire)


def test_float16_arrays_and_read_only_gradients_are_taken() -> None:
    numel = 5000
    grad = spread(np.random.default_rng(0), numel, -3, 1).astype(np.float16)
    kernel = registry.find_kernel(torch.optim.SGD, defaults(torch.optim.SGD, lr=1.0), "float32")
    assert kernel is not None
    group = defaults(torch.optim.SGD, lr=1.0)
    results = []
    for given, number_format in ((grad, None), (grad.view(np.uint16), "f16"), (grad.astype(np.float32), None)):
        given = given.copy()
        given.flags.writeable = False
        master = SplitMaster.empty(numel)
        with KernelPool(1) as kernel_pool:
            kernel.run(kernel_pool, master, given, {}, step=1, group=group, grad_format=number_format)
        results.append(master.to_f32())
    assert np.array_equal(results[0], -grad.astype(np.float32))
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"master": np.zeros(63, np.float32)}, TierOffloadError, "the master must be .* 64 elements; it is .*63"),
        ({"master": np.zeros(64)}, TierOffloadError, "float32 array of 64 elements; it is float64"),
        ({"master": np.zeros(128, np.float32)[::2]}, TierOffloadError, "contiguous"),
        ({"grad": np.zeros(64)}, UnsupportedError, "gradient of dtype float64"),
        ({"grad_format": "bf16"}, UnsupportedError, "gradient of dtype float32 as bf16"),
        ({"states": {"exp_avg": np.zeros(64, np.float32)}}, TierOffloadError, "exp_avg_sq is missing"),
        ({"wire": np.zeros(64, np.float16)}, TierOffloadError, "the compute copy must be"),
        ({"wire": np.zeros(64, np.uint16), "wire_format": "f32"}, UnsupportedError, "wire_format='f32'"),
        ({"round_scales_to": "fp8"}, UnsupportedError, "round_scales_to='fp8'"),
        ({"step": 0}, TierOffloadError, "step=0"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_anything_is_written(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    kernel = registry.find_kernel(torch.optim.AdamW, ADAMW_GROUP, torch.float32)
    assert kernel is not None
    call = {
        "master": np.zeros(64, np.float32),
        "grad": np.ones(64, np.float32),
        "states": {"exp_avg": np.zeros(64, np.float32), "exp_avg_sq": np.zeros(64, np.float32)},
        "step": 1,
    } | change
    with KernelPool(1) as kernel_pool, pytest.raises(error, match=message):
        kernel.run(kernel_pool, call.pop("master"), call.pop("grad"), call.pop("states"), group=ADAMW_GROUP, **call)
    assert not any(name in call and call[name].any() for name in ("wire",))


def test_read_only_memory_is_not_written() -> None:
    kernel = registry.find_kernel(torch.optim.SGD, defaults(torch.optim.SGD), torch.float32)
    assert kernel is not None
    master = np.zeros(64, np.float32)
    master.flags.writeable = False
    with KernelPool(1) as kernel_pool, pytest.raises(TierOffloadError, match="the master is read-only"):
        kernel.run(kernel_pool, master, np.ones(64, np.float32), {}, step=1, group=defaults(torch.optim.SGD))


def test_momentum_that_appears_later_is_an_error_and_not_another_rule() -> None:
    group = defaults(torch.optim.SGD)
    kernel = registry.find_kernel(torch.optim.SGD, group, torch.float32)
    assert kernel is not None
    with KernelPool(1) as kernel_pool, pytest.raises(TierOffloadError, match=r"momentum=0\.9.*find_kernel again"):
        kernel.run(
            kernel_pool, np.zeros(8, np.float32), np.zeros(8, np.float32), {}, step=1, group=group | {"momentum": 0.9}
        )


# --- compiled code in odd places -------------------------------------------------------------------------------------

CON_02 = """
import threading
import numpy as np, numba, torch
from lightning_tieroffload.kernels import registry
from lightning_tieroffload.kernels.pool import KernelPool

@numba.njit(parallel=True)
def users_own(x):
    total = 0.0
    for i in numba.prange(x.size):
        total += x[i]
    return total

group = torch.optim.AdamW([torch.zeros(1)]).defaults
kernel = registry.find_kernel(torch.optim.AdamW, group, torch.float32)
results = {}

def train(name):
    rng = np.random.default_rng(0)
    master, grad = (rng.standard_normal(200_000).astype(np.float32) for _ in range(2))
    states = {key: np.zeros_like(master) for key in kernel.state_names}
    with KernelPool(2) as pool:
        for step in range(1, 21):
            kernel.run(pool, master, grad, states, step=step, group=group)
    results[name] = master.tobytes()

def use():
    for _ in range(200):
        users_own(np.ones(10_000))

users_own(np.ones(10))
assert numba.threading_layer() == "workqueue"
threads = [threading.Thread(target=train, args=(name,)) for name in "ab"] + [threading.Thread(target=use)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(results) == 2 and results["a"] == results["b"]
print("finished")
"""


def run_script(script: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | options.pop("env", {})
    # -P: not the current directory's package, but the one that PYTHONPATH names.
    return subprocess.run(
        [sys.executable, "-P", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_con_02_numbas_workqueue_layer_and_several_threads(tmp_path: Path) -> None:
    """CON-02: two trainings in two threads beside a user's own parallel kernel, on the layer that aborts."""
    done = run_script(CON_02, env={"NUMBA_THREADING_LAYER": "workqueue", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout


CFG_02 = """
import numpy as np
from lightning_tieroffload.kernels import split
hi, lo, ties = np.zeros(9, np.uint16), np.zeros(9, np.uint16), np.zeros(2, np.uint8)
out = np.zeros(9, np.float32)
split.split_f32(np.arange(9, dtype=np.float32) / 7, hi, lo, ties)
split.merge_f32_numpy(hi, lo, ties, out)
assert (out == np.arange(9, dtype=np.float32) / 7).all()
print("finished")
"""

NO_PLACE = """
import numba.core.caching as caching
for locator in caching._CacheLocator.__subclasses__() + caching.UserWideCacheLocator.__subclasses__():
    locator.ensure_cache_path = lambda self: (_ for _ in ()).throw(OSError(30, "read-only file system"))
"""

WRITE_FAILS = """
import numba.core.caching as caching
def full(*args, **kwargs):
    raise OSError(28, "no space left on device")
caching.IndexDataCacheFile.save = full
"""

DAMAGED = """
import numba.core.caching as caching, pickle
def damaged(*args, **kwargs):
    raise pickle.UnpicklingError("pickle data was truncated")
caching.IndexDataCacheFile.load = damaged
"""


@pytest.mark.parametrize("fault", [NO_PLACE, WRITE_FAILS, DAMAGED], ids=["no place", "disk full", "damaged"])
def test_cfg_02_the_compile_cache_is_optional(tmp_path: Path, fault: str) -> None:
    """CFG-02: nowhere to store machine code, or no way to store or load it: compile in memory."""
    done = run_script(fault + CFG_02, env={"NUMBA_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert done.stderr == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_cfg_02_a_user_who_may_write_nowhere() -> None:
    """CFG-02: read-only site-packages, HOME unset, user 2000."""
    nobody: dict[str, Any] = {"user": 2000, "group": 2000, "extra_groups": [], "cwd": "/"}
    try:
        may_read = run_script("import numba, lightning_tieroffload", **nobody).returncode == 0
    except PermissionError:
        may_read = False
    if not may_read:
        pytest.skip("user 2000 may not read this Python installation")
    done = run_script(CFG_02, **nobody)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout


def test_machine_code_is_stored_and_a_changed_building_block_makes_it_anew(tmp_path: Path) -> None:
    """Numba watches only the file of the kernel itself; the digest watches the files it is built from."""
    package = tmp_path / "lightning_tieroffload"
    (package / "kernels").mkdir(parents=True)
    source = REPO / "lightning_tieroffload"
    for name in ("__init__.py", "errors.py", *(f"kernels/{p.name}" for p in (source / "kernels").glob("*.py"))):
        (package / name).write_bytes((source / name).read_bytes() if name != "__init__.py" else b"")
    env = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "stored")}

    def num_stored() -> int:
        return len(list((tmp_path / "stored").rglob("*split_slice*.nbc")))

    for _ in range(2):
        assert run_script(CFG_02, env=env).returncode == 0
        assert num_stored() == 1
    primitives = package / "kernels" / "primitives.py"
    text = primitives.read_text()
    assert "(uint32(0x7FFF) +" in text
    primitives.write_text(text.replace("(uint32(0x7FFF) +", "(uint32(0x17FFF) +"))
    assert "AssertionError" in run_script(CFG_02, env=env).stderr  # the new rounding, not the old machine code
    assert num_stored() == 2


def test_importing_the_registry_imports_neither_torch_nor_numba() -> None:
    script = (
        "import sys, lightning_tieroffload.kernels.registry;"
        "print([m for m in ('torch', 'numba', 'triton') if m in sys.modules])"
    )
    assert run_script(script).stdout.strip() == "[]"


def test_adam_counts_from_the_step_it_makes() -> None:
    """The first step's bias correction makes the step lr in size, whatever the gradient."""
    master, grad = np.zeros(16, np.float32), np.full(16, 123.0, np.float32)
    states = {"exp_avg": np.zeros(16, np.float32), "exp_avg_sq": np.zeros(16, np.float32)}
    kernel = registry.find_kernel(torch.optim.AdamW, ADAMW_GROUP, torch.float32)
    assert kernel is not None
    with KernelPool(1) as kernel_pool:
        kernel.run(kernel_pool, master, grad, states, step=1, group=ADAMW_GROUP)
    assert master == pytest.approx(-ADAMW_GROUP["lr"], rel=1e-5)
    assert adam.adam_scalars(
        lr=1.0, betas=(0.5, 0.75), eps=0.0, weight_decay=0.0, step=2, decoupled=True
    ).negative_step == np.float32(-1 / 0.75)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's thread affinity")
def test_mpr_04_threads_stay_on_the_cpus_that_they_are_given() -> None:
    """MPR-04: update threads run where they are told, and nobody else's affinity changes."""
    mine = os.sched_getaffinity(0)
    cpu = min(mine)
    seen: list[set[int]] = []
    with KernelPool(2, cpus=frozenset({cpu})) as pool:
        pool.run(lambda begin, end: seen.append(os.sched_getaffinity(0)), 8192)
    assert seen
    assert all(cpus == {cpu} for cpus in seen)
    assert os.sched_getaffinity(0) == mine


def test_what_work_refers_to_is_free_when_the_job_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is late to let go of a job would count as a user of the optimizer state that it updated."""
    finish = pool._Crew._finish
    late = threading.Event()

    def finish_late(crew: Any, job: Any, error: BaseException | None) -> None:
        finish(crew, job, error)
        late.wait(WAIT_S)

    monkeypatch.setattr(pool._Crew, "_finish", finish_late)
    with KernelPool(3) as kernel_pool:
        for fails in (False, True):
            late.clear()
            array = np.zeros(3 * pool.SLICE_MULTIPLE * pool._SLICES_PER_THREAD, np.float32)
            alive = weakref.ref(array)

            def work(begin: int, end: int, array: Any = array, fails: bool = fails) -> None:
                if fails:
                    raise ZeroDivisionError
                array[begin:end] += 1

            future = kernel_pool.submit(work, len(array))
            error = future.exception(WAIT_S)
            assert isinstance(error, ZeroDivisionError) == fails
            del work, array, error, future
            assert fails or alive() is None  # the traceback of an error has the frame that failed
            late.set()
