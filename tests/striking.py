"""Ctrl-C at a chosen point of the package's code, the same point each time.

Python delivers a signal to the main thread where its interpreter looks: after a call of a C function, at the start of a
Python function, at a jump backwards. ``Strike`` counts these places in the package's own frames and makes SIGINT
pending at the n-th, from a trace function that gives the interpreter no chance to look before the traced frame goes on.
"""

from __future__ import annotations

import _thread
import dis
import os
import signal
import sys
import time
from types import CodeType, FrameType, TracebackType
from typing import Any

import lightning_tieroffload

_PACKAGE = os.path.dirname(lightning_tieroffload.__file__) + os.sep
_LOOKS = frozenset(
    dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME") if name in dis.opmap
)


class _Signal(int):
    """Reading ``pending`` makes the signal pending, in C and from no call instruction."""

    pending = property(_thread.interrupt_main)


_SIGINT = _Signal(signal.SIGINT)


class Strike:
    """While open, SIGINT at the ``at``-th place where the package's code can be interrupted; 0: never.

    ``places`` lists every place that was passed, as (file, line, index of the instruction). ``since_s`` is when it
    struck, or when it was opened: what comes before the strike is traced and slow. ``is_at_entry``: at the start of a
    function, as if behind the call of a C function in its place.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.is_at_entry = False
        self.places: list[tuple[str, int, int]] = []
        self._code: dict[CodeType, bytes] = {}

    def __enter__(self) -> Strike:
        self._before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self._trace_before = sys.gettrace()
        self.since_s = time.monotonic()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        sys.settrace(self._trace_before)
        signal.signal(signal.SIGINT, self._before)

    @property
    def has_struck(self) -> bool:
        return 0 < self.at <= len(self.places)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if frame.f_code not in self._code:
            self._code[frame.f_code] = frame.f_code.co_code
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and self._code[frame.f_code][frame.f_lasti] in _LOOKS:
            self.places.append((frame.f_code.co_filename[len(_PACKAGE) :], frame.f_lineno, frame.f_lasti))
            if len(self.places) == self.at:
                self.since_s = time.monotonic()
                self.is_at_entry = self._code[frame.f_code][frame.f_lasti] == dis.opmap.get("RESUME")
                _SIGINT.pending  # noqa: B018
        return self._on_opcode
