"""One call from its arguments to its answer: pickle, take a worker, send, wait, give the worker back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from modelguard.errors import DeadlineExceeded, TransferRefused, UnhashableKey, WorkerCrashed
from modelguard.isolation import _pickling, _trace
from modelguard.isolation._channel import Unreadable
from modelguard.isolation._molds import with_remote_traceback
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation._scope import Limits, Scope, Taken
from modelguard.isolation._worker import AnswerKind, StreamStep

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


class _NeverRead(Exception):
    """The worker has ended before it had read all of the message, so it has begun nothing of what that asks for."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


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
        self._scope = scope
        self._key_of = key_of

    def call(self, arguments: Arguments, limits: Limits) -> Any:
        """Compute a call. Blocks.

        Raises:
            Exception: The function's own, or modelguard's reason why there is no answer.
        """
        content, key = self._pickled(arguments), self._key(arguments)
        tries = self._tries
        while True:
            try:
                taken, kind, value = self._begin(content, limits, key)
            except WorkerCrashed:
                tries -= 1
                if not tries:
                    raise
                continue
            taken.leave()
            if kind == _RESULT:
                return value
            raise with_remote_traceback(*value)

    def stream(self, arguments: Arguments, limits: Limits) -> Iterator[Any]:
        """Compute the items of a generator one by one. It keeps its worker until it ends or is closed."""
        taken, kind, value = self._begin(self._pickled(arguments), limits, self._key(arguments))
        try:
            if kind == _ERROR:
                raise with_remote_traceback(*value)
            yield from self._items(taken, limits)
        finally:
            taken.leave()

    def _items(self, taken: Taken, limits: Limits) -> Iterator[Any]:
        step, close = _pickling.dumps(StreamStep.NEXT), _pickling.dumps(StreamStep.CLOSE)
        kind, value = _ITEM, None
        try:
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
        if kind == _ERROR:
            raise with_remote_traceback(*value)

    # The steps

    def _pickled(self, arguments: Arguments) -> _pickling.Content:
        try:
            content = _pickling.dumps((*arguments, _trace.outgoing()))
        except Exception as error:
            why = f"{_culprit(arguments)}: {type(error).__name__}: {error}"
            raise TransferRefused(self._name, what="arguments", why=why) from error
        size = _pickling.size(content)
        if size > self._max_bytes:
            why = f"they take {size:,} bytes, and max_transfer is {self._max_bytes:,}"
            raise TransferRefused(self._name, what="arguments", why=why)
        return content

    def _key(self, arguments: Arguments) -> Any:
        if self._key_of is None:
            return None
        key = self._key_of(*arguments)
        try:
            hash(key)
        except TypeError:
            raise UnhashableKey(key) from None
        return key

    def _begin(self, content: _pickling.Content, limits: Limits, key: Any) -> tuple[Taken, int, Any]:
        """Send a call to a worker, and to another one if the first has ended before it had read it."""
        left = _RESENDS
        while True:
            taken = self._scope.take(limits, key)
            try:
                return taken, *self._exchange(taken, content, limits)
            except _NeverRead as error:
                taken.leave()
                if not left:
                    raise WorkerCrashed(self._name, pid=taken.pid, cause=error.cause) from None
                left -= 1
            except BaseException:
                taken.leave()
                raise
            del taken  # a drained generation is released, and must not be alive then

    def _exchange(self, taken: Taken, content: _pickling.Content, limits: Limits) -> tuple[int, Any]:
        """Send a message to the worker and wait for the answer; give the worker back unless it goes on."""
        channel = taken.channel
        limit = self._timeout
        if limits.until != math.inf:
            limit = max(_LEAST, min(limit, limits.until - time.monotonic()))
        try:
            channel.set_timeout(0.0 if limit == math.inf else limit)
            channel.send_pickled(*content)
            kind, value, worn = channel.receive()
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
            if content[0] == _pickling.dumps(StreamStep.NEXT)[0]:
                taken.lose("cancelled")
            else:
                taken.release(worn=())
            raise TransferRefused(self._name, what="result", why=f"it cannot be rebuilt here: {error}") from error
        except BaseException:  # Ctrl-C, or an error of ours: nobody knows what the worker does
            if channel.fileno() >= 0:
                taken.lose("cancelled")
            raise
        if kind != _ITEM:
            taken.release(worn=worn)
        return kind, value


def _culprit(arguments: Arguments) -> str:
    """Which argument cannot be pickled."""
    args, kwargs = arguments
    named: list[tuple[str, Any]] = [*((f"argument {n}", one) for n, one in enumerate(args, 1)), *kwargs.items()]
    for name, value in named:
        if not _can_be_pickled(value):
            return f"{name}, of type {type(value).__module__}.{type(value).__qualname__}"
    return "they"


def _can_be_pickled(value: object) -> bool:
    pickle: Callable[[object], object] = _pickling.dumps
    try:
        pickle(value)
    except Exception:  # noqa: BLE001 - pickling runs any code
        return False
    return True
