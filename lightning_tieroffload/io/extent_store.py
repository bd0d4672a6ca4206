"""Floor 3. The extent store: shards on flash, in preallocated files, checksummed, striped, versioned.

Owns the run directories, the data files, the space in them and the index (which shard lies in which extents, which
version is valid, which checksum it has). Does not schedule: calls block in the thread that makes them, and
`io/nvme_mover.py` puts them on lanes.

[Note: versions] A shard has one or two places. With two, a write goes to the place that is not current, and `commit`
makes it current: a failed or abandoned write leaves the old version valid, and `undo` goes back to it. With one, the
shard has no valid version on flash from `begin_write` to `commit`; reading it then is an error, never torn bytes.

[Note: pieces] A shard is cut into pieces of ``block_nbytes``, piece i on path (start + i) mod n, so that one shard's
transfer uses every disk. Each piece is one extent with its own checksum (io/checksum.py, over the logical bytes). It
starts at a multiple of 4 KiB and is padded to one. Pieces of a shard on one path are contiguous.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_tieroffload.concepts import Extent
from lightning_tieroffload.errors import CapacityError, ChecksumError, ConfigError, TierIOError
from lightning_tieroffload.io.checksum import CHECKSUM_NAME, SLOW_CHECKSUM_REASON, checksum_of
from lightning_tieroffload.io.direct_file import ALIGN_NBYTES, DirectFile, Filesystem
from lightning_tieroffload.io.run_directory import RunDirectory, prepare_path, reclaim_dead_runs
from lightning_tieroffload.memory.free_runs import FreeRuns
from lightning_tieroffload.sizes import MiB, format_nbytes, round_up

__all__ = ["ExtentStore", "Piece", "ReadVersion", "WriteVersion", "partition_paths"]

_log = logging.getLogger(__name__)

_DEFAULT_BLOCK_NBYTES = 4 * MiB


def partition_paths(paths: Sequence[str], local_rank: int, num_local_ranks: int) -> tuple[str, ...]:
    """The paths that this rank of a host keeps to: its own ones when there are enough, else one shared with few."""
    if not paths:
        return ()
    if len(paths) >= num_local_ranks:
        return tuple(paths[local_rank::num_local_ranks])
    return (paths[local_rank % len(paths)],)


@dataclass(frozen=True, slots=True)
class Piece:
    """One extent of a shard: ``start_nbytes`` is where its bytes lie in the shard."""

    index: int
    start_nbytes: int
    path_index: int
    extent: Extent


@dataclass(slots=True)
class _Place:
    """One set of extents that can hold a version of a shard."""

    pieces: tuple[Piece, ...]
    checksums: list[int | None]
    version: int = 0  # 0: nothing valid here


@dataclass(slots=True)
class _Stored:
    name: str
    nbytes: int
    places: list[_Place]
    current: int | None = None  # index into places; None: no valid version on flash
    previous: int | None = None  # for undo
    num_writes: int = 0
    writer: WriteVersion | None = None
    fault: str = "it was never written"


@dataclass(slots=True)
class _PathState:
    path: str
    directory: RunDirectory
    file: DirectFile
    runs: FreeRuns = field(default_factory=lambda: FreeRuns(0))
    file_nbytes: int = 0
    used_nbytes: int = 0
    written_nbytes: int = 0
    read_nbytes: int = 0


class ExtentStore:
    """Shards on flash, under one or several paths.

    Args:
        paths: directories on flash (``nvme_paths``), made if missing; this rank's own, see `partition_paths`.
        rank: the global rank, part of the run directory's name.
        block_nbytes: the length of a piece; rounded up to 4 KiB.
        max_nbytes: ``nvme_budget``, over all paths, padding included. None: what the file systems hold.
        verify_reads: checksum what is written and check what comes back.
        write_budget_nbytes: ``nvme_write_budget``, most bytes written in this run. None: no limit.
        direct: False asks for buffered mode.

    Dead runs' directories under the paths are reclaimed first. Methods may be called from any thread. Reading a shard
    while it is written is the caller's to exclude; a second writer of one shard at a time is refused.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        rank: int = 0,
        block_nbytes: int = _DEFAULT_BLOCK_NBYTES,
        max_nbytes: int | None = None,
        verify_reads: bool = True,
        write_budget_nbytes: int | None = None,
        direct: bool = True,
    ) -> None:
        self._lock = threading.Lock()
        self._paths: list[_PathState] = []
        self._shards: dict[str, _Stored] = {}
        self._is_closed = False
        self._peak_nbytes = 0
        self.opened_s = time.monotonic()
        self._num_allocated = itertools.count()
        self.block_nbytes = round_up(max(1, block_nbytes), ALIGN_NBYTES)
        self.max_nbytes = max_nbytes
        self.verify_reads = verify_reads
        self.write_budget_nbytes = write_budget_nbytes
        self._promised_nbytes = 0  # of the write budget: written, or of a write that has begun
        self.reclaimed_nbytes = 0
        try:
            for path in dict.fromkeys(prepare_path(path) for path in paths):
                self.reclaimed_nbytes += reclaim_dead_runs(path)
                directory = RunDirectory(path, rank=rank)
                file = self._open(directory, direct)
                self._paths.append(_PathState(path, directory, file))
                _check_gives_back(file, path)
                warning = directory.filesystem.warning
                if warning is not None:
                    _log.warning("nvme_paths: %s %s", path, warning)
        except BaseException:
            self.close()
            raise
        if verify_reads and SLOW_CHECKSUM_REASON is not None:
            _log.warning("%s", SLOW_CHECKSUM_REASON)
        if not self._paths:
            raise CapacityError("The NVMe tier has no directory. Set nvme_paths.")

    @staticmethod
    def _open(directory: RunDirectory, direct: bool) -> DirectFile:
        try:
            return DirectFile(directory.add_file("data-0"), direct=direct, notice=directory.notice)
        except BaseException:
            directory.close()
            raise

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(state.path for state in self._paths)

    @property
    def directories(self) -> tuple[str, ...]:
        """The run's private directories, one under each path."""
        return tuple(state.directory.path for state in self._paths)

    @property
    def mode_by_path(self) -> dict[str, str]:
        """ "direct" or "buffered" for each path."""
        return {state.path: state.file.mode for state in self._paths}

    @property
    def filesystem_by_path(self) -> dict[str, Filesystem]:
        return {state.path: state.directory.filesystem for state in self._paths}

    @property
    def used_nbytes(self) -> int:
        """Bytes of extents that belong to shards, padding and second places included."""
        return sum(state.used_nbytes for state in self._paths)

    @property
    def peak_nbytes(self) -> int:
        return self._peak_nbytes

    @property
    def memory_nbytes(self) -> int:
        """Bytes of ``used_nbytes`` that lie in host memory, because a path is on tmpfs: they count against DRAM."""
        return sum(state.used_nbytes for state in self._paths if state.directory.filesystem.kind == "memory")

    @property
    def written_nbytes_by_path(self) -> dict[str, int]:
        """Bytes that went to each device in this run, padding included."""
        return {state.path: state.written_nbytes for state in self._paths}

    @property
    def write_budget_left_nbytes(self) -> int | None:
        """What may still be written in this run; None without a budget. A write that failed is counted as written."""
        return None if self.write_budget_nbytes is None else self.write_budget_nbytes - self._promised_nbytes

    @property
    def read_nbytes_by_path(self) -> dict[str, int]:
        return {state.path: state.read_nbytes for state in self._paths}

    def __contains__(self, name: str) -> bool:
        return name in self._shards

    def nbytes_of(self, name: str) -> int:
        return self._stored(name).nbytes

    def pieces_of(self, name: str) -> tuple[Piece, ...]:
        """How the shard is cut. Piece i has the same bytes and path in every version; extents are the current one's."""
        stored = self._stored(name)
        return stored.places[stored.current or 0].pieces

    def version_of(self, name: str) -> int | None:
        """Number of the valid version, counted from 1; None when there is none."""
        with self._lock:
            stored = self._stored(name)
            return None if stored.current is None else stored.places[stored.current].version

    def index_json(self) -> str:
        """Which shard lies where, for people and for tests; not needed for a restart (everything here is scratch)."""
        with self._lock:
            shards = {
                stored.name: {
                    "nbytes": stored.nbytes,
                    "current": stored.current,
                    "places": [
                        {
                            "version": place.version,
                            "extents": [
                                [piece.extent.path, piece.extent.offset_nbytes, piece.extent.nbytes]
                                for piece in place.pieces
                            ],
                            CHECKSUM_NAME: place.checksums,
                        }
                        for place in stored.places
                    ],
                }
                for stored in self._shards.values()
            }
        return json.dumps({"block_nbytes": self.block_nbytes, "shards": shards}, indent=1)

    # --- space ------------------------------------------------------------------------------------------------------

    def required_nbytes(self, nbytes: int, num_versions: int = 1) -> int:
        """What a shard takes on flash, padding included. Pure arithmetic, for plans and dry runs."""
        whole, rest = divmod(nbytes, self.block_nbytes)
        return num_versions * (whole * self.block_nbytes + round_up(rest, ALIGN_NBYTES))

    def reserve(self, nbytes_by_name: Mapping[str, int], *, num_versions: int = 1) -> None:
        """Allocate many shards at once: all of them or, with ``CapacityError`` or ``TierIOError``, none."""
        done: list[str] = []
        try:
            with self._lock:
                total_nbytes = sum(self.required_nbytes(nbytes, num_versions) for nbytes in nbytes_by_name.values())
                self._check_budget(total_nbytes, f"{len(nbytes_by_name)} shards")
                for name, nbytes in nbytes_by_name.items():
                    self._allocate_locked(name, nbytes, num_versions)
                    done.append(name)
        except BaseException:
            for name in done:
                self.free(name)
            raise

    def allocate(self, name: str, nbytes: int, *, num_versions: int = 1) -> None:
        """Set space aside for a shard, really (posix_fallocate), so that writing it cannot run out of space."""
        with self._lock:
            self._check_budget(self.required_nbytes(nbytes, num_versions), name)
            self._allocate_locked(name, nbytes, num_versions)

    def free(self, name: str) -> None:
        """Give a shard's space back to the store (the files keep it, for the next shard)."""
        with self._lock:
            stored = self._stored(name)
            if stored.writer is not None:
                raise TierIOError(f"{name} cannot be freed: it is being written.", shard=name)
            del self._shards[name]
            for place in stored.places:
                self._give_locked(place.pieces)

    def _give_locked(self, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            state = self._paths[piece.path_index]
            padded_nbytes = round_up(piece.extent.nbytes, ALIGN_NBYTES)
            state.runs.give(piece.extent.offset_nbytes, padded_nbytes)
            state.used_nbytes -= padded_nbytes

    def _check_budget(self, needed_nbytes: int, what: str) -> None:
        if self.max_nbytes is not None and self.used_nbytes + needed_nbytes > self.max_nbytes:
            raise CapacityError(
                f"{what}: {format_nbytes(needed_nbytes)} needed on flash, "
                f"{format_nbytes(max(0, self.max_nbytes - self.used_nbytes))} is left of nvme_budget "
                f"({format_nbytes(self.max_nbytes)}). Raise nvme_budget to at least "
                f"{self.used_nbytes + needed_nbytes} bytes, or keep more on the other tiers."
            )

    def _allocate_locked(self, name: str, nbytes: int, num_versions: int) -> None:
        if self._is_closed:
            raise TierIOError(f"{name} cannot be allocated: the store is closed.", shard=name)
        if name in self._shards:
            raise ValueError(f"{name} is in the store already")
        if num_versions not in (1, 2) or nbytes < 0:
            raise ValueError(
                f"{name}: num_versions={num_versions} must be 1 or 2, nbytes={nbytes} must not be negative"
            )
        places: list[_Place] = []
        first_path = next(self._num_allocated) % len(self._paths)
        try:
            for _ in range(num_versions):
                pieces = self._cut_pieces_locked(name, nbytes, first_path)
                places.append(_Place(pieces, [None] * len(pieces)))
        except BaseException:
            for place in places:
                self._give_locked(place.pieces)
            raise
        self._shards[name] = _Stored(name, nbytes, places)
        self._peak_nbytes = max(self._peak_nbytes, self.used_nbytes)

    def _cut_pieces_locked(self, name: str, nbytes: int, first_path: int) -> tuple[Piece, ...]:
        starts = range(0, nbytes, self.block_nbytes)
        lengths = [min(self.block_nbytes, nbytes - start) for start in starts]
        num_paths = len(self._paths)
        padded_by_path = [0] * num_paths
        for index, length in enumerate(lengths):
            padded_by_path[(first_path + index) % num_paths] += round_up(length, ALIGN_NBYTES)
        offsets: list[int] = []
        for path_index, padded_nbytes in enumerate(padded_by_path):
            try:
                offsets.append(self._cut_locked(self._paths[path_index], padded_nbytes, name))
            except BaseException:
                for earlier, offset in enumerate(offsets):
                    if padded_by_path[earlier]:
                        self._paths[earlier].runs.give(offset, padded_by_path[earlier])
                raise
        for state, padded_nbytes in zip(self._paths, padded_by_path, strict=True):
            state.used_nbytes += padded_nbytes
        pieces = []
        for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            path_index = (first_path + index) % num_paths
            extent = Extent(self._paths[path_index].file.path, offsets[path_index], length)
            pieces.append(Piece(index, start, path_index, extent))
            offsets[path_index] += round_up(length, ALIGN_NBYTES)
        return tuple(pieces)

    def _cut_locked(self, state: _PathState, nbytes: int, name: str) -> int:
        if nbytes == 0:
            return 0
        offset = state.runs.cut(nbytes, ALIGN_NBYTES)
        if offset is None:
            self._grow_locked(state, nbytes, name)
            offset = state.runs.cut(nbytes, ALIGN_NBYTES)
            if offset is None:
                raise CapacityError(f"{name}: {state.path} grew by {nbytes} bytes and still has no room for them")
        return offset

    def _grow_locked(self, state: _PathState, nbytes: int, name: str) -> None:
        try:
            vfs = os.statvfs(state.directory.path)
        except OSError:  # somebody removed the directory: our open file is whole all the same
            vfs = os.fstatvfs(state.file.fileno())
        free_nbytes = vfs.f_bavail * vfs.f_frsize
        if free_nbytes < nbytes:
            raise CapacityError(
                f"{name}: {format_nbytes(nbytes)} more needed in {state.path} (nvme_paths), but only "
                f"{format_nbytes(free_nbytes)} is free there. Free space, add another of nvme_paths, or set "
                f"nvme_budget so that the plan keeps more on the other tiers."
            )
        try:
            os.posix_fallocate(state.file.fileno(), state.file_nbytes, nbytes)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                _log.info("%s: space cannot be reserved here (%s); a full disk will show later", state.path, error)
                state.file.truncate(state.file_nbytes + nbytes)
            else:
                raise TierIOError(
                    f"{name}: reserving {format_nbytes(nbytes)} in {state.file.path} failed: {error.strerror} "
                    f"({format_nbytes(free_nbytes)} free there). Free space, raise the limit on file sizes "
                    f"(ulimit -f), add another of nvme_paths, or lower nvme_budget.",
                    errno=error.errno,
                    path=state.file.path,
                    offset_nbytes=state.file_nbytes,
                    nbytes=nbytes,
                    shard=name,
                ) from error
        state.runs.give(state.file_nbytes, nbytes)
        state.file_nbytes += nbytes

    # --- bytes ------------------------------------------------------------------------------------------------------

    def begin_write(self, name: str) -> WriteVersion:
        """Start a new version of a shard. Raises ``CapacityError`` when it would pass ``nvme_write_budget``."""
        with self._lock:
            stored = self._stored(name)
            if stored.writer is not None:
                raise TierIOError(f"{name} has two writers at a time. This is a fault of the library.", shard=name)
            planned_nbytes = self.required_nbytes(stored.nbytes)
            budget_nbytes = self.write_budget_nbytes
            if budget_nbytes is not None and self._promised_nbytes + planned_nbytes > budget_nbytes:
                raise CapacityError(
                    f"{name}: writing {format_nbytes(planned_nbytes)} would pass nvme_write_budget "
                    f"({format_nbytes(budget_nbytes)}): {format_nbytes(self._promised_nbytes)} are written in this "
                    f"run. Raise nvme_write_budget, or raise dram_budget so that less lives on flash."
                )
            self._promised_nbytes += planned_nbytes
            target = 0 if len(stored.places) == 1 or stored.current is None else 1 - stored.current
            if stored.current == target:
                stored.current = None
                stored.fault = "it is being overwritten"
            stored.previous = None  # its place is about to be overwritten
            stored.places[target].version = 0
            stored.writer = WriteVersion(self, stored, target)
            return stored.writer

    def begin_read(self, name: str) -> ReadVersion:
        """The valid version of a shard. Raises ``TierIOError`` when there is none."""
        with self._lock:
            stored = self._stored(name)
            if stored.current is None:
                raise TierIOError(
                    f"{name} has no valid copy on flash: {stored.fault}. Continue from its copy on another tier, or "
                    f"from the last checkpoint.",
                    shard=name,
                )
            return ReadVersion(self, stored, stored.current)

    def write(self, name: str, memory: memoryview) -> None:
        """Write a whole shard in this thread and make it current."""
        memory = memory.cast("B")
        version = self.begin_write(name)
        try:
            for piece in version.pieces:
                version.write_piece(piece.index, memory[piece.start_nbytes : piece.start_nbytes + piece.extent.nbytes])
        except BaseException as error:
            version.abort(error)
            raise
        version.commit()

    def read(self, name: str, memory: memoryview) -> None:
        """Fill ``memory`` with a whole shard in this thread. Raises ``ChecksumError`` when the bytes are others."""
        memory = memory.cast("B")
        version = self.begin_read(name)
        for piece in version.pieces:
            version.read_piece(piece.index, memory[piece.start_nbytes : piece.start_nbytes + piece.extent.nbytes])

    def undo(self, name: str) -> None:
        """Go back to the version before the last `commit`. Raises ``TierIOError`` when it is not there any more."""
        with self._lock:
            stored = self._stored(name)
            if stored.writer is not None or stored.previous is None:
                raise TierIOError(
                    f"{name}: there is no earlier version to go back to (num_versions={len(stored.places)}).",
                    shard=name,
                )
            stored.current, stored.previous = stored.previous, None

    def _stored(self, name: str) -> _Stored:
        try:
            return self._shards[name]
        except KeyError:
            raise TierIOError(f"{name} is not in the store.", shard=name) from None

    # --- the end ----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """Close the files and delete everything this run wrote under the paths. Idempotent.

        Transfers under way are waited for, up to 5 s in all; later ones get a ``TierIOError``.
        """
        self._is_closed = True
        deadline_s = time.monotonic() + 5.0
        for state in self._paths:
            state.file.close(max(0.0, deadline_s - time.monotonic()))
        for state in self._paths:
            state.directory.close()

    def __enter__(self) -> ExtentStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ExtentStore({', '.join(self.paths)}; {len(self._shards)} shards, {format_nbytes(self.used_nbytes)})"


def _check_gives_back(file: DirectFile, path: str) -> None:
    """Write, read back and drop one page, in the mode that the run will use."""
    pattern = os.urandom(ALIGN_NBYTES)
    back = bytearray(ALIGN_NBYTES)
    file.write(memoryview(pattern), 0)
    file.read(memoryview(back), 0)
    if back != pattern:
        raise ConfigError(f"nvme_paths: {path} does not give back what was written to it. Check the disk.")
    file.truncate(0)


class WriteVersion:
    """A version being written. Pieces in any order, from any threads; then `commit`, or `abort`."""

    def __init__(self, store: ExtentStore, stored: _Stored, target: int) -> None:
        self._store = store
        self._stored = stored
        self._target = target
        self._missing = set(range(len(stored.places[target].pieces)))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self._stored.places[self._target].pieces

    def write_piece(self, index: int, memory: memoryview) -> None:
        """Write one piece, ``memory`` being exactly its bytes."""
        place = self._stored.places[self._target]
        piece = place.pieces[index]
        if len(memory) != piece.extent.nbytes:
            raise ValueError(
                f"{self._stored.name} piece {index} has {piece.extent.nbytes} bytes, {len(memory)} were given"
            )
        place.checksums[index] = checksum_of(memory) if self._store.verify_reads else None
        file = self._store._paths[piece.path_index].file
        offset = piece.extent.offset_nbytes
        self._count(index, file.write(memory, offset, shard=self._stored.name, pad_tail=True))

    def write_piece_with(self, index: int, write: Callable[[], None]) -> None:
        """Have ``write`` put the piece's bytes into its extent by other means. It then has no checksum."""
        place = self._stored.places[self._target]
        place.checksums[index] = None
        write()
        self._count(index, place.pieces[index].extent.nbytes)

    def _count(self, index: int, written_nbytes: int) -> None:
        with self._store._lock:
            self._store._paths[self.pieces[index].path_index].written_nbytes += written_nbytes
            self._missing.discard(index)

    def commit(self) -> None:
        """Make this the shard's current version. Raises ``TierIOError`` unless every piece was written."""
        with self._store._lock:
            if self._stored.writer is not self:
                raise TierIOError(f"{self._stored.name}: this write has ended already.", shard=self._stored.name)
            if self._missing:
                raise TierIOError(
                    f"{self._stored.name}: {len(self._missing)} of {len(self.pieces)} pieces were not written.",
                    shard=self._stored.name,
                )
            self._stored.num_writes += 1
            self._stored.previous = self._stored.current
            self._stored.places[self._target].version = self._stored.num_writes
            self._stored.current = self._target
            self._stored.writer = None

    def abort(self, error: BaseException | None = None) -> None:
        """Give this version up. The old one stands where the shard has two places; else it has no valid copy."""
        with self._store._lock:
            if self._stored.writer is self:
                self._stored.writer = None
                if self._stored.current is None:
                    self._stored.fault = (
                        f"writing it failed ({error})" if error is not None else "its write was given up"
                    )


class ReadVersion:
    """A version being read. Pieces in any order, from any threads."""

    def __init__(self, store: ExtentStore, stored: _Stored, source: int) -> None:
        self._store = store
        self._stored = stored
        self._source = source

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self._stored.places[self._source].pieces

    def read_piece(self, index: int, memory: memoryview) -> None:
        """Fill ``memory``, exactly the piece's bytes, and check them. ``ChecksumError`` when they are others."""
        place = self._stored.places[self._source]
        piece = place.pieces[index]
        extent = piece.extent
        if len(memory) != extent.nbytes:
            raise ValueError(f"{self._stored.name} piece {index} has {extent.nbytes} bytes, {len(memory)} were given")
        state = self._store._paths[piece.path_index]
        expected = place.checksums[index] if self._store.verify_reads else None
        found = self._read(state, extent, memory, expected)
        if found != expected:
            # The bytes in the file may be right all the same: changed on their way, they come right the second time.
            once = found
            found = self._read(state, extent, memory, expected)
            if found == expected:
                _log.warning(
                    "%s: %s read from offset %d of %s were not the bytes that were written there (%s %016x), and were "
                    "when read again. Something between disk and memory changes bytes: check cable, controller and "
                    "memory.",
                    self._stored.name,
                    format_nbytes(extent.nbytes),
                    extent.offset_nbytes,
                    extent.path,
                    CHECKSUM_NAME,
                    once,
                )
        if found != expected:
            raise ChecksumError(
                f"{self._stored.name}: {format_nbytes(extent.nbytes)} read from offset {extent.offset_nbytes} of "
                f"{extent.path} are not the bytes that were written there ({CHECKSUM_NAME} {found:016x}, written as "
                f"{expected:016x}). The disk, its driver or somebody else changed them: check the disk (smartctl, "
                f"kernel log) and resume from the last checkpoint.",
                path=extent.path,
                offset_nbytes=extent.offset_nbytes,
                nbytes=extent.nbytes,
                shard=self._stored.name,
            )

    def _read(self, state: _PathState, extent: Extent, memory: memoryview, expected: int | None) -> int | None:
        """Read the extent; its checksum where one is ``expected``."""
        state.file.read(memory, extent.offset_nbytes, shard=self._stored.name)
        with self._store._lock:
            state.read_nbytes += round_up(extent.nbytes, ALIGN_NBYTES)
        return None if expected is None else checksum_of(memory)
