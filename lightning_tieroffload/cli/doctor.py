"""Floor 8. `tieroffload doctor`: what is usable on this machine, and what to do about the rest.

Owns looking, and wording what was found. Needs nothing beyond the standard library to start: each check imports what
it looks at by itself, and one that cannot is a finding, not a crash. Leaves nothing behind but a compiled kernel where
Numba keeps those.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_tieroffload._version import __version__
from lightning_tieroffload.cli.options import print_json, refuse_rest, take_settings
from lightning_tieroffload.config import TierOffloadConfig, resolve_budgets
from lightning_tieroffload.host_limits import cgroup_limits, host_available_nbytes
from lightning_tieroffload.sizes import KiB, format_nbytes

__all__ = ["Finding", "doctor", "examine", "probe_direct_io"]

_BLOCK_NBYTES = 4 * KiB
_PACKAGES = ("torch", "lightning", "accelerate", "transformers", "numba", "numpy", "scipy", "aiofiles", "safetensors")
_IN_MEMORY = ("tmpfs", "ramfs")
_OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "fuse", "fuseblk", "9p", "ceph", "lustre")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `level` is ok, note (works, but slower or smaller) or problem (does not work)."""

    name: str
    level: str
    text: str
    advice: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def examine(config: TierOffloadConfig) -> list[Finding]:
    """Run every check. A check that fails in a way of its own is reported as a problem under its name."""
    findings: list[Finding] = []
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", _check_versions),
        ("accelerator", _check_accelerator),
        ("host memory", _check_host_memory),
        ("locked memory", _check_locked_memory),
        ("processors", _check_processors),
        ("budgets", lambda: _check_budgets(config)),
        ("flash", lambda: _check_flash(config)),
        ("kernels", _check_kernels),
        ("strategy name", _check_strategy_name),
    ]
    for name, check in checks:
        try:
            findings.extend(check())
        except Exception as error:  # a doctor that falls ill is of no use: whatever it is, it is a finding
            findings.append(Finding(name, "problem", f"could not be examined: {type(error).__name__}: {error}"))
    return findings


def _check_versions() -> Iterator[Finding]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "lightning_tieroffload": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    missing = [name for name, version in versions.items() if version is None and name != "transformers"]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    advice = f"pip install {' '.join(missing)}" if missing else ""
    yield Finding("versions", "problem" if missing else "ok", text, advice, dict(versions))


def _check_accelerator() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield Finding(
            "accelerator",
            "note",
            "none that torch can use; the DEVICE tier is a budgeted part of host memory"
            + (f" (torch is built for CUDA {built}: is a driver installed?)" if built else ""),
            details={"num_devices": 0},
        )
        return
    for index in range(torch.cuda.device_count()):
        free_nbytes, total_nbytes = torch.cuda.mem_get_info(index)
        yield Finding(
            f"accelerator {index}",
            "ok",
            f"{torch.cuda.get_device_name(index)}, {format_nbytes(free_nbytes)} of {format_nbytes(total_nbytes)} free",
            details={"free_nbytes": free_nbytes, "total_nbytes": total_nbytes},
        )
    from lightning_tieroffload.io.gds_mover import gds_obstacle

    obstacle = gds_obstacle()
    yield Finding(
        "GPUDirect Storage",
        "note" if obstacle else "ok",
        f"not there: {obstacle}; flash goes through host memory" if obstacle else "usable",
        details={"usable": obstacle is None, "obstacle": obstacle},
    )


def _check_host_memory() -> Iterator[Finding]:
    available_nbytes = host_available_nbytes()
    yield Finding(
        "host memory",
        "ok",
        f"{format_nbytes(available_nbytes)} available",
        details={"available_nbytes": available_nbytes},
    )
    for limit in cgroup_limits():
        yield Finding(
            "memory limit",
            "ok" if limit.free_nbytes >= available_nbytes else "note",
            f"{format_nbytes(limit.free_nbytes)} of {format_nbytes(limit.limit_nbytes)} free by {limit.source}",
            details=asdict(limit),
        )


def _check_locked_memory() -> Iterator[Finding]:
    soft_nbytes, hard_nbytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft_nbytes == resource.RLIM_INFINITY
    # Root, or whoever has CAP_IPC_LOCK, is not held to the limit.
    exempt = os.geteuid() == 0
    yield Finding(
        "locked memory",
        "ok" if unlimited or exempt else "note",
        "unlimited"
        if unlimited
        else f"{format_nbytes(soft_nbytes)} a process" + (" (root is exempt)" if exempt else ""),
        ""
        if unlimited or exempt
        else "copies from memory that is not page-locked are several times slower: raise it (ulimit -l unlimited, "
        "or LimitMEMLOCK=infinity for a service; --ulimit memlock=-1 for a container)",
        details={
            "soft_nbytes": None if unlimited else soft_nbytes,
            "hard_nbytes": None if hard_nbytes == resource.RLIM_INFINITY else hard_nbytes,
        },
    )


def _check_processors() -> Iterator[Finding]:
    mine, whole = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    yield Finding(
        "processors",
        "ok",
        f"{mine} of {whole} may be used" if mine != whole else f"{mine}",
        details={"num_usable": mine, "num_online": whole},
    )


def _check_budgets(config: TierOffloadConfig) -> Iterator[Finding]:
    device = "cpu"
    if importlib.util.find_spec("torch") is not None:
        import torch

        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    budgets = resolve_budgets(config, device)
    for tier in ("device", "dram", "nvme"):
        nbytes: int = getattr(budgets, f"{tier}_nbytes")
        yield Finding(
            f"{tier} budget",
            "ok" if nbytes or tier == "nvme" else "problem",
            f"{format_nbytes(nbytes)} ({budgets.sources[tier]})",
            "" if nbytes or tier == "nvme" else f"set {tier}_budget",
            details={"nbytes": nbytes, "source": budgets.sources[tier]},
        )


def _check_flash(config: TierOffloadConfig) -> Iterator[Finding]:
    if not config.nvme_paths:
        yield Finding("flash", "note", "no nvme_paths: there is no NVMe tier", "name a directory with --nvme-paths")
    for path in config.nvme_paths:
        yield probe_direct_io(path)


def _file_system_type(path: Path) -> str:
    # The longest mount point that the path is under; mountinfo is the only place that names overlay and FUSE kinds.
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount_point = left.split()[4].replace("\\040", " ")
        inside = path == Path(mount_point) or Path(mount_point) in path.parents
        if inside and len(mount_point) >= len(best[0]):
            best = (mount_point, right.split()[0])
    return best[1]


def probe_direct_io(directory: str) -> Finding:
    """Write one block to `directory` past the page cache, read it back, and delete it.

    The directory must exist: a doctor does not make folders.
    """
    name = f"flash {directory}"
    folder = Path(directory).resolve()
    if not folder.exists():
        return Finding(name, "note", "does not exist", f"a run makes it; mkdir -p {directory} to have it checked here")
    if not folder.is_dir():
        return Finding(name, "problem", "is not a directory", "name another path in nvme_paths")
    kind = _file_system_type(folder)
    stat = os.statvfs(folder)
    free_nbytes = stat.f_bavail * stat.f_frsize
    details: dict[str, Any] = {"file_system": kind, "free_nbytes": free_nbytes, "direct_io": False}
    text = f"{kind}, {format_nbytes(free_nbytes)} free"
    try:
        details["direct_io"] = _round_trip(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(name, "problem", f"{text}; cannot be written: {reason}", "name another path", details)
    if kind in _IN_MEMORY:
        return Finding(
            name, "problem", f"{text}; this is host memory, not flash", "name a directory on a real disk", details
        )
    text += ", O_DIRECT works" if details["direct_io"] else ", O_DIRECT is refused: reads and writes are buffered"
    if kind.split(".")[0] in _OVER_NETWORK:
        return Finding(name, "note", f"{text}; not a local disk", "expect the network's speed", details)
    return Finding(name, "ok" if details["direct_io"] else "note", text, "", details)


def _round_trip(folder: Path) -> bool:
    """Whether O_DIRECT works here. Raises `OSError` if not even a buffered file can be written."""
    with tempfile.TemporaryDirectory(prefix=".tieroffload-doctor-", dir=folder) as place, mmap.mmap(-1, 4096) as block:
        path = os.path.join(place, "block")
        wanted = os.urandom(_BLOCK_NBYTES)
        for flag in (getattr(os, "O_DIRECT", 0), 0):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flag, 0o600)
                try:
                    block[:] = wanted
                    num_written = os.pwritev(descriptor, [block], 0)
                    block[:] = bytes(_BLOCK_NBYTES)
                    num_read = os.preadv(descriptor, [block], 0)
                finally:
                    os.close(descriptor)
            except OSError as error:
                if flag and error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
                    continue
                raise
            if num_written != _BLOCK_NBYTES or num_read != _BLOCK_NBYTES or bytes(block) != wanted:
                raise OSError(errno.EIO, "what was written did not come back")
            return flag != 0
    return False


def _check_kernels() -> Iterator[Finding]:
    import numba

    import lightning_tieroffload.kernels as kernels

    threading_layer = str(getattr(numba.config, "THREADING_LAYER", "unknown"))
    folder = getattr(numba.config, "CACHE_DIR", "") or str(Path(kernels.__file__).parent / "__pycache__")
    beside = os.access(folder, os.W_OK) if os.path.isdir(folder) else os.access(Path(folder).parent, os.W_OK)
    if beside:
        yield Finding("kernels", "ok", f"Numba {numba.__version__} keeps compiled code in {folder}")
        return
    home = Path("~/.cache").expanduser()
    fallback = os.access(home if home.is_dir() else home.parent, os.W_OK)
    yield Finding(
        "kernels",
        "ok" if fallback else "note",
        f"Numba {numba.__version__} " + ("keeps compiled code in the user's cache" if fallback else "cannot keep code"),
        "" if fallback else "each process compiles anew (seconds): set NUMBA_CACHE_DIR to a writable directory",
        details={"threading_layer": threading_layer},
    )


def _switched_off_by() -> str | None:
    import _tieroffload_hooks  # absent where the package was never installed

    return _tieroffload_hooks.switched_off_by()


def _check_strategy_name() -> Iterator[Finding]:
    entry_points = importlib.metadata.entry_points(group="torch.backends")
    installed = any(entry.name == "lightning_tieroffload" for entry in entry_points)
    from lightning.pytorch.strategies import StrategyRegistry

    known = "tieroffload" in StrategyRegistry.available_strategies()
    # This process has imported the package, which a script need not do: there torch's autoloading alone counts.
    switch = _switched_off_by() if installed else None
    advice = "" if installed else "pip install the package (it is only on the path now), or use tieroffload launch"
    if switch:
        advice = f"remove {switch} from the environment, import it in the script, or use tieroffload launch"
    yield Finding(
        "strategy name",
        "ok" if installed and known and not switch else ("note" if known else "problem"),
        'Trainer(strategy="tieroffload") works'
        + ("" if installed and not switch else " after `import lightning_tieroffload`")
        if known
        else 'Trainer(strategy="tieroffload") does not know the name',
        advice,
        details={"entry_point": installed, "registered": known, "switched_off_by": switch},
    )


def doctor(
    ctx: typer.Context,
    json_: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is usable on this machine: versions, GPU, memory limits, locked memory, flash, kernels."""
    config, rest = take_settings(ctx.args)
    refuse_rest(rest)
    findings = examine(config)
    if json_:
        print_json([asdict(finding) for finding in findings])
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1))
    for _ in range(3):
        table.add_column(overflow="fold")  # a path that is cut off is of no use
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for finding in findings:
        text = finding.text + (f"\n→ {finding.advice}" if finding.advice else "")
        table.add_row(marks[finding.level], Text(finding.name), Text(text))
    Console().print(table)
