"""Seconds of the allocator and of the genetic optimiser, after compilation, on one core (the kernels use one).

pytest tests/benchmarks/test_topology_bench.py --benchmark-only
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from lightning_tieroffload.topology import PlacementProblem, allocate, brute_force, optimise
from lightning_tieroffload.topology.flows import check_allocation
from lightning_tieroffload.topology.picture import draw_history

pytestmark = pytest.mark.alone
# The published figure for a search over 4,096 configurations (WATOS, on its authors' machine).
PUBLISHED_S = 0.274


def recompute_problem(seed):
    """12 stages on a 4 x 3 mesh, one recompute bit each: 4,096 configurations, of which few are nearly best.

    All together need a little more than the mesh has, so that every byte saved is one that is borrowed from less far;
    but recompute in a slow stage costs time. Needs are uneven in no order: with 1F1B's slope the bits of late stages
    would change nothing, and guessing would do.
    """
    rng = np.random.default_rng(seed)
    places = np.array([(x, y) for y in range(3) for x in range(4)])
    state = 0.2 * 48e9
    held = rng.uniform(0.3, 1.7, 12)
    held *= (1.03 * 12 * 48e9 - 12 * state) / held.sum()
    seconds = rng.uniform(0.9, 1.1, 12) * 1e-2
    return PlacementProblem(
        distance=np.abs(places[:, None] - places[None]).sum(-1),
        capacity_nbytes=np.full(12, 48e9),
        stage_nbytes=np.rint(state + held),
        stage_s=seconds,
        bit_stage=np.arange(12),
        bit_saved_nbytes=np.rint(held * rng.uniform(0.05, 0.3, 12)),
        bit_extra_s=seconds * rng.uniform(0.02, 0.3, 12),
        pipe_nbytes=np.rint(rng.uniform(0.5, 4e9, 11)),
        link_bytes_per_s=1e12,
    )


def search(problem, seed, **settings):
    return optimise(problem, seed=seed, move_positions=False, move_pairs=False, **settings)


@pytest.mark.benchmark(group="topology")
@pytest.mark.parametrize("effort", ["brief", "default"])
def test_search_over_4096_configurations(benchmark, tmp_path, effort):
    """On average below the published 274 ms, and every result within 1 % of the true optimum."""
    settings = {"num_restarts": 2, "stall_generations": 20} if effort == "brief" else {}
    problems = [recompute_problem(seed) for seed in range(20)]
    optima = [brute_force(problem, move_positions=False) for problem in problems]
    turns = itertools.count()
    gaps = []

    def one():
        turn = next(turns) % len(problems)
        found = search(problems[turn], turn, **settings)
        gaps.append(found.fitness / optima[turn].fitness - 1)
        return found

    one()  # compiles
    found = benchmark.pedantic(one, rounds=60, iterations=1)
    assert max(gaps) <= 0.01
    benchmark.extra_info["worst_gap_frac"] = max(gaps)
    benchmark.extra_info["num_evaluations"] = found.num_evaluations
    if benchmark.stats is not None:  # None under --benchmark-disable
        assert benchmark.stats.stats.mean < PUBLISHED_S
    # Cost over generations: falls, and reaches the optimum's 1 % band.
    histories = {f"problem {turn}": search(problems[turn], turn, **settings).history for turn in range(4)}
    scaled = {
        label: [value / optima[turn].fitness for value in history]
        for turn, (label, history) in enumerate(histories.items())
    }
    for history in scaled.values():
        assert (np.diff(history) <= 0).all()
        assert history[-1] <= 1.01
    draw_history(tmp_path / "cost_over_generations.png", scaled, optimum=1.0)
    assert (tmp_path / "cost_over_generations.png").stat().st_size > 5000


@pytest.mark.benchmark(group="topology")
def test_search_over_positions_bits_and_pairs(benchmark):
    """The whole search, 14 positions and 12 bits and pairs, as a wafer study runs it."""
    problem = recompute_problem(1)
    optimise(problem)
    found = benchmark.pedantic(lambda: optimise(problem), rounds=3, iterations=1)
    assert np.isfinite(found.fitness)


@pytest.mark.slow
@pytest.mark.benchmark(group="topology")
@pytest.mark.parametrize("order", ["nearest", "regret"])
def test_ten_thousand_senders_and_helpers(benchmark, order):
    """Below a second."""
    rng = np.random.default_rng(0)
    senders, helpers = rng.integers(0, 200, (10_000, 2)), rng.integers(0, 200, (10_000, 2))
    supply = rng.uniform(1, 48e9, 10_000).astype(np.int64)
    overflow = rng.lognormal(0, 1, 10_000)
    demand = (overflow / overflow.sum() * 0.8 * supply.sum()).astype(np.int64)
    allocate(senders[:300], demand[:300] // 10, helpers[:300], supply[:300], order=order)  # compiles
    own_s = []

    def one():
        # Seconds of this thread beside the wall's: on a busy machine the wall measures its neighbours.
        start_s = time.thread_time()
        found = allocate(senders, demand, helpers, supply, order=order)
        own_s.append(time.thread_time() - start_s)
        return found

    check_allocation(benchmark.pedantic(one, rounds=3, iterations=1), demand, supply)
    benchmark.extra_info["thread_s"] = min(own_s)
    assert min(own_s) < 1.0
