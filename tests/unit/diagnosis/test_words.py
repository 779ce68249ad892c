"""Command lines are taken apart as the programs themselves do it."""

from __future__ import annotations

import pytest

from modelguard.diagnosis.words import GUNICORN, UVICORN, Words, split


@pytest.mark.parametrize(
    "words",
    [
        ["--workers", "4", "app:app"],
        ["--workers=4", "app:app"],
        ["app:app", "-w", "4"],
        ["-w4", "app:app"],
        ["-w=4", "app:app"],
        ["--worker", "4", "app:app"],  # of two that begin so: argparse would refuse it, and nothing is guessed
    ],
)
def test_options_with_a_value(words: list[str]) -> None:
    """A value may follow, or stand in the same word."""
    found = split(words, GUNICORN)
    assert ("app:app",) == found.rest
    assert "4" == found.last("--workers", "--worker")


def test_flags_take_no_value() -> None:
    """What follows a flag stands for itself."""
    assert Words({"--preload": ("",), "--reload": ("",)}, ("app:app",)) == split(
        ["--preload", "--reload", "app:app"], GUNICORN
    )


def test_an_abbreviation_stands_for_the_one_option_that_begins_so() -> None:
    """As with argparse; click has no such thing."""
    assert "9" == split(["--max-requests-j", "9"], GUNICORN).last("--max-requests-jitter")
    assert "" == split(["--preloa"], GUNICORN).last("--preload")
    assert None is split(["--worker", "2"], UVICORN).last("--workers")


def test_options_that_are_given_again() -> None:
    """All values are kept, and the last one counts."""
    found = split(["-e", "A=1", "--env", "B=2", "-w", "1", "-w", "2"], GUNICORN)
    assert ("A=1", "B=2") == found.options["--env"]
    assert "2" == found.last("--workers")


def test_after_two_dashes_there_are_no_options() -> None:
    """Everything is left over."""
    assert Words({}, ("-w", "4")) == split(["--", "-w", "4"], GUNICORN)


def test_an_option_at_the_end_without_its_value() -> None:
    """The program itself would refuse it; here it has an empty one."""
    assert "" == split(["-w"], GUNICORN).last("--workers")
