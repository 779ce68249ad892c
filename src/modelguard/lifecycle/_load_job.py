"""One load or release: under way, or due and postponed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from modelguard.telemetry import PostponeCause, Reason


class PostponedJob(NamedTuple):
    """What a policy asks for, and must wait.

    Attributes:
        reasons: Which policies are due.
        cause: Why it waits.
        until: When it may begin, on the guard's clock; None while the guard is paused.
    """

    reasons: tuple[Reason, ...]
    cause: PostponeCause
    until: float | None


class LoadJob:
    """A load, from the request to the release of the generation that it replaces; or that release alone.

    Attributes:
        reasons: Why it was requested.
        urgent: Somebody asked for it explicitly, so it does not wait for a quiet moment.
        after_call: It was requested at the end of a call, where a pause between calls may begin.
        replaces: There is a current generation that it has yet to replace.
        unloads: It releases the current generation and loads none. Those who need one meanwhile wait for its end.
        by_policy: Nobody but a policy asked for it, so it does not begin while the guard is paused.
        covers: The last request that its load answers; later ones make that load stale. None before the load begins.
        cancelled: A rollback came before its model took calls, so that model is discarded.
        threads: Identities of the threads that do its work, to detect a load that waits for itself.
    """

    __slots__ = (
        "after_call",
        "by_policy",
        "cancelled",
        "covers",
        "reasons",
        "replaces",
        "threads",
        "unloads",
        "urgent",
    )

    def __init__(
        self,
        reasons: tuple[Reason, ...],
        *,
        urgent: bool,
        replaces: bool = False,
        after_call: bool = False,
        unloads: bool = False,
        by_policy: bool = False,
    ) -> None:
        self.reasons = reasons
        self.urgent = urgent
        self.after_call = after_call
        self.replaces = replaces
        self.unloads = unloads
        self.cancelled = False
        self.by_policy = by_policy
        self.covers: int | None = None
        self.threads: set[int] = set()
