"""Other ways to differentiate, run and look at a model than one backward a step: plain and ours, bit by bit."""

from __future__ import annotations

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
from torch.utils.flop_counter import FlopCounterMode

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
