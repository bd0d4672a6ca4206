"""Mixed precision: whatever travels in 16 bits has the plain run's bits, however its weights are used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import FULL, QUICK, SLOW, Variant, check
from fakes import Block, batches
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from lightning_tieroffload import engine_of, offload
from lightning_tieroffload.errors import UnsupportedError


class Refused(nn.Module):
    """Casts its weight, reads it in fp32, and casts it again, in windows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.linear.register_forward_hook(self.penalise)
        self.is_odd = False

    def penalise(self, module: nn.Module, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out + (self.linear.weight**2).sum() * 1e-2 if self.is_odd else out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.linear(torch.tanh(x)) if self.is_odd else x


class PastTorch(nn.Module):
    """Reads the weight of a layer inside it as an extension in C++ does: nothing of torch's is called with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.functional.linear(x, self.linear.weight, self.linear.bias)


class Tied(nn.Module):
    """Two layers of one unit share a weight, which never travels in 16 bits, beside biases that may."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 16)
        self.up.weight = self.down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(torch.tanh(self.down(x)))


class Uses(nn.Module):
    """A block in the middle of ordinary ones whose weights are used as ``how`` says from step ``since`` on."""

    def __init__(self, how: str, since: int) -> None:
        super().__init__()
        self.how, self.since, self.step = how, since, 0
        self.first = Block(16, 16)
        self.odd = nn.Linear(16, 16)
        self.last = Block(16, 16)
        self.deep = Refused()
        self.blocks = nn.ModuleList([self.first, self.odd, self.deep, self.last])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        how = self.how if self.step >= self.since else "once"
        x = self.first(x)
        w = self.odd.weight
        if how == "once":
            x = self.deep(self.odd(x))
        elif how == "twice":
            x = self.odd(torch.tanh(self.odd(x)))
        elif how == "sliced":
            x = torch.cat([nn.functional.linear(x, w[:8]), x @ w[8:].t()], -1)
        elif how == "penalty":
            x = self.odd(x) + (w**2).sum() * 1e-2
        elif how == "fp32 island":
            with torch.autocast("cpu", enabled=False):
                x = self.odd(x.float())
        elif how == "both precisions":
            y = self.odd(x)
            with torch.autocast("cpu", enabled=False):
                x = y.float() + self.odd(x.float())
        elif how == "matmul":
            x = torch.matmul(x, w) + self.odd.bias
        elif how == "copied":
            x = nn.functional.linear(x, w * 1.0, self.odd.bias)
        elif how == "cast by hand":
            x = nn.functional.linear(x.bfloat16(), w.to(torch.bfloat16), self.odd.bias.bfloat16()).float()
        elif how == "einsum":
            x = torch.einsum("bi,oi->bo", x, w) + self.odd.bias
        elif how == "refused on the way":
            self.deep.is_odd = True
            x = self.deep(x)
        elif how == "read":
            x = self.odd(x) * (1.0 + w.detach().abs().max().item())
        elif how == "unused":
            x = torch.tanh(x)
        elif how == "by itself":
            x = nn.functional.linear(x, torch.mm(w, w), self.odd.bias)
        elif how == "vmap":
            x = torch.vmap(self.odd)(self.odd(x))
        elif how == "jvp":
            x = torch.func.jvp(self.odd, (x,), (torch.ones_like(x),))[1] + self.odd(x)
        elif how == "vjp":
            x = torch.func.vjp(self.odd, self.odd(x).float())[0]
        return self.last(x)


HOWS = (
    "once", "twice", "sliced", "penalty", "fp32 island", "both precisions", "matmul", "copied", "cast by hand",
    "einsum", "read", "unused", "refused on the way", "by itself", "vmap", "jvp", "vjp",
)  # fmt: skip


def amp_loop(
    dtype: torch.dtype = torch.bfloat16, cache: bool = True, micro: Callable[[int, int], bool] = lambda step, i: True
) -> Any:
    """Five steps of two micro-batches; ``micro(step, i)`` says whether autocast is on for it."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(5, 8, 16)):
            if hasattr(model, "step"):
                model.step = step
            for i, half in enumerate(x.chunk(2)):
                with torch.autocast("cpu", dtype=dtype, enabled=micro(step, i), cache_enabled=cache):
                    loss = (model(half).float() ** 2).mean()
                loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=step % 2 == 0):
                evaluated = model(x[:2])
            look(loss=loss, norm=norm, evaluated=evaluated)

    return loop


def build_of(make: Callable[[], nn.Module]) -> Any:
    def build() -> Any:
        model = make()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return build


# Under the budget that the engine names as the least, and with room; both times under the slow store.
VARIANTS = [FULL[1], FULL[3]]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("since", [0, 3])
def test_weights_used_in_every_way(how: str, since: int) -> None:
    """From the start, or from a step on at which the weight already travels in 16 bits."""
    check(build_of(lambda: Uses(how, since)), amp_loop(), VARIANTS)


@pytest.mark.parametrize("cache", [True, False])
def test_weights_that_do_not_travel_in_16_bits_beside_some_that_do(cache: bool) -> None:
    """One call gets both: a weight tied within its unit, and its layer's own bias."""
    check(build_of(lambda: nn.Sequential(*(Tied() for _ in range(3)))), amp_loop(cache=cache), VARIANTS)


def test_weights_that_nothing_sees_read() -> None:
    """As long as nothing has proved that a weight is only cast, whoever reads it past torch finds it in full."""
    check(build_of(lambda: nn.Sequential(*(PastTorch() for _ in range(3)))), amp_loop(), VARIANTS)


def test_the_first_step_takes_no_more_than_the_others() -> None:
    """Neither casts that autocast keeps nor gradients in full width: a model in 16 bits need not fit the device."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    offload(model, optimizer, device_budget="1MiB")
    engine: Any = engine_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = (model(torch.randn(4, 32)).float() ** 2).mean()
        assert engine.space.cached_casts_nbytes == 0
    loss.backward()
    assert {grad.dtype for unit in engine.space.units for grad in unit._host_grads.values()} == {torch.bfloat16}
    engine.close()


class Checkpointed(nn.Module):
    """Its whole forward runs again in backward, and torch compares what both save."""

    def __init__(self, inner: Uses) -> None:
        super().__init__()
        self.inner = inner
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.step = self.step
        result: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


# torch's vjp refuses a checkpoint's hooks, with or without an engine.
@pytest.mark.parametrize("how", [how for how in HOWS if how != "vjp"])
@pytest.mark.parametrize("since", [0, 3])
def test_weights_used_in_every_way_and_recomputed(how: str, since: int) -> None:
    """A weight that is refused in forward is still the same to the forward that runs again in backward."""
    check(build_of(lambda: Checkpointed(Uses(how, since))), amp_loop(), [FULL[3]])


@pytest.mark.parametrize("how", ["once", "twice", "by itself", "vmap"])
def test_without_the_autocast_cache(how: str) -> None:
    """With ``cache_enabled=False`` a weight is cast at each use, and gradients are summed in fp32."""
    check(build_of(lambda: Uses(how, 3)), amp_loop(cache=False), VARIANTS)


@pytest.mark.parametrize("which", ["by step", "by micro-batch", "late", "early"])
def test_autocast_on_and_off(which: str) -> None:
    """Precision changes between steps and between the micro-batches of one window."""
    micro = {
        "by step": lambda step, i: step % 2 == 1,
        "by micro-batch": lambda step, i: i == 0,
        "late": lambda step, i: step >= 2,
        "early": lambda step, i: step < 2,
    }[which]
    check(build_of(lambda: Uses("once", 0)), amp_loop(micro=micro), VARIANTS)


def test_two_forwards_in_one_autocast_context_and_in_two() -> None:
    """Autocast's cache lives as long as its outermost context: two forwards in one share the cast, in two do not."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 8, 16)):
            a, b = x.chunk(2)
            if step in (0, 1):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = (model(a).float() ** 2).mean()
            elif step in (2, 4):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = ((model(a) - model(b)).float() ** 2).mean()
            else:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    first = model(a)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = ((first - model(b)).float() ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(build_of(lambda: Uses("once", 0)), loop, VARIANTS)


def test_gradients_and_weights_in_the_users_hands_under_autocast() -> None:
    """Hooks, edits of ``p.grad`` and in-place writes while weights travel in 16 bits; retained graphs; penalties."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        handle = None
        for step, x in enumerate(batches(7, 8, 16)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() ** 2).mean()
            loss.backward(retain_graph=step == 3)
            seen = None
            if step == 1:
                handle = model.odd.weight.register_hook(lambda g: g * 1.000123)
            if step == 2:
                handle.remove()
                model.odd.weight.grad.add_(1e-4)
            if step == 3:
                loss.backward()
                seen = model.first.up.weight.grad.clone()
            if step == 4:
                with torch.no_grad():
                    model.odd.weight.mul_(1.0001)
                    model.last.up.weight[0] = 0.125
                model.first.down.weight.data.add_(1e-5)
            if step == 5:
                (1e-3 * sum((p**2).sum() for p in model.parameters())).backward()
            optimizer.step()
            optimizer.zero_grad()
            copied = copy.deepcopy(model)
            with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
                out = copied(x)
            look(loss=loss, seen=seen, out=out)

    check(build_of(lambda: Uses("once", 0)), loop, VARIANTS)


def test_a_penalty_outside_the_autocast_context() -> None:
    """The penalty reads every weight in fp32, in the same backward as autocast's casts."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(5, 8, 16)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() ** 2).mean()
            if step != 2:
                loss = loss + 1e-2 * sum((p**2).sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(build_of(lambda: Uses("once", 0)), loop, VARIANTS)


def test_the_whole_step_inside_autocast() -> None:
    """Backward, clipping and step inside the autocast context, as many scripts have it."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(5, 8, 16):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for half in x.chunk(2):
                    loss = (model(half).float() ** 2).mean()
                    loss.backward()
                norm = clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            look(loss=loss, norm=norm)

    check(build_of(lambda: Uses("once", 0)), loop, VARIANTS)


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_that_multiply_matrices(dtype: torch.dtype, is_inside: bool) -> None:
    """Under the autocast of the time of ``step()``, whatever is on when and where the update runs."""

    def build() -> Any:
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
        return model, torch.optim.Muon(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 8, 16):
            with torch.autocast("cpu", dtype=dtype):
                loss = (model(x).float() ** 2).mean()
                if is_inside:
                    loss.backward()
                    optimizer.step()
            if not is_inside:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(
        build, loop, [FULL[1], *(Variant(SLOW, prefetch=4, seed=i, every_look=False, budget="tight") for i in range(8))]
    )


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("how", ["step", "foreach", "write"])
def test_weights_that_change_inside_the_autocast_context(how: str, since: int) -> None:
    """What follows in the context uses the casts made before the change, as in a step of manual optimization."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 8, 16)):
            with torch.autocast("cpu", torch.bfloat16):
                first = model(x).float().pow(2).mean()
                if step >= since:
                    first.backward()
                    with torch.no_grad():
                        if how == "step":
                            optimizer.step()
                        elif how == "foreach":
                            torch._foreach_add_(list(model.parameters()), 0.01)
                        else:
                            for p in model.parameters():
                                p.mul_(1.01)
                    optimizer.zero_grad()
                second = model(x + 1).float().pow(2).mean()
                with torch.no_grad():
                    third = model(x - 1)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=second, first=first, third=third)

    check(build_of(lambda: nn.Sequential(*[Block(16, 16) for _ in range(3)])), loop, FULL)


def test_a_cast_that_was_not_kept_is_not_replaced_by_another() -> None:
    """Two contexts ended right after their step: the third's casts are not kept, and a use of them is an error."""

    def loop(model: Any, optimizer: Any, look: Any, last: bool) -> None:
        for step, x in enumerate(batches(5, 8, 16)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if last and step == 4:
                    model(x)
            look(loss=loss)

    build = build_of(lambda: nn.Sequential(*[Block(16, 16) for _ in range(3)]))
    check(build, lambda *args: loop(*args, last=False), QUICK)
    with pytest.raises(UnsupportedError, match="clear_autocast_cache"):
        check(build, lambda *args: loop(*args, last=True), QUICK)


def test_double_backward_under_autocast() -> None:
    """A gradient penalty through autocast regions."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 8, 16):
            x.requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(x)
            (grad,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
            loss = ((grad.norm(dim=1) - 1) ** 2).mean() + out.float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(build_of(lambda: Uses("once", 0)), loop, VARIANTS)


def test_convolutions_and_recurrent_layers_under_autocast() -> None:
    """Convolutions, an LSTM and attention under autocast."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(3))
            self.attention = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
            self.lstm = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x[:, :, None].expand(-1, -1, 4)
            for conv in self.convs:
                h = torch.tanh(conv(h))
            return self.lstm(self.attention(h.transpose(1, 2)).float())[0]

    check(build_of(Net), amp_loop(), VARIANTS)


class AutocastWithin(nn.Module):
    """Autocast, and a checkpoint inside or around it, that begin in the middle of a unit's window."""

    def __init__(self, order: str, dtype: torch.dtype, cache: bool) -> None:
        super().__init__()
        self.order, self.dtype, self.cache = order, dtype, cache
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        penalty = (self.second.weight**2).sum() * 1e-2
        return self.second(torch.tanh(self.first(x))) + penalty

    def cast(self, x: torch.Tensor, compute: Any) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, cache_enabled=self.cache):
            result: torch.Tensor = compute(x)
        return result.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.order == "autocast in a checkpoint":
            return checkpoint(self.cast, x, self.compute, use_reentrant=False)  # type: ignore[no-any-return]
        if self.order == "checkpoint in autocast":
            return self.cast(x, lambda x: checkpoint(self.compute, x, use_reentrant=False))
        return self.cast(x, self.compute)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("order", ["autocast in a checkpoint", "checkpoint in autocast", "no checkpoint"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_that_begins_inside_a_window(order: str, dtype: torch.dtype, cache: bool, activations: str) -> None:
    """Forward saves autocast's own casts and runs again with stand-ins: the same numbers in the same places."""
    build = build_of(lambda: nn.Sequential(*(AutocastWithin(order, dtype, cache) for _ in range(2))))
    check(build, amp_loop(micro=lambda step, i: False), VARIANTS, activations=activations)


class LooksFirst(nn.Module):
    """Uses its weights without gradients before, between or after it uses them with gradients, in three ways."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.linear = nn.Linear(16, 16)

    def look(self, x: torch.Tensor, when: str) -> Any:
        if when not in self.when:
            return 0.0
        with torch.no_grad():
            return self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.look(x, "before")
        w = self.linear.weight
        y = torch.bmm(x[None], w.t()[None])[0]  # a view of the weight: cast anew
        seen = seen + self.look(x, "between")
        z = self.linear(y)
        return torch.tanh(z.float() + seen + self.look(x, "after")) + (w**2).sum() * 1e-2


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("when", ["before", "between", "after", "never"])
def test_a_cast_is_as_old_as_its_first_use(when: str, cache: bool) -> None:
    """Also where that was without gradients: three gradients of one weight are summed in the plain run's order."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(5, 8, 16)):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                evaluated = None
                if step % 2:
                    with torch.no_grad():
                        evaluated = model(x)
                loss = (model(x).float() ** 2).mean() + 1e-2 * sum((p**2).sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, evaluated=evaluated)

    check(build_of(lambda: nn.Sequential(*(LooksFirst(when) for _ in range(3)))), loop, VARIANTS)


class InFp32(torch.autograd.Function):
    """Uses its weight in fp32 whatever autocast says, and gives a gradient with all its bits."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class ByLinear(torch.autograd.Function):
    """Uses autocast's cast, without gradients, and gives a gradient in fp32 of its own making."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            return grad.float() @ weight, (grad.float().t() @ x.float()) * 1.01


class Unlooked(torch.autograd.Function):
    """Straight through to the weight: forward does not read it at all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.shape = weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad.float().mean() * torch.linspace(0, 0.1, ctx.shape.numel()).view(ctx.shape)


class WithFunctions(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)) for _ in range(4))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            weight = block[0].weight
            if self.order == "after":
                x = block(x)
            x = x + InFp32.apply(x, weight) if index % 2 == 0 else x.float() + ByLinear.apply(x, weight)
            x = Unlooked.apply(x, block[2].weight)
            if self.order == "before":
                x = block(x)
        return x


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("order", ["before", "after", "alone"])
def test_gradients_that_custom_functions_add_to_a_casts(order: str, cache: bool) -> None:
    """Nobody sees a custom Function take a weight; what it gives is summed in fp32 and must not be rounded."""

    def build() -> Any:
        model = WithFunctions(order)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 4, 24)):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
                loss = model(x).float().square().mean()
            loss.backward()
            if step % 3 == 2:
                look(grads=[p.grad for p in model.parameters()])
            if step != 3:
                optimizer.step()
                optimizer.zero_grad()
            look(loss=loss)

    check(build, loop, FULL)
