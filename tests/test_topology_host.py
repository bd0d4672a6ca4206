"""The live host from sysfs trees of our own: sockets, sub-NUMA, no GPU, masks; and real pages on this machine."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.topology import host as host_module
from lightning_tieroffload.topology import placement
from lightning_tieroffload.topology.allocator import regions_by_node
from lightning_tieroffload.topology.host import (
    Gpu,
    Host,
    Node,
    bind_region,
    bind_this_thread,
    disk_node,
    gpu_node,
    node_of_visible_gpu,
    nodes,
    pages_by_node,
    read_host,
    thread_cpus,
    visible_gpus,
)

GIB = 2**30


def write(root, path, text):
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text + "\n")


def make_tree(root, *, cpus, distances, gpus=(), disks=(), sockets=None, numbers=None, allowed=None, uuids=False):
    """A sysfs (and proc) tree. ``gpus``: (pci address, node); ``disks``: (name, node); nodes are 64 GiB, half free."""
    numbers = list(range(len(cpus))) if numbers is None else numbers
    base = "sys/devices/system/node"
    write(root, f"{base}/online", ",".join(map(str, numbers)))
    for row, (number, list_of_cpus) in enumerate(zip(numbers, cpus, strict=True)):
        write(root, f"{base}/node{number}/cpulist", list_of_cpus)
        write(root, f"{base}/node{number}/distance", " ".join(map(str, distances[row])))
        meminfo = f"Node {number} MemTotal:  {64 * 2**20} kB\nNode {number} MemFree:  {32 * 2**20} kB"
        write(root, f"{base}/node{number}/meminfo", meminfo)
        first = list_of_cpus.split("-")[0].split(",")[0]
        if first:
            socket = sockets[row] if sockets else row
            write(root, f"sys/devices/system/cpu/cpu{first}/topology/physical_package_id", str(socket))
    for index, (address, node) in enumerate(gpus):
        folder = f"sys/devices/pci0000:{index:02x}/{address}"
        write(root, f"{folder}/vendor", "0x10de")
        write(root, f"{folder}/class", "0x030200")
        write(root, f"{folder}/numa_node", str(node))
        link(root, f"sys/bus/pci/devices/{address}", folder)
        if uuids:
            write(
                root,
                f"proc/driver/nvidia/gpus/{address}/information",
                f"Model: X\nGPU UUID:\t GPU-{index}abc-1234\nIRQ: 5",
            )
    # A board's own VGA chip and a network card are no GPUs.
    for address, vendor, kind in (("0000:03:00.0", "0x1a03", "0x030000"), ("0000:04:00.0", "0x10de", "0x020700")):
        write(root, f"sys/devices/pci0000:ff/{address}/vendor", vendor)
        write(root, f"sys/devices/pci0000:ff/{address}/class", kind)
        write(root, f"sys/devices/pci0000:ff/{address}/numa_node", "0")
        link(root, f"sys/bus/pci/devices/{address}", f"sys/devices/pci0000:ff/{address}")
    for index, (name, node) in enumerate(disks):
        pci = f"sys/devices/pci0000:e{index}/0000:e{index}:00.0"
        write(root, f"{pci}/numa_node", str(node))
        block = f"{pci}/nvme/nvme{index}/{name}"
        write(root, f"{block}/dev", f"259:{10 * index}")
        write(root, f"{block}/{name}p1/dev", f"259:{10 * index + 1}")
        link(root, f"sys/block/{name}", block)
        link(root, f"sys/dev/block/259:{10 * index}", block)
        link(root, f"sys/dev/block/259:{10 * index + 1}", f"{block}/{name}p1")
    if allowed is not None:
        write(root, "proc/self/status", f"Name:\tx\nMems_allowed_list:\t{allowed}")
    return root


def link(root, path, target):
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(root / target)


TWO = {"cpus": ["0-15,32-47", "16-31,48-63"], "distances": [[10, 21], [21, 10]]}
FOUR = {
    "cpus": ["0-7", "8-15", "16-23", "24-31"],
    "distances": [[10, 21, 31, 21], [21, 10, 21, 31], [31, 21, 10, 21], [21, 31, 21, 10]],
}
EIGHT_GPUS = [
    (f"0000:{bus:02x}:00.0", node) for bus, node in zip(range(0x10, 0x90, 0x10), [0] * 4 + [1] * 4, strict=True)
]


def test_two_sockets(tmp_path):
    host = read_host(make_tree(tmp_path, **TWO, gpus=EIGHT_GPUS, disks=[("nvme0n1", 0), ("nvme1n1", 1)]))
    assert [node.number for node in host.nodes] == [0, 1]
    assert host.nodes[1].cpus == (*range(16, 32), *range(48, 64))
    assert host.nodes[0].total_nbytes == 64 * GIB
    assert host.nodes[0].free_nbytes == 32 * GIB
    assert [node.socket for node in host.nodes] == [0, 1]
    assert host.distances == ((10, 21), (21, 10))
    assert [gpu.node for gpu in host.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [(disk.name, disk.node) for disk in host.disks] == [("nvme0n1", 0), ("nvme1n1", 1)]
    assert nodes(tmp_path) == host.nodes
    assert gpu_node("0000:50:00.0", tmp_path) == 1
    assert gpu_node("00000000:80:00.0", tmp_path) == 1  # NVIDIA's form
    assert gpu_node("10:00.0", tmp_path) == 0
    assert gpu_node("0000:99:00.0", tmp_path) is None


def test_four_sockets(tmp_path):
    host = read_host(make_tree(tmp_path, **FOUR, gpus=[("0000:41:00.0", 2), ("0000:01:00.0", 3)]))
    assert len(host.nodes) == 4
    assert host.distances[0] == (10, 21, 31, 21)
    # In PCI order, whatever order the folders come in.
    assert [gpu.pci_address for gpu in host.gpus] == ["0000:01:00.0", "0000:41:00.0"]
    # What does not fit beside its GPU goes one hop away, not two.
    regions = regions_by_node([2], [40 * GIB], host.distances, [node.free_nbytes for node in host.nodes])
    assert regions == [(0, 1, 8 * GIB), (0, 2, 32 * GIB)]


def test_sub_numa_clusters(tmp_path):
    """Two sockets of two clusters each: the sibling cluster is nearer than the other socket."""
    tree = make_tree(
        tmp_path,
        cpus=["0-7", "8-15", "16-23", "24-31"],
        distances=[[10, 12, 21, 21], [12, 10, 21, 21], [21, 21, 10, 12], [21, 21, 12, 10]],
        sockets=[0, 0, 1, 1],
        gpus=[("0000:21:00.0", 1), ("0000:a1:00.0", 3)],
    )
    host = read_host(tree)
    assert [node.socket for node in host.nodes] == [0, 0, 1, 1]
    free = [node.free_nbytes for node in host.nodes]
    rows = {node.number: row for row, node in enumerate(host.nodes)}
    gpus = [rows[gpu.node] for gpu in host.gpus]
    regions = regions_by_node(gpus, [50 * GIB, 10 * GIB], host.distances, free)
    assert regions == [(0, 0, 18 * GIB), (0, 1, 32 * GIB), (1, 3, 10 * GIB)]


def test_no_gpu(tmp_path):
    host = read_host(make_tree(tmp_path, **TWO))
    assert host.gpus == ()
    assert visible_gpus(host, None) == []
    assert node_of_visible_gpu(0, None, tmp_path) is None


def test_memory_only_and_forbidden_nodes(tmp_path):
    """Node 2 has memory and no CPU (CXL); node 1 is outside the cpuset. Numbers need not be dense."""
    tree = make_tree(
        tmp_path,
        cpus=["0-3", "4-7", ""],
        numbers=[0, 1, 4],
        distances=[[10, 21, 17], [21, 10, 28], [17, 28, 10]],
        gpus=[("0000:10:00.0", 1)],
        allowed="0,4",
    )
    host = read_host(tree)
    assert [(node.number, node.cpus) for node in host.nodes] == [(0, (0, 1, 2, 3)), (4, ())]
    assert host.distances == ((10, 17), (17, 10))
    assert host.gpus[0].node is None  # its node may not be used
    assert thread_cpus(4, range(8), asked=True, host=host) is None
    with pytest.raises(ConfigError, match=r"no NUMA node 1 that may be used\. Nodes: 0, 4"):
        host.node(1)


def test_nothing_known(tmp_path):
    """A root without sysfs is one node with this machine's CPUs."""
    host = read_host(tmp_path)
    assert [node.number for node in host.nodes] == [0]
    assert host.nodes[0].cpus == tuple(range(os.cpu_count() or 1))
    assert host.distances == ((10,),)
    assert (host.gpus, host.disks) == ((), ())


def test_disks(tmp_path):
    tree = make_tree(tmp_path, **TWO, disks=[("nvme0n1", 0), ("nvme1n1", 1), ("nvme2n1", 1)])
    assert disk_node("/", tree, device=(259, 10)) == 1
    assert disk_node("/", tree, device=(259, 1)) == 0  # a partition
    assert disk_node("/", tree, device=(0, 42)) is None  # tmpfs, nfs: no block device
    for name, parts in (("md0", ["nvme1n1", "nvme2n1"]), ("md1", ["nvme0n1", "nvme1n1"])):
        folder = f"sys/devices/virtual/block/{name}"
        for part in parts:
            link(tree, f"{folder}/slaves/{part}", f"sys/block/{part}")
        number = name[-1]
        link(tree, f"sys/dev/block/9:{number}", folder)
        link(tree, f"sys/block/{name}", folder)
    assert disk_node("/", tree, device=(9, 0)) == 1
    assert disk_node("/", tree, device=(9, 1)) is None  # striped over both sockets
    # The file system is asked for the device when none is given; a path that is not there yet counts as its parent.
    device = os.stat(tmp_path).st_dev
    link(tree, f"sys/dev/block/{os.major(device)}:{os.minor(device)}", "sys/block/nvme2n1")
    assert disk_node(tmp_path / "not" / "there", tree) == 1


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("3", [3]),
        ("6,1", [6, 1]),
        (" 2 , 4 ", [2, 4]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,9,2", [1]),  # as in CUDA: the list ends at the first one that does not exist
        ("GPU-5abc", [5]),
        ("GPU-7abc-1234,GPU-0", [7, 0]),
        ("GPU-zzz,1", []),
    ],
)
def test_visible_devices(tmp_path, visible, expected):
    host = read_host(make_tree(tmp_path, **TWO, gpus=EIGHT_GPUS, uuids=True))
    assert visible_gpus(host, visible) == [host.gpus[index] for index in expected]


def test_gpu_three_only(tmp_path):
    """With CUDA_VISIBLE_DEVICES=3, what the process calls GPU 0 is the fourth: its node, not the first one's."""
    gpus = [(f"0000:{bus:02x}:00.0", node) for bus, node in ((0x10, 0), (0x20, 0), (0x30, 0), (0x40, 1))]
    make_tree(tmp_path, **TWO, gpus=gpus)
    assert node_of_visible_gpu(0, None, tmp_path) == 0
    assert node_of_visible_gpu(0, "3", tmp_path) == 1
    assert node_of_visible_gpu(1, "3", tmp_path) is None


def test_what_sysfs_cannot_tell_is_unknown(tmp_path):
    host = read_host(make_tree(tmp_path, **TWO, gpus=EIGHT_GPUS))
    assert visible_gpus(host, "MIG-1234,1") == [Gpu("", None, "MIG-1234"), host.gpus[1]]
    assert visible_gpus(host, "GPU-abc") == [Gpu("", None, "GPU-abc")]  # no list of UUIDs to look it up in


def test_threads_stay_within_the_users_mask(tmp_path):
    host = read_host(make_tree(tmp_path, **TWO))
    everything = range(64)
    assert thread_cpus(1, everything, asked=True, host=host) == {*range(16, 32), *range(48, 64)}
    assert thread_cpus(1, everything, asked=False, host=host) is None
    assert thread_cpus(None, everything, asked=True, host=host) is None
    # taskset -c 1: nothing of node 1 is allowed, so nothing is done; of node 0 only CPU 1, which it has anyway.
    assert thread_cpus(1, {1}, asked=True, host=host) is None
    assert thread_cpus(0, {1}, asked=True, host=host) is None
    assert thread_cpus(0, {1, 20}, asked=True, host=host) == {1}


def in_thread(work):
    """What ``work`` returns in a thread of its own, so that this one's affinity is left alone."""
    out = []
    thread = threading.Thread(target=lambda: out.append(work()))
    thread.start()
    thread.join()
    return out[0]


def live_two_nodes():
    """A host of two nodes whose CPUs exist here: the mask's first CPU on node 0, the rest on node 1."""
    mask = sorted(os.sched_getaffinity(0))
    memory = {"total_nbytes": GIB, "free_nbytes": GIB}
    return mask, Host(
        (Node(0, tuple(mask[:1]), **memory), Node(1, tuple(mask[1:]), **memory)), ((10, 21), (21, 10)), (), ()
    )


def test_binding_a_real_thread():
    mask, host = live_two_nodes()
    if len(mask) < 2:
        pytest.skip("needs two CPUs")

    def bind(asked):
        cpus = bind_this_thread(0, asked=asked, host=host)
        return cpus, os.sched_getaffinity(0)

    assert in_thread(lambda: bind(True)) == ({mask[0]}, {mask[0]})
    assert in_thread(lambda: bind(False)) == (None, set(mask))
    # A thread that the user has put on node 1 alone stays there.
    assert in_thread(lambda: (os.sched_setaffinity(0, mask[1:]), bind(True))[1]) == (None, set(mask[1:]))
    assert os.sched_getaffinity(0) == set(mask)


class Region:
    """Anonymous pages at a known address."""

    def __init__(self, num_pages):
        self.nbytes = num_pages * host_module.PAGE_NBYTES
        self.map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


def test_one_node_is_left_alone(monkeypatch):
    monkeypatch.setattr(host_module, "_mbind", lambda *_: pytest.fail("mbind on a host with one node"))
    single = Host((Node(0, (0,), GIB, GIB),), ((10,),), (), ())
    region = Region(4)
    for node in (0, 7):
        assert bind_region(region.address, region.nbytes, node, host=single).method == "none"
    assert in_thread(lambda: bind_this_thread(0, asked=True, host=single)) is None


def test_real_mbind_places_pages():
    """The kernel's node 0 exists everywhere that has NUMA at all."""
    _, host = live_two_nodes()
    region = Region(64)
    region.map[0:5] = b"hello"
    before = host_module._mbind(region.address, region.nbytes, 0)
    if before:
        pytest.skip(f"mbind is refused here: {before}")
    bound = bind_region(region.address + 100, region.nbytes - 100, 0, host=host)
    assert (bound.method, bound.node) == ("mbind", 0)
    assert bound.nbytes == region.nbytes - host_module.PAGE_NBYTES  # whole pages only
    region.map[:] = b"x" * region.nbytes
    assert pages_by_node(region.address, region.nbytes) == {0: 64}


def test_first_touch_when_mbind_is_refused(monkeypatch):
    mask, host = live_two_nodes()
    monkeypatch.setattr(host_module, "_mbind", lambda *_: "mbind: Operation not permitted")
    region = Region(512)
    region.map[0:5] = b"hello"
    untouched = pages_by_node(region.address, region.nbytes)
    bound = bind_region(region.address, region.nbytes, 0, host=host)
    assert (bound.method, bound.reason) == ("first-touch", "mbind: Operation not permitted")
    assert region.map[0:5] == b"hello"
    if untouched:  # else the kernel does not tell
        assert sum(untouched.values()) < 512
        assert sum(pages_by_node(region.address, region.nbytes).values()) == 512
    assert os.sched_getaffinity(0) == set(mask)


def test_first_touch_stays_within_the_mask(monkeypatch):
    monkeypatch.setattr(host_module, "_mbind", lambda *_: "mbind: Function not implemented")
    mask = sorted(os.sched_getaffinity(0))
    elsewhere = Host(
        (Node(0, tuple(mask), GIB, GIB), Node(1, (max(mask) + 1,), GIB, GIB)), ((10, 21), (21, 10)), (), ()
    )
    region = Region(16)
    monkeypatch.setattr(host_module, "_touch", lambda *_: pytest.fail("touched from outside the mask"))
    bound = bind_region(region.address, region.nbytes, 1, host=elsewhere)
    assert bound.method == "none"
    assert "no CPU of node 1 is in this process's mask" in bound.reason


def test_a_failure_while_touching_is_raised(monkeypatch):
    _, host = live_two_nodes()
    monkeypatch.setattr(host_module, "_mbind", lambda *_: "refused")
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: (_ for _ in ()).throw(OSError(22, "Invalid argument")))
    region = Region(4)
    with pytest.raises(OSError, match="Invalid argument"):
        bind_region(region.address, region.nbytes, 0, host=host)


def test_less_than_a_page_and_unknown_node():
    _, host = live_two_nodes()
    region = Region(1)
    assert bind_region(region.address + 1, 100, 0, host=host).reason == "less than a page"
    with pytest.raises(ConfigError, match="no NUMA node 9"):
        bind_region(region.address, region.nbytes, 9, host=host)


# Placement of an arena and its workers


def test_an_arena_goes_beside_its_gpu(tmp_path):
    host = read_host(make_tree(tmp_path, **FOUR, gpus=[("0000:41:00.0", 2), ("0000:61:00.0", 3)]))
    lent = int(32 * GIB * placement.LEND_FRAC) // placement.PIECE_NBYTES * placement.PIECE_NBYTES
    assert placement.split_region(host, 2, 8 * GIB) == [(0, 8 * GIB, 2)]
    # Three nodes' worth and a bit: own node, the two that are one hop away, then the far one.
    pieces = placement.split_region(host, 2, 3 * lent + 5)
    assert pieces == [(0, lent, 2), (lent, lent, 1), (2 * lent, lent, 3), (3 * lent, 5, 0)]
    assert placement.split_region(host, 2, 200 * GIB) == []  # more than is free anywhere
    assert placement.split_region(host, None, GIB) == []
    assert placement.split_region(read_host(tmp_path / "empty"), 0, GIB) == []


def test_arena_placer_binds_every_piece(tmp_path, monkeypatch):
    host = read_host(make_tree(tmp_path, **TWO, gpus=[("0000:41:00.0", 0), ("0000:61:00.0", 1)]))
    calls = []
    monkeypatch.setattr(placement, "bind_region", lambda *call, host: calls.append(call))
    lent = int(32 * GIB * placement.LEND_FRAC) // placement.PIECE_NBYTES * placement.PIECE_NBYTES
    placement.arena_placer(0, "1", host=host)(4096, lent + 100)  # the process's GPU 0 is the second one
    assert calls == [(4096, lent, 1), (4096 + lent, 100, 0)]
    calls.clear()
    assert placement.arena_placer(5, None, host=host)(4096, GIB) == []
    assert placement.arena_placer(0, "", host=host)(4096, GIB) == []
    assert calls == []


def test_a_real_arena():
    """On the machine of this test: nodes of our own making over real pages."""
    _, host = live_two_nodes()
    host = Host(host.nodes, host.distances, (Gpu("0000:01:00.0", 0),), ())
    region = Region(32)
    bound = placement.arena_placer(0, None, host=host)(region.address, region.nbytes)
    assert [(binding.node, binding.nbytes) for binding in bound] == [(0, region.nbytes)]
    assert bound[0].method in ("mbind", "first-touch")
    region.map[:] = b"x" * region.nbytes


def test_workers_run_beside_their_gpu_only_if_asked(tmp_path):
    host = read_host(make_tree(tmp_path, **TWO, gpus=[("0000:41:00.0", 0), ("0000:61:00.0", 1)]))
    mask = range(64)
    assert placement.worker_cpus(0, "1", mask, asked=True, host=host) == {*range(16, 32), *range(48, 64)}
    assert placement.worker_cpus(0, "1", {1, 17}, asked=True, host=host) == {17}
    assert placement.worker_cpus(0, "1", {1}, asked=True, host=host) is None
    assert placement.worker_cpus(0, "1", mask, asked=False, host=host) is None
    assert placement.worker_cpus(9, None, mask, asked=True, host=host) is None


def test_this_machine():
    host = read_host()
    assert host.nodes
    assert all(node.total_nbytes > 0 for node in host.nodes if node.cpus)
    assert all(row[i] == 10 for i, row in enumerate(host.distances))
