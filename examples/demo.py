"""What `make demo` runs: a real language model is trained with most of its state off the device, then plainly.

Both runs are the same few lines, `fit` below; only the strategy differs. At the end: bytes moved per tier, peak bytes
per tier against its budget, stall time, and whether the losses and weights are those of the plain run.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from real_text import load_language_model, token_windows
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_tieroffload import TierOffloadStrategy, engine_of
from lightning_tieroffload.report import format_seconds, render_report
from lightning_tieroffload.sizes import format_nbytes, parse_nbytes

console = Console()


class LanguageModel(pl.LightningModule):
    """An ordinary LightningModule. It does not know where its weights are."""

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.1)


class Watch(pl.Callback):
    """Collects losses and seconds; keeps the report at the end where there is an engine."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.step_s: list[float] = []
        self.report: dict[str, Any] | None = None
        self._began_s = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._began_s = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.step_s.append(time.perf_counter() - self._began_s)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (engine := engine_of(pl_module)) is not None:
            self.report = engine.report()


def fit(strategy: Any, model: torch.nn.Module, windows: torch.Tensor, options: argparse.Namespace) -> Watch:
    """The script. Same seed, same data, same order, whatever the strategy is."""
    pl.seed_everything(0, verbose=False)
    watch = Watch()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=1,
        max_steps=options.steps,
        max_epochs=-(-options.steps * options.batch // options.windows),
        gradient_clip_val=1.0,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    module = LanguageModel(model, options.learning_rate)
    trainer.fit(module, DataLoader(windows, batch_size=options.batch, shuffle=True))
    return watch


def compare(ours: Watch, plain: Watch, ours_weights: dict[str, torch.Tensor], plain_model: torch.nn.Module) -> bool:
    """Print the losses side by side; true where the two runs are the same."""
    table = Table(title="Loss", title_justify="left", title_style="bold")
    for column in ("step", "tieroffload", "plain", ""):
        table.add_column(column, justify="right")
    for step, (mine, theirs) in enumerate(zip(ours.losses, plain.losses, strict=True), start=1):
        same = "[green]equal[/]" if mine == theirs else f"[yellow]{mine - theirs:+.2e}[/]"
        table.add_row(str(step), f"{mine:.6f}", f"{theirs:.6f}", same)
    console.print(table)
    worst = max(
        float((ours_weights[name] - weight.cpu()).abs().max()) for name, weight in plain_model.state_dict().items()
    )
    on_gpu = torch.cuda.is_available()
    losses_equal = ours.losses == plain.losses
    relative = max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(ours.losses, plain.losses, strict=True))
    if losses_equal and worst == 0:
        console.print("[bold green]Every loss and every weight equals that of the plain run, bit for bit.[/]")
        return True
    console.print(f"Losses differ by at most {relative:.1e} (relative), weights by at most {worst:.1e}.")
    # CUDA's own AdamW rounds in other places than the exact update does. See docs/design.md.
    return on_gpu and relative <= 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1, help="windows a step")
    parser.add_argument("--seq", type=int, default=128, help="tokens a window")
    parser.add_argument("--windows", type=int, default=8, help="windows of text; fewer than steps: several epochs")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--device-budget", default="400MiB")
    parser.add_argument("--dram-budget", default="4GiB")
    parser.add_argument("--keep-in", type=Path, default=Path(".demo"), help="folder for the unpacked model")
    options = parser.parse_args()
    began_s = time.perf_counter()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")

    with console.status("Loading SmolLM2-135M and the Python language reference ..."):
        model, tokenizer = load_language_model(options.keep_in)
        windows = token_windows(tokenizer, options.windows, options.seq)
    num_params = sum(param.numel() for param in model.parameters())
    state_nbytes = 16 * num_params
    budget_nbytes = parse_nbytes(options.device_budget)
    console.print(
        f"SmolLM2, {num_params / 1e6:.1f} M parameters, trained in fp32 with AdamW: weights, gradients and two moments "
        f"are {format_nbytes(state_nbytes)}. The device may hold {format_nbytes(budget_nbytes)}, "
        f"{budget_nbytes / state_nbytes:.0%} of that."
        + ("" if torch.cuda.is_available() else " There is no GPU, so a budgeted part of host memory stands for it.")
    )

    console.rule('Trainer(strategy="tieroffload")')
    # Three watched steps, of which the first is a slow one: their median says what a step takes.
    strategy = TierOffloadStrategy(
        device_budget=options.device_budget, dram_budget=options.dram_budget, profile_steps=3
    )
    ours = fit(strategy, model, windows, options)
    ours_weights = {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}
    del model, strategy

    console.rule('The same script with Trainer(strategy="auto")')
    plain_model, _ = load_language_model(options.keep_in)
    plain = fit("auto", plain_model, windows, options)

    console.rule("Result")
    same = compare(ours, plain, ours_weights, plain_model)
    if ours.report is None:
        raise SystemExit("The engine left no report: the run was not a tieroffload run.")
    console.print(render_report(ours.report))
    console.print(
        f"Last step: {format_seconds(ours.step_s[-1])} with tieroffload, {format_seconds(plain.step_s[-1])} plain. "
        f"The demo took {time.perf_counter() - began_s:.0f} s."
    )
    within = all(tier["peak_nbytes"] <= tier["budget_nbytes"] for tier in ours.report["tiers"].values())
    if not within:
        console.print("[bold red]A tier held more than its budget.[/]")
    return 0 if same and within else 1


if __name__ == "__main__":
    raise SystemExit(main())
