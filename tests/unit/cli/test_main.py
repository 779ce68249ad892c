"""The command line itself: its version, and what it says of a wrong command."""

from __future__ import annotations

import pytest

from modelguard.cli import _doctor, main


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "run --prset torch-cpu -- ls",
            "modelguard run: error: unrecognized arguments: --prset. Did you mean '--preset'?",
        ),
        (
            "top --intervall=3",
            "modelguard top: error: unrecognized arguments: --intervall=3. Did you mean '--interval'?",
        ),
        ("top 1 2", "modelguard top: error: unrecognized arguments: 2. modelguard top --help shows what it takes."),
        ("--verson", "modelguard: error: unrecognized arguments: --verson. Did you mean '--version'?"),
    ],
)
def test_an_argument_that_does_not_exist(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command that it was given to names it, and the nearest one that exists."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert 2 == ended.value.code
    assert says == capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "says"), [(LookupError("gone"), "LookupError: gone"), (KeyboardInterrupt(), "interrupted")]
)
def test_an_error_of_ours_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, says: str
) -> None:
    """Status 1 says that there are faults: whatever ends a command otherwise is 2, an interrupt in one line."""

    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(_doctor, "_gather", fail)
    assert 2 == main(["doctor"])
    assert says in capsys.readouterr().err
