"""Floor 2. A lane: the queue in front of a mover, its bounds, and where its idle threads sleep.

Decides what runs next and nothing else: no method of `Lane` blocks or calls a work.
"""

from __future__ import annotations

import collections
import ctypes
import heapq
import itertools
import threading
from dataclasses import dataclass
from typing import Any

from lightning_tieroffload.io.ticket import TransferTicket
from lightning_tieroffload.snapshots import snapshot

__all__ = ["Doorbell", "Lane", "LaneSpec"]

_SCAN_LIMIT = 256  # queued works looked at for one of another owner when an owner has its share

_libc = ctypes.CDLL(None)
for _function in (_libc.sem_post, _libc.sem_wait):
    _function.argtypes = (ctypes.c_void_p,)
_libc.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSpec:
    """What bounds one lane.

    ``concurrency`` works run at a time, each in a thread of the lane. ``max_inflight_nbytes`` bounds the sum of the
    running works' ``nbytes`` (one work always may run). While others wait, one owner holds at most
    ``max_share_frac`` of the lane's threads (at least one). A work that runs for longer than ``timeout_s`` (None: the
    scheduler's) is an error; ``math.inf`` switches that off.
    """

    name: str
    concurrency: int = 1
    max_inflight_nbytes: int | None = None
    max_share_frac: float = 1.0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"lane {self.name}: concurrency={self.concurrency} must be 1 or more")
        if self.max_inflight_nbytes is not None and self.max_inflight_nbytes < 1:
            raise ValueError(f"lane {self.name}: max_inflight_nbytes={self.max_inflight_nbytes} must be 1 or more")
        if not 0.0 < self.max_share_frac <= 1.0:
            raise ValueError(f"lane {self.name}: max_share_frac={self.max_share_frac} must be in (0, 1]")


class Doorbell:
    """Where the idle threads of one lane sleep; each ring wakes one of them, now or when it next goes to sleep.

    A POSIX semaphore called through ctypes, which lets go of the interpreter lock during the call. A `threading.Lock`
    wakes the thread while the waker holds the interpreter lock, so that the woken one waits for the switch interval:
    measured on two busy cores, 5 to 8 ms until it ran under a pure-Python loop in the waker, and 8 µs this way.
    """

    __slots__ = ("_address", "_semaphore")

    def __init__(self) -> None:
        self._semaphore = ctypes.create_string_buffer(64)  # sem_t has 32 bytes at most
        self._address = ctypes.addressof(self._semaphore)
        _libc.sem_init(self._address, 0, 0)

    def ring(self) -> None:
        _libc.sem_post(self._address)

    def wait(self) -> None:
        """Sleep until rung. A signal may end it early: look again at what there is to do."""
        _libc.sem_wait(self._address)


_Entry = tuple[tuple[int, int, int], int, TransferTicket[Any]]


class Lane:
    """The queue and the counts of one lane. No method blocks; every one is called under the scheduler's lock.

    ``inbox`` and ``bell`` are for any thread without the lock. [Note: submit from anywhere] in scheduler.py
    """

    def __init__(self, spec: LaneSpec, timeout_s: float) -> None:
        self.spec = spec
        self.timeout_s = timeout_s if spec.timeout_s is None else spec.timeout_s
        # (rank, serial, ticket). A ticket that was expedited is in it twice, even with one rank: the serial decides.
        self.heap: list[_Entry] = []
        self._serial = itertools.count()
        self.running: dict[TransferTicket[Any], int] = {}  # and the thread that has claimed it
        self.running_nbytes = 0
        self.num_running_by_owner: collections.Counter[str] = collections.Counter()
        self.max_running_per_owner = max(1, int(spec.max_share_frac * spec.concurrency))
        self.inbox: collections.deque[TransferTicket[Any]] = collections.deque()
        self.bell = Doorbell()
        self.num_idle = 0
        self.num_threads = 0
        self.thread_asked_s = 0.0  # when one more thread was asked for that has not been counted yet; else 0
        self.thread_index = itertools.count()
        self.num_done = 0
        self.done_nbytes = 0
        self.busy_s = 0.0

    def push(self, ticket: TransferTicket[Any]) -> None:
        heapq.heappush(self.heap, (ticket._rank, next(self._serial), ticket))

    def choose(self) -> TransferTicket[Any] | None:
        """The ticket that runs next, claimed and counted as running; None when nothing is ready or allowed."""
        aside: list[_Entry] = []
        chosen = None
        bounds_owners = self.max_running_per_owner < self.spec.concurrency
        while self.heap:
            rank, _, ticket = self.heap[0]
            if rank != ticket._rank or not ticket._claim:  # expedited or cancelled since
                heapq.heappop(self.heap)
                continue
            if not self._fits(ticket):
                break  # strictly in order: a large transfer is not overtaken for ever by small ones
            entry = heapq.heappop(self.heap)
            if (
                bounds_owners
                and len(aside) < _SCAN_LIMIT
                and self.num_running_by_owner[ticket._owner] >= self.max_running_per_owner
            ):
                aside.append(entry)
                continue
            if self._claim(ticket):
                chosen = ticket
                break
        for index, (_, _, ticket) in enumerate(aside):
            # Nobody else waits: an owner alone may use the whole lane.
            if chosen is None and self._fits(ticket) and self._claim(ticket):
                chosen = ticket
                del aside[index]
                break
        for entry in aside:
            heapq.heappush(self.heap, entry)
        return chosen

    def _fits(self, ticket: TransferTicket[Any]) -> bool:
        bound_nbytes = self.spec.max_inflight_nbytes
        return bound_nbytes is None or not self.running or self.running_nbytes + ticket.nbytes <= bound_nbytes

    def _claim(self, ticket: TransferTicket[Any]) -> bool:
        if not ticket._claim:
            return False
        # Before the claim goes: a queued ticket without one and not running is lost.
        self.running[ticket] = threading.get_ident()
        try:
            ticket._claim.pop()
        except IndexError:
            del self.running[ticket]
            return False
        self.running_nbytes += ticket.nbytes
        self.num_running_by_owner[ticket._owner] += 1
        return True

    def finish(self, ticket: TransferTicket[Any], busy_s: float) -> None:
        del self.running[ticket]
        self.running_nbytes -= ticket.nbytes
        self.num_running_by_owner[ticket._owner] -= 1
        if not self.num_running_by_owner[ticket._owner]:
            del self.num_running_by_owner[ticket._owner]
        self.num_done += 1
        self.busy_s += busy_s
        if ticket._error is None:
            self.done_nbytes += ticket.nbytes

    def num_queued(self) -> int:
        queued = {ticket for rank, _, ticket in list(self.heap) if rank == ticket._rank}
        return sum(1 for ticket in queued.union(snapshot(self.inbox)) if ticket._claim)

    def describe(self) -> str:
        running = ", ".join(f"{ticket.label} {ticket._state()}" for ticket in list(self.running)[:4])
        more = f" and {len(self.running) - 4} more" if len(self.running) > 4 else ""
        return (
            f"lane {self.spec.name}: {len(self.running)} of {self.spec.concurrency} running"
            f"{f' ({running}{more})' if running else ''}, {self.num_queued()} queued, {self.num_done} done"
        )
