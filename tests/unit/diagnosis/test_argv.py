"""Command lines are split as the programs themselves do it."""

from __future__ import annotations

import pytest

from modelguard.diagnosis._argv import GUNICORN, UVICORN, Arguments, split


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "4", "app:app"],
        ["--workers=4", "app:app"],
        ["app:app", "-w", "4"],
        ["-w4", "app:app"],
        ["-w=4", "app:app"],
        ["--worker", "4", "app:app"],  # ambiguous: argparse would reject it, and nothing is guessed
    ],
)
def test_options_with_a_value(words: list[str]) -> None:
    """The value may be the next word, or a part of the same word."""
    found = split(words, GUNICORN)
    assert ("app:app",) == found.rest
    assert "4" == found.last("--workers", "--worker")


def test_flags_take_no_value() -> None:
    """A word behind a flag is not its value."""
    assert Arguments({"--preload": ("",), "--reload": ("",)}, ("app:app",)) == split(
        ["--preload", "--reload", "app:app"], GUNICORN
    )


def test_abbreviations() -> None:
    """Programs with argparse accept unambiguous abbreviations; those with click do not."""
    assert "9" == split(["--max-requests-j", "9"], GUNICORN).last("--max-requests-jitter")
    assert "" == split(["--preloa"], GUNICORN).last("--preload")
    assert None is split(["--worker", "2"], UVICORN).last("--workers")


def test_options_that_are_given_again() -> None:
    """All values are kept, and the last one counts."""
    found = split(["-e", "A=1", "--env", "B=2", "-w", "1", "-w", "2"], GUNICORN)
    assert ("A=1", "B=2") == found.options["--env"]
    assert "2" == found.last("--workers")


def test_after_two_dashes_there_are_no_options() -> None:
    """All words after them are positional."""
    assert Arguments({}, ("-w", "4")) == split(["--", "-w", "4"], GUNICORN)


def test_an_option_at_the_end_without_its_value() -> None:
    """The program itself would reject it; here its value is empty."""
    assert "" == split(["-w"], GUNICORN).last("--workers")
