"""Floor 2. The live host: NUMA nodes, and where GPUs and disks sit; placing pages and threads beside them.

Reads sysfs below a given root, so that tests hand in a tree of their own. Reads no environment: which GPUs are visible
is an argument. On a host with one node, or where sysfs says nothing, every placing function does nothing.

[Note: no surprise] Memory is *preferred* on a node, never confined to it: a full node then costs speed and not the
process. Threads are bound only if asked, and never outside the mask that the user (taskset, a batch system) set.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lightning_tieroffload.errors import ConfigError

__all__ = [
    "Binding",
    "Disk",
    "Gpu",
    "Host",
    "Node",
    "bind_region",
    "bind_this_thread",
    "disk_node",
    "gpu_node",
    "node_of_visible_gpu",
    "nodes",
    "pages_by_node",
    "read_host",
    "thread_cpus",
    "visible_gpus",
]

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
# PCI vendors whose display or accelerator functions count as GPUs; server boards have a plain VGA chip besides.
_GPU_VENDORS = {"0x10de", "0x1002"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
# glibc has no wrapper for these: numbers by machine (mbind, move_pages).
_SYSCALLS = {"x86_64": (237, 279), "aarch64": (235, 239), "ppc64le": (259, 301), "riscv64": (235, 239)}
_MPOL_PREFERRED = 1
_MPOL_MF_MOVE = 2


@dataclass(frozen=True, slots=True)
class Node:
    """One NUMA node. ``cpus`` is empty for a node of memory only; ``socket`` is None where sysfs does not say."""

    number: int
    cpus: tuple[int, ...]
    total_nbytes: int
    free_nbytes: int
    socket: int | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU by PCI address ("0000:65:00.0"), and the number of the node that it hangs on (None: not known)."""

    pci_address: str
    node: int | None
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """One block device by kernel name ("nvme0n1"), and the number of its node (None: not known)."""

    name: str
    node: int | None


@dataclass(frozen=True, slots=True)
class Host:
    """What sysfs says. ``distances[i][j]`` is between ``nodes[i]`` and ``nodes[j]``, 10 meaning local.

    ``nodes`` are those that this process may allocate on; ``gpus`` are in PCI order.
    """

    nodes: tuple[Node, ...]
    distances: tuple[tuple[int, ...], ...]
    gpus: tuple[Gpu, ...]
    disks: tuple[Disk, ...]

    def node(self, number: int) -> Node:
        """Node by its number; ``ConfigError`` lists those that exist."""
        for node in self.nodes:
            if node.number == number:
                return node
        known = ", ".join(str(node.number) for node in self.nodes)
        raise ConfigError(f"this host has no NUMA node {number} that may be used. Nodes: {known}.")


@dataclass(frozen=True, slots=True)
class Binding:
    """What ``bind_region`` did. "none" leaves placement to the kernel; ``reason`` says why it was not "mbind"."""

    node: int
    nbytes: int
    method: Literal["none", "mbind", "first-touch"]
    reason: str = ""


# Reading


def read_host(root: str | Path = "/") -> Host:
    """Everything below ``root``/sys (and ``root``/proc) about nodes, GPUs and disks. Missing files mean not known."""
    base = Path(root)
    found = nodes(base)
    known = {node.number for node in found}
    only = found[0].number if len(found) == 1 else None
    return Host(
        nodes=found,
        distances=_distances(base, [node.number for node in found]),
        gpus=_gpus(base, known, only),
        disks=_disks(base, known, only),
    )


def nodes(root: str | Path = "/") -> tuple[Node, ...]:
    """The NUMA nodes that this process may allocate on, by number. At least one: a host without NUMA is node 0."""
    base = Path(root)
    allowed = _allowed_nodes(base)
    found = []
    for folder in (base / "sys/devices/system/node").glob("node[0-9]*"):
        number = int(folder.name[4:])
        if allowed is not None and number not in allowed:
            continue
        cpus = tuple(_numbers(_text(folder / "cpulist")))
        total_nbytes, free_nbytes = _meminfo(_text(folder / "meminfo"))
        found.append(Node(number, cpus, total_nbytes, free_nbytes, _socket(base, cpus)))
    if not found:
        cpus = tuple(_numbers(_text(base / "sys/devices/system/cpu/online"))) or tuple(range(os.cpu_count() or 1))
        total_nbytes, free_nbytes = _meminfo(_text(base / "proc/meminfo"))
        found.append(Node(0, cpus, total_nbytes, free_nbytes, _socket(base, cpus)))
    return tuple(sorted(found, key=lambda node: node.number))


def gpu_node(pci_address: str, root: str | Path = "/") -> int | None:
    """Number of the node that the GPU at ``pci_address`` hangs on; None if sysfs does not say.

    Takes the forms of the kernel ("0000:65:00.0") and of NVIDIA's tools ("00000000:65:00.0"), in either case.
    """
    base = Path(root)
    found = nodes(base)
    only = found[0].number if len(found) == 1 else None
    folder = base / "sys/bus/pci/devices" / _pci_address(pci_address)
    return _numa_node(folder, {node.number for node in found}, only)


def disk_node(path: str | Path, root: str | Path = "/", *, device: tuple[int, int] | None = None) -> int | None:
    """Number of the node of the disk that holds ``path``; None if unknown (network and memory file systems, tmpfs).

    A volume over several disks has a node only if they all share it. ``device`` (major, minor) is asked of the file
    system when not given; the nearest existing parent counts if ``path`` does not exist yet.
    """
    base = Path(root)
    found = nodes(base)
    known = {node.number for node in found}
    only = found[0].number if len(found) == 1 else None
    if device is None:
        place = Path(path).absolute()
        while not place.exists():
            place = place.parent
        number = place.stat().st_dev
        device = (os.major(number), os.minor(number))
    entry = base / "sys/dev/block" / f"{device[0]}:{device[1]}"
    if not entry.exists():
        return None
    return _block_node(entry.resolve(), base, known, only)


def visible_gpus(host: Host, visible_devices: str | None) -> list[Gpu]:
    """The host's GPUs as a process with this ``CUDA_VISIBLE_DEVICES`` numbers them; None means all.

    As in CUDA, an entry is an index or the start of a UUID, and the first one that does not exist ends the list. A MIG
    slice cannot be looked up in sysfs: its place is taken by a GPU of unknown node. Index order is PCI order, which is
    also CUDA's order where all GPUs are of one kind (or CUDA_DEVICE_ORDER=PCI_BUS_ID).
    """
    if visible_devices is None:
        return list(host.gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible_devices.split(",")):
        if entry.isdigit() and int(entry) < len(host.gpus):
            chosen.append(host.gpus[int(entry)])
        elif entry.upper().startswith("GPU-"):
            matches = [gpu for gpu in host.gpus if (gpu.uuid or "").lower().startswith(entry.lower())]
            if len(matches) != 1:
                # Without the driver's list of UUIDs the GPU exists, but nobody can say which one it is.
                if any(gpu.uuid for gpu in host.gpus):
                    break
                matches = [Gpu("", None, entry)]
            chosen.append(matches[0])
        elif entry.upper().startswith("MIG-"):
            chosen.append(Gpu("", None, entry))
        else:
            break
    return chosen


def node_of_visible_gpu(index: int, visible_devices: str | None, root: str | Path = "/") -> int | None:
    """Node of what this process calls GPU ``index``; None if there is no such GPU or its node is not known."""
    chosen = visible_gpus(read_host(root), visible_devices)
    return chosen[index].node if 0 <= index < len(chosen) else None


# Placing


def bind_region(address: int, nbytes: int, node: int, *, host: Host | None = None) -> Binding:
    """Prefer node number ``node`` for the whole pages inside [address, address + nbytes); pages there already move.

    Call it on a fresh mapping, before anybody else uses it. First choice is the kernel's mbind; where that is refused
    (containers often do), threads bound to the node's CPUs touch every page first, which places pages that nobody has
    touched and keeps what is in the others. On a host with one node nothing happens. The memory stays the caller's.
    Raises ``ConfigError`` for a node that does not exist.
    """
    machine = host or read_host()
    if len(machine.nodes) < 2:
        return Binding(node, nbytes, "none", "one node")
    target = machine.node(node)
    start = -(-address // PAGE_NBYTES) * PAGE_NBYTES
    end = (address + nbytes) // PAGE_NBYTES * PAGE_NBYTES
    if end <= start:
        return Binding(node, 0, "none", "less than a page")
    reason = _mbind(start, end - start, node)
    if not reason:
        return Binding(node, end - start, "mbind")
    cpus = sorted(set(target.cpus) & os.sched_getaffinity(0))
    if not cpus:
        return Binding(node, end - start, "none", f"{reason}; no CPU of node {node} is in this process's mask")
    _touch(start, end - start, cpus)
    return Binding(node, end - start, "first-touch", reason)


def thread_cpus(node: int | None, mask: Collection[int], *, asked: bool, host: Host) -> frozenset[int] | None:
    """CPUs that a worker beside ``node`` should run on, or None to leave it alone. See [Note: no surprise].

    ``mask`` is the process's affinity (``os.sched_getaffinity(0)``); the answer is always within it.
    """
    if not asked or node is None or len(host.nodes) < 2:
        return None
    inside = frozenset(host.node(node).cpus) & frozenset(mask)
    return inside if inside and inside != frozenset(mask) else None


def bind_this_thread(node: int | None, *, asked: bool, host: Host | None = None) -> frozenset[int] | None:
    """Keep the calling thread (no other) on ``node``'s CPUs; returns them, or None if nothing was done."""
    if not asked:
        return None
    cpus = thread_cpus(node, os.sched_getaffinity(0), asked=asked, host=host or read_host())
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    return cpus


def pages_by_node(address: int, nbytes: int, *, most: int = 4096) -> dict[int, int]:
    """How many of up to ``most`` evenly spread pages lie on each node; untouched pages count for none.

    Empty where the kernel does not tell.
    """
    numbers = _SYSCALLS.get(platform.machine())
    start = -(-address // PAGE_NBYTES) * PAGE_NBYTES
    num_pages = (address + nbytes - start) // PAGE_NBYTES
    if numbers is None or num_pages < 1:
        return {}
    picked = np.unique(np.linspace(0, num_pages - 1, min(num_pages, most)).astype(np.uint64))
    pages = (picked * np.uint64(PAGE_NBYTES) + np.uint64(start)).astype(np.uint64)
    found = np.full(pages.size, -1, np.int32)
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(numbers[1]),
        ctypes.c_long(0),
        ctypes.c_ulong(pages.size),
        ctypes.c_void_p(pages.ctypes.data),
        None,
        ctypes.c_void_p(found.ctypes.data),
        ctypes.c_long(0),
    )
    if result != 0:
        return {}
    return dict(sorted(Counter(int(number) for number in found if number >= 0).items()))


def _mbind(start: int, nbytes: int, node: int) -> str:
    """Empty if done, else why not."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        return f"the number of mbind on {platform.machine()} is not known"
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    words = (ctypes.c_ulong * (node // bits + 1))()
    words[node // bits] = 1 << (node % bits)
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    # The kernel reads one bit less than it is told, hence the + 1.
    result = libc.syscall(
        ctypes.c_long(numbers[0]),
        ctypes.c_void_p(start),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(len(words) * bits + 1),
        ctypes.c_uint(_MPOL_MF_MOVE),
    )
    return "" if result == 0 else f"mbind: {os.strerror(ctypes.get_errno())}"


def _touch(start: int, nbytes: int, cpus: Sequence[int]) -> None:
    """Write every page once from threads on ``cpus``, keeping its contents."""
    region = (ctypes.c_uint8 * nbytes).from_address(start)
    first_bytes = np.ctypeslib.as_array(region)[::PAGE_NBYTES]
    failures: list[BaseException] = []

    def work(pages: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        try:
            os.sched_setaffinity(0, cpus)
            np.add(pages, 0, out=pages)  # a read alone would map the shared zero page and place nothing
        except BaseException as error:
            failures.append(error)

    parts = np.array_split(first_bytes, min(len(cpus), 16))
    threads = [threading.Thread(target=work, args=(part,), name="tieroffload-touch") for part in parts if part.size]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# Parsing


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _numbers(text: str) -> list[int]:
    """[0, 1, 2, 8] from the kernel's "0-2,8"."""
    out: list[int] = []
    for part in text.replace(" ", "").split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            out += range(int(low), int(high or low) + 1)
    return out


def _allowed_nodes(base: Path) -> set[int] | None:
    for line in _text(base / "proc/self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return set(_numbers(line.partition(":")[2].strip())) or None
    return None


def _meminfo(text: str) -> tuple[int, int]:
    kib = {"MemTotal": 0, "MemFree": 0}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        for key in kib:
            if key in words:
                kib[key] = int(words[words.index(key) + 1])
    return kib["MemTotal"] * 1024, kib["MemFree"] * 1024


def _socket(base: Path, cpus: Sequence[int]) -> int | None:
    if not cpus:
        return None
    text = _text(base / f"sys/devices/system/cpu/cpu{cpus[0]}/topology/physical_package_id")
    return int(text) if text.isdigit() else None


def _distances(base: Path, numbers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    folder = base / "sys/devices/system/node"
    online = _numbers(_text(folder / "online")) or list(numbers)
    rows = []
    for number in numbers:
        row = [int(word) for word in _text(folder / f"node{number}/distance").split() if word.isdigit()]
        at = dict(zip(online, row, strict=False))  # the kernel's row has one entry per online node
        rows.append(tuple(at.get(other, 10 if other == number else 20) for other in numbers))
    return tuple(rows)


def _pci_address(text: str) -> str:
    parts = text.strip().lower().split(":")
    if len(parts) == 2:
        parts.insert(0, "0000")
    parts[0] = parts[0][-4:].rjust(4, "0")
    return ":".join(parts)


def _numa_node(folder: Path, known: set[int], only: int | None) -> int | None:
    if only is not None:
        return only
    text = _text(folder / "numa_node")
    return int(text) if text.isdigit() and int(text) in known else None


def _gpus(base: Path, known: set[int], only: int | None) -> tuple[Gpu, ...]:
    uuids = {}
    for folder in (base / "proc/driver/nvidia/gpus").glob("*"):
        for line in _text(folder / "information").splitlines():
            if line.startswith("GPU UUID:"):
                uuids[_pci_address(folder.name)] = line.partition(":")[2].strip()
    found = []
    for folder in (base / "sys/bus/pci/devices").glob("*"):
        if _text(folder / "vendor") in _GPU_VENDORS and _text(folder / "class").startswith(_GPU_CLASSES):
            found.append(Gpu(folder.name, _numa_node(folder, known, only), uuids.get(folder.name)))
    return tuple(
        sorted(found, key=lambda gpu: [int(part, 16) for part in gpu.pci_address.replace(".", ":").split(":")])
    )


def _disks(base: Path, known: set[int], only: int | None) -> tuple[Disk, ...]:
    found = []
    for folder in (base / "sys/block").glob("*"):
        if folder.name.startswith(("loop", "ram", "zram", "sr", "fd")):
            continue
        found.append(Disk(folder.name, _block_node(folder.resolve(), base, known, only)))
    return tuple(sorted(found, key=lambda disk: disk.name))


def _block_node(folder: Path, base: Path, known: set[int], only: int | None) -> int | None:
    """Walk up from a block device (or partition) to the first folder that states a node."""
    parts = list((folder / "slaves").glob("*")) if (folder / "slaves").is_dir() else []
    if parts:
        below = {_block_node(part.resolve(), base, known, only) for part in parts}
        return below.pop() if len(below) == 1 else None
    top = (base / "sys").resolve()
    place = folder
    while place != top and top in place.parents:
        # Virtual devices (md, dm, nbd) sit below devices/virtual and have no place of their own.
        if (place / "numa_node").exists():
            return _numa_node(place, known, only)
        place = place.parent
    return None
