"""Floor 6. `model.to("cuda")` on a model that is about to be handed over waits until it is clear that it is not.

Many scripts move the model to the device right before `accelerator.prepare(model)`; a model that does not fit would
fail there. A large model's move is noted instead, forgotten when the model is prepared, and made up for at its first
forward pass otherwise. Small models, other targets, and changes of dtype go ahead as always; a change of dtype of a
model that an engine has is made between two engines (HF Trainer's `--bf16_full_eval` asks for one).
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


def hook_modules(
    is_managed: Callable[[torch.nn.Module], bool], recast: Callable[[torch.nn.Module, Callable[[], Any]], bool]
) -> None:
    """Wrap `nn.Module.to` and `.cuda`. Idempotent.

    Args:
        is_managed: an engine has the module's parameters; it is then not moved at all.
        recast: `recast(module, cast)` calls `cast()`, which changes dtypes, while no engine has the module; False and
            nothing done where that cannot be.
    """
    if hasattr(torch.nn.Module.to, "_tieroffload"):
        return
    to, cuda = torch.nn.Module.to, torch.nn.Module.cuda

    @functools.wraps(to)
    def to_later(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        only_moves = device is not None and dtype is None and memory_format is None
        if only_moves and waits(self, device):
            return self
        if dtype is not None and _tieroffload_hooks.enabled() and is_managed(self):
            changed = any(t.is_floating_point() and t.dtype != dtype for t in (*self.parameters(), *self.buffers()))
            if not changed or recast(self, lambda: to(self, dtype=dtype)):
                return self
        return to(self, *args, **kwargs)

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
