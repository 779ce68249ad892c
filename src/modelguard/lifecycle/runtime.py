"""What a guard needs of the world: clock, memory readings, threads. Tests hand it another world."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from modelguard.environment import _allocator, _limits, _memory
from modelguard.errors import NotSupported
from modelguard.lifecycle import files, slot, workers


def private() -> int:
    """Private memory now; 0 where the platform does not tell, so that lifecycles by time and use still work."""
    try:
        return _memory.private(fresh=True)
    except NotSupported:
        return 0


def headroom() -> int | None:
    """Bytes that may still be allocated, None where nothing tells."""
    try:
        return _memory.usage().headroom
    except NotSupported:
        return None


def trim() -> str:
    """Give free memory back to the system; says which allocator did it, or why none did."""
    try:
        _allocator.trim()
    except NotSupported as error:
        return error.reason
    return _allocator.in_force().kind


def in_use() -> int | None:
    """Bytes that malloc has given out, None where it does not tell."""
    try:
        return _allocator.stats().allocated
    except NotSupported:
        return None


def check_trim() -> None:
    """Refuse where no memory can be given back.

    Raises:
        NotSupported: The allocator in force is not known, or this is not Linux.
    """
    serving = _allocator.in_force()
    if serving.kind == "unknown":
        raise NotSupported("trim_every", reason=f"malloc is served by an unknown allocator ({serving.path})")


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The world of a guard. Every field may be replaced, which is how unit tests run without sleeping.

    Attributes:
        clock: Seconds from any start, never going back.
        sleep: Waits so many seconds.
        private: Private memory of this process in bytes.
        headroom: Bytes that may still be allocated, or None.
        limit: The effective memory limit in bytes, or None.
        trim: Gives memory back and names the allocator.
        in_use: Bytes that malloc has given out, or None.
        check_trim: Raises NotSupported where that is not possible.
        fingerprint: Identity of a watched path, None while it is missing.
        random: A number in [0, 1).
        start_thread: Runs a callable in the background under a name.
        slot: The turn to hold two copies of a model.
        kept: Whether the process's keeper thread asks the policies in the background.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    private: Callable[[], int] = private
    headroom: Callable[[], int | None] = headroom
    limit: Callable[[], int | None] = lambda: _limits.memory_limit().bytes
    trim: Callable[[], str] = trim
    in_use: Callable[[], int | None] = in_use
    check_trim: Callable[[], None] = check_trim
    fingerprint: Callable[[Path], files.Fingerprint | None] = files.fingerprint
    random: Callable[[], float] = random.random
    start_thread: Callable[[Callable[[], None], str], None] = workers.WORKERS.start
    slot: slot.Slot = slot.HOST
    kept: bool = True


def default() -> Runtime:
    """The world of a guard that is given none: the real one. ``modelguard.testing`` puts another in its place."""
    return Runtime()
