"""Floor 7. `tieroffload launch`: `accelerate launch` for where torch's autoloading of the import hooks is switched off.

Takes the same arguments as `accelerate launch`, and the fields of `TierOffloadConfig` as options before the script.
Owns the hand-over to Accelerate's launcher only; what is started is `lightning_tieroffload.run` around the script.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import _tieroffload_hooks
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.errors import ConfigError, TierOffloadError
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
        SystemExit: by the argument parser; with the script's exit code, where it failed, as it has said itself why.
    """
    _tieroffload_hooks.install()  # before accelerate reads its file, which may have our block
    from accelerate.commands.launch import launch_command

    args = launch_parser().parse_args(list(arguments))
    if args.no_python:
        raise ConfigError("--no_python starts a program that is not Python: tieroffload cannot be in it. Leave it out.")
    if args.config_file is not None and not os.path.isfile(args.config_file):
        raise ConfigError(
            f"--config_file {args.config_file} is not a file. Name one that `accelerate config` has written."
        )
    if not args.module and not os.path.exists(args.training_script):
        raise ConfigError(f"{args.training_script} does not exist. Name a script, or a module after --module.")
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
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        # A launcher's traceback below the script's own would be all that is seen of it.
        sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)
    except ValueError as error:
        if isinstance(error, TierOffloadError):
            raise
        raise ConfigError(f"accelerate launch refuses this: {error}") from error


def _split(value: Any) -> Any:
    if isinstance(value, list):
        return [part for item in value for part in item.split(",") if part]
    return value
