"""A lease, which is one use of a model, and what holds one: decorated functions, and results that work later."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Token
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import wrapt

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import _misuse
from modelguard.lifecycle._engine import EAGER, Engine, Wrapper, is_lazy
from modelguard.lifecycle._misuse import Misused, first_name, plain_function, receivers, takes_positional, without_model
from modelguard.lifecycle._state import Enclosing, Generation
from modelguard.runtime import waiting

if TYPE_CHECKING:
    from modelguard.lifecycle._replay import RecordedCalls

M = TypeVar("M")
T = TypeVar("T")


class Lease(Generic[M]):
    """One use of a guard's model: ``with guard.lease() as model:`` or ``async with guard.lease() as model:``.

    The model stays loaded until the block ends. A lease can be used once. Guarded functions that are called inside the
    block run on the same generation.
    """

    __slots__ = ("__weakref__", "_engine", "_entered", "_epoch", "_taken", "_thread", "_timeout", "_token")

    def __init__(self, engine: Engine[M], timeout: float | None = None) -> None:
        self._engine = engine
        self._timeout = timeout
        self._taken: Enclosing = []
        self._token: Token[Enclosing | None] | None = None
        self._entered = False

    @classmethod
    def of(cls, engine: Engine[M], generation: Generation[M]) -> Lease[M]:
        """Take another lease on a generation that the caller has one on."""
        lease = cls(engine)
        taken = lease.slot()
        taken[:] = generation, 1
        generation.leases.append(None)
        return lease

    @classmethod
    def take(cls, engine: Engine[M], timeout: float | None = None) -> Lease[M]:
        lease = cls(engine, timeout)
        lease._take_or_wait()
        return lease

    @classmethod
    def take_now(cls, engine: Engine[M]) -> Lease[M] | None:
        """Take a lease if that needs no waiting; None if it does."""
        lease = cls(engine)
        return None if engine.state.take_lease(lease.slot()) is None else lease

    @classmethod
    async def atake(cls, engine: Engine[M], timeout: float | None = None) -> Lease[M]:
        lease = cls(engine, timeout)
        await lease._atake_or_wait()
        return lease

    def _take_or_wait(self) -> None:
        engine, mine = self._engine, self.slot()
        if engine.state.take_lease(mine) is None:
            engine.wait_for_lease(mine, self._timeout)

    async def _atake_or_wait(self) -> None:
        engine, mine = self._engine, self.slot()
        if engine.state.take_lease(mine) is None:
            engine.state.raise_if_closed()  # whatever the loop
            await waiting.suspend(engine.until_leased(mine, self._timeout))

    def slot(self) -> Enclosing:
        """What this thread is about to take."""
        if self._entered:
            raise RuntimeError(
                f"a lease of guard {self._engine.name!r} can be used once; call lease() again for another"
            )
        if self._taken:
            self.drop()  # a signal handler has raised as it was entered before
        self._thread = threading.get_ident()
        self._epoch = self._engine.state.epoch
        return self._taken

    if not TYPE_CHECKING:  # checkers are to complain about unknown attributes

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a lease has no attribute {name!r}: it is not the model. Write: with guard.lease() as model: "
                f"model.{name}"
            )

    def __enter__(self) -> M:
        self._take_or_wait()
        return self.enter_taken()

    async def __aenter__(self) -> M:
        await self._atake_or_wait()
        return self.enter_taken()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_with(error)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_with(error)

    def __del__(self) -> None:
        # The last resort: a generator, coroutine or lazy result that was dropped without being closed, or a signal
        # handler that has raised on the way.
        if getattr(self, "_taken", None):
            self.drop()

    def enter_taken(self) -> M:
        """Run what this context calls from now on on this lease."""
        state, generation = self._engine.state, self._taken[0]
        self._entered = True
        self._taken[1] = state.depth(generation)
        self._token = state.enclosing.set(self._taken)
        return generation.model  # type: ignore[no-any-return] # it is one of this guard's

    @property
    def model(self) -> M:
        """The model, while the lease lasts.

        Raises:
            RuntimeError: The lease has not begun, or has ended.
        """
        generation = self.generation
        if generation is None:
            raise RuntimeError(
                f"a lease of guard {self._engine.name!r} has a model only inside its block. Write: with guard.lease() "
                "as model: ..."
            )
        return generation.model

    @property
    def generation(self) -> Generation[M] | None:
        """The generation that it lends; None before and after its use."""
        taken = tuple(self._taken)  # one read: another thread may end it
        return taken[0] if taken else None

    def step(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run one step of lazy work; guarded functions that it calls run on this lease's generation."""
        generation = self.generation
        if generation is None:
            return work(*args, **kwargs)
        state = self._engine.state
        self._thread = threading.get_ident()
        enclosing = [generation, state.depth(generation)]
        token = None
        try:
            token = state.enclosing.set(enclosing)
            return work(*args, **kwargs)
        finally:
            del enclosing[:]  # before any call of a function, in which a signal handler may raise
            if token is not None:
                state.enclosing.reset(token)

    async def astep(self, work: Awaitable[T]) -> T:
        """Await one step of lazy work."""
        generation = self.generation
        if generation is None:
            return await work
        state = self._engine.state
        enclosing = [generation, state.depth(generation)]
        token = None
        try:
            token = state.enclosing.set(enclosing)
            return await work
        finally:
            del enclosing[:]
            if token is not None:
                with suppress(ValueError):  # dropped half way, and finalized in another context
                    state.enclosing.reset(token)

    def end_with(self, error: BaseException | None) -> None:
        if isinstance(error, GeneratorExit):  # of a generator that may have been dropped
            self.drop()
        elif isinstance(error, Misused):
            self.end(failed=None)
            raise error.error from None
        elif isinstance(error, Exception):
            try:
                self.repair(error)
            finally:
                self.end(failed=True)
        else:
            self.end(failed=False if error is None else None)

    def repair(self, error: Exception, *, last: bool = False) -> bool:
        """Do what a failed call needs; whether it may run again on this lease. It must be ended in any case.

        Raises:
            CudaAfterFork: CUDA cannot be used in this process.
        """
        generation = self.generation
        return generation is not None and self._engine.repair(generation, error, last=last)

    def end(self, *, failed: bool | None) -> None:
        """Return the lease; ``failed`` is None if nothing is known of the model."""
        generation = self._give_up()
        if generation is not None and self._engine.state.count_use(generation, failed):
            self._engine.after_call(generation)

    def drop(self) -> None:
        """Return the lease where the garbage collector may be at work: in any thread, which may hold any lock.

        So no policy is asked, and no hook called, which may wait for a lock that this thread holds: the next call
        asks, or the ticker.
        """
        generation, engine = self._give_up(), self._engine
        if generation is not None and engine.state.count_use(generation, False):  # noqa: FBT003 - by position, it is the hot path
            engine.after_dropped(generation)

    def _give_up(self) -> Generation[M] | None:
        """Hold the generation no longer; returns it if the lease counts in this process."""
        if not (taken := self._taken):
            return None
        state, generation = self._engine.state, taken[0]
        counts = self._epoch == state.epoch
        del taken[:]
        if counts:
            generation.leases.pop()
        token, self._token = self._token, None
        if token is not None:
            try:
                state.enclosing.reset(token)
            except ValueError:  # ended in another context than it began in, as dependency injectors do
                token = None
        if not counts and token is not None and self._thread == threading.get_ident():
            generation.leases.pop()  # after a fork only the leases of the forking thread have been carried over
            counts = True
        return generation if counts else None

    def detach(self) -> None:
        """Let it outlive the context that it was taken in: a child that is forked meanwhile takes it again."""
        self._engine.state.held_leases.add(self)

    def held_here(self) -> Generation[M] | None:
        """Its generation, if this thread last used it; None otherwise and after its end."""
        return self.generation if self._thread == threading.get_ident() else None

    def survives_fork(self) -> bool:
        """Whether a child that was just forked still uses it: the forking thread holds it, outside of any context."""
        return self._token is None and self.held_here() is not None

    def retake_in_child(self) -> None:
        if (generation := self.generation) is not None:
            self._epoch = self._engine.state.epoch
            generation.leases.append(None)


# Results that do their work after the call has returned: generators, iterators, coroutines. They keep the lease.


def keep(lease: Lease[Any], result: Any) -> Any:
    """Let a lazy result keep its lease until it ends, is closed, or is dropped."""
    lease.detach()
    if isinstance(result, types.GeneratorType):
        driven = drive(lambda: lease, lambda _: result, taken=True)
        next(driven)
        return driven
    if isinstance(result, types.AsyncGeneratorType):
        return adrive(lambda: lease, lambda _: result)
    if isinstance(result, types.CoroutineType):
        return finish(lease, result)
    if hasattr(result, "add_done_callback"):  # a future or task: returned as it is
        result.add_done_callback(lambda _: lease.end(failed=False))
        return result
    parts = tuple(part for name, part in _PARTS.items() if hasattr(type(result), name))
    return _leased_kind(parts)(result, lease)


def drive(
    take: Callable[[], Lease[Any]], start: Callable[[Any], Generator[Any, Any, Any]], *, taken: bool = False
) -> Generator[Any, Any, Any]:
    """Run a generator on one lease, taken at its first step; each step runs inside the lease's context.

    A generator shares its caller's context, so what is set for a step must be undone before it yields. That is
    why this spells out what ``yield from`` would do (PEP 380). With a lease that was taken it has a step more, before
    all others: one that is closed before its first step runs nothing, and from CPython 3.12 on keeps its variables.
    """
    lease = take()
    lease.detach()
    try:
        value: Any = (yield) if taken else None
        inner = lease.step(start, lease.model)
        step: Any = inner.send
        while True:
            try:
                item = lease.step(step, value)
            except StopIteration as stop:
                return stop.value
            try:
                step, value = inner.send, (yield item)
            except GeneratorExit:
                lease.step(inner.close)
                raise
            except BaseException as error:  # noqa: BLE001 - it is the inner generator's to handle
                step, value = inner.throw, error
    except BaseException as error:
        lease.end_with(error)
        raise
    finally:
        lease.end(failed=False)


async def adrive(
    take: Callable[[], Lease[Any] | Awaitable[Lease[Any]]], start: Callable[[Any], AsyncGenerator[Any, Any]]
) -> AsyncGenerator[Any, Any]:
    taken = take()
    lease = taken if isinstance(taken, Lease) else await taken
    lease.detach()
    try:
        inner = lease.step(start, lease.model)
        step: Any = inner.asend
        value: Any = None
        while True:
            try:
                item = await lease.astep(step(value))
            except StopAsyncIteration:
                return
            try:
                step, value = inner.asend, (yield item)
            except GeneratorExit:
                await lease.astep(inner.aclose())
                lease.end(failed=False)
                raise
            except BaseException as error:  # noqa: BLE001 - it is the inner generator's to handle
                step, value = inner.athrow, error
    except BaseException as error:
        lease.end_with(error)
        raise
    finally:
        lease.end(failed=False)


async def finish(lease: Lease[Any], coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on a lease, and end that too."""
    lease.enter_taken()
    try:
        return await coroutine
    except BaseException as error:
        lease.end_with(error)
        raise
    finally:
        lease.end(failed=False)


class _Leased(wrapt.ObjectProxy[Any]):
    """A lazy result, otherwise untouched, and the lease that it keeps."""

    def __init__(self, wrapped: Any, lease: Lease[Any]) -> None:
        super().__init__(wrapped)
        self._self_lease = lease


class _LeasedIterator(_Leased):
    """An iterator such as ``map``, ``islice`` or a file, otherwise untouched, that ends its lease with itself."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return self._self_lease.step(self.__wrapped__.__next__)
        except BaseException as error:
            self._self_lease.end(failed=isinstance(error, Exception) and not isinstance(error, StopIteration))
            raise

    def close(self) -> None:
        """Close what can be closed; servers call this on any iterator that they stop reading."""
        try:
            if hasattr(self.__wrapped__, "close"):
                self._self_lease.step(self.__wrapped__.close)
        finally:
            self._self_lease.end(failed=False)

    def __enter__(self) -> Any:
        entered = self.__wrapped__.__enter__()
        return self if entered is self.__wrapped__ else entered

    def __exit__(self, *exc_info: object) -> Any:
        try:
            return self.__wrapped__.__exit__(*exc_info)
        finally:
            self._self_lease.end(failed=False)


class _LeasedAsyncIterator(_Leased):
    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._self_lease.astep(self.__wrapped__.__anext__())
        except BaseException as error:
            self._self_lease.end(failed=isinstance(error, Exception) and not isinstance(error, StopAsyncIteration))
            raise

    async def aclose(self) -> None:
        try:
            if hasattr(self.__wrapped__, "aclose"):
                await self._self_lease.astep(self.__wrapped__.aclose())
        finally:
            self._self_lease.end(failed=False)


class _LeasedAwaitable(_Leased):
    """An iterator that can be awaited as well, as cursors of databases can: for rows, or for itself once it is open."""

    def __await__(self) -> Any:
        try:
            result = yield from self._self_lease.astep(self.__wrapped__).__await__()
        except BaseException as error:
            self._self_lease.end_with(error)
            raise
        return self if result is self.__wrapped__ else result


#: By the method that a result must have. It may be several of these at once.
_PARTS = {"__next__": _LeasedIterator, "__anext__": _LeasedAsyncIterator, "__await__": _LeasedAwaitable}


@cache
def _leased_kind(parts: tuple[type[_Leased], ...]) -> type[_Leased]:
    return type("_LeasedResult", parts, {})


#: Takes a lease for a call with these arguments; for a coroutine at once, or after a wait.
Take = Callable[[tuple[Any, ...], dict[str, Any]], Lease[Any]]
AsyncTake = Callable[[tuple[Any, ...], dict[str, Any]], "Lease[Any] | Awaitable[Lease[Any]]"]


class BoundByReference(wrapt.BoundFunctionWrapper[..., Any]):
    """A method of a decorated function, which is pickled by reference too."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self.__wrapped__, types.MethodType):
            return getattr, (self.__wrapped__.__self__, self.__name__)
        from pkgutil import resolve_name

        # By reference, not by name alone: each access through the class makes a new one of these.
        return resolve_name, (f"{self.__module__}:{self.__qualname__}",)


class ByReference(wrapt.FunctionWrapper[..., Any]):
    """A decorated function, pickled and copied by reference, so that spawned processes find it by its name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str(self.__qualname__)

    def __copy__(self) -> Any:
        return self


def _function_of_method(method: Any) -> Any:
    """The function inside a method that was bound before or after it was decorated; inspect asks for it."""
    return _MethodFunction(method.__wrapped__.__func__)


def _annotations_without_model(function: Any) -> dict[str, Any]:
    """Those of the signature: ``functools.singledispatch`` registers a function for the type of its first one."""
    written, seen = function.__wrapped__.__annotations__, {*function.__signature__.parameters, "return"}
    return {name: hint for name, hint in written.items() if name in seen}


class _MethodType(type(BoundByReference)):  # type: ignore[misc] # wrapt has a metaclass where its extension is missing
    """Makes a method anew by its type, as ``MethodType(function, receiver)``, which ``weakref.WeakMethod`` does."""

    def __call__(cls, function: Any, receiver: Any, /) -> Any:
        return function.__get__(receiver, receiver if isinstance(function, classmethod) else type(receiver))


class _BoundGuarded(BoundByReference, metaclass=_MethodType):
    __annotations__ = property(_annotations_without_model)  # pyright: ignore[reportAssignmentType] - as wrapt does

    @property
    def __func__(self) -> Any:
        parent = self._self_parent  # always the same object: signals know a receiver by a weak reference to it
        return parent if parent._self_receivers else _function_of_method(self)  # noqa: SLF001 - as below

    @property
    def __signature__(self) -> inspect.Signature:
        bound = isinstance(self.__wrapped__, types.MethodType) or self._self_binding == "staticmethod"
        at = 0 if bound else self._self_parent._self_receivers  # noqa: SLF001 - of its own kind
        return without_model(self.__wrapped__, at=at)


class Guarded(ByReference):
    """A decorated function: same name, documentation and signature, without the model."""

    # Past the call of the metaclass, which would take as long as the rest.
    __bound_function_wrapper__ = staticmethod(partial(type.__call__, _BoundGuarded))  # type: ignore[assignment]

    def __init__(self, wrapped: Any, wrapper: Wrapper, owner: object) -> None:
        super().__init__(wrapped, wrapper)
        self._self_guard = owner
        self._self_receivers = receivers(wrapped)
        function = plain_function(wrapped)
        method = self._self_receivers
        self._self_call = partial(_unbound, wrapper, function) if method else partial(wrapper, function, None)
        # Frameworks such as Litestar read the hints of an instance's `__call__` if that is a method, as the one below
        # is. This attribute is for them alone; calls look `__call__` up in the class.
        self.__call__ = partial(_call, self._self_call)  # type: ignore[method-assign]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._self_call(args, kwargs)

    __func__ = property(_function_of_method)
    __annotations__ = property(_annotations_without_model)  # pyright: ignore[reportAssignmentType] - as wrapt does

    @property
    def __signature__(self) -> inspect.Signature:
        return without_model(plain_function(self.__wrapped__), at=self._self_receivers)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    if not TYPE_CHECKING:  # checkers are to complain about unknown attributes

        def __getattr__(self, name: str) -> Any:
            try:
                return getattr(self.__wrapped__, name)
            except AttributeError:
                owner = self._self_guard
                if name.startswith("_") or getattr(owner, "_what", "") != "guard" or not hasattr(type(owner), name):
                    raise
                function = getattr(self.__wrapped__, "__name__", "function")
                said = f"{function}() has no attribute {name!r}, its guard has: write guard_of({function}).{name}"
                raise AttributeError(said, name=name, obj=self) from None


class _MethodFunction(wrapt.CallableObjectProxy[Any]):
    """The function inside a bound method, as ``inspect.signature`` asks for it."""

    @property
    def __signature__(self) -> inspect.Signature:
        return without_model(self.__wrapped__, at=1)


def decorate(engine: Engine[Any], function: Any, *, owner: object) -> Guarded:
    return wrap(
        function,
        call=engine.plain_call(lambda generation, result: keep(Lease.of(engine, generation), result)),
        take=lambda _args, _kwargs: Lease.take(engine),
        atake=lambda _args, _kwargs: Lease.take_now(engine) or Lease.atake(engine),
        owner=owner,
        recorded=engine.recorded,
    )


def wrap(
    function: Any,
    *,
    take: Take,
    atake: AsyncTake,
    owner: object,
    call: Wrapper | None = None,
    recorded: RecordedCalls | None = None,
) -> Guarded:
    """Wrap ``function`` by its kind.

    Args:
        function: A function, method, class or static method, of any kind.
        take: Takes the lease of a plain function or a generator.
        atake: Takes the lease of a coroutine or an asynchronous generator; an awaitable if it has to wait.
        owner: What :func:`owner_of` returns.
        call: Runs a plain function, if there is a faster way than with a lease.
        recorded: Records the calls; None if nobody asks for that, and then it costs nothing.
    """
    plain = plain_function(function)
    check_function(plain, owner)
    call = _plain(take) if call is None else call
    if inspect.iscoroutinefunction(plain):
        call = _coroutine(atake)
    elif inspect.isasyncgenfunction(plain):
        call = _generator(adrive, atake)
    elif inspect.isgeneratorfunction(plain):
        call = _generator(drive, take)
    elif recorded is not None:
        call = recorded.exclusion.taking_turns(call)
    if recorded is not None:
        call = recorded.recording(call)
    return Guarded(function, call, owner)


def owner_of(function: object) -> object:
    parent = getattr(function, "_self_parent", None)  # if it is bound to an instance
    return getattr(function if parent is None else parent, "_self_guard", None)


def _call(run: Callable[[tuple[Any, ...], dict[str, Any]], Any], /, *args: Any, **kwargs: Any) -> Any:
    return run(args, kwargs)


def _unbound(wrapper: Wrapper, wrapped: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method's function that wrapt has not bound, so its instance or class comes first.

    That is how another decorator above calls it (``functools.lru_cache``, ``property``, a closure of your own), and
    since Python 3.13 a ``classmethod``.
    """
    if args:
        receiver, *rest = args
        return wrapper(types.MethodType(wrapped, receiver), receiver, tuple(rest), kwargs)
    first = first_name(wrapped)
    if first in kwargs:
        receiver = kwargs.pop(first)
        return wrapper(types.MethodType(wrapped, receiver), receiver, (), kwargs)
    raise TypeError(f"{wrapped.__qualname__}() is a method: call it on an instance, or pass one as its first argument")


# How the other kinds of functions hold their lease


def _plain(take: Take) -> Wrapper:
    def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lease = take(args, kwargs)
        try:
            result = lease.step(wrapped, lease.model, *args, **kwargs)
        except TypeError as error:  # written out, as called() would be a frame more for each call
            misuse = _misuse.wrong_arguments(error, wrapped, args, kwargs, callers=2)
            lease.end_with(error if misuse is None else _misuse.Misused(misuse))
            raise
        except BaseException as error:
            lease.end_with(error)
            raise
        if (kind := type(result)) not in EAGER and is_lazy(kind):
            return keep(lease, result)
        lease.end(failed=False)
        return result

    return call


def _coroutine(atake: AsyncTake) -> Wrapper:
    # Written out instead of using finish(): each coroutine less is a tenth of the cost.
    async def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken = atake(args, kwargs)
        lease = taken if isinstance(taken, Lease) else await taken
        failed: bool | None = None
        try:
            result = await wrapped(lease.enter_taken(), *args, **kwargs)
        except TypeError as error:
            if (misuse := _misuse.wrong_arguments(error, wrapped, args, kwargs)) is not None:
                raise misuse from None
            failed = True
            raise
        except GeneratorExit:  # the coroutine was dropped
            lease.drop()
            raise
        except Exception as error:
            failed = True
            if not lease.repair(error):
                raise
            try:
                result = await wrapped(lease.model, *args, **kwargs)
            except Exception as second:
                lease.repair(second, last=True)
                raise
            failed = False
            return result
        else:
            failed = False
            return result
        finally:
            lease.end(failed=failed)

    return call


def _generator(run: Callable[..., Any], take: Take | AsyncTake) -> Wrapper:
    """``run``: :func:`drive` or :func:`adrive`."""

    def call(wrapped: Callable[..., Any], _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(lambda: take(args, kwargs), lambda model: _misuse.called(wrapped, model, args, kwargs))

    return call


def check_function(plain: Any, owner: object) -> None:
    """Check that a guard can decorate ``plain``."""
    why = fix = ""
    if not callable(plain) or isinstance(plain, type):
        why = f"must be a function, not {_units.kind_of(plain)}"
        fix = "Decorate a function or a method, or use guard.lease() where the model is needed."
    elif hasattr(plain, "aio") and hasattr(plain, "submit"):
        why = "is a batched or isolated function, whose callers pass no model"
        fix = "Put @batched(...) or @isolate(...) above the guard's decorator: the guard belongs next to the def."
    elif owner is not None and isinstance(plain, Guarded) and owner_of(plain) is owner:
        why = "is decorated by this guard already"
        fix = "Decorate it once."
    elif not takes_positional(plain):
        why = "has no positional parameter to take the model"
        fix = "Let its first parameter (after self) be the model: def predict(model, text): ..."
    if why:
        raise InvalidOption("function", plain, why=why, fix=fix)
