"""What watching steps costs, and how well a plan's forecast meets the steps that follow it. CPU reference model.

Run with: pytest tests/benchmarks/test_engine_planner_bench.py --benchmark-only -q -s
Figures hold for a machine that does nothing else; compare ratios within one run.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from torch import nn

import lightning_tieroffload
from lightning_tieroffload.engine.offload_engine import engine_of

MOST_OVERHEAD_FRAC = 0.04
MOST_FORECAST_ERROR_FRAC = 0.15


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def reference_model(width: int = 256, depth: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def step(model: Any, optimizer: Any, x: torch.Tensor) -> float:
    start_s = time.perf_counter()
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start_s


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_watched_steps_against_others(benchmark: Any) -> None:
    """Steps with the profiler on and off take turns; the medians of their processor seconds are compared."""
    model = reference_model()
    optimizer = torch.optim.AdamW(model.parameters())
    lightning_tieroffload.offload(
        model, optimizer, device="cpu", device_budget="1GiB", dram_budget="2GiB", profile_steps=1000, activations="keep"
    )
    engine = engine_of(model)
    assert engine is not None
    planner, x = engine.core.planner, torch.randn(512, 256)
    for _ in range(3):
        step(model, optimizer, x)

    def alternate() -> float:
        laps: dict[bool, list[float]] = {True: [], False: []}
        for index in range(60 if benchmark.enabled else 2):
            is_watched = bool(index % 2)
            (planner._watch if is_watched else planner._stop_watching)()
            start_s = time.process_time()  # of all threads: neighbours on the machine do not show
            step(model, optimizer, x)
            engine.flush()
            laps[is_watched].append(time.process_time() - start_s)
        return statistics.median(laps[True]) / statistics.median(laps[False]) - 1

    overhead_frac = benchmark.pedantic(alternate, rounds=1)
    benchmark.extra_info |= {"overhead_frac": overhead_frac, "limit_frac": MOST_OVERHEAD_FRAC}
    print(f"\nwatched steps take {overhead_frac:+.1%}")
    engine.close()


@pytest.mark.parametrize("budget", ["1GiB", "44MiB", "28MiB"])
def test_forecast_against_measured(benchmark: Any, budget: str) -> None:
    """Predicted next to measured at a budget that holds everything, some, and little."""
    model = reference_model()
    optimizer = torch.optim.AdamW(model.parameters())
    lightning_tieroffload.offload(
        model, optimizer, device="cpu", device_budget=budget, dram_budget="2GiB", profile_steps=4
    )
    engine = engine_of(model)
    assert engine is not None
    x = torch.randn(512, 256)

    def measure() -> float:
        for _ in range(8):
            step(model, optimizer, x)
        return statistics.median(step(model, optimizer, x) for _ in range(20 if benchmark.enabled else 1))

    measured_s = benchmark.pedantic(measure, rounds=1)
    forecast = engine.report()["forecast"]
    error_frac = forecast["step_s"] / measured_s - 1
    benchmark.extra_info |= {"predicted_s": forecast["step_s"], "measured_s": measured_s, "error_frac": error_frac}
    left = sum(line["activations"] != "keep" for line in engine.report()["plan"]["units"])
    print(
        f"\n{budget}: predicted {forecast['step_s']:.4f} s, measured {measured_s:.4f} s ({error_frac:+.1%}), bound by "
        f"{forecast['bottleneck']}, {left} of 8 units leave; limit {MOST_FORECAST_ERROR_FRAC:.0%}"
    )
    engine.close()
