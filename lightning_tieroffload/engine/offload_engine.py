"""Floor 10. The engine: one model under management. Composition root, and what the faces call.

Owns nothing but the wiring: units (``units``), what is on the device (``device_space``), gradients (``gradients``),
updates (``optimizer``), hooks (``module_hooks``). Reading order: concepts, residency, this file, then the part at hand.

[Note: one space per budget] Engines of one process with the same device and settings share one ``DeviceSpace``, hence
one budget: a policy and its reference model do not each take all of it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import logging
import os
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_tieroffload.concepts import Role, Tier
from lightning_tieroffload.config import TierOffloadConfig, refuse_what_is_not_there, resolve_budgets, visible_devices
from lightning_tieroffload.engine import optimizer as optimizers
from lightning_tieroffload.engine import torch_patches
from lightning_tieroffload.engine.compute_trace import ComputeTrace
from lightning_tieroffload.engine.device_space import DeviceSpace, outside_transforms
from lightning_tieroffload.engine.device_updates import assign_device_units, choose_device_units
from lightning_tieroffload.engine.gradients import Gradients
from lightning_tieroffload.engine.host_memory import give_back_released_memory
from lightning_tieroffload.engine.host_space import PAGES_LANE, HostNeed, assign_homes, least_room_nbytes
from lightning_tieroffload.engine.module_hooks import FUSING, ModuleHooks
from lightning_tieroffload.engine.optimizer import Updates, num_moments, state_nbytes
from lightning_tieroffload.engine.params import (
    ParamSlot,
    managed_slot,
    raw_data,
    raw_grad,
    set_raw_data,
    set_raw_grad,
)
from lightning_tieroffload.engine.placement import Placement, homes_of
from lightning_tieroffload.engine.planner import Planner
from lightning_tieroffload.engine.profiler import Profiler
from lightning_tieroffload.engine.reach import inner_optimizers
from lightning_tieroffload.engine.saved import pop_hooks, push_hooks
from lightning_tieroffload.engine.streamed_updates import staging_nbytes
from lightning_tieroffload.engine.streams import make_clock
from lightning_tieroffload.engine.unit_state import CAUTIOUS, GradPlace, UnitState
from lightning_tieroffload.engine.units import UnitSpec, find_units
from lightning_tieroffload.engine.wire import Wire
from lightning_tieroffload.errors import (
    CapacityError,
    ConfigError,
    InfeasiblePlanError,
    TierOffloadError,
    TransferTimeoutError,
    UnsupportedError,
)
from lightning_tieroffload.io.endurance import EnduranceMeter
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.probe import probe_settings
from lightning_tieroffload.io.scheduler import LaneSpec, Scheduler, WorkRecord
from lightning_tieroffload.memory.arena import Block
from lightning_tieroffload.planning.cost_model import ActivationChoice, Choice, UpdatePlace
from lightning_tieroffload.planning.profile import PROFILE_FILE_NAME
from lightning_tieroffload.sizes import GiB, MiB, format_nbytes, round_up
from lightning_tieroffload.trace import TraceRecorder

__all__ = ["OffloadEngine", "engine_of", "spec_nbytes"]

_log = logging.getLogger(__name__)
_UPDATE_LANE = "update"
_STREAMED_LANE = "streamed update"
_IO_THREADS = 8  # four calls under way keep a disk busy; four threads more hash and wait meanwhile (log.md)
_BLOCK_NBYTES = 4 * MiB
_PROBE_FROM_NBYTES = 1 * GiB  # of weights
_PAGE_NBYTES = 4096
_HOST_STREAMED_SHARE = 0.5  # the DEVICE tier is host memory: there is nothing to gain, and all to exercise
_FIRST_STREAMED_SHARE = 0.25  # until both sides were seen
_NUM_SHARES = 32
_SCALARS_NBYTES = 8  # what a class keeps beside tensors of a parameter's shape (``step``)


class _Core:
    """What engines with the same device and settings share. Lives as long as one of them."""

    delay_seed = 0  # of the virtual delays of debug="delays"; tests set it on the class to try several

    def __init__(self, config: TierOffloadConfig, device: torch.device, adopted_nbytes: int) -> None:
        # First: torch's own functions ask for them before this is over.
        self.engines: list[weakref.ref[OffloadEngine]] = []
        self.config = config
        self.device = device
        on_host = device.type == "cpu"
        if on_host:
            give_back_released_memory()
        budgets = resolve_budgets(
            config,
            device,
            adopted_host_nbytes=adopted_nbytes,
            adopted_device_nbytes=0 if on_host else adopted_nbytes,
        )
        self.budget_sources = budgets.sources
        delays = self.delay_seed if "delays" in config.debug and on_host else None
        self.trace: TraceRecorder | None = None
        if config.trace_path is not None and config.trace_steps > 0:
            self.trace = TraceRecorder(config.trace_steps, make_clock(device))
        self.compute_trace = ComputeTrace(self.trace, is_one_stream=not on_host) if self.trace is not None else None
        self.space = DeviceSpace(
            device,
            {Tier.DEVICE: budgets.device_nbytes, Tier.DRAM: budgets.dram_nbytes, Tier.NVME: budgets.nvme_nbytes},
            prefetch_units=(1 if on_host else 2) if config.prefetch_units == "auto" else config.prefetch_units,
            poison="poison" in config.debug,
            no_overlap="no_overlap" in config.debug,
            delay_seed=delays,
            trace=self.trace,
        )
        self.wire = Wire(self.space)
        torch_patches.when_autocast_ends(self.wire.drop_casts)
        torch_patches.when_autocast_ends(self.space.end_autocast)
        torch_patches.before_compiling(self._finish_updates)
        torch_patches.when_checkpoint_saves(self._push_over_checkpoint)
        self.gradients = Gradients(self.space, self.wire)
        self.place = _placer(device)
        # By optimizer, which takes its share along when it goes: what it is expected to keep, and where there is flash.
        self.state_estimates_nbytes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self.state_needs: weakref.WeakKeyDictionary[Optimizer, _StateNeed] = weakref.WeakKeyDictionary()
        self.may_expect_narrow_grads = _runs_under_autocast(device)
        self.are_grads_narrow = False
        self.activation_nbytes = 0  # what activations may map where there is flash
        self.lent_nbytes = 0  # of it, what old casts took from blocks
        self.kept_storages: set[int] = set()  # of buffers and unmanaged parameters
        self.activations = self.space.make_activation_store(
            self.kept_storages.__contains__, self._dram_headroom_nbytes, must_fit=config.activations == "offload"
        )
        self.space.lend_host = self._lend_host
        # Two units at a time on a GPU: one may wait for its gradients while the other's kernels run.
        lanes = [LaneSpec(name=_UPDATE_LANE, concurrency=1 if on_host else 2)]
        if _wants_device_updates(config, device):
            lanes.append(LaneSpec(name=_STREAMED_LANE))
        self.store: ExtentStore | None = None
        self._drives = EnduranceMeter(())
        if config.nvme_paths:
            block_nbytes, io_threads = _io_settings(config, adopted_nbytes)
            self.store = ExtentStore(
                config.nvme_paths,
                block_nbytes=block_nbytes,
                max_nbytes=budgets.nvme_nbytes,
                verify_reads=config.verify_reads,
                write_budget_nbytes=config.nvme_write_budget,
            )
            self._drives = EnduranceMeter(self.store.paths)
            lanes += [PAGES_LANE, *NvmeMover.lane_specs(len(self.store.paths), io_threads=io_threads)]
        self.scheduler = Scheduler(
            lanes,
            timeout_s=config.io_timeout_s,
            debug_seed=delays,
            observer=_recording(self.trace) if self.trace is not None else None,
        )
        if self.store is not None:
            self.space.host.open_flash(self.scheduler, self.store, NvmeMover(self.scheduler, self.store))
        self.space.is_worker = self.scheduler.owns_this_thread
        self.updates = Updates(
            self.space,
            self.gradients,
            self.wire,
            submit=self._submit_update,
            submit_later=self._submit_later,
            submit_streamed=functools.partial(self.scheduler.submit, _STREAMED_LANE),
            kernel=self._optimizer_kernel(),
            find_kernel=_find_kernel,
            make_pool=lambda: _make_pool(device),
            plan_homes=self._plan_homes,
        )
        self._planned_for: Any = None
        self._share_steps: int | None = None
        self.updates.before_step = self._before_step
        self.profiler = Profiler(
            device,
            stalled_s=lambda: sum(self.space.stall_s.values()),
            is_excluded=lambda storage: storage in self.kept_storages or storage in self.space.by_storage,
            take_held=self.space.ledger[Tier.DEVICE].take_recent,
        )
        self.planner = Planner(
            config,
            self.space,
            self.profiler,
            placements=self.placements,
            state_nbytes=self._unit_state_nbytes,
            apply=self.apply,
            can_offload=lambda: self.store is None or self.activation_nbytes > 0,
            why_not_recompute=self._why_not_recompute,
            device_units=self._device_units,
        )
        self.updates.on_step = self._on_step
        self.gradients.on_end = self._on_backward_end
        self.updates.on_updated = self.profiler.updated

    def _on_step(self) -> None:
        self.planner.on_step()
        if self.trace is not None:
            self.trace.end_step(self.updates.num_steps)

    def _on_backward_end(self) -> None:
        self.profiler.end_backward()
        if self.compute_trace is not None:
            self.compute_trace.end_backward()

    def _optimizer_kernel(self) -> str:
        kernel, update_on = self.config.optimizer_kernel, self.config.update_on
        if update_on in ("device", "split") and kernel == "torch":
            raise UnsupportedError(
                f'update_on="{update_on}" uses update kernels of ours, and optimizer_kernel="torch" asks for torch\'s '
                'own. Leave out one of the two, or set update_on="cpu".'
            )
        return "numba" if update_on in ("device", "split") else kernel

    def updates_on_device(self) -> bool:
        """Whether units' updates run on the device, as far as settings, kernels and room allow it."""
        return _wants_device_updates(self.config, self.device) and self.updates.kernel != "torch"

    def _plan_homes(self) -> None:
        """Between two steps: what stays on the device where there is room. Called under the residency lock."""
        if not self.updates_on_device() or self.planner.plan is not None:
            return  # a plan says where each unit's update runs
        units = self.space.units
        share = self._streamed_share()
        key = (share, *((unit.index, unit.wire_state, unit.grad_nbytes, unit.has_accumulated) for unit in units))
        if key != self._planned_for:
            self._planned_for = key
            budget_nbytes = self.space.ledger[Tier.DEVICE].budget_nbytes
            assign_device_units(self._by_next_use(), budget_nbytes, self.space.prefetch_units, share)

    def _streamed_share(self) -> float:
        """Of what is updated from DRAM, the part that goes through the device, so that both sides end together."""
        if self.config.update_on == "device":
            return 1.0
        if self.device.type == "cpu":
            return _HOST_STREAMED_SHARE
        seen = self.updates.streamed_share
        if seen is None:
            return _FIRST_STREAMED_SHARE
        # In steps, so that units do not change sides for every breath of a neighbour.
        if self._share_steps is None or abs(seen * _NUM_SHARES - self._share_steps) > 1:
            self._share_steps = round(seen * _NUM_SHARES)
        return min(max(self._share_steps, 1), _NUM_SHARES - 1) / _NUM_SHARES

    def _by_next_use(self) -> list[UnitState]:
        order = self.space.next_uses()
        return sorted(self.space.units, key=lambda unit: (order.get(unit.index, 1 << 30), unit.index))

    def _device_units(self, budget_nbytes: int) -> set[UnitState]:
        """The units that ``_plan_homes`` would keep on the device within so many bytes."""
        if not self.updates_on_device():
            return set()
        return choose_device_units(self._by_next_use(), budget_nbytes, self.space.prefetch_units)

    def _before_step(self, optimizer: Optimizer) -> None:
        """Groups may have been added, or parameters attached, since the optimizer was adopted."""
        engine = next((e for ref in self.engines if (e := ref()) is not None), None)
        if self.store is not None and engine is not None:
            engine._assign_state(optimizer)
            self.updates.hold_loose_state(optimizer)
            with self.space.lock:
                self.space.host.hold_served()
                self._note_beside()

    def _note_beside(self) -> None:
        engine = next((e for ref in self.engines if (e := ref()) is not None), None)
        if engine is not None:
            self.space.host.note_beside(engine._dram_nbytes() - self.space.host.used_nbytes)

    # ------------------------------------------------------------------------------------------------- the plan
    def placements(self, unit: UnitState) -> set[Placement]:
        """What a plan may choose for a unit: what the engine can realise between two steps. A line each.

        What is at home on flash stays there. Parameters that stream are left on the device where there is room ("at
        home there"), which takes no moving: the home copy in DRAM is there all the same.
        """
        now = homes_of(unit.choice)
        if Tier.NVME in now[:3]:
            return {now}
        found: set[Placement] = {(home, Tier.DRAM, Tier.DRAM, UpdatePlace.CPU) for home in (Tier.DEVICE, Tier.DRAM)}
        if self.updates_on_device() and unit.grad_nbytes and not unit.is_paged:
            found.add((Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, UpdatePlace.DEVICE))
            if staging_nbytes(self.space.ledger[Tier.DEVICE].budget_nbytes):
                found |= {(home, Tier.DRAM, Tier.DRAM, UpdatePlace.DEVICE) for home in (Tier.DEVICE, Tier.DRAM)}
        return found | {now}

    @staticmethod
    def apply(unit: UnitState, choice: Choice) -> None:
        """Give a unit its line of the plan. Whatever ``placements`` allows and needs moving is moved here."""
        unit.choice = choice

    def _why_not_recompute(self, unit: UnitState) -> str | None:
        found = [e._hooks.why_not_recompute(unit) for ref in self.engines if (e := ref()) is not None]
        return next((why for why in found if why is not None), None)

    def _unit_state_nbytes(self, unit: UnitState) -> int:
        params = {id(slot.param) for slot in unit.slots}
        return sum(
            value.nbytes
            for optimizer in self.adopted()
            for p, entry in list(dict.items(optimizer.state))
            if id(p) in params and isinstance(entry, dict)
            for value in list(entry.values())
            if isinstance(value, torch.Tensor)
        )

    def adopted(self) -> list[Optimizer]:
        engines = [engine for ref in self.engines if (engine := ref()) is not None]
        return [optimizer for engine in engines for ref in engine._optimizers if (optimizer := ref()) is not None]

    # ------------------------------------------------------------------------------------------------- updates
    def _submit_update(
        self,
        work: Callable[[], None],
        *,
        label: str,
        priority: int,
        after: Sequence[Any],
        announce: Callable[[Any], object],
    ) -> Any:
        ticket = self.scheduler.submit(
            _UPDATE_LANE, work, label=label, priority=priority, after=after, announce=announce
        )
        if self.space.no_overlap:
            ticket.wait()
        return ticket

    def _submit_later(self, work: Callable[[], None], *, label: str, priority: int) -> Any:
        """From an update's own thread: what need not be over when the next forward comes."""
        return self.scheduler.submit(_UPDATE_LANE, work, label=label, priority=priority)

    def _finish_updates(self) -> None:
        """Wait until no update runs. What one failed with is raised where it would be anyway."""
        if not self.scheduler.owns_this_thread():
            with contextlib.suppress(TransferTimeoutError):
                self.scheduler.settle()

    def _push_over_checkpoint(self) -> bool:
        """See [Note: a checkpoint counts]."""
        return self.num_open > 0 and push_hooks(self.space, self.gradients.on_unpack, is_over_checkpoint=True)

    @property
    def num_open(self) -> int:
        return sum(1 for ref in self.engines if ref() is not None)

    def running_dram_nbytes(self) -> int:
        """Host bytes of homes and gradients once every gradient has been down."""
        are_narrow = self.are_grads_narrow
        return sum(unit.running_dram_nbytes(are_grads_narrow=are_narrow) for unit in self.space.units)

    @property
    def state_estimate_nbytes(self) -> int:
        """What adopted optimizers whose class is known will keep."""
        return sum(self.state_estimates_nbytes.values())

    def made_state_nbytes(self) -> int:
        """Optimizer state in DRAM, in blocks and beside them."""
        engine = next((e for ref in self.engines if (e := ref()) is not None), None)
        beside_nbytes = engine._state_nbytes() if engine is not None else 0
        return sum(unit.state_block.dram_nbytes for unit in self.space.units) + beside_nbytes

    def expect_narrow_grads(self) -> None:
        """The budget holds gradients in 16 bits alone: a wider one is refused where it has no room."""
        self.are_grads_narrow = True
        self.gradients.admit_wide = self._admit_wide_grad

    def _admit_wide_grad(self, slot: ParamSlot) -> None:
        more_nbytes = slot.unit.more_for_wide_grad_nbytes(slot)
        left_nbytes = self._dram_headroom_nbytes()
        if more_nbytes > max(left_nbytes, 0):
            budget_nbytes = self.space.ledger[Tier.DRAM].budget_nbytes
            raise CapacityError(
                f"dram_budget is {format_nbytes(budget_nbytes)}, which holds the gradients in 16 bits alone, but those "
                f"of unit {slot.unit.name} came in full width: sums over several micro-batches, no autocast, or "
                f"numbers that 16 bits do not hold. They need {format_nbytes(more_nbytes)} more, and "
                f"{format_nbytes(max(left_nbytes, 0))} is left. Raise dram_budget by 2 bytes a parameter, or name a "
                f"directory on flash in nvme_paths."
            )

    def _dram_headroom_nbytes(self) -> int:
        """What activations may still map: the budget less what homes, gradients and optimizer state hold or will."""
        if self.store is not None:
            return self.activation_nbytes - self.activations.mapped_nbytes()
        held_nbytes = self.running_dram_nbytes() + max(self.state_estimate_nbytes, self.made_state_nbytes())
        held_nbytes += self.activations.mapped_nbytes()
        return self.space.ledger[Tier.DRAM].budget_nbytes - held_nbytes

    def _lend_host(self, nbytes: int) -> Block | None:
        """DRAM for old casts, which is that of activations; what comes and goes from flash makes room for them."""
        block = self.activations.lend(nbytes)
        if block is None and self.store is not None:
            more_nbytes = round_up(nbytes, _PAGE_NBYTES)
            if self.space.host.give_room(more_nbytes):
                self.lent_nbytes += more_nbytes
                self.activation_nbytes = max(self.activation_nbytes, self.activations.mapped_nbytes()) + more_nbytes
                block = self.activations.lend(nbytes)
        return block

    def assign(self, new: Sequence[HostNeed] = ()) -> list[Choice]:
        """Homes of everything, ``new`` units last; what is attached follows at once. Returns those of ``new``."""
        if self.store is None:
            return [need.choice for need in new]
        units = self.space.units
        states = list(self.state_needs.values())
        paged_nbytes: collections.Counter[UnitState] = collections.Counter()
        for state in states:
            paged_nbytes.update(state.paged_nbytes)
        whole = {unit for state in states for unit in state.whole}
        needs = [_need_of(unit, paged_nbytes[unit], is_whole=unit in whole) for unit in units]
        if self.config.state_home == "nvme":
            needs, new = _with_state_on_flash(needs), _with_state_on_flash(new)
        budget_nbytes = self.space.ledger[Tier.DRAM].budget_nbytes
        fixed_nbytes = sum(sum(state.fixed_nbytes.values()) for state in states) + self.lent_nbytes
        choices = assign_homes([*needs, *new], budget_nbytes, fixed_nbytes=fixed_nbytes)
        needs = [dataclasses.replace(n, choice=c) for n, c in zip([*needs, *new], choices, strict=True)]
        self._check_flash(sum(need.nbytes_on(Tier.NVME) for need in needs))
        at_home_nbytes = fixed_nbytes + sum(need.nbytes_on(Tier.DRAM) for need in needs)
        room_nbytes = budget_nbytes - at_home_nbytes
        least_nbytes = least_room_nbytes(needs)
        # Where everything fits nothing competes with activations for DRAM.
        self.activation_nbytes = (room_nbytes - least_nbytes) // (2 if least_nbytes else 1)
        if least_nbytes and self.config.activations == "offload":
            room_nbytes -= self.activation_nbytes
        elif least_nbytes:
            self.activation_nbytes = 0  # DRAM is what flash is short of: a plan recomputes instead
        self.activation_nbytes += self.lent_nbytes
        self.space.host.room_nbytes, self.space.host.least_nbytes = room_nbytes, least_nbytes
        on_flash = [need for need in needs if need.choice.param_home is Tier.NVME]
        self.space.host.forward_nbytes = max((need.param_nbytes for need in on_flash), default=0)
        self.space.host.pass_nbytes = least_room_nbytes(dataclasses.replace(need, state_nbytes=0) for need in needs)
        self._note_beside()
        has_state_left = False
        host = self.space.host
        for unit, need in zip(units, needs, strict=False):  # the new ones come last
            if need.choice != unit.choice:
                # What has not moved yet is beside the room, not in it.
                host.room_nbytes = max(min(room_nbytes, budget_nbytes - host.beside_nbytes), least_nbytes)
                has_state_left |= need.choice.state_home is Tier.NVME and not unit.state_block.is_paged
                self.space.settle_home(unit, to_write=True)
                for record in unit.grads:
                    record.ticket.wait()
                self.space.host.rehome(unit, need.choice)
                if not unit.grad_block.segments:  # no gradient has come yet
                    self.space.host.reserve(unit.grad_block, need.grad_nbytes)
                unit.allot_state({})
        for optimizer in self.adopted() if has_state_left else ():
            self.updates.hold_state(optimizer)
        host.room_nbytes = room_nbytes
        return choices[len(units) :]

    def _check_flash(self, need_nbytes: int) -> None:
        account = self.space.ledger[Tier.NVME]
        if need_nbytes > account.budget_nbytes:
            raise InfeasiblePlanError(
                f"nvme_budget is {format_nbytes(account.budget_nbytes)} ({account.budget_nbytes} bytes), but what does "
                f"not fit into dram_budget takes {format_nbytes(need_nbytes)} on flash. The smallest nvme_budget that "
                f"works is {need_nbytes} bytes; or raise dram_budget.",
                tier="nvme",
                least_budget_nbytes=need_nbytes,
            )

    def has_failed(self) -> bool:
        """Whether background work failed: engines that are attached from now on share another core."""
        return self.scheduler.failed

    def endurance(self, num_steps: int) -> dict[str, Any]:
        """What the run's writes leave of the life of each path's drive."""
        if self.store is None:
            return {}
        elapsed_s = time.monotonic() - self.store.opened_s
        return self._drives.report(self.store.written_nbytes_by_path, elapsed_s, num_steps)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # last in, first out; one that raises does not keep the others from it
            if self.store is not None:
                stack.callback(self.store.close)
            stack.callback(self.scheduler.close)
            stack.callback(self.activations.close)
            stack.callback(self.space.close)
            stack.callback(self.updates.close)


class _StateNeed:
    """Host bytes of the state that one optimizer keeps of units' parameters, where there is flash."""

    def __init__(self) -> None:
        self.slots: set[ParamSlot] = set()  # whose state is counted
        self.paged_nbytes: dict[UnitState, int] = {}  # what may lie on flash
        self.fixed_nbytes: dict[UnitState, int] = {}  # what may not
        self.whole: set[UnitState] = set()  # units that the optimizer steps over all at once

    def copy(self) -> _StateNeed:
        other = _StateNeed()
        other.slots, other.whole = self.slots.copy(), self.whole.copy()
        other.paged_nbytes, other.fixed_nbytes = self.paged_nbytes.copy(), self.fixed_nbytes.copy()
        return other

    def add(self, unit: UnitState, nbytes_of: dict[int, int], *, is_paged: bool) -> None:
        """Count the state of some of a unit's slots, by index."""
        self.slots.update(unit.slots[index] for index in nbytes_of)
        nbytes = round_up(sum(nbytes_of.values()), _PAGE_NBYTES)
        fixed_nbytes = _SCALARS_NBYTES * len(nbytes_of)
        if is_paged:
            self.paged_nbytes[unit] = self.paged_nbytes.get(unit, 0) + nbytes
        else:
            fixed_nbytes += nbytes
            self.whole.add(unit)
        self.fixed_nbytes[unit] = self.fixed_nbytes.get(unit, 0) + fixed_nbytes

    def forget(self, unit: UnitState) -> None:
        self.slots.difference_update(unit.slots)
        self.paged_nbytes.pop(unit, None)
        self.fixed_nbytes.pop(unit, None)
        self.whole.discard(unit)


def _io_settings(config: TierOffloadConfig, adopted_nbytes: int) -> tuple[int, int]:
    """``block_nbytes`` and ``io_threads``: as chosen, else as the disks were probed, else what suits most.

    A small model is trained before a probe would be done, and a budget of writes is not for measuring.
    """
    block_nbytes, io_threads = _BLOCK_NBYTES, _IO_THREADS
    if adopted_nbytes >= _PROBE_FROM_NBYTES and "auto" in (config.block_nbytes, config.io_threads):
        probed = probe_settings(config.nvme_paths, may_measure=config.nvme_write_budget is None)
        block_nbytes, io_threads = probed or (block_nbytes, io_threads)
        _log.info("block_nbytes=%d, io_threads=%d (%s)", block_nbytes, io_threads, "probed" if probed else "not probed")
    return (
        block_nbytes if config.block_nbytes == "auto" else config.block_nbytes,
        io_threads if config.io_threads == "auto" else config.io_threads,
    )


def _recording(trace: TraceRecorder) -> Callable[[WorkRecord], None]:
    def record(work: WorkRecord) -> None:
        trace.add(work.lane, work.label, work.started_s, work.finished_s, work.nbytes)

    return record


def _find_kernel(cls: type, group: dict[str, Any], dtype: torch.dtype) -> Any:
    from lightning_tieroffload.kernels.registry import find_kernel

    return find_kernel(cls, group, dtype)


def _wants_device_updates(config: TierOffloadConfig, device: torch.device) -> bool:
    """Whether the settings have updates on the device, as far as there are kernels for it."""
    return config.update_on in ("device", "split") or (config.update_on == "auto" and device.type != "cpu")


def _make_pool(device: torch.device) -> Any:
    from lightning_tieroffload.kernels.pool import KernelPool
    from lightning_tieroffload.topology.placement import worker_cpus

    # Update threads run beside the memory that they update; on a host with one node there is nothing to choose.
    cpus = None
    if device.type == "cuda":
        cpus = worker_cpus(device.index, visible_devices(), os.sched_getaffinity(0), asked=True)
    return KernelPool(cpus=cpus)


def _placer(device: torch.device) -> Callable[[int, int], Any] | None:
    """Where a mapping's pages go: the nodes nearest to the GPU. See topology/placement.py."""
    if device.type != "cuda":
        return None
    from lightning_tieroffload.topology.placement import arena_placer

    return arena_placer(device.index, visible_devices())


_cores: weakref.WeakSet[_Core] = weakref.WeakSet()


def engine_of(obj: Any) -> OffloadEngine | None:
    """The engine that manages a module, a parameter or an optimizer; None where none does."""
    if isinstance(obj, torch.Tensor):
        slot = managed_slot(obj)
        return None if slot is None else slot.owner  # type: ignore[return-value]
    if isinstance(obj, nn.Module):
        candidates = list(obj.parameters())
    else:
        obj = getattr(obj, "_optimizer", getattr(obj, "optimizer", obj))
        candidates = [p for group in obj.param_groups for p in group["params"]]
    for p in candidates:
        slot = managed_slot(p)
        if slot is not None:
            return slot.owner  # type: ignore[return-value]
    return None


def _is_own_data(slot: ParamSlot, data: torch.Tensor) -> bool:
    """Whether ``data`` is the parameter's memory as it is: ``p.data = p.data``."""
    own = raw_data(slot.param)
    return (
        type(data) in (torch.Tensor, nn.Parameter)
        and data.layout == torch.strided
        and data.untyped_storage()._cdata == own.untyped_storage()._cdata
        and (data.shape, data.stride(), data.storage_offset()) == (own.shape, own.stride(), own.storage_offset())
    )


def _on_born(p: torch.Tensor) -> None:
    # A function without a closure: the collector cannot see through a hook in C++, so one that held the engine (which
    # holds the parameter) would keep a dropped model's homes and threads for good.
    slot = managed_slot(p)
    if slot is not None:
        slot.owner.gradients.on_born(slot)  # type: ignore[attr-defined]


class OffloadEngine:
    """One model under management. Made by ``attach``; undone by ``close``.

    Methods may be called from any thread unless they say otherwise. After an exception in the training loop, ``reset``
    brings back a state in which the next forward can start; parameter values and optimizer state are kept.
    """

    def __init__(self, model: nn.Module, config: TierOffloadConfig, core: _Core) -> None:
        # Use ``attach``.
        self.config = config
        self.core = core
        self.space = core.space
        self.gradients = core.gradients
        self.updates = core.updates
        self.device = core.device
        self.closed = False
        self.before_close: Callable[[], None] | None = None
        """Called once when `close` begins: whoever reports must do it before units leave the books. Must not raise."""
        self.is_accumulating = False
        self._model = weakref.ref(model)
        self.units: list[UnitState] = []
        self._specs: list[UnitSpec] = []
        self._spanning: set[str] = set()
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._moved_buffers: list[tuple[weakref.ref[nn.Module], str, torch.device]] = []
        self._grad_handles: dict[ParamSlot, Any] = {}
        self._unmanaged: list[tuple[str, str, int]] = []
        self._hooks = ModuleHooks(
            core.space,
            core.gradients,
            self._watch_unit,
            core.activations,
            offloads_all=config.activations == "offload",
            profiler=core.profiler,
            planner=core.planner,
            trace=core.compute_trace,
        )

    # ------------------------------------------------------------------------------------------------- attach
    @classmethod
    def attach(cls, model: nn.Module, config: TierOffloadConfig, device: torch.device | None = None) -> OffloadEngine:
        """Take a model's parameters into their homes. The module and its Parameters keep their identity.

        Attaching a model again gives its engine; what is asked for then must be what is in force. Parts that another
        engine manages stay with it, stored once.

        Raises:
            ConfigError: the model is attached already, with other settings.
            InfeasiblePlanError: a budget cannot work; it names the unit, the numbers and the least budget that would.
            UnsupportedError: the whole model was compiled, or its parameters are spread over several devices.
        """
        _refuse_lazy(model)
        existing = {slot.owner: None for p in model.parameters() if (slot := managed_slot(p)) is not None}
        unmanaged = [p for p in model.parameters() if managed_slot(p) is None and p.numel() > 0]
        for engine in existing:
            if engine._model() is model:  # type: ignore[attr-defined]
                return engine._as_asked_for(config, device)  # type: ignore[attr-defined,no-any-return]
        if existing and not any(type(p) is nn.Parameter for p in unmanaged):
            return next(iter(existing))._as_asked_for(config, device)  # type: ignore[attr-defined,no-any-return]
        if type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                "The whole model is compiled (torch.compile(model)), so its parameters cannot be moved while it runs. "
                "Hand over the model as it was, and compile its layers instead: `for layer in layers: layer.compile()`."
            )
        _refuse_unfinished(config)
        device = _compute_device(device)
        _refuse_spread(model, device)
        core = cls._core_for(config, device, sum(p.numel() * p.itemsize for p in model.parameters()))
        engine = cls(model, config, core)
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            try:
                engine._take(model)
            except BaseException:
                engine.close()
                if core.num_open == 0:
                    core.close()  # nobody else will
                raise
        return engine

    def _as_asked_for(self, config: TierOffloadConfig, device: torch.device | None) -> OffloadEngine:
        """This engine, for who attaches its model again. Settings that nobody chose this time may differ."""
        asked = {key: (value, getattr(self.config, key)) for key, value in config.chosen().items()}
        if device is not None:
            asked["device"] = _compute_device(device), self.device
        other = {key: pair for key, pair in asked.items() if pair[0] != pair[1]}
        if other:
            in_force = ", ".join(f"{key}={now!r}" for key, (_, now) in other.items())
            wanted = ", ".join(f"{key}={new!r}" for key, (new, _) in other.items())
            raise ConfigError(
                f"The model is offloaded already, with {in_force}, and this call asks for {wanted}. Settings stay as "
                "they are while an engine lives: call engine_of(model).close() before, or leave them out to keep it."
            )
        return self

    @staticmethod
    def _core_for(config: TierOffloadConfig, device: torch.device, adopted_nbytes: int) -> _Core:
        if any(c.device == device and c.config == config and c.num_open > 0 for c in _cores):
            gc.collect()  # an engine whose model is gone must not count against the budget
        for core in list(_cores):
            if core.device == device and core.config == config and core.num_open > 0 and not core.has_failed():
                return core
        core = _Core(config, device, adopted_nbytes)
        _cores.add(core)
        return core

    def _take(self, model: nn.Module) -> None:
        units = find_units(model, self.config.units)
        self._check_budgets(model, units.units)
        self.core.engines.append(weakref.ref(self))
        torch_patches.install(self)
        wrapper_of = {id(m._orig_mod): m for m in model.modules() if type(m).__name__ == "OptimizedModule"}
        choices = self.core.assign([_spec_need(spec, self.device) for spec in units.units])
        for spec, choice in zip(units.units, choices, strict=True):
            self._take_unit(spec, wrapper_of, choice)
        self._unmanaged = [(name, reason, p.numel() * p.itemsize) for name, p, reason in units.unmanaged]
        for _, p, _ in units.unmanaged:
            if managed_slot(p) is None and p.device != self.device:
                set_raw_data(p, raw_data(p).to(self.device))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != self.device:
                    self._moved_buffers.append((weakref.ref(module), name, buffer.device))
                    module._buffers[name] = buffer = buffer.to(self.device)
                if buffer is not None and buffer.layout == torch.strided:
                    self.core.kept_storages.add(buffer.untyped_storage()._cdata)
            if not isinstance(module, torch.jit.ScriptModule):  # takes no such hooks, and holds nothing that is managed
                self._hooks.bracket_state_dict(module)
        self._hook_modules(model, wrapper_of)
        if self.core.num_open == 1 and self.core.planner.plan is None:
            if self.config.plan_file is not None:
                self.core.planner.use_plan_file(self.config.plan_file)
            self.core.planner.start()

    def _take_unit(self, spec: UnitSpec, wrapper_of: dict[int, nn.Module], choice: Choice) -> None:
        params = [(name, p) for name, p in spec.params if managed_slot(p) is None]
        if not params:
            return
        is_compiled = spec.root is not None and (
            id(spec.root) in wrapper_of
            or type(spec.root).__name__ == "OptimizedModule"
            or getattr(spec.root, "_compiled_call_impl", None) is not None
        )
        unit = UnitState(
            name=spec.name,
            index=self.space.new_index(),
            params=params,
            castable=_castable(spec),
            device=self.device,
            pin=self.device.type == "cuda",
            poison="poison" in self.config.debug,
            is_compiled=is_compiled,
            place=self.core.place,
            choice=choice,
            keeper=self.space.host,
            root=None if is_compiled else spec.root,
        )
        activation = _FIRST_ACTIVATION[self.config.activations]
        if spec.root is not None or activation is ActivationChoice.OFFLOAD_DRAM:
            unit.choice = dataclasses.replace(unit.choice, activation=activation)
        unit.is_spanning = spec.name in self._spanning
        # First: what an exception leaves half taken is given back by `close`.
        self.units.append(unit)
        self._specs.append(spec)
        host = self.space.host
        with self.space.lock:
            host.add(unit)
            try:
                host.reserve(unit.grad_block, _spec_need(spec, self.device).grad_nbytes)
                unit.take_homes()
                host.note_written(unit.param_block)
                host.write_behind(unit.param_block)
            except BaseException:
                host.remove(unit)
                raise
        for slot in unit.slots:
            slot.owner = self
            slot.param.__dict__["_tieroffload_slot"] = slot
        self.space.add(unit)
        for slot in unit.slots:
            grad = raw_grad(slot.param)
            if grad is not None:
                unit.grads[slot.index].place, unit.grads[slot.index].touched = GradPlace.LIVE, True
            self._watch(slot)

    def _hook_modules(self, model: nn.Module, wrapper_of: dict[int, nn.Module]) -> None:
        """Windows around every module that is a unit's root or directly owns one of its parameters."""
        needs: dict[int, tuple[nn.Module, list[UnitState]]] = {}
        inside_compiled: set[int] = set()
        for unit, spec in zip(self.units, self._specs, strict=True):
            if unit.is_compiled and spec.root is not None:
                inside_compiled.update(id(m) for m in spec.root.modules() if m is not spec.root)
                root = wrapper_of.get(id(spec.root), spec.root)
                needs.setdefault(id(root), (root, []))[1].append(unit)
                inside_compiled.add(id(spec.root))
                inside_compiled.discard(id(root))
        for unit, spec in zip(self.units, self._specs, strict=True):
            if unit.is_compiled:
                continue
            for module in (*spec.owners, *((spec.root,) if spec.root is not None else ())):
                entry = needs.setdefault(id(module), (module, []))[1]
                if unit not in entry:
                    entry.append(unit)
        for module, first in _readers_of_a_first_layer(model):
            for unit, spec in zip(self.units, self._specs, strict=True):
                if not unit.is_compiled and spec.root is first:
                    needs.setdefault(id(module), (module, []))[1].append(unit)
        for unit, spec in zip(self.units, self._specs, strict=True):
            held = {id(p) for _, p in spec.params}
            for module in spec.root.modules() if spec.root is not None and not unit.is_compiled else ():
                if isinstance(module, FUSING) and all(id(p) in held for p in module.parameters()):
                    entry = needs.setdefault(id(module), (module, []))[1]
                    if unit not in entry:
                        entry.append(unit)
        if self.config.activations == "offload":  # also what the model's own checkpoints save between its units
            needs.setdefault(id(model), (model, []))
        for key, (module, units) in needs.items():
            if key not in inside_compiled:
                self._hooks.add(module, tuple(units))

    def _check_budgets(self, model: nn.Module, specs: Sequence[UnitSpec]) -> None:
        """Before anything moves: the least device budget is what compute needs at one time."""
        owners = {id(m) for spec in specs for m in spec.owners}
        held_around = {id(first) for _, first in _readers_of_a_first_layer(model)}
        spanning_nbytes, largest_nbytes, largest_name = 0, 0, ""
        for spec in specs:
            params = [(name, p) for name, p in spec.params if managed_slot(p) is None]
            nbytes = spec_nbytes(spec, self.device)
            grad_nbytes = max((p.numel() * p.itemsize for _, p in params if p.requires_grad), default=0)
            own = {id(m) for m in spec.owners}
            is_spanning = id(spec.root) in held_around or any(
                id(child) in owners and id(child) not in own for m in spec.owners for child in m.modules()
            )
            if is_spanning:
                self._spanning.add(spec.name)
                spanning_nbytes += nbytes + grad_nbytes
            elif nbytes + grad_nbytes > largest_nbytes:
                largest_nbytes, largest_name = nbytes + grad_nbytes, spec.name
        least_nbytes = spanning_nbytes + largest_nbytes
        budget_nbytes = self.space.ledger[Tier.DEVICE].budget_nbytes
        if least_nbytes > budget_nbytes:
            raise InfeasiblePlanError(
                f"device_budget is {self._budget(Tier.DEVICE)}, but unit {largest_name} "
                f"needs {format_nbytes(least_nbytes)} on the device at one time (its parameters, its largest gradient"
                f"{', modules that are in use around it' if spanning_nbytes else ''}). The smallest device_budget that "
                f"works is {least_nbytes} bytes; raise device_budget, or name smaller modules in `units`.",
                tier="device",
                least_budget_nbytes=least_nbytes,
            )
        if self.core.store is None:
            self._check_dram(sum(_dram_nbytes(spec, self.device) for spec in specs), "parameters and gradients")

    def _budget(self, tier: Tier) -> str:
        """Its number, and where that is from unless somebody chose it."""
        nbytes = self.space.ledger[tier].budget_nbytes
        source = self.core.budget_sources[tier.name.lower()]
        return f"{format_nbytes(nbytes)} ({nbytes} bytes{f'; {source}' if source.startswith('auto') else ''})"

    def _check_dram(self, more_nbytes: int, what: str) -> None:
        account = self.space.ledger[Tier.DRAM]
        core, units = self.core, self.space.units
        more_nbytes += core.made_state_nbytes()
        need_nbytes = core.running_dram_nbytes() + more_nbytes
        if need_nbytes > account.budget_nbytes:
            narrow_nbytes = sum(unit.running_dram_nbytes(are_grads_narrow=True) for unit in units) + more_nbytes
            may_be_narrow = core.may_expect_narrow_grads and narrow_nbytes < need_nbytes
            if may_be_narrow and narrow_nbytes <= account.budget_nbytes:
                core.expect_narrow_grads()
                _log.warning(
                    "dram_budget (%s) holds this job while its gradients come in 16 bits, as they do under autocast "
                    "without gradient accumulation: %s. Otherwise it needs %s.",
                    format_nbytes(account.budget_nbytes), format_nbytes(narrow_nbytes), format_nbytes(need_nbytes),
                )  # fmt: skip
                return
            under_autocast = f" ({narrow_nbytes} under autocast without accumulation)" if may_be_narrow else ""
            config = self.core.config
            takes_it_all = (
                self.space.device.type == "cpu" and config.dram_budget == "auto" and config.device_budget != "auto"
            )
            lower = "lower device_budget, which leaves nothing else, or " if takes_it_all else ""
            raise InfeasiblePlanError(
                f"dram_budget is {self._budget(Tier.DRAM)}, but {what} "
                f"would take what must be in DRAM to {format_nbytes(need_nbytes)}. The smallest dram_budget that works "
                f"is {need_nbytes} bytes{under_autocast}; {lower or 'or '}name a directory on flash in nvme_paths for "
                "what does not fit.",
                tier="dram",
                least_budget_nbytes=need_nbytes,
            )

    # ------------------------------------------------------------------------------------------------- gradients
    def _watch(self, slot: ParamSlot) -> None:
        if slot not in self._grad_handles and slot.param.requires_grad:
            self._grad_handles[slot] = slot.param.register_post_accumulate_grad_hook(_on_born)

    def _watch_unit(self, unit: UnitState) -> None:
        """A parameter may have been unfrozen since."""
        if unit.num_watched != len(unit.slots):
            fresh = [slot for slot in unit.slots if slot.param.requires_grad and slot not in self._grad_handles]
            if fresh:
                with self.space.lock:
                    self.core.assign()  # before their gradients come; refused, it is refused again the next time
            for slot in fresh:
                slot.owner._watch(slot)  # type: ignore[attr-defined]
            unit.num_watched = sum(slot in self._grad_handles for slot in unit.slots)

    def set_accumulating(self, flag: bool) -> None:
        """A hint: True means that the coming backward does not end the accumulation window."""
        self.is_accumulating = flag

    # ------------------------------------------------------------------------------------------------- optimizers
    def adopt_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Put the managed class on the user's optimizer; the same object comes back.

        Raises:
            UnsupportedError: it has parameters of engines with different settings, hence of different budgets.
            InfeasiblePlanError: its state does not fit into ``dram_budget``.
        """
        optimizers.refuse_several_spaces(optimizer)
        if optimizers.is_adopted(optimizer):
            self._remember(optimizer)
            return optimizer
        inner = inner_optimizers(optimizer)
        if self._replaces_another(optimizer):
            gc.collect()  # the other's state counts as long as it lives, and optimizers are in cycles of their own
            self.updates.count_anew()
        # One that steps through others keeps their groups, and in its own state what nobody can tell beforehand.
        estimates_nbytes = {each: self._state_estimate_nbytes(each) for each in inner or [optimizer]}
        if self.core.store is None:
            self._check_dram(sum(estimates_nbytes.values()), f"the state of {type(optimizer).__name__}")
        else:
            for each in estimates_nbytes:
                self._assign_state(each)
        self.core.state_estimates_nbytes.update(estimates_nbytes)
        optimizers.adopt(optimizer)
        for each in inner:
            self._remember(each)
        self._remember(optimizer)
        if self.core.store is not None:
            for each in inner or [optimizer]:  # it may have stepped, or been loaded, before
                self.updates.hold_state(each)
        return optimizer

    def _replaces_another(self, optimizer: Optimizer) -> bool:
        """Whether an adopted optimizer has some of its parameters."""
        params = {p for group in optimizer.param_groups for p in group["params"]}
        return any(p in params for each in self.core.adopted() for group in each.param_groups for p in group["params"])

    def _assign_state(self, optimizer: Optimizer) -> None:
        """Homes again where this optimizer has parameters that are new; space on flash for their state."""
        by_unit: dict[UnitState, dict[int, int]] = {}
        known = self.core.state_needs.get(optimizer) or _StateNeed()
        for group in optimizer.param_groups:
            for p in group["params"]:
                slot = managed_slot(p)
                if slot is not None and slot not in known.slots and p.requires_grad:
                    by_unit.setdefault(slot.unit, {})[slot.index] = state_nbytes(optimizer, group, p)
        if not by_unit:
            return
        is_paged = self.updates.runs_per_unit(optimizer)
        if not is_paged and self.config.state_home == "nvme":
            name = optimizers.user_class(optimizer).__name__
            raise UnsupportedError(
                f'state_home="nvme", but {name} steps over all parameters at once, so its state stays in DRAM. Leave '
                "state_home out, or use an optimizer of torch other than LBFGS."
            )
        need = known.copy()
        for unit, nbytes_of in by_unit.items():
            need.add(unit, nbytes_of, is_paged=is_paged)
        with self.space.lock:
            self.core.state_needs[optimizer] = need
            try:
                self.core.assign()
                for unit, nbytes_of in by_unit.items() if is_paged else ():
                    unit.allot_state(nbytes_of)
            except BaseException:
                self.core.state_needs[optimizer] = known
                raise

    def _remember(self, optimizer: Optimizer) -> None:
        others = [ref for ref in self._optimizers if ref() not in (None, optimizer)]
        self._optimizers = [*others, weakref.ref(optimizer)]

    @staticmethod
    def _state_estimate_nbytes(optimizer: Optimizer) -> int:
        total = 0
        for group in optimizer.param_groups:
            for p in group["params"]:
                entry = dict.get(optimizer.state, p)
                if managed_slot(p) is None:
                    continue
                if entry:  # loaded, or made by the class at once (Adagrad)
                    total += sum(value.nbytes for value in entry.values() if isinstance(value, torch.Tensor))
                else:
                    total += num_moments(optimizer, group) * p.numel() * p.itemsize + (4 if "betas" in group else 0)
        return total

    # ------------------------------------------------------------------------------------------------- SlotOwner
    def touch(self, slots: Sequence[ParamSlot], call: Callable[[], Any], *, grad_mode: bool) -> Any:
        self.updates.refuse_from_inside(slots)
        spaces = {slot.owner.space: slot.owner for slot in slots}  # type: ignore[attr-defined]
        if len(spaces) > 1:
            # Of engines with different settings. Each space is locked while the next is, so always in one order.
            first = spaces[min(spaces, key=id)]
            own = [slot for slot in slots if slot.owner.space is first.space]  # type: ignore[attr-defined]
            rest = [slot for slot in slots if slot.owner.space is not first.space]  # type: ignore[attr-defined]
            return first.touch(own, lambda: rest[0].owner.touch(rest, call, grad_mode=grad_mode), grad_mode=grad_mode)
        parts = list({slot.part: None for slot in slots})
        if grad_mode:
            for slot in slots:
                slot.is_mixed = slot.was_mixed = True
                slot.owner._watch(slot)  # type: ignore[attr-defined]
        store = self.core.activations if self.config.activations == "offload" else None
        pushed = grad_mode and push_hooks(self.space, self.gradients.on_unpack, store)
        try:
            return self.space.touch(parts, call)
        finally:
            if pushed:
                pop_hooks()

    def mark_aliased(self, slot: ParamSlot) -> None:
        slot.part.is_handed_out = True
        self.space.unfold(slot.unit)

    def call_in_autocast(
        self, slots: Sequence[ParamSlot], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.core.wire.call(slots, func, args, kwargs)

    def read_grad(self, slot: ParamSlot) -> torch.Tensor | None:
        self.updates.refuse_from_inside((slot,))
        with outside_transforms():
            return self.gradients.read(slot)

    def write_grad(self, slot: ParamSlot, grad: torch.Tensor | None) -> None:
        self.updates.refuse_from_inside((slot,))
        with outside_transforms():
            self.gradients.write(slot, grad)

    def overwrite(self, slot: ParamSlot, source: torch.Tensor) -> None:
        """``p.copy_(source)`` outside compute: the home is written, nothing is fetched."""
        self.updates.refuse_from_inside((slot,))
        self.space.check_process()
        with self.space.lock, outside_transforms(), torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            self.space.open_homes([slot])
            slot.unit.write_home(slot, source)
            self.space.home_written(slot.unit, [slot])
            self.space.refresh(slot.unit)

    def replace_data(self, slot: ParamSlot, data: torch.Tensor) -> None:
        """``p.data = data``: the values are taken over; where they live stays the plan's business.

        What was read as ``p.data`` before is the old memory with the old values, as in torch: averages of weights are
        swapped in and out that way.
        """
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"Variable data has to be a tensor, but got {type(data).__name__}")
        if data is slot.param or _is_own_data(slot, data):
            return
        if data.shape != slot.shape or data.dtype != slot.dtype:
            raise UnsupportedError(
                f"p.data = … would change {slot.name} from {tuple(slot.shape)} {slot.dtype} to {tuple(data.shape)} "
                f"{data.dtype} while it is offloaded. Change shape or dtype before training starts, or call "
                "engine_of(model).close() first and attach again."
            )
        if slot.unit.num_windows > 0:
            self.core.wire.refuse(slot, "p.data = … inside forward")  # and the window may hold the 16-bit form alone

            def write() -> None:
                raw_data(slot.param).copy_(data)
                torch.autograd.graph.increment_version(slot.param)

            with torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                self.space.touch([slot.part], write)
            return
        self.updates.refuse_from_inside((slot,))
        with self.space.lock:
            self.space.leave_to_aliases(slot.part)
            self.overwrite(slot, data.detach())

    def snapshot(self, slot: ParamSlot) -> torch.Tensor:
        """The current values as an ordinary host tensor with a storage of its own. Tied parameters share it."""
        self.space.check_process()
        snapshots = self._hooks.snapshots() if self._hooks.in_state_dict() else {}
        if slot in snapshots:
            return snapshots[slot]
        with self.space.lock, outside_transforms(), torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            self.space.settle_home(slot.unit)
            result: torch.Tensor = slot.unit.read_home(slot).clone()  # strides and all
        snapshots[slot] = result
        return result

    def in_state_dict(self) -> bool:
        return self._hooks.in_state_dict()

    def home_address(self, slot: ParamSlot) -> int:
        return slot.unit.home_address(slot)  # type: ignore[no-any-return]

    def wait_update(self, slot: ParamSlot) -> None:
        with self.space.lock:
            self.space.settle_state(slot.unit)

    def show_state(self, slot: ParamSlot) -> None:
        """The state of the slot's unit is in DRAM, and stays as long as its tensors are referred to."""
        with self.space.lock:
            self.space.settle_state(slot.unit, to_write=True)
            self.space.host.show(slot.unit.state_block)

    def with_state(self, slot: ParamSlot, call: Callable[[], Any]) -> Any:
        """Run ``call``, which reads the slot's state, with it in DRAM."""
        with self.space.lock:
            self.space.settle_state(slot.unit)
            if slot.unit.state_block.segments:
                self.space.host.bring_in_for_user(slot.unit.state_block)
            return call()

    # ------------------------------------------------------------------------------------------------- life
    def raise_pending_error(self) -> None:
        """Raise the first error of any background work."""
        self.core.scheduler.raise_pending_error()

    def flush(self) -> None:
        """Wait until every ordered update has landed."""
        with self.space.lock:
            for unit in self.units:
                self.space.wait_update(unit)

    def reset(self) -> None:
        """After an exception in the training loop: no window is open, nothing is in flight; values are kept."""
        with self.space.lock:
            unseen = self._quiesce()
            for engine in [ref() for ref in self.core.engines]:
                if engine is not None:  # one may have been inside the other's forward, in this thread
                    engine._hooks.reset()
            self.gradients.drop_born()
            self.core.updates.forget_streamed()
            self.core.wire.reset(self.units)
            self.space.reset(self.units)
        if unseen is not None:
            raise unseen

    def _quiesce(self) -> BaseException | None:
        """Wait for all background work, and make nobody wait for what has failed.

        Returns the first error that nobody has seen yet. A failed update has left its unit's home as it was, or partly
        updated: as after an exception out of the plain run's ``step()``.
        """
        scheduler = self.core.scheduler
        seen = scheduler.seen_error
        stopped: BaseException | None = None
        try:
            scheduler.drain()
        except BaseException as failure:
            stopped = failure
        pending = scheduler.clear_pending_error()
        if stopped is not None and stopped is not pending:
            return stopped  # a time-out or Ctrl-C: something may be running still
        self.space.streams.settle()
        self.space.host.reset()
        for unit in self.space.units:
            unit.update = unit.home_update = None
            for record in unit.grads:
                record.forget_update()
            unit.drop_strays()
        return None if pending is seen else pending

    def close(self) -> None:
        """Make the model ordinary again: hooks gone, parameters plain tensors with the current values. Idempotent.

        Optimizers get their own class back and keep their state. The first error of any background work that nobody
        has seen yet is raised, after everything was undone.
        """
        if self.closed:
            return
        before_close, self.before_close = self.before_close, None
        if before_close is not None:
            before_close()
        self._hooks.reset()
        self._hooks.close()
        for handle in self._grad_handles.values():
            handle.remove()
        self._grad_handles.clear()
        with self.space.lock:
            error = self._quiesce()
            if isinstance(error, TransferTimeoutError) and self.core.num_open == 1:
                # A disk that does not answer would be waited for again by every unit. What is queued is cancelled, and
                # what is under way, now or when it comes to it, counts as lost.
                self.space.host.is_stuck = True
                with contextlib.suppress(TierOffloadError):
                    self.core.scheduler.close(0.0)
                self.core.scheduler.clear_pending_error()
            self.gradients.drop_born()
            for unit in list(self.units):
                if unit in self.space.units:  # else it was not even taken as a whole
                    error = self._bring_home(unit, error)
                self._release_unit(unit)
        for ref in self._optimizers:
            optimizer = ref()
            if optimizer is not None:
                optimizers.release(optimizer)
                self.core.state_estimates_nbytes.pop(optimizer, None)
        for module_ref, name, device in self._moved_buffers:
            module = module_ref()
            if module is not None and module._buffers.get(name) is not None:
                module._buffers[name] = module._buffers[name].to(device)  # type: ignore[union-attr]
        self._moved_buffers.clear()
        torch_patches.uninstall(self)
        if all(ref() in (None, self) for ref in self.core.engines):
            try:
                self.core.close()
            except BaseException as failure:
                error = error or failure
        self.core.engines = [ref for ref in self.core.engines if ref() not in (None, self)]
        self.closed = True  # only now: after Ctrl-C in the middle of this, a second call does the rest
        if error is not None:
            raise error

    def _bring_home(self, unit: UnitState, error: BaseException | None) -> BaseException | None:
        """Have all of a unit's values in DRAM, whatever can be had; the first error of all."""

        host = self.space.host
        steps: list[Callable[[], Any]] = [
            lambda: self.space.settle_state(unit),
            lambda: host.let_go(unit.state_block),
            lambda: self.space.settle_home(unit),
            lambda: host.lease([unit.param_block]),
            lambda: host.let_go(unit.grad_block) if unit.has_host_grads() else None,
        ]
        for bring in steps:
            try:
                bring()
            except BaseException as failure:
                error = error or failure
                # What is lost of one must not keep the others from it.
                with contextlib.suppress(BaseException):
                    self.core.scheduler.drain(0.0 if self.space.host.is_stuck else None)
                self.core.scheduler.clear_pending_error()
                self.space.host.reset()
        return error

    def _release_unit(self, unit: UnitState) -> None:
        host = self.space.host
        is_lost = host.is_lost(unit.param_block)
        if host.is_lost(unit.state_block):
            unit.lose_state()
        for part in unit.full_parts if not is_lost else ():
            self.space.leave_to_aliases(part)  # tensors that the user holds outlive the engine
        for slot in unit.slots:
            p = slot.param
            if getattr(slot, "part", None) is None:
                continue  # not taken yet
            record = unit.grads[slot.index]
            grad = raw_grad(p)
            with torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                if record.place.is_ours and not host.is_lost(unit.grad_block):
                    sum_before = self.gradients.host_value(slot).clone()
                    # One may not have left yet.
                    grad = sum_before if grad is None else sum_before.to(grad.device).add_(grad)
                if is_lost:  # flash did not give it back: no number is better than a wrong one
                    values = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="cpu")
                    values.fill_(float("nan") if slot.dtype.is_floating_point or slot.dtype.is_complex else 0)
                else:
                    values = unit.read_home(slot).clone()  # strides and all
                grad = None if grad is None else grad.to(values.device)
            set_raw_grad(p, None)
            p.__class__ = nn.Parameter
            p.__dict__.pop("_tieroffload_slot", None)
            set_raw_data(p, values)
            slot.left_in = values.untyped_storage()._cdata
            if grad is not None:
                p.grad = grad
        self.space.remove(unit)
        unit.close()
        self.units.remove(unit)
        for need in self.core.state_needs.values():
            need.forget(unit)

    # ------------------------------------------------------------------------------------------------- reports
    def _dram_nbytes(self) -> int:
        store = self.core.store
        return (
            sum(unit.dram_nbytes() for unit in self.space.units)
            + self._state_nbytes()
            + self.core.activations.mapped_nbytes()
            + (store.memory_nbytes if store is not None else 0)
        )

    def _state_nbytes(self) -> int:
        """Optimizer state that is not in a block, whose bytes count wherever they are."""
        self.space.host.num_walks += 1
        try:
            return self._walk_state_nbytes()
        finally:
            self.space.host.num_walks -= 1

    def _walk_state_nbytes(self) -> int:
        total = 0
        for core_engine in [ref() for ref in self.core.engines] or [self]:
            for ref in core_engine._optimizers if core_engine is not None else ():
                optimizer = ref()
                if optimizer is None:
                    continue
                for p, entry in list(dict.items(optimizer.state)):
                    slot = managed_slot(p)
                    if slot is not None and isinstance(entry, dict):
                        held = slot.unit.state_block.tensors
                        loose = slot.unit.loose_state(slot, entry)
                        update = slot.unit.update
                        is_moving = update is not None and not update.done()
                        for name, value in list(entry.items()):
                            # Where its home is flash: what a user refers to counts as his, and what an update has just
                            # made is on its way into the block, which has room for it.
                            is_elsewhere = name in loose and (loose[name] or is_moving)
                            if isinstance(value, torch.Tensor) and not is_elsewhere:
                                kept = held.get((slot.index, name)) if held else None
                                total += value.nbytes if kept is None or kept.tensor is not value else 0
        return total

    def report(self) -> dict[str, Any]:
        """What happened so far, as one JSON-able dict (docs/design.md, "Report")."""
        endurance = self.core.endurance(self.updates.num_steps)  # may ask the drive: not under the lock
        with self.space.lock:
            dram_nbytes = self._dram_nbytes()
            ledger = self.space.ledger
            account = ledger[Tier.DRAM]
            host = self.space.host
            account.used_nbytes = dram_nbytes
            host.note_beside(dram_nbytes - host.used_nbytes)
            account.peak_nbytes = max(account.peak_nbytes, host.peak_nbytes)
            home_nbytes = {Tier.DRAM: dram_nbytes - host.used_nbytes, Tier.NVME: host.home_nbytes()}
            store = self.core.store
            if store is not None:
                ledger[Tier.NVME].used_nbytes = store.used_nbytes
                ledger[Tier.NVME].peak_nbytes = store.peak_nbytes
            tiers = {
                tier.name.lower(): {
                    "budget_nbytes": ledger[tier].budget_nbytes,
                    "peak_nbytes": ledger[tier].peak_nbytes,
                    "used_nbytes": ledger[tier].used_nbytes,
                    "home_nbytes": home_nbytes.get(tier, 0),
                }
                for tier in Tier
            }
            stall_s = dict(self.space.stall_s)
            stall_s["total"] = sum(stall_s.values())
            times_s = self.updates.step_times_s()
            return {
                "tiers": tiers,
                "moved_nbytes": dict(self.space.moved_nbytes),
                "stall_s": stall_s,
                "step_s": {
                    "last": times_s[-1] if times_s else None,
                    "median": statistics.median(times_s) if times_s else None,
                },
                "num_steps": self.updates.num_steps,
                "num_unit_updates": dict(self.updates.num_unit_updates),
                "num_prefetch_misses": self.space.num_prefetch_misses,
                "forecast": self.core.planner.forecast(),
                "plan": self.plan(),
                "written_nbytes_by_path": store.written_nbytes_by_path if store is not None else {},
                "io_mode_by_path": store.mode_by_path if store is not None else {},
                "endurance": endurance,
                "lanes": self.core.scheduler.report(),
            }

    def plan(self) -> dict[str, Any]:
        """Where each unit's state is at home, and the settings in force."""
        made = self.core.planner.plan
        return {
            "optimizer_kernel": self.updates.kernel,
            "prefetch_units": self.space.prefetch_units,
            "planner": None if made is None else made.planner,
            "note": None if made is None else made.note,
            "num_plans": self.core.planner.num_plans,
            "plans": list(self.core.planner.said),
            "units": [
                {
                    "unit": unit.name,
                    "num_params": len(unit.slots),
                    "param_nbytes": unit.nbytes,
                    "grad_nbytes": unit.grad_nbytes,
                    "param_home": unit.choice.param_home.name.lower(),
                    "grad_home": unit.choice.grad_home.name.lower() if unit.grad_nbytes else None,
                    "state_home": unit.choice.state_home.name.lower() if unit.grad_nbytes else None,
                    "update_on": unit.choice.update_on.value if unit.grad_nbytes else None,
                    "activations": self._hooks.activation_of(unit),
                }
                for unit in self.units
            ],
            "unmanaged": [{"name": n, "reason": r, "nbytes": b} for n, r, b in self._unmanaged],
        }

    def timeline(self) -> str | None:
        """What ran when in the last steps, as a Chrome trace; None where it is not recorded (``trace_steps``)."""
        return self.core.trace.to_text() if self.core.trace is not None else None

    def planned(self) -> dict[str, Any]:
        """The plan and the profile that it was made of, as the JSON of the files that can be read again."""
        planner = self.core.planner
        made = {"plan.json": planner.plan, PROFILE_FILE_NAME: planner.profile}
        return {name: each.to_json() for name, each in made.items() if each is not None}

    def tell_plans(self, say: Callable[[str], None]) -> None:
        """Have ``say`` called, on the training thread, with a line about each plan to come that no log shows."""
        self.core.planner.on_plan = say

    def plan_table(self) -> Any:
        """The plan as a ``rich`` table."""
        from lightning_tieroffload.report import plan_table

        title = "Plan"
        if self.core.planner.plan is None and not self.updates.num_steps:
            title = "Plan before the first step"
            if self.core.updates_on_device():
                title += ", which settles where updates run"  # once there is state
        return plan_table(self.plan(), title=title)


_CASTABLE_OWNERS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Conv1D")  # the last is transformers' transposed Linear


def _readers_of_a_first_layer(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """(module, its first layer) where the module looks at that layer's parameters to choose how to compute.

    ``nn.TransformerEncoder`` takes another path, with other bits, if they are of a class that overrides functions.
    """
    return [(m, m.layers[0]) for m in model.modules() if isinstance(m, nn.TransformerEncoder) and len(m.layers) > 0]


def spec_nbytes(spec: UnitSpec, device: torch.device) -> int:
    """Device bytes of a unit's parameters, padding included."""
    return UnitState.laid_out_nbytes(
        [(name, p) for name, p in spec.params if managed_slot(p) is None], _castable(spec), device
    )


def _runs_under_autocast(device: torch.device) -> bool:
    """What jobs on such a device do as a rule. What they need for gradients is half then."""
    return device.type != "cpu"


def _dram_nbytes(spec: UnitSpec, device: torch.device) -> int:
    """Host bytes of a unit's homes and gradients, padding included."""
    grads_nbytes = sum(
        round_up(p.numel() * p.itemsize, 64) for _, p in spec.params if p.requires_grad and managed_slot(p) is None
    )
    kinds = {(p.dtype, name in _castable(spec)) for name, p in spec.params}
    return spec_nbytes(spec, device) + 64 * len(kinds) + grads_nbytes


def _need(
    name: str,
    params: list[tuple[str, nn.Parameter]],
    castable: frozenset[str],
    device: torch.device,
    state_nbytes: int = 0,
    choice: Choice = CAUTIOUS,
) -> HostNeed:
    """Host bytes of a unit as blocks hold them: whole pages for each kind of parameter and each role."""
    kinds: dict[tuple[torch.dtype, bool], list[tuple[str, nn.Parameter]]] = {}
    for each, p in params:
        kinds.setdefault((p.dtype, each in castable), []).append((each, p))
    param_nbytes = grad_nbytes = grad_spare_nbytes = 0
    for (_, is_castable), items in kinds.items():
        nbytes = UnitState.laid_out_nbytes(items, castable, device)
        param_nbytes += round_up(nbytes, _PAGE_NBYTES)
        if is_castable:  # a split master has a bit more for each parameter
            param_nbytes += round_up(nbytes // 32 + 192 * len(items), _PAGE_NBYTES)
        kind_nbytes = sum(round_up(p.numel() * p.itemsize, 64) for _, p in items if p.requires_grad)
        grad_nbytes += round_up(kind_nbytes, _PAGE_NBYTES)
        if is_castable:
            grad_spare_nbytes += round_up(kind_nbytes // 2 + 64 * len(items), _PAGE_NBYTES)
    return HostNeed(
        name=name,
        param_nbytes=param_nbytes,
        state_nbytes=state_nbytes,
        grad_nbytes=grad_nbytes,
        grad_spare_nbytes=grad_spare_nbytes,
        choice=choice,
    )


def _spec_need(spec: UnitSpec, device: torch.device) -> HostNeed:
    params = [(name, p) for name, p in spec.params if managed_slot(p) is None]
    return _need(spec.name, params, _castable(spec), device)


def _need_of(unit: UnitState, state_nbytes: int, *, is_whole: bool) -> HostNeed:
    castable = frozenset(slot.name for slot in unit.slots if slot.castable)
    params = [(slot.name, slot.param) for slot in unit.slots]
    need = _need(unit.name, params, castable, unit.device, state_nbytes, unit.choice)
    stays = frozenset(block.role for block in unit.blocks if block.stays)
    # Those of parameters that were unfrozen since have mappings of their own: more pages than one mapping for all.
    missing_nbytes = sum(round_up(nbytes, _PAGE_NBYTES) for nbytes in unit.missing_grads_nbytes())
    grad_nbytes = max(need.grad_nbytes, unit.grad_block.nbytes - need.grad_spare_nbytes + missing_nbytes)
    # What one optimizer was allotted stays mapped for the next.
    state_nbytes = max(state_nbytes, unit.state_block.nbytes)
    return dataclasses.replace(need, is_whole=is_whole, stays=stays, grad_nbytes=grad_nbytes, state_nbytes=state_nbytes)


def _with_state_on_flash(needs: Sequence[HostNeed]) -> list[HostNeed]:
    return [
        need
        if Role.STATE in need.stays
        else dataclasses.replace(need, choice=dataclasses.replace(need.choice, state_home=Tier.NVME))
        for need in needs
    ]


def _castable(spec: UnitSpec) -> frozenset[str]:
    """Names of fp32 parameters of the unit that exactly one module of a class that only casts and multiplies owns."""
    owners: dict[int, list[nn.Module]] = {}
    for module in spec.owners:
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(module)
    return frozenset(
        name
        for name, p in spec.params
        if p.dtype == torch.float32
        and len(owners.get(id(p), ())) == 1
        and type(owners[id(p)][0]).__name__ in _CASTABLE_OWNERS
        and type(owners[id(p)][0]).__module__.startswith(("torch.nn", "transformers"))
    )


_FIRST_ACTIVATION = {
    "auto": ActivationChoice.KEEP,
    "keep": ActivationChoice.KEEP,
    "recompute": ActivationChoice.RECOMPUTE,
    "offload": ActivationChoice.OFFLOAD_DRAM,
}


def _refuse_unfinished(config: TierOffloadConfig) -> None:
    """A setting that would be ignored is an error: it is not there yet."""
    if config.state_home == "nvme" and not config.nvme_paths:
        raise ConfigError('state_home="nvme" needs nvme_paths: name a directory on flash, or leave state_home out.')
    refuse_what_is_not_there(config)


def _compute_device(device: torch.device | None) -> torch.device:
    if device is None:
        device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={str(device)!r}, and torch {torch.__version__} finds no CUDA device here: leave device out to "
            "compute on the CPU; `tieroffload doctor` says what is missing."
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"Offloading from {device.type} devices is not supported; use a CUDA device or the CPU.")
    return device


def _refuse_lazy(model: nn.Module) -> None:
    named = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in named if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise UnsupportedError(
            f"{len(lazy)} parameters and buffers of {type(model).__name__} have no size yet (lazy modules, the first "
            f"is {lazy[0]}), so nothing can be planned for them. Run one batch through the model before handing it "
            "over (Lightning: in configure_model), or give the modules their sizes."
        )


def _refuse_spread(model: nn.Module, device: torch.device) -> None:
    devices = {p.device for p in model.parameters() if managed_slot(p) is None}
    if torch.device("meta") in devices:
        raise UnsupportedError(
            "The model has parameters on the meta device (no values yet). Load or initialise it first: "
            "model.to_empty(device='cpu') and its weights, or let the trainer's configure_model do it."
        )
    elsewhere = {d for d in devices if d.type not in ("cpu",) and d != device}
    if elsewhere:
        raise UnsupportedError(
            f"The model is spread over {', '.join(sorted(str(d) for d in elsewhere))} while compute is on {device}. "
            "Several devices in one process are not supported yet: put the whole model on the CPU or on one device."
        )
