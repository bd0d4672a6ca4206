"""The probe, the store beside a bare loop, the command, and how long a drive lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_tieroffload.cli import bench_io
from lightning_tieroffload.cli.bench_io import measure_io
from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.io import endurance, probe
from lightning_tieroffload.io.endurance import DriveHealth, device_of, forecast, parse_health, read_health
from lightning_tieroffload.io.probe import ProbeRow, choose_row, compare_store, probe_path
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
    assert found.mode in ("direct", "buffered")
    assert not found.from_file
    assert os.listdir(tmp_path / "nvme") == []


def test_probe_is_kept_by_device_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "cache" / "probe.json"
    first = probe_path(tmp_path / "a", cache_file=kept, **SMALL)
    monkeypatch.setattr(probe, "_measure", lambda *_: pytest.fail("must not measure again"))
    second = probe_path(tmp_path / "b", cache_file=kept, **SMALL)  # another directory of the same disk
    assert second.from_file
    assert second.rows == first.rows
    assert second.path == str(tmp_path / "b")
    assert os.listdir(tmp_path / "b") == []
    monkeypatch.setattr(probe, "_measure", lambda *_: 5.0)
    assert not probe_path(tmp_path / "a", cache_file=kept, fresh=True, **SMALL).from_file
    assert not probe_path(tmp_path / "a", cache_file=kept, **{**SMALL, "depths": (1,)}).from_file
    monkeypatch.setattr(probe.time, "time", lambda: first.measured_unix_s + 40 * 86400)
    assert not probe_path(tmp_path / "a", cache_file=kept, **SMALL).from_file


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "probes": {}}', '{"format": 1, "probes": 3}'])
def test_cfg_02_damaged_or_unwritable_cache_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr(probe, "_measure", lambda *_: 5.0)
    kept = tmp_path / "probe.json"
    kept.write_text(content)
    assert not probe_path(tmp_path / "nvme", cache_file=kept, **SMALL).from_file
    assert probe_path(tmp_path / "nvme", cache_file=kept, **SMALL).from_file
    probe_path(tmp_path / "nvme", cache_file="/proc/cannot/be/made/probe.json", **SMALL)


def test_store_is_compared_at_equal_bytes(tmp_path: Path) -> None:
    found = compare_store(tmp_path, block_nbytes=64 * KiB, depth=2, nbytes=4 * MiB, num_rounds=1)
    assert found.nbytes == 4 * MiB
    assert found.read_frac == found.store_read_bytes_per_s / found.bare_read_bytes_per_s > 0
    assert found.to_json()["write_frac"] == found.write_frac > 0
    assert os.listdir(tmp_path) == []


def test_command_prints_one_json_document(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "lightning_tieroffload", "bench", "io", str(tmp_path), "--json",
        "--blocks", "64KiB,256KiB", "--depths", "1,2", "--file-size", "4MiB", "--cell-seconds", "0.01",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["rows"]) == 4
    for one in result["rows"]:
        assert set(one) == {"block_nbytes", "depth", "read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s"}
    assert result["store"]["bare_read_bytes_per_s"] > 0
    assert os.listdir(tmp_path) == []


def test_table_for_people_and_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_io, "measure_io", lambda path, **_: measure_io(path, **SMALL))
    bench_io.bench_io(tmp_path)
    text = capsys.readouterr().out
    for part in ("both at once", "bare O_DIRECT loop", "io_threads=", "GB/s"):
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
    assert "TBW" in unknown.describe()
    assert forecast("/data", 0, 100.0, health=health).life_left_s is None
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
