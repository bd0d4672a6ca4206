"""The NVMe mover: whole shards over lanes, in order per shard, exact whatever the timing, errors with names."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from striking import Strike

from lightning_tieroffload.errors import CapacityError, ChecksumError, TierIOError, TransferTimeoutError
from lightning_tieroffload.io.extent_store import ExtentStore, WriteVersion
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.scheduler import LaneSpec, Scheduler, TransferTicket, WorkCancelledError
from lightning_tieroffload.memory.arena import PinnedArena
from lightning_tieroffload.sizes import KiB, MiB

REPO = Path(__file__).parents[1]


def pattern(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class Rig:
    """A store over two paths, its scheduler and its mover."""

    def __init__(
        self, base: Path, *, timeout_s: float = 20, debug_seed: int | None = None, io_threads: int = 2, **store: Any
    ) -> None:
        self.base = base
        self.store = ExtentStore([base / "a", base / "b"], block_nbytes=16 * KiB, **store)
        lanes = [*NvmeMover.lane_specs(2, io_threads=io_threads), LaneSpec(name="update")]
        self.scheduler = Scheduler(lanes, timeout_s=timeout_s, debug_seed=debug_seed)
        self.mover = NvmeMover(self.scheduler, self.store)

    def close(self) -> None:
        try:
            self.scheduler.close()
        finally:
            self.store.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tieroffload")]


def test_arena_blocks_round_trip_over_every_path(rig: Rig) -> None:
    with PinnedArena(1 * MiB, pin=False, poison=True) as arena:
        source, target = arena.take(200_001, align_nbytes=4096), arena.take(200_001, align_nbytes=4096)
        source.memory()[:] = pattern(200_001)
        rig.store.allocate("s", 200_001)
        write = rig.mover.write("s", source.memory())
        read = rig.mover.read("s", target.memory())
        assert read.wait() is None
        assert write.done()
        assert target.memory() == source.memory()
        rows = rig.scheduler.report()
        assert all(rows[lane]["num_done"] >= 6 for lane in ("read0", "read1", "write0", "write1"))
        assert sum(rows[lane]["done_nbytes"] for lane in ("read0", "read1")) == 200_001


@pytest.mark.parametrize("nbytes", [0, 1, 16 * KiB, 16 * KiB + 1])
def test_small_and_empty_shards(rig: Rig, nbytes: int) -> None:
    rig.store.allocate("s", nbytes)
    with pytest.raises(TierIOError, match="never written"):
        rig.mover.read("s", memoryview(bytearray(nbytes)), may_fail=True).wait()
    rig.mover.write("s", memoryview(pattern(nbytes)))
    back = bytearray(nbytes)
    rig.mover.read("s", memoryview(back)).wait()
    assert back == pattern(nbytes)


def test_a_write_that_ctrl_c_cut_off_ends(rig: Rig) -> None:
    """Struck at each place where it is ordered: the next write of the shard is its only one, and is what is read."""
    rig.store.allocate("s", 60_000)
    source, target = bytearray(60_000), bytearray(60_000)

    def write(at: int) -> list[Any]:
        with Strike(at) as strike:
            rig.mover.write("s", memoryview(source))
        return strike.places

    places = write(0)
    rig.scheduler.drain()
    assert len({file for file, _, _ in places}) >= 3
    for at in range(1, len(places) + 1):
        with contextlib.suppress(KeyboardInterrupt):
            write(at)
        rig.scheduler.settle()
        source[:] = pattern(60_000, at)
        rig.mover.write("s", memoryview(source)).wait()
        rig.mover.read("s", memoryview(target)).wait()
        assert target == source


@pytest.mark.parametrize("seed", range(20))
def test_num_02_exact_for_every_timing_seed(tmp_path: Path, seed: int) -> None:
    """A hundred random transfers of eight shards without one explicit dependency: each read sees the last write."""
    rig = Rig(tmp_path, debug_seed=seed)
    rng = random.Random(seed)
    sizes = {f"s{i}": rng.randrange(1, 60_000) for i in range(8)}
    rig.store.reserve(sizes)
    last: dict[str, int] = {}
    reads: list[tuple[bytearray, str, int]] = []
    for step in range(100):
        name = rng.choice(sorted(sizes))
        if name in last and rng.random() < 0.5:
            back = bytearray(b"\xff" * sizes[name])
            ticket = rig.mover.read(name, memoryview(back), priority=rng.randrange(5), urgent=rng.random() < 0.2)
            reads.append((back, name, last[name]))
            if rng.random() < 0.3:
                ticket.wait()
        else:
            last[name] = step
            rig.mover.write(name, memoryview(pattern(sizes[name], step)), priority=rng.randrange(5))
    rig.scheduler.drain()
    for back, name, step in reads:
        assert back == pattern(sizes[name], step)
    rig.close()


@pytest.mark.parametrize("seed", range(3))
def test_num_02_exact_with_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same with real threads and calls that are held back at random."""
    rng, lock = random.Random(seed), threading.Lock()

    def slowed(real: Callable[..., int]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            with lock:
                delay_s = rng.random() * 0.002
            time.sleep(delay_s)
            return real(*args)

        return call

    rig = Rig(tmp_path)
    rig.store.reserve({f"s{i}": 40_000 for i in range(4)})
    monkeypatch.setattr(os, "preadv", slowed(os.preadv))
    monkeypatch.setattr(os, "pwritev", slowed(os.pwritev))
    reads: list[tuple[bytearray, int]] = []
    for step in range(40):
        name = f"s{step % 4}"
        rig.mover.write(name, memoryview(pattern(40_000, step)))
        back = bytearray(40_000)
        rig.mover.read(name, memoryview(back))
        reads.append((back, step))
    rig.scheduler.drain()
    assert all(back == pattern(40_000, step) for back, step in reads)
    rig.close()


def test_transfers_wait_for_what_they_come_after(rig: Rig) -> None:
    rig.store.allocate("s", 50_000)
    memory = bytearray(50_000)
    go_on = threading.Event()

    def update() -> None:
        go_on.wait(10)
        memory[:] = pattern(50_000)

    made = rig.scheduler.submit("update", update, label="update")
    write = rig.mover.write("s", memoryview(memory), after=[made])
    assert not write.done()
    go_on.set()
    back = bytearray(50_000)
    rig.mover.read("s", memoryview(back)).wait()
    assert back == pattern(50_000)


def test_read_that_fails_is_served_from_its_other_copy_and_said_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store.allocate("layers.0:master", 100_000)
    rig.mover.write("layers.0:master", memoryview(pattern(100_000))).wait()
    extent = rig.store.pieces_of("layers.0:master")[2].extent
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset_nbytes)
        file.write(b"flipped")
    back = bytearray(100_000)

    def from_dram() -> None:
        back[:] = pattern(100_000)

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            rig.mover.read("layers.0:master", memoryview(back), otherwise=from_dram).wait()
            assert back == pattern(100_000)
    assert rig.mover.served_elsewhere == {"layers.0:master": 3}
    (record,) = caplog.records
    assert "layers.0:master" in record.getMessage()
    assert "other copy" in record.getMessage()
    with pytest.raises(ChecksumError, match=r"layers\.0:master"):
        rig.mover.read("layers.0:master", memoryview(back)).wait()
    rig.scheduler.clear_pending_error()


@pytest.mark.parametrize("num_versions", [1, 2])
def test_failed_write_is_given_up_after_every_piece_has_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, num_versions: int
) -> None:
    rig.store.allocate("s", 200_000, num_versions=num_versions)
    rig.mover.write("s", memoryview(pattern(200_000, 1))).wait()
    real = os.pwritev
    num_calls = 0
    lock = threading.Lock()

    def fail_third(*args: Any) -> int:
        nonlocal num_calls
        with lock:
            num_calls += 1
            if num_calls == 3:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail_third)
        with pytest.raises(TierIOError, match="Input/output error") as info:
            rig.mover.write("s", memoryview(pattern(200_000, 2))).wait()
        with pytest.raises(TierIOError, match="Input/output error"):
            rig.scheduler.drain()  # the error came at once, the end of the other pieces later
    assert info.value.shard == "s"
    assert 3 <= num_calls <= 3 + 2 * 2  # what was queued behind it is spared; two threads a path were in a call
    rig.scheduler.clear_pending_error()
    back = bytearray(200_000)
    if num_versions == 2:
        rig.mover.read("s", memoryview(back)).wait()
        assert back == pattern(200_000, 1)
    else:
        with pytest.raises(TierIOError, match="writing it failed"):
            rig.mover.read("s", memoryview(back), may_fail=True).wait()
    rig.mover.write("s", memoryview(pattern(200_000, 3)))  # the store goes on
    rig.mover.read("s", memoryview(back)).wait()
    assert back == pattern(200_000, 3)


@pytest.mark.parametrize("verb", ["preadv", "pwritev"])
@pytest.mark.parametrize("nth", [1, 2, 3, 7, 20, 50])
def test_con_01_nth_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, nth: int) -> None:
    """Whichever system call fails, the training thread gets that error; nothing hangs or is left; a fresh one works."""
    rig = Rig(tmp_path)
    rig.store.reserve({f"s{i}": 40_000 for i in range(6)})
    real = getattr(os, verb)
    num_calls, lock = 0, threading.Lock()

    def fail(*args: Any) -> int:
        nonlocal num_calls
        with lock:
            num_calls += 1
            if num_calls == nth:
                raise OSError(errno.EIO, "made to fail")
        return real(*args)

    def steps() -> None:
        for _ in range(6):
            for i in range(6):
                rig.mover.write(f"s{i}", memoryview(bytes(40_000)))
                rig.mover.read(f"s{i}", memoryview(bytearray(40_000)))
        rig.scheduler.drain()

    monkeypatch.setattr(os, verb, fail)
    started_s = time.monotonic()
    with pytest.raises(TierIOError, match="made to fail") as info:
        steps()
    assert info.value.errno == errno.EIO
    rig.close()
    assert time.monotonic() - started_s < 5
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []
    monkeypatch.undo()
    fresh = Rig(tmp_path)
    fresh.store.allocate("s", 100)
    fresh.mover.write("s", memoryview(pattern(100))).wait()
    fresh.close()


def test_con_07_read_that_never_completes_names_shard_file_and_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, timeout_s=1.5)
    rig.store.allocate("layers.7:exp_avg_sq", 1000)
    rig.mover.write("layers.7:exp_avg_sq", memoryview(bytes(1000))).wait()
    go_on = threading.Event()

    real = os.preadv

    def never(*args: Any) -> int:
        go_on.wait(30)
        return real(*args)

    monkeypatch.setattr(os, "preadv", never)
    ticket = rig.mover.read("layers.7:exp_avg_sq", memoryview(bytearray(1000)))
    with pytest.raises(TransferTimeoutError) as info:
        ticket.wait()
    for part in ("read layers.7:exp_avg_sq", rig.store.pieces_of("layers.7:exp_avg_sq")[0].extent.path, "io_timeout_s"):
        assert part in str(info.value)
    started_s = time.monotonic()
    # Either "could not close", or, if it came to it by now, the watchdog's own error about the same read.
    with pytest.raises(TransferTimeoutError, match=r"layers\.7:exp_avg_sq"):
        rig.scheduler.close()
    assert time.monotonic() - started_s < 3
    go_on.set()
    rig.scheduler.clear_pending_error()
    rig.close()


def test_sto_06_teardown_with_transfers_pending(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store.reserve({f"s{i}": 100_000 for i in range(10)})
    tickets: list[TransferTicket[None]] = []
    for i in range(10):
        tickets.append(rig.mover.write(f"s{i}", memoryview(bytes(100_000))))
        tickets.append(rig.mover.read(f"s{i}", memoryview(bytearray(100_000))))
    rig.close()
    for ticket in tickets:
        assert ticket.done()
        assert ticket.error is None or isinstance(ticket.error, WorkCancelledError)
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []


def test_cancelled_prefetch_does_not_spoil_a_later_write(rig: Rig) -> None:
    rig.store.allocate("s", 100_000)
    rig.mover.write("s", memoryview(pattern(100_000, 1))).wait()
    go_on = threading.Event()
    hold = [rig.scheduler.submit(f"read{i % 2}", lambda: go_on.wait(10), label="hold") for i in range(4)]
    prefetch = rig.mover.read("s", memoryview(bytearray(100_000)))
    write = rig.mover.write("s", memoryview(pattern(100_000, 2)))
    assert rig.scheduler.cancel(prefetch)
    write.wait()
    go_on.set()
    back = bytearray(100_000)
    rig.mover.read("s", memoryview(back)).wait()
    assert back == pattern(100_000, 2)
    assert all(one.wait() for one in hold)


def test_expedite_puts_a_whole_shard_ahead(tmp_path: Path) -> None:
    """With one thread a lane: s7 needs both lanes, and on each it is ahead of what any other still needs there."""
    rig = Rig(tmp_path, io_threads=1)
    rig.store.reserve({f"s{i}": 200_000 for i in range(8)})
    for i in range(8):
        rig.mover.write(f"s{i}", memoryview(pattern(200_000, i)))
    rig.scheduler.drain()
    order: list[str] = []
    go_on = threading.Event()
    for i in range(2):
        rig.scheduler.submit(f"read{i}", lambda: go_on.wait(10), label="hold")
    tickets = {f"s{i}": rig.mover.read(f"s{i}", memoryview(bytearray(200_000)), priority=i) for i in range(8)}
    for name, ticket in tickets.items():
        ticket.add_done_callback(lambda _, name=name: order.append(name))
    rig.scheduler.expedite(tickets["s7"])
    go_on.set()
    rig.scheduler.drain()
    assert order == ["s7", *(f"s{i}" for i in range(7))]
    rig.close()


def test_write_budget_and_wrong_lengths(tmp_path: Path) -> None:
    rig = Rig(tmp_path, write_budget_nbytes=30_000)
    rig.store.allocate("s", 20_000)
    rig.mover.write("s", memoryview(bytes(20_000))).wait()
    for call in (rig.mover.read, rig.mover.write):
        with pytest.raises(ValueError, match="s has 20000 bytes, memory of 19999"):
            call("s", memoryview(bytearray(19_999)))
    with pytest.raises(CapacityError, match="nvme_write_budget"):
        rig.mover.write("s", memoryview(bytes(20_000))).wait()
    rig.close()


def test_forget_frees_space_only_when_nothing_moves(rig: Rig) -> None:
    rig.store.allocate("s", 50_000)
    go_on = threading.Event()
    gate = rig.scheduler.submit("update", lambda: go_on.wait(10), label="gate")
    write = rig.mover.write("s", memoryview(bytes(50_000)), after=[gate])
    with pytest.raises(TierIOError, match="under way"):
        rig.mover.forget("s")
    go_on.set()
    write.wait()
    rig.mover.forget("s")
    assert rig.store.used_nbytes == 0
    rig.store.allocate("s", 50_000)


def test_index_is_saved_beside_the_transfers(rig: Rig) -> None:
    rig.store.allocate("s", 50_000)
    rig.mover.write("s", memoryview(bytes(50_000))).wait()
    path = rig.base / "index.json"
    rig.mover.save_index(str(path)).wait()
    assert json.loads(path.read_text())["shards"]["s"]["nbytes"] == 50_000
    path.unlink()


def test_scheduler_without_the_lanes_is_refused(tmp_path: Path) -> None:
    scheduler = Scheduler([LaneSpec(name="read0")], timeout_s=5)
    with ExtentStore([tmp_path]) as store, scheduler, pytest.raises(ValueError, match="no lanes write0, files"):
        NvmeMover(scheduler, store)


def test_mem_09_threads_and_arena_stay_constant_over_many_steps(rig: Rig) -> None:
    rig.store.reserve({f"s{i}": 30_000 for i in range(4)})
    counts = set()
    with PinnedArena(256 * KiB, pin=False) as arena:
        for step in range(100):
            for i in range(4):
                block = arena.take(30_000, align_nbytes=4096)
                block.tensor(torch.uint8, (30_000,)).fill_(step)
                rig.mover.write(f"s{i}", block.memory()).add_done_callback(lambda _, block=block: block.free())
            rig.scheduler.drain()
            if step > 1:
                counts.add((threading.active_count(), arena.used_nbytes, len(os.listdir("/proc/self/fd"))))
    assert len(counts) == 1
    assert counts.pop()[1] == 0


INTERRUPTED = """
import os, random, signal, sys, time
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.scheduler import Scheduler

path, tell = sys.argv[1], None

def train():
    real = os.pwritev
    def slow(*args):
        time.sleep(0.01)
        return real(*args)
    os.pwritev = slow
    with ExtentStore([path], block_nbytes=16384) as store:
        with Scheduler(NvmeMover.lane_specs(1), timeout_s=20) as scheduler:
            mover = NvmeMover(scheduler, store)
            store.reserve({str(i): 100_000 for i in range(8)})
            memory = memoryview(bytearray(100_000))
            os.write(tell, b"up")
            while True:
                for i in range(8):
                    mover.write(str(i), memory)
                scheduler.drain()

rng = random.Random(1)
for _ in range(12):
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.stderr = open(os.devnull, "w")
        train()
    os.read(hear, 2)
    os.close(hear), os.close(tell)
    time.sleep(rng.random() * 0.08)
    started_s = time.monotonic()
    os.kill(pid, signal.SIGINT)
    ended = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(ended) in (-signal.SIGINT, 130, 1), ended
    assert time.monotonic() - started_s < 5
    assert os.listdir(path) == [], os.listdir(path)
"""


def test_con_04_interrupt_at_random_points_ends_in_order(tmp_path: Path) -> None:
    """Ctrl-C during slow writes: out within seconds, every file gone."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_version_that_ctrl_c_kept_from_ending_has_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may be the one that ends a write; a version that stays open refuses every later one."""
    rig.store.allocate("s", 100_000)
    rig.mover.write("s", memoryview(pattern(100_000, 1))).wait()
    with monkeypatch.context() as patch:
        patch.setattr(WriteVersion, "commit", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        ticket = rig.mover.write("s", memoryview(pattern(100_000, 2)))
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    rig.scheduler.clear_pending_error()
    rig.mover.write("s", memoryview(pattern(100_000, 3))).wait()
    back = bytearray(100_000)
    rig.mover.read("s", memoryview(back)).wait()
    assert back == pattern(100_000, 3)
    rig.mover.forget("s")


@pytest.mark.parametrize("verb", ["read", "write"])
def test_transfer_that_is_refused_half_way_leaves_the_memory_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Something fails while pieces are being submitted: those under way have ended when the caller hears of it."""
    rig.store.allocate("s", 100_000, num_versions=2)
    rig.mover.write("s", memoryview(pattern(100_000, 1))).wait()
    real = rig.scheduler.submit
    submitted: list[TransferTicket[Any]] = []

    def fail_fourth(*args: Any, **kwargs: Any) -> Any:
        if len(submitted) == 3:
            raise OSError("refused")
        submitted.append(real(*args, **kwargs))
        return submitted[-1]

    back = bytearray(100_000)
    with monkeypatch.context() as patch:
        patch.setattr(rig.scheduler, "submit", fail_fourth)
        move = rig.mover.read if verb == "read" else rig.mover.write
        with pytest.raises(OSError, match="refused"):
            move("s", memoryview(back))
        assert len(submitted) == 3
        assert all(ticket.done() for ticket in submitted)
    rig.mover.read("s", memoryview(back)).wait()
    assert back == pattern(100_000, 1)
    rig.mover.write("s", memoryview(pattern(100_000, 3)))
    rig.mover.read("s", memoryview(back)).wait()
    assert back == pattern(100_000, 3)


def test_what_waited_in_vain_is_served_by_nobody(rig: Rig) -> None:
    """A read behind a work that failed never had its memory: the other copy is not asked to fill it."""
    rig.store.allocate("a", 40 * KiB)
    rig.mover.write("a", memoryview(pattern(40 * KiB))).wait()
    asked: list[str] = []

    def fail() -> None:
        raise TierIOError("no room")

    room = rig.scheduler.submit("update", fail, label="make room", may_fail=True)
    memory = bytearray(40 * KiB)
    ticket = rig.mover.read("a", memoryview(memory), after=[room], otherwise=lambda: asked.append("a"), may_fail=True)
    with pytest.raises(TierIOError, match="no room"):
        ticket.wait()
    assert asked == []
    assert memory == bytearray(40 * KiB)
    assert rig.mover.served_elsewhere == {}
