"""Floor 2. One thread that runs one asyncio loop, for callers that are not asynchronous.

Owns the thread, the loop and the task group that is the parent of every task on it. Knows nothing of lanes or
transfers: `io/scheduler.py` uses it for supervision and for coroutines that await tickets.

The thread is a daemon, and is closed by its owner (who registers with atexit). A non-daemon thread, or
``threading._register_atexit``, would end the loop while a user's own thread is still training after the main thread's
last line.
"""

from __future__ import annotations

import _thread
import asyncio
import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from lightning_tieroffload.errors import TierOffloadError
from lightning_tieroffload.io.ticket import Latch
from lightning_tieroffload.snapshots import snapshot

__all__ = ["LoopThread"]

_Finish = Callable[[Any, BaseException | None], None]
_LOOK_S = 0.2  # while it waits for the end, `close` calls again this often: a call may have been cut short by Ctrl-C


class LoopThread:
    """A lazily started asyncio loop in a daemon thread.

    Args:
        name: the thread's name.
        on_death: called in the loop's thread, with the cause, when the loop ends though nobody asked it to.
    """

    def __init__(self, name: str, *, on_death: Callable[[BaseException], None]) -> None:
        self.name = name
        self._on_death = on_death
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: collections.deque[tuple[Callable[[], Coroutine[Any, Any, Any]], _Finish]] = collections.deque()
        self._is_closing = False
        self._is_dead = False
        self._ended = Latch()
        self._finishes: set[_Finish] = set()  # of the tasks that have been started and have not ended
        self._wake: asyncio.Event | None = None

    @property
    def ident(self) -> int | None:
        """The thread's identity, None before it was started."""
        return None if self._thread is None else self._thread.ident

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self._is_dead

    def start(self) -> None:
        """Start the thread unless it runs already. Any thread; does not wait for the loop to be up.

        Not for the main thread, which Ctrl-C may interrupt in the middle: `spawn` has another thread call it.
        """
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._is_closing:
                    thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                    thread.start()
                    self._thread = thread

    def spawn(self, make: Callable[[], Coroutine[Any, Any, Any]], finish: _Finish) -> None:
        """Run ``make()`` as a task on the loop; ``finish(value, error)`` is called exactly once, in some thread.

        Any thread; never waits. A task that is still running at ``close`` is cancelled, and ``finish`` gets a
        ``TierOffloadError`` then, as it does when the loop is already gone.
        """
        self._inbox.append((make, finish))
        self.call()
        if self._is_dead or self._is_closing:
            self._refuse_inbox()

    def call(self) -> None:
        """Have the loop look at what was spawned. Does no harm if it is cut short by Ctrl-C or called too often."""
        if self._inbox:
            if self._thread is None:
                _thread.start_new_thread(self.start, ())
            self._notify()

    def holds(self, finish: _Finish) -> bool:
        """Whether ``finish`` is still going to be called. False for a `spawn` that was interrupted before it queued."""
        return any(one is finish for _, one in snapshot(self._inbox)) or finish in self._finishes

    def begin_close(self) -> None:
        """Have every task cancelled and the loop end. Does not wait; callable from a finaliser."""
        self._is_closing = True
        self._notify()

    def close(self, timeout_s: float | None = None) -> bool:
        """Cancel every task, end the loop, join the thread. True when the thread has ended. Idempotent."""
        with self._lock:
            self._is_closing = True
            thread = self._thread
        self.begin_close()
        has_ended = thread is None
        if thread is not None and thread is not threading.current_thread():
            # Not by Thread.join: interrupted by Ctrl-C it takes the thread for ended (Python 3.11, bpo-45274).
            deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
            while not has_ended and (left_s := deadline_s - time.monotonic()) > 0:
                has_ended = self._ended.wait(min(left_s, _LOOK_S))
                self._notify()
            if has_ended:
                thread.join()
        self._refuse_inbox()
        return has_ended

    def _notify(self) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just closed: _refuse_inbox serves what is left
                loop.call_soon_threadsafe(self._set_wake)

    def _set_wake(self) -> None:
        if self._wake is not None:
            self._wake.set()

    def _refuse_inbox(self) -> None:
        while True:
            with self._lock:
                if not self._inbox:
                    return
                _, finish = self._inbox.popleft()
            finish(None, TierOffloadError(f"{self.name} has ended; the task was not run."))

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            asyncio.run(self._main())
        except BaseException as error:  # nothing may vanish with this thread: the owner hears of it
            cause = error
        self._is_dead = True
        self._loop = None
        self._refuse_inbox()
        if not self._is_closing:
            self._on_death(cause or TierOffloadError(f"{self.name} ended though nobody asked it to."))
        self._ended.set()

    async def _main(self) -> None:
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            tasks: set[asyncio.Task[None]] = set()
            while not self._is_closing:
                while (next_one := self._take()) is not None:
                    task = group.create_task(self._one_task(*next_one))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                await self._wake.wait()
                self._wake.clear()
            for task in tasks:
                task.cancel()

    def _take(self) -> tuple[Callable[[], Coroutine[Any, Any, Any]], _Finish] | None:
        with self._lock:
            if not self._inbox:
                return None
            make, finish = self._inbox[0]
            self._finishes.add(finish)  # before it leaves the inbox: `holds` sees it in one of them
            self._inbox.popleft()
            return make, finish

    async def _one_task(self, make: Callable[[], Coroutine[Any, Any, Any]], finish: _Finish) -> None:
        value: Any = None
        failure: BaseException | None = None
        try:
            value = await make()
        except asyncio.CancelledError as error:
            failure = TierOffloadError(f"a task on {self.name} was cancelled.")
            failure.__cause__ = error
        except BaseException as error:  # a failed task must not cancel its siblings: it is reported through `finish`
            failure = error
        finish(value, failure)
        self._finishes.discard(finish)
