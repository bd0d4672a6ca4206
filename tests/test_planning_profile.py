"""Profiles, plans and instances as files: round trips, keys, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.planning import Instance, MachineProfile, Plan, Profile, UnitProfile, random_instance, solve
from lightning_tieroffload.planning.profile import REFERENCE_MACHINE


def _profile() -> Profile:
    instance = random_instance(0, 3)
    return Profile(machine=instance.machine, units=instance.units, batch_key="8x2048", notes={"steps": 2})


def test_profile_round_trip(tmp_path: Path) -> None:
    profile = _profile()
    path = tmp_path / "tieroffload_profile.json"
    profile.save(path)
    assert Profile.load(path) == profile
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name], "nothing half-written stays behind"
    assert MachineProfile.load(path) == profile.machine


def test_profile_is_reused_only_for_its_model_batch_and_machine() -> None:
    profile = _profile()
    assert profile.matches(profile.units, "8x2048", profile.machine.name)
    assert not profile.matches(profile.units, "4x2048", profile.machine.name)
    assert not profile.matches(profile.units, "8x2048", "another machine")
    wider = (dataclasses.replace(profile.units[0], param_numel=profile.units[0].param_numel + 1), *profile.units[1:])
    assert not profile.matches(wider, "8x2048", profile.machine.name)
    slower = tuple(dataclasses.replace(unit, forward_s=2 * unit.forward_s) for unit in profile.units)
    assert profile.matches(slower, "8x2048", profile.machine.name), "measured seconds are no part of the shape"


def test_a_larger_batch_has_activations_and_seconds_in_proportion() -> None:
    """Parameters, gradients and state stay; and as large as before is the same profile."""
    profile = _profile()
    line, grown = profile.units[0], profile.grown(1.5).units[0]
    assert profile.grown(1.0) == profile
    assert grown.activation_nbytes == round(1.5 * line.activation_nbytes)
    assert grown.forward_s == 1.5 * line.forward_s
    assert grown.recompute_s == (None if line.recompute_s is None else 1.5 * line.recompute_s)
    assert profile.grown(1.5).matches(profile.units, profile.batch_key, profile.machine.name)


def test_profile_that_was_edited_or_is_of_another_format_is_refused(tmp_path: Path) -> None:
    raw = _profile().to_json()
    edited = json.loads(json.dumps(raw))
    edited["units"][0]["param_numel"] += 1
    with pytest.raises(ConfigError, match="it was edited"):
        Profile.from_json(edited)
    with pytest.raises(ConfigError, match="format_version 7"):
        Profile.from_json({**raw, "format_version": 7})
    with pytest.raises(ConfigError, match="unknown keys"):
        Profile.from_json({**raw, "machine": {"h2d": 1}})
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        Profile.load(tmp_path / "broken.json")
    with pytest.raises(ConfigError, match="cannot read"):
        Profile.load(tmp_path / "absent.json")


@pytest.mark.parametrize("field", ["param_nbytes", "forward_s", "recompute_s"])
def test_a_unit_with_a_negative_or_undefined_figure_is_refused(field: str) -> None:
    unit = UnitProfile("layers.0", 10, 20, 20, 100, 50, 1.0, 2.0)
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=rf"layers\.0: {field}"):
            dataclasses.replace(unit, **{field: value})


def test_a_machine_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="h2d_bytes_per_s"):
        MachineProfile(h2d_bytes_per_s=0.0)
    assert MachineProfile.from_json({"name": "half"}).h2d_bytes_per_s == REFERENCE_MACHINE.h2d_bytes_per_s


def test_instance_round_trip() -> None:
    for seed in range(6):
        instance = random_instance(seed, 2 + seed)
        text = json.dumps(instance.to_json())
        assert Instance.from_json(json.loads(text)) == instance
    with pytest.raises(ConfigError, match="not a planning instance"):
        Instance.from_json({"units": []})


def test_instance_refuses_what_cannot_be_planned() -> None:
    instance = random_instance(0, 2)
    with pytest.raises(ConfigError, match="unit names must differ"):
        dataclasses.replace(instance, units=(instance.units[0], instance.units[0]))
    with pytest.raises(ConfigError, match="at least one unit"):
        dataclasses.replace(instance, units=())
    with pytest.raises(ConfigError, match="unknown codes"):
        dataclasses.replace(instance, options=(("here",), ("there",)))


def test_plan_file_round_trip_and_table(tmp_path: Path) -> None:
    instance = random_instance(4, 5)
    plan = solve(instance)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert plan.unit("unit1").name == "unit1"
    with pytest.raises(ConfigError, match="no unit 'unit9'"):
        plan.unit("unit9")
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan.as_table())
    text = console.export_text()
    assert "unit0" in text
    assert plan.units[0].activation.value in text
    assert plan.forecast.bottleneck in text


def test_plan_file_that_is_not_a_plan_is_refused(tmp_path: Path) -> None:
    plan = solve(random_instance(4, 2))
    raw = plan.to_json()
    for broken, message in (
        ({**raw, "format_version": 0}, "format_version 0"),
        ({**raw, "units": [{"name": "unit0"}]}, "not a plan"),
        ({key: value for key, value in raw.items() if key != "step_s"}, "not a plan"),
    ):
        with pytest.raises(ConfigError, match=message):
            Plan.from_json(broken)
    with pytest.raises(ConfigError, match="plan_file"):
        Plan.load(tmp_path / "none.json")


_ODD = (None, -1, math.nan, math.inf, "x", [], {}, True, 1e308, 10**400)


@pytest.mark.parametrize("odd", _ODD, ids=lambda odd: repr(odd)[:8])
def test_a_plan_whose_values_were_edited_is_refused(odd: Any) -> None:
    """By one message: what it stated was not looked at, and came up as a TypeError, or was followed."""
    raw = solve(random_instance(4, 2)).to_json()
    for name in ("step_s", "peak_nbytes", "dram_peak_nbytes", "nvme_peak_nbytes", "prefetch_units", "mip_gap"):
        if name == "mip_gap" and odd in (-1, math.inf):
            continue  # rounding, and a bound that was never found
        with pytest.raises(ConfigError, match=f"not a plan: {name}"):
            Plan.from_json({**raw, name: odd})
    with pytest.raises(ConfigError, match="not a plan: forecast"):
        Plan.from_json({**raw, "forecast": {**raw["forecast"], "step_s": odd}})
    if odd != "x":
        for name in ("planner", "note", "model_key"):
            with pytest.raises(ConfigError, match=f"not a plan: {name} must be text"):
                Plan.from_json({**raw, name: odd})


def test_a_plan_with_two_lines_for_a_unit_is_refused() -> None:
    """The later one was followed without a word."""
    raw = solve(random_instance(4, 2)).to_json()
    with pytest.raises(ConfigError, match="two lines for unit 'unit0'"):
        Plan.from_json({**raw, "units": [*raw["units"], raw["units"][0]]})


@pytest.mark.parametrize("odd", _ODD, ids=lambda odd: repr(odd)[:8])
def test_a_profile_whose_values_were_edited_is_refused(odd: Any) -> None:
    raw = json.loads(json.dumps({**_profile().to_json(), "key": None}))
    for name, value in raw["units"][0].items():
        is_free = odd is None and name in ("recompute_s", "update_numel", "newborn_grad_nbytes")
        if is_free or (name == "name" and odd == "x") or (odd is True and isinstance(value, bool)):
            continue
        with pytest.raises(ConfigError, match="must be"):
            Profile.from_json({**raw, "units": [{**raw["units"][0], name: odd}, *raw["units"][1:]]})
    for name in raw["machine"].keys() - {"name"}:
        with pytest.raises(ConfigError, match=f"{name} is .* must be a finite number"):
            MachineProfile.from_json({name: odd})
    with pytest.raises(ConfigError, match="device_fixed_nbytes"):
        Profile.from_json({**raw, "device_fixed_nbytes": odd})
    if odd is not None:
        with pytest.raises(ConfigError, match="it was edited"):
            Profile.from_json({**raw, "key": odd})


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, lightning_tieroffload.planning as p; "
        "heavy = {'torch', 'scipy', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; assert callable(p.solve) and 'scipy' in sys.modules and 'torch' not in sys.modules"
    )
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)


def test_what_a_run_without_a_plan_leaves_is_refused_by_its_path(tmp_path: Path) -> None:
    """Where the engine has not planned, `plan.json` says what it did; as a `plan_file` it is named, with a way out."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"planner": "none", "units": []}))
    with pytest.raises(ConfigError, match=r"plan_file .*plan\.json: not a plan: .*profile_steps greater than 0"):
        Plan.load(path)
