"""Floor 1. What borrowing is: flows of bytes from senders to helpers, their distance and their cost.

A *sender* is a site whose demand overflows its own DRAM, a *helper* one with DRAM to lend. Everything here is a value
or a pure function; who decides the flows is the allocator, the exact reference or the genetic optimiser.

[Note: global cost] ``global_cost = sum(distance * nbytes / link_bandwidth)`` over all flows, with the distance in hops.
With a bandwidth in bytes per second it is in seconds of link time; with the default bandwidth of 1 in byte-hops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.topology.compiled import compiled

__all__ = ["Allocation", "Flow", "as_coordinates", "as_nbytes", "check_allocation", "check_capacity", "distance_table"]

FloatTable = npt.NDArray[np.float32]


class Flow(NamedTuple):
    """``nbytes`` of sender number ``sender`` rest at helper number ``helper`` (row numbers of the arrays given)."""

    sender: int
    helper: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Which sender borrows how many bytes from which helper.

    ``global_cost`` as in [Note: global cost]; ``distances[i]`` is the distance of ``flows[i]`` in hops; ``order`` says
    who decided: "nearest", "regret", "lp" or "genetic".
    """

    flows: list[Flow]
    global_cost: float
    order: str
    distances: list[float] = field(default_factory=list)

    @property
    def total_nbytes(self) -> int:
        return sum(flow.nbytes for flow in self.flows)

    @property
    def mean_distance(self) -> float:
        """Mean hops per borrowed byte; 0 without flows."""
        total = self.total_nbytes
        weighted = sum(flow.nbytes * distance for flow, distance in zip(self.flows, self.distances, strict=True))
        return float(weighted) / float(total) if total else 0.0

    def sent_nbytes(self, num_senders: int) -> npt.NDArray[Any]:
        """Bytes that each sender placed elsewhere, shape (num_senders,)."""
        return _sums((flow.sender, flow.nbytes) for flow in self.flows)(num_senders)

    def held_nbytes(self, num_helpers: int) -> npt.NDArray[Any]:
        """Bytes that each helper holds for others, shape (num_helpers,)."""
        return _sums((flow.helper, flow.nbytes) for flow in self.flows)(num_helpers)


class _sums:
    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._pairs = list(pairs)

    def __call__(self, length: int) -> npt.NDArray[Any]:
        whole = all(isinstance(nbytes, (int, np.integer)) for _, nbytes in self._pairs)
        out = np.zeros(length, np.int64 if whole else np.float64)
        for index, nbytes in self._pairs:
            out[index] += nbytes
        return out


def as_coordinates(values: npt.ArrayLike, *, key: str) -> npt.NDArray[np.int64]:
    """``values`` as an int64 array (n, 2); ``ConfigError`` names ``key`` if it is anything else."""
    array = np.asarray(values)
    if array.size == 0:
        return np.zeros((0, 2), np.int64)
    if array.ndim != 2 or array.shape[1] != 2:
        raise ConfigError(f"{key} must have shape (n, 2), one integer (x, y) per row, not {array.shape}.")
    whole = array.astype(np.int64)
    if not np.array_equal(whole, array):
        raise ConfigError(f"{key} must hold integer mesh coordinates, not fractions.")
    return whole


def as_nbytes(values: npt.ArrayLike, length: int, *, key: str) -> npt.NDArray[Any]:
    """``values`` as ``length`` byte counts: int64 where all are whole, float64 otherwise (a study in units of its own).

    Raises ``ConfigError`` that names ``key`` and the row for a negative or non-finite count.
    """
    array = np.asarray(values)
    if array.size == 0:
        array = np.zeros(0, np.int64)
    if array.shape != (length,):
        raise ConfigError(f"{key} must have shape ({length},), one byte count per site, not {array.shape}.")
    if array.dtype.kind not in "iuf":
        raise ConfigError(f"{key} must be numbers of bytes, not {array.dtype}.")
    bad = np.flatnonzero(~np.isfinite(array) | (array < 0))
    if bad.size:
        raise ConfigError(f"{key}[{bad[0]}] is {array[bad[0]]}: a byte count must be finite and 0 or more.")
    if array.dtype.kind == "f" and not np.array_equal(array, np.floor(array)):
        return np.ascontiguousarray(array, np.float64)
    return np.ascontiguousarray(array, np.int64)


def distance_table(senders: npt.NDArray[np.int64], helpers: npt.NDArray[np.int64]) -> FloatTable:
    """Manhattan distances, float32 (num_senders, num_helpers), built once before any choice is made.

    float32 is exact up to 2**24 hops and keeps the table of 10,000 x 10,000 sites at 400 MB.
    """
    table = np.empty((len(senders), len(helpers)), np.float32)
    _fill_distances(table, senders.astype(np.float32), helpers.astype(np.float32))
    return table


@compiled
def _fill_distances(table, senders, helpers):  # type: ignore[no-untyped-def]
    # One pass and no temporaries: on large meshes most of the time goes into touching fresh pages.
    helper_x = helpers[:, 0].copy()
    helper_y = helpers[:, 1].copy()
    for s in range(table.shape[0]):
        x = senders[s, 0]
        y = senders[s, 1]
        for h in range(table.shape[1]):
            table[s, h] = abs(helper_x[h] - x) + abs(helper_y[h] - y)


def check_capacity(demand_nbytes: npt.NDArray[Any], supply_nbytes: npt.NDArray[Any]) -> None:
    """Raise ``CapacityError`` that names the senders when they need more than all helpers together can lend."""
    need, have = demand_nbytes.sum(), supply_nbytes.sum()
    if need <= have or (demand_nbytes.dtype.kind == "f" and need <= have * (1 + 1e-12)):
        return
    asking = np.flatnonzero(demand_nbytes > 0)
    largest = asking[np.argsort(-demand_nbytes[asking], kind="stable")][:5]
    named = ", ".join(f"{index} ({format_nbytes(float(demand_nbytes[index]))})" for index in largest)
    more = f" and {asking.size - largest.size} more" if asking.size > largest.size else ""
    raise CapacityError(
        f"{asking.size} senders need {format_nbytes(float(need))} ({need} bytes), but {supply_nbytes.size} helpers can "
        f"lend {format_nbytes(float(have))} ({have} bytes): {format_nbytes(float(need - have))} too little. "
        f"Largest senders: {named}{more}. Lower the demand (recompute activations, a smaller micro-batch) or add DRAM."
    )


def check_allocation(
    allocation: Allocation, demand_nbytes: npt.ArrayLike, supply_nbytes: npt.ArrayLike, *, rel_tol: float = 1e-9
) -> None:
    """Verify sums conserved and no helper over capacity; ``CapacityError`` names the first that breaks it."""
    demand, supply = np.asarray(demand_nbytes), np.asarray(supply_nbytes)
    slack = rel_tol * float(demand.sum()) if demand.dtype.kind == "f" or supply.dtype.kind == "f" else 0
    for flow in allocation.flows:
        if not (0 <= flow.sender < demand.size and 0 <= flow.helper < supply.size and flow.nbytes > 0):
            raise CapacityError(f"flow {tuple(flow)} does not lead from one of {demand.size} senders to a helper.")
    sent = allocation.sent_nbytes(demand.size)
    wrong = np.flatnonzero(np.abs(sent - demand) > slack)
    if wrong.size:
        index = wrong[0]
        raise CapacityError(f"sender {index} placed {sent[index]} bytes of the {demand[index]} that it needs to.")
    held = allocation.held_nbytes(supply.size)
    over = np.flatnonzero(held > supply + slack)
    if over.size:
        index = over[0]
        raise CapacityError(f"helper {index} holds {held[index]} bytes but can lend only {supply[index]}.")
