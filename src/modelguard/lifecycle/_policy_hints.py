"""What to write where a policy is needed and something else was given."""

from __future__ import annotations

import inspect
from contextlib import suppress

from modelguard import _units
from modelguard.errors import InvalidOption

_EXAMPLE = "Write for example TTL('1h') | MemoryGrowth('500 MB')."


def fix_for(given: object) -> str:
    """The fix to suggest for a value that was given instead of a policy."""
    if isinstance(given, type):
        return f"Write it with its argument: {given.__name__}(...)."
    if isinstance(given, list | tuple | set):
        return "Join policies with | (any of them) or & (all of them): TTL('1h') | Uses(50_000)."
    if inspect.isroutine(given):
        return "Write a subclass of Policy whose method due() decides, and give an instance of it."
    if isinstance(given, str):
        for name, read in (("TTL", _units.seconds), ("MemoryGrowth", _units.size_or_percentage)):
            with suppress(InvalidOption):
                read(given, "")
                return f"Write {name}({given!r})."
    if isinstance(given, int) and not isinstance(given, bool):
        return f"Write Uses({given}) for a number of calls, or TTL({given}) for seconds."
    return _EXAMPLE
