"""Floor 5. What a path's disk can do: read, write and both, by block length and depth; and what the store makes of it.

Measures for seconds in a private directory that vanishes, and picks ``block_nbytes`` and ``io_threads``. Results are
kept by device in a file, where the caller names one. The bare loop (O_DIRECT calls in plain threads, nothing else) is
the yardstick for the store in the same run: disks of virtual machines drift, so figures of two runs do not compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import math
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_tieroffload.errors import TierIOError, TierOffloadError
from lightning_tieroffload.io.checksum import CHECKSUM_NAME
from lightning_tieroffload.io.direct_file import DirectFile, filesystem_of
from lightning_tieroffload.io.endurance import device_of
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.run_directory import RunDirectory, prepare_path, reclaim_dead_runs
from lightning_tieroffload.io.scheduler import Scheduler, TransferTicket
from lightning_tieroffload.sizes import MiB, round_up
from lightning_tieroffload.whole_file import write_whole

__all__ = [
    "BLOCKS_NBYTES",
    "DEPTHS",
    "PathProbe",
    "ProbeRow",
    "StoreComparison",
    "choose_row",
    "compare_store",
    "kept_probes_file",
    "probe_path",
    "probe_settings",
    "threads_for",
]

_log = logging.getLogger(__name__)

_FORMAT = 2
_KEEP_S = 30 * 86400.0  # disks age, fill up and are exchanged
_GOOD_ENOUGH_FRAC = 0.95
_FILL_LIMIT_S = 3.0
_THREADS_BESIDE_CALLS = 4
BLOCKS_NBYTES = (1 * MiB, 4 * MiB, 16 * MiB)
DEPTHS = (1, 2, 4, 8)

Kind = Literal["read", "write", "mixed"]
_KINDS: tuple[Kind, ...] = ("write", "read", "mixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRow:
    """Bytes per second at one block length with ``depth`` calls under way. ``mixed``: reads and writes, summed."""

    block_nbytes: int
    depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PathProbe:
    """One path's table, and what the engine should use: the chosen row's block, and threads that keep its depth.

    ``rows`` are a bare loop's rates, ``store_rows`` (where asked for) the extent store's, measured next to each other.
    """

    path: str
    device: str | None
    filesystem: str
    mode: str
    rows: tuple[ProbeRow, ...]
    store_rows: tuple[ProbeRow, ...]
    block_nbytes: int
    depth: int
    io_threads: int
    measured_unix_s: float
    from_file: bool = False

    @property
    def chosen(self) -> ProbeRow:
        return next(row for row in self.rows if (row.block_nbytes, row.depth) == (self.block_nbytes, self.depth))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreComparison:
    """The extent store, checksums and scheduler included, beside a bare loop: same run, block, threads and bytes.

    Medians of runs in turns.
    """

    block_nbytes: int
    io_threads: int
    nbytes: int
    num_rounds: int
    checksum: str | None
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_bytes_per_s: float
    bare_read_bytes_per_s: float
    bare_write_bytes_per_s: float
    bare_mixed_bytes_per_s: float

    @property
    def read_frac(self) -> float:
        return self.read_bytes_per_s / self.bare_read_bytes_per_s

    @property
    def write_frac(self) -> float:
        return self.write_bytes_per_s / self.bare_write_bytes_per_s

    @property
    def mixed_frac(self) -> float:
        return self.mixed_bytes_per_s / self.bare_mixed_bytes_per_s

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "read_frac": self.read_frac,
            "write_frac": self.write_frac,
            "mixed_frac": self.mixed_frac,
        }


def choose_row(rows: Sequence[ProbeRow]) -> ProbeRow:
    """The fewest threads, then the shortest blocks, that reach 95 % of the best mixed rate. Pure.

    Training reads and writes at once, so the mixed rate decides; threads and staging memory are not free.
    """
    best = max(row.mixed_bytes_per_s for row in rows)
    good = [row for row in rows if row.mixed_bytes_per_s >= _GOOD_ENOUGH_FRAC * best]
    return min(good, key=lambda row: (row.depth, row.block_nbytes))


def threads_for(depth: int) -> int:
    """Threads of a lane that keep ``depth`` calls to the disk under way. Pure.

    A lane's thread is in a system call for most of its time and not for all of it: it hashes, and it waits for the
    interpreter. Measured on two cores against a bare loop: 0.78-0.96 with ``depth`` threads, 0.93-1.0 with four more.
    """
    return depth + _THREADS_BESIDE_CALLS


def _random_memory(nbytes: int) -> memoryview:
    """Page-aligned bytes, in huge pages as an arena's; they do not compress, so that no clever disk flatters itself."""
    mapping = mmap.mmap(-1, nbytes)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):  # no transparent huge pages in this kernel
        pass
    memory = memoryview(mapping)
    memory[:] = np.random.Generator(np.random.PCG64(nbytes)).bytes(nbytes)
    return memory


def _run_threads(num_threads: int, work: Callable[[], int]) -> tuple[int, float]:
    """Bytes that ``work()`` moved in all threads together, and seconds from the common start to the last end."""
    start = threading.Barrier(num_threads + 1)
    moved_nbytes = [0] * num_threads
    ended_s = [0.0] * num_threads
    failures: list[BaseException] = []

    def body(index: int) -> None:
        start.wait()
        try:
            moved_nbytes[index] = work()
        except BaseException as error:  # raised in the caller's thread below
            failures.append(error)
        ended_s[index] = time.perf_counter()

    threads = [
        threading.Thread(target=body, args=(index,), name=f"tieroffload-probe-{index}", daemon=True)
        for index in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    start.wait()
    started_s = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(moved_nbytes), max(ended_s) - started_s


class _Turns:
    """Hands out 0, 1, 2, ... to any number of threads, so many of them or until a moment, then None."""

    def __init__(self, num_turns: int | None = None, duration_s: float = math.inf) -> None:
        self._counter = itertools.count()
        self._num_turns = num_turns
        self._deadline_s = time.perf_counter() + duration_s

    def take(self) -> int | None:
        # At least one, however slow the start was: a rate needs something that was moved.
        turn = next(self._counter)
        if turn and (time.perf_counter() >= self._deadline_s or (self._num_turns or math.inf) <= turn):
            return None
        return turn


def _verb(kind: Kind, turn: int) -> Literal["read", "write"]:
    return kind if kind != "mixed" else ("read", "write")[turn % 2]


def _run_bare(file: DirectFile, kind: Kind, memories: Sequence[memoryview], num_threads: int, turns: _Turns) -> float:
    """Bytes per second of plain threads that read or write block after block of ``file``, and do nothing else."""
    block_nbytes = len(memories[0])
    num_blocks = max(1, os.fstat(file.fileno()).st_size // block_nbytes)

    def work() -> int:
        done_nbytes = 0
        while (turn := turns.take()) is not None:
            memory, offset = memories[turn % len(memories)], turn % num_blocks * block_nbytes
            verb = _verb(kind, turn)
            if file.mode == "buffered":  # bare calls would measure the page cache
                getattr(file, verb)(memory, offset)
            elif (
                moved := (os.preadv if verb == "read" else os.pwritev)(file.fileno(), [memory], offset)
            ) != block_nbytes:
                raise TierIOError(f"{file.path}: a bare {verb} moved {moved} of {block_nbytes} bytes", path=file.path)
            done_nbytes += block_nbytes
        return done_nbytes

    moved_nbytes, elapsed_s = _run_threads(num_threads, work)
    return moved_nbytes / elapsed_s


class _StoreRig:
    """A store with shards that are written already, and the memory that is moved: for the rates of one block length."""

    def __init__(self, path: str | os.PathLike[str], block_nbytes: int, nbytes: int, verify_reads: bool) -> None:
        # Eight blocks a shard, and four shards' memory used in turn, keep the lanes busy.
        num_shards = max(2, nbytes // (8 * block_nbytes))
        shard_nbytes = round_up(max(block_nbytes, nbytes // num_shards), block_nbytes)
        self.nbytes = num_shards * shard_nbytes
        self.names = [f"shard {index}" for index in range(num_shards)]
        self.memories = [_random_memory(shard_nbytes) for _ in range(min(num_shards, 4))]
        self.block_memories = [
            memory[start : start + block_nbytes]
            for memory in self.memories
            for start in range(0, shard_nbytes, block_nbytes)
        ]
        self.store = ExtentStore([path], block_nbytes=block_nbytes, verify_reads=verify_reads)
        try:
            self.store.reserve(dict.fromkeys(self.names, shard_nbytes))
            for index, name in enumerate(self.names):  # first writes into unwritten extents are slower: not counted
                self.store.write(name, self.memories[index % len(self.memories)])
        except BaseException:
            self.store.close()
            raise

    def __enter__(self) -> _StoreRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def run(self, kind: Kind, num_threads: int, turns: _Turns) -> float:
        """Bytes per second of whole shards through lanes of ``num_threads``; of "mixed", half of them each way."""
        lane_threads = -(-num_threads // 2) if kind == "mixed" else num_threads
        with Scheduler(NvmeMover.lane_specs(1, io_threads=lane_threads), timeout_s=600) as scheduler:
            scheduler.start()
            mover = NvmeMover(scheduler, self.store)
            tickets: list[TransferTicket[None]] = []
            started_s = time.perf_counter()
            while (turn := turns.take()) is not None:
                # Wait for the shard that had this memory before, as an engine with staging blocks does.
                if turn >= len(self.memories):
                    tickets[turn - len(self.memories)].wait()
                move = mover.read if _verb(kind, turn) == "read" else mover.write
                tickets.append(move(self.names[turn % len(self.names)], self.memories[turn % len(self.memories)]))
            scheduler.drain()
            return len(tickets) * len(self.memories[0]) / (time.perf_counter() - started_s)


def _row(block_nbytes: int, depth: int, rates: dict[Kind, float]) -> ProbeRow:
    return ProbeRow(
        block_nbytes=block_nbytes,
        depth=depth,
        read_bytes_per_s=rates["read"],
        write_bytes_per_s=rates["write"],
        mixed_bytes_per_s=rates["mixed"],
    )


def _fill(file: DirectFile, nbytes: int) -> None:
    """Write the file once, so that reads come from the disk and not from unwritten extents; so much as time allows."""
    memory = _random_memory(16 * MiB)
    os.posix_fallocate(file.fileno(), 0, nbytes)
    deadline_s = time.perf_counter() + _FILL_LIMIT_S
    done_nbytes = 0
    while done_nbytes < nbytes:
        part_nbytes = min(len(memory), nbytes - done_nbytes)
        file.write(memory[:part_nbytes], done_nbytes)
        done_nbytes += part_nbytes
        if time.perf_counter() > deadline_s and done_nbytes >= 64 * MiB:
            break
    file.truncate(done_nbytes)


def _measure_block(
    file: DirectFile, block_nbytes: int, depths: Sequence[int], cell_s: float, store_path: str | None
) -> tuple[list[ProbeRow], list[ProbeRow]]:
    """The rows of one block length: the bare loop's, and next to each the store's if it has a path."""
    rows, store_rows = [], []
    with contextlib.ExitStack() as stack:
        rig = None
        if store_path is not None:
            rig = stack.enter_context(_StoreRig(store_path, block_nbytes, os.fstat(file.fileno()).st_size, True))
        memories = [_random_memory(block_nbytes) for _ in range(max(depths))] if rig is None else rig.block_memories
        for depth in depths:
            rates, store_rates = {}, {}
            for kind in _KINDS:
                rates[kind] = _run_bare(file, kind, memories, depth, _Turns(duration_s=cell_s))
                if rig is not None:
                    store_rates[kind] = rig.run(kind, depth, _Turns(duration_s=cell_s))
            rows.append(_row(block_nbytes, depth, rates))
            if rig is not None:
                store_rows.append(_row(block_nbytes, depth, store_rates))
    return rows, store_rows


def probe_path(
    path: str | os.PathLike[str],
    *,
    block_nbytes: Sequence[int] = BLOCKS_NBYTES,
    depths: Sequence[int] = DEPTHS,
    file_nbytes: int = 256 * MiB,
    cell_s: float = 0.15,
    cache_file: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    with_store: bool = False,
) -> PathProbe:
    """Measure one path (``len(block_nbytes) * len(depths) * 3 * cell_s`` seconds, and the first writing of the file).

    ``with_store`` has the store measured beside each cell, for as long again; that is for people, and is not kept.
    With ``cache_file`` an earlier result for the same device and table is taken from there unless ``fresh``, and a new
    one is written there; a file that cannot be read or written does not matter.
    """
    prepared = prepare_path(path)
    key = _key(prepared, block_nbytes, depths)
    if cache_file is not None and not fresh:
        kept = _read_kept(Path(cache_file), key, prepared)
        if kept is not None:
            return kept
    reclaim_dead_runs(prepared)
    directory = RunDirectory(prepared, rank=0)
    try:
        with DirectFile(directory.add_file("data-0"), notice=directory.notice) as file:
            _fill(file, round_up(max(file_nbytes, 2 * max(block_nbytes)), MiB))
            rows: list[ProbeRow] = []
            store_rows: list[ProbeRow] = []
            for block in block_nbytes:
                found, found_of_store = _measure_block(file, block, depths, cell_s, prepared if with_store else None)
                rows.extend(found)
                store_rows.extend(found_of_store)
            mode = file.mode
    finally:
        directory.close()
    chosen = choose_row(rows)
    probe = PathProbe(
        path=prepared,
        device=device_of(prepared),
        filesystem=directory.filesystem.name,
        mode=mode,
        rows=tuple(rows),
        store_rows=tuple(store_rows),
        block_nbytes=chosen.block_nbytes,
        depth=chosen.depth,
        io_threads=threads_for(chosen.depth),
        measured_unix_s=time.time(),
    )
    if cache_file is not None:
        _keep(Path(cache_file), key, dataclasses.replace(probe, store_rows=()))
    return probe


def kept_probes_file() -> Path | None:
    """Where probes of this user's machine are kept; None where there is no home directory."""
    try:
        return Path("~/.cache/lightning_tieroffload/io_probes.json").expanduser()
    except RuntimeError:
        return None


def probe_settings(paths: Sequence[str | os.PathLike[str]], *, may_measure: bool) -> tuple[int, int] | None:
    """Block length and threads that suit all of ``paths``, from kept probes; None where one is not known.

    With ``may_measure`` what is not known is measured now, which takes seconds and writes some GiB, and kept.
    """
    file = kept_probes_file()
    probes = []
    for path in paths:
        try:
            prepared = prepare_path(path)
            kept = None if file is None else _read_kept(file, _key(prepared, BLOCKS_NBYTES, DEPTHS), prepared)
            if kept is None and may_measure:
                kept = probe_path(prepared, cache_file=file, cell_s=0.1)
        except (TierOffloadError, OSError) as error:  # a full disk, say: whoever uses the path says it better
            _log.debug("%s was not probed: %s", path, error)
            return None
        if kept is None:
            return None
        probes.append(kept)
    return max(probe.block_nbytes for probe in probes), max(probe.io_threads for probe in probes)


def _key(path: str, block_nbytes: Sequence[int], depths: Sequence[int]) -> str:
    disk = device_of(path) or filesystem_of(path).name
    return f"{disk}:{os.stat(path).st_dev}:{list(block_nbytes)}:{list(depths)}"


def _read_kept(file: Path, key: str, path: str) -> PathProbe | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return None
        kept = content["probes"][key]
        if not 0 <= time.time() - kept["measured_unix_s"] < _KEEP_S:
            return None
        rows = tuple(ProbeRow(**row) for row in kept["rows"])
        return PathProbe(**{**kept, "rows": rows, "store_rows": (), "path": path, "from_file": True})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(file: Path, key: str, probe: PathProbe) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content["probes"], dict) or content["format"] != _FORMAT:
            raise KeyError("probes")
    except (OSError, ValueError, KeyError, TypeError):
        content = {"format": _FORMAT, "probes": {}}
    content["probes"][key] = probe.to_json()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content))
    except OSError as error:
        _log.debug("the probe's result was not kept in %s: %s", file, error)


def compare_store(
    path: str | os.PathLike[str],
    *,
    block_nbytes: int = 4 * MiB,
    io_threads: int = 8,
    nbytes: int = 256 * MiB,
    num_rounds: int = 3,
    verify_reads: bool = True,
) -> StoreComparison:
    """Move ``nbytes`` through the store and through the bare loop, in turns, each way and both; medians of the rounds.

    Both have ``io_threads`` threads and the same memory.
    """
    prepared = prepare_path(path)
    directory = RunDirectory(prepared, rank=0)
    try:
        with (
            _StoreRig(prepared, block_nbytes, nbytes, verify_reads) as rig,
            DirectFile(directory.add_file("data-bare"), notice=directory.notice) as bare,
        ):
            _fill(bare, rig.nbytes)
            figures: dict[str, list[float]] = {}
            for _, kind in itertools.product(range(num_rounds), _KINDS):
                num_blocks = rig.nbytes // rig.store.block_nbytes
                bare_rate = _run_bare(bare, kind, rig.block_memories, io_threads, _Turns(num_blocks))
                figures.setdefault(f"bare_{kind}", []).append(bare_rate)
                figures.setdefault(kind, []).append(rig.run(kind, io_threads, _Turns(len(rig.names))))
    finally:
        directory.close()
    return StoreComparison(
        block_nbytes=block_nbytes,
        io_threads=io_threads,
        nbytes=rig.nbytes,
        num_rounds=num_rounds,
        checksum=CHECKSUM_NAME if verify_reads else None,
        **{f"{name}_bytes_per_s": statistics.median(rates) for name, rates in figures.items()},
    )
