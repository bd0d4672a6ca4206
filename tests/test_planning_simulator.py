"""The virtual clock: figures that can be worked out by hand, back-pressure, priorities, lifetimes, bookings."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from lightning_tieroffload.concepts import Role, Tier
from lightning_tieroffload.planning import Instance, UnitProfile, best_plan, random_instance, solve
from lightning_tieroffload.planning.baselines import lifetime_score
from lightning_tieroffload.planning.cost_model import (
    OPTIONS,
    ActivationChoice,
    Choice,
    UpdatePlace,
)
from lightning_tieroffload.planning.plan import (
    AliveActivations,
    alive_activations,
    alive_peak_nbytes,
    check_plan,
    held_peak_nbytes,
)
from lightning_tieroffload.planning.profile import MachineProfile
from lightning_tieroffload.planning.simulator import rank_plans, simulate, simulate_jobs
from lightning_tieroffload.planning.timeline import BandwidthTimeline, Job, Lane, jobs_of_steps, lifetimes

# 1 byte a second makes bytes and seconds the same number.
PLAIN = MachineProfile(
    name="plain",
    h2d_bytes_per_s=1.0,
    d2h_bytes_per_s=1.0,
    pcie_bytes_per_s=2.0,
    dram_bytes_per_s=1e6,
    read_bytes_per_s=1.0,
    write_bytes_per_s=1.0,
    disk_bytes_per_s=2.0,
    cpu_update_numel_per_s=1.0,
    device_update_numel_per_s=1e9,
    cpu_update_bytes_per_numel=1.0,
    overlap_loss_frac=0.0,
    update_loss_frac=0.0,
    allocator_slack_frac=0.0,
)
DEVICE, DRAM, NVME = Tier
STAY = Choice(DEVICE, DEVICE, DEVICE, UpdatePlace.DEVICE, ActivationChoice.KEEP)
STREAM = dataclasses.replace(STAY, param_home=DRAM)
ON_CPU = Choice(DEVICE, DRAM, DRAM, UpdatePlace.CPU, ActivationChoice.KEEP)


def problem(
    num_units: int, machine: MachineProfile = PLAIN, clip: bool = True, micro: int = 1, **fields: Any
) -> Instance:
    values: dict[str, Any] = {
        "param_numel": 0, "param_nbytes": 0, "grad_nbytes": 0, "state_nbytes": 0, "activation_nbytes": 0,
        "forward_s": 1.0, "backward_s": 2.0,
    } | fields  # fmt: skip
    return Instance(
        units=tuple(UnitProfile(name=f"u{i}", **values) for i in range(num_units)),
        machine=machine,
        device_budget_nbytes=1 << 40,
        dram_budget_nbytes=1 << 40,
        nvme_budget_nbytes=1 << 40,
        clip=clip,
        num_micro_batches=micro,
    )


@pytest.mark.parametrize("micro", [1, 3])
def test_compute_alone_takes_its_own_seconds(micro: int) -> None:
    result = simulate(problem(4, micro=micro), [STAY] * 4, 1)
    assert result.step_s == pytest.approx(12.0 * micro)
    assert result.bottleneck == "compute"
    assert sum(result.stall_s.values()) == 0.0


def test_recompute_adds_its_forward() -> None:
    again = dataclasses.replace(STAY, activation=ActivationChoice.RECOMPUTE)
    result = simulate(problem(4, activation_nbytes=1), [again, STAY, again, STAY], 1)
    assert result.step_s == pytest.approx(14.0)


def test_fetches_hide_when_they_fit_and_show_when_they_do_not() -> None:
    streamed = [STREAM] * 8
    hidden = simulate(problem(8, param_nbytes=1, backward_s=1.0), streamed, 2)
    assert hidden.step_s == pytest.approx(16.0)
    # 3 bytes a fetch against 1 s of compute: the link is the limit. 8 forward fetches, 8 - 3 in backward, less those
    # that are staged across the step's end (untrained, so that nothing makes them stale).
    slow = simulate(problem(8, param_nbytes=3, backward_s=1.0), streamed, 2)
    assert slow.bottleneck == "h2d"
    assert slow.busy_s["h2d"] == pytest.approx(3.0 * (8 - 3 + 8 - 3))
    assert 30.0 <= slow.step_s <= 34.0
    assert slow.stall_s["h2d"] == pytest.approx(slow.step_s - 16.0)


def test_without_prefetch_every_fetch_is_waited_for() -> None:
    result = simulate(problem(4, param_nbytes=1), [STREAM] * 4, 0)
    # Staying units: the last at the turn, the first at the step's end; the other six passes fetch for a second each.
    assert result.step_s == pytest.approx(12.0 + 6.0)


def test_updates_wait_for_the_norm_with_a_clip_and_start_in_backward_without() -> None:
    trained = {"param_numel": 2, "grad_nbytes": 0, "state_nbytes": 8}
    machine = dataclasses.replace(PLAIN, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9, pcie_bytes_per_s=1e9)
    fields = {**trained, "param_nbytes": 1, "update_numel": 2}
    waits = simulate(problem(4, machine, clip=True, **fields), [ON_CPU] * 4, 1)
    # Four updates of 2 s; the first unit's is waited for whole, then each forward waits for its own: 8 s + one forward.
    assert waits.step_s == pytest.approx(8.0 + 8.0 + 1.0)
    assert waits.bottleneck == "cpu_update"
    eager = simulate(problem(4, machine, clip=False, **fields), [ON_CPU] * 4, 1)
    # Units 3, 2, 1 update while backward goes on; unit 0's gradient comes last and is needed first: 2 s of stall.
    assert eager.step_s == pytest.approx(12.0 + 2.0)


def test_shared_dram_slows_who_uses_it() -> None:
    fields = {"param_numel": 4, "state_nbytes": 8, "update_numel": 4}
    links = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9, "pcie_bytes_per_s": 1e9}
    wide = dataclasses.replace(PLAIN, **links, cpu_update_bytes_per_numel=1.0, dram_bytes_per_s=1e12)
    narrow = dataclasses.replace(wide, dram_bytes_per_s=0.5)
    fast, slow = (simulate(problem(2, machine, **fields), [ON_CPU] * 2, 1) for machine in (wide, narrow))
    assert fast.busy_s["cpu_update"] == pytest.approx(8.0)
    assert slow.busy_s["cpu_update"] == pytest.approx(16.0, rel=1e-3), "half the bandwidth, half the rate"


def test_both_pcie_directions_share() -> None:
    jobs = (
        Job("up", Lane.H2D, 10.0, (), 0, 0),
        Job("down", Lane.D2H, 10.0, (), 0, 0),
        Job("end", Lane.COMPUTE, 1.0, (0, 1), 0, 0),
    )
    machine = dataclasses.replace(PLAIN, pcie_bytes_per_s=1.6)
    assert simulate_jobs(problem(1, machine), jobs, (2,)).step_s == pytest.approx(10.0 / 0.8 + 1.0)


def test_lower_priority_number_goes_first_and_staging_is_bounded() -> None:
    jobs = (
        Job("late", Lane.H2D, 1.0, (), 5, 0),
        Job("urgent", Lane.H2D, 1.0, (), 1, 0),
        Job("a", Lane.READ, 1.0, (), 0, 0, takes="device staging"),
        Job("b", Lane.READ, 1.0, (), 1, 0, takes="device staging"),
        Job("c", Lane.READ, 1.0, (), 2, 0, takes="device staging"),
        Job("free", Lane.READ, 1.0, (), 3, 0),
        Job("a down", Lane.WRITE, 9.0, (2,), 0, 0, gives="device staging"),
        Job("end", Lane.COMPUTE, 1.0, (0, 4, 6), 0, 0),
    )
    result = simulate_jobs(problem(1), jobs, (7,))
    start = {span.job.name: span.start_s for span in result.spans}
    assert start["urgent"] < start["late"]
    assert start["c"] == pytest.approx(10.0), "two in flight: the third waits for the first to leave"
    assert start["free"] == pytest.approx(2.0), "who needs no staging goes by"


def test_every_option_runs_to_its_end_without_deadlock_and_repeats_exactly() -> None:
    for clip in (True, False):
        for micro in (1, 2):
            fields = {"param_numel": 3, "param_nbytes": 2, "grad_nbytes": 2, "state_nbytes": 9, "activation_nbytes": 4}
            instance = problem(5, clip=clip, micro=micro, **fields)
            for option in OPTIONS:
                first = simulate(instance, [option] * 5, 1)
                assert first.step_s >= 15.0 * micro - 1e-9
                assert first == simulate(instance, [option] * 5, 1)


def test_the_forecast_is_at_least_the_cost_models_lane_totals() -> None:
    for seed in range(12):
        instance = random_instance(seed, 4)
        plan = solve(instance)
        jobs, _ = jobs_of_steps(instance, [u.choice for u in plan.units], plan.prefetch_units, 1)
        for lane in (Lane.COMPUTE, Lane.H2D, Lane.READ, Lane.CPU_UPDATE):
            total = sum(job.seconds for job in jobs if job.lane is lane)
            assert plan.forecast.step_s >= total * (1 - 1e-9) - 1e-12


def test_the_cost_model_and_the_simulator_agree_on_random_jobs() -> None:
    """They share nothing but rates. A wide gap would mean that the ILP optimises the wrong thing."""
    ratios = []
    for seed in range(30):
        plan = solve(random_instance(seed, 5))
        ratios.append(plan.forecast.step_s / plan.step_s)
    ratios.sort()
    assert ratios[0] > 0.85
    assert ratios[len(ratios) // 2] < 1.1
    assert ratios[-1] < 1.6


def test_best_plan_is_no_slower_than_any_planner_by_the_simulator() -> None:
    for seed in (1, 4, 8):
        instance = random_instance(seed, 4)
        best = best_plan(instance)
        for planner in ("ilp", "greedy", "lifetime"):
            assert best.forecast.step_s <= solve(instance, planner).forecast.step_s * 1.0011
    assert rank_plans([]) == []


@pytest.mark.parametrize("seed", [6, 17, 48])
def test_options_that_are_named_one_by_one_are_planned_as_well(seed: int) -> None:
    """As the engine names them: plans with all updates in one place were left out, and steps twice as long chosen."""
    instance = random_instance(seed, 3)
    codes = tuple(tuple(OPTIONS[column].code for column in np.flatnonzero(row)) for row in instance.allowed())
    named = best_plan(dataclasses.replace(instance, options=codes))
    assert named.forecast.step_s <= best_plan(instance).forecast.step_s * 1.0011


def test_a_unit_whose_state_cannot_move_is_no_obstacle_to_updates_on_the_cpu() -> None:
    """It is updated where its state is, the others in one place; the planner ended with "no option left"."""
    instance = random_instance(1, 3)
    units = (dataclasses.replace(instance.units[0], can_move_state=False), *instance.units[1:])
    instance = dataclasses.replace(instance, units=units, device_budget_nbytes=1 << 40)
    assert check_plan(instance, best_plan(instance))


# ----------------------------------------------------------------------------------------------- lifetimes, bookings


def test_lifetimes_of_a_step() -> None:
    instance = problem(3, param_numel=1, param_nbytes=5, grad_nbytes=5, state_nbytes=7, activation_nbytes=9)
    found = {(life.unit, life.role): life for life in lifetimes(instance)}
    # Forward 0-3, backward 3-9. Unit 0: activation from 0 to the start of its backward at 7, idle from 1 on.
    first = found["u0", Role.ACTIVATION]
    assert (first.first_use_s, first.last_use_s, first.idle_s) == (0.0, 6.0, 6.0)
    assert found["u2", Role.ACTIVATION].idle_s == 0.0
    assert found["u0", Role.STATE].idle_s == 9.0
    assert found["u0", Role.PARAM].idle_s == 6.0
    assert found["u2", Role.PARAM].idle_s == 6.0, "from the end of its backward, 5, over the step's end, to 2"
    assert found["u1", Role.PARAM].num_uses == 2


@pytest.mark.parametrize(
    ("nbytes", "idle_s", "score"),
    [(0, 0, 0.0), (500e6, 15, 1.0), (5e9, 150, 1.0), (250e6, 0, 0.2), (0, 7.5, 0.3), (500e6, 8.75, 0.75)],
)
def test_lifetime_score(nbytes: float, idle_s: float, score: float) -> None:
    assert lifetime_score(int(nbytes), idle_s) == pytest.approx(score)


def test_lifetime_moves_what_scores_even_when_all_fits_and_is_more_careful_when_cold() -> None:
    from lightning_tieroffload.planning.baselines import lifetime_picks

    instance = problem(4, param_numel=1, grad_nbytes=1, state_nbytes=450_000_000, forward_s=1.0, backward_s=3.0)
    later = lifetime_picks(instance, 1)
    cold = lifetime_picks(instance, 1, num_steps_seen=4)
    assert later is not None
    assert cold is not None
    # 0.4 x 0.9 + 0.6 x 1 = 0.96 would pass both; a 16 s step scores 0.36 + 0.6 = 0.96.
    assert all(OPTIONS[pick].state_home is not Tier.DEVICE for pick in later)
    shorter = dataclasses.replace(
        instance, units=tuple(dataclasses.replace(unit, forward_s=0.8, backward_s=2.0) for unit in instance.units)
    )
    # 11.2 s idle: 0.36 + 0.448 = 0.81, above 0.75 and below 0.9.
    assert all(OPTIONS[p].state_home is not Tier.DEVICE for p in lifetime_picks(shorter, 1) or ())
    assert all(OPTIONS[p].state_home is Tier.DEVICE for p in lifetime_picks(shorter, 1, num_steps_seen=4) or ())


def test_bandwidth_timeline_books_and_queues() -> None:
    timeline = BandwidthTimeline(10.0, num_slices=10)
    assert timeline.quote("h2d", 0.0, 10.0, 3.0) == pytest.approx(3.0)
    assert timeline.book("h2d", 0.0, 10.0, 3.0) == pytest.approx(3.0)
    assert timeline.quote("h2d", 0.0, 10.0, 3.0) == pytest.approx(6.0), "behind what is booked"
    assert timeline.quote("d2h", 0.0, 10.0, 3.0) == pytest.approx(3.0), "another lane is free"
    assert timeline.busy_frac("h2d") == pytest.approx(0.3)
    assert timeline.book("h2d", 8.0, 12.0, 1.0) == pytest.approx(1.0)
    late = timeline.book("h2d", 9.0, 10.0, 5.0)
    assert late > 1.0, "the window has one second of room at most; the rest queues behind it"
    assert timeline.busy_frac("h2d") == pytest.approx(0.9)


def test_moments_that_come_later_hide_under_backward() -> None:
    """Weights take 2 s a unit before their forward, moments 2 s after all weights, before the gradient's next copy."""
    fields = {"param_numel": 2, "grad_nbytes": 1, "forward_s": 1.0, "backward_s": 6.0}
    two_passes = dataclasses.replace(PLAIN, moments_later_frac=1.0)
    whole = dataclasses.replace(PLAIN, cpu_update_numel_per_s=0.5)
    one, two = (simulate(problem(3, machine, **fields), [ON_CPU] * 3, 1) for machine in (whole, two_passes))
    assert two.busy_s["cpu_update"] == pytest.approx(one.busy_s["cpu_update"])
    # After backward (18 s) three passes of 2 s; the last unit's forward follows the last of them.
    assert two.step_s == pytest.approx(18 + 3 * 2 + 1)
    assert one.step_s == pytest.approx(18 + 3 * 4 + 1)
    spans = [span for span in two.spans if span.job.name.startswith("moments")]
    assert [span.job.name for span in sorted(spans, key=lambda span: span.start_s)] == [
        f"moments (u{i})" for i in (2, 1, 0)
    ]


def test_a_gradient_does_not_come_down_while_moments_are_made_of_the_last_one() -> None:
    fields = {"param_numel": 2, "grad_nbytes": 1, "forward_s": 1.0, "backward_s": 1.0}
    slow = dataclasses.replace(PLAIN, moments_later_frac=20.0)
    jobs, _ = jobs_of_steps(problem(2, slow, **fields), [ON_CPU] * 2, 1, 2)
    names = [job.name for job in jobs]
    second = [job for job in jobs if job.name == "gradient down (u1)"][1]
    assert names.index("moments (u1)") in second.needs
    assert simulate(problem(2, slow, **fields), [ON_CPU] * 2, 1).step_s > 80  # both second passes, 40 s each


@pytest.mark.parametrize("seed", range(12))
def test_the_walk_agrees_with_the_tables_where_moments_come_later(seed: int) -> None:
    """``check_plan`` knows nothing of the tables: the same seconds from both for random assignments."""
    instance = random_instance(seed, 4)
    machine = dataclasses.replace(instance.machine, moments_later_frac=0.5 + seed / 6)
    instance = dataclasses.replace(instance, machine=machine)
    for _ in range(3):
        check_plan(instance, solve(instance, "greedy", forecast=False))


def _line(name: str, **fields: Any) -> UnitProfile:
    values = {
        "param_numel": 10, "param_nbytes": 20, "grad_nbytes": 20, "state_nbytes": 100, "activation_nbytes": 1000,
        "boundary_nbytes": 100, "forward_s": 1.0, "backward_s": 1.0, "newborn_grad_nbytes": 40,
    } | fields  # fmt: skip
    return UnitProfile(name=name, **values)


def test_activations_that_are_alive_at_each_unit() -> None:
    """By hand: what stays adds up, what a backward brings back is one unit's, or two where one is fetched ahead."""
    kept, again, away = (
        Choice(DRAM, DRAM, DRAM, UpdatePlace.CPU, activation)
        for activation in (ActivationChoice.KEEP, ActivationChoice.RECOMPUTE, ActivationChoice.OFFLOAD_DRAM)
    )
    units = [_line("a"), _line("b"), _line("c"), _line("d", activation_nbytes=50)]  # its input weighs no more than all
    assert list(alive_activations(units, [kept, again, away, again])) == [
        AliveActivations(1000, 0), AliveActivations(1100, 900), AliveActivations(1100, 1000), AliveActivations(1150, 0)
    ]  # fmt: skip
    assert alive_peak_nbytes(units, [kept, again, away, again]) == 1150 + 2 * 1000
    assert alive_peak_nbytes(units, [kept, again, kept, again]) == 2150 + 900


def test_what_a_run_will_hold() -> None:
    """By hand: everything here; streaming with room and without; activations by their choice; the loss's own."""
    units = [_line("a"), _line("b"), _line("rest", param_numel=0, param_nbytes=0, grad_nbytes=0, state_nbytes=0,
                                           activation_nbytes=0, boundary_nbytes=0, workspace_nbytes=500)]  # fmt: skip
    streams = Choice(DRAM, DRAM, DRAM, UpdatePlace.CPU, ActivationChoice.KEEP)
    # Parameters 40, state 200, activations 2000, at the loss 500 more; gradients come later, when those have gone.
    assert held_peak_nbytes(units, [STAY] * 3, 1 << 40) == 40 + 200 + 2000 + 500
    assert held_peak_nbytes(units, [streams, streams, STAY], 1 << 40) == 40 + 2000 + 500
    assert held_peak_nbytes(units, [streams, streams, STAY], 30) == 30 + 2000 + 500
    again = dataclasses.replace(streams, activation=ActivationChoice.RECOMPUTE)
    quiet = [*units[:2], dataclasses.replace(units[2], workspace_nbytes=0)]
    # Backward of b: its input and a's, b's activations again, its newborn gradients beside all parameters.
    assert held_peak_nbytes(quiet, [again, again, STAY], 1 << 40) == 40 + 40 + 200 + 900
    away = dataclasses.replace(streams, activation=ActivationChoice.OFFLOAD_DRAM)
    assert held_peak_nbytes(quiet, [away, away, STAY], 1 << 40) == 40 + 40 + 2 * 1000
    # Kept gradients pile up: at a's backward b's are there, 16 bits wide, beside a's newborn ones.
    small = [dataclasses.replace(unit, activation_nbytes=0, boundary_nbytes=0) for unit in quiet]
    assert held_peak_nbytes(small, [STAY] * 3, 1 << 40) == 40 + 200 + 20 + 40
    assert held_peak_nbytes(small, [streams, streams, STAY], 1 << 40) == 40 + 40 + 20  # b's is on its way down
    assert held_peak_nbytes(small, [streams, streams, STAY], 1 << 40, waits_for_copies=True) == 40 + 40
