"""Floor 1. Improving borrowed bytes by passing them along: the exchange kernel on a dense table.

[Note: exchange] Take flow away from helper a and give it to helper b, for the sender that loses least by it; b passes
as much on to c; and so on until somebody has free space or the round closes. Seen as a graph on helpers, with the
cheapest such step as edge weight and one extra node for free space, a closed walk of negative weight lowers the cost.
Bellman-Ford finds one; when none is left the flows are optimal (M. Klein, "A primal method for minimal cost flows",
Management Science 14, 1967). Bounded by ``max_rounds``, it is the local exchange pass of the allocator; unbounded, it
is the exact pairing inside the brute-force reference, which tests hold against the LP.
"""

from __future__ import annotations

import numpy as np

from lightning_tieroffload.topology.compiled import compiled

__all__ = ["exchange_dense"]


@compiled
def exchange_dense(distance, flow, free, max_rounds):  # type: ignore[no-untyped-def]
    """Lower ``sum(distance * flow)`` in place; returns the number of closed walks applied.

    ``distance`` (S, H) hops; ``flow`` (S, H) and ``free`` (H,) bytes, both int64 or both float64, changed in place.
    Row sums of ``flow``, and column sums plus ``free``, stay what they are.
    """
    num_senders, num_helpers = flow.shape
    num_nodes = num_helpers + 1  # the last node stands for free space
    weight = np.empty((num_nodes, num_nodes), np.float64)
    via = np.empty((num_nodes, num_nodes), np.int64)
    best = np.empty(num_nodes, np.float64)
    parent = np.empty(num_nodes, np.int64)
    walk = np.empty(num_nodes + 1, np.int64)
    seen = np.empty(num_nodes, np.int64)
    stale = np.ones(num_helpers, np.bool_)
    eps = 1e-7
    for done in range(max_rounds):
        # An edge a -> b moves bytes of sender via[a, b] from helper a to helper b.
        for a in range(num_helpers):
            if not stale[a]:
                continue
            stale[a] = False
            for b in range(num_nodes):
                weight[a, b] = np.inf
                via[a, b] = -1
            for s in range(num_senders):
                if flow[s, a] > 0:
                    base = distance[s, a]
                    for b in range(num_helpers):
                        step = distance[s, b] - base
                        if step < weight[a, b]:
                            weight[a, b] = step
                            via[a, b] = s
        for a in range(num_helpers):
            weight[a, a] = np.inf
            # A helper that received may keep what it got if it has space (a -> free). A helper that gave away hands its
            # space back to the pool (free -> a): without these two, bytes could only trade places.
            weight[a, num_helpers] = 0.0 if free[a] > 0 else np.inf
            weight[num_helpers, a] = 0.0
        weight[num_helpers, num_helpers] = np.inf

        # Bellman-Ford from all nodes at once; the edge list is the dense matrix.
        for node in range(num_nodes):
            best[node] = 0.0
            parent[node] = -1
        on_walk = -1
        for _ in range(num_nodes + 1):
            changed = False
            for a in range(num_nodes):
                base = best[a]
                for b in range(num_nodes):
                    if base + weight[a, b] < best[b] - eps:
                        best[b] = base + weight[a, b]
                        parent[b] = a
                        changed = True
            if not changed:
                break
            # Look for a closed walk among the parents after every sweep: most are found long before the last one.
            for node in range(num_nodes):
                seen[node] = -1
            for root in range(num_nodes):
                node = root
                while node >= 0 and seen[node] < 0:
                    seen[node] = root
                    node = parent[node]
                if node >= 0 and seen[node] == root:
                    on_walk = node
                    break
            if on_walk >= 0:
                break
        if on_walk < 0:
            return done
        node = on_walk
        length = 0
        start = node
        while True:
            walk[length] = node
            length += 1
            node = parent[node]
            if node == start:
                break
        walk[length] = start  # the walk runs from walk[length] down to walk[0]: parents first
        # How much fits: flow of each mover, and free space where bytes come to rest.
        amount = free[0] * 0 - 1  # keeps the dtype of the byte counts
        for k in range(length, 0, -1):
            a, b = walk[k], walk[k - 1]
            if a < num_helpers and b < num_helpers:
                room = flow[via[a, b], a]
            elif b == num_helpers:
                room = free[a]
            else:
                continue
            if amount < 0 or room < amount:
                amount = room
        if amount <= 0:
            return done
        for k in range(length, 0, -1):
            a, b = walk[k], walk[k - 1]
            if a < num_helpers and b < num_helpers:
                s = via[a, b]
                flow[s, a] -= amount
                flow[s, b] += amount
                stale[a] = True
                stale[b] = True
            elif b == num_helpers:
                free[a] -= amount
            else:
                free[b] += amount
    return max_rounds
