"""`tieroffload plan` and `estimate`: a configuration in, a plan or an answer out, nothing run, nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_tieroffload.cli.main import main
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
        assert {key: document[key] for key in ("peak_nbytes", "forecast")} == {
            key: made[key] for key in ("peak_nbytes", "forecast")
        }
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
        (("estimate", "tiny", "--seq", str(2**24), "--batch", str(2**20)), "Take a smaller one"),
        (("estimate", "tiny", "--batch", "9" * 13), "--batch"),
        (("plan", "tiny", "--grad-accum", "9" * 25), "--grad-accum"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


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
