"""The NVMe tier inside the engine: exact with any role on flash and in the least DRAM, budgets kept, nothing left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from exactness import FULL, POISON, QUICK, SLOW, Variant, assert_exact, attach, check, run, same_bits, take_down
from fakes import Stack, adamw_gpt, batches, gpt_steps, mlp, mlp_loss
from loopkit import ROOT
from torch.nn.utils import clip_grad_norm_

import lightning_tieroffload as tieroffload
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.engine.device_space import DeviceSpace
from lightning_tieroffload.engine.host_space import HostNeed, assign_homes
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.engine.unit_state import CAUTIOUS
from lightning_tieroffload.errors import ConfigError, InfeasiblePlanError, UnsupportedError

KiB, MiB = 1 << 10, 1 << 20


def least_dram(build: Any, flash: Path, **settings: Any) -> int:
    """The smallest dram_budget that the engine says works with everything at home on flash."""
    budget = 1
    while True:
        model, optimizers = build()
        try:
            attach(model, optimizers, Variant(), nvme_paths=[flash], dram_budget=budget, **settings).close()
        except InfeasiblePlanError as error:
            assert error.tier == "dram"
            assert error.least_budget_nbytes is not None
            budget = error.least_budget_nbytes
        else:
            return budget


def mlp_build(cls: Any = torch.optim.AdamW, **options: Any) -> Any:
    def build() -> Any:
        model = mlp(6)
        return model, cls(model.parameters(), lr=1e-2, **options)

    return build


def mlp_loop(steps: int = 5, micro: int = 1, clip: float | None = 0.1) -> Any:
    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(steps):
            optimizer.zero_grad()
            for half in x.chunk(micro):
                loss = mlp_loss(model, half) / micro
                loss.backward()
            norm = clip_grad_norm_(model.parameters(), clip) if clip else None
            optimizer.step()
            look(loss=loss, norm=norm)

    return loop


def homes(report: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(u["param_home"], u["state_home"], u["grad_home"]) for u in report["plan"]["units"]}


def assert_dram_kept(report: dict[str, Any]) -> None:
    dram = report["tiers"]["dram"]
    assert dram["peak_nbytes"] <= dram["budget_nbytes"], dram


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("micro", [1, 2])
def test_every_role_on_flash_in_the_least_dram(tmp_path: Path, micro: int) -> None:
    """Parameters, state and gradients on flash, DRAM for one unit at a time: bit for bit, slow store, any prefetch."""
    build = mlp_build()
    budget = least_dram(build, tmp_path)
    _, ours = check(build, mlp_loop(micro=micro), (*QUICK, *FULL), nvme_paths=[tmp_path], dram_budget=budget)
    for recording in ours:
        report = recording.reports[-1]
        assert homes(report) == {("nvme", "nvme", "nvme")}
        assert_dram_kept(report)
        assert report["moved_nbytes"]["read"] > 0
        assert report["moved_nbytes"]["write"] > 0
        assert sum(report["written_nbytes_by_path"].values()) >= report["moved_nbytes"]["write"]
        nvme = report["tiers"]["nvme"]
        assert 0 < nvme["home_nbytes"] <= nvme["used_nbytes"] <= nvme["peak_nbytes"] <= nvme["budget_nbytes"]
    assert os.listdir(tmp_path) == []


def test_homes_go_to_flash_one_role_after_the_other(tmp_path: Path) -> None:
    """From a budget that holds all down to the least: state leaves first, then parameters, then gradients; exact."""
    build = mlp_build()
    least = least_dram(build, tmp_path)
    seen = set()
    for budget in (MiB, 500 * KiB, 400 * KiB, 330 * KiB, 280 * KiB, 3 * least, 2 * least, least):
        _, ours = check(build, mlp_loop(3), [FULL[3]], nvme_paths=[tmp_path], dram_budget=budget)
        report = ours[0].reports[-1]
        assert_dram_kept(report)
        for unit in report["plan"]["units"]:
            seen.add((unit["param_home"].replace("device", "dram"), unit["state_home"], unit["grad_home"]))
        if budget == MiB:
            assert report["tiers"]["nvme"]["used_nbytes"] == 0, "all fits, so nothing goes to flash"
    assert seen == {("dram", "dram", "dram"), ("dram", "nvme", "dram"), ("nvme", "nvme", "dram"), ("nvme",) * 3}


@pytest.mark.parametrize(
    ("cls", "options", "settings"),
    [
        (torch.optim.AdamW, {}, {"optimizer_kernel": "numba"}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": False}, {}),
        (torch.optim.SGD, {}, {}),
        (torch.optim.SGD, {"momentum": 0.9}, {"optimizer_kernel": "numba"}),
        (torch.optim.Adagrad, {}, {}),  # its state is there before the first step
        (torch.optim.LBFGS, {"max_iter": 2}, {}),  # runs whole: every parameter at one time
    ],
)
def test_optimizers(tmp_path: Path, cls: Any, options: Any, settings: Any) -> None:
    """Classes with other state, or none, or run by another way."""
    model = mlp(6)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = mlp_loss(model, x)
                loss.backward()
                return loss

            if cls is torch.optim.LBFGS:
                look(loss=optimizer.step(closure))
            else:
                loss = closure()
                optimizer.step()
                look(loss=loss)

    build = mlp_build(cls, **options)
    budget = least_dram(build, tmp_path, **settings)
    assert budget < 4 * 4 * sum(p.numel() for p in model.parameters())
    variants = [Variant(SLOW, seed=3, every_look=False, budget="tight"), Variant(POISON, budget="tight")]
    if settings:  # our kernel is not torch's: one run of ours against another one, with all in DRAM
        seeded = [run(build, loop, v, num_expected=4, dram_budget="1GiB", **settings) for v in variants]
        flash = [
            run(build, loop, v, num_expected=4, nvme_paths=[tmp_path], dram_budget=budget, **settings) for v in variants
        ]
        for a, b in zip(seeded, flash, strict=True):
            for x, y in zip(a.looks, b.looks, strict=True):
                assert x.keys() == y.keys()
                assert all(same_bits(x[key], y[key]) for key in x)
    else:
        check(build, loop, variants, nvme_paths=[tmp_path], dram_budget=budget)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", ["load_state_dict", "copy_", "data", "closure"])
def test_weights_are_written_while_calls_wait_to_run_again(
    tmp_path: Path, way: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running them first brings other weights in, and those to be written may leave meanwhile: here they do."""
    unfold = DeviceSpace.unfold

    def unfold_and_leave(unit: Any) -> None:
        unfold(unit)
        host, block = unit._keeper, unit.param_block
        if block.is_paged and block.is_resident and not block.is_shown and block not in host._leases:
            host._evict(block)

    monkeypatch.setattr(DeviceSpace, "unfold", staticmethod(unfold_and_leave))
    build = mlp_build() if way != "closure" else mlp_build(torch.optim.LBFGS, max_iter=2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        graphs = []
        for step, x in enumerate(batches(5)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                graphs.append(mlp_loss(model, x))  # alive, as in the frames of an exception that somebody holds
                values = {name: value * 0.5 for name, value in model.state_dict().items()}
                if step and way == "load_state_dict":
                    model.load_state_dict(values)
                for name, p in model.named_parameters() if step else ():
                    if way == "copy_":
                        with torch.no_grad():
                            p.copy_(values[name])
                    elif way == "data":
                        p.data = values[name]

            def loss_of(x: Any = x) -> Any:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = mlp_loss(model, x)
                loss.backward()
                return loss

            if way == "closure":
                optimizer.step(loss_of)
            else:
                look(loss=loss_of())
                optimizer.step()
            look(graph=graphs[-1])

    budget = least_dram(build, tmp_path, activations="recompute")
    for prefetch in (1, 4):
        variants = [Variant(debug, prefetch=prefetch, budget="starved", every_look=False) for debug in (POISON, SLOW)]
        check(build, loop, variants, nvme_paths=[tmp_path], dram_budget=budget, activations="recompute")


@pytest.mark.parametrize("prefetch", [1, 2, 4])
def test_gpt_with_split_masters(tmp_path: Path, prefetch: int) -> None:
    """A GPT under bf16 autocast: weights travel in 16 bits, masters are split on flash; a tied head."""

    build, loop = adamw_gpt, gpt_steps(4, autocast=True, clip=0.5)
    budget = least_dram(build, tmp_path)
    variants = [
        Variant(SLOW, prefetch=prefetch, seed=prefetch, every_look=False),
        Variant(POISON, prefetch=prefetch, budget="tight"),
    ]
    _, ours = check(build, loop, variants, nvme_paths=[tmp_path], dram_budget=budget)
    for recording in ours:
        assert homes(recording.reports[-1]) == {("nvme", "nvme", "nvme")}
        assert_dram_kept(recording.reports[-1])


@pytest.mark.parametrize("seed", range(20))
def test_twenty_seeds(tmp_path: Path, seed: int) -> None:
    """Twenty orders of completion of reads, writes, updates and copies."""

    def build() -> Any:
        model = Stack(3)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(4, 6, 24):
            for half in x.chunk(2):
                loss = (model(half) ** 2).mean()
                loss.backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                look(loss=loss.detach(), evaluated=model(x[:1]))

    budget = least_dram(build, tmp_path) * (1 + seed % 3)
    variant = Variant(SLOW, prefetch=(1, 2, 4)[seed % 3], seed=seed, every_look=False, budget="tight")
    check(build, loop, [variant], seed=seed, nvme_paths=[tmp_path], dram_budget=budget)


def test_state_home_puts_all_state_on_flash_whatever_fits(tmp_path: Path) -> None:
    """With room for everything parameters and gradients stay, and state goes to flash; exact. Else it is refused."""
    settings = {"nvme_paths": [tmp_path], "dram_budget": "64MiB", "state_home": "nvme"}
    _, ours = check(mlp_build(), mlp_loop(3), (*QUICK, FULL[3]), **settings)
    for recording in ours:
        report = recording.reports[-1]
        assert {(u["state_home"], u["grad_home"]) for u in report["plan"]["units"]} == {("nvme", "dram")}
        assert {u["param_home"] for u in report["plan"]["units"]} <= {"device", "dram"}
        num_params = sum(p.numel() for p in mlp(6).parameters())
        assert report["moved_nbytes"]["write"] >= 3 * 8 * num_params
        assert_dram_kept(report)
    model, optimizer = mlp_build(torch.optim.LBFGS)()
    with pytest.raises(UnsupportedError, match="LBFGS steps over all parameters at once"):
        attach(model, optimizer, Variant(), **settings)
    with pytest.raises(ConfigError, match="needs nvme_paths"):
        attach(*mlp_build()(), Variant(), state_home="nvme")


def test_several_paths(tmp_path: Path) -> None:
    """Shards are cut into small blocks that go round two directories."""
    paths = [tmp_path / "a", tmp_path / "b"]
    settings = {"nvme_paths": paths, "block_nbytes": "4KiB", "io_threads": 2, "dram_budget": 100 * KiB}
    _, ours = check(mlp_build(), mlp_loop(3), QUICK, **settings)
    written = ours[0].reports[-1]["written_nbytes_by_path"]
    assert set(written) == {str(path) for path in paths}
    assert all(written.values())


@pytest.mark.slow
def test_every_test_of_exactness_on_flash() -> None:
    """All loops, models and optimizers of the engine's own tests, with everything on flash in the least DRAM."""
    names = ["optim", "misc", "autograd", "amp", "pairwise"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "nvme_everywhere", "-x"]
    command += [f"tests/test_exact_{name}.py" for name in names]
    # Unfreezing asks for more DRAM than was the least before; two models with budgets of their own share none.
    command += ["-k", "not freezing_and_unfreezing and not two_models_share"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    found = re.search(r"engines with everything on flash: (\d+)", done.stdout)
    assert found
    assert int(found[1]) > 200


# ---------------------------------------------------------------- users


def started(tmp_path: Path, num_steps: int = 2, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = mlp(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"device_budget": "64KiB", "dram_budget": 100 * KiB, "nvme_paths": [tmp_path], **settings}
    tieroffload.offload(model, optimizer, device="cpu", debug=["poison"], optimizer_kernel="torch", **settings)
    train(model, optimizer, num_steps)
    return model, optimizer, engine_of(model)


def plain(num_steps: int) -> Any:
    torch.manual_seed(0)
    model = mlp(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, num_steps)
    return model, optimizer


def train(model: Any, optimizer: Any, num_steps: int) -> None:
    for x in batches(num_steps):
        optimizer.zero_grad()
        mlp_loss(model, x).backward()
        optimizer.step()


def test_state_that_a_user_holds_stays_and_what_he_writes_counts(tmp_path: Path) -> None:
    """A tensor of optimizer.state is the real one: it keeps its address and values, and writes to it are trained on."""
    model, optimizer, engine = started(tmp_path)
    other, other_optimizer = plain(2)
    p, q = model[0].weight, other[0].weight
    moment = optimizer.state[p]["exp_avg"]
    address = moment.data_ptr()
    assert same_bits(moment, other_optimizer.state[q]["exp_avg"])
    for m in (moment, other_optimizer.state[q]["exp_avg"]):
        m.mul_(0.5)
    for each, each_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(each, each_optimizer, 3)
    engine.flush()
    assert moment.data_ptr() == address
    assert same_bits(moment, other_optimizer.state[q]["exp_avg"])
    assert same_bits(optimizer.state[p]["exp_avg"], moment)
    block = engine.units[0].state_block
    assert block.is_shown
    del moment, m, each_optimizer
    train(model, optimizer, 1)
    assert not block.is_shown
    train(other, other_optimizer, 1)
    engine.close()
    assert same_bits(optimizer.state[p]["exp_avg"], other_optimizer.state[q]["exp_avg"])


def test_views_of_state_keep_it(tmp_path: Path) -> None:
    """A view, a NumPy array and an entry are ways of holding, too."""
    model, optimizer, _ = started(tmp_path)
    held = [
        optimizer.state[model[0].weight]["exp_avg"][3:5],
        optimizer.state[model[2].weight]["exp_avg_sq"].numpy(),
        optimizer.state[model[4].weight],
    ]
    train(model, optimizer, 3)
    engine = engine_of(model)
    engine.flush()
    assert [unit.state_block.is_shown for unit in engine.units] == [True] * 3 + [False] * 4
    other, other_optimizer = plain(2)
    train(other, other_optimizer, 3)
    assert same_bits(held[0], other_optimizer.state[other[0].weight]["exp_avg"][3:5])
    assert same_bits(torch.from_numpy(held[1]), other_optimizer.state[other[2].weight]["exp_avg_sq"])
    assert same_bits(held[2]["exp_avg"], other_optimizer.state[other[4].weight]["exp_avg"])
    engine.close()


def test_items_are_all_there_at_once(tmp_path: Path) -> None:
    """Iterating over the whole state brings all of it in, as the user's memory, and nothing of it leaves meanwhile."""
    model, optimizer, engine = started(tmp_path, 3)
    _, other_optimizer = plain(3)
    items = list(optimizer.state.items())
    for (p, entry), (q, expected) in zip(items, other_optimizer.state.items(), strict=True):
        assert p.shape == q.shape
        assert entry.keys() == expected.keys()
        assert all(same_bits(entry[key], expected[key]) for key in entry)
    del items, p, entry
    train(model, optimizer, 1)
    assert_dram_kept(engine.report())
    engine.close()


def test_checkpoints_and_resume(tmp_path: Path) -> None:
    """state_dict of both is the plain run's; loading it puts the state on flash again, and training goes on exactly."""
    model, optimizer, engine = started(tmp_path, 3)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_dram_kept(engine.report())
    torch.save(saved, tmp_path / "saved.pt")
    engine.close()
    other, other_optimizer = plain(3)
    expected = take_down(other, [other_optimizer])
    found = take_down(model, [optimizer])
    assert all(same_bits(expected[key], found[key]) for key in expected)
    (tmp_path / "flash").mkdir()
    fresh, fresh_optimizer, fresh_engine = started(tmp_path / "flash", 1)
    loaded = torch.load(tmp_path / "saved.pt")
    fresh.load_state_dict(loaded["model"])
    fresh_optimizer.load_state_dict(loaded["optimizer"])
    for each, each_optimizer in ((fresh, fresh_optimizer), (other, other_optimizer)):
        train(each, each_optimizer, 3)
    assert_dram_kept(fresh_engine.report())
    found, expected = take_down(fresh, [fresh_optimizer]), take_down(other, [other_optimizer])
    assert all(same_bits(expected[key], found[key]) for key in expected)
    fresh_engine.close()


def test_plan_and_close(tmp_path: Path) -> None:
    """While it runs there is one run directory; after close() there is none, and state and parameters are ordinary."""
    model, optimizer, engine = started(tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    assert {unit["state_home"] for unit in engine.plan()["units"]} == {"nvme"}
    engine.close()
    assert os.listdir(tmp_path) == []
    train(model, optimizer, 2)
    other, other_optimizer = plain(2)
    train(other, other_optimizer, 2)
    expected, found = take_down(other, [other_optimizer]), take_down(model, [optimizer])
    assert all(same_bits(expected[key], found[key]) for key in expected)


def test_nothing_is_left_when_nobody_closes(tmp_path: Path) -> None:
    """An interpreter that ends in the middle of training leaves no directory."""
    code = (
        f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}\nfrom pathlib import Path\n"
        "import test_nvme_tier as tests\nkept = tests.started(Path(sys.argv[1]), 2)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], text=True, capture_output=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("debug", [POISON, SLOW])
def test_what_the_device_holds_is_not_read_from_flash(tmp_path: Path, debug: frozenset[str]) -> None:
    """The homes of units that the device holds come from there, in the least DRAM: flash may hold anything."""
    build = mlp_build()
    budget = least_dram(build, tmp_path)
    torch.manual_seed(0)
    model, optimizer = build()
    engine = attach(model, optimizer, Variant(debug, budget="all"), nvme_paths=[tmp_path], dram_budget=budget)
    train(model, optimizer, 2)
    mlp_loss(model, batches(1)[0]).backward()
    engine.core.scheduler.drain()
    store = engine.core.store
    assert store is not None
    num_lost = 0
    for unit in engine.units:
        assert all(part.is_resident for part in unit.full_parts)
        if not unit.param_block.is_resident:
            num_lost += 1
            for segment in unit.param_block.segments:
                extent = store.pieces_of(segment.name)[0].extent
                with open(extent.path, "r+b") as file:
                    file.seek(extent.offset_nbytes)
                    file.write(b"\xff" * extent.nbytes)
    assert num_lost > 1
    expected = {name: p.detach() for name, p in plain(2)[0].named_parameters()}
    found = model.state_dict()
    assert all(same_bits(expected[name], found[name]) for name in expected)
    engine.close()
    assert all(same_bits(expected[name], p) for name, p in model.named_parameters())


# ---------------------------------------------------------------- overlap


def test_step_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With state on flash and room for three units: step() is over while not one write has ended."""
    model, optimizer = mlp_build()()
    attach(model, optimizer, Variant(budget="all"), nvme_paths=[tmp_path], dram_budget=430 * KiB)
    engine = engine_of(model)
    assert sum(u["state_home"] == "nvme" for u in engine.plan()["units"]) > 3
    assert {u["param_home"] for u in engine.plan()["units"]} == {"dram"}
    train(model, optimizer, 2)
    engine.flush()
    engine.core.scheduler.drain()
    may_write = threading.Event()
    write = os.pwritev

    def late(*args: Any) -> int:
        assert may_write.wait(20)
        return write(*args)

    monkeypatch.setattr(os, "pwritev", late)
    mlp_loss(model, batches(1)[0]).backward()
    num_done = engine.report()["lanes"]["write0"]["num_done"]
    optimizer.step()
    lanes = engine.report()["lanes"]
    assert lanes["write0"]["num_done"] == num_done
    # What is left of the step: updates, or the writes behind them.
    assert sum(lane["num_running"] + lane["num_queued"] for lane in lanes.values()) > 0
    may_write.set()
    engine.core.scheduler.drain()
    engine.close()


def test_state_is_read_ahead_while_backward_runs(tmp_path: Path) -> None:
    """By the time of step() the state that the first updates want is there, or on its way."""
    model, optimizer = mlp_build()()
    attach(model, optimizer, Variant(budget="all"), nvme_paths=[tmp_path], dram_budget=430 * KiB)
    engine = engine_of(model)
    train(model, optimizer, 3)
    engine.flush()
    engine.core.scheduler.drain()
    mlp_loss(model, batches(1)[0]).backward()
    on_flash = [unit.state_block.is_resident for unit in engine.units if unit.state_block.is_paged]
    assert len(on_flash) > 3
    assert on_flash[:2] == [True, True], on_flash
    assert_dram_kept(engine.report())
    engine.close()


# ---------------------------------------------------------------- budgets


def test_a_budget_that_cannot_work_names_the_least(tmp_path: Path) -> None:
    """Below one unit's worth: an error before anything moves, with the number that works; nothing is left."""
    build = mlp_build()
    least = least_dram(build, tmp_path)
    model, optimizer = build()
    with pytest.raises(InfeasiblePlanError, match=f"smallest dram_budget that works is {least} bytes"):
        attach(model, optimizer, Variant(), nvme_paths=[tmp_path], dram_budget=least - 1)
    assert os.listdir(tmp_path) == []
    model, optimizer = build()
    with pytest.raises(InfeasiblePlanError, match="smallest nvme_budget that works is") as caught:
        attach(model, optimizer, Variant(), nvme_paths=[tmp_path], dram_budget=least, nvme_budget=100 * KiB)
    assert caught.value.tier == "nvme"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("in_optimizer", [True, False], ids=["stepped", "not stepped"])
@pytest.mark.parametrize("home", ["least", "some", "state"])
def test_unfrozen_in_the_middle(tmp_path: Path, home: str, in_optimizer: bool) -> None:
    """Gradients that nobody planned for: room is made for them, or an error says the budget that has it, which works.

    Never is DRAM held beyond the budget.
    """

    def build() -> Any:
        model = mlp(6)
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("bias"))
        return model, torch.optim.SGD([p for p in model.parameters() if in_optimizer or p.requires_grad], lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for index, x in enumerate(batches(4)):
            if index == 1:
                model.requires_grad_(True)
            else:
                optimizer.zero_grad()
            loss = mlp_loss(model, x)
            loss.backward()
            optimizer.step()
            look(loss=loss)

    budget = least_dram(build, tmp_path) + {"least": 0, "some": 40 * KiB, "state": 140 * KiB}[home]
    plain = run(build, loop)
    num_refused = 0
    while True:
        try:
            ours = run(build, loop, FULL[0], num_expected=4, nvme_paths=[tmp_path], dram_budget=budget)
        except InfeasiblePlanError as error:
            assert error.tier == "dram"
            assert error.least_budget_nbytes is not None
            assert error.least_budget_nbytes > budget
            budget = error.least_budget_nbytes
            num_refused += 1
            assert os.listdir(tmp_path) == []
            continue
        break
    assert_exact(plain, ours)
    assert bool(num_refused) == (home == "least")
    assert_dram_kept(ours.reports[-1])


def need(name: str, param: int, state: int, grad: int) -> HostNeed:
    return HostNeed(name=name, param_nbytes=param, state_nbytes=state, grad_nbytes=grad, choice=CAUTIOUS)


def test_assign_homes_takes_the_last_units_first_and_no_more_than_needed() -> None:
    """State before parameters before gradients, from the last unit; what is left in DRAM and in flight fits."""
    needs = [need(f"layer{i}", 4, 8, 4) for i in range(10)]
    for budget in range(16, 170):
        choices = assign_homes(needs, budget)
        state = [c.state_home is Tier.NVME for c in choices]
        param = [c.param_home is Tier.NVME for c in choices]
        grad = [c.grad_home is Tier.NVME for c in choices]
        for role in (state, param, grad):
            assert role == sorted(role), "a unit leaves DRAM before one that is used later in forward"
        assert all(state) or not any(param)
        assert all(param) or not any(grad)
        at_home = 160 - 8 * sum(state) - 4 * sum(param) - 4 * sum(grad)
        in_flight = max((8 * s + 4 * p + 4 * g for s, p, g in zip(state, param, grad, strict=True)), default=0)
        assert at_home + in_flight <= budget
        if budget >= 160:
            assert not any(state)
    with pytest.raises(InfeasiblePlanError) as caught:
        assign_homes(needs, 15)
    assert caught.value.least_budget_nbytes == 16
