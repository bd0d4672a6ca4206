"""What goes wrong in the middle: exceptions between two hooks, two engines, threads that meet, host writes in order."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
from loopkit import mlp
from torch import nn

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.errors import InfeasiblePlanError, UnsupportedError

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
        waited: ClassVar[list[Any]] = []

        def __init__(self, device: Any) -> None:
            self.device = device

        def wait_event(self, event: Any) -> None:
            self.waited.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(device))
    _CudaTicket(Event(), torch.device("cuda", 1), [], lambda *_: None, "h2d").before_compute()  # type: ignore[arg-type]
    assert Stream.waited == [torch.device("cuda", 1)]


# ------------------------------------------------------------------------------------------------- windows
def trained_in_bf16(num_steps: int = 3, **settings: Any) -> nn.Sequential:
    """Layers whose weights travel in 16 bits under autocast."""
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    saved = optimizer.state_dict()
    offload(model, optimizer, **{**SETTINGS, **settings})
    optimizer.load_state_dict(saved)
    for _ in range(num_steps):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(row()).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_data_assigned_inside_a_window_that_holds_16_bits() -> None:
    """``p.data = x`` inside forward under autocast writes the fp32 weight, and this very forward uses it."""
    model = trained_in_bf16()

    def assign(module: nn.Module, _: Any) -> None:
        module.weight.data = torch.zeros(64, 64)

    model[1].register_forward_pre_hook(assign)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        result = model[1](row())
    assert torch.equal(result[0], model[1].bias.detach().bfloat16())
    assert torch.equal(model[1].weight.detach(), torch.zeros(64, 64))


def test_windows_of_two_threads_one_under_autocast() -> None:
    """The parameters wear the class of the window that opened first; what it leased stays after it closes."""
    model = trained_in_bf16()
    engine = engine_of(model)
    assert engine is not None
    inside, leave, done = threading.Event(), threading.Event(), threading.Event()

    class Pause:
        def __call__(self, module: nn.Module, _: Any) -> None:
            if threading.current_thread().name == "first":
                inside.set()
                assert leave.wait(20)

    results: dict[str, torch.Tensor] = {}

    def evaluate() -> None:
        with torch.no_grad():
            results["first"] = model[0](row())
        done.set()

    def second_pause(module: nn.Module, _: Any) -> None:
        if threading.current_thread().name != "first":
            leave.set()
            assert done.wait(20)
            engine.space.make_room(64 * KiB, keep=None, what="another unit", must=False)

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model[0](row())
    model[0].register_forward_pre_hook(Pause())
    model[0].register_forward_pre_hook(second_pause)
    first = threading.Thread(target=evaluate, name="first")
    first.start()
    assert inside.wait(20)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        result = model[0](row())
    first.join()
    assert torch.equal(result, expected)


def test_a_unit_that_could_not_open_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prefetch raises (a failed update of the next unit) comes before the window counts."""
    model = layers()
    offload(model, None, **SETTINGS)
    engine = engine_of(model)
    assert engine is not None
    prefetch = engine.space.prefetch

    def fail() -> None:
        monkeypatch.setattr(engine.space, "prefetch", prefetch)
        raise OSError("the update of the next unit failed")

    monkeypatch.setattr(engine.space, "prefetch", fail)
    with pytest.raises(OSError, match="next unit"):
        model(row())
    assert [unit.num_windows for unit in engine.units] == [0] * 4
    assert not any(part.num_leases for unit in engine.units for part in unit.parts)


def test_another_thread_evicts_between_unpack_and_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward's view of a parameter exists before the lock is let go."""
    from lightning_tieroffload.engine import saved

    model, plain = layers(), layers()
    offload(model, None, **SETTINGS)
    engine = engine_of(model)
    assert engine is not None
    check = saved._check_version
    got_in: list[bool] = []

    def evict_first(*args: Any) -> None:
        def evict() -> None:
            got_in.append(engine.space.lock.acquire(blocking=False))
            if got_in[-1]:
                engine.space.make_room(64 * KiB, keep=None, what="another unit", must=False)
                engine.space.lock.release()

        thread = threading.Thread(target=evict)
        thread.start()
        thread.join()
        check(*args)

    monkeypatch.setattr(saved, "_check_version", evict_first)
    model(row()).sum().backward()
    assert got_in
    plain(row()).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_autograd_grad_inside_a_forward_does_not_hold_the_lock() -> None:
    """On CUDA backward runs in another thread, whose hooks take the lock: held here, both would wait for ever."""
    free: list[bool] = []

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            y.register_hook(look)
            (grad,) = torch.autograd.grad(y.float().sum(), self.inner.weight, retain_graph=True)
            return y + grad.mean().to(y.dtype)

    def look(_: torch.Tensor) -> None:
        def take() -> None:
            free.append(engine.space.lock.acquire(timeout=2))
            if free[-1]:
                engine.space.lock.release()

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()

    torch.manual_seed(0)
    model = nn.Sequential(Penalised(), Penalised())
    offload(model, None, **{**SETTINGS, "units": ["Penalised"]})
    engine: Any = engine_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(row())
    assert free
    assert all(free)


# ------------------------------------------------------------------------------------------------- two engines
def test_reset_of_one_engine_leaves_the_others_windows() -> None:
    """They share the device's budget, not their windows: another thread may be inside the other's forward."""
    policy, reference = layers(), layers()
    offload(policy, None, **SETTINGS)
    offload(reference, None, **SETTINGS)
    engine, other = engine_of(policy), engine_of(reference)
    assert engine is not None
    assert other is not None
    assert engine.core is other.core

    def reset(*_: Any) -> None:
        thread = threading.Thread(target=engine.reset)
        thread.start()
        thread.join()
        assert other.units[2].num_windows == 1
        engine.space.make_room(64 * KiB, keep=None, what="another unit", must=False)
        assert other.units[2].full_parts[0].is_resident

    with torch.no_grad():
        expected = layers()(row())
        reference[2].register_forward_pre_hook(reset)
        assert torch.equal(reference(row()), expected)


# ------------------------------------------------------------------------------------------------- ends
def test_close_adds_what_had_not_left_yet_to_what_had() -> None:
    """A backward that failed in the middle of an accumulation window: every gradient is the plain run's."""

    def run(managed: bool) -> list[torch.Tensor | None]:
        model = layers()
        if managed:
            offload(model, None, **SETTINGS)
        model(row()).sum().backward()
        hidden = model[0](row())

        def fail(_: torch.Tensor) -> None:
            raise RuntimeError("in backward")

        hidden.register_hook(fail)
        with pytest.raises(RuntimeError, match="in backward"):
            model[1:](hidden).sum().backward()
        if managed:
            engine = engine_of(model)
            assert engine is not None
            engine.close()
        return [p.grad for p in model.parameters()]

    for plain, ours in zip(run(False), run(True), strict=True):
        assert plain is not None
        assert ours is not None
        assert torch.equal(plain, ours)


def test_nothing_keeps_the_home_of_before_the_split() -> None:
    """The parameter over the old home, made for ``load_state_dict``, would keep 4 bytes a weight mapped."""
    engine = engine_of(trained_in_bf16(optimizer_kernel="numba"))
    assert engine is not None
    split = [slot for unit in engine.units for slot in unit.slots if slot.split is not None]
    assert split
    assert all(slot.host_param is None for slot in split)


def test_one_call_over_parameters_of_two_budgets() -> None:
    """A target network with settings of its own is averaged by one foreach call over both models."""
    policy, target, plain_policy, plain_target = layers(2), layers(2), layers(2), layers(2)
    offload(policy, None, **SETTINGS)
    offload(target, None, **{**SETTINGS, "device_budget": 128 * KiB})
    with torch.no_grad():
        for model in (policy, plain_policy):
            torch._foreach_mul_(list(model.parameters()), 3.0)
        torch._foreach_lerp_(list(target.parameters()), list(policy.parameters()), 0.5)
        torch._foreach_lerp_(list(plain_target.parameters()), list(plain_policy.parameters()), 0.5)
    for p, q in zip(plain_target.parameters(), target.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("adopted_first", [True, False])
def test_one_optimizer_over_two_budgets_is_refused(adopted_first: bool) -> None:
    policy, value = layers(2), layers(2)
    optimizer = torch.optim.AdamW([*policy.parameters(), *value.parameters()], 1e-3)
    if adopted_first:
        offload(policy, optimizer, **SETTINGS)
    else:
        offload(policy, None, **SETTINGS)
    other = {**SETTINGS, "device_budget": 128 * KiB}
    if adopted_first:
        offload(value, None, **other)
        (policy(row()) + value(row())).sum().backward()
        with pytest.raises(UnsupportedError, match="2 engines with different settings"):
            optimizer.step()
    else:
        with pytest.raises(UnsupportedError, match="2 engines with different settings"):
            offload(value, optimizer, **other)


def test_dropped_model_is_gone_though_another_shares_its_budget() -> None:
    """A model dropped without close() leaves memory and books, while another engine with its settings goes on."""
    settings = {"device": "cpu", "device_budget": 60_000, "dram_budget": "1GiB", "optimizer_kernel": "torch"}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(4, 64)) ** 2).mean().backward()
            optimizer.step()

    kept, dropped = mlp(3), mlp(3)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (kept, dropped)]
    for model, optimizer in zip((kept, dropped), optimizers, strict=True):
        offload(model, optimizer, **settings)
        train(model, optimizer)
    engine, other = engine_of(kept), engine_of(dropped)
    assert engine is not None
    assert other is not None
    assert other.core is engine.core
    held = list(dropped.parameters())[0].data  # the user's memory, which keeps a part on the device  # noqa: RUF015
    other.flush()
    gone = [weakref.ref(each) for each in (other, dropped, optimizers[1], *dropped.parameters())]
    before = engine.report()["tiers"]
    del model, optimizer, dropped, other
    optimizers.pop()
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)
    assert held.isfinite().all()
    train(kept, optimizers[0])
    after = engine.report()["tiers"]
    assert after["dram"]["home_nbytes"] == before["dram"]["home_nbytes"] / 2
    assert len(engine.space.by_storage) == len(engine.space.units) == 4
    assert after["device"]["used_nbytes"] == sum(p.charged_nbytes for u in engine.space.units for p in u.parts)
    engine.close()


# -------------------------------------------------------------------------------------------------------- budgets
@pytest.mark.parametrize(("chosen", "other"), [("device", "dram"), ("dram", "device")])
def test_a_budget_that_another_left_nothing_for_says_so(chosen: str, other: str) -> None:
    """Without a GPU both are host memory: the message names the setting that somebody did choose."""
    with pytest.raises(InfeasiblePlanError, match=f"{other}_budget is 0 B .*less {chosen}_budget, 9"):
        offload(layers(), **{f"{chosen}_budget": 10**18})
