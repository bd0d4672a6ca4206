"""Floor 7. `tieroffload launch`: `accelerate launch` for where torch's autoloading of the import hooks is switched off.

Takes the same arguments as `accelerate launch`, and the fields of `TierOffloadConfig` as options before the script.
Owns the hand-over to Accelerate's launcher only; what is started is `lightning_tieroffload.run` around the script.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import _tieroffload_hooks
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.strategies import autoload

__all__ = ["launch", "launch_parser"]

_DEST = "tieroffload_"
_RUNNER = "lightning_tieroffload.run"


def launch_parser() -> argparse.ArgumentParser:
    """Accelerate's own parser, with our settings as one more group of options."""
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    parser.prog = "tieroffload launch"
    group = parser.add_argument_group("tieroffload", "Settings; they go before those of the tieroffload_config block.")
    for name in TierOffloadConfig.from_kwargs().to_dict():
        flag = f"--{name.replace('_', '-')}"
        taken = {flag, f"--{name}"} & parser._option_string_actions.keys()
        flag = f"--tieroffload-{name.replace('_', '-')}" if taken else flag
        several = {"action": "append"} if name in ("nvme_paths", "units", "debug") else {}
        group.add_argument(flag, dest=_DEST + name, default=None, metavar="VALUE", **several)  # type: ignore[arg-type]
    return parser


def launch(arguments: Sequence[str]) -> None:
    """Start a script under tieroffload, as `accelerate launch` starts one.

    Args:
        arguments: what stands after `tieroffload launch` on the command line.

    Raises:
        ConfigError: wrong settings, here or in the file's `tieroffload_config` block; before anything is started.
        SystemExit: by the argument parser. CalledProcessError: the script failed.
    """
    _tieroffload_hooks.install()  # before accelerate reads its file, which may have our block
    from accelerate.commands.launch import launch_command

    args = launch_parser().parse_args(list(arguments))
    if args.no_python:
        raise ConfigError("--no_python starts a program that is not Python: tieroffload cannot be in it. Leave it out.")
    chosen = {
        key.removeprefix(_DEST): _split(value)
        for key, value in vars(args).items()
        if key.startswith(_DEST) and value is not None
    }
    for key in [key for key in vars(args) if key.startswith(_DEST)]:
        delattr(args, key)
    config = TierOffloadConfig.from_kwargs(**chosen)
    autoload.prefer(config)
    _tieroffload_hooks.announce(config.merged_over(TierOffloadConfig.from_env()).to_json())
    module = ["--module"] if args.module else []
    args.training_script_args = [*module, args.training_script, *args.training_script_args]
    args.module, args.training_script = True, _RUNNER
    launch_command(args)


def _split(value: Any) -> Any:
    if isinstance(value, list):
        return [part for item in value for part in item.split(",") if part]
    return value
