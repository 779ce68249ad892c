"""Back to the previous model of a guard, at once: nothing is loaded."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from modelguard import telemetry
from modelguard.errors import LoadFailed, NoPreviousModel
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._release import drain_and_release, in_background

__all__ = ["roll_back"]

M = TypeVar("M")


def roll_back(guard: GuardContext[M]) -> None:
    """Make the generation that the current one has replaced current again; a load under way is cancelled.

    The one that took calls is released in the background.

    Raises:
        NoPreviousModel: None is kept.
        GuardClosed: The guard is closed.
    """
    if not guard.options.keep_previous:
        why = "the guard keeps none"
        raise NoPreviousModel(guard.name, why=why, fix="Make it with guard(..., keep_previous=True).")
    swapped = guard.state.roll_back(LoadFailed(guard.name, "rollback() was called during the load"))
    if swapped is None:
        why = "no reload has kept one since the first load, the last rollback, a release or a shortage of memory"
        raise NoPreviousModel(guard.name, why=why, fix="Call reload() to load a model.")
    back, old = swapped
    guard.shown.show(back.version)
    telemetry.emit(
        telemetry.RolledBack(
            guard=guard.name,
            generation=back.number,
            version=back.version,
            replaced=old.number,
            replaced_version=old.version,
        )
    )
    in_background(guard, partial(drain_and_release, guard, old))
