"""Faults of disks in combination: whatever fails, a read gives the very bytes that were written, or a named error."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_disk import FaultyDisk

from lightning_tieroffload.errors import CapacityError, ChecksumError, TierIOError, TransferTimeoutError
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.scheduler import Scheduler
from lightning_tieroffload.sizes import KiB

BLOCK_NBYTES = 16 * KiB


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    fds = len(os.listdir("/proc/self/fd"))
    yield
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []
    assert [one.name for one in threading.enumerate() if one.name.startswith("tieroffload")] == []
    assert len(os.listdir("/proc/self/fd")) <= fds


class Model:
    """What each shard must read as: the bytes of its last committed version, or None where there is no valid one."""

    def __init__(self, store: ExtentStore, mover: NvmeMover, scheduler: Scheduler, rng: random.Random) -> None:
        self.store, self.mover, self.scheduler, self.rng = store, mover, scheduler, rng
        self.bytes_by_name: dict[str, bytes | None] = {}
        self.num_versions: dict[str, int] = {}
        for index in range(6):
            name = f"layers.{index}:exp_avg"
            self.num_versions[name] = 1 + index % 2
            store.allocate(name, rng.randrange(1, 8 * BLOCK_NBYTES), num_versions=self.num_versions[name])
            self.bytes_by_name[name] = None

    def write(self, name: str) -> None:
        new = self.rng.randbytes(self.store.nbytes_of(name))
        ticket = self.mover.write(name, memoryview(new), may_fail=True)
        try:
            ticket.wait()
        except TierIOError as error:
            assert error.shard == name
            assert name in str(error)
            if self.num_versions[name] == 1:
                self.bytes_by_name[name] = None
        else:
            self.bytes_by_name[name] = new

    def read(self, name: str) -> bool:
        """Whether it was served. Bytes are the model's, or it raised and said which shard."""
        expected = self.bytes_by_name[name]
        memory = bytearray(self.store.nbytes_of(name))
        try:
            self.mover.read(name, memoryview(memory), may_fail=True).wait()
        except TierIOError as error:
            assert error.shard == name
            assert name in str(error)
            return False
        assert memory == expected
        return True

    def read_or_other_copy(self, name: str) -> None:
        expected = self.bytes_by_name[name]
        if expected is None:
            return
        memory = bytearray(len(expected))

        def from_other_copy() -> None:
            memory[:] = expected

        self.mover.read(name, memoryview(memory), otherwise=from_other_copy).wait()
        assert memory == expected


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_faults_never_gives_a_wrong_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two paths, striped, seeded faults of every kind at once; then the disk heals, and every shard works again."""
    rng = random.Random(seed)
    kinds = ["eio", "enospc", "short", "interrupted", "again", "flip"]
    rates = {kind: rng.choice([0.0, 0.02, 0.1]) for kind in kinds}
    with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store:
        only = "data-" if seed % 3 else f"{tmp_path}/a/"  # every third: one path is healthy
        disk = FaultyDisk(monkeypatch, seed=seed, rates=rates, only=only, slow_s=0.0005 * (seed % 2))
        with Scheduler(NvmeMover.lane_specs(2, io_threads=3), timeout_s=20) as scheduler:
            model = Model(store, NvmeMover(scheduler, store), scheduler, rng)
            names = list(model.bytes_by_name)
            for _ in range(80):
                rng.choice([model.write, model.read, model.read_or_other_copy])(rng.choice(names))
            assert disk.injected
            disk.heal()
            for name in names:
                model.write(name)
                assert model.bytes_by_name[name] is not None
            for name in names:
                assert model.read(name)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_system_call_may_always_do_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Short transfers at odd places, EINTR and EAGAIN: every write and every read goes well, exactly."""
    rng = random.Random(seed)
    with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store:
        disk = FaultyDisk(monkeypatch, seed=seed, rates={"short": 0.3, "interrupted": 0.1, "again": 0.1})
        with Scheduler(NvmeMover.lane_specs(2, io_threads=3), timeout_s=20) as scheduler:
            model = Model(store, NvmeMover(scheduler, store), scheduler, rng)
            for _ in range(3):
                for name in model.bytes_by_name:
                    model.write(name)
                    assert model.bytes_by_name[name] is not None
                    assert model.read(name)
        assert min(disk.injected[kind] for kind in ("short", "interrupted", "again")) > 0


@pytest.mark.parametrize("seed", range(4))
def test_faults_under_transfers_that_nobody_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Many transfers in flight, in the seeded order of the debug mode and in threads: the first error stops the run."""
    rng = random.Random(seed)
    memories = [memoryview(bytearray(rng.randbytes(5 * BLOCK_NBYTES))) for _ in range(8)]
    started_s = time.monotonic()
    with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store:
        store.reserve({f"s{index}": 5 * BLOCK_NBYTES for index in range(8)})
        disk = FaultyDisk(monkeypatch, seed=seed, rates={"eio": 0.03, "short": 0.1})
        scheduler = Scheduler(
            NvmeMover.lane_specs(2, io_threads=2), timeout_s=20, debug_seed=seed if seed % 2 else None
        )

        def steps() -> None:
            mover = NvmeMover(scheduler, store)
            for _ in range(200):
                for index, memory in enumerate(memories):
                    is_new = store.version_of(f"s{index}") is None
                    (mover.write if is_new or rng.random() < 0.6 else mover.read)(f"s{index}", memory)
                scheduler.drain()

        with scheduler, pytest.raises(TierIOError, match=r"\(s\d\) failed: Input/output error"):
            steps()
        assert disk.injected["eio"] >= 1
    assert time.monotonic() - started_s < 5 + 10  # the works before the fault, and then at once


@pytest.mark.alone
def test_a_slow_path_does_not_hold_back_the_error_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path a takes 0.3 s a call and has 40 queued, path b fails: the error is there at once, a is spared the rest."""
    with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store:
        store.allocate("layers.0:master", 80 * BLOCK_NBYTES)
        num_slow = 0

        def on_call(verb: str, num: int, path: str) -> None:
            nonlocal num_slow
            if path.startswith(f"{tmp_path}/b/"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            num_slow += 1
            time.sleep(0.3)

        disk = FaultyDisk(monkeypatch, on_call=on_call)
        with Scheduler(NvmeMover.lane_specs(2, io_threads=1), timeout_s=20) as scheduler:
            mover = NvmeMover(scheduler, store)
            memory = memoryview(bytearray(80 * BLOCK_NBYTES))
            started_s = time.monotonic()
            with pytest.raises(TierIOError, match=r"/b/.*layers\.0:master.*Input/output error"):
                mover.write("layers.0:master", memory).wait()
            assert time.monotonic() - started_s < 0.25
            with pytest.raises(TierIOError, match="Input/output error"):
                scheduler.drain()
            assert time.monotonic() - started_s < 2
            assert num_slow <= 2
            scheduler.clear_pending_error()
            disk.heal()
            mover.write("layers.0:master", memory).wait()
            mover.read("layers.0:master", memory).wait()


def test_the_other_copy_serves_before_a_slow_path_has_read_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing piece spares the slow path, busy with somebody else's read, one whose bytes are elsewhere anyhow."""
    content = random.Random(3).randbytes(20 * BLOCK_NBYTES)
    with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store:
        for name in ("other", "s"):
            store.allocate(name, len(content))
            store.write(name, memoryview(content))
        flipped = next(piece.extent for piece in store.pieces_of("s") if piece.extent.path.startswith(f"{tmp_path}/b/"))
        with open(flipped.path, "r+b") as file:
            file.seek(flipped.offset_nbytes)
            file.write(b"flipped")
        disk = FaultyDisk(monkeypatch, only=f"{tmp_path}/a/", slow_s=0.2)
        with Scheduler(NvmeMover.lane_specs(2, io_threads=1), timeout_s=20) as scheduler:
            mover = NvmeMover(scheduler, store)
            slow_memory, memory = bytearray(len(content)), bytearray(len(content))
            slow = mover.read("other", memoryview(slow_memory))

            def from_other_copy() -> None:
                memory[:] = content

            mover.read("s", memoryview(memory), otherwise=from_other_copy).wait()
            assert memory == content
            assert not slow.done()
            assert mover.served_elsewhere == {"s": 1}
            disk.heal()
            slow.wait()
            assert slow_memory == content


def test_one_error_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen and cleared while the other pieces still run, it does not come back when the transfer ends."""
    with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store:
        store.allocate("s", 10 * BLOCK_NBYTES)

        def on_call(verb: str, num: int, path: str) -> None:
            if num == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            time.sleep(0.2)

        FaultyDisk(monkeypatch, on_call=on_call)
        with Scheduler(NvmeMover.lane_specs(2, io_threads=1), timeout_s=20) as scheduler:
            ticket = NvmeMover(scheduler, store).write("s", memoryview(bytes(10 * BLOCK_NBYTES)))
            with pytest.raises(TierIOError):
                ticket.wait()
            assert not ticket.done()
            error = scheduler.clear_pending_error()
            scheduler.drain()
            assert ticket.error is error


def test_a_path_that_hangs_is_told_from_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path a never answers, b works: the time-out names the piece on a, and closing does not hang."""
    go_on = threading.Event()
    store = ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES)
    store.allocate("s", 4 * BLOCK_NBYTES)
    FaultyDisk(monkeypatch, on_call=lambda *_: go_on.wait(30) and None, only=f"{tmp_path}/a/")
    scheduler = Scheduler(NvmeMover.lane_specs(2, io_threads=1), timeout_s=1)
    ticket = NvmeMover(scheduler, store).write("s", memoryview(bytes(4 * BLOCK_NBYTES)))
    with pytest.raises(TransferTimeoutError, match=r"s"):
        ticket.wait()
    started_s = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="/a/"):
        scheduler.close()
    assert time.monotonic() - started_s < 3
    go_on.set()
    scheduler.clear_pending_error()
    scheduler.close()
    store.close()


@pytest.mark.parametrize("what", ["file", "directory"])
def test_what_is_removed_under_us_is_no_loss(tmp_path: Path, what: str) -> None:
    """Somebody cleans the path while the run uses it: open files stay whole, and growing them works."""
    with (
        ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store,
        Scheduler(NvmeMover.lane_specs(2, io_threads=2), timeout_s=20) as scheduler,
    ):
        mover = NvmeMover(scheduler, store)
        content = random.Random(1).randbytes(3 * BLOCK_NBYTES + 77)
        for index in range(3):
            store.allocate(f"s{index}", len(content))
            mover.write(f"s{index}", memoryview(content)).wait()
            if index == 0 and what == "file":
                os.unlink(os.path.join(store.directories[1], "data-0"))
            if index == 0 and what == "directory":
                shutil.rmtree(store.directories[1])
        for index in range(3):
            memory = bytearray(len(content))
            mover.read(f"s{index}", memoryview(memory)).wait()
            assert memory == content


def test_truncated_by_others_is_an_error_that_says_so(tmp_path: Path) -> None:
    with ExtentStore([tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES) as store:
        store.allocate("s", 10 * BLOCK_NBYTES)
        store.write("s", memoryview(bytes(10 * BLOCK_NBYTES)))
        os.truncate(os.path.join(store.directories[0], "data-0"), BLOCK_NBYTES)
        with (
            Scheduler(NvmeMover.lane_specs(2, io_threads=2), timeout_s=20) as scheduler,
            pytest.raises(TierIOError, match=r"\(s\).*shorter than what was written"),
        ):
            NvmeMover(scheduler, store).read("s", memoryview(bytearray(10 * BLOCK_NBYTES))).wait()


# --- the budget of writes ---------------------------------------------------------------------------------------------


def test_write_budget_is_never_passed_however_many_write(tmp_path: Path) -> None:
    """Transfers race for the rest of nvme_write_budget: what fits is written, others are refused and stay whole."""
    nbytes = 3 * BLOCK_NBYTES + 5
    padded_nbytes = 3 * BLOCK_NBYTES + 4 * KiB
    budget_nbytes = 8 * padded_nbytes + 5 * padded_nbytes + 100
    with (
        ExtentStore(
            [tmp_path / "a", tmp_path / "b"], block_nbytes=BLOCK_NBYTES, write_budget_nbytes=budget_nbytes
        ) as store,
        Scheduler(NvmeMover.lane_specs(2, io_threads=4), timeout_s=20) as scheduler,
    ):
        assert store.write_budget_left_nbytes == budget_nbytes
        mover = NvmeMover(scheduler, store)
        before = [bytes([index]) * nbytes for index in range(8)]
        for index, content in enumerate(before):
            store.allocate(f"s{index}", nbytes)
            mover.write(f"s{index}", memoryview(content))
        scheduler.drain()
        after = [bytes([100 + index]) * nbytes for index in range(8)]
        tickets = [mover.write(f"s{index}", memoryview(content), may_fail=True) for index, content in enumerate(after)]
        scheduler.drain()
        refused = [index for index, ticket in enumerate(tickets) if ticket.error is not None]
        assert len(refused) == 3
        for index, ticket in enumerate(tickets):
            if index in refused:
                assert isinstance(ticket.error, CapacityError)
                assert "nvme_write_budget" in str(ticket.error)
            memory = bytearray(nbytes)
            mover.read(
                f"s{index}", memoryview(memory)
            ).wait()  # a refused one is untouched: its one version still valid
            assert memory == (before if index in refused else after)[index]
        assert sum(store.written_nbytes_by_path.values()) == 13 * padded_nbytes <= budget_nbytes
        assert store.write_budget_left_nbytes == 100


def test_write_budget_stops_the_run_with_its_name(tmp_path: Path) -> None:
    """Asked for by nobody in particular, the refusal is the run's error, at the next thing it asks of the scheduler."""
    with ExtentStore([tmp_path], write_budget_nbytes=6 * KiB) as store:
        store.allocate("s", 4 * KiB)
        with Scheduler(NvmeMover.lane_specs(1), timeout_s=20) as scheduler:
            mover = NvmeMover(scheduler, store)
            mover.write("s", memoryview(bytes(4 * KiB))).wait()
            refused = mover.write("s", memoryview(bytes(4 * KiB)))
            while not refused.done():
                time.sleep(0.001)
            with pytest.raises(CapacityError, match=r"s: .*nvme_write_budget.*Raise nvme_write_budget"):
                mover.read("s", memoryview(bytearray(4 * KiB)))
        assert sum(store.written_nbytes_by_path.values()) == 4 * KiB


def test_failed_writes_count_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive may have taken them: a budget of writes is not handed out twice for one that failed half-way."""
    with ExtentStore([tmp_path], block_nbytes=4 * KiB, write_budget_nbytes=24 * KiB) as store:
        store.allocate("s", 16 * KiB)
        disk = FaultyDisk(monkeypatch, rates={"eio": 1.0})
        with pytest.raises(TierIOError):
            store.write("s", memoryview(bytes(16 * KiB)))
        disk.heal()
        assert store.write_budget_left_nbytes == 8 * KiB
        with pytest.raises(CapacityError, match="nvme_write_budget"):
            store.write("s", memoryview(bytes(16 * KiB)))


def test_a_byte_that_changes_on_the_way_once_is_read_again_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the file is right: the second read gives it, one warning says that there was a first."""
    with ExtentStore([tmp_path], block_nbytes=BLOCK_NBYTES) as store:
        store.allocate("s", 2 * BLOCK_NBYTES)
        content = random.Random(5).randbytes(2 * BLOCK_NBYTES)
        store.write("s", memoryview(content))
        disk = FaultyDisk(monkeypatch, rates={"flip": 1.0}, verbs=("read",), only="data-0")
        disk.on_call = lambda verb, num, path: disk.rates.clear() if num == 1 else None
        memory = bytearray(len(content))
        store.read("s", memoryview(memory))
        assert memory == content
        assert disk.num_calls["read"] == 3
        (record,) = caplog.records
        assert "s: 16 KiB read from offset 0" in record.getMessage()
        assert "check cable" in record.getMessage()


def test_a_flip_on_the_way_in_and_one_in_the_file_are_both_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExtentStore([tmp_path], block_nbytes=BLOCK_NBYTES) as store:
        store.allocate("s", 2 * BLOCK_NBYTES + 9)
        content = random.Random(5).randbytes(2 * BLOCK_NBYTES + 9)
        memory = bytearray(len(content))
        for verb in ("read", "write"):
            with monkeypatch.context() as patch:
                disk = FaultyDisk(patch, seed=4, rates={"flip": 1.0}, verbs=(verb,), only="data-0")
                store.write("s", memoryview(content))
                # Only flips of the shard's own bytes count; its last page is padded.
                with pytest.raises(ChecksumError, match="s: "):
                    store.read("s", memoryview(memory))
                assert disk.injected["flip"] >= 1
        store.write("s", memoryview(content))
        store.read("s", memoryview(memory))
        assert memory == content
