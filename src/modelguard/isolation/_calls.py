"""One call from its arguments to its answer: wait for a load and in line, send, wait, give the worker back.

Whoever has a worker has a thread; whoever waits for one needs none. So no thread that waits can hold up the steps of a
stream, or the calls of another key.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

from modelguard.errors import (
    DeadlineExceeded,
    GuardClosed,
    QueueFull,
    Reloading,
    RemoteError,
    TransferRefused,
    UnhashableKey,
    WorkerCrashed,
)
from modelguard.isolation import _channel
from modelguard.isolation._channel import AnswerKind, Channel, StreamStep, Unreadable, with_remote_traceback
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._mold_workers import RETRY_AFTER
from modelguard.isolation._supervisor import supervisor
from modelguard.runtime import clock
from modelguard.runtime.background import SHARED
from modelguard.runtime.clock import Watch
from modelguard.telemetry import Reason, WorkerEndCause, logger

#: Seconds within which another thread sets what it has found. If this thread itself was interrupted there, nobody does.
_SETTING = 0.1


class Limits(NamedTuple):
    """The times of one call, on the monotonic clock."""

    arrived: float
    until: float = math.inf


class Taken(Protocol):
    @property
    def channel(self) -> Channel: ...

    @property
    def pid(self) -> int:
        """Its process id; 0 while it is not known."""
        ...

    def release(self, *, worn: tuple[Reason, ...]) -> None:
        """Give the worker back after its answer; ``worn``: why it asked for its replacement, empty if it did not."""
        ...

    def put_back(self) -> None:
        """Give the worker back without a call. Instead of all the others."""
        ...

    def lose(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        """Record that the worker has ended in its call, or end it; returns how it ended, for people."""
        ...

    def leave(self) -> None:
        """The call has ended, whatever came of it. After :meth:`release` or :meth:`lose`."""


class Place:
    loading = False

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for at this place any more."""
        return False

    def leave(self) -> bool:
        """Wait there no more; false if it does not wait there, or has its worker already. From any thread."""
        return True


@dataclass(slots=True, eq=False, repr=False)
class Claim:
    """A call that asks for a worker. It ends once: with a worker, with an error, or withdrawn. Thread-safe.

    Args:
        limits: The call's times.
        key: Which of a pool's models it needs.
        then: Called with it when it has ended, unless it was withdrawn. With a worker, from any thread and under any
            lock, so it must not block. Kept until then and no longer: the call's future refers to the claim.
        client: Whose call it is: clients take turns.

    Attributes:
        place: Where it waits; None if it does not wait.
        admitted: Whether there was room for it, so that none refuses it where it goes on to wait.
        until: When the wait at that place ends, on the monotonic clock.
        taken: The worker that it has got.
        error: Why it has got none.
    """

    limits: Limits
    key: object
    then: Callable[[Claim], object] | None
    client: Hashable = None
    place: Place | None = None
    admitted: bool = False
    until: float = math.inf
    taken: Taken | None = None
    error: BaseException | None = None
    _claims: Claims | None = None
    _late: Callable[[], Exception] | None = None
    # Who takes the entry out ends it: one operation, so no lock is needed.
    _open: list[None] = field(default_factory=lambda: [None])

    @property
    def ended(self) -> bool:
        return not self._open

    # For the scope

    def go_to(self, place: Place) -> None:
        """Have this place from now on, before it waits there."""
        self.place = place

    def wait(self, claims: Claims, until: float, late: Callable[[], Exception]) -> None:
        """Wait at :attr:`place`, at most until then, or until the caller's own deadline."""
        self._claims, self._late, self.until = claims, late, min(until, self.limits.until)
        claims.add(self)
        if self.ended:  # meanwhile
            claims.remove(self)
            self._leave()

    def grant(self, taken: Taken) -> bool:
        if not self._end():
            return False
        self.taken = taken
        self.place = None
        self._tell()
        return True

    def fail(self, error: BaseException) -> None:
        """There is no worker for it. Runs callbacks of users, so never under a lock; else :func:`aside`."""
        if self._end():
            self.error = error
            self.place = None
            self._tell()

    # For the caller

    def withdraw(self) -> bool:
        if not self._end():
            return False
        self.then = None
        self._leave()
        return True

    def refuse(self, error: Exception) -> None:
        if self._end():
            self._leave()
            self.error = error
            self._tell()

    def expire(self, now: float) -> None:
        if now < self.until or not self._end():
            return
        self._leave()
        late = self._late if now < self.limits.until else None
        self.error = self._too_late(now) if late is None else late()
        self._tell()

    def _too_late(self, now: float) -> DeadlineExceeded:
        name = "" if self._claims is None else self._claims.name
        return DeadlineExceeded(name, waited=now - self.limits.arrived)

    def _tell(self) -> None:
        then, self.then = self.then, None
        assert then is not None  # noqa: S101 - it ends once
        then(self)

    def _leave(self) -> None:
        place = self.place
        if place is not None:
            place.leave()

    def _end(self) -> bool:
        try:
            self._open.pop()
        except IndexError:
            return False
        if self._claims is not None:
            self._claims.remove(self)
        return True


class ThreadClaim(Claim):
    __slots__ = ("_woken",)

    def __init__(self, limits: Limits, key: object) -> None:
        super().__init__(limits, key, _wake)
        self._woken: SimpleQueue[None] | None = None

    def wait(self, claims: Claims, until: float, late: Callable[[], Exception]) -> None:
        """As in every claim; the thread waits no longer than that either."""
        if self._woken is None:
            self._woken = SimpleQueue()
        super().wait(claims, until, late)
        self.wake()

    def wake(self) -> None:
        if self._woken is not None:
            self._woken.put(None)

    def result(self) -> Taken:
        while self.taken is None and self.error is None:
            self._sleep()
        if self.error is not None:
            raise self.error
        assert self.taken is not None  # noqa: S101 - for the checkers
        return self.taken

    def abandon(self) -> None:
        if self.withdraw():
            return
        until = time.monotonic() + _SETTING
        while self.taken is None and self.error is None and time.monotonic() < until:
            time.sleep(0)
        if self.taken is not None:
            self.taken.put_back()

    def _sleep(self) -> None:
        assert self._woken is not None  # noqa: S101 - it waits
        left = min(self.until - time.monotonic(), threading.TIMEOUT_MAX)
        try:
            self._woken.get(timeout=max(0.0, left))
        except Empty:
            self.expire(time.monotonic())


def _wake(claim: Claim) -> None:
    assert isinstance(claim, ThreadClaim)  # noqa: S101 - for the checkers
    claim.wake()


class Claims:
    """The calls of one function that wait. Thread-safe."""

    def __init__(self, name: str, *, most_loading: int) -> None:
        self.name = name
        self._most_loading = most_loading
        self._waiting: dict[Claim, None] = {}
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a dropped stream at any point
        self._watch = Watch(name, self._lock, self._next, self._expire)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Claim]:
        return iter(tuple(self._waiting))

    def add(self, claim: Claim) -> None:
        self._waiting[claim] = None
        # A thread looks at the time by itself.
        if isinstance(claim, ThreadClaim) or claim.until + clock.ahead() >= self._watch.due:
            return
        with self._lock:
            at = claim.until + clock.ahead()
            if at < self._watch.due:
                self._watch.schedule(at)

    def remove(self, claim: Claim) -> None:
        self._waiting.pop(claim, None)

    def admit(self, claim: Claim) -> None:
        """Check whether one more may wait for a load. How many may wait for a worker, the mold's workers know."""
        if len(self._waiting) >= self._most_loading and not claim.admitted:
            queued = sum(one.place is not None and one.place.loading for one in self)
            if queued >= self._most_loading:
                raise QueueFull(self.name, queued=queued, retry_after=RETRY_AFTER)
        claim.admitted = True

    def close(self) -> None:
        """Refuse what waits without a thread. The others are served, or get their error, as their molds end."""
        for claim in self:
            if not isinstance(claim, ThreadClaim):
                claim.refuse(GuardClosed(self.name))

    # Processes live in real time, while a test moves the clock of the watch.

    def _next(self, now: float) -> float:
        ahead = clock.ahead()
        return min((claim.until for claim in self if claim.until > now - ahead), default=math.inf) + ahead

    def _expire(self, now: float) -> None:
        now -= clock.ahead()
        for claim in self:
            claim.expire(now)


def aside(work: Callable[[], object]) -> None:
    """Run what may block, or runs code of users, in a thread of its own; in this one if the system gives none."""
    try:
        SHARED.start(work, "modelguard-isolated-call")
    except RuntimeError:
        work()


class Source:
    """Where the workers of a function come from: this process's molds, those of a pool's keys, or a broker."""

    def __init__(self, options: IsolationOptions, wait_timeout: Callable[[], float]) -> None:
        self._name = options.name
        self.timeout = math.inf if options.timeout is None else options.timeout
        self.wait_timeout = wait_timeout
        self.claims = Claims(options.name, most_loading=options.max_queue + options.workers)

    def take(self, limits: Limits, key: Any = None) -> Taken:
        """Take a worker; start what is missing. Blocks.

        Raises:
            GuardClosed, LoadFailed, Reloading, QueueFull, CircuitOpen, DeadlineExceeded: There is none.
        """
        claim = ThreadClaim(limits, key)
        try:
            self.request(claim)
            return claim.result()
        except BaseException:
            claim.abandon()
            raise

    def request(self, claim: Claim) -> None:
        """:meth:`take` for a call that does not block."""
        try:
            self._advance(claim)
        except Exception as error:  # noqa: BLE001 - it is the call's
            claim.fail(error)

    def _advance(self, claim: Claim) -> None:
        raise NotImplementedError

    def too_late(self, arrived: float) -> DeadlineExceeded:
        return DeadlineExceeded(self._name, waited=time.monotonic() - arrived)

    def reloading(self, since: float) -> Reloading:
        return Reloading(self._name, waited=time.monotonic() - since)


#: How often one call is sent anew because its worker ended unread. More in a row than this are no coincidence.
_RESENDS = 8

#: Seconds that a worker has for a message at least, whatever is left until the caller's deadline. Ending it costs more,
#: and a short answer that is late by less than this is an answer.
_LEAST = 0.01

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

KeyOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]

#: Compared with each answer, and plain numbers compare faster.
_ERROR, _ITEM = int(AnswerKind.ERROR), int(AnswerKind.ITEM)

#: Errors of a function that would end the iteration, the generator or the task of its caller instead of reaching it.
_SIGNALS = (StopIteration, GeneratorExit, CancelledError, concurrent.futures.CancelledError)


class _NeverRead(Exception):
    """The worker has ended before it had read all of the message, so it has begun nothing of what that asks for."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(slots=True, eq=False, repr=False)
class _Call:
    arguments: Arguments
    limits: Limits
    key: Any
    tries: int
    trace: _channel.Carrier | None
    content: _channel.Content | None = None
    resends: int = _RESENDS
    begun: bool = False
    awaited: bool = False

    def forget(self) -> None:
        self.arguments, self.content = ((), {}), None


class _Thread(threading.local):
    """What a thread that computes calls does.

    Attributes:
        serves: The worker of the awaited call that it computes; a call that user code makes in it has another one.
        is_free: Whether the call that gets a worker in this moment gets this thread.
        next: That call.
    """

    serves: Taken | None = None
    is_free = False
    next: Callable[[], object] | None = None


#: What becomes of the first answer of a worker: the call's result.
Finish = Callable[[_Call, Taken, int, Any], Any]


class Caller:
    """Makes the calls of one isolated function. Thread-safe."""

    def __init__(self, options: IsolationOptions, scope: Source, key_of: KeyOf | None = None) -> None:
        self._name = options.name
        self._timeout = math.inf if options.timeout is None else options.timeout
        self._max_bytes = options.max_transfer
        self._tries = 2 if options.retry else 1
        self._loads = _channel.unpickle if options.stub is None else _channel.loads_here
        self._scope = scope
        self._key_of = key_of
        self._thread = _Thread()

    def call(self, arguments: Arguments, limits: Limits) -> Any:
        call = self._new_call(arguments, limits)
        return self._result(call, *self._begin(call))

    def stream(self, arguments: Arguments, limits: Limits) -> Iterator[Any]:
        """Compute the items of a generator one by one. It keeps its worker until it ends or is closed."""
        call = self._new_call(arguments, limits)
        yield from self._opened(call, *self._begin(call))

    def submit(self, arguments: Arguments, limits: Limits, *, awaited: bool = False) -> Future[Any]:
        """Begin a call. No thread waits with it for a worker; one computes it then."""
        return self._submit(arguments, limits, self._result, awaited=awaited)

    def open(self, arguments: Arguments, limits: Limits) -> Future[Iterator[Any]]:
        """Begin a stream as :meth:`submit` begins a call. Its items are computed by the threads that ask for them."""
        return self._submit(arguments, limits, self._opened, awaited=True)

    # The steps

    def _result(self, _call: _Call, taken: Taken, kind: int, value: Any) -> Any:
        taken.leave()
        if kind == _ERROR:
            raise value.pop()
        return value

    def _opened(self, call: _Call, taken: Taken, kind: int, value: Any) -> Iterator[Any]:
        if kind == _ERROR:
            taken.leave()
            raise value.pop()
        items = self._items(taken, call.limits)
        next(items)  # has begun, so that to close it ends the stream in the worker too
        return items

    def _items(self, taken: Taken, limits: Limits) -> Iterator[Any]:
        step, close = _channel.dumps(StreamStep.NEXT), _channel.dumps(StreamStep.CLOSE)
        kind, value = _ITEM, None
        try:
            yield None
            while True:
                kind = _ERROR  # whatever the exchange raises, the worker is free or lost then
                kind, value = self._exchange(taken, step, Limits(time.monotonic(), limits.until))
                if kind != _ITEM:
                    break
                yield value
        except _NeverRead as error:  # another worker could only begin from the start
            raise WorkerCrashed(self._name, pid=taken.pid, cause=error.cause) from None
        finally:
            if kind == _ITEM:
                with suppress(WorkerCrashed, DeadlineExceeded, _NeverRead):
                    self._exchange(taken, close, Limits(time.monotonic()))
            taken.leave()
        if kind == _ERROR:
            raise value.pop()

    # One call

    def _new_call(self, arguments: Arguments, limits: Limits) -> _Call:
        return _Call(arguments, limits, self._key(arguments), self._tries, _channel.outgoing())

    def _pickled(self, call: _Call) -> _channel.Content:
        if call.content is not None:
            return call.content
        try:
            content = _channel.dumps((*call.arguments, call.trace))
        except Exception as error:
            why = f"{_culprit(call.arguments)}: {type(error).__name__}: {error}"
            raise TransferRefused(self._name, what="arguments", why=why) from error
        size = _channel.size(content)
        if size > self._max_bytes:
            why = f"they take {size:,} bytes, and max_transfer is {self._max_bytes:,}"
            raise TransferRefused(self._name, what="arguments", why=why)
        call.content = content
        return content

    def _key(self, arguments: Arguments) -> Any:
        if self._key_of is None:
            return None
        try:
            key = self._key_of(*arguments)
        except StopIteration as error:
            raise self._raisable(error) from error
        try:
            hash(key)
        except TypeError:
            raise UnhashableKey(key) from None
        return key

    def _raisable(self, error: BaseException) -> BaseException:
        """Name an error that would mean something else to whoever awaits or iterates, such as the end of the items."""
        if not isinstance(error, _SIGNALS):
            return error
        kind = type(error)
        named = RemoteError(self._name, kind=f"{kind.__module__}.{kind.__qualname__}", text=str(error))
        named.__cause__ = error
        return named

    def _begin(self, call: _Call) -> tuple[Taken, int, Any]:
        self._pickled(call)  # first: what is refused starts nothing
        while True:
            taken = self._scope.take(call.limits, call.key)
            answer = self._attempt(call, taken)
            if answer is not None:
                return taken, *answer
            del taken  # a drained generation is released, and must not be alive then

    def _attempt(self, call: _Call, taken: Taken) -> tuple[int, Any] | None:
        """Send a call to this worker; None if it may be sent to another one instead."""
        try:
            return self._exchange(taken, self._pickled(call), call.limits)
        except _NeverRead as error:
            taken.leave()
            if not call.resends:
                raise WorkerCrashed(self._name, pid=taken.pid, cause=error.cause) from None
            call.resends -= 1
        except WorkerCrashed:
            taken.leave()
            call.tries -= 1
            if not call.tries:
                raise
        except TransferRefused as error:
            if error.what == "arguments":  # the worker has not seen them
                taken.put_back()
            else:
                taken.leave()
            raise
        except BaseException:
            taken.leave()
            raise
        return None

    # Without a thread that waits

    def _submit(self, arguments: Arguments, limits: Limits, finish: Finish, *, awaited: bool) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            call = self._new_call(arguments, limits)
        except Exception as error:  # noqa: BLE001 - of the key function
            future.set_exception(error)
            return future
        call.awaited = awaited
        claim = self._request(call, future, finish)
        if isinstance(claim.error, (QueueFull, GuardClosed)):
            try:
                raise claim.error
            finally:
                del claim, future  # they refer to the error, and it to this frame
        future.add_done_callback(partial(_withdraw, claim))
        return future

    def _request(self, call: _Call, future: Future[Any], finish: Finish) -> Claim:
        claim = Claim(call.limits, call.key, partial(self._claimed, call, future, finish))
        self._scope.request(claim)
        return claim

    def _claimed(self, call: _Call, future: Future[Any], finish: Finish, claim: Claim) -> None:
        """It has its worker, and a thread from now on; or its error."""
        taken, claim.taken = claim.taken, None
        if taken is None:
            assert claim.error is not None  # noqa: S101 - for the checkers
            _fail(call, future, claim.error)
            return
        job = partial(self._compute, call, future, finish, taken)
        if self._thread.is_free and self._thread.next is None:
            self._thread.next = job
            return
        try:
            SHARED.start(partial(self._run, [job]), "modelguard-isolated-call")
        except RuntimeError as error:  # the system gives no thread
            supervisor().call(partial(self._give_up, call, future, taken, error))

    def _give_up(self, call: _Call, future: Future[Any], taken: Taken, error: Exception) -> None:
        taken.put_back()
        _fail(call, future, error)

    def _run(self, jobs: list[Callable[[], object]]) -> None:
        """Compute a call; then the one that has got its worker, and so on. Keeps none of those that have ended."""
        while jobs:
            try:
                jobs.pop()()
            except BaseException:  # noqa: BLE001 - whatever a callback of a future raises, the thread serves on
                with suppress(BaseException):  # also if a log handler raises
                    logger.exception("modelguard: a callback of a submitted call failed")
            if self._thread.next is not None:
                jobs.append(self._thread.next)
                self._thread.next = None

    def _compute(self, call: _Call, future: Future[Any], finish: Finish, taken: Taken) -> None:
        if not call.begun and not future.set_running_or_notify_cancel():
            taken.put_back()
            return
        call.begun = True
        self._thread.serves = taken if call.awaited else None
        answer = None
        try:
            answer = self._attempt(call, taken)
            result = None if answer is None else finish(call, taken, *answer)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
            del call, future, taken, answer  # the error refers to this frame
            return
        finally:
            self._thread.serves = None
        del taken
        if answer is None:
            self._request(call, future, finish)
        else:
            call.forget()  # callbacks of the future may take their time
            future.set_result(result)

    # Messages

    def _exchange(self, taken: Taken, content: _channel.Content, limits: Limits) -> tuple[int, Any]:
        """Send a message to the worker and wait for the answer; give the worker back unless it goes on."""
        channel = taken.channel
        try:
            limit = self._timeout
            if limits.until != math.inf:
                limit = max(_LEAST, min(limit, limits.until - time.monotonic()))
            channel.set_timeout(0.0 if limit == math.inf else limit)
            channel.send_pickled(*content)
            kind, value, worn = channel.receive(self._loads)
        except ConnectionError:  # at its end the message, or a part of it, was still in its socket
            raise _NeverRead(taken.lose("crashed", blame=False)) from None
        except BlockingIOError:
            self._kill_at_deadline(taken)
            raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived) from None
        except EOFError:
            cause = taken.lose("crashed")
            raise WorkerCrashed(self._name, pid=taken.pid, cause=cause) from None
        except Unreadable as error:
            # Of a stream, the worker holds an open generator: it cannot be used for anything else.
            if content[0] == _channel.dumps(StreamStep.NEXT)[0]:
                taken.lose("cancelled")
            else:
                taken.release(worn=())
            raise TransferRefused(self._name, what="result", why=f"it cannot be rebuilt here: {error}") from error
        except BaseException:  # Ctrl-C, or an error of ours: nobody knows what the worker does
            if channel.fileno() >= 0:
                taken.lose("cancelled")
            raise
        return kind, value if kind == _ITEM else self._answered(taken, kind, value, worn)

    def _answered(self, taken: Taken, kind: int, value: Any, worn: tuple[Reason, ...]) -> Any:
        """Release the worker. Who gets it next gets this thread too, if nothing in it can block before."""
        thread = self._thread
        thread.is_free = thread.serves is taken
        try:
            taken.release(worn=worn)
        finally:
            thread.is_free = False
        if kind == _ERROR:  # in a list from which it is taken: no frame that it refers to may refer to it
            return [self._raisable(with_remote_traceback(*value))]
        return value

    @staticmethod
    def _kill_at_deadline(taken: Taken) -> None:
        """Kill the worker: nothing else ends a call that computes, and nobody knows for how long it would."""
        taken.lose("timeout")


def _fail(call: _Call, future: Future[Any], error: BaseException) -> None:
    if call.begun or future.set_running_or_notify_cancel():
        future.set_exception(error)


def _withdraw(claim: Claim, future: Future[Any]) -> None:
    if future.cancelled() and claim.withdraw():
        future.set_running_or_notify_cancel()  # whoever waits for several futures hears of it


def _culprit(arguments: Arguments) -> str:
    args, kwargs = arguments
    named: list[tuple[str, Any]] = [*((f"argument {n}", one) for n, one in enumerate(args, 1)), *kwargs.items()]
    for name, value in named:
        if not _can_be_pickled(value):
            return f"{name}, of type {type(value).__module__}.{type(value).__qualname__}"
    return "they"


def _can_be_pickled(value: object) -> bool:
    pickle: Callable[[object], object] = _channel.dumps
    try:
        pickle(value)
    except Exception:  # noqa: BLE001 - pickling runs any code
        return False
    return True
