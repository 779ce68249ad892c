"""What is known about the growth of this process. Set by ``modelguard.diagnosis.watch``, shown by guards."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modelguard.telemetry import GrowthFound

__all__ = ["cause", "found", "note"]

_found: GrowthFound | None = None
_pid = 0


def note(event: GrowthFound | None) -> None:
    """Remember what was found; None if memory no longer grows."""
    global _found, _pid
    _found, _pid = event, os.getpid()


def found() -> GrowthFound | None:
    """What was found last; None if nothing was, or if nobody watches. A forked child starts with None."""
    return _found if _found is not None and _pid == os.getpid() else None


def cause() -> str | None:
    """The main cause of growth; None if it is not known."""
    event = found()
    return None if event is None else event.cause
