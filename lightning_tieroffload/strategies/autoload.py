"""Floor 6. What the import hooks call: names in registries, and the `tieroffload_config` block of Accelerate's files.

Imports neither torch nor lightning nor accelerate: it runs inside their imports, also in processes that never use us.
The classes behind the names are built when somebody asks for them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_tieroffload.config import TierOffloadConfig

__all__ = ["hook_config_file", "prefer", "register_fabric", "register_lightning"]

NAME = "tieroffload"
# `fabric run --strategy` hides every name that has "offload" in it.
FABRIC_CLI_NAME = "tiered"
BLOCK = "tieroffload_config"

_DESCRIPTION = "Training state on tiers: device memory, DRAM, NVMe"


def _factory(module_name: str, root: str) -> Callable[..., Any]:
    def build(**config: Any) -> Any:
        return importlib.import_module(module_name).strategy_class(root)(**config)

    return build


def register_lightning(strategies: ModuleType) -> None:
    """Make `Trainer(strategy="tieroffload")` known to the package that `strategies` belongs to."""
    build = _factory("lightning_tieroffload.strategies.lightning_strategy", strategies.__name__.rpartition(".")[0])
    strategies.StrategyRegistry.register(NAME, build, description=_DESCRIPTION, override=True)


def register_fabric(strategies: ModuleType) -> None:
    """Make `Fabric(strategy="tieroffload")` and `fabric run --strategy tiered` known."""
    build = _factory("lightning_tieroffload.strategies.fabric_strategy", strategies.__name__.rpartition(".")[0])
    for name in (NAME, FABRIC_CLI_NAME):
        strategies.STRATEGY_REGISTRY.register(name, build, description=_DESCRIPTION, override=True)


# ---------------------------------------------------------------- Accelerate's configuration files


class _Block:
    """The block as it stood in the file. Not a dict: the launcher copies dict attributes onto its own options."""

    def __init__(self, settings: Mapping[str, Any] | None) -> None:
        self.settings = settings


def hook_config_file(config_args: ModuleType) -> None:
    """Let Accelerate's YAML and JSON files have a `tieroffload_config` block, and keep it when they are written.

    Reading one checks it (ConfigError with the nearest name for a misspelt key) and sets the environment, from which
    every launcher starts its processes. The block is no dataclass field: each key of a dict-valued field would
    override the launcher's option of the same name.
    """
    base = config_args.BaseConfig
    if hasattr(base.process_config, "__wrapped__"):
        return
    just_read: list[_Block] = []
    process_config, post_init, to_dict = base.process_config, config_args.ClusterConfig.__post_init__, base.to_dict

    @functools.wraps(process_config)
    def process_config_with_block(config_dict: dict[str, Any]) -> Any:
        just_read.clear()
        if BLOCK in config_dict:
            settings = config_dict.pop(BLOCK)
            _announce(settings, config_dict.get("compute_environment"))
            just_read.append(_Block(settings))
        return process_config(config_dict)

    @functools.wraps(post_init)
    def post_init_with_block(self: Any) -> None:
        post_init(self)
        if just_read:
            setattr(self, BLOCK, just_read.pop())

    @functools.wraps(to_dict)
    def to_dict_with_block(self: Any) -> dict[str, Any]:
        result = dict(to_dict(self))
        block = result.get(BLOCK)
        if isinstance(block, _Block):
            result[BLOCK] = block.settings
        return result

    for name, default in (
        ("from_yaml_file", "default_yaml_config_file"),
        ("from_json_file", "default_json_config_file"),
    ):
        setattr(base, name, classmethod(_checked_first(getattr(base, name).__func__, getattr(config_args, default))))
    base.process_config = staticmethod(process_config_with_block)
    config_args.ClusterConfig.__post_init__ = post_init_with_block
    base.to_dict = to_dict_with_block


def _checked_first(read: Callable[..., Any], default: str) -> Callable[..., Any]:
    @functools.wraps(read)
    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        path = next(iter((*args, *kwargs.values())), None) or default
        if _has_block(path):
            from lightning_tieroffload.config import refuse_repeated_keys

            refuse_repeated_keys(path, BLOCK)
        return read(cls, *args, **kwargs)

    return checked


def _has_block(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return BLOCK in file.read()
    except (OSError, ValueError):  # its reader says so
        return False


def _announce(settings: Mapping[str, Any] | None, compute_environment: object) -> None:
    import _tieroffload_hooks
    from lightning_tieroffload.config import TierOffloadConfig
    from lightning_tieroffload.errors import ConfigError

    if "SAGEMAKER" in str(compute_environment or "").upper():
        raise ConfigError(
            f"{BLOCK} cannot be sent to SageMaker: its jobs do not see this machine's environment. "
            "Use compute_environment: LOCAL_MACHINE, or take the block out."
        )
    config = TierOffloadConfig.from_mapping({} if settings is None else settings, where=BLOCK)
    config = config.merged_over(TierOffloadConfig.from_env())
    for preferred in _from_command_line:
        config = preferred.merged_over(config)
    _tieroffload_hooks.announce(config.to_json())


_from_command_line: list[TierOffloadConfig] = []


def prefer(config: TierOffloadConfig) -> None:
    """Let these settings (from a command line) count more than those of any file that is read after this."""
    _from_command_line.append(config)
