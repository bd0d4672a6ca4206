"""Floor 2. Which links the bytes cross: routes on a mesh and the load that they put on each link.

Two ways. *Dimension-ordered*: first along x, then along y, as meshes do in hardware; where a die is missing in the
way, that message takes a shortest path instead. *Congestion-avoiding*: one message after the other, largest first,
takes the path of least time given what is already booked on each link; then each gives up its path once and looks
again. The result is never busier than the dimension-ordered one. Pure functions; nothing is moved.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.topology.mesh import Mesh

__all__ = ["LinkLoads", "Message", "Routing", "route"]

Routing = Literal["dimension", "congestion"]
# How often each message looks for a better way once all others have theirs.
REROUTES = 2


class Message(NamedTuple):
    """``nbytes`` from site number ``source`` to site number ``target``."""

    source: int
    target: int
    nbytes: float


@dataclass(frozen=True, slots=True)
class LinkLoads:
    """``nbytes`` (L,) and ``seconds`` (L,) that each link is busy for; ``hop_nbytes`` is the sum over all links."""

    nbytes: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]

    @property
    def hop_nbytes(self) -> float:
        return float(self.nbytes.sum())

    @property
    def busiest_s(self) -> float:
        """Seconds that the busiest link needs: no period that carries these bytes can be shorter."""
        return float(self.seconds.max(initial=0.0))

    def utilisation(self, period_s: float) -> npt.NDArray[np.float64]:
        """Busy fraction of each link if these bytes cross in ``period_s`` seconds."""
        if not period_s > 0:
            raise ConfigError(f"period_s={period_s} must be more than 0 seconds.")
        return self.seconds / period_s

    def peak_and_mean(self, period_s: float) -> tuple[float, float]:
        """Highest and mean busy fraction over all links; (0, 0) without links."""
        busy = self.utilisation(period_s)
        return (float(busy.max()), float(busy.mean())) if busy.size else (0.0, 0.0)

    def __add__(self, other: LinkLoads) -> LinkLoads:
        return LinkLoads(self.nbytes + other.nbytes, self.seconds + other.seconds)


def route(
    mesh: Mesh,
    messages: Iterable[tuple[int, int, float]],
    routing: Routing = "dimension",
    *,
    booked: LinkLoads | None = None,
) -> tuple[LinkLoads, list[list[int]]]:
    """Loads of ``messages`` alone (without ``booked``), and for each message its links in order.

    ``booked`` is traffic that is there already: congestion-avoiding routes keep out of its way. Raises ``ConfigError``
    for an unknown routing or a message between sites that do not exist.
    """
    if routing not in ("dimension", "congestion"):
        raise ConfigError(f'routing={routing!r} is not known. Use "dimension" or "congestion".')
    wanted = [Message(*message) for message in messages]
    num_sites = len(mesh.sites)
    for message in wanted:
        if not (0 <= message.source < num_sites and 0 <= message.target < num_sites) or not message.nbytes >= 0:
            raise ConfigError(f"message {tuple(message)} does not lead from one of {num_sites} sites to another.")
    speeds = np.array([link.bytes_per_s for link in mesh.links], np.float64)
    base_s = booked.seconds if booked is not None else np.zeros(len(mesh.links))
    paths = _dimension_paths(mesh, wanted)
    loads = _loads(paths, wanted, speeds)
    if routing == "congestion":
        around = _around(mesh, wanted, speeds, base_s)
        around_loads = _loads(around, wanted, speeds)
        busiest = [(base_s + each.seconds).max(initial=0.0) for each in (loads, around_loads)]
        if (busiest[1], around_loads.hop_nbytes) < (busiest[0], loads.hop_nbytes):
            paths, loads = around, around_loads
    return loads, paths


def _loads(paths: Sequence[Sequence[int]], wanted: Sequence[Message], speeds: npt.NDArray[np.float64]) -> LinkLoads:
    nbytes = np.zeros(len(speeds))
    for path, message in zip(paths, wanted, strict=True):
        nbytes[list(path)] += message.nbytes
    return LinkLoads(nbytes, nbytes / speeds)


def _dimension_paths(mesh: Mesh, wanted: Sequence[Message]) -> list[list[int]]:
    outgoing = mesh.outgoing()
    link_at = {(link.source, link.target): number for number, link in enumerate(mesh.links)}
    site_at = {(site.x, site.y): number for number, site in enumerate(mesh.sites)}
    even = np.ones(len(mesh.links))
    paths = []
    for source, target, nbytes in wanted:
        path: list[int] | None = []
        if source != target and nbytes > 0:
            path = _by_dimension(mesh, source, target, link_at, site_at)
        paths.append(_cheapest(mesh, outgoing, source, target, even) if path is None else path)
    return paths


def _around(
    mesh: Mesh, wanted: Sequence[Message], speeds: npt.NDArray[np.float64], base_s: npt.NDArray[np.float64]
) -> list[list[int]]:
    """Least-time paths given each other; see the module's docstring."""
    outgoing = mesh.outgoing()
    latency_s = np.array([link.latency_s for link in mesh.links], np.float64)
    paths: list[list[int]] = [[] for _ in wanted]
    order = sorted(range(len(wanted)), key=lambda number: -wanted[number].nbytes)
    nbytes = np.zeros(len(speeds))
    for _ in range(1 + REROUTES):
        for number in order:
            source, target, amount = wanted[number]
            if source == target or amount == 0:
                continue
            nbytes[paths[number]] -= amount
            # Seconds that this message would finish behind everything that shares the link. Its own transfer time
            # keeps detours honest: on an empty mesh the shortest path wins.
            cost = base_s + nbytes / speeds + 2 * amount / speeds + latency_s
            paths[number] = _cheapest(mesh, outgoing, source, target, cost)
            nbytes[paths[number]] += amount
    return paths


def _by_dimension(
    mesh: Mesh,
    source: int,
    target: int,
    link_at: dict[tuple[int, int], int],
    site_at: dict[tuple[int, int], int],
) -> list[int] | None:
    """Links first along x, then along y; None if a site or link on that way does not exist."""
    x, y = mesh.sites[source].x, mesh.sites[source].y
    end = mesh.sites[target]
    path: list[int] = []
    here = source
    while (x, y) != (end.x, end.y):
        if x != end.x:
            x += 1 if end.x > x else -1
        else:
            y += 1 if end.y > y else -1
        there = site_at.get((x, y))
        link = link_at.get((here, there)) if there is not None else None
        if link is None or there is None:
            return None
        path.append(link)
        here = there
    return path


def _cheapest(
    mesh: Mesh, outgoing: Sequence[Sequence[int]], source: int, target: int, cost: npt.NDArray[Any]
) -> list[int]:
    """Dijkstra; equal costs are settled by the lower site and link number."""
    best: dict[int, float] = {source: 0.0}
    came_by: dict[int, int] = {}
    heap = [(0.0, source)]
    while heap:
        so_far, here = heapq.heappop(heap)
        if here == target:
            break
        if so_far > best[here]:
            continue
        for number in outgoing[here]:
            there = mesh.links[number].target
            there_cost = so_far + float(cost[number])
            if there not in best or there_cost < best[there]:
                best[there] = there_cost
                came_by[there] = number
                heapq.heappush(heap, (there_cost, there))
    if target not in came_by:
        raise ConfigError(
            f"mesh {mesh.name!r} has no path from {mesh.sites[source].name!r} to {mesh.sites[target].name!r}."
        )
    path = []
    here = target
    while here != source:
        path.append(came_by[here])
        here = mesh.links[came_by[here]].source
    return path[::-1]
