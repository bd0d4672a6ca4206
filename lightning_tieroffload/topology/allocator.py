"""Floor 2. The location-aware DRAM allocator: who borrows from whom, near before far.

Decides flows of bytes; moves none and knows no mesh file. Two orders:

* ``"nearest"``, as published for WATOS (arXiv 2512.12279): senders wait in a queue; the first takes from its nearest
  helper with space; a sender that was only partly served goes back to the end of the queue.
* ``"regret"`` (default): the sender that would lose most if its nearest helper were gone is served first, and an
  exchange pass follows ([Note: exchange] in exchange.py; on large problems pairwise, bounded by a work limit).

Ties are broken by the lower row number everywhere, so equal inputs give equal flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.topology.compiled import compiled
from lightning_tieroffload.topology.exchange import exchange_dense
from lightning_tieroffload.topology.flows import (
    Allocation,
    Flow,
    as_coordinates,
    as_nbytes,
    check_capacity,
    distance_table,
)

__all__ = ["Order", "allocate", "allocate_by_distance", "rebalance", "regions_by_node"]

Order = Literal["nearest", "regret"]

# Largest helper count for which the exchange runs along whole chains: a sweep costs (helpers + 1)**2.
CHAIN_HELPERS = 256
# Flow pairs looked at by the pairwise exchange on larger problems: about 0.1 s on one core.
PAIR_LIMIT = 40_000_000


def allocate(
    senders: npt.ArrayLike,
    demand_nbytes: npt.ArrayLike,
    helpers: npt.ArrayLike,
    supply_nbytes: npt.ArrayLike,
    order: Order = "regret",
    *,
    link_bandwidth_bytes_per_s: float = 1.0,
) -> Allocation:
    """Place every sender's overflow at helpers, near ones first by Manhattan distance.

    ``senders`` and ``helpers``: integer coordinates, shapes (S, 2) and (H, 2). ``demand_nbytes`` (S,) and
    ``supply_nbytes`` (H,): bytes that overflow, bytes that can be lent. Sums are conserved and no helper lends more
    than it has. Raises ``CapacityError`` that names the senders if demand exceeds supply, ``ConfigError`` for
    malformed input. May be called from any thread.
    """
    sender_xy = as_coordinates(senders, key="senders")
    helper_xy = as_coordinates(helpers, key="helpers")
    return allocate_by_distance(
        distance_table(sender_xy, helper_xy),
        demand_nbytes,
        supply_nbytes,
        order,
        link_bandwidth_bytes_per_s=link_bandwidth_bytes_per_s,
    )


def allocate_by_distance(
    distance: npt.NDArray[Any],
    demand_nbytes: npt.ArrayLike,
    supply_nbytes: npt.ArrayLike,
    order: Order = "regret",
    *,
    link_bandwidth_bytes_per_s: float = 1.0,
) -> Allocation:
    """As ``allocate``, for any prebuilt table (S, H) of distances: NUMA distances, hops around missing dies."""
    if order not in ("nearest", "regret"):
        raise ConfigError(f'order={order!r} is not known. Use "nearest" or "regret".')
    if not link_bandwidth_bytes_per_s > 0:
        raise ConfigError(f"link_bandwidth_bytes_per_s={link_bandwidth_bytes_per_s!r} must be more than 0.")
    table = np.ascontiguousarray(distance, np.float32)
    demand = as_nbytes(demand_nbytes, table.shape[0], key="demand_nbytes")
    supply = as_nbytes(supply_nbytes, table.shape[1], key="supply_nbytes")
    if demand.dtype != supply.dtype:
        demand, supply = demand.astype(np.float64), supply.astype(np.float64)
    check_capacity(demand, supply)
    if not demand.any():
        return Allocation([], 0.0, order)
    if order == "nearest":
        sender, helper, nbytes, _ = _nearest(table, demand, supply)
    else:
        sender, helper, nbytes, free = _regret(table, demand, supply)
        if table.shape[1] <= CHAIN_HELPERS:
            flow = np.zeros(table.shape, demand.dtype)
            np.add.at(flow, (sender, helper), nbytes)
            exchange_dense(table, flow, free, 20 * sum(table.shape))
            sender, helper = (index.astype(np.int64) for index in np.nonzero(flow))
            nbytes = flow[sender, helper]
        else:
            sender, helper, nbytes = _exchange_pairs(table, sender, helper, nbytes, free, PAIR_LIMIT)
    return _as_allocation(distance, sender, helper, nbytes, order, link_bandwidth_bytes_per_s)


def _as_allocation(
    distance: npt.NDArray[Any],
    sender: npt.NDArray[np.int64],
    helper: npt.NDArray[np.int64],
    nbytes: npt.NDArray[Any],
    order: str,
    link_bandwidth_bytes_per_s: float,
) -> Allocation:
    distances = np.asarray(distance[sender, helper], np.float64)
    cost = float(np.dot(distances, nbytes.astype(np.float64))) / link_bandwidth_bytes_per_s
    flows = [Flow(*row) for row in zip(sender.tolist(), helper.tolist(), nbytes.tolist(), strict=True)]
    return Allocation(flows, cost, order, distances.tolist())


@compiled
def _nearest(distance, demand, supply):  # type: ignore[no-untyped-def]
    num_senders, num_helpers = distance.shape
    left = demand.copy()
    free = supply.copy()
    # Every take empties a sender or a helper, so there are fewer than S + H of them.
    most = num_senders + num_helpers
    sender = np.empty(most, np.int64)
    helper = np.empty(most, np.int64)
    nbytes = np.empty(most, demand.dtype)
    queue = np.empty(num_senders, np.int64)
    waiting = 0
    for s in range(num_senders):
        if left[s] > 0:
            queue[waiting] = s
            waiting += 1
    head = 0
    length = waiting
    taken = 0
    while waiting > 0:
        s = queue[head]
        head = (head + 1) % length
        waiting -= 1
        best = -1
        best_distance = np.float32(np.inf)
        for h in range(num_helpers):
            if distance[s, h] < best_distance and free[h] > 0:
                best_distance = distance[s, h]
                best = h
        if best < 0:  # only with fractional byte counts, whose sums differ in the last digit
            break
        take = min(left[s], free[best])
        left[s] -= take
        free[best] -= take
        sender[taken] = s
        helper[taken] = best
        nbytes[taken] = take
        taken += 1
        if left[s] > 0:
            queue[(head + waiting) % length] = s
            waiting += 1
    return sender[:taken], helper[:taken], nbytes[:taken], free


@compiled
def _two_nearest(distance, free, s):  # type: ignore[no-untyped-def]
    first = second = np.float32(np.inf)
    first_at = second_at = -1
    for h in range(distance.shape[1]):
        if distance[s, h] < second and free[h] > 0:
            if distance[s, h] < first:
                second = first
                second_at = first_at
                first = distance[s, h]
                first_at = h
            else:
                second = distance[s, h]
                second_at = h
    return first_at, second_at


@compiled
def _regret(distance, demand, supply):  # type: ignore[no-untyped-def]
    num_senders, num_helpers = distance.shape
    left = demand.copy()
    free = supply.copy()
    most = num_senders + num_helpers
    sender = np.empty(most, np.int64)
    helper = np.empty(most, np.int64)
    nbytes = np.empty(most, demand.dtype)
    first = np.empty(num_senders, np.int64)
    second = np.empty(num_senders, np.int64)
    regret = np.empty(num_senders, np.float32)
    active = np.empty(num_senders, np.int64)
    num_active = 0
    for s in range(num_senders):
        if left[s] > 0:
            active[num_active] = s
            num_active += 1
            first[s], second[s] = _two_nearest(distance, free, s)
            regret[s] = distance[s, second[s]] - distance[s, first[s]] if second[s] >= 0 else np.float32(np.inf)
    taken = 0
    while num_active > 0:
        at = 0
        s = active[0]
        for k in range(1, num_active):
            other = active[k]
            if regret[other] > regret[s] or (regret[other] == regret[s] and other < s):
                at = k
                s = other
        h = first[s]
        if h < 0:
            break
        take = min(left[s], free[h])
        left[s] -= take
        free[h] -= take
        sender[taken] = s
        helper[taken] = h
        nbytes[taken] = take
        taken += 1
        if not left[s] > 0:
            num_active -= 1
            active[at] = active[num_active]
        if not free[h] > 0:
            for k in range(num_active):
                other = active[k]
                if first[other] == h or second[other] == h:
                    first[other], second[other] = _two_nearest(distance, free, other)
                    if second[other] >= 0:
                        regret[other] = distance[other, second[other]] - distance[other, first[other]]
                    else:
                        regret[other] = np.float32(np.inf)
    return sender[:taken], helper[:taken], nbytes[:taken], free


@compiled
def _exchange_pairs(distance, sender_in, helper_in, nbytes_in, free, pair_limit):  # type: ignore[no-untyped-def]
    num_senders, num_helpers = distance.shape
    num_flows = sender_in.size
    most = 2 * num_flows + 64
    sender = np.empty(most, np.int64)
    helper = np.empty(most, np.int64)
    nbytes = np.empty(most, nbytes_in.dtype)
    sender[:num_flows] = sender_in
    helper[:num_flows] = helper_in
    nbytes[:num_flows] = nbytes_in
    nearest = np.empty(num_senders, np.float32)
    for s in range(num_senders):
        nearest[s] = np.inf
    for f in range(num_flows):
        s = sender[f]
        if nearest[s] == np.inf:
            nearest[s] = distance[s].min()
    looked = 0
    improved = True
    while improved and looked < pair_limit:
        improved = False
        i = 0
        while i < num_flows and looked < pair_limit:
            s = sender[i]
            here = distance[s, helper[i]]
            if nbytes[i] > 0 and here > nearest[s]:
                # Free space that is nearer.
                best = -1
                best_distance = here
                for h in range(num_helpers):
                    if distance[s, h] < best_distance and free[h] > 0:
                        best = h
                        best_distance = distance[s, h]
                looked += num_helpers
                if best >= 0 and (nbytes[i] <= free[best] or num_flows < most):
                    move = min(nbytes[i], free[best])
                    free[helper[i]] += move
                    free[best] -= move
                    if move == nbytes[i]:
                        helper[i] = best
                    else:
                        nbytes[i] -= move
                        sender[num_flows] = s
                        helper[num_flows] = best
                        nbytes[num_flows] = move
                        num_flows += 1
                    improved = True
                    continue
                # Trade places with the flow that saves most hops per byte.
                best = -1
                best_gain = np.float32(0)
                for j in range(num_flows):
                    gain = here - distance[s, helper[j]]
                    if gain > best_gain and nbytes[j] > 0:
                        gain += distance[sender[j], helper[j]] - distance[sender[j], helper[i]]
                        if gain > best_gain:
                            best = j
                            best_gain = gain
                looked += num_flows
                if best >= 0 and num_flows + 2 <= most:
                    j = best
                    move = min(nbytes[i], nbytes[j])
                    for mine in (i, j):
                        if nbytes[mine] > move:  # the rest of the larger flow stays where it is
                            nbytes[num_flows] = nbytes[mine] - move
                            sender[num_flows] = sender[mine]
                            helper[num_flows] = helper[mine]
                            num_flows += 1
                            nbytes[mine] = move
                    helper[i], helper[j] = helper[j], helper[i]
                    improved = True
                    continue
            i += 1
    return sender[:num_flows], helper[:num_flows], nbytes[:num_flows]


def rebalance(
    allocation: Allocation,
    distance: npt.NDArray[Any],
    supply_nbytes: npt.ArrayLike,
    capacity_nbytes: npt.ArrayLike,
    *,
    min_free_frac: float = 0.05,
    local_hops: float = 3.0,
    link_bandwidth_bytes_per_s: float = 1.0,
) -> Allocation:
    """Relieve helpers that fell under ``min_free_frac`` of their capacity free; returns the new flows.

    ``distance`` (S, H) hops; ``supply_nbytes`` (H,) what each helper can lend *now* (it shrinks when the helper's own
    need grows, also below what it has lent); ``capacity_nbytes`` (H,) its whole DRAM. For each pressed helper, fullest
    first, bytes move to helpers that stay above the margin themselves, least added distance first. Where only helpers
    farther than ``local_hops`` have space, regrouping among neighbours is preferred: a near helper takes the bytes
    and passes as many of another sender's on, both within ``local_hops``. Only then are far ones used.

    A helper that cannot be brought back to the margin stays under it, as long as it does not lend more than it has;
    ``CapacityError`` says which one does, by how much.
    """
    table = np.asarray(distance, np.float64)
    num_helpers = table.shape[1]
    supply = as_nbytes(supply_nbytes, num_helpers, key="supply_nbytes").astype(np.float64)
    capacity = as_nbytes(capacity_nbytes, num_helpers, key="capacity_nbytes").astype(np.float64)
    flow = np.zeros(table.shape, np.float64)
    for sender, helper, nbytes in allocation.flows:
        flow[sender, helper] += nbytes
    whole = all(isinstance(item.nbytes, int) for item in allocation.flows)
    margin = min_free_frac * capacity

    def spare(helper: int) -> float:
        room = supply[helper] - flow[:, helper].sum() - margin[helper]
        return float(np.floor(room)) if whole else float(room)

    pressed = [helper for helper in range(num_helpers) if spare(helper) < 0 and flow[:, helper].any()]
    for helper in sorted(pressed, key=lambda index: (spare(index), index)):
        while (need := -spare(helper)) > 0 and flow[:, helper].any():
            move = _nearest_move(table, flow, helper, spare, local_hops)
            if move is None:
                break
            sender, target, through = move
            amount = min(need, float(flow[sender, helper]))
            if through is None:
                amount = min(amount, spare(target))
                flow[sender, helper] -= amount
                flow[sender, target] += amount
            else:
                middle, other = through
                amount = min(amount, float(flow[other, middle]), spare(target))
                flow[sender, helper] -= amount
                flow[sender, middle] += amount
                flow[other, middle] -= amount
                flow[other, target] += amount
        missing = flow[:, helper].sum() - supply[helper]
        if missing > 0:
            raise CapacityError(
                f"helper {helper} lends {format_nbytes(flow[:, helper].sum())} but has only "
                f"{format_nbytes(supply[helper])} to lend, and no other helper has space above its margin of "
                f"{min_free_frac:.0%}: {format_nbytes(missing)} too little. Lower the demand or min_free_frac."
            )
    sender_at, helper_at = np.nonzero(flow)
    kept = flow[sender_at, helper_at]
    kept = kept.astype(np.int64) if whole else kept
    return _as_allocation(table, sender_at, helper_at, kept, allocation.order, link_bandwidth_bytes_per_s)


def _nearest_move(
    table: npt.NDArray[np.float64],
    flow: npt.NDArray[np.float64],
    helper: int,
    spare: Any,
    local_hops: float,
) -> tuple[int, int, tuple[int, int] | None] | None:
    """(sender, helper with space, None) or (sender, helper with space, (middle helper, the sender that passes on))."""
    open_helpers = [index for index in range(table.shape[1]) if index != helper and spare(index) > 0]
    held = np.flatnonzero(flow[:, helper])
    direct = [(table[s, h] - table[s, helper], table[s, h], int(s), h) for s in held for h in open_helpers]
    near = [item for item in direct if item[1] <= local_hops]
    if near:
        return min(near)[2], min(near)[3], None
    regrouped = [
        (table[s, m] - table[s, helper] + table[o, h] - table[o, m], int(s), h, (m, int(o)))
        for s in held
        for m in range(table.shape[1])
        if m != helper and table[s, m] <= local_hops
        for o in np.flatnonzero(flow[:, m])
        if o != s
        for h in open_helpers
        if h != m and table[o, h] <= local_hops
    ]
    if regrouped:
        return min(regrouped)[1:]
    return (min(direct)[2], min(direct)[3], None) if direct else None


def regions_by_node(
    nodes: Sequence[int], demand_nbytes: Sequence[int], distance: npt.ArrayLike, free_nbytes: Sequence[int]
) -> list[tuple[int, int, int]]:
    """NUMA placement of page-locked memory: [(consumer, node, nbytes)], nearest nodes first.

    ``nodes[i]`` is the node number (row of ``distance``) beside which consumer i sits, a GPU for instance;
    ``distance`` (N, N) as in sysfs; ``free_nbytes`` (N,). On a host with one node this is one region per consumer.
    """
    table = np.asarray(distance, np.float64)
    rows = table[np.asarray(nodes, np.int64)] if len(nodes) else np.zeros((0, table.shape[1]))
    flows = allocate_by_distance(rows, np.asarray(demand_nbytes), np.asarray(free_nbytes)).flows
    return [(flow.sender, flow.helper, flow.nbytes) for flow in sorted(flows)]
