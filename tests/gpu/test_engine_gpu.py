"""The engine on a CUDA device: the same numbers for every budget, close to plain, memory within the budget."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lightning_tieroffload
from lightning_tieroffload.sizes import MiB

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def build(width: int = 512, depth: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), *[Block(width) for _ in range(depth)], nn.Linear(width, 64))


def train(
    model: nn.Module,
    *,
    steps: int = 6,
    amp: torch.dtype | None = None,
    accumulate: int = 1,
    clip: float | None = 1.0,
    offload: dict | None = None,
    busy: bool = False,
) -> tuple[list[float], dict[str, torch.Tensor], dict | None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if offload is None:
        model.cuda()
    else:
        model, optimizer = lightning_tieroffload.offload(model, optimizer, **offload)
    generator = torch.Generator().manual_seed(1)
    seen: list[float] = []
    for _ in range(steps):
        for _ in range(accumulate):
            x = torch.randn(256, 64, generator=generator).cuda()
            if busy:
                torch.cuda._sleep(20_000_000)
            with torch.autocast("cuda", amp, enabled=amp is not None):
                loss = ((model(x) - x) ** 2).mean()
            loss.backward()
        if clip is not None:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    report = None
    engine = lightning_tieroffload.engine_of(model)
    if engine is not None:
        report = engine.report()
    weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    if engine is not None:
        engine.close()
    return seen, weights, report


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_numbers_do_not_depend_on_the_budget(amp: torch.dtype | None, accumulate: int) -> None:
    """Bit-identical between a starved device and everything on the device, whatever the stream is busy with."""
    model = build()
    results = []
    homes = set()
    for budget, busy, update_on in (
        ("24MiB", False, "cpu"), ("24MiB", True, "auto"), ("80MiB", False, "auto"), ("80MiB", True, "auto"),
        ("2GiB", False, "auto"), ("2GiB", True, "auto"), ("2GiB", False, "cpu"),
    ):  # fmt: skip
        seen, weights, report = train(
            copy.deepcopy(model), amp=amp, accumulate=accumulate, busy=busy,
            offload={"device_budget": budget, "dram_budget": "8GiB", "update_on": update_on},
        )  # fmt: skip
        assert report is not None
        homes.add(sum(unit["update_on"] == "device" for unit in report["plan"]["units"]))
        assert report["tiers"]["device"]["peak_nbytes"] <= report["tiers"]["device"]["budget_nbytes"]
        results.append((seen, weights))
    assert len(homes) >= 3, "none, some and all of the units are updated on the device"
    for seen, weights in results[1:]:
        assert seen == results[0][0]
        assert all(torch.equal(weights[k], results[0][1][k]) for k in weights)


@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_close_to_plain(amp: torch.dtype | None, accumulate: int) -> None:
    """Losses and gradient norms within 1e-3 relative of the plain run with CUDA's own AdamW."""
    model = build()
    plain, _, _ = train(copy.deepcopy(model), amp=amp, accumulate=accumulate)
    for budget in ("24MiB", "2GiB"):
        ours, _, _ = train(
            copy.deepcopy(model), amp=amp, accumulate=accumulate,
            offload={"device_budget": budget, "dram_budget": "8GiB"},
        )  # fmt: skip
        assert ours == pytest.approx(plain, rel=1e-3)


def test_device_memory_stays_within_the_budget_and_activations() -> None:
    """Allocated memory, asked of CUDA itself: budget plus what activations need, far below the model's size."""
    model = build(width=1024, depth=16)
    nbytes = sum(p.nbytes for p in model.parameters())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _, _, report = train(model, steps=3, offload={"device_budget": "96MiB", "dram_budget": "16GiB"})
    peak = torch.cuda.max_memory_allocated() - before
    assert report is not None
    assert nbytes > 500 * MiB
    assert peak < 96 * MiB + 256 * MiB
