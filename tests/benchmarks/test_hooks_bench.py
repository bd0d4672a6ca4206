"""What the engine's Python costs: a hook of a unit, step() a parameter, and a whole step on a CPU beside the plain one.

The models are so small that all they do is call Python; what is left after the plain run's own time is the engine's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.engine.device_updates import is_state_held

pytest.importorskip("pytest_benchmark")
pytestmark = pytest.mark.alone

NUM_UNITS = 30
MOST_S_A_HOOK = 150e-6


def layers(num: int, width: int, num_linear: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(width, width) for _ in range(num_linear)), nn.GELU()) for _ in range(num))
    )


def adopted(model: nn.Module, **settings: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    given = {"device_budget": "1GiB", "dram_budget": "1GiB", "profile_steps": 0, **settings}
    offload(model, optimizer, device="cpu", **given)
    return optimizer, engine_of(model)


def median_s(calls: list[Callable[[], Any]], num_rounds: int) -> list[float]:
    """Medians of processor seconds of this thread, the calls taking turns."""
    laps: list[list[float]] = [[] for _ in calls]
    for index in range(num_rounds + 5):
        for lap, call in zip(laps, calls, strict=True):
            start_s = time.thread_time()
            call()
            if index >= 5:
                lap.append(time.thread_time() - start_s)
    return [statistics.median(lap) for lap in laps]


@pytest.mark.parametrize("is_starved", [False, True], ids=["resident", "streamed"])
def test_hooks_of_a_unit(benchmark: Any, one_thread: None, is_starved: bool) -> None:
    """Forward and backward of 30 tiny units: seconds a unit and hook, of which there are two each way."""
    plain, ours = layers(NUM_UNITS, 16), layers(NUM_UNITS, 16)
    _, engine = adopted(ours, **({"device_budget": "16KiB"} if is_starved else {}))
    x = torch.randn(4, 16)

    def call(model: nn.Module) -> Callable[[], Any]:
        return lambda: model(x).sum().backward()

    def both() -> list[float]:
        return median_s([call(plain), call(ours)], 60)

    plain_s, ours_s = benchmark.pedantic(both, rounds=1)
    hook_s = (ours_s - plain_s) / NUM_UNITS / 4
    benchmark.extra_info |= {"s_a_hook": hook_s, "plain_s": plain_s, "ours_s": ours_s, "limit_s": MOST_S_A_HOOK}
    print(f"\n{hook_s * 1e6:.0f} µs a unit and hook")
    engine.close()
    assert hook_s < MOST_S_A_HOOK


def test_step_a_parameter(benchmark: Any, one_thread: None) -> None:
    """``step()`` until it returns, and what of it asks whether somebody holds state, at 300 parameters in 30 units."""
    model = layers(NUM_UNITS, 8, num_linear=5)
    optimizer, engine = adopted(model)
    x = torch.randn(4, 8)
    slots_of = {unit: unit.slots for unit in engine.units}
    num = sum(map(len, slots_of.values()))
    steps_s: list[float] = []

    def train() -> None:
        model(x).sum().backward()
        start_s = time.thread_time()
        optimizer.step()
        steps_s.append(time.thread_time() - start_s)
        engine.flush()

    benchmark.pedantic(train, rounds=40, warmup_rounds=5)

    def ask() -> None:
        for unit, slots in slots_of.items():
            assert not is_state_held(unit, slots, optimizer.state)

    (held_s,) = median_s([ask], 30)
    step_s = statistics.median(steps_s[5:])
    benchmark.extra_info |= {
        "num": num,
        "step_s_a_parameter": step_s / num,
        "is_state_held_s_a_parameter": held_s / num,
    }
    print(
        f"\n{num} parameters: step() {step_s / num * 1e6:.1f} µs each, of it is_state_held {held_s / num * 1e6:.1f} µs"
    )
    engine.close()


@pytest.mark.parametrize("width", [64, 256])
def test_step_beside_plain(benchmark: Any, one_thread: None, width: int) -> None:
    """A whole training step on the CPU, everything in the budget and half of it, beside the plain run."""
    x = torch.randn(256, width)
    calls, engines = [], []
    nbytes = sum(p.nbytes for p in layers(8, width).parameters())
    for budget in (None, 4 * nbytes, max(nbytes, 4 * (width + 1) * width * 4)):
        model = layers(8, width)
        if budget is None:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            optimizer, engine = adopted(model, device_budget=budget, optimizer_kernel="torch")
            engines.append(engine)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        calls.append(step)

    def wall() -> list[float]:
        laps: list[list[float]] = [[] for _ in calls]
        for _ in range(25):
            for lap, call in zip(laps, calls, strict=True):
                start_s = time.perf_counter()
                call()
                lap.append(time.perf_counter() - start_s)
        return [statistics.median(lap[5:]) for lap in laps]

    plain_s, roomy_s, tight_s = benchmark.pedantic(wall, rounds=1)
    benchmark.extra_info |= {"plain_s": plain_s, "roomy_frac": roomy_s / plain_s, "tight_frac": tight_s / plain_s}
    print(
        f"\nwidth {width}: plain {plain_s * 1e3:.2f} ms, roomy {roomy_s / plain_s:.2f}x, tight {tight_s / plain_s:.2f}x"
    )
    for engine in engines:
        engine.close()
