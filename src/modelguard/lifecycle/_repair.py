"""After a call that failed because of the GPU: free what it left there, and give obscure errors a name."""

from __future__ import annotations

from typing import Any

from modelguard import _units, telemetry
from modelguard.environment._gpu import Gpu, free_after, use_of
from modelguard.errors import CudaAfterFork
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._generation import Generation
from modelguard.telemetry.reasons import Reason

#: Of the memory of all GPUs together: so much more than after the load, in tensors, calls for a reload.
_STAYS = 0.1


def named(guard: str, gpu: Gpu, error: BaseException) -> BaseException:
    """The error that says what is wrong, if torch's own does not."""
    if not gpu.is_after_fork(error):
        return error
    better = CudaAfterFork(guard)
    better.__cause__ = error
    return better


def free(guard: GuardContext[Any], generation: Generation[Any], error: BaseException) -> tuple[Reason, ...]:
    """Free the GPU memory that a call which ran out of it has left, and report it.

    The traceback keeps its lines, and loses the local variables of the calls that have ended.

    Returns:
        Why the model must be replaced; empty if it need not.
    """
    gpu = guard.runtime.gpu
    before = use_of(gpu)
    free_after(gpu, error)
    after = use_of(gpu)
    telemetry.emit(
        telemetry.GpuOutOfMemory(
            guard=guard.name,
            generation=generation.number,
            reserved_before=None if before is None else before.reserved,
            reserved_after=None if after is None else after.reserved,
            allocated=None if after is None else after.allocated,
            retry=guard.options.retry,
        )
    )
    # Other calls on it have tensors of their own, which say nothing.
    if after is None or generation.gpu_allocated is None or len(generation.leases) > 1:
        return ()
    left = after.allocated - generation.gpu_allocated
    if left <= _STAYS * sum(one.total for one in gpu.devices()):
        return ()
    return (Reason("gpu_out_of_memory", f"a call ran out of GPU memory and left {_units.format_bytes(left)} there"),)
