"""How much memory training takes, measured from outside, against what the budgets promise.

A model of 50 M parameters whose training state (16 bytes a parameter) is four times the device budget trains in a
process of its own. From here we read what the kernel says that the process holds: anonymous and shared memory, before
the model is built and again and again while it trains (first steps left out).
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from loopkit import start

pytestmark = pytest.mark.alone
WIDTH, NUM_LAYERS = 1024, 48
NUM_PARAMS = NUM_LAYERS * WIDTH * (WIDTH + 1) + WIDTH + 1
DEVICE_BUDGET = 16 * NUM_PARAMS // 4

SCRIPT = """
import gc, json, sys
import torch
import lightning.pytorch as pl
from loopkit import Module, loader, mlp, trainer

options = json.load(open("options.json"))

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

class Steps(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx in (4, 10):
            say(f"batch {batch_idx}")

# Everything that any run needs is imported and warm before the baseline: a tiny model goes all the way first.
def run(width, layers, batches, settings, **more):
    module = Module(lambda: mlp(layers, width=width))
    made = trainer(settings, max_epochs=1, precision=options["precision"],
                   accumulate_grad_batches=options["accumulate"], **more)
    made.fit(module, loader(batches, batch=8, width=width))
    return made

run(64, 2, 4, {**options["settings"], "device_budget": "16MiB"})
gc.collect()
say("baseline")
made = run(options["width"], options["layers"], 11, options["settings"], callbacks=[Steps()])
print(json.dumps(made.strategy.report()["tiers"]), flush=True)
sys.stdin.readline()
"""


def held_nbytes(pid: int) -> int:
    """Anonymous and shared memory that a process holds just now."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    return fields["Anonymous"] + fields["Pss_Shmem"]


@dataclass
class Measured:
    growth_nbytes: int
    num_samples: int
    tiers: dict[str, Any]

    @property
    def per_param(self) -> float:
        """Bytes per parameter beside 1.1 times the device budget."""
        return (self.growth_nbytes - 1.1 * DEVICE_BUDGET) / NUM_PARAMS


def measure(folder: Path, **options: Any) -> Measured:
    (folder / "options.json").write_text(json.dumps({"width": WIDTH, "layers": NUM_LAYERS, **options}))
    process = start(SCRIPT, cwd=folder, stdin=subprocess.PIPE, OMP_NUM_THREADS="2")
    assert process.stdout is not None
    assert process.stdin is not None
    found: dict[str, int] = {}
    peak_nbytes, num_samples, tiers = 0, 0, {}
    is_training = False
    deadline_s = time.monotonic() + 400
    try:
        while not tiers:
            assert time.monotonic() < deadline_s, "the run does not end"
            readable, _, _ = select.select([process.stdout], [], [], 0.005)
            if is_training:
                peak_nbytes = max(peak_nbytes, held_nbytes(process.pid))
                num_samples += 1
            if not readable:
                continue
            line = process.stdout.readline().strip()
            assert line, process.stderr.read()[-3000:]
            if line.startswith("{"):
                tiers = json.loads(line)
            elif line in ("baseline", "batch 4", "batch 10"):
                found[line] = held_nbytes(process.pid)
                is_training = line == "batch 4"
            process.stdin.write("\n")
            process.stdin.flush()
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert num_samples > 20
    return Measured(peak_nbytes - found["baseline"], num_samples, tiers)


def bound_and_report(measured: Measured, bytes_per_param: int, what: str) -> None:
    device = measured.tiers["device"]
    assert device["budget_nbytes"] == DEVICE_BUDGET
    assert device["peak_nbytes"] <= DEVICE_BUDGET
    bound_nbytes = 1.1 * DEVICE_BUDGET + bytes_per_param * NUM_PARAMS
    numbers = (
        f"{what}: host growth {measured.growth_nbytes / 1e6:.0f} MB, bound {bound_nbytes / 1e6:.0f} MB; "
        f"{measured.per_param:.2f} bytes per parameter beside 1.1 x device_budget, allowed {bytes_per_param}; "
        f"device peak {device['peak_nbytes'] / 1e6:.0f} of {DEVICE_BUDGET / 1e6:.0f} MB"
    )
    print(numbers)
    assert measured.growth_nbytes <= bound_nbytes, numbers


@pytest.mark.slow
def test_fp32_with_accumulation(tmp_path: Path) -> None:
    """fp32, accumulation 2: device peak within its budget; host growth at most 1.1 x budget + 16 bytes a parameter."""
    settings = {"device_budget": DEVICE_BUDGET, "dram_budget": "4GiB"}
    measured = measure(tmp_path, precision="32-true", accumulate=2, settings=settings)
    bound_and_report(measured, 16, "fp32, accumulation 2")


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["torch", "numba"])
def test_bf16_mixed_without_accumulation(tmp_path: Path, kernel: str) -> None:
    """bf16-mixed: device peak within its budget; host growth at most 1.1 x budget + 14 bytes a parameter."""
    settings = {"device_budget": DEVICE_BUDGET, "dram_budget": "4GiB", "optimizer_kernel": kernel}
    measured = measure(tmp_path, precision="bf16-mixed", accumulate=1, settings=settings)
    bound_and_report(measured, 14, f"bf16-mixed, {kernel} kernel")
