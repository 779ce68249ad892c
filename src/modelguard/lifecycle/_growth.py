"""What is known about the growth of this process. Set by ``modelguard.diagnosis.watch``, shown by guards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelguard.telemetry import GrowthFound

__all__ = ["cause", "found", "note"]

_found: GrowthFound | None = None


def note(event: GrowthFound | None) -> None:
    """Remember what was found; None if memory no longer grows."""
    global _found
    _found = event


def found() -> GrowthFound | None:
    """What was found last; None if nothing was, or if nobody watches."""
    return _found


def cause() -> str | None:
    """The main cause of growth; None if it is not known."""
    return None if _found is None else _found.cause


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: note(None))  # a child grows in its own way
