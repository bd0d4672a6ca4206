"""The command: lazy sub-commands, one message and exit code 2 for our errors, --json, settings as options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from lightning_tieroffload.cli import doctor as doctor_module
from lightning_tieroffload.cli import main as main_module
from lightning_tieroffload.cli.main import main
from lightning_tieroffload.cli.options import refuse_rest, settings_last, take_settings
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.trace import TIMELINE_FILE_NAME, TraceRecorder


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def stand_in(monkeypatch: pytest.MonkeyPatch, target: Any) -> None:
    monkeypatch.setattr(main_module, "_load", lambda name: target)


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    for name in ("doctor", "launch", "estimate", "plan", "bench", "report", "topology"):
        assert name in text
    assert run("bench", "--help") == 0
    text = capsys.readouterr().out
    assert "io" in text
    assert "train" in text


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doktor") == 2
    assert "doktor" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_the_sub_commands() -> None:
    code = (
        "import sys\n"
        "from lightning_tieroffload.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "loaded = [m for m in sys.modules if m in ('torch', 'numba', 'lightning', 'accelerate')"
        " or m.startswith('lightning_tieroffload.cli.') and not m.endswith('.main')]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_our_error_is_one_message_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_tieroffload", "report", "/nowhere/at/all"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("tieroffload: /nowhere/at/all does not exist")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: list[str]) -> None:
        raise ZeroDivisionError

    stand_in(monkeypatch, broken)
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


def test_every_shape_of_command_is_called_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def with_list(argv: list[str]) -> None:
        seen.append(argv)

    def with_annotations(count: int = 1, name: str = typer.Argument(...)) -> None:
        seen.append((count, name))

    def with_context(ctx: typer.Context, count: int = 1) -> None:
        seen.append((count, ctx.args))

    app = typer.Typer()
    app.command()(with_annotations)
    for target, arguments, expected in (
        (with_list, ["--a", "b"], ["--a", "b"]),
        (with_annotations, ["--count", "3", "x"], (3, "x")),
        (with_context, ["--count", "3", "--io-threads", "2"], (3, ["--io-threads", "2"])),
        (app, ["x", "--count", "4"], (4, "x")),
    ):
        stand_in(monkeypatch, target)
        assert run("plan", *arguments) == 0
        assert seen.pop() == expected


def test_help_of_a_sub_command_is_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def command(depth: int = 1) -> None:
        """Digs."""

    stand_in(monkeypatch, command)
    assert run("bench", "io", "--help") == 0
    text = capsys.readouterr().out
    assert "Digs." in text
    assert "--depth" in text


def test_exit_code_of_a_sub_command_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda argv: 7)
    assert run("plan") == 7


def test_missing_module_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing = main_module._Command("not_there", "command", "Nothing.")
    monkeypatch.setitem(main_module._COMMANDS, "plan", missing)
    assert run("plan", "--help") == 2
    captured = capsys.readouterr()
    assert captured.err.strip().splitlines() == [
        "tieroffload: tieroffload plan is not part of this installation. "
        "Install it with: pip install --upgrade lightning-tieroffload."
    ]


def test_error_inside_a_sub_command_is_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(argv: list[str]) -> None:
        raise CapacityError("unit layers.31 needs 1.9 GiB")

    stand_in(monkeypatch, command)
    assert run("topology") == 2
    assert capsys.readouterr().err == "tieroffload: unit layers.31 needs 1.9 GiB\n"


# ---------------------------------------------------------------- settings as options


def test_settings_are_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("tieroffload_config: {planner: greedy, io_threads: 2}")
    monkeypatch.setenv("TIEROFFLOAD_CONFIG", '{"planner": "lifetime", "profile_steps": 5}')
    config, rest = take_settings(
        [
            *("--device-budget", "22GiB", "--nvme-paths", "/a", "--batch", "8", "--nvme-paths=/b"),
            *("--config", str(file), "--io-threads=3", "--", "--planner", "ilp"),
        ]
    )
    assert config == TierOffloadConfig(
        device_budget="22GiB", nvme_paths=["/a", "/b"], planner="greedy", io_threads=3, profile_steps=5
    )
    assert rest == ["--batch", "8", "--planner", "ilp"]
    with pytest.raises(ConfigError, match="--io-threads needs a value"):
        take_settings(["--io-threads"])


def test_settings_may_stand_before_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tieroffload plan --device-budget 22GiB 3b` is the same command as with the setting last."""
    seen: list[tuple[str, list[str]]] = []

    def with_settings(ctx: typer.Context, name: str = typer.Argument(...)) -> None:
        seen.append((name, list(ctx.args)))

    stand_in(monkeypatch, with_settings)
    words = ["--device-budget", "22GiB", "--planner=ilp"]
    assert run("plan", *words, "3b") == run("plan", "3b", *words) == 0
    assert seen == [("3b", words)] * 2
    assert settings_last(["--io-threads", "3", "a", "--", "--planner", "x"]) == [
        *("a", "--io-threads", "3"),
        *("--", "--planner", "x"),
    ]


def test_help_of_a_command_that_takes_settings_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_settings(ctx: typer.Context) -> None:
        """Does it."""

    stand_in(monkeypatch, with_settings)
    run("plan", "--help")
    assert "--device-budget" in capsys.readouterr().out


def test_left_over_options_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean \"nvme_paths\""):
        refuse_rest(["--nvme-pth", "/a"])
    with pytest.raises(ConfigError, match="value '/a'"):  # what was typed, not an empty string
        refuse_rest(["--nvme-pth", "/a"])
    with pytest.raises(ConfigError, match="set it in the Trainer"):
        refuse_rest(["--batch-size=3"])
    with pytest.raises(ConfigError, match="is not an option"):
        refuse_rest(["x"])


# ---------------------------------------------------------------- doctor and report


def test_doctor_shows_paths_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a narrow terminal a long path goes over several lines; cut off it would be of no use."""
    monkeypatch.setenv("COLUMNS", "60")
    path = "/" + "/".join(["directory"] * 12) + "/end"
    found = [doctor_module.Finding("kernels", "ok", f"kept in {path}")]
    monkeypatch.setattr(doctor_module, "examine", lambda config: found)
    assert run("doctor") == 0
    shown = capsys.readouterr().out.replace("ok", "").replace("kernels", "")
    assert path in "".join(shown.split())


def test_doctor_as_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_tieroffload", "doctor", "--json", "--nvme-paths", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["versions"]["details"]["torch"]
    assert findings["device budget"]["details"]["nbytes"] > 0
    assert findings[f"flash {tmp_path}"]["details"]["free_nbytes"] > 0
    assert findings["strategy name"]["details"]["registered"] is True
    assert not any("could not be examined" in finding["text"] for finding in findings.values())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("switch", ["TORCH_DEVICE_BACKEND_AUTOLOAD", "TIEROFFLOAD_AUTOLOAD"])
def test_doctor_says_when_scripts_will_not_know_the_name(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has imported the package and knows the name: a script, which need not, would not."""
    other = "TIEROFFLOAD_AUTOLOAD" if switch.startswith("TORCH") else "TORCH_DEVICE_BACKEND_AUTOLOAD"
    monkeypatch.delenv(other, raising=False)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [SimpleNamespace(name="lightning_tieroffload")]
    )
    monkeypatch.setenv(switch, "0")
    (finding,) = doctor_module._check_strategy_name()
    assert finding.level == "note"
    assert "after `import lightning_tieroffload`" in finding.text
    assert switch in finding.advice
    monkeypatch.setenv(switch, "1")
    (finding,) = doctor_module._check_strategy_name()
    assert (finding.level, finding.advice) == ("ok", "")


def test_doctor_survives_a_check_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor_module, "_check_processors", broken)
    monkeypatch.setattr(doctor_module, "_check_strategy_name", lambda: iter(()))
    findings = {finding.name: finding for finding in doctor_module.examine(TierOffloadConfig())}
    assert findings["processors"].level == "problem"
    assert "Input/output error" in findings["processors"].text
    assert findings["host memory"].level == "ok"


@pytest.mark.parametrize(("code", "level"), [(22, "note"), (95, "note"), (1, "note"), (28, "problem")])
def test_doctor_when_direct_io_is_refused(
    code: int, level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_open = os.open

    def open_(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(doctor_module, "_file_system_type", lambda path: "ext4")
    finding = doctor_module.probe_direct_io(str(tmp_path))
    assert finding.level == level
    assert finding.details["direct_io"] is False
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_memory_that_poses_as_flash_and_paths_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_module, "_file_system_type", lambda path: "tmpfs")
    assert "host memory, not flash" in doctor_module.probe_direct_io(str(tmp_path)).text
    missing = doctor_module.probe_direct_io(str(tmp_path / "a"))  # a run makes it, so it is no problem
    assert (missing.level, missing.text) == ("note", "does not exist")
    (tmp_path / "file").touch()
    file = doctor_module.probe_direct_io(str(tmp_path / "file"))
    assert (file.level, file.text) == ("problem", "is not a directory")
    assert "mkdir" not in file.advice


def test_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"tiers": {"dram": {"budget_nbytes": 2048, "peak_nbytes": 1024}}, "num_steps": 3}
    (tmp_path / "report.json").write_text(json.dumps(content))
    assert run("report", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == content
    assert run("report", str(tmp_path / "report.json")) == 0
    assert "50%" in capsys.readouterr().out


def test_report_of_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What compute waited for, from the file or from the directory; what is missing or is something else is named."""
    recorder = TraceRecorder(2)
    now_s = time.perf_counter()
    recorder.add("stalls", "fetch (h.0)", now_s - 4, now_s - 1)
    recorder.add("compute", "forward (h.0)", now_s - 1, now_s)
    recorder.end_step(1)
    recorder.end_step(2)
    file = tmp_path / TIMELINE_FILE_NAME
    file.write_text(recorder.to_text())
    for path in (tmp_path, file):
        assert run("report", "--trace", str(path)) == 0
        assert "fetch (h.0)" in capsys.readouterr().out
    assert run("report", "--trace", str(tmp_path), "--gaps", "1", "--json") == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    assert [(step["name"], len(step["gaps"])) for step in steps] == [("step 1", 1), ("step 2", 1)]
    file.write_text("{}")
    assert run("report", "--trace", str(tmp_path)) == 2
    assert "is not a timeline" in capsys.readouterr().err
    file.unlink()
    assert run("report", "--trace", str(tmp_path)) == 2
    assert "trace_steps" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense"])
def test_report_of_something_else_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "report.json").write_text(text)
    assert run("report", str(tmp_path)) == 2
    assert "report.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 6000, '{"tiers": 5}', '{"otherData": 5}', '{"otherData": {"compute": "host"}}',
             '{"otherData": {"compute": "host"}, "traceEvents": [5]}'],
)  # fmt: skip
@pytest.mark.parametrize("option", [(), ("--trace",)])
def test_a_report_or_a_timeline_that_is_none_is_one_message(
    option: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "made_by_nobody.json"
    file.write_text(text)
    assert run("report", *option, str(file)) == 2
    assert file.name in capsys.readouterr().err


# ---------------------------------------------------------------- mistakes on the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((f"bench train --{name} {value}", f"--{name}") for name, value in (
            ("steps", "0"), ("steps", "x"), ("warmup", "0"), ("batch", "0"), ("batch", "9" * 20), ("seq", "1"),
            ("grad-accum", "0"), ("clip", "nan"), ("seed", "-1"), ("seed", "9" * 30), ("probe-seconds", "nan"),
            ("cap", "much"), ("size", "huge"), ("trace", "/nowhere/at/all.json"),
        )),
        *((f"bench io made {words}", words.split()[0]) for words in (
            "--depths 9999999999", "--depths 0", "--file-size 0", "--cell-seconds nan", "--cell-seconds -1",
            "--blocks x", "--blocks 1B", "--rated-tbw nan", "--file-size 1000000TiB", "--file-size 9000000TiB",
        )),
        ("launch --config_file nowhere.yaml nowhere.py", "nowhere.yaml is not a file"),
        ("launch nowhere.py", "nowhere.py does not exist"),
        ("report " + "x" * 5000, "cannot be read"),
        ("report --trace " + "x" * 5000, "cannot be read"),
        ("launch --planner x there.py", "planner='x' is not allowed"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_that_names_it(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.py").touch()
    assert run(*words.split()) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.rglob("*")} <= {"there.py", "made"}, "nothing is left"


def test_launch_ends_as_the_script_ends(tmp_path: Path) -> None:
    """One traceback, the script's, and its exit code: not the launcher's below it."""
    script = tmp_path / "fails.py"
    script.write_text("import sys\nprint('here')\nsys.exit(7)\n")
    done = subprocess.run(
        [sys.executable, "-m", "lightning_tieroffload", "launch", "--cpu", "--num_processes", "1", str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7
    assert "here" in done.stdout
    assert "Traceback" not in done.stderr
    wrong = tmp_path / "wrong.yaml"  # a file that Accelerate refuses
    wrong.write_text("use_cpu: true\n")
    done = subprocess.run(
        [sys.executable, "-m", "lightning_tieroffload", "launch", "--config_file", str(wrong), str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "distributed_type" in done.stderr
    assert "Traceback" not in done.stderr
