"""Errors of isolated functions."""

from __future__ import annotations

from typing import Literal

from modelguard.errors._base import ModelGuardError

__all__ = ["RemoteError", "TransferRefused", "WorkerCrashed"]

#: What could not be sent between the caller's process and a worker.
Transferred = Literal["arguments", "result"]


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

    def __init__(self, function: str, *, what: Transferred, why: str) -> None:
        super().__init__(f"{function}(): its {what} cannot be sent between processes: {why}")
        self.function = function
        self.what = what
        self.why = why


class RemoteError(ModelGuardError, RuntimeError):
    """The function raised an error that cannot reach its caller; this one has its type's name and its text.

    It cannot be pickled, or is larger than ``max_transfer``. Or it would end an iteration, a generator or a task of the
    caller, as ``StopIteration``, ``GeneratorExit`` and ``CancelledError`` do; then it is the ``__cause__``.

    Attributes:
        function: The isolated function's name.
        kind: Module and name of the error's type.
    """

    def __init__(self, function: str, *, kind: str, text: str) -> None:
        super().__init__(f"{function}() raised {kind}: {text}")
        self.function = function
        self.kind = kind
