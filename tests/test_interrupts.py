"""CON-04 by construction: Ctrl-C at chosen places of the engine's own code, in the thread that trains."""

from __future__ import annotations

import copy
import inspect
import random
import threading
import time
import types
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from exactness import assert_ordinary, same_bits, seed_all, take_down
from loopkit import mlp
from striking import Strike
from torch import nn

import lightning_tieroffload as tieroffload
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.gradients import Gradients
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.engine.saved import push_hooks
from lightning_tieroffload.memory.arena import PinnedArena

SETTINGS: dict[str, Any] = {
    "device": "cpu", "device_budget": 2 * 16640 + 260, "dram_budget": "1GiB", "optimizer_kernel": "torch",
}  # fmt: skip


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_all(0)
    model = mlp(3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _fit(model: nn.Module, optimizer: torch.optim.Optimizer, boundaries: list[dict[str, Any]] | None = None) -> None:
    seed_all(1)
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(1 + step % 2):
            (model(torch.randn(4, 64)) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step == 1:
            with torch.no_grad():
                model(torch.ones(2, 64))
            model.state_dict()
        if boundaries is not None:
            boundaries.append({key: value.clone() for key, value in model.state_dict().items()})


@pytest.fixture(scope="module")
def plain() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The weights at each boundary between steps, and all that the plain run ends with."""
    model, optimizer = _build()
    boundaries = [{key: value.clone() for key, value in model.state_dict().items()}]
    _fit(model, optimizer, boundaries)
    return boundaries, take_down(model, [optimizer])


def _strike(at: int, plain: tuple[list[dict[str, Any]], dict[str, Any]], **settings: Any) -> Strike:
    """Attach and fit, struck; then what a user does who goes on. Everything is as in the plain run again."""
    boundaries, expected = plain
    model, optimizer = _build()
    fresh = copy.deepcopy(optimizer.state_dict())
    started_s = time.monotonic()
    threads = set(threading.enumerate())
    with Strike(at) as strike:
        try:
            tieroffload.offload(model, optimizer, **SETTINGS, **settings)
            _fit(model, optimizer)
        except KeyboardInterrupt:
            assert strike.has_struck
    engine = engine_of(model)
    if engine is None:  # struck before there was one: nothing was done to the model
        assert_ordinary(model)
        tieroffload.offload(model, optimizer, **SETTINGS, **settings)
        engine = engine_of(model)
    assert engine is not None
    engine.reset()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    for key, value in model.state_dict().items():  # each is whole: what some step left, never half of one
        assert any(same_bits(value, each[key]) for each in boundaries), key
    engine.adopt_optimizer(optimizer)
    optimizer.zero_grad()
    model.load_state_dict(boundaries[0])
    optimizer.load_state_dict(fresh)
    _fit(model, optimizer)
    space = engine.space
    held_nbytes = sum(part.charged_nbytes for unit in space.units for part in unit.all_parts)
    assert engine.gradients.charged_nbytes == 0
    assert space.ledger[Tier.DEVICE].used_nbytes == held_nbytes
    account = engine.report()["tiers"]["device"]
    assert account["peak_nbytes"] <= account["budget_nbytes"]
    engine.close()
    assert time.monotonic() - started_s < 5
    assert_ordinary(model)
    actual = take_down(model, [optimizer])
    assert [key for key in expected if not same_bits(expected[key], actual.get(key))] == []
    while left := [t for t in threading.enumerate() if "tieroffload" in t.name and t not in threads]:
        assert time.monotonic() - started_s < 10, left
        time.sleep(0.002)
    return strike


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "delays": {"debug": ["poison", "delays"]},
    "activations": {"activations": "offload"},
}


def _places(plain: Any, settings: dict[str, Any], num_places: int | None) -> list[int]:
    """``num_places`` of the places passed, seeded; None: each place once as it is passed first, once at random."""
    seen = _strike(0, plain, **settings).places
    draw = random.Random(0)
    if num_places is not None:
        return sorted(draw.sample(range(1, len(seen) + 1), num_places))
    by_place: dict[Any, list[int]] = {}
    for at, place in enumerate(seen, 1):
        by_place.setdefault(place, []).append(at)
    return sorted({chosen for ats in by_place.values() for chosen in (ats[0], draw.choice(ats))})


@pytest.mark.parametrize("variant", ["default", "delays", "activations"])
def test_con_04_ctrl_c_in_the_engines_own_code(variant: str, plain: Any, one_thread: None) -> None:
    """CON-04: SIGINT at 5 seeded places of attach and fit: ends at once, whole values, and a next fit is exact."""
    for at in _places(plain, VARIANTS[variant], 5):
        _strike(at, plain, **VARIANTS[variant])


def test_ctrl_c_while_a_gradient_is_born(plain: Any, one_thread: None) -> None:
    """At each place of the hook that charges it: what is charged afterwards is what is there."""
    lines, start = inspect.getsourcelines(Gradients.on_born)
    own = range(start, start + len(lines))
    by_place: dict[Any, int] = {}
    for at, (file, line, index) in enumerate(_strike(0, plain).places, 1):
        if file == "engine/gradients.py" and line in own:
            by_place[line, index] = at
    assert len(by_place) > 10
    for at in by_place.values():
        _strike(at, plain)


def test_hooks_that_ctrl_c_left_are_taken_off() -> None:
    """Pushed, and struck before anybody knew: the engine's own and a checkpoint's, over those of an open context."""
    model, optimizer = _build()
    tieroffload.offload(model, optimizer, **SETTINGS)
    engine = engine_of(model)
    assert engine is not None
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with torch.autograd.graph.save_on_cpu():
        users = top(True)
        torch._C._autograd._push_saved_tensors_default_hooks(*_checkpoints_pair())
        assert push_hooks(engine.space, engine.gradients.on_unpack)
        engine.reset()
        assert top(True) == users
    engine.close()


def _checkpoints_pair() -> Any:
    hooks = torch.utils.checkpoint._checkpoint_hook(types.SimpleNamespace(unpack_error_cb=None))
    return hooks.pack_hook, hooks.unpack_hook


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["default", "delays", "activations"])
def test_con_04_ctrl_c_at_every_place(variant: str, plain: Any, one_thread: None) -> None:
    """CON-04: the same at every place of our code that such a fit passes, the first time and once at random."""
    for at in _places(plain, VARIANTS[variant], None):
        _strike(at, plain, **VARIANTS[variant])


def test_ctrl_c_in_a_block_leaves_gradients_on() -> None:
    """At every place where a tensor is made on the arena: torch's modes of the process are what they were."""
    with PinnedArena(1 << 16, pin=False) as arena:
        block = arena.take(4096)
        with Strike() as strike:
            block.tensor(torch.float32, (16, 16))
        places = len(strike.places)
        assert places > 3
        for at in range(1, places + 1):
            error: BaseException | None = None
            with Strike(at), torch._C._InferenceMode(False):  # as around an update
                torch._C._set_grad_enabled(False)
                try:
                    block.tensor(torch.float32, (16, 16))
                except KeyboardInterrupt as struck:
                    error = struck
            del error  # what its frames held goes only now
            assert torch.is_grad_enabled(), strike.places[at - 1]
            assert not torch.is_inference_mode_enabled(), strike.places[at - 1]
        block.free()
