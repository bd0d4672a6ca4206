"""Floor 2. A Llama-shaped language model in plain PyTorch with random weights, for `tieroffload bench train`.

Owns a model definition and a table of sizes; knows nothing of the engine. Real checkpoints are not needed to measure
time and memory: shapes decide both. Every layer is recomputed in backward (non-reentrant checkpoint), and the loss is
taken in chunks of positions that are recomputed too, as full logits would need about 12 bytes × vocabulary a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["LLAMA_SIZES", "DecoderLayer", "LlamaShape", "LlamaSize", "RMSNorm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaSize:
    """Hyper-parameters of one shape. Parameters are counted with the embedding tied to the head where ``tied``."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate: int
    vocabulary: int = 128256
    tied: bool = True
    head_size: int | None = None


LLAMA_SIZES = {
    "tiny": LlamaSize(hidden=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate=384, vocabulary=1024),
    "0.1b": LlamaSize(hidden=768, num_layers=8, num_heads=12, num_kv_heads=4, intermediate=2048, vocabulary=32000),
    "0.3b": LlamaSize(hidden=1024, num_layers=16, num_heads=16, num_kv_heads=8, intermediate=2816, vocabulary=32000),
    "1b": LlamaSize(hidden=2048, num_layers=16, num_heads=32, num_kv_heads=8, intermediate=8192),
    "3b": LlamaSize(hidden=3072, num_layers=28, num_heads=24, num_kv_heads=8, intermediate=8192),
    "5b": LlamaSize(hidden=4096, num_layers=18, num_heads=32, num_kv_heads=8, intermediate=14336, tied=False),
    "8b": LlamaSize(hidden=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate=14336, tied=False),
    "14b": LlamaSize(
        hidden=5120, num_layers=40, num_heads=40, num_kv_heads=8, intermediate=17408, vocabulary=151936, tied=False,
        head_size=128,
    ),
}  # fmt: skip


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * wide).to(x.dtype)


class DecoderLayer(nn.Module):
    def __init__(self, shape: LlamaSize) -> None:
        super().__init__()
        self.shape = shape
        head = shape.head_size or shape.hidden // shape.num_heads
        self.head = head
        self.attention_norm = RMSNorm(shape.hidden)
        self.q = nn.Linear(shape.hidden, shape.num_heads * head, bias=False)
        self.k = nn.Linear(shape.hidden, shape.num_kv_heads * head, bias=False)
        self.v = nn.Linear(shape.hidden, shape.num_kv_heads * head, bias=False)
        self.o = nn.Linear(shape.num_heads * head, shape.hidden, bias=False)
        self.mlp_norm = RMSNorm(shape.hidden)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        h = self.attention_norm(x)
        q = self.q(h).view(batch, length, -1, self.head).transpose(1, 2)
        k = self.k(h).view(batch, length, -1, self.head).transpose(1, 2)
        v = self.v(h).view(batch, length, -1, self.head).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, -1))
        h = self.mlp_norm(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def _angles(shape: LlamaSize, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary cosines and sines, fp32, of shape (max_length, head_size)."""
    head = shape.head_size or shape.hidden // shape.num_heads
    angles = torch.outer(torch.arange(max_length), 500000.0 ** (-torch.arange(0, head, 2) / head))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class LlamaShape(nn.Module):
    """``forward(ids)`` with int64 ids of shape (batch, length) gives the mean next-token loss, a scalar."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(
        self, shape: LlamaSize, *, max_length: int, recompute: bool = True, loss_positions: int = 2048
    ) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = recompute
        self.loss_positions = loss_positions
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        cos, sin = _angles(shape, max_length)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @classmethod
    def with_random_weights(
        cls, shape: LlamaSize, *, max_length: int, seed: int, device: torch.device, recompute: bool = True
    ) -> LlamaShape:
        """The model on the CPU; each weight is drawn on ``device`` by a generator of its own, which is fast."""
        with torch.device("meta"):
            model = cls(shape, max_length=max_length, recompute=recompute)
        made: dict[int, nn.Parameter] = {}
        for index, module in enumerate(model.modules()):
            for offset, (name, p) in enumerate(list(module._parameters.items())):
                if p is None:
                    continue
                if id(p) not in made:
                    generator = torch.Generator(device).manual_seed(seed + 1000 * index + offset)
                    if isinstance(module, RMSNorm):
                        value = torch.ones(p.shape)
                    else:
                        value = torch.empty(p.shape, device=device).normal_(0.0, 0.02, generator=generator).cpu()
                    made[id(p)] = nn.Parameter(value)
                module._parameters[name] = made[id(p)]
        model.cos, model.sin = _angles(shape, max_length)
        return model

    def gradient_checkpointing_enable(self) -> None:
        """Recompute every layer in backward; the name is the one that Hugging Face's models have."""
        self.recompute = True

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False) if self.recompute else layer(x, cos, sin)
        x = self.norm(x)[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        total: torch.Tensor = x.new_zeros((), dtype=torch.float32)
        for start in range(0, x.shape[0], self.loss_positions):
            part, wanted = x[start : start + self.loss_positions], labels[start : start + self.loss_positions]
            total = total + checkpoint(self._loss, part, wanted, use_reentrant=False)
        return total / labels.numel()

    def _loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x).float(), labels, reduction="sum")
