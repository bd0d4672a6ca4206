"""Floor 13. The `tieroffload` command: finds the sub-command, turns our errors into one message and exit code 2.

Owns no work of its own. A sub-command is imported when it is called (or asked for help), so that `tieroffload doctor`
answers where half of the stack does not load. What a module may offer as its command: a function with typer's
annotations, a Typer app, any object with click's `main(args=..., prog_name=...)`, or a function that takes the list of
arguments.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperGroup

from lightning_tieroffload._version import __version__
from lightning_tieroffload.errors import TierOffloadError

__all__ = ["main"]

_PASS_EVERYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@dataclass(frozen=True, slots=True)
class _Command:
    module: str
    attribute: str
    help: str


_COMMANDS = {
    "doctor": _Command("doctor", "doctor", "What is usable on this machine, and what to do about the rest."),
    "launch": _Command(
        "launch", "launch", "What `accelerate launch` does, for where torch loads no plugins by itself."
    ),
    "estimate": _Command("plan", "estimate", "Bytes per tier and seconds per step, before anything is allocated."),
    "plan": _Command("plan", "plan", "Make a plan for a model and these budgets, and show it."),
    "bench io": _Command("bench_io", "bench_io", "Measure the links: host to device, and each path on flash."),
    "bench train": _Command("bench_train", "bench_train", "Measure training steps against the resident run."),
    "report": _Command("report", "report", "Show the report of a run as tables."),
    "topology": _Command("topology", "topology", "Place memory on a mesh, and compare with the optimum."),
}


def _load(name: str) -> Any:
    command = _COMMANDS[name]
    module_name = f"lightning_tieroffload.cli.{command.module}"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        what = "is not part of this installation" if error.name == module_name else f"needs the package {error.name}"
        raise TierOffloadError(f"tieroffload {name} {what}. Install it with: pip install {_advice(error)}.") from error
    return getattr(module, command.attribute)


def _advice(error: ModuleNotFoundError) -> str:
    name = (error.name or "").split(".")[0]
    if name == "lightning_tieroffload" or not name:
        return "--upgrade lightning-tieroffload"
    return "'lightning-tieroffload[hf]'" if name in ("transformers", "datasets", "peft") else name


def _run(target: Any, name: str, arguments: list[str]) -> Any:
    prog_name = f"tieroffload {name}"
    if isinstance(target, typer.Typer):
        target = typer.main.get_command(target)
    if hasattr(target, "main"):
        return target.main(args=arguments, prog_name=prog_name)
    if _takes_argument_list(target):
        return target(arguments)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # What a command does not know it may take as settings (cli/options.py); one that does not look refuses it.
    takes_more = any(parameter.annotation in (typer.Context, "typer.Context") for parameter in _parameters(target))
    settings = {"allow_extra_args": True, "ignore_unknown_options": True} if takes_more else None
    help_text = inspect.getdoc(target) or ""
    if takes_more:
        from lightning_tieroffload.cli.options import SETTINGS_HELP, settings_last

        arguments = settings_last(arguments)
        help_text = help_text if SETTINGS_HELP in help_text else f"{help_text} {SETTINGS_HELP}"
    app.command(help=help_text, context_settings=settings)(target)
    return typer.main.get_command(app).main(args=arguments, prog_name=prog_name)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def _takes_argument_list(function: Callable[..., Any]) -> bool:
    parameters = _parameters(function)
    return len(parameters) == 1 and parameters[0].name in ("argv", "args", "arguments")


class _LazyGroup(TyperGroup):
    """Knows its sub-commands' names and one line about each, and imports none of them before it is called."""

    prefix = ""

    def list_commands(self, ctx: Any) -> list[str]:
        names = [name.removeprefix(self.prefix) for name in _COMMANDS if name.startswith(self.prefix)]
        return list(dict.fromkeys(name.split(" ")[0] for name in names))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        name = f"{self.prefix}{cmd_name}"
        if name in _COMMANDS:
            return _passing_command(name)
        if any(known.startswith(f"{name} ") for known in _COMMANDS):
            return _group(_BenchGroup, name, "Measure this machine: io, train.")
        return None


class _BenchGroup(_LazyGroup):
    prefix = "bench "


def _group(cls: type[_LazyGroup], name: str, help_text: str) -> Any:
    app = typer.Typer(
        cls=cls, name=name, help=help_text, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
    )
    app.callback()(lambda: None)
    return typer.main.get_command(app)


def _passing_command(name: str) -> Any:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    def call(ctx: typer.Context) -> None:
        result = _run(_load(name), name, list(ctx.args))
        if isinstance(result, int) and not isinstance(result, bool) and result:
            raise typer.Exit(result)

    app.command(name=name.split(" ")[-1], help=_COMMANDS[name].help, context_settings=_PASS_EVERYTHING)(call)
    return typer.main.get_command(app)


def _root() -> Any:
    app = typer.Typer(
        cls=_LazyGroup,
        name="tieroffload",
        help="Train models larger than the accelerator's memory.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )

    @app.callback(invoke_without_command=True)
    def root(ctx: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit()

    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exits with 0, with 2 for a mistake in the call or the set-up, or as the sub-command says."""
    try:
        _root().main(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="tieroffload")
    except TierOffloadError as error:
        # The message is written for people and is complete; a traceback would only hide it.
        print(f"tieroffload: {error}", file=sys.stderr)
        sys.exit(2)
