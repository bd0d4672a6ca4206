"""Numbers: every case of kind NUM that needs no flash, as one training function run plain and under the engine.

Each test names its case. `exactness.check` compares every parameter, buffer, optimizer-state tensor, logged number and
random generator by bit pattern after each step; the slow store (virtual delays, NaN-poisoned reuse) is in its variants.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from exactness import (
    FULL,
    POISON,
    QUICK,
    SLOW,
    Variant,
    attach,
    check,
    run,
    same_bits,
    starved,
    tight,
)
from fakes import adamw_gpt, batches, gpt_steps, gpt_tiny, mlp, mlp_loss, steps, token_batches
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_tieroffload.errors import CapacityError, InfeasiblePlanError


def adamw_mlp(depth: int, **settings: Any) -> Any:
    def build() -> Any:
        model = mlp(depth)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)

    return build


def mlp_steps(num_steps: int) -> Any:
    return steps(mlp_loss, num_steps)


# ---------------------------------------------------------------- NUM-02


# Nothing put off or poisoned, as in a real run; and one thing at a time.
OTHER = [
    Variant(frozenset(), prefetch=2, every_look=False, budget="tight"),
    Variant(frozenset({"no_overlap", "poison"}), prefetch=2, every_look=False),
]


def seeds(first: int, count: int) -> list[Variant]:
    """Seeds of the slow store over prefetch depths 1, 2, 4 and both budgets; nobody looks before the end."""
    return [
        Variant(SLOW, prefetch=(1, 2, 4)[s % 3], seed=s, every_look=s % 5 == 0, budget=("starved", "tight")[s % 2])
        for s in range(first, first + count)
    ]


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_num_02_mlp_is_exact_under_the_slow_store(activations: str) -> None:
    """NUM-02: data is never used before its copy has landed, nor memory reused too early. MLP-6, 10 steps."""
    check(adamw_mlp(6), mlp_steps(10), [*FULL, *OTHER, *seeds(0, 6)], activations=activations)


def test_num_02_gpt_is_exact_under_the_slow_store() -> None:
    """NUM-02: the same for GPT-tiny with its tied head."""
    check(adamw_gpt, gpt_steps(5), seeds(0, 4), activations="offload")


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_num_02_twenty_seeds(name: str, prefetch: int) -> None:
    """NUM-02: 20 seeds at each prefetch depth, 10 steps."""
    build, loop = (adamw_mlp(6), mlp_steps(10)) if name == "mlp" else (adamw_gpt, gpt_steps(10))
    variants = [Variant(SLOW, prefetch=prefetch, seed=s, every_look=False) for s in range(20)]
    check(build, loop, variants, activations="offload")


# ---------------------------------------------------------------- NUM-03


class TwoViews(nn.Module):
    """Saves two views of one storage with one address: strides (1, 3) and (3, 1)."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * self.weight
        square = (h @ h.t()).sum() + (self.weight @ self.weight.t()).sum()
        part = (h[:, :2] ** 2).sum() + (self.weight[:, 1:] ** 3).sum()
        if self.in_place:
            h.add_(1.0)
        return square + part


def two_views(in_place: bool) -> Any:
    def build() -> Any:
        model = nn.Sequential(TwoViews(in_place))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    return build


def test_num_03_views_of_one_storage_are_kept_apart() -> None:
    """NUM-03: a transpose and a slice of one storage, of an activation and of a parameter; gradients are exact."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        for x in batches(3, 3, 3):
            x.requires_grad_()
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, input_grad=x.grad)

    check(two_views(False), loop, activations="offload")


@pytest.mark.parametrize("variant", [None, *QUICK], ids=str)
def test_num_03_in_place_after_saving_is_the_usual_error(variant: Variant | None) -> None:
    """NUM-03: an in-place change of a saved tensor is autograd's version error, not a wrong number."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        loss = model(torch.ones(3, 3, requires_grad=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run(two_views(True), loop, variant, activations="offload")


@pytest.mark.parametrize("variant", [None, *QUICK], ids=str)
def test_num_03_step_between_forward_and_backward_is_the_usual_error(variant: Variant | None) -> None:
    """NUM-03: so is a step between forward and backward, for a weight that backward needs."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        mlp_loss(model, batches(1)[0]).backward()
        loss = mlp_loss(model, batches(1)[0])
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run(adamw_mlp(2), loop, variant)


# ---------------------------------------------------------------- NUM-05


class ShapeAware(torch.optim.Optimizer):
    """Uses the parameter's shape and the norm of its whole gradient, and one number over all parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        total = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total += p.grad.norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"] = state.get("mean", torch.zeros_like(p)).lerp(p.grad, 0.3)
                scale = p.shape[0] / (1.0 + p.grad.norm() + total)
                p.add_(state["mean"] / (1e-3 + p.norm(dim=-1, keepdim=True)), alpha=-group["lr"] * float(scale))
        return loss


def test_num_05_muon_on_matrices_adamw_on_the_rest() -> None:
    """NUM-05: optimizers see parameters of true shape: Muon on the weights, AdamW on the biases, 5 steps."""

    def build() -> Any:
        model = mlp(2)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        rest = [p for p in model.parameters() if p.ndim != 2]
        return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]

    def loop(model: nn.Module, optimizers: Any, look: Any) -> None:
        for x in batches(5):
            loss = mlp_loss(model, x)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            look(loss=loss)

    check(build, loop, FULL)


def test_num_05_home_made_optimizer_that_uses_shapes_and_norms() -> None:
    """NUM-05: a home-made optimizer that uses ``p.shape`` and ``p.grad.norm()``."""

    def build() -> Any:
        model = mlp(2)
        return model, ShapeAware(model.parameters(), lr=1e-2)

    check(build, mlp_steps(5), FULL)


# ---------------------------------------------------------------- NUM-06


class Islands(nn.Module):
    """A bf16 Linear, an fp32 LayerNorm, a non-persistent fp32 buffer and an int64 one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16)
        self.scale64 = nn.Parameter(torch.randn(16, dtype=torch.float64))
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(16) / 16.0), persistent=False)
        self.register_buffer("count", torch.tensor(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.linear.weight.dtype == torch.bfloat16
        assert self.inv_freq.dtype == torch.float32
        self.count += 1
        h = self.norm(x) * (self.count * self.inv_freq).cos()
        return x + self.linear(h.bfloat16()).float() * self.scale64.float()


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()]}


def test_num_06_no_dtype_is_ever_changed() -> None:
    """NUM-06: dtypes of all parameters and buffers are the same before, during and after."""

    def build() -> Any:
        model = nn.Sequential(Islands(), Islands(), nn.Linear(16, 1))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    seen: list[dict[str, torch.dtype]] = []

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        for x in batches(3, 4, 16):
            loss = mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(dtypes(model))
            look(loss=loss, grad_dtypes=str([p.grad for p in model.parameters()]))

    check(build, loop, FULL)
    assert all(each == dtypes(build()[0]) for each in seen)


# ---------------------------------------------------------------- NUM-07


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_num_07_clipping_by_norm(norm_type: float) -> None:
    """NUM-07: MLP-8, clipping by norm with accumulation 2, 5 steps; the logged norm is torch's, bit for bit."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        data = batches(10)
        for step in range(5):
            for x in data[2 * step : 2 * step + 2]:
                (mlp_loss(model, x) / 2).backward()
            norm = clip_grad_norm_(model.parameters(), 1e-3, norm_type=norm_type)
            optimizer.step()
            optimizer.zero_grad()
            look(norm=norm)

    check(adamw_mlp(8), loop, [FULL[0], FULL[2], FULL[3]])


def test_num_07_clipping_by_value() -> None:
    """NUM-07: clipping by value, with accumulation 2."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        data = batches(10)
        for step in range(5):
            for x in data[2 * step : 2 * step + 2]:
                (mlp_loss(model, x) / 2).backward()
            clip_grad_value_(model.parameters(), 1e-4)
            optimizer.step()
            optimizer.zero_grad()
            look()

    check(adamw_mlp(8), loop, [FULL[0], FULL[2], FULL[3]])


def test_num_07_clipping_twice_then_accumulating_then_value() -> None:
    """NUM-07: orders that ordered factors must survive: clip, clip again, backward again, clip by value, read."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        for a, b in zip(batches(3), batches(3, seed=2), strict=True):
            mlp_loss(model, a).backward()
            norms = [clip_grad_norm_(model.parameters(), limit) for limit in (1e-2, 1e-3)]
            mlp_loss(model, b).backward()
            norms.append(clip_grad_norm_(list(model.parameters())[::2], 5e-3))
            clip_grad_value_(model.parameters(), 1e-4)
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-4, norms[-1])
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            look(norms=norms)

    check(adamw_mlp(3), loop, FULL)


@pytest.mark.parametrize("variant", [None, *QUICK], ids=str)
def test_num_07_nan_gradient_with_error_if_nonfinite(variant: Variant | None) -> None:
    """NUM-07: a NaN gradient with ``error_if_nonfinite=True`` raises as plain does and leaves parameters untouched."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        mlp_loss(model, batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        (mlp_loss(model, batches(1)[0]) * float("nan")).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
        assert all(p.grad.isnan().all() for p in model.parameters())

    run(adamw_mlp(2), loop, variant)


def hf_dataset(num_samples: int) -> list[dict[str, torch.Tensor]]:
    """Samples of unequal numbers of labels: the first ones of each are masked."""
    samples = []
    for index, ids in enumerate(token_batches(num_samples, rows=1, length=12)):
        labels = ids[0].clone()
        labels[: index + 1] = -100
        samples.append({"input_ids": ids[0], "labels": labels})
    return samples


def hf_loop(tmp_path: Any, **arguments: Any) -> Any:
    """The loop of a real ``transformers.Trainer``; logs what its log history holds."""
    import transformers

    class Look(transformers.TrainerCallback):
        def __init__(self, look: Any) -> None:
            self.look = look

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.look(step=state.global_step)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        settings = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], logging_steps=1, save_strategy="no",
            disable_tqdm=True, per_device_train_batch_size=1, seed=3, learning_rate=5e-5, **arguments,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=settings, train_dataset=hf_dataset(7), optimizers=(optimizer, None),
            callbacks=[Look(look)],
        )  # fmt: skip
        trainer.train()
        keys = ("loss", "grad_norm", "learning_rate", "step", "train_loss")
        look(history=[{k: entry[k] for k in keys if k in entry} for entry in trainer.state.log_history])

    return loop


def adamw_gpt_slow_lr() -> Any:
    model = gpt_tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=5e-5)


def test_num_07_and_09_hf_trainer(tmp_path: Any) -> None:
    """NUM-09: HF Trainer, unequal label counts, accumulation 3: 3 steps an epoch, exact. NUM-07: max_grad_norm 0.5."""
    loop = hf_loop(tmp_path, gradient_accumulation_steps=3, num_train_epochs=2, max_grad_norm=0.5)
    plain, _ = check(adamw_gpt_slow_lr, loop, [QUICK[0]])
    history = [entry for key, entry in plain.looks[-1].items() if key.endswith("/learning_rate")]
    assert len(plain.looks) == 6 + 1
    assert history[:3] == pytest.approx([5e-5, 5e-5 * 5 / 6, 5e-5 * 4 / 6])


# ---------------------------------------------------------------- NUM-08


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("through", ["optimizer", "module"])
@pytest.mark.parametrize("reads", ["reads", "no reads"])
def test_num_08_a_consumed_gradient_is_not_added_again(set_to_none: bool, through: str, reads: str) -> None:
    """NUM-08: two windows of two micro-batches; after zero_grad gradients are None, or zeros of the right shape."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        def grads(place: str) -> dict[str, Any]:
            if reads == "no reads":
                return {}
            return {
                f"{place}.{n}": None if p.grad is None else p.grad.detach().clone() for n, p in model.named_parameters()
            }

        data = batches(4)
        for window in range(2):
            seen = {}
            for micro, x in enumerate(data[2 * window : 2 * window + 2]):
                mlp_loss(model, x).backward()
                seen |= grads(f"after backward {micro}")
            optimizer.step()
            seen |= grads("after step")
            (optimizer if through == "optimizer" else model).zero_grad(set_to_none=set_to_none)
            cleared = grads("after zero_grad")
            for value in cleared.values():
                assert (value is None) == set_to_none
                assert value is None or not value.any()
            look(**seen, **cleared)

    check(adamw_mlp(2), loop, FULL if reads == "reads" else QUICK)


# ---------------------------------------------------------------- NUM-10


def test_num_10_a_skipped_step_is_the_scalers_own() -> None:
    """NUM-10: step 2 has an infinite gradient in one parameter: nothing moves, the scale halves, step 3 is exact."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        for step, x in enumerate(batches(4)):
            with torch.autocast("cpu", dtype=torch.float16):
                out = model(x.clamp(-1, 1))
            loss = (out.float() ** 2).mean()
            if step == 1:
                loss = loss + model[4].bias.sum() * 1e38
            before = {name: value.clone() for name, value in model.state_dict().items()}
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 1:
                assert scaler.get_scale() == 32768.0
                assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
            look(loss=loss, norm=norm, scale=scaler.get_scale())

    check(adamw_mlp(3), loop, FULL)


def test_num_10_scaler_without_unscale_and_with_a_hand_made_infinity() -> None:
    """NUM-10: the scaler unscales inside step; a user writes the infinity into ``p.grad``."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step, x in enumerate(batches(5)):
            scaler.scale(mlp_loss(model, x)).backward()
            if step == 2:
                model[0].weight.grad[3, 4] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            look(scale=scaler.get_scale())

    check(adamw_mlp(2, fused=True), loop, FULL)


# ---------------------------------------------------------------- NUM-11


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_num_11_random_generators_are_the_users_own(use_reentrant: bool) -> None:
    """NUM-11: GPT-tiny with dropout .1 and gradient checkpointing: exact, and all generators stand where plain's do."""

    def build() -> Any:
        model = gpt_tiny(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        model.train()
        for ids in token_batches(3):
            random.random(), np.random.rand()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(build, loop)


# ---------------------------------------------------------------- NUM-12


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](torch.tanh(self.stem(x)))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_num_12_no_gradient_is_not_a_zero_gradient(name: str, set_to_none: bool) -> None:
    """NUM-12: batch parity selects the branch; unused parameters have ``grad is None`` and do not move."""

    def build() -> Any:
        model = TwoBranches()
        if name == "adamw":
            return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(4, 4, 8)):
            (model(x, step % 2) ** 2).mean().backward()
            none = [n for n, p in model.named_parameters() if p.grad is None] if step == 1 else []
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            look(none=none, entries=sorted(str(p.shape) for p in optimizer.state))
        assert model.branches[2].weight not in optimizer.state

    check(build, loop, FULL)


def test_num_12_the_checked_values() -> None:
    """NUM-12: AdamW moves for a zero gradient and has no state without one; SGD's momentum stands still without one."""
    for variant in (None, *QUICK):
        values: list[float] = []

        def build() -> Any:
            model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
            for p in model.parameters():
                nn.init.ones_(p)
            adamw = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
            return model, [adamw, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]

        def loop(model: Any, optimizers: Any, look: Any, values: list[float] = values) -> None:
            adamw, sgd = optimizers
            first, second = model.parameters()
            first.grad = torch.zeros(1, 1)
            adamw.step()
            assert second not in adamw.state
            values.extend([first.item(), second.item()])
            for grad in (torch.ones(1, 1), None, torch.zeros(1, 1)):
                second.grad = grad
                first.grad = None
                sgd.step()
                values.append(second.item())

        run(build, loop, variant)
        assert values == pytest.approx([0.95, 1.0, 0.9, 0.9, 0.81])


def test_facts_of_the_table_hold_under_the_engine() -> None:
    """V3: 16-bit gradients accumulate in 16 bits. V20: AdamW on complex numbers. V4: the norm of norms."""
    for variant in (None, *QUICK):

        def build() -> Any:
            model = nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.bfloat16), nn.Linear(1, 1, bias=False))
            model[1].weight = nn.Parameter(torch.ones(1, 1, dtype=torch.complex64))
            return model, torch.optim.AdamW([model[1].weight], lr=0.1, weight_decay=0.0)

        def loop(model: Any, optimizer: Any, look: Any) -> None:
            for grad in (1.0, 2**-9, 2**-9, 2**-9):
                (model[0].weight * torch.tensor(grad, dtype=torch.bfloat16)).sum().backward()
            assert model[0].weight.grad.item() == 1.0
            (model[1].weight.abs() ** 2).sum().backward()
            optimizer.step()
            assert model[1].weight.item() == pytest.approx(0.9 + 0j)
            assert optimizer.state[model[1].weight]["exp_avg"].dtype == torch.complex64

        run(build, loop, variant)

    def eight() -> Any:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), None

    def norms(model: Any, _: Any, look: Any) -> None:
        mlp_loss(model, batches(1)[0]).backward()
        norm = clip_grad_norm_(model.parameters(), 1e9)
        flat = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        look(norm=norm, flat=flat)

    plain, _ = check(eight, norms, FULL)
    assert plain.looks[0]["log/norm"] == pytest.approx(float(plain.looks[0]["log/flat"]), rel=1e-5)


# ---------------------------------------------------------------- NUM-13


def test_num_13_every_parameter_changes_as_in_plain() -> None:
    """NUM-13: three groups of 1, 5 and 2 tensors of odd sizes, SGD with lr 1, 3 steps: no slice is off by one."""

    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tensors = nn.ParameterList(torch.randn(n) for n in (7, 1001, 3, 1, 129, 4097, 15, 17))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(((t * x) ** 2).sum() for t in self.tensors)  # type: ignore[return-value]

    def build() -> Any:
        model = Sizes()
        params = list(model.parameters())
        groups = [
            {"params": params[:1]},
            {"params": params[1:6], "lr": 0.5},
            {"params": params[6:], "momentum": 0.9, "nesterov": True},
        ]
        return model, torch.optim.SGD(groups, lr=1.0)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        before = [p.detach().clone() for p in model.parameters()]
        for x in batches(3, 1):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = [p.detach().clone() for p in model.parameters()]
            look(change=[b - a for a, b in zip(before, after, strict=True)])
            before = after

    check(build, loop, FULL)


# ---------------------------------------------------------------- NUM-14


@pytest.mark.parametrize("limit_nbytes", [4, 64, 4096, 1 << 16])
def test_num_14_sizes_around_internal_limits(limit_nbytes: int) -> None:
    """NUM-14: one parameter one element below, at and above a limit: cache line, page, arena granularity."""
    for extra in (-1, 0, 1):
        numel = limit_nbytes // 4 + extra
        if numel < 1:
            continue

        def build(numel: int = numel) -> Any:
            model = nn.Sequential(nn.Linear(numel, 1, bias=False))
            return model, torch.optim.Adam(model.parameters(), lr=0.1)

        def loop(model: Any, optimizer: Any, look: Any, numel: int = numel) -> None:
            for x in batches(2, 2, numel):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                look()

        check(build, loop, [Variant(POISON, budget="tight"), Variant(SLOW, budget="tight", every_look=False)])


def test_num_14_the_smallest_device_budget_is_exact_and_one_byte_less_is_an_error() -> None:
    """NUM-14: the DEVICE budget at its limit trains exactly; below it there is one clear error at set-up."""
    least = tight(mlp(4))
    assert least <= starved(mlp(4))
    check(adamw_mlp(4), mlp_steps(2), [Variant(POISON, budget=least), Variant(SLOW, budget=least + 1)])
    with pytest.raises(InfeasiblePlanError, match=f"smallest device_budget that works is {least} bytes") as caught:
        attach(mlp(4), None, Variant(budget=least - 1))
    assert caught.value.least_budget_nbytes == least


def test_num_14_the_smallest_dram_budget_is_exact_and_one_byte_less_is_an_error() -> None:
    """NUM-14: the DRAM budget at its limit trains exactly; below it there is one clear error before the first step."""
    model, optimizer = adamw_mlp(4)()
    with pytest.raises(InfeasiblePlanError) as caught:
        attach(model, optimizer, Variant(), dram_budget=1)
    after_params = caught.value.least_budget_nbytes
    with pytest.raises(InfeasiblePlanError) as caught:
        attach(model, optimizer, Variant(), dram_budget=after_params)
    least = caught.value.least_budget_nbytes
    assert least is not None
    with pytest.raises(CapacityError, match=f"smallest dram_budget that works is {least} bytes"):
        attach(model, optimizer, Variant(), dram_budget=least - 1)
    _, ours = check(adamw_mlp(4), mlp_steps(2), QUICK, dram_budget=least)
    for recording in ours:
        account = recording.reports[0]["tiers"]["dram"]
        assert account["peak_nbytes"] <= account["budget_nbytes"]
