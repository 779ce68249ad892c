"""A process as the client of a broker, and its connections to it."""

from __future__ import annotations

import os
import pickle
import select
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from modelguard.isolation import _broker_launch, _news, _processes
from modelguard.isolation._channel import Channel
from modelguard.isolation._host_messages import REPORT, Request, unpacked
from modelguard.isolation._rendezvous import Folder, ForeignPeer
from modelguard.isolation._supervisor import supervisor

__all__ = ["BrokerGone", "Membership"]

#: Seconds in which a broker accepts a connection. It does nothing that takes long.
_ANSWER = 5.0

#: Connections that are kept for the next calls. Each call that waits has one.
_MOST_IDLE = 64

#: Seconds after the end of a broker at which its processes have mostly ended too, and can be collected; and the longest
#: wait for those that have not. Each wait is three times the one before.
_REAP = 1.0
_REAP_SLOWEST = 27.0


class BrokerGone(Exception):
    """The broker has ended, or ends."""


class Membership:
    """This process among the clients of one broker.

    Args:
        folder: Where the broker listens; it is closed with the membership.
        name: Of its socket.
        channel: The connection that stands for this process.
        reports: Receives reports and states.
        token: Of this client.
        pid: The broker's process id.
        on_pause: Called, in the supervisor's thread, with what the broker says of whether the function is paused.

    Attributes:
        ready: Whether a worker can answer, as the broker has said last.
        version: The version of the current model, as the broker has said last; None if it has none.
        gone: Whether the broker has ended.
        on_loss: Called, in the supervisor's thread, if the broker ends after a worker could answer.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        channel: Channel,
        reports: socket.socket,
        *,
        token: bytes,
        pid: int,
        on_pause: Callable[[bool], object],
    ) -> None:
        self.pid = pid
        self.ready = False
        self.version: str | None = None
        self.gone = False
        self.on_loss: Callable[[], object] | None = None
        self._was_ready = False
        self._on_pause = on_pause
        self._folder = folder
        self._name = name
        self._channel = channel
        self._token = token
        self._reports = reports
        self._idle: deque[Channel] = deque()
        self._family: list[int] = []
        supervisor().call(lambda: supervisor().watch(reports.fileno(), self._heed))

    # Connections

    def idle_connection(self) -> Channel | None:
        """A connection that no other call uses, if there is one already. Does not block."""
        with suppress(IndexError):
            return self._idle.pop()
        return None

    def connection(self) -> Channel:
        """A connection that no other call uses.

        Raises:
            BrokerGone: There is none any more.
        """
        idle = self.idle_connection()
        if idle is not None:
            return idle
        try:
            connected = None if self.gone else self._folder.connect(self._name, _ANSWER)
        except (OSError, ForeignPeer) as error:
            raise BrokerGone from error
        if connected is None:
            raise BrokerGone
        channel = Channel(connected)
        self.say(channel, "call", self._token)
        return channel

    def give_back(self, channel: Channel) -> None:
        """Keep a connection for another call."""
        if len(self._idle) >= _MOST_IDLE:
            channel.close()
            return
        self._idle.append(channel)
        if self.gone:
            self._close_idle()

    def say(self, channel: Channel, what: Request, *details: Any, limit: float = 0.0) -> None:
        """Send a message; ``limit`` bounds this and what is received next, in seconds.

        Raises:
            BrokerGone: There is nobody to receive it.
        """
        try:
            channel.set_timeout(limit)
            channel.send((what, *details))
        except OSError as error:
            channel.close()
            raise BrokerGone from error

    def ask(self, what: Request, *details: Any, limit: float = 0.0) -> Any:
        """Ask something, and wait for the answer.

        Raises:
            BrokerGone: There is no answer.
            BlockingIOError: ``limit`` seconds have passed.
            Exception: What the broker answers.
        """
        channel = self.connection()
        self.say(channel, what, *details, limit=limit)
        try:
            kind, *answer = channel.receive()
        except BlockingIOError:
            channel.close()
            raise
        except (EOFError, OSError) as error:
            channel.close()
            raise BrokerGone from error
        self.give_back(channel)
        if kind == "failed":
            raise unpacked(*answer)
        return answer[0]

    # The end

    def leave(self, patience: float) -> None:
        """Be a client no more. The last one waits until the broker has ended, at most so many seconds."""
        with suppress(OSError, EOFError):
            self._channel.set_timeout(max(patience, 0.001))
            self._channel.send(("leave",))
            if patience:
                _, last = self._channel.receive()
                if last:
                    _wait_until_gone(self.pid, patience)
        self._end()
        _broker_launch.reap()

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors. The parent stays a client."""
        self.gone = True
        self._channel.close()
        self._reports.close()
        self._folder.close()
        self._close_idle()

    def _close_idle(self) -> None:
        while True:
            try:
                self._idle.pop().close()
            except IndexError:
                return

    def _end(self) -> None:
        self.gone, self.ready, self.version = True, False, None
        self._close_idle()
        supervisor().call(self._forget)

    # In the supervisor's thread

    def _heed(self) -> None:
        try:
            message = self._reports.recv(1 << 17)
        except OSError:
            message = b""
        if not message:
            self._broker_ended()
        elif message[:1] == REPORT:
            _news.replay(message[1:])
        else:
            state = pickle.loads(memoryview(message)[1:])  # noqa: S301 - from this program's own broker
            self.ready, self._family, self.version, paused = state
            self._on_pause(paused)
            self._was_ready = self._was_ready or self.ready

    def _broker_ended(self) -> None:
        lost = not self.gone and self._was_ready
        self._end()
        # Where this is a container's first process, the broker's processes have become its children.
        supervisor().later(_REAP, _broker_launch.reap)
        _reap_later([self.pid, *self._family], _REAP)
        if lost and self.on_loss is not None:
            self.on_loss()  # last: it needs a thread, and may not get one

    def _forget(self) -> None:
        if self._reports.fileno() >= 0:
            supervisor().forget(self._reports.fileno())
        self._reports.close()
        self._channel.close()
        self._folder.close()


def _reap_later(pids: list[int], delay: float) -> None:
    """Collect the processes when they have ended, which on a busy machine takes a while."""

    def reap() -> None:
        left = _processes.reap(pids)
        if left and delay < _REAP_SLOWEST:
            _reap_later(left, 3 * delay)

    supervisor().later(delay, reap)


def _wait_until_gone(pid: int, seconds: float) -> None:
    """Wait until a process has ended, or is a zombie, at most so many seconds."""
    try:
        process = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return
    try:
        select.select([process], [], [], seconds)
    finally:
        os.close(process)
