"""Floor 5. From an instance to a plan: which planner runs, what each solver outcome leads to, and the least budget.

``solve`` is one planner's answer by the cost model. ``best_plan`` puts all planners' answers through the simulator and
takes the fastest; it is what the engine and the command use.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.errors import CapacityError, ConfigError, InfeasiblePlanError
from lightning_tieroffload.planning import baselines
from lightning_tieroffload.planning.cost_model import OPTIONS, CostTables, Instance, UpdatePlace
from lightning_tieroffload.planning.ilp import Outcome, OutcomeKind, solve_programme
from lightning_tieroffload.planning.plan import Plan, check_plan, plan_of
from lightning_tieroffload.planning.profile import MachineProfile, UnitProfile
from lightning_tieroffload.planning.simulator import rank_plans, with_forecast
from lightning_tieroffload.sizes import GiB, format_nbytes

__all__ = ["PLANNERS", "best_plan", "random_instance", "solve", "value_of_more"]

PLANNERS = ("ilp", "greedy", "lifetime", "brute")
DEFAULT_TIME_LIMIT_S = 8.0
_LONG_GAP = 2e-3
"""Relative gap asked of long models' programmes, under what measuring a unit's seconds is off by."""
_WORTH_TRYING_FRAC = 0.015
"""A second prefetch distance is branched on only if its bound promises a step at least this much shorter: long models'
bounds are about one per cent below what is then found."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    picks: tuple[int, ...]
    prefetch_units: int
    step_s: float
    planner: str


def solve(
    instance: Instance,
    planner: str = "ilp",
    *,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    mip_rel_gap: float | None = None,
    forecast: bool = True,
) -> Plan:
    """One planner's plan for ``instance``, checked by ``check_plan``.

    ``"ilp"``: the cheapest plan (proven for a few units, for long models to within the recorded gap); when the time
    limit strikes, the better of the incumbent and greedy's plan, with the gap. ``"brute"``: every combination.
    ``"greedy"``, ``"lifetime"``: the baselines; where one of them finds nothing that fits though something does, the
    ILP's plan is returned and ``plan.note`` says so. ``forecast=False`` leaves the simulator out.

    Raises ``InfeasiblePlanError`` if nothing fits, naming the tier and the least budget that works with the other
    budgets as they are; ``CapacityError`` if the time limit struck before anything was found; ``ConfigError`` for an
    unknown planner. Deterministic as long as the time limit does not strike.
    """
    if planner not in PLANNERS:
        raise ConfigError(f"planner={planner!r} is unknown; choose one of {', '.join(PLANNERS)}.")
    if planner == "brute":
        plan = _solve_brute(instance)
    elif planner == "ilp":
        plan = _solve_ilp(instance, time_limit_s, mip_rel_gap)
    else:
        plan = _solve_baseline(instance, planner, time_limit_s, mip_rel_gap)
    check_plan(instance, plan)
    return with_forecast(instance, plan) if forecast else plan


def best_plan(instance: Instance, planner: str = "ilp", *, time_limit_s: float = DEFAULT_TIME_LIMIT_S) -> Plan:
    """The plan with the fastest simulated step among the planners' answers; raises as ``solve`` does.

    With ``planner="ilp"`` the candidates are the ILP's plans at each prefetch distance and with all updates in one
    place, both baselines and the best uniform placements (all recomputed and offloaded, all kept, ...) that fit; other
    planners' answers are taken as they are.
    """
    if planner != "ilp":
        return solve(instance, planner, time_limit_s=time_limit_s)
    plans = [solve(instance, "ilp", time_limit_s=time_limit_s)]
    variants = [
        dataclasses.replace(instance, prefetch_units=(prefetch,))
        for prefetch in instance.prefetch_units
        if prefetch != plans[0].prefetch_units
    ]
    # The cost model lets lanes overlap perfectly; where two of them share DRAM, one place alone can be faster.
    variants += _in_one_place(instance)
    for variant in variants:
        outcome_plan = _solve_ilp_or_none(variant, time_limit_s)
        if outcome_plan is not None:
            check_plan(instance, outcome_plan)
            plans.append(with_forecast(instance, outcome_plan))
    for candidate in _baseline_candidates(instance):
        plan = _plan_from(instance, candidate, note=f"{candidate.planner} placement; its simulated step is the fastest")
        plans.append(with_forecast(instance, plan))
    return rank_plans(plans)[0]


def _in_one_place(instance: Instance) -> list[Instance]:
    """The problem with all updates on the CPU, and on the device, where units have that choice; none if none has."""
    allowed = [[OPTIONS[column] for column in np.flatnonzero(row)] for row in instance.allowed()]
    variants = []
    for place in UpdatePlace:
        # Frozen units update nothing, and a unit that can be updated elsewhere only stays as it is.
        left = [
            ([option for option in options if option.update_on is place] if unit.trained_numel else []) or options
            for unit, options in zip(instance.units, allowed, strict=True)
        ]
        if left != allowed:
            codes = tuple(tuple(option.code for option in options) for options in left)
            variants.append(dataclasses.replace(instance, options=codes))
    return variants


def _solve_ilp_or_none(instance: Instance, time_limit_s: float) -> Plan | None:
    """The ILP's plan, or ``None`` if there is none; spends no time on finding the least budget."""
    outcomes = _outcomes(instance, time_limit_s, None)
    best = _cheapest(_candidate(instance, p, outcome.picks, "ilp") for p, outcome in outcomes.items())
    return None if best is None else _plan_from(instance, best, mip_gap=_gap(best, outcomes))


def value_of_more(
    instance: Instance, plan: Plan, *, more_nbytes: int = GiB, forecast: bool = False
) -> dict[str, float]:
    """Seconds a step that ``more_nbytes`` more budget on each tier would save, by solving again; 0 if nothing.

    ``forecast``: compare simulated steps instead of the cost model's.
    """
    saved = {}
    for tier in Tier:
        if tier is Tier.NVME and instance.nvme_budget_nbytes == 0:
            continue
        richer = solve(instance.with_budget(tier, instance.budget_nbytes(tier) + more_nbytes), forecast=forecast)
        before, after = plan.step_s, richer.step_s
        if forecast:
            before, after = plan.forecast.step_s, richer.forecast.step_s
        saved[tier.name.lower()] = max(0.0, before - after)
    return saved


# ------------------------------------------------------------------------------------------------------- each planner


def _plan_from(instance: Instance, candidate: _Candidate, *, mip_gap: float | None = None, note: str = "") -> Plan:
    tables = _tables(instance, candidate.prefetch_units)
    return plan_of(instance, tables, candidate.picks, planner=candidate.planner, mip_gap=mip_gap, note=note)


@functools.lru_cache(maxsize=4)
def _tables(instance: Instance, prefetch: int) -> CostTables:
    """Tables are only read, and an instance is frozen, so that equal instances may share them."""
    return CostTables(instance, prefetch)


def _candidate(instance: Instance, prefetch: int, picks: tuple[int, ...] | None, planner: str) -> _Candidate | None:
    """The assignment with its exact cost, or ``None`` if it is none or does not fit."""
    if picks is None:
        return None
    cost = _tables(instance, prefetch).cost(picks)
    if any(cost.peak_nbytes(tier) > instance.budget_nbytes(tier) * (1 + 1e-9) for tier in Tier):
        return None
    return _Candidate(picks, prefetch, cost.step_s, planner)


def _cheapest(candidates: Iterable[_Candidate | None]) -> _Candidate | None:
    found = [candidate for candidate in candidates if candidate is not None]
    return min(found, key=lambda candidate: candidate.step_s) if found else None


def _baseline_candidates(instance: Instance) -> list[_Candidate]:
    """What greedy (with flash first, and not), lifetime and the uniform placements find."""
    found: list[_Candidate | None] = []
    for prefetch in instance.prefetch_units:
        for ssd_first in (True, False) if instance.nvme_budget_nbytes else (True,):
            picks = baselines.greedy(instance, prefetch, ssd_first=ssd_first)
            found.append(_candidate(instance, prefetch, picks, "greedy"))
        found.append(_candidate(instance, prefetch, baselines.lifetime_picks(instance, prefetch), "lifetime"))
    return [candidate for candidate in found if candidate is not None] + _uniform_candidates(instance)


def _uniform_candidates(instance: Instance) -> list[_Candidate]:
    """The four cheapest uniform placements that fit, at each prefetch distance."""
    found: list[_Candidate] = []
    same = list(baselines.uniform_assignments(instance))
    for prefetch in instance.prefetch_units:
        tables = _tables(instance, prefetch)
        picks = np.array(same, dtype=np.int64)
        peaks = np.stack(tables.bytes_of(picks), axis=1)
        picks = picks[(peaks <= [instance.budget_nbytes(tier) for tier in Tier]).all(axis=1)]
        if len(picks):
            step_s = tables.evaluate(picks).step_s
            for row in np.argsort(step_s, kind="stable")[:4]:
                found.append(_Candidate(tuple(picks[row].tolist()), prefetch, float(step_s[row]), "uniform"))
    return found


def _solve_brute(instance: Instance) -> Plan:
    best: _Candidate | None = None
    for prefetch in instance.prefetch_units:
        found = baselines.brute_force(instance, prefetch)
        if found is not None and (best is None or found[1] < best.step_s):
            best = _Candidate(found[0], prefetch, found[1], "brute")
    if best is None:
        raise _infeasible(instance)
    return _plan_from(instance, best, mip_gap=0.0)


def _solve_baseline(instance: Instance, planner: str, time_limit_s: float, mip_rel_gap: float | None) -> Plan:
    def run(prefetch: int) -> tuple[int, ...] | None:
        if planner == "greedy":
            return baselines.greedy(instance, prefetch)
        return baselines.lifetime_picks(instance, prefetch)

    best = _cheapest(_candidate(instance, p, run(p), planner) for p in instance.prefetch_units)
    if best is not None:
        return _plan_from(instance, best)
    plan = _solve_ilp(instance, time_limit_s, mip_rel_gap)
    return dataclasses.replace(plan, note=f"{planner} found no plan that fits; this is the ILP's")


_PROVEN = (OutcomeKind.OPTIMAL, OutcomeKind.INFEASIBLE, OutcomeKind.CUT_OFF)


def _outcomes(instance: Instance, time_limit_s: float, mip_rel_gap: float | None) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    best_s = math.inf
    for prefetch in instance.prefetch_units:
        outcome = solve_programme(
            instance,
            prefetch,
            time_limit_s=time_limit_s / len(instance.prefetch_units),
            mip_rel_gap=mip_rel_gap or 0.0,
            long_mip_rel_gap=_LONG_GAP if mip_rel_gap is None else mip_rel_gap,
            cut_off=best_s * (1 - _WORTH_TRYING_FRAC),
        )
        outcomes[prefetch] = outcome
        if outcome.picks is not None:
            best_s = min(best_s, _tables(instance, prefetch).cost(outcome.picks).step_s)
    return outcomes


def _solve_ilp(instance: Instance, time_limit_s: float, mip_rel_gap: float | None) -> Plan:
    started_s = time.monotonic()
    outcomes = _outcomes(instance, time_limit_s, mip_rel_gap)
    best = _cheapest(_candidate(instance, p, outcome.picks, "ilp") for p, outcome in outcomes.items())
    proven = all(o.kind in _PROVEN for o in outcomes.values())
    if proven and all(outcome.is_exact for outcome in outcomes.values()):
        if best is None:
            raise _infeasible(instance)
        return _plan_from(instance, best, mip_gap=_gap(best, outcomes))
    is_settled = best is not None and (proven or time.monotonic() < started_s + time_limit_s)
    others = _uniform_candidates(instance) if is_settled else _baseline_candidates(instance)
    chosen = _cheapest([best, *others])
    if chosen is None:
        if all(outcome.kind is OutcomeKind.INFEASIBLE for outcome in outcomes.values()):
            raise _infeasible(instance)
        said = "; ".join(f"prefetch {p}: {o.kind.value}: {o.message}" for p, o in outcomes.items())
        raise CapacityError(
            f"no plan was found for {len(instance.units)} units within {time_limit_s:g} s, nor a proof that there is "
            f"none ({said}). Raise a budget, or allow the planner more time."
        )
    note = "" if proven else f"the solver stopped early ({'; '.join(o.kind.value for o in outcomes.values())})"
    if chosen is not best:
        note = f"{note or 'the grouped programme was too coarse'}; the {chosen.planner} placement is cheaper"
    return dataclasses.replace(_plan_from(instance, chosen, mip_gap=_gap(chosen, outcomes), note=note), planner="ilp")


def _gap(chosen: _Candidate, outcomes: Mapping[int, Outcome]) -> float:
    """Relative distance to the least lower bound; without a bound, to the compute-only step by ``plan_of``'s rule."""
    bounds = [outcome.bound for outcome in outcomes.values() if outcome.kind is not OutcomeKind.INFEASIBLE]
    if not bounds:
        return 0.0
    bound = max(0.0, min(bounds))
    gap = (chosen.step_s - bound) / chosen.step_s if chosen.step_s > 0 else 0.0
    return gap if gap > 1e-8 else 0.0


# ------------------------------------------------------------------------------------------------------- infeasible

_LEAST_GAP = 1e-3
_LEAST_TIME_LIMIT_S = 20.0
_UNLIMITED_NBYTES = 1 << 60


def _infeasible(instance: Instance) -> InfeasiblePlanError:
    """The error that names the tier whose budget has to grow least, and to what; see ``_least_budget``."""
    tiers = [tier for tier in Tier if tier is not Tier.NVME or instance.nvme_budget_nbytes > 0]
    least = {tier: _least_budget(instance, tier) for tier in tiers}
    known = {tier: nbytes for tier, nbytes in least.items() if nbytes is not None}
    budgets = ", ".join(f"{tier.name.lower()}_budget {format_nbytes(instance.budget_nbytes(tier))}" for tier in tiers)
    head = f"no plan for {len(instance.units)} units fits {budgets}."
    if known:
        tier = min(known, key=lambda t: known[t] - instance.budget_nbytes(t))
        ways = [f"{tier.name.lower()}_budget to {format_nbytes(known[tier])} ({known[tier]} bytes)"]
        ways += [f"{t.name.lower()}_budget to {format_nbytes(n)}" for t, n in known.items() if t is not tier]
        return InfeasiblePlanError(
            f"{head} {tier.name} is too small: raise {', or '.join(ways)}. Smaller batches need less too.",
            tier=tier.name,
            least_budget_nbytes=known[tier],
        )
    # No single budget is enough: name the device's least with unlimited host tiers, and the DRAM that goes with it.
    roomy = instance.with_budget(Tier.DRAM, _UNLIMITED_NBYTES)
    device = _least_budget(roomy, Tier.DEVICE)
    if device is None:
        return InfeasiblePlanError(f"{head} The settings forbid every placement that any budget could hold.")
    dram = _least_budget(instance.with_budget(Tier.DEVICE, max(device, instance.device_budget_nbytes)), Tier.DRAM)
    with_dram = f" and dram_budget to {format_nbytes(dram)} ({dram} bytes)" if dram is not None else ""
    return InfeasiblePlanError(
        f"{head} DEVICE and DRAM are both too small: raise device_budget to {format_nbytes(device)} ({device} bytes)"
        f"{with_dram}. Smaller batches need less too.",
        tier=Tier.DEVICE.name,
        least_budget_nbytes=device,
    )


def _least_budget(instance: Instance, tier: Tier) -> int | None:
    """The least budget of ``tier`` with which ``solve`` finds a plan, the others as they are; ``None`` if none does.

    Found by minimising it as a programme; then, because long models' programmes are grouped and so a little careful,
    by halving the way down as long as 2 % less still works.
    """
    peaks = []
    all_exact = True
    for prefetch in instance.prefetch_units:
        outcome = solve_programme(
            instance, prefetch, time_limit_s=_LEAST_TIME_LIMIT_S, mip_rel_gap=_LEAST_GAP, minimise=tier
        )
        all_exact &= outcome.is_exact and outcome.kind in (OutcomeKind.OPTIMAL, OutcomeKind.INFEASIBLE)
        if outcome.picks is not None:
            peaks.append(CostTables(instance, prefetch).cost(outcome.picks).peak_nbytes(tier))
    if not peaks:
        return None
    least = math.ceil(min(peaks) * (1 + 1e-6)) + 1
    if all_exact:
        return least
    while not _is_feasible(instance.with_budget(tier, least)):
        least = math.ceil(least * 1.01)
    while _is_feasible(instance.with_budget(tier, math.floor(least * 0.98))):
        least = math.floor(least * 0.98)
    return least


def _is_feasible(instance: Instance) -> bool:
    """Whether ``solve`` finds a plan; takes the same way as ``_solve_ilp`` without asking for a good one."""
    if _uniform_candidates(instance):
        return True
    for prefetch in instance.prefetch_units:
        outcome = solve_programme(instance, prefetch, time_limit_s=_LEAST_TIME_LIMIT_S, mip_rel_gap=1.0)
        if _candidate(instance, prefetch, outcome.picks, "ilp") is not None:
            return True
    return bool(_baseline_candidates(instance))


# -------------------------------------------------------------------------------------------------- random instances


def random_instance(seed: int, num_units: int, *, num_options: int | None = None) -> Instance:
    """A small random planning problem that has a solution, the same for the same arguments.

    Units, machine, budgets, accumulation and clipping are drawn from ``seed``. The budgets are those of one random
    assignment, a little enlarged, so that they bind. Up to three units may take all options (72 each); more units get
    ``num_options`` random ones each (8 unless given), so that brute force can enumerate them.
    """
    rng = random.Random(f"{seed}/{num_units}/{num_options}")
    units = tuple(_random_unit(rng, f"unit{i}") for i in range(num_units))
    machine = MachineProfile(
        name=f"random-{seed}",
        h2d_bytes_per_s=rng.uniform(10e9, 60e9),
        d2h_bytes_per_s=rng.uniform(10e9, 60e9),
        pcie_bytes_per_s=rng.uniform(20e9, 100e9),
        dram_bytes_per_s=rng.uniform(20e9, 150e9),
        read_bytes_per_s=rng.uniform(1e9, 20e9),
        write_bytes_per_s=rng.uniform(1e9, 20e9),
        disk_bytes_per_s=rng.uniform(1e9, 20e9),
        cpu_update_numel_per_s=rng.uniform(0.5e9, 5e9),
        device_update_numel_per_s=rng.uniform(20e9, 150e9),
        overlap_loss_frac=rng.uniform(0.005, 0.05),
        update_loss_frac=rng.uniform(0.005, 0.05),
        allocator_slack_frac=rng.choice([0.0, 0.03]),
    )
    huge = 1 << 50
    instance = Instance(
        units=units,
        machine=machine,
        device_budget_nbytes=huge,
        dram_budget_nbytes=huge,
        nvme_budget_nbytes=rng.choice([0, huge, huge]),
        num_micro_batches=rng.choice([1, 1, 2, 4]),
        clip=rng.random() < 0.5,
        prefetch_units=rng.choice([(1,), (2,), (2, 1)]),
        device_fixed_nbytes=rng.choice([0, rng.randrange(10**9)]),
        dram_fixed_nbytes=rng.choice([0, rng.randrange(10**9)]),
    )
    allowed = instance.allowed()
    if num_options is None and num_units > 3:
        num_options = 8
    if num_options is not None:
        drawn = [rng.sample(np.flatnonzero(row).tolist(), min(num_options, int(row.sum()))) for row in allowed]
        codes = tuple(tuple(OPTIONS[option].code for option in sorted(row)) for row in drawn)
        instance = dataclasses.replace(instance, options=codes)
        allowed = instance.allowed()
    picks = [rng.choice(np.flatnonzero(row).tolist()) for row in allowed]
    cost = CostTables(instance, instance.prefetch_units[0]).cost(picks)
    for tier in Tier:
        if instance.budget_nbytes(tier):
            least = math.ceil(cost.peak_nbytes(tier)) + 1
            instance = instance.with_budget(tier, math.ceil(least * rng.choice([1.0, 1.02, 1.3, 2.0])))
    return instance


def _random_unit(rng: random.Random, name: str) -> UnitProfile:
    numel = int(10 ** rng.uniform(6.5, 9))
    trained = rng.random() < 0.9
    forward_s = 10 ** rng.uniform(-3.5, -0.5)
    activation_nbytes = int(10 ** rng.uniform(7, 10))
    return UnitProfile(
        name=name,
        param_numel=numel,
        param_nbytes=2 * numel,
        grad_nbytes=rng.choice([2, 4]) * numel if trained else 0,
        state_nbytes=rng.choice([10, 12]) * numel if trained else 0,
        activation_nbytes=activation_nbytes,
        forward_s=forward_s,
        backward_s=forward_s * rng.uniform(1.5, 2.5),
        recompute_s=rng.choice([None, 0.9 * forward_s]),
        boundary_nbytes=int(activation_nbytes * rng.uniform(0.0, 0.2)),
        workspace_nbytes=int(activation_nbytes * rng.uniform(0.0, 0.5)),
        can_recompute=rng.random() < 0.9,
        can_offload_activation=rng.random() < 0.9,
    )
