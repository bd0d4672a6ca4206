"""Recompute that the engine imposes: equal to plain bit for bit where it happens, and not done where it would show."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from exactness import FULL, POISON, QUICK, SLOW, Variant, attach, check, one_thread, seed_all
from fakes import Block, Stack, batches, gpt_steps, gpt_tiny, mlp, mlp_loss
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.engine.params import managed_slot
from lightning_tieroffload.engine.recompute import Region
from lightning_tieroffload.planning.cost_model import ActivationChoice


def adamw(make: Callable[[], nn.Module]) -> Any:
    def build() -> Any:
        model = make()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return build


def steps(
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor] = mlp_loss,
    num_steps: int = 4,
    *shape: int,
    num_micro: int = 1,
    autocast: bool = False,
) -> Any:
    """The plain loop, with accumulation and autocast where asked."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        data = batches(num_steps * num_micro, *shape)
        for step in range(num_steps):
            for x in data[step * num_micro : (step + 1) * num_micro]:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, x)
                (loss / num_micro).backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    return loop


def recomputers(engine: OffloadEngine) -> dict[str, Any]:
    return {unit.name: recompute for unit, recompute in engine._hooks._recompute.items()}


def dropped_by(build: Any, loop: Any, variant: Variant = QUICK[0], **settings: Any) -> dict[str, Any]:
    """How often each unit's activations were dropped, or why they never are."""
    seed_all(0)
    model, optimizer = build()
    with one_thread():
        engine = attach(model, optimizer, variant, activations="recompute", **settings)
        loop(model, optimizer, lambda **_: None)
        found = {name: r.why_refused or r.why_not_now or r.num_dropped for name, r in recomputers(engine).items()}
        engine.close()
    return found


class Dropping(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 40), nn.Linear(40, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.3)


class Counting(nn.Module):
    """Convolution and batch norm, whose statistics must move once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Experts(nn.Module):
    """Four experts behind a router; each token goes to one."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero(as_tuple=True)[0]
            if len(rows) > 0:
                result = result.index_add(0, rows, expert(x[rows]).to(x.dtype))
        return x + result


class Tied(nn.Module):
    """An embedding whose weight is the head, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed((x.abs() * 7).long() % 50)
        for index, block in enumerate(self.blocks):
            if index != 1 or float(x[0, 0]) > 0:  # a conditional layer
                h = block(h)
        return self.head(h)


def stack_of(make: Callable[[], nn.Module], depth: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(make() for _ in range(depth)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(4), (16, 64)),
    "blocks": (Stack, (16, 24)),
    "dropout": (stack_of(Dropping), (16, 24)),
    "batch norm": (stack_of(Counting), (4, 4, 6, 6)),
    "experts": (stack_of(Experts), (16, 24)),
    "tied": (Tied, (8, 6)),
}


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_recompute_is_exact(name: str, autocast: bool, num_micro: int) -> None:
    """Losses, weights, buffers, optimizer state and the global generators are the plain run's, over the slow store."""
    make, shape = MODELS[name]
    loop = steps(mlp_loss, 4, *shape, num_micro=num_micro, autocast=autocast)
    check(adamw(make), loop, FULL, activations="recompute")


@pytest.mark.parametrize("name", MODELS)
def test_recompute_does_happen(name: str) -> None:
    """What is exact because nothing was recomputed would prove nothing: every unit with a module drops each time."""
    make, shape = MODELS[name]
    found = dropped_by(adamw(make), steps(mlp_loss, 4, *shape))
    assert found, "no unit was considered"
    found.pop("blocks.1" if name == "tied" else "", None)  # it does not run in every step
    assert set(found.values()) == {3}, found  # the first of four steps is watched


def test_nothing_is_held_between_forward_and_backward() -> None:
    """What autograd holds after forward is inputs only: the rest of a recomputed unit's activations is gone."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 512), nn.Linear(512, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x)))

    def held(activations: str) -> int:
        import gc

        model = nn.Sequential(*(Wide() for _ in range(4)))
        engine = attach(model, None, Variant(budget="all"), activations=activations)
        for _ in range(2):
            model(torch.randn(64, 16)).sum().backward()
        gc.collect()
        gc.disable()  # the inputs must not wait for the collector either
        # By type: asking a dead weak proxy of somebody else's for its class raises.
        before = {id(t) for t in gc.get_objects() if issubclass(type(t), torch.Tensor)}
        loss = model(torch.randn(64, 16)).sum()
        seen: dict[int, int] = {}
        for t in gc.get_objects():
            if issubclass(type(t), torch.Tensor) and id(t) not in before and t.layout == torch.strided:
                seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        gc.enable()
        loss.backward()
        engine.close()
        return sum(seen.values())

    assert held("recompute") < held("keep") / 4


def test_inputs_die_with_the_graph() -> None:
    """MEM-08's kin: a graph that is dropped without backward, or ends with an exception, leaves nothing behind."""
    import gc
    import weakref

    model = stack_of(Dropping)()
    engine = attach(model, None, Variant(budget="all"), activations="recompute")
    for _ in range(2):
        model(torch.randn(8, 24)).sum().backward()
    alive: list[Any] = []
    original = Region.__init__

    def noting(self: Region, owner: Any, args: Any, tensors: Any, modules: Any) -> None:
        original(self, owner, args, tensors, modules)
        alive.extend(weakref.ref(t) for t in tensors)

    Region.__init__ = noting  # type: ignore[method-assign]
    gc.disable()
    try:
        loss = model(torch.randn(8, 24)).sum()
        del loss
        assert not [ref for ref in alive if ref() is not None]
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(8, 23))
        assert not [ref for ref in alive if ref() is not None]
        model(torch.randn(8, 24)).sum().backward()
        assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()
        Region.__init__ = original  # type: ignore[method-assign]
    engine.close()


# ---------------------------------------------------------------- who is never recomputed


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.calls = 0
        self.log: list[int] = []
        self.generator = torch.Generator().manual_seed(3)
        self.counter = itertools.count()
        del self.counter
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(16, 24))


class CountsCalls(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls)


class KeepsAList(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(len(self.log))
        return torch.tanh(self.linear(x)) * (1 + 0.1 * len(self.log))


class DrawsPrivately(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * torch.rand(x.shape, generator=self.generator)


_generator = torch.Generator().manual_seed(5)
_calls: list[int] = []


class DrawsFromAGlobal(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * torch.rand(x.shape, generator=_generator)


class CountsInAGlobal(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _calls.append(1)
        return torch.tanh(self.linear(x)) * (1 + 0.1 * (len(_calls) % 7))


class DrawsFromPython(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * random.uniform(0.5, 1.5)


class DrawsFromNumpy(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * float(np.random.rand())


class WritesItsBuffer(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return torch.tanh(self.linear(x)) * self.total


class WritesACache(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old = self.cache.clone()
        self.cache[: len(x)] = x.detach()
        return torch.tanh(self.linear(x) + old[: len(x)])


class WritesItsInput(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x.mul_(1.5))) * 0.5


class StoresItsOutput(_Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = torch.tanh(self.linear(x))
        return self.last * 1.0


STATEFUL = (
    CountsCalls, KeepsAList, DrawsPrivately, DrawsFromAGlobal, CountsInAGlobal, DrawsFromPython, DrawsFromNumpy,
    WritesItsBuffer, WritesACache, WritesItsInput, StoresItsOutput,
)  # fmt: skip


@pytest.mark.parametrize("kind", STATEFUL)
def test_what_would_show_is_refused(kind: Any) -> None:
    """A forward that counts, draws from a generator of its own, writes a cache or its input: exact, and kept."""

    def build() -> Any:
        _generator.manual_seed(5)
        _calls.clear()
        model = nn.Sequential(nn.Linear(24, 24), *(kind() for _ in range(3)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    loop = steps(mlp_loss, 4, 16, 24)
    check(build, loop, QUICK, activations="recompute")
    found = dropped_by(build, loop)
    refused = [each for name, each in found.items() if name != "0"]
    assert [type(each) for each in refused] == [str] * 3, found


def test_a_counter_in_a_closure_is_refused() -> None:
    """State that lives outside the module, in a variable that its forward closes over, counts too."""

    def build() -> Any:
        num_calls = 0

        class Closing(_Base):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                nonlocal num_calls
                num_calls += 1
                return torch.tanh(self.linear(x)) * (1 + 0.1 * (num_calls % 5))

        model = nn.Sequential(*(Closing() for _ in range(3)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    loop = steps(mlp_loss, 3, 16, 24)
    check(build, loop, QUICK, activations="recompute")
    assert all(each == "its forward changes Python state" for each in dropped_by(build, loop).values())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_models_own_checkpoint_is_left_alone(use_reentrant: bool) -> None:
    """Around a unit or inside it: nothing of ours is put on top."""

    class Around(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(x)

    loop = steps(mlp_loss, 4, 16, 24)
    check(adamw(Around), loop, QUICK, activations="recompute")
    found = dropped_by(adamw(Around), loop)
    assert not any(isinstance(each, int) for name, each in found.items() if name.startswith("blocks")), found


def test_evaluation_is_never_recomputed() -> None:
    """Neither ``no_grad`` nor ``eval()`` with gradients on."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 16, 24):
            model.eval()
            with torch.no_grad():
                seen = model(x)
            loss = mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, seen=seen)
            model.train()

    check(adamw(stack_of(Dropping)), loop, QUICK, activations="recompute")
    assert set(dropped_by(adamw(stack_of(Dropping)), loop).values()) == {"evaluation"}


def test_training_flags_and_attributes_are_those_of_forward() -> None:
    """``eval()`` and a changed attribute between forward and backward do not reach the forward that runs again."""

    class Scaling(Dropping):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.tanh(x) * self.scale)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for index, x in enumerate(batches(5, 16, 24)):
            model.train()
            for block in model:
                block.scale = 1.0 + 0.1 * index
            loss = mlp_loss(model, x)
            if index > 1:
                model.eval()
                for block in model:
                    block.scale = -1.0
            loss.backward()
            assert not index > 1 or (not model.training and model[0].scale == -1.0)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(adamw(stack_of(Scaling)), loop, QUICK, activations="recompute")


def test_a_hook_that_comes_between_does_not_see_the_second_run() -> None:
    """Hooks that user code puts on a unit: one that is there is a reason to keep, one that came since stays silent."""
    model = stack_of(Dropping)()
    engine = attach(model, None, Variant(budget="all"), activations="recompute")
    for _ in range(2):
        model(torch.randn(8, 24)).sum().backward()
    loss = model(torch.randn(8, 24)).sum()
    seen: list[int] = []
    handle = model[1].register_forward_hook(lambda *_: seen.append(1))
    model[1].up.register_forward_hook(lambda *_: seen.append(2))
    loss.backward()
    assert seen == []
    model(torch.randn(8, 24)).sum().backward()
    assert seen == [2, 1]
    handle.remove()
    engine.close()


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    """Plain torch would not notice a changed bias, and the second forward would: said, not computed."""
    model = stack_of(Dropping)()
    engine = attach(model, None, Variant(budget="all"), activations="recompute")
    for _ in range(2):
        model(torch.randn(8, 24)).sum().backward()
    loss = model(torch.randn(8, 24)).sum()
    with torch.no_grad():
        model[1].up.bias.add_(1)
    with pytest.raises(RuntimeError, match="unit 1 recomputes its activations"):
        loss.backward()
    engine.reset()
    engine.close()


# ---------------------------------------------------------------- what surrounds forward alone

_strength = contextvars.ContextVar("strength", default=1.0)
_thread_local = threading.local()
_thread_local.strength = 1.0


class Attending(nn.Module):
    """Shows all that surrounds it: attention's backend, the convolution's, default dtype, a buffer, two globals."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(24, 72)
        self.convolve = nn.Conv1d(8, 8, 3, padding=1)
        self.register_buffer("gain", torch.ones(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 12)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        noise = torch.randn(y.shape).float() * (torch.tensor(0.1) * 0.3).float()
        return torch.tanh(x + self.convolve(y) * self.gain * _strength.get() * _thread_local.strength + noise)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def globals_set() -> Iterator[None]:
    token = _strength.set(1.3)
    _thread_local.strength = 0.7
    try:
        yield
    finally:
        _strength.reset(token)
        _thread_local.strength = 1.0


def lent_parameters(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A step of gradient descent inside the loss, as meta-learning takes it."""
    params = dict(model.named_parameters())
    first = torch.func.functional_call(model, params, (x,)).pow(2).mean()
    grads = torch.autograd.grad(first, list(params.values()), create_graph=True)
    fast = {name: p - 0.1 * grad for (name, p), grad in zip(params.items(), grads, strict=True)}
    return torch.func.functional_call(model, fast, (x,)).pow(2).mean()


def lent_buffers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    buffers = {name: torch.rand_like(b) for name, b in model.named_buffers()}
    return torch.func.functional_call(model, buffers, (x,)).pow(2).mean()


def around(context: Callable[[], Any]) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with context():
            return model(x).pow(2).mean()

    return loss_of


SURROUNDINGS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "attention": around(lambda: sdpa_kernel([SDPBackend.MATH])),
    "mkldnn": around(lambda: torch.backends.mkldnn.flags(enabled=False)),
    "default dtype": around(default_dtype),
    "globals": around(globals_set),
    "parametrizations": around(parametrize.cached),
    "lent parameters": lent_parameters,
    "lent buffers": lent_buffers,
}


@pytest.mark.parametrize("activations", ["recompute", "auto"])
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_surrounds_forward_alone(name: str, first: int, activations: str) -> None:
    """From step ``first`` on, forward's surroundings are gone when backward comes: activations stay, nothing fails."""

    def make() -> nn.Module:
        # Attention's fast backward on a CPU has no derivative of its own.
        model = stack_of(Dropping if name == "lent parameters" else Attending, 3)()
        if name == "parametrizations":
            for block in model:
                parametrizations.weight_norm(block.project)
        return model

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 2, 8, 24)):
            loss = SURROUNDINGS[name](model, x) if step >= first else model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    variants = [Variant(budget="all"), Variant(SLOW, prefetch=2, seed=1, every_look=False, budget="all")]
    check(adamw(make), loop, variants, activations=activations)


def test_globals_that_stay_may_vary() -> None:
    """A global that forward reads and the loop sets before each step is no reason to keep."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 2, 8, 24)):
            _thread_local.strength = 1.0 + 0.1 * step
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)
        _thread_local.strength = 1.0

    build = adamw(stack_of(Attending, 3))
    check(build, loop, [Variant(budget="all")], activations="recompute")
    assert set(dropped_by(build, loop, Variant(budget="all")).values()) == {4}


def test_a_list_that_is_another_in_backward_is_not_computed_with() -> None:
    """Deep in an attribute, changed in place around forward alone: said, not computed."""

    class Configured(Dropping):
        def __init__(self) -> None:
            super().__init__()
            self.settings = {"scale": [1.0]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.settings["scale"][0]

    model = stack_of(Configured)()
    engine = attach(model, None, Variant(budget="all"), activations="recompute")
    for _ in range(2):
        model(torch.randn(8, 24)).sum().backward()
    model[1].settings["scale"][0] = 2.0
    loss = model(torch.randn(8, 24)).sum()
    model[1].settings["scale"][0] = 1.0
    with pytest.raises(RuntimeError, match="unit 1 recomputes its activations"):
        loss.backward()
    engine.reset()
    engine.close()


@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_updates_inside_autocast(activations: str) -> None:
    """Autocast goes on with the casts that it made before the update, so a second run outside would see others."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(5, 16, 64)):
            with torch.autocast("cpu", torch.bfloat16):
                if step % 2:
                    mlp_loss(model, x).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                loss = mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(adamw(lambda: mlp(4)), loop, FULL, activations=activations)


@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_backward_one_step_late(activations: str) -> None:
    """Where only biases learn plain lets an update come before backward: watched calls that wait are noticed."""

    def make() -> nn.Module:
        model = mlp(4)
        for name, p in model.named_parameters():
            p.requires_grad_("bias" in name)
        return model

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        late = None
        for x in batches(6, 16, 64):
            loss = mlp_loss(model, x)
            if late is not None:
                late.backward()
                optimizer.step()
                optimizer.zero_grad()
            look(loss=loss)
            late = loss

    check(adamw(make), loop, QUICK, activations=activations)


# ---------------------------------------------------------------- per unit, and with others


def test_choices_may_differ_by_unit() -> None:
    """Keep, recompute and offload in one model, changed between steps: exact over the slow store."""
    order = (ActivationChoice.KEEP, ActivationChoice.RECOMPUTE, ActivationChoice.OFFLOAD_DRAM)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(8, 16, 24)):
            engine = engine_of(model)
            for index, unit in enumerate(engine.units if engine is not None else ()):
                import dataclasses

                unit.choice = dataclasses.replace(unit.choice, activation=order[(index + step // 2) % 3])
            loss = mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    _, ours = check(adamw(stack_of(Dropping)), loop, FULL)
    assert all(recording.reports[0]["moved_nbytes"]["d2h"] > 0 for recording in ours)


@pytest.mark.parametrize("use_cache", [False, True])
def test_hugging_face_layers(use_cache: bool) -> None:
    """Recomputed without a cache; with ``use_cache`` the layers get a cache object, which is a reason to keep."""

    def build() -> Any:
        model = gpt_tiny(resid_pdrop=0.1)
        model.train()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    loop = gpt_steps(4, use_cache=use_cache)
    check(build, loop, QUICK, activations="recompute")
    layers = [each for name, each in dropped_by(build, loop).items() if ".h." in name]
    assert layers == (["an input is a DynamicCache"] * 2 if use_cache else [3, 3])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_hugging_face_gradient_checkpointing_is_left_alone(use_reentrant: bool) -> None:
    """What ``Trainer(gradient_checkpointing=True)`` turns on: layers checkpoint themselves, nothing is added."""

    def build() -> Any:
        model = gpt_tiny(resid_pdrop=0.1)
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    loop = gpt_steps(4, use_cache=False)
    check(build, loop, QUICK, activations="recompute")
    layers = [each for name, each in dropped_by(build, loop).items() if ".h." in name]
    assert not any(isinstance(each, int) and each > 0 for each in layers), layers


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", MODELS)
def test_recompute_seeds(name: str, seed: int) -> None:
    """More seeds of the slow store, at every budget."""
    make, shape = MODELS[name]
    variants = [
        Variant(SLOW, prefetch=p, seed=seed, every_look=False, budget=b) for p in (1, 4) for b in ("tight", "all")
    ]
    check(adamw(make), steps(mlp_loss, 5, *shape, num_micro=1 + seed % 2), variants, seed=seed, activations="recompute")


def test_report_says_who_keeps_and_why() -> None:
    """The plan's lines name what becomes of activations, a refusal with its reason."""
    model = nn.Sequential(Dropping(), CountsCalls(), Dropping())
    engine = attach(model, None, Variant(POISON, budget="all"), activations="recompute")
    for _ in range(2):
        model(torch.randn(16, 24)).sum().backward()
    lines = {line["unit"]: line["activations"] for line in engine.report()["plan"]["units"]}
    assert lines == {"0": "recompute", "1": "keep (its forward changes Python state)", "2": "recompute"}
    engine.close()


def bilinear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return nn.functional.bilinear(x, torch.tanh(x), weight.expand(8, 16, 16) * torch.arange(8.0)[:, None, None])


SHY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "bilinear": bilinear,
    "bilinear of its own": lambda x, w: nn.functional.bilinear(x, x, (w @ w).float()[None]).add_(1),
    "pinv": lambda x, w: x @ torch.linalg.pinv(w.detach()),
    "svdvals": lambda x, w: x + torch.linalg.svdvals(w.detach() @ w.detach().t()),
    "eigvalsh": lambda x, w: x + torch.linalg.eigvalsh(w.detach() @ w.detach().t()),
    "cond": lambda x, w: x * torch.linalg.cond(w.detach()),
    "nuclear norm": lambda x, w: x * torch.linalg.matrix_norm(w.detach(), "nuc"),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", SHY)
def test_functions_that_compute_otherwise_while_somebody_watches(name: str, autocast: bool) -> None:
    """Beneath a dispatch mode autocast does not reach their insides, or they go another way: the watch steps aside."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.LazyLinear(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = SHY[name](self.first(x).float(), self.first.weight)
            return torch.tanh(self.last(x))

    def make() -> nn.Module:
        model = nn.Sequential(*(Net() for _ in range(3)))
        model(torch.ones(2, 16))
        return model

    check(adamw(make), steps(mlp_loss, 3, 8, 16, autocast=autocast), QUICK, activations="recompute")


def test_attention_that_evaluates_inside_a_unit_that_trains() -> None:
    """It chooses its fused path by asking whether anybody overrides functions."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True).requires_grad_(False)
            self.last = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.attention.eval()
            y = x.detach()[:, None].expand(-1, 3, -1)
            return x + self.last(self.attention(y, y, y, need_weights=False)[0].mean(1))

    build = adamw(lambda: nn.Sequential(*(Net() for _ in range(3))))
    check(build, steps(mlp_loss, 3, 8, 16), QUICK, activations="recompute")


class AsksTwice(torch.autograd.Function):
    """Reads what it saved as often as it likes, which torch's own checkpoint does not let it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = torch.tanh(x)
        ctx.save_for_backward(x, y, weight)
        return y @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        dy = grad @ ctx.saved_tensors[2].t()
        dweight = ctx.saved_tensors[1].t() @ grad
        return dy * (1 - ctx.saved_tensors[1] ** 2) + 0 * ctx.saved_tensors[0], dweight


@pytest.mark.parametrize("twice", [False, True])
def test_functions_that_ask_for_what_they_saved_again_and_again(twice: bool) -> None:
    """In one backward, and in two backwards through one graph."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            self.weight = nn.Parameter(torch.randn(16, 16) / 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = AsksTwice.apply(self.first(x), self.weight)  # type: ignore[no-untyped-call]
            return self.last(result)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 8, 16):
            loss = (model(x) ** 2).mean()
            if twice:
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    build = adamw(lambda: nn.Sequential(*(Net() for _ in range(3))))
    check(build, loop, QUICK, activations="recompute")


def test_what_runs_again_before_the_weights_change_does_not_start_itself() -> None:
    """What it touches may be referred to (by an exception's frames), which asks for the same calls to run again."""

    class Unfolds(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            unfold(self)
            return super().forward(x)

    def unfold(module: nn.Module) -> int:
        units = [slot.unit for p in module.parameters() if (slot := managed_slot(p)) is not None]
        num_folded = sum(len(unit.folded) for unit in units)
        for unit in units:
            DeviceSpace.unfold(unit)
        return num_folded

    model = nn.Sequential(*(nn.Sequential(Unfolds(8, 16), nn.GELU(), Unfolds(16, 8)) for _ in range(3)))
    plain = copy.deepcopy(model)
    plain_optimizer, optimizer = (torch.optim.AdamW(each.parameters()) for each in (plain, model))
    engine = attach(model, optimizer, Variant(), activations="recompute")
    num_run = 0
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        losses = [each(x).square().mean() for each in (plain, model)]
        num_run += unfold(model)
        for loss, own in zip(losses, (plain_optimizer, optimizer), strict=True):
            loss.backward()
            own.step()
            own.zero_grad()
        assert torch.equal(*losses)
    assert num_run > 0
    engine.close()
