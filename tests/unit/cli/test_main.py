"""The command line itself: its version, and what it says of a wrong command."""

from __future__ import annotations

import pytest

from modelguard.cli import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` names the program and exits well."""
    assert 0 == main(["--version"])
    assert capsys.readouterr().out.startswith("modelguard ")


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Called with nothing to do, it shows what it could do, and does not claim success."""
    assert 2 == main([])
    assert "doctor" in capsys.readouterr().err


def test_a_command_that_does_not_exist() -> None:
    """A misspelt command is rejected with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(["doctro"])
    assert 2 == ended.value.code
