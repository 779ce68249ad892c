"""``_registry``: which batched functions a readiness probe, a fork and the end of the process find."""

from __future__ import annotations

import gc

import pytest

from modelguard import batched
from modelguard.serving import _batcher


@pytest.mark.timeout(20)
def test_the_garbage_collector_may_end_a_closed_function_while_a_probe_asks() -> None:
    """The probe never waits for itself: a finalizer may run at any point of it, and drop the last request."""
    f = batched(max_size=1)(lambda items: items)
    batcher = f._batcher

    class Caller:
        """One that is gone with its call; in a cycle, so that the garbage collector finds it. Others follow."""

        def __init__(self, more: int) -> None:
            self.itself = self
            self.more = more

        def __del__(self) -> None:
            _batcher.batchers.discard(batcher)  # as the batcher does when its last request is dropped
            if self.more:
                Caller(self.more - 1)

    thresholds = gc.get_threshold()
    gc.disable()
    Caller(100)
    gc.set_threshold(1)
    gc.enable()
    try:
        tuple(_batcher.batchers)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert batcher not in tuple(_batcher.batchers)


def test_a_function_that_nobody_refers_to_is_not_found() -> None:
    """It is not kept alive, and no probe waits for it."""
    f = batched(max_size=1, name="forgotten")(lambda items: items)
    assert "forgotten" in [one.name for one in _batcher.batchers]
    del f
    gc.collect()
    assert "forgotten" not in [one.name for one in _batcher.batchers]
