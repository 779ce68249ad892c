"""``Isolated``: a function whose model lives in worker processes, forked from a mold."""

from __future__ import annotations

import asyncio
import functools
import math
import time
import weakref
from asyncio import get_running_loop
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from modelguard import _public, _units
from modelguard._entered import Entered
from modelguard._function_kinds import FunctionKind
from modelguard.errors import NotSupported, WouldDeadlock
from modelguard.isolation import _handler, _registry, _role
from modelguard.isolation._calls import Arguments, Caller
from modelguard.isolation._claims import Limits
from modelguard.isolation._mold_guard import MoldGuard
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation._process_scope import ProcessScope
from modelguard.isolation._scope import Scope
from modelguard.isolation._source import PoolSource, Source
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle import _in_thread, _misuse
from modelguard.serving import deadlines
from modelguard.serving._shared_threads import SharedThread

__all__ = ["Isolated"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)  # pyright knows a coroutine function by a type of its own
T = TypeVar("T")

_NO_ITEM = object()


class Isolated(Entered, Generic[P, R_co]):
    """A function that runs in worker processes. Made by :func:`isolate`; see there for the options.

    ``f(x)`` blocks the thread, ``await f.aio(x)`` does not block the event loop, ``f.submit(x)`` returns a future. A
    coroutine function is awaited as before, and generators are streamed. Nothing is started before the first call or
    :meth:`load`. It is a context manager, for ``with`` and ``async with``: it loads on entry and closes on exit, on the
    last one if there are several at once.
    """

    def __init__(self, function: Callable[P, R_co], options: IsolationOptions, source: Source | PoolSource) -> None:
        functools.update_wrapper(self, function)
        super().__init__()
        self._options = options
        self._source = source
        self._finalizer: Any = None
        self._start()
        _handler.mark(self, coroutine=options.kind == "coroutine")
        _registry.add(self)

    def _start(self, *, paused: bool = False) -> None:
        self._scope = _scope_of(self._options, self._source, paused=paused)
        source = self._source
        key_of = source.pooled.key_of if isinstance(source, PoolSource) else None
        self._caller = Caller(self._options, self._scope, key_of)
        # Without anybody who could call it, as after a module was reloaded, its processes have no purpose.
        self._finalizer = weakref.finalize(self, self._scope.end_at_once)

    # Calls

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the function in a worker. Blocks, unless it is a coroutine function.

        Raises:
            DeadlineExceeded: ``timeout`` has passed; the worker was killed. Or no worker became free within it.
            WorkerCrashed: The worker ended during the call.
            TransferRefused: The arguments or the result cannot be sent between processes.
            QueueFull, CircuitOpen: Refused at once; ``retry_after`` says when to try again.
            LoadFailed, Reloading: There is no mold.
            WouldDeadlock: On a running event loop (use :meth:`aio`), or while a mold imports the module.
            GuardClosed: After :meth:`close`.
            RemoteError: The function raised what cannot be pickled, or what would end an iteration or a task of the
                caller instead of reaching it, such as ``StopIteration``.
            Exception: What the function raised. Its ``__cause__`` has the traceback in the worker.
        """
        result: Any
        kind = self._options.kind
        if _role.current() != "owner":
            result = self._call_inside((args, kwargs))
        elif kind == "function":
            if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises where there is none
                why = "the call would block the running event loop"
                raise WouldDeadlock(self.name, why=why, fix="Write: await f.aio(...).")
            result = self._caller.call((args, kwargs), _limits())
        elif kind == "coroutine":
            result = self._await((args, kwargs))
        elif kind == "generator":
            result = self._caller.stream((args, kwargs), _limits())
        else:
            result = self._stream((args, kwargs))
        return result  # type: ignore[no-any-return]

    @overload
    async def aio(self: Isolated[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def aio(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    async def aio(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compute one call without blocking the event loop. Arguments and errors are those of a call.

        Cancelling the task answers it at once, and takes the call out of the queue; one that a worker has begun runs to
        its end there. A call that waits holds no thread.
        """
        return await self._await((args, kwargs))

    @overload
    def submit(self: Isolated[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def submit(self, /, *args: P.args, **kwargs: P.kwargs) -> Future[R_co]: ...
    def submit(self, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin one call and return at once. Arguments and errors are those of a call.

        Cancelling the future takes the call out of the queue; one that a worker has begun runs to its end.
        """
        return self._submit((args, kwargs), awaited=False)

    def _submit(self, arguments: Arguments, *, awaited: bool) -> Future[Any]:
        if _role.current() != "owner":
            self._check_inside()
            reason = "a worker runs one call at a time. Call the function itself, or await its aio()"
            raise NotSupported(f"{self.name}.submit() in its own worker", reason=reason)
        self._refuse_streams()
        return self._caller.submit(arguments, _limits(), awaited=awaited)

    async def _await(self, arguments: Arguments) -> Any:
        if _role.current() != "owner":
            self._refuse_streams()
            result = self._call_inside(arguments)
            return await result if self._options.kind == "coroutine" else result
        _in_thread.require_asyncio("awaiting an isolated function")
        return await asyncio.wrap_future(self._submit(arguments, awaited=True), loop=get_running_loop())

    async def _stream(self, arguments: Arguments) -> AsyncIterator[Any]:
        _in_thread.require_asyncio("awaiting an isolated function")
        opening = step = self._caller.open(arguments, _limits())
        try:
            items = await asyncio.wrap_future(opening)
            while True:
                step = _in_thread.start(functools.partial(next, items, _NO_ITEM), self.name, _start_thread)
                item = await asyncio.wrap_future(step)
                if item is _NO_ITEM:
                    return
                yield item
        except asyncio.CancelledError:
            _close_after(step, opening)  # the step that a worker has begun runs to its end
            raise
        except BaseException:  # left early, or an error was thrown in
            await asyncio.wrap_future(_close_after(step, opening))
            raise

    def _refuse_streams(self) -> None:
        if "generator" in self._options.kind:
            raise TypeError(f"{self.name}() is a generator function: iterate over a call of it")

    def _call_inside(self, arguments: Arguments) -> Any:
        """In a worker: a function may call itself, and runs on the model that is already there."""
        self._check_inside()
        args, kwargs = arguments
        return _role.here()(*args, **kwargs)

    def _check_inside(self) -> None:
        """Check that this is a worker of this function.

        Raises:
            WouldDeadlock, NotSupported: It is not.
        """
        if _role.current() == "importing":
            why = "it is called while a mold imports the module"
            fix = "Put the calls of a script under: if __name__ == '__main__':"
            raise WouldDeadlock(self.name, why=why, fix=fix)
        if _role.target() is not self.isolated_function:
            reason = "a worker has only the model of its own function, and starts no workers of others"
            raise NotSupported(f"{self.name}() inside an isolated function", reason=reason)

    # Its state

    @property
    def name(self) -> str:
        """Its name in events and errors."""
        return self._options.name

    @property
    def function_kind(self) -> FunctionKind:
        """What a call gives: ``"function"``, ``"coroutine"``, ``"generator"`` or ``"async generator"``."""
        return self._options.kind

    @property
    def isolated_function(self) -> Callable[P, R_co]:
        """What runs in the workers: the function below ``@isolate``."""
        return self._source.function

    def source_for(self, key: Any) -> Source:
        """In a mold: what its workers run, and the guard that lends the model, or the pool's model of ``key``."""
        return self._source.for_key(key)

    @property
    def ready(self) -> bool:
        """Whether a worker can answer, or ``Idle`` has ended it or the mold and the next call starts another one.

        This is what a readiness probe should report.
        """
        return self._scope.ready

    @property
    def version(self) -> str | None:
        """The version of the model in the current mold, as its loader gave it; None if it gave none."""
        return self._scope.version

    def status(self) -> IsolationStatus:
        """Its state, its processes and its counts."""
        return self._scope.status(len(self._scope.claims))

    def __repr__(self) -> str:
        return f"<Isolated {self.name!r}>"

    # Its molds

    def load(self, timeout: _units.Duration | None = None) -> None:
        """Start the mold and its workers unless they run. Blocks.

        Raises:
            LoadFailed: The mold could not load the model, or cannot be forked.
            Reloading: ``timeout`` has passed.
            GuardClosed: After :meth:`close`.
        """
        self._scope.load(timeout)

    async def aload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`load` for coroutines; does not block the event loop."""
        await self._scope.aload(timeout)

    def reload(self, *, wait: bool = True, timeout: _units.Duration | None = None) -> None:
        """Make a new mold. The old one serves until the new one and its workers are ready, and ends then.

        Over a pool the molds of all keys take no new calls and end after those that run; the next call with a key
        makes a new one. There is nothing to wait for then.

        Args:
            wait: Return when the new mold takes calls; if False, return at once.
            timeout: How long to wait at most.

        Raises:
            LoadFailed: The new mold failed. The old one serves on.
            Reloading: ``timeout`` has passed. The reload goes on.
            GuardClosed: After :meth:`close`.
            InvalidOption: ``wait`` is not a bool.
        """
        _misuse.check_wait(wait)
        self._scope.reload(wait=wait, timeout=timeout)

    async def areload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`reload` for coroutines; does not block the event loop."""
        await self._scope.areload(timeout)

    def unload(self, timeout: _units.Duration | None = None) -> None:
        """End the mold and its workers until the next call, which starts them again. Blocks.

        It waits for the calls that run, up to the guard's ``drain_timeout``, and for a load that is under way. Does
        nothing if there is no mold. With ``scope="host"`` it ends the mold of all processes, and over a pool those of
        all keys.

        Args:
            timeout: How long to wait at most. Default: until the processes have ended.

        Raises:
            Reloading: ``timeout`` has passed. An end that has begun goes on.
            GuardClosed: After :meth:`close`.
            WouldDeadlock: On a running event loop (use :meth:`aunload`).
        """
        self._scope.unload(timeout)

    async def aunload(self, timeout: _units.Duration | None = None) -> None:
        """:meth:`unload` for coroutines; does not block the event loop."""
        await self._scope.aunload(timeout)

    def pause(self) -> None:
        """Let policies replace no mold and no worker until :meth:`resume`, as during an incident.

        What they would have done waits (``status().postponed``), and each policy that waits is reported once
        (``ReloadPostponed``). Nor does ``refork_after`` do anything. A new mold that already loads still takes over.
        Calls, ``timeout``, :meth:`load`, :meth:`reload`, :meth:`unload` and :meth:`close` work as usual, and workers
        and molds that have died are replaced. Pausing twice is the same as once.

        It holds in this process and in children that are forked from now on; with ``scope="host"`` in all processes
        that share the mold, and any of them can resume. There it asks the broker, which answers at once.

        Raises:
            LoadFailed: ``scope="host"``, and the broker has not answered within five seconds.
        """
        self._scope.set_paused(paused=True)

    def resume(self) -> None:
        """End :meth:`pause`, however often it was called. What is due by then starts within about a second.

        Raises:
            LoadFailed: As :meth:`pause`.
        """
        self._scope.set_paused(paused=False)

    def rollback(self) -> None:
        """Go back to the mold that the current one has replaced, as :meth:`ModelGuard.rollback` does, at once.

        Needs a guard with ``keep_previous=True``: the previous mold and its workers stay alive, and take their memory.

        Raises:
            NoPreviousModel: None is kept, or its processes have ended.
            GuardClosed: After :meth:`close`.
            NotSupported: The function's model is one of a pool.
        """
        self._scope.rollback()

    def close(self) -> None:
        """Refuse further calls, wait for those that run up to the guard's ``drain_timeout``, end all processes.

        Calls by :meth:`aio` and :meth:`submit` that wait for a worker get ``GuardClosed``.
        """
        self._scope.claims.close()
        self._scope.close()

    async def aclose(self) -> None:
        """:meth:`close` for coroutines; does not block the event loop."""
        self._scope.claims.close()
        await self._scope.aclose()

    def _reopen(self) -> None:
        self._scope.reopen()

    def _open(self) -> None:
        self._reopen()
        self.load()

    async def _aopen(self) -> None:
        self._reopen()
        await self.aload()

    def refuse_calls(self) -> None:
        """This process exits, and ends its molds: raise ``GuardClosed`` from now on. Waits for nothing."""
        self._scope.claims.close()
        self._scope.refuse_calls()

    # Processes and copies

    def renew_in_child(self) -> None:
        """In a forked child of this process: start again, since the parent's workers answer the parent."""
        self._finalizer.detach()
        self._scope.abandon()
        self._start(paused=self._scope.paused)

    # By reference, as functions are pickled and copied.
    def __reduce__(self) -> Any:
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


def _start_thread(work: Callable[[], None], name: str) -> None:
    SharedThread(work, f"modelguard-isolated-{name}").start()


def _close_after(step: Future[Any], opening: Future[Any]) -> Future[None]:
    """Close a stream in a thread, after the step that still runs; the future tells when it is closed."""
    closed: Future[None] = _in_thread.promise()

    def close() -> None:
        if not opening.cancelled() and opening.exception() is None:
            opening.result().close()

    step.add_done_callback(lambda _: _in_thread.start(close, "close", _start_thread, closed))
    return closed


def _scope_of(options: IsolationOptions, source: Source | PoolSource, *, paused: bool) -> Scope:
    if isinstance(source, PoolSource):
        from modelguard.isolation._pool_scope import PoolScope

        return PoolScope(options, source, paused=paused)
    guard_options = source.guard.engine.guard.options
    if options.scope == "process":
        return ProcessScope(options, MoldGuard(options, guard_options, paused=paused))
    from modelguard.isolation._host_scope import HostScope

    return HostScope(options, guard_options, paused=paused)


def _limits() -> Limits:
    now, left = time.monotonic(), deadlines.left()
    return Limits(now, math.inf if left is None else now + left)


_public.set_module(globals(), "modelguard")
