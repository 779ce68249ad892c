"""The base classes of errors and warnings, and the errors that every part of modelguard raises."""

from __future__ import annotations

import reprlib
from typing import Any

__all__ = [
    "CannotRun",
    "GuardClosed",
    "InvalidOption",
    "ModelGuardError",
    "ModelGuardWarning",
    "NoMemoryLimit",
    "NotSupported",
    "Overloaded",
    "WouldDeadlock",
    "printable",
    "shortened",
]


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
