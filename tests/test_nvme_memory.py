"""The NVMe tier and memory, seen from outside the process: budgets hold for what is resident; the page cache too."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from loopkit import python, start
from test_memory import held_nbytes

pytestmark = pytest.mark.alone
MiB, GiB = 1 << 20, 1 << 30

SCRIPT = """
import gc, json, sys
import torch
import lightning_tieroffload as tieroffload
from transformers import GPT2Config, GPT2LMHeadModel

options = json.load(open("options.json"))

def say(word):
    print(word, flush=True)
    sys.stdin.readline()

def train(layers, width, vocabulary, num_steps, settings, seen):
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, n_positions=64,
                                           vocab_size=vocabulary, bos_token_id=0, eos_token_id=0))
    num_params = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tieroffload.offload(model, optimizer, device="cpu", nvme_paths=["flash"], **settings)
    gc.collect()
    seen("attached")
    losses = []
    for step in range(num_steps):
        ids = torch.randint(0, vocabulary, (1, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seen(f"step {step}")
    report = tieroffload.engine_of(model).report()
    return {"num_params": num_params, "losses": losses, "tiers": report["tiers"], "moved": report["moved_nbytes"],
            "homes": sorted({(u["param_home"], u["state_home"], u["grad_home"]) for u in report["plan"]["units"]})}

# Everything that any run needs is imported and warm before the baseline: a tiny model goes all the way first.
train(2, 64, 100, 2, {"device_budget": "16MiB", "dram_budget": "2MiB"}, lambda word: None)
gc.collect()
say("baseline")
found = train(options["layers"], options["width"], options["vocabulary"], 3, options["settings"], say)
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""


def cached_nbytes() -> int:
    """The system's page cache of files, without shared memory."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * (int(fields["Cached"].split()[0]) - int(fields["Shmem"].split()[0]))


def measure(folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """What the run says of itself, and the growth of what it held and of the page cache, in the most while training."""
    (folder / "options.json").write_text(json.dumps(options))
    process = start(SCRIPT, cwd=folder, stdin=subprocess.PIPE, OMP_NUM_THREADS="2")
    assert process.stdout is not None
    assert process.stdin is not None
    lines = _Lines(process.stdout.fileno())
    baseline: dict[str, int] = {}
    peak = {"held": 0, "cached": 0}
    found: dict[str, Any] = {}
    is_training = False
    deadline_s = time.monotonic() + 1500
    try:
        while not found:
            assert time.monotonic() < deadline_s, "the run does not end"
            try:
                now = {"held": held_nbytes(process.pid), "cached": cached_nbytes()}
            except ProcessLookupError:
                raise AssertionError(f"it ended with {process.wait()}: {process.stderr.read()[-3000:]}") from None
            if is_training:
                peak = {key: max(value, now[key]) for key, value in peak.items()}
            for line in lines.new():
                if line.startswith("{"):
                    found = json.loads(line)
                elif line == "baseline":
                    baseline = now
                elif line == "attached":
                    is_training = True
                elif not line.startswith("step "):
                    continue  # the plan's table
                process.stdin.write("\n")
                process.stdin.flush()
        process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return found, {key: peak[key] - baseline[key] for key in peak}


class _Lines:
    """Whole lines from a pipe as they come, without waiting for more than a moment."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def new(self) -> list[str]:
        if not select.select([self._fd], [], [], 0.02)[0]:
            return []
        *whole, self._rest = (self._rest + os.read(self._fd, 1 << 16)).split(b"\n")
        return [line.decode().strip() for line in whole]


_ATTACH = """
import json, sys, threading, time
import torch
from torch import nn
import lightning_tieroffload as tieroffload
from test_cases_mem import held_nbytes

def build(depth, width):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def offload(model, dram):
    tieroffload.offload(model, None, device="cpu", device_budget=9 << 20, dram_budget=dram, nvme_paths=["flash"])
    return tieroffload.engine_of(model)

offload(build(4, 64), 100000).close()
empty = held_nbytes()
model = build(16, 1024)
before = held_nbytes()
peaks, ended = [0], threading.Event()

def watch():
    while not ended.is_set():
        text = open("/proc/self/smaps_rollup").read()
        kib = [int(line.split()[1]) for line in text.splitlines() if line.startswith(("Anonymous", "Pss_Shmem"))]
        peaks.append(1024 * sum(kib) - before)
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
engine = offload(model, 18 << 20)
ended.set()
thread.join()
report = engine.report()["tiers"]["dram"]
print(json.dumps({"peak": max(peaks), "after": held_nbytes() - empty, "model": before - empty, "dram": report}))
"""


def test_mem_04_attaching_takes_no_second_copy(tmp_path: Path) -> None:
    """MEM-04: 64 MiB of parameters under 18 MiB of DRAM: unit by unit to flash, each one's first memory given back."""
    done = python(_ATTACH, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] >= 64 * MiB
    assert found["dram"]["peak_nbytes"] <= found["dram"]["budget_nbytes"] == 18 * MiB
    assert found["peak"] <= 24 * MiB, found  # beside the model that is there before
    assert found["after"] <= 24 * MiB, found


@pytest.mark.slow
def test_half_a_billion_parameters_in_one_gib(tmp_path: Path) -> None:
    """0.5 G parameters (8 GB of state) train with 1 GiB of DRAM, everything on flash; resident growth is in budget."""
    # Few tokens and a small vocabulary: activations are the model's own, and so are the two whole gradients that
    # autograd makes of a tied head before it adds them.
    if shutil.disk_usage(tmp_path).free < 16 * GiB:
        pytest.skip("needs 16 GiB of disk")
    device, dram = 320 * MiB, GiB
    settings = {"device_budget": device, "dram_budget": dram, "optimizer_kernel": "torch"}
    found, growth = measure(tmp_path, layers=26, width=1280, vocabulary=4000, settings=settings)
    assert found["num_params"] >= 500_000_000
    assert found["homes"] == [["nvme", "nvme", "nvme"]]
    for tier in ("device", "dram", "nvme"):
        assert found["tiers"][tier]["peak_nbytes"] <= found["tiers"][tier]["budget_nbytes"], tier
    assert found["tiers"]["dram"]["budget_nbytes"] == dram
    state_nbytes = 16 * found["num_params"]
    print(json.dumps({"growth": growth, **found}))
    assert growth["held"] <= 1.15 * (device + dram), growth
    assert growth["cached"] <= 0.1 * state_nbytes, growth
    assert os.listdir(tmp_path / "flash") == []
