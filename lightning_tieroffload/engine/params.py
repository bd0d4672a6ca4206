"""Floor 3. What a user's Parameter is while the engine has it: the same object, another class.

Owns the two classes that a managed ``nn.Parameter`` wears, and nothing of where its bytes are: every question goes to
the parameter's ``ParamSlot`` through the ``SlotOwner`` protocol.

[Note: parameter classes] A managed Parameter never changes identity; only ``p.__class__`` is set.
``ComputeParameter`` is worn while its unit is leased for compute: torch sees a plain parameter (no dispatch at all);
only ``.grad`` and ``.data`` are properties. ``PagedParameter`` is worn at all other times: shape, dtype and device are
the true ones, and any function that needs values pages the unit in first. Without it a read of a released storage is a
segmentation fault. ``type(p)`` is plain ``nn.Parameter`` inside compiled units, which must not see either class.

[Note: handed-out tensors] ``p.data``, ``p.detach()`` and views share the unit's storage. While such a tensor is alive
the storage has more owners than the unit's own, and the unit then stays on the device and counts as written to: what is
done through an alias cannot be seen. This is asked of the storage's reference count, so no alias can be missed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from lightning_tieroffload.errors import UnsupportedError

__all__ = [
    "AutocastParameter",
    "ComputeParameter",
    "GuardedParameter",
    "PagedParameter",
    "ParamSlot",
    "SlotOwner",
    "managed_slot",
    "raw_data",
    "raw_grad",
    "set_raw_data",
    "set_raw_grad",
]

T = TypeVar("T")


class _Field(Protocol[T]):
    """A descriptor of ``torch.Tensor``; torch's stubs name only the type of its value."""

    def __get__(self, p: torch.Tensor, owner: type | None = None, /) -> T: ...
    def __set__(self, p: torch.Tensor, value: T, /) -> None: ...


# The C++ descriptors, read once: our classes shadow them.
_GRAD = cast("_Field[torch.Tensor | None]", torch.Tensor.grad)
_DATA = cast("_Field[torch.Tensor]", torch.Tensor.data)


def raw_grad(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient in autograd's own field, past our property."""
    with torch._C.DisableTorchFunction():
        return _GRAD.__get__(p)


def set_raw_grad(p: torch.Tensor, grad: torch.Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        _GRAD.__set__(p, grad)


def raw_data(p: torch.Tensor) -> torch.Tensor:
    """An alias of the parameter's device memory as it is (released or not)."""
    with torch._C.DisableTorchFunctionSubclass():
        return _DATA.__get__(p)


def set_raw_data(p: torch.Tensor, data: torch.Tensor) -> None:
    # Under inference mode the assignment would make an inference tensor of the parameter for good.
    with torch._C._InferenceMode(False), torch._C.DisableTorchFunctionSubclass():
        _DATA.__set__(p, data)


class SlotOwner(Protocol):
    """What a parameter asks of the engine. Implemented by the engine; calls come from any thread."""

    def touch(self, slots: Sequence[ParamSlot], call: Callable[[], Any], *, grad_mode: bool) -> Any: ...
    def mark_aliased(self, slot: ParamSlot) -> None: ...
    def read_grad(self, slot: ParamSlot) -> torch.Tensor | None: ...
    def write_grad(self, slot: ParamSlot, grad: torch.Tensor | None) -> None: ...
    def overwrite(self, slot: ParamSlot, source: torch.Tensor) -> None: ...
    def replace_data(self, slot: ParamSlot, data: torch.Tensor) -> None: ...
    def snapshot(self, slot: ParamSlot) -> torch.Tensor: ...
    def in_state_dict(self) -> bool: ...
    def home_address(self, slot: ParamSlot) -> int: ...
    def call_in_autocast(
        self, slots: Sequence[ParamSlot], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class ParamSlot:
    """A parameter's place in its unit: which unit, which flat storage, where in it. The unit owns the memory."""

    __slots__ = (
        "__weakref__", "cast_grad", "castable", "dtype", "home", "host_param", "index", "is_mixed", "left_in", "name",
        "num_cast_grads", "numel", "owner", "param", "part", "shape", "split", "stride", "unit", "was_mixed",
        "wire_seen",
    )  # fmt: skip

    def __init__(self, *, name: str, param: nn.Parameter, index: int) -> None:
        self.name = name
        self.param = param
        self.index = index  # within the unit
        self.shape = param.shape
        self.stride = param.stride()
        self.dtype = param.dtype
        self.numel = param.numel()
        self.owner: SlotOwner
        self.unit: Any
        self.part: Any  # the full part, whose storage the parameter is a view of
        self.home: torch.Tensor  # in DRAM, a storage of its own; none where the master is split
        self.split: Any = None  # kernels.split.SplitMaster, in place of ``home``
        self.host_param: nn.Parameter | None = None  # what an optimizer clone sees
        self.left_in = 0  # the storage that the parameter was given at close
        # what wire.py watches
        self.castable = False
        self.wire_seen: torch.dtype | None = None
        self.num_cast_grads = 0
        self.cast_grad: tuple[Any, int] | None = None  # the last of them: weak reference to its storage, version
        self.is_mixed = False
        self.was_mixed = False  # of several graphs at a time, backward may come to the mixed one last

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"ParamSlot({self.name})"


def _fixed(slot: ParamSlot, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{slot.name} is offloaded: its shape and memory are fixed while it is, so p.{name}(...) cannot be done. "
        "Assign values (p.copy_(...), p.data = ...), or call engine_of(model).close() first."
    )


def _ordinary(slot: ParamSlot, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(slot.owner.snapshot(slot), requires_grad=requires_grad)


class _Managed(nn.Parameter):
    """Shared by both classes. Never constructed: it is put on by assigning ``__class__``."""

    _tieroffload_slot: ParamSlot

    @property
    def grad(self) -> torch.Tensor | None:
        """The true gradient, wherever it is. Reading it brings it to the device and makes that tensor authoritative."""
        slot = self._tieroffload_slot
        return slot.owner.read_grad(slot)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        slot = self._tieroffload_slot
        slot.owner.write_grad(slot, value)

    @grad.deleter
    def grad(self) -> None:
        slot = self._tieroffload_slot
        slot.owner.write_grad(slot, None)

    def __repr__(self) -> str:  # type: ignore[override]
        # torch prints the class's name unless it is nn.Parameter itself.
        values = self._tieroffload_slot.owner.snapshot(self._tieroffload_slot).to(self.device)
        return repr(nn.Parameter(values, requires_grad=self.requires_grad))

    @property
    def data(self) -> torch.Tensor:
        slot = self._tieroffload_slot
        return slot.owner.touch([slot], lambda: raw_data(self), grad_mode=False)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        slot = self._tieroffload_slot
        slot.owner.replace_data(slot, value)

    def __hash__(self) -> int:
        return id(self)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """``p.data = source`` for a source of p's shape and dtype, else refused.

        A method, since ``Tensor.set_`` does not go through ``__torch_function__``.
        """
        slot = self._tieroffload_slot
        source = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(source, torch.Tensor) or (source.shape, source.dtype) != (slot.shape, slot.dtype):
            raise _fixed(slot, "set_")
        slot.owner.replace_data(slot, source.detach())
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        result = _ordinary(self._tieroffload_slot, self.requires_grad)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, proto: Any) -> Any:
        slot = self._tieroffload_slot
        hooks: OrderedDict[int, Any] = OrderedDict()
        state = (slot.owner.snapshot(slot), self.requires_grad, hooks)
        attributes = {key: value for key, value in self.__dict__.items() if key != "_tieroffload_slot"}
        if attributes:
            return torch._utils._rebuild_parameter_with_state, (*state, attributes)
        return torch._utils._rebuild_parameter, state


class ComputeParameter(_Managed):
    """Worn while the unit is leased: plain for torch. See [Note: parameter classes]."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        slot = self._tieroffload_slot
        slot.owner.mark_aliased(slot)
        return raw_data(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        slot = self._tieroffload_slot
        slot.owner.replace_data(slot, value)


class AutocastParameter(_Managed):
    """Worn in place of ``ComputeParameter`` by fp32 weights under autocast: every use is seen. See wire.py."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if not _has_window(args, kwargs):
            return PagedParameter.__torch_function__(func, types, args, kwargs)
        if func == _GRAD_GET and isinstance(first, _Managed):
            return first.grad
        if func == _GRAD_SET and isinstance(first, _Managed):
            first.grad = args[1]
            return None
        if func is torch.autograd.grad and (edges := _as_edges(args[1])) is not None:
            return _grad_at(args[0], args[1], edges, kwargs)  # not under the lock, which autograd's threads want
        found: list[ParamSlot] = []
        if func not in _METADATA:
            _paged_in(args, found)
            _paged_in(kwargs, found)
        if not found:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return found[0].owner.call_in_autocast(found, func, args, kwargs)


class GuardedParameter(_Managed):
    """Worn in place of ``ComputeParameter`` once several threads use the model.

    The thread whose window is open computes as with a plain parameter; to any other the parameter is a paged one.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or _has_window(args, kwargs):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return PagedParameter.__torch_function__(func, types, args, kwargs)


def _has_window(args: Any, kwargs: Any) -> bool:
    """Whether the calling thread has a window open over every managed parameter among the arguments."""
    found: list[ParamSlot] = []
    _paged_in(args, found)
    _paged_in(kwargs, found)
    thread = threading.get_ident()
    return all(slot.unit.window_threads.get(thread, 0) > 0 for slot in found)


def _names(*names: str) -> Iterator[Any]:
    for name in names:
        found = getattr(torch.Tensor, name, None)
        if found is not None:
            yield found if callable(found) else found.__get__


# Functions that need no values: shape and type questions, autograd bookkeeping.
_METADATA = frozenset(
    _names(
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
        "is_xpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_mps", "is_nested", "names",
        "_version", "itemsize", "nbytes", "output_nr", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
        "is_ipu", "is_maia", "is_mtia", "is_vulkan", "is_xla", "grad_dtype", "_is_view", "is_shared", "is_pinned",
        "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex",
        "is_contiguous", "storage_offset", "get_device", "requires_grad_", "register_hook",
        "register_post_accumulate_grad_hook", "__len__", "__hash__", "is_inference", "is_signed", "is_same_size",
        "has_names", "is_conj", "is_neg", "_is_zerotensor", "is_coalesced", "dim_order", "retain_grad",
    )
) | {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_signed}  # fmt: skip

# Functions that would give a parameter another shape or other memory in place.
_RESHAPES = frozenset(
    _names(
        "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "squeeze_", "unsqueeze_",
        "as_strided_", "resize_as_sparse_", "sparse_resize_", "sparse_resize_and_clear_",
    )
)  # fmt: skip

_DATA_SET = _DATA.__set__
_GRAD_GET = _GRAD.__get__
_GRAD_SET = _GRAD.__set__


def _paged_in(value: Any, found: list[ParamSlot]) -> None:
    if isinstance(value, torch.Tensor):
        slot = getattr(value, "_tieroffload_slot", None) if isinstance(value, _Managed) else None
        if slot is not None:
            found.append(slot)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _paged_in(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _paged_in(item, found)


def _as_edges(inputs: Sequence[Any]) -> list[Any] | None:
    """``inputs`` of ``autograd.grad`` with managed leaves as gradient edges; None where there is none."""
    if not any(isinstance(item, _Managed) and item.requires_grad for item in inputs):
        return None
    edges = []
    for item in inputs:
        if isinstance(item, _Managed) and item.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                edges.append(torch.autograd.graph.get_gradient_edge(item))
        else:
            edges.append(item)
    return edges


def _grad_at(outputs: Any, inputs: Sequence[Any], edges: list[Any], kwargs: dict[str, Any]) -> Any:
    """``autograd.grad`` without the values of ``inputs``, which it never reads, so they may stay away."""
    fills_in = kwargs.pop("materialize_grads", False)
    if fills_in:
        kwargs["allow_unused"] = True
    result = torch.autograd.grad(outputs, tuple(edges), **kwargs)
    if not fills_in:
        return result
    requires_grad = bool(kwargs.get("create_graph"))
    return tuple(
        torch.zeros(p.shape, dtype=p.dtype, device=p.device, requires_grad=requires_grad) if grad is None else grad
        for grad, p in zip(result, inputs, strict=True)
    )


class PagedParameter(_Managed):
    """Worn outside compute: true shape, dtype and device; values are paged in on touch."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, _Managed):
            slot = first._tieroffload_slot
            if func is torch.Tensor.data_ptr:
                return slot.owner.home_address(slot)
            if func == _GRAD_GET:
                return first.grad
            if func == _GRAD_SET:
                first.grad = args[1]
                return None
            if func == _DATA_SET:
                slot.owner.replace_data(slot, args[1])
                return None
            if func in _RESHAPES:
                raise _fixed(slot, func.__name__)
            if func is torch.Tensor.share_memory_:
                raise UnsupportedError(
                    f"{slot.name} is offloaded: its memory comes and goes and cannot be shared with other processes. "
                    "Share what model.state_dict() gives, or call engine_of(model).close() first."
                )
            if func is torch.Tensor.detach and slot.owner.in_state_dict():
                return slot.owner.snapshot(slot)
            if func is torch.Tensor.copy_ and len(args) > 1 and isinstance(args[1], torch.Tensor) and not (
                torch.is_grad_enabled() and (first.requires_grad or args[1].requires_grad)
            ) and not isinstance(args[1], _Managed):  # fmt: skip
                slot.owner.overwrite(slot, args[1])
                return first
        if func is torch.autograd.grad and (edges := _as_edges(args[1])) is not None:
            return _grad_at(args[0], args[1], edges, kwargs)
        found: list[ParamSlot] = []
        _paged_in(args, found)
        _paged_in(kwargs, found)
        if not found:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def call() -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        return found[0].owner.touch(found, call, grad_mode=torch.is_grad_enabled())


def managed_slot(p: Any) -> ParamSlot | None:
    """The slot of a managed parameter, else None. Cheap; works for every class it can wear."""
    slot = getattr(p, "__dict__", {}).get("_tieroffload_slot")
    return slot if isinstance(slot, ParamSlot) else None
