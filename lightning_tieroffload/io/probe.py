"""Floor 5. What a path's disk can do: read, write and both, by block length and depth; and what the store makes of it.

Measures for seconds in a private directory that vanishes, and picks ``block_nbytes`` and ``io_threads``. Results are
kept by device in a file, where the caller names one. The bare loop (O_DIRECT calls in plain threads, nothing else) is
the yardstick for the store in the same run: disks of virtual machines drift, so figures of two runs do not compare.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
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

from lightning_tieroffload.io.direct_file import DirectFile
from lightning_tieroffload.io.endurance import device_of
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.run_directory import RunDirectory, prepare_path, reclaim_dead_runs
from lightning_tieroffload.io.scheduler import Scheduler, TransferTicket
from lightning_tieroffload.sizes import MiB, round_up

__all__ = ["PathProbe", "ProbeRow", "StoreComparison", "choose_row", "compare_store", "probe_path"]

_log = logging.getLogger(__name__)

_FORMAT = 1
_KEEP_S = 30 * 86400.0  # disks age, fill up and are exchanged
_GOOD_ENOUGH_FRAC = 0.95
_FILL_LIMIT_S = 3.0

Kind = Literal["read", "write", "mixed"]


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
    """One path's table, and the row that the engine should use."""

    path: str
    device: str | None
    filesystem: str
    mode: str
    rows: tuple[ProbeRow, ...]
    block_nbytes: int
    io_threads: int
    measured_unix_s: float
    from_file: bool = False

    @property
    def chosen(self) -> ProbeRow:
        return next(row for row in self.rows if (row.block_nbytes, row.depth) == (self.block_nbytes, self.io_threads))

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreComparison:
    """The extent store, checksums and scheduler included, beside the bare loop at the same block, depth and bytes."""

    block_nbytes: int
    depth: int
    nbytes: int
    bare_read_bytes_per_s: float
    bare_write_bytes_per_s: float
    store_read_bytes_per_s: float
    store_write_bytes_per_s: float

    @property
    def read_frac(self) -> float:
        return self.store_read_bytes_per_s / self.bare_read_bytes_per_s

    @property
    def write_frac(self) -> float:
        return self.store_write_bytes_per_s / self.bare_write_bytes_per_s

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "read_frac": self.read_frac, "write_frac": self.write_frac}


def choose_row(rows: Sequence[ProbeRow]) -> ProbeRow:
    """The fewest threads, then the shortest blocks, that reach 95 % of the best mixed rate. Pure.

    Training reads and writes at once, so the mixed rate decides; threads and staging memory are not free.
    """
    best = max(row.mixed_bytes_per_s for row in rows)
    good = [row for row in rows if row.mixed_bytes_per_s >= _GOOD_ENOUGH_FRAC * best]
    return min(good, key=lambda row: (row.depth, row.block_nbytes))


def _random_memory(nbytes: int) -> memoryview:
    """Page-aligned bytes that do not compress, so that a clever disk cannot flatter itself."""
    memory = memoryview(mmap.mmap(-1, nbytes))
    memory[:] = np.random.Generator(np.random.PCG64(nbytes)).bytes(nbytes)
    return memory


def _run_threads(num_threads: int, work: Callable[[int], int]) -> tuple[int, float]:
    """Bytes that ``work(index)`` moved in all threads together, and seconds from the common start to the last end."""
    start = threading.Barrier(num_threads + 1)
    moved_nbytes = [0] * num_threads
    ended_s = [0.0] * num_threads
    failures: list[BaseException] = []

    def body(index: int) -> None:
        start.wait()
        try:
            moved_nbytes[index] = work(index)
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


def _measure(file: DirectFile, kind: Kind, block_nbytes: int, depth: int, region_nbytes: int, cell_s: float) -> float:
    """Bytes per second of one cell of the table: every thread goes on until the time is up."""
    num_blocks = max(1, region_nbytes // block_nbytes)
    counter = itertools.count()
    memories = [_random_memory(block_nbytes) for _ in range(depth)]
    deadline_s = time.perf_counter() + cell_s

    def work(index: int) -> int:
        moved_nbytes = 0
        turn = index
        while True:
            offset = next(counter) % num_blocks * block_nbytes
            if kind == "read" or (kind == "mixed" and turn % 2 == 0):
                file.read(memories[index], offset)
            else:
                file.write(memories[index], offset)
            moved_nbytes += block_nbytes
            if depth == 1:
                turn += 1  # with one thread, a mixed load takes turns; else half of the threads read
            if time.perf_counter() >= deadline_s:
                return moved_nbytes

    moved_nbytes, elapsed_s = _run_threads(depth, work)
    return moved_nbytes / elapsed_s


def _fill(file: DirectFile, nbytes: int) -> int:
    """Write the file once, so that reads come from the disk and not from unwritten extents; bytes written in time."""
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
    return done_nbytes


def probe_path(
    path: str | os.PathLike[str],
    *,
    block_nbytes: Sequence[int] = (1 * MiB, 4 * MiB, 16 * MiB),
    depths: Sequence[int] = (1, 2, 4, 8),
    file_nbytes: int = 256 * MiB,
    cell_s: float = 0.15,
    cache_file: str | os.PathLike[str] | None = None,
    fresh: bool = False,
) -> PathProbe:
    """Measure one path (``len(block_nbytes) * len(depths) * 3 * cell_s`` seconds, and the first writing of the file).

    With ``cache_file`` an earlier result for the same device and table is taken from there unless ``fresh``, and a new
    one is written there; a file that cannot be read or written does not matter.
    """
    prepared = prepare_path(path)
    reclaim_dead_runs(prepared)
    directory = RunDirectory(prepared, rank=0)
    device = device_of(prepared)
    key = f"{device or directory.filesystem.name}:{os.stat(prepared).st_dev}:{list(block_nbytes)}:{list(depths)}"
    try:
        if cache_file is not None and not fresh:
            kept = _read_kept(Path(cache_file), key, prepared)
            if kept is not None:
                return kept
        with DirectFile(directory.add_file("data-0"), notice=directory.notice) as file:
            region_nbytes = _fill(file, round_up(max(file_nbytes, 2 * max(block_nbytes)), MiB))
            rows = []
            for block in block_nbytes:
                for depth in depths:
                    read, write, mixed = (
                        _measure(file, kind, block, depth, region_nbytes, cell_s) for kind in ("read", "write", "mixed")
                    )
                    rows.append(
                        ProbeRow(
                            block_nbytes=block,
                            depth=depth,
                            read_bytes_per_s=read,
                            write_bytes_per_s=write,
                            mixed_bytes_per_s=mixed,
                        )
                    )
            mode = file.mode
    finally:
        directory.close()
    chosen = choose_row(rows)
    probe = PathProbe(
        path=prepared,
        device=device,
        filesystem=directory.filesystem.name,
        mode=mode,
        rows=tuple(rows),
        block_nbytes=chosen.block_nbytes,
        io_threads=chosen.depth,
        measured_unix_s=time.time(),
    )
    if cache_file is not None:
        _keep(Path(cache_file), key, probe)
    return probe


def _read_kept(file: Path, key: str, path: str) -> PathProbe | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            return None
        kept = content["probes"][key]
        if not 0 <= time.time() - kept["measured_unix_s"] < _KEEP_S:
            return None
        rows = tuple(ProbeRow(**row) for row in kept["rows"])
        return PathProbe(**{**kept, "rows": rows, "path": path, "from_file": True})
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
        draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        draft.write_text(json.dumps(content), encoding="utf-8")
        os.replace(draft, file)
    except OSError as error:
        _log.debug("the probe's result was not kept in %s: %s", file, error)


def compare_store(
    path: str | os.PathLike[str],
    *,
    block_nbytes: int = 4 * MiB,
    depth: int = 4,
    nbytes: int = 256 * MiB,
    num_rounds: int = 3,
    verify_reads: bool = True,
) -> StoreComparison:
    """Write and read ``nbytes`` through the store and through the bare loop, in turns; medians of ``num_rounds``."""
    num_shards = max(1, nbytes // (8 * block_nbytes))
    shard_nbytes = round_up(nbytes // num_shards, block_nbytes)
    nbytes = num_shards * shard_nbytes
    num_blocks = nbytes // block_nbytes
    figures: dict[str, list[float]] = {"bare_read": [], "bare_write": [], "store_read": [], "store_write": []}
    shards = {f"shard {index}": shard_nbytes for index in range(num_shards)}
    # As many shards in memory as keep the lanes busy, used in turn: the store is measured and not the page allocator.
    memories = [_random_memory(shard_nbytes) for _ in range(min(num_shards, 4))]
    # The bare loop moves the same bytes from and to the same memory, so that no cache is warmer for it.
    block_memories = [
        memory[start : start + block_nbytes] for memory in memories for start in range(0, shard_nbytes, block_nbytes)
    ]
    with ExtentStore([path], block_nbytes=block_nbytes, verify_reads=verify_reads) as store:
        store.reserve(shards)
        bare = DirectFile(store._paths[0].directory.add_file("data-bare"), notice=store._paths[0].directory.notice)
        lanes = NvmeMover.lane_specs(1, io_threads=depth)
        with bare, Scheduler(lanes, timeout_s=600) as scheduler:
            mover = NvmeMover(scheduler, store)
            os.posix_fallocate(bare.fileno(), 0, nbytes)

            def run_bare(verb: Literal["read", "write"]) -> float:
                counter = itertools.count()

                def work(_: int) -> int:
                    moved_nbytes = 0
                    while (block := next(counter)) < num_blocks:
                        call = os.preadv if verb == "read" else os.pwritev
                        memory = block_memories[block % len(block_memories)]
                        moved_nbytes += call(bare.fileno(), [memory], block * block_nbytes)
                    return moved_nbytes

                moved_nbytes, elapsed_s = _run_threads(depth, work)
                if moved_nbytes != nbytes:
                    raise RuntimeError(f"the bare loop moved {moved_nbytes} of {nbytes} bytes")
                return nbytes / elapsed_s

            def run_store(verb: Literal["read", "write"]) -> float:
                move = mover.read if verb == "read" else mover.write
                tickets: list[TransferTicket[None]] = []
                started_s = time.perf_counter()
                for index, name in enumerate(shards):
                    # Wait for the shard that had this memory before, as an engine with staging blocks does.
                    if index >= len(memories):
                        tickets[index - len(memories)].wait()
                    tickets.append(move(name, memories[index % len(memories)]))
                scheduler.drain()
                return nbytes / (time.perf_counter() - started_s)

            run_bare("write")  # first writes into unwritten extents are slower: not counted for either
            run_store("write")
            for _ in range(num_rounds):
                for verb in ("write", "read"):
                    figures[f"bare_{verb}"].append(run_bare(verb))
                    figures[f"store_{verb}"].append(run_store(verb))
    medians = {f"{name}_bytes_per_s": statistics.median(values) for name, values in figures.items()}
    return StoreComparison(block_nbytes=block_nbytes, depth=depth, nbytes=nbytes, **medians)
