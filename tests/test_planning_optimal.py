"""The ILP against brute force, and every plan against the checker that shares no table with the planners."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.planning import baselines, check_plan, random_instance, solve
from lightning_tieroffload.planning.cost_model import OPTIONS, CostTables, Instance
from lightning_tieroffload.planning.plan import Plan, plan_of
from lightning_tieroffload.planning.profile import REFERENCE_MACHINE, UnitProfile

SEEDS = range(200)


def _num_units(seed: int) -> int:
    # Three units with all options, and six with eight, are costly to enumerate: one seed in twenty has them.
    if seed % 20 == 0:
        return (6, 3)[seed % 40 // 20]
    return (1, 2, 4, 5, 2, 4, 1, 5, 4, 2)[seed % 10]


@pytest.mark.parametrize("first_seed", [0, 50, 100, 150])
def test_ilp_equals_brute_force_with_zero_gap(first_seed: int) -> None:
    for seed in SEEDS[first_seed : first_seed + 50]:
        instance = random_instance(seed, _num_units(seed))
        ours = solve(instance, "ilp", forecast=False)
        brute = solve(instance, "brute", forecast=False)
        assert ours.step_s == pytest.approx(brute.step_s, rel=1e-7), seed
        assert ours.mip_gap == 0.0, seed
        for plan in (ours, brute):
            cost = check_plan(instance, plan)
            assert cost.step_s == pytest.approx(plan.step_s, rel=1e-9)
            assert plan.peak_nbytes <= instance.device_budget_nbytes + 1


def test_baselines_are_checked_and_never_beat_the_ilp() -> None:
    worse = {"greedy": 0, "lifetime": 0}
    for seed in range(20):
        instance = random_instance(seed, 4)
        least = solve(instance, "ilp", forecast=False).step_s
        for planner in worse:
            plan = solve(instance, planner, forecast=False)
            check_plan(instance, plan)
            assert plan.step_s >= least * (1 - 1e-9), (seed, planner)
            worse[planner] += plan.step_s > least * 1.01
    assert all(count > 0 for count in worse.values()), "instances on which no planner has to think show nothing"


def test_random_instance_is_reproducible_and_has_the_options_it_says() -> None:
    assert random_instance(7, 3) == random_instance(7, 3)
    assert random_instance(7, 3) != random_instance(8, 3)
    assert all(len(codes) <= 8 for codes in random_instance(1, 6).options or ())
    free = [random_instance(seed, 2).allowed().sum(axis=1).max() for seed in range(20)]
    assert max(free) == len(OPTIONS) == 72


def test_tables_and_checker_agree_on_random_assignments() -> None:
    rng = np.random.default_rng(0)
    for seed in range(60):
        instance = random_instance(seed, 1 + seed % 7, num_options=72)
        prefetch = seed % 4
        roomy = dataclasses.replace(
            instance, device_budget_nbytes=1 << 60, dram_budget_nbytes=1 << 60, prefetch_units=(prefetch,)
        )
        if instance.nvme_budget_nbytes:
            roomy = dataclasses.replace(roomy, nvme_budget_nbytes=1 << 60)
        tables = CostTables(roomy, prefetch)
        for _ in range(5):
            picks = [int(rng.choice(np.flatnonzero(row))) for row in tables.allowed]
            table_cost = tables.cost(picks)
            walked = check_plan(roomy, plan_of(roomy, tables, picks, planner="random"))
            assert walked.step_s == pytest.approx(table_cost.step_s, rel=1e-9)
            for tier in Tier:
                assert walked.peak_nbytes(tier) == pytest.approx(table_cost.peak_nbytes(tier), rel=1e-9)
            assert walked.lane_s == pytest.approx(dict(table_cost.lane_s), rel=1e-9)


def test_pruned_options_are_never_missed() -> None:
    """Brute force over all allowed options and over the undominated ones find the same step."""
    num_pruned = 0
    for seed in range(0, 30, 3):
        instance = random_instance(seed, 2)
        prefetch = instance.prefetch_units[0]
        needed = CostTables(instance, prefetch).needed()
        codes = tuple(tuple(OPTIONS[o].code for o in np.flatnonzero(row)) for row in needed)
        pruned = baselines.brute_force(dataclasses.replace(instance, options=codes), prefetch)
        full = baselines.brute_force(instance, prefetch)
        assert pruned is not None
        assert full is not None
        num_pruned += int(instance.allowed().sum() - needed.sum())
        assert pruned[1] == pytest.approx(full[1], rel=1e-12)
    assert num_pruned > 100


# --------------------------------------------------------------------------------------------------- check_plan refuses


@pytest.fixture(scope="module")
def solved() -> tuple[Instance, Plan]:
    instance = random_instance(3, 4)
    return instance, solve(instance, forecast=False)


def test_check_plan_refuses_a_plan_of_another_model(solved: tuple[Instance, Plan]) -> None:
    _, plan = solved
    with pytest.raises(ConfigError, match="the model has 3"):
        check_plan(random_instance(3, 3), plan)


def test_check_plan_refuses_a_budget_too_small(solved: tuple[Instance, Plan]) -> None:
    instance, plan = solved
    with pytest.raises(CapacityError, match="device_budget"):
        check_plan(instance.with_budget(Tier.DEVICE, plan.peak_nbytes - 1000), plan)


def test_check_plan_refuses_figures_that_are_not_true(solved: tuple[Instance, Plan]) -> None:
    instance, plan = solved
    with pytest.raises(CapacityError, match="s a step"):
        check_plan(instance, dataclasses.replace(plan, step_s=plan.step_s * 0.999))
    with pytest.raises(CapacityError, match="on DEVICE"):
        check_plan(instance, dataclasses.replace(plan, peak_nbytes=plan.peak_nbytes // 2))


def test_check_plan_refuses_a_choice_that_settings_forbid(solved: tuple[Instance, Plan]) -> None:
    instance, plan = solved
    other = plan.units[0].choice.code
    codes = (tuple(o.code for o in OPTIONS if o.code != other),) * len(plan.units)
    with pytest.raises(ConfigError, match="not allowed"):
        check_plan(dataclasses.replace(instance, options=codes), plan)


def test_brute_force_says_when_there_are_too_many() -> None:
    unit = UnitProfile("a", 10, 20, 20, 100, 50, 1.0, 2.0)
    units = tuple(dataclasses.replace(unit, name=f"u{i}") for i in range(5))
    instance = Instance(
        units=units,
        machine=REFERENCE_MACHINE,
        device_budget_nbytes=10**6,
        dram_budget_nbytes=10**6,
        nvme_budget_nbytes=10**6,
    )
    with pytest.raises(Exception, match='planner="ilp"'):
        solve(instance, "brute")
    with pytest.raises(ConfigError, match="ilp, greedy, lifetime, brute"):
        solve(instance, "best")
