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
    │   ├── LoadTimeout (TimeoutError)    the loader took longer than load_timeout
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
    │   └── ItemTooHeavy                  an item that weighs more than a whole batch may
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

from modelguard import _public
from modelguard.errors._base import (
    CannotRun,
    GuardClosed,
    InvalidOption,
    ModelGuardError,
    ModelGuardWarning,
    NoMemoryLimit,
    NotSupported,
    Overloaded,
    WouldDeadlock,
)
from modelguard.errors._isolation import RemoteError, TransferRefused, WorkerCrashed
from modelguard.errors._lifecycle import (
    CudaAfterFork,
    EscapedResult,
    LoadFailed,
    LoadTimeout,
    ModelRejected,
    ModelTooLarge,
    NoPreviousModel,
    PolicyNeverFires,
    Reloading,
    UnhashableKey,
)
from modelguard.errors._serving import (
    BatchFailed,
    CallerGone,
    CircuitOpen,
    ConsumerTooSlow,
    DeadlineExceeded,
    DeadlineUnreachable,
    ItemRefused,
    ItemTooHeavy,
    QueueFull,
    QuotaExceeded,
    WrongResults,
)
from modelguard.errors._sharing import (
    ForkHazard,
    ForkOrder,
    ForkUnsafe,
    PublishFailed,
    WeightsMismatch,
    WeightsMissing,
    WeightsRefused,
)

__all__ = [
    "BatchFailed",
    "CallerGone",
    "CannotRun",
    "CircuitOpen",
    "ConsumerTooSlow",
    "CudaAfterFork",
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
    "NoPreviousModel",
    "NotSupported",
    "Overloaded",
    "PolicyNeverFires",
    "PublishFailed",
    "QueueFull",
    "QuotaExceeded",
    "Reloading",
    "RemoteError",
    "TransferRefused",
    "UnhashableKey",
    "WeightsMismatch",
    "WeightsMissing",
    "WeightsRefused",
    "WorkerCrashed",
    "WouldDeadlock",
    "WrongResults",
]

_public.set_module(globals())
