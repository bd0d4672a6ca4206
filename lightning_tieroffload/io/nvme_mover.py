"""Floor 4. Moves shards between host memory and the extent store, over the scheduler's lanes.

Owns the cutting of a shard's transfer into pieces, one lane per disk and direction, and the order of transfers of one
shard. Does not choose what moves when.

[Note: order per shard] Reads of a shard come after the write that was asked for before them, and a write comes after
the reads and the write before it, whoever asks: a missing dependency in a caller must not become torn bytes.

[Note: commit] A write becomes the shard's current version when all its pieces are on flash and no earlier. If one
failed, those that have not started are cancelled, and it is given up when all have ended: until then they still use the
extents. The error itself is news at once, unless somebody may serve it otherwise: a slow disk must not hold back what
another one says.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, TypeVar

from lightning_tieroffload.concepts import Ticket
from lightning_tieroffload.errors import TierIOError
from lightning_tieroffload.io.extent_store import ExtentStore, ReadVersion, WriteVersion
from lightning_tieroffload.io.scheduler import LaneExecutor, LaneSpec, Scheduler, TransferTicket

__all__ = ["NvmeMover"]

_log = logging.getLogger(__name__)
V = TypeVar("V", ReadVersion, WriteVersion)

_FILES_LANE = "files"


class _Pieces(Generic[V]):
    """The pieces of one transfer. Its version is opened when the first of them runs, after all that came before it."""

    def __init__(self, scheduler: Scheduler, name: str, begin: Callable[[], V]) -> None:
        self._scheduler = scheduler
        self.name = name
        self._begin: Callable[[], V] = begin
        self._lock = threading.Lock()
        self._version: V | None = None
        self.tickets: list[TransferTicket[None]] = []
        self.failure: BaseException | None = None

    def run(self, move: str, index: int, part: memoryview) -> None:
        """Work of one piece. The first that fails spares the others the disk, since all has failed. [Note: commit]"""
        if self.failure is not None:
            raise self.failure
        try:
            getattr(self.open(), move)(index, part)
        except BaseException as error:
            if self.failure is None:
                self.failure = error
            for ticket in list(self.tickets):
                self._scheduler.cancel(ticket)
            raise

    def open(self) -> V:
        with self._lock:
            if self._version is None:
                self._version = self._begin()
            return self._version

    def opened(self) -> V | None:
        return self._version


class _Order:
    """The transfers of one shard that later ones must come after."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: TransferTicket[None] | None = None
        self.reads: list[TransferTicket[None]] = []


class NvmeMover:
    """Reads and writes of whole shards, as tickets.

    The scheduler needs the lanes of `lane_specs`. Memory that is handed in belongs to the transfer until its ticket is
    done. Any thread.
    """

    def __init__(self, scheduler: Scheduler, store: ExtentStore) -> None:
        missing = [name for name in self._lane_names(len(store.paths)) if name not in scheduler.lane_names]
        if missing:
            raise ValueError(f"the scheduler has no lanes {', '.join(missing)}: make it with NvmeMover.lane_specs(...)")
        self._scheduler = scheduler
        self._store = store
        self._order: dict[str, _Order] = {}
        # Reentrant: in the seeded mode a submit may run other works here, and they may ask for transfers.
        self._order_lock = threading.RLock()
        self._served_elsewhere: dict[str, int] = {}

    @staticmethod
    def _lane_names(num_paths: int) -> list[str]:
        return [f"{verb}{index}" for verb in ("read", "write") for index in range(num_paths)] + [_FILES_LANE]

    @staticmethod
    def lane_specs(
        num_paths: int,
        *,
        io_threads: int = 4,
        max_inflight_nbytes: int | None = None,
        max_share_frac: float = 1.0,
    ) -> list[LaneSpec]:
        """The lanes "read<i>" and "write<i>" of each path, ``io_threads`` threads each, and one for small files."""
        specs = [
            LaneSpec(
                name=f"{verb}{index}",
                concurrency=io_threads,
                max_inflight_nbytes=max_inflight_nbytes,
                max_share_frac=max_share_frac,
            )
            for verb in ("read", "write")
            for index in range(num_paths)
        ]
        return [*specs, LaneSpec(name=_FILES_LANE)]

    @property
    def served_elsewhere(self) -> dict[str, int]:
        """Shards whose read failed and was served from another copy, and how often: hold them one tier up."""
        return dict(self._served_elsewhere)

    def read(
        self,
        name: str,
        memory: memoryview,
        *,
        priority: int = 0,
        urgent: bool = False,
        after: Sequence[Ticket] = (),
        otherwise: Callable[[], None] | None = None,
        may_fail: bool = False,
    ) -> TransferTicket[None]:
        """Fill ``memory`` (exactly the shard's bytes) from flash, checked.

        If that fails and ``otherwise`` is given, it is called to fill ``memory`` from another valid copy, with one
        warning per shard; without it the ticket fails, with ``ChecksumError`` or another ``TierIOError``. Where one of
        ``after`` fails, nobody touches ``memory``.
        """
        memory = self._checked(name, memory)
        pieces = _Pieces(self._scheduler, name, lambda: self._store.begin_read(name))

        def serve_elsewhere(error: BaseException) -> None:
            error = pieces.failure or error
            # Where no piece has run what came before has failed, and so `memory` may have no pages to be filled.
            if otherwise is None or pieces.failure is None:
                raise error
            try:
                otherwise()
            except BaseException as failure:  # the other copy is gone, say: then flash's own error is the news
                raise error from failure
            count = self._served_elsewhere[name] = self._served_elsewhere.get(name, 0) + 1
            if count == 1:
                _log.warning("%s could not be read from flash and was served from its other copy: %s", name, error)

        with self._order_lock:
            order = self._order.setdefault(name, _Order())
            before = self._barrier(name, [order.write])
            at_once = not may_fail and otherwise is None
            self._submit_all("read", pieces, memory, priority, urgent, (*after, *before), may_fail=not at_once)
            ticket: TransferTicket[None] = self._scheduler.when_all(
                pieces.tickets,
                label=f"read {name}",
                finish=lambda: None if pieces.tickets else (pieces.open(), None)[1],
                otherwise=serve_elsewhere,
                nbytes=len(memory),
                may_fail=may_fail,
            )
            order.reads = [one for one in order.reads if not one.done()]
            order.reads.append(ticket)
        return ticket

    def write(
        self,
        name: str,
        memory: memoryview,
        *,
        priority: int = 0,
        urgent: bool = False,
        after: Sequence[Ticket] = (),
        may_fail: bool = False,
    ) -> TransferTicket[None]:
        """Write ``memory`` (exactly the shard's bytes) to flash and make it the current version."""
        memory = self._checked(name, memory)
        pieces = _Pieces(self._scheduler, name, lambda: self._store.begin_write(name))
        with self._order_lock:
            order = self._order.setdefault(name, _Order())
            before = self._barrier(name, [order.write, *order.reads])

            def give_up(error: BaseException) -> None:
                error = pieces.failure or error
                opened = pieces.opened()
                if opened is not None:
                    opened.abort(error)
                raise error

            def commit() -> None:
                try:
                    pieces.open().commit()
                except BaseException as error:  # Ctrl-C, where the main thread is the one that ends the last piece
                    give_up(error)

            try:
                self._submit_all("write", pieces, memory, priority, urgent, (*after, *before), may_fail)
                ticket: TransferTicket[None] = self._scheduler.when_all(
                    pieces.tickets,
                    label=f"write {name}",
                    finish=commit,
                    otherwise=give_up,
                    nbytes=len(memory),
                    may_fail=may_fail,
                )
                order.write, order.reads = ticket, []
            except BaseException as error:
                # Ctrl-C may have struck behind the pieces: without a ticket nobody would end the version.
                self._scheduler.abandon(pieces.tickets)
                give_up(error)
        return ticket

    def forget(self, name: str) -> None:
        """Free a shard's space on flash. Raises ``TierIOError`` while a transfer of it is under way."""
        with self._order_lock:
            order = self._order.get(name)
            if order is not None and any(one is not None and not one.done() for one in (order.write, *order.reads)):
                raise TierIOError(f"{name} cannot be freed: a transfer of it is under way.", shard=name)
            self._order.pop(name, None)
            self._store.free(name)

    def save_index(self, path: str) -> TransferTicket[None]:
        """Write the store's index to ``path`` as JSON, beside everything else that goes on."""

        import aiofiles  # here: who never asks for the index does not need it

        async def save() -> None:
            executor = LaneExecutor(self._scheduler, _FILES_LANE, label=f"write {path}")
            async with aiofiles.open(path, "w", encoding="utf-8", executor=executor) as file:
                await file.write(self._store.index_json())

        return self._scheduler.spawn(save, label=f"write {path}")

    def _barrier(self, name: str, tickets: Sequence[TransferTicket[None] | None]) -> tuple[TransferTicket[None], ...]:
        """At most one ticket, complete when all of ``tickets`` have ended, well or badly."""
        pending = [one for one in tickets if one is not None and not one.done()]
        if not pending:
            return ()
        return (self._scheduler.when_all(pending, label=f"order of {name}", otherwise=lambda _: None, may_fail=True),)

    def _checked(self, name: str, memory: memoryview) -> memoryview:
        memory = memory.cast("B")
        nbytes = self._store.nbytes_of(name)
        if len(memory) != nbytes:
            raise ValueError(f"{name} has {nbytes} bytes, memory of {len(memory)} bytes was given")
        return memory

    def _submit_all(
        self,
        verb: Literal["read", "write"],
        pieces: _Pieces[Any],
        memory: memoryview,
        priority: int,
        urgent: bool,
        after: tuple[Ticket, ...],
        may_fail: bool,
    ) -> None:
        """Submit every piece; or none is under way when it raises, so that the memory is the caller's again."""
        try:
            for piece in self._store.pieces_of(pieces.name):
                part = memory[piece.start_nbytes : piece.start_nbytes + piece.extent.nbytes]
                self._scheduler.submit(
                    f"{verb}{piece.path_index}",
                    functools.partial(pieces.run, f"{verb}_piece", piece.index, part),
                    label=f"{verb} {pieces.name} piece {piece.index} at {piece.extent.path}",
                    priority=priority,
                    nbytes=piece.extent.nbytes,
                    urgent=urgent,
                    after=after,
                    owner=pieces.name,
                    may_fail=may_fail,
                    announce=pieces.tickets.append,
                )
        except BaseException:  # the scheduler refuses more, since something else has failed meanwhile
            self._scheduler.abandon(pieces.tickets)
            raise
