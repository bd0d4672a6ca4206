"""Compiling the Triton update for a given GPU without having one, and reading what came out."""

from __future__ import annotations

import re
from typing import Any

from lightning_tieroffload.kernels import triton_adam

FORMS: dict[str, dict[str, Any]] = {
    "f32": {"grad": "*fp32", "copy": None, "num_scales": 0, "HAS_L2": False, "LERP_FROM_GRAD": False},
    "f32, Adam, clip": {"grad": "*fp32", "copy": "*bf16", "num_scales": 1, "HAS_L2": True, "LERP_FROM_GRAD": False},
    "bf16, two scales": {"grad": "*bf16", "copy": "*bf16", "num_scales": 2, "HAS_L2": False, "LERP_FROM_GRAD": True},
}
SCALARS = "decay l2 lerp_weight beta2 one_minus_beta2 negative_step root_correction2 eps".split()


def ptx_of(capability: int, *, grad: str, copy: str | None, num_scales: int, HAS_L2: bool, LERP_FROM_GRAD: bool) -> str:
    """PTX for compute capability ``capability`` (90 for an H200)."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        "HAS_L2": HAS_L2, "LERP_FROM_GRAD": LERP_FROM_GRAD, "NEGATE": HAS_L2, "IS_NEW_STATE": False,
        "HAS_COPY": copy is not None, "NUM_SCALES": num_scales,
        "SCALE_DTYPE": tl.bfloat16 if grad == "*bf16" else tl.float32, "BLOCK": triton_adam.BLOCK_NUMEL,
    }  # fmt: skip
    signature = {
        "master_ptr": "*fp32", "grad_ptr": grad, "exp_avg_ptr": "*fp32", "exp_avg_sq_ptr": "*fp32",
        "copy_ptr": copy or "*fp32", "scales_ptr": "*fp32", "numel": "i32",
        **dict.fromkeys(SCALARS, "fp32"), **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    source = ASTSource(triton_adam.adam_kernel(), signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(triton_adam.COMPILE_OPTIONS)
    )
    return str(compiled.asm["ptx"])


def inexact_instructions(ptx: str) -> list[str]:
    """Float instructions whose result the PTX manual leaves open, or that flush subnormals.

    ``add``, ``sub`` and ``mul`` without ``.rn`` may be contracted into a multiply-add by the assembler.
    """
    operations = "add|sub|mul|div|fma|mad|sqrt|rcp|rsqrt|ex2"
    names = re.findall(rf"^\s*(?:@!?%\w+\s+)?((?:{operations})\.[\w.]*f32\w*)", ptx, re.MULTILINE)
    return sorted({name for name in names if ".rn" not in name or re.search("approx|ftz|full", name)})


def num_instructions(ptx: str, name: str) -> int:
    """Elements that instruction ``name`` treats: the packed form on two counts double."""
    pairs = len(re.findall(rf"\b{re.escape(name)}x2\b", ptx))
    return 2 * pairs + len(re.findall(rf"\b{re.escape(name)}\b", ptx))
