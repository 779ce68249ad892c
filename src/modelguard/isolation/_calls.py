"""One call from its arguments to its answer: pickle, take a worker, send, wait, give the worker back."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from modelguard.errors import (
    DeadlineExceeded,
    GuardClosed,
    QueueFull,
    RemoteError,
    TransferRefused,
    UnhashableKey,
    WorkerCrashed,
)
from modelguard.isolation import _channel
from modelguard.isolation._channel import Unreadable
from modelguard.isolation._claims import Claim, Limits, Scope, Taken
from modelguard.isolation._molds import with_remote_traceback
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation._supervisor import supervisor
from modelguard.isolation._worker import AnswerKind, StreamStep
from modelguard.serving._shared_threads import SharedThread
from modelguard.telemetry import logger

__all__ = ["Arguments", "Caller"]

#: How often one call is sent anew because its worker ended unread. More in a row than this are no coincidence.
_RESENDS = 8

#: Seconds that a worker has for a message at least, whatever is left until the caller's deadline. Ending it costs more,
#: and a short answer that is late by less than this is an answer.
_LEAST = 0.01

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

KeyOf = Callable[[tuple[Any, ...], dict[str, Any]], Any]

#: Compared with each answer, and plain numbers compare faster.
_RESULT, _ERROR, _ITEM = int(AnswerKind.RESULT), int(AnswerKind.ERROR), int(AnswerKind.ITEM)


#: Errors of a function that would end the iteration, the generator or the task of its caller instead of reaching it.
_SIGNALS = (StopIteration, GeneratorExit, CancelledError, concurrent.futures.CancelledError)


class _NeverRead(Exception):
    """The worker has ended before it had read all of the message, so it has begun nothing of what that asks for."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class _Call:
    """One call, and how often it may yet be sent anew.

    Attributes:
        content: What is sent; None until it was pickled.
        begun: Whether a thread has begun it, so that it can be cancelled no more.
        awaited: Whether its future belongs to an event loop alone, so that no callback of users blocks at its end.
    """

    __slots__ = ("arguments", "awaited", "begun", "content", "key", "limits", "resends", "trace", "tries")

    def __init__(self, arguments: Arguments, limits: Limits, key: Any, tries: int) -> None:
        self.arguments = arguments
        self.limits = limits
        self.key = key
        self.trace = _channel.outgoing()
        self.content: _channel.Content | None = None
        self.tries = tries
        self.resends = _RESENDS
        self.begun = False
        self.awaited = False

    def forget(self) -> None:
        """Its content is needed no more."""
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
    """Makes the calls of one isolated function. Thread-safe.

    Args:
        options: Of the function.
        scope: Where the workers are.
        key_of: Which of a pool's models a call needs; None if the function has no pool.
    """

    def __init__(self, options: IsolationOptions, scope: Scope, key_of: KeyOf | None = None) -> None:
        self._name = options.name
        self._timeout = math.inf if options.timeout is None else options.timeout
        self._max_bytes = options.max_transfer
        self._tries = 2 if options.retry else 1
        self._loads = _channel.unpickle if options.stub is None else _channel.loads_here
        self._scope = scope
        self._key_of = key_of
        self._thread = _Thread()

    def call(self, arguments: Arguments, limits: Limits) -> Any:
        """Compute a call. Blocks.

        Raises:
            Exception: The function's own, or modelguard's reason why there is no answer.
        """
        call = self._new_call(arguments, limits)
        return self._result(call, *self._begin(call))

    def stream(self, arguments: Arguments, limits: Limits) -> Iterator[Any]:
        """Compute the items of a generator one by one. It keeps its worker until it ends or is closed."""
        call = self._new_call(arguments, limits)
        yield from self._opened(call, *self._begin(call))

    def submit(self, arguments: Arguments, limits: Limits, *, awaited: bool = False) -> Future[Any]:
        """Begin a call. No thread waits with it for a worker; one computes it then.

        Args:
            arguments: Of the call.
            limits: Its times.
            awaited: Whether nobody but an event loop gets the future.

        Raises:
            QueueFull: Too many calls wait.
            GuardClosed: After the end.
        """
        return self._submit(arguments, limits, self._result, awaited=awaited)

    def open(self, arguments: Arguments, limits: Limits) -> Future[Iterator[Any]]:
        """Begin a stream as :meth:`submit` begins a call. Its items are computed by the threads that ask for them."""
        return self._submit(arguments, limits, self._opened, awaited=True)

    # The steps

    def _result(self, _call: _Call, taken: Taken, kind: int, value: Any) -> Any:
        taken.leave()
        if kind == _RESULT:
            return value
        try:
            raise self._raisable(with_remote_traceback(*value))
        finally:
            del value  # it refers to the error, and that to this frame

    def _opened(self, call: _Call, taken: Taken, kind: int, value: Any) -> Iterator[Any]:
        if kind == _ERROR:
            taken.leave()
            try:
                raise self._raisable(with_remote_traceback(*value))
            finally:
                del value
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
            try:
                raise self._raisable(with_remote_traceback(*value))
            finally:
                del value

    # One call

    def _new_call(self, arguments: Arguments, limits: Limits) -> _Call:
        return _Call(arguments, limits, self._key(arguments), self._tries)

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
        """Send a call to a worker, and to another one if that is allowed. Blocks."""
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
            SharedThread(partial(self._run, [job]), "modelguard-isolated-call").start()
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
            taken.lose("timeout")
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
        if kind != _ITEM:
            # Who gets the worker gets this thread too, if nothing in it can block before.
            thread = self._thread
            thread.is_free = thread.serves is taken
            try:
                taken.release(worn=worn)
            finally:
                thread.is_free = False
        return kind, value


def _fail(call: _Call, future: Future[Any], error: BaseException) -> None:
    if call.begun or future.set_running_or_notify_cancel():
        future.set_exception(error)


def _withdraw(claim: Claim, future: Future[Any]) -> None:
    if future.cancelled() and claim.withdraw():
        future.set_running_or_notify_cancel()  # whoever waits for several futures hears of it


def _culprit(arguments: Arguments) -> str:
    """Which argument cannot be pickled."""
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
