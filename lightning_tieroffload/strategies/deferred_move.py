"""Floor 6. `model.to("cuda")` on a model that is about to be handed over waits until it is clear that it is not.

Many scripts move the model to the device right before `accelerator.prepare(model)`; a model that does not fit would
fail there. A large model's move is noted instead, forgotten when the model is prepared, and made up for at its first
forward pass otherwise. Small models, other targets, and changes of dtype go ahead as always.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

import _tieroffload_hooks
from lightning_tieroffload.strategies import face

__all__ = ["forget", "hook_modules"]

_waiting: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()


def forget(model: torch.nn.Module) -> None:
    """The model is in an engine's hands now: its noted move will not be made up for."""
    handle = _waiting.pop(model, None)
    if handle is not None:
        handle.remove()


def hook_modules(is_managed: Callable[[torch.nn.Module], bool]) -> None:
    """Wrap `nn.Module.to` and `.cuda`. Idempotent. A module for which `is_managed` says True is not moved at all."""
    if hasattr(torch.nn.Module.to, "_tieroffload"):
        return
    to, cuda = torch.nn.Module.to, torch.nn.Module.cuda

    @functools.wraps(to)
    def to_later(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        only_moves = device is not None and dtype is None and memory_format is None
        return self if only_moves and waits(self, device) else to(self, *args, **kwargs)

    @functools.wraps(cuda)
    def cuda_later(self: torch.nn.Module, device: int | torch.device | None = None) -> torch.nn.Module:
        target = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return self if waits(self, target) else cuda(self, device)

    def waits(model: torch.nn.Module, device: torch.device) -> bool:
        """Note the move and say True, or say False: it is to be made now."""
        if not _tieroffload_hooks.enabled():
            return False
        if is_managed(model):
            return True  # where its parameters are is the engine's matter
        if face.fits_beside(model, device):
            forget(model)
            return False
        face.log.debug("%s stays on the host until it is prepared: it is large for %s", type(model).__name__, device)

        def make_up_for_it(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            forget(module)
            if not is_managed(module):
                to(module, device)

        forget(model)
        _waiting[model] = model.register_forward_pre_hook(make_up_for_it)
        return True

    to_later._tieroffload = True  # type: ignore[attr-defined]
    torch.nn.Module.to = to_later  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = cuda_later  # type: ignore[method-assign,assignment]
