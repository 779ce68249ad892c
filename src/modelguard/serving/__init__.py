"""Batches, bounds and deadlines: one model, and no request that waits for ever."""

from __future__ import annotations

from modelguard.serving.breaker import Breaker
from modelguard.serving.doors import Batched
from modelguard.serving.making import batched
from modelguard.serving.scope import deadline, left
from modelguard.serving.status import BatchStatus, Quantiles

__all__ = ["BatchStatus", "Batched", "Breaker", "Quantiles", "batched", "deadline", "left"]
