"""Floor 11. The face for Accelerate: a few methods of `Accelerator`, wrapped in place.

Owns nothing between calls; a process that was not started with a `tieroffload_config` never gets here, and an
`Accelerator` that is made while none is in force stays as it is. Accelerate has no slot for a third party's plugin, and
other modules hold references to the class, so it is not replaced but wrapped.

What is not wrapped needs nothing: module, parameters and optimizer keep their identity, so `unwrap_model`,
`get_state_dict`, `save_state`, `load_state`, `accumulate`, `prepare_scheduler` work on them as they are, and
`clip_grad_value_` and the grad scaler call what the engine has hooked in torch itself.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

import _tieroffload_hooks
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.engine.optimizer import adopt
from lightning_tieroffload.errors import UnsupportedError
from lightning_tieroffload.strategies import deferred_move, face

__all__ = ["activate", "hook_accelerator"]

_ONE_PROCESS = (
    "Set num_processes: 1 and distributed_type: 'NO' in the Accelerate file (gpu_ids: '0' chooses the device), or take "
    "the tieroffload_config block out."
)
_REGIONAL = (
    "Set dynamo_config: {dynamo_use_regional_compilation: true} in the Accelerate file, or compile the layers yourself "
    "(layer.compile())."
)


def activate(**config: Any) -> None:
    """Do in this process what a `tieroffload_config` block does for the processes of `accelerate launch`.

    For notebooks and tests; call it before the first `Accelerator()`.
    """
    settings = TierOffloadConfig.from_kwargs(**config).merged_over(TierOffloadConfig.from_env())
    _tieroffload_hooks.announce(settings.to_json())
    _tieroffload_hooks.install()


def hook_accelerator(module: ModuleType) -> None:
    """Wrap `Accelerator` in `accelerate.accelerator`. Idempotent."""
    accelerator_class = module.Accelerator
    if hasattr(accelerator_class.__init__, "_tieroffload"):
        return
    for name, wrapper in _WRAPPERS.items():
        setattr(accelerator_class, name, _wrapped(name, getattr(accelerator_class, name), wrapper))
    _name_the_tpu(module)
    deferred_move.hook_modules(is_managed=lambda model: _engine_for(model) is not None, recast=_recast)


def _wrapped(name: str, original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "__init__":
            # Whether this one is ours is settled here, once.
            self._tieroffload_config = face.config_from({}) if _tieroffload_hooks.enabled() else None
        if getattr(self, "_tieroffload_config", None) is None:
            return original(self, *args, **kwargs)
        return wrapper(self, original, *args, **kwargs)

    method._tieroffload = True  # type: ignore[attr-defined]
    return method


def _name_the_tpu(module: ModuleType) -> None:
    # Transformers' own example scripts still read DistributedType.TPU, which Accelerate 1.0 renamed to XLA.
    distributed_type = module.DistributedType
    if not hasattr(distributed_type, "TPU"):
        type.__setattr__(distributed_type, "TPU", distributed_type.XLA)


# ---------------------------------------------------------------- the wrapped methods


def _init(self: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    face.refuse_several_processes(self.num_processes, face="Accelerator", remedy=_ONE_PROCESS)
    kind = str(getattr(self.distributed_type, "value", self.distributed_type))
    if kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"):
        raise UnsupportedError(
            f"Accelerate's distributed_type is {kind}, which places the model's state itself; tieroffload_config does "
            "the same. Set distributed_type: 'NO', or take the tieroffload_config block out."
        )


def _prepare_model(
    self: Any,
    original: Callable[..., torch.nn.Module],
    model: torch.nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> torch.nn.Module:
    for submodule in model.modules():
        deferred_move.forget(submodule)
    already_prepared = getattr(model, "_is_accelerate_prepared", False)
    has_parameters = next(model.parameters(), None) is not None
    if not has_parameters or (already_prepared and _engine_for(model) is not None):
        return original(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
    _refuse_what_we_cannot(self, model)
    places = self.device_placement if device_placement is None else device_placement
    device = self.device if places else next(model.parameters()).device
    _tieroffload_hooks.used()  # also where it is refused below: the error says why, the reminder at exit would not
    engine = OffloadEngine.attach(model, self._tieroffload_config, device)
    _prepared.add(model)
    face.report_at_exit(engine, self._tieroffload_config)
    for prepared in self._optimizers:  # those that were prepared before their model
        if engine_of(prepared.optimizer) is engine:
            engine.adopt_optimizer(prepared.optimizer)
    try:
        # Autocast and compilation, but neither the move of everything to the device nor a wrapper around the model.
        return original(self, model, device_placement=False, evaluation_mode=True)
    except BaseException:
        engine.close()
        raise


def _refuse_what_we_cannot(accelerator: Any, model: torch.nn.Module) -> None:
    face.refuse_compiled(model, remedy=_REGIONAL)
    dynamo = accelerator.state.dynamo_plugin
    compiles = str(getattr(dynamo.backend, "value", dynamo.backend)).upper() != "NO"
    if compiles and not getattr(dynamo, "use_regional_compilation", False):
        raise face.whole_model_compiled(type(model).__name__, remedy=_REGIONAL)
    for name, submodule in model.named_modules():
        if getattr(getattr(submodule, "_hf_hook", None), "offload", False):
            raise UnsupportedError(
                f"{name or type(model).__name__} is offloaded by Accelerate already (device_map or cpu_offload), and "
                "tieroffload would be a second owner of the same memory. Load the model without device_map."
            )


def _prepare_optimizer(
    self: Any, original: Callable[..., Any], optimizer: torch.optim.Optimizer, device_placement: bool | None = None
) -> Any:
    if getattr(optimizer, "_is_accelerate_prepared", False):
        return original(self, optimizer, device_placement=device_placement)
    # With device placement, Accelerate would send the whole optimizer state to the device.
    engine = engine_of(optimizer)
    adopted = adopt(optimizer) if engine is None else engine.adopt_optimizer(optimizer)
    _prepared.add(adopted)
    return original(self, adopted, device_placement=False)


def _backward(self: Any, original: Callable[..., None], loss: Any, **kwargs: Any) -> None:
    for engine in _engines(self._models):
        face.print_plan_once(engine)
        engine.set_accumulating(not self.sync_gradients)
    original(self, loss, **kwargs)


def _clip_grad_norm_(
    self: Any, original: Callable[..., Any], parameters: Any, max_norm: float, norm_type: float = 2
) -> Any:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not any(isinstance(p, torch.nn.Parameter) and engine_of(p) is not None for p in listed):
        return original(self, listed, max_norm, norm_type=norm_type)
    # Accelerate's own looks at every p.grad before it asks torch, and a gradient that was looked at is the user's from
    # then on: all of them would be on the device at once.
    self.unscale_gradients()
    return torch.nn.utils.clip_grad_norm_(listed, max_norm, norm_type=norm_type)


def _end_training(self: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    for engine in _engines(self._models):
        engine.flush()
        face.write_reports([engine])
    original(self, *args, **kwargs)


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "prepare_model": _prepare_model,
    "prepare_optimizer": _prepare_optimizer,
    "backward": _backward,
    "clip_grad_norm_": _clip_grad_norm_,
    "end_training": _end_training,
}


# Models and optimizers of all accelerators, for as long as somebody else holds them.
_prepared: weakref.WeakSet[Any] = weakref.WeakSet()


def _recast(model: torch.nn.Module, cast: Callable[[], Any]) -> bool:
    """Change a prepared model's dtype: an engine keeps dtypes as they are, so the next engine gets the new ones."""
    engine = _engine_for(model)
    if engine is None or model not in _prepared:
        return False
    config, device = engine.config, engine.device
    engine.close()
    cast()
    engine = OffloadEngine.attach(model, config, device)
    face.report_at_exit(engine, config)
    for optimizer in [each for each in _prepared if isinstance(each, torch.optim.Optimizer)]:
        if engine_of(optimizer) is engine:
            engine.adopt_optimizer(optimizer)
    return True


def _engine_for(model: torch.nn.Module) -> OffloadEngine | None:
    """The engine of the model, or of what it was made from (regional compilation returns another root module)."""
    found = engine_of(model)
    if found is not None:
        return found
    first = next(model.parameters(), None)
    return engine_of(first) if first is not None else None


def _engines(models: Iterable[torch.nn.Module]) -> Iterator[OffloadEngine]:
    seen: set[int] = set()
    for model in models:
        engine = _engine_for(model)
        if engine is not None and id(engine) not in seen:
            seen.add(id(engine))
            yield engine
