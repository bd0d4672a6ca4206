"""Floor 2. The one table of where valid copies are, and the one ledger of how many bytes each tier holds.

Owns versions and byte counts, not memory: whoever moves bytes tells the table what it did. Every writer holds
``ResidencyTable.lock``. See [Note: residency].

[Note: residency] A shard has, per tier, the version of the copy there. The newest version is the truth. A copy with an
older version is stale and may be dropped at any time; a tier whose copy is the only one of the newest version may not
be dropped (it is dirty with respect to the home). A transfer in flight is listed until it has landed; the copy that it
makes becomes valid only then. Names such as "resident" or "dirty" are views of these numbers, never stored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_tieroffload.concepts import Link, Tier
from lightning_tieroffload.errors import ResidencyError

__all__ = ["Ledger", "ResidencyTable", "TierAccount"]


@dataclass(slots=True)
class TierAccount:
    """Bytes that the engine holds on one tier. ``peak_nbytes`` is the largest ``used_nbytes`` ever seen.

    ``recent_nbytes`` is the largest since ``take_recent`` was last called.
    """

    budget_nbytes: int
    used_nbytes: int = 0
    peak_nbytes: int = 0
    home_nbytes: int = 0
    recent_nbytes: int = 0

    def take_recent(self) -> int:
        """The most bytes held since the last call."""
        recent_nbytes = max(self.recent_nbytes, self.used_nbytes)
        self.recent_nbytes = self.used_nbytes
        return recent_nbytes

    @property
    def headroom_nbytes(self) -> int:
        return self.budget_nbytes - self.used_nbytes


class Ledger:
    """Bytes per tier. Callers hold the residency lock."""

    def __init__(self, budget_nbytes: dict[Tier, int]) -> None:
        self.accounts = {tier: TierAccount(budget_nbytes.get(tier, 0)) for tier in Tier}

    def __getitem__(self, tier: Tier) -> TierAccount:
        return self.accounts[tier]

    def charge(self, tier: Tier, nbytes: int) -> None:
        account = self.accounts[tier]
        account.used_nbytes += nbytes
        account.peak_nbytes = max(account.peak_nbytes, account.used_nbytes)
        account.recent_nbytes = max(account.recent_nbytes, account.used_nbytes)

    def release(self, tier: Tier, nbytes: int) -> None:
        account = self.accounts[tier]
        if nbytes > account.used_nbytes:
            raise ResidencyError(f"{tier.name} releases {nbytes} bytes but holds {account.used_nbytes}.")
        account.used_nbytes -= nbytes


@dataclass(slots=True)
class _Row:
    home: Tier
    newest: int
    versions: dict[Tier, int] = field(default_factory=dict)
    in_flight: dict[Link, int] = field(default_factory=dict)


class ResidencyTable:
    """Per shard name: {tier: version} and the transfers in flight. One lock, re-entrant, shared by every engine."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._rows: dict[str, _Row] = {}

    def __contains__(self, shard: str) -> bool:
        return shard in self._rows

    def add(self, shard: str, home: Tier, *, valid_on: Iterable[Tier]) -> None:
        if shard in self._rows:
            raise ResidencyError(f"{shard} is listed already.")
        self._rows[shard] = _Row(home=home, newest=0, versions=dict.fromkeys(valid_on, 0))

    def remove(self, shard: str) -> None:
        self._rows.pop(shard, None)

    def home(self, shard: str) -> Tier:
        return self._rows[shard].home

    def versions(self, shard: str) -> dict[Tier, int]:
        return dict(self._rows[shard].versions)

    def is_valid(self, shard: str, tier: Tier) -> bool:
        """Whether the copy on ``tier`` is the newest one."""
        row = self._rows[shard]
        return row.versions.get(tier) == row.newest

    def is_only_valid(self, shard: str, tier: Tier) -> bool:
        """Whether dropping the copy on ``tier`` would lose the newest version (a dirty copy)."""
        row = self._rows[shard]
        return [t for t, v in row.versions.items() if v == row.newest] == [tier]

    def wrote(self, shard: str, tier: Tier) -> None:
        """The copy on ``tier`` was changed in place: it is newest now, all others are stale."""
        row = self._rows[shard]
        row.newest += 1
        row.versions[tier] = row.newest

    def begin(self, shard: str, link: Link) -> None:
        """A transfer of the newest version starts. Its source must be valid."""
        row = self._rows[shard]
        if row.versions.get(link.source) != row.newest:
            raise ResidencyError(
                f"{shard}: {link.name} would copy a stale version {row.versions} (newest {row.newest})."
            )
        row.in_flight[link] = row.newest

    def landed(self, shard: str, link: Link) -> None:
        """The transfer is ordered before every later reader of the target (a ticket or a stream event says so)."""
        row = self._rows[shard]
        version = row.in_flight.pop(link, None)
        if version is None:
            raise ResidencyError(f"{shard}: no {link.name} transfer is in flight.")
        row.versions[link.target] = version

    def failed(self, shard: str, link: Link) -> None:
        """The transfer failed: the shard is as it was before, and its target copy does not count."""
        row = self._rows[shard]
        row.in_flight.pop(link, None)
        row.versions.pop(link.target, None)

    def drop(self, shard: str, tier: Tier) -> None:
        """The copy on ``tier`` is gone. Refused where it is the only one of the newest version."""
        if self.is_only_valid(shard, tier):
            raise ResidencyError(f"{shard}: the copy on {tier.name} is the only valid one and cannot be dropped.")
        self._rows[shard].versions.pop(tier, None)

    def in_flight(self, shard: str) -> tuple[Link, ...]:
        """Links over which a transfer of the shard is listed."""
        return tuple(self._rows[shard].in_flight)

    def num_in_flight(self) -> int:
        return sum(len(row.in_flight) for row in self._rows.values())
