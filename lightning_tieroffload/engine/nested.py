"""Floor 0. The tensors among what a module or an operation is given and returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Through lists, tuples and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
