"""Floor 11. The face for transformers' Trainer: what it does to the model before Accelerate gets it.

Everything else goes through `accelerate_plugin`. A process without a `tieroffload_config` never gets here, and a
Trainer whose Accelerator is not ours stays as it is.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch

import _tieroffload_hooks
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.strategies import face

__all__ = ["hook_trainer"]


def hook_trainer(module: ModuleType) -> None:
    """Wrap `Trainer` in `transformers.trainer`. Idempotent."""
    trainer_class = module.Trainer
    if hasattr(trainer_class._move_model_to_device, "_tieroffload"):
        return
    _keep_model_on_the_host(trainer_class)
    _do_not_look_at_every_gradient(trainer_class)
    _report_after_training(trainer_class)
    _count_one_device(sys.modules["transformers.training_args"].TrainingArguments)


def _is_ours(trainer: Any) -> bool:
    return getattr(trainer.accelerator, "_tieroffload_config", None) is not None


def _keep_model_on_the_host(trainer_class: Any) -> None:
    move = trainer_class._move_model_to_device

    @functools.wraps(move)
    def stay(self: Any, model: torch.nn.Module, device: torch.device) -> None:
        # The constructor would put the whole model on the device, before `prepare` hands it to the engine.
        if not _is_ours(self):
            move(self, model, device)

    stay._tieroffload = True  # type: ignore[attr-defined]
    trainer_class._move_model_to_device = stay


def _do_not_look_at_every_gradient(trainer_class: Any) -> None:
    # Looks for DTensors over several meshes by reading each p.grad, which would bring all gradients to the device at
    # once. One process has none. Absent in older releases.
    has_mixed = getattr(trainer_class, "_has_mixed_mesh_grads", None)
    if has_mixed is not None:
        trainer_class._has_mixed_mesh_grads = lambda self, model: not _is_ours(self) and has_mixed(self, model)


def _report_after_training(trainer_class: Any) -> None:
    train = trainer_class.train

    @functools.wraps(train)
    def train_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        engine = engine_of(self.model) if _is_ours(self) else None
        if engine is not None:
            engine.flush()
            face.write_reports([engine])
        return result

    trainer_class.train = train_and_report


def _count_one_device(arguments_class: Any) -> None:
    # On a host with several GPUs the Trainer would wrap the model in DataParallel and multiply its batch.
    n_gpu = arguments_class.n_gpu

    def at_most_one(self: Any) -> int:
        num = int(n_gpu.fget(self))
        if _tieroffload_hooks.enabled():
            self._n_gpu = num = min(num, 1)
        return num

    arguments_class.n_gpu = property(at_most_one, doc=n_gpu.__doc__)
