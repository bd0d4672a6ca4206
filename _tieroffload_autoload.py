"""What torch calls at the end of `import torch` (entry point group `torch.backends`). Standard library only.

An exception here would break `import torch` for everybody who has the package installed, and so would renaming this
file while the entry point is installed. So it is trivial, and whatever goes wrong becomes one line on stderr.
"""


def autoload() -> None:
    """Install the import hooks. Never raises."""
    try:
        import _tieroffload_hooks

        _tieroffload_hooks.install_from_torch()
    except Exception as error:
        try:
            import sys

            sys.stderr.write(f"tieroffload: its import hooks were not installed: {error!r}\n")
        except Exception:
            pass
