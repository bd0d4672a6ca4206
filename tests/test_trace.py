"""The timeline: each transfer, update, compute window and stall of a step by its unit's name; no number changes."""

from __future__ import annotations

import collections
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Stack
from torch import nn
from toys import assert_same, snapshot

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.gaps import OUTSIDE, gaps_of
from lightning_tieroffload.kernels.pool import KernelPool
from lightning_tieroffload.trace import _MOST_EVENTS, NamedSlices, TraceRecorder

NUM_STEPS = 5


def trained(path: Path | None, *, num_steps: int = NUM_STEPS, model: nn.Module | None = None, **settings: Any) -> Any:
    """(what training made, the timeline, the report) of a small model."""
    torch.manual_seed(0)
    model = Stack(4) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = {"device_budget": "32KiB", "dram_budget": "1GiB", "profile_steps": 0, **settings}
    offload(model, optimizer, device="cpu", trace_path=path, **given)
    engine = engine_of(model)
    assert engine is not None
    losses = []
    for x in torch.randn(num_steps, 16, 24, generator=torch.Generator().manual_seed(1)):
        loss = model(x).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    engine.core.scheduler.drain()
    report = engine.report()
    engine.close()
    timeline = json.loads((path / "timeline.json").read_text()) if path is not None else None
    return {"losses": losses, **snapshot(model, optimizer)}, timeline, report


def events_of(timeline: dict[str, Any], lane: str | None = None) -> list[dict[str, Any]]:
    return [e for e in timeline["traceEvents"] if e["ph"] == "X" and lane in (None, e["cat"])]


def within(events: list[dict[str, Any]], outer: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in events if outer["ts"] <= e["ts"] and e["ts"] + e["dur"] <= outer["ts"] + outer["dur"]]


def assert_sound(timeline: dict[str, Any]) -> None:
    """What holds of every timeline: named and sorted tracks, no negative time, events of a track nested or apart."""
    named = {e["tid"]: e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name"}
    assert len(set(named.values())) == len(named)
    by_track = defaultdict(list)
    for event in events_of(timeline):
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        by_track[event["tid"]].append(event)
    assert set(by_track) == set(named)
    for events in by_track.values():
        assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
        open_until: list[float] = []
        for event in events:
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)
    assert timeline["otherData"]["num_lost_events"] == 0


UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "root")


@pytest.mark.parametrize("kernel", ["torch", "numba"])
def test_a_step_on_a_timeline(tmp_path: Path, kernel: str) -> None:
    """Every unit is fetched, computes both ways, sends its gradients down and is updated, in every step, by name."""
    _, timeline, report = trained(tmp_path, optimizer_kernel=kernel)
    assert_sound(timeline)
    steps = events_of(timeline, "steps")
    assert [e["name"] for e in steps] == ["step 3", "step 4", "step 5"]
    assert [e["tid"] for e in steps] == [1] * 3  # the first track
    for step in steps:
        names = {lane: Counter(e["name"] for e in within(events_of(timeline, lane), step)) for lane in
                 ("compute", "h2d", "d2h", "update", "kernels", "host")}  # fmt: skip
        for unit in UNITS:
            assert names["compute"][f"forward ({unit})"] == 1
            assert names["compute"][f"backward ({unit})"] == 1
            assert names["h2d"][f"fetch ({unit})"] >= 1
            grads = [name for name in names["d2h"] if name.startswith("gradient (") and unit in name]
            assert len(grads) == (2 if unit == "root" else 5)
        assert names["host"] == {"AdamW.step()": 1}
    for lane, name in (("update", "update ({})"), ("kernels", "AdamW ({})" if kernel == "torch" else "weights")):
        found = Counter(e["name"] for e in events_of(timeline, lane))
        for unit in UNITS:
            assert (
                sum(count for each, count in found.items() if each.startswith(name.format(unit)) and unit in each) >= 3
            )
    for event in events_of(timeline):
        if event["cat"] not in ("steps", "host") and event["name"] != "factor":
            assert any(unit in event["name"] for unit in UNITS), event["name"]
    moved = sum(e["args"]["nbytes"] for e in events_of(timeline, "h2d"))
    assert 0 < moved < report["moved_nbytes"]["h2d"]  # of the last three steps


def test_bytes_and_stalls_are_those_of_the_report(tmp_path: Path) -> None:
    """Over a whole run, the events add up to what the engine counted."""
    _, timeline, report = trained(tmp_path, trace_steps=100)
    for lane in ("h2d", "d2h"):
        moved = sum(e.get("args", {}).get("nbytes", 0) for e in events_of(timeline, lane))
        assert moved == report["moved_nbytes"][lane]
    stalled_s = sum(e["dur"] for e in events_of(timeline, "stalls")) / 1e6
    assert stalled_s == pytest.approx(report["stall_s"]["total"], rel=0.05)


def test_flash(tmp_path: Path) -> None:
    """Reads and writes carry shard and path; a lane with several threads has a track for each."""
    _, timeline, report = trained(
        tmp_path / "trace", nvme_paths=[tmp_path / "flash"], dram_budget="150KiB", trace_steps=100
    )
    assert_sound(timeline)
    for lane in ("read", "write"):
        events = events_of(timeline, f"{lane}0")
        assert sum(e["args"]["nbytes"] for e in events) == report["moved_nbytes"][lane] > 0
        assert all(re.match(rf"{lane} \d+/(blocks\.\d|root):", e["name"]) for e in events)
        assert all(str(tmp_path / "flash") in e["name"] for e in events)


def test_activations_and_recompute(tmp_path: Path) -> None:
    _, timeline, _ = trained(tmp_path / "a", activations="offload", model=Wide(), device_budget="400KiB")
    assert_sound(timeline)
    for lane in ("d2h", "h2d"):
        found = {e["name"] for e in events_of(timeline, lane)}
        assert {f"activation ({i})" for i in range(3)} <= found
    _, timeline, _ = trained(tmp_path / "r", activations="recompute")
    assert_sound(timeline)
    backwards = {e["name"]: e for e in events_of(timeline, "compute")}
    for unit in UNITS[:4]:
        assert within([backwards[f"recompute ({unit})"]], backwards[f"backward ({unit})"])


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(24, 512), nn.GELU(), nn.Linear(512, 24)) for _ in range(4)))


@pytest.mark.parametrize("debug", [(), ("poison", "delays")])
@pytest.mark.parametrize("settings", [{}, {"activations": "recompute"}, {"optimizer_kernel": "numba"}])
def test_recording_changes_no_number(tmp_path: Path, settings: dict[str, Any], debug: tuple[str, ...]) -> None:
    with_trace, timeline, _ = trained(tmp_path, debug=debug, **settings)
    without, _, _ = trained(None, debug=debug, **settings)
    assert_same(without, with_trace)
    assert_sound(timeline)


def test_off_means_off(tmp_path: Path) -> None:
    """Nobody records without ``trace_path``, or with ``trace_steps=0``, which writes the report alone."""
    model, optimizer = offload(Stack(), None, device="cpu", dram_budget="1GiB")
    engine = engine_of(model)
    assert engine is not None
    assert engine.space.trace is None
    assert engine.timeline() is None
    engine.close()
    model, optimizer = offload(Stack(), None, device="cpu", dram_budget="1GiB", trace_path=tmp_path, trace_steps=0)
    engine = engine_of(model)
    assert engine is not None
    assert engine.space.trace is None
    engine.close()
    assert (tmp_path / "report.json").exists()
    assert not (tmp_path / "timeline.json").exists()
    assert optimizer is None


# ---------------------------------------------------------------- the file


def test_a_run_that_fails_leaves_its_timeline(tmp_path: Path) -> None:
    script = (
        "import sys, torch, lightning_tieroffload\nfrom torch import nn\n"
        "net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))\n"
        "net, adamw = lightning_tieroffload.offload(net, torch.optim.AdamW(net.parameters()), trace_path=sys.argv[1],\n"
        "    device='cpu', device_budget='64KiB', dram_budget='1GiB', profile_steps=0)\n"
        "for i in range(4):\n"
        "    loss = net(torch.randn(8, 64)).sum()\n"
        "    if i == 3: raise RuntimeError('in the middle of step 4')\n"
        "    loss.backward(); adamw.step(); adamw.zero_grad()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: in the middle of step 4")
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert_sound(timeline)
    steps = events_of(timeline, "steps")
    assert [e["name"] for e in steps] == ["step 1", "step 2", "step 3"]
    # What the step that failed had done is there too.
    end = steps[-1]["ts"] + steps[-1]["dur"]
    assert [e["name"] for e in events_of(timeline, "compute") if e["ts"] > end] == [f"forward ({i})" for i in range(4)]
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "report.json", "timeline.json"]


def test_a_fit_that_fails_leaves_its_timeline(tmp_path: Path) -> None:
    """Under Lightning, whose teardown comes before the process ends; the error is the user's own."""
    import lightning.pytorch as pl

    from lightning_tieroffload import TierOffloadStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Stack()

        def training_step(self, x: torch.Tensor, index: int) -> torch.Tensor:
            if index == 3:
                raise RuntimeError("in the middle of step 4")
            return self.net(x).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    given = {"device_budget": "32KiB", "dram_budget": "1GiB", "profile_steps": 0, "trace_path": tmp_path}
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", strategy=TierOffloadStrategy(**given), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="in the middle of step 4"):
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(24, 24), batch_size=4))
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert_sound(timeline)
    assert [e["name"] for e in events_of(timeline, "steps")] == ["step 1", "step 2", "step 3"]


def test_what_cannot_be_written_is_said_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "timeline.json").mkdir()
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters())
    offload(model, optimizer, device="cpu", dram_budget="1GiB", trace_path=tmp_path, profile_steps=0)
    model(torch.randn(4, 24)).sum().backward()
    optimizer.step()
    engine = engine_of(model)
    assert engine is not None
    engine.close()
    assert "timeline could not be written" in caplog.text
    assert (tmp_path / "report.json").exists()
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "report.json", "timeline.json"]  # no half-written one


# ---------------------------------------------------------------- the recorder


class LateClock:
    """An accelerator's clock whose marks can be read once it has got there."""

    def __init__(self) -> None:
        self.is_settled = False
        self.reached_s = 0.0

    def mark(self, stream: Any = None) -> Any:
        return [time.perf_counter()]

    def at_s(self, mark: Any) -> float | None:
        return mark[0] if self.is_settled or mark[0] <= self.reached_s else None

    def tie(self) -> None:
        return None

    def settle(self) -> None:
        self.is_settled = True


def test_marks_are_read_when_they_are_reached() -> None:
    clock = LateClock()
    recorder = TraceRecorder(2, clock)
    for step in range(1, 4):
        begin = recorder.mark()
        recorder.add("h2d", f"fetch (h.{step})", begin, recorder.mark(), 8)
        recorder.add("update", f"update (h.{step})", time.perf_counter(), time.perf_counter())
        recorder.end_step(step)
    recorder.end_step(4)
    late = recorder.mark()
    recorder.add("compute", "forward (h.9)", late, recorder.mark())
    timeline = recorder.to_json()
    assert_sound(timeline)
    assert timeline["otherData"]["compute"] == "device"
    assert [e["name"] for e in events_of(timeline, "compute")] == ["forward (h.9)"]
    assert [e["name"] for e in events_of(timeline, "h2d")] == ["fetch (h.3)"]
    assert [e["name"] for e in events_of(timeline, "steps")] == ["step 3", "step 4"]


def test_marks_that_were_never_reached_are_left_out_and_counted() -> None:
    """The device of a run that failed may never get there, or say nothing any more."""
    clock = LateClock()
    recorder = TraceRecorder(2, clock)
    recorder.add("h2d", "fetch (h.0)", recorder.mark(), recorder.mark())
    clock.reached_s = time.perf_counter()
    recorder.add("h2d", "fetch (h.1)", recorder.mark(), recorder.mark())
    clock.settle = lambda: None  # type: ignore[method-assign]
    timeline = recorder.to_json()
    assert [e["name"] for e in events_of(timeline, "h2d")] == ["fetch (h.0)"]
    assert timeline["otherData"]["num_lost_events"] == 1


def test_memory_is_bounded_and_what_is_lost_is_counted() -> None:
    recorder = TraceRecorder(2)

    def write() -> None:
        for _ in range(2 * _MOST_EVENTS):
            recorder.add("h2d", "x", 0.0, 0.0)

    for step in range(5):
        threads = [threading.Thread(target=write) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.end_step(step)
    assert sum(step.num_events for step in recorder._steps) <= 2 * (3 * _MOST_EVENTS + 1)
    assert not recorder._writers  # of threads that are gone
    timeline = recorder.to_json()
    assert timeline["otherData"]["num_lost_events"] == 5 * 3 * _MOST_EVENTS
    recorder = TraceRecorder(2)
    for _ in range(3):
        for _ in range(8):
            thread = threading.Thread(target=write)
            thread.start()
            thread.join()
        recorder.end_step(0)
    assert max(step.num_events for step in recorder._steps) <= 4 * _MOST_EVENTS


def test_nothing_counts_as_lost_that_was_not() -> None:
    """Steps end while threads write: wherever in ``add`` that happens, what is kept is not counted as lost."""

    class Interrupted(collections.deque[Any]):
        def append(self, event: Any) -> None:
            recorder.end_step(0)
            super().append(event)
            recorder.end_step(1)

    recorder = TraceRecorder(100)
    recorder.add("h2d", "x", 0.0, 0.0)
    (writer,) = recorder._writers
    writer.events = Interrupted(writer.events, maxlen=_MOST_EVENTS)
    for _ in range(10):
        recorder.add("h2d", "x", 0.0, 0.0)
    timeline = recorder.to_json()
    assert len(events_of(timeline, "h2d")) == 11
    assert timeline["otherData"]["num_lost_events"] == 0


def test_threads_that_write_at_once_lose_nothing() -> None:
    recorder = TraceRecorder(1000)
    num_done = threading.Semaphore(0)

    def write() -> None:
        for index in range(5000):
            recorder.add("h2d", "x", float(index), float(index))
        num_done.release()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    num_steps = 0
    while any(thread.is_alive() for thread in threads):
        recorder.end_step(num_steps)
        num_steps += 1
        time.sleep(1e-4)
    for thread in threads:
        thread.join()
    timeline = recorder.to_json()
    events = events_of(timeline, "h2d")
    assert len(events) == 4 * 5000
    assert timeline["otherData"]["num_lost_events"] == 0
    assert len({e["tid"] for e in events}) == 4


def test_kernel_slices_are_named() -> None:
    recorder = TraceRecorder(1)
    with KernelPool(2) as pool:
        NamedSlices(pool, recorder, "weights (h.0)").submit(
            lambda begin, end: None, 1 << 20, among_numel=1 << 20
        ).result()

        def fail(begin: int, end: int) -> None:
            raise ValueError("in a slice")

        with pytest.raises(ValueError, match="in a slice"):
            NamedSlices(pool, recorder, "weights (h.1)").submit(fail, 10).result()
    found = Counter(e["name"] for e in events_of(recorder.to_json(), "kernels"))
    assert found == {"weights (h.0)": 8, "weights (h.1)": 1}


# ---------------------------------------------------------------- gaps


def made(where: str = "host", /, **lanes: list[tuple[str, float, float]]) -> dict[str, Any]:
    events = [
        {"ph": "X", "cat": lane.replace("_", " "), "name": name, "ts": begin * 1e3, "dur": (end - begin) * 1e3}
        for lane, spans in lanes.items()
        for name, begin, end in spans
    ]
    return {"traceEvents": [{"ph": "M", "name": "thread_name"}, *events], "otherData": {"compute": where}}


def test_gaps_and_their_causes() -> None:
    """Waiting inside a window is idle time; each gap has the name of what took most of it."""
    (step,) = gaps_of(
        made(
            steps=[("step 7", 0, 100)],
            compute=[("forward (a)", 10, 40), ("backward (a)", 50, 80)],
            stalls=[("fetch (a)", 0, 8), ("gradient (a.w)", 60, 65), ("update (b)", 41, 42)],
            host=[("AdamW.step()", 82, 98)],
            h2d=[("fetch (b)", 0, 100)],
        )
    )
    assert (step.name, step.step_s) == ("step 7", pytest.approx(0.1))
    assert step.busy_s == pytest.approx(0.055)
    assert step.idle_s == pytest.approx(0.045)
    assert [(g.cause, round(g.seconds * 1e3), round(g.at_s * 1e3), round(g.cause_s * 1e3)) for g in step.gaps] == [
        ("AdamW.step()", 20, 80, 16), ("fetch (a)", 10, 0, 8), ("update (b)", 10, 40, 1), ("gradient (a.w)", 5, 60, 5),
    ]  # fmt: skip
    assert step.by_cause()[0] == ("AdamW.step()", pytest.approx(0.02))


def test_gaps_of_a_device_are_what_its_stream_waited_for() -> None:
    """The host may wait while the device computes: that is no gap."""
    (step,) = gaps_of(
        made(
            "device",
            steps=[("step 1", 0, 50)],
            compute=[("forward (a)", 0, 20), ("forward (b)", 30, 50)],
            stalls=[("gradient (a.w)", 0, 20)],
            stalls_on_the_device=[("fetch (b)", 32, 36)],
        )
    )
    assert step.busy_s == pytest.approx(0.036)
    assert [(g.cause, round(g.seconds * 1e3)) for g in step.gaps] == [(OUTSIDE, 10), ("fetch (b)", 4)]


def test_gaps_of_a_real_step_add_up(tmp_path: Path) -> None:
    _, timeline, _ = trained(tmp_path)
    for step in gaps_of(timeline):
        assert step.busy_s + sum(gap.seconds for gap in step.gaps) == pytest.approx(step.step_s, rel=1e-6)
        assert 0 < step.busy_s < step.step_s
