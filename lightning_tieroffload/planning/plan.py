"""Floor 3. The plan: a frozen value that says where each unit's shards live, and the checker that trusts nobody.

``check_plan`` recomputes a plan's bytes and seconds from the units, walking through the step one unit at a time. It
shares no table with the planners, so that a slip in a coefficient or in the solver's answer cannot pass unseen.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import MOST_PREFETCH_UNITS
from lightning_tieroffload.errors import CapacityError, ConfigError, InfeasiblePlanError
from lightning_tieroffload.planning.cost_model import (
    NUM_STAGED_UPDATES,
    OPTION_INDEX,
    OPTIONS,
    ActivationChoice,
    Choice,
    Cost,
    CostTables,
    Instance,
    UpdatePlace,
)
from lightning_tieroffload.planning.profile import UnitProfile, is_quantity
from lightning_tieroffload.planning.profile import model_key as key_of_units
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.whole_file import parse_json, write_whole

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "AliveActivations",
    "Forecast",
    "Plan",
    "UnitPlan",
    "alive_activations",
    "alive_peak_nbytes",
    "check_plan",
    "held_peak_nbytes",
    "plan_of",
    "restated",
]

_FORMAT_VERSION = 1
_PEAKS = ("peak_nbytes", "dram_peak_nbytes", "nvme_peak_nbytes")


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """One line of a plan."""

    name: str
    param_home: Tier
    state_home: Tier
    grad_home: Tier
    update_on: UpdatePlace
    activation: ActivationChoice

    @property
    def choice(self) -> Choice:
        return Choice(self.param_home, self.state_home, self.grad_home, self.update_on, self.activation)

    def to_json(self) -> dict[str, str]:
        return {
            "name": self.name,
            "param_home": self.param_home.name.lower(),
            "state_home": self.state_home.name.lower(),
            "grad_home": self.grad_home.name.lower(),
            "update_on": self.update_on.value,
            "activation": self.activation.value,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, str]) -> UnitPlan:
        return cls(
            name=raw["name"],
            param_home=Tier[raw["param_home"].upper()],
            state_home=Tier[raw["state_home"].upper()],
            grad_home=Tier[raw["grad_home"].upper()],
            update_on=UpdatePlace(raw["update_on"]),
            activation=ActivationChoice(raw["activation"]),
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a step is expected to take, and what would have to be faster for it to take less."""

    step_s: float
    device_peak_nbytes: int
    bottleneck: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Homes, update places and activation choices of every unit, and what they are expected to cost.

    ``step_s`` and the ``*peak_nbytes`` are the cost model's (``peak_nbytes`` the device's); ``forecast`` is the
    simulator's. ``mip_gap`` is the proven relative distance to the planner's optimum: 0 for a proven optimum, for
    planners that prove nothing the distance to the compute-only bound. A grouped solve's gap is the grouped problem's.
    """

    units: tuple[UnitPlan, ...]
    prefetch_units: int
    planner: str
    step_s: float
    peak_nbytes: int
    dram_peak_nbytes: int
    nvme_peak_nbytes: int
    mip_gap: float
    forecast: Forecast
    model_key: str = ""
    note: str = ""
    """How the plan came about where that is not plain, e.g. that the solver ran out of time."""

    def unit(self, name: str) -> UnitPlan:
        """The line of the unit called ``name``. Raises ``ConfigError`` if there is none."""
        for line in self.units:
            if line.name == name:
                return line
        raise ConfigError(f"the plan has no unit {name!r}; it has {', '.join(u.name for u in self.units)}.")

    def tier_peak_nbytes(self, tier: Tier) -> int:
        return (self.peak_nbytes, self.dram_peak_nbytes, self.nvme_peak_nbytes)[tier]

    def picks(self) -> tuple[int, ...]:
        """Indices into ``OPTIONS``, one per unit. Raises ``ConfigError`` for a combination that is not an option."""
        for line in self.units:
            if line.choice.code not in OPTION_INDEX:
                raise ConfigError(f"unit {line.name}: {line.choice.code} is not an option that the planner knows.")
        return tuple(OPTION_INDEX[line.choice.code] for line in self.units)

    def to_json(self) -> dict[str, Any]:
        raw = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        raw["units"] = [line.to_json() for line in self.units]
        raw["forecast"] = self.forecast.to_json()
        return {"format_version": _FORMAT_VERSION, **raw}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Plan:
        """Inverse of ``to_json``. Raises ``ConfigError`` that says what is wrong with the text."""
        try:
            fields = dict(raw)
            version = fields.pop("format_version")
            if version != _FORMAT_VERSION:
                raise ConfigError(f"plan has format_version {version!r}; this library reads {_FORMAT_VERSION}.")
            fields["units"] = tuple(UnitPlan.from_json(line) for line in fields["units"])
            fields["forecast"] = Forecast(**fields["forecast"])
            plan = cls(**fields)
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"not a plan: {type(error).__name__}: {error}. Write it with Plan.save, or tieroffload plan --save."
            ) from error
        plan._refuse_odd_values()
        return plan

    def _refuse_odd_values(self) -> None:
        """Raise ``ConfigError`` for a value that no plan has: a file may have been edited."""
        forecast, gap = self.forecast, self.mip_gap
        texts = [
            *(("a unit's name", line.name) for line in self.units),
            *((name, getattr(self, name)) for name in ("planner", "model_key", "note")),
            ("forecast.bottleneck", forecast.bottleneck),
        ]
        numbers = {name: getattr(self, name) for name in ("step_s", *_PEAKS)}
        numbers |= {"forecast.step_s": forecast.step_s, "forecast.device_peak_nbytes": forecast.device_peak_nbytes}
        odd = [f"{name} must be text" for name, value in texts if not isinstance(value, str)]
        odd += [f"{name} must be a finite number, 0 or more" for name, n in numbers.items() if not is_quantity(n)]
        if type(self.prefetch_units) is not int or not 0 <= self.prefetch_units <= MOST_PREFETCH_UNITS:
            odd.append(f"prefetch_units must be an integer from 0 to {MOST_PREFETCH_UNITS}")
        if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not (is_quantity(abs(gap)) or gap == math.inf):
            odd.append("mip_gap must be a number")
        if odd:
            raise ConfigError(f"not a plan: {odd[0]}. Write it with Plan.save, or tieroffload plan --save.")
        names = [line.name for line in self.units]
        if len(set(names)) != len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"not a plan: it has two lines for unit {name!r}; which of them holds? Plan again.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan where ``plan_file`` can read it; a reader never sees half a file."""
        write_whole(path, json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        try:
            with open(path, encoding="utf-8") as stream:
                raw = parse_json(stream.read())
        except OSError as error:
            raise ConfigError(f"plan_file {os.fspath(path)}: {error.strerror or error}.") from error
        except ValueError as error:
            raise ConfigError(f"plan_file {os.fspath(path)} is not JSON: {error}.") from error
        try:
            return cls.from_json(raw)
        except ConfigError as error:
            raise ConfigError(
                f"plan_file {os.fspath(path)}: {error} The plan.json of a run is one to follow only where the engine "
                "has planned (profile_steps greater than 0, and as many steps)."
            ) from error

    def as_table(self) -> Table:
        """The plan as a ``rich.table.Table``: consecutive units with the same choices share a line."""
        from rich.table import Table

        from lightning_tieroffload.report import format_seconds

        peaks = ", ".join(
            f"{tier.name} {format_nbytes(self.tier_peak_nbytes(tier))}" for tier in Tier if self.tier_peak_nbytes(tier)
        )
        gap = f"{100 * self.mip_gap:.2g} %" if math.isfinite(self.mip_gap) else "unknown"
        step = format_seconds(self.forecast.step_s)
        table = Table(
            title=f"Plan ({self.planner}): {step} a step, bound by {self.forecast.bottleneck}",
            caption=f"peak {peaks or 'nothing'}; prefetch {self.prefetch_units} units; gap {gap}",
        )
        for heading in ("units", "params", "state", "grads", "update on", "activations"):
            table.add_column(heading)
        for first, last, line in _runs(self.units):
            label = first if first == last else f"{first} … {last}"
            homes = [h.name.lower() for h in (line.param_home, line.state_home, line.grad_home)]
            table.add_row(label, *homes, line.update_on.value, line.activation.value)
        return table


def _runs(units: Sequence[UnitPlan]) -> list[tuple[str, str, UnitPlan]]:
    runs: list[tuple[str, str, UnitPlan]] = []
    for line in units:
        if runs and runs[-1][2].choice == line.choice:
            runs[-1] = (runs[-1][0], line.name, line)
        else:
            runs.append((line.name, line.name, line))
    return runs


def plan_of(
    instance: Instance,
    tables: CostTables,
    picks: Iterable[int],
    *,
    planner: str,
    mip_gap: float | None = None,
    forecast: Forecast | None = None,
    note: str = "",
) -> Plan:
    """The plan of one assignment. Without ``mip_gap`` the gap is that to the compute-only bound.

    Without ``forecast`` the cost model's figures stand in for the simulator's.
    """
    chosen = [OPTIONS[i] for i in picks]
    cost = tables.cost(OPTION_INDEX[choice.code] for choice in chosen)
    if mip_gap is None:
        mip_gap = _gap_to_compute(instance, cost)
    device = math.ceil(cost.device_peak_nbytes)
    return Plan(
        units=tuple(
            UnitPlan(u.name, c.param_home, c.state_home, c.grad_home, c.update_on, c.activation)
            for u, c in zip(instance.units, chosen, strict=True)
        ),
        prefetch_units=tables.prefetch_units,
        planner=planner,
        step_s=cost.step_s,
        peak_nbytes=device,
        dram_peak_nbytes=math.ceil(cost.dram_peak_nbytes),
        nvme_peak_nbytes=math.ceil(cost.nvme_peak_nbytes),
        mip_gap=mip_gap,
        forecast=forecast or Forecast(cost.step_s, device, cost.bottleneck),
        model_key=key_of_units(instance.units),
        note=note,
    )


def _gap_to_compute(instance: Instance, cost: Cost) -> float:
    least = instance.num_micro_batches * sum(u.forward_s + u.backward_s for u in instance.units)
    return (cost.step_s - least) / cost.step_s if cost.step_s > 0 else 0.0


# ------------------------------------------------------------------------------------------------ what a run will hold


@dataclass(frozen=True, slots=True)
class AliveActivations:
    """Activations on the device while one unit runs."""

    stay_nbytes: int
    """What stays between forward and backward, of this unit and those before it."""
    return_nbytes: int
    """What this unit's backward brings back, by running its forward again or from where it was sent."""


def alive_activations(units: Iterable[UnitProfile], choices: Iterable[Choice]) -> Iterator[AliveActivations]:
    """Walk the forward: what is alive at each unit. Activations that are offloaded are there in its forward too."""
    stay_nbytes = 0
    for unit, choice in zip(units, choices, strict=True):
        own_nbytes = unit.activation_nbytes
        if choice.activation is ActivationChoice.KEEP:
            kept_nbytes = own_nbytes
        elif choice.activation is ActivationChoice.RECOMPUTE:
            kept_nbytes = min(unit.boundary_nbytes, own_nbytes)
        else:
            kept_nbytes = 0
        stay_nbytes += kept_nbytes
        yield AliveActivations(stay_nbytes, own_nbytes - kept_nbytes)


def alive_peak_nbytes(units: Sequence[UnitProfile], choices: Sequence[Choice]) -> int:
    """Bytes of activations on the device at most: all that stays, and the most that a backward brings back.

    Of offloaded ones two units' are there at a time: one's fetch runs beside the other's backward.
    """
    stay_nbytes = most_nbytes = 0
    for choice, alive in zip(choices, alive_activations(units, choices), strict=True):
        stay_nbytes = alive.stay_nbytes
        most_nbytes = max(most_nbytes, alive.return_nbytes * (2 if choice.activation.is_offloaded else 1))
    return stay_nbytes + most_nbytes


def held_peak_nbytes(
    units: Sequence[UnitProfile],
    choices: Sequence[Choice],
    held_nbytes: int,
    *,
    num_micro_batches: int = 1,
    waits_for_copies: bool = False,
) -> int:
    """Device bytes at the worst point of a step, allocated by the engine and beside it.

    Not what a plan needs (``Cost.device_peak_nbytes``) but what an engine takes that may hold ``held_nbytes``: it drops
    nothing before it wants the room, so parameters that stream stay too while there is room. Beside it: activations by
    their choice, and each unit's ``workspace_nbytes``. See [Note: bytes on the device]. ``waits_for_copies``: gradients
    have left before the next unit makes its own.
    """
    params = sum(unit.param_nbytes for unit in units)
    states = sum(u.state_nbytes for u, c in zip(units, choices, strict=True) if c.state_home is Tier.DEVICE)
    kept_grads = [
        u.grad_nbytes if u.trained_numel and c.grad_home is Tier.DEVICE else 0
        for u, c in zip(units, choices, strict=True)
    ]
    grads = sum(kept_grads) if num_micro_batches > 1 else 0
    peak = leaving = 0
    at_backward = []
    for i, (unit, choice, alive) in enumerate(zip(units, choices, alive_activations(units, choices), strict=True)):
        own = beside = 0
        if choice.activation.is_offloaded:
            own = alive.return_nbytes
            beside = units[i - 1].activation_nbytes if i and choices[i - 1].activation is choice.activation else 0
        always = alive.stay_nbytes + unit.workspace_nbytes
        peak = max(peak, min(held_nbytes, params + states + grads) + always + own)
        at_backward.append(always + alive.return_nbytes + beside)
    for i in reversed(range(len(units))):
        unit = units[i]
        newborn = unit.grad_nbytes if unit.newborn_grad_nbytes is None else unit.newborn_grad_nbytes
        newborn = newborn if unit.trained_numel else 0
        held = min(held_nbytes, params + states + grads + newborn + leaving)
        peak = max(peak, held + at_backward[i])
        if num_micro_batches == 1:
            grads += kept_grads[i]
        leaving = unit.grad_nbytes if unit.trained_numel and not kept_grads[i] and not waits_for_copies else 0
    return peak


# ---------------------------------------------------------------------------------------------------------- checker

_RELATIVE_TOLERANCE = 1e-6


def check_plan(instance: Instance, plan: Plan) -> Cost:
    """Recompute ``plan`` from nothing and return its cost; raise if it is not a plan for ``instance``.

    Checked: the units' names and order, that every choice is allowed, that no tier's peak exceeds its budget, that
    the recorded bytes and step time are the true ones (within 1e-6). Raises ``ConfigError`` for a plan of another
    model or with a choice that the settings forbid, ``CapacityError`` for one that does not fit or misstates its cost.
    """
    cost = _walked_cost(instance, plan)
    for tier in Tier:
        peak, budget = cost.peak_nbytes(tier), instance.budget_nbytes(tier)
        # One byte of grace per gigabyte: the solver's rows are met to 1e-9 of a budget.
        if peak > budget * (1 + 1e-9):
            raise InfeasiblePlanError(
                f"the plan needs {format_nbytes(peak)} on {tier.name}, {tier.name.lower()}_budget is "
                f"{format_nbytes(budget)}. Raise it, or plan again.",
                tier=tier.name,
                least_budget_nbytes=math.ceil(peak),
            )
        if abs(plan.tier_peak_nbytes(tier) - peak) > 1 + _RELATIVE_TOLERANCE * peak:
            raise CapacityError(
                f"the plan states {plan.tier_peak_nbytes(tier)} bytes on {tier.name}, it needs {peak:.0f}."
            )
    if abs(plan.step_s - cost.step_s) > _RELATIVE_TOLERANCE * cost.step_s + 1e-12:
        raise CapacityError(f"the plan states {plan.step_s:.6g} s a step, its cost is {cost.step_s:.6g} s.")
    return cost


def restated(instance: Instance, plan: Plan) -> Plan:
    """The same lines with what they come to for ``instance``: a plan may have been made for another batch or machine.

    Raises ``ConfigError`` for a plan of another model or with a choice that the settings forbid.
    """
    cost = _walked_cost(instance, plan)
    same_s = abs(plan.step_s - cost.step_s) <= _RELATIVE_TOLERANCE * cost.step_s
    device = math.ceil(cost.device_peak_nbytes)
    return dataclasses.replace(
        plan,
        step_s=cost.step_s,
        peak_nbytes=device,
        dram_peak_nbytes=math.ceil(cost.dram_peak_nbytes),
        nvme_peak_nbytes=math.ceil(cost.nvme_peak_nbytes),
        mip_gap=plan.mip_gap if same_s else _gap_to_compute(instance, cost),
        forecast=Forecast(cost.step_s, device, cost.bottleneck),
        model_key=key_of_units(instance.units),
    )


def _walked_cost(instance: Instance, plan: Plan) -> Cost:
    if [line.name for line in plan.units] != [unit.name for unit in instance.units]:
        raise ConfigError(
            f"the plan is for {len(plan.units)} units ({plan.units[0].name if plan.units else 'none'}, ...), the model "
            f"has {len(instance.units)} ({instance.units[0].name}, ...). Remove plan_file, or plan again."
        )
    allowed = instance.allowed()
    for row, pick in enumerate(plan.picks()):
        if not allowed[row, pick]:
            raise ConfigError(f"unit {plan.units[row].name}: {OPTIONS[pick].code} is not allowed by the settings.")
    return _Walk(instance, [line.choice for line in plan.units], plan.prefetch_units).cost()


class _Walk:
    """A step walked unit by unit with plain numbers; see the notes in ``cost_model``."""

    def __init__(self, instance: Instance, choices: Sequence[Choice], prefetch_units: int) -> None:
        self.instance, self.choices, self.prefetch = instance, choices, prefetch_units
        self.units, self.machine = instance.units, instance.machine
        self.n = len(instance.units)

    def cost(self) -> Cost:
        step_s, bound, lanes = self._step()
        slack = 1 + self.machine.allocator_slack_frac
        on_nvme = [self._nvme_nbytes(i) for i in range(self.n)]
        dram = sum(self._dram_nbytes(i) for i in range(self.n)) + NUM_STAGED_UPDATES * max(on_nvme)
        return Cost(
            step_s=step_s,
            device_peak_nbytes=(self.instance.device_fixed_nbytes + self._device_peak_nbytes()) * slack,
            dram_peak_nbytes=self.instance.dram_fixed_nbytes + dram,
            nvme_peak_nbytes=float(sum(on_nvme)),
            bottleneck=bound,
            lane_s=lanes,
        )

    # ------------------------------------------------------------------------------------------------ small facts
    def _grad(self, i: int) -> int:
        return self.units[i].grad_nbytes if self.units[i].trained_numel else 0

    def _grad_down(self, i: int) -> int:
        return self._grad(i) if self.choices[i].grad_home is Tier.DRAM else 0

    def _streams(self, i: int) -> bool:
        return self.choices[i].param_home is not Tier.DEVICE

    def _offloads(self, i: int) -> bool:
        return self.choices[i].activation.is_offloaded

    def _recomputes(self, i: int) -> bool:
        return self.choices[i].activation is ActivationChoice.RECOMPUTE

    def _host_copy(self, i: int) -> int:
        """Bytes of the host's copy of a device-resident parameter that the CPU updates."""
        unit, choice = self.units[i], self.choices[i]
        if choice.update_on is UpdatePlace.CPU and not self._streams(i) and unit.trained_numel:
            return unit.param_nbytes
        return 0

    def _boundary(self, unit: UnitProfile) -> int:
        return min(unit.boundary_nbytes, unit.activation_nbytes)

    def _update_stage(self, i: int) -> int:
        unit, choice = self.units[i], self.choices[i]
        moves_state = choice.state_home is not Tier.DEVICE
        if choice.update_on is UpdatePlace.CPU or not unit.trained_numel or not (moves_state or self._streams(i)):
            return 0
        return (
            (unit.state_nbytes if moves_state else 0)
            + (unit.param_nbytes if self._streams(i) else 0)
            + self._grad_down(i)
        )

    # ------------------------------------------------------------------------------------------------------ bytes
    def _device_peak_nbytes(self) -> float:
        """Walk the step, carrying what stays: homes, activations since their forward, gradients until their update."""
        instance, n = self.instance, self.n
        eager = instance.num_micro_batches == 1 and not instance.clip
        grads = [self._grad(i) if self.choices[i].grad_home is Tier.DEVICE else 0 for i in range(n)]
        stays = sum(unit.param_nbytes for i, unit in enumerate(self.units) if not self._streams(i))
        stays += sum(u.state_nbytes for u, c in zip(self.units, self.choices, strict=True) if not c.state_home)
        if instance.num_micro_batches > 1:
            stays += sum(grads)
        waiting = sum(grads) if instance.num_micro_batches == 1 and instance.clip else 0
        in_flight = [0] * (n + 1)
        for i in reversed(range(n)):
            pair = self._update_stage(i) + (self._update_stage(i + 1) if i + 1 < n else 0)
            in_flight[i] = max(in_flight[i + 1], pair)
        width, peak = min(self.prefetch + 1, n), 0
        for i, unit in enumerate(self.units):
            if self.choices[i].activation is ActivationChoice.KEEP:
                stays += unit.activation_nbytes
            elif self._recomputes(i):
                stays += self._boundary(unit)
            here = stays + waiting + unit.workspace_nbytes
            here += unit.activation_nbytes if self._offloads(i) else 0
            here += self.units[i - 1].activation_nbytes if i and self._offloads(i - 1) else 0
            forward = here + self._staged(min(i, n - width), width) + in_flight[i]
            backward = here + self._staged(max(i - width + 1, 0), width) + (0 if instance.clip else in_flight[i])
            backward += unit.activation_nbytes - self._boundary(unit) if self._recomputes(i) else 0
            backward += self._grad_down(i) * (2 if instance.num_micro_batches > 1 else 1) + (grads[i] if eager else 0)
            if i + 1 < n:
                backward += self._grad_down(i + 1) + (grads[i + 1] if eager else 0)
            peak = max(peak, forward, backward)
            waiting -= grads[i] if waiting else 0
        return float(peak)

    def _staged(self, start: int, width: int) -> int:
        return sum(self.units[j].param_nbytes for j in range(start, start + width) if self._streams(j))

    def _dram_nbytes(self, i: int) -> int:
        unit, choice = self.units[i], self.choices[i]
        total = self._grad_down(i)
        if choice.param_home is Tier.DRAM:
            total += unit.param_nbytes
        if choice.state_home is Tier.DRAM:
            total += unit.state_nbytes + self._host_copy(i)
        if choice.activation is ActivationChoice.OFFLOAD_DRAM:
            total += unit.activation_nbytes
        return total

    def _nvme_nbytes(self, i: int) -> int:
        unit, choice = self.units[i], self.choices[i]
        total = unit.param_nbytes if choice.param_home is Tier.NVME else 0
        if choice.state_home is Tier.NVME:
            total += unit.state_nbytes + self._host_copy(i)
        if choice.activation is ActivationChoice.OFFLOAD_NVME:
            total += unit.activation_nbytes
        return total

    # ---------------------------------------------------------------------------------------------------- seconds
    def _moved(self, i: int) -> dict[str, list[float]]:
        """Bytes (elements for the updates) that unit i moves on each raw lane, in phases 0, 1 and 2."""
        unit, choice, n, num_micro = self.units[i], self.choices[i], self.n, self.instance.num_micro_batches
        moved = {lane: [0.0, 0.0, 0.0] for lane in ("h2d", "d2h", "read", "write", "cpu", "device")}
        if self._streams(i):
            num_more = (num_micro - 1 if i > self.prefetch else 0) + (num_micro if i < n - 1 - self.prefetch else 0)
            for lane in ("h2d", "read") if choice.param_home is Tier.NVME else ("h2d",):
                moved[lane][0] += unit.param_nbytes
                moved[lane][1] += num_more * unit.param_nbytes
        if self._offloads(i):
            ways = [("d2h", "h2d")]
            if choice.activation is ActivationChoice.OFFLOAD_NVME:
                ways.append(("write", "read"))
            for down, up in ways:
                moved[down][0] += unit.activation_nbytes
                moved[down][1] += (num_micro - 1) * unit.activation_nbytes
                moved[up][1] += num_micro * unit.activation_nbytes
        moved["d2h"][1] += num_micro * self._grad_down(i)
        moved["h2d"][1] += (num_micro - 1) * self._grad_down(i)
        if not unit.trained_numel:
            return moved
        if choice.update_on is UpdatePlace.CPU:
            moved["cpu"][2] = unit.trained_numel
            moved["cpu"][1] = unit.trained_numel * self.machine.moments_later_frac
            moved["h2d"][2] += 0 if self._streams(i) else unit.param_nbytes
        else:
            moved["device"][2] = unit.trained_numel
            passing = (unit.state_nbytes if choice.state_home is not Tier.DEVICE else 0) + (
                unit.param_nbytes if self._streams(i) else 0
            )
            moved["h2d"][2] += passing + self._grad_down(i)
            moved["d2h"][2] += passing
        flash = (unit.state_nbytes + self._host_copy(i) if choice.state_home is Tier.NVME else 0) + (
            unit.param_nbytes if choice.param_home is Tier.NVME else 0
        )
        moved["read"][2] += flash
        moved["write"][2] += flash
        return moved

    def _fetch_s(self, i: int) -> float:
        if not self._streams(i):
            return 0.0
        seconds = self.units[i].param_nbytes / self.machine.h2d_bytes_per_s
        if self.choices[i].param_home is Tier.NVME:
            seconds = max(seconds, self.units[i].param_nbytes / self.machine.read_bytes_per_s)
        return seconds

    def _stalls(self, i: int) -> tuple[float, float, float]:
        """Seconds that compute waits at unit i: in the first forward, in each later forward, in each backward."""
        units, machine, n, p = self.units, self.machine, self.n, self.prefetch
        fetch = self._fetch_s(i)
        late_f = max(0.0, fetch - sum(units[j].forward_s for j in range(max(0, i - p), i)))
        late_b = max(0.0, fetch - sum(units[j].backward_s for j in range(i + 1, min(n, i + p + 1))))
        first = late_f if i > p or p == 0 else 0.0
        again = late_f if i > p else 0.0
        back = late_b if i < n - 1 - p else 0.0
        if self._offloads(i):
            nbytes = units[i].activation_nbytes
            down, up = nbytes / machine.d2h_bytes_per_s, nbytes / machine.h2d_bytes_per_s
            if self.choices[i].activation is ActivationChoice.OFFLOAD_NVME:
                down, up = max(down, nbytes / machine.write_bytes_per_s), max(up, nbytes / machine.read_bytes_per_s)
            wait = max(0.0, down - (units[i + 1].forward_s if i + 1 < n else 0.0))
            first, again = first + wait, again + wait
            back += max(0.0, up - (units[i + 1].backward_s if i + 1 < n else 0.0))
        if i > 0:
            back += max(0.0, self._grad_down(i) / machine.d2h_bytes_per_s - units[i - 1].backward_s)
        return first, again, back

    def _backward_s(self, i: int) -> float:
        return self.units[i].backward_s + (self.units[i].rerun_s if self._recomputes(i) else 0.0)

    def _seconds(self, i: int) -> dict[str, list[float]]:
        machine, moved, num_micro = self.machine, self._moved(i), self.instance.num_micro_batches
        first, again, back = self._stalls(i)
        forward = self.units[i].forward_s
        both = [x + y for x, y in zip(moved["h2d"], moved["d2h"], strict=True)]
        flash = [x + y for x, y in zip(moved["read"], moved["write"], strict=True)]
        host = [
            x + y + z * machine.cpu_update_bytes_per_numel for x, y, z in zip(both, flash, moved["cpu"], strict=True)
        ]
        return {
            "compute": [
                forward + first,
                (num_micro - 1) * (forward + again) + num_micro * (self._backward_s(i) + back),
                moved["device"][2] / machine.device_update_numel_per_s,
            ],
            "h2d": [x / machine.h2d_bytes_per_s for x in moved["h2d"]],
            "d2h": [x / machine.d2h_bytes_per_s for x in moved["d2h"]],
            "pcie": [x / machine.pcie_bytes_per_s for x in both],
            "read": [x / machine.read_bytes_per_s for x in moved["read"]],
            "write": [x / machine.write_bytes_per_s for x in moved["write"]],
            "disk": [x / machine.disk_bytes_per_s for x in flash],
            "cpu_update": [x / machine.cpu_update_numel_per_s for x in moved["cpu"]],
            "dram": [x / machine.dram_bytes_per_s for x in host],
        }

    def _step(self) -> tuple[float, str, dict[str, float]]:
        instance, machine, n = self.instance, self.machine, self.n
        per_unit = [self._seconds(i) for i in range(n)]
        lanes = list(per_unit[0])
        phase = {lane: [sum(unit[lane][k] for unit in per_unit) for k in range(3)] for lane in lanes}
        first = {lane: phase[lane][0] + (phase[lane][2] if instance.clip else 0.0) for lane in lanes}
        top0, top1 = max(lanes, key=lambda x: first[x]), max(lanes, key=lambda x: phase[x][1])
        bounds = [(first[top0] + phase[top1][1], top0 if top0 != "compute" else top1)]
        if not instance.clip:
            bounds += [(sum(phase[lane]), lane) for lane in lanes]
        all_forward = sum(unit.forward_s for unit in self.units)
        all_backward = sum(self._backward_s(i) for i in range(n))
        left_forward, left_backward = all_forward, all_backward
        done = dict.fromkeys(("h2d", "pcie", "read", "cpu_update", "dram"), 0.0)
        for k, (unit, choice) in enumerate(zip(self.units, self.choices, strict=True)):
            outside = left_forward + (instance.num_micro_batches - 1) * (all_forward + all_backward)
            outside += all_backward if instance.clip else left_backward
            tail = 0.0
            if choice.update_on is UpdatePlace.CPU and unit.trained_numel:
                tail = self._fetch_s(k) if self._streams(k) else unit.param_nbytes / machine.h2d_bytes_per_s
            for lane in done:
                done[lane] += per_unit[k][lane][0] + per_unit[k][lane][2]
                bounds.append((outside + done[lane] + (tail if lane == "cpu_update" else 0.0), lane))
            if unit.trained_numel:
                chain = per_unit[k]["read"][2] + per_unit[k]["cpu_update"][2] + per_unit[k]["compute"][2] + tail
                if choice.update_on is UpdatePlace.DEVICE:
                    chain += per_unit[k]["h2d"][2]
                if k == 0 or not instance.clip:
                    chain += self._grad_down(k) / machine.d2h_bytes_per_s
                bounds.append((outside + chain, "update_chain"))
            left_forward -= unit.forward_s
            left_backward -= self._backward_s(k)
        step_s, name = max(bounds, key=lambda bound: bound[0])
        leak = machine.overlap_loss_frac * sum(sum(phase[lane]) for lane in ("h2d", "d2h", "read", "write"))
        leak += machine.update_loss_frac * sum(phase["cpu_update"])
        return step_s + leak, name, {lane: sum(phase[lane]) for lane in lanes}
