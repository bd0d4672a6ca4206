"""Predicted next to measured: step time and peak device memory of the plan that a run makes, at several budgets.

    python tests/benchmarks/forecast.py --size 1b --budgets 12GiB,20GiB,40GiB --batch 8 --seq 2048
    python tests/benchmarks/forecast.py --size 3b --budgets 16GiB,24GiB,64GiB

Each line is a process of its own (``tieroffload bench train --no-recompute``). Steps: median of those after the plan.
Memory: on a GPU what torch allocated at most; without one what the engine held at most, activations left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any


def run(size: str, budget: str, activations: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "lightning_tieroffload", "bench", "train", "--json", "--no-recompute", "--size", size,
        "--batch", str(arguments.batch), "--seq", str(arguments.seq), "--steps", str(arguments.steps), "--warmup", "6",
        "--device-budget", budget, "--dram-budget", arguments.dram_budget, "--activations", activations,
        "--amp", arguments.amp, *arguments.rest,
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return {"error": f"exit code {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--budgets", default="12GiB,20GiB,40GiB", help="device budgets, with commas")
    parser.add_argument("--activations", default="auto", help="auto, or settings to compare with: auto,recompute,keep")
    parser.add_argument("--dram-budget", default="96GiB")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--amp", default="bf16-mixed")
    parser.add_argument("rest", nargs="*", help="more options of bench train, after --")
    arguments = parser.parse_args()
    print(
        "size  budget    activations  step: predicted, measured, off     peak GiB: predicted, measured, off   bound by"
    )
    for budget in arguments.budgets.split(","):
        for activations in arguments.activations.split(","):
            found = run(arguments.size, budget, activations, arguments)
            if "error" in found:
                print(f"{arguments.size:5} {budget:9} {activations:12} {found['error']}")
                continue
            forecast, measured_s = found["report"]["forecast"], found["step_s"]["median"]
            peak = found.get("device_peak_nbytes", found["report"]["tiers"]["device"]["peak_nbytes"]) / 2**30
            predicted = forecast["device_peak_nbytes"] / 2**30
            plan = found["report"]["plan"]["units"]
            kinds = sorted({line["activations"].split(" (")[0] for line in plan})
            counts = ", ".join(f"{sum(line['activations'].startswith(kind) for line in plan)} {kind}" for kind in kinds)
            off_s = forecast["step_s"] / measured_s - 1
            off_peak = predicted / peak - 1 if peak else float("nan")
            step = f"{forecast['step_s']:.3f} s, {measured_s:.3f} s, {off_s:+.1%}"
            memory = f"{predicted:.2f}, {peak:.2f}, {off_peak:+.1%}"
            who = f"{arguments.size:5} {budget:9} {activations:12}"
            print(f"{who} {step:32} {memory:36} {forecast['bottleneck']}; {counts}")


if __name__ == "__main__":
    main()
