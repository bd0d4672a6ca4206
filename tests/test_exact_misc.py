"""What people do with models and gradients beyond the ordinary loop, run plain and under the engine, bit by bit."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import (
    FULL,
    POISON,
    QUICK,
    SLOW,
    Look,
    Variant,
    assert_exact,
    assert_ordinary,
    attach,
    check,
    one_thread,
    run,
    same_bits,
    seed_all,
    starved,
    take_down,
)
from fakes import Block, Stack, batches, gpt_tiny, mlp, mlp_loss, steps, token_batches
from torch import nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, prune
from torch.utils.checkpoint import checkpoint

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.offload_engine import engine_of


def with_adamw(make: Callable[[], nn.Module], **settings: Any) -> Any:
    def build() -> Any:
        model = make()
        params = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(params, **{"lr": 1e-2, **settings})

    return build


def with_sgd(make: Callable[[], nn.Module]) -> Any:
    def build() -> Any:
        model = make()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return build


# ---------------------------------------------------------------- dtypes and shapes


class OddTypes(nn.Module):
    """Zero-size, 0-dim, complex, double, half, bfloat16, integer, bool and 8-bit parameters in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Linear(8, 0, bias=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.wave = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(3, 7, dtype=torch.float64))
        self.half_ = nn.Parameter(torch.randn(9, dtype=torch.float16))
        self.brain = nn.Parameter(torch.randn(11, dtype=torch.bfloat16))
        self.ids = nn.Parameter(torch.arange(5), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.eight = nn.Parameter(torch.randn(16).to(torch.float8_e4m3fn), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.cube = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        total = self.empty(x).sum() + (x**2).mean() * self.scalar
        total = total + (self.wave.abs() ** 2).sum() + (self.wide**2).sum().float()
        total = total + (self.half_.float() * 2).sum() + (self.brain * self.brain).float().sum()
        total = total + self.ids[self.mask.nonzero()].sum() * self.scalar + self.eight.float().sum() * self.scalar
        return total + (self.turned @ self.turned.t()).sum() + (self.cube**2).sum()


@pytest.mark.parametrize("make", [with_adamw(OddTypes), with_sgd(OddTypes)], ids=["adamw", "sgd"])
def test_odd_types_and_shapes(make: Any) -> None:
    """Zero-size, 0-dim, complex, 64-, 16- and 8-bit, integer, bool, transposed parameters: exact, strides kept."""

    def build() -> Any:
        model, optimizer = make()
        return model, optimizer

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        optimizer.param_groups[0]["params"] = [p for p in optimizer.param_groups[0]["params"] if p.requires_grad]
        for x in batches(3, 4, 8):
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, strides=str([(p.shape, p.stride()) for p in model.parameters()]))

    check(build, loop, QUICK)


def test_channels_last_convolutions_and_batch_norm() -> None:
    """Memory formats are kept; BatchNorm's running numbers count once; evaluation in between."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(4)]
            self.blocks = nn.Sequential(*blocks)
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(x).mean((2, 3)))

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 4, 4, 6, 6):
            x = x.to(memory_format=torch.channels_last)
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                evaluated = model(x)
            model.train()
            look(loss=loss, evaluated=evaluated, strides=str([p.stride() for p in model.parameters()]))

    check(with_adamw(lambda: Net().to(memory_format=torch.channels_last)), loop, QUICK)


# ---------------------------------------------------------------- gradients in the user's hands


def test_gradients_edited_by_hand() -> None:
    """``p.grad`` is read, scaled, replaced, set to None, made by hand and used in place between backward and step."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(4)):
            mlp_loss(model, x).backward()
            params = list(model.parameters())
            params[0].grad.mul_(0.5)
            params[1].grad = params[1].grad * 2
            params[2].grad = None
            params[3].grad = torch.full_like(params[3], 0.25)
            params[4].grad.data.add_(1e-3)
            del params[5].grad
            with torch.no_grad():
                params[6].grad[0] = 7.0
            if step == 2:
                mlp_loss(model, x).backward()
            norms = torch.stack([p.grad.norm() for p in params if p.grad is not None])
            largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
            optimizer.step()
            kept = params[0].grad.clone()
            params[0].grad.zero_()  # right behind the step: the update still reads what was there
            optimizer.zero_grad()
            look(norms=norms, largest=largest, kept=kept)

    check(with_adamw(lambda: mlp(4)), loop, FULL)


def test_tensor_and_module_hooks() -> None:
    """Hooks on parameters, on modules and after accumulation, registered before and after attaching, and removed."""
    seen: list[Any] = []

    def build() -> Any:
        seen.clear()
        model = mlp(4)
        model[0].weight.register_hook(lambda g: g * 0.5)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
        model[4].register_full_backward_hook(lambda m, gi, go: (gi[0] * 1.5,))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def scale_grad(p: torch.Tensor) -> None:
        p.grad.mul_(3.0)  # type: ignore[union-attr]

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        handle = model[6].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        model[0].bias.register_post_accumulate_grad_hook(scale_grad)
        model[4].register_forward_hook(lambda m, i, o: o * 1.01)
        model[2].register_forward_pre_hook(lambda m, i: (i[0] + m.weight.mean(),))
        for step, x in enumerate(batches(4)):
            loss = mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                handle.remove()
            look(loss=loss, seen=list(seen))

    check(build, loop, FULL)


def test_optimizer_in_backward() -> None:
    """The step of each parameter runs in its own post-accumulate hook, as in low-memory training recipes."""

    def build() -> Any:
        model = mlp(4)
        return model, [torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()]

    def loop(model: Any, optimizers: Any, look: Any) -> None:
        of = dict(zip(model.parameters(), optimizers, strict=True))

        def update(p: torch.Tensor) -> None:
            of[p].step()
            of[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        for x in batches(3):
            loss = mlp_loss(model, x)
            loss.backward()
            look(loss=loss, none=str([p.grad is None for p in model.parameters()]))

    check(build, loop, QUICK)


def test_backward_twice_with_retain_graph() -> None:
    """Two backward passes over one graph; parts of a loss one by one; gradients of inputs alone."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3):
            x.requires_grad_()
            out = model(x)
            loss = (out**2).mean()
            loss.backward(retain_graph=True)
            out.sum().backward(retain_graph=True)
            (input_grad,) = torch.autograd.grad(loss, x)
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, input_grad=input_grad, accumulated=x.grad, norm=norm)

    check(with_adamw(lambda: mlp(4)), loop, FULL)


def test_gradient_penalty() -> None:
    """WGAN-GP: the gradient of an input with ``create_graph``, in the loss."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + ((grad.norm(dim=1) - 1) ** 2).mean()

    check(with_adamw(lambda: mlp(4)), steps(loss_of), FULL)


@pytest.mark.parametrize("through", ["autograd.grad", "backward"])
def test_double_backward_through_parameters(through: str) -> None:
    """The squared norm of the parameters' own gradients is in the loss (a meta-learning step, a sharpness term)."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        inner = (torch.tanh(model(x)) ** 2).mean()
        if through == "autograd.grad":
            grads = torch.autograd.grad(inner, list(model.parameters()), create_graph=True)
            return inner + sum((g**2).sum() for g in grads)
        inner.backward(create_graph=True)
        total = sum((p.grad**2).sum() for p in model.parameters())
        for p in model.parameters():
            p.grad = None
        return inner.detach() + total

    check(with_adamw(lambda: mlp(3, 16)), steps(loss_of, 3, 8, 16), FULL)


def test_hessian_vector_products() -> None:
    """``autograd.grad`` of ``autograd.grad`` with respect to parameters, without any backward."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        params = [p for p in model.parameters() if p.ndim == 2]
        for x in batches(2, 8, 16):
            grads = torch.autograd.grad((torch.tanh(model(x)) ** 2).mean(), params, create_graph=True)
            vectors = [torch.ones_like(p) for p in params]
            products = torch.autograd.grad(grads, params, grad_outputs=vectors)
            look(products=products, none=str([p.grad is None for p in params]))

    check(with_adamw(lambda: mlp(3, 16)), loop, FULL)


def test_sharpness_aware_two_forwards_a_step() -> None:
    """SAM: parameters are perturbed by their gradient in place, evaluated again, and restored."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3):
            mlp_loss(model, x).backward()
            old = {}
            with torch.no_grad():
                norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                for p in model.parameters():
                    old[p] = p.detach().clone()
                    p.add_(p.grad, alpha=float(0.05 / (norm + 1e-12)))
            optimizer.zero_grad()
            loss = mlp_loss(model, x)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(old[p])
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, norm=norm)

    check(with_adamw(lambda: mlp(4)), loop, FULL)


# ---------------------------------------------------------------- custom functions, checkpoints, functional calls


class SavesWeight(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class StoresWeight(torch.autograd.Function):
    """Keeps the weight on ``ctx`` itself, past every saved-tensor hook."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g @ ctx.w, g.t() @ ctx.x


class StoresView(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.turned = x, w.detach().t()
        return x @ ctx.turned

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g @ ctx.turned.t(), g.t() @ ctx.x


@pytest.mark.parametrize("function", [SavesWeight, StoresWeight, StoresView])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_custom_functions_that_keep_the_weight(function: Any, autocast: bool) -> None:
    """Custom autograd Functions that save the weight, store it on ctx, or store a view of it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 24) / 5)
            self.linear = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(function.apply(self.linear(x).float(), self.weight))

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return (model(x).float() ** 2).mean()

    check(with_adamw(lambda: nn.Sequential(*(Layer() for _ in range(4)))), steps(loss_of, 3, 8, 24), QUICK)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "around each", "around two", "around all", "nested"])
def test_checkpoint_inside_and_around_units(use_reentrant: bool, where: str) -> None:
    """``torch.utils.checkpoint`` inside a unit, around one, around several, around all of them, and nested."""

    def again(function: Any, *args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=use_reentrant)

    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where in ("inside", "nested"):
                return x + again(lambda y: self.down(torch.nn.functional.gelu(self.up(self.norm(y)))), x)
            return super().forward(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Inner() for _ in range(4))
            self.head = nn.Linear(24, 3)

        def all(self, x: torch.Tensor, start: int = 0, stop: int = 4) -> torch.Tensor:
            for block in self.blocks[start:stop]:
                x = block(x)
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "inside":
                return self.head(self.all(x))
            if where == "around two":
                return self.head(again(self.all, again(self.all, x, 0, 2), 2, 4))
            if where == "around all":
                return again(lambda y: self.head(self.all(y)), x)
            for block in self.blocks:
                x = again(block, x)
            return self.head(x)

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x.requires_grad_()) ** 2).mean()

    check(with_adamw(Net), steps(loss_of, 3, 4, 24), QUICK)


def test_functional_call_and_weights_used_outside_their_module() -> None:
    """``functional_call`` with the model's own and with changed parameters; a weight used by hand outside forward."""

    def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        own = functional_call(model, dict(model.named_parameters()), (x,))
        halved = functional_call(model, {n: p * 0.5 for n, p in model.named_parameters()}, (x,))
        by_hand = nn.functional.linear(x @ model.blocks[0].up.weight.t(), model.blocks[1].down.weight)
        return (own**2).mean() + (halved**2).mean() + (by_hand**2).mean() + model.head.weight.square().sum()

    check(with_adamw(Stack), steps(loss_of, 3, 4, 24), [FULL[1], FULL[2]])


def test_functorch_gradients() -> None:
    """``torch.func.grad`` over detached parameters, and per-sample gradients by ``vmap``."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        def loss_of(params: Any, x: torch.Tensor) -> torch.Tensor:
            return (functional_call(model, params, (x[None],)) ** 2).mean()

        for x in batches(2, 3, 24):
            params = {n: p.detach() for n, p in model.named_parameters()}
            grads = torch.func.grad(loss_of)(params, x[0])
            per_sample = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))(params, x)
            for name, p in model.named_parameters():
                p.grad = per_sample[name].mean(0)
            del params
            optimizer.step()
            optimizer.zero_grad()
            look(grads=grads, per_sample=per_sample)

    check(with_adamw(lambda: Stack(2)), loop, [FULL[1], FULL[2]])


# ---------------------------------------------------------------- modules with ways of their own


def test_multihead_attention_and_its_fast_path() -> None:
    """MultiheadAttention and TransformerEncoderLayer, trained, then evaluated by the fused fast path."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 3, enable_nested_tensor=True
            )
            self.attention = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

        def forward(self, x: torch.Tensor, padding: Any = None) -> torch.Tensor:
            x = self.layers(x, src_key_padding_mask=padding)
            for layer in self.attention:
                x = x + layer(x, x, x, need_weights=False)[0]
            return x

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 2, 5, 16):
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                plain = model(x)
            with torch.inference_mode():
                inferred = model(x)
            model.train()
            look(loss=loss, plain=plain, inferred=inferred.clone())

    check(with_adamw(Net), loop, QUICK)


class Encoders(nn.Module):
    """Encoder layers as units, inside units, hooked by the user, or such that torch has no fused kernel for them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.width = how, 15 if how == "odd heads" else 16
        make = functools.partial(nn.TransformerEncoderLayer, self.width, 3 if how == "odd heads" else 2, 24)
        layers = [
            make(batch_first=how != "batch second", activation="gelu" if how == "gelu" else "relu") for _ in "abc"
        ]
        if how == "inside":
            layers = [nn.Sequential(nn.Linear(16, 16), layer, nn.Linear(16, 16)) for layer in layers]
        if how == "hooked":
            layers[1].linear1.register_forward_hook(lambda *_: None)
        if how == "frozen":
            layers[0].requires_grad_(False)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, padding: Any = None) -> torch.Tensor:
        x = x[..., : self.width]
        for layer in self.layers:
            if self.how == "checkpointed":
                x = checkpoint(layer, x, use_reentrant=True).float()
            elif self.how == "inside":
                x = layer(x).float()
            else:
                x = layer(x, src_key_padding_mask=None if self.how == "batch second" else padding).float()
            x = x if padding is None else x.masked_fill(padding[..., None], 0)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "how", ["relu", "gelu", "inside", "hooked", "frozen", "checkpointed", "odd heads", "batch second"]
)
def test_encoder_layers_evaluate_by_their_fused_kernel(how: str, autocast: bool) -> None:
    """Where the plain run's do, padding or not, under the CPU's autocast too; training goes on unchanged after it."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
        for x in batches(3, 2, 5, 16):
            logged = {}
            for key, mode in (
                ("plain", torch.no_grad),
                ("inferred", torch.inference_mode),
                ("graph", torch.enable_grad),
            ):
                model.eval()
                with mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logged[key] = [model(x).detach().clone(), model(x, padding).detach().clone()]
                model.train()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = (model(x.requires_grad_()).float() ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert type(model.layers[0]._forward_hooks) is OrderedDict
            look(loss=loss, **{k: [v.float().clone() for v in values] for k, values in logged.items()})

    check(with_adamw(lambda: Encoders(how)), loop, QUICK)


def test_transformer_encoder_with_padding_takes_the_nested_path() -> None:
    """In eval mode a padded batch runs as a nested tensor, as in plain: the choice looks at parameters' classes."""

    def make() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 3)

    def loop(model: Any, _: Any, look: Any) -> None:
        padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
        model.eval()
        for x in batches(2, 2, 5, 16):
            with torch.no_grad():
                look(out=model(x, src_key_padding_mask=padding))

    check(lambda: (make(), None), loop, QUICK)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    """LSTM, GRU and RNN keep lists of their weights; stacked, bidirectional, packed, evaluated."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(kind(12, 6, num_layers=2, bidirectional=True, batch_first=True) for _ in "123")
            self.cell = nn.LSTMCell(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)[0]
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
            packed_out, _ = self.layers[0](packed)
            return x.sum() + packed_out.data.sum() + self.cell(x[:, 0])[0].sum()

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 2, 5, 12):
            loss = model(x) ** 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                evaluated = model.eval()(x).clone()
            model.train()
            look(loss=loss, evaluated=evaluated)

    check(with_adamw(Net), loop, QUICK)


@pytest.mark.parametrize("how", ["weight_norm", "spectral_norm", "orthogonal", "old weight_norm", "old spectral_norm"])
def test_parametrizations(how: str) -> None:
    """Parametrised weights, new style and old, with evaluation between steps and cached access."""
    new = torch.nn.utils.parametrizations
    old = torch.nn.utils

    def make() -> nn.Module:
        model = mlp(3, 12)
        for index in (0, 2, 4):
            wrap = {
                "weight_norm": new.weight_norm, "spectral_norm": new.spectral_norm, "orthogonal": new.orthogonal,
                "old weight_norm": old.weight_norm, "old spectral_norm": old.spectral_norm,
            }[how]  # fmt: skip
            wrap(model[index])
        return model

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 8, 12):
            loss = mlp_loss(model, x)
            if not how.startswith("old"):
                with torch.nn.utils.parametrize.cached():
                    loss = loss + mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                evaluated = model(x)
            model.train()
            look(loss=loss, evaluated=evaluated, weight=model[2].weight.detach().clone())

    check(with_adamw(make), loop, QUICK)


def test_lora_by_peft() -> None:
    """LoRA by peft over GPT-tiny: adapters train, the base stands still; disabled, merged and unmerged in between."""
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], lora_dropout=0.1, fan_in_fan_out=True)
        return peft.get_peft_model(gpt_tiny(), config)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        model.train()
        for step, ids in enumerate(token_batches(4)):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad(), model.disable_adapter():
                base = model(input_ids=ids).logits
            if step == 1:
                model.merge_adapter()
                with torch.no_grad():
                    merged = model(input_ids=ids).logits
                model.unmerge_adapter()
            else:
                merged = None
            model.train()
            adapter = peft.get_peft_model_state_dict(model)
            look(loss=loss, norm=norm, base=base, merged=merged, adapter=adapter)

    check(with_adamw(make), loop, QUICK)


def test_a_block_that_is_used_several_times() -> None:
    """ALBERT-like sharing: one block runs four times in a forward, once of them inside itself."""

    class Recursive(Block):
        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            x = super().forward(x)
            return self(x, depth - 1) if depth else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Recursive() for _ in range(2))
            self.again = self.blocks[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.again(self.blocks[1](self.blocks[0](x, 2)), 1)

    check(with_adamw(Net), steps(lambda m, x: (m(x) ** 2).mean(), 3, 4, 24), QUICK)


def test_an_exception_in_forward_that_the_loop_survives() -> None:
    """A batch that raises inside a block (and one inside backward) is skipped by the loop; the rest is exact."""

    class Fragile(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            if x[0, 0].item() > 1e3:
                raise ValueError("a bad batch")
            return x

    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Fragile() for _ in range(4))

    def raise_(grad: torch.Tensor) -> None:
        raise ValueError("a bad gradient")

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 4, 24)):
            try:
                x.requires_grad_()
                h = model.blocks[0](x * (1e6 if step == 1 else 1))
                if step == 3:
                    h.register_hook(raise_)
                loss = (model(h) ** 2).mean()
                loss.backward()
            except ValueError:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(with_adamw(Net), loop, FULL)


# ---------------------------------------------------------------- copies, averages, changes on the way


def test_deepcopy_gives_an_ordinary_model_and_pickles_are_ordinary() -> None:
    """``deepcopy(model)`` trains by itself as plain would; whole-model and optimizer pickles load without us."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(4, 4, 24)):
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                copied = copy.deepcopy(model)
                both, both_optimizer = copy.deepcopy((model, optimizer))
                loaded = pickle.loads(pickle.dumps(optimizer))
                stream = io.BytesIO()
                torch.save(model, stream)
                stream.seek(0)
                unpickled = torch.load(stream, weights_only=False)
                gc.collect()
                for each in (copied, both, unpickled):
                    assert_ordinary(each)
                    assert engine_of(each) is None
                    assert all(type(p) is nn.Parameter for p in each.parameters())
                assert type(loaded) is torch.optim.AdamW
                assert type(both_optimizer) is torch.optim.AdamW
                assert both_optimizer.param_groups[0]["params"][0] is next(both.parameters())
                own = torch.optim.AdamW(copied.parameters(), lr=0.5)
                (copied(x) ** 2).mean().backward()
                own.step()
                (both(x) ** 2).mean().backward()
                both_optimizer.step()
                look(
                    copied=take_down(copied, [own]),
                    both=take_down(both, [both_optimizer]),
                    loaded=loaded.state_dict()["state"],
                    unpickled=unpickled(x),
                )
            look()

    check(with_adamw(Stack), loop, QUICK)


PROGRAMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "trace": torch.jit.trace,
    "trace, unchecked": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "trace of forward": lambda model, x: torch.jit.trace(model.forward, x),
    "trace_module": lambda model, x: torch.jit.trace_module(model, {"forward": x}),
    "trace_module by name": lambda model, x: torch.jit.trace_module(mod=model, inputs={"forward": x}),
    "script": lambda model, x: torch.jit.script(model),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", PROGRAMS)
def test_programs_made_of_a_model_on_the_way(how: str) -> None:
    """A trace, a script or an export has the weights of its moment, is saved with them, and changes nothing."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(4, 4, 24)):
            (model(x) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (1, 2):
                program = PROGRAMS[how](model, x)
                look(result=program(x), weights={name: p.detach().clone() for name, p in program.named_parameters()})
                if isinstance(program, torch.jit.ScriptModule):
                    stream = io.BytesIO()
                    torch.jit.save(program, stream)
                    stream.seek(0)
                    look(loaded=torch.jit.load(stream)(x))
            look()

    check(with_adamw(Stack), loop, QUICK)


def test_averages_of_weights() -> None:
    """AveragedModel (equal and exponential), and hand-made EMAs through p.data and p.detach()."""
    average = torch.optim.swa_utils

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        swa = average.AveragedModel(model, use_buffers=True)
        ema = average.AveragedModel(model, multi_avg_fn=average.get_ema_multi_avg_fn(0.9))
        shadow = {n: p.data.clone() for n, p in model.named_parameters()}
        detached = [p.detach().clone() for p in model.parameters()]
        for x in batches(3, 4, 24):
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swa.update_parameters(model)
            ema.update_parameters(model)
            for name, p in model.named_parameters():
                shadow[name].mul_(0.9).add_(p.data, alpha=0.1)
            with torch.no_grad():
                torch._foreach_lerp_(detached, [p.detach() for p in model.parameters()], 0.1)
            look(loss=loss, swa=swa.state_dict(), ema=ema.state_dict(), shadow=shadow, detached=detached, out=ema(x))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.data.copy_(shadow[name])
        look(out=model(x))

    check(with_adamw(Stack), loop, [FULL[1], FULL[2]])


def test_target_network_by_in_place_writes() -> None:
    """The Polyak update of a target network that is managed too: ``p.detach().mul_`` and ``p.data.add_``."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = Stack(2)
            self.target = copy.deepcopy(self.online).requires_grad_(False)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 4, 24):
            with torch.no_grad():
                wanted = model.target(x)
            loss = ((model.online(x) - wanted - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for t, p in zip(model.target.parameters(), model.online.parameters(), strict=True):
                t.detach().mul_(0.95)
                t.data.add_(p.data, alpha=0.05)
            look(loss=loss)

    check(with_adamw(Pair), loop, FULL)


def test_freezing_and_unfreezing_on_the_way() -> None:
    """Gradual unfreezing with ``add_param_group``, and freezing again; frozen ones have no gradient and no state."""

    def build() -> Any:
        model = Stack(3)
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        return model, torch.optim.AdamW(model.head.parameters(), lr=1e-2, weight_decay=0.3)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(6, 4, 24)):
            if step == 1:
                model.blocks[2].requires_grad_(True)
                optimizer.add_param_group({"params": list(model.blocks[2].parameters()), "lr": 1e-3})
            if step == 2:
                model.blocks[0].norm.weight.requires_grad = True
                optimizer.add_param_group({"params": [model.blocks[0].norm.weight]})
            if step == 4:
                model.head.requires_grad_(False)
            loss = (model(x) ** 2).mean()
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, norm=norm)

    check(build, loop, FULL)


def test_weight_surgery_on_the_way() -> None:
    """Pruning masks, re-initialised layers, a module replaced by a new one, rows zeroed, ``load_state_dict`` back."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        saved = None
        for step, x in enumerate(batches(6, 4, 24)):
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                saved = {k: v.clone() for k, v in model.state_dict().items()}
                prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.5)
            if step == 1:
                prune.remove(model.blocks[0].up, "weight")
                optimizer.param_groups[0]["params"] = list(model.parameters())
            if step == 2:
                model.blocks[1].up.reset_parameters()
                model.apply(lambda m: nn.init.zeros_(m.bias) if getattr(m, "bias", None) is not None else None)
            if step == 3:
                model.head = nn.Linear(24, 2)
                optimizer.add_param_group({"params": list(model.head.parameters())})
            if step == 4:
                saved = {k: v for k, v in saved.items() if not k.startswith("head")}
                model.load_state_dict(saved, strict=False)
                model.to("cpu").float().train()
            look(loss=loss, names=str(sorted(model.state_dict())))

    def build() -> Any:
        model = Stack(3)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    plain = run(build, loop)
    with one_thread():
        for variant in QUICK:
            surgery(build, loop, plain, variant)


def surgery(build: Any, loop: Any, plain: Any, variant: Variant) -> None:
    """`exactness.run` without its questions about what close() leaves: parameters come and go here."""
    seed_all(0)
    model, optimizer = build()
    look = Look(model, optimizer, variant, len(plain.looks))
    look.attach()
    try:
        loop(model, optimizer, look)
        assert_exact(plain, look.recording, str(variant))
    finally:
        look.close()
    assert_ordinary(model)


# ---------------------------------------------------------------- several models, other modes


def test_two_models_share_one_budget() -> None:
    """DPO: a policy and a frozen reference in one process; one budget for both, exact, each with its own engine."""
    variant = Variant(SLOW, prefetch=2, seed=3)

    def train(attached: bool) -> list[Any]:
        torch.manual_seed(0)
        policy = Stack(4)
        reference = copy.deepcopy(policy).requires_grad_(False).eval()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        engines = []
        if attached:
            budget = starved(policy)
            settings = Variant(variant.debug, variant.prefetch, variant.seed, budget=budget)
            engines = [attach(policy, optimizer, settings), attach(reference, None, settings)]
            assert engines[0] is not engines[1]
            assert engines[0].space is engines[1].space
        logged = []
        for x, y in zip(batches(4, 4, 24), batches(4, 4, 24, seed=2), strict=True):
            with torch.no_grad():
                wanted = reference(x) - reference(y)
            loss = -nn.functional.logsigmoid((policy(x) - policy(y) - wanted).sum(-1)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logged.append(loss.detach())
            if attached:
                account = engines[0].space.ledger[Tier.DEVICE]
                assert account.peak_nbytes <= account.budget_nbytes == budget
        logged += [take_down(policy, [optimizer]), take_down(reference, [])]
        for engine in engines:
            engine.close()
        assert_ordinary(policy)
        assert_ordinary(reference)
        return logged

    with one_thread():
        plain, ours = train(False), train(True)
    assert all(same_bits(a, b) for a, b in zip(plain[:-2], ours[:-2], strict=True))
    for a, b in zip(plain[-2:], ours[-2:], strict=True):
        assert a.keys() == b.keys()
        assert all(same_bits(a[key], b[key]) for key in a)


def test_inference_mode_first_then_training() -> None:
    """A forward under inference_mode before the first step (a sanity check) leaves nothing that breaks training."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for ids in token_batches(3):
            with torch.inference_mode():
                out = model(ids).logits.clone()
                text = model.generate(ids[:1, :4], max_new_tokens=4, do_sample=False)
                penalty = sum(p.sum() for p in model.parameters()).clone()
            loss = model(ids, labels=ids).loss
            loss.backward()
            with torch.inference_mode():
                norm = sum(p.grad.sum() for p in model.parameters()).clone()
            optimizer.step()
            with torch.inference_mode():
                after = model(ids).logits.clone()
            optimizer.zero_grad()
            assert not any(p.is_inference() for p in model.parameters())
            look(loss=loss, out=out, text=text.clone(), penalty=penalty, norm=norm, after=after)

    check(with_adamw(gpt_tiny), loop, QUICK)


def test_evaluation_only_without_an_optimizer() -> None:
    """A model that is only evaluated, with ``generate`` and sampling."""

    def loop(model: Any, _: Any, look: Any) -> None:
        model.eval()
        for ids in token_batches(2, rows=2, length=6):
            with torch.no_grad():
                text = model.generate(ids, max_new_tokens=5, do_sample=True, top_k=5, pad_token_id=0)
            look(text=text, logits=model(ids).logits)

    check(lambda: (gpt_tiny(), None), loop, QUICK)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_numba_kernel_equals_itself_everywhere(name: str) -> None:
    """With the one-pass kernel: the same bits over placements, prefetch depths, delays and thread counts."""

    def build() -> Any:
        model = mlp(3, 32)
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
            "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, fused=True),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
        }
        return model, kinds[name](model.parameters())

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 8, 32):
            for half in x.chunk(2):
                (mlp_loss(model, half) / 2).backward()
            norm = clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
            look(norm=norm)

    runs = [
        run(build, loop, variant, num_expected=4, optimizer_kernel="numba")
        for variant in (
            Variant(POISON, budget="all"),
            Variant(POISON, prefetch=4, budget="tight"),
            Variant(SLOW, prefetch=2, seed=5, budget="starved", every_look=False),
        )
    ]
    for other in runs[1:]:
        assert_exact(runs[0], other, name)
    if name == "adamw":
        # Torch's fused kernel: the same bits, but for exp_avg_sq in the last (numel mod 16) elements.
        expected, actual = run(build, loop).looks[0], runs[0].looks[0]
        wrong = [k for k in expected if "exp_avg_sq" not in k and not same_bits(expected[k], actual.get(k))]
        assert not wrong, wrong[:6]
        second = [k for k in expected if "exp_avg_sq" in k and expected[k].numel() % 16 == 0]
        assert second
        assert all(same_bits(expected[k], actual[k]) for k in second)


@pytest.mark.parametrize("kind", ["fp32", "bf16 casts"])
def test_what_leaves_in_inference_mode_can_be_trained_on(kind: str) -> None:
    """Weights written by the user leave the device in a validation under inference_mode, in whatever form; and the
    model that is closed in there trains on."""
    is_cast = kind != "fp32"

    def loop(model: nn.Module, optimizer: Any, look: Look) -> None:
        for step in range(5):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                loss = mlp_loss(model, batches(1, seed=step)[0])
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.99)
            with torch.inference_mode():  # outside autocast: the full weights come to the device, one after the other
                inferred = model(batches(1, seed=100)[0]).sum().clone()
            look(loss=loss, inferred=inferred)
        optimizer.zero_grad()
        mlp_loss(model, batches(1, seed=9)[0]).backward()
        with torch.inference_mode():
            look.close()
        for p in model.parameters():
            assert not p.is_inference()
            assert not p.grad.is_inference()
            p.grad.mul_(0.5)  # refused for an inference tensor
        optimizer.step()
        look()

    check(with_adamw(lambda: mlp(4)), loop, FULL)
