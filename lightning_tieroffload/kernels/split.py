"""Floor 2. The lossless split of an fp32 master: its bfloat16 copy, the low 16 bits, and one tie bit per element.

Owns the format and its conversion; the memory is the caller's.

[Note: split master] The compute copy is the master rounded to bfloat16, so keeping both whole stores the high half
twice. Let h be the master's high half and l its low half. The copy is h where l < 0x8000 and h + 1 where l > 0x8000:
l alone tells. Only at l = 0x8000, the exact tie, does rounding to even hide whether h was even (kept) or odd (raised),
and one bit says which. The bit needs its own place: spare sign bits of the moments do not exist for every optimizer,
and users see those arrays. 4.125 bytes per parameter instead of 6. Lossless for every pattern but a NaN's payload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lightning_tieroffload.errors import TierOffloadError
from lightning_tieroffload.kernels.primitives import LazyKernel
from lightning_tieroffload.kernels.sweep import BLOCK_NUMEL, merge_block, merge_numpy, split_block, split_numpy

__all__ = [
    "SplitMaster",
    "merge_f32",
    "merge_f32_numpy",
    "merge_slice",
    "num_tie_bytes",
    "split_f32",
    "split_f32_numpy",
    "split_slice",
]


def num_tie_bytes(numel: int) -> int:
    """Bytes of the tie bitmap of ``numel`` elements."""
    return (numel + 7) // 8


@dataclass(frozen=True, slots=True)
class SplitMaster:
    """Views of one split master; 1-D, contiguous, owned by the caller.

    ``hi_u16`` holds the bfloat16 compute copy, ``lo_u16`` the low halves, ``ties_u8`` bit ``i % 8`` of byte ``i // 8``
    for element ``i``. Two threads may write two slices at once only if their bounds are multiples of 8.
    """

    hi_u16: np.ndarray
    lo_u16: np.ndarray
    ties_u8: np.ndarray

    @property
    def numel(self) -> int:
        return int(self.hi_u16.size)

    @classmethod
    def empty(cls, numel: int) -> SplitMaster:
        """A split master in fresh memory that holds zeros."""
        return cls(np.zeros(numel, np.uint16), np.zeros(numel, np.uint16), np.zeros(num_tie_bytes(numel), np.uint8))

    def to_f32(self) -> np.ndarray:
        """The true fp32 values, in fresh memory."""
        out_f32 = np.empty(self.numel, np.float32)
        merge_f32(self.hi_u16, self.lo_u16, self.ties_u8, out_f32)
        return out_f32


def _build_split(digest: int) -> Callable[..., None]:
    def split_slice(begin, end, master_f32, hi_u16, lo_u16, ties_u8):  # type: ignore[no-untyped-def]
        if digest < 0:  # never: it only ties stored machine code to these sources, see LazyKernel
            return
        for start in range(begin, end, BLOCK_NUMEL):
            split_block(master_f32[start : min(start + BLOCK_NUMEL, end)], hi_u16, lo_u16, ties_u8, start)

    return split_slice


def _build_merge(digest: int) -> Callable[..., None]:
    def merge_slice(begin, end, hi_u16, lo_u16, ties_u8, out_f32):  # type: ignore[no-untyped-def]
        if digest < 0:
            return
        for start in range(begin, end, BLOCK_NUMEL):
            merge_block(hi_u16, lo_u16, ties_u8, start, out_f32[start : min(start + BLOCK_NUMEL, end)])

    return merge_slice


split_slice = LazyKernel(_build_split)
"""``split_slice(begin, end, master_f32, hi_u16, lo_u16, ties_u8)``, for `KernelPool`; unchecked."""

merge_slice = LazyKernel(_build_merge)
"""``merge_slice(begin, end, hi_u16, lo_u16, ties_u8, out_f32)``, for `KernelPool`; unchecked."""


def split_f32(master_f32: np.ndarray, hi_u16: np.ndarray, lo_u16: np.ndarray, ties_u8: np.ndarray) -> None:
    """Write the split form of ``master_f32`` (1-D float32) into the other three arrays.

    ``hi_u16`` gets torch's fp32 -> bf16 rounding bit for bit. ``ties_u8`` has ``num_tie_bytes(numel)`` bytes; bits past
    the end are cleared. Runs on the calling thread, without the interpreter lock. Raises TierOffloadError for arrays
    that do not fit together.
    """
    _check(master_f32, hi_u16, lo_u16, ties_u8)
    split_slice.prepare(master_f32, hi_u16, lo_u16, ties_u8)
    split_slice(0, master_f32.size, master_f32, hi_u16, lo_u16, ties_u8)


def merge_f32(hi_u16: np.ndarray, lo_u16: np.ndarray, ties_u8: np.ndarray, out_f32: np.ndarray) -> None:
    """Write the fp32 master into ``out_f32``: the inverse of `split_f32`, same arrays and errors."""
    _check(out_f32, hi_u16, lo_u16, ties_u8)
    merge_slice.prepare(hi_u16, lo_u16, ties_u8, out_f32)
    merge_slice(0, out_f32.size, hi_u16, lo_u16, ties_u8, out_f32)


def split_f32_numpy(master_f32: np.ndarray, hi_u16: np.ndarray, lo_u16: np.ndarray, ties_u8: np.ndarray) -> None:
    """Slow twin of `split_f32`."""
    _check(master_f32, hi_u16, lo_u16, ties_u8)
    split_numpy(master_f32, hi_u16, lo_u16, ties_u8, 0, master_f32.size)


def merge_f32_numpy(hi_u16: np.ndarray, lo_u16: np.ndarray, ties_u8: np.ndarray, out_f32: np.ndarray) -> None:
    """Slow twin of `merge_f32`."""
    _check(out_f32, hi_u16, lo_u16, ties_u8)
    out_f32[:] = merge_numpy(hi_u16, lo_u16, ties_u8, 0, out_f32.size)


def _check(master_f32: np.ndarray, hi_u16: np.ndarray, lo_u16: np.ndarray, ties_u8: np.ndarray) -> None:
    numel = master_f32.size
    for name, array, dtype, expected in (
        ("master_f32", master_f32, np.float32, numel),
        ("hi_u16", hi_u16, np.uint16, numel),
        ("lo_u16", lo_u16, np.uint16, numel),
        ("ties_u8", ties_u8, np.uint8, num_tie_bytes(numel)),
    ):
        if array.dtype != dtype or array.shape != (expected,) or not array.flags.c_contiguous:
            raise TierOffloadError(
                f"{name} must be a contiguous 1-D {np.dtype(dtype).name} array of {expected} elements, it is "
                f"{array.dtype.name} of shape {array.shape}: a split master is three arrays cut at the same places."
            )
