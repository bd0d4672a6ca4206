"""Floor 0. Byte counts: parsing what people write, printing what people read."""

from __future__ import annotations

import re

from lightning_tieroffload.errors import ConfigError

__all__ = ["GiB", "KiB", "MiB", "TiB", "format_nbytes", "parse_nbytes", "round_up", "shown"]

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

_FACTORS = {
    "": 1, "b": 1,
    "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB,
    "k": KiB, "m": MiB, "g": GiB, "t": TiB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_MOST_NBYTES = 2**63 - 1  # what offsets in files and memory can count
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_nbytes(value: int | float | str, *, key: str = "size") -> int:
    """Bytes from ``8589934592``, ``"8GiB"``, ``"8 GB"`` (10**9), ``"512M"`` (MiB).

    Raises ``ConfigError`` that names ``key`` for anything else, negative numbers and those of 8 EiB and more included.
    """
    given = value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f'{key} must be a number of bytes or a string such as "22GiB", not {shown(value)}.')
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match.group(2).lower() not in _FACTORS:
            raise ConfigError(
                f"{key}={shown(value)} is not a size. "
                'Write a number of bytes or a string such as "22GiB", "512MiB", "8GB".'
            )
        number, factor = match.group(1), _FACTORS[match.group(2).lower()]
        # Python reads no integer of thousands of digits, and a float of hundreds as infinite.
        value = int(number) * factor if number.isdigit() and len(number) < 400 else float(number) * factor
    if not 0 <= value <= _MOST_NBYTES:
        raise ConfigError(f"{key}={shown(given)} must be a number of bytes from 0 to {_MOST_NBYTES} (8 EiB).")
    return int(value)


def format_nbytes(nbytes: int | float) -> str:
    """``"1.9 GiB"``, ``"512 B"``: three significant digits and a binary unit, for people."""
    sign, left = ("-", -float(nbytes)) if nbytes < 0 else ("", float(nbytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if left < 1024:
            return f"{sign}{left:.0f} {unit}" if unit == "B" or left >= 100 else f"{sign}{left:.3g} {unit}"
        left /= 1024
    return f"{sign}{left:.3g} TiB"


def shown(value: object) -> str:
    """``repr(value)`` for an error message: no longer than a line, and of integers that Python does not print too."""
    try:
        text = repr(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:97]}..."


def round_up(nbytes: int, multiple_nbytes: int) -> int:
    """The smallest multiple of ``multiple_nbytes`` that is at least ``nbytes``."""
    return -(-nbytes // multiple_nbytes) * multiple_nbytes
