"""How the models of a pool end: evicted for room, for age, because nobody uses them, on request, or with the pool.

All of them leave the pool first, under its lock, and are released afterwards. That takes the pool's one turn to load,
because a release would falsify the size that a load measures.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard import telemetry
from modelguard.environment._shown_guards import ShownPause
from modelguard.errors import GuardClosed, Reloading, WouldDeadlock
from modelguard.lifecycle import _deadlocks, _in_thread, _ticker
from modelguard.lifecycle._options import PoolOptions
from modelguard.lifecycle._pool_idle import IdleKeys
from modelguard.lifecycle._pool_lru import PooledModel, PoolLRU
from modelguard.lifecycle._pool_sources import PoolSources
from modelguard.lifecycle._waiting import Timeout
from modelguard.telemetry import _hooks
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle._state import GuardState
    from modelguard.lifecycle.runtime import Runtime

__all__ = ["POLL", "PoolReleases"]

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")

#: Seconds between two looks for the end of a lease, which does not notify the pool: polling is cheaper.
POLL = 0.02

#: Seconds that the end of the pool waits for a release under way.
_END = 30.0

_REQUESTED = Reason("requested", "requested")


class PoolReleases(Generic[K, M]):
    """The models of one pool, and their ends.

    Attributes:
        options: The pool's bounds.
        runtime: Clock, chance and threads.
        paused: Age, changed sources and idleness end no model.
    """

    def __init__(self, options: PoolOptions, runtime: Runtime) -> None:
        self.options = options
        self.runtime = runtime
        self.paused = False
        self._shown_pause = ShownPause(options.name)
        self._models: PoolLRU[K, M] = PoolLRU(options.max_memory)
        self._sources: PoolSources[K] = PoolSources(options.name, options.reload_on)
        self._idle: IdleKeys[K, M] = IdleKeys(options.idle)
        self._closed = False
        self._evictions = 0
        _hooks.import_events()
        self._renew_locks()

    def _renew_locks(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._one_load = threading.Lock()  # sizes are measured, so models are loaded one at a time
        self._releasing: Future[None] | None = None

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.options.name

    @property
    def closed(self) -> bool:
        """Whether it was closed and not opened again."""
        return self._closed

    # On request

    def reload(self, keys: tuple[K, ...]) -> None:
        """Lend these models no more, or all of them, and release each when its calls have ended. Does not block."""
        with self._changed:
            self._raise_if_closed()
            self._request_end(keys)
        self.tick()

    def unload(self, keys: tuple[K, ...], timeout: Timeout) -> None:
        """:meth:`reload`, and wait until these models are released.

        Raises:
            GuardClosed, Reloading, WouldDeadlock: As for a guard.
        """
        _deadlocks.raise_on_event_loop(self.name, "unload", "await pool.aunload()")
        with self._changed:
            self._raise_if_closed()
            self._raise_inside_lease(keys)
        for state in self._states_of_loads():
            with _deadlocks.waiting_for(state):
                pass  # a loader that waits for the end of its own model is refused
        search = _deadlocks.Search(self._states_of_loads)
        with self._changed:
            ending = self._request_end(keys)
            while any(self._models.get(key) is model for key, model in ending.items()):
                self._evict_ending()
                self._wait_for_release(timeout)
                search.look()
        while not self._one_load.acquire(timeout=POLL):  # who has it releases, or loads and releases
            self._wait_for_release(timeout)
            search.look()
        try:
            self._close_evicted()
        finally:
            self._one_load.release()

    async def aunload(self, keys: tuple[K, ...], timeout: Timeout) -> None:
        """:meth:`unload` without blocking the event loop."""
        work = partial(self.unload, keys, timeout)
        await _in_thread.run(work, f"modelguard-unload-{self.name}", self.runtime.start_thread)

    def set_paused(self, *, paused: bool) -> None:
        """Let age, changed sources and idleness end no model, or let them again."""
        with self._changed:
            changed, self.paused = self.paused is not paused, paused
            self._shown_pause.show(paused=paused)
        if changed:
            telemetry.emit((telemetry.GuardPaused if paused else telemetry.GuardResumed)(guard=self.name))

    def _request_end(self, keys: tuple[K, ...]) -> dict[K, PooledModel[M]]:
        now = self.runtime.clock()
        ending = {key: model for key, model in self._models.items() if not keys or key in keys}
        for model in ending.values():
            model.until_next_use = _REQUESTED
            model.stop_lending(now)
        if ending and self.runtime.ticks:
            self._tick_from_now_on()
        return ending

    def _wait_for_release(self, timeout: Timeout) -> None:
        left = timeout.left()
        if left is not None and left <= 0:
            raise Reloading(self.name, waited=timeout.waited(), command="the release")
        with self._changed:
            self._changed.wait(POLL if left is None else min(POLL, left))

    # The end of the pool

    def refuse_calls(self) -> None:
        """Refuse further leases, and those that are waited for. Waits for nothing, and releases nothing."""
        with self._changed:
            self._closed = True
            models = list(self._models.values())
            self._changed.notify_all()
        for model in models:
            if model.engine is not None:
                model.engine.state.close()

    def close(self, timeout: Timeout | None = None) -> None:
        """Refuse further leases, wait for those under way, and release every model."""
        _deadlocks.raise_on_event_loop(self.name, "close", "await pool.aclose()")
        _ticker.TICKER.remove(self)
        with self._changed:
            for model in self._models.values():
                if model.engine is not None:
                    model.engine.raise_inside_call("close")
            models = list(self._models.values())
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

    def reopen(self) -> None:
        """Lend models again after :meth:`close`."""
        with self._changed:
            self._closed = False

    # As time passes

    def tick(self) -> None:
        """Ask the probes for which it is time, and release what is over or idle. Waits for neither."""
        with self._changed:
            self._evict_ending()
            if not self.paused:
                self._idle.evict_from(self._models, self.runtime.clock())
            probes = [model.probe for model in self._models.values() if model.probe is not None]
            if not self._models.evicted and not self._has_to_look():
                _ticker.TICKER.remove(self)  # a process that forks should have few threads
            self._release_evicted_in_background()
        for probe in probes:
            probe.poll(self.runtime)

    def check_interval(self) -> float:
        """Seconds until :meth:`tick` should be called again."""
        return min(self._sources.interval, self._idle.interval)

    def _has_to_look(self) -> bool:
        if self.check_interval() < math.inf:
            return bool(self._models)
        return any(model.until_next_use is not None for model in self._models.values())

    def _tick_from_now_on(self) -> None:
        try:
            _ticker.TICKER.add(self)
        except RuntimeError:  # the system gives no thread; the next load tries again
            return

    def _evict_ending(self) -> None:
        for key, model in list(self._models.items()):
            if model.until_next_use is not None and model.unused:
                self._idle.evict(key, self._models, model.until_next_use)

    def _release_evicted_in_background(self) -> None:
        """Release them beside no load: one that is under way releases them at its end."""
        one_load = self._one_load
        if not self._models.evicted or not one_load.acquire(blocking=False):
            return
        name = f"modelguard-release-{self.name}"
        self._releasing = _in_thread.start(self._close_evicted, name, self.runtime.start_thread)
        self._releasing.add_done_callback(lambda _: one_load.release())  # also where the system gives no thread

    def _close_evicted(self) -> None:
        """Release what was evicted. Blocks."""
        with self._changed:
            evicted, self._models.evicted = self._models.evicted, []
            self._evictions += sum(model.until_next_use is None for model in evicted)
        for model in evicted:
            self._release(model)

    def _release(self, model: PooledModel[Any]) -> None:
        """Release a model; on an event loop in another thread, since an ``unload`` hook may need a loop."""
        engine = model.engine
        if engine is None:
            return
        current = engine.state.current
        if model.until_next_use is not None and current is not None:
            telemetry.emit(
                telemetry.UnloadStarted(guard=engine.name, generation=current.number, reasons=(model.until_next_use,))
            )
        if _deadlocks.on_event_loop():
            name = f"modelguard-release-{self.name}"
            _in_thread.start(engine.shut_down, name, self.runtime.start_thread).result()
        else:
            engine.shut_down()

    # What the calling context may do

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise GuardClosed(self.name)

    def _raise_inside_lease(self, keys: tuple[K, ...]) -> None:
        for key, model in self._models.items():
            if model.encloses_this_call and (not keys or key in keys):
                why = f"unload() inside a lease of key {key!r} would wait for that lease to end"
                raise WouldDeadlock(
                    self.name, why=why, fix="Call it outside, or use reload(), which waits for nothing."
                )

    def _states_of_loads(self) -> list[GuardState[M]]:
        """The states of the models that are being loaded."""
        with self._changed:
            return [model.engine.state for model in self._models.values() if model.loading and model.engine is not None]
