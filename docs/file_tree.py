"""Writes the file tree at the end of README.md: a line a file, from the first sentence of each file.

`make readme` runs it; a test in tests/house fails when the tree is out of date.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- file tree: begin (make readme) -->", "<!-- file tree: end -->"

# What does not say in its first line what it is.
DESCRIPTIONS = {
    ".ci/run": "what continuous integration runs: make test",
    ".gitignore": "what git leaves alone",
    "CHANGELOG.md": "what changed, for users",
    "CONTRIBUTING.md": "the rules, on one page",
    "LICENSE": "Apache-2.0",
    "Makefile": "demo, test, check, bench, readme",
    "README.md": "this page",
    "constraints.txt": "a set of versions that is known to work",
    "docs/design.md": "why it is so: named notes, dated decisions",
    "docs/log.md": "what was measured, also what was dropped",
    "docs/pictures/topology_ga_4096.png": "cost over generations of the genetic optimiser, from the log",
    "docs/settings.md": "every setting, with what it costs and when to touch it",
    "lightning_tieroffload/py.typed": "tells type checkers that the package has types",
    "pyproject.toml": "the package, its dependencies, the tools' settings",
}


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring without its floor, or of the comment that a file starts with."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        docstring = ast.get_docstring(ast.parse(text)) or ""
        paragraph = " ".join(docstring.split("\n\n")[0].split())
        paragraph = re.sub(r"^Floor \d+\. ", "", paragraph)
    else:
        comment = [line.lstrip("# ").rstrip() for line in text.splitlines()[:3] if line.startswith("#")]
        paragraph = " ".join(comment)
    sentence = re.split(r"(?<=[a-z0-9)`\"'…])[.;] ", paragraph + " ")[0].strip().rstrip(".:")
    return sentence


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).is_file()]


def file_tree() -> str:
    """The tree as text, folders before the files in them, markers not included."""
    lines: list[str] = []
    known_folders: set[str] = set()
    for name in sorted(tracked_files(), key=lambda name: (name.count("/") == 0, name.split("/"))):
        path = ROOT / name
        if path.name == "__init__.py" and name != "lightning_tieroffload/__init__.py":
            continue
        folders = name.split("/")[:-1]
        for depth in range(len(folders)):
            folder = "/".join(folders[: depth + 1])
            if folder not in known_folders:
                known_folders.add(folder)
                lines.append("  " * depth + folders[depth] + "/")
        words = DESCRIPTIONS.get(name) or first_sentence(path)
        entry = "  " * len(folders) + path.name
        lines.append(f"{entry:<36}{words}".rstrip())
    return "\n".join(lines)


def readme_with_tree(readme: str) -> str:
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md has lost its markers {BEGIN!r} and {END!r}.")
    return f"{head}{BEGIN}\n```\n{file_tree()}\n```\n{END}{tail}"


if __name__ == "__main__":
    target = ROOT / "README.md"
    old = target.read_text()
    new = readme_with_tree(old)
    if "--check" in sys.argv:
        sys.exit(new != old)
    target.write_text(new)
