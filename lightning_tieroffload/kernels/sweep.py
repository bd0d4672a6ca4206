"""Floor 1. One pass over a slice: gradient in, master merged, updated, split, copy out. Any optimizer's inner step.

Owns the order of the steps and the scratch of one block; the arrays are the caller's, the inner step is the
optimizer's. See [Note: update kernels] in docs/design.md.

[Note: blocks] A slice is walked in blocks of ``BLOCK_NUMEL`` elements, one short loop per step. A block's scratch stays
in L1, so memory sees one pass; each loop touches few arrays, so LLVM vectorises it; and the forms of gradient, master
and copy add up, where one fused loop for each combination would multiply. All have one signature: compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, uint8, uint16, uint32

from lightning_tieroffload.kernels.primitives import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    bf16_bits,
    bf16_bits_numpy,
    bits_of,
    block_step,
    f16_bits,
    f16_bits_numpy,
    f32_of_bf16,
    f32_of_f16,
    f32_of_numpy,
    float_of,
    inlined,
    rounded_numpy,
)

__all__ = [
    "BLOCK_NUMEL",
    "any_tie",
    "close_block",
    "merge_block",
    "merge_numpy",
    "merged",
    "one_factor",
    "open_block",
    "open_gradient",
    "split_block",
    "split_numpy",
    "stride_numel",
    "sweep_numpy",
]

# Two scratch arrays of 4 KiB beside the block's lines of master and state: of 512, 1024 and 2048 the best or within
# noise of it, with 1 to 16 threads. A multiple of 8, so that a block owns whole tie bytes.
BLOCK_NUMEL = 1024


@block_step
def _upcast(grad_u16, grad_format, out_f32):  # type: ignore[no-untyped-def]
    if grad_format == BFLOAT16:
        for i in range(out_f32.size):
            out_f32[i] = f32_of_bf16(uint32(grad_u16[i]))
    else:
        for i in range(out_f32.size):
            out_f32[i] = f32_of_f16(uint32(grad_u16[i]))


@block_step
def _scale(grad_f32, scale, scale_format):  # type: ignore[no-untyped-def]
    if scale_format == BFLOAT16:
        for i in range(grad_f32.size):
            grad_f32[i] = f32_of_bf16(bf16_bits(bits_of(grad_f32[i] * scale)))
    elif scale_format == FLOAT16:
        for i in range(grad_f32.size):
            grad_f32[i] = f32_of_f16(f16_bits(bits_of(grad_f32[i] * scale)))
    else:
        for i in range(grad_f32.size):
            grad_f32[i] = grad_f32[i] * scale


@block_step
def _load_gradient(grad_f32, grad_u16, grad_format, scales_f32, scale_format, negate, begin, out_f32):  # type: ignore[no-untyped-def]
    """The final gradient of a block into ``out_f32``: upcast, then each factor with its own rounding, then the sign.

    One of ``grad_f32`` and ``grad_u16`` is empty. A product is rounded to ``scale_format``, the dtype in which the
    plain loop holds ``p.grad`` when it multiplies it in place.
    """
    if grad_format == FLOAT32:
        out_f32[:] = grad_f32[begin : begin + out_f32.size]
    else:
        _upcast(grad_u16[begin : begin + out_f32.size], grad_format, out_f32)
    for k in range(scales_f32.size):
        _scale(out_f32, scales_f32[k], scale_format)
    if negate:
        for i in range(out_f32.size):
            out_f32[i] = -out_f32[i]


@inlined
def merged(high, low):  # type: ignore[no-untyped-def]
    """The fp32 master of its two halves, each in a uint32, but for a tie. See [Note: split master]."""
    return float_of(uint32(uint32(uint32(high - uint32(low > uint32(0x8000))) << uint32(16)) | low))


@block_step
def any_tie(ties_u8, begin, end):  # type: ignore[no-untyped-def]
    """Whether a block has a tie. ``begin`` is a multiple of 8."""
    ties = ties_u8[begin // 8 : (end + 7) // 8]
    bits = uint8(0)
    for k in range(ties.size):
        bits |= ties[k]
    return bits != 0


@block_step
def merge_block(hi_u16, lo_u16, ties_u8, begin, out_f32):  # type: ignore[no-untyped-def]
    """A block of the fp32 master from its split form. ``begin`` is a multiple of 8. See [Note: split master]."""
    hi = hi_u16[begin : begin + out_f32.size]
    lo = lo_u16[begin : begin + out_f32.size]
    for i in range(out_f32.size):
        out_f32[i] = merged(uint32(hi[i]), uint32(lo[i]))
    if any_tie(ties_u8, begin, begin + out_f32.size):  # rare: one in 65,536 elements of trained weights
        ties = ties_u8[begin // 8 : (begin + out_f32.size + 7) // 8]
        for i in range(out_f32.size):
            tie = uint32(uint32(uint32(ties[i >> 3]) >> uint32(i & 7)) & uint32(1))
            out_f32[i] = float_of(uint32(bits_of(out_f32[i]) - uint32(tie << uint32(16))))


@block_step
def split_block(master_f32, hi_u16, lo_u16, ties_u8, begin):  # type: ignore[no-untyped-def]
    """The split form of a block of the master. ``begin`` is a multiple of 8; the block's tie bytes are all written."""
    hi = hi_u16[begin : begin + master_f32.size]
    lo = lo_u16[begin : begin + master_f32.size]
    least = uint32(0xFFFFFFFF)
    for i in range(master_f32.size):
        bits = bits_of(master_f32[i])
        hi[i] = uint16(bf16_bits(bits))
        lo[i] = uint16(bits)
        # Zero only where the low 17 bits are those of a tie that was raised; a minimum is one instruction a vector.
        least = min(least, uint32(uint32(bits ^ uint32(0x18000)) << uint32(15)))
    ties = ties_u8[begin // 8 : (begin + master_f32.size + 7) // 8]
    for k in range(ties.size):
        ties[k] = uint8(0)
    if least == 0:
        for i in range(master_f32.size):
            bits = bits_of(master_f32[i])
            tie = (bits & uint32(0x1FFFF)) == uint32(0x18000) and (bits & uint32(0x7FFFFFFF)) <= uint32(0x7F800000)
            ties[i >> 3] |= uint8(uint32(tie) << uint32(i & 7))


@block_step
def _write_copy(master_f32, copy_u16, copy_format, begin):  # type: ignore[no-untyped-def]
    """The 16-bit compute copy of a block."""
    copy = copy_u16[begin : begin + master_f32.size]
    if copy_format == BFLOAT16:
        for i in range(copy.size):
            copy[i] = uint16(bf16_bits(bits_of(master_f32[i])))
    else:
        for i in range(copy.size):
            copy[i] = uint16(f16_bits(bits_of(master_f32[i])))


@block_step
def stride_numel(begin, end, master_f32, grad_format, scales_f32, negate, copy_u16):  # type: ignore[no-untyped-def]
    """How many elements to take at a time: ``BLOCK_NUMEL``, or all of them where no step needs scratch."""
    if master_f32.size > 0 and grad_format == FLOAT32 and scales_f32.size == 0 and not negate and copy_u16.size == 0:
        return max(end - begin, 1)
    return BLOCK_NUMEL


@block_step
def one_factor(grad_format, scales_f32, scale_format, negate):  # type: ignore[no-untyped-def]
    """Whether the final gradient is a bfloat16 one times one float32 factor, sign included; and that factor."""
    scale = float32(1)
    if scales_f32.size > 0:
        scale = scales_f32[0]
    if negate:
        scale = -scale
    is_rounded = scales_f32.size > 1 or (scales_f32.size == 1 and scale_format != FLOAT32)
    return grad_format == BFLOAT16 and not is_rounded, scale


@inlined
def open_gradient(  # type: ignore[no-untyped-def]
    grad_f32, grad_u16, grad_format, scales_f32, scale_format, negate, start, stop, grad_scratch
):
    """View of a block's final gradient: of the array itself where nothing is to be done to it, else of scratch."""
    if grad_format == FLOAT32 and scales_f32.size == 0 and not negate:
        grad = grad_f32[start:stop]
    else:
        grad = grad_scratch[: stop - start]
        _load_gradient(grad_f32, grad_u16, grad_format, scales_f32, scale_format, negate, start, grad)
    return grad


# Inlined by Numba: a call passes seven machine words an array, 0.1 µs a block, a fifth of its time.
@inlined
def open_block(  # type: ignore[no-untyped-def]
    master_f32, hi_u16, lo_u16, ties_u8, grad_f32, grad_u16, grad_format, scales_f32, scale_format, negate,
    start, stop, master_scratch, grad_scratch,
):  # fmt: skip
    """Views (master, gradient) of a block: of the arrays themselves where they are fp32 already, else of scratch.

    The master may be written, the gradient may not. Finish with `close_block`.
    """
    grad = open_gradient(grad_f32, grad_u16, grad_format, scales_f32, scale_format, negate, start, stop, grad_scratch)
    if master_f32.size == 0:
        master = master_scratch[: stop - start]
        merge_block(hi_u16, lo_u16, ties_u8, start, master)
    else:
        master = master_f32[start:stop]
    return master, grad


@inlined
def close_block(master, master_f32, hi_u16, lo_u16, ties_u8, copy_u16, copy_format, start):  # type: ignore[no-untyped-def]
    """Store what `open_block` gave and the optimizer updated: the split form and the compute copy."""
    if master_f32.size == 0:
        split_block(master, hi_u16, lo_u16, ties_u8, start)
    if copy_u16.size > 0:
        _write_copy(master, copy_u16, copy_format, start)


# --- NumPy twins: the same bits, slowly -------------------------------------------------------------------------------


def _load_gradient_numpy(
    grad_f32: np.ndarray,
    grad_u16: np.ndarray,
    grad_format: int,
    scales_f32: np.ndarray,
    scale_format: int,
    negate: bool,
    begin: int,
    end: int,
) -> np.ndarray:
    """Twin of `_load_gradient`: the final gradient of elements ``begin`` to ``end``, a new float32 array."""
    grad = grad_f32[begin:end].copy() if grad_format == FLOAT32 else f32_of_numpy(grad_u16[begin:end], grad_format)
    with np.errstate(all="ignore"):
        for scale in scales_f32:
            grad = rounded_numpy(grad * scale, scale_format)
    return -grad if negate else grad


def merge_numpy(hi_u16: np.ndarray, lo_u16: np.ndarray, ties_u8: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Twin of `merge_block`: elements ``begin`` to ``end`` of the master, a new float32 array."""
    low = lo_u16[begin:end].astype(np.uint32)
    ties = np.unpackbits(ties_u8[begin // 8 : (end + 7) // 8], bitorder="little")[: end - begin].astype(np.uint32)
    high = hi_u16[begin:end].astype(np.uint32) - (low > 0x8000) - ties
    return ((high << np.uint32(16)) | low).astype(np.uint32).view(np.float32)


def split_numpy(
    master_f32: np.ndarray, hi_u16: np.ndarray, lo_u16: np.ndarray, ties_u8: np.ndarray, begin: int, end: int
) -> None:
    """Twin of `split_block`: writes elements ``begin`` to ``end`` from an array that holds just those."""
    bits = np.ascontiguousarray(master_f32).view(np.uint32)
    hi_u16[begin:end] = bf16_bits_numpy(master_f32)
    lo_u16[begin:end] = (bits & np.uint32(0xFFFF)).astype(np.uint16)
    ties = ((bits & np.uint32(0x1FFFF)) == 0x18000) & ~np.isnan(master_f32)
    ties_u8[begin // 8 : (end + 7) // 8] = np.packbits(ties, bitorder="little")


def _write_copy_numpy(master_f32: np.ndarray, copy_u16: np.ndarray, copy_format: int, begin: int, end: int) -> None:
    """Twin of `_write_copy`: writes elements ``begin`` to ``end`` from an array that holds just those."""
    narrow = bf16_bits_numpy if copy_format == BFLOAT16 else f16_bits_numpy
    copy_u16[begin:end] = narrow(master_f32)


def sweep_numpy(
    inner: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Any], np.ndarray],
    begin: int,
    end: int,
    master_f32: np.ndarray,
    hi_u16: np.ndarray,
    lo_u16: np.ndarray,
    ties_u8: np.ndarray,
    grad_f32: np.ndarray,
    grad_u16: np.ndarray,
    grad_format: int,
    scales_f32: np.ndarray,
    scale_format: int,
    first_f32: np.ndarray,
    second_f32: np.ndarray,
    copy_u16: np.ndarray,
    copy_format: int,
    scalars: Any,
) -> None:
    """What every ``*_slice`` kernel does, in NumPy: its slow twin and its specification.

    Updates elements ``begin`` to ``end``, ``begin`` a multiple of 8.

    All arrays are 1-D, contiguous and of one length (``ties_u8``: an eighth); an empty one stands for an absent one.
    The master is ``master_f32`` or the split form in the next three. The gradient is ``grad_f32`` or the bits
    ``grad_u16`` of ``grad_format``; it is not changed. ``first_f32`` and ``second_f32`` are the optimizer's state.
    ``copy_u16``, if present, gets the new master rounded to ``copy_format``. ``scalars.negate``
    turns the gradient's sign. ``inner`` updates the state in place and returns the new master.
    """
    grad = _load_gradient_numpy(grad_f32, grad_u16, grad_format, scales_f32, scale_format, scalars.negate, begin, end)
    is_split = master_f32.size == 0
    master = merge_numpy(hi_u16, lo_u16, ties_u8, begin, end) if is_split else master_f32[begin:end]
    with np.errstate(all="ignore"):
        updated = inner(master, first_f32[begin:end], second_f32[begin:end], grad, scalars)
    if is_split:
        split_numpy(updated, hi_u16, lo_u16, ties_u8, begin, end)
    else:
        master_f32[begin:end] = updated
    if copy_u16.size > 0:
        _write_copy_numpy(updated, copy_u16, copy_format, begin, end)
