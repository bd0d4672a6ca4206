"""kernels/triton_adam.py on a GPU: the bits of the Numba kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_tieroffload.kernels import triton_adam
from lightning_tieroffload.kernels.adam import adam_scalars, adam_slice
from lightning_tieroffload.kernels.split import SplitMaster
from tests import triton_ptx
from tests.kernel_cases import KernelCase, assert_same_bits

pytestmark = pytest.mark.gpu

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def on_device(array: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(dtype).cuda()


@pytest.mark.parametrize("numel", [1, 1000, 1024 * 33, 1024 * 1024 + 7])
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"grad_format": "bf16", "copy_format": "bf16"},
        {"grad_format": "bf16", "scales": (0.37, 0.9), "scale_format": "bf16", "copy_format": "bf16"},
        {"grad_format": "f16", "scales": (1 / 768,), "scale_format": "f16", "copy_format": "f16"},
        {"scales": (0.37,), "copy_format": "bf16"},
    ],
)
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"decoupled": False},
        {"decoupled": False, "weight_decay": 0.0, "maximize": True},
        {"betas": (0.3, 0.99)},
        {"betas": (0.0, 0.99), "is_new_state": True, "step": 1},
    ],
)
def test_the_gpu_has_the_cpus_bits(rule: dict[str, Any], form: dict[str, Any], hostile: bool, numel: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    settings = {"lr": 1.3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 3, "decoupled": True}
    scalars = adam_scalars(**(settings | rule))
    case = KernelCase(numel, hostile=hostile and numel >= 20, **form)
    a = case.arrays
    grad_format, copy_format = form.get("grad_format", "f32"), form.get("copy_format")
    master, exp_avg, exp_avg_sq = on_device(a["master"]), on_device(a["first"]), on_device(a["second"])
    grad = on_device(a["grad_f32"]) if grad_format == "f32" else on_device(a["grad_u16"], DTYPES[grad_format])
    copy = None if copy_format is None else torch.zeros(numel, dtype=DTYPES[copy_format], device="cuda")
    triton_adam.triton_adam_step(
        master, grad, exp_avg, exp_avg_sq, scalars,
        copy=copy, grad_scales=form.get("scales", ()), round_scales_to=DTYPES[form.get("scale_format", "f32")],
    )  # fmt: skip
    args = case.args(scalars)
    adam_slice.prepare(*args)
    adam_slice(0, numel, *args)
    want = {"master": a["master"], "first": a["first"], "second": a["second"]}
    have = {"master": master, "first": exp_avg, "second": exp_avg_sq}
    assert_same_bits(want, {name: tensor.cpu().numpy() for name, tensor in have.items()})
    if copy is not None:
        bits = copy.view(torch.int16).cpu().numpy().view(np.uint16)
        is_nan = np.isnan(a["master"])
        assert np.array_equal(a["copy"][~is_nan], bits[~is_nan])
        assert copy.isnan().cpu().numpy()[is_nan].all()


@pytest.mark.parametrize("numel", [1, 8, 1000, 1024 * 33, 1024 * 1024 + 7])
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("grad_format", ["f32", "bf16"])
def test_split_masters_have_the_cpus_bits(numel: int, hostile: bool, grad_format: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    scalars = adam_scalars(lr=1.3e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=3, decoupled=True)
    case = KernelCase(
        numel, hostile=hostile and numel >= 20, master_form="split", grad_format=grad_format, scales=(0.37,)
    )
    a = case.arrays
    split = (
        on_device(a["hi"], torch.int16),
        on_device(a["lo"], torch.int16),
        torch.from_numpy(a["ties"].copy()).cuda(),
    )
    exp_avg, exp_avg_sq = on_device(a["first"]), on_device(a["second"])
    grad = on_device(a["grad_f32"]) if grad_format == "f32" else on_device(a["grad_u16"], torch.bfloat16)
    args = case.args(scalars)
    adam_slice.prepare(*args)
    for _ in range(3):
        triton_adam.triton_adam_step(None, grad, exp_avg, exp_avg_sq, scalars, split=split, grad_scales=(0.37,))
        adam_slice(0, numel, *args)
    is_nan = np.isnan(merge_f32_numpy_of(a))
    assert_same_bits(
        {"first": a["first"], "second": a["second"]},
        {"first": exp_avg.cpu().numpy(), "second": exp_avg_sq.cpu().numpy()},
    )
    for name, tensor in (("hi", split[0]), ("lo", split[1])):
        bits = tensor.cpu().numpy().view(np.uint16)
        assert np.array_equal(a[name][~is_nan], bits[~is_nan]), name
    have = np.unpackbits(split[2].cpu().numpy(), bitorder="little")
    assert np.array_equal(np.unpackbits(a["ties"], bitorder="little"), have)


def merge_f32_numpy_of(a: dict[str, np.ndarray]) -> np.ndarray:
    return SplitMaster(a["hi"], a["lo"], a["ties"]).to_f32()


def test_many_steps_stay_equal() -> None:
    """Both updates feed on their own results for 50 steps."""
    pytest.importorskip("triton", reason="Triton is not installed")
    numel = 100_003
    case = KernelCase(numel)
    a = case.arrays
    master, exp_avg, exp_avg_sq = on_device(a["master"]), on_device(a["first"]), on_device(a["second"])
    rng = np.random.default_rng(5)
    for step in range(1, 51):
        a["grad_f32"][:] = rng.standard_normal(numel).astype(np.float32)
        scalars = adam_scalars(
            lr=1e-3 / step, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=step, decoupled=True,
            is_new_state=step == 1,
        )  # fmt: skip
        triton_adam.triton_adam_step(master, on_device(a["grad_f32"]), exp_avg, exp_avg_sq, scalars)
        args = case.args(scalars)
        adam_slice.prepare(*args)
        adam_slice(0, numel, *args)
    have = {"master": master, "first": exp_avg, "second": exp_avg_sq}
    assert_same_bits({name: a[name] for name in have}, {name: tensor.cpu().numpy() for name, tensor in have.items()})


@pytest.mark.parametrize("form", triton_ptx.FORMS)
def test_ptx_for_this_gpu_holds_only_exact_operations(form: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    major, minor = torch.cuda.get_device_capability()
    assert triton_ptx.inexact_instructions(triton_ptx.ptx_of(10 * major + minor, **triton_ptx.FORMS[form])) == []
