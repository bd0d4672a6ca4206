"""A loop in plain PyTorch. With --device-budget its model and optimizer are handed over in one line; the loop stays.

python examples/train_plain_torch.py
python examples/train_plain_torch.py --device-budget 12MiB
"""

from __future__ import annotations

import argparse

import torch
from real_text import byte_windows
from tiny_gpt import TinyGPT


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device-budget", default=None)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    windows = byte_windows(64, 128)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    if options.device_budget is None:
        model.to(device)
    else:
        import lightning_tieroffload

        model, optimizer = lightning_tieroffload.offload(model, optimizer, device_budget=options.device_budget)

    for step in range(1, options.steps + 1):
        batch = windows[torch.randint(len(windows), (4,))].to(device)
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.9f}")

    if options.device_budget is not None:
        engine = lightning_tieroffload.engine_of(model)
        tier = engine.report()["tiers"]["device"]
        print(f"device: at most {tier['peak_nbytes']} of {tier['budget_nbytes']} bytes were in use")
        engine.close()  # the model is an ordinary model again
    print(f"sum of weights {sum(param.double().sum().item() for param in model.parameters()):.12f}")


if __name__ == "__main__":
    main()
