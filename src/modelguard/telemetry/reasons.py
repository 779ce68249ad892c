"""Why a model is loaded or replaced. Separate and light, because policies and events both need it."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["PROTECT_MEMORY", "Reason", "ReasonKind"]

#: ``"combination"``: policies joined by ``&``, which are due together. ``"custom"``: a user-defined policy.
#: ``"gpu_out_of_memory"``: a call ran out of GPU memory, and what it had allocated was not freed.
#: ``"woken"``: the first use after the model was released by ``Idle`` or ``unload()``.
ReasonKind = Literal[
    "changed",
    "combination",
    "cron",
    "custom",
    "errors",
    "first_use",
    "gpu_memory_growth",
    "gpu_memory_limit",
    "gpu_out_of_memory",
    "idle",
    "index_growth",
    "memory_growth",
    "memory_limit",
    "modified",
    "requested",
    "retry",
    "ttl",
    "uses",
    "woken",
]


#: Policies that free memory. Where it is short, their reloads do not wait for a pause between calls.
PROTECT_MEMORY: frozenset[ReasonKind] = frozenset(
    {"gpu_memory_growth", "gpu_memory_limit", "gpu_out_of_memory", "index_growth", "memory_growth", "memory_limit"}
)


class Reason(NamedTuple):
    """Why a model is loaded or replaced.

    Attributes:
        kind: What caused it, one of a few fixed words, for metrics and conditions.
        text: The cause as text for users, such as ``TTL('1h')``.
    """

    kind: ReasonKind
    text: str

    def __str__(self) -> str:
        return self.text
