"""A process as the client of a broker: how it finds one, or starts one, and its connections to it."""

from __future__ import annotations

import os
import pickle
import secrets
import select
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from modelguard.errors import LoadFailed
from modelguard.isolation import _processes, _supervisor
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._host import (
    NAME,
    REPORT,
    BrokerOrders,
    Folder,
    ForeignPeer,
    Request,
    identity_of,
    orders_for,
    prefix_of,
    unpacked,
)
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._supervisor import start_interpreter, supervisor
from modelguard.lifecycle._guard_options import GuardOptions
from modelguard.runtime import fork
from modelguard.runtime.host_lock import private_folder
from modelguard.telemetry import logger

# Start a broker: a fresh interpreter with a session of its own, which outlives the process that starts it.
#
# It keeps nothing of that process open. Whoever reads the output of a server would wait for the broker's end.


#: Seconds for a broker that has hung up to end.
_EXIT = 1.0

#: Brokers that this process has started, until they have been waited for.
_started: dict[int, subprocess.Popen[bytes]] = {}


class NotStarted(Exception):
    pass


def start_broker(orders: BrokerOrders, lock: int, timeout: float) -> None:
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


fork.at_fork(fork.Rank.LOCKS, in_child=_after_fork_in_child)


#: Seconds in which a broker accepts a connection or a client. It does nothing that takes long.
_ANSWER = 5.0

#: Connections that are kept for the next calls. Each call that waits has one.
_MOST_IDLE = 64

#: Seconds after the end of a broker at which its processes have mostly ended too, and can be collected; and the longest
#: wait for those that have not. Each wait is three times the one before.
_REAP = 1.0

_REAP_SLOWEST = 27.0


class BrokerGone(Exception):
    pass


class Connection(Channel):
    """A connection to the broker, for one request or call at a time."""

    def __init__(self, connected: socket.socket, membership: Membership) -> None:
        super().__init__(connected)
        self._membership = membership

    def say(self, what: Request, *details: Any, limit: float = 0.0) -> None:
        """Send a message; ``limit`` bounds this and what is received next, in seconds."""
        try:
            self.set_timeout(limit)
            self.send((what, *details))
        except OSError as error:
            self.close()
            raise BrokerGone from error

    def ask(self, what: Request, *details: Any, limit: float = 0.0) -> Any:
        """Send a message, and wait for the answer. This connection can be used again unless it fails."""
        self.say(what, *details, limit=limit)
        try:
            answer = self.receive()
        except (EOFError, OSError) as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise
            raise BrokerGone from error
        self.give_back()
        return answer

    def give_back(self) -> None:
        self._membership.keep(self)


class Membership:
    """This process among the clients of one broker."""

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
        self._idle: deque[Connection] = deque()
        self._family: list[int] = []
        supervisor().call(lambda: supervisor().watch(reports.fileno(), self._heed))

    # Connections

    def idle_connection(self) -> Connection | None:
        """A connection that no other call uses, if there is one already. Does not block."""
        with suppress(IndexError):
            return self._idle.pop()
        return None

    def connection(self) -> Connection:
        idle = self.idle_connection()
        if idle is not None:
            return idle
        try:
            connected = None if self.gone else self._folder.connect(self._name, _ANSWER)
        except (OSError, ForeignPeer) as error:
            raise BrokerGone from error
        if connected is None:
            raise BrokerGone
        connection = Connection(connected, self)
        connection.say("call", self._token)
        return connection

    def keep(self, connection: Connection) -> None:
        if len(self._idle) >= _MOST_IDLE:
            connection.close()
            return
        self._idle.append(connection)
        if self.gone:
            self._close_idle()

    def ask(self, what: Request, *details: Any, limit: float = 0.0) -> Any:
        kind, *answer = self.connection().ask(what, *details, limit=limit)
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
        while (idle := self.idle_connection()) is not None:
            idle.close()

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


# How a process finds the broker of an isolated function, or starts one: elected by a lock, found by a name.


#: The same, where an event loop may wait.
_SOON = 0.5

#: Seconds for finding or starting a broker: on a busy host, a fresh interpreter takes some.
_LONGEST = 30.0

#: Seconds between two attempts.
_ELECTION_POLL = 0.02


class Election:
    """Finds a broker, or starts one.

    Args:
        options: Of the function.
        source: Of its guard.
        elect: Whether to start one if there is none.
        paused: Whether one that is started begins paused.
        on_pause: Hears whether the broker is paused.
    """

    def __init__(
        self,
        options: IsolationOptions,
        source: GuardOptions[Any],
        *,
        elect: bool,
        paused: bool,
        on_pause: Callable[[bool], object],
    ) -> None:
        self._obstacle = "another process holds the lock"
        self._options = options
        self._source = source
        self._elect = elect
        self._patience = _ANSWER if elect else _SOON
        self._paused = paused
        self._on_pause = on_pause
        self._identity = identity_of(options, source)
        self._prefix = prefix_of(self._identity)
        self._serving: set[str] = set()
        self._hung = False

    def join(self, give_up: Callable[[], bool]) -> Membership | None:
        """Become the client of a broker. Blocks."""
        longest = time.monotonic() + _LONGEST

        def over() -> bool:
            return give_up() or time.monotonic() > longest

        while (found := self._attempt(over)) is None and self._elect:
            if over():
                raise LoadFailed(self._options.name, f"no broker serves in {private_folder()}: {self._obstacle}")
            time.sleep(_ELECTION_POLL)
        return found

    def _attempt(self, give_up: Callable[[], bool]) -> Membership | None:
        folder = found = None
        try:
            folder = Folder(private_folder())
            found = self._find(folder)
            if found is None and self._elect and not self._hung:
                with folder.locked(give_up) as lock:
                    if lock is not None:
                        found = self._find(folder)
                        if found is None and not self._hung:
                            self._start(folder, lock)
        except NotStarted as error:
            raise LoadFailed(self._options.name, str(error)) from error
        except OSError as error:  # no process or no descriptor is left
            raise LoadFailed(self._options.name, f"its broker cannot be started or found: {error}") from error
        except ForeignPeer as error:
            raise LoadFailed(self._options.name, f"where its broker should listen there is {error}") from error
        finally:
            if found is None and folder is not None:
                folder.close()
        return found

    def _find(self, folder: Folder) -> Membership | None:
        """Ask all brokers of this name, until one takes this process."""
        self._serving.clear()
        self._hung = False
        for name in folder.names(self._prefix):
            found = self._ask(folder, name)
            if found is not None:
                return found
        return None

    def _ask(self, folder: Folder, name: str) -> Membership | None:
        connected = folder.connect(name, self._patience)
        if connected is None:
            return None
        channel = Channel(connected)
        token = secrets.token_bytes(16)
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found = None
        try:
            channel.set_timeout(self._patience)
            with theirs:
                channel.send(("join", token, self._identity, _supervisor.imported), [theirs.fileno()])
            answer, *details = channel.receive()
            if answer == "welcome":
                found = Membership(folder, name, channel, reports, token=token, pid=details[0], on_pause=self._on_pause)
            else:
                self._refused(name, *details)
        except BlockingIOError:
            self._hung = True
            self._obstacle = f"the one that listens there does not answer within {self._patience:g} s"
        except (EOFError, OSError):  # it ends
            pass
        finally:
            if found is None:
                channel.close()
                reports.close()
        return found

    def _refused(self, name: str, why: str, text: str) -> None:
        self._serving.add(name)
        if why == "identity":
            raise LoadFailed(self._options.name, f"its broker serves another function of the same name; {text} differ")
        # After a deploy, while processes of the old code still serve: each code has a broker of its own.
        logger.warning(
            "%s: %s has changed since the mold of the other processes was loaded; this one gets another mold",
            self._options.name,
            text,
        )

    def _start(self, folder: Folder, lock: int) -> None:
        self._remove_remains(folder)
        number = next(n for n in range(1, len(self._serving) + 2) if f"{self._prefix}{n}" not in self._serving)
        socket_name = f"{self._prefix}{number}"
        orders = orders_for(folder.path, socket_name, self._identity, self._options, self._source, paused=self._paused)
        start_broker(orders, lock, _LONGEST)

    def _remove_remains(self, folder: Folder) -> None:
        """Remove sockets whose brokers were killed."""
        for name in folder.names(""):
            if NAME.fullmatch(name) and name not in self._serving:
                connected = folder.connect(name, _ANSWER)
                if connected is None:
                    folder.remove(name)
                else:
                    connected.close()
