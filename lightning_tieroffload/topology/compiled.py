"""Floor 0. One way to compile a kernel: no Python objects, the interpreter lock released, machine code kept on disk.

Owns no kernel. ``error_model="numpy"`` is what lets LLVM turn loops with divisions into vector code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

__all__ = ["compiled"]


def compiled(function: Callable[..., Any]) -> Any:
    """Compile ``function`` with Numba; its plain Python form stays reachable as ``.py_func``.

    Machine code is stored beside the module (or in the user's cache directory). Where neither can be written, as in
    a read-only container, compilation happens in memory on first use.
    """
    try:
        return njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # Numba found no directory that it may write to
        return njit(nogil=True, error_model="numpy")(function)
