"""Floor 4. The integer linear programme: one variable per unit and option, solved by HiGHS through scipy.

Owns the translation of ``CostTables`` to rows and columns, and what the solver's outcomes mean. Falling back to a
baseline and naming the least budget are ``solver.py``'s.

[Note: exact and long models]
Up to ``MAX_EXACT_UNITS`` units, or ``MAX_EXACT_OPTIONS`` undominated options in all, each unit has its own binaries and
the programme is the cost model exactly. Beyond that branching takes minutes, while the linear relaxation takes
milliseconds and is within about one per cent of the optimum; so it is solved first, each unit keeps the options
that it uses and the few with the least reduced cost, and only those are branched on, for so many nodes. What is left
unproven is the distance to the relaxation's bound.

[Note: segments]
In a long model, runs of consecutive units become *segments*, within which units of equal profile share an integer
count per option. The first units of a run stay alone: they are needed first by the next forward, so that rows about
updates bind there. Rows hold at the ends of segments: bytes are counted as if the whole segment were already in the
state of its heaviest point (never too few), seconds as at its last unit. The counts are dealt out in each segment so
that what frees activations comes first, which is where it pays; the plan's cost is then computed exactly, and if it
does not fit after all, the programme is solved again with less.

[Note: running sums]
Rows such as "everything kept up to unit i" would have n entries each, n rows of them. A continuous variable per segment
that equals its neighbour's plus this segment's share makes the matrix linear in n; presolve removes them where it pays.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import enum
import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.planning.cost_model import F64, LANES, OPTIONS, CostTables, Instance
from lightning_tieroffload.planning.profile import UnitProfile

__all__ = ["MAX_EXACT_OPTIONS", "Outcome", "OutcomeKind", "solve_programme"]

MAX_EXACT_UNITS = 3
MAX_EXACT_OPTIONS = 100
MAX_SINGLE_UNITS = 8
_LEADING_PIECES = (1, 1, 2)
_NUM_EVEN_PIECES = 4
_NUM_KEPT_OPTIONS = 2
_NODE_LIMIT = 100
_BROKE_DOWN = 4  # scipy's code for numerical difficulties
_MAX_RETRIES = 4
_TIME_SCALE = 1000.0
"""The compute-only step in the solver's unit of time: HiGHS stops at an absolute gap of 1e-6, so this is 1e-9 of it."""
_BYTES_SCALE = 1000.0

Expr = dict[int, float]


class OutcomeKind(enum.Enum):
    """What came out. ``LIMIT`` (of time or nodes) and ``FAILED`` may or may not come with an assignment."""

    OPTIMAL = "optimal"
    LIMIT = "limit reached"
    CUT_OFF = "cannot be better"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """An assignment (option index per unit) or ``None``, and what is proven about it."""

    kind: OutcomeKind
    picks: tuple[int, ...] | None
    bound: float
    """Lower bound: seconds, or bytes when a budget was minimised. ``-inf`` if the solver gave none."""
    is_exact: bool
    """Whether the programme was the cost model exactly, see [Note: exact and long models]."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Group:
    """Units of one segment with the same profile; ``units`` are their indices, in order."""

    units: tuple[int, ...]
    options: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Segment:
    first: int
    last: int
    groups: tuple[_Group, ...]

    @property
    def is_single(self) -> bool:
        return self.first == self.last


def _profile_key(unit: UnitProfile) -> tuple[object, ...]:
    """Equal for units that cost the same: bytes equal, seconds within the noise of measuring them (7 %)."""

    def bucket(seconds: float) -> int:
        return round(math.log(seconds) / math.log(1.07)) if seconds > 0 else -(10**6)

    fields = dataclasses.asdict(dataclasses.replace(unit, name="", recompute_s=unit.rerun_s))
    return tuple(bucket(v) if name.endswith("_s") else v for name, v in fields.items())


def _segments(tables: CostTables) -> tuple[list[_Segment], bool]:
    """Cut the units into segments, see [Note: segments], and say whether the programme will be exact."""
    units, n = tables.instance.units, tables.num_units
    needed = tables.needed()
    options = [tuple(int(o) for o in np.flatnonzero(needed[i])) for i in range(n)]
    is_exact = n <= MAX_EXACT_UNITS or int(needed.sum()) <= MAX_EXACT_OPTIONS
    if n <= MAX_SINGLE_UNITS or is_exact:
        return [_Segment(i, i, (_Group((i,), options[i]),)) for i in range(n)], is_exact
    keys = [(_profile_key(unit), tables.allowed[i].tobytes()) for i, unit in enumerate(units)]
    repeats = collections.Counter(keys)
    cuts: list[tuple[int, int]] = []
    start = 0
    for i in range(n + 1):
        if i == n or repeats[keys[i]] < 3:
            cuts += _pieces(start, i)
            cuts += [(i, i + 1)] if i < n else []
            start = i + 1
    segments = []
    for begin, stop in cuts:
        members: dict[object, list[int]] = {}
        for i in range(begin, stop):
            members.setdefault(keys[i], []).append(i)
        # Units at a turn of the step may need other options than their equals: keep what any member needs.
        groups = [_Group(tuple(m), tuple(sorted({o for i in m for o in options[i]}))) for m in members.values()]
        segments.append(_Segment(begin, stop - 1, tuple(groups)))
    return segments, False


def _pieces(start: int, stop: int) -> list[tuple[int, int]]:
    """Cut a run of repeating units: a few short pieces where rows bind, then even ones."""
    cuts = []
    for length in _LEADING_PIECES:
        if start + length < stop:
            cuts.append((start, start + length))
            start += length
    if start < stop:
        edges = np.linspace(start, stop, min(stop - start, _NUM_EVEN_PIECES) + 1).round().astype(int)
        cuts += [(int(a), int(b)) for a, b in itertools.pairwise(edges)]
    return cuts


class _Programme:
    """Rows, columns and objective as they are collected; ``run`` hands them to HiGHS."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.objective: Expr = {}
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []

    def variable(self, upper: float = math.inf, integral: bool = False) -> int:
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integral.append(int(integral))
        return len(self.lower) - 1

    def row(self, expr: Mapping[int, float], lower: float, upper: float) -> None:
        for column, value in expr.items():
            if value != 0.0:
                self._rows.append(len(self._row_lower))
                self._columns.append(column)
                self._values.append(value)
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def at_most(self, expr: Mapping[int, float], upper: float) -> None:
        self.row(expr, -math.inf, upper)

    def equals(self, variable: int, *exprs: Mapping[int, float]) -> None:
        """variable = sum of exprs."""
        self.row(_add(*exprs, {variable: -1.0}), 0.0, 0.0)

    def _matrix(self) -> scipy.sparse.csr_array:
        shape = (len(self._row_lower), len(self.lower))
        return scipy.sparse.csr_array((self._values, (self._rows, self._columns)), shape=shape)

    def _cost(self) -> F64:
        cost = np.zeros(len(self.lower))
        for column, value in self.objective.items():
            cost[column] += value
        return cost

    def run(
        self, time_limit_s: float, mip_rel_gap: float, node_limit: int | None = None
    ) -> scipy.optimize.OptimizeResult:
        """The integer programme."""
        options = {"time_limit": max(0.01, time_limit_s), "mip_rel_gap": mip_rel_gap}
        if node_limit is not None:
            options["node_limit"] = node_limit
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=RuntimeWarning)
            return _solved(
                scipy.optimize.milp,
                self._cost(),
                integrality=np.array(self.integral),
                bounds=scipy.optimize.Bounds(np.array(self.lower), np.array(self.upper)),
                constraints=scipy.optimize.LinearConstraint(self._matrix(), self._row_lower, self._row_upper),
                options=options,
            )

    def run_relaxed(self, time_limit_s: float) -> scipy.optimize.OptimizeResult:
        """The same without integrality, with reduced costs in ``.lower.marginals``."""
        matrix, low, high = self._matrix(), np.array(self._row_lower), np.array(self._row_upper)
        equal = low == high
        at_most, at_least = ~equal & np.isfinite(high), ~equal & np.isfinite(low)
        return _solved(
            scipy.optimize.linprog,
            self._cost(),
            A_ub=scipy.sparse.vstack([matrix[at_most], -matrix[at_least]]),
            b_ub=np.concatenate([high[at_most], -low[at_least]]),
            A_eq=matrix[equal],
            b_eq=low[equal],
            bounds=np.stack([self.lower, self.upper], axis=1),
            method="highs",
            options={"time_limit": max(0.01, time_limit_s)},
        )


def _add(*exprs: Mapping[int, float]) -> Expr:
    total: Expr = {}
    for expr in exprs:
        for column, value in expr.items():
            total[column] = total.get(column, 0.0) + value
    return total


def _times(factor: float, expr: Mapping[int, float]) -> Expr:
    return {column: factor * value for column, value in expr.items()}


class _Builder:
    """Turns tables into a programme. ``minimise`` frees one tier's budget and minimises it instead of the step."""

    def __init__(self, tables: CostTables, segments: Sequence[_Segment], shrink: F64, minimise: Tier | None) -> None:
        self.tables, self.segments, self.minimise = tables, segments, minimise
        self.instance = tables.instance
        self.programme = _Programme()
        self.shrink = shrink
        self._owner = [s for s, segment in enumerate(segments) for _ in range(segment.first, segment.last + 1)]
        self.counts: list[list[dict[int, int]]] = []
        self.used: list[list[dict[int, int]]] = []
        compute_s = self.instance.num_micro_batches * sum(u.forward_s + u.backward_s for u in self.instance.units)
        self.s = _TIME_SCALE / compute_s if compute_s > 0 else _TIME_SCALE
        self.bytes_scale = self._bytes_scales()
        self.scale = self.s if minimise is None else self.bytes_scale[minimise]
        """What the objective's unit is worth: multiply seconds, or bytes, by it."""
        self.budget = self.programme.variable() if minimise is not None else -1
        self._choices()
        self._bytes()
        if minimise is None:
            self._seconds()
        else:
            self.programme.objective = {self.budget: 1.0}

    def _bytes_scales(self) -> list[float]:
        tables = self.tables
        spread = [tables.resident + tables.kept + tables.stage, tables.dram, tables.nvme]
        scales = []
        for tier in Tier:
            whole = float(self.instance.budget_nbytes(tier))
            if tier is self.minimise or whole <= 0:
                whole = float(np.where(tables.allowed, spread[tier], 0.0).max(axis=1).sum()) or 1.0
            scales.append(_BYTES_SCALE / whole)
        return scales

    # ------------------------------------------------------------------------------------------------- variables
    def _choices(self) -> None:
        for segment in self.segments:
            counts: list[dict[int, int]] = []
            used: list[dict[int, int]] = []
            for group in segment.groups:
                many = len(group.units)
                columns = {o: self.programme.variable(many, integral=True) for o in group.options}
                self.programme.row(dict.fromkeys(columns.values(), 1.0), many, many)
                counts.append(columns)
                used.append({})
            self.counts.append(counts)
            self.used.append(used)

    def _sum(self, s: int, table: F64) -> Expr:
        """The segment's total of ``table``."""
        expr: Expr = {}
        for group, columns in zip(self.segments[s].groups, self.counts[s], strict=True):
            # Members differ only by measuring noise or by standing at a turn; their mean is the segment's total exactly
            # when all take the same option, and close to it otherwise.
            values = table[list(group.units)].mean(axis=0)
            for option, column in columns.items():
                expr[column] = float(values[option])
        return expr

    def _most(self, s: int, table: F64) -> Expr:
        """The most of ``table`` over the units of the segment: exact for one unit, else a variable above all used."""
        segment = self.segments[s]
        if segment.is_single:
            return self._sum(s, table)
        top: dict[tuple[int, int], float] = {}
        for g, group in enumerate(segment.groups):
            for option in group.options:
                value = float(table[list(group.units), option].max())
                if value > 0:
                    top[g, option] = value
        if not top:
            return {}
        variable = self.programme.variable()
        always = all(len(group.options) == sum(g == key[0] for key in top) for g, group in enumerate(segment.groups))
        if always and len(set(top.values())) == 1:
            self.programme.row({variable: 1.0}, next(iter(top.values())), math.inf)
            return {variable: 1.0}
        for (g, option), value in top.items():
            self.programme.row({variable: 1.0, self._is_used(s, g, option): -value}, 0.0, math.inf)
        return {variable: 1.0}

    def _is_used(self, s: int, g: int, option: int) -> int:
        known = self.used[s][g]
        if option not in known:
            many = len(self.segments[s].groups[g].units)
            known[option] = self.programme.variable(1.0, integral=True)
            self.programme.at_most({self.counts[s][g][option]: 1.0, known[option]: -float(many)}, 0.0)
        return known[option]

    def _running(self, exprs: Sequence[Expr]) -> list[Expr]:
        """Running sums; see [Note: running sums]."""
        sums: list[Expr] = []
        for expr in exprs:
            before = sums[-1] if sums else {}
            variable = self.programme.variable()
            self.programme.equals(variable, before, expr)
            sums.append({variable: 1.0})
        return sums

    # ----------------------------------------------------------------------------------------------------- bytes
    def _limit(self, tier: Tier, expr: Expr, fixed_nbytes: float, slack: float = 0.0) -> None:
        scale, grow = self.bytes_scale[tier], 1.0 + slack
        row = _times(grow, expr)
        if tier is self.minimise:
            self.programme.at_most(_add(row, {self.budget: -1.0}), -grow * fixed_nbytes * scale)
        else:
            most = self.instance.budget_nbytes(tier) * float(self.shrink[tier])
            self.programme.at_most(row, (most - grow * fixed_nbytes) * scale)

    def _bytes(self) -> None:
        tables, instance, num_segments = self.tables, self.instance, len(self.segments)
        every = range(num_segments)
        scale = self.bytes_scale[Tier.DEVICE]
        total = self.programme.variable()
        self.programme.equals(total, *(self._sum(s, tables.resident * scale) for s in every))
        kept = self._running([self._sum(s, tables.kept * scale) for s in every])
        late: list[Expr] = [{} for _ in every]
        if tables.late.any():
            late = self._running([self._sum(s, tables.late * scale) for s in reversed(every)])[::-1]
        stage = [self._most(s, tables.stage * scale) for s in every]
        own_f = [self._most(s, tables.own_f * scale) for s in every]
        own_b = [self._most(s, tables.own_b * scale) for s in every]
        act = [self._most(s, tables.act_in_flight * scale) for s in every]
        grad = [self._most(s, tables.grad_in_flight * scale) for s in every]
        update = [self._most(s, tables.update_stage * scale) for s in every]
        in_flight: list[Expr] = [{} for _ in every]
        after: Expr = {}
        for s in reversed(every):
            if not update[s] and not after:
                continue
            variable = self.programme.variable()
            pairs = [_add(update[s], update[s + 1] if s + 1 < num_segments else {})]
            if not self.segments[s].is_single:
                pairs.append(_times(2.0, update[s]))
            for lower in [*pairs, after]:
                if lower:
                    self.programme.at_most(_add(lower, {variable: -1.0}), 0.0)
            after = in_flight[s] = {variable: 1.0}
        slack = instance.machine.allocator_slack_frac
        fixed = instance.device_fixed_nbytes
        for s in every:
            base = _add({total: 1.0}, kept[s], late[s])
            for window, before in self._windows(s, backward=False):
                here = _add(
                    base, own_f[s], in_flight[s], act[before] if before >= 0 else {}, *(stage[w] for w in window)
                )
                self._limit(Tier.DEVICE, here, fixed, slack)
            for window, before, behind in self._windows_back(s):
                here = _add(base, own_b[s], act[before] if before >= 0 else {}, *(stage[w] for w in window))
                here = _add(here, grad[behind] if behind < num_segments else {})
                if not instance.clip:
                    here = _add(here, in_flight[s])
                self._limit(Tier.DEVICE, here, fixed, slack)
        self._host_bytes()

    def _windows(self, s: int, *, backward: bool) -> list[tuple[tuple[int, ...], int]]:
        """Distinct (segments of the staged units, segment of unit i-1 or -1) over the units i of segment s."""
        n = self.tables.num_units
        width = min(self.tables.prefetch_units + 1, n)
        found: dict[tuple[tuple[int, ...], int], None] = {}
        for i in range(self.segments[s].first, self.segments[s].last + 1):
            start = max(i - width + 1, 0) if backward else min(i, n - width)
            window = tuple(self._segment_of(j) for j in range(start, start + width))
            found[window, self._segment_of(i - 1) if i else -1] = None
        return list(found)

    def _windows_back(self, s: int) -> list[tuple[tuple[int, ...], int, int]]:
        """As ``_windows`` for backward, with the segment of unit i+1 (the number of segments at the end)."""
        behinds = [s] if not self.segments[s].is_single else []
        behinds.append(s + 1)
        return [(w, before, behind) for w, before in self._windows(s, backward=True) for behind in behinds]

    def _segment_of(self, unit: int) -> int:
        return self._owner[unit]

    def _host_bytes(self) -> None:
        tables, every = self.tables, range(len(self.segments))
        scale = self.bytes_scale[Tier.DRAM]
        held = [self._sum(s, tables.dram * scale) for s in every]
        bounce: Expr = {}
        if tables.dram_stage.any():
            variable = self.programme.variable()
            for s in every:
                most = self._most(s, tables.dram_stage * scale)
                if most:
                    self.programme.at_most(_add(most, {variable: -1.0}), 0.0)
            bounce = {variable: 1.0}
        self._limit(Tier.DRAM, _add(*held, bounce), self.instance.dram_fixed_nbytes)
        scale = self.bytes_scale[Tier.NVME]
        self._limit(Tier.NVME, _add(*(self._sum(s, tables.nvme * scale) for s in every)), 0.0)

    # --------------------------------------------------------------------------------------------------- seconds
    def _seconds(self) -> None:
        tables, programme, clip = self.tables, self.programme, self.instance.clip
        every = range(len(self.segments))
        first, rest, step = programme.variable(), programme.variable(), programme.variable()

        def over_units(table: F64) -> Expr:
            return _add(*(self._sum(s, table * self.s) for s in every))

        for lane in range(len(LANES)):
            phase0 = tables.sec[lane, 0] + (tables.sec[lane, 2] if clip else 0.0)
            for variable, table in ((first, phase0), (rest, tables.sec[lane, 1])):
                if table.any():
                    programme.at_most(_add(over_units(table), {variable: -1.0}), 0.0)
            if not clip and tables.sec[lane].any():
                programme.at_most(_add(over_units(tables.sec[lane].sum(axis=0)), {step: -1.0}), 0.0)
        programme.at_most({first: 1.0, rest: 1.0, step: -1.0}, 0.0)
        self._windows_of_updates(step)
        programme.objective = _add({step: 1.0}, over_units(tables.loss_s))

    def _windows_of_updates(self, step: int) -> None:
        """Prefix and chain rows; see [Note: seconds of a step] in ``cost_model``."""
        tables, programme, num_micro = self.tables, self.programme, self.instance.num_micro_batches
        every = range(len(self.segments))
        share = [self._sum(s, tables.backward_s * self.s) for s in every]
        whole = programme.variable()
        programme.equals(whole, *share)
        if self.instance.clip:
            outside: list[Expr] = [{whole: float(num_micro)} for _ in every]
        else:
            later = self._running(share[::-1])[::-1]
            outside = []
            for s in every:
                count = self.segments[s].last - self.segments[s].first + 1
                from_last = later[s] if count == 1 else _add(later[s], _times(1.0 / count - 1.0, share[s]))
                outside.append(_add({whole: float(num_micro - 1)}, from_last))
        constant = tables.outside_forward_s() * self.s
        tail = [self._most(s, tables.tail_s * self.s) for s in every]
        for lane in range(len(tables.prefix_lanes)):
            if not tables.prefix_s[lane].any():
                continue
            done = self._running([self._sum(s, tables.prefix_s[lane] * self.s) for s in every])
            for s in every:
                row = _add(outside[s], done[s], tail[s] if tables.prefix_tail[lane] else {}, {step: -1.0})
                programme.at_most(row, -float(constant[self.segments[s].last]))
        for s in every:
            row = _add(outside[s], self._most(s, tables.chain_s * self.s), {step: -1.0})
            programme.at_most(row, -float(constant[self.segments[s].last]))

    # ---------------------------------------------------------------------------------------------------- answer
    def picks(self, x: F64) -> tuple[int, ...]:
        """Deal each segment's counts out to its units, those that free activations and parameters first."""
        tables = self.tables
        picks = [0] * tables.num_units
        for s, segment in enumerate(self.segments):
            for group, columns in zip(segment.groups, self.counts[s], strict=True):
                lead = group.units[0]
                order = sorted(
                    columns,
                    key=lambda o: (tables.kept[lead, o], -tables.stage[lead, o], OPTIONS[o].state_home, o),
                )
                dealt = [option for option in order for _ in range(round(float(x[columns[option]])))]
                for unit, option in zip(group.units, dealt, strict=True):
                    picks[unit] = option
        return tuple(picks)


@contextlib.contextmanager
def _prints_to_stderr() -> Iterator[None]:
    """HiGHS prints a line of its own to the process's stdout now and then, where a user's output or JSON goes."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except (OSError, ValueError, AttributeError):  # there is no stdout
        yield
        return
    try:
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).fflush(None)  # what C's own buffer holds would come out later
        os.dup2(kept, 1)
        os.close(kept)


def _solved(solver: Callable[..., Any], *args: Any, **kwargs: Any) -> scipy.optimize.OptimizeResult:
    """What the solver answers. Where it breaks down (HiGHS may, "vector::reserve"), that is its answer: no solution."""
    try:
        with _prints_to_stderr():
            return solver(*args, **kwargs)
    except Exception as error:  # whatever its C++ throws: there are other planners, and a run that goes on
        message = f"the solver broke down: {type(error).__name__}: {error}"
        return scipy.optimize.OptimizeResult(x=None, status=_BROKE_DOWN, message=message)


def solve_programme(
    instance: Instance,
    prefetch_units: int,
    *,
    time_limit_s: float = 10.0,
    mip_rel_gap: float = 0.0,
    long_mip_rel_gap: float = 1e-3,
    minimise: Tier | None = None,
    cut_off: float = math.inf,
) -> Outcome:
    """Solve ``instance`` at one prefetch distance. With ``minimise``, find the least budget of that tier instead.

    A long model whose bound is ``cut_off`` or more is given up at once, as ``CUT_OFF``.

    Pure: no threads, no files; scipy's solver is deterministic unless the time limit cuts it off.
    """
    tables = CostTables(instance, prefetch_units)
    segments, is_exact = _segments(tables)
    shrink = np.ones(len(Tier))
    deadline = time.monotonic() + time_limit_s
    outcome = Outcome(OutcomeKind.FAILED, None, -math.inf, is_exact, "not solved")
    for _ in range(_MAX_RETRIES):
        builder = _Builder(tables, segments, shrink, minimise)
        if is_exact:
            outcome = _outcome_of(builder.programme.run(deadline - time.monotonic(), mip_rel_gap), builder, True)
        else:
            outcome = _solve_long(builder, deadline, long_mip_rel_gap, cut_off)
        if outcome.picks is None:
            break
        over = _overshoot(instance, tables, outcome.picks, minimise)
        if not (over > 1.0 + 1e-9).any():
            break
        # Grouping, or the solver's tolerance, let a few bytes too many through: ask again for that much less.
        shrink = shrink / np.maximum(over, 1.0) * np.where(over > 1.0, 1.0 - (1e-9 if is_exact else 1e-3), 1.0)
        outcome = dataclasses.replace(outcome, kind=OutcomeKind.FAILED, picks=None, message="its plan did not fit")
    return outcome


def _solve_long(builder: _Builder, deadline: float, mip_rel_gap: float, cut_off: float) -> Outcome:
    """Relax, keep the promising options, branch on those; see [Note: exact and long models]."""
    relaxed = builder.programme.run_relaxed(deadline - time.monotonic())
    if relaxed.x is None:
        return _outcome_of(relaxed, builder, False)
    bound = float(relaxed.fun) / builder.scale
    if bound >= cut_off:
        return Outcome(OutcomeKind.CUT_OFF, None, bound, False)
    narrow = _Builder(
        builder.tables, _promising(builder, relaxed.x, relaxed.lower.marginals), builder.shrink, builder.minimise
    )
    outcome = _outcome_of(narrow.programme.run(deadline - time.monotonic(), mip_rel_gap, _NODE_LIMIT), narrow, False)
    if outcome.picks is None and outcome.kind is OutcomeKind.INFEASIBLE:
        outcome = _outcome_of(builder.programme.run(deadline - time.monotonic(), mip_rel_gap), builder, False)
    return dataclasses.replace(outcome, bound=bound)


def _promising(builder: _Builder, x: F64, reduced_cost: F64) -> list[_Segment]:
    """The segments with the options that the relaxation uses and, per group, the next few by reduced cost."""
    segments = []
    for segment, counts in zip(builder.segments, builder.counts, strict=True):
        groups = []
        for group, columns in zip(segment.groups, counts, strict=True):
            used = [option for option in group.options if x[columns[option]] > 1e-7]
            rest = sorted(
                (o for o in group.options if o not in used), key=lambda o: (float(reduced_cost[columns[o]]), o)
            )
            groups.append(_Group(group.units, tuple(sorted([*used, *rest[:_NUM_KEPT_OPTIONS]]))))
        segments.append(_Segment(segment.first, segment.last, tuple(groups)))
    return segments


def _overshoot(instance: Instance, tables: CostTables, picks: Iterable[int], minimise: Tier | None) -> F64:
    peaks = tables.bytes_of(np.array([list(picks)], dtype=np.int64))
    over = np.zeros(len(Tier))
    for tier in Tier:
        peak, budget = float(peaks[tier][0]), instance.budget_nbytes(tier)
        if tier is not minimise and peak > 0:
            over[tier] = peak / budget if budget > 0 else math.inf
    return over


def _outcome_of(result: scipy.optimize.OptimizeResult, builder: _Builder, is_exact: bool) -> Outcome:
    bound = getattr(result, "mip_dual_bound", None)
    bound = -math.inf if bound is None or not math.isfinite(bound) else float(bound) / builder.scale
    message = str(result.message)
    if result.x is None:
        kinds = {1: OutcomeKind.LIMIT, 2: OutcomeKind.INFEASIBLE}
        # HiGHS may say "unbounded or infeasible"; nothing here is unbounded.
        kind = kinds.get(result.status, OutcomeKind.FAILED)
        kind = OutcomeKind.INFEASIBLE if "infeasible" in message.lower() else kind
        return Outcome(kind, None, bound, is_exact, message)
    kind = OutcomeKind.OPTIMAL if result.status == 0 else OutcomeKind.LIMIT  # scipy has no code for the node limit
    return Outcome(kind, builder.picks(result.x), bound, is_exact, message)
