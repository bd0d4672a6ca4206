"""Optimizer state that is there before its home on flash is, or that users refer to: exact, and at home in the end.

State comes to be outside of the blocks in several ways: a class makes it in its constructor, a checkpoint is loaded,
its unit's home was DRAM when it was made. It goes to flash as soon as nobody else refers to it.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import POISON, SLOW, Variant, attach, check
from fakes import batches, mlp, mlp_loss

from lightning_tieroffload.engine.unit_state import managed_slot

VARIANTS = (
    Variant(POISON, budget="tight"),
    Variant(SLOW, seed=1, every_look=False, budget="tight"),
    Variant(frozenset(), every_look=False, budget="tight"),
)


def build(cls: Any = torch.optim.AdamW, **options: Any) -> Any:
    def make() -> Any:
        model = mlp(6)
        return model, cls(model.parameters(), lr=1e-2, **options)

    return make


def train_step(model: Any, x: torch.Tensor, *optimizers: Any) -> torch.Tensor:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = mlp_loss(model, x)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def on_flash(path: Path) -> dict[str, Any]:
    return {"nvme_paths": [path], "state_home": "nvme", "dram_budget": "1MiB"}


def names_outside(model: Any, optimizer: Any) -> list[str]:
    """Entries of a parameter's shape that no block on flash holds."""
    outside = []
    for p in model.parameters():
        slot, entry = managed_slot(p), dict.get(optimizer.state, p)
        if slot is not None and entry and slot.unit.state_block.is_paged:
            in_block = slot.unit.state_block.names_in(slot, entry)
            outside += [f"{slot.name}/{name}" for name, value in entry.items() if name not in in_block and value.dim()]
    return outside


@pytest.mark.parametrize("name", ["step", "exp_avg"])
def test_who_holds_any_entry_of_state_reads_what_step_wrote(tmp_path: Path, name: str) -> None:
    """The scalar too, which no block holds."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        held: list[torch.Tensor] = []
        for x in batches(4):
            loss = train_step(model, x, optimizer)
            held = held or [optimizer.state[p][name] for p in model.parameters()]
            look(loss=loss, held=[each.clone() for each in held])

    check(build(), loop, VARIANTS, **on_flash(tmp_path))


@pytest.mark.parametrize("when", ["before", "after"])
def test_state_of_the_constructor_that_a_user_holds_is_his(tmp_path: Path, when: str) -> None:
    """Taken before the engine came, or before the first step: what he writes counts, and he sees what steps write."""

    def made() -> Any:
        model, optimizer = build(torch.optim.Adagrad)()
        if when == "before":
            optimizer.held = [optimizer.state[p]["sum"] for p in model.parameters()]
        return model, optimizer

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        held = getattr(optimizer, "held", None) or [optimizer.state[p]["sum"] for p in model.parameters()]
        for x in batches(4):
            loss = train_step(model, x, optimizer)
            look(loss=loss, held=[each.clone() for each in held])
            for each in held:
                each.mul_(2)

    check(made, loop, VARIANTS, **on_flash(tmp_path))


def test_a_checkpoint_that_is_loaded_twice(tmp_path: Path) -> None:
    """torch takes loaded tensors as they are, so that training writes to the checkpoint: here as there."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        first, *others = batches(5)
        train_step(model, first, optimizer)
        best = copy.deepcopy(optimizer.state_dict())
        for x in others:
            look(loss=train_step(model, x, optimizer))
            optimizer.load_state_dict(best)
        look(best=[entry["exp_avg"].clone() for entry in best["state"].values()])

    check(build(), loop, VARIANTS, **on_flash(tmp_path))


@pytest.mark.parametrize("kernel", ["torch", "numba"])
def test_loaded_state_goes_to_flash_when_the_checkpoint_is_dropped(tmp_path: Path, kernel: str) -> None:
    model, optimizer = build()()
    engine = attach(model, optimizer, Variant(budget="tight"), **{**on_flash(tmp_path), "optimizer_kernel": kernel})
    first, *others = batches(4)
    train_step(model, first, optimizer)
    loaded = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(loaded)
    train_step(model, others[0], optimizer)
    engine.flush()
    assert len(names_outside(model, optimizer)) == 2 * len(list(model.parameters()))
    del loaded
    train_step(model, others[1], optimizer)
    engine.flush()
    assert names_outside(model, optimizer) == []
    engine.close()


@pytest.mark.parametrize("kernel", ["torch", "numba"])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_all_state_is_at_home(tmp_path: Path, cls: Any, options: dict[str, Any], kernel: str) -> None:
    """Whatever an update refers to meanwhile is no user. What had stepped before the engine came goes there at once."""
    for num_before in (0, 1):
        model, optimizer = build(cls, **options)()
        first, *others = batches(3)
        for _ in range(num_before):
            train_step(model, first, optimizer)
        engine = attach(model, optimizer, Variant(budget="tight"), **{**on_flash(tmp_path), "optimizer_kernel": kernel})
        if num_before:
            assert names_outside(model, optimizer) == []
        for x in others:
            train_step(model, x, optimizer)
        engine.flush()
        assert names_outside(model, optimizer) == []
        engine.close()


@pytest.mark.parametrize("how", ["second optimizer", "more parameters"])
@pytest.mark.parametrize("num_before", [0, 1])
def test_state_follows_its_home_to_flash(tmp_path: Path, how: str, num_before: int) -> None:
    """It fitted DRAM with the first parameters alone; with more of them it is at home on flash, and lies there."""

    def made() -> Any:
        model = mlp(6)
        return model, [torch.optim.AdamW(list(model.parameters())[:6], lr=1e-2)]

    def loop(model: Any, optimizers: Any, look: Any) -> None:
        (first,) = used = list(optimizers)
        xs = batches(4)
        for x in xs[:num_before]:
            look(loss=train_step(model, x, first))
        rest = list(model.parameters())[6:]
        if how == "more parameters":
            first.add_param_group({"params": rest})
        else:
            used.append(torch.optim.SGD(rest, lr=1e-2, momentum=0.9))
            if look.engine is not None:
                look.engine.adopt_optimizer(used[1])
        for x in xs[num_before:]:
            look(loss=train_step(model, x, *used))
        if look.engine is not None:
            look.engine.flush()
            report = look.engine.report()
            assert "nvme" in [unit["state_home"] for unit in report["plan"]["units"]]
            assert [name for each in used for name in names_outside(model, each)] == []
            dram = report["tiers"]["dram"]
            assert dram["peak_nbytes"] <= dram["budget_nbytes"], dram

    num_params = sum(p.numel() for p in mlp(6).parameters())
    check(made, loop, VARIANTS, nvme_paths=[tmp_path], dram_budget=12 * num_params)
