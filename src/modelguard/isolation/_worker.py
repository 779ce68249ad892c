"""The life of a worker: receive a call, run it on the model, answer, until the owner closes the channel."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, NoReturn

from modelguard._function_kinds import FunctionKind
from modelguard.errors import RemoteError, TransferRefused
from modelguard.isolation import _channel
from modelguard.isolation._channel import Channel, Unreadable
from modelguard.telemetry import Reason

__all__ = ["AnswerKind", "Serving", "StreamStep", "flush_output", "leave", "portable"]


#: Seconds between two looks at what policies read besides the calls themselves, such as memory.
_LOOK = 0.05


#: Characters of the text and of the traceback of an error that is larger than ``max_transfer``: enough for a person.
_SHORT = 2000


class AnswerKind(IntEnum):
    """What an answer holds."""

    READY = 0
    RESULT = 1
    ERROR = 2
    ITEM = 3
    END = 4


class StreamStep(IntEnum):
    """What the owner asks of a generator that is open."""

    NEXT = 0
    CLOSE = 1


class Serving:
    """Answers calls on one channel.

    Args:
        name: The function's name in errors.
        channel: To the owner.
        call: The function, as callers see it.
        kind: What a call of it returns.
        worn: Why this worker asks for its replacement; empty if it does not. Read before each answer.
        between_calls: Runs after an answer, when nobody waits, twenty times a second at most.
        max_bytes: The largest answer.
        plain: Whether errors are to need no modules but Python's and modelguard's.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        call: Callable[..., Any],
        kind: FunctionKind,
        *,
        worn: Callable[[], tuple[Reason, ...]],
        between_calls: Callable[[], object] | None,
        max_bytes: int,
        plain: bool,
    ) -> None:
        self._name = name
        self._channel = channel
        self._call = call
        self._kind = kind
        self._worn = worn
        self._between_calls = between_calls
        self._max_bytes = max_bytes
        self._plain = plain
        self._pid = os.getpid()
        self._look_again = 0.0
        self._streams = kind in {"generator", "async generator"}
        self._runner: asyncio.Runner | None = None

    def run(self) -> None:
        """Serve until the owner closes the channel or dies."""
        try:
            self._answer(AnswerKind.READY, os.getpid())
            while True:
                self._serve_one()
                if self._between_calls is not None and time.monotonic() >= self._look_again:
                    self._between_calls()
                    self._look_again = time.monotonic() + _LOOK
        except (EOFError, OSError):  # of the channel: the model's own errors go to the caller
            return

    def _serve_one(self) -> None:
        try:
            message = self._receive()
        except Unreadable as error:
            self._refuse("arguments", f"the worker cannot rebuild them: {error}")
            return
        args, kwargs, carrier = message
        leave_trace = None if carrier is None else _channel.attach(carrier)
        try:
            if self._streams:
                self._stream(args, kwargs)
                return
            result = self._call(*args, **kwargs)
            if self._kind == "coroutine":
                result = self._run(result)
        except (KeyboardInterrupt, SystemExit) as error:
            self._fail(RemoteError(self._name, kind=type(error).__qualname__, text=str(error)), error)
            return
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._fail(error, error)
            return
        finally:
            if leave_trace is not None:
                leave_trace()
        self._answer(AnswerKind.RESULT, result)

    def _run(self, coroutine: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine, context=contextvars.copy_context())

    def _stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a generator one step at a time, so that it computes no more than its caller asks for."""
        items = self._call(*args, **kwargs)
        asynchronous = self._kind == "async generator"
        self._answer(AnswerKind.ITEM, None)
        while self._receive() == StreamStep.NEXT:
            try:
                item = self._run(_next(items)) if asynchronous else next(items)
            except (StopIteration, StopAsyncIteration):
                break
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                self._fail(error, error)
                return
            if not self._answer(AnswerKind.ITEM, item):
                _close(items, self._run)
                return
        else:
            _close(items, self._run)
        self._answer(AnswerKind.END, None)

    # Messages. All that runs between two of them may fork, and go on here in both processes: a call, a step of a
    # stream, pickling, a policy.

    def _receive(self) -> Any:
        self._stay_in_own_process()
        return self._channel.receive()

    def _send(self, content: _channel.Content) -> None:
        self._stay_in_own_process()
        self._channel.send_pickled(*content)

    def _stay_in_own_process(self) -> None:
        """End a process that the model has forked: its parent answers."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _answer(self, kind: AnswerKind, value: object) -> bool:
        """Send an answer; false if its value could not be sent, and the owner got an error instead."""
        try:
            content = _channel.dumps((int(kind), value, self._worn()))
        except BaseException as error:  # noqa: BLE001 - pickling runs any code
            self._refuse("result", f"{_describe(value)}: {type(error).__name__}: {error}")
            return False
        size = _channel.size(content)
        if size > self._max_bytes:
            self._refuse("result", f"{_describe(value)} takes {size:,} bytes, and max_transfer is {self._max_bytes:,}")
            return False
        self._send(content)
        return True

    def _refuse(self, what: Any, why: str) -> None:
        self._fail(TransferRefused(self._name, what=what, why=why), None)

    def _fail(self, error: BaseException, raised: BaseException | None) -> None:
        text = None if raised is None else "".join(traceback.format_exception(raised))
        sent = portable(error, self._name, plain=self._plain)
        content = _channel.dumps((int(AnswerKind.ERROR), (sent, text), self._worn()))
        size = _channel.size(content)
        if size > self._max_bytes:
            why = f"; the error takes {size:,} bytes, and max_transfer is {self._max_bytes:,}"
            short = _described(error, self._name, _text_of(error)[:_SHORT] + why)
            trace = None if text is None else text[-_SHORT:]
            content = _channel.dumps((int(AnswerKind.ERROR), (short, trace), self._worn()))
        self._send(content)


def portable(error: BaseException, name: str, *, plain: bool = False) -> BaseException:
    """The error itself if it survives pickling, else a :class:`~modelguard.errors.RemoteError` that describes it.

    Args:
        error: What was raised.
        name: The isolated function's name.
        plain: Whether only what Python and modelguard have will do, since the rest would need its modules.
    """
    with suppress(Exception):
        content = _channel.dumps(error)
        if type(_channel.loads_plain(*content) if plain else _channel.unpickle(*content)) is type(error):
            return error
    return _described(error, name, _text_of(error))


def _described(error: BaseException, name: str, text: str) -> RemoteError:
    kind = type(error)
    return RemoteError(name, kind=f"{kind.__module__}.{kind.__qualname__}", text=text)


def leave(status: int) -> NoReturn:
    """End this process without the exit handlers that it has inherited."""
    flush_output()
    os._exit(status)


def flush_output() -> None:
    """Write what is still in this process's buffers, as far as it can be written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a program may have closed or replaced them
            stream.flush()


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error whose text fails is still an error
        return "(no text)"


def _describe(value: object) -> str:
    kind = value.__class__  # what a guard's proxy of a lazy result stands for
    hint = "; write a generator function, so that its items are streamed" if hasattr(kind, "__next__") else ""
    return f"an object of type {kind.__module__}.{kind.__qualname__}{hint}"


async def _next(items: Any) -> Any:
    return await anext(items)


def _close(items: Any, run: Callable[[Any], Any]) -> None:
    with suppress(Exception):
        if hasattr(items, "aclose"):
            run(items.aclose())
        else:
            items.close()
