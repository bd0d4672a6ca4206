"""`offload(model, optimizer, **config)` for any loop, and what all faces share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.accelerator
import pytest
import torch
from torch import nn
from toys import STARVED, assert_same, mlp, samples, seed_all, snapshot

import _tieroffload_hooks
import lightning_tieroffload
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.errors import ConfigError, InfeasiblePlanError, UnsupportedError
from lightning_tieroffload.strategies import accelerate_plugin, deferred_move, face

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[1]


def close(model: nn.Module) -> None:
    engine = engine_of(model)
    assert engine is not None
    engine.close()


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    """Too little DRAM names flash as the other way out; a CUDA device that is not there is no torch traceback."""
    with pytest.raises(InfeasiblePlanError, match="or name a directory on flash in nvme_paths"):
        lightning_tieroffload.offload(mlp(2), device_budget="1MiB", dram_budget="1KiB")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"finds no CUDA device here: leave device out"):
            lightning_tieroffload.offload(mlp(2), device="cuda", **STARVED)


def test_the_same_objects_come_back_as_they_were_given() -> None:
    net = mlp(2)
    params = list(net.parameters())
    first = torch.optim.AdamW(net[0].parameters())
    second = torch.optim.SGD(net[1:].parameters(), lr=0.1)
    assert lightning_tieroffload.offload(net, **STARVED) == (net, None)
    assert lightning_tieroffload.offload(net, first, **STARVED) == (net, first)
    model, optimizers = lightning_tieroffload.offload(net, (first, second), **STARVED)
    assert model is net
    assert optimizers == [first, second]
    assert [id(p) for p in net.parameters()] == [id(p) for p in params]
    close(net)
    assert (type(first), type(second)) == (torch.optim.AdamW, torch.optim.SGD)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_loop_equals_plain(accumulate: int) -> None:
    results = []
    for ours in (False, True):
        seed_all()
        net: nn.Module = mlp(dropout=0.1)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        if ours:
            net, optimizer = lightning_tieroffload.offload(net, optimizer, **STARVED)
        seen: list[Any] = []
        for index, batch in enumerate(samples().split(8), start=1):
            loss = net(batch).pow(2).mean()
            loss.backward()
            seen.append(loss.detach().clone())
            if index % accumulate == 0:
                seen.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
                optimizer.step()
                optimizer.zero_grad()
        results.append({**snapshot(net, optimizer), "seen": seen})
        if ours:
            close(net)
    assert_same(results[0], results[1])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_budget"):
        lightning_tieroffload.offload(mlp(), device_bugdet="1GiB")
    with pytest.raises(UnsupportedError, match=r"compiled as a whole.*layer\.compile\(\)"):
        lightning_tieroffload.offload(torch.compile(mlp()))
    with pytest.raises(UnsupportedError, match="checkpoint_format"):
        lightning_tieroffload.offload(mlp(), checkpoint_format="sharded")


def test_the_environment_counts_less_than_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIEROFFLOAD_CONFIG", json.dumps({"device_budget": "1MiB", "dram_budget": "1GiB"}))
    net = mlp()
    lightning_tieroffload.offload(net, device_budget="2MiB")
    engine = engine_of(net)
    assert engine is not None
    assert (engine.config.device_budget, engine.config.dram_budget) == (2 * 2**20, 2**30)
    close(net)


def test_the_report_is_written_when_the_interpreter_ends(tmp_path: Path) -> None:
    script = """
        import sys, torch, random
        from lightning_tieroffload import offload
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        net, optimizer = offload(net, torch.optim.AdamW(net.parameters()), trace_path=sys.argv[1])
        net(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    """
    code = "\n".join(line[8:] for line in script.split("\n"))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "report.json").read_text())["num_steps"] == 1
    assert (tmp_path / "run" / "plan.json").exists()
    assert "Traceback" not in done.stderr


def test_printing_the_plan_draws_nothing_from_the_users_generator() -> None:
    code = (
        "import random; random.seed(0); before = random.getstate(); import torch, lightning_tieroffload;"
        "lightning_tieroffload.offload(torch.nn.Linear(4, 4)); assert 'rich.console' in __import__('sys').modules;"
        "assert random.getstate() == before"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- moves that wait


def hook_modules_as_accelerate_does() -> None:
    accelerate_plugin.hook_accelerator(accelerate.accelerator)


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that is much smaller than the model; the target is the CPU, where a move can be made."""
    monkeypatch.setenv(_tieroffload_hooks.ENABLED_KEY, "true")
    hook_modules_as_accelerate_does()
    monkeypatch.setattr(face, "fits_beside", lambda module, device: False)


def watch_moves(net: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    moves: list[str] = []
    apply = nn.Module._apply

    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is net:
            moves.append("moved")
        return apply(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "_apply", noting)
    return moves


def test_a_move_of_a_large_model_waits_for_its_first_forward(
    nothing_fits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = mlp()
    moves = watch_moves(net, monkeypatch)
    assert net.to("cpu") is net
    assert moves == []
    assert len(net._forward_pre_hooks) == 1
    net(samples(2))
    assert moves == ["moved"]
    net(samples(2))
    assert moves == ["moved"]
    assert not net._forward_pre_hooks


def test_a_move_is_forgotten_when_the_model_is_handed_over(nothing_fits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net = mlp()
    moves = watch_moves(net, monkeypatch)
    net.to("cpu")
    deferred_move.forget(net)
    net(samples(2))
    assert moves == []


def test_a_change_of_dtype_goes_ahead(nothing_fits: None) -> None:
    net = mlp()
    assert net.to(torch.float64)[0][0].weight.dtype is torch.float64
    assert net.to("cpu", torch.bfloat16)[0][0].weight.dtype is torch.bfloat16


def test_nothing_waits_in_a_process_that_did_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_tieroffload_hooks.ENABLED_KEY, raising=False)
    hook_modules_as_accelerate_does()
    monkeypatch.setattr(face, "fits_beside", lambda module, device: False)
    net = mlp()
    moves = watch_moves(net, monkeypatch)
    net.to("cpu")
    assert moves == ["moved"]


def test_buffers_move_alone() -> None:
    net = nn.BatchNorm1d(4)
    before = net.weight.data_ptr()
    face.move_buffers(net, torch.device("meta"))
    assert net.running_mean is not None
    assert net.running_mean.is_meta
    assert net.weight.data_ptr() == before


def test_the_report_of_an_engine_that_is_closed_has_its_plan(tmp_path: Path) -> None:
    """`close()` takes units off the books: the report is written before, and a path that fails stops nothing."""
    for path in (tmp_path / "trace", Path("/dev/null/trace")):
        net = mlp(2)
        _, adamw = lightning_tieroffload.offload(net, torch.optim.AdamW(net.parameters()), trace_path=path, **STARVED)
        for _ in range(4):
            net(samples()[:4]).sum().backward()
            adamw.step()
            adamw.zero_grad()
        close(net)
    report = json.loads((tmp_path / "trace" / "report.json").read_text())
    assert report["plan"]["units"]
    assert report["tiers"]["dram"]["home_nbytes"] > 0


@pytest.mark.parametrize("update_on", ["cpu", "split"])
def test_the_plan_that_is_printed_first_says_that_updates_are_not_settled(
    update_on: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """State is not there before the first step, so each unit's update is still the CPU's."""
    net = mlp(2)
    _, adamw = lightning_tieroffload.offload(
        net, torch.optim.AdamW(net.parameters()), device_budget="40KiB", update_on=update_on
    )
    printed = " ".join(capsys.readouterr().err.split())
    assert "Plan before the first step" in printed
    assert ("settles where updates run" in printed) == (update_on == "split")
    net(samples()[:4]).sum().backward()
    adamw.step()
    engine = engine_of(net)
    assert engine is not None
    assert engine.plan_table().title == "Plan"
    close(net)


def test_a_device_budget_larger_than_the_machine_is_what_the_message_names() -> None:
    """Without a GPU it is host memory: nothing is left for DRAM, whose budget nobody has set."""
    net = mlp(2)
    with pytest.raises(InfeasiblePlanError, match="lower device_budget"):
        lightning_tieroffload.offload(net, torch.optim.AdamW(net.parameters()), device_budget="900TiB")


def test_an_nvme_budget_without_paths_is_said(caplog: pytest.LogCaptureFixture) -> None:
    net = mlp(2)
    lightning_tieroffload.offload(net, torch.optim.AdamW(net.parameters()), device_budget="1MiB", nvme_budget="1GiB")
    close(net)
    assert "nvme_budget 1 GiB means nothing without nvme_paths" in caplog.text
