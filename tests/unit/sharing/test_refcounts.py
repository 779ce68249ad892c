"""Which interpreters are supported, and what the self-test finds."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from tests.unit.sharing.immortals import Slotted, needs_immortals

from modelguard.sharing import _graph
from modelguard.sharing._graph import Build
from modelguard.sharing._immortal import immortalize

needs_flags = pytest.mark.skipif(sys.version_info < (3, 14), reason="3.14 is the first version with flags")
CPYTHON = Build(implementation="cpython", version=(3, 13), pointer_bytes=8, free_threaded=False, checks=False)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ({"version": (3, 11)}, "CPython 3.11 has no immortal objects; the first version that has them is 3.12"),
        ({"version": (3, 16)}, "CPython 3.16 is newer than this modelguard knows"),
        ({"implementation": "pypy"}, "pypy 3.13 is not CPython"),
        ({"free_threaded": True}, "CPython 3.13 is free-threaded"),
        ({"checks": True}, "CPython 3.13 is a debug build"),
        ({"pointer_bytes": 4}, "CPython 3.13 is not a 64-bit build"),
    ],
)
def test_unknown_builds_are_rejected(build: dict[str, Any], reason: str) -> None:
    """A build with an unknown layout of reference counts is rejected, with the reason."""
    said = _graph.unsupported(dataclasses.replace(CPYTHON, **build))
    assert said is not None
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("version", "count", "flags"),
    [((3, 12), 0xFFFFFFFF, 0), ((3, 13), 0xFFFFFFFF, 0), ((3, 14), 0xE0000000, 1), ((3, 15), 0xE0000000, 1)],
)
def test_each_version_has_its_own_immortal_count(version: tuple[int, int], count: int, flags: int) -> None:
    """The count and the flags are those that CPython's own headers call immortal; the count with room below it."""
    assert None is _graph.unsupported(dataclasses.replace(CPYTHON, version=version))
    assert (count, flags) == (_graph.mark(version) & 0xFFFFFFFF, _graph.mark(version) >> 48)


def test_this_interpreter_is_described() -> None:
    """The facts about the running interpreter are its own."""
    here = Build.here()
    assert (sys.implementation.name, sys.version_info[:2]) == (here.implementation, here.version)
    assert hasattr(sys, "gettotalrefcount") <= here.checks


@needs_immortals
def test_the_self_test_passes_where_counts_are_as_expected() -> None:
    """With the right count the private object becomes immortal."""
    assert None is _graph.self_test(_graph.memory(), _graph.mark(sys.version_info[:2]))


@needs_immortals
@pytest.mark.parametrize(
    "mark",
    [
        pytest.param(5, id="mortal"),
        pytest.param(1 << 20, id="high"),
        *(
            pytest.param(
                mark,
                id=name,
                marks=pytest.mark.skipif(sys.version_info < (3, 14), reason="3.14 is the first with flags"),
            )
            for name, mark in {"without the flag": 0xE0000000, "without room": 1 << 48 | 0xC0000000}.items()
        ),
    ],
)
def test_the_self_test_finds_a_count_that_still_changes(mark: int) -> None:
    """An object that CPython continues to count, if only in some reads, is not immortal."""
    said = _graph.self_test(_graph.memory(), mark)
    assert said is not None
    assert said.startswith("an object with the immortal reference count is still counted")


@needs_immortals
def test_an_immortal_object_keeps_its_other_flags() -> None:
    """What else CPython notes in the word with the count stays as it was."""
    words, held = _graph.memory(), [object() for _ in range(10)]
    before = [words[id(one) >> 3] & _graph.KEPT for one in held]
    immortalize(held)
    added = _graph.mark(sys.version_info[:2]) & _graph.KEPT
    assert [flags | added for flags in before] == [words[id(one) >> 3] & _graph.KEPT for one in held]


@needs_immortals
def test_ten_thousand_reads_leave_an_immortal_object_as_it_is() -> None:
    """Reads of attributes, items, calls and unpacking write nothing to an object: not even back and forth."""
    words, entry = _graph.memory(), Slotted([Slotted("a text".upper())])
    immortalize(entry)
    at = [id(one) >> 3 for one in (entry, entry.value, entry.value[0], entry.value[0].value)]
    before, seen = [words[place] for place in at], set()
    for _ in range(10_000):
        inner, *_none = entry.value
        text = entry.value[0].value
        seen.add((*(words[place] for place in at), text is inner.value, inner.own()))
    assert {(*before, True, None)} == seen


@needs_immortals
def test_the_self_test_writes_nothing_where_it_finds_no_count() -> None:
    """If the words at an object's address are not its count, the test says so and leaves them alone."""

    class Elsewhere:
        def __getitem__(self, index: int) -> int:
            return 7

        def __setitem__(self, index: int, value: int) -> None:
            pytest.fail("written to")

    said = _graph.self_test(Elsewhere(), 0xFFFFFFFF)  # type: ignore[arg-type]
    assert "the reference count of an object is not where CPython's headers define it" == said
