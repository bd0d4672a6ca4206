"""Floor 5. What a step costs, unit by unit: seconds, saved bytes, uses. Measured by hooks, while training goes on.

Owns the figures of the steps that it watched, and the rates of the links. Decides nothing:
``engine/profile_maker.py`` makes a ``Profile`` of it.

[Note: whose seconds] Time is cut at each event (a unit's forward begins or ends, its backward begins, backward ends)
and each piece belongs to what ran then: one unit's forward, backward or second forward, or nothing of ours (loss,
optimizer, loader). Without an accelerator the seconds that the engine's own copies took are left out; with one, pieces
end at events on the compute stream, and a step's seconds are those between its first event and its last, since the host
runs ahead. Of several steps the first is left out, which touches memory for the first time and compiles kernels, and so
are those that began or ended with another placement than the one before; of the others the median counts.

[Note: memory outside] On a GPU each piece also has what was allocated there at most beside what the engine held:
activations, gradients of the moment, the loss. CUDA's own peak (``torch.cuda.max_memory_allocated``) is reset at each
piece of a watched step; ``most_allocated_nbytes`` keeps what it would have said.
"""

from __future__ import annotations

import enum
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_tieroffload.engine.nested import tensors_in
from lightning_tieroffload.engine.streams import Streams, make_marks
from lightning_tieroffload.engine.unit_state import UnitState
from lightning_tieroffload.planning.profile import MachineProfile
from lightning_tieroffload.sizes import MiB

__all__ = ["Measured", "Phase", "Profiler", "largest_numel", "machine_name", "measure_machine"]

_PROBE_NBYTES = {"cuda": 64 * MiB, "cpu": 8 * MiB}
_NUM_PROBES = 3
_MOST_PIECES = 50_000  # of one step; a loop that goes on without a step is not watched to its end


class Phase(enum.Enum):
    """What a unit was doing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RERUN = "rerun"


@dataclass(slots=True)
class Measured:
    """One unit in one step. Seconds are of the whole step, bytes of its first micro-batch."""

    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(Phase, 0.0))
    num_forward: int = 0
    saved_nbytes: int = 0
    boundary_nbytes: int = 0
    used_at_s: list[float] = field(default_factory=list)  # since the step began
    outside_nbytes: dict[Phase, int] = field(default_factory=dict)  # most beside the engine; see [Note: memory outside]

    def note_outside(self, phase: Phase, nbytes: int) -> None:
        self.outside_nbytes[phase] = max(nbytes, self.outside_nbytes.get(phase, 0))


@dataclass(slots=True)
class _Step:
    units: dict[int | None, Measured] = field(default_factory=dict)  # in the order of first use; None: the rest
    step_s: float = 0.0
    inputs: tuple[tuple[int, ...], ...] = ()
    numel_of: dict[int, int] = field(default_factory=dict)
    """Unit index to the elements of its largest input: what tells one batch's size from another's."""
    is_whole: bool = True
    is_settled: bool = True  # nothing was placed anew just before it, or in it
    num_backward: int = 0

    def of(self, index: int | None) -> Measured:
        return self.units.setdefault(index, Measured())


@dataclass(frozen=True, slots=True)
class _Update:
    num_step: int
    numel: int
    start_s: float
    end_s: float
    is_later: bool


def largest_numel(value: Any) -> int:
    """Elements of the largest tensor among a module's arguments: what tells one batch's size from another's."""
    return max((tensor.numel() for tensor in tensors_in(value)), default=0)


class Profiler:
    """Watches steps while it is on. Called from the training thread and, in backward, from autograd's.

    Units are kept by their index: what was measured must not keep a dropped model alive.

    Args:
        stalled_s: seconds so far in which compute waited for the engine's copies in its own thread.
        is_excluded: whether a storage (by ``untyped_storage()._cdata``) is a parameter or a buffer.
        take_held: the most bytes that the engine has held on the device since the last call.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        stalled_s: Callable[[], float],
        is_excluded: Callable[[int], bool],
        take_held: Callable[[], int] = lambda: 0,
    ) -> None:
        self.is_on = False
        self.steps: list[_Step] = []
        self.most_allocated_nbytes = 0
        self._updates: list[_Update] = []
        self._take_held = take_held
        self._device = device
        self._marks = make_marks(device, stalled_s)
        self._is_excluded = is_excluded
        self._step: _Step | None = None
        self._pieces: list[tuple[int | None, Phase | None, Any, Any]] = []
        self._now: tuple[int | None, Phase | None] = (None, None)
        self._around: list[tuple[int | None, Phase | None]] = []
        self._first: Any = None
        self._last: Any = None
        self._began_s = 0.0
        self._thread = 0
        self._owner_of: dict[int, tuple[int | None, int, bool]] = {}  # storage: (unit, bytes, is an input)
        self._is_first_pass = True

    # ------------------------------------------------------------------------------------------------- steps
    def begin(self) -> None:
        """Watch from here on; what an earlier watch has found is dropped."""
        self.is_on = True
        self.steps.clear()
        self._updates = []
        self._take_outside()
        self._begin_step()

    def end_step(self, *, is_settled: bool = True) -> int:
        """One step has ended. Returns how many whole ones have been seen."""
        step = self._step
        if step is not None and step.num_backward > 0:
            self._switch(None, None)
            step.is_settled = is_settled
            step.step_s = time.perf_counter() - self._began_s
            self._marks.settle()
            if self._marks.counts_waits:  # the host is ahead of compute, and waits for it here only
                step.step_s = self._marks.seconds(self._first, self._last)
            for unit, phase, start, end in self._pieces:
                if phase is not None:
                    step.of(unit).seconds[phase] += self._marks.seconds(start, end)
            for unit, nbytes, is_input in self._owner_of.values():
                measured = step.of(unit)
                measured.saved_nbytes += nbytes
                measured.boundary_nbytes += nbytes if is_input else 0
            if step.is_whole:
                self.steps.append(step)
        self._begin_step()
        return len(self.steps)

    def end(self) -> None:
        """Stop watching; the figures stay."""
        self.is_on = False
        self._step = None
        self._pieces = []
        self._owner_of = {}

    def _begin_step(self) -> None:
        self._step = _Step()
        self._pieces = []
        self._owner_of = {}
        self._is_first_pass = True
        self._now = (None, None)
        self._around = []
        self._thread = threading.get_ident()
        self._began_s = time.perf_counter()
        self._first = self._last = self._marks.mark()

    def _take_outside(self) -> int | None:
        nbytes = self._marks.take_peak_nbytes()
        held_nbytes = self._take_held()
        if nbytes is None:
            return None
        self.most_allocated_nbytes = max(self.most_allocated_nbytes, nbytes)
        return max(0, nbytes - held_nbytes)

    def _switch(self, unit: int | None, phase: Phase | None) -> None:
        if len(self._pieces) + len(self._owner_of) > _MOST_PIECES:
            self._step, self._pieces, self._owner_of = None, [], {}
            return
        mark = self._marks.mark()
        self._pieces.append((*self._now, self._last, mark))
        outside_nbytes = self._take_outside()
        if outside_nbytes is not None and self._step is not None:
            ran, ran_phase = self._now
            self._step.of(ran).note_outside(ran_phase or Phase.FORWARD, outside_nbytes)
        self._last = mark
        self._now = (unit, phase)

    # ------------------------------------------------------------------------------------------------- hooks
    def enter(self, unit: UnitState, inputs: Any, *, is_rerun: bool) -> None:
        """A forward of the unit begins."""
        step = self._step
        if step is None:
            return
        if threading.get_ident() != self._thread and not is_rerun:
            step.is_whole = False  # forwards in several threads: their pieces cannot be told apart
        measured = step.of(unit.index)
        measured.used_at_s.append(time.perf_counter() - self._began_s)
        if not is_rerun:
            measured.num_forward += 1
            shapes = tuple(tuple(t.shape) for t in tensors_in(inputs))
            if not step.inputs:
                step.inputs = shapes
            step.numel_of[unit.index] = max(largest_numel(inputs), step.numel_of.get(unit.index, 0))
            if self._is_first_pass:
                for tensor in tensors_in(inputs):
                    self._note(unit.index, tensor, is_input=True)
        self._around.append(self._now)
        self._switch(unit.index, Phase.RERUN if is_rerun else Phase.FORWARD)

    def leave(self, result: Any) -> None:
        """The forward that was entered last has ended; ``result`` is what it returned, None after an exception."""
        if self._step is None or not self._around:
            return
        unit, phase = self._now
        self._switch(*self._around.pop())
        if phase is Phase.FORWARD and unit is not None:
            for tensor in tensors_in(result):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._prehook(unit, self._step))
                    break

    def _prehook(self, unit: int, step: _Step) -> Callable[[Any], None]:
        def begin_backward(_: Any) -> None:
            if self._step is step:
                step.of(unit).used_at_s.append(time.perf_counter() - self._began_s)
                self._is_first_pass = False
                self._switch(unit, Phase.BACKWARD)

        return begin_backward

    def end_backward(self) -> None:
        """Called when a backward has ended."""
        if self._step is not None:
            self._step.num_backward += 1
            self._is_first_pass = False
            self._around = []
            self._switch(None, None)

    def saved(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor that is no parameter."""
        if self._step is not None and self._is_first_pass:
            self._note(self._now[0], tensor, is_input=False)

    def _note(self, unit: int | None, tensor: torch.Tensor, *, is_input: bool) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        key = storage._cdata
        known = self._owner_of.get(key)
        if known is None:
            if not self._is_excluded(key):
                self._owner_of[key] = (unit, storage.nbytes(), is_input)
        elif is_input and not known[2]:  # what the unit before has saved too is this one's input, and stays with it
            self._owner_of[key] = (unit, known[1], True)

    def updated(self, num_step: int, numel: int, start_s: float, *, is_later: bool) -> None:
        """An update on the CPU, ordered by that step, began to compute at ``start_s`` and has just ended.

        ``is_later``: it was the second pass, over the moments. Called from the update lane.
        """
        if self.is_on:
            self._updates.append(_Update(num_step, numel, start_s, time.perf_counter(), is_later))

    # ------------------------------------------------------------------------------------------------- figures
    def order(self) -> list[int]:
        """Units, by their index, in the order of their first use in the last step."""
        return [unit for unit in self.steps[-1].units if unit is not None] if self.steps else []

    def _warm(self) -> list[_Step]:
        return [step for step in self.steps[1:] if step.is_settled] or self.steps[1:] or self.steps

    def num_settled(self) -> int:
        """How many of the watched steps tell what later ones will be like."""
        return sum(step.is_settled for step in self.steps[1:])

    def update_s_per_numel(self, *, is_later: bool = False, must_be_warm: bool = False) -> float | None:
        """Seconds an element of updates on the CPU, however many ran at a time; None where none was seen.

        Updates of the first watched step make the state: they count only where there are no others, and with
        ``must_be_warm`` not even then.
        """
        first = min((update.num_step for update in self._updates), default=0)
        seen = [u for u in self._updates if u.num_step > first] or ([] if must_be_warm else self._updates)
        seen = sorted((u for u in seen if u.is_later == is_later), key=lambda u: u.start_s)
        busy_s, until_s = 0.0, 0.0
        for update in seen:
            busy_s += max(0.0, update.end_s - max(update.start_s, until_s))
            until_s = max(until_s, update.end_s)
        numel = sum(update.numel for update in seen)
        return busy_s / numel if numel and busy_s > 0 else None

    def step_s(self) -> float:
        """Seconds of a step, watching included."""
        return statistics.median(step.step_s for step in self._warm())

    def usual(self, unit: int | None) -> Measured:
        """The unit's figures: the median seconds, the most bytes, uses as in the last step."""
        seen = [step.units[unit] for step in self._warm() if unit in step.units]
        if not seen:
            return Measured()
        return Measured(
            seconds={phase: statistics.median(m.seconds[phase] for m in seen) for phase in Phase},
            num_forward=seen[-1].num_forward,
            saved_nbytes=max(m.saved_nbytes for m in seen),
            boundary_nbytes=max(m.boundary_nbytes for m in seen),
            used_at_s=seen[-1].used_at_s,
            outside_nbytes={phase: max(m.outside_nbytes.get(phase, 0) for m in seen) for phase in Phase},
        )


def _best_s(calls: Iterable[Callable[[], Any]], settle: Callable[[], None]) -> float:
    best_s = float("inf")
    for call in calls:
        settle()
        start_s = time.perf_counter()
        call()
        settle()
        best_s = min(best_s, time.perf_counter() - start_s)
    return max(best_s, 1e-9)


def machine_name(device: torch.device) -> str:
    """The kind of machine: profiles measured on one hold for another of the same name."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{kind}, {os.cpu_count()} cores"


def measure_machine(device: torch.device, streams: Streams) -> MachineProfile:
    """Rates of the links between device and DRAM, by copies of a few megabytes; other rates are the defaults.

    Without an accelerator the DEVICE tier is host memory: copies and updates take the processors from compute, so that
    nothing of them hides.
    """
    is_cuda = device.type == "cuda"
    nbytes = _PROBE_NBYTES[device.type]
    with torch.inference_mode(False), torch.no_grad():
        host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        back = torch.ones(nbytes, dtype=torch.uint8, pin_memory=is_cuda, device="cpu")
        there = torch.ones(nbytes, dtype=torch.uint8, device=device)
        there2 = torch.ones(nbytes, dtype=torch.uint8, device=device)

    def settle() -> None:
        if is_cuda:
            torch.cuda.synchronize(device)

    def up() -> None:
        streams.upload([(there, host)], "probe").wait()

    def down() -> None:
        streams.download([(back, there2)], "probe").wait()

    def both() -> None:
        tickets = [streams.upload([(there, host)], "probe"), streams.download([(back, there2)], "probe")]
        for ticket in tickets:
            ticket.wait()

    up_s, down_s, both_s = (_best_s([call] * _NUM_PROBES, settle) for call in (up, down, both))
    rates = {"h2d_bytes_per_s": nbytes / up_s, "d2h_bytes_per_s": nbytes / down_s, "name": machine_name(device)}
    if is_cuda:
        # Budgets are held by exact accounts, of bytes that torch allocates; what it reserves above them is not in them.
        return MachineProfile(**rates, pcie_bytes_per_s=2 * nbytes / both_s, allocator_slack_frac=0.0)  # type: ignore[arg-type]
    return MachineProfile(
        **rates,  # type: ignore[arg-type]
        pcie_bytes_per_s=2 * nbytes / both_s,
        dram_bytes_per_s=1e12,  # the copies above are DRAM traffic already
        overlap_loss_frac=1.0,
        update_loss_frac=1.0,
        allocator_slack_frac=0.0,
    )
