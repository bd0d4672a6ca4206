"""Floor 5. What is on the device: fetches, evictions, prefetches, leases, budgets. The one writer of residency.

One ``DeviceSpace`` serves every engine of a process on one device, so that a policy and a reference model share one
budget. It decides with the predicted order of uses (a hint) and acts through ``Streams``. Every public method takes the
residency lock; workers never take it, so waiting for a worker under the lock cannot deadlock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_tieroffload.concepts import D2H, H2D, Ticket, Tier
from lightning_tieroffload.engine.order import Phase, UseOrder
from lightning_tieroffload.engine.params import ComputeParameter, PagedParameter, ParamSlot, put_on
from lightning_tieroffload.engine.streams import LANDED, CopyTicket, Pairs, Streams, make_streams
from lightning_tieroffload.engine.unit_state import DtypeGroup, UnitState
from lightning_tieroffload.errors import CapacityError, TierOffloadError
from lightning_tieroffload.residency import Ledger, ResidencyTable
from lightning_tieroffload.sizes import format_nbytes

__all__ = ["DeviceSpace"]


class DeviceSpace:
    """Residency of every managed unit on one device.

    Args:
        device: where compute happens.
        budget_nbytes: most bytes that may be held per tier.
        prefetch_units: how many coming uses to fetch ahead, where there is room.
        poison: fill device memory with NaN before it is written, so that a missing wait shows.
        no_overlap: wait for every copy at once.
        delay_seed: put copies off as long as possible (host only); see ``streams.DelayedStreams``.
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
    ) -> None:
        self.device = device
        self.table = ResidencyTable()
        self.ledger = Ledger(budget_nbytes)
        self.order = UseOrder()
        self.prefetch_units = prefetch_units
        self.poison = poison
        self.no_overlap = no_overlap
        self.units: list[UnitState] = []
        self.by_storage: dict[int, DtypeGroup] = {}
        self.moved_nbytes = {"h2d": 0, "d2h": 0, "read": 0, "write": 0}
        self.stall_s = {"h2d": 0.0, "d2h": 0.0, "read": 0.0, "write": 0.0, "update": 0.0}
        self.num_prefetch_misses = 0
        self.num_fetches = 0
        self._streams: Streams = make_streams(device, on_stall=self.add_stall, delay_seed=delay_seed)
        self._pid = os.getpid()
        self._distance_of: dict[int, int] = {}
        self._distance_key: Any = None
        self._next_index = 0

    @property
    def lock(self) -> Any:
        return self.table.lock

    def add_stall(self, kind: str, seconds: float) -> None:
        self.stall_s[kind] += seconds

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
            self.units.append(unit)
            for group in unit.groups:
                self.by_storage[group.key] = group
            self.table.add(self._key(unit), Tier.DRAM, valid_on=[Tier.DRAM])
            self.ledger[Tier.DRAM].home_nbytes += unit.nbytes
            for slot in unit.slots:
                put_on(slot, PagedParameter)
            self._remember_versions(unit)

    def remove(self, unit: UnitState) -> None:
        """Forget a unit. Its parameters must have been made ordinary before."""
        with self.lock:
            unit.upload.wait()
            unit.download.wait()
            if unit.is_resident:
                self._release_storage(unit)
            self.units.remove(unit)
            for group in unit.groups:
                self.by_storage.pop(group.key, None)
            self.table.remove(self._key(unit))
            self.ledger[Tier.DRAM].home_nbytes -= unit.nbytes

    def close(self) -> None:
        self._streams.close()

    @staticmethod
    def _key(unit: UnitState) -> str:
        return f"{unit.index}/{unit.shard.name}"

    # ---------------------------------------------------------------------------------------- versions and truth
    def _remember_versions(self, unit: UnitState) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            unit.versions = [slot.param._version for slot in unit.slots]

    def _notice_writes(self, unit: UnitState) -> None:
        """Whatever user code wrote to the device copy since we last looked makes that copy the truth."""
        if not unit.is_resident:
            return
        with torch._C.DisableTorchFunctionSubclass():
            versions = [slot.param._version for slot in unit.slots]
        written = versions != unit.versions
        if unit.is_handed_out:
            # What is done through an alias shows nowhere, so as long as one lives the unit counts as written.
            written = True
            unit.is_handed_out = unit.num_aliases() > 0
        if written:
            unit.versions = versions
            if self.table.is_valid(self._key(unit), Tier.DEVICE):
                self.table.wrote(self._key(unit), Tier.DEVICE)

    def _write_back(self, unit: UnitState) -> None:
        """Order a copy of a dirty device copy to its home. Readers of the home wait for ``unit.download``."""
        key = self._key(unit)
        if not self.table.is_only_valid(key, Tier.DEVICE):
            return
        self.wait_update(unit)
        self.table.begin(key, D2H)
        unit.download = self._streams.download(unit.pairs_to_home(), f"write back ({unit.name})")
        self.moved_nbytes["d2h"] += unit.nbytes
        if self.no_overlap:
            unit.download.wait()
        self.table.landed(key, D2H)

    def wait_update(self, unit: UnitState) -> None:
        """Block until every ordered update of the unit has landed in its home. Errors of the update surface here."""
        update = unit.update
        if update is not None:
            if not update.done():
                start_s = time.perf_counter()
                update.wait()
                self.add_stall("update", time.perf_counter() - start_s)
            else:
                update.wait()
            unit.update = None

    def settle_home(self, unit: UnitState) -> None:
        """Make the home copy the newest and readable by the host now."""
        with self.lock:
            self.wait_update(unit)
            self._land(unit)
            self._notice_writes(unit)
            self._write_back(unit)
            unit.download.wait()

    def order_home_write(self, unit: UnitState, slots: Sequence[ParamSlot]) -> None:
        """The home is written by the host (a load, an update): the device copy becomes stale.

        The caller has settled the home before. The device copy is dropped unless something still refers to it, in
        which case ``refresh`` must follow once the home is written.
        """
        with self.lock:
            self.table.wrote(self._key(unit), Tier.DRAM)
            for slot in slots:
                torch.autograd.graph.increment_version(slot.param)
            self._remember_versions(unit)
            if unit.is_resident and not self._is_held(unit):
                self._evict(unit)

    def order_update(self, unit: UnitState, slots: Sequence[ParamSlot]) -> list[Ticket]:
        """An update of the home is about to be submitted: make the home the truth, the device copy stale.

        Returns what the update must run after. The work itself waits for ``unit.upload`` and ``unit.download``.
        """
        with self.lock:
            self._land(unit)
            self._notice_writes(unit)
            self._write_back(unit)
            previous = [unit.update] if unit.update is not None else []
            self.order_home_write(unit, slots)
            return previous

    def next_uses(self) -> dict[int, int]:
        """Unit index to its position among the coming uses, as predicted."""
        with self.lock:
            return dict(self._distances())

    def refresh(self, unit: UnitState) -> None:
        """Bring a stale device copy that something refers to up to date."""
        with self.lock:
            if unit.is_resident and not self.table.is_valid(self._key(unit), Tier.DEVICE):
                self._upload(unit)
                self._land(unit)

    # ---------------------------------------------------------------------------------------- moving
    def download(self, pairs: Pairs, label: str) -> CopyTicket:
        """Order copies device to DRAM that are not a unit's parameters (gradients)."""
        ticket = self._streams.download(pairs, label)
        self.moved_nbytes["d2h"] += sum(source.nbytes for _, source in pairs)
        if self.no_overlap:
            ticket.wait()
        return ticket

    def upload(self, pairs: Pairs, label: str) -> CopyTicket:
        """Order copies DRAM to device that are not a unit's parameters."""
        ticket = self._streams.upload(pairs, label)
        self.moved_nbytes["h2d"] += sum(source.nbytes for _, source in pairs)
        if self.no_overlap:
            ticket.wait()
        return ticket

    def _land(self, unit: UnitState) -> None:
        """Order compute behind an upload in flight and count it as landed."""
        if unit.upload is not LANDED:
            unit.upload.before_compute()
            unit.upload = LANDED
            self.table.landed(self._key(unit), H2D)

    def _upload(self, unit: UnitState) -> None:
        self.wait_update(unit)
        unit.download.wait()
        self.table.begin(self._key(unit), H2D)
        try:
            unit.upload = self._streams.upload(unit.pairs_to_device(), f"fetch ({unit.name})")
        except BaseException:
            self.table.failed(self._key(unit), H2D)
            raise
        self.moved_nbytes["h2d"] += unit.nbytes
        if self.no_overlap:
            unit.upload.wait()
        if unit.upload is LANDED:  # copied at once: nobody will land it later
            self.table.landed(self._key(unit), H2D)

    def _start_fetch(self, unit: UnitState) -> None:
        self.ledger.charge(Tier.DEVICE, unit.nbytes)
        unit.charged_nbytes = unit.nbytes
        unit.is_resident = True
        try:
            for group in unit.groups:
                group.materialise(poison=self.poison)
            self._upload(unit)
        except BaseException:
            self._release_storage(unit)
            raise
        self.num_fetches += 1

    def _release_storage(self, unit: UnitState) -> None:
        unit.upload.before_compute()
        unit.upload = LANDED
        unit.download.before_compute()
        for group in unit.groups:
            group.release()
        unit.is_resident = False
        unit.is_handed_out = False
        self.ledger.release(Tier.DEVICE, unit.charged_nbytes)
        unit.charged_nbytes = 0

    def _is_held(self, unit: UnitState) -> bool:
        return unit.num_leases > 0 or unit.num_aliases() > 0

    def _evict(self, unit: UnitState) -> None:
        """Drop the device copy, writing it back first where it is the only valid one."""
        self._land(unit)
        self._notice_writes(unit)
        self._write_back(unit)
        self.table.drop(self._key(unit), Tier.DEVICE)
        self._release_storage(unit)

    def _distances(self) -> dict[int, int]:
        key = (self.order.last, len(self.units), self.order.num_hits + self.order.num_misses)
        if key != self._distance_key:
            self._distance_key = key
            self._distance_of = {}
            for position, (index, _) in enumerate(self.order.coming(3 * len(self.units) + 8)):
                self._distance_of.setdefault(index, position)
        return self._distance_of

    def _victims(self, keep: UnitState | None) -> list[UnitState]:
        distances = self._distances()
        far = len(self.units) * 4 + 16
        candidates = [u for u in self.units if u.is_resident and u is not keep and not self._is_held(u)]
        # Farthest next use first (the rule that is optimal for a known order); unknown counts as farthest.
        return sorted(candidates, key=lambda u: -distances.get(u.index, far))

    def make_room(self, nbytes: int, *, keep: UnitState | None, what: str, must: bool = True) -> bool:
        """Evict until ``nbytes`` fit under the device budget. Without ``must`` False says that they do not."""
        account = self.ledger[Tier.DEVICE]
        if account.headroom_nbytes >= nbytes:
            return True
        for victim in self._victims(keep):
            self._evict(victim)
            if account.headroom_nbytes >= nbytes:
                return True
        if not must:
            return False
        # Tensors that user code holds (p.data, views) keep their units here: those bytes are the user's.
        for unit in self.units:
            if unit.is_resident and unit.num_leases == 0 and unit is not keep and unit.num_aliases() > 0:
                self.ledger.release(Tier.DEVICE, unit.charged_nbytes)
                unit.charged_nbytes = 0
                if account.headroom_nbytes >= nbytes:
                    return True
        held = sorted(u.name for u in self.units if u.is_resident and u.num_leases > 0)
        raise CapacityError(
            f"{what} needs {format_nbytes(nbytes)} on the device, {format_nbytes(account.headroom_nbytes)} is free of "
            f"device_budget ({format_nbytes(account.budget_nbytes)}); in use at the same time: "
            f"{', '.join(held) or 'gradients'}. Raise device_budget, or name smaller modules in `units`."
        )

    # ---------------------------------------------------------------------------------------- what compute asks for
    def ensure_resident(self, unit: UnitState) -> None:
        """The unit's newest values are on the device for everything that compute does from here on."""
        if unit.is_resident:
            self._land(unit)
            if not self.table.is_valid(self._key(unit), Tier.DEVICE):
                self._upload(unit)
                self._land(unit)
            return
        self.wait_update(unit)
        self.make_room(unit.nbytes, keep=unit, what=f"unit {unit.name}")
        self._start_fetch(unit)
        self._land(unit)

    def note_use(self, unit: UnitState, phase: Phase) -> None:
        if self.order.note((unit.index, phase)) and not unit.is_resident and self.num_fetches > len(self.units):
            self.num_prefetch_misses += 1

    def prefetch(self, phase: Phase) -> None:
        """Start fetching the coming units while there is room, without taking it from units needed sooner."""
        if self.prefetch_units < 1:
            return
        account = self.ledger[Tier.DEVICE]
        sooner: set[int] = set()
        for index, coming_phase in self.order.coming(self.prefetch_units):
            unit = self._unit_at(index)
            if unit is None:
                continue
            if not unit.is_resident:
                if unit.update is not None and not unit.update.done():
                    break  # its home is still being written; the next event tries again
                need_nbytes = unit.nbytes + (unit.max_grad_nbytes if coming_phase is Phase.BACKWARD else 0)
                if account.headroom_nbytes < need_nbytes:
                    distances = self._distances()
                    mine = distances.get(index, 0)
                    for victim in self._victims(unit):
                        if victim.index in sooner or distances.get(victim.index, mine + 1) <= mine:
                            break
                        self._evict(victim)
                        if account.headroom_nbytes >= need_nbytes:
                            break
                if account.headroom_nbytes < need_nbytes:
                    break
                self._start_fetch(unit)
            sooner.add(index)

    def _unit_at(self, index: int) -> UnitState | None:
        for unit in self.units:
            if unit.index == index:
                return unit
        return None

    def open_window(self, units: Sequence[UnitState], phase: Phase) -> None:
        """Lease units for compute and make their parameters plain. Pair with ``close_window``."""
        with self.lock:
            self.check_process()
            for unit in units:
                self.note_use(unit, phase)
                unit.num_leases += 1
                try:
                    self.ensure_resident(unit)
                except BaseException:
                    unit.num_leases -= 1
                    raise
                unit.num_windows += 1
                if unit.num_windows == 1:
                    cls = nn.Parameter if unit.is_compiled else ComputeParameter
                    for slot in unit.slots:
                        slot.param.__class__ = cls
            self.prefetch(phase)

    def close_window(self, units: Iterable[UnitState]) -> None:
        with self.lock:
            for unit in units:
                if unit.num_windows == 0:
                    continue  # an exception's clean-up has closed it already
                unit.num_windows -= 1
                unit.num_leases -= 1
                if unit.num_windows == 0:
                    for slot in unit.slots:
                        slot.param.__class__ = PagedParameter

    def need_in_backward(self, unit: UnitState) -> None:
        """A saved view of the unit is about to be read by backward."""
        with self.lock:
            self.note_use(unit, Phase.BACKWARD)
            self.ensure_resident(unit)

    def touch(self, units: Sequence[UnitState], call: Callable[[], Any]) -> Any:
        """Run ``call`` with the units on the device, outside any compute window."""
        with self.lock:
            self.check_process()
            for unit in units:
                unit.num_leases += 1
            try:
                for unit in units:
                    self.ensure_resident(unit)
                result = call()
            finally:
                for unit in units:
                    unit.num_leases -= 1
                    if unit.is_resident and unit.num_aliases() > 0:
                        unit.is_handed_out = True
                    self._notice_writes(unit)
            return result

    def reset(self) -> None:
        """After an exception: no window is open and no lease is held any more. Values are kept."""
        with self.lock:
            for unit in self.units:
                unit.num_windows = 0
                unit.num_leases = 0
                for slot in unit.slots:
                    slot.param.__class__ = PagedParameter
