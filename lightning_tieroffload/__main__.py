"""Floor 14. `python -m lightning_tieroffload` is the `tieroffload` command."""

from __future__ import annotations

from lightning_tieroffload.cli.main import main

if __name__ == "__main__":
    main()
