"""Optimizers that people write, and what they keep beside moments: all of it is as the plain run leaves it.

State under keys that are no parameters, state that is reset inside ``step``, hyper-parameters and lists that somebody
else holds too, and steps that fail half-way.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from exactness import FULL, check
from test_broken_optimizers import built, loss_at
from torch.optim import Optimizer

Params = list[torch.Tensor]


class Base(Optimizer):
    """SGD with momentum; ``before`` and ``after`` are what a class does around it."""

    def __init__(self, params: Any, **attributes: Any) -> None:
        super().__init__(params, {"lr": attributes.pop("lr", 0.1), "warm": 3, "note": "first"})
        self.num_steps = 0
        self.__dict__.update(attributes)

    def params(self) -> Params:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def before(self, params: Params) -> None: ...

    def after(self, params: Params) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.num_steps += 1
        params = self.params()
        self.before(params)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in params:
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].mul_(0.9).add_(p.grad)
            p.sub_(state["momentum"] * self.param_groups[0]["lr"])
        self.after(params)
        return loss


class KeysOfItsOwn(Base):
    """``state`` under a string, made in three ways, and read again in the next step."""

    def before(self, params: Params) -> None:
        self.state.setdefault("sums", {"grad": torch.zeros(())})["grad"] += sum(p.grad.sum() for p in params)
        self.state["count"] = self.state["count"] + 1 if "count" in self.state else 1
        self.state.update(norms=[*self.state.get("norms", []), params[0].norm()])

    def after(self, params: Params) -> None:
        params[0].add_(self.state["sums"]["grad"], alpha=1e-3 * self.state["count"])
        params[0].mul_(1 - 1e-3 * len(self.state["norms"]))
        if self.num_steps == 3:
            del self.state["norms"]


class Resets(Base):
    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params, how=how)

    def before(self, params: Params) -> None:
        if self.num_steps % 3 != 0:
            return
        if self.how == "assigned":
            self.state = defaultdict(dict)
        elif self.how == "cleared":
            self.state.clear()
        elif self.how == "deleted":
            del self.state[params[0]]
        elif self.how == "popped":
            self.state.pop(params[1])
        else:
            self.state[params[2]] = {"momentum": self.state.pop(params[2])["momentum"].sign()}

    def after(self, params: Params) -> None:
        if self.num_steps == 4:
            self.before(params)
        if self.num_steps == 5 and self.how == "cleared":
            self.state.clear()


class Bookkeeper(Base):
    """Changes what it was given in place, and takes away what it needs no more."""

    def after(self, params: Params) -> None:
        self.history.append(float(params[0].norm()))
        self.seen["last"] = self.num_steps
        group = self.param_groups[0]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].mul_(0.9)
        group["warm"] -= 1
        if group["warm"] == 0:
            del group["note"]
            del self.__dict__["flag"]


def snapshot(optimizer: Any) -> str:
    return str((optimizer.num_steps, hasattr(optimizer, "flag"), sorted(optimizer.param_groups[0])))


def plain_loop(model: Any, optimizer: Any, look: Any) -> None:
    for step in range(7):
        loss = loss_at(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        num = sum(p in optimizer.state for p in model.parameters())
        look(loss=loss.detach(), num=num, keys=len(optimizer.state), kept=snapshot(optimizer))


def test_state_under_keys_that_are_no_parameters() -> None:
    """As torch allows, and saves: they are there in the next step."""
    check(built(lambda model: KeysOfItsOwn(model.parameters())), plain_loop, FULL)


@pytest.mark.parametrize("how", ["assigned", "cleared", "deleted", "popped", "replaced"])
def test_state_that_is_reset_inside_a_step(how: str) -> None:
    """Gone is gone, in the order that the plain run has too."""
    check(built(lambda model: Resets(model.parameters(), how)), plain_loop, FULL)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_what_others_hold_too_stays_the_same_object(tensor_lr: bool) -> None:
    """A learning rate in a tensor is changed from both sides; lists and dicts that were handed in are filled."""
    held: dict[str, Any] = {}

    def make(model: Any) -> Optimizer:
        held.update(lr=torch.tensor(0.1) if tensor_lr else 0.1, history=[], seen={})
        return Bookkeeper(model.parameters(), lr=held["lr"], history=held["history"], seen=held["seen"], flag=1)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(6):
            loss = loss_at(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if tensor_lr:
                held["lr"].mul_(0.8)
            look(
                loss=loss.detach(), lr=held["lr"], history=held["history"], seen=held["seen"], kept=snapshot(optimizer),
                same=optimizer.history is held["history"] and optimizer.param_groups[0]["lr"] is held["lr"],
            )  # fmt: skip

    check(built(make), loop, FULL)


class ClearsFirst(Base):
    """Its closure finds gradients gone and weights moved, so what a failure leaves is easily seen."""

    def before(self, params: Params) -> None:
        self.state.setdefault("tries", []).append(self.num_steps)
        self.state[params[0]]["seen"] = self.num_steps
        for p in params:
            p.mul_(0.99)
            p.grad = None


@pytest.mark.parametrize("when", ["at once", "after backward", "after an edit"])
def test_a_step_that_fails_in_its_closure_leaves_what_the_plain_one_leaves(when: str) -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(6):

            def closure(step: int = step) -> Any:
                if when == "at once" and step in (1, 3):
                    raise KeyError("in the user's closure")
                loss = loss_at(model, step)
                loss.backward()
                if when == "after an edit":
                    with torch.no_grad():
                        for p in model.parameters():
                            p.mul_(0.9)
                            p.grad.mul_(2)
                if step in (1, 3):
                    raise KeyError("in the user's closure")
                return loss

            loss_at(model, step + 10).backward()
            failed = False
            try:
                optimizer.step(closure)
            except KeyError:
                failed = True
            look(failed=failed, grads=[p.grad for p in model.parameters()], kept=snapshot(optimizer))
            if step != 3:
                optimizer.zero_grad()

    check(built(lambda model: ClearsFirst(model.parameters())), loop, FULL)


class InOrder(Base):
    """Adds floats up in the order that ``state`` has, and moves an entry to the end each step."""

    def after(self, params: Params) -> None:
        total = torch.zeros(())
        for entry in self.state.values():
            total = total + entry["momentum"].sum()
        params[0].add_(total, alpha=1e-3)
        first = next(iter(self.state))
        self.state[first] = self.state.pop(first)


def test_state_is_in_the_order_of_the_plain_run() -> None:
    """Sums of floats depend on it."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(5):
            loss = loss_at(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            params = list(model.parameters())
            look(loss=loss.detach(), order=str([[p is key for p in params].index(True) for key in optimizer.state]))

    check(built(lambda model: InOrder(model.parameters())), loop, FULL)


class SetsRates(Base):
    def after(self, params: Params) -> None:
        self.rates = [*getattr(self, "rates", []), self.param_groups[0]["lr"]]


def test_a_closure_sees_and_changes_what_the_step_works_with() -> None:
    """Hyper-parameters, attributes and state in the middle of a step are one, for the closure and for the step."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(5):
            seen: dict[str, Any] = {}

            def closure(step: int = step, seen: dict[str, Any] = seen) -> Any:
                optimizer.zero_grad()
                loss = loss_at(model, step)
                loss.backward()
                seen.update(num_steps=optimizer.num_steps, keys=len(optimizer.state))
                optimizer.param_groups[0]["lr"] *= 0.9
                optimizer.num_steps += 10
                if step == 3:
                    optimizer.state.clear()
                return loss

            loss_at(model, step + 20).backward()
            loss = optimizer.step(closure)
            look(loss=loss.detach(), seen=seen, kept=snapshot(optimizer), rates=optimizer.rates)

    check(built(lambda model: SetsRates(model.parameters())), loop, FULL)


class Marks(Base):
    """Reads what hooks left on parameters, and leaves something there itself."""

    def before(self, params: Params) -> None:
        for p in params:
            p.grad.add_(p.sample, alpha=0.1)
            del p.sample
            p.seen = getattr(p, "seen", 0) + 1


class MarksAndFreezes(Marks):
    """Trains block by block, as BAdam's does."""

    def after(self, params: Params) -> None:
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            p.requires_grad_((self.num_steps + index // 2) % 3 != 0)


@pytest.mark.parametrize("cls", [Marks, MarksAndFreezes])
def test_what_stands_on_parameters_is_read_and_set_by_a_step(cls: type[Marks]) -> None:
    """Attributes and ``requires_grad``, as in per-sample clipping and in classes that train block by block."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step in range(8):
            loss = loss_at(model, step)
            loss.backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.sample = p.grad.sign() * 0.01
            optimizer.step()
            optimizer.zero_grad()
            left = [(getattr(p, "seen", None), hasattr(p, "sample"), p.requires_grad) for p in model.parameters()]
            look(loss=loss.detach(), left=str(left))

    check(built(lambda model: cls(model.parameters())), loop, FULL)
