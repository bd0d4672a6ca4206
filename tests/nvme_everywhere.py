"""A pytest plugin: every engine that ``exactness.attach`` makes has everything at home on flash, in the least DRAM.

``python -m pytest -p nvme_everywhere tests/test_exact_misc.py`` with ``tests`` on the path. Tests that set budgets or
paths of their own keep them, and so do those of activation offload.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import exactness
from torch import nn

from lightning_tieroffload.engine.offload_engine import OffloadEngine
from lightning_tieroffload.errors import InfeasiblePlanError

_attach = exactness.attach
_flash = tempfile.mkdtemp(prefix="tieroffload-flash-")
num_engines = [0]


def least_dram(model: nn.Module, optimizers: Any, variant: exactness.Variant, **settings: Any) -> int:
    """The smallest dram_budget that the engine itself says it can work with."""
    budget = 1
    while True:
        try:
            _attach(model, optimizers, variant, **{**settings, "dram_budget": budget}).close()
        except InfeasiblePlanError as error:
            if error.tier != "dram":
                raise
            assert error.least_budget_nbytes is not None
            assert error.least_budget_nbytes > budget
            budget = error.least_budget_nbytes
        else:
            return budget


def attach(model: nn.Module, optimizers: Any, variant: exactness.Variant, **settings: Any) -> OffloadEngine:
    if {"dram_budget", "nvme_paths"} & settings.keys() or settings.get("activations") == "offload":
        return _attach(model, optimizers, variant, **settings)
    settings = {**settings, "nvme_paths": [_flash]}
    num_engines[0] += 1
    return _attach(
        model, optimizers, variant, **settings, dram_budget=least_dram(model, optimizers, variant, **settings)
    )


def pytest_configure() -> None:
    exactness.attach = attach


def pytest_sessionfinish() -> None:
    print(f"\nengines with everything on flash: {num_engines[0]}")
    shutil.rmtree(_flash)
