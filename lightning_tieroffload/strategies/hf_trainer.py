"""Floor 9. The face for transformers' Trainer: what it does to the model before Accelerate gets it.

Everything else goes through `accelerate_plugin`. A process without a `tieroffload_config` never gets here.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch

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


def _keep_model_on_the_host(trainer_class: Any) -> None:
    @functools.wraps(trainer_class._move_model_to_device)
    def stay(self: Any, model: torch.nn.Module, device: torch.device) -> None:
        # The constructor would put the whole model on the device, before `prepare` hands it to the engine.
        return None

    stay._tieroffload = True  # type: ignore[attr-defined]
    trainer_class._move_model_to_device = stay


def _do_not_look_at_every_gradient(trainer_class: Any) -> None:
    # Looks for DTensors over several meshes by reading each p.grad, which would bring all gradients to the device at
    # once. One process has none. Absent in older releases.
    if hasattr(trainer_class, "_has_mixed_mesh_grads"):
        trainer_class._has_mixed_mesh_grads = lambda self, model: False


def _report_after_training(trainer_class: Any) -> None:
    train = trainer_class.train

    @functools.wraps(train)
    def train_and_report(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        engine = engine_of(self.model)
        if engine is not None:
            engine.flush()
            face.write_reports([engine])
        return result

    trainer_class.train = train_and_report


def _count_one_device(arguments_class: Any) -> None:
    # On a host with several GPUs the Trainer would wrap the model in DataParallel and multiply its batch.
    n_gpu = arguments_class.n_gpu

    def at_most_one(self: Any) -> int:
        self._n_gpu = min(n_gpu.fget(self), 1)
        return int(self._n_gpu)

    arguments_class.n_gpu = property(at_most_one, doc=n_gpu.__doc__)
