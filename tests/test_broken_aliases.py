"""What users hold while the engine works: ``p.data`` that is assigned over, other threads that read, shared memory."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from exactness import FULL, POISON, Variant, attach, check, run
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


@pytest.mark.parametrize("ended", [False, True])
def test_what_users_hold_outlives_the_engine(ended: bool) -> None:
    """Aliases and numpy views that are alive at close() keep their memory; the parameters have theirs in any case."""
    torch.manual_seed(0)
    model, optimizer = build()
    engine = attach(model, optimizer, Variant(POISON))
    params = list(model.parameters())
    held: list[Any] = [params[0].detach(), params[2].data, params[4].detach().numpy(), params[-1].detach()[:1]]
    expected = [torch.as_tensor(h).clone() for h in held]
    if ended:
        held = []
    loss_of(model, next(iter(batches(1, 4, 24)))).backward()
    values = [p.detach().clone() for p in params]
    engine.close()
    assert all(torch.equal(torch.as_tensor(h), e) for h, e in zip(held, expected, strict=False))
    assert all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
    loss_of(model, torch.ones(2, 24)).backward()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in params)


@pytest.mark.parametrize("way", ["set_", "t_", "resize_"])
def test_another_shape_or_other_memory_in_place_is_refused(way: str) -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        p = next(p for p in model.parameters() if p.ndim == 2)
        arguments = {"set_": (torch.ones(p.shape),), "t_": (), "resize_": (3,)}[way]
        with torch.no_grad():
            getattr(p, way)(*arguments)

    with pytest.raises(UnsupportedError, match=f"p.{way}"):
        run(build, loop, Variant(POISON))


def test_attributes_of_parameters_travel_as_in_torch() -> None:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for index, p in enumerate(model.parameters()):
            p.factor = index + 0.5
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        look(factors=[p.factor for p in loaded.parameters()], values=list(loaded.parameters()))

    check(build, loop)
