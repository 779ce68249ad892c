"""Memory readings of a process, and the memory that it may still take."""

from __future__ import annotations

from modelguard import _public
from modelguard.environment._memory import MemoryUsage, PrivateMeter, private, usage

__all__ = ["MemoryUsage", "PrivateMeter", "private", "usage"]

_public.set_module(globals())
