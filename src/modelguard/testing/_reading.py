"""Private memory, as the marker and ``assert_no_growth`` measure it."""

from __future__ import annotations

from contextlib import suppress

from modelguard.environment import _allocator, _memory
from modelguard.errors import NotSupported


def trimmed() -> int:
    """Private memory in bytes, without free memory that the allocator keeps.

    Raises:
        NotSupported: It cannot be read on this platform.
    """
    with suppress(NotSupported):  # free memory then counts as growth, but only once and not in each round
        _allocator.trim()
    return _memory.private(fresh=True)
