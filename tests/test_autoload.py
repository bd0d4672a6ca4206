"""The import hooks: every order of first imports, broken hooks, kill switches. Each order needs a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import _tieroffload_hooks as hooks

ROOT = Path(__file__).resolve().parents[1]

# Stands in for lightning_tieroffload.strategies: notes what it is called with, and that the module was complete then.
PROBE = """
fired = []
CLASSES = {"accelerate.accelerator": "Accelerator", "transformers.trainer": "Trainer",
           "accelerate.commands.config.config_args": "ClusterConfig"}
def note(module):
    name = module.__name__
    wanted = CLASSES.get(name) or ("STRATEGY_REGISTRY" if "fabric" in name else "StrategyRegistry")
    spec = module.__spec__
    fired.append((name, hasattr(module, wanted) and type(spec).__module__ == "_frozen_importlib"))
"""
# Runs before everything else in the child, as site does; imports nothing but the standard library.
SITECUSTOMIZE = """
import _tieroffload_hooks as hooks
for table in (hooks._ALWAYS, hooks._WHEN_ENABLED):
    for name in table:
        table[name] = ("probe", "note")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the working tree look installed, entry point and all."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "lightning_tieroffload-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-tieroffload\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntieroffload_test = _tieroffload_autoload:autoload\n")
    return folder


Result = subprocess.CompletedProcess[str]


def python(code: str, *paths: Path, **environ: str) -> Result:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TIEROFFLOAD", "ACCELERATE", "TORCH_DEVICE"))}
    path = os.pathsep.join(str(p) for p in (*paths, ROOT))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=paths[0],  # python -c puts the current folder first
        env={**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


ORDERS = {
    "import torch": {"lightning.pytorch", "lightning.fabric", "accelerate"},
    "import accelerate": {"accelerate"},
    "from accelerate.utils import set_seed": {"accelerate"},
    "from transformers import Trainer": {"accelerate", "transformers"},
    "import lightning": {"lightning.pytorch", "lightning.fabric"},
    "import pytorch_lightning, lightning": {"pytorch_lightning", "lightning_fabric", "lightning.pytorch"},
}
LATER = {
    "lightning.pytorch": ("import lightning.pytorch", "lightning.pytorch.strategies"),
    "lightning.fabric": ("from lightning.fabric import Fabric", "lightning.fabric.strategies"),
    "pytorch_lightning": ("import pytorch_lightning", "pytorch_lightning.strategies"),
    "lightning_fabric": ("import lightning_fabric", "lightning_fabric.strategies"),
    "accelerate": ("import accelerate", "accelerate.accelerator"),
    "transformers": ("from transformers import Trainer", "transformers.trainer"),
}


# One for each way to be there: not imported yet, half imported in accelerate, half imported in transformers. The others
# take the same ways from other doors.
DEFAULT_ORDERS = ("import torch", "import accelerate", "from transformers import Trainer")


@pytest.fixture(scope="module")
def run_order(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    probes = tmp_path_factory.mktemp("probe")
    (probes / "probe.py").write_text(PROBE)
    (probes / "sitecustomize.py").write_text(SITECUSTOMIZE)

    def run(first: str) -> Result:
        later = "\n".join(LATER[name][0] for name in sorted(ORDERS[first]))
        code = f"{first}\n{later}\nimport probe\nfor name, whole in probe.fired: print(name, whole)"
        return python(code, probes, site, ACCELERATE_USE_TIEROFFLOAD="true")

    with ThreadPoolExecutor(2) as pool:
        results = dict(zip(DEFAULT_ORDERS, pool.map(run, DEFAULT_ORDERS), strict=True))
    return lambda first: results[first] if first in results else run(first)


@pytest.mark.parametrize(
    "first", [pytest.param(o, marks=() if o in DEFAULT_ORDERS else pytest.mark.slow) for o in ORDERS]
)
def test_every_hook_fires_once_and_after_its_module_is_complete(first: str, run_order: Callable[[str], Result]) -> None:
    result = run_order(first)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.split("\n")[:-1]
    expected = {LATER[name][1] for name in ORDERS[first]}
    assert expected <= {line.split()[0] for line in lines}, lines
    assert len(lines) == len({line.split()[0] for line in lines}), f"fired twice: {lines}"
    assert all(line.endswith(" True") for line in lines), f"fired on an incomplete module, or left a trace: {lines}"


def test_strategy_is_known_without_an_import_of_ours(site: Path) -> None:
    result = python(
        """
        import lightning.pytorch, lightning.fabric, sys
        from lightning.pytorch.strategies import StrategyRegistry
        from lightning.fabric.strategies import STRATEGY_REGISTRY
        assert "tieroffload" in StrategyRegistry, list(StrategyRegistry)
        assert {"tieroffload", "tiered"} <= set(STRATEGY_REGISTRY), list(STRATEGY_REGISTRY)
        from lightning.fabric.cli import _get_supported_strategies
        assert "tiered" in _get_supported_strategies()
        assert "lightning_tieroffload.engine.offload_engine" not in sys.modules
        assert not any(m.startswith("numba") for m in sys.modules)
        """,
        site,
    )
    assert result.returncode == 0, result.stderr


def test_training_without_us_though_asked_for_is_said_at_the_end(site: Path) -> None:
    asked = {"ACCELERATE_USE_TIEROFFLOAD": "true", "TIEROFFLOAD_REQUIRE": "1"}
    unused = python("import torch", site, **asked)
    assert "was trained without it" in unused.stderr
    used = python("import torch, _tieroffload_hooks as hooks; hooks.used()", site, **asked)
    assert (used.returncode, used.stderr) == (0, "")


def test_broken_hooks_leave_torch_importable(site: Path, tmp_path: Path) -> None:
    (tmp_path / "_tieroffload_hooks.py").write_text("this is not Python\n")
    result = python("import torch; print(torch.ones(1).item())", tmp_path, site)
    assert result.returncode == 0
    assert result.stdout == "1.0\n"
    ours = [line for line in result.stderr.splitlines() if "tieroffload" in line]
    assert len(ours) >= 1
    assert all("not installed" in line for line in ours)


@pytest.mark.parametrize("switch", [{"TIEROFFLOAD_AUTOLOAD": "0"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}])
def test_kill_switches_and_the_import_that_works_in_spite_of_them(site: Path, switch: dict[str, str]) -> None:
    result = python(
        """
        import torch, sys
        assert not any("_tieroffload_hooks" in str(finder) for finder in sys.meta_path), sys.meta_path
        import lightning_tieroffload
        assert any("_tieroffload_hooks" in str(finder) for finder in sys.meta_path)
        """,
        site,
        **switch,
    )
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------- in this process


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"tieroffload_test_module_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("class Accelerator:\n    def __init__(self): self.made = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def imported(name: str) -> types.ModuleType:
    return __import__(name)


def test_loader_and_source_are_untouched(module_file: str) -> None:
    import inspect

    seen: list[types.ModuleType] = []
    hooks.when_imported(module_file, seen.append)
    module = imported(module_file)
    assert seen == [module]
    assert "exec_module" not in vars(module.__spec__.loader)
    assert "class Accelerator" in inspect.getsource(module)
    hooks.when_imported(module_file, seen.append)
    assert seen == [module, module], "a module that is there already is fired for at once"


def test_find_spec_alone_does_not_fire(module_file: str) -> None:
    import importlib.util

    seen: list[types.ModuleType] = []
    hooks.when_imported(module_file, seen.append)
    assert importlib.util.find_spec(module_file) is not None
    assert seen == []
    imported(module_file)
    assert len(seen) == 1


def test_a_module_whose_import_failed_is_hooked_when_it_succeeds(tmp_path: Path, module_file: str) -> None:
    file = tmp_path / f"{module_file}.py"
    whole = file.read_text()
    file.write_text("raise OSError('not yet')\n")
    seen: list[types.ModuleType] = []
    hooks.when_imported(module_file, seen.append)
    with pytest.raises(OSError, match="not yet"):
        imported(module_file)
    assert seen == []
    file.write_text(whole + "# changed\n")
    imported(module_file)
    assert len(seen) == 1


def test_a_half_imported_module_is_fired_for_when_it_is_whole(tmp_path: Path, module_file: str) -> None:
    seen: list[bool] = []
    hooks_name = f"{module_file}_during"
    sys.modules[hooks_name] = types.SimpleNamespace(  # type: ignore[assignment]
        run=lambda: hooks.when_imported(module_file, lambda module: seen.append(hasattr(module, "Accelerator")))
    )
    file = tmp_path / f"{module_file}.py"
    file.write_text(f"import {hooks_name}\n{hooks_name}.run()\n{file.read_text()}")
    module = imported(module_file)
    del sys.modules[hooks_name]
    assert seen == [True]
    assert type(module.__spec__).__name__ == "ModuleSpec"
    assert "_initializing" not in vars(type(module.__spec__))


def test_broken_callback_is_a_warning(module_file: str) -> None:
    def callback(module: types.ModuleType) -> None:
        raise AttributeError("no such method any more")

    hooks.when_imported(module_file, callback)
    with pytest.warns(RuntimeWarning, match="could not hook .*no such method any more"):
        imported(module_file)


@pytest.mark.parametrize("required", ["1", "0"])
def test_accelerator_refuses_to_train_without_us_if_required(
    module_file: str, monkeypatch: pytest.MonkeyPatch, required: str
) -> None:
    monkeypatch.setenv(hooks.ENABLED_KEY, "true")
    monkeypatch.setenv(hooks.REQUIRED_KEY, required)
    monkeypatch.setitem(hooks._REFUSING_CLASS, module_file, "Accelerator")

    def callback(module: types.ModuleType) -> None:
        raise AttributeError("prepare_model")

    hooks.when_imported(module_file, callback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if required == "0" else "error")
        module = imported(module_file)
    if required == "0":
        assert module.Accelerator().made
    else:
        with pytest.raises(RuntimeError, match=r"tieroffload was asked for.*prepare_model.*TIEROFFLOAD_REQUIRE=0"):
            module.Accelerator()


def test_announce_keeps_the_users_choice_about_requiring(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (hooks.ENABLED_KEY, hooks.CONFIG_KEY, hooks.REQUIRED_KEY):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    hooks.announce("{}")
    assert hooks.enabled()
    assert hooks.required()
    monkeypatch.setenv(hooks.REQUIRED_KEY, "0")
    hooks.announce("{}")
    assert not hooks.required()
