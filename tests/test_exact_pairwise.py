"""Everything that an ordinary loop combines, two by two: a covering table in which each pair of choices occurs.

Each row is one training script, run plain and under the engine, once watched after each step and once under the slow
store with nobody looking before the end.
"""

from __future__ import annotations

import functools
import io
import itertools
import random
from typing import Any

import pytest
import torch
from exactness import POISON, SLOW, Variant, check
from fakes import Block, token_batches
from test_cases_num import ShapeAware
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

FACTORS: dict[str, tuple[str, ...]] = {
    "accumulate": ("1", "2"),
    "clip": ("none", "norm", "value"),
    "checkpoint": ("none", "reentrant", "non-reentrant"),
    "tied": ("no", "yes"),
    "frozen": ("no", "yes"),
    "conditional": ("no", "yes"),
    "evaluate": ("no", "no_grad", "inference"),
    "resume": ("no", "yes"),
    "amp": ("none", "bf16", "fp16"),
    "optimizers": ("one", "two"),
    "groups": ("one", "three"),
    "zero_grad": ("none", "zeros"),
    "kind": (
        "adamw", "adamw_fused", "adamw_foreach", "sgd_momentum", "sgd_nesterov", "adagrad", "nadam", "muon", "lbfgs",
        "custom", "adam_amsgrad", "rmsprop",
    ),
}  # fmt: skip


def is_possible(row: dict[str, str]) -> bool:
    """What plain torch itself cannot do is no row. Works on partial rows."""
    kind = row.get("kind")
    if kind == "lbfgs" and (row.get("groups") == "three" or row.get("amp") == "fp16"):
        return False  # one group only; GradScaler takes no closure
    # Muon takes matrices only, so another class has to take the rest.
    return not (kind == "muon" and row.get("optimizers") == "one")


def covering_table(seed: int = 0) -> list[dict[str, str]]:
    """Rows that cover every possible pair of choices: greedy, the best of some random candidates each time."""
    draw = random.Random(seed)
    names = list(FACTORS)
    open_pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if is_possible({a: x, b: y})
    }
    rows: list[dict[str, str]] = []
    while open_pairs:
        best: tuple[int, dict[str, str]] = (-1, {})
        for _ in range(12):
            row = dict(draw.choice(sorted(open_pairs)))
            for name in draw.sample(names, len(names)):
                if name in row:
                    continue
                choices = [c for c in FACTORS[name] if is_possible({**row, name: c})]
                gain = {c: sum(_pair((name, c), item) in open_pairs for item in row.items()) for c in choices}
                row[name] = max(choices, key=lambda c, gain=gain: gain[c] + draw.random() / 2)
            if (count := len(open_pairs & _pairs(row))) > best[0]:
                best = (count, row)
        rows.append({name: best[1][name] for name in names})
        open_pairs -= _pairs(best[1])
    return rows


_PLACE = {name: place for place, name in enumerate(FACTORS)}


def _pair(a: tuple[str, str], b: tuple[str, str]) -> Any:
    return (a, b) if _PLACE[a[0]] < _PLACE[b[0]] else (b, a)


def _pairs(row: dict[str, str]) -> set[Any]:
    return {_pair(a, b) for a, b in itertools.combinations(row.items(), 2)}


class Net(nn.Module):
    """A small language model with what a row asks for."""

    def __init__(self, row: dict[str, str], width: int = 16, vocab: int = 31) -> None:
        super().__init__()
        self.row = row
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, 24) for _ in range(3))
        self.branches = nn.ModuleList(Block(width, 20) for _ in range(2))
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        if row["tied"] == "yes":
            self.head.weight = self.embed.weight
        if row["frozen"] == "yes":
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor, which: int = 0) -> torch.Tensor:
        self.num_calls += 1
        x = self.dropout(self.embed(ids))
        layers = list(self.blocks)
        if self.row["conditional"] == "yes":
            layers.insert(1, self.branches[which])
        for layer in layers:
            if self.row["checkpoint"] != "none" and self.training:
                x = checkpoint(layer, x, use_reentrant=self.row["checkpoint"] == "reentrant")
            else:
                x = layer(x)
        return self.head(self.norm(self.dropout(x)))


def make_optimizer(kind: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if kind == "lbfgs":
        return torch.optim.LBFGS(groups[0]["params"], lr=0.1, max_iter=2, history_size=3)
    makers = {
        "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
        "adamw_fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
        "adamw_foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
        "sgd_momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
        "sgd_nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, maximize=False),
        "adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
        "nadam": functools.partial(torch.optim.NAdam, lr=1e-2),
        "muon": functools.partial(torch.optim.Muon, lr=0.02),
        "custom": functools.partial(ShapeAware, lr=1e-2),
        "adam_amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
        "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    }
    return makers[kind](groups)


def make_optimizers(model: nn.Module, row: dict[str, str]) -> list[torch.optim.Optimizer]:
    params = [p for p in model.parameters() if p.requires_grad]
    if row["kind"] == "muon":
        parts = [[p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]]
    elif row["optimizers"] == "two":
        parts = [params[::2], params[1::2]]
    else:
        parts = [params]
    result = []
    for index, part in enumerate(parts):
        groups = [{"params": part}]
        if row["groups"] == "three":
            groups = [{"params": part[:1]}, {"params": part[1:4], "lr": 3e-3}, {"params": part[4:]}]
        result.append(make_optimizer(row["kind"] if index == 0 else "adamw", groups))
    return result


class Script:
    """The training script of a row."""

    num_steps = 4

    def __init__(self, row: dict[str, str]) -> None:
        self.row = row

    def build(self) -> Any:
        model = Net(self.row)
        return model, make_optimizers(model, self.row)

    def loss(self, model: Any, ids: torch.Tensor, which: int) -> torch.Tensor:
        amp = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.row["amp"]]
        with torch.autocast("cpu", dtype=amp or torch.bfloat16, enabled=amp is not None):
            logits = model(ids[:, :-1], which)
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def clip(self, model: nn.Module) -> Any:
        if self.row["clip"] == "norm":
            return clip_grad_norm_(model.parameters(), 0.1)
        if self.row["clip"] == "value":
            clip_grad_value_(model.parameters(), 1e-3)
        return None

    def evaluate(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        model.eval()
        with torch.no_grad() if self.row["evaluate"] == "no_grad" else torch.inference_mode():
            result = model(ids).float().logsumexp(-1).sum()
        model.train()
        return result.clone()

    def resume(self, model: Any, optimizers: Any, schedulers: Any, scaler: Any, look: Any) -> Any:
        stream = io.BytesIO()
        parts = [model, *optimizers, *schedulers, scaler]
        torch.save([part.state_dict() for part in parts], stream)
        torch.manual_seed(99)
        model = Net(self.row)
        optimizers = make_optimizers(model, self.row)
        look.continue_with(model, optimizers)
        schedulers = self.schedulers(optimizers)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=self.row["amp"] == "fp16")
        stream.seek(0)
        for part, state in zip([model, *optimizers, *schedulers, scaler], torch.load(stream), strict=True):
            part.load_state_dict(state)
        return model, optimizers, schedulers, scaler

    @staticmethod
    def schedulers(optimizers: Any) -> list[Any]:
        return [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1 + step)) for o in optimizers]

    def __call__(self, model: Any, optimizers: Any, look: Any) -> None:
        row = self.row
        num_micro = int(row["accumulate"])
        data = token_batches(self.num_steps * num_micro, rows=2, length=9, vocab=31)
        schedulers = self.schedulers(optimizers)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=row["amp"] == "fp16")
        model.train()
        for step in range(self.num_steps):
            micros = data[step * num_micro : (step + 1) * num_micro]
            logged: dict[str, Any] = {}

            def closure(
                model: Any = model, optimizers: Any = optimizers, micros: Any = micros, step: int = step,
                scaler: Any = scaler,
            ) -> torch.Tensor:  # fmt: skip
                for optimizer in optimizers:
                    optimizer.zero_grad(set_to_none=row["zero_grad"] == "none")
                total = torch.zeros(())
                for ids in micros:
                    loss = self.loss(model, ids, step % 2) / num_micro
                    scaler.scale(loss).backward()
                    total = total + loss.detach()
                return total

            if row["kind"] == "lbfgs":

                def clipped(model: Any = model, closure: Any = closure) -> torch.Tensor:
                    loss = closure()
                    self.clip(model)
                    return loss

                logged["loss"] = optimizers[0].step(clipped)
                for optimizer in optimizers[1:]:
                    optimizer.step()
            else:
                logged["loss"] = closure()
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                logged["norm"] = self.clip(model)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            for scheduler in schedulers:
                scheduler.step()
            look(**logged, scale=scaler.get_scale())
            if row["evaluate"] != "no" and step in (0, 2):
                look(evaluated=self.evaluate(model, data[0]))
            if row["resume"] == "yes" and step == 1:
                model, optimizers, schedulers, scaler = self.resume(model, optimizers, schedulers, scaler, look)
                look(resumed=sum(p.double().sum() for p in model.parameters()))


TABLE = covering_table()


def test_the_table_covers_every_possible_pair() -> None:
    """Each pair of choices that plain torch can do occurs in a row; and rows are few."""
    covered = set().union(*(_pairs(row) for row in TABLE))
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            assert ((a, x), (b, y)) in covered or not is_possible({a: x, b: y}), (a, x, b, y)
    assert all(is_possible(row) for row in TABLE)
    assert len(TABLE) <= 60


@pytest.mark.parametrize("index", range(len(TABLE)), ids=lambda i: f"{i}-" + "-".join(TABLE[i].values()))
def test_pairwise(index: int) -> None:
    """One row: plain and ours are the same bits, step by step."""
    script = Script(TABLE[index])
    prefetch = (1, 2, 4)[index % 3]
    variants = [
        Variant(POISON, prefetch=prefetch, budget="starved"),
        Variant(SLOW, prefetch=prefetch, seed=index, every_look=False, budget="tight"),
    ]
    check(script.build, script, variants, seed=index, activations=("keep", "offload", "recompute")[index // 3 % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(80))
def test_random_rows(seed: int) -> None:
    """Any combination at all, under several seeds of the slow store."""
    draw = random.Random(seed)
    row: dict[str, str] = {}
    while not row or not is_possible(row):
        row = {name: draw.choice(choices) for name, choices in FACTORS.items()}
    script = Script(row)
    variants = [
        Variant(
            draw.choice((POISON, SLOW, SLOW)),
            prefetch=draw.choice((1, 2, 4)),
            seed=draw.randrange(1000),
            every_look=draw.random() < 0.2,
            budget=draw.choice(("tight", "starved", "all")),
        )
        for _ in range(4)
    ]
    check(script.build, script, variants, seed=seed, activations=draw.choice(("keep", "offload", "recompute")))


def test_a_run_of_tens_of_steps_with_everything_on() -> None:
    """Long enough for the learnt order, schedules and growing scales to matter."""
    row = {
        "accumulate": "2", "clip": "norm", "checkpoint": "non-reentrant", "tied": "yes", "frozen": "yes",
        "conditional": "yes", "evaluate": "no_grad", "resume": "yes", "amp": "fp16", "optimizers": "two",
        "groups": "three", "zero_grad": "none", "kind": "adamw",
    }  # fmt: skip
    script = Script(row)
    script.num_steps = 12
    check(script.build, script, [Variant(SLOW, prefetch=2, seed=7, every_look=False, budget="tight")])
