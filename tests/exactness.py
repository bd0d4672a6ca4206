"""One training function, run plain and under the engine, compared bit by bit after each step.

A *loop* is ``loop(model, optimizers, look)``: it trains, and calls ``look(loss=…, norm=…)`` after each step with what
it would log. ``look`` also takes down every parameter, buffer, optimizer-state tensor, hyper-parameter and the state of
the global random generators. Bit patterns are compared, so NaN and -0.0 count, and so do dtypes and shapes.

The slow store: ``debug="poison"`` fills memory with NaN before reuse; ``debug="delays"`` puts every copy and every
update off until somebody waits for it, in a seeded order. Both are virtual: nothing sleeps.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine import activations, offload_engine
from lightning_tieroffload.engine.offload_engine import OffloadEngine, spec_nbytes
from lightning_tieroffload.engine.units import find_units
from lightning_tieroffload.errors import InfeasiblePlanError

CPU = torch.device("cpu")
POISON = frozenset({"poison"})
SLOW = frozenset({"poison", "delays"})


# ---------------------------------------------------------------- what is compared


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bit pattern as bytes, in logical order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        return False
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and repr(a) == repr(b)
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        a, b = a.coalesce(), b.coalesce()
        return same_bits(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    return torch.equal(bits(a), bits(b))


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, torch.Tensor):
        into[prefix] = value.detach().clone()
    elif isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{prefix}/{key}", item, into)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _flatten(f"{prefix}/{index}", item, into)
    elif not callable(value):
        into[prefix] = value


def take_down(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Every parameter, buffer and optimizer-state entry of the moment, by name. Tensors are copies."""
    result: dict[str, Any] = {}
    state = model.state_dict()
    for name, value in state.items():
        _flatten(f"state_dict/{name}", value, result)
    for name, buffer in model.named_buffers():
        _flatten(f"buffer/{name}", buffer, result)
    for name, p in model.named_parameters():
        if name not in state:  # a module that hides it from its state_dict
            _flatten(f"param/{name}", p, result)
        result[f"requires_grad/{name}"] = p.requires_grad
    for index, optimizer in enumerate(optimizers):
        _flatten(f"optimizer{index}", optimizer.state_dict(), result)
    return result


def _generators() -> dict[str, Any]:
    return {
        "rng/torch": torch.get_rng_state(),
        "rng/python": repr(hash(random.getstate())),
        "rng/numpy": repr(hash(np.random.get_state()[1].tobytes())),
    }


@dataclass
class Recording:
    """What one run showed. ``looks[i]`` is step i's numbers; full ones also hold the state."""

    looks: list[dict[str, Any]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)


def assert_exact(plain: Recording, ours: Recording, what: str = "") -> None:
    """Every number that both runs took down is the same bit pattern, step by step."""
    assert len(plain.looks) == len(ours.looks), f"{what}: {len(plain.looks)} looks plain, {len(ours.looks)} ours"
    for step, (expected, actual) in enumerate(zip(plain.looks, ours.looks, strict=True)):
        is_full = any(not key.startswith(("log/", "rng/")) for key in actual)
        keys = set(expected) if is_full else {key for key in expected if key.startswith(("log/", "rng/"))}
        assert keys == set(actual), f"{what} look {step}: entries differ: {sorted(keys ^ set(actual))[:8]}"
        wrong = [key for key in expected if key in keys and not same_bits(expected[key], actual[key])]
        if wrong:
            key = wrong[0]
            raise AssertionError(
                f"{what} look {step}: {len(wrong)} of {len(keys)} entries differ, first {key}: "
                f"plain {_short(expected[key])}, ours {_short(actual[key])}; all: {wrong[:12]}"
            )


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return f"{value.dtype} {tuple(value.shape)} {value.reshape(-1)[:3].tolist()}"
    return repr(value)[:80]


# ---------------------------------------------------------------- budgets


def unit_nbytes(model: nn.Module, units: Any = "auto") -> list[int]:
    """Device bytes of each unit, padding included."""
    return [spec_nbytes(spec, CPU) for spec in find_units(model, units).units]


def starved(model: nn.Module, units: Any = "auto") -> int:
    """The largest layer plus one: room for the one that computes and for the next, or for its gradient."""
    return 2 * max(unit_nbytes(model, units), default=0)


def tight(model: nn.Module, units: Any = "auto") -> int:
    """The smallest device budget that the engine itself says it can work with."""
    config = TierOffloadConfig(device_budget=1, units=units)
    try:
        OffloadEngine.attach(model, config, CPU).close()
    except InfeasiblePlanError as error:
        assert error.tier == "device"
        assert error.least_budget_nbytes is not None
        return error.least_budget_nbytes
    raise AssertionError("a device budget of one byte was accepted")


# ---------------------------------------------------------------- runs

Loop = Callable[[Any, Any, Any], None]  # (model, optimizers, look)
Build = Callable[[], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Variant:
    """One way of running ours."""

    debug: frozenset[str] = POISON
    prefetch: int = 1
    seed: int = 0
    every_look: bool = True  # False: nobody looks at the state until the end, so no look waits for anything
    budget: str | int = "starved"  # "starved", "tight", "all" or bytes

    def __str__(self) -> str:
        looks = "each" if self.every_look else "end"
        return f"[{'+'.join(sorted(self.debug))} prefetch={self.prefetch} seed={self.seed} {self.budget} look={looks}]"


QUICK = (Variant(), Variant(debug=SLOW, prefetch=2, seed=1, every_look=False, budget="tight"))
FULL = (
    Variant(POISON, prefetch=1, budget="tight"),
    Variant(POISON, prefetch=4, budget="all"),
    Variant(SLOW, prefetch=4, seed=1, every_look=False),
    Variant(SLOW, prefetch=2, seed=2, every_look=False, budget="tight"),
)


@contextlib.contextmanager
def delay_seed(seed: int) -> Iterator[None]:
    """The seed of the virtual delays of engines that are attached meanwhile."""
    before = offload_engine._Core.delay_seed
    offload_engine._Core.delay_seed = seed
    try:
        yield
    finally:
        offload_engine._Core.delay_seed = before


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _as_list(optimizers: Any) -> list[Optimizer]:
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def attach(model: nn.Module, optimizers: Any, variant: Variant, **settings: Any) -> OffloadEngine:
    """Attach as ``variant`` says and adopt the optimizers."""
    units = settings.get("units", "auto")
    budget = variant.budget
    if budget == "starved":
        budget = max(starved(model, units), tight(model, units))
    elif budget == "tight":
        budget = tight(model, units)
    elif budget == "all":
        budget = 1 << 30
    config = TierOffloadConfig(
        **{
            "device_budget": budget,
            "dram_budget": "2GiB",
            "prefetch_units": variant.prefetch,
            "optimizer_kernel": "torch",
            "debug": sorted(variant.debug),
            **settings,
        }
    )
    with delay_seed(variant.seed):
        engine = OffloadEngine.attach(model, config, CPU)
    try:
        for optimizer in _as_list(optimizers):
            assert engine.adopt_optimizer(optimizer) is optimizer
    except BaseException:
        engine.close()
        raise
    return engine


class Look:
    """What a loop calls after each step. Called with what the loop would log; takes the state down beside it."""

    def __init__(self, model: nn.Module, optimizers: Any, variant: Variant | None, num_expected: int) -> None:
        self.model = model
        self.optimizers = optimizers
        self.recording = Recording()
        self.engine: OffloadEngine | None = None
        self._variant = variant
        self._num_expected = num_expected
        self._settings: dict[str, Any] = {}

    def attach(self, **settings: Any) -> None:
        if self._variant is not None:
            self._settings = settings
            self.engine = attach(self.model, self.optimizers, self._variant, **settings)

    def __call__(self, **numbers: Any) -> None:
        entry: dict[str, Any] = {}
        _flatten("log", numbers, entry)
        entry.update(_generators())
        is_last = len(self.recording.looks) + 1 >= self._num_expected
        if self._variant is None or self._variant.every_look or is_last:
            entry.update(take_down(self.model, _as_list(self.optimizers)))
        self.recording.looks.append(entry)
        if self.engine is not None and not self.engine.closed:
            assert_within_budget(self.engine)

    def continue_with(self, model: nn.Module, optimizers: Any) -> None:
        """Go on with another model, as a resumed run does: attached in the same way, the old engine closed."""
        self.close()
        self.model, self.optimizers = model, optimizers
        self.attach(**self._settings)

    def finish(self) -> None:
        """Close the engine and see that nothing but the engine is gone."""
        engine = self.engine
        if engine is None:
            return
        self.recording.reports.append(engine.report())
        params = list(self.model.parameters())
        before = take_down(self.model, _as_list(self.optimizers))
        engine.close()
        assert_ordinary(self.model)
        after = take_down(self.model, _as_list(self.optimizers))
        wrong = [key for key in before if not same_bits(before[key], after.get(key))]
        assert not wrong, f"close() changed {wrong[:8]}"
        assert all(a is b for a, b in zip(params, self.model.parameters(), strict=True)), "a parameter was replaced"
        for optimizer in _as_list(self.optimizers):
            assert not hasattr(optimizer, "_tieroffload_user_class")

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


def run(
    build: Build, loop: Loop, variant: Variant | None = None, *, num_expected: int = 0, seed: int = 0, **settings: Any
) -> Recording:
    """One run. ``variant`` None is the plain one; ``num_expected`` looks tells which one is the last."""
    seed_all(seed)
    model, optimizers = build()
    params = list(model.parameters())
    look = Look(model, optimizers, variant, num_expected)
    with one_thread(), small_activations():
        try:
            look.attach(**settings)
            assert all(a is b for a, b in zip(params, model.parameters(), strict=True)), "a parameter was replaced"
            loop(model, optimizers, look)
            look.finish()
        finally:
            look.close()
    return look.recording


@contextlib.contextmanager
def small_activations() -> Iterator[None]:
    """Activation offload takes tensors of any number of bytes: those of tests are all too small to be worth it."""
    before = activations.LEAST_NBYTES
    activations.LEAST_NBYTES = 1
    try:
        yield
    finally:
        activations.LEAST_NBYTES = before


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits. The number of threads is part of what plain and ours must share."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def assert_within_budget(engine: OffloadEngine) -> None:
    account = engine.report()["tiers"]["device"]
    assert account["peak_nbytes"] <= account["budget_nbytes"], (
        f"device peak {account['peak_nbytes']} bytes is over the budget of {account['budget_nbytes']}"
    )


def assert_ordinary(model: nn.Module) -> None:
    """Nothing of the engine is left on the model: classes, attributes, hooks."""
    for name, p in model.named_parameters():
        assert not hasattr(p, "_tieroffload_slot"), name
        assert type(p).__module__.split(".")[0] != "lightning_tieroffload", (name, type(p))
        assert p.untyped_storage().nbytes() >= p.numel() * p.element_size(), name
        assert not p.is_inference(), name
    for name, module in model.named_modules():
        for table in ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"):
            for hook in getattr(module, table).values():
                assert "lightning_tieroffload" not in type(hook).__module__, (name, table)


def check(
    build: Build, loop: Loop, variants: Sequence[Variant] = QUICK, *, seed: int = 0, **settings: Any
) -> tuple[Recording, list[Recording]]:
    """Run plain once and ours in every variant; all are exact. Returns the recordings for further questions."""
    plain = run(build, loop, seed=seed)
    assert plain.looks, "the loop never looked"
    ours = []
    for variant in variants:
        recording = run(build, loop, variant, num_expected=len(plain.looks), seed=seed, **settings)
        assert_exact(plain, recording, str(variant))
        ours.append(recording)
    return plain, ours
