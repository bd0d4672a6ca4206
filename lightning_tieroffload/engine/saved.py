"""Floor 7. Saved-tensor hooks: how backward gets a unit's parameters back, whatever the module returned.

[Note: saved views] While a unit computes, every tensor that autograd saves goes through ``SavedHooks.pack``. One that
shares a unit's storage is replaced by a description (shape, stride, offset, version): it holds no memory and keeps
nothing on the device. ``unpack`` pages the unit in and makes the view again. Everything else is passed to the hooks
that were active outside (a checkpoint's, a user's), or kept as it is. Hooks switch autograd's own version check off,
so both kinds compare versions here.

[Note: a checkpoint counts] Torch's non-reentrant checkpoint numbers what forward saves and finds it by number when
forward runs again. A parameter must therefore come to the same hooks both times, whatever windows are open; so ours are
pushed over a checkpoint's as soon as it pushes its own (torch_patches). The checkpoint still counts each saved
parameter, as a stand-in of one element: where it stops running forward again, and when it begins, is as in the plain
run. What forward saved as another tensor (autocast's cast of a weight) may be such a stand-in when forward runs again;
whoever gets one from a checkpoint makes what it stands for. A checkpoint that began without us stays without us.

[Note: old casts] Under autocast a plain graph saves the cast, a copy, so backward goes on with the old bits whatever
became of the weight: a step for an earlier loss, a load, an edit. Here what is saved is a view of the wire part, whose
bits of the moment come and go with the weight. So before a weight's home is written, and where a write to its device
copy is noticed (the home still holds the old bits then), views of it that graphs still have are moved to an *old part*:
those bits, in DRAM, fetched and evicted like any other part, until the last of these views dies. In a loop whose
backward comes before its step there are none. Under a non-reentrant checkpoint plain torch saves nothing and casts
again, so backward gets what is saved when the block is run again. Weights that are saved as they are fail as plainly.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lightning_tieroffload.engine.activations import ActivationStore, Offloaded, version_error
from lightning_tieroffload.engine.device_space import DeviceSpace, has_modes, outside_transforms
from lightning_tieroffload.engine.params import ParamSlot, managed_slot
from lightning_tieroffload.engine.unit_state import Form, Part
from lightning_tieroffload.sizes import format_nbytes

__all__ = [
    "SavedHooks",
    "are_popped",
    "checkpoint_hooks",
    "hooks_are_ours",
    "pop_hooks",
    "pop_left_hooks",
    "push_hooks",
]


OnUnpack = Callable[[Part], None]
Pair = tuple[Callable[[Any], Any], Callable[[Any], Any]]
Count = Callable[[torch.Tensor], Any]


class _SavedView:
    __slots__ = (
        "__weakref__", "counted", "dtype", "hint", "is_made_again", "place", "shape", "slot", "stride", "version",
    )  # fmt: skip

    def __init__(self, part: Part, slot: ParamSlot, tensor: torch.Tensor, *, is_made_again: bool) -> None:
        self.slot = slot
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.place = part, tensor.storage_offset()
        self.version = _version(slot.param)
        self.counted: _Outer | None = None  # what a checkpoint around has in its place
        self.is_made_again = is_made_again
        self.hint = _HINT

    @property
    def part(self) -> Part:
        return self.place[0]

    def move_to(self, part: Part) -> None:
        """Another part holds what was saved."""
        before, offset = self.place
        start_nbytes = self._start(before) * before.dtype.itemsize - self._start(part) * part.dtype.itemsize
        self.place = part, offset - start_nbytes // self.dtype.itemsize

    def note_lost(self, nbytes: int) -> None:
        """There was no memory to keep what was saved."""
        self.hint = (
            f" Plainly autocast's graph keeps old casts; dram_budget has no room for those of {self.part.unit.name} "
            f"({format_nbytes(nbytes)}). Raise dram_budget, or run backward before the step."
        )

    def _start(self, part: Part) -> int:
        return part.offsets[part.slots.index(self.slot)]

    def make(self) -> torch.Tensor:
        part, offset = self.place
        if self.dtype == part.dtype:
            return part.flat.as_strided(self.shape, self.stride, offset)
        with torch._C._InferenceMode(False):
            view = torch.empty(0, dtype=self.dtype, device=part.device)
            return view.set_(part.storage, offset, self.shape, self.stride)

    def make_after_close(self) -> torch.Tensor:
        """The view on the ordinary parameter, or on the one that another engine has now; as plain as the graph is."""
        (part, offset), p = self.place, self.slot.param
        if part.loan is not None:
            assert part.home_flat is not None
            storage = part.home_flat.to(part.device, copy=True).untyped_storage()
            with torch._C._InferenceMode(False):
                view = torch.empty(0, dtype=self.dtype, device=part.device)
                return view.set_(storage, offset, self.shape, self.stride)
        base = p.data
        if managed_slot(p) is None and base.untyped_storage()._cdata != self.slot.left_in:
            raise RuntimeError(
                f"backward runs through a graph that was recorded before engine.close(), and {self.slot.name} has "
                "other memory since (p.data = ..., model.to(...)): its values of then are gone. Run backward before "
                "that, or the forward again."
            )
        if base.dtype != part.dtype:  # the graph has autocast's cast of it
            base = base.to(part.dtype)
        offset += base.storage_offset() - self._start(part) * part.dtype.itemsize // self.dtype.itemsize
        with torch._C._InferenceMode(False):
            view = torch.empty(0, dtype=self.dtype, device=base.device)
            return view.set_(base.untyped_storage(), offset, self.shape, self.stride)


class _Kept:
    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output saved as itself would own the node that owns it; a detached alias shares the version counter.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version


class _Outer:
    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


_MAKES = "_tieroffload_makes"  # on a stand-in: what it stands for, made


def _stand_in(tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a checkpoint counts in place of a parameter: as large as that for who asks, and one element of memory."""
    with torch._C._InferenceMode(False), torch._C._DisableTorchDispatch():
        result = torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    setattr(result, _MAKES, make)
    return result


def _version(p: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return p._version


_HINT = " allow_mutation_on_saved_tensors does not reach the parameters of an offloaded model."


def _check_version(name: str, tensor: torch.Tensor, saved: int, current: int, hint: str = "") -> None:
    if saved != current:
        raise version_error(name, tensor.shape, saved, current, hint)


def _is_torchs(pair: Pair | None, name: str) -> bool:
    """Whether a pair of hooks is one of torch's non-reentrant checkpoint."""
    pack = pair[0] if pair is not None else None
    is_torchs = getattr(pack, "__module__", None) == "torch.utils.checkpoint"
    return is_torchs and getattr(pack, "__qualname__", "").startswith(name)


class SavedHooks:
    """One pair of hooks over what was active outside. ``on_unpack(part)`` pages a part in."""

    def __init__(
        self,
        space: DeviceSpace,
        on_unpack: OnUnpack,
        outer: Pair | None,
        activations: ActivationStore | None = None,
        *,
        count: Count | None = None,
    ) -> None:
        self._space = space
        self._by_storage = space.by_storage
        self._lock = space.lock
        self._on_unpack = on_unpack
        self._outer = outer
        self._activations = activations
        self._count = count  # a checkpoint around: see [Note: a checkpoint counts]
        self.is_over_checkpoint = count is not None and outer is not None and count == outer[0]
        below = getattr(outer[0], "__self__", None) if outer is not None else None
        # A checkpoint's, or another engine's over those.
        self._is_made_again: bool = _is_torchs(outer, "_checkpoint_hook.")
        if isinstance(below, SavedHooks):
            self._is_made_again = below._is_made_again

    def is_outermost_of(self, space: DeviceSpace) -> bool:
        """Whether these are the hooks of ``space`` and nobody else's are around them."""
        return self._by_storage is space.by_storage and self._outer is None

    def pack(self, tensor: torch.Tensor) -> Any:
        part = self._part_of(tensor)
        if part is not None:
            offset = tensor.storage_offset() * tensor.itemsize // part.dtype.itemsize
            slot = part.slot_at(offset)
            view = self._view(part, slot, tensor)
            if self._count is not None:
                make = functools.partial(self.unpack, self._view(part, slot, tensor))
                counted = self._count(_stand_in(tensor, make))
                if self.is_over_checkpoint:
                    view.counted = _Outer(counted, self._outer[1])  # type: ignore[index]
            return view
        if self._outer is not None:
            return _Outer(self._outer[0](tensor), self._outer[1])
        if type(tensor) is not torch.Tensor or not has_modes():  # another class has operations of its own
            return self._keep(tensor)
        with outside_transforms():
            return self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> Any:
        if self._space.on_saved is not None:
            self._space.on_saved(tensor)
        if self._activations is not None:
            offloaded = self._activations.pack(tensor)
            if offloaded is not None:
                return offloaded
        return _Kept(tensor)

    def _part_of(self, tensor: torch.Tensor) -> Part | None:
        try:
            with torch._C.DisableTorchFunction():
                return self._by_storage.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None  # sparse, opaque or wrapper tensors have no storage of their own

    def _view(self, part: Part, slot: ParamSlot, tensor: torch.Tensor) -> _SavedView:
        view = _SavedView(part, slot, tensor, is_made_again=self._is_made_again)
        if part.form is Form.WIRE and not self._is_made_again:
            with self._lock:
                part.saved.add(view)
        return view

    def unpack(self, packed: Any) -> torch.Tensor:
        if type(packed) is _SavedView:
            if packed.counted is not None:
                # Forward runs again when it would in the plain run, and what backward gets is what it saves then.
                again = packed.counted.unpack(packed.counted.packed)
                if packed.is_made_again:
                    make_again: Callable[[], torch.Tensor] | None = getattr(again, _MAKES, None)
                    return again if make_again is None else make_again()
            with (
                self._lock,
                outside_transforms(),
            ):  # until there is a view, another thread that reads parameters may evict the part again
                is_closed = packed.part.unit.is_closed
                part = None
                while not is_closed and part is not packed.part:  # it may find that the weights have been written to
                    part = packed.part
                    self._on_unpack(part)
                if packed.part.loan is None and not packed.is_made_again:
                    current = _version(packed.slot.param)
                    _check_version(packed.slot.name, packed.slot.param, packed.version, current, packed.hint)
                return packed.make_after_close() if is_closed else packed.make()
        if type(packed) is Offloaded and self._activations is not None:
            with outside_transforms():
                return self._activations.unpack(packed)
        if type(packed) is _Outer:
            tensor = packed.unpack(packed.packed)
            # Autocast's own cast in forward, one of ours when it ran again: the same numbers.
            make: Callable[[], torch.Tensor] | None = getattr(tensor, _MAKES, None)
            return tensor if make is None else make()
        _check_version("a saved tensor", packed.tensor, packed.version, packed.tensor._version)
        return packed.tensor  # type: ignore[no-any-return]


def push_hooks(
    space: DeviceSpace,
    on_unpack: OnUnpack,
    activations: ActivationStore | None = None,
    region: tuple[Pair, Count] | None = None,
    *,
    is_over_checkpoint: bool = False,
) -> bool:
    """Make ours the innermost hooks of this thread. False where they are already, or where hooks are forbidden.

    ``activations`` takes what is no parameter; ``region``, a pair of hooks, takes it instead, and whoever is outside
    does not see it then; with it comes who counts parameters. ``is_over_checkpoint``: a checkpoint has just pushed its
    own.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    outer: Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    owner = getattr(outer[0], "__self__", None) if outer is not None else None
    count: Count | None = owner._count if isinstance(owner, SavedHooks) else None
    if outer is not None and (is_over_checkpoint or (isinstance(owner, SavedHooks) and owner.is_over_checkpoint)):
        count = outer[0]
    if region is not None:
        outer, count = region
    elif isinstance(owner, SavedHooks) and owner._by_storage is space.by_storage:
        if owner._outer is not None or activations is None or activations is owner._activations:
            return False
        outer = None
    hooks = SavedHooks(space, on_unpack, outer, activations, count=count)
    torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    return True


def hooks_are_ours(space: DeviceSpace) -> bool:
    """Whether the innermost hooks of this thread are those of ``space``, and no checkpoint's are right below."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    owner = getattr(top[0], "__self__", None) if top is not None else None
    return isinstance(owner, SavedHooks) and owner._by_storage is space.by_storage and not owner.is_over_checkpoint


def checkpoint_hooks() -> Pair | None:
    """The hooks that a checkpoint has just pushed, whoever has pushed others over them."""
    pair: Pair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    while pair is not None and isinstance(owner := getattr(pair[0], "__self__", None), SavedHooks):
        pair = owner._outer
    return pair


def pop_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


_popped_for_others: weakref.WeakSet[Any] = weakref.WeakSet()


def are_popped(pack: Any) -> bool:
    """Whether the pair with this ``pack`` was taken off already, before its context ended.

    A generator of torch's checkpoint that an exception's frames keep alive ends whenever these die. What is on top then
    is somebody else's, or nothing.
    """
    return pack in _popped_for_others


def pop_left_hooks(space: DeviceSpace) -> None:
    """After an exception: hooks of ``space`` and of checkpoints that Ctrl-C has left, struck before anybody noted them.

    Whatever else is on top is in a context of the user's, which is open still.
    """
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        owner = getattr(top[0], "__self__", None)
        # Over a checkpoint's every engine of the process has pushed its own.
        is_ours = isinstance(owner, SavedHooks) and (owner._by_storage is space.by_storage or owner.is_over_checkpoint)
        if not is_ours:
            if not any(_is_torchs(top, name) for name in ("_checkpoint_hook.", "_recomputation_hook.")):
                return
            _popped_for_others.add(top[0])
        pop_hooks()
