"""Tables from reports: whole ones, and ones with anything missing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from lightning_tieroffload.report import format_seconds, moved_table, plan_table, render_report, tiers_table
from lightning_tieroffload.sizes import GiB, MiB

REPORT: dict[str, Any] = {
    "tiers": {
        "device": {"budget_nbytes": 2 * GiB, "peak_nbytes": GiB, "home_nbytes": 512 * MiB},
        "dram": {"budget_nbytes": 8 * GiB, "peak_nbytes": 4 * GiB, "home_nbytes": 4 * GiB},
        "nvme": {"budget_nbytes": 0, "peak_nbytes": 0, "home_nbytes": 0},
    },
    "moved_nbytes": {"h2d": 10 * GiB, "d2h": 5 * GiB, "read": 0, "write": 0},
    "stall_s": {"h2d": 0.25, "d2h": 0.0, "read": 0.0, "write": 0.0, "update": 0.0125, "total": 0.2625},
    "step_s": {"last": 1.2, "median": 1.25},
    "num_steps": 10,
    "num_prefetch_misses": 3,
    "forecast": {"step_s": 1.2, "device_peak_nbytes": GiB, "bottleneck": "h2d"},
    "plan": {
        "units": [
            {"name": "embed", "param_home": "device", "state_home": "dram"},
            *({"name": f"layers.{i}", "param_home": "dram", "state_home": "dram"} for i in range(4)),
        ]
    },
    "num_unit_updates": {"cpu": 21, "device": 0, "streamed": 15},
    "written_nbytes_by_path": {"/data/nvme0": 3 * GiB},
}


def text_of(renderable: RenderableType) -> str:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def row_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if start in line)


def test_whole_report() -> None:
    text = text_of(render_report(REPORT, with_plan=True))
    assert row_of(text, "│ device ").count("GiB") == 2
    assert "50%" in row_of(text, "│ dram")
    assert "│ nvme" not in text
    assert "1 GiB" in row_of(text, "DRAM to device")
    assert "250 ms" in row_of(text, "DRAM to device")
    assert "12.5 ms" in row_of(text, "updates")
    assert "10 steps, median 1.25 s, last 1.2 s" in text
    assert "forecast 1.2 s a step (off by 4%), device peak 1 GiB, bound by h2d" in text
    assert "updates of units: 21 on the CPU, 15 passed through the device" in text
    assert "3 prefetch misses" in text
    assert "3 GiB written to /data/nvme0" in text


def test_equal_neighbours_share_a_line_and_others_do_not() -> None:
    text = text_of(plan_table(REPORT["plan"]))
    assert "layers.0 … 3 (4 units)" in text
    assert "embed" in text
    assert "layers.1" not in text
    # The state of all of them lives on DRAM: said once. Their weights do not.
    assert "all units: state on dram" in text
    assert "weights on" in row_of(text, "┃ unit")


def test_names_with_brackets_are_shown_as_they_are() -> None:
    assert "[/x] [red]" in text_of(plan_table([{"name": "[/x] [red]"}]))
    assert "[/y]" in text_of(render_report({"written_nbytes_by_path": {"[/y]": 1}}))


def test_plan_by_unit_name_and_unknown_columns_are_shown() -> None:
    text = text_of(plan_table({"a": {"state_nbytes": 2 * GiB, "update_s": 0.5}, "b": {"state_nbytes": GiB}}))
    assert "2 GiB" in row_of(text, "│ a")
    assert "500 ms" in row_of(text, "│ a")
    assert "state nbytes" in text
    assert "no unit has been planned" in text_of(plan_table(None))


def test_peak_over_budget_is_marked() -> None:
    table = tiers_table({"tiers": {"device": {"budget_nbytes": 10, "peak_nbytes": 11}}})
    (cell,) = table.columns[3].cells
    assert "red" in str(cell.style)


def test_links_that_moved_nothing_are_left_out() -> None:
    assert "NVMe" not in text_of(moved_table(REPORT))
    assert "NVMe to DRAM" in text_of(moved_table({"moved_nbytes": {"read": 1}}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1.234, "1.23 s"), (0.0123, "12.3 ms"), (8.4e-4, "840 µs"), (3e-9, "3 ns"), (-2.0, "-2 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def without(report: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    copy = dict(report)
    if len(path) == 1:
        copy.pop(path[0], None)
    else:
        copy[path[0]] = without(copy[path[0]], path[1:])
    return copy


@pytest.mark.parametrize("path", [(key,) for key in REPORT] + [("tiers", "dram"), ("tiers", "dram", "budget_nbytes")])
def test_anything_may_be_missing(path: tuple[str, ...]) -> None:
    assert "Memory" in text_of(render_report(without(REPORT, path), with_plan=True))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["tiers", "device", "x"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(list(REPORT)), json_values))
def test_any_report_is_shown_somehow(report: dict[str, Any]) -> None:
    assert text_of(render_report(report, with_plan=True))
