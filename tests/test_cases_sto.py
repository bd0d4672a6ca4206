"""The STO cases under the engine: everything at home on flash, through the plain face, against the plain run.

The cases' faults that end a run (STO-02, 12, 16 in part) are in test_nvme_faults.py; files and store alone in
test_io_direct_file.py and test_io_extent_store.py.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import same_bits, take_down
from fakes import batches, mlp, mlp_loss
from faulty_disk import FaultyDisk

import lightning_tieroffload as tieroffload
from lightning_tieroffload.engine import offload_engine
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.errors import ConfigError, InfeasiblePlanError

TESTS = Path(__file__).parent
Step = Callable[[torch.nn.Module, torch.optim.Optimizer, int], torch.Tensor]


def mlp_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    optimizer.zero_grad()
    loss = mlp_loss(model, batches(index + 1)[index])
    loss.backward()
    optimizer.step()
    return loss.detach()


def sum_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    """For models without an input: every parameter gets a gradient that is its own."""
    optimizer.zero_grad()
    loss = model(index + 1.0)
    loss.backward()
    optimizer.step()
    return loss.detach()


def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path | str, **settings: Any) -> None:
    """Under the engine with everything on flash: the least DRAM is asked of the engine itself."""
    settings = {"optimizer_kernel": "torch", "debug": ["poison"], "nvme_paths": [path], **settings}
    budgets = {"device_budget": 1, "dram_budget": 1}
    while True:
        try:
            tieroffload.offload(model, optimizer, device="cpu", **{**budgets, **settings})
            return
        except InfeasiblePlanError as error:
            assert error.tier is not None
            assert error.least_budget_nbytes is not None
            assert budgets[f"{error.tier}_budget"] < error.least_budget_nbytes
            budgets[f"{error.tier}_budget"] = error.least_budget_nbytes


def check_exact(
    build: Callable[[], torch.nn.Module], step: Step, path: Path | str, num_steps: int = 3, **settings: Any
) -> dict[str, Any]:
    """Losses, weights and optimizer state are the plain run's, bit for bit; the report before close."""
    runs = []
    report: dict[str, Any] = {}
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if is_ours:
            attach(model, optimizer, path, **settings)
        losses = [step(model, optimizer, index) for index in range(num_steps)]
        if is_ours:
            report = engine_of(model).report()
            assert {unit["state_home"] for unit in report["plan"]["units"]} == {"nvme"}
            engine_of(model).close()
        runs.append((losses, take_down(model, [optimizer])))
    (plain_losses, plain), (losses, ours) = runs
    assert all(same_bits(a, b) for a, b in zip(plain_losses, losses, strict=True))
    assert plain.keys() == ours.keys()
    assert all(same_bits(plain[key], ours[key]) for key in plain)
    return report


class Odd(torch.nn.Module):
    """A unit whose parameters have the lengths of the case, one of them a view's shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        lengths = (1, 3, 511, 513, 1001, 4095, 4097)
        self.odd = torch.nn.ParameterList([torch.randn(n).to(dtype) for n in lengths])
        self.turned = torch.nn.Parameter(torch.randn(7, 13).to(dtype).t())

    def forward(self, x: float) -> torch.Tensor:
        parts = [(p.float() * x).sin().sum() for p in (*self.odd, self.turned)]
        return torch.stack(parts).sum()


class TwoOdd(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Odd(dtype), Odd(dtype)])

    def forward(self, x: float) -> torch.Tensor:
        return self.layers[0](x) + self.layers[1](x)


@pytest.mark.parametrize("block", ["4KiB", "1MiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sto_01_odd_lengths(tmp_path: Path, dtype: torch.dtype, block: str) -> None:
    """No tail is lost, whatever the length: parameters, gradients and state through flash."""
    check_exact(lambda: TwoOdd(dtype), sum_step, tmp_path, block_nbytes=block)


class Deep(torch.nn.Module):
    """3,000 parameters in one layer, a name of 400 characters, nested forty deep."""

    def __init__(self) -> None:
        super().__init__()
        self.many = torch.nn.ParameterList([torch.randn(3) for _ in range(3000)])
        inner: torch.nn.Module = torch.nn.Linear(3, 3)
        for depth in range(40):
            outer = torch.nn.Module()
            outer.add_module(f"depth{depth}", inner)
            inner = outer
        self.inner = inner
        self.register_parameter("n" * 400, torch.nn.Parameter(torch.randn(3)))

    def forward(self, x: float) -> torch.Tensor:
        total = getattr(self, "n" * 400).sum() * x
        for p in self.inner.parameters():
            total = total + (p * x).sin().sum()
        return total + (torch.cat([p * x for p in self.many])).sin().sum()


def test_sto_03_names_of_any_length_and_number(tmp_path: Path) -> None:
    """No file is named after a parameter: no ENAMETOOLONG, exact."""
    check_exact(Deep, sum_step, tmp_path, num_steps=2)


def open_files() -> tuple[int, int]:
    """How many descriptors are open, and how many of them are of deleted files."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    return len(links), sum(link.endswith("(deleted)") for link in links)


@pytest.mark.parametrize(
    ("num_steps", "num_saves"), [(40, 10), pytest.param(200, 50, marks=pytest.mark.slow)], ids=["short", "whole"]
)
def test_sto_05_descriptors_are_constant(tmp_path: Path, num_steps: int, num_saves: int) -> None:
    """From step 2 on the count stays, checkpoints included; nothing deleted is held open; after close none is left."""
    before = open_files()
    model = mlp(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (tmp_path / "flash").mkdir()
    attach(model, optimizer, tmp_path / "flash")
    counts = set()
    for index in range(num_steps):
        mlp_step(model, optimizer, index % 5)
        if index % (num_steps // num_saves) == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
        if index >= 2:
            counts.add(open_files())
    assert len(counts) == 1
    assert {num_deleted for _, num_deleted in counts} == {before[1]}
    engine_of(model).close()
    assert open_files()[0] <= before[0] + 1  # the interpreter may have opened a source of randomness meanwhile


FEW_FILES = """
import resource, sys
sys.path[:0] = [sys.argv[2]]
import torch
import test_cases_sto as t
from pathlib import Path

build = lambda: torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(150)])
def step(model, optimizer, index):
    optimizer.zero_grad()
    loss = (model(torch.full((2, 8), index + 1.0)) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
t.check_exact(build, step, Path(sys.argv[1]), num_steps=1)  # everything is imported now
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
t.check_exact(build, step, Path(sys.argv[1]))
print("exact")
"""


def run_python(code: str, *arguments: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def test_sto_05_sixty_four_descriptors_are_enough(tmp_path: Path) -> None:
    """RLIMIT_NOFILE 64 with a model of 300 parameters."""
    done = run_python(FEW_FILES, str(tmp_path), str(TESTS))
    assert (done.returncode, done.stdout[-6:]) == (0, "exact\n"), done.stdout[-500:] + done.stderr[-3000:]


STO_06 = """
import os, sys
sys.path[:0] = [sys.argv[2]]
import torch
import test_cases_sto as t
from fakes import mlp
from pathlib import Path
from lightning_tieroffload.engine import offload_engine
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.errors import TierOffloadError

for what in ("closed under it", "torn down"):
    torch.manual_seed(0)
    model = mlp(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.attach(model, optimizer, Path(sys.argv[1]))
    engine = engine_of(model)
    t.mlp_step(model, optimizer, 0)
    if what == "closed under it":
        for name in os.listdir("/proc/self/fd"):
            try:
                if "data-0" in os.readlink(f"/proc/self/fd/{name}"):
                    os.close(int(name))
            except OSError:
                continue
        try:
            for index in range(5):
                t.mlp_step(model, optimizer, index)
            engine.flush()
        except TierOffloadError as error:
            print(type(error).__name__, "Bad file descriptor" in str(error))
    for _ in range(3):
        try:
            engine.close()
        except TierOffloadError:
            pass
print(os.listdir(sys.argv[1]))
"""


def test_sto_06_no_fault_of_storage_kills_the_process(tmp_path: Path) -> None:
    """A descriptor closed under the engine, teardown with transfers pending, closing thrice: exceptions or nothing."""
    done = run_python(STO_06, str(tmp_path), str(TESTS))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["TierIOError True", "[]"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
def test_sto_07_sto_08_direct_io_refused_by_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A file system without direct I/O: exact in buffered mode, which the report tells, with one warning."""
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *arguments, **named)

    monkeypatch.setattr(os, "open", refuse)
    with caplog.at_level(logging.WARNING):
        report = check_exact(lambda: mlp(4), mlp_step, tmp_path, device_budget="64KiB", dram_budget="100KiB")
    assert report["io_mode_by_path"] == {str(tmp_path): "buffered"}
    assert sum("refuses direct I/O" in record.getMessage() for record in caplog.records) == 1


def test_sto_07_direct_io_refused_by_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """EINVAL once, in the middle of training: on in buffered mode, exact, one warning."""

    def on_call(verb: str, num: int, path: str) -> None:
        if verb == "write" and num == 20:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    FaultyDisk(monkeypatch, on_call=on_call)
    with caplog.at_level(logging.WARNING):
        report = check_exact(lambda: mlp(4), mlp_step, tmp_path, device_budget="64KiB", dram_budget="100KiB")
    assert report["io_mode_by_path"] == {str(tmp_path): "buffered"}
    assert sum("refuses direct I/O" in record.getMessage() for record in caplog.records) == 1


@pytest.fixture
def shm() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tieroffload-test-") as path:
        yield Path(path)


def test_sto_09_tmpfs_is_named_and_counts_as_dram(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It works, with a warning that says tmpfs; what lies there is part of what DRAM holds in the report."""
    with caplog.at_level(logging.WARNING):
        report = check_exact(lambda: mlp(4), mlp_step, shm)
    assert any("tmpfs" in record.getMessage() and str(shm) in record.getMessage() for record in caplog.records)
    assert report["tiers"]["dram"]["peak_nbytes"] >= report["tiers"]["nvme"]["used_nbytes"] > 0


def test_sto_11_calls_that_move_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that moves at most 4 KiB a call: everything is looped, exact."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def capped(fd: int, parts: Any, offset: int, real: Any = real) -> int:
            return real(fd, [memoryview(parts[0]).cast("B")[:4096]], offset)

        monkeypatch.setattr(os, name, capped)
    check_exact(lambda: mlp(4), mlp_step, tmp_path)


def test_sto_12_paths_in_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, ~, $VAR, spaces and other alphabets: made where missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLASH", str(tmp_path / "variable"))
    for spelling in ("relative/dir", "~/flash", "$FLASH/dir", "with space and ümlaut"):
        report = check_exact(lambda: mlp(2), mlp_step, spelling, num_steps=2)
        (path,) = report["written_nbytes_by_path"]
        assert os.path.isabs(path)
        assert os.listdir(path) == []
    assert (tmp_path / "home" / "flash").is_dir()
    assert (tmp_path / "variable" / "dir").is_dir()


def test_sto_12_a_path_that_cannot_be_is_told_before_anything_moves(tmp_path: Path) -> None:
    """One message with the option and the path; the model is untouched."""
    (tmp_path / "file").write_text("x")
    model = mlp(2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = take_down(model, [optimizer])
    with pytest.raises(ConfigError, match="nvme_paths") as info:
        tieroffload.offload(model, optimizer, device="cpu", nvme_paths=[tmp_path / "file"])
    assert str(tmp_path / "file") in str(info.value)
    assert engine_of(model) is None
    after = take_down(model, [optimizer])
    assert all(same_bits(before[key], after[key]) for key in before)


def test_sto_12_what_offload_has_not_done_whole_it_has_not_done(tmp_path: Path) -> None:
    """The model is taken in before its optimizer turns out not to fit: both are ordinary again."""
    model = mlp(6)
    optimizer = torch.optim.AdamW(model.parameters())
    before = take_down(model, [optimizer])
    with pytest.raises(InfeasiblePlanError) as info:
        tieroffload.offload(
            model, optimizer, device="cpu", nvme_paths=[tmp_path], device_budget="64KiB", dram_budget=60_000
        )
    assert info.value.tier == "dram"
    assert engine_of(model) is None
    assert type(optimizer) is torch.optim.AdamW
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    after = take_down(model, [optimizer])
    assert all(same_bits(before[key], after[key]) for key in before)
    assert os.listdir(tmp_path) == []


def test_sto_13_space_is_told_in_advance(tmp_path: Path) -> None:
    """What flash will hold is known once model and optimizer are adopted: within 5 % of what is then used."""
    model = mlp(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(model, optimizer, tmp_path, device_budget="64KiB", dram_budget="200KiB")
    told_nbytes = engine_of(model).report()["tiers"]["nvme"]["used_nbytes"]
    for index in range(3):
        mlp_step(model, optimizer, index)
    used_nbytes = engine_of(model).report()["tiers"]["nvme"]["peak_nbytes"]
    engine_of(model).close()
    assert used_nbytes <= told_nbytes <= 1.05 * used_nbytes


STO_16 = """
import os, signal, sys
sys.path[:0] = [sys.argv[2]]
import torch
import test_cases_sto as t
from fakes import mlp
from pathlib import Path
from lightning_tieroffload.engine import offload_engine
from lightning_tieroffload.engine.offload_engine import engine_of

path = Path(sys.argv[1])
torch.manual_seed(0)
model = mlp(6)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
t.attach(model, optimizer, path / "flash")
for index in range(5):
    t.mlp_step(model, optimizer, index)
    if index == 2:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "saved.pt")
real = optimizer.step
num_writes = 0
pwritev = os.pwritev
def dying(*arguments):
    global num_writes
    num_writes += 1
    if num_writes == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return pwritev(*arguments)
os.pwritev = dying
for index in range(20):
    t.mlp_step(model, optimizer, index % 5)
"""


def test_sto_16_a_crash_in_the_middle_does_not_poison_the_next_run(tmp_path: Path) -> None:
    """Killed in an optimizer step; a run that resumes from the last checkpoint in the same path is the plain run."""
    done = run_python(STO_16, str(tmp_path), str(TESTS))
    assert done.returncode == -9, done.stderr[-2000:]
    assert len(os.listdir(tmp_path / "flash")) == 1
    torch.manual_seed(0)
    plain = mlp(6)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain_losses = [mlp_step(plain, plain_optimizer, index) for index in range(5)]
    model = mlp(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(model, optimizer, tmp_path / "flash")
    assert len(os.listdir(tmp_path / "flash")) == 1, "the dead run's directory is gone, ours is there"
    saved = torch.load(tmp_path / "saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    losses = [mlp_step(model, optimizer, index) for index in (3, 4)]
    engine_of(model).close()
    assert all(same_bits(a, b) for a, b in zip(plain_losses[3:], losses, strict=True))
    expected, found = take_down(plain, [plain_optimizer]), take_down(model, [optimizer])
    assert all(same_bits(expected[key], found[key]) for key in expected)


def test_reports_say_what_it_costs_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes written per step and in total, and the life that is left at this rate where the drive says enough."""
    from lightning_tieroffload.io import endurance

    monkeypatch.setattr(endurance, "device_of", lambda path: "nvme0n1")
    monkeypatch.setattr(endurance, "read_health", lambda device: endurance.DriveHealth(device, 0.5, 10**14, "smartctl"))
    report = check_exact(lambda: mlp(4), mlp_step, tmp_path, num_steps=4)
    (entry,) = report["endurance"].values()
    assert entry["written_nbytes"] > 0
    assert entry["written_per_step_nbytes"] == entry["written_nbytes"] / 4
    assert entry["rated_nbytes"] == 2 * 10**14
    assert entry["life_left_s"] > 0


def test_a_large_model_asks_the_probe_and_what_is_chosen_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones do not wait for it; a budget of writes forbids to measure."""
    asked: list[bool] = []

    def settings(paths: Any, *, may_measure: bool) -> tuple[int, int] | None:
        asked.append(may_measure)
        return (8192, 3) if may_measure else None

    monkeypatch.setattr(offload_engine, "probe_settings", settings)

    def in_force(**chosen: Any) -> tuple[int, int]:
        model = mlp(2)
        tieroffload.offload(model, None, device="cpu", nvme_paths=[tmp_path], **chosen)
        core = engine_of(model).core
        threads = core.scheduler._core.lanes["read0"].spec.concurrency
        engine_of(model).close()
        return core.store.block_nbytes, threads

    assert in_force() == (4 << 20, 8)
    assert asked == []
    monkeypatch.setattr(offload_engine, "_PROBE_FROM_NBYTES", 1)
    assert in_force() == (8192, 3)
    assert in_force(io_threads=5) == (8192, 5)
    assert in_force(block_nbytes="16KiB", io_threads=5) == (16384, 5)
    assert asked == [True, True]
    assert in_force(nvme_write_budget="1GiB") == (4 << 20, 8)
    assert asked == [True, True, False]
