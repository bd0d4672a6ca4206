"""CON-04 by construction: Ctrl-C at chosen places of the engine's own code, in the thread that trains."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import random
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from exactness import assert_ordinary, same_bits, seed_all, take_down
from loopkit import mlp
from striking import Strike
from test_nvme_tier import least_dram
from torch import nn

import lightning_tieroffload as tieroffload
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine import offload_engine, torch_patches
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.gradients import Gradients
from lightning_tieroffload.engine.host_space import HostSpace
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.engine.optimizer import Updates
from lightning_tieroffload.engine.recompute import Watch
from lightning_tieroffload.engine.saved import push_hooks
from lightning_tieroffload.engine.streamed_updates import StreamedUpdates
from lightning_tieroffload.engine.unit_state import UnitState
from lightning_tieroffload.engine.wire import Wire
from lightning_tieroffload.memory.arena import PinnedArena

Fit = Callable[..., None]


class Plain(NamedTuple):
    fit: Fit
    boundaries: list[dict[str, Any]]
    expected: dict[str, Any]


SETTINGS: dict[str, Any] = {
    "device": "cpu", "device_budget": 2 * 16640 + 260, "dram_budget": "1GiB", "optimizer_kernel": "torch",
}  # fmt: skip


def _build() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_all(0)
    model = mlp(3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _attached(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, OffloadEngine]:
    """Under `SETTINGS` with ``changes``. Who drops the model drops the engine."""
    model, optimizer = _build()
    tieroffload.offload(model, optimizer, **{**SETTINGS, **changes})
    engine = engine_of(model)
    assert engine is not None
    return model, optimizer, engine


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


def _fit_late(model: nn.Module, optimizer: torch.optim.Optimizer, boundaries: Any = None) -> None:
    """Under autocast, weights that travel in 16 bits after the first steps; and a graph that outlives its weights."""
    seed_all(1)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(torch.randn(4, 64)).float() ** 2).mean()
        loss.backward(retain_graph=step == 2)
        optimizer.step()
        if step == 2:
            loss.backward()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(2, 64))
            model.state_dict()
        if boundaries is not None:
            boundaries.append({key: value.clone() for key, value in model.state_dict().items()})


def _plain(fit: Fit) -> Plain:
    """The weights at each boundary between steps, and all that the plain run ends with."""
    model, optimizer = _build()
    boundaries = [{key: value.clone() for key, value in model.state_dict().items()}]
    fit(model, optimizer, boundaries)
    return Plain(fit, boundaries, take_down(model, [optimizer]))


@pytest.fixture(scope="module")
def plain() -> Plain:
    return _plain(_fit)


@pytest.fixture(scope="module")
def plain_late() -> Plain:
    return _plain(_fit_late)


def _strike(at: int, plain: Plain, **settings: Any) -> Strike:
    """Attach and fit, struck; then what a user does who goes on. Everything is as in the plain run again."""
    fit, boundaries, expected = plain
    flash = settings.get("nvme_paths")
    settings = {**SETTINGS, **settings}
    model, optimizer = _build()
    fresh = copy.deepcopy(optimizer.state_dict())
    threads = set(threading.enumerate())
    with Strike(at) as strike:
        try:
            tieroffload.offload(model, optimizer, **settings)
            fit(model, optimizer)
        except KeyboardInterrupt:
            assert strike.has_struck
    assert not torch.is_autocast_enabled("cpu") or strike.is_at_entry
    torch.set_autocast_enabled("cpu", False)
    engine = engine_of(model)
    if engine is None:  # struck before there was one: nothing was done to the model
        assert_ordinary(model)
        tieroffload.offload(model, optimizer, **settings)
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
    fit(model, optimizer)
    space = engine.space
    held_nbytes = sum(part.charged_nbytes for unit in space.units for part in unit.all_parts)
    assert engine.gradients.charged_nbytes == 0
    held_nbytes += engine.core.updates.passing_nbytes
    assert space.ledger[Tier.DEVICE].used_nbytes == held_nbytes
    account = engine.report()["tiers"]["device"]
    assert account["peak_nbytes"] <= account["budget_nbytes"]
    engine.close()
    assert not at or time.monotonic() - strike.since_s < 5
    assert_ordinary(model)
    actual = take_down(model, [optimizer])
    assert [key for key in expected if not same_bits(expected[key], actual.get(key))] == []
    deadline_s = time.monotonic() + 5
    while left := [t for t in threading.enumerate() if "tieroffload" in t.name and t not in threads]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.002)
    assert flash is None or os.listdir(flash[0]) == []
    return strike


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "delays": {"debug": ["poison", "delays"]},
    "activations": {"activations": "offload"},
}


def _places_in(functions: list[Callable[..., Any]], plain: Plain, **settings: Any) -> list[int]:
    """Each place of these functions, as it is passed last."""
    own: dict[str, set[int]] = {}
    for function in functions:
        lines, start = inspect.getsourcelines(function)
        file = "/".join(function.__module__.split(".")[1:]) + ".py"
        own.setdefault(file, set()).update(range(start, start + len(lines)))
    places = enumerate(_strike(0, plain, **settings).places, 1)
    return list({place: at for at, place in places if place[1] in own.get(place[0], ())}.values())


def _places(plain: Plain, settings: dict[str, Any], num_places: int | None) -> list[int]:
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
def test_con_04_ctrl_c_in_the_engines_own_code(variant: str, plain: Plain, one_thread: None) -> None:
    """CON-04: SIGINT at 5 seeded places of attach and fit: ends at once, whole values, and a next fit is exact."""
    for at in _places(plain, VARIANTS[variant], 5):
        _strike(at, plain, **VARIANTS[variant])


def test_ctrl_c_while_a_gradient_is_born(plain: Plain, one_thread: None) -> None:
    """At each place of the hook that charges it: what is charged afterwards is what is there."""
    ats = _places_in([Gradients.on_born], plain)
    assert len(ats) > 10
    for at in ats:
        _strike(at, plain)


def test_ctrl_c_while_weights_get_other_homes(plain_late: Plain, one_thread: None) -> None:
    """While fp32 homes become split masters: at each place the unit has the one or the other, and is listed so."""
    ats = _places_in([DeviceSpace.split_home, DeviceSpace.add_wire, UnitState.split_home], plain_late)
    assert len(ats) > 20
    for at in ats:
        _strike(at, plain_late)


@pytest.mark.parametrize("num_places", [6, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("debug", [["poison"], ["poison", "delays"]], ids="+".join)
def test_ctrl_c_while_streamed_updates_are_ordered(
    debug: list[str], num_places: int, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At places of what lines them up: none is half done, and what they pass through is charged as it is there."""
    monkeypatch.setattr(offload_engine, "_HOST_STREAMED_SHARE", 1.0)
    monkeypatch.setattr("lightning_tieroffload.engine.device_updates.choose_device_units", lambda *_: set())
    kernels = {"optimizer_kernel": "numba", "profile_steps": 0, "device_budget": 400_000}
    model, optimizer = _build()
    boundaries = [{key: value.clone() for key, value in model.state_dict().items()}]
    tieroffload.offload(model, optimizer, **{**SETTINGS, **kernels, "update_on": "cpu"})
    _fit(model, optimizer, boundaries)
    engine = engine_of(model)
    assert engine is not None
    engine.close()
    plain = Plain(_fit, boundaries, take_down(model, [optimizer]))
    settings = {**kernels, "update_on": "split", "debug": debug}
    orders = [Updates._order_streamed_update, StreamedUpdates.order, StreamedUpdates.reserve]
    ats = _places_in(orders, plain, **settings)
    assert len(ats) > 30
    for at in random.Random(0).sample(ats, min(num_places, len(ats))):
        _strike(at, plain, **settings)


@pytest.mark.slow
def test_ctrl_c_while_homes_on_flash_are_exchanged(plain_late: Plain, tmp_path: Path, one_thread: None) -> None:
    settings = {"nvme_paths": [str(tmp_path)], "state_home": "nvme"}
    settings["dram_budget"] = least_dram(_build, tmp_path, state_home="nvme") + 65536
    functions = [UnitState._close_arena, HostSpace.shrink, HostSpace._forget, HostSpace.grow, HostSpace.note_written]
    ats = _places_in(functions, plain_late, **settings)
    assert len(ats) > 20
    for at in ats:
        _strike(at, plain_late, **settings)


@pytest.mark.slow
def test_ctrl_c_while_casts_are_made_kept_and_dropped(plain_late: Plain, one_thread: None) -> None:
    functions = [
        Wire._stand_in, Wire._keep, Wire._drop, Wire.keep_casts, Wire.drop_casts, DeviceSpace._add_part,
        DeviceSpace._keep_old, DeviceSpace.home_cast, UnitState.make_old, UnitState.fill_old,
    ]  # fmt: skip
    ats = _places_in(functions, plain_late)
    assert len(ats) > 40
    for at in ats:
        _strike(at, plain_late)


def test_hooks_that_ctrl_c_left_are_taken_off() -> None:
    """Pushed, and struck before anybody knew: the engine's own and a checkpoint's, over those of an open context."""
    _model, _optimizer, engine = _attached()
    top = torch._C._autograd._top_saved_tensors_default_hooks
    with torch.autograd.graph.save_on_cpu():
        users = top(True)
        torch._C._autograd._push_saved_tensors_default_hooks(*_checkpoints_pair())
        assert push_hooks(engine.space, engine.gradients.on_unpack)
        engine.reset()
        assert top(True) == users
        torch._C._autograd._push_saved_tensors_default_hooks(*_checkpoints_pair())
        others, _ = _build()
        tieroffload.offload(others, **{**SETTINGS, "prefetch_units": 1})
        other = engine_of(others)
        assert other is not None
        for each in (engine, other):  # as each does when a checkpoint has pushed its own
            assert push_hooks(each.space, each.gradients.on_unpack, is_over_checkpoint=True)
        engine.reset()
        assert top(True) == users
        other.close()
    engine.close()


def test_a_checkpoint_that_ends_behind_reset_takes_off_nobodys_hooks() -> None:
    """Its generator lives as long as the exception's frames do; by then the hooks on top are somebody else's."""
    _model, _optimizer, engine = _attached()
    top = torch._C._autograd._top_saved_tensors_default_hooks
    late = torch.utils.checkpoint._checkpoint_without_reentrant_generator(
        lambda x: x, True, torch.utils.checkpoint.noop_context_fn, "default", False, True, torch.ones(2)
    )
    next(late)
    engine.reset()
    assert top(True) is None
    with torch.autograd.graph.save_on_cpu():
        users = top(True)
        late.close()
        assert top(True) == users
    again = torch.utils.checkpoint.checkpoint(lambda x: x.exp(), torch.ones(2, requires_grad=True), use_reentrant=False)
    again.sum().backward()
    assert top(True) is None
    engine.close()


@pytest.mark.parametrize("num_begun", [1, 2])
def test_watches_that_ctrl_c_left_are_taken_off(num_begun: int) -> None:
    """Begun, wholly or by half, and struck before anybody knew; another engine's stays."""
    _model, _optimizer, engine = _attached()
    others, mine = Watch(set(), None), Watch(set(), engine.space)
    others.begin()
    mine.__enter__()
    if num_begun == 2:
        mine._aside.__enter__()
    engine.reset()
    assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._get_dispatch_stack_at(0) is others
    assert torch._C._len_torch_function_stack() == 1
    others.end()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    engine.close()


def test_copies_that_ctrl_c_left_have_landed_behind_reset() -> None:
    """Struck between the order of a copy and the note of its ticket: its memory may go next."""
    _model, _optimizer, engine = _attached(debug=["delays"])
    target, source = torch.zeros(8), torch.ones(8)
    for _ in range(20):
        target.zero_()
        engine.space.streams.download([(target, source)], "left")
        engine.reset()
        assert torch.equal(target, source)
    engine.close()


def test_a_fetch_that_ctrl_c_cut_off_copies_nothing_into_memory_that_is_gone(monkeypatch: Any) -> None:
    model, _optimizer, engine = _attached(debug=["delays"])
    streams: Any = engine.space.streams
    order = streams.upload

    def struck(*arguments: Any) -> None:
        order(*arguments)
        raise KeyboardInterrupt

    for _ in range(10):
        monkeypatch.setattr(streams, "upload", struck)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, 64))
        assert streams._pending == []
        monkeypatch.undo()
        engine.reset()
    engine.close()


def test_autocast_ends_where_ctrl_c_strikes_us_at_its_end() -> None:
    class Struck:
        def call(self) -> None:
            raise KeyboardInterrupt

    model, optimizer = _build()
    tieroffload.offload(model, optimizer, **SETTINGS)
    engine, struck = engine_of(model), Struck()
    assert engine is not None
    torch_patches.when_autocast_ends(struck.call)
    before = torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    with pytest.raises(KeyboardInterrupt), torch.autocast("cpu", torch.float16, cache_enabled=False):
        pass
    assert not torch.is_autocast_enabled("cpu")
    assert before == (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
    del struck
    engine.close()


def test_old_casts_that_died_are_not_counted_twice_by_reset() -> None:
    model, optimizer, engine = _attached(device_budget="1MiB")
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(torch.ones(4, 64)).float() ** 2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        if step == 2:
            loss.backward(retain_graph=True)
            assert any(part.is_resident for unit in engine.units for part in unit._old_parts.values())
        del loss
        gc.collect()
    engine.reset()
    with torch.no_grad():
        model(torch.ones(4, 64))
    held_nbytes = sum(part.charged_nbytes for unit in engine.units for part in unit.all_parts)
    assert engine.space.ledger[Tier.DEVICE].used_nbytes == held_nbytes
    engine.close()


def test_a_mapping_that_leaves_the_store_is_not_listed(plain_late: Plain, tmp_path: Path, monkeypatch: Any) -> None:
    """Struck right behind: reset, and the rest goes on without it."""
    settings = {**SETTINGS, "nvme_paths": [str(tmp_path)], "state_home": "nvme"}
    settings["dram_budget"] = least_dram(_build, tmp_path, state_home="nvme") + 65536
    model, optimizer = _build()
    fresh = copy.deepcopy(optimizer.state_dict())
    tieroffload.offload(model, optimizer, **settings)
    engine = engine_of(model)
    assert engine is not None
    forget = engine.space.host._forget

    def struck(segment: Any) -> None:
        forget(segment)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.space.host, "_forget", struck)
    with pytest.raises(KeyboardInterrupt):
        plain_late.fit(model, optimizer)
    monkeypatch.undo()
    engine.reset()
    optimizer.zero_grad()
    model.load_state_dict(plain_late.boundaries[0])
    optimizer.load_state_dict(fresh)
    plain_late.fit(model, optimizer)
    engine.close()
    actual = take_down(model, [optimizer])
    assert [key for key in plain_late.expected if not same_bits(plain_late.expected[key], actual.get(key))] == []


def _checkpoints_pair() -> Any:
    hooks = torch.utils.checkpoint._checkpoint_hook(types.SimpleNamespace(unpack_error_cb=None))
    return hooks.pack_hook, hooks.unpack_hook


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["default", "delays", "activations"])
def test_con_04_ctrl_c_at_every_place(variant: str, plain: Plain, one_thread: None) -> None:
    """CON-04: the same at every place of our code that such a fit passes, the first time and once at random."""
    for at in _places(plain, VARIANTS[variant], None):
        _strike(at, plain, **VARIANTS[variant])


def _strided(plain: Plain, settings: dict[str, Any], num_places: int) -> list[int]:
    """Places in the order of a first pass, equally far from each other: those passed a thousand times count once."""
    every = _places(plain, settings, None)
    return every[:: max(1, len(every) // num_places)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["default", "delays"])
def test_ctrl_c_with_late_backward_under_autocast(variant: str, plain_late: Plain, one_thread: None) -> None:
    """Casts, wire parts, and old casts that a graph still has: at 60 places."""
    for at in _strided(plain_late, VARIANTS[variant], 60):
        _strike(at, plain_late, **VARIANTS[variant])


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["plain", "plain_late"])
@pytest.mark.parametrize("what", ["state", "all"])
def test_ctrl_c_with_homes_on_flash(
    what: str, loop: str, request: pytest.FixtureRequest, tmp_path: Path, one_thread: None
) -> None:
    """The optimizer's state alone, and everything: at 60 places; and no file is left."""
    settings = {"nvme_paths": [str(tmp_path)], "state_home": "nvme"}
    if what == "all":
        settings["dram_budget"] = least_dram(_build, tmp_path, state_home="nvme") + 65536
    plain: Plain = request.getfixturevalue(loop)
    for at in _strided(plain, settings, 60):
        _strike(at, plain, **settings)


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


def _held(engine: Any) -> tuple[list[tuple[str, int]], int, int, int, int]:
    """Mappings of all blocks, how many arenas are kept, bytes in DRAM, in the ledger, and on flash."""
    space = engine.space
    blocks = [block for unit in space.units for block in unit.blocks]
    store = space.host.store
    return (
        sorted((block.shard, segment.arena.nbytes) for block in blocks for segment in block.segments),
        sum(len(unit._arenas) for unit in space.units),
        sum(block.dram_nbytes for block in blocks if not block.is_paged),
        space.ledger[Tier.DEVICE].used_nbytes - sum(p.charged_nbytes for u in space.units for p in u.all_parts),
        0 if store is None else sum(store.nbytes_of(name) for name in store._shards),
    )


def _fit_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps of two micro-batches, the second under autocast."""
    seed_all(1)
    for _ in range(2):
        optimizer.zero_grad()
        for is_cast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = (model(torch.randn(4, 64)).float() ** 2).mean()
            loss.backward()
        optimizer.step()


def _held_after(at: int, settings: dict[str, Any]) -> tuple[Any, Strike]:
    """What is held after a job that was struck, recovered and was done again to its end."""
    model, optimizer, engine = _attached(**settings)
    with Strike(at) as strike:
        try:
            _fit_twice(model, optimizer)
        except KeyboardInterrupt:
            assert strike.has_struck
    torch.set_autocast_enabled("cpu", False)
    engine.reset()
    _fit_twice(model, optimizer)
    _fit_twice(model, optimizer)
    optimizer.zero_grad()
    engine.reset()
    held = _held(engine)
    engine.close()
    return held, strike


_MAKERS = [
    UnitState.new_arena, UnitState.host_grad, UnitState.split_home, UnitState._close_arena, UnitState._drop_wide_grads,
    UnitState._narrow_view, UnitState.allot_state, HostSpace.grow, HostSpace.shrink, HostSpace.reserve,
    HostSpace._forget,
]  # fmt: skip


@pytest.mark.parametrize("home", ["dram", pytest.param("nvme", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ctrl_c_leaves_no_memory_that_nobody_uses(
    home: str, is_everywhere: bool, tmp_path: Path, one_thread: None
) -> None:
    """Struck where mappings are made, stored and closed: as many are there as without, of as many bytes."""
    settings: dict[str, Any] = {}
    if home == "nvme":
        settings = {"nvme_paths": [str(tmp_path)], "state_home": "nvme"}
        settings["dram_budget"] = least_dram(_build, tmp_path, state_home="nvme") + 65536
    expected, strike = _held_after(0, settings)
    own = {
        ("/".join(each.__module__.split(".")[1:]) + ".py", line)
        for each in _MAKERS
        for lines, start in [inspect.getsourcelines(each)]
        for line in range(start, start + len(lines))
    }
    first: dict[Any, int] = {}
    for at, place in enumerate(strike.places, 1):
        if is_everywhere or place[:2] in own:
            first.setdefault(place, at)
    assert len(first) > 20
    leaks = {place: held for place, at in first.items() if (held := _held_after(at, settings)[0]) != expected}
    assert leaks == {}
