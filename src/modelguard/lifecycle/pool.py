"""``ModelPool``: many models, one memory budget."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from cachetools import LRUCache

from modelguard import _units
from modelguard.errors import GuardClosed, LoadFailed, ModelTooLarge, Overloaded, UnhashableKey
from modelguard.lifecycle import circles, forking
from modelguard.lifecycle.leases import Lease
from modelguard.lifecycle.pooled import Keyed, PoolLease
from modelguard.lifecycle.shelf import Entry, Queue, Shelf

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard
    from modelguard.lifecycle.runtime import Runtime
    from modelguard.lifecycle.status import PoolStatus

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")

#: Sizes and failures are remembered for so many keys, the latest.
_REMEMBERED = 256
_POLL = 0.02
_JITTER = 0.1


class ModelPool(Generic[K, M]):
    """Models by key, within one memory budget. Made by :func:`pool`; see there for the options."""

    _fork_rank = 0  # its lock is taken before those of its guards

    def __init__(
        self,
        make: Callable[[Any], ModelGuard[M]],
        *,
        name: str,
        max_memory: int,
        max_models: float,
        ttl: float,
        wait_timeout: float,
        runtime: Runtime,
    ) -> None:
        self.name = name
        self._make = make
        self._max_models = max_models
        self._ttl = ttl
        self._wait_timeout = wait_timeout
        self._runtime = runtime
        self._models: Shelf[K, M] = Shelf(max_memory)
        self._sizes: LRUCache[K, int] = LRUCache(_REMEMBERED)
        self._failed: LRUCache[K, ModelGuard[M]] = LRUCache(_REMEMBERED)
        self._closed = False
        self._loads = self._evictions = 0
        self._renew_locks()
        forking.remember(self)

    def _renew_locks(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._queue = Queue(self._runtime.clock)
        self._one_load = threading.Lock()  # sizes are measured, so models are loaded one at a time

    def __repr__(self) -> str:
        status = self.status()
        return f"<ModelPool {self.name!r}: {len(status.models)} models, {_units.format_bytes(status.used)}>"

    def lease(self, key: K, timeout: _units.Duration | None = None) -> PoolLease[M]:
        """Use the model of ``key`` for a block: ``with pool.lease(key) as model:`` or ``async with``.

        Args:
            key: What the loader takes; hashable.
            timeout: How long to wait for room. Default: the pool's ``wait_timeout``.

        Raises:
            UnhashableKey: At once.
            Overloaded: On entry: the models in use leave no room, and the time is over.
            ModelTooLarge, LoadFailed, GuardClosed: On entry.
        """
        try:
            hash(key)
        except TypeError:
            raise UnhashableKey(key) from None
        wait = self._wait_timeout if timeout is None else _units.seconds(timeout, "timeout", zero=True)
        return PoolLease(partial(self._take, key, wait), partial(self._atake, key, wait))

    def __call__(self, *, key: str | Callable[..., K]) -> Keyed[M]:
        """Decorate a function that takes the model as its first parameter, after ``self`` or ``cls`` in a class.

        Args:
            key: Which model a call needs: the name of one of the function's parameters, or a function of the call's
                arguments (without model and ``self``).

        Raises:
            InvalidOption: ``key`` is neither, or the function has no such parameter.
        """
        return Keyed(self.lease, key)

    def status(self) -> PoolStatus[K]:
        """What there is to know of the pool now."""
        from modelguard.lifecycle.status import PoolStatus

        with self._changed:
            loaded = {key: entry for key, entry in self._models.items() if not entry.loading}
            return PoolStatus(
                name=self.name,
                models={key: entry.size for key, entry in loaded.items()},
                in_flight=sum(entry.guard.status().in_flight for entry in loaded.values() if entry.guard),
                used=int(self._models.currsize),
                max_memory=int(self._models.maxsize),
                loads=self._loads,
                evictions=self._evictions,
            )

    def close(self) -> None:
        """Refuse further leases, wait for those under way up to the drain timeout of 30 s, release every model.

        Raises:
            WouldDeadlock: Called inside a lease of this pool, which it would wait for, or on a running event loop
                (use :meth:`aclose`).
        """
        circles.refuse_on_loop(self.name, "close", "aclose")
        with self._changed:
            entries = list(self._models.values())
            for entry in entries:
                if entry.guard is not None:
                    entry.guard._refuse_inside("close")
            self._closed = True
            self._models.clear()
            self._changed.notify_all()
        for entry in entries:
            if entry.guard is not None:
                entry.guard.close()
        self._close_evicted()

    async def aclose(self) -> None:
        """:meth:`close` for a coroutine; the event loop goes on meanwhile."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # Finding a model

    def _take(self, key: K, wait: float) -> Lease[M]:
        """A lease on the model of ``key``, after a load if need be."""
        deadline = time.monotonic() + wait
        while True:
            entry, mine = self._find(key, deadline)
            if mine and not self._load(key, entry, deadline):
                continue  # it turned out larger than the room that was made
            try:
                assert entry.guard is not None  # noqa: S101 - set by _load, before anyone else finds it
                return Lease.take(entry.guard)
            except GuardClosed:
                self._refuse_if_closed()
            finally:
                self._unpin(entry)

    async def _atake(self, key: K, wait: float) -> Lease[M]:
        """The same; what may block is done in a thread."""
        with self._changed:
            entry = self._models.get(key)
            ready = entry is not None and not entry.loading and not self._expired(entry)
        if ready:
            return self._take(key, wait)
        future: Future[Lease[M]] = Future()
        self._runtime.start_thread(
            partial(_run_into, future, partial(self._take, key, wait)), f"modelguard-{self.name}"
        )
        waiting = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio would complain
            future.add_done_callback(_end_unwanted)
            raise

    def _find(self, key: K, deadline: float) -> tuple[Entry[M], bool]:
        """The pinned entry of ``key``, and whether the caller is the one to load it."""
        with self._changed, self._queue.place() as place:
            while True:
                self._refuse_if_closed()
                entry = self._models.touch(key)
                if entry is not None and self._expired(entry) and entry.idle:
                    self._models.evicted.append(self._models.pop(key))
                    entry = None
                if entry is None:
                    self._refuse_if_too_large(key)
                    if (place.first() or self._models.inside()) and self._make_room(key):
                        entry = self._models[key] = Entry(self._estimate(key))
                        entry.pins = 1
                        return entry, True
                elif not entry.loading and (not self._expired(entry) or self._models.inside()):
                    entry.pins += 1
                    return entry, False
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Overloaded(self._why_full(key, entry))
                if entry is None and place.overdue():
                    self._models.send_away()
                # Leases end without telling the pool; looking again now and then is cheaper than their telling it.
                self._changed.wait(min(left, _POLL))
                if entry is not None and entry.failure is not None:
                    raise _afresh(entry.failure)

    def _expired(self, entry: Entry[M]) -> bool:
        return self._runtime.clock() >= entry.expires

    def _refuse_if_too_large(self, key: K) -> None:
        if (need := self._estimate(key)) > (budget := int(self._models.maxsize)):
            raise ModelTooLarge(key, model_bytes=need, max_memory=budget)

    def _make_room(self, key: K) -> bool:
        """Evict what nobody uses until the model of ``key`` fits by what is known of its size."""
        models, need = self._models, self._estimate(key)
        try:
            while models.currsize + need > models.maxsize or len(models) >= self._max_models:
                models.popitem()
        except KeyError:
            return False
        return True

    def _estimate(self, key: K) -> int:
        """The size of this model when it was last loaded; for one never loaded that of the largest known."""
        known = self._sizes.get(key)
        if known is not None:
            return known
        return max((size for size in self._sizes.values() if size <= self._models.maxsize), default=0)

    def _why_full(self, key: K, entry: Entry[M] | None) -> str:
        if entry is not None:
            doing = "loaded" if entry.loading else "replaced"
            return f"pool {self.name!r}: the model of key {key!r} is still being {doing}"
        used, budget = (_units.format_bytes(int(n)) for n in (self._models.currsize, self._models.maxsize))
        in_use = f"{len(self._models)} models with {used} of {budget} are in use"
        return f"pool {self.name!r}: no room for key {key!r}; {in_use}"

    # Loading

    def _load(self, key: K, entry: Entry[M], deadline: float) -> bool:
        """Load the model of a new entry; false if it has to be sent away again for want of room."""
        with self._turn(key, entry, deadline):
            self._close_evicted()  # their memory is needed now
            entry.guard = self._failed.pop(key, None) or self._make(key)
            entry.guard._wait_ready(entry.guard._patience(None))
            return self._admit(key, entry)

    @contextmanager
    def _turn(self, key: K, entry: Entry[M], deadline: float) -> Iterator[None]:
        """Load in the block, after other loads; what goes wrong there is told to all who wait for this one.

        A loader that leases another model of its own pool waits here for itself, and so in vain.
        """
        got = False
        try:
            got = self._one_load.acquire(timeout=max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
            if not got:
                raise Overloaded(  # noqa: TRY301 - told to those who wait, like all that goes wrong here
                    f"pool {self.name!r}: key {key!r} waited in vain for other models to be loaded"
                )
            yield
        except BaseException as error:
            self._drop(key, entry, error)
            raise
        finally:
            if got:
                self._close_evicted()  # before anyone else's load is measured
                self._one_load.release()

    def _admit(self, key: K, entry: Entry[M]) -> bool:
        assert entry.guard is not None  # noqa: S101 - it has just been loaded
        size = entry.guard.status().model_bytes or 0
        budget = int(self._models.maxsize)
        with self._changed:
            self._sizes[key] = size
            if size > budget:
                raise ModelTooLarge(key, model_bytes=size, max_memory=budget)
            if self._closed:
                raise GuardClosed(self.name)
            self._remove(key, entry)  # with the size that was estimated
            entry.size = size
            try:
                self._models[key] = entry  # cachetools evicts what nobody uses until it fits
            except KeyError:
                self._models.evicted.append(entry)
                return False
            entry.loading = False
            entry.expires = self._runtime.clock() + self._ttl * (1 - _JITTER * self._runtime.random())
            self._loads += 1
            self._changed.notify_all()
            return True

    def _drop(self, key: K, entry: Entry[M], error: BaseException) -> None:
        failure = error if isinstance(error, Exception) else None
        with self._changed:
            entry.failure = failure or Overloaded(f"pool {self.name!r}: the load of key {key!r} was interrupted")
            self._remove(key, entry)
            if isinstance(failure, LoadFailed) and entry.guard is not None:
                self._failed[key] = entry.guard  # it knows when the next attempt is due
            elif entry.guard is not None:
                self._models.evicted.append(entry)
            self._changed.notify_all()

    def _remove(self, key: K, entry: Entry[M]) -> None:
        if self._models.get(key) is entry:
            del self._models[key]

    def _unpin(self, entry: Entry[M]) -> None:
        with self._changed:
            entry.pins -= 1
            self._changed.notify_all()

    def _close_evicted(self) -> None:
        with self._changed:
            evicted, self._models.evicted = self._models.evicted, []
            self._evictions += len(evicted)
        for entry in evicted:
            if entry.guard is not None:
                entry.guard.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise GuardClosed(self.name)

    # Fork

    def _before_fork(self) -> None:
        self._changed.acquire()

    def _after_fork_in_parent(self) -> None:
        self._changed.release()

    def _after_fork_in_child(self) -> None:
        self._renew_locks()
        for key, entry in list(self._models.items()):
            entry.pins = 0
            if entry.loading:  # by a thread that does not exist here
                del self._models[key]


def _afresh(error: Exception) -> Exception:
    """The same error for another caller: an exception object must not be raised in two threads."""
    if isinstance(error, LoadFailed):
        return error.again(error.retry_after)
    return copy.copy(error)


def _run_into(future: Future[Lease[M]], work: Callable[[], Lease[M]]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
        future.set_exception(error)


def _end_unwanted(future: Future[Lease[M]]) -> None:
    if future.exception() is None:
        future.result().end(failed=False)
