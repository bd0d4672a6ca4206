"""Models made of parts that the engine has to leave alone."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from exactness import FULL, check
from fakes import batches
from torch import nn

from lightning_tieroffload.engine.units import find_units

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.jit")


def scripted(*layers: nn.Module) -> nn.Module:
    return torch.jit.script(nn.Sequential(*layers))  # type: ignore[no-any-return]


def build() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(24, 24), nn.Tanh()),
        scripted(nn.Linear(24, 24), nn.BatchNorm1d(24)),
        nn.Sequential(nn.Linear(24, 24), nn.Tanh()),
        nn.Linear(24, 3),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_inside_a_model() -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 4, 24):
            loss = model(x).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss.detach(), norm=norm)

    check(build, loop, FULL)
    units = find_units(build()[0])
    assert {name for name, _, reason in units.unmanaged if "TorchScript" in reason} == {
        "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"
    }  # fmt: skip
    whole = find_units(scripted(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert not whole.units
    assert len(whole.unmanaged) == 4
