"""One connection of a client to the broker: it has, waits for, or asks for at most one worker at a time."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from modelguard.errors import ModelGuardError, Reloading
from modelguard.isolation._channel import Channel, Unreadable
from modelguard.isolation._claims import Waiter
from modelguard.isolation._host_identity import Answer, Identity, Request, packed
from modelguard.isolation._launch import Files
from modelguard.isolation._mold_scope import ProcessScope
from modelguard.isolation._molds import Mold
from modelguard.isolation._roster import MoldGone, Worker
from modelguard.isolation._supervisor import Supervisor
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._generation import Generation
from modelguard.telemetry import Reason, WorkerEndCause, logger

__all__ = ["BrokerOfConnection", "Connection"]

#: Seconds between looks for the next mold after one has died.
_POLL = 0.005

#: Seconds for the rest of a message that has begun, and for room for an answer: both are there at once, unless the
#: client is no client. Everybody waits meanwhile.
_PATIENCE = 1.0


class BrokerOfConnection(Protocol):
    """What a connection needs of its broker. All of it is called in the supervisor's thread."""

    @property
    def scope(self) -> ProcessScope:
        """The molds."""
        ...

    @property
    def engine(self) -> Engine[Mold]:
        """Whose model is the current mold."""
        ...

    @property
    def supervisor(self) -> Supervisor:
        """Its thread."""
        ...

    def join(self, connection: Connection, token: bytes, identity: Identity, code: Files) -> None:
        """A process wants to be a client."""
        ...

    def admit(self, connection: Connection, token: bytes) -> None:
        """A client has another connection.

        Raises:
            EOFError: It is no client.
        """
        ...

    def leave(self, connection: Connection) -> bool:
        """A client leaves; returns whether it was the last one."""
        ...

    def end_if_alone(self) -> None:
        """End, if nobody is left."""
        ...

    def ended(self, connection: Connection) -> None:
        """A connection has ended."""
        ...

    def load_for(self, connection: Connection) -> None:
        """Load a mold, and call :meth:`Connection.loaded` then."""
        ...

    def pause(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer, and report it to the clients."""
        ...

    def waits(self) -> None:
        """A call waits for a worker: call :meth:`Connection.follow` now and then."""
        ...

    def granted(self, connection: Connection, worker: Worker) -> None:
        """A client has got a worker. From any thread."""


class _Waiter(Waiter[Worker]):
    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.token, arrived=connection.asked_at, admitted=connection.admitted)
        self._connection = connection

    def wake(self) -> None:
        self._connection.woken(self)


class Connection:
    """Obeys one connection. In the supervisor's thread, unless it is said otherwise.

    Args:
        channel: To the client.
        broker: Has the molds.
        pid: The client's process id.

    Attributes:
        token: The client's; empty before the first message.
        granted_at: Since when it has a worker, on the monotonic clock; None if it has none.
        asked_at: When it asked for a worker last.
        admitted: Whether its call has waited in a line since then.
    """

    def __init__(self, channel: Channel, broker: BrokerOfConnection, pid: int) -> None:
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
        """Read what has come."""
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
        """Send an answer. From any thread, while nothing else is sent."""
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
            if self._generation.model.roster.withdraw(self._waiter):
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
            worker = generation.model.roster.request(self._waiter)
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
        if generation.retired and not self._broker.engine.state.closed and generation.model.roster.withdraw(waiter):
            self._leave_mold()
            self._try()
        return True

    def _try_after_load(self) -> None:
        self.answer("waiting")
        self._try()

    def woken(self, waiter: _Waiter) -> None:
        """The call has its worker, or an error. From any thread, under the roster's lock."""
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
        if waiter is not None and generation is not None and not generation.model.roster.withdraw(waiter):
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
        generation.model.roster.release(worker, worn=worn, counts=counts)
        self._leave_mold()

    def _lose(self, cause: WorkerEndCause, blame: bool) -> None:  # noqa: FBT001 - as they come
        worker = self._worker
        if worker is None:
            raise EOFError
        if cause != "crashed" or worker.exit is not None:
            self._lost(cause, blame)
        else:  # it waits for the mold's report, which this thread reads
            threading.Thread(target=self._lost, args=(cause, blame), name="modelguard-lost", daemon=True).start()

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
            return generation.model.roster.lose(worker, cause, blame=blame)
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
        """There is a mold, or none could be loaded."""
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
        """Do what takes a while in a thread of its own."""
        threading.Thread(target=self._do, args=(work,), name=name, daemon=True).start()

    def _do(self, work: Callable[[], object]) -> None:
        """Do something, and answer when it is done. From any thread."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - it is the client's
            self.answer("failed", *packed(error))
        else:
            self.answer("done", None)

    def _status(self) -> None:
        self.answer("done", self._broker.scope.status(0))
