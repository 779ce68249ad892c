"""Knobs are data that every format can hold."""

from __future__ import annotations

import dataclasses

import pytest

from modelguard.environment import _knobs
from modelguard.environment._knobs import Knob
from modelguard.errors import InvalidOption

ALL = [
    *_knobs.onednn_caches(64),
    *_knobs.threads(2, "4 CPUs for 2 workers"),
    _knobs.openblas_threads(2, "4 CPUs for 2 workers"),
    _knobs.CUDA_CHECK,
    _knobs.GRPC_FORK_SUPPORT,
    _knobs.TOKENIZERS_THREADS,
    *_knobs.GLIBC_MEMORY,
    _knobs.JEMALLOC_MEMORY,
    _knobs.EXPANDABLE_SEGMENTS,
    _knobs.RECLAIMING,
    _knobs.fraction(3),
    _knobs.cudnn_plans(1024),
    _knobs.LAZY_MODULES,
]


@pytest.mark.parametrize("knob", ALL, ids=lambda knob: f"{knob.name}={knob.value}")
def test_a_knob_says_all_about_itself(knob: Knob) -> None:
    """Every knob says what it does, what it costs, and gives a source."""
    assert all((knob.does, knob.costs, knob.source, knob.reader))
    assert "\n" not in f"{knob.does}{knob.costs}{knob.source}{knob.reader}"


def test_a_number_of_threads_says_where_it_comes_from() -> None:
    """The reader of a report can check the origin of the number."""
    for knob in (*_knobs.threads(2, "4 CPUs for 2 workers"), _knobs.openblas_threads(2, "4 CPUs for 2 workers")):
        assert "2" == knob.value
        assert "4 CPUs for 2 workers" in knob.does


def test_jemalloc_starts_no_threads() -> None:
    """A fork would lose them, so every preset that sets jemalloc's options turns them off."""
    assert "background_thread:false" in _knobs.JEMALLOC_MEMORY.value.split(",")


@pytest.mark.parametrize("name", ["", "1ST", "A-B", "A B", "A=B", "A\n"])
def test_an_invalid_name_is_rejected(name: str) -> None:
    """A name that no shell could set is rejected at once."""
    with pytest.raises(InvalidOption, match="is not a valid name for a variable"):
        make(name=name)


@pytest.mark.parametrize("value", ["a\nb", "a\0b", " a", "a ", "\t", "\x7f"])
def test_a_value_that_some_format_would_change_is_rejected(value: str) -> None:
    """Such a value is rejected at once, and not found later in one deployment."""
    with pytest.raises(InvalidOption, match="not every preset format can keep them"):
        make(value=value)


@pytest.mark.parametrize("value", ["", "two words", "ü", "a,b:c=d", "$HOME %h 'x' \"y\" \\"])
def test_a_value_that_every_format_can_hold_is_accepted(value: str) -> None:
    """Inner spaces, quotes, special characters and letters of any alphabet are allowed."""
    assert value == make(value=value).value


@pytest.mark.parametrize(
    ("attribute", "value", "why"),
    [
        ("name", None, "must be text, not None"),
        ("value", 4, "must be text, not an int"),
        ("reader", b"it", "must be text"),
        ("does", None, "must be text"),
        ("read_at", "at night", "is not a known moment"),
    ],
)
def test_an_attribute_of_another_kind_is_rejected(attribute: str, value: object, why: str) -> None:
    """The error names it at once, and not when the preset is written or explained."""
    with pytest.raises(InvalidOption, match=rf"{attribute}=.*{why}"):
        dataclasses.replace(make(), **{attribute: value})


def make(name: str = "A", value: str = "1") -> Knob:
    return Knob(name, value, "any time", "it", "does", "costs", "source")
