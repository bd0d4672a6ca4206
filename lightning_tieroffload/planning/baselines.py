"""Floor 4. The planners that the ILP must beat or equal: brute force, greedy, lifetime, and uniform placements.

Each returns option indices per unit, or ``None`` where it finds nothing that fits; none of them raises for that. Only
``brute_force`` proves anything: that nothing cheaper exists, or that nothing fits.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lightning_tieroffload.concepts import Role, Tier
from lightning_tieroffload.errors import UnsupportedError
from lightning_tieroffload.planning.cost_model import (
    F64,
    I64,
    LANES,
    OPTIONS,
    ActivationChoice,
    Bools,
    Choice,
    CostTables,
    Instance,
    UpdatePlace,
)
from lightning_tieroffload.planning.timeline import BandwidthTimeline, Lifetime, lifetimes

__all__ = ["LIFETIME_THRESHOLD", "brute_force", "greedy", "lifetime_picks", "lifetime_score", "uniform_assignments"]

Picks = tuple[int, ...]

# -------------------------------------------------------------------------------------------------------- brute force

MAX_BRUTE_ASSIGNMENTS = 3_000_000
_BATCH = 16_384


def brute_force(instance: Instance, prefetch_units: int) -> tuple[Picks, float] | None:
    """The cheapest assignment that fits and its step seconds, by trying all; ``None`` if none fits.

    Raises ``UnsupportedError`` above three million assignments (72 options for each of three units are 373,248).
    """
    tables = CostTables(instance, prefetch_units)
    options = [np.flatnonzero(row) for row in tables.allowed]
    num_assignments = int(np.prod([len(row) for row in options], dtype=np.float64))
    if num_assignments > MAX_BRUTE_ASSIGNMENTS:
        raise UnsupportedError(
            f"brute force would try {num_assignments:.3g} assignments for {len(options)} units; at most "
            f'{MAX_BRUTE_ASSIGNMENTS:,} are tried. Use planner="ilp".'
        )
    best: tuple[Picks, float] | None = None
    shape = tuple(len(row) for row in options)
    for start in range(0, num_assignments, _BATCH):
        flat = np.arange(start, min(start + _BATCH, num_assignments))
        columns = np.unravel_index(flat, shape)
        picks: I64 = np.stack([row[column] for row, column in zip(options, columns, strict=True)], axis=1)
        picks = picks[_fits(tables, picks)]
        if not len(picks):
            continue
        step_s = tables.evaluate(picks).step_s
        winner = int(step_s.argmin())
        if best is None or step_s[winner] < best[1]:
            best = tuple(int(o) for o in picks[winner]), float(step_s[winner])
    return best


def _fits(tables: CostTables, picks: I64) -> Bools:
    device, dram, nvme = tables.bytes_of(picks)
    instance = tables.instance
    result: Bools = (
        (device <= instance.device_budget_nbytes)
        & (dram <= instance.dram_budget_nbytes)
        & (nvme <= instance.nvme_budget_nbytes)
    )
    return result


# ------------------------------------------------------------------------------------------------ uniform placements


def uniform_assignments(instance: Instance) -> Iterator[Picks]:
    """Every option given to all units alike (where a unit may not take it, its nearest allowed one)."""
    allowed = instance.allowed()
    seen = set()
    for option in range(len(OPTIONS)):
        picks = tuple(_nearest(option, np.flatnonzero(row)) for row in allowed)
        if picks not in seen:
            seen.add(picks)
            yield picks


def _nearest(option: int, allowed: Iterable[int]) -> int:
    def distance(other: int) -> tuple[int, int]:
        a, b = OPTIONS[option], OPTIONS[int(other)]
        differences = (
            4 * (a.state_home is not b.state_home)
            + 3 * (a.param_home is not b.param_home)
            + 3 * (a.activation is not b.activation)
            + (a.update_on is not b.update_on)
            + (a.grad_home is not b.grad_home)
        )
        return differences, int(other)

    return int(min(allowed, key=distance))


# ------------------------------------------------------------------------------------------------------------- moves

_BUSY_FRAC = 0.7
"""Share of the step above which flash counts as busy and DRAM is used instead."""


@dataclass(frozen=True, slots=True)
class _Move:
    unit: int
    option: int
    io: tuple[tuple[str, float, float, float], ...]
    """(lane, window start, window end, seconds) that the move adds."""
    extra_s: float
    """Compute seconds that it adds."""


class _Placement:
    """Choices while a baseline builds them: all on the device at first, moved away one role of a unit at a time."""

    def __init__(self, instance: Instance, prefetch_units: int) -> None:
        self.instance = instance
        self.tables = CostTables(instance, prefetch_units)
        self.allowed = self.tables.allowed
        self.options = [np.flatnonzero(row) for row in self.allowed]
        self.picks = [_nearest(0, row) for row in self.options]
        step_s = instance.num_micro_batches * sum(u.forward_s + u.backward_s for u in instance.units)
        self.timeline = BandwidthTimeline(step_s)
        self.idle: dict[tuple[int, Role], Lifetime] = {}
        index = {unit.name: i for i, unit in enumerate(instance.units)}
        for life in lifetimes(instance):
            self.idle[index[life.unit], life.role] = life
        durations = [u.forward_s for u in instance.units] + [u.backward_s for u in instance.units]
        self.durations = np.array(durations)
        slack = 1 + instance.machine.allocator_slack_frac
        self.limit = instance.device_budget_nbytes / slack - instance.device_fixed_nbytes

    def overflow(self) -> F64:
        """(2 units,): bytes above the device's budget at each point."""
        points = self.tables.device_points(np.array([self.picks]))[0]
        result: F64 = np.maximum(0.0, points - self.limit)
        return result

    def host_fits(self, unit: int, option: int) -> bool:
        """Whether DRAM and NVME would stay inside their budgets with that choice."""
        trial = self.picks.copy()
        trial[unit] = option
        dram, nvme = self.tables.host_bytes_of(np.array([trial]))
        return bool(dram[0] <= self.instance.dram_budget_nbytes and nvme[0] <= self.instance.nvme_budget_nbytes)

    def fits(self) -> bool:
        return bool(_fits(self.tables, np.array([self.picks]))[0])

    def move(self, unit: int, option: int) -> _Move:
        """What changing a unit's choice adds to the lanes, each in the window in which its shard lies idle."""
        before = self.tables.sec[:, :, unit, self.picks[unit]].sum(axis=1)
        after = self.tables.sec[:, :, unit, option].sum(axis=1)
        role = _role_changed(OPTIONS[self.picks[unit]], OPTIONS[option])
        life = self.idle.get((unit, role))
        start, end = 0.0, self.timeline.step_s
        if life is not None and role is Role.ACTIVATION:
            start, end = life.first_use_s, life.last_use_s
        added = [
            (lane, start, end, float(after[i] - before[i]))
            for i, lane in enumerate(LANES)
            if lane not in ("compute", "pcie", "dram", "disk") and after[i] > before[i]
        ]
        return _Move(unit, option, tuple(added), float(max(0.0, after[0] - before[0])))

    def io_s(self, move: _Move) -> float:
        """Seconds until the move's transfers would be done on the booked timeline, recompute included."""
        return move.extra_s + sum(self.timeline.quote(*io) for io in move.io)

    def apply(self, move: _Move) -> None:
        for io in move.io:
            self.timeline.book(*io)
        self.picks[move.unit] = move.option

    def flash_is_busy(self) -> bool:
        return max(self.timeline.busy_frac("read"), self.timeline.busy_frac("write")) > _BUSY_FRAC


def _role_changed(old: Choice, new: Choice) -> Role:
    if old.activation is not new.activation:
        return Role.ACTIVATION
    return Role.STATE if old.state_home is not new.state_home else Role.PARAM


def _num_roles_changed(old: Choice, new: Choice) -> int:
    update_old, update_new = (
        (old.state_home, old.grad_home, old.update_on),
        (new.state_home, new.grad_home, new.update_on),
    )
    return (old.param_home is not new.param_home) + (update_old != update_new) + (old.activation is not new.activation)


# ------------------------------------------------------------------------------------------------------------ greedy


def greedy(instance: Instance, prefetch_units: int, *, ssd_first: bool = True) -> Picks | None:
    """Move what relieves the most memory pressure for the least I/O time, until everything fits.

    A move's worth is the bytes above the budget that it removes, times how long it removes them, over the seconds
    until its transfers are done on a bandwidth timeline that earlier moves have booked. Source: the greedy planner of
    the TeraIO paper. ``ssd_first``: as there, flash is the target until it is more than 70 % busy, then DRAM; without,
    both compete. Worth only falls while the pressure falls and lanes fill, so stale entries of the heap are re-scored
    when they surface.
    """
    place = _Placement(instance, prefetch_units)
    overflow = place.overflow()
    heap: list[tuple[float, int, int]] = []

    def worth(unit: int, option: int) -> float:
        relieved = _relief(place, unit, option)
        gain = float((place.durations * np.minimum(np.maximum(relieved, 0.0), overflow)).sum())
        return gain / max(place.io_s(place.move(unit, option)), 1e-9)

    def push_moves(unit: int) -> None:
        current = OPTIONS[place.picks[unit]]
        for option in place.options[unit]:
            if instance.options is not None or _num_roles_changed(current, OPTIONS[option]) == 1:
                score = worth(unit, int(option))
                if score > 0:
                    heapq.heappush(heap, (-score, unit, int(option)))

    for unit in range(place.tables.num_units):
        push_moves(unit)
    num_moves = 0
    set_aside: list[tuple[float, int, int]] = []
    while overflow.any() and heap and num_moves < 6 * place.tables.num_units:
        stale, unit, option = heapq.heappop(heap)
        if option == place.picks[unit]:
            continue
        score = worth(unit, option)
        if score <= 0:
            continue
        if score < -stale * (1 - 1e-9) and heap and -heap[0][0] > score:
            heapq.heappush(heap, (-score, unit, option))
            continue
        if not place.host_fits(unit, option):
            continue
        if ssd_first and not _follows_routing(place, OPTIONS[place.picks[unit]], OPTIONS[option]):
            set_aside.append((-score, unit, option))
            if not heap:
                ssd_first = False
                heap, set_aside = set_aside, []
                heapq.heapify(heap)
            continue
        was_busy = place.flash_is_busy()
        place.apply(place.move(unit, option))
        overflow = place.overflow()
        num_moves += 1
        push_moves(unit)
        if set_aside and (place.flash_is_busy() != was_busy or not heap):
            for entry in set_aside:
                heapq.heappush(heap, entry)
            set_aside = []
    return tuple(place.picks) if place.fits() else None


def _follows_routing(place: _Placement, old: Choice, new: Choice) -> bool:
    """Flash first, DRAM once flash is busy; moves that send nothing to a new home always do."""
    if place.instance.nvme_budget_nbytes == 0:
        return True
    to_flash = (
        (new.param_home is Tier.NVME and old.param_home is not Tier.NVME)
        or (new.state_home is Tier.NVME and old.state_home is not Tier.NVME)
        or (new.activation is ActivationChoice.OFFLOAD_NVME and old.activation is not ActivationChoice.OFFLOAD_NVME)
    )
    to_dram = (
        (new.param_home is Tier.DRAM and old.param_home is not Tier.DRAM)
        or (new.state_home is Tier.DRAM and old.state_home is not Tier.DRAM)
        or (new.activation is ActivationChoice.OFFLOAD_DRAM and old.activation is not ActivationChoice.OFFLOAD_DRAM)
    )
    busy = place.flash_is_busy()
    return not ((to_flash and busy) or (to_dram and not busy))


def _relief(place: _Placement, unit: int, option: int) -> F64:
    """(2 units,): bytes that the change takes off each point, without the few in flight at neighbouring points."""
    tables, now, n = place.tables, place.picks[unit], place.tables.num_units
    everywhere = tables.resident[unit, now] - tables.resident[unit, option]
    relieved: F64 = np.full(2 * n, float(everywhere))
    kept = tables.kept[unit, now] - tables.kept[unit, option]
    late = tables.late[unit, now] - tables.late[unit, option]
    for half, own in ((0, tables.own_f), (n, tables.own_b)):
        relieved[half + unit : half + n] += kept
        relieved[half : half + unit + 1] += late
        relieved[half + unit] += (
            own[unit, now] - own[unit, option] + tables.stage[unit, now] - tables.stage[unit, option]
        )
    return relieved


# ---------------------------------------------------------------------------------------------------------- lifetime

LIFETIME_THRESHOLD = 0.75
LIFETIME_COLD_THRESHOLD = 0.9
"""Score above which a shard is moved away, later and during the first five steps."""
LIFETIME_NUM_COLD_STEPS = 5
_FULL_SCORE_NBYTES = 500e6
_FULL_SCORE_IDLE_S = 15.0


def lifetime_score(nbytes: int, idle_s: float) -> float:
    """0.4 min(nbytes / 500 MB, 1) + 0.6 min(idle_s / 15, 1), the TERAIO system's score of a tensor."""
    return 0.4 * min(nbytes / _FULL_SCORE_NBYTES, 1.0) + 0.6 * min(idle_s / _FULL_SCORE_IDLE_S, 1.0)


def lifetime_picks(instance: Instance, prefetch_units: int, *, num_steps_seen: int | None = None) -> Picks | None:
    """Move every shard whose lifetime score passes the threshold, then go on down the scores until everything fits.

    ``num_steps_seen`` below five raises the threshold to 0.9, as in a cold start; ``None`` is any later step. Flash
    is the target until it is more than 70 % busy or full, then DRAM. Never recomputes; the CPU updates what moved.
    """
    place = _Placement(instance, prefetch_units)
    cold = num_steps_seen is not None and num_steps_seen < LIFETIME_NUM_COLD_STEPS
    threshold = LIFETIME_COLD_THRESHOLD if cold else LIFETIME_THRESHOLD
    scored = sorted(
        (
            (lifetime_score(life.nbytes, life.idle_s), unit, role)
            for (unit, role), life in place.idle.items()
            if role is not Role.GRAD  # a gradient goes where its update is
        ),
        key=lambda entry: (-entry[0], entry[1], entry[2].value),
    )
    for score, unit, role in scored:
        if score < threshold and place.fits():
            break
        for test in _lifetime_targets(place, role):
            found = _first_option(place, unit, test)
            if found is not None and place.host_fits(unit, found):
                place.apply(place.move(unit, found))
                break
    return tuple(place.picks) if place.fits() else None


_Test = Callable[[Choice, Choice], bool]


def _lifetime_targets(place: _Placement, role: Role) -> list[_Test]:
    """Tests (old, new) that a role's new choice must pass, the preferred tier's first."""
    tiers = [Tier.DRAM] if place.instance.nvme_budget_nbytes == 0 else [Tier.NVME, Tier.DRAM]
    if place.flash_is_busy():
        tiers.reverse()
    homes = {Tier.DRAM: ActivationChoice.OFFLOAD_DRAM, Tier.NVME: ActivationChoice.OFFLOAD_NVME}

    def test_for(tier: Tier, place_of_update: UpdatePlace) -> _Test:
        def test(old: Choice, new: Choice) -> bool:
            if role is Role.STATE:
                same = new.param_home is old.param_home and new.activation is old.activation
                return same and new.state_home is tier and new.update_on is place_of_update
            if _num_roles_changed(old, new) != 1:
                return False
            return new.param_home is tier if role is Role.PARAM else new.activation is homes[tier]

        return test

    places = (UpdatePlace.CPU, UpdatePlace.DEVICE) if role is Role.STATE else (UpdatePlace.CPU,)
    return [test_for(tier, update) for tier, update in itertools.product(tiers, places)]


def _first_option(place: _Placement, unit: int, test: _Test) -> int | None:
    current = OPTIONS[place.picks[unit]]
    for option in place.options[unit]:
        if option != place.picks[unit] and test(current, OPTIONS[option]):
            return int(option)
    return None
