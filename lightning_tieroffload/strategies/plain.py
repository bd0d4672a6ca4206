"""Floor 11. The face for any training loop: `model, optimizer = offload(model, optimizer, device_budget="10GiB")`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

import torch
from torch.optim import Optimizer

import _tieroffload_hooks
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.strategies import face

__all__ = ["offload"]

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@overload
def offload(
    model: ModuleT, optimizer: None = None, *, device: torch.device | str | None = None, **config: Any
) -> tuple[ModuleT, None]: ...
@overload
def offload(
    model: ModuleT, optimizer: OptimizerT, *, device: torch.device | str | None = None, **config: Any
) -> tuple[ModuleT, OptimizerT]: ...
@overload
def offload(
    model: ModuleT, optimizer: Sequence[OptimizerT], *, device: torch.device | str | None = None, **config: Any
) -> tuple[ModuleT, list[OptimizerT]]: ...
def offload(
    model: ModuleT,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    device: torch.device | str | None = None,
    **config: Any,
) -> tuple[ModuleT, Any]:
    """Put the model's training state on tiers; go on with the same objects as before.

    The model, its parameters and the optimizers keep their identity, so everything that already refers to them stays
    right, and the order of creation does not matter. `engine_of(model).close()` makes them ordinary again.

    Args:
        model: trained or evaluated here. Its buffers move to `device`; its parameters move as the plan says.
        optimizer: one, a list, or None for a model that is only evaluated (or whose optimizer comes later, by
            `engine_of(model).adopt_optimizer(optimizer)`).
        device: where to compute; the current CUDA device where there is one, else the CPU.
        **config: fields of `TierOffloadConfig`, over what the environment variable `TIEROFFLOAD_CONFIG` says.

    Returns:
        The same model, and the same optimizer (a list where a sequence was given, None for None).

    Raises:
        ConfigError: unknown or impossible settings. CapacityError: the budgets cannot hold what must be on a tier.
        UnsupportedError: the whole model was compiled, or this process is one of several.
    """
    settings = face.config_from(config)
    face.refuse_compiled(
        model, remedy="Hand over the model as it was, and compile its layers (layer.compile()) if at all."
    )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        face.refuse_several_processes(
            torch.distributed.get_world_size(), face="offload()", remedy="Start one process, with one device."
        )
    was_offloaded = engine_of(model) is not None
    engine = OffloadEngine.attach(model, settings, torch.device(device) if device is not None else None)
    _tieroffload_hooks.used()
    several = isinstance(optimizer, (list, tuple))
    optimizers: list[Optimizer] = list(optimizer) if several else [optimizer] if optimizer is not None else []  # type: ignore[arg-type,list-item]
    try:
        adopted = [engine.adopt_optimizer(each) for each in optimizers]
    except BaseException:
        if not was_offloaded:  # what this call has not done whole it has not done
            engine.close()
        raise
    face.print_plan_once(engine)
    face.report_at_exit(engine, settings)
    if several:
        return model, adopted
    return model, adopted[0] if adopted else None
