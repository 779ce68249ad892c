"""``guard`` and ``pool``: the doors through which options come in."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle.backoff import Backoff
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.policies import Policy
from modelguard.lifecycle.pool import ModelPool

if TYPE_CHECKING:
    from modelguard.lifecycle.runtime import Runtime
    from modelguard.lifecycle.settings import Settings, Swap

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


@overload
def guard(
    load: Callable[[], Awaitable[M]],
    *,
    reload_on: Policy | None,
    swap: Swap = ...,
    warmup: Callable[[M], object] | None = ...,
    validate: Callable[[M], object] | None = ...,
    unload: Callable[[M], object] | None = ...,
    load_timeout: _units.Duration | None = ...,
    wait_timeout: _units.Duration = ...,
    drain_timeout: _units.Duration = ...,
    defer: _units.Duration = ...,
    backoff: Backoff | None = ...,
    trim_every: _units.Duration | None = ...,
    prefork: bool = ...,
    name: str | None = ...,
    runtime: Runtime | None = ...,
) -> ModelGuard[M]: ...
@overload
def guard(
    load: Callable[[], M],
    *,
    reload_on: Policy | None,
    swap: Swap = ...,
    warmup: Callable[[M], object] | None = ...,
    validate: Callable[[M], object] | None = ...,
    unload: Callable[[M], object] | None = ...,
    load_timeout: _units.Duration | None = ...,
    wait_timeout: _units.Duration = ...,
    drain_timeout: _units.Duration = ...,
    defer: _units.Duration = ...,
    backoff: Backoff | None = ...,
    trim_every: _units.Duration | None = ...,
    prefork: bool = ...,
    name: str | None = ...,
    runtime: Runtime | None = ...,
) -> ModelGuard[M]: ...
def guard(
    load: Callable[[], Any],
    *,
    reload_on: Policy | None,
    swap: Swap = "auto",
    warmup: Callable[[Any], object] | None = None,
    validate: Callable[[Any], object] | None = None,
    unload: Callable[[Any], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    drain_timeout: _units.Duration = 30.0,
    defer: _units.Duration = 5.0,
    backoff: Backoff | None = None,
    trim_every: _units.Duration | None = None,
    prefork: bool = False,
    name: str | None = None,
    runtime: Runtime | None = None,
) -> ModelGuard[Any]:
    """Guard a model: load it once, lend it to calls, replace it when a policy says so, and prove that the old is gone.

    Durations are seconds, ``timedelta`` or text such as ``"1h30m"``. Nothing is loaded before the first use or
    :meth:`ModelGuard.load`.

    Args:
        load: Makes the model, without arguments; may be ``async`` (it then runs on an event loop of its own). It runs
            in a background thread, one at a time however many callers wait.
        reload_on: When to replace the model: policies joined by ``|`` and ``&``, or None for "only when told to".
        swap: ``"load_first"``: the old generation serves until the new one is ready; needs memory for both.
            ``"drain_first"``: calls wait while the old one ends and gives its memory back, and only then the new one
            loads; if that load fails, no generation serves until a retry succeeds. ``"auto"``: load first if the
            memory limit leaves room for a second copy of the model as it was measured, else drain first.
        warmup: Called with the new model before it serves. Guarded functions that it calls run on the new model.
        validate: Called with the new model before the warm-up; raising or returning something false refuses it.
        unload: Called with the old model before it is dropped.
        load_timeout: Bound on load, validation and warm-up together; a loader past it is left behind. Default: none.
        wait_timeout: How long a call waits while the model is being replaced and none serves, before ``Reloading``.
        drain_timeout: How long a replaced generation may take to finish its calls before it is abandoned to them.
        defer: How long a due reload may wait for a moment without calls. A loader that holds the GIL stalls every
            call beside it, so such a moment is worth waiting for. 0 does not wait.
        backoff: How failed loads are retried. Default: ``Backoff("1s", "1m")``.
        trim_every: Give freed memory back to the system in the course of traffic: at this interval (``"30s"``), or
            each time the process has grown by this much (``"100 MB"``). It is done beside the calls, for the whole
            process. Default: only when a generation is released.
        prefork: Have :func:`modelguard.prefork.prepare` share this model among forked workers when no guard is named
            there, as the servers' hooks do.
        name: For events, logs and errors. Default: the loader's name.
        runtime: Clock, memory readings and threads; for tests.

    Raises:
        InvalidOption: An option cannot be meant; the message names it, its value and the fix.
        NotSupported: ``trim_every`` was given, and the allocator in force is not known here.
        NoMemoryLimit: A policy asks for a share of a memory limit, and there is none.

    Warns:
        PolicyNeverFires: A policy cannot become due as it is written.
    """
    # Here, and not above, for the sake of the import: they are needed by those who make a guard.
    from modelguard.lifecycle import runtime as worlds
    from modelguard.lifecycle.settings import Settings, check_callable, check_policy, loader_name
    from modelguard.lifecycle.trimming import Rhythm

    check_callable("load", load, arguments=0)
    world = worlds.default() if runtime is None else runtime
    if reload_on is not None:
        check_policy(reload_on, world.limit)
    if trim_every is not None:
        world.check_trim()
    settings: Settings[Any] = Settings(
        load=load,
        reload_on=reload_on,
        swap=swap,
        warmup=warmup,
        validate=validate,
        unload=unload,
        load_timeout=None if load_timeout is None else _units.seconds(load_timeout, "load_timeout"),
        wait_timeout=_units.seconds(wait_timeout, "wait_timeout", zero=True),
        drain_timeout=_units.seconds(drain_timeout, "drain_timeout", zero=True),
        defer=_units.seconds(defer, "defer", zero=True),
        backoff=Backoff() if backoff is None else backoff,
        rhythm=None if trim_every is None else Rhythm.parse(trim_every),
        prefork=prefork,
        name=loader_name(load) if name is None else name,
    )
    return ModelGuard(settings, world)


def pool(
    load: Callable[[K], M],
    *,
    max_memory: int | str,
    max_models: int | None = None,
    ttl: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    backoff: Backoff | None = None,
    name: str | None = None,
    runtime: Runtime | None = None,
) -> ModelPool[K, M]:
    """Keep many models within one memory budget: load each on its first use, evict the least recently used for room.

    A model in use is never evicted. One load runs at a time, so that each model's size can be measured; a model that
    was loaded before needs that much room beforehand, one that never was needs as much as the largest known.

    Args:
        load: Makes the model of a key; may be ``async``.
        max_memory: Budget for all models together: bytes, ``"2 GB"``, or a share of the memory limit, ``"60%"``.
        max_models: How many models at most. Default: as many as the budget holds.
        ttl: A model older than this (less up to a tenth, at random) is not lent again: it is released when its last
            lease ends, and loaded anew. Default: no bound.
        wait_timeout: How long a lease waits for room, before ``Overloaded``.
        warmup: As for :func:`~modelguard.guard`, with each model; so are the next four.
        validate: As for ``guard``.
        unload: As for ``guard``.
        load_timeout: As for ``guard``.
        backoff: As for ``guard``.
        name: For events, logs and errors. Default: the loader's name.
        runtime: Clock, memory readings and threads; for tests.

    Raises:
        InvalidOption: An option cannot be meant; the message names it, its value and the fix.
        NoMemoryLimit: ``max_memory`` is a share, and nothing limits this process.
    """
    from modelguard.lifecycle import runtime as worlds
    from modelguard.lifecycle.settings import check_callable, loader_name, memory_bound

    check_callable("load", load, arguments=1)
    if max_models is not None and (isinstance(max_models, bool) or not isinstance(max_models, int) or max_models < 1):
        raise InvalidOption("max_models", max_models, why="it counts models", fix="Give a whole number of at least 1.")
    title = loader_name(load) if name is None else name
    runtime = worlds.default() if runtime is None else runtime

    # Not kept: a key that cannot be loaded is tried again when it is asked for, and not by the keeper.
    quiet = replace(runtime, kept=False) if runtime.kept else runtime

    def make(key: Any) -> ModelGuard[M]:
        return guard(
            partial(load, key),
            reload_on=None,
            warmup=warmup,
            validate=validate,
            unload=unload,
            load_timeout=load_timeout,
            backoff=backoff,
            name=f"{title}[{key!r}]",
            runtime=quiet,
        )

    make(None)  # so that a bad option is refused here, and not at the first lease
    return ModelPool(
        make,
        name=title,
        max_memory=memory_bound("max_memory", max_memory, runtime.limit),
        max_models=math.inf if max_models is None else max_models,
        ttl=math.inf if ttl is None else _units.seconds(ttl, "ttl"),
        wait_timeout=_units.seconds(wait_timeout, "wait_timeout", zero=True),
        runtime=runtime,
    )
