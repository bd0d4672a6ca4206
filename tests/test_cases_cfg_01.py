"""CFG-01: nothing is compiled at install or first use, and a constructor that raises half way says one thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _run(code: str) -> subprocess.CompletedProcess[str]:
    """Python without any program on the PATH: no compiler, no linker, no CUDA tool kit can be found."""
    environment = {**os.environ, "PATH": "/nonexistent", "PYTHONPATH": str(ROOT), "CC": "", "CXX": ""}
    return subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=False)


def test_cfg_01_pure_python_wheel() -> None:
    """CFG-01: the build has no extension modules and asks for no compiler."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "ext-modules" not in project["tool"]["setuptools"]
    assert all("setuptools" in need or "wheel" in need for need in project["build-system"]["requires"])
    assert not [
        p for p in (ROOT / "lightning_tieroffload").rglob("*") if p.suffix in (".c", ".cpp", ".cu", ".pyx", ".so")
    ]


def test_cfg_01_import_train_and_doctor_without_a_compiler() -> None:
    """CFG-01: import, a step with our kernels, and `doctor` work where no compiler can be found."""
    done = _run(
        "import torch, lightning_tieroffload as lt\n"
        "m = torch.nn.Linear(8, 8)\n"
        "o = torch.optim.AdamW(m.parameters())\n"
        "lt.offload(m, o, device_budget='1MiB', dram_budget='64MiB', optimizer_kernel='numba')\n"
        "m(torch.ones(2, 8)).sum().backward(); o.step(); lt.engine_of(m).close()\n"
        "import sys; sys.argv = ['tieroffload', 'doctor', '--json']\n"
        "from lightning_tieroffload.cli.main import main\n"
        "main()\n"
    )
    assert done.returncode == 0, done.stderr
    assert {"versions", "accelerator"} <= {check["name"] for check in json.loads(done.stdout)}


def test_cfg_01_a_constructor_that_raises_says_one_thing() -> None:
    """CFG-01: one traceback, and nothing that a half-made object says when it dies."""
    done = _run(
        "import torch, lightning_tieroffload as lt\n"
        "m = torch.nn.Linear(64, 64)\n"
        "lt.offload(m, None, device_budget=1, dram_budget='64MiB')\n"
    )
    assert done.returncode == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "InfeasiblePlanError" in done.stderr
    assert "Exception ignored" not in done.stderr
