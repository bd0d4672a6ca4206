"""Floor 8. `tieroffload report`: a run report or a timeline, read from disk and shown as tables."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lightning_tieroffload.cli.options import print_json
from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.gaps import StepGaps, gaps_of
from lightning_tieroffload.io.endurance import rated_nbytes_of_tbw, with_rating
from lightning_tieroffload.report import gaps_table, render_report
from lightning_tieroffload.trace import TIMELINE_FILE_NAME
from lightning_tieroffload.whole_file import parse_json

__all__ = ["read_report", "read_timeline", "report"]

_WHAT_TO_NAME = "Name the directory of trace_path, or report.json in it."


def read_report(path: Path) -> dict[str, Any]:
    """The report in `path`, which is a file or the directory that a run wrote with `trace_path`.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    file = path / "report.json" if os.path.isdir(path) else path
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist. A run writes it into the directory that trace_path names, when it ends."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a run report: {error}. {_WHAT_TO_NAME}") from None
    if not isinstance(content, dict) or not isinstance(content.get("tiers"), dict):
        raise ConfigError(f'{file} is not a run report: it has no "tiers". {_WHAT_TO_NAME}')
    return content


def read_timeline(path: Path) -> dict[str, Any]:
    """The timeline in `path`, which is a file or the directory that a run wrote with `trace_path`.

    Raises:
        ConfigError: there is none, or it is not one.
    """
    file = path / TIMELINE_FILE_NAME if os.path.isdir(path) else path
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file} does not exist. A run writes it into the directory that trace_path names, when it ends, unless "
            "trace_steps is 0."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a timeline: {error}.") from None
    about = content.get("otherData") if isinstance(content, dict) else None
    if not isinstance(about, dict) or "compute" not in about:
        raise ConfigError(f"{file} is not a timeline of tieroffload: it does not say where compute was.")
    if not isinstance(content.get("traceEvents"), list):
        raise ConfigError(f'{file} is not a timeline: its "traceEvents" are no list.')
    return content  # type: ignore[no-any-return]


def _longest(step: StepGaps, most: int) -> list[dict[str, Any]]:
    return [dataclasses.asdict(gap) for gap in step.gaps[:most]]


def report(
    path: Annotated[Path | None, typer.Argument(help="report.json, or the directory that trace_path named.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Of this timeline: what compute waited for in each step, the longest gaps.")
    ] = None,
    gaps: Annotated[int, typer.Option(min=1, help="How many gaps of a step.")] = 5,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as it is.")] = False,
    plan: Annotated[bool, typer.Option(help="Show the plan too.")] = True,
    rated_tbw: Annotated[
        float | None,
        typer.Option(min=0, help="Rated writes of the drive in terabytes (TBW), for how long it lasts at this rate."),
    ] = None,
) -> None:
    """Show the report of a run: bytes moved, peak against budget, stalls, steps and the plan; or a timeline's gaps."""
    if trace is not None:
        timeline = read_timeline(trace)
        try:
            steps = gaps_of(timeline)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{trace} is not a timeline as tieroffload writes it: {type(error).__name__}: {error}."
            ) from None
        if json_:
            print_json({"steps": [{**dataclasses.asdict(step), "gaps": _longest(step, gaps)} for step in steps]})
        else:
            Console().print(gaps_table(steps, most=gaps))
        return
    if path is None:
        raise ConfigError("Name report.json or the directory that trace_path named, or a timeline with --trace.")
    content = read_report(path)
    if rated_tbw is not None:
        content["endurance"] = with_rating(content.get("endurance") or {}, rated_nbytes_of_tbw(rated_tbw))
    if json_:
        print_json(content)
    else:
        Console().print(render_report(content, with_plan=plan))
