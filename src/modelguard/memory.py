"""Memory readings of a process, the memory that it may still take, and what is freed given back."""

from __future__ import annotations

from modelguard import _public
from modelguard.facts._memory import MemoryUsage, PrivateMeter, private, usage
from modelguard.lifecycle._trimming import Trimming, trim_every

__all__ = ["MemoryUsage", "PrivateMeter", "Trimming", "private", "trim_every", "usage"]

_public.set_module(globals())
