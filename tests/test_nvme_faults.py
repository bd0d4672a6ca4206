"""Faults of flash under a whole training run: a named error in the training thread within seconds, or full recovery.

Everything is at home on flash, in the least DRAM, through the plain face. The oracle is the plain run: whatever
happens, the losses that were seen are its losses, bit for bit, and each weight that is left is one that it had; what
flash did not give back is NaN. Nothing hangs and nothing is left.
"""

from __future__ import annotations

import copy
import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import same_bits, take_down
from fakes import batches, mlp, mlp_loss
from faulty_disk import FaultyDisk

import lightning_tieroffload as tieroffload
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.errors import (
    CapacityError,
    ChecksumError,
    ConfigError,
    InfeasiblePlanError,
    TierIOError,
    TierOffloadError,
    TransferTimeoutError,
)

TESTS = Path(__file__).parent
NUM_STEPS = 6
SETTINGS: dict[str, Any] = {
    "device_budget": "64KiB", "dram_budget": "100KiB", "block_nbytes": "8KiB", "optimizer_kernel": "torch",
    "debug": ["poison"],
}  # fmt: skip
# Errors within this many seconds of the fault; five are promised, and a busy machine takes its part of them.
SOON_S = 5.0


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(6)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = mlp_loss(model, x)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


@pytest.fixture(scope="module")
def plain() -> list[torch.Tensor]:
    """Losses of the plain run."""
    model, optimizer = make()
    return [step(model, optimizer, x) for x in batches(NUM_STEPS)]


class Run:
    """Training under the engine; ``losses`` are those seen so far."""

    def __init__(self, *paths: Path, **settings: Any) -> None:
        self.model, self.optimizer = make()
        self.losses: list[torch.Tensor] = []
        tieroffload.offload(
            self.model, self.optimizer, device="cpu", nvme_paths=list(paths), **{**SETTINGS, **settings}
        )
        self.engine: OffloadEngine = engine_of(self.model)

    def train(self, num_steps: int = NUM_STEPS) -> None:
        for x in batches(NUM_STEPS)[len(self.losses) : len(self.losses) + num_steps]:
            self.losses.append(step(self.model, self.optimizer, x))

    def finish(self) -> None:
        """What a script does after its loop: nothing that was ordered has failed unseen, and the weights are there."""
        self.train()
        self.engine.flush()
        self.engine.close()

    def close_after(self, error: BaseException) -> None:
        """Close within seconds. What it raises is the fault's again, or about the wreck it left."""
        started_s = time.monotonic()
        try:
            self.engine.close()
        except TierOffloadError:
            assert error is not None
        assert time.monotonic() - started_s < SOON_S


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    num_fds = len(os.listdir("/proc/self/fd"))
    yield
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "precious"]
    assert left == []
    assert [one.name for one in threading.enumerate() if one.name.startswith("tieroffload-read")] == []
    assert [one.name for one in threading.enumerate() if one.name.startswith("tieroffload-write")] == []
    assert len(os.listdir("/proc/self/fd")) <= num_fds


def wait_for_threads() -> None:
    """What was stuck ends now that the disk answers, and the engine's threads with it."""
    deadline_s = time.monotonic() + 10
    while any(one.name.startswith("tieroffload-") for one in threading.enumerate()):
        assert time.monotonic() < deadline_s, [one.name for one in threading.enumerate()]
        time.sleep(0.02)


def assert_prefix(losses: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    for index, loss in enumerate(losses):
        assert same_bits(loss, plain[index]), f"step {index}: {loss.item()} is a wrong number"


def expect_error(
    run: Run,
    plain: list[torch.Tensor],
    kinds: type[BaseException] | tuple[type[BaseException], ...],
    since_s: Callable[[], float],
    text: str = ".",
) -> BaseException:
    """Train until it raises: one of ``kinds``, soon after the fault, in this thread; nothing wrong was seen before."""
    with pytest.raises(kinds, match=text) as info:
        run.finish()
    assert time.monotonic() - since_s() < SOON_S
    assert_prefix(run.losses, plain)
    run.close_after(info.value)
    assert_no_made_up_weights(run)
    return info.value


def assert_no_made_up_weights(run: Run) -> None:
    """After close the model is ordinary; each weight is the plain run's around the step that failed, or NaN."""
    other, optimizer = make()
    had = [{name: p.detach().clone() for name, p in other.named_parameters()}]
    for x in batches(NUM_STEPS)[: len(run.losses) + 1]:
        step(other, optimizer, x)
        had.append({name: p.detach().clone() for name, p in other.named_parameters()})
    for name, p in run.model.named_parameters():
        assert type(p) is torch.nn.Parameter, name
        is_plain = any(same_bits(p.detach(), weights[name]) for weights in had[-3:])
        assert is_plain or p.isnan().all(), f"{name} holds what training never made: {p}"


@pytest.mark.parametrize("debug", [["poison"], ["poison", "delays"]], ids=["threads", "seeded"])
def test_without_a_fault_it_is_the_plain_run(tmp_path: Path, plain: list[torch.Tensor], debug: list[str]) -> None:
    run = Run(tmp_path, debug=debug)
    run.finish()
    assert len(run.losses) == NUM_STEPS
    assert_prefix(run.losses, plain)


# --- the disk is full -------------------------------------------------------------------------------------------------


def limit_file_size(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    yield limit_file_size
    limit_file_size(before)


def test_sto_02_full_at_the_start_by_a_limit_on_files(
    tmp_path: Path, plain: list[torch.Tensor], file_size_limit: Callable[[int], None]
) -> None:
    """Refused before the first step, with the path and what to raise; the model is as it was and trains on plainly."""
    model, optimizer = make()
    file_size_limit(64 << 10)
    with pytest.raises(TierIOError, match="ulimit -f") as info:
        tieroffload.offload(model, optimizer, device="cpu", nvme_paths=[tmp_path], **SETTINGS)
    assert str(tmp_path) in str(info.value)
    assert info.value.errno == errno.EFBIG
    assert_prefix([step(model, optimizer, x) for x in batches(NUM_STEPS)], plain)
    assert os.listdir(tmp_path) == []


def test_sto_02_full_at_the_start_by_the_free_space(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB free on the disk: refused before the first step with both numbers."""

    class Small:
        f_bavail, f_frsize, f_blocks, f_bfree = 16, 4096, 16, 16

    model, optimizer = make()
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: Small())
        with pytest.raises((CapacityError, InfeasiblePlanError, ConfigError), match=r"nvme_(paths|budget)"):
            tieroffload.offload(model, optimizer, device="cpu", nvme_paths=[tmp_path], **SETTINGS)
    assert_prefix([step(model, optimizer, x) for x in batches(NUM_STEPS)], plain)
    assert os.listdir(tmp_path) == []


def fail_from(monkeypatch: pytest.MonkeyPatch, failing: str, nth: int, code: int) -> list[float]:
    """From the ``nth`` read or write on every one fails with ``code``. Returns when they did, as they do."""
    failed_s: list[float] = []

    def on_call(verb: str, num: int, path: str) -> None:
        if verb == failing and num >= nth:
            failed_s.append(time.monotonic())
            raise OSError(code, os.strerror(code))

    FaultyDisk(monkeypatch, on_call=on_call)
    return failed_s


@pytest.mark.parametrize("debug", [["poison"], ["poison", "delays"]], ids=["threads", "seeded"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("nth", [1, 7, 40])
def test_sto_02_nth_write_fails(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, code: int, nth: int, debug: list[str]
) -> None:
    run = Run(tmp_path, debug=debug)
    failed_s = fail_from(monkeypatch, "write", nth, code)
    error = expect_error(run, plain, TierIOError, lambda: failed_s[0], os.strerror(code))
    assert isinstance(error, TierIOError)
    assert error.errno == code
    assert str(tmp_path) in str(error)
    assert error.shard


def test_sto_02_full_in_the_middle_by_a_limit_on_files(
    tmp_path: Path, plain: list[torch.Tensor], file_size_limit: Callable[[int], None]
) -> None:
    """A limit that comes into force while it trains: the next write past it is the run's error."""
    run = Run(tmp_path)
    run.train(2)
    run.engine.flush()
    started_s = time.monotonic()
    file_size_limit(4096)
    try:
        error = expect_error(run, plain, TierIOError, lambda: started_s, "ulimit -f")
    finally:
        file_size_limit(resource.RLIM_INFINITY)
    assert isinstance(error, TierIOError)
    assert error.errno == errno.EFBIG


# --- reads fail, short transfers, other bytes -------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [["poison"], ["poison", "delays"]], ids=["threads", "seeded"])
@pytest.mark.parametrize("nth", [1, 2, 30])
def test_nth_read_fails(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, nth: int, debug: list[str]
) -> None:
    run = Run(tmp_path, debug=debug)
    failed_s = fail_from(monkeypatch, "read", nth, errno.EIO)
    error = expect_error(run, plain, TierIOError, lambda: failed_s[0], "Input/output error")
    assert isinstance(error, TierIOError)
    assert error.shard
    assert error.shard in str(error)


@pytest.mark.parametrize("seed", range(3))
def test_sto_02_short_transfers_and_interruptions_change_nothing(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    disk = FaultyDisk(monkeypatch, seed=seed, rates={"short": 0.2, "interrupted": 0.05, "again": 0.05})
    run = Run(tmp_path / "a", tmp_path / "b")
    run.finish()
    assert len(run.losses) == NUM_STEPS
    assert_prefix(run.losses, plain)
    assert min(disk.injected[kind] for kind in ("short", "interrupted", "again")) > 0


@pytest.mark.parametrize(("verb", "rate"), [("read", 0.5), ("write", 0.05)])
@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_flips_a_byte_now_and_then_is_a_checksum_error(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, verb: str, rate: float, seed: int
) -> None:
    """In the file it is an error; on the way it is one if the second reading is changed too."""
    run = Run(tmp_path)
    disk = FaultyDisk(monkeypatch, seed=seed, rates={"flip": rate}, verbs=(verb,), only="data-0")
    started_s = time.monotonic()
    error = expect_error(run, plain, ChecksumError, lambda: started_s)
    assert disk.injected["flip"] >= 1
    assert isinstance(error, ChecksumError)
    assert error.shard


def mixture(seed: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Rates of faults and settings, drawn from a seed."""
    rng = random.Random(seed)
    kinds = ["eio", "enospc", "short", "interrupted", "again", "flip"]
    rates = {kind: rng.choice([0.0, 0.003, 0.03]) for kind in kinds}
    debug = ["poison", "delays"] if rng.random() < 0.3 else ["poison"]
    dram = rng.choice(["100KiB", "120KiB", "200KiB", "300KiB"])
    return rates, {"debug": debug, "dram_budget": dram, "prefetch_units": rng.choice([1, 2, 4])}


def train_on_a_bad_disk(tmp_path: Path, plain: list[torch.Tensor], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on a disk with faults of all kinds until something is raised; nothing that was seen or is left is wrong."""
    rates, settings = mixture(seed)
    run = Run(tmp_path / "a", tmp_path / "b", **settings)
    disk = FaultyDisk(monkeypatch, seed=seed, rates=rates, slow_s=0.0005 * (seed % 2))
    try:
        run.finish()
    except TierIOError as error:
        run.close_after(error)
        assert disk.injected.keys() & {"eio", "enospc", "flip"}
    else:
        assert len(run.losses) == NUM_STEPS
    assert_prefix(run.losses, plain)
    assert_no_made_up_weights(run)


@pytest.mark.parametrize("seed", range(10))
def test_any_mixture_of_faults_gives_no_wrong_number(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    train_on_a_bad_disk(tmp_path, plain, seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 300))
def test_any_mixture_of_faults_gives_no_wrong_number_many(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    train_on_a_bad_disk(tmp_path, plain, seed, monkeypatch)


def test_a_flipped_byte_in_the_only_copy(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    """All that is at rest on flash is damaged: the first thing that comes back is an error, and no step is computed."""
    run = Run(tmp_path)
    run.train(2)
    run.engine.flush()
    run.engine.core.scheduler.drain()
    for path in tmp_path.rglob("data-0"):
        content = bytearray(path.read_bytes())
        for index in range(100, len(content), 512):
            content[index] ^= 0x10
        with open(path, "r+b") as file:
            file.write(content)
    started_s = time.monotonic()
    error = expect_error(run, plain, ChecksumError, lambda: started_s, "are not the bytes that were written")
    assert len(run.losses) <= 3
    assert str(tmp_path) in str(error)


def test_truncated_by_others(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    run = Run(tmp_path)
    run.train(2)
    run.engine.flush()
    run.engine.core.scheduler.drain()
    for path in tmp_path.rglob("data-0"):
        os.truncate(path, 0)
    started_s = time.monotonic()
    expect_error(run, plain, TierIOError, lambda: started_s)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_con_07_a_disk_that_stops_answering(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """No answer for io_timeout_s is an error that names the transfer. Closing does not wait for every unit again: it
    leaves an ordinary model in which what is on flash is NaN."""
    run = Run(tmp_path, io_timeout_s=2)
    run.train(2)
    go_on = threading.Event()
    FaultyDisk(monkeypatch, on_call=lambda *_: go_on.wait(60) and None, verbs=(verb,))
    try:
        started_s = time.monotonic()
        with pytest.raises(TransferTimeoutError, match=r"param|state|grad"):
            run.finish()
        assert time.monotonic() - started_s < 2 + SOON_S
        assert_prefix(run.losses, plain)
        started_s = time.monotonic()
        with pytest.raises(TransferTimeoutError):
            run.engine.close()
        assert time.monotonic() - started_s < 2 + 2 * SOON_S
        assert_no_made_up_weights(run)
        run.engine.close()
    finally:
        go_on.set()
        wait_for_threads()


# --- somebody else has a hand in it -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["file", "directory"])
def test_removed_under_us(tmp_path: Path, plain: list[torch.Tensor], what: str) -> None:
    """A cleaner removes our files while we train: they are open, so nothing is lost."""
    run = Run(tmp_path)
    run.train(2)
    for path in list(tmp_path.rglob("data-0")):
        if what == "file":
            path.unlink()
        else:
            shutil.rmtree(path.parent)
    run.finish()
    assert len(run.losses) == NUM_STEPS
    assert_prefix(run.losses, plain)


def test_sto_12_permission_refused_at_the_start(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def refuse(path: Any, mode: int = 0o777) -> None:
        if "tieroffload-" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        real(path, mode)

    model, optimizer = make()
    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refuse)
        with pytest.raises(ConfigError, match=r"nvme_paths.*Permission denied") as info:
            tieroffload.offload(model, optimizer, device="cpu", nvme_paths=[tmp_path], **SETTINGS)
    assert str(tmp_path) in str(info.value)
    assert_prefix([step(model, optimizer, x) for x in batches(NUM_STEPS)], plain)


def test_permission_lost_while_it_runs(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is opened once it trains, so permissions that go do not matter; a transfer refused says what to do."""
    run = Run(tmp_path)
    run.train(2)
    real = os.open

    def refuse(path: Any, *arguments: Any, **named: Any) -> int:
        if str(tmp_path) in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        run.train(2)
    assert len(run.losses) == 4

    def on_call(verb: str, num: int, path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    started_s = time.monotonic()
    FaultyDisk(monkeypatch, on_call=on_call)
    expect_error(run, plain, TierIOError, lambda: started_s, "Permission denied.*Give this user write permission")


HOLDER = """
import sys
from lightning_tieroffload.io.extent_store import ExtentStore
with ExtentStore([sys.argv[1]]) as store:
    store.allocate("theirs", 100_000)
    store.write("theirs", memoryview(b"t" * 100_000))
    print("up", flush=True)
    sys.stdin.readline()
    memory = bytearray(100_000)
    store.read("theirs", memoryview(memory))
    print(memory == b"t" * 100_000, flush=True)
"""


def test_lock_held_by_another_run(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    """Two runs share a path: ours trains beside it, touches nothing of it, and it reads what it wrote."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS.parent,
    ) as other:  # fmt: skip
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        (theirs,) = os.listdir(tmp_path)
        run = Run(tmp_path)
        assert len(os.listdir(tmp_path)) == 2
        run.finish()
        assert_prefix(run.losses, plain)
        assert os.listdir(tmp_path) == [theirs]
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "True\n"
    assert other.returncode == 0
    assert os.listdir(tmp_path) == []


KILLED = """
import os, random, signal, sys, time
sys.path[:0] = [sys.argv[2]]
from pathlib import Path
import torch
torch.set_num_threads(1)
import test_nvme_faults as t

path = Path(sys.argv[1])
plain = t.plain_losses()
rng = random.Random(0)
num_reclaimed = 0
for turn in range(int(sys.argv[3])):
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tell, b"x")
        while True:
            run = t.Run(path)
            run.train()
            run.engine.close()
    os.read(hear, 1)
    os.close(hear), os.close(tell)
    time.sleep(rng.random() * 0.5)
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    num_stale = sum(one.startswith("tieroffload-") for one in os.listdir(path))
    assert num_stale <= 1, os.listdir(path)
    num_reclaimed += num_stale
    run = t.Run(path)
    assert sum(one.startswith("tieroffload-") for one in os.listdir(path)) == 1, os.listdir(path)
    run.finish()
    t.assert_prefix(run.losses, plain)
    assert len(run.losses) == t.NUM_STEPS
    assert os.listdir(path) == ["precious"], os.listdir(path)
    assert (path / "precious").read_text() == "mine"
print(num_reclaimed)
"""


def plain_losses() -> list[torch.Tensor]:
    model, optimizer = make()
    return [step(model, optimizer, x) for x in batches(NUM_STEPS)]


def test_sto_16_kill_nine_at_twenty_moments_then_a_fresh_run(tmp_path: Path) -> None:
    """After each kill a run in the same path starts at once, trains exactly, and what the dead one left is gone."""
    (tmp_path / "precious").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(TESTS), "20"],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 10, "most kills came while there was something on flash"


# --- the budget of writes ---------------------------------------------------------------------------------------------


def test_write_budget_stops_before_it_is_exceeded(tmp_path: Path, plain: list[torch.Tensor]) -> None:
    budget_nbytes = 1 << 20
    run = Run(tmp_path, nvme_write_budget=budget_nbytes)
    store = run.engine.core.store
    assert store is not None
    started_s = time.monotonic()
    expect_error(run, plain, CapacityError, lambda: started_s, "nvme_write_budget")
    written_nbytes = sum(store.written_nbytes_by_path.values())
    assert budget_nbytes / 2 < written_nbytes <= budget_nbytes


def test_a_fresh_run_in_the_same_process_after_each_fault(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten faulty runs one after another, at random calls, read or write; then a healthy one is exact and flat."""
    rng = random.Random(7)
    num_threads = None
    for _ in range(10):
        run = Run(tmp_path)
        verb_that_fails, nth, failed_s = rng.choice(["read", "write"]), rng.randrange(1, 100), [time.monotonic()]

        def on_call(
            verb: str, num: int, path: str, fails: tuple[str, int] = (verb_that_fails, nth), failed_s: Any = failed_s
        ) -> None:
            if (verb, num) == fails:
                failed_s[0] = time.monotonic()
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            FaultyDisk(patch, on_call=on_call)
            expect_error(run, plain, TierIOError, lambda failed_s=failed_s: failed_s[0])  # type: ignore[misc]
        num_threads = num_threads or threading.active_count()
        assert threading.active_count() <= num_threads
        assert os.listdir(tmp_path) == []
    run = Run(tmp_path)
    run.finish()
    assert_prefix(run.losses, plain)
    model, optimizer = make()
    for x in batches(NUM_STEPS):
        step(model, optimizer, x)
    expected, found = take_down(model, [optimizer]), take_down(run.model, [run.optimizer])
    assert all(same_bits(expected[key], found[key]) for key in expected)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [[], ["poison"], ["poison", "delays"]], ids=["threads", "poison", "seeded"])
@pytest.mark.parametrize("is_checkpoint_kept", [False, True])
def test_lost_state_is_replaced_by_a_checkpoint(
    tmp_path: Path,
    plain: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    debug: list[str],
    is_checkpoint_kept: bool,
) -> None:
    """Flash lost some optimizer state for good. Behind reset() and load_state_dict() nobody asks for it any more."""
    run = Run(tmp_path, debug=debug)
    run.train(2)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    run.engine.flush()
    for file in tmp_path.rglob("data-*"):
        store = run.engine.core.store
        assert store is not None
        for unit in run.engine.units:
            for segment in unit.state_block.segments:
                for piece in store.pieces_of(segment.name):
                    damage(file, piece.extent.offset_nbytes)
    with pytest.raises(ChecksumError):
        run.finish()
    run.engine.reset()
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    run.optimizer.zero_grad()
    if not is_checkpoint_kept:
        del saved
    del run.losses[2:]
    run.finish()
    assert len(run.losses) == NUM_STEPS
    assert_prefix(run.losses, plain)


def damage(file: Path, offset_nbytes: int) -> None:
    with open(file, "r+b", buffering=0) as opened:
        opened.seek(offset_nbytes)
        opened.write(b"\x5a\xa5")
        os.fsync(opened.fileno())


@pytest.mark.parametrize("nth", range(1, 120, 7))
@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("device_budget", ["64KiB", "1MiB"])
def test_a_fault_leaves_memory_without_pages_alone(
    tmp_path: Path, plain: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, nth: int, verb: str, device_budget: str
) -> None:
    """Pages that were given back are not there at all, without poison; what waits for them in vain must not write."""
    run = Run(tmp_path, debug=[], device_budget=device_budget)

    def on_call(called: str, num: int, path: str) -> None:
        if called == verb and num == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    FaultyDisk(monkeypatch, on_call=on_call)
    try:
        run.finish()
    except TierIOError as error:
        run.close_after(error)
    assert_prefix(run.losses, plain)
    assert_no_made_up_weights(run)
