"""Model weights in a file that all processes map, for servers that start their workers without a fork."""

from __future__ import annotations

from modelguard import _public
from modelguard.sharing._weights import Published, current, load, publish

__all__ = ["Published", "current", "load", "publish"]

_public.set_module(globals())
