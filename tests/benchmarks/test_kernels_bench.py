"""Rates of the update kernels beside torch's fused AdamW in the same run. Prints; asserts no time.

Absolute figures belong to a machine and a moment: compare ``ratio_to_torch`` within one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernel_rates import arrays_of, thread_counts
from kernel_rates import measure as measure_in_turns

from lightning_tieroffload.kernels import registry
from lightning_tieroffload.kernels.pool import KernelPool
from lightning_tieroffload.kernels.split import SplitMaster, merge_slice, split_f32, split_slice

pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.alone

NUMEL = 1 << 22  # 16 MiB an fp32 array: far beyond the caches with five of them
NUM_ROUNDS = 5
GROUP = torch.optim.AdamW([torch.zeros(1)]).defaults


class TorchReference:
    """torch's fused AdamW on fp32 everything, timed between our rounds, so that both see the same neighbours."""

    def __init__(self, num_threads: int) -> None:
        self.best_s = float("inf")
        self._num_threads = num_threads
        self._param = torch.nn.Parameter(torch.randn(NUMEL))
        self._param.grad = torch.randn(NUMEL)
        self._optimizer = torch.optim.AdamW([self._param], fused=True)
        self._optimizer.step()

    def __call__(self) -> None:
        threads_before = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        begin_s = time.perf_counter()
        self._optimizer.step()
        self.best_s = min(self.best_s, time.perf_counter() - begin_s)
        torch.set_num_threads(threads_before)


def measure(benchmark: Any, work: Callable[[], None], num_threads: int, **facts: Any) -> None:
    reference = TorchReference(num_threads)
    benchmark.pedantic(work, setup=reference, rounds=NUM_ROUNDS, warmup_rounds=1)
    if benchmark.stats is None:  # --benchmark-disable
        return
    params_per_s, torch_params_per_s = NUMEL / benchmark.stats.stats.min, NUMEL / reference.best_s
    benchmark.extra_info.update(
        gparam_per_s=round(params_per_s / 1e9, 3),
        torch_gparam_per_s=round(torch_params_per_s / 1e9, 3),
        ratio_to_torch=round(params_per_s / torch_params_per_s, 2),
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
        measure(
            benchmark,
            lambda: kernel.run(pool, master, grad, states, step=1, group=GROUP, grad_scales=scales, wire=wire),
            num_threads,
            form=form,
        )
    assert (states["exp_avg_sq"] > 0).mean() > 0.999


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
        measure(
            benchmark,
            lambda: pool.run(lambda begin, end: kernel(begin, end, *args), NUMEL),
            num_threads,
            direction=direction,
        )
    assert np.array_equal(master.to_f32(), values)


@pytest.mark.parametrize("num_threads", thread_counts())
def test_rates_beside_torch_and_a_triad(benchmark: Any, num_threads: int) -> None:
    """See kernel_rates.py, which runs without pytest too."""
    before = torch.get_num_threads()
    lines = benchmark.pedantic(lambda: measure_in_turns(num_threads, arrays_of(1 << 24), num_rounds=3), rounds=1)
    torch.set_num_threads(before)
    for line in lines:
        shown = {name: round(line[name], 3) for name in ("gparam_per_s", "ratio_to_torch", "frac_of_triad")}
        benchmark.extra_info[line["form"]] = shown
        print(f"\n{num_threads} threads, {line['form']}: {shown}")
        assert line["ratio_to_torch"] > 0
