"""Dataflows, stage needs, and the wafer study on the three published configurations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.topology.dataflow import DATAFLOWS, best_dataflow, external_access
from lightning_tieroffload.topology.mesh import Site
from lightning_tieroffload.topology.mesh_sources import grid_mesh, read_mesh
from lightning_tieroffload.topology.pipeline import MODELS, model_spec, stage_needs
from lightning_tieroffload.topology.study import VARIANTS, die_groups, run_study, study_table

CONFIGS = Path(__file__).parent.parent / "configs"
MESHES = ("mesh_wafer_48g.toml", "mesh_wafer_70g.toml", "mesh_wafer_96g.toml")
DIE = Site(
    name="die", x=0, y=0, dram_nbytes=48 * 10**9, compute_flops_per_s=512e12, dram_bytes_per_s=2e12, sram_nbytes=2**26
)


# Dataflow


def walk(m, k, n, dataflow, tile):
    """Bytes moved by the tiled loop nest, counted by walking it."""
    height, width = tile
    moved = 0
    rows, columns = {"output": (m, n), "weight": (k, n), "input": (m, k)}[dataflow]
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            h, w = min(height, rows - top), min(width, columns - left)
            if dataflow == "output":
                moved += 2 * (h * k + k * w + h * w)
            elif dataflow == "weight":
                moved += 2 * (h * w + m * h)
                moved += 4 * m * w if top > 0 else 0  # read back what the pass before left
                moved += 4 * m * w if top + height < rows else 2 * m * w
            else:
                moved += 2 * (h * w + w * n)
                moved += 4 * h * n if left > 0 else 0
                moved += 4 * h * n if left + width < columns else 2 * h * n
    return moved


@pytest.mark.parametrize("dataflow", DATAFLOWS)
@pytest.mark.parametrize("shape", [(64, 48, 80), (17, 96, 5), (256, 8, 8), (3, 200, 130)])
@pytest.mark.parametrize("sram_nbytes", [64, 1024, 2**20])
def test_formulas_count_what_the_loop_nest_moves(dataflow, shape, sram_nbytes):
    access = external_access(*shape, sram_nbytes, dataflow)
    assert access.nbytes == walk(*shape, dataflow, access.tile)
    assert access.tile[0] * access.tile[1] * (4 if dataflow == "output" else 2) <= sram_nbytes


@pytest.mark.parametrize("shape", [(4096, 8192, 8192), (1000, 3000, 500), (65536, 1024, 128)])
def test_no_dataflow_beats_the_io_lower_bound(shape):
    m, k, n = shape
    for sram_nbytes in (2**14, 2**20, 2**26):
        words = sram_nbytes / 2  # generous: everything inside at 2 bytes
        bound = max(2 * m * k * n / math.sqrt(words) - 2 * words, 0)
        best = best_dataflow(m, k, n, sram_nbytes)
        assert best.nbytes / 2 >= bound
        assert best.nbytes == min(external_access(m, k, n, sram_nbytes, kind).nbytes for kind in DATAFLOWS)


def test_the_small_operand_stays():
    assert best_dataflow(100_000, 256, 256, 2**18).dataflow == "weight"
    assert best_dataflow(256, 256, 100_000, 2**18).dataflow == "input"
    assert best_dataflow(256, 100_000, 256, 2**19).dataflow == "output"
    everything_once = 2 * (256 * 256 + 256 * 100_000 + 256 * 100_000)
    assert best_dataflow(256, 256, 100_000, 2**18).nbytes == everything_once


def test_dataflow_faults():
    with pytest.raises(ConfigError, match="hold no element"):
        external_access(4, 4, 4, 1, "weight")
    with pytest.raises(ConfigError, match="every side must be 1 or more"):
        best_dataflow(0, 4, 4, 100)
    with pytest.raises(ConfigError, match="'row' is not known"):
        external_access(4, 4, 4, 100, "row")


# Stages


@pytest.mark.parametrize(
    ("name", "billions"), [("llama2-30b", 32.5), ("llama3-70b", 70.6), ("gpt-175b", 175.2), ("moe-137b", 136.8)]
)
def test_models_have_the_parameters_of_their_names(name, billions):
    assert model_spec(name).num_parameters / 1e9 == pytest.approx(billions, abs=0.1)


def needs_of(name, **changes):
    settings = {
        "num_stages": 8, "tensor_parallel": 4, "micro_batch": 2, "num_micro_batches": 32, "die": DIE,
        "link_bytes_per_s": 1e12,
    }  # fmt: skip
    return stage_needs(model_spec(name), **{**settings, **changes})


def test_activations_are_those_of_the_literature():
    """34*s*b*h bytes per layer without the score matrix, of which 2 are dropout masks that we don't have."""
    model = MODELS["gpt-175b"]
    needs = needs_of("gpt-175b", num_stages=96, micro_batch=1, num_micro_batches=500, tensor_parallel=8)
    tokens = model.seq
    assert needs[0].num_in_flight == 96
    assert needs[0].activation_nbytes == 96 * 32 * tokens * model.hidden // 8
    assert needs[-1].activation_nbytes == 32 * tokens * model.hidden // 8
    # Recomputing both groups leaves the layers' inputs, and one layer's worth while it is being recomputed.
    kept = needs[0].activation_nbytes - sum(option.saved_nbytes for option in needs[0].options)
    assert kept == 96 * 4 * tokens * model.hidden // 8 + 28 * tokens * model.hidden // 8


def test_1f1b_holds_fewer_micro_batches_in_later_stages():
    assert [need.num_in_flight for need in needs_of("llama3-70b")] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [need.num_in_flight for need in needs_of("llama3-70b", num_micro_batches=3)] == [3, 3, 3, 3, 3, 3, 2, 1]


def test_state_and_layers_add_up():
    for name, model in MODELS.items():
        needs = needs_of(name, num_stages=14)
        assert sum(need.num_layers for need in needs) == model.num_layers
        state = sum(need.state_nbytes for need in needs) * 4
        assert state == pytest.approx(16 * model.num_parameters, rel=1e-6)


def test_seconds_are_at_least_the_arithmetic():
    """6 * parameters * tokens flops per micro-batch, spread over the stages, at the assumed fraction of peak."""
    for name in ("llama2-30b", "llama3-70b", "gpt-175b"):
        needs = needs_of(name)
        model = MODELS[name]
        weights = model.num_parameters - model.vocab * model.hidden  # looking up an embedding is no product
        least = 6 * weights * 2 * model.seq / (4 * 0.6 * 512e12)
        total = sum(need.seconds for need in needs)
        assert least < total < 2.5 * least


def test_recompute_costs_at_most_one_forward():
    for need in needs_of("llama2-30b"):
        assert 0 < sum(option.extra_s for option in need.options) < need.seconds / 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_stages": 0}, "0 stages cannot share the 80 layers"),
        ({"num_stages": 81}, "81 stages cannot share"),
        ({"tensor_parallel": 7}, "tensor_parallel=7 does not divide the 64 heads"),
        ({"die": Site(name="bare", x=0, y=0, dram_nbytes=1)}, "site 'bare' states no compute_flops_per_s"),
    ],
)
def test_stage_faults(changes, text):
    with pytest.raises(ConfigError, match=text):
        needs_of("llama3-70b", **changes)


# The study


@pytest.fixture(scope="module")
def studies():
    """Every model that fits on every published configuration."""
    out = {}
    for file_name, name in itertools.product(MESHES, MODELS):
        mesh = read_mesh(CONFIGS / file_name)
        if (mesh.name, name) == ("wafer-48g", "gpt-175b"):
            continue
        out[mesh.name, name] = run_study(mesh, MODELS[name], population=40, num_generations=400)
    return out


def test_state_that_does_not_fit_is_refused():
    with pytest.raises(CapacityError, match=r"gpt-175b has 2\.55 TiB of state, but 56 dies of mesh 'wafer-48g'"):
        run_study(read_mesh(CONFIGS / "mesh_wafer_48g.toml"), MODELS["gpt-175b"])


@pytest.mark.parametrize("mesh_name", ["wafer-48g", "wafer-70g", "wafer-96g"])
def test_borrowing_lowers_the_peak_by_a_third_where_activations_dominate(studies, mesh_name):
    study = studies[mesh_name, "llama2-30b"]
    assert study.overflows
    for variant in ("nearest", "regret", "placed"):
        assert study.outcome(variant).borrowed_nbytes > 0
        assert 0.30 <= study.lowered_frac(variant) <= 0.60


def test_peaks_stay_under_the_margin_and_bytes_are_conserved(studies):
    for study in studies.values():
        for outcome in study.outcomes:
            if not outcome.fits:
                continue
            assert outcome.peak_nbytes <= 0.95 * study.capacity_nbytes + 1
            need = np.array([need.nbytes for need in study.needs], np.float64)
            for bit, option in zip(
                outcome.recompute,
                (o for need in study.needs for o in ((need.stage, p) for p in need.options)),
                strict=True,
            ):
                need[option[0]] -= bit * option[1].saved_nbytes
            assert outcome.used_nbytes.sum() == pytest.approx(study.tensor_parallel * need.sum(), rel=1e-12)


def test_lowering_is_what_it_can_be(studies):
    """Borrowing brings the fullest die to the margin and no further, so the gain follows from the overflow alone."""
    for study in studies.values():
        if study.overflows:
            assert study.lowered_frac("regret") == pytest.approx(
                1 - 0.95 * study.capacity_nbytes / study.overflow_peak_nbytes, abs=1e-6
            )


def test_global_cost_is_below_nearest_first(studies):
    for key, study in studies.items():
        nearest = study.outcome("nearest")
        if nearest.borrowed_nbytes == 0:
            continue
        assert study.outcome("regret").global_cost_s <= nearest.global_cost_s * (1 + 1e-9), key
        assert study.outcome("regret").optimum_gap_frac < 1e-9
        assert study.outcome("placed").global_cost_s <= nearest.global_cost_s * (1 + 1e-9), key
        if study.overflows:
            assert study.outcome("placed").global_cost_s < 0.6 * nearest.global_cost_s, key
            assert study.outcome("genetic").global_cost_s < nearest.global_cost_s, key


def test_borrowing_costs_no_throughput_that_recompute_would_not(studies):
    for study in studies.values():
        alone, borrowed = study.outcome("none"), study.outcome("regret")
        assert borrowed.tokens_per_s >= alone.tokens_per_s
        assert sum(borrowed.recompute) <= sum(alone.recompute)
        assert 0 < borrowed.mean_link_frac < borrowed.peak_link_frac < 1


def test_traffic_is_kept_apart(studies):
    study = studies["wafer-70g", "llama2-30b"]
    alone, borrowed = study.outcome("none"), study.outcome("regret")
    assert alone.balancing_loads.hop_nbytes == 0
    assert borrowed.balancing_loads.hop_nbytes > 0
    # The same placement sends the same pipeline traffic, whoever borrows.
    assert np.array_equal(alone.pipeline_loads.nbytes, borrowed.pipeline_loads.nbytes)
    # Out in forward and back in backward: the share of one micro-batch twice.
    in_flight = {
        site: need.num_in_flight for need, group in zip(study.needs, study.groups, strict=True) for site in group
    }
    table = study.mesh.distance_table()
    least = sum(2 * f.nbytes / in_flight[f.sender] * float(table[f.sender, f.helper]) for f in borrowed.flows)
    assert least * (1 - 1e-9) <= borrowed.balancing_loads.hop_nbytes <= 1.2 * least


def test_table_has_a_row_per_variant_and_says_simulated(studies):
    rows = study_table(studies["wafer-96g", "llama3-70b"])
    assert [row["variant"] for row in rows] == list(VARIANTS)
    assert all(row["simulated"] for row in rows)


def test_groups_leave_out_defect_dies():
    mesh = grid_mesh("g", 4, 3, dram_nbytes=10, link_bytes_per_s=1.0, missing=[(1, 1)])
    names = [[mesh.sites[site].name for site in group] for group in die_groups(mesh, 2)]
    assert names == [
        ["die-0-0", "die-1-0"], ["die-0-2", "die-1-2"], ["die-2-2", "die-3-2"], ["die-2-1", "die-3-1"],
        ["die-2-0", "die-3-0"],
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="has 0 rows of tensor_parallel=5"):
        die_groups(mesh, 5)


def test_study_on_a_wafer_with_a_defect():
    mesh = grid_mesh(
        "defect", 8, 7, dram_nbytes=48 * 10**9, link_bytes_per_s=1e12, compute_flops_per_s=5e14, dram_bytes_per_s=2e12,
        sram_nbytes=2**26, missing=[(5, 3)],
    )  # fmt: skip
    study = run_study(mesh, MODELS["llama2-30b"], num_generations=100)
    assert study.num_stages == 13
    assert all(outcome.fits for outcome in study.outcomes)


def test_too_large_a_micro_batch_recomputes_instead():
    mesh = read_mesh(CONFIGS / "mesh_wafer_48g.toml")
    study = run_study(mesh, MODELS["llama2-30b"], micro_batch=9, num_generations=200)
    borrowed = study.outcome("regret")
    assert borrowed.fits
    assert sum(borrowed.recompute) > 0
    hopeless = run_study(mesh, MODELS["llama2-30b"], micro_batch=60, num_generations=50)
    assert not any(outcome.fits for outcome in hopeless.outcomes)
    assert all(outcome.reason and outcome.tokens_per_s == 0 for outcome in hopeless.outcomes)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"variants": ("best",)}, "variant 'best' is not known"),
        ({"num_stages": 1}, "num_stages=1 must be 2 to 14"),
        ({"micro_batch": 0}, "micro_batch=0 must be 1 or more"),
        ({"tensor_parallel": 0}, "tensor_parallel=0 must be 1 or more"),
    ],
)
def test_study_faults(settings, text):
    with pytest.raises(ConfigError, match=text):
        run_study(read_mesh(CONFIGS / "mesh_wafer_48g.toml"), MODELS["llama2-30b"], **settings)


def test_unknown_model():
    with pytest.raises(ConfigError, match=r"model='gpt-5' is not known\. Known: llama2-30b"):
        model_spec("gpt-5")
