"""Batches with bounds and deadlines in front of a model: no request waits for ever, and none is computed for nobody."""

from __future__ import annotations

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

# Tracebacks, repr() and the documentation show where users import these from, which is not where they are written.
for _of_modelguard in (AutoSize, BatchStatus, Batched, Breaker, Buffer, Execution, Fair, Weight, batched, deadline):
    _of_modelguard.__module__ = "modelguard"
for _of_serving in (BatchedStream, Limits, Quantiles, Stream, caller, left):
    _of_serving.__module__ = "modelguard.serving"
