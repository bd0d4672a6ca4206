"""Trainer-loop cases (TRN): evaluation in the middle, schedulers, callbacks, several backward passes, accumulation."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from exactness import assert_exact, check, seed_all, take_down
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from loopkit import Look, Module, fit, gpt_tiny, loader, mlp, starved_settings
from torch import nn

import lightning_tieroffload as tieroffload
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of


def both(make_module: Any, loaders: Any, **options: Any) -> tuple[pl.Trainer, pl.LightningModule]:
    """Fit plain and ours, starved, with every copy delayed and freed memory poisoned; they are exact."""
    look = options.pop("look", None)
    plain, _, _ = fit(make_module, loaders, ours=False, look=look and look(), **options)
    ours, trainer, module = fit(make_module, loaders, ours=True, look=look and look(), **options)
    assert plain.looks
    assert_exact(plain, ours)
    return trainer, module


def assert_settled(engine: OffloadEngine) -> None:
    """No window, no lease, no gradient on its way, and no transfer in flight that is not a prefetch of a unit."""
    engine.flush()
    space = engine.space
    for unit in space.units:
        assert (unit.num_windows, unit.born) == (0, []), unit.name
        assert [part.num_leases for part in unit.parts] == [0] * len(unit.parts), unit.name
    assert space.table.num_in_flight() <= space.prefetch_units
    assert engine.gradients.leased_nbytes() == 0


# ------------------------------------------------------------------------------------------------ TRN-01


class _Settled(pl.Callback):
    def __init__(self) -> None:
        self.num_checks = 0

    def _check(self, trainer: pl.Trainer) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        if engine is not None:
            assert_settled(engine)
            self.num_checks += 1

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._check(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self._check(trainer)

    def on_sanity_check_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._check(trainer)


class _Evaluating(Module):
    """Does in its steps all that upsets a per-mode state machine."""

    class Refused(Exception):
        pass

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            self.net(input_ids=batch)  # a forward whose graph is dropped
        if batch_idx == 4:
            self.net.eval()
        loss = super().training_step(batch, batch_idx)
        self.net.train()
        if batch_idx == 5:
            with torch.inference_mode():
                self.log("in_inference_mode", self.loss(batch))
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        if batch_idx == 1 and dataloader_idx == 1:

            def refuse(*_: Any) -> None:
                raise self.Refused

            handle = self.net.transformer.h[1].mlp.register_forward_hook(refuse)
            with pytest.raises(self.Refused):
                self.loss(batch)
            handle.remove()
            return
        super().validation_step(batch, batch_idx, dataloader_idx)


def test_trn_01_evaluation_inside_training() -> None:
    """TRN-01: sanity check, two validation loaders, an abandoned pass, eval() for a step; exact, none in flight."""
    settled: list[_Settled] = []

    def callbacks() -> list[pl.Callback]:
        settled.append(_Settled())
        return [settled[-1]]

    both(
        lambda: _Evaluating(lambda: gpt_tiny(resid_pdrop=0.1)),
        lambda: (loader(8, tokens=True), [loader(2, tokens=True, seed=2), loader(2, tokens=True, seed=3)]),
        callbacks=callbacks,
        val_check_interval=2,
        num_sanity_val_steps=2,
        max_epochs=1,
    )
    assert settled[0].num_checks == 0
    assert settled[1].num_checks >= 12


def test_trn_01_generate_inside_training() -> None:
    """TRN-01: ``generate()`` between steps gives plain's tokens and disturbs nothing."""

    class Generating(Module):
        def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
            self.net.eval()
            tokens = self.net.generate(batch[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
            self.net.train()
            self.log("tokens", tokens.double().mul(torch.arange(8)).sum())

    both(lambda: Generating(gpt_tiny), lambda: loader(4, tokens=True), max_steps=4)


# ------------------------------------------------------------------------------------------------ TRN-05


def _lr_and_betas(trainer: pl.Trainer) -> dict[str, Any]:
    groups = trainer.optimizers[0].param_groups
    return {"lr": [g["lr"] for g in groups], "betas": [g.get("betas") for g in groups]}


def _warmup(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 2, (10 - n) / 10))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _one_cycle(self: Any) -> Any:
    optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _by_epoch(self: Any) -> Any:
    optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)]


def _plateau(self: Any) -> Any:
    optimizer = torch.optim.Adam(self.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss_0"}}


@pytest.mark.parametrize("make_optimizer", [_warmup, _one_cycle, _by_epoch, _plateau])
def test_trn_05_schedulers(make_optimizer: Any) -> None:
    """TRN-05: the lr and betas used in each update are plain's (V18: 7 batches, accumulation 3, 3 steps an epoch)."""
    trainer, _ = both(
        lambda: Module(lambda: mlp(2), make_optimizer),
        lambda: (loader(7), [loader(1, seed=3)]),
        look=lambda: Look(what=_lr_and_betas),
        accumulate_grad_batches=3,
        max_epochs=3,
    )
    assert trainer.global_step == 9


def test_trn_05_scheduler_that_changes_lr_right_after_step() -> None:
    """TRN-05: ``step()`` returns before its updates have run; what it uses is the lr of the moment of the call."""

    def build() -> Any:
        model = mlp(3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        x = torch.randn(16, 64)
        for step in range(4):
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.01 * step  # at once, as a scheduler does
            optimizer.param_groups[0]["momentum"] = 0.5
            optimizer.zero_grad()
            look(lr=optimizer.param_groups[0]["lr"])

    check(build, loop)


# ------------------------------------------------------------------------------------------------ TRN-06


def test_trn_06_optimizer_stays_an_optimizer() -> None:
    """TRN-06: isinstance, ``defaults``, schedulers, hooks once per step, edits, ``add_param_group``."""
    num_calls: list[int] = []

    def build() -> Any:
        model = mlp(3)
        optimizer = torch.optim.AdamW(model[:4].parameters(), lr=0.1)
        num_calls.append(0)

        def count(*_: Any) -> None:
            num_calls[-1] += 1

        optimizer.register_step_post_hook(count)
        optimizer.register_step_pre_hook(count)
        return model, optimizer

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        assert isinstance(optimizer, torch.optim.AdamW)
        assert optimizer.defaults["lr"] == 0.1
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
        x = torch.randn(16, 64)
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 0.01, "initial_lr": 0.01})
                scheduler.base_lrs.append(0.01)
                scheduler.lr_lambdas.append(lambda n: 1.0)
            if step == 3:
                optimizer.param_groups[0]["lr"] = 0.5
                optimizer.state[model[0].weight]["exp_avg"].mul_(0)
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
            scheduler.step()
            look(lr=scheduler.get_last_lr(), num_calls=num_calls[-1])
        assert num_calls[-1] == 10

    check(build, loop)


def test_trn_06_lbfgs_with_closure() -> None:
    """TRN-06: LBFGS evaluates the closure several times and updates in between."""

    def build() -> Any:
        model = mlp(2)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        x = torch.randn(16, 64)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            look(loss=optimizer.step(closure))

    check(build, loop)


def test_trn_06_frozen_parameters_in_the_optimizer() -> None:
    """TRN-06: frozen parameters in a group are no reason to crash, and do not move."""

    def build() -> Any:
        model = mlp(3)
        model[2].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        before = model[2].weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(4, 64)) ** 2).mean().backward()
            optimizer.step()
            look()
        assert torch.equal(before, model[2].weight.detach())

    check(build, loop)


# ------------------------------------------------------------------------------------------------ TRN-07


class _Gradients(pl.Callback):
    """Logs norms, and edits gradients in place, in both hooks."""

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for index in (0, 2):
            module.log(f"grad_norm_{index}", module.net[index].weight.grad.norm())

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
        module.net[2].weight.grad.zero_()
        module.net[4].weight.grad = module.net[4].weight.grad * 3


def test_trn_07_gradients_are_visible_and_editable() -> None:
    """TRN-07: callbacks see full true gradients, in-place edits and assignments count, tensor hooks work."""

    class Hooked(Module):
        def on_fit_start(self) -> None:
            self.net[0].bias.register_hook(lambda grad: grad * 2)

    both(
        lambda: Hooked(lambda: mlp(3)),
        lambda: loader(6),
        callbacks=lambda: [_Gradients()],
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        max_epochs=1,
    )


# ------------------------------------------------------------------------------------------------ TRN-09


@pytest.mark.parametrize("when", ["before", "after", "forward first"])
def test_trn_09_order_of_creation(when: str) -> None:
    """TRN-09: the optimizer made before, after, or a forward before it; decay groups and an empty one; same objects."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if n.endswith("weight")], "weight_decay": 0.5},
            {"params": []},
            {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        ]

    def train(ours: bool) -> list[dict[str, Any]]:
        seed_all(0)
        model = mlp(3)
        x = torch.randn(16, 64)
        config = starved_settings(model)
        optimizer = None
        if when == "before":
            optimizer = torch.optim.AdamW(groups(model), lr=0.1)
        if ours:
            tieroffload.offload(model, optimizer, device="cpu", **config)
        if when == "forward first":
            model(x)
        if optimizer is None:
            optimizer = torch.optim.AdamW(groups(model), lr=0.1)
            if ours:
                assert engine_of(model).adopt_optimizer(optimizer) is optimizer
        looks = []
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
            looks.append(take_down(model, [optimizer]))
        names = [n for n, _ in model.named_parameters()]
        ordered = [n for n in names if n.endswith("weight")], [], [n for n in names if n.endswith("bias")]
        for group, wanted in zip(optimizer.param_groups, ordered, strict=True):
            assert all(p is model.get_parameter(n) for p, n in zip(group["params"], wanted, strict=True))
        if ours:
            engine_of(model).close()
        return looks

    plain, ours = train(False), train(True)
    for a, b in zip(plain, ours, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key], key


# ------------------------------------------------------------------------------------------------ TRN-11


def _build_sgd() -> Any:
    model = mlp(3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_trn_11_several_backward_passes() -> None:
    """TRN-11: retain_graph, two losses of one forward with ``zero_grad`` between, gradient penalty by create_graph."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        x = torch.randn(16, 64)
        for step in range(4):
            optimizer.zero_grad()
            h = model[:4](x)
            out = model[4:](h)
            loss, loss2 = (out**2).mean(), h.abs().mean()
            loss.backward(retain_graph=True)
            if step == 1:
                optimizer.zero_grad()
            loss2.backward()
            optimizer.step()
            look(loss=loss, loss2=loss2)
        for _ in range(2):
            optimizer.zero_grad()
            inputs = x.clone().requires_grad_()
            out = model(inputs).sum()
            (grad,) = torch.autograd.grad(out, inputs, create_graph=True)
            penalty = ((grad.norm(dim=1) - 1) ** 2).mean()
            (out * 1e-2 + penalty).backward()
            optimizer.step()
            look(penalty=penalty)
        grads = torch.autograd.grad((model(x) ** 2).mean(), list(model.parameters()))
        look(grads=grads)

    check(_build_sgd, loop)


def test_trn_11_gradient_penalty_on_parameters() -> None:
    """TRN-11: ``autograd.grad(..., parameters, create_graph=True)`` and a second backward through it."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        x = torch.randn(16, 64)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            total = loss + 0.1 * sum((g**2).sum() for g in grads)
            total.backward()
            optimizer.step()
            look(total=total)

    check(_build_sgd, loop)


def test_trn_11_second_backward_without_retain_graph_is_torchs_error() -> None:
    """TRN-11: without retain_graph the usual torch error, and the model goes on afterwards."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        x = torch.randn(16, 64)
        loss = (model(x) ** 2).mean()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
        look(loss=loss)

    check(_build_sgd, loop)


def test_trn_11_step_between_forward_and_backward_is_torchs_error() -> None:
    """TRN-11: a step between forward and backward changes what backward needs, which torch refuses."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        x = torch.randn(16, 64)
        (model(x) ** 2).mean().backward()
        loss = (model(x) ** 2).mean()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()
        (model(x) ** 2).mean().backward()
        optimizer.step()
        look(loss=loss)

    check(_build_sgd, loop)


# ------------------------------------------------------------------------------------------------ TRN-13


@pytest.mark.parametrize("registered", ["before", "after"])
def test_trn_13_optimizer_in_backward(registered: str) -> None:
    """TRN-13: a post-accumulate hook that steps its own optimizer and clears the gradient sees it whole."""

    def add_hooks(model: nn.Module) -> None:
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

            def step(p: torch.Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(step)

    def build() -> Any:
        model = mlp(3)
        if registered == "before":
            add_hooks(model)
        return model, None

    def loop(model: nn.Module, _: Any, look: Any) -> None:
        if registered == "after":
            add_hooks(model)
        x = torch.randn(16, 64)
        for _ in range(4):
            loss = (model(x) ** 2).mean()
            loss.backward()
            assert all(p.grad is None for p in model.parameters())
            look(loss=loss)

    check(build, loop)


# ------------------------------------------------------------------------------------------------ TRN-14


@pytest.mark.parametrize("num_batches", [1, 2, 5])
def test_trn_14_accumulation(num_batches: int) -> None:
    """TRN-14: accumulation 1, 2 and 5; the last window of an epoch is a short one."""
    both(
        lambda: Module(lambda: mlp(3)),
        lambda: loader(7),
        accumulate_grad_batches=num_batches,
        gradient_clip_val=0.1,
        max_epochs=2,
    )


def test_trn_14_accumulation_that_changes_per_epoch() -> None:
    """TRN-14: ``GradientAccumulationScheduler``."""
    trainer, _ = both(
        lambda: Module(lambda: mlp(3)),
        lambda: loader(6),
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})],
        max_epochs=3,
    )
    assert trainer.global_step == 6 + 2 + 3


# ------------------------------------------------------------------------------------------------ TRN-17


def test_trn_17_configuration_is_immutable() -> None:
    """TRN-17: evaluation leaves the configuration as it was, and nobody can change it."""
    module = Module(lambda: mlp(2))
    strategy = tieroffload.TierOffloadStrategy(**starved_settings(module))
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    before = copy.deepcopy(strategy.config)
    assert before == strategy.config
    trainer.validate(module, loader(2), verbose=False)
    assert strategy.config == before
    with pytest.raises(AttributeError):
        strategy.config.device_budget = 1


# ------------------------------------------------------------------------------------------------ calls over everything


def test_trn_07_one_call_over_all_parameters() -> None:
    """TRN-07: callbacks that hand all parameters to one call (EMA by foreach, norms, vectors) work on any budget."""

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        x = torch.randn(16, 64)
        for _ in range(3):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
            average.update_parameters(model)
            norms = torch._foreach_norm(list(model.parameters()))
            vector = nn.utils.parameters_to_vector(model.parameters())
            held = [p.data for p in model.parameters()]
            look(norms=norms, vector=vector, average=average.module.state_dict(), held=held)
            del held
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.5)
        engine = engine_of(model)
        if engine is not None:
            resident = [part for unit in engine.units for part in unit.parts if part.is_resident]
            assert sum(part.charged_nbytes for part in resident) == sum(part.nbytes for part in resident)
        look(loss=(model(x) ** 2).mean())

    check(_build_sgd, loop)
