"""A call's part of the talk with a broker: it asks for one worker, and gives it back."""

from __future__ import annotations

import math
import socket
import time
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from modelguard.errors import DeadlineExceeded, Reloading
from modelguard.isolation._channel import Channel, Unreadable
from modelguard.isolation._claims import Claim, Claims, Limits, aside
from modelguard.isolation._host_client import BrokerGone, Membership
from modelguard.isolation._host_messages import unpacked
from modelguard.isolation._supervisor import supervisor
from modelguard.telemetry import Reason, WorkerEndCause

__all__ = ["ANSWER", "Asking", "Connection", "GrantedWorker", "left"]

#: Seconds in which a broker answers whatever it need not wait for.
ANSWER = 1.0

#: The same for a call whose time is over already.
_LATE = 0.25

#: Seconds between two attempts after a broker has ended.
_AGAIN = 0.05


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

    def put_back(self) -> None:
        self.channel.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release(worn=(), counts=False)
        self.leave()

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


class ScopeOfAsking(Protocol):
    """What a claim needs of its scope."""

    @property
    def claims(self) -> Claims:
        """The calls of this process that wait."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds that a call waits for a worker."""
        ...

    @property
    def wait_timeout(self) -> float:
        """Seconds that it waits for a broker."""
        ...

    def idle_connection(self) -> Connection | None:
        """A connection that is there and that no other call uses."""
        ...

    def seek(self, asking: Asking) -> None:
        """Find the broker, or start one, and then a connection for this claim. Does not block."""
        ...

    def granted(self, connection: Connection, pid: int) -> GrantedWorker:
        """The worker that was granted on a connection."""
        ...


class Connection:
    """Asks for one worker on a connection that no other call uses meanwhile."""

    def __init__(self, membership: Membership, channel: Channel) -> None:
        self._membership = membership
        self._channel = channel

    def fileno(self) -> int:
        """Its descriptor."""
        return self._channel.fileno()

    @property
    def has_unread(self) -> bool:
        """Whether there is more to hear at once."""
        return self._channel.has_unread

    def ask(self) -> None:
        """Ask for a worker.

        Raises:
            BrokerGone: Ask the next one.
        """
        self._membership.say(self._channel, "take", limit=ANSWER)

    def hear(self) -> Any:
        """Read an answer, which has begun to arrive."""
        self._channel.set_timeout(ANSWER)
        return self._channel.receive()

    def withdraw(self, limit: float = ANSWER) -> None:
        """Ask no more, within so many seconds. The answer says whether a worker was granted in this moment."""
        self._channel.set_timeout(limit)
        self._channel.send(("withdraw",))

    def give_back(self) -> None:
        """Let other calls use it."""
        self._membership.give_back(self._channel)

    def close(self) -> None:
        """Let nobody use it."""
        self._channel.close()

    def granted(self, pid: int) -> tuple[Channel, int]:
        """The channel to the worker that was granted, and the worker's process id."""
        worker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=self._channel.take_fd())
        return Channel(worker), pid

    def take(self, patience: float, limits: Limits) -> tuple[Channel, int] | None:
        """Wait for a worker; None if the time is over.

        Raises:
            BrokerGone: Ask the next one.
            Unreadable: No descriptor is free for it.
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
                    return self.granted(*details)
                if kind == "loading":
                    until = limits.until
                elif kind == "waiting":
                    until = min(limits.until, time.monotonic() + patience)
                else:
                    self.give_back()
                    if kind == "failed":
                        raise unpacked(*details)
                    return None
                self._channel.set_timeout(left(until))
        except (EOFError, OSError) as error:
            if isinstance(error, (EOFError, ConnectionError, BlockingIOError)):
                self._channel.close()
                raise BrokerGone from error
            raise
        except (KeyboardInterrupt, SystemExit, Unreadable):  # its worker ends with the connection
            self._channel.close()
            raise

    def _withdraw(self) -> Any:
        """The time is over. If a worker was granted in this moment, that is the answer."""
        self.withdraw(_LATE)
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


class Asking:
    """A claim that waits for the broker's answer, which the supervisor's thread reads.

    Args:
        claim: The call's.
        scope: Its scope.

    Attributes:
        loading: Whether the broker, or its mold, is awaited.
    """

    over = False

    def __init__(self, claim: Claim, scope: ScopeOfAsking) -> None:
        self.claim = claim
        self.loading = True
        self._scope = scope
        self._connection: Connection | None = None
        self._gone_since: float | None = None

    def begin(self) -> None:
        """Ask, if that takes no time; else find the broker first, in a thread. Does not block."""
        if self.claim.ended:
            return
        connection = self._scope.idle_connection()
        if connection is None:
            self._scope.seek(self)
        else:
            self.ask(connection)

    def ask(self, connection: Connection) -> None:
        """Ask on this connection."""
        try:
            connection.ask()
        except BrokerGone:
            self.broker_gone()
            return
        self._wait(self._scope.timeout)
        supervisor().call(lambda: self._listen(connection))

    def leave(self) -> bool:
        """Take the question back; a worker that is granted in this moment goes back too."""
        supervisor().call(self._withdraw)
        return True

    def _wait(self, seconds: float) -> None:
        self.loading = seconds == math.inf
        self.claim.wait(self._scope.claims, time.monotonic() + seconds, self._too_late)

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(self._scope.claims.name, waited=time.monotonic() - self.claim.limits.arrived)

    # In the supervisor's thread

    def _listen(self, connection: Connection) -> None:
        self._connection = connection
        supervisor().watch(connection.fileno(), self._heed)
        if self.claim.ended:  # meanwhile
            self._withdraw()

    def _withdraw(self) -> None:
        if self._connection is not None:
            with suppress(OSError):  # its end of file is read next
                self._connection.withdraw()

    def _heed(self) -> None:
        while (connection := self._connection) is not None:
            try:
                kind, *details = connection.hear()
            except (EOFError, OSError, Unreadable):
                self._forget(connection).close()
                self.broker_gone()
                return
            if kind == "granted":
                taken = self._scope.granted(self._forget(connection), *details)
                if not self.claim.grant(taken):
                    taken.put_back()
            elif kind in {"loading", "waiting"}:
                self._wait(math.inf if kind == "loading" else self._scope.timeout)
            else:
                self._forget(connection).give_back()
                if kind == "failed":
                    aside(partial(self.claim.fail, unpacked(*details)))
            if not connection.has_unread:
                return

    def _forget(self, connection: Connection) -> Connection:
        supervisor().forget(connection.fileno())
        self._connection = None
        return connection

    def broker_gone(self) -> None:
        """Ask the next broker. From any thread."""
        now = time.monotonic()
        self._gone_since = now if self._gone_since is None else self._gone_since
        if now - self._gone_since > self._scope.wait_timeout:
            aside(partial(self.claim.fail, Reloading(self._scope.claims.name, waited=now - self._gone_since)))
        elif not self.claim.ended:
            self._wait(math.inf)
            supervisor().later(_AGAIN, self.begin)


def left(until: float) -> float:
    """Seconds until then, for a channel's timeout: 0 for no limit."""
    return 0.0 if until == math.inf else max(0.001, until - time.monotonic())
