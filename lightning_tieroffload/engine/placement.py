"""Floor 5. The words in which plans speak of units: homes without activations, a unit's name, the line of the rest.

Owns the translation between ``UnitState`` and the cost model's ``Choice``. Decides nothing and moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.unit_state import UnitState
from lightning_tieroffload.planning.cost_model import OPTION_INDEX, ActivationChoice, Choice, UpdatePlace

__all__ = ["NOTHING_TO_UPDATE", "REST", "Placement", "as_option", "code_of", "homes_of", "names_of", "placement_key"]

Placement = tuple[Tier, Tier, Tier, UpdatePlace]
"""Homes of parameters, state and gradients, and where the update runs: a choice without its activations."""

REST = "(rest)"
"""The line of what is no unit's: the loss, the optimizer's own time, the loader."""
NOTHING_TO_UPDATE = (Tier.DEVICE, Tier.DEVICE, UpdatePlace.DEVICE)
"""Homes of state and gradients, and the update's place, of what has none of them."""


def homes_of(choice: Choice) -> Placement:
    """A choice without its activations."""
    return (choice.param_home, choice.state_home, choice.grad_home, choice.update_on)


def as_option(placement: Placement) -> Placement:
    """The placement as the cost model knows it: gradients on flash count as gradients in DRAM."""
    for each in (placement, (placement[0], placement[1], Tier.DRAM, placement[3])):
        if Choice(*each, ActivationChoice.KEEP).code in OPTION_INDEX:
            return each
    return (placement[0], Tier.DRAM, Tier.DRAM, UpdatePlace.CPU)


def code_of(placement: Placement) -> str:
    """As ``Choice.code``, without the activations: ``"dram/nvme/dram/cpu"``."""
    return "/".join([*(tier.name.lower() for tier in placement[:3]), placement[3].value])


def names_of(units: Iterable[UnitState]) -> dict[UnitState, str]:
    """How plans call the units: by their names, made different where several models share the space."""
    names: dict[UnitState, str] = {}
    seen: set[str] = set()
    for unit in units:
        names[unit] = unit.name if unit.name not in seen else f"{unit.name} [{unit.index}]"
        seen.add(unit.name)
    return names


def placement_key(lines: Iterable[tuple[str, Choice]]) -> object:
    """What makes a placement's step what it is: parameters that stream stay here and there while there is room."""
    return tuple(
        (name, choice.state_home, choice.update_on, choice.activation) for name, choice in lines if name != REST
    )
