"""Toy models, data and comparisons that the tests of all faces share. Nothing here knows a face."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn

# The largest layer of `mlp` (16.6 kB) and one more fit, nothing else does.
STARVED = {"device_budget": "40KiB", "optimizer_kernel": "torch"}
# The same, with NaN in memory before it is reused and every copy and update put off until somebody waits for it.
SLOW_STORE = {**STARVED, "debug": ["poison", "delays"]}


def seed_all(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mlp(num_layers: int = 4, *, dropout: float = 0.0, batch_norm: bool = False) -> nn.Sequential:
    """`num_layers` times Linear(64, 64) + GELU, then Linear(64, 1)."""
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        parts: list[nn.Module] = [nn.Linear(64, 64), nn.GELU()]
        if batch_norm:
            parts.append(nn.BatchNorm1d(64))
        if dropout:
            parts.append(nn.Dropout(dropout))
        layers.append(nn.Sequential(*parts))
    return nn.Sequential(*layers, nn.Linear(64, 1))


def samples(num: int = 48) -> torch.Tensor:
    return torch.randn(num, 64, generator=torch.Generator().manual_seed(7))


def bits(value: Any) -> Any:
    """The value with every tensor as its raw bytes, so that NaN equals NaN (whatever its payload) and not -0.0 0.0."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        if tensor.is_floating_point():
            tensor = tensor.masked_fill(tensor.isnan(), float("nan"))
        return tuple(tensor.shape), str(tensor.dtype), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(bits(item) for item in value) if type(value) in (list, tuple) else [bits(i) for i in value]
    return value


def differences(plain: Any, ours: Any, path: str = "") -> list[str]:
    """Where two nested values differ, bit by bit; empty if nowhere."""
    if isinstance(plain, dict) and isinstance(ours, dict):
        found = [f"{path}: keys {sorted(map(str, set(plain) ^ set(ours)))}"] if set(plain) != set(ours) else []
        return found + [d for key in plain if key in ours for d in differences(plain[key], ours[key], f"{path}.{key}")]
    if isinstance(plain, (list, tuple)) and isinstance(ours, (list, tuple)):
        found = [f"{path}: {len(plain)} items, {len(ours)} items"] if len(plain) != len(ours) else []
        return found + [
            d for i, (a, b) in enumerate(zip(plain, ours, strict=False)) for d in differences(a, b, f"{path}[{i}]")
        ]
    if bits(plain) == bits(ours):
        return []
    if isinstance(plain, torch.Tensor) and isinstance(ours, torch.Tensor) and plain.shape == ours.shape:
        return [
            f"{path}: {plain.dtype} {ours.dtype}, largest {(plain.double() - ours.double()).abs().max().item():.3g}"
        ]
    return [f"{path}: {plain!r} against {ours!r}"]


def assert_same(plain: Any, ours: Any) -> None:
    found = differences(plain, ours)
    assert not found, "\n".join(found[:20])


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that training changes, as copies."""
    return copy.deepcopy(
        {"model": dict(model.state_dict()), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    )


def rng_states() -> dict[str, Any]:
    state = np.random.get_state()
    return {"torch": torch.get_rng_state(), "numpy": (state[1].tobytes(), state[2]), "python": random.getstate()}


class InfiniteAt(torch.autograd.Function):
    """Identity; its gradient is infinite where asked for."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, infinite: bool) -> torch.Tensor:
        ctx.infinite = infinite
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * float("inf") if ctx.infinite else grad, None
