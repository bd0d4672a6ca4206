"""Fabric with the strategy against the same script without it, bit by bit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import STARVED, InfiniteAt, assert_same, mlp, rng_states, samples, seed_all, snapshot

import lightning_tieroffload
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.errors import UnsupportedError
from lightning_tieroffload.strategies.fabric_strategy import strategy_class

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("lightning.fabric", "lightning_fabric")


def fabric(root: str, ours: bool, **options: Any) -> Any:
    strategy = lightning_tieroffload.TierOffloadStrategy(**STARVED) if ours else "auto"
    return importlib.import_module(root).Fabric(strategy=strategy, accelerator="cpu", devices=1, **options)


def train(
    root: str = FAMILIES[0],
    ours: bool = False,
    *,
    num_steps: int = 6,
    accumulate: int = 1,
    max_norm: float | None = None,
    clip_val: float | None = None,
    infinite_at: int | None = None,
    separately: str = "",
    save_to: Path | None = None,
    load_from: Path | None = None,
    launch: bool = False,
    **options: Any,
) -> dict[str, Any]:
    made = fabric(root, ours, **options)
    if launch:
        made.launch()
    seed_all()
    net = mlp(dropout=0.1)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 / (1 + step))
    if separately == "optimizer first":
        optimizer = made.setup_optimizers(adamw)
        model = made.setup_module(net)
    elif separately == "model first":
        model = made.setup_module(net)
        optimizer = made.setup_optimizers(adamw)
    else:
        model, optimizer = made.setup(net, adamw)
    loader = made.setup_dataloaders(torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True))
    if load_from is not None:
        seed_all(3)
        made.load(load_from, {"model": model, "optimizer": optimizer})
    seen: list[Any] = []
    step = 0
    while step < num_steps:
        for index, batch in enumerate(loader):
            ends = (index + 1) % accumulate == 0
            with made.no_backward_sync(model, enabled=not ends):
                loss = model(batch).pow(2).mean()
                if infinite_at is not None:
                    loss = InfiniteAt.apply(loss, step == infinite_at)
                made.backward(loss)
                if ours:
                    assert engine_of(net).is_accumulating is not ends
            seen.append(loss.detach().clone())
            if not ends:
                continue
            if max_norm is not None:
                seen.append(
                    made.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=infinite_at is None)
                )
            if clip_val is not None:
                made.clip_gradients(model, optimizer, clip_val=clip_val)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            if step == num_steps:
                break
    if save_to is not None:
        made.save(save_to, {"model": model, "optimizer": optimizer, "step": step})
    result = {**snapshot(net, adamw), "seen": seen, "rng": rng_states()}
    engine = engine_of(net)
    assert (engine is not None) is ours
    if engine is not None:
        engine.close()
        assert type(adamw) is torch.optim.AdamW
        assert_same(snapshot(net, adamw), {key: result[key] for key in ("model", "optimizers")})
    return result


def scaler(root: str) -> Any:
    plugins = importlib.import_module(f"{root}.plugins.precision")

    class HalfOnCpu(plugins.MixedPrecision):  # type: ignore[misc,name-defined]
        def forward_context(self) -> Any:
            return torch.autocast("cpu", dtype=torch.bfloat16)

    return HalfOnCpu("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=65536.0))


CASES: dict[str, dict[str, Any]] = {
    "32-true": {},
    "launched": {"launch": True},
    "accumulate and clip by norm": {"accumulate": 2, "max_norm": 1e-2, "num_steps": 3},
    "clip by value": {"clip_val": 1e-4},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "optimizer first": {"separately": "optimizer first"},
    "model first": {"separately": "model first"},
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain(case: str) -> None:
    assert_same(train(ours=False, **CASES[case]), train(ours=True, **CASES[case]))


def test_training_equals_plain_in_the_other_package() -> None:
    options = CASES["accumulate and clip by norm"]
    assert_same(train(FAMILIES[1], False, **options), train(FAMILIES[1], True, **options))


def test_grad_scaler_with_an_infinite_gradient() -> None:
    for extra in ({}, {"max_norm": 0.1}):
        results = [train(ours=ours, infinite_at=2, plugins=[scaler(FAMILIES[0])], **extra) for ours in (False, True)]
        assert_same(results[0], results[1])


@pytest.mark.parametrize(("saver_is_ours", "loader_is_ours"), [(False, True), (True, False), (True, True)])
def test_save_and_load_in_all_directions(saver_is_ours: bool, loader_is_ours: bool, tmp_path: Path) -> None:
    file = tmp_path / "three.ckpt"
    saved = train(ours=saver_is_ours, num_steps=3, save_to=file)
    content = torch.load(file, weights_only=False)
    assert_same(saved["model"], dict(content["model"]))
    assert_same(saved["optimizers"][0], content["optimizer"])
    plain = train(ours=False, num_steps=3, load_from=file)
    assert_same(plain, train(ours=loader_is_ours, num_steps=3, load_from=file))


@pytest.mark.parametrize("root", FAMILIES)
@pytest.mark.parametrize("name", ["tieroffload", "tiered"])
def test_the_names_make_the_packages_own_class(root: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIEROFFLOAD_CONFIG", json.dumps({"device_budget": "1GiB"}))
    package = importlib.import_module(root)
    by_name = package.Fabric(strategy=name, accelerator="cpu", devices=1).strategy
    assert type(by_name) is strategy_class(root)
    assert by_name.config.device_budget == 2**30
    by_class = package.Fabric(strategy=lightning_tieroffload.TierOffloadStrategy(), accelerator="cpu").strategy
    assert type(by_class) is strategy_class(root)
    assert isinstance(by_class, lightning_tieroffload.TierOffloadStrategy)


def test_an_engine_closes_with_its_optimizer_in_any_order_of_setting_up() -> None:
    for order in ("optimizer first", "model first"):
        made = fabric(FAMILIES[0], True)
        net = mlp()
        adamw = torch.optim.AdamW(net.parameters())
        if order == "optimizer first":
            made.setup_optimizers(adamw)
            made.setup_module(net)
        else:
            made.setup_module(net)
            made.setup_optimizers(adamw)
        engine = engine_of(net)
        assert engine is not None
        engine.close()
        assert type(adamw) is torch.optim.AdamW, order
        assert all(type(p) is nn.Parameter for p in net.parameters())


def test_init_module_is_on_the_host_and_equal_to_plain() -> None:
    models = []
    for ours in (False, True):
        made = fabric(FAMILIES[0], ours)
        seed_all()
        with made.init_module(empty_init=False):
            models.append(mlp())
    assert_same(dict(models[0].state_dict()), dict(models[1].state_dict()))


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="2 devices or processes"):
        importlib.import_module(FAMILIES[0]).Fabric(strategy="tieroffload", accelerator="cpu", devices=2)
    compiled = torch.compile(mlp())
    for set_up in ("setup", "setup_module"):
        with pytest.raises(UnsupportedError, match=r"compiled as a whole.*layer\.compile\(\)"):
            getattr(fabric(FAMILIES[0], True), set_up)(compiled)


def test_two_models_in_one_fabric() -> None:
    results = []
    for ours in (False, True):
        made = fabric(FAMILIES[0], ours)
        seed_all()
        policy, reference = mlp(2), mlp(2)
        adamw = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        policy_module, optimizer = made.setup(policy, adamw)
        reference_module = made.setup_module(reference)
        losses = []
        for batch in samples().split(8):
            with torch.no_grad():
                target = reference_module(batch)
            loss = (policy_module(batch) - target).pow(2).mean()
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        results.append({**snapshot(policy, adamw), "reference": dict(reference.state_dict()), "losses": losses})
    assert_same(results[0], results[1])
