"""Floor 0. Every exception that the package raises on purpose.

    TierOffloadError(RuntimeError)
    ├── ConfigError(ValueError)      a setting is unknown, misspelt, of the wrong type or out of range
    ├── CapacityError                a tier's budget cannot hold what must be on it
    │   └── InfeasiblePlanError      no plan fits the budgets; names the tier and the least budget that would do
    ├── TierIOError(OSError)         a read, write or copy failed; keeps errno, path, offset, nbytes
    │   └── ChecksumError            bytes came back that are not the bytes that were written
    ├── TransferTimeoutError         a wait passed its deadline; says what was awaited
    ├── ResidencyError               an illegal residency transition: a fault of ours
    └── UnsupportedError             something the library cannot do; says what to do instead

Messages say what happened, the numbers with units, the setting, and what to do.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ChecksumError",
    "ConfigError",
    "InfeasiblePlanError",
    "ResidencyError",
    "TierIOError",
    "TierOffloadError",
    "TransferTimeoutError",
    "UnsupportedError",
]


class TierOffloadError(RuntimeError):
    """Base of every error of this package."""


class ConfigError(TierOffloadError, ValueError):
    """A setting is unknown, misspelt, of the wrong type, out of range or owned by the trainer."""


class CapacityError(TierOffloadError):
    """A tier's budget cannot hold what must be on it at the same time."""


class InfeasiblePlanError(CapacityError):
    """No plan fits the budgets. ``least_budget_nbytes`` is the smallest budget of ``tier`` that works."""

    def __init__(self, message: str, *, tier: str = "", least_budget_nbytes: int | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.least_budget_nbytes = least_budget_nbytes


class TierIOError(TierOffloadError, OSError):
    """A read, write or copy failed. ``errno`` is kept where the operating system gave one."""

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        path: str | None = None,
        offset_nbytes: int | None = None,
        nbytes: int | None = None,
        shard: str | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.path = path
        self.offset_nbytes = offset_nbytes
        self.nbytes = nbytes
        self.shard = shard


class ChecksumError(TierIOError):
    """Bytes came back from a tier that are not the bytes that were written there."""


class TransferTimeoutError(TierOffloadError, TimeoutError):
    """A transfer or an update took longer than ``io_timeout_s``."""


class ResidencyError(TierOffloadError):
    """An illegal residency transition. This is a fault of the library, please report it."""


class UnsupportedError(TierOffloadError):
    """Something that the library cannot do; the message says what to do instead."""
