"""`modelguard run`: its options, and its errors, in one line and with a status."""

from __future__ import annotations

import os
import shlex
from typing import Any

import pytest

from modelguard.cli import main
from modelguard.environment import _launcher


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch) -> list[_launcher.Plan]:
    """Collects the plans that would have been executed."""
    plans: list[_launcher.Plan] = []
    monkeypatch.setattr(_launcher, "become", plans.append)
    return plans


def words(*argv: str) -> list[str]:
    return ["run", "--preset", "torch-cpu", *argv]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--", "sh", "-c", "exit"], ["sh", "-c", "exit"]),
        (["sh", "-c", "exit"], ["sh", "-c", "exit"]),
        (["--", "sh", "--", "--preset", "x"], ["sh", "--", "--preset", "x"]),
        (["--", "sh", "--print", "--workers"], ["sh", "--print", "--workers"]),
        (["sh", "--help"], ["sh", "--help"]),
    ],
)
def test_the_command_is_everything_behind(become: list[_launcher.Plan], argv: list[str], expected: list[str]) -> None:
    """The command keeps its own options, a second -- included; the first -- may be left out."""
    main(words(*argv))
    assert expected == list(become[0].argv)


def test_presets_are_composed(become: list[_launcher.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several presets are composed, each with the given sizes."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)
    presets = ["--preset", "torch-cpu-dynamic", "--preset", "low-memory", "--distinct-shapes", "3", "--workers", "2"]
    main(["run", *presets, "--", "sh"])
    assert {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "MALLOC_ARENA_MAX"} <= become[0].added.keys()
    assert "64" != become[0].added["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]


def test_the_allocator_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --allocator the allocator is left alone."""
    asked: list[Any] = []

    def plan(command: Any, *, preset: Any, allocator: str) -> _launcher.Plan:
        asked.append(allocator)
        return _launcher.Plan("/bin/sh", ("sh",), {}, {}, ("a remark",))

    monkeypatch.setattr(_launcher, "plan", plan)
    main(["run", "--print", "--", "sh"])
    main(["run", "--allocator", "auto", "--print", "--", "sh"])
    assert ["none", "auto"] == asked


def test_print(
    become: list[_launcher.Plan], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """It prints a line that a shell reads back, also with words that are not valid text, and starts nothing."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    odd = os.fsdecode(b"caf\xe9 'quoted'")
    assert 0 == main(words("--print", "--", "sh", "-c", odd))
    line = os.fsdecode(capfdbinary.readouterr().out)
    assert ["sh", "-c", odd] == shlex.split(line)[-3:]
    assert "env" == shlex.split(line)[0]
    assert any(word.startswith("OPENBLAS_NUM_THREADS=") for word in shlex.split(line))
    assert [] == become


@pytest.mark.parametrize(
    ("argv", "status", "fix"),
    [
        (["run"], 2, "Write it after --"),
        (["run", "--"], 2, "Write it after --"),
        (["run", "--preset", "torch-cpu", "--"], 2, "Write it after --"),
        (["run", "--preset", "torch-cup", "--", "sh"], 2, "torch-cpu"),
        (["run", "--preset", "", "--", "sh"], 2, "torch-cpu"),
        (["run", "--allocator", "jemaloc", "--", "sh"], 2, "jemalloc"),
        (words("--workers", "two", "--", "sh"), 2, "must be a whole number of at least 1. Write --"),
        (words("--workers", "2.5", "--", "sh"), 2, "must be a whole number of at least 1. Write --"),
        (words("--workers", "0", "--", "sh"), 2, "a whole number of at least 1"),
        (words("--workers=-1", "--", "sh"), 2, "must be a whole number of at least 1. Write --"),
        (words("--workers", "9" * 5000, "--", "sh"), 2, "must be a whole number of at least 1. Write --"),
        (words("--workers", "\u0664", "--", "sh"), 2, "must be a whole number of at least 1. Write --"),
        (words("--distinct-shapes", "many", "--", "sh"), 2, "must be a whole number of at least 1. Write --"),
        (["run", "--workers", "2", "--", "sh"], 2, "--preset torch-cpu"),
        (["run", "--", "no-such-command"], 127, "Correct the name"),
        (["run", "--", "/"], 126, "Name a program"),
        (["run", "--print", "--", "no-such-command"], 127, "Correct the name"),
        (["run", "--", "sh", "a\0b"], 2, "Remove it"),
        (["run", "--", "sh\0"], 2, "Remove it"),
        (["run", "--preset", "torch\0", "--", "sh"], 2, "torch-cpu"),
    ],
)
def test_bad_input(
    become: list[_launcher.Plan], capsys: pytest.CaptureFixture[str], argv: list[str], status: int, fix: str
) -> None:
    """One line on stderr has the fix, the status is right, and nothing is started."""
    assert status == main(argv)
    captured = capsys.readouterr()
    assert "" == captured.out
    assert 1 == len(captured.err.splitlines())
    assert captured.err.startswith("modelguard run: ")
    assert fix in captured.err
    assert [] == become


def test_without_options(become: list[_launcher.Plan], capsys: pytest.CaptureFixture[str]) -> None:
    """Without a preset and an allocator the command is started unchanged, with a note."""
    main(["run", "--", "sh"])
    assert {} == become[0].added
    assert "nothing is set" in capsys.readouterr().err


def test_a_closed_stderr(become: list[_launcher.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed stderr does not keep the command from starting."""

    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        flush = write

    monkeypatch.setattr("sys.stderr", Gone())
    main(["run", "--", "sh"])
    assert 1 == len(become)
