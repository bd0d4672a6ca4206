"""A unit's parameter that another unit's forward reads: exact on the least budget that the engine names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_tieroffload import InfeasiblePlanError, engine_of, offload


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(x) + table.mean(0))


class Borrowing(nn.Module):
    """Like relative positions: the embedding's weight goes into each layer as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.table.weight)
        return (x**2).mean()


@pytest.mark.parametrize("debug", [None, ["poison", "delays"]])
def test_least_budget_is_enough_where_a_parameter_is_borrowed(debug: Any) -> None:
    def run(device_budget: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = Borrowing()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if device_budget is not None:
            offload(model, optimizer, device_budget=device_budget, dram_budget="1GiB", debug=debug)
        looks = []
        for step in range(4):
            loss = model(torch.randn(4, 32, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            looks.append(loss.detach())
        looks += [p.detach().clone() for p in model.parameters()]
        engine = engine_of(model)
        if engine is not None:
            engine.close()
        return looks

    with pytest.raises(InfeasiblePlanError) as caught:
        run(1)
    assert caught.value.least_budget_nbytes is not None
    ours = run(caught.value.least_budget_nbytes)
    assert all(torch.equal(a, b) for a, b in zip(run(None), ours, strict=True))
