"""Backward that runs after a step, or another write, which came behind its forward: autocast's casts are old then."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import FULL, QUICK, SLOW, Variant, assert_within_budget, attach, check, run, seed_all
from fakes import Block, batches
from test_nvme_tier import least_dram
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_tieroffload.concepts import Tier

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.bfloat16, torch.float16]


class Layers(nn.Module):
    """Linear layers that feed a residual stream; nothing but autocast's casts is saved of their weights."""

    def __init__(self, num_layers: int = 4, width: int = 16, num_inner: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(num_layers)
        )
        self.checkpoints: bool | None = None  # how: use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            out = block(x) if self.checkpoints is None else checkpoint(block, x, use_reentrant=self.checkpoints)
            x = x + out
        return x


def build_of(make: Callable[[], nn.Module], how: Any = torch.optim.AdamW) -> Any:
    def build() -> Any:
        model = make()
        return model, how(model.parameters(), lr=1e-2)

    return build


def loss_of(model: Any, x: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    with torch.autocast("cpu", dtype):
        return model(x).float().pow(2).mean()


def one_late(dtype: torch.dtype, num_micro: int = 1) -> Any:
    """Each step's forward runs before the step of the one before."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        is_first = True
        for x in batches(6, 8, 16):
            losses = [loss_of(model, part, dtype) for part in x.chunk(num_micro)]
            if not is_first:
                optimizer.step()
                optimizer.zero_grad()
            is_first = False
            for loss in losses:
                (loss / num_micro).backward()
            look(loss=losses[0])

    return loop


def pipelined(model: Any, optimizer: Any, look: Any) -> None:
    """Three batches in flight, a step behind each backward: two steps lie between a forward and its backward."""
    pending: deque[torch.Tensor] = deque()
    for x in batches(8, 8, 16):
        pending.append(loss_of(model, x))
        if len(pending) == 3:
            loss = pending.popleft()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)


def slow_but(quick: list[Any], every: list[Any]) -> list[Any]:
    """Values for a test, of which those that tell most are part of the default run."""
    assert all(each in every for each in quick)
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=() if each in quick else pytest.mark.slow)
        for each in every
    ]


LATE_VARIANTS = [QUICK[1], FULL[0]]
MANY_VARIANTS = [*FULL, *(Variant(SLOW, prefetch=4, seed=i, every_look=False, budget="tight") for i in range(3, 9))]


@pytest.mark.parametrize(
    ("num_micro", "dtype"),
    slow_but([(1, torch.bfloat16), (2, torch.float16)], [(num, dtype) for num in (1, 2) for dtype in DTYPES]),
)
def test_backward_behind_the_step_of_the_batch_before(dtype: torch.dtype, num_micro: int) -> None:
    check(build_of(Layers), one_late(dtype, num_micro), LATE_VARIANTS)


def test_three_batches_in_flight() -> None:
    check(build_of(Layers), pipelined, LATE_VARIANTS)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["auto", "offload", "recompute"])
@pytest.mark.parametrize("loop", [one_late(torch.bfloat16, 2), one_late(torch.float16), pipelined])
def test_late_backward_under_many_seeds(loop: Any, activations: str) -> None:
    check(build_of(Layers), loop, MANY_VARIANTS, activations=activations)


def test_late_backward_with_homes_on_flash(tmp_path: Path) -> None:
    least_nbytes = least_dram(build_of(Layers), tmp_path, state_home="nvme")
    for budget in (least_nbytes + 65536, "1GiB"):
        settings = {"nvme_paths": [str(tmp_path)], "state_home": "nvme", "dram_budget": budget}
        check(build_of(Layers), pipelined, LATE_VARIANTS, **settings)


def test_late_backward_with_the_kernels() -> None:
    """Our own kernels are not the plain run's bits; close to them all the same."""
    plain = run(build_of(Layers), pipelined)
    ours = run(build_of(Layers), pipelined, QUICK[1], num_expected=len(plain.looks), optimizer_kernel="numba")
    for before, after in zip(plain.looks, ours.looks, strict=True):
        torch.testing.assert_close(before["log/loss"], after["log/loss"], rtol=1e-2, atol=1e-3)


def test_late_backward_with_a_gradient_scaler() -> None:
    """fp16 with GradScaler, whose first steps overflow and are skipped; clipped too."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
        pending = None
        for x in batches(12, 8, 16):
            loss = loss_of(model, x, torch.float16)
            if pending is not None:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                look(loss=loss, norm=norm, scale=scaler.get_scale())
            scaler.scale(loss).backward()
            pending = loss

    plain, _ = check(build_of(Layers), loop, LATE_VARIANTS)
    assert plain.looks[0]["log/scale"] > plain.looks[-1]["log/scale"]


def test_old_casts_are_counted_and_go_with_their_graph() -> None:
    """On the device and in DRAM; where DRAM has no room the error says so, and a loop that is not late needs none."""
    seed_all(0)
    model, optimizer = build_of(Layers)()
    engine = attach(model, optimizer, QUICK[0])
    space = engine.space
    x = torch.ones(4, 16)
    for _ in range(2):
        loss_of(model, x).backward()
        optimizer.step()
    assert not any(unit._old_parts for unit in space.units)
    loss = loss_of(model, x)
    optimizer.step()
    olds = [part for unit in space.units for part in unit._old_parts.values()]
    assert len(olds) == 4
    assert engine.core.activations.mapped_nbytes() >= sum(part.nbytes for part in olds)
    loss.backward(retain_graph=True)
    assert any(part.is_resident for part in olds)
    charged_nbytes = sum(part.charged_nbytes for unit in space.units for part in unit.all_parts)
    assert space.ledger[Tier.DEVICE].used_nbytes == charged_nbytes
    assert_within_budget(engine)
    arenas = engine.core.activations._arenas
    assert sum(arena.used_nbytes for arena in arenas) > 0
    del loss, olds
    gc.collect()
    assert not any(unit._old_parts for unit in space.units)
    assert sum(arena.used_nbytes for arena in arenas) == 0
    loss = loss_of(model, x)
    space.lend_host = lambda _: None
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*dram_budget has no room"):
        loss.backward()
    engine.close()


def test_late_backward_after_close() -> None:
    """What was kept before close() serves a graph that comes to its backward after it."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 8, 16):
            loss = loss_of(model, x)
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
        look.close()
        loss.backward()
        look(grads=[p.grad for p in model.parameters()])

    check(build_of(Layers), loop, QUICK)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_compute_with_the_new_weights(use_reentrant: bool) -> None:
    def make() -> nn.Module:
        model = Layers()
        model.checkpoints = use_reentrant
        return model

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 8, 16):
            loss = loss_of(model, x.requires_grad_())
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
            look(loss=loss)

    check(build_of(make), loop, LATE_VARIANTS)


class Adversaries(nn.Module):
    """A generator and a discriminator that train each other."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = Layers(2), Layers(3)


def adversaries() -> Any:
    model = Adversaries()
    return model, [torch.optim.AdamW(half.parameters(), lr=1e-2) for half in (model.maker, model.judge)]


def judged_before_the_judge_steps(model: Any, optimizers: Any, look: Any) -> None:
    """The judge's step lies between the maker's forward, through the judge, and the maker's backward."""
    of_maker, of_judge = optimizers
    for x in batches(5, 8, 16):
        with torch.autocast("cpu", torch.bfloat16):
            made = model.maker(x)
            maker_loss = model.judge(made).float().mean()
            judge_loss = (model.judge(x) - model.judge(made.detach())).float().pow(2).mean()
        judge_loss.backward()
        of_judge.step()
        of_judge.zero_grad()
        maker_loss.backward()
        of_maker.step()
        of_maker.zero_grad()
        look(maker=maker_loss, judge=judge_loss)


def two_share_a_forward(model: Any, optimizers: Any, look: Any) -> None:
    of_maker, of_judge = optimizers
    for x in batches(5, 8, 16):
        with torch.autocast("cpu", torch.bfloat16):
            shared = model.maker(x)
            first, second = shared.float().pow(2).mean(), model.judge(shared).float().abs().mean()
        first.backward(retain_graph=True)
        of_maker.step()
        of_maker.zero_grad()
        second.backward()
        of_judge.step()
        of_maker.step()
        of_judge.zero_grad()
        of_maker.zero_grad()
        look(first=first, second=second)


@pytest.mark.parametrize("loop", [judged_before_the_judge_steps, two_share_a_forward])
def test_two_optimizers(loop: Any) -> None:
    check(adversaries, loop, LATE_VARIANTS)


def _write(how: str, model: Any, optimizer: Any, step: int) -> None:
    with torch.no_grad():
        if how == "mul_":
            for p in model.parameters():
                p.mul_(1.01)
        elif how == "foreach":
            torch._foreach_add_(list(model.parameters()), 0.01)
        elif how == "copy_":
            for p in model.parameters():
                p.copy_(torch.full_like(p, 0.01 * step))
        elif how == "data":
            for p in model.parameters():
                p.data = p.data * 1.01
        elif how == "data.mul_":
            for p in model.parameters():
                p.data.mul_(1.01)
        elif how == "load":
            model.load_state_dict({k: v * 1.01 for k, v in model.state_dict().items()})
        elif how == "one":
            model.blocks[1][0].weight.add_(0.01)
        elif how == "home-made":
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)


WRITES = ["mul_", "foreach", "copy_", "data", "data.mul_", "load", "one", "home-made"]


@pytest.mark.parametrize(
    ("how", "is_inside"),
    slow_but(
        [("foreach", True), ("data", True), ("data.mul_", False), ("load", False), ("one", True)],
        [(how, is_inside) for how in WRITES for is_inside in (False, True)],
    ),
)
def test_weights_written_between_forward_and_backward(how: str, is_inside: bool) -> None:
    """By the user, in or out of autocast's context; backward goes on with the casts that forward made."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(5, 8, 16)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().pow(2).mean()
                if is_inside:
                    _write(how, model, optimizer, step)
            if not is_inside:
                _write(how, model, optimizer, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(build_of(Layers), loop, LATE_VARIANTS)


@pytest.mark.parametrize(
    ("how", "autocast"),
    slow_but(
        [("data.mul_", False), ("step", True), ("held", True)],
        [("data.mul_", False), *((how, True) for how in ("step", "copy_", "data", "data.mul_", "load", "held"))],
    ),
)
def test_a_recomputed_unit_is_run_again_before_its_weights_change(how: str, autocast: bool) -> None:
    """Its activations were dropped while loops were not late; without autocast only a table is written to."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(8, 8, 16)):
            held = [p.data for p in model.parameters()] if how == "held" and step == 6 else []
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x).float().pow(2).mean()
            for values in held:
                values.mul_(1.01)
            if step > 4 and how == "step":
                optimizer.step()
            elif step > 4:
                _write(how, model, optimizer, step)
            del held
            loss.backward()
            optimizer.step()
            if step < 4:
                optimizer.zero_grad()
            look(loss=loss)

    check(build_of(Layers), loop, LATE_VARIANTS, activations="recompute")


@pytest.mark.parametrize("how", slow_but(["LBFGS", "SAM"], ["Adagrad", "LBFGS", "ASGD", "SAM"]))
def test_other_optimizers(how: str) -> None:
    """One that steps over all parameters at once, and some that run unit by unit."""

    class Sam(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.add_(p.grad, alpha=0.01)
            super().step()

    cls = Sam if how == "SAM" else getattr(torch.optim, how)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        before = None
        for x in batches(5, 8, 16):
            loss = loss_of(model, x)
            if before is not None:
                optimizer.step(lambda: torch.zeros(())) if how == "LBFGS" else optimizer.step()
                optimizer.zero_grad()
            loss.backward()
            before = loss
            look(loss=loss)

    check(build_of(Layers, cls), loop, QUICK)


def test_a_retained_graph_and_a_graph_of_the_gradient() -> None:
    """The same graph backward twice with a step in between, and a penalty on gradients that come behind a step."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(5, 8, 16):
            x.requires_grad_()
            loss = loss_of(model, x)
            loss.backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            optimizer.step()
            grad.pow(2).mean().backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, grad=grad)

    check(build_of(Layers), loop, LATE_VARIANTS)


def test_where_saved_tensor_hooks_are_forbidden() -> None:
    """What autograd itself holds of a cast is no view of what comes later."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        is_first = True
        for x in batches(6, 8, 16):
            with torch.autograd.graph.disable_saved_tensors_hooks("the test's own"):
                loss = loss_of(model, x)
            if not is_first:
                optimizer.step()
                optimizer.zero_grad()
            is_first = False
            loss.backward()
            look(loss=loss)

    check(build_of(Layers), loop, LATE_VARIANTS, device_budget=1 << 20)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_without_autocast(use_reentrant: bool) -> None:
    """Without autocast, too, a checkpointed block is run again with the weights of the moment."""

    def make() -> nn.Module:
        model = nn.Sequential(*[Block(16, 16) for _ in range(3)])

        def checkpointed(x: torch.Tensor) -> torch.Tensor:
            for block in model:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

        model.forward = checkpointed
        return model

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 8, 16):
            loss = model(x.requires_grad_()).pow(2).mean()
            optimizer.step()
            optimizer.zero_grad()
            loss.backward()
            look(loss=loss)

    check(build_of(make), loop, LATE_VARIANTS)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_that_is_saved_as_it_is_fails_as_in_plain_torch(autocast: bool) -> None:
    """Layer norm's weight is no cast; neither is any weight without autocast."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 8, 16):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(x).float().pow(2).mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            loss.backward()

    build = build_of(lambda: nn.Sequential(*[Block(16, 16) for _ in range(3)]))
    match = "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=match):
        run(build, loop)
    with pytest.raises(RuntimeError, match=match):
        run(build, loop, QUICK[0])


@pytest.mark.parametrize("how", slow_but(["step", "copy_", "home-made"], [*WRITES, "step"]))
def test_autocasts_context_goes_on_with_the_casts_that_it_began_with(how: str) -> None:
    """Whatever is written in it; and gradients of uses before and after the write meet at the one cast, in 16 bits."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 8, 16)):
            with torch.autocast("cpu", torch.bfloat16):
                first = model(x).float().pow(2).mean()
                if step > 1:
                    optimizer.step() if how == "step" else _write(how, model, optimizer, step)
                second = model(x + 1).float().pow(2).mean()
                with torch.no_grad():
                    third = model(x - 1)
            (first + second).backward()
            optimizer.step()
            if how != "step":
                optimizer.zero_grad()
            look(loss=second, first=first, third=third)

    check(build_of(Layers), loop, LATE_VARIANTS)


@pytest.mark.parametrize(
    ("how", "order"),
    slow_but(
        [("in fp32", "last first"), ("penalty", "cleared in between")],
        [(how, o) for how in ("in fp32", "penalty") for o in ("as they came", "last first", "cleared in between")],
    ),
)
def test_two_graphs_of_which_one_uses_weights_in_full(how: str, order: str) -> None:
    """The gradient of a graph that is no cast's alone does not fit 16 bits, whichever backward comes before it."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(7, 8, 16)):
            one, two = loss_of(model, x), loss_of(model, x + 1)
            if step > 2 and how == "penalty":
                two = two + sum(p.pow(2).sum() for p in model.parameters())
            elif step > 2:
                two = two + model(x + 2).pow(2).mean()
            first, second = (two, one) if order == "last first" else (one, two)
            first.backward()
            if order == "cleared in between":
                optimizer.zero_grad()
            elif order == "last first":
                optimizer.step()
                optimizer.zero_grad()
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(one=one, two=two)

    check(build_of(Layers), loop, LATE_VARIANTS)
