"""Blocks at home on flash are page-locked while their pages are there, where a device copies them. With a CUDA runtime
that only keeps count: what it cannot show is the speed."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import FULL, POISON, Variant, check
from fakes import adamw_gpt, gpt_steps
from test_memory_arena import FakeCudart
from test_nvme_tier import least_dram, mlp_build, mlp_loop

from lightning_tieroffload.concepts import Role
from lightning_tieroffload.engine import streams
from lightning_tieroffload.engine.host_space import HostSpace
from lightning_tieroffload.memory import arena as arena_module
from lightning_tieroffload.memory.arena import PinnedArena


class Watch:
    """Every mapping that comes and goes, and whether each copy found it page-locked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cudart: FakeCudart) -> None:
        self.cudart = cudart
        self.num_copies = self.num_pageable = self.num_registered = 0
        self._paged: dict[int, int] = {}  # address to nbytes, of parameters and gradients at home on flash
        register, now = cudart.cudaHostRegister, streams.HostStreams._now
        open_flash, grow, shrink = HostSpace.open_flash, HostSpace.grow, HostSpace.shrink
        monkeypatch.setattr(arena_module, "_cudart", lambda: cudart)

        def counting(address: int, nbytes: int, flags: int) -> int:
            self.num_registered += 1
            return register(address, nbytes, flags)

        def locking(space: HostSpace, *args: Any) -> None:
            open_flash(space, *args)
            space.locks_pages = True

        def growing(space: HostSpace, block: Any, arena: PinnedArena) -> None:
            if block.is_paged and block.role.value != "state":
                self._paged[arena.address] = arena.nbytes
            grow(space, block, arena)

        def shrinking(space: HostSpace, block: Any, arena: PinnedArena) -> None:
            self._paged.pop(arena.address, None)  # somebody else's memory may come to lie there
            shrink(space, block, arena)

        def copying(mover: Any, kind: str, pairs: Any, *rest: Any) -> Any:
            for tensor in (tensor for pair in pairs for tensor in pair):
                self._look(tensor)
            return now(mover, kind, pairs, *rest)

        cudart.cudaHostRegister = counting  # type: ignore[method-assign]
        monkeypatch.setattr(HostSpace, "open_flash", locking)
        monkeypatch.setattr(HostSpace, "grow", growing)
        monkeypatch.setattr(HostSpace, "shrink", shrinking)
        monkeypatch.setattr(streams.HostStreams, "_now", copying)

    def _look(self, tensor: torch.Tensor) -> None:
        for start, nbytes in self._paged.items():
            if start <= tensor.data_ptr() < start + nbytes:
                self.num_copies += 1
                self.num_pageable += start not in self.cudart.registered


@pytest.mark.parametrize(
    "variant", [Variant(), Variant(POISON, budget="tight"), FULL[0]], ids=["plain", "tight", "full"]
)
@pytest.mark.parametrize("kind", ["mlp", "gpt"])
def test_every_copy_meets_locked_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, variant: Variant
) -> None:
    """Everything on flash in the least DRAM: each copy of the device finds its pages locked; in the end none is."""
    build, loop = (mlp_build(), mlp_loop(3)) if kind == "mlp" else (adamw_gpt, gpt_steps(3, autocast=True))
    budget = least_dram(build, tmp_path)
    cudart = FakeCudart()
    watch = Watch(monkeypatch, cudart)
    _, ours = check(build, loop, [variant], nvme_paths=[tmp_path], dram_budget=budget)
    assert ours[0].reports[-1]["moved_nbytes"]["read"] > 0
    if not variant.debug & {"delays"}:
        assert watch.num_copies > 20
    assert watch.num_pageable == 0
    assert watch.num_registered > 10
    del ours
    gc.collect()
    assert cudart.registered == {}


def test_a_refusal_is_said_once_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Too little may be locked: one warning, pageable memory, the same numbers."""
    budget = least_dram(mlp_build(), tmp_path)
    watch = Watch(monkeypatch, FakeCudart(limit_nbytes=0))
    check(mlp_build(), mlp_loop(2), [Variant()], nvme_paths=[tmp_path], dram_budget=budget)
    assert watch.num_registered >= 1
    refused = [line for line in caplog.messages if "page-locking" in line]
    assert 1 <= len(refused) <= 3  # works of several threads may ask before the first answer


def test_a_block_that_is_gone_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that goes while one of its reads ends must not leave everybody else's memory pageable."""
    monkeypatch.setattr(arena_module, "_cudart", FakeCudart)
    arena = PinnedArena(1 << 20, pin=False)
    arena.close()
    assert arena.pin(is_fresh=False)
    assert not arena.pinned


def test_a_refusal_stands_whatever_other_threads_find() -> None:
    """One thread may be told no while another one, which began before, is told yes."""

    class Block:
        role = Role.PARAM

        def __init__(self, is_locked: bool) -> None:
            self.is_locked = is_locked

        def lock_pages(self, segments: Any, *, is_fresh: bool) -> bool:
            if self.is_locked:
                lock(Block(False))  # meanwhile
            return self.is_locked

    space = SimpleNamespace(locks_pages=True)

    def lock(block: Block) -> None:
        HostSpace._lock(space, block, ())  # type: ignore[arg-type]

    lock(Block(True))
    assert not space.locks_pages


def test_what_is_there_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locking pages that hold something leaves every byte; fresh ones are touched first."""
    cudart = FakeCudart()
    monkeypatch.setattr(arena_module, "_cudart", lambda: cudart)
    arena = PinnedArena(1 << 20, pin=False)
    arena.memory()[:] = bytes(range(256)) * 4096
    assert arena.pin(is_fresh=False)
    assert arena.pin(is_fresh=False), "again does nothing"
    assert bytes(arena.memory()) == bytes(range(256)) * 4096
    assert cudart.registered == {arena.address: arena.nbytes}
    arena.unpin()
    assert cudart.registered == {}
    arena.close()
