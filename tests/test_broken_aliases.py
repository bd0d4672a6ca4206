"""What users hold while the engine works: ``p.data`` that is assigned over, other threads that read, shared memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from exactness import FULL, POISON, Variant, check, run
from fakes import Stack, batches

from lightning_tieroffload.errors import UnsupportedError


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()  # type: ignore[no-any-return]


def build() -> Any:
    model = Stack(3)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("way", ["all at once", "one by one", "detached", "own data"])
def test_averages_swapped_in_and_out_through_data(way: str) -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        params = list(model.parameters())
        average = [p.data.clone() for p in params]
        for x in batches(4, 4, 24):
            loss = train(model, optimizer, x)
            for a, p in zip(average, params, strict=True):
                a.mul_(0.9).add_(p.data, alpha=0.1)
            backup = []
            if way in ("all at once", "detached"):
                backup = [p.data if way == "all at once" else p.detach() for p in params]
                for a, p in zip(average, params, strict=True):
                    p.data = a
            elif way == "one by one":
                for a, p in zip(average, params, strict=True):
                    backup.append(p.data)
                    p.data = a
            else:
                for p in params:
                    backup.append(p.data)
                    p.data = p.data
                    p.data = p.data * 0.5
            with torch.no_grad():
                value = loss_of(model, x)
            held = [b.clone() for b in backup]
            for b, p in zip(backup, params, strict=True):
                p.data = b
            look(loss=loss, value=value, held=held)

    check(build, loop, FULL)


def test_another_thread_reads_while_training() -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        stop, errors = threading.Event(), []

        def read() -> None:
            try:
                while not stop.is_set():
                    for p in model.parameters():
                        p.detach().sum()
                    model.state_dict()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        try:
            losses = [train(model, optimizer, x) for x in batches(8, 4, 24)]
        finally:
            stop.set()
            thread.join()
        assert not errors
        look(losses=losses)

    check(build, loop, FULL)


def test_shared_memory_is_refused() -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        model.share_memory()

    with pytest.raises(UnsupportedError, match="cannot be shared"):
        run(build, loop, Variant(POISON))
