"""Floor 2. Placing pipeline stages on a mesh: the genetic optimiser, and brute force to judge it by.

Decides three things at once: which activations each stage recomputes (bits), on which site each stage sits
(positions), and from which helper a stage that overflows takes first (pairs). Five operators, as published for WATOS
(arXiv 2512.12279): mutate recompute, cross recompute, trade stage positions, mutate pairs, cross pairs. Fitness is
``t_max_s * global_cost``, lower is better; ``global_cost`` as in [Note: global cost], over pipeline traffic between
neighbouring stages and over borrowed bytes.

Runs on the calling thread with the interpreter lock released; the same seed gives the same result.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.topology.compiled import compiled
from lightning_tieroffload.topology.exchange import exchange_dense
from lightning_tieroffload.topology.flows import Flow

__all__ = ["Optimised", "PlacementProblem", "brute_force", "evaluate", "optimise"]

# Fitness of a choice that does not fit starts here, so that every one that fits is better.
UNPLACED = 1e200
# More exchanges than any case that brute force can finish needs.
EXACT_ROUNDS = 10_000
BRUTE_FORCE_LIMIT = 8_000_000
_LARGEST_POPULATION = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Stages to place on sites. Sizes in bytes per site, times in seconds per micro-batch.

    Args:
        distance: (N, N) hops between sites, N >= number of stages; sites without a stage only lend.
        capacity_nbytes: (N,) DRAM that may be used at each site.
        stage_nbytes: (P,) what each stage needs with nothing recomputed.
        stage_s: (P,) seconds of each stage with nothing recomputed.
        bit_stage: (R,) the stage that recompute bit r belongs to.
        bit_saved_nbytes: (R,) bytes that the stage needs less when bit r is set.
        bit_extra_s: (R,) seconds that the stage takes longer then.
        pipe_nbytes: (P - 1,) bytes that stage i and i + 1 exchange, in the period that borrowed bytes are counted for.
        link_bytes_per_s: bandwidth of one hop.
    """

    distance: npt.NDArray[Any]
    capacity_nbytes: npt.NDArray[Any]
    stage_nbytes: npt.NDArray[Any]
    stage_s: npt.NDArray[Any]
    bit_stage: npt.NDArray[Any]
    bit_saved_nbytes: npt.NDArray[Any]
    bit_extra_s: npt.NDArray[Any]
    pipe_nbytes: npt.NDArray[Any]
    link_bytes_per_s: float = 1.0

    def __post_init__(self) -> None:
        num_sites, num_stages, num_bits = len(self.capacity_nbytes), len(self.stage_nbytes), len(self.bit_stage)
        lengths = {
            "distance": (num_sites, num_sites),
            "capacity_nbytes": (num_sites,),
            "stage_nbytes": (num_stages,),
            "stage_s": (num_stages,),
            "bit_stage": (num_bits,),
            "bit_saved_nbytes": (num_bits,),
            "bit_extra_s": (num_bits,),
            "pipe_nbytes": (max(0, num_stages - 1),),
        }
        for key, shape in lengths.items():
            array = np.asarray(getattr(self, key), np.int64 if key == "bit_stage" else np.float64)
            if array.shape != shape:
                raise ConfigError(f"PlacementProblem.{key} must have shape {shape}, not {array.shape}.")
            if not np.isfinite(array).all() or (array < 0).any():
                raise ConfigError(f"PlacementProblem.{key} must be finite and 0 or more.")
            object.__setattr__(self, key, np.ascontiguousarray(array))
        if num_stages < 1 or num_stages > num_sites:
            raise ConfigError(f"{num_stages} stages do not fit on {num_sites} sites, one stage per site.")
        if num_bits and self.bit_stage.max() >= num_stages:
            raise ConfigError(f"PlacementProblem.bit_stage names stage {self.bit_stage.max()} of {num_stages}.")
        if not self.link_bytes_per_s > 0:
            raise ConfigError(f"PlacementProblem.link_bytes_per_s={self.link_bytes_per_s} must be more than 0.")

    @property
    def num_stages(self) -> int:
        return len(self.stage_nbytes)

    @property
    def num_sites(self) -> int:
        return len(self.capacity_nbytes)

    @property
    def num_bits(self) -> int:
        return len(self.bit_stage)

    def arrays(self) -> tuple[Any, ...]:
        """The arguments that every kernel of this file starts with."""
        return (
            self.distance,
            self.capacity_nbytes,
            self.stage_nbytes,
            self.stage_s,
            self.bit_stage,
            self.bit_saved_nbytes,
            self.bit_extra_s,
            self.pipe_nbytes,
            float(self.link_bytes_per_s),
        )


@dataclass(frozen=True, slots=True)
class Optimised:
    """The best choice found. ``flows`` are between *sites*; ``history[g]`` is the best fitness after generation g.

    ``recompute`` (R,) bits; ``positions`` (P,) site of each stage; ``pairs`` (P,) site from which each stage takes
    first, -1 where it took from none.
    """

    fitness: float
    t_max_s: float
    global_cost: float
    recompute: tuple[bool, ...]
    positions: tuple[int, ...]
    pairs: tuple[int, ...]
    flows: list[Flow]
    history: tuple[float, ...]
    num_evaluations: int
    stalled: bool


@compiled
def _load(bits, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, need, seconds):  # type: ignore[no-untyped-def]
    """Fills ``need`` and ``seconds`` per stage under these bits; returns t_max."""
    num_stages = stage_nbytes.size
    for i in range(num_stages):
        need[i] = stage_nbytes[i]
        seconds[i] = stage_s[i]
    for r in range(bit_stage.size):
        if bits[r]:
            need[bit_stage[r]] -= bit_saved[r]
            seconds[bit_stage[r]] += bit_extra[r]
    t_max = seconds[0]
    for i in range(1, num_stages):
        t_max = max(t_max, seconds[i])
    return t_max


@compiled
def _evaluate(  # type: ignore[no-untyped-def]
    distance, capacity, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, pipe_nbytes, link_bytes_per_s,
    bits, positions, pairs, work, queue, flow, rounds,
):  # fmt: skip
    """(fitness, t_max, global_cost) of one choice; ``positions`` is a permutation of sites, stages first.

    ``work`` (3, N) and ``queue`` (N,) are scratch; ``flow`` (N, N) receives the borrowed bytes. Up to ``rounds``
    exchanges follow the greedy fill ([Note: exchange]): pairs alone cannot say how a sender splits its bytes over
    several helpers, which left up to 5 % of cost in small cases.
    """
    num_sites = capacity.size
    num_stages = stage_nbytes.size
    need = work[0]
    seconds = work[1]
    free = work[2]
    t_max = _load(bits, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, need, seconds)
    pipe_hop_nbytes = 0.0
    for i in range(num_stages - 1):
        pipe_hop_nbytes += pipe_nbytes[i] * distance[positions[i], positions[i + 1]]
    for n in range(num_sites):
        free[n] = capacity[n]
    flow[:] = 0
    hop_nbytes = 0.0
    num_takes = 0
    waiting = 0
    for i in range(num_stages):
        site = positions[i]
        left = need[i] - capacity[site]
        free[site] = max(-left, 0.0)
        need[i] = left
    for i in range(num_stages):
        if need[i] > 0:
            # The paired helper first, as far as it goes; pairs hold sites.
            h = pairs[i]
            if h >= 0 and free[h] > 0:
                take = min(need[i], free[h])
                need[i] -= take
                free[h] -= take
                hop_nbytes += take * distance[positions[i], h]
                flow[positions[i], h] += take
                num_takes += 1
            if need[i] > 0:
                queue[waiting] = i
                waiting += 1
    # What is left goes to the nearest helper with space, partial fills back to the end of the queue.
    head = 0
    length = waiting
    while waiting > 0:
        i = queue[head]
        site = positions[i]
        best = -1
        for n in range(num_sites):
            if free[n] > 0 and (best < 0 or distance[site, n] < distance[site, best]):
                best = n
        if best < 0:
            break
        head = (head + 1) % length
        waiting -= 1
        take = min(need[i], free[best])
        need[i] -= take
        free[best] -= take
        hop_nbytes += take * distance[site, best]
        flow[site, best] += take
        num_takes += 1
        if need[i] > 0:
            queue[(head + waiting) % length] = i
            waiting += 1
    if num_takes > 1 and rounds > 0:
        for n in range(num_sites):
            # Rounding must not look like space. A sender's own site has none, so bytes cannot return home either.
            if free[n] < 0.5:
                free[n] = 0.0
        if exchange_dense(distance, flow, free, rounds) > 0:
            hop_nbytes = 0.0
            for s in range(num_sites):
                for n in range(num_sites):
                    hop_nbytes += flow[s, n] * distance[s, n]
    cost = (pipe_hop_nbytes + hop_nbytes) / link_bytes_per_s
    fitness = t_max * cost
    if waiting > 0:
        unplaced = 0.0
        total = 0.0
        for i in range(num_stages):
            unplaced += max(need[i], 0.0)
            total += stage_nbytes[i]
        if unplaced > 1e-9 * total:
            fitness = UNPLACED * (1.0 + unplaced / total)
    return fitness, t_max, cost


@compiled
def _shuffled(n):  # type: ignore[no-untyped-def]
    order = np.arange(n)
    for k in range(n - 1, 0, -1):
        other = np.random.randint(k + 1)
        order[k], order[other] = order[other], order[k]
    return order


@compiled
def _rearrange(positions, a, b, kind, num_stages):  # type: ignore[no-untyped-def]
    """Stages a and b trade positions (kind 0 and 1, or b has no stage); reverse from a to b (2); move a to b (3).

    Two stages that trade places break four neighbourhoods of the pipeline, the other two kinds break two or three:
    without them chains of stages with heavy pipeline traffic stay in local optima.
    """
    if kind < 2 or b >= num_stages:
        positions[a], positions[b] = positions[b], positions[a]
    elif kind == 2:
        low, high = min(a, b), max(a, b)
        while low < high:
            positions[low], positions[high] = positions[high], positions[low]
            low += 1
            high -= 1
    else:
        moved = positions[a]
        step = 1 if b > a else -1
        while a != b:
            positions[a] = positions[a + step]
            a += step
        positions[b] = moved


@compiled
def _evolve(  # type: ignore[no-untyped-def]
    distance, capacity, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, pipe_nbytes, link_bytes_per_s,
    start_positions, seed, population, mutation_rate, elite_frac, tournament, num_generations, stall_generations,
    num_restarts, move_bits, move_positions, move_pairs, rounds,
):  # fmt: skip
    np.random.seed(seed)
    num_sites = capacity.size
    num_stages = stage_nbytes.size
    num_bits = bit_stage.size
    bits = np.zeros((population, num_bits), np.bool_)
    positions = np.empty((population, num_sites), np.int64)
    pairs = np.full((population, num_stages), -1, np.int64)
    fitness = np.empty(population)
    next_bits = bits.copy()
    next_positions = positions.copy()
    next_pairs = pairs.copy()
    next_fitness = fitness.copy()
    work = np.empty((3, num_sites))
    queue = np.empty(num_sites, np.int64)
    flow = np.empty((num_sites, num_sites))
    history = np.empty(num_generations)
    num_elite = max(1, int(elite_frac * population))
    kept = np.empty(population, np.int64)
    num_evaluations = 0
    best_bits = bits[0].copy()
    best_positions = start_positions.copy()
    best_pairs = pairs[0].copy()
    best = np.inf
    generation = 0
    restart = 0
    stalled = False
    while generation < num_generations:
        # A fresh population: the given placement with nothing and with everything recomputed, then random ones.
        for k in range(population):
            positions[k] = start_positions
            pairs[k] = -1
            # Individuals differ in *how much* they recompute: at even odds nobody would start near "little".
            density = np.random.random()
            for r in range(num_bits):
                bits[k, r] = move_bits and (k == 1 or (k > 1 and np.random.random() < density))
            if k > 1 and move_positions:
                positions[k] = start_positions[_shuffled(num_sites)]
            if k > 1 and move_pairs:
                for i in range(num_stages):
                    pairs[k, i] = np.random.randint(-1, num_sites)
            fitness[k] = _evaluate(
                distance, capacity, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, pipe_nbytes,
                link_bytes_per_s, bits[k], positions[k], pairs[k], work, queue, flow, rounds,
            )[0]  # fmt: skip
            num_evaluations += 1
        round_best = np.inf
        quiet = 0
        while generation < num_generations:
            order = np.argsort(fitness)
            leader = order[0]
            if fitness[leader] < round_best * (1 - 1e-9):
                round_best = fitness[leader]
                quiet = 0
            else:
                quiet += 1
            if fitness[leader] < best:
                best = fitness[leader]
                best_bits[:] = bits[leader]
                best_positions[:] = positions[leader]
                best_pairs[:] = pairs[leader]
            history[generation] = best
            generation += 1
            if quiet >= stall_generations:
                break
            # The elite are the best *different* ones: copies of one leader would fill it, and then the population.
            num_kept = 0
            for source in order:
                if num_kept > 0 and fitness[source] <= fitness[kept[num_kept - 1]] * (1 + 1e-12):
                    continue
                kept[num_kept] = source
                num_kept += 1
                if num_kept == num_elite:
                    break
            for k in range(population):
                if k < num_kept:
                    source = kept[k]
                    next_bits[k] = bits[source]
                    next_positions[k] = positions[source]
                    next_pairs[k] = pairs[source]
                    next_fitness[k] = fitness[source]
                    continue
                mother = np.random.randint(population)
                father = np.random.randint(population)
                for _ in range(tournament - 1):
                    other = np.random.randint(population)
                    if fitness[other] < fitness[mother]:
                        mother = other
                    other = np.random.randint(population)
                    if fitness[other] < fitness[father]:
                        father = other
                next_bits[k] = bits[mother]
                next_positions[k] = positions[mother]
                next_pairs[k] = pairs[mother]
                changed = False
                if move_bits and num_bits > 0:
                    if np.random.random() < 0.5:  # cross recompute
                        for r in range(num_bits):
                            if np.random.random() < 0.5:
                                next_bits[k, r] = bits[father, r]
                        changed = True
                    if np.random.random() < mutation_rate or not changed:  # mutate recompute
                        next_bits[k, np.random.randint(num_bits)] ^= True
                        if np.random.random() < mutation_rate:
                            next_bits[k, np.random.randint(num_bits)] ^= True
                if move_positions and num_sites > 1 and np.random.random() < max(mutation_rate, 0.5):
                    _rearrange(
                        next_positions[k],
                        np.random.randint(num_stages),
                        np.random.randint(num_sites),
                        np.random.randint(4),
                        num_stages,
                    )
                if move_pairs:
                    if np.random.random() < 0.5:  # cross pairs
                        for i in range(num_stages):
                            if np.random.random() < 0.5:
                                next_pairs[k, i] = pairs[father, i]
                    if np.random.random() < mutation_rate:  # mutate pairs
                        next_pairs[k, np.random.randint(num_stages)] = np.random.randint(-1, num_sites)
                next_fitness[k] = _evaluate(
                    distance, capacity, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, pipe_nbytes,
                    link_bytes_per_s, next_bits[k], next_positions[k], next_pairs[k], work, queue, flow, rounds,
                )[0]  # fmt: skip
                num_evaluations += 1
            bits, next_bits = next_bits, bits
            positions, next_positions = next_positions, positions
            pairs, next_pairs = next_pairs, pairs
            fitness, next_fitness = next_fitness, fitness
        if quiet >= stall_generations:
            stalled = True
        restart += 1
        if restart > num_restarts:
            break
    return best_bits, best_positions, best_pairs, history[:generation], num_evaluations, stalled


def optimise(
    problem: PlacementProblem,
    *,
    seed: int = 0,
    population: int = 40,
    mutation_rate: float = 0.2,
    elite_frac: float = 0.25,
    tournament: int = 3,
    num_generations: int = 2000,
    stall_generations: int = 40,
    num_restarts: int = 12,
    move_bits: bool = True,
    move_positions: bool = True,
    move_pairs: bool = True,
    exchange_rounds: int = 64,
    positions: Sequence[int] | None = None,
) -> Optimised:
    """Search bits, positions and pairs for the least ``t_max_s * global_cost``.

    Selection by tournament; the best ``elite_frac`` of a generation survive. A population that has not improved for
    ``stall_generations`` is given up; up to ``num_restarts`` fresh ones follow while ``num_generations`` lasts.
    ``exchange_rounds`` bounds the exchange after each greedy fill; 0 leaves it out, as in the published optimiser.
    ``move_bits``, ``move_positions``, ``move_pairs`` turn operators off; ``positions`` is the placement to start from
    (default: stage i on site i). Raises ``ConfigError`` for settings out of range and ``CapacityError`` if the stages
    do not fit on the sites even with everything recomputed.
    """
    if not 4 <= population <= _LARGEST_POPULATION:
        raise ConfigError(f"population={population} must be 4 or more, to {_LARGEST_POPULATION} (20 to 50 works well).")
    for key, value in (("mutation_rate", mutation_rate), ("elite_frac", elite_frac)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{key}={value} must be between 0 and 1.")
    for key, count in (
        ("tournament", tournament),
        ("num_generations", num_generations),
        ("stall_generations", stall_generations),
    ):
        if not 1 <= count < 2**31:
            raise ConfigError(f"{key}={count} must be 1 or more, and below 2^31.")
    if not 0 <= seed < 2**32:  # of a larger one the generator takes the low bits
        raise ConfigError(f"seed={seed} must be 0 or more, and below 2^32.")
    start = _whole_permutation(problem, positions)
    _check_fits(problem, move_bits)
    bits, order, pairs, history, num_evaluations, stalled = _evolve(
        *problem.arrays(), start, seed, population, mutation_rate, elite_frac, tournament, num_generations,
        stall_generations, num_restarts, move_bits, move_positions, move_pairs, exchange_rounds,
    )  # fmt: skip
    found = evaluate(problem, recompute=bits, positions=order, pairs=pairs, exchange_rounds=exchange_rounds)
    return Optimised(
        found.fitness,
        found.t_max_s,
        found.global_cost,
        found.recompute,
        found.positions,
        found.pairs,
        found.flows,
        tuple(history.tolist()),
        int(num_evaluations),
        bool(stalled),
    )


def evaluate(
    problem: PlacementProblem,
    *,
    recompute: npt.ArrayLike | None = None,
    positions: Sequence[int] | npt.NDArray[Any] | None = None,
    pairs: npt.ArrayLike | None = None,
    exchange_rounds: int = EXACT_ROUNDS,
) -> Optimised:
    """One choice, evaluated: what the optimiser sees. Nothing recomputed, stage i on site i, no pairs by default.

    A choice that does not fit has a fitness of infinity.
    """
    num_sites, num_stages = problem.num_sites, problem.num_stages
    bits = np.zeros(problem.num_bits, np.bool_) if recompute is None else np.asarray(recompute, np.bool_)
    if bits.shape != (problem.num_bits,):
        raise ConfigError(f"recompute must have shape ({problem.num_bits},), not {bits.shape}.")
    order = _whole_permutation(problem, positions)
    paired = np.full(num_stages, -1, np.int64) if pairs is None else np.asarray(pairs, np.int64)
    flow = np.zeros((num_sites, num_sites))
    fitness, t_max_s, cost = _evaluate(
        *problem.arrays(), bits, order, paired, np.empty((3, num_sites)), np.empty(num_sites, np.int64), flow,
        exchange_rounds,
    )  # fmt: skip
    if fitness >= UNPLACED:
        fitness = float("inf")
    sender, helper = np.nonzero(flow)
    flows = [
        Flow(*row)
        for row in zip(
            sender.tolist(), helper.tolist(), np.rint(flow[sender, helper]).astype(np.int64).tolist(), strict=True
        )
    ]
    stage_at = {int(order[i]): i for i in range(num_stages)}
    used = [-1] * num_stages
    for item in flows:
        stage = stage_at[item.sender]
        if used[stage] < 0 or int(paired[stage]) == item.helper:
            used[stage] = item.helper
    return Optimised(
        float(fitness),
        float(t_max_s),
        float(cost),
        tuple(bits.tolist()),
        tuple(order[:num_stages].tolist()),
        tuple(used),
        flows,
        (float(fitness),),
        1,
        False,
    )


def _whole_permutation(
    problem: PlacementProblem, positions: Sequence[int] | npt.NDArray[Any] | None
) -> npt.NDArray[np.int64]:
    """``positions`` with the sites that hold no stage behind them."""
    given = list(range(problem.num_stages)) if positions is None else [int(site) for site in positions]
    if (
        len(set(given)) != len(given)
        or len(given) < problem.num_stages
        or not set(given) <= set(range(problem.num_sites))
    ):
        raise ConfigError(
            f"positions={given} must name {problem.num_stages} different sites of {problem.num_sites}, one per stage."
        )
    rest = [site for site in range(problem.num_sites) if site not in set(given)]
    return np.asarray(given + rest, np.int64)


def _check_fits(problem: PlacementProblem, move_bits: bool) -> None:
    least = problem.stage_nbytes.sum() - (problem.bit_saved_nbytes.sum() if move_bits else 0)
    if least > problem.capacity_nbytes.sum():
        raise CapacityError(
            f"{problem.num_stages} stages need {format_nbytes(least)} even with everything "
            f"{'recomputed' if move_bits else 'kept as it is'}, the {problem.num_sites} sites have "
            f"{format_nbytes(problem.capacity_nbytes.sum())}: {format_nbytes(least - problem.capacity_nbytes.sum())} "
            f"too little. Use a smaller micro-batch or more sites."
        )


def brute_force(
    problem: PlacementProblem, *, move_bits: bool = True, move_positions: bool = True, exact_pairs: bool = True
) -> Optimised:
    """The true optimum, by trying every bit pattern and every placement. For at most 7 stages on as many sites.

    With ``exact_pairs`` borrowed bytes are paired at least cost (the optimum of the transport problem), else nearest
    first, which is what the optimiser sees with ``move_pairs=False, exchange_rounds=0``. Raises ``ConfigError`` where
    there would be more than 8 million combinations.
    """
    start = _whole_permutation(problem, None)
    num_bits = problem.num_bits if move_bits else 0
    num_orders = 1
    if move_positions:
        for k in range(problem.num_stages):
            num_orders *= problem.num_sites - k
    if num_orders * 2**num_bits > BRUTE_FORCE_LIMIT:
        raise ConfigError(
            f"brute force over {num_orders} placements and {2**num_bits} recompute patterns is more than "
            f"{BRUTE_FORCE_LIMIT} combinations. Use optimise() there."
        )
    if move_positions:
        rows = []
        for chosen in itertools.permutations(range(problem.num_sites), problem.num_stages):
            taken = set(chosen)
            rows.append([*chosen, *(site for site in range(problem.num_sites) if site not in taken)])
        orders = np.asarray(rows, np.int64)
    else:
        orders = start[None]
    _check_fits(problem, move_bits)
    rounds = EXACT_ROUNDS if exact_pairs else 0
    code, row, cost, t_max_s = _enumerate(*problem.arrays(), orders, num_bits, rounds)
    bits = [bool(code >> r & 1) for r in range(problem.num_bits)]
    found = evaluate(problem, recompute=bits, positions=orders[row].tolist(), exchange_rounds=rounds)
    return Optimised(
        float(t_max_s * cost), float(t_max_s), float(cost), found.recompute, found.positions, found.pairs,
        found.flows, (float(t_max_s * cost),), int(num_orders * 2**num_bits), False,
    )  # fmt: skip


@compiled
def _enumerate(  # type: ignore[no-untyped-def]
    distance, capacity, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, pipe_nbytes, link_bytes_per_s,
    orders, num_bits, rounds,
):  # fmt: skip
    num_sites = capacity.size
    num_stages = stage_nbytes.size
    bits = np.zeros(bit_stage.size, np.bool_)
    pairs = np.full(num_stages, -1, np.int64)
    work = np.empty((3, num_sites))
    queue = np.empty(num_sites, np.int64)
    flow = np.zeros((num_sites, num_sites))
    best = np.inf
    best_code = 0
    best_row = 0
    best_cost = np.inf
    best_t_max = 0.0
    for code in range(1 << num_bits):
        for r in range(num_bits):
            bits[r] = (code >> r) & 1
        for row in range(orders.shape[0]):
            positions = orders[row]
            fitness, t_max, cost = _evaluate(
                distance, capacity, stage_nbytes, stage_s, bit_stage, bit_saved, bit_extra, pipe_nbytes,
                link_bytes_per_s, bits, positions, pairs, work, queue, flow, rounds,
            )  # fmt: skip
            if fitness >= UNPLACED:
                continue
            if fitness < best:
                best = fitness
                best_code = code
                best_row = row
                best_cost = cost
                best_t_max = t_max
    return best_code, best_row, best_cost, best_t_max
