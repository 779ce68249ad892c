"""Traffic without a pause on a server."""

from __future__ import annotations

import http.client
import threading
import time
from typing import NamedTuple, Self


class Call(NamedTuple):
    """One call: when it began and ended, on the monotonic clock, and whether it was answered."""

    began: float
    ended: float
    answered: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


Span = tuple[float, float]


def within(calls: list[Call], span: Span) -> list[Call]:
    """The calls that were under way at some moment of a span of time."""
    began, ended = span
    return [call for call in calls if call.ended > began and call.began < ended]


def outside(calls: list[Call], spans: list[Span], margin: float) -> list[float]:
    """The seconds of the calls that were not under way in any of the spans, nor less than ``margin`` seconds after."""
    return [call.seconds for call in calls if all(call.ended < a or call.began > b + margin for a, b in spans)]


class Callers:
    """Threads that call one after the other without a pause, inside the block.

    Args:
        port: The server's, on this machine.
        path: What is asked for.
        threads: How many there are.
    """

    def __init__(self, port: int, path: str, *, threads: int) -> None:
        self.calls: list[Call] = []
        self._port, self._path = port, path
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]

    def _ask(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.is_set():
            began = time.monotonic()
            connection.request("GET", self._path)
            answer = connection.getresponse()
            answer.read()
            self.calls.append(Call(began, time.monotonic(), answer.status == http.HTTPStatus.OK))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
