"""``guard`` and ``ModelGuard``: one model that is replaced in time, and provably gone afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, Never, Required, TypedDict, TypeVar, Unpack, overload

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import _misuse
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._lease import Lease, decorate, owner_of
from modelguard.lifecycle.handle import ModelHandle
from modelguard.lifecycle.policies import Policy
from modelguard.runtime.fork_hooks import WeakRegistry, weakly

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import GuardOptions, Loading, Swap, SwapMode
    from modelguard.lifecycle._models import Loaded
    from modelguard.lifecycle.status import Status
    from modelguard.lifecycle.system import System
    from modelguard.telemetry.reasons import Reason

__all__ = ["ModelGuard", "guard", "guard_of"]

M = TypeVar("M")

#: The guards of this process that somebody refers to.
guards: WeakRegistry[ModelGuard[Any]] = WeakRegistry()


class ModelGuard(ModelHandle[M]):
    """A model with a lifecycle. Made by :func:`guard`; see there for the options.

    It is a handle (``lease``, ``load``, ``reload``, ``status``, ``close``), a decorator, and a context manager that
    loads on entry and closes on exit, for ``with`` and ``async with``. Entering it again after its end reopens it: an
    application that has it in its lifespan can be started several times in one process. If it is entered several times
    at once, as by a mounted sub-application too, the last exit closes it.

    Attributes:
        engine: What runs the guard. For modelguard's own integrations; it may change without notice.
    """

    _made_by = "guard(load, reload_on=...)"
    _status = "modelguard.lifecycle.status:Status"
    _what = "guard"

    def __init__(self, options: GuardOptions[M], system: System) -> None:
        self.engine: Engine[M] = Engine(options, system)
        super().__init__(self.engine.name, (self.engine,))
        guards.add(self)
        # The engine is in reference cycles: without this, it would reload for nobody until the collector finds it.
        # Referred to weakly: its loader may be a method of what has the guard.
        weakref.finalize(self, weakly(self.engine.stop_checks)).atexit = False

    @property
    def prefork(self) -> bool:
        """Whether :func:`modelguard.prefork.prepare` shares this guard's model when no guard is named there."""
        return self.engine.options.prefork

    @property
    def reload_on(self) -> Policy | None:
        """The policy that replaces the model; None if only a call of :meth:`reload` does."""
        return self.engine.options.reload_on

    def __repr__(self) -> str:
        # Without an import: a finalizer may ask when the interpreter ends, and nothing can be imported any more.
        return f"<ModelGuard {self.name!r} {self.engine.state.word}>"

    def _hint(self, name: str) -> str:
        block = f"with guard.lease() as model{'' if name == 'model' else f': model.{name}'}"
        fix = f"it is the guard, not the model. Decorate a function that takes the model, or write: {block}"
        return super()._hint(name) or f": {fix}"

    # Use

    def _decorate(self, function: Any) -> Any:
        return decorate(self.engine, function, owner=self)

    def lease(self, timeout: _units.Duration | None = None) -> Lease[M]:
        """Use the model for a block: ``with guard.lease() as model:``, or ``async with`` without blocking the loop.

        Args:
            timeout: How long to wait for a model. Default: for the first load as long as it takes, and
                ``wait_timeout`` while a model is being replaced.

        Raises:
            GuardClosed, LoadFailed, Reloading: On entry.
        """
        return Lease(self.engine, None if timeout is None else _units.seconds(timeout, "timeout", zero=True))

    @property
    def version(self) -> str | None:
        """The version of the current model, as its loader gave it; None if it gave none, or if there is no model."""
        return self.engine.state.version

    def check(self) -> bool:
        """Ask the policies now, as the background thread does regularly; returns whether a reload was started."""
        return self.engine.check()

    def status(self) -> Status:
        """The guard's figures at this moment."""
        from modelguard.lifecycle import status

        return status.of(self.engine)

    # For servers

    def recycle_in_children(self, ask: Callable[[tuple[Reason, ...]], object], *, takes_calls: bool = True) -> None:
        """Make forked children keep the model that they share with this process.

        In a child that is forked from now on, a private reload would undo the sharing. When a policy is due there, it
        calls ``ask(reasons)``, once, so that the server replaces the whole worker; the model is used until then.
        ``TTL`` and ``Modified`` mean new weights, which a fresh child of this process would not have: children ignore
        them, and this process acts on them.

        Args:
            ask: Called in the child, from whichever thread finds the policy due.
            takes_calls: Whether calls run in this process too. If not, only ``TTL`` and ``Modified`` count here.
        """
        _misuse.check_ask(ask)
        self.engine.checks.recycle_in_children(ask, takes_calls=_units.flag(takes_calls, "takes_calls"))

    def recycle_here(self, ask: Callable[[tuple[Reason, ...]], object]) -> None:
        """Have this whole process replaced instead of its model.

        From now on a due policy calls ``ask(reasons)``, once per generation, and the model is used until the process
        ends. This is for servers whose processes each load their own model and are replaced by a fresh one.

        Args:
            ask: Called from whichever thread finds the policy due.
        """
        _misuse.check_ask(ask)
        self.engine.checks.recycle_here(ask)


def hide(guard: ModelGuard[Any]) -> None:
    """Leave a guard out of :data:`guards`: this process never loads its model, or shows it in another way."""
    guards.discard(guard)


def guard_of(function: Callable[..., object]) -> ModelGuard[Any]:
    """The guard of a decorated function, for its ``status()``, ``reload()`` and so on.

    Raises:
        InvalidOption: No guard decorates ``function``.
    """
    owner = owner_of(function)
    if not isinstance(owner, ModelGuard):
        fix = "Decorate it, or keep the guard in a variable."
        if isinstance(function, ModelGuard):
            fix = "It is the guard itself: use it directly."
        elif owner_of(getattr(function, "__wrapped__", None)) is not None:  # a batched function
            fix = "A function that wraps it is: write guard_of(function.__wrapped__)."
        raise InvalidOption("function", function, why="is not decorated by a guard", fix=fix)
    return owner


_FIX = 'Write guard(load, reload_on=TTL("1h")), or reload_on=None to replace the model only on request.'


if TYPE_CHECKING:

    class OptionsOfAll(TypedDict, Generic[M], total=False):
        """Those of guards and pools."""

        warmup: Callable[[M], object] | None
        unload: Callable[[M], object] | None
        loading: Loading | None
        wait_timeout: _units.Duration
        name: str | None

    class _Options(OptionsOfAll[M], total=False):
        reload_on: Required[Policy | None]
        swap: SwapMode | Swap
        validate: Callable[[M], object] | Callable[[M, M | None], object] | None
        retry: bool
        prefork: bool


@overload
def guard(load: Callable[[], Awaitable[Loaded[M]]], **options: Unpack[_Options[M]]) -> ModelGuard[M]: ...
@overload
def guard(load: Callable[[], Loaded[M]], **options: Unpack[_Options[M]]) -> ModelGuard[M]: ...
@overload
def guard(load: Callable[[], Awaitable[M]], **options: Unpack[_Options[M]]) -> ModelGuard[M]: ...
@overload
def guard(load: Callable[[], M], **options: Unpack[_Options[M]]) -> ModelGuard[M]: ...
@_public.with_fixes(swap="Swap", loading="Loading")
def guard(
    load: Callable[[], Any],
    *others: Never,
    reload_on: Policy | None = _misuse.REQUIRED,
    swap: SwapMode | Swap = "auto",
    warmup: Callable[[Any], object] | None = None,
    validate: Callable[..., object] | None = None,
    unload: Callable[[Any], object] | None = None,
    loading: Loading | None = None,
    wait_timeout: _units.Duration = 30.0,
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
        loading: How long a load may take, and how failed loads are retried: ``Loading("2m", backoff=Backoff("5s"))``.
            Default: no limit, and ``Backoff("1s", "1m")``.
        wait_timeout: How long a call waits while the model is being replaced and no generation takes calls, before
            ``Reloading``. The first load has no such limit; the ``timeout`` of :meth:`ModelGuard.lease` limits both.
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
    from modelguard.lifecycle import _guard_options, system

    _guard_options.check_loader(load)
    _misuse.check_keyword("reload_on", reload_on, others, fix=_FIX)
    world, rule = system.default(), _guard_options.Swap.parse(swap)
    if reload_on is not None:
        _guard_options.check_policy(reload_on, world.limit, world.gpu)
    _guard_options.check_min_lifetime(reload_on, rule.min_lifetime)
    options: GuardOptions[Any] = _guard_options.GuardOptions(
        load=load,
        reload_on=reload_on,
        swap=rule,
        warmup=warmup,
        validate=validate,
        unload=unload,
        loading=_guard_options.Loading() if loading is None else loading,
        wait_timeout=_units.seconds(wait_timeout, "wait_timeout", zero=True),
        retry=retry,
        prefork=prefork,
        name=_guard_options.loader_name(load) if name is None else name,
    )
    return ModelGuard(options, world)


_public.set_module(globals(), "modelguard")
