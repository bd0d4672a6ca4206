"""Floor 11. The face for Lightning's Trainer, and `TierOffloadStrategy`, the one name for Trainer and Fabric.

Owns the translation of Lightning's calls into the engine's, for as long as a fit, validate, test or predict runs: the
engine is attached in `setup` and closed in `teardown`, and outside of these the model is ordinary.

[Note: one class per package family] `lightning.pytorch` and `pytorch_lightning` are two packages with distinct base
classes, and so are their Fabrics. What we do is in `_LightningFace`; `strategy_class(root)` puts it in front of the
`ParallelStrategy` of the family that asks. ParallelStrategy and not DDPStrategy: every subclass of that counts as
distributed, which installs a DistributedSampler, hence another order of the data than in the plain run. Not
SingleDeviceStrategy: a strategy that is given by name is built before the devices are known.

[Note: restore before set-up] A checkpoint is loaded into the ordinary model before the engine takes it, exactly where
`strategy="auto"` does it. Restoring after set-up would run `on_load_checkpoint` after `configure_optimizers`, would
break StochasticWeightAveraging's resume, and Lightning (2.6) then loses the caller's `weights_only`. Only a model with
parameters on the meta device has to wait until set-up has made memory for them.
"""

from __future__ import annotations

import abc
import functools
import importlib
import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

import _tieroffload_hooks
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine.offload_engine import OffloadEngine
from lightning_tieroffload.strategies import face
from lightning_tieroffload.strategies.one_process import OneProcess

if TYPE_CHECKING:
    # Of one family, for the type checker; at run time the base is whichever family's it is put in front of.
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object

__all__ = ["TierOffloadStrategy", "strategy_class"]

_FABRIC_OF = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_COMPILE_LAYERS = (
    "Pass the LightningModule itself to the Trainer and compile its layers, e.g. in configure_model: "
    "for layer in self.layers: layer.compile()."
)


class _LightningFace(OneProcess, _Base):
    """Everything that is ours, for any family. See [Note: one class per package family]."""

    strategy_name = "tieroffload"
    _is_tieroffload_strategy = True
    _face_name = "The Trainer"

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **config: Any,
    ) -> None:
        self.config = face.config_from(config)
        self._engine: OffloadEngine | None = None
        self._last_report: dict[str, Any] = {}
        self._was_interrupted = False
        self._restores_late: bool | None = None
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        # Kept for those who read them; one process needs no group.
        self.process_group_backend = process_group_backend
        self.timeout = timeout

    # ------------------------------------------------------------ what users may ask

    @property
    def engine(self) -> OffloadEngine | None:
        """The engine while a fit, validate, test or predict runs; None outside."""
        return self._engine

    def report(self) -> dict[str, Any]:
        """The engine's report, also after it was closed; empty before the first run."""
        return self._engine.report() if self._engine is not None else self._last_report

    # ------------------------------------------------------------ devices and processes

    @property
    def is_distributed(self) -> bool:
        return bool(self.world_size > 1)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduced(tensor, group, reduce_op)

    # ------------------------------------------------------------ making the model

    @property
    def _lightning_module(self) -> Any:
        return self.__dict__.get("_lightning_module")

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        # Set by fit and its like right before Lightning's own check, whose message would name strategies to switch to.
        if getattr(module, "_compiler_ctx", None) is not None:
            raise face.whole_model_compiled(type(module).__name__, remedy=_COMPILE_LAYERS)
        self.__dict__["_lightning_module"] = module

    def connect(self, model: Any) -> None:
        super().connect(model)
        self._was_interrupted = False
        self._restores_late = None

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # On the host, or the whole model would be on the device before the engine can take it. Uninitialised memory
        # takes no room until it is written to, so `empty_init` needs no meta device.
        empty = self._utilities("init")._EmptyInit(enabled=bool(empty_init))
        with empty, torch.device("cpu"), self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self) -> None:
        """Nothing: the engine moves buffers and unmanaged parameters when it takes the model."""

    def setup(self, trainer: Any) -> None:
        fitting = trainer.state.fn == "fit"
        accelerator: Any = self.accelerator
        accelerator.setup(trainer)
        given: Any = self.model
        model = self.precision_plugin.convert_module(given)
        face.refuse_compiled(model, remedy=_COMPILE_LAYERS)
        self._utilities("init")._materialize_meta_tensors(model, torch.device("cpu"))
        self.model = model
        self._engine = OffloadEngine.attach(model, self.config, self.root_device)
        _tieroffload_hooks.used()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        face.print_plan_once(self._engine)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        # Through the setter: it builds the wrapper classes, which derive from the optimizer's class of that moment.
        self.optimizers = [self._adopted(optimizer) for optimizer in self.optimizers]

    def _adopted(self, optimizer: Any) -> Any:
        raw = getattr(optimizer, "_optimizer", optimizer)  # configure_optimizers may return Lightning's own wrapper
        if self._engine is None or not isinstance(raw, Optimizer):
            return optimizer
        return self._engine.adopt_optimizer(raw)

    # ------------------------------------------------------------ the loop

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning enters this around a micro-batch that does not end its accumulation window."""
        engine = self._engine
        if engine is None:
            yield
            return
        engine.set_accumulating(True)
        try:
            yield
        finally:
            engine.set_accumulating(False)

    # ------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        # See [Note: restore before set-up]. Asked before and after set-up: the answer must not change in between.
        if self._restores_late is None:
            module = self.lightning_module
            self._restores_late = module is not None and any(p.is_meta for p in module.parameters())
        return self._restores_late

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Without the base class's move of all state to the device afterwards: where state lives is the plan's matter.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)

    # ------------------------------------------------------------ the end

    def on_exception(self, exception: BaseException) -> None:
        self._was_interrupted = True
        if self._engine is not None:
            try:
                self._engine.reset()
            except Exception as error:  # the exception that brought us here is the one to see
                face.log.debug("The engine could not be reset after %r: %r", exception, error)

    def teardown(self) -> None:
        """Close the engine: the model and the optimizers are ordinary again, with the current values, on the host.

        Raises what a background thread failed with and nobody has seen yet, after everything was taken down; not if
        the run ended by an exception already.
        """
        failure: Exception | None = None
        engine, self._engine = self._engine, None
        if engine is not None:
            failure = self._close(engine)
        self.optimizers = self.optimizers  # wrappers of the classes that the optimizers have again
        super().teardown()
        if failure is not None and not self._was_interrupted:
            raise failure

    def _close(self, engine: OffloadEngine) -> Exception | None:
        failure: Exception | None = None
        try:
            if not self._was_interrupted:
                engine.flush()
                engine.raise_pending_error()
                self._last_report = engine.report()
                face.write_report(engine, self.config)
            else:
                face.write_timeline(engine, self.config)
        except Exception as error:
            failure = error
        try:
            engine.close()
        except Exception as error:
            failure = failure or error
        return failure

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": None}

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """For those who import the class by hand; the import hooks do the same without it."""
        strategy_registry.register(cls.strategy_name, cls, description=cls.__name__, override=True)


@functools.cache
def strategy_class(root: str) -> type:
    """The strategy class for the Trainer of package `root` ("lightning.pytorch" or "pytorch_lightning")."""
    base = importlib.import_module(f"{root}.strategies").ParallelStrategy
    members = {"_fabric_root": _FABRIC_OF[root], "__module__": __name__, "__doc__": TierOffloadStrategy.__doc__}
    return type("TierOffloadStrategy", (_LightningFace, base), members)


# ---------------------------------------------------------------- the public name


class _PublicMeta(abc.ABCMeta):
    def __instancecheck__(cls, instance: Any) -> bool:
        # What the Trainer has made of it is still one of these.
        return super().__instancecheck__(instance) or hasattr(type(instance), "_is_tieroffload_strategy")


class TierOffloadStrategy(metaclass=_PublicMeta):
    """Keeps training state on tiers (device memory, DRAM, NVMe) and leaves the loop and its numbers as they are.

    `Trainer(strategy=TierOffloadStrategy(device_budget="22GiB"))`, with the Trainer of `lightning.pytorch` or of
    `pytorch_lightning`, or `Fabric(strategy=TierOffloadStrategy(...))` of either. The settings are checked at once;
    the object becomes a strategy of the package that it is handed to, at the moment when that package gives it its
    accelerator. `strategy_class(root)` is the class for one package, for those who want to derive from it.

    Args:
        **config: fields of `TierOffloadConfig`, over what the environment variable `TIEROFFLOAD_CONFIG` says.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin (Fabric: precision),
        process_group_backend, timeout: as for Lightning's own strategies.

    Raises:
        ConfigError: unknown or impossible settings. UnsupportedError: by the Trainer, for more than one device.
    """

    strategy_name = "tieroffload"
    _is_tieroffload_strategy = True

    def __init__(
        self,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        precision: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **config: Any,
    ) -> None:
        self.config = face.config_from(config)
        self._config = config
        # What the connectors of both packages read before they hand over the accelerator.
        self._accelerator = accelerator
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self._checkpoint_io = checkpoint_io
        self._precision_plugin = precision_plugin
        self._precision = precision
        self._process_group = {"process_group_backend": process_group_backend, "timeout": timeout}

    @property
    def accelerator(self) -> Any:
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        root = _family_of(accelerator)
        is_fabric = root in _FABRIC_OF.values()
        if is_fabric:
            build = importlib.import_module("lightning_tieroffload.strategies.fabric_strategy").strategy_class
        else:
            build = strategy_class
        arguments = {
            "parallel_devices": self.parallel_devices,
            "cluster_environment": self.cluster_environment,
            "checkpoint_io": self._checkpoint_io,
            "precision" if is_fabric else "precision_plugin": self._precision if is_fabric else self._precision_plugin,
            **self._process_group,
            **self._config,
        }
        self.__dict__.clear()
        self.__class__ = build(root)
        self.__init__(accelerator=accelerator, **arguments)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r}: this TierOffloadStrategy has not been given to a Trainer or to Fabric yet; it becomes a "
            "strategy of their package when it is."
        )


def _family_of(accelerator: Any) -> str:
    for cls in type(accelerator).__mro__:
        # Trainer packages first: their accelerators derive from Fabric's.
        for root in (*_FABRIC_OF, *_FABRIC_OF.values()):
            if cls.__module__.startswith(root + "."):
                return root
    raise TypeError(f"{accelerator!r} is neither an accelerator of Lightning's Trainer nor of Fabric.")


def _with_settings_spelt_out(signature: inspect.Signature) -> inspect.Signature:
    # LightningCLI and editors see what may be set, instead of **config.
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = inspect.signature(TierOffloadConfig.__init__).parameters.values()
    return signature.replace(parameters=[*own, *(p for p in settings if p.kind is inspect.Parameter.KEYWORD_ONLY)])


TierOffloadStrategy.__init__.__signature__ = _with_settings_spelt_out(  # type: ignore[attr-defined]
    inspect.signature(TierOffloadStrategy.__init__)
)

# Both Trainers and both Fabrics take instances of their own abstract Strategy only.
for _root in (*_FABRIC_OF, *_FABRIC_OF.values()):
    _tieroffload_hooks.when_imported(
        f"{_root}.strategies", lambda strategies: strategies.Strategy.register(TierOffloadStrategy)
    )
