"""Floor 3. The update of adam.py on a GPU, in Triton: the same bits as the Numba kernel, for any placement.

Owns the device form of the arithmetic; scalars come from adam.py, memory and stream are the caller's. Imports torch
and Triton only when it is called.

[Note: same bits on two machines] IEEE operations leave nothing to choose, once it is said which operations. Triton
alone would not say: its sqrt and division are approximate and flush subnormals, a product and a sum contract at will,
and unary minus is ``0 - x``, which loses the sign of zero. So: ``sqrt_rn``, ``div_rn``, ``fma`` where the CPU has one,
``enable_fp_fusion=False`` for everything else, and multiplication by -1. Scalars are rounded once, on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_tieroffload.errors import TierOffloadError, UnsupportedError
from lightning_tieroffload.kernels.adam import AdamScalars
from lightning_tieroffload.kernels.split import num_tie_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK_NUMEL", "COMPILE_OPTIONS", "adam_kernel", "triton_adam_step"]

BLOCK_NUMEL = 1024
"""Elements a program instance: eight a thread, loads of 16 bytes."""

COMPILE_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@functools.cache
def adam_kernel() -> Any:
    """The ``triton.jit`` function. Raises UnsupportedError where Triton is not installed."""
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise UnsupportedError(
            'updates on the device need Triton, which is not installed. Install it, or set update_on="cpu".'
        ) from error

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def adam_update(  # type: ignore[no-untyped-def]
        master_ptr,
        grad_ptr,
        exp_avg_ptr,
        exp_avg_sq_ptr,
        copy_ptr,
        low_ptr,
        ties_ptr,
        scales_ptr,
        numel,
        decay,
        l2,
        lerp_weight,
        beta2,
        one_minus_beta2,
        negative_step,
        root_correction2,
        eps,
        HAS_L2: tl.constexpr,
        LERP_FROM_GRAD: tl.constexpr,
        NEGATE: tl.constexpr,
        IS_NEW_STATE: tl.constexpr,
        HAS_COPY: tl.constexpr,
        IS_SPLIT: tl.constexpr,
        NUM_SCALES: tl.constexpr,
        SCALE_DTYPE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        # 64 bits: a unit's flat array may have more than 2**31 elements.
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < numel
        g = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        for k in tl.static_range(NUM_SCALES):
            g = (g * tl.load(scales_ptr + k)).to(SCALE_DTYPE).to(tl.float32)
        if NEGATE:
            g = g * -1.0
        if IS_SPLIT:  # see [Note: split master] in split.py; a block begins at a whole tie byte
            high = tl.load(master_ptr + offsets, mask=mask, other=0).to(tl.int32)
            low = tl.load(low_ptr + offsets, mask=mask, other=0).to(tl.int32) & 0xFFFF
            ties = tl.load(ties_ptr + (offsets >> 3), mask=mask, other=0).to(tl.int32)
            raised = (low > 0x8000).to(tl.int32) + ((ties >> (offsets & 7).to(tl.int32)) & 1)
            p = (((high - raised) << 16) | low).to(tl.float32, bitcast=True) * decay
        else:
            p = tl.load(master_ptr + offsets, mask=mask, other=0.0) * decay
        if IS_NEW_STATE:
            m = tl.zeros([BLOCK], tl.float32)
            v = tl.zeros([BLOCK], tl.float32)
        else:
            m = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
            v = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
        if HAS_L2:
            g = tl.fma(p, tl.full([BLOCK], l2, tl.float32), g)  # fma takes blocks of one shape
        m = tl.fma(tl.full([BLOCK], lerp_weight, tl.float32), g - m, g if LERP_FROM_GRAD else m)
        v = tl.fma(one_minus_beta2 * g, g, v * beta2)
        root = tl.div_rn(tl.sqrt_rn(v), tl.full([BLOCK], root_correction2, tl.float32))
        p = p + tl.div_rn(negative_step * m, root + eps)
        if IS_SPLIT:
            bits = p.to(tl.int32, bitcast=True)
            magnitude = bits & 0x7FFFFFFF
            # A shift of a negative int32 repeats the sign, which the 16 bits that are kept do not show.
            rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
            high = tl.where(magnitude > 0x7F800000, (bits >> 16) | 0x40, rounded)
            is_tie = ((bits & 0x1FFFF) == 0x18000) & (magnitude <= 0x7F800000) & mask
            tl.store(master_ptr + offsets, high.to(tl.int16), mask=mask)
            tl.store(low_ptr + offsets, bits.to(tl.int16), mask=mask)
            packed = tl.sum(tl.reshape(is_tie.to(tl.int32) << (offsets & 7).to(tl.int32), [BLOCK // 8, 8]), axis=1)
            byte_offsets = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
            tl.store(ties_ptr + byte_offsets, packed.to(tl.uint8), mask=byte_offsets * 8 < numel)
        else:
            tl.store(master_ptr + offsets, p, mask=mask)
        tl.store(exp_avg_ptr + offsets, m, mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, v, mask=mask)
        if HAS_COPY:
            tl.store(copy_ptr + offsets, p.to(copy_ptr.dtype.element_ty), mask=mask)

    return adam_update


def triton_adam_step(
    master: torch.Tensor | None,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamScalars,
    *,
    copy: torch.Tensor | None = None,
    split: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    grad_scales: torch.Tensor | Sequence[float] = (),
    round_scales_to: torch.dtype | None = None,
) -> None:
    """Update ``master``, ``exp_avg`` and ``exp_avg_sq`` (float32) in place, on the current stream of their device.

    All are 1-D, contiguous, equally long CUDA tensors; ``grad`` is float32, bfloat16 or float16 and is not changed.
    ``split`` stands for the master (which is None then): its bfloat16 copy's bits and low halves as int16, and the tie
    bits, ``num_tie_bytes(numel)`` of uint8 (see split.py). ``copy`` (bfloat16 or float16), if given, gets the new
    master rounded. ``grad_scales`` multiply the gradient in their order, each product rounded to ``round_scales_to``
    (float32 unless said); a float32 tensor on the device avoids a copy. Gives the bits of `adam_slice` with the same
    scalars. Asynchronous: the caller keeps the tensors alive, and orders streams. Raises TierOffloadError for tensors
    that do not fit together.
    """
    import torch

    numel = grad.numel()
    if (master is None) == (split is None) or (split is not None and copy is not None):
        raise TierOffloadError("pass the master, or its split form, which has the copy in it: one of the two.")
    for name, tensor, dtypes, wanted in (
        *([("master", master, (torch.float32,), numel)] if master is not None else []),
        ("grad", grad, (torch.float32, torch.bfloat16, torch.float16), numel),
        ("exp_avg", exp_avg, (torch.float32,), numel),
        ("exp_avg_sq", exp_avg_sq, (torch.float32,), numel),
        *([("copy", copy, (torch.bfloat16, torch.float16), numel)] if copy is not None else []),
        *(
            []
            if split is None
            else [
                ("the master's high half", split[0], (torch.int16,), numel),
                ("the master's low half", split[1], (torch.int16,), numel),
                ("the master's tie bits", split[2], (torch.uint8,), num_tie_bytes(numel)),
            ]
        ),
    ):
        if tensor.shape != (wanted,) or tensor.dtype not in dtypes or not tensor.is_contiguous() or not tensor.is_cuda:
            raise TierOffloadError(
                f"{name} must be a contiguous 1-D CUDA tensor of {wanted} elements and dtype "
                f"{' or '.join(map(str, dtypes))}; it is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}."
            )
    if numel == 0:
        return
    import triton.language as tl

    if not isinstance(grad_scales, torch.Tensor):
        grad_scales = torch.tensor(list(grad_scales), dtype=torch.float32, device=grad.device)
    scale_dtype = {None: tl.float32, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        round_scales_to
    ]
    stored, low, ties = (master, exp_avg, exp_avg) if split is None else split  # absent arrays: any, never touched
    with torch.cuda.device(grad.device):
        adam_kernel()[(-(-numel // BLOCK_NUMEL),)](
            stored,
            grad,
            exp_avg,
            exp_avg_sq,
            stored if copy is None else copy,
            low,
            ties,
            exp_avg if grad_scales.numel() == 0 else grad_scales,
            numel,
            float(scalars.decay),
            float(scalars.l2),
            float(scalars.lerp_weight),
            float(scalars.beta2),
            float(scalars.one_minus_beta2),
            float(scalars.negative_step),
            float(scalars.root_correction2),
            float(scalars.eps),
            HAS_L2=scalars.has_l2,
            LERP_FROM_GRAD=scalars.lerp_from_grad,
            NEGATE=scalars.negate,
            IS_NEW_STATE=scalars.is_new_state,
            HAS_COPY=copy is not None,
            IS_SPLIT=split is not None,
            NUM_SCALES=grad_scales.numel(),
            SCALE_DTYPE=scale_dtype,
            BLOCK=BLOCK_NUMEL,
            **COMPILE_OPTIONS,
        )
