"""The engine of one pool: finds models by key, loads them one at a time, and evicts them to make room."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from modelguard import _units, telemetry
from modelguard.errors import (
    GuardClosed,
    LoadFailed,
    ModelTooLarge,
    Overloaded,
    Reloading,
    WouldDeadlock,
    shortened,
)
from modelguard.facts._proc import ShownPause
from modelguard.lifecycle import _engine
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._guard_options import PoolOptions
from modelguard.lifecycle._lease import Lease
from modelguard.lifecycle._pool_models import OVERDUE, KeyRecord, Pin, PooledModel, Want
from modelguard.lifecycle._readings import UNKNOWN
from modelguard.runtime import fork_hooks, waiting
from modelguard.runtime.background import TICKER
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.runtime.waiting import PATIENCE, Line, Steps, TimeIsOver, Timeout, Work
from modelguard.telemetry import _hooks
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle._state import GuardState
    from modelguard.lifecycle.status import PoolStatus
    from modelguard.lifecycle.system import System


K = TypeVar("K", bound=Hashable)
M = TypeVar("M")

#: Seconds that the end of the pool waits for a release under way.
_END = 30.0

_REQUESTED = Reason("requested", "requested")

#: What is known of keys is kept for the latest ones, this many.
_REMEMBERED = 256

#: How often a pool looks for models that nobody uses, in the time after which they are released.
_LOOKS = 10

pool_engines: WeakRegistry[PoolEngine[Any, Any]] = WeakRegistry()


def _check_keys(keys: tuple[object, ...]) -> None:
    for key in keys:
        _units.check_pool_key(key)


class PoolEngine(fork_hooks.Forkable, Generic[K, M]):
    """Runs one pool.

    All models leave the pool first, under its lock, and are released afterwards. That takes the pool's one turn to
    load, because a release would falsify the size that a load measures.

    Args:
        make: Makes the engine of one key's model, with the system that it is to use.
        options: The pool's bounds.
        system: Clock, chance and threads.
    """

    fork_rank = fork_hooks.Rank.POOL

    def __init__(self, make: Callable[[Any, System], Engine[M]], options: PoolOptions, system: System) -> None:
        self.options = options
        self.system = system
        self.paused = False  # age, changed sources and idleness end no model
        self._make = make
        self._shown_pause = ShownPause(options.name)
        self._models: OrderedDict[K, PooledModel[M]] = OrderedDict()  # the latest one last
        self._evicted: list[PooledModel[M]] = []  # they have left the pool, and are to be released
        self._outlasting: list[tuple[K, Engine[M]]] = []  # of models on which calls may run that outlast the pool's end
        self._known: OrderedDict[K, KeyRecord[M]] = OrderedDict()  # in the same order
        self.closed = False  # whether leases are refused
        self._loads = self._evictions = self._unloads = 0
        _hooks.import_events()
        self._renew_locks()
        pool_engines.add(self)
        fork_hooks.register(self)

    def _renew_locks(self) -> None:
        self._lock = threading.RLock()
        self._one_load = threading.Lock()  # sizes are measured, so models are loaded one at a time
        self._releasing: Future[None] | None = None
        # Those who wait, oldest first, and the first of them that needs room: without an order, a rare key could wait
        # for ever.
        self.line: Line[Callable[[], Any], Any] = Line(lambda look: look(), self._return_unwanted)
        self._first: Want[K, M] | None = None
        self._watching = False  # whether one of them waits for the end of a call
        self._fetches: dict[K, Future[Lease[M]]] = {}
        self._inside_release: ContextVar[Collection[bool]] = ContextVar("modelguard releases", default=())

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def _used(self) -> int:
        return sum(model.size for model in self._models.values())

    def _engines(self) -> list[Engine[M]]:
        return [model.engine for model in self._models.values() if model.engine is not None]

    def _known_of(self, key: K) -> KeyRecord[M]:
        known = self._known.pop(key, None) or KeyRecord(self.name, key, self.options.source)
        self._known[key] = known
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known

    # On request

    def reload(self, keys: tuple[K, ...]) -> None:
        """Lend these models no more, or all of them, and release each when its calls have ended. Does not block."""
        _check_keys(keys)
        with self._lock:
            self._raise_if_closed()
            self._request_end(keys)
        self.tick()

    def unload(self, keys: tuple[K, ...], timeout: Timeout) -> None:
        """:meth:`reload`, and wait until these models are released."""
        _check_keys(keys)
        with self._lock:
            self._raise_if_closed()
            self._raise_inside_lease(keys)
            for state in self._states_of_loads():
                _engine.raise_on_circle(state)  # a loader that waits for the end of its own model is refused
            ending = self._request_end(keys)
        over = partial(Reloading, self.name, command="the release")
        try:
            waiting.block(self.line.wait(partial(self._have_ended, ending), timeout, search=self._search))
        except TimeIsOver:
            raise over(waited=timeout.waited()) from None
        with self._turn(timeout, lambda: over(waited=timeout.waited())):
            pass  # who has the turn releases, or loads and releases

    def _have_ended(self, ending: dict[K, PooledModel[M]]) -> bool | None:
        """Whether these models have left the pool; None while one is in use."""
        with self._lock:
            if not self._watching:
                self._watch(watched=True)
            self._evict_due()
            return None if any(self._models.get(key) is model for key, model in ending.items()) else True

    def set_paused(self, *, paused: bool) -> None:
        with self._lock:
            changed, self.paused = self.paused is not paused, paused
            self._shown_pause.show(paused=paused)
        if changed:
            telemetry.emit((telemetry.GuardPaused if paused else telemetry.GuardResumed)(guard=self.name))

    def _request_end(self, keys: tuple[K, ...]) -> dict[K, PooledModel[M]]:
        now = self.system.clock()
        ending = {key: model for key, model in self._models.items() if not keys or key in keys}
        for model in ending.values():
            model.until_next_use = _REQUESTED
            model.stop_lending(now)
        if ending:
            self._tick_from_now_on()
        return ending

    # The end of the pool

    def refuse_calls(self) -> None:
        """Refuse further leases, and those that are waited for. Waits for nothing, and releases nothing."""
        with self._lock:
            self.closed = True
            engines = self._engines()
        for engine in engines:
            engine.state.close()
        self.line.serve()

    def close(self, timeout: float | None = None) -> None:
        limit = Timeout(timeout)
        TICKER.remove(self)
        with self._lock:
            engines = self._engines()
            for engine in engines:
                engine.raise_inside_call("close")
            self.closed = True
            self._outlasting += [(key, model.engine) for key, model in self._models.items() if model.engine is not None]
            self._outlasting = [one for one in self._outlasting if one[1].state.in_flight or one[1].loading]
            self._models.clear()
            for known in self._known.values():
                known.failed, known.idle = None, False
            releasing = self._releasing
        self.line.serve()
        for engine, ended in [(engine, engine.refuse()) for engine in engines]:  # all at once, and then one by one
            engine.end(ended, limit.left())
        self._close_evicted()
        if releasing is not None:
            wait([releasing], _END if timeout is None else limit.left())

    def reopen(self) -> None:
        with self._lock:
            self.closed = False

    # As time passes

    def tick(self) -> None:
        """Ask the probes for which it is time, and release what is over or idle. Waits for neither."""
        with self._lock:
            self._evict_due()
            probes = [model.probe for model in self._models.values() if model.probe is not None]
            if not self._evicted and not self._has_to_look():
                TICKER.remove(self)  # a process that forks should have few threads
            self._release_evicted_in_background()
        self.line.serve()
        for probe in probes:
            probe.poll(self.system)

    def check_interval(self) -> float:
        source = self.options.source
        return min(self.options.idle / _LOOKS, math.inf if source is None else min(1.0, source.every))

    def _has_to_look(self) -> bool:
        if self.check_interval() < math.inf:
            return bool(self._models)
        return any(model.until_next_use is not None for model in self._models.values())

    def _tick_from_now_on(self) -> None:
        with suppress(RuntimeError):  # the system gives no thread; the next load tries again
            if self.system.ticks:
                TICKER.add(self)

    def _evict_due(self) -> None:
        """Evict what nobody uses and is to go: on request, or because nobody has used it for long enough."""
        now, after = self.system.clock(), math.inf if self.paused else self.options.idle
        for key, model in list(self._models.items()):
            if model.until_next_use is not None:
                if model.unused:
                    self._evict(key, model.until_next_use)
            elif after < math.inf and model.seconds_unused(now) >= after:
                self._evict(key, Reason("idle", f"Idle({_units.format_seconds(after)!r})"))

    def _evict(self, key: K, until_next_use: Reason | None = None) -> None:
        """Take a model out of the pool, to be released; with a reason, until its next use."""
        model = self._models.pop(key)
        model.until_next_use = until_next_use
        self._evicted.append(model)
        if until_next_use is not None:
            self._known_of(key).idle = True
            self._unloads += 1

    def _release_evicted_in_background(self) -> None:
        """Release them beside no load: one that is under way releases them at its end."""
        one_load = self._one_load
        if not self._evicted or not one_load.acquire(blocking=False):
            return
        name = f"modelguard-release-{self.name}"
        self._releasing = waiting.start(self._close_evicted, name, self.system.start_thread)
        self._releasing.add_done_callback(lambda _: one_load.release())  # also where the system gives no thread

    def _close_evicted(self) -> None:
        with self._lock:
            evicted, self._evicted = self._evicted, []
            self._evictions += sum(model.until_next_use is None for model in evicted)
        inside = [True]
        token = self._inside_release.set(inside)
        try:
            for model in evicted:
                self._release(model)
        finally:
            inside.clear()  # for tasks and threads that were begun there, and live on
            self._inside_release.reset(token)

    def _release(self, model: PooledModel[Any]) -> None:
        """Release a model, off the event loop, since an ``unload`` hook may need one."""
        engine = model.engine
        if engine is None:
            return
        current = engine.state.current
        if model.until_next_use is not None and current is not None:
            event = telemetry.UnloadStarted(
                guard=engine.name, generation=current.number, reasons=(model.until_next_use,)
            )
            telemetry.emit(event)
        waiting.off_loop(engine.shut_down, f"modelguard-release-{self.name}", self.system.start_thread)

    # What the calling context may do

    def _raise_if_closed(self) -> None:
        if self.closed:
            raise GuardClosed(self.name)

    def _raise_inside_lease(self, keys: tuple[K, ...]) -> None:
        for key, model in self._models.items():
            if model.encloses_this_call and (not keys or key in keys):
                why = f"unload() inside a lease of key {shortened(key)} would wait for that lease to end"
                fix = "Call it outside, or use reload(), which waits for nothing."
                raise WouldDeadlock(self.name, why=why, fix=fix)

    def _states_of_loads(self) -> list[GuardState[M]]:
        with self._lock:
            return [model.engine.state for model in self._models.values() if model.loading and model.engine is not None]

    def held(self) -> tuple[int, int]:
        """How many models are loaded, and the bytes of the budget in use."""
        with self._lock:
            return sum(not model.loading for model in self._models.values()), self._used

    def status(self) -> PoolStatus[K]:
        from modelguard.lifecycle.status import PoolStatus

        with self._lock:
            loaded = {key: model for key, model in self._models.items() if not model.loading}
            idle = tuple(key for key, known in self._known.items() if known.idle)
            return PoolStatus(
                name=self.name,
                state="closed" if self.closed else "ready" if loaded else "idle" if idle else "new",
                models={key: model.size for key, model in loaded.items()},
                in_flight=sum(one.state.in_flight for one in (*self._engines(), *(one for _, one in self._outlasting))),
                used=self._used,
                max_memory=self.options.max_memory,
                loads=self._loads,
                evictions=self._evictions,
                unloads=self._unloads,
                idle=idle,
                paused=self.paused,
                versions={
                    key: version
                    for key, model in loaded.items()
                    if model.engine and (version := model.engine.state.version) is not None
                },
            )

    # Finding a model

    def take(self, key: K, wait: float) -> Lease[M]:
        """Take a lease on the model of ``key``, after a load if need be."""
        lease = self.take_now(key)
        return waiting.block(self._until_taken(key, Timeout(wait))) if lease is None else lease

    async def atake(self, key: K, wait: float) -> Lease[M]:
        lease = self.take_now(key)
        return await waiting.suspend(self._until_taken(key, Timeout(wait))) if lease is None else lease

    def _until_taken(self, key: K, limit: Timeout) -> Steps[Lease[M]]:
        _units.check_pool_key(key)
        while True:
            give_back: Callable[[Pin[M]], object] = self._return
            pin = yield from self._until_found(key, limit)
            model = pin.model
            try:
                if pin.to_load:
                    load = partial(self._load, key, pin, limit)
                    if not (yield Work(load, f"modelguard-{self.name}", self.system.start_thread)):
                        continue  # it was larger than the room that was made
                assert model.engine is not None  # noqa: S101 - set by _load, before anyone else finds it
                if (lease := Lease.take_now(model.engine)) is not None:
                    return lease
                self._raise_if_closed()  # else its model was closed, and the pool was not, or is open again
            except GeneratorExit:  # the coroutine was dropped: the collector, which may be at work, takes no lock
                give_back = self._return_unwanted
                raise
            finally:
                give_back(pin)

    def _until_found(self, key: K, limit: Timeout) -> Steps[Pin[M]]:
        """Wait for the pinned model of ``key``."""
        with self._lock:
            want = Want(key, list(self._models.values()), self.system.clock())
        look = partial(self._make_room_when_overdue, want)
        found = partial(self._find, want)
        try:
            pin: Pin[M] = yield from self.line.wait(found, limit, look=look, search=self._search, every=OVERDUE)
            return pin  # noqa: TRY300 - typed, as the line is not
        except TimeIsOver:
            raise self.why_full(key) from None
        finally:
            want.gone = True
            self._forget(want)

    def _forget(self, want: Want[K, M]) -> None:
        """Let others come first. Without a lock: the collector may end a coroutine that was dropped."""
        if self._first is want:
            self._first = None
            self._in_background(self.line.serve)

    def fetch(self, key: K) -> tuple[Future[Lease[M]], bool]:
        """Have one thread take a lease for all who wait for the model of ``key``. Does not block.

        Returns:
            What gets the lease, and whether the lease is the caller's own, who must end it. The others then call
            :meth:`take_now`.
        """
        future: Future[Lease[M]] = waiting.promise()
        shared = self._fetches.setdefault(key, future)
        if shared is not future:
            return shared, False
        future.add_done_callback(lambda _: self._fetches.pop(key, None))
        work = partial(self.take, key, self.options.wait_timeout)
        return waiting.start(work, f"modelguard-{self.name}", self.system.start_thread, future), True

    def take_now(self, key: K) -> Lease[M] | None:
        """Take a lease if the model of ``key`` is loaded; None if that needs a wait."""
        with self._lock:
            for own, engine in self._outlasting:  # none, but after the pool's end: a call inside a call goes on there
                if engine.state.enclosing_generation() is not None and own == key:
                    return Lease.take_now(engine)
            self._raise_if_closed()
            try:
                model = self._touch(key)
            except Exception as error:  # noqa: BLE001 - of a key's own code, which compares with those that are there
                raise _units.key_error(key, error) from None
            if model is None or model.engine is None or not self._lends(model):
                return None
            return Lease.take_now(model.engine)

    def _touch(self, key: K) -> PooledModel[M] | None:
        model = self._models.get(key)
        if model is not None:
            self._models.move_to_end(key)
        return model

    def _find(self, want: Want[K, M]) -> Pin[M] | None:
        """The pinned model of a key; None if the caller has to wait."""
        self._raise_if_closed()
        if want.awaits is not None and want.awaits.loading and want.awaits.failure is None:
            return None  # cheap: a thousand callers may wait for one load
        key, now = want.key, self.system.clock()
        with self._lock:
            want.raise_failure()
            model = self._touch(key)
            if model is not None and model.unused and model.overdue(now, paused=self.paused) >= 0:
                self._evict(key, model.until_next_use)
                model = None
            pin = None
            if model is None:
                self._raise_if_closed()  # in this very moment: nothing would release it
                pin = self._reserve(want)
            elif self._lends(model, want):
                pin = Pin(model, self._return_unwanted)
            else:
                want.awaits = model
            if pin is not None:
                pin.hold()
                return pin
            if not self._watching and (want.awaits is None or not want.awaits.loading):
                self._watch(watched=True)
                return self._find(want)  # a call may have ended just before it was watched
            if want.gone:  # in this very moment
                self._forget(want)
            return None

    def _reserve(self, want: Want[K, M]) -> Pin[M] | None:
        """A place for a model that is to be loaded; None if others come first, or there is no room."""
        if (need := self._estimate(want.key)) > self.options.max_memory:
            raise ModelTooLarge(want.key, model_bytes=need, max_memory=self.options.max_memory)
        if not want.nested and self._first not in (None, want):
            return None
        if not self._evict_least_used(need, models=1):
            if not want.nested:
                self._first = want
            return None
        if self._first is want:
            self._first = None
        pin = Pin(PooledModel[M](need), self._return_unwanted)
        pin.to_load = True
        self._models[want.key] = pin.model
        return pin

    def _make_room_when_overdue(self, want: Want[K, M]) -> None:
        """As time passes: have the least used model end for the first in line."""
        if self._first is want:
            now = self.system.clock()
            with self._lock:
                if want.is_overdue(now):
                    self._close_least_used_to_calls(now)
            self.line.serve()

    def _close_least_used_to_calls(self, now: float) -> None:
        """Close the least recently used of the models in use to new calls, so that steady traffic makes room."""
        for model in self._models.values():
            if not model.loading and model.overdue(now, paused=self.paused) < 0:
                model.stop_lending(now)
                return

    def _lends(self, model: PooledModel[M], want: Want[Any, M] | None = None) -> bool:
        """Whether the caller may use ``model`` now. While it loads, only its own warm-up may."""
        overdue = model.overdue(self.system.clock(), paused=self.paused)
        if overdue < 0 and not model.loading:
            return True
        if want is None:
            want = Want(None, list(self._models.values()), 0.0)
        if model.loading:
            return model in want.inside
        # Bounded, or streams that overlap, as a pool of threads steps them, could keep the old model for ever. The
        # bound is half of the time that others wait: they get the new model, or its room, in the other half.
        return want.nested or (overdue < self.options.wait_timeout / 2 and model in want.half_used)

    # The ends of calls tell the pool from when somebody waits for one until nobody waits

    def _watch(self, *, watched: bool) -> None:
        self._watching = watched
        for engine in self._engines():
            engine.state.watch(watched=watched)

    def _call_ended(self) -> None:
        """A call or a load has ended."""
        self.line.serve()
        if not self.line:
            with self._lock:
                self._watch(watched=bool(self.line))

    def _return_unwanted(self, found: object) -> None:
        """Take back what a caller that is gone was to have; in another thread, the collector may be at work here."""
        if isinstance(found, Pin):
            self._in_background(partial(self._return, found))

    def _in_background(self, work: Callable[[], None]) -> None:
        self.system.in_background(work, f"modelguard-line-{self.name}")

    def _return(self, pin: Pin[M]) -> None:
        with self._lock:
            pin.end()
            keys = [key for key, model in self._models.items() if pin.to_load and model is pin.model]
        for key in keys:
            gone = Overloaded(f"pool {self.name!r}: who was to load key {shortened(key)} is gone")
            self._drop(key, pin.model, gone)
        pin.to_load = False
        self.line.serve()

    def _evict_least_used(self, need: int, *, models: int = 0) -> bool:
        """Evict unused models, the least recently used first, until so many more bytes and models fit."""
        while self._used + need > self.options.max_memory or len(self._models) + models > self.options.max_models:
            unused = next((key for key, model in self._models.items() if model.unused), None)
            if unused is None:
                return False
            self._evict(unused)  # for its room, whatever else it was to go for
        return True

    def _estimate(self, key: K) -> int:
        """The size of this model when it was last loaded; if it never was, that of the largest model known."""
        known = self._known.get(key)
        if known is not None and known.size is not None:
            return known.size
        sizes = [one.size for one in self._known.values() if one.size is not None]
        return max((size for size in sizes if size <= self.options.max_memory), default=0)

    def why_full(self, key: K) -> Overloaded:
        with self._lock:
            if (model := self._models.get(key)) is not None:
                why = f"the model of key {shortened(key)} is still being {'loaded' if model.loading else 'replaced'}"
            else:
                used, budget = (_units.format_bytes(n) for n in (self._used, self.options.max_memory))
                why = f"no room for key {shortened(key)}; {len(self._models)} models with {used} of {budget} are in use"
            return Overloaded(f"pool {self.name!r}: {why}")

    # Loading

    def _load(self, key: K, pin: Pin[M], limit: Timeout) -> bool:
        """Load a new model; false if it must be evicted again because it does not fit."""
        model = pin.model
        late = f"pool {self.name!r}: key {shortened(key)} waited too long for the loads of other models"
        with self._turn(limit, lambda: Overloaded(late), failed=partial(self._drop, key, model)):
            self._close_evicted()  # their memory is needed now
            with self._lock:
                self._raise_if_gone(key, model)  # before it takes what is known of the key
                pin.to_load = False
                known = self._known_of(key)
                failed, woken, probe = known.failed, known.idle, known.probe
                known.failed, known.idle = None, False
            engine = model.engine = failed or self._make(key, self.system)
            engine.changed = self._call_ended
            with self._lock:  # who closes it from now on finds the engine, and closes that
                self._raise_if_gone(key, model)
            if woken:
                engine.state.await_next_use()
            at_load = UNKNOWN if probe is None else probe.wait(probe.ask(self.system))
            waiting.block(engine.until_loaded(Timeout(None)))
            if probe is not None:
                probe.loaded(at_load, self.system)
                model.probe = probe
            if self.check_interval() < math.inf:
                self._tick_from_now_on()
            return self._admit(key, model, engine)

    @contextmanager
    def _turn(
        self, limit: Timeout, late: Callable[[], Exception], failed: Callable[[BaseException], object] = lambda _: None
    ) -> Iterator[None]:
        """Load and release in the block, after other loads.

        A loader that leases another model of its own pool waits here for itself, until its time runs out.

        Args:
            limit: For how long to wait for the turn.
            late: Makes the error when that is over.
            failed: Is told what was raised, also in the block.
        """
        mine: list[bool] = []
        try:
            while not any(mine):
                if mine and limit.left() == 0:
                    raise late()  # noqa: TRY301 - it is for `failed` too
                if mine:
                    self._search()
                left = limit.left()
                seconds = PATIENCE if left is None else min(left, PATIENCE)
                mine.extend(map(self._one_load.acquire, (True,), (seconds,)))  # one step, as in waiting.turn
            yield
        except BaseException as error:
            failed(error)
            raise
        finally:
            if mine and mine[-1]:
                try:
                    self._close_evicted()  # before another load is measured
                finally:
                    self._one_load.release()

    def _search(self) -> None:
        if self._inside_release.get():
            why = "its unload or a hook would wait for the release that runs it"
            fix = "Call it outside of them, or use reload(), which waits for nothing."
            raise WouldDeadlock(self.name, why=why, fix=fix)
        _engine.search(self._states_of_loads())

    def _admit(self, key: K, model: PooledModel[M], engine: Engine[M]) -> bool:
        size = engine.state.model_bytes or 0
        with self._lock:
            # A load that reuses free memory measures too little: the largest measurement counts.
            known = self._known_of(key)
            size = known.size = max(size, known.size or 0)
            if size > self.options.max_memory:
                raise ModelTooLarge(key, model_bytes=size, max_memory=self.options.max_memory)
            self._raise_if_gone(key, model)
            model.size = size  # and no longer what was estimated
            if not self._evict_least_used(0):
                self._evict(key)
                model.loading = False  # those who wait for it look again
                return False
            ttl = self.options.ttl
            age = math.inf if ttl is None else ttl.seconds * (1 - ttl.jitter * self.system.random())
            model.expires = self.system.clock() + age
            model.loading = False
            self._loads += 1
            engine.state.watch(watched=self._watching)
        self.line.serve()
        return True

    def _raise_if_gone(self, key: K, model: PooledModel[M]) -> None:
        if self._models.get(key) is not model:  # closed meanwhile, and maybe reopened
            raise GuardClosed(self.name)

    def _drop(self, key: K, model: PooledModel[M], error: BaseException) -> None:
        failure = error if isinstance(error, Exception) else None
        with self._lock:
            model.failure = failure or Overloaded(
                f"pool {self.name!r}: the load of key {shortened(key)} was interrupted"
            )
            if self._models.get(key) is model:
                del self._models[key]
            if isinstance(failure, LoadFailed) and model.engine is not None:
                self._known_of(key).failed = model.engine
            elif model.engine is not None:
                self._evicted.append(model)
        self.line.serve()

    # Fork

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        self._renew_locks()
        probes = [one.probe for one in self._models.values()] + [one.probe for one in self._known.values()]
        for probe in {one for one in probes if one is not None}:
            probe.after_fork_in_child(self.system)
        for key, model in list(self._models.items()):
            model.pins = 0
            if model.loading:
                del self._models[key]
