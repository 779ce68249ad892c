"""An isolated function, and each of its calls from the arguments to the answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import math
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from modelguard import _units
from modelguard._units import FunctionKind
from modelguard.errors import (
    DeadlineExceeded,
    GuardClosed,
    NotSupported,
    Overloaded,
    QueueFull,
    TransferRefused,
    WorkerCrashed,
    WouldDeadlock,
    text_of,
    told,
)
from modelguard.isolation import _channel, _processes, _supervisor, status
from modelguard.isolation._channel import AnswerKind, StreamStep, Unreadable, with_remote_traceback
from modelguard.isolation._isolation_options import IsolationOptions, PoolSource, Source
from modelguard.isolation._mold_owner import MoldGuard
from modelguard.isolation._mold_workers import CallTimes, Claim
from modelguard.isolation._scopes import Followed, PoolScope, ProcessScope, Taken, WorkerScope
from modelguard.isolation._supervisor import supervisor
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle.handle import LoadingHandle
from modelguard.runtime import call_context, waiting
from modelguard.runtime.background import SHARED
from modelguard.serving import deadlines
from modelguard.telemetry import Reason, logger

if TYPE_CHECKING:
    from modelguard.isolation._host_scope import HostScope

# One call from its arguments to its answer: take a worker, send, wait, give the worker back.
#
# Whoever has a worker has a thread; whoever waits for one needs none. So no thread that waits can hold up the steps of
# a stream, or the calls of another key.


#: How often one call is sent anew because its worker ended unread. More in a row than this are no coincidence.
_RESENDS = 8

#: Seconds that a worker has for a message at least, however little is left until the caller's deadline. Ending it costs
#: more, and a short answer that is late by less than this is an answer.
_LEAST = 0.01

#: Seconds that a stream has to close, once that deadline has passed.
_TO_CLOSE = 0.1

#: What comes after the last item of a stream.
_NO_ITEM = object()

#: The name of threads that close streams, and seconds until the next attempt to start one.
_CLOSE, _AGAIN = "modelguard-isolated-close", 0.1

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

KeyOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]

#: Compared with each answer, and plain numbers compare faster.
_ERROR, _ITEM = int(AnswerKind.ERROR), int(AnswerKind.ITEM)

#: Errors of a function that would end the iteration, the generator, the task or the process of its caller instead of
#: reaching it.
_SIGNALS = (
    StopIteration,
    GeneratorExit,
    asyncio.CancelledError,
    concurrent.futures.CancelledError,
    SystemExit,
    KeyboardInterrupt,
)


class _NeverRead(Exception):
    """The worker has ended so, before it had read all of the message: it has begun nothing of what that asks for."""


@dataclass(slots=True, eq=False, repr=False)
class _Call:
    """A call; of one that was submitted, its future too, and what makes its result of the worker's first answer."""

    arguments: Arguments
    limits: CallTimes
    key: Any
    tries: int
    trace: _channel.Carrier | None
    content: _channel.Content | None = None
    resends: int = _RESENDS
    begun: bool = False  # it has had a worker
    future: Any = None
    finish: Any = None
    awaited: bool = False


class _Thread(threading.local):
    """What a thread that computes calls does: who gets the worker of its awaited call next gets the thread too."""

    serves: Taken | None = None  # a call that user code makes in it has another one
    is_free = False  # for the call that gets a worker in this moment
    next: Callable[[], object] | None = None


class _Items:
    """A stream that has begun. Who drops it closes it.

    Until then its worker and its lease are not the garbage collector's, which takes a cycle of references apart in any
    order: the lease might end before the worker is free.
    """

    __slots__ = ("__weakref__", "_generator")

    def __init__(self, generator: Generator[Any, None, None]) -> None:
        self._generator = generator
        weakref.finalize(self, _close_dropped, generator).atexit = False

    def next(self) -> Any:
        return next(self._generator, _NO_ITEM)

    def close(self, closed: Future[None]) -> None:
        _close_aside(self._generator, closed)


def _close(stream: Generator[Any, None, None]) -> None:
    with suppress(ValueError):  # another thread closes it
        stream.close()


def _close_dropped(stream: Generator[Any, None, None]) -> None:
    # In another thread, and not started here: the collector may have come in the middle of such a start.
    if inspect.getgeneratorstate(stream) != inspect.GEN_CLOSED:
        supervisor().call(partial(_close_aside, stream))


def _close_aside(stream: Generator[Any, None, None], closed: Future[None] | None = None) -> None:
    """Close it in a thread: now, or as soon as the system gives one. The future gets an error in that case."""
    closed = waiting.start(partial(_close, stream), _CLOSE, SHARED.start, closed)
    if closed.done() and closed.exception() is not None:
        supervisor().later(_AGAIN, partial(_close_aside, stream))


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
        return self._begin(self._new_call(arguments, limits))[-1]

    def stream(self, arguments: Arguments, limits: CallTimes) -> Iterator[Any]:
        """Compute the items of a generator one by one. It keeps its worker until it ends or is closed."""
        call = self._new_call(arguments, limits)
        yield from self._opened(call, *self._begin(call))

    def submit(self, arguments: Arguments, limits: CallTimes, *, awaited: bool = False) -> Future[Any]:
        """Begin a call. No thread waits with it for a worker; one computes it then."""
        return self._submit(arguments, limits, lambda *begun: begun[-1], awaited=awaited)

    def open(self, arguments: Arguments, limits: CallTimes) -> Future[_Items]:
        """Begin a stream as :meth:`submit` begins a call. Its items are computed by the threads that ask for them."""
        return self._submit(arguments, limits, lambda *begun: _Items(self._opened(*begun)), awaited=True)

    # The steps

    def _opened(self, call: _Call, taken: Taken, _: None) -> Generator[Any, None, None]:
        items = self._items(taken, call.limits)
        next(items)  # has begun, so that to close it ends the stream in the worker too
        return items

    def _items(self, taken: Taken, limits: CallTimes) -> Generator[Any, None, None]:
        step, close = _channel.dumps(StreamStep.NEXT), _channel.dumps(StreamStep.CLOSE)
        kind, value, process = _ITEM, None, os.getpid()
        try:
            yield None
            while True:
                self._check_time(limits)
                kind = _ERROR  # whatever the exchange raises, the worker is free or lost then
                if os.getpid() != process:
                    reason = "its worker answers the process that began it. Begin another one"
                    raise NotSupported(f"a stream of {self._name}() in a forked child", reason=reason)
                kind, value = self._await_answer(taken, step, limits._replace(arrived=time.monotonic()))
                if kind != _ITEM:
                    break
                yield value
        except _NeverRead as error:  # another worker could only begin from the start
            raise WorkerCrashed(self._name, pid=taken.pid, cause=str(error)) from None
        finally:
            if kind == _ITEM and os.getpid() == process:
                with suppress(WorkerCrashed, DeadlineExceeded, _NeverRead):
                    now = time.monotonic()
                    self._await_answer(taken, close, CallTimes(now, max(limits.until, now + _TO_CLOSE)))
        if kind == _ERROR:
            raise value.pop()

    # One call

    def _new_call(self, arguments: Arguments, limits: CallTimes) -> _Call:
        self._check_time(limits)
        return _Call(arguments, limits, self._key(arguments), self._tries, _channel.outgoing())

    def _check_time(self, limits: CallTimes) -> None:
        """Send nothing after the caller's deadline, and wait for nothing."""
        if limits.until != math.inf and (now := time.monotonic()) >= limits.until:
            raise DeadlineExceeded(self._name, waited=now - limits.arrived)

    def _pickled(self, call: _Call) -> _channel.Content:
        if call.content is not None:
            return call.content
        try:
            content = _channel.dumps((*call.arguments, call.trace, call.limits.again))
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

    def _begin(self, call: _Call) -> tuple[Taken, Any]:
        self._pickled(call)  # first: what is refused starts nothing
        while True:
            taken = self._scope.take(call.limits, call.key, admitted=call.begun)
            call.begun = True
            if (answer := self._attempt(call, taken)) is not None:
                return taken, answer[0]
            del taken  # a drained generation is released, and must not be alive then

    def _attempt(self, call: _Call, taken: Taken) -> tuple[Any] | None:
        """Send a call to this worker, and return its result; None if it may be sent to another one instead."""
        try:
            content = self._pickled(call)
            self._check_time(call.limits)
        except BaseException:  # the worker has not seen it
            taken.put_back()
            raise
        try:
            kind, value = self._await_answer(taken, content, call.limits)
        except _NeverRead as error:
            if not call.resends:
                raise WorkerCrashed(self._name, pid=taken.pid, cause=str(error)) from None
            call.resends -= 1
        except WorkerCrashed:
            call.tries -= 1
            if not call.tries:
                raise
            call.limits = call.limits._replace(again=True)
        else:
            if kind == _ERROR:
                raise value.pop()
            return (value,)
        return None

    # Without a thread that waits

    def _submit(self, arguments: Arguments, limits: CallTimes, finish: Any, *, awaited: bool) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            call = self._new_call(arguments, limits)
        except Exception as error:  # noqa: BLE001 - of the key function, or it is too late
            future.set_exception(error)
            return future
        call.future, call.finish, call.awaited = future, finish, awaited
        followed = self._follow(call)
        refusal = followed.begin()
        if isinstance(refusal, (QueueFull, GuardClosed)):
            try:
                raise refusal
            finally:
                del refusal, future, call  # they refer to the error, and it to this frame
        future.add_done_callback(partial(_withdraw, followed))
        return future

    def _follow(self, call: _Call) -> Followed:
        return Followed(self._scope, Claim(call.limits, call.key, admitted=call.begun), partial(self._claimed, call))

    def _claimed(self, call: _Call, taken: Taken | None, failure: BaseException | None) -> None:
        """It has its worker, and a thread from now on; or its error."""
        if taken is None:
            _fail(call, failure)
            return
        job = partial(self._compute, call, taken)
        if self._thread.is_free and self._thread.next is None:
            self._thread.next = job
            return
        try:
            SHARED.start(partial(self._run, [job]), "modelguard-isolated-call")
        except RuntimeError as error:
            refusal = Overloaded(f"{self._name}(): cannot start a thread: {error}")
            for work in (taken.put_back, partial(_fail, call, refusal)):
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

    def _compute(self, call: _Call, taken: Taken) -> None:
        if not call.begun and not call.future.set_running_or_notify_cancel():
            taken.put_back()
            return
        call.begun = True
        self._thread.serves = taken if call.awaited else None
        answer = None
        try:
            answer = self._attempt(call, taken)
            result = None if answer is None else call.finish(call, taken, *answer)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future, call.future = call.future, None  # the error refers to frames that have the call
            future.set_exception(error)
            del call, future, taken, answer  # and to this one
            return
        finally:
            self._thread.serves = None
        del taken
        if answer is None:
            self._follow(call).begin()
        else:
            call.arguments, call.content = ((), {}), None  # callbacks of the future may take their time
            call.future.set_result(result)

    # Messages

    def _await_answer(self, taken: Taken, content: _channel.Content, limits: CallTimes) -> tuple[int, Any]:
        """Send a message to the worker and wait for the answer; give the worker back unless it goes on."""
        channel, limit = taken.channel, self._timeout
        try:
            if limits.until != math.inf:
                limit = min(limit, max(_LEAST, limits.until - time.monotonic()))
            channel.set_timeout(limit)
            channel.send_pickled(*content)
            kind, value, worn = channel.receive(self._loads)
        except ConnectionError:  # at its end the message, or a part of it, was still in its socket
            raise _NeverRead(taken.end_worker("crashed", blame=False)) from None
        except BlockingIOError:  # nothing else ends a call that computes, and nobody knows for how long it would
            ours = limit == self._timeout  # else the caller's deadline, which says nothing of the model
            taken.end_worker("timeout" if ours else "cancelled", blame=not limits.again)
            raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived) from None
        except EOFError:
            cause = taken.end_worker("crashed", blame=not limits.again)
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


def _fail(call: _Call, error: BaseException | None) -> None:
    if call.begun or call.future.set_running_or_notify_cancel():  # who waits for several futures hears of a withdrawal
        call.future.set_exception(error)


def _withdraw(followed: Followed, future: Future[Any]) -> None:
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


# How web frameworks see an isolated function: with the hints and the kind of the function that was written.


def mark(isolated: Any, *, coroutine: bool) -> None:
    """Have frameworks read the function's own hints, and await it if it is a coroutine function.

    Litestar reads the hints of an instance's ``__call__`` if that is a method, so the instance gets one that is not.
    Calls look it up in the class.
    """
    isolated.__call__ = _call_of(weakref.ref(isolated), coroutine=coroutine)
    if not coroutine:
        return
    mark_function: Callable[[Any], object] | None = getattr(inspect, "markcoroutinefunction", None)
    if mark_function is not None:  # from Python 3.12 on
        mark_function(isolated)
    else:
        isolated._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]  # noqa: SLF001 - the mark


def _call_of(reference: weakref.ref[Any], *, coroutine: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        isolated = reference()
        return type(isolated).__call__(isolated, *args, **kwargs)

    async def acall(*args: Any, **kwargs: Any) -> Any:
        return await call(*args, **kwargs)

    return acall if coroutine else call


# ``Isolated``: a function whose model lives in worker processes, forked from a mold.


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)  # pyright knows a coroutine function by a type of its own
T = TypeVar("T")


class Isolated(LoadingHandle, Generic[P, R_co]):
    """A function that runs in worker processes. Made by :func:`isolate`; see there for the options.

    ``f(x)`` blocks the thread, ``await f.aio(x)`` does not block the event loop, ``f.submit(x)`` returns a future. A
    coroutine function is awaited as before, and generators are streamed. Nothing is started before the first call or
    :meth:`load`. It is a context manager, for ``with`` and ``async with``: it loads on entry and closes on exit, on the
    last one if there are several at once.

    It is a handle as a guard is; what that does with a model, it does with the mold and its workers. With
    ``scope="host"`` they are those of all processes: ``reload``, ``unload`` and ``pause`` are for all of them, any of
    which can resume, and ``close`` leaves; the last one ends them. Over a pool they are those of all keys: ``load``
    loads nothing, and ``reload`` has nothing to wait for.
    """

    _made_by = "isolate(workers=2)(function)"
    _status = "modelguard.isolation.status:IsolationStatus"
    _what = "isolated function"

    def __init__(self, options: IsolationOptions, function: Callable[P, R_co], source: Source | PoolSource) -> None:
        functools.update_wrapper(self, function)
        super().__init__(options.name, ())
        self._options = options
        self._source = source
        _supervisor.note_path()
        self._start()
        mark(self, coroutine=options.kind == "coroutine")
        status.functions.add(self)

    def _start(self, *, paused: bool = False) -> None:
        options, source, key_of = self._options, self._source, None
        self._scope: ProcessScope | PoolScope | HostScope
        if isinstance(source, PoolSource):
            self._scope, key_of = PoolScope(options, source, paused=paused), source.pooled.key_of
        elif options.scope is None:
            self._scope = ProcessScope(options, MoldGuard(options, source.guard.engine.options, paused=paused))
        else:
            from modelguard.isolation._host_scope import HostScope

            self._scope = HostScope(options, source.guard.engine.options, paused=paused)
        self._sources = (self._scope,)
        # A mold imports a module that loads or reloads it, and would import that in the next mold.
        self._loadable = self._sources if _processes.role == "owner" else ()
        self._reload_waits = key_of is None
        self._caller = Caller(options, self._scope, key_of)
        # Without anybody who could call it, as after a module was reloaded, its processes have no purpose.
        self._finalizer = weakref.finalize(self, self._scope.end_at_once)

    # Calls

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the function in a worker. Blocks, unless it is a coroutine function.

        Raises:
            DeadlineExceeded: ``timeout`` has passed; the worker was killed. Or no worker became free within it.
            WorkerCrashed: The worker ended during the call.
            TransferRefused: The arguments or the result cannot be sent between processes.
            QueueFull, CircuitOpen: Refused at once; ``retry_after`` says when to try again.
            LoadFailed, Reloading: There is no mold.
            WouldDeadlock: On a running event loop (use :meth:`aio`), or while a mold imports the module.
            GuardClosed: After :meth:`close`.
            RemoteError: The function raised what cannot be pickled, or what would end an iteration or a task of the
                caller instead of reaching it, such as ``StopIteration``.
            Exception: What the function raised. Its ``__cause__`` has the traceback in the worker.
        """
        result: Any
        kind = self._options.kind
        if _processes.role != "owner":
            result = self._call_inside((args, kwargs))
        elif kind == "function":
            # Required, a batch of one blocks the loop anyway, for its await.
            on_loop = asyncio._get_running_loop() is not None  # noqa: SLF001 - the public one raises where there is none
            if on_loop and not call_context.required():
                why = "the call would block the running event loop"
                raise WouldDeadlock(self.name, why=why, fix="Write: await f.aio(...).")
            result = self._caller.call((args, kwargs), _limits())
        elif kind == "coroutine":
            result = self._await((args, kwargs))
        elif kind == "generator":
            result = self._caller.stream((args, kwargs), _limits())
        else:
            result = self._stream((args, kwargs))
        return result  # type: ignore[no-any-return]

    @overload
    async def aio(self: Isolated[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def aio(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute one call without blocking the event loop. Arguments and errors are those of a call.

        Cancelling the task answers it at once, and takes the call out of the queue; one that a worker has begun runs to
        its end there. A call that waits holds no thread.
        """
        return await self._await((args, kwargs))

    @overload
    def submit(self: Isolated[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]: ...
    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin one call and return at once. Arguments and errors are those of a call.

        Cancelling the future takes the call out of the queue; one that a worker has begun runs to its end.
        """
        return self._submit((args, kwargs), awaited=False)

    def _submit(self, arguments: Arguments, *, awaited: bool) -> Future[Any]:
        if _processes.role != "owner":
            self._check_inside()
            reason = "a worker runs one call at a time. Call the function itself, or await its aio()"
            raise NotSupported(f"{self.name}.submit() in its own worker", reason=reason)
        self._refuse_streams()
        return self._caller.submit(arguments, _limits(), awaited=awaited)

    async def _await(self, arguments: Arguments) -> Any:
        if _processes.role != "owner":
            self._refuse_streams()
            result = self._call_inside(arguments)
            return await result if self._options.kind == "coroutine" else result
        waiting.require_loop("awaiting an isolated function")
        return await waiting.result(self._submit(arguments, awaited=True))

    async def _stream(self, arguments: Arguments) -> AsyncIterator[Any]:
        waiting.require_loop("awaiting an isolated function")
        opening = step = self._caller.open(arguments, _limits())
        thread = f"modelguard-isolated-{self.name}"
        try:
            items = await waiting.result(opening)
            while True:
                step = waiting.start(items.next, thread, SHARED.start)
                if (item := await waiting.result(step)) is _NO_ITEM:
                    return
                yield item
        except BaseException as error:
            closed = _close_after(step, opening)
            # Cancelled, or on a loop that is gone: the step that a worker has begun runs to its end.
            if isinstance(error, (Exception, GeneratorExit)) and waiting.on_any_loop():
                with suppress(Overloaded):  # there is no thread for it now
                    await waiting.result(closed)
            raise

    def _refuse_streams(self) -> None:
        if "generator" in self._options.kind:
            raise TypeError(f"{self.name}() is a generator function: iterate over a call of it")

    def _call_inside(self, arguments: Arguments) -> Any:
        """In a worker: a function may call itself, and runs on the model that is already there."""
        self._check_inside()
        args, kwargs = arguments
        return _processes.here(*args, **kwargs)

    def _check_inside(self) -> None:
        """Check that this is a worker of this function."""
        if _processes.role == "importing":
            why = "it is called while a mold imports the module"
            fix = "Put the calls of a script under: if __name__ == '__main__':"
            raise WouldDeadlock(self.name, why=why, fix=fix)
        if _processes.target is not self.isolated_function:
            reason = "a worker has only the model of its own function, and starts no workers of others"
            raise NotSupported(f"{self.name}() inside an isolated function", reason=reason)

    # Its state

    @property
    def function_kind(self) -> FunctionKind:
        """What a call gives: ``"function"``, ``"coroutine"``, ``"generator"`` or ``"async generator"``."""
        return self._options.kind

    @property
    def isolated_function(self) -> Callable[P, R_co]:
        """What runs in the workers: the function below ``@isolate``."""
        return self._source.function

    def source_for(self, key: Any) -> Source:
        """In a mold: what its workers run, and the guard that lends the model, or the pool's model of ``key``."""
        return self._source.for_key(key)

    @property
    def version(self) -> str | None:
        """The version of the model in the current mold, as its loader gave it; None if it gave none."""
        return self._scope.version

    def status(self) -> IsolationStatus:
        """Its state, its processes and its counts."""
        return self._scope.status()

    def __repr__(self) -> str:
        return f"<Isolated {self.name!r}>"

    # Its molds, beside what every handle has

    def rollback(self) -> None:
        """Go back to the mold that the current one has replaced, as :meth:`ModelGuard.rollback` does, at once.

        Needs a guard with ``keep_previous=True``: the previous mold and its workers stay alive, and take their memory.

        Raises:
            NoPreviousModel: None is kept, as of a pool or a host, or its processes have ended.
            GuardClosed: After :meth:`close`.
        """
        self._scope.rollback()

    def refuse_calls(self) -> None:
        """This process exits, and ends its molds: raise ``GuardClosed`` from now on. Waits for nothing."""
        self._scope.refuse_calls()

    # Processes and copies

    def renew_in_child(self) -> None:
        """In a forked child of this process: start again, since the parent's workers answer the parent."""
        self._finalizer.detach()
        self._scope.abandon()
        closed = self._scope.closed
        self._start(paused=self._scope.paused)
        if closed:
            self.refuse_calls()

    # By reference, as functions are pickled and copied.
    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]


def _close_after(step: Future[Any], opening: Future[_Items]) -> Future[None]:
    """Close a stream in a thread, after the step that still runs; the future tells when it is closed."""
    closed: Future[None] = waiting.promise()

    def close(_: Future[Any]) -> None:
        if opening.cancelled() or opening.exception() is not None:
            closed.set_result(None)
        else:
            opening.result().close(closed)

    step.add_done_callback(close)
    return closed


def _limits() -> CallTimes:
    now = time.monotonic()
    left = None if deadlines.current_scope.get() is None else deadlines.left()  # most calls have none
    return CallTimes(now, math.inf if left is None else now + left, call_context.rerunning.get())
