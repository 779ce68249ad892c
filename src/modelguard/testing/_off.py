"""``modelguard_off``: decorated functions run directly in the caller's thread, without policies, queues or reloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modelguard.lifecycle import _inline as guards
from modelguard.serving import _inline as batches

__all__ = ["off"]


@contextmanager
def off() -> Iterator[None]:
    """Run all guarded and batched functions of this process directly, without their machinery, inside the block.

    For a guarded function, the loader is simply called at the first use in the block, and its own errors are raised;
    there is no warm-up, no validation and no policy. A batched function is called with a list of one item, and the
    caller gets its result or error for that item. At the end, models that were loaded in the block are dropped, so that
    the next use loads in the normal way.
    """
    with guards.inline(), batches.inline():
        yield
