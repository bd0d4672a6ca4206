"""Floor 1. What ran when: events with a unit's name on named lanes, kept for the last steps, as a Chrome trace.

Owns the memory of a timeline and its JSON. Knows neither torch nor the engine: whoever does something says when it
began and ended. Where nobody records there is no recorder, and each place that could record asks one ``is None``.

[Note: events] An event is written by the thread in which it ended, into a deque of that thread alone, so writers take
no lock. Between two steps all deques are emptied into the step that ended, as they are; the last few steps are kept.
Deques and steps are bounded, and what did not fit is counted. Times on an accelerator are marks, which are read when a
timeline is written: nobody waits for them before.

[Note: tracks] Times on the host's clock belong to their thread, so that each track shows one thing at a time: a lane
with several threads has several tracks, ``read0``, ``read0 #2``. Times on the accelerator's belong to the lane alone:
what runs on one stream runs in order. Events of one track are nested or apart.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["TIMELINE_FILE_NAME", "Clock", "NamedSlices", "TraceRecorder"]

TIMELINE_FILE_NAME = "timeline.json"  # in trace_path
_MOST_EVENTS = 1 << 15  # of one thread between two looks, and four times as many of one step
_LANES = (
    "steps",
    "compute",
    "stalls on the device",
    "stalls",
    "host",
    "h2d",
    "h2d of sums",
    "h2d of state",
    "streamed",
    "d2h",
    "d2h of state",
    "update",
    "kernels",
)


class Clock(Protocol):
    """Times on an accelerator. ``at_s`` gives those of ``time.perf_counter``, or None before the mark is reached."""

    def mark(self, stream: Any = None) -> Any: ...
    def at_s(self, mark: Any) -> float | None: ...
    def tie(self) -> None:
        """Compare the two clocks again. Called between steps."""
        ...

    def settle(self) -> None:
        """Wait for every mark. Called when a timeline is written."""
        ...


@dataclass(frozen=True, slots=True)
class _Event:
    lane: str
    thread: int | None  # whose track it is on; None: the lane's own
    name: str
    begin_s: float
    end_s: float
    nbytes: int


_Raw = tuple[str, str, Any, Any, int]  # lane, name, begin, end, bytes; times are floats, or marks of the clock


class _Writer:
    """One thread's events. Only that thread appends and counts; whoever collects takes from the other end."""

    __slots__ = ("__weakref__", "events", "index", "num_lost", "num_lost_known", "thread")

    def __init__(self, index: int) -> None:
        self.index = index
        self.events: collections.deque[_Raw] = collections.deque(maxlen=_MOST_EVENTS)
        self.num_lost = 0  # the thread's own count, which only grows
        self.num_lost_known = 0  # of it, what whoever collects has added up
        self.thread = weakref.ref(threading.current_thread())


class _Step:
    """What threads wrote during one step, by the writer's index."""

    __slots__ = ("batches", "num_events")

    def __init__(self) -> None:
        self.batches: list[tuple[int | None, list[_Raw]]] = []
        self.num_events = 0

    def take(self, index: int | None, events: list[_Raw]) -> int:
        """Returns how many did not fit."""
        kept = events[: 4 * _MOST_EVENTS - self.num_events]
        self.batches.append((index, kept))
        self.num_events += len(kept)
        return len(events) - len(kept)


class TraceRecorder:
    """Records from any thread; keeps the last ``num_steps`` steps and what came after them. See [Note: events].

    Args:
        clock: of the accelerator; None where compute is on the host.
    """

    def __init__(self, num_steps: int, clock: Clock | None = None) -> None:
        self._clock = clock
        self._local = threading.local()
        self._writers: list[_Writer] = []
        self._indices = itertools.count()
        self._lock = threading.Lock()
        self._steps: collections.deque[_Step] = collections.deque(maxlen=num_steps)
        self._now = _Step()
        self._num_lost = 0
        self._step_began_s: float | None = None

    # ------------------------------------------------------------------------------------------------- recording
    def mark(self, stream: Any = None) -> Any:
        """Now, for compute: a point on its stream (or on ``stream``), or the host's time where compute is there."""
        return time.perf_counter() if self._clock is None else self._clock.mark(stream)

    def add(self, lane: str, name: str, begin: Any, end: Any, nbytes: int = 0) -> None:
        """Something called ``name`` went on from ``begin`` to ``end``: both ``time.perf_counter()``, or both marks."""
        try:
            writer: _Writer = self._local.writer
        except AttributeError:
            writer = self._local.writer = _Writer(next(self._indices))
            self._writers.append(writer)
        if len(writer.events) == _MOST_EVENTS:
            writer.num_lost += 1  # the oldest goes
        writer.events.append((lane, name, begin, end, nbytes))

    def end_step(self, number: int) -> None:
        """The step ``number`` has ended. Called by the thread that trains."""
        now_s = time.perf_counter()
        with self._lock:
            self._collect()
            began_s = self._step_began_s
            if began_s is None:  # the first one: nobody said when it began
                starts = [raw[2] for _, batch in self._now.batches for raw in batch if isinstance(raw[2], float)]
                began_s = min(starts, default=now_s)
            self._now.take(None, [("steps", f"step {number}", began_s, now_s, 0)])
            self._step_began_s = now_s
            self._steps.append(self._now)
            self._now = _Step()
        if self._clock is not None:
            self._clock.tie()

    # ------------------------------------------------------------------------------------------------- collecting
    def _collect(self) -> None:
        for writer in list(self._writers):
            batch = [writer.events.popleft() for _ in range(len(writer.events))]
            num_lost = writer.num_lost
            self._num_lost += num_lost - writer.num_lost_known
            writer.num_lost_known = num_lost
            if batch:
                self._num_lost += self._now.take(writer.index, batch)
            thread = writer.thread()
            if (thread is None or not thread.is_alive()) and not writer.events:
                self._writers.remove(writer)

    def _read(self, index: int | None, raw: _Raw) -> _Event | None:
        """The event with its times; None where the accelerator did not get there, or cannot say any more."""
        lane, name, begin, end, nbytes = raw
        if isinstance(begin, float):
            return _Event(lane, index, name, begin, end, nbytes)
        assert self._clock is not None
        end_s = self._clock.at_s(end)
        begin_s = self._clock.at_s(begin) if end_s is not None else None
        if begin_s is None or end_s is None:
            return None
        return _Event(lane, None, name, begin_s, max(begin_s, end_s), nbytes)

    # ------------------------------------------------------------------------------------------------- Chrome's form
    def to_json(self) -> dict[str, Any]:
        """The timeline in Chrome's trace format (``chrome://tracing``, Perfetto): times in µs since its first event."""
        if self._clock is not None:
            self._clock.settle()
        with self._lock:
            self._collect()
            steps = (*self._steps, self._now)
            found = [self._read(index, raw) for step in steps for index, batch in step.batches for raw in batch]
            events = [event for event in found if event is not None]
            num_lost = self._num_lost + len(found) - len(events)
        tracks: dict[tuple[str, int | None], list[_Event]] = {}
        for event in events:
            tracks.setdefault((event.lane, event.thread), []).append(event)
        origin_s = min((event.begin_s for event in events), default=0.0)
        pid = os.getpid()
        result: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": "tieroffload"}}
        ]
        num_of: collections.Counter[str] = collections.Counter()
        for tid, key in enumerate(sorted(tracks, key=_track_rank), start=1):
            num_of[key[0]] += 1
            name = key[0] if num_of[key[0]] == 1 else f"{key[0]} #{num_of[key[0]]}"
            result.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
            result.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
            for event, begin_ns, end_ns in _nested(tracks[key], origin_s):
                args = {"args": {"nbytes": event.nbytes}} if event.nbytes else {}
                at = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
                result.append({"ph": "X", "pid": pid, "tid": tid, "cat": event.lane, "name": event.name, **at, **args})
        other = {
            "compute": "host" if self._clock is None else "device",
            "num_lost_events": num_lost,
        }
        return {"traceEvents": result, "displayTimeUnit": "ms", "otherData": other}

    def to_text(self) -> str:
        """``to_json`` as text, an event a line."""
        content = self.to_json()
        events = ",\n".join(json.dumps(event, separators=(",", ":")) for event in content.pop("traceEvents"))
        return f'{{"traceEvents":[\n{events}\n],{json.dumps(content)[1:]}\n'


def _track_rank(key: tuple[str, int | None]) -> tuple[int, str, int]:
    lane, thread = key
    return (_LANES.index(lane) if lane in _LANES else len(_LANES), lane, -1 if thread is None else thread)


def _nested(events: Iterable[_Event], origin_s: float) -> list[tuple[_Event, int, int]]:
    """Events of one track in order, in ns; one that would end within the next is cut where the outer one ends."""
    timed = [
        (event, round((event.begin_s - origin_s) * 1e9), round((event.end_s - origin_s) * 1e9)) for event in events
    ]
    timed.sort(key=lambda each: (each[1], -each[2]))
    open_until: list[int] = []
    result = []
    for event, begin_ns, end_ns in timed:
        while open_until and open_until[-1] <= begin_ns:
            open_until.pop()
        end_ns = max(begin_ns, min(end_ns, open_until[-1]) if open_until else end_ns)
        open_until.append(end_ns)
        result.append((event, begin_ns, end_ns))
    return result


class NamedSlices:
    """A ``KernelPool`` whose slices are recorded under one name."""

    def __init__(self, pool: Any, trace: TraceRecorder, name: str) -> None:
        self._pool = pool
        self._trace = trace
        self._name = name

    def submit(self, work: Callable[[int, int], None], numel: int, **how: Any) -> Future[None]:
        """See ``KernelPool.submit``."""

        def timed(begin: int, end: int) -> None:
            start_s = time.perf_counter()
            try:
                work(begin, end)
            finally:
                self._trace.add("kernels", self._name, start_s, time.perf_counter())

        return self._pool.submit(timed, numel, **how)  # type: ignore[no-any-return]
