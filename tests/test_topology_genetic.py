"""The genetic optimiser against brute force, and brute force against an enumeration that shares no code with it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.topology import PlacementProblem, brute_force, optimise
from lightning_tieroffload.topology.exact import transport_optimum_by_distance
from lightning_tieroffload.topology.genetic import evaluate

GB = 10**9


def grid_distances(width, height):
    places = np.array([(x, y) for y in range(height) for x in range(width)])
    return np.abs(places[:, None] - places[None]).sum(-1)


def random_problem(seed, num_stages, width, height, *, bits_per_stage=1, most_saved=0.9, pipe_nbytes=4e9):
    """1F1B-like: early stages hold most; some overflow. Small ``most_saved`` keeps borrowing in the optimum."""
    rng = np.random.default_rng(seed)
    num_sites, capacity = width * height, 48e9
    state = rng.uniform(0.15, 0.4) * capacity
    held = rng.uniform(14e9, 63e9) / num_stages * np.arange(num_stages, 0, -1) * rng.uniform(0.8, 1.2, num_stages)
    room = 0.93 * num_sites * capacity - state * num_stages
    held *= min(1.0, room / held.sum())
    seconds = rng.uniform(0.9, 1.1, num_stages) * 1e-2
    stages = np.repeat(np.arange(num_stages), bits_per_stage)
    num_bits = len(stages)
    return PlacementProblem(
        distance=grid_distances(width, height),
        capacity_nbytes=np.full(num_sites, capacity),
        stage_nbytes=np.rint(state + held),
        stage_s=seconds,
        bit_stage=stages,
        bit_saved_nbytes=np.rint(held[stages] * rng.uniform(0.05, most_saved, num_bits) / bits_per_stage),
        bit_extra_s=seconds[stages] * rng.uniform(0.05, 0.33, num_bits) / bits_per_stage,
        pipe_nbytes=np.rint(rng.uniform(0.5, pipe_nbytes, num_stages - 1)),
        link_bytes_per_s=1e12,
    )


def plain_optimum(problem):
    """Every placement and bit pattern in plain Python, pairing by HiGHS."""
    best = np.inf
    num_stages, num_sites = problem.num_stages, problem.num_sites
    for bits in itertools.product((0, 1), repeat=problem.num_bits):
        need, seconds = problem.stage_nbytes.copy(), problem.stage_s.copy()
        for r, bit in enumerate(bits):
            need[problem.bit_stage[r]] -= bit * problem.bit_saved_nbytes[r]
            seconds[problem.bit_stage[r]] += bit * problem.bit_extra_s[r]
        for positions in itertools.permutations(range(num_sites), num_stages):
            free = problem.capacity_nbytes.copy()
            over = np.zeros(num_sites)
            for stage, site in enumerate(positions):
                over[site] = max(0.0, need[stage] - free[site])
                free[site] = max(0.0, free[site] - need[stage])
            if over.sum() > free.sum():
                continue
            hops = sum(
                problem.pipe_nbytes[i] * problem.distance[positions[i], positions[i + 1]] for i in range(num_stages - 1)
            )
            hops += transport_optimum_by_distance(problem.distance, over, free).global_cost
            best = min(best, seconds.max() * hops / problem.link_bytes_per_s)
    return best


@pytest.mark.parametrize(("seed", "sites"), [(0, (3, 1)), (1, (3, 1)), (2, (2, 2)), (4, (2, 2))])
def test_brute_force_is_the_true_optimum(seed, sites):
    problem = random_problem(seed, 3, *sites, most_saved=0.2, pipe_nbytes=4e8)
    assert brute_force(problem).fitness == pytest.approx(plain_optimum(problem), rel=1e-9)


SMALL = [
    (seed, num_stages, width, height, pipe)
    for seed, (num_stages, width, height), pipe in zip(
        range(24),
        itertools.cycle([(5, 5, 1), (6, 3, 2), (5, 3, 2)]),
        itertools.cycle([4e8, 4e9, 4e10, 4e8]),
        strict=False,
    )
]


@pytest.mark.parametrize(("seed", "num_stages", "width", "height", "pipe"), SMALL)
def test_optimiser_is_within_one_percent_of_brute_force(seed, num_stages, width, height, pipe):
    problem = random_problem(seed, num_stages, width, height, most_saved=0.2, pipe_nbytes=pipe)
    exact = brute_force(problem)
    found = optimise(problem, seed=seed)
    assert exact.fitness * (1 - 1e-9) <= found.fitness <= exact.fitness * 1.01


def test_small_cases_do_borrow():
    """The comparison above would be empty if recomputing everything were always best."""
    borrowing = sum(
        bool(optimise(random_problem(seed, n, w, h, most_saved=0.2, pipe_nbytes=pipe), seed=seed).flows)
        for seed, n, w, h, pipe in SMALL
    )
    assert borrowing >= len(SMALL) // 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_optimiser_on_seven_stages(seed):
    width, height = [(7, 1), (4, 2), (3, 3)][seed % 3] if seed % 10 == 0 else (7, 1)
    num_stages = 7 if width * height == 7 else 5
    pipe = (4e8, 4e9, 4e10)[seed % 3]
    problem = random_problem(seed, num_stages, width, height, most_saved=0.2, pipe_nbytes=pipe)
    exact = brute_force(problem)
    found = optimise(problem, seed=seed)
    assert exact.fitness * (1 - 1e-9) <= found.fitness <= exact.fitness * 1.01


@pytest.mark.parametrize("seed", range(20))
def test_optimiser_over_4096_recompute_patterns(seed):
    """12 bits: within 1 % of the true optimum, from fewer evaluations than there are patterns."""
    split = (12, 4, 3, 1) if seed % 2 else (6, 3, 2, 2)
    problem = random_problem(seed, *split[:3], bits_per_stage=split[3], most_saved=0.9 if seed % 4 < 2 else 0.3)
    assert problem.num_bits == 12
    exact = brute_force(problem, move_positions=False)
    assert exact.num_evaluations == 4096
    found = optimise(problem, seed=seed, move_positions=False, move_pairs=False, num_restarts=0, stall_generations=20)
    assert found.fitness <= exact.fitness * 1.01
    assert found.num_evaluations < 4096 / 2


def test_history_falls_and_ends_at_the_result():
    found = optimise(random_problem(1, 12, 4, 3), seed=1)
    history = np.array(found.history)
    assert (np.diff(history) <= 0).all()
    assert history[-1] == pytest.approx(found.fitness)
    assert history[0] > history[-1]


def test_early_stall_is_detected_and_seeds_are_respected():
    problem = random_problem(3, 8, 4, 2)
    first = optimise(problem, seed=5, num_restarts=0, stall_generations=10)
    assert first.stalled
    assert len(first.history) < 2000
    assert first == optimise(problem, seed=5, num_restarts=0, stall_generations=10)
    cut = optimise(problem, seed=5, num_generations=3)
    assert not cut.stalled
    assert len(cut.history) == 3
    histories = {optimise(problem, seed=seed, num_generations=3).history for seed in range(6)}
    assert len(histories) > 1


def test_result_is_consistent_with_itself():
    problem = random_problem(2, 9, 4, 3, most_saved=0.2)
    found = optimise(problem, seed=0)
    assert len(set(found.positions)) == 9
    need = problem.stage_nbytes - np.bincount(
        problem.bit_stage, problem.bit_saved_nbytes * np.array(found.recompute), problem.num_stages
    )
    used = np.zeros(problem.num_sites)
    used[list(found.positions)] = need
    for sender, helper, nbytes in found.flows:
        used[sender] -= nbytes
        used[helper] += nbytes
    assert (used <= problem.capacity_nbytes + 1).all()
    hops = sum(problem.pipe_nbytes[i] * problem.distance[found.positions[i], found.positions[i + 1]] for i in range(8))
    hops += sum(nbytes * problem.distance[sender, helper] for sender, helper, nbytes in found.flows)
    assert found.global_cost == pytest.approx(hops / problem.link_bytes_per_s, rel=1e-6)
    assert found.fitness == pytest.approx(found.t_max_s * found.global_cost)
    for stage, site in enumerate(found.positions):
        lenders = {helper for sender, helper, _ in found.flows if sender == site}
        assert found.pairs[stage] in lenders or (found.pairs[stage] == -1 and not lenders)


def small(**changes):
    fields = {
        "distance": grid_distances(3, 1),
        "capacity_nbytes": [10 * GB] * 3,
        "stage_nbytes": [14 * GB, 8 * GB],
        "stage_s": [1.0, 1.0],
        "bit_stage": [0],
        "bit_saved_nbytes": [3 * GB],
        "bit_extra_s": [0.5],
        "pipe_nbytes": [1 * GB],
        "link_bytes_per_s": 1e9,
    }
    return PlacementProblem(**{**fields, **changes})


def test_evaluate_by_hand():
    kept = evaluate(small())
    # 4 GB too many at site 0: 2 GB to site 1 (one hop), 2 GB to site 2 (two hops), and the pipeline's 1 GB.
    assert kept.global_cost == pytest.approx(2 + 4 + 1)
    assert sorted(kept.flows) == [(0, 1, 2 * GB), (0, 2, 2 * GB)]
    again = evaluate(small(), recompute=[True])
    assert (again.t_max_s, again.global_cost) == (1.5, pytest.approx(1 + 1))
    assert again.fitness == pytest.approx(3.0)
    # Stage 0 in the middle has both helpers next to it.
    assert evaluate(small(), positions=[1, 0]).global_cost == pytest.approx(2 + 2 + 1)
    # A pair that is not the nearest is honoured as long as nothing is exchanged afterwards.
    paired = evaluate(small(), pairs=[2, -1], exchange_rounds=0)
    assert (paired.flows, paired.pairs) == ([(0, 2, 4 * GB)], (2, -1))


def test_what_does_not_fit_is_infinitely_bad_or_refused():
    tight = small(capacity_nbytes=[10 * GB, 9 * GB, 0])
    assert evaluate(tight).fitness == np.inf
    found = optimise(tight, num_generations=20)
    assert found.recompute == (True,)
    assert np.isfinite(found.fitness)
    with pytest.raises(CapacityError, match=r"17\.7 GiB even with everything recomputed.*14 GiB.*too little"):
        optimise(small(capacity_nbytes=[15 * GB, 0, 0]))
    with pytest.raises(CapacityError, match="kept as it is"):
        optimise(tight, move_bits=False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stage_s": [1.0]}, r"stage_s must have shape \(2,\)"),
        ({"capacity_nbytes": [1, -1, 1]}, "capacity_nbytes must be finite and 0 or more"),
        ({"bit_stage": [2]}, "names stage 2 of 2"),
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s=0.0 must be more than 0"),
        (
            {"distance": [[0]], "capacity_nbytes": [1]},
            "2 stages do not fit on 1 sites",
        ),
    ],
)
def test_malformed_problems_are_named(changes, text):
    with pytest.raises(ConfigError, match=text):
        small(**changes)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"population": 2}, "population=2 must be 4 or more"),
        ({"mutation_rate": 1.5}, "mutation_rate=1.5 must be between 0 and 1"),
        ({"elite_frac": -0.1}, "elite_frac=-0.1 must be"),
        ({"tournament": 0}, "tournament=0 must be 1 or more"),
        ({"positions": [0, 0]}, "must name 2 different sites of 3"),
    ],
)
def test_malformed_settings_are_named(settings, text):
    with pytest.raises(ConfigError, match=text):
        optimise(small(), **settings)


def test_brute_force_refuses_what_it_cannot_finish():
    with pytest.raises(ConfigError, match="more than 8000000 combinations"):
        brute_force(random_problem(0, 12, 4, 3))
