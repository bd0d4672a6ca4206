"""Floor 8. Recompute that we impose: a unit's activations are dropped after its forward and made again in backward.

Torch's own non-reentrant checkpoint does the work; here is only who may be recomputed, and what has to be as it was.

[Note: who may be recomputed] Running a forward twice is invisible only if it depends on nothing but its inputs and
changes nothing but its outputs. That is watched, not hoped for. A unit's first call keeps its activations, and a
dispatch mode sees each operation: one that writes to memory from outside, or that draws from a generator of its own,
refuses the unit for good. So does Python state that is not the same after forward (attributes of its modules,
containers and objects in them, globals and closures that its forwards name, Python's and NumPy's random generators),
and anything, inputs included, that has changed by the time backward comes. Only then the unit is accepted. The cheap
half is repeated at each call, and activations are dropped at the end of a call that was clean: until then they are
kept. A call that is not like that is no fault and keeps its activations: evaluation, inputs that are more than tensors
and plain values (a cache), hooks of others, a checkpoint around it, weights that changed under autocast's cached casts.

[Note: forward's surroundings] What surrounds forward need not surround backward: a context manager that chooses how
attention is computed, a default dtype, tensors lent by ``functional_call``, a global or context variable. Such things
begin at any step. So a call whose surroundings are not those that were accepted is watched like the first one, and so
is every call while one that is watched waits for its backward.

[Note: as in forward] While forward runs again, module attributes and training flags are those that it saw, batch
statistics go to copies of the buffers, and hooks that came since stay silent. Parameters, buffers and inputs that have
been changed since are an error, as a changed saved tensor is in plain torch.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import inspect
import itertools
import logging
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_tieroffload.engine.activations import version_error
from lightning_tieroffload.engine.device_space import DeviceSpace, has_modes
from lightning_tieroffload.engine.nested import tensors_in
from lightning_tieroffload.engine.params import ParamSlot, managed_slot
from lightning_tieroffload.engine.saved import SavedHooks, checkpoint_hooks

__all__ = ["Recompute", "Region", "Watch", "pop_left_watches"]

# Their forward writes statistics that it does not read: made again into a copy, nothing shows.
_COUNTING_NORMS = frozenset(
    {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d}
)
_VALUES = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size, torch.layout)
_PLAIN = frozenset({bool, int, float, str, type(None)})
# What it holds is looked at elsewhere, or never matters.
_STATELESS = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger)
_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_STATE = frozenset(vars(nn.Module())) - {
    "training"
}  # parameters, buffers, children and hooks have rules of their own
_DEPTH = 4  # of containers and objects that are looked into
_NUM_FUNCTIONS = 200  # that a unit's forwards lead to are looked at
_TAKES_EARLY_STOP = (
    "early_stop" in inspect.signature(torch_checkpoint._checkpoint_without_reentrant_generator).parameters
)


# ---------------------------------------------------------------------------------------------- what state is there


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if k not in _NOT_STATE}


def _token(value: Any, depth: int, seen: set[int]) -> Any:
    """Something that compares equal as long as ``value`` has not changed, as far down as ``depth`` looks."""
    try:
        return _token_of(value, depth, seen)
    except Exception:
        return object()  # it cannot be looked at: equal to nothing


def _token_of(value: Any, depth: int, seen: set[int]) -> Any:
    kind = type(value)
    if kind is float:
        return repr(value)
    if isinstance(value, _VALUES):
        return (kind, value)
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return (id(value), 0 if value.is_inference() else value._version)
    if isinstance(value, _STATELESS):
        return id(value)
    if isinstance(value, contextvars.ContextVar):
        return (id(value), _token(value.get(None), depth, seen))
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, itertools.count):
        return repr(value)
    if hasattr(kind, "__next__"):
        return object()  # what it gives next cannot be looked at: equal to nothing
    if id(value) in seen or depth < 1:
        return id(value)
    seen.add(id(value))
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return (id(value), tuple(_token(item, depth - 1, seen) for item in value))
    if isinstance(value, collections.abc.Mapping):
        return (id(value), tuple((_token(k, 1, seen), _token(v, depth - 1, seen)) for k, v in list(value.items())))
    if "numpy" in sys.modules and kind.__module__.startswith("numpy"):
        return _numpy_token(value)
    inside = [getattr(value, "__dict__", {})]
    inside += [{n: getattr(value, n, None)} for c in kind.__mro__ for n in _slots_of(c)]
    return (id(value), tuple((k, _token(v, depth - 1, seen)) for part in inside for k, v in list(part.items())))


def _slots_of(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _numpy_token(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state())
    return (id(value), value.tobytes() if isinstance(value, np.ndarray) else repr(value))


def _global_generators() -> Any:
    if "numpy" not in sys.modules:
        return random.getstate()
    import numpy as np

    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


_FLAGS = (
    *("_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled"),
    *("_get_overrideable_sdp_enabled", "_get_math_sdp_allow_fp16_bf16_reduction", "_get_sdp_priority_order"),
    *("_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_mkldnn_enabled"),
    *("_get_mkldnn_deterministic", "_get_nnpack_enabled", "_get_cublas_allow_fp16_reduced_precision_reduction"),
    *("_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation"),
    *("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
    *("_get_deterministic_fill_uninitialized_memory",),
)
_OLD_PRECISIONS = ("_get_float32_matmul_precision", "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32")
_PRECISIONS = [("generic", "all")] + [(b, op) for b in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")]


def _readers_of_flags() -> list[Callable[[], Any]]:
    readers: list[Callable[[], Any]] = [getattr(torch._C, name) for name in _FLAGS if hasattr(torch._C, name)]
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    if precision is None:  # where there is, the old names warn when they are read
        return readers + [getattr(torch._C, name) for name in _OLD_PRECISIONS]
    return readers + [functools.partial(precision, *which) for which in _PRECISIONS]


_READ_FLAGS = _readers_of_flags()


def _flags() -> Any:
    """Settings of torch that change what an operation computes or saves. The same in every thread."""
    parametrize = sys.modules.get("torch.nn.utils.parametrize")
    cached = getattr(parametrize, "_cache_enabled", 0)
    return torch.get_default_dtype(), cached, [read() for read in _READ_FLAGS]


def _names_of(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return names


def _outside_names(modules: Iterable[nn.Module]) -> list[Callable[[], Any]]:
    """Readers of the globals and closure cells that the modules' forwards, and what they call by name, lead to."""
    readers: list[Callable[[], Any]] = []
    pending: list[tuple[Any, type | None]] = [
        (getattr(type(m).forward, "__func__", type(m).forward), type(m)) for m in modules
    ]
    pending += [(vars(m)["forward"], None) for m in modules if "forward" in vars(m)]
    seen: set[Any] = set()
    while pending and len(seen) < _NUM_FUNCTIONS:
        function, owner = pending.pop()
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        if (function.__module__ or "").split(".")[0] == "torch":
            continue
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                pending.append((cell.cell_contents, None))
                readers.append(lambda cell=cell: cell.cell_contents)  # type: ignore[misc]
        for name in _names_of(function.__code__):
            if owner is not None and isinstance(getattr(owner, name, None), types.FunctionType):
                pending.append((getattr(owner, name), owner))
            if name in function.__globals__:
                value = function.__globals__[name]
                pending.append((value, None))
                if not isinstance(value, (types.FunctionType, types.ModuleType, type)):
                    readers.append(lambda table=function.__globals__, name=name: table.get(name))  # type: ignore[misc]
    return readers


# They compute by other ways, with other bits, beneath any dispatch mode: autocast does not reach what they are made of.
_SHY = frozenset(
    {
        torch.bilinear, torch.linalg.pinv, torch.pinverse, torch.Tensor.pinverse, torch.linalg.svdvals,
        torch.linalg.eigvalsh, torch.linalg.cond, torch.linalg.norm, torch.linalg.matrix_norm, torch.norm,
        torch.Tensor.norm, torch.linalg.lstsq,
    }
)  # fmt: skip


class _Aside(TorchFunctionMode):
    """Calls of functions that heed a dispatch mode are made without the watch, which is told what they made."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SHY:
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        self.watch.note_made(result, may_write="out" in kwargs)
        return result


class Watch(TorchDispatchMode):
    """Sees every operation of one forward. ``why`` says what makes a second run visible."""

    is_engines = True

    def __init__(self, may_write: set[int], space: DeviceSpace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.space = space  # whose forward it is
        self.why: str | None = None
        self.num_paused = 0  # while the engine itself moves something
        self._may_write = may_write  # storages: batch statistics
        self._made: set[int] = set()  # storages that this forward has made
        self._aside = _Aside(self)

    def begin(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]
        self._aside.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        self._aside.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def note_made(self, result: Any, *, may_write: bool) -> None:
        if may_write:
            self.why = "a function in it writes to a tensor that it is given"
        self._made.update(_storage(leaf) for leaf in tensors_in(result))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.num_paused:
            return func(*args, **kwargs)
        before = {_storage(leaf) for value in (*args, *kwargs.values()) for leaf in tensors_in(value)}
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            self.why = f"{func} draws from a generator of its own"
        if func._schema.is_mutable:
            for index, argument in enumerate(func._schema.arguments):
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                for leaf in tensors_in(value):
                    if _storage(leaf) not in self._made | self._may_write:
                        self.why = f"{func} writes to a tensor from outside its forward"
        result = func(*args, **kwargs)
        self._made.update({_storage(leaf) for leaf in tensors_in(result)} - before)
        return result


def _slots_in(modules: list[nn.Module]) -> list[ParamSlot]:
    slots = [managed_slot(p) for module in modules for p in module._parameters.values() if p is not None]
    return [slot for slot in slots if slot is not None]


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0  # sparse and the like have none


# ------------------------------------------------------------------------------------------------------ inputs


class _Leaf:
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with its tensors replaced by their places in ``tensors``. Raises ``TypeError`` for anything opaque."""
    if type(value) is torch.Tensor:
        tensors.append(value)
        return _Leaf(len(tensors) - 1)
    if isinstance(value, (*_VALUES, types.FunctionType)):
        return value
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(item, tensors) for item in value)
    if type(value) is dict:
        return {k: _taken_apart(v, tensors) for k, v in value.items()}
    raise TypeError(f"an input is a {type(value).__name__}")


def _put_together(value: Any, tensors: tuple[Any, ...]) -> Any:
    if isinstance(value, _Leaf):
        return tensors[value.index]
    if type(value) in (list, tuple):
        return type(value)(_put_together(item, tensors) for item in value)
    if type(value) is dict:
        return {k: _put_together(v, tensors) for k, v in value.items()}
    return value


def _version(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor._version


# ------------------------------------------------------------------------------------------------------ the two


class _Packed:
    """A saved tensor of a region: kept as it is until the call has shown to be clean, then torch's placeholder."""

    __slots__ = ("__weakref__", "again", "holder", "kept", "version")

    def __init__(self, holder: Any, tensor: torch.Tensor) -> None:
        self.holder = holder
        self.again: tuple[int, torch.Tensor] | None = None  # the backward in which it was made again, and what was made
        self.kept: torch.Tensor | None = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version


class _MadeNow(torch.autograd.Function):
    """Its backward unpacks what a region has dropped: torch's checkpoint runs forward again once for each backward."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, packed: list[_Packed], unpack: Callable[[Any], torch.Tensor]) -> Any:
        ctx.packed, ctx.unpack = packed, unpack
        return one.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        for each in ctx.packed:
            each.kept = ctx.unpack(each.holder)
            each.version = each.kept._version
        return None, None, None


class _Again:
    """What is needed to run one call's forward again, and whether that would still give the same."""

    def __init__(self, owner: Recompute, args: Any, modules: list[nn.Module]) -> None:
        self._owner = owner
        self._args = args
        self.modules = modules
        self._attributes: list[dict[str, Any]] = []
        self._flags: list[bool] = []  # requires_grad of the parameters
        self._at_end: Any = None
        self.before = self.state()

    def state(self) -> Any:
        """Everything but inputs that forward can see or change, as something to compare."""
        seen: set[int] = set()
        parts: list[Any] = [_flags()]
        with torch._C.DisableTorchFunctionSubclass():
            for module in self.modules:
                for name, value in vars(module).items():
                    if name not in _NOT_STATE:  # plain values as they are: this runs three times a call
                        parts.append(name)
                        parts.append(value if type(value) in _PLAIN else _token(value, _DEPTH, seen))
                held: list[Any] = [module._parameters] if _counts(module) else [module._parameters, module._buffers]
                parts += [(name, _token(t, 1, seen)) for table in held for name, t in table.items()]
                parts += [(name, id(child)) for name, child in module._modules.items()]
            parts += [_token(read(), _DEPTH, seen) for read in self._owner.outside]
        return parts

    def remember(self, state: Any) -> None:
        """Forward has ended in this state."""
        self._attributes = [_attributes(module) for module in self.modules]
        self._flags = self._needs_grad()
        self._at_end = state

    def _params(self) -> list[nn.Parameter]:
        return [p for module in self.modules for p in module._parameters.values() if p is not None]

    def _needs_grad(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():
            return [p.requires_grad for p in self._params()]

    def _set_needs_grad(self, flags: list[bool]) -> None:
        if flags != self._needs_grad():
            with torch._C.DisableTorchFunctionSubclass():
                for p, flag in zip(self._params(), flags, strict=True):
                    p.requires_grad_(flag)

    def is_as_it_was(self) -> bool:
        with self._as_in_forward():
            return bool(self.state() == self._at_end)

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        """What the modules' attributes referred to when forward ended, training flags included."""
        now = [_attributes(module) for module in self.modules]
        try:
            for module, then in zip(self.modules, self._attributes, strict=True):
                _set_attributes(module, then)
            yield
        finally:
            for module, values in zip(self.modules, now, strict=True):
                _set_attributes(module, values)

    @contextlib.contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        """Batch statistics go to copies, frozen is what was frozen, hooks that are not the engine's stay silent."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._set_needs_grad, self._needs_grad())
            self._set_needs_grad(self._flags)
            for module in self.modules:
                if _counts(module):
                    true = dict(module._buffers)
                    with torch.no_grad():
                        module._buffers.update({k: None if b is None else b.clone() for k, b in true.items()})
                    stack.callback(module._buffers.update, true)
                for name in _HOOK_TABLES:
                    table = getattr(module, name)
                    ours = {k: hook for k, hook in table.items() if self._owner.is_own_hook(hook)}
                    if len(ours) != len(table):
                        vars(module)[name] = collections.OrderedDict(ours)
                        stack.callback(vars(module).__setitem__, name, table)
            yield

    def run(self, *tensors: torch.Tensor) -> None:
        args, kwargs = _put_together(self._args, tensors)
        with self._as_in_forward():
            if self.state() != self._at_end:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"unit {self._owner.name} recomputes its activations, and a parameter, a buffer or another part of "
                    "its state is not what it was in forward. Make the change after backward, or set "
                    'activations="keep".'
                )
            with self._leaving_no_trace():
                self._owner.run_again(args, kwargs)


def _counts(module: nn.Module) -> bool:
    return type(module) in _COUNTING_NORMS and module.training


def _set_attributes(module: nn.Module, values: dict[str, Any]) -> None:
    own = vars(module)
    for key in [k for k in own if k not in values and k not in _NOT_STATE]:
        del own[key]
    own.update(values)


def pop_left_watches(space: DeviceSpace) -> None:
    """After an exception: watches of ``space`` that Ctrl-C has left on this thread's stacks, struck before or while
    anybody noted them. Whatever else is on top is in a context of the user's, or another engine's, which is open still.
    """
    while num := torch._C._len_torch_function_stack():
        aside = torch._C._get_function_stack_at(num - 1)
        if not isinstance(aside, _Aside) or aside.watch.space is not space:
            break
        torch.overrides._pop_mode()
    while num := torch._C._len_torch_dispatch_stack():
        watch = torch._C._get_dispatch_stack_at(num - 1)
        if not isinstance(watch, Watch) or watch.space is not space:
            break
        try:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except IndexError:  # struck in the middle of that
            torch._C._pop_torch_dispatch_stack(None)


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Plainly nothing runs again, so the modes of this thread see nothing. Torch's checkpoint sets forward's device."""
    if not has_modes():
        yield
        return
    with _disable_current_modes():
        others = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
        try:
            yield
        finally:
            for mode in reversed(others):
                torch._C._push_on_torch_function_stack(mode)


class Region:
    """One call of a recomputed unit's forward: its saved tensors go through ``pack`` and ``unpack``.

    The graph holds regions, and torch's checkpoint holds ``_Again``, which must not hold its region: a cycle would keep
    the inputs until the next garbage collection.
    """

    def __init__(self, owner: Recompute, args: Any, tensors: list[torch.Tensor], modules: list[nn.Module]) -> None:
        self._owner = owner
        self._packed: list[_Packed] = []
        self._is_tainted = False
        self._is_to_be_checked = False
        self._inputs = [(tensor.detach(), tensor._version) for tensor in tensors]
        self._generators = _global_generators()
        self._again = _Again(owner, args, modules)
        self._dropped: list[weakref.ref[_Packed]] = []
        self._task = -1  # the backward in which it was last run again
        self.watch: Watch | None = None
        if not owner.is_accepted:
            norms = [m for m in modules if _counts(m)]
            self.watch = Watch({_storage(b) for m in norms for b in m._buffers.values() if b is not None}, owner._space)
        early_stop = (True,) if _TAKES_EARLY_STOP else ()
        self._generator: Any = torch_checkpoint._checkpoint_without_reentrant_generator(
            self._again.run, True, torch_checkpoint.noop_context_fn, "default", False, *early_stop, *tensors
        )
        next(self._generator)  # saves the inputs and pushes torch's pair of hooks
        pair = checkpoint_hooks()
        assert pair is not None
        self._pack, self._unpack = pair
        if self.watch is not None:
            self.watch.begin()

    def count(self, tensor: torch.Tensor) -> None:
        """A parameter is saved, which is the engine's: torch's checkpoint only has to count it."""
        self._pack(tensor)

    def pack(self, tensor: torch.Tensor) -> _Packed:
        if self._owner.on_saved is not None:
            self._owner.on_saved(tensor)
        packed = _Packed(self._pack(tensor), tensor)
        self._packed.append(packed)
        return packed

    def unpack(self, packed: _Packed) -> torch.Tensor:
        kept = packed.kept
        if kept is None:
            return self._made_again(packed)
        if self._is_to_be_checked:
            self._is_to_be_checked = False
            self._owner.unchecked.discard(self)
            self._check_after()
        if kept._version != packed.version:
            raise version_error("a saved tensor", kept.shape, packed.version, kept._version)
        return kept

    def _made_again(self, packed: _Packed) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        if packed.again is not None and packed.again[0] == task:
            return packed.again[1]
        self._task = task
        with _without_modes():
            tensor: torch.Tensor = self._unpack(packed.holder)
        if isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction):
            packed.again = task, tensor  # a Function of the user's may ask twice, which torch's checkpoint refuses
        return tensor

    def _check_after(self) -> None:
        """Backward of a watched call has begun: would forward still give the same?"""
        inputs, self._inputs = self._inputs, []
        if any(tensor._version != version for tensor, version in inputs):
            self._owner.refuse("an input is written to between forward and backward")
        elif not self._again.is_as_it_was():
            self._owner.refuse("its state is changed between forward and backward")
        else:
            self._owner.accept()

    def unfold(self) -> None:
        """Weights are about to change before backward has come: make what was dropped while they are what they were."""
        if self._task != -1 and self._task == torch._C._current_graph_task_id():
            return  # backward has it all by now, and is in the middle of it
        dropped, self._dropped = self._dropped, []  # what runs again touches the weights too, and would unfold
        packed = [each for ref in dropped if (each := ref()) is not None and each.kept is None]
        try:
            if packed:
                with torch._C._InferenceMode(False), torch.enable_grad(), _without_modes():
                    _MadeNow.apply(torch.zeros((), requires_grad=True), packed, self._unpack).backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._dropped = dropped
            raise

    def taint(self) -> None:
        """Something inside this call is not as it has to be: its activations are kept."""
        self._is_tainted = True

    def end(self, *, is_whole: bool) -> None:
        """Forward is over; the caller has taken its own hooks off. Drops what was saved if all was clean."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.end()
        generator, self._generator = self._generator, None
        for _ in generator:
            pass
        packed, self._packed = self._packed, []
        inputs = self._inputs
        if not is_whole or self._is_tainted:
            self._inputs = []
            return
        why = watch.why if watch is not None else None
        state = self._again.state()
        if why is None and _global_generators() != self._generators:
            why = "its forward draws from Python's or NumPy's global random generator"
        if why is None and state != self._again.before:
            why = "its forward changes Python state"
        if why is None and any(tensor._version != version for tensor, version in inputs):
            why = "its forward writes to its input"
        if why is not None:
            self._inputs = []
            self._owner.refuse(why)
            return
        self._again.remember(state)
        if watch is not None:
            self._is_to_be_checked = True
            self._owner.unchecked.add(self)
            return
        self._inputs = []  # torch's checkpoint has them
        self._owner.num_dropped += 1
        for each in packed:
            each.kept = None
        self._dropped = [weakref.ref(each) for each in packed]
        for slot in _slots_in(self._again.modules):
            slot.unit.folded.add(self)


class Recompute:
    """Imposed recompute of one unit, whose ``root`` is called with ``args``. Lives as long as the engine's hooks.

    Args:
        run_again: opens the unit's windows, calls ``root.forward(*args, **kwargs)``, closes them.
        is_own_hook: whether a hook in a module's tables is the engine's.
    """

    def __init__(
        self,
        name: str,
        root: nn.Module,
        space: DeviceSpace,
        *,
        run_again: Callable[[tuple[Any, ...], dict[str, Any]], None],
        is_own_hook: Callable[[Any], bool],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.run_again = run_again
        self.is_own_hook = is_own_hook
        self.is_accepted = False
        self.why_refused: str | None = None
        self.why_not_now: str | None = None
        self.num_dropped = 0
        self.unchecked: weakref.WeakSet[Region] = weakref.WeakSet()  # watched calls that wait for their backward
        self.outside: list[Callable[[], Any]] = []
        self._root = root
        self._space = space
        self._on_refused = on_refused
        self._known: list[nn.Module] = []
        self._surroundings: Any = None
        self._globals: Any = None
        self._globals_varied = False  # since they were last accepted
        self._globals_may_vary = False
        self._cast_versions: tuple[int, Any] = (-1, None)

    @property
    def on_saved(self) -> Callable[[torch.Tensor], None] | None:
        return self._space.on_saved

    def accept(self) -> None:
        self.is_accepted = self.why_refused is None
        self._globals_may_vary |= self._globals_varied

    def refuse(self, why: str) -> None:
        """Never again: its activations are kept."""
        self.is_accepted = False
        if self.why_refused is None:
            self.why_refused = why
            self._on_refused(self.name, why)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Region | None:
        """A region for the call that starts now, or None where its activations are to stay."""
        if self.why_refused is not None:
            return None
        modules = list(self._root.modules())
        has_stale_casts = self._has_stale_casts(modules)
        self.why_not_now = self._why_not_now(modules)
        if self.why_not_now is None and has_stale_casts:
            self.why_not_now = "weights changed within autocast's context"
        if self.why_not_now is not None:
            return None
        tensors: list[torch.Tensor] = []
        try:
            taken = _taken_apart((args, kwargs), tensors)
        except TypeError as error:
            self.why_not_now = str(error)
            return None
        if self._is_handed_out(modules):
            self.why_not_now = "user code holds tensors over its weights"
            return None
        if any(t.is_inference() or _storage(t) in self._space.by_storage or _storage(t) == 0 for t in tensors):
            self.why_not_now = "an input is a parameter, or not an ordinary tensor"
            return None
        if modules != self._known:
            self._known = modules
            self.outside = _outside_names(modules)
            self.is_accepted = False  # other modules than those that were watched
        self._look_around(modules)
        return Region(self, taken, tensors, modules)

    @staticmethod
    def _is_handed_out(modules: list[nn.Module]) -> bool:
        """What is written through such a tensor shows nowhere."""
        parts = {slot.part: None for slot in _slots_in(modules)}
        return any(part.is_resident and part.is_handed_out and part.num_aliases() > 0 for part in parts)

    def _look_around(self, modules: list[nn.Module]) -> None:
        """Watch this call where its surroundings are others. Globals that vary and stay until backward may vary."""
        surroundings = (
            _flags(), [id(t) for m in modules for table in (m._parameters, m._buffers) for t in table.values()]
        )  # fmt: skip
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self.is_accepted = False
        if not self._globals_may_vary:
            seen: set[int] = set()
            found = [_token(read(), _DEPTH, seen) for read in self.outside]
            if found != self._globals:
                self._globals_varied = self._globals is not None
                self._globals = found
                self.is_accepted = False
        if self.unchecked:
            self.is_accepted = False

    def _has_stale_casts(self, modules: list[nn.Module]) -> bool:
        """Whether weights changed since autocast may have cached their casts: forward uses those, a second run not."""
        if not torch.is_autocast_enabled(self._space.device.type) or not torch.is_autocast_cache_enabled():
            return False
        if any(slot.unit.has_old_casts for slot in _slots_in(modules)):
            return True
        versions = [(id(p), _version(p)) for m in modules for p in m._parameters.values() if p is not None]
        context, then = self._cast_versions
        if context != self._space.num_autocasts:
            self._cast_versions = (self._space.num_autocasts, versions)
            return False
        return bool(versions != then)

    def _why_not_now(self, modules: list[nn.Module]) -> str | None:
        if not torch.is_grad_enabled() or not self._root.training:
            return "evaluation"
        if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return "saved-tensor hooks are forbidden"
        if torch._C._current_graph_task_id() != -1:
            return "it runs inside backward"
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return "a dispatch mode is active"
        modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
        if not all(isinstance(mode, DeviceContext) for mode in modes):
            return "a torch function mode is active"
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        owner = getattr(top[0], "__self__", None) if top is not None else None
        if top is not None and not (isinstance(owner, SavedHooks) and owner.is_outermost_of(self._space)):
            return "a checkpoint or other saved-tensor hooks are around it"
        if any(getattr(torch_module, f"_global{table}") for table in _HOOK_TABLES):
            return "global module hooks are set"
        for module in modules:
            if isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
                return "a part of it is compiled"
            if type(module).__name__ == "OptimizedModule":
                return "a part of it is compiled"
            if getattr(module, "gradient_checkpointing", False) is True:
                return "it checkpoints itself"
            if isinstance(module, nn.MultiheadAttention) and not any(p.requires_grad for p in module.parameters()):
                return "attention in it is frozen"  # and may ask for function modes to choose how it computes
            for table in _HOOK_TABLES:
                if not all(self.is_own_hook(hook) for hook in getattr(module, table).values()):
                    return "it has hooks of others"
        return None
