"""What a new mold is told."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from modelguard.isolation._code import Files
from modelguard.isolation._target import Reference, Stub

__all__ = ["Instructions", "Origin"]


class Instructions(TypedDict):
    """What the owner sends to a new mold.

    Attributes:
        owner: Its process id.
        preparation: How to resemble it.
        function: Where the function is.
        stub: What stands for it in the owner, if that does not import it.
        key: Of the pool's model that it loads; None if its function has no pool.
        levels: Of the owner's loggers.
        name: The isolated function's name.
        max_bytes: The largest answer of a worker.
        beside_calls: Whether calls run while it loads.
        forks: Whether it forks workers; if not, it becomes one itself.
        code: What files its modules must have; None for any.
        shared: Whether its owner serves callers of other processes, and knows nothing of their modules.
    """

    owner: int
    preparation: dict[str, Any]
    function: Reference
    stub: Stub | None
    key: Any
    levels: dict[str, int]
    name: str
    max_bytes: int
    beside_calls: bool
    forks: bool
    code: Files | None
    shared: bool


class Origin(NamedTuple):
    """The process that calls an isolated function, which its molds resemble.

    Attributes:
        preparation: How to resemble it.
        levels: Of its loggers.
    """

    preparation: dict[str, Any]
    levels: dict[str, int]
