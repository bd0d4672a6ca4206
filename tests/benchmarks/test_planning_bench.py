"""Planning time: solves of 30, 100 and 1,000 layers, one simulated step, and brute force for scale.

Run with: pytest tests/benchmarks/test_planning_bench.py --benchmark-only -q
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lightning_tieroffload.planning import Instance, UnitProfile, random_instance, solve
from lightning_tieroffload.planning.profile import REFERENCE_MACHINE
from lightning_tieroffload.planning.simulator import simulate
from lightning_tieroffload.sizes import GiB, MiB


def layers(num_layers: int, device_frac: float, *, clip: bool = True, nvme: bool = False) -> Instance:
    """A model of equal layers (100 M parameters, 16k tokens) that has ``device_frac`` of the memory it would like."""
    layer = UnitProfile(
        "", 100_000_000, 200_000_000, 200_000_000, 1_012_500_000, 2200 * MiB, 0.0085, 0.017,
        boundary_nbytes=96 * MiB, workspace_nbytes=512 * MiB,
    )  # fmt: skip
    ends = dataclasses.replace(layer, param_numel=400_000_000, activation_nbytes=4 * GiB, can_recompute=False)
    units = (
        dataclasses.replace(ends, name="embed"),
        *(dataclasses.replace(layer, name=f"layers.{i}") for i in range(num_layers - 2)),
        dataclasses.replace(ends, name="head"),
    )
    wanted = sum(u.param_nbytes + u.grad_nbytes + u.state_nbytes + u.activation_nbytes for u in units)
    return Instance(
        units=units,
        machine=REFERENCE_MACHINE,
        device_budget_nbytes=round(device_frac * wanted),
        dram_budget_nbytes=(num_layers * 600_000_000) if nvme else 1 << 45,
        nvme_budget_nbytes=(1 << 45) if nvme else 0,
        clip=clip,
    )


@pytest.mark.parametrize("case", ["tight", "half", "no_clip", "nvme"])
@pytest.mark.parametrize(("num_layers", "most_s"), [(30, 1.0), (100, 1.0), (1000, 10.0)])
def test_solve_of_a_long_model(benchmark: Any, num_layers: int, most_s: float, case: str) -> None:
    fields = {"tight": (0.2, {}), "half": (0.5, {}), "no_clip": (0.3, {"clip": False}), "nvme": (0.3, {"nvme": True})}
    frac, settings = fields[case]
    instance = layers(num_layers, frac, **settings)
    plan = benchmark.pedantic(solve, args=(instance,), kwargs={"forecast": False}, rounds=3, warmup_rounds=1)
    benchmark.extra_info |= {"step_s": plan.step_s, "mip_gap": plan.mip_gap, "limit_s": most_s}


def test_simulated_step_of_100_layers(benchmark: Any) -> None:
    instance = layers(100, 0.3)
    plan = solve(instance, forecast=False)
    choices = [line.choice for line in plan.units]
    result = benchmark.pedantic(simulate, args=(instance, choices, plan.prefetch_units), rounds=3)
    benchmark.extra_info |= {"forecast_s": result.step_s, "cost_model_s": plan.step_s}


@pytest.mark.parametrize("planner", ["ilp", "brute"])
def test_three_units_with_all_options(benchmark: Any, planner: str) -> None:
    instance = random_instance(0, 3)
    benchmark.pedantic(solve, args=(instance, planner), kwargs={"forecast": False}, rounds=3)
