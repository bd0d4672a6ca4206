"""The scheduler: order, bounds, no error lost, no hang, no thread left (CON-01, CON-04, CON-05, CON-07)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from striking import Strike

from lightning_tieroffload import concepts
from lightning_tieroffload.errors import TierOffloadError, TransferTimeoutError, UnsupportedError
from lightning_tieroffload.io.scheduler import (
    LaneExecutor,
    LaneSpec,
    Scheduler,
    TransferTicket,
    WorkCancelledError,
    WorkRecord,
)

REPO = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [
        thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("tieroffload")
    ]
    assert left == []


class Gate:
    """A work that tells when it has started and ends when it is let go."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.started.set()
        if not self.open.wait(30):
            raise AssertionError("nobody opened the gate")
        return "through"


def one_lane(**kwargs: object) -> Scheduler:
    return Scheduler([LaneSpec(name="read", **kwargs)], timeout_s=20)  # type: ignore[arg-type]


# --- order and bounds ---------------------------------------------------------------------------------------------


def test_result_callbacks_and_protocol() -> None:
    with one_lane() as scheduler:
        seen: list[object] = []
        gate = Gate()
        ticket = scheduler.submit("read", gate, label="read layers.0:param")
        ticket.add_done_callback(seen.append)
        assert isinstance(ticket, concepts.Ticket)
        assert not ticket.done()
        with pytest.raises(TierOffloadError, match=r"layers\.0:param.*not complete"):
            _ = ticket.result
        gate.open.set()
        assert ticket.wait() == ticket.wait() == ticket.result == "through"
        assert ticket.done()
        scheduler.drain()
        assert seen == [ticket]
        ticket.add_done_callback(seen.append)
        assert seen == [ticket, ticket]


def test_nothing_is_started_before_the_first_submit() -> None:
    before = threading.active_count()
    scheduler = Scheduler([LaneSpec(name="read", concurrency=4)], timeout_s=5)
    assert threading.active_count() == before
    scheduler.submit("read", int, label="x").wait()
    names = {thread.name for thread in threading.enumerate()}
    assert {"tieroffload-loop", "tieroffload-read-0"} <= names
    assert "tieroffload-read-3" not in names
    scheduler.start()
    assert {f"tieroffload-read-{i}" for i in range(4)} <= {thread.name for thread in threading.enumerate()}
    scheduler.close()
    assert threading.active_count() == before


def test_lower_priority_number_first_fifo_among_equals_urgent_ahead() -> None:
    with one_lane() as scheduler:
        ran: list[str] = []
        gate = Gate()
        scheduler.submit("read", gate, label="gate")
        assert gate.started.wait(10)
        for name, priority, urgent in [
            ("b1", 2, False), ("b2", 2, False), ("a1", 1, False), ("a2", 1, False), ("u2", 9, True), ("u1", 3, True),
        ]:  # fmt: skip
            scheduler.submit("read", lambda name=name: ran.append(name), label=name, priority=priority, urgent=urgent)
        gate.open.set()
        scheduler.drain()
        assert ran == ["u1", "u2", "a1", "a2", "b1", "b2"]


def test_expedite_takes_what_it_waits_for_along_and_cancel_removes() -> None:
    scheduler = Scheduler([LaneSpec(name="read"), LaneSpec(name="update")], timeout_s=10)
    with scheduler:
        ran: list[str] = []
        gate = Gate()
        scheduler.submit("read", gate, label="gate")
        assert gate.started.wait(10)
        scheduler.submit("read", lambda: ran.append("first"), label="first")
        dropped = scheduler.submit("read", lambda: ran.append("dropped"), label="dropped")
        needed = scheduler.submit("read", lambda: ran.append("needed"), label="needed", priority=7)
        update = scheduler.submit("update", lambda: ran.append("update"), label="update", after=[needed])
        scheduler.expedite(update)
        assert scheduler.cancel(dropped)
        assert not scheduler.cancel(dropped)
        gate.open.set()
        update.wait()
        scheduler.drain()
        assert ran.index("needed") == 0
        assert "dropped" not in ran
        with pytest.raises(TierOffloadError, match="dropped on lane read was cancelled"):
            dropped.wait()
        assert not scheduler.cancel(update)
        scheduler.expedite(update)
    scheduler.raise_pending_error()  # a cancellation is no fault


def test_concurrency_is_reached_and_not_passed() -> None:
    with one_lane(concurrency=3) as scheduler:
        lock = threading.Lock()
        now, peak = 0, 0
        together = threading.Barrier(3, timeout=20)

        def work(meets: bool) -> None:
            nonlocal now, peak
            with lock:
                now += 1
                peak = max(peak, now)
            if meets:
                together.wait()
            with lock:
                now -= 1

        for i in range(60):
            scheduler.submit("read", lambda i=i: work(i < 3), label=str(i))
        scheduler.drain()
        assert peak == 3


def test_back_pressure_bounds_bytes_in_flight_in_order() -> None:
    with one_lane(concurrency=4, max_inflight_nbytes=100) as scheduler:
        gates = [Gate() for _ in range(5)]
        for gate, nbytes in zip(gates, (60, 30, 30, 500, 1), strict=True):
            scheduler.submit("read", gate, label=f"{nbytes}", nbytes=nbytes)
        assert gates[0].started.wait(10)
        assert gates[1].started.wait(10)
        report = scheduler.report()["read"]
        assert (report["running_nbytes"], report["num_running"], report["num_queued"]) == (90, 2, 3)
        gates[0].open.set()
        assert gates[2].started.wait(10)
        assert not gates[3].started.is_set()
        gates[1].open.set()
        gates[2].open.set()
        assert gates[3].started.wait(10)  # larger than the bound: alone
        assert not gates[4].started.is_set()
        gates[3].open.set()
        gates[4].open.set()
        scheduler.drain()
        assert scheduler.report()["read"]["done_nbytes"] == 621


def test_one_owner_holds_its_share_only_while_others_wait() -> None:
    with one_lane(concurrency=4, max_share_frac=0.5) as scheduler:
        large = [Gate() for _ in range(6)]
        small = [Gate() for _ in range(2)]
        for gate in large[:2]:
            scheduler.submit("read", gate, label="embed piece", owner="embed")
        assert all(gate.started.wait(10) for gate in large[:2])
        # Hand the rest in while both free threads are held back, so that all of them are queued when one is chosen.
        with scheduler._core._lock:
            for gate in large[2:]:
                scheduler.submit("read", gate, label="embed piece", owner="embed")
            for gate in small:
                scheduler.submit("read", gate, label="layer piece", owner="layers.0", priority=5)
        assert all(gate.started.wait(10) for gate in small)
        assert not any(gate.started.is_set() for gate in large[2:])
        for gate in small:
            gate.open.set()
        assert all(gate.started.wait(10) for gate in large[2:4])  # alone, the owner may use the whole lane
        for gate in large:
            gate.open.set()
        scheduler.drain()


def test_after_waits_across_lanes_and_fails_with_the_cause() -> None:
    scheduler = Scheduler([LaneSpec(name="read"), LaneSpec(name="update")], timeout_s=10)
    gate = Gate()
    ran: list[str] = []
    read = scheduler.submit("read", gate, label="read")
    other = scheduler.submit("update", lambda: ran.append("other"), label="other")
    update = scheduler.submit("update", lambda: ran.append("update"), label="update", after=[other, read])
    other.wait()
    assert not update.done()
    gate.open.set()
    update.wait()
    assert ran == ["other", "update"]

    def fail() -> None:
        raise OSError(5, "no luck")

    bad = scheduler.submit("read", fail, label="bad", may_fail=True)
    next_one = scheduler.submit("update", lambda: ran.append("never"), label="next", after=[bad])
    last = scheduler.submit("read", lambda: ran.append("never"), label="last", after=[next_one])
    for ticket in (bad, next_one, last):
        with pytest.raises(OSError, match="no luck"):
            ticket.wait()
    scheduler.drain()  # may_fail: the scheduler itself is well
    assert scheduler.submit("read", lambda: 3, label="fine").wait() == 3
    scheduler.close()
    assert ran == ["other", "update"]


def test_after_accepts_tickets_of_others() -> None:
    """A copy's event has only done() and wait(): the lane waits for it before the work."""

    class Event:
        def __init__(self) -> None:
            self.waited = False

        def done(self) -> bool:
            return self.waited

        def wait(self, timeout_s: float | None = None) -> None:
            self.waited = True

    with one_lane() as scheduler:
        event = Event()
        assert scheduler.submit("read", lambda: event.waited, label="x", after=[event]).wait() is True


def test_works_may_submit_and_wait() -> None:
    scheduler = Scheduler([LaneSpec(name="a"), LaneSpec(name="b")], timeout_s=10)
    with scheduler:
        outer = scheduler.submit("a", lambda: scheduler.submit("b", lambda: 7, label="inner").wait() + 1, label="outer")
        assert outer.wait() == 8


def test_mover_and_executor_and_coroutines() -> None:
    """Coroutines on the loop await tickets and executor-wrapped calls; they are children of one task group."""
    scheduler = Scheduler([LaneSpec(name="read", concurrency=2), LaneSpec(name="files")], timeout_s=10)
    with scheduler:
        transfer = concepts.Transfer(shard="layers.0:param", link=concepts.READ, nbytes=10)
        mover: concepts.Mover = scheduler.mover("read")
        ticket = mover.submit(transfer, lambda: 41)
        assert ticket.label == "read layers.0:param"  # type: ignore[attr-defined]

        async def life_of_a_unit() -> tuple[int, str]:
            value = await ticket  # type: ignore[misc]
            more = await asyncio.gather(*(self_made() for self_made in [lambda i=i: wait_for(i) for i in range(5)]))
            loop = asyncio.get_running_loop()
            name = await loop.run_in_executor(executor, lambda: threading.current_thread().name)
            return value + sum(more), name

        async def wait_for(i: int) -> int:
            return await scheduler.submit("read", lambda: i, label=str(i))

        executor = LaneExecutor(scheduler, "files")
        assert scheduler.spawn(life_of_a_unit, label="unit layers.0").wait() == (51, "tieroffload-files-0")

        gate = Gate()

        async def blocks() -> None:
            scheduler.submit("files", gate, label="g").wait(0.01)

        gateless = scheduler.spawn(blocks, label="bad manners", may_fail=True)
        with pytest.raises(TierOffloadError, match="must `await`"):
            gateless.wait()
        gate.open.set()


# --- CON-01: errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OSError, MemoryError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_con_01_first_error_reaches_every_later_call(kind: type[BaseException]) -> None:
    scheduler = one_lane(concurrency=2)
    gate = Gate()
    running = scheduler.submit("read", gate, label="running")

    def fail_in_a_lane() -> None:
        raise kind("the first")

    caught: list[BaseException] = []
    waiter_error: list[BaseException] = []

    def wait_elsewhere() -> None:
        try:
            running.wait()
        except BaseException as error:
            waiter_error.append(error)

    waiter = threading.Thread(target=wait_elsewhere)
    waiter.start()
    failed = scheduler.submit("read", fail_in_a_lane, label="failing")
    calls: list[Callable[[], object]] = [
        failed.wait,
        running.wait,
        lambda: scheduler.submit("read", int, label="later"),
        scheduler.raise_pending_error,
        lambda: failed.result,
    ]
    for call in calls:
        with pytest.raises(kind, match="the first") as info:
            call()
        caught.append(info.value)
        assert "fail_in_a_lane" in "".join(traceback.format_exception(info.value))
    waiter.join(5)
    assert not waiter.is_alive()  # woken, though what it waits for still runs
    assert all(error is caught[0] for error in [*caught, *waiter_error])
    assert len(waiter_error) == 1
    assert not running.done()
    gate.open.set()
    scheduler.close()
    scheduler.close()
    assert len(traceback.extract_tb(caught[0].__traceback__)) < 12  # raising it again does not pile up frames


@pytest.mark.parametrize("nth", [*range(1, 12), 25, 50])
def test_con_01_nth_work_fails(nth: int) -> None:
    """Whichever work fails, the submitting thread gets that exception, and a new scheduler works at once."""
    scheduler = Scheduler([LaneSpec(name="read", concurrency=2), LaneSpec(name="write")], timeout_s=10)
    count = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal count
        with lock:
            count += 1
            if count == nth:
                raise ZeroDivisionError(f"work {nth}")

    with pytest.raises(ZeroDivisionError, match=f"work {nth}"), scheduler:  # noqa: PT012
        previous: list[TransferTicket[None]] = []
        for i in range(60):
            previous = [scheduler.submit(("read", "write")[i % 2], work, label=str(i), after=previous[-1:])]
        scheduler.drain()
    with one_lane() as fresh:
        assert fresh.submit("read", lambda: 1, label="x").wait() == 1


def test_con_01_unseen_error_is_raised_by_close_once() -> None:
    scheduler = one_lane()
    failed = scheduler.submit("read", lambda: 1 // 0, label="x")
    while not failed.done():
        os.sched_yield()
    with pytest.raises(ZeroDivisionError):
        scheduler.close()
    scheduler.close()


def test_con_01_clean_up_does_not_mask_the_first_error() -> None:
    with pytest.raises(KeyError, match="mine"), one_lane() as scheduler:  # noqa: PT012
        scheduler.submit("read", lambda: 1 // 0, label="x")
        raise KeyError("mine")


def test_con_01_error_while_closing_is_not_lost() -> None:
    scheduler = one_lane()
    gate = Gate()

    def work() -> None:
        gate()
        raise OSError("late")

    scheduler.submit("read", work, label="x")
    assert gate.started.wait(10)
    threading.Thread(target=lambda: (wait_until(lambda: scheduler.closed), gate.open.set())).start()
    with pytest.raises(OSError, match="late"):
        scheduler.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError("did not come true")
        os.sched_yield()


@pytest.mark.parametrize("way", ["callback", "observer", "coroutine"])
def test_con_01_errors_of_callbacks_observers_and_coroutines(way: str) -> None:
    def fail(_: object = None) -> None:
        raise RuntimeError(f"in {way}")

    async def fail_async() -> None:
        await scheduler.submit("read", int, label="x")
        fail()

    scheduler = Scheduler([LaneSpec(name="read")], timeout_s=10, observer=fail if way == "observer" else None)
    if way == "coroutine":
        scheduler.spawn(fail_async, label="unit")
    else:
        ticket = scheduler.submit("read", int, label="x")
        if way == "callback":
            ticket.add_done_callback(fail)
    wait_until(lambda: scheduler._core.pending_error is not None)
    with pytest.raises(RuntimeError, match=f"in {way}"):
        scheduler.submit("read", int, label="y")
    scheduler.close()


def test_con_01_dead_loop_thread_is_noticed() -> None:
    scheduler = one_lane()
    scheduler.submit("read", int, label="x").wait()
    wait_until(lambda: scheduler._core.loop_thread._loop is not None)
    loop = scheduler._core.loop_thread._loop
    assert loop is not None
    loop.call_soon_threadsafe(loop.stop)
    wait_until(lambda: scheduler._core.pending_error is not None)
    with pytest.raises(TierOffloadError, match="tieroffload-loop died"):
        scheduler.submit("read", int, label="y")
    scheduler.close()


def test_con_01_error_is_cleared_only_on_request() -> None:
    with one_lane() as scheduler:
        with pytest.raises(ZeroDivisionError):
            scheduler.submit("read", lambda: 1 // 0, label="x").wait()
        assert isinstance(scheduler.clear_pending_error(), ZeroDivisionError)
        assert scheduler.clear_pending_error() is None
        assert scheduler.submit("read", lambda: 2, label="y").wait() == 2


def test_con_01_threads_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = one_lane()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    scheduler.start()
    scheduler.close()
    scheduler = one_lane()
    scheduler._core.supervise()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        ticket = scheduler.submit("read", int, label="x")
        with pytest.raises(TierOffloadError, match=r"could not be started.*ulimit -u"):
            ticket.wait()
    scheduler.close()
    assert ticket.done()


# --- CON-07: deadlines --------------------------------------------------------------------------------------------


def test_con_07_wait_past_its_deadline_names_everything() -> None:
    scheduler = one_lane()
    gate = Gate()
    stuck = scheduler.submit("read", gate, label="read layers.3:exp_avg from /data/nvme0/run/data-0", nbytes=2048)
    queued = scheduler.submit("read", int, label="read layers.4:exp_avg")
    assert gate.started.wait(10)
    for ticket in (stuck, queued):
        with pytest.raises(TransferTimeoutError) as info:
            ticket.wait(timeout_s=0.01)
        for part in (ticket.label, "lane read", "1 of 1 running", "1 queued", "io_timeout_s", "MainThread", "0.0 s"):
            assert part in str(info.value)
    with pytest.raises(TransferTimeoutError, match=r"layers\.3:exp_avg from /data/nvme0/run/data-0 \(2 KiB\)"):
        stuck.wait(0)
    with pytest.raises(TransferTimeoutError, match=r"layers\.3"):
        scheduler.drain(timeout_s=0.01)
    gate.open.set()
    scheduler.drain()
    scheduler.close()


def test_con_07_what_is_claimed_and_not_over_says_by_whom_and_where() -> None:
    """The last step of several works hangs: the message names the thread that is at it, and where it stands."""
    scheduler = one_lane()
    gate = Gate()
    piece = scheduler.submit("read", int, label="write layers.3 piece 0")
    whole = scheduler.when_all([piece], label="write layers.3", finish=gate)
    assert gate.started.wait(10)
    later = scheduler.when_all([whole], label="update of layers.3")
    for ticket in (whole, later):
        with pytest.raises(TransferTimeoutError) as info:
            ticket.wait(timeout_s=0.01)
        said = str(info.value)
        assert re.search(r"write layers\.3 was claimed by thread tieroffload-read-\d, which is in ", said), said
        assert __file__ in said or "threading.py" in said
    gate.open.set()
    scheduler.drain()
    scheduler.close()


def test_con_07_hung_work_is_an_error_though_nobody_waits_for_it() -> None:
    scheduler = Scheduler([LaneSpec(name="read"), LaneSpec(name="slow", timeout_s=1e9)], timeout_s=0.1)
    gate, fine = Gate(), Gate()
    scheduler.submit("slow", fine, label="long update")
    scheduler.submit("read", gate, label="read layers.3:exp_avg from /d/data-0")
    wait_until(lambda: scheduler._core.pending_error is not None)
    with pytest.raises(TransferTimeoutError, match=r"read layers\.3:exp_avg from /d/data-0.*running for"):
        scheduler.submit("read", int, label="next")
    with pytest.raises(TransferTimeoutError, match=r"could not close.*tieroffload-read-0"):
        scheduler.close()
    gate.open.set()
    fine.open.set()
    scheduler.close()


def test_close_cancels_the_queue_and_waits_for_the_running() -> None:
    scheduler = one_lane()
    gate = Gate()
    running = scheduler.submit("read", gate, label="running")
    queued = scheduler.submit("read", int, label="queued")
    blocked = scheduler.submit("read", int, label="blocked", after=[running])
    assert gate.started.wait(10)
    told: list[object] = []
    blocked.add_done_callback(told.append)
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    wait_until(lambda: queued.done() and blocked.done())
    assert closer.is_alive()
    assert told == [blocked]
    gate.open.set()
    closer.join(10)
    assert not closer.is_alive()
    assert running.wait() == "through"
    for ticket in (queued, blocked):
        with pytest.raises(TierOffloadError, match="cancelled"):
            ticket.wait()
    with pytest.raises(TierOffloadError, match="closed"):
        scheduler.submit("read", int, label="late")
    with pytest.raises(TierOffloadError, match="closed"):
        scheduler.spawn(asyncio.Event().wait, label="late")


def test_close_cancels_coroutines_but_waits_for_their_works() -> None:
    scheduler = one_lane()
    gate = Gate()
    tickets: list[TransferTicket[str]] = []

    async def unit() -> None:
        tickets.append(scheduler.submit("read", gate, label="read"))
        await tickets[0]

    life = scheduler.spawn(unit, label="unit")
    assert gate.started.wait(10)
    closer = threading.Thread(target=scheduler.close)
    closer.start()
    wait_until(life.done)
    assert closer.is_alive()
    gate.open.set()
    closer.join(10)
    assert tickets[0].done()
    with pytest.raises(TierOffloadError, match="cancelled"):
        life.wait()


def test_memory_of_a_work_is_let_go_before_it_is_reported_complete() -> None:
    class Memory:
        pass

    with one_lane() as scheduler:
        for _ in range(50):
            memory = Memory()
            gone = weakref.ref(memory)
            ticket = scheduler.submit("read", lambda memory=memory: None, label="x")
            del memory
            ticket.wait()
            assert gone() is None


def test_forgotten_scheduler_ends_its_threads() -> None:
    scheduler = one_lane(concurrency=2)
    scheduler.submit("read", int, label="x").wait()
    core = weakref.ref(scheduler._core)
    del scheduler
    gc.collect()
    wait_until(lambda: not any(thread.name.startswith("tieroffload") for thread in threading.enumerate()))
    gc.collect()
    assert core() is None


def test_submit_from_a_finaliser_that_interrupts_submit() -> None:
    """A collection may start while this thread holds the scheduler's lock; a finaliser that submits must not hang."""
    with one_lane() as scheduler:
        scheduler.submit("read", int, label="x").wait()
        with scheduler._core._lock:
            ticket = scheduler.submit("read", lambda: 5, label="from a finaliser")
        assert ticket.wait() == 5


def test_many_threads_submit_and_wait() -> None:
    scheduler = Scheduler([LaneSpec(name="a", concurrency=3), LaneSpec(name="b", concurrency=2)], timeout_s=20)
    with scheduler:
        sums = []

        def client(seed: int) -> None:
            rng = random.Random(seed)
            tickets: list[TransferTicket[int]] = []
            for i in range(200):
                after = rng.sample(tickets, min(len(tickets), rng.randrange(3)))
                lane = rng.choice("ab")
                tickets.append(
                    scheduler.submit(lane, lambda i=i: i, label=f"{seed}:{i}", priority=rng.randrange(5), after=after)
                )
                if rng.random() < 0.1:
                    rng.choice(tickets).wait()
            sums.append(sum(ticket.wait() for ticket in tickets))

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(6)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(30)
        assert sums == [199 * 100] * 6
        assert sum(lane["num_done"] for lane in scheduler.report().values()) == 1200


def test_observer_sees_every_work() -> None:
    records: list[WorkRecord] = []
    with Scheduler([LaneSpec(name="read")], timeout_s=5, observer=records.append) as scheduler:
        scheduler.submit("read", int, label="one", nbytes=5).wait()
        with pytest.raises(ValueError, match="literal"):
            scheduler.submit("read", lambda: int("x"), label="two", may_fail=True).wait()
        scheduler.drain()
    assert [(r.label, r.lane, r.nbytes, r.failed, r.thread) for r in records] == [
        ("one", "read", 5, False, "tieroffload-read-0"),
        ("two", "read", 0, True, "tieroffload-read-0"),
    ]
    assert all(r.submitted_s <= r.started_s <= r.finished_s for r in records)


def test_who_has_waited_finds_the_record() -> None:
    """A timeline that is written when nothing runs any more misses nothing."""
    records: list[WorkRecord] = []
    with Scheduler([LaneSpec(name="read", concurrency=2)], timeout_s=5, observer=records.append) as scheduler:
        for index in range(500):
            scheduler.submit("read", int, label=f"{index}").wait()
            assert records[-1].label == f"{index}"


def test_wrong_use_is_told() -> None:
    with pytest.raises(ValueError, match="two lanes"):
        Scheduler([LaneSpec(name="a"), LaneSpec(name="a")], timeout_s=1)
    with pytest.raises(ValueError, match="timeout_s"):
        Scheduler([], timeout_s=0)
    for wrong in ({"concurrency": 0}, {"max_inflight_nbytes": 0}, {"max_share_frac": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LaneSpec(name="a", **wrong)  # type: ignore[arg-type]
    with one_lane() as scheduler, pytest.raises(ValueError, match="no lane 'raed'; there are read"):
        scheduler.submit("raed", int, label="x")


# --- the seeded mode ----------------------------------------------------------------------------------------------


def seeded_order(seed: int) -> list[int]:
    scheduler = Scheduler([LaneSpec(name="a"), LaneSpec(name="b")], timeout_s=5, debug_seed=seed)
    ran: list[int] = []
    with scheduler:
        tickets: list[TransferTicket[None]] = []
        for i in range(30):
            after = tickets[-1:] if i % 3 == 2 else ()
            tickets.append(scheduler.submit("ab"[i % 2], lambda i=i: ran.append(i), label=str(i), after=after))
        assert len(ran) < 30
        tickets[20].wait()
        assert 20 in ran
        scheduler.drain()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tieroffload")]
    return ran


def test_seeded_mode_is_random_among_the_ready_and_repeatable() -> None:
    orders = [seeded_order(seed) for seed in range(8)]
    assert orders == [seeded_order(seed) for seed in range(8)]
    assert len({tuple(order) for order in orders}) == 8
    for order in orders:
        assert sorted(order) == list(range(30))
        for i in range(2, 30, 3):
            assert order.index(i - 1) < order.index(i)


def test_seeded_mode_completes_nothing_by_itself_and_names_a_hang_at_once() -> None:
    scheduler = Scheduler([LaneSpec(name="a")], timeout_s=1000, debug_seed=0, debug_submit_run_frac=0.0)
    with scheduler:
        tickets = [scheduler.submit("a", lambda i=i: i, label=str(i)) for i in range(50)]
        assert not any(ticket.done() for ticket in tickets)

        class Never:
            def done(self) -> bool:
                return False

            def wait(self, timeout_s: float | None = None) -> None:
                raise TransferTimeoutError("the event never came")

        with pytest.raises(TransferTimeoutError, match="never came"):
            scheduler.submit("a", int, label="x", after=[Never()], may_fail=True).wait()
        assert [ticket.wait() for ticket in tickets] == list(range(50))
        unknown = TransferTicket(scheduler._core, "a", None, "never queued")
        assert unknown.wait() is None


def test_seeded_mode_runs_nested_waits_errors_and_coroutines() -> None:
    with Scheduler([LaneSpec(name="a")], timeout_s=10, debug_seed=3) as scheduler:
        outer = scheduler.submit("a", lambda: scheduler.submit("a", lambda: 7, label="inner").wait() + 1, label="outer")
        assert outer.wait() == 8

        async def unit() -> int:
            return await scheduler.submit("a", lambda: 3, label="x") + await scheduler.submit("a", lambda: 4, label="y")

        assert scheduler.spawn(unit, label="unit").wait() == 7
    scheduler = Scheduler([LaneSpec(name="a")], timeout_s=10, debug_seed=3, debug_submit_run_frac=0.0)
    scheduler.submit("a", lambda: 1 // 0, label="bad")
    with pytest.raises(ZeroDivisionError):
        scheduler.drain()
    scheduler.close()


# --- processes, signals, exit ---------------------------------------------------------------------------------------


def test_forked_child_gets_an_error_and_not_a_hang() -> None:
    scheduler = one_lane()
    ticket = scheduler.submit("read", int, label="x")
    ticket.wait()
    gate = Gate()
    running = scheduler.submit("read", gate, label="running")
    with scheduler._core._lock:  # held at the fork, as it may be by a lane thread
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                num_refused = 0
                for call in (lambda: scheduler.submit("read", int, label="y"), running.wait, scheduler.drain):
                    try:
                        call()
                    except UnsupportedError:
                        num_refused += 1
                scheduler.close()
                ticket.wait()
                code = 0 if num_refused == 3 else 2
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.open.set()
    assert running.wait() == "through"
    scheduler.close()


def test_con_04_ctrl_c_interrupts_a_wait() -> None:
    scheduler = one_lane()
    gate = Gate()
    ticket = scheduler.submit("read", gate, label="slow write")
    assert gate.started.wait(10)
    main = threading.main_thread().ident
    assert main is not None
    for call in (ticket.wait, scheduler.drain, scheduler.close):  # the last: an impatient second Ctrl-C
        timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        timer.join()
    assert not ticket.done()
    gate.open.set()
    scheduler.close()
    assert ticket.done()


PRELUDE = """
import sys, threading, time
from lightning_tieroffload.io.scheduler import LaneSpec, Scheduler
scheduler = Scheduler([LaneSpec(name="read", concurrency=2)], timeout_s=30)
scheduler.submit("read", int, label="x").wait()
"""
EXITS = {
    "no teardown": ("", 0, ""),
    "queue not empty": ("for i in range(1000): scheduler.submit('read', int, label='x')", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "sys.exit in a work": ("scheduler.submit('read', lambda: sys.exit(4), label='x').wait()", 4, ""),
    "exception": ("raise ValueError('mine')", 1, "ValueError: mine"),
    "error seen": ("scheduler.submit('read', lambda: 1 // 0, label='x').wait()", 1, "ZeroDivisionError"),
    "a work is running": (
        "e = threading.Event(); scheduler.submit('read', lambda: (e.set(), time.sleep(0.2)), label='x'); e.wait()",
        0,
        "",
    ),
    "__del__ at shutdown": (
        "class D:\n  def __del__(self):\n    scheduler.close()\nkept = D(); kept.me = kept; sys.modules['kept'] = kept",
        0,
        "",
    ),
    "non-main thread goes on": (
        "def fit():\n"
        "  threading.main_thread().join()\n"
        "  total = sum(scheduler.submit('read', lambda i=i: i, label='x').wait() for i in range(100))\n"
        "  sys.exit(0) if total == 4950 else print('wrong', file=sys.stderr)\n"
        "threading.Thread(target=fit).start()",
        0,
        "",
    ),
    "coroutine pending": (
        "import asyncio\nscheduler.spawn(lambda: asyncio.sleep(1000), label='x')",
        0,
        "",
    ),
}


@pytest.mark.parametrize("name", EXITS)
def test_con_05_interpreter_exit_is_clean(name: str) -> None:
    code, expected_code, last_line = EXITS[name]
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PRELUDE + code], cwd=REPO, capture_output=True, text=True, timeout=30)
    assert done.returncode == expected_code, done.stderr
    if last_line:
        assert done.stderr.strip().splitlines()[-1].startswith(last_line)
        assert done.stderr.count("Traceback") == 1
    else:
        assert done.stderr == ""
    assert time.monotonic() - started_s < 10  # imports on a busy machine included


def test_con_05_an_error_nobody_saw_is_told_at_exit() -> None:
    code = PRELUDE + "t = scheduler.submit('read', lambda: 1 // 0, label='x')\nwhile not t.done(): pass"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=30)
    assert "at exit: ZeroDivisionError" in done.stderr


@pytest.mark.alone
def test_submit_is_cheap_and_throughput_is_high() -> None:
    """Generous bounds for a busy machine; the figures are in tests/benchmarks."""
    with one_lane(concurrency=2) as scheduler:
        scheduler.start()
        best_per_s = 0.0
        for _ in range(3):
            started_s = time.perf_counter()
            for _ in range(2000):
                scheduler.submit("read", int, label="x")
            scheduler.drain()
            best_per_s = max(best_per_s, 2000 / (time.perf_counter() - started_s))
        assert best_per_s > 5000


# --- when_all -----------------------------------------------------------------------------------------------------


def test_when_all_completes_with_the_last_and_runs_finish() -> None:
    with one_lane(concurrency=3) as scheduler:
        gates = [Gate() for _ in range(3)]
        parts = [scheduler.submit("read", gate, label=f"part {i}") for i, gate in enumerate(gates)]
        whole = scheduler.when_all(parts, label="whole", finish=lambda: sum(part.wait() == "through" for part in parts))
        gates[2].open.set()
        gates[0].open.set()
        parts[0].wait()
        parts[2].wait()
        assert not whole.done()
        with pytest.raises(TransferTimeoutError, match=r"whole on lane join.*waiting for part 1"):
            whole.wait(0.01)
        gates[1].open.set()
        assert whole.wait() == 3
        assert scheduler.when_all([], label="none", finish=lambda: 5).result == 5
        assert scheduler.when_all(parts, label="done already").done()
        with pytest.raises(ValueError, match="of this scheduler only"):
            scheduler.when_all([object()], label="x")  # type: ignore[list-item]


def test_when_all_waits_for_every_end_before_it_fails() -> None:
    """A failed part is no reason to free the memory that the other parts still write."""
    with one_lane(concurrency=2) as scheduler:
        gate = Gate()
        bad = scheduler.submit("read", lambda: 1 // 0, label="bad", may_fail=True)
        slow = scheduler.submit("read", gate, label="slow")
        whole = scheduler.when_all([bad, slow], label="whole", may_fail=True)
        rescued = scheduler.when_all([bad, slow], label="rescued", otherwise=lambda error: repr(error))
        assert gate.started.wait(10)
        wait_until(bad.done)
        assert not whole.done()
        gate.open.set()
        with pytest.raises(ZeroDivisionError):
            whole.wait()
        assert "ZeroDivisionError" in rescued.wait()
        scheduler.raise_pending_error()
        with pytest.raises(ZeroDivisionError):
            scheduler.when_all([bad], label="reported").wait()
        scheduler.clear_pending_error()


def test_when_all_cancelled_ends_with_what_runs() -> None:
    with one_lane() as scheduler:
        gate = Gate()
        parts = [scheduler.submit("read", gate, label="running")]
        assert gate.started.wait(10)
        parts.append(scheduler.submit("read", int, label="queued"))
        whole = scheduler.when_all(parts, label="whole", finish=lambda: pytest.fail("must not finish"))
        assert scheduler.cancel(whole)
        assert parts[1].done()
        assert not whole.done()
        gate.open.set()
        with pytest.raises(WorkCancelledError):
            whole.wait()
        scheduler.raise_pending_error()


# --- long chains --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["success", "failure", "cancel", "close", "seeded"])
def test_chains_of_thousands_end(way: str) -> None:
    """No recursion over the length of a chain, whichever way its head ends."""
    scheduler = Scheduler(
        [LaneSpec(name="a"), LaneSpec(name="b")],
        timeout_s=20,
        debug_seed=1 if way == "seeded" else None,
        debug_submit_run_frac=0.0,
    )
    gate = Gate()
    if way == "seeded":
        gate.open.set()
    else:
        scheduler.submit("a", gate, label="gate")

    def head() -> None:
        if way == "failure":
            raise OSError("head")

    tickets = [scheduler.submit("a", head, label="head", may_fail=True)]
    for i in range(3000):
        tickets.append(scheduler.submit("ab"[i % 2], int, label=str(i), after=tickets[-1:], may_fail=True))
    whole = scheduler.when_all(tickets, label="whole", may_fail=True)
    if way == "cancel":
        assert scheduler.cancel(tickets[0])
    if way == "close":
        threading.Thread(target=lambda: (wait_until(lambda: scheduler.closed), gate.open.set())).start()
        scheduler.close()
    gate.open.set()
    if way in ("success", "seeded"):
        whole.wait()
    else:
        with pytest.raises((OSError, WorkCancelledError)):
            whole.wait()
    assert all(ticket.done() for ticket in tickets)
    scheduler.raise_pending_error()
    scheduler.close()


def test_con_01_dead_lane_thread_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a work that fails but the thread's own code: it must not end in silence, and close must not wait for it."""
    scheduler = one_lane()
    ticket = scheduler.submit("read", int, label="x")
    ticket.wait()
    lane = scheduler._core.lanes["read"]

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(lane, "finish", broken)
        with pytest.raises(TierOffloadError, match="a thread of lane read died: RuntimeError: a bug"):  # noqa: PT012
            for _ in range(3):
                scheduler.submit("read", int, label="y").wait()
    scheduler.close()


def test_expedited_before_it_was_even_queued() -> None:
    """Two entries of one rank: they are told apart without comparing tickets."""
    with one_lane() as scheduler:
        with scheduler._core._lock:  # so that both stay in the inbox
            tickets = [scheduler.submit("read", int, label=str(i)) for i in range(5)]
            for ticket in tickets:
                scheduler.expedite(ticket)
        for ticket in tickets:
            assert ticket.wait() == 0
        assert scheduler.report()["read"]["num_queued"] == 0


def test_looking_in_now_and_then_does_not_shorten_close() -> None:
    """Short waits are no sign of a stuck device: close still gives a running work the scheduler's whole time."""
    scheduler = one_lane()
    gate = Gate()
    ticket = scheduler.submit("read", gate, label="slow")
    with pytest.raises(TransferTimeoutError):
        ticket.wait(0.01)
    assert not scheduler._core._had_timeout
    gate.open.set()
    scheduler.close()


# --- Ctrl-C at any point --------------------------------------------------------------------------------------------


def _a_short_life(scheduler: Scheduler, ran: list[int], announced: list[TransferTicket[None]]) -> None:
    """Everything that a training thread asks of a scheduler, on two lanes."""
    last: list[TransferTicket[None]] = []
    for i in range(8):
        last.append(
            scheduler.submit(
                "ab"[i % 2], lambda i=i: ran.append(i), label=str(i), priority=-i, after=last[-1:] if i % 3 else (),
                announce=announced.append,
            )
        )  # fmt: skip
    scheduler.expedite(last[5])
    scheduler.cancel(last[7])
    scheduler.when_all(last[:4], label="four", otherwise=lambda _: None).wait()
    scheduler.spawn(lambda: asyncio.sleep(0), label="coroutine").wait()
    last[6].wait()
    scheduler.drain()
    scheduler.close()


def _strike(at: int, debug_seed: int | None) -> Strike:
    ran: list[int] = []
    announced: list[TransferTicket[None]] = []
    with Strike(at) as strike:
        scheduler = None
        try:
            scheduler = Scheduler(
                [LaneSpec(name="a"), LaneSpec(name="b", concurrency=2)], timeout_s=5, debug_seed=debug_seed
            )
            _a_short_life(scheduler, ran, announced)
        except KeyboardInterrupt:
            assert strike.has_struck
    if scheduler is None:
        return strike
    started_s = time.monotonic()
    if not scheduler.closed:
        scheduler.clear_pending_error()  # struck in a callback, which keeps it for later
        scheduler.drain()
        for ticket in announced:
            if ticket.error is None:
                ticket.wait()
        assert len(set(ran)) == len(ran)  # whatever happened to its ticket, no work ran twice
        assert scheduler.submit("a", lambda: 5, label="goes on").wait() == 5
    with contextlib.suppress(KeyboardInterrupt):
        scheduler.close()
    assert time.monotonic() - started_s < 4, strike.places[at - 1]
    assert all(ticket.done() or not ticket._claim for ticket in announced)
    return strike


@pytest.mark.parametrize("debug_seed", [None, 0], ids=["threads", "seeded"])
def test_con_04_ctrl_c_anywhere_loses_no_ticket(debug_seed: int | None) -> None:
    """CON-04: at every 7th place where a signal can strike the thread that submits: nothing hangs, all goes on."""
    num_places = len(_strike(0, debug_seed).places)
    assert num_places > 300
    for at in range(1, num_places + 1, 7):
        _strike(at, debug_seed)


@pytest.mark.slow
@pytest.mark.parametrize("debug_seed", [None, 0], ids=["threads", "seeded"])
def test_con_04_ctrl_c_everywhere_loses_no_ticket(debug_seed: int | None) -> None:
    """CON-04: the same at every single place."""
    for at in range(1, len(_strike(0, debug_seed).places) + 1):
        _strike(at, debug_seed)
