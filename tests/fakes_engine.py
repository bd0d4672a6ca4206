"""An engine that keeps everything as in plain torch: the faces' contract with the real one, and nothing behind it.

`install()` puts it where the faces look for the real engine. Faces are tested with it for what they call and in which
order; with the real one for numbers.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_engines: weakref.WeakKeyDictionary[nn.Module, OffloadEngine] = weakref.WeakKeyDictionary()
calls: list[str] = []


class OffloadEngine:
    def __init__(self, model: nn.Module, config: Any, device: torch.device | None) -> None:
        self._model = weakref.ref(model)
        self.config = config
        self.device = device or torch.device("cpu")
        self.accumulating: list[bool] = []
        self.closed = False
        self.optimizers: list[Optimizer] = []
        self.error: Exception | None = None

    @classmethod
    def attach(cls, model: nn.Module, config: Any, device: torch.device | None = None) -> OffloadEngine:
        calls.append("attach")
        if model not in _engines:
            _engines[model] = cls(model, config, device)
        return _engines[model]

    def adopt_optimizer(self, optimizer: Optimizer) -> Optimizer:
        return adopt(optimizer)

    def set_accumulating(self, flag: bool) -> None:
        self.accumulating.append(flag)

    def flush(self) -> None:
        calls.append("flush")
        self.raise_pending_error()

    def close(self) -> None:
        calls.append("close")
        self.closed = True
        for optimizer in self.optimizers:
            if isinstance(optimizer, _Mixin):
                optimizer.__class__ = type(optimizer)._plain_class
        model = self._model()
        if model is not None:
            _engines.pop(model, None)

    def reset(self) -> None:
        calls.append("reset")

    def report(self) -> dict[str, Any]:
        return {"plan": {"planner": "fake"}, "num_steps": len(self.optimizers), "step_s": {"last": 0.0, "median": 0.0}}

    def plan_table(self) -> Any:
        from rich.table import Table

        table = Table("unit", "param", title="plan")
        table.add_row("all", "device")
        return table

    def raise_pending_error(self) -> None:
        if self.error is not None:
            raise self.error


class _Mixin:
    _step_supports_amp_scaling = False
    _plain_class: type

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)  # type: ignore[misc]


_classes: dict[type, type] = {}


def adopt(optimizer: Optimizer) -> Optimizer:
    cls = type(optimizer)
    if not isinstance(optimizer, _Mixin):
        if cls not in _classes:
            _classes[cls] = type(cls.__name__, (_Mixin, cls), {"_plain_class": cls, "__module__": cls.__module__})
        optimizer.__dict__.pop("step", None)
        optimizer.__class__ = _classes[cls]
    engine = engine_of(optimizer)
    if engine is not None and optimizer not in engine.optimizers:
        engine.optimizers.append(optimizer)
    return optimizer


def engine_of(obj: Any) -> OffloadEngine | None:
    if isinstance(obj, nn.Module):
        return _engines.get(obj)
    wanted = {id(obj)} if isinstance(obj, nn.Parameter) else {id(p) for g in obj.param_groups for p in g["params"]}
    for model, engine in list(_engines.items()):
        if any(id(p) in wanted for p in model.parameters()):
            return engine
    return None


def install() -> None:
    """Make `lightning_tieroffload.engine.offload_engine` and `.optimizer` this module's contents."""
    for name in ("offload_engine", "optimizer"):
        module = types.ModuleType(f"lightning_tieroffload.engine.{name}")
        module.OffloadEngine, module.engine_of, module.adopt = OffloadEngine, engine_of, adopt  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


def install_if_missing() -> bool:
    """`install`, where there is no real engine, or `TIEROFFLOAD_TEST_ENGINE=fake` asks for it. Says whether it did."""
    if os.environ.get("TIEROFFLOAD_TEST_ENGINE") != "fake":
        try:
            importlib.import_module("lightning_tieroffload.engine.offload_engine")
            importlib.import_module("lightning_tieroffload.engine.optimizer")
            return False
        except ModuleNotFoundError:
            pass
    install()
    return True
