"""Predicted next to measured: step time and peak device memory of the plan that a run makes; and the plan's rivals.

    python tests/benchmarks/forecast.py --size 1b --budgets 12GiB,20GiB,40GiB --out forecast.json
    python tests/benchmarks/forecast.py --size 1b --budgets 20GiB --out rivals.json --rounds 2 \
        --against all_offloaded,keep_all,lifetime,greedy
    python tests/benchmarks/forecast.py --size tiny --budgets 4MiB,6MiB,64MiB --batch 4 --seq 64 --amp 32   # CPU

One process; each run builds its model anew, and rivals take turns with the planned run, ``--rounds`` times. Steps:
medians over all rounds, of steps after the last plan. Memory: what torch allocated at most in those steps; without a
GPU what the engine held at most, next to the forecast less activations. With ``--out`` everything goes to a JSON file:
each run's plan, profile, report and steps.

- ``all_offloaded``: every layer recomputes, parameters stream, the CPU updates everything.
- ``keep_all``: activations stay, which takes their part of the budget; state stays too as far as the rest goes.
- ``lifetime``, ``greedy``: those planners' plans, from a profile of their own run.
- ``keep``, ``offload``: the engine's fixed policy with that setting, and all of the budget for the engine's own: what
  offload costs, rather than rivals.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch is there

import torch

from lightning_tieroffload.cli.bench_train import run_job
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.errors import TierOffloadError
from lightning_tieroffload.planning.plan import Plan, held_peak_nbytes
from lightning_tieroffload.planning.profile import PROFILE_FILE_NAME, Profile
from lightning_tieroffload.sizes import MiB, parse_nbytes

RIVALS = ("all_offloaded", "keep_all", "lifetime", "greedy", "keep", "offload")
NUM_STEPS_AFTER_WATCHING = 12
"""To settle, to be compared with the forecast, and to be watched again where that is off."""


def settings_of(name: str, budget: str, found: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of one run; ``found`` is the planned run's result, whose profile says what activations take."""
    settings: dict[str, Any] = {
        "device_budget": budget, "dram_budget": arguments.dram_budget, "profile_steps": arguments.profile_steps
    }  # fmt: skip
    if arguments.optimizer_kernel:
        settings |= {"optimizer_kernel": arguments.optimizer_kernel, "update_on": arguments.update_on}
    if name == "all_offloaded":
        settings |= {"activations": "recompute", "update_on": "cpu", "profile_steps": 0}
    elif name == "keep_all":
        units = found["report"]["planned"][PROFILE_FILE_NAME]["units"]
        left_nbytes = parse_nbytes(budget, key="budget") - sum(unit["activation_nbytes"] for unit in units)
        settings |= {"activations": "keep", "profile_steps": 0, "device_budget": max(1, left_nbytes)}
    elif name in ("keep", "offload"):
        settings |= {"activations": name, "profile_steps": 0}
    elif name in ("lifetime", "greedy"):
        settings |= {"planner": name}
    return settings


def run(settings: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """One run's figures, or what kept it from running."""
    job = {
        "size": arguments.size, "batch": arguments.batch, "seq": arguments.seq, "steps": arguments.steps,
        "warmup": 2 * (arguments.profile_steps + 2) + NUM_STEPS_AFTER_WATCHING, "grad_accum": arguments.grad_accum,
        "clip": 1.0, "face": "plain", "amp": arguments.amp, "cap": arguments.cap, "seed": 0, "recompute":
        arguments.recompute, "deterministic": False, "with_plan": True,
        "config": TierOffloadConfig(**settings).to_json(),
    }  # fmt: skip
    if not settings["profile_steps"]:
        job["warmup"] = NUM_STEPS_AFTER_WATCHING // 2
    start_s = time.perf_counter()
    try:
        found = run_job(job)
    except (TierOffloadError, RuntimeError) as error:  # out of memory is a RuntimeError
        found = {"error": f"{type(error).__name__}: {error}"}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {"settings": settings, "took_s": time.perf_counter() - start_s, **found}


def compare(found: dict[str, Any]) -> dict[str, Any]:
    """Forecast against measurement of one planned run."""
    report = found["report"]
    plan, profile = (report["planned"][name] for name in ("plan.json", PROFILE_FILE_NAME))
    forecast, step_s = report["forecast"], found["step_s"]["median"]
    predicted_nbytes, peak_nbytes = forecast["device_peak_nbytes"], found.get("window_device_peak_nbytes")
    if peak_nbytes is None:  # no GPU: nobody counts activations
        peak_nbytes = report["window_peak_nbytes"]
        bare = [{**unit, "activation_nbytes": 0, "workspace_nbytes": 0} for unit in profile["units"]]
        predicted_nbytes = held_peak_nbytes(
            Profile.from_json({**profile, "units": bare, "key": None}).units,
            [line.choice for line in Plan.from_json(plan).units],
            report["tiers"]["device"]["budget_nbytes"] - report["kept_nbytes"],
            num_micro_batches=profile["notes"]["num_micro_batches"],
            waits_for_copies=True,
        )
    kinds = [line["activation"] for line in plan["units"][:-1]]
    places = [line["update_on"] for line in plan["units"][:-1]]
    return {
        "predicted_s": forecast["step_s"], "measured_s": step_s, "off_frac": forecast["step_s"] / step_s - 1,
        "predicted_nbytes": predicted_nbytes, "measured_nbytes": peak_nbytes,
        "off_nbytes_frac": predicted_nbytes / peak_nbytes - 1 if peak_nbytes else None,
        "bottleneck": forecast["bottleneck"], "num_plans": report["plan"]["num_plans"], "note": report["plan"]["note"],
        "activations": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "updates": {place: places.count(place) for place in sorted(set(places))},
    }  # fmt: skip


def describe(name: str, budget: str, found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{name:14} {budget:8} {found['error'].splitlines()[0][:150]}"
    said = f"{name:14} {budget:8} {found['step_s']['median']:.4f} s"
    off = found.get("compared")
    if off is None:
        return said
    peak_mib, predicted_mib = off["measured_nbytes"] / MiB, off["predicted_nbytes"] / MiB
    return (
        f"{said}, predicted {off['predicted_s']:.4f} ({off['off_frac']:+.1%}); peak {peak_mib:,.1f} MiB, predicted "
        f"{predicted_mib:,.1f} ({off['off_nbytes_frac'] or 0:+.1%}); bound by {off['bottleneck']}; "
        f"{off['activations']}, {off['updates']}"
    )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1b")
    parser.add_argument("--budgets", default="12GiB,20GiB,40GiB", help="device budgets, with commas")
    parser.add_argument("--dram-budget", default="96GiB")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a run")
    parser.add_argument("--profile-steps", type=int, default=3)
    parser.add_argument("--amp", default="bf16-mixed")
    parser.add_argument("--cap", default="", help="most device memory that the process may allocate")
    parser.add_argument("--against", default="", help=f"rivals, with commas: {','.join(RIVALS)}")
    parser.add_argument("--rounds", type=int, default=1, help="how often the runs take turns")
    parser.add_argument("--recompute", action="store_true", help="the model checkpoints its layers itself")
    parser.add_argument("--optimizer-kernel", default="", help="numba: our kernels without a GPU too")
    parser.add_argument("--update-on", default="auto")
    parser.add_argument("--out", default="", help="a file for everything as JSON, written after each run")
    arguments = parser.parse_args(argv)
    rivals = [name for name in arguments.against.split(",") if name]
    unknown = sorted(set(rivals) - set(RIVALS))
    if unknown:
        parser.error(f"--against knows {', '.join(RIVALS)}, not {', '.join(unknown)}")
    result: dict[str, Any] = {"arguments": vars(arguments), "runs": [], "summary": {}}
    for budget in arguments.budgets.split(","):
        planned: dict[str, Any] = {}
        steps_s: dict[str, list[float]] = {}
        for turn in range(arguments.rounds):
            for name in ["planned", *rivals]:
                if name == "keep_all" and "error" in planned:
                    continue
                found = run(settings_of(name, budget, planned, arguments), arguments)
                if "error" not in found:
                    steps_s.setdefault(name, []).extend(found["step_s"]["all"])
                    if found["report"]["forecast"]["step_s"] is not None:
                        found["compared"] = compare(found)
                planned = found if name == "planned" else planned
                result["runs"].append({"name": name, "budget": budget, "turn": turn, **found})
                print(describe(name, budget, found), file=sys.stderr, flush=True)
                medians_s = {each: statistics.median(laps) for each, laps in steps_s.items()}
                rival_s = min((s for each, s in medians_s.items() if each != "planned"), default=None)
                result["summary"][budget] = {
                    "median_s": medians_s,
                    "of_best_rival": medians_s["planned"] / rival_s if rival_s and "planned" in medians_s else None,
                    "compared": planned.get("compared"),
                }
                if arguments.out:
                    Path(arguments.out).write_text(json.dumps(result), encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))
    return result


if __name__ == "__main__":
    main()
