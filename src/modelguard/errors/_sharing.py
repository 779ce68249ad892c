"""Errors of published weights and of forks."""

from __future__ import annotations

from collections.abc import Iterable

from modelguard.errors._base import ModelGuardError, ModelGuardWarning

__all__ = [
    "ForkHazard",
    "ForkOrder",
    "ForkUnsafe",
    "PublishFailed",
    "WeightsMismatch",
    "WeightsMissing",
    "WeightsRefused",
]


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
