"""An ordinary script around transformers' Trainer: every option of TrainingArguments is an option of the script.

accelerate launch --config_file configs/accelerate_cpu.yaml examples/train_hf_trainer.py --output_dir out --max_steps 20
"""

from __future__ import annotations

import torch
from real_text import byte_windows
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


class ByteWindows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, windows: torch.Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    (options,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(options.seed)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=128, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    windows = byte_windows(64, 128)
    trainer = Trainer(
        model=model, args=options, train_dataset=ByteWindows(windows[:-8]), eval_dataset=ByteWindows(windows[-8:])
    )
    result = trainer.train(resume_from_checkpoint=options.resume_from_checkpoint)
    print(f"training loss {result.training_loss:.9f}")
    print(f"evaluation loss {trainer.evaluate()['eval_loss']:.9f}")
    trainer.save_model()


if __name__ == "__main__":
    main()
