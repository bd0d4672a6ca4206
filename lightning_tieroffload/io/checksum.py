"""Floor 1. The checksum of what goes to flash: xxh3 (64 bits), or zlib's crc32 where xxhash is not installed.

Both hash without the interpreter lock, in pieces through ``update``: the one-call functions of xxhash before 4 keep it,
and with it every other thread, for 0.2 ms a block of 4 MiB.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

try:
    import xxhash
except ImportError:  # a dependency of ours, yet not worth refusing to run for
    xxhash = None  # type: ignore[assignment]

__all__ = ["CHECKSUM_NAME", "SLOW_CHECKSUM_REASON", "checksum_of", "crc32_of", "xxh3_of"]


def xxh3_of(memory: memoryview) -> int:
    state = xxhash.xxh3_64()
    state.update(memory)
    found: int = state.intdigest()
    return found


def crc32_of(memory: memoryview) -> int:
    return zlib.crc32(memory)


checksum_of: Callable[[memoryview], int] = crc32_of if xxhash is None else xxh3_of
CHECKSUM_NAME = "crc32" if xxhash is None else "xxh3"
SLOW_CHECKSUM_REASON = (
    "xxhash is not installed: what goes to flash is checked by zlib's crc32, with 32 bits at a few GB/s a core instead "
    "of 64 bits at tens of GB/s. pip install xxhash."
    if xxhash is None
    else None
)
