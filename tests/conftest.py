"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Property tests are judged by what they find, not by how busy the machine is.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: for toy models the others only wait, and on a busy machine they wait long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def no_engine_of_earlier_files() -> None:
    """Many tests leave their engine open, as users do. Each file starts without those of the files before it."""
    module = sys.modules.get("lightning_tieroffload.engine.offload_engine")
    if module is None:
        return
    for core in list(module._cores):
        for reference in list(core.engines):
            engine = reference()
            if engine is not None:
                with contextlib.suppress(Exception):  # what one of them failed with was its own test's business
                    engine.close()
    gc.collect()
