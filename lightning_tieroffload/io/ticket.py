"""Floor 1. A ticket: the claim on a work that completes later, and what happens when it does.

Owns waiting, callbacks and the result. Who runs the work is its keeper (`io/scheduler.py`), known here as a Protocol.
"""

from __future__ import annotations

import asyncio
import collections
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from lightning_tieroffload.errors import TierOffloadError

__all__ = ["Latch", "TicketKeeper", "TransferTicket", "WorkCancelledError"]

T = TypeVar("T")
_LOOK_S = 0.1


class TicketKeeper(Protocol):
    """What a ticket asks of the scheduler that made it."""

    pending_error: BaseException | None

    def raise_pending_error(self) -> None: ...

    def record_error(self, error: BaseException) -> None: ...

    def wait_for(self, ticket: TransferTicket[Any], timeout_s: float | None) -> None: ...

    def debug_finish(self, ticket: TransferTicket[Any]) -> None: ...


class Latch:
    """Something that happens once, for threads that Ctrl-C may interrupt.

    `threading.Event` is not: a signal between its lock's acquisition and its ``with`` leaves that lock held for good.
    Here the flag is the truth and the lock a wake-up that may be lost without harm.
    """

    __slots__ = ("_lock", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self.is_set = True
        try:
            self._lock.release()
        except RuntimeError:
            return  # set before

    def wait(self, timeout_s: float) -> bool:
        """Whether it has happened, after at most ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_set:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            if self._lock.acquire(timeout=min(left_s, _LOOK_S)):
                self.set()  # for whoever else waits
        return True


class WorkCancelledError(TierOffloadError):
    """A work that was cancelled before it started: no fault, so it is never kept as the first error."""


class TransferTicket(Generic[T]):
    """A claim on a submitted work. Any thread may ask and wait, any number of times; coroutines may ``await`` it."""

    __slots__ = (
        "__weakref__",
        "_after",
        "_callbacks",
        "_claim",
        "_core",
        "_done",
        "_error",
        "_foreign",
        "_may_fail",
        "_otherwise",
        "_owner",
        "_rank",
        "_started_s",
        "_submitted_s",
        "_value",
        "_work",
        "label",
        "lane",
        "nbytes",
    )

    def __init__(
        self,
        core: TicketKeeper,
        lane: str,
        work: Callable[[], T] | None,
        label: str,
        *,
        nbytes: int = 0,
        rank: tuple[int, int, int] = (1, 0, 0),
        owner: str | None = None,
        may_fail: bool = False,
    ) -> None:
        self.label = label
        self.lane = lane
        self.nbytes = nbytes
        self._core = core
        self._work = work
        self._rank = rank
        self._owner = label if owner is None else owner
        self._may_fail = may_fail
        self._claim = [True]  # who pops it runs or cancels the work; list.pop is atomic
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: collections.deque[Callable[[Any], Any]] = collections.deque()
        self._after: Sequence[Any] = ()
        self._foreign: tuple[Any, ...] = ()
        self._otherwise: Callable[[BaseException], Any] | None = None
        self._submitted_s = time.perf_counter()
        self._started_s = 0.0

    def done(self) -> bool:
        """Whether the work has ended, well or badly. The memory it used is free again."""
        return self._done

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until complete and return what the work returned. Any thread but the scheduler's loop.

        Raises the scheduler's first error, this work's error, or ``TransferTimeoutError`` after ``timeout_s`` (None:
        the scheduler's). [Note: an error is not an end] Of a ticket whose `submit` was interrupted before the work was
        queued there is nothing to wait for: None.
        """
        if not self._done:
            self._core.wait_for(self, timeout_s)
        return self._outcome()

    @property
    def result(self) -> T:
        """What the work returned; raises its error, or a ``TierOffloadError`` when it is not complete."""
        if not self._done:
            raise TierOffloadError(f"{self.label} on lane {self.lane} is not complete; wait for it.")
        return self._outcome()

    @property
    def error(self) -> BaseException | None:
        """The work's own error, None while it runs and when it went well."""
        return self._error

    def add_done_callback(self, callback: Callable[[TransferTicket[T]], Any]) -> None:
        """Call ``callback(ticket)`` once when complete: in the thread that completes it, or here when it is already.

        Callbacks must be short. What one raises is kept as the scheduler's first error.
        """
        self._callbacks.append(callback)
        if self._done:
            self._run_callbacks()

    def __await__(self) -> Generator[Any, None, T]:
        if not self._done:
            self._core.debug_finish(self)
        if not self._done:
            loop = asyncio.get_running_loop()
            woken = loop.create_future()

            def set_woken() -> None:
                if not woken.done():
                    woken.set_result(None)

            def wake(_: object) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(set_woken)

            self.add_done_callback(wake)
            yield from woken
        return self._outcome()

    def __repr__(self) -> str:
        return f"TransferTicket({self.label!r}, lane={self.lane!r}, {self._state()})"

    def _state(self) -> str:
        if self._done:
            return "failed" if self._error is not None else "complete"
        if self._started_s:
            return f"running for {time.perf_counter() - self._started_s:.1f} s"
        waits_for = [one for one in self._after if not one.done()]
        if waits_for:
            return f"waiting for {getattr(waits_for[0], 'label', waits_for[0])}"
        return "queued"

    def _outcome(self) -> T:
        if self._core.pending_error is not None:
            self._core.raise_pending_error()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    def _run_callbacks(self) -> None:
        if not self._callbacks:
            return
        if _nesting.depth >= _MAX_NESTED_CALLBACKS:
            _nesting.later.append(self)
            return
        _nesting.depth += 1
        try:
            self._call_back()
            while _nesting.depth == 1 and _nesting.later:
                _nesting.later.popleft()._call_back()
        finally:
            _nesting.depth -= 1

    def _call_back(self) -> None:
        while True:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except BaseException as error:  # kept and raised in the training thread
                self._core.record_error(error)


class _Nesting(threading.local):
    """How deep this thread is in callbacks that complete tickets whose callbacks complete tickets, and what waits.

    One failed work at the head of a chain of thousands fails all of them: by recursion only down to a depth.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.later: collections.deque[TransferTicket[Any]] = collections.deque()


_nesting = _Nesting()
_MAX_NESTED_CALLBACKS = 40
