"""A step with optimizer state on a disk of a given speed: its time over what the disk needs for the bytes moved.

    python tests/benchmarks/flash_floor.py --rate 100MB --size 0.1b --batch 1 --seq 128 --steps 4 -- \\
        --nvme-paths /tmp/flash --state-home nvme --dram-budget 1300MiB

Every transfer waits in one queue of ``--rate`` bytes per second, reads and writes together, so that the disk of a slow
machine takes a given multiple of compute's time. Prints the line of ``tieroffload bench train``, and when the disk was
idle.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_tieroffload.cli.bench_train import run_job
from lightning_tieroffload.cli.options import refuse_rest, take_settings
from lightning_tieroffload.sizes import parse_nbytes


class SlowDisk:
    """``os.preadv`` and ``os.pwritev`` at so many bytes per second together, in the order of the calls."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.busy: list[tuple[float, float, str]] = []  # (from, to, verb), in order
        self._lock = threading.Lock()
        self._free_s = 0.0
        self._real = {"read": os.preadv, "write": os.pwritev}
        os.preadv = self._in_turn("read")  # type: ignore[assignment]
        os.pwritev = self._in_turn("write")  # type: ignore[assignment]

    def _in_turn(self, verb: str) -> Callable[[int, Any, int], int]:
        def call(fd: int, parts: Any, offset: int) -> int:
            with self._lock:
                begin_s = max(time.perf_counter(), self._free_s)
                self._free_s = begin_s + sum(len(part) for part in parts) / self.bytes_per_s
                end_s = self._free_s
                self.busy.append((begin_s, end_s, verb))
            moved = self._real[verb](fd, parts, offset)
            time.sleep(max(0.0, end_s - time.perf_counter()))
            return moved

        return call

    def gaps_s(self, begin_s: float, end_s: float) -> list[tuple[float, float]]:
        """(seconds since ``begin_s``, length) of each time that the disk had nothing to do."""
        found, at_s = [], begin_s
        for start_s, stop_s, _ in self.busy:
            if start_s > at_s and start_s < end_s:
                found.append((at_s - begin_s, start_s - at_s))
            at_s = max(at_s, stop_s)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100MB", help="bytes per second of the disk")
    parser.add_argument("--size", default="0.1b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("rest", nargs="*", help="settings, after --")
    arguments = parser.parse_args()
    config, rest = take_settings(arguments.rest)
    refuse_rest(rest)
    disk = SlowDisk(parse_nbytes(arguments.rate))
    job = {
        "size": arguments.size, "batch": arguments.batch, "seq": arguments.seq, "steps": arguments.steps,
        "warmup": arguments.warmup, "grad_accum": 1, "clip": 1.0, "face": "plain", "amp": "bf16-mixed", "cap": "",
        "seed": 0, "recompute": True, "config": config.to_json(),
    }  # fmt: skip
    figures = run_job(job)
    marks_s = figures["marks_s"]
    begin_s, end_s = marks_s[arguments.warmup - 1], marks_s[-1]
    gaps = disk.gaps_s(begin_s, end_s)
    figures["disk"] = {
        "bytes_per_s": disk.bytes_per_s,
        "idle_s_per_step": sum(length_s for _, length_s in gaps) / arguments.steps,
        "longest_gaps_s": sorted(gaps, key=lambda gap: -gap[1])[:12],
        "step_ends_s": [mark_s - begin_s for mark_s in marks_s[arguments.warmup :]],
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
