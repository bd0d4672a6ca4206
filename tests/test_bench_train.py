"""`tieroffload bench train`: what its JSON line says of a run with optimizer state on flash."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_tieroffload.cli import bench_train
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.sizes import MiB


@pytest.mark.parametrize("face", ["plain", "lightning"])
def test_a_line_has_the_floor_and_the_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, face: str) -> None:
    """One line says where state is, what a step moved, the disk's rates beside the run, and the time over the floor."""
    monkeypatch.setattr(bench_train, "_PROBE_NBYTES", 64 * MiB)
    config = TierOffloadConfig(nvme_paths=[tmp_path], state_home="nvme", dram_budget="13MiB", device_budget="64MiB")
    figures = bench_train.run_job({
        "size": "tiny", "batch": 1, "seq": 32, "steps": 2, "warmup": 1, "grad_accum": 1, "clip": 1.0, "face": face,
        "amp": "bf16-mixed", "cap": "", "seed": 0, "config": config.to_json(), "probe_s": 0.01,
    })  # fmt: skip
    flash = figures["flash"]
    num_parameters = figures["num_parameters"]
    assert flash["frac_of_units_with_state_on_flash"] == 1.0
    assert flash["moved_bytes_per_parameter"]["write"] == pytest.approx(8, rel=0.02)
    assert 0 <= flash["moved_bytes_per_parameter"]["read"] < 9
    assert flash["mixed_bytes_per_s"] > 0
    assert len(flash["probes_before_and_after"]) == 2
    assert flash["floor_s"] == pytest.approx(20 * num_parameters / flash["mixed_bytes_per_s"])
    assert flash["ratio"] == pytest.approx(figures["window_s"] / 2 / flash["floor_s"])
    assert flash["own_ratio"] > 0
    gc.collect()  # nobody has closed the engine, and the run is over
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("face", ["resident", "accelerate"])
def test_a_run_gets_the_environment_that_is_made_for_it(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Accelerate the engine is there by the environment alone; on a GPU segments grow by it."""
    environments: list[dict[str, str]] = []
    run = bench_train.subprocess.run

    def noted(*args: Any, env: dict[str, str], **kwargs: Any) -> Any:
        environments.append(env)
        return run(*args, env=env, **kwargs)

    monkeypatch.setattr(bench_train.subprocess, "run", noted)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    config = TierOffloadConfig(device_budget="64MiB", dram_budget="1GiB")
    figures = bench_train._in_a_process({
        "size": "tiny", "batch": 1, "seq": 32, "steps": 2, "warmup": 1, "grad_accum": 1, "clip": 1.0, "face": face,
        "amp": "bf16-mixed", "cap": "", "seed": 0, "config": config.to_json(), "deterministic": True,
    })  # fmt: skip
    assert (figures["report"] is not None) == (face == "accelerate")
    (env,) = environments
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert env["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
