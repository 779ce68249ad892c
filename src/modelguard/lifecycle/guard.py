"""``guard``: one model that is replaced in time, and provably gone afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Never, TypeVar, overload

from modelguard import _public, _units
from modelguard.lifecycle import _misuse
from modelguard.lifecycle._policy import Backoff
from modelguard.lifecycle.model_guard import ModelGuard
from modelguard.lifecycle.policies import Policy

if TYPE_CHECKING:
    from modelguard.lifecycle._options import GuardOptions, Loaded, Swap, SwapMode

__all__ = ["guard"]

M = TypeVar("M")

_FIX = 'Write guard(load, reload_on=TTL("1h")), or reload_on=None to replace the model only on request.'


@overload
def guard(
    load: Callable[[], Awaitable[Loaded[M]]],
    *,
    reload_on: Policy | None,
    swap: SwapMode | Swap = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    backoff: Backoff | None = None,
    retry: bool = False,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
@overload
def guard(
    load: Callable[[], Loaded[M]],
    *,
    reload_on: Policy | None,
    swap: SwapMode | Swap = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    backoff: Backoff | None = None,
    retry: bool = False,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
@overload
def guard(
    load: Callable[[], Awaitable[M]],
    *,
    reload_on: Policy | None,
    swap: SwapMode | Swap = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    backoff: Backoff | None = None,
    retry: bool = False,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
@overload
def guard(
    load: Callable[[], M],
    *,
    reload_on: Policy | None,
    swap: SwapMode | Swap = "auto",
    warmup: Callable[[M], object] | None = None,
    validate: Callable[[M], object] | Callable[[M, M | None], object] | None = None,
    unload: Callable[[M], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    backoff: Backoff | None = None,
    retry: bool = False,
    prefork: bool = False,
    name: str | None = None,
) -> ModelGuard[M]: ...
def guard(
    load: Callable[[], Any],
    *others: Never,
    reload_on: Policy | None = _misuse.REQUIRED,
    swap: SwapMode | Swap = "auto",
    warmup: Callable[[Any], object] | None = None,
    validate: Callable[..., object] | None = None,
    unload: Callable[[Any], object] | None = None,
    load_timeout: _units.Duration | None = None,
    wait_timeout: _units.Duration = 30.0,
    backoff: Backoff | None = None,
    retry: bool = False,
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
        swap: How a new model takes the place of the old one: ``"load_first"``, ``"drain_first"`` or ``"auto"``, which
            loads first where there is memory for both. :class:`Swap` sets more: ``defer``, ``drain_timeout``,
            ``min_lifetime``, ``keep_previous`` and ``replay``.
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
        backoff: How failed loads are retried. Default: ``Backoff("1s", "1m")``.
        retry: Run a call once more if it ran out of GPU memory. Only for functions that may safely run twice. With or
            without it, the local variables of the calls in the error's traceback are cleared, torch's cache is emptied
            (``GpuOutOfMemory``), and if much stays allocated, the model is replaced. Generators, ``lease()`` blocks
            and coroutines that a plain function returns are not run again.
        prefork: Let :func:`modelguard.prefork.prepare` share this model among forked workers when no guard is named
            there, as the servers' hooks do.
        name: For events, logs and errors. Default: the loader's name; for a lambda, its module and line.

    Raises:
        InvalidOption: An option is invalid; the message gives its name, its value and the fix.
        NotSupported: A policy reads GPU memory, and torch is not installed or was built without CUDA.
        NoMemoryLimit: A policy asks for a percentage of a memory limit, and there is none.

    Warns:
        PolicyNeverFires: A policy can never be due as it is written.
    """
    # Here, to keep the import of modelguard light: only those who make a guard need them.
    from modelguard.lifecycle import _options, runtime

    _options.check_loader(load)
    _misuse.check_keyword("reload_on", reload_on, others, fix=_FIX)
    world, rule = runtime.default(), _options.Swap.parse(swap)
    if reload_on is not None:
        _options.check_policy(reload_on, world.limit, world.gpu)
    _options.check_min_lifetime(reload_on, rule.min_lifetime)
    options: GuardOptions[Any] = _options.GuardOptions(
        load=load,
        reload_on=reload_on,
        swap=rule,
        warmup=warmup,
        validate=validate,
        unload=unload,
        load_timeout=None if load_timeout is None else _units.seconds(load_timeout, "load_timeout"),
        wait_timeout=_units.seconds(wait_timeout, "wait_timeout", zero=True),
        backoff=Backoff() if backoff is None else backoff,
        retry=retry,
        prefork=prefork,
        name=_options.loader_name(load) if name is None else name,
    )
    return ModelGuard(options, world)


_public.set_module(globals(), "modelguard")
