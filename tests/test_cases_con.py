"""Concurrency cases (CON), errors, and the configuration cases that need a trainer (CFG-02, CFG-07)."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from exactness import assert_ordinary, check, same_bits, seed_all, starved, take_down, tight
from loopkit import ROOT, Module, loader, mlp, python, start, starved_settings, trainer
from torch import nn

import lightning_tieroffload as tieroffload
from lightning_tieroffload.engine import offload_engine, streams
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.engine.optimizer import Updates
from lightning_tieroffload.memory.arena import PinnedArena

_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests() -> None:
    """Other files of the same run leave engines open on purpose: their threads are not this test's."""
    gc.collect()
    _earlier.clear()
    _earlier.update(threading.enumerate())


def our_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if "tieroffload" in t.name and t not in _earlier)


def assert_no_thread_left() -> None:
    deadline_s = time.monotonic() + 5
    while our_threads() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert our_threads() == []


def train(model: nn.Module, optimizer: Any, num_steps: int = 3) -> None:
    x = torch.ones(4, 64)
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


# ------------------------------------------------------------------------------------------------ CON-01


class Injected(Exception):
    pass


class InjectedBase(BaseException):
    pass


TARGETS = {
    "update": (Updates, "_run_torch"),
    "copy to device": (streams.HostStreams, "upload"),
    "copy to DRAM": (streams.HostStreams, "download"),
    "allocation": (PinnedArena, "take"),
    "units": (offload_engine, "find_units"),
}


@contextmanager
def failing(what: str, at_call: int, error: BaseException) -> Iterator[list[int]]:
    """The ``at_call``-th call of one of the engine's parts raises ``error``; gives the number of calls made."""
    owner, name = TARGETS[what]
    original = getattr(owner, name)
    num_calls = [0]

    def call(*arguments: Any, **options: Any) -> Any:
        num_calls[0] += 1
        if num_calls[0] == at_call:
            raise error
        return original(*arguments, **options)

    setattr(owner, name, call)
    try:
        yield num_calls
    finally:
        setattr(owner, name, original)


def whole_run(state: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Attach, three steps, an evaluation, a save, close. Returns what it ended with."""
    seed_all(0)
    model = mlp(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = None
    failure: BaseException | None = None
    try:
        tieroffload.offload(
            model, optimizer, device="cpu", device_budget=_BUDGET, dram_budget="1GiB", optimizer_kernel="torch"
        )
        engine = engine_of(model)
        train(model, optimizer)
        with torch.no_grad():
            model(torch.ones(4, 64))
        take_down(model, [optimizer])
    except BaseException as error:
        failure = error
    finally:
        if engine is not None:
            try:
                engine.reset()
            finally:
                try:
                    engine.close()
                except BaseException as late:
                    if failure is None:
                        failure = late
        assert_ordinary(model)
        assert_no_thread_left()
    if failure is not None:
        raise failure
    return take_down(model, [optimizer])


_BUDGET = 3 * 16640  # three layers of MLP-k, of four


@pytest.mark.parametrize("make_error", [Injected, InjectedBase, KeyboardInterrupt])
@pytest.mark.parametrize("what", TARGETS)
def test_con_01_error_at_call_n(what: str, make_error: type[BaseException]) -> None:
    """CON-01: whichever of the first 50 calls fails, that very exception reaches the training thread, at once."""
    expected = whole_run()
    num_raised = 0
    for at_call in range(1, 51, 1 if make_error is Injected else 4):
        error = make_error(f"{what} {at_call}")
        start_s = time.monotonic()
        raised: BaseException | None = None
        with failing(what, at_call, error) as num_calls:
            try:
                whole_run()
            except (Injected, InjectedBase, KeyboardInterrupt) as found:
                raised = found
        if num_calls[0] < at_call:
            assert raised is None
            break
        assert raised is error, (what, at_call)
        assert time.monotonic() - start_s < 5
        num_raised += 1
    assert num_raised >= (1 if what == "units" else 3)
    after = whole_run()  # the process can start anew
    assert all(same_bits(expected[key], after[key]) for key in expected)


@pytest.mark.parametrize("what", ["update", "copy to device", "copy to DRAM"])
def test_con_01_error_in_a_fit(what: str, tmp_path: Path) -> None:
    """CON-01: the same inside ``Trainer.fit`` with validation and a save; the next fit is exact."""
    expected = None
    for at_call in (0, 1, 2, 5, 9, 14, 23, 49):
        module = Module(lambda: mlp(2))
        run = trainer(
            {"device_budget": _BUDGET, "dram_budget": "1GiB", "optimizer_kernel": "torch"},
            max_epochs=2, default_root_dir=tmp_path, enable_checkpointing=True,
        )  # fmt: skip
        error = Injected(at_call)
        raised: BaseException | None = None
        with failing(what, at_call, error) as num_calls:
            try:
                run.fit(module, loader(5), loader(1))
            except Injected as found:
                raised = found
        assert raised is (error if 0 < at_call <= num_calls[0] else None), at_call
        assert run.strategy.engine is None
        assert_ordinary(module)
        assert_no_thread_left()
        if at_call == 0:
            expected = take_down(module, [])
    module = Module(lambda: mlp(2))
    run = trainer({"device_budget": _BUDGET, "dram_budget": "1GiB", "optimizer_kernel": "torch"}, max_epochs=2)
    run.fit(module, loader(5), loader(1))
    assert expected is not None
    assert all(same_bits(value, expected[key]) for key, value in take_down(module, []).items())


def test_con_01_error_of_the_last_update_makes_fit_fail() -> None:
    """CON-01: nobody interacts after the last step, and still ``fit`` does not end as if all was well."""
    module = Module(lambda: mlp(2))
    run = trainer({"device_budget": _BUDGET, "dram_budget": "1GiB"}, max_steps=3)
    num_updates = 3 * 3
    error = Injected("last")
    with failing("update", num_updates, error) as num_calls, pytest.raises(Injected) as caught:
        run.fit(module, loader(3))
    assert num_calls == [num_updates]
    assert caught.value is error
    assert any("_run_torch" in line.name or "call" in line.name for line in caught.traceback)
    assert_no_thread_left()


# ------------------------------------------------------------------------------------------------ CON-02


_TWO_FITS = """
import threading, time
import numba, numpy as np, torch
import lightning_tieroffload as tieroffload
from loopkit import mlp

@numba.njit(parallel=True)
def user_kernel(x):
    total = 0.0
    for i in numba.prange(x.size):
        total += x[i]
    return total

failures, ended = [], threading.Event()

def fit(seed):
    try:
        model = mlp(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
        tieroffload.offload(model, optimizer, device="cpu", device_budget=50000, dram_budget="1GiB",
                            optimizer_kernel="numba", prefetch_units=seed + 1)
        for _ in range(20):
            optimizer.zero_grad()
            (model(torch.ones(4, 64)) ** 2).mean().backward()
            optimizer.step()
        tieroffload.engine_of(model).close()
    except BaseException as error:
        failures.append(error)

def user():
    try:
        while not ended.is_set():
            assert user_kernel(np.ones(1000)) == 1000.0
    except BaseException as error:
        failures.append(error)

user_kernel(np.ones(10))
threads = [threading.Thread(target=fit, args=(seed,)) for seed in range(2)]
other = threading.Thread(target=user)
for thread in [*threads, other]:
    thread.start()
for thread in threads:
    thread.join()
ended.set()
other.join()
assert not failures, failures
print("layer", numba.threading_layer())
"""


@pytest.mark.slow
def test_con_02_numba_layer_that_is_not_reentrant(tmp_path: Path) -> None:
    """CON-02: two engines in two threads beside the user's own parallel kernel, with the workqueue layer: no abort."""
    done = python(_TWO_FITS, cwd=tmp_path, NUMBA_THREADING_LAYER="workqueue", NUMBA_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["layer", "workqueue"]


# ------------------------------------------------------------------------------------------------ CON-03


_WORKERS = """
import os, sys, time
import numba, numpy as np, torch
from torch.utils.data import DataLoader, Dataset
from exactness import assert_exact
from loopkit import Look, Module, mlp, trainer

@numba.njit(parallel=True, cache=True)   # compiled and run in the workers only: not even compiled here before the fork
def doubled(x):
    y = np.empty_like(x)
    for i in numba.prange(x.size):
        y[i] = 2 * x[i]
    return y

class Data(Dataset):
    def __init__(self, module, ours):
        self.module, self.ours = module, ours
    def __len__(self):
        return 12
    def __getitem__(self, index):
        assert os.getpid() != parent
        if index == 3:
            try:
                self.module.net[0].weight.sum()
            except RuntimeError as error:
                assert "forked worker cannot read" in str(error), error
            else:
                assert not self.ours, "a worker read a parameter that is not there"
        return torch.from_numpy(doubled(np.full(64, index / 7)).astype(np.float32))

def fit(settings):
    module, look = Module(lambda: mlp(3)), Look()
    train = DataLoader(Data(module, settings is not None), batch_size=4, num_workers=2, multiprocessing_context="fork")
    val = DataLoader(Data(module, settings is not None), batch_size=6, num_workers=2, multiprocessing_context="fork")
    start_s = time.monotonic()
    trainer(settings, max_epochs=3, callbacks=[look]).fit(module, train, val)
    return look.recording, time.monotonic() - start_s

parent = os.getpid()
plain, plain_s = fit(None)
ours, ours_s = fit({"device_budget": 33540, "dram_budget": "1GiB", "optimizer_kernel": "torch"})
assert len(plain.looks) == 3 * 3 + 3 + 1
assert_exact(plain, ours)
print(round(plain_s, 2), round(ours_s, 2))
"""


@pytest.mark.slow
def test_con_03_dataloader_workers_by_fork(tmp_path: Path) -> None:
    """CON-03: workers fork while our threads run and call numba; the run ends and is exact, a worker's read refused."""
    done = python(_WORKERS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    plain_s, ours_s = (float(word) for word in done.stdout.split())
    # Nobody waits for a lock that a fork has left locked. The plain run itself took 3 to 11 s on a busy machine.
    assert ours_s < 3 * plain_s + 20


# ------------------------------------------------------------------------------------------------ CON-04


_INTERRUPTED = """
import copy, faulthandler, os, random, signal, sys, threading, time
import torch
import lightning.pytorch as pl
import lightning_tieroffload as tieroffload
from exactness import assert_ordinary, take_down, same_bits
from loopkit import Module, loader, mlp, trainer
import test_cases_con as con

settings = {"device_budget": 2 * 16640 + 260, "dram_budget": "1GiB", "optimizer_kernel": "torch"}
random.seed(int(os.environ["SEED"]))
num_runs = int(os.environ["RUNS"])

sent_s = [0.0]

def interrupter(delay_s, times=1):
    def work():
        time.sleep(delay_s)
        sent_s[0] = time.monotonic()
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.002)
    return threading.Thread(target=work)

def finish(thread):
    # The second signal may come when all is over.
    while True:
        try:
            thread.join()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return
        except KeyboardInterrupt:
            continue

def one_fit(delay_s, times):
    module = Module(lambda: mlp(3))
    run = trainer(settings, max_epochs=10_000)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threads, outcome = [], None
    class Go(pl.Callback):
        def on_train_start(self, *_):
            threads.append(interrupter(delay_s, times))
            threads[0].start()
    run.callbacks.append(Go())
    try:
        try:
            run.fit(module, loader(5))
        except (KeyboardInterrupt, SystemExit) as error:
            outcome = type(error).__name__
        finish(threads[0])
    except KeyboardInterrupt:  # the second signal, after fit and before finish was ready for it
        outcome = outcome or "KeyboardInterrupt"
        finish(threads[0])
    assert outcome in ("KeyboardInterrupt", "SystemExit"), outcome
    if times == 1:
        assert run.strategy.engine is None
        assert_ordinary(module)
        assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
    else:
        engine = run.strategy.engine
        if engine is not None:
            engine.close()
        assert_ordinary(module)
    con.assert_no_thread_left()
    module.net(torch.ones(1, 64))

def one_loop(delay_s):
    # A plain loop, interrupted; then reset, a known state loaded, and it goes on exactly as plain does.
    torch.manual_seed(0)
    model = mlp(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    reference = copy.deepcopy(model)
    tieroffload.offload(model, optimizer, device="cpu", **settings)
    engine = tieroffload.engine_of(model)
    con.train(model, optimizer, 1)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = interrupter(delay_s)
    try:
        thread.start()
        while True:
            con.train(model, optimizer, 1)
            model.state_dict()
    except KeyboardInterrupt:
        pass
    finish(thread)
    engine.reset()
    assert all(bool(torch.isfinite(p.detach()).all()) for p in model.parameters())
    optimizer.zero_grad()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    con.train(model, optimizer, 2)
    report = engine.report()["tiers"]["device"]
    assert report["peak_nbytes"] <= report["budget_nbytes"], report
    engine.close()
    assert_ordinary(model)
    other = torch.optim.AdamW(reference.parameters(), lr=0.01)
    reference.load_state_dict(saved[0])
    other.load_state_dict(copy.deepcopy(saved[1]))
    con.train(reference, other, 2)
    a, b = take_down(reference, [other]), take_down(model, [optimizer])
    assert all(same_bits(a[key], b[key]) for key in a), delay_s
    con.assert_no_thread_left()

for index in range(num_runs):
    delay_s = random.uniform(0, 0.08)
    faulthandler.dump_traceback_later(6, exit=False)
    try:
        if os.environ["WHAT"] == "loop":
            one_loop(delay_s)
        else:
            one_fit(delay_s, 1 + (index % 3 == 2))
    except BaseException:
        print("run", index, "delay", delay_s, file=sys.stderr, flush=True)
        raise
    faulthandler.cancel_dump_traceback_later()
    assert time.monotonic() - sent_s[0] < 5, time.monotonic() - sent_s[0]
print("done")
"""


@pytest.mark.parametrize("where", ["forward", "backward", "after backward", "after step", "validation"])
def test_con_04_interrupt_in_a_fit(where: str) -> None:
    """CON-04: SIGINT out of user code anywhere in a fit: Lightning's own ending, ordinary model, no thread, at once."""

    def interrupt(at: str) -> None:
        if at == where and module.trainer.global_step >= 2:
            signal.raise_signal(signal.SIGINT)

    class Interrupted(Module):
        def on_fit_start(self) -> None:
            self.net[2].register_forward_hook(lambda *_: interrupt("forward") if self.training else None)
            self.net[2].weight.register_hook(lambda _: interrupt("backward"))

        def on_after_backward(self) -> None:
            interrupt("after backward")

        def on_before_zero_grad(self, optimizer: Any) -> None:
            interrupt("after step")

        def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            interrupt("validation")

    module = Interrupted(lambda: mlp(3))
    run = trainer(starved_settings(module, debug=[]), max_epochs=3, val_check_interval=2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    start_s = time.monotonic()
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run.fit(module, loader(6), loader(2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start_s < 5
    assert run.strategy.engine is None
    assert_ordinary(module)
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())
    assert_no_thread_left()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("what", ["fit", "loop"])
def test_con_04_interrupt_many(what: str, seed: int, tmp_path: Path) -> None:
    """CON-04: real SIGINT at 50 random points, some twice: ends in seconds, ordinary model; a loop goes on exactly."""
    _interrupted(what, 50, seed, tmp_path)


def _interrupted(what: str, num_runs: int, seed: int, folder: Path) -> None:
    done = python(_INTERRUPTED, cwd=folder, WHAT=what, RUNS=str(num_runs), SEED=str(seed), timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "done"


# ------------------------------------------------------------------------------------------------ CON-05


_ENDINGS = {
    # Ends in the middle of things: updates under way, nothing closed.
    "no teardown": (0, "", ""),
    "sys.exit": (7, "", "\nsys.exit(7)\n"),
    "error": (1, "ValueError: the user's own", "\nraise ValueError(\"the user's own\")\n"),
    "collected at shutdown": (0, "", "\nclass Holder:\n    def __del__(self): self.kept\n"
        "keep = Holder(); keep.kept = model; keep.me = keep\ndel model\n"),
    "other thread": (0, "", "\nthreading.Thread(target=train, args=(model, optimizer, 10)).start()\n"),
}  # fmt: skip


_ENDING = """
import atexit, os, sys, threading, time
import torch
import lightning_tieroffload as tieroffload

def train(model, optimizer, num_steps):
    x = torch.ones(4, 64)
    for _ in range(num_steps):
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
if OFFLOAD:
    tieroffload.offload(model, optimizer, device="cpu", device_budget=33280, dram_budget="1GiB")
train(model, optimizer, 3)
open("ended", "w").write(str(time.time()))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, float, str]]:
    """Every ending, and one without us, in processes that run two at a time: exit code, seconds to exit, stderr."""
    results: dict[str, tuple[int, float, str]] = {}

    def run(name: str) -> None:
        folder = tmp_path_factory.mktemp("ending")
        ending = _ENDINGS[name][2] if name in _ENDINGS else ""
        process = start(f"OFFLOAD = {name in _ENDINGS}\n{_ENDING}{ending}", cwd=folder)
        _, err = process.communicate(timeout=100)
        results[name] = process.returncode, time.time() - float((folder / "ended").read_text()), err

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, ["without us", *_ENDINGS]))
    return results.__getitem__


@pytest.mark.parametrize("name", _ENDINGS)
def test_con_05_interpreter_exit(name: str, ended: Callable[[str], tuple[int, float, str]]) -> None:
    """CON-05: the exit code is the script's own, nothing on stderr but its own traceback and the plan, within 5 s."""
    code, own, _ = _ENDINGS[name]
    returncode, took_s, err = ended(name)
    assert returncode == code, err
    assert took_s < 5 + 2 * ended("without us")[1]  # a loaded machine takes its time to unload torch
    assert "Exception ignored" not in err
    assert err.count("Traceback") == (1 if own else 0), err
    assert own in err


_FIT_ENDINGS = {
    "sys.exit in a callback": (5, 0),
    "error in training_step": (1, 1),
}

_FIT_ENDING = """
import sys, time
import lightning.pytorch as pl
from loopkit import Module, loader, mlp, trainer
name = {name!r}

class Exit(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and name.startswith("sys.exit"):
            sys.exit(5)

class Failing(Module):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and name.startswith("error"):
            raise ValueError("the user's own")
        return super().training_step(batch, batch_idx)

module = Failing(lambda: mlp(3))
run = trainer({{"device_budget": 33540, "dram_budget": "1GiB"}}, max_epochs=2, callbacks=[Exit()])
run.fit(module, loader(5))
"""


@pytest.mark.parametrize("name", _FIT_ENDINGS)
def test_con_05_exit_out_of_a_fit(name: str, tmp_path: Path) -> None:
    """CON-05: ``sys.exit`` in a callback and an exception in ``training_step``: own exit code, own traceback only."""
    done = python(_FIT_ENDING.format(name=name), cwd=tmp_path)
    code, num_tracebacks = _FIT_ENDINGS[name]
    assert done.returncode == code, done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("Traceback") == num_tracebacks, done.stderr
    if num_tracebacks:
        assert done.stderr.rstrip().endswith("ValueError: the user's own")


# ------------------------------------------------------------------------------------------------ CON-07


def test_con_07_update_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """CON-07: with ``io_timeout_s`` an update that hangs is an error that names it, and the run can be taken down."""
    may_end = threading.Event()
    original = Updates._run_torch

    def hang(self: Updates, *arguments: Any) -> None:
        may_end.wait(timeout=30)
        original(self, *arguments)

    model = mlp(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tieroffload.offload(model, optimizer, device="cpu", **starved_settings(model, debug=[], io_timeout_s=0.5))
    engine = engine_of(model)
    monkeypatch.setattr(Updates, "_run_torch", hang)
    start_s = time.monotonic()
    try:
        with pytest.raises(tieroffload.TransferTimeoutError, match=r"update \((0|2|root)\)"):
            train(model, optimizer, 2)
        assert time.monotonic() - start_s < 4
    finally:
        may_end.set()
        for end in (engine.reset, engine.close):  # each says once more what had failed; the second has to be called too
            with contextlib.suppress(tieroffload.TransferTimeoutError):
                end()
    assert_no_thread_left()


# ------------------------------------------------------------------------------------------------ CON-08


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def test_con_08_no_signal_handlers_of_ours() -> None:
    """CON-08: no handler is installed and no signal is blocked, before, during and after a run."""
    before = _handlers(), signal.pthread_sigmask(signal.SIG_BLOCK, [])
    model = mlp(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tieroffload.offload(model, optimizer, device="cpu", **starved_settings(model))
    train(model, optimizer)
    assert (_handlers(), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before
    engine_of(model).close()
    assert (_handlers(), signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before


@pytest.mark.parametrize("where", ["forward", "step", "save"])
def test_con_08_handler_saves_a_whole_checkpoint(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CON-08: a SLURM-like USR1 handler saves in the main thread, mid-forward, mid-step, mid-save; resume is exact."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text("#!/bin/sh\nexit 0\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for key, value in {"JOB_ID": "1", "NTASKS": "1", "JOB_NAME": "train", "PROCID": "0", "LOCALID": "0",
                       "NODEID": "0", "NODELIST": "localhost"}.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{key}", value)
    before = signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)
    threads: list[bool] = []

    def run(ours: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        root = tmp_path / str(ours)
        sent: list[int] = []

        def send(at: str, step: int) -> None:
            if at == where and step == 3 and not sent:
                sent.append(step)
                signal.raise_signal(signal.SIGUSR1)

        class Signalled(Module):
            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                handle = self.net[2].register_forward_hook(lambda *_: send("forward", batch_idx))
                loss = super().training_step(batch, batch_idx)
                handle.remove()
                return loss

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                threads.append(threading.current_thread() is threading.main_thread())
                send("save", self.trainer.global_step)

        class Save(pl.Callback):
            def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
                send("step", trainer.global_step)

            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                if where == "save" and trainer.global_step == 3:
                    trainer.save_checkpoint(root / "own.ckpt")

        module = Signalled(lambda: mlp(3))
        settings = starved_settings(module, debug=[]) if ours else None
        made = trainer(
            settings, max_steps=6, plugins=[SLURMEnvironment(auto_requeue=True)], default_root_dir=root,
            callbacks=[Save()],
        )  # fmt: skip
        made.fit(module, loader(6))
        assert sent == [3]
        (path,) = root.glob("hpc_ckpt_*.ckpt")
        saved = torch.load(path, weights_only=True)
        return saved, take_down(module, [])

    try:
        plain, ours_ = run(False), run(True)
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert threads
    assert all(threads)
    assert all(same_bits(plain[1][key], ours_[1][key]) for key in plain[1])
    assert plain[0]["global_step"] == ours_[0]["global_step"]
    assert all(same_bits(value, ours_[0]["state_dict"][key]) for key, value in plain[0]["state_dict"].items())
    states = plain[0]["optimizer_states"][0]["state"], ours_[0]["optimizer_states"][0]["state"]
    assert states[0].keys() == states[1].keys()
    assert all(same_bits(value, states[1][i][key]) for i, entry in states[0].items() for key, value in entry.items())


# ------------------------------------------------------------------------------------------------ errors at set-up


@pytest.mark.parametrize(
    "make", [lambda: mlp(3), lambda: mlp(2, width=96), lambda: nn.Sequential(nn.Embedding(999, 8))]
)
def test_found_least_budget_works_and_less_does_not(make: Callable[[], nn.Module]) -> None:
    """Too small a device budget: before the first step an error with unit, numbers and the least; that one trains."""
    seed_all(0)
    model = make()
    least = tight(model)
    with pytest.raises(tieroffload.InfeasiblePlanError) as caught:
        tieroffload.offload(model, None, device="cpu", device_budget=int(least * 0.98), dram_budget="1GiB")
    assert caught.value.tier == "device"
    assert caught.value.least_budget_nbytes == least
    for word in ("device_budget", "unit", str(least), str(int(least * 0.98))):
        assert word in str(caught.value)
    assert_ordinary(model)
    x = torch.arange(4) if isinstance(model[0], nn.Embedding) else torch.ones(4, model[0].in_features)

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            look(loss=loss)

    def build() -> Any:
        made = make()
        return made, torch.optim.AdamW(made.parameters(), lr=0.1)

    check(build, loop, device_budget=least)


def test_found_least_dram_budget_works_and_less_does_not() -> None:
    """Too small a DRAM budget, found by the engine's own word: the least trains, 2 % less is refused, same error."""

    def attach(nbytes: int) -> Any:
        model = mlp(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        try:
            tieroffload.offload(model, optimizer, device="cpu", device_budget=starved(model), dram_budget=nbytes)
        except BaseException:
            engine = engine_of(model)
            if engine is not None:
                engine.close()
            raise
        return model, optimizer

    least = 4096
    for _ in range(4):  # each refusal names what is known by then: parameters first, then the optimizer's state
        try:
            model, optimizer = attach(least)
            break
        except tieroffload.InfeasiblePlanError as error:
            assert error.tier == "dram"
            assert error.least_budget_nbytes > least
            least = error.least_budget_nbytes
    else:
        raise AssertionError("the least budgets never ended")
    train(model, optimizer)
    report = engine_of(model).report()["tiers"]["dram"]
    assert report["peak_nbytes"] <= report["budget_nbytes"] == least
    engine_of(model).close()
    with pytest.raises(tieroffload.InfeasiblePlanError) as caught:
        attach(int(least * 0.98))
    assert caught.value.least_budget_nbytes == least


def test_unknown_keys_are_refused_before_any_work() -> None:
    """A misspelt key, through every door, names the nearest one; a key of the trainer's says so."""
    with pytest.raises(tieroffload.ConfigError, match="device_budget"):
        tieroffload.TierOffloadStrategy(device_bugdet="1GiB")
    with pytest.raises(tieroffload.ConfigError, match="nvme_paths"):
        tieroffload.offload(mlp(1), None, nvme_pth="/x")
    with pytest.raises(tieroffload.ConfigError, match="device_budget"):
        trainer({"device_bugdet": 1})
    with pytest.raises(tieroffload.ConfigError, match="Trainer"):
        tieroffload.TierOffloadStrategy(gradient_clip_val=1.0)


# ------------------------------------------------------------------------------------------------ nothing at import


def test_import_runs_nothing(tmp_path: Path) -> None:
    """Importing the package, or torch with it installed: no thread, no file, no handler, no heavy module."""
    done = python(
        """
        import os, signal, sys, threading
        handlers = {n: signal.getsignal(n) for n in signal.valid_signals()}
        environment = dict(os.environ)
        import lightning_tieroffload
        heavy = [m for m in ("torch", "lightning", "accelerate", "numba", "scipy", "transformers") if m in sys.modules]
        import torch
        later = [m for m in ("lightning", "accelerate", "numba", "scipy", "transformers") if m in sys.modules]
        ours = [m for m in sys.modules if m.startswith("lightning_tieroffload.")]
        threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        print([heavy, later, ours, threads])
        assert handlers == {n: signal.getsignal(n) for n in signal.valid_signals()}
        assert {k: v for k, v in os.environ.items() if k.startswith("TIER")} == {}
        """,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip() == "[[], [], ['lightning_tieroffload._version'], []]"
    assert len(list(tmp_path.iterdir())) == 1  # the script itself


# ------------------------------------------------------------------------------------------------ CFG-02, CFG-07


@pytest.mark.slow
def test_cfg_02_no_cache_folder(tmp_path: Path) -> None:
    """CFG-02: nowhere to write a cache, beside the sources or at home: import, attach and a compiled update work."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "lightning_tieroffload", site / "lightning_tieroffload", ignore=lambda *_: ["__pycache__"])
    shutil.copy(ROOT / "_tieroffload_hooks.py", site)
    for folder in [path for path in site.rglob("*") if path.is_dir()]:
        (folder / "__pycache__").write_text("a file: not even root can make a folder of it")
    done = python(
        """
        import torch
        import lightning_tieroffload as tieroffload
        assert "site" in tieroffload.__file__
        model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tieroffload.offload(model, optimizer, device="cpu", device_budget=40000, dram_budget="1GiB",
                            optimizer_kernel="numba")
        (model(torch.ones(4, 64)) ** 2).mean().backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(before, model[0].weight)
        tieroffload.engine_of(model).close()
        print("done")
        """,
        cwd=tmp_path,
        PYTHONPATH=str(site),
        HOME="/proc/nowhere",
        XDG_CACHE_HOME="/proc/nowhere",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "done"


def test_cfg_07_log_lines(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """CFG-07: 20 steps with default logging: at most 10 lines of ours at INFO, each once, no warning."""
    module = Module(lambda: mlp(6))
    with caplog.at_level(logging.INFO, logger="lightning_tieroffload"):
        run = trainer(starved_settings(module, debug=[]), max_steps=20)
        capfd.readouterr()
        run.fit(module, loader(20))
    lines = [r for r in caplog.records if r.name.startswith("lightning_tieroffload")]
    assert len(lines) <= 10
    assert len({r.getMessage() for r in lines}) == len(lines)
    assert not [r for r in lines if r.levelno > logging.INFO], lines
    printed = capfd.readouterr().err.splitlines()
    plan = list(itertools.dropwhile(lambda line: not line.startswith("Plan"), printed))
    assert len(plan) <= 10, plan


# ------------------------------------------------------------------------------------------------ MPR-06


def test_mpr_06_attached_twice() -> None:
    """MPR-06: a second attach of one module gives the engine that it has."""
    model = mlp(2)
    settings = starved_settings(model)
    tieroffload.offload(model, None, device="cpu", **settings)
    engine = engine_of(model)
    tieroffload.offload(model, None, device="cpu", **settings)
    assert engine_of(model) is engine
    assert engine.report()["tiers"]["dram"]["home_nbytes"] <= 1.05 * sum(p.nbytes for p in model.parameters())
    engine.close()
    assert_ordinary(model)


def test_mpr_06_teacher_and_student_share_a_part() -> None:
    """MPR-06: two modules share a sub-module: it is stored once, stays with its first engine, and all is exact."""

    class Both(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared
            self.own = mlp(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.shared(x))

    def run(ours: bool) -> list[dict[str, Any]]:
        seed_all(0)
        shared = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        teacher, student = Both(shared), Both(shared)
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
        if ours:
            settings = starved_settings(student, device_budget=4 * 16640 + 600)
            tieroffload.offload(student, optimizer, device="cpu", **settings)
            tieroffload.offload(teacher, None, device="cpu", **settings)
            unique = {id(p): p.nbytes for m in (teacher, student) for p in m.parameters()}
            home = engine_of(student).report()["tiers"]["dram"]["home_nbytes"]
            assert home <= 1.05 * sum(unique.values())
        looks = []
        x = torch.randn(4, 64)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.no_grad():
                wanted = teacher(x)
            ((student(x) - wanted) ** 2).mean().backward()
            optimizer.step()
            looks.append({**take_down(student, [optimizer]), "teacher": take_down(teacher, [])})
        if ours:
            engine = engine_of(student)
            report = engine.report()["tiers"]["device"]
            assert report["peak_nbytes"] <= report["budget_nbytes"]
            for model in (teacher, student):
                while (engine := engine_of(model)) is not None:
                    engine.close()
                assert_ordinary(model)
        return looks

    for plain, ours_ in zip(run(False), run(True), strict=True):
        teachers = plain.pop("teacher"), ours_.pop("teacher")
        for a, b in ((plain, ours_), teachers):
            assert a.keys() == b.keys()
            wrong = [key for key in a if not same_bits(a[key], b[key])]
            assert not wrong, wrong[:5]
