"""The timeline on a real device: copies by their own streams' events, on the host's clock."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.engine.streams import DeviceClock
from lightning_tieroffload.gaps import gaps_of

pytestmark = pytest.mark.gpu


def test_the_two_clocks_agree() -> None:
    """A mark that is waited for at once lies where the host says; one behind long work lies behind it."""
    device = torch.device("cuda", torch.cuda.current_device())
    clock = DeviceClock(device)
    a = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize(device)
    for _ in range(20):
        clock.tie()
        before_s = time.perf_counter()
        first = clock.mark()
        for _ in range(10):
            a @ a
        second = clock.mark()
        torch.cuda.synchronize(device)
        after_s = time.perf_counter()
        first_s, second_s = clock.at_s(first), clock.at_s(second)
        assert first_s is not None
        assert second_s is not None
        assert before_s - 1e-3 <= first_s < second_s <= after_s + 1e-3


def test_copies_and_windows_lie_within_their_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = offload(
        model, optimizer, device_budget="20MiB", dram_budget="2GiB", trace_path=tmp_path, update_on="cpu"
    )
    for _ in range(6):
        model(torch.randn(512, 1024, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    assert engine is not None
    engine.close()
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert timeline["otherData"] == {"compute": "device", "num_lost_events": 0}
    events = [e for e in timeline["traceEvents"] if e["ph"] == "X"]
    for unit in range(8):
        for lane, name in (
            ("h2d", f"fetch ({unit})"), ("d2h", f"gradient ({unit}.0.weight)"),
            ("compute", f"forward ({unit})"), ("compute", f"backward ({unit})"),
        ):  # fmt: skip
            found = [e for e in events if e["cat"] == lane and e["name"] == name]
            assert len(found) >= 3, (lane, name)
            assert all(e["dur"] > 0 for e in found)
            if lane in ("h2d", "d2h"):
                # 4 MiB over a link of at most 200 GB/s. One copy may have stood still for as long as its machine did.
                rates = [e["args"]["nbytes"] / e["dur"] * 1e6 for e in found if e["args"]["nbytes"] > 1 << 20]
                assert all(rate < 2e11 for rate in rates), rates
                assert statistics.median(rates) > 1e9, rates
    for step in gaps_of(timeline):
        assert 0 < step.busy_s <= step.step_s
