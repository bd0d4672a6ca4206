"""Small models and data that tests of exactness share. Everything is seeded by the caller's global generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


def mlp(depth: int, width: int = 64) -> nn.Sequential:
    """``depth`` times Linear+GELU, then a Linear to one number."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def mlp_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) ** 2).mean()


def batches(count: int, *shape: int, seed: int = 1) -> list[torch.Tensor]:
    """``count`` normal batches from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*(shape or (16, 64)), generator=generator) for _ in range(count)]


def steps(loss_of: Callable[[Any, torch.Tensor], torch.Tensor], num_steps: int = 3, *shape: int) -> Any:
    """The plain loop: forward, backward, step, zero_grad."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(num_steps, *shape):
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    return loop


def gpt_tiny(**overrides: Any) -> Any:
    """28 parameters, 29,600 elements, 29 state_dict keys; the head is tied to the embedding. No dropout by default."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 97, "n_positions": 32, "bos_token_id": 0,
        "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**{**settings, **overrides}))


def adamw_gpt() -> Any:
    model = gpt_tiny()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def gpt_steps(num_steps: int, *, autocast: bool = False, clip: float | None = None, **how: Any) -> Any:
    """A loop over a GPT, in bf16 with ``autocast``; ``how`` goes to its forward."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        model.train()
        for ids in token_batches(num_steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids, **how).loss
            loss.backward()
            seen = {} if clip is None else {"norm": clip_grad_norm_(model.parameters(), clip)}
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss.detach(), **seen)

    return loop


def token_batches(count: int, rows: int = 4, length: int = 16, vocab: int = 97, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (rows, length), generator=generator) for _ in range(count)]


class Block(nn.Module):
    """A residual block, the repeated child that makes a unit."""

    def __init__(self, width: int = 24, hidden: int = 40) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a ModuleList, with a head."""

    def __init__(self, depth: int = 4, width: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)
