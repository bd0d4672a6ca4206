"""Floor 9. Functions of torch that would hold every gradient twice, wrapped while an engine is attached.

``clip_grad_norm_``, ``clip_grad_value_`` and ``clip_grads_with_norm_`` of ``torch.nn.utils``, ``zero_grad`` of modules
and optimizers, and ``GradScaler._unscale_grads_``. Without managed parameters among the arguments the original runs,
untouched; with them the numbers are the original's, bit for bit. Unwrapped they would still be right: ``p.grad`` is the
true gradient wherever it is read, only then it stays on the device. ``torch.clear_autocast_cache`` says when autocast's
casts end, and the hooks of ``torch.utils.checkpoint`` that they have been pushed. ``torch.utils.swap_tensors`` refuses
managed parameters, and ``nn.Parameter(p)`` is one over p's memory. What makes a program of a module
(``torch.jit.trace``, ``torch.jit.script``, ``torch.export``) is given a copy of it.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from lightning_tieroffload.engine.gradients import Gradients
from lightning_tieroffload.engine.params import ParamSlot, managed_slot
from lightning_tieroffload.engine.saved import are_popped, pop_hooks
from lightning_tieroffload.engine.unit_state import Factor
from lightning_tieroffload.errors import UnsupportedError

__all__ = ["before_compiling", "install", "uninstall", "when_autocast_ends", "when_checkpoint_saves"]

_lock = threading.Lock()
_originals: dict[tuple[Any, str], Any] = {}
_wrappers: dict[tuple[Any, str], Any] = {}
_users: weakref.WeakSet[Any] = weakref.WeakSet()


def _gradients(slot: ParamSlot) -> Gradients:
    return slot.owner.gradients  # type: ignore[attr-defined,no-any-return]


def _as_list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _down(p: torch.Tensor) -> ParamSlot | None:
    """The slot of a managed parameter whose gradient is in DRAM; None where torch's own code can read it as it is."""
    slot = managed_slot(p)
    return slot if slot is not None and _gradients(slot).is_down(slot) else None


def _with_grad(parameters: list[torch.Tensor]) -> list[tuple[torch.Tensor, ParamSlot | None]]:
    """(parameter, slot where its gradient is down), for those that have a gradient, in order."""
    result: list[tuple[torch.Tensor, ParamSlot | None]] = []
    for p in parameters:
        slot = _down(p)
        if slot is not None or p.grad is not None:
            result.append((p, slot))
    return result


def _total_norm(
    items: list[tuple[torch.Tensor, ParamSlot | None]], norm_type: float, error_if_nonfinite: bool, foreach: Any
) -> torch.Tensor:
    """Norm of per-tensor norms, stacked in the order in which torch groups tensors by device and dtype."""
    if not items:
        return torch.tensor(0.0)
    norms: list[torch.Tensor] = []
    for p, slot in items:
        if slot is not None:
            gradients = _gradients(slot)
            gradients.norm_types.add(norm_type)
            norms.append(gradients.norm(slot, norm_type))
        else:
            grad = p.grad
            if isinstance(grad, torch.Tensor) and grad.layout == torch.strided:
                norms.append(torch.linalg.vector_norm(grad, norm_type))
            else:
                norms.append(_originals[torch.nn.utils, "get_total_norm"]([grad], norm_type, False, foreach))
    # Stand-ins without elements tell torch's own grouping which device and dtype each gradient has.
    stand_ins: list[list[Any]] = [[torch.empty(0, dtype=p.dtype, device=p.device) for p, _ in items]]
    grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype(stand_ins, with_indices=True)
    order = [index for _, indices in grouped.values() for index in indices]
    first_device = items[0][0].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norms[i].to(first_device) for i in order]), norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        _originals[torch.nn.utils, "get_total_norm"]([total], 2.0, True)  # raises, in torch's own words
    return total


def _multiply(items: list[tuple[torch.Tensor, ParamSlot | None]], factor: torch.Tensor) -> None:
    shared: Factor | None = None
    for p, slot in items:
        if slot is not None:
            gradients = _gradients(slot)
            shared = shared or gradients.factor(factor)
            gradients.multiply(slot, shared)
        else:
            grad = p.grad
            if grad is not None:
                grad.mul_(factor.to(grad.device))


def _clip_factor(max_norm: float, total_norm: torch.Tensor) -> torch.Tensor:
    # As torch does it: no branch on the value, so that no host-device synchronisation is needed.
    return torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)


def _wrap_clip_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        listed = _as_list(parameters)
        if not any(_down(p) is not None for p in listed):
            return original(listed, max_norm, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            items = _with_grad(listed)
            total = _total_norm(items, float(norm_type), error_if_nonfinite, foreach)
            _multiply(items, _clip_factor(float(max_norm), total))
        return total

    return clip_grad_norm_


def _wrap_clip_with_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        listed = _as_list(parameters)
        if not any(_down(p) is not None for p in listed):
            original(listed, max_norm, total_norm, foreach)
            return
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            _multiply(_with_grad(listed), _clip_factor(float(max_norm), total_norm))

    return clip_grads_with_norm_


def _wrap_clip_value(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        listed = _as_list(parameters)
        rest, is_any_down = [], False
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            for p in listed:
                slot = _down(p)
                if slot is not None:
                    _gradients(slot).clamp(slot, float(clip_value))
                    is_any_down = True
                elif p.grad is not None:
                    rest.append(p)
        if rest or not is_any_down:  # torch's own raises for a list without any gradient
            original(rest, clip_value, foreach)

    return clip_grad_value_


def _zero(params: Iterable[torch.Tensor], set_to_none: bool) -> bool:
    """Clear the gradients where a parameter is managed; False, and nothing done, where none is."""
    managed: dict[Gradients, list[ParamSlot]] = {}
    ordinary: list[torch.Tensor] = []
    for p in params:
        slot = managed_slot(p)
        if slot is None:
            ordinary.append(p)
        else:
            managed.setdefault(_gradients(slot), []).append(slot)
    if not managed:
        return False
    for gradients, slots in managed.items():
        gradients.zero(slots, set_to_none=set_to_none)
    for p in ordinary:
        if p.grad is not None:
            if set_to_none:
                p.grad = None
            else:
                p.grad.detach_() if p.grad.grad_fn is not None else p.grad.requires_grad_(False)
                p.grad.zero_()
    return True


def _wrap_zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
        if getattr(self, "_is_replica", False) or not _zero(self.parameters(), set_to_none):
            original(self, set_to_none)

    return zero_grad


def _wrap_optimizer_zero_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        if not _zero([p for group in self.param_groups for p in group["params"]], set_to_none):
            original(self, set_to_none)

    return zero_grad


class _RestOnly:
    """An optimizer's groups without the parameters whose gradients were unscaled in DRAM."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.param_groups = groups


def _wrap_unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _unscale_grads_(
        self: Any, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        down: list[ParamSlot] = []
        groups = []
        for group in optimizer.param_groups:
            rest = []
            for p in group["params"]:
                slot = _down(p)
                if slot is not None and (allow_fp16 or p.dtype != torch.float16):
                    down.append(slot)
                else:
                    rest.append(p)
            groups.append({"params": rest})
        if not down:
            return original(self, optimizer, inv_scale, found_inf, allow_fp16)  # type: ignore[no-any-return]
        result: dict[torch.device, torch.Tensor] = original(self, _RestOnly(groups), inv_scale, found_inf, allow_fp16)
        device = found_inf.device
        host_found, host_inv = torch.zeros((), device="cpu"), inv_scale.detach().to("cpu", torch.float32)
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            for slot in down:
                _gradients(slot).unscale(slot, host_inv, host_found)
            total = torch.maximum(result[device], host_found.to(device)) if device in result else host_found.to(device)
        result = dict(result)
        result[device] = total
        return result

    return _unscale_grads_


_Calls = list[weakref.WeakMethod[Callable[[], None]]]
_on_clear: _Calls = []
_on_compile: _Calls = []
_on_checkpoint: list[weakref.WeakMethod[Callable[[], bool]]] = []


def _add(calls: list[Any], call: Callable[[], Any]) -> None:
    with _lock:
        calls[:] = [*(ref for ref in calls if ref() is not None), weakref.WeakMethod(call)]


def _call_all(calls: _Calls) -> None:
    for ref in list(calls):
        call = ref()
        if call is not None:
            call()


def when_autocast_ends(call: Callable[[], None]) -> None:
    """Call a bound method, held weakly, whenever autocast empties its cache (its outermost context ends)."""
    _add(_on_clear, call)


def before_compiling(call: Callable[[], None]) -> None:
    """Call a bound method, held weakly, before dynamo compiles something.

    While it does ``torch.compiler.is_compiling()`` is true in every thread, and torch's optimizers then compute with
    tensors where they compute with Python numbers otherwise: other bits.
    """
    _add(_on_compile, call)


def when_checkpoint_saves(call: Callable[[], bool]) -> None:
    """Call a bound method, held weakly, when a non-reentrant checkpoint has pushed its hooks.

    True says that it has pushed others, which are popped before the checkpoint's.
    """
    _add(_on_checkpoint, call)


def _wrap_hooks_of_frame(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, frame: Any, *args: Any) -> None:
        original(self, frame, *args)
        self._tieroffload_frame = frame

    return __init__


def _wrap_enter_hooks(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __enter__(self: Any) -> None:
        original(self)
        frame = self.__dict__.pop("_tieroffload_frame", None)
        if isinstance(frame, weakref.ref):  # forward runs again: as it ran
            frame = frame()
            if not hasattr(frame, "_tieroffload_counts"):
                return
        elif frame is not None:
            frame._tieroffload_counts = True
        self._tieroffload_num_over = 0
        for ref in list(_on_checkpoint):
            call = ref()
            self._tieroffload_num_over += call is not None and call()

    return __enter__


def _wrap_exit_hooks(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __exit__(self: Any, *error: Any) -> None:
        num_over = self.__dict__.pop("_tieroffload_num_over", 0)
        if are_popped(self.pack_hook):
            return
        for _ in range(num_over):
            pop_hooks()
        original(self, *error)

    return __exit__


def _wrap_compile_session(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _compile_session_context() -> Any:
        _call_all(_on_compile)
        return original()

    return _compile_session_context


def _end_autocast(caller: FrameType) -> None:
    """Ctrl-C struck where autocast's context had emptied its cache, and not yet gone back to what was before it.

    Nothing else will: everything that follows in the process would compute in 16 bits.
    """
    context = caller.f_locals.get("self")
    if isinstance(context, torch.autocast) and caller.f_code is torch.autocast.__exit__.__code__:
        torch.set_autocast_enabled(context.device, context.prev)
        torch.set_autocast_dtype(context.device, context.prev_fastdtype)
        torch.set_autocast_cache_enabled(context.prev_cache_enabled)


def _wrap_clear_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def clear_autocast_cache() -> None:
        try:
            original()
            _call_all(_on_clear)
        except BaseException:
            _end_autocast(sys._getframe(1))
            raise

    return clear_autocast_cache


def _wrap_exchange(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def exchange(t1: torch.Tensor, t2: torch.Tensor) -> None:
        for t in (t1, t2):
            slot = managed_slot(t)
            if slot is not None:
                raise UnsupportedError(
                    f"{slot.name} is offloaded, so its contents cannot be exchanged with another tensor's "
                    "(torch.utils.swap_tensors; torch.__future__.set_swap_module_params_on_conversion(True) makes "
                    "model.to(...) and load_state_dict do it). Copy values instead (p.copy_(...), load_state_dict "
                    "without that switch), or call engine_of(model).close() first."
                )
        original(t1, t2)

    return exchange


def _wrap_new_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __new__(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        # As of a plain parameter: a new one over the same memory, which is the user's as long as he has it.
        return original(cls, data if managed_slot(data) is None else data.data, requires_grad)

    return __new__


def _ordinary(value: Any) -> Any:
    """A copy without hooks and with memory of its own, of a module with managed parameters; anything else as it is."""
    if isinstance(value, nn.Module) and any(managed_slot(p) is not None for p in value.parameters()):
        return copy.deepcopy(value)
    return value


def _wrap_program_of(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def program_of(*args: Any, **kwargs: Any) -> Any:
        # The program reads the module's memory past Python, whether it is there or not, and cannot contain our hooks.
        if args:
            return original(_ordinary(args[0]), *args[1:], **kwargs)
        return original(**{name: _ordinary(value) for name, value in kwargs.items()})

    return program_of


class _Inside:
    """The function that one of torch's decorators holds, as an attribute.

    Scripts say ``from torch.nn.utils import clip_grad_norm_`` before anything of ours runs: what that name refers to
    stays torch's decorated function, and calls this.
    """

    def __init__(self, decorated: Any, name: str) -> None:
        cells = getattr(decorated, "__closure__", None) or ()
        names = (name, f"_{name}")  # torch calls some functions by a private name too
        found = [cell for cell in cells if getattr(cell.cell_contents, "__name__", None) in names]
        self._cell = found[0] if len(found) == 1 else None

    @property
    def function(self) -> Any:
        return None if self._cell is None else self._cell.cell_contents

    @function.setter
    def function(self, value: Any) -> None:
        if self._cell is not None:
            self._cell.cell_contents = value

    def __hash__(self) -> int:
        return id(self._cell)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inside) and other._cell is self._cell


_INSIDE = [
    (_Inside(getattr(torch.nn.utils, name, None), name), wrap)
    for name, wrap in (
        ("clip_grad_norm_", _wrap_clip_norm),
        ("clip_grads_with_norm_", _wrap_clip_with_norm),
        ("clip_grad_value_", _wrap_clip_value),
    )
]


def _targets() -> Iterable[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]] | None]]:
    utils = torch.nn.utils
    for inside, wrap in _INSIDE:
        yield inside, "function", wrap
    yield utils, "get_total_norm", None  # takes gradients, not parameters: remembered, not wrapped
    for owner in (utils, torch.nn.utils.clip_grad):
        yield owner, "clip_grad_norm_", _wrap_clip_norm
        yield owner, "clip_grads_with_norm_", _wrap_clip_with_norm
        yield owner, "clip_grad_value_", _wrap_clip_value
    yield nn.Module, "zero_grad", _wrap_zero_grad
    yield torch.optim.Optimizer, "zero_grad", _wrap_optimizer_zero_grad
    yield torch.amp.GradScaler, "_unscale_grads_", _wrap_unscale
    yield torch, "clear_autocast_cache", _wrap_clear_cache
    yield torch.utils, "swap_tensors", _wrap_exchange
    yield torch.compiler, "_compile_session_context", _wrap_compile_session
    for name in ("_checkpoint_hook", "_recomputation_hook"):
        hooks = getattr(torch_checkpoint, name, None)
        yield hooks, "__init__", _wrap_hooks_of_frame
        yield hooks, "__enter__", _wrap_enter_hooks
        yield hooks, "__exit__", _wrap_exit_hooks
    yield nn.Parameter, "__new__", _wrap_new_parameter
    for owner in (torch.jit, torch.jit._trace):  # torch.jit.trace calls the latter's
        yield owner, "trace_module", _wrap_program_of
    yield torch.jit._recursive, "create_script_module", _wrap_program_of
    for name in ("export", "draft_export"):
        yield torch.export, name, _wrap_program_of


def install(user: object) -> None:
    """Wrap on behalf of one more engine. Whole after a second call, should Ctrl-C have cut off the first."""
    with _lock:
        _users.add(user)
        for owner, name, wrap in _targets():
            original = getattr(owner, name, None)
            if original is None or original is _wrappers.get((owner, name)):
                continue
            _originals[owner, name] = original
            if wrap is not None:
                wrapper = _wrappers[owner, name] = wrap(original)
                setattr(owner, name, wrapper)


def uninstall(user: object) -> None:
    """One engine less; the last one puts torch's functions back."""
    with _lock:
        _users.discard(user)
        if len(_users) > 0:
            return
        for (owner, name), wrapper in list(_wrappers.items()):
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, _originals[owner, name])
            del _wrappers[owner, name]
