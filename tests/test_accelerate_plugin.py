"""Raw Accelerator scripts with a `tieroffload_config` against the same scripts without it, bit by bit."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.accelerator
import accelerate.commands.config.config_args as config_args
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, TorchDynamoPlugin
from torch import nn
from toys import STARVED, InfiniteAt, assert_same, mlp, rng_states, samples, seed_all, snapshot

import _tieroffload_hooks
from lightning_tieroffload.cli.launch import launch_parser
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine.offload_engine import engine_of
from lightning_tieroffload.errors import ConfigError, InfeasiblePlanError, UnsupportedError
from lightning_tieroffload.strategies import accelerate_plugin, autoload

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[1]
KEYS = (_tieroffload_hooks.ENABLED_KEY, _tieroffload_hooks.REQUIRED_KEY, _tieroffload_hooks.CONFIG_KEY)

accelerate_plugin.hook_accelerator(accelerate.accelerator)
autoload.hook_config_file(config_args)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a test announces to child processes ends with it."""
    before = dict(os.environ)
    for key in [key for key in os.environ if key.startswith(("TIEROFFLOAD", "ACCELERATE"))]:
        del os.environ[key]
    yield
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator(ours: bool, config: dict[str, Any] | None = None, **options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for key in KEYS:
        os.environ.pop(key, None)
    if ours:
        _tieroffload_hooks.announce(json.dumps(config or STARVED))
    return Accelerator(cpu=True, **options)


def test_a_model_that_is_refused_was_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the budget is too small the error says so; that nothing was handed over would be untrue beside it."""
    monkeypatch.setattr(
        _tieroffload_hooks, "_installed", set(_tieroffload_hooks._installed) - {_tieroffload_hooks._USED}
    )
    with pytest.raises(InfeasiblePlanError, match="device_budget"):
        accelerator(True, {"device_budget": "1KiB", "dram_budget": "1GiB"}).prepare(mlp())
    assert _tieroffload_hooks._USED in _tieroffload_hooks._installed


def train(
    ours: bool,
    *,
    num_steps: int = 6,
    accumulate: int = 1,
    max_norm: float | None = None,
    clip_value: float | None = None,
    infinite_at: int | None = None,
    separately: str = "",
    save_to: Path | None = None,
    load_from: Path | None = None,
    fused: bool = False,
    module_zero_grad: bool = False,
    **options: Any,
) -> dict[str, Any]:
    made = accelerator(ours, gradient_accumulation_steps=accumulate, **options)
    if infinite_at is not None:
        # What Accelerate sets up for fp16 on a GPU; its own constructor refuses fp16 on a CPU.
        made.state._mixed_precision = "fp16"
        made.native_amp, made.scaler = True, torch.amp.GradScaler("cpu", init_scale=65536.0)
    seed_all()
    net = mlp(dropout=0.1)
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    loader: Any = torch.utils.data.DataLoader(samples(), batch_size=8, shuffle=True)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1 / (1 + step))
    if separately == "optimizer first":
        optimizer, model, loader, schedule = made.prepare(adamw, net, loader, schedule)
    elif separately == "one by one":
        optimizer = made.prepare(adamw)
        model = made.prepare(net)
        loader, schedule = made.prepare(loader, schedule)
    else:
        model, optimizer, loader, schedule = made.prepare(net, adamw, loader, schedule)
    assert model is net
    assert made.unwrap_model(model) is net
    if load_from is not None:
        made.load_state(str(load_from))
    seen: list[Any] = []
    step = 0
    while step < num_steps:
        for batch in loader:
            with made.accumulate(model):
                loss = model(batch).pow(2).mean()
                if infinite_at is not None:
                    loss = InfiniteAt.apply(loss, step == infinite_at)
                made.backward(loss)
                if ours:
                    assert engine_of(net).is_accumulating is not made.sync_gradients
                seen.append(loss.detach().clone())
                if made.sync_gradients:
                    step += 1
                    if max_norm is not None:
                        seen.append(made.clip_grad_norm_(model.parameters(), max_norm))
                    if clip_value is not None:
                        made.clip_grad_value_(model.parameters(), clip_value)
                optimizer.step()
                seen.append(made.optimizer_step_was_skipped)
                schedule.step()
                (model if module_zero_grad and made.sync_gradients else optimizer).zero_grad()
            if step == num_steps:
                break
    assert (engine_of(net) is not None) is ours
    if save_to is not None:
        made.save_state(str(save_to))
    scale = made.scaler.get_scale() if made.scaler is not None else None
    result = {**snapshot(net, adamw), "seen": seen, "rng": rng_states(), "lr": schedule.get_last_lr(), "scale": scale}
    engine = engine_of(net)
    if engine is not None:
        engine.close()
        assert type(adamw) is torch.optim.AdamW
        assert_same(snapshot(net, adamw), {key: result[key] for key in ("model", "optimizers")})
    return result


CASES: dict[str, dict[str, Any]] = {
    "no": {},
    "accumulate and clip by norm": {"accumulate": 2, "max_norm": 1e-2, "num_steps": 4},
    "clip by value": {"clip_value": 1e-4},
    "bf16": {"mixed_precision": "bf16"},
    "fused, model.zero_grad": {"fused": True, "module_zero_grad": True},
    "optimizer first": {"separately": "optimizer first"},
    "one by one": {"separately": "one by one", "max_norm": 1.0},
    "no clipping, norm only": {"max_norm": float("inf")},
}


@pytest.mark.parametrize("case", CASES)
def test_training_equals_plain(case: str) -> None:
    assert_same(train(False, **CASES[case]), train(True, **CASES[case]))


@pytest.mark.parametrize("extra", [{}, {"max_norm": 0.1}, {"accumulate": 2, "max_norm": 0.1, "num_steps": 4}])
def test_grad_scaler_with_an_infinite_gradient(extra: dict[str, Any]) -> None:
    plain, ours = (train(each, infinite_at=2, mixed_precision="bf16", **extra) for each in (False, True))
    assert_same(plain, ours)
    assert True in ours["seen"], "a step must have been skipped"
    assert ours["scale"] < 65536.0


@pytest.mark.parametrize(("saver_is_ours", "loader_is_ours"), [(False, True), (True, False), (True, True)])
def test_save_and_load_state_in_all_directions(saver_is_ours: bool, loader_is_ours: bool, tmp_path: Path) -> None:
    saved = train(saver_is_ours, num_steps=3, save_to=tmp_path / "three")
    optimizer_file = torch.load(tmp_path / "three" / "optimizer.bin", weights_only=False)
    assert_same(saved["optimizers"][0], optimizer_file)
    plain = train(False, num_steps=3, load_from=tmp_path / "three")
    assert_same(plain, train(loader_is_ours, num_steps=3, load_from=tmp_path / "three"))


def test_saved_files_are_those_of_plain(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    for ours in (False, True):
        train(ours, num_steps=3, save_to=tmp_path / str(ours))
    plain, our = (sorted(p.name for p in (tmp_path / str(ours)).iterdir()) for ours in (False, True))
    assert plain == our
    assert_same(load_file(tmp_path / "False/model.safetensors"), load_file(tmp_path / "True/model.safetensors"))


def test_evaluation_before_training_and_in_the_middle() -> None:
    results = []
    for ours in (False, True):
        made = accelerator(ours)
        seed_all()
        net = mlp()
        model = made.prepare_model(net, evaluation_mode=True)
        outputs = []
        with torch.no_grad():
            outputs.append(model(samples(4)))
        model, optimizer = made.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        for batch in samples().split(8):
            made.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.inference_mode():
                outputs.append(model(samples(4)).clone())
            model.train()
        results.append({**snapshot(net, optimizer.optimizer), "outputs": outputs})
    assert_same(results[0], results[1])


def test_free_memory_lets_go_and_a_second_model_trains() -> None:
    made = accelerator(True)
    for _ in range(2):
        net = mlp()
        model, optimizer = made.prepare(net, torch.optim.AdamW(net.parameters()))
        made.backward(model(samples(8)).pow(2).mean())
        optimizer.step()
        assert engine_of(net) is not None
        engine_of(net).flush()  # an update that still runs holds what it writes
        refs = [weakref.ref(net), weakref.ref(optimizer), weakref.ref(engine_of(net))]
        model, optimizer = made.free_memory(model, optimizer)
        del net
        gc.collect()
        assert [ref() for ref in refs] == [None, None, None]


def test_a_copy_of_the_model_is_ordinary() -> None:
    made = accelerator(True)
    net = mlp()
    model = made.prepare(net)
    twin = copy.deepcopy(model)
    assert engine_of(twin) is None
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert_same(model(samples(4)), twin(samples(4)))


def test_a_prepared_model_stays_where_it_is_told_to_move() -> None:
    made = accelerator(True)
    net = mlp()
    model = made.prepare(net)
    before = dict(model.state_dict())
    assert model.to(made.device) is model
    assert model.to("cpu") is model
    assert engine_of(model) is not None
    assert_same(before, dict(model.state_dict()))


class Blocks(nn.Module):
    """Repeated blocks, which is what regional compilation looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_regional_compilation_equals_plain() -> None:
    results = []
    for ours in (False, True):
        made = accelerator(ours, dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True))
        seed_all()
        net = Blocks()
        model, optimizer = made.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        losses = []
        for batch in samples().split(8):
            loss = model(batch).pow(2).mean()
            made.backward(loss)
            made.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        assert (engine_of(model) is not None) is ours
        results.append({**snapshot(net, optimizer.optimizer), "losses": losses})
    assert_same(results[0], results[1])


# ---------------------------------------------------------------- what is refused


def test_whole_model_compilation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"compiled as a whole.*dynamo_use_regional_compilation"):
        accelerator(True, dynamo_backend="eager").prepare(mlp())
    with pytest.raises(UnsupportedError, match="compiled as a whole"):
        accelerator(True).prepare(torch.compile(mlp()))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 2))
    with pytest.raises(UnsupportedError, match=r"2 devices or processes.*num_processes: 1"):
        accelerator(True)
    accelerator(False)


def test_an_accelerator_without_a_configuration_is_untouched() -> None:
    made = accelerator(False)
    net = mlp()
    model, optimizer = made.prepare(net, torch.optim.AdamW(net.parameters()))
    assert engine_of(net) is None
    assert type(optimizer.optimizer) is torch.optim.AdamW
    assert type(next(model.parameters())) is nn.Parameter


def test_old_scripts_find_the_tpu() -> None:
    assert DistributedType.TPU is DistributedType.XLA
    assert "TPU" not in DistributedType.__members__


# ---------------------------------------------------------------- configuration files

TIER = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_processes": 1,
    "use_cpu": True,
    "mixed_precision": "no",
    "tieroffload_config": {"device_budget": "40KiB", "optimizer_kernel": "torch"},
}


def config_file(folder: Path, ending: str = "yaml", **changes: Any) -> str:
    file = folder / f"tier.{ending}"
    file.write_text(json.dumps({**TIER, **changes}))  # JSON is YAML
    return str(file)


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_the_block_reaches_the_environment_and_survives_rewriting(ending: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, ending)
    config = config_args.load_config_from_file(file)
    assert all(os.environ[key] for key in KEYS)
    assert TierOffloadConfig.from_env().device_budget == 40 * 1024
    assert config.to_dict()["tieroffload_config"] == TIER["tieroffload_config"]
    (config.to_json_file if ending == "json" else config.to_yaml_file)(file)  # what `accelerate config update` does
    again = config_args.load_config_from_file(file)
    assert again.to_dict() == config.to_dict()
    assert not any(isinstance(value, dict) and "device_budget" in value for value in vars(config).values()), (
        "the launcher would copy the block's keys onto its own options"
    )


@pytest.mark.parametrize("ending", ["yaml", "json"])
@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('"optimizer_kernel"', '\n"device_budget": "1GiB", "optimizer_kernel"', "device_budget"),
        ('"tieroffload_config"', '"tieroffload_config": {},\n"tieroffload_config"', "tieroffload_config"),
        ('"use_cpu"', '"use_cpu": true,\n"use_cpu"', None),  # not ours to judge
    ],
)
def test_a_key_of_the_block_that_is_there_twice_is_named(
    ending: str, old: str, new: str, key: str | None, tmp_path: Path
) -> None:
    file = Path(config_file(tmp_path, ending))
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    if key is None:
        config_args.load_config_from_file(str(file))
        return
    with pytest.raises(ConfigError) as caught:
        config_args.load_config_from_file(str(file))
    assert f"{file}, line 2: the key '{key}' is there twice, first in line 1" in str(caught.value)
    assert "TIEROFFLOAD_CONFIG" not in os.environ


def test_a_file_without_the_block_announces_nothing(tmp_path: Path) -> None:
    plain = {key: value for key, value in TIER.items() if key != "tieroffload_config"}
    (tmp_path / "plain.json").write_text(json.dumps(plain))
    config = config_args.load_config_from_file(str(tmp_path / "plain.json"))
    assert "tieroffload_config" not in config.to_dict()
    assert not any(key in os.environ for key in KEYS)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"nvme_pth": ["/x"]}, r"nvme_paths"),
        ({"dram_budget": "8 GGB"}, r"dram_budget"),
        ({"max_grad_norm": 1.0}, r"max_grad_norm"),
        ([1], r"must be a mapping"),
    ],
)
def test_wrong_keys_fail_early_and_say_where(block: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_args.load_config_from_file(config_file(tmp_path, tieroffload_config=block))
    assert "tieroffload_config" in str(caught.value)
    assert not any(key in os.environ for key in KEYS)


def test_an_empty_block_means_defaults_and_the_environment_counts_less(tmp_path: Path) -> None:
    config_args.load_config_from_file(config_file(tmp_path, tieroffload_config=None))
    assert TierOffloadConfig.from_env() == TierOffloadConfig()
    os.environ[_tieroffload_hooks.CONFIG_KEY] = json.dumps({"device_budget": "1GiB", "prefetch_units": 2})
    config_args.load_config_from_file(config_file(tmp_path))
    merged = TierOffloadConfig.from_env()
    assert (merged.device_budget, merged.prefetch_units) == (40 * 1024, 2)


def test_other_unknown_keys_are_still_refused_by_accelerate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown keys.*tieroflod"):
        config_args.load_config_from_file(config_file(tmp_path, tieroflod={}))


def test_launch_has_every_setting_as_an_option() -> None:
    parser = launch_parser()
    args = parser.parse_args(["--device-budget", "1GiB", "--nvme-paths", "/a,/b", "script.py", "--device-budget", "x"])
    assert args.tieroffload_device_budget == "1GiB"
    assert args.training_script_args == ["--device-budget", "x"]
    options = {action.dest for action in parser._actions}
    assert {f"tieroffload_{name}" for name in TierOffloadConfig().to_dict()} <= options


# ---------------------------------------------------------------- whole commands

SCRIPT = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import set_seed
assert __name__ == "__main__" and sys.argv[1:] == ["--out", sys.argv[2]], sys.argv

def main():
    accelerator = Accelerator()
    set_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    model.to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in torch.randn(6, 8, 64):
        accelerator.backward(model(batch).pow(2).mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2])
    accelerator.end_training()
    print("class", type(next(model.parameters())).__name__)

main()
"""


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIEROFFLOAD", "ACCELERATE", "TORCH_DEVICE"))}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_tieroffload_launch_where_autoload_is_off(tmp_path: Path) -> None:
    """The fallback, whole: a script that does not know us, through Accelerate's launcher, equal to plain python."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    trace = tmp_path / "trace"
    plain = command(str(script), "--out", str(tmp_path / "plain.pt"), ACCELERATE_USE_CPU="true", **off)
    ours = command(
        "-m", "lightning_tieroffload", "launch", "--config_file", config_file(tmp_path), "--trace-path", str(trace),
        str(script), "--out", str(tmp_path / "ours.pt"), **off,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    assert ours.returncode == 0, ours.stderr
    assert "class Parameter" in plain.stdout
    assert "class PagedParameter" in ours.stdout
    assert_same(torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "ours.pt"))
    assert json.loads((trace / "report.json").read_text())["num_steps"] == 6
