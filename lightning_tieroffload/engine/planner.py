"""Floor 8. The planner in the engine: when steps are watched and plans made, and from a plan to each unit's choice.

Owns when to plan: after ``profile_steps`` watched steps, after drift, for a larger batch, when a unit turns out not to
be one that can be recomputed, after an out-of-memory error. Watched steps become a profile in
``engine/profile_maker.py``, the profile a planning problem in ``engine/instance_maker.py``, the problem a plan in
``engine/plan_search.py``. What the engine can realise is handed in (``placements``); what a choice moves is the
engine's business (``apply``). Called between two steps unless it says otherwise.

[Note: what a budget covers] ``device_budget`` and ``dram_budget`` cover what the engine holds, and that is enforced at
each charge, whatever a plan says. What autograd keeps between a unit's forward and its backward is counted against
``device_budget`` by the plan, and only if the plan may change it (``activations="auto"``): then units recompute or
offload until staged parameters, gradients and kept activations fit together. If they do not fit with everything that
can leave gone, that is said once, with the least budget, and training goes on with everything that can leave gone. With
``keep`` activations are the script's own memory, as in the plain run. Kernels' workspace, autocast's casts and the loss
are nobody's: beside every budget, and in the forecast's peak on a GPU, as seen in the watched steps. On a GPU ``auto``
leaves part of the memory to activations (config.py, [Note: margins]); the plan counts with the whole.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import logging
import os
import random
import statistics
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.instance_maker import ACTIVATIONS_OF_SETTING, InstanceMaker
from lightning_tieroffload.engine.placement import (
    REST,
    Placement,
    as_option,
    code_of,
    homes_of,
    names_of,
    placement_key,
)
from lightning_tieroffload.engine.plan_search import PlanSearch
from lightning_tieroffload.engine.profile_maker import MeasuredSteps, ProfileMaker
from lightning_tieroffload.engine.profiler import Profiler, machine_name, measure_machine
from lightning_tieroffload.engine.unit_state import UnitState
from lightning_tieroffload.errors import ConfigError, UnsupportedError
from lightning_tieroffload.planning.cost_model import ActivationChoice, Choice, Instance, UpdatePlace
from lightning_tieroffload.planning.plan import Forecast, Plan, alive_peak_nbytes, held_peak_nbytes
from lightning_tieroffload.planning.profile import PROFILE_FILE_NAME, MachineProfile, Profile

__all__ = ["Planner"]

_log = logging.getLogger(__name__)

_DRIFT_FRAC = 0.15
_OFF_FRAC = {"cuda": 0.05, "cpu": 0.10}  # more than this, and the plan's own steps are watched
_LINK_DRIFT_FRAC = 0.3
_NUM_DRIFT_STEPS = 20
_LEAST_STEPS_BETWEEN = 100
_GROWTH_FRAC = 1.05  # a batch this much larger than the largest planned for asks for a plan of its own
_AFTER_OUT_OF_MEMORY_FRAC = 0.9
_NUM_STEPS_TO_SETTLE = 2
_MOST_MORE_STEPS = 2  # watched beyond profile_steps, where what is where has changed meanwhile
_NUM_PLANS_SAID = 16
_SAME_NOTES = ("num_micro_batches", "activations")  # besides its key, what a profile must share with a job to serve it


class Planner:
    """The plan of one device space.

    Args:
        placements: what the engine can realise for a unit just now, its present placement included.
        state_nbytes: bytes of the unit's optimizer state.
        apply: gives a unit its choice and moves what has to move. With ``activations_only`` in the middle of a step.
        can_offload: whether there is DRAM for activations that the plan sends there.
        why_not_recompute: why a unit's activations are kept though the plan says recompute; None where it does.
        device_units: the units whose state the engine's fixed policy would keep on the device within so many bytes.
    """

    def __init__(
        self,
        config: TierOffloadConfig,
        space: DeviceSpace,
        profiler: Profiler,
        *,
        placements: Callable[[UnitState], Collection[Placement]],
        state_nbytes: Callable[[UnitState], int],
        apply: Callable[[UnitState, Choice], None],
        can_offload: Callable[[], bool],
        why_not_recompute: Callable[[UnitState], str | None],
        device_units: Callable[[int], Collection[UnitState]],
    ) -> None:
        self.plan: Plan | None = None
        self._device_units = device_units
        self._placed: collections.deque[object] = collections.deque(maxlen=2)  # what was where when watched steps began
        self.profile: Profile | None = None
        self.num_plans = 0
        self.on_plan: Callable[[str], None] | None = None
        """Is told of each plan that is followed, in a line, where the log does not show it. On the training thread."""
        self.said: collections.deque[dict[str, Any]] = collections.deque(maxlen=_NUM_PLANS_SAID)
        """The last plans that were followed: after how many steps, why, and what was expected of them."""
        self._config = config
        self._space = space
        self._profiler = profiler
        self._placements = placements
        self._apply = apply
        self._why_not_recompute = why_not_recompute
        steps = config.profile_steps
        # Beside a GPU what was planned by itself was slower than the cautious plan: see "GPU" in docs/log.md.
        self._profile_steps = (0 if space.device.type == "cuda" else 2) if steps == "auto" else steps
        self._counts_activations = config.activations == "auto"
        self._machine: MachineProfile | None = None
        self._is_fixed = False  # by plan_file
        self._cannot_recompute = refused = weakref.WeakSet[UnitState]()
        self._profiles = ProfileMaker(config, space, profiler, state_nbytes=state_nbytes)
        self._instances = InstanceMaker(
            config,
            space,
            placements=placements,
            can_offload=can_offload,
            can_recompute=lambda unit: unit not in refused,
        )
        self._budget_frac = 1.0
        self._num_steps = 0
        self._planned_at = 0
        self._planned_units: list[int] = []
        self._largest_numel = 0
        self._first_index: int | None = None
        self._growth = 1.0
        self._profiled_numel = 0
        self._laps_s: list[float] = []
        self._measured_s: dict[object, float] = {}  # what watched steps took, by what was where in them
        self._baseline_s: float | None = None
        self._link_rates: dict[str, float] | None = None  # of large copies, when the plan had settled
        self._last_s: float | None = None
        self._has_warned = False
        self._has_corrected = False
        self._saved: Profile | None = None  # of an earlier run, until it is known whether it is of this job
        self.first_unit: int | None = None
        """Index of the unit whose input says how large a batch is; None while nothing depends on it."""

    # ------------------------------------------------------------------------------------------------- when
    def start(self) -> None:
        """Watch the first steps, which run on the cautious plan."""
        if self._profile_steps > 0 and not self._is_fixed:
            self._saved = self._read_profile()
            self._watch()

    def _watch(self) -> None:
        self.first_unit = None
        self._space.on_saved = self._profiler.saved
        self._placed.clear()
        self._placed.append(self._places())
        self._profiler.begin()

    def _places(self) -> object:
        return tuple((unit.index, unit.wire is not None, homes_of(unit.choice)) for unit in self._space.units)

    def _end_watched_step(self) -> bool:
        """Whether enough has been seen. Where steps began by placing things anew, a few more are watched."""
        places = self._places()
        is_settled = len(self._placed) == 2 and all(before == places for before in self._placed)
        self._placed.append(places)
        num_more = self._profiler.end_step(is_settled=is_settled) - self._profile_steps
        num_wanted = min(2, self._profile_steps - 1)
        return num_more >= _MOST_MORE_STEPS or (num_more >= 0 and self._profiler.num_settled() >= num_wanted)

    def _stop_watching(self) -> None:
        self._space.on_saved = None
        self._profiler.end()

    def on_step(self) -> None:
        """A step of the optimizer has been ordered."""
        now_s = time.perf_counter()
        self._num_steps += 1
        if self._profiler.is_on:
            is_enough = self._end_watched_step()
            if self._plan_from_file():
                self._last_s = None
            elif is_enough:
                self._plan_from_steps()
                self._last_s = None
            return
        if self.plan is None or self._is_fixed:
            return
        since = self._num_steps - self._planned_at
        if self._last_s is not None and since > _NUM_STEPS_TO_SETTLE:
            self._laps_s.append(now_s - self._last_s)
        self._last_s = now_s
        if [unit.index for unit in self._space.units] != self._planned_units:
            _log.info("units have come or gone: the next steps are watched, and the plan is made again")
            self._measured_s.clear()
            self._watch()
        elif since == _NUM_STEPS_TO_SETTLE and self._has_refusals():
            self._replan("units that cannot be recomputed")
        elif self._has_drifted():
            self._watch()
        elif (link := self._drifted_link()) is not None:
            _log.warning("%s: the next %d steps are watched, and the plan is made again", link, self._profile_steps)
            self._machine = None
            self._measured_s.clear()
            self._watch()

    def _has_refusals(self) -> bool:
        refused = {
            unit
            for unit in self._space.units
            if unit.choice.activation is ActivationChoice.RECOMPUTE
            and unit not in self._cannot_recompute
            and self._why_not_recompute(unit) is not None
        }
        self._cannot_recompute.update(refused)
        return bool(refused) and self._counts_activations

    def _has_drifted(self) -> bool:
        laps_s = self._laps_s[-_NUM_DRIFT_STEPS:]
        if self._baseline_s is None:
            if len(laps_s) >= 5:
                self._baseline_s = statistics.median(laps_s)
                self._laps_s = []
                return self._is_off(self._baseline_s)
            return False
        if len(laps_s) < _NUM_DRIFT_STEPS or self._num_steps - self._planned_at < _LEAST_STEPS_BETWEEN:
            return False
        low_s, high_s = self._baseline_s * (1 - _DRIFT_FRAC), self._baseline_s * (1 + _DRIFT_FRAC)
        if not (max(laps_s) < low_s or min(laps_s) > high_s):
            self._laps_s = laps_s
            return False
        _log.warning(
            "the last %d steps took %.3g s, %.3g s when the plan was made: the next %d steps are watched, and the plan "
            "is made again",
            _NUM_DRIFT_STEPS, statistics.median(laps_s), self._baseline_s, self._profile_steps,
        )  # fmt: skip
        self._measured_s.clear()
        return True

    def _drifted_link(self) -> str | None:
        """The first link whose large copies have become clearly slower or faster since the plan settled, and by what.

        Asked every few steps; the first answer after a plan is what later ones are compared with.
        """
        if (self._num_steps - self._planned_at) % _NUM_DRIFT_STEPS:
            return None
        rates = self._space.streams.rates
        now = rates.medians()
        rates.clear()
        before, self._link_rates = self._link_rates, now if self._link_rates is None else self._link_rates
        if before is None or self._num_steps - self._planned_at < _LEAST_STEPS_BETWEEN:
            return None
        for kind in sorted(before.keys() & now.keys()):
            if not 1 - _LINK_DRIFT_FRAC < now[kind] / before[kind] < 1 / (1 - _LINK_DRIFT_FRAC):
                return (
                    f"{kind} copies run at {now[kind] / 1e9:.3g} GB/s, {before[kind] / 1e9:.3g} when the plan was made"
                )
        return None

    def _is_off(self, step_s: float) -> bool:
        """Whether the plan's own steps are to be watched, once: they are not what steps before it said they would be.

        Recompute, say, is planned for before it has ever run.
        """
        assert self.plan is not None
        forecast_s = self.plan.forecast.step_s
        if self._has_corrected or abs(forecast_s / step_s - 1) <= _OFF_FRAC[self._space.device.type]:
            return False
        self._has_corrected = True
        _log.info(
            "steps take %.3g s, %.3g s was expected: the next %d are watched, and the plan is made again",
            step_s, forecast_s, self._profile_steps,
        )  # fmt: skip
        return True

    def on_batch(self, numel: int) -> None:
        """The first unit gets an input of so many elements. In the middle of a step."""
        if numel > self._largest_numel * _GROWTH_FRAC and self._profiled_numel > 0 and self._counts_activations:
            self._largest_numel = numel
            self._growth = numel / self._profiled_numel
            self._replan(f"a batch {self._growth:.2f} times as large as the one watched")

    def on_out_of_memory(self) -> None:
        """The device is out of memory; whoever catches it goes on with more room. In the middle of a step."""
        if not self._counts_activations or self._is_fixed:
            return
        self._budget_frac *= _AFTER_OUT_OF_MEMORY_FRAC
        plans = f", and plans keep to {self._budget_frac:.0%} of device_budget" if self._profile_steps > 0 else ""
        _log.warning("out of memory: every unit that can recomputes its activations%s", plans)
        for unit in self._space.units:
            if unit.root is not None and unit not in self._cannot_recompute:
                self._apply(unit, dataclasses.replace(unit.choice, activation=ActivationChoice.RECOMPUTE))
        self._stop_watching()
        if self._profile_steps > 0:
            self._watch()

    # ------------------------------------------------------------------------------------------------- a saved plan
    def use_plan_file(self, path: str) -> None:
        """Follow a saved plan as it is. Called once, when the units are known, before the first step.

        Raises ``ConfigError`` for a plan of other units, ``UnsupportedError`` for a choice that this engine cannot
        realise.
        """
        plan = Plan.load(path)
        lines = {line.name: line for line in plan.units}
        missing = [unit.name for unit in self._space.units if unit.name not in lines]
        if missing:
            raise ConfigError(
                f"plan_file {path} has no line for {len(missing)} of {len(self._space.units)} units ({missing[0]}, …); "
                f"it has {', '.join(list(lines)[:3])}, …. Remove plan_file, or plan for this model."
            )
        for unit in self._space.units:
            choice = self._choice_for(unit, lines[unit.name].choice)
            if unit.grad_nbytes and homes_of(choice) not in self._placements(unit):
                possible = self._placements(unit)
                way_out = "Plan again with those."
                on_cpu = all(place is UpdatePlace.CPU for *_, place in possible)
                if choice.update_on is UpdatePlace.DEVICE and on_cpu and self._config.update_on in ("auto", "cpu"):
                    way_out = (
                        'Set update_on="split", if the run that the plan is from had that, or plan again with those.'
                    )
                raise UnsupportedError(
                    f"plan_file {path}: unit {unit.name} is to be {choice.code}, which this version cannot do with "
                    f"these settings. It can: {', '.join(code_of(p) for p in possible)}. {way_out}"
                )
            if choice.activation is ActivationChoice.OFFLOAD_NVME or (
                self._config.activations != "auto"
                and choice.activation not in ACTIVATIONS_OF_SETTING[self._config.activations]
            ):
                raise ConfigError(
                    f"plan_file {path}: unit {unit.name} is to {choice.activation.value} its activations, and "
                    f"activations={self._config.activations!r}. Leave activations out, or plan again."
                )
        self._is_fixed = True
        self._follow(plan, f"plan_file {path}")

    # ------------------------------------------------------------------------------------------------- plan
    def _read_profile(self) -> Profile | None:
        """What an earlier run has measured, if there is a file of it."""
        if self._config.trace_path is None:
            return None
        path = os.path.join(self._config.trace_path, PROFILE_FILE_NAME)
        if not os.path.exists(path):
            return None
        try:
            return Profile.load(path)
        except ConfigError as error:
            _log.warning("%s is not used, and written anew: %s", path, error)
            return None

    def _write_profile(self, profile: Profile) -> None:
        if self._config.trace_path is not None:
            try:
                os.makedirs(self._config.trace_path, exist_ok=True)
                profile.save(os.path.join(self._config.trace_path, PROFILE_FILE_NAME))
            except OSError as error:  # training does not end for a file that only people read
                _log.warning("the profile could not be written to trace_path %s: %s", self._config.trace_path, error)

    def _plan_from_file(self) -> bool:
        """After one watched step, which says what is trained: plan from an earlier run's profile, if it is of the same.

        The same units and bytes, batch, kind of machine, micro-batches and setting of activations.
        """
        saved, self._saved = self._saved, None
        if saved is None or not self._profiler.steps:
            return False
        for unit in self._space.units:  # state that the first update makes is part of what is compared
            with self._space.lock:
                self._space.wait_update(unit)
        with _user_generator():
            now = self._measured(saved.machine).profile  # the first step tells shapes, and no times
        is_same = saved.matches(now.units, now.batch_key, machine_name(self._space.device))
        if not is_same or any(saved.notes.get(key) != now.notes[key] for key in _SAME_NOTES):
            _log.info("the profile in trace_path is of another model, batch, machine or setting: measured again")
            return False
        self._stop_watching()
        self.profile, self._machine = saved, saved.machine
        self._note_batch()
        self._replan(f"one watched step, from {PROFILE_FILE_NAME} of an earlier run")
        return True

    def _plan_from_steps(self) -> None:
        self._stop_watching()
        with _user_generator():
            if self._machine is None:
                self._machine = measure_machine(self._space.device, self._space.streams)
            seen = self._measured(self._machine)
            self.profile = seen.profile
            names = (line.name for line in seen.profile.units)
            self._measured_s[placement_key(zip(names, seen.choices, strict=True))] = seen.step_s
            self._write_profile(self.profile)
        self._note_batch()
        self._replan(f"{len(self._profiler.steps)} watched steps")

    def _measured(self, machine: MachineProfile) -> MeasuredSteps:
        return self._profiles.make(machine, before=self.profile, growth=self._watched_growth())

    def _watched_growth(self) -> float:
        """How much larger the batch of the steps just watched is than that of the profile before."""
        if self._first_index is None or not self._profiled_numel:
            return 1.0
        return self._profiler.steps[-1].numel_of.get(self._first_index, self._profiled_numel) / self._profiled_numel

    def _note_batch(self) -> None:
        """What the watched batch's size is known by: later ones are compared with it."""
        with_root = {unit.index for unit in self._space.units if unit.root is not None}
        self._first_index = next((index for index in self._profiler.order() if index in with_root), None)
        # Of that very unit: the first one in use may be an embedding, whose input is ids.
        numel = self._profiler.steps[-1].numel_of.get(self._first_index, 0) if self._first_index is not None else 0
        self._profiled_numel = self._largest_numel = numel
        self._growth = 1.0

    def _replan(self, why: str) -> None:
        assert self.profile is not None
        start_s = time.perf_counter()
        with _user_generator():
            profile = self.profile.grown(self._growth)
            instance = self._instances.make(profile, budget_frac=self._budget_frac)
            plan = self._search().plan(instance)
            self._leave_room(instance, plan)
            plan = self._with_peak(profile, plan)
        self._follow(plan, f"{why}, in {time.perf_counter() - start_s:.2f} s")

    def _search(self) -> PlanSearch:
        return PlanSearch(
            self._config,
            self._space,
            device_units=self._device_units,
            measured_s=self._measured_s if self._growth == 1.0 else {},  # of another batch nothing is known
            is_first=self.plan is None,
            say_tight=self._say_tight,
        )

    def _say_tight(self, note: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.info("%s. Smaller batches need less.", note)

    def _leave_room(self, instance: Instance, plan: Plan) -> None:
        """The engine may fill the plan's budget, less the activations that stay; see [Note: what a budget covers]."""
        account = self._space.ledger[Tier.DEVICE]
        if not self._counts_activations:
            self._space.kept_nbytes = 0
            return
        kept_nbytes = alive_peak_nbytes(instance.units, [line.choice for line in plan.units])
        room_nbytes = max(instance.device_budget_nbytes - kept_nbytes, plan.peak_nbytes - kept_nbytes)
        if self._instances.is_whole_device():
            account.budget_nbytes = max(account.budget_nbytes, room_nbytes)
        self._space.kept_nbytes = max(0, account.budget_nbytes - room_nbytes)

    def _with_peak(self, profile: Profile, plan: Plan) -> Plan:
        """The forecast's peak is that of what will be allocated, not of the least that the plan needs."""
        peak_nbytes = held_peak_nbytes(
            profile.units,
            [line.choice for line in plan.units],
            self._space.ledger[Tier.DEVICE].budget_nbytes - self._space.kept_nbytes,
            num_micro_batches=profile.notes["num_micro_batches"],
            waits_for_copies=self._space.device.type == "cpu",
        )
        return dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, device_peak_nbytes=peak_nbytes))

    def _follow(self, plan: Plan, why: str) -> None:
        self._say_plan(plan, why)
        self.plan = plan
        self.num_plans += 1
        self._planned_at = self._num_steps
        self._planned_units = [unit.index for unit in self._space.units]
        self._laps_s, self._baseline_s, self._last_s = [], None, None
        self._link_rates = None
        self._space.streams.rates.clear()  # the probe's own
        lines = {line.name: line.choice for line in plan.units}
        for unit, name in names_of(self._space.units).items():
            if name in lines:
                choice = self._choice_for(unit, lines[name])
                if unit.grad_nbytes and homes_of(choice) not in self._placements(unit):
                    # Unfrozen since the steps that the plan is made of: its line has homes of what it did not have.
                    choice = dataclasses.replace(unit.choice, activation=choice.activation)
                self._apply(unit, choice)
        if self._config.prefetch_units == "auto":
            self._space.prefetch_units = plan.prefetch_units
        watches_batches = self._counts_activations and self._profiled_numel > 0 and not self._is_fixed
        self.first_unit = self._first_index if watches_batches else None

    def _choice_for(self, unit: UnitState, line: Choice) -> Choice:
        """The plan's line; a unit without gradients keeps the homes of state that it does not have."""
        activation = line.activation if unit.root is not None else unit.choice.activation
        if unit.grad_nbytes == 0:
            return dataclasses.replace(unit.choice, param_home=line.param_home, activation=activation)
        meant = [p for p in self._placements(unit) if as_option(p) == homes_of(line)]
        return Choice(*meant[0], activation) if meant else dataclasses.replace(line, activation=activation)

    # ------------------------------------------------------------------------------------------------- what is said
    def _say_plan(self, plan: Plan, why: str) -> None:
        """One line in the log, on the terminal if a face has asked for it, and in the report."""
        lines = [line for line in plan.units if line.name != REST]
        activations = _counts(line.activation.value for line in lines)
        updates = _counts(line.update_on.value for line in lines)
        when = f"after step {self._num_steps}" if self._num_steps else "before the first step"
        text = (
            f"plan {when} ({why}): activations {activations}; updates {updates}; "
            f"{plan.forecast.step_s:.3g} s a step expected, bound by {plan.forecast.bottleneck}"
            f"{f' ({plan.note})' if plan.note else ''}"
        )
        self.said.append({"after_steps": self._num_steps, "text": text, "forecast": plan.forecast.to_json()})
        _log.info("%s", text)
        _log.debug("%s", _Table(plan))
        if self.on_plan is not None and not _log.isEnabledFor(logging.INFO):
            self.on_plan(text)

    def forecast(self) -> dict[str, Any]:
        """``report()["forecast"]``: of the plan in force; nulls before there is one."""
        if self.plan is None:
            return {"step_s": None, "device_peak_nbytes": None, "bottleneck": None}
        forecast: Forecast = self.plan.forecast
        return forecast.to_json()


def _counts(words: Iterable[str]) -> str:
    """``"4 keep, 1 recompute"``."""
    return ", ".join(f"{num} {word}" for word, num in collections.Counter(words).items())


class _Table:
    """A plan's table as text, made only if the record is written somewhere."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __str__(self) -> str:
        with _user_generator():
            from rich.console import Console
        console = Console(file=io.StringIO(), width=120)
        with console.capture() as captured:
            console.print(self._plan.as_table())
        return captured.get()


class _user_generator:
    """Importing a solver, or rich, may draw from Python's global generator, which is the user's."""

    def __enter__(self) -> None:
        self._state = random.getstate()

    def __exit__(self, *_: object) -> None:
        random.setstate(self._state)
