"""Floor 0. Package marker; names that scripts rely on are imported when first asked for, so this costs nothing."""

from __future__ import annotations

import importlib
from typing import Any

_HOME_OF = {
    "Instance": "cost_model",
    "MachineProfile": "profile",
    "Plan": "plan",
    "Profile": "profile",
    "UnitProfile": "profile",
    "best_plan": "solver",
    "check_plan": "plan",
    "random_instance": "solver",
    "solve": "solver",
}

__all__ = [
    "Instance",
    "MachineProfile",
    "Plan",
    "Profile",
    "UnitProfile",
    "best_plan",
    "check_plan",
    "random_instance",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
