"""Optimizers that people write: wrappers, SAM, ones that hold the model, keep gradients, reset their state."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import FULL, POISON, SLOW, Variant, attach, check, run
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_tieroffload.errors import UnsupportedError

WIDTH = 16


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, 4))


def loss_at(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(6, WIDTH, generator=generator), torch.randn(6, 4, generator=generator)
    return (model(x) - y).square().mean()


def train(num_steps: int = 5, after_step: Callable[[int, Any, Any], None] | None = None, **arguments: Any) -> Any:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(num_steps):
            loss = loss_at(model, step)
            loss.backward()
            optimizer.step(**arguments)
            if after_step is not None:
                after_step(step, model, optimizer)
            optimizer.zero_grad()
            look(loss=loss.detach())

    return loop


def built(make: Callable[[nn.Module], Optimizer]) -> Any:
    def build() -> Any:
        model = mlp()
        return model, make(model)

    return build


class HoldsModel(Optimizer):
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.model.parameters():
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class Lookahead(Optimizer):
    """Of the kind that never calls ``Optimizer.__init__`` and shares the inner optimizer's groups and state."""

    def __init__(self, inner: Optimizer, name: str, shares_state: bool) -> None:
        setattr(self, name, inner)
        self.name, self.num_steps = name, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = inner.state if shares_state else defaultdict(dict)
        for key, value in inner.__dict__.items():
            if key.startswith("_optimizer_"):
                setattr(self, key, value)

    def step(self, closure: Any = None) -> Any:
        loss = getattr(self, self.name).step(closure)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if "slow" not in state:
                        state["slow"] = p.data.clone()
                    state["slow"].add_(p.data - state["slow"], alpha=0.5)
                    p.data.copy_(state["slow"])
        return loss


class Sam(Optimizer):
    def __init__(self, params: Any, rho: float = 0.05) -> None:
        super().__init__(params, {"rho": rho, "lr": 0.1, "momentum": 0.9})
        self.base_optimizer = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        for p in params:
            self.state[p]["away"] = p.grad * (0.05 / (norm + 1e-12))
            p.add_(self.state[p]["away"])
        self.zero_grad()
        closure()
        for p in params:
            p.sub_(self.state[p]["away"])
        self.base_optimizer.step()


class PlainSam(Optimizer):
    """Steps by itself, clears gradients and replaces ``p.data`` in the middle."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad, alpha=0.05)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, old in zip(params, before, strict=True):
            p.data = old
            p.sub_(p.grad, alpha=0.1)
            p.grad = p.grad * 2


class KeepsGradient(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.last: list[Any] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, last in zip(params, self.last or [None] * len(params), strict=True):
            previous = self.state[p].get("previous")
            p.add_(p.grad if previous is None else p.grad + 0.5 * previous - 0.1 * last, alpha=-0.1)
            self.state[p]["previous"] = p.grad
        self.last = [p.grad.detach() for p in params]


class OwnZeroGrad(SGD):
    num_calls = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            super().zero_grad(set_to_none)


class Curvature(Optimizer):
    """AdaHessian's kind: differentiates the gradients again inside ``step``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        seconds = torch.autograd.grad([p.grad for p in params], params, [torch.ones_like(p) for p in params])
        with torch.no_grad():
            for p, second in zip(params, seconds, strict=True):
                p.add_(p.grad / (second.abs() + 1), alpha=-0.05)


class Scaled(AdamW):
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(scale)
        return super().step(closure)


class ScaledDescent(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (scale * group["lr"]))


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "holds the model": HoldsModel,
    "lookahead": lambda m: Lookahead(AdamW(m.parameters(), lr=0.02), "optimizer", False),
    "lookahead, one state": lambda m: Lookahead(SGD(m.parameters(), lr=0.1, momentum=0.9), "base", True),
    "lookahead, a name that trainers use": lambda m: Lookahead(AdamW(m.parameters(), lr=0.02), "_optimizer", False),
    "keeps the gradient": lambda m: KeepsGradient(m.parameters()),
    "its own zero_grad": lambda m: OwnZeroGrad(m.parameters(), lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_home_made_optimizers(name: str) -> None:
    check(built(OPTIMIZERS[name]), train(), FULL)


@pytest.mark.parametrize("cls", [Sam, PlainSam])
def test_a_closure_in_the_middle_of_a_home_made_step(cls: Any) -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(4):

            def closure(step: int = step) -> torch.Tensor:
                loss = loss_at(model, step)
                loss.backward()
                return loss

            loss = closure()
            optimizer.step(closure)
            look(loss=loss.detach(), grads=[p.grad for p in model.parameters()])
            optimizer.zero_grad()

    check(built(lambda m: cls(m.parameters())), loop, FULL)


def test_a_step_that_differentiates_its_gradients() -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(3):
            loss = loss_at(model, step)
            loss.backward(create_graph=True)
            optimizer.step()
            for p in model.parameters():
                p.grad = None
            look(loss=loss.detach())

    check(built(lambda m: Curvature(m.parameters())), loop, FULL)


def test_arguments_of_ones_own_and_what_hooks_see() -> None:
    check(built(lambda m: Scaled(m.parameters(), lr=0.02)), train(scale=0.3), FULL)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda o, args, kwargs: (args, {**kwargs, "scale": 0.5}))
        optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append((args[0] is o, len(args), kwargs)))
        train(2, scale=0.1)(model, optimizer, look)
        look(seen=repr(seen))

    check(built(lambda m: ScaledDescent(m.parameters())), loop)


def test_an_argument_that_torchs_class_does_not_take() -> None:
    with pytest.raises(TypeError):
        run(built(lambda m: AdamW(m.parameters())), train(scale=0.3), Variant(POISON))


@pytest.mark.parametrize("cls", [AdamW, Scaled, OwnZeroGrad])
def test_trainers_may_ask_what_a_method_takes(cls: Any) -> None:
    model = mlp()
    optimizer = cls(model.parameters(), lr=0.1)
    expected = [inspect.signature(getattr(optimizer, name)) for name in ("step", "zero_grad")]
    engine = attach(model, optimizer, Variant(POISON))
    try:
        assert [inspect.signature(getattr(optimizer, name)) for name in ("step", "zero_grad")] == expected
    finally:
        engine.close()


RESETS: dict[str, Callable[[Any, Any], None]] = {
    "a new mapping": lambda model, optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "clear": lambda model, optimizer: optimizer.state.clear(),
    "entry by entry": lambda model, optimizer: (
        [optimizer.state.__setitem__(p, {}) for p in model.parameters()] and None
    ),
    "one entry": lambda model, optimizer: optimizer.state.__delitem__(next(model.parameters())),
    "the last entry": lambda model, optimizer: optimizer.state.popitem() and None,
    "initialised again": lambda model, optimizer: optimizer.__init__(model.parameters(), lr=0.01),
    "updated": lambda model, optimizer: optimizer.state.update(
        {p: {k: v * 0.5 if k != "step" else v for k, v in entry.items()} for p, entry in optimizer.state.copy().items()}
    ),
}


@pytest.mark.parametrize("name", RESETS)
def test_state_is_reset_right_after_a_step(name: str) -> None:
    def reset(step: int, model: Any, optimizer: Any) -> None:
        if step == 2:
            RESETS[name](model, optimizer)

    variants = [Variant(POISON), *(Variant(SLOW, seed=seed, every_look=False, budget="tight") for seed in range(3))]
    check(built(lambda m: AdamW(m.parameters(), lr=0.02)), train(after_step=reset), variants)


def test_saved_and_loaded_through_a_wrapper() -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        train(3)(model, optimizer, look)
        saved = copy.deepcopy(optimizer.state_dict())  # plain torch hands out the live tensors
        train(2)(model, optimizer, look)
        optimizer.load_state_dict(saved)
        train(2)(model, optimizer, look)

    check(built(OPTIMIZERS["lookahead, one state"]), loop, FULL)


def test_a_way_to_the_parameters_that_nobody_can_see_is_refused() -> None:
    hidden: list[Any] = []

    class Hides(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})
            self.get = Getter()

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.get().parameters():
                p.sub_(0.1)

    class Getter:
        __slots__ = ()

        def __call__(self) -> nn.Module:
            return globals()["_hidden"][-1]  # type: ignore[no-any-return]

    def build() -> Any:
        model = mlp()
        globals()["_hidden"] = hidden
        hidden.append(model)
        return model, Hides(model.parameters())

    with pytest.raises(UnsupportedError, match="another way than its param_groups"):
        run(build, train(1), Variant(POISON))
    del globals()["_hidden"]
