"""``guard``: one model that is replaced in time, and provably gone afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Never, TypeVar, overload

from modelguard import _public, _units
from modelguard.lifecycle import _misuse
from modelguard.lifecycle._options import Replay
from modelguard.lifecycle._policy import Backoff
from modelguard.lifecycle.model_guard import ModelGuard
from modelguard.lifecycle.policies import Policy

if TYPE_CHECKING:
    from modelguard.lifecycle._options import GuardOptions, Loaded, SwapMode

__all__ = ["guard"]

M = TypeVar("M")

_FIX = 'Write guard(load, reload_on=TTL("1h")), or reload_on=None to replace the model only on request.'


@overload
def guard(
    load: Callable[[], Awaitable[Loaded[M]]],
    *,
    reload_on: Policy | None,
    swap: SwapMode = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    drain_timeout: _units.Duration = 30.0,
    defer: _units.Duration = 5.0,
    min_lifetime: _units.Duration = 0.0,
    backoff: Backoff | None = None,
    trim_every: _units.Duration | None = None,
    keep_previous: bool = False,
    retry: bool = False,
    replay: Replay | int | None = None,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
@overload
def guard(
    load: Callable[[], Loaded[M]],
    *,
    reload_on: Policy | None,
    swap: SwapMode = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    drain_timeout: _units.Duration = 30.0,
    defer: _units.Duration = 5.0,
    min_lifetime: _units.Duration = 0.0,
    backoff: Backoff | None = None,
    trim_every: _units.Duration | None = None,
    keep_previous: bool = False,
    retry: bool = False,
    replay: Replay | int | None = None,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
@overload
def guard(
    load: Callable[[], Awaitable[M]],
    *,
    reload_on: Policy | None,
    swap: SwapMode = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    drain_timeout: _units.Duration = 30.0,
    defer: _units.Duration = 5.0,
    min_lifetime: _units.Duration = 0.0,
    backoff: Backoff | None = None,
    trim_every: _units.Duration | None = None,
    keep_previous: bool = False,
    retry: bool = False,
    replay: Replay | int | None = None,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
@overload
def guard(
    load: Callable[[], M],
    *,
    reload_on: Policy | None,
    swap: SwapMode = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    drain_timeout: _units.Duration = 30.0,
    defer: _units.Duration = 5.0,
    min_lifetime: _units.Duration = 0.0,
    backoff: Backoff | None = None,
    trim_every: _units.Duration | None = None,
    keep_previous: bool = False,
    retry: bool = False,
    replay: Replay | int | None = None,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
def guard(
    load: Callable[[], Any],
    *others: Never,
    reload_on: Policy | None = _misuse.REQUIRED,
    swap: SwapMode = "auto",
    warmup: Callable[[Any], object] | None = None,
    validate: Callable[..., object] | None = None,
    unload: Callable[[Any], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    drain_timeout: _units.Duration = 30.0,
    defer: _units.Duration = 5.0,
    min_lifetime: _units.Duration = 0.0,
    backoff: Backoff | None = None,
    trim_every: _units.Duration | None = None,
    keep_previous: bool = False,
    retry: bool = False,
    replay: Replay | int | None = None,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[Any]:
    """Guard a model: load it once, lend it to calls, replace it when a policy says so, and prove that the old is gone.

    Durations are seconds, a ``timedelta`` or text such as ``"250ms"``, ``"1h30m"`` or ``"2d"``. Nothing is loaded
    before the first use or :meth:`ModelGuard.load`.

    Args:
        load: Makes the model, without arguments; may be ``async`` (it then runs on an event loop of its own). It runs
            in a background thread, one at a time however many callers wait, so it must not need the main thread, as
            signal handlers do. It returns the model, or ``Loaded(model, version=...)``. If it raises or returns None,
            the load has failed. It must not use its own guard (``WouldDeadlock``).
        others: None; every option is passed by keyword.
        reload_on: When to replace the model: policies joined by ``|`` (any) and ``&`` (all), or None to reload only on
            request. Required, so that nothing is reloaded, or never reloaded, by accident.
        swap: ``"load_first"``: the old generation takes calls until the new one is ready; needs memory for both.
            ``"drain_first"``: calls wait while the old one ends and returns its memory, and only then the new one
            loads; if that load fails, no generation takes calls until a retry succeeds. ``"auto"``: load first if 1.25
            times the size of the model, as it was measured, may still be allocated, else drain first; load first if
            one of the two is unknown. Once reloads have left a tenth of the model's size behind (at least 17 MB), the
            next one drains first, which returns it.
        warmup: Called with each new model before it takes calls, so that no request pays for what the first call
            builds. Guarded functions that it calls run on the new model. If it raises, the load has failed. May be
            ``async``.
        validate: Called with each new model before the warm-up. If it raises, or returns something false other than
            None, the model is rejected: the load has failed with ``ModelRejected``. May be ``async``. If it has a
            second parameter without a default, it gets the model that takes calls now as well, to compare the two; None
            if there is none: at the first load, after ``drain_first`` or ``Idle``, and under ``isolate``, whose molds
            load one model each.
        unload: Called with each old model after its last call and before it is dropped, also with a model that was
            loaded and never used, and at interpreter exit: close its files and threads here. If it raises, the release
            continues, and ``GenerationReleased.error`` reports the error. May be ``async``. A forked process does not
            unload the model of its parent at its exit; and no exit handler runs in a process that a signal ends.
        load_timeout: Limit for load, validation and warm-up together. After that the load has failed with
            ``LoadTimeout``. A thread cannot be stopped, so the loader is left behind; if it ends after all, its model
            is unloaded and dropped. Default: none. Set it if the loader uses the network.
        wait_timeout: How long a call waits while the model is being replaced and no generation takes calls, before
            ``Reloading``. The first load has no such limit; the ``timeout`` of :meth:`ModelGuard.lease` limits both.
        drain_timeout: How long a replaced generation may take to finish its calls. After that the guard continues
            without it and emits ``GenerationAbandoned``: the model stays loaded for these calls, and is released when
            the last of them ends.
        defer: How long a due reload waits for a pause between calls, because a loader that holds the GIL stalls every
            call beside it. The load starts when no call has run for 50 ms after one ended, or when ``defer`` has
            passed; a guard without any calls waits for all of it. 0 does not wait, and neither does
            :meth:`ModelGuard.reload`, nor a policy that protects memory where ``"auto"`` would drain first.
        min_lifetime: A policy does not replace or release a model before it has taken calls for this long, so that a
            policy that is due at once after every load cannot cause one reload after another. This holds for policies
            that protect memory too. What waits is in ``status().postponed`` and in the event ``ReloadPostponed``.
            :meth:`ModelGuard.reload` and :meth:`ModelGuard.unload` do not wait. Default: 0, no bound.
        backoff: How failed loads are retried. Default: ``Backoff("1s", "1m")``.
        trim_every: :func:`modelguard.memory.trim_every` with this interval (``"30s"``) or size (``"100 MB"``), as long
            as the guard has a model. It is for the whole process, so one guard with it is enough. Default: memory is
            returned only when a generation is released.
        keep_previous: Keep the model that a reload has replaced, for :meth:`ModelGuard.rollback`, until the next reload
            has succeeded. Costs the memory of a second model all the time, and of a third one during a load. Nothing is
            kept where memory is short: after ``drain_first``, and after a reload because of ``MemoryGrowth``,
            ``MemoryLimit`` or GPU memory.
        retry: Run a call once more if it ran out of GPU memory. Only for functions that may safely run twice. With or
            without it, the local variables of the calls in the error's traceback are cleared, torch's cache is emptied
            (``GpuOutOfMemory``), and if much stays allocated, the model is replaced. Generators, ``lease()`` blocks
            and coroutines that a plain function returns are not run again.
        replay: Keep the arguments of so many recent calls, and run these calls on both models before a new one replaces
            the current one: it is rejected (``ModelRejected``) if more than a tenth of its answers differ, or if it
            takes more than twice as long. :class:`Replay` sets other bounds. Decorated functions run again then, so
            they must do nothing but answer. Nothing is compared if no model takes calls: at the first load, after
            ``drain_first`` and ``Idle``. Default: none is kept.
        prefork: Let :func:`modelguard.prefork.prepare` share this model among forked workers when no guard is named
            there, as the servers' hooks do.
        name: For events, logs and errors. Default: the loader's name; for a lambda, its module and line.

    Raises:
        InvalidOption: An option is invalid; the message gives its name, its value and the fix.
        NotSupported: ``trim_every`` was given, and the allocator in force is not known; or a policy reads GPU memory,
            and torch is not installed or was built without CUDA.
        NoMemoryLimit: A policy asks for a percentage of a memory limit, and there is none.

    Warns:
        PolicyNeverFires: A policy can never be due as it is written.
    """
    # Here, to keep the import of modelguard light: only those who make a guard need them.
    from modelguard.lifecycle import _options, runtime

    _options.check_loader(load)
    _misuse.check_keyword("reload_on", reload_on, others, fix=_FIX)
    world = runtime.default()
    if reload_on is not None:
        _options.check_policy(reload_on, world.limit, world.gpu)
    if trim_every is not None:
        world.check_trim()
    options: GuardOptions[Any] = _options.GuardOptions(
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
        min_lifetime=_options.check_min_lifetime(reload_on, min_lifetime),
        backoff=Backoff() if backoff is None else backoff,
        trim_schedule=None if trim_every is None else _options.TrimSchedule.parse(trim_every),
        keep_previous=keep_previous,
        retry=retry,
        replay=Replay.parse(replay),
        prefork=prefork,
        name=_options.loader_name(load) if name is None else name,
    )
    return ModelGuard(options, world)


_public.set_module(globals(), "modelguard")
