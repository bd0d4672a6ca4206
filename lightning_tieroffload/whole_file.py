"""Floor 0. Files of text: ones that appear whole or not at all, and JSON out of files that anybody may have written."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

__all__ = ["parse_json", "write_whole"]


def parse_json(text: str) -> Any:
    """What ``json.loads`` gives, and for whatever is wrong with the text ValueError: nesting without end too."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_whole(path: str | os.PathLike[str], text: str, *, is_synced: bool = False) -> None:
    """Write ``text`` to ``path`` so that a reader, or a run that ends here, finds the old content or the new.

    ``is_synced``: the disk has the text before it takes the old one's place, so that also a machine that ends here
    leaves one of the two.

    Raises:
        OSError: it could not be written; what was there before is there still.
    """
    beside = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
