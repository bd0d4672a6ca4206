"""Floor 7. The planner in the engine: from watched steps to a plan, and from a plan to each unit's choice.

Owns when to plan: after ``profile_steps`` watched steps, after drift, for a larger batch, when a unit turns out not to
be one that can be recomputed, after an out-of-memory error. What the engine can realise is handed in (``placements``);
what a choice moves is the engine's business (``apply``). Called between two steps unless it says otherwise.

[Note: what a budget covers] ``device_budget`` and ``dram_budget`` cover what the engine holds, and that is enforced at
each charge, whatever a plan says. What autograd keeps between a unit's forward and its backward is counted against
``device_budget`` by the plan, and only if the plan may change it (``activations="auto"``): then units recompute or
offload until staged parameters, gradients and kept activations fit together. If they do not fit with everything that
can leave gone, that is said once, with the least budget, and training goes on with everything that can leave gone. With
``keep`` activations are the script's own memory, as in the plain run. Kernels' workspace, autocast's casts and the loss
are nobody's: beside every budget, and in the forecast's peak on a GPU, as seen in the watched steps. On a GPU ``auto``
leaves part of the memory to activations (config.py, [Note: margins]); the plan counts with the whole.

[Note: declining] Where parameters, gradients and activations fit together nothing is solved and nothing leaves. No
unit's activations are offloaded where the transfer would show, past its neighbour's compute, for longer than recompute
takes, unless nothing else fits.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import logging
import os
import random
import statistics
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import CUDA_DEVICE_FRAC, TierOffloadConfig
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.profiler import Measured, Phase, Profiler, machine_name, measure_machine
from lightning_tieroffload.engine.unit_state import UnitState, WireState
from lightning_tieroffload.errors import CapacityError, ConfigError, InfeasiblePlanError, UnsupportedError
from lightning_tieroffload.planning.cost_model import (
    OPTION_INDEX,
    OPTIONS,
    ActivationChoice,
    Choice,
    CostTables,
    Instance,
    UpdatePlace,
)
from lightning_tieroffload.planning.plan import Forecast, Plan, check_plan, held_peak_nbytes, plan_of
from lightning_tieroffload.planning.profile import PROFILE_FILE_NAME, MachineProfile, Profile, UnitProfile
from lightning_tieroffload.sizes import format_nbytes

__all__ = ["Placement", "Planner", "homes_of"]

_log = logging.getLogger(__name__)

Placement = tuple[Tier, Tier, Tier, UpdatePlace]
"""Homes of parameters, state and gradients, and where the update runs: a choice without its activations."""

REST = "(rest)"
"""The line of what is no unit's: the loss, the optimizer's own time, the loader."""
_NOTHING_TO_UPDATE = (Tier.DEVICE, Tier.DEVICE, UpdatePlace.DEVICE)
_ALLOWED = {
    "auto": (ActivationChoice.KEEP, ActivationChoice.RECOMPUTE, ActivationChoice.OFFLOAD_DRAM),
    "keep": (ActivationChoice.KEEP,),
    "recompute": (ActivationChoice.RECOMPUTE,),
    "offload": (ActivationChoice.OFFLOAD_DRAM,),
}
_DRIFT_FRAC = 0.15
_OFF_FRAC = {"cuda": 0.05, "cpu": 0.10}  # more than this, and the plan's own steps are watched
_LINK_DRIFT_FRAC = 0.3
_NUM_DRIFT_STEPS = 20
_LEAST_STEPS_BETWEEN = 100
_GROWTH_FRAC = 1.05  # a batch this much larger than the largest planned for asks for a plan of its own
_AFTER_OUT_OF_MEMORY_FRAC = 0.9
_NUM_STEPS_TO_SETTLE = 2
_MOST_MORE_STEPS = 2  # watched beyond profile_steps, where what is where has changed meanwhile
_SOLVER_LIMIT_S = 2.0  # a solve; training waits meanwhile
_WORTH_MOVING_FRAC = 0.01  # less than this is not worth moving homes for
_WORTH_MOVING_AGAIN_FRAC = 0.03  # what the model is off by must not move them to and fro
_SAME_NOTES = ("num_micro_batches", "activations")  # besides its key, what a profile must share with a job to serve it
_PASS_BYTES_PER_NUMEL = 18.0  # DRAM traffic of one pass of two: see "Weights first" in docs/design.md
_ALLOCATED_FRAC = 0.85  # of a whole GPU's memory; the rest is lost to the allocator's rounding and fragments


def homes_of(choice: Choice) -> Placement:
    """A choice without its activations."""
    return (choice.param_home, choice.state_home, choice.grad_home, choice.update_on)


def _as_option(placement: Placement) -> Placement:
    """The placement as the cost model knows it: gradients on flash count as gradients in DRAM."""
    for each in (placement, (placement[0], placement[1], Tier.DRAM, placement[3])):
        if Choice(*each, ActivationChoice.KEEP).code in OPTION_INDEX:
            return each
    return (placement[0], Tier.DRAM, Tier.DRAM, UpdatePlace.CPU)


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
        self._beside_nbytes = 0  # on the device beside what a plan counts: kernels' workspace, the loss, casts
        self._device_units = device_units
        self._first_budget_nbytes: int | None = None  # of the device, before a plan for the whole of it
        self._placed: collections.deque[object] = collections.deque(maxlen=2)  # what was where when watched steps began
        self.profile: Profile | None = None
        self.num_plans = 0
        self._config = config
        self._space = space
        self._profiler = profiler
        self._placements = placements
        self._state_nbytes = state_nbytes
        self._apply = apply
        self._can_offload = can_offload
        self._why_not_recompute = why_not_recompute
        steps = config.profile_steps
        # Beside a GPU what was planned by itself was slower than the cautious plan: see "GPU" in docs/log.md.
        self._profile_steps = (0 if space.device.type == "cuda" else 2) if steps == "auto" else steps
        self._counts_activations = config.activations == "auto"
        self._machine: MachineProfile | None = None
        self._is_fixed = False  # by plan_file
        self._cannot_recompute: weakref.WeakSet[UnitState] = weakref.WeakSet()
        self._budget_frac = 1.0
        self._num_micro = 1
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
                raise UnsupportedError(
                    f"plan_file {path}: unit {unit.name} is to be {choice.code}, which this version cannot do. It can: "
                    f"{', '.join(_code(p) for p in self._placements(unit))}. Plan again with those."
                )
            if choice.activation is ActivationChoice.OFFLOAD_NVME or (
                self._config.activations != "auto" and choice.activation not in _ALLOWED[self._config.activations]
            ):
                raise ConfigError(
                    f"plan_file {path}: unit {unit.name} is to {choice.activation.value} its activations, and "
                    f"activations={self._config.activations!r}. Leave activations out, or plan again."
                )
        self._is_fixed = True
        self._follow(plan)

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
            now = self._make_profile(saved.machine)
        self._measured_s.clear()  # the first step tells shapes, and no times
        is_same = saved.matches(now.units, now.batch_key, machine_name(self._space.device))
        if not is_same or any(saved.notes.get(key) != now.notes[key] for key in _SAME_NOTES):
            _log.info("the profile in trace_path is of another model, batch, machine or setting: measured again")
            return False
        self._stop_watching()
        self.profile, self._machine = saved, saved.machine
        self._beside_nbytes = max(line.workspace_nbytes for line in saved.units)
        self._note_batch()
        self._replan(f"one watched step, from {PROFILE_FILE_NAME} of an earlier run")
        return True

    def _plan_from_steps(self) -> None:
        self._stop_watching()
        with _user_generator():
            if self._machine is None:
                self._machine = measure_machine(self._space.device, self._space.streams)
            self.profile = self._make_profile(self._machine)
            self._write_profile(self.profile)
        self._note_batch()
        self._replan(f"{len(self._profiler.steps)} watched steps")

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
            instance = self._instance(self.profile)
            plan = self._solve(instance)
            self._leave_room(instance, plan)
            plan = self._with_peak(plan)
        kinds = collections.Counter(line.activation.value for line in plan.units if line.name != REST)
        _log.info(
            "plan after %s, in %.2f s: activations %s; %.3g s a step expected, bound by %s%s",
            why, time.perf_counter() - start_s, ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
            plan.forecast.step_s, plan.forecast.bottleneck, f" ({plan.note})" if plan.note else "",
        )  # fmt: skip
        _log.debug("%s", _Table(plan))
        self._follow(plan)

    def _follow(self, plan: Plan) -> None:
        self.plan = plan
        self.num_plans += 1
        self._planned_at = self._num_steps
        self._planned_units = [unit.index for unit in self._space.units]
        self._laps_s, self._baseline_s, self._last_s = [], None, None
        self._link_rates = None
        self._space.streams.rates.clear()  # the probe's own
        lines = {line.name: line.choice for line in plan.units}
        for unit, name in self._names().items():
            if name in lines:
                self._apply(unit, self._choice_for(unit, lines[name]))
        if self._config.prefetch_units == "auto":
            self._space.prefetch_units = plan.prefetch_units
        watches_batches = self._counts_activations and self._profiled_numel > 0 and not self._is_fixed
        self.first_unit = self._first_index if watches_batches else None

    def _names(self) -> dict[UnitState, str]:
        """How plans call the units: by their names, made different where several models share the space."""
        names: dict[UnitState, str] = {}
        seen: set[str] = set()
        for unit in self._space.units:
            names[unit] = unit.name if unit.name not in seen else f"{unit.name} [{unit.index}]"
            seen.add(unit.name)
        return names

    def _choice_for(self, unit: UnitState, line: Choice) -> Choice:
        """The plan's line; a unit without gradients keeps the homes of state that it does not have."""
        activation = line.activation if unit.root is not None else unit.choice.activation
        if unit.grad_nbytes == 0:
            return dataclasses.replace(unit.choice, param_home=line.param_home, activation=activation)
        meant = [p for p in self._placements(unit) if _as_option(p) == homes_of(line)]
        return Choice(*meant[0], activation) if meant else dataclasses.replace(line, activation=activation)

    # ------------------------------------------------------------------------------------------------- the problem
    def _make_profile(self, machine: MachineProfile) -> Profile:
        profiler = self._profiler
        machine = self._with_update_rates(machine)
        by_index = {unit.index: unit for unit in self._space.units}
        order = [by_index[index] for index in profiler.order() if index in by_index]
        order += [unit for unit in self._space.units if unit not in order]
        counts = [m.num_forward for unit in order if (m := profiler.usual(unit.index)).num_forward > 0]
        self._num_micro = max(1, round(statistics.median(counts))) if counts else 1
        names = self._names()
        units = [self._unit_profile(unit, names[unit], profiler.usual(unit.index)) for unit in order]
        rest = profiler.usual(None)
        step = profiler.steps[-1]
        step_s = profiler.step_s()
        units.append(UnitProfile(REST, 0, 0, 0, 0, rest.saved_nbytes, 0.0, 0.0, can_recompute=False))
        units = self._with_workspace(order, units)
        profile = Profile(
            machine=machine,
            units=tuple(units),
            batch_key=";".join("x".join(map(str, shape)) for shape in step.inputs),
            notes={
                "step_s": step_s,
                "last_step_s": step.step_s,
                "num_micro_batches": self._num_micro,
                "activations": self._config.activations,
                "lifetimes": {
                    names[unit]: self._lifetimes(unit, profiler.usual(unit.index), step.step_s) for unit in order
                },
            },
        )
        return self._calibrated(profile, order, step_s)

    def _with_update_rates(self, machine: MachineProfile) -> MachineProfile:
        is_cuda = self._space.device.type == "cuda"
        s_per_numel = self._profiler.update_s_per_numel(must_be_warm=is_cuda)
        if s_per_numel is None and is_cuda:  # all were on the device: as on the reference machine, by its 16 cores
            rate = machine.cpu_update_numel_per_s * min(1.0, (os.cpu_count() or 1) / 16)
            return dataclasses.replace(
                machine,
                cpu_update_numel_per_s=rate,
                moments_later_frac=1.0,
                cpu_update_bytes_per_numel=_PASS_BYTES_PER_NUMEL,
            )
        if s_per_numel is None:
            return machine
        later_s_per_numel = self._profiler.update_s_per_numel(is_later=True)
        machine = dataclasses.replace(machine, cpu_update_numel_per_s=1 / s_per_numel)
        if self._space.device.type == "cpu":
            machine = dataclasses.replace(machine, device_update_numel_per_s=1 / s_per_numel)
        if later_s_per_numel is None:
            return machine
        return dataclasses.replace(
            machine,
            moments_later_frac=later_s_per_numel / s_per_numel,
            cpu_update_bytes_per_numel=_PASS_BYTES_PER_NUMEL,
        )

    def _with_workspace(self, order: list[UnitState], lines: list[UnitProfile]) -> list[UnitProfile]:
        """With the bytes that were beside the engine while a unit ran, less activations that were alive then.

        What no single module stands for (the head, which runs piece by piece with the loss) counts with the rest.
        """
        live_nbytes = beside_nbytes = 0
        found = []
        for unit, line in zip([*order, None], lines, strict=True):
            measured = self._profiler.usual(None if unit is None else unit.index)
            activation = ActivationChoice.KEEP if unit is None else unit.choice.activation
            boundary_nbytes = min(line.boundary_nbytes, line.activation_nbytes)
            again_nbytes = 0
            if activation is ActivationChoice.KEEP:
                live_nbytes += line.activation_nbytes
            elif activation is ActivationChoice.RECOMPUTE:
                live_nbytes, again_nbytes = live_nbytes + boundary_nbytes, line.activation_nbytes - boundary_nbytes
            else:
                again_nbytes = line.activation_nbytes
            outside = measured.outside_nbytes
            own_nbytes = outside.get(Phase.FORWARD, 0) - live_nbytes
            for phase in (Phase.BACKWARD, Phase.RERUN):
                own_nbytes = max(own_nbytes, outside.get(phase, 0) - live_nbytes - again_nbytes)
            if unit is not None and unit.root is None:
                beside_nbytes = max(beside_nbytes, *outside.values(), 0)
                own_nbytes = 0
            elif unit is None:
                own_nbytes = max(own_nbytes, beside_nbytes - live_nbytes)
            found.append(dataclasses.replace(line, workspace_nbytes=max(0, own_nbytes)))
        return found

    def _watched_growth(self) -> float:
        """How much larger the batch of the steps just watched is than that of the profile before."""
        if self._first_index is None or not self._profiled_numel:
            return 1.0
        return self._profiler.steps[-1].numel_of.get(self._first_index, self._profiled_numel) / self._profiled_numel

    def _travelling_nbytes(self, unit: UnitState) -> int:
        """Bytes of the unit's gradients as they are moved and kept: in 16 bits where weights are, unless added up."""
        is_narrow = unit.wire is not None and unit.wire_state is WireState.READY and self._num_micro == 1
        return sum(
            slot.numel * unit.wire.dtype.itemsize if is_narrow and unit.wire and slot.castable else slot.nbytes
            for slot in unit.slots
            if slot.param.requires_grad
        )

    def _unit_profile(self, unit: UnitState, name: str, measured: Measured) -> UnitProfile:
        num = max(1, self._num_micro)
        seconds = {phase: s / num for phase, s in measured.seconds.items()}
        param_nbytes = sum(part.nbytes for part in unit.parts_for(self._space.wire_dtype))
        host_nbytes = unit.running_dram_nbytes()
        saved_nbytes, boundary_nbytes = measured.saved_nbytes, measured.boundary_nbytes
        before = self.profile.unit(name) if self.profile is not None else None
        if before is not None and any(u.choice.activation is not ActivationChoice.KEEP for u in self._space.units):
            # Where activations leave, what would be saved is not seen, and memory of what has left is used again: so as
            # in the steps when all were kept, for a batch of today's size.
            growth = self._watched_growth()
            saved_nbytes = round(before.activation_nbytes * growth)
            boundary_nbytes = round(before.boundary_nbytes * growth)
        return UnitProfile(
            name=name,
            param_numel=sum(slot.numel for slot in unit.slots),
            param_nbytes=param_nbytes,
            grad_nbytes=self._travelling_nbytes(unit),
            newborn_grad_nbytes=unit.grad_nbytes,
            state_nbytes=max(0, host_nbytes - param_nbytes - unit.grad_nbytes) + self._state_nbytes(unit),
            activation_nbytes=saved_nbytes,
            boundary_nbytes=min(boundary_nbytes, saved_nbytes),
            forward_s=seconds[Phase.FORWARD],
            backward_s=seconds[Phase.BACKWARD],
            recompute_s=seconds[Phase.RERUN] or None,
            update_numel=sum(slot.numel for slot in unit.slots if slot.param.requires_grad),
            can_recompute=unit.root is not None,
            can_offload_activation=unit.root is not None,
        )

    @staticmethod
    def _lifetimes(unit: UnitState, measured: Measured, step_s: float) -> dict[str, Any]:
        """The heat map's row: when the unit is used in a step, and the longest time in a row that it is not."""
        at_s = sorted(measured.used_at_s)
        gaps_s = [b - a for a, b in itertools.pairwise(at_s)]
        if at_s:
            gaps_s.append(step_s - at_s[-1] + at_s[0])  # across the step's end
        return {
            "num_uses": len(at_s),
            "first_use_s": at_s[0] if at_s else None,
            "last_use_s": at_s[-1] if at_s else None,
            "idle_s": max(gaps_s, default=step_s),
            "nbytes": {"param": unit.nbytes, "grad": unit.grad_nbytes, "activation": measured.saved_nbytes},
        }

    def _calibrated(self, profile: Profile, order: list[UnitState], step_s: float) -> Profile:
        """What the model does not explain of the watched steps is no unit's: the rest's seconds.

        On a host whose updates run beside compute, how much of them shows is fitted too.
        """
        from lightning_tieroffload.planning.simulator import simulate

        choices = [self._seen_choice(unit) for unit in order]
        choices.append(Choice(Tier.DEVICE, *_NOTHING_TO_UPDATE, ActivationChoice.KEEP))
        roomy = {"device_budget_nbytes": 1 << 60, "dram_budget_nbytes": 1 << 60, "num_micro_batches": self._num_micro}
        losses = [profile.machine.update_loss_frac]
        if self._space.device.type == "cpu":
            losses += [losses[0] * k / 4 for k in (3, 2, 1, 0)]
        forecast_s = 0.0
        for loss in losses:
            machine = dataclasses.replace(profile.machine, update_loss_frac=loss)
            profile = dataclasses.replace(profile, machine=machine)
            forecast_s = simulate(Instance.from_profile(profile, **roomy), choices, self._space.prefetch_units).step_s
            if forecast_s <= step_s:
                break
        self._measured_s[_placement_key((u.name, c) for u, c in zip(profile.units, choices, strict=True))] = step_s
        self._beside_nbytes = max(line.workspace_nbytes for line in profile.units)
        rest = dataclasses.replace(profile.units[-1], forward_s=max(0.0, step_s - forecast_s) / self._num_micro)
        return dataclasses.replace(profile, units=(*profile.units[:-1], rest))

    def _seen_choice(self, unit: UnitState) -> Choice:
        """What the watched steps did with the unit: parameters that stayed on the device were at home there."""
        parts = unit.parts_for(self._space.wire_dtype)
        home = Tier.DEVICE if all(part.is_resident for part in parts) else unit.choice.param_home
        if unit.grad_nbytes == 0:
            return Choice(home, *_NOTHING_TO_UPDATE, unit.choice.activation)
        placement = _as_option((home, *homes_of(unit.choice)[1:]))
        return Choice(*placement, unit.choice.activation)

    def _instance(self, profile: Profile) -> Instance:
        by_name = {name: unit for unit, name in self._names().items()}
        growth = self._growth
        units, options = [], []
        for line in profile.units:
            unit = by_name.get(line.name)
            is_sent_away = unit is not None and self._config.activations == "offload"
            counted = line.activation_nbytes if self._counts_activations or is_sent_away else 0
            units.append(
                dataclasses.replace(
                    line,
                    workspace_nbytes=0,  # nobody's: see [Note: what a budget covers]
                    activation_nbytes=round(counted * growth),
                    boundary_nbytes=round(min(line.boundary_nbytes, counted) * growth),
                    forward_s=line.forward_s * growth,
                    backward_s=line.backward_s * growth,
                    recompute_s=None if line.recompute_s is None else line.recompute_s * growth,
                )
            )
            options.append(self._options(unit, line))
        if self._first_budget_nbytes is None:
            self._first_budget_nbytes = self._space.ledger[Tier.DEVICE].budget_nbytes
        budget_nbytes = self._first_budget_nbytes
        if self._is_whole_device():
            whole_nbytes = int(_ALLOCATED_FRAC * budget_nbytes / CUDA_DEVICE_FRAC)
            budget_nbytes = max(budget_nbytes, whole_nbytes - round(self._beside_nbytes * growth))
        prefetch = self._config.prefetch_units
        distances = (2, 1) if self._space.device.type == "cuda" else (1,)
        return Instance(
            units=tuple(units),
            machine=profile.machine,
            device_budget_nbytes=int(budget_nbytes * self._budget_frac),
            dram_budget_nbytes=self._space.ledger[Tier.DRAM].budget_nbytes,
            nvme_budget_nbytes=self._space.ledger[Tier.NVME].budget_nbytes,
            num_micro_batches=self._num_micro,
            prefetch_units=distances if prefetch == "auto" else (prefetch,),
            options=tuple(options),
        )

    def _options(self, unit: UnitState | None, line: UnitProfile) -> tuple[str, ...]:
        if unit is None:
            return (Choice(Tier.DEVICE, *_NOTHING_TO_UPDATE, ActivationChoice.KEEP).code,)
        placements: Iterable[Placement] = {_as_option(p) for p in self._placements(unit)}
        if line.trained_numel == 0:
            placements = {(p[0], *_NOTHING_TO_UPDATE) for p in placements}
        activations = [a for a in _ALLOWED[self._config.activations] if self._may(unit, line, a)]
        codes = [Choice(*p, a).code for p in placements for a in activations or [ActivationChoice.KEEP]]
        return tuple(sorted(codes))

    def _may(self, unit: UnitState, line: UnitProfile, activation: ActivationChoice) -> bool:
        if activation is ActivationChoice.KEEP:
            return True
        if unit.root is None or (self._counts_activations and line.activation_nbytes == 0):
            return False
        if activation is ActivationChoice.OFFLOAD_DRAM:
            return self._config.activations == "offload" or self._can_offload()
        return unit not in self._cannot_recompute

    # ------------------------------------------------------------------------------------------------- the answer
    def _solve(self, instance: Instance) -> Plan:
        everything = self._uniform(instance, Tier.DEVICE, (ActivationChoice.KEEP,))
        if self._fits(instance, everything):
            return self._plan_of(instance, everything, note="everything fits")
        plan = self._best_of(self._without_declined(instance)) or self._best_of(instance)
        return plan if plan is not None else self._best_effort(instance, self._leaving(instance))

    def _without_declined(self, instance: Instance) -> Instance:
        """Without offload where the transfer would show for longer than recompute takes; see [Note: declining]."""
        if not self._counts_activations:
            return instance
        offload = f"/{ActivationChoice.OFFLOAD_DRAM.value}"
        options = []
        for index, codes in enumerate(instance.options or ()):
            unit = instance.units[index]
            can_recompute = any(code.endswith(f"/{ActivationChoice.RECOMPUTE.value}") for code in codes)
            is_declined = can_recompute and _offload_shows_s(instance, index) > unit.rerun_s
            options.append(tuple(code for code in codes if not (is_declined and code.endswith(offload))))
        return dataclasses.replace(instance, options=tuple(options))

    def _leave_room(self, instance: Instance, plan: Plan) -> None:
        """The engine may fill the plan's budget, less the activations that stay; see [Note: what a budget covers]."""
        account = self._space.ledger[Tier.DEVICE]
        if not self._counts_activations:
            self._space.kept_nbytes = 0
            return
        kept_nbytes = _activation_nbytes(instance.units, [line.choice for line in plan.units])
        room_nbytes = max(instance.device_budget_nbytes - kept_nbytes, plan.peak_nbytes - kept_nbytes)
        if self._is_whole_device():
            account.budget_nbytes = max(account.budget_nbytes, room_nbytes)
        self._space.kept_nbytes = max(0, account.budget_nbytes - room_nbytes)

    def _is_whole_device(self) -> bool:
        """Whether plans may count with all of the GPU's memory: nobody has set a budget, and activations are known."""
        is_auto = self._config.device_budget == "auto"
        return is_auto and self._space.device.type == "cuda" and self._counts_activations

    def _with_peak(self, plan: Plan) -> Plan:
        """The forecast's peak is that of what will be allocated, not of the least that the plan needs."""
        assert self.profile is not None
        growth = self._growth
        lines = [
            dataclasses.replace(
                line,
                activation_nbytes=round(line.activation_nbytes * growth),
                boundary_nbytes=round(line.boundary_nbytes * growth),
                workspace_nbytes=round(line.workspace_nbytes * growth),
            )
            for line in self.profile.units
        ]
        peak_nbytes = held_peak_nbytes(
            lines,
            [line.choice for line in plan.units],
            self._space.ledger[Tier.DEVICE].budget_nbytes - self._space.kept_nbytes,
            num_micro_batches=self._num_micro,
            waits_for_copies=self._space.device.type == "cpu",
        )
        return dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, device_peak_nbytes=peak_nbytes))

    def _leaving(self, instance: Instance) -> list[list[int]]:
        """Parameters stream, and all activations that can leave do: by recompute first, and by offload first."""
        kinds = (ActivationChoice.RECOMPUTE, ActivationChoice.OFFLOAD_DRAM)
        return [self._uniform(instance, Tier.DRAM, each) for each in (kinds, kinds[::-1])]

    def _best_of(self, instance: Instance) -> Plan | None:
        """The planner's answer, or the fixed policy's; homes as they are, unless others promise a clearly shorter step.

        Baselines answer for themselves.
        """
        from lightning_tieroffload.planning.simulator import rank_plans

        if self._config.planner != "ilp":
            return self._answer(instance)
        as_they_are = self._with_homes_as_they_are(instance)
        stays = self._answer(as_they_are)
        trusted, others = self._fixed_plans(instance)
        if stays is None or (trusted is not None and trusted.forecast.step_s < stays.forecast.step_s):
            stays = trusted
        moves = self._answer(instance) if as_they_are != instance else None
        found = rank_plans([plan for plan in (moves, *others) if plan is not None])
        if not found:
            return stays
        least_frac = _WORTH_MOVING_FRAC if self.plan is None else _WORTH_MOVING_AGAIN_FRAC
        if stays is not None and found[0].forecast.step_s > (1 - least_frac) * stays.forecast.step_s:
            return stays
        return found[0]

    def _answer(self, instance: Instance) -> Plan | None:
        from lightning_tieroffload.planning.solver import best_plan

        if not any(self._fits(instance, picks) for picks in self._leaving(instance)):
            return None  # the solver would take long to say by how much
        try:
            plan = best_plan(instance, self._config.planner, time_limit_s=_SOLVER_LIMIT_S)
        except (InfeasiblePlanError, CapacityError) as error:
            _log.debug("%s", error)
            return None
        check_plan(instance, plan)
        return self._as_measured(plan)

    def _as_measured(self, plan: Plan) -> Plan:
        """A placement that has been watched takes the time that it took, whatever the model thinks of it."""
        step_s = self._measured_s.get(_placement_key((line.name, line.choice) for line in plan.units))
        if step_s is None or self._growth != 1.0:
            return plan
        return dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, step_s=step_s))

    def _fixed_plans(self, instance: Instance) -> tuple[Plan | None, list[Plan]]:
        """What the engine's fixed policy would do beside activations that are kept, recomputed or offloaded.

        The first is what it does by itself: where a setting fixes activations it runs whatever the model finds tight.
        """
        names = self._names()
        trusted: Plan | None = None
        plans: list[Plan] = []
        seen = set()
        for picks in self._uniform_activations(instance):
            room_nbytes = instance.device_budget_nbytes
            if self._counts_activations:
                room_nbytes -= _activation_nbytes(instance.units, [OPTIONS[pick] for pick in picks])
            on_device = {names[unit] for unit in self._device_units(room_nbytes)}
            for row, (line, codes) in enumerate(zip(instance.units, instance.options or (), strict=True)):
                code = f"device/device/device/device/{OPTIONS[picks[row]].activation.value}"
                if line.name in on_device and code in codes:
                    picks[row] = OPTION_INDEX[code]
            if tuple(picks) in seen:
                continue
            seen.add(tuple(picks))
            note = "the engine's fixed policy"
            if trusted is None and not self._counts_activations:
                trusted = self._plan_of(instance, picks, note=note, distances=(self._space.prefetch_units,))
            elif self._fits(instance, picks):
                plans.append(self._plan_of(instance, picks, note=note))
        return trusted, plans

    def _uniform_activations(self, instance: Instance) -> Iterable[list[int]]:
        """Parameters stream, and activations are the same everywhere, or kept by the last units only."""
        recompute, offload = ActivationChoice.RECOMPUTE, ActivationChoice.OFFLOAD_DRAM
        kept = self._uniform(instance, Tier.DRAM, (ActivationChoice.KEEP,))
        yield kept
        for kinds in ((recompute, offload), (offload, recompute)):
            left = self._uniform(instance, Tier.DRAM, kinds)
            for quarters in range(4 if self._counts_activations else 1):
                first = len(left) - len(left) * quarters // 4
                yield [*left[:first], *kept[first:]]

    def _with_homes_as_they_are(self, instance: Instance) -> Instance:
        by_name = {name: unit for unit, name in self._names().items()}
        options = []
        for line, codes in zip(instance.units, instance.options or (), strict=True):
            unit = by_name.get(line.name)
            if unit is None or line.trained_numel == 0:
                options.append(codes)
                continue
            # Of state and gradients, and of updates; where parameters are at home is decided anyway.
            now = _code(_as_option(homes_of(unit.choice))).split("/")[1:]
            options.append(tuple(code for code in codes if code.split("/")[1:4] == now) or codes)
        return dataclasses.replace(instance, options=tuple(options))

    @staticmethod
    def _uniform(instance: Instance, home: Tier, activations: tuple[ActivationChoice, ...]) -> list[int]:
        """For each unit the first of its options that has these parameters' home and the first of these activations."""
        picks = []
        for codes in instance.options or ():
            wanted = [*activations, *(a for a in ActivationChoice if a not in activations)]

            def rank(code: str, wanted: list[ActivationChoice] = wanted) -> tuple[bool, int, str]:
                param, *_, activation = code.split("/")
                return (param != home.name.lower(), wanted.index(ActivationChoice(activation)), code)

            picks.append(OPTION_INDEX[min(codes, key=rank)])
        return picks

    @staticmethod
    def _fits(instance: Instance, picks: list[int]) -> bool:
        cost = CostTables(instance, instance.prefetch_units[-1]).cost(picks)
        return all(cost.peak_nbytes(tier) <= instance.budget_nbytes(tier) for tier in Tier)

    def _plan_of(
        self, instance: Instance, picks: list[int], *, note: str, distances: tuple[int, ...] | None = None
    ) -> Plan:
        from lightning_tieroffload.planning.simulator import with_forecast

        # As far ahead as fits: what fits at none runs with the least, whatever the model finds tight.
        for tables in (CostTables(instance, distance) for distance in distances or instance.prefetch_units):
            if tables.cost(picks).device_peak_nbytes <= instance.device_budget_nbytes:
                break
        plan = plan_of(instance, tables, picks, planner=self._config.planner, note=note)
        return self._as_measured(with_forecast(instance, plan))

    def _best_effort(self, instance: Instance, leaving: list[list[int]]) -> Plan:
        """Nothing fits by the model, which is more careful than the engine: whatever can leave leaves."""
        tables = CostTables(instance, instance.prefetch_units[-1])
        least = min(leaving, key=lambda picks: tables.cost(picks).device_peak_nbytes)
        if not self._counts_activations:
            return self._plan_of(instance, least, note="tighter than the cost model's staging")
        need_nbytes = round(tables.cost(least).device_peak_nbytes)
        note = (
            f"device_budget {format_nbytes(instance.device_budget_nbytes)} cannot hold activations beside parameters "
            f"and gradients; {format_nbytes(need_nbytes)} would, with every unit recomputed or offloaded that can be"
        )
        if not self._has_warned:
            self._has_warned = True
            _log.info("%s. Smaller batches need less.", note)
        return self._plan_of(instance, least, note=note)

    def _write_profile(self, profile: Profile) -> None:
        if self._config.trace_path is not None:
            try:
                os.makedirs(self._config.trace_path, exist_ok=True)
                profile.save(os.path.join(self._config.trace_path, PROFILE_FILE_NAME))
            except OSError as error:  # training does not end for a file that only people read
                _log.warning("the profile could not be written to trace_path %s: %s", self._config.trace_path, error)

    # ------------------------------------------------------------------------------------------------- what is said
    def forecast(self) -> dict[str, Any]:
        """``report()["forecast"]``: of the plan in force; nulls before there is one."""
        if self.plan is None:
            return {"step_s": None, "device_peak_nbytes": None, "bottleneck": None}
        forecast: Forecast = self.plan.forecast
        return forecast.to_json()


def _activation_nbytes(units: Iterable[UnitProfile], choices: Iterable[Choice]) -> int:
    """Bytes of activations on the device at most: what stays, and what one unit's backward brings back."""
    live_nbytes = again_nbytes = 0
    for unit, choice in zip(units, choices, strict=True):
        boundary_nbytes = min(unit.boundary_nbytes, unit.activation_nbytes)
        if choice.activation is ActivationChoice.KEEP:
            live_nbytes += unit.activation_nbytes
        elif choice.activation is ActivationChoice.RECOMPUTE:
            live_nbytes += boundary_nbytes
            again_nbytes = max(again_nbytes, unit.activation_nbytes - boundary_nbytes)
        else:
            again_nbytes = max(again_nbytes, 2 * unit.activation_nbytes)
    return live_nbytes + again_nbytes


def _placement_key(lines: Iterable[tuple[str, Choice]]) -> object:
    """What makes a placement's step what it is: parameters that stream stay here and there while there is room."""
    return tuple(
        (name, choice.state_home, choice.update_on, choice.activation) for name, choice in lines if name != REST
    )


def _offload_shows_s(instance: Instance, index: int) -> float:
    """Seconds of sending a unit's activations to DRAM and back that its neighbour's compute does not hide."""
    machine, nbytes = instance.machine, instance.units[index].activation_nbytes
    beside = instance.units[index + 1] if index + 1 < len(instance.units) else None
    down_s, up_s = nbytes / machine.d2h_bytes_per_s, nbytes / machine.h2d_bytes_per_s
    shows_s = max(0.0, down_s - beside.forward_s) + max(0.0, up_s - beside.backward_s) if beside else down_s + up_s
    return shows_s + machine.overlap_loss_frac * (down_s + up_s)


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


def _code(placement: Placement) -> str:
    return "/".join([*(tier.name.lower() for tier in placement[:3]), placement[3].value])


class _user_generator:
    """Importing a solver, or rich, may draw from Python's global generator, which is the user's."""

    def __enter__(self) -> None:
        self._state = random.getstate()

    def __exit__(self, *_: object) -> None:
        random.setstate(self._state)
