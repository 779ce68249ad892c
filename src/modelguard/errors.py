"""Every exception and warning of modelguard.

::

    ModelGuardError
    ├── InvalidOption (ValueError)        an invalid argument
    │   ├── CannotRun                     a command that was not found, or cannot be executed
    │   └── NoMemoryLimit                 a percentage such as "80%" was given, and there is no memory limit
    ├── NotSupported (RuntimeError)       this platform or interpreter cannot do it
    ├── GuardClosed (RuntimeError)        used after close()
    ├── WouldDeadlock (RuntimeError)      the call would wait for itself
    ├── LoadFailed (RuntimeError)         no model could be loaded
    │   ├── LoadTimeout (TimeoutError)    the loader took longer than its timeout
    │   └── ModelRejected                 the loader returned None, or validate or replay rejected the model
    ├── CudaAfterFork (RuntimeError)      the model needs CUDA in a process that was forked too late for it
    ├── NoPreviousModel (RuntimeError)    rollback() was called, and no previous model is kept
    ├── Overloaded (RuntimeError)         no capacity now: try again later
    │   ├── Reloading (TimeoutError)      the call timed out while the model was being loaded or replaced
    │   ├── QueueFull                     the queue has reached its limit
    │   ├── QuotaExceeded                 one key has as many requests in the queue as its quota allows
    │   ├── DeadlineUnreachable           at the measured rate the answer would come too late
    │   └── CircuitOpen                   the model has failed several times in a row
    ├── DeadlineExceeded (TimeoutError)   the request was accepted, but not answered in time
    ├── CallerGone (RuntimeError)         the caller no longer waits for the answer
    ├── ConsumerTooSlow (RuntimeError)    a stream's consumer did not take its parts, and others had to wait
    ├── ItemRefused (ValueError)          an item that cannot be put into a batch
    │   └── ItemTooHeavy                  more than a batch, or a queue, may ever hold
    ├── BatchFailed (RuntimeError)        a whole batch failed, and no single item is known to be the cause
    │   └── WrongResults (TypeError)      the batch function did not return one result for each item
    ├── ModelTooLarge (RuntimeError)      one model alone exceeds the pool's budget
    ├── UnhashableKey (TypeError)         a pool key that cannot be hashed
    ├── EscapedResult (RuntimeError)      a result points into memory that is about to be freed
    ├── WeightsRefused (RuntimeError)     published weights that must not be used
    │   ├── WeightsMissing (FileNotFoundError)  nothing has been published there
    │   └── WeightsMismatch (ValueError)  they do not fit the model that build() makes
    ├── PublishFailed (OSError)           the disk, the permissions or another publisher prevented it
    ├── WorkerCrashed (RuntimeError)      a worker process ended without an answer
    ├── TransferRefused (TypeError)       arguments or a result that cannot be sent between processes
    ├── RemoteError (RuntimeError)        a worker's error that cannot be pickled
    ├── ForkUnsafe (RuntimeError)         forking this process would give workers that hang or fail
    └── ForkOrder (RuntimeError)          prepare() or in_child() in the wrong process, or at the wrong time

    ModelGuardWarning (UserWarning)
    ├── PolicyNeverFires                  a policy that can never become due
    └── ForkHazard                        something that may not survive a fork

Errors keep their fields when they are pickled, so they can be sent between processes.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Iterable
from typing import Any, Literal

# The base classes of errors and warnings, and the errors that every part of modelguard raises.


#: The longest ``repr`` of a value in a message, in characters.
_LONGEST = 200

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 60
_repr.maxlevel = 2


def shortened(value: object) -> str:
    """The ``repr`` of a value, cut to fit a log line: the value may be a whole model."""
    try:
        text = _repr.repr(value)
    except ValueError:  # Python limits the number of digits of an int
        text = f"<{type(value).__name__}>"
    text = printable(text)  # the repr of a class of the user's may be anything
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def printable(text: str) -> str:
    """Text as part of one line of a log or a table: a newline, an escape and the like are written as in a ``repr``."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def text_of(error: BaseException) -> str:
    """The text of an error; an error whose text fails is still an error."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - whatever a class of the user's raises there
        return "(no text)"


def told(error: BaseException) -> str:
    """Type and text of an error."""
    return f"{type(error).__name__}: {text_of(error)}"


def of_a_signal(error: BaseException) -> bool:
    """Whether a handler of a signal has raised it, as that of SIGTERM by ``sys.exit()``: no answer to a caller."""
    import signal  # here, as few errors are asked for this
    import threading
    import traceback

    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, KeyboardInterrupt) or any(frame.f_code in handlers for frame, _ in frames)


def _code_of(handler: Any) -> object:
    called = handler.func if isinstance(handler, functools.partial) else handler
    if callable(called) and not hasattr(called, "__code__"):  # an object
        called = type(called).__call__
    return getattr(called, "__code__", None)


def _rebuild(cls: type[ModelGuardError], args: tuple[Any, ...], fields: dict[str, Any]) -> ModelGuardError:
    # Errors that are also a TimeoutError have OSError's layout, which only its constructor creates.
    error = (OSError if issubclass(cls, OSError) else Exception).__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ModelGuardError(Exception):
    """Base of every error that modelguard itself raises."""

    # The constructors of subclasses take keywords and build the message from them. The default pickling of
    # exceptions (call the class with `args`) cannot undo that.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class InvalidOption(ModelGuardError, ValueError):
    """An invalid argument.

    Attributes:
        argument: The argument's name, as the caller wrote it.
        value: ``repr`` of the value, shortened to at most 200 characters.
        fix: What to write instead.
    """

    def __init__(self, argument: str, value: object, *, why: str, fix: str) -> None:
        self.argument = argument
        self.value = shortened(value)
        self.fix = fix
        super().__init__(f"{argument}={self.value}: {why}. {fix}")


class NoMemoryLimit(InvalidOption):
    """A percentage of the memory limit was given, and this process has no memory limit."""


class CannotRun(InvalidOption):
    """A command that cannot be started.

    Attributes:
        status: The exit status that a shell would give: 127 if there is no such command, 126 if it cannot be executed.
    """

    def __init__(self, command: object, *, why: str, fix: str, status: int) -> None:
        super().__init__("command", command, why=why, fix=fix)
        self.status = status


class NotSupported(ModelGuardError, RuntimeError):
    """This platform, interpreter or installation cannot do what was asked.

    Attributes:
        feature: What was asked for.
        reason: Why it is not available here.
    """

    def __init__(self, feature: str, *, reason: str) -> None:
        super().__init__(f"{feature} is not supported here: {reason}")
        self.feature = feature
        self.reason = reason


class GuardClosed(ModelGuardError, RuntimeError):
    """A guard, pool or batched function was used after ``close()``.

    Attributes:
        guard: Its name.
    """

    def __init__(self, guard: str) -> None:
        super().__init__(f"{guard!r} is closed; make a new one, or close it after its last call")
        self.guard = guard


class WouldDeadlock(ModelGuardError, RuntimeError):
    """The call would wait for something that cannot happen until it returns.

    Attributes:
        guard: The name of the guard, pool or batched function.
        fix: What to do instead.
    """

    def __init__(self, guard: str, *, why: str, fix: str) -> None:
        super().__init__(f"{guard!r}: {why}. {fix}")
        self.guard = guard
        self.fix = fix


class Overloaded(ModelGuardError, RuntimeError):
    """There is no capacity now; a web service answers 503.

    Attributes:
        retry_after: Seconds after which it makes sense to try again.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelGuardWarning(UserWarning):
    """Base of modelguard's warnings."""


# Errors of isolated functions.


class WorkerCrashed(ModelGuardError, RuntimeError):
    """The worker process that computed the call has ended without an answer. No other call is affected.

    Attributes:
        function: The isolated function's name.
        pid: The worker's process id.
        cause: How it ended: the signal's name, such as ``"SIGSEGV"``, or ``"exit status 3"``. Behind ``"SIGKILL"``
            stands a word on the kernel's OOM killer, if the cgroup has counted a kill.
    """

    def __init__(self, function: str, *, pid: int, cause: str) -> None:
        super().__init__(f"{function}(): worker {pid} ended during the call: {cause}")
        self.function = function
        self.pid = pid
        self.cause = cause


class TransferRefused(ModelGuardError, TypeError):
    """The arguments or the result of one call cannot be sent between processes. The worker serves on.

    Attributes:
        function: The isolated function's name.
        what: ``"arguments"`` or ``"result"``.
        why: The reason, with the object at fault.
    """

    def __init__(self, function: str, *, what: Literal["arguments", "result"], why: str) -> None:
        super().__init__(f"{function}(): its {what} cannot be sent between processes: {why}")
        self.function = function
        self.what = what
        self.why = why


class RemoteError(ModelGuardError, RuntimeError):
    """The function raised an error that cannot reach its caller; this one has its type's name and its text.

    It cannot be pickled, or is larger than ``Bounds(transfer=)``. Or it would end an iteration, a task or the process
    of the caller, as ``StopIteration``, ``CancelledError`` and ``SystemExit`` do; then it is the ``__cause__``.

    Attributes:
        function: The isolated function's name.
        kind: Module and name of the error's type.
    """

    def __init__(self, function: str, *, kind: str, text: str) -> None:
        super().__init__(f"{function}() raised {kind}: {text}")
        self.function = function
        self.kind = kind


# Errors of guards, pools and their models.


class LoadFailed(ModelGuardError, RuntimeError):
    """A load failed. The loader's own error is the ``__cause__``.

    Attributes:
        guard: The guard's name.
        reason: The failure in one line; what is not printable is escaped.
        attempt: How many loads have failed in a row.
        retry_after: Seconds until the next attempt; until then calls fail immediately if no generation serves.
        current: The generation that serves, which the load did not replace; None if there is no model.
    """

    def __init__(
        self, guard: str, reason: str, *, attempt: int = 1, retry_after: float = 0.0, current: int | None = None
    ) -> None:
        reason = printable(reason)
        state = "has no model" if current is None else f"has not replaced generation {current}, which serves on"
        super().__init__(f"guard {guard!r} {state}: {reason} (attempt {attempt}, next in {retry_after:.1f} s)")
        self.guard = guard
        self.current = current
        self.reason = reason
        self.attempt = attempt
        self.retry_after = retry_after

    def again(self, retry_after: float, current: int | None = None) -> LoadFailed:
        """Copy this error for another caller: one exception object must not be raised in two threads."""
        return type(self)(self.guard, self.reason, attempt=self.attempt, retry_after=retry_after, current=current)


class LoadTimeout(LoadFailed, TimeoutError):
    """The loader took longer than the ``timeout`` of its ``Loading``, and was abandoned."""


class ModelRejected(LoadFailed):
    """The loader returned None, or ``validate`` or ``replay`` rejected what it returned."""


class CudaAfterFork(ModelGuardError, RuntimeError):
    """A model uses CUDA in a process that was forked after its parent had initialised CUDA. torch's error is the cause.

    Attributes:
        guard: The guard's name.
    """

    def __init__(self, guard: str) -> None:
        super().__init__(
            f"guard {guard!r}: this process was forked after its parent had initialised CUDA, and cannot use it. Use "
            "CUDA only in the workers, after the fork, or start them by spawn, as isolate(start='spawn') does"
        )
        self.guard = guard


class NoPreviousModel(ModelGuardError, RuntimeError):
    """``rollback()`` was called, and no previous model is kept.

    Attributes:
        guard: The guard's name.
        why: Why none is kept.
    """

    def __init__(self, guard: str, *, why: str, fix: str = "Call reload() to load a model.") -> None:
        super().__init__(f"guard {guard!r} has no previous model: {why}. {fix}")
        self.guard = guard
        self.why = why
        self.fix = fix


class Reloading(Overloaded, TimeoutError):
    """A call timed out while it waited for a model, or a command while a model was loaded, replaced or released.

    Attributes:
        guard: The guard's name.
        waited: Seconds that the call waited.
        current: The generation that serves meanwhile; None if there is none, or if that is not known.
    """

    def __init__(
        self,
        guard: str,
        *,
        waited: float,
        retry_after: float = 1.0,
        command: str | None = None,
        current: int | None = None,
    ) -> None:
        if command is None and current is None:
            what = f" had no model to serve after {waited:.1f} s of waiting"
        else:
            serves = "" if current is None else f"; generation {current} serves meanwhile"
            what = f": {command or 'the load'} was not over after {waited:.1f} s, and goes on{serves}"
        super().__init__(f"guard {guard!r}{what}", retry_after=retry_after)
        self.guard = guard
        self.waited = waited
        self.current = current


class ModelTooLarge(ModelGuardError, RuntimeError):
    """One model alone is larger than the pool's whole budget.

    Attributes:
        key: ``repr`` of the model's key.
        model_bytes: The model's size.
        max_memory: The pool's budget in bytes.
    """

    def __init__(self, key: object, *, model_bytes: int, max_memory: int) -> None:
        super().__init__(
            f"model {shortened(key)} takes {model_bytes / 1e6:.0f} MB and the pool's budget is "
            f"{max_memory / 1e6:.0f} MB; raise max_memory or serve this model from a guard of its own"
        )
        self.key = shortened(key)
        self.model_bytes = model_bytes
        self.max_memory = max_memory


class UnhashableKey(ModelGuardError, TypeError):
    """A pool key that cannot be hashed, or compared.

    Attributes:
        key: ``repr`` of the key.
    """

    def __init__(self, key: object, error: Exception | None = None) -> None:
        other = error is not None and "unhashable" not in text_of(error)
        why = f"cannot be hashed and compared ({told(error)})" if error and other else "cannot be hashed"
        super().__init__(
            f"pool key {shortened(key)} of type {type(key).__name__} {why}; use a string, a number or a tuple"
        )
        self.key = shortened(key)


class EscapedResult(ModelGuardError, RuntimeError):
    """A result still points into memory that is freed when the call ends.

    Attributes:
        function: The function that returned it.
        path: The place in the result, such as ``result[0].ents``.
        kind: The type of the object there.
    """

    def __init__(self, function: str, *, path: str, kind: str) -> None:
        super().__init__(
            f"{function}() returned a {kind} at {path}, which points into a memory zone that is closed after the call; "
            "return plain values (strings, numbers, lists of them) instead"
        )
        self.function = function
        self.path = path
        self.kind = kind


class PolicyNeverFires(ModelGuardWarning):
    """A policy that can never become due."""


# Errors of batched functions and deadlines.


class QueueFull(Overloaded):
    """The queue has reached its limit, so the request was rejected: immediately, or when another one took its place.

    Attributes:
        function: The batched function's name.
        queued: The number of requests in the queue.
        displaced: Whether it was in the queue, and a request whose turn is earlier took its place.
    """

    def __init__(self, function: str, *, queued: int, retry_after: float, displaced: bool = False) -> None:
        why = ", and one whose turn is earlier took the place of this one" if displaced else ""
        super().__init__(f"{function}(): the queue is full, with {queued} requests{why}", retry_after=retry_after)
        self.function = function
        self.queued = queued
        self.displaced = displaced


class QuotaExceeded(Overloaded):
    """As many requests with this key wait as its quota allows; a web service answers 429.

    Attributes:
        function: The batched function's name.
        key: ``repr`` of the key, shortened to at most 200 characters.
        queued: How many of its requests wait.
        quota: How many may.
    """

    def __init__(self, function: str, key: object, *, queued: int, quota: int, retry_after: float) -> None:
        self.key = shortened(key)
        super().__init__(
            f"{function}(): {queued} requests with the key {self.key} wait, and the quota of a key is {quota}",
            retry_after=retry_after,
        )
        self.function = function
        self.queued = queued
        self.quota = quota


class DeadlineUnreachable(Overloaded):
    """At the measured rate the answer would come after the deadline, so the request was rejected immediately.

    Attributes:
        function: The batched function's name.
        estimate: Seconds that the answer would have taken.
        left: Seconds that were left until the deadline.
    """

    def __init__(self, function: str, *, estimate: float, left: float, retry_after: float) -> None:
        super().__init__(
            f"{function}(): the answer would take {estimate:.3f} s, and the deadline is in {left:.3f} s",
            retry_after=retry_after,
        )
        self.function = function
        self.estimate = estimate
        self.left = left


class CircuitOpen(Overloaded):
    """The model has failed several times in a row, so it gets no requests for a while.

    Attributes:
        function: The function's name.
        failures: How many runs have failed in a row: batches, or calls of an isolated function.
    """

    def __init__(self, function: str, *, failures: int, retry_after: float) -> None:
        super().__init__(
            f"{function}(): {failures} runs have failed in a row; next try in {retry_after:.1f} s",
            retry_after=retry_after,
        )
        self.function = function
        self.failures = failures


class DeadlineExceeded(ModelGuardError, TimeoutError):
    """The request was accepted, but its deadline passed in the queue or during the batch; a web service answers 504.

    Attributes:
        function: The function's name.
        waited: Seconds since the request arrived.
    """

    def __init__(self, function: str, *, waited: float, why: str = "no answer within the deadline") -> None:
        super().__init__(f"{function}(): {why}; {waited:.3f} s have passed")
        self.function = function
        self.waited = waited


class CallerGone(ModelGuardError, RuntimeError):
    """The request was dropped because its caller no longer waits, for example after a client has disconnected.

    Attributes:
        function: The batched function's name.
    """

    def __init__(self, function: str) -> None:
        super().__init__(f"{function}(): the caller no longer waits, so the request was dropped")
        self.function = function


class ConsumerTooSlow(ModelGuardError, RuntimeError):
    """A stream's consumer took its parts so slowly that others had to wait for it, so it gets no more of them.

    Attributes:
        function: The batched function's name.
    """

    def __init__(self, function: str) -> None:
        super().__init__(
            f"{function}(): the consumer kept others waiting, because it did not take its parts; the rest was dropped. "
            "buffer=Buffer(parts=..., slow_after=...) allows more"
        )
        self.function = function


class ItemRefused(ModelGuardError, ValueError):
    """An item that cannot be put into a batch. It was not queued, and other items are not affected.

    Attributes:
        function: The batched function's name.
        why: The reason.
    """

    def __init__(self, function: str, *, why: str) -> None:
        super().__init__(f"{function}(): {why}")
        self.function = function
        self.why = why


class ItemTooHeavy(ItemRefused):
    """An item that alone weighs more than a batch may, or more items than a queue holds; a web service answers 413.

    Attributes:
        weight: The item's weight, or the number of items.
        max_weight: The largest weight of a batch, or ``max_queue``.
    """

    def __init__(self, function: str, *, weight: float, max_weight: float, why: str | None = None) -> None:
        super().__init__(function, why=why or f"the item weighs {weight:g}, and a whole batch may weigh {max_weight:g}")
        self.weight = weight
        self.max_weight = max_weight


class BatchFailed(ModelGuardError, RuntimeError):
    """A whole batch failed, and no single item is known to be the cause. The original error is the ``__cause__``.

    Attributes:
        function: The batched function's name.
        size: How many items the batch had.
        reason: The failure in one line.
    """

    def __init__(self, function: str, reason: str, *, size: int) -> None:
        super().__init__(f"{function}() failed on a batch of {size}: {reason}")
        self.function = function
        self.size = size
        self.reason = reason


class WrongResults(BatchFailed, TypeError):
    """The batch function did not return one result for each item, in the order of the items."""


# Errors of published weights and of forks.


class WeightsRefused(ModelGuardError, RuntimeError):
    """Published weights that must not be used: they are truncated, changed, another user's, or would not be shared.

    Attributes:
        path: The file or folder.
        why: The reason.
        fix: What to do about it.
    """

    def __init__(self, path: object, *, why: str, fix: str) -> None:
        super().__init__(f"weights {str(path)!r} are refused: {why}. {fix}")
        self.path = str(path)
        self.why = why
        self.fix = fix


class WeightsMissing(WeightsRefused, FileNotFoundError):
    """Nothing has been published at this path."""


class WeightsMismatch(WeightsRefused, ValueError):
    """The weights do not fit the model that ``build`` makes."""


class PublishFailed(ModelGuardError, OSError):
    """Weights could not be published. What was published before is unchanged, and nothing is left half written.

    Attributes:
        path: Where they were to be published.
        why: The reason.
        fix: What to do about it.
    """

    def __init__(self, path: object, *, why: str, fix: str) -> None:
        super().__init__(f"weights cannot be published at {str(path)!r}: {why}. {fix}")
        self.path = str(path)
        self.why = why
        self.fix = fix


class ForkUnsafe(ModelGuardError, RuntimeError):
    """Forking this process would give workers that hang or fail. Nothing was changed; the process itself can serve.

    Attributes:
        hazards: What was found, as text, worst first.
    """

    def __init__(self, hazards: Iterable[object]) -> None:
        self.hazards = tuple(map(str, hazards))
        super().__init__("this process must not be forked:\n" + "\n".join(self.hazards))


class ForkOrder(ModelGuardError, RuntimeError):
    """``prefork.prepare`` or ``prefork.in_child`` was called in the wrong process, or at the wrong time.

    Attributes:
        call: ``"prepare"`` or ``"in_child"``.
        why: What is wrong.
        fix: What to do instead.
    """

    def __init__(self, call: str, *, why: str, fix: str) -> None:
        super().__init__(f"prefork.{call}() cannot be called here: {why}. {fix}")
        self.call = call
        self.why = why
        self.fix = fix


class ForkHazard(ModelGuardWarning):
    """Something in this process may not survive a fork."""


#: Every class above that can be raised or warned of.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll] - each is imported by its name
    name for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, Exception)
]
