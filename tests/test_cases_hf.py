"""TRN and CKP cases through the HF Trainer and Accelerate: one script that does not know us, run plain and with us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import same_bits
from loopkit import gpt_tiny, start, starved_settings

SCRIPT = """
import sys, shutil, torch
import accelerate
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from loopkit import Rows, gpt_tiny

def data(num, seed=1, ignored=True):
    rows = []
    for index, row in enumerate(Rows(num, tokens=True, seed=seed).rows):
        labels = row.clone()
        if ignored:
            labels[: index % 5 * 2] = -100     # unequal label counts
        rows.append({"input_ids": row, "labels": labels})
    return rows

def arguments(name, **options):
    options = {"per_device_train_batch_size": 1, "logging_steps": 1, "report_to": "none", "save_strategy": "no",
               "disable_tqdm": True, "use_cpu": True, "learning_rate": 5e-5, "seed": 3, **options}
    return TrainingArguments(output_dir=name, **options)

def logged(trainer):
    skip = ("runtime", "per_second", "flos", "epoch")
    return [{k: v for k, v in entry.items() if not any(s in k for s in skip)} for entry in trainer.state.log_history]

found = {}

# TRN-05, TRN-16, NUM-09: 7 samples, accumulation 3, 2 epochs; V18's learning rates; the norm before clipping
model = gpt_tiny(resid_pdrop=0.1)
trainer = Trainer(model, arguments("a", num_train_epochs=2, gradient_accumulation_steps=3, max_grad_norm=0.5),
                  train_dataset=data(7))
trainer.train()
found["loop"] = logged(trainer), trainer.state.global_step, model.state_dict()

# CKP-12: the learning rate is so high that step 2 is best
model = gpt_tiny()
options = dict(max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
               load_best_model_at_end=True, learning_rate=1.0, lr_scheduler_type="constant")
trainer = Trainer(model, arguments("b", **options), train_dataset=data(7), eval_dataset=data(3, seed=2))
trainer.train()
evals = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
found["best"] = evals, trainer.state.best_metric, trainer.evaluate()["eval_loss"], model.state_dict()

# CKP-01, CKP-20: straight 6 against 3 + 3, dropout, in a fresh Trainer
model = gpt_tiny(resid_pdrop=0.1, attn_pdrop=0.1)
trainer = Trainer(model, arguments("c", max_steps=6, save_strategy="steps", save_steps=3), train_dataset=data(9))
trainer.train()
found["straight"] = logged(trainer), model.state_dict(), trainer.optimizer.state_dict()
set_seed(99)
model = gpt_tiny(resid_pdrop=0.1, attn_pdrop=0.1)
trainer = Trainer(model, arguments("c2", max_steps=6), train_dataset=data(9))
trainer.train(resume_from_checkpoint="c/checkpoint-3")
found["resumed"] = logged(trainer), model.state_dict(), trainer.optimizer.state_dict()
trainer.save_model("saved")
found["saved"] = GPT2LMHeadModel.from_pretrained("saved").state_dict()
del trainer

# CKP-01 with a raw Accelerator: save_state, load_state; accumulation, clipping, a scheduler
def raw(num_steps, load=None, save=None):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(5)
    model = gpt_tiny(resid_pdrop=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=6)
    rows = torch.utils.data.DataLoader(Rows(12, tokens=True), batch_size=1)
    model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, schedule)
    batches = list(rows)   # before the load: iterating draws a seed from the generator that load_state restores
    norms = []
    if load:
        accelerator.load_state(load)
    for row in batches if load is None else batches[2 * num_steps :]:
        with accelerator.accumulate(model):
            loss = model(input_ids=row, labels=row).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if save and len(norms) == num_steps:
            accelerator.save_state(save)
            break
    unwrapped = accelerator.unwrap_model(model)
    return norms, unwrapped.state_dict(), optimizer.state_dict(), schedule.get_last_lr()

found["raw straight"] = raw(6)
found["raw half"] = raw(3, save="state")
found["raw resumed"] = raw(3, load="state")

import lightning_tieroffload
engines = lightning_tieroffload.engine_of(model)
found["ours"] = None if engines is None else engines.report()["tiers"]["device"]
torch.save(found, "found.pt")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script found plain and with us; both processes run at the same time."""
    settings = starved_settings(gpt_tiny())
    processes = []
    for name, use in (("plain", None), ("ours", settings)):
        folder: Path = tmp_path_factory.mktemp(name)
        processes.append((folder, start(SCRIPT, cwd=folder, settings=use)))
    found = []
    for folder, process in processes:
        try:
            _, err = process.communicate(timeout=400)
        except BaseException:
            process.kill()
            process.wait()
            raise
        assert process.returncode == 0, err[-3000:]
        found.append(torch.load(folder / "found.pt", weights_only=True))
    assert found[0]["ours"] is None
    assert found[1]["ours"]["peak_nbytes"] <= found[1]["ours"]["budget_nbytes"]
    return found


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return same_bits(a, b)


def test_trn_05_trn_16_hf_trainer(runs: list[dict[str, Any]]) -> None:
    """TRN-05, TRN-16, V18: 3 steps an epoch, the learning rates and the logged norms of the plain run, exact."""
    plain, ours = (run["loop"] for run in runs)
    assert plain[1] == ours[1] == 6
    assert [round(entry["learning_rate"] * 1e5, 2) for entry in ours[0][:3]] == [5.0, 4.17, 3.33]
    assert all("grad_norm" in entry for entry in ours[0][:6])
    assert equal(plain, ours)


def test_ckp_12_load_best_model_at_end(runs: list[dict[str, Any]]) -> None:
    """CKP-12: the best weights are loaded into the live model; evaluation gives the recorded best exactly."""
    plain, ours = (run["best"] for run in runs)
    evals, best, again, _ = ours
    assert evals[0] == min(evals[:3]) == best == again
    assert equal(plain, ours)


def test_ckp_01_ckp_20_hf_resume(runs: list[dict[str, Any]]) -> None:
    """CKP-01, CKP-20: ``resume_from_checkpoint``: losses of steps 4 to 6, weights and moments exact, with dropout."""
    plain, ours = runs
    assert equal(plain["straight"], ours["straight"])
    assert equal(plain["resumed"], ours["resumed"])
    straight, resumed = ours["straight"], ours["resumed"]
    assert [e["loss"] for e in straight[0][3:6]] == [e["loss"] for e in resumed[0] if "loss" in e][-3:]
    assert equal(straight[1:], resumed[1:])
    assert equal(ours["saved"], resumed[1])


def test_ckp_01_accelerate_save_and_load_state(runs: list[dict[str, Any]]) -> None:
    """CKP-01: ``accelerator.save_state`` and ``load_state``: 3 + 3 steps are 6 steps, exact, norms and lr as plain."""
    plain, ours = runs
    for name in ("raw straight", "raw half", "raw resumed"):
        assert equal(plain[name], ours[name]), name
    straight, resumed = ours["raw straight"], ours["raw resumed"]
    assert equal(straight[0][3:], resumed[0])
    assert equal(straight[1:], resumed[1:])
