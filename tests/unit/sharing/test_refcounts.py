"""Which interpreters are supported, and what the self-test finds."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from tests.unit.sharing.immortals import needs_immortals

from modelguard.sharing import _refcounts
from modelguard.sharing._refcounts import Build

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
    said = _refcounts.unsupported(dataclasses.replace(CPYTHON, **build))
    assert said is not None
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("version", "value"),
    [((3, 12), 0xFFFFFFFF), ((3, 13), 0xFFFFFFFF), ((3, 14), 0xC0000000), ((3, 15), 0xC0000000)],
)
def test_each_version_has_its_own_immortal_count(version: tuple[int, int], value: int) -> None:
    """The count is the one of CPython's own headers."""
    assert None is _refcounts.unsupported(dataclasses.replace(CPYTHON, version=version))
    assert value == _refcounts.value(version)


def test_this_interpreter_is_described() -> None:
    """The facts about the running interpreter are its own."""
    here = Build.here()
    assert (sys.implementation.name, sys.version_info[:2]) == (here.implementation, here.version)
    assert hasattr(sys, "gettotalrefcount") <= here.checks


@needs_immortals
def test_the_self_test_passes_where_counts_are_as_expected() -> None:
    """With the right count the private object becomes immortal."""
    assert None is _refcounts.self_test(_refcounts.memory(), _refcounts.value(sys.version_info[:2]))


@needs_immortals
@pytest.mark.parametrize("count", [5, 1 << 20])
def test_the_self_test_finds_a_count_that_still_changes(count: int) -> None:
    """A count that CPython continues to change is not immortal."""
    said = _refcounts.self_test(_refcounts.memory(), count)
    assert "an object with the immortal reference count is still counted" == said


@needs_immortals
def test_the_self_test_writes_nothing_where_it_finds_no_count() -> None:
    """If the words at an object's address are not its count, the test says so and leaves them alone."""

    class Elsewhere:
        def __getitem__(self, index: int) -> int:
            return 7

        def __setitem__(self, index: int, value: int) -> None:
            pytest.fail("written to")

    said = _refcounts.self_test(Elsewhere(), 0xFFFFFFFF)  # type: ignore[arg-type]
    assert "the reference count of an object is not where CPython's headers have it" == said
