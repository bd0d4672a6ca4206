"""Real trainers for the case tests: models, a Lightning run that is taken down step by step, scripts in processes.

Comparison, budgets and recordings are those of ``exactness``; here is only what drives Lightning, Accelerate and the
HF Trainer. Settings go in the way a user's script gets them that does not know us: ``strategy="tieroffload"`` and the
environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from exactness import Recording, _flatten, seed_all, starved, take_down, tight
from torch import nn
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent


def mlp(num_layers: int, width: int = 64) -> nn.Sequential:
    """MLP-k of the cases."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def gpt_tiny(**changes: Any) -> nn.Module:
    """GPT-tiny of the cases, seed 0. 28 parameters, 29 state_dict keys: the head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings = {
        "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 97, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **changes,
    }  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(**settings))
    model.train()
    return model


class Rows(Dataset):
    """``num_rows`` seeded rows: floats for an MLP, token ids for GPT-tiny."""

    def __init__(self, num_rows: int, *, tokens: bool = False, width: int = 64, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (num_rows, 16 if tokens else width)
        self.rows = torch.randint(97, shape, generator=generator) if tokens else torch.randn(shape, generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def loader(num_batches: int, batch: int = 4, **options: Any) -> DataLoader:
    return DataLoader(Rows(num_batches * batch, **options), batch_size=batch)


class Module(pl.LightningModule):
    """A LightningModule around any network. ``make_optimizer`` takes the module."""

    def __init__(
        self,
        make_net: Callable[[], nn.Module] = lambda: mlp(4),
        make_optimizer: Callable[[Any], Any] = lambda self: torch.optim.AdamW(self.parameters(), lr=1e-2),
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make_net()
        self.make_optimizer = make_optimizer

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if batch.dtype == torch.long:
            return self.net(input_ids=batch, labels=batch).loss
        return (self.net(batch) ** 2).mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log(f"val_loss_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self)


class Look(pl.Callback):
    """Takes down state and logged numbers after each batch, as ``exactness`` does."""

    def __init__(self, *, state: bool = True, what: Callable[[pl.Trainer], dict[str, Any]] | None = None) -> None:
        self.recording = Recording()
        self.state = state
        self.what = what

    def take(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        entry: dict[str, Any] = {}
        numbers = {"global_step": trainer.global_step, **dict(trainer.callback_metrics)}
        if self.what is not None:
            numbers.update(self.what(trainer))
        _flatten("log", numbers, entry)
        if self.state:
            entry.update(take_down(module, trainer.optimizers))
        self.recording.looks.append(entry)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.take(trainer, module)

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.take(trainer, module)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.take(trainer, module)


@contextmanager
def settings_in_environment(**settings: Any) -> Iterator[None]:
    """``strategy="tieroffload"`` reads its settings here."""
    before = os.environ.get("TIEROFFLOAD_CONFIG")
    os.environ["TIEROFFLOAD_CONFIG"] = json.dumps(settings)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TIEROFFLOAD_CONFIG")
        else:
            os.environ["TIEROFFLOAD_CONFIG"] = before


def starved_settings(model: nn.Module, *, least: bool = True, **changes: Any) -> dict[str, Any]:
    """The least device budget that works (or the largest layer plus one), and memory that is poisoned before reuse."""
    budget = tight(model) if least else max(starved(model), tight(model))
    return {
        "device_budget": budget, "dram_budget": "2GiB", "optimizer_kernel": "torch", "debug": ["poison", "delays"],
        **changes,
    }  # fmt: skip


QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0, "log_every_n_steps": 1,
}  # fmt: skip


def trainer(settings: dict[str, Any] | None, **options: Any) -> pl.Trainer:
    """A Trainer, plain or with ``strategy="tieroffload"`` under these settings."""
    options = {**QUIET, **options}
    if settings is None:
        return pl.Trainer(strategy="auto", **options)
    with settings_in_environment(**settings):
        return pl.Trainer(strategy="tieroffload", **options)


def fit(
    make_module: Callable[[], pl.LightningModule],
    loaders: Callable[[], Any],
    *,
    ours: bool,
    settings: dict[str, Any] | None = None,
    callbacks: Callable[[], Iterable[pl.Callback]] = lambda: (),
    look: Look | None = None,
    fit_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Recording, pl.Trainer, pl.LightningModule]:
    """One seeded fit. ``loaders()`` gives what ``Trainer.fit`` takes after the module."""
    seed_all(0)
    module = make_module()
    look = look or Look()
    use = {**starved_settings(module), **(settings or {})} if ours else None
    run = trainer(use, callbacks=[*callbacks(), look], **options)
    seed_all(1)
    train, *val = (loaders(),) if not isinstance(loaders(), tuple) else loaders()
    run.fit(module, train, *val, **(fit_options or {}))
    if ours:
        tiers = run.strategy.report()["tiers"]
        assert tiers["device"]["peak_nbytes"] <= tiers["device"]["budget_nbytes"], tiers
    return look.recording, run, module


def python(
    code: str, *, cwd: Path, settings: dict[str, Any] | None = None, timeout_s: float = 120, **environ: str
) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own. With ``settings`` Accelerate's hooks are on, as its launcher would set them."""
    process = start(code, cwd=cwd, settings=settings, **environ)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(
    code: str, *, cwd: Path, settings: dict[str, Any] | None = None, stdin: int | None = None, **environ: str
) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIEROFFLOAD", "ACCELERATE", "PYTEST"))}
    ours = {}
    if settings is not None:
        ours = {
            "TIEROFFLOAD_CONFIG": json.dumps(settings), "ACCELERATE_USE_TIEROFFLOAD": "true", "TIEROFFLOAD_REQUIRE": "1"
        }  # fmt: skip
    script = cwd / f"script_{len(list(cwd.glob('script_*.py')))}.py"
    script.write_text(textwrap.dedent(code))
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=cwd,
        env={
            **kept, "PYTHONPATH": os.pathsep.join((str(ROOT), str(TESTS))), "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", **ours, **environ,
        },
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
