"""Model structure: every case of kind MOD that needs no flash, as one training function run plain and under the engine.

Each test names its case. See `exactness` for what is compared.
"""

from __future__ import annotations

import gc
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from exactness import (
    FULL,
    POISON,
    QUICK,
    SLOW,
    Variant,
    assert_ordinary,
    attach,
    check,
    run,
    same_bits,
    take_down,
    tight,
)
from fakes import Stack, batches, gpt_tiny, mlp, mlp_loss, token_batches
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.errors import UnsupportedError

# ---------------------------------------------------------------- MOD-03

Pair = namedtuple("Pair", "h aux")


@dataclass
class Output:
    h: torch.Tensor
    extra: Any = None


class OddOutput(nn.Module):
    """A block whose output is not a plain tensor."""

    def __init__(self, kind: str, width: int = 16) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        h = x + torch.tanh(self.linear(self.norm(x)))
        if self.kind == "dict":
            return {"h": h, "n": 3}
        if self.kind == "dataclass":
            return Output(h, extra=[h.sum(), None, "text"])
        if self.kind == "namedtuple":
            return Pair(h, None)
        if self.kind == "generator":
            return [part for part in (h * 0.5, (h * 0.5,), [None])]
        return None, h


class OddOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OddOutput(k) for k in ("dict", "dataclass", "namedtuple", "generator", "none"))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for block in self.blocks:
            out = block(x)
            if isinstance(out, dict):
                x = out["h"]
            elif isinstance(out, (Output, Pair)):
                x = out.h
            elif isinstance(out, list):
                x = out[0] + out[1][0]
            else:
                x = out[1]
        return {"loss": (x**2).mean(), "aux": None, "nested": [(x,)]}


def adamw(make: Any, **settings: Any) -> Any:
    def build() -> Any:
        model = make()
        return model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **settings})

    return build


def test_mod_03_outputs_that_are_not_plain_tensors() -> None:
    """MOD-03: dict, dataclass, namedtuple, generator-made list, None: exact, and nothing is above the budget after."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 4, 16):
            loss = model(x)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(adamw(OddOutputs), loop, FULL)


# ---------------------------------------------------------------- MOD-04


class FirstLayers(nn.Module):
    """Integer ids to an Embedding; raw floats to a Linear: neither input has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.raw = nn.Linear(8, 24)
        self.stack = Stack(3, 24)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (self.stack(self.embed(ids) + self.raw(x)) ** 2).mean()


def test_mod_04_first_layers_are_released() -> None:
    """MOD-04: release does not depend on gradients of inputs; each step the first layers leave the device."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        engine = engine_of(model)
        for ids, x in zip(token_batches(3, vocab=50), batches(3, 4, 16, 8), strict=True):
            loss = model(ids, x)
            loss.backward()
            if engine is not None:
                assert engine.space.ledger[Tier.DEVICE].used_nbytes <= engine.space.ledger[Tier.DEVICE].budget_nbytes
                assert engine.gradients.leased_nbytes() == 0
                assert all(unit.num_windows == 0 for unit in engine.units)
                with engine.space.lock:  # nothing but room keeps a unit there
                    engine.space.make_room(engine.space.ledger[Tier.DEVICE].budget_nbytes, keep=None, what="all")
                parts = [part for unit in engine.units for part in unit.parts]
                assert not any(part.is_resident or part.num_leases for part in parts)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(adamw(FirstLayers), loop, FULL)


# ---------------------------------------------------------------- MOD-07


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("frozen", ["frozen", "trained"])
def test_mod_07_checkpoint_leaves_nothing_behind(use_reentrant: bool, frozen: str) -> None:
    """MOD-07: reentrant checkpoint, frozen parameters, a non-scalar backward, 4 iterations: exact in each."""

    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return self.head(x)

    def build() -> Any:
        model = Checkpointed()
        if frozen == "frozen":
            for block in list(model.blocks)[1:3]:
                block.requires_grad_(False)
            model.blocks[0].up.weight.requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x, g in zip(batches(4, 4, 24), batches(4, 4, 5, seed=2), strict=True):
            out = model(x.requires_grad_())
            out.backward(g)
            engine = engine_of(model)
            if engine is not None:
                assert not engine.gradients._open
                assert not engine.gradients._tasks
            optimizer.step()
            optimizer.zero_grad()
            look(out=out, input_grad=x.grad)

    check(build, loop, FULL)


# ---------------------------------------------------------------- MOD-08


@pytest.mark.parametrize("variant", QUICK, ids=str)
def test_mod_08_parameters_outside_forward_show_their_values(variant: Variant) -> None:
    """MOD-08: shape, numel, dtype, device, stride and values are the true ones, read in every usual way."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        assert model.get_input_embeddings().weight.shape[0] == 97
        if len(range(97)) > model.get_input_embeddings().weight.shape[0]:
            raise AssertionError("run_clm.py would resize the embedding")
        facts = []
        for name, p in model.named_parameters():
            facts.append((name, tuple(p.shape), p.numel(), str(p.dtype), str(p.device), p.stride(), p.is_leaf, p.ndim))
        look(
            facts=str(facts),
            sums=[p.sum() for p in model.parameters()],
            data_sums=[p.data.sum() for p in model.parameters()],
            detached=[p.detach().clone() for p in model.parameters()],
            items=[p.flatten()[0].item() for p in model.parameters()],
            lists=[p.tolist()[:2] for p in model.parameters()],
            arrays=[torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()],
            text=str([repr(p) for p in model.parameters()]),
            norm=torch.nn.utils.parameters_to_vector(model.parameters()).norm(),
            stacked=torch.stack([p.float().norm() for p in model.parameters()]),
            comparisons=[(p > 0).sum() for p in model.parameters()],
            by_key=[model.state_dict()[k].double().sum() for k in sorted(model.state_dict())],
        )

    check(adamw(gpt_tiny), loop, [variant])


def test_mod_08_writes_outside_forward_are_the_values_used_next() -> None:
    """MOD-08: in-place writes in every usual way reach the home copy: the halved weights are the ones used next."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        def step(ids: torch.Tensor) -> None:
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

        ids = token_batches(6)
        step(ids[0])
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        step(ids[1])
        for p in model.parameters():
            p.data.mul_(1.25)
            p.data = p.data * 0.9
        step(ids[2])
        block = model.transformer.h[0]
        nn.init.normal_(block.mlp.c_fc.weight, std=0.02)
        with torch.no_grad():
            block.ln_1.weight[3] = 2.0
            block.ln_1.bias.copy_(torch.arange(32) / 32)
            block.attn.c_attn.weight[:, :4].add_(0.01)
            torch.nn.utils.vector_to_parameters(
                torch.nn.utils.parameters_to_vector(model.transformer.h[1].parameters()) * 1.01,
                model.transformer.h[1].parameters(),
            )
        step(ids[3])
        model.transformer.h[1].mlp.c_proj.weight.detach().zero_()
        model._init_weights(model.transformer.h[0].attn.c_proj)
        step(ids[4])
        alias = model.transformer.wte.weight.data
        step(ids[5])
        alias.add_(1e-2)  # through a tensor that was handed out a step ago
        del alias
        step(ids[5])

    check(adamw(gpt_tiny), loop, FULL)


@pytest.mark.parametrize("how", ["loop", "flat"])
def test_mod_08_penalty_over_all_parameters(how: str) -> None:
    """MOD-08: an L2 penalty over all parameters in the loss: its gradient is exact."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3):
            loss = mlp_loss(model, x)
            if how == "loop":
                penalty = sum((p**2).sum() for p in model.parameters())
            else:
                penalty = torch.cat([p.view(-1) for p in model.parameters()]).abs().sum()
            (loss + 1e-3 * penalty).backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, penalty=penalty, norm=norm)

    check(adamw(lambda: mlp(4)), loop, FULL)


def test_mod_08_resizing_an_offloaded_embedding_is_refused_and_works_after_close() -> None:
    """MOD-08: ``resize_token_embeddings`` while offloaded is one clear error that changes nothing; after ``close`` it
    works as in plain, and the resized model attaches again and trains exactly."""

    def loop(model: Any, _: Any, look: Any) -> None:
        engine = engine_of(model)
        if engine is not None:
            with pytest.raises(UnsupportedError, match=r"close\(\) first and attach again"):
                model.resize_token_embeddings(120, mean_resizing=False)
            engine.close()
        torch.manual_seed(5)  # the refused attempt has drawn new rows already
        model.resize_token_embeddings(120, mean_resizing=False)
        assert model.get_input_embeddings().weight.shape == (120, 32)
        assert model.lm_head.weight is model.get_input_embeddings().weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        again = None if engine is None else attach(model, optimizer, Variant(SLOW))
        for ids in token_batches(3, vocab=120):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, state=optimizer.state_dict()["state"])
        if again is not None:
            again.close()

    check(lambda: (gpt_tiny(), None), loop, [QUICK[0]])


# ---------------------------------------------------------------- MOD-14


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.hidden = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.hidden(self.table(ids)) ** 2).sum()


@pytest.mark.parametrize("name", ["sparse_adam", "sgd"])
@pytest.mark.parametrize("reads", [False, True])
def test_mod_14_sparse_gradients_pass_through(name: str, reads: bool) -> None:
    """MOD-14: a sparse gradient stays sparse (3 entries, 2 after coalescing), with SparseAdam and with SGD."""

    def build() -> Any:
        model = Bag()
        if name == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.1)
        rest = torch.optim.AdamW(model.hidden.parameters(), lr=0.1)
        return model, [torch.optim.SparseAdam(model.table.parameters(), lr=0.1), rest]

    def loop(model: Any, optimizers: Any, look: Any) -> None:
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for ids in ([1, 1, 3], [2, 9], [1, 3]):
            loss = model(torch.tensor(ids))
            loss.backward()
            seen = {}
            if reads:
                grad = model.table.weight.grad
                assert grad.is_sparse
                assert grad._nnz() == len(ids)
                seen = {"values": grad.coalesce().values().clone()}
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            look(loss=loss, **seen)

    check(build, loop, FULL)


@pytest.mark.parametrize("variant", [None, *QUICK], ids=str)
def test_mod_14_an_optimizer_that_takes_no_sparse_gradients_says_so(variant: Variant | None) -> None:
    """MOD-14: AdamW refuses a sparse gradient in its own words, in the training thread, and nothing hangs after."""

    model, optimizer = adamw(Bag)()
    engine = None if variant is None else attach(model, optimizer, variant)

    def step() -> None:
        optimizer.step()
        model.state_dict()  # an update that runs later reports at the next use, at the latest

    model(torch.tensor([1, 1, 3])).backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        step()
    if engine is not None:
        engine.close()
    assert_ordinary(model)


# ---------------------------------------------------------------- MOD-15


class Experts(nn.Module):
    """Top-1 routing to 4 experts by the sign pattern of a marker."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (route == index).nonzero().squeeze(-1)
            if rows.numel():
                out[rows] = expert(x[rows]) * weight[rows, index, None]
        return (out**2).mean()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_mod_15_idle_experts_stand_still(name: str) -> None:
    """MOD-15: experts 2 and 3 get nothing in step 1 and all in step 2; clipping on; their grad is None, no NaN."""

    def build() -> Any:
        model = Experts()
        if name == "adamw":
            return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        routes = [[0, 1, 0, 1], [2, 3, 3, 2], [0, 1, 2, 3], [0, 0, 0, 0]]
        for x, route in zip(batches(4, 4, 8), routes, strict=True):
            loss = model(x, torch.tensor(route))
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 1e-2)
            for index, expert in enumerate(model.experts):
                assert all((p.grad is None) == (index not in route) for p in expert.parameters())
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss, norm=norm)

    check(build, loop, FULL)


# ---------------------------------------------------------------- MOD-16


def frozen_mlp() -> Any:
    model = mlp(6)
    for layer in (0, 2, 4, 6):
        model[layer].requires_grad_(False)
        for p in model[layer].parameters():
            nn.init.constant_(p, 7.0)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def test_mod_16_frozen_weights_cost_nothing_on_the_way_down() -> None:
    """MOD-16: no gradient, no optimizer record, no write-back for frozen parameters: only gradients go down."""
    num_steps = 5

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(num_steps):
            loss = mlp_loss(model, x / 1e6)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)
        assert all(p.grad is None for p in model.parameters())
        assert all((p == 7.0).all() for layer in (0, 2, 4, 6) for p in model[layer].parameters())

    _, ours = check(frozen_mlp, loop, FULL, activations="keep")
    model, _ = frozen_mlp()
    trained_nbytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    for recording in ours:
        assert recording.reports[0]["moved_nbytes"]["d2h"] == num_steps * trained_nbytes
        frozen = [u for u in recording.reports[0]["plan"]["units"] if u["unit"] in ("0", "2", "4", "6")]
        assert len(frozen) == 4
        assert all(u["grad_nbytes"] == 0 and u["state_home"] is None and u["update_on"] is None for u in frozen)


# ---------------------------------------------------------------- MOD-17


def test_mod_17_one_tensor_larger_than_any_staging() -> None:
    """MOD-17: Embedding(50000, 64) next to Linear(64, 64), blocks of 1 MiB, prefetch 4, 3 steps: exact."""

    class Lopsided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50000, 64)
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return (x**2).mean()

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for ids in token_batches(3, vocab=50000):
            loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    variants = [Variant(SLOW, prefetch=4, budget="tight", every_look=False)]
    check(adamw(Lopsided), loop, variants, block_nbytes="1MiB")


# ---------------------------------------------------------------- MOD-18


def compiled_blocks(how: str, backend: str) -> Any:
    def build() -> Any:
        torch._dynamo.reset()
        model = Stack(3)
        if how == "method":
            for block in model.blocks:
                block.compile(backend=backend)
        else:
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, backend=backend)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    return build


def compiled_loop(model: Any, optimizer: Any, look: Any) -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    for x in batches(4, 4, 24):
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(counters["stats"]["unique_graphs"])
        look(loss=loss, graphs=graphs[-1], breaks=sum(counters["graph_break"].values()))
    assert graphs[0] >= 1
    assert graphs[1] == graphs[-1], "recompiled after step 2"
    model.eval()
    with torch.no_grad():
        look(out=model(batches(1, 4, 24)[0]))


@pytest.mark.parametrize("how", ["method", "wrapper"])
def test_mod_18_compiled_blocks(how: str) -> None:
    """MOD-18: torch.compile per block: equal to plain compiled, as many graphs, no recompilation after step 2."""
    check(compiled_blocks(how, "aot_eager"), compiled_loop, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["method", "wrapper"])
def test_mod_18_compiled_blocks_with_inductor(how: str) -> None:
    """MOD-18: the same with the default compiler."""
    check(compiled_blocks(how, "inductor"), compiled_loop, QUICK)


@pytest.mark.parametrize("how", ["method", "wrapper"])
def test_mod_18_whole_model_compile_is_one_clear_error(how: str) -> None:
    """MOD-18: a model that was compiled as a whole is refused at set-up, with what to do instead."""
    model = Stack(2)
    if how == "method":
        model.compile(backend="eager")
        whole: nn.Module = model
    else:
        whole = torch.compile(model, backend="eager")
    with pytest.raises(UnsupportedError, match="compile its layers"):
        attach(whole, None, Variant(budget=1 << 20))


# ---------------------------------------------------------------- MOD-19


@pytest.mark.parametrize("variant", [None, *QUICK], ids=str)
def test_mod_19_activation_offload_leaves_weights_alone(variant: Variant | None) -> None:
    """MOD-19: with activation offload on, no weight, buffer or view of one goes down as an activation; exact."""
    num_steps = 3

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(num_steps):
            loss = mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    if variant is None:
        check(adamw(lambda: mlp(4)), loop, FULL, activations="offload")
        return
    build = adamw(lambda: mlp(4))
    kept, offloaded = (
        run(build, loop, variant, num_expected=num_steps, activations=each).reports[0]["moved_nbytes"]["d2h"]
        for each in ("keep", "offload")
    )
    # Saved per step: inputs of five Linears and of four GELUs, 16 rows of 64; a weight alone would be 16 KiB more.
    assert 0 < offloaded - kept <= num_steps * (9 * 16 * 64 * 4 + 1024)


def test_mod_19_parameters_are_never_taken_for_activations() -> None:
    """MOD-19: what reaches outer saved-tensor hooks (an activation offload) never shares a weight's storage."""
    packed: list[Any] = []

    def pack(tensor: torch.Tensor) -> Any:
        packed.append((tensor.untyped_storage()._cdata, tensor.nbytes))
        return tensor.clone()

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        engine = engine_of(model)
        for x in batches(3):
            packed.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = mlp_loss(model, x)
            if engine is not None:
                assert packed
                assert not {key for key, _ in packed} & set(engine.space.by_storage)
                assert sum(nbytes for _, nbytes in packed) < 4 * 16 * 64 * 16  # activations alone
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(adamw(lambda: mlp(4)), loop, FULL)


# ---------------------------------------------------------------- more structure, asked for beside the cases


def test_close_in_the_middle_goes_on_as_plain() -> None:
    """``close()`` leaves ordinary parameters, gradients and state: half a run ours, half plain, is the plain run."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        data = batches(6)
        for step, x in enumerate(data):
            mlp_loss(model, x).backward()
            engine = engine_of(model)
            if step == 3 and engine is not None:
                engine.close()
                assert type(optimizer) is torch.optim.AdamW
                assert all(type(p) is nn.Parameter and p.grad is not None for p in model.parameters())
                gc.collect()
            optimizer.step()
            optimizer.zero_grad()
            entry = take_down(model, [optimizer])
            look(after=str(sorted(k for k in entry)))

    check(adamw(lambda: mlp(3)), loop, FULL)


def test_attached_twice_is_one_engine_and_the_least_budget_is_named() -> None:
    """Attaching again gives the same engine; a budget of one byte names the least that works."""
    model = mlp(2)
    engine = attach(model, None, Variant(POISON, budget=1 << 20))
    try:
        assert attach(model, None, Variant(POISON, budget=1 << 20)) is engine
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), model.parameters(), strict=True))
    finally:
        engine.close()
    assert 0 < tight(model) < 1 << 20
