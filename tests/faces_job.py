"""One training script for a Llama shape, Lightning or a raw Accelerator loop; it does not know tieroffload.

What is beside it decides whether it is offloaded: the strategy's name, or the file that `accelerate launch` is given.
A process of its own each time (``tests/faces.py``). Weights and token ids are made from seeds, the same in every run;
the ids are skewed so that there is something to learn. The last line that is printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightning_tieroffload.llama_shape import LLAMA_SIZES, LlamaShape, LlamaSize
from lightning_tieroffload.sizes import parse_nbytes


class HuggingFaceLlama(nn.Module):
    """Transformers' Llama of the same shape. The loss is taken in pieces: full logits alone would fill 24 GiB."""

    def __init__(self, shape: LlamaSize, *, max_length: int, device: torch.device) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, vocab_size=shape.vocabulary,
            tie_word_embeddings=shape.tied, max_position_embeddings=max_length, use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):  # drawn there, as a CPU would take minutes
            self.llama = LlamaForCausalLM(config)
        self.llama.to("cpu")
        self.llama.train()

    def gradient_checkpointing_enable(self) -> None:
        self.llama.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.llama.model(ids).last_hidden_state[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        total = x.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(x.split(2048), labels.split(2048), strict=True):
            total = total + checkpoint(self._loss, part, wanted, use_reentrant=False)
        return total / labels.numel()

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.llama.lm_head(x).float(), labels, reduction="sum")


def make_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    shape = LLAMA_SIZES[options.size]
    model: nn.Module
    if options.model == "hf":
        model = HuggingFaceLlama(shape, max_length=options.seq, device=device)
    else:
        model = LlamaShape.with_random_weights(shape, max_length=options.seq, seed=0, device=device, recompute=False)
    model.gradient_checkpointing_enable()
    return model


def make_rows(options: argparse.Namespace) -> torch.utils.data.DataLoader:
    """``steps`` batches; low ids are frequent, so the loss falls."""
    generator = torch.Generator().manual_seed(1)
    even = torch.rand(options.steps * options.batch, options.seq, generator=generator, dtype=torch.float64)
    ids = (even**4 * LLAMA_SIZES[options.size].vocabulary).long()
    return torch.utils.data.DataLoader(ids, batch_size=options.batch)


class Seen:
    """Losses stay where they are until the end, so that nothing waits for them."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.marks_s = [time.perf_counter()]

    def step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach().clone())
        self.marks_s.append(time.perf_counter())


def with_lightning(options: argparse.Namespace, model: nn.Module, seen: Seen) -> None:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
            self.last = self.model(ids)
            return self.last

        def on_train_batch_end(self, *_: Any) -> None:
            seen.step(self.last)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=options.lr)

    trainer = pl.Trainer(
        strategy=options.strategy, accelerator="cpu" if options.cpu else "gpu", devices=1, precision="bf16-mixed",
        max_epochs=1, gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), make_rows(options))


def with_accelerate(options: argparse.Namespace, model: nn.Module, seen: Seen) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    model, optimizer, rows = accelerator.prepare(model, optimizer, make_rows(options))
    for ids in rows:
        loss = model(ids)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.step(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("face", choices=("lightning", "accelerate"))
    parser.add_argument("--model", default="shape", choices=("shape", "hf"))
    parser.add_argument("--size", default="3b", choices=LLAMA_SIZES)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--cap", default="", help="most memory that the process may have on the GPU, e.g. 24GiB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    start_s = time.perf_counter()
    if device.type == "cuda" and options.cap:
        total_nbytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_nbytes(options.cap, key="cap") / total_nbytes)
    model = make_model(options, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seen = Seen()
    build_s = time.perf_counter() - start_s
    {"lightning": with_lightning, "accelerate": with_accelerate}[options.face](options, model, seen)
    figures: dict[str, Any] = {
        **vars(options), "num_parameters": sum(p.numel() for p in model.parameters()),
        "dtypes": sorted({str(p.dtype) for p in model.parameters()}), "build_s": build_s,
        "losses": [float(loss) for loss in seen.losses],
        "step_s": [after - before for before, after in zip(seen.marks_s, seen.marks_s[1:], strict=False)],
        "host_peak_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip
    if device.type == "cuda":
        figures["device"] = torch.cuda.get_device_name(device)
        figures["device_peak_nbytes"] = torch.cuda.max_memory_allocated(device)
        figures["device_reserved_peak_nbytes"] = torch.cuda.max_memory_reserved(device)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
