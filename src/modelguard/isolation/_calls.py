"""One call from its arguments to its answer: wait for a load and in line, send, wait, give the worker back.

Whoever has a worker has a thread; whoever waits for one needs none. So no thread that waits can hold up the steps of a
stream, or the calls of another key.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import math
import operator
import os
import threading
import time
import weakref
from asyncio import CancelledError
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from modelguard import _units
from modelguard.errors import (
    DeadlineExceeded,
    GuardClosed,
    NoPreviousModel,
    NotSupported,
    Overloaded,
    QueueFull,
    Reloading,
    TransferRefused,
    WorkerCrashed,
    text_of,
    told,
)
from modelguard.isolation import _channel
from modelguard.isolation._channel import AnswerKind, Channel, StreamStep, Unreadable, with_remote_traceback
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._mold_workers import RETRY_AFTER, Waiter
from modelguard.isolation._supervisor import supervisor
from modelguard.lifecycle import runtime
from modelguard.runtime import waiting
from modelguard.runtime.background import SHARED
from modelguard.runtime.waiting import Steps, Timeout, Wait, Work
from modelguard.telemetry import Reason, WorkerEndCause, logger


class CallTimes(NamedTuple):
    """The times of one call, on the monotonic clock."""

    arrived: float
    until: float = math.inf


class Taken(Protocol):
    """A worker that a call has. One of its methods ends that."""

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
        """Give the worker back without a call."""
        ...

    def end_worker(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        """Record that the worker has ended in its call, or end it; returns how it ended, for people."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class Claim:
    """A call that asks for a worker.

    Attributes:
        limits: The call's times.
        key: Which of a pool's models it needs.
        client: Whose call it is: clients take turns.
        tell: Hears whether it waits for a load or in line, whenever that changes.
        blocks: Whether it has a thread that waits with it.
        admitted: Whether there was room for it, so that none refuses it where it goes on to wait.
        loading: Whether it waits for a load.
    """

    limits: CallTimes
    key: object = None
    client: Hashable = None
    tell: Callable[[bool], object] | None = None
    blocks: bool = False
    admitted: bool = False
    loading: bool = False


class Withdrawn(Exception):
    """Nobody needs the worker any more."""


T = TypeVar("T")


class Followed(Generic[T]):
    """Steps that are gone through without a thread: whoever ends one of the waits goes on. They end once.

    Args:
        steps: The steps.
        then: Called with what they return, or with their error. With the former from any thread and under any lock, so
            it must not block. Kept until then and no longer: the call's future refers to this.
        waits: The list for those that wait now.

    Attributes:
        until: When the present wait ends, on the monotonic clock.
    """

    __slots__ = ("_open", "_steps", "_then", "_waits", "_withdrawn", "until")

    def __init__(self, steps: Steps[T], then: Callable[[T | None, BaseException | None], object], waits: Waits) -> None:
        self._steps: Steps[T] | None = steps
        self._then: Callable[[T | None, BaseException | None], object] | None = then
        self._waits = waits
        self._withdrawn = False
        # Who takes the entry out goes on with the steps: one operation, so no lock is needed.
        self._open: list[Steps[T]] = []
        self.until = math.inf

    def begin(self) -> Exception | None:
        """Go to the first wait; returns the error if there is one before."""
        assert self._steps is not None  # noqa: S101 - it begins once
        return self._go_on(partial(next, self._steps))

    def withdraw(self) -> None:
        """End it, wherever it waits, or is about to wait."""
        self._withdrawn = True
        if (steps := self._take()) is not None:
            steps.close()
            self._end(None, Withdrawn())

    def refuse(self, error: Exception) -> None:
        if (steps := self._take()) is not None:
            self._go_on(partial(steps.throw, error))

    def expire(self, now: float) -> None:
        if now >= self.until and (steps := self._take()) is not None:
            self._go_on(partial(steps.send, None), aside)

    def _take(self) -> Steps[T] | None:
        try:
            steps = self._open.pop()
        except IndexError:
            return None
        self._waits.remove(self)
        return steps

    def _go_on(
        self, resume: Callable[[], Any], tell: Callable[[Callable[[], object]], object] = operator.call
    ) -> Exception | None:
        try:
            step = resume()
        except StopIteration as stop:
            self._end(stop.value, None)
        except Exception as error:  # noqa: BLE001 - it is the call's
            tell(partial(self._end, None, error))
            return error
        else:
            self._wait(step)
        return None

    def _wait(self, step: Any) -> None:
        left = step.limit.left()
        self.until = math.inf if left is None else time.monotonic() + left
        assert self._steps is not None  # noqa: S101 - it has not ended
        self._waits.add(self)
        self._open.append(self._steps)
        step.future.add_done_callback(self._woken)
        if self._withdrawn:  # meanwhile
            self.withdraw()
        else:
            self.expire(time.monotonic())

    def _woken(self, future: Future[Any]) -> None:
        steps = self._take()
        if steps is None:
            return
        resume = partial(steps.send, None)
        if isinstance(future, Waiter) and future.is_granted:  # its worker waits
            self._go_on(resume)
            return
        go_on = partial(self._go_on, resume, aside)
        try:  # what may take a while, or runs callbacks of users
            supervisor().call(go_on)
        except RuntimeError:  # the system gives no thread
            go_on()

    def _end(self, result: T | None, error: BaseException | None) -> None:
        then, self._then, self._steps = self._then, None, None
        assert then is not None  # noqa: S101 - it ends once
        then(result, error)


class Waits:
    """The calls of one function that wait without a thread: ends those whose time is over. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[Followed[Any], None] = {}
        self._due = math.inf

    def __iter__(self) -> Iterator[Followed[Any]]:
        return iter(tuple(self._waiting))

    def add(self, one: Followed[Any]) -> None:
        self._waiting[one] = None
        self._look_at(one.until)

    def remove(self, one: Followed[Any]) -> None:
        self._waiting.pop(one, None)

    def _look_at(self, due: float) -> None:
        if due < self._due:
            self._due = due
            try:
                supervisor().later(due - time.monotonic(), self._look)
            except RuntimeError:  # the system gives no thread; the next one that waits tries again
                self._due = math.inf

    def _look(self) -> None:
        now, self._due = time.monotonic(), math.inf
        for one in self:
            one.expire(now)
        self._look_at(min((one.until for one in self), default=math.inf))


def aside(work: Callable[[], object]) -> None:
    """Run what may block, or runs code of users, in a thread of its own; in this one if the system gives none."""
    try:
        SHARED.start(work, "modelguard-isolated-call")
    except RuntimeError:
        work()


class WorkerScope:
    """Where the workers of a function come from: this process's molds, those of a pool's keys, or a broker.

    For its handle it is a source of models, too: see :mod:`modelguard.lifecycle.handle`.
    """

    #: Why there is no mold to go back to.
    keeps_none: ClassVar[str]

    def __init__(self, options: IsolationOptions, wait_timeout: Callable[[], float]) -> None:
        self.name = options.name
        self.runtime = runtime.default()
        self.timeout = math.inf if options.timeout is None else options.timeout
        self.wait_timeout = wait_timeout
        self.waits = Waits()
        self._waiting: dict[Claim, None] = {}
        self._most_loading = options.bounds.queue + options.workers

    def rollback(self) -> None:
        raise NoPreviousModel(self.name, why=self.keeps_none)

    # Calls

    def take(self, limits: CallTimes, key: Any = None) -> Taken:
        """Take a worker; start what is missing. Blocks.

        Raises:
            GuardClosed, LoadFailed, Reloading, QueueFull, CircuitOpen, DeadlineExceeded: There is none.
        """
        return waiting.block(self.until_taken(Claim(limits, key, blocks=True)))

    def until_taken(self, claim: Claim) -> Steps[Taken]:
        """:meth:`take`, written once for who blocks and who does not."""
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Calls that wait."""
        return len(self._waiting)

    def _admit(self, claim: Claim) -> None:
        """Check whether one more may wait for a load. How many may wait for a worker, the mold's workers know."""
        if len(self._waiting) >= self._most_loading and not claim.admitted:
            queued = sum(one.loading for one in tuple(self._waiting))
            if queued >= self._most_loading:
                raise QueueFull(self.name, queued=queued, retry_after=RETRY_AFTER)
        claim.admitted = True

    def _await(
        self,
        claim: Claim,
        awaited: Any,
        seconds: float,
        late: Callable[[], Exception],
        *,
        loading: bool = False,
        step: Callable[[Any, Timeout], Any] = Wait,
    ) -> Steps[None]:
        """Wait for a future, say, at most so many seconds, or until the caller's own deadline."""
        started = time.monotonic()
        until = min(started + seconds, claim.limits.until)
        wait = step(awaited, Timeout(None if until == math.inf else max(0.0, until - started)))
        with self._counted(claim, loading=loading):
            yield wait
        if not wait.future.done():
            raise late() if until < claim.limits.until else self._too_late(claim)

    @contextmanager
    def _counted(self, claim: Claim, *, loading: bool) -> Iterator[None]:
        if claim.loading is not loading:
            claim.loading = loading
            if claim.tell is not None:
                claim.tell(loading)
        self._waiting[claim] = None
        try:
            yield
        finally:
            self._waiting.pop(claim, None)

    def _too_late(self, claim: Claim) -> DeadlineExceeded:
        why = "no worker was free within the deadline"
        return DeadlineExceeded(self.name, waited=time.monotonic() - claim.limits.arrived, why=why)

    def _reloading(self, since: float) -> Reloading:
        return Reloading(self.name, waited=time.monotonic() - since)

    def _refuse_waiting(self) -> None:
        """Refuse what waits without a thread. The others are served, or get their error, as their molds end."""
        for one in self.waits:
            one.refuse(GuardClosed(self.name))

    # As a source of models

    def _aside(self, verb: str, work: Callable[[], object]) -> Steps[None]:
        yield Work(work, f"modelguard-{verb}-{self.name}", self.runtime.start_thread)


#: How often one call is sent anew because its worker ended unread. More in a row than this are no coincidence.
_RESENDS = 8

#: Seconds that a worker has for a message at least, whatever is left until the caller's deadline. Ending it costs more,
#: and a short answer that is late by less than this is an answer.
_LEAST = 0.01

#: What comes after the last item of a stream.
NO_ITEM = object()

#: The name of threads that close streams.
CLOSE = "modelguard-isolated-close"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

KeyOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]

#: Compared with each answer, and plain numbers compare faster.
_ERROR, _ITEM = int(AnswerKind.ERROR), int(AnswerKind.ITEM)

#: Errors of a function that would end the iteration, the generator, the task or the process of its caller instead of
#: reaching it.
_SIGNALS = (
    StopIteration,
    GeneratorExit,
    CancelledError,
    concurrent.futures.CancelledError,
    SystemExit,
    KeyboardInterrupt,
)


class _NeverRead(Exception):
    """The worker has ended before it had read all of the message, so it has begun nothing of what that asks for."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(slots=True, eq=False, repr=False)
class _Call:
    arguments: Arguments
    limits: CallTimes
    key: Any
    tries: int
    trace: _channel.Carrier | None
    content: _channel.Content | None = None
    resends: int = _RESENDS
    begun: bool = False
    awaited: bool = False


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


class Items:
    """A stream that has begun. Who drops it closes it.

    Until then its worker and its lease are not the garbage collector's, which takes a cycle of references apart in any
    order: the lease might end before the worker is free.
    """

    __slots__ = ("__weakref__", "_generator")

    def __init__(self, generator: Generator[Any, None, None]) -> None:
        self._generator = generator
        weakref.finalize(self, _close_dropped, generator).atexit = False

    def next(self) -> Any:
        return next(self._generator, NO_ITEM)

    def close(self) -> None:
        _close(self._generator)


def _close(stream: Generator[Any, None, None]) -> None:
    with suppress(ValueError):  # another thread closes it
        stream.close()


def _close_dropped(stream: Generator[Any, None, None]) -> None:
    # In another thread, and not started here: the collector may have come in the middle of such a start.
    if inspect.getgeneratorstate(stream) != inspect.GEN_CLOSED:
        supervisor().call(partial(SHARED.start, partial(_close, stream), CLOSE))


class Caller:
    """Makes the calls of one isolated function. Thread-safe."""

    def __init__(self, options: IsolationOptions, scope: WorkerScope, key_of: KeyOf | None = None) -> None:
        self._name = options.name
        self._timeout = math.inf if options.timeout is None else options.timeout
        self._max_bytes = options.bounds.transfer
        self._tries = 2 if options.retry else 1
        self._loads = _channel.unpickle if options.stub is None else _channel.loads_here
        self._scope = scope
        self._key_of = key_of
        self._thread = _Thread()

    def call(self, arguments: Arguments, limits: CallTimes) -> Any:
        call = self._new_call(arguments, limits)
        return self._result(call, *self._begin(call))

    def stream(self, arguments: Arguments, limits: CallTimes) -> Iterator[Any]:
        """Compute the items of a generator one by one. It keeps its worker until it ends or is closed."""
        call = self._new_call(arguments, limits)
        yield from self._opened(call, *self._begin(call))

    def submit(self, arguments: Arguments, limits: CallTimes, *, awaited: bool = False) -> Future[Any]:
        """Begin a call. No thread waits with it for a worker; one computes it then."""
        return self._submit(arguments, limits, self._result, awaited=awaited)

    def open(self, arguments: Arguments, limits: CallTimes) -> Future[Items]:
        """Begin a stream as :meth:`submit` begins a call. Its items are computed by the threads that ask for them."""
        return self._submit(arguments, limits, lambda *begun: Items(self._opened(*begun)), awaited=True)

    # The steps

    def _result(self, _call: _Call, _taken: Taken, kind: int, value: Any) -> Any:
        if kind == _ERROR:
            raise value.pop()
        return value

    def _opened(self, call: _Call, taken: Taken, kind: int, value: Any) -> Generator[Any, None, None]:
        if kind == _ERROR:
            raise value.pop()
        items = self._items(taken, call.limits)
        next(items)  # has begun, so that to close it ends the stream in the worker too
        return items

    def _items(self, taken: Taken, limits: CallTimes) -> Generator[Any, None, None]:
        step, close = _channel.dumps(StreamStep.NEXT), _channel.dumps(StreamStep.CLOSE)
        kind, value, process = _ITEM, None, os.getpid()
        try:
            yield None
            while True:
                kind = _ERROR  # whatever the exchange raises, the worker is free or lost then
                if os.getpid() != process:
                    reason = "its worker answers the process that began it. Begin another one"
                    raise NotSupported(f"a stream of {self._name}() in a forked child", reason=reason)
                kind, value = self._await_answer(taken, step, CallTimes(time.monotonic(), limits.until))
                if kind != _ITEM:
                    break
                yield value
        except _NeverRead as error:  # another worker could only begin from the start
            raise WorkerCrashed(self._name, pid=taken.pid, cause=error.cause) from None
        finally:
            if kind == _ITEM and os.getpid() == process:
                with suppress(WorkerCrashed, DeadlineExceeded, _NeverRead):
                    self._await_answer(taken, close, CallTimes(time.monotonic()))
        if kind == _ERROR:
            raise value.pop()

    # One call

    def _new_call(self, arguments: Arguments, limits: CallTimes) -> _Call:
        return _Call(arguments, limits, self._key(arguments), self._tries, _channel.outgoing())

    def _pickled(self, call: _Call) -> _channel.Content:
        if call.content is not None:
            return call.content
        try:
            content = _channel.dumps((*call.arguments, call.trace))
        except Exception as error:
            if _channel.of_a_signal(error):
                raise
            why = f"{_culprit(call.arguments)}: {told(error)}"
            raise TransferRefused(self._name, what="arguments", why=why) from error
        size = _channel.size(content)
        if size > self._max_bytes:
            why = f"they take {size:,} bytes, and Bounds(transfer=) is {self._max_bytes:,}"
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
        _units.check_pool_key(key)
        return key

    def _raisable(self, error: BaseException) -> BaseException:
        """Name an error that would mean something else to whoever awaits or iterates, such as the end of the items."""
        if not isinstance(error, _SIGNALS):
            return error
        named = _channel.described(error, self._name, text_of(error))
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
            content = self._pickled(call)
        except BaseException:  # the worker has not seen them
            taken.put_back()
            raise
        try:
            return self._await_answer(taken, content, call.limits)
        except _NeverRead as error:
            if not call.resends:
                raise WorkerCrashed(self._name, pid=taken.pid, cause=error.cause) from None
            call.resends -= 1
        except WorkerCrashed:
            call.tries -= 1
            if not call.tries:
                raise
        return None

    # Without a thread that waits

    def _submit(self, arguments: Arguments, limits: CallTimes, finish: Finish, *, awaited: bool) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            call = self._new_call(arguments, limits)
        except Exception as error:  # noqa: BLE001 - of the key function
            future.set_exception(error)
            return future
        call.awaited = awaited
        followed = self._follow(call, future, finish)
        refusal = followed.begin()
        if isinstance(refusal, (QueueFull, GuardClosed)):
            try:
                raise refusal
            finally:
                del refusal, future  # they refer to the error, and it to this frame
        future.add_done_callback(partial(_withdraw, followed))
        return future

    def _follow(self, call: _Call, future: Future[Any], finish: Finish) -> Followed[Taken]:
        steps = self._scope.until_taken(Claim(call.limits, call.key))
        return Followed(steps, partial(self._claimed, call, future, finish), self._scope.waits)

    def _claimed(
        self, call: _Call, future: Future[Any], finish: Finish, taken: Taken | None, failure: BaseException | None
    ) -> None:
        """It has its worker, and a thread from now on; or its error."""
        if taken is None:
            assert failure is not None  # noqa: S101 - for the checkers
            _fail(call, future, failure)
            return
        job = partial(self._compute, call, future, finish, taken)
        if self._thread.is_free and self._thread.next is None:
            self._thread.next = job
            return
        try:
            SHARED.start(partial(self._run, [job]), "modelguard-isolated-call")
        except RuntimeError as error:
            refusal = Overloaded(f"{self._name}(): cannot start a thread: {error}")
            for work in (taken.put_back, partial(_fail, call, future, refusal)):
                supervisor().call(work)

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
            self._follow(call, future, finish).begin()
        else:
            call.arguments, call.content = ((), {}), None  # callbacks of the future may take their time
            future.set_result(result)

    # Messages

    def _await_answer(self, taken: Taken, content: _channel.Content, limits: CallTimes) -> tuple[int, Any]:
        """Send a message to the worker and wait for the answer; give the worker back unless it goes on."""
        channel = taken.channel
        try:
            limit = self._timeout
            if limits.until != math.inf:
                limit = max(_LEAST, min(limit, limits.until - time.monotonic()))
            channel.set_timeout(limit)
            channel.send_pickled(*content)
            kind, value, worn = channel.receive(self._loads)
        except ConnectionError:  # at its end the message, or a part of it, was still in its socket
            raise _NeverRead(taken.end_worker("crashed", blame=False)) from None
        except BlockingIOError:  # nothing else ends a call that computes, and nobody knows for how long it would
            taken.end_worker("timeout")
            raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived) from None
        except EOFError:
            cause = taken.end_worker("crashed")
            raise WorkerCrashed(self._name, pid=taken.pid, cause=cause) from None
        except Unreadable as error:
            # Of a stream, the worker holds an open generator: it cannot be used for anything else.
            if content[0] == _channel.dumps(StreamStep.NEXT)[0]:
                taken.end_worker("cancelled")
            else:
                taken.release(worn=())
            raise TransferRefused(self._name, what="result", why=f"it cannot be rebuilt here: {error}") from error
        except BaseException:  # Ctrl-C, or an error of ours: nobody knows what the worker does
            if channel.fileno() >= 0:
                taken.end_worker("cancelled")
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


def _fail(call: _Call, future: Future[Any], error: BaseException) -> None:
    if call.begun or future.set_running_or_notify_cancel():  # whoever waits for several futures hears of a withdrawal
        future.set_exception(error)


def _withdraw(followed: Followed[Taken], future: Future[Any]) -> None:
    if future.cancelled():
        followed.withdraw()


def _culprit(arguments: Arguments) -> str:
    args, kwargs = arguments
    named: list[tuple[str, Any]] = [*((f"argument {n}", one) for n, one in enumerate(args, 1)), *kwargs.items()]
    for name, value in named:
        try:
            _channel.dumps(value)
        except Exception:  # noqa: BLE001 - pickling runs any code
            return f"{name}, of type {_units.type_name(type(value))}"
    return "they"
