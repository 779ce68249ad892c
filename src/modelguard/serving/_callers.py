"""Who of a batch still waits. What can be stopped half way, a coroutine or a generator, asks here."""

from __future__ import annotations

from modelguard._wakeup import Wakeup
from modelguard.serving._requests import Request

__all__ = ["AllLeft", "Callers", "LoopEnded"]


class AllLeft(Exception):
    """Nobody waits for the batch any more, so it was stopped."""


class LoopEnded(RuntimeError):
    """The event loop on which the batch runs does not run any more."""

    def __init__(self) -> None:
        super().__init__("the event loop on which it runs has ended")


class Callers:
    """The callers of a batch that runs.

    Args:
        requests: Their requests.

    Attributes:
        wakeup: Set when one of them leaves; the batch's own steps may set it as well.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.wakeup = Wakeup()
        for request in requests:
            request.departure = self.wakeup

    def waiting(self) -> list[bool]:
        """Whether each of them still waits."""
        return [request.state != "done" for request in self.requests]

    @property
    def all_left(self) -> bool:
        """Whether nobody waits: all have left, or have their answers."""
        return all(request.state == "done" for request in self.requests)
