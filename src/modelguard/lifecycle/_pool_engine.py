"""The engine of one pool: finds models by key, loads them one at a time, and evicts them to make room."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cachetools import LRUCache

from modelguard import _units
from modelguard._weak_registry import WeakRegistry
from modelguard.errors import GuardClosed, LoadFailed, ModelTooLarge, Overloaded
from modelguard.lifecycle import _deadlocks, _fork, _in_thread, _ticker
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._leases import Lease
from modelguard.lifecycle._options import PoolOptions
from modelguard.lifecycle._pool_fetches import Fetches, afresh
from modelguard.lifecycle._pool_idle import IdleKeys
from modelguard.lifecycle._pool_lru import PooledModel, PoolLRU, RoomQueue
from modelguard.lifecycle._pool_release import release
from modelguard.lifecycle._pool_sources import REMEMBERED, PoolSources
from modelguard.lifecycle._waiting import Timeout

if TYPE_CHECKING:
    from modelguard.lifecycle._state import GuardState
    from modelguard.lifecycle.runtime import Runtime
    from modelguard.lifecycle.status import PoolStatus

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")

#: Seconds that the end of the pool waits for a release under way.
_END = 30.0

_POLL = 0.02
_JITTER = 0.1


_pool_engines: WeakRegistry[PoolEngine[Any, Any]] = WeakRegistry()


def pool_engines() -> tuple[PoolEngine[Any, Any], ...]:
    """The engines of this process's pools."""
    return tuple(_pool_engines)


class PoolEngine(Generic[K, M]):
    """Runs one pool.

    Args:
        make: Makes the engine of one key's model, with the runtime that it is to use.
        options: The pool's bounds.
        runtime: Clock, chance and threads.
    """

    fork_rank = 0  # its lock is taken before those of its models' engines

    def __init__(self, make: Callable[[Any, Runtime], Engine[M]], options: PoolOptions, runtime: Runtime) -> None:
        self.options = options
        self._make = make
        self.runtime = runtime
        self._models: PoolLRU[K, M] = PoolLRU(options.max_memory)
        self._sizes: LRUCache[K, int] = LRUCache(REMEMBERED)
        self._failed: LRUCache[K, Engine[M]] = LRUCache(REMEMBERED)
        self._sources: PoolSources[K] = PoolSources(options.name, options.reload_on)
        self._idle: IdleKeys[K, M] = IdleKeys(options.idle)
        self._closed = False
        self._loads = self._evictions = 0
        self._renew_locks()
        _pool_engines.add(self)
        _fork.register(self)

    def _renew_locks(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._queue = RoomQueue(self.runtime.clock)
        self._one_load = threading.Lock()  # sizes are measured, so models are loaded one at a time
        self._fetches: Fetches[K, M] = Fetches(self.name)
        self._releasing: Future[None] | None = None

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.options.name

    def status(self) -> PoolStatus[K]:
        """The pool's figures at this moment."""
        from modelguard.lifecycle.status import PoolStatus

        with self._changed:
            loaded = {key: model for key, model in self._models.items() if not model.loading}
            return PoolStatus(
                name=self.name,
                models={key: model.size for key, model in loaded.items()},
                in_flight=sum(model.engine.state.in_flight for model in loaded.values() if model.engine),
                used=int(self._models.currsize),
                max_memory=int(self._models.maxsize),
                loads=self._loads,
                evictions=self._evictions,
                unloads=self._idle.unloads,
                idle=self._idle.keys,
                versions={
                    key: version
                    for key, model in loaded.items()
                    if model.engine and (version := model.engine.state.version) is not None
                },
            )

    def reopen(self) -> None:
        """Lend models again after :meth:`close`."""
        with self._changed:
            self._closed = False

    def close(self, timeout: Timeout | None = None) -> None:
        """Refuse further leases, wait for those under way, and release every model."""
        _deadlocks.raise_on_event_loop(self.name, "close", "await pool.aclose()")
        _ticker.TICKER.remove(self)
        with self._changed:
            models = list(self._models.values())
            for model in models:
                if model.engine is not None:
                    model.engine.raise_inside_call("close")
            self._closed = True
            self._models.clear()
            self._idle.clear()
            self._changed.notify_all()
            releasing = self._releasing
        for model in models:
            if model.engine is not None:
                model.engine.close(None if timeout is None else timeout.left())
        self._close_evicted()
        if releasing is not None:
            wait([releasing], _END if timeout is None else timeout.left())

    async def aclose(self, timeout: Timeout | None = None) -> None:
        """:meth:`close` without blocking the event loop."""
        work = partial(self.close, timeout)
        await _in_thread.run(work, f"modelguard-close-{self.name}", self.runtime.start_thread)

    # Finding a model

    def take(self, key: K, wait: float) -> Lease[M]:
        """Take a lease on the model of ``key``, after a load if need be."""
        deadline = time.monotonic() + wait
        while True:
            model, mine = self._find(key, deadline)
            if mine and not self._load(key, model, deadline):
                continue  # it was larger than the room that was made
            try:
                assert model.engine is not None  # noqa: S101 - set by _load, before anyone else finds it
                return Lease.take(model.engine)
            except GuardClosed:
                self._raise_if_closed()
            finally:
                self._unpin(model)

    async def atake(self, key: K, wait: float) -> Lease[M]:
        """:meth:`take` without blocking the event loop."""
        deadline = time.monotonic() + wait
        while (lease := self._take_now(key)) is None:
            _in_thread.require_asyncio("waiting for a model in a coroutine")
            left = deadline - time.monotonic()
            if left <= 0:
                with self._changed:
                    raise Overloaded(self._why_full(key, self._models.get(key)))
            with self._changed:
                nested = self._models.encloses_this_call()
            work = partial(self.take, key, left)
            lease = await self._fetches.take(key, work, left, start_thread=self.runtime.start_thread, alone=nested)
            if lease is not None:
                break
        return lease

    def _take_now(self, key: K) -> Lease[M] | None:
        """Take a lease if the model of ``key`` is loaded; None if that needs a wait."""
        with self._changed:
            self._raise_if_closed()
            model = self._models.touch(key)
            if model is None or not self._lends(model):
                return None
            return None if model.engine is None else Lease.take_now(model.engine)

    def _find(self, key: K, deadline: float) -> tuple[PooledModel[M], bool]:
        """The pinned model of ``key``, and whether the caller is the one to load it."""
        search = _deadlocks.Search(self._states_of_loads)
        with self._changed, self._queue.place() as place:
            while True:
                self._raise_if_closed()
                model = self._models.touch(key)
                if model is not None and self._expired(model) and model.unused:
                    self._models.evicted.append(self._models.pop(key))
                    model = None
                if model is None:
                    self._raise_if_too_large(key)
                    if (place.first() or self._models.encloses_this_call()) and self._make_room(key):
                        model = self._models[key] = PooledModel(self._estimate(key))
                        model.pins = 1
                        return model, True
                elif self._lends(model):
                    model.pins += 1
                    return model, False
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Overloaded(self._why_full(key, model))
                if model is None and place.overdue():
                    self._models.stop_lending_oldest(self.runtime.clock())
                search.look()
                # The end of a lease does not notify the pool: polling is cheaper.
                self._changed.wait(min(left, _POLL))
                if model is None or model.failure is None:
                    continue
                if not isinstance(model.failure, GuardClosed):  # a pool that is open again loads anew
                    raise afresh(model.failure)

    def _lends(self, model: PooledModel[M]) -> bool:
        """Whether the caller may use ``model`` now. While it loads, only its own warm-up may."""
        if model.loading:
            return model.encloses_this_call
        overdue = model.overdue(self.runtime.clock())
        if overdue < 0 or self._models.encloses_this_call():
            return True
        # Bounded, or streams that overlap, as a pool of threads steps them, could keep the old model for ever. The
        # bound is half of the time that others wait: they get the new model, or its room, in the other half.
        return overdue < self.options.wait_timeout / 2 and model.half_used_here()

    def _expired(self, model: PooledModel[M]) -> bool:
        return model.overdue(self.runtime.clock()) >= 0

    def _raise_if_too_large(self, key: K) -> None:
        if (need := self._estimate(key)) > (budget := int(self._models.maxsize)):
            raise ModelTooLarge(key, model_bytes=need, max_memory=budget)

    def _make_room(self, key: K) -> bool:
        """Evict unused models until the model of ``key`` fits by its estimated size; false if it cannot."""
        models, need = self._models, self._estimate(key)
        try:
            while models.currsize + need > models.maxsize or len(models) >= self.options.max_models:
                models.popitem()
        except KeyError:
            return False
        return True

    def _estimate(self, key: K) -> int:
        """The size of this model when it was last loaded; if it never was, that of the largest model known."""
        known = self._sizes.get(key)
        if known is not None:
            return known
        return max((size for size in self._sizes.values() if size <= self._models.maxsize), default=0)

    def _why_full(self, key: K, model: PooledModel[M] | None) -> str:
        if model is not None:
            doing = "loaded" if model.loading else "replaced"
            return f"pool {self.name!r}: the model of key {key!r} is still being {doing}"
        used, budget = (_units.format_bytes(int(n)) for n in (self._models.currsize, self._models.maxsize))
        in_use = f"{len(self._models)} models with {used} of {budget} are in use"
        return f"pool {self.name!r}: no room for key {key!r}; {in_use}"

    # Loading

    def _load(self, key: K, model: PooledModel[M], deadline: float) -> bool:
        """Load a new model; false if it must be evicted again because it does not fit."""
        with self._turn(key, model, deadline):
            self._close_evicted()  # their memory is needed now
            with self._changed:
                failed, probe = self._failed.pop(key, None), self._sources.of(key)
                woken = self._idle.wake(key)
            model.engine = failed or self._make(key, self.runtime)
            if woken:
                model.engine.state.await_next_use()
            at_load = self._sources.before_load(probe, self.runtime)
            model.engine.ensure_loaded()
            if probe is not None:
                probe.loaded(at_load, self.runtime)
                model.probe = probe
            if self.runtime.ticks and self.check_interval() < math.inf:
                with suppress(RuntimeError):  # the system gives no thread; the next load tries again
                    _ticker.TICKER.add(self)
            return self._admit(key, model)

    # As time passes

    def tick(self) -> None:
        """Ask the probes for which it is time, and release the models that nobody uses. Waits for neither."""
        with self._changed:
            self._idle.evict_from(self._models, self.runtime.clock())
            probes = [model.probe for model in self._models.values() if model.probe is not None]
            if not self._models and not self._models.evicted:
                _ticker.TICKER.remove(self)  # a process that forks should have few threads
            self._release_evicted_in_background()
        for probe in probes:
            probe.poll(self.runtime)

    def check_interval(self) -> float:
        """Seconds until :meth:`tick` should be called again."""
        return min(self._sources.interval, self._idle.interval)

    def _release_evicted_in_background(self) -> None:
        """Release them beside no load, whose size is measured: one that is under way releases them at its end."""
        one_load = self._one_load
        if not self._models.evicted or not one_load.acquire(blocking=False):
            return
        name = f"modelguard-release-{self.name}"
        self._releasing = _in_thread.start(self._close_evicted, name, self.runtime.start_thread)
        self._releasing.add_done_callback(lambda _: one_load.release())  # also where the system gives no thread

    @contextmanager
    def _turn(self, key: K, model: PooledModel[M], deadline: float) -> Iterator[None]:
        """Load in the block, after other loads; an error there goes to everyone who waits for this model.

        A loader that leases another model of its own pool waits here for itself, until its time runs out.
        """
        got = False
        try:
            self._wait_for_turn(key, deadline)
            got = True
            yield
        except BaseException as error:
            self._drop(key, model, error)
            raise
        finally:
            if got:
                try:
                    self._close_evicted()  # before another load is measured
                finally:
                    self._one_load.release()

    def _wait_for_turn(self, key: K, deadline: float) -> None:
        search = _deadlocks.Search(self._states_of_loads)
        while not self._one_load.acquire(timeout=search.pause(max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise Overloaded(f"pool {self.name!r}: key {key!r} waited too long for the loads of other models")
            search.look()

    def _states_of_loads(self) -> list[GuardState[M]]:
        """The states of the models that are being loaded."""
        with self._changed:
            return [model.engine.state for model in self._models.values() if model.loading and model.engine is not None]

    def _admit(self, key: K, model: PooledModel[M]) -> bool:
        assert model.engine is not None  # noqa: S101 - it has just been loaded
        size = model.engine.state.model_bytes or 0
        budget = int(self._models.maxsize)
        with self._changed:
            # A load that reuses free memory measures too little: the largest measurement counts.
            size = self._sizes[key] = max(size, self._sizes.get(key, 0))
            if size > budget:
                raise ModelTooLarge(key, model_bytes=size, max_memory=budget)
            if self._models.get(key) is not model:  # closed meanwhile, and maybe reopened
                raise GuardClosed(self.name)
            self._remove(key, model)  # with the size that was estimated
            model.size = size
            try:
                self._models[key] = model  # cachetools evicts unused models until it fits
            except KeyError:
                self._models.evicted.append(model)
                return False
            model.admit(self.runtime.clock(), self.options.ttl * (1 - _JITTER * self.runtime.random()))
            self._loads += 1
            self._changed.notify_all()
            return True

    def _drop(self, key: K, model: PooledModel[M], error: BaseException) -> None:
        failure = error if isinstance(error, Exception) else None
        with self._changed:
            model.failure = failure or Overloaded(f"pool {self.name!r}: the load of key {key!r} was interrupted")
            self._remove(key, model)
            if isinstance(failure, LoadFailed) and model.engine is not None:
                self._failed[key] = model.engine  # it knows when the next attempt is due
            elif model.engine is not None:
                self._models.evicted.append(model)
            self._changed.notify_all()

    def _remove(self, key: K, model: PooledModel[M]) -> None:
        if self._models.get(key) is model:
            del self._models[key]

    def _unpin(self, model: PooledModel[M]) -> None:
        with self._changed:
            model.pins -= 1
            self._changed.notify_all()

    def _close_evicted(self) -> None:
        """Release what was evicted."""
        with self._changed:
            evicted, self._models.evicted = self._models.evicted, []
            self._evictions += sum(model.idle is None for model in evicted)
        for model in evicted:
            release(model, self.name, self.runtime.start_thread)

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise GuardClosed(self.name)

    # Fork

    def before_fork(self) -> None:
        """Keep other threads out while the process forks."""
        self._changed.acquire()

    def after_fork_in_parent(self) -> None:
        """Let them in again."""
        self._changed.release()

    def after_fork_in_child(self) -> None:
        """Start with own locks, and without the loads of the parent's threads."""
        self._renew_locks()
        probes = {model.probe for model in self._models.values() if model.probe is not None}
        for probe in probes.union(self._sources.kept()):
            probe.after_fork_in_child(self.runtime)
        for key, model in list(self._models.items()):
            model.pins = 0
            if model.loading:
                del self._models[key]
