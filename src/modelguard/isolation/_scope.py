"""What a call needs of the processes that compute it, wherever these are: of this process, or of the whole host."""

from __future__ import annotations

from typing import Any, Protocol

from modelguard import _units
from modelguard.isolation._claims import Claim, Claims, Limits, Taken
from modelguard.isolation.status import IsolationStatus

__all__ = ["Scope"]


class Scope(Protocol):
    """Where the mold and the workers of one isolated function are."""

    @property
    def claims(self) -> Claims:
        """The calls of this process that wait for a worker."""
        ...

    def take(self, limits: Limits, key: Any = None) -> Taken:
        """Take a worker; start what is missing. Blocks.

        Args:
            limits: Of the call.
            key: Which of a pool's models it needs; None for a function that has no pool.

        Raises:
            GuardClosed, LoadFailed, Reloading, QueueFull, CircuitOpen, DeadlineExceeded: There is none.
        """
        ...

    def request(self, claim: Claim) -> None:
        """Take a worker for a call that does not block; start what is missing. The errors are those of :meth:`take`."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a worker can answer."""
        ...

    @property
    def version(self) -> str | None:
        """The version of the current model; None if it has none, or if there are several models."""
        ...

    def status(self, queued: int) -> IsolationStatus:
        """Its state, its processes and its counts, with so many calls that wait."""
        ...

    def rollback(self) -> None:
        """Make the previous mold current again."""
        ...

    def load(self, timeout: _units.Duration | None) -> None:
        """Start the mold and its workers unless they run. Blocks."""
        ...

    async def aload(self, timeout: _units.Duration | None) -> None:
        """:meth:`load` for coroutines."""
        ...

    @property
    def paused(self) -> bool:
        """Whether :meth:`set_paused` holds back the policies, as far as this process knows. Never blocks."""
        ...

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer."""
        ...

    def unload(self, timeout: _units.Duration | None) -> None:
        """End the mold and its workers until the next call."""
        ...

    async def aunload(self, timeout: _units.Duration | None) -> None:
        """:meth:`unload` for coroutines."""
        ...

    def reload(self, *, wait: bool, timeout: _units.Duration | None) -> None:
        """Make a new mold."""
        ...

    async def areload(self, timeout: _units.Duration | None) -> None:
        """:meth:`reload` for coroutines."""
        ...

    def close(self) -> None:
        """Refuse further calls, wait for those that run, and end what belongs to this process alone."""
        ...

    async def aclose(self) -> None:
        """:meth:`close` for coroutines."""
        ...

    def reopen(self) -> None:
        """Admit calls again after :meth:`close`."""
        ...

    def refuse_calls(self) -> None:
        """This process exits, and ends its molds: raise ``GuardClosed`` from now on. Waits for nothing."""
        ...

    def end_at_once(self) -> None:
        """Nobody can call the function any more: end without waiting for anything."""
        ...

    def abandon(self) -> None:
        """In a forked child: the processes are the parent's. Takes no lock, which a thread of the parent may hold."""
