"""Floor 7. From a profile to a planning problem: what each unit may do just now, and within which budgets.

Owns the translation of settings, budgets and what the engine can realise into an ``Instance``. What a budget covers is
said in [Note: what a budget covers]; ``engine/plan_search.py`` finds the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import CUDA_DEVICE_FRAC, TierOffloadConfig
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.placement import NOTHING_TO_UPDATE, Placement, as_option, names_of
from lightning_tieroffload.engine.unit_state import UnitState
from lightning_tieroffload.planning.cost_model import ActivationChoice, Choice, Instance
from lightning_tieroffload.planning.profile import Profile, UnitProfile

__all__ = ["ACTIVATIONS_OF_SETTING", "InstanceMaker"]

ACTIVATIONS_OF_SETTING = {
    "auto": (ActivationChoice.KEEP, ActivationChoice.RECOMPUTE, ActivationChoice.OFFLOAD_DRAM),
    "keep": (ActivationChoice.KEEP,),
    "recompute": (ActivationChoice.RECOMPUTE,),
    "offload": (ActivationChoice.OFFLOAD_DRAM,),
}
"""What a plan may do with activations, by the setting of that name."""
_ALLOCATED_FRAC = 0.85  # of a whole GPU's memory; the rest is lost to the allocator's rounding and fragments


class InstanceMaker:
    """Makes planning problems of one device space.

    Args:
        placements: what the engine can realise for a unit just now, its present placement included.
        can_offload: whether there is DRAM for activations that the plan sends there.
        can_recompute: whether a unit that could be recomputed has not been refused.
    """

    def __init__(
        self,
        config: TierOffloadConfig,
        space: DeviceSpace,
        *,
        placements: Callable[[UnitState], Collection[Placement]],
        can_offload: Callable[[], bool],
        can_recompute: Callable[[UnitState], bool],
    ) -> None:
        self._config = config
        self._space = space
        self._placements = placements
        self._can_offload = can_offload
        self._can_recompute = can_recompute
        self._counts_activations = config.activations == "auto"
        self._first_budget_nbytes: int | None = None  # of the device, before a plan for the whole of it

    def make(self, profile: Profile, *, budget_frac: float = 1.0) -> Instance:
        """The problem of these units within so much of the device's budget."""
        by_name = {name: unit for unit, name in names_of(self._space.units).items()}
        units, options = [], []
        for line in profile.units:
            unit = by_name.get(line.name)
            is_sent_away = unit is not None and self._config.activations == "offload"
            counted_nbytes = line.activation_nbytes if self._counts_activations or is_sent_away else 0
            units.append(
                dataclasses.replace(
                    line,
                    workspace_nbytes=0,  # nobody's: see [Note: what a budget covers]
                    activation_nbytes=counted_nbytes,
                    boundary_nbytes=min(line.boundary_nbytes, counted_nbytes),
                )
            )
            options.append(self._options(unit, line))
        prefetch = self._config.prefetch_units
        distances = (2, 1) if self._space.device.type == "cuda" else (1,)
        return Instance(
            units=tuple(units),
            machine=profile.machine,
            device_budget_nbytes=int(self._device_budget_nbytes(profile) * budget_frac),
            dram_budget_nbytes=self._space.ledger[Tier.DRAM].budget_nbytes,
            nvme_budget_nbytes=self._space.ledger[Tier.NVME].budget_nbytes,
            num_micro_batches=profile.notes["num_micro_batches"],
            prefetch_units=distances if prefetch == "auto" else (prefetch,),
            options=tuple(options),
        )

    def is_whole_device(self) -> bool:
        """Whether plans may count with all of the GPU's memory: nobody has set a budget, and activations are known."""
        is_auto = self._config.device_budget == "auto"
        return is_auto and self._space.device.type == "cuda" and self._counts_activations

    def _device_budget_nbytes(self, profile: Profile) -> int:
        if self._first_budget_nbytes is None:
            self._first_budget_nbytes = self._space.ledger[Tier.DEVICE].budget_nbytes
        if not self.is_whole_device():
            return self._first_budget_nbytes
        whole_nbytes = int(_ALLOCATED_FRAC * self._first_budget_nbytes / CUDA_DEVICE_FRAC)
        beside_nbytes = max(line.workspace_nbytes for line in profile.units)  # kernels' workspace, the loss, casts
        return max(self._first_budget_nbytes, whole_nbytes - beside_nbytes)

    def _options(self, unit: UnitState | None, line: UnitProfile) -> tuple[str, ...]:
        if unit is None:
            return (Choice(Tier.DEVICE, *NOTHING_TO_UPDATE, ActivationChoice.KEEP).code,)
        placements: Iterable[Placement] = {as_option(p) for p in self._placements(unit)}
        if line.trained_numel == 0:
            placements = {(p[0], *NOTHING_TO_UPDATE) for p in placements}
        activations = [a for a in ACTIVATIONS_OF_SETTING[self._config.activations] if self._may(unit, line, a)]
        codes = [Choice(*p, a).code for p in placements for a in activations or [ActivationChoice.KEEP]]
        return tuple(sorted(codes))

    def _may(self, unit: UnitState, line: UnitProfile, activation: ActivationChoice) -> bool:
        if activation is ActivationChoice.KEEP:
            return True
        if unit.root is None or (self._counts_activations and line.activation_nbytes == 0):
            return False
        if activation is ActivationChoice.OFFLOAD_DRAM:
            return self._config.activations == "offload" or self._can_offload()
        return self._can_recompute(unit)
