"""Copies of containers while another thread changes them, with the collector letting that thread in all the time."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from collecting import collecting_always

from lightning_tieroffload.io.loop_thread import LoopThread
from lightning_tieroffload.io.scheduler import LaneSpec, Scheduler
from lightning_tieroffload.snapshots import snapshot, snapshot_items

NUM = 300


@contextlib.contextmanager
def meanwhile(step: Callable[[int], None]) -> Iterator[None]:
    """Another thread calls ``step`` with 0, 1, 2 and so on; its error is ours."""
    has_ended = threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for index in itertools.count():
                if has_ended.is_set():
                    return
                step(index)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
    assert errors == []


def changed_deque() -> tuple[Any, Callable[[int], None]]:
    shared = collections.deque(range(NUM))

    def step(index: int) -> None:
        shared.append(index)
        shared.popleft()

    return shared, step


def changed_set() -> tuple[Any, Callable[[int], None]]:
    shared = set(range(NUM))

    def step(index: int) -> None:
        shared.add(NUM + index)
        shared.discard(index)

    return shared, step


def changed_dict() -> tuple[Any, Callable[[int], None]]:
    shared = dict.fromkeys(range(NUM), 0)

    def step(index: int) -> None:
        shared[NUM + index] = index
        del shared[index]

    return shared, step


@pytest.mark.parametrize("make", [changed_deque, changed_set, changed_dict])
def test_a_copy_never_meets_a_change(make: Callable[[], tuple[Any, Callable[[int], None]]]) -> None:
    shared, step = make()
    with collecting_always(), meanwhile(step):
        for _ in range(500):
            assert NUM - 1 <= len(snapshot(shared)) <= NUM + 1
            if isinstance(shared, dict):
                assert NUM - 1 <= len(snapshot_items(shared)) <= NUM + 1
                assert NUM - 1 <= len(snapshot(shared.values())) <= NUM + 1


def test_the_copy_that_is_not_one_step_does() -> None:
    """The other tests of this file can fail."""
    shared, step = changed_deque()
    with collecting_always(), meanwhile(step), pytest.raises(RuntimeError, match="mutated"):
        collections.deque(iter(lambda: tuple(shared), None), maxlen=0)


def test_whoever_looks_at_a_scheduler_is_not_disturbed_by_who_submits() -> None:
    """Its report, its waits and what comes after a work that is still queued."""
    scheduler = Scheduler([LaneSpec(name="a"), LaneSpec(name="b")], timeout_s=20)
    gate = threading.Event()
    scheduler.submit("a", lambda: gate.wait(20), label="gate")
    tickets = [scheduler.submit("a", int, label=str(index)) for index in range(NUM)]

    def step(index: int) -> None:
        if len(tickets) < 10 * NUM:
            tickets.append(scheduler.submit("ab"[index % 2], int, label=str(index), after=tickets[-1:]))

    try:
        with collecting_always(), meanwhile(step):
            for index in range(200):
                scheduler.report()
                scheduler._core.describe()
                scheduler._core._pending()
                if index % 20 == 0:
                    scheduler._core._look_after(tickets[-1])
    finally:
        gate.set()
    scheduler.when_all(tickets, label="all").wait()
    scheduler.close()


def test_whoever_asks_what_a_loop_holds_is_not_disturbed_by_who_spawns() -> None:
    loop = LoopThread("tieroffload-loop", on_death=lambda _: None)

    async def nothing() -> None:
        return None

    def finish(*_: Any) -> None:
        return None

    def step(_: int) -> None:
        loop._inbox.append((nothing, finish))
        loop._inbox.popleft()

    loop._inbox.extend((nothing, finish) for _ in range(NUM))
    with collecting_always(), meanwhile(step):
        for _ in range(200):
            assert not loop.holds(test_a_copy_never_meets_a_change)
    loop._inbox.clear()
