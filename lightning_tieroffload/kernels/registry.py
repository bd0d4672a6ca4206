"""Floor 3. Which optimizers have a kernel of ours, and how to run one.

Owns the mapping from an optimizer's class and parameter group to a kernel, and the checks at the edge. Imports torch
and Numba only when it is asked something. The memory is the caller's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightning_tieroffload.errors import TierOffloadError, UnsupportedError
from lightning_tieroffload.kernels.pool import KernelPool

if TYPE_CHECKING:
    from lightning_tieroffload.kernels.primitives import LazyKernel
    from lightning_tieroffload.kernels.split import SplitMaster

__all__ = ["NumberFormat", "UpdateKernel", "find_kernel", "refusal_reason"]

NumberFormat = Literal["f32", "bf16", "f16"]
Family = Literal["adamw", "adam", "sgd", "lion"]

# Keys of a Lion group that do not change the rule: what the paper's form has, and what schedulers and users add.
_LION_RULE_KEYS = frozenset({"params", "lr", "betas", "weight_decay", "maximize"})
_HARMLESS_KEYS = frozenset(
    {"foreach", "fused", "differentiable", "capturable", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum",
     "max_momentum", "lr_scale", "name", "param_names"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UpdateKernel:
    """The update of one kind of optimizer. Get it from `find_kernel`; it holds no state and any thread may use it.

    ``state_names`` are the keys of ``optimizer.state[p]`` that hold fp32 arrays of the parameter's shape, in the order
    of the kernel's arguments; ``uses_step`` says whether the rule depends on the step number (``state["step"]``).
    """

    family: Family
    state_names: tuple[str, ...]
    uses_step: bool

    def run(
        self,
        pool: KernelPool,
        master: np.ndarray | SplitMaster,
        grad: np.ndarray,
        states: Mapping[str, np.ndarray],
        *,
        step: int,
        group: Mapping[str, Any],
        grad_scales: Sequence[float] | np.ndarray = (),
        round_scales_to: NumberFormat = "f32",
        grad_format: NumberFormat | None = None,
        wire: np.ndarray | None = None,
        wire_format: NumberFormat = "bf16",
        is_new_state: bool = False,
        priority: int = 0,
    ) -> None:
        """`submit` and wait; raises what went wrong."""
        self.submit(
            pool, master, grad, states, step=step, group=group, grad_scales=grad_scales,
            round_scales_to=round_scales_to, grad_format=grad_format, wire=wire, wire_format=wire_format,
            is_new_state=is_new_state, priority=priority,
        ).result()  # fmt: skip

    def submit(
        self,
        pool: KernelPool,
        master: np.ndarray | SplitMaster,
        grad: np.ndarray,
        states: Mapping[str, np.ndarray],
        *,
        step: int,
        group: Mapping[str, Any],
        grad_scales: Sequence[float] | np.ndarray = (),
        round_scales_to: NumberFormat = "f32",
        grad_format: NumberFormat | None = None,
        wire: np.ndarray | None = None,
        wire_format: NumberFormat = "bf16",
        is_new_state: bool = False,
        priority: int = 0,
        among_numel: int = 0,
        moments: int = 0,
    ) -> Future[None]:
        """Start the update of ``master`` and ``states`` in place, in the pool's threads.

        Arrays are 1-D, contiguous, equally long, and stay the caller's; they must stay alive and alone until the
        future is done. On failure some slices are updated and some are not: the arrays are then of no use.

        Args:
            master: float32, or the split form.
            grad: float32, float16, or uint16 bits of ``grad_format`` ("bf16" unless said). Not changed.
            states: float32 arrays under ``state_names``.
            step: the step that this update makes, 1 for the first.
            group: the parameter group: lr, betas and so on, numbers or 0-dim tensors.
            grad_scales: factors of the gradient in their order (unscale, clip), each product rounded on its own to
                ``round_scales_to``: the dtype of ``p.grad`` in the plain loop.
            wire: uint16, gets the 16-bit compute copy of the new master in ``wire_format``. With a split master the
                bfloat16 copy is ``master.hi_u16`` anyway.
            is_new_state: the state arrays hold nothing yet, as where torch has no state for the parameter: moments
                start at zero, SGD's momentum buffer at the gradient.
            priority, among_numel: see `KernelPool.submit`.
            moments: where `can_defer_moments` allows it, MOMENTS_LATER of adam.py: the state stays as it is until a
                second call with MOMENTS_ONLY and the same arguments, which leaves the master alone.

        Raises TierOffloadError for arrays that do not fit, before anything is written.
        """
        arrays = _checked_arrays(
            self, master, grad, states, grad_scales, grad_format, round_scales_to, wire, wire_format
        )
        kernel, scalars = _kernel_and_scalars(self, group, step, is_new_state)
        if moments:
            scalars = scalars._replace(moments=moments)
        args = (*arrays, scalars)
        kernel.prepare(*args)  # compile here, once, rather than in the first threads that get a slice

        def work(begin: int, end: int) -> None:
            kernel(begin, end, *args)

        return pool.submit(work, grad.size, priority=priority, among_numel=among_numel)

    def compile(self, group: Mapping[str, Any]) -> None:
        """Make the machine code, which is one for all forms: seconds of the calling thread's time, once a process."""
        nothing = np.empty(0, np.float32)
        states = dict.fromkeys(self.state_names, nothing)
        arrays = _checked_arrays(self, nothing, nothing, states, (), None, "f32", None, "bf16")
        kernel, scalars = _kernel_and_scalars(self, group, 1, True)
        kernel.prepare(*arrays, scalars)

    def can_defer_moments(self, group: Mapping[str, Any]) -> bool:
        """Whether the state can be updated in a second pass, from nothing but itself and the gradient."""
        return self.family == "adamw" or (self.family == "adam" and float(group["weight_decay"]) == 0)

    def scalars(self, group: Mapping[str, Any], step: int, is_new_state: bool) -> Any:
        """The host scalars of one step, for a kernel on another device."""
        return _kernel_and_scalars(self, group, step, is_new_state)[1]


def find_kernel(optimizer_cls: type, group: Mapping[str, Any], param_dtype: Any) -> UpdateKernel | None:
    """The kernel whose results are those of ``optimizer_cls`` on ``group``, or None: see `refusal_reason`.

    ``param_dtype`` is the dtype of the master (a torch dtype, or its name). SGD's ``state_names`` follow the group's
    momentum, so ask again when that changes between zero and not.
    """
    if refusal_reason(optimizer_cls, group, param_dtype) is not None:
        return None
    family = _family_of(optimizer_cls)
    if family == "sgd":
        return UpdateKernel("sgd", ("momentum_buffer",) if float(group["momentum"]) != 0 else (), uses_step=False)
    if family == "lion":
        return UpdateKernel("lion", ("exp_avg",), uses_step=False)
    is_decoupled = family == "adamw" or bool(group.get("decoupled_weight_decay", False))
    return UpdateKernel("adamw" if is_decoupled else "adam", ("exp_avg", "exp_avg_sq"), uses_step=True)


def refusal_reason(optimizer_cls: type, group: Mapping[str, Any], param_dtype: Any) -> str | None:
    """Why `find_kernel` gives None, as a sentence with what to do; None where there is a kernel."""
    name = f"{optimizer_cls.__module__}.{optimizer_cls.__qualname__}"
    instead = 'Set optimizer_kernel="torch" to run the class itself.'
    family = _family_of(optimizer_cls)
    if family is None:
        return f"{name} has no kernel of ours (known: torch's AdamW, Adam, SGD, and Lion; exact classes). {instead}"
    if str(param_dtype).removeprefix("torch.") != "float32":
        return f"{name} on {param_dtype} parameters has no kernel of ours, which need an fp32 master. {instead}"
    for flag in ("amsgrad", "differentiable", "capturable"):
        if group.get(flag, False):
            return f"{name} with {flag}=True has no kernel of ours. {instead}"
    if family == "lion":
        unknown = sorted(
            key
            for key, value in group.items()
            if key not in _LION_RULE_KEYS | _HARMLESS_KEYS
            and not isinstance(value, str)
            and not (value is None or value is False)
        )
        missing = sorted({"lr", "betas", "weight_decay"} - group.keys())
        if unknown or missing:
            what = (
                f"has settings that the paper's rule has not ({', '.join(unknown)})"
                if unknown
                else (f"lacks {', '.join(missing)}")
            )
            return f"{name} {what}, so it may be another rule of the same name. {instead}"
        if len(group["betas"]) != 2:
            return f"{name} has {len(group['betas'])} betas, the paper's rule has 2. {instead}"
    return None


def _family_of(optimizer_cls: type) -> Family | None:
    import torch

    known: dict[type, Family] = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
    if optimizer_cls in known:
        return known[optimizer_cls]
    return "lion" if optimizer_cls.__name__ == "Lion" else None


def _kernel_and_scalars(
    update: UpdateKernel, group: Mapping[str, Any], step: int, is_new_state: bool
) -> tuple[LazyKernel, Any]:
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    maximize = bool(group.get("maximize", False))
    if update.family == "sgd":
        from lightning_tieroffload.kernels.sgd import sgd_scalars, sgd_slice

        momentum = float(group["momentum"])
        if (momentum != 0) != bool(update.state_names):
            raise TierOffloadError(
                f"momentum={momentum} in the group, but this kernel was made for SGD "
                f"{'with' if update.state_names else 'without'} momentum: ask find_kernel again."
            )
        return sgd_slice, sgd_scalars(
            lr=lr, momentum=momentum, dampening=float(group["dampening"]), weight_decay=weight_decay,
            nesterov=bool(group["nesterov"]), maximize=maximize, is_new_state=is_new_state,
        )  # fmt: skip
    betas = (float(group["betas"][0]), float(group["betas"][1]))
    if update.family == "lion":
        from lightning_tieroffload.kernels.lion import lion_scalars, lion_slice

        return lion_slice, lion_scalars(
            lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize, is_new_state=is_new_state
        )
    from lightning_tieroffload.kernels.adam import adam_scalars, adam_slice

    if step < 1:
        raise TierOffloadError(f"step={step}: Adam counts the step that the update makes, 1 for the first.")
    return adam_slice, adam_scalars(
        lr=lr, betas=betas, eps=float(group["eps"]), weight_decay=weight_decay, step=step,
        decoupled=update.family == "adamw", maximize=maximize, is_new_state=is_new_state,
    )  # fmt: skip


def _checked_arrays(
    update: UpdateKernel,
    master: np.ndarray | SplitMaster,
    grad: np.ndarray,
    states: Mapping[str, np.ndarray],
    grad_scales: Sequence[float] | np.ndarray,
    grad_format: NumberFormat | None,
    round_scales_to: NumberFormat,
    wire: np.ndarray | None,
    wire_format: NumberFormat,
) -> tuple[Any, ...]:
    """The kernel's arguments but its scalars, checked: compiled code would write past an array that is too short."""
    from lightning_tieroffload.kernels.primitives import BFLOAT16, FLOAT16, FLOAT32, NO_F32, NO_U8, NO_U16
    from lightning_tieroffload.kernels.split import num_tie_bytes

    formats = {"f32": FLOAT32, "bf16": BFLOAT16, "f16": FLOAT16}
    numel = grad.size
    grad_f32, grad_u16 = NO_F32, NO_U16
    if grad.dtype == np.float32 and grad_format in (None, "f32"):
        grad_f32, grad_code = _checked("the gradient", grad, np.float32, numel), FLOAT32
    elif grad.dtype == np.float16 and grad_format in (None, "f16"):
        grad_u16, grad_code = _checked("the gradient", grad.view(np.uint16), np.uint16, numel), FLOAT16
    elif grad.dtype == np.uint16 and grad_format in (None, "bf16", "f16"):
        grad_u16, grad_code = _checked("the gradient", grad, np.uint16, numel), formats[grad_format or "bf16"]
    else:
        raise UnsupportedError(
            f"a gradient of dtype {grad.dtype.name} as {grad_format or 'what it says'}: pass float32, float16, or "
            "uint16 bits with grad_format 'bf16' or 'f16'."
        )
    if isinstance(master, np.ndarray):
        masters = (_checked("the master", master, np.float32, numel, writes=True), NO_U16, NO_U16, NO_U8)
    else:
        masters = (
            NO_F32,
            _checked("the master's high half", master.hi_u16, np.uint16, numel, writes=True),
            _checked("the master's low half", master.lo_u16, np.uint16, numel, writes=True),
            _checked("the master's tie bits", master.ties_u8, np.uint8, num_tie_bytes(numel), writes=True),
        )
    missing = [name for name in update.state_names if name not in states]
    if missing:
        raise TierOffloadError(f"the state array {missing[0]} is missing; {update.family} needs {update.state_names}.")
    state = [_checked(name, states[name], np.float32, numel, writes=True) for name in update.state_names]
    state += [NO_F32] * (2 - len(state))
    copy_u16 = NO_U16
    if wire is not None:
        if wire_format not in ("bf16", "f16"):
            raise UnsupportedError(f"wire_format={wire_format!r}: the compute copy is 'bf16' or 'f16'.")
        copy_u16 = _checked("the compute copy", wire, np.uint16, numel, writes=True)
    if round_scales_to not in formats:
        raise UnsupportedError(f"round_scales_to={round_scales_to!r} must be one of 'f32', 'bf16', 'f16'.")
    scales_f32 = np.array(grad_scales, dtype=np.float32).reshape(-1)
    return (
        *masters, grad_f32, grad_u16, grad_code, scales_f32, formats[round_scales_to], *state, copy_u16,
        formats[wire_format],
    )  # fmt: skip


def _checked(what: str, array: np.ndarray, dtype: Any, numel: int, *, writes: bool = False) -> np.ndarray:
    if array.dtype != dtype or array.shape != (numel,) or not array.flags.c_contiguous or not array.flags.aligned:
        raise TierOffloadError(
            f"{what} must be an aligned, contiguous 1-D {np.dtype(dtype).name} array of {numel} elements; it is "
            f"{array.dtype.name} of shape {array.shape} with strides {array.strides}."
        )
    if writes and not array.flags.writeable:
        raise TierOffloadError(f"{what} is read-only memory, and the update writes it.")
    # Read-only inputs are another type to Numba, which would compile the kernel again: copy (rare, and once a step).
    return array if array.flags.writeable else array.copy()
