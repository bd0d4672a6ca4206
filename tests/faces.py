"""Start ``faces_job.py`` in a process of its own, plain or offloaded, through the front ends' own doors."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
JOB = str(Path(__file__).resolve().parent / "faces_job.py")
FACES = ("lightning", "accelerate")


def run_face(
    face: str, *arguments: str, folder: Path, settings: dict[str, Any] | None = None, cpu: bool = False
) -> dict[str, Any]:
    """What the job printed, and the seconds of its whole process.

    Args:
        face: "lightning" or "accelerate".
        arguments: more of the job's options.
        folder: where the file for `accelerate launch` is written.
        settings: those of tieroffload, as an environment variable for Lightning and as a `tieroffload_config` block for
            Accelerate. None: the run is plain.
        cpu: train on the CPU.
    """
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("TIEROFFLOAD_", "ACCELERATE_"))
    }
    if settings is not None:
        settings = {**settings, "trace_path": str(folder / "report")}
    # Storages of many lengths come and go: fixed segments would reserve GiB above what is allocated.
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    job = [JOB, face, *arguments, *(["--cpu"] if cpu else [])]
    if face == "lightning":
        command = ["-m", "lightning_tieroffload.run", *job]
        if settings is not None:
            command += ["--strategy", "tieroffload"]
            environment["TIEROFFLOAD_CONFIG"] = json.dumps(settings)
    else:
        file = folder / ("offloaded.yaml" if settings is not None else "plain.yaml")
        content: dict[str, Any] = {
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1,
            "mixed_precision": "bf16", "use_cpu": cpu,
        }  # fmt: skip
        if not cpu:
            content["gpu_ids"] = "0"
        if settings is not None:
            content["tieroffload_config"] = settings
        file.write_text(yaml.safe_dump(content))
        command = ["-m", "lightning_tieroffload", "launch", "--config_file", str(file), *job]
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    result |= {"process_s": time.perf_counter() - start_s, "settings": settings}
    if settings is not None:  # there is a report only where an engine was
        result["report"] = json.loads((folder / "report" / "report.json").read_text())
    result["median_step_s"] = statistics.median(result["step_s"][len(result["step_s"]) // 4 :])
    return result


def largest_relative_difference(ours: dict[str, Any], plain: dict[str, Any]) -> float:
    """Of the losses, step by step."""
    pairs = zip(ours["losses"], plain["losses"], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)
