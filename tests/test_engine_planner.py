"""The planner in the engine: watched steps, a plan that keeps to its budgets, and numbers that do not change."""

from __future__ import annotations

import dataclasses
import json
import logging
import mmap
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exactness import (
    CPU,
    FULL,
    Variant,
    assert_exact,
    attach,
    check,
    one_thread,
    run,
    seed_all,
    small_activations,
    tight,
)
from fakes import Block, batches, gpt_tiny, mlp, mlp_loss, steps, token_batches
from rich.console import Console
from torch import nn

import lightning_tieroffload
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine import instance_maker
from lightning_tieroffload.engine import planner as engine_planner
from lightning_tieroffload.engine import profiler as engine_profiler
from lightning_tieroffload.engine.activations import ActivationStore
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.engine.placement import homes_of, placement_key
from lightning_tieroffload.engine.planner import Planner
from lightning_tieroffload.engine.streams import make_streams
from lightning_tieroffload.errors import ConfigError, InfeasiblePlanError, UnsupportedError
from lightning_tieroffload.llama_shape import LLAMA_SIZES, LlamaShape
from lightning_tieroffload.planning.cost_model import ActivationChoice, UpdatePlace
from lightning_tieroffload.planning.plan import Plan, alive_peak_nbytes
from lightning_tieroffload.planning.profile import PROFILE_FILE_NAME, Profile
from lightning_tieroffload.report import render_report
from lightning_tieroffload.sizes import KiB
from lightning_tieroffload.trace import TIMELINE_FILE_NAME


class Dropping(nn.Module):
    """A residual block with dropout, whose activations weigh more than its weights."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.3)


def blocks(depth: int = 6) -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(Dropping() for _ in range(depth)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def mlp_steps(num_steps: int = 6, rows: int = 64, width: int = 24) -> Any:
    return steps(mlp_loss, num_steps, rows, width)


def quiet(**_: Any) -> None:
    return None


def trained(build: Any = blocks, loop: Any = None, budget: Any = "all", **settings: Any) -> OffloadEngine:
    """An engine after a few steps, still open."""
    seed_all(0)
    model, optimizer = build()
    with one_thread(), small_activations():
        engine = attach(model, optimizer, Variant(budget=budget), **settings)
        engine.kept_alive = (model, optimizer)  # type: ignore[attr-defined]
        (loop or mlp_steps())(model, optimizer, quiet)
    return engine


def activations_of(engine: OffloadEngine) -> list[ActivationChoice]:
    return [unit.choice.activation for unit in engine.units]


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("planner", ["ilp", "greedy", "lifetime"])
def test_a_plan_changes_no_number(planner: str) -> None:
    """Six steps, two watched, then the plan: exact at every budget over the slow store, whoever plans."""
    budgets: list[Any] = ["tight", 60 * KiB, 120 * KiB, "all"]
    variants = [
        Variant(FULL[i % 4].debug, FULL[i % 4].prefetch, i, FULL[i % 4].every_look, b) for i, b in enumerate(budgets)
    ]
    _, ours = check(blocks, mlp_steps(), variants, planner=planner)
    for recording in ours:
        report = recording.reports[0]
        assert report["plan"]["planner"] == planner
        assert report["forecast"]["step_s"] > 0
        assert report["forecast"]["bottleneck"]


@pytest.mark.parametrize("on_flash", [False, True])
def test_a_unit_unfrozen_since_the_watched_steps_keeps_its_homes(tmp_path: Path, on_flash: bool) -> None:
    """Frozen while the plan's steps were watched, trained when it is made: the plan says nothing of its gradients."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for step, x in enumerate(batches(8, 8, 24)):
            loss = mlp_loss(model, x)
            loss.backward()
            for index, block in enumerate(model):
                block.requires_grad_((step + index) % 3 != 0)
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss.detach())
            engine = engine_of(model)
            for unit in engine.units if engine is not None else ():
                param_home, *rest = homes_of(unit.choice)
                assert rest == homes.setdefault(unit.name, rest), (step, unit.name)
                assert on_flash or rest == [Tier.DRAM, Tier.DRAM, UpdatePlace.CPU]
                assert (param_home is Tier.NVME) == unit.param_block.is_paged

    settings: dict[str, Any] = {"nvme_paths": [tmp_path], "dram_budget": 160 * KiB} if on_flash else {}
    for variant in FULL[::3]:
        homes: dict[str, Any] = {}
        check(blocks, loop, [dataclasses.replace(variant, budget=60 * KiB)], **settings)


def test_activations_leave_where_they_do_not_fit() -> None:
    """60 KiB hold a unit or two and no activations of six: some leave, and what the plan counts fits the budget."""
    engine = trained(budget=120 * KiB)
    plan = engine.core.planner.plan
    assert plan is not None
    assert set(activations_of(engine)) - {ActivationChoice.KEEP}, plan
    assert plan.peak_nbytes <= 120 * KiB
    assert engine.report()["forecast"]["device_peak_nbytes"] == plan.forecast.device_peak_nbytes
    engine.close()


def test_the_plan_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line says what was decided and what it is expected to take; whoever wants more gets the table."""
    with caplog.at_level(logging.DEBUG, logger=engine_planner.__name__):
        trained(budget=120 * KiB).close()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert any(level == "INFO" and "activations" in text and "s a step expected" in text for level, text in said), said
    assert any(level == "DEBUG" and "update on" in text and "keep" in text for level, text in said), said


@pytest.mark.parametrize("is_logged", [False, True], ids=["quiet log", "log"])
def test_a_plan_made_while_training_is_said_once_and_reported(
    is_logged: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """On the terminal where the log does not show it: the table before the first step is not what runs later."""
    caplog.set_level(logging.INFO if is_logged else logging.WARNING, logger=engine_planner.__name__)
    model, optimizer = blocks()
    lightning_tieroffload.offload(model, optimizer, device_budget=120 * KiB)
    mlp_steps()(model, optimizer, quiet)
    engine = lightning_tieroffload.engine_of(model)
    assert engine is not None
    report = engine.report()
    engine.close()
    plans = report["plan"]["plans"]
    assert len(plans) == report["plan"]["num_plans"] > 0
    assert plans[0]["after_steps"] == 2
    assert plans[0]["text"].startswith("plan after step 2 (2 watched steps, in ")
    assert plans[-1]["forecast"] == report["forecast"]
    for counted in ("activations", "updates"):
        numbers = plans[0]["text"].split(f"{counted} ")[1].split(";")[0]
        assert sum(int(part.split()[0]) for part in numbers.split(", ")) == len(report["plan"]["units"])
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tieroffload: plan after ")]
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("plan after step ")]
    texts = [plan["text"] for plan in plans]
    assert printed == ([] if is_logged else [f"tieroffload: {text}" for text in texts])
    assert logged == (texts if is_logged else [])
    console = Console(width=200)
    with console.capture() as shown:
        console.print(render_report(report))
    assert texts[-1] in shown.get()


def test_nothing_leaves_where_everything_fits() -> None:
    """The planner declines: no solver runs, activations stay, and as many bytes move as with ``keep``."""
    ours, kept = trained(budget="all"), trained(budget="all", activations="keep")
    plan = ours.core.planner.plan
    assert plan is not None
    assert plan.note == "everything fits"
    assert set(activations_of(ours)) == {ActivationChoice.KEEP}
    assert ours.report()["moved_nbytes"] == kept.report()["moved_nbytes"]
    ours.close()
    kept.close()


@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
def test_a_setting_is_not_overruled(activations: str) -> None:
    """A plan is made for its forecast; what the user has fixed stays, at the tightest budget too."""
    for budget in ("tight", "all"):
        engine = trained(budget=budget, activations=activations)
        assert {a.value.split("-")[0] for a in activations_of(engine)} == {activations}
        assert engine.report()["forecast"]["step_s"] > 0
        engine.close()


def test_units_that_cannot_be_recomputed_are_planned_for_again() -> None:
    """A forward that counts its calls is refused when it is watched; the next plan does without it."""

    class Counting(Dropping):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    def build() -> Any:
        model = nn.Sequential(*(Counting() if i % 2 else Dropping() for i in range(6)))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    check(build, mlp_steps(8), [Variant(budget=100 * KiB)])
    engine = trained(build, mlp_steps(8), budget=100 * KiB)
    refused = [u for u in engine.units if u.choice.activation is ActivationChoice.RECOMPUTE and int(u.name) % 2]
    assert refused == []
    engine.close()


@pytest.mark.parametrize("budget", [60 * KiB, 160 * KiB, 300 * KiB, "all"])
def test_a_plan_that_moves_state_changes_no_number(budget: Any) -> None:
    """With updates on the device the plan chooses homes of state and activations together; numbers are the CPU's."""
    kernels = {"optimizer_kernel": "numba", "units": ("Dropping",)}
    reference = run(blocks, mlp_steps(8), Variant(budget="all"), num_expected=8, update_on="cpu", **kernels)
    for debug in (FULL[0].debug, FULL[2].debug):
        variant = Variant(debug, budget=budget, every_look=False)
        ours = run(blocks, mlp_steps(8), variant, num_expected=8, update_on="device", **kernels)
        assert_exact(reference, ours, str(variant))
        lines = ours.reports[0]["plan"]["units"]
        assert ours.reports[0]["forecast"]["step_s"] > 0
        if budget == "all":
            assert {line["update_on"] for line in lines} == {"device"}
            assert {line["activations"] for line in lines} == {"keep"}
        if budget == 60 * KiB:
            assert {line["update_on"] for line in lines} == {"cpu"}


# ---------------------------------------------------------------- budgets


def _random_case(seed: int) -> tuple[Any, Any, dict[str, int]]:
    draw = random.Random(seed)
    width, depth, rows = draw.choice((8, 24, 40)), draw.randrange(1, 7), draw.choice((1, 16, 128))

    def build() -> Any:
        draw = random.Random(seed + 1)
        layers: list[nn.Module] = []
        for _ in range(depth):
            kind = draw.choice(("block", "dropping", "linear"))
            layers.append({"block": Block, "dropping": Dropping, "linear": _linear}[kind](width))
        model: nn.Module = nn.Sequential(*layers)
        if depth > 1 and draw.random() < 0.3:
            for p in layers[0].parameters():
                p.requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    model, _ = build()
    total = sum(p.nbytes for p in model.parameters())
    budgets = {
        "device_budget": int(total * 10 ** draw.uniform(-1.5, 1.5)) + 1,
        "dram_budget": int(total * 10 ** draw.uniform(0, 1.5)) + 1,
    }
    return build, mlp_steps(4, rows, width), budgets


def _linear(width: int) -> nn.Module:
    return nn.Linear(width, width)


def _holds(seed: int) -> str:
    """Run a random pair: inside its budgets, or refused with a least budget that then works."""
    build, loop, budgets = _random_case(seed)
    said = "ran"
    for _ in range(6):
        random.seed(seed)
        torch.manual_seed(seed)
        model, optimizer = build()
        engine = None
        try:
            config = TierOffloadConfig(**budgets, optimizer_kernel="torch", debug=["poison"])
            engine = OffloadEngine.attach(model, config, CPU)
            engine.adopt_optimizer(optimizer)
        except InfeasiblePlanError as error:
            if engine is not None:
                engine.close()
            assert error.least_budget_nbytes is not None
            key = f"{error.tier}_budget"
            assert error.least_budget_nbytes > budgets[key], (seed, budgets, str(error))
            budgets[key] = error.least_budget_nbytes
            said = "refused"
            continue
        with one_thread():
            loop(model, optimizer, quiet)
        engine.flush()
        report = engine.report()
        for tier in ("device", "dram"):
            account = report["tiers"][tier]
            assert account["peak_nbytes"] <= account["budget_nbytes"], (seed, tier, account)
        engine.close()
        return said
    raise AssertionError(f"seed {seed}: the least budget that was named never worked: {budgets}")


def test_random_models_and_budgets() -> None:
    """40 random pairs: a clear infeasibility whose least budget works, or a run inside its budgets. Both occur."""
    assert {_holds(seed) for seed in range(40)} == {"ran", "refused"}


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("room_nbytes", [0, 64, 3552, 4095, 4096, 5000, 8191, 8192, 100_000])
def test_activations_map_no_more_host_memory_than_is_left(room_nbytes: int, pin: bool) -> None:
    """Whole pages are mapped: what was left of dram_budget was compared with the bytes asked for, and overrun."""
    store: ActivationStore
    store = ActivationStore(
        make_streams(CPU, on_stall=lambda *_: None),
        pin=pin,
        headroom_nbytes=lambda: room_nbytes - store.mapped_nbytes(),
    )
    blocks = [store.lend(1000) for _ in range(20)]
    assert store.mapped_nbytes() <= room_nbytes
    assert (blocks[0] is not None) == (room_nbytes >= mmap.PAGESIZE)
    for block in blocks:
        if block is not None:
            block.free()
    store.close()


@pytest.mark.slow
def test_three_hundred_random_models_and_budgets() -> None:
    """300 random pairs, as above."""
    assert {_holds(seed) for seed in range(1000, 1300)} == {"ran", "refused"}


# ---------------------------------------------------------------- what is measured


def test_the_profile_says_what_is_saved_and_used() -> None:
    """Bytes that autograd saves in a unit, its input told apart; two uses a step; all seconds there."""
    engine = trained(lambda: _two_linears(), mlp_steps(3, 32, 64), activations="auto")
    profile = engine.core.planner.profile
    assert profile is not None
    lines = {unit.name: unit for unit in profile.units}
    first, second = lines["0"], lines["1"]
    # Linear saves its input, tanh its output, which is the next unit's input: that one's then, as what it has to keep.
    assert (first.activation_nbytes, first.boundary_nbytes) == (32 * 64 * 4, 32 * 64 * 4)
    assert (second.activation_nbytes, second.boundary_nbytes) == (2 * 32 * 64 * 4, 32 * 64 * 4)
    for unit in (first, second):
        assert unit.forward_s > 0
        assert unit.backward_s > 0
        assert unit.param_nbytes == engine.units[0].nbytes
        assert unit.state_nbytes >= 2 * unit.param_numel * 4
        life = profile.notes["lifetimes"][unit.name]
        assert life["num_uses"] == 2
        assert 0 <= life["first_use_s"] <= life["last_use_s"] <= profile.notes["last_step_s"]
        assert 0 < life["idle_s"] <= profile.notes["last_step_s"]
    assert profile.batch_key == "32x64"
    assert profile.machine.h2d_bytes_per_s > 1e6
    engine.close()


class _Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def _two_linears() -> Any:
    model = nn.Sequential(_Tanh(), _Tanh())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_recomputed_and_accumulated_steps_are_profiled_per_micro_batch() -> None:
    """Three micro-batches a step: seconds and bytes are those of one; recompute has seconds of its own."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        data = iter(batches(18, 64, 24))
        for _ in range(6):
            for _ in range(3):
                (mlp_loss(model, next(data)) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()

    engine = trained(loop=loop, activations="recompute", profile_steps=3)
    profile = engine.core.planner.profile
    assert profile is not None
    assert profile.notes["num_micro_batches"] == 3
    lines = [unit for unit in profile.units if unit.param_numel]
    assert all(unit.recompute_s for unit in lines), lines
    assert all(profile.notes["lifetimes"][unit.name]["num_uses"] >= 6 for unit in lines)
    engine.close()


# ---------------------------------------------------------------- plans in files


def test_plan_and_profile_are_written_and_a_plan_is_followed_as_it_is(tmp_path: Path) -> None:
    """plan.json of one run is plan_file of the next: same choices from the first step on, nothing planned again."""
    from lightning_tieroffload.strategies.face import write_report

    first = trained(budget=120 * KiB, trace_path=str(tmp_path))
    write_report(first, first.config)
    assert {file.name for file in tmp_path.iterdir()} == {
        *("report.json", "plan.json", PROFILE_FILE_NAME, TIMELINE_FILE_NAME)
    }, "one file of each thing"
    plan, profile = Plan.load(tmp_path / "plan.json"), Profile.load(tmp_path / PROFILE_FILE_NAME)
    assert plan == first.core.planner.plan
    assert profile == first.core.planner.profile
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["forecast"] == plan.forecast.to_json()
    choices = activations_of(first)
    assert ActivationChoice.KEEP in choices
    assert len(set(choices)) > 1
    first.close()

    settings = {"plan_file": str(tmp_path / "plan.json")}
    check(blocks, mlp_steps(), [Variant(budget=120 * KiB)], **settings)
    second = trained(loop=mlp_steps(1), budget=120 * KiB, **settings)
    assert activations_of(second) == choices
    mlp_steps(5)(*second.kept_alive, quiet)  # type: ignore[attr-defined]
    assert second.core.planner.num_plans == 1
    assert second.core.planner.plan == plan
    second.close()


def test_a_plan_file_says_which_state_passes_through_the_device(tmp_path: Path) -> None:
    """Lines whose state is at home in DRAM and updated on the device are followed, and change no number."""
    path = tmp_path / "plan.json"
    kernels = {"optimizer_kernel": "numba", "units": ("Dropping",)}
    first = trained(budget=300 * KiB, update_on="split", **kernels)
    assert first.core.planner.plan is not None
    raw = first.core.planner.plan.to_json()
    first.close()
    for index, line in enumerate(raw["units"]):
        line["param_home"] = line["state_home"] = line["grad_home"] = "dram"
        line["update_on"] = "device" if index % 2 else "cpu"
    path.write_text(json.dumps(raw))
    reference = run(blocks, mlp_steps(6), Variant(budget="all"), num_expected=6, update_on="cpu", **kernels)
    for debug in (FULL[0].debug, FULL[2].debug):
        variant = Variant(debug, budget=300 * KiB, every_look=False)
        settings = {"update_on": "split", "plan_file": str(path), **kernels}
        ours = run(blocks, mlp_steps(6), variant, num_expected=6, **settings)
        assert_exact(reference, ours, str(variant))
        report = ours.reports[0]
        assert [line["update_on"] for line in report["plan"]["units"]] == ["cpu", "device"] * 3
        assert report["num_unit_updates"]["streamed"] == 15  # none has state at the first step
    with pytest.raises(UnsupportedError, match=r'which this version cannot do.*Set update_on="split"'):
        trained(budget=300 * KiB, update_on="cpu", plan_file=str(path), **kernels)


def test_a_plan_file_of_another_model_or_engine_is_refused(tmp_path: Path) -> None:
    """Units that it lacks, a tier that is not there, and a setting that contradicts it are errors before any step."""
    path = tmp_path / "plan.json"
    first = trained(budget=120 * KiB)
    plan = first.core.planner.plan
    assert plan is not None
    plan.save(path)
    first.close()
    with pytest.raises(ConfigError, match="has no line for 1 of 7 units"):
        trained(lambda: blocks(7), plan_file=str(path))
    with pytest.raises(ConfigError, match="activations='keep'"):
        trained(plan_file=str(path), activations="keep")
    raw = plan.to_json()
    raw["units"][0]["param_home"] = "nvme"
    path.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedError, match="which this version cannot do"):
        trained(plan_file=str(path))
    with pytest.raises(ConfigError, match="plan_file"):
        trained(plan_file=str(tmp_path / "none.json"))


def test_zero_profile_steps_plan_nothing() -> None:
    """profile_steps=0: the cautious plan stays, and no forecast is made up."""
    engine = trained(budget=60 * KiB, profile_steps=0)
    assert engine.core.planner.plan is None
    assert set(engine.report()["forecast"].values()) == {None}
    engine.close()


def test_an_earlier_profile_of_the_same_job_is_used_after_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Read back where model, batch, machine and settings are the same; measured again, and written, where not."""
    first = trained(loop=mlp_steps(4), budget=120 * KiB, trace_path=str(tmp_path))
    profile, choices = first.core.planner.profile, activations_of(first)
    first.close()

    def second(**settings: Any) -> tuple[int, Profile]:
        loop = settings.pop("loop", mlp_steps(1))
        build = settings.pop("build", blocks)
        engine = trained(build, loop, **{"budget": 120 * KiB, "trace_path": str(tmp_path), **settings})
        planner = engine.core.planner
        found = planner.profile
        if "loop" not in settings and planner.num_plans:
            assert found is not None
            same.append(activations_of(engine))
        engine.close()
        return planner.num_plans, found  # type: ignore[return-value]

    same: list[Any] = []
    with caplog.at_level(logging.INFO, logger=engine_planner.__name__):
        assert second() == (1, profile)
        assert "one watched step, from" in caplog.text
    assert same == [choices]
    # Exact, whatever the step after which it plans.
    check(blocks, mlp_steps(4), [Variant(budget=120 * KiB)], trace_path=str(tmp_path))

    for other in (
        {"loop": mlp_steps(1, 32)},  # another batch
        {"build": lambda: blocks(7)},  # another model
        {"activations": "recompute"},
    ):
        assert second(**other)[0] == 0, other  # goes on watching
    caplog.clear()
    saved = json.loads((tmp_path / PROFILE_FILE_NAME).read_text())
    saved["machine"]["name"] = "another machine"
    saved["key"] = None
    (tmp_path / PROFILE_FILE_NAME).write_text(json.dumps(saved))
    assert second()[0] == 0
    (tmp_path / PROFILE_FILE_NAME).write_text("{")
    with caplog.at_level(logging.WARNING, logger=engine_planner.__name__):
        num_plans, again = second(loop=mlp_steps(4))
    assert "is not used, and written anew" in caplog.text
    assert num_plans == 1
    assert Profile.load(tmp_path / PROFILE_FILE_NAME) == again


# ---------------------------------------------------------------- later


def test_a_larger_batch_is_planned_for_before_it_is_kept() -> None:
    """A batch four times as large as the watched ones: units leave in that very step, and it stays exact."""

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for index, x in enumerate(batches(6, 256, 24)):
            loss = mlp_loss(model, x if index > 3 else x[:64])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    budget = 300 * KiB
    check(blocks, loop, [Variant(budget=budget), Variant(FULL[2].debug, budget=budget, every_look=False)])
    engine = trained(loop=mlp_steps(4), budget=budget)
    assert set(activations_of(engine)) == {ActivationChoice.KEEP}
    model, _ = engine.kept_alive  # type: ignore[attr-defined]
    mlp_loss(model, torch.randn(256, 24)).backward()
    assert set(activations_of(engine)) - {ActivationChoice.KEEP}
    assert engine.core.planner.num_plans == 2
    engine.close()


def test_out_of_memory_that_is_caught() -> None:
    """After torch.OutOfMemoryError in a forward the same process goes on: exact, and units recompute from there on."""

    class Full(Dropping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 100:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.")
            return super().forward(x)

    def build() -> Any:
        model = nn.Sequential(Dropping(), Dropping(), Full(), Dropping())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        for index, x in enumerate(batches(10, 128, 24)):
            try:
                loss = mlp_loss(model, x if index == 4 else x[:64])
            except torch.OutOfMemoryError:
                loss = mlp_loss(model, x[:32])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    check(build, loop, [Variant(budget="all"), Variant(budget="tight"), FULL[2]])
    engine = trained(build, loop, budget="all")
    assert engine.core.planner._budget_frac < 1
    assert engine.core.planner.num_plans == 3  # after two steps, for the larger batch, after watching what came of it
    engine.close()


@pytest.mark.parametrize("profile_steps", [2, 0])
def test_out_of_memory_makes_units_recompute_at_once(profile_steps: int) -> None:
    """Also where nothing is watched and planned, as beside a GPU by default; and that stays so."""
    engine = trained(loop=mlp_steps(4), budget="all", profile_steps=profile_steps)
    model, _ = engine.kept_alive  # type: ignore[attr-defined]
    handle = model[3].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(64, 24))
    handle.remove()
    assert set(activations_of(engine)) == {ActivationChoice.RECOMPUTE}
    mlp_steps(3)(*engine.kept_alive, quiet)  # type: ignore[attr-defined]
    planner = engine.core.planner
    assert planner.num_plans == (2 if profile_steps else 0)
    if not profile_steps:
        assert not engine.core.profiler.is_on
        assert set(activations_of(engine)) == {ActivationChoice.RECOMPUTE}
    engine.close()


def test_drift_is_noticed_and_planned_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that all take much longer than those after the plan: said, watched, planned again, not at every step."""
    monkeypatch.setattr(engine_planner, "_NUM_DRIFT_STEPS", 4)
    monkeypatch.setattr(engine_planner, "_LEAST_STEPS_BETWEEN", 8)
    engine = trained(loop=mlp_steps(6), budget="all")
    planner = engine.core.planner
    planner._baseline_s, planner._laps_s = 1e-9, []
    with caplog.at_level(logging.WARNING, logger=engine_planner.__name__):
        mlp_steps(12)(*engine.kept_alive, quiet)  # type: ignore[attr-defined]
    assert sum("the plan is made again" in record.message for record in caplog.records) == 1
    assert planner.num_plans == 2
    engine.close()


def test_a_link_that_slows_down_is_noticed_though_steps_take_as_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies at a third of their rate: said once, the machine is measured again, and so is the plan made."""
    monkeypatch.setattr(engine_planner, "_NUM_DRIFT_STEPS", 4)
    monkeypatch.setattr(engine_planner, "_LEAST_STEPS_BETWEEN", 8)
    monkeypatch.setattr(engine_planner, "_DRIFT_FRAC", 1e9)
    monkeypatch.setitem(engine_planner._OFF_FRAC, "cpu", 1e9)
    engine = trained(loop=mlp_steps(4), budget="all")
    planner, rates = engine.core.planner, engine.core.space.streams.rates

    def train(num_steps: int, bytes_per_s: float) -> None:
        for _ in range(num_steps):
            for _ in range(3):
                rates.note("h2d", 1 << 20, (1 << 20) / bytes_per_s)
            mlp_steps(1)(*engine.kept_alive, quiet)  # type: ignore[attr-defined]

    with caplog.at_level(logging.WARNING, logger=engine_planner.__name__), one_thread(), small_activations():
        train(16, 10e9)
        assert planner.num_plans == 1
        assert not caplog.records
        train(8, 3e9)
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert said.startswith("h2d copies run at ")
    assert ", 10 when the plan was made: the next 2 steps are watched" in said
    assert planner.num_plans == 2
    engine.close()


def test_a_second_model_is_planned_with_the_first() -> None:
    """Two models share a budget, and one plan: when the second comes, the next steps are watched and planned for."""
    seed_all(0)
    first, second = blocks(), (mlp(3), None)
    with one_thread():
        engine = attach(*first, Variant(budget="all"))
        mlp_steps(3)(*first, quiet)
        other = attach(second[0], torch.optim.AdamW(second[0].parameters()), Variant(budget="all"))
        assert other.core is engine.core
        mlp_steps(4)(*first, quiet)
    plan = engine.core.planner.plan
    assert plan is not None
    assert len(plan.units) == len(engine.units) + len(other.units) + 1
    other.close()
    engine.close()


def test_hugging_face_trainer_finds_its_batch_size(tmp_path: Path) -> None:
    """auto_find_batch_size: an out-of-memory error at 8 and 4 rows, training at 2, as plain does."""
    transformers = pytest.importorskip("transformers")
    import lightning_tieroffload

    def losses(with_us: bool) -> list[float]:
        seed_all(0)
        model = gpt_tiny()
        model.train()
        forward = model.transformer.h[0].register_forward_pre_hook(
            lambda module, args: _full(args[0]) if len(args[0]) > 2 else None
        )
        rows = [{"input_ids": ids, "labels": ids} for ids in token_batches(1, rows=16)[0]]
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(with_us)), per_device_train_batch_size=8, auto_find_batch_size=True,
            max_steps=5, report_to=[], save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True,
            dataloader_pin_memory=False, optim="adamw_torch",
        )  # fmt: skip
        if with_us:
            lightning_tieroffload.offload(
                model, None, device="cpu", device_budget=tight(model), dram_budget="1GiB", optimizer_kernel="torch"
            )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        forward.remove()
        engine = engine_of(model)
        if engine is not None:
            engine.close()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    with one_thread():
        plain, ours = losses(False), losses(True)
    assert len(plain) == 5
    assert plain == ours


def _full(x: torch.Tensor) -> None:
    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to hold {len(x)} rows.")


def test_batches_of_one_size_are_planned_for_once_whatever_the_first_unit_takes() -> None:
    """An embedding takes ids, its layers take vectors: what is compared from step to step is one unit's input."""
    shape = LLAMA_SIZES["tiny"]

    def build_llama() -> tuple[nn.Module, Any]:
        model = LlamaShape.with_random_weights(shape, max_length=16, seed=0, device=CPU, recompute=True)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loop(model: Any, optimizer: Any, look: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            model(torch.randint(shape.vocabulary, (2, 16), generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()

    engine = trained(build_llama, loop, units=["DecoderLayer"])
    planner = engine.core.planner
    assert planner.num_plans == 1
    peak_nbytes = engine.report()["forecast"]["device_peak_nbytes"]
    assert 0 < peak_nbytes < 100 * sum(p.nbytes for p in engine.kept_alive[0].parameters())
    engine.close()


def test_beside_a_gpu_nothing_is_planned_unless_asked() -> None:
    for device, asked, wanted in (("cpu", "auto", 2), ("cuda", "auto", 0), ("cuda", 3, 3)):
        space = SimpleNamespace(device=torch.device(device))
        planner = Planner(
            TierOffloadConfig(profile_steps=asked), space, None,  # type: ignore[arg-type]
            placements=None, state_nbytes=None, apply=None, can_offload=None, why_not_recompute=None, device_units=None,  # type: ignore[arg-type]
        )  # fmt: skip
        assert planner._profile_steps == wanted


# ---------------------------------------------------------------- as on a GPU


class _CountingMarks:
    """The host's clock, and an allocator that counts as CUDA's does: the engine's bytes, and what is beside them."""

    counts_waits = False

    def __init__(self, engine: OffloadEngine, beside_nbytes: int) -> None:
        self._engine = engine
        self._beside_nbytes = beside_nbytes

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        return None

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def take_peak_nbytes(self) -> int:
        core = self._engine.core
        account = core.space.ledger[Tier.DEVICE]
        saved_nbytes = sum(nbytes for _, nbytes, _ in core.profiler._owner_of.values())
        return max(account.recent_nbytes, account.used_nbytes) + saved_nbytes + self._beside_nbytes


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_memory_beside_the_engine_is_in_the_forecast(activations: str) -> None:
    """What was allocated beside activations stays beside them; the forecast's peak is what will be allocated."""
    beside_nbytes = 100_000
    seed_all(0)
    model, optimizer = blocks()
    with one_thread(), small_activations():
        engine = attach(model, optimizer, Variant(budget="all"), activations=activations)
        engine.core.profiler._marks = _CountingMarks(engine, beside_nbytes)
        mlp_steps(4)(model, optimizer, quiet)
    profile, plan = engine.core.planner.profile, engine.core.planner.plan
    assert profile is not None
    assert plan is not None
    rest = profile.units[-1]
    saved_nbytes = sum(unit.activation_nbytes for unit in profile.units)
    assert rest.workspace_nbytes == beside_nbytes
    assert all(unit.workspace_nbytes >= beside_nbytes for unit in profile.units)
    assert plan.forecast.device_peak_nbytes >= saved_nbytes + beside_nbytes + sum(u.nbytes for u in engine.units)
    assert engine.core.profiler.most_allocated_nbytes > saved_nbytes + beside_nbytes
    engine.close()


def test_room_for_activations_that_stay_is_left_where_it_can_be() -> None:
    """Fetches do not fill the part of device_budget that the plan gives to activations; numbers are the same."""
    budget = 300 * KiB
    check(blocks, mlp_steps(8), [Variant(budget=budget), Variant(FULL[2].debug, budget=budget, every_look=False)])
    engine = trained(loop=mlp_steps(8), budget=budget)
    kept_nbytes = engine.core.space.kept_nbytes
    assert 0 < kept_nbytes < budget
    account = engine.core.space.ledger[Tier.DEVICE]
    account.take_recent()
    mlp_steps(3)(*engine.kept_alive, quiet)  # type: ignore[attr-defined]
    assert account.take_recent() <= budget - kept_nbytes
    engine.close()


@pytest.mark.parametrize("activations", ["keep", "auto"])
@pytest.mark.parametrize("budget", [120 * KiB, 200 * KiB, 300 * KiB])
def test_a_plan_is_no_worse_than_the_fixed_policy(budget: int, activations: str) -> None:
    """By simulation, and in what stays on the device where a setting fixes the rest."""
    settings: dict[str, Any] = {"optimizer_kernel": "numba", "units": ("Dropping",), "update_on": "device"}
    engine = trained(loop=mlp_steps(8), budget=budget, activations=activations, **settings)
    planner = engine.core.planner
    plan = planner.plan
    assert plan is not None
    assert planner.profile is not None
    trusted, others = planner._search()._fixed_plans(planner._instances.make(planner.profile))
    fixed = [each for each in (trusted, *others) if each is not None]
    assert plan.forecast.step_s <= min(each.forecast.step_s for each in fixed) * 1.04
    if activations == "keep":
        assert trusted is not None
        assert plan.forecast.step_s <= trusted.forecast.step_s
    engine.close()


def test_updates_on_the_cpu_are_timed_however_many_run() -> None:
    """Overlapping ones count once, the first step's not at all, second passes apart."""
    profiler = engine_profiler.Profiler(CPU, stalled_s=lambda: 0.0, is_excluded=lambda _: False)
    assert profiler.update_s_per_numel() is None
    record = engine_profiler._Update
    profiler._updates = [
        record(0, 100, 0.0, 50.0, False), record(1, 100, 60.0, 62.0, False), record(1, 100, 61.0, 64.0, False),
        record(1, 200, 64.0, 65.0, True), record(2, 100, 70.0, 72.0, False),
    ]  # fmt: skip
    assert profiler.update_s_per_numel() == pytest.approx(6 / 300)
    assert profiler.update_s_per_numel(is_later=True) == pytest.approx(1 / 200)
    profiler._updates = profiler._updates[:1]
    assert profiler.update_s_per_numel() == pytest.approx(0.5)


def test_two_passes_are_in_the_profile() -> None:
    """Where moments come later the profile says so, and the plan's model of the machine has both passes."""
    seed_all(0)
    model, optimizer = blocks()
    with one_thread(), small_activations():
        engine = attach(model, optimizer, Variant(budget=120 * KiB), optimizer_kernel="numba", profile_steps=4)
        engine.updates.defer_moments = True
        mlp_steps(6)(model, optimizer, quiet)
    profile = engine.core.planner.profile
    assert profile is not None
    assert profile.machine.moments_later_frac > 0
    assert engine.core.profiler.update_s_per_numel(is_later=True)
    engine.close()


def test_steps_that_place_things_anew_are_watched_but_do_not_count() -> None:
    """With updates on the device homes change after the first step: the next one is watched for nothing."""
    settings: dict[str, Any] = {"optimizer_kernel": "numba", "units": ("Dropping",), "update_on": "device"}
    engine = trained(loop=mlp_steps(6), budget="all", profile_steps=3, **settings)
    steps_seen = engine.core.profiler.steps
    assert [step.is_settled for step in steps_seen] == [False, False, True, True]
    engine.close()


def test_a_plan_whose_steps_take_otherwise_is_made_again_from_its_own_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: the plan's own steps are watched; activations that leave keep their bytes in the profile."""
    engine = trained(loop=mlp_steps(3), budget=120 * KiB)
    planner = engine.core.planner
    assert planner.profile is not None
    before = {unit.name: unit.activation_nbytes for unit in planner.profile.units}
    monkeypatch.setitem(engine_planner._OFF_FRAC, "cpu", -1.0)  # whatever they take
    with caplog.at_level(logging.INFO, logger=engine_planner.__name__), one_thread(), small_activations():
        mlp_steps(30)(*engine.kept_alive, quiet)  # type: ignore[attr-defined]
    assert sum("was expected" in record.getMessage() for record in caplog.records) == 1
    assert planner.num_plans == 2
    assert {unit.name: unit.activation_nbytes for unit in planner.profile.units} == before
    engine.close()


@pytest.mark.parametrize(("bytes_per_s", "wanted"), [(1e12, True), (1e3, False)])
def test_offload_is_declined_where_the_transfer_shows(bytes_per_s: float, wanted: bool) -> None:
    """A fast link leaves the option to units that can recompute; a slow one takes it from them, and from no others."""
    engine = trained(loop=mlp_steps(3), budget=120 * KiB)
    planner = engine.core.planner
    assert planner.profile is not None
    machine = dataclasses.replace(
        planner.profile.machine, h2d_bytes_per_s=bytes_per_s, d2h_bytes_per_s=bytes_per_s, overlap_loss_frac=0.02
    )
    planner._cannot_recompute.add(engine.units[2])
    instance = planner._instances.make(dataclasses.replace(planner.profile, machine=machine))
    options = planner._search()._without_declined(instance).options
    assert options is not None
    for unit, codes in zip(instance.units, options, strict=True):
        has_offload = any(code.endswith("offload-dram") for code in codes)
        assert codes
        if unit.name == "2":
            assert has_offload, "it can do nothing else"
        elif unit.activation_nbytes:
            assert has_offload == wanted, unit.name
    engine.close()


class _OnCuda:
    """A space that says it is a GPU's, for what the planner asks of it between steps."""

    device = torch.device("cuda")

    def __init__(self, space: Any) -> None:
        self._space = space

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)


def _planner_on_cuda(engine: OffloadEngine) -> Any:
    planner: Any = engine.core.planner
    for part in (planner, planner._profiles, planner._instances):
        part._space = _OnCuda(engine.core.space)
    return planner


def test_without_a_budget_plans_count_with_the_whole_gpu() -> None:
    """The engine's part grows to what activations and what is beside them leave; with a budget nothing grows."""
    engine = trained(loop=mlp_steps(4), budget=300 * KiB)
    planner = _planner_on_cuda(engine)
    account = engine.core.space.ledger[Tier.DEVICE]
    lines = tuple(dataclasses.replace(line, workspace_nbytes=10 * KiB) for line in planner.profile.units)
    for budget, is_whole in ((300 * KiB, False), ("auto", True)):
        planner._instances._config = planner._config.replaced(device_budget=budget)
        account.budget_nbytes = 300 * KiB
        instance = planner._instances.make(dataclasses.replace(planner.profile, units=lines))
        whole_nbytes = int(instance_maker._ALLOCATED_FRAC * 300 * KiB / instance_maker.CUDA_DEVICE_FRAC)
        assert instance.device_budget_nbytes == (whole_nbytes - 10 * KiB if is_whole else 300 * KiB)
        plan = planner._search().plan(instance)
        planner._leave_room(instance, plan)
        kept_nbytes = alive_peak_nbytes(instance.units, [line.choice for line in plan.units])
        room_nbytes = account.budget_nbytes - planner._space.kept_nbytes
        assert room_nbytes + kept_nbytes <= max(instance.device_budget_nbytes, plan.peak_nbytes) + 1
        assert (account.budget_nbytes > 300 * KiB) == is_whole
        assert planner._with_peak(planner.profile, plan).forecast.device_peak_nbytes <= room_nbytes + kept_nbytes
    engine.close()


def test_rates_of_updates_beside_a_gpu() -> None:
    """The first step's updates, which make state, say nothing there; then the reference machine's stand for them."""
    engine = trained(loop=mlp_steps(2), budget="all")
    planner = _planner_on_cuda(engine)
    profiler, record = engine.core.profiler, engine_profiler._Update
    machine = planner.profile.machine
    profiler._updates = [record(0, 100, 0.0, 1.0, False)]
    assumed = planner._profiles._with_update_rates(machine)
    assert assumed.cpu_update_numel_per_s <= machine.cpu_update_numel_per_s
    assert assumed.moments_later_frac == 1.0
    profiler._updates += [record(1, 100, 2.0, 4.0, False), record(1, 100, 4.0, 5.0, True)]
    seen = planner._profiles._with_update_rates(machine)
    assert seen.cpu_update_numel_per_s == pytest.approx(50.0)
    assert seen.moments_later_frac == pytest.approx(0.5)
    assert seen.device_update_numel_per_s == machine.device_update_numel_per_s
    engine.close()


def test_a_step_is_as_long_as_the_device_takes() -> None:
    """Where the host runs ahead its own clock would end the step before the device does."""

    class Ahead:
        counts_waits = True

        def __init__(self) -> None:
            self.at_s = 0.0

        def mark(self) -> float:
            self.at_s += 10.0
            return self.at_s

        def settle(self) -> None:
            return None

        def seconds(self, start: float, end: float) -> float:
            return end - start

        def take_peak_nbytes(self) -> None:
            return None

    profiler = engine_profiler.Profiler(CPU, stalled_s=lambda: 0.0, is_excluded=lambda _: False)
    marks: Any = Ahead()
    profiler._marks = marks
    profiler.begin()
    profiler.end_backward()
    profiler.end_step()
    assert [step.step_s for step in profiler.steps] == [20.0]


def test_a_plan_that_turns_out_slower_than_what_was_there_gives_way() -> None:
    """What watched steps took stands for the placement that they had, whatever the model says of it."""
    settings: dict[str, Any] = {"optimizer_kernel": "numba", "units": ("Dropping",), "update_on": "device"}
    engine = trained(loop=mlp_steps(8), budget=200 * KiB, activations="keep", **settings)
    planner = engine.core.planner
    assert planner.profile is not None
    instance = planner._instances.make(planner.profile)
    trusted, _ = planner._search()._fixed_plans(instance)
    assert trusted is not None
    lines = [(line.name, line.choice) for line in trusted.units]
    planner._measured_s[placement_key(lines)] = trusted.forecast.step_s / 10
    chosen = planner._search().plan(instance)
    assert placement_key((line.name, line.choice) for line in chosen.units) == (placement_key(lines))
    assert chosen.forecast.step_s == trusted.forecast.step_s / 10
    planner._growth = 2.0  # of another batch nothing is known
    assert planner._search().plan(instance).forecast.step_s > trusted.forecast.step_s / 10
    engine.close()


def test_a_placement_of_the_engines_own_fetches_as_far_ahead_as_fits() -> None:
    engine = trained(loop=mlp_steps(4), budget=200 * KiB, activations="keep")
    planner = engine.core.planner
    assert planner.profile is not None
    instance = dataclasses.replace(planner._instances.make(planner.profile), prefetch_units=(3, 1))
    search = planner._search()
    picks = search._leaving(instance)[0]
    assert search._plan_of(instance, picks, note="").prefetch_units == 3
    need_nbytes = search._plan_of(instance, picks, note="").peak_nbytes
    tight_nbytes = need_nbytes - engine.units[0].nbytes
    assert search._plan_of(instance.with_budget(Tier.DEVICE, tight_nbytes), picks, note="").prefetch_units == 1
    engine.close()
