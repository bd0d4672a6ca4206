"""A DRAM budget that holds gradients in 16 bits alone: what it admits, and what it refuses before anything is lost."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from exactness import QUICK, Variant, attach, one_thread, seed_all
from fakes import batches, mlp
from torch import nn

from lightning_tieroffload.engine import offload_engine
from lightning_tieroffload.errors import CapacityError, InfeasiblePlanError

WIDTH = 256  # so that gradients are more than page rounding


@pytest.fixture
def on_gpus_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's DEVICE tier keeps gradients in 16 bits too, where a job runs under autocast."""
    monkeypatch.setattr(offload_engine, "_runs_under_autocast", lambda device: True)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_all(0)
    model = mlp(4, width=WIDTH)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def least_dram(model: nn.Module, optimizer: Any) -> int:
    """The smallest budget that holds gradients in full width."""
    budget = 1
    for _ in range(4):
        try:
            attach(model, optimizer, Variant(), dram_budget=budget).close()
        except InfeasiblePlanError as error:
            assert error.least_budget_nbytes is not None
            budget = error.least_budget_nbytes
    return budget


def steps(model: nn.Module, optimizer: Any, *, num_micro: int = 1, autocast: bool = True) -> list[torch.Tensor]:
    losses = []
    for x in batches(3, 4, WIDTH):
        for part in x.chunk(num_micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(part).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def least_narrow_dram() -> int:
    """The smallest budget that holds gradients in 16 bits, as the message says it."""
    model, optimizer = build()
    state = sum(2 * p.numel() * 4 for p in model.parameters())
    with pytest.raises(InfeasiblePlanError) as caught:
        attach(model, optimizer, Variant(), dram_budget=least_dram(*build()) - state // 2)
    found = re.search(r"\((\d+) under autocast", str(caught.value))
    assert found is not None
    return int(found[1])


def test_on_a_cpu_the_budget_is_for_full_width() -> None:
    model, optimizer = build()
    least = least_dram(model, optimizer)
    with pytest.raises(InfeasiblePlanError, match=f"smallest dram_budget that works is {least} bytes;"):
        attach(model, optimizer, Variant(), dram_budget=least - 1)


@pytest.mark.usefixtures("on_gpus_terms")
def test_a_job_under_autocast_runs_exactly_and_within_it(caplog: pytest.LogCaptureFixture) -> None:
    with one_thread():
        plain_model, plain_optimizer = build()
        want = steps(plain_model, plain_optimizer)
        model, optimizer = build()
        budget = least_narrow_dram()
        engine = attach(model, optimizer, QUICK[0], dram_budget=budget)
        assert "16 bits" in caplog.text
        assert all(torch.equal(a, b) for a, b in zip(want, steps(model, optimizer), strict=True))
        engine.flush()
        account = engine.report()["tiers"]["dram"]
        assert account["peak_nbytes"] <= account["budget_nbytes"] == budget
        engine.close()
        for p, q in zip(plain_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.usefixtures("on_gpus_terms")
@pytest.mark.parametrize("how", [{"autocast": False}, {"num_micro": 2}], ids=["no autocast", "accumulation"])
def test_wide_gradients_are_refused_in_the_first_backward(how: dict[str, Any]) -> None:
    with one_thread():
        model, optimizer = build()
        before = copy.deepcopy(model.state_dict())
        engine = attach(model, optimizer, QUICK[0], dram_budget=least_narrow_dram())
        with pytest.raises(CapacityError, match=r"came in full width.*Raise dram_budget"):
            steps(model, optimizer, **how)
        engine.close()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.usefixtures("on_gpus_terms")
def test_what_holds_neither_is_refused_at_once_with_both_numbers() -> None:
    model, optimizer = build()
    least = least_dram(*build())
    narrow = least_narrow_dram()
    assert least - narrow > 0.9 * sum(2 * p.numel() for p in model.parameters() if p.dim() == 2)
    with pytest.raises(InfeasiblePlanError, match=rf"works is {least} bytes \({narrow} under autocast") as caught:
        attach(model, optimizer, Variant(), dram_budget=narrow - 1)
    assert caught.value.least_budget_nbytes == least


@pytest.mark.usefixtures("on_gpus_terms")
def test_room_for_full_width_admits_everything_silently(caplog: pytest.LogCaptureFixture) -> None:
    with one_thread():
        model, optimizer = build()
        engine = attach(model, optimizer, QUICK[0], dram_budget=least_dram(*build()))
        assert not caplog.text
        steps(model, optimizer, num_micro=2)
        engine.close()
