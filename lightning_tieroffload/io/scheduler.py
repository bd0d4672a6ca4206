"""Floor 3. The scheduler: lanes with priorities and bounds, tickets to wait on, errors that cannot be lost.

Owns the queues in front of the movers, the lane threads and the loop thread. Does not know tiers, tensors or files: a
work is a callable, and whoever submits it says how long the memory that it touches lives.

[Note: who runs a work] A lane is a heap that its own few threads pull from; the decision what is next is one
synchronous method (`Lane.choose`) under one lock. The asyncio loop supervises (a watchdog over running works) and
runs coroutines that await tickets; it is not a stop on a work's way. Through the loop (`run_in_executor`) every work
takes three thread hand-overs instead of one: measured on two busy cores, 4,000 instead of 40,000 works a second, 60
instead of 10 µs for the submitting thread.

[Note: submit from anywhere] Autograd threads, lane threads and finalisers submit, and Ctrl-C strikes the main thread
between any two calls. So all that a submit does is to append the ticket to its lane's inbox (one call: it has happened
or not) and to ring the lane's bell. Everything else, the queue, its counts, starting threads, is done by threads that
no signal interrupts, and no submit or wait takes their lock: a finaliser may run in a thread that holds it. A ring
that was lost is made up for by the next submit, by whoever waits and by the watchdog. A ticket that is in no inbox and
was never seen by a lane thread was not submitted: who waits for it waits for nothing.

[Note: first error] The first exception of any work, callback or of the loop is kept, wakes every waiter, and is raised
by every later `submit`, `wait` and `raise_pending_error`. Works that are queued already still run: they are other
shards' bytes, and finishing them leaves more of the state whole. Works submitted with ``may_fail=True`` keep their
error to their own ticket.

[Note: time-outs] Works are ordered far ahead, so a ticket may wait for hundreds of others, and for minutes, on a disk
that is only slow. A wait without a time-out of its own therefore ends when nothing at all has ended for ``timeout_s``;
a single work that runs for longer is an error of its own.

[Note: an error is not an end] `wait` can raise (a time-out, somebody else's error, Ctrl-C) while the work still runs
and still writes. Memory may be freed when `ticket.done()`, or after `drain` or `close` have returned.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import concurrent.futures
import functools
import itertools
import logging
import math
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from lightning_tieroffload.concepts import Ticket, Transfer
from lightning_tieroffload.errors import TierOffloadError, TransferTimeoutError, UnsupportedError
from lightning_tieroffload.io.lane import Lane, LaneSpec
from lightning_tieroffload.io.loop_thread import LoopThread
from lightning_tieroffload.io.ticket import Latch, TransferTicket, WorkCancelledError
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.snapshots import snapshot, snapshot_items

__all__ = ["LaneExecutor", "LaneMover", "LaneSpec", "Scheduler", "TransferTicket", "WorkCancelledError", "WorkRecord"]

_log = logging.getLogger(__name__)
T = TypeVar("T")

_EXIT_WAIT_S = 4.0  # at interpreter exit: a stuck disk may not keep the process for longer
_FIRST_LOOK_S, _POLL_S = 0.02, 0.5  # a parked waiter looks around then, and this often: a wake-up may have been lost
_ASK_AGAIN_S = 0.1  # a thread that was asked for and has not come by then is asked for again
_JOIN = "join"  # not a lane: what `when_all` gives is completed by the last of those it waits for


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """One finished work, for traces. Times are ``time.perf_counter()`` seconds."""

    lane: str
    label: str
    nbytes: int
    submitted_s: float
    started_s: float
    finished_s: float
    thread: str
    failed: bool


class _Depth(threading.local):
    """How many works, one inside the other, this thread is running in the seeded mode."""

    value = 0


class _Core:
    """The state behind a `Scheduler`. Lane threads hold this and not the facade, so that a forgotten facade can die."""

    def __init__(
        self,
        lanes: Sequence[LaneSpec],
        timeout_s: float,
        debug_seed: int | None,
        debug_submit_run_frac: float,
        observer: Callable[[WorkRecord], None] | None,
        name: str,
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.lanes = {spec.name: Lane(spec, timeout_s) for spec in lanes}
        if len(self.lanes) != len(lanes):
            raise ValueError(f"two lanes have one name: {[spec.name for spec in lanes]}")
        self.pid = os.getpid()
        self.pending_error: BaseException | None = None
        self._pending_traceback: TracebackType | None = None
        self.error_was_raised = False
        self._cleared: weakref.ref[BaseException] | None = None
        self._error_lock = threading.Lock()
        self._lock = threading.Lock()
        self._unfinished: set[TransferTicket[Any]] = set()  # without those that are still in an inbox
        # Who has taken a ticket from its queue to end it at once, and who has a coroutine half handed over to the loop.
        # What is still here when the same thread waits was cut short. See `_end_if_lost`.
        self._at_work: dict[TransferTicket[Any], int] = {}
        self._spawning: dict[TransferTicket[Any], tuple[int, Callable[..., None]]] = {}
        self._parked: set[Callable[[object], None]] = set()
        # Each lane thread and what it sets as its last act. Waiting is not by Thread.join: interrupted by Ctrl-C, that
        # takes a running thread for ended (Python 3.11, bpo-45274).
        self._threads: dict[threading.Thread, Latch] = {}
        self._sequence = itertools.count()
        self._closing = False
        self._observer = observer
        self._had_timeout = False
        self._num_ended = 0  # a sign of life: whether it counts each one does not matter
        self.loop_thread = LoopThread(f"{name}-loop", on_death=self._loop_died)
        self._supervised = False
        # The seeded mode: no lane threads; works run in the threads that submit and wait. [See Scheduler]
        self._rng = None if debug_seed is None else random.Random(debug_seed)
        self._debug_submit_run_frac = debug_submit_run_frac
        self._debug_ready: list[TransferTicket[Any]] = []
        self._debug_taken: dict[TransferTicket[Any], int] = {}  # ticket to the thread that runs it
        self._debug_depth = _Depth()
        self._exit_hook = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._exit_hook)

    # --- submitting -------------------------------------------------------------------------------------------------

    def submit(
        self,
        lane_name: str,
        work: Callable[[], T],
        label: str,
        priority: int,
        nbytes: int,
        urgent: bool,
        after: Sequence[Ticket],
        owner: str | None,
        may_fail: bool,
        announce: Callable[[TransferTicket[T]], object] | None,
    ) -> TransferTicket[T]:
        self.check_process()
        if self.pending_error is not None:
            self.raise_pending_error()
        if self._closing:
            raise TierOffloadError(f"{label}: the scheduler is closed and takes no more work.")
        if lane_name not in self.lanes:
            raise ValueError(f"{label}: there is no lane {lane_name!r}; there are {', '.join(self.lanes)}")
        rank = (0 if urgent else 1, priority, next(self._sequence))
        ticket = TransferTicket(self, lane_name, work, label, nbytes=nbytes, rank=rank, owner=owner, may_fail=may_fail)
        ticket._after = tuple(after)
        if announce is not None:
            announce(ticket)
        self._enqueue(ticket)
        if self._rng is not None:
            self._debug_at_submit()
        return ticket

    def spawn(self, make: Callable[[], Coroutine[Any, Any, T]], label: str, may_fail: bool) -> TransferTicket[T]:
        self.check_process()
        self.raise_pending_error()
        if self._closing:
            raise TierOffloadError(f"{label}: the scheduler is closed and takes no more work.")
        ticket: TransferTicket[T] = TransferTicket(self, "loop", None, label, may_fail=may_fail)
        ticket._claim.clear()  # it is the loop's: it ends by `finish` and nothing else
        ticket._started_s = time.perf_counter()
        finish = functools.partial(self._finish_coroutine, ticket)
        self._spawning[ticket] = threading.get_ident(), finish
        self._unfinished.add(ticket)
        self.loop_thread.spawn(make, finish)
        del self._spawning[ticket]
        return ticket

    def _finish_coroutine(self, ticket: TransferTicket[Any], value: Any, error: BaseException | None) -> None:
        self._complete(ticket, value, error, is_news=not self._closing)  # at close it was cancelled by us

    def _advance(self, ticket: TransferTicket[Any], _: object = None) -> None:
        """Queue the ticket when all it waits for is complete; else come back when the next of them is."""
        is_join = ticket.lane == _JOIN
        for other in ticket._after:
            if not isinstance(other, TransferTicket):
                continue  # has no callbacks (a copy's event): the lane thread waits for it
            if not other._done and not self._end_if_lost(other):
                other.add_done_callback(functools.partial(self._advance, ticket))
                return
            if other._error is not None and not is_join:
                if self._pop_claim(ticket):
                    self._complete(ticket, None, other._error, is_news=False)
                return
        if is_join:
            self._finish_join(ticket)
        else:
            self._enqueue(ticket)

    def _end_if_lost(self, ticket: TransferTicket[Any]) -> bool:
        """End a ticket that nobody will: Ctrl-C cut short who was about to queue, cancel or (seeded mode) run it.

        Without an error: whoever made it has had his. Always False where a thread that goes on is at it.
        """
        me = threading.get_ident()
        if ticket._claim:
            # It is listed as unfinished before it leaves its inbox, so that is asked last too.
            is_held = ticket in self._unfinished or any(ticket in snapshot(lane.inbox) for lane in self.lanes.values())
            is_lost = not (is_held or ticket in self._unfinished)
        elif ticket in self._spawning:
            thread, finish = self._spawning[ticket]
            is_lost = thread == me and not self.loop_thread.holds(finish)
        elif self._debug_taken.get(ticket) == me and not self._debug_depth.value:
            is_lost = True
            del self._debug_taken[ticket]
            self.lanes[ticket.lane].finish(ticket, 0.0)
        else:
            is_running = ticket.lane in self.lanes and ticket in self.lanes[ticket.lane].running
            is_lost = self._at_work.get(ticket) == me and not is_running
        if not is_lost or ticket._done:
            return False
        self._spawning.pop(ticket, None)
        ticket._claim.clear()
        self._complete(ticket, None, None)
        return True

    def when_all(
        self,
        tickets: Sequence[TransferTicket[Any]],
        label: str,
        finish: Callable[[], T] | None,
        otherwise: Callable[[BaseException], T] | None,
        nbytes: int,
        may_fail: bool,
    ) -> TransferTicket[T]:
        self.check_process()
        if not all(isinstance(one, TransferTicket) for one in tickets):
            raise ValueError(f"{label}: when_all takes tickets of this scheduler only")
        ticket: TransferTicket[T] = TransferTicket(self, _JOIN, finish, label, nbytes=nbytes, may_fail=may_fail)
        ticket._otherwise = otherwise
        ticket._after = tuple(tickets)
        pending = next((one for one in tickets if not one._done), None)
        if pending is None:
            self._advance(ticket)
        else:
            self._enqueue(ticket, self.lanes.get(pending.lane))
        return ticket

    def _finish_join(self, ticket: TransferTicket[Any]) -> None:
        """All it waits for has ended, so none of them touches memory any more, whether they went well or not."""
        error = next((other._error for other in ticket._after if other._error is not None), None)
        if not self._pop_claim(ticket):
            return
        ticket._after = ()
        value = None
        try:
            if error is None:
                value = ticket._work() if ticket._work is not None else None
            elif ticket._otherwise is not None:
                value, error = ticket._otherwise(error), None
        except BaseException as failure:
            error = failure
        ticket._otherwise = None
        self._complete(ticket, value, error, is_news=not isinstance(error, WorkCancelledError))

    def _enqueue(self, ticket: TransferTicket[Any], lane: Lane | None = None) -> None:
        """Hand a ticket to its lane's threads; one that has no lane, to those of ``lane`` or of any."""
        lane = self.lanes.get(ticket.lane) or lane or next(iter(self.lanes.values()))
        lane.inbox.append(ticket)  # until here it was never submitted, from here on it is
        self._call(lane)
        if self._closing:  # it began after we looked
            self._serve_aside([ticket])

    def _call(self, lane: Lane) -> None:
        """Have a thread of the lane look at what there is to do. Does no harm if it is cut short or called too often.

        A thread counts itself as idle before it looks for the last time, and we queue before we ask whether one is.
        """
        if lane.num_idle:
            lane.bell.ring()
        elif lane.num_threads < lane.spec.concurrency and self._rng is None and not self._closing:
            self._ask_for_thread(lane, lane.num_threads + 1)

    def _ask_for_thread(self, lane: Lane, num_wanted: int) -> None:
        now_s = time.monotonic()
        if now_s - lane.thread_asked_s < _ASK_AGAIN_S:
            return
        lane.thread_asked_s = now_s
        try:
            # By a thread: `Thread.start` is no single step, and Ctrl-C may strike the main thread in it.
            _thread.start_new_thread(self._start_threads, (lane, num_wanted))
        except RuntimeError as error:
            self._refuse_thread(lane, error)

    def expedite(self, ticket: TransferTicket[Any]) -> None:
        if ticket._done or ticket._rank[0] == 0:
            return
        for other in ticket._after:
            if isinstance(other, TransferTicket):
                self.expedite(other)
        ticket._rank = (0, *ticket._rank[1:])
        if ticket._claim and ticket.lane in self.lanes and not ticket._after:
            self._enqueue(ticket)  # the entry with the old rank is skipped when it comes up

    def cancel(self, ticket: TransferTicket[Any]) -> bool:
        if ticket.lane == _JOIN and not ticket._done:
            # It ends when the last of its works has: until then they use its memory.
            return any([self.cancel(other) for other in ticket._after if isinstance(other, TransferTicket)])
        if not self._pop_claim(ticket):
            return False
        error = WorkCancelledError(f"{ticket.label} on lane {ticket.lane} was cancelled.")
        self._complete(ticket, None, error, is_news=False)
        return True

    def _pop_claim(self, ticket: TransferTicket[Any]) -> bool:
        """Take the ticket, to complete it at once."""
        if not ticket._claim:
            return False
        self._at_work[ticket] = threading.get_ident()  # first: see `_end_if_lost`
        try:
            ticket._claim.pop()
        except IndexError:
            self._at_work.pop(ticket, None)
            return False
        return True

    def _serve_locked(self, lane: Lane) -> list[TransferTicket[Any]]:
        """Queue what is in the lane's inbox. Returns what has to be advanced or cancelled without the lock."""
        aside = []
        while lane.inbox:
            ticket = lane.inbox[0]
            self._unfinished.add(ticket)  # before it leaves the inbox: whoever looks finds it in one of them
            if ticket._done:
                self._unfinished.discard(ticket)
            elif self._closing or not self._is_ready(ticket):
                aside.append(ticket)
            elif self._rng is not None:
                self._debug_ready.append(ticket)
            else:
                lane.push(ticket)
            lane.inbox.popleft()
        return aside

    @staticmethod
    def _is_ready(ticket: TransferTicket[Any]) -> bool:
        """Whether nothing that has callbacks is to be waited for; what has none is the lane thread's to wait for."""
        if ticket.lane == _JOIN:
            return False
        if ticket._after:
            mine = [other for other in ticket._after if isinstance(other, TransferTicket)]
            if not all(other._done and other._error is None for other in mine):
                return False
            ticket._foreign = tuple(other for other in ticket._after if not isinstance(other, TransferTicket))
            ticket._after = ()
        return True

    def _serve_aside(self, aside: list[TransferTicket[Any]]) -> None:
        for ticket in aside:
            if self._closing:
                self.cancel(ticket)
            if not self._closing or ticket.lane == _JOIN:
                self._advance(ticket)

    def _start_threads(self, lane: Lane, num_wanted: int) -> None:
        """Runs in a thread of its own: start lane threads until there are ``num_wanted``."""
        self.supervise()
        while True:
            with self._lock:
                is_wanted = lane.num_threads < num_wanted
                lane.num_threads += is_wanted
            lane.thread_asked_s = 0.0
            if not is_wanted:
                return
            thread = threading.Thread(
                target=self._lane_thread_guarded,
                args=(lane,),
                name=f"{self.name}-{lane.spec.name}-{next(lane.thread_index)}",
                daemon=True,
            )
            self._threads[thread] = Latch()  # listed, then asks whether we close: `close` does it the other way round
            failure = None
            try:
                if not self._closing:
                    thread.start()
                    continue
            except RuntimeError as error:
                failure = error
            del self._threads[thread]
            with self._lock:
                lane.num_threads -= 1
            if failure is not None:
                self._refuse_thread(lane, failure)
            return

    def _refuse_thread(self, lane: Lane, error: RuntimeError) -> None:
        # The limit on threads, or the interpreter is going down.
        failure = TierOffloadError(
            f"lane {lane.spec.name}: a thread could not be started ({error}). "
            f"Raise the limit on processes (ulimit -u), or lower io_threads."
        )
        failure.__cause__ = error
        self.record_error(failure)

    def start_threads(self) -> None:
        self.check_process()
        self.raise_pending_error()
        if self._rng is not None:
            return
        for lane in self.lanes.values():
            while lane.num_threads < lane.spec.concurrency and not self._closing:
                self._ask_for_thread(lane, lane.spec.concurrency)
                self.raise_pending_error()
                time.sleep(0.0005)

    # --- running ----------------------------------------------------------------------------------------------------

    def _lane_thread_guarded(self, lane: Lane) -> None:
        try:
            self._lane_thread(lane)
        except BaseException as error:  # not of a work (`_run` keeps those): a fault of ours, which must not be silent
            failure = TierOffloadError(f"a thread of lane {lane.spec.name} died: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.record_error(failure)
        finally:
            self._threads[threading.current_thread()].set()

    def _lane_thread(self, lane: Lane) -> None:
        ticket: TransferTicket[Any] | None = None
        is_idle = False
        busy_s = 0.0
        while True:
            with self._lock:
                lane.num_idle -= is_idle
                if ticket is not None:
                    lane.finish(ticket, busy_s)
                aside = self._serve_locked(lane)
                # A claimed work must not stand behind what comes aside, which may take its time or wait for that work.
                ticket = lane.choose() if not aside else None
                is_idle = ticket is None and not aside
                is_last = is_idle and self._closing
                if is_last:
                    lane.num_threads -= 1
                    is_idle = False
                lane.num_idle += is_idle
                has_more = bool(lane.heap)
            if aside and has_more:
                self._call(lane)
            self._serve_aside(aside)
            if is_last:
                return
            if ticket is not None:
                if has_more:
                    self._call(lane)  # the bound on bytes may let several small works in at once
                busy_s = self._run(ticket)
            elif is_idle and not lane.inbox and not self._closing:  # who queues or closes now sees us idle, and rings
                lane.bell.wait()

    def _run(self, ticket: TransferTicket[Any]) -> float:
        """Run a claimed ticket's work in this thread; seconds it took."""
        started_s = ticket._started_s = time.perf_counter()
        value, failure = None, None
        try:
            for other in ticket._foreign:
                other.wait()
            work = ticket._work
            value = work() if work is not None else None
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: they belong in the training thread
            failure = error
        work = None  # the work's memory must be free of us before anybody hears that it is complete
        finished_s = time.perf_counter()
        if self._observer is not None:  # before anybody hears that it is complete: who has waited finds its record
            record = WorkRecord(
                ticket.lane,
                ticket.label,
                ticket.nbytes,
                ticket._submitted_s,
                started_s,
                finished_s,
                threading.current_thread().name,
                failure is not None,
            )
            try:
                self._observer(record)
            except BaseException as error:
                self.record_error(error)
        self._complete(ticket, value, failure)
        return finished_s - started_s

    def _complete(
        self, ticket: TransferTicket[Any], value: Any, error: BaseException | None, *, is_news: bool = True
    ) -> None:
        ticket._work = None
        ticket._foreign = ()
        ticket._value = value
        ticket._error = error
        if error is not None and is_news and not ticket._may_fail:
            self.record_error(error)
        ticket._done = True
        self._num_ended += 1
        self._unfinished.discard(ticket)
        self._at_work.pop(ticket, None)
        ticket._run_callbacks()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wait_for(self, ticket: TransferTicket[Any], timeout_s: float | None) -> None:
        """Return when the ticket is done or a first error is pending; raise past the deadline."""
        self.check_process()
        if threading.get_ident() == self.loop_thread.ident:
            raise TierOffloadError(f"{ticket.label}: a coroutine must `await` the ticket; waiting would stop the loop.")
        if self._rng is not None:
            self.debug_finish(ticket)
        self._park(ticket, timeout_s, ends_on_error=True)

    def _park(self, ticket: TransferTicket[Any], timeout_s: float | None, *, ends_on_error: bool) -> None:
        """Sleep until the ticket is done. [Note: time-outs]"""
        if ticket._done:
            return
        started_s = still_s = time.monotonic()
        is_patient = timeout_s is None
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        num_ended = self._num_ended
        look_s = _FIRST_LOOK_S
        sleeper = threading.Lock()  # its timed acquire is interrupted by Ctrl-C in the main thread
        sleeper.acquire()

        def wake(_: object) -> None:
            # Two wakers may meet (complete and error); the second release of an unlocked lock is no news.
            try:
                sleeper.release()
            except RuntimeError:
                return

        ticket._callbacks.append(wake)
        if ends_on_error:
            self._parked.add(wake)
        try:
            while not ticket._done and not (ends_on_error and self.pending_error is not None):
                waited_s = time.monotonic() - started_s
                if waited_s >= look_s:
                    look_s += _POLL_S
                    self._look_after(ticket)
                    continue
                if is_patient and num_ended != self._num_ended:
                    num_ended, still_s = self._num_ended, time.monotonic()
                if time.monotonic() - still_s >= timeout_s:
                    if timeout_s >= self.timeout_s:  # not so for a caller that only looks in now and then
                        self._had_timeout = True
                    raise TransferTimeoutError(self._timeout_message(ticket, waited_s))
                sleeper.acquire(timeout=max(0.0, min(look_s, still_s - started_s + timeout_s) - waited_s))
        finally:
            self._parked.discard(wake)
            try:
                ticket._callbacks.remove(wake)
            except (ValueError, IndexError):
                pass  # it was called, or others are being called right now; a late call does no harm

    def _look_after(self, ticket: TransferTicket[Any]) -> None:
        """Make up for what Ctrl-C may have cut short on the way of the ticket and of those that it waits for."""
        self._call_all()
        for each in (ticket, *self._pending()):
            self._end_if_lost(each)
            if each._claim and each._after and all(other.done() for other in each._after):
                self._advance(each)  # the callback that was to do it
        while self._rng is not None and self._debug_run_one():
            pass

    def _call_all(self) -> None:
        """Wherever something is queued, have a thread look: the call that was due may have been cut short."""
        for lane in self.lanes.values():
            if lane.inbox or lane.heap:
                self._call(lane)
        self.loop_thread.call()

    def _pending(self) -> list[TransferTicket[Any]]:
        # The inboxes are read first: see `_serve_locked`.
        queued = [ticket for lane in self.lanes.values() for ticket in snapshot(lane.inbox)]
        pending = [*self._unfinished, *queued]
        for ticket in pending:
            if ticket._done:
                self._unfinished.discard(ticket)
        return [ticket for ticket in pending if not ticket._done]

    def _timeout_message(self, ticket: TransferTicket[Any], waited_s: float) -> str:
        size = f" ({format_nbytes(ticket.nbytes)})" if ticket.nbytes else ""
        return (
            f"{ticket.label}{size} on lane {ticket.lane} was not complete after {waited_s:.1f} s: it is "
            f"{ticket._state()}{self._claimed_by(ticket)}; awaited by thread {threading.current_thread().name}. "
            f"{self.describe()}. "
            f"Is the device under the lane stuck or very slow? Raise io_timeout_s if it is only slow."
        )

    def _claimed_by(self, ticket: TransferTicket[Any]) -> str:
        """Who has claimed a work that has not begun, or is finishing what others did, and where that thread stands."""
        for each in (ticket, *(one for one in ticket._after if isinstance(one, TransferTicket))):
            lane = self.lanes.get(each.lane)
            ident = lane.running.get(each) if lane is not None else self._at_work.get(each)
            if ident is None or each._done or each._started_s:
                continue
            name = next((one.name for one in threading.enumerate() if one.ident == ident), "that has ended")
            frame = sys._current_frames().get(ident)
            where = ""
            if frame is not None:
                where = f", which is in {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
            return f" ({each.label} was claimed by thread {name}{where})"
        return ""

    def abandon(self, tickets: Sequence[TransferTicket[Any]]) -> None:
        for ticket in tickets:
            self.cancel(ticket)
        for ticket in tickets:
            self._park(ticket, None, ends_on_error=False)

    def settle(self, timeout_s: float | None) -> None:
        self.check_process()
        if self._rng is not None:
            while self._debug_run_one():
                pass
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while pending := self._pending():
            for ticket in pending:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                self._park(ticket, left_s, ends_on_error=False)

    def drain(self, timeout_s: float | None) -> None:
        self.settle(timeout_s)
        self.raise_pending_error()

    # --- errors -----------------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        if os.getpid() != self.pid:
            raise UnsupportedError(
                f"the scheduler belongs to process {self.pid}; its threads do not exist in the forked child "
                f"{os.getpid()}. Do not touch an offloaded model in a worker process."
            )

    def record_error(self, error: BaseException) -> None:
        with self._error_lock:
            # A piece's error is its transfer's too, once all pieces have ended: cleared meanwhile, it is no news.
            if self.pending_error is not None or (self._cleared is not None and self._cleared() is error):
                return
            self._pending_traceback = error.__traceback__
            self.error_was_raised = False
            self.pending_error = error
        for wake in list(self._parked):
            wake(None)

    def raise_pending_error(self) -> None:
        error = self.pending_error
        if error is not None:
            if not self.owns_this_thread():  # raised in a lane thread, nobody has seen it yet
                self.error_was_raised = True
            # From the original traceback each time: raising one object again and again would pile frames up.
            raise error.with_traceback(self._pending_traceback)

    def owns_this_thread(self) -> bool:
        return threading.current_thread() in self._threads

    def clear_pending_error(self) -> BaseException | None:
        with self._error_lock:
            error, self.pending_error, self._pending_traceback = self.pending_error, None, None
            # Weakly, since an error holds frames and these hold memory. Errors that Python makes itself cannot be.
            self._cleared = weakref.ref(error) if isinstance(error, TierOffloadError) else None
        return error

    def _loop_died(self, cause: BaseException) -> None:
        failure = TierOffloadError(f"{self.loop_thread.name} died: {type(cause).__name__}: {cause}")
        failure.__cause__ = cause
        self.record_error(failure)

    def describe(self) -> str:
        return "; ".join(lane.describe() for lane in self.lanes.values())

    # --- supervision ------------------------------------------------------------------------------------------------

    def supervise(self) -> None:
        """Start the loop and its watchdog, once."""
        with self._lock:
            is_first = not self._supervised and self._rng is None and not self._closing
            self._supervised = self._supervised or is_first
        if is_first:
            self.loop_thread.start()
            self.loop_thread.spawn(self._watchdog, self._watchdog_ended)

    def _watchdog_ended(self, _: object, error: BaseException | None) -> None:
        # A cancelled watchdog is a loop that ends: `_loop_died` tells why.
        if error is not None and not self._closing and not isinstance(error.__cause__, asyncio.CancelledError):
            self.record_error(error)

    async def _watchdog(self) -> None:
        """A work that hangs though nobody waits for it is an error too, within its lane's time-out."""
        limits_s = [lane.timeout_s for lane in self.lanes.values() if lane.timeout_s < math.inf]
        if not limits_s:
            return
        while True:
            await asyncio.sleep(min(1.0, min(limits_s) / 4))
            self._call_all()
            now_s = time.perf_counter()
            for lane in self.lanes.values():
                for ticket in list(lane.running):
                    # _started_s is 0 between claim and start.
                    if not ticket._done and ticket._started_s and now_s - ticket._started_s > lane.timeout_s:
                        self._had_timeout = True
                        message = self._timeout_message(ticket, now_s - ticket._started_s)
                        self.record_error(TransferTimeoutError(message))

    # --- the seeded mode --------------------------------------------------------------------------------------------

    def _debug_at_submit(self) -> None:
        with self._lock:
            rng = self._rng
            is_drawn = rng is not None and rng.random() < self._debug_submit_run_frac
        if is_drawn and self._debug_depth.value < 4:
            self._debug_run_one()

    def _debug_serve(self) -> None:
        while any(lane.inbox for lane in self.lanes.values()):
            for lane in self.lanes.values():
                with self._lock:
                    aside = self._serve_locked(lane)
                self._serve_aside(aside)

    def _debug_run_one(self) -> bool:
        """Run a random ready work in this thread. False when none is ready."""
        while True:
            self._debug_serve()
            with self._lock:
                if self._rng is None or not self._debug_ready:
                    return False
                index = self._rng.randrange(len(self._debug_ready))
                ready = self._debug_ready
                ready[index], ready[-1] = ready[-1], ready[index]
                ticket = ready[-1]
                if not ticket._claim:
                    ready.pop()
                    continue
                self._debug_taken[ticket] = threading.get_ident()
                is_mine = self.lanes[ticket.lane]._claim(ticket)
                if not is_mine:
                    del self._debug_taken[ticket]
                ready.pop()
            if is_mine:
                break
        depth = self._debug_depth.value
        self._debug_depth.value = depth + 1
        try:
            busy_s = self._run(ticket)
        finally:
            self._debug_depth.value = depth
        with self._lock:
            if self._debug_taken.pop(ticket, None) is not None:
                self.lanes[ticket.lane].finish(ticket, busy_s)
        self._debug_serve()
        return True

    def debug_finish(self, ticket: TransferTicket[Any]) -> None:
        """In the seeded mode: run random ready works until this one is done. Elsewhere: nothing."""
        if self._rng is None:
            return
        while not ticket._done:
            if self._debug_run_one():
                continue
            if ticket._done or self.pending_error is not None:
                return
            self._look_after(ticket)
            if ticket._done:
                return
            if ticket._started_s or any(other._started_s for other in list(self._unfinished)):
                return  # another thread or a coroutine is at it: wait as usual
            raise TransferTimeoutError(
                f"{ticket.label} on lane {ticket.lane} would never complete: it is {ticket._state()}, and nothing is "
                f"left to run. {self.describe()}."
            )

    # --- closing ----------------------------------------------------------------------------------------------------

    def begin_close(self) -> None:
        """Cancel what is queued and tell every thread to end. Does not wait; callable from a finaliser."""
        if os.getpid() != self.pid:
            return
        self._closing = True
        atexit.unregister(self._exit_hook)
        self._serve_aside(self._pending())
        self._ring_all()
        self.loop_thread.begin_close()

    def _ring_all(self) -> None:
        for lane in self.lanes.values():
            for _ in range(lane.num_idle):
                lane.bell.ring()

    def close(self, timeout_s: float | None) -> None:
        if os.getpid() != self.pid:
            return
        self.begin_close()
        if timeout_s is None:
            # After a time-out something is stuck for longer than it may be already.
            timeout_s = min(1.0, self.timeout_s) if self._had_timeout else self.timeout_s
        deadline_s = time.monotonic() + timeout_s
        me = threading.current_thread()
        stuck: list[str] = []
        if not self.loop_thread.close(max(0.0, deadline_s - time.monotonic())) and me.ident != self.loop_thread.ident:
            stuck.append(self.loop_thread.name)
        while left := [(thread, ended) for thread, ended in snapshot_items(self._threads) if thread is not me]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                stuck.extend(thread.name for thread, _ in left)
                break
            self._ring_all()  # one may have gone to sleep between begin_close and now
            thread, ended = left[0]
            if ended.wait(min(left_s, _POLL_S)):
                thread.join()
                self._threads.pop(thread, None)
        for ticket in self._pending():
            self._end_if_lost(ticket)
        if self.pending_error is not None and not self.error_was_raised:
            self.raise_pending_error()
        if stuck:
            raise TransferTimeoutError(
                f"the scheduler could not close within {timeout_s:.1f} s: {', '.join(sorted(stuck))} still run. "
                f"{self.describe()}. What they use stays allocated until they end. Is the device stuck?"
            )


def _close_at_exit(core_ref: weakref.ref[_Core]) -> None:
    core = core_ref()
    if core is None or os.getpid() != core.pid:
        return
    try:
        core.close(min(core.timeout_s, _EXIT_WAIT_S))
    except Exception as error:
        _log.error("at exit: %s: %s", type(error).__name__, error)


class Scheduler:
    """Lanes of bounded threads, one asyncio loop beside them, tickets.

    Args:
        lanes: their names and bounds.
        timeout_s: the default deadline of every wait, and of every running work (``io_timeout_s``).
        debug_seed: the seeded mode. No lane threads exist: works run in the threads that submit and wait, in an order
            that is random among those that are ready (priorities are ignored, ``after`` is not), the same for the same
            seed. A work completes only when somebody waits, or, with probability ``debug_submit_run_frac``, at a
            later submit. So a missing ``after`` or a missing wait shows as a wrong number, without sleeping. Do not
            submit while holding a lock that a work takes, or set the fraction to 0.
        observer: called with a `WorkRecord` after each work, in the thread that ran it. For traces.
        name: prefix of the thread names: ``<name>-loop``, ``<name>-<lane>-<n>``.

    Nothing is started before the first submit. Threads are daemons and are joined by ``close``, which also runs at
    interpreter exit. A scheduler is bound to the process that made it.
    """

    def __init__(
        self,
        lanes: Sequence[LaneSpec],
        *,
        timeout_s: float,
        debug_seed: int | None = None,
        debug_submit_run_frac: float = 0.25,
        observer: Callable[[WorkRecord], None] | None = None,
        name: str = "tieroffload",
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be more than 0")
        self._core = _Core(lanes, timeout_s, debug_seed, debug_submit_run_frac, observer, name)
        finalizer = weakref.finalize(self, _Core.begin_close, self._core)
        finalizer.atexit = False  # the core's own exit hook waits for what is running

    @property
    def timeout_s(self) -> float:
        return self._core.timeout_s

    @property
    def lane_names(self) -> tuple[str, ...]:
        return tuple(self._core.lanes)

    @property
    def closed(self) -> bool:
        return self._core._closing

    def start(self) -> None:
        """Start the loop and every lane's threads now, so that the first step does not pay for it. Optional."""
        self._core.start_threads()

    def submit(
        self,
        lane: str,
        work: Callable[[], T],
        *,
        label: str,
        priority: int = 0,
        nbytes: int = 0,
        urgent: bool = False,
        after: Sequence[Ticket] = (),
        owner: str | None = None,
        may_fail: bool = False,
        announce: Callable[[TransferTicket[T]], object] | None = None,
    ) -> TransferTicket[T]:
        """Queue ``work`` on ``lane`` and return at once. Any thread; a lane's own, autograd's and finalisers too.

        Lower ``priority`` first, first come first served among equals, ``urgent`` ahead of all others. It becomes
        ready when every ticket of ``after`` is complete and fails with the error of one that failed. ``label`` names
        shard, operation and file in errors. ``owner`` (default: the label) is who `LaneSpec.max_share_frac` counts
        for. With ``may_fail`` an error stays with this ticket and what comes after it. [Note: first error]
        ``announce`` is called with the ticket before it is queued, for who must know of every work that may run: Ctrl-C
        can keep what ``submit`` returns from arriving.
        """
        return self._core.submit(lane, work, label, priority, nbytes, urgent, after, owner, may_fail, announce)

    def spawn(
        self, make: Callable[[], Coroutine[Any, Any, T]], *, label: str, may_fail: bool = False
    ) -> TransferTicket[T]:
        """Run the coroutine ``make()`` on the loop, as a child of its task group. It may ``await`` tickets.

        It must not block; blocking calls belong on a lane. Still running at ``close``, it is cancelled. In the
        coroutine, being cancelled does not mean that the work it awaited has ended. [Note: an error is not an end]
        """
        return self._core.spawn(make, label, may_fail)

    def when_all(
        self,
        tickets: Sequence[TransferTicket[Any]],
        *,
        label: str,
        finish: Callable[[], T] | None = None,
        otherwise: Callable[[BaseException], T] | None = None,
        nbytes: int = 0,
        may_fail: bool = False,
    ) -> TransferTicket[T]:
        """A ticket that completes when every one of ``tickets`` has *ended*, with what ``finish()`` returns.

        If one failed, it fails with the first error, unless ``otherwise(error)`` returns; that is for tickets that were
        submitted with ``may_fail``. Both are called in the thread that completes the last of them and must be short.
        """
        return self._core.when_all(tickets, label, finish, otherwise, nbytes, may_fail)

    def expedite(self, ticket: TransferTicket[Any]) -> None:
        """Make a queued work, and what it waits for, urgent: its next use is now. No effect once it runs."""
        self._core.expedite(ticket)

    def cancel(self, ticket: TransferTicket[Any]) -> bool:
        """Cancel a work that has not started; False when it has. Its waiters get a ``WorkCancelledError``.

        Of a `when_all` ticket, those of its works that have not started are cancelled; it ends when the others have.
        """
        return self._core.cancel(ticket)

    def abandon(self, tickets: Sequence[TransferTicket[Any]]) -> None:
        """Cancel what has not started and wait for the rest to end, whatever its outcome: then its memory is free.

        For who has submitted a part of something and cannot submit the rest. Raises ``TransferTimeoutError`` only.
        """
        self._core.abandon(tickets)

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is queued or running, well or badly: no error but ``TransferTimeoutError``."""
        self._core.settle(timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is queued or running, then raise the first error if there is one."""
        self._core.drain(timeout_s)

    def raise_pending_error(self) -> None:
        """Raise the first error of any work, if there is one. A few nanoseconds when there is none."""
        self._core.raise_pending_error()

    @property
    def failed(self) -> bool:
        """Whether there is a first error that was not cleared."""
        return self._core.pending_error is not None

    @property
    def seen_error(self) -> BaseException | None:
        """The first error, if it has been raised to somebody outside of the scheduler's own threads already."""
        return self._core.pending_error if self._core.error_was_raised else None

    def clear_pending_error(self) -> BaseException | None:
        """Forget the first error and return it: the way back after the caller has put its own state in order."""
        return self._core.clear_pending_error()

    def owns_this_thread(self) -> bool:
        """Whether the caller is a lane's thread, that is, runs inside a work."""
        return self._core.owns_this_thread()

    def mover(self, lane: str) -> LaneMover:
        """A ``Mover`` (see concepts.py) that submits to ``lane``."""
        return LaneMover(self, lane)

    def report(self) -> dict[str, dict[str, int | float]]:
        """Per lane: ``num_done``, ``done_nbytes``, ``busy_s``, ``num_queued``, ``num_running``, ``running_nbytes``."""
        return {
            name: {
                "num_done": lane.num_done,
                "done_nbytes": lane.done_nbytes,
                "busy_s": lane.busy_s,
                "num_queued": lane.num_queued(),
                "num_running": len(lane.running),
                "running_nbytes": lane.running_nbytes,
            }
            for name, lane in self._core.lanes.items()
        }

    def describe(self) -> str:
        """One line per lane for people: what runs, since when, what waits."""
        return self._core.describe()

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel what is queued, wait for what is running, end every thread. Idempotent.

        Raises the first error if nobody has seen it yet, or ``TransferTimeoutError`` when something still runs after
        ``timeout_s`` (default: the scheduler's; 1 s after an earlier time-out): then memory must not be freed.
        """
        self._core.close(timeout_s)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.close()
            return
        try:
            self.close()
        except Exception as error:  # the first error is under way already and must not be masked
            _log.debug("closing the scheduler: %s", error)

    def __repr__(self) -> str:
        return f"Scheduler({self._core.describe()})"


class LaneMover:
    """A ``Mover`` whose link is one lane of a scheduler."""

    def __init__(self, scheduler: Scheduler, lane: str) -> None:
        self._scheduler = scheduler
        self._lane = lane

    def submit(self, transfer: Transfer, work: Callable[[], T]) -> TransferTicket[T]:
        return self._scheduler.submit(
            self._lane,
            work,
            label=f"{transfer.link.name} {transfer.shard}",
            priority=transfer.priority,
            nbytes=transfer.nbytes,
            owner=transfer.shard,
        )


class LaneExecutor(concurrent.futures.Executor):
    """A lane as an executor for ``loop.run_in_executor`` and aiofiles' wrappers.

    Unlike a ``ThreadPoolExecutor`` it goes on working while a non-main thread trains after the main thread has ended.
    """

    def __init__(self, scheduler: Scheduler, lane: str, *, label: str = "executor call") -> None:
        self._scheduler = scheduler
        self._lane = lane
        self._label = label

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()
        ticket = self._scheduler.submit(
            self._lane, functools.partial(fn, *args, **kwargs), label=self._label, may_fail=True
        )

        def finish(done: TransferTicket[T]) -> None:
            if done._error is not None:
                future.set_exception(done._error)
            else:
                future.set_result(done._value)

        ticket.add_done_callback(finish)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: the lane belongs to the scheduler."""
