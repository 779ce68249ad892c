"""Leases of a pool for coroutines: one thread takes one, and those who wait for the same model wait for that thread."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from modelguard.errors import LoadFailed, ModelGuardError, Overloaded
from modelguard.lifecycle import _in_thread
from modelguard.lifecycle._leases import Lease

__all__ = ["Fetches", "afresh"]

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


class Fetches(Generic[K, M]):
    """The threads that take leases of one pool for coroutines.

    Args:
        pool: The pool's name.
    """

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._shared: dict[K, Future[Lease[M]]] = {}

    def begin(
        self, key: K, work: Callable[[], Lease[M]], *, start_thread: _in_thread.StartThread, alone: bool = False
    ) -> tuple[Future[Lease[M]], bool]:
        """Have a thread take a lease, unless one takes a lease for the same key. Does not block.

        Args:
            key: Whose model.
            work: Takes the lease.
            start_thread: Starts a thread.
            alone: The caller has a thread of its own, in its own context. One inside a lease of this pool must not wait
                for room behind others, which may wait for the end of its lease.

        Returns:
            What gets the lease, and whether the lease is the caller's own, who must end it.
        """
        future: Future[Lease[M]] = _in_thread.promise()
        if not alone:
            shared = self._shared.setdefault(key, future)
            if shared is not future:
                return shared, False
            future.add_done_callback(lambda _: self._shared.pop(key, None))
        return _in_thread.start(work, f"modelguard-{self._pool}", start_thread, future), True

    async def take(
        self,
        key: K,
        work: Callable[[], Lease[M]],
        wait: float,
        *,
        start_thread: _in_thread.StartThread,
        alone: bool,
    ) -> Lease[M] | None:
        """:meth:`begin`, and wait for the lease; None if it is another caller's, or ``wait`` seconds have passed."""
        future, own = self.begin(key, work, start_thread=start_thread, alone=alone)
        if own:
            return await _own(future)
        await _wait_for(future, wait)
        return None


async def _wait_for(fetch: Future[Lease[M]], wait: float) -> None:
    """Wait until another caller has its lease. Its error is this caller's too, unless only its time is over."""
    waiting = _on_this_loop(fetch)
    await asyncio.wait([waiting], timeout=wait)
    error = waiting.exception() if waiting.done() else None
    if isinstance(error, ModelGuardError) and not isinstance(error, Overloaded):
        raise afresh(error) from error.__cause__
    if error is not None and not isinstance(error, Overloaded):
        raise error


async def _own(fetch: Future[Lease[M]]) -> Lease[M]:
    """Await the lease that a thread takes; if the caller is cancelled meanwhile, end it."""
    waiting = _on_this_loop(fetch)
    try:
        await asyncio.wait([waiting])
    except asyncio.CancelledError:
        fetch.add_done_callback(_end_unwanted)
        raise
    return waiting.result()


def _on_this_loop(fetch: Future[Lease[M]]) -> asyncio.Future[Lease[M]]:
    """A future of this loop, to be waited for by ``asyncio.wait``, which leaves it alone if its caller is cancelled.

    ``asyncio.shield`` does so too, but from CPython 3.14 on it logs an error that comes after that.
    """
    waiting = asyncio.wrap_future(fetch)
    # Its waiter may be gone by then, and asyncio logs an error that nobody has looked at.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    return waiting


def _end_unwanted(fetch: Future[Lease[M]]) -> None:
    if fetch.exception() is None:
        fetch.result().end(failed=False)


def afresh(error: Exception) -> Exception:
    """The same error for another caller: an exception object must not be raised in two threads."""
    again = error.again(error.retry_after, error.current) if isinstance(error, LoadFailed) else copy.copy(error)
    again.__cause__ = error.__cause__
    return again
