"""Floor 11. The face for Fabric, of `lightning.fabric` and of `lightning_fabric`.

Owns the translation of Fabric's calls. Fabric has no end: an engine lives until `engine_of(model).close()` or until
its model is gone.

The base class is ParallelStrategy: Fabric's DDPStrategy would install a DistributedSampler on one device (another
order of the data than in the plain run), and with SingleDeviceStrategy `fabric.no_backward_sync` would never reach us.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

import _tieroffload_hooks
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.engine.optimizer import adopt
from lightning_tieroffload.strategies import face
from lightning_tieroffload.strategies.one_process import OneProcess

if TYPE_CHECKING:
    # Of one family, for the type checker; at run time the base is whichever family's it is put in front of.
    from lightning.fabric.strategies.parallel import ParallelStrategy as _Base
else:
    _Base = object

__all__ = ["strategy_class"]

_COMPILE_LAYERS = "Set up the model as it was, and compile its layers (layer.compile()) if at all."


class _FabricFace(OneProcess, _Base):
    """Everything that is ours, for either package."""

    _is_tieroffload_strategy = True
    _face_name = "Fabric"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **config: Any,
    ) -> None:
        self.config = face.config_from(config)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._num_nodes = 1
        self._backward_sync_control: Any = _AccumulationControl()
        self._adopted_early: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.process_group_backend = process_group_backend
        self.timeout = timeout

    # ------------------------------------------------------------ devices and processes

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def distributed_sampler_kwargs(self) -> None:
        return None  # one process: the user's sampler stays

    def _set_world_ranks(self) -> None:  # by the name under which Fabric asks
        self.set_world_ranks()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(tensor, group, reduce_op)

    # ------------------------------------------------------------ models and optimizers

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        # On the host, or the whole model would be on the device before the engine can take it.
        stack = ExitStack()
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(self._utilities("init")._EmptyInit(enabled=bool(empty_init)))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: torch.nn.Module) -> None:
        # Called by fabric.setup and by the user's fabric.to_device alike. A model that is to be set up is taken from
        # wherever it is, so a large one stays on the host; a small one (a metric, a loss) moves as in plain.
        if engine_of(module) is not None:
            return
        if face.fits_beside(module, self.root_device):
            module.to(self.root_device)
        else:
            face.move_buffers(module, self.root_device)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        self._utilities("init")._materialize_meta_tensors(module, torch.device("cpu"))
        if next(module.parameters(), None) is not None:
            engine = OffloadEngine.attach(module, self.config, self.root_device)
            _tieroffload_hooks.used()
            face.report_at_exit(engine, self.config)
            for optimizer in [each for each in self._adopted_early if engine_of(each) is engine]:
                engine.adopt_optimizer(optimizer)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        engine = engine_of(optimizer)
        if engine is None:  # its model has not been set up yet
            self._adopted_early.add(optimizer)
            return adopt(optimizer)
        face.print_plan_once(engine)
        return engine.adopt_optimizer(optimizer)


class _AccumulationControl:
    """What `fabric.no_backward_sync(model, enabled=...)` asks of a strategy."""

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        engine = engine_of(module)
        return _accumulating(engine) if enabled and engine is not None else nullcontext()


@contextmanager
def _accumulating(engine: OffloadEngine) -> Generator[None, None, None]:
    engine.set_accumulating(True)
    try:
        yield
    finally:
        engine.set_accumulating(False)


@functools.cache
def strategy_class(root: str) -> type:
    """The strategy class for the Fabric of package `root` ("lightning.fabric" or "lightning_fabric")."""
    base = importlib.import_module(f"{root}.strategies.parallel").ParallelStrategy
    _hook_fabric(importlib.import_module(f"{root}.fabric").Fabric)
    members = {"_fabric_root": root, "__module__": __name__}
    return type("TierOffloadFabricStrategy", (_FabricFace, base), members)


def _hook_fabric(fabric_class: Any) -> None:
    """Two checks of Fabric that look at the strategy's class, so that one process works as it does without us.

    `fabric.launch()` is demanded of every strategy but those for a single device; with ours it is implied. And a
    compiled model is unwrapped before the strategy sees it and compiled as a whole again afterwards: refused here.
    """
    validate_launched: Any = fabric_class._validate_launched

    @functools.wraps(validate_launched)
    def validate_launched_or_launch(self: Any) -> None:
        if isinstance(self._strategy, _FabricFace) and not self._launched:
            self._strategy.setup_environment()
            self._launched = True
        validate_launched(self)

    fabric_class._validate_launched = validate_launched_or_launch
    for name in ("_validate_setup", "_validate_setup_module"):
        _refuse_compiled_in(fabric_class, name)


def _refuse_compiled_in(fabric_class: type, name: str) -> None:
    validate: Any = getattr(fabric_class, name)

    @functools.wraps(validate)
    def validate_uncompiled(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(self._strategy, _FabricFace):
            face.refuse_compiled(module, remedy=_COMPILE_LAYERS)
        validate(self, module, *args, **kwargs)

    setattr(fabric_class, name, validate_uncompiled)
