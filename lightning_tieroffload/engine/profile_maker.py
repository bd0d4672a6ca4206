"""Floor 7. From watched steps to a profile: the figures of units and machine, as the cost model counts them.

Owns how measurements are read: bytes as they are moved and kept, workspace less the activations alive then, rates of
updates, and what the model of a step does not explain. ``engine/profiler.py`` measures; ``engine/planner.py`` says when
a profile is made and keeps it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable
from typing import Any

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.placement import NOTHING_TO_UPDATE, REST, as_option, homes_of, names_of
from lightning_tieroffload.engine.profiler import Measured, Phase, Profiler
from lightning_tieroffload.engine.unit_state import UnitState, WireState
from lightning_tieroffload.planning.cost_model import ActivationChoice, Choice, Instance
from lightning_tieroffload.planning.plan import alive_activations
from lightning_tieroffload.planning.profile import MachineProfile, Profile, UnitProfile

__all__ = ["MeasuredSteps", "ProfileMaker"]

_PASS_BYTES_PER_NUMEL = 18.0  # DRAM traffic of one pass of two: see "Weights first" in docs/design.md
_REST_CHOICE = Choice(Tier.DEVICE, *NOTHING_TO_UPDATE, ActivationChoice.KEEP)


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The profile of watched steps, and what they did with each of its lines."""

    profile: Profile
    choices: tuple[Choice, ...]
    step_s: float


class ProfileMaker:
    """Makes profiles of one device space's units out of what its profiler has seen.

    Args:
        state_nbytes: bytes of the unit's optimizer state.
    """

    def __init__(
        self,
        config: TierOffloadConfig,
        space: DeviceSpace,
        profiler: Profiler,
        *,
        state_nbytes: Callable[[UnitState], int],
    ) -> None:
        self._config = config
        self._space = space
        self._profiler = profiler
        self._state_nbytes = state_nbytes

    def make(self, machine: MachineProfile, *, before: Profile | None, growth: float) -> MeasuredSteps:
        """The profile of the steps just watched, one at least.

        ``before``: the last profile, whose batch the watched one is ``growth`` times as large as.
        """
        profiler = self._profiler
        machine = self._with_update_rates(machine)
        by_index = {unit.index: unit for unit in self._space.units}
        order = [by_index[index] for index in profiler.order() if index in by_index]
        order += [unit for unit in self._space.units if unit not in order]
        counts = [m.num_forward for unit in order if (m := profiler.usual(unit.index)).num_forward > 0]
        num_micro = max(1, round(statistics.median(counts))) if counts else 1
        names = names_of(self._space.units)
        units = [self._unit_profile(unit, names[unit], num_micro, before, growth) for unit in order]
        rest = profiler.usual(None)
        step = profiler.steps[-1]
        step_s = profiler.step_s()
        units.append(UnitProfile(REST, 0, 0, 0, 0, rest.saved_nbytes, 0.0, 0.0, can_recompute=False))
        profile = Profile(
            machine=machine,
            units=tuple(self._with_workspace(order, units)),
            batch_key=";".join("x".join(map(str, shape)) for shape in step.inputs),
            notes={
                "step_s": step_s,
                "last_step_s": step.step_s,
                "num_micro_batches": num_micro,
                "activations": self._config.activations,
                "lifetimes": {
                    names[unit]: self._lifetimes(unit, profiler.usual(unit.index), step.step_s) for unit in order
                },
            },
        )
        choices = (*(self._seen_choice(unit) for unit in order), _REST_CHOICE)
        return MeasuredSteps(self._calibrated(profile, choices, num_micro, step_s), choices, step_s)

    # ------------------------------------------------------------------------------------------------- the machine
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

    # ------------------------------------------------------------------------------------------------- the units
    def _with_workspace(self, order: list[UnitState], lines: list[UnitProfile]) -> list[UnitProfile]:
        """With the bytes that were beside the engine while a unit ran, less activations that were alive then.

        What no single module stands for (the head, which runs piece by piece with the loss) counts with the rest.
        """
        beside_nbytes = 0
        found = []
        choices = [*(unit.choice for unit in order), _REST_CHOICE]
        for unit, line, alive in zip([*order, None], lines, alive_activations(lines, choices), strict=True):
            outside = self._profiler.usual(None if unit is None else unit.index).outside_nbytes
            own_nbytes = outside.get(Phase.FORWARD, 0) - alive.stay_nbytes
            for phase in (Phase.BACKWARD, Phase.RERUN):
                own_nbytes = max(own_nbytes, outside.get(phase, 0) - alive.stay_nbytes - alive.return_nbytes)
            if unit is not None and unit.root is None:
                beside_nbytes = max(beside_nbytes, *outside.values(), 0)
                own_nbytes = 0
            elif unit is None:
                own_nbytes = max(own_nbytes, beside_nbytes - alive.stay_nbytes)
            found.append(dataclasses.replace(line, workspace_nbytes=max(0, own_nbytes)))
        return found

    def _travelling_nbytes(self, unit: UnitState, num_micro: int) -> int:
        """Bytes of the unit's gradients as they are moved and kept: in 16 bits where weights are, unless added up."""
        is_narrow = unit.wire is not None and unit.wire_state is WireState.READY and num_micro == 1
        return sum(
            slot.numel * unit.wire.dtype.itemsize if is_narrow and unit.wire and slot.castable else slot.nbytes
            for slot in unit.slots
            if slot.param.requires_grad
        )

    def _unit_profile(
        self, unit: UnitState, name: str, num_micro: int, before: Profile | None, growth: float
    ) -> UnitProfile:
        measured = self._profiler.usual(unit.index)
        seconds = {phase: s / num_micro for phase, s in measured.seconds.items()}
        param_nbytes = sum(part.nbytes for part in unit.parts_for(self._space.wire_dtype))
        host_nbytes = unit.running_dram_nbytes()
        saved_nbytes, boundary_nbytes = measured.saved_nbytes, measured.boundary_nbytes
        line = before.unit(name) if before is not None else None
        if line is not None and any(u.choice.activation is not ActivationChoice.KEEP for u in self._space.units):
            # Where activations leave, what would be saved is not seen, and memory of what has left is used again: so as
            # in the steps when all were kept, for a batch of today's size.
            saved_nbytes = round(line.activation_nbytes * growth)
            boundary_nbytes = round(line.boundary_nbytes * growth)
        return UnitProfile(
            name=name,
            param_numel=sum(slot.numel for slot in unit.slots),
            param_nbytes=param_nbytes,
            grad_nbytes=self._travelling_nbytes(unit, num_micro),
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

    # ------------------------------------------------------------------------------------------------- the steps
    def _calibrated(self, profile: Profile, choices: tuple[Choice, ...], num_micro: int, step_s: float) -> Profile:
        """What the model does not explain of the watched steps is no unit's: the rest's seconds.

        On a host whose updates run beside compute, how much of them shows is fitted too.
        """
        from lightning_tieroffload.planning.simulator import simulate

        roomy = {"device_budget_nbytes": 1 << 60, "dram_budget_nbytes": 1 << 60, "num_micro_batches": num_micro}
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
        rest = dataclasses.replace(profile.units[-1], forward_s=max(0.0, step_s - forecast_s) / num_micro)
        return dataclasses.replace(profile, units=(*profile.units[:-1], rest))

    def _seen_choice(self, unit: UnitState) -> Choice:
        """What the watched steps did with the unit: parameters that stayed on the device were at home there."""
        parts = unit.parts_for(self._space.wire_dtype)
        home = Tier.DEVICE if all(part.is_resident for part in parts) else unit.choice.param_home
        if unit.grad_nbytes == 0:
            return Choice(home, *NOTHING_TO_UPDATE, unit.choice.activation)
        placement = as_option((home, *homes_of(unit.choice)[1:]))
        return Choice(*placement, unit.choice.activation)
