"""``scope="host"``: the molds and workers belong to a broker, which all processes of this host share."""

from __future__ import annotations

import itertools
import math
import random
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from modelguard import _units, telemetry
from modelguard.errors import DeadlineExceeded, GuardClosed, LoadFailed, NoPreviousModel, NotSupported, Reloading
from modelguard.isolation import _host_client, _launch, _processes, status
from modelguard.isolation._channel import Channel, Folder, ForeignPeer, Unreadable
from modelguard.isolation._claims import Claim, Claims, Limits, ThreadClaim, aside
from modelguard.isolation._host_client import ANSWER, Asking, BrokerGone, Connection, GrantedWorker, Membership, left
from modelguard.isolation._host_identity import NAME, check_shareable, identity_of, orders_for, prefix_of
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle._options import GuardOptions
from modelguard.lifecycle._pool_models import afresh
from modelguard.lifecycle.status import State
from modelguard.runtime import waiting
from modelguard.runtime.background import THREADS
from modelguard.runtime.host_lock import private_folder
from modelguard.telemetry import logger

# How a process finds the broker of an isolated function, or starts one: elected by a lock, found by a name.


#: Seconds in which a broker takes a client; it does nothing that takes long. The second: where an event loop may wait.
_ANSWER, _SOON = 5.0, 0.5

#: Seconds for finding or starting a broker: on a busy host, a fresh interpreter takes some.
_LONGEST = 30.0

#: Seconds between two attempts.
_ELECTION_POLL = 0.02


def join(
    options: IsolationOptions,
    source: GuardOptions[Any],
    *,
    elect: bool,
    paused: bool,
    on_pause: Callable[[bool], object],
    give_up: Callable[[], bool],
) -> Membership | None:
    """Become the client of a broker; start one if there is none and ``elect`` is true. Blocks.

    Args:
        options: Of the isolated function.
        source: Of the guard that lends the model in the molds.
        elect: Whether to start a broker. If not, None is returned where there is none.
        paused: Whether a broker that is started here is paused from the start.
        on_pause: Called with what the broker says of whether the function is paused.
        give_up: Asked while there is none yet; true ends the wait.

    Raises:
        NotSupported: The private folder cannot be used.
        LoadFailed: There is no broker, and none could be started.
    """
    until = time.monotonic() + _LONGEST
    election = _Election(options, source, _ANSWER if elect else _SOON, paused=paused, on_pause=on_pause)
    while True:
        found = election.attempt(elect, lambda: give_up() or time.monotonic() > until)
        if found is not None or not elect:
            return found
        if give_up() or time.monotonic() > until:
            raise LoadFailed(options.name, f"no broker serves in {private_folder()}: {election.obstacle}")
        time.sleep(_ELECTION_POLL)


class _Election:
    """Attempts to find a broker, or to start one.

    Args:
        options: Of the isolated function.
        source: Of the guard that lends the model in the molds.
        patience: Seconds in which a broker has to answer.
        paused: Whether a broker that is started here is paused.
        on_pause: Of the membership.

    Attributes:
        obstacle: Why the last attempt has found none.
    """

    def __init__(
        self,
        options: IsolationOptions,
        source: GuardOptions[Any],
        patience: float,
        *,
        paused: bool,
        on_pause: Callable[[bool], object],
    ) -> None:
        self.obstacle = "another process holds the lock"
        self._options = options
        self._source = source
        self._patience = patience
        self._paused = paused
        self._on_pause = on_pause
        self._identity = identity_of(options, source)
        self._prefix = prefix_of(self._identity)
        self._serving: set[str] = set()
        self._hung = False

    def attempt(self, elect: bool, give_up: Callable[[], bool]) -> Membership | None:  # noqa: FBT001
        """Find a broker; if there is none, start one, which the next attempt finds."""
        folder = found = None
        try:
            folder = Folder(private_folder())
            found = self._find(folder)
            if found is None and elect and not self._hung:
                with folder.locked(give_up) as lock:
                    if lock is not None:
                        found = self._find(folder)
                        if found is None and not self._hung:
                            self._start(folder, lock)
        except _host_client.NotStarted as error:
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
                channel.send(("join", token, self._identity, _launch.imported), [theirs.fileno()])
            answer, *details = channel.receive()
            if answer == "welcome":
                found = Membership(folder, name, channel, reports, token=token, pid=details[0], on_pause=self._on_pause)
            else:
                self._refused(name, *details)
        except BlockingIOError:
            self._hung = True
            self.obstacle = f"the one that listens there does not answer within {self._patience:g} s"
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
        _host_client.start_broker(orders, lock, _LONGEST)

    def _remove_remains(self, folder: Folder) -> None:
        """Remove sockets whose brokers were killed."""
        for name in folder.names(""):
            if NAME.fullmatch(name) and name not in self._serving:
                connected = folder.connect(name, _ANSWER)
                if connected is None:
                    folder.remove(name)
                else:
                    connected.close()


#: Seconds between two attempts after a broker has ended.
_POLL = 0.05

#: Seconds in which a broker obeys what it need not wait for: more than for a look at it, since it must not be lost.
_ORDER = 5.0

#: Seconds that the last client waits for the end of all processes: those that a mold may take, and some.
_END = 15.0

_UNLIMITED = Limits(0.0)


class HostScope:
    """Molds of this host. See :class:`~modelguard.isolation.status.Scope`.

    Args:
        options: Of the function.
        source: The options of the guard that lends the model in the molds.
        paused: Whether it was paused in a process that has forked this one, and had no broker.

    Attributes:
        running: One entry for each worker that a call of this process has.
    """

    def __init__(self, options: IsolationOptions, source: GuardOptions[Any], *, paused: bool = False) -> None:
        check_shareable(source)
        identity_of(options, source)  # now, as in all processes that import the module
        self._name = options.name
        self._options = options
        self._source = source
        self.timeout = math.inf if options.timeout is None else options.timeout
        self.wait_timeout = source.wait_timeout
        self.claims = Claims(options.name, most_loading=options.max_queue + options.workers)
        self._seekers: deque[Asking] = deque()
        self._seeking = threading.Lock()
        self._joining = threading.Lock()
        self._membership: Membership | None = None
        self._ended = threading.Event()
        self._pausing = threading.Lock()
        self._paused = paused  # as the broker has said last, or as it was asked for
        self._unheard = paused  # by the broker
        self.running: list[None] = []

    # Calls

    def take(self, limits: Limits, key: Any = None) -> GrantedWorker:
        """Take a worker from the broker; start the broker if there is none."""
        claim = ThreadClaim(limits, key)
        self.claims.add(claim)
        try:
            return self._take(limits)
        finally:
            self.claims.remove(claim)

    def _take(self, limits: Limits) -> GrantedWorker:
        since: float | None = None
        while True:
            try:
                membership = self._join(limits.until)
            except LoadFailed as error:
                if time.monotonic() < limits.until:
                    raise
                raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived) from error
            try:
                connection = Connection(membership, membership.connection())
                granted = connection.take(self.timeout, limits)
            except BrokerGone:
                since = self._wait_for_next(since, limits)
                continue
            except Unreadable as error:
                raise LoadFailed(self._name, f"a worker cannot be taken: {error}") from error
            if granted is None:
                raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived)
            return self._granted(connection, *granted)

    def _granted(self, connection: Connection, channel: Channel, pid: int) -> GrantedWorker:
        self.running.append(None)
        return GrantedWorker(self.running, connection, channel, pid)

    # Calls that do not block

    def request(self, claim: Claim) -> None:
        """Take a worker for a call that does not block."""
        try:
            self._raise_if_refusing()
            self.claims.admit(claim)
            asking = claim.place = Asking(claim, self)
            claim.wait(self.claims, math.inf, partial(DeadlineExceeded, self._name, waited=0.0))
            asking.begin()
        except Exception as error:  # noqa: BLE001 - it is the call's
            claim.fail(error)

    def idle_connection(self) -> Connection | None:
        """A connection that is there and that no other call uses."""
        membership = self._membership
        if membership is None or membership.gone or self._ended.is_set():
            return None
        channel = membership.idle_connection()
        return None if channel is None else Connection(membership, channel)

    def granted(self, connection: Connection, pid: int) -> GrantedWorker:
        """The worker that was granted on a connection."""
        return self._granted(connection, *connection.granted(pid))

    def seek(self, asking: Asking) -> None:
        """Find the broker, or start one, and then a connection for this claim. One thread does so for all."""
        self._seekers.append(asking)
        if self._seeking.acquire(blocking=False):
            aside(self._serve_seekers)

    def _serve_seekers(self) -> None:
        while True:
            try:
                while self._seekers:
                    self._serve([self._seekers.popleft() for _ in range(len(self._seekers))])
            finally:
                self._seeking.release()
            if not self._seekers or not self._seeking.acquire(blocking=False):  # one may have come meanwhile
                return

    def _serve(self, seekers: list[Asking]) -> None:
        try:
            membership = self._join(max(one.claim.limits.until for one in seekers))
        except Exception as error:  # noqa: BLE001 - it is the calls'
            for one in seekers:
                one.claim.expire(time.monotonic())  # where the end of its time is all that has ended the search
                aside(partial(one.claim.fail, afresh(error)))
            return
        for one in seekers:
            try:
                if not one.claim.ended:
                    one.ask(Connection(membership, membership.connection()))
            except BrokerGone:
                one.broker_gone()

    def _wait_for_next(self, since: float | None, limits: Limits = _UNLIMITED) -> float:
        """After the end of a broker: wait a moment, and not for ever."""
        now = time.monotonic()
        since = now if since is None else since
        if now - since > self.wait_timeout:
            raise Reloading(self._name, waited=now - since)
        if now > limits.until:
            raise DeadlineExceeded(self._name, waited=now - limits.arrived)
        time.sleep(_POLL)
        return since

    def _join(self, until: float) -> Membership:
        membership = self._membership
        if membership is not None and not membership.gone and not self._ended.is_set():
            return membership
        if not self._joining.acquire(timeout=min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)):
            raise LoadFailed(self._name, "its broker is still being found or started")
        try:
            membership = self._find(elect=True, until=until)
        finally:
            self._joining.release()
        assert membership is not None  # noqa: S101 - for the checkers
        return membership

    def _find(self, *, elect: bool, until: float = math.inf) -> Membership | None:
        self._raise_if_refusing()
        membership = self._membership
        if membership is None or membership.gone:
            membership = self._membership = join(
                self._options,
                self._source,
                elect=elect,
                paused=self._paused,
                on_pause=self._hear_pause,
                give_up=lambda: self._ended.is_set() or time.monotonic() > until,
            )
            if membership is not None:
                status.refuse_calls_at_exit()
                membership.on_loss = self._begin_to_renew
                self._pass_on_pause(membership)
        return membership

    def _raise_if_refusing(self) -> None:
        if self._ended.is_set():
            raise GuardClosed(self._name)
        if _processes.current() != "owner":  # as a client it would keep its own broker alive
            raise NotSupported(f"{self._name}() inside an isolated function", reason="a worker starts no workers")

    def _pass_on_pause(self, membership: Membership) -> None:
        """Report to a broker what was asked for while this process had none."""
        if self._unheard:
            with suppress(BrokerGone, BlockingIOError):
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
            telemetry.emit((telemetry.GuardPaused if paused else telemetry.GuardResumed)(guard=self._name))

    def _begin_to_renew(self) -> None:
        threading.Thread(target=self._renew, name=f"modelguard-host-{self._name}", daemon=True).start()

    def _renew(self) -> None:
        """Have a broker and a mold again, also without a call: while none is ready, probes may keep calls away."""
        for failures in itertools.count(1):
            try:
                self._ask("load")
            except GuardClosed:
                return
            except Exception as error:  # noqa: BLE001 - the next attempt may succeed, and calls get their own errors
                logger.warning("%s: no mold after the end of its broker: %s", self._name, error)
            else:
                return
            if self._ended.wait(self._source.backoff.seconds(failures, random.random())):  # noqa: S311 - jitter
                return

    def _ask(self, what: Any, *details: Any, timeout: _units.Duration | None = None) -> Any:
        """Ask the broker; the one that comes next, if it ends meanwhile."""
        started = time.monotonic()
        until = math.inf if timeout is None else started + _units.seconds(timeout, "timeout", zero=True)
        since: float | None = None
        while True:
            try:
                return self._join(until).ask(what, *details, limit=left(until))
            except BrokerGone:
                since = self._wait_for_next(since)
            except (BlockingIOError, LoadFailed) as error:
                if isinstance(error, LoadFailed) and time.monotonic() < until:
                    raise
                raise Reloading(self._name, waited=time.monotonic() - started, command=f"the {what}") from None

    # Its state

    @property
    def ready(self) -> bool:
        """Whether a worker can answer. A process that has made no call yet looks for a broker."""
        membership = self._look()
        return membership is not None and membership.ready

    @property
    def version(self) -> str | None:
        """The version of the model in the broker's current mold, as far as it was heard."""
        membership = self._membership
        return None if membership is None else membership.version

    def _look(self) -> Membership | None:
        membership = self._membership
        if membership is not None and not membership.gone:
            return membership
        if self._ended.is_set() or not self._joining.acquire(blocking=False):
            return None
        try:
            return self._find(elect=False)
        except (LoadFailed, GuardClosed, NotSupported):
            return None  # a call says why
        finally:
            self._joining.release()

    def status(self, queued: int) -> IsolationStatus:
        """What the broker says."""
        membership = self._look()
        if membership is not None:
            try:
                status: IsolationStatus = membership.ask("status", limit=ANSWER)
                return replace(status, queued=queued)
            except BrokerGone:
                pass
            except BlockingIOError:  # what it has said last
                return IsolationStatus(
                    name=self._name,
                    state="ready" if membership.ready else "loading",
                    ready=membership.ready,
                    queued=queued,
                    broker=membership.pid,
                    version=membership.version,
                    paused=self._paused,
                )
        state: State = "closed" if self._ended.is_set() else "new"
        return IsolationStatus(name=self._name, state=state, queued=queued, paused=self._paused)

    # Its molds

    def rollback(self) -> NoReturn:
        """The broker keeps no molds."""
        fix = "Only scope='process' keeps the previous model."
        raise NoPreviousModel(self._name, why="molds that processes share are not kept", fix=fix)

    def load(self, timeout: _units.Duration | None) -> None:
        """Start the broker and its mold."""
        waiting.raise_on_event_loop(self._name, "load", "await f.aload()")
        self._ask("load", timeout=timeout)

    async def aload(self, timeout: _units.Duration | None) -> None:
        """Start the broker and its mold."""
        await self._in_thread(lambda: self._ask("load", timeout=timeout))

    def reload(self, *, wait: bool, timeout: _units.Duration | None) -> None:
        """Make a new mold, for all processes."""
        if wait:
            waiting.raise_on_event_loop(self._name, "reload", "await f.areload()")
        self._ask("reload", wait, timeout=timeout if wait or timeout is not None else _ORDER)

    async def areload(self, timeout: _units.Duration | None) -> None:
        """Make a new mold, for all processes."""
        await self._in_thread(lambda: self._ask("reload", True, timeout=timeout))  # noqa: FBT003 - as it is sent

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
            membership.ask("pause", paused, limit=_ORDER)
        except BrokerGone:  # the next one hears it
            return
        except BlockingIOError:
            self._note_pause(paused=before)
            raise LoadFailed(self._name, f"its broker has not answered within {_ORDER:g} s") from None
        self._unheard = False

    def unload(self, timeout: _units.Duration | None) -> None:
        """End the mold and its workers until the next call of any process."""
        waiting.raise_on_event_loop(self._name, "unload", "await f.aunload()")
        self._unload(timeout)

    async def aunload(self, timeout: _units.Duration | None) -> None:
        """End the mold and its workers until the next call of any process."""
        await self._in_thread(lambda: self._unload(timeout))

    def _unload(self, timeout: _units.Duration | None) -> None:
        started = time.monotonic()
        limit = 0.0 if timeout is None else max(0.001, _units.seconds(timeout, "timeout", zero=True))
        if self._ended.is_set():
            raise GuardClosed(self._name)
        membership = self._look()
        if membership is None:  # nor is there a mold
            return
        try:
            membership.ask("unload", limit=limit)
        except BrokerGone:  # with its mold
            return
        except BlockingIOError:
            raise Reloading(self._name, waited=time.monotonic() - started, command="the release") from None

    async def _in_thread(self, work: Callable[[], object]) -> None:
        await waiting.run(work, f"modelguard-host-{self._name}", THREADS.start)

    # The end

    def close(self) -> None:
        """Refuse further calls, wait for those of this process, and leave. The last one ends all processes."""
        waiting.raise_on_event_loop(self._name, "close", "await f.aclose()")
        self._close()

    async def aclose(self) -> None:
        """:meth:`close` for coroutines."""
        await self._in_thread(self._close)

    def _close(self) -> None:
        self._ended.set()
        until = time.monotonic() + self._source.swap.drain_timeout
        while self.running and time.monotonic() < until:
            time.sleep(_POLL)
        with self._joining:
            membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave(_END)

    def reopen(self) -> None:
        """Admit calls again."""
        self._ended.clear()

    def refuse_calls(self) -> None:
        """Raise ``GuardClosed`` from now on, and leave: the broker ends with its last client."""
        self.end_at_once()

    def end_at_once(self) -> None:
        """Leave, and wait for nothing. A call of a ``__del__`` at exit must not start the next broker."""
        self._ended.set()
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave(0.0)

    def abandon(self) -> None:
        """Leave the parent's connections alone."""
        if self._membership is not None:
            self._membership.abandon()
