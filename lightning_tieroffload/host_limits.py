"""Floor 1. How much host memory this process may still use, as the kernel tells it.

Owns the reading of /proc and of cgroup v1 and v2 files, the process's own group and every parent, since the tightest
one decides who is killed. Does not read the environment (Slurm is config.py's business) and keeps nothing: every call
looks again. `root` is the file system to look in, so that a test can lay out a machine of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["MemoryLimit", "cgroup_limits", "host_available_nbytes"]

# cgroup v1 writes "no limit" as the largest page-aligned 63-bit number; anything near it is no limit.
_NO_LIMIT_NBYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """One limit that holds for this process: `limit_nbytes` in all, of which `used_nbytes` cannot be reclaimed."""

    source: str
    limit_nbytes: int
    used_nbytes: int

    @property
    def free_nbytes(self) -> int:
        return max(0, self.limit_nbytes - self.used_nbytes)


def _read_text(path: Path) -> str | None:
    # A group can vanish, or be hidden by a container, between listing and reading: that is no limit, not a fault.
    try:
        return path.read_text()
    except OSError:
        return None


def _read_limit(path: Path) -> int | None:
    text = (_read_text(path) or "").strip()
    if not text.isdigit() or int(text) >= _NO_LIMIT_NBYTES:  # absent, or "max"
        return None
    return int(text)


def _stat_field(path: Path, name: str) -> int:
    for line in (_read_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _mounted_at(root: Path, controller: str | None) -> tuple[Path, str] | None:
    """Where a hierarchy is mounted and which of its groups the mount shows; `None` as controller is cgroup v2."""
    for line in (_read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, separator, right = line.partition(" - ")
        fields, file_system = left.split(), right.split()
        if not separator or len(fields) < 5 or len(file_system) < 3:
            continue
        wanted = file_system[0] == "cgroup2" if controller is None else file_system[0] == "cgroup"
        if wanted and (controller is None or controller in file_system[2].split(",")):
            return root / fields[4].lstrip("/"), fields[3]
    return None


def _own_and_parent_folders(mount: Path, shown: str, group: str) -> list[Path]:
    try:
        relative = PurePosixPath(group).relative_to(shown)
    except ValueError:
        # A container sees its own group as the mount's root, whatever path /proc/self/cgroup names.
        relative = PurePosixPath()
    folder = mount / relative
    if not folder.is_dir():
        folder = mount
    folders = [folder]
    while folders[-1] != mount:
        folders.append(folders[-1].parent)
    return folders


def cgroup_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Every memory limit of this process's control groups, own group first; empty where there is none.

    Page cache that the kernel can drop (inactive file pages) does not count as used.
    """
    limits: list[MemoryLimit] = []
    for line in (_read_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        is_v2 = controllers == ""
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        mounted = _mounted_at(root, None if is_v2 else "memory")
        if mounted is None:
            continue
        usage_name = "memory.current" if is_v2 else "memory.usage_in_bytes"
        # memory.high does not kill, it throttles so hard that training stands still: as good as a limit.
        limit_names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        reclaimable_name = "inactive_file" if is_v2 else "total_inactive_file"
        for folder in _own_and_parent_folders(*mounted, group):
            for limit_name in limit_names:
                limit_nbytes = _read_limit(folder / limit_name)
                if limit_nbytes is None:
                    continue
                used_nbytes = _read_limit(folder / usage_name) or 0
                reclaimable_nbytes = _stat_field(folder / "memory.stat", reclaimable_name)
                limits.append(
                    MemoryLimit(
                        source=f"{limit_name} of cgroup /{folder.relative_to(root).as_posix()}",
                        limit_nbytes=limit_nbytes,
                        used_nbytes=max(0, used_nbytes - reclaimable_nbytes),
                    )
                )
    return limits


def host_available_nbytes() -> int:
    """Bytes that the whole host can still give without paging (`MemAvailable` on Linux)."""
    try:
        import psutil
    except ImportError:  # a wheel for this platform may be missing; POSIX can say less, but something
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    return int(psutil.virtual_memory().available)
