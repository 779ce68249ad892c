"""`modelguard doctor`: its output, and its errors."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelguard import diagnosis
from modelguard.cli import _doctor, main
from modelguard.diagnosis import _doctor_report as report
from modelguard.diagnosis._facts import Facts, Variable

SECRET = "hunter2-word"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of this machine must not influence the result."""
    for name in ("LD_PRELOAD", "LRU_CACHE_CAPACITY", "MALLOC_CONF", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, object]]]:
    """What was asked of a command; the answer is one fault if it sets a cap, else none. Nothing is started."""
    asked: list[tuple[list[str], dict[str, object]]] = []

    def examined(words: list[str], **options: object) -> Facts:
        asked.append((words, options))
        variables = (Variable("LRU_CACHE_CAPACITY", "9", "exec", "here"),) if "faulty" in words else ()
        return Facts("it", variables=variables, words=tuple(words))

    monkeypatch.setattr(diagnosis, "facts_of_command", examined)
    return asked


def test_a_fault_is_status_1(capsys: pytest.CaptureFixture[str], found: list[object]) -> None:
    """It is printed with its number, and with the line to paste."""
    assert 1 == main(["doctor", "--", "faulty", "app:app"])
    out = capsys.readouterr().out
    assert "MG201 fault" in out
    assert "env ONEDNN_PRIMITIVE_CACHE_CAPACITY=9 faulty app:app" in out
    assert "\x1b" not in out
    assert 1 == len(found)


def test_no_fault_is_status_0(capsys: pytest.CaptureFixture[str], found: list[object]) -> None:
    """Notes do not fail it."""
    assert 0 == main(["doctor", "--", "program", "app:app"])
    assert "no faults" in capsys.readouterr().out
    assert found


def test_json(capsys: pytest.CaptureFixture[str], found: list[tuple[list[str], dict[str, object]]]) -> None:
    """--json before the command belongs to the doctor, after it to the command."""
    assert 1 == main(["doctor", "--json", "--", "faulty", "--json"])
    assert "MG201" in [finding["number"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    main(["doctor", "--", "program", "--json"])
    assert capsys.readouterr().out.startswith("Examined:")
    assert ["faulty", "--json"] == found[0][0]


def test_options_of_a_command(found: list[tuple[list[str], dict[str, object]]]) -> None:
    """Requests, their number and the patience reach the examination."""
    main(["doctor", "--request", "/x", "--count", "7", "--wait", "9", "--", "program"])
    main(["doctor", "program"])
    assert {"request": "/x", "count": 7, "patience": 9} == found[0][1]
    assert {"request": None, "count": 100, "patience": 120.0} == found[1][1]


def test_an_ignored_fault_is_status_0(found: list[object]) -> None:
    """--ignore leaves a check out."""
    assert 0 == main(["doctor", "--ignore", "MG201", "--", "faulty"])
    assert found


def test_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str], found: list[object]) -> None:
    """The first run writes what is there; later runs report only what is new."""
    file = tmp_path / "doctor.json"
    assert 0 == main(["doctor", "--baseline", str(file), "--", "faulty"])
    assert {"accepted": ["MG201"]} == json.loads(file.read_text())
    assert 0 == main(["doctor", "--baseline", str(file), "--", "faulty"])
    file.write_text('{"accepted": []}')
    assert 1 == main(["doctor", "--baseline", str(file), "--", "faulty"])
    file.write_text("nonsense")
    assert 2 == main(["doctor", "--baseline", str(file), "--", "faulty"])
    assert "--baseline" in capsys.readouterr().err
    assert 4 == len(found)


def test_a_closed_pipe_and_a_full_disk(found: list[object]) -> None:
    """One line at most, and no traceback."""
    command = [sys.executable, "-m", "modelguard", "doctor"]
    with open("/dev/full", "w") as full:  # noqa: PTH123 - not a file
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (2, 1) == (done.returncode, len(done.stderr.splitlines()))
    assert "No space left" in done.stderr
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    os.close(writer)
    assert "" == done.stderr
    assert [] == found


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--pid", "4194305"], 2, "--pid=4194305: does not exist"),
        (["--pid", "many"], 2, "must be a process id"),
        (["--pid", "0"], 2, "must be a process id"),
        (["--"], 2, "command='': must not be empty"),
        (["--", "no-such-command-here"], 127, "no-such-command-here"),
        (["--pid", "1", "--", "x"], 2, "one thing"),
        (["--request", "/"], 2, "requires a command"),
        (["--count", "many", "--", "true"], 2, "whole number"),
        (["--request", "x", "--", "true"], 2, "must be a path"),
        (["--request", "http://[::1", "--", "true"], 2, "must be a path"),
        (["--request", "http://127.0.0.1:port/", "--", "true"], 2, "must be a path"),
        (["--request", "/find?text=zwei W\u00f6rter", "--", "true"], 2, "Write it as /find?text=zwei%20W%C3%B6rter."),
        (["--ignore", "MG999"], 2, "must be the number of a check"),
    ],
)
def test_bad_input(words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr says what is wrong and what to do, and stdout is empty."""
    assert status == main(["doctor", *words])
    out, error = capsys.readouterr()
    assert "" == out
    assert 1 == len(error.splitlines())
    assert error.startswith("modelguard doctor: ")
    assert says in error


def test_an_unknown_option_is_refused() -> None:
    """The usage is printed, with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--fix"])
    assert 2 == ended.value.code


def test_secrets_in_what_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Error messages hide secrets, too."""
    monkeypatch.setenv("MY_TOKEN", SECRET)
    for words in (["--ignore", SECRET, "--pid", SECRET], ["--", f"postgres://me:{SECRET}@host"], ["--pid", SECRET]):
        main(["doctor", *words])
        out, error = capsys.readouterr()
        assert SECRET not in out + error


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The report begins on a line of its own, and says nothing of calls that are not known."""
    terminal, measured = Terminal(), diagnosis.Measured(per="milliseconds")

    def watched(*_: object, progress: Callable[[dict[str, str]], None], **__: object) -> diagnosis.GrowthReport:
        progress({"phase": "drive"})
        return diagnosis.GrowthReport("it", "steady", measured=measured)

    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(diagnosis, "diagnose_process", watched)
    assert 0 == main(["diagnose", "--pid", "7"])
    assert terminal.getvalue().endswith("drive\r\x1b[K")
    assert "Verdict: memory does not grow (0 B in 0 seconds)" in capsys.readouterr().out


@pytest.fixture
def faulty() -> report.DoctorReport:
    return report.examine(Facts("it", variables=(Variable("LRU_CACHE_CAPACITY", "9", "exec", "here"),)))


def test_colours_in_a_terminal(faulty: report.DoctorReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is a fault is red; a terminal without colours shows none."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, shown in (("xterm-256color", "\x1b[1;31mMG201 fault"), ("dumb", "\nMG201 fault")):
        monkeypatch.setenv("TERM", name)
        terminal = Terminal()
        _doctor._show(faulty, terminal)
        assert shown in terminal.getvalue()


def test_no_color_is_respected(faulty: report.DoctorReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR turns them off, see https://no-color.org."""
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    _doctor._show(faulty, terminal)
    assert "MG201 fault" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()
