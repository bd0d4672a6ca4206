"""Speed of the scheduler, the arena and the store. The disk's part: `-m nvme`, on a quiet machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.probe import compare_store, threads_for
from lightning_tieroffload.io.scheduler import LaneSpec, Scheduler
from lightning_tieroffload.memory.arena import PinnedArena
from lightning_tieroffload.sizes import GiB, KiB, MiB

pytestmark = pytest.mark.alone
_NUM_WORKS = 5000


@pytest.fixture(params=[1, 4], ids=["1 thread", "4 threads"])
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    with Scheduler([LaneSpec(name="read", concurrency=request.param)], timeout_s=60) as made:
        made.start()
        yield made


def test_no_op_transfers(benchmark: Any, scheduler: Scheduler) -> None:
    """Submit and drain 5,000 empty works; 20,000 a second are wanted."""

    def run() -> None:
        for _ in range(_NUM_WORKS):
            scheduler.submit("read", int, label="no-op")
        scheduler.drain()

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    per_s = _NUM_WORKS / benchmark.stats["median"]
    benchmark.extra_info["transfers_per_s"] = round(per_s)
    assert per_s >= 20_000


def test_submit_alone(benchmark: Any) -> None:
    """What a hook pays; below 50 µs is wanted."""
    with Scheduler([LaneSpec(name="read")], timeout_s=60) as scheduler:
        scheduler.start()
        benchmark.pedantic(
            lambda: scheduler.submit("read", int, label="no-op"), rounds=3000, warmup_rounds=100, iterations=1
        )
        scheduler.drain()
    assert benchmark.stats["median"] < 50e-6


def test_round_trip(benchmark: Any, scheduler: Scheduler) -> None:
    benchmark.pedantic(
        lambda: scheduler.submit("read", int, label="no-op").wait(), rounds=2000, warmup_rounds=100, iterations=1
    )


def test_start_latency_beside_pure_python(benchmark: Any) -> None:
    """Seconds until a work starts while the submitting thread goes on in pure Python and never lets go of the lock."""
    with Scheduler([LaneSpec(name="read")], timeout_s=60) as scheduler:
        scheduler.start()
        waits_s: list[float] = []

        def run() -> None:
            started: list[float] = []
            submitted_s = time.perf_counter()
            scheduler.submit("read", lambda: started.append(time.perf_counter()), label="x")
            while not started:
                sum(range(50))
            waits_s.append(started[0] - submitted_s)

        benchmark.pedantic(run, rounds=200, warmup_rounds=5)
        benchmark.extra_info["median_start_s"] = statistics.median(waits_s)


def test_chain_over_lanes(benchmark: Any) -> None:
    """A unit's update: read, update, write, each after the one before, for 200 units."""
    with Scheduler([LaneSpec(name=name, concurrency=2) for name in ("read", "update", "write")], timeout_s=60) as made:

        def run() -> None:
            for index in range(200):
                ticket = made.submit("read", int, label="r", priority=index)
                ticket = made.submit("update", int, label="u", priority=index, after=[ticket])
                made.submit("write", int, label="w", priority=index, after=[ticket])
            made.drain()

        benchmark.pedantic(run, rounds=5, warmup_rounds=1)


def test_arena_take_and_free(benchmark: Any) -> None:
    """With 200 live blocks of odd lengths."""
    with PinnedArena(64 * MiB, pin=False) as arena:
        kept = [arena.take(1000 + 37 * index) for index in range(400)]
        for block in kept[::2]:
            block.free()
        benchmark(lambda: arena.take(50_000, align_nbytes=4096).free())


def test_arena_tensor(benchmark: Any) -> None:
    with PinnedArena(1 * MiB, pin=False) as arena:
        block = arena.take(64 * KiB)
        benchmark(lambda: block.tensor(torch.float32, (16, 16), 1024))


def test_arena_first_touch(benchmark: Any) -> None:
    """Mapping and touching 512 MiB."""
    benchmark.pedantic(lambda: PinnedArena(512 * MiB, pin=True).close(), rounds=3)
    benchmark.extra_info["bytes_per_s"] = round(512 * MiB / benchmark.stats["median"])


@pytest.mark.nvme
@pytest.mark.parametrize("depth", [4, 8])
def test_store_beside_a_bare_loop(benchmark: Any, tmp_path: Path, depth: int) -> None:
    """Store throughput, checksums and scheduler included, is at least 90 % of a bare O_DIRECT loop in the same run."""
    found = benchmark.pedantic(
        lambda: compare_store(
            tmp_path, block_nbytes=4 * MiB, io_threads=threads_for(depth), nbytes=512 * MiB, num_rounds=7
        ),
        rounds=1,
    )
    benchmark.extra_info.update(found.to_json() | {"load_before": os.getloadavg()[0]})
    assert found.read_frac >= 0.9
    assert found.write_frac >= 0.9
    assert found.mixed_frac >= 0.9


@pytest.mark.parametrize("verify_reads", [True, False], ids=["checked", "unchecked"])
def test_cost_of_checksums(benchmark: Any, tmp_path: Path, verify_reads: bool) -> None:
    """64 MiB written and read back in this thread."""
    with ExtentStore([tmp_path], verify_reads=verify_reads) as store, PinnedArena(64 * MiB, pin=False) as arena:
        memory = arena.take(64 * MiB, align_nbytes=4096).memory()
        memory[:] = os.urandom(64 * MiB)
        store.allocate("s", 64 * MiB)
        store.write("s", memory)

        def run() -> None:
            store.write("s", memory)
            store.read("s", memory)

        benchmark.pedantic(run, rounds=3)


def test_small_shards(benchmark: Any, tmp_path: Path) -> None:
    """300 shards of 4 KiB written and read: what the path costs apart from the bytes."""
    with (
        ExtentStore([tmp_path]) as store,
        Scheduler(NvmeMover.lane_specs(1), timeout_s=60) as scheduler,
        PinnedArena(2 * MiB, pin=False) as arena,
    ):
        names = [f"s{index}" for index in range(300)]
        store.reserve(dict.fromkeys(names, 4096))
        mover = NvmeMover(scheduler, store)
        memories = [arena.take(4096, align_nbytes=4096).memory() for _ in names]

        def run() -> None:
            for name, memory in zip(names, memories, strict=True):
                mover.write(name, memory)
                mover.read(name, memory)
            scheduler.drain()

        benchmark.pedantic(run, rounds=5, warmup_rounds=1)


@pytest.mark.slow
def test_arena_first_touch_of_gibibytes(benchmark: Any) -> None:
    benchmark.pedantic(lambda: PinnedArena(4 * GiB, pin=True).close(), rounds=2)
    benchmark.extra_info["bytes_per_s"] = round(4 * GiB / benchmark.stats["median"])
