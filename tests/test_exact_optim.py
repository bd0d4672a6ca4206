"""Every optimizer class of torch, its options, and what users do with optimizers: plain and ours, bit by bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from exactness import FULL, POISON, SLOW, Variant, check
from fakes import Stack, batches
from torch import nn

# Nobody looks before the end under the slow store, and with everything on the device.
VARIANTS = [
    Variant(SLOW, prefetch=2, seed=1, every_look=False, budget="tight"),
    Variant(POISON, prefetch=1, budget="starved"),
]

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "asgd": ("ASGD", {"lr": 0.05, "t0": 1}),
    "adadelta": ("Adadelta", {"lr": 1.0}),
    "adafactor": ("Adafactor", {"lr": 1e-2}),
    "adagrad": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adagrad_fused": ("Adagrad", {"lr": 0.05, "fused": True}),
    "adam": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam_maximize": ("Adam", {"lr": 1e-3, "maximize": True, "amsgrad": True}),
    "adam_fused": ("Adam", {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "adam_capturable_off": ("Adam", {"lr": 1e-2, "foreach": False}),
    "adam_decoupled": ("Adam", {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw_tensor_lr": ("AdamW", {"lr": torch.tensor(1e-2), "foreach": False}),
    "adamw_tensor_lr_fused": ("AdamW", {"lr": torch.tensor(1e-2), "fused": True}),
    "adamw_foreach": ("AdamW", {"lr": 1e-2, "foreach": True}),
    "adamax": ("Adamax", {"lr": 1e-2}),
    "nadam": ("NAdam", {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "radam": ("RAdam", {"lr": 1e-2}),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    "rprop": ("Rprop", {"lr": 1e-3}),
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd_fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "sgd_dampened": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "lbfgs": ("LBFGS", {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"}),
}


def build_of(name: str, **settings: Any) -> Any:
    cls, defaults = CLASSES[name]

    def build() -> Any:
        model = Stack(3)
        return model, getattr(torch.optim, cls)(model.parameters(), **{**copy.deepcopy(defaults), **settings})

    return build


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


@pytest.mark.parametrize("name", CLASSES)
def test_every_class(name: str) -> None:
    """Each class with options of its own, stepped with a closure every other time."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(4, 4, 24)):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            if name == "lbfgs" or step % 2:
                loss = optimizer.step(closure)
            else:
                loss = closure()
                optimizer.step()
            look(loss=loss)

    check(build_of(name), loop, VARIANTS)


SCHEDULES: dict[str, Any] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8),
    "cosine restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1.0, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.7)],
        milestones=[2],
    ),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=2),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_tensor_lr", "sgd_dampened"])
def test_schedules(name: str, schedule: str) -> None:
    """Hyper-parameters change right after the step: the update that is still to run uses those of its step."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        scheduler = SCHEDULES[schedule](optimizer)
        for x in batches(4, 4, 24):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(loss.detach()) if schedule == "plateau" else scheduler.step()
            look(loss=loss, lrs=[float(g["lr"]) for g in optimizer.param_groups])

    check(build_of(name), loop, [VARIANTS[0]])


def test_hyper_parameters_changed_by_hand_right_after_the_step() -> None:
    """Groups edited in place: numbers, a tensor lr written in place, betas, weight decay; groups that are added."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        extra = nn.Parameter(torch.ones(3))
        for step, x in enumerate(batches(5, 4, 24)):
            loss = loss_of(model, x) + (extra**2).sum()
            loss.backward()
            optimizer.step()
            group = optimizer.param_groups[0]
            group["lr"].mul_(0.5)
            group["betas"] = (0.5, 0.9)
            group["weight_decay"] = 0.1 * step
            group["maximize"] = step == 2
            optimizer.zero_grad()
            if step == 1:
                optimizer.add_param_group({"params": [extra], "lr": torch.tensor(0.1), "weight_decay": 0.0})
            look(loss=loss, extra=extra)

    check(build_of("adamw_tensor_lr"), loop, FULL)


def test_state_in_the_users_hands() -> None:
    """Optimizer state is read, edited in place, replaced, deleted, loaded back, in the middle of a run."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        saved = None
        for step, x in enumerate(batches(7, 4, 24)):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first, second = list(model.parameters())[:2]
            norms = [entry["exp_avg"].norm() for entry in optimizer.state.values()]
            if step == 0:
                saved = copy.deepcopy(optimizer.state_dict())
            if step == 1:
                optimizer.state[first]["exp_avg"].mul_(0.5)
                optimizer.state[second]["exp_avg_sq"] = optimizer.state[second]["exp_avg_sq"] * 2
            if step == 2:
                del optimizer.state[second]
            if step == 3:
                optimizer.load_state_dict(saved)
            if step == 4:
                optimizer.state.clear()
            if step == 5:
                optimizer.state[first]["mine"] = torch.ones(2)
            look(loss=loss, norms=norms, keys=str([tuple(p.shape) for p in optimizer.state]), num=len(optimizer.state))

    check(build_of("adamw_foreach"), loop, FULL)


def test_hooks_of_optimizers() -> None:
    """Step, state_dict and load hooks run once each, in order, and may change gradients and states."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        calls: list[str] = []

        def before(o: Any, args: Any, kwargs: Any) -> None:
            calls.append("before")
            for p in model.parameters():
                p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda o, a, k: calls.append("after"))
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("saving"))
        optimizer.register_state_dict_post_hook(lambda o, s: {**s, "note": 1})
        optimizer.register_load_state_dict_pre_hook(lambda o, s: {k: v for k, v in s.items() if k != "note"})
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
        for step, x in enumerate(batches(4, 4, 24)):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            look(loss=loss, calls=[c for c in calls if c != "saving"])

    check(build_of("adamw_foreach"), loop, FULL)


def test_a_subclass_and_a_wrapper() -> None:
    """A user's subclass of AdamW, and a wrapper that keeps slow weights (Lookahead) beside an optimizer of torch."""

    class Centred(torch.optim.AdamW):
        """Removes the mean of each gradient first."""

        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, lr=lr)
            self.num_calls = 0

        def step(self, closure: Any = None) -> Any:
            self.num_calls += 1
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.ndim > 1:
                        p.grad.sub_(p.grad.mean())
            return super().step(closure)

    def build() -> Any:
        model = Stack(3)
        return model, Centred(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        slow = {p: p.detach().clone() for p in model.parameters()}
        for step, x in enumerate(batches(4, 4, 24)):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2:
                with torch.no_grad():
                    for p, s in slow.items():
                        s.add_(p - s, alpha=0.5)
                        p.copy_(s)
            look(loss=loss, num_calls=optimizer.num_calls)

    check(build, loop, FULL)


def test_steps_without_gradients_and_twice() -> None:
    """A step before any backward, two steps on one gradient, a step of an optimizer over a part of the model."""

    def build() -> Any:
        model = Stack(3)
        return model, [
            torch.optim.AdamW(model.blocks.parameters(), lr=1e-2),
            torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        ]

    def loop(model: Any, optimizers: Any, look: Any) -> None:
        adamw, sgd = optimizers
        adamw.step()
        look()
        for step, x in enumerate(batches(4, 4, 24)):
            loss_of(model, x).backward()
            adamw.step()
            if step == 1:
                adamw.step()
            sgd.step()  # the same parameters, the same gradients, another optimizer
            if step != 2:
                adamw.zero_grad()
                sgd.zero_grad()
            look(entries=[len(adamw.state), len(sgd.state)])

    check(build, loop, FULL)


class TwoWidths(nn.Module):
    """fp32 layers, some with a 16-bit parameter beside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        for layer in (self.layers[0], self.layers[2]):
            layer.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * layer.scale.float() if hasattr(layer, "scale") else x)
        return x


@pytest.mark.parametrize("first", ["wide", "narrow", "without a gradient"])
@pytest.mark.parametrize("foreach", [None, True])
def test_what_torch_takes_from_the_first_parameter_holds_for_all_units(first: str, foreach: bool | None) -> None:
    """Adafactor without a first eps takes that of the dtype of the first parameter it comes to, for a whole group."""

    def build() -> Any:
        torch.manual_seed(0)
        model = TwoWidths()
        params = sorted(model.parameters(), key=lambda p: (p.dtype is torch.bfloat16) is (first == "wide"))
        if first == "without a gradient":
            params[0].requires_grad_(False)
        half = len(params) // 2
        groups = [{"params": params[:half]}, {"params": params[half:], "lr": 1e-3, "eps": (1e-3, 1e-3)}]
        return model, torch.optim.Adafactor(groups, lr=1e-2, foreach=foreach)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 4, 8):
            optimizer.zero_grad()
            loss = loss_of(model, 1e-3 * x)
            loss.backward()
            optimizer.step()
            look(loss=loss)

    check(build, loop, VARIANTS)
