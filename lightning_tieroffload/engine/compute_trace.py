"""Floor 2. Compute windows of a timeline: a unit's forward, recompute and backward, as hooks see them.

Owns nothing but the windows that are open. A forward is what its module's hooks enclose, the unit's parameters being
there already. A unit's backward begins when the gradient of its output is there, and ends where the next one's begins,
or with backward itself; what is recomputed for it lies inside. Beside a device the host only enqueues: that has a track
of its own, since a host that is late is what a device waits for without a copy to blame.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_tieroffload.engine.nested import tensors_in
from lightning_tieroffload.trace import TraceRecorder

__all__ = ["ComputeTrace"]


class ComputeTrace:
    """Tells a recorder of compute windows. Called from the threads that compute, autograd's among them.

    ``is_one_stream``: compute of all threads is one stream's, so that one thread may end what another one began.
    """

    def __init__(self, recorder: TraceRecorder, *, is_one_stream: bool) -> None:
        self._recorder = recorder
        self._is_one_stream = is_one_stream
        self._backwards: dict[int, tuple[str, Any]] = {}  # thread to (unit, begin)

    def begin(self, *, in_backward: bool) -> Any:
        """A unit's forward begins. Hand what this returns to ``end``."""
        if not in_backward:
            self._backwards.pop(threading.get_ident(), None)  # of a backward that an exception ended
        return self._recorder.mark(), time.perf_counter()

    def end(self, unit: str, begin: Any, result: Any, *, in_backward: bool) -> None:
        """It ends; ``result`` is what it returned, None after an exception."""
        kind = "recompute" if in_backward else "forward"
        mark, begin_s = begin
        self._recorder.add("compute", f"{kind} ({unit})", mark, self._recorder.mark())
        if self._is_one_stream:
            self._recorder.add("host", f"enqueues {kind} ({unit})", begin_s, time.perf_counter())
        if in_backward:
            return
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._prehook(unit))
                return

    def _prehook(self, unit: str) -> Callable[[Any], None]:
        def begin_backward(_: Any) -> None:
            now = self._recorder.mark()
            thread = threading.get_ident()
            self._end_one(thread, now)
            self._backwards[thread] = unit, now

        return begin_backward

    def _end_one(self, thread: int, now: Any) -> None:
        found = self._backwards.pop(thread, None)
        if found is not None:
            self._recorder.add("compute", f"backward ({found[0]})", found[1], now)

    def end_backward(self) -> None:
        """A backward has ended."""
        now = self._recorder.mark()
        for thread in list(self._backwards) if self._is_one_stream else [threading.get_ident()]:
            self._end_one(thread, now)
