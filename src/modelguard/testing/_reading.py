"""Private memory, as both the marker and ``assert_no_growth`` judge it."""

from __future__ import annotations

from contextlib import suppress

from modelguard.environment import allocator, memory
from modelguard.errors import NotSupported


def trimmed() -> int:
    """Private memory in bytes, without what the allocator keeps for later.

    Raises:
        NotSupported: Nothing tells it on this platform.
    """
    with suppress(NotSupported):  # then free memory counts as held: as growth once, and not in each round
        allocator.trim()
    return memory.private(fresh=True)
