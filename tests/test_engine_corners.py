"""What goes wrong in the middle: exceptions between two hooks, two engines, threads that meet, host writes in order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_tieroffload import engine_of, offload

KiB = 1024
SETTINGS: dict[str, Any] = {"device_budget": 64 * KiB, "dram_budget": 64 * KiB * KiB}
pytestmark = pytest.mark.usefixtures("one_thread")


def layers(num: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(num)])


def row() -> torch.Tensor:
    return torch.linspace(-1, 1, 64)[None]


# ---------------------------------------------------------------------------------------------------- state_dict
@pytest.mark.parametrize("how", ["step", "alias", "load"])
def test_a_state_dict_that_failed_leaves_nothing_for_the_next(how: str) -> None:
    """An exception in a user's hook skips ours; the next state_dict shows the values of its own time."""
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    offload(model, optimizer, **SETTINGS)
    fails = [True]

    def hook(*_: Any) -> None:
        if fails[0]:
            raise RuntimeError("disk full")

    model[2]._register_state_dict_hook(hook)
    with pytest.raises(RuntimeError, match="disk full"):
        model.state_dict()
    fails[0] = False
    if how == "step":
        model(row()).sum().backward()
        optimizer.step()
    elif how == "alias":
        model[0].weight.detach().mul_(2.0)  # an alias, not a snapshot
    else:
        model[0].weight.data = torch.ones(64, 64)
    now = model[0].weight.detach().clone()
    saved = model.state_dict()["0.weight"]
    assert torch.equal(saved, now)
    if how == "alias":
        assert torch.equal(now, 2 * layers()[0].weight)


# ------------------------------------------------------------------------------------------- host writes in order
class _Reading:
    """An upload as CUDA does it: compute is ordered behind it at once, the host only by ``wait``."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        self._log.append(f"waited for {self._name}")

    def before_compute(self) -> None:
        pass


@pytest.mark.parametrize("how", ["step", "copy", "closure"])
def test_the_host_writes_a_home_only_after_the_copies_that_read_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward, then an evaluation whose uploads are only ordered for compute, then a host write of the weights."""
    model = layers()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if how == "closure":
        optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=1)
    offload(model, optimizer, **SETTINGS)
    engine = engine_of(model)
    assert engine is not None
    model(row()).sum().backward()
    log: list[str] = []
    uploads: list[str] = []
    upload = engine.space._streams.upload

    def recorded(pairs: Any, label: str) -> Any:
        upload(pairs, label)
        uploads.append(f"waited for {label}")
        return _Reading(log, label)

    monkeypatch.setattr(engine.space._streams, "upload", recorded)
    with torch.no_grad():
        model(row())
    fetched = set(uploads)  # those of the evaluation
    log.clear()
    assert fetched
    order_home_write, run_torch = engine.space.order_home_write, engine.updates._run_torch
    if how == "step":

        def run(*args: Any) -> Any:
            log.append("write")
            return run_torch(*args)

        monkeypatch.setattr(engine.updates, "_run_torch", run)
        optimizer.step()
        engine.flush()
        assert log.count("write") == len(engine.units)
    else:

        def write(*args: Any) -> Any:
            log.append("write")
            return order_home_write(*args)

        monkeypatch.setattr(engine.space, "order_home_write", write)
        with torch.no_grad():
            if how == "copy":
                for p in model.parameters():
                    p.copy_(torch.zeros_like(p))
            else:
                optimizer.step(lambda: 0.0)
    last_write = max(i for i, entry in enumerate(log) if entry == "write")
    assert fetched <= set(log[:last_write])


def test_compute_waits_on_the_stream_of_the_copys_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device may be cuda:0 while an engine computes on cuda:1."""
    from lightning_tieroffload.engine.streams import _CudaTicket

    class Event:
        def query(self) -> bool:
            return False

    class Stream:
        waited: list[Any] = []

        def __init__(self, device: Any) -> None:
            self.device = device

        def wait_event(self, event: Any) -> None:
            self.waited.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(device))
    _CudaTicket(Event(), torch.device("cuda", 1), [], lambda *_: None, "h2d").before_compute()  # type: ignore[arg-type]
    assert Stream.waited == [torch.device("cuda", 1)]
