"""Floor 7. From a planning problem to the plan that is followed: the planner's answer, and what it has to beat.

Owns the choice among candidates: everything kept, the solver's plans, the engine's fixed policy, homes as they are, and
what is left where nothing fits. It changes nothing; ``engine/planner.py`` has a plan carried out.

[Note: declining] Where parameters, gradients and activations fit together nothing is solved and nothing leaves. No
unit's activations are offloaded where the transfer would show, past its neighbour's compute, for longer than recompute
takes, unless nothing else fits.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.placement import as_option, code_of, homes_of, names_of, placement_key
from lightning_tieroffload.engine.unit_state import UnitState
from lightning_tieroffload.errors import CapacityError, InfeasiblePlanError
from lightning_tieroffload.planning.cost_model import (
    OPTION_INDEX,
    OPTIONS,
    ActivationChoice,
    CostTables,
    Instance,
)
from lightning_tieroffload.planning.plan import Plan, alive_peak_nbytes, check_plan, plan_of
from lightning_tieroffload.sizes import format_nbytes

__all__ = ["PlanSearch"]

_log = logging.getLogger(__name__)

_SOLVER_LIMIT_S = 2.0  # a solve; training waits meanwhile
_WORTH_MOVING_FRAC = 0.01  # less than this is not worth moving homes for
_WORTH_MOVING_AGAIN_FRAC = 0.03  # what the model is off by must not move them to and fro


class PlanSearch:
    """One search for a plan, between two steps or where a plan is asked for in the middle of one.

    Args:
        device_units: the units whose state the engine's fixed policy would keep on the device within so many bytes.
        measured_s: what watched steps took, by ``placement_key``; of batches like the ones that are planned for.
        is_first: nothing has been moved for a plan yet.
        say_tight: is told with which budget activations would fit, where they do not.
    """

    def __init__(
        self,
        config: TierOffloadConfig,
        space: DeviceSpace,
        *,
        device_units: Callable[[int], Collection[UnitState]],
        measured_s: Mapping[object, float],
        is_first: bool,
        say_tight: Callable[[str], None],
    ) -> None:
        self._config = config
        self._space = space
        self._device_units = device_units
        self._measured_s = measured_s
        self._worth_moving_frac = _WORTH_MOVING_FRAC if is_first else _WORTH_MOVING_AGAIN_FRAC
        self._say_tight = say_tight
        self._counts_activations = config.activations == "auto"

    def plan(self, instance: Instance) -> Plan:
        """The plan to follow; where nothing fits by the model, the one under which whatever can leave leaves."""
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
        if stays is not None and found[0].forecast.step_s > (1 - self._worth_moving_frac) * stays.forecast.step_s:
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
        step_s = self._measured_s.get(placement_key((line.name, line.choice) for line in plan.units))
        if step_s is None:
            return plan
        return dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, step_s=step_s))

    def _fixed_plans(self, instance: Instance) -> tuple[Plan | None, list[Plan]]:
        """What the engine's fixed policy would do beside activations that are kept, recomputed or offloaded.

        The first is what it does by itself: where a setting fixes activations it runs whatever the model finds tight.
        """
        names = names_of(self._space.units)
        trusted: Plan | None = None
        plans: list[Plan] = []
        seen = set()
        for picks in self._uniform_activations(instance):
            room_nbytes = instance.device_budget_nbytes
            if self._counts_activations:
                room_nbytes -= alive_peak_nbytes(instance.units, [OPTIONS[pick] for pick in picks])
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
        by_name = {name: unit for unit, name in names_of(self._space.units).items()}
        options = []
        for line, codes in zip(instance.units, instance.options or (), strict=True):
            unit = by_name.get(line.name)
            if unit is None or line.trained_numel == 0:
                options.append(codes)
                continue
            # Of state and gradients, and of updates; where parameters are at home is decided anyway.
            now = code_of(as_option(homes_of(unit.choice))).split("/")[1:]
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
        self._say_tight(note)
        return self._plan_of(instance, least, note=note)


def _offload_shows_s(instance: Instance, index: int) -> float:
    """Seconds of sending a unit's activations to DRAM and back that its neighbour's compute does not hide."""
    machine, nbytes = instance.machine, instance.units[index].activation_nbytes
    beside = instance.units[index + 1] if index + 1 < len(instance.units) else None
    down_s, up_s = nbytes / machine.d2h_bytes_per_s, nbytes / machine.h2d_bytes_per_s
    shows_s = max(0.0, down_s - beside.forward_s) + max(0.0, up_s - beside.backward_s) if beside else down_s + up_s
    return shows_s + machine.overlap_loss_frac * (down_s + up_s)
