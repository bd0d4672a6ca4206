"""`tieroffload plan` and `estimate`: a configuration in, a plan or an answer out, nothing run, nothing downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tieroffload.cli.main import main
from lightning_tieroffload.cli.plan import _quiet_solver
from lightning_tieroffload.errors import ConfigError, UnsupportedError
from lightning_tieroffload.planning import Plan, Profile
from lightning_tieroffload.planning.estimate import estimate_profile, profile_of_model
from lightning_tieroffload.planning.profile import REFERENCE_MACHINE, MachineProfile

pytest.importorskip("transformers")

BATCH, SEQ = 2, 64


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    said = capsys.readouterr()
    return int(code or 0), said.out, said.err


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("model")
    LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.fixture(scope="module")
def profile(model_dir: Path) -> Profile:
    return estimate_profile(str(model_dir), REFERENCE_MACHINE, batch=BATCH, seq=SEQ, precision="32-true")


def test_units_parameters_and_flop_are_the_models(model_dir: Path, profile: Profile) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    assert sum(unit.param_numel for unit in profile.units) == sum(p.numel() for p in model.parameters())
    layers = [unit for unit in profile.units if ".layers." in unit.name]
    assert [int(unit.name.rsplit(".", 1)[1]) for unit in layers] == list(range(6)), "execution order"
    hidden, inner, tokens = 64, 160, BATCH * SEQ
    linear_numel = 2 * hidden * hidden + 2 * hidden * hidden // 2 + 3 * hidden * inner
    attention = BATCH * 4 * SEQ * SEQ * (16 + 16)
    flop = 2 * linear_numel * tokens + attention
    assert layers[0].forward_s == pytest.approx(flop / (0.1 * REFERENCE_MACHINE.compute_flop_per_s), rel=1e-6)
    assert layers[0].backward_s == pytest.approx(2 * layers[0].forward_s)
    assert layers[0].boundary_nbytes == BATCH * SEQ * hidden * 4


def test_estimated_activation_bytes_are_what_autograd_really_saves(model_dir: Path, profile: Profile) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    model.config.use_cache = False
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        is_mask = tensor.dim() == 4 and tensor.shape[-2:] == (SEQ, SEQ) and tensor.shape[1] == 1
        key = tensor.untyped_storage().data_ptr()
        if key not in params and not is_mask and key not in saved:
            saved[key] = tensor.numel() * tensor.element_size()
            alive.append(tensor)
        return tensor

    tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens)
    # Shape rules lay attention's output out so that it is copied once; the real kernel's is a view. Never too few.
    estimated = sum(unit.activation_nbytes for unit in profile.units)
    assert sum(saved.values()) <= estimated <= 1.06 * sum(saved.values())


def test_precisions_cost_what_they_say(model_dir: Path) -> None:
    mixed = estimate_profile(str(model_dir), REFERENCE_MACHINE, batch=1, seq=16, precision="bf16-mixed").units[1]
    assert (mixed.param_nbytes, mixed.grad_nbytes) == (2 * mixed.param_numel, 2 * mixed.param_numel)
    assert mixed.state_nbytes == round(10.125 * mixed.param_numel)
    with pytest.raises(ConfigError, match="bf16-mixed, bf16-true, 32-true"):
        estimate_profile(str(model_dir), REFERENCE_MACHINE, precision="fp8")


def test_a_forward_that_needs_values_is_refused_with_the_way_out() -> None:
    class Sorts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layers(x)
            return y if float(y.sum().item()) > 0 else -y

    with pytest.raises(UnsupportedError, match="tieroffload_profile"):
        profile_of_model(Sorts, lambda: {"x": torch.zeros(2, 4)}, REFERENCE_MACHINE, precision="32-true")


def test_a_walk_that_takes_long_says_once_how_far_it_is(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Transformers' Mamba without its kernels loops over positions: minutes in which nothing was said."""
    monkeypatch.setattr("lightning_tieroffload.planning.estimate._SLOW_S", 0.0)
    estimate_profile(str(model_dir), REFERENCE_MACHINE, batch=1, seq=16)
    said = [record.getMessage() for record in caplog.records if "units walked" in record.getMessage()]
    assert len(said) == 1
    assert "--seq" in said[0]


SHAPE = ("--batch", str(BATCH), "--seq", str(SEQ))


def test_plan_prints_json_and_writes_a_plan_that_plan_file_takes(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    budgets = ("--device-budget", "4MiB", "--dram-budget", "1GiB")
    code, out, _ = run(capsys, "plan", str(model_dir), *SHAPE, *budgets, "--json", "--save", str(saved))
    assert code == 0
    document: dict[str, Any] = json.loads(out)
    assert document["peak_nbytes"]["device"] <= document["budget_nbytes"]["device"] == 4 * 1024**2
    assert set(document["forecast"]) == {"step_s", "device_peak_nbytes", "bottleneck"}
    assert set(document["one_more_gib_saves_s"]) == {"device", "dram"}
    assert document["tokens_per_s"] == pytest.approx(BATCH * SEQ / document["forecast"]["step_s"])
    assert Plan.load(saved) == Plan.from_json(document["plan"])
    code, out, _ = run(capsys, "plan", str(model_dir), *SHAPE, *budgets, "--json", "--plan-file", str(saved))
    assert code == 0
    assert json.loads(out)["plan"]["units"] == document["plan"]["units"]


def test_a_plan_file_is_what_plan_and_estimate_answer_for(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the planner's plan: the saved one, with what it comes to for the job that is asked about."""
    saved = tmp_path / "plan.json"
    tight = ("--device-budget", "4MiB", "--dram-budget", "1GiB")
    code, out, _ = run(capsys, "plan", str(model_dir), *SHAPE, *tight, "--json", "--save", str(saved))
    assert code == 0
    made = json.loads(out)
    roomy = ("--device-budget", "1GiB", "--dram-budget", "1GiB", "--json")
    code, out, _ = run(capsys, "estimate", str(model_dir), *SHAPE, *roomy)
    assert json.loads(out)["peak_nbytes"] != made["peak_nbytes"], "the planner would do something else here"
    for command in ("estimate", "plan"):
        code, out, _ = run(capsys, command, str(model_dir), *SHAPE, *roomy, "--plan-file", str(saved))
        assert code == 0
        document = json.loads(out)
        assert document["peak_nbytes"] == made["peak_nbytes"]
        assert document["forecast"].pop("device_peak_nbytes") > made["forecast"]["device_peak_nbytes"], "room is used"
        assert document["forecast"].items() <= made["forecast"].items()
        # A larger batch: the same placement, and what that takes then.
        larger = ("--batch", "8", "--seq", str(SEQ), *roomy, "--plan-file", str(saved))
        code, out, _ = run(capsys, command, str(model_dir), *larger)
        assert code == 0
        assert json.loads(out)["peak_nbytes"]["device"] > made["peak_nbytes"]["device"]
        if command == "plan":
            again = Plan.from_json(json.loads(out)["plan"])
            assert again.units == Plan.load(saved).units
    code, out, _ = run(
        capsys, "estimate", str(model_dir), *SHAPE, "--device-budget", "100KiB", "--json", "--plan-file", str(saved)
    )
    assert code == 0
    answer = json.loads(out)
    assert (answer["fits"], answer["tier"]) == (False, "DEVICE")
    assert answer["least_budget_nbytes"] == made["peak_nbytes"]["device"]
    code, _, err = run(capsys, "estimate", "tiny", *SHAPE, "--plan-file", str(saved))
    assert code == 2
    assert str(saved) in err
    assert "the model has" in err
    code, _, err = run(capsys, "estimate", "tiny", *SHAPE, "--plan-file", str(tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere: No such file" in err


def test_plan_prints_a_table_with_forecast_and_what_more_would_buy(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "plan", str(model_dir), *SHAPE, "--device-budget", "8MiB", "--activations", "recompute")
    assert code == 0
    assert "activations" in out
    assert "recompute" in out
    assert "tokens/s" in out
    assert "bound by" in out
    assert "One more GiB would save" in out
    assert "estimated" in out


def test_plan_that_cannot_fit_fails_and_names_the_least(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", str(model_dir), *SHAPE, "--device-budget", "100KiB", "--dram-budget", "1GiB")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "device_budget to" in err
    least = int(err.split(" bytes)")[0].rsplit("(", 1)[1])
    enough = [*arguments[:-3], str(least), *arguments[-2:], "--json"]
    code, out, _ = run(capsys, *enough)
    assert code == 0
    assert json.loads(out)["peak_nbytes"]["device"] <= least


def test_estimate_answers_yes_and_no(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "estimate", str(model_dir / "config.json"), *SHAPE, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["fits"] is True
    assert document["tokens_per_s"] > 0
    assert document["model"]["profile"] == "estimated"
    code, out, _ = run(capsys, "estimate", str(model_dir), *SHAPE, "--device-budget", "100KiB", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["fits"] is False
    assert document["tier"] == "DEVICE"
    assert document["least_budget_nbytes"] > 100 * 1024
    code, out, _ = run(capsys, "estimate", str(model_dir), *SHAPE, "--clip", "0")
    assert code == 0
    assert "fits:" in out
    assert "tokens/s" in out


@pytest.mark.parametrize("activations", ["auto", "keep", "recompute", "offload"])
def test_a_budget_that_is_given_covers_what_it_covers_in_a_run(
    activations: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the loss and its workspace, which are most of this job: they are beside it, and in the forecast's peak."""
    budget = ("--device-budget", "4MiB", "--dram-budget", "1GiB", "--activations", activations)
    job = ("--batch", "8", "--seq", "64")
    code, out, _ = run(capsys, "plan", str(model_dir), *job, *budget, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["peak_nbytes"]["device"] <= 4 * 1024**2
    assert document["forecast"]["device_peak_nbytes"] > 8 * 64 * 512 * (2 + 4) + 1024**2, "logits in 16 and 32 bits"
    layers = {line["activation"] for line in document["plan"]["units"] if ".layers." in line["name"]}
    if activations != "auto":
        assert layers == {{"offload": "offload-dram"}.get(activations, activations)}
    code, out, _ = run(capsys, "estimate", str(model_dir), *job, *budget)
    assert code == 0
    assert "on the device about" in out


def test_a_budget_that_leaves_a_machine_no_room_for_compute_does_not_fit(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "machine.json"
    small.write_text(json.dumps({"name": "small", "device_memory_nbytes": 4 * 1024**2}))
    job = (str(model_dir), "--batch", "8", "--seq", "128", "--device-budget", "4MiB", "--machine", str(small))
    code, out, _ = run(capsys, "estimate", *job, "--json")
    assert code == 0
    document = json.loads(out)
    assert (document["fits"], document["tier"]) == (False, "DEVICE")
    assert "small has 4 MiB. Lower device_budget" in document["why"]
    code, out, _ = run(capsys, "plan", *job)
    assert code == 0
    assert "Warning: the device would hold" in " ".join(out.split())


def test_the_plan_of_a_bench_size_is_one_for_bench_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model, so the same units: the engine follows it."""
    import lightning_tieroffload
    from lightning_tieroffload.llama_shape import LLAMA_SIZES, LlamaShape

    saved = tmp_path / "plan.json"
    job = ("tiny", "--batch", "1", "--seq", "32", "--precision", "32-true", "--update-on", "cpu")
    code, _, _ = run(capsys, "plan", *job, "--device-budget", "8MiB", "--save", str(saved))
    assert code == 0
    model = LlamaShape(LLAMA_SIZES["tiny"], max_length=32, recompute=False)
    optimizer = torch.optim.AdamW(model.parameters())
    lightning_tieroffload.offload(model, optimizer, device_budget="8MiB", plan_file=saved)
    model(torch.zeros(1, 32, dtype=torch.long)).backward()
    optimizer.step()
    engine = lightning_tieroffload.engine_of(model)
    assert engine is not None
    lines = engine.report()["plan"]["units"]
    engine.close()
    wanted = {line.name: line for line in Plan.load(saved).units}
    assert [(line["unit"], line["param_home"]) for line in lines] == [
        (line["unit"], wanted[line["unit"]].param_home.name.lower()) for line in lines
    ]


def test_a_loss_in_parts_takes_its_workspace_in_the_estimate() -> None:
    few = estimate_profile("tiny", REFERENCE_MACHINE, batch=1, seq=64, precision="32-true").units[-1]
    many = estimate_profile("tiny", REFERENCE_MACHINE, batch=8, seq=2048, precision="32-true").units[-1]
    part_nbytes = 2048 * 1024 * 4
    assert few.workspace_nbytes >= 3 * 63 * 1024 * 4
    assert 3 * part_nbytes <= many.workspace_nbytes <= 4 * part_nbytes, "one part's, not the whole batch's"
    assert many.activation_nbytes < part_nbytes


def test_state_home_is_planned_for(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "plan", str(model_dir), *SHAPE, "--state-home", "nvme", "--nvme-budget", "1GiB", "--json"
    )
    assert code == 0
    lines = json.loads(out)["plan"]["units"]
    assert {line["state_home"] for line in lines if line["name"] != "loss"} == {"nvme"}


def test_settings_that_mean_nothing_to_a_plan_are_refused_or_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that is typed here is a mistake; a run's file has more in it than a plan needs."""
    job = ("tiny", "--batch", "1", "--seq", "16")
    for command in ("plan", "estimate"):
        code, _, err = run(capsys, command, *job, "--io-threads=4", "--debug", "poison", "--device-budget", "1GiB")
        assert code == 2
        assert "debug, io_threads: no part of a plan" in err or "io_threads, debug: no part of a plan" in err
        assert "depends on activations, device_budget" in err
    file = tmp_path / "run.yaml"
    file.write_text("device_budget: 1GiB\nio_threads: 4\ntrace_steps: 7\n")
    code, out, err = run(capsys, "estimate", *job, "--config", str(file), "--json")
    assert code == 0
    assert json.loads(out)["budget_nbytes"]["device"] == 1024**3
    assert "not used by a plan or an estimate: " in err
    assert "io_threads" in err
    assert "trace_steps" in err
    code, _, err = run(capsys, "estimate", *job, "--state-home", "nvme")
    assert code == 2
    assert "give nvme_budget too" in err


def test_what_the_solver_writes_for_its_developers_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with _quiet_solver():
        os.write(2, b"HighsMipSolverData::something\n")
    os.write(2, b"ours\n")
    assert capfd.readouterr().err == "ours\n"


def test_a_machine_profile_changes_the_forecast(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = tmp_path / "machine.json"
    slow.write_text(json.dumps(MachineProfile(name="slow", compute_flop_per_s=4.1e12).to_json()))
    results = []
    for machine in ((), ("--machine", str(slow))):
        code, out, _ = run(capsys, "estimate", str(model_dir), *SHAPE, "--json", *machine)
        assert code == 0
        results.append(json.loads(out))
    assert results[1]["machine"] == "slow"
    assert results[1]["forecast"]["step_s"] > 15 * results[0]["forecast"]["step_s"]


def test_a_measured_profile_is_taken_as_it_is_and_only_for_its_batch(
    tmp_path: Path, profile: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tieroffload_profile.json"
    profile.save(path)
    code, out, _ = run(capsys, "estimate", str(path), *SHAPE, "--json")
    assert code == 0
    assert json.loads(out)["model"]["num_units"] == len(profile.units)
    code, _, err = run(capsys, "estimate", str(path), "--batch", "9", "--seq", str(SEQ))
    assert code == 2
    assert f"{BATCH}x{SEQ}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "nowhere/at/all"), "neither a directory"),
        (("plan", "tiny", "--device-bugdet", "1GiB"), "device_budget"),
        (("estimate", "tiny", "--device-budget", "8 GGB"), "GGB"),
        (("plan", "tiny", "--save", "/dev/null/plan.json"), "--save /dev/null/plan.json cannot be written"),
        (("estimate", "tiny", "--nvme-paths", "/flash"), "give nvme_budget too"),
        (("estimate", "tiny", "--device-budget", "1e400"), "8 EiB"),
        (("estimate", "tiny", "--state-dtype", "fp8"), "state_dtype='fp8' is not supported"),
        (("plan", "tiny", "--master-weights", "fp32"), "master_weights='fp32' is not supported"),
        (("estimate", "x" * 5000), "neither a directory"),
        (("estimate", "tiny", "--seq", "9" * 20), "--seq"),
        (("estimate", "tiny", "--batch", "9" * 13), "--batch"),
        (("plan", "tiny", "--grad-accum", "9" * 25), "--grad-accum"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


def test_a_batch_past_all_measure_is_an_answer_or_one_message(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In seconds: the loss of a bench size is taken in parts, and billions of parts are no walk."""
    most = ("--seq", str(2**24), "--batch", str(2**20))
    code, _, err = run(capsys, "estimate", str(model_dir), *most)
    assert code == 2
    assert "Take a smaller one" in err
    code, out, _ = run(capsys, "estimate", "tiny", *most)
    assert code == 0
    assert "does not fit" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "it has no model_type"),
        ({}, "it has no model_type"),
        ({"model_type": None}, "it has no model_type"),
        ({"model_type": "nobody"}, "nobody"),
        ({"model_type": "llama", "hidden_size": "x"}, "hidden_size"),
        ({"model_type": "llama", "hidden_size": 7, "num_attention_heads": 2}, "(7)"),
        ({"model_type": "gpt2", "vocab_size": -5}, "negative dimension -5"),
        ({"model_type": "gpt2", "n_embd": 10**11, "n_head": 1}, "overflow"),
        ({"model_type": "vit"}, "no causal language model"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "other.json"])
def test_a_configuration_that_no_model_can_have_is_one_message(
    name: str, content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text(json.dumps(content))
    code, _, err = run(capsys, "estimate", str(file))
    assert code == 2
    assert name in err
    assert message in err
    assert len(err.splitlines()[-1]) < 600


UNIT = {
    "name": "a", "param_numel": 1, "param_nbytes": 2, "grad_nbytes": 2, "state_nbytes": 8, "activation_nbytes": 1,
    "forward_s": 0.1, "backward_s": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": 5}, "units must be a list"),
        ({"units": [5]}, "units[0] must be a JSON object"),
        ({"units": [{**UNIT, "param_nbytes": "x"}]}, "param_nbytes is 'x'"),
        ({"units": [{**UNIT, "param_nbytes": []}]}, "param_nbytes is []"),
        ({"units": [{**UNIT, "name": 5}]}, "name is 5"),
        ({"units": []}, "at least one unit"),
        ({"notes": 7}, "notes must be an object"),
        ({"batch_key": 7}, "batch_key must be text"),
        ({"machine": []}, "machine profile must be a JSON object"),
        ({"machine": {"name": 5}}, "name is 5"),
        ({"machine": {"dram_nbytes": "1GiB"}}, "dram_nbytes is '1GiB'"),
    ],
)
def test_a_profile_that_somebody_has_edited_is_one_message(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "edited.json"
    file.write_text(json.dumps({"format_version": 1, "machine": {}, "units": [UNIT], **changes}))
    code, _, err = run(capsys, "estimate", str(file))
    assert code == 2
    assert message in err


@pytest.mark.parametrize("content", ["[" * 100_000, "9" * 6000, '"\\ud800', "\x00"])
@pytest.mark.parametrize("role", ["model", "--machine", "--plan-file"])
def test_a_file_that_is_no_json_is_one_message_whatever_it_is_for(
    role: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made_by_nobody.json"
    file.write_text(content)
    model = ("tiny", *SHAPE, role, str(file)) if role.startswith("--") else (str(file),)
    code, _, err = run(capsys, "estimate", *model)
    assert code == 2
    assert file.name in err
    assert "not JSON" in err
