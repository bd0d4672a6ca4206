"""Floor 2. AdamW and Adam, one pass over each element. Reference: torch's fused CPU kernel, bit for bit.

Owns the arithmetic and the host scalars, no memory and no thread.

[Note: whose bits] torch's fused CPU Adam(W) on AVX2 and AVX512 machines computes, per element (found by experiment):

    p *= f32(1 - lr * wd)                           AdamW;   g = fma(p, f32(wd), g)   Adam
    m = fma(f32(1 - b1), g - m, m)                  a lerp;  from the other end where 1 - b1 >= 1/2, see below
    v = fma(f32(1 - b2) * g, g, v * f32(b2))
    p += (f32(-lr / c1) * m) / (sqrt(v) / f32(sqrt(c2)) + f32(eps))       c1 = 1 - b1**step, c2 = 1 - b2**step

with scalars computed in float64 and rounded once. The last ``numel % 16`` elements of each torch tensor go through
scalar code there that contracts v differently; here every element is treated alike, because a slice of a flat
buffer must not show where it was cut.

[Note: how far from foreach] The for-loop and foreach forms differ from this in one operation: torch's vector sqrt may
be 1 ulp from the correctly rounded one (a sixth of all values on a machine with MKL). m and v are equal. That ulp is at
most 2 of the quotient by sqrt(c2), 2 of the denominator, and, as mantissas lie in [1, 2), 4 of the step; so p is within
1 ulp of max(|p before|, |p after|, 4 |step|): 1 ulp of p where p is at least 4 steps, at most 4 of the step elsewhere.
Both bounds are reached. torch's own fused kernel is just as far, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import uint32

from lightning_tieroffload.kernels.primitives import LazyKernel, block_step, f32_of_bf16, fma, fma_numpy
from lightning_tieroffload.kernels.sweep import (
    BLOCK_NUMEL,
    any_tie,
    close_block,
    merged,
    one_factor,
    open_block,
    open_gradient,
    stride_numel,
    sweep_numpy,
)

__all__ = [
    "MOMENTS_LATER",
    "MOMENTS_NOW",
    "MOMENTS_ONLY",
    "AdamScalars",
    "adam_scalars",
    "adam_slice",
    "adam_slice_numpy",
]

# Whether a pass stores the moments that it computes. ``LATER`` leaves them as they were, for a second pass with
# ``ONLY`` that computes them again from the same gradient: weights are ready after 18 bytes a parameter, not 26.
MOMENTS_NOW, MOMENTS_LATER, MOMENTS_ONLY = 0, 1, 2


class AdamScalars(NamedTuple):
    """Host scalars of one step, float32 where they meet elements. Build with `adam_scalars`."""

    decay: np.float32  # 1 - lr * weight_decay (decoupled), else 1
    l2: np.float32  # weight_decay of Adam
    has_l2: bool
    lerp_weight: np.float32  # 1 - beta1, or -beta1 where the lerp runs from the gradient's end
    lerp_from_grad: bool
    beta2: np.float32
    one_minus_beta2: np.float32
    negative_step: np.float32  # -lr / (1 - beta1**step)
    root_correction2: np.float32  # sqrt(1 - beta2**step)
    eps: np.float32
    negate: bool  # maximize
    is_new_state: bool  # the moments are zero, whatever the arrays hold
    moments: int  # MOMENTS_NOW, MOMENTS_LATER or MOMENTS_ONLY


def adam_scalars(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    maximize: bool = False,
    is_new_state: bool = False,
    moments: int = MOMENTS_NOW,
) -> AdamScalars:
    """The scalars of a step (1 is the first), in float64 and then rounded once, as torch's fused kernel does.

    With Adam's weight decay the moments depend on the weight, and new ones start from nothing that is stored: both need
    ``MOMENTS_NOW``.
    """
    beta1, beta2 = betas
    correction1 = 1 - beta1 ** float(step)
    correction2 = 1 - beta2 ** float(step)
    lerp_weight = np.float32(1 - beta1)
    lerp_from_grad = bool(abs(lerp_weight) >= np.float32(0.5))
    return AdamScalars(
        decay=np.float32(1 - lr * weight_decay if decoupled and weight_decay != 0 else 1.0),
        l2=np.float32(weight_decay),
        has_l2=not decoupled and weight_decay != 0,
        lerp_weight=np.float32(lerp_weight - np.float32(1)) if lerp_from_grad else lerp_weight,
        lerp_from_grad=lerp_from_grad,
        beta2=np.float32(beta2),
        one_minus_beta2=np.float32(1 - beta2),
        negative_step=np.float32(-(lr / correction1)),
        root_correction2=np.float32(math.sqrt(correction2)),
        eps=np.float32(eps),
        negate=bool(maximize),
        is_new_state=bool(is_new_state),
        moments=moments,
    )


@block_step
def _weights(master, exp_avg, exp_avg_sq, grad, s):  # type: ignore[no-untyped-def]
    for i in range(master.size):
        p = master[i] * s.decay
        g = grad[i]
        m = exp_avg[i]
        m = fma(s.lerp_weight, g - m, g if s.lerp_from_grad else m)
        v = fma(s.one_minus_beta2 * g, g, exp_avg_sq[i] * s.beta2)
        master[i] = p + (s.negative_step * m) / (math.sqrt(v) / s.root_correction2 + s.eps)


@block_step
def _moments(exp_avg, exp_avg_sq, grad, s):  # type: ignore[no-untyped-def]
    for i in range(grad.size):
        g = grad[i]
        m = exp_avg[i]
        exp_avg[i] = fma(s.lerp_weight, g - m, g if s.lerp_from_grad else m)
        exp_avg_sq[i] = fma(s.one_minus_beta2 * g, g, exp_avg_sq[i] * s.beta2)


@block_step
def _inner(master, exp_avg, exp_avg_sq, grad, s):  # type: ignore[no-untyped-def]
    if s.is_new_state:
        exp_avg[:] = np.float32(0)
        exp_avg_sq[:] = np.float32(0)
    for i in range(master.size):
        p = master[i] * s.decay
        g = fma(p, s.l2, grad[i]) if s.has_l2 else grad[i]
        m = exp_avg[i]
        m = fma(s.lerp_weight, g - m, g if s.lerp_from_grad else m)
        v = fma(s.one_minus_beta2 * g, g, exp_avg_sq[i] * s.beta2)
        master[i] = p + (s.negative_step * m) / (math.sqrt(v) / s.root_correction2 + s.eps)
        exp_avg[i] = m
        exp_avg_sq[i] = v


# A split master and a narrow gradient are what nearly every step of a long run has. Loops of their own read them where
# they are, without a pass through scratch in between: a third faster with 16 threads, where arithmetic limits.
@block_step
def _weights_narrow(hi, lo, grad, exp_avg, exp_avg_sq, scale, master, s):  # type: ignore[no-untyped-def]
    for i in range(master.size):
        p = merged(uint32(hi[i]), uint32(lo[i])) * s.decay
        g = f32_of_bf16(uint32(grad[i])) * scale
        m = exp_avg[i]
        m = fma(s.lerp_weight, g - m, g if s.lerp_from_grad else m)
        v = fma(s.one_minus_beta2 * g, g, exp_avg_sq[i] * s.beta2)
        master[i] = p + (s.negative_step * m) / (math.sqrt(v) / s.root_correction2 + s.eps)


@block_step
def _moments_narrow(grad, exp_avg, exp_avg_sq, scale, s):  # type: ignore[no-untyped-def]
    for i in range(grad.size):
        g = f32_of_bf16(uint32(grad[i])) * scale
        m = exp_avg[i]
        exp_avg[i] = fma(s.lerp_weight, g - m, g if s.lerp_from_grad else m)
        exp_avg_sq[i] = fma(s.one_minus_beta2 * g, g, exp_avg_sq[i] * s.beta2)


@block_step
def _weights_of_moments(hi, lo, exp_avg, exp_avg_sq, master, s):  # type: ignore[no-untyped-def]
    """From moments that are new already: written and read in one loop, the arrays would be too many to vectorise."""
    for i in range(master.size):
        p = merged(uint32(hi[i]), uint32(lo[i])) * s.decay
        step = (s.negative_step * exp_avg[i]) / (math.sqrt(exp_avg_sq[i]) / s.root_correction2 + s.eps)
        master[i] = p + step


def _inner_numpy(p: np.ndarray, m: np.ndarray, v: np.ndarray, grad: np.ndarray, s: AdamScalars) -> Any:
    if s.is_new_state:
        m[:] = 0
        v[:] = 0
    p = p * s.decay
    g = fma_numpy(p, s.l2, grad) if s.has_l2 else grad
    m[:] = fma_numpy(s.lerp_weight, g - m, g if s.lerp_from_grad else m)
    v[:] = fma_numpy(s.one_minus_beta2 * g, g, v * s.beta2)
    return p + (s.negative_step * m) / (np.sqrt(v) / s.root_correction2 + s.eps)


def _build(digest: int) -> Callable[..., None]:
    def adam_slice(  # type: ignore[no-untyped-def]
        begin, end, master_f32, hi_u16, lo_u16, ties_u8, grad_f32, grad_u16, grad_format, scales_f32, scale_format,
        exp_avg_f32, exp_avg_sq_f32, copy_u16, copy_format, scalars,
    ):  # fmt: skip
        if digest < 0:  # never: it only ties stored machine code to these sources, see LazyKernel
            return
        master_scratch = np.empty(BLOCK_NUMEL, np.float32)
        grad_scratch = np.empty(BLOCK_NUMEL, np.float32)
        stride = stride_numel(begin, end, master_f32, grad_format, scales_f32, scalars.negate, copy_u16)
        is_narrow, scale = one_factor(grad_format, scales_f32, scale_format, scalars.negate)
        is_split = master_f32.size == 0 and not scalars.has_l2 and not scalars.is_new_state
        for start in range(begin, end, stride):
            stop = min(start + stride, end)
            if is_narrow and scalars.moments == MOMENTS_ONLY:
                _moments_narrow(
                    grad_u16[start:stop], exp_avg_f32[start:stop], exp_avg_sq_f32[start:stop], scale, scalars
                )
                continue
            if is_narrow and is_split and not any_tie(ties_u8, start, stop):
                master = master_scratch[: stop - start]
                hi, lo, grad_bits = hi_u16[start:stop], lo_u16[start:stop], grad_u16[start:stop]
                first, second = exp_avg_f32[start:stop], exp_avg_sq_f32[start:stop]
                if scalars.moments == MOMENTS_LATER:
                    _weights_narrow(hi, lo, grad_bits, first, second, scale, master, scalars)
                else:
                    _moments_narrow(grad_bits, first, second, scale, scalars)
                    _weights_of_moments(hi, lo, first, second, master, scalars)
                close_block(master, master_f32, hi_u16, lo_u16, ties_u8, copy_u16, copy_format, start)
                continue
            if scalars.moments == MOMENTS_ONLY:
                grad = open_gradient(
                    grad_f32, grad_u16, grad_format, scales_f32, scale_format, scalars.negate, start, stop, grad_scratch
                )
                _moments(exp_avg_f32[start:stop], exp_avg_sq_f32[start:stop], grad, scalars)
                continue
            master, grad = open_block(
                master_f32, hi_u16, lo_u16, ties_u8, grad_f32, grad_u16, grad_format, scales_f32, scale_format,
                scalars.negate, start, stop, master_scratch, grad_scratch,
            )  # fmt: skip
            if scalars.moments == MOMENTS_LATER:
                _weights(master, exp_avg_f32[start:stop], exp_avg_sq_f32[start:stop], grad, scalars)
            else:
                _inner(master, exp_avg_f32[start:stop], exp_avg_sq_f32[start:stop], grad, scalars)
            close_block(master, master_f32, hi_u16, lo_u16, ties_u8, copy_u16, copy_format, start)

    return adam_slice


adam_slice = LazyKernel(_build)
"""Update elements ``begin`` to ``end`` in place; unchecked. Arguments as in `sweep_numpy`, ``AdamScalars`` last."""


def adam_slice_numpy(begin: int, end: int, *args: Any) -> None:
    """Slow twin of `adam_slice`: the one pass, of which what is not to be stored is lost."""
    moments = args[-1].moments
    if moments != MOMENTS_NOW:
        lost = (0, 1, 2, 3, 11) if moments == MOMENTS_ONLY else (9, 10)  # master, its split form, copy; or moments
        args = tuple(arg.copy() if index in lost else arg for index, arg in enumerate(args))
    sweep_numpy(_inner_numpy, begin, end, *args)
