"""``scope="host"``: the molds and workers belong to a broker, which all processes of this host share."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from modelguard import telemetry
from modelguard.errors import GuardClosed, LoadFailed, NotSupported, Overloaded, Reloading
from modelguard.isolation import _channel, _host, _processes, status
from modelguard.isolation._channel import Channel, Unreadable
from modelguard.isolation._host import ANSWER_SOON, Election, Joined, Request
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._mold_workers import Claim
from modelguard.isolation._scopes import Taken, WorkerScope
from modelguard.isolation._supervisor import supervisor
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle._engine import has_turn
from modelguard.lifecycle._guard_options import GuardOptions
from modelguard.lifecycle._pool_models import afresh
from modelguard.lifecycle.status import State
from modelguard.runtime import child_processes, waiting
from modelguard.runtime.background import start_thread
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.runtime.waiting import Steps, Timeout, Wait
from modelguard.telemetry import Reason, WorkerEndCause, logger

#: Connections that are kept for the next calls. Each call that waits has one.
_MOST_IDLE = 64


class BrokerGone(Exception):
    pass


class Connection(Channel):
    """A connection to the broker, for one request or call at a time."""

    def __init__(self, connected: socket.socket, membership: Membership) -> None:
        super().__init__(connected)
        self.membership = membership

    def say(self, what: Request, *details: Any, limit: float | None = None) -> None:
        """Send a message; ``limit`` bounds this and what is received next, in seconds."""
        try:
            self.set_timeout(limit)
            self.send((what, *details))
        except OSError as error:
            self.close()
            raise BrokerGone from error

    def ask(self, what: Request, *details: Any, limit: float | None = None) -> Any:
        """Send a message, and wait for the answer. This connection can be used again unless it fails."""
        self.say(what, *details, limit=limit)
        answer = self._received()
        self.membership.keep(self)
        return answer

    def hear(self) -> Any:
        """Receive an answer that has begun to arrive."""
        self.set_timeout(ANSWER)
        try:
            return self._received()
        except BlockingIOError as error:
            raise BrokerGone from error

    def _received(self) -> Any:
        try:
            return self.receive()
        except (BlockingIOError, Unreadable):
            self.close()
            raise
        except (EOFError, OSError) as error:
            self.close()
            raise BrokerGone from error

    def hang_up(self) -> None:
        """Close it, in the supervisor's thread, which may watch it."""
        supervisor().forget(self.fileno())
        self.close()


class Membership:
    """This process among the clients of one broker."""

    def __init__(self, joined: Joined, on_pause: Callable[[bool], object], on_loss: Callable[[], object]) -> None:
        self.pid = joined.pid
        self.ready = False
        self.version: str | None = None
        self.gone = False
        self._joined = joined
        self._was_ready = False
        self._on_pause = on_pause
        self._on_loss = on_loss
        self._idle: deque[Connection] = deque()
        self._family: list[int] = []
        self._groups: set[int] = set()
        supervisor().call(lambda: supervisor().watch(joined.reports.fileno(), self._heed))

    # Connections

    def connection(self, patience: float = ANSWER_SOON) -> Connection:
        """A connection that no other call uses, made within so many seconds if there is none."""
        with suppress(IndexError):
            return self._idle.pop()
        try:
            connected = None if self.gone else self._joined.folder.connect(self._joined.name, patience)
        except (OSError, _host.ForeignPeer) as error:
            raise BrokerGone from error
        if connected is None:
            raise BrokerGone
        connection = Connection(connected, self)
        connection.say("call", self._joined.token)
        return connection

    def meet(self, worker: int) -> None:
        """Note a worker's process group, its mold's: a broker that is killed may not have told of its processes yet."""
        if worker not in self._family:
            with suppress(OSError):
                self._groups.add(os.getpgid(worker))

    def keep(self, connection: Connection) -> None:
        if len(self._idle) >= _MOST_IDLE:
            connection.close()
            return
        self._idle.append(connection)
        if self.gone:
            self._close_idle()

    def ask(self, what: Request, *details: Any, limit: float | None = None) -> Any:
        kind, answer = self.connection().ask(what, *details, limit=limit)
        if kind == "failed":
            raise answer
        return answer

    # The end

    def leave(self, patience: float) -> None:
        """Be a client no more. The broker has so many seconds to answer; the last one waits until it has ended."""
        self.gone = True  # first: the end of the broker must not close what its answer is read from
        with suppress(OSError, EOFError):
            limit = Timeout(patience)
            self._joined.channel.set_timeout(patience)
            self._joined.channel.send(("leave",))
            if patience:
                _, last = self._joined.channel.receive()
                if last and (broker := child_processes.open_pidfd(self.pid)) is not None:
                    child_processes.await_end(broker, limit.left() or 0.0)
                    os.close(broker)
        self._end()
        if patience:
            supervisor().flush(ANSWER)  # what the broker has reported of its end
        _host.collect()

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors. The parent stays a client."""
        self.gone = True
        self._joined.close()
        self._close_idle()

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _end(self) -> None:
        self.gone, self.ready, self.version = True, False, None
        self._close_idle()
        supervisor().call(self._forget)

    # In the supervisor's thread

    def _heed(self) -> bool:
        """Heed what the broker says next, if there is something; returns false if there is nothing."""
        message = _channel.receive(self._joined.reports)
        if not message:
            if message is not None:
                self._broker_ended()
            return False
        if message[:1] == _host.REPORT:
            _channel.emit_here(message[1:])
        else:
            state = pickle.loads(memoryview(message)[1:])  # noqa: S301 - from this program's own broker
            self.ready, self._family, self.version, paused = state
            self._on_pause(paused)
            self._was_ready = self._was_ready or self.ready
        return True

    def _broker_ended(self) -> None:
        lost = not self.gone and self._was_ready
        if self.gone:  # who leaves closes the rest
            supervisor().forget(self._joined.reports.fileno())
        else:
            self._end()
        _host.collect_later([self.pid, *self._family, *(-group for group in self._groups)])
        if lost:
            self._on_loss()  # last: it needs a thread, and may not get one

    def _forget(self) -> None:
        if self._joined.reports.fileno() >= 0:
            while self._heed():
                pass
            supervisor().forget(self._joined.reports.fileno())
        self._joined.close()


# A call's part of the talk with a broker: it asks for one worker, and gives it back.


#: Seconds in which a broker answers whatever it need not wait for.
ANSWER = 1.0

#: Seconds between two attempts after a broker has ended, and two looks whether calls have.
_AGAIN = 0.05


class GrantedWorker(Taken):
    __slots__ = ("__weakref__", "_connection", "_scope", "channel", "pid")

    def __init__(self, scope: HostScope, connection: Connection, pid: int) -> None:
        scope.running.add(self)
        self._scope = scope
        self._connection: Connection | None = connection
        self.channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=connection.take_fd()))
        self.pid = pid
        connection.membership.meet(pid)

    def release(self, *, worn: tuple[Reason, ...], counts: bool = True) -> None:
        if (connection := self._end()) is not None:
            with suppress(BrokerGone):
                connection.say("release", worn, counts)
                connection.membership.keep(connection)

    def end_worker(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        if (connection := self._end()) is None:
            return "unknown"
        try:
            _, how = connection.ask("end", cause, blame, limit=2 * ANSWER)
        except (BrokerGone, BlockingIOError):
            return "its broker has ended, or has taken the worker back"
        return str(how)

    def _end(self) -> Connection | None:
        self.channel.close()  # this process's copy
        connection, self._connection = self._connection, None
        if connection is not None:
            self._scope.running.discard(self)
        return connection


class Incoming(NamedTuple):
    """A wait for an answer of the broker. A thread that waits reads by itself, the supervisor's for those without."""

    connection: Connection
    limit: Timeout

    def block(self) -> None:
        left = self.limit.left()
        self.connection.await_message(math.inf if left is None else time.monotonic() + left)

    # As the future that it waits for

    @property
    def future(self) -> Incoming:
        return self

    def done(self) -> bool:
        return self.connection.await_message(time.monotonic())

    def add_done_callback(self, then: Callable[[Any], object]) -> None:
        supervisor().call(partial(self._watch, then))

    def _watch(self, then: Callable[[Any], object]) -> None:
        fd = self.connection.fileno()

        def readable() -> None:
            supervisor().forget(fd)
            then(self)

        if fd >= 0:
            supervisor().watch(fd, readable)


#: Seconds in which a broker obeys what it need not wait for: more than for a look at it, since it must not be lost.
_ORDER = 5.0

#: Seconds that the last client waits for the end of all processes: those that a mold may take, and some.
_END = 15.0


class HostScope(WorkerScope):
    keeps_none = "molds that processes share are not kept"

    def __init__(self, options: IsolationOptions, source: GuardOptions[Any], *, paused: bool = False) -> None:
        _host.check_shareable(source)
        _host.identity_of(options, source)  # now, as in all processes that import the module
        super().__init__(options, lambda: source.wait_timeout)
        self._options = options
        self._source = source
        self._searching: Future[Membership] | None = None
        self._starting_search = threading.RLock()  # reentrant: the collector may end a dropped stream, which calls
        self._joining = threading.Lock()
        self.membership: Membership | None = None
        self._ended = threading.Event()
        self._pausing = threading.Lock()
        self._paused = paused  # as the broker has said last, or as it was asked for
        self._unheard = paused  # by the broker
        self.running: WeakRegistry[GrantedWorker] = WeakRegistry()  # a call that is interrupted drops its own

    # Calls

    def until_taken(self, claim: Claim) -> Steps[Taken]:
        self._raise_if_refusing()
        admitted = claim.admitted  # by a broker: whom one has not refused, the next one does not refuse either
        self._admit(claim)
        gone_since = math.inf
        while True:
            try:
                while (membership := self._known) is None or self.closed:
                    yield from self._await(claim, searching := self._search(), math.inf, loading=True)
                    self._raise_error_of(searching)
                connection = membership.connection(ANSWER_SOON if claim.blocks else 0.0)
                asked, admitted = admitted, True
                return (yield from self._until_answered(claim, connection, admitted=asked))
            except BrokerGone:  # the next one is asked
                gone_since = min(gone_since, time.monotonic())
            if time.monotonic() - gone_since > self.wait_timeout():
                raise self._reloading(gone_since)
            with self._counted(claim, loading=True):
                yield Wait(waiting.promise(), Timeout(_AGAIN))

    def _until_answered(self, claim: Claim, connection: Connection, *, admitted: bool) -> Steps[Taken]:
        connection.say("take", claim.limits.again, admitted, limit=ANSWER)
        kind, *details = ("waiting",)
        try:
            while kind in {"loading", "waiting"}:
                loading = kind == "loading"
                seconds = math.inf if loading else self.timeout
                if not connection.has_unread:
                    yield from self._await(claim, connection, seconds, loading=loading, step=Incoming)
                kind, *details = connection.hear()
            taken = GrantedWorker(self, connection, *details) if kind == "granted" else None
        except Unreadable as error:  # no descriptor is free for the worker, which ends with the connection
            connection.close()
            raise LoadFailed(self.name, f"no worker can be taken: {error}") from None
        except BaseException:  # the call has gone: a worker that is granted in this moment stays unread, and goes back
            supervisor().call(connection.hang_up)
            raise
        if taken is None:
            connection.membership.keep(connection)
            raise details[0]
        if self.closed:  # it may leave without this call, which counts only from now on
            taken.put_back()
            raise GuardClosed(self.name)
        return taken

    @property
    def _known(self) -> Membership | None:
        membership = self.membership
        return None if membership is None or membership.gone else membership

    def _raise_error_of(self, searching: Future[Membership]) -> None:
        """Each of those who wait raises an object of its own. Where it was opened again, they search again."""
        error = searching.exception()
        if error is None or (isinstance(error, GuardClosed) and not self.closed):
            return
        if type(error) in {RuntimeError, Overloaded}:  # no folder, or no thread
            raise LoadFailed(self.name, f"its broker cannot be started or found: {error}") from error
        raise afresh(error) if isinstance(error, Exception) else error

    def _search(self) -> Future[Membership]:
        """Find the broker, or start one. One thread does so for all."""
        with self._starting_search:
            if self._searching is None or self._searching.done():
                name = f"modelguard-host-{self.name}"
                self._searching = waiting.start(self._join, name, self.system.start_thread)
            return self._searching

    def _join(self) -> Membership:
        with self._joining:
            membership = self._find(elect=True)
        assert membership is not None  # noqa: S101 - for the checkers
        return membership

    def _find(self, *, elect: bool) -> Membership | None:
        self._raise_if_refusing()
        membership = self._known
        if membership is None:
            election = Election(self._options, self._source, elect=elect, paused=self._paused)
            joined = election.join(self._raise_if_refusing)
            renew = partial(start_thread, self._renew, f"modelguard-host-{self.name}")
            self.membership = None if joined is None else Membership(joined, self._hear_pause, renew)
            if (membership := self.membership) is not None:
                status.refuse_calls_at_exit()
                if self._unheard:  # what was asked for while this process had no broker
                    with suppress(BrokerGone, BlockingIOError):
                        self._pass_on_pause(membership)
        return membership

    def _raise_if_refusing(self) -> None:
        if self._ended.is_set():
            raise GuardClosed(self.name)
        if _processes.role != "owner":  # as a client it would keep its own broker alive
            raise NotSupported(f"{self.name}() inside an isolated function", reason="a worker starts no workers")

    def _pass_on_pause(self, membership: Membership) -> None:
        membership.ask("pause", self._paused, limit=_ORDER)
        self._unheard = False

    def _hear_pause(self, paused: bool) -> None:  # noqa: FBT001 - as it comes
        """The broker says whether it is paused. In the supervisor's thread."""
        if not self._unheard:
            self._note_pause(paused=paused)

    def _note_pause(self, *, paused: bool, unheard: bool = False) -> None:
        """Remember whether it is paused, and report a change: each process for itself, as for its guards."""
        with self._pausing:
            changed, self._paused, self._unheard = self._paused is not paused, paused, unheard
        if changed:
            telemetry.emit((telemetry.GuardPaused if paused else telemetry.GuardResumed)(guard=self.name))

    def _renew(self) -> None:
        """Have a broker and a mold again, also without a call: while none is ready, probes may keep calls away."""
        for failures in itertools.count(1):
            try:
                self._ask("load", limit=Timeout(None))
            except GuardClosed:
                return
            except Exception as error:  # noqa: BLE001 - the next attempt may succeed, and calls get their own errors
                logger.warning("%s: no mold after the end of its broker: %s", self.name, error)
            else:
                return
            if self._ended.wait(self._source.loading.backoff.seconds(failures, random.random())):  # noqa: S311 - jitter
                return

    def _ask(self, what: Any, *details: Any, limit: Timeout) -> Any:
        """Ask the broker; the one that comes next, if it ends meanwhile."""
        gone_since = math.inf
        while True:
            try:
                return self._joined(limit).ask(what, *details, limit=limit.left())
            except BrokerGone:
                gone_since = min(gone_since, time.monotonic())
                if time.monotonic() - gone_since > self.wait_timeout():
                    raise self._reloading(gone_since) from None
                time.sleep(_AGAIN)
            except BlockingIOError:
                raise Reloading(self.name, waited=limit.waited(), command=f"the {what}") from None

    def _joined(self, limit: Timeout) -> Membership:
        while (membership := self._known) is None or self.closed:
            searching = self._search()
            Wait(searching, limit).block()
            if not searching.done():
                raise BlockingIOError
            self._raise_error_of(searching)
        return membership

    # Its state

    @property
    def ready(self) -> bool:
        membership = self._look()
        return membership is not None and membership.ready

    @property
    def version(self) -> str | None:
        membership = self.membership
        return None if membership is None else membership.version

    def _look(self) -> Membership | None:
        if (membership := self._known) is not None:
            return membership
        with waiting.turn(self._joining) as mine, suppress(RuntimeError, OSError):  # a call says why
            return self._find(elect=False) if mine and not self.closed else None
        return None

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    def status(self) -> IsolationStatus:
        state: State = "closed" if self.closed else "new"
        known = IsolationStatus(name=self.name, state=state, queued=self.queued, paused=self._paused)
        if (membership := self._look()) is None:
            return known
        try:
            status: IsolationStatus = membership.ask("status", limit=ANSWER)
            return replace(status, queued=self.queued)
        except (BrokerGone, BlockingIOError):  # it has ended, or cannot be asked now: what it has said last
            if membership.gone:
                return known
            ready = membership.ready
            state = "ready" if ready else "loading"
            return replace(known, state=state, ready=ready, broker=membership.pid, version=membership.version)

    # Its molds

    def until_loaded(self, limit: Timeout) -> Steps[None]:
        return self._aside("load", partial(self._ask, "load", limit=limit))

    def until_reloaded(self, limit: Timeout) -> Steps[None]:
        ask = partial(self._ask, "reload", True, has_turn(), limit=limit)  # noqa: FBT003 - as it is sent
        return self._aside("reload", ask)

    def request_reload(self) -> None:
        self._ask("reload", False, False, limit=Timeout(_ORDER))  # noqa: FBT003 - as above

    def until_unloaded(self, limit: Timeout) -> Steps[None]:
        return self._aside("unload", partial(self._unload, limit))

    def _unload(self, limit: Timeout) -> None:
        if self.closed:
            raise GuardClosed(self.name)
        if (membership := self._look()) is None:  # nor is there a mold
            return
        try:
            membership.ask("unload", limit=limit.left())
        except BrokerGone:  # with its mold
            return
        except BlockingIOError:
            raise Reloading(self.name, waited=limit.waited(), command="the release") from None

    @property
    def paused(self) -> bool:
        """Whether it was paused, and no broker knows that yet."""
        return self._paused and self._unheard

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer, for all processes. A broker that comes later hears it then."""
        before = self._paused
        self._note_pause(paused=paused, unheard=True)
        membership = self._look()
        if membership is None or not self._unheard:  # it has heard it as it was found
            return
        try:
            self._pass_on_pause(membership)
        except BrokerGone:  # the next one hears it
            return
        except BlockingIOError:
            self._note_pause(paused=before)
            raise LoadFailed(self.name, f"its broker has not answered within {_ORDER:g} s") from None

    # The end

    def close(self, timeout: float | None) -> None:
        """Refuse further calls, wait for those of this process, and leave. The last one ends all processes."""
        self._refuse_waiting()
        self._ended.set()
        drain_timeout = self._source.swap.drain_timeout if timeout is None else timeout
        limit = Timeout(drain_timeout)
        while self.running and limit.left() != 0:
            time.sleep(_AGAIN)
        if not self.running:
            self._leave(min(_END, max(ANSWER, drain_timeout - limit.waited())))
            return
        now = self.status()
        telemetry.emit(
            telemetry.GenerationAbandoned(
                guard=self.name,
                generation=now.generation,
                version=now.version,
                in_flight=len(list(self.running)),
                drain_timeout=drain_timeout,
            )
        )
        with suppress(RuntimeError):  # the system gives no thread, so it leaves at its exit
            start_thread(self._leave_late, f"modelguard-close-{self.name}")

    def _leave_late(self) -> None:
        while self.running and self.closed:
            time.sleep(_AGAIN)
        self._leave()

    def _leave(self, patience: float = _END) -> None:
        with self._joining:
            if not self.closed:  # opened again meanwhile: calls use it
                return
            membership, self.membership = self.membership, None
        if membership is not None:
            membership.leave(patience)

    def reopen(self) -> None:
        self._ended.clear()

    def end_at_once(self) -> None:
        """Leave, and wait for nothing: the broker ends with its last client. Calls get ``GuardClosed`` from now on.

        A call of a ``__del__`` at exit must not start the next broker.
        """
        self._ended.set()
        self._refuse_waiting()
        membership, self.membership = self.membership, None
        if membership is not None:
            membership.leave(0.0)

    refuse_calls = end_at_once

    def abandon(self) -> None:
        if self.membership is not None:
            self.membership.abandon()
