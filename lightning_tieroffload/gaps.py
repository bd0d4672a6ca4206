"""Floor 1. When compute did nothing, and what it waited for: read from a timeline. Pure functions over its JSON.

[Note: gaps] Compute is busy in its windows, less what it waited for inside them (``stalls`` where it is the host's,
``stalls on the device`` where it is a stream's). The rest of a step is gaps. A gap's cause is what compute waited for
during most of it; where nobody waited, what the host did, or what moved meanwhile; where nothing of the engine went on,
the time is the loop's own: loss, loader, Python.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["OUTSIDE", "Gap", "StepGaps", "gaps_of"]

OUTSIDE = "outside units"
_LEAST_SHARE = 0.1  # of a gap; what takes less of it is not its cause
_QUIET = ("steps", "compute")

_Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which compute did nothing."""

    at_s: float  # since the step began
    seconds: float
    cause: str
    cause_s: float  # of it, while the cause went on


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGaps:
    """One step's compute, and its gaps, the longest first."""

    name: str
    step_s: float
    busy_s: float
    gaps: tuple[Gap, ...]

    @property
    def idle_s(self) -> float:
        return self.step_s - self.busy_s

    def by_cause(self) -> list[tuple[str, float]]:
        """Idle seconds by their cause, the most first."""
        total: collections.Counter[str] = collections.Counter()
        for gap in self.gaps:
            total[gap.cause] += gap.seconds  # type: ignore[assignment]
        return [(cause, float(seconds)) for cause, seconds in total.most_common()]


def gaps_of(timeline: Mapping[str, Any]) -> list[StepGaps]:
    """What each step of a timeline (``timeline.json``) says."""
    by_lane: dict[str, list[tuple[float, float, str]]] = collections.defaultdict(list)
    for event in timeline["traceEvents"]:
        if event["ph"] == "X":
            by_lane[event["cat"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    on_host = timeline["otherData"]["compute"] == "host"
    waits = by_lane["stalls" if on_host else "stalls on the device"]
    busy = _without(_union(by_lane["compute"]), _union(waits))
    others = [each for lane, events in by_lane.items() if lane not in (*_QUIET, "stalls", "host") for each in events]
    rounds = [waits, by_lane["stalls"], by_lane["host"], others]
    steps = []
    for begin, end, name in by_lane["steps"]:
        own = [(max(b, begin), min(e, end)) for b, e in busy if b < end and e > begin]
        gaps = [_gap(span, begin, rounds) for span in _without([(begin, end)], own)]
        steps.append(
            StepGaps(
                name=name,
                step_s=(end - begin) / 1e6,
                busy_s=sum(e - b for b, e in own) / 1e6,
                gaps=tuple(sorted(gaps, key=lambda gap: -gap.seconds)),
            )
        )
    return steps


def _gap(span: _Span, step_begin: float, rounds: Iterable[list[tuple[float, float, str]]]) -> Gap:
    begin, end = span
    cause, cause_us = OUTSIDE, end - begin
    for events in rounds:
        overlap: collections.Counter[str] = collections.Counter()
        for b, e, name in events:
            if b < end and e > begin:
                overlap[name] += min(e, end) - max(b, begin)  # type: ignore[assignment]
        if overlap and (found := overlap.most_common(1)[0])[1] >= _LEAST_SHARE * (end - begin):
            cause, cause_us = found[0], min(float(found[1]), end - begin)
            break
    return Gap(at_s=(begin - step_begin) / 1e6, seconds=(end - begin) / 1e6, cause=cause, cause_s=cause_us / 1e6)


def _union(events: Iterable[tuple[Any, ...]]) -> list[_Span]:
    result: list[_Span] = []
    for begin, end, *_ in sorted(events):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result


def _without(spans: Iterable[_Span], taken: Iterable[_Span]) -> list[_Span]:
    """The parts of ``spans`` that are in none of ``taken``; both in order and apart."""
    result: list[_Span] = []
    holes = list(taken)
    first = 0
    for begin, end in spans:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        index = first
        while index < len(holes) and holes[index][0] < end:
            hole_begin, hole_end = holes[index]
            if hole_begin > begin:
                result.append((begin, hole_begin))
            begin = max(begin, hole_end)
            index += 1
        if begin < end:
            result.append((begin, end))
    return result
