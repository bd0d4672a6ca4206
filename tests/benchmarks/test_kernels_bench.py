"""Rates of the update kernels beside torch's fused AdamW in the same run. Prints; asserts no time.

Absolute figures belong to a machine and a moment: compare ``ratio_to_torch`` within one run.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from lightning_tieroffload.kernels import registry
from lightning_tieroffload.kernels.pool import KernelPool
from lightning_tieroffload.kernels.split import SplitMaster, merge_slice, split_f32, split_slice

pytest.importorskip("pytest_benchmark")

NUMEL = 1 << 23  # 32 MiB an fp32 array: far beyond the caches with five of them
NUM_ROUNDS = 5
GROUP = torch.optim.AdamW([torch.zeros(1)]).defaults


def torch_params_per_s(num_threads: int) -> float:
    """torch's fused AdamW on fp32 everything: the best of the same number of rounds."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        param = torch.nn.Parameter(torch.randn(NUMEL))
        optimizer = torch.optim.AdamW([param], fused=True)
        param.grad = torch.randn(NUMEL)
        optimizer.step()
        best_s = float("inf")
        for _ in range(NUM_ROUNDS):
            begin_s = time.perf_counter()
            optimizer.step()
            best_s = min(best_s, time.perf_counter() - begin_s)
    finally:
        torch.set_num_threads(threads_before)
    return NUMEL / best_s


def record(benchmark: Any, num_threads: int, **facts: Any) -> None:
    if benchmark.stats is None:  # --benchmark-disable
        return
    params_per_s = NUMEL / benchmark.stats.stats.min
    reference = torch_params_per_s(num_threads)
    benchmark.extra_info.update(
        gparam_per_s=round(params_per_s / 1e9, 3),
        torch_gparam_per_s=round(reference / 1e9, 3),
        ratio_to_torch=round(params_per_s / reference, 2),
        num_threads=num_threads,
        **facts,
    )


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("form", ["plain, f32 grad", "plain, bf16 grad, bf16 copy", "split, bf16 grad, clip"])
def test_adamw(benchmark: Any, form: str, num_threads: int) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(NUMEL, dtype=np.float32)
    master: np.ndarray | SplitMaster = values
    if form.startswith("split"):
        master = SplitMaster.empty(NUMEL)
        split_f32(values, master.hi_u16, master.lo_u16, master.ties_u8)
    grad = rng.standard_normal(NUMEL, dtype=np.float32)
    if "bf16 grad" in form:
        grad = torch.from_numpy(grad).bfloat16().view(torch.uint16).numpy()
    wire = np.zeros(NUMEL, np.uint16) if "copy" in form else None
    states = {name: np.zeros(NUMEL, np.float32) for name in ("exp_avg", "exp_avg_sq")}
    kernel = registry.find_kernel(torch.optim.AdamW, GROUP, torch.float32)
    assert kernel is not None
    scales = (0.5,) if "clip" in form else ()
    with KernelPool(num_threads) as pool:
        benchmark.pedantic(
            lambda: kernel.run(pool, master, grad, states, step=1, group=GROUP, grad_scales=scales, wire=wire),
            rounds=NUM_ROUNDS, warmup_rounds=1,
        )  # fmt: skip
    record(benchmark, num_threads, form=form)
    assert states["exp_avg_sq"].all()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("direction", ["split", "merge"])
def test_split_master(benchmark: Any, direction: str, num_threads: int) -> None:
    values = np.random.default_rng(0).standard_normal(NUMEL, dtype=np.float32)
    master = SplitMaster.empty(NUMEL)
    arrays = (master.hi_u16, master.lo_u16, master.ties_u8)
    split_f32(values, *arrays)
    out = np.empty_like(values)
    kernel, args = (split_slice, (values, *arrays)) if direction == "split" else (merge_slice, (*arrays, out))
    kernel.prepare(*args)
    with KernelPool(num_threads) as pool:
        benchmark.pedantic(
            lambda: pool.run(lambda begin, end: kernel(begin, end, *args), NUMEL), rounds=NUM_ROUNDS, warmup_rounds=1
        )
    record(benchmark, num_threads, direction=direction)
    assert np.array_equal(master.to_f32(), values)
