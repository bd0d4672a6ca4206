"""Floor 0. A file of text that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os

__all__ = ["write_whole"]


def write_whole(path: str, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader, or a run that ends here, finds the old content or the new.

    Raises:
        OSError: it could not be written; what was there before is there still.
    """
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
