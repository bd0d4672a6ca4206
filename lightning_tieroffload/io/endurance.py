"""Floor 2. How long a drive lasts at this rate of writing: its health as it tells it, and arithmetic.

Reads sysfs and, where they are installed, the JSON of ``smartctl`` or ``nvme``. Nothing here needs to be there: a drive
that says nothing has no forecast, and that is said.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DriveHealth", "EnduranceForecast", "device_of", "forecast", "parse_health", "read_health"]

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
    """What this run does to one path's drive. ``life_left_s`` is None where neither rating nor health is known."""

    path: str
    device: str | None
    written_nbytes: int
    written_per_step_nbytes: float | None
    write_bytes_per_s: float | None
    rated_nbytes: int | None
    used_frac: float | None
    life_left_s: float | None

    def describe(self) -> str:
        """One line for people."""
        if self.life_left_s is None:
            return f"{self.path}: life not known. Give the drive's rated writes (TBW), or install smartmontools."
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
) -> EnduranceForecast:
    """Life left = (rated writes - writes so far, this run's included) / this run's rate. Pure arithmetic.

    ``rated_nbytes`` (the data sheet's TBW) wins over what follows from the drive's own figures.
    """
    rated_nbytes = rated_nbytes if rated_nbytes is not None else (health.rated_nbytes if health else None)
    rate = written_nbytes / elapsed_s if elapsed_s > 0 else None
    life_left_s = None
    if rated_nbytes is not None and rate:
        before_nbytes = health.written_nbytes if health and health.written_nbytes is not None else written_nbytes
        life_left_s = max(0.0, (rated_nbytes - before_nbytes) / rate)
    return EnduranceForecast(
        path=path,
        device=health.device if health else None,
        written_nbytes=written_nbytes,
        written_per_step_nbytes=written_nbytes / num_steps if num_steps else None,
        write_bytes_per_s=rate,
        rated_nbytes=rated_nbytes,
        used_frac=health.used_frac if health else None,
        life_left_s=life_left_s,
    )
