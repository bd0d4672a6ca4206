"""Import hooks: call a function as soon as a module has been imported. Standard library only.

A top-level module on purpose: loading an entry point imports the parent package, and `import torch` must not pay for
(or fail with) any package of ours. Nothing is patched here; `install` only notes which function of
`lightning_tieroffload.strategies` is to be called for which module, and imports it when that module is there.

[Note: modules that are being imported] When torch is first imported by `import accelerate` or by
`from transformers import Trainer`, the modules to be hooked (`accelerate.accelerator`, `transformers.trainer`) are in
`sys.modules` already, half executed: a meta-path finder is never asked for them, and their classes do not exist yet.
importlib sets `__spec__._initializing` to False when it has finished such a module, so its spec is given a class that
notices. Watching `setattr` on the parent package instead fails for transformers, which puts a new package object into
`sys.modules` while its trainer module is being imported.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["announce", "enabled", "install", "install_from_torch", "required", "used", "when_imported"]

Callback = Callable[[ModuleType], None]

AUTOLOAD_KEY = "TIEROFFLOAD_AUTOLOAD"  # "0": torch's autoloading of our hooks is ignored
ENABLED_KEY = "ACCELERATE_USE_TIEROFFLOAD"  # "true": Accelerator and HF Trainer of this process are to be hooked
REQUIRED_KEY = "TIEROFFLOAD_REQUIRE"  # "1": an Accelerator that could not be hooked must refuse to train
CONFIG_KEY = "TIEROFFLOAD_CONFIG"  # JSON, read by lightning_tieroffload.config

_REGISTER = "lightning_tieroffload.strategies.autoload"
_ALWAYS = {
    "lightning.pytorch.strategies": (_REGISTER, "register_lightning"),
    "pytorch_lightning.strategies": (_REGISTER, "register_lightning"),
    "lightning.fabric.strategies": (_REGISTER, "register_fabric"),
    "lightning_fabric.strategies": (_REGISTER, "register_fabric"),
    "accelerate.commands.config.config_args": (_REGISTER, "hook_config_file"),
}
# Only where they were asked for, so that nobody else's process is patched.
_WHEN_ENABLED = {
    "accelerate.accelerator": ("lightning_tieroffload.strategies.accelerate_plugin", "hook_accelerator"),
    "transformers.trainer": ("lightning_tieroffload.strategies.hf_trainer", "hook_trainer"),
}
# The class whose constructor must refuse where its module could not be hooked.
_REFUSING_CLASS = {"accelerate.accelerator": "Accelerator", "transformers.trainer": "Trainer"}

_pending: dict[str, list[Callback]] = {}
_installed: set[str] = set()
_searching = threading.local()


def _is_true(key: str) -> bool:
    return os.environ.get(key, "").strip().lower() in ("1", "true", "yes", "on")


def enabled() -> bool:
    """Whether this process was started with a `tieroffload_config` (Accelerate's launcher sets it for its children)."""
    return _is_true(ENABLED_KEY)


def required() -> bool:
    """Whether training without the hooks must fail instead of warn."""
    return _is_true(REQUIRED_KEY)


def announce(config_json: str) -> None:
    """Say to the processes that this one starts that they are to train under this configuration."""
    os.environ[ENABLED_KEY] = "true"
    os.environ[CONFIG_KEY] = config_json
    os.environ.setdefault(REQUIRED_KEY, "1")


# ---------------------------------------------------------------- waiting for a module


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` when `name` has been imported: at once if it has, else right after its code has run.

    What `callback` raises becomes a RuntimeWarning: a changed library must not break its own import.
    """
    module = sys.modules.get(name)
    callbacks = _pending.setdefault(name, [])
    callbacks.append(callback)
    if module is None:
        if _Finder not in sys.meta_path:
            sys.meta_path.insert(0, _Finder)
        return
    spec = getattr(module, "__spec__", None)
    if spec is None or not getattr(spec, "_initializing", False):
        _fire(name)
    elif len(callbacks) == 1:
        if _Finder not in sys.meta_path:  # for a second try, should this import fail
            sys.meta_path.insert(0, _Finder)
        _watch(spec, name)


def _fire(name: str) -> None:
    module = sys.modules.get(name)
    for callback in _pending.pop(name, ()):
        if module is None:
            continue
        try:
            callback(module)
        except Exception as error:
            _report(name, module, error)


def _report(name: str, module: ModuleType, error: Exception) -> None:
    class_name = _REFUSING_CLASS.get(name)
    if class_name is None or not (enabled() and required()):
        warnings.warn(f"tieroffload could not hook {name}: {error!r}", RuntimeWarning, stacklevel=3)
        return
    message = (
        f"Training with tieroffload was asked for (tieroffload_config), but {name} could not be hooked: {error!r}. "
        f"Use the versions that constraints.txt names, or set {REQUIRED_KEY}=0 to train without tieroffload."
    )

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(message) from error

    # The import itself must go on (somebody may only want a helper of that library); training must not.
    getattr(module, class_name).__init__ = refuse


class _Finder:
    """A meta-path finder that answers only for the names that somebody waits for."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _pending or getattr(_searching, "name", None) == name:
            return None
        before, _searching.name = getattr(_searching, "name", None), name
        try:
            spec = cls._found_by_others(name, path, target)
        finally:
            _searching.name = before
        loader = getattr(spec, "loader", None)
        # A loader that is a class (built-in, frozen) serves every module: nothing may be set on it.
        if loader is not None and not isinstance(loader, type) and hasattr(loader, "exec_module"):
            cls._fire_after(loader, name)
        return spec

    @classmethod
    def _found_by_others(cls, name: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None) if finder is not cls else None
            if find is not None and (spec := find(name, path, target)) is not None:
                return spec  # type: ignore[no-any-return]
        return None

    @staticmethod
    def _fire_after(loader: Any, name: str) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # Set on the instance and taken off before the module runs: type(loader), resources and
            # inspect.getsource never see a difference.
            loader.__dict__.pop("exec_module", None)
            original(module)
            _fire(name)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # a loader with slots: the hook for this module is lost, the import is not


def _watch(spec: ModuleSpec, name: str) -> None:
    """Fire when importlib has finished `name`. See [Note: modules that are being imported]."""
    base = type(spec)

    def get(self: ModuleSpec) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    def set_(self: ModuleSpec, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = base
            # importlib has taken a module whose import failed out of sys.modules by now.
            if name in sys.modules:
                _fire(name)

    members = {"_initializing": property(get, set_), "__module__": base.__module__}
    spec.__class__ = type(base.__name__, (base,), members)


# ---------------------------------------------------------------- what is hooked


def _call(module_name: str, function_name: str) -> Callback:
    def callback(module: ModuleType) -> None:
        getattr(import_module(module_name), function_name)(module)

    return callback


def used() -> None:
    """A model of this process was handed over: there is nothing to complain about at its end."""
    _installed.add(_USED)


_USED = "a model was handed over"


def _say_if_unused() -> None:
    is_worker = (multiprocessing := sys.modules.get("multiprocessing")) and multiprocessing.parent_process() is not None
    if _USED not in _installed and not is_worker and required():
        sys.stderr.write(
            "tieroffload: this process was started with a tieroffload_config, but no model was handed to "
            "Accelerator.prepare: whatever was trained here was trained without it.\n"
        )


def install() -> None:
    """Note what is to be hooked. Idempotent; a second call adds what has been asked for since."""
    if enabled() and _say_if_unused.__name__ not in _installed:
        _installed.add(_say_if_unused.__name__)
        atexit.register(_say_if_unused)
    targets = {**_ALWAYS, **(_WHEN_ENABLED if enabled() else {})}
    for name, target in targets.items():
        if name not in _installed:
            _installed.add(name)
            when_imported(name, _call(*target))


def switched_off_by() -> str | None:
    """The variable because of which `import torch` leaves our hooks alone; None where it installs them."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":  # as torch reads it
        return "TORCH_DEVICE_BACKEND_AUTOLOAD"
    return AUTOLOAD_KEY if _is_ignored() else None


def _is_ignored() -> bool:
    return os.environ.get(AUTOLOAD_KEY, "").strip().lower() in ("0", "false", "off", "no")


def install_from_torch() -> None:
    """`install`, unless `TIEROFFLOAD_AUTOLOAD=0`."""
    if not _is_ignored():
        install()
    elif enabled() and required():
        warnings.warn(
            f"{AUTOLOAD_KEY}=0 switches tieroffload off, although this process was started with a tieroffload_config: "
            "nothing will be offloaded.",
            RuntimeWarning,
            stacklevel=2,
        )
