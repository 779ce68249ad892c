"""``scope="host"``: the molds and workers belong to a broker, which all processes of this host share."""

from __future__ import annotations

import itertools
import math
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from modelguard import _units
from modelguard.errors import DeadlineExceeded, GuardClosed, LoadFailed, NoPreviousModel, NotSupported, Reloading
from modelguard.isolation import _role
from modelguard.isolation._channel import Channel
from modelguard.isolation._host_client import BrokerGone, Membership
from modelguard.isolation._host_election import join
from modelguard.isolation._host_identity import check_shareable, identity_of
from modelguard.isolation._host_messages import unpacked
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation._scope import Limits
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle import _deadlocks, _in_thread
from modelguard.lifecycle._options import GuardOptions
from modelguard.lifecycle._threads import THREADS
from modelguard.telemetry import WorkerEndCause, logger

__all__ = ["HostScope"]

#: Seconds between two attempts after a broker has ended.
_POLL = 0.05

#: Seconds in which a broker answers whatever it need not wait for.
_ANSWER = 1.0

#: The same for a call whose time is over already.
_LATE = 0.25

#: Seconds that the last client waits for the end of all processes: those that a mold may take, and some.
_END = 15.0

_UNLIMITED = Limits(0.0)


class _Taken:
    """A worker that the broker has granted to one call of this process."""

    __slots__ = ("_connection", "_scope", "channel", "pid")

    def __init__(self, scope: HostScope, connection: _Connection, channel: Channel, pid: int) -> None:
        self._scope = scope
        self._connection: _Connection | None = connection
        self.channel = channel
        self.pid = pid

    def release(self, *, worn: bool) -> None:
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
        self._scope.running.pop()
        if self._connection is not None:  # neither answered nor lost: nobody knows what the worker does
            self.lose("cancelled", blame=False)


class _Connection:
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
        self._membership.say(self._channel, "take", limit=_left(until))
        try:
            while True:
                try:
                    kind, *details = self._channel.receive()
                except BlockingIOError:
                    kind, *details = self._withdraw()
                if kind == "granted":
                    fd = self._channel.take_fd()
                    worker = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=fd)
                    return Channel(worker, used_before=True), details[0]
                if kind == "loading":
                    until = limits.until
                elif kind == "waiting":
                    until = min(limits.until, time.monotonic() + patience)
                else:
                    self._membership.give_back(self._channel)
                    if kind == "failed":
                        raise unpacked(*details)
                    return None
                self._channel.set_timeout(_left(until))
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

    def release(self, *, worn: bool, counts: bool = True) -> None:
        try:
            self._membership.say(self._channel, "release", worn, counts)
        except BrokerGone:
            return
        self._membership.give_back(self._channel)

    def lose(self, cause: WorkerEndCause, *, blame: bool) -> tuple[str, int]:
        try:
            self._membership.say(self._channel, "lose", cause, blame, limit=2 * _ANSWER)
            _, how, pid = self._channel.receive()
        except (BrokerGone, EOFError, OSError):
            self._channel.close()
            return "its broker has ended, or has taken the worker back", 0
        self._membership.give_back(self._channel)
        return how, pid


class HostScope:
    """Molds of this host. See :class:`~modelguard.isolation._scope.Scope`.

    Args:
        options: Of the function.
        source: The options of the guard that lends the model in the molds.

    Attributes:
        running: One entry for each worker that a call of this process has.
    """

    def __init__(self, options: IsolationOptions, source: GuardOptions[Any]) -> None:
        check_shareable(source)
        identity_of(options, source)  # now, as in all processes that import the module
        self._name = options.name
        self._options = options
        self._source = source
        self._timeout = math.inf if options.timeout is None else options.timeout
        self._joining = threading.Lock()
        self._membership: Membership | None = None
        self._ended = threading.Event()
        self.running: list[None] = []

    # Calls

    def take(self, limits: Limits, key: Any = None) -> _Taken:
        """Take a worker from the broker; start the broker if there is none."""
        del key
        since: float | None = None
        while True:
            try:
                membership = self._join(limits.until)
            except LoadFailed as error:
                if time.monotonic() < limits.until:
                    raise
                raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived) from error
            try:
                connection = _Connection(membership, membership.connection())
                granted = connection.take(self._timeout, limits)
            except BrokerGone:
                since = self._wait_for_next(since, limits)
                continue
            if granted is None:
                raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived)
            self.running.append(None)
            return _Taken(self, connection, *granted)

    def _wait_for_next(self, since: float | None, limits: Limits = _UNLIMITED) -> float:
        """After the end of a broker: wait a moment, and not for ever."""
        now = time.monotonic()
        since = now if since is None else since
        if now - since > self._source.wait_timeout:
            raise Reloading(self._name, waited=now - since)
        if now > limits.until:
            raise DeadlineExceeded(self._name, waited=now - limits.arrived)
        time.sleep(_POLL)
        return since

    def _join(self, until: float) -> Membership:
        membership = self._membership
        if membership is not None and not membership.gone and not self._ended.is_set():
            return membership
        with self._joining:
            membership = self._find(elect=True, until=until)
        assert membership is not None  # noqa: S101 - for the checkers
        return membership

    def _find(self, *, elect: bool, until: float = math.inf) -> Membership | None:
        if self._ended.is_set():
            raise GuardClosed(self._name)
        if _role.current() != "owner":  # as a client it would keep its own broker alive
            raise NotSupported(f"{self._name}() inside an isolated function", reason="a worker starts no workers")
        membership = self._membership
        if membership is None or membership.gone:
            membership = self._membership = join(
                self._options,
                self._source,
                elect=elect,
                give_up=lambda: self._ended.is_set() or time.monotonic() > until,
            )
            if membership is not None:
                membership.on_loss = self._begin_to_renew
        return membership

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
                return self._join(until).ask(what, *details, limit=_left(until))
            except BrokerGone:
                since = self._wait_for_next(since)
            except (BlockingIOError, LoadFailed) as error:
                if isinstance(error, LoadFailed) and time.monotonic() < until:
                    raise
                raise Reloading(self._name, waited=time.monotonic() - started) from None

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
                status: IsolationStatus = membership.ask("status", limit=_ANSWER)
                return replace(status, queued=queued)
            except (BrokerGone, BlockingIOError):
                pass
        return IsolationStatus(name=self._name, state="closed" if self._ended.is_set() else "new", queued=queued)

    # Its molds

    def rollback(self) -> NoReturn:
        """The broker keeps no molds."""
        fix = "Only scope='process' keeps the previous model."
        raise NoPreviousModel(self._name, why="molds that processes share are not kept", fix=fix)

    def load(self, timeout: _units.Duration | None) -> None:
        """Start the broker and its mold."""
        _deadlocks.raise_on_event_loop(self._name, "load", "await f.aload()")
        self._ask("load", timeout=timeout)

    async def aload(self, timeout: _units.Duration | None) -> None:
        """Start the broker and its mold."""
        await self._in_thread(lambda: self._ask("load", timeout=timeout))

    def reload(self, *, wait: bool, timeout: _units.Duration | None) -> None:
        """Make a new mold, for all processes."""
        if wait:
            _deadlocks.raise_on_event_loop(self._name, "reload", "await f.areload()")
        self._ask("reload", wait, timeout=timeout)

    async def areload(self, timeout: _units.Duration | None) -> None:
        """Make a new mold, for all processes."""
        await self._in_thread(lambda: self._ask("reload", True, timeout=timeout))  # noqa: FBT003 - as it is sent

    async def _in_thread(self, work: Callable[[], object]) -> None:
        await _in_thread.run(work, f"modelguard-host-{self._name}", THREADS.start)

    # The end

    def close(self) -> None:
        """Refuse further calls, wait for those of this process, and leave. The last one ends all processes."""
        _deadlocks.raise_on_event_loop(self._name, "close", "await f.aclose()")
        self._close()

    async def aclose(self) -> None:
        """:meth:`close` for coroutines."""
        await self._in_thread(self._close)

    def _close(self) -> None:
        self._ended.set()
        until = time.monotonic() + self._source.drain_timeout
        while self.running and time.monotonic() < until:
            time.sleep(_POLL)
        with self._joining:
            membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave(_END)

    def reopen(self) -> None:
        """Admit calls again."""
        self._ended.clear()

    def end_at_once(self) -> None:
        """Leave, and wait for nothing."""
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.leave(0.0)

    def abandon(self) -> None:
        """Leave the parent's connections alone."""
        if self._membership is not None:
            self._membership.abandon()


def _left(until: float) -> float:
    """Seconds until then, for a channel's timeout: 0 for no limit."""
    return 0.0 if until == math.inf else max(0.001, until - time.monotonic())
