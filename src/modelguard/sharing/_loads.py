"""Loads under way in any guard of this process: a fork in the middle of one copies the locks that its thread holds."""

from __future__ import annotations

import time

from modelguard.lifecycle.model_guard import guards

__all__ = ["loading", "wait_for_loads"]

#: Seconds between checks whether the loads have ended.
_POLL = 0.005


def loading() -> str | None:
    """The name of a guard that is loading a model, or releasing one that it has replaced; None if there is none."""
    return next((guard.name for guard in guards() if guard.engine.loading), None)


def wait_for_loads(timeout: float) -> str | None:
    """Wait until no guard of this process loads or releases.

    Args:
        timeout: Seconds to wait at most.

    Returns:
        The name of a guard that was still loading then; None if there was none.
    """
    end = time.monotonic() + timeout
    while (name := loading()) is not None and time.monotonic() < end:
        time.sleep(_POLL)
    return name
