"""Floor 1. The nouns. Read this file first.

One word, one meaning, the same in code, errors, logs, traces and docs. Everything here is frozen: a change is a
new value. Nothing here does anything.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

__all__ = ["Extent", "Link", "Mover", "Role", "Shard", "Ticket", "Tier", "Transfer"]


class Tier(enum.IntEnum):
    """Where bytes can be. Lower is nearer to compute. Without a GPU, DEVICE is a budgeted part of host memory."""

    DEVICE = 0
    DRAM = 1
    NVME = 2


class Role(enum.Enum):
    """What a shard's bytes mean to training."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    STATE = "state"  # optimizer state of a class we do not know by name
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """An ordered pair of tiers. ``Link.H2D`` and its like are the four that exist."""

    source: Tier
    target: Tier

    @property
    def name(self) -> str:
        return _LINK_NAMES[self.source, self.target]


_LINK_NAMES = {
    (Tier.DRAM, Tier.DEVICE): "h2d",
    (Tier.DEVICE, Tier.DRAM): "d2h",
    (Tier.NVME, Tier.DRAM): "read",
    (Tier.DRAM, Tier.NVME): "write",
}
H2D = Link(Tier.DRAM, Tier.DEVICE)
D2H = Link(Tier.DEVICE, Tier.DRAM)
READ = Link(Tier.NVME, Tier.DRAM)
WRITE = Link(Tier.DRAM, Tier.NVME)


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's piece of one role of one unit: the smallest thing that has a residency."""

    unit: str
    role: Role
    nbytes: int

    @property
    def name(self) -> str:
        return f"{self.unit}:{self.role.value}"


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous run in a file on flash. ``nbytes`` is the logical length; on disk it is padded to 4 KiB."""

    path: str
    offset_nbytes: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One request to move bytes over a link. Lower ``priority`` goes first (the next use in the step's order)."""

    shard: str
    link: Link
    nbytes: int
    priority: int = 0


@runtime_checkable
class Ticket(Protocol):
    """A claim on something that completes later. May be waited on from any thread, any number of times."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block the calling thread until complete; re-raise what failed. TransferTimeoutError past the deadline."""


class Mover(Protocol):
    """Does transfers on one link. The real ones touch hardware; tests pass ones that delay, fail or poison."""

    def submit(self, transfer: Transfer, work: Callable[[], Any]) -> Ticket: ...
