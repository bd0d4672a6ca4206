"""Structure of good plans, checkpoint placement, grouping, and every outcome that a solver can have."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.errors import CapacityError, ConfigError, InfeasiblePlanError
from lightning_tieroffload.planning import check_plan, ilp, random_instance, solve, solver
from lightning_tieroffload.planning.cost_model import ActivationChoice, CostTables, Instance, UpdatePlace
from lightning_tieroffload.planning.profile import REFERENCE_MACHINE, MachineProfile, UnitProfile
from lightning_tieroffload.sizes import GiB, MiB

# An ideal machine: nothing is lost to overlap or to the allocator, so that textbook figures come out exactly.
IDEAL = dataclasses.replace(
    REFERENCE_MACHINE, name="ideal", overlap_loss_frac=0.0, update_loss_frac=0.0, allocator_slack_frac=0.0
)
ROOMY = 1 << 50


def chain(num_units: int, **fields: Any) -> tuple[UnitProfile, ...]:
    values: dict[str, Any] = {
        "param_numel": 100 * MiB,
        "param_nbytes": 200 * MiB,
        "grad_nbytes": 200 * MiB,
        "state_nbytes": 1000 * MiB,
        "activation_nbytes": 400 * MiB,
        "forward_s": 0.010,
        "backward_s": 0.020,
        "boundary_nbytes": 20 * MiB,
    }
    values |= fields
    return tuple(UnitProfile(name=f"layers.{i}", **values) for i in range(num_units))


def instance_of(units: tuple[UnitProfile, ...], device_nbytes: float, **fields: Any) -> Instance:
    values: dict[str, Any] = {"machine": REFERENCE_MACHINE, "dram_budget_nbytes": ROOMY} | fields
    return Instance(units=units, device_budget_nbytes=int(device_nbytes), **values)


# ------------------------------------------------------------------------------------------------ checkpoint placement


def _checkpoint_instance(num_units: int, num_kept: float, prefetch: int = 1) -> Instance:
    """A chain of activations only, with room for about ``num_kept`` units' activations."""
    units = chain(num_units, param_numel=0, param_nbytes=0, grad_nbytes=0, state_nbytes=0)
    return instance_of(
        units,
        num_kept * 400 * MiB + num_units * 20 * MiB,
        machine=IDEAL,
        activations=(ActivationChoice.KEEP, ActivationChoice.RECOMPUTE),
        prefetch_units=(prefetch,),
    )


def _least_recomputed(instance: Instance) -> float:
    """Seconds of the optimal schedule of a chain by dynamic programming.

    Table over units and bytes kept so far: at unit i's backward its activations are whole, units before it keep theirs
    or their input. Fewest recomputed units such that no point exceeds the budget.
    """
    units = instance.units
    step = 20 * MiB  # every byte count here is a multiple
    limit = instance.device_budget_nbytes // step
    best: dict[int, float] = {0: 0.0}  # steps kept before unit i -> recompute seconds so far
    for unit in units:
        whole, inputs = unit.activation_nbytes // step, unit.boundary_nbytes // step
        following: dict[int, float] = {}
        for kept, seconds in best.items():
            if kept + whole > limit:
                continue
            for after, cost in ((kept + whole, seconds), (kept + inputs, seconds + unit.rerun_s)):
                following[after] = min(cost, following.get(after, math.inf))
        best = following
    return sum(u.forward_s + u.backward_s for u in units) + min(best.values(), default=math.inf)


@pytest.mark.parametrize("num_units", [1, 2, 5, 9, 13])
@pytest.mark.parametrize("num_kept", [1.0, 2.3, 3.7, 6.0, 20.0])
def test_checkpoint_placement_equals_dynamic_programming(num_units: int, num_kept: float) -> None:
    instance = _checkpoint_instance(num_units, num_kept)
    plan = solve(instance, forecast=False)
    check_plan(instance, plan)
    assert plan.step_s == pytest.approx(_least_recomputed(instance), rel=1e-9)
    if 2**num_units <= 1 << 9:
        assert solve(instance, "brute", forecast=False).step_s == pytest.approx(plan.step_s, rel=1e-9)


def test_checkpoint_placement_on_an_uneven_chain_equals_dynamic_programming() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        instance = _checkpoint_instance(8, 3.0)
        units = tuple(
            dataclasses.replace(unit, activation_nbytes=int(n) * 20 * MiB, forward_s=float(s), backward_s=2 * float(s))
            for unit, n, s in zip(instance.units, rng.integers(2, 30, 8), rng.uniform(0.001, 0.02, 8), strict=True)
        )
        least = max(u.activation_nbytes for u in units) + 20 * MiB * len(units)
        instance = dataclasses.replace(instance, units=units, device_budget_nbytes=int(least * rng.uniform(1, 2)))
        assert solve(instance, forecast=False).step_s == pytest.approx(_least_recomputed(instance), rel=1e-9)


# --------------------------------------------------------------------------------------------------- known structure


def test_everything_stays_on_the_device_when_it_fits() -> None:
    plan = solve(instance_of(chain(6), 64 * GiB))
    for line in plan.units:
        assert (line.param_home, line.state_home, line.grad_home) == (Tier.DEVICE,) * 3
        assert line.activation is ActivationChoice.KEEP
    assert plan.forecast.bottleneck == "compute"


def test_recompute_falls_on_the_first_units() -> None:
    """Their activations live longest; recomputing the last unit, whose backward comes first, frees nothing."""
    instance = _checkpoint_instance(8, 4.5)
    plan = solve(instance, forecast=False)
    recomputed = [line.activation is ActivationChoice.RECOMPUTE for line in plan.units]
    assert 0 < sum(recomputed) < 8
    assert not recomputed[-1]
    # With equal seconds any early ones do; all must be early enough to relieve the last unit's backward.
    costs = []
    for units in itertools.combinations(range(8), sum(recomputed)):
        tables = CostTables(instance, 1)
        picks = [1 if i in units else 0 for i in range(8)]
        if tables.cost(picks).device_peak_nbytes <= instance.device_budget_nbytes:
            costs.append(units)
    assert costs
    assert all(7 not in units for units in costs)
    assert tuple(range(sum(recomputed))) in costs


def test_parameters_leave_the_first_units() -> None:
    """A parameter is staged where it is used; at the peak, the turn, the last units' are in use anyway."""
    units = chain(6, grad_nbytes=0, state_nbytes=0, activation_nbytes=100 * MiB, can_recompute=False,
                  can_offload_activation=False)  # fmt: skip
    no_slack = dataclasses.replace(REFERENCE_MACHINE, allocator_slack_frac=0.0)
    # Room for all activations, and for one parameter less than all: one has to go, and it has to help at the turn.
    instance = instance_of(units, 6 * 100 * MiB + 5 * 200 * MiB, machine=no_slack, prefetch_units=(1,))
    plan = solve(instance, forecast=False)
    away = [i for i, line in enumerate(plan.units) if line.param_home is not Tier.DEVICE]
    assert away
    assert max(away) < 4, "the two units staged at the turn gain nothing by leaving"


def test_optimizer_offload_falls_on_the_last_units() -> None:
    """Without a clip their gradients come first and their next forward is last: the CPU's update hides longest."""
    units = chain(8, activation_nbytes=0)
    slow_cpu = dataclasses.replace(IDEAL, cpu_update_numel_per_s=1.5e9)
    home = 8 * 1200 * MiB + 2 * 200 * MiB
    instance = instance_of(
        units, home - 2 * 1000 * MiB, machine=slow_cpu, clip=False, prefetch_units=(1,),
        options=((("device/device/device/device/keep"), "device/dram/dram/cpu/keep"),) * 8,
    )  # fmt: skip
    plan = solve(instance, forecast=False)
    on_cpu = [i for i, line in enumerate(plan.units) if line.update_on is UpdatePlace.CPU]
    assert 2 <= len(on_cpu) < 6
    tables = CostTables(instance, 1)

    def step_with(cpu_units: tuple[int, ...]) -> float:
        index = {line: i for i, line in enumerate(np.flatnonzero(tables.allowed[0]))}
        assert len(index) == 2
        first, second = sorted(index)
        return tables.cost([second if i in cpu_units else first for i in range(8)]).step_s

    last = step_with(tuple(range(8 - len(on_cpu), 8)))
    first = step_with(tuple(range(len(on_cpu))))
    assert plan.step_s == pytest.approx(last, rel=1e-9), "nothing beats giving the CPU the last units"
    assert last < first


def test_activations_are_offloaded_where_the_transfer_hides_and_not_where_it_does_not() -> None:
    activations = (ActivationChoice.KEEP, ActivationChoice.OFFLOAD_DRAM, ActivationChoice.RECOMPUTE)
    units = chain(8, param_numel=0, param_nbytes=0, grad_nbytes=0, state_nbytes=0)
    slow_link = dataclasses.replace(IDEAL, h2d_bytes_per_s=4e9, d2h_bytes_per_s=4e9, pcie_bytes_per_s=8e9)
    chosen = {}
    for machine in (IDEAL, slow_link):
        instance = instance_of(units, 5 * 400 * MiB, machine=machine, activations=activations, prefetch_units=(1,))
        plan = solve(instance, forecast=False)
        chosen[machine.name, machine.h2d_bytes_per_s] = [line.activation for line in plan.units]
    fast, slow = chosen.values()
    assert ActivationChoice.OFFLOAD_DRAM in fast
    assert ActivationChoice.RECOMPUTE not in fast
    assert ActivationChoice.OFFLOAD_DRAM not in slow
    assert ActivationChoice.RECOMPUTE in slow


# ------------------------------------------------------------------------------------------------------- long models


@pytest.mark.parametrize("clip", [True, False])
def test_a_long_model_is_planned_within_its_gap(clip: bool) -> None:
    units = chain(40)
    instance = instance_of(units, 0.35 * 40 * 1600 * MiB, clip=clip)
    plan = solve(instance, forecast=False)
    check_plan(instance, plan)
    assert 0.0 <= plan.mip_gap < 0.03
    assert plan.step_s <= solve(instance, "greedy", forecast=False).step_s * (1 + 1e-9)
    assert plan.step_s <= solve(instance, "lifetime", forecast=False).step_s * (1 + 1e-9)


def test_noise_of_measured_seconds_does_not_undo_grouping() -> None:
    rng = np.random.default_rng(0)
    units = tuple(dataclasses.replace(u, forward_s=u.forward_s * rng.uniform(0.995, 1.005)) for u in chain(64))
    segments, is_exact = ilp._segments(CostTables(instance_of(units, 20 * GiB), 2))
    assert not is_exact
    assert sum(len(segment.groups) for segment in segments) < 24


def test_layers_of_two_kinds_in_turn_are_grouped_by_kind() -> None:
    units = tuple(
        dataclasses.replace(u, param_numel=u.param_numel * (1 + i % 2), state_nbytes=u.state_nbytes * (1 + i % 2))
        for i, u in enumerate(chain(60))
    )
    instance = instance_of(units, 0.4 * sum(u.param_nbytes + u.state_nbytes for u in units))
    segments, _ = ilp._segments(CostTables(instance, 2))
    assert any(len(segment.groups) == 2 for segment in segments)
    assert sorted(i for s in segments for g in s.groups for i in g.units) == list(range(60))
    plan = solve(instance, forecast=False)
    check_plan(instance, plan)
    assert plan.mip_gap < 0.05


# -------------------------------------------------------------------------------------------------- solver outcomes


def _tight() -> Instance:
    return instance_of(chain(12), 0.4 * 12 * 1600 * MiB)


def test_time_limit_takes_the_better_of_incumbent_and_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_in_time(*args: Any, **kwargs: Any) -> scipy.optimize.OptimizeResult:
        return scipy.optimize.OptimizeResult(
            status=1, success=False, x=None, message="Time limit reached", mip_gap=None, mip_dual_bound=None
        )

    instance = _tight()
    usual = solve(instance, forecast=False)
    monkeypatch.setattr(scipy.optimize, "milp", nothing_in_time)
    plan = solve(instance, forecast=False)
    check_plan(instance, plan)
    others = solver._baseline_candidates(instance)
    assert plan.step_s == pytest.approx(min(c.step_s for c in others))
    assert plan.step_s >= usual.step_s
    assert "stopped early" in plan.note
    assert "cheaper" in plan.note
    assert 0 < plan.mip_gap < 1, "against the relaxation's bound"


def test_time_limit_with_a_poor_incumbent_takes_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feasible answer with a huge gap is an outcome that scipy really has."""
    real = scipy.optimize.milp

    def poor(cost: Any, **kwargs: Any) -> scipy.optimize.OptimizeResult:
        result = real(-np.asarray(cost), **{**kwargs, "options": {**kwargs["options"], "mip_rel_gap": 0.5}})
        result.status, result.mip_dual_bound = 1, 1.0
        return result

    instance = _tight()
    unbounded = dataclasses.replace(instance, prefetch_units=(1,))
    monkeypatch.setattr(scipy.optimize, "milp", poor)
    plan = solve(unbounded, forecast=False)
    check_plan(unbounded, plan)
    assert plan.step_s <= min(c.step_s for c in solver._baseline_candidates(unbounded)) * (1 + 1e-9)


def test_a_real_time_limit_still_gives_a_plan() -> None:
    instance = _tight()
    plan = solve(instance, time_limit_s=1e-3, forecast=False)
    check_plan(instance, plan)
    assert plan.step_s > 0


def test_a_solver_failure_without_any_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> scipy.optimize.OptimizeResult:
        return scipy.optimize.OptimizeResult(status=4, success=False, x=None, message="numerical trouble", fun=None)

    instance = instance_of(chain(12), 1 * GiB)  # nothing that the baselines do fits either
    monkeypatch.setattr(scipy.optimize, "milp", broken)
    monkeypatch.setattr(scipy.optimize, "linprog", broken)
    with pytest.raises(CapacityError, match="numerical trouble") as caught:
        solve(instance, forecast=False)
    assert not isinstance(caught.value, InfeasiblePlanError)


@pytest.mark.parametrize("num_units", [3, 12], ids=["exact", "long"])
@pytest.mark.parametrize("error", [ValueError("vector::reserve"), RuntimeError("HiGHS"), MemoryError()])
def test_a_solver_that_throws_leaves_the_other_planners(
    num_units: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS's C++ throws now and then; a training run must not end for it."""

    def throws(*args: Any, **kwargs: Any) -> Any:
        raise error

    instance = instance_of(chain(num_units), 0.6 * num_units * 1600 * MiB)
    for name in ("milp", "linprog"):
        monkeypatch.setattr(scipy.optimize, name, throws)
    for plan in (solve(instance, forecast=False), solver.best_plan(instance)):
        check_plan(instance, plan)
        assert plan.step_s == pytest.approx(min(c.step_s for c in solver._baseline_candidates(instance)), rel=0.5)


def test_what_the_solver_prints_is_not_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """HiGHS has such lines; stdout may be JSON."""
    real = scipy.optimize.milp

    def talks(*args: Any, **kwargs: Any) -> Any:
        ctypes.CDLL(None).puts(b"a line from C")
        return real(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", talks)
    print("before")
    solve(_tight(), forecast=False)
    print("after")
    out, err = capfd.readouterr()
    assert out == "before\nafter\n"
    assert "a line from C" in err


def test_solving_needs_no_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    check_plan(_tight(), solve(_tight(), forecast=False))


# --------------------------------------------------------------------------------------------------------- infeasible


def _assert_least(instance: Instance, planner: str = "ilp") -> InfeasiblePlanError:
    with pytest.raises(InfeasiblePlanError) as caught:
        solve(instance, planner, forecast=False)
    error = caught.value
    assert error.least_budget_nbytes is not None
    tier = Tier[error.tier]
    works = instance.with_budget(tier, error.least_budget_nbytes)
    check_plan(works, solve(works, planner, forecast=False))
    with pytest.raises(InfeasiblePlanError):
        solve(instance.with_budget(tier, math.floor(0.98 * error.least_budget_nbytes)), planner, forecast=False)
    assert str(error.least_budget_nbytes) in str(error)
    assert f"{tier.name.lower()}_budget" in str(error)
    return error


@pytest.mark.parametrize("num_units", [3, 12, 40])
def test_a_device_too_small_names_the_least_that_works(num_units: int) -> None:
    error = _assert_least(instance_of(chain(num_units), 1 * GiB))
    assert error.tier == "DEVICE"


@pytest.mark.parametrize("num_units", [4, 20])
def test_dram_too_small_names_the_least_that_works(num_units: int) -> None:
    instance = instance_of(chain(num_units), 4 * GiB, dram_budget_nbytes=200 * MiB, activations=(
        ActivationChoice.KEEP, ActivationChoice.RECOMPUTE))  # fmt: skip
    error = _assert_least(instance)
    assert error.tier in ("DRAM", "DEVICE")
    assert "dram_budget" in str(error)


def test_random_small_budgets_are_planned_or_named() -> None:
    named = 0
    for seed in range(12):
        instance = random_instance(seed, 3)
        small = instance.with_budget(Tier.DEVICE, instance.device_budget_nbytes // 3)
        try:
            check_plan(small, solve(small, forecast=False))
        except InfeasiblePlanError:
            _assert_least(small)
            named += 1
    assert named >= 3


def test_every_planner_says_infeasible_alike() -> None:
    instance = dataclasses.replace(random_instance(5, 2), device_budget_nbytes=MiB)
    errors = {}
    for planner in ("ilp", "greedy", "lifetime", "brute"):
        with pytest.raises(InfeasiblePlanError) as caught:
            solve(instance, planner)
        errors[planner] = (caught.value.tier, caught.value.least_budget_nbytes)
    assert len(set(errors.values())) == 1


def test_two_tiers_too_small_name_both() -> None:
    instance = instance_of(chain(4), 1 * GiB, dram_budget_nbytes=1 * GiB, update_places=(UpdatePlace.CPU,))
    with pytest.raises(InfeasiblePlanError, match="DEVICE and DRAM are both too small") as caught:
        solve(instance, forecast=False)
    assert caught.value.tier == "DEVICE"
    assert caught.value.least_budget_nbytes is not None
    words = str(caught.value).split(" bytes)")
    device, dram = (int(text.rsplit("(", 1)[1]) for text in words[:2])
    assert device == caught.value.least_budget_nbytes
    enough = dataclasses.replace(instance, device_budget_nbytes=device, dram_budget_nbytes=dram)
    check_plan(enough, solve(enough, forecast=False))


def test_settings_that_leave_a_unit_no_option_are_a_config_error() -> None:
    instance = instance_of(chain(2, can_move_state=False), 64 * GiB, update_places=(UpdatePlace.CPU,))
    with pytest.raises(ConfigError, match=r"layers\.0 has no option left"):
        solve(instance)


def test_settings_are_kept() -> None:
    plan = solve(instance_of(chain(4), 64 * GiB, update_places=(UpdatePlace.CPU,)), forecast=False)
    assert {line.update_on for line in plan.units} == {UpdatePlace.CPU}
    plan = solve(instance_of(chain(4), 64 * GiB, activations=(ActivationChoice.RECOMPUTE,)), forecast=False)
    assert {line.activation for line in plan.units} == {ActivationChoice.RECOMPUTE}
    plan = solve(instance_of(chain(4, can_stream_param=False), 4 * GiB), forecast=False)
    assert {line.param_home for line in plan.units} == {Tier.DEVICE}
    no_flash = solve(instance_of(chain(4), 3 * GiB), forecast=False)
    assert all(Tier.NVME not in (u.param_home, u.state_home) for u in no_flash.units)


def test_more_of_a_tier_never_costs_and_its_worth_is_what_solving_again_says() -> None:
    instance = instance_of(chain(6), 4 * GiB)
    plan = solve(instance, forecast=False)
    worth = solver.value_of_more(instance, plan)
    assert set(worth) == {"device", "dram"}
    assert worth["dram"] == pytest.approx(0.0, abs=1e-9)
    richer = solve(instance.with_budget(Tier.DEVICE, 5 * GiB), forecast=False)
    assert worth["device"] == pytest.approx(plan.step_s - richer.step_s, abs=1e-12)
    assert worth["device"] > 0


def test_flash_is_used_when_dram_is_full() -> None:
    instance = instance_of(chain(6), 4 * GiB, dram_budget_nbytes=5 * GiB, nvme_budget_nbytes=64 * GiB)
    plan = solve(instance, forecast=False)
    check_plan(instance, plan)
    assert any(line.state_home is Tier.NVME for line in plan.units)
    fast_disk = MachineProfile(
        **{**REFERENCE_MACHINE.to_json(), "read_bytes_per_s": 50e9, "write_bytes_per_s": 50e9, "disk_bytes_per_s": 90e9}
    )
    faster = solve(dataclasses.replace(instance, machine=fast_disk), forecast=False)
    assert faster.step_s < 0.7 * plan.step_s
