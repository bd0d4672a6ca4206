"""Updates on the device of state that is at home in DRAM: the CPU kernels' bits, slice by slice, beside everything."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import SLOW, Variant, assert_exact, attach, run, same_bits, seed_all, take_down
from fakes import batches
from test_device_updates import build, loop
from torch import nn

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine import offload_engine, streamed_updates
from lightning_tieroffload.engine.offload_engine import OffloadEngine
from lightning_tieroffload.engine.streamed_updates import choose_streamed_units, staging_nbytes
from lightning_tieroffload.engine.streams import LANDED, DelayedStreams
from lightning_tieroffload.engine.unit_state import Factor, FactorScales

KERNELS: dict[str, Any] = {"optimizer_kernel": "numba", "profile_steps": 0}


@pytest.fixture
def all_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No unit lives on the device, and none is updated by the CPU once it has state."""
    monkeypatch.setattr(offload_engine, "_HOST_STREAMED_SHARE", 1.0)
    monkeypatch.setattr("lightning_tieroffload.engine.device_updates.choose_device_units", lambda *_: set())


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize(
    "variant",
    [
        Variant(budget=900_000),
        Variant(SLOW, prefetch=2, seed=1, every_look=False, budget=900_000),
        Variant(SLOW, prefetch=4, seed=2, every_look=False, budget=500_000),
        Variant(budget=400_000, every_look=False),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("amp", "accumulate", "clip", "set_to_none"),
    [(False, 1, 0.5, True), (True, 1, 0.5, True), (True, 3, 0.5, True), (True, 1, None, False), (False, 2, 1e9, False)],
)
def test_the_same_bits_as_updates_on_the_cpu(
    variant: Variant, amp: bool, accumulate: int, clip: float | None, set_to_none: bool, share: float,
    all_streamed: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(offload_engine, "_HOST_STREAMED_SHARE", share)
    train = loop(amp, accumulate, clip, set_to_none)
    reference = run(build(), train, Variant(), num_expected=6, update_on="cpu", **KERNELS)
    ours = run(build(), train, variant, num_expected=6, update_on="split", **KERNELS)
    assert_exact(reference, ours, str(variant))
    counts = ours.reports[0]["num_unit_updates"]
    assert counts["streamed"] >= (30 if share == 1.0 else 10), counts


@pytest.mark.parametrize(
    "options",
    [
        {"cls": torch.optim.SGD, "momentum": 0.9, "nesterov": True},
        {"cls": torch.optim.SGD},  # keeps nothing: there is nothing to stream
        {"cls": torch.optim.Adam, "weight_decay": 0.1, "betas": (0.6, 0.7)},
        {"cls": torch.optim.AdamW, "maximize": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("variant", [Variant(budget=700_000), Variant(SLOW, seed=4, budget=700_000)], ids=str)
def test_every_kernel_that_keeps_state(variant: Variant, options: dict[str, Any], all_streamed: None) -> None:
    make = build(**options)
    reference = run(make, loop(True), Variant(), num_expected=6, update_on="cpu", **KERNELS)
    ours = run(make, loop(True), variant, num_expected=6, update_on="split", **KERNELS)
    assert_exact(reference, ours, str(variant))
    has_state = options["cls"] is not torch.optim.SGD or "momentum" in options
    assert (ours.reports[0]["num_unit_updates"]["streamed"] > 0) == has_state


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Neighbours in a unit in different groups, which other optimizers or rates may have."""
    params = list(model.parameters())
    return [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 3e-3, "weight_decay": 0.2}]


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_neighbours_of_several_groups_and_optimizers_whose_rates_change_at_once(
    num_optimizers: int, all_streamed: None
) -> None:
    results = []
    for update_on, debug in (("cpu", ["poison"]), ("split", ["poison"]), ("split", SLOW)):
        seed_all(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.LayerNorm(48)) for _ in range(4)])
        groups = groups_of(model)
        optimizers = [torch.optim.AdamW([group], lr=1e-2) for group in groups]
        if num_optimizers == 1:
            optimizers = [torch.optim.AdamW(groups)]
        engine = attach(model, optimizers[0], Variant(debug, budget=700_000), update_on=update_on, **KERNELS)
        for optimizer in optimizers[1:]:
            engine.adopt_optimizer(optimizer)
        for step, x in enumerate(batches(5, 4, 48)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                for group in optimizer.param_groups:  # a scheduler does, before the update has run
                    group["lr"] *= 0.5
                    group["betas"] = (0.9 - 0.01 * step, 0.99)
                optimizer.zero_grad()
        counts = engine.report()["num_unit_updates"]
        assert (counts["streamed"] > 0) == (update_on == "split"), counts
        engine.close()
        results.append({**model.state_dict(), **{
            f"{i}/{j}/{k}": entry[k] for i, o in enumerate(optimizers) for j, entry in enumerate(o.state.values())
            for k in ("exp_avg", "exp_avg_sq", "step")
        }})  # fmt: skip
    for other in results[1:]:
        assert [key for key in results[0] if not torch.equal(results[0][key], other[key])] == []


class Small(nn.Module):
    """Small weights between larger ones: in DRAM they lie where others' padding might be."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))
        self.scale = nn.Parameter(torch.randn(width))
        self.last = nn.Parameter(torch.randn(width, width))
        self.is_biased = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.first) * self.scale * 0.1
        return (x + self.bias if self.is_biased else x) @ self.last


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("seed", [0, 2])
def test_what_lies_between_what_is_updated_is_not_written(seed: int, amp: bool, all_streamed: None) -> None:
    """Of two groups, and where some have no gradient: a copy down of what lies between would bring old values back."""
    results = []
    for update_on, variant in (("cpu", Variant()), ("split", Variant(SLOW, seed=seed, budget=8_000_000))):
        seed_all(0)
        model = nn.Sequential(*[Small() for _ in range(3)])
        groups = [
            {"params": [p for block in model for p in (block.bias, block.last)], "weight_decay": 0.3},
            {"params": [p for block in model for p in (block.first, block.scale)]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        engine = attach(model, optimizer, variant, update_on=update_on, **KERNELS)
        for number, x in enumerate(batches(6, 4, 48)):
            for block in model:
                block.is_biased = number % 3 != 2
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (engine.report()["num_unit_updates"]["streamed"] > 10) == (update_on == "split")
        engine.close()
        results.append(take_down(model, [optimizer]))
    assert [key for key in results[0] if not same_bits(results[0][key], results[1][key])] == []


def test_state_that_is_not_updated_is_its_holders_to_write(all_streamed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its neighbours are on their way through the device, too: nothing of it travels with them."""
    seed_all(0)
    model = nn.Sequential(*[Small() for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = attach(model, optimizer, Variant(budget=8_000_000), update_on="split", **KERNELS)
    model(torch.randn(4, 48)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    update, written = streamed_updates.StreamedUpdates._update, []

    def write(self: Any, job: Any, index: int, tensors: Any) -> None:
        if job.unit is engine.units[0] and not written:
            written.append(held.fill_(7.0))
        update(self, job, index, tensors)

    monkeypatch.setattr(streamed_updates.StreamedUpdates, "_update", write)
    for block in model:
        block.is_biased = False
    model(torch.randn(4, 48)).square().mean().backward()
    held = optimizer.state[model[0].bias]["exp_avg"]
    optimizer.step()
    engine.flush()
    assert written
    assert bool((held == 7.0).all())
    engine.close()


def test_loaded_state_of_a_unit_that_lived_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device had of its state before is not written over what was loaded."""
    monkeypatch.setattr(offload_engine, "_HOST_STREAMED_SHARE", 1.0)
    ends = []
    for update_on in ("cpu", "split"):
        model, optimizer, engine = small(1 << 30, update_on=update_on)
        for seed in range(2):
            step(model, optimizer, seed)
        saved = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer, 2)
        assert (engine.report()["num_unit_updates"]["device"] > 0) == (update_on == "split")
        optimizer.load_state_dict(saved)
        del saved
        for unit in engine.units if update_on == "split" else ():  # as where less fits from now on
            assert any(part.is_resident for part in unit.device_state)
            choice = dataclasses.replace(unit.choice, param_home=Tier.DRAM, state_home=Tier.DRAM, grad_home=Tier.DRAM)
            engine.core.apply(unit, choice)
        step(model, optimizer, 3)
        step(model, optimizer, 4)
        assert (engine.report()["num_unit_updates"]["streamed"] > 0) == (update_on == "split")
        engine.close()
        ends.append(take_down(model, [optimizer]))
    assert [key for key in ends[0] if not same_bits(ends[0][key], ends[1][key])] == []


def small(budget: int, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, OffloadEngine]:
    seed_all(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = attach(model, optimizer, Variant(budget=budget), **{"update_on": "split", **KERNELS, **settings})
    return model, optimizer, engine


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    torch.manual_seed(seed)
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_state_that_somebody_holds_is_new_when_step_returns(all_streamed: None) -> None:
    """He reads it without asking anybody, so the CPU updates its unit, and is waited for."""
    model, optimizer, engine = small(700_000)
    step(model, optimizer)
    held = optimizer.state[model[1].weight]["exp_avg"]
    for seed in (1, 2):
        before, counts = held.clone(), dict(engine.report()["num_unit_updates"])
        step(model, optimizer, seed)
        assert not torch.equal(held, before)
        now = engine.report()["num_unit_updates"]
        assert now["cpu"] - counts["cpu"] == 1
        assert now["streamed"] - counts["streamed"] == 3
    assert held is optimizer.state[model[1].weight]["exp_avg"]
    del held
    counts = engine.report()["num_unit_updates"]
    step(model, optimizer, 3)
    assert engine.report()["num_unit_updates"]["streamed"] - counts["streamed"] == 4
    engine.close()


def test_a_checkpoint_right_behind_step_and_a_load(all_streamed: None) -> None:
    ends = []
    for is_resumed in (False, True):
        model, optimizer, engine = small(700_000)
        for seed in range(3):
            step(model, optimizer, seed)
        if is_resumed:
            saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
            engine.close()
            model, optimizer, engine = small(700_000)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            del saved  # whose tensors the optimizer has now, and would be seen to share
        for seed in range(3, 6):
            step(model, optimizer, seed)
        assert engine.report()["num_unit_updates"]["streamed"] >= 8
        engine.close()
        ends.append({k: v.clone() for k, v in model.state_dict().items()})
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_what_state_passes_through_makes_way_for_compute(all_streamed: None) -> None:
    """Where a unit needs all of the budget, the room for state on its way is given back, and had again later."""
    model, optimizer, engine = small(300_000)
    for seed in range(2):
        step(model, optimizer, seed)
    engine.flush()
    account = engine.space.ledger[Tier.DEVICE]
    assert engine.core.updates.passing_nbytes == staging_nbytes(300_000) > 0
    with engine.space.lock:
        assert engine.space.make_room(300_000, keep=None, what="all of it")
    assert engine.core.updates.passing_nbytes == 0 == account.used_nbytes
    counts = engine.report()["num_unit_updates"]
    step(model, optimizer, 2)
    assert engine.report()["num_unit_updates"]["streamed"] - counts["streamed"] == 4
    assert account.peak_nbytes <= 300_000
    engine.close()
    assert account.used_nbytes == 0


def test_what_state_passes_through_is_given_back_once_none_does(
    all_streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, engine = small(700_000)
    for seed in range(3):
        step(model, optimizer, seed)
    assert engine.core.updates.passing_nbytes > 0
    monkeypatch.setattr(offload_engine, "_HOST_STREAMED_SHARE", 0.0)
    step(model, optimizer, 3)  # the plan for the next step is made at its end
    step(model, optimizer, 4)
    assert engine.core.updates.passing_nbytes == 0
    assert engine.report()["num_unit_updates"]["cpu"] == 8
    engine.close()


def test_a_budget_with_no_room_for_passing_state_leaves_updates_to_the_cpu(all_streamed: None) -> None:
    model, optimizer, engine = small(60_000)
    assert staging_nbytes(60_000) == 0
    for seed in range(3):
        step(model, optimizer, seed)
    assert engine.report()["num_unit_updates"] == {"cpu": 12, "device": 0, "streamed": 0}
    engine.close()


def test_an_error_on_the_way_reaches_the_thread_that_trains(
    all_streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, engine = small(700_000)
    for seed in range(2):
        step(model, optimizer, seed)
    engine.flush()

    def fail(*_: Any) -> None:
        raise RuntimeError("the kernel failed")

    monkeypatch.setattr(streamed_updates.StreamedUpdates, "_update", fail)

    def steps() -> None:
        for seed in (2, 3):
            step(model, optimizer, seed)

    with pytest.raises(RuntimeError, match="the kernel failed"):
        steps()
    monkeypatch.undo()
    engine.reset()
    step(model, optimizer, 4)
    engine.close()


def test_close_behind_an_error_on_the_way_leaves_no_thread_and_no_memory(
    all_streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was seen, so ``close()`` neither raises it again nor stops halfway."""
    before = set(threading.enumerate())
    model, optimizer, engine = small(700_000)
    for seed in range(2):
        step(model, optimizer, seed)
    engine.flush()
    monkeypatch.setattr(streamed_updates.StreamedUpdates, "_update", lambda *_: 1 / 0)

    def steps() -> None:
        for seed in (2, 3):
            step(model, optimizer, seed)

    with pytest.raises(ZeroDivisionError):
        steps()
    engine.close()
    assert set(threading.enumerate()) <= before
    assert engine.core.updates.passing_nbytes == 0 == engine.space.ledger[Tier.DEVICE].used_nbytes


def test_the_kernels_threads_are_started_once(all_streamed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With loaded state the first step streams every unit; the next may have the CPU update one while they run."""
    model, optimizer, engine = small(700_000)
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    engine.close()
    made = []

    def make(device: torch.device, make: Any = offload_engine._make_pool) -> Any:
        made.append(threading.current_thread())
        return make(device)

    monkeypatch.setattr(offload_engine, "_make_pool", make)
    model, optimizer, engine = small(700_000)
    with engine.space.lock:
        engine.core._plan_homes()
    optimizer.load_state_dict(saved)
    del saved
    step(model, optimizer)
    assert engine.report()["num_unit_updates"]["streamed"] > 0
    engine.close()
    assert made == [threading.current_thread()]


@pytest.mark.parametrize(("seconds", "rate"), [(2.0, 50.0), (0.0, None), (-1.0, None), (None, None)])
def test_a_rate_is_of_what_has_begun_and_ended(seconds: float | None, rate: float | None, all_streamed: None) -> None:
    """Else the measured share would be negative, or more than all."""
    _, _, engine = small(700_000)
    streamed = engine.core.updates._streamed
    streamed._pipe, streamed._numel = SimpleNamespace(seconds=lambda begin, end: seconds), 100
    assert streamed.rate() == rate
    streamed._pipe = None
    engine.close()


@pytest.mark.parametrize("share", [0.0, 0.03, 0.25, 1 / 3, 0.5, 0.9, 1.0])
def test_streamed_units_are_spread_evenly(share: float) -> None:
    """At any point of the order no more than one unit is missing or too many."""
    engine = small(700_000)[2]
    units = [unit for unit in engine.units if unit.grad_nbytes] * 12
    chosen: list[bool] = []

    class Unit:
        is_paged = False

        def __init__(self) -> None:
            self.slots = units[0].slots

    copies: list[Any] = [Unit() for _ in units]
    found = choose_streamed_units(copies, share)
    for num, unit in enumerate(copies, 1):
        chosen.append(unit in found)
        assert abs(sum(chosen) - share * num) <= 0.5 + 1e-9
    engine.close()


def test_a_pipe_orders_nothing_but_what_is_named() -> None:
    """Delayed streams run a store's work only when it is waited for, and then all that it names, each once."""
    pipe = DelayedStreams(seed=1).make_pipe()
    host, device, ran = torch.arange(4.0), torch.zeros(4), []
    loaded = pipe.load([(device, host)], "up", [LANDED])

    def work() -> None:
        ran.append(1)
        device.mul_(2)

    worked = pipe.work(work, "work", [loaded], None)
    stored = pipe.store([(host, device)], "down", [worked], None)
    stored.wait()
    assert host.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert ran == [1]
    assert stored.done()
    stored.wait()
    worked.wait()
    assert ran == [1]
    assert pipe.seconds(loaded, stored) is None


@pytest.mark.parametrize("debug", [["poison"], SLOW], ids=["poison", "slow"])
@pytest.mark.parametrize("amp", [False, True])
def test_a_model_that_is_dropped_with_updates_on_their_way(debug: list[str], amp: bool, all_streamed: None) -> None:
    """Homes stay mapped until the last copy has read and written them, and then they go."""
    for seed in range(4):
        seed_all(0)
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = attach(model, optimizer, Variant(debug, seed=seed, budget=700_000), update_on="split", **KERNELS)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = model(torch.randn(4, 64)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.report()["num_unit_updates"]["streamed"] > 0
        space, alive = engine.space, weakref.ref(model)
        del model, optimizer, engine, loss
        gc.collect()
        assert alive() is None
        space.streams.settle()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def sparse_columns(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.full((tensor.shape[0], 2 * tensor.shape[1]), float("nan"))
    wide[:, ::2] = tensor
    return wide[:, ::2]


@pytest.mark.parametrize("how", [transposed, sparse_columns])
@pytest.mark.parametrize("is_loaded", [True, False])
@pytest.mark.parametrize("update_on", ["cpu", "device", "split"])
def test_state_with_other_strides_than_its_parameters(
    update_on: str, is_loaded: bool, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model in another memory format, or put there by user code: kernels go through memory, element by element."""
    if update_on == "split":
        monkeypatch.setattr("lightning_tieroffload.engine.device_updates.choose_device_units", lambda *_: set())
    ends = []
    for changes in (False, True):
        model, optimizer, engine = small(4_000_000, update_on=update_on if changes else "cpu")
        for seed in range(2):
            step(model, optimizer, seed)
        p = model[1].weight
        state = optimizer.state_dict()
        for entry in state["state"].values() if changes else ():
            entry["exp_avg"] = how(entry["exp_avg"]) if entry["exp_avg"].ndim == 2 else entry["exp_avg"]
            entry["exp_avg_sq"] = how(entry["exp_avg_sq"]) if entry["exp_avg"].ndim == 2 else entry["exp_avg_sq"]
        if is_loaded:
            optimizer.load_state_dict(state)
        elif changes:
            optimizer.state[p].update(state["state"][2])
        entry = state = None
        for seed in range(2, 4):
            step(model, optimizer, seed)
        held = optimizer.state[p]["exp_avg"]
        step(model, optimizer, 4)  # in place, as the plain run
        assert held is optimizer.state[p]["exp_avg"]
        engine.close()
        ends.append({**take_down(model, [optimizer]), "held": held.clone()})
        del held
    assert [key for key in ends[0] if not same_bits(ends[0][key], ends[1][key])] == []


def test_state_that_no_kernel_takes_is_what_torchs_class_says(all_streamed: None) -> None:
    for update_on in ("cpu", "split"):
        model, optimizer, engine = small(700_000, update_on=update_on)
        step(model, optimizer)
        entry = optimizer.state[model[1].weight]
        entry["exp_avg"] = entry["exp_avg"].double()
        del entry

        def steps(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for seed in (1, 2):
                step(model, optimizer, seed)

        with pytest.raises(RuntimeError, match=r"dtype"):
            steps()
        engine.close()


def test_factors_as_one_tensor_are_made_once_for_all_that_share_them() -> None:
    scales = FactorScales(torch.device("cpu"))
    first, second = (Factor(value, value, LANDED) for value in (torch.tensor(0.5), torch.tensor(2.0).double()))
    made = scales.of([first, second])
    assert isinstance(made, torch.Tensor)
    assert made.dtype == torch.float32
    assert made.tolist() == [0.5, 2.0]
    assert scales.of([first, second]) is made
    assert list(scales.of([])) == []
    assert [float(each) for each in scales.of([second])] == [2.0]
    assert scales.of([first, second]) is not made
