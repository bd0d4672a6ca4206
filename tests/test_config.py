"""The one door for settings: types, ranges, names, files, environment, and what "auto" comes to."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lightning_tieroffload import config as config_module
from lightning_tieroffload.config import TierOffloadConfig, local_world_size, resolve_budgets
from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.host_limits import MemoryLimit, cgroup_limits
from lightning_tieroffload.sizes import GiB, MiB

FIELDS = [entry.name for entry in dataclasses.fields(TierOffloadConfig) if not entry.name.startswith("_")]
VALID: dict[str, object] = {
    "device_budget": "22GiB",
    "dram_budget": 1 << 30,
    "nvme_budget": "1TB",
    "nvme_paths": ["/data/nvme0", "/data/nvme1"],
    "units": ["GPT2Block"],
    "activations": "recompute",
    "optimizer_kernel": "torch",
    "master_weights": "fp32",
    "update_on": "split",
    "state_dtype": "bf16",
    "state_home": "nvme",
    "planner": "greedy",
    "plan_file": "/tmp/plan.json",
    "profile_steps": 0,
    "verify_reads": False,
    "prefetch_units": 3,
    "io_threads": 8,
    "block_nbytes": "4MiB",
    "nvme_write_budget": "10TiB",
    "io_timeout_s": 2.5,
    "checkpoint_format": "sharded",
    "debug": ["poison", "delays"],
    "trace_path": "/tmp/trace",
    "trace_steps": 5,
}
# Nothing counts so many bytes; Python prints no number of 5000 digits.
HUGE = [2**63, 10**400, 10**5000, 1e300, "1e400", "1e300GiB", "9" * 5000, f"{'9' * 5000}GiB", "8388608TiB"]
WRONG: dict[str, list[object]] = {
    "device_budget": [-1, True, "8 GGB", {"a": 1}, [1], float("nan"), float("inf"), "", "-3GiB", *HUGE],
    "dram_budget": [-1, "8 GGB", "lots"],
    "nvme_budget": ["-1", {"x": 1}],
    "nvme_paths": [3, [3], [""], ["/a", "/a/"], {"a": "b"}, "", ["a\0b"], "$NOT_SET_ANYWHERE/x", "s3://bucket/x"],
    "units": [3, [], [3], [""], {"GPT2Block": 1}],
    "activations": ["drop", 3, True, ["keep"]],
    "optimizer_kernel": ["triton", 1],
    "master_weights": ["fp16", True],
    "update_on": ["gpu", 0],
    "state_dtype": ["fp16", 32],
    "state_home": ["flash", "dram", 1],
    "planner": ["greddy", "brute", 1],
    "plan_file": [3, ["x"], ""],
    "profile_steps": [-1, 1.5, "two", True, 10**6],
    "verify_reads": ["perhaps", 2, [True]],
    "prefetch_units": [-1, 1.5, "far", True],
    "io_threads": [0, -1, 10**6, "many", 10**5000, "9" * 5000],
    "block_nbytes": [0, 4095, "3GiB", 5000, "huge"],
    "nvme_write_budget": [-1, "8 GGB", True, *HUGE],
    "io_timeout_s": [0, -1, "soon", True, float("inf"), float("nan"), 10**400],
    "checkpoint_format": ["zip", 1],
    "debug": ["poisn", ["poison", "x"], 3, {"poison": True}, True],
    "trace_path": [3, {"a": 1}, __file__],
    "trace_steps": [-1, 1.5, "all", True, 10**6],
}


def test_tables_above_cover_every_field() -> None:
    assert set(VALID) == set(WRONG) == set(FIELDS)


@pytest.mark.parametrize("key", FIELDS)
def test_signature_and_schema_agree(key: str) -> None:
    """A field whose parameter was forgotten in __init__ would be taken for an unknown key."""
    assert TierOffloadConfig(**{key: VALID[key]}) != TierOffloadConfig()
    assert key in config_module._READERS


@pytest.mark.parametrize(
    ("key", "value"),
    [pytest.param(key, value, id=f"{key}-{index}") for key in FIELDS for index, value in enumerate(WRONG[key])],
)
def test_cfg_04_wrong_value_names_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        TierOffloadConfig(**{key: value})
    assert len(str(caught.value)) < 400
    assert key in str(caught.value)
    assert "llowed" in str(caught.value) or "must be" in str(caught.value) or "Write" in str(caught.value)


def yaml_door(settings: dict[str, object], tmp_path: Path) -> TierOffloadConfig:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "NO", "tieroffload_config": settings}))
    return TierOffloadConfig.from_file(path)


def environment_door(settings: dict[str, object], tmp_path: Path) -> TierOffloadConfig:
    return TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": json.dumps(settings)})


def mapping_door(settings: dict[str, object], tmp_path: Path) -> TierOffloadConfig:
    return TierOffloadConfig.from_mapping(settings)


def constructor_door(settings: dict[str, object], tmp_path: Path) -> TierOffloadConfig:
    return TierOffloadConfig(**settings)


DOORS = [yaml_door, environment_door, mapping_door, constructor_door]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nvme_pth": "/x"}, r"Unknown setting 'nvme_pth'.*Did you mean \"nvme_paths\""),
        ({"prefetch": -1}, r"Unknown setting 'prefetch'.*Did you mean \"prefetch_units\""),
        ({"Device_Budget": 1}, r"Unknown setting 'Device_Budget'.*Did you mean \"device_budget\""),
        ({"prefetch_units": -1}, r"prefetch_units=-1 is not allowed.*0 to 1024"),
        ({"update_on": "gpu"}, r"update_on='gpu' is not allowed.*Did you mean \"device\""),
        ({"dram_budget": "8 GGB"}, r"dram_budget='8 GGB' is not a size"),
        ({"nvme": {"path": "/x"}}, r"Unknown setting 'nvme'.*nvme_paths"),
        ({"device_budget": {"gib": 22}}, r"device_budget must be a number of bytes.*\{'gib': 22\}"),
        ({"xyzzy": 1}, r"Unknown setting 'xyzzy'.*Known settings: device_budget"),
        ({"_chosen": []}, r"Unknown setting '_chosen'"),
    ],
)
def test_cfg_04_misspelt_and_unknown_keys(door, settings, message, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        door(settings, tmp_path)


def test_cfg_04_exit_code_is_not_zero() -> None:
    code = "import lightning_tieroffload as t; t.TierOffloadConfig(nvme_pth='x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert 'Did you mean "nvme_paths"' in done.stderr


@pytest.mark.parametrize("door", DOORS)
def test_cfg_03_equal_sizes_and_trainer_owned_keys(door, tmp_path: Path) -> None:
    assert door({"dram_budget": "8GiB"}, tmp_path) == door({"dram_budget": 8589934592}, tmp_path)
    assert door({"dram_budget": "8GiB"}, tmp_path).dram_budget == 8589934592
    for key in ("batch_size", "gradient_accumulation_steps", "gradient_clip_val", "mixed_precision", "lr", "precision"):
        with pytest.raises(ConfigError, match=f"{key}=3 .*set it in the Trainer"):
            door({key: 3}, tmp_path)


def test_cfg_03_auto_logs_a_number(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_tieroffload"):
        budgets = resolve_budgets(TierOffloadConfig(dram_budget="auto"), "cpu")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len(lines) == 1
    for nbytes in (budgets.device_nbytes, budgets.dram_nbytes, budgets.nvme_nbytes):
        assert f"({nbytes} bytes" in lines[0]
    assert set(budgets.sources) == {"device", "dram", "nvme"}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("key", FIELDS)
def test_cfg_05_left_out_or_null_means_default(door, key: str, tmp_path: Path) -> None:
    others = {name: value for name, value in VALID.items() if name != key}
    default = getattr(TierOffloadConfig(), key)
    for settings in (others, {**others, key: None}):
        assert getattr(door(settings, tmp_path), key) == default
    assert door({key: None}, tmp_path) == TierOffloadConfig()


def test_cfg_05_null_block_and_empty_file(tmp_path: Path) -> None:
    for text in ("", "tieroffload_config:\n", "tieroffload_config: {}\n"):
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        assert TierOffloadConfig.from_file(path) == TierOffloadConfig()


@pytest.mark.parametrize("content", ["3", "[1, 2]", "tieroffload_config: 3", "{1: 2}"])
def test_cfg_05_not_a_mapping_is_a_named_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        TierOffloadConfig.from_file(path)


def test_broken_files_and_environment_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: No such file"):
        TierOffloadConfig.from_file(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not YAML"):
        TierOffloadConfig.from_file(broken)
    with pytest.raises(ConfigError, match="TIEROFFLOAD_CONFIG has the key 'planner' twice"):
        TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": '{"planner": "ilp", "planner": "greedy"}'})
    for text in ("[" * 100_000, '{"dram_budget": ' + "9" * 6000 + "}"):
        with pytest.raises(ConfigError, match="TIEROFFLOAD_CONFIG is not JSON"):
            TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": text})
    with pytest.raises(ConfigError, match="TIEROFFLOAD_CONFIG is not JSON"):
        TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": "{"})
    with pytest.raises(ConfigError, match=r"TIEROFFLOAD_CONFIG must be a mapping"):
        TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": "[]"})
    assert TierOffloadConfig.from_env({}) == TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": " "})


@pytest.mark.parametrize(
    ("text", "key", "lines"),
    [
        ("planner: ilp\nio_threads: 2\nplanner: greedy\n", "planner", (1, 3)),
        ('planner: ilp\n"planner": ilp\n', "planner", (1, 2)),
        ("tieroffload_config:\n  planner: ilp\n  planner: ilp\n", "planner", (2, 3)),
        ("tieroffload_config: {}\n\ntieroffload_config: {planner: ilp}\n", "tieroffload_config", (1, 3)),
        ('{"planner": "ilp",\n "planner": "greedy"}', "planner", (1, 2)),
        ("a: &a {planner: ilp}\ntieroffload_config:\n  <<: *a\n  planner: greedy\n", "", (0, 0)),
        ("a: &a\n- *a\ntieroffload_config: {planner: greedy}\n", "", (0, 0)),
    ],
)
def test_a_key_that_is_there_twice_is_named_with_its_lines(
    text: str, key: str, lines: tuple[int, int], tmp_path: Path
) -> None:
    """YAML keeps the last one and says nothing; merging over a default with `<<` is no repetition."""
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    if not key:
        assert TierOffloadConfig.from_file(file).planner == "greedy"
        return
    with pytest.raises(ConfigError) as caught:
        TierOffloadConfig.from_file(file)
    said = f"{file}, line {lines[1]}: the key {key!r} is there twice, first in line {lines[0]}. Leave one out."
    assert str(caught.value) == said


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00bad", b"a: " + b"[" * 5000, b"dram_budget: " + b"9" * 6000, b"a: *b", b"a: !!python/tuple []"],
)
def test_a_file_that_holds_no_settings_is_one_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"The configuration file .*settings\.yaml is not"):
        TierOffloadConfig.from_file(file)


def test_trn_17_configuration_is_immutable() -> None:
    config = TierOffloadConfig(**VALID)
    before = copy.deepcopy(config)
    for key in FIELDS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, key, None)
    # The values are immutable too: there is no list in it that somebody could append to.
    hash(tuple(getattr(config, key) for key in FIELDS))
    given_paths = ["/data/a"]
    other = TierOffloadConfig(nvme_paths=given_paths)
    given_paths.append("/data/b")
    assert other.nvme_paths == ("/data/a",)
    assert config == before == pickle.loads(pickle.dumps(config))


def test_trn_17_evaluation_does_not_change_the_configuration() -> None:
    import lightning.pytorch as pl
    import torch

    from lightning_tieroffload import TierOffloadStrategy

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("loss", self.layers(batch).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    strategy = TierOffloadStrategy(device_budget="64KiB", dram_budget="1MiB", prefetch_units=1)
    before = copy.deepcopy(strategy.config)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", max_steps=2, enable_model_summary=False, **quiet)
    data = torch.utils.data.DataLoader(torch.randn(4, 8), batch_size=2)
    model = Model()
    trainer.fit(model, data, data)
    trainer.validate(model, data, verbose=False)
    assert strategy.config == before
    assert strategy.config.to_json() == before.to_json()


def test_round_trips() -> None:
    config = TierOffloadConfig(**VALID)
    assert TierOffloadConfig.from_mapping(config.to_dict()) == config
    assert TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": config.to_json()}) == config
    assert json.loads(TierOffloadConfig().to_json()) == {}
    assert dataclasses.replace(config, planner="ilp") == config.replaced(planner="ilp")


def test_merge_prefers_what_was_chosen_even_when_it_is_the_default() -> None:
    base = TierOffloadConfig(device_budget="1GiB", planner="greedy", io_threads=2)
    over = TierOffloadConfig(device_budget="auto", io_threads=4)
    merged = over.merged_over(base)
    assert (merged.device_budget, merged.planner, merged.io_threads) == ("auto", "greedy", 4)
    assert TierOffloadConfig().merged_over(base) == base
    again = TierOffloadConfig.from_env({"TIEROFFLOAD_CONFIG": over.to_json()}).merged_over(base)
    assert again == merged


def test_strings_from_a_command_line_are_read() -> None:
    config = TierOffloadConfig(
        **{"prefetch_units": "3", "io_timeout_s": "2.5", "verify_reads": "off", "debug": "poison,no_overlap"},
        **{"units": "GPT2Block, MLP", "state_dtype": "torch.bfloat16", "planner": "ILP", "nvme_paths": "/data"},
    )
    assert (config.prefetch_units, config.io_timeout_s, config.verify_reads) == (3, 2.5, False)
    assert config.debug == {"poison", "no_overlap"}
    assert config.units == ("GPT2Block", "MLP")
    assert (config.state_dtype, config.planner, config.nvme_paths) == ("bf16", "ilp", ("/data",))
    assert TierOffloadConfig(debug="none", trace_path="none", nvme_write_budget="none") == TierOffloadConfig()


def test_paths_are_expanded_and_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASH_DIR", str(tmp_path / "with space ä"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = TierOffloadConfig(nvme_paths=["$FLASH_DIR/a", "~/b", "c"], trace_path=Path("d"))
    assert config.nvme_paths == (f"{tmp_path}/with space ä/a", f"{tmp_path}/b", f"{tmp_path}/c")
    assert config.trace_path == f"{tmp_path}/d"


def test_what_is_allowed_is_said_of_the_setting_that_was_meant() -> None:
    """`debug=True` was once refused with what `units` allows; a variable that is not set is named."""
    with pytest.raises(
        ConfigError, match=r'debug=True is not allowed. Allowed: any of "delays", "no_overlap", "poison"'
    ):
        TierOffloadConfig(debug=True)
    with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE is not in the environment"):
        TierOffloadConfig(nvme_paths="${NOT_SET_ANYWHERE}/x")


@given(st.dictionaries(st.text(max_size=20), st.none() | st.integers() | st.text(max_size=9) | st.lists(st.integers())))
def test_any_mapping_gives_a_configuration_or_a_config_error(settings: dict[str, object]) -> None:
    try:
        TierOffloadConfig.from_mapping(settings)
    except ConfigError as error:
        assert str(error)


@given(st.sampled_from(FIELDS), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists))
def test_any_value_gives_a_configuration_or_a_config_error(key: str, value: object) -> None:
    try:
        TierOffloadConfig(**{key: value})
    except ConfigError as error:
        assert key in str(error)


def test_import_is_light() -> None:
    code = (
        "import sys, lightning_tieroffload.config as c; c.resolve_budgets(c.TierOffloadConfig(), 'cpu'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'lightning', 'accelerate', 'yaml')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- limits of the machine


def lay_out_cgroup_v2(root: Path, group: str, files: dict[str, dict[str, str]]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    (root / "proc/self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n")
    for folder, contents in files.items():
        target = root / "sys/fs/cgroup" / folder.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (target / name).write_text(text)


def lay_out_cgroup_v1(root: Path, group: str, shown: str, limits: dict[str, tuple[int, int, int]]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"5:devices:/\n4:memory:{group}\n0::/\n")
    (root / "proc/self/mountinfo").write_text(
        f"35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime shared:1 - cgroup cgroup rw,memory\n"
    )
    for folder, (limit, used, reclaimable) in limits.items():
        target = root / "sys/fs/cgroup/memory" / folder.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        (target / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (target / "memory.usage_in_bytes").write_text(f"{used}\n")
        (target / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {reclaimable}\n")


def test_cgroup_v2_own_and_parents(tmp_path: Path) -> None:
    lay_out_cgroup_v2(
        tmp_path,
        "/job/step",
        {
            "/": {},
            "/job": {
                "memory.max": f"{8 * GiB}\n",
                "memory.high": "max\n",
                "memory.current": f"{5 * GiB}\n",
                "memory.stat": f"anon 1\ninactive_file {GiB}\n",
            },
            "/job/step": {"memory.max": "max\n", "memory.high": f"{6 * GiB}\n", "memory.current": f"{GiB}\n"},
        },
    )
    limits = cgroup_limits(tmp_path)
    assert limits == [
        MemoryLimit(source="memory.high of cgroup /sys/fs/cgroup/job/step", limit_nbytes=6 * GiB, used_nbytes=GiB),
        MemoryLimit(source="memory.max of cgroup /sys/fs/cgroup/job", limit_nbytes=8 * GiB, used_nbytes=4 * GiB),
    ]
    assert [limit.free_nbytes for limit in limits] == [5 * GiB, 4 * GiB]


def test_cgroup_v1_unlimited_own_group_and_limited_parent(tmp_path: Path) -> None:
    lay_out_cgroup_v1(
        tmp_path,
        "/slurm/job_7",
        "/",
        {"/slurm": (4 * GiB, 3 * GiB, GiB), "/slurm/job_7": (9223372036854771712, GiB, 0)},
    )
    (limit,) = cgroup_limits(tmp_path)
    assert (limit.limit_nbytes, limit.used_nbytes) == (4 * GiB, 2 * GiB)


@pytest.mark.parametrize("shown", ["/docker/abc", "/"])
def test_cgroup_v1_in_a_container_that_sees_its_own_group_as_root(shown: str, tmp_path: Path) -> None:
    lay_out_cgroup_v1(tmp_path, "/docker/abc", shown, {"/": (2 * GiB, GiB, 0)})
    (limit,) = cgroup_limits(tmp_path)
    assert limit.free_nbytes == GiB


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == []


def resolve(tmp_path: Path, environ: dict[str, str] | None = None, **settings: object) -> config_module.ResolvedBudgets:
    return resolve_budgets(TierOffloadConfig(**settings), "cpu", environ=environ or {}, root=tmp_path)


@pytest.fixture
def roomy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "host_available_nbytes", lambda: 64 * GiB)
    monkeypatch.setattr(config_module, "_own_resident_nbytes", lambda: GiB)


@pytest.mark.usefixtures("roomy_host")
class TestAutoBudgets:
    def test_host_alone(self, tmp_path: Path) -> None:
        budgets = resolve(tmp_path)
        part_nbytes = 64 * GiB - int(6.4 * GiB)
        assert budgets.device_nbytes == part_nbytes // 4
        assert budgets.device_nbytes + budgets.dram_nbytes == part_nbytes
        assert budgets.nvme_nbytes == 0

    def test_what_one_chosen_budget_leaves_of_the_host_names_it(self, tmp_path: Path) -> None:
        """Without a GPU both are host memory: 0 bytes for the other one have a reason that somebody can change."""
        for chosen, other in (("device", "dram"), ("dram", "device")):
            config = TierOffloadConfig(**{f"{chosen}_budget": "900GiB"})
            budgets = resolve_budgets(config, "cpu", environ={}, root=tmp_path)
            assert getattr(budgets, f"{other}_nbytes") == 0
            assert f"less {chosen}_budget, 900 GiB" in budgets.sources[other]

    def test_cgroup_limit_wins(self, tmp_path: Path) -> None:
        lay_out_cgroup_v2(tmp_path, "/a", {"/a": {"memory.max": f"{20 * GiB}", "memory.current": f"{10 * GiB}"}})
        budgets = resolve(tmp_path)
        assert budgets.device_nbytes + budgets.dram_nbytes == 9 * GiB
        assert "memory.max of cgroup /sys/fs/cgroup/a" in budgets.sources["dram"]

    @pytest.mark.parametrize(
        ("environ", "limit_nbytes"),
        [
            ({"SLURM_MEM_PER_NODE": "20480"}, 20 * GiB),
            ({"SLURM_MEM_PER_NODE": "20G"}, 20 * GiB),
            ({"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "10"}, 20 * GiB),
            ({"SLURM_MEM_PER_GPU": "10240", "SLURM_GPUS_ON_NODE": "2"}, 20 * GiB),
        ],
    )
    def test_slurm_limit_less_what_the_process_has(
        self, environ: dict[str, str], limit_nbytes: int, tmp_path: Path
    ) -> None:
        budgets = resolve(tmp_path, environ)
        free_nbytes = limit_nbytes - GiB
        assert budgets.device_nbytes + budgets.dram_nbytes == free_nbytes - int(free_nbytes * 0.1)
        assert "SLURM_MEM" in budgets.sources["dram"]

    @pytest.mark.parametrize("environ", [{"SLURM_MEM_PER_NODE": "0"}, {"SLURM_MEM_PER_NODE": "?"}])
    def test_slurm_all_of_the_node_or_nonsense_is_no_limit(self, environ: dict[str, str], tmp_path: Path) -> None:
        assert resolve(tmp_path, environ) == resolve(tmp_path)

    def test_processes_share_the_host(self, tmp_path: Path) -> None:
        alone, shared = resolve(tmp_path), resolve(tmp_path, {"LOCAL_WORLD_SIZE": "4"})
        assert abs(4 * (shared.dram_nbytes + shared.device_nbytes) - (alone.dram_nbytes + alone.device_nbytes)) < MiB
        assert local_world_size({"SLURM_NTASKS_PER_NODE": "2(x3)"}) == 2

    def test_dram_and_device_are_never_promised_the_same_bytes(self, tmp_path: Path) -> None:
        for settings in ({"device_budget": "50GiB"}, {"dram_budget": "55GiB"}, {"dram_budget": "57GiB"}):
            budgets = resolve(tmp_path, **settings)
            assert budgets.device_nbytes + budgets.dram_nbytes <= 64 * GiB - int(6.4 * GiB)

    def test_what_the_engine_adopts_counts_as_free(self, tmp_path: Path) -> None:
        adopted = resolve_budgets(TierOffloadConfig(), "cpu", environ={}, root=tmp_path, adopted_host_nbytes=10 * GiB)
        assert adopted.device_nbytes + adopted.dram_nbytes == 74 * GiB - int(7.4 * GiB)

    def test_small_machine_keeps_half(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(config_module, "host_available_nbytes", lambda: 600 * MiB)
        budgets = resolve(tmp_path)
        assert budgets.device_nbytes + budgets.dram_nbytes == 300 * MiB

    def test_explicit_budgets_are_taken_as_they_are_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, logger="lightning_tieroffload"):
            budgets = resolve(tmp_path, device_budget="1GiB", dram_budget="200GiB")
        assert (budgets.device_nbytes, budgets.dram_nbytes) == (GiB, 200 * GiB)
        assert "201 GiB" in caplog.text
        assert "lower dram_budget" in caplog.text

    def test_nvme_counts_each_file_system_once(self, tmp_path: Path) -> None:
        one = resolve(tmp_path, nvme_paths=[tmp_path / "a/not/yet"])
        two = resolve(tmp_path, nvme_paths=[tmp_path / "a", tmp_path / "b"])
        stat = os.statvfs(tmp_path)
        for budgets in (one, two):
            assert budgets.nvme_nbytes == pytest.approx(0.9 * stat.f_bavail * stat.f_frsize, rel=0.05)

    def test_nvme_budget_without_paths_is_no_tier(self, tmp_path: Path) -> None:
        assert resolve(tmp_path, nvme_budget="1GiB").nvme_nbytes == 0
        assert resolve(tmp_path, nvme_budget="1GiB", nvme_paths=tmp_path).nvme_nbytes == GiB

    def test_cuda_takes_the_tighter_of_free_memory_and_process_fraction(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GiB, 140 * GiB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 * GiB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GiB)
        for fraction, free_nbytes in ((1.0, 102 * GiB), (0.2, 24 * GiB)):
            monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device, f=fraction: f)
            budgets = resolve_budgets(TierOffloadConfig(), "cuda:0", environ={}, root=tmp_path)
            # Two fifths: the rest is for activations, which nobody has measured at the start.
            assert budgets.device_nbytes == pytest.approx(0.4 * 0.95 * free_nbytes, rel=1e-6)
            # With a GPU of its own the DEVICE tier takes nothing from host memory.
            assert budgets.dram_nbytes == 64 * GiB - int(6.4 * GiB)
