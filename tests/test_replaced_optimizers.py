"""Optimizers that are made anew while training goes on: nothing of the old ones counts, and numbers stay exact."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import FULL, Variant, attach, check, one_thread
from fakes import batches, mlp, mlp_loss
from torch.optim import SGD, AdamW

from lightning_tieroffload.engine.offload_engine import engine_of

NUM_EPOCHS, NUM_STEPS = 8, 2


def restarts(made: list[Any], seen: list[dict[str, Any]], epochs: Any = AdamW) -> Any:
    """ReLoRA's kind of loop: a new optimizer every other step. The last one is in ``made``, reports go to ``seen``."""

    def loop(model: Any, _: Any, look: Any) -> None:
        for epoch in range(NUM_EPOCHS):
            cls = epochs[epoch % len(epochs)] if isinstance(epochs, list) else epochs
            made[:] = [optimizer := cls(model.parameters(), lr=1e-2, **({"momentum": 0.9} if cls is SGD else {}))]
            engine = engine_of(model)
            if engine is not None:
                engine.adopt_optimizer(optimizer)
            for x in batches(NUM_STEPS, seed=epoch):
                loss = mlp_loss(model, x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                look(loss=loss.detach(), state=optimizer.state_dict() if epoch == NUM_EPOCHS - 1 else None)
            if engine is not None:
                seen.append({**engine.report(), "estimate_nbytes": engine.core.state_estimate_nbytes})
        made.clear()

    return loop


@pytest.mark.parametrize("on_flash", [False, True])
@pytest.mark.parametrize("epochs", [AdamW, [AdamW, SGD], [SGD, AdamW]])
def test_a_new_optimizer_takes_the_place_of_the_old_one(tmp_path: Path, on_flash: bool, epochs: Any) -> None:
    """Its steps are the run's steps, its state has the old one's room, and the budget is that of one optimizer."""
    settings: dict[str, Any] = {"nvme_paths": [tmp_path], "dram_budget": 330_000} if on_flash else {}
    for variant in FULL[::3]:
        seen: list[dict[str, Any]] = []
        check(lambda: (mlp(4), None), restarts([], seen, epochs), [variant], **settings)
        assert [report["num_steps"] for report in seen] == [NUM_STEPS * (i + 1) for i in range(NUM_EPOCHS)]
        of_one = max(report["estimate_nbytes"] for report in seen[:2])
        assert all(report["estimate_nbytes"] <= of_one for report in seen)
        dram = seen[-1]["tiers"]["dram"]
        assert dram["peak_nbytes"] <= dram["budget_nbytes"]


@pytest.mark.parametrize("on_flash", [False, True])
def test_models_that_come_and_go_beside_one_that_stays(tmp_path: Path, on_flash: bool) -> None:
    """A space outlives engines, and what their optimizers were to keep is not kept from the next ones."""
    settings: dict[str, Any] = {"nvme_paths": [tmp_path], "dram_budget": 700_000} if on_flash else {}
    variant = Variant(budget=200_000)
    stays = mlp(2)
    estimates: list[Any] = []
    with one_thread():
        first = attach(stays, None, variant, **settings)
        kept = []
        for _ in range(6):
            model = mlp(4)
            optimizer = AdamW(model.parameters())
            kept.append(optimizer)  # a user may keep it: it is ordinary again
            with contextlib.closing(attach(model, optimizer, variant, **settings)) as engine:
                assert engine.core is first.core
                mlp_loss(model, batches(1)[0]).backward()
                optimizer.step()
                needs = [sum(need.fixed_nbytes.values()) for need in first.core.state_needs.values()]
                estimates.append((first.core.state_estimate_nbytes, sum(needs)))
        assert first.core.state_estimate_nbytes == 0
        first.close()
    assert len(set(estimates)) == 1


def test_steps_go_on_where_the_first_optimizer_has_had_its_day() -> None:
    """Two phases over other parameters each: the second one's steps count in the end; a critic's five do not."""
    model = mlp(4)
    params = list(model.parameters())
    rare, often = SGD(params[:2], lr=1e-2), SGD(params[2:], lr=1e-2)
    with one_thread(), contextlib.closing(attach(model, [rare, often], Variant())) as engine:

        def step(optimizer: Any) -> int:
            mlp_loss(model, batches(1)[0]).backward()
            optimizer.step()
            model.zero_grad()
            return engine.updates.num_steps  # type: ignore[no-any-return]

        for num in range(1, 4):
            assert step(rare) == num
            assert [step(often) for _ in range(5)] == [num] * 5
        counts = [step(often) for _ in range(60)]
        assert counts[0] == 3
        assert counts[-1] - counts[-11] == 10


def test_a_dropped_optimizer_leaves_the_books() -> None:
    model = mlp(2)
    with one_thread(), contextlib.closing(attach(model, None, Variant())) as engine:
        for _ in range(5):
            engine.adopt_optimizer(torch.optim.Adam(model.parameters()))
        assert len(engine._optimizers) <= 2
