"""Floor 2. Which bytes of a region are free: best fit, merging, deterministic.

Owns no memory and no lock. The pinned arena cuts host memory with it, the extent store cuts files.
"""

from __future__ import annotations

import bisect

from lightning_tieroffload.sizes import round_up

__all__ = ["FreeRuns"]


class FreeRuns:
    """The free runs of a region of ``nbytes`` bytes, all free at first. Not thread-safe: the owner's lock guards it."""

    def __init__(self, nbytes: int) -> None:
        # Three ways to find a run: by start, by end (to merge), by (length, start) (the best fit).
        self._nbytes_by_start: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self.free_nbytes = 0
        if nbytes:
            self.give(0, nbytes)

    @property
    def longest_nbytes(self) -> int:
        return self._by_length[-1][0] if self._by_length else 0

    def cut(self, nbytes: int, align_nbytes: int) -> int | None:
        """Start of the shortest run that holds ``nbytes`` aligned, the lowest among equals; None if there is none."""
        index = bisect.bisect_left(self._by_length, (nbytes, 0))
        while index < len(self._by_length):
            run_nbytes, run_start = self._by_length[index]
            start = round_up(run_start, align_nbytes)
            left_nbytes = run_start + run_nbytes - start - nbytes
            if left_nbytes >= 0:
                self._remove(run_start)
                if start > run_start:
                    self._add(run_start, start - run_start)
                if left_nbytes:
                    self._add(start + nbytes, left_nbytes)
                self.free_nbytes -= nbytes
                return start
            index += 1
        return None

    def cut_from_top(self, nbytes: int, align_nbytes: int) -> int | None:
        """Like `cut`, but from the end of the highest run that holds it."""
        chosen: tuple[int, int] | None = None
        index = bisect.bisect_left(self._by_length, (nbytes, 0))
        for run_nbytes, run_start in self._by_length[index:]:
            start = (run_start + run_nbytes - nbytes) // align_nbytes * align_nbytes
            if start >= run_start and (chosen is None or run_start > chosen[0]):
                chosen = (run_start, start)
        if chosen is None:
            return None
        run_start, start = chosen
        run_end = run_start + self._remove(run_start)
        if start > run_start:
            self._add(run_start, start - run_start)
        if start + nbytes < run_end:
            self._add(start + nbytes, run_end - start - nbytes)
        self.free_nbytes -= nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Make ``[start, start + nbytes)`` free, merged with its free neighbours. It must not be free already."""
        self.free_nbytes += nbytes
        end = start + nbytes
        if end in self._nbytes_by_start:
            end += self._remove(end)
        if start in self._start_by_end:
            start = self._start_by_end[start]
            self._remove(start)
        self._add(start, end - start)

    def _add(self, start: int, nbytes: int) -> None:
        self._nbytes_by_start[start] = nbytes
        self._start_by_end[start + nbytes] = start
        bisect.insort(self._by_length, (nbytes, start))

    def _remove(self, start: int) -> int:
        nbytes = self._nbytes_by_start.pop(start)
        del self._start_by_end[start + nbytes]
        del self._by_length[bisect.bisect_left(self._by_length, (nbytes, start))]
        return nbytes
