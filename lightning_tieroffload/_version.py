"""Floor 0. The version, in a file that nothing else is in, so that a build can read it without importing anything."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
