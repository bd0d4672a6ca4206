"""Floor 3. The configuration's fields as command-line options, the same for every command.

Owns the spelling (`--device-budget 22GiB` for `device_budget`) and nothing else: values are checked by
`TierOffloadConfig`, which also says what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.errors import ConfigError

__all__ = ["SETTINGS_HELP", "named_settings", "print_json", "refuse_rest", "settings_last", "take_settings"]

_FIELDS = {
    "--" + entry.name.replace("_", "-"): entry.name
    for entry in dataclasses.fields(TierOffloadConfig)
    if not entry.name.startswith("_")
}
_SEVERAL = ("nvme_paths", "units", "debug")

SETTINGS_HELP = (
    "Every setting of the configuration is an option too: "
    + ", ".join(_FIELDS)
    + ". --config FILE reads them from YAML; --nvme-paths may be given several times."
)


def take_settings(arguments: Sequence[str]) -> tuple[TierOffloadConfig, list[str]]:
    """Take the configuration's options out of a command line; gives the configuration and what is left.

    Order of precedence: options, then `--config FILE`, then the environment.

    Raises:
        ConfigError: an option without a value, or a value that its setting does not allow.
    """
    chosen: dict[str, Any] = {}
    base = TierOffloadConfig.from_env()
    rest: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=")
        if word == "--":
            rest += left
            break
        if option not in _FIELDS and option != "--config":
            rest.append(word)
            continue
        if not equals:
            if not left:
                raise ConfigError(f"{option} needs a value.")
            value = left.pop(0)
        if option == "--config":
            base = TierOffloadConfig.from_file(value).merged_over(base)
        elif _FIELDS[option] in _SEVERAL and value.lower() not in ("auto", "none"):
            chosen.setdefault(_FIELDS[option], []).append(value)
        else:
            chosen[_FIELDS[option]] = value
    return TierOffloadConfig(**chosen).merged_over(base), rest


def named_settings(arguments: Sequence[str]) -> frozenset[str]:
    """The settings that stand on a command line as options, by their names in the configuration."""
    settings: set[str] = set()
    left = list(arguments)
    while left:
        option, equals, _ = left.pop(0).partition("=")
        if option == "--":
            break
        if option not in _FIELDS and option != "--config":
            continue
        settings.update([_FIELDS[option]] if option in _FIELDS else [])
        del left[: 0 if equals else 1]
    return frozenset(settings)


def settings_last(arguments: Sequence[str]) -> list[str]:
    """The same command line with settings and their values behind everything else.

    A parser that does not know them would take the value of one that stands first for a positional argument.
    """
    own: list[str] = []
    settings: list[str] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*own, *settings, word, *left]
        option, equals, _ = word.partition("=")
        is_setting = option in _FIELDS or option == "--config"
        (settings if is_setting else own).append(word)
        if is_setting and not equals and left:
            settings.append(left.pop(0))
    return own + settings


def refuse_rest(rest: Sequence[str]) -> None:
    """For a command that takes settings and nothing else: refuse what `take_settings` left over.

    Raises:
        ConfigError: there is something; names it, and the nearest setting.
    """
    if not rest:
        return
    if not rest[0].startswith("--"):
        raise ConfigError(f"{rest[0]!r} is not an option. {SETTINGS_HELP}")
    name, equals, value = rest[0].removeprefix("--").partition("=")
    if not equals and rest[1:] and not rest[1].startswith("--"):
        value = rest[1]
    TierOffloadConfig.from_kwargs(**{name.replace("-", "_"): value})


def print_json(result: object) -> None:
    """What `--json` prints: one document on standard output, nothing else."""
    print(json.dumps(result, indent=2, sort_keys=True, default=str))
