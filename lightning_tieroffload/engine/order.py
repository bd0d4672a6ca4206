"""Floor 2. The order in which units are used, learnt as it happens. A hint: being wrong costs time, never a number.

A *use* is (unit index, phase). The next use after two known ones is what followed them last time, which is right for
the loops that training, evaluation and generation are, whatever their structure, and mends itself within one pass.
"""

from __future__ import annotations

import enum

__all__ = ["Phase", "Use", "UseOrder"]


class Phase(enum.IntEnum):
    """What a unit is used for. Evaluation (no gradients) has an order of its own."""

    FORWARD = 0
    BACKWARD = 1
    EVAL = 2


Use = tuple[int, Phase]


class UseOrder:
    """Records uses and predicts the coming ones. Callers hold the residency lock."""

    def __init__(self) -> None:
        self._after: dict[tuple[Use | None, Use], Use] = {}
        self._before: Use | None = None
        self._last: Use | None = None
        self.num_hits = 0
        self.num_misses = 0

    @property
    def last(self) -> Use | None:
        return self._last

    def note(self, use: Use) -> bool:
        """Record ``use``; True if it is a new one (repeats of the last use do not count)."""
        if use == self._last:
            return False
        if self._last is not None:
            key = (self._before, self._last)
            predicted = self._after.get(key)
            if predicted is not None:
                if predicted == use:
                    self.num_hits += 1
                else:
                    self.num_misses += 1
            self._after[key] = use
        self._before, self._last = self._last, use
        return True

    def coming(self, count: int) -> list[Use]:
        """The next ``count`` uses as predicted, nearest first; fewer where nothing is known."""
        result: list[Use] = []
        before, last = self._before, self._last
        while last is not None and len(result) < count:
            following = self._after.get((before, last))
            if following is None:
                break
            result.append(following)
            before, last = last, following
        return result
