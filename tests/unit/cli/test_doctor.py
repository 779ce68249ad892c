"""`modelguard doctor`: its output, and its errors."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from modelguard.cli import _doctor, main
from modelguard.diagnosis import _report as report
from modelguard.diagnosis._facts import Facts, Variable

SECRET = "hunter2-word"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of this machine must not influence the result."""
    for name in ("LD_PRELOAD", "LRU_CACHE_CAPACITY", "MALLOC_CONF", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command that exists, and is never run."""
    file = tmp_path / "uvicorn"
    file.write_text("#!/no/such/python3.12\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    return "uvicorn"


def test_a_fault_is_status_1(capsys: pytest.CaptureFixture[str], program: str) -> None:
    """It is printed with its number, and the command is not run."""
    assert 1 == main(["doctor", "--", "env", "LRU_CACHE_CAPACITY=9", program, "app:app"])
    out = capsys.readouterr().out
    assert "MG201 fault" in out
    assert "\x1b" not in out


def test_no_fault_is_status_0(capsys: pytest.CaptureFixture[str], program: str) -> None:
    """Notes do not fail it."""
    assert 0 == main(["doctor", "--", program, "app:app"])
    assert "no faults" in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str], program: str) -> None:
    """--json before the command belongs to the doctor, after it to the command."""
    assert 1 == main(["doctor", "--json", "--", "env", "LRU_CACHE_CAPACITY=9", program, "--json"])
    assert "MG201" in [finding["number"] for finding in json.loads(capsys.readouterr().out)["findings"]]
    main(["doctor", "--", program, "--json"])
    assert capsys.readouterr().out.startswith("Examined:")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--pid", "4194305"], 2, "--pid=4194305: does not exist"),
        (["--pid", "many"], 2, "must be a process id"),
        (["--pid", "0"], 2, "must be a process id"),
        (["--gunicorn", "no.conf.py"], 2, "--gunicorn='no.conf.py': does not exist"),
        (["--"], 2, "command='': must not be empty"),
        (["--", "no-such-command-here"], 127, "no-such-command-here"),
        (["--pid", "1", "--gunicorn", "x"], 2, "one thing"),
        (["--pid", "1", "--", "x"], 2, "one thing"),
        (["--gunicorn", "x", "--", "x"], 2, "one thing"),
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
    for words in (["--gunicorn", SECRET], ["--", f"postgres://me:{SECRET}@host"], ["--pid", SECRET]):
        main(["doctor", *words])
        out, error = capsys.readouterr()
        assert SECRET not in out + error


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def faulty() -> report.DoctorReport:
    return report.examine(Facts("it", variables=(Variable("LRU_CACHE_CAPACITY", "9", "exec", "here"),)))


def test_colours_in_a_terminal(faulty: report.DoctorReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich prints them, if it is installed."""
    pytest.importorskip("rich")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    _doctor._show(faulty, terminal)
    assert "\x1b[1;31mMG201 fault" in terminal.getvalue()


def test_no_color_is_respected(faulty: report.DoctorReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR turns them off, see https://no-color.org."""
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    _doctor._show(faulty, terminal)
    assert "MG201 fault" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_without_rich_it_is_plain(faulty: report.DoctorReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the colours are missing."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name in ("rich", "rich.console", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    _doctor._show(faulty, terminal)
    assert "MG201 fault" in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()
