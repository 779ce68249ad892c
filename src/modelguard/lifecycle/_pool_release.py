"""The release of a model that its pool has evicted."""

from __future__ import annotations

from typing import Any

from modelguard import telemetry
from modelguard.lifecycle import _deadlocks, _in_thread
from modelguard.lifecycle._pool_lru import PooledModel

__all__ = ["release"]


def release(model: PooledModel[Any], pool: str, start_thread: _in_thread.StartThread) -> None:
    """Release it; on an event loop in another thread, since an ``unload`` hook may need a loop. Blocks."""
    engine = model.engine
    if engine is None:
        return
    current = engine.state.current
    if model.idle is not None and current is not None:
        event = telemetry.UnloadStarted(guard=engine.name, generation=current.number, reasons=(model.idle,))
        telemetry.emit(event)
    if _deadlocks.on_event_loop():
        _in_thread.start(engine.shut_down, f"modelguard-release-{pool}", start_thread).result()
    else:
        engine.shut_down()
