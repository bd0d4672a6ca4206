"""Other ways to differentiate, run and look at a model than one backward a step: plain and ours, bit by bit."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from exactness import POISON, SLOW, Variant, check
from fakes import Stack, batches
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from lightning_tieroffload import engine_of, offload

VARIANTS = [
    Variant(POISON, budget="tight"),
    Variant(SLOW, prefetch=2, seed=1, every_look=False, budget="tight"),
]


def build() -> Any:
    model = Stack(4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loop_with(extra: Callable[[Any, torch.Tensor], Any]) -> Any:
    """An ordinary loop in which ``extra(model, x)`` is computed and logged before each step."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 4, 24):
            logged = extra(model, x)
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, extra=logged)

    return loop


def head(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda y: torch.tanh(model(y)).sum()


def jacobian(model: Any, x: torch.Tensor) -> Any:
    return torch.autograd.functional.jacobian(model, x[0])


def hessian(model: Any, x: torch.Tensor) -> Any:
    return torch.autograd.functional.hessian(head(model), x[0])


def forward_mode(model: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(out).tangent.clone()


def vmap(model: Any, x: torch.Tensor) -> Any:
    return torch.func.vmap(model)(x)


def save_on_cpu(model: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        out = model(x)
    return torch.autograd.grad(out.sum(), [x, *model.parameters()])


def anomaly_detection(model: Any, x: torch.Tensor) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        (model(x) ** 2).mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def mutation_allowed(model: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        (model(x) ** 2).mean().backward()


def profiler(model: Any, x: torch.Tensor) -> Any:
    with torch.profiler.profile():
        return model(x).detach()


def flop_counter(model: Any, x: torch.Tensor) -> Any:
    with FlopCounterMode(display=False) as counter:
        (model(x) ** 2).mean().backward()
    return counter.get_total_flops()


def fx_trace(model: Any, x: torch.Tensor) -> Any:
    return torch.fx.symbolic_trace(model)(x).detach().clone()


def forward_in_another_thread(model: Any, x: torch.Tensor) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: model(x).detach().clone()).result()


def backward_in_another_thread(model: Any, x: torch.Tensor) -> Any:
    thread = threading.Thread(target=(model(x) ** 2).mean().backward)
    thread.start()
    thread.join()
    return [p.grad.clone() for p in model.parameters()]


WAYS = (
    jacobian, hessian, forward_mode, vmap, save_on_cpu, anomaly_detection, mutation_allowed, profiler, flop_counter,
    fx_trace, forward_in_another_thread, backward_in_another_thread,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_other_ways(way: Any) -> None:
    """Each beside an ordinary step, under the least budget."""
    check(build, loop_with(way), VARIANTS)


def test_forwards_in_several_threads_at_once() -> None:
    """Four threads evaluate one model, with room for what is in use at one time."""

    def in_threads(model: Any, x: torch.Tensor) -> Any:
        def evaluate(offset: int) -> torch.Tensor:
            torch.set_num_threads(1)
            with torch.no_grad():
                return model(x + offset).clone()

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(evaluate, range(8)))

    check(
        build, loop_with(in_threads), [Variant(POISON, budget="all"), Variant(SLOW, prefetch=2, seed=3, budget="all")]
    )


FORBIDDEN = {
    "grad": lambda model, x: torch.func.grad(head(model))(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x[0]),
    "hessian": lambda model, x: torch.func.hessian(head(model))(x[0]),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_function_transforms_of_the_model(name: str) -> None:
    """``torch.func`` transforms with the model's own parameters as constants."""
    check(build, loop_with(FORBIDDEN[name]), VARIANTS)


def test_saved_tensor_hooks_forbidden() -> None:
    """A forward in which saved-tensor hooks are forbidden, differentiated later."""

    def forbidden(model: Any, x: torch.Tensor) -> Any:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            out = model(x.clone().requires_grad_())
        return torch.autograd.grad(out.sum(), list(model.parameters()))

    check(build, loop_with(forbidden), VARIANTS)


class Penalised(nn.Module):
    """A layer whose weight is also read past it, by a checkpointed function and around it."""

    def __init__(self, kinds: tuple[bool, ...], where: str) -> None:
        super().__init__()
        self.kinds, self.where = kinds, where
        self.linear = nn.Linear(16, 16)
        self.deep = nn.Linear(16, 16)
        self.register_buffer("count", torch.zeros(()))

    def penalty(self, where: str) -> Any:
        return (self.linear.weight**2).sum() * 1e-2 if where in self.where else 0.0

    def compute(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
        before = self.penalty("before")
        x = torch.tanh(self.linear(x))
        if depth + 1 < len(self.kinds):
            x = checkpoint(self.compute, x, depth + 1, use_reentrant=self.kinds[depth + 1])
        x = self.deep(x) + before
        with torch.no_grad():
            self.count.add_(1)  # not every time: forward that runs again stops when all that was saved is there
        return x + self.penalty("after")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=self.kinds[0]) + self.penalty("outside")


@pytest.mark.parametrize("where", ["before", "after", "before and after", "outside"])
@pytest.mark.parametrize("kinds", [(False,), (True,), (False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_checkpoints_around_weights_that_are_read_past_their_layers(
    kinds: tuple[bool, ...], where: str, is_autocast: bool
) -> None:
    """What a checkpoint counts is the same whatever windows are open, and what it runs again ends where it does."""

    def make() -> Any:
        model = nn.Sequential(*(Penalised(kinds, where) for _ in range(2)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 8, 16):
            for half in x.requires_grad_().chunk(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
                    loss = (model(half).float() ** 2).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(make, loop, VARIANTS)


def test_a_checkpoint_goes_on_after_close() -> None:
    """A graph of checkpoints that was recorded before ``close()`` counts the plain run's tensors after it."""

    def gradients(is_ours: bool) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Penalised((False, False), "before and after") for _ in range(2)))
        if is_ours:
            offload(model, device_budget="1MiB")
        loss = (model(torch.ones(4, 16)) ** 2).mean()
        if is_ours:
            engine_of(model).close()
        loss.backward()
        return [p.grad for p in model.parameters()]

    for expected, actual in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(expected, actual)


class GradientInside(nn.Module):
    """Differentiates through its own layers, and adds what that gives to its output."""

    def __init__(self, create_graph: bool, by: str) -> None:
        super().__init__()
        self.create_graph, self.by = create_graph, by
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = nn.functional.softplus(self.second(torch.tanh(self.first(x)))).float().sum()
        source = x if self.by == "input" else self.first.weight
        (grad,) = torch.autograd.grad(energy, source, create_graph=self.create_graph)
        return self.first(x) + (grad if self.by == "input" else grad.norm()) * 0.1


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", ["input", "weight"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_inside_forward(create_graph: bool, by: str, dtype: Any) -> None:
    """A backward inside a unit's own window reads the other form of its weights, under the least budget too."""

    def make() -> Any:
        model = nn.Sequential(*(GradientInside(create_graph, by) for _ in range(2)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 8, 16):
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = (model(x).float() ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(make, loop, VARIANTS)


def _mm_only(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_mm = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_mm else CheckpointPolicy.PREFER_RECOMPUTE


def _casts_only(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_cast = op is torch.ops.aten._to_copy.default
    return CheckpointPolicy.MUST_SAVE if is_cast else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES: dict[str, Any] = {
    "what multiplies": _mm_only,
    "everything": lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE,
    "rather everything": lambda *args, **kwargs: CheckpointPolicy.PREFER_SAVE,
    "casts": _casts_only,
    "nothing": lambda *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE,
}


class Selective(nn.Module):
    """A selective checkpoint: its dispatch mode keeps what operations returned and numbers them."""

    def __init__(self, policy: str, autocast: str) -> None:
        super().__init__()
        self.contexts = functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])
        self.autocast = autocast
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if self.autocast == "within" else contextlib.nullcontext():
            y = self.second(torch.tanh(self.first(x)))
        return y + (self.first.weight**2).sum() * 1e-2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.compute, x, use_reentrant=False, context_fn=self.contexts)
        after = self.first(x) if self.autocast == "goes on" else 0.0  # by the cast that the checkpoint's mode has seen
        return y + after  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("autocast", "activations"),
    [("none", "keep"), ("around", "keep"), ("around", "recompute"), ("within", "keep"), ("goes on", "recompute")],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpoints_do_not_see_the_engine(policy: str, autocast: str, activations: str) -> None:
    """No operation of the engine's is among those that are kept and found again, and autocast's casts are."""

    def make() -> Any:
        model = nn.Sequential(*(Selective(policy, autocast) for _ in range(2)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 8, 16):
            for half in x.chunk(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast in ("around", "goes on")):
                    loss = (model(half).float() ** 2).mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(make, loop, [*VARIANTS, Variant(POISON, prefetch=4, budget="all")], activations=activations)


class LogsOperations(TorchDispatchMode):
    """All but ``detach``: autograd makes those as who has the gradient leads to."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class LogsFunctions(TorchFunctionMode):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _counts_flops(seen: list[Any]) -> Any:
    with FlopCounterMode(display=False) as mode:
        yield
    seen.append(mode.get_total_flops())


MODES: dict[str, Callable[[list[Any]], Any]] = {
    "operations": LogsOperations,
    "functions": LogsFunctions,
    "flops": _counts_flops,
    "meta": lambda seen: torch.device("meta"),
}


class MakesAShift(nn.Module):
    """Its forward makes a tensor where the default device is, and uses a weight twice."""

    def __init__(self, around: str) -> None:
        super().__init__()
        self.around = around
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.relu(self.first(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.compute(x) if self.around == "nothing" else checkpoint(self.compute, x, use_reentrant=False)
        with torch.device("cpu"):
            shift = torch.ones(16)
        return self.first(y).float() + shift


@pytest.mark.parametrize("around", ["nothing", "a checkpoint"])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("mode", MODES)
def test_modes_of_others_see_what_they_see_plainly(mode: str, where: str, activations: str, around: str) -> None:
    """From the third of five steps to the fourth; what they see is counted, and the numbers are the plain run's."""

    def make() -> Any:
        model = nn.Sequential(*(MakesAShift(around) for _ in range(2)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(5, 8, 16)):
            seen: list[Any] = []

            def around_it(part: str, step: int = step, seen: list[Any] = seen) -> Any:
                is_on = step in (2, 3) and where in (part, "both")
                return MODES[mode](seen) if is_on else contextlib.nullcontext()

            with torch.autocast("cpu", torch.bfloat16), around_it("forward"):
                loss = (model(x).float() ** 2).mean()
            with around_it("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, seen=repr(sorted(seen)))

    check(make, loop, [VARIANTS[0]], activations=activations)


def test_what_runs_again_has_the_default_device_of_its_forward() -> None:
    """Backward has none of its own."""

    class Makes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x) * (2.0 if torch.empty(1).is_meta else 3.0))

    def make() -> Any:
        model = nn.Sequential(*(Makes(16, 16) for _ in range(3)))
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(5, 8, 16)):
            with torch.device("meta") if step in (2, 3) else contextlib.nullcontext():
                loss = (model(x) ** 2).mean()
            with torch.device("meta") if step % 2 else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(make, loop, VARIANTS, activations="recompute")
