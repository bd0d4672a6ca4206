"""Fixtures for all tests."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Property tests are judged by what they find, not by how busy the machine is.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")


# Tests with one of these marks measure time, memory or threads, or use a device that there is once.
ALONE = ("alone", "gpu", "nvme")

# A job in the background is started with Ctrl-C ignored, and so would be all processes that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", choices=["beside", "alone"], help="only the tests that stand company, or only those that do not"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--part")
    if part is not None:
        parts: dict[str, list[pytest.Item]] = {"beside": [], "alone": []}
        for item in items:
            parts["alone" if any(map(item.get_closest_marker, ALONE)) else "beside"].append(item)
        items[:] = parts.pop(part)
        config.hook.pytest_deselected(items=parts.popitem()[1])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: for toy models the others only wait, and on a busy machine they wait long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _close_all_engines() -> None:
    module = sys.modules.get("lightning_tieroffload.engine.offload_engine")
    for core in () if module is None else list(module._cores):
        for reference in list(core.engines):
            engine = reference()
            if engine is not None:
                with contextlib.suppress(Exception):  # what one of them failed with was its own test's business
                    engine.close()


@pytest.fixture(scope="module", autouse=True)
def no_engine_of_earlier_files() -> None:
    """Many tests leave their engine open, as users do. Each file starts without those of the files before it.

    What is left then is set aside from the collector, until the next file: some million objects of imported packages,
    which every collection that a test or a library asks for would walk over, for a third of a second.
    """
    gc.unfreeze()
    _close_all_engines()
    gc.collect()
    gc.freeze()
    gc.collect()  # or the collector still reckons with the size of what is set aside, and comes seldom
