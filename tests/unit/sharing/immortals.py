"""What the tests of immortal objects share."""

from __future__ import annotations

import sys

import pytest

from modelguard import prefork

UNSUPPORTED = prefork.immortalize_unsupported()
needs_immortals = pytest.mark.skipif(UNSUPPORTED is not None, reason=str(UNSUPPORTED))


class Slotted:
    """Without a dict for its attributes."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: object) -> None:
        self.value = value

    def own(self) -> None:
        """Be a method."""


def text(number: int) -> str:
    """Make a string that nothing else refers to."""
    return f"text {number}".upper()


def is_immortal(one: object) -> bool:
    """Whether references to an object are no longer counted, going by what happens to the count."""
    before = sys.getrefcount(one)
    more = [one for _ in range(5)]
    after = sys.getrefcount(one)
    more.clear()
    return before == after
