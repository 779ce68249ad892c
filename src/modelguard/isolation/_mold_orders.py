"""What the roster of a mold's workers asks of the mold."""

from __future__ import annotations

from typing import Protocol

from modelguard.isolation._worker_process import Worker

__all__ = ["MoldOrders", "NoMold"]


class MoldOrders(Protocol):
    """What the roster asks of its mold."""

    def start_worker(self, number: int) -> None:
        """Start a worker. Does not block."""
        ...

    def promote_worker(self, worker: Worker) -> None:
        """Let an idle worker take the mold's place. Does not block."""
        ...

    def give_up(self) -> None:
        """No worker of this mold comes up: make another mold. Does not block."""
        ...

    def settle_later(self, seconds: float) -> None:
        """Call :meth:`Roster.settle` after so many seconds."""
        ...


class NoMold:
    """Starts nothing."""

    def start_worker(self, number: int) -> None:
        pass

    def promote_worker(self, worker: Worker) -> None:
        pass

    def give_up(self) -> None:
        pass

    def settle_later(self, seconds: float) -> None:
        pass
