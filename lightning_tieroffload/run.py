"""Floor 7. `python -m lightning_tieroffload.run SCRIPT ARGS…`: run a script with the import hooks in place.

For processes in which torch's autoloading is switched off; `tieroffload launch` starts its processes through it. The
script sees the `sys.argv`, the `sys.path[0]` and the `__main__` that it would see without it.
"""

from __future__ import annotations

import os
import runpy
import sys

import _tieroffload_hooks

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run `arguments[0]` (a path, or with `--module` before it a module's name) as `__main__`.

    Raises whatever the script raises, SystemExit too. SystemExit(2) where nothing to run is given.
    """
    as_module = arguments[:1] == ["--module"]
    arguments = arguments[1:] if as_module else arguments
    if not arguments:
        sys.exit("usage: python -m lightning_tieroffload.run [--module] SCRIPT [ARGS…]")
    _tieroffload_hooks.install()
    target = arguments[0]
    if as_module:
        sys.argv = arguments
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
