"""Floor 2. A run report or a plan as tables for people.

Owns layout and wording only: takes the plain dict that `engine.report()` gives (and `report.json` holds) and returns
rich renderables. Reads no file, measures nothing, and shows a dash for what a report does not say, since reports of
other versions and of runs that stopped early are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_tieroffload.gaps import StepGaps
from lightning_tieroffload.sizes import format_nbytes

__all__ = [
    "LINKS",
    "TIERS",
    "format_seconds",
    "gaps_table",
    "moved_table",
    "plan_table",
    "render_report",
    "tiers_table",
]

TIERS = ("device", "dram", "nvme")
LINKS = {
    "h2d": "DRAM to device",
    "d2h": "device to DRAM",
    "read": "NVMe to DRAM",
    "write": "DRAM to NVMe",
}
_DASH = "\u2013"

# How a plan's columns are called; what is not listed is shown under its own name, after these.
_PLAN_COLUMNS = {
    "unit": "unit",
    "name": "unit",
    "num_params": "tensors",
    "nbytes": "bytes",
    "numel": "elements",
    "param_nbytes": "weights",
    "grad_nbytes": "gradients",
    "param_home": "weights on",
    "grad_home": "gradients on",
    "state_home": "state on",
    "home": "lives on",
    "update_on": "update on",
    "activation": "activations",
    "activations": "activations",
}

_UPDATE_PLACES = {"cpu": "on the CPU", "device": "on the device", "streamed": "passed through the device"}


def format_seconds(seconds: float) -> str:
    """`"1.39 s"`, `"12.5 ms"`, `"840 µs"`: three significant digits, for people."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def _at(report: Mapping[str, Any], *path: str) -> Any:
    value: Any = report
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def _nbytes_text(nbytes: Any) -> str:
    return format_nbytes(nbytes) if isinstance(nbytes, (int, float)) else _DASH


def _seconds_text(seconds: Any) -> str:
    return format_seconds(seconds) if isinstance(seconds, (int, float)) else _DASH


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def tiers_table(report: Mapping[str, Any]) -> Table:
    """Peak bytes held on each tier against its budget. A peak over its budget is red: it must not happen."""
    table = _table("Memory", "tier", "budget", "peak", "of budget", "at home")
    for tier in TIERS:
        budget, peak = _at(report, "tiers", tier, "budget_nbytes"), _at(report, "tiers", tier, "peak_nbytes")
        home = _at(report, "tiers", tier, "home_nbytes")
        if not any((budget, peak, home)):
            continue
        share = Text(_DASH)
        if isinstance(budget, (int, float)) and isinstance(peak, (int, float)) and budget > 0:
            share = Text(f"{peak / budget:.0%}", style="red bold" if peak > budget else "green")
        table.add_row(tier, _nbytes_text(budget), _nbytes_text(peak), share, _nbytes_text(home))
    return table


def moved_table(report: Mapping[str, Any]) -> Table:
    """Bytes moved over each link, in all and per step, and how long compute waited for that link."""
    table = _table("Transfers", "link", "moved", "per step", "compute waited")
    num_steps = _at(report, "num_steps") or 0
    for link, words in LINKS.items():
        moved, stall_s = _at(report, "moved_nbytes", link), _at(report, "stall_s", link)
        if not moved and not stall_s:
            continue
        per_step = moved / num_steps if isinstance(moved, (int, float)) and num_steps else None
        table.add_row(words, _nbytes_text(moved), _nbytes_text(per_step), _seconds_text(stall_s))
    table.add_row("updates", _DASH, _DASH, _seconds_text(_at(report, "stall_s", "update")))
    table.add_row("all", _DASH, _DASH, _seconds_text(_at(report, "stall_s", "total")), style="bold")
    return table


def _summary_lines(report: Mapping[str, Any]) -> Iterable[str]:
    num_steps = _at(report, "num_steps")
    last_s, median_s = _at(report, "step_s", "last"), _at(report, "step_s", "median")
    num_text = _DASH if num_steps is None else str(num_steps)
    yield f"{num_text} steps, median {_seconds_text(median_s)}, last {_seconds_text(last_s)}"
    forecast_s = _at(report, "forecast", "step_s")
    if isinstance(forecast_s, (int, float)) and forecast_s:
        line = f"forecast {format_seconds(forecast_s)} a step"
        if isinstance(median_s, (int, float)) and median_s:
            line += f" (off by {abs(forecast_s - median_s) / median_s:.0%})"
        if peak := _at(report, "forecast", "device_peak_nbytes"):
            line += f", device peak {_nbytes_text(peak)}"
        if bottleneck := _at(report, "forecast", "bottleneck"):
            line += f", bound by {bottleneck}"
        yield line
    plans = _at(report, "plan", "plans")
    if isinstance(plans, (list, tuple)) and plans and (text := _at(plans[-1], "text")):
        yield str(text)
    places = _at(report, "num_unit_updates")
    if isinstance(places, Mapping) and any(places.values()):
        counts = (f"{num} {_UPDATE_PLACES.get(place, place)}" for place, num in places.items() if num)
        yield f"updates of units: {', '.join(counts)}"
    misses = _at(report, "num_prefetch_misses")
    if misses is not None:
        yield f"{misses} prefetch misses"
    written = _at(report, "written_nbytes_by_path")
    if isinstance(written, Mapping):
        for path, nbytes in written.items():
            yield f"{_nbytes_text(nbytes)} written to {path}"
    endurance = _at(report, "endurance")
    if isinstance(endurance, Mapping):
        for entry in endurance.values():
            if text := _at(entry, "text"):
                yield str(text)


def _plan_rows(plan: Any) -> list[dict[str, Any]]:
    """The rows of a plan, whichever of its shapes it has: a list, or a mapping from a unit's name to its line."""
    for key in ("units", "placements", "rows"):
        if isinstance(plan, Mapping) and key in plan:
            return _plan_rows(plan[key])
    if isinstance(plan, Mapping):
        return [{"unit": name, **row} for name, row in plan.items() if isinstance(row, Mapping)]
    if isinstance(plan, (list, tuple)):
        return [dict(row) for row in plan if isinstance(row, Mapping)]
    return []


def _plan_cell(key: str, value: Any) -> str:
    if value is None or value == "":
        return _DASH
    if key.endswith("nbytes"):
        return _nbytes_text(value)
    if key.endswith("_s"):
        return _seconds_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _run_name(names: list[str]) -> str:
    """`layers.0 … 27 (28 units)`: what the names have in common is said once."""
    if len(names) == 1:
        return names[0]
    first, last = names[0].split("."), names[-1].split(".")
    num_shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return f"{names[0]} … {'.'.join(last[num_shared:])} ({len(names)} units)"


def _merged_rows(rows: list[dict[str, Any]], name_key: str) -> list[dict[str, Any]]:
    """One line for a run of units that differ in nothing but their names: 28 equal layers are one fact."""
    merged: list[tuple[dict[str, Any], list[str]]] = []
    for row in rows:
        rest = {key: value for key, value in row.items() if key != name_key}
        name = str(row.get(name_key, ""))
        if merged and merged[-1][0] == rest:
            merged[-1][1].append(name)
        else:
            merged.append((rest, [name]))
    return [{name_key: _run_name(names), **rest} for rest, names in merged]


def plan_table(plan: Any, *, title: str = "Plan") -> Table:
    """A plan, a line per unit; neighbours that are planned alike share one. Bytes are those of one unit.

    What is the same for all units stands once, under the table.
    """
    rows = _plan_rows(plan)
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if any(row.get(key) for row in rows)]
    known = list(_PLAN_COLUMNS)
    keys.sort(key=lambda key: known.index(key) if key in known else len(known))
    name_key = next((key for key in ("unit", "name") if key in keys), "unit")
    same = [
        key
        for key in keys
        if key != name_key
        and not key.endswith("nbytes")
        and len(rows) > 1
        and len({str(r.get(key)) for r in rows}) == 1
    ]
    shown = [name_key, *(key for key in keys if key != name_key and key not in same)] if rows else []
    table = _table(title, *(_column_title(key) for key in shown))
    for row in _merged_rows(rows, name_key):
        table.add_row(*(Text(_plan_cell(key, row.get(key))) for key in shown))
    if same:
        facts = (f"{_column_title(key)} {_plan_cell(key, rows[0].get(key))}" for key in same)
        table.caption = Text("all units: " + ", ".join(facts))
        table.caption_justify = "left"
    if not rows:
        table.add_column("no unit has been planned")
    return table


def gaps_table(steps: Iterable[StepGaps], *, most: int = 5) -> RenderableType:
    """Of each step how long compute was busy, and what it waited for: by cause, and in the longest gaps."""
    parts: list[RenderableType] = []
    for step in steps:
        table = _table(
            f"{step.name}: {format_seconds(step.step_s)}, compute {format_seconds(step.busy_s)} "
            f"({step.busy_s / step.step_s if step.step_s else 0:.0%}), idle {format_seconds(step.idle_s)}",
            *("longest gaps, waiting for", "of it", "gap", "at"),
        )
        for gap in step.gaps[:most]:
            cells = (format_seconds(gap.cause_s), format_seconds(gap.seconds), format_seconds(gap.at_s))
            table.add_row(Text(gap.cause), *cells)
        causes = ", ".join(f"{format_seconds(seconds)} {cause}" for cause, seconds in step.by_cause()[:most])
        if causes:
            table.caption = Text(f"idle in all: {causes}")
            table.caption_justify = "left"
        parts.append(table)
    return Group(*parts) if parts else Text("The timeline holds no whole step.")


def _column_title(key: str) -> str:
    return _PLAN_COLUMNS.get(key, key.replace("_", " "))


def render_report(report: Mapping[str, Any], *, with_plan: bool = False) -> RenderableType:
    """The whole report: memory against budgets, transfers and stalls, steps; the plan where it is asked for."""
    parts: list[RenderableType] = [tiers_table(report), moved_table(report), Text("\n".join(_summary_lines(report)))]
    if with_plan and report.get("plan"):
        parts.insert(0, plan_table(report["plan"]))
    return Group(*parts)
