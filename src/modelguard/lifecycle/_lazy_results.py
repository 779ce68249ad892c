"""Results that do their work after the call has returned: generators, iterators, coroutines. They keep the lease."""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

import wrapt

from modelguard.lifecycle._leases import Lease

if TYPE_CHECKING:  # generic for the checkers only
    _Proxy = wrapt.ObjectProxy[Any]
else:
    _Proxy = wrapt.ObjectProxy


def is_lazy(kind: type) -> bool:
    """Whether a result of this type does its work later."""
    if hasattr(kind, "__next__") or hasattr(kind, "__anext__"):
        return True
    return kind is types.CoroutineType or hasattr(kind, "add_done_callback")


def keep(lease: Lease[Any], result: Any) -> Any:
    """Let a lazy result keep its lease until it ends, is closed, or is dropped."""
    lease.detach()
    if isinstance(result, types.GeneratorType):
        return _LeasedGenerator(drive(lambda: lease, lambda _: result), lease)
    if isinstance(result, types.AsyncGeneratorType):
        return adrive(lambda: lease, lambda _: result)
    if isinstance(result, types.CoroutineType):
        return finish(lease, result)
    if hasattr(result, "add_done_callback"):  # a future or task: returned as it is
        result.add_done_callback(lambda _: lease.end(failed=False))
        return result
    return (_LeasedIterator if hasattr(type(result), "__next__") else _LeasedAsyncIterator)(result, lease)


def drive(take: Callable[[], Lease[Any]], start: Callable[[Any], Generator[Any, Any, Any]]) -> Generator[Any, Any, Any]:
    """Run a generator on one lease, taken at its first step; each step runs inside the lease's context.

    A generator shares its caller's context, so what is set for a step must be undone before it yields. That is
    why this spells out what ``yield from`` would do (PEP 380).
    """
    lease = take()
    lease.detach()
    failed = False
    try:
        inner = lease.step(start, lease.model)
        step: Any = inner.send
        value: Any = None
        while True:
            try:
                item = lease.step(step, value)
            except StopIteration as stop:
                return stop.value
            try:
                step, value = inner.send, (yield item)
            except GeneratorExit:
                lease.step(inner.close)
                lease.drop()
                raise
            except BaseException as error:  # noqa: BLE001 - it is the inner generator's to handle
                step, value = inner.throw, error
    except Exception as error:
        failed = True
        lease.repair(error)
        raise
    finally:
        lease.end(failed=failed)


async def adrive(
    take: Callable[[], Lease[Any] | Awaitable[Lease[Any]]], start: Callable[[Any], AsyncGenerator[Any, Any]]
) -> AsyncGenerator[Any, Any]:
    """:func:`drive` for asynchronous generators."""
    taken = take()
    lease = taken if isinstance(taken, Lease) else await taken
    lease.detach()
    failed = False
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
                raise
            except BaseException as error:  # noqa: BLE001 - it is the inner generator's to handle
                step, value = inner.athrow, error
    except Exception as error:
        failed = True
        lease.repair(error)
        raise
    finally:
        lease.end(failed=failed)


async def finish(lease: Lease[Any], coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on a lease, and end that too."""
    failed = False
    lease.enter_taken()
    try:
        return await coroutine
    except GeneratorExit:
        lease.drop()
        raise
    except Exception as error:
        failed = True
        lease.repair(error)
        raise
    finally:
        lease.end(failed=failed)


class _Leased(_Proxy):
    """A lazy result, otherwise untouched, and the lease that it keeps."""

    def __init__(self, wrapped: Any, lease: Lease[Any]) -> None:
        super().__init__(wrapped)
        self._self_lease = lease


class _LeasedGenerator(_Leased):
    """A generator run by :func:`drive`. If it is closed before it has begun, none of that runs to end its lease."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self.__wrapped__)

    def close(self) -> None:
        self.__wrapped__.close()
        self._self_lease.end(failed=False)


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
    """The same for asynchronous iterators."""

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._self_lease.astep(self.__wrapped__.__anext__())
        except BaseException as error:
            self._self_lease.end(failed=isinstance(error, Exception) and not isinstance(error, StopAsyncIteration))
            raise

    async def aclose(self) -> None:
        """Close what can be closed."""
        try:
            if hasattr(self.__wrapped__, "aclose"):
                await self._self_lease.astep(self.__wrapped__.aclose())
        finally:
            self._self_lease.end(failed=False)
