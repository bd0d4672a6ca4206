"""Large parameters are updated slice by slice: the bits of the whole tensor's update, with a slice's temporaries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.engine import optimizer as updates

CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-1}),
    (torch.optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.RAdam, {"lr": 1e-2}),
    (torch.optim.Adamax, {"lr": 1e-2}),
    (torch.optim.Adadelta, {}),
]


@pytest.mark.parametrize(
    ("cls", "options", "amp"),
    [(*each, False) for each in CLASSES] + [(*CLASSES[0], True), (*CLASSES[4], True)],
    ids=[f"{c.__name__}-{len(o)}" for c, o in CLASSES] + ["AdamW-bf16", "SGD-bf16"],
)
def test_slices_give_the_bits_of_the_whole(
    cls: Any, options: dict[str, Any], amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Odd sizes, a transposed layout, clipping, several steps, state and weights bit for bit; split masters too."""
    monkeypatch.setattr(updates, "_SLICE_NUMEL", 64)
    sliced: list[int] = []
    original = updates.Updates._run_torch_sliced
    monkeypatch.setattr(
        updates.Updates, "_run_torch_sliced", staticmethod(lambda *a: (sliced.append(1), original(*a))[1])
    )

    def run(offloaded: bool) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 47), nn.GELU(), nn.Linear(47, 29), nn.GELU(), nn.Linear(29, 33))
        model[2].weight = nn.Parameter(torch.randn(47, 29).t())
        optimizer = cls(model.parameters(), **options)
        if offloaded:
            offload(model, optimizer, device_budget="64KiB", dram_budget="1GiB", debug=["poison", "delays"])
        looks: list[Any] = []
        for step in range(4):
            x = torch.randn(8, 33, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = (model(x).float() ** 2).mean()
            loss.backward()
            looks.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
            looks += [p.detach().clone() for p in model.parameters()]
        state = optimizer.state_dict()["state"]
        engine = engine_of(model)
        if engine is not None:
            engine.close()
        return looks, state

    plain, plain_state = run(offloaded=False)
    ours, our_state = run(offloaded=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    assert plain_state.keys() == our_state.keys()
    for key, entry in plain_state.items():
        assert entry.keys() == our_state[key].keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(our_state[key][n])) for n, v in entry.items())
    assert sliced or not plain_state
