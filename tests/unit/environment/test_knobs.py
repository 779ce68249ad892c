"""Knobs are data that survives being written anywhere."""

from __future__ import annotations

import pytest

from modelguard.environment import knobs
from modelguard.environment.knobs import Knob
from modelguard.errors import InvalidOption

ALL = [
    *knobs.onednn_caches(64),
    *knobs.threads(2, "4 CPUs for 2 workers"),
    knobs.openblas_threads(2, "4 CPUs for 2 workers"),
    knobs.cuda_check(),
    knobs.grpc_fork_support(),
    knobs.tokenizers_threads(),
    *knobs.glibc_memory(),
    knobs.jemalloc_memory(),
]


@pytest.mark.parametrize("knob", ALL, ids=lambda knob: knob.name)
def test_a_knob_says_all_about_itself(knob: Knob) -> None:
    """No knob leaves out what it does, what it costs, or who says so."""
    assert all((knob.does, knob.costs, knob.source, knob.reader))
    assert "\n" not in f"{knob.does}{knob.costs}{knob.source}{knob.reader}"


def test_a_number_of_threads_says_where_it_comes_from() -> None:
    """The reader of a report can check how the number came about."""
    for knob in (*knobs.threads(2, "4 CPUs for 2 workers"), knobs.openblas_threads(2, "4 CPUs for 2 workers")):
        assert "2" == knob.value
        assert "4 CPUs for 2 workers" in knob.does


def test_jemalloc_starts_no_threads() -> None:
    """A fork would lose them, so every preset that sets jemalloc's options turns them off."""
    assert "background_thread:false" in knobs.jemalloc_memory().value.split(",")


@pytest.mark.parametrize("name", ["", "1ST", "A-B", "A B", "A=B", "A\n"])
def test_what_is_no_variable_is_refused(name: str) -> None:
    """A name that no shell could set is found where it is written."""
    with pytest.raises(InvalidOption, match="not the name of a variable"):
        make(name=name)


@pytest.mark.parametrize("value", ["a\nb", "a\0b", " a", "a ", "\t", "\x7f"])
def test_what_some_format_would_lose_is_refused(value: str) -> None:
    """A value that would change on its way is found where it is written, not in one deployment."""
    with pytest.raises(InvalidOption, match="does not survive"):
        make(value=value)


@pytest.mark.parametrize("value", ["", "two words", "ü", "a,b:c=d", "$HOME %h 'x' \"y\" \\"])
def test_what_every_format_can_hold_is_taken(value: str) -> None:
    """Spaces inside, quotes, signs and letters of any alphabet are values like any other."""
    assert value == make(value=value).value


def make(name: str = "A", value: str = "1") -> Knob:
    return Knob(name, value, "any time", "it", "does", "costs", "source")
