"""Models made of parts that the engine has to leave alone."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import accelerate
import lightning
import pytest
import torch
from exactness import FULL, check
from fakes import batches
from torch import nn

import _tieroffload_hooks
from lightning_tieroffload import TierOffloadStrategy, offload
from lightning_tieroffload.engine.units import find_units
from lightning_tieroffload.errors import UnsupportedError
from lightning_tieroffload.strategies import accelerate_plugin

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch.jit")


def scripted(*layers: nn.Module) -> nn.Module:
    return torch.jit.script(nn.Sequential(*layers))  # type: ignore[no-any-return]


def build() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(24, 24), nn.Tanh()),
        scripted(nn.Linear(24, 24), nn.BatchNorm1d(24)),
        nn.Sequential(nn.Linear(24, 24), nn.Tanh()),
        nn.Linear(24, 3),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("reads", [False, True])
def test_frozen_between_two_backward_passes_over_one_graph(reads: bool) -> None:
    """A gradient that is there stays, and nothing is added while its parameter is frozen."""

    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))
        return model, torch.optim.SGD(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 4, 24):
            first = model(x)
            second = model(2 * x)
            first.mean().backward(retain_graph=True)
            for frozen in (model[2], model[1]):
                frozen.requires_grad_(False)
                second.square().mean().backward(retain_graph=True)
                if reads:
                    look(grads=[p.grad for p in model.parameters()])
                frozen.requires_grad_(True)
            look(norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            first.square().mean().backward()
            look(grads=[p.grad for p in model.parameters()] if reads else None)
            optimizer.step()
            optimizer.zero_grad()

    check(build, loop, FULL)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_inside_a_model() -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 4, 24):
            loss = model(x).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss.detach(), norm=norm)

    check(build, loop, FULL)
    units = find_units(build()[0])
    assert {name for name, _, reason in units.unmanaged if "TorchScript" in reason} == {
        "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"
    }  # fmt: skip
    whole = find_units(scripted(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert not whole.units
    assert len(whole.unmanaged) == 4


def test_a_default_device_is_for_the_users_tensors_alone() -> None:
    """Stand-ins for ``torch.set_default_device("cuda")``: what the engine makes in host memory stays there."""

    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)))
        return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(torch.ones(()))
        for step, x in enumerate(batches(5, 4, 24)):
            with torch.device("meta"):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step > 1):
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
                grads = [p.grad.clone() for p in model.parameters()] if step == 2 else None
                optimizer.zero_grad()
                state = {name: value.clone() for name, value in model.state_dict().items()}
                saved = copy.deepcopy(optimizer.state_dict())
                model.load_state_dict(state)
                optimizer.load_state_dict(saved)
                copied = [p.detach() for p in copy.deepcopy(model).parameters()]
                with torch.no_grad():
                    model[1][0].weight.mul_(0.9)
            assert {value.device.type for value in state.values()} == {"cpu"}
            look(loss=loss, norm=norm, grads=grads, state=state, copied=copied)

    check(build, loop, FULL)


@pytest.mark.parametrize("face", ["plain", "lightning", "fabric", "accelerate"])
def test_modules_without_a_size_are_refused_by_every_face(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lazy modules have nothing to plan for; once a batch has run through them they are modules like others."""
    model = nn.Sequential(nn.Linear(24, 24), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    with pytest.raises(UnsupportedError, match=r"6 parameters and buffers .* no size yet .*1\.weight\).*Run one batch"):
        hand_over(face, model, monkeypatch)
    model(torch.randn(4, 24))
    hand_over(face, model, monkeypatch)


def hand_over(face: str, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    if face == "plain":
        offload(model)
        return
    if face == "accelerate":
        monkeypatch.setenv(_tieroffload_hooks.ENABLED_KEY, "1")
        monkeypatch.setenv(_tieroffload_hooks.CONFIG_KEY, "{}")
        accelerate_plugin.hook_accelerator(accelerate.accelerator)
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.Accelerator(cpu=True).prepare(model)
        return
    options: Any = {"strategy": TierOffloadStrategy(), "accelerator": "cpu", "devices": 1}
    if face == "fabric":
        lightning.Fabric(**options).setup(model)
        return

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch)  # type: ignore[no-any-return]

    silent: Any = {"logger": False, "enable_progress_bar": False}
    lightning.Trainer(**options, **silent).predict(Module(), torch.utils.data.DataLoader(torch.randn(4, 24)))
