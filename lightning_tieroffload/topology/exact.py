"""Floor 2. The exact reference for borrowing: the transport problem as a linear program (HiGHS).

Slow and exact on purpose: it says how far from the optimum the allocator is, and takes part in no run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.optimize import linprog

from lightning_tieroffload.errors import TierOffloadError
from lightning_tieroffload.topology.flows import (
    Allocation,
    Flow,
    as_coordinates,
    as_nbytes,
    check_capacity,
    distance_table,
)

__all__ = ["transport_optimum", "transport_optimum_by_distance"]


def transport_optimum(
    senders: npt.ArrayLike,
    demand_nbytes: npt.ArrayLike,
    helpers: npt.ArrayLike,
    supply_nbytes: npt.ArrayLike,
    *,
    link_bandwidth_bytes_per_s: float = 1.0,
) -> Allocation:
    """The least ``global_cost`` that any allocation of these demands can have, with flows that reach it.

    Arguments as of ``allocator.allocate``. Minimise sum(distance * x) subject to row sums = demand, column sums <=
    supply, x >= 0. The optimum is a vertex and so in whole bytes; ``global_cost`` is the cost of those flows.
    """
    table = distance_table(as_coordinates(senders, key="senders"), as_coordinates(helpers, key="helpers"))
    return transport_optimum_by_distance(
        table, demand_nbytes, supply_nbytes, link_bandwidth_bytes_per_s=link_bandwidth_bytes_per_s
    )


def transport_optimum_by_distance(
    distance: npt.NDArray[Any],
    demand_nbytes: npt.ArrayLike,
    supply_nbytes: npt.ArrayLike,
    *,
    link_bandwidth_bytes_per_s: float = 1.0,
) -> Allocation:
    """As ``transport_optimum``, for any table (S, H) of distances."""
    table = np.asarray(distance, np.float64)
    num_senders, num_helpers = table.shape
    demand = as_nbytes(demand_nbytes, num_senders, key="demand_nbytes")
    supply = as_nbytes(supply_nbytes, num_helpers, key="supply_nbytes")
    check_capacity(demand, supply)
    if not demand.any():
        return Allocation([], 0.0, "lp")
    # A power of two brings the largest count near 1000 without rounding: HiGHS's tolerances are absolute.
    scale = 2.0 ** np.ceil(np.log2(float(max(demand.max(), supply.max())) / 1000))
    row_sums = sparse.kron(sparse.identity(num_senders), np.ones((1, num_helpers)), format="csr")
    column_sums = sparse.kron(np.ones((1, num_senders)), sparse.identity(num_helpers), format="csr")
    result = linprog(
        table.ravel(),
        A_ub=column_sums,
        b_ub=supply / scale,
        A_eq=row_sums,
        b_eq=demand / scale,
        method="highs-ds",
    )
    if result.status != 0:
        raise TierOffloadError(f"HiGHS gave no optimum for {num_senders} x {num_helpers} sites: {result.message}")
    solution = (result.x * scale).reshape(table.shape)
    cost = float(result.fun) * scale
    if demand.dtype.kind == supply.dtype.kind == "i":
        rounded = np.rint(solution).astype(np.int64)
        if np.array_equal(rounded.sum(1), demand) and (rounded.sum(0) <= supply).all():
            solution = rounded
            cost = float((table * rounded).sum())
    sender, helper = np.nonzero(solution > 0)
    flows = [
        Flow(*row) for row in zip(sender.tolist(), helper.tolist(), solution[sender, helper].tolist(), strict=True)
    ]
    return Allocation(flows, cost / link_bandwidth_bytes_per_s, "lp", table[sender, helper].tolist())
