"""Lightning's Trainer with the strategy against the same script without it, bit by bit."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import SLOW_STORE, InfiniteAt, assert_same, mlp, rng_states, samples, seed_all, snapshot

import lightning_tieroffload
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.errors import ConfigError, UnsupportedError
from lightning_tieroffload.planning.plan import Plan
from lightning_tieroffload.strategies.lightning_strategy import strategy_class

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("lightning.pytorch", "pytorch_lightning")


def modules(root: str) -> tuple[Any, type]:
    pl = importlib.import_module(root)

    class Toy(pl.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.options = options
            self.net = mlp(batch_norm=options.get("batch_norm", False), dropout=options.get("dropout", 0.0))
            self.scale = nn.Parameter(torch.ones(3))  # owned by the root module, whose forward is never called
            self.seen: list[Any] = []
            if options.get("manual"):
                self.automatic_optimization = False

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return (self.net(batch) * self.scale.sum()).pow(2).mean()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            if self.options.get("manual"):
                return self.manual_step(batch)
            loss = self.loss(batch)
            if "infinite_at" in self.options:
                loss = InfiniteAt.apply(loss, self.trainer.global_step == self.options["infinite_at"])
            self.seen.append(loss.detach().clone())
            self.log("loss", loss)
            return loss

        def manual_step(self, batch: torch.Tensor) -> None:
            first, second = self.optimizers()
            for optimizer, sign in ((first, 1.0), (second, -1.0)):
                optimizer.zero_grad()  # must also discard what the other one's loss left in its parameters
                loss = sign * self.loss(batch)
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                self.seen.append(loss.detach().clone())

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.net(batch)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.options.get("log_norms"):
                grads = [p.grad for p in self.parameters() if p.grad is not None]
                self.seen.append(torch.nn.utils.get_total_norm(grads))

        def configure_optimizers(self) -> Any:
            if self.options.get("manual"):
                half = len(self.net) // 2
                return [
                    torch.optim.Adam([*self.net[:half].parameters(), self.scale], lr=1e-2),
                    torch.optim.SGD(self.net[half:].parameters(), lr=1e-2, momentum=0.9),
                ]
            decay = [p for p in self.parameters() if p.ndim > 1]
            rest = [p for p in self.parameters() if p.ndim <= 1]
            groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=self.options.get("fused"))
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=100)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return pl, Toy


def fit(
    root: str,
    ours: bool,
    *,
    options: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    config: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> tuple[Any, Any]:
    pl, toy = modules(root)
    seed_all()
    model = toy(**(options or {}))
    defaults = {
        "max_steps": 6,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    strategy = lightning_tieroffload.TierOffloadStrategy(**(config or SLOW_STORE)) if ours else "auto"
    trainer = pl.Trainer(strategy=strategy, **{**defaults, **trainer_options})
    train = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True)
    val = torch.utils.data.DataLoader(samples(16), batch_size=8)
    trainer.fit(model, train, val, ckpt_path=ckpt_path)
    return model, trainer


def outcome(model: Any, trainer: Any) -> dict[str, Any]:
    return {
        **snapshot(model, *trainer.optimizers),
        "seen": model.seen,
        "metrics": dict(trainer.callback_metrics),
        "lr": [[group["lr"] for group in optimizer.param_groups] for optimizer in trainer.optimizers],
        "rng": rng_states(),
    }


def with_scaler(root: str) -> dict[str, Any]:
    plugins = importlib.import_module(f"{root}.plugins.precision")

    class HalfOnCpu(plugins.MixedPrecision):  # type: ignore[misc,name-defined]
        def autocast_context_manager(self) -> Any:
            return torch.autocast("cpu", dtype=torch.bfloat16)

    return {"plugins": [HalfOnCpu("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=65536.0))]}


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulate and clip by norm": {"accumulate_grad_batches": 2, "gradient_clip_val": 1e-3, "max_steps": 4},
    "clip by value": {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "64-true": {"precision": "64-true", "config": {**SLOW_STORE, "device_budget": "80KiB"}},
    "norms in a hook, then clip": {"options": {"log_norms": True}, "gradient_clip_val": 1e-2},
    "fused": {"options": {"fused": True}},
    "batch norm, dropout": {"options": {"batch_norm": True, "dropout": 0.2}},
    "validation inside": {"val_check_interval": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2},
    "manual, two optimizers": {"options": {"manual": True}, "max_steps": 12},
    "no inference mode": {"inference_mode": False, "val_check_interval": 2, "limit_val_batches": 1},
    "several epochs": {"max_epochs": 2, "max_steps": -1},
}


@pytest.mark.parametrize("case", CASES)
def test_fit_equals_plain(case: str) -> None:
    plain = outcome(*fit(FAMILIES[0], False, **CASES[case]))
    ours = outcome(*fit(FAMILIES[0], True, **CASES[case]))
    assert_same(plain, ours)


@pytest.mark.parametrize("case", ["fp32", "accumulate and clip by norm", "manual, two optimizers"])
def test_fit_equals_plain_in_the_other_package(case: str) -> None:
    plain = outcome(*fit(FAMILIES[1], False, **CASES[case]))
    ours = outcome(*fit(FAMILIES[1], True, **CASES[case]))
    assert_same(plain, ours)


@pytest.mark.parametrize("extra", [{}, {"gradient_clip_val": 1e-3}, {"accumulate_grad_batches": 2, "max_steps": 3}])
def test_grad_scaler_with_an_infinite_gradient(extra: dict[str, Any]) -> None:
    options = {"options": {"infinite_at": 1}, **extra}
    plain_plugins, our_plugins = with_scaler(FAMILIES[0]), with_scaler(FAMILIES[0])
    plain = fit(FAMILIES[0], False, **options, **plain_plugins)
    ours = fit(FAMILIES[0], True, **options, **our_plugins)
    assert_same(outcome(*plain), outcome(*ours))
    scales = [trainer.precision_plugin.scaler.get_scale() for _, trainer in (plain, ours)]
    assert scales[0] == scales[1] < 65536.0, scales


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(("first_is_ours", "second_is_ours"), [(False, True), (True, False), (True, True)])
def test_resume_in_all_directions(first_is_ours: bool, second_is_ours: bool, tmp_path: Path) -> None:
    options = {"options": {"dropout": 0.1, "batch_norm": True}, "gradient_clip_val": 0.1}
    _, trainer = fit(FAMILIES[0], first_is_ours, max_steps=3, **options)
    path = str(tmp_path / "three.ckpt")
    trainer.save_checkpoint(path)  # after fit: the optimizer's state must still be there
    plain = fit(FAMILIES[0], False, max_steps=6, ckpt_path=path, **options)
    resumed = fit(FAMILIES[0], second_is_ours, max_steps=6, ckpt_path=path, **options)
    assert_same(outcome(*plain), outcome(*resumed))


def test_checkpoint_files_are_those_of_plain(tmp_path: Path) -> None:
    contents = []
    for ours in (False, True):
        callbacks = importlib.import_module("lightning.pytorch.callbacks")
        folder = tmp_path / str(ours)
        saver = callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_last=True)
        model, _ = fit(FAMILIES[0], ours, enable_checkpointing=True, callbacks=[saver])
        contents.append({file.name: torch.load(file, weights_only=False) for file in sorted(folder.iterdir())})
        again = type(model).load_from_checkpoint(folder / "last.ckpt", weights_only=False)
        assert_same(dict(model.state_dict()), dict(again.state_dict()))
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        contents[-1]["sizes"] = {name: round(size, -4) for name, size in sizes.items()}
    for content in contents:
        for checkpoint in content.values():
            checkpoint.pop("callbacks", None)  # holds the folder's name
            checkpoint.pop("loops", None)
    assert len(contents[0]) == 5
    assert_same(contents[0], contents[1])


def test_saved_while_training_is_a_snapshot(tmp_path: Path) -> None:
    """CKP-13: what a checkpoint dict holds does not change when training goes on."""
    pl, _ = modules(FAMILIES[0])
    held: list[dict[str, Any]] = []

    class Hold(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                held.append(trainer._checkpoint_connector.dump_checkpoint())
                torch.save(held[0], tmp_path / "then.pt")

    fit(FAMILIES[0], True, callbacks=[Hold()])
    then = torch.load(tmp_path / "then.pt", weights_only=False)
    assert_same(then["state_dict"], dict(held[0]["state_dict"]))
    assert_same(then["optimizer_states"], held[0]["optimizer_states"])


def test_evaluation_builds_no_optimizer(tmp_path: Path) -> None:
    """CKP-11: validate, test and predict with a checkpoint, though `configure_optimizers` raises."""
    _, trainer = fit(FAMILIES[0], False)
    path = str(tmp_path / "six.ckpt")
    trainer.save_checkpoint(path)
    results = []
    for strategy in ("auto", lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE)):
        pl, toy = modules(FAMILIES[0])

        class NoOptimizer(toy):  # type: ignore[misc,valid-type]
            def configure_optimizers(self) -> Any:
                raise AssertionError("evaluation must not ask for an optimizer")

        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
        loader = torch.utils.data.DataLoader(samples(16), batch_size=8)
        seed_all(1)
        model = NoOptimizer()
        results.append(
            [
                trainer.validate(model, loader, ckpt_path=path, verbose=False),
                trainer.test(model, loader, ckpt_path=path, verbose=False),
                trainer.predict(model, loader, ckpt_path=path),
                dict(model.state_dict()),
            ]
        )
    assert_same(results[0], results[1])


def test_fit_twice_and_evaluate_between() -> None:
    results = []
    for ours in (False, True):
        model, trainer = fit(FAMILIES[0], ours)
        loader = torch.utils.data.DataLoader(samples(16), batch_size=8)
        between = trainer.validate(model, loader, verbose=False)
        trainer.fit_loop.epoch_loop.max_steps = 10
        trainer.fit(model, torch.utils.data.DataLoader(samples(), batch_size=8))
        results.append({**outcome(model, trainer), "between": between})
    assert_same(results[0], results[1])


def test_callbacks_that_touch_weights_and_gradients() -> None:
    """SWA, EMA, EarlyStopping and changing accumulation, all together and each as without us."""
    callbacks = importlib.import_module("lightning.pytorch.callbacks")
    makers = {
        "swa": lambda: [callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)],
        "ema": lambda: [callbacks.WeightAveraging()],
        "accumulation": lambda: [callbacks.GradientAccumulationScheduler({0: 2, 1: 3})],
        "early": lambda: [callbacks.EarlyStopping("val_loss", patience=1)],
    }
    for name, make in makers.items():
        results = []
        for ours in (False, True):
            model, trainer = fit(
                FAMILIES[0], ours, callbacks=make(), max_epochs=3, max_steps=-1, limit_val_batches=1,
            )  # fmt: skip
            results.append(outcome(model, trainer))
        try:
            assert_same(results[0], results[1])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def test_resume_in_the_middle_of_weight_averaging(tmp_path: Path) -> None:
    """SWA's resume needs the callbacks' state before the schedulers': restored before set-up, as in plain."""
    callbacks = importlib.import_module("lightning.pytorch.callbacks")

    def run(ours: bool, **options: Any) -> tuple[Any, Any]:
        averaging = callbacks.StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        return fit(FAMILIES[0], ours, callbacks=[averaging], max_steps=-1, **options)

    for ours in (False, True):
        _, trainer = run(ours, max_epochs=3)
        trainer.save_checkpoint(str(tmp_path / f"{ours}.ckpt"))
    results = [
        outcome(*run(ours, max_epochs=5, ckpt_path=str(tmp_path / f"{saver}.ckpt")))
        for saver in (False, True)
        for ours in (False, True)
    ]
    for result in results[1:]:
        assert_same(results[0], result)


def test_hyper_parameters_of_any_type_resume_with_weights_only_false(tmp_path: Path) -> None:
    """Lightning forgets `weights_only` where a strategy restores after set-up."""
    pl, toy = modules(FAMILIES[0])

    class Holds(toy):  # type: ignore[misc,valid-type]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["object"] = Path("anything that is no tensor")

    seed_all()
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_steps": 2}
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    trainer = pl.Trainer(strategy=lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE), **options)
    trainer.fit(Holds(), loader)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = pl.Trainer(strategy=lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE), **{**options, "max_steps": 3})
    again.fit(Holds(), loader, ckpt_path=str(tmp_path / "two.ckpt"), weights_only=False)
    assert again.global_step == 3


def test_asynchronous_checkpoints_hold_the_step_of_their_call(tmp_path: Path) -> None:
    """CKP-13: written late, from a thread that only starts to write when training has ended."""
    pl, _ = modules(FAMILIES[0])
    plugins = importlib.import_module("lightning.pytorch.plugins.io")
    gate = threading.Event()

    class Late(plugins.TorchCheckpointIO):  # type: ignore[misc,name-defined]
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            gate.wait(30)
            super().save_checkpoint(*args, **kwargs)

    class Save(pl.Callback):  # type: ignore[misc,name-defined]
        then: dict[str, Any]

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                self.then = snapshot(module, *(o for o in trainer.optimizers))
                trainer.save_checkpoint(tmp_path / "two.ckpt")

        def on_train_end(self, trainer: Any, module: Any) -> None:
            gate.set()

    save = Save()
    fit(FAMILIES[0], True, callbacks=[save], plugins=[plugins.AsyncCheckpointIO(Late())])
    written = torch.load(tmp_path / "two.ckpt", weights_only=False)
    assert written["global_step"] == 2
    assert_same(save.then["model"], dict(written["state_dict"]))
    assert_same(save.then["optimizers"], written["optimizer_states"])


def test_learning_rate_finder_leaves_the_model_as_it_was() -> None:
    tuner = importlib.import_module("lightning.pytorch.tuner")
    results = []
    for ours in (False, True):
        pl, toy = modules(FAMILIES[0])

        class WithRate(toy):  # type: ignore[misc,valid-type]
            lr = 1e-3

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=self.lr)

        strategy = lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE) if ours else "auto"
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, logger=False, max_steps=4, enable_progress_bar=False,
            enable_checkpointing=False,
        )  # fmt: skip
        seed_all()
        model = WithRate()
        loader = torch.utils.data.DataLoader(samples(), batch_size=8)
        found = tuner.Tuner(trainer).lr_find(model, loader, num_training=10)
        trainer.fit(model, loader)
        results.append({**snapshot(model), "losses": found.results["loss"], "lr": model.lr})
    assert_same(results[0], results[1])


def test_two_modules_that_share_a_part() -> None:
    """MPR-06: teacher and student share a layer; it is stored once, and trained by whoever trains it."""
    results = []
    for ours in (False, True):
        pl, toy = modules(FAMILIES[0])
        seed_all()
        teacher, student = toy(), toy()
        student.net[0] = teacher.net[0]
        for model in (teacher, student):
            strategy = lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE) if ours else "auto"
            trainer = pl.Trainer(
                strategy=strategy, accelerator="cpu", devices=1, logger=False, max_steps=3, enable_progress_bar=False,
                enable_checkpointing=False,
            )  # fmt: skip
            trainer.fit(model, torch.utils.data.DataLoader(samples(), batch_size=8))
        assert teacher.net[0] is student.net[0]
        results.append([dict(teacher.state_dict()), dict(student.state_dict())])
    assert_same(results[0], results[1])


# ---------------------------------------------------------------- the end of a run


def test_the_model_is_ordinary_afterwards() -> None:
    model, trainer = fit(FAMILIES[0], True)
    assert engine_of(model) is None
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert all(type(optimizer) is torch.optim.AdamW for optimizer in trainer.optimizers)
    assert len(trainer.optimizers[0].state) == len(list(model.parameters()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.loss(samples(4)).backward()
    trainer.optimizers[0].step()
    assert isinstance(trainer.strategy, lightning_tieroffload.TierOffloadStrategy)
    assert trainer.strategy.engine is None
    assert trainer.strategy.report()["num_steps"] == 6


def test_nothing_is_left() -> None:
    """MEM-05: model, optimizer and strategy can be collected, threads are gone."""
    num_threads = threading.active_count()
    model, trainer = fit(FAMILIES[0], True)
    refs = [weakref.ref(model), weakref.ref(trainer.optimizers[0]), weakref.ref(trainer.strategy)]
    del model, trainer
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert threading.active_count() <= num_threads


@pytest.mark.parametrize("where", ["training_step", "configure_optimizers", "on_after_backward"])
def test_an_exception_is_the_users_own_and_the_next_fit_works(where: str) -> None:
    pl, toy = modules(FAMILIES[0])

    class Failing(toy):  # type: ignore[misc,valid-type]
        pass

    def fail(self: Any, *args: Any) -> None:
        if where == "configure_optimizers" or self.trainer.global_step == 2:
            raise ValueError("the user's own fault")
        return getattr(super(Failing, self), where)(*args)

    setattr(Failing, where, fail)
    strategy = lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE)
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_steps": 4}
    trainer = pl.Trainer(strategy=strategy, enable_progress_bar=False, **options)
    seed_all()
    model = Failing()
    loader = torch.utils.data.DataLoader(samples(), batch_size=8)
    with pytest.raises(ValueError, match="the user's own fault") as caught:
        trainer.fit(model, loader)
    assert caught.value.__context__ is None or "tieroffload" not in repr(caught.value.__context__)
    assert engine_of(model) is None
    assert all(type(p) is nn.Parameter for p in model.parameters())
    delattr(Failing, where)
    pl.Trainer(
        strategy=lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE), enable_progress_bar=False, **options
    ).fit(model, loader)


def test_keyboard_interrupt_ends_as_lightning_ends_it() -> None:
    pl, toy = modules(FAMILIES[0])

    class Interrupted(toy):  # type: ignore[misc,valid-type]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise KeyboardInterrupt

    import signal

    before = signal.getsignal(signal.SIGINT)
    trainer = pl.Trainer(
        strategy=lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE), accelerator="cpu", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    model = Interrupted()
    try:
        with pytest.raises(SystemExit):
            trainer.fit(model, torch.utils.data.DataLoader(samples(), batch_size=8))
    finally:
        signal.signal(signal.SIGINT, before)
    assert engine_of(model) is None
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_background_error_that_nobody_saw_fails_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pl, _ = modules(FAMILIES[0])

    class Break(pl.Callback):  # type: ignore[misc,name-defined]
        def on_train_end(self, trainer: Any, module: Any) -> None:
            def raise_pending_error() -> None:
                raise OSError(28, "No space left on device")

            trainer.strategy.engine.raise_pending_error = raise_pending_error

    with pytest.raises(OSError, match="No space left"):
        fit(FAMILIES[0], True, callbacks=[Break()])


# ---------------------------------------------------------------- what is told and what is refused


def test_accumulation_is_told_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pl, _ = modules(FAMILIES[0])
    flags: list[bool] = []

    class Watch(pl.Callback):  # type: ignore[misc,name-defined]
        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            flags.append(trainer.strategy.engine.is_accumulating)

    fit(FAMILIES[0], True, callbacks=[Watch()], accumulate_grad_batches=3, max_steps=2)
    assert flags == [True, True, False] * 2


def test_several_devices_are_refused_at_once() -> None:
    pl, _ = modules(FAMILIES[0])
    with pytest.raises(UnsupportedError, match=r"2 devices or processes.*does not shard.*devices=1"):
        pl.Trainer(strategy="tieroffload", accelerator="cpu", devices=2)


def test_a_process_of_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pl, _ = modules(FAMILIES[0])
    for key, value in {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "4",
        "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    with pytest.raises(UnsupportedError, match="4 devices or processes"):
        pl.Trainer(strategy="tieroffload", accelerator="cpu", devices=1)


@pytest.mark.parametrize("root", FAMILIES)
def test_a_compiled_module_is_refused_with_one_clear_error(root: str) -> None:
    pl, toy = modules(root)
    trainer = pl.Trainer(strategy="tieroffload", accelerator="cpu", devices=1, logger=False)
    with pytest.raises(UnsupportedError, match=r"compiled as a whole.*layer\.compile\(\)"):
        trainer.fit(torch.compile(toy()), torch.utils.data.DataLoader(samples(), batch_size=8))


@pytest.mark.parametrize("root", FAMILIES)
def test_the_name_makes_the_packages_own_class(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pl, _ = modules(root)
    monkeypatch.setenv("TIEROFFLOAD_CONFIG", json.dumps({"device_budget": "1GiB", "prefetch_units": 3}))
    by_name = pl.Trainer(strategy="tieroffload", accelerator="cpu", devices=1, logger=False).strategy
    by_class = pl.Trainer(
        strategy=lightning_tieroffload.TierOffloadStrategy(device_budget="2GiB"), accelerator="cpu", logger=False
    ).strategy
    assert type(by_name) is type(by_class) is strategy_class(root)
    assert isinstance(by_name, pl.strategies.ParallelStrategy)
    assert by_name.config.device_budget == 2**30
    assert (by_class.config.device_budget, by_class.config.prefetch_units) == (2**31, 3)


def test_wrong_settings_are_refused_by_the_constructor() -> None:
    with pytest.raises(ConfigError, match="device_budget"):
        lightning_tieroffload.TierOffloadStrategy(device_bugdet="1GiB")
    with pytest.raises(ConfigError, match="Trainer"):
        lightning_tieroffload.TierOffloadStrategy(gradient_clip_val=1.0)
    with pytest.raises(UnsupportedError, match="checkpoint_format"):
        lightning_tieroffload.TierOffloadStrategy(checkpoint_format="sharded")
    with pytest.raises(AttributeError, match="has not been given to a Trainer"):
        _ = lightning_tieroffload.TierOffloadStrategy().root_device


def test_report_and_plan_are_written(tmp_path: Path) -> None:
    fit(FAMILIES[0], True, config={**SLOW_STORE, "trace_path": str(tmp_path / "run")})
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert plan.forecast.to_json() == report["forecast"]
    assert {line["unit"] for line in report["plan"]["units"]} < {line.name for line in plan.units}
    assert report["num_steps"] == 6


def test_the_plan_is_printed_once_and_the_log_is_short(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        fit(FAMILIES[0], True, val_check_interval=2, limit_val_batches=1)
    assert capfd.readouterr().err.lower().count("plan") == 1
    lines = [
        line for record in caplog.records if record.name.startswith("lightning_tieroffload")
        for line in record.getMessage().split("\n")
    ]  # fmt: skip
    assert len(lines) <= 10, lines


def test_cli_file_names_the_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = importlib.import_module("lightning.pytorch.cli")
    _, toy = modules(FAMILIES[0])
    file = tmp_path / "config.yaml"
    file.write_text(
        """
        trainer:
          accelerator: cpu
          devices: 1
          logger: false
          strategy:
            class_path: lightning_tieroffload.TierOffloadStrategy
            init_args:
              device_budget: 1GiB
              nvme_paths: []
        """
    )
    made = cli.LightningCLI(toy, args=["--config", str(file)], run=False, save_config_callback=None)
    assert made.trainer.strategy.config.device_budget == 2**30


def test_configure_model_is_built_on_the_host() -> None:
    pl, toy = modules(FAMILIES[0])

    class Late(toy):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            del self.net

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = mlp()

    results = []
    for strategy in ("auto", lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE)):
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_steps=3,
            enable_progress_bar=False,
        )  # fmt: skip
        seed_all()
        model = Late()
        trainer.fit(model, torch.utils.data.DataLoader(samples(), batch_size=8))
        results.append(outcome(model, trainer))
    assert_same(results[0], results[1])


def test_meta_parameters_get_memory_and_the_checkpoint(tmp_path: Path) -> None:
    _, trainer = fit(FAMILIES[0], False)
    path = str(tmp_path / "six.ckpt")
    trainer.save_checkpoint(path)
    pl, toy = modules(FAMILIES[0])
    with torch.device("meta"):
        model = toy()
    model.scale = nn.Parameter(torch.ones(3))  # a module that owns parameters must be able to reset them
    trainer = pl.Trainer(
        strategy=lightning_tieroffload.TierOffloadStrategy(**SLOW_STORE), accelerator="cpu", devices=1, logger=False
    )
    trainer.validate(model, torch.utils.data.DataLoader(samples(16), batch_size=8), ckpt_path=path, verbose=False)
    assert_same(torch.load(path, weights_only=False)["state_dict"], dict(model.state_dict()))
