"""kernels/triton_adam.py without a GPU: what it compiles to, and its edge. Bits: tests/gpu/test_triton_adam.py."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from lightning_tieroffload.errors import TierOffloadError, UnsupportedError
from lightning_tieroffload.kernels import triton_adam
from lightning_tieroffload.kernels.adam import adam_scalars
from tests import triton_ptx

SCALARS = adam_scalars(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=1, decoupled=True)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("form", triton_ptx.FORMS)
def test_ptx_holds_only_exact_operations(form: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """No approximate, flushing or contractible instruction, and a multiply-add just where the CPU has one."""
    pytest.importorskip("triton", reason="Triton is not installed; it compiles PTX without a GPU")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    options = triton_ptx.FORMS[form]
    ptx = triton_ptx.ptx_of(capability, **options)
    assert triton_ptx.inexact_instructions(ptx) == []
    a_thread = triton_adam.BLOCK_NUMEL // (32 * triton_adam.COMPILE_OPTIONS["num_warps"])
    assert triton_ptx.num_instructions(ptx, "fma.rn.f32") == a_thread * (3 if options["HAS_L2"] else 2)
    assert triton_ptx.num_instructions(ptx, "sqrt.rn.f32") == a_thread
    assert triton_ptx.num_instructions(ptx, "div.rn.f32") == 2 * a_thread


def test_the_ptx_check_can_fail() -> None:
    bad = """
        mul.f32 %f1, %f2, %f3;
        @%p1 sqrt.approx.ftz.f32 %f1, %f2;
        div.full.f32 %f1, %f2, %f3;
        fma.rn.ftz.f32 %f1, %f2, %f3, %f4;
        add.rn.f32 %f1, %f2, %f3;
    """
    assert triton_ptx.inexact_instructions(bad) == ["div.full.f32", "fma.rn.ftz.f32", "mul.f32", "sqrt.approx.ftz.f32"]


def test_without_triton_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_adam.adam_kernel.cache_clear()
    with pytest.raises(UnsupportedError, match='Install it, or set update_on="cpu"'):
        triton_adam.adam_kernel()
    triton_adam.adam_kernel.cache_clear()


def test_tensors_that_do_not_fit_are_refused() -> None:
    a = torch.zeros(16)
    with pytest.raises(TierOffloadError, match="master must be a contiguous 1-D CUDA tensor of 16 elements"):
        triton_adam.triton_adam_step(a, a, a, a, SCALARS)


def test_scalars_survive_the_way_through_python_floats() -> None:
    """The launcher takes Python floats and rounds them to fp32: nothing is lost in between."""
    for value in SCALARS:
        assert np.float32(float(value)) == value
