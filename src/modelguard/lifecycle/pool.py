"""``pool`` and ``ModelPool``: many models within one memory budget."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Never, Required, TypeVar, Unpack, overload

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import _misuse
from modelguard.lifecycle._engine import Engine
from modelguard.lifecycle._guard_options import PoolOptions
from modelguard.lifecycle._lease import Lease, check_function, wrap
from modelguard.lifecycle._misuse import call_parameters, plain_function
from modelguard.lifecycle._models import KnownModels
from modelguard.lifecycle._pool_engine import PoolEngine
from modelguard.lifecycle.handle import Decorator, Handle
from modelguard.lifecycle.policies import Policy
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.runtime.waiting import Timeout

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import GuardOptions, Loading
    from modelguard.lifecycle._models import Loaded
    from modelguard.lifecycle.status import PoolStatus
    from modelguard.lifecycle.system import System

__all__ = ["ModelPool", "pool"]

K = TypeVar("K", bound=Hashable)
M = TypeVar("M")


#: The pools of this process.
pools: WeakRegistry[ModelPool[Any, Any]] = WeakRegistry()


class ModelPool(Handle, Generic[K, M]):
    """Models by key, within one memory budget. Made by :func:`pool`; see there for the options.

    It is a context manager, for ``with`` and ``async with``: it closes on exit, on the last one if there are
    several at once. Entering it again reopens it.
    """

    _made_by = "pool(load, max_memory=...)"
    _status = "modelguard.lifecycle.status:PoolStatus"
    _what = "pool"

    def __init__(self, engine: PoolEngine[K, M]) -> None:
        super().__init__(engine.name, (engine,))
        self._engine = engine
        pools.add(self)

    @property
    def closed(self) -> bool:
        """Whether it refuses leases, after :meth:`close`."""
        return self._engine.closed

    def __repr__(self) -> str:
        count, used = self._engine.held()  # not status(), which may need an import: a finalizer may ask at the end
        return f"<ModelPool {self.name!r}: {count} models, {_units.format_bytes(used)}>"

    def lease(self, key: K, timeout: _units.Duration | None = None) -> PoolLease[M]:
        """Use the model of ``key`` for a block: ``with pool.lease(key) as model:`` or ``async with``.

        Args:
            key: The loader's argument; hashable.
            timeout: How long to wait for room. Default: the pool's ``wait_timeout``.

        Raises:
            UnhashableKey: At once.
            Overloaded: On entry: the models in use leave no room, and the time is over.
            ModelTooLarge, LoadFailed, GuardClosed: On entry.
        """
        _units.check_pool_key(key)
        engine = self._engine
        wait = engine.options.wait_timeout if timeout is None else _units.seconds(timeout, "timeout", zero=True)
        return PoolLease(partial(engine.take, key, wait), partial(engine.atake, key, wait))

    if TYPE_CHECKING:

        def __call__(self, *, key: str | Callable[..., K]) -> Keyed[M]: ...  # noqa: D102

    else:  # accepts what type checkers reject, to say what is wrong with it

        def __call__(self, *others: Never, key: str | Callable[..., K] = _misuse.REQUIRED) -> Keyed[M]:
            """Decorate a function that takes the model as its first parameter, after ``self`` or ``cls`` in a class.

            Args:
                others: None; the key is passed by keyword.
                key: Which model a call needs: the name of one of the function's parameters, or a function of the
                    call's arguments (without model and ``self``).

            Raises:
                InvalidOption: ``key`` is neither, or the function has no such parameter.
                TypeError: It is missing.
            """
            _misuse.check_keyword("key", key, others, fix="Write @pool(key='voice'), with the name of a parameter.")
            return Keyed(self._engine, key)

    def status(self) -> PoolStatus[K]:
        """The pool's figures at this moment."""
        return self._engine.status()

    def reload(self, *keys: K) -> None:
        """Load models anew, each at its next use. Returns at once.

        The models that are loaded now take no new calls, and each is released when its calls have ended. So does one
        that is being loaded.

        Args:
            keys: Whose models. Default: all.

        Raises:
            UnhashableKey: One of them can be no key, as a list of keys.
            GuardClosed: After :meth:`close`.
        """
        self._engine.reload(keys)

    def unload(self, *keys: K, timeout: _units.Duration | None = None) -> None:
        """Release models until their next use, which loads them again. Blocks until their calls have ended.

        Args:
            keys: Whose models. Default: all.
            timeout: How long to wait at most. Default: no bound.

        Raises:
            Reloading: ``timeout`` has passed. The models take no new calls, and are released when theirs have ended.
            WouldDeadlock: Called inside a lease of one of them, in its loader, or on a running event loop (use
                :meth:`aunload`).
            InvalidOption: ``timeout`` is not a duration.
            UnhashableKey: One of them can be no key, as a list of keys.
            GuardClosed: After :meth:`close`.
        """
        self._raise_on_loop("unload")
        self._engine.unload(keys, Timeout(timeout))

    async def aunload(self, *keys: K, timeout: _units.Duration | None = None) -> None:
        """:meth:`unload` for a coroutine: does not block the event loop."""
        await self._aside("unload", partial(self._engine.unload, keys, Timeout(timeout)))


if TYPE_CHECKING:
    from modelguard.lifecycle.guard import OptionsOfAll

    class _Options(OptionsOfAll[M], total=False):
        max_memory: Required[int | str]
        max_models: int | None
        reload_on: Policy | None
        validate: Callable[[M], object] | None


@overload
def pool(load: Callable[[K], Loaded[M]], **options: Unpack[_Options[M]]) -> ModelPool[K, M]: ...
@overload
def pool(load: Callable[[K], M], **options: Unpack[_Options[M]]) -> ModelPool[K, M]: ...
@_public.with_fixes(loading="Loading")
def pool(
    load: Callable[[Any], Any],
    *others: Never,
    max_memory: int | str = _misuse.REQUIRED,
    max_models: int | None = None,
    reload_on: Policy | None = None,
    wait_timeout: _units.Duration = 30.0,
    warmup: Callable[[Any], object] | None = None,
    validate: Callable[[Any], object] | None = None,
    unload: Callable[[Any], object] | None = None,
    loading: Loading | None = None,
    name: str | None = None,
) -> ModelPool[Any, Any]:
    """Keep many models within one memory budget: load each on its first use, evict the least recently used for room.

    A model in use is never evicted. One load runs at a time, so that each model's size can be measured. A model that
    was loaded before needs that much room beforehand; one that never was needs as much as the largest one known.

    Args:
        load: Makes the model of a key; may be ``async``. It returns the model, or ``Loaded(model, version=...)``.
        others: None; every option is passed by keyword.
        max_memory: Budget for all models together: bytes, ``"2 GB"``, or a percentage of the memory limit, ``"60%"``.
        max_models: How many models at most. Default: as many as the budget holds.
        reload_on: ``TTL``, ``Idle`` and ``Changed``, each once, joined by ``|``; for each model by itself. One that is
            older than its ``TTL`` takes no new leases: it is released when its last lease ends, and loaded anew. So is
            one whose source has changed: the probe of ``Changed`` takes the key, and is asked while its model is
            loaded. A model that no call has used for as long as ``Idle`` says is released, and the next call for its
            key loads it again. Default: a model stays until its room is needed.
        wait_timeout: How long a lease waits for room, before ``Overloaded``.
        warmup: Called with each new model before it takes calls.
        validate: Called with each new model before the warm-up. If it raises or returns something false, the model is
            rejected.
        unload: Called with each model before it is dropped, and at interpreter exit.
        loading: How long a load may take, and how long a key waits after a failed one: ``Loading("2m",
            backoff=Backoff("5s"))``. Default: no limit, and ``Backoff("1s", "1m")``.
        name: For events, logs and errors. Default: the loader's name.

    Raises:
        InvalidOption: An option is invalid; the message gives its name, its value and the fix.
        NoMemoryLimit: ``max_memory`` is a percentage, and nothing limits this process.
    """
    from dataclasses import replace

    from modelguard.lifecycle import _guard_options, system

    _guard_options.check_loader(load, arguments=1)
    _misuse.check_keyword("max_memory", max_memory, others, fix='Write pool(load, max_memory="2 GB").')
    ttl, idle, source = _guard_options.policies_of_keys(reload_on)
    if max_models is not None:
        _units.whole_number(max_models, "max_models")
    title = _guard_options.loader_name(load) if name is None else name
    world = system.default()
    budget = _units.size_or_percentage(max_memory, "max_memory")
    common = _guard_options.GuardOptions[Any](
        load=lambda: None,  # replaced for each key
        swap=_guard_options.Swap(defer=0),
        warmup=warmup,
        validate=validate,
        unload=unload,
        loading=_guard_options.Loading() if loading is None else loading,
        name=title,
        # Without a hook nothing is closed, and two keys may well have one model.
        family=None if unload is None else KnownModels(),
    )

    def options_for(key: Any) -> GuardOptions[Any]:
        return replace(common, load=partial(load, key), name=_units.KeyedName(title, key))

    def make(key: Any, system: System) -> Engine[Any]:
        # Without ticks: a key whose load failed is tried again when somebody asks for it.
        system = replace(system, ticks=False) if system.ticks else system
        return Engine(options_for(key), system)

    options = PoolOptions(
        name=common.name,
        options_for=options_for,
        max_memory=_guard_options.memory_bound("max_memory", budget, world.limit()),
        max_models=math.inf if max_models is None else max_models,
        wait_timeout=_units.seconds(wait_timeout, "wait_timeout", zero=True),
        ttl=ttl,
        idle=math.inf if idle is None else idle.after,
        source=source,
    )
    return ModelPool(PoolEngine(make, options, world))


# Using a pool's models: leases by key, and functions whose arguments give the key.


class PoolLease(Generic[M]):
    """One use of a pool's model: ``with pool.lease(key) as model:`` or ``async with``. It can be used once."""

    def __init__(self, take: Callable[[], Lease[M]], atake: Callable[[], Awaitable[Lease[M]]]) -> None:
        self.take = take
        self.atake = atake
        self._lease: Lease[M] | None = None

    def __enter__(self) -> M:
        self._raise_on_second_use()
        self._lease = self.take()
        return self._lease.enter_taken()

    async def __aenter__(self) -> M:
        self._raise_on_second_use()
        self._lease = await self.atake()
        return self._lease.enter_taken()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._lease is not None:
            self._lease.end_with(error)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def _raise_on_second_use(self) -> None:
        if self._lease is not None:
            raise RuntimeError("a lease of a pool can be used once; call lease(key) again for another")


class PooledFunction(NamedTuple):
    """What there is to know of a function that a pool decorates, for who runs it elsewhere."""

    function: Callable[..., Any]  # what was decorated: it takes the model as its first argument
    options: PoolOptions  # the pool's
    key_of: Callable[[tuple[Any, ...], dict[str, Any]], Any]  # the key that a call with these arguments needs


class Keyed(Decorator[M]):
    def __init__(self, engine: PoolEngine[Any, M], key: str | Callable[..., Any]) -> None:
        if not isinstance(key, str) and not (callable(key) and _units.function_kind(key) == "function"):
            fix = "Name a parameter, key='voice', or give a function of the arguments."
            raise InvalidOption("key", key, why="must be a parameter's name or a plain function", fix=fix)
        self._engine = engine
        self._key = key

    def _decorate(self, function: Any) -> Any:
        check_function(plain_function(function), None)
        key = self._key
        key_of = self._by_name(function, key) if isinstance(key, str) else self._by_call(function, key)

        engine, wait = self._engine, self._engine.options.wait_timeout

        def take(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lease[M]:
            return engine.take(key_of(args, kwargs), wait)

        def atake(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Lease[M]]:
            return engine.atake(key_of(args, kwargs), wait)

        owner = PooledFunction(function, engine.options, key_of)
        return wrap(function, take=take, atake=atake, owner=owner)

    @staticmethod
    def _by_call(function: Any, key: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        signature = _units.signature_of(key)

        def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if signature is not None:
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as misfit:
                    name = plain_function(function).__qualname__
                    raise TypeError(
                        f"{name}(): its pool's key function{signature} gets all of the call's arguments: {misfit}"
                    ) from None
            return key(*args, **kwargs)

        return key_of

    @staticmethod
    def _by_name(function: Any, name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        signature = call_parameters(function)
        title = plain_function(function).__qualname__
        if name not in signature.parameters:
            names = ", ".join(map(repr, signature.parameters))
            fix = f"Choose one of {names}, or give a function." if names else f"Give {title}() that parameter."
            raise InvalidOption("key", name, why=f"is not a parameter of {title}() besides the model", fix=fix)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        simple = set(kinds) <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}
        all_given = len(kinds) if simple else -1
        at = list(signature.parameters).index(name)

        def key_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if len(args) == all_given and not kwargs:
                return args[at]  # to bind them takes ten times as long as the rest of a lease
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as misfit:
                raise TypeError(
                    f"{title}{signature}: {misfit}. The pool passes the model as the first argument: leave it out"
                ) from None
            bound.apply_defaults()
            return bound.arguments[name]

        return key_of


_public.set_module(globals(), "modelguard")
