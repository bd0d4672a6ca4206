"""Floor 3. How the C library keeps memory that was freed, where the DEVICE tier is host memory.

glibc maps large blocks on their own and unmaps them when they are freed, but only blocks above a threshold that it
raises to the largest block freed so far (32 MiB at most). From then on released units stay as holes of the heap: with
layers of 16 MiB and a budget of 200 MB the process held 520 MB more than the engine (measured). A threshold that was
set once is not raised any more.
"""

from __future__ import annotations

import ctypes

from lightning_tieroffload.config import malloc_is_tuned
from lightning_tieroffload.sizes import MiB

__all__ = ["give_back_released_memory"]

_M_MMAP_THRESHOLD = -3  # malloc.h


def give_back_released_memory() -> None:
    """Have freed blocks of 1 MiB and more go back to the system at once, in the whole process. Idempotent.

    Does nothing where the user has set malloc's thresholds, and without glibc.
    """
    if malloc_is_tuned():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MiB)
