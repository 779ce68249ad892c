"""The command line: what it refuses, and what it says then."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from modelguard.cli import main
from modelguard.cli.demo import failure


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` names the program and exits well."""
    assert 0 == main(["--version"])
    assert capsys.readouterr().out.startswith("modelguard ")


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Called with nothing to do, it shows what it could do, and does not claim success."""
    assert 2 == main([])
    assert "demo" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["dmeo"], ["demo", "--seconds", "1"], ["demo", "--seconds", "soon"], ["demo", "--seconds", "nan"]]
)
def test_usage_errors(words: list[str]) -> None:
    """What cannot be meant is refused with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert 2 == ended.value.code


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every module that the demo needs look installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("complete")
def test_services_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Outside the source tree the demo says where it looked, and which option says where else."""
    assert 2 == main(["demo", "--app-dir", str(tmp_path)])
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert "--app-dir" in error


@pytest.mark.usefixtures("complete")
def test_a_growth_that_is_no_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bound that the guard would refuse is refused before any server starts."""
    for name in ("app", "unguarded"):
        (tmp_path / f"{name}.py").touch()
    assert 2 == main(["demo", "--app-dir", str(tmp_path), "--growth", "much"])
    assert "--growth" in capsys.readouterr().err


def test_missing_modules(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing is named once, as the command that installs all of it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in {"ja_ginza", "uvicorn"} else name)
    assert 2 == main(["demo"])
    assert "pip install ja-ginza uvicorn\n" in capsys.readouterr().err


def test_nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything there, nothing is said."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    failure.require_modules()
