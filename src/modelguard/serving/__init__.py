"""Batches with bounds and deadlines in front of a model: no request waits for ever, and none is computed for nobody."""

from __future__ import annotations

from modelguard.serving._batch_options import Buffer, Fair, Weight
from modelguard.serving.batched import Batched, batched
from modelguard.serving.breaker import Breaker
from modelguard.serving.deadlines import caller, deadline, left
from modelguard.serving.status import BatchStatus, Limits, Quantiles
from modelguard.serving.streams import BatchedStream, Stream

__all__ = [
    "BatchStatus",
    "Batched",
    "BatchedStream",
    "Breaker",
    "Buffer",
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
for _of_modelguard in (BatchStatus, Batched, Breaker, Buffer, Fair, Weight, batched, deadline):
    _of_modelguard.__module__ = "modelguard"
for _of_serving in (BatchedStream, Limits, Quantiles, Stream, caller, left):
    _of_serving.__module__ = "modelguard.serving"
