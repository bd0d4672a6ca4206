"""GPUDirect Storage: used only when it is real, never named when it is not. kvikio is a stand-in here."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tieroffload.errors import TierIOError, UnsupportedError
from lightning_tieroffload.io import gds_mover
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.gds_mover import GdsMover, gds_obstacle
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.scheduler import Scheduler


class Future:
    def __init__(self, moved_nbytes: int) -> None:
        self.moved_nbytes = moved_nbytes

    def get(self) -> int:
        return self.moved_nbytes


class CuFile:
    """kvikio.CuFile on a CPU tensor: same calls, same order of arguments."""

    fail = short = False
    num_open = 0

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r+"
        assert compat_mode == "OFF"
        self.file = open(path, "r+b", buffering=0)  # noqa: SIM115
        type(self).num_open += 1

    def pread(self, part: torch.Tensor, nbytes: int, offset: int) -> Future:
        if self.fail:
            raise OSError(5, "made to fail")
        part.numpy()[:] = memoryview(os.pread(self.file.fileno(), nbytes, offset))
        return Future(nbytes - self.short)

    def pwrite(self, part: torch.Tensor, nbytes: int, offset: int) -> Future:
        if self.fail:
            raise OSError(5, "made to fail")
        os.pwrite(self.file.fileno(), part.numpy().tobytes(), offset)
        return Future(nbytes - self.short)

    def close(self) -> None:
        self.file.close()
        type(self).num_open -= 1


compat_mode: Any = "AUTO"


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    answers: dict[str, Any] = {"is_gds_available": True, "allow_compat_mode": False, "gds_threshold": 1 << 20}

    @contextlib.contextmanager
    def set_defaults(values: dict[str, Any]) -> Iterator[None]:
        global compat_mode
        before, compat_mode = compat_mode, values.get("compat_mode", compat_mode)
        threshold = answers["gds_threshold"]
        answers["gds_threshold"] = values.get("gds_threshold", threshold)
        yield
        compat_mode, answers["gds_threshold"] = before, threshold

    package = types.ModuleType("kvikio")
    driver = types.ModuleType("kvikio.cufile_driver")
    defaults = types.ModuleType("kvikio.defaults")
    package.CuFile = CuFile  # type: ignore[attr-defined]
    package.CompatMode = types.SimpleNamespace(OFF="OFF")  # type: ignore[attr-defined]
    driver.get = lambda name: answers[name]  # type: ignore[attr-defined]
    defaults.get = lambda name: compat_mode  # type: ignore[attr-defined]
    defaults.set = set_defaults  # type: ignore[attr-defined]
    for module in (package, driver, defaults):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    driver_path = tmp_path / "nvidia-fs"
    driver_path.mkdir()
    monkeypatch.setattr(gds_mover.gds_obstacle, "__kwdefaults__", {"driver_path": str(driver_path)})
    yield answers
    assert CuFile.num_open == 0
    assert answers["gds_threshold"] == 1 << 20


def test_obstacles_are_told_in_words(kvikio: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert gds_obstacle() is None
    kvikio["is_gds_available"] = False
    assert "not available" in str(gds_obstacle())
    kvikio["is_gds_available"] = kvikio["allow_compat_mode"] = True
    assert '"allow_compat_mode": false' in str(gds_obstacle())  # cuFile's own way through host memory
    kvikio["allow_compat_mode"] = False
    del kvikio["is_gds_available"]
    assert "KeyError" in str(gds_obstacle())
    kvikio["is_gds_available"] = True
    for mode in (types.SimpleNamespace(name="ON"), True):
        monkeypatch.setattr(sys.modules[__name__], "compat_mode", mode)
        assert "compatibility mode" in str(gds_obstacle())
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", None)
    assert "pip install 'lightning-tieroffload[gds]'" in str(gds_obstacle())
    assert "nvidia-fs kernel module" in str(gds_obstacle(driver_path="/nowhere"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in str(gds_obstacle())


def test_round_trip_pieces_versions_and_failures(
    kvikio: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with (
        ExtentStore(paths, block_nbytes=4096, verify_reads=False, direct=False) as store,
        Scheduler(NvmeMover.lane_specs(2, io_threads=2), timeout_s=10) as scheduler,
    ):
        store.allocate("s", 40_000, num_versions=2)
        mover = GdsMover(scheduler, store)
        assert kvikio["gds_threshold"] == 1  # or small pieces would go through host memory, unsaid
        source = torch.arange(10_000, dtype=torch.float32)
        mover.write("s", source).wait()
        target = torch.empty_like(source)
        mover.read("s", target).wait()
        assert torch.equal(target, source)
        assert sum(store.written_nbytes_by_path.values()) == 40_000
        for flag, part in (("fail", "made to fail"), ("short", "moved 4095 of 4096")):
            with monkeypatch.context() as patch:
                patch.setattr(CuFile, flag, True)
                for call in (lambda: mover.write("s", source + 1), lambda: mover.read("s", target)):
                    with pytest.raises(TierIOError, match=part) as info:
                        call().wait()
                    assert info.value.shard == "s"
                    scheduler.clear_pending_error()
        mover.read("s", target).wait()
        assert torch.equal(target, source)  # the version before the failed writes
        with pytest.raises(ValueError, match="exactly these"):
            mover.read("s", target[1:])
        mover.close()
        mover.close()


def test_not_used_without_the_driver_or_with_verified_reads(kvikio: dict[str, Any], tmp_path: Path) -> None:
    with (
        ExtentStore([tmp_path / "a"]) as store,
        Scheduler(NvmeMover.lane_specs(1), timeout_s=10) as scheduler,
    ):
        with pytest.raises(UnsupportedError, match="verify_reads to off"):
            GdsMover(scheduler, store)
        kvikio["is_gds_available"] = False
        with pytest.raises(UnsupportedError, match="path through host memory can"):
            GdsMover(scheduler, store)


def test_a_write_that_is_refused_half_way_is_no_writer_for_ever(kvikio: dict[str, Any], tmp_path: Path) -> None:
    """The scheduler takes no more: what was submitted has ended, and the shard can be written again."""
    with (
        ExtentStore([tmp_path / "a"], block_nbytes=4096, verify_reads=False, direct=False) as store,
        Scheduler(NvmeMover.lane_specs(1, io_threads=1), timeout_s=10) as scheduler,
    ):
        store.allocate("s", 40_000)
        mover = GdsMover(scheduler, store)
        num_submitted = 0
        real = scheduler.submit

        def refuse_third(*arguments: Any, **named: Any) -> Any:
            nonlocal num_submitted
            num_submitted += 1
            if num_submitted == 3:
                raise TierIOError("made to fail")
            return real(*arguments, **named)

        scheduler.submit = refuse_third  # type: ignore[method-assign]
        source = torch.arange(10_000, dtype=torch.float32)
        with pytest.raises(TierIOError, match="made to fail"):
            mover.write("s", source)
        mover.write("s", source).wait()
        target = torch.empty_like(source)
        mover.read("s", target).wait()
        assert torch.equal(target, source)
        mover.close()
