"""The program of a broker: it owns the molds of one isolated function for all processes of a host that call it.

It imports nothing of the application. Its clients ask it for workers, and then talk to the workers themselves. It lives
as long as it has clients, and some seconds more if the last one has ended without a word.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import math
import os
import pickle
import resource
import signal
import socket
import termios
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from modelguard import telemetry
from modelguard.errors import told
from modelguard.isolation import _channel, _host, _supervisor
from modelguard.isolation._channel import AT_ONCE, Channel, Unchanged, Unreadable
from modelguard.isolation._host import Answer, BrokerOrders, Request
from modelguard.isolation._mold_owner import MoldGuard, end_all
from modelguard.isolation._mold_workers import CallTimes, Claim
from modelguard.isolation._scopes import Followed, ProcessScope, Taken, TakenWorker, aside
from modelguard.isolation._supervisor import Files, supervisor
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle._engine import lent_turn
from modelguard.runtime import waiting
from modelguard.runtime.background import start_thread
from modelguard.runtime.child_processes import exit_now
from modelguard.runtime.waiting import Steps, Timeout
from modelguard.telemetry import Event, Reason, WorkerEndCause, logger

#: Seconds for the rest of a message that has begun, and for room for an answer: both are there at once, unless the
#: client is no client. Everybody waits meanwhile.
_PATIENCE = 1.0


class ClientConnection:
    """Obeys one connection. In the supervisor's thread, unless it is said otherwise."""

    reports: socket.socket  # where the client's process hears of what happens; of the connection that stands for it

    def __init__(self, channel: Channel, broker: _Broker, pid: int) -> None:
        self.channel = channel
        self.pid = pid
        self.granted_at: float | None = None
        self.token = b""
        self.state = b""  # of the molds, as it was told last
        self._broker = broker
        self._claim: Followed | None = None
        self._taken: TakenWorker | None = None
        self._closed = False
        self._unread = False  # by the client, which has gone: that a worker was granted
        self._ending_call = threading.Lock()
        self._handlers: dict[Request, Callable[..., object]] = {
            "join": self._join,
            "call": self._call,
            "take": self._take,
            "release": self._release,
            "end": self._end_worker,
            "load": lambda: self._await(broker.scope.until_loaded),
            "reload": self._reload,
            "unload": lambda: self._await(broker.scope.until_unloaded),
            "pause": lambda paused: self._do(lambda: broker.pause(paused=paused)),
            "status": lambda: self._do(broker.status),
            "leave": self._leave,
        }

    def heed(self) -> None:
        try:
            while not self._closed:
                self.channel.set_timeout(_PATIENCE)
                self._obey(*self.channel.receive())
                if not self.channel.has_unread:
                    return
        except ConnectionResetError:  # it has hung up before it has read that a worker was granted
            self._unread = True
            self.end()
        except (EOFError, OSError, Unreadable):
            self.end()
        except Exception:  # noqa: BLE001 - a message of no client, or a fault of this module, costs one connection
            logger.exception("%s: its broker closes a connection", self._broker.name)
            self.end()

    def _obey(self, kind: Request, *details: Any) -> None:
        if not self.token and kind not in {"join", "call"}:
            raise EOFError  # it belongs to no client
        self._handlers[kind](*details)

    def answer(self, kind: Answer, *details: Any, fds: Sequence[int] = ()) -> bool:
        """Send an answer; false if nobody will read it."""
        try:
            self.channel.set_timeout(_PATIENCE)
            self.channel.send((kind, *details), fds)
        except OSError:  # its end of file is read next
            return False
        return True

    def _fail(self, error: BaseException) -> None:
        self.answer("failed", Unchanged(error, with_cause=True))

    def end(self) -> None:
        """The client has closed the connection, or has ended. The worker of its call ends too: it may still compute."""
        was_closed, self._closed = self._closed, True
        if self._claim is not None:
            self._claim.withdraw()
        taken = self._take_back()
        if taken is not None and self._unread:
            taken.put_back()
        elif taken is not None:
            taken.end_worker("cancelled", blame=False)
        if not was_closed:
            self._broker.supervisor.forget(self.channel.fileno())
            self.channel.close()
            self._broker.ended(self)

    # Membership

    def report(self, kind: bytes, content: bytes) -> bool:
        """Send a report; false if there is no room, or no reader. Never blocks. From any thread."""
        try:
            self.reports.send(kind + content, AT_ONCE)
        except OSError:
            return False
        return True

    def _join(self, token: bytes, code: Files) -> None:
        self.token = token
        self.reports = socket.socket(fileno=self.channel.take_fd())
        self._broker.join(self, code)

    def _call(self, token: bytes) -> None:
        self._broker.admit(token)
        self.token = token

    def _leave(self) -> None:
        last = self._broker.leave(self)
        self.answer("done", last)
        if last:
            self._broker.end_if_alone()
        raise EOFError

    # One worker

    def _take(self, again: bool, admitted: bool) -> None:  # noqa: FBT001 - as they come
        times = CallTimes(time.monotonic(), again=again)
        claim = Claim(times, client=self.token, tell=self._tell, admitted=admitted)
        self._claim = Followed(self._broker.scope, claim, self._claimed)
        self._claim.begin()

    def _tell(self, loading: bool) -> None:  # noqa: FBT001 - as it comes
        """The client's ``timeout`` does not count while a model loads."""
        self.answer("loading" if loading else "waiting")

    def _claimed(self, taken: Taken | None, error: BaseException | None) -> None:
        """The call has its worker, or an error. From any thread."""
        if taken is None:
            assert error is not None  # noqa: S101 - for the checkers
            self._broker.supervisor.call(functools.partial(self._fail, error))
            return
        assert isinstance(taken, TakenWorker)  # noqa: S101 - for the checkers
        self._taken, self.granted_at = taken, time.monotonic()
        self._broker.granted(self, taken.pid)
        if self._closed or not self.answer("granted", taken.pid, fds=[taken.channel.fileno()]):
            self._unread = True
            self._broker.supervisor.call(self.end)

    def _release(self, worn: tuple[Reason, ...], counts: bool) -> None:  # noqa: FBT001 - as they come
        if (taken := self._take_back()) is None:
            raise EOFError
        taken.mold.replay_news()  # of this call, before the worker's reports are those of the next one's client
        taken.release(worn=worn, counts=counts)

    def _end_worker(self, cause: WorkerEndCause, blame: bool) -> None:  # noqa: FBT001 - as they come
        if self._taken is None:
            raise EOFError
        if cause != "crashed" or self._taken.worker.exit is not None:
            self._lost(cause, blame)
        else:  # it waits for the mold's report, which this thread reads
            aside(functools.partial(self._lost, cause, blame))

    def _lost(self, cause: WorkerEndCause, blame: bool) -> None:  # noqa: FBT001 - as they come
        taken = self._take_back()
        self.answer("ended", "unknown" if taken is None else taken.end_worker(cause, blame=blame))

    def _take_back(self) -> TakenWorker | None:
        with self._ending_call:  # two threads may find at once that the call is over
            taken, self._taken, self.granted_at = self._taken, None, None
        return taken

    # The mold

    def _reload(self, wait: bool, lent: bool) -> None:  # noqa: FBT001 - as they come
        if wait:
            self._await(self._broker.scope.until_reloaded, lent=lent)
        else:
            self._do(self._broker.scope.request_reload)

    def _await(self, until: Callable[[Timeout], Steps[None]], *, lent: bool = False) -> None:
        def work() -> None:
            with lent_turn() if lent else nullcontext():
                waiting.block(until(Timeout(None)))

        start_thread(functools.partial(self._do, work), "modelguard-broker")

    def _do(self, work: Callable[[], object]) -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - it is the client's
            self._fail(error)
        else:
            self.answer("done", result)


#: Seconds without clients after which it ends, if the last one has ended without leaving, as when it was killed: a
#: server that starts its only worker process again finds the model. With its own end it takes less than five, also on a
#: busy host.
_GRACE = 3.0

#: Seconds that it waits for its first client, which has started it, while that process lives.
_FIRST = 30.0

#: Seconds between two attempts to report its state to a client that does not read, or to accept one.
_AGAIN = 0.5

#: Seconds beyond ``timeout`` that a client may keep a worker: one that is stopped, or whose GIL is held, must not hold
#: up the others.
_OVERTIME = 5.0

#: Seconds between two looks at that, and at the process that has started it.
_LOOK = 1.0

#: Seconds that its end waits for the lock, which a stopped process may hold; its own socket it may remove anyway.
_LOCK = 5.0

#: Descriptors that it may have: each thread of each client that has called takes one.
_DESCRIPTORS = 65_536


def main(starter: int, lock: int) -> NoReturn:
    """Listen, tell the process that has started it, and serve until nobody is left."""
    channel = Channel(socket.socket(fileno=starter))
    try:
        orders: BrokerOrders = channel.receive()
        broker = _Broker(orders)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the starter reports it, unless it is gone
        with suppress(OSError):
            channel.send(("failed", (told(error), "".join(traceback.format_exception(error)))))
        os._exit(1)
    _allow_descriptors()
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)
    with suppress(OSError):
        channel.send(("listening", ""))
    channel.close()
    gc.freeze()
    broker.serve()
    exit_now(0)


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Broker:
    def __init__(self, orders: BrokerOrders) -> None:
        self.name = orders.options.name
        self._orders = orders
        self._folder = _host.Folder(Path(orders.folder))
        self._molds = MoldGuard(orders.options, orders.source, orders.origin, paused=orders.paused)
        self._molds.code = orders.code
        # Times are counted by the clients, which hang up: a broker needs no timer for each call.
        self.scope = ProcessScope(replace(orders.options, timeout=None), self._molds)
        self.supervisor = supervisor()
        self._clients: OrderedDict[bytes, ClientConnection] = OrderedDict()
        self._last: ClientConnection | None = None
        self._connections: set[ClientConnection] = set()
        self._holders: dict[int, bytes] = {}
        timeout = orders.options.timeout
        self._may_keep = math.inf if timeout is None else timeout + _OVERTIME
        self._streams = "generator" in orders.options.kind
        self._look_at = math.inf
        self._last_left = -math.inf
        self._left = threading.Event()
        self._listening = self._folder.listen(orders.socket)
        self._inode = os.stat(orders.socket, dir_fd=self._folder.fileno()).st_ino
        self._report()

    def serve(self) -> None:
        """Serve until nobody is left. In the main thread, which has nothing else to do than to take signals."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A service manager sends it to all processes of a service. It is the clients who decide.
            signal.signal(number, lambda *_: self.supervisor.call(self.end_if_alone))
        self.supervisor.call(self._listen)
        self.supervisor.later(_LOOK, functools.partial(self._await_first_client, time.monotonic() + _FIRST))
        self._left.wait()
        until = time.monotonic() + _LOCK
        with self._folder.locked(lambda: time.monotonic() > until), suppress(OSError):
            if os.stat(self._orders.socket, dir_fd=self._folder.fileno()).st_ino == self._inode:
                self._folder.remove(self._orders.socket)
        self.scope.close(None)
        end_all()
        self.supervisor.call(self._read_events)  # what has just been reported
        self.supervisor.flush(_PATIENCE)

    # Clients. In the supervisor's thread

    def _listen(self) -> None:
        if self._listening.fileno() >= 0:
            self.supervisor.watch(self._listening.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError:  # no descriptor is free
            self.supervisor.forget(self._listening.fileno())
            self.supervisor.later(_AGAIN, self._listen)
            return
        try:
            pid = _host.check_peer(accepted)
        except _host.ForeignPeer as error:
            logger.warning("%s: refused %s", self.name, error)
            accepted.close()
            return
        connection = ClientConnection(Channel(accepted), self, pid)
        self._connections.add(connection)
        self.supervisor.watch(accepted.fileno(), connection.heed)

    def join(self, connection: ClientConnection, code: Files) -> None:
        if (path := _supervisor.changed(self._molds.code, code)) is not None:
            connection.reports.close()
            connection.answer("unwelcome", path)
            raise EOFError
        self._clients[connection.token] = connection
        connection.answer("welcome", os.getpid())
        self._tell_state()

    def admit(self, token: bytes) -> None:
        if token not in self._clients:
            raise EOFError

    def leave(self, connection: ClientConnection) -> bool:
        last = list(self._clients.values()) == [connection]
        if last:  # it waits for the end, and hears of it
            self._last = connection
        self._forget(connection)
        return last

    def ended(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if self._forget(connection):
            self.supervisor.later(_GRACE, self._end_if_long_alone)

    def _forget(self, client: ClientConnection) -> bool:
        """Serve a process no more; false if the connection stands for none."""
        if self._clients.get(client.token) is not client:
            return False
        del self._clients[client.token]
        self._last_left = time.monotonic()
        for one in tuple(self._connections):
            if one.token == client.token and one is not client:
                one.end()
        if client is not self._last:
            client.reports.close()
        return True

    # Molds

    def status(self) -> IsolationStatus:
        clients = tuple(client.pid for client in self._clients.values())
        return replace(self.scope.status(), broker=os.getpid(), clients=clients)

    def pause(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer, and report it to the clients before the one that has asked."""
        self.scope.set_paused(paused=paused)
        self._tell_state()

    # Reports

    def granted(self, connection: ClientConnection, worker: int) -> None:
        """Remember whose call a worker runs: its reports go there."""
        if len(self._holders) > 1000:  # noqa: PLR2004 - most of these workers are gone
            self._holders.clear()
        self._holders[worker] = connection.token
        if self._may_keep < math.inf and self._look_at == math.inf:
            self._look_again()

    def _look_again(self) -> None:
        self._look_at = time.monotonic() + _LOOK
        self.supervisor.later(_LOOK, self._look)

    def _look(self) -> None:
        """Take workers back from clients that keep them for too long, not counting the time when this was stopped."""
        now = time.monotonic()
        stopped = now - self._look_at if now > self._look_at + _LOOK else 0.0
        holding = [one for one in self._connections if one.granted_at is not None]
        for connection in holding:
            connection.granted_at = (connection.granted_at or now) + stopped
            if self._streams and self._reads(connection.token):  # the client counts the timeout, for each step
                connection.granted_at = now
            elif connection.granted_at < now - self._may_keep:
                logger.warning("%s: process %d keeps a worker for too long", self.name, connection.pid)
                connection.end()
        self._look_at = math.inf
        if holding:
            self._look_again()

    def _reads(self, token: bytes) -> bool:
        """Whether a client has read all that it was told until now, which is something at least."""
        client = self._clients[token]
        unread = any(fcntl.ioctl(client.reports.fileno(), termios.TIOCOUTQ, bytes(4)))
        client.report(_host.STATE, client.state)
        return not unread

    def _report(self) -> None:
        ours, theirs = _channel.report_pair()
        self._read_events = functools.partial(_channel.replay, ours)
        reporter = _channel.Reporter(theirs)
        reporter.install(self._orders.origin.levels)

        def report(event: Event) -> None:
            if not isinstance(event, telemetry.GuardPaused | telemetry.GuardResumed):  # which each client reports
                reporter.report_event(event)

        telemetry.set_hooks([report, lambda _: self.supervisor.call(self._tell_state)])
        _channel.receiver = self._hand_on
        self.supervisor.call(lambda: self.supervisor.watch(ours.fileno(), self._read_events))

    def _hand_on(self, report: bytes) -> None:
        """A report of a worker goes to the process whose call it runs, or ran last; the others to the oldest client."""
        holder = self._holders.get(_channel.sender(report), b"")
        client = self._clients.get(holder) or next(iter(self._clients.values()), self._last)
        if client is not None:
            client.report(_host.REPORT, report)

    def _tell_state(self) -> None:
        mold = self._molds.current
        pids = [] if mold is None else mold.pids()
        state = pickle.dumps((self.scope.ready, pids, self.scope.version, self.scope.paused))
        for client in self._clients.values():
            if client.state != state:
                if client.report(_host.STATE, state):
                    client.state = state
                else:
                    self.supervisor.later(_AGAIN, self._tell_state)

    # The end

    def end_if_alone(self) -> None:
        if not self._clients:
            self._end()

    def _await_first_client(self, until: float) -> None:
        """End if nobody has ever come, and the process that has started this one is gone or gives up."""
        if self._clients or self._last_left > -math.inf:
            return
        if os.getppid() == self._orders.starter and time.monotonic() < until:
            self.supervisor.later(_LOOK, functools.partial(self._await_first_client, until))
        else:
            self._end()

    def _end_if_long_alone(self) -> None:
        if time.monotonic() - self._last_left >= _GRACE:
            self.end_if_alone()

    def _end(self) -> None:
        if self._listening.fileno() < 0:
            return
        # First, because a process that holds the lock may wait for an answer of this one.
        self.supervisor.forget(self._listening.fileno())
        self._listening.close()
        for connection in tuple(self._connections):
            connection.end()
        self._left.set()
