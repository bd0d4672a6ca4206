"""What users hold while the engine works: ``p.data`` that is assigned over, other threads that read, shared memory."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from exactness import FULL, POISON, QUICK, Variant, attach, check, run, same_bits
from fakes import Block, Stack, batches
from torch import nn

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


class Nosy(Block):
    """Its forward looks at, or holds on to, a weight of another block."""

    seen: list[nn.Module]
    how: str

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.seen[0].up.weight
        look = weight.data if self.how == "data" else weight.detach()
        x = super().forward(x) * look.abs().mean()
        if self.how == "held":
            self.__dict__["held"] = look
        return x


@pytest.mark.parametrize("how", ["detached", "data", "held"])
@pytest.mark.parametrize("activations", ["recompute", "auto"])
def test_a_forward_looks_at_weights_of_a_unit_that_will_run_again(activations: str, how: str) -> None:
    """In the middle of one unit's window another one runs again, as its weights may be written from then on."""

    def make() -> Any:
        model = Stack(4)
        for index in (2, 3):
            nosy = Nosy()
            nosy.__dict__.update(seen=[model.blocks[index - 2]], how=how)
            model.blocks[index] = nosy
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(5, 4, 24):
            look(loss=train(model, optimizer, x))
            for block in model.blocks:
                block.__dict__.pop("held", None)

    check(make, loop, (*QUICK, *FULL), activations=activations)


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
        arguments = {"set_": (torch.ones(3, 5),), "t_": (), "resize_": (3,)}[way]
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


@pytest.mark.parametrize("way", ["kept beside", "in its place", "frozen", "read inside forward"])
def test_new_parameter_over_an_offloaded_one(way: str) -> None:
    """``nn.Parameter(p)`` is one over p's memory and follows its steps, as in plain."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        name = next(n for n, p in model.named_parameters() if p.dim() == 2)
        owner, attribute = model.get_submodule(name.rsplit(".", 1)[0]), name.rsplit(".", 1)[1]
        made: list[torch.nn.Parameter] = []

        def inside(*_: Any) -> None:
            if way == "read inside forward":
                made[:] = [torch.nn.Parameter(getattr(owner, attribute))]

        owner.register_forward_pre_hook(inside)
        for step, x in enumerate(batches(4, 4, 24)):
            loss = train(model, optimizer, x)
            if step == 1 and way != "read inside forward":
                made.append(torch.nn.Parameter(getattr(owner, attribute), requires_grad=way != "frozen"))
            if step == 1 and way == "in its place":
                setattr(owner, attribute, made[0])
                optimizer.add_param_group({"params": made, "lr": 1e-3})
            values = [p.detach().clone() for p in made]
            assert [type(p) for p in made] == [torch.nn.Parameter] * len(made)
            look(loss=loss, made=values, flags=[p.requires_grad for p in made])

    if way == "in its place":  # the old parameter is the optimizer's and no module's any more
        plain = run(build, loop_without_state(loop), seed=1)
        for variant in FULL:
            ours = run(build, loop_without_state(loop), variant, num_expected=4, seed=1)
            for a, b in zip(plain.looks, ours.looks, strict=True):
                assert all(same_bits(a[key], b[key]) for key in a if key.startswith("log/"))
    else:
        check(build, loop, FULL)


def loop_without_state(loop: Any) -> Any:
    """For what the optimizer's own ``state_dict`` cannot tell, plain or not: only what the loop itself looks at."""

    def inner(model: Any, optimizer: Any, look: Any) -> None:
        look.optimizers = None
        loop(model, optimizer, look)

    return inner


@pytest.mark.parametrize("way", ["by hand", "two of ours", "load_state_dict", "to another dtype"])
def test_swapped_tensors_are_refused_before_any_damage(way: str) -> None:
    """``swap_tensors`` would take class and memory from under the engine. One error, and training goes on exactly."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        first, *_, last = (p for p in model.parameters() if p.dim() == 2)
        is_ours = hasattr(first, "_tieroffload_slot")
        for step, x in enumerate(batches(4, 4, 24)):
            if step == 2 and is_ours:
                state = {key: value.clone() for key, value in model.state_dict().items()}
                torch.__future__.set_swap_module_params_on_conversion(True)
                try:
                    with pytest.raises(RuntimeError) as caught:  # noqa: PT012
                        if way == "by hand":
                            torch.utils.swap_tensors(torch.nn.Parameter(torch.zeros_like(first)), first)
                        elif way == "two of ours":
                            torch.utils.swap_tensors(first, last)
                        elif way == "load_state_dict":
                            model.load_state_dict(state)
                        else:
                            model.double()
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)
                error = caught.value.__cause__ or caught.value
                assert "is offloaded" in str(error)
                assert "swap_tensors" in str(error)
            look(loss=train(model, optimizer, x))

    check(build, loop, FULL)


def test_mutation_of_saved_parameters_is_refused_by_name() -> None:
    """Under ``allow_mutation_on_saved_tensors`` training is exact; a weight written in between is one clear error."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            for x in batches(4, 4, 24):
                look(loss=train(model, optimizer, x))

    check(build, loop, FULL)
    model, optimizer = build()
    engine = attach(model, optimizer, Variant(POISON))
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = loss_of(model, next(iter(batches(4, 4, 24))))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        with pytest.raises(RuntimeError, match="allow_mutation_on_saved_tensors does not reach"):
            loss.backward()
    engine.close()


def test_parametrization_is_put_on_and_taken_off_while_offloaded() -> None:
    """``remove_parametrizations`` gives the parameter its last values by ``set_``: of its shape, so they are taken."""

    class Bounded(torch.nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.tanh()

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        owner = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
        for step, x in enumerate(batches(6, 4, 24)):
            if step == 2:
                torch.nn.utils.parametrize.register_parametrization(owner, "weight", Bounded())
            if step == 4:
                torch.nn.utils.parametrize.remove_parametrizations(owner, "weight")
            look(loss=train(model, optimizer, x), weight=owner.weight.detach().clone())

    check(build, loop, FULL)
