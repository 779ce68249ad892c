"""Model weights in a file that every process maps, for servers that start their workers afresh."""

from __future__ import annotations

from modelguard import _public
from modelguard.sharing._weights import Published, current, load, publish

__all__ = ["Published", "current", "load", "publish"]

_public.set_module(globals())
