"""Floor 8. Gradients: off the device as they are born, true wherever they are, in torch's own order and rounding.

Owns the ``GradRecord`` of every parameter. See [Note: gradient places].

[Note: gradient places] Autograd writes its own field. When a unit's gradients are complete, or backward ends, they are
copied to the unit's DRAM block (added there if an earlier backward left some) and the field is emptied. Settling is put
off by one event, so that a user's post-accumulate hook that runs after ours still finds its gradient on the device.
A gradient that the user read or set is *touched*: it stays in autograd's field, is the user's memory, and is
authoritative until it is cleared. Adding in DRAM gives the bits of adding on the device: one IEEE addition each.
Where the plan lets a unit be updated on the device, its gradients are *kept* there, outside autograd's field and in 16
bits where that loses nothing; under pressure, or when something else than an update wants them, they go down.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.device_space import DeviceSpace, outside_transforms
from lightning_tieroffload.engine.params import ParamSlot, raw_grad, set_raw_grad
from lightning_tieroffload.engine.streams import LANDED, CopyTicket
from lightning_tieroffload.engine.unit_state import Factor, GradPlace, GradRecord, Part, UnitState, WireState
from lightning_tieroffload.engine.wire import Wire

__all__ = ["Gradients", "fits_host"]

_PIECE_NUMEL = 1 << 24


def fits_host(slot: ParamSlot, grad: torch.Tensor) -> bool:
    """Whether a gradient can live in the unit's block: dense and of the parameter's own type and shape."""
    return (
        grad.layout == torch.strided
        and grad.dtype == slot.dtype
        and grad.shape == slot.shape
        and type(grad) is torch.Tensor
        and not grad.requires_grad  # create_graph: the gradient is part of a graph and must stay what it is
    )


def _label(slot: ParamSlot, what: str = "gradient") -> str:
    """A transfer's, for people: with the unit's name, which most parameters' names begin with."""
    unit: str = slot.unit.name
    return f"{what} ({slot.name if slot.name.startswith(f'{unit}.') else f'{unit}: {slot.name}'})"


def _fits(grad: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a narrower type holds every element without loss. Waits for the device."""
    pieces = grad.view(-1).split(_PIECE_NUMEL) if grad.is_contiguous() else (grad,)
    return all(torch.equal(piece.to(dtype).to(grad.dtype), piece) for piece in pieces)


class Gradients:
    """The gradients of one device space. Called from the training thread and from autograd's threads."""

    def __init__(self, space: DeviceSpace, wire: Wire) -> None:
        self._space = space
        self._wire = wire
        self._tasks: set[int] = set()
        self._open: list[UnitState] = []  # units with born gradients
        self.norm_types: set[float] = set()
        self.on_end: Callable[[], None] | None = None  # called when a backward has ended
        # Asked before a gradient that may come in 16 bits is put into DRAM in full width; may refuse it.
        self.admit_wide: Callable[[ParamSlot], None] | None = None
        self.charged_nbytes = 0  # of gradients in autograd's field
        # Gradients kept on the device, and what each is charged; a dropped model's go with it.
        self._kept: weakref.WeakKeyDictionary[ParamSlot, int] = weakref.WeakKeyDictionary()
        self._kept_nbytes = 0  # charged for them all
        self._num_kept = 0
        self._leaving: deque[tuple[CopyTicket, int]] = deque()
        space.on_pressure = self.relieve

    # ------------------------------------------------------------------------------------------------- backward
    def in_backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    def enter_backward(self) -> None:
        """Called from every hook that runs inside backward: makes sure that its end is noticed."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task in self._tasks:
            return
        self._tasks.add(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))

    def _end_backward(self, task: int) -> None:
        with self._space.lock, outside_transforms():
            self._tasks.discard(task)
            self.settle_all()
        if self.on_end is not None:
            self.on_end()

    def on_unpack(self, part: Part) -> None:
        """Backward is about to read a part's parameters."""
        unit = part.unit
        with self._space.lock, outside_transforms():
            self.enter_backward()
            # A unit that left while its backward is not over needs the room that its own gradients take.
            self.settle_all(but=unit if part.is_resident else None)
            self._space.need_in_backward(part)
            # Leased until the caller holds a view, which then keeps the part here by itself.
            part.num_leases += 1
            try:
                if unit.max_grad_nbytes and self.in_backward():
                    self._space.make_room(unit.max_grad_nbytes, keep=unit, what=f"gradients of {unit.name}", must=False)
                self._space.prefetch()
            finally:
                part.num_leases -= 1

    def on_born(self, slot: ParamSlot) -> None:
        """Post-accumulate hook: autograd has just finished the parameter's gradient."""
        unit: UnitState = slot.unit
        with self._space.lock, outside_transforms():
            self.enter_backward()
            self.settle_all(but=unit)
            self._reap()
            record = unit.grads[slot.index]
            if record.touched:
                return
            grad = raw_grad(slot.param)
            if grad is None:  # frozen since the forward: nothing was accumulated, and what there was before stays
                return
            if not fits_host(slot, grad):
                record.place, record.touched = GradPlace.LIVE, True
                return
            if unit.born and self._space.ledger[Tier.DEVICE].headroom_nbytes < unit.grad_nbytes:
                self._settle_unit(unit)  # tight: what was born before goes first
            if slot not in unit.born:
                self._space.make_room(slot.nbytes, keep=unit, what="gradient", must=False)
                # Ctrl-C between two of these: what is listed in an open unit is dropped, with what was charged for it.
                if unit not in self._open:
                    self._open.append(unit)
                self._charge(slot.nbytes)
                unit.born.append(slot)

    def _charge(self, nbytes: int) -> None:
        self._space.ledger.charge(Tier.DEVICE, nbytes)
        self.charged_nbytes += nbytes

    def _discharge(self, nbytes: int) -> None:
        self.charged_nbytes -= nbytes
        self._space.ledger.release(Tier.DEVICE, nbytes)

    def _charge_leaving(self, ticket: CopyTicket, nbytes: int) -> None:
        """Memory of a gradient on its way down is held until the copy has landed, and charged as long."""
        if ticket is not LANDED and self._space.device.type != "cpu":
            self._space.ledger.charge(Tier.DEVICE, nbytes)
            self._leaving.append((ticket, nbytes))

    def relieve(self, must: bool) -> bool:
        """Give device memory back that gradients hold: the oldest on its way down is waited for. See DeviceSpace."""
        if self._leaving:
            if not self._leaving[0][0].done():
                self._leaving[0][0].wait()
            self._reap()
            return True
        return must and self.spill()

    def _reap(self) -> None:
        if len(self._kept) != self._num_kept:
            self._count_kept()
        while self._leaving and self._leaving[0][0].done():
            self._space.ledger.release(Tier.DEVICE, self._leaving.popleft()[1])

    def settle_all(self, but: UnitState | None = None) -> None:
        """Send every born gradient on its way down, those of ``but`` excepted."""
        for unit in list(self._open):
            if unit is not but:
                self._settle_unit(unit)
                self._open.remove(unit)
                self._space.host.write_behind(unit.grad_block)

    def _settle_unit(self, unit: UnitState) -> None:
        while unit.born:
            slot = unit.born[0]  # stays listed, and charged, until it is dealt with: sending it may fail
            record = unit.grads[slot.index]
            grad = raw_grad(slot.param)
            leaving_nbytes = 0
            if grad is not None and not record.touched:  # else user code took it in a hook of its own
                if fits_host(slot, grad):
                    leaving_nbytes = self._send_down(slot, record, grad)
                    set_raw_grad(slot.param, None)
                else:
                    record.place, record.touched = GradPlace.LIVE, True
            del unit.born[0]
            self._discharge(slot.nbytes)
            if record.kept is not None:
                self._charge_kept(slot, record.kept.nbytes)
            elif leaving_nbytes:
                self._charge_leaving(record.ticket, leaving_nbytes)

    def _send_down(self, slot: ParamSlot, record: GradRecord, grad: torch.Tensor) -> int:
        """Returns the device bytes that are held until ``record.ticket``."""
        unit: UnitState = slot.unit
        wire_dtype = self._wire.gradient_dtype(slot, grad)
        if wire_dtype is None and slot.castable and unit.wire_state is WireState.WATCHING and unit.wire is not None:
            # Whether every use was seen is not known yet; the numbers themselves say what 16 bits would lose.
            wire_dtype = unit.wire.dtype if _fits(grad, unit.wire.dtype) else None
        if unit.choice.grad_home is Tier.DEVICE and self._keep(slot, record, grad, wire_dtype):
            return 0
        record.is_zero = False
        if record.place is GradPlace.KEPT:
            self._put_down(slot)
        self._space.wait_update(unit)  # the last update may still be reading the block
        is_first = record.place is not GradPlace.HOST
        self._to_write(unit)
        if not is_first:
            if record.factors:
                self.host_value(slot)  # multiplied before the accumulation went on
            record.ticket.wait()
            before = self.raw_host(slot)
            self._admit(slot, None)
            unit.has_accumulated = True
            record.is_wire = False  # a sum of 16-bit gradients does not fit 16 bits
            target = unit.host_grad(slot)
            if before.data_ptr() == target.data_ptr() and before.dtype == target.dtype:
                before = target
            if grad.device.type != "cpu":  # what was there before comes up for the addition
                self._space.make_room(before.nbytes, keep=unit, what="gradient", must=False)
            record.ticket, record.norms = self._space.add_down(target, before, grad, self.norm_types, _label(slot))
            record.norms_ticket = record.ticket
            self._space.host.note_use(unit.grad_block, record.ticket)
            return grad.nbytes + before.nbytes
        sent = grad if wire_dtype is None or grad.device.type == "cpu" else grad.to(wire_dtype)
        self._admit(slot, wire_dtype)
        host = unit.host_grad(slot, wire_dtype)
        record.ticket.wait()  # a gradient that was cleared before it was used may still be on its way to the block
        record.ticket = self._space.download([(host, sent)], _label(slot))
        self._space.host.note_use(unit.grad_block, record.ticket)
        record.place = GradPlace.HOST
        record.is_wire = wire_dtype is not None
        record.factors = []
        record.norms = {}
        # Where it lies on flash, its norm must not bring it back.
        if (grad.device.type != "cpu" and record.ticket is not LANDED) or unit.grad_block.is_paged:
            self._note_norms(record, grad)
        return sent.nbytes

    def _admit(self, slot: ParamSlot, wire_dtype: torch.dtype | None) -> None:
        if self.admit_wide is not None and wire_dtype is None and slot.castable:
            self.admit_wide(slot)

    def _note_norms(self, record: GradRecord, grad: torch.Tensor) -> None:
        record.norms_ticket = LANDED
        for kind in self.norm_types:
            record.norms[kind] = torch.linalg.vector_norm(grad, kind)

    # ------------------------------------------------------------------------------------------------- kept
    def _keep(self, slot: ParamSlot, record: GradRecord, grad: torch.Tensor, wire_dtype: torch.dtype | None) -> bool:
        """Keep the gradient on the device, added to what is kept already. False where there is no room for it."""
        if record.place is GradPlace.HOST and record.is_zero:
            self._forget_zeros(slot, record)
            grad.add_(0.0)  # what adding to zeros does: it turns -0.0 into 0.0
        if record.place not in (GradPlace.NONE, GradPlace.KEPT):
            return False
        before = record.kept
        if before is None:
            # The caller still charges it as one in autograd's field, which it is while a narrow copy is made.
            more_nbytes = 0 if wire_dtype is None else slot.numel * wire_dtype.itemsize
            if not self._space.make_room(more_nbytes, keep=slot.unit, what="gradient", must=False):
                return False
            record.kept = grad if wire_dtype is None else grad.to(wire_dtype)
            record.place, record.is_wire = GradPlace.KEPT, wire_dtype is not None
            record.factors = []
        elif record.factors:
            return False  # multiplied before the accumulation went on: rare, and the DRAM form knows how
        else:
            if record.is_wire:  # a sum of two 16-bit gradients does not fit 16 bits
                if not self._space.make_room(slot.nbytes, keep=slot.unit, what="gradient", must=False):
                    return False
                record.kept, record.is_wire = before.to(slot.dtype), False
            slot.unit.has_accumulated = True
            assert record.kept is not None
            record.kept.add_(grad)
        record.norms = {}
        self._note_norms(record, grad if before is None else record.kept)  # type: ignore[arg-type]
        return True

    def _forget_zeros(self, slot: ParamSlot, record: GradRecord) -> None:
        record.ticket.wait()
        self._space.wait_update(slot.unit)
        record.place, record.is_zero = GradPlace.NONE, False

    def _charge_kept(self, slot: ParamSlot, nbytes: int) -> None:
        if nbytes:
            self._kept[slot] = nbytes
        else:
            self._kept.pop(slot, None)
        self._count_kept()

    def _count_kept(self) -> None:
        ledger = self._space.ledger
        before_nbytes, nbytes = self._kept_nbytes, sum(self._kept.values())
        # Ctrl-C between two of these leaves too much charged, never too little: ``DeviceSpace.reset`` counts again.
        ledger.charge(Tier.DEVICE, max(0, nbytes - before_nbytes))
        self._kept_nbytes, self._num_kept = nbytes, len(self._kept)
        ledger.release(Tier.DEVICE, max(0, before_nbytes - nbytes))

    def kept_source(self, slot: ParamSlot) -> tuple[torch.Tensor, list[Factor]] | None:
        """For an update on the device: (gradient there, readable by compute, ordered factors); None where it is not."""
        record = slot.unit.grads[slot.index]
        if record.place is not GradPlace.KEPT or raw_grad(slot.param) is not None or record.kept is None:
            return None
        return record.kept, list(record.factors)

    def _put_down(self, slot: ParamSlot) -> None:
        """A kept gradient goes to the DRAM block."""
        unit: UnitState = slot.unit
        record = unit.grads[slot.index]
        kept = record.kept
        assert kept is not None
        self._space.wait_update(unit)
        self._to_write(unit)
        host = unit.host_grad(slot, kept.dtype if record.is_wire else None)
        record.ticket.wait()
        record.ticket = self._space.download([(host, kept)], _label(slot))
        record.ticket.before_compute()
        self._space.host.note_use(unit.grad_block, record.ticket)
        record.kept, record.place = None, GradPlace.HOST
        self._charge_kept(slot, 0)
        self._charge_leaving(record.ticket, kept.nbytes)

    def spill(self) -> bool:
        """Send every kept gradient down. False where there was none."""
        slots = list(self._kept)
        for slot in slots:
            self._put_down(slot)
        return bool(slots)

    @staticmethod
    def _kept_value(slot: ParamSlot, record: GradRecord, *, in_place: bool) -> torch.Tensor:
        """The kept gradient as the plain run would show it; ``in_place`` what is kept may be multiplied itself."""
        assert record.kept is not None
        value = record.kept.to(slot.dtype, copy=bool(record.factors) and not in_place)
        for factor in record.factors:
            value.mul_(factor.tensor)
        return value

    def _forget_kept(self, slot: ParamSlot, record: GradRecord) -> None:
        if record.place is GradPlace.KEPT:
            record.kept = None
            self._charge_kept(slot, 0)

    def _to_write(self, unit: UnitState) -> None:
        """The unit's gradient block is in DRAM and about to be written to."""
        host = self._space.host
        host.bring_in(unit.grad_block, to_write=True)
        host.note_written(unit.grad_block)

    # ------------------------------------------------------------------------------------------------- p.grad
    def read(self, slot: ParamSlot) -> torch.Tensor | None:
        """``p.grad``: what the plain run would show. Brings a DRAM gradient to the device, where it then stays."""
        with self._space.lock, torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            unit: UnitState = slot.unit
            record = unit.grads[slot.index]
            fresh = raw_grad(slot.param)
            if not record.place.is_ours:
                if fresh is not None:
                    self._touched(slot, record)
                return fresh
            if record.place is GradPlace.KEPT:
                grad = self._kept_value(slot, record, in_place=True)
                self._forget_kept(slot, record)
            else:
                host = self.host_value(slot)
                grad = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=self._space.device)
                self._space.upload([(grad, host)], _label(slot)).wait()
            if fresh is not None:
                grad.add_(fresh)
            set_raw_grad(slot.param, grad)
            self._touched(slot, record)
            return raw_grad(slot.param)

    def _touched(self, slot: ParamSlot, record: GradRecord) -> None:
        unit: UnitState = slot.unit
        if slot in unit.born:
            unit.born.remove(slot)
            self._discharge(slot.nbytes)
        self._forget_kept(slot, record)
        record.is_zero = False
        record.place, record.touched = GradPlace.LIVE, True

    def write(self, slot: ParamSlot, grad: torch.Tensor | None) -> None:
        """``p.grad = grad``."""
        with self._space.lock:
            unit: UnitState = slot.unit
            set_raw_grad(slot.param, grad)
            record = unit.grads[slot.index]
            self._touched(slot, record)
            record.clear()
            if grad is not None:
                record.place, record.touched = GradPlace.LIVE, True

    def host_value(self, slot: ParamSlot) -> torch.Tensor:
        """The DRAM gradient with every ordered factor multiplied in, readable now. Memory stays the unit's."""
        unit: UnitState = slot.unit
        record = unit.grads[slot.index]
        if record.place is GradPlace.KEPT:
            self._put_down(slot)
        record.ticket.wait()
        if record.is_wire or record.factors:
            self._space.wait_update(unit)
            self._to_write(unit)
        else:
            self._space.host.bring_in(unit.grad_block)
        if record.is_wire:
            narrow = self.raw_host(slot).clone()  # it may stand in the wide one's own memory
            record.is_wire = False
            unit.host_grad(slot).copy_(narrow)
        host = unit.host_grad(slot)
        for factor in record.factors:
            host.mul_(factor.on_host())
        record.factors = []
        return host

    @staticmethod
    def _wire_dtype_of(slot: ParamSlot) -> torch.dtype:
        return slot.unit.wire.dtype  # type: ignore[no-any-return]

    def raw_host(self, slot: ParamSlot) -> torch.Tensor:
        """The DRAM gradient as it is stored (16 bits wide for a wire gradient), factors not multiplied in."""
        self._space.host.bring_in(slot.unit.grad_block)
        return self._raw(slot)

    def _raw(self, slot: ParamSlot) -> torch.Tensor:
        record = slot.unit.grads[slot.index]
        return slot.unit.host_grad(slot, self._wire_dtype_of(slot) if record.is_wire else None)  # type: ignore[no-any-return]

    def zero(self, slots: Iterable[ParamSlot], *, set_to_none: bool) -> None:
        """``zero_grad`` for managed parameters."""
        with self._space.lock, torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            for slot in slots:
                unit: UnitState = slot.unit
                record = unit.grads[slot.index]
                fresh = raw_grad(slot.param)
                if set_to_none:
                    if fresh is not None:
                        set_raw_grad(slot.param, None)
                    self._touched(slot, record)
                    record.clear()
                elif record.place is GradPlace.KEPT and fresh is None and record.kept is not None:
                    record.kept.zero_()
                    record.factors, record.norms = [], {}
                elif record.place is GradPlace.HOST and fresh is None:
                    record.ticket.wait()
                    self._space.wait_update(unit)
                    self._to_write(unit)
                    unit.host_grad(slot).zero_()
                    record.factors, record.norms, record.is_wire = [], {}, False
                    record.is_zero = True
                else:
                    grad = self.read(slot)
                    if grad is not None:
                        if grad.grad_fn is not None:
                            grad.detach_()
                        else:
                            grad.requires_grad_(False)
                        grad.zero_()

    # ------------------------------------------------------------------------------------------------- clipping
    def has_grad(self, slot: ParamSlot) -> bool:
        record = slot.unit.grads[slot.index]
        return record.place.is_ours or raw_grad(slot.param) is not None

    def is_down(self, slot: ParamSlot) -> bool:
        """Whether the gradient is ours to hold: out of autograd's field."""
        return slot.unit.grads[slot.index].place.is_ours and raw_grad(slot.param) is None

    def norm(self, slot: ParamSlot, norm_type: float) -> torch.Tensor:
        """The gradient's norm on the compute device, by the function that torch's clipping calls there."""
        with self._space.lock:
            record: GradRecord = slot.unit.grads[slot.index]
            if norm_type in record.norms and not record.factors:
                record.norms_ticket.before_compute()
                return record.norms[norm_type]
            if record.place is GradPlace.KEPT and record.kept is not None:
                value = self._kept_value(slot, record, in_place=False)
                record.norms[norm_type] = torch.linalg.vector_norm(value, norm_type)
                return record.norms[norm_type]
            if record.is_wire and not record.factors:
                record.ticket.wait()
                host = self.raw_host(slot).to(slot.dtype)  # widened for the norm only: 16 bits would round it
            else:
                host = self._with_factors(slot)
            grad = host
            if self._space.device.type != "cpu":
                grad = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=self._space.device)
                self._space.upload([(grad, host)], _label(slot, "gradient norm")).before_compute()
            result: torch.Tensor = torch.linalg.vector_norm(grad, norm_type)
            record.norms[norm_type] = result
            return result

    def _with_factors(self, slot: ParamSlot) -> torch.Tensor:
        """The true value without changing what is stored where that is 16 bits wide."""
        record = slot.unit.grads[slot.index]
        if not record.is_wire:
            return self.host_value(slot)
        record.ticket.wait()
        value = self.raw_host(slot).to(slot.dtype)
        for factor in record.factors:
            value.mul_(factor.on_host())
        return value

    def unscale(self, slot: ParamSlot, inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """``GradScaler``'s check and multiplication for a DRAM gradient; scalars on the host."""
        with self._space.lock:
            record = slot.unit.grads[slot.index]
            record.norms = {}
            if record.place is GradPlace.KEPT:
                self._put_down(slot)
            if record.is_wire and not record.factors:
                record.ticket.wait()
                if not bool(torch.isfinite(self.raw_host(slot)).all()):
                    found_inf.fill_(1.0)
                if float(inv_scale) != 1.0:
                    record.factors.append(self.factor(inv_scale.clone().reshape(())))
                return
            self._space.wait_update(slot.unit)  # of another optimizer of the same parameters
            value = self.host_value(slot)
            self._to_write(slot.unit)
            torch._amp_foreach_non_finite_check_and_unscale_([value], found_inf, inv_scale)
            self._space.host.write_behind(slot.unit.grad_block)

    def factor(self, tensor: torch.Tensor) -> Factor:
        """A 0-dim tensor as something that updates can multiply by, read behind what compute has enqueued so far."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return Factor(tensor, tensor, LANDED)
        host = torch.empty((), dtype=tensor.dtype, pin_memory=True, device="cpu")
        return Factor(tensor, host, self._space.download([(host, tensor)], "factor"))

    def multiply(self, slot: ParamSlot, factor: Factor) -> None:
        """Order ``p.grad.mul_(factor)`` for a DRAM gradient."""
        with self._space.lock:
            record = slot.unit.grads[slot.index]
            record.factors.append(factor)
            record.norms = {}

    def clamp(self, slot: ParamSlot, limit: float) -> None:
        with self._space.lock:
            self._space.wait_update(slot.unit)
            value = self.host_value(slot)
            self._to_write(slot.unit)
            value.clamp_(min=-limit, max=limit)
            slot.unit.grads[slot.index].norms = {}

    def drop_born(self) -> None:
        """After an exception: gradients that have not left stay in autograd's field, where plain would have them."""
        with self._space.lock:
            self._tasks.clear()
            self.spill()
            while self.relieve(False):
                pass
            for unit in self._open:
                for slot in unit.born:
                    record = unit.grads[slot.index]
                    if record.place is GradPlace.NONE and raw_grad(slot.param) is not None:
                        record.place, record.touched = GradPlace.LIVE, True
                unit.born.clear()
            self._open.clear()
            self._discharge(self.charged_nbytes)

    def leased_nbytes(self) -> int:
        return self.charged_nbytes

    def update_source(self, slot: ParamSlot) -> tuple[Any, torch.Tensor, list[Factor]]:
        """For a step: (ticket, DRAM gradient behind it, ordered factors). Live gradients are copied down first."""
        unit: UnitState = slot.unit
        record = unit.grads[slot.index]
        fresh = raw_grad(slot.param)
        if record.place is GradPlace.KEPT and fresh is None:
            self._put_down(slot)
        if record.place is GradPlace.HOST and fresh is None:
            return record.ticket, self._raw(slot), list(record.factors)  # the update brings it in
        grad = self.read(slot)
        self._space.wait_update(unit)
        self._to_write(unit)
        host = unit.host_grad(slot)
        if grad is None:
            return LANDED, host, []
        record.ticket.wait()
        ticket = self._space.download([(host, grad.detach())], _label(slot))
        self._space.host.note_use(unit.grad_block, ticket)
        # The tensor stays the user's, who may write to it at once (zero_grad(set_to_none=False)): only behind the copy.
        ticket.before_compute()
        return ticket, host, []
