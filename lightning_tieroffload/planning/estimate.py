"""Floor 6. A profile with no run at all: from a configuration, on tensors that have shapes and no memory.

Owns the walk of one forward pass under ``FakeTensorMode``: every operation runs its shape rule only, so that a 70 B
model takes no memory and no arithmetic. Counts per unit what autograd saves and the floating-point operations; turns
those into seconds with a machine profile's rate. Measures nothing.

[Note: estimated figures]
Activation bytes: every distinct storage that autograd saves while the unit runs, parameters and attention masks left
out (a fused attention kernel on the device takes "causal" as a flag). Forward seconds: operations over the machine's
training rate; a causal attention does half of the square; backward is twice forward (two products for each one).
Workspace: twice the largest saved tensor, for its gradient and one temporary, and what a part that checkpoints itself
(a loss that is taken in parts) saves when it is run again. Parameters that no single module stands
for (the embedding, often tied to the head, and the last norm) stay on the device as one unit, placed last, where the
loss needs them.
"""

from __future__ import annotations

import logging
import os
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_tieroffload.engine.units import find_units
from lightning_tieroffload.errors import ConfigError, UnsupportedError
from lightning_tieroffload.llama_shape import LLAMA_SIZES, LlamaShape, LlamaSize
from lightning_tieroffload.planning.profile import MachineProfile, Profile, UnitProfile
from lightning_tieroffload.whole_file import parse_json

__all__ = ["PRECISIONS", "estimate_profile", "profile_of_model", "read_model_config"]

_log = logging.getLogger("lightning_tieroffload")

_LOSS_POSITIONS = 2048  # as bench train's model takes the loss
_MOST_LOSS_PARTS = 1024  # of a batch of millions of tokens parts are larger: each is a walk
_SLOW_S = 10.0
"""After so long a walk says how far it is, once."""


@dataclass(frozen=True, slots=True)
class _Precision:
    dtype: torch.dtype
    param_nbytes: float
    state_nbytes: float
    """Per element, of an Adam's state and whatever of the master is not in the compute copy."""
    rate_frac: float
    """Matmul rate relative to 16 bit."""


PRECISIONS = {
    # 16-bit copy and low half with one tie bit per element are the fp32 weight; two fp32 moments.
    "bf16-mixed": _Precision(torch.bfloat16, 2, 10.125, 1.0),
    "bf16-true": _Precision(torch.bfloat16, 2, 4, 1.0),
    "32-true": _Precision(torch.float32, 4, 8, 0.1),
}
"""Bytes per parameter element, by the trainer's name of the precision; gradients have the compute copy's dtype."""


def read_model_config(source: str) -> Any:
    """A transformers configuration from a directory or a ``config.json``.

    Raises ``ConfigError`` that says what was tried.
    """
    from transformers import AutoConfig

    path = Path(source)
    folder = path.parent if os.path.isfile(path) else path
    file = path if os.path.isfile(path) else path / "config.json"
    if not os.path.isfile(file):
        raise ConfigError(
            f"{source!r} is neither a directory with a config.json, nor such a file, nor one of the sizes "
            f"{', '.join(LLAMA_SIZES)}. Save one with model.config.save_pretrained(directory)."
        )
    try:
        fields = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{os.fspath(file)} is not a model configuration: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(
            f"{os.fspath(file)} is not a model configuration: it has no model_type. Save one with "
            "model.config.save_pretrained(directory)."
        )
    try:
        if file.name == "config.json":
            return AutoConfig.from_pretrained(os.fspath(folder), local_files_only=True)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except Exception as error:  # each family checks its own fields, with errors of many classes
        raise ConfigError(f"{os.fspath(file)} is not a model configuration: {_in_short(error)}") from error


def _in_short(error: Exception) -> str:
    # Transformers lists every class that it knows.
    return textwrap.shorten(str(error) or repr(error), 300, placeholder=" ...")


def estimate_profile(
    source: str,
    machine: MachineProfile,
    *,
    batch: int = 1,
    seq: int = 1024,
    precision: str = "bf16-mixed",
    units: Any = "auto",
) -> Profile:
    """The profile of a causal language model from its configuration; see [Note: estimated figures].

    A size of ``bench train`` is its model, whose layers do not checkpoint themselves: a plan says what is recomputed.
    ``batch`` sequences of ``seq`` tokens are one micro-batch. Nothing is downloaded, allocated or computed. Raises
    ``ConfigError`` for a configuration that cannot be read, ``UnsupportedError`` for a forward that needs values.
    """
    kind = _precision(precision)
    if source in LLAMA_SIZES:
        return profile_of_model(
            lambda: _bench_model(LLAMA_SIZES[source], batch, seq, kind.dtype),
            lambda: {"ids": torch.zeros(batch, seq, dtype=torch.long)},
            machine, precision=precision, units=units, batch_key=f"{batch}x{seq}", masked_length=seq,
            reruns=("_loss",),
        )  # fmt: skip
    from transformers import AutoModelForCausalLM

    config = read_model_config(source)
    if hasattr(config, "use_cache"):
        config.use_cache = False

    def build() -> nn.Module:
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=kind.dtype)  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever the model's constructor makes of sizes that cannot be
            raise ConfigError(f"{source}: no causal language model can be built from it: {_in_short(error)}") from error
        return model

    def inputs() -> dict[str, torch.Tensor]:
        tokens = torch.zeros(batch, seq, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return profile_of_model(
        build, inputs, machine, precision=precision, units=units, batch_key=f"{batch}x{seq}", masked_length=seq
    )


def _bench_model(shape: LlamaSize, batch: int, seq: int, dtype: torch.dtype) -> LlamaShape:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # fake parameters cannot be converted in place
    try:
        parts = max(_LOSS_POSITIONS, batch * seq // _MOST_LOSS_PARTS)
        return LlamaShape(shape, max_length=seq, recompute=False, loss_positions=parts)
    finally:
        torch.set_default_dtype(before)


def _precision(name: str) -> _Precision:
    if name not in PRECISIONS:
        raise ConfigError(f"precision={name!r} is unknown; choose one of {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


@dataclass(slots=True)
class _Tally:
    flop: float = 0.0
    saved_nbytes: int = 0
    largest_nbytes: int = 0
    again_nbytes: int = 0
    boundary_nbytes: int = 0
    first_run: int | None = None
    tensors: list[torch.Tensor] = field(default_factory=list)


class _Walk:
    """Attributes saved tensors and operations of one forward to the unit that is running, else to the rest."""

    def __init__(self, params: set[int], counter: FlopCounterMode, masked_length: int, num_units: int) -> None:
        self.tallies: dict[str, _Tally] = {}
        self.running: list[str] = []
        self.num_runs = 0
        self._params = frozenset(params)
        self._seen = params
        self._again: dict[int, torch.Tensor] = {}
        self._counter = counter
        self._masked_length = masked_length
        self._mark = 0.0
        self._num_units = num_units
        self._begin_s = time.monotonic()
        self._is_slow_said = False

    def tally(self, name: str) -> _Tally:
        return self.tallies.setdefault(name, _Tally())

    def _settle(self) -> None:
        total = float(self._counter.get_total_flops())
        self.tally(self.running[-1] if self.running else "").flop += total - self._mark
        self._mark = total

    def _say_if_slow(self) -> None:
        passed_s = time.monotonic() - self._begin_s
        if self._is_slow_said or passed_s < _SLOW_S:
            return
        self._is_slow_said = True
        _log.warning(
            "%d of %d units walked in %.0f s: a forward that loops over positions, as transformers' Mamba without its "
            "compiled kernels, is slow on shapes too. A shorter --seq takes as much less time.",
            len(self.tallies.keys() - {""}), self._num_units, passed_s,
        )  # fmt: skip

    def enter(self, name: str, inputs: Any) -> None:
        self._settle()
        self._say_if_slow()
        self.running.append(name)
        tally = self.tally(name)
        if tally.first_run is None:
            tally.first_run = self.num_runs
            tally.boundary_nbytes = sum(x.nbytes for x in inputs if isinstance(x, torch.Tensor))
        self.num_runs += 1

    def leave(self) -> None:
        self._settle()
        self.running.pop()

    def finish(self) -> None:
        self._settle()

    def _is_mask(self, tensor: torch.Tensor) -> bool:
        return tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[-2:] == (self._masked_length,) * 2

    def rerun(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """``inner``, which is called under a checkpoint of the model's own."""

        def run(*args: Any) -> Any:
            with self._running_again():
                return inner(*args)

        return run

    @contextmanager
    def _running_again(self) -> Iterator[None]:
        """What is saved in here is dropped with it, and comes back when backward runs it again."""
        self._again.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._save_again, lambda tensor: tensor):
            yield
        tally = self.tally(self.running[-1] if self.running else "")
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._again.values()]
        tally.again_nbytes = max(tally.again_nbytes, sum(sizes))
        tally.largest_nbytes = max([tally.largest_nbytes, *sizes])

    def _save_again(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in self._params:
            self._again[key] = tensor
        return tensor

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen and not self._is_mask(tensor):
            self._seen.add(key)
            tally = self.tally(self.running[-1] if self.running else "")
            tally.tensors.append(tensor)  # a freed storage's key could come again
            nbytes = tensor.numel() * tensor.element_size()
            tally.saved_nbytes += nbytes
            tally.largest_nbytes = max(tally.largest_nbytes, nbytes)
        return tensor


def _flash_flop(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> float:
    """Two products over the causal half of (query, key) pairs: (b, h, s, d) shapes."""
    batch, heads, length, width = query
    return float(batch * heads * length * key[-2] * (width + value[-1]))


@dataclass(frozen=True, slots=True)
class _Cut:
    """One unit by name: its module's name (``None``: no single module stands for it) and its elements."""

    name: str
    module: str | None
    numel: int
    trained_numel: int


def _cut(model: nn.Module, units: Any) -> list[_Cut]:
    names = {id(module): name for name, module in model.named_modules()}
    return [
        _Cut(
            unit.name,
            None if unit.root is None else names[id(unit.root)],
            sum(param.numel() for _, param in unit.params),
            sum(param.numel() for _, param in unit.params if param.requires_grad),
        )
        for unit in find_units(model, units).units
    ]


@contextmanager
def _watching(walk: _Walk, model: nn.Module, cuts: list[_Cut], reruns: Sequence[str]) -> Iterator[None]:
    for name in reruns:
        setattr(model, name, walk.rerun(getattr(model, name)))
    for cut in cuts:
        if cut.module is None:
            continue
        root = model.get_submodule(cut.module)

        def enter(module: nn.Module, args: Any, kwargs: Any, name: str = cut.name) -> None:
            walk.enter(name, [*args, kwargs.get("hidden_states")])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            walk.leave()

        root.register_forward_pre_hook(enter, with_kwargs=True)
        root.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(walk.save, lambda tensor: tensor):
        yield


def profile_of_model(
    build: Callable[[], nn.Module],
    inputs: Callable[[], dict[str, Any]],
    machine: MachineProfile,
    *,
    precision: str = "bf16-mixed",
    units: Any = "auto",
    batch_key: str = "",
    masked_length: int = -1,
    reruns: Sequence[str] = (),
) -> Profile:
    """The profile of the model that ``build`` makes, run once on ``inputs()``, its forward's keywords.

    ``build`` is called twice: on the meta device, where parameters are ordinary enough to be cut into units, and under
    fake tensors, which can run forward. ``masked_length``: the sequence length, by which attention masks are known.
    ``reruns``: the model's methods that its forward calls under a checkpoint of its own.
    """
    kind = _precision(precision)
    with torch.device("meta"):
        found = _cut(build(), units)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={flash: _flash_flop})
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        walk = _Walk({p.untyped_storage()._cdata for p in model.parameters()}, counter, masked_length, len(found))
        try:
            with counter, _watching(walk, model, found, reruns):
                model(**inputs())
                walk.finish()
        except RuntimeError as error:
            if "overflow" in str(error):
                raise ConfigError(
                    f"this batch has more elements than a tensor can ({error}). Take a smaller one."
                ) from error
            raise UnsupportedError(
                f"{type(model).__name__}: its forward needs values, not shapes only ({error}). Profile it with a run, "
                "and plan from the tieroffload_profile.json that is written."
            ) from error
    rate = machine.compute_flop_per_s * kind.rate_frac
    rest = walk.tallies.get("", _Tally())
    profiles: list[tuple[int, UnitProfile]] = []
    for position, unit in enumerate(found):
        tally = walk.tallies.get(unit.name, _Tally())
        is_alone = unit.module is not None and tally.first_run is not None
        if not is_alone and rest.saved_nbytes + rest.flop > 0:
            tally, rest = rest, _Tally()
        order = tally.first_run if is_alone and tally.first_run is not None else walk.num_runs + position
        profiles.append((order, _unit_profile(unit, tally, kind, rate, is_alone=is_alone)))
    if rest.saved_nbytes + rest.flop > 0:  # a model without a unit for the rest: the loss still takes memory and time
        forward_s = rest.flop / rate
        loss = UnitProfile(
            "loss", 0, 0, 0, 0, rest.saved_nbytes, forward_s, 2 * forward_s,
            can_recompute=False, can_offload_activation=False,
        )  # fmt: skip
        profiles.append((walk.num_runs + len(found), loss))
    ordered = tuple(profile for _, profile in sorted(profiles, key=lambda entry: entry[0]))
    return Profile(machine=machine, units=ordered, batch_key=batch_key, source="estimated")


def _unit_profile(unit: _Cut, tally: _Tally, kind: _Precision, rate: float, *, is_alone: bool) -> UnitProfile:
    numel, trained = unit.numel, unit.trained_numel
    forward_s = tally.flop / rate
    return UnitProfile(
        name=unit.name,
        param_numel=numel,
        param_nbytes=round(kind.param_nbytes * numel),
        grad_nbytes=round(kind.param_nbytes * trained),
        state_nbytes=round(kind.state_nbytes * trained),
        activation_nbytes=tally.saved_nbytes,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        boundary_nbytes=tally.boundary_nbytes,
        workspace_nbytes=2 * tally.largest_nbytes + tally.again_nbytes,
        update_numel=trained,
        can_stream_param=is_alone,
        can_recompute=is_alone,
        can_offload_activation=is_alone,
    )
