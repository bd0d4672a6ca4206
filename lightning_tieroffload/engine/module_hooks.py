"""Floor 9. Hooks on the user's modules: open a compute window before forward, close it after. Leave no trace.

[Note: hook-free copies] ``deepcopy`` of a module copies its hook tables. Our hooks copy as inert ones, which take
themselves out of the copied tables when the memo of that deepcopy dies, that is when the whole copy is done.

[Note: hooks forbidden] ``torch.func`` transforms and ``disable_saved_tensors_hooks`` forbid saved-tensor hooks.
Autograd then keeps the parameters themselves, and nothing pages them in later. So an alias of their storage is kept,
which makes the memory the user's (see [Note: handed-out tensors]), until the next outermost forward with hooks allowed.

[Note: fused evaluation] In evaluation ``nn.TransformerEncoderLayer`` computes by one fused kernel, with other bits,
unless it finds a hook in itself or a parameter of a class that overrides functions. So while it evaluates our hooks are
not counted (``_Uncounted``), and its unit is there in full with plain parameters: on the CPU autocast does not change
its mind.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_tieroffload.engine.activations import ActivationStore
from lightning_tieroffload.engine.compute_trace import ComputeTrace
from lightning_tieroffload.engine.device_space import DeviceSpace, outside_transforms
from lightning_tieroffload.engine.gradients import Gradients
from lightning_tieroffload.engine.order import Phase
from lightning_tieroffload.engine.params import AutocastParameter, ComputeParameter, ParamSlot
from lightning_tieroffload.engine.planner import Planner
from lightning_tieroffload.engine.profiler import Profiler, largest_numel
from lightning_tieroffload.engine.recompute import Recompute, Region, pop_left_watches
from lightning_tieroffload.engine.saved import hooks_are_ours, pop_hooks, pop_left_hooks, push_hooks
from lightning_tieroffload.engine.unit_state import Part, UnitState
from lightning_tieroffload.engine.wire import wire_dtype
from lightning_tieroffload.planning.cost_model import ActivationChoice

__all__ = ["FUSING", "ModuleHooks"]

_log = logging.getLogger(__name__)

FUSING = (nn.TransformerEncoderLayer,)  # see [Note: fused evaluation]

_MEMO_KEY = "lightning_tieroffload.inert_hooks"


class _Frame:
    __slots__ = ("error", "has_pushed", "is_profiled", "may_fuse", "module", "opened", "region", "window", "worn")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.opened: list[tuple[UnitState, list[Part]]] = []
        self.has_pushed = False
        self.region: Region | None = None
        self.is_profiled = False
        self.may_fuse = False  # see [Note: fused evaluation]
        self.worn: list[tuple[ParamSlot, type]] = []  # the classes of parameters that are plain for it meanwhile
        self.window: tuple[str, Any] | None = None  # in the timeline: the unit and when its forward began
        self.error = sys.exc_info()[1]  # that is being handled already


def _frame_of_caller() -> FrameType:
    """The nearest frame outside this file: of the ``state_dict`` that called a hook of ours."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _inert(*_: Any) -> None:
    """What a copied hook is: nothing."""


class _Cleaner:
    """Lives in a deepcopy's memo; takes the inert hooks out when the memo dies."""

    def __init__(self) -> None:
        self.tables: list[Any] = []

    def __del__(self) -> None:
        for table in self.tables:
            for key in [k for k, hook in table.items() if hook is _inert]:
                del table[key]


@functools.cache
def _keep_dynamo_out() -> None:
    """Where dynamo gives up on a module (too many recompilations) it tries what the module calls, one by one: ours too.

    Compiled, code of ours would meet parameters that are away, and ``__torch_function__`` itself without end.
    """
    import torch._dynamo.trace_rules

    torch._dynamo.trace_rules.add("lightning_tieroffload")


class _Hook:
    """A hook that leaves no trace in copies of its module."""

    def __init__(self, call: Callable[..., None], units: tuple[UnitState, ...]) -> None:
        _keep_dynamo_out()
        self._call = call  # (module, units, what torch hands to the hook: arguments, or the result last)
        # The wrapper that keeps dynamo out costs 25 µs a call, so it is used only while dynamo is looking.
        self._opaque = torch._dynamo.disable(call)
        self._units = units
        self.table: Any = None

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._opaque(module, self._units, *given)
        else:
            self._call(module, self._units, *given)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        cleaner = memo.get(_MEMO_KEY)
        if cleaner is None:
            cleaner = memo[_MEMO_KEY] = _Cleaner()
        copied = memo.get(id(self.table))
        if copied is not None and not any(copied is table for table in cleaner.tables):
            cleaner.tables.append(copied)
        return _inert

    def __reduce__(self) -> Any:
        # A pickled module must load where this package is not installed: sys.audit is the standard library's function
        # that takes anything and does nothing.
        return functools.partial, (sys.audit, "lightning_tieroffload.inert_hook")


class _Uncounted(collections.OrderedDict[int, Any]):
    """A hook table in which the engine's own hooks are not counted, though they are called."""

    __slots__ = ("table",)

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.table = table

    def __len__(self) -> int:
        return sum(not isinstance(hook, _Hook) for hook in self.values())

    def __bool__(self) -> bool:
        return True


def _uncount(module: nn.Module) -> None:
    """Hide our hooks in a module's tables from who counts them; a second time in a row does nothing."""
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        table = vars(module)[name]
        if table and not isinstance(table, _Uncounted):
            vars(module)[name] = _Uncounted(table)


def _count_again(module: nn.Module) -> None:
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        table = vars(module)[name]
        if isinstance(table, _Uncounted):
            table.table.clear()
            table.table.update(table)  # with what came and went meanwhile
            vars(module)[name] = table.table


def _may_fuse(module: nn.Module) -> bool:
    """Whether the module may compute by a kernel of its own, past its children; torch has more conditions."""
    if not isinstance(module, FUSING) or module.training or torch.is_autocast_enabled():
        return False
    return not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters())


class ModuleHooks:
    """The windows of one engine's modules, and the brackets around their ``state_dict``."""

    def __init__(
        self,
        space: DeviceSpace,
        gradients: Gradients,
        watch: Callable[[UnitState], None],
        activations: ActivationStore,
        *,
        offloads_all: bool,
        profiler: Profiler,
        planner: Planner,
        trace: ComputeTrace | None,
    ) -> None:
        self._space = space
        self._gradients = gradients
        self._activations = activations
        self._profiler = profiler
        self._planner = planner
        self._trace = trace
        self._everywhere = activations if offloads_all else None
        self._recompute: dict[UnitState, Recompute] = {}
        self._watch = watch  # called when a unit opens with gradients on: registers what is missing
        self._units_at: dict[int, tuple[UnitState, ...]] = {}
        self._local = threading.local()
        self._handles: list[RemovableHandle] = []
        self._wrapped: list[tuple[nn.Module, Any]] = []
        self._num_fusing: dict[nn.Module, int] = {}  # calls of modules that may fuse, under way

    # --------------------------------------------------------------------------------------------------- windows
    def _frames(self) -> list[_Frame]:
        frames = getattr(self._local, "frames", None)
        if frames is None:
            frames = self._local.frames = []
        return frames

    def enter(
        self, module: nn.Module, units: Sequence[UnitState], args: Any = (), kwargs: Any = None, *, again: bool = False
    ) -> None:
        frames = self._frames()
        frame = _Frame(module)
        frames.append(frame)  # first: if what follows raises, the always-called hook finds its own frame
        with self._unwatched():
            self._open(frame, units)
        if torch.is_grad_enabled():
            store, region = self._everywhere, None
            self._taint_regions()
            with outside_transforms():
                for unit in units:
                    self._watch(unit)
                    if unit.root is module and not again and unit.index == self._planner.first_unit:
                        self._planner.on_batch(largest_numel((args, kwargs)))
                if self._profiler.is_on:
                    self._profile(frame, units, args, kwargs, again)
            for unit in units:
                if unit.root is module and not again:
                    if unit.choice.activation is ActivationChoice.RECOMPUTE:
                        region = self._begin_region(frame, unit, args, kwargs or {})
                    elif unit.choice.activation is ActivationChoice.OFFLOAD_DRAM:
                        store = self._activations
            instead = ((region.pack, region.unpack), region.count) if region is not None else None
            frame.has_pushed = push_hooks(self._space, self._gradients.on_unpack, store, instead)
        if self._trace is not None:
            own = self._unit_whose_time_it_is(frame, units, [other.window is not None for other in frames])
            if own is not None:
                frame.window = own.name, self._trace.begin(in_backward=self._gradients.in_backward())

    @staticmethod
    def _unit_whose_time_it_is(
        frame: _Frame, units: Sequence[UnitState], are_counted: Sequence[bool]
    ) -> UnitState | None:
        """A unit's time is that of its root; what has no root counts where no unit around it does."""
        own = next((unit for unit in units if unit.root is frame.module), None)
        return next(iter(units), None) if own is None and not any(are_counted) else own

    def _profile(self, frame: _Frame, units: Sequence[UnitState], args: Any, kwargs: Any, again: bool) -> None:
        own = self._unit_whose_time_it_is(frame, units, [other.is_profiled for other in self._frames()])
        if own is not None and (again or not self._gradients.in_backward()):
            frame.is_profiled = True
            self._profiler.enter(own, (args, kwargs), is_rerun=again)

    def _taint_regions(self) -> None:
        """A checkpoint of the model's own inside a recomputed unit: two of them nested would save nothing."""
        around = [frame.region for frame in self._frames() if frame.region is not None]
        if around and not hooks_are_ours(self._space):
            for region in around:
                region.taint()

    def _begin_region(self, frame: _Frame, unit: UnitState, args: Any, kwargs: Any) -> Region | None:
        region = self.recompute_of(unit).begin(args, kwargs)
        frame.region = region
        return region

    def recompute_of(self, unit: UnitState) -> Recompute:
        """Who recomputes ``unit``, which has a root."""
        found = self._recompute.get(unit)
        if found is None:
            root = unit.root
            assert root is not None
            found = self._recompute[unit] = Recompute(
                unit.name,
                root,
                self._space,
                run_again=functools.partial(self._run_again, root, self._units_at[id(root)]),
                is_own_hook=lambda hook: isinstance(hook, _Hook),
                on_refused=lambda name, why: _log.info("%s keeps its activations: %s", name, why),
            )
        return found

    def activation_of(self, unit: UnitState) -> str:
        """What becomes of a unit's activations, for people: the plan's choice, and where it cannot be kept, why."""
        choice = unit.choice.activation
        if choice is ActivationChoice.OFFLOAD_DRAM:
            return "offload"
        if choice is ActivationChoice.RECOMPUTE and unit in self._recompute:
            why = self.why_not_recompute(unit)
            if why is not None:
                return f"keep ({why})"
        return str(choice.value)

    def why_not_recompute(self, unit: UnitState) -> str | None:
        """Why a unit that is to recompute keeps its activations; None where it does, or is not this engine's."""
        recompute = self._recompute.get(unit)
        if recompute is None:
            return None
        return recompute.why_refused or (recompute.why_not_now if recompute.num_dropped == 0 else None)

    def _run_again(self, module: nn.Module, units: Sequence[UnitState], args: Any, kwargs: Any) -> None:
        closed = next((unit.name for unit in units if unit.is_closed), None)
        if closed is not None:
            raise RuntimeError(
                f"backward runs through a graph that was recorded before engine.close(), and unit {closed} was to be "
                'recomputed, which is the engine\'s. Run backward before close(), or set activations="keep".'
            )
        try:
            self.enter(module, units, again=True)
            module.forward(*args, **kwargs)
        finally:
            self.leave(module, units)

    @contextlib.contextmanager
    def _unwatched(self) -> Iterator[None]:
        """What the engine itself moves is not the model's doing."""
        watches = [frame.region.watch for frame in self._frames() if frame.region is not None]
        if not watches:
            yield
            return
        for watch in watches:
            if watch is not None:
                watch.num_paused += 1
        try:
            yield
        finally:
            for watch in watches:
                if watch is not None:
                    watch.num_paused -= 1

    def _open(self, frame: _Frame, units: Sequence[UnitState]) -> None:
        frames = self._frames()
        has_grad = torch.is_grad_enabled()
        if self._gradients.in_backward():
            phase = Phase.BACKWARD
            self._gradients.enter_backward()
            with outside_transforms():
                self._gradients.settle_all()  # a forward inside backward needs the room that gradients still take
        else:
            phase = Phase.FORWARD if has_grad else Phase.EVAL
        frame.may_fuse = not torch.compiler.is_compiling() and _may_fuse(frame.module)
        dtype = None if any(each.may_fuse for each in frames) else wire_dtype(self._space.device)
        may_hook = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        with outside_transforms():
            if may_hook and len(frames) == 1:
                self._local.kept_for_autograd = []
            for unit in units:
                frame.opened.append((unit, self._space.open_window(unit, phase, dtype)))
                if has_grad and not may_hook:
                    kept = self._local.__dict__.setdefault("kept_for_autograd", [])
                    kept += [part.flat.detach() for _, parts in frame.opened[-1:] for part in parts]
        if frame.may_fuse:
            self._let_fuse(frame)

    def _let_fuse(self, frame: _Frame) -> None:
        """See [Note: fused evaluation]."""
        with self._space.lock:
            self._num_fusing[frame.module] = self._num_fusing.get(frame.module, 0) + 1
            for each in frame.module.modules():
                _uncount(each)
            for unit, _ in frame.opened:
                for slot in unit.slots:
                    if type(slot.param) is AutocastParameter:
                        frame.worn.append((slot, AutocastParameter))
                        slot.param.__class__ = ComputeParameter  # type: ignore[assignment]

    def _end_fusing(self, frame: _Frame) -> None:
        with self._space.lock:
            for slot, worn in frame.worn:
                if type(slot.param) is ComputeParameter:
                    slot.param.__class__ = worn
            frame.worn.clear()
            num_left = self._num_fusing.pop(frame.module, 1) - 1
            if num_left > 0:
                self._num_fusing[frame.module] = num_left
                return
            for each in frame.module.modules():
                _count_again(each)

    def leave(self, module: nn.Module, units: Sequence[UnitState], _: Any = None, result: Any = None) -> None:
        frames = self._frames()
        if not frames or frames[-1].module is not module:
            return  # our hook before forward never ran (another one raised first)
        frame = frames.pop()
        if frame.window is not None and self._trace is not None:
            self._trace.end(*frame.window, result, in_backward=self._gradients.in_backward())
        if frame.is_profiled:
            with outside_transforms():
                self._profiler.leave(result)
        error = sys.exc_info()[1] if result is None and not frames else None
        if isinstance(error, torch.OutOfMemoryError) and error is not frame.error:
            self._planner.on_out_of_memory()
        with self._unwatched():
            self._close(frame, is_whole=result is not None)  # there is no result after an exception

    def _close(self, frame: _Frame, *, is_whole: bool = False) -> None:
        if frame.may_fuse:
            self._end_fusing(frame)
        if frame.has_pushed:
            pop_hooks()
        if frame.region is not None:
            frame.region.end(is_whole=is_whole)
        with outside_transforms():
            for unit, parts in frame.opened:
                self._space.close_window(unit, parts)

    def reset(self) -> None:
        """Close every window of the calling thread, after an exception that skipped the hooks (Ctrl-C)."""
        frames = self._frames()
        while frames:
            self._close(frames.pop())
        pop_left_hooks(self._space)
        pop_left_watches(self._space)

    def add(self, module: nn.Module, units: tuple[UnitState, ...]) -> None:
        """Open a window over ``units`` around the module's forward."""
        if getattr(module, "_compiled_call_impl", None) is not None:
            self._wrap_compiled(module, units)
            return
        self._units_at[id(module)] = units
        before = _Hook(self.enter, units)
        after = _Hook(self.leave, units)
        self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, always_call=True))
        before.table, after.table = module._forward_pre_hooks, module._forward_hooks

    def _wrap_compiled(self, module: nn.Module, units: tuple[UnitState, ...]) -> None:
        # module.compile() compiles the call with its hooks; ours go around it, so that the graph does not break.
        compiled = cast(Callable[..., Any], module._compiled_call_impl)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(module, units)
            try:
                return compiled(*args, **kwargs)
            finally:
                self.leave(module, units)

        module._compiled_call_impl = call
        self._wrapped.append((module, compiled))

    # --------------------------------------------------------------------------------------------------- state_dict
    def bracket_state_dict(self, module: nn.Module) -> None:
        """Know whether ``state_dict`` is running: parameters then give snapshots, tied ones the same."""
        pre = _Hook(lambda *_: self._begin_state_dict(), ())
        post = _Hook(lambda *_: self._end_state_dict(), ())
        self._handles.append(module.register_state_dict_pre_hook(pre))
        self._handles.append(module.register_state_dict_post_hook(post))
        pre.table, post.table = module._state_dict_pre_hooks, module._state_dict_hooks

    def _begin_state_dict(self) -> None:
        if not self.in_state_dict():
            self._local.snapshots = {}
            self._local.state_dict_frame = _frame_of_caller()

    def _end_state_dict(self) -> None:
        if getattr(self._local, "state_dict_frame", None) is _frame_of_caller():
            self._local.snapshots, self._local.state_dict_frame = {}, None

    def in_state_dict(self) -> bool:
        """Whether this thread is inside ``state_dict`` of one of the engine's modules.

        Asked of the call stack: one that ended by an exception has run no hook of ours at its end.
        """
        outermost = getattr(self._local, "state_dict_frame", None)
        if outermost is None:
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not outermost:
            frame = frame.f_back
        if frame is None:
            self._local.snapshots, self._local.state_dict_frame = {}, None
        return frame is not None

    def snapshots(self) -> dict[ParamSlot, torch.Tensor]:
        """What this thread's running ``state_dict`` has given out so far."""
        return self._local.snapshots  # type: ignore[no-any-return]

    def close(self) -> None:
        """Take every hook out again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, compiled in self._wrapped:
            module._compiled_call_impl = compiled
        self._wrapped.clear()
        self._recompute.clear()
