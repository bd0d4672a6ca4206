"""transformers' Trainer with a `tieroffload_config` against the same script without it, bit by bit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator
import pytest
import torch
import transformers.trainer
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from toys import assert_same, rng_states, seed_all, snapshot
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import _tieroffload_hooks
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.strategies import accelerate_plugin, hf_trainer

pytestmark = pytest.mark.usefixtures("one_thread")
KEYS = (_tieroffload_hooks.ENABLED_KEY, _tieroffload_hooks.REQUIRED_KEY, _tieroffload_hooks.CONFIG_KEY)
STARVED = {"device_budget": "128KiB", "optimizer_kernel": "torch", "debug": ["poison", "delays"]}

accelerate_plugin.hook_accelerator(accelerate.accelerator)
hf_trainer.hook_trainer(transformers.trainer)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def gpt_tiny(**options: Any) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=97, n_positions=32, bos_token_id=0, eos_token_id=0, **options
        )
    )


def texts(num: int, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    """Token ids; the labels of each text start after another number of ignored positions."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for index in range(num):
        ids = torch.randint(0, 97, (16,), generator=generator)
        labels = ids.clone()
        labels[: 3 * index % 13] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


class Watch(TrainerCallback):
    """Takes down what is logged, and whether an engine had the model when training began."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.was_managed: list[bool] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        self.was_managed.append(engine_of(model) is not None)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.logs.append({k: v for k, v in logs.items() if not any(word in k for word in ("time", "per_second"))})


def make(
    ours: bool, folder: Path, *, model: Any = None, dropout: float = 0.1, config: Any = None, **arguments: Any
) -> Trainer:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for key in KEYS:
        os.environ.pop(key, None)
    if ours:
        _tieroffload_hooks.announce(json.dumps(config or STARVED))
    seed_all()
    model = model or gpt_tiny(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    defaults = {
        "output_dir": str(folder), "use_cpu": True, "max_steps": 6, "per_device_train_batch_size": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "seed": 3,
    }  # fmt: skip
    return Trainer(
        model, TrainingArguments(**{**defaults, **arguments}), train_dataset=texts(24), eval_dataset=texts(6, seed=9),
        callbacks=[Watch()],
    )  # fmt: skip


def outcome(trainer: Trainer) -> dict[str, Any]:
    watch = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Watch))
    raw = trainer.optimizer.optimizer
    result = {**snapshot(trainer.model, raw), "logs": watch.logs, "rng": rng_states()}
    engine = engine_of(trainer.model)
    if engine is not None:
        engine.close()
        assert_same(snapshot(trainer.model, raw), {key: result[key] for key in ("model", "optimizers")})
    return result


def train(ours: bool, folder: Path, *, resume: str | None = None, **options: Any) -> dict[str, Any]:
    trainer = make(ours, folder, **options)
    trainer.train(resume_from_checkpoint=resume)
    watch = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Watch))
    assert watch.was_managed == [ours]
    return outcome(trainer)


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulate and clip": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "max_steps": 4},
    "no clipping": {"max_grad_norm": 0.0},
    "bf16": {"bf16": True},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "evaluation inside": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "sgd, two epochs": {"optim": "sgd", "num_train_epochs": 2, "max_steps": -1, "per_device_train_batch_size": 8},
}


SLOW = ("no clipping", "sgd, two epochs")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES])
def test_training_equals_plain(case: str, tmp_path: Path) -> None:
    assert_same(train(False, tmp_path / "plain", **CASES[case]), train(True, tmp_path / "ours", **CASES[case]))


@pytest.mark.parametrize(("first_is_ours", "second_is_ours"), [(False, True), (True, False), (True, True)])
def test_resume_in_all_directions(first_is_ours: bool, second_is_ours: bool, tmp_path: Path) -> None:
    train(first_is_ours, tmp_path, save_strategy="steps", save_steps=3)
    checkpoint = str(tmp_path / "checkpoint-3")
    plain = train(False, tmp_path / "a", resume=checkpoint)
    assert_same(plain, train(second_is_ours, tmp_path / "b", resume=checkpoint))


def test_checkpoint_files_are_those_of_plain(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folders = [tmp_path / "plain", tmp_path / "ours"]
    for ours, folder in enumerate(folders):
        train(bool(ours), folder, save_strategy="steps", save_steps=6)
    plain, ours = (folder / "checkpoint-6" for folder in folders)
    assert sorted(p.name for p in plain.iterdir()) == sorted(p.name for p in ours.iterdir())
    weights = load_file(ours / "model.safetensors")
    assert len(weights) == 28, "the head is tied and not saved twice"
    assert_same(load_file(plain / "model.safetensors"), weights)
    for name in ("optimizer.pt", "scheduler.pt"):
        assert_same(torch.load(plain / name), torch.load(ours / name))


def test_best_model_is_loaded_into_the_live_engine(tmp_path: Path) -> None:
    """CKP-12: a learning rate so high that an early checkpoint is the best one."""
    results = []
    for ours in (False, True):
        trainer = make(
            ours, tmp_path / str(ours), learning_rate=0.3, eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
        )  # fmt: skip
        trainer.train()
        assert (engine_of(trainer.model) is not None) is ours
        after = trainer.evaluate()
        assert after["eval_loss"] == trainer.state.best_metric
        results.append({**outcome(trainer), "best": trainer.state.best_metric, "tied": trainer.model.lm_head.weight is
                        trainer.model.transformer.wte.weight})  # fmt: skip
    assert_same(results[0], results[1])
    assert results[1]["tied"]


def test_evaluate_and_predict_without_training_then_train(tmp_path: Path) -> None:
    results = []
    for ours in (False, True):
        trainer = make(ours, tmp_path / str(ours))
        before = {k: v for k, v in trainer.evaluate().items() if k == "eval_loss"}
        predictions = trainer.predict(texts(4)).predictions
        assert (engine_of(trainer.model) is not None) is ours
        trainer.train()
        results.append({**outcome(trainer), "before": before, "predictions": torch.from_numpy(predictions)})
    assert_same(results[0], results[1])


class Middle(TrainerCallback):
    """Generates, and saves the model, between two steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generated: torch.Tensor | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            model.eval()
            prompt = torch.tensor([[1, 2, 3]])
            self.generated = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
            model.train()
            model.save_pretrained(self.folder)


def test_evaluation_in_half_precision_recasts_the_model(tmp_path: Path) -> None:
    results = []
    for ours in (False, True):
        trainer = make(ours, tmp_path / str(ours), bf16_full_eval=True)
        losses = [trainer.evaluate()["eval_loss"]]
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
        assert (engine_of(trainer.model) is not None) is ours
        results.append({"model": dict(trainer.model.state_dict()), "losses": losses})
    assert trainer.model.dtype is torch.bfloat16
    assert_same(results[0], results[1])


def test_generate_and_save_pretrained_in_the_middle(tmp_path: Path) -> None:
    results = []
    for ours in (False, True):
        folder = tmp_path / str(ours)
        trainer = make(ours, folder)
        middle = Middle(folder / "middle")
        trainer.add_callback(middle)
        trainer.train()
        again = GPT2LMHeadModel.from_pretrained(folder / "middle")
        results.append({**outcome(trainer), "generated": middle.generated, "middle": dict(again.state_dict())})
    assert_same(results[0], results[1])


def test_training_twice_with_one_trainer(tmp_path: Path) -> None:
    results = []
    for ours in (False, True):
        trainer = make(ours, tmp_path / str(ours), max_steps=3)
        trainer.train()
        trainer.train()
        results.append(outcome(trainer))
    assert_same(results[0], results[1])


def test_pretrained_weights_come_from_a_mapped_file(tmp_path: Path) -> None:
    """CKP-21: `from_pretrained` gives storages over the file, which cannot be resized."""
    seed_all(11)
    gpt_tiny().save_pretrained(tmp_path / "base")
    results = []
    for ours in (False, True):
        model, info = GPT2LMHeadModel.from_pretrained(tmp_path / "base", output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        results.append(train(ours, tmp_path / str(ours), model=model))
    assert_same(results[0], results[1])


def test_lora_trains_the_adapter_only(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    results = []
    for ours in (False, True):
        seed_all(1)
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
        model = peft.get_peft_model(gpt_tiny(), config)
        results.append(train(ours, tmp_path / str(ours), model=model))
    assert_same(results[0], results[1])


def test_the_report_is_written_when_training_ends(tmp_path: Path) -> None:
    train(True, tmp_path / "out", config={**STARVED, "trace_path": str(tmp_path / "trace")})
    report = json.loads((tmp_path / "trace" / "report.json").read_text())
    assert report["num_steps"] == 6
    assert json.loads((tmp_path / "trace" / "plan.json").read_text())["forecast"] == report["forecast"]


def test_one_device_is_counted_where_many_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ours, num in ((False, 4), (True, 1)):
        trainer = make(ours, tmp_path)
        trainer.args._n_gpu = 4
        assert trainer.args.n_gpu == num
        assert trainer.args.train_batch_size == 2 * num


def test_the_model_is_not_moved_before_it_is_prepared(tmp_path: Path) -> None:
    moved = []

    class Noting(GPT2LMHeadModel):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            moved.append(args)
            return super().to(*args, **kwargs)

    config = gpt_tiny().config
    make(False, tmp_path, model=Noting(config))
    assert len(moved) == 1
    make(True, tmp_path, model=Noting(config))
    assert len(moved) == 1
