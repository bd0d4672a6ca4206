"""The DRAM that an optimizer's state will take is known before the first step, for what torch's classes keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_tieroffload import engine_of, offload

CASES: list[tuple[str, dict[str, Any]]] = [
    ("ASGD", {}), ("Adadelta", {}), ("Adagrad", {}), ("Adam", {}), ("Adam", {"amsgrad": True}), ("AdamW", {}),
    ("Adamax", {}), ("NAdam", {}), ("RAdam", {}), ("RMSprop", {}), ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Rprop", {}), ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{'-'.join(o)}" for n, o in CASES])
def test_state_is_estimated_to_the_tensor(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer = getattr(torch.optim, name)(model.parameters(), **options)
    offload(model, optimizer, device_budget="1MiB", dram_budget="1GiB")
    engine = engine_of(model)
    assert engine is not None
    estimate_nbytes = engine.core.state_estimate_nbytes
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    engine.flush()
    actual_nbytes = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    engine.close()
    assert actual_nbytes <= estimate_nbytes + 64  # a few scalars
    assert estimate_nbytes <= actual_nbytes * 1.01 + 64
