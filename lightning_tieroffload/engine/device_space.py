"""Floor 6. What is on the device: fetches, evictions, prefetches, leases, budgets. The one writer of residency.

One ``DeviceSpace`` serves every engine of a process on one device, so that a policy and a reference model share one
budget. It decides with the predicted order of uses (a hint) and acts through ``Streams``. What user code leads to from
any thread takes the residency lock itself (windows, touch, settle_home, the order_ methods, refresh, reset, units that
come and go); what other parts of the engine compose (make_room, prefetch, note_use, ensure_resident, wait_update,
download, upload) is called with it held. Workers never take it, so waiting for one under the lock cannot deadlock.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from lightning_tieroffload.concepts import D2H, H2D, Role, Ticket, Tier
from lightning_tieroffload.engine.activations import ActivationStore
from lightning_tieroffload.engine.host_space import HostSpace
from lightning_tieroffload.engine.order import Phase, UseOrder
from lightning_tieroffload.engine.params import (
    AutocastParameter,
    ComputeParameter,
    GuardedParameter,
    PagedParameter,
    ParamSlot,
)
from lightning_tieroffload.engine.streams import LANDED, CopyTicket, Pairs, Streams, make_streams
from lightning_tieroffload.engine.unit_state import (
    Form,
    HostBlock,
    OtherCopy,
    Part,
    Segment,
    UnitState,
    WireState,
)
from lightning_tieroffload.errors import CapacityError, TierOffloadError
from lightning_tieroffload.memory.arena import Block
from lightning_tieroffload.residency import Ledger, ResidencyTable
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.trace import TraceRecorder

__all__ = ["DeviceSpace", "has_modes", "is_in_transform", "is_seen", "outside_transforms"]

_OTHERS_READ_S = 1.0


def is_in_transform() -> bool:
    """Whether the call comes from inside a ``torch.func`` transform."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_seen() -> bool:
    """Whether a dispatch mode of others sees the operations of this thread. See [Note: modes of others]."""
    num_modes = torch._C._len_torch_dispatch_stack()
    if num_modes == 0:
        return False
    modes = [torch._C._get_dispatch_stack_at(index) for index in range(num_modes)]
    return not all(getattr(type(mode), "is_engines", False) for mode in modes)


def _is_streamed(update: Any) -> bool:
    """Whether the update goes through the device, which orders copies behind it. See [Note: streamed updates]."""
    return getattr(update, "is_streamed", False)


_Context = contextlib.AbstractContextManager[Any]
_NOWHERE: _Context = contextlib.nullcontext()


def outside_transforms() -> _Context:
    """The engine's own copies are no part of a ``torch.func`` transform that the user's call is in.

    Nor does a mode see them: a selective checkpoint's counts operations, and keeps what they return; a function
    mode may put them on another device.
    """
    if is_in_transform():
        return cast(_Context, torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack())
    return _outside_modes() if has_modes() else _NOWHERE


def has_modes() -> bool:
    """Whether there is a dispatch mode or a function mode on this thread, whoever's."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._len_torch_function_stack() > 0


@contextlib.contextmanager
def _outside_modes() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class DeviceSpace:
    """Residency of every managed unit on one device.

    Args:
        device: where compute happens.
        budget_nbytes: most bytes that may be held per tier.
        prefetch_units: how many coming uses to fetch ahead, where there is room.
        poison: fill device memory with NaN before it is written, so that a missing wait shows.
        no_overlap: wait for every copy at once.
        delay_seed: put copies off as long as possible (host only); see ``streams.DelayedStreams``.
        trace: who records what runs when; None where nobody does.
    """

    def __init__(
        self,
        device: torch.device,
        budget_nbytes: dict[Tier, int],
        *,
        prefetch_units: int,
        poison: bool,
        no_overlap: bool,
        delay_seed: int | None,
        trace: TraceRecorder | None = None,
    ) -> None:
        self.device = device
        self.trace = trace
        self.table = ResidencyTable()
        self.ledger = Ledger(budget_nbytes)
        self.order = UseOrder()
        self.prefetch_units = prefetch_units
        self.poison = poison
        self.no_overlap = no_overlap
        # Weak: a unit lives as long as one of its parameters does, whether anybody called `close` or not.
        self.by_storage: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        self._unit_at: weakref.WeakValueDictionary[int, UnitState] = weakref.WeakValueDictionary()
        self._dead: collections.deque[tuple[str, list[int]]] = collections.deque()  # shard and charge of gone parts
        self.wire_dtype: torch.dtype | None = None  # what autocast cast to when a window last opened
        self.num_autocasts = 0  # outermost contexts of autocast that have ended
        self.cached_casts_nbytes = 0  # of 16-bit copies that autocast keeps of weights, beside what the budget covers
        self.kept_nbytes = 0  # of device_budget, for activations that a plan keeps: room that fetches leave if they can
        self.moved_nbytes = {"h2d": 0, "d2h": 0, "read": 0, "write": 0}
        self.stall_s = {"h2d": 0.0, "d2h": 0.0, "read": 0.0, "write": 0.0, "update": 0.0}
        # Told of weights that were or will be written, of units of which casts are alive, and if the home has the old.
        self.on_written: Callable[[Sequence[ParamSlot], bool], None] = lambda slots, is_there: None
        self.lend_host: Callable[[int], Block | None] = lambda nbytes: None  # DRAM for old weights; None: there is none
        self.is_worker: Callable[[], bool] = lambda: False  # whether the calling thread is one of the engine's own
        self.on_saved: Callable[[torch.Tensor], None] | None = None  # told of each saved tensor that is no parameter
        self.num_prefetch_misses = 0
        self.num_fetches = 0
        self._streams: Streams = make_streams(device, on_stall=self.add_stall, delay_seed=delay_seed, trace=trace)
        self._pid = os.getpid()
        # Gradients give room: first those on their way down, behind their copies; with True also those that wait on the
        # device for an update. False where there is nothing left to give.
        self.on_pressure: Callable[[bool], bool] = lambda must: False
        self._lent: list[Part] = []  # on the device as the user's memory, uncharged
        self._forward_threads: set[int] = set()
        self._has_several_threads = False
        self._touched: list[Part] = []  # what calls of user code outside windows are using right now
        self._distance_of: dict[int, int] = {}
        self._forward_of: dict[int, int] = {}
        self._distance_key: Any = None
        self._next_index = 0
        self.host = HostSpace(
            self.table,
            self.ledger,
            next_uses=self._distances,
            next_updates=self._update_order,
            add_stall=self.add_stall,
            moved_nbytes=self.moved_nbytes,
            no_overlap=no_overlap,
        )

        self.host.find_copy = self._find_copy
        self.host.locks_pages = device.type == "cuda"

    @property
    def lock(self) -> Any:
        return self.table.lock

    @property
    def units(self) -> list[UnitState]:
        return list(self._unit_at.values())

    @property
    def _spare_nbytes(self) -> int:
        """What fetches leave of the budget, if they can."""
        return self.cached_casts_nbytes + self.kept_nbytes

    def end_autocast(self) -> None:
        """Autocast's outermost context has ended: its casts are gone."""
        self.num_autocasts += 1

    @property
    def streams(self) -> Streams:
        """Who copies; for what is no unit's (the profiler's probe)."""
        return self._streams

    def make_activation_store(
        self, is_excluded: Callable[[int], bool], headroom_nbytes: Callable[[], int], *, must_fit: bool
    ) -> ActivationStore:
        """A store for saved activations that copies with this space's streams."""

        def on_moved(kind: str, nbytes: int) -> None:
            self.moved_nbytes[kind] += nbytes

        return ActivationStore(
            self._streams,
            pin=self.device.type == "cuda",
            is_excluded=is_excluded,
            headroom_nbytes=headroom_nbytes,
            must_fit=must_fit,
            on_moved=on_moved,
            unit_now=self._name_of_last_use,
            poison=self.poison,
        )

    def _name_of_last_use(self) -> str:
        unit = self._unit_at.get(self.order.last[0]) if self.order.last is not None else None
        return unit.name if unit is not None else ""

    def add_stall(self, kind: str, seconds: float, what: str = "") -> None:
        """Count what compute waited; what a worker waits for is its work's business, and nobody's stall by itself.

        Called when the waiting ends. ``what`` was waited for, with the unit's name, for the timeline.
        """
        if not self.is_worker():
            self.stall_s[kind] += seconds
            if self.trace is not None:
                now_s = time.perf_counter()
                self.trace.add("stalls", what or kind, now_s - seconds, now_s)

    def check_process(self) -> None:
        """A forked child has neither the threads nor the mapped memory of its parent."""
        if os.getpid() != self._pid:
            raise TierOffloadError(
                "This model is offloaded by tieroffload in the parent process; a forked worker cannot read its "
                "parameters. Pass plain tensors (for example model.state_dict() taken before the fork) to workers."
            )

    # ---------------------------------------------------------------------------------------- units come and go
    def new_index(self) -> int:
        with self.lock:
            self._next_index += 1
            return self._next_index - 1

    def add(self, unit: UnitState) -> None:
        """List a unit whose values are in its home and whose device storages are released."""
        with self.lock:
            self._forget_dead()
            for part in unit.home_parts:
                self._add_part(part)
            self._unit_at[unit.index] = unit
            for slot in unit.slots:
                slot.param.__class__ = PagedParameter
            self._count_homes()

    def _add_part(self, part: Part) -> None:
        # A finaliser may run anywhere, with the lock held or not: it only says so. See `_forget_dead`.
        weakref.finalize(part, self._dead.append, (part.shard, part.charge)).atexit = False
        if part.is_for_compute:
            self.by_storage[part.key] = part
        self.table.add(part.shard, Tier.DRAM, valid_on=[Tier.DRAM])
        self._remember_versions(part)

    def _count_homes(self) -> None:
        self.ledger[Tier.DRAM].home_nbytes = sum(unit.nbytes for unit in self.units)

    def _forget_dead(self) -> None:
        """Take parts whose parameters are gone, though nobody closed their engine, out of the books."""
        while self._dead:
            shard, charge = self._dead.popleft()
            self.table.remove(shard)
            nbytes, charge[0] = charge[0], 0
            self.ledger.release(Tier.DEVICE, nbytes)
        self._count_homes()

    def add_wire(self, unit: UnitState, dtype: torch.dtype) -> None:
        """Give a unit's castable weights a wire part, made from their full one."""
        with self.lock:
            wire = unit.make_wire(dtype)
            self._add_part(wire)
            unit.wire = wire

    def split_home(self, unit: UnitState) -> bool:
        """Make the home of a bf16 wire part a split master. False where something holds a form of it just now."""
        with self.lock:
            full, wire = unit.castable_part, unit.wire
            assert wire is not None
            self.settle_home(unit, to_write=unit.param_block.is_paged)
            if self._is_held(full) or self._is_held(wire):
                return False
            for part in (full, wire):
                if part.is_resident:
                    self._evict(part)
            if unit.low is None:  # else Ctrl-C struck right behind it
                low = unit.make_low()
                self._add_part(low)
                unit.split_home(low)
            self.host.note_written(unit.param_block)
            self.host.write_behind(unit.param_block)
            return True

    def remove(self, unit: UnitState) -> None:
        """Forget a unit. Its parameters must have been made ordinary before."""
        with self.lock:
            for part in unit.all_parts:
                part.upload.wait()
                part.download.wait()
                if part.is_resident:
                    self._release_storage(part)
                if part.is_for_compute:
                    self.by_storage.pop(part.key, None)
                self.table.remove(part.shard)
            self.host.remove(unit)
            self._unit_at.pop(unit.index, None)
            self._count_homes()

    def close(self) -> None:
        self._streams.close()

    # ---------------------------------------------------------------------------------------- versions and truth
    def _remember_versions(self, part: Part) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            part.versions = [slot.param._version for slot in part.slots]

    def _notice_writes(self, part: Part) -> None:
        """Whatever user code wrote to the device copy since we last looked makes that copy the truth."""
        if not part.is_resident or part.form is not Form.FULL:
            return  # nobody but our own kernels writes to the others
        with torch._C.DisableTorchFunctionSubclass():
            versions = [slot.param._version for slot in part.slots]
        changed = [s for s, now, then in zip(part.slots, versions, part.versions, strict=True) if now != then]
        written = bool(changed)
        if part.is_handed_out:
            # What is done through an alias shows nowhere, so as long as one lives the part counts as written.
            written, changed = True, part.slots
            part.is_handed_out = part.num_aliases() > 0
        if written:
            if part.castable:  # of all: by the next write to another of them the home may be old
                is_there = self.table.is_valid(part.shard, Tier.DRAM)
                self._keep_old(part.unit, part.slots if is_there else changed, is_there=is_there)
            part.versions = versions
            if self.table.is_valid(part.shard, Tier.DEVICE):
                self.table.wrote(part.shard, Tier.DEVICE)

    def _write_back(self, part: Part) -> None:
        """Order a copy of a dirty device copy to its home. Readers of the home wait for ``part.download``."""
        if not self.table.is_only_valid(part.shard, Tier.DEVICE):
            return
        unit = part.unit
        self.wait_home(unit)
        split = self._split_parts(unit) if part.form is Form.FULL and part.castable else []
        for other in split:
            other.upload.wait()  # it may still be reading the split homes, and so may one that compute waits for only
            other.home_read.wait()
        self.host.bring_in(part.home_block, to_write=True)
        part.download.before_compute()  # one at a time: who has waited for the last one has waited for all
        self.table.begin(part.shard, D2H)
        pairs, landing = part.download_pairs()
        try:
            part.download = self._streams.download(pairs, f"write back ({part.name})")
            self.host.note_use(part.home_block, part.download)
            if self.no_overlap or landing is not None:
                part.download.wait()
            if landing is not None:
                part.finish_download(landing)
        except BaseException:
            self.table.failed(part.shard, D2H)
            raise
        self.moved_nbytes["d2h"] += part.nbytes
        self.table.landed(part.shard, D2H)
        self.host.note_written(part.home_block)
        self.host.write_behind(part.home_block)
        for other in split:
            self.table.wrote(other.shard, Tier.DRAM)

    @staticmethod
    def _split_parts(unit: UnitState) -> list[Part]:
        """The parts whose homes together are the home of the castable weights."""
        return [part for part in (unit.wire, unit.low) if part is not None]

    def _settle_split(self, unit: UnitState) -> None:
        """An update on the device wrote split masters there: their homes get them, readable now."""
        for part in self._split_parts(unit):
            self._land(part)
            self._write_back(part)
            part.download.wait()

    def wait_update(self, unit: UnitState) -> None:
        """Block until every ordered update of the unit has landed. Errors of the update surface here."""
        self._wait(unit.update)
        unit.update = unit.home_update = None

    def wait_home(self, unit: UnitState) -> None:
        """Block until every ordered update of the unit has landed in its home."""
        self._wait(unit.home_update)
        unit.home_update = None

    def _wait_home_for(self, part: Part) -> None:
        """The part's home can be copied up, by what is ordered from here on."""
        unit = part.unit
        if _is_streamed(unit.home_update) and part.home_flat is not None:
            self._streams.upload_behind(unit.home_update)
        else:
            self.wait_home(unit)

    def _wait(self, update: Ticket | None) -> None:
        if update is not None:
            if not update.done():
                start_s = time.perf_counter()
                update.wait()
                self.add_stall("update", time.perf_counter() - start_s, getattr(update, "label", ""))
            else:
                update.wait()

    def settle_home(self, unit: UnitState, *, to_write: bool = False) -> None:
        """Make the home copy the newest and readable by the host now; with ``to_write`` writable as well."""
        with self.lock:
            self.wait_home(unit)
            self._settle_split(unit)
            self._home_from_device(unit, may_wait=True)
            for part in unit.full_parts:
                self._land(part)
                self._notice_writes(part)
                self._write_back(part)
                part.download.wait()
            for part in unit.home_parts if to_write else ():
                self._land(part)
                part.home_read.wait()
            self.host.bring_in(unit.param_block, to_write=to_write)

    def _home_from_device(self, unit: UnitState, *, may_wait: bool) -> None:
        """A home on flash whose every part the device holds comes from there: no read, hence no failed one."""
        if not unit.param_block.is_paged or unit.param_block.is_resident or unit.wire is not None:
            return
        for part in unit.full_parts:
            if not part.is_resident:
                return
            self._land(part)
            self._notice_writes(part)
            if not (self.table.is_valid(part.shard, Tier.DEVICE) and self.table.is_valid(part.shard, Tier.DRAM)):
                return  # what was written to it goes down as a whole
        if self.host.open_unread(unit.param_block, may_wait=may_wait):
            for part in unit.full_parts:
                assert part.home_flat is not None
                part.download = self.download([(part.home_flat, part.flat)], f"home ({part.name})")
                self.host.note_use(unit.param_block, part.download)

    def _find_copy(self, block: HostBlock, segment: Segment) -> OtherCopy | None:
        """What the device holds of a segment on flash, for a read that is about to be ordered; None if not all of it.

        Optimizer state of units on flash is never on the device, and a gradient that is in DRAM is nowhere else.
        """
        unit = block.unit
        if block.role is not Role.PARAM:
            return None
        parts = [part for part in unit.home_parts if part.home_arena is segment.arena]
        if not self._are_valid(parts):
            is_split = unit.low is not None and unit.low.home_arena is segment.arena
            parts = [part for part in unit.full_parts if is_split and part.castable]
        return OtherCopy(parts, self._streams.download) if self._are_valid(parts) else None

    def _are_valid(self, parts: Sequence[Part]) -> bool:
        """Whether the device holds all of them, with content that is not older than any other."""
        for part in parts:
            if part.is_resident:
                self._land(part)
        return bool(parts) and all(part.is_resident and self.table.is_valid(part.shard, Tier.DEVICE) for part in parts)

    def home_written(self, unit: UnitState, slots: Sequence[ParamSlot]) -> None:
        """The host has written to the home, which the caller had settled before, ``to_write``."""
        with self.lock:
            self.host.note_written(unit.param_block)
            self.host.write_behind(unit.param_block)
            self.order_home_write(unit, slots)

    def settle_state(self, unit: UnitState, *, to_write: bool = False) -> None:
        """Make optimizer state in DRAM the newest, readable by the host now; with ``to_write`` writable as well.

        What is written there shows nowhere (``.data``, NumPy), so what is on the device counts as old then.
        """
        with self.lock:
            self.wait_update(unit)
            for part in unit.device_state:
                self._land(part)
                self._write_back(part)
                part.download.wait()
                if to_write:
                    part.home_read.wait()
                    self._drop_stale(part)

    def open_homes(self, slots: Sequence[ParamSlot]) -> None:
        """The host is about to write to these weights: what needs the old bits has them, and the homes are there.

        In this order: calls that wait to run again do so first, and may take homes out of DRAM.
        """
        units = list(dict.fromkeys(slot.unit for slot in slots))
        with self.lock:
            for unit in units:
                self.keep_old(unit, slots)
            for unit in units:
                self.settle_home(unit, to_write=True)

    def keep_old(self, unit: UnitState, slots: Sequence[ParamSlot]) -> None:
        """The home of these weights is about to be written: casts that are alive keep their bits, and so do graphs.

        See [Note: old casts].
        """
        with self.lock:
            self.unfold(unit)
            if unit.wire is not None and (unit.wire.saved or unit.has_casts):
                self.settle_home(unit)  # what user code wrote before comes first
                # A part is born with its storage on the device, which it gives back at once.
                self.make_room(unit.wire.nbytes, keep=None, what="old weights", must=False)
                self._keep_old(unit, slots, is_there=True)

    @staticmethod
    def unfold(unit: UnitState) -> None:
        """The unit's weights may be written from now on: calls that will run again for backward do so now."""
        for region in list(unit.folded):
            region.unfold()

    def _keep_old(self, unit: UnitState, slots: Sequence[ParamSlot], *, is_there: bool) -> None:
        """``is_there``: the home still holds the weights that were written to."""
        wire = unit.wire
        if wire is None:
            return
        if unit.has_casts:
            self.on_written(slots, is_there)
        if not wire.saved or not is_there:
            return
        full = unit.castable_part
        version_of = dict(zip(full.slots, full.versions, strict=True))
        views = [v for v in list(wire.saved) if v.slot in slots and v.version == version_of[v.slot]]
        wanted = {view.slot for view in views}
        if not wanted:
            return
        with outside_transforms(), torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            old = unit.make_old([slot for slot in wire.slots if slot in wanted], self.lend_host)
            if old is None:
                for view in views:  # backward says so, if it comes
                    view.note_lost(sum(slot.numel for slot in wanted) * wire.dtype.itemsize)
                return
            self._settle_wire(unit)
            unit.fill_old(old)
        self._add_part(old)
        for view in views:
            view.move_to(old)
            wire.saved.discard(view)

    def _settle_wire(self, unit: UnitState) -> None:
        """The home, which holds what the wire part is made from, can be read by the host now."""
        self.wait_home(unit)
        self._settle_split(unit)
        unit.castable_part.download.wait()
        self.host.bring_in(unit.param_block)

    def home_cast(self, slot: ParamSlot) -> torch.Tensor:
        """What the wire part is made from, of one weight, on the device and in memory of its own."""
        with self.lock, outside_transforms(), torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            self._settle_wire(slot.unit)
            return slot.unit.wire_home(slot).to(self.device, slot.unit.wire.dtype, copy=True)  # type: ignore[no-any-return]

    def order_home_write(self, unit: UnitState, slots: Sequence[ParamSlot]) -> None:
        """The home is written by the host (a load, an update): the device copies become stale.

        Device copies are dropped unless something still refers to them, in which case ``refresh`` must follow once the
        home is written.
        """
        with self.lock:
            for slot in slots:
                torch.autograd.graph.increment_version(slot.param)
            for part in unit.home_parts:
                self._drop_stale(part)

    def _drop_stale(self, part: Part) -> None:
        """The part's home is or will be written: what is on the device is old."""
        self.table.wrote(part.shard, Tier.DRAM)
        self._remember_versions(part)
        if part.is_resident and not self._is_held(part) and not part.is_serving:
            self._evict(part)

    def order_update(
        self, unit: UnitState, slots: Sequence[ParamSlot], priority: int = 0
    ) -> tuple[list[Ticket], list[CopyTicket]]:
        """An update of the home is about to be submitted: make the home the truth, the device copies stale.

        Returns (works that the update must run after, copies that it must wait for: those that read or write homes).
        ``update_ordered`` must follow.
        """
        with self.lock:
            copies: list[CopyTicket] = []
            self._home_from_device(unit, may_wait=False)
            for part in (*self._split_parts(unit), *unit.device_state, *unit.full_parts):
                self._land(part)
                copies.append(part.home_read)
                self._notice_writes(part)
                self._write_back(part)
                copies.append(part.download)
            previous = [unit.update] if unit.update is not None else []
            previous += self.host.order_update(unit, priority)
            self.order_home_write(unit, slots)
            for part in unit.device_state:
                self._drop_stale(part)
            return previous, copies

    def update_ordered(self, unit: UnitState, ticket: Ticket) -> None:
        """The update that ``order_update`` prepared has a ticket, and runs next. ``host.write_updated`` must follow."""
        unit.home_update = unit.update = ticket
        self.host.update_ordered(unit, ticket)

    def track_state(self, part: Part) -> None:
        """List a part of optimizer state, whose newest content is in DRAM, as one that may come to the device."""
        with self.lock:
            if part.shard not in self.table:
                self._add_part(part)
            if part not in part.unit.device_state:
                part.unit.device_state.append(part)

    def update_on_device(
        self,
        unit: UnitState,
        slots: Sequence[ParamSlot],
        parts: Sequence[Part],
        fresh: Iterable[Part],
        launch: Callable[[], None],
    ) -> bool:
        """Bring ``parts`` in and let ``launch`` enqueue an update of them on the compute stream.

        False, with nothing done, where there is no room for them at one time. The content of ``fresh`` parts does not
        matter: ``launch`` writes all of it.
        """
        with self.lock:
            self.wait_update(unit)
            wire = unit.wire
            if wire is not None and wire in parts and wire.num_aliases() > 0:
                return False  # who holds a cast keeps its bits
            leased: list[Part] = []
            try:
                for part in parts:
                    part.num_leases += 1
                    leased.append(part)
                    if not self._bring(part, is_fresh=part in fresh):
                        return False
                launch()
            finally:
                for part in leased:
                    part.num_leases -= 1
            for slot in slots:
                torch.autograd.graph.increment_version(slot.param)
            for part in parts:
                self.table.wrote(part.shard, Tier.DEVICE)
                self._remember_versions(part)
            if unit.wire in parts:  # the full form of the same weights is old now, on the device as in DRAM
                for part in unit.full_parts:
                    if part.castable:
                        self._drop_stale(part)
                self.refresh(unit)
            return True

    def _bring(self, part: Part, *, is_fresh: bool) -> bool:
        if part.is_resident:
            self._ensure_part(part)
            return True
        if not self.make_room(part.nbytes, keep=part.unit, what=part.name, must=False):
            return False
        if not is_fresh:
            self._start_fetch(part)
            self._land(part)
            return True
        part.charged_nbytes = part.nbytes
        self.ledger.charge(Tier.DEVICE, part.nbytes)
        part.is_resident = True
        part.materialise(poison=self.poison)
        return True

    def next_uses(self) -> dict[int, int]:
        """Unit index to its position among the coming uses, as predicted."""
        with self.lock:
            return dict(self._distances())

    def refresh(self, unit: UnitState) -> None:
        """Bring stale device copies that something refers to up to date."""
        with self.lock:
            for part in unit.parts:
                is_stale = part.is_resident and not self.table.is_valid(part.shard, Tier.DEVICE)
                if is_stale and self._leave_old_cast(part):
                    if part.num_leases > 0:
                        self._ensure_part(part)
                elif is_stale and (self._is_held(part) or not part.is_serving):
                    self._upload(part)
                    self._land(part)

    # ---------------------------------------------------------------------------------------- moving
    def download(self, pairs: Pairs, label: str) -> CopyTicket:
        """Order copies device to DRAM that are not a unit's parameters (gradients)."""
        ticket = self._streams.download(pairs, label)
        self.moved_nbytes["d2h"] += sum(min(target.nbytes, source.nbytes) for target, source in pairs)
        if self.no_overlap:
            ticket.wait()
        return ticket

    def add_down(
        self, target: torch.Tensor, before: torch.Tensor, grad: torch.Tensor, norm_types: Iterable[float], label: str
    ) -> tuple[CopyTicket, dict[float, torch.Tensor]]:
        """See ``Streams.add_down``."""
        ticket, norms = self._streams.add_down(target, before, grad, norm_types, label)
        self.moved_nbytes["d2h"] += target.nbytes
        if self.device.type != "cpu":
            self.moved_nbytes["h2d"] += before.nbytes
        if self.no_overlap:
            ticket.wait()
        return ticket, norms

    def upload(self, pairs: Pairs, label: str) -> CopyTicket:
        """Order copies DRAM to device that are not a unit's parameters."""
        ticket = self._streams.upload(pairs, label)
        self.moved_nbytes["h2d"] += sum(source.nbytes for _, source in pairs)
        if self.no_overlap:
            ticket.wait()
        return ticket

    def _land(self, part: Part) -> None:
        """Order compute behind an upload in flight and count it as landed."""
        if part.upload is not LANDED:
            part.upload.before_compute()
            part.home_read, part.upload = part.upload, LANDED
            self.table.landed(part.shard, H2D)

    def _cast(self, part: Part) -> bool:
        """Make a wire part that has no home of its own from the full part beside it, where that is on the device."""
        if part.form is not Form.WIRE or part.home_flat is not None:
            return False
        full = part.unit.castable_part
        if not (full.is_resident and self.table.is_valid(full.shard, Tier.DEVICE)):
            return False
        self._land(full)
        self.table.begin(part.shard, H2D)
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            for index in range(len(part.slots)):
                part.device_view(index).copy_(full.device_view(index))
        self.table.landed(part.shard, H2D)
        return True

    def _upload(self, part: Part) -> None:
        if part.loan is None and self._cast_or_settle(part):
            return
        if part.form is Form.STATE and part.loan is None:
            if part.num_fetches == 1:  # state that comes once need not be page-locked, which takes longer than the copy
                part.pin_home()
            part.num_fetches += 1
        self.table.begin(part.shard, H2D)
        try:
            part.upload = self._streams.upload(part.upload_pairs(), f"fetch ({part.name})")
            if part.loan is not None:
                part.loan.ticket = part.upload
            else:
                self.host.note_use(part.home_block, part.upload)
        except BaseException:
            self.table.failed(part.shard, H2D)
            raise
        self.moved_nbytes["h2d"] += part.nbytes
        if self.no_overlap:
            part.upload.wait()
        if part.upload is LANDED:  # copied at once: nobody will land it later
            self.table.landed(part.shard, H2D)

    def _cast_or_settle(self, part: Part) -> bool:
        """Make the part on the device from another one there, else its home readable. Whether it was made."""
        unit = part.unit
        self._wait_home_for(part)
        if part.form is Form.FULL and part.castable:
            self._settle_split(unit)
        elif part.castable:
            # Two forms of one home: the full part may be the newer one.
            for full in unit.full_parts:
                if full.castable and full is not part and full.is_resident:
                    self._land(full)
                    self._notice_writes(full)
                    self._write_back(full)
        if self._cast(part):
            return True
        for each in unit.full_parts:
            each.download.wait()
        self.host.bring_in(part.home_block)
        return False

    def _start_fetch(self, part: Part, *, is_users: bool = False) -> None:
        part.charged_nbytes = 0 if is_users else part.nbytes
        self.ledger.charge(Tier.DEVICE, part.charged_nbytes)
        if is_users:
            self._lent.append(part)
        part.is_resident = True
        try:
            part.materialise(poison=self.poison)
            self._upload(part)
        except BaseException:
            self._streams.settle()  # Ctrl-C may have struck behind the order of a copy whose ticket nobody has then
            self._release_storage(part)
            raise
        self.num_fetches += 1

    def leave_to_aliases(self, part: Part) -> None:
        """Tensors over the part's storage that the user holds keep it as it is; the part gets another storage."""
        with self.lock:
            if part.is_resident and part.num_leases == 0 and part.num_aliases() > 0:
                self.settle_home(part.unit)
                self.table.drop(part.shard, Tier.DEVICE)
                self._release_storage(part, leave=True)

    def _leave_old_cast(self, part: Part) -> bool:
        """Whoever holds a tensor over a wire part has a cast, which plainly is a copy: it keeps the old bits.

        So a stale part's storage is left to them. False where nobody holds it.
        """
        if part.form is not Form.WIRE or part.num_aliases() == 0:
            return False
        self._land(part)
        self.table.drop(part.shard, Tier.DEVICE)
        self._release_storage(part, leave=True)
        return True

    def _release_storage(self, part: Part, *, leave: bool = False) -> None:
        for copy in part.serves:
            copy.end()
        part.serves = []
        part.upload.before_compute()
        if part.upload is not LANDED:
            part.home_read, part.upload = part.upload, LANDED
        part.download.before_compute()
        if leave or (part.is_for_compute and not part.storage.resizable()):
            # tensor.numpy() fixes a storage's size for good; the array is gone, so the part may have another one.
            del self.by_storage[part.key]
            part.renew_storage()
            self.by_storage[part.key] = part
        else:
            part.release()
        part.is_resident = False
        part.is_handed_out = False
        self.ledger.release(Tier.DEVICE, part.charged_nbytes)
        part.charged_nbytes = 0

    @staticmethod
    def _is_held(part: Part) -> bool:
        return part.num_leases > 0 or part.num_aliases() > 0

    def _evict(self, part: Part) -> None:
        """Drop the device copy, writing it back first where it is the only valid one."""
        self._land(part)
        self._notice_writes(part)
        self._write_back(part)
        self.table.drop(part.shard, Tier.DEVICE)
        self._release_storage(part)

    def _distances(self) -> dict[int, int]:
        key = (self.order.last, len(self._unit_at), self.order.num_hits + self.order.num_misses)
        if key != self._distance_key:
            self._distance_key = key
            self._distance_of, self._forward_of = {}, {}
            for position, (index, phase) in enumerate(self.order.coming(3 * len(self._unit_at) + 8)):
                self._distance_of.setdefault(index, position)
                if phase is Phase.FORWARD:
                    self._forward_of.setdefault(index, position)
        return self._distance_of

    def _update_order(self) -> dict[int, int]:
        """Unit index to its position in the coming step's updates, as predicted: that of the next forward."""
        self._distances()
        return self._forward_of

    def _victims(self, keep: UnitState | None) -> list[Part]:
        distances = self._distances()
        far = len(self._unit_at) * 4 + 16
        found = [
            (-distances.get(unit.index, far), part)
            for unit in self.units
            if unit is not keep
            for part in unit.all_parts
            if part.is_resident and not self._is_held(part)
        ]
        # Farthest next use first (the rule that is optimal for a known order); unknown counts as farthest.
        return [part for _, part in sorted(found, key=lambda item: (item[1].is_pinned, item[1].is_serving, item[0]))]

    def make_room(self, nbytes: int, *, keep: UnitState | None, what: str, must: bool = True) -> bool:
        """Evict until ``nbytes`` fit under the device budget. Without ``must`` False says that they do not."""
        account = self.ledger[Tier.DEVICE]
        comfortable_nbytes = nbytes + self._spare_nbytes
        if account.headroom_nbytes >= comfortable_nbytes:
            return True
        soon = {index for index, _ in self.order.coming(self.prefetch_units)}
        for victim in self._victims(keep):
            if victim.is_pinned or victim.unit.index in soon:
                # What is on its way down anyway makes room first: it need not come up again.
                while account.headroom_nbytes < nbytes and self.on_pressure(False):
                    pass
                if account.headroom_nbytes >= nbytes:
                    return True
            self._evict(victim)
            if account.headroom_nbytes >= comfortable_nbytes:
                return True
        if account.headroom_nbytes >= nbytes:
            return True
        for part in keep.all_parts if keep is not None else ():  # the other form of the very unit
            if part.is_resident and not self._is_held(part):
                self._evict(part)
                if account.headroom_nbytes >= nbytes:
                    return True
        # Tensors that user code holds (p.data, views) keep their parts here, and so does one call of user code over the
        # parameters of several units: those bytes are the user's.
        for unit in self.units:
            for part in unit.all_parts if unit.num_windows == 0 else ():
                if account.headroom_nbytes >= nbytes:
                    return True
                is_users = part in self._touched or (part.num_leases == 0 and part.num_aliases() > 0)
                if part.is_resident and is_users:
                    self.ledger.release(Tier.DEVICE, part.charged_nbytes)
                    part.charged_nbytes = 0
                    if part not in self._lent:
                        self._lent.append(part)
        while account.headroom_nbytes < nbytes and self.on_pressure(must):
            pass
        if account.headroom_nbytes >= nbytes:
            return True
        if not must:
            return False
        held = sorted({u.name for u in self.units for p in u.parts if p.is_resident and p.num_leases > 0})
        raise CapacityError(
            f"{what} needs {format_nbytes(nbytes)} on the device, {format_nbytes(account.headroom_nbytes)} is free of "
            f"device_budget ({format_nbytes(account.budget_nbytes)}); in use at the same time: "
            f"{', '.join(held) or 'gradients'}. Raise device_budget, or name smaller modules in `units`."
        )

    # ---------------------------------------------------------------------------------------- what compute asks for
    def _reclaim(self) -> None:
        """Parts that were left to user code as its memory, and that it does not hold any more, go."""
        self._forget_dead()
        for part in list(self._lent):
            if not part.is_resident or part.charged_nbytes == part.nbytes:
                self._lent.remove(part)
            elif not self._is_held(part):
                self._lent.remove(part)
                self._evict(part)

    def _ensure_part(self, part: Part) -> None:
        if part.is_resident:
            self._land(part)
            if part.form is not Form.FULL and part.castable:
                self._settle_full_of(part)
            if self.table.is_valid(part.shard, Tier.DEVICE):
                return
            if not self._leave_old_cast(part):
                self._upload(part)
                self._land(part)
                return
        if part.loan is None:
            self._wait_home_for(part)
        # A unit may hand a parameter to another unit's forward: what user code reads by itself is fetched even
        # where compute's own leases fill the budget, and is the user's memory then. So is the other form of a unit
        # whose window is open: a backward inside its forward reads what an earlier window saved.
        is_users = part in self._touched or (part.unit.num_windows > 0 and part not in (part.unit.open_parts or ()))
        has_room = self.make_room(part.nbytes, keep=part.unit, what=f"unit {part.name}", must=not is_users)
        self._start_fetch(part, is_users=not has_room)
        self._land(part)

    def _settle_full_of(self, part: Part) -> None:
        """User code may have written to the full part since a part of the split form was made from the same home."""
        for full in part.unit.full_parts:
            if full.castable and full.is_resident:
                self._land(full)
                self._notice_writes(full)
                self._write_back(full)

    def ensure_resident(self, parts: Iterable[Part]) -> None:
        """The parts' newest values are on the device for everything that compute does from here on."""
        self._reclaim()
        for part in parts:
            part.num_leases += 1
            try:
                self._ensure_part(part)
            finally:
                part.num_leases -= 1

    def note_use(self, unit: UnitState, phase: Phase, parts: Sequence[Part]) -> None:
        if (
            self.order.note((unit.index, phase))
            and not all(part.is_resident for part in parts)
            and self.num_fetches > len(self._unit_at)
        ):
            self.num_prefetch_misses += 1

    def prefetch(self) -> None:
        """Start fetching the coming units while there is room, without taking it from units needed sooner."""
        if self.prefetch_units < 1:
            return
        self._read_ahead()
        sooner: set[int] = set()
        for index, phase in self.order.coming(self.prefetch_units):
            unit = self._unit_at.get(index)
            if unit is None:
                continue
            if unit.home_update is not None and not unit.home_update.done():
                return  # its home is still being written; the next event tries again
            grad_nbytes = unit.max_grad_nbytes if phase is Phase.BACKWARD else 0
            for part in unit.parts_for(self.wire_dtype):
                if not part.is_resident:
                    if not self.host.is_ready(unit.param_block):
                        return  # it is still coming from flash
                    if not self._make_room_for_later(part.nbytes + grad_nbytes, unit, sooner):
                        return
                    self._start_fetch(part)
            sooner.add(index)

    def _read_ahead(self) -> None:
        """Start reading the homes of coming units from flash, further ahead than the device fetches."""
        if self.host.store is None:
            return
        self.host.hold_served(may_wait=False)
        coming = [self._unit_at.get(index) for index, _ in self.order.coming(self.prefetch_units + 2)]
        self.host.read_ahead(
            unit.param_block
            for unit in coming
            if unit is not None and not all(part.is_resident for part in unit.parts_for(self.wire_dtype))
        )
        if self.order.last is not None and self.order.last[1] is Phase.BACKWARD:
            order = self._update_order()
            self.host.read_states_ahead(sorted(self.units, key=lambda unit: order.get(unit.index, 1 << 30)))

    def _make_room_for_later(self, nbytes: int, unit: UnitState, sooner: set[int]) -> bool:
        account = self.ledger[Tier.DEVICE]
        nbytes += self._spare_nbytes
        if account.headroom_nbytes < nbytes:
            distances = self._distances()
            mine = distances.get(unit.index, 0)
            for victim in self._victims(unit):
                index = victim.unit.index
                if victim.is_pinned or index in sooner or distances.get(index, mine + 1) <= mine:
                    break
                self._evict(victim)
                if account.headroom_nbytes >= nbytes:
                    break
        return account.headroom_nbytes >= nbytes

    def open_window(self, unit: UnitState, phase: Phase, wire_dtype: torch.dtype | None) -> list[Part]:
        """Lease a unit for compute and make its parameters plain. Hand what it returns to ``close_window``.

        ``wire_dtype`` is what autocast would cast to just now, None without autocast.
        """
        gives_up_s = None
        while True:
            try:
                return self._open_window(unit, phase, wire_dtype)
            except CapacityError:
                # What another thread reads just now is given back in a moment: it needs the lock for that.
                now_s = time.monotonic()
                gives_up_s = now_s + _OTHERS_READ_S if gives_up_s is None else gives_up_s
                if not self._has_several_threads or now_s > gives_up_s:
                    raise
            time.sleep(0.001)

    def _open_window(self, unit: UnitState, phase: Phase, wire_dtype: torch.dtype | None) -> list[Part]:
        with self.lock:
            is_wide = unit.is_compiled or (wire_dtype is not None and not unit.has_casts and is_seen())
            parts = unit.parts_for(None if is_wide else wire_dtype)
            if unit.num_windows > 0 and unit.open_parts == parts:
                # A module inside one that is open: nothing to fetch, nothing to learn.
                self._count_window(unit, phase)
                for part in parts:
                    part.num_leases += 1
                return parts
            self.check_process()
            if unit.num_windows > 0:
                # The class that the parameters wear is the outermost window's, and that one may close first (threads).
                parts = list(dict.fromkeys([*parts, *(unit.open_parts or ())]))
            self.wire_dtype = None if is_wide and not unit.is_compiled else wire_dtype
            self.note_use(unit, phase, parts)
            self._reclaim()
            for part in parts:
                part.num_leases += 1
            try:
                for part in parts:
                    self._ensure_part(part)
                self.prefetch()  # may raise what an update failed with: before the window counts as open
            except BaseException:
                for part in parts:
                    part.num_leases -= 1
                raise
            may_travel = unit.wire_state is not WireState.REFUSED or unit.has_casts
            watch = wire_dtype is not None and may_travel and not unit.is_compiled
            if unit.wire is not None and unit.wire not in parts and torch.is_grad_enabled():
                for slot in unit.wire.slots:
                    slot.is_mixed = True  # what is used in full in this window is not seen
                    slot.was_mixed |= not watch
            self._count_window(unit, phase)
            if unit.num_windows == 1:
                unit.open_parts = parts
                if phase is not Phase.EVAL:
                    unit.refresh_trainable()
                plain: type[nn.Parameter] = ComputeParameter
                if unit.is_compiled:
                    plain = nn.Parameter
                elif self._has_several_threads:
                    plain = GuardedParameter
                for slot in unit.slots:
                    slot.param.__class__ = AutocastParameter if watch and slot.castable else plain
            return parts

    def _count_window(self, unit: UnitState, phase: Phase) -> None:
        unit.num_windows += 1
        thread = threading.get_ident()
        unit.window_threads[thread] = unit.window_threads.get(thread, 0) + 1
        if phase is not Phase.BACKWARD and thread not in self._forward_threads:  # recompute may run in autograd's own
            self._forward_threads.add(thread)
            if len(self._forward_threads) > 1:
                self._guard()

    def _guard(self) -> None:
        """Several threads use the units: a parameter in a window must not look plain to those without one."""
        if not self._has_several_threads:
            self._has_several_threads = True
            for unit in self.units:
                for slot in unit.slots:
                    if type(slot.param) is ComputeParameter:
                        slot.param.__class__ = cast(Any, GuardedParameter)

    def close_window(self, unit: UnitState, parts: Sequence[Part]) -> None:
        with self.lock:
            if unit.num_windows == 0:
                return  # ``reset`` has closed it already
            unit.num_windows -= 1
            thread = threading.get_ident()
            unit.window_threads[thread] = max(0, unit.window_threads.get(thread, 0) - 1)
            for part in parts:
                part.num_leases -= 1
            if unit.num_windows == 0:
                unit.window_threads.clear()
                for slot in unit.slots:
                    slot.param.__class__ = PagedParameter

    def need_in_backward(self, part: Part) -> None:
        """A saved view of the part is about to be read by backward."""
        with self.lock, outside_transforms():
            self.note_use(part.unit, Phase.BACKWARD, [part])
            self.ensure_resident([part])

    def touch(self, parts: Sequence[Part], call: Callable[[], Any]) -> Any:
        """Run ``call`` with full parts on the device, outside any compute window of theirs or beside a wire window."""
        with self.lock:
            self.check_process()
            if self._forward_threads and threading.get_ident() not in self._forward_threads:
                self._guard()
            before, self._touched = self._touched, [*self._touched, *parts]
            for part in parts:
                part.num_leases += 1
            try:
                with outside_transforms():
                    for part in parts:
                        self._ensure_part(part)
                result = call()
                # A thread that only looks on runs nobody's forward: what it writes then races plainly too.
                if self._is_in_training():
                    for part in parts:
                        if part.num_aliases() > 0:
                            self.unfold(part.unit)
            finally:
                with outside_transforms():
                    self._touched = before
                    for part in parts:
                        part.num_leases -= 1
                        if part.is_resident and part.num_aliases() > 0:
                            part.is_handed_out = True
                        self._notice_writes(part)
                    self._reclaim()
            return result

    def _is_in_training(self) -> bool:
        """Whether the calling thread runs forwards or backwards of units here, or nobody else does."""
        threads = self._forward_threads
        return not threads or threading.get_ident() in threads or torch._C._current_graph_task_id() != -1

    def reset(self, units: Sequence[UnitState]) -> None:
        """After an exception: no window of these units is open and no lease held any more. Values are kept.

        Other units may be in use: of another engine, whose forward runs in another thread.

        Ctrl-C may have struck between any two statements, so what is counted is counted again. Gradients and other
        users of the ledger have let go before.
        """
        with self.lock:
            self._touched = []
            used_nbytes = 0
            parts_of = [(unit, unit.all_parts) for unit in self.units]
            while self._dead:  # not among those; one of those that dies from here on will be forgotten as any other
                self.table.remove(self._dead.popleft()[0])
            for unit, parts in parts_of:
                is_meant = unit in units
                unit.num_windows = 0 if is_meant else unit.num_windows
                if is_meant:
                    unit.window_threads.clear()
                for part in parts:
                    part.num_leases = 0 if is_meant else part.num_leases
                    part.is_resident = part.has_memory
                    part.charged_nbytes = min(part.charged_nbytes, part.nbytes) if part.is_resident else 0
                    used_nbytes += part.charged_nbytes
                for slot in unit.slots if is_meant else ():
                    slot.param.__class__ = PagedParameter
            self.ledger[Tier.DEVICE].used_nbytes = used_nbytes
