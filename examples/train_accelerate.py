"""An ordinary Accelerate script. Under tieroffload it is started with another configuration file, and that is all.

accelerate launch --config_file configs/accelerate_cpu_plain.yaml examples/train_accelerate.py
accelerate launch --config_file configs/accelerate_cpu.yaml examples/train_accelerate.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from real_text import byte_windows
from tiny_gpt import TinyGPT
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--save-to", default=None, help="folder for the accelerator's state at the end")
    options = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate)
    set_seed(0)
    windows = byte_windows(64, 128)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    model, optimizer, train, evaluation, schedule = accelerator.prepare(
        model,
        optimizer,
        DataLoader(windows[:-8], batch_size=4, shuffle=True),
        DataLoader(windows[-8:], batch_size=4),
        schedule,
    )

    num_steps = 0
    while num_steps < options.max_steps:
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                num_steps += 1
                if num_steps % 5 == 0:
                    accelerator.print(f"step {num_steps:3d}  loss {loss.item():.9f}")
                if num_steps == options.max_steps:
                    break

    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(batch)).mean() for batch in evaluation]
    accelerator.print(f"evaluation loss {torch.stack(losses).mean().item():.9f}")
    if options.save_to:
        accelerator.save_state(options.save_to)


if __name__ == "__main__":
    main()
