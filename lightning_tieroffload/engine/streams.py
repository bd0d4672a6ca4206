"""Floor 3. The only file that creates CUDA streams and events, and the only one that copies between device and DRAM.

Three movers with one interface: CUDA (copy streams and events), host (the device tier is host memory: copies happen
at once), delayed (copies happen only when somebody waits for them, in a seeded random order: a missing wait becomes a
wrong number at once, with no sleeping). See [Note: happens-before].

[Note: happens-before] A copy reads its source after everything that compute has enqueued so far (the copy stream waits
for an event of the compute stream) and its target may be read only behind the ticket: ``before_compute()`` orders later
compute behind the copy without blocking the host, ``wait()`` blocks the host. The host runs ahead of compute, so what a
copy reads in DRAM may be overwritten there only behind ``wait()``, however long ago compute was ordered. Memory that a
copy still reads or writes is released only behind ``before_compute()``: the allocator then hands it out in
compute-stream order, after the copy. A ``Pipe`` alone is behind nothing but what its callers name.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from lightning_tieroffload.config import cuda_allocator_is_tuned
from lightning_tieroffload.errors import TransferTimeoutError
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.snapshots import snapshot_items
from lightning_tieroffload.trace import TraceRecorder

_log = logging.getLogger(__name__)

__all__ = [
    "LANDED",
    "CopyTicket",
    "CudaStreams",
    "DelayedStreams",
    "DeviceClock",
    "HostStreams",
    "LinkRates",
    "Marks",
    "Pairs",
    "Pipe",
    "Streams",
    "let_segments_grow",
    "make_clock",
    "make_marks",
    "make_streams",
]

_LEAST_TIMED_NBYTES = 1 << 20  # what is smaller measures the call
_TIME_ONE_OF = 4
_NUM_RATES, _LEAST_RATES = 64, 5
_FIRST_SLEEP_S, _LONGEST_SLEEP_S = 50e-6, 2e-3
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # (target, source), same shape and dtype
OnStall = Callable[[str, float, str], None]  # kind of transfer, seconds waited, what was waited for


class CopyTicket(Protocol):
    """A claim on one ordered group of copies. ``wait`` blocks the host; ``before_compute`` only orders compute.

    ``wait`` with a ``timeout_s`` raises ``TransferTimeoutError`` past it; the copy goes on, its memory stays taken.
    """

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> None: ...
    def before_compute(self) -> None: ...


class Streams(Protocol):
    """Copies between DEVICE and DRAM. Callable from the training thread and from autograd's threads.

    ``download`` also from a lane's thread, where what the device holds serves in place of flash (``OtherCopy``).
    """

    rates: LinkRates

    def upload(self, pairs: Pairs, label: str) -> CopyTicket: ...
    def download(self, pairs: Pairs, label: str) -> CopyTicket: ...
    def add_down(
        self, target: torch.Tensor, before: torch.Tensor, grad: torch.Tensor, norm_types: Iterable[float], label: str
    ) -> tuple[CopyTicket, dict[float, torch.Tensor]]:
        """Order ``target = before + grad`` in DRAM; ``before`` may be 16 bits wide, and share ``target``'s memory.

        ``grad`` is the mover's from now on. Also the sum's norms where it passes through the device, readable behind
        the ticket.
        """
        ...

    def make_pipe(self) -> Pipe:
        """A way up, through work and down again beside compute."""
        ...

    def upload_behind(self, ticket: CopyTicket) -> None:
        """Uploads that are ordered from here on run behind it; the host does not wait where the device can."""
        ...

    def let_go(self) -> None:
        """Refer no longer to what copies that are over have moved."""
        ...

    def settle(self) -> None:
        """Wait for every copy: after Ctrl-C some may have been ordered whose tickets nobody has."""
        ...

    def close(self) -> None: ...


class Pipe(Protocol):
    """Copies and work beside compute, which run in the order of what each names in ``after``, and of their own kind.

    Nothing is ordered behind compute unless ``compute_so_far`` is named: what is copied lies in memory that compute
    neither reads nor writes meanwhile, and the caller says from when on. One thread orders at a time.
    """

    def compute_so_far(self) -> CopyTicket: ...
    def load(self, pairs: Pairs, label: str, after: Sequence[CopyTicket]) -> CopyTicket: ...
    def work(self, call: Callable[[], None], label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        """Run ``call``, which enqueues on the current stream; ``held`` is referred to until it has run."""
        ...

    def store(self, pairs: Pairs, label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        """``held`` is referred to until the copies have landed."""
        ...

    def seconds(self, begin: CopyTicket, end: CopyTicket) -> float | None:
        """Between two of its tickets; None before the later one is reached, and where nobody counts."""
        ...

    def settle(self) -> None:
        """Wait for all of it."""
        ...


class _Landed:
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return None

    def before_compute(self) -> None:
        return None


LANDED: CopyTicket = _Landed()


def _copy(pairs: Pairs) -> None:
    # Raw byte moves: no autograd, and no inference tensors when a validation loop happens to be on.
    # See [Note: modes and Ctrl-C].
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)
        for target, source in pairs:
            target.copy_(source)


def _nbytes(pairs: Pairs) -> int:
    """Bytes that move: where a copy casts, those of the narrower side."""
    return sum(min(target.nbytes, source.nbytes) for target, source in pairs)


def _add(target: torch.Tensor, before: torch.Tensor, grad: torch.Tensor) -> None:
    with torch._C._InferenceMode(False):
        torch._C._set_grad_enabled(False)
        if before is target:
            target.add_(grad)
        else:
            target.copy_(before.to(grad.dtype).add_(grad))


class LinkRates:
    """Bytes a second of large copies as training makes them, by kind: what a link does now, not what a probe once saw.

    On CUDA every few copies are between two events with a clock; they are asked for their time when somebody wants to
    know, and wait for nobody. ``medians`` and ``clear`` are the planner's; whoever copies may note at the same time, in
    any thread: there is no lock, and so nothing here may walk the mapping itself.
    """

    def __init__(self) -> None:
        self._seen: dict[str, collections.deque[float]] = {}
        self._pending: collections.deque[tuple[str, int, Any, Any]] = collections.deque(maxlen=_NUM_RATES)
        self._num_asked: collections.Counter[str] = collections.Counter()

    def note(self, kind: str, nbytes: int, seconds: float) -> None:
        if nbytes >= _LEAST_TIMED_NBYTES and seconds > 0:
            self._seen.setdefault(kind, collections.deque(maxlen=_NUM_RATES)).append(nbytes / seconds)

    def wants(self, kind: str, nbytes: int) -> bool:
        """Whether this copy is one to put between two events: ``note_events`` then takes them."""
        if nbytes < _LEAST_TIMED_NBYTES:
            return False
        self._num_asked[kind] += 1
        return self._num_asked[kind] % _TIME_ONE_OF == 1

    def note_events(self, kind: str, nbytes: int, start: Any, end: Any) -> None:
        self._pending.append((kind, nbytes, start, end))

    def clear(self) -> None:
        self._seen.clear()
        self._pending.clear()

    def medians(self) -> dict[str, float]:
        """By kind, of what was seen since the last ``clear``; kinds with fewer than five copies are left out."""
        for _ in range(len(self._pending)):
            kind, nbytes, start, end = self._pending.popleft()
            if end.query():
                self.note(kind, nbytes, start.elapsed_time(end) / 1e3)
            else:
                self._pending.append((kind, nbytes, start, end))
        seen = [(kind, list(rates)) for kind, rates in snapshot_items(self._seen)]
        return {kind: statistics.median(rates) for kind, rates in seen if len(rates) >= _LEAST_RATES}


class HostStreams:
    """No accelerator: the DEVICE tier is host memory, and a copy is a memcpy in the caller's thread."""

    def __init__(self, on_stall: OnStall, trace: TraceRecorder | None = None) -> None:
        self._on_stall = on_stall
        self.rates = LinkRates()
        self._trace = trace

    def _now(self, kind: str, pairs: Pairs, label: str) -> CopyTicket:
        start_s = time.perf_counter()
        _copy(pairs)
        end_s = time.perf_counter()
        nbytes = _nbytes(pairs)
        if self._trace is not None:
            self._trace.add(kind, label, start_s, end_s, nbytes)
        self._on_stall(kind, end_s - start_s, label)
        self.rates.note(kind, nbytes, end_s - start_s)
        return LANDED

    def upload(self, pairs: Pairs, label: str) -> CopyTicket:
        return self._now("h2d", pairs, label)

    def download(self, pairs: Pairs, label: str) -> CopyTicket:
        return self._now("d2h", pairs, label)

    def add_down(
        self, target: torch.Tensor, before: torch.Tensor, grad: torch.Tensor, norm_types: Iterable[float], label: str
    ) -> tuple[CopyTicket, dict[float, torch.Tensor]]:
        start_s = time.perf_counter()
        _add(target, before, grad)
        if self._trace is not None:
            self._trace.add("d2h", label, start_s, time.perf_counter(), target.nbytes)
        return LANDED, {}

    def make_pipe(self) -> Pipe:
        return _HostPipe(self)

    def upload_behind(self, ticket: CopyTicket) -> None:
        ticket.wait()

    def let_go(self) -> None:
        return None

    def settle(self) -> None:
        return None

    def close(self) -> None:
        return None


class _HostPipe:
    """Everything at once, in the caller's thread."""

    def __init__(self, streams: HostStreams) -> None:
        self._streams = streams

    def compute_so_far(self) -> CopyTicket:
        return LANDED

    def load(self, pairs: Pairs, label: str, after: Sequence[CopyTicket]) -> CopyTicket:
        for ticket in after:
            ticket.wait()
        return self._streams.upload(pairs, label)

    def work(self, call: Callable[[], None], label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        for ticket in after:
            ticket.wait()
        call()
        return LANDED

    def store(self, pairs: Pairs, label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        for ticket in after:
            ticket.wait()
        return self._streams.download(pairs, label)

    def seconds(self, begin: CopyTicket, end: CopyTicket) -> float | None:
        return None

    def settle(self) -> None:
        return None


class _DelayedTicket:
    def __init__(self, owner: DelayedStreams, work: Callable[[], None], is_repeatable: bool) -> None:
        self._owner = owner
        self.is_repeatable = is_repeatable
        self.work: Callable[[], None] | None = work
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.work is None

    def wait(self, timeout_s: float | None = None) -> None:
        self._owner.run(self)
        if self.error is not None:
            raise self.error

    def before_compute(self) -> None:
        self.wait()


class DelayedStreams:
    """Every copy is put off until it is waited for, or until the seed says so at a later submission.

    What a work fails with is raised to each who waits for it or for what runs behind it, and to nobody else. Ctrl-C is
    no such error: a device's copies go on whatever strikes the thread that waits for them, and so a copy that it cuts
    short here is done over by whoever waits next.
    """

    def __init__(self, seed: int, trace: TraceRecorder | None = None) -> None:
        self.rates = LinkRates()  # of nothing: these copies take no time of their own
        self._random = random.Random(seed)
        self._trace = trace
        self._lock = threading.RLock()
        self._pending: list[_DelayedTicket] = []

    def run(self, ticket: _DelayedTicket) -> None:
        with self._lock:
            work = ticket.work
            if work is not None:
                try:
                    if not ticket.is_repeatable:
                        ticket.work = None
                    work()
                except Exception as error:
                    ticket.error = error
                except BaseException as error:
                    if not ticket.is_repeatable:
                        ticket.error = error
                    raise  # Ctrl-C is whoever's thread this is
                ticket.work = None
            if ticket in self._pending:
                self._pending.remove(ticket)

    def later(
        self, work: Callable[[], None], kind: str, label: str, nbytes: int, *, is_repeatable: bool = True
    ) -> CopyTicket:
        def recorded() -> None:
            start_s = time.perf_counter()
            work()
            if self._trace is not None:
                self._trace.add(kind, label, start_s, time.perf_counter(), nbytes)

        with self._lock:
            ticket = _DelayedTicket(self, recorded, is_repeatable)
            self._pending.append(ticket)
            while self._pending and self._random.random() < 0.3:
                self.run(self._random.choice(self._pending))
            return ticket

    def upload(self, pairs: Pairs, label: str) -> CopyTicket:
        pairs = list(pairs)
        return self.later(lambda: _copy(pairs), "h2d", label, _nbytes(pairs))

    def download(self, pairs: Pairs, label: str) -> CopyTicket:
        pairs = list(pairs)
        return self.later(lambda: _copy(pairs), "d2h", label, _nbytes(pairs))

    def add_down(
        self, target: torch.Tensor, before: torch.Tensor, grad: torch.Tensor, norm_types: Iterable[float], label: str
    ) -> tuple[CopyTicket, dict[float, torch.Tensor]]:
        sums: list[torch.Tensor] = []

        def add() -> None:
            if not sums:
                with torch._C._InferenceMode(False):
                    start = before.detach().clone()
                    total = start if before is target else torch.empty_like(target)
                    _add(total, start, grad)
                    sums.append(total)
            _copy([(target, sums[0])])

        return self.later(add, "d2h", label, target.nbytes), {}

    def make_pipe(self) -> Pipe:
        return _DelayedPipe(self)

    def upload_behind(self, ticket: CopyTicket) -> None:
        ticket.wait()

    def let_go(self) -> None:
        return None

    def settle(self) -> None:
        with self._lock:
            for ticket in list(self._pending):
                self.run(ticket)

    def close(self) -> None:
        self.settle()


class _DelayedPipe:
    """Everything as late as can be, but for what it names."""

    def __init__(self, streams: DelayedStreams) -> None:
        self._streams = streams

    def compute_so_far(self) -> CopyTicket:
        return LANDED

    def _behind(
        self,
        after: Sequence[CopyTicket],
        call: Callable[[], None],
        kind: str,
        label: str,
        nbytes: int,
        *,
        is_repeatable: bool = True,
    ) -> CopyTicket:
        after = list(after)

        def work() -> None:
            for ticket in after:
                ticket.wait()
            call()

        return self._streams.later(work, kind, label, nbytes, is_repeatable=is_repeatable)

    def load(self, pairs: Pairs, label: str, after: Sequence[CopyTicket]) -> CopyTicket:
        pairs = list(pairs)
        return self._behind(after, lambda: _copy(pairs), "h2d", label, _nbytes(pairs))

    def work(self, call: Callable[[], None], label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        return self._behind(after, call, "streamed", label, 0, is_repeatable=False)

    def store(self, pairs: Pairs, label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        pairs = list(pairs)

        def copy(_held: Any = held) -> None:
            _copy(pairs)

        return self._behind(after, copy, "d2h", label, _nbytes(pairs))

    def seconds(self, begin: CopyTicket, end: CopyTicket) -> float | None:
        return None

    def settle(self) -> None:
        self._streams.settle()


class _CudaTicket:
    def __init__(
        self,
        event: torch.cuda.Event,
        device: torch.device,
        held: Any,
        on_stall: OnStall,
        kind: str,
        label: str = "copy",
        trace: TraceRecorder | None = None,
        nbytes: int = 0,
    ) -> None:
        self._label = label
        self._trace = trace
        self.event = event
        self._device = device
        # The pairs stay referenced until the event: the caching allocator must not hand their memory out before.
        self._held: Any = held
        self.can_begin: Callable[[], bool] = lambda: True  # whether all that it runs behind is over
        self._nbytes = nbytes
        self._on_stall = on_stall
        self._kind = kind

    def done(self) -> bool:
        if not self.event.query():
            return False
        self._held = None
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.event.query():
            start_s = time.perf_counter()
            try:
                if timeout_s is None:
                    self.event.synchronize()
                else:
                    self._poll(timeout_s)
            finally:
                self._on_stall(self._kind, time.perf_counter() - start_s, self._label)
        self._held = None

    def _poll(self, timeout_s: float) -> None:
        """CUDA has no timed wait: ask, sleep, ask again, at first often."""
        deadline_s = time.monotonic() + timeout_s
        sleep_s = _FIRST_SLEEP_S
        while not self.event.query():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                size = format_nbytes(self._nbytes)
                raise TransferTimeoutError(
                    f"{self._label} ({self._kind}, {size}, {self._device}) was not complete after "
                    f"{timeout_s:.1f} s. Either the device is stuck, or what compute had enqueued before the copy "
                    "takes longer: raise io_timeout_s then."
                )
            time.sleep(min(sleep_s, left_s))
            sleep_s = min(2 * sleep_s, _LONGEST_SLEEP_S)

    def before_stream(self, stream: torch.cuda.Stream) -> None:
        if not self.event.query():
            stream.wait_event(self.event)

    def before_compute(self) -> None:
        # The stream of the copy's device: the current device may be another one while compute is on this one.
        if self.event.query():
            return
        stream = torch.cuda.current_stream(self._device)
        begin = self._trace.mark(stream) if self._trace is not None else None
        stream.wait_event(self.event)
        if self._trace is not None:
            self._trace.add("stalls on the device", self._label, begin, self._trace.mark(stream))


class _OnTheirWay:
    """Tickets of one stream, oldest first: they are over in this order, so one that is not answers for all behind it.

    To ask an event costs the interpreter's lock twice, for which the thread that trains waits. Any thread may call.
    """

    def __init__(self) -> None:
        self._tickets: collections.deque[_CudaTicket] = collections.deque()
        self._lock = threading.RLock()

    def add(self, ticket: _CudaTicket) -> None:
        self._tickets.append(ticket)

    def let_go(self) -> None:
        """Forget what is over. What dies with it may run anything, this too."""
        with self._lock:
            while self._tickets:
                oldest = self._tickets[0]
                if not oldest.done():
                    return
                if self._tickets and self._tickets[0] is oldest:
                    self._tickets.popleft()

    def latest_first(self) -> list[_CudaTicket]:
        return list(self._tickets)[::-1]

    def wait(self) -> None:
        for ticket in list(self._tickets):
            ticket.wait()
        self.let_go()


class CudaStreams:
    """A copy stream for each direction, and one for sums. Compute streams belong to the user.

    [Note: whose turn it is] A copy engine goes on with the stream that it serves as long as that one has a copy ready:
    weights for compute, on a stream of their own, have waited for 77 ms behind ten copies of state that were ordered
    after them. So who keeps a direction busy on a stream of his own (``Pipe``) orders each load behind the copies for
    compute that could run by then.
    """

    def __init__(self, device: torch.device, on_stall: OnStall, trace: TraceRecorder | None = None) -> None:
        self._device = device
        self._on_stall = on_stall
        self._trace = trace
        with torch.cuda.device(device):
            self._upload_stream = torch.cuda.Stream(device)
            self._download_stream = torch.cuda.Stream(device)
            # Sums come up on a stream of their own: compute waits for weights, and must not wait for these.
            self._sums_stream = torch.cuda.Stream(device)
        self._uploads, self._downloads, self._sums = _OnTheirWay(), _OnTheirWay(), _OnTheirWay()
        self._on_their_way = [self._uploads, self._downloads, self._sums]
        self._behind: CopyTicket = LANDED  # what uploads run behind, beside compute
        self._pipes: list[_CudaPipe] = []
        self.rates = LinkRates()

    def _enqueue(
        self,
        stream: torch.cuda.Stream,
        tickets: _OnTheirWay,
        pairs: Pairs,
        label: str,
        kind: str,
        lane: str | None = None,
    ) -> _CudaTicket:
        trace = self._trace
        with torch.cuda.device(self._device), torch.profiler.record_function(f"TierOffload::{label}"):
            compute_so_far = torch.cuda.current_stream().record_event()
            stream.wait_event(compute_so_far)
            nbytes = _nbytes(pairs)
            start = torch.cuda.Event(enable_timing=True) if self.rates.wants(kind, nbytes) else None
            if start is not None:
                start.record(stream)
            begin = trace.mark(stream) if trace is not None else None
            with torch.cuda.stream(stream), torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(enable_timing=start is not None)
            event.record(stream)
            if start is not None:
                self.rates.note_events(kind, nbytes, start, event)
            if trace is not None:
                trace.add(lane or kind, label, begin, trace.mark(stream), nbytes)
        ticket = _CudaTicket(event, self._device, list(pairs), self._on_stall, kind, label, trace, nbytes)
        behind = self._behind
        ticket.can_begin = lambda: compute_so_far.query() and behind.done()
        return self.remember(ticket, tickets)

    def upload(self, pairs: Pairs, label: str) -> CopyTicket:
        return self._enqueue(self._upload_stream, self._uploads, pairs, label, "h2d")

    def download(self, pairs: Pairs, label: str) -> CopyTicket:
        return self._enqueue(self._download_stream, self._downloads, pairs, label, "d2h")

    def add_down(
        self, target: torch.Tensor, before: torch.Tensor, grad: torch.Tensor, norm_types: Iterable[float], label: str
    ) -> tuple[CopyTicket, dict[float, torch.Tensor]]:
        # Up, added and down again beside compute, which waits for none of it: the link has room for both ways, and the
        # addition is the device's own. Memory comes from compute's stream, so it goes back behind the ticket only.
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            arrived = torch.empty_strided(before.size(), before.stride(), dtype=before.dtype, device=self._device)
            norms = {kind: torch.empty((), dtype=grad.dtype, device=self._device) for kind in norm_types}
        self._enqueue(self._sums_stream, self._sums, [(arrived, before)], label, "h2d", "h2d of sums")
        trace = self._trace
        with torch.cuda.device(self._device), torch.profiler.record_function(f"TierOffload::{label}"):
            down = self._download_stream
            down.wait_stream(torch.cuda.current_stream())
            down.wait_stream(self._sums_stream)
            begin = trace.mark(down) if trace is not None else None
            with torch.cuda.stream(down), torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                grad.add_(arrived)
                for kind, norm in norms.items():
                    torch.linalg.vector_norm(grad, kind, out=norm)
                target.copy_(grad, non_blocking=True)
            event = torch.cuda.Event()
            event.record(down)
            if trace is not None:
                trace.add("d2h", label, begin, trace.mark(down), target.nbytes)
        held = [(target, grad), (arrived, before), *((norm, norm) for norm in norms.values())]
        ticket = _CudaTicket(event, self._device, held, self._on_stall, "d2h", label, trace, target.nbytes)
        return self.remember(ticket, self._downloads), norms

    def make_pipe(self) -> Pipe:
        pipe = _CudaPipe(self, self._device, self._on_stall, self._trace)
        self._pipes.append(pipe)
        self._on_their_way += [pipe.loads, pipe.works, pipe.stores]
        return pipe

    def upload_behind(self, ticket: CopyTicket) -> None:
        _order_behind(self._upload_stream, [ticket])
        self._behind = ticket

    def let_uploads_pass(self, stream: torch.cuda.Stream) -> None:
        """What is enqueued on ``stream`` from here on runs behind uploads that could. See [Note: whose turn it is]."""
        for ticket in self._uploads.latest_first():
            if ticket.can_begin():
                ticket.before_stream(stream)
                return

    def remember(self, ticket: _CudaTicket, tickets: _OnTheirWay) -> _CudaTicket:
        for each in self._on_their_way:
            each.let_go()
        tickets.add(ticket)
        return ticket

    def let_go(self) -> None:
        for tickets in self._on_their_way:
            tickets.let_go()

    def settle(self) -> None:
        for stream in (self._upload_stream, self._sums_stream, self._download_stream):
            stream.synchronize()
        for pipe in self._pipes:
            pipe.settle()

    def close(self) -> None:
        for tickets in self._on_their_way:
            tickets.wait()


def _order_behind(stream: torch.cuda.Stream, after: Sequence[CopyTicket]) -> None:
    """What is enqueued on the stream from here on runs behind these; the host waits for none that the device knows."""
    for ticket in after:
        order = getattr(ticket, "before_stream", None)
        if order is not None:
            order(stream)
        else:
            ticket.wait()


class _CudaPipe:
    """A stream for each of the three."""

    def __init__(
        self, streams: CudaStreams, device: torch.device, on_stall: OnStall, trace: TraceRecorder | None
    ) -> None:
        self._streams = streams
        self._device = device
        self._on_stall = on_stall
        self._trace = trace
        with torch.cuda.device(device):
            self._load_stream = torch.cuda.Stream(device)
            self._work_stream = torch.cuda.Stream(device)
            self._store_stream = torch.cuda.Stream(device)
        self.loads, self.works, self.stores = _OnTheirWay(), _OnTheirWay(), _OnTheirWay()

    def seconds(self, begin: CopyTicket, end: CopyTicket) -> float | None:
        first, last = (getattr(ticket, "event", None) for ticket in (begin, end))
        if first is None or last is None or not (first.query() and last.query()):
            return None
        return float(first.elapsed_time(last)) / 1e3

    def _ticket(self, stream: torch.cuda.Stream, held: Any, kind: str, label: str, nbytes: int = 0) -> _CudaTicket:
        # Who waits for it gives its core to the kernels meanwhile.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return _CudaTicket(event, self._device, held, self._on_stall, kind, label, self._trace, nbytes)

    def compute_so_far(self) -> CopyTicket:
        return self._ticket(torch.cuda.current_stream(self._device), (), "compute", "compute")

    def _copies(
        self, stream: torch.cuda.Stream, pairs: Pairs, kind: str, label: str, after: Sequence[CopyTicket], held: Any
    ) -> _CudaTicket:
        trace = self._trace
        with torch.cuda.device(self._device), torch.profiler.record_function(f"TierOffload::{label}"):
            _order_behind(stream, after)
            begin = trace.mark(stream) if trace is not None else None
            with torch.cuda.stream(stream):
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
            if trace is not None:
                trace.add(f"{kind} of state", label, begin, trace.mark(stream), _nbytes(pairs))
            return self._ticket(stream, (pairs, held), kind, label, _nbytes(pairs))

    def load(self, pairs: Pairs, label: str, after: Sequence[CopyTicket]) -> CopyTicket:
        self._streams.let_uploads_pass(self._load_stream)
        return self._streams.remember(self._copies(self._load_stream, pairs, "h2d", label, after, None), self.loads)

    def work(self, call: Callable[[], None], label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        stream, trace = self._work_stream, self._trace
        with torch.cuda.device(self._device), torch.profiler.record_function(f"TierOffload::{label}"):
            _order_behind(stream, after)
            begin = trace.mark(stream) if trace is not None else None
            with torch.cuda.stream(stream):
                call()
            if trace is not None:
                trace.add("streamed", label, begin, trace.mark(stream))
            return self._streams.remember(self._ticket(stream, held, "update", label), self.works)

    def store(self, pairs: Pairs, label: str, after: Sequence[CopyTicket], held: Any) -> CopyTicket:
        return self._streams.remember(self._copies(self._store_stream, pairs, "d2h", label, after, held), self.stores)

    def settle(self) -> None:
        for stream in (self._load_stream, self._work_stream, self._store_stream):
            stream.synchronize()


# Since torch 2.10, and before.
_SETTERS = ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings")


def let_segments_grow() -> bool:
    """Have CUDA's allocator map memory in pieces from now on. False, with nothing changed, where the user set it up.

    Storages of many lengths come and go here. In segments of fixed length they leave holes that nothing fits: 5.8 GiB
    of 24 in one run, which ended for lack of 0.3. Applies to the whole process; either variable of torch's, with
    whatever value, keeps us from it (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False``).
    """
    if cuda_allocator_is_tuned():
        return False
    try:
        change = next(found for name in _SETTERS if (found := getattr(torch._C, name, None)) is not None)
        change("expandable_segments:True")
    except Exception as error:  # another allocator, or a torch without it: more memory is needed, and no number changes
        _log.info("expandable segments cannot be switched on: %s", error)
        return False
    return True


def make_streams(
    device: torch.device,
    *,
    on_stall: OnStall,
    delay_seed: int | None = None,
    trace: TraceRecorder | None = None,
) -> Streams:
    """The mover for ``device``; with ``delay_seed`` the delayed one (host only: CUDA has real delays of its own)."""
    if device.type == "cuda":
        let_segments_grow()
        return CudaStreams(device, on_stall, trace)
    return DelayedStreams(delay_seed, trace) if delay_seed is not None else HostStreams(on_stall, trace)


class Marks(Protocol):
    """Points in compute's time. ``settle`` before asking for seconds.

    ``counts_waits``: whether seconds between marks hold what compute waited for copies and updates.
    """

    counts_waits: bool

    def mark(self) -> Any: ...
    def settle(self) -> None: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def take_peak_nbytes(self) -> int | None:
        """Device memory allocated at most since the last call; None where nobody counts it."""
        ...


class _HostMarks:
    """Compute is this thread: its clock, less what the engine's own copies took of it."""

    counts_waits = False

    def __init__(self, stalled_s: Callable[[], float]) -> None:
        self._stalled_s = stalled_s

    def mark(self) -> float:
        return time.perf_counter() - self._stalled_s()

    def settle(self) -> None:
        return None

    def seconds(self, start: float, end: float) -> float:
        return max(0.0, end - start)

    def take_peak_nbytes(self) -> int | None:
        return None


class _CudaMarks:
    """Events on the stream that computes; they wait for nobody. Resets CUDA's own peak of allocated memory."""

    counts_waits = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return max(0.0, float(start.elapsed_time(end)) / 1e3)

    def take_peak_nbytes(self) -> int | None:
        nbytes: int = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return nbytes


def make_marks(device: torch.device, stalled_s: Callable[[], float]) -> Marks:
    """The clock of compute on ``device``."""
    return _CudaMarks(device) if device.type == "cuda" else _HostMarks(stalled_s)


class DeviceClock:
    """When the device was where, on the host's clock. Marks are timing events; nobody waits for them.

    The tie between the two clocks is an event on a stream that never has anything else to do, so that it is reached
    as soon as it is recorded. It is made anew between steps: the device tells milliseconds as 32-bit floats, which
    after a quarter of an hour are good to 60 µs.
    """

    _FIRST_TIE_S = 10.0
    _TIE_S = 0.5e-3  # most that a tie may take; a slower one is none, and the last one stays

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._idle_stream = torch.cuda.Stream(device)
        tie = self._new_tie(self._FIRST_TIE_S)
        if tie is None:
            raise TransferTimeoutError(
                f"{device} did not reach an event on an idle stream within {self._FIRST_TIE_S:.0f} s, so no timeline "
                "can say when it was where. Is it stuck, or does another process keep it busy? trace_steps=0 trains "
                "without a timeline."
            )
        self._tie = tie

    def _new_tie(self, within_s: float) -> tuple[torch.cuda.Event, float] | None:
        event = torch.cuda.Event(enable_timing=True)
        begin_s = time.perf_counter()
        event.record(self._idle_stream)
        while not event.query():
            if time.perf_counter() - begin_s > within_s:
                return None
        return event, (begin_s + time.perf_counter()) / 2

    def tie(self) -> None:
        self._tie = self._new_tie(self._TIE_S) or self._tie

    def mark(self, stream: Any = None) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream if stream is not None else torch.cuda.current_stream(self._device))
        return event, self._tie

    def at_s(self, mark: Any) -> float | None:
        event, (tie, tie_s) = mark
        try:
            return tie_s + float(tie.elapsed_time(event)) / 1e3 if event.query() else None
        except RuntimeError:  # the device has failed, and every call says so
            return None

    def settle(self) -> None:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self._device)


def make_clock(device: torch.device) -> DeviceClock | None:
    """The clock of a timeline's compute and copies; None where they go by the host's."""
    return DeviceClock(device) if device.type == "cuda" else None
