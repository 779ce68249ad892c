"""The options of the demo: what it rejects before it starts any server."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from examples.demo.__main__ import main


def rejected(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run the demo with options that it does not accept, and give its message."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert 2 == ended.value.code
    return capsys.readouterr().err


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every module that the demo needs look installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("seconds", ["1", "soon", "nan"])
def test_a_length_that_is_too_short_or_not_a_number(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid lengths are rejected with status 2."""
    assert "--seconds" in rejected(capsys, "--seconds", seconds)


@pytest.mark.usefixtures("complete")
def test_a_folder_without_the_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the folder, and the option to change."""
    error = rejected(capsys, "--app-dir", str(tmp_path))
    assert str(tmp_path) in error
    assert "--app-dir" in error


@pytest.mark.usefixtures("complete")
def test_a_growth_that_is_not_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    """A bound that the guard would reject is rejected before any server starts."""
    error = rejected(capsys, "--growth", "much")
    assert "--growth" in error
    assert "much" in error


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is missing is named once, as the command that installs all of it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in {"ja_ginza", "uvicorn"} else name)
    assert rejected(capsys).endswith("pip install ja-ginza uvicorn\n")
