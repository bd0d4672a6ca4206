"""Checkpoint cases (CKP): saved anywhere, resumed anywhere, ordinary files, ties and frozen weights whole."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from exactness import Recording, assert_exact, check, same_bits, seed_all, take_down
from lightning.pytorch.callbacks import ModelCheckpoint
from loopkit import Look, Module, fit, gpt_tiny, loader, mlp, python, starved_settings, trainer
from torch import nn

import lightning_tieroffload as tieroffload
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.offload_engine import engine_of


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    wrong = [key for key in a if not same_bits(a[key], b[key])]
    assert not wrong, wrong[:8]


def offload(model: nn.Module, optimizer: Any = None, **settings: Any) -> Any:
    tieroffload.offload(model, optimizer, device="cpu", **{**starved_settings(model), **settings})
    return engine_of(model)


def train(model: nn.Module, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss if batch.dtype == torch.long else (model(batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches(num: int, *, tokens: bool = False, seed: int = 1) -> list[torch.Tensor]:
    return list(loader(num, tokens=tokens, seed=seed))


# ------------------------------------------------------------------------------------------------ CKP-01


def test_ckp_01_lightning_resume(tmp_path: Path) -> None:
    """CKP-01: 6 steps straight against 3, save, a fresh model and Trainer, 3 more; plain reads our file, we its."""

    def run(ours: bool, epochs: int, save: str | None = None, resume: str | None = None) -> Recording:
        options = {"fit_options": {"ckpt_path": tmp_path / resume}} if resume else {}
        recording, made, _ = fit(
            lambda: Module(gpt_tiny), lambda: loader(3, tokens=True), ours=ours, max_epochs=epochs, **options
        )
        if save:
            made.save_checkpoint(tmp_path / save)
        return recording

    straight = run(False, 2)
    for first in (False, True):
        run(first, 1, save=f"{first}.ckpt")
        for second in (False, True):
            assert_resumed(straight, run(second, 2, resume=f"{first}.ckpt"), num_looks=4)


def assert_resumed(straight: Recording, resumed: Recording, num_looks: int) -> None:
    """The resumed run's looks (three steps and the end) are the last ones of the straight run."""
    assert len(resumed.looks) == num_looks
    assert_exact(Recording(looks=straight.looks[-num_looks:]), resumed)


@pytest.mark.parametrize("save_ours", [True, False])
def test_ckp_01_plain_loop_resume(tmp_path: Path, save_ours: bool) -> None:
    """CKP-01: ``torch.save`` of the state_dicts in the middle, loaded before or after the model is handed over."""
    data = batches(6, tokens=True)
    seed_all(0)
    model = gpt_tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, data)
    straight = take_down(model, [optimizer])

    model = gpt_tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if save_ours:
        offload(model, optimizer)
    train(model, optimizer, data[:3])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    if save_ours:
        engine_of(model).close()
    for load_first in (True, False):
        saved = torch.load(tmp_path / "half.pt", weights_only=True)
        model = gpt_tiny()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        engine = None if load_first else offload(model, optimizer)
        assert model.load_state_dict(saved["model"]) == ([], [])
        optimizer.load_state_dict(saved["optimizer"])
        engine = engine or offload(model, optimizer)
        train(model, optimizer, data[3:])
        assert_same(straight, take_down(model, [optimizer]))
        engine.close()


# ------------------------------------------------------------------------------------------------ CKP-03


class _Three(nn.Module):
    """Three owners of one weight; the one that computes first was registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16)
        self.first = nn.Linear(16, 16, bias=False)
        self.middle.weight = self.first.weight
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def test_ckp_03_tied_weights(tmp_path: Path) -> None:
    """CKP-03: ties hold before, during and after training, save and load; 29 keys, 28 tensors in the file."""
    data = batches(4, tokens=True)
    plain = gpt_tiny()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), data)
    model = gpt_tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = offload(model, optimizer)
    assert model.lm_head.weight is model.transformer.wte.weight
    train(model, optimizer, data)
    state = model.state_dict()
    assert len(state) == 29
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    assert_same(plain.state_dict(), state)
    model.save_pretrained(tmp_path / "ours")
    plain.save_pretrained(tmp_path / "plain")
    from safetensors.torch import load_file

    ours_file, plain_file = (load_file(tmp_path / n / "model.safetensors") for n in ("ours", "plain"))
    assert len(ours_file) == 28
    assert "lm_head.weight" not in ours_file
    assert_same(plain_file, ours_file)
    assert model.load_state_dict(state) == ([], [])
    assert model.lm_head.weight is model.transformer.wte.weight
    engine.close()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_same(plain.state_dict(), model.state_dict())
    again = type(model).from_pretrained(tmp_path / "ours")
    assert again.lm_head.weight is again.transformer.wte.weight
    assert_same(plain.state_dict(), again.state_dict())


def test_ckp_03_three_way_tie() -> None:
    """CKP-03: a tie of three whose first user was registered last; exact, and one object all along."""

    def build() -> Any:
        model = _Three()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: nn.Module, optimizer: Any, look: Any) -> None:
        x = torch.randn(8, 16)
        for _ in range(4):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
            assert model.head.weight is model.first.weight is model.middle.weight
            look()

    check(build, loop)


def test_ckp_03_falsely_tied_stays_untied() -> None:
    """CKP-03: a config that says tied while the tensors are separate: they stay separate and train apart."""
    data = batches(3, tokens=True)

    def made() -> Any:
        model = gpt_tiny()
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    plain, optimizer = made()
    train(plain, optimizer, data)
    model, optimizer = made()
    engine = offload(model, optimizer)
    train(model, optimizer, data)
    assert_same(plain.state_dict(), model.state_dict())
    assert model.lm_head.weight is not model.transformer.wte.weight
    engine.close()
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)


# ------------------------------------------------------------------------------------------------ CKP-04, CKP-05


class _Frozen(Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(lambda: mlp(6), lambda self: torch.optim.AdamW(self.parameters(), lr=1e-2))
        torch.manual_seed(seed)
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def freeze(self, value: float | None) -> _Frozen:
        for layer in self.net[:8]:
            for p in layer.parameters():
                p.requires_grad_(False)
                if value is not None:
                    nn.init.constant_(p, value)
        return self


def test_ckp_04_frozen_weights_resume(tmp_path: Path) -> None:
    """CKP-04: frozen layers are still 7 after a resume in a model of another seed; no optimizer state for them."""
    straight, _, _ = fit(lambda: _Frozen().freeze(7.0), lambda: loader(3), ours=False, max_epochs=2)
    _, first, _ = fit(lambda: _Frozen().freeze(7.0), lambda: loader(3), ours=True, max_epochs=1)
    first.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _, module = fit(
        lambda: _Frozen(seed=5).freeze(None), lambda: loader(3), ours=True, max_epochs=2,
        fit_options={"ckpt_path": tmp_path / "half.ckpt"},
    )  # fmt: skip
    assert_resumed(straight, resumed, num_looks=4)
    assert all(bool((p == 7).all()) for p in module.net[:8].parameters())
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert len(saved["optimizer_states"][0]["state"]) == 6  # three trained layers, weight and bias


class _Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, 64) * 0.1)
        self.b = nn.Parameter(torch.zeros(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.base.weight + self.b @ self.a, self.base.bias)


def test_ckp_04_lora_resume() -> None:
    """CKP-04: adapters alone are saved; with the base model from the user's code the run goes on exactly."""
    data = batches(6)

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(*[_Lora() for _ in range(4)])
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-2)

    plain, optimizer = made()
    train(plain, optimizer, data)
    model, optimizer = made()
    engine = offload(model, optimizer)
    train(model, optimizer, data[:3])
    adapters = {n: p for n, p in model.state_dict().items() if "base" not in n}
    saved = copy.deepcopy({"adapters": adapters, "optimizer": optimizer.state_dict()})
    engine.close()
    again, second = made()
    engine = offload(again, second)
    missing, unexpected = again.load_state_dict(saved["adapters"], strict=False)
    assert len(missing) == 8
    assert unexpected == []
    second.load_state_dict(saved["optimizer"])
    train(again, second, data[3:])
    assert_same(plain.state_dict(), again.state_dict())
    engine.close()


def test_ckp_05_checkpoint_size(tmp_path: Path) -> None:
    """CKP-05: we add nothing: the file is as large as the plain run's, within 1 % or 64 KiB."""
    nbytes = {}
    for ours in (False, True):
        _, made, _ = fit(lambda: _Frozen().freeze(7.0), lambda: loader(3), ours=ours, max_steps=3)
        made.save_checkpoint(tmp_path / f"{ours}.ckpt")
        nbytes[ours] = (tmp_path / f"{ours}.ckpt").stat().st_size
    assert nbytes[True] <= max(1.01 * nbytes[False], nbytes[False] + 65536)


# ------------------------------------------------------------------------------------------------ CKP-06


# Two processes, each with its own rows, that average their gradients as DDP does; over a pipe, since gloo's own
# connections do not come up reliably in every sandbox.
_DDP = """
import multiprocessing, torch
from loopkit import Rows, mlp

def work(rank, pipe):
    torch.manual_seed(0)
    model = mlp(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        (model(Rows(8, seed=10 * step + rank).rows) ** 2).mean().backward()
        pipe.send([p.grad.numpy() for p in model.parameters()])
        for p, other in zip(model.parameters(), pipe.recv()):
            p.grad.add_(torch.from_numpy(other)).div_(2)
        optimizer.step()
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "two.pt")

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=each) for each in enumerate(context.Pipe())]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
"""


def test_ckp_06_other_number_of_processes(tmp_path: Path) -> None:
    """CKP-06: written by two processes, loaded here on one, and ours loaded by plain: bits and counters equal."""
    done = python(_DDP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = torch.load(tmp_path / "two.pt", weights_only=True)
    looks = []
    for ours in (False, True):
        torch.manual_seed(3)
        model = mlp(4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        engine = offload(model, optimizer) if ours else None
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch takes step counters by reference
        look = take_down(model, [optimizer])
        for name, value in saved["model"].items():
            assert same_bits(look[f"state_dict/{name}"], value)
        assert float(look["optimizer0/state/0/step"]) == 3
        train(model, optimizer, batches(2))
        looks.append((look, take_down(model, [optimizer])))
        if engine is not None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "one.pt")
            engine.close()
    for plain, ours_ in zip(*looks, strict=True):
        assert_same(plain, ours_)
    # and back: plain reads what we have written
    saved = torch.load(tmp_path / "one.pt", weights_only=True)
    model = mlp(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert_same(looks[0][1], take_down(model, [optimizer]))


# ------------------------------------------------------------------------------------------------ CKP-10, CKP-11


def test_ckp_10_ordinary_file(tmp_path: Path) -> None:
    """CKP-10: ModelCheckpoint's best and last are standard files; test(ckpt_path="best") and load_from_checkpoint."""
    found = {}
    for ours in (False, True):
        folder = tmp_path / str(ours)
        checkpoint = ModelCheckpoint(folder, monitor="val_loss_0", save_top_k=2, save_last=True, every_n_epochs=1)
        _, made, _ = fit(
            Module, lambda: (loader(3), [loader(1, seed=3)]), ours=ours, max_epochs=3, enable_checkpointing=True,
            callbacks=lambda checkpoint=checkpoint: [checkpoint],
        )  # fmt: skip
        last = torch.load(checkpoint.last_model_path, weights_only=True)
        best = Module.load_from_checkpoint(checkpoint.best_model_path)
        (metrics,) = made.test(Module(), loader(2, seed=4), ckpt_path="best", verbose=False)
        found[ours] = (metrics, best.state_dict(), last)
    assert found[False][0] == found[True][0]
    assert_same(found[False][1], found[True][1])
    plain, ours_ = found[False][2], found[True][2]
    assert plain.keys() == ours_.keys()
    assert_same(plain["state_dict"], ours_["state_dict"])
    for key, entry in plain["optimizer_states"][0]["state"].items():
        assert_same(entry, ours_["optimizer_states"][0]["state"][key])


def test_ckp_10_file_needs_nothing_of_ours(tmp_path: Path) -> None:
    """CKP-10: a process in which the package cannot be imported reads the file, weights_only and otherwise."""
    _, made, _ = fit(Module, lambda: loader(2), ours=True, max_steps=2)
    made.save_checkpoint(tmp_path / "ours.ckpt")
    module = Module()
    engine = offload(module)
    torch.save(module.net, tmp_path / "whole_model.pt")
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    engine.adopt_optimizer(optimizer)
    train(module.net, optimizer, batches(1))
    torch.save(optimizer, tmp_path / "optimizer.pt")
    engine.close()
    done = python(
        """
        import sys
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.startswith("lightning_tieroffload"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Refuse())
        import torch
        saved = torch.load("ours.ckpt", weights_only=True)
        print(len(saved["state_dict"]), len(saved["optimizer_states"][0]["state"]))
        torch.load("ours.ckpt", weights_only=False)
        model = torch.load("whole_model.pt", weights_only=False)
        model(torch.randn(2, 64)).sum().backward()
        model.state_dict()
        optimizer = torch.load("optimizer.pt", weights_only=False)
        assert len(optimizer.state) == 10
        optimizer.step()
        """,
        cwd=tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["10", "10"]


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_ckp_11_evaluation_needs_no_optimizer(tmp_path: Path, what: str) -> None:
    """CKP-11: validate, test and predict with configure_optimizers raising; values exact, no optimizer state held."""
    _, made, _ = fit(Module, lambda: loader(2), ours=True, max_steps=2)
    made.save_checkpoint(tmp_path / "a.ckpt")

    def refuse(self: Any) -> Any:
        raise AssertionError("no optimizer is needed here")

    results = []
    for ours in (False, True):
        module = Module(make_optimizer=refuse)
        run = trainer(starved_settings(module) if ours else None)
        options = {} if what == "predict" else {"verbose": False}
        results.append(getattr(run, what)(module, loader(3, seed=5), ckpt_path=tmp_path / "a.ckpt", **options))
        if ours:
            report = run.strategy.report()
            param_nbytes = sum(p.nbytes for p in module.parameters())
            assert report["tiers"]["dram"]["peak_nbytes"] <= 1.1 * param_nbytes  # neither state nor gradients
    plain, ours_ = results
    if what == "predict":
        assert all(same_bits(a, b) for a, b in zip(plain, ours_, strict=True))
    else:
        assert plain == ours_


# ------------------------------------------------------------------------------------------------ CKP-13


def test_ckp_13_asynchronous_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKP-13: what an asynchronous save writes is the state of the moment of the call, though training goes on."""
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    may_write, trained_on = threading.Event(), []
    save = torch.save

    def late(*arguments: Any, **options: Any) -> None:
        # Without the step counter this would sleep: it writes only after training has gone on for four steps.
        may_write.wait(timeout=60)
        save(*arguments, **options)

    def run(ours: bool) -> tuple[Look, Path]:
        may_write.clear()
        path = tmp_path / f"{ours}.ckpt"

        class Save(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                if trainer.global_step == 2:
                    trainer.save_checkpoint(path)
                if trainer.global_step == 6:
                    trained_on.append(not path.exists())
                    may_write.set()

        look = Look()
        fit(
            Module, lambda: loader(6), ours=ours, look=look, callbacks=lambda: [Save()], max_steps=6,
            plugins=[AsyncCheckpointIO()],
        )  # fmt: skip
        return look, path

    monkeypatch.setattr(torch, "save", late)
    look, path = run(ours=True)
    assert trained_on == [True]
    saved = torch.load(path, weights_only=True)
    at_step_2 = look.recording.looks[1]
    for name, value in saved["state_dict"].items():
        assert same_bits(at_step_2[f"state_dict/{name}"], value), name
    for index, entry in saved["optimizer_states"][0]["state"].items():
        for key, value in entry.items():
            assert same_bits(at_step_2[f"optimizer0/state/{index}/{key}"], value), (index, key)


# ------------------------------------------------------------------------------------------------ CKP-17 to CKP-19


def test_ckp_17_loading_keeps_placement() -> None:
    """CKP-17: where each tensor lives is the same before and after a load, and the device stays within its budget."""
    model = mlp(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = offload(model, optimizer)
    train(model, optimizer, batches(3))

    def places() -> dict[str, Any]:
        result = {}
        for unit in engine.units:
            for slot in unit.slots:
                entry = optimizer.state[slot.param]
                result[slot.name] = {k: v.device for k, v in entry.items()}, slot.home.data_ptr()
        return result

    before, saved = places(), copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    fetched = engine.report()["moved_nbytes"]["h2d"]
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    assert places() == before
    account = engine.space.ledger[Tier.DEVICE]
    assert account.peak_nbytes <= account.budget_nbytes
    assert engine.report()["moved_nbytes"]["h2d"] == fetched  # a load goes to the homes, not over the device
    engine.close()


class _Odd(torch.optim.Optimizer):
    """State entries that are no ordinary tensors, and moments of another dtype than the parameter's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        count=0, name="odd", pair=(1, 2.5), scale=torch.tensor(1.0),
                        moment=torch.zeros(p.shape, dtype=torch.float32),
                    )  # fmt: skip
                state["count"] += 1
                state["scale"] *= 0.9
                state["moment"] += p.grad.float()
                p -= (group["lr"] * state["scale"] * state["moment"]).to(p.dtype)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        moments = {k: v["moment"] for k, v in state_dict["state"].items()}
        super().load_state_dict(state_dict)
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                if index in moments:
                    self.state[p]["moment"] = moments[index].clone()
                index += 1


@pytest.mark.parametrize("make", [lambda ps: torch.optim.AdamW(ps, lr=1e-2), lambda ps: _Odd(ps, lr=1e-2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ckp_18_19_types_and_precision_of_state(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """CKP-18, CKP-19: int, str, tuple and 0-dim entries keep their types; fp32 moments of bf16 parameters as plain."""

    def run(ours: bool) -> list[dict[str, Any]]:
        seed_all(0)
        model = mlp(3).to(dtype)
        optimizer = make(model.parameters())
        engine = offload(model, optimizer) if ours else None
        data = [b.to(dtype) for b in batches(6)]
        train(model, optimizer, data[:3])
        looks = [take_down(model, [optimizer])]
        torch.save(optimizer.state_dict(), tmp_path / "odd.pt")
        fresh = make(model.parameters())
        if ours:
            engine.adopt_optimizer(fresh)
        fresh.load_state_dict(torch.load(tmp_path / "odd.pt", weights_only=True))
        looks.append(take_down(model, [fresh]))
        train(model, fresh, data[3:])
        looks.append(take_down(model, [fresh]))
        for look in looks[1:]:  # torch's own load_state_dict turns a str into the text of a generator
            for key in [key for key in look if key.endswith("/name")]:
                look[key] = type(look[key]).__name__
        types = {k: type(v) for k, v in fresh.state[next(iter(model.parameters()))].items()}
        looks.append({f"type/{k}": v.__name__ for k, v in types.items()})
        if ours:
            engine.close()
        return looks

    for plain, ours_ in zip(run(False), run(True), strict=True):
        assert_same(plain, ours_)


# ------------------------------------------------------------------------------------------------ CKP-21


@pytest.mark.parametrize("when", ["before set-up", "after set-up", "in configure_model"])
def test_ckp_21_pretrained_weights(tmp_path: Path, when: str) -> None:
    """CKP-21: constant weights loaded at three moments; the first evaluation loss is plain's, no key is missing."""
    source = gpt_tiny()
    with torch.no_grad():
        for p in source.parameters():
            p.fill_(0.01)
    saved = source.state_dict()
    source.save_pretrained(tmp_path)

    class Loading(Module):
        def configure_model(self) -> None:
            if when == "in configure_model":
                self.net = type(source).from_pretrained(tmp_path)

        def on_validation_start(self) -> None:
            if when == "after set-up":
                assert self.net.load_state_dict(saved) == ([], [])
                wrong = {**saved, "transformer.ln_f.weight": torch.ones(5)}
                with pytest.raises(RuntimeError, match=r"size mismatch for transformer\.ln_f\.weight.*\[5\].*\[32\]"):
                    self.net.load_state_dict(wrong)

    found = []
    for ours in (False, True):
        module = Loading(gpt_tiny)
        if when == "before set-up":
            assert module.net.load_state_dict(saved) == ([], [])
        run = trainer(starved_settings(module) if ours else None)
        found.append(run.validate(module, loader(2, tokens=True, seed=7), verbose=False))
        assert_same(saved, module.net.state_dict())
    assert found[0] == found[1]
