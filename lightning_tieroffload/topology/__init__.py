"""Floor 0. Location-aware DRAM: where memory is borrowed from, and what the distance costs.

Names are loaded on first use, so that importing the package pulls in neither Numba nor scipy.
"""

from __future__ import annotations

import importlib

_HOME_OF = {
    "Allocation": "flows",
    "Mesh": "mesh",
    "PlacementProblem": "genetic",
    "allocate": "allocator",
    "brute_force": "genetic",
    "optimise": "genetic",
    "read_mesh": "mesh_sources",
    "rebalance": "allocator",
    "transport_optimum": "exact",
}

__all__ = [
    "Allocation",
    "Mesh",
    "PlacementProblem",
    "allocate",
    "brute_force",
    "optimise",
    "read_mesh",
    "rebalance",
    "transport_optimum",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
