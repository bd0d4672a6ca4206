"""State on flash, updated through a few staging blocks, one coroutine a unit: exact whatever the timing."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.scheduler import LaneSpec, Scheduler
from lightning_tieroffload.memory.arena import PinnedArena

NUM_UNITS, NUMEL, NUM_STEPS = 8, 5001, 4
NBYTES = 4 * NUMEL


def update(state: torch.Tensor, step: int, unit: int) -> None:
    state.mul_(0.9).add_(float(step * 10 + unit))


def reference() -> list[torch.Tensor]:
    states = [torch.full((NUMEL,), float(unit)) for unit in range(NUM_UNITS)]
    for step in range(NUM_STEPS):
        for unit, state in enumerate(states):
            update(state, step, unit)
    return states


def slowed(real: Callable[..., int], rng: random.Random, lock: threading.Lock) -> Callable[..., int]:
    def call(*args: Any) -> int:
        with lock:
            delay_s = rng.random() * 0.001
        time.sleep(delay_s)
        return real(*args)

    return call


@pytest.mark.parametrize("num_staged", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_num_02_one_coroutine_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_staged: int, seed: int
) -> None:
    """Await the read, await the update, await the write; blocks are poisoned between owners, the disk is slow."""
    expected = reference()
    lanes = [*NvmeMover.lane_specs(1, io_threads=2), LaneSpec(name="update")]
    padded_nbytes = -(-NBYTES // 4096) * 4096
    with (
        ExtentStore([tmp_path], block_nbytes=8192) as store,
        Scheduler(lanes, timeout_s=20) as scheduler,
        PinnedArena(num_staged * padded_nbytes, pin=False, poison=True) as arena,
    ):
        mover = NvmeMover(scheduler, store)
        store.reserve({f"unit {unit}": NBYTES for unit in range(NUM_UNITS)}, num_versions=2)
        for unit in range(NUM_UNITS):
            initial = torch.full((NUMEL,), float(unit))
            store.write(f"unit {unit}", memoryview(initial.numpy()).cast("B"))
        rng, lock = random.Random(seed), threading.Lock()
        monkeypatch.setattr(os, "preadv", slowed(os.preadv, rng, lock))
        monkeypatch.setattr(os, "pwritev", slowed(os.pwritev, rng, lock))

        async def life_of(unit: int, step: int, staging: asyncio.Semaphore) -> None:
            async with staging:  # back-pressure: as many units in DRAM as there are blocks
                block = arena.take(NBYTES, align_nbytes=4096)
                try:
                    name = f"unit {unit}"
                    await mover.read(name, block.memory(), priority=unit)
                    state = block.tensor(torch.float32, (NUMEL,))
                    await scheduler.submit("update", lambda: update(state, step, unit), label=f"update {name}")
                    await mover.write(name, block.memory(), priority=unit)
                finally:
                    block.free()

        async def one_step(step: int) -> None:
            staging = asyncio.Semaphore(num_staged)
            async with asyncio.TaskGroup() as units:
                for unit in range(NUM_UNITS):
                    units.create_task(life_of(unit, step, staging))

        for step in range(NUM_STEPS):
            scheduler.spawn(lambda step=step: one_step(step), label=f"step {step}").wait()
        assert arena.used_nbytes == 0
        assert arena.peak_nbytes == num_staged * padded_nbytes
        for unit in range(NUM_UNITS):
            found = torch.empty(NUMEL)
            store.read(f"unit {unit}", memoryview(found.numpy()).cast("B"))
            assert torch.equal(found, expected[unit])


@pytest.mark.parametrize("seed", range(20))
def test_num_02_by_tickets_in_the_seeded_mode(tmp_path: Path, seed: int) -> None:
    """The same by `after` alone, prefetching as far as blocks go; a missing dependency would change the numbers."""
    expected = reference()
    lanes = [*NvmeMover.lane_specs(1), LaneSpec(name="update")]
    with (
        ExtentStore([tmp_path], block_nbytes=8192) as store,
        Scheduler(lanes, timeout_s=20, debug_seed=seed) as scheduler,
        PinnedArena(3 * (NBYTES + 4096), pin=False, poison=True) as arena,
    ):
        mover = NvmeMover(scheduler, store)
        store.reserve({f"unit {unit}": NBYTES for unit in range(NUM_UNITS)})
        for unit in range(NUM_UNITS):
            initial = torch.full((NUMEL,), float(unit))
            store.write(f"unit {unit}", memoryview(initial.numpy()).cast("B"))
        in_flight = []
        for step in range(NUM_STEPS):
            for unit in range(NUM_UNITS):
                while arena.largest_free_nbytes < NBYTES + 4096:
                    in_flight.pop(0).wait()
                block = arena.take(NBYTES, align_nbytes=4096)
                state = block.tensor(torch.float32, (NUMEL,))
                read = mover.read(f"unit {unit}", block.memory())
                updated = scheduler.submit(
                    "update",
                    lambda state=state, step=step, unit=unit: update(state, step, unit),
                    label=f"update unit {unit}",
                    after=[read],
                )
                written = mover.write(f"unit {unit}", block.memory(), after=[updated])
                written.add_done_callback(lambda _, block=block: block.free())
                in_flight.append(written)
        scheduler.drain()
        for unit in range(NUM_UNITS):
            found = torch.empty(NUMEL)
            store.read(f"unit {unit}", memoryview(found.numpy()).cast("B"))
            assert torch.equal(found, expected[unit])
