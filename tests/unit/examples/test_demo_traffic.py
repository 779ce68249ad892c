"""The words and moments of the demo."""

from __future__ import annotations

import itertools
import json

import pytest
from examples.demo.traffic import SPACING, made_up_text, shots


def words_of(text: str) -> list[str]:
    """Take a made-up sentence apart."""
    return text.removesuffix("を買った。").split("と")


def test_the_same_words_in_every_run() -> None:
    """A text depends on its arguments alone, so all servers and every run get the same."""
    assert made_up_text(0, 7) == made_up_text(0, 7)


def test_ever_new_words() -> None:
    """No word comes twice, neither in a text nor in a later one."""
    words = [word for index in range(50) for word in words_of(made_up_text(0, index, words=100))]
    assert 5_000 == len(set(words))


def test_another_seed_gives_other_words() -> None:
    """Runs with different seeds share no text."""
    assert made_up_text(0, 0) != made_up_text(1, 0)


def test_number_of_words() -> None:
    """A text has as many words as were asked for."""
    assert 12 == len(words_of(made_up_text(0, 0, words=12)))


def test_no_pauses() -> None:
    """Requests follow each other at one pace for ever: no moment is quieter than the others."""
    moments = [shot.due for shot in itertools.islice(shots(words=1), 1000)]
    steps = [later - sooner for sooner, later in itertools.pairwise(moments)]
    assert [pytest.approx(SPACING)] * 999 == steps


def test_requests_carry_the_text() -> None:
    """The body is what the service takes: JSON with one text."""
    assert {"text": made_up_text(3, 0, words=2)} == json.loads(next(shots(seed=3, words=2)).body)
