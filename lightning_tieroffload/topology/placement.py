"""Floor 3. Real hosts: on which NUMA nodes the page-locked memory of one GPU goes, and where its workers run.

Joins the allocator (which nodes have space, near ones first) with host.py (binding pages and threads). Whoever maps the
arena calls what ``arena_placer`` returns once, before the first touch; whoever starts update workers asks
``worker_cpus``. With one node, or a GPU whose node nobody knows, both do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from lightning_tieroffload.errors import CapacityError
from lightning_tieroffload.sizes import MiB
from lightning_tieroffload.topology.allocator import regions_by_node
from lightning_tieroffload.topology.host import Binding, Host, bind_region, read_host, thread_cpus, visible_gpus

__all__ = ["arena_placer", "split_region", "worker_cpus"]

# A node lends no more than this share of what is free on it now: the page cache and other processes live there too.
LEND_FRAC = 0.95
# Pieces start at multiples of a huge page, so that no huge page is torn by a border between nodes.
PIECE_NBYTES = 2 * MiB


def arena_placer(
    gpu_index: int, visible_devices: str | None, *, host: Host | None = None
) -> Callable[[int, int], list[Binding]]:
    """A function of (address, nbytes) that prefers the nodes nearest to this GPU for that mapping.

    ``gpu_index`` counts as the process does, ``visible_devices`` is its ``CUDA_VISIBLE_DEVICES`` (None: unset). The
    function returns what was bound, [] where there is nothing to choose.
    """
    machine = read_host() if host is None else host
    node = _node_of(machine, gpu_index, visible_devices)

    def place(address: int, nbytes: int) -> list[Binding]:
        pieces = split_region(machine, node, nbytes)
        return [bind_region(address + at, part, number, host=machine) for at, part, number in pieces]

    return place


def split_region(host: Host, node: int | None, nbytes: int) -> list[tuple[int, int, int]]:
    """[(offset_nbytes, nbytes, node number)] of a mapping for a consumer beside ``node``, nearest node first.

    [] if there is nothing to choose: one node, an unknown node, or more bytes than all nodes have free (the kernel then
    knows better what to reclaim).
    """
    rows = {each.number: row for row, each in enumerate(host.nodes)}
    if len(host.nodes) < 2 or node not in rows or nbytes <= 0:
        return []
    free = [int(each.free_nbytes * LEND_FRAC) // PIECE_NBYTES * PIECE_NBYTES for each in host.nodes]
    try:
        regions = regions_by_node([rows[node]], [nbytes], host.distances, free)
    except CapacityError:
        return []
    regions.sort(key=lambda region: (host.distances[rows[node]][region[1]], region[1]))
    pieces = []
    at = 0
    for _, row, part in regions:
        pieces.append((at, part, host.nodes[row].number))
        at += part
    return pieces


def worker_cpus(
    gpu_index: int, visible_devices: str | None, mask: Collection[int], *, asked: bool, host: Host | None = None
) -> frozenset[int] | None:
    """CPUs for update workers whose shards rest beside this GPU; None leaves them alone (``host.thread_cpus``)."""
    if not asked:
        return None
    machine = read_host() if host is None else host
    return thread_cpus(_node_of(machine, gpu_index, visible_devices), mask, asked=asked, host=machine)


def _node_of(host: Host, gpu_index: int, visible_devices: str | None) -> int | None:
    gpus = visible_gpus(host, visible_devices)
    return gpus[gpu_index].node if 0 <= gpu_index < len(gpus) else None
