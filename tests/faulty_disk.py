"""A disk that fails on demand: os.preadv and os.pwritev behind a wrapper, for tests of the store and of the engine."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest


class FaultyDisk:
    """Faults drawn from a seed, or said call by call, on files whose path holds ``only``.

    ``rates`` gives each fault's probability a call: "eio", "enospc", "short" (half of it is moved), "interrupted"
    (EINTR), "again" (EAGAIN), "flip" (one byte arrives changed, in memory or in the file). ``verbs`` limits them to
    "read" or "write". ``on_call`` may raise or sleep: it gets the verb, the call's number from 1 on and the path.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        seed: int = 0,
        rates: dict[str, float] | None = None,
        verbs: tuple[str, ...] = ("read", "write"),
        only: str = "data-",
        slow_s: float = 0.0,
        on_call: Callable[[str, int, str], None] | None = None,
    ) -> None:
        self.rates = rates or {}
        self.verbs = verbs
        self.only = only
        self.slow_s = slow_s
        self.on_call = on_call
        self.injected: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._real = {"read": os.preadv, "write": os.pwritev}
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(os, "preadv", lambda *arguments: self._call("read", *arguments))
        monkeypatch.setattr(os, "pwritev", lambda *arguments: self._call("write", *arguments))

    def heal(self) -> None:
        """No fault from now on."""
        self.rates, self.slow_s, self.on_call = {}, 0.0, None

    def _call(self, verb: str, fd: int, parts: Any, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if self.only not in path or verb not in self.verbs:
            return self._real[verb](fd, parts, offset)
        with self._lock:
            self.num_calls[verb] += 1
            num = self.num_calls[verb]
            kind = self._draw()
            flip = self._random.randrange(1 << 30)
        if self.slow_s:
            time.sleep(self.slow_s)
        if self.on_call is not None:
            self.on_call(verb, num, path)
        code = {"eio": errno.EIO, "enospc": errno.ENOSPC, "interrupted": errno.EINTR, "again": errno.EAGAIN}.get(kind)
        if code is not None:
            raise OSError(code, os.strerror(code))
        (part,) = parts
        if kind == "short" and len(part) > 1:
            part = part[: len(part) // 2]
        if kind == "flip" and verb == "write":
            changed = bytearray(part)
            changed[flip % len(changed)] ^= 1 + flip % 255
            with open(path, "r+b", buffering=0) as other:  # the same file, past the alignment that direct I/O wants
                os.lseek(other.fileno(), offset, os.SEEK_SET)
                assert other.write(changed) == len(changed)
                os.fsync(other.fileno())
            return len(part)
        moved = self._real[verb](fd, [part], offset)
        if kind == "flip":
            part[flip % moved] ^= 1 + flip % 255
        return moved

    def _draw(self) -> str:
        value = self._random.random()
        for kind, rate in self.rates.items():
            value -= rate
            if value < 0:
                self.injected[kind] += 1
                return kind
        return ""
