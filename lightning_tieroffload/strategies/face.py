"""Floor 5. What all faces say and refuse in the same words. Knows an engine only by the few methods it calls.

Owns no engine and no model; keeps weak references to the engines whose report is still to be written.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.errors import UnsupportedError
from lightning_tieroffload.trace import TIMELINE_FILE_NAME
from lightning_tieroffload.whole_file import write_whole

__all__ = [
    "Engine",
    "config_from",
    "fits_beside",
    "log",
    "move_buffers",
    "print_plan_once",
    "refuse_compiled",
    "refuse_several_processes",
    "refuse_unfinished",
    "report_at_exit",
    "whole_model_compiled",
    "write_report",
    "write_reports",
    "write_timeline",
]

log = logging.getLogger("lightning_tieroffload")


class Engine(Protocol):
    """What a face needs to know about the engine in order to report."""

    before_close: Callable[[], None] | None

    def report(self) -> dict[str, Any]: ...
    def planned(self) -> dict[str, Any]: ...
    def timeline(self) -> str | None: ...
    def plan_table(self) -> Any: ...
    def tell_plans(self, say: Callable[[str], None]) -> None: ...


def config_from(settings: Mapping[str, Any]) -> TierOffloadConfig:
    """Keyword arguments over what `TIEROFFLOAD_CONFIG` says, so that a strategy given by name can be configured."""
    return refuse_unfinished(TierOffloadConfig.from_kwargs(**settings).merged_over(TierOffloadConfig.from_env()))


def refuse_unfinished(config: TierOffloadConfig) -> TierOffloadConfig:
    """The same configuration, or UnsupportedError for a value that no face can honour."""
    if config.checkpoint_format != "full":
        raise UnsupportedError(
            f"checkpoint_format={config.checkpoint_format!r} is not supported yet: checkpoints are written as one "
            "ordinary file that loads without this package. Leave checkpoint_format out, or set it to 'full'."
        )
    return config


def refuse_several_processes(num_processes: int, *, face: str, remedy: str) -> None:
    """UnsupportedError unless there is one process with one device."""
    if num_processes > 1:
        raise UnsupportedError(
            f"{face} was given {num_processes} devices or processes, and tieroffload does not shard over several yet: "
            f"each would train the whole model by itself. {remedy}"
        )


def refuse_compiled(model: torch.nn.Module, *, remedy: str) -> None:
    """UnsupportedError for a model that was compiled as a whole.

    Fetching a unit is not something that a graph over the whole model can contain; with hooks opaque to the compiler
    it would compile nothing, silently.
    """
    if hasattr(model, "_orig_mod"):
        raise whole_model_compiled(type(model._orig_mod).__name__, remedy=remedy)


def whole_model_compiled(name: str, *, remedy: str) -> UnsupportedError:
    """The error for it; `name` is the model's class."""
    return UnsupportedError(
        f"{name} is compiled as a whole by torch.compile; tieroffload fetches parameters between its layers and "
        f"supports compiled layers only. {remedy}"
    )


# ---------------------------------------------------------------- what may move to the device as a whole

# A model that takes more of the free device memory than this stays on the host until the engine takes it.
_SMALL_FRAC = 0.125


def fits_beside(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether moving the whole module to `device` now leaves the engine's room alone. True on a CPU."""
    if device.type != "cuda":
        return True
    tensors = module.state_dict(keep_vars=True).values()
    nbytes = sum(t.numel() * t.element_size() for t in tensors if t is not None and not torch.nn.parameter.is_lazy(t))
    free_nbytes, _ = torch.cuda.mem_get_info(device)
    return bool(nbytes <= _SMALL_FRAC * free_nbytes)


def move_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """Move the buffers alone; the parameters stay where they are."""
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                submodule._buffers[name] = buffer.to(device)


# ---------------------------------------------------------------- what is printed and written

_printed: weakref.WeakSet[Any] = weakref.WeakSet()
_to_report: weakref.WeakKeyDictionary[Any, TierOffloadConfig] = weakref.WeakKeyDictionary()


def print_plan_once(engine: Engine) -> None:
    """Print the plan as a table on stderr, once for each engine; of plans that follow, a line each."""
    if engine in _printed:
        return
    _printed.add(engine)
    # Importing rich draws from Python's global generator (rich.style), which is the user's.
    state = random.getstate()
    from rich.console import Console

    random.setstate(state)
    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = 120  # a log file has no width; the default of 80 breaks the columns
    console.print(engine.plan_table())
    engine.tell_plans(_print_plan_line)


def _print_plan_line(text: str) -> None:
    if sys.stderr is not None:
        print(f"tieroffload: {text}", file=sys.stderr)


def write_report(engine: Engine, config: TierOffloadConfig) -> None:
    """Write `report.json`, `plan.json` and `timeline.json` into `trace_path`, if there is one.

    Later calls replace them, each as a whole.
    `plan.json` is what `plan_file` reads, once the engine has planned; what it was planned from is there already, in
    `tieroffload_profile.json`, which the planner writes when it has watched.
    """
    if config.trace_path is None:
        return
    report = engine.report()
    os.makedirs(config.trace_path, exist_ok=True)
    files = {"report.json": report, "plan.json": engine.planned().get("plan.json", report.get("plan"))}
    texts = {name: json.dumps(content, indent=2, sort_keys=True) + "\n" for name, content in files.items()}
    for name, text in texts.items():
        write_whole(os.path.join(config.trace_path, name), text)
    write_timeline(engine, config)


def write_timeline(engine: Engine, config: TierOffloadConfig) -> None:
    """Write `timeline.json` alone, as after a run that failed. Raises nothing: what cannot be written is logged."""
    if config.trace_path is None:
        return
    try:
        text = engine.timeline()
        if text is not None:
            os.makedirs(config.trace_path, exist_ok=True)
            write_whole(os.path.join(config.trace_path, TIMELINE_FILE_NAME), text)
    except Exception as error:
        log.warning("The timeline could not be written to %s: %s", config.trace_path, error)


def report_at_exit(engine: Engine, config: TierOffloadConfig) -> None:
    """For faces without a teardown: write the report when the interpreter ends, if the engine still lives then."""
    if config.trace_path is not None:
        _to_report[engine] = config
        engine.before_close = functools.partial(_report_before_close, weakref.ref(engine))


def _report_before_close(ref: weakref.ref[Any]) -> None:
    engine = ref()
    config = _to_report.pop(engine, None) if engine is not None else None
    if engine is not None and config is not None:
        _try_to_write(engine, config)


def write_reports(engines: Iterable[Engine] | None = None) -> None:
    """Write the reports of these engines (all that wait for the end, if None) now."""
    for engine in list(_to_report) if engines is None else engines:
        config = _to_report.get(engine)
        if config is not None:
            write_report(engine, config)


def _write_last_reports() -> None:
    for engine, config in list(_to_report.items()):
        _try_to_write(engine, config)


def _try_to_write(engine: Engine, config: TierOffloadConfig) -> None:
    try:
        write_report(engine, config)
    except Exception as error:  # the run is ending: say it, do not hide the script's own outcome
        log.warning("The run report could not be written to %s: %s", config.trace_path, error)


atexit.register(_write_last_reports)
