"""Batches with bounds and deadlines in front of a model: no request waits for ever, and none is computed for nobody."""

from __future__ import annotations

from modelguard import _public
from modelguard.serving._batch_options import AutoSize, Buffer, Execution, Fair, Weight
from modelguard.serving.batched import Batched, BatchedStream, batched
from modelguard.serving.breaker import Breaker
from modelguard.serving.deadlines import caller, deadline, left
from modelguard.serving.status import BatchStatus, Limits, Quantiles
from modelguard.serving.streams import Stream

__all__ = [
    "AutoSize",
    "BatchStatus",
    "Batched",
    "BatchedStream",
    "Breaker",
    "Buffer",
    "Execution",
    "Fair",
    "Limits",
    "Quantiles",
    "Stream",
    "Weight",
    "batched",
    "caller",
    "deadline",
    "left",
]

# Where users import these from is not where they are written.
_TOP = {"AutoSize", "BatchStatus", "Batched", "Breaker", "Buffer", "Execution", "Fair", "Weight", "batched", "deadline"}
_public.set_module(globals() | {"__all__": _TOP}, "modelguard")
_public.set_module(globals() | {"__all__": set(__all__) - _TOP})
