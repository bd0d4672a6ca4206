"""Floor 8. Updates on the device: state, split masters and gradients are there, and compute's own stream updates them.

Owns nothing but the order of things: parts are the units', memory and residency the space's, arithmetic the kernels'.

[Note: looked-at state] ``optimizer.state[p]`` shows tensors in DRAM, the same objects for life, as the plain run's are.
While the newest state is on the device they are old, so whoever looks makes them new first, and what he writes to them
counts, by whatever way (``.data``, NumPy): what is on the device is old from then on. Whoever goes on holding one
expects to see every later step in it, without asking anybody: such a unit is updated on the CPU, and ``step()`` waits
for it, until he lets go.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.params import ParamSlot
from lightning_tieroffload.engine.streamed_updates import choose_streamed_units, runs_on, staging_nbytes
from lightning_tieroffload.engine.unit_state import (
    Factor,
    FactorScales,
    Part,
    UnitState,
    WireState,
    flat_numpy,
    flat_view,
    most_refs,
    number_format,
    storage_owners,
)
from lightning_tieroffload.planning.cost_model import UpdatePlace
from lightning_tieroffload.sizes import round_up

__all__ = ["DeviceSource", "DeviceUpdates", "assign_device_units", "choose_device_units", "is_state_held", "own_state"]


@dataclass(slots=True)
class DeviceSource:
    """One parameter's share of an update on the device."""

    slot: ParamSlot
    group: dict[str, Any]
    kernel: Any
    entry: dict[str, Any]  # of ``optimizer.state``
    grad: torch.Tensor
    factors: list[Factor]


class DeviceUpdates:
    """Updates of whole units on the device of ``space``. Called under the residency lock, in the training thread.

    Args:
        get_pool: the kernels' threads, for a DEVICE tier that is host memory.
    """

    def __init__(self, space: DeviceSpace, get_pool: Callable[[], Any]) -> None:
        self._space = space
        self._get_pool = get_pool
        self._scales = FactorScales(space.device)

    def can_update(self, unit: UnitState, kernels: Iterable[Any]) -> bool:
        """Whether the plan has the unit updated here, where its state is at home, and it can be just now."""
        choice = unit.choice
        if choice.update_on is not UpdatePlace.DEVICE or choice.state_home is not Tier.DEVICE or unit.is_paged:
            return False
        if unit.wire is not None and (unit.low is None or unit.wire_state is not WireState.READY):
            return False
        return all(runs_on(self._space.device, kernel) for kernel in kernels)

    def order(self, unit: UnitState, sources: Sequence[DeviceSource]) -> bool:
        """Enqueue the unit's update on the compute stream. False, with nothing changed, where that cannot be."""
        self._space.wait_update(unit)  # it may be making state
        if any(_is_held(source) for source in sources):
            return False
        parts: dict[Part, None] = {}
        fresh_slots: dict[Part, set[int]] = {}
        made: list[tuple[DeviceSource, str]] = []
        new_names: list[tuple[DeviceSource, str]] = []
        views: list[dict[str, Part]] = []
        for source in sources:
            slot = source.slot
            if unit.wire is not None and slot.castable:
                parts.update(dict.fromkeys((unit.wire, unit.low)))  # type: ignore[arg-type]
            else:
                parts[slot.part] = None
            if source.kernel.uses_step and "step" not in source.entry:
                source.entry["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                new_names.append((source, "step"))
            views.append({})
            for kind in source.kernel.state_names:
                if source.entry.get(kind) is None:
                    source.entry[kind] = unit.new_state(slot, kind)
                    made.append((source, kind))
                    new_names.append((source, kind))
                    part = unit.find_state(slot, kind, source.entry[kind])
                    fresh_slots.setdefault(part, set()).add(slot.index)  # type: ignore[arg-type]
                else:
                    part = own_state(self._space, unit, slot, kind, source.entry)
                assert part is not None
                self._space.track_state(part)
                parts[part] = None
                views[-1][kind] = part
        fresh = {part for part, slots in fresh_slots.items() if part.given_tensors().keys() <= slots}

        def launch() -> None:
            trace = self._space.trace
            begin = trace.mark() if trace is not None else None
            new = {(id(source), kind) for source, kind in made}
            for source, of_kind in zip(sources, views, strict=True):
                is_new = any((id(source), kind) in new for kind in of_kind)
                self._launch(unit, source, of_kind, is_new=is_new)
            if trace is not None:
                trace.add("compute", f"update ({unit.name})", begin, trace.mark())

        is_ordered = False
        try:
            slots = [source.slot for source in sources]
            is_ordered = self._space.update_on_device(unit, slots, list(parts), fresh, launch)
        finally:
            for source, name in () if is_ordered else new_names:
                del source.entry[name]  # nothing was written to it
        if not is_ordered:
            return False
        for source in sources:
            if source.kernel.uses_step:
                source.entry["step"] += 1
        return True

    def _launch(self, unit: UnitState, source: DeviceSource, of_kind: dict[str, Part], *, is_new: bool) -> None:
        slot, kernel = source.slot, source.kernel
        states = {kind: _on_device(part, slot) for kind, part in of_kind.items()}
        step = int(source.entry["step"].item()) + 1 if kernel.uses_step else 1
        wire, low = (unit.wire, unit.low) if slot.castable else (None, None)
        if self._space.device.type != "cuda":
            if wire is not None and low is not None:
                master: Any = unit.split_views(wire.slots.index(slot), wire.flat, low.flat)
            else:
                master = flat_numpy(_on_device(slot.part, slot))
            kernel.run(
                self._get_pool(), master, flat_numpy(source.grad),
                {kind: state.numpy() for kind, state in states.items()}, step=step, group=source.group,
                grad_scales=[factor.value() for factor in source.factors],
                grad_format=number_format(source.grad.dtype), is_new_state=is_new,
            )  # fmt: skip
            return
        from lightning_tieroffload.kernels.triton_adam import triton_adam_step

        triton_adam_step(
            None if wire is not None else _on_device(slot.part, slot),
            flat_view(source.grad), states["exp_avg"], states["exp_avg_sq"],
            kernel.scalars(source.group, step, is_new),
            split=unit.split_tensors(wire.slots.index(slot)) if wire is not None else None,
            grad_scales=self._scales.of(source.factors),
        )  # fmt: skip


def own_state(space: DeviceSpace, unit: UnitState, slot: ParamSlot, kind: str, entry: dict[str, Any]) -> Part:
    """The part that holds ``entry[kind]``; made, and given its values, where they came from elsewhere (a load)."""
    tensor = entry[kind]
    part = unit.find_state(slot, kind, tensor)
    if part is None:
        space.settle_state(unit, to_write=True)  # else what the device has of it would be written over the new values
        entry[kind] = unit.new_state(slot, kind).copy_(tensor)
        part = unit.find_state(slot, kind, entry[kind])
        assert part is not None
    return part


def _on_device(part: Part, slot: ParamSlot) -> torch.Tensor:
    """The slot's memory in a part on the device, as one dimension."""
    return flat_view(part.device_view(part.slots.index(slot)))


def _num_refs(source: DeviceSource) -> tuple[int, int]:
    """References to the entry, and the most to one of its tensors."""
    most = 0
    for name in source.kernel.state_names:
        tensor = source.entry.get(name)
        most = max(most, sys.getrefcount(tensor) if tensor is not None else 0)
    tensor = None
    return sys.getrefcount(source.entry), most


def _own_refs() -> tuple[int, int]:
    """What they are where nobody holds any: it differs from one interpreter to the next."""
    state = {0: {"moment": torch.empty(1, device="cpu")}}  # as ``optimizer.state`` refers to an entry
    kernel = SimpleNamespace(state_names=("moment",))
    source = DeviceSource(cast(Any, None), {}, kernel, state[0], cast(Any, None), [])
    return _num_refs(source)


_OWN_ENTRY_REFS, _OWN_TENSOR_REFS = _own_refs()


_ONE_TENSOR = torch.empty(1, device="cpu")  # referred to once, as by an entry
_OWN_GIVEN_REFS = most_refs({0: _ONE_TENSOR})
_OWN_STORAGE_OWNERS = storage_owners(_ONE_TENSOR.untyped_storage())


def _is_held(source: DeviceSource) -> bool:
    """Somebody holds state that he looked at, or another tensor over it. See [Note: looked-at state]."""
    num_entry_refs, num_tensor_refs = _num_refs(source)
    if num_entry_refs > _OWN_ENTRY_REFS or num_tensor_refs > _OWN_TENSOR_REFS:
        return True
    unit: UnitState = source.slot.unit
    for name in source.kernel.state_names:
        tensor = source.entry.get(name)
        if tensor is None:
            continue
        part = unit.find_state(source.slot, name, tensor)
        num_owners = storage_owners(tensor.untyped_storage())
        tensor = None
        if part is None:
            if num_owners > _OWN_STORAGE_OWNERS:
                return True
        elif part.num_home_aliases() > 0 or most_refs(part.given_tensors()) > _OWN_GIVEN_REFS:
            return True
    return False


def _refs_in_state(state: dict[Any, Any], p: Any, without: Container[str] = ()) -> tuple[int, int]:
    """References to a parameter's entry, and the most to one of its tensors, ``without`` those of these names."""
    entry = dict.get(state, p)
    most = 0
    for name, tensor in list(entry.items()) if isinstance(entry, dict) else ():
        if isinstance(tensor, torch.Tensor) and name not in without:
            most = max(most, sys.getrefcount(tensor))
    return sys.getrefcount(entry) if entry is not None else 0, most


_OWN_REFS_IN_STATE = _refs_in_state({0: {"moment": torch.empty(1, device="cpu")}}, 0)


def is_state_held(unit: UnitState, slots: Iterable[ParamSlot], state: dict[Any, Any]) -> bool:
    """Whether user code refers to the slots' entries, to their tensors, or to these' memory. No update is under way."""
    block = unit.state_block
    if block.is_held():
        return True
    parts = {part for parts in unit.state_parts.values() for part in parts}
    if any(part.num_home_aliases() > 0 for part in parts):
        return True
    shared = {part.home_flat.untyped_storage().data_ptr() for part in parts if part.home_flat is not None}
    own_entry_refs, own_tensor_refs = _OWN_REFS_IN_STATE
    for slot in slots:
        in_block = block.names_in(slot, dict.get(state, slot.param))
        num_entry_refs, num_tensor_refs = _refs_in_state(state, slot.param, in_block)
        if num_entry_refs > own_entry_refs + bool(in_block) or num_tensor_refs > own_tensor_refs:
            return True
        entry = dict.get(state, slot.param)
        for name, tensor in entry.items() if isinstance(entry, dict) else ():
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and name not in in_block:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in shared and storage_owners(storage) > _OWN_STORAGE_OWNERS:
                    return True
    return False


def assign_device_units(
    units: Sequence[UnitState], budget_nbytes: int, prefetch_units: int, streamed_share: float = 0.0
) -> None:
    """Give units a device home and updates on the device, as far as the budget goes; the rest stay with DRAM.

    See ``choose_device_units``. ``streamed_share`` of the rest are updated on the device too, and the others on the
    CPU: see [Note: streamed updates].
    """
    room_nbytes = staging_nbytes(budget_nbytes) if streamed_share > 0 else 0
    chosen = choose_device_units(units, budget_nbytes - room_nbytes, prefetch_units)
    streamed = choose_streamed_units([unit for unit in units if unit not in chosen], streamed_share)
    for unit in units:
        place = UpdatePlace.DEVICE if unit in chosen or unit in streamed else UpdatePlace.CPU
        home = Tier.DEVICE if unit in chosen else Tier.DRAM
        was_here = unit.choice.state_home is Tier.DEVICE
        if unit in chosen or was_here or place is not unit.choice.update_on:
            param_home = home if home is Tier.DEVICE or was_here else unit.choice.param_home
            unit.choice = dataclasses.replace(
                unit.choice, param_home=param_home, state_home=home, grad_home=home, update_on=place
            )


def choose_device_units(units: Sequence[UnitState], budget_nbytes: int, prefetch_units: int) -> set[UnitState]:
    """The units whose state, gradients and parameters stay on the device, as far as the budget goes.

    ``units`` come in the order of the next forward: the first ones are needed first, so that those that the CPU
    updates have the others' forward to hide under.
    """
    chosen: set[UnitState] = set()
    for unit in units:
        if (
            unit.grad_nbytes
            and not unit.is_paged
            and _need_nbytes(units, chosen | {unit}, prefetch_units) <= budget_nbytes
        ):
            chosen.add(unit)
    return chosen


def _need_nbytes(units: Sequence[UnitState], chosen: set[UnitState], prefetch_units: int) -> int:
    """Device bytes at the worst time: what the chosen ones keep, and what computing the others takes."""
    kept_nbytes = around_nbytes = window_nbytes = newborn_nbytes = 0
    for unit in units:
        compute_nbytes = sum(part.nbytes for part in unit.parts_for(unit.wire.dtype if unit.wire else None))
        has_sums = unit.has_accumulated
        is_wire = {slot: unit.wire is not None and slot.castable for slot in unit.slots if slot.param.requires_grad}
        if unit in chosen:
            kept_nbytes += compute_nbytes + (unit.low.nbytes if unit.low is not None else 0)
            for slot, is_narrow in is_wire.items():  # sums are kept in full width
                kept_nbytes += 2 * round_up(4 * slot.numel, 512) + slot.numel * (2 if is_narrow and not has_sums else 4)
            # Newborn in full width beside the narrow form or the sum that is kept; else what is born is kept itself.
            beside_nbytes = sum(slot.nbytes for slot, is_narrow in is_wire.items() if is_narrow or has_sums)
            newborn_nbytes = max(newborn_nbytes, beside_nbytes)
            continue
        # Newborn, and on their way down in 16 bits; where there are sums, what comes up to be added to. Beside a GPU
        # then: newborn, the next unit's, and three units' on their way, in full width with what they are added to. With
        # less compute waits for them.
        num_with_sums = 8 if unit.device.type == "cuda" else 3
        newborn_nbytes = max(newborn_nbytes, (num_with_sums if has_sums else 2) * unit.grad_nbytes)
        if unit.is_spanning:
            around_nbytes += compute_nbytes
        else:
            window_nbytes = max(window_nbytes, compute_nbytes)
    return kept_nbytes + around_nbytes + (1 + prefetch_units) * window_nbytes + newborn_nbytes
