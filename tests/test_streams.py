"""Copies between device and DRAM: time-outs of a copy's ticket, and whose waiting counts as a stall."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loopkit import mlp

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.concepts import Ticket
from lightning_tieroffload.engine import activations, streams
from lightning_tieroffload.engine.streams import HostStreams, LinkRates, Pairs, _CudaTicket, let_segments_grow
from lightning_tieroffload.errors import TransferTimeoutError


class FakeEvent:
    """A CUDA event that completes ``after_s`` seconds from now."""

    def __init__(self, after_s: float) -> None:
        self._at_s = time.monotonic() + after_s
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        return time.monotonic() >= self._at_s

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._at_s - time.monotonic()))


def ticket_after(after_s: float) -> tuple[_CudaTicket, FakeEvent, list[tuple[str, float]]]:
    event, stalls = FakeEvent(after_s), []
    pairs = [(torch.empty(256), torch.empty(256))]
    made: Any = event
    ticket = _CudaTicket(
        made, torch.device("cuda", 3), pairs, lambda kind, s, _: stalls.append((kind, s)), "h2d", "fetch (h.7)",
        nbytes=1024,
    )  # fmt: skip
    return ticket, event, stalls


@pytest.mark.alone
def test_wait_of_a_copy_ends_at_its_deadline() -> None:
    """The error names copy, way, bytes, device and the setting; the copy's memory stays referenced while it runs."""
    ticket, event, stalls = ticket_after(0.3)
    assert isinstance(ticket, Ticket)
    started_s = time.monotonic()
    with pytest.raises(TransferTimeoutError) as caught:
        ticket.wait(0.05)
    assert 0.05 <= time.monotonic() - started_s < 0.25
    for part in ("fetch (h.7)", "h2d", "1 KiB", "cuda:3", "0.1 s", "io_timeout_s"):
        assert part in str(caught.value)
    assert ticket._held is not None
    assert event.num_queries < 200  # it sleeps between its questions
    assert len(stalls) == 1  # what was waited in vain was waited too
    ticket.wait(10)
    assert ticket.done()
    assert ticket._held is None


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_wait_of_a_copy_returns_when_it_has_landed(timeout_s: float | None) -> None:
    ticket, _, stalls = ticket_after(0.02)
    ticket.wait(timeout_s)
    assert ticket.done()
    assert [kind for kind, _ in stalls] == ["h2d"]
    assert stalls[0][1] >= 0.01
    with pytest.raises(TransferTimeoutError):
        ticket_after(1.0)[0].wait(0)


def test_only_what_compute_waits_for_is_a_stall() -> None:
    """An update that waits for a copy in its own lane keeps nobody from computing; autograd's threads are compute."""
    model = mlp(2)
    offload(model, None, device="cpu", device_budget="1MiB", dram_budget="1GiB")
    engine = engine_of(model)
    assert engine is not None
    engine.core.scheduler.submit("update", lambda: engine.space.add_stall("h2d", 100.0), label="waits").wait()
    assert engine.report()["stall_s"]["h2d"] < 100
    other = threading.Thread(target=engine.space.add_stall, args=("h2d", 100.0))
    other.start()
    other.join()
    assert 100 <= engine.report()["stall_s"]["h2d"] < 200
    engine.close()


def test_step_times_are_those_of_a_recent_window() -> None:
    """A run of a million steps keeps no million times, and its median follows what the steps take now."""
    model = mlp(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload(model, optimizer, device="cpu", device_budget="1MiB", dram_budget="1GiB")
    engine = engine_of(model)
    assert engine is not None
    for _ in range(2000):
        engine.updates._note_step(optimizer)
    assert len(engine.updates.step_times_s()) == 512
    assert engine.report()["num_steps"] == 2000
    engine.close()


def test_rates_are_those_of_large_copies_that_have_ended() -> None:
    """Small copies measure the call; of those between events only the ones that are over have a time."""

    class Event:
        def __init__(self, at_ms: float, is_over: bool = True) -> None:
            self.at_ms, self.is_over = at_ms, is_over

        def query(self) -> bool:
            return self.is_over

        def elapsed_time(self, end: Any) -> float:
            return float(end.at_ms - self.at_ms)

    rates, large = LinkRates(), 1 << 24
    for _ in range(9):
        rates.note("h2d", 100, 1.0)
        rates.note("d2h", large, 0.5)
    assert rates.medians() == {"d2h": large / 0.5}
    asked = [rates.wants("h2d", large) for _ in range(40)]
    assert 5 <= sum(asked) < 20
    assert not rates.wants("h2d", 100)
    late = Event(9.0, is_over=False)
    for _ in range(5):
        rates.note_events("h2d", large, Event(1.0), Event(3.0))
        rates.note_events("h2d", large, Event(1.0), late)
    assert rates.medians()["h2d"] == large / 2e-3
    rates.clear()
    assert rates.medians() == {}
    mover = HostStreams(lambda *_: None)
    for _ in range(5):
        mover.upload([(torch.empty(1 << 19), torch.ones(1 << 19))], "x")
    assert set(mover.rates.medians()) == {"h2d"}


def test_rates_may_be_noted_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads copy while the planner asks: a kind that comes meanwhile counts the next time."""
    rates, large = LinkRates(), 1 << 24

    def note(kind: str) -> None:
        for _ in range(5):
            rates.note(kind, large, 0.5)

    def median(seen: Any) -> float:
        note("d2h")
        return float(statistics.median(seen))

    note("h2d")
    monkeypatch.setattr(streams, "statistics", SimpleNamespace(median=median))
    assert rates.medians() == {"h2d": large / 0.5}
    assert rates.medians() == {"h2d": large / 0.5, "d2h": large / 0.5}


def test_a_cast_moves_the_bytes_of_its_narrower_side() -> None:
    mover = HostStreams(lambda *_: None)
    noted: list[int] = []
    mover.rates.note = lambda kind, nbytes, seconds: noted.append(nbytes)  # type: ignore[method-assign]
    mover.upload([(torch.empty(100, dtype=torch.bfloat16), torch.ones(100))], "x")
    mover.download([(torch.empty(100), torch.ones(100, dtype=torch.bfloat16))], "x")
    assert noted == [200, 200]


def test_a_clock_that_cannot_be_tied_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that answers nothing: an error with the setting, before anything is trained."""

    class Never(FakeEvent):
        def record(self, stream: Any) -> None:
            return None

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Never(1e9))
    monkeypatch.setattr(streams.DeviceClock, "_FIRST_TIE_S", 0.01)
    with pytest.raises(TransferTimeoutError, match=r"cuda:3 did not reach an event.*trace_steps=0"):
        streams.DeviceClock(torch.device("cuda", 3))


def test_few_activations_are_on_their_way_down_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host enqueues a whole forward in no time; what it offloads must not all be on the device meanwhile."""
    monkeypatch.setattr(activations, "_LEAVING_NBYTES", 3 * 8192)
    outstanding: list[int] = []
    most: list[int] = []

    class Ticket:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes
            outstanding.append(nbytes)

        def done(self) -> bool:
            return self.nbytes not in outstanding

        def wait(self, timeout_s: float | None = None) -> None:
            if not self.done():
                outstanding.remove(self.nbytes)

        def before_compute(self) -> None:
            return None

    class Downloads(HostStreams):
        def download(self, pairs: Pairs, label: str) -> Any:
            super().download(pairs, label)
            ticket = Ticket(sum(target.nbytes for target, _ in pairs))
            most.append(sum(outstanding))
            return ticket

    store = activations.ActivationStore(Downloads(lambda *_: None), pin=False)
    packed = [store.pack(torch.randn(2048 + i)) for i in range(6)]
    assert all(each is not None for each in packed)
    assert most[-1] <= 3 * 8192
    huge = [store.pack(torch.randn(100_000 + i)) for i in range(4)]
    assert len(outstanding) <= 2, "two of any size, so that one can leave while the next is made"
    del packed, huge


def test_segments_grow_unless_the_user_set_the_allocator_up(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:512")
        assert not let_segments_grow()
        assert settings == []
        monkeypatch.delenv(name)
    assert let_segments_grow()
    assert settings == ["expandable_segments:True"]


def test_an_allocator_without_such_segments_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: str) -> None:
        raise RuntimeError("not supported by this allocator")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert not let_segments_grow()


def test_a_delayed_copy_that_failed_is_no_copy_that_landed() -> None:
    """Whoever waits for it, or for what runs behind it, hears of it each time; who orders the next copy does not."""
    delayed = streams.DelayedStreams(seed=1)
    for _ in range(20):  # the seed runs some of them while others are ordered
        bad = delayed.download([(torch.empty(2), torch.empty(3))], "does not fit")
        source = torch.arange(4.0)
        good = delayed.upload([(target := torch.zeros(4), source)], "fits")
        behind = delayed.make_pipe().store([(torch.empty(4), target)], "behind it", [good, bad], None)
        for ticket in (bad, bad, behind, behind):
            with pytest.raises(RuntimeError, match="size"):
                ticket.wait()
        with pytest.raises(RuntimeError, match="size"):
            bad.before_compute()
        good.wait()
        assert torch.equal(target, source)
    delayed.close()


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("way", ["upload", "download", "sum", "sum in place", "load", "store"])
def test_ctrl_c_loses_no_delayed_copy(way: str, is_after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's copies go on whatever strikes the thread that waits: one that was cut short is done over."""
    delayed = streams.DelayedStreams(seed=0)
    pipe = delayed.make_pipe()
    target, source = torch.ones(4), torch.arange(4.0)
    orders: dict[str, Callable[[], Any]] = {
        "upload": lambda: delayed.upload([(target, source)], "x"),
        "download": lambda: delayed.download([(target, source)], "x"),
        "sum": lambda: delayed.add_down(target, torch.zeros(4), source, (), "x")[0],
        "sum in place": lambda: delayed.add_down(target, target, source, (), "x")[0],
        "load": lambda: pipe.load([(target, source)], "x", []),
        "store": lambda: pipe.store([(target, source)], "x", [], None),
    }
    ticket = orders[way]()
    assert not ticket.done()
    copy = streams._copy

    def cut_short(pairs: Pairs) -> None:
        monkeypatch.setattr(streams, "_copy", copy)
        if is_after:
            copy(pairs)
        raise KeyboardInterrupt

    monkeypatch.setattr(streams, "_copy", cut_short)
    with pytest.raises(KeyboardInterrupt):
        ticket.wait()
    assert not ticket.done()
    delayed.settle()
    assert ticket.done()
    assert torch.equal(target, torch.arange(4.0) + (way == "sum in place"))
    ticket.wait()
    delayed.close()
