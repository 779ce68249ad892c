"""Every exception and warning of modelguard.

::

    ModelGuardError
    ├── InvalidOption (ValueError)        a bad argument, found where it is written
    │   ├── CannotRun                     a command that was not found, or cannot be executed
    │   └── NoMemoryLimit                 a percentage such as "80%" without a limit to take it of
    ├── NotSupported (RuntimeError)       this platform or interpreter cannot do it
    ├── GuardClosed (RuntimeError)        used after close()
    ├── WouldDeadlock (RuntimeError)      waiting here would wait for itself
    ├── LoadFailed (RuntimeError)         no model could be made
    │   ├── LoadTimeout (TimeoutError)    the loader ran past load_timeout
    │   └── ModelRejected                 the loader gave None, or validate refused the model
    ├── Overloaded (RuntimeError)         not now: try again later
    │   ├── Reloading (TimeoutError)      no generation serves while the model is replaced
    │   ├── QueueFull                     as many requests wait as may
    │   ├── DeadlineUnreachable           by the measured rate the answer would come too late
    │   └── CircuitOpen                   the model has failed several times in a row
    ├── DeadlineExceeded (TimeoutError)   it was let in, and its time ran out
    ├── CallerGone (RuntimeError)         nobody waits for the answer any more
    ├── ItemRefused (ValueError)          one item that cannot be put into a batch
    │   └── ItemTooHeavy                  it alone weighs more than a batch may
    ├── BatchFailed (RuntimeError)        a whole batch failed, through nobody's item in particular
    │   └── WrongResults (TypeError)      the batch function did not return one result for each item
    ├── ModelTooLarge (RuntimeError)      one model alone exceeds the pool's budget
    ├── UnhashableKey (TypeError)         a pool key that cannot be hashed
    ├── EscapedResult (RuntimeError)      a result still points into memory that is about to go
    ├── WeightsRefused (RuntimeError)     published weights that must not be used
    │   ├── WeightsMissing (FileNotFoundError)  nothing has been published there
    │   └── WeightsMismatch (ValueError)  they do not fit the model that build() makes
    ├── PublishFailed (OSError)           the disk, the permissions or another publisher prevented it
    ├── ForkUnsafe (RuntimeError)         forking this process would give workers that hang or fail
    └── ForkOrder (RuntimeError)          prepare() or in_child() in the wrong process, or at the wrong time

    ModelGuardWarning (UserWarning)
    ├── PolicyNeverFires                  a policy that cannot become due as it is written
    └── ForkHazard                        something that may not survive a fork

Every error keeps its fields when it is pickled, so it crosses process borders whole.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

__all__ = [
    "BatchFailed",
    "CallerGone",
    "CannotRun",
    "CircuitOpen",
    "DeadlineExceeded",
    "DeadlineUnreachable",
    "EscapedResult",
    "ForkHazard",
    "ForkOrder",
    "ForkUnsafe",
    "GuardClosed",
    "InvalidOption",
    "ItemRefused",
    "ItemTooHeavy",
    "LoadFailed",
    "LoadTimeout",
    "ModelGuardError",
    "ModelGuardWarning",
    "ModelRejected",
    "ModelTooLarge",
    "NoMemoryLimit",
    "NotSupported",
    "Overloaded",
    "PolicyNeverFires",
    "PublishFailed",
    "QueueFull",
    "Reloading",
    "UnhashableKey",
    "WeightsMismatch",
    "WeightsMissing",
    "WeightsRefused",
    "WouldDeadlock",
    "WrongResults",
]


#: The longest ``repr`` of a value in a message, in characters.
_LONGEST = 200

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlong = 60
_repr.maxlevel = 2


def _shortened(value: object) -> str:
    """The ``repr`` of a value, cut to a length that fits a log line: the value may be a whole model."""
    try:
        text = _repr.repr(value)
    except ValueError:  # int has a limit of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _rebuild(cls: type[ModelGuardError], args: tuple[Any, ...], fields: dict[str, Any]) -> ModelGuardError:
    # Leaves that are a TimeoutError too have OSError's layout, and only its constructor makes that.
    error = (OSError if issubclass(cls, OSError) else Exception).__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class ModelGuardError(Exception):
    """Base of every error that modelguard raises on its own account."""

    # The constructors of the leaves take keywords and build the message from them, which the
    # default pickling of exceptions (call the class with `args`) cannot undo.
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
        self.value = _shortened(value)
        self.fix = fix
        super().__init__(f"{argument}={self.value}: {why}. {fix}")


class NoMemoryLimit(InvalidOption):
    """A percentage of the memory limit was given, and nothing limits this process."""


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
    """A guard or pool was used after ``close()``.

    Attributes:
        guard: Its name.
    """

    def __init__(self, guard: str) -> None:
        super().__init__(f"guard {guard!r} is closed; make a new one, or close it after its last call")
        self.guard = guard


class WouldDeadlock(ModelGuardError, RuntimeError):
    """The call would wait for something that cannot happen until it returns.

    Attributes:
        guard: The guard's name.
        fix: What to do instead.
    """

    def __init__(self, guard: str, *, why: str, fix: str) -> None:
        super().__init__(f"guard {guard!r}: {why}. {fix}")
        self.guard = guard
        self.fix = fix


class LoadFailed(ModelGuardError, RuntimeError):
    """No model could be made. The loader's own error is the ``__cause__``.

    Attributes:
        guard: The guard's name.
        reason: The failure in one line.
        attempt: How many loads have failed in a row.
        retry_after: Seconds until the next attempt; until then calls fail at once.
    """

    def __init__(self, guard: str, reason: str, *, attempt: int = 1, retry_after: float = 0.0) -> None:
        super().__init__(f"guard {guard!r} has no model: {reason} (attempt {attempt}, next in {retry_after:.1f} s)")
        self.guard = guard
        self.reason = reason
        self.attempt = attempt
        self.retry_after = retry_after

    def again(self, retry_after: float) -> LoadFailed:
        """Make the same error afresh, for another caller: an exception object must not be raised in two threads."""
        return type(self)(self.guard, self.reason, attempt=self.attempt, retry_after=retry_after)


class LoadTimeout(LoadFailed, TimeoutError):
    """The loader ran past ``load_timeout``, and was abandoned."""


class ModelRejected(LoadFailed):
    """The loader returned None, or ``validate`` refused what it returned."""


class Overloaded(ModelGuardError, RuntimeError):
    """There is no room now; a web service answers 503.

    Attributes:
        retry_after: Seconds after which another try makes sense.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Reloading(Overloaded, TimeoutError):
    """The call waited for a model that is being loaded or replaced, and its time ran out.

    Attributes:
        guard: The guard's name.
        waited: Seconds that the call waited.
    """

    def __init__(self, guard: str, *, waited: float, retry_after: float = 1.0) -> None:
        super().__init__(
            f"guard {guard!r} had no model to serve after {waited:.1f} s of waiting", retry_after=retry_after
        )
        self.guard = guard
        self.waited = waited


class QueueFull(Overloaded):
    """As many requests wait as may. Nothing was queued; it was told at once.

    Attributes:
        function: The batched function's name.
        queued: How many waited.
    """

    def __init__(self, function: str, *, queued: int, retry_after: float) -> None:
        super().__init__(f"{function}(): {queued} requests wait already, which is the limit", retry_after=retry_after)
        self.function = function
        self.queued = queued


class DeadlineUnreachable(Overloaded):
    """By the measured rate the answer would come after the deadline. Nothing was queued; it was told at once.

    Attributes:
        function: The batched function's name.
        estimate: Seconds after which the answer would have come.
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
    """The model has failed several times in a row, and is left alone for a while.

    Attributes:
        function: The batched function's name.
        failures: How many batches in a row have failed.
    """

    def __init__(self, function: str, *, failures: int, retry_after: float) -> None:
        super().__init__(
            f"{function}(): {failures} batches in a row have failed; next try in {retry_after:.1f} s",
            retry_after=retry_after,
        )
        self.function = function
        self.failures = failures


class DeadlineExceeded(ModelGuardError, TimeoutError):
    """The request was let in and its time ran out, in the queue or while it was computed; a web service answers 504.

    Attributes:
        function: The batched function's name.
        waited: Seconds from its arrival.
    """

    def __init__(self, function: str, *, waited: float) -> None:
        super().__init__(f"{function}(): no answer within the deadline; {waited:.3f} s have passed")
        self.function = function
        self.waited = waited


class CallerGone(ModelGuardError, RuntimeError):
    """The request was taken out of the queue, or not let in, because nobody waits: its client has hung up, say.

    Attributes:
        function: The batched function's name.
    """

    def __init__(self, function: str) -> None:
        super().__init__(f"{function}(): the caller is gone, so the request was dropped")
        self.function = function


class ItemRefused(ModelGuardError, ValueError):
    """One item that cannot be put into a batch. It was not queued, and harms no other.

    Attributes:
        function: The batched function's name.
        why: The reason.
    """

    def __init__(self, function: str, *, why: str) -> None:
        super().__init__(f"{function}(): {why}")
        self.function = function
        self.why = why


class ItemTooHeavy(ItemRefused):
    """One item alone weighs more than a whole batch may; a web service answers 413.

    Attributes:
        weight: What it weighs.
        max_weight: What a batch may weigh.
    """

    def __init__(self, function: str, *, weight: float, max_weight: float) -> None:
        super().__init__(function, why=f"the item weighs {weight:g}, and a whole batch may weigh {max_weight:g}")
        self.weight = weight
        self.max_weight = max_weight


class BatchFailed(ModelGuardError, RuntimeError):
    """A whole batch failed, and the failure could not be pinned on one item. What was raised is the ``__cause__``.

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


class ModelTooLarge(ModelGuardError, RuntimeError):
    """One model alone is larger than the pool's whole budget.

    Attributes:
        key: ``repr`` of the model's key.
        model_bytes: The model's size.
        max_memory: The pool's budget in bytes.
    """

    def __init__(self, key: object, *, model_bytes: int, max_memory: int) -> None:
        super().__init__(
            f"model {_shortened(key)} takes {model_bytes / 1e6:.0f} MB and the pool's budget is "
            f"{max_memory / 1e6:.0f} MB; raise max_memory or serve this model from a guard of its own"
        )
        self.key = _shortened(key)
        self.model_bytes = model_bytes
        self.max_memory = max_memory


class UnhashableKey(ModelGuardError, TypeError):
    """A pool key that cannot be hashed.

    Attributes:
        key: ``repr`` of the key.
    """

    def __init__(self, key: object) -> None:
        super().__init__(
            f"pool key {_shortened(key)} of type {type(key).__name__} cannot be hashed; "
            "use a string, a number or a tuple"
        )
        self.key = _shortened(key)


class EscapedResult(ModelGuardError, RuntimeError):
    """A result still points into memory that is freed when the call ends.

    Attributes:
        function: The function that returned it.
        path: Where in the result it sits, such as ``result[0].ents``.
        kind: The type of what escaped.
    """

    def __init__(self, function: str, *, path: str, kind: str) -> None:
        super().__init__(
            f"{function}() returned a {kind} at {path}, which points into a memory zone that is closed after the call; "
            "return plain values (strings, numbers, lists of them) instead"
        )
        self.function = function
        self.path = path
        self.kind = kind


class WeightsRefused(ModelGuardError, RuntimeError):
    """Published weights that must not be used: truncated, changed, another user's, or not shared as they should be.

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
    """Forking this process would give workers that hang or fail. Nothing was changed; the process can serve by itself.

    Attributes:
        hazards: What was found, as text, the worst first.
    """

    def __init__(self, hazards: Iterable[object]) -> None:
        self.hazards = tuple(map(str, hazards))
        super().__init__("this process must not be forked:\n" + "\n".join(self.hazards))


class ForkOrder(ModelGuardError, RuntimeError):
    """``prefork.prepare`` or ``prefork.in_child`` was called in the wrong process, or at the wrong time.

    Attributes:
        call: Which of the two.
        why: What is wrong with it here.
        fix: What to do instead.
    """

    def __init__(self, call: str, *, why: str, fix: str) -> None:
        super().__init__(f"prefork.{call}() cannot be called here: {why}. {fix}")
        self.call = call
        self.why = why
        self.fix = fix


class ModelGuardWarning(UserWarning):
    """Base of modelguard's warnings."""


class PolicyNeverFires(ModelGuardWarning):
    """A policy that cannot become due as it is written."""


class ForkHazard(ModelGuardWarning):
    """Something in this process may not survive a fork."""
