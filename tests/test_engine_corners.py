"""What goes wrong in the middle: exceptions between two hooks, two engines, threads that meet, host writes in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_tieroffload import offload

KiB = 1024
SETTINGS: dict[str, Any] = {"device_budget": 64 * KiB, "dram_budget": 64 * KiB * KiB}
pytestmark = pytest.mark.usefixtures("one_thread")


def layers(num: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(num)])


def row() -> torch.Tensor:
    return torch.linspace(-1, 1, 64)[None]


# ---------------------------------------------------------------------------------------------------- state_dict
@pytest.mark.parametrize("how", ["step", "alias", "load"])
def test_a_state_dict_that_failed_leaves_nothing_for_the_next(how: str) -> None:
    """An exception in a user's hook skips ours; the next state_dict shows the values of its own time."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    offload(model, optimizer, **SETTINGS)
    fails = [True]

    def hook(*_: Any) -> None:
        if fails[0]:
            raise RuntimeError("disk full")

    model[2]._register_state_dict_hook(hook)
    with pytest.raises(RuntimeError, match="disk full"):
        model.state_dict()
    fails[0] = False
    if how == "step":
        model(row()).sum().backward()
        optimizer.step()
    elif how == "alias":
        model[0].weight.detach().mul_(2.0)  # an alias, not a snapshot
    else:
        model[0].weight.data = torch.ones(64, 64)
    now = model[0].weight.detach().clone()
    saved = model.state_dict()["0.weight"]
    assert torch.equal(saved, now)
    if how == "alias":
        assert torch.equal(now, 2 * layers()[0].weight)
