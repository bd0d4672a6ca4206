"""The probe, the store beside a bare loop, the command, and how long a drive lasts."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tieroffload.cli import bench_io
from lightning_tieroffload.cli.bench_io import measure_io
from lightning_tieroffload.cli.report import report
from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.io import endurance, probe
from lightning_tieroffload.io.endurance import (
    DriveHealth,
    EnduranceMeter,
    device_of,
    forecast,
    parse_health,
    read_health,
)
from lightning_tieroffload.io.link_probe import probe_links
from lightning_tieroffload.io.probe import ProbeRow, choose_row, compare_store, probe_path, probe_settings, threads_for
from lightning_tieroffload.sizes import GiB, KiB, MiB, TiB

REPO = Path(__file__).parents[1]
SMALL: dict[str, Any] = {
    "block_nbytes": (64 * KiB, 256 * KiB),
    "depths": (1, 2),
    "file_nbytes": 4 * MiB,
    "cell_s": 0.01,
}


def row(block_nbytes: int, depth: int, mixed: float) -> ProbeRow:
    return ProbeRow(
        block_nbytes=block_nbytes, depth=depth, read_bytes_per_s=1, write_bytes_per_s=1, mixed_bytes_per_s=mixed
    )


def test_choice_is_the_cheapest_of_the_good_ones() -> None:
    rows = [row(MiB, 1, 50), row(4 * MiB, 1, 70), row(MiB, 4, 96), row(4 * MiB, 4, 100), row(4 * MiB, 8, 100.5)]
    assert choose_row(rows) == rows[2]
    assert choose_row(rows[:2]) == rows[1]
    assert choose_row([row(MiB, 2, 10), row(16 * MiB, 1, 9.6), row(4 * MiB, 1, 9.5)]).block_nbytes == 4 * MiB


def test_probe_measures_every_cell_and_leaves_nothing(tmp_path: Path) -> None:
    found = probe_path(tmp_path / "nvme", **SMALL)
    assert [(r.block_nbytes, r.depth) for r in found.rows] == [
        (64 * KiB, 1), (64 * KiB, 2), (256 * KiB, 1), (256 * KiB, 2),
    ]  # fmt: skip
    for r in found.rows:
        assert min(r.read_bytes_per_s, r.write_bytes_per_s, r.mixed_bytes_per_s) > 0
    assert found.chosen in found.rows
    assert found.io_threads == threads_for(found.chosen.depth) > found.chosen.depth
    assert found.store_rows == ()
    assert found.mode in ("direct", "buffered")
    assert not found.from_file
    assert os.listdir(tmp_path / "nvme") == []


def test_probe_is_kept_by_device_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "cache" / "probe.json"
    first = probe_path(tmp_path / "a", cache_file=kept, **SMALL)
    monkeypatch.setattr(probe, "_run_bare", lambda *_: pytest.fail("must not measure again"))
    second = probe_path(tmp_path / "b", cache_file=kept, **SMALL)  # another directory of the same disk
    assert second.from_file
    assert second.rows == first.rows
    assert second.path == str(tmp_path / "b")
    assert os.listdir(tmp_path / "b") == []
    monkeypatch.setattr(probe, "_run_bare", lambda *_: 5.0)
    assert not probe_path(tmp_path / "a", cache_file=kept, fresh=True, **SMALL).from_file
    assert not probe_path(tmp_path / "a", cache_file=kept, **{**SMALL, "depths": (1,)}).from_file
    monkeypatch.setattr(probe.time, "time", lambda: first.measured_unix_s + 40 * 86400)
    assert not probe_path(tmp_path / "a", cache_file=kept, **SMALL).from_file


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "probes": {}}', '{"format": 1, "probes": 3}'])
def test_cfg_02_damaged_or_unwritable_cache_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(probe, "_run_bare", lambda *_: 5.0)
    kept = tmp_path / "probe.json"
    kept.write_text(content)
    assert not probe_path(tmp_path / "nvme", cache_file=kept, **SMALL).from_file
    assert probe_path(tmp_path / "nvme", cache_file=kept, **SMALL).from_file
    probe_path(tmp_path / "nvme", cache_file="/proc/cannot/be/made/probe.json", **SMALL)


def test_settings_come_from_kept_probes_or_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What suits the neediest path; nothing where one is not known and nobody may measure, or it cannot be."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    paths = [tmp_path / "a", tmp_path / "b"]
    assert probe_settings(paths, may_measure=False) is None
    rates = itertools.cycle([1.0, 2.0, 3.0])
    monkeypatch.setattr(probe, "_run_bare", lambda *_: next(rates))
    monkeypatch.setattr(probe, "_fill", lambda *_: None)
    block_nbytes, io_threads = probe_settings(paths, may_measure=True) or pytest.fail("must measure")
    assert block_nbytes in probe.BLOCKS_NBYTES
    assert io_threads in [threads_for(depth) for depth in probe.DEPTHS]
    monkeypatch.setattr(probe, "_run_bare", lambda *_: pytest.fail("must not measure again"))
    assert probe_settings(paths, may_measure=False) == (block_nbytes, io_threads)
    assert probe_settings(paths, may_measure=True) == (block_nbytes, io_threads)
    (tmp_path / "file").write_text("x")
    assert probe_settings([tmp_path / "file"], may_measure=True) is None
    assert sorted(os.listdir(tmp_path / "a")) == []


@pytest.mark.parametrize("verify_reads", [True, False])
def test_store_is_compared_at_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify_reads: bool) -> None:
    """Between its first writing and its end, the store moves the bytes that the bare loop moves, in each round."""
    moved: dict[str, int] = {"data-0": 0, "data-bare": 0}
    names: dict[int, str] = {}
    for call in ("preadv", "pwritev"):
        real = getattr(os, call)

        def counted(fd: int, parts: Any, offset: int, real: Any = real) -> Any:
            if fd not in names:
                names[fd] = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
            done = real(fd, parts, offset)
            moved[names[fd]] += done
            return done

        monkeypatch.setattr(os, call, counted)
    found = compare_store(
        tmp_path, block_nbytes=64 * KiB, io_threads=2, nbytes=4 * MiB, num_rounds=2, verify_reads=verify_reads
    )
    assert found.nbytes == 4 * MiB
    filled_nbytes, measured_nbytes = found.nbytes, 2 * 3 * found.nbytes
    assert moved["data-bare"] == filled_nbytes + measured_nbytes
    assert moved["data-0"] == filled_nbytes + measured_nbytes + 2 * 4096  # a page to see that it gives back
    for kind in ("read", "write", "mixed"):
        bare, store = getattr(found, f"bare_{kind}_bytes_per_s"), getattr(found, f"{kind}_bytes_per_s")
        assert found.to_json()[f"{kind}_frac"] == store / bare > 0
    assert found.checksum == ("xxh3" if verify_reads else None)
    assert os.listdir(tmp_path) == []


def test_a_mixed_load_reads_as_much_as_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the depth, one included; and a cell whose time is up at once still moves something."""
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * 4096))
    calls: list[str] = []
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    for num_threads in (1, 3):
        with probe.DirectFile(path) as file:
            memories = [probe._random_memory(4096)]
            calls.clear()
            assert probe._run_bare(file, "mixed", memories, num_threads, probe._Turns(6)) > 0
            assert sorted(calls) == ["preadv"] * 3 + ["pwritev"] * 3
            assert probe._run_bare(file, "read", memories, num_threads, probe._Turns(duration_s=0)) > 0


def test_command_prints_one_json_document(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "lightning_tieroffload", "bench", "io", str(tmp_path), "--json",
        "--blocks", "64KiB,256KiB", "--depths", "1,2", "--file-size", "4MiB", "--cell-seconds", "0.01",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["rows"]) == len(result["store_rows"]) == 4
    for one in (*result["rows"], *result["store_rows"]):
        assert set(one) == {"block_nbytes", "depth", "read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s"}
        assert min(one.values()) > 0
    for kind in ("read", "write", "mixed"):
        assert result["store"][f"bare_{kind}_bytes_per_s"] > 0
        assert result["store"][f"{kind}_bytes_per_s"] > 0
    assert len(result["links"]) == torch.cuda.device_count()
    assert result["endurance"]["drive_bytes_per_s"] > 0
    assert os.listdir(tmp_path) == []


def test_table_for_people_and_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_io, "measure_io", lambda path, **_: measure_io(path, **SMALL))
    bench_io.bench_io(tmp_path)
    text = capsys.readouterr().out
    no_link = "no CUDA device" if not torch.cuda.is_available() else "host to device"
    for part in ("both at once", "bare O_DIRECT loop", "io_threads=", "GB/s", "store read", "not known", no_link):
        assert part in " ".join(text.split())
    for wrong in ({"blocks": "1000"}, {"depths": "1,x"}, {"depths": "0"}, {"blocks": "4 QB"}):
        with pytest.raises(ConfigError, match="--"):
            bench_io.bench_io(tmp_path, **wrong)


# --- endurance ----------------------------------------------------------------------------------------------------


def test_health_from_either_tool() -> None:
    smartctl = {"nvme_smart_health_information_log": {"percentage_used": 4, "data_units_written": 2_000_000}}
    nvme = {"percent_used": 4, "data_units_written": "2000000"}
    for content in (smartctl, nvme):
        health = parse_health("nvme0n1", "tool", content)
        assert (health.used_frac, health.written_nbytes) == (0.04, 1_024_000_000_000)
        assert health.rated_nbytes == 25_600_000_000_000
    for content in ({}, [], {"nvme_smart_health_information_log": 3}, "x", {"percentage_used": "?"}):
        assert parse_health("sda", "tool", content) == DriveHealth("sda")
    assert parse_health("d", "tool", {"percentage_used": 0, "data_units_written": 5}).rated_nbytes is None


def test_forecast_arithmetic() -> None:
    health = DriveHealth("nvme0n1", 0.5, 300 * TiB, "smartctl")
    found = forecast("/data", 10 * GiB, 100.0, num_steps=5, health=health)
    assert found.written_per_step_nbytes == 2 * GiB
    assert found.life_left_s == pytest.approx(300 * TiB / (10 * GiB / 100))
    assert "days of writing" in found.describe()
    rated = forecast("/data", 10 * GiB, 100.0, rated_nbytes=1000 * TiB)
    assert rated.life_left_s == pytest.approx((1000 * TiB - 10 * GiB) / (10 * GiB / 100))
    worn = forecast("/data", 10 * GiB, 100.0, health=DriveHealth("d", 1.2, 300 * TiB, "nvme"))
    assert worn.life_left_s == 0.0
    unknown = forecast("/data", 10 * GiB, 100.0)
    assert unknown.life_left_s is None
    assert "--rated-tbw" in unknown.describe()
    assert "nothing was written" in forecast("/data", 0, 100.0, health=health).describe()
    two_paths = forecast("/data", 10 * GiB, 100.0, health=health, on_drive_nbytes=30 * GiB)
    assert two_paths.life_left_s == pytest.approx(found.life_left_s / 3)
    assert two_paths.written_nbytes == 10 * GiB
    assert "years" in forecast("/data", 1, 100.0, health=health).describe()


def test_health_asks_the_tools_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Done:
        stdout = json.dumps({"percent_used": 7, "data_units_written": 10}).encode()

    def run(command: list[str], **_: Any) -> Done:
        asked.append(command[0])
        if "smartctl" in command[0]:
            raise PermissionError("not root")
        return Done()

    monkeypatch.setattr(endurance.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(endurance.subprocess, "run", run)
    assert read_health("nvme0n1") == DriveHealth("nvme0n1", 0.07, 5_120_000, "nvme")
    assert asked == ["/sbin/smartctl", "/sbin/nvme"]
    monkeypatch.setattr(endurance.shutil, "which", lambda tool: None)
    assert read_health("nvme0n1") == DriveHealth("nvme0n1")


def test_meter_adds_up_what_paths_on_one_drive_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two paths on one drive wear it together; what the drive said when asked grows by what the run wrote since."""
    asked: list[str] = []

    def ask(device: str) -> DriveHealth:
        asked.append(device)
        return DriveHealth(device, 0.5, 100 * TiB, "smartctl")

    monkeypatch.setattr(endurance, "device_of", {"/a": "nvme0n1", "/b": "nvme0n1", "/c": None}.get)
    monkeypatch.setattr(endurance, "read_health", ask)
    meter = EnduranceMeter(["/a", "/b", "/c"])
    first = meter.report({"/a": 1 * GiB, "/b": 3 * GiB, "/c": 2 * GiB}, 10.0, 2)
    assert first["/a"]["life_left_s"] == first["/b"]["life_left_s"] == pytest.approx(100 * TiB / (0.4 * GiB))
    assert first["/b"]["written_per_step_nbytes"] == 1.5 * GiB
    assert first["/c"]["life_left_s"] is None
    assert first["/c"]["drive_bytes_per_s"] == pytest.approx(0.2 * GiB)
    later = meter.report({"/a": 2 * GiB, "/b": 6 * GiB}, 20.0, 4)
    assert later["/a"]["drive_written_nbytes"] == 100 * TiB + 4 * GiB
    assert later["/a"]["rated_nbytes"] == first["/a"]["rated_nbytes"] == 200 * TiB
    assert later["/a"]["life_left_s"] == pytest.approx((100 * TiB - 4 * GiB) / (0.4 * GiB))
    assert asked == ["nvme0n1"]
    assert json.loads(json.dumps(later)) == later


def test_report_takes_the_rating_of_the_data_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved report whose drive says nothing has a life once somebody gives the TBW; one without flash has none."""
    section = {"/a": forecast("/a", 10**12, 1000.0, num_steps=10).to_json()}
    assert section["/a"]["life_left_s"] is None
    saved = {"tiers": {}, "endurance": section, "written_nbytes_by_path": {"/a": 10**12}}
    (tmp_path / "report.json").write_text(json.dumps(saved))
    report(tmp_path, json_=True, rated_tbw=601)
    found = json.loads(capsys.readouterr().out)["endurance"]["/a"]
    assert found["life_left_s"] == pytest.approx(600e12 / 1e9)
    report(tmp_path, rated_tbw=601)
    assert "6.9 days of writing" in " ".join(capsys.readouterr().out.split())
    report(tmp_path)
    assert "--rated-tbw" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "report.json").write_text(json.dumps({"tiers": {}}))
    report(tmp_path, json_=True, rated_tbw=601)
    assert json.loads(capsys.readouterr().out)["endurance"] == {}


def test_links_are_measured_through_the_copy_streams() -> None:
    """On this machine's device, or in host memory where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = probe_links(device, nbytes=1 * MiB, num_rounds=2)
    assert min(found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.both_bytes_per_s) > 0
    assert found.to_json()["nbytes"] == 1 * MiB


def test_device_of_a_partition_is_its_disk(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    disk = tmp_path / "devices" / "nvme7n1"
    part = disk / "nvme7n1p2"
    part.mkdir(parents=True)
    (part / "partition").write_text("2")
    block = tmp_path / "dev" / "block"
    block.mkdir(parents=True)
    assert device_of(str(tmp_path), sysfs=str(tmp_path)) is None
    (block / f"{os.major(number)}:{os.minor(number)}").symlink_to(part)
    assert device_of(str(tmp_path), sysfs=str(tmp_path)) == "nvme7n1"
    assert device_of("/proc") is None
