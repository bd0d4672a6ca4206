"""Floor 9. The user's optimizer object: same object, same groups, another class; and the updates it orders.

Owns the class put on an adopted optimizer, its ``state`` mapping, and ``Updates``: what ``step()`` does. The arithmetic
is torch's own class on host tensors of the parameters' true shapes, or a one-pass kernel of ``kernels/``.

[Note: who runs an update] A class of torch whose update of one parameter depends on that parameter alone runs unit by
unit on the update lane, in the order of next use; ``step()`` returns once all are ordered. Any other class runs as one
instance over all parameters in the training thread: its numbers may depend on the whole (LBFGS, a global trust ratio).
Both run a *clone*: the user's class and attributes, over the host tensors. ``__init__`` is not called again. A class
that reaches its parameters past its groups too (it holds the model, or another optimizer: see ``reach.py``), or whose
gradients carry a graph, steps as it is, on the managed parameters, which are paged in as they are touched.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import functools
import inspect
import itertools
import threading
import time
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_tieroffload.concepts import Ticket
from lightning_tieroffload.engine.device_space import DeviceSpace, outside_transforms
from lightning_tieroffload.engine.device_updates import DeviceSource, DeviceUpdates, is_state_held, own_state
from lightning_tieroffload.engine.gradients import Gradients, fits_host
from lightning_tieroffload.engine.params import ParamSlot, managed_slot, raw_grad
from lightning_tieroffload.engine.reach import REMAPPED_DEPTH, inner_optimizers, reaches_past_its_groups
from lightning_tieroffload.engine.streamed_updates import StreamedSource, StreamedTicket, StreamedUpdates
from lightning_tieroffload.engine.unit_state import Factor, GradPlace, UnitState, flat_numpy, flat_view, number_format
from lightning_tieroffload.engine.wire import Wire, wire_dtype
from lightning_tieroffload.errors import TierOffloadError, UnsupportedError
from lightning_tieroffload.kernels.adam import MOMENTS_LATER, MOMENTS_ONLY
from lightning_tieroffload.kernels.split import merge_f32, split_f32
from lightning_tieroffload.sizes import round_up
from lightning_tieroffload.trace import NamedSlices

__all__ = [
    "TierOptimizer",
    "TierState",
    "Updates",
    "adopt",
    "host_param",
    "is_adopted",
    "num_moments",
    "refuse_several_spaces",
    "release",
    "state_nbytes",
    "user_class",
    "write_back_host_param",
]

# Classes of torch whose update of one parameter reads nothing but that parameter, its gradient and its state.
_PER_PARAMETER = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD", "SparseAdam",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip

_ADAFACTOR = getattr(torch.optim, "Adafactor", None)

_HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip
_NUM_TIMED_STEPS = 512
_MOST_BY_OTHERS = 32  # steps of another optimizer for one of the first's: a critic's, say
# State entries that torch's classes make in the default dtype.
_SCALARS = ("step", "eta", "mu", "mu_product")
_SLOT = "_tieroffload_slot"
_NOT_MIRRORED = frozenset((*_HOOKS, "param_groups", "state", "step", "_opt_called"))


def _raw(optimizer: Any) -> Any:
    """The user's own object, where one of a trainer's wrapper classes calls our methods with itself."""
    if "_tieroffload_user_class" in type(optimizer).__dict__:
        return optimizer  # ours, whatever the user's class calls its attributes
    return getattr(optimizer, "_optimizer", optimizer)


def _updates_of(optimizer: Optimizer) -> Updates | None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            slot = managed_slot(p)
            if slot is not None:
                return slot.owner.updates  # type: ignore[attr-defined,no-any-return]
    return None


def refuse_several_spaces(optimizer: Optimizer) -> None:
    """UnsupportedError for an optimizer over parameters of engines with different settings: one step is one space's."""
    owners: dict[Any, ParamSlot] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            slot = managed_slot(p)
            if slot is not None:
                owners.setdefault(slot.owner.updates, slot)  # type: ignore[attr-defined]
    if len(owners) > 1:
        names = ", ".join(slot.name for slot in owners.values())
        raise UnsupportedError(
            f"{type(optimizer).__name__} has parameters of {len(owners)} engines with different settings (for example "
            f"{names}). Offload the models with the same settings (they then share one budget), offload one module "
            "that holds them all, or use one optimizer for each."
        )


def host_param(slot: ParamSlot) -> nn.Parameter:
    """The parameter that an optimizer clone sees: a leaf over the home tensor, with the true shape and strides.

    Over a split master it is a fresh fp32 tensor, to be written back with ``write_back_host_param``.
    """
    if slot.split is None and slot.host_param is not None:
        return slot.host_param
    with torch._C._InferenceMode(False):
        may_have_grad = slot.dtype.is_floating_point or slot.dtype.is_complex
        host = nn.Parameter(slot.unit.read_home(slot), requires_grad=may_have_grad)
    slot.host_param = host if slot.split is None else None
    return host


def write_back_host_param(slot: ParamSlot, host: nn.Parameter) -> None:
    if slot.split is not None:
        slot.unit.write_home(slot, host.detach())


class TierState(defaultdict):  # type: ignore[type-arg]
    """``optimizer.state``: reading it waits for the updates that write what is read. Tensors are the live ones."""

    def _wait(self, key: Any) -> None:
        """Wait for the update that writes the entry, and have its tensors in DRAM for as long as they are held."""
        slot = managed_slot(key)
        if slot is not None:
            slot.owner.show_state(slot)  # type: ignore[attr-defined]

    def __init__(self, optimizer: Optimizer, entries: Any) -> None:
        super().__init__(dict)
        self._optimizer = weakref.ref(optimizer)
        self._plain: Any = None
        self._copying_thread: int | None = None  # whose reads of all entries see copies
        for key, value in entries:
            dict.__setitem__(self, key, value)

    def plain(self) -> Any:
        """An ordinary mapping with the same entries; the same one each time, for optimizers that share their state."""
        if self._plain is None:
            self._plain = defaultdict(dict, dict(self.items()))
        return self._plain

    def wait(self) -> None:
        """Wait for every update in flight."""
        self._wait_all()

    def _wait_all(self) -> None:
        # By the optimizer's parameters, not by the keys: an update in flight may be the one that makes the entry.
        optimizer = self._optimizer()
        for group in optimizer.param_groups if optimizer is not None else ():
            for p in group["params"]:
                slot = managed_slot(p)
                if slot is not None:
                    slot.owner.wait_update(slot)  # type: ignore[attr-defined]

    def _shown(self) -> dict[Any, Any]:
        """Every entry, in DRAM. Each is referred to before the next comes in: that keeps it there."""
        self._wait_all()
        shown = {}
        for key in list(dict.keys(self)):
            shown[key] = dict.__getitem__(self, key)
            self._wait(key)
        return shown

    def snapshots(self) -> dict[Any, Any]:
        """Copies of every entry. No more than one unit's state has to be in DRAM for it."""
        self._wait_all()
        return {key: self._snapshot_of(key) for key in list(dict.keys(self))}

    def _snapshot_of(self, key: Any) -> Any:
        slot, entry = managed_slot(key), dict.__getitem__(self, key)
        if slot is None:
            return _snapshot(entry)
        return slot.owner.with_state(slot, lambda: _snapshot(entry))  # type: ignore[attr-defined]

    def __getitem__(self, key: Any) -> Any:
        self._wait(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._wait(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._wait(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._wait(key)
        return super().setdefault(key, default)

    def __contains__(self, key: Any) -> bool:
        self._wait(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._wait_all()
        return super().__iter__()

    def __len__(self) -> int:
        self._wait_all()
        return super().__len__()

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """Meanwhile this thread's ``items()`` and ``values()`` are copies, made unit by unit."""
        before, self._copying_thread = self._copying_thread, threading.get_ident()
        try:
            yield
        finally:
            self._copying_thread = before

    def _all(self) -> dict[Any, Any]:
        return self.snapshots() if self._copying_thread == threading.get_ident() else self._shown()

    def items(self) -> Any:
        return self._all().items()

    def values(self) -> Any:
        return self._all().values()

    def keys(self) -> Any:
        self._wait_all()
        return super().keys()

    def clear(self) -> None:
        self._wait_all()
        super().clear()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wait(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._wait(key)
        super().__delitem__(key)

    def popitem(self) -> Any:
        self._wait_all()
        return super().popitem()

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._wait_all()
        super().update(*args, **kwargs)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # as typeshed's own: dict's overloads of | and |= differ
        self._wait_all()
        return super().__ior__(other)

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))


class _CloneState(defaultdict):  # type: ignore[type-arg]
    """A clone's ``state``: its own parameters as keys, the very per-parameter dicts of the user's optimizer as values.

    Args:
        real: the user's optimizer's state.
        params: what the clone updates: host parameters, and parameters that no engine manages.
        original_of: host parameter to the managed one.
    """

    def __init__(self, real: dict[Any, Any], params: Iterable[Any], original_of: dict[Any, Any]) -> None:
        super().__init__(dict)
        self._real = real
        self._original_of = original_of
        for p in params:
            entry = dict.get(real, original_of.get(p, p))
            if entry is not None:
                dict.__setitem__(self, p, entry)

    def __missing__(self, key: Any) -> Any:
        entry: dict[Any, Any] = {}
        self[key] = entry
        return entry

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        dict.__setitem__(self._real, self._original_of.get(key, key), value)


class TierOptimizer:
    """Mixed in front of the user's class by ``adopt``.

    Lightning and Fabric build wrapper classes on top of an optimizer's class and call its methods with the wrapper as
    ``self``, so nothing but ``param_groups`` is read from ``self`` itself.
    """

    _step_supports_amp_scaling = False  # a fused Adam would unscale inside its own kernel, past our gradients
    _tieroffload_user_class: type

    @property
    def state(self) -> Any:
        holder = self if "state" in self.__dict__ else _raw(self)  # a trainer's wrapper has none of its own
        return holder.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        if _raw(self) is self and not isinstance(value, TierState):  # set on a wrapper it stays there, as in torch
            before = self.__dict__.get("state")
            if isinstance(before, TierState):
                before.wait()  # an update in flight belongs to the state that it began with
            value = TierState(self, value.items())  # type: ignore[arg-type]
        self.__dict__["state"] = value

    def step(self, *args: Any, **kwargs: Any) -> Any:
        raw: Any = _raw(self)
        raw._opt_called = True  # what torch's LRScheduler wrapper would have set
        updates = _updates_of(raw)
        user_cls: type[Optimizer] = raw._tieroffload_user_class
        if updates is None:
            return user_cls.step(raw, *args, **kwargs)
        args = (raw, *args)  # as torch's own wrapper of step shows them to hooks
        for hook in [*_global_optimizer_pre_hooks.values(), *_hooks_of(raw, "_optimizer_step_pre_hooks")]:
            changed = hook(raw, args, kwargs)
            if changed is not None:
                if not (isinstance(changed, tuple) and len(changed) == 2):
                    raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), not {changed}.")
                args, kwargs = changed
        result = updates.step(raw, user_cls, args[1:], kwargs)
        for hook in [*_hooks_of(raw, "_optimizer_step_post_hooks"), *_global_optimizer_post_hooks.values()]:
            hook(raw, args, kwargs)
        return result

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers then neither wrap again nor warn
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        raw: Any = _raw(self)  # the class's own method, if it has one; torch's knows managed parameters (torch_patches)
        return raw._tieroffload_user_class.zero_grad(raw, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        raw: Any = _raw(self)
        if _updates_of(raw) is None:
            return raw._tieroffload_user_class.state_dict(raw)  # type: ignore[no-any-return]
        # A snapshot with storages of its own: training goes on while an asynchronous save is still writing.
        with raw.state.copying():
            result = raw._tieroffload_user_class.state_dict(raw)
        own = {id(tensor) for _, entry in dict.items(raw.state) for tensor in _tensors_in(entry)}
        return {**result, "state": _snapshot(result["state"], only=own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raw: Any = _raw(self)
        updates = _updates_of(raw)
        user_cls: type[Optimizer] = raw._tieroffload_user_class
        if updates is None or reaches_past_its_groups(raw, user_cls):
            raw.state.wait()
            user_cls.load_state_dict(raw, state_dict)
            raw.state = raw.__dict__["state"]  # torch's __setstate__ goes past the property
            return
        updates.load_state_dict(raw, user_cls, state_dict)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raw: Any = _raw(self)
        state = dict(raw.__getstate__())
        state["state"] = defaultdict(dict, raw.state.snapshots())
        # Not copyreg.__newobj__: pickle insists that its class is the very one that the object wears.
        return copyreg._reconstructor, (raw._tieroffload_user_class, object, None), state  # type: ignore[attr-defined]


def _hooks_of(raw: Optimizer, name: str) -> Any:
    return raw.__dict__.get(name, {}).values()  # a wrapper may never have called Optimizer.__init__


def _snapshot(value: Any, only: set[int] | None = None) -> Any:
    """A copy of every tensor inside, or of those whose ``id`` is in ``only``."""
    if isinstance(value, torch.Tensor):
        is_meant = only is None or id(value) in only
        return value.detach().clone() if is_meant and type(value) is torch.Tensor else value
    if isinstance(value, dict):
        return {key: _snapshot(item, only) for key, item in value.items()}
    if isinstance(value, list):
        return [_snapshot(item, only) for item in value]
    return value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from _tensors_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _tensors_in(item)


def _with_signature_of(theirs: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Our method, that shows the arguments which the user's class takes: trainers ask before they pass one."""
    ours = getattr(TierOptimizer, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    method.__dict__.update(ours.__dict__)
    method.__name__, method.__qualname__, method.__doc__ = name, theirs.__qualname__, theirs.__doc__
    method.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
    return method


_adopted_classes: dict[type, type] = {}


def adopt(optimizer: Optimizer) -> Optimizer:
    """Put the managed class on ``optimizer`` and return the same object. The engine is found from its parameters.

    Works before or after the model is attached; a parameter that no engine manages is updated as torch would.
    """
    if isinstance(optimizer, TierOptimizer):
        return optimizer
    sharing = [inner for inner in inner_optimizers(optimizer) if inner.state is optimizer.state]
    for inner in inner_optimizers(optimizer):
        adopt(inner)
    cls = type(optimizer)
    new = _adopted_classes.get(cls)
    if new is None:
        members: dict[str, Any] = {name: _with_signature_of(getattr(cls, name), name) for name in ("step", "zero_grad")}
        members |= {"__module__": cls.__module__, "_tieroffload_user_class": cls}
        new = type(cls.__name__, (TierOptimizer, cls), members)
        _adopted_classes[cls] = new
    optimizer.__dict__.pop("step", None)  # an LR scheduler made earlier left a wrapper of the old class's step here
    optimizer.__dict__.pop("_step_supports_amp_scaling", None)
    # One state for two optimizers stays one. The class comes last: with it the optimizer counts as adopted.
    state = sharing[0].state if sharing else optimizer.__dict__["state"]
    if not isinstance(state, TierState):
        state = TierState(optimizer, state.items())
    optimizer.__dict__["state"] = state
    optimizer.__class__ = new
    return optimizer


def release(optimizer: Optimizer) -> None:
    """Give the optimizer its own class back. Its state keeps the current values."""
    if isinstance(optimizer, TierOptimizer):
        state: Any = optimizer.state  # type: ignore[attr-defined]
        if isinstance(state, TierState):
            optimizer.__dict__["state"] = state.plain()
        optimizer.__class__ = optimizer._tieroffload_user_class


def is_adopted(optimizer: Any) -> bool:
    return isinstance(optimizer, TierOptimizer)


def user_class(optimizer: Any) -> type:
    """The class that the user wrote, for an adopted optimizer or any other."""
    return getattr(optimizer, "_tieroffload_user_class", type(optimizer))


def _inner_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The class's step without torch's profiling and hook wrapper: hooks run once per real step, not once per clone."""
    step: Callable[..., Any] = cls.step
    inner: Callable[..., Any] = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return inner


def _remapped(value: Any, mapping: dict[Any, Any], depth: int = REMAPPED_DEPTH) -> Any:
    """``value`` with every parameter in ``mapping`` replaced, through lists, tuples and dicts.

    What holds none of them is returned itself: somebody else may hold it too, and look at what a step writes there.
    """
    if isinstance(value, torch.Tensor):
        return mapping.get(value, value)
    if depth and (isinstance(value, list) or type(value) is tuple):
        items = [_remapped(item, mapping, depth - 1) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else tuple(items) if type(value) is tuple else items
    if depth and type(value) in (dict, OrderedDict):
        pairs = [(_remapped(k, mapping, 0), _remapped(v, mapping, depth - 1)) for k, v in value.items()]
        is_same = all(k is key and v is item for (k, v), (key, item) in zip(pairs, value.items(), strict=True))
        return value if is_same else type(value)(pairs)
    return value


def _clone(raw: Optimizer, cls: type[Optimizer], groups: list[dict[str, Any]], hosts: dict[Any, Any]) -> Any:
    """An instance of the user's class over host parameters. ``hosts``: original parameter to the one the clone sees."""
    clone = cls.__new__(cls)
    attributes = {k: v for k, v in raw.__dict__.items() if k not in _NOT_MIRRORED}
    clone.__dict__.update(_remapped(attributes, hosts) if hosts else attributes)
    for name in _HOOKS:
        if name in raw.__dict__:
            clone.__dict__[name] = OrderedDict()
    clone.param_groups = groups
    params = [p for group in groups for p in group["params"]]
    clone.state = _CloneState(raw.state, params, {host: original for original, host in hosts.items()})
    return clone


def _frozen_group(group: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Hyper-parameters as they are now (a scheduler changes them right after step), usable on host tensors."""
    frozen = {}
    for key, value in group.items():
        if key != "params":
            frozen[key] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
    if device.type != "cpu" and frozen.get("capturable"):
        frozen["capturable"] = False  # asserts on host tensors; it changes where scalars live, not what is computed
    return frozen


def _copy_marks(source: nn.Parameter, target: nn.Parameter) -> None:
    """What a class reads and sets on parameters beside values: attributes (``p.grad_sample``), ``requires_grad``."""
    marks = {key: value for key, value in source.__dict__.items() if key != _SLOT}
    for key in target.__dict__.keys() - marks.keys() - {_SLOT}:
        del target.__dict__[key]
    target.__dict__.update(marks)
    if target.requires_grad != source.requires_grad:
        target.requires_grad_(source.requires_grad)


class _WholeClone:
    """A clone that steps over every host parameter at once, and what it shares with the user's optimizer.

    All that the class may have in public is the user's while its code runs, and the clone's while the step does:
    ``take`` brings the clone up to date, ``give`` the user's optimizer. Training thread only.

    Args:
        raw: the user's optimizer.
        cls: its class.
        hosts: managed parameter to host parameter.
        device: where compute is; hyper-parameters that lie there are copied for the step.
    """

    def __init__(self, raw: Any, cls: type[Optimizer], hosts: dict[Any, Any], device: torch.device) -> None:
        self._raw, self._hosts, self._device = raw, hosts, device
        self._back = {host: original for original, host in hosts.items()}
        self._given: list[dict[str, Any]] = []  # what each group of the clone began with
        groups = [{"params": [hosts.get(p, p) for p in group["params"]]} for group in raw.param_groups]
        self.clone = _clone(raw, cls, groups, hosts)
        self.clone.state.clear()  # entries come in the order that the user's optimizer has them in
        self._attributes = {k: v for k, v in raw.__dict__.items() if k not in _NOT_MIRRORED}
        self._take_groups()
        self._take_state()

    def take(self) -> None:
        """The user's code has run meanwhile."""
        attributes = {k: v for k, v in self._raw.__dict__.items() if k not in _NOT_MIRRORED}
        for key, value in attributes.items():
            if key not in self._attributes or self._attributes[key] is not value:
                self.clone.__dict__[key] = _remapped(value, self._hosts)
        self._take_groups()
        self._take_state()

    def give(self, kept: Callable[[Any], Any] = lambda value: value) -> None:
        """What the step has done so far. ``kept``: what becomes of a tensor that stays beyond the step."""
        raw, clone, back = self._raw, self.clone, self._back
        entries = {}
        for key, entry in list(clone.state.items()):
            clone.state[key] = entries[back.get(key, key)] = kept(entry)
        before = self._state_keys()
        if len(before) != len(entries) or any(a is not b for a, b in zip(before, entries, strict=True)):
            for key in before:
                dict.pop(raw.state, key)
        for key, entry in entries.items():
            dict.__setitem__(raw.state, key, entry)
        mirrored = {key: value for key, value in clone.__dict__.items() if key not in _NOT_MIRRORED}
        for key in self._attributes.keys() - mirrored.keys():
            raw.__dict__.pop(key, None)
        for key, value in mirrored.items():
            raw.__dict__[key] = _remapped(kept(value), back)
        self._attributes = {key: raw.__dict__[key] for key in mirrored}
        for group, used, given in zip(raw.param_groups, clone.param_groups, self._given, strict=True):
            for key in given.keys() - used.keys():
                del group[key]
            for key, value in used.items():
                if key == "params":
                    continue
                if key not in given or value is not given[key]:
                    group[key] = given[key] = value
                elif isinstance(value, torch.Tensor) and value is not group[key]:
                    group[key].detach().copy_(value)  # the class may have changed our copy of it in place

    def _take_groups(self) -> None:
        self._given.clear()
        for group, used in zip(self._raw.param_groups, self.clone.param_groups, strict=True):
            given = {key: value for key, value in group.items() if key != "params"}
            for key, value in given.items():
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    given[key] = value.detach().to("cpu")
            if self._device.type != "cpu" and given.get("capturable"):
                given["capturable"] = False  # as in _frozen_group; what the class does not change is not given back
            params = used["params"]
            used.clear()
            used.update(params=params, **given)
            self._given.append(given)

    def _take_state(self) -> None:
        state = self.clone.state
        shown = {self._hosts.get(key, key): dict.__getitem__(self._raw.state, key) for key in self._state_keys()}
        for key in [key for key in state if key not in shown]:
            del state[key]
        for key, entry in shown.items():
            if dict.get(state, key) is not entry:
                dict.__setitem__(state, key, entry)

    def _state_keys(self) -> list[Any]:
        """Its own parameters' and all that belong to no parameter of an engine (``state["sums"]``)."""
        return [key for key in dict.keys(self._raw.state) if key in self._hosts or managed_slot(key) is None]


def _closure_in(closure: Callable[[], Any] | None = None) -> Callable[[], Any] | None:
    """The only argument that torch's classes take; another one is a TypeError, as there."""
    return closure


class Updates:
    """What ``step()`` orders, for one device space.

    Args:
        submit: puts work on the update lane, ``submit(work, label=, priority=, after=, announce=) -> Ticket``.
        submit_streamed: the same, without ``after``, for the lane of streamed updates.
        kernel: ``"torch"``, ``"numba"`` or ``"auto"`` (numba with an accelerator, torch without one: then the
            numbers are those of the plain run).
        find_kernel: ``(class, group, dtype) -> kernel or None``, see ``kernels.registry``.
        plan_homes: called after each step's updates are ordered: may give units other choices from now on.
    """

    def __init__(
        self,
        space: DeviceSpace,
        gradients: Gradients,
        wire: Wire,
        *,
        submit: Callable[..., Ticket],
        submit_later: Callable[..., Ticket],
        submit_streamed: Callable[..., Ticket],
        kernel: str,
        find_kernel: Callable[[type, dict[str, Any], torch.dtype], Any] | None,
        make_pool: Callable[[], Any] | None,
        plan_homes: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan_homes = plan_homes
        self._space = space
        self._gradients = gradients
        self._wire = wire
        self._submit = submit
        self._submit_later = submit_later
        # Weights first, moments in a second pass under the coming backward: where a forward would wait for weights.
        self.defer_moments = space.device.type == "cuda"
        self.kernel = kernel if kernel != "auto" else ("torch" if space.device.type == "cpu" else "numba")
        self._find_kernel = find_kernel
        self._make_pool = make_pool
        self._pool: Any = None
        self._loose: weakref.WeakSet[Optimizer] = (
            weakref.WeakSet()
        )  # some of their state is not at home, being a user's
        self._compiled_for: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._on_device = DeviceUpdates(space, self._get_pool)
        self._streamed = StreamedUpdates(space, submit_streamed, self._get_pool)
        relieve = space.on_pressure  # of gradients
        space.on_pressure = lambda must: relieve(must) or (must and self._streamed.release())
        self.before_step: Callable[[Optimizer], None] | None = None
        self.num_steps = 0
        self._cpu_pass = _CpuPass(0)
        # Of the elements that are updated from DRAM, those that the link takes while the CPU takes the others; None
        # before both were seen side by side.
        self.streamed_share: float | None = None
        self.num_unit_updates = {"cpu": 0, "device": 0, "streamed": 0}
        self._step_at_s: collections.deque[float] = collections.deque(maxlen=_NUM_TIMED_STEPS + 1)
        self.on_step: Callable[[], None] | None = None  # called between two steps, with no lock held
        # Told of each update on the CPU when it has ended: step, elements, when it began to compute, which pass.
        self.on_updated: Callable[..., None] | None = None
        # Whose steps are counted, and how often each of the others has stepped since it did.
        self._counted: weakref.ref[Optimizer] | None = None
        self._num_by_others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._stepping: tuple[int, type, frozenset[ParamSlot]] | None = None  # whose step runs on host tensors now

    def step_times_s(self) -> list[float]:
        """Seconds from one step of the optimizer whose steps are counted to its next, of the last 512 steps."""
        return [b - a for a, b in itertools.pairwise(self._step_at_s)]

    def count_anew(self) -> None:
        """Steps are those of whatever optimizer steps next: another one has taken over parameters."""
        self._counted = None

    def _note_step(self, raw: Optimizer) -> None:
        """A step of training is one of the first optimizer's: several may step in each, some of them more than once.

        One that is gone, was released, or has not stepped while another did so many times has had its day.
        """
        counted = self._counted() if self._counted is not None else None
        if counted is not raw:
            num = self._num_by_others[raw] = self._num_by_others.get(raw, 0) + 1
            if counted is None or not is_adopted(counted) or num > _MOST_BY_OTHERS:
                self._counted = weakref.ref(raw)
                counted = raw
        if counted is raw:
            self._num_by_others.clear()
            self.num_steps += 1
            self._step_at_s.append(time.perf_counter())
            if self.on_step is not None:
                with outside_transforms():
                    self.on_step()

    # ------------------------------------------------------------------------------------------------------- step
    def step(self, raw: Optimizer, cls: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trace = self._space.trace
        start_s = time.perf_counter() if trace is not None else 0.0
        result = self._step(raw, cls, args, kwargs)
        if trace is not None:
            trace.add("host", f"{cls.__name__}.step()", start_s, time.perf_counter())
        self._note_step(raw)
        return result

    def _step(self, raw: Optimizer, cls: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_several_spaces(raw)
        if self.before_step is not None:
            self.before_step(raw)
        if not self.runs_per_unit(raw):
            self._wire.keep_casts()
            return self._step_whole(raw, cls, args, kwargs)
        closure = _closure_in(*args, **kwargs)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._compile_kernels(raw, cls)
        self._wire.keep_casts()
        with self._space.lock, torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            self._space.host.begin_step()
            self._note_rates()
            self._space.streams.let_go()  # else who has moved state would count as one who holds it
            self._order_updates(raw, cls)
            self._wire.consider()
            self._plan_homes()
        return loss

    def _note_rates(self) -> None:
        """How fast the last step's updates from DRAM went, on either side, from when the gradients were known."""
        streamed, cpu = self._streamed.rate(), self._cpu_pass.rate()
        self._streamed.begin_step()
        self._cpu_pass = _CpuPass(self.num_steps)
        if streamed is not None and cpu is not None:
            now = streamed / (streamed + cpu)
            before = self.streamed_share
            self.streamed_share = now if before is None else (before + now) / 2

    def _compile_kernels(self, raw: Optimizer, cls: type[Optimizer]) -> None:
        """Before its first step: an update's waiters have a time limit, and a loaded machine takes half a minute."""
        if raw in self._compiled_for:
            return
        for group in raw.param_groups:
            for dtype in {p.dtype for p in group["params"]}:
                kernel = self._kernel_for(cls, group, dtype)
                if kernel is not None:
                    kernel.compile(_frozen_group(group, self._space.device))
        self._compiled_for.add(raw)

    def runs_per_unit(self, raw: Optimizer) -> bool:
        """Whether the optimizer's updates run unit by unit. See [Note: who runs an update]."""
        cls = user_class(raw)
        return cls in _PER_PARAMETER or self._has_kernels(raw, cls)

    def _has_kernels(self, raw: Optimizer, cls: type) -> bool:
        return self.kernel == "numba" and all(
            self._kernel_for(cls, group, p.dtype) is not None for group in raw.param_groups for p in group["params"]
        )

    def _kernel_for(self, cls: type, group: dict[str, Any], dtype: torch.dtype) -> Any:
        if self.kernel != "numba" or self._find_kernel is None:
            return None
        return self._find_kernel(cls, group, dtype)

    def _order_updates(self, raw: Optimizer, cls: type[Optimizer]) -> None:
        device = self._space.device
        groups = [_frozen_group(group, device) for group in raw.param_groups]
        if cls is _ADAFACTOR:
            groups = [
                self._with_eps(group, raw_group) for group, raw_group in zip(groups, raw.param_groups, strict=True)
            ]
        by_unit: dict[UnitState, list[tuple[ParamSlot, int]]] = {}
        rest: list[dict[str, Any]] = []
        for index, group in enumerate(raw.param_groups):
            unmanaged = []
            for p in group["params"]:
                slot = managed_slot(p)
                if slot is None:
                    unmanaged.append(p)
                elif self._gradients.has_grad(slot):
                    by_unit.setdefault(slot.unit, []).append((slot, index))
                    if not dict.__contains__(raw.state, p):
                        dict.__setitem__(raw.state, p, {})  # entries come in the plain run's order, not the updates'
            eps = {"eps": groups[index]["eps"]} if cls is _ADAFACTOR else {}
            rest.append({**{k: v for k, v in group.items() if k != "params"}, **eps, "params": unmanaged})
        if any(group["params"] for group in rest):
            _inner_step(cls)(_clone(raw, cls, rest, {}))
        with outside_transforms():
            self._order_unit_updates(raw, cls, by_unit, groups)

    def _with_eps(self, group: dict[str, Any], raw_group: dict[str, Any]) -> dict[str, Any]:
        """Adafactor's first ``eps`` where none is given: of the dtype that torch comes to first, for all of a group."""
        first, second = group["eps"]
        if first is not None:
            return group
        dtypes = [p.dtype for p in raw_group["params"] if self._has_grad(p)]
        if len(set(dtypes)) < 2:
            return group
        dtype = dtypes[0]
        if group["foreach"]:
            empty: Any = [torch.empty(0, dtype=each, device="cpu") for each in dtypes]
            dtype = next(iter(Optimizer._group_tensors_by_device_and_dtype([empty])))[1] or dtype
        return {**group, "eps": (torch.finfo(dtype).eps, second)}

    def _has_grad(self, p: torch.Tensor) -> bool:
        slot = managed_slot(p)
        return p.grad is not None if slot is None else self._gradients.has_grad(slot)

    def _order_unit_updates(
        self,
        raw: Optimizer,
        cls: type[Optimizer],
        by_unit: dict[UnitState, list[tuple[ParamSlot, int]]],
        groups: list[dict[str, Any]],
    ) -> None:
        # What the CPU does begins first: it takes longest, and enqueuing on the device takes this thread's time.
        on_device: list[tuple[UnitState, list[DeviceSource], int]] = []
        streamed: list[tuple[UnitState, list[Any], int]] = []
        for priority, unit in enumerate(self._by_next_use(by_unit)):
            self._space.keep_old(unit, [slot for slot, _ in by_unit[unit]])
            kernels = [self._kernel_for(cls, groups[index], slot.dtype) for slot, index in by_unit[unit]]
            sources = self._device_sources(raw, unit, by_unit[unit], groups, kernels)
            if sources:
                on_device.append((unit, sources, priority))
            elif self._may_stream(raw, unit, [slot for slot, _ in by_unit[unit]], kernels):
                streamed.append((unit, kernels, priority))
            else:
                self._order_cpu_update(raw, cls, unit, by_unit[unit], groups, priority)
        while on_device:
            unit, sources, priority = on_device.pop(0)
            if not self._on_device.order(unit, sources):
                del sources  # they refer to entries as a user might
                self._order_cpu_update(raw, cls, unit, by_unit[unit], groups, priority)
                continue
            self.num_unit_updates["device"] += 1
            for source in sources:
                if not source.entry:
                    dict.pop(raw.state, source.slot.param)  # the class keeps nothing for this parameter
        if not any(self._streamed.is_chosen(unit) for unit in self._space.units):
            self._streamed.release()
        for unit, kernels, priority in streamed:
            if self._streamed.reserve():
                self._order_streamed_update(raw, unit, by_unit[unit], groups, kernels, priority)
            else:
                self._order_cpu_update(raw, cls, unit, by_unit[unit], groups, priority)

    def _may_stream(self, raw: Optimizer, unit: UnitState, slots: list[ParamSlot], kernels: list[Any]) -> bool:
        """Whether the plan streams the unit's update, and all that it needs is in DRAM or on its way there."""
        if not self._streamed.can_update(unit, kernels):
            return False
        self._space.wait_update(unit)  # it may be making state
        has_all = all(self._has_all_in_dram(raw, slot, kernel) for slot, kernel in zip(slots, kernels, strict=True))
        return has_all and not is_state_held(unit, slots, raw.state)

    def _has_all_in_dram(self, raw: Optimizer, slot: ParamSlot, kernel: Any) -> bool:
        """Whether a parameter's gradient is out of autograd's field, and its state there, as a kernel takes it.

        What is not there yet is made by the CPU. Refers to state while it runs, as a user might.
        """
        entry = dict.get(raw.state, slot.param)
        if not self._gradients.is_down(slot) or not isinstance(entry, dict):
            return False
        if kernel.uses_step and not isinstance(entry.get("step"), torch.Tensor):
            return False
        return all(_is_kernels(entry.get(kind), slot) for kind in kernel.state_names)

    def _order_streamed_update(
        self,
        raw: Optimizer,
        unit: UnitState,
        items: list[tuple[ParamSlot, int]],
        groups: list[dict[str, Any]],
        kernels: list[Any],
        priority: int,
    ) -> None:
        """See [Note: streamed updates]."""
        sources: list[StreamedSource] = []
        in_dram = sorted(zip(items, kernels, strict=True), key=lambda each: each[0][0].index)  # as they lie there
        for (slot, index), kernel in in_dram:
            entry, group = dict.__getitem__(raw.state, slot.param), groups[index]
            for kind in kernel.state_names:
                own_state(self._space, unit, slot, kind, entry).pin_home()
            ready, grad, factors = self._gradients.update_source(slot)
            sources.append(StreamedSource(slot, group, kernel, entry, grad, ready, factors))
        _, copies = self._space.order_update(unit, [slot for slot, _ in items])

        def announce(ticket: StreamedTicket) -> None:
            self._space.update_ordered(unit, ticket)

        self._streamed.order(unit, sources, copies, priority, announce)
        for source in sources:
            if source.kernel.uses_step:
                source.entry["step"] += 1
        self.num_unit_updates["streamed"] += 1
        self._space.refresh(unit)

    def _order_cpu_update(
        self,
        raw: Optimizer,
        cls: type[Optimizer],
        unit: UnitState,
        items: list[tuple[ParamSlot, int]],
        groups: list[dict[str, Any]],
        priority: int,
    ) -> None:
        self.num_unit_updates["cpu"] += 1
        if isinstance(unit.update, _TwoPasses):
            self._space.wait_update(unit)  # its second pass waits for the lane that this update would wait in
        is_held = is_state_held(unit, [slot for slot, _ in items], raw.state)
        # Gradients that a user holds are copied down for the update alone.
        with self._space.host.staying(unit.grad_block):
            self._order_update(raw, cls, unit, items, groups, priority)
        if is_held:
            self._space.wait_update(unit)  # who holds a tensor reads it without asking. See [Note: looked-at state]

    def _device_sources(
        self,
        raw: Optimizer,
        unit: UnitState,
        items: list[tuple[ParamSlot, int]],
        groups: list[dict[str, Any]],
        kernels: list[Any],
    ) -> list[DeviceSource]:
        """What an update of the unit on the device starts from; nothing where the CPU does it."""
        if not self._on_device.can_update(unit, kernels):
            return []
        sources: list[DeviceSource] = []
        for (slot, index), kernel in zip(items, kernels, strict=True):
            kept = self._gradients.kept_source(slot)
            if kept is None:
                return []
            sources.append(DeviceSource(slot, groups[index], kernel, dict.__getitem__(raw.state, slot.param), *kept))
        return sources

    def _get_pool(self) -> Any:
        if self._pool is None and self._make_pool:
            self._pool = self._make_pool()
        return self._pool

    def _named_pool(self, name: str) -> Any:
        """The pool, for work that the timeline shows under ``name``."""
        return self._pool if self._space.trace is None else NamedSlices(self._pool, self._space.trace, name)

    def _by_next_use(self, units: Iterable[UnitState]) -> list[UnitState]:
        distances = self._space.next_uses()
        return sorted(units, key=lambda unit: (distances.get(unit.index, 1 << 30), unit.index))

    def _order_update(
        self,
        raw: Optimizer,
        cls: type[Optimizer],
        unit: UnitState,
        items: list[tuple[ParamSlot, int]],
        groups: list[dict[str, Any]],
        priority: int,
    ) -> None:
        sources: list[_Source] = []
        for slot, index in items:
            kernel = self._kernel_for(cls, groups[index], slot.dtype)
            sources.append(_Source(self._gradients, slot, groups[index], kernel))
        # torch makes scalars (``step``) of the default dtype at step(); by the time the update runs the next forward
        # may have changed that, for the whole process (64-true does).
        scalar_dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        autocast_dtype = wire_dtype(self._space.device)
        # Happens-before: the home is readable behind its downloads, writable behind the uploads that read it.
        previous, copies = self._space.order_update(unit, [slot for slot, _ in items], priority)

        whole = _TwoPasses()
        num_step, numel = self.num_steps, sum(source.slot.numel for source in sources)
        trace = self._space.trace

        def work() -> None:
            began_s = time.perf_counter()
            for copy in copies:
                copy.wait()
            # Not under the inference mode of whoever waits for it: new state would be inference tensors for good.
            with torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                by_kernel: list[_Source] = []
                by_torch: list[_Source] = []
                for source in sources:
                    source.wait()
                    for factor in source.factors:
                        factor.value()  # made on the device when backward ends: what follows is the update's own time
                    is_kernels = source.kernel is not None and source.grad is not None
                    (by_kernel if is_kernels and source.has_kernels_state(raw) else by_torch).append(source)
                start_s = time.perf_counter()
                if trace is not None:
                    trace.add("update", f"waits for copies ({unit.name})", began_s, start_s)
                with _host_autocast(autocast_dtype):
                    if by_torch and unit.state_block.is_paged:
                        for source in by_torch:  # state that is being made takes memory beside the block: one at a time
                            self._run_torch(raw, cls, [source], scalar_dtype)
                            unit.hold_state(source.slot, dict.get(raw.state, source.slot.param))
                    elif by_torch:
                        self._run_torch(raw, cls, by_torch, scalar_dtype)
                if by_torch and trace is not None:
                    trace.add("kernels", f"{cls.__name__} ({unit.name})", start_s, time.perf_counter())
                # All of a unit's parameters at once: the pool's threads go from one to the next without a gap.
                among_numel = sum(source.slot.numel for source in by_kernel)
                running = [self._start_kernel(raw, source, among_numel, priority) for source in by_kernel]
                for future in running:
                    future.result()
                for source in by_kernel:
                    for tensor, dense in source.dense_states:
                        tensor.copy_(dense)
                    source.dense_states.clear()
                self._tell_updated(num_step, numel, start_s)
                for source in sources:
                    unit.hold_state(source.slot, dict.get(raw.state, source.slot.param))
            deferred = [source for source in by_kernel if source.moments_later is not None]
            if deferred:
                try:
                    whole.second = self._submit_later(
                        lambda: self._run_moments(deferred, num_step),
                        label=f"moments ({unit.name})",
                        # In the order of the next backward, whose gradients come to the blocks that this still reads.
                        priority=_MOMENTS_PRIORITY - priority,
                    )
                except BaseException:  # something else has failed: weights and moments stay those of one step
                    self._run_moments(deferred, num_step)
                    raise

        if any(source.kernel is not None for source in sources):
            self._get_pool()

        def announce(ticket: Ticket) -> None:
            # Before the work can run: what Ctrl-C cuts off here is known to whoever waits, or was never submitted.
            whole.first = ticket
            self._space.update_ordered(unit, ticket)
            if not unit.is_paged:
                unit.update = whole
            for source in sources:
                source.hand_over(ticket)

        self._submit(work, label=f"update ({unit.name})", priority=priority, after=previous, announce=announce)
        self._space.host.write_updated(unit)
        self._space.refresh(unit)

    def _run_torch(
        self, raw: Optimizer, cls: type[Optimizer], sources: list[_Source], scalar_dtype: torch.dtype
    ) -> None:
        for source in [source for source in sources if _may_slice(raw, cls, source)]:
            self._run_torch_sliced(raw, cls, source, scalar_dtype)
            sources.remove(source)
        if not sources:
            return
        fresh = [source for source in sources if not dict.get(raw.state, source.slot.param)]
        groups: list[dict[str, Any]] = []
        hosts: dict[Any, Any] = {}
        of_group: dict[int, list[Any]] = {}
        for source in sources:
            key = id(source.group)
            if key not in of_group:
                of_group[key] = []
                groups.append({**source.group, "params": of_group[key]})
            host = host_param(source.slot)
            host.grad = source.true_grad()
            of_group[key].append(host)
            hosts[source.slot.param] = host
        try:
            _inner_step(cls)(_clone(raw, cls, groups, hosts))
            for source in sources:
                write_back_host_param(source.slot, hosts[source.slot.param])
        finally:
            for p, host in hosts.items():
                host.grad = None
                if not dict.get(raw.state, p, True):
                    dict.pop(raw.state, p)  # the class keeps nothing for this parameter
        for source in fresh:
            _set_scalar_dtype(dict.get(raw.state, source.slot.param), source, scalar_dtype)

    @staticmethod
    def _run_torch_sliced(raw: Optimizer, cls: type, source: _Source, scalar_dtype: torch.dtype) -> None:
        """The class on one slice of a large parameter after the other, so that its temporaries are small.

        At the first step each slice makes its own state, which is put together here.
        """
        slot, numel = source.slot, source.slot.numel
        entry = dict.setdefault(raw.state, slot.param, {})
        is_fresh = not entry
        scalars: dict[str, Any] = {}
        for begin in range(0, numel, _SLICE_NUMEL):
            end = min(begin + _SLICE_NUMEL, numel)
            bits = slice(begin // 8, (end + 7) // 8)
            split = slot.split
            if split is None:
                values = flat_view(slot.home)[begin:end]
            else:
                values = torch.empty(end - begin, dtype=slot.dtype, device="cpu")
                merge_f32(split.hi_u16[begin:end], split.lo_u16[begin:end], split.ties_u8[bits], values.numpy())
            host = nn.Parameter(values)
            host.grad = source.true_grad_slice(begin, end)
            state = {
                key: value
                if not isinstance(value, torch.Tensor)
                else (flat_view(value)[begin:end] if value.numel() == numel else value.clone())
                for key, value in (entry.items() if not is_fresh else ())
            }
            clone = _clone(raw, cls, [{**source.group, "params": [host]}], {})
            clone.state = defaultdict(dict, {host: state})
            _inner_step(cls)(clone)
            for key, value in clone.state[host].items() if is_fresh else ():
                if isinstance(value, torch.Tensor) and value.numel() == end - begin:
                    if begin == 0:
                        entry[key] = _new_state_tensor(slot, key, value.dtype)
                    flat_view(entry[key])[begin:end] = value
                elif begin == 0:
                    entry[key] = value
            state = clone.state[host]
            if split is not None:
                split_f32(values.numpy(), split.hi_u16[begin:end], split.lo_u16[begin:end], split.ties_u8[bits])
            scalars = {
                key: value for key, value in state.items() if not isinstance(value, torch.Tensor) or value.numel() == 1
            }
        entry.update(scalars)
        if is_fresh:
            _set_scalar_dtype(entry, source, scalar_dtype)
            if not entry:
                dict.pop(raw.state, slot.param)  # the class keeps nothing for this parameter

    def _start_kernel(self, raw: Optimizer, source: _Source, among_numel: int, priority: int) -> Future[None]:
        kernel, slot = source.kernel, source.slot
        entry = dict.get(raw.state, slot.param)
        if entry is None:
            entry = {}
            dict.__setitem__(raw.state, slot.param, entry)
        is_first = not entry
        num_step = 1
        if kernel.uses_step:
            step = entry.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
            step += 1
            num_step = int(step.item())
        states = {}
        for name in kernel.state_names:
            if entry.get(name) is None:
                entry[name] = slot.unit.new_state(slot, name)
                is_first = True
            states[name] = flat_numpy(source.dense_state(entry[name]))
        grad = cast(torch.Tensor, source.grad)  # those without one are torch's to run
        start = functools.partial(
            kernel.submit, master=slot.split if slot.split is not None else flat_numpy(slot.home),
            grad=flat_numpy(grad), states=states, step=num_step, group=source.group,
            grad_scales=[factor.value() for factor in source.factors],
            grad_format=number_format(grad.dtype), is_new_state=is_first,
            among_numel=among_numel, priority=priority,
        )  # fmt: skip
        may_defer = self.defer_moments and not is_first and not slot.unit.is_paged and not source.dense_states
        if may_defer and kernel.can_defer_moments(source.group):
            pool = self._named_pool(f"moments ({slot.unit.name})")
            source.moments_later = functools.partial(start, pool, moments=MOMENTS_ONLY, priority=_MOMENTS_PRIORITY)
            pool = self._named_pool(f"weights ({slot.unit.name})")
            return start(pool, moments=MOMENTS_LATER)  # type: ignore[no-any-return]
        future: Future[None] = start(self._named_pool(f"weights and moments ({slot.unit.name})"))
        if not kernel.state_names and not kernel.uses_step:
            dict.pop(raw.state, slot.param, None)
        return future

    def _run_moments(self, sources: list[_Source], num_step: int) -> None:
        """The second pass over a unit: its weights are done."""
        start_s = time.perf_counter()
        running = [source.moments_later() for source in sources if source.moments_later is not None]
        for future in running:
            future.result()
        self._tell_updated(num_step, sum(source.slot.numel for source in sources), start_s, is_later=True)

    def _tell_updated(self, num_step: int, numel: int, start_s: float, *, is_later: bool = False) -> None:
        if not is_later:
            self._cpu_pass.note(num_step, numel, start_s)
        if self.on_updated is not None:
            self.on_updated(num_step, numel, start_s, is_later=is_later)

    # ------------------------------------------------------------------------------------- whole-instance optimizers
    def _step_whole(self, raw: Any, cls: type[Optimizer], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots = [s for g in raw.param_groups for p in g["params"] if (s := managed_slot(p)) is not None]
        has_graph = any((grad := raw_grad(slot.param)) is not None and grad.requires_grad for slot in slots)
        if has_graph or reaches_past_its_groups(raw, cls):
            return _inner_step(cls)(raw, *args, **kwargs)
        for slot in slots:
            # The instance keeps its parameters from step to step, so their homes stay whole tensors.
            if slot.split is not None:
                raise TierOffloadError(f"{slot.name}: its master is split, which {cls.__name__} cannot update.")
            self._wire.refuse_all(slot.unit)
        hosts = {slot.param: host_param(slot) for slot in slots}
        blocks = list({block: None for slot in slots for block in (slot.unit.param_block, slot.unit.grad_block)})
        leased: list[Any] = []
        given: dict[ParamSlot, torch.Tensor | None] = {}
        shown: dict[int, tuple[ParamSlot, torch.Tensor]] = {}  # gradient blocks of ours, by address

        def to_hosts() -> None:
            with self._space.lock, torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                self._space.open_homes(slots)
                leased.extend(self._space.host.lease(blocks))
                for slot in slots:
                    _copy_marks(slot.param, hosts[slot.param])
                    grad = given[slot] = hosts[slot.param].grad = self._host_grad(slot)
                    if grad is not None and self._gradients.is_down(slot):
                        shown[grad.untyped_storage().data_ptr()] = (slot, grad)
            self._stepping = (threading.get_ident(), cls, frozenset(slots))

        def from_hosts() -> None:
            if self._stepping is None and not leased:
                return  # a closure that failed: everything has been the user's since before it
            self._stepping = None
            with self._space.lock, torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                for slot in slots:
                    host, home = hosts[slot.param], slot.unit.read_home(slot)
                    if host.data_ptr() != home.data_ptr():  # the class did p.data = ...
                        home.copy_(host.detach())
                        host.data = home
                    grad = host.grad
                    if grad is None and given.get(slot) is not None:
                        self._gradients.zero([slot], set_to_none=True)
                    elif grad is not given.get(slot) and grad is not None:
                        self._gradients.write(slot, grad.detach().to(slot.param.device))
                for unit in {slot.unit: None for slot in slots}:
                    self._space.home_written(unit, [s for s in slots if s.unit is unit])
                    self._space.refresh(unit)
                self._space.host.end_lease(leased)
                leased.clear()
            with torch.inference_mode(False):
                for slot in slots:
                    _copy_marks(hosts[slot.param], slot.param)

        def around(call: Any) -> Any:
            """A closure runs with the parameters themselves, so what was done to the host tensors is theirs first."""
            if isinstance(call, (torch.Tensor, type)) or not callable(call):
                return call

            @functools.wraps(call, updated=())
            def inner(*args: Any, **kwargs: Any) -> Any:
                assert whole is not None
                from_hosts()
                whole.give()
                result = call(*args, **kwargs)
                to_hosts()
                whole.take()
                return result

            return inner

        whole: _WholeClone | None = None
        to_hosts()
        try:
            whole = _WholeClone(raw, cls, hosts, self._space.device)
            result = _inner_step(cls)(
                whole.clone,
                *(around(_remapped(value, hosts)) for value in args),
                **{key: around(_remapped(value, hosts)) for key, value in kwargs.items()},
            )
        finally:  # a step that failed has changed what it changed, as in the plain run
            from_hosts()
            for host in hosts.values():
                host.grad = None
            if whole is not None:
                whole.give(self._kept_gradients(shown))
        return result

    def _kept_gradients(self, shown: dict[int, tuple[ParamSlot, torch.Tensor]]) -> Callable[[Any], Any]:
        """A class that keeps a gradient (``state["previous"] = p.grad``) keeps the tensor, as in the plain run.

        Our block is written anew by the next backward. So the tensor that is kept becomes the parameter's gradient.
        """
        own: dict[int, torch.Tensor] = {}

        def kept(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                found = None
                if type(value) in (torch.Tensor, nn.Parameter) and value.layout == torch.strided:
                    found = shown.get(value.untyped_storage().data_ptr())
                if found is None:
                    return value
                slot, grad = found
                whole = own.get(id(slot))
                if whole is None:
                    whole = own[id(slot)] = grad.clone()
                    if self._space.device.type == "cpu" and self._gradients.is_down(slot):
                        self._gradients.write(slot, whole)
                if value is grad:
                    return whole
                offset = value.storage_offset() - grad.storage_offset()
                return whole.as_strided(value.size(), value.stride(), whole.storage_offset() + offset)
            if isinstance(value, list):
                value[:] = [kept(item) for item in value]
            elif type(value) is tuple:
                return tuple(kept(item) for item in value)
            elif isinstance(value, dict) and not isinstance(value, TierState):
                for key, item in list(value.items()):
                    value[key] = kept(item)
            return value

        return kept

    def refuse_from_inside(self, slots: Iterable[ParamSlot]) -> None:
        """A class whose step runs on host tensors must not touch the parameters themselves meanwhile."""
        if self._stepping is None:
            return
        thread, cls, inside = self._stepping
        if thread == threading.get_ident():
            for slot in slots:
                if slot in inside:
                    raise UnsupportedError(
                        f"{cls.__name__}.step() reaches {slot.name} by another way than its param_groups (a global, an "
                        "object that hides it). Keep what it uses (the model, an inner optimizer) as an attribute of "
                        "the optimizer: its step then runs on the parameters themselves."
                    )

    def _host_grad(self, slot: ParamSlot) -> torch.Tensor | None:
        if not self._gradients.has_grad(slot):
            return None
        if self._gradients.is_down(slot):
            return self._gradients.host_value(slot)
        grad = self._gradients.read(slot)
        return None if grad is None else grad.detach().to("cpu")

    # ------------------------------------------------------------------------------------------------------- loading
    def load_state_dict(self, raw: Optimizer, cls: type[Optimizer], state_dict: dict[str, Any]) -> None:
        """``load_state_dict`` of the user's class, over host parameters: state goes to its home, wherever it was."""
        for hook in raw._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(raw, state_dict)
            state_dict = state_dict if changed is None else changed
        hosts: dict[Any, Any] = {}
        groups = []
        for group in raw.param_groups:
            params = []
            for p in group["params"]:
                slot = managed_slot(p)
                if slot is not None:
                    self._space.settle_home(slot.unit)
                    hosts[p] = host_param(slot)
                params.append(hosts.get(p, p))
            groups.append({**group, "params": params})
        clone = _clone(raw, cls, groups, hosts)
        clone.state = defaultdict(dict)
        cls.load_state_dict(clone, state_dict)
        back = {host: original for original, host in hosts.items()}
        raw.state = TierState(raw, [(back.get(key, key), value) for key, value in clone.state.items()])
        raw.param_groups = [
            {**new, "params": old["params"]} for new, old in zip(clone.param_groups, raw.param_groups, strict=True)
        ]
        for key, value in clone.__dict__.items():
            if key not in _NOT_MIRRORED:
                raw.__dict__[key] = _remapped(value, back)
        self.hold_state(raw)
        for post_hook in raw._optimizer_load_state_dict_post_hooks.values():
            post_hook(raw)

    def hold_state(self, raw: Optimizer) -> None:
        """State that was loaded, or was there before its home was flash, goes there unit by unit.

        What somebody else refers to, as to a checkpoint that was loaded, is his until he lets go: that is asked again
        before each step.
        """
        self._loose.discard(raw)
        if not self.runs_per_unit(raw):
            return
        by_unit: dict[UnitState, list[tuple[ParamSlot, dict[str, Any]]]] = {}
        for group in raw.param_groups:
            for p in group["params"]:
                slot = managed_slot(p)
                if slot is not None and slot.unit.state_block.is_paged:
                    by_unit.setdefault(slot.unit, []).append((slot, group))
        for unit, items in by_unit.items():
            block, host = unit.state_block, self._space.host
            with self._space.lock, torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(False)
                self._space.wait_update(unit)
                unit.allot_state({slot.index: state_nbytes(raw, group, slot.param) for slot, group in items})
                entries = {slot: dict.get(raw.state, slot.param) for slot, _ in items}
                if not block.is_in_use(entries):
                    host.drop_content(block)  # all was exchanged: nobody needs what flash may not give back
                del entries
                loose = [unit.loose_state(slot, dict.get(raw.state, slot.param)) for slot, _ in items]
                if any(any(each.values()) for each in loose):
                    self._loose.add(raw)
                if all(all(each.values()) for each in loose):
                    continue
                host.bring_in_for_user(block)
                for slot, _ in items:
                    unit.hold_state(slot, dict.get(raw.state, slot.param))
                host.note_written(block)
                host.write_behind(block)

    def hold_loose_state(self, raw: Optimizer) -> None:
        """``hold_state`` where some was left."""
        if raw in self._loose:
            self.hold_state(raw)

    @property
    def passing_nbytes(self) -> int:
        """Bytes of the device budget that streamed updates hold to pass through."""
        return self._streamed.charged_nbytes

    def forget_streamed(self) -> None:
        """After an exception, before the ledger counts anew."""
        self._streamed.forget()

    def close(self) -> None:
        try:
            self._streamed.release()
        finally:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


# Tensors of the parameter's size that a class keeps, beside those that its options add.
_MOMENTS = {
    "ASGD": 1, "Adadelta": 2, "Adagrad": 1, "Adamax": 2, "Lion": 1, "Muon": 1, "NAdam": 2, "RAdam": 2, "RMSprop": 1,
    "Rprop": 2, "SGD": 0,
}  # fmt: skip


def num_moments(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of its size a parameter's state will hold; 0 for a class that nobody can tell beforehand."""
    name = user_class(optimizer).__name__
    known = _MOMENTS.get(name, 2 if "betas" in group else 0)
    with_momentum = name in ("SGD", "RMSprop") and bool(group.get("momentum"))
    return known + int(with_momentum) + int(bool(group.get("centered"))) + int(bool(group.get("amsgrad")))


def state_nbytes(optimizer: Any, group: dict[str, Any], p: torch.Tensor) -> int:
    """Bytes of tensors of a parameter's size that the optimizer will keep for it, rounded as a block holds them."""
    return num_moments(optimizer, group) * round_up(p.numel() * p.itemsize, 64) if p.requires_grad else 0


# Classes that treat every element alike, so that a slice of a tensor is updated to the bits of the whole tensor's.
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
)
_MOMENTS_PRIORITY = 1 << 20  # behind every pass over weights
_SLICE_NUMEL = 1 << 20  # a multiple of 8: slices of a split master share no byte of tie bits


def _may_slice(raw: Optimizer, cls: type, source: _Source) -> bool:
    slot = source.slot
    if cls not in _ELEMENTWISE or source.group.get("fused") or source.grad is None or slot.numel <= 2 * _SLICE_NUMEL:
        return False
    entry: Any = dict.get(raw.state, slot.param)
    if not entry:
        # Where all that it keeps is known, so that nothing of it depends on the shape.
        return num_moments(raw, source.group) > 0
    return all(
        not isinstance(value, torch.Tensor)
        or value.numel() == 1
        or (value.shape == slot.shape and value.stride() == slot.stride and value.device.type == "cpu")
        for value in entry.values()
    )


def _new_state_tensor(slot: ParamSlot, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A tensor for state of the slot's shape: in the unit's block, or in memory of its own."""
    made = slot.unit.state_block.take_state(slot, name, dtype)
    return made if made is not None else torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device="cpu")


def _is_kernels(state: Any, slot: ParamSlot) -> bool:
    """Whether a kernel takes an entry of the slot's state."""
    return (
        type(state) is torch.Tensor
        and state.layout == torch.strided
        and state.dtype == torch.float32
        and state.device.type == "cpu"
        and state.shape == slot.shape
    )


def _set_scalar_dtype(entry: Any, source: _Source, scalar_dtype: torch.dtype) -> None:
    """State entries that torch makes in the default dtype: in that of the time of ``step()``."""
    dtype = torch.float32 if source.group.get("fused") else scalar_dtype
    for name in _SCALARS if isinstance(entry, dict) else ():
        if isinstance(entry.get(name), torch.Tensor) and entry[name].dtype != dtype:
            entry[name] = entry[name].to(dtype)


@contextlib.contextmanager
def _host_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast on the host as it was for the device at ``step()``: a class may multiply matrices (Muon).

    Not ``torch.autocast``, whose end empties the cache of casts for every thread.
    """
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_enabled("cpu", dtype is not None)
        if dtype is not None:
            torch.set_autocast_dtype("cpu", dtype)
            torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_enabled("cpu", before[0])
        torch.set_autocast_dtype("cpu", before[1])
        torch.set_autocast_cache_enabled(before[2])


class _Source:
    """One parameter's part of an update: where its gradient is and what is still to be multiplied in."""

    __slots__ = (
        "_ticket", "dense_states", "factors", "grad", "group", "kernel", "moments_later", "odd_grad", "record", "slot",
    )  # fmt: skip

    def __init__(self, gradients: Gradients, slot: ParamSlot, group: dict[str, Any], kernel: Any) -> None:
        self.slot = slot
        self.group = group
        self.kernel = kernel
        self.record = slot.unit.grads[slot.index]
        self.odd_grad: torch.Tensor | None = None
        self.moments_later: Callable[[], Future[None]] | None = None
        # State with other strides than the parameter's, and what a kernel works on in its place.
        self.dense_states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.grad: torch.Tensor | None = None
        self.factors: list[Factor]
        fresh = raw_grad(slot.param)
        if fresh is not None and not fits_host(slot, fresh):
            self._ticket, self.factors = None, []
            self.odd_grad = fresh.detach().to("cpu", copy=True)  # sparse, or of another type: torch's class takes it
        else:
            self._ticket, self.grad, self.factors = gradients.update_source(slot)

    def wait(self) -> None:
        if self._ticket is not None:
            self._ticket.wait()

    def has_kernels_state(self, raw: Optimizer) -> bool:
        """Whether what there is of the kernel's state is of the kind that it takes; of another, torch's class says."""
        entry = dict.get(raw.state, self.slot.param) or {}
        states = [state for name in self.kernel.state_names if (state := entry.get(name)) is not None]
        return all(_is_kernels(state, self.slot) for state in states)

    def dense_state(self, tensor: torch.Tensor) -> torch.Tensor:
        """State with its elements in the order of the parameter's: kernels go through memory.

        Loaded state may have other strides (a model in ``channels_last``), and user code may exchange it.
        """
        slot = self.slot
        if tensor.stride() == slot.stride:
            return tensor
        dense = torch.empty_strided(slot.shape, slot.stride, dtype=tensor.dtype, device="cpu").copy_(tensor)
        self.dense_states.append((tensor, dense))
        return dense

    def true_grad(self) -> torch.Tensor:
        if self.grad is None:
            if self.odd_grad is None:
                raise TierOffloadError(f"{self.slot.name} has no gradient to update with.")
            return self.odd_grad
        # A 16-bit gradient stands for the fp32 one that it equals: widened here, and then as torch would multiply.
        grad = self.grad if self.grad.dtype == self.slot.dtype else self.grad.to(self.slot.dtype)
        if grad is self.grad and self.factors and self._stays_as_it_is():
            grad = grad.clone()
        for factor in self.factors:
            grad.mul_(factor.on_host())
        return grad

    def true_grad_slice(self, begin: int, end: int) -> torch.Tensor:
        """``true_grad`` of elements ``begin`` to ``end``, counted in memory order."""
        assert self.grad is not None
        grad = flat_view(self.grad)[begin:end]
        grad = grad.to(self.slot.dtype, copy=bool(self.factors) and self._stays_as_it_is())
        for factor in self.factors:
            grad.mul_(factor.on_host())
        return grad

    def _stays_as_it_is(self) -> bool:
        """A gradient at home on flash is multiplied in a copy: it need not be written there again."""
        return self.slot.unit.grad_block.is_paged  # type: ignore[no-any-return]

    def hand_over(self, update: Ticket) -> None:
        """The update multiplies the factors into the DRAM gradient; who reads it later waits for that."""
        if self._stays_as_it_is():
            return
        if self.record.place is GradPlace.HOST and self.kernel is None and self.factors and not self.record.is_wire:
            self.record.factors = []
            self.record.ticket = _AsCopy(update)


class _TwoPasses:
    """A unit's whole update: the pass that writes the home, and the second one that the first may have ordered."""

    __slots__ = ("first", "second")

    first: Ticket

    def __init__(self) -> None:
        self.second: Ticket | None = None  # set before the first is done

    @property
    def label(self) -> str:
        """Of what is waited for now."""
        return getattr(self.second if self.first.done() else self.first, "label", "")

    def done(self) -> bool:
        return self.first.done() and (self.second is None or self.second.done())

    def wait(self, timeout_s: float | None = None) -> None:
        self.first.wait(timeout_s)
        if self.second is not None:
            self.second.wait(timeout_s)


class _CpuPass:
    """How fast the CPU goes over the weights of one step. Noted from the lane's threads, read when they are done."""

    def __init__(self, num_step: int) -> None:
        self._num_step = num_step
        self._lock = threading.Lock()
        self._numel = 0
        self._begin_s, self._end_s = float("inf"), 0.0

    def note(self, num_step: int, numel: int, start_s: float) -> None:
        if num_step == self._num_step:
            with self._lock:
                self._numel += numel
                self._begin_s = min(self._begin_s, start_s)
                self._end_s = max(self._end_s, time.perf_counter())

    def rate(self) -> float | None:
        with self._lock:
            return self._numel / (self._end_s - self._begin_s) if self._end_s > self._begin_s else None


class _AsCopy:
    """An update ticket where a copy ticket is expected."""

    is_update = True

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._ticket.wait(timeout_s)

    def before_compute(self) -> None:
        self._ticket.wait()
