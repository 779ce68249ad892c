"""The program of a broker: it owns the molds of one isolated function for all processes of a host that call it.

It imports nothing of the application. Its clients ask it for workers, and then talk to the workers themselves. It lives
as long as it has clients, and some seconds more if the last one has ended without a word.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import pickle
import resource
import signal
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from modelguard import telemetry
from modelguard.errors import ModelGuardError, Reloading
from modelguard.isolation import _host, _supervisor
from modelguard.isolation._channel import AT_ONCE, Channel, Unreadable
from modelguard.isolation._host import (
    REPORT,
    STATE,
    Answer,
    BrokerOrders,
    Folder,
    ForeignPeer,
    Identity,
    Request,
    packed,
)
from modelguard.isolation._mold_guard import MoldGuard, end_all
from modelguard.isolation._mold_workers import MoldGone, Waiter, Worker
from modelguard.isolation._molds import Mold
from modelguard.isolation._processes import leave
from modelguard.isolation._scopes import ProcessScope
from modelguard.isolation._supervisor import Files, supervisor
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle._state import Generation
from modelguard.runtime.background import THREADS, start_thread
from modelguard.runtime.waiting import Timeout
from modelguard.telemetry import Event, Reason, WorkerEndCause, logger

#: Seconds between looks for the next mold after one has died.
_POLL = 0.005

#: Seconds for the rest of a message that has begun, and for room for an answer: both are there at once, unless the
#: client is no client. Everybody waits meanwhile.
_PATIENCE = 1.0


class _Waiter(Waiter[Worker]):
    def __init__(self, connection: ClientConnection) -> None:
        super().__init__(connection.token, arrived=connection.asked_at, admitted=connection.admitted)
        self._connection = connection

    def wake(self) -> None:
        self._connection.woken(self)


class ClientConnection:
    """Obeys one connection. In the supervisor's thread, unless it is said otherwise."""

    def __init__(self, channel: Channel, broker: _Broker, pid: int) -> None:
        self.channel = channel
        self.pid = pid
        self.granted_at: float | None = None
        self.asked_at = 0.0
        self.admitted = False
        self.token = b""
        self._broker = broker
        self._on_load: Callable[[], object] | None = None
        self._generation: Generation[Mold] | None = None
        self._waiter: _Waiter | None = None
        self._worker: Worker | None = None
        self._gone: Mold | None = None
        self._gone_since = 0.0
        self._closed = False
        self._ending_call = threading.Lock()
        self._handlers: dict[Request, Callable[..., object]] = {
            "join": self._join,
            "call": self._call,
            "take": self._take,
            "withdraw": self._withdraw,
            "release": self._release,
            "lose": self._lose,
            "load": self._load,
            "reload": self._reload,
            "unload": self._unload,
            "pause": self._pause,
            "status": self._status,
            "leave": self._leave,
        }

    def heed(self) -> None:
        try:
            while not self._closed:
                self.channel.set_timeout(_PATIENCE)
                self._obey(*self.channel.receive())
                if not self.channel.has_unread:
                    return
        except (EOFError, OSError, Unreadable):
            self.end()
        except Exception:  # noqa: BLE001 - a message of no client, or a fault of this module, costs one connection
            logger.exception("%s: its broker closes a connection", self._broker.engine.name)
            self.end()

    def _obey(self, kind: Request, *details: Any) -> None:
        if not self.token and kind not in {"join", "call"}:
            raise EOFError  # it belongs to no client
        self._handlers[kind](*details)

    def answer(self, kind: Answer, *details: Any) -> None:
        try:
            self._say((kind, *details))
        except OSError:  # its end of file is read next
            return

    def _say(self, message: object, fds: Sequence[int] = ()) -> None:
        self.channel.set_timeout(_PATIENCE)
        self.channel.send(message, fds)

    def end(self) -> None:
        """The client has closed the connection, or has ended. The worker of its call ends too: it may still compute."""
        if self._closed:
            return
        self._closed = True
        self._broker.supervisor.forget(self.channel.fileno())
        if self._waiter is not None and self._generation is not None:
            if self._generation.model.workers.withdraw(self._waiter):
                self._leave_mold()
            else:
                self._worker = self._waiter.worker
        if self._worker is not None:
            self._lose_here("cancelled", blame=False)
        self.channel.close()
        self._broker.ended(self)

    # Membership

    def _join(self, token: bytes, identity: Identity, code: Files) -> None:
        self.token = token
        self._broker.join(self, token, identity, code)

    def _call(self, token: bytes) -> None:
        self._broker.admit(self, token)
        self.token = token

    def _leave(self) -> None:
        last = self._broker.leave(self)
        self.answer("done", last)
        if last:
            self._broker.end_if_alone()
        raise EOFError

    # One worker

    def _take(self) -> None:
        self._gone = None
        self.asked_at, self.admitted = time.monotonic(), False
        self._try()

    def _try(self) -> None:
        if self._closed:
            return
        generation = self._broker.engine.state.enter()
        if generation is None:
            self.answer("loading")
            self._wait_for_load(self._try_after_load)
            return
        self._generation = generation
        self._waiter = _Waiter(self)
        if generation.model is self._gone:
            self._await_next_mold()
            return
        try:
            worker = generation.model.workers.request(self._waiter)
        except MoldGone:
            self._await_next_mold()
        except ModelGuardError as error:
            self._leave_mold()
            self.answer("failed", *packed(error))
        else:
            if worker is None:
                self.admitted = True
                self._broker.waits()
            else:
                self._waiter = None
                self._grant(worker)

    def follow(self) -> bool:
        """Whether its call waits for a worker. If the mold has been replaced, it waits for one of the next mold."""
        waiter, generation = self._waiter, self._generation
        if waiter is None or generation is None or self._worker is not None:
            return False
        if generation.retired and not self._broker.engine.state.closed and generation.model.workers.withdraw(waiter):
            self._leave_mold()
            self._try()
        return True

    def _try_after_load(self) -> None:
        self.answer("waiting")
        self._try()

    def woken(self, waiter: _Waiter) -> None:
        """The call has its worker, or an error. From any thread, under the lock of the workers."""
        if waiter.worker is not None:
            self._grant(waiter.worker)
        else:
            self._broker.supervisor.call(lambda: self._refused(waiter))

    def _grant(self, worker: Worker) -> None:
        self._worker = worker
        self._gone = None  # it is to be released
        self.granted_at = time.monotonic()
        self._broker.granted(self, worker)
        try:
            self._say(("granted", worker.pid), [worker.channel.fileno()])
        except OSError:
            self._broker.supervisor.call(self.end)

    def _refused(self, waiter: _Waiter) -> None:
        if self._waiter is not waiter:  # withdrawn in this moment, or the connection has ended
            return
        assert waiter.error is not None  # noqa: S101 - for the checkers
        if isinstance(waiter.error, MoldGone):
            self._await_next_mold()
            return
        self._leave_mold()
        self.answer("failed", *packed(waiter.error))

    def _await_next_mold(self) -> None:
        assert self._generation is not None  # noqa: S101 - for the checkers
        mold = self._generation.model
        self._leave_mold()
        now = time.monotonic()
        if mold is not self._gone:
            self._gone, self._gone_since = mold, now
        if now - self._gone_since > self._broker.engine.guard.options.wait_timeout:
            self.answer("failed", *packed(Reloading(self._broker.engine.name, waited=now - self._gone_since)))
            return
        waiter = self._waiter = _Waiter(self)  # what a withdrawal finds
        self._broker.supervisor.later(_POLL, lambda: self._try_again(waiter))

    def _try_again(self, waiter: _Waiter) -> None:
        if self._waiter is waiter:
            self._try()

    def _withdraw(self) -> None:
        """The client's time is over. If a worker has been granted in this moment, the client finds that instead."""
        waiter, generation = self._waiter, self._generation
        if waiter is not None and generation is not None and not generation.model.workers.withdraw(waiter):
            if waiter.worker is not None:
                return
        elif waiter is None and self._on_load is None:
            return  # granted, or failed
        self._on_load = None
        self._leave_mold()
        self.answer("withdrawn")

    def _release(self, worn: tuple[Reason, ...], counts: bool) -> None:  # noqa: FBT001 - as they come
        worker, generation = self._worker, self._generation
        if worker is None or generation is None:
            raise EOFError
        self._worker = self._waiter = self.granted_at = None
        generation.model.replay_news()  # of this call, before the worker's reports are those of the next one's client
        generation.model.workers.release(worker, worn=worn, counts=counts)
        self._leave_mold()

    def _lose(self, cause: WorkerEndCause, blame: bool) -> None:  # noqa: FBT001 - as they come
        worker = self._worker
        if worker is None:
            raise EOFError
        if cause != "crashed" or worker.exit is not None:
            self._lost(cause, blame)
        else:  # it waits for the mold's report, which this thread reads
            start_thread(functools.partial(self._lost, cause, blame), "modelguard-lost")

    def _lost(self, cause: WorkerEndCause, blame: bool) -> None:  # noqa: FBT001 - as they come
        worker = self._worker
        how = self._lose_here(cause, blame=blame)
        self.answer("ended", how, 0 if worker is None else worker.pid)

    def _lose_here(self, cause: WorkerEndCause, *, blame: bool) -> str:
        with self._ending_call:  # two threads may find at once that the call is over
            worker, self._worker, self.granted_at = self._worker, None, None
            generation, self._generation, self._waiter = self._generation, None, None
        if worker is None or generation is None:
            return "unknown"
        try:
            return generation.model.workers.lose(worker, cause, blame=blame)
        finally:
            self._broker.engine.leave(generation, failed=False)

    def _leave_mold(self) -> None:
        with self._ending_call:
            generation, self._generation, self._waiter = self._generation, None, None
        if generation is not None:
            self._broker.engine.leave(generation, failed=False)

    # The mold

    def _load(self) -> None:
        self._wait_for_load(lambda: self.answer("done", None))

    def _wait_for_load(self, then: Callable[[], object]) -> None:
        self._on_load = then
        self._broker.load_for(self)

    def loaded(self, error: BaseException | None) -> None:
        then, self._on_load = self._on_load, None
        if then is None or self._closed:
            return
        if error is None:
            then()
        else:
            self.answer("failed", *packed(error))

    def _reload(self, wait: bool) -> None:  # noqa: FBT001 - as they come
        reload = functools.partial(self._broker.scope.reload, wait=wait, timeout=None)
        if wait:
            self._do_aside(reload, "modelguard-reload")
        else:
            self._do(reload)

    def _unload(self) -> None:
        self._do_aside(lambda: self._broker.scope.unload(None), "modelguard-unload")

    def _pause(self, paused: bool) -> None:  # noqa: FBT001 - as they come
        self._do(lambda: self._broker.pause(paused=paused))

    def _do_aside(self, work: Callable[[], object], name: str) -> None:
        start_thread(functools.partial(self._do, work), name)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it is the client's
            self.answer("failed", *packed(error))
        else:
            self.answer("done", None)

    def _status(self) -> None:
        self.answer("done", self._broker.status())


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

#: Seconds between two looks whether a mold that calls wait at has been replaced.
_FOLLOW = 0.05

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
    except (EOFError, OSError):  # the starter is gone already
        os._exit(1)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the starter reports it
        with suppress(OSError):
            channel.send(("failed", "".join(traceback.format_exception(error))))
        os._exit(1)
    _allow_descriptors()
    _host.unlock(lock)
    os.close(lock)
    with suppress(OSError):
        channel.send(("listening", ""))
    channel.close()
    gc.freeze()
    broker.serve()
    leave(0)


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Client:
    def __init__(self, connection: ClientConnection, pid: int, reports: socket.socket) -> None:
        self.connection = connection
        self.connections = {connection}
        self.pid = pid
        self.reports = reports
        self.state: bytes | None = None

    def send(self, kind: bytes, content: bytes) -> bool:
        """Send a message; false if there is no room, or no reader. Never blocks. From any thread."""
        try:
            self.reports.send(kind + content, AT_ONCE)
        except OSError:
            return False
        return True


class _Broker:
    def __init__(self, orders: BrokerOrders) -> None:
        self._orders = orders
        self._folder = Folder(Path(orders.folder))
        self._molds = MoldGuard(orders.options, orders.source, orders.origin, paused=orders.paused)
        self._molds.code = orders.code
        self.scope = ProcessScope(orders.options, self._molds)
        self.engine = self._molds.guard.engine
        self.supervisor = supervisor()
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._connections: set[ClientConnection] = set()
        self._holders: dict[int, bytes] = {}
        self._loading: list[ClientConnection] = []
        self._ending = False
        timeout = orders.options.timeout
        streams = "generator" in orders.options.kind  # whose timeout counts for each step
        self._may_keep = None if timeout is None or streams else timeout + _OVERTIME
        self._looking = self._following = False
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
            signal.signal(number, self._on_signal)
        self.supervisor.call(self._listen)
        self.supervisor.later(_LOOK, functools.partial(self._await_first_client, time.monotonic() + _FIRST))
        self._left.wait()
        until = time.monotonic() + _LOCK
        with self._folder.locked(lambda: time.monotonic() > until), suppress(OSError):
            if os.stat(self._orders.socket, dir_fd=self._folder.fileno()).st_ino == self._inode:
                self._folder.remove(self._orders.socket)
        self.scope.close()
        end_all()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.supervisor.call(self.end_if_alone)

    # Clients. In the supervisor's thread

    def _listen(self) -> None:
        if not self._ending:
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
        except ForeignPeer as error:
            logger.warning("%s: refused %s", self._orders.options.name, error)
            accepted.close()
            return
        connection = ClientConnection(Channel(accepted), self, pid)
        self._connections.add(connection)
        self.supervisor.watch(accepted.fileno(), connection.heed)

    def join(self, connection: ClientConnection, token: bytes, identity: Identity, code: _supervisor.Files) -> None:
        reports = socket.socket(fileno=connection.channel.take_fd())
        different = [word for word, value in self._orders.identity.items() if identity.get(word) != value]
        path = None if self._molds.code is None else _supervisor.changed(self._molds.code, code)
        if different or path is not None:
            reports.close()
            if different:
                connection.answer("unwelcome", "identity", ", ".join(different))
            else:
                connection.answer("unwelcome", "code", path)
            raise EOFError
        self._clients[token] = _Client(connection, connection.pid, reports)
        connection.answer("welcome", os.getpid())
        self._tell_state()

    def admit(self, connection: ClientConnection, token: bytes) -> None:
        client = self._clients.get(token)
        if client is None:
            raise EOFError
        client.connections.add(connection)

    def leave(self, connection: ClientConnection) -> bool:
        last = len(self._clients) == 1 and connection.token in self._clients
        self._forget(connection.token)
        return last

    def ended(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        client = self._clients.get(connection.token)
        if client is None:
            return
        client.connections.discard(connection)
        if client.connection is connection:
            self._forget(connection.token)
            self.supervisor.later(_GRACE, self._end_if_long_alone)

    def _forget(self, token: bytes) -> None:
        client = self._clients.pop(token, None)
        if client is None:
            return
        self._last_left = time.monotonic()
        for one in client.connections - {client.connection}:
            one.end()
        client.reports.close()

    # Molds

    def load_for(self, connection: ClientConnection) -> None:
        self._loading.append(connection)
        if len(self._loading) == 1:
            try:
                THREADS.start(self._load, "modelguard-broker-load")
            except RuntimeError as error:  # the system gives no thread
                self._loaded(error)

    def _load(self) -> None:
        failure: BaseException | None = None
        try:
            self.engine.ensure_loaded()
            self._molds.call_back_workers(Timeout(None))
        except Exception as error:  # noqa: BLE001 - it is the callers'
            failure = error
        self.supervisor.call(lambda: self._loaded(failure))

    def _loaded(self, error: BaseException | None) -> None:
        waiting, self._loading = self._loading, []
        for connection in waiting:
            connection.loaded(error)

    def status(self) -> IsolationStatus:
        clients = tuple(client.pid for client in self._clients.values())
        return replace(self.scope.status(0), broker=os.getpid(), clients=clients)

    def pause(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer, and report it to the clients before the one that has asked."""
        self.scope.set_paused(paused=paused)
        self._tell_state()

    # Reports

    def granted(self, connection: ClientConnection, worker: Worker) -> None:
        """Remember whose call a worker runs: its reports go there."""
        if len(self._holders) > 1000:  # noqa: PLR2004 - most of these workers are gone
            self._holders.clear()
        self._holders[worker.pid] = connection.token
        if self._may_keep is not None and not self._looking:
            self._look_again()

    def _look_again(self) -> None:
        self._looking, self._look_at = True, time.monotonic() + _LOOK
        self.supervisor.later(_LOOK, self._look)

    def _look(self) -> None:
        """Take workers back from clients that keep them for too long, not counting the time when this was stopped."""
        assert self._may_keep is not None  # noqa: S101 - for the checkers
        now = time.monotonic()
        stopped = now - self._look_at if now > self._look_at + _LOOK else 0.0
        holding = [one for one in self._connections if one.granted_at is not None]
        for connection in holding:
            connection.granted_at = (connection.granted_at or now) + stopped
            if connection.granted_at < now - self._may_keep:
                logger.warning("%s: process %d keeps a worker for too long", self._orders.options.name, connection.pid)
                connection.end()
        self._looking = False
        if holding:
            self._look_again()

    def waits(self) -> None:
        """A call waits for a worker. If its mold is replaced, neither is to wait for the other."""
        if not self._following:
            self._following = True
            self.supervisor.later(_FOLLOW, self._follow)

    def _follow(self) -> None:
        waiting = [one for one in tuple(self._connections) if one.follow()]
        self._following = False
        if waiting:
            self.waits()

    def _report(self) -> None:
        ours, theirs = _supervisor.report_pair()
        ours.setblocking(False)  # noqa: FBT003 - its only parameter
        reporter = _supervisor.Reporter(theirs)
        reporter.install(self._orders.origin.levels)

        def report(event: Event) -> None:
            if not isinstance(event, telemetry.GuardPaused | telemetry.GuardResumed):  # which each client reports
                reporter.report_event(event)

        telemetry.set_hooks([report, self._heed_event])
        _supervisor.hand_on(self._hand_on)

        def read() -> None:
            with suppress(BlockingIOError):
                self._hand_on(ours.recv(1 << 17))

        self.supervisor.call(lambda: self.supervisor.watch(ours.fileno(), read))

    def _hand_on(self, report: bytes) -> None:
        """A report of a worker goes to the process whose call it runs, or ran last; the others to the oldest client."""
        client = self._clients.get(self._holders.get(_supervisor.sender(report), b""))
        if client is None:
            client = next(iter(self._clients.values()), None)
        if client is not None:
            client.send(REPORT, report)

    def _heed_event(self, _event: Event) -> None:
        self.supervisor.call(self._tell_state)

    def _tell_state(self) -> None:
        mold = self._molds.current
        pids = [] if mold is None else mold.pids()
        state = pickle.dumps((self.scope.ready, pids, self.scope.version, self.scope.paused))
        for client in self._clients.values():
            if client.state != state:
                if client.send(STATE, state):
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
        if self._ending:
            return
        self._ending = True
        # First, because a process that holds the lock may wait for an answer of this one.
        self.supervisor.forget(self._listening.fileno())
        self._listening.close()
        for connection in tuple(self._connections):
            connection.end()
        self._left.set()
