"""Floor 2. Lion, one pass over each element. Reference: the paper's rule in for-loop torch operations, bit for bit.

Owns the arithmetic and the host scalars, no memory and no thread.

[Note: whose bits, Lion] Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), program 1, as
``mul_``/``add_(alpha=)`` of torch's CPU operators round it, with decoupled weight decay first:

    p = p * f32(1 - lr * wd)
    p = p - f32(lr) * sign(fma(g, f32(1 - b1), m * f32(b1)))       sign(0) = sign(NaN) = 0
    m = fma(g, f32(1 - b2), m * f32(b2))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lightning_tieroffload.kernels.primitives import LazyKernel, block_step, fma, fma_numpy
from lightning_tieroffload.kernels.sweep import BLOCK_NUMEL, close_block, open_block, stride_numel, sweep_numpy

__all__ = ["LionScalars", "lion_scalars", "lion_slice", "lion_slice_numpy"]


class LionScalars(NamedTuple):
    """Host scalars of one step, float32 where they meet elements. Build with `lion_scalars`."""

    decay: np.float32  # 1 - lr * weight_decay
    lr: np.float32
    beta1: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    negate: bool  # maximize
    is_new_state: bool  # the moment is zero, whatever the array holds


def lion_scalars(
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    maximize: bool = False,
    is_new_state: bool = False,
) -> LionScalars:
    """The scalars of a step, in float64 and then rounded once."""
    beta1, beta2 = betas
    return LionScalars(
        decay=np.float32(1 - lr * weight_decay),
        lr=np.float32(lr),
        beta1=np.float32(beta1),
        one_minus_beta1=np.float32(1 - beta1),
        beta2=np.float32(beta2),
        one_minus_beta2=np.float32(1 - beta2),
        negate=bool(maximize),
        is_new_state=bool(is_new_state),
    )


@block_step
def _inner(master, exp_avg, grad, s):  # type: ignore[no-untyped-def]
    if s.is_new_state:
        exp_avg[:] = np.float32(0)
    for i in range(master.size):
        g = grad[i]
        m = exp_avg[i]
        direction = fma(g, s.one_minus_beta1, m * s.beta1)
        up = s.lr if direction > np.float32(0) else np.float32(0)
        down = s.lr if direction < np.float32(0) else np.float32(0)
        master[i] = master[i] * s.decay - (up - down)
        exp_avg[i] = fma(g, s.one_minus_beta2, m * s.beta2)


def _inner_numpy(p: np.ndarray, m: np.ndarray, unused: np.ndarray, g: np.ndarray, s: LionScalars) -> Any:
    if s.is_new_state:
        m[:] = 0
    direction = fma_numpy(g, s.one_minus_beta1, m * s.beta1)
    m[:] = fma_numpy(g, s.one_minus_beta2, m * s.beta2)
    step = np.where(direction > 0, s.lr, np.float32(0)) - np.where(direction < 0, s.lr, np.float32(0))
    return p * s.decay - step


def _build(digest: int) -> Callable[..., None]:
    def lion_slice(  # type: ignore[no-untyped-def]
        begin, end, master_f32, hi_u16, lo_u16, ties_u8, grad_f32, grad_u16, grad_format, scales_f32, scale_format,
        exp_avg_f32, unused_f32, copy_u16, copy_format, scalars,
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
            _inner(master, exp_avg_f32[start:stop], grad, scalars)
            close_block(master, master_f32, hi_u16, lo_u16, ties_u8, copy_u16, copy_format, start)

    return lion_slice


lion_slice = LazyKernel(_build)
"""Update elements ``begin`` to ``end`` in place; unchecked. Arguments as in `sweep_numpy`, ``LionScalars`` last.

``unused_f32`` is empty.
"""


def lion_slice_numpy(begin: int, end: int, *args: Any) -> None:
    """Slow twin of `lion_slice`."""
    sweep_numpy(_inner_numpy, begin, end, *args)
