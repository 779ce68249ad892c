"""Errors of guards, pools and their models."""

from __future__ import annotations

from modelguard.errors._base import ModelGuardError, ModelGuardWarning, Overloaded, printable, shortened

__all__ = [
    "CudaAfterFork",
    "EscapedResult",
    "LoadFailed",
    "LoadTimeout",
    "ModelRejected",
    "ModelTooLarge",
    "NoPreviousModel",
    "PolicyNeverFires",
    "Reloading",
    "UnhashableKey",
]


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
    """The loader took longer than ``load_timeout``, and was abandoned."""


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

    def __init__(self, guard: str, *, why: str, fix: str) -> None:
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
    """A pool key that cannot be hashed.

    Attributes:
        key: ``repr`` of the key.
    """

    def __init__(self, key: object) -> None:
        super().__init__(
            f"pool key {shortened(key)} of type {type(key).__name__} cannot be hashed; "
            "use a string, a number or a tuple"
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
