"""Floor 7. Updates on the device of state that is at home in DRAM: up, through the kernel, and down again.

Owns the memory on the device that such state passes through. Homes are the units', arithmetic the kernels'.

[Note: streamed updates] A CPU updates as fast as its cores reach memory, and the link beside it is idle then. So a
share of the units that do not live on the device sends what an update needs through it, batch by batch: weights,
moments and gradients up, the kernel, weights and moments down, each on a stream of its own. Compute waits for none of
it, and nothing of it stays: to everybody else such an update is one of the CPU's, which writes the homes and has a
ticket. A batch's memory is used again behind the copies down, in the device's own order. A lane's thread orders them, a
few ahead: the thread that trains has better to do, and whoever enqueues into a full queue of CUDA's waits. What lies
side by side in DRAM travels in one copy, and batches are laid out once: every call here takes the interpreter's lock
from the thread that trains.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_tieroffload.concepts import Ticket, Tier
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.params import ParamSlot
from lightning_tieroffload.engine.streams import LANDED, CopyTicket, Pipe
from lightning_tieroffload.engine.unit_state import (
    Factor,
    FactorScales,
    UnitState,
    align_nbytes,
    flat_numpy,
    number_format,
)
from lightning_tieroffload.errors import TierOffloadError
from lightning_tieroffload.kernels.split import SplitMaster, num_tie_bytes
from lightning_tieroffload.planning.cost_model import UpdatePlace
from lightning_tieroffload.sizes import round_up

__all__ = ["StreamedSource", "StreamedTicket", "StreamedUpdates", "choose_streamed_units", "runs_on", "staging_nbytes"]

# Batches under way. An engine that copies stays with a stream as long as that has work ready, so weights for compute
# may wait for as many; see [Note: whose turn it is].
_NUM_SLOTS = 2
_MOST_SLOT_NBYTES = 384 << 20
_BUDGET_SHARE = 32  # a slot takes at most this part of the device budget
_GRAIN_NUMEL = 64  # slices begin at whole bytes of tie bits, and at cache lines
_ALIGN_NBYTES = 64
_Ranges = dict[str, tuple[int, int, int]]  # name to (address of its home in DRAM, first byte in it, last)


@dataclass(slots=True)
class StreamedSource:
    """One parameter's share of a streamed update."""

    slot: ParamSlot
    group: dict[str, Any]
    kernel: Any
    entry: dict[str, Any]  # of ``optimizer.state``: its tensors are in DRAM
    grad: torch.Tensor  # in DRAM, readable behind `ready`
    ready: CopyTicket
    factors: list[Factor]


class StreamedTicket:
    """A unit's whole update. Whoever copies its home up may do so behind it without the host's waiting for the copies.

    Not for lanes' threads: they would wait for each other.
    """

    is_streamed = True

    def __init__(self, ordering: Ticket, label: str) -> None:
        self.label = label
        self._ordering = ordering  # the lane's work, which adds what it orders
        self._stores: list[CopyTicket] = []

    def add(self, store: CopyTicket) -> None:
        self._stores.append(store)

    def done(self) -> bool:
        return self._ordering.done() and all(store.done() for store in self._stores)

    def wait(self, timeout_s: float | None = None) -> None:
        self._ordering.wait(timeout_s)
        for store in self._stores:
            store.wait(timeout_s)

    def before_stream(self, stream: Any) -> None:
        self._ordering.wait()
        for store in self._stores:
            order = getattr(store, "before_stream", None)
            if order is None:
                store.wait()
            else:
                order(stream)


class _Slot:
    """Memory of one batch on its way."""

    __slots__ = ("free", "memory")

    def __init__(self, memory: torch.Tensor, free: CopyTicket) -> None:
        self.memory = memory
        self.free = free  # nothing uses it behind this


@dataclass(slots=True)
class _Job:
    """A unit's update, as the lane's thread needs it."""

    unit: UnitState
    sources: Sequence[StreamedSource]
    steps: list[int]  # of each source
    scales: list[Any]
    scalars: list[Any]  # of the kernel, on a GPU
    batches: list[_Batch]
    after: list[CopyTicket]  # what reads or writes the homes before
    compute: CopyTicket  # has made the factors
    label: str


class StreamedUpdates:
    """Streamed updates of the units of ``space``. Called under the residency lock, in the training thread.

    Slots, and the pipe once it is made, are the lane's thread's while anything is under way.

    Args:
        submit: puts work on the lane of streamed updates, which has one thread, ``submit(work, label=, priority=,
            announce=) -> Ticket``.
        get_pool: the kernels' threads, for a DEVICE tier that is host memory.
    """

    def __init__(self, space: DeviceSpace, submit: Callable[..., Ticket], get_pool: Callable[[], Any]) -> None:
        self._space = space
        self._submit = submit
        self._get_pool = get_pool
        self._pipe: Pipe | None = None
        self._slots: list[_Slot] = []
        self.charged_nbytes = 0  # of the device budget
        self._next = 0
        self._laid_out: weakref.WeakKeyDictionary[UnitState, tuple[Any, list[_Batch]]] = weakref.WeakKeyDictionary()
        self._scales = FactorScales(space.device)
        self._scalars: dict[tuple[int, int, int], Any] = {}  # of this step, by what they are made from
        self._tickets: list[StreamedTicket] = []
        # Of the last step: elements, and from when until when.
        self._numel = 0
        self._begin: CopyTicket = LANDED
        self._end: CopyTicket = LANDED

    def begin_step(self) -> None:
        """What is ordered from here on belongs to another step."""
        self._numel = 0
        self._scalars.clear()

    def rate(self) -> float | None:
        """Elements a second of the last step, once it is over; None where there was none, or nobody counted."""
        seconds = self._pipe.seconds(self._begin, self._end) if self._pipe is not None and self._numel else None
        # Two steps in a row: the later one begins before the lane has ordered any of it, and the end is the earlier's.
        return self._numel / seconds if seconds is not None and seconds > 0 else None

    @staticmethod
    def is_chosen(unit: UnitState) -> bool:
        """Whether the plan streams the unit's update."""
        choice = unit.choice
        return choice.update_on is UpdatePlace.DEVICE and choice.state_home is Tier.DRAM and not unit.is_paged

    def can_update(self, unit: UnitState, kernels: Iterable[Any]) -> bool:
        """Whether the plan streams the unit's update, and there are kernels for it here."""
        if not self.is_chosen(unit):
            return False
        return all(runs_on(self._space.device, kernel) and kernel.state_names for kernel in kernels)

    def reserve(self) -> bool:
        """Have the memory that batches pass through. False where the budget has no room for it just now."""
        if self._slots:
            return True
        space = self._space
        account = space.ledger[Tier.DEVICE]
        nbytes = staging_nbytes(account.budget_nbytes)
        if nbytes == 0 or not space.make_room(nbytes, keep=None, what="state on its way", must=False):
            return False
        if self._pipe is None:
            self._pipe = space.streams.make_pipe()
        space.ledger.charge(Tier.DEVICE, nbytes)
        self.charged_nbytes = nbytes
        free = self._pipe.compute_so_far()  # what had this memory before
        for _ in range(_NUM_SLOTS):
            memory = torch.empty(nbytes // _NUM_SLOTS, dtype=torch.uint8, device=space.device)
            if space.poison:
                memory.fill_(255)
                free = self._pipe.compute_so_far()
            self._slots.append(_Slot(memory, free))
        return True

    def release(self) -> bool:
        """Give the memory back, behind what still passes through it. False where there was none."""
        for ticket in self._tickets:
            if not ticket.done():  # one that has failed is over, and has told whom it had to
                ticket.wait()
        self._tickets.clear()
        self._laid_out.clear()
        slots, self._slots = self._slots, []
        nbytes, self.charged_nbytes = self.charged_nbytes, 0
        self._space.ledger.release(Tier.DEVICE, nbytes)
        return bool(slots)

    def forget(self) -> None:
        """After an exception, when nothing should be under way any more. The ledger counts anew."""
        for ticket in self._tickets:
            if not ticket.done():  # Ctrl-C cut off the wait for it: nobody frees memory that it still passes through
                with contextlib.suppress(TierOffloadError):
                    ticket.wait()
        self._tickets.clear()
        self._laid_out.clear()
        self._slots = []
        self.charged_nbytes = 0

    def order(
        self,
        unit: UnitState,
        sources: Sequence[StreamedSource],
        copies: Sequence[CopyTicket],
        priority: int,
        announce: Callable[[StreamedTicket], object],
    ) -> None:
        """Put the unit's update on the lane. ``reserve`` has said that there is room.

        ``copies`` are those under way that read or write the homes. ``announce`` gets the ticket before anything runs.
        """
        assert self._pipe is not None
        on_host = self._space.device.type != "cuda"
        if on_host:
            self._get_pool()  # made in this thread: the lane's would race with it
        steps = [int(source.entry["step"].item()) + 1 if source.kernel.uses_step else 1 for source in sources]
        scales = [() if on_host else self._scales.of(source.factors) for source in sources]
        scalars = [self._scalars_of(source, step) for source, step in zip(sources, steps, strict=True)]
        batches = self._batches_of(unit, sources)
        compute = self._pipe.compute_so_far()
        after = [copy for copy in copies if copy is not LANDED and not copy.done()]
        job = _Job(unit, sources, steps, scales, scalars, batches, after, compute, f"update ({unit.name})")
        if self._numel == 0:
            self._begin = compute
        self._numel += sum(source.slot.numel for source in sources)
        for source in sources:
            down_nbytes = (4 * (1 + len(source.kernel.state_names))) * source.slot.numel
            self._space.moved_nbytes["h2d"] += down_nbytes + source.grad.nbytes
            self._space.moved_nbytes["d2h"] += down_nbytes
        self._tickets = [ticket for ticket in self._tickets if not ticket.done()]
        tickets: list[StreamedTicket] = []

        def announce_ordering(ordering: Ticket) -> None:
            tickets.append(StreamedTicket(ordering, job.label))
            self._tickets += tickets
            announce(tickets[0])

        self._submit(
            lambda: self._order_batches(job, tickets[0]), label=job.label, priority=priority, announce=announce_ordering
        )
        if self._space.no_overlap:
            tickets[0].wait()

    def _order_batches(self, job: _Job, ticket: StreamedTicket) -> None:
        """The lane's work."""
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            for batch in job.batches:
                self._order_batch(job, ticket, batch)

    def _scalars_of(self, source: StreamedSource, step: int) -> Any:
        if self._space.device.type != "cuda":
            return None
        key = (id(source.kernel), id(source.group), step)
        if key not in self._scalars:
            self._scalars[key] = source.kernel.scalars(source.group, step, False)
        return self._scalars[key]

    def _batches_of(self, unit: UnitState, sources: Sequence[StreamedSource]) -> list[_Batch]:
        """Laid out once, as long as everything lies where it lay."""
        homes = [_homes(unit, source, index) for index, source in enumerate(sources)]
        key = [
            (source.slot.index, source.grad.dtype, *home.values()) for source, home in zip(sources, homes, strict=True)
        ]
        found = self._laid_out.get(unit)
        if found is None or found[0] != key:
            made = list(_batches(unit, sources, homes, self.charged_nbytes // _NUM_SLOTS))
            found = self._laid_out[unit] = (key, made)
        return found[1]

    def _order_batch(self, job: _Job, ticket: StreamedTicket, batch: _Batch) -> None:
        pipe = self._pipe
        assert pipe is not None
        into = self._slots[self._next]
        into.free.wait()
        self._next = (self._next + 1) % len(self._slots)
        staged = batch.staged.get(id(into))
        if staged is None:
            staged = batch.staged[id(into)] = _Staged(batch, into.memory)
        label = f"state ({job.unit.name})"
        ready = [job.sources[piece.index].ready for piece in batch.pieces]
        loaded = pipe.load(staged.up, label, [into.free, *(each for each in ready if each is not LANDED), *job.after])

        def call() -> None:
            for piece, tensors in zip(batch.pieces, staged.tensors, strict=True):
                self._update(job, piece.index, tensors)

        worked = pipe.work(call, job.label, [loaded, job.compute], (staged, job.sources, job.scales))
        into.free = self._end = pipe.store(staged.down, label, [worked, *job.after], job.sources)
        ticket.add(into.free)

    def _update(self, job: _Job, index: int, tensors: dict[str, torch.Tensor]) -> None:
        source, step = job.sources[index], job.steps[index]
        kernel = source.kernel
        split = (tensors["high"], tensors["low"], tensors["ties"]) if "high" in tensors else None
        if self._space.device.type == "cuda":
            from lightning_tieroffload.kernels.triton_adam import triton_adam_step

            triton_adam_step(
                tensors.get("master"), tensors["grad"], tensors["exp_avg"], tensors["exp_avg_sq"],
                job.scalars[index], split=split, grad_scales=job.scales[index],
            )  # fmt: skip
            return
        master: Any = (
            SplitMaster(*(each.numpy().view(f"uint{8 * each.itemsize}") for each in split))
            if split is not None
            else tensors["master"].numpy()
        )
        kernel.run(
            self._get_pool(), master, flat_numpy(tensors["grad"]),
            {name: tensors[name].numpy() for name in kernel.state_names}, step=step, group=source.group,
            grad_scales=[factor.value() for factor in source.factors],
            grad_format=number_format(tensors["grad"].dtype), is_new_state=False,
        )  # fmt: skip


@dataclass(slots=True)
class _Piece:
    """One parameter, or a slice of it, in a batch."""

    index: int  # of the source
    views: dict[str, tuple[str, int, int, torch.dtype]]  # name to (range, first byte, last byte, type), as in the home


class _Batch:
    """What goes up, and down again, together."""

    __slots__ = ("pieces", "ranges", "staged")

    def __init__(self) -> None:
        self.pieces: list[_Piece] = []
        self.ranges: _Ranges = {}
        self.staged: dict[int, _Staged] = {}  # by slot

    def grown(self, piece: _Piece, homes: dict[str, int], align_nbytes: int) -> _Ranges | None:
        """The ranges with the piece too; None where it does not lie right behind what is there.

        Padding between neighbours travels along, and is less than what they are aligned to. Nothing else does: it would
        be written down again as it was on its way up, over what others have made of it meanwhile.
        """
        ranges = dict(self.ranges)
        for key, begin, end, _ in piece.views.values():
            home, first, last = ranges.get(key, (homes[key], begin, end))
            if home != homes[key] or begin < first or begin >= last + align_nbytes:
                return None
            ranges[key] = home, first, max(last, end)
        return ranges


class _Staged:
    """A batch in one slot: what is copied, and the tensors of each piece there."""

    __slots__ = ("down", "tensors", "up")

    def __init__(self, batch: _Batch, memory: torch.Tensor) -> None:
        self.up: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.down: list[tuple[torch.Tensor, torch.Tensor]] = []
        staged: dict[str, torch.Tensor] = {}
        at_nbytes = 0
        for name, (home, begin, end) in batch.ranges.items():
            staged[name], there = memory[at_nbytes : at_nbytes + end - begin], _memory_at(home + begin, end - begin)
            at_nbytes += round_up(end - begin, _ALIGN_NBYTES)
            self.up.append((staged[name], there))
            if not name.startswith("grad"):
                self.down.append((there, staged[name]))
        self.tensors = [
            {
                name: staged[key][begin - batch.ranges[key][1] : end - batch.ranges[key][1]].view(dtype)
                for name, (key, begin, end, dtype) in piece.views.items()
            }
            for piece in batch.pieces
        ]


def _memory_at(address: int, nbytes: int) -> torch.Tensor:
    """Host memory as bytes. Refers to nothing: neither counts as a user's, nor keeps it mapped. Sources do that."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _batches(
    unit: UnitState, sources: Sequence[StreamedSource], homes: Sequence[dict[str, int]], slot_nbytes: int
) -> Iterator[_Batch]:
    batch = _Batch()
    for index, source in enumerate(sources):
        for piece in _pieces(unit, source, index, slot_nbytes):
            ranges = batch.grown(piece, homes[index], align_nbytes(unit.device))
            if batch.pieces and (ranges is None or _staged_nbytes(ranges) > slot_nbytes):
                yield batch
                batch = _Batch()
                ranges = batch.grown(piece, homes[index], align_nbytes(unit.device))
            assert ranges is not None
            batch.ranges = ranges
            batch.pieces.append(piece)
    if batch.pieces:
        yield batch


def _staged_nbytes(ranges: _Ranges) -> int:
    return sum(round_up(end - begin, _ALIGN_NBYTES) for _, begin, end in ranges.values())


def _homes(unit: UnitState, source: StreamedSource, index: int) -> dict[str, int]:
    """Addresses in DRAM of what holds what the update reads, by name; all but the gradient is written too."""
    slot = source.slot
    homes: dict[str, int] = {f"grad {index}": source.grad.data_ptr()}
    for name in source.kernel.state_names:
        part = unit.find_state(slot, name, source.entry[name])
        assert part is not None
        assert part.home_flat is not None
        homes[name] = part.home_flat.data_ptr()
    if slot.split is not None:
        assert unit.wire is not None
        assert unit.low is not None
        assert unit.wire.home_flat is not None
        assert unit.low.home_flat is not None
        homes["high"] = unit.wire.home_flat.data_ptr()
        homes |= dict.fromkeys(("low", f"low {index}", f"ties {index}"), unit.low.home_flat.data_ptr())
    else:
        homes[f"master {index}"] = slot.home.data_ptr()
    return homes


def _pieces(unit: UnitState, source: StreamedSource, index: int, slot_nbytes: int) -> Iterator[_Piece]:
    """The parameter in as many slices as it takes."""
    slot, numel = source.slot, source.slot.numel
    at: dict[str, tuple[str, int, torch.dtype]] = {"grad": (f"grad {index}", 0, source.grad.dtype)}
    for name in source.kernel.state_names:
        part = unit.find_state(slot, name, source.entry[name])
        assert part is not None
        at[name] = name, part.offsets[part.slots.index(slot)] * part.dtype.itemsize, part.dtype
    if slot.split is not None:
        high_at, low_at, ties_at = unit.split_offsets(slot)
        at |= {
            "high": ("high", high_at, torch.int16),
            "low": ("low", low_at, torch.int16),
            "ties": ("low", ties_at, torch.uint8),
        }
    else:
        at["master"] = f"master {index}", 0, slot.dtype
    eighths = sum(1 if name == "ties" else 8 * dtype.itemsize for name, (_, _, dtype) in at.items())
    most_numel = (slot_nbytes - 2 * len(at) * _ALIGN_NBYTES) * 8 // eighths // _GRAIN_NUMEL * _GRAIN_NUMEL
    for begin in range(0, numel, most_numel):
        end = min(begin + most_numel, numel)
        views = {}
        for name, (key, base, dtype) in at.items():
            if key == "low" and numel > most_numel:  # of a slice low halves and tie bits lie apart, with others between
                key = f"{name} {index}"
            first, last = (
                (begin // 8, num_tie_bytes(end)) if name == "ties" else (begin * dtype.itemsize, end * dtype.itemsize)
            )
            views[name] = key, base + first, base + last, dtype
        yield _Piece(index, views)


def runs_on(device: torch.device, kernel: Any) -> bool:
    """Whether the kernel has a form for updates on the device; None, for a class without one, has not."""
    families = ("adam", "adamw") if device.type == "cuda" else ("adam", "adamw", "sgd", "lion")
    return kernel is not None and kernel.family in families


def staging_nbytes(budget_nbytes: int) -> int:
    """Bytes of the device budget that streamed updates pass through; 0 where the budget is too small for any."""
    slot_nbytes = min(_MOST_SLOT_NBYTES, budget_nbytes // _BUDGET_SHARE) // 512 * 512
    return _NUM_SLOTS * slot_nbytes if slot_nbytes >= 4096 else 0


def choose_streamed_units(units: Sequence[UnitState], share: float) -> set[UnitState]:
    """So many of the units, by parameters, spread evenly over their order: the CPU's and these are ready in turns."""
    chosen: set[UnitState] = set()
    credit = 0.0
    for unit in units:
        numel = sum(slot.numel for slot in unit.slots if slot.param.requires_grad)
        if not numel or unit.is_paged:
            continue
        credit += share * numel
        if 2 * credit >= numel:
            credit -= numel
            chosen.add(unit)
    return chosen
