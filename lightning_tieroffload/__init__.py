"""Floor 11. The package's door: names that are imported when first asked for.

Owns no behaviour. Importing it imports neither torch nor lightning nor accelerate; it does install the import hooks
that make `strategy="tieroffload"` known, which is the way in where torch's own autoloading is switched off.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_tieroffload._version import __version__

if TYPE_CHECKING:
    from lightning_tieroffload.config import TierOffloadConfig
    from lightning_tieroffload.engine.activations import offload_activations
    from lightning_tieroffload.engine.offload_engine import engine_of
    from lightning_tieroffload.errors import (
        CapacityError,
        ChecksumError,
        ConfigError,
        InfeasiblePlanError,
        ResidencyError,
        TierIOError,
        TierOffloadError,
        TransferTimeoutError,
        UnsupportedError,
    )
    from lightning_tieroffload.strategies.lightning_strategy import TierOffloadStrategy
    from lightning_tieroffload.strategies.plain import offload

__all__ = [
    "CapacityError",
    "ChecksumError",
    "ConfigError",
    "InfeasiblePlanError",
    "ResidencyError",
    "TierIOError",
    "TierOffloadConfig",
    "TierOffloadError",
    "TierOffloadStrategy",
    "TransferTimeoutError",
    "UnsupportedError",
    "__version__",
    "engine_of",
    "offload",
    "offload_activations",
]

_HOME_OF = {
    **{name: "lightning_tieroffload.errors" for name in __all__ if name.endswith("Error")},
    "TierOffloadConfig": "lightning_tieroffload.config",
    "TierOffloadStrategy": "lightning_tieroffload.strategies.lightning_strategy",
    "engine_of": "lightning_tieroffload.engine.offload_engine",
    "offload": "lightning_tieroffload.strategies.plain",
    "offload_activations": "lightning_tieroffload.engine.activations",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next look-up is a plain one
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _install_import_hooks() -> None:
    # torch's autoloading has usually done this already (it is idempotent); this is for where it is switched off. The
    # top-level module is absent when the package runs from a folder that was never installed.
    try:
        import _tieroffload_hooks
    except ModuleNotFoundError as error:
        if error.name != "_tieroffload_hooks":
            raise
        return
    _tieroffload_hooks.install()


_install_import_hooks()
