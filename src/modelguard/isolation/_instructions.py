"""What a new mold is told."""

from __future__ import annotations

from typing import Any, TypedDict

from modelguard.isolation._target import Reference

__all__ = ["Instructions"]


class Instructions(TypedDict):
    """What the owner sends to a new mold.

    Attributes:
        owner: Its process id.
        preparation: How to resemble it.
        function: Where the function is.
        levels: Of the owner's loggers.
        name: The isolated function's name.
        max_bytes: The largest answer of a worker.
        beside_calls: Whether calls run while it loads.
        forks: Whether it forks workers; if not, it becomes one itself.
    """

    owner: int
    preparation: dict[str, Any]
    function: Reference
    levels: dict[str, int]
    name: str
    max_bytes: int
    beside_calls: bool
    forks: bool
