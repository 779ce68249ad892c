"""One call from its arguments to its answer: pickle, take a worker, send, wait, give the worker back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from modelguard.errors import DeadlineExceeded, Reloading, TransferRefused, WorkerCrashed
from modelguard.isolation import _pickling, _trace
from modelguard.isolation._channel import Unreadable
from modelguard.isolation._mold_guard import MoldGuard
from modelguard.isolation._molds import Mold, with_remote_traceback
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation._roster import MoldGone
from modelguard.isolation._worker import AnswerKind, StreamStep
from modelguard.isolation._worker_process import Worker
from modelguard.lifecycle._generation import Generation

__all__ = ["Arguments", "Caller", "Limits"]

#: Seconds between looks for the next mold after one has died.
_POLL = 0.005

#: How often one call is sent anew because its worker ended unread. More in a row than this are no coincidence.
_RESENDS = 8

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

#: Compared with each answer, and plain numbers compare faster.
_RESULT, _ERROR, _ITEM = int(AnswerKind.RESULT), int(AnswerKind.ERROR), int(AnswerKind.ITEM)


class Limits(NamedTuple):
    """The times of one call, on the monotonic clock.

    Attributes:
        arrived: When it was made.
        until: When its caller's own deadline ends; infinity for none.
    """

    arrived: float
    until: float = math.inf


class _Taken(NamedTuple):
    generation: Generation[Mold]
    worker: Worker


class _NeverRead(Exception):
    """The worker has ended before it had read all of the message, so it has begun nothing of what that asks for."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class Caller:
    """Makes the calls of one isolated function. Thread-safe.

    Args:
        options: Of the function.
        molds: Where the workers are.
    """

    def __init__(self, options: IsolationOptions, molds: MoldGuard) -> None:
        self._name = options.name
        self._timeout = math.inf if options.timeout is None else options.timeout
        self._max_bytes = options.max_transfer
        self._tries = 2 if options.retry else 1
        self._molds = molds
        self._engine = molds.guard.engine

    def call(self, arguments: Arguments, limits: Limits) -> Any:
        """Compute a call. Blocks.

        Raises:
            Exception: The function's own, or modelguard's reason why there is no answer.
        """
        content = self._pickled(arguments)
        tries = self._tries
        while True:
            try:
                taken, kind, value = self._begin(content, limits)
            except WorkerCrashed:
                tries -= 1
                if not tries:
                    raise
                continue
            self._engine.leave(taken.generation, failed=False)
            if kind == _RESULT:
                return value
            raise with_remote_traceback(*value)

    def stream(self, arguments: Arguments, limits: Limits) -> Iterator[Any]:
        """Compute the items of a generator one by one. It keeps its worker until it ends or is closed."""
        taken, kind, value = self._begin(self._pickled(arguments), limits)
        try:
            if kind == _ERROR:
                raise with_remote_traceback(*value)
            yield from self._items(taken, limits)
        finally:
            self._engine.leave(taken.generation, failed=False)

    def _items(self, taken: _Taken, limits: Limits) -> Iterator[Any]:
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
            raise WorkerCrashed(self._name, pid=taken.worker.pid, cause=error.cause) from None
        finally:
            if kind == _ITEM:
                with suppress(WorkerCrashed, DeadlineExceeded, _NeverRead):
                    self._exchange(taken, close, Limits(time.monotonic()))
        if kind == _ERROR:
            raise with_remote_traceback(*value)

    # The steps

    def _pickled(self, arguments: Arguments) -> tuple[bytes, _pickling.Buffers]:
        try:
            body, buffers = content = _pickling.dumps((*arguments, _trace.outgoing()))
        except Exception as error:
            why = f"{_culprit(arguments)}: {type(error).__name__}: {error}"
            raise TransferRefused(self._name, what="arguments", why=why) from error
        size = len(body)
        if buffers:
            size += sum(buffer.nbytes for buffer in buffers)
        if size > self._max_bytes:
            why = f"they take {size:,} bytes, and max_transfer is {self._max_bytes:,}"
            raise TransferRefused(self._name, what="arguments", why=why)
        return content

    def _begin(self, content: tuple[bytes, _pickling.Buffers], limits: Limits) -> tuple[_Taken, int, Any]:
        """Send a call to a worker, and to another one if the first has ended before it had read it."""
        left = _RESENDS
        while True:
            taken = self._take(limits)
            try:
                return taken, *self._exchange(taken, content, limits)
            except _NeverRead as error:
                self._engine.leave(taken.generation, failed=False)
                if not left:
                    raise WorkerCrashed(self._name, pid=taken.worker.pid, cause=error.cause) from None
                left -= 1
            except BaseException:
                self._engine.leave(taken.generation, failed=False)
                raise
            del taken  # a drained generation is released, and must not be alive then

    def _take(self, limits: Limits) -> _Taken:
        """Take a worker, and with it a lease on its mold."""
        gone: Mold | None = None
        since = 0.0
        while True:
            generation = self._engine.enter()
            mold = generation.model
            try:
                if mold is not gone:
                    return _Taken(generation, mold.roster.take(self._timeout, limits.until, limits.arrived))
            except MoldGone:
                gone, since = mold, time.monotonic()
            except BaseException:
                self._engine.leave(generation, failed=False)
                raise
            self._engine.leave(generation, failed=False)
            waited = time.monotonic() - since
            if waited > self._molds.guard.engine.guard.options.wait_timeout:
                raise Reloading(self._name, waited=waited)
            if time.monotonic() > limits.until:
                raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived)
            del generation, mold  # a drained generation is released, and must not be alive then
            time.sleep(_POLL)

    def _exchange(self, taken: _Taken, content: tuple[bytes, _pickling.Buffers], limits: Limits) -> tuple[int, Any]:
        """Send a message to the worker and wait for the answer; give the worker back unless it goes on."""
        worker, roster = taken.worker, taken.generation.model.roster
        channel = worker.channel
        limit = self._timeout
        if limits.until != math.inf:
            limit = max(0.001, min(limit, limits.until - time.monotonic()))
        try:
            channel.set_timeout(0.0 if limit == math.inf else limit)
            channel.send_pickled(*content)
            kind, value, worn = channel.receive()
        except ConnectionError:  # at its end the message, or a part of it, was still in its socket
            raise _NeverRead(roster.lose(worker, "crashed", blame=False)) from None
        except BlockingIOError:
            roster.lose(worker, "timeout")
            raise DeadlineExceeded(self._name, waited=time.monotonic() - limits.arrived) from None
        except EOFError:
            cause = roster.lose(worker, "crashed")
            raise WorkerCrashed(self._name, pid=worker.pid, cause=cause) from None
        except Unreadable as error:
            # Of a stream, the worker holds an open generator: it cannot be used for anything else.
            if content[0] == _pickling.dumps(StreamStep.NEXT)[0]:
                roster.lose(worker, "cancelled")
            else:
                roster.release(worker, worn=False)
            raise TransferRefused(self._name, what="result", why=f"it cannot be rebuilt here: {error}") from error
        except BaseException:  # Ctrl-C, or an error of ours: nobody knows what the worker does
            if worker.channel.fileno() >= 0:
                roster.lose(worker, "cancelled")
            raise
        if kind != _ITEM:
            roster.release(worker, worn=worn)
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
