"""Updates on the device, through it and in two passes against the CPU's, bit by bit, under random plans and user code.

Each seed is one run of a few steps: random settings, random user code between any two calls of the loop, and units
whose line of the plan is another one at any time. The reference does the same, every unit updated on the CPU at once.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exactness import (
    SLOW,
    Recording,
    Variant,
    assert_exact,
    assert_within_budget,
    attach,
    one_thread,
    seed_all,
    take_down,
)
from fakes import batches
from test_device_updates import Net
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine import device_updates, offload_engine
from lightning_tieroffload.engine.offload_engine import OffloadEngine

NUM_STEPS = 7


def halve(p: nn.Parameter) -> None:
    p.grad.mul_(0.5)


class Odd(Net):
    """With a weight that two blocks share, hooks on gradients, or an embedding whose gradient is sparse."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.odd = odd
        weight = self.blocks[3].up.weight
        if odd == "tied":
            self.blocks[4].up.weight = weight
        elif odd == "hook":
            weight.register_hook(lambda grad: grad * 0.5)
        elif odd == "late hook":
            weight.register_post_accumulate_grad_hook(halve)
        self.embedding.sparse = odd == "sparse"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.odd == "sparse":
            x = x + self.embedding(torch.arange(x.shape[0]) % 3)
        return super().forward(x)


class Settings:
    """What a seed chooses for both runs."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.amp = rng.random() < 0.7
        self.accumulate = rng.choice([1, 1, 2, 3])
        self.set_to_none = rng.random() < 0.7
        self.use_scaler = rng.random() < 0.2
        self.clip = rng.choice(["norm", "norm", "inf", "value", "two calls", "none"])
        self.foreach = rng.choice([None, None, True, False])
        self.optimizer = rng.choice(["adamw", "adamw", "adamw", "adam", "sgd", "groups", "two", "turns"])
        self.activations = rng.choice(["keep", "keep", "recompute", "offload"])
        self.budget = rng.choice(["all", 60_000, 75_000, 90_000, 130_000])
        self.prefetch = rng.choice([1, 2, 4])
        self.looks_before_close = rng.random() < 0.5
        self.dtype = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16])
        self.odd = rng.choice(["", "", "tied", "hook", "late hook", "sparse"])
        # Where state passes through the device: of that which does not live there, how much; and whether any does.
        self.streamed_share = rng.choice([0.5, 1.0])
        self.lives_on_device = rng.random() < 0.3

    def __repr__(self) -> str:
        return str(vars(self))

    def make(self) -> tuple[nn.Module, list[Any]]:
        model = Odd(self.odd)
        params = [p for p in model.parameters() if p.requires_grad]
        if self.odd == "sparse":  # classes that add to dense state refuse it: one of its own
            rest = [p for p in params if p is not model.embedding.weight]
            return model, [torch.optim.AdamW(rest, lr=1e-2), torch.optim.SparseAdam([model.embedding.weight], lr=1e-2)]
        if self.optimizer == "adam":
            return model, [torch.optim.Adam(params, lr=1e-2, weight_decay=0.1)]
        if self.optimizer == "sgd":
            return model, [torch.optim.SGD(params, lr=1e-2, momentum=0.9)]
        if self.optimizer == "groups":
            groups = [{"params": params[::2], "lr": 1e-3}, {"params": params[1::2], "weight_decay": 0.3}]
            return model, [torch.optim.AdamW(groups, lr=1e-2)]
        if self.optimizer == "two":  # of one unit's parameters, one by a class without a kernel
            return model, [torch.optim.AdamW(params[::3], lr=1e-2), torch.optim.RMSprop(params[1::3], lr=1e-3)]
        if self.optimizer == "turns":
            return model, [torch.optim.AdamW(params, lr=1e-2), torch.optim.Adam(params, lr=1e-3)]
        return model, [torch.optim.AdamW(params, lr=1e-2)]


class Actor:
    """User code, the same in both runs: what it does follows from the seed and from nothing that the engine decides."""

    def __init__(self, settings: Settings, model: nn.Module, optimizers: list[Any], engine: OffloadEngine) -> None:
        self.rng = random.Random(1000 + settings.seed)
        self.model, self.optimizers, self.engine = model, optimizers, engine
        self.held: list[Any] = []
        self.numbers: list[Any] = []
        self.saved: Any = None

    def some(self) -> list[tuple[Any, nn.Parameter]]:
        """Parameters that have an entry of state, with their optimizers."""
        found = [(o, p) for o in self.optimizers for group in o.param_groups for p in group["params"]]
        found = self.rng.sample(found, 4)
        return [(o, p) for o, p in found if p in o.state and "exp_avg" in o.state[p]]

    # ---- between two steps
    def look(self) -> None:
        self.numbers += [o.state[p]["exp_avg"].sum().clone() for o, p in self.some()]

    def hold(self) -> None:
        for o, p in self.some():
            entry = o.state[p]
            kind = self.rng.choice(["tensor", "view", "entry", "data"])
            tensor = entry["exp_avg"]
            self.held.append({"tensor": tensor, "view": tensor.view(-1), "entry": entry, "data": tensor.data}[kind])

    def write_held(self) -> None:
        for held in self.held:
            held = held.get("exp_avg") if isinstance(held, dict) else held
            if held is not None:
                self.numbers.append(held.clone())
                held.mul_(0.75)

    def let_go(self) -> None:
        self.held.clear()

    def write_state(self) -> None:
        for o, p in self.some():
            tensor = o.state[p]["exp_avg"]
            how = self.rng.choice(["in place", "data", "numpy", "foreach"])
            if how == "in place":
                tensor.mul_(0.5)
            elif how == "data":
                tensor.data.mul_(0.5)
            elif how == "numpy":
                tensor.numpy()[...] *= 0.5
            else:
                torch._foreach_mul_([tensor], 0.5)

    def replace_state(self) -> None:
        for o, p in self.some():
            o.state[p]["exp_avg"] = o.state[p]["exp_avg"] * 0.5

    def share_state(self) -> None:
        for o, p in self.some():
            flat = torch.zeros(p.numel())
            o.state[p]["exp_avg"] = flat.view(p.shape)
            self.held.append(flat)

    def pop_state(self) -> None:
        for o, p in self.some():
            o.state.pop(p)

    def clear_state(self) -> None:
        self.optimizers[0].state.clear()

    def save(self) -> None:
        self.saved = copy.deepcopy([self.model.state_dict(), *(o.state_dict() for o in self.optimizers)])

    def load(self) -> None:
        if self.saved is None:
            self.save()
        model, *states = copy.deepcopy(self.saved)
        self.model.load_state_dict(model)
        for o, state in zip(self.optimizers, states, strict=True):
            o.load_state_dict(state)

    def load_and_hold(self) -> None:
        states = copy.deepcopy([o.state_dict() for o in self.optimizers])
        for o, state in zip(self.optimizers, states, strict=True):
            o.load_state_dict(state)
        self.held += [entry for state in states for entry in state["state"].values()]

    def write_weights(self) -> None:
        with torch.no_grad():
            for p in self.rng.sample(list(self.model.parameters()), 4):
                p.mul_(0.75)

    def replace_data(self) -> None:
        for p in self.rng.sample(list(self.model.parameters()), 4):
            p.data = p.data * 0.75

    def hold_data(self) -> None:
        self.held += [p.data for p in self.rng.sample(list(self.model.parameters()), 2)]

    def freeze(self) -> None:
        for p in self.rng.sample(list(self.model.parameters()), 3):
            p.requires_grad_(False)

    def unfreeze(self) -> None:
        for p in self.model.parameters():
            p.requires_grad_(True)

    def change_settings(self) -> None:
        for o in self.optimizers:
            for group in o.param_groups:
                group["lr"] *= 0.5

    def change_class(self) -> None:
        """No kernel has this: torch's own class runs from now on, or our kernel again."""
        for o in self.optimizers:
            for group in o.param_groups:
                if "capturable" in group and isinstance(o, torch.optim.Adam):
                    group["differentiable"] = not group["differentiable"]

    def copies(self) -> None:
        model = copy.deepcopy(self.model)
        self.numbers += [p.sum() for p in list(model.parameters())[:3]]
        loaded = pickle.loads(pickle.dumps(self.optimizers[0]))
        buffer = io.BytesIO()
        torch.save([o.state_dict() for o in self.optimizers], buffer)
        self.numbers.append(loaded.state_dict()["state"])

    def evaluate(self) -> None:
        with torch.no_grad():
            self.numbers.append(self.model(batches(1, 4, 32, seed=9)[0]).sum())

    def reset(self) -> None:
        self.engine.reset()

    def flush(self) -> None:
        self.engine.flush()

    def fail(self, in_backward: bool) -> None:
        block = self.model.blocks[self.rng.randrange(5)]
        register = block.register_full_backward_pre_hook if in_backward else block.register_forward_pre_hook
        handle = register(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.model(batches(1, 4, 32, seed=8)[0]).square().mean().backward()
        handle.remove()
        self.engine.reset()
        self.model.zero_grad()

    def fail_in_forward(self) -> None:
        self.fail(in_backward=False)

    def fail_in_backward(self) -> None:
        self.fail(in_backward=True)

    def step_again(self) -> None:
        self.optimizers[0].step()

    # ---- between backward and step
    def read_grads(self) -> None:
        self.numbers += [
            p.grad.clone() for p in self.rng.sample(list(self.model.parameters()), 3) if p.grad is not None
        ]

    def write_grads(self) -> None:
        for p in self.rng.sample(list(self.model.parameters()), 3):
            if p.grad is not None:
                p.grad.mul_(0.5)

    def replace_grads(self) -> None:
        for p in self.rng.sample(list(self.model.parameters()), 3):
            if p.grad is not None:
                p.grad = p.grad * 0.5

    def drop_grads(self) -> None:
        for p in self.rng.sample(list(self.model.parameters()), 2):
            p.grad = None

    def norms(self) -> None:
        params = [p for p in self.model.blocks.parameters() if p.grad is not None][:3]
        self.numbers.append(get_total_norm([p.grad for p in params], 2.0))

    def fill_zero(self) -> None:
        self.model.zero_grad(set_to_none=False)

    BETWEEN = (
        look, hold, write_held, let_go, let_go, write_state, replace_state, share_state, pop_state, clear_state, save,
        load, load_and_hold, write_weights, replace_data, hold_data, freeze, unfreeze, change_settings, change_class,
        copies, evaluate, reset, flush, fail_in_forward, fail_in_backward, step_again,
    )  # fmt: skip
    BEFORE_STEP = (
        read_grads, write_grads, replace_grads, drop_grads, norms, look, hold, let_go, write_state, reset, flush,
        fill_zero, copies,
    )  # fmt: skip

    def act(self, actions: tuple[Callable[[Any], None], ...], chance: float) -> None:
        while self.rng.random() < chance:
            self.rng.choice(actions)(self)


def clip(settings: Settings, model: nn.Module) -> Any:
    params, foreach = list(model.parameters()), settings.foreach
    if settings.odd == "sparse":
        params = [p for p in params if p is not model.embedding.weight]  # torch's clipping refuses sparse gradients
    if settings.clip == "norm":
        return clip_grad_norm_(params, 0.5, error_if_nonfinite=not settings.use_scaler, foreach=foreach)
    if settings.clip == "inf":
        return clip_grad_norm_(params, 0.01, float("inf"), foreach=foreach)
    if settings.clip == "value":
        return clip_grad_value_(params, 0.001, foreach=foreach)
    if settings.clip == "two calls":
        total = get_total_norm([p.grad for p in params[:4] if p.grad is not None and not p.grad.is_sparse])
        clip_grads_with_norm_(params, 0.5, total, foreach=foreach)
        return clip_grad_norm_(params[5:], 0.1, foreach=foreach)
    return None


def flip(engine: OffloadEngine, rng: random.Random) -> None:
    """Another line of the plan for some units, as the planner gives it between two steps, and at worse times."""
    import dataclasses

    for unit in engine.units:
        if rng.random() < 0.25:
            param_home, state_home, grad_home, place = rng.choice(sorted(engine.core.placements(unit), key=str))
            engine.core.apply(
                unit,
                dataclasses.replace(
                    unit.choice, param_home=param_home, state_home=state_home, grad_home=grad_home, update_on=place
                ),
            )


def books_balance(engine: OffloadEngine) -> None:
    """What the device is charged is what parts and gradients hold, and no unit has state of optimizers gone by."""
    gradients, space = engine.gradients, engine.space
    with space.lock:
        gradients._reap()
        parts_nbytes = sum(part.charged_nbytes for unit in space.units for part in unit.all_parts)
        kept_nbytes = sum(r.kept.nbytes for unit in space.units for r in unit.grads if r.kept is not None)
        assert gradients._kept_nbytes == kept_nbytes
        leaving_nbytes = sum(nbytes for _, nbytes in gradients._leaving)
        used_nbytes = space.ledger[Tier.DEVICE].used_nbytes
        held_nbytes = parts_nbytes + engine.core.updates.passing_nbytes
        assert used_nbytes == held_nbytes + gradients.charged_nbytes + kept_nbytes + leaving_nbytes
        assert gradients.charged_nbytes == 0


def one_run(settings: Settings, *, update_on: str, defer: bool, flips: bool) -> tuple[Recording, dict[str, int]]:
    seed_all(settings.seed)
    model, optimizers = settings.make()
    budget = settings.budget if update_on != "cpu" or defer else "all"
    variant = Variant(SLOW, prefetch=settings.prefetch, seed=settings.seed, budget=budget)
    engine = attach(
        model, optimizers, variant, optimizer_kernel="numba", update_on=update_on, profile_steps=0, io_timeout_s=60,
        activations=settings.activations,
    )  # fmt: skip
    engine.updates.defer_moments = defer
    actor = Actor(settings, model, optimizers, engine)
    rng = random.Random(2000 + settings.seed)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3, enabled=settings.use_scaler)
    data = iter(batches(NUM_STEPS * settings.accumulate, 4, 32))
    penalty_at = random.Random(settings.seed).randrange(2 * NUM_STEPS)
    recording = Recording()

    def maybe_flip() -> None:
        if flips and rng.random() < 0.5:
            flip(engine, rng)

    try:
        for step in range(NUM_STEPS):
            model.is_on = step % 3 != 1
            for _ in range(settings.accumulate):
                maybe_flip()
                with torch.autocast("cpu", settings.dtype, enabled=settings.amp):
                    loss = model(next(data)).float().square().mean()
                    if step == penalty_at:
                        loss = loss + model.blocks[0].up.weight.square().sum()
                actor.act((Actor.look, Actor.flush), 0.1)
                maybe_flip()
                scaler.scale(loss / settings.accumulate).backward()
            maybe_flip()
            turn = optimizers[step % 2 :][:1] if settings.optimizer == "turns" else optimizers
            actor.act(Actor.BEFORE_STEP, 0.3)
            if settings.use_scaler:
                for optimizer in turn:
                    scaler.unscale_(optimizer)
            norm = clip(settings, model)
            maybe_flip()
            for optimizer in turn:
                scaler.step(optimizer)
            scaler.update()
            maybe_flip()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=settings.set_to_none)
            actor.act(Actor.BETWEEN, 0.55)
            recording.looks.append({"log/loss": loss.detach().clone(), "log/norm": norm})
            books_balance(engine)
        if not actor.held:
            assert_within_budget(engine)
        if settings.looks_before_close:
            recording.looks.append(take_down(model, optimizers))
        counts = engine.report()["num_unit_updates"]
        actor.held = [h for h in actor.held if isinstance(h, torch.Tensor)]
    finally:
        engine.close()
    recording.looks.append(take_down(model, optimizers))
    recording.looks.append({f"log/{i}": value for i, value in enumerate(flat(actor.numbers))})
    return recording, counts


def flat(values: list[Any]) -> list[torch.Tensor]:
    result: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, dict):
            result += flat(list(value.values()))
        elif isinstance(value, torch.Tensor):
            result.append(value.detach().clone())
    return result


@contextlib.contextmanager
def streaming(settings: Settings) -> Iterator[None]:
    """Engines send state through the device as the seed says, whatever budget there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload_engine, "_HOST_STREAMED_SHARE", settings.streamed_share)
        if not settings.lives_on_device:
            patch.setattr(device_updates, "choose_device_units", lambda *_: set())
        yield


def compare(seed: int) -> dict[str, int]:
    """How many units were updated where."""
    settings = Settings(seed)
    with one_thread():
        reference, _ = one_run(settings, update_on="cpu", defer=False, flips=False)
        update_on, defer = [("device", False), ("device", True), ("cpu", True), ("split", False)][seed % 4]
        if update_on == "split":  # what state passes through takes a share of the budget, and is nothing of a small one
            settings.budget = "all" if settings.budget == "all" else 3 * settings.budget
            with streaming(settings):
                ours, counts = one_run(settings, update_on=update_on, defer=defer, flips=settings.lives_on_device)
        else:
            ours, counts = one_run(settings, update_on=update_on, defer=defer, flips=update_on == "device")
    assert_exact(reference, ours, repr(settings))
    return counts


@pytest.mark.parametrize("seed", range(30))
def test_random_plans_and_user_code_do_not_change_a_bit(seed: int) -> None:
    compare(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30, 400))
def test_more_random_plans_and_user_code(seed: int) -> None:
    compare(seed)


def test_the_random_runs_do_update_on_the_device_and_through_it() -> None:
    """Else they would prove nothing."""
    assert sum(compare(seed)["device"] for seed in (0, 4, 5)) > 10
    assert sum(compare(seed)["streamed"] for seed in (3, 7, 11)) > 10
