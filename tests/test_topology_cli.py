"""`tieroffload topology`: text, JSON, pictures, and errors as one message."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_tieroffload.cli.topology import app, main
from lightning_tieroffload.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"
WAFER = str(CONFIGS / "mesh_wafer_48g.toml")
NEEDS = ["--need", "die-0-0=120GB", "--need", "die-1-0=100GB", "--need", "die-2-1=60GB"]


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_show_a_mesh(tmp_path):
    text = run("show", WAFER, "--png", tmp_path / "mesh.png")
    assert text.startswith("wafer-48g: 56 sites, 194 directed links")
    assert "largest distance 13 hops" in text
    assert is_png(tmp_path / "mesh.png")
    shown = json.loads(run("show", WAFER, "--json"))
    assert len(shown["sites"]) == 56
    assert shown["sites"][9] == {
        "name": "die-1-1", "kind": "die", "x": 1, "y": 1, "dram_nbytes": 48 * 10**9, "compute_flops_per_s": 512e12,
    }  # fmt: skip
    assert shown["distances"][0][55] == 13


def test_show_this_machine(tmp_path):
    shown = json.loads(run("show", "--json", "--png", tmp_path / "host.png"))
    assert shown["name"] == "host"
    assert shown["sites"][0]["kind"] == "node"
    assert is_png(tmp_path / "host.png")
    assert shown["bandwidths_assumed"]
    text = run("show")
    assert "node0" in text
    assert "assumed: sysfs states distances and no rates" in text


def test_allocate_needs(tmp_path):
    answer = json.loads(run("allocate", WAFER, *NEEDS, "--json", "--png", tmp_path / "a.png"))
    assert is_png(tmp_path / "a.png")
    usable = int(48e9 * 0.95)
    assert answer["borrowed_nbytes"] == 280 * 10**9 - 3 * usable
    assert sum(flow["nbytes"] for flow in answer["flows"]) == answer["borrowed_nbytes"]
    assert answer["optimum_gap_frac"] == pytest.approx(0, abs=1e-9)
    assert answer["nearest_gap_frac"] > 0
    nearest = json.loads(run("allocate", WAFER, *NEEDS, "--order", "nearest", "--json"))
    assert nearest["global_cost_s"] > answer["global_cost_s"]
    text = run("allocate", WAFER, *NEEDS)
    assert text.splitlines()[0].split() == ["sender", "helper", "borrowed", "hops"]
    assert "0.00% above the optimum" in text


def test_allocate_a_model(tmp_path):
    text = run("allocate", WAFER, "--model", "llama2-30b", "--png", tmp_path / "m.png")
    assert "llama2-30b on wafer-48g (simulated)" in text
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["variant", "none", "regret"]
    assert is_png(tmp_path / "m.png")


def test_optimise(tmp_path):
    arguments = ["optimise", WAFER, "--generations", "60", "--population", "20", "--seed", "3"]
    answer = json.loads(run(*arguments, "--json", "--png", tmp_path / "o.png", "--history-png", tmp_path / "h.png"))
    rows = {row["variant"]: row for row in answer["outcomes"]}
    assert list(rows) == ["none", "nearest", "regret", "placed", "genetic"]
    assert answer["simulated"]
    assert rows["placed"]["global_cost_s"] < rows["nearest"]["global_cost_s"]
    assert len(rows["placed"]["positions"]) == 14
    assert is_png(tmp_path / "o.png")
    assert is_png(tmp_path / "h.png")
    assert json.loads(run(*arguments, "--json")) == answer  # the same seed, the same placement


def test_links(tmp_path):
    answer = json.loads(run("links", WAFER, "--model", "llama2-30b", "--json", "--png", tmp_path / "l.png"))
    assert is_png(tmp_path / "l.png")
    assert len(answer["links"]) == 194
    for kind in ("pipeline", "balancing"):
        busy = [link[f"{kind}_frac"] for link in answer["links"]]
        assert max(busy) == pytest.approx(answer["summary"][kind]["peak_frac"])
        assert sum(busy) / len(busy) == pytest.approx(answer["summary"][kind]["mean_frac"])
    by_need = json.loads(run("links", WAFER, "--need", "die-0-0=300GB", "--json"))
    assert by_need["summary"]["congestion"]["peak_frac"] <= by_need["summary"]["dimension"]["peak_frac"] == 1
    text = run("links", WAFER, "--model", "llama2-30b", "--variant", "placed", "--top", "3")
    assert len(text.splitlines()) == 1 + 1 + 3 + 2


def test_errors_of_ours_pass_through_to_the_parent_command():
    with pytest.raises(ConfigError, match=r"no\.toml"):
        CliRunner().invoke(app, ["show", "no.toml"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["allocate", WAFER], "either --need SITE=SIZE (repeat it) or --model NAME"),
        (["allocate", WAFER, "--need", "die-0-0"], "write SITE=SIZE"),
        (["allocate", WAFER, "--need", "die-0-0=big"], "--need die-0-0='big' is not a size"),
        (["allocate", WAFER, "--need", "die-0-9=5GB"], "no site 'die-0-9'"),
        (["allocate", WAFER, "--need", "die-0-0=5TB"], "too little. Largest senders"),
        (["allocate", WAFER, *NEEDS, "--order", "far"], "order='far' is not known"),
        (["allocate", WAFER, "--model", "gpt-175b"], "gpt-175b has 2.55 TiB of state"),
        (["optimise", WAFER, "--model", "x"], "Known: llama2-30b, llama3-70b, gpt-175b, moe-137b"),
        (["optimise", WAFER, "--population", "1"], "population=1 must be 4 or more"),
        (["optimise", WAFER, "--population", "99999999999999999999"], "must be 4 or more, to 1048576"),
        (["optimise", WAFER, "--generations", "99999999999999999999"], "must be 1 or more, and below 2^31"),
        (["optimise", WAFER, "--seed", "99999999999999999999"], "must be 0 or more, and below 2^32"),
        (["optimise", WAFER, "--seed", "-1"], "seed=-1 must be 0 or more"),
        (["links", WAFER, "--model", "llama2-30b", "--variant", "x"], "variant 'x' is not known"),
        (["show", WAFER, "--png", "/nonexistent/p.png"], "cannot write the picture /nonexistent/p.png"),
    ],
)
def test_errors_are_one_message(arguments, text, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.startswith("tieroffload topology: ")


def test_as_a_module(tmp_path):
    """What `python -m` prints for a broken file: one line with file, line and field, and exit code 2."""
    broken = tmp_path / "broken.toml"
    broken.write_text('[grid]\nwidth = 2\nheight = 2\ndram = "-1GB"\nlink_bandwidth = "1TB"\n')
    done = subprocess.run(
        [sys.executable, "-m", "lightning_tieroffload.cli.topology", "show", str(broken)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == f"tieroffload topology: {broken}:4: grid.dram: '-1GB' is negative: it must be 0 or more.\n"
    assert done.stdout == ""


def test_no_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["show", WAFER, "--png", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not Path("x.png").exists()
