"""Python's collector at every second to fifth allocation, with other threads let in while it runs."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def collecting_always() -> Iterator[None]:
    """Collects the youngest only, so that it costs little however much the process holds."""

    def let_others_in(_: str, __: dict[str, int]) -> None:
        time.sleep(0)
        gc.set_threshold(next(counts), 100_000, 100_000)  # not the same place of the same loop each time

    counts = itertools.cycle((1, 2, 1, 4, 3))
    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(let_others_in)
    gc.set_threshold(1, 100_000, 100_000)
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_in)
