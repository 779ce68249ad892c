"""A call's part of the talk with a broker: it asks for one worker, and gives it back."""

from __future__ import annotations

import math
import socket
import time
from typing import Any

from modelguard.isolation._channel import Channel
from modelguard.isolation._host_client import BrokerGone, Membership
from modelguard.isolation._host_messages import unpacked
from modelguard.isolation._scope import Limits
from modelguard.telemetry import Reason, WorkerEndCause

__all__ = ["ANSWER", "Connection", "GrantedWorker", "left"]

#: Seconds in which a broker answers whatever it need not wait for.
ANSWER = 1.0

#: The same for a call whose time is over already.
_LATE = 0.25


class GrantedWorker:
    """A worker that the broker has granted to one call of this process.

    Args:
        running: One entry for each worker that a call of this process has; this one's is there.
        connection: On which it was granted.
        channel: To the worker.
        pid: The worker's process id.
    """

    __slots__ = ("_connection", "_running", "channel", "pid")

    def __init__(self, running: list[None], connection: Connection, channel: Channel, pid: int) -> None:
        self._running = running
        self._connection: Connection | None = connection
        self.channel = channel
        self.pid = pid

    def release(self, *, worn: tuple[Reason, ...]) -> None:
        self.channel.close()  # this process's copy
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(worn=worn)

    def lose(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        self.channel.close()
        connection, self._connection = self._connection, None
        if connection is None:
            return "unknown"
        how, pid = connection.lose(cause, blame=blame)
        self.pid = self.pid or pid
        return how

    def leave(self) -> None:
        self._running.pop()
        if self._connection is not None:  # neither answered nor lost: nobody knows what the worker does
            self.lose("cancelled", blame=False)


class Connection:
    """Asks for one worker on a connection that no other call uses meanwhile."""

    def __init__(self, membership: Membership, channel: Channel) -> None:
        self._membership = membership
        self._channel = channel

    def take(self, patience: float, limits: Limits) -> tuple[Channel, int] | None:
        """Wait for a worker; None if the time is over.

        Raises:
            BrokerGone: Ask the next one.
            Exception: Why there is no worker for this call.
        """
        until = min(limits.until, time.monotonic() + patience)
        self._membership.say(self._channel, "take", limit=left(until))
        try:
            while True:
                try:
                    kind, *details = self._channel.receive()
                except BlockingIOError:
                    kind, *details = self._withdraw()
                if kind == "granted":
                    fd = self._channel.take_fd()
                    worker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
                    return Channel(worker), details[0]
                if kind == "loading":
                    until = limits.until
                elif kind == "waiting":
                    until = min(limits.until, time.monotonic() + patience)
                else:
                    self._membership.give_back(self._channel)
                    if kind == "failed":
                        raise unpacked(*details)
                    return None
                self._channel.set_timeout(left(until))
        except (EOFError, OSError) as error:
            if isinstance(error, (EOFError, ConnectionError, BlockingIOError)):
                self._channel.close()
                raise BrokerGone from error
            raise
        except (KeyboardInterrupt, SystemExit):
            self._channel.close()
            raise

    def _withdraw(self) -> Any:
        """The time is over. If a worker was granted in this moment, that is the answer."""
        self._channel.set_timeout(_LATE)
        self._channel.send(("withdraw",))
        while True:
            answer = self._channel.receive()
            if answer[0] not in {"loading", "waiting"}:
                return answer

    def release(self, *, worn: tuple[Reason, ...], counts: bool = True) -> None:
        try:
            self._membership.say(self._channel, "release", worn, counts)
        except BrokerGone:
            return
        self._membership.give_back(self._channel)

    def lose(self, cause: WorkerEndCause, *, blame: bool) -> tuple[str, int]:
        try:
            self._membership.say(self._channel, "lose", cause, blame, limit=2 * ANSWER)
            _, how, pid = self._channel.receive()
        except (BrokerGone, EOFError, OSError):
            self._channel.close()
            return "its broker has ended, or has taken the worker back", 0
        self._membership.give_back(self._channel)
        return how, pid


def left(until: float) -> float:
    """Seconds until then, for a channel's timeout: 0 for no limit."""
    return 0.0 if until == math.inf else max(0.001, until - time.monotonic())
