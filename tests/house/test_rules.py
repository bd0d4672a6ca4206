"""The house rules, as tests. Each says what to do; CONTRIBUTING.md says why."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import lightning_tieroffload
from lightning_tieroffload.config import TierOffloadConfig

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_tieroffload"
FILES = sorted(PACKAGE.rglob("*.py"))
HOOK_FILES = [ROOT / "_tieroffload_autoload.py", ROOT / "_tieroffload_hooks.py"]

# What starts other processes sets variables for them; it reads no settings from its own.
MAY_TOUCH_ENVIRONMENT = {"config.py", "run.py", "cli/launch.py", "cli/bench_train.py"}
# Settings come in through config.py only; a mesh is data.
MAY_READ_FILES_OF_SETTINGS = {"config.py", "topology/mesh_sources.py"}
# A benchmark times whole windows of steps, and a window ends when the device is done.
MAY_SYNCHRONIZE = {"engine/streams.py", "engine/profiler.py", "cli/bench_train.py"}
# Mappings that only one thread knows; and the file that says what is wrong with it.
MAY_COPY_IN_STEPS = {
    "snapshots.py",
    "llama_shape.py",
    "engine/device_updates.py",
    "engine/offload_engine.py",
    "engine/optimizer.py",
    "engine/recompute.py",
    "engine/torch_patches.py",
    "strategies/face.py",
}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@lru_cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


def floor_of(path: Path) -> int:
    match = re.match(r"Floor (\d+)\. \S", ast.get_docstring(tree_of(path)) or "")
    assert match, f"{relative(path)}: the module docstring must start with 'Floor N. ' and say what the file owns"
    return int(match.group(1))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of ours, inside functions too; those for type checkers alone do not count."""
    for_types = {
        inner
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree_of(path)):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: write imports out, from the package's name on"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in MODULES else str(node.module)


def test_a_file_imports_from_lower_floors_only() -> None:
    """Where this fails: hand it in as a callback, or move one of the two. Everybody may raise what errors.py has."""
    faults = [
        f"{relative(path)}:{line} (floor {floor_of(path)}) imports {name} (floor {floor_of(MODULES[name])})"
        for path in FILES
        for line, name in imports_of(path)
        if name in MODULES
        and MODULES[name] != path
        and name != "lightning_tieroffload.errors"
        and floor_of(MODULES[name]) >= floor_of(path)
    ]
    assert not faults, "\n".join(faults)


def public_definitions(path: Path) -> set[str]:
    return {
        node.name
        for node in tree_of(path).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        # The functions behind sub-commands are called by name on the command line only.
        and not any(".command(" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def test_all_names_what_is_public_exactly() -> None:
    """Where this fails: add the name to `__all__`, or make it private."""
    faults: list[str] = []
    for path in FILES:
        listed = [
            name
            for node in tree_of(path).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.literal_eval(node.value)
        ]
        faults += [f"{relative(path)}: {name} is not in __all__" for name in public_definitions(path) - set(listed)]
        faults += [f"{relative(path)}: {name} stands in __all__ twice" for name in listed if listed.count(name) > 1]
    assert not faults, "\n".join(sorted(faults))


def test_the_package_exports_exactly_this() -> None:
    assert set(lightning_tieroffload.__all__) == {
        *("TierOffloadConfig", "TierOffloadStrategy", "__version__", "engine_of", "offload", "offload_activations"),
        *("CapacityError", "ChecksumError", "ConfigError", "InfeasiblePlanError", "ResidencyError", "TierIOError"),
        *("TierOffloadError", "TransferTimeoutError", "UnsupportedError"),
    }
    for name in lightning_tieroffload.__all__:
        assert getattr(lightning_tieroffload, name) is not None
    with pytest.raises(AttributeError):
        _ = lightning_tieroffload.no_such_name  # type: ignore[attr-defined]


def test_every_setting_is_documented_with_its_default() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    headings = re.findall(r"^### `(\w+)`", text, flags=re.MULTILINE)
    fields = [entry.name for entry in dataclasses.fields(TierOffloadConfig) if not entry.name.startswith("_")]
    assert headings == fields, "docs/settings.md: one heading per setting, in the order of TierOffloadConfig"
    for name in fields:
        section = text.split(f"### `{name}`")[1].split("\n### ")[0]
        assert "Default:" in section, f"docs/settings.md: {name} does not say its default"


@lru_cache
def code_of(path: Path) -> str:
    return ast.unparse(tree_of(path))  # comments are gone; docstrings stay, which is as well


def assert_unused(pattern: str, advice: str, *, but_in: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    faults = [relative(path) for path in FILES if relative(path) not in but_in and re.search(pattern, code_of(path))]
    assert not faults, f"{faults}: {advice}"


def test_one_door_for_settings() -> None:
    assert_unused(
        r"\bos\.(environ|getenv|putenv)\b", "only config.py reads the environment", but_in=MAY_TOUCH_ENVIRONMENT
    )
    assert_unused(r"\bimport (yaml|tomllib)\b", "only config.py reads settings", but_in=MAY_READ_FILES_OF_SETTINGS)


def test_no_global_state() -> None:
    faults = [
        f"{path.name}:{node.lineno}"
        for path in [*FILES, *HOOK_FILES]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Global)
    ]
    assert not faults, f"{faults}: give the state an owner"


def test_what_other_threads_change_is_copied_in_one_step() -> None:
    assert_unused(
        r"\blist\([\w.]+\.items\(\)\)|\btuple\([\w.]*inbox\)",
        "another thread may change it in the middle: snapshots.py",
        but_in=MAY_COPY_IN_STEPS,
    )


def test_streams_have_one_owner() -> None:
    assert_unused(
        r"\bcuda\.(Stream|Event|ExternalStream)\(", "only engine/streams.py makes them", but_in={"engine/streams.py"}
    )
    assert_unused(r"\bcuda\.synchronize\(", "wait for one ticket, not for the device", but_in=MAY_SYNCHRONIZE)


def test_nothing_is_deleted_blindly_and_no_task_is_an_orphan() -> None:
    assert_unused(r"ignore_errors\s*=\s*True", "delete what a manifest lists, and hear about what fails")
    assert_unused(r"\basyncio\.create_task\(", "every task has a parent: TaskGroup.create_task")
    assert_unused(r"\bmodule\.forward\s*=[^=]", "use hooks, removed by handle")


def test_asserts_have_no_side_effect() -> None:
    """Under `python -O` an assert and all that it calls is gone."""
    acting = {"acquire", "append", "pop", "popleft", "read", "result", "wait", "write"}
    faults = [
        f"{relative(path)}:{node.lineno}: {ast.unparse(inner)}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert)
        for inner in ast.walk(node.test)
        if isinstance(inner, (ast.Await, ast.NamedExpr, ast.Yield))
        or (isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in acting)
    ]
    assert not faults, "\n".join(faults)


def names_defined_in(path: Path) -> Iterator[tuple[int, str]]:
    """Names that others see: modules, definitions, parameters, attributes and module-level variables. Not locals."""
    yield 1, path.stem
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
    for node in tree_of(path).body:
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield node.lineno, target.id


def test_words_that_mean_nothing_are_not_used() -> None:
    """`buffer`, `cache` and `size` are fine with a word that says which; the others hide what a thing does."""
    never = {"swap", "swaps", "chunk", "chunks", "manager", "handler", "util", "utils", "status"}
    alone = {"buffer", "cache", "size"}
    faults = [
        f"{relative(path)}:{line}: {name}"
        for path in FILES
        for line, name in names_defined_in(path)
        if name.lower() in alone or {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)} & never
    ]
    assert not faults, "\n".join(faults)


def test_importing_the_package_imports_no_framework() -> None:
    code = (
        "import sys, lightning_tieroffload\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'accelerate', 'transformers', 'numba', 'numpy'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "import threading; assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_file_tree_of_the_readme_is_current() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: which files belong to the project is not known")
    done = subprocess.run([sys.executable, "docs/file_tree.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run `make readme` and commit README.md"


def test_every_test_file_belongs_to_a_folder_pytest_reads_and_is_not_empty() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        assert "def test_" in path.read_text(), f"{path} holds no test"
