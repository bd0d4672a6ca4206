"""Floor 2. SGD with momentum, one pass over each element. Reference: torch's fused CPU kernel, bit for bit.

Owns the arithmetic and the host scalars, no memory and no thread.

[Note: whose bits, SGD] torch's fused CPU SGD on AVX2 and AVX512 machines computes, per element (found by experiment):

    g = fma(p, f32(wd), g)
    b = g at the first step, then fma(g, f32(1 - dampening), b * f32(momentum))
    g = fma(b, f32(momentum), g) with nesterov, else b
    p = fma(g, f32(-lr), p)

Its scalar code for the last ``numel % 16`` elements of each tensor contracts b differently; see adam.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_tieroffload.kernels.primitives import LazyKernel, block_step, fma, fma_numpy
from lightning_tieroffload.kernels.sweep import BLOCK_NUMEL, close_block, open_block, stride_numel, sweep_numpy

__all__ = ["SgdScalars", "sgd_scalars", "sgd_slice", "sgd_slice_numpy"]


class SgdScalars(NamedTuple):
    """Host scalars of one step, float32 where they meet elements. Build with `sgd_scalars`."""

    negative_lr: np.float32
    momentum: np.float32
    one_minus_dampening: np.float32
    weight_decay: np.float32
    has_momentum: bool
    has_weight_decay: bool
    nesterov: bool
    negate: bool  # maximize
    is_new_state: bool  # first step: the momentum buffer becomes the gradient, undampened


def sgd_scalars(
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    is_new_state: bool = False,
) -> SgdScalars:
    """The scalars of a step, in float64 and then rounded once, as torch's fused kernel does."""
    return SgdScalars(
        negative_lr=np.float32(-lr),
        momentum=np.float32(momentum),
        one_minus_dampening=np.float32(1 - dampening),
        weight_decay=np.float32(weight_decay),
        has_momentum=momentum != 0,
        has_weight_decay=weight_decay != 0,
        nesterov=bool(nesterov),
        negate=bool(maximize),
        is_new_state=bool(is_new_state),
    )


@block_step
def _inner(master, momentum_buffer, grad, s):  # type: ignore[no-untyped-def]
    # The conditions do not change within a block: LLVM moves them out of the loops.
    if not s.has_momentum:
        for i in range(master.size):
            p = master[i]
            g = fma(p, s.weight_decay, grad[i]) if s.has_weight_decay else grad[i]
            master[i] = fma(g, s.negative_lr, p)
    else:
        for i in range(master.size):
            p = master[i]
            g = fma(p, s.weight_decay, grad[i]) if s.has_weight_decay else grad[i]
            b = g if s.is_new_state else fma(g, s.one_minus_dampening, momentum_buffer[i] * s.momentum)
            momentum_buffer[i] = b
            g = fma(b, s.momentum, g) if s.nesterov else b
            master[i] = fma(g, s.negative_lr, p)


def _inner_numpy(p: np.ndarray, b: np.ndarray, unused: np.ndarray, g: np.ndarray, s: SgdScalars) -> np.ndarray:
    if s.has_weight_decay:
        g = fma_numpy(p, s.weight_decay, g)
    if s.has_momentum:
        b[:] = g if s.is_new_state else fma_numpy(g, s.one_minus_dampening, b * s.momentum)
        g = fma_numpy(b, s.momentum, g) if s.nesterov else b
    return fma_numpy(g, s.negative_lr, p)


def _build(digest: int) -> Callable[..., None]:
    def sgd_slice(  # type: ignore[no-untyped-def]
        begin, end, master_f32, hi_u16, lo_u16, ties_u8, grad_f32, grad_u16, grad_format, scales_f32, scale_format,
        momentum_f32, unused_f32, copy_u16, copy_format, scalars,
    ):  # fmt: skip
        if digest < 0:  # never: it only ties stored machine code to these sources, see LazyKernel
            return
        master_scratch = np.empty(BLOCK_NUMEL, np.float32)
        grad_scratch = np.empty(BLOCK_NUMEL, np.float32)
        stride = stride_numel(begin, end, master_f32, grad_format, scales_f32, scalars.negate, copy_u16)
        for start in range(begin, end, stride):
            stop = min(start + stride, end)
            master, grad = open_block(
                master_f32, hi_u16, lo_u16, ties_u8, grad_f32, grad_u16, grad_format, scales_f32, scale_format,
                scalars.negate, start, stop, master_scratch, grad_scratch,
            )  # fmt: skip
            _inner(master, momentum_f32[start:stop], grad, scalars)
            close_block(master, master_f32, hi_u16, lo_u16, ties_u8, copy_u16, copy_format, start)

    return sgd_slice


sgd_slice = LazyKernel(_build)
"""Update elements ``begin`` to ``end`` in place; unchecked. Arguments as in `sweep_numpy`, ``SgdScalars`` last.

``momentum_f32`` is empty without momentum, ``unused_f32`` always.
"""


def sgd_slice_numpy(begin: int, end: int, *args: Any) -> None:
    """Slow twin of `sgd_slice`."""
    sweep_numpy(_inner_numpy, begin, end, *args)
