"""Those who wait for a load."""

from __future__ import annotations

from concurrent.futures import Future

from modelguard.errors import GuardClosed, LoadFailed

#: How a wait ends: None if a generation was installed, else the error that the waiter raises.
Outcome = LoadFailed | GuardClosed | None


class Waiters:
    """Futures, each with the number of the request that it waits for. Used under the guard's lock."""

    def __init__(self) -> None:
        self._requests: dict[Future[Outcome], int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: int) -> Future[Outcome]:
        """Wait for a load that began after ``request``."""
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()  # so that a waiter's cancellation cannot touch it
        self._requests[future] = request
        return future

    def remove(self, future: Future[Outcome]) -> None:
        """Remove a waiter, if it still waits."""
        self._requests.pop(future, None)

    def pop(self, covers: float) -> list[Future[Outcome]]:
        """Remove and return those whose request is covered."""
        done = [future for future, request in self._requests.items() if request <= covers]
        for future in done:
            del self._requests[future]
        return done
