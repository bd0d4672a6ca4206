"""Floor 1. The nouns of location: sites with coordinates, links between them, and the mesh that they form.

A site is anything that computes or holds memory: a die of a wafer, a host of a cluster, a NUMA node, a GPU, a disk. All
frozen. Reading a mesh from a file, a cluster description or a live host is mesh_sources.py's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse.csgraph import dijkstra

from lightning_tieroffload.errors import ConfigError

__all__ = ["Fault", "Mesh", "MeshLink", "Site", "find_faults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place. Coordinates are integers; no two sites of a mesh share them.

    ``compute_flops_per_s`` is 0 for a place that only holds memory, ``dram_nbytes`` is 0 for one that only computes or
    switches. ``dram_bytes_per_s`` and ``sram_nbytes`` matter to the cost of an operator (0: not known).
    """

    name: str
    x: int
    y: int
    dram_nbytes: int = 0
    compute_flops_per_s: float = 0.0
    dram_bytes_per_s: float = 0.0
    sram_nbytes: int = 0
    kind: str = "die"


@dataclass(frozen=True, slots=True)
class MeshLink:
    """One direction of a connection between site number ``source`` and site number ``target``."""

    source: int
    target: int
    bytes_per_s: float
    latency_s: float = 0.0


class Fault(NamedTuple):
    """What is wrong with a description: which table ("site", "link"), which row and field of it, and a sentence."""

    table: str
    row: int
    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sites and directed links. ``distances`` overrides hop counts where the machine states its own (NUMA).

    Raises ``ConfigError`` for a description that ``find_faults`` objects to.
    """

    name: str
    sites: tuple[Site, ...]
    links: tuple[MeshLink, ...]
    distances: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        faults = find_faults(self.sites, self.links)
        if faults:
            fault = faults[0]
            raise ConfigError(f"mesh {self.name!r}: {fault.table}[{fault.row}].{fault.field}: {fault.message}")

    def coordinates(self) -> npt.NDArray[np.int64]:
        """(N, 2) integer x, y."""
        return np.array([(site.x, site.y) for site in self.sites], np.int64).reshape(len(self.sites), 2)

    def distance_table(self) -> npt.NDArray[np.float32]:
        """(N, N) distances, prebuilt for the allocator: hops along links, or what the machine states.

        On a full grid the hop count is the Manhattan distance; around missing dies it is what a message really takes.
        """
        if self.distances is not None:
            return np.asarray(self.distances, np.float32)
        num_sites = len(self.sites)
        if not self.links:
            return np.zeros((num_sites, num_sites), np.float32)
        ends = np.array([(link.source, link.target) for link in self.links], np.int64)
        graph = sparse.csr_matrix((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), (num_sites, num_sites))
        return np.asarray(dijkstra(graph, unweighted=True), np.float32)

    def outgoing(self) -> list[list[int]]:
        """For each site the numbers of the links that leave it, in order."""
        out: list[list[int]] = [[] for _ in self.sites]
        for number, link in enumerate(self.links):
            out[link.source].append(number)
        return out

    def link_bytes_per_s(self) -> float:
        """The slowest link's bandwidth, the one that [Note: global cost] divides by; 1 without links."""
        return min((link.bytes_per_s for link in self.links), default=1.0)

    def index_of(self, name: str) -> int:
        """Number of the site called ``name``; ``ConfigError`` lists near misses."""
        names = [site.name for site in self.sites]
        if name in names:
            return names.index(name)
        some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise ConfigError(f"mesh {self.name!r} has no site {name!r}. Its sites: {some}.")


def find_faults(sites: Sequence[Site], links: Sequence[MeshLink]) -> list[Fault]:
    """Everything that makes a description unusable, in the order of its rows."""
    if not sites:
        return [Fault("site", 0, "name", "a mesh needs at least one site.")]
    faults: list[Fault] = []
    first_at: dict[tuple[int, int], int] = {}
    first_named: dict[str, int] = {}
    for row, site in enumerate(sites):
        for field in ("dram_nbytes", "compute_flops_per_s", "dram_bytes_per_s", "sram_nbytes"):
            value = getattr(site, field)
            if not 0 <= value < float("inf"):
                faults.append(Fault("site", row, field, f"{value} of site {site.name!r} must be finite and 0 or more."))
        if site.name in first_named:
            faults.append(Fault("site", row, "name", f"{site.name!r} is the name of another site as well."))
        if (site.x, site.y) in first_at:
            other = sites[first_at[site.x, site.y]].name
            faults.append(
                Fault("site", row, "x", f"coordinate ({site.x}, {site.y}) of {site.name!r} is that of {other!r} too.")
            )
        first_named.setdefault(site.name, row)
        first_at.setdefault((site.x, site.y), row)
    reached: list[list[int]] = [[] for _ in sites]
    seen: set[tuple[int, int]] = set()
    for row, link in enumerate(links):
        for field in ("source", "target"):
            if not 0 <= getattr(link, field) < len(sites):
                message = f"site number {getattr(link, field)} does not exist; there are {len(sites)}."
                faults.append(Fault("link", row, field, message))
        if faults and faults[-1].table == "link" and faults[-1].row == row:
            continue
        ends = f"{sites[link.source].name!r} to {sites[link.target].name!r}"
        if not 0 < link.bytes_per_s < float("inf"):
            faults.append(
                Fault("link", row, "bytes_per_s", f"{link.bytes_per_s} from {ends} must be finite and more than 0.")
            )
        if not 0 <= link.latency_s < float("inf"):
            faults.append(Fault("link", row, "latency_s", f"{link.latency_s} from {ends} must be 0 or more seconds."))
        if link.source == link.target:
            faults.append(Fault("link", row, "target", f"the link from {ends} leads nowhere."))
        if (link.source, link.target) in seen:
            faults.append(Fault("link", row, "target", f"there are two links from {ends}."))
        seen.add((link.source, link.target))
        reached[link.source].append(link.target)
        reached[link.target].append(link.source)
    if not faults and len(sites) > 1:
        found = {0}
        frontier = [0]
        while frontier:
            for neighbour in reached[frontier.pop()]:
                if neighbour not in found:
                    found.add(neighbour)
                    frontier.append(neighbour)
        for number, place in enumerate(sites):
            if number not in found:
                how = "has no link" if not reached[number] else "cannot be reached"
                message = f"site {place.name!r} {how}: it is disconnected from {sites[0].name!r}."
                faults.append(Fault("site", number, "name", message))
    return faults
