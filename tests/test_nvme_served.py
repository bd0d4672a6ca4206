"""Reads from flash that fail or come back damaged while the device holds the same bytes: served from there, exactly,
said once, and the block is at home in DRAM from then on, where there is room. What is nowhere else is an error."""

from __future__ import annotations

import errno
import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from exactness import Variant, attach, same_bits
from fakes import batches, gpt_tiny, mlp, mlp_loss, token_batches
from torch.nn.utils import clip_grad_norm_

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.offload_engine import OffloadEngine
from lightning_tieroffload.errors import InfeasiblePlanError, TierIOError
from lightning_tieroffload.io.extent_store import ReadVersion

NUM_STEPS = 6


class Job:
    """A model, its optimizer, and a step that gives the loss."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = mlp(6) if kind == "mlp" else gpt_tiny()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self._data = batches(NUM_STEPS) if kind == "mlp" else list(token_batches(NUM_STEPS))
        self._kind = kind

    def train(self, steps: range, between: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        """``between`` is called when backward has ended and the update has not begun."""
        losses = []
        for index in steps:
            data = self._data[index]
            self.optimizer.zero_grad()
            if self._kind == "mlp":
                loss = mlp_loss(self.model, data)
            else:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = self.model(input_ids=data, labels=data).loss
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 0.5)
            between()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses


@pytest.fixture(autouse=True)
def no_engine_is_left() -> Iterator[None]:
    yield
    gc.collect()


def offload(job: Job, flash: Path, dram_frac: float, debug: frozenset[str]) -> OffloadEngine:
    """All on the device, all at home on flash, ``dram_frac`` times the least DRAM."""
    variant = Variant(debug, budget="all")
    budget = 1
    while True:
        try:
            engine = attach(job.model, [job.optimizer], variant, nvme_paths=[flash], dram_budget=budget)
        except InfeasiblePlanError as error:
            assert error.least_budget_nbytes is not None
            budget = error.least_budget_nbytes
        else:
            break
    if dram_frac > 1:
        engine.close()
        engine = attach(job.model, [job.optimizer], variant, nvme_paths=[flash], dram_budget=int(dram_frac * budget))
    return engine


def damage(engine: OffloadEngine, names: list[str]) -> None:
    """Other bytes on flash."""
    store = engine.core.store
    assert store is not None
    for name in names:
        for piece in store.pieces_of(name):
            with open(piece.extent.path, "r+b") as file:
                file.seek(piece.extent.offset_nbytes)
                content = file.read(piece.extent.nbytes)
                file.seek(piece.extent.offset_nbytes)
                file.write(bytes(byte ^ 0x55 for byte in content))


def refuse(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """Flash refuses to give these back as long as they are listed."""
    real = ReadVersion.read_piece

    def read_piece(self: ReadVersion, index: int, memory: memoryview) -> None:
        if self._stored.name in names:
            raise TierIOError(f"{self._stored.name}: Input/output error", errno=errno.EIO, shard=self._stored.name)
        real(self, index, memory)

    monkeypatch.setattr(ReadVersion, "read_piece", read_piece)


def held_by_device(engine: OffloadEngine) -> list[str]:
    """Names on flash of the segments of parameters that the device holds too."""
    names = []
    for unit in engine.units:
        block = unit.param_block
        for segment in block.segments if block.is_paged else ():
            parts = [part for part in unit.home_parts if part.home_arena is segment.arena]
            is_valid = engine.space.table.is_valid
            if all(part.is_resident and is_valid(part.shard, Tier.DEVICE) for part in parts):
                names.append(segment.name)
    return names


@pytest.mark.parametrize("debug", [frozenset({"poison"}), frozenset({"poison", "delays"})], ids=["threads", "seeded"])
@pytest.mark.parametrize("dram_frac", [1, 1.3, 1.7])
@pytest.mark.parametrize("fault", ["damaged", "refused"])
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_what_flash_does_not_give_back_comes_from_the_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    fault: str,
    dram_frac: float,
    debug: frozenset[str],
) -> None:
    """In the third step every parameter that the device holds cannot be read from flash: the plain run's losses."""
    expected = Job(kind).train(range(NUM_STEPS))
    job = Job(kind)
    engine = offload(job, tmp_path, dram_frac, debug)
    losses = job.train(range(2))
    names: list[str] = []
    unreadable: list[str] = []
    refuse(monkeypatch, unreadable)

    def between() -> None:
        engine.core.scheduler.drain()
        names.extend(held_by_device(engine))
        unreadable.extend(names if fault == "refused" else ())
        damage(engine, names if fault == "damaged" else [])

    with caplog.at_level(logging.WARNING):
        losses += job.train(range(2, 3), between)
        engine.flush()
        unreadable.clear()
        losses += job.train(range(3, NUM_STEPS))
        engine.flush()
    assert len(names) > 3
    assert all(same_bits(ours, plain) for ours, plain in zip(losses, expected, strict=True))
    served = engine.space.host._mover.served_elsewhere
    said = [record.getMessage() for record in caplog.records]
    for name in served:
        assert name in names
        assert sum("was served from its other copy" in line and line.startswith(name) for line in said) == 1
    blocks = {unit.param_block for unit in engine.units for s in unit.param_block.segments if s.name in served}
    stays = [block for block in blocks if not block.is_paged]
    engine.core.scheduler.drain()
    if dram_frac == 1:
        assert served, "in the least DRAM there is no room to copy what the device holds before an update"
        assert not stays, "nor to hold it"
    elif dram_frac == 1.3:
        assert stays
    for block in stays:
        assert block.unit.choice.param_home.name == "DRAM"
        assert all(segment.name not in engine.core.store for segment in block.segments)
        assert sum(f"{block.shard} is held in DRAM from now on" in line for line in said) == 1
    report = engine.report()
    assert report["tiers"]["dram"]["peak_nbytes"] <= report["tiers"]["dram"]["budget_nbytes"]
    state = {name: p.clone() for name, p in job.model.state_dict().items()}
    engine.close()
    after = job.model.state_dict()
    assert after.keys() == state.keys()
    assert all(same_bits(state[name], p) for name, p in after.items())
