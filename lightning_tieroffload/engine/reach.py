"""Floor 4. How an optimizer reaches its parameters: through its groups alone, or by other ways too.

Owns nothing. An optimizer that holds the model, another optimizer (Lookahead, SAM) or an object with parameters inside
cannot run as a copy over host tensors: what it does the other way would be done to something else.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_tieroffload.engine.params import managed_slot

__all__ = ["REMAPPED_DEPTH", "inner_optimizers", "reaches_past_its_groups"]

REMAPPED_DEPTH = 3  # so deep, parameters in an optimizer's lists, tuples and dicts are exchanged for host tensors
_DEPTH = 5
_MOST_OBJECTS = 20_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, types.ModuleType)
_OWN_FIELDS = frozenset(("param_groups", "state", "defaults", "step"))


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in optimizer.__dict__.items() if k not in _OWN_FIELDS and not k.startswith("_optimizer_")}


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Optimizers that this one holds, in attributes or in lists, tuples and dicts of them, and what those hold."""
    found: list[Optimizer] = []

    def look(value: Any, depth: int) -> None:
        if isinstance(value, Optimizer):
            if value is not optimizer and not any(value is other for other in found):
                found.append(value)
                for inner in value.__dict__.values():
                    look(inner, depth)
        elif depth and isinstance(value, (list, tuple)):
            for item in value:
                look(item, depth - 1)
        elif depth and isinstance(value, dict):
            for item in value.values():
                look(item, depth - 1)

    for value in _attributes(optimizer).values():
        look(value, REMAPPED_DEPTH)
    return found


def _inside(value: Any) -> Iterator[Any]:
    """What can be reached from an object in one step."""
    if isinstance(value, dict):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, weakref.ref):
        yield value()
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield value.__dict__.get("__wrapped__")
        yield value.__defaults__
    elif not isinstance(value, torch.Tensor):
        yield from getattr(value, "__dict__", {}).values()


def reaches_past_its_groups(optimizer: Optimizer, cls: type) -> bool:
    """Whether something that the optimizer holds leads to managed parameters by a way that a copy would not follow."""
    seen: set[int] = set()

    def leads_there(value: Any, depth: int, may_remap: int) -> bool:
        if isinstance(value, _PLAIN) or (isinstance(value, torch.Tensor) and managed_slot(value) is None):
            return False
        if isinstance(value, torch.Tensor):
            return may_remap < 0
        if id(value) in seen or value is optimizer or len(seen) >= _MOST_OBJECTS:
            return False
        if isinstance(value, Optimizer):
            return any(managed_slot(p) is not None for group in value.param_groups for p in group["params"])
        if isinstance(value, nn.Module):
            return any(managed_slot(p) is not None for p in value.parameters())
        if depth == 0:
            return False
        is_remapped = type(value) in (list, tuple, dict, OrderedDict)
        if not is_remapped:
            seen.add(id(value))
        left = may_remap - 1 if is_remapped else -1
        return any(leads_there(item, depth - 1, left) for item in _inside(value))

    for value in _attributes(optimizer).values():
        if leads_there(value, _DEPTH, REMAPPED_DEPTH - 1):
            return True
    for klass in cls.__mro__:
        if klass.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        if any(leads_there(value, _DEPTH, -1) for value in vars(klass).values() if not isinstance(value, defaultdict)):
            return True
    return False
