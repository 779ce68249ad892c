"""Every exit status of every command: as the command itself says, as the page says, and as it is."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelguard import cli

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc"),
]

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
APP = """
import os, sys
from modelguard import control, guard
kept = []
def steady(): pass
def opens(): kept.append(open(os.devnull))
def fails(): raise KeyError("private")
if __name__ == "__main__":
    models = guard(dict, reload_on=None, name="model"), guard(dict, reload_on=None, name="modèle")
    control.listen()
    print("ready", flush=True)
    sys.stdin.read()
"""
CALLS = ("--calls", "240", "--try", "0")

#: ``PID`` stands for a process that takes commands.
RUNS = [
    (("completion", "bash"), 0),
    (("completion", "sh"), 2),
    (("ctl", "PID", "status"), 0),
    (("ctl", "PID", "reload", "other"), 1),
    (("ctl", "4194305", "status"), 2),
    (("diagnose", "app:steady", *CALLS), 0),
    (("diagnose", "app:opens", *CALLS), 1),
    (("diagnose", "exits:f"), 2),
    (("diagnose", "app:fails", *CALLS), 3),
    (("docs", "errors"), 0),
    (("docs", "nothing"), 2),
    (("doctor",), 0),
    (("doctor", "--", "no-such-command-here"), 127),
    (("doctor", "--", "/etc/passwd"), 126),
    (("doctor", "--", sys.executable, "-c", ""), 2),
    (("presets",), 0),
    (("presets", "nothing"), 2),
    (("run", "--print", "--", "true"), 0),
    (("run", "--", "sh", "-c", "exit 9"), 9),
    (("run", "--allocator", "nothing", "--", "true"), 2),
    (("run", "--", "./app.py"), 126),
    (("run", "--", "no-such-command-here"), 127),
    (("top", "--once", "PID"), 0),
    (("top", "4194305"), 2),
]
#: Needs a service with a fault, which the doctor's own tests have; and the status of whatever is run.
ELSEWHERE = {("doctor", 1), ("run", 0)}


def epilogs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each command says of its exit statuses."""
    found: dict[str, str] = {}
    add = argparse._SubParsersAction.add_parser

    def noted(self: object, name: str, **options: str) -> argparse.ArgumentParser:
        found[name] = options["epilog"].removeprefix("exit status: ")
        return add(self, name, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(argparse._SubParsersAction, "add_parser", noted)
    cli.main(["--version"])
    return found


def test_the_page_has_what_the_commands_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """One table has every command, with the words of its help, and nothing else."""
    rows = dict(re.findall(r"^\| `modelguard (\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert epilogs(monkeypatch) == rows


def test_each_status_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No status of the table is left out of the runs below."""
    said = {
        (name, int(status))
        for name, text in epilogs(monkeypatch).items()
        for status in re.findall(r"(?:^|, |or )(\d+) ", text)
    }
    assert said <= {(words[0], status) for words, status in RUNS} | ELSEWHERE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("app")
    (made / "app.py").write_text(APP, "utf-8")
    (made / "exits.py").write_text("raise SystemExit(5)")
    return made


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[int]:
    """The id of a process that takes commands."""
    words = [sys.executable, "app.py"]
    with subprocess.Popen(words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"ready\n" == process.stdout.readline()
        yield process.pid
        process.kill()


def modelguard(folder: Path, *words: str, redirected: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelguard", *words]
    shell = ["bash", "-c", f'set -o pipefail; "$@" {redirected}', "bash"] if redirected else []
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    return subprocess.run(
        [*shell, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=150
    )


@pytest.mark.parametrize(("words", "status"), RUNS, ids=str)
def test_the_status_of_a_command(folder: Path, service: int, words: tuple[str, ...], status: int) -> None:
    """It is the one of the table, and no error is a traceback."""
    done = modelguard(folder, *(str(service) if word == "PID" else word for word in words))
    assert status == done.returncode, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


FULL = ">/dev/full"
OUTPUTS = [">&-", FULL, "| head -c 10 >/dev/null", "2>&-", "0<&-"]


@pytest.mark.parametrize("redirected", OUTPUTS)
@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("--version",), 0),
        (("doctor", "--json"), 0),
        (("doctor",), 0),
        (("docs", "doctor"), 0),
        (("presets", "torch-cpu"), 0),
        (("completion", "bash"), 0),
        (("run", "--print", "--", "true"), 0),
        (("top", "--once", "PID"), 0),
        (("ctl", "PID", "status"), 0),
        (("docs", "nothing"), 2),
        (("diagnose", "exits:f"), 2),
    ],
)
def test_an_output_that_is_closed_or_full(
    folder: Path, service: int, words: tuple[str, ...], status: int, redirected: str
) -> None:
    """What nobody reads changes no status; what cannot be written is status 2 in one line. Nothing is a traceback."""
    chosen = [str(service) if word == "PID" else word for word in words]
    done = modelguard(folder, *chosen, redirected=redirected)
    assert (2 if redirected == FULL else status) == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_pipe_that_closes_keeps_the_verdict(folder: Path) -> None:
    """The status of a diagnosis is its verdict, also where only its beginning is read."""
    done = modelguard(folder, "diagnose", "app:opens", *CALLS, "--json", redirected="| head -c 10")
    assert (1, "") == (done.returncode, done.stderr)


def test_what_the_output_cannot_show_keeps_the_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in another script than that of the terminal is escaped."""
    (folder / "会話.py").write_text("kept = []\ndef 要約(): kept.append(open('app.py'))\n", "utf-8")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = modelguard(folder, "diagnose", "会話:要約", *CALLS)
    assert (1, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("Diagnosed: \\u4f1a\\u8a71:")


def test_a_name_is_shown_in_the_locale_c(folder: Path, service: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There an output stream of Python lets bytes pass, and no other script: that is escaped too."""
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    done = modelguard(folder, "ctl", str(service), "status")
    assert (0, "") == (done.returncode, done.stderr)
    assert "  mod\\xe8le  new\n" in done.stdout
