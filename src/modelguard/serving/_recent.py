"""The last batches, as the status shows them."""

from __future__ import annotations

from collections import deque
from typing import TypedDict

from modelguard.serving._batches import Batch
from modelguard.serving.status import Quantiles

__all__ = ["Recent", "RecentBatches"]

#: The quantiles are taken over this many batches.
_REMEMBERED = 512


class RecentBatches(TypedDict):
    """The fields of a status that come from the last batches."""

    batch_size: Quantiles
    wait: Quantiles
    run: Quantiles
    padding: float


class Recent:
    """Size, longest wait, run time, weight and padding of the last batches."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, float, float, float, float]] = deque(maxlen=_REMEMBERED)

    def note(self, batch: Batch, seconds: float) -> None:
        """Note a batch whose run took so many seconds."""
        waited = batch.started - batch.oldest
        self._batches.append((len(batch.requests), waited, seconds, batch.weight, batch.padding))

    def summary(self) -> RecentBatches:
        """What the status shows of them."""
        sizes, waits, runs, weights, paddings = zip(*self._batches, strict=True) if self._batches else ((),) * 5
        weight = sum(weights)
        return {
            "batch_size": Quantiles.of(sizes),
            "wait": Quantiles.of(waits),
            "run": Quantiles.of(runs),
            "padding": sum(paddings) / weight if weight > 0 else 0.0,
        }
