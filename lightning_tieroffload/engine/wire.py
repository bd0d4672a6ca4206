"""Floor 7. Wire precision: weights travel in the 16 bits in which autocast uses them.

[Note: wire precision] Under 16-bit autocast a Linear's fp32 weight is cast before use, and its gradient leaves the
matmul in 16 bits. If every use of the weight is that cast, the weight may travel as 16 bits both ways: the matmul gets
the bits that autocast would have made, and its 16-bit gradient, widened, is the fp32 gradient of the plain run. Each
use that is autocast's cast gets a stand-in (``_WireCast``) over the wire part, from the first one on, so that autocast
keeps no casts of its own: those of a whole model would be there at once, beside every budget. A castable weight is
first watched with its full part leased as well, since what reads it past torch (an extension in C++) is not seen:
anything else than the cast refuses the unit for good. One whose castable weights were all used becomes ready between
two steps and travels in 16 bits. Whatever is not autocast's own cast still finds the fp32 weight then: its full part
is fetched for that call, and the unit travels in full again from the next step on.

Autocast's cache makes one cast of a weight serve every use until the outermost context ends: gradients of those uses
are summed in 16 bits, gradients of different casts in fp32. A stand-in lives just as long, so that both sums are the
plain run's; a pass with several casts, or with another use beside them, sends its gradient in fp32.

[Note: modes of others] A dispatch mode of somebody else's may count casts, keep them and find them again (a selective
checkpoint's does) or put something else in their place. So autocast itself makes those that begin beneath one, of the
fp32 weight; a stand-in that is alive by then goes on, as a cached cast would, and no mode sees one made.

[Note: updates inside autocast] A cached cast outlives an update: what follows in the same context, as in Lightning's
manual optimization, computes with the old weights. A stand-in's memory is fetched anew and would give the new ones. So
where a step or a write comes while stand-ins live, they get memory of their own, with the old bits, outside the budget
as autocast's own casts are. Most contexts with a step end right after it and need none of it: when the first two have
made no use of it no more is kept, and a use that does come later is an error that says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_tieroffload.engine.device_space import DeviceSpace, is_in_transform, is_seen, outside_transforms
from lightning_tieroffload.engine.params import ParamSlot
from lightning_tieroffload.engine.unit_state import UnitState, WireState
from lightning_tieroffload.errors import UnsupportedError

__all__ = ["Wire", "wire_dtype"]

_log = logging.getLogger(__name__)

_NUM_KEPT = 2  # contexts with an update inside, until it has shown whether old casts are used

# Functions whose autocast policy, on CPU and CUDA alike, is "cast floating-point arguments to 16 bits, then run".
_CASTING = frozenset(
    {
        torch.nn.functional.linear, torch._C._nn.linear, torch.mm, torch.matmul, torch.addmm, torch.conv1d,
        torch.conv2d, torch.conv3d, torch.nn.functional.conv1d, torch.nn.functional.conv2d,
        torch.nn.functional.conv3d, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__,
    }
)  # fmt: skip


def wire_dtype(device: torch.device) -> torch.dtype | None:
    """The 16-bit dtype that autocast casts to on ``device`` just now; None where it does not."""
    if not torch.is_autocast_enabled(device.type):
        return None
    dtype = torch.get_autocast_dtype(device.type)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


class _WireCast(torch.autograd.Function):
    """Autocast's cast of a weight without reading the weight: the wire copy out, the gradient widened.

    ``kept`` holds the old bits where they were kept; in a list, so that for autograd the weight is the only input.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, slot: ParamSlot, kept: list[torch.Tensor]) -> torch.Tensor:
        ctx.slot = slot
        return kept[0] if kept else slot.unit.wire.fresh_view(slot)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        slot: ParamSlot = ctx.slot
        slot.num_cast_grads += 1
        if torch.is_grad_enabled():  # create_graph
            return grad.to(slot.dtype), None, None
        if is_seen():
            wide = grad.to(slot.dtype)  # the operation of the plain run
        else:
            # In the weight's own layout: else autograd would copy it again, and it would not be the one that arrives.
            wide = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=grad.device).copy_(grad)
        slot.cast_grad = StorageWeakRef(wide.untyped_storage()), wide._version
        return wide, None, None


def _is_leased_narrow(unit: UnitState) -> bool:
    """Whether the open window has leased the wire part, and nobody can have written to the weight since."""
    is_leased = unit.open_parts is not None and unit.wire in unit.open_parts
    return is_leased and unit.wire_state is WireState.READY and not unit.is_wire_refused


class Wire:
    """Watches castable weights, decides, and stands in for them. For one device space."""

    def __init__(self, space: DeviceSpace) -> None:
        self._space = space
        self._casts: dict[ParamSlot, torch.Tensor] = {}  # autocast's cache: the stand-ins
        self._cached: set[ParamSlot] = set()  # whose cast autocast itself keeps
        self._outdated: set[ParamSlot] = set()  # whose weight has changed since its cast was made
        self._num_updates_inside = 0  # contexts in which there was an update
        self._is_old_cast_used = False  # in one of them, after the update
        space.on_written = self._note_written

    def call(
        self, slots: Sequence[ParamSlot], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``func``, which was called with castable weights inside a compute window."""
        dtype = wire_dtype(self._space.device)
        cast: list[ParamSlot] = []

        def run() -> Any:
            given, named = args, kwargs
            if cast:
                by_param = {slot.param: slot for slot in cast}

                def stand_in(value: Any) -> Any:  # one for each place: without its cache autocast casts each anew
                    slot = by_param.get(value) if isinstance(value, torch.nn.Parameter) else None
                    return value if slot is None else self._stand_in(slot)

                given, named = tuple(map(stand_in, args)), {key: stand_in(value) for key, value in kwargs.items()}
            with torch._C.DisableTorchFunctionSubclass():
                return func(*given, **named)

        castable = [slot for slot in slots if slot.castable]  # others come along: a tied weight beside its own bias
        # In torch.func transforms autocast sees what they make of a function, and shares no casts with the rest.
        cast_dtype = dtype if func in _CASTING and not is_in_transform() else None
        if cast_dtype is not None:
            begun = (
                [slot for slot in castable if slot in self._casts or slot in self._outdated] if is_seen() else castable
            )
            cast = [slot for slot in begun if self._used(slot, cast_dtype) and self._has_wire(slot, cast_dtype)]
            if torch.is_grad_enabled():
                for slot in castable:
                    if slot not in cast:  # its gradient is summed with those of stand-ins in fp32
                        slot.is_mixed = slot.was_mixed = True
            if len(cast) == len(castable) and all(_is_leased_narrow(slot.unit) for slot in castable):
                return run()
        elif torch.is_grad_enabled() or dtype is not None:
            for slot in castable:
                self.refuse(slot, getattr(func, "__name__", str(func)))

        if cast_dtype is not None and torch.is_autocast_cache_enabled():
            self._note_cached([slot for slot in slots if slot not in cast], cast_dtype)
        parts = [slot.unit.wire if slot in cast else slot.part for slot in slots]
        return self._space.touch(list(dict.fromkeys(parts)), run)

    def _note_cached(self, slots: Sequence[ParamSlot], dtype: torch.dtype) -> None:
        """Autocast keeps its own casts until its context ends: room that fetches must leave."""
        for slot in slots:
            if slot not in self._cached:
                self._cached.add(slot)
                self._space.cached_casts_nbytes += slot.numel * dtype.itemsize

    def _has_wire(self, slot: ParamSlot, dtype: torch.dtype) -> bool:
        unit: UnitState = slot.unit
        if slot in self._cached and slot not in self._casts:
            return False  # it became ready in the middle of a context: autocast's own cast serves until that ends
        if unit.wire_state is WireState.WATCHING:
            with self._space.lock, outside_transforms():
                if unit.wire is None:
                    self._space.add_wire(unit, dtype)
            return unit.wire.dtype == dtype  # type: ignore[union-attr]
        # Refused by a step in the middle of a context: the cast that it began with still serves the later uses.
        is_usable = unit.wire_state is WireState.READY or slot in self._casts or slot in self._outdated
        return unit.wire is not None and unit.wire.dtype == dtype and is_usable

    def _stand_in(self, slot: ParamSlot) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if slot not in self._outdated:
                # Autocast makes a cast that it caches with gradients on, whoever uses it first: a use that comes later
                # has that one in its graph, and sums of gradients follow the order in which casts were made.
                is_cached = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
                if not slot.param.requires_grad or not (torch.is_grad_enabled() or is_cached):
                    return slot.unit.wire.fresh_view(slot)  # type: ignore[no-any-return]
            if not torch.is_autocast_cache_enabled():
                return _WireCast.apply(slot.param, slot, [])  # type: ignore[no-untyped-call,no-any-return]
            with self._space.lock:
                cast = self._casts.get(slot)
                if slot in self._outdated:
                    self._is_old_cast_used = True
                    if cast is None:
                        raise UnsupportedError(
                            f"{slot.unit.name}: {slot.name} is used again after it changed inside autocast's "
                            "context, where the plain run computes with the cast that it made before, and that cast "
                            "was not kept. Take the step or the write out of the context, call "
                            "torch.clear_autocast_cache() after it, or use torch.autocast(..., cache_enabled=False)."
                        )
                if cast is None:
                    slot.unit.has_casts = True
                    cast = self._casts[slot] = slot.unit.wire.keep(lambda: self._new_cast(slot))
                return cast

    @staticmethod
    def _new_cast(slot: ParamSlot) -> torch.Tensor:
        with torch._C._InferenceMode(False):  # gradients are on, too
            return _WireCast.apply(slot.param, slot, [])  # type: ignore[no-untyped-call,no-any-return]

    def keep_casts(self) -> None:
        """A step comes: weights may change while their casts live. See [Note: updates inside autocast]."""
        if not self._casts:
            return
        with self._space.lock:
            changing = [slot for slot in self._casts if slot not in self._outdated]
            for unit in {slot.unit: None for slot in changing}:
                self._space.unfold(unit)
            for unit in {slot.unit: None for slot in changing}:
                self._space.settle_home(unit)
            self._num_updates_inside += bool(changing) and not self._outdated
            for slot in changing:
                self._keep(slot, may_keep=self._num_updates_inside <= _NUM_KEPT or self._is_old_cast_used)

    def _note_written(self, slots: Sequence[ParamSlot], is_there: bool) -> None:
        for slot in slots:
            if slot in self._casts and slot not in self._outdated:
                self._keep(slot, may_keep=is_there)

    def _keep(self, slot: ParamSlot, *, may_keep: bool) -> None:
        """The weight has changed, or is about to: its stand-in gets memory of its own with the old bits."""
        cast = self._casts[slot]
        old = self._space.home_cast(slot) if may_keep else None
        slot.unit.wire.forget(cast)
        if old is not None:
            with torch._C._InferenceMode(False), torch._C.DisableTorchFunctionSubclass():
                cast.data = old  # it stays the output of the one cast, at which gradients of all its uses are summed
            self._note_cached([slot], slot.unit.wire.dtype)
        self._outdated.add(slot)
        slot.unit.has_old_casts = True
        if old is None:
            del self._casts[slot]

    def drop_casts(self) -> None:
        """Autocast has emptied its cache."""
        if self._casts or self._outdated:
            with self._space.lock:
                self._drop(set(self._casts) | self._outdated)
        if self._cached:
            self._cached.clear()
            self._space.cached_casts_nbytes = 0

    def reset(self, units: Sequence[UnitState]) -> None:
        """After an exception: Ctrl-C may have struck while casts were made, kept or dropped."""
        with self._space.lock:
            self._drop({slot for slot in {*self._casts, *self._outdated} if slot.unit in units})

    def _drop(self, slots: set[ParamSlot]) -> None:
        for slot in slots:
            slot.unit.has_casts = slot.unit.has_old_casts = False
            if slot in self._casts:
                slot.unit.wire.forget(self._casts[slot])
                del self._casts[slot]
        self._outdated -= slots

    def _used(self, slot: ParamSlot, dtype: torch.dtype) -> bool:
        """Note a use by autocast's cast; False where the weight is not (any more) one that may travel in 16 bits."""
        if not torch.is_grad_enabled():
            return True
        if slot.wire_seen is None:
            slot.wire_seen = dtype
        elif slot.wire_seen != dtype:
            self.refuse(slot, f"a cast to {dtype} beside one to {slot.wire_seen}")
            return False
        return True

    def refuse(self, slot: ParamSlot, why: str) -> None:
        """The weight is read otherwise than by autocast's cast: its unit travels in full from the next step on.

        Not before: what recomputes this forward must save the same tensors.
        """
        slot.is_mixed = slot.was_mixed = True
        unit: UnitState = slot.unit
        if not unit.is_wire_refused:
            _log.debug("%s: %s travels as fp32 (%s)", unit.name, slot.name, why)
            unit.is_wire_refused = True

    def refuse_all(self, unit: UnitState) -> None:
        unit.wire_state = WireState.REFUSED

    def consider(self) -> None:
        """Between two steps: units whose castable weights were all seen, and only as allowed, become ready."""
        for unit in self._space.units:
            if unit.is_wire_refused:
                unit.wire_state = WireState.REFUSED
            if unit.wire_state is not WireState.WATCHING:
                continue
            if unit.wire is None or {slot.wire_seen for slot in unit.wire.slots} != {unit.wire.dtype}:
                continue  # evaluation alone proves nothing about training
            if unit.wire.dtype != torch.bfloat16 or self._space.split_home(unit):
                unit.wire_state = WireState.READY

    @staticmethod
    def gradient_dtype(slot: ParamSlot, grad: torch.Tensor) -> torch.dtype | None:
        """The 16-bit dtype that holds ``grad``, newborn, without loss, or None. Resets what was noted for it."""
        num_casts, is_mixed, cast_grad = slot.num_cast_grads, slot.is_mixed, slot.cast_grad
        slot.num_cast_grads, slot.is_mixed, slot.cast_grad = 0, False, None
        unit: UnitState = slot.unit
        if unit.wire is None or not slot.castable or num_casts != 1 or is_mixed or slot.was_mixed:
            return None
        # A use that nobody sees (a custom Function's, an extension's in C++) adds its share to what the cast gave.
        if cast_grad is None or (cast_grad[0].cdata, cast_grad[1]) != (grad.untyped_storage()._cdata, grad._version):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            has_hooks = bool(slot.param._backward_hooks)
        return None if has_hooks else unit.wire.dtype
