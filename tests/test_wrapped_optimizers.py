"""Optimizers as users see them: inside the wrappers that Lightning, Fabric and Accelerate put around them."""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from typing import Any

import accelerate.accelerator
import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from exactness import Recording, _flatten, assert_exact, seed_all, take_down
from fakes import Stack, batches
from lightning.fabric import Fabric
from loopkit import QUIET, starved_settings
from torch import nn
from torch.utils.data import DataLoader

import _tieroffload_hooks
from lightning_tieroffload import TierOffloadStrategy
from lightning_tieroffload.strategies import accelerate_plugin

pytestmark = pytest.mark.usefixtures("one_thread")
accelerate_plugin.hook_accelerator(accelerate.accelerator)


def touch(optimizer: Any, model: nn.Module, step: int, calls: list[str]) -> dict[str, Any]:
    """Read and change, through the wrapper, what an optimizer has in public. Returns what was read."""
    params = list(model.parameters())
    seen: dict[str, Any] = {
        "len": len(optimizer.state),
        "keys": str([any(key is p for key in optimizer.state) for p in params]),
        "in": str([p in optimizer.state for p in params]),
        "moments": [{name: entry[name].clone() for name in sorted(entry)} for entry in optimizer.state.values()],
        "get": str([sorted(optimizer.state.get(p, {})) for p in params]),
        "first": optimizer.state[params[0]]["exp_avg"].norm() if params[0] in optimizer.state else None,
        "saved": copy.deepcopy(optimizer.state_dict()),
        "defaults": str(sorted(optimizer.defaults.items())),
        "groups": str([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]),
        "getstate": str(sorted(optimizer.__getstate__())) if isinstance(optimizer, torch.optim.AdamW) else None,
        "kind": isinstance(optimizer, torch.optim.Optimizer),
    }
    if step == 0 and isinstance(optimizer, torch.optim.AdamW):  # Accelerate's has no hooks
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    if step == 1:
        for p in params[::2]:
            optimizer.state[p]["exp_avg"].mul_(0.5)
    if step == 2:
        optimizer.state.pop(params[1])
        optimizer.state[params[2]] = {}
    if step == 3:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    if step == 4:
        optimizer.state.clear()
    if step == 5:
        optimizer.zero_grad(set_to_none=False)
    seen["calls"] = str(calls)
    return seen


class Loop:
    """Six steps in any trainer, looked at after each."""

    def __init__(self) -> None:
        seed_all(0)
        self.model = Stack(3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.recording, self.calls = Recording(), list[str]()

    def look(self, wrapper: Any, step: int) -> None:
        entry: dict[str, Any] = {}
        _flatten("log", touch(wrapper, self.model, step, self.calls), entry)
        entry.update(take_down(self.model, [self.optimizer]))
        self.recording.looks.append(entry)


def lightning(ours: bool, precision: str, manual: bool) -> Recording:
    loop = Loop()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = loop.model
            self.automatic_optimization = not manual

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = (self.net(batch) ** 2).mean()
            if manual:
                self.manual_backward(loss)
                self.optimizers().step()
                self.optimizers().zero_grad()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            loop.look(self.optimizers(), batch_idx)

        def configure_optimizers(self) -> Any:
            return loop.optimizer

    strategy = TierOffloadStrategy(**starved_settings(loop.model)) if ours else "auto"
    trainer = pl.Trainer(strategy=strategy, max_epochs=1, precision=precision, **QUIET)  # type: ignore[arg-type]
    trainer.fit(Module(), DataLoader(batches(6, 4, 24), batch_size=None))  # type: ignore[arg-type]
    return loop.recording


def fabric(ours: bool, precision: str, manual: bool) -> Recording:
    loop = Loop()
    strategy = TierOffloadStrategy(**starved_settings(loop.model)) if ours else "auto"
    made = Fabric(strategy=strategy, accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    model, optimizer = made.setup(loop.model, loop.optimizer)
    for step, x in enumerate(batches(6, 4, 24)):
        made.backward((model(x) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        loop.look(optimizer, step)
    return loop.recording


def accelerated(ours: bool, precision: str, manual: bool) -> Recording:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    loop = Loop()
    if ours:
        _tieroffload_hooks.announce(json.dumps(starved_settings(loop.model)))
    made = Accelerator(cpu=True, mixed_precision="bf16" if precision == "bf16-mixed" else "no")
    model, optimizer = made.prepare(loop.model, loop.optimizer)
    for step, x in enumerate(batches(6, 4, 24)):
        made.backward((model(x) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        loop.look(optimizer, step)
    return loop.recording


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("face", "manual"), [(lightning, False), (lightning, True), (fabric, False), (accelerated, False)]
)
def test_wrapped_optimizers_read_and_write_as_plain(
    face: Any, manual: bool, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State, groups, hooks and snapshots through a trainer's wrapper, in every face."""
    for key in (_tieroffload_hooks.ENABLED_KEY, _tieroffload_hooks.REQUIRED_KEY, _tieroffload_hooks.CONFIG_KEY):
        monkeypatch.delenv(key, raising=False)
    plain = face(False, precision, manual)
    for key in (_tieroffload_hooks.ENABLED_KEY, _tieroffload_hooks.REQUIRED_KEY, _tieroffload_hooks.CONFIG_KEY):
        monkeypatch.setenv(key, "")  # so that what `announce` sets is taken back
        monkeypatch.delenv(key)
    assert_exact(plain, face(True, precision, manual), face.__name__)


@pytest.mark.parametrize("face", ["lightning", "fabric"])
def test_state_assigned_to_a_wrapper_stays_on_the_wrapper(face: str) -> None:
    """As in torch: the wrapper's attribute hides the optimizer's state, which goes on."""
    looks = []
    for ours in (False, True):
        loop = Loop()
        strategy = TierOffloadStrategy(**starved_settings(loop.model)) if ours else "auto"
        made = Fabric(strategy=strategy, accelerator="cpu", devices=1)  # type: ignore[arg-type]
        model, optimizer = made.setup(loop.model, loop.optimizer)
        if face == "lightning":
            optimizer = pl.core.optimizer.LightningOptimizer(loop.optimizer)
        recording = Recording()
        for step, x in enumerate(batches(4, 4, 24)):
            made.backward((model(x) ** 2).mean())
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            if step == 1:
                optimizer.state = defaultdict(dict)
            entry = {"log/num": len(optimizer.state), **take_down(loop.model, [loop.optimizer])}
            recording.looks.append(entry)
        looks.append(recording)
    assert_exact(*looks)
