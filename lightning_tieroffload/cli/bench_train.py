"""Floor 12. `tieroffload bench train`: training steps of a Llama shape, offloaded and resident, one JSON line each.

Each run is a process of its own, so that neither sees the other's memory. Wall clock over the whole timed window,
ending when the last update has landed; data are made beforehand.

With ``nvme_paths`` a window also ends when the last write has, and the line has "flash": what a bare loop of reads and
writes made of the disk before and after (same process), what a step moved, and how long a step takes over the floor:
10 bytes of state a parameter each way at the mixed rate.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import typer

from lightning_tieroffload.cli.options import SETTINGS_HELP, refuse_rest, take_settings
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.errors import ConfigError, TierOffloadError
from lightning_tieroffload.io.probe import probe_path
from lightning_tieroffload.llama_shape import LLAMA_SIZES, LlamaShape
from lightning_tieroffload.sizes import GiB, MiB, parse_nbytes
from lightning_tieroffload.trace import TIMELINE_FILE_NAME
from lightning_tieroffload.whole_file import write_whole

__all__ = ["bench_train", "run_job"]

FACES = ("plain", "lightning", "accelerate", "resident")
_PROBE_NBYTES = 1 * GiB
_STATE_BYTES = 10  # a parameter: low half of the master, two moments in fp32


def bench_train(
    ctx: typer.Context,
    model_size: str = typer.Option("tiny", "--size", help=f"One of {', '.join(LLAMA_SIZES)}."),
    batch: int = typer.Option(8, min=1, max=2**20, help="Sequences a micro-batch."),
    seq: int = typer.Option(2048, min=2, max=2**24, help="Tokens a sequence; each predicts the next."),
    steps: int = typer.Option(20, min=1, help="Timed steps."),
    warmup: int = typer.Option(5, min=1, help="Steps before the timed ones."),
    grad_accum: int = typer.Option(1, min=1, help="Micro-batches a step."),
    clip: float = typer.Option(1.0, min=0, help="Largest gradient norm; 0 switches clipping off."),
    face: str = typer.Option("plain", help=f"One of {', '.join(FACES)}."),
    amp: str = typer.Option("bf16-mixed", help="bf16-mixed or 32."),
    cap: str = typer.Option("", help="Most memory of a GPU that the process may allocate, e.g. 24GiB."),
    against: str = typer.Option("", help="'resident' runs the same job without offloading too."),
    recompute: bool = typer.Option(
        True, help="Each layer checkpoints itself; without, its activations are the settings' business."
    ),
    seed: int = typer.Option(0, min=0, max=2**31 - 1, help="Seed of weights and data."),
    probe_seconds: float = typer.Option(
        1.0, min=0.001, max=600, help="With flash: seconds for each figure of the disk, before and after."
    ),
    deterministic: bool = typer.Option(
        False, "--deterministic", help="Use torch's deterministic algorithms, to compare runs bit by bit."
    ),
    as_json: bool = typer.Option(False, "--json", help="Only the JSON lines."),
    trace: str = typer.Option(
        "", help="Write the timeline of the last steps (Chrome trace, trace_steps) to this file."
    ),
) -> None:
    """Measure training steps of a Llama shape with random weights."""
    config, rest = take_settings(list(ctx.args))
    refuse_rest(rest)
    if (
        model_size not in LLAMA_SIZES
        or face not in FACES
        or amp not in ("bf16-mixed", "32")
        or against not in ("", "resident")
    ):
        raise ConfigError(
            f"--size is one of {', '.join(LLAMA_SIZES)}, --face one of {', '.join(FACES)}, --amp bf16-mixed or 32, "
            "--against resident."
        )
    if cap:
        parse_nbytes(cap, key="--cap")
    if trace and not os.access(folder := os.path.dirname(os.path.abspath(trace)), os.W_OK | os.X_OK):
        raise ConfigError(f"--trace {trace} cannot be written: {folder} is not a directory that this user may write.")
    job: dict[str, Any] = {
        "size": model_size, "batch": batch, "seq": seq, "steps": steps, "warmup": warmup, "grad_accum": grad_accum,
        "clip": clip, "face": face, "amp": amp, "cap": cap, "seed": seed, "recompute": recompute,
        "deterministic": deterministic, "probe_s": probe_seconds, "config": config.to_json(),
    }  # fmt: skip
    ours = _traced(job, config, trace) if trace else _in_a_process(job)
    if against == "resident":
        resident = _in_a_process({**job, "face": "resident", "cap": ""})
        print(json.dumps(resident))
        ours["frac_of_resident"] = ours["tokens_per_s"] / resident["tokens_per_s"]
        pairs = zip(ours["losses"], resident["losses"], strict=True)
        ours["largest_relative_loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    print(json.dumps(ours))
    if not as_json:
        text = f"{ours['tokens_per_s']:.0f} tokens/s, {ours['step_s']['median']:.3f} s a step"
        if "frac_of_resident" in ours:
            text += f", {100 * ours['frac_of_resident']:.1f} % of resident"
        print(text, file=sys.stderr)


bench_train.__doc__ = f"{bench_train.__doc__} {SETTINGS_HELP}"


def _traced(job: dict[str, Any], config: TierOffloadConfig, path: str) -> dict[str, Any]:
    """The run, and its timeline in ``path`` even where it fails."""
    if job["face"] == "resident":
        raise ConfigError(
            "--trace shows what the engine does, and the resident run has none: leave one of the two out."
        )
    with tempfile.TemporaryDirectory() as directory:
        try:
            return _in_a_process({**job, "config": config.replaced(trace_path=directory).to_json()})
        finally:
            made = os.path.join(directory, TIMELINE_FILE_NAME)
            if os.path.exists(made):
                with open(made, encoding="utf-8") as file:
                    write_whole(path, file.read())


def _in_a_process(job: dict[str, Any]) -> dict[str, Any]:
    # Storages of many lengths come and go: fixed segments would reserve GiB above what is allocated.
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ}
    if job["deterministic"]:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if job["face"] == "accelerate":  # what `accelerate launch --config_file` puts into the environment of a script
        environment |= {"ACCELERATE_USE_TIEROFFLOAD": "true", "TIEROFFLOAD_CONFIG": job["config"]}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_tieroffload.cli.bench_train", json.dumps(job)],
        stdout=subprocess.PIPE, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode != 0:
        raise ConfigError(f"the {job['face']} run failed with exit code {done.returncode}; its messages are above.")
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


class _Timer:
    """Wall clock of each step; the window from the end of the warm-up to when everything has landed."""

    def __init__(self, device: torch.device, warmup: int) -> None:
        self._device = device
        self._warmup = warmup
        self.marks_s: list[float] = []
        self.warmup_peak_nbytes = 0
        self.losses: list[torch.Tensor] = []
        self.engine: Any = None
        self.moved_nbytes: list[dict[str, int]] = []  # so far, when the window began and when it ended

    def settle(self) -> None:
        if self.engine is not None:
            self.engine.flush()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self.engine is not None and self.engine.core.store is not None:
            self.engine.core.scheduler.settle()
            self.moved_nbytes.append(dict(self.engine.space.moved_nbytes))

    def step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())
        if len(self.losses) == self._warmup:
            self.settle()
            self._begin_window()
        self.marks_s.append(time.perf_counter())

    def _begin_window(self) -> None:
        if self.engine is not None:
            self.engine.core.space.ledger[Tier.DEVICE].take_recent()
        if self._device.type == "cuda":
            self.warmup_peak_nbytes = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def window_s(self) -> float:
        self.settle()
        return time.perf_counter() - self.marks_s[self._warmup - 1]


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job in this process and give its figures. ``job`` is what ``bench_train`` makes.

    ``job["with_plan"]`` adds the plan and its profile to the report, and what the engine held in the timed window at
    most, and closes the engine.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if job.get("deterministic"):
        torch.use_deterministic_algorithms(True)
        # Of the fast attention backends only flash has a deterministic backward, and only where nothing is let pass.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    if device.type == "cuda" and job["cap"]:
        total_nbytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_nbytes(job["cap"], key="cap") / total_nbytes)
    shape = LLAMA_SIZES[job["size"]]
    start_s = time.perf_counter()
    model = LlamaShape.with_random_weights(shape, max_length=job["seq"], seed=job["seed"], device=device)
    model.recompute = job.get("recompute", True)
    generator = torch.Generator().manual_seed(job["seed"] + 1)
    num_steps = job["warmup"] + job["steps"]
    data = torch.randint(
        shape.vocabulary, (num_steps * job["grad_accum"], job["batch"], job["seq"]), generator=generator
    )
    timer = _Timer(device, job["warmup"])
    build_s = time.perf_counter() - start_s
    paths = TierOffloadConfig.from_mapping(json.loads(job["config"])).nvme_paths if job["face"] != "resident" else ()
    probes = [_probe_flash(paths, job.get("probe_s", 1.0))]
    runner = {"plain": _plain, "resident": _plain, "lightning": _lightning, "accelerate": _accelerate}[job["face"]]
    window_s, report = runner(model, data, job, device, timer)
    tokens = job["steps"] * job["grad_accum"] * job["batch"] * job["seq"]
    laps_s = [b - a for a, b in zip(timer.marks_s[job["warmup"] - 1 :], timer.marks_s[job["warmup"] :], strict=False)]
    figures: dict[str, Any] = {
        "size": job["size"], "face": job["face"], "num_parameters": model.num_parameters(), "batch": job["batch"],
        "seq": job["seq"], "grad_accum": job["grad_accum"], "clip": job["clip"], "amp": job["amp"], "cap": job["cap"],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "build_s": build_s,
        "window_s": window_s, "tokens_per_s": tokens / window_s, "tflop_per_s": 6 * model.num_parameters() * tokens
        / window_s / 1e12, "step_s": {"median": statistics.median(laps_s), "all": laps_s},
        "marks_s": timer.marks_s,
        "losses": [float(loss) for loss in timer.losses],
        "host_peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "report": report,
    }  # fmt: skip
    if paths:
        probes.append(_probe_flash(paths, job.get("probe_s", 1.0)))
        figures["flash"] = _flash_figures(figures, timer, probes, num_steps=job["steps"])
    if device.type == "cuda":
        window_nbytes = torch.cuda.max_memory_allocated(device)
        # The engine resets CUDA's peak in the steps that it watches.
        watched_nbytes = timer.engine.core.profiler.most_allocated_nbytes if timer.engine is not None else 0
        figures["window_device_peak_nbytes"] = window_nbytes
        figures["device_peak_nbytes"] = max(window_nbytes, timer.warmup_peak_nbytes, watched_nbytes)
        figures["device_reserved_peak_nbytes"] = torch.cuda.max_memory_reserved(device)
    return figures


def _probe_flash(paths: Sequence[str], cell_s: float) -> list[dict[str, Any]]:
    """What a bare loop makes of each path now."""
    return [
        probe_path(path, block_nbytes=(4 * MiB,), depths=(4, 8), file_nbytes=_PROBE_NBYTES, cell_s=cell_s).to_json()
        for path in paths
    ]


def _flash_figures(
    figures: dict[str, Any], timer: _Timer, probes: list[list[dict[str, Any]]], *, num_steps: int
) -> dict[str, Any]:
    """The disk's rates beside the run, what a step moved, and a step's time over what the disk needs for it."""
    mixed = [
        sum(max(row["mixed_bytes_per_s"] for row in one_path["rows"]) for one_path in at_a_time) for at_a_time in probes
    ]
    mixed_bytes_per_s = statistics.mean(mixed)
    begin, end = timer.moved_nbytes
    moved_nbytes = {verb: (end[verb] - begin[verb]) / num_steps for verb in ("read", "write")}
    floor_s = 2 * _STATE_BYTES * figures["num_parameters"] / mixed_bytes_per_s
    own_floor_s = sum(moved_nbytes.values()) / mixed_bytes_per_s
    mean_s, median_s = figures["window_s"] / num_steps, figures["step_s"]["median"]
    units = [line for line in figures["report"]["plan"]["units"] if line["state_home"] is not None]
    return {
        "mixed_bytes_per_s": mixed_bytes_per_s,  # reads and writes, summed
        "mixed_bytes_per_s_before_and_after": mixed,
        "probes_before_and_after": probes,
        "moved_nbytes_per_step": moved_nbytes,
        "moved_bytes_per_parameter": {verb: n / figures["num_parameters"] for verb, n in moved_nbytes.items()},
        "frac_of_units_with_state_on_flash": sum(u["state_home"] == "nvme" for u in units) / len(units),
        "step_s_mean": mean_s,
        "floor_bytes_per_parameter_each_way": _STATE_BYTES,
        "floor_s": floor_s,
        "ratio": mean_s / floor_s,
        "ratio_of_median": median_s / floor_s,
        "own_floor_s": own_floor_s,  # of the bytes that were really moved
        "own_ratio": mean_s / own_floor_s if own_floor_s else None,
    }


def _optimizer(model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _plain(
    model: LlamaShape, data: torch.Tensor, job: dict[str, Any], device: torch.device, timer: _Timer
) -> tuple[float, Any]:
    engine = None
    if job["face"] == "resident":
        model.to(device)
        optimizer = _optimizer(model, device)
    else:
        from lightning_tieroffload import engine_of
        from lightning_tieroffload.strategies.plain import offload

        config = TierOffloadConfig.from_mapping(json.loads(job["config"]))
        model, optimizer = offload(model, _optimizer(model, device), **config.to_dict())
        engine = timer.engine = engine_of(model)
    amp = job["amp"] == "bf16-mixed"
    rows: Iterator[torch.Tensor] = iter(data)
    for _ in range(job["warmup"] + job["steps"]):
        for _ in range(job["grad_accum"]):
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = model(next(rows).to(device, non_blocking=True))
            (loss / job["grad_accum"]).backward()
        if job["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip"])
        optimizer.step()
        optimizer.zero_grad()
        timer.step(loss)
    window_s = timer.window_s()
    if engine is None:
        return window_s, None
    report = engine.report()
    if job.get("with_plan"):
        report |= {
            "planned": engine.planned(),
            "kept_nbytes": engine.core.space.kept_nbytes,
            "window_peak_nbytes": engine.core.space.ledger[Tier.DEVICE].take_recent(),
        }
        engine.close()
    return window_s, report


def _loader(data: torch.Tensor) -> torch.utils.data.DataLoader[torch.Tensor]:
    """One row of ``data`` after the other: a tensor has all that a loader asks of a data set."""
    return torch.utils.data.DataLoader(cast("torch.utils.data.Dataset[torch.Tensor]", data), batch_size=None)


def _lightning(
    model: LlamaShape, data: torch.Tensor, job: dict[str, Any], device: torch.device, timer: _Timer
) -> tuple[float, Any]:
    import lightning.pytorch as pl

    from lightning_tieroffload import TierOffloadStrategy, engine_of

    results: list[Any] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.last: torch.Tensor

        def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
            self.last = self.model(ids)
            return self.last

        def configure_optimizers(self) -> Any:
            return _optimizer(self.model, device)

        def on_train_batch_end(self, *_: Any) -> None:
            if (len(timer.losses) + 1) * job["grad_accum"] <= self.trainer.fit_loop.total_batch_idx + 1:
                timer.engine = engine_of(self.model)
                timer.step(self.last)

        def on_train_end(self) -> None:
            engine = engine_of(self.model)
            results.append(timer.window_s())
            results.append(engine.report() if engine is not None else None)

    config = TierOffloadConfig.from_mapping(json.loads(job["config"]))
    trainer = pl.Trainer(
        max_steps=job["warmup"] + job["steps"], accelerator="gpu" if device.type == "cuda" else "cpu", devices=1,
        precision=job["amp"], gradient_clip_val=job["clip"] or None, accumulate_grad_batches=job["grad_accum"],
        strategy=cast("pl.strategies.Strategy", TierOffloadStrategy(**config.to_dict())), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), _loader(data))
    return results[0], results[1]


def _accelerate(
    model: LlamaShape, data: torch.Tensor, job: dict[str, Any], device: torch.device, timer: _Timer
) -> tuple[float, Any]:
    from accelerate import Accelerator

    import lightning_tieroffload

    accelerator = Accelerator(
        mixed_precision="bf16" if job["amp"] == "bf16-mixed" else "no", gradient_accumulation_steps=job["grad_accum"]
    )
    loader = _loader(data)
    model, optimizer, loader = accelerator.prepare(model, _optimizer(model, device), loader)
    engine = lightning_tieroffload.engine_of(model)
    if engine is None:
        raise ConfigError("Accelerator.prepare did not attach the engine.")
    timer.engine = engine
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(ids)
            accelerator.backward(loss)
            if accelerator.sync_gradients and job["clip"]:
                accelerator.clip_grad_norm_(model.parameters(), job["clip"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            timer.step(loss)
    return timer.window_s(), engine.report()


if __name__ == "__main__":
    try:
        print(json.dumps(run_job(json.loads(sys.argv[1]))))
    except TierOffloadError as refused:  # written for people, and complete
        print(f"tieroffload: {refused}", file=sys.stderr)
        sys.exit(2)
