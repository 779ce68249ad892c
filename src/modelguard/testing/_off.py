"""``modelguard_off``: decorated functions run plain, in the caller's thread, without policies, queues or reloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from modelguard.lifecycle import _inline as guards
from modelguard.serving import _inline as batches

__all__ = ["off"]


@contextmanager
def off() -> Iterator[None]:
    """Run all guarded and batched functions of this process plain inside the block.

    A guarded function gets a model that was loaded by a plain call of the loader, at the first use in the block, whose
    own error is raised; there is no warm-up, no validation and no policy. A batched function is called with a list of
    one item, and what it raises or returns for that item goes to the caller. At the end, models that were loaded inline
    are dropped, so that the next use loads in the normal way.
    """
    with guards.inline(), batches.inline():
        yield
