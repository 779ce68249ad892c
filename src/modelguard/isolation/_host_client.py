"""A process as the client of a broker, and its connections to it."""

from __future__ import annotations

import math
import os
import pickle
import select
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from modelguard.errors import DeadlineExceeded, Reloading
from modelguard.isolation import _processes, _supervisor
from modelguard.isolation._channel import Channel, Folder, ForeignPeer, Unreadable, pair
from modelguard.isolation._claims import Claim, Claims, Limits, aside
from modelguard.isolation._host_identity import REPORT, BrokerOrders, Request, unpacked
from modelguard.isolation._launch import start_interpreter
from modelguard.isolation._supervisor import supervisor
from modelguard.telemetry import Reason, WorkerEndCause

# Start a broker: a fresh interpreter with a session of its own, which outlives the process that starts it.
#
# It keeps nothing of that process open. Whoever reads the output of a server would wait for the broker's end.


#: Seconds for a broker that has hung up to end.
_EXIT = 1.0

#: Brokers that this process has started, until they have been waited for.
_started: dict[int, subprocess.Popen[bytes]] = {}


class NotStarted(Exception):
    """A broker has ended before it served, or does not come up."""


def start_broker(orders: BrokerOrders, lock: int, timeout: float) -> None:
    """Start a broker and wait until it listens.

    Args:
        orders: What it is told.
        lock: Holds the lock on the folder, and is passed on: the broker releases it.
        timeout: Seconds to wait at most.

    Raises:
        NotStarted: It does not listen.
        OSError: No process or no descriptor is left.
    """
    ours, theirs = pair()
    channel = Channel(ours)
    try:
        with theirs:
            words = "broker", ".".join(orders.options.function)
            process = start_interpreter(
                "_broker", (theirs.fileno(), lock), *words, prints=False, start_new_session=True
            )
            _started[process.pid] = process
    except BaseException:
        channel.close()
        raise
    try:
        channel.set_timeout(timeout)
        channel.send(orders)
        outcome, text = channel.receive()
    except BlockingIOError:
        process.kill()
        raise NotStarted(f"its broker does not come up within {timeout:.0f} s") from None
    except (EOFError, OSError):
        raise NotStarted(f"its broker ended: {_exit_of(process)}") from None
    finally:
        channel.close()
    if outcome != "listening":
        raise NotStarted(f"its broker could not start:\n{text}")


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        return _processes.describe_exit(process.wait(_EXIT))
    process.kill()
    return "it hung up"


def reap() -> None:
    """Collect the brokers that have ended. Those of a parent are not children of this process."""
    for pid, process in _started.copy().items():
        with suppress(OSError):
            if process.poll() is not None:
                _started.pop(pid, None)


def _after_fork_in_child() -> None:
    for process in _started.values():
        process.returncode = 0  # it is no child of this process, and must not warn when it is dropped
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

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
        reap()

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
            _supervisor.replay(message[1:])
        else:
            state = pickle.loads(memoryview(message)[1:])  # noqa: S301 - from this program's own broker
            self.ready, self._family, self.version, paused = state
            self._on_pause(paused)
            self._was_ready = self._was_ready or self.ready

    def _broker_ended(self) -> None:
        lost = not self.gone and self._was_ready
        self._end()
        # Where this is a container's first process, the broker's processes have become its children.
        supervisor().later(_REAP, reap)
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


# A call's part of the talk with a broker: it asks for one worker, and gives it back.


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
