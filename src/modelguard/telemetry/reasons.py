"""Why a model is loaded or replaced. Light, because policies make these and events carry them."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Reason", "ReasonKind"]

#: ``"combination"``: policies joined by ``&``, which are due as a whole. ``"custom"``: a policy of your own.
ReasonKind = Literal[
    "combination",
    "custom",
    "errors",
    "first_use",
    "index_growth",
    "memory_growth",
    "memory_limit",
    "modified",
    "requested",
    "retry",
    "ttl",
    "uses",
]


class Reason(NamedTuple):
    """Why a model is loaded or replaced.

    Attributes:
        kind: What asked for it, one of a few fixed words, for metrics and conditions.
        text: The same for people, such as ``TTL('1h')``.
    """

    kind: ReasonKind
    text: str

    def __str__(self) -> str:
        return self.text
