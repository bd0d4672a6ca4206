"""What outlives an engine, and what attaching a model again means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import Variant, assert_ordinary, attach, same_bits, seed_all
from fakes import batches, mlp_loss
from loopkit import mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.engine.optimizer import Updates
from lightning_tieroffload.errors import ConfigError, TierOffloadError
from lightning_tieroffload.kernels.primitives import LazyKernel

SETTINGS: dict[str, Any] = {"device": "cpu", "device_budget": 3 * 16640, "dram_budget": "1GiB", "debug": ["poison"]}


def _conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 8, 3), nn.LayerNorm(14), nn.GELU(), nn.Flatten(), nn.Linear(112, 1)
    )


def _deep() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(64, 1))


def _step(model: nn.Module, optimizer: Any, autocast: bool) -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return (model(torch.ones(4, 64)) ** 2).mean()


def _old_graph(
    make: Callable[[], nn.Module], end: Callable[[nn.Module], None] | None, between: Callable[[nn.Module], Any],
    *, autocast: bool = False, **settings: Any,
) -> tuple[list[torch.Tensor | None], str]:  # fmt: skip
    """Two steps, a forward, ``end`` (None: the plain run), ``between``, then backward: gradients, and the error."""
    seed_all(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if end is not None:
        offload(model, optimizer, **SETTINGS, **settings)
    for _ in range(3):
        _step(model, optimizer, autocast).backward()
        optimizer.step()
    loss = _step(model, optimizer, autocast)
    if end is not None:
        end(model)
    between(model)
    error = ""
    try:
        loss.backward()
    except RuntimeError as raised:
        error = str(raised)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    engine = engine_of(model)
    if engine is not None:
        engine.close()
    if end is not None:
        assert_ordinary(model)
    return grads, error


def _close(model: nn.Module) -> None:
    engine_of(model).close()


def _close_and_offload_again(model: nn.Module) -> None:
    _close(model)
    offload(model, None, **{**SETTINGS, "device_budget": 5 * 16640})


@pytest.mark.parametrize("end", [_close, _close_and_offload_again])
@pytest.mark.parametrize("make", [lambda: mlp(3), _conv])
@pytest.mark.parametrize(
    "settings",
    [{"activations": "keep"}, {"activations": "keep", "autocast": True}, {"activations": "offload"}],
    ids=["keep", "bf16", "activations offloaded"],
)
def test_graph_from_before_close_is_as_good_as_plain(make: Any, settings: dict[str, Any], end: Any) -> None:
    """Backward after close() through a graph recorded before it: the plain run's gradients, bit for bit."""
    expected = _old_graph(make, None, lambda _: None, autocast=settings.get("autocast", False))
    actual = _old_graph(make, end, lambda _: None, **settings)
    assert actual[1] == expected[1] == ""
    assert all(same_bits(a, b) for a, b in zip(expected[0], actual[0], strict=True))


def test_graph_from_before_close_notices_writes_as_plain_does() -> None:
    def write(model: nn.Module) -> None:
        with torch.no_grad():
            model[2].weight.mul_(2)

    for end in (None, _close):
        error = _old_graph(lambda: mlp(3), end, write, activations="keep")[1]
        assert "modified by an inplace operation" in error


def test_graph_from_before_close_that_recomputes_says_so() -> None:
    """Recompute that the engine imposed runs through the engine: one clear error, with what to do."""
    error = _old_graph(_deep, _close, lambda _: None, activations="recompute")[1]
    for part in ("before engine.close()", "unit", 'activations="keep"'):
        assert part in error


def test_graph_from_before_close_says_that_the_memory_is_another() -> None:
    """Plain autograd would still hold the old memory; ours does not, so it says so instead of using other values."""

    def swap(model: nn.Module) -> None:
        model[2].weight.data = torch.zeros(64, 64)

    error = _old_graph(lambda: mlp(3), _close, swap, activations="keep")[1]
    for part in ("2.weight", "before engine.close()", "other memory"):
        assert part in error


def test_attaching_again_with_other_settings_is_an_error_that_names_them() -> None:
    """The first call's settings would go on silently, and the user would believe in the second's."""
    model = mlp(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload(model, optimizer, **SETTINGS)
    engine = engine_of(model)
    offload(model, torch.optim.SGD(model.parameters(), lr=0.2), device="cpu")  # says nothing: keeps what is in force
    offload(model, optimizer, **SETTINGS)
    assert engine_of(model) is engine
    for target in (model, model[0], nn.Sequential(model)):
        with pytest.raises(ConfigError, match=r"device_budget=49920.*asks for device_budget=100000.*close\(\)"):
            offload(target, optimizer, **{**SETTINGS, "device_budget": 100_000})
    assert engine_of(model) is engine
    engine.close()
    offload(model, optimizer, **{**SETTINGS, "device_budget": 100_000})
    assert engine_of(model).report()["tiers"]["device"]["budget_nbytes"] == 100_000
    engine_of(model).close()


def test_update_that_runs_while_dynamo_compiles_has_the_plain_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compiler.is_compiling()`` is one flag for all threads, and torch's optimizers look at it."""
    original = Updates._run_torch
    seen: list[bool] = []

    def late(self: Updates, *arguments: Any) -> None:
        time.sleep(0.05)  # dynamo begins meanwhile, if it is not kept from it
        seen.append(torch.compiler.is_compiling())
        original(self, *arguments)

    def train(is_ours: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        seed_all(0)
        model = mlp(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if is_ours:
            offload(model, optimizer, **SETTINGS)
        for layer in (0, 2, 4):
            optimizer.zero_grad()
            (model(torch.ones(4, 64)) ** 2).mean().backward()
            optimizer.step()
            model[layer].compile(backend="eager")
        model(torch.ones(4, 64))
        if is_ours:
            _close(model)
        return [p.detach().clone() for p in model.parameters()]

    expected = train(False)
    monkeypatch.setattr(Updates, "_run_torch", late)
    actual = train(True)
    assert all(same_bits(a, b) for a, b in zip(expected, actual, strict=True))
    assert len(seen) >= 9
    assert not any(seen)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_time_limits_do_not_run_while_kernels_are_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code takes seconds to make, on a machine with much to do half a minute: no update waits for it."""
    threads: list[str] = []
    prepare = LazyKernel.prepare

    def slowly(self: LazyKernel, *args: Any) -> None:
        if not threads:
            time.sleep(1.5)
        threads.append(threading.current_thread().name)
        prepare(self, *args)

    monkeypatch.setattr(LazyKernel, "prepare", slowly)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    engine = attach(model, optimizer, Variant(), optimizer_kernel="numba", io_timeout_s=1.0)
    for x in batches(2):
        mlp_loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    engine.close()
    assert threads[0] == threading.main_thread().name
    assert len(threads) > 2


def test_what_fails_while_it_is_made_leaves_torchs_functions_alone(tmp_path: Path) -> None:
    """The exception keeps what was half made alive, and torch's patched functions may still ask it."""
    (tmp_path / "file").touch()
    whole = attach(nn.Linear(4, 4), None, Variant())  # they are patched from now on
    with pytest.raises(TierOffloadError) as caught:
        attach(nn.Linear(4, 4), None, Variant(), nvme_paths=[tmp_path / "file"])
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.weight.grad is not None
    assert caught.value is not None
    whole.close()
