"""Floor 2. How long a drive lasts at this rate of writing: its health as it tells it, and arithmetic.

Reads sysfs and, where they are installed, the JSON of ``smartctl`` or ``nvme``. Nothing here needs to be there: a drive
that says nothing has no forecast, and that is said.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "DriveHealth",
    "EnduranceForecast",
    "EnduranceMeter",
    "device_of",
    "forecast",
    "parse_health",
    "rated_nbytes_of_tbw",
    "read_health",
    "with_rating",
]

_DATA_UNIT_NBYTES = 512_000  # NVMe: one "data unit" is 1000 sectors of 512 bytes
_TOOL_TIMEOUT_S = 5.0
_YEAR_S = 365.25 * 86400


@dataclass(frozen=True, slots=True)
class DriveHealth:
    """What a drive says of itself. ``used_frac`` may pass 1.0: drives outlive their rating. None: it does not say."""

    device: str
    used_frac: float | None = None
    written_nbytes: int | None = None
    source: str = "nothing"

    @property
    def rated_nbytes(self) -> int | None:
        """Total writes at which the drive would call itself used up, from its own two figures; None below 1 % used."""
        if self.used_frac is None or self.written_nbytes is None or self.used_frac < 0.01:
            return None
        return int(self.written_nbytes / self.used_frac)


@dataclass(frozen=True, slots=True)
class EnduranceForecast:
    """What this run does to one path's drive. ``life_left_s`` is None where neither rating nor health is known.

    ``drive_bytes_per_s`` is the run's rate over all paths on that drive, ``drive_written_nbytes`` what the drive has
    taken in its whole life, as far as it says so.
    """

    path: str
    device: str | None
    written_nbytes: int
    written_per_step_nbytes: float | None
    drive_bytes_per_s: float | None
    drive_written_nbytes: int | None
    rated_nbytes: int | None
    used_frac: float | None
    life_left_s: float | None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "text": self.describe()}

    def describe(self) -> str:
        """One line for people."""
        if not self.drive_bytes_per_s:
            return f"{self.path}: nothing was written, so the drive does not wear."
        if self.life_left_s is None:
            return (
                f"{self.path}: how long the drive lasts is not known. Give its rated writes (--rated-tbw), or install "
                f"smartmontools and allow it to ask the drive."
            )
        years = self.life_left_s / _YEAR_S
        left = f"{years:.1f} years" if years >= 1 else f"{self.life_left_s / 86400:.1f} days"
        return f"{self.path}: {left} of writing at this rate are left."


def device_of(path: str, *, sysfs: str = "/sys") -> str | None:
    """Name of the whole disk under ``path`` ("nvme0n1"), None for what is not on one (tmpfs, network, overlay)."""
    number = os.stat(path).st_dev
    link = Path(sysfs, "dev", "block", f"{os.major(number)}:{os.minor(number)}")
    if not link.exists():
        return None
    disk = link.resolve()
    if (disk / "partition").exists():
        disk = disk.parent
    return disk.name


def parse_health(device: str, source: str, content: Any) -> DriveHealth:
    """From the JSON of ``smartctl -j -a`` or ``nvme smart-log -o json``. Unknown content gives an empty answer."""
    if not isinstance(content, dict):
        return DriveHealth(device)
    log = content.get("nvme_smart_health_information_log", content)
    if not isinstance(log, dict):
        return DriveHealth(device)
    percent = next((log[key] for key in ("percentage_used", "percent_used") if key in log), None)
    units = log.get("data_units_written")
    used_frac = float(percent) / 100 if isinstance(percent, (int, float)) else None
    # nvme-cli prints 128-bit counters as strings in some versions.
    written_nbytes = int(str(units)) * _DATA_UNIT_NBYTES if str(units).isdigit() else None
    if used_frac is None and written_nbytes is None:
        return DriveHealth(device)
    return DriveHealth(device, used_frac, written_nbytes, source)


def read_health(device: str) -> DriveHealth:
    """Ask ``smartctl``, then ``nvme``, whichever is installed and permitted. Takes milliseconds; at most 10 s."""
    for tool, arguments in (("smartctl", ["-j", "-a"]), ("nvme", ["smart-log", "-o", "json"])):
        program = shutil.which(tool)
        if program is None:
            continue
        try:
            done = subprocess.run(
                [program, *arguments, f"/dev/{device}"], capture_output=True, timeout=_TOOL_TIMEOUT_S, check=False
            )
            # smartctl's exit code has bits for warnings of the drive, so it is the content that counts.
            health = parse_health(device, tool, json.loads(done.stdout))
        except (OSError, subprocess.TimeoutExpired, ValueError):
            continue
        if health.source != "nothing":
            return health
    return DriveHealth(device)


def forecast(
    path: str,
    written_nbytes: int,
    elapsed_s: float,
    *,
    num_steps: int = 0,
    health: DriveHealth | None = None,
    rated_nbytes: int | None = None,
    on_drive_nbytes: int | None = None,
) -> EnduranceForecast:
    """Life left = (rated writes - writes so far, this run's included) / this run's rate. Pure arithmetic.

    ``rated_nbytes`` (the data sheet's TBW) wins over what follows from the drive's own figures. ``on_drive_nbytes`` is
    what this run wrote to the drive over all paths (None: only this one is on it).
    """
    on_drive_nbytes = written_nbytes if on_drive_nbytes is None else on_drive_nbytes
    rated_nbytes = rated_nbytes if rated_nbytes is not None else (health.rated_nbytes if health else None)
    rate = on_drive_nbytes / elapsed_s if elapsed_s > 0 else None
    ever_nbytes = health.written_nbytes if health else None
    return EnduranceForecast(
        path=path,
        device=health.device if health else None,
        written_nbytes=written_nbytes,
        written_per_step_nbytes=written_nbytes / num_steps if num_steps else None,
        drive_bytes_per_s=rate,
        drive_written_nbytes=ever_nbytes,
        rated_nbytes=rated_nbytes,
        used_frac=health.used_frac if health else None,
        life_left_s=_life_left_s(rated_nbytes, on_drive_nbytes if ever_nbytes is None else ever_nbytes, rate),
    )


def _life_left_s(rated_nbytes: int | None, ever_nbytes: int, rate: float | None) -> float | None:
    return max(0.0, (rated_nbytes - ever_nbytes) / rate) if rated_nbytes is not None and rate else None


def rated_nbytes_of_tbw(rated_tbw: float) -> int:
    """A data sheet's TBW is decimal: 600 TBW are 600 · 10¹² bytes."""
    return int(rated_tbw * 1e12)


class EnduranceMeter:
    """The ``endurance`` section of a run's report. Asks each drive for its health once, when first asked itself."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._device_by_path: dict[str, str | None] = {}
        self._health_by_device: dict[str, DriveHealth] = {}
        self._written_then: dict[str, int] = {}  # by device, when it was asked: what it says includes these

    def report(
        self, written_nbytes_by_path: Mapping[str, int], elapsed_s: float, num_steps: int
    ) -> dict[str, dict[str, Any]]:
        """By path, as JSON: bytes written in all and per step, and what the rate leaves of the drive's life."""
        if not self._device_by_path:
            self._device_by_path = {path: _device_or_none(path) for path in self._paths}
        section = {}
        for path in self._paths:
            device = self._device_by_path[path]
            same = [
                other for other in self._paths if other == path or (device and self._device_by_path[other] == device)
            ]
            on_drive_nbytes = sum(written_nbytes_by_path.get(other, 0) for other in same)
            health = None if device is None else self._health(device, on_drive_nbytes)
            section[path] = forecast(
                path,
                written_nbytes_by_path.get(path, 0),
                elapsed_s,
                num_steps=num_steps,
                health=health,
                rated_nbytes=None if device is None else self._health_by_device[device].rated_nbytes,
                on_drive_nbytes=on_drive_nbytes,
            ).to_json()
        return section

    def _health(self, device: str, on_drive_nbytes: int) -> DriveHealth:
        if device not in self._health_by_device:
            self._health_by_device[device] = read_health(device)
            self._written_then[device] = on_drive_nbytes
        health = self._health_by_device[device]
        if health.written_nbytes is None:
            return health
        since_nbytes = on_drive_nbytes - self._written_then[device]
        return dataclasses.replace(health, written_nbytes=health.written_nbytes + since_nbytes)


def _device_or_none(path: str) -> str | None:
    try:
        return device_of(path)
    except OSError:  # removed meanwhile: a report must not fail for that
        return None


def with_rating(section: Mapping[str, Mapping[str, Any]], rated_nbytes: int) -> dict[str, dict[str, Any]]:
    """The ``endurance`` section of a saved report, its lives from the data sheet's rating instead. Pure."""
    names = [field.name for field in dataclasses.fields(EnduranceForecast)]
    rated = {}
    for path, entry in section.items():
        one = EnduranceForecast(**{name: entry.get(name) for name in names})  # type: ignore[arg-type]
        ever_nbytes = one.written_nbytes if one.drive_written_nbytes is None else one.drive_written_nbytes
        life_left_s = _life_left_s(rated_nbytes, ever_nbytes or 0, one.drive_bytes_per_s)
        rated[path] = dataclasses.replace(one, rated_nbytes=rated_nbytes, life_left_s=life_left_s).to_json()
    return rated
