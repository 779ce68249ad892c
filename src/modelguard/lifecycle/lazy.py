"""Work that goes on after the call has returned: generators, iterators, coroutines. Each keeps its lease to its end."""

from __future__ import annotations

import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

import wrapt

from modelguard.lifecycle.leases import Lease

if TYPE_CHECKING:  # generic for the checkers only
    _Proxy = wrapt.ObjectProxy[Any]
else:
    _Proxy = wrapt.ObjectProxy


def is_lazy(kind: type) -> bool:
    """Whether a result of this type does its work later."""
    return hasattr(kind, "__next__") or hasattr(kind, "__anext__") or kind is types.CoroutineType


def keep(lease: Lease[Any], result: Any) -> Any:
    """Let a lazy result keep its lease until it ends, is closed, or is dropped."""
    if isinstance(result, types.GeneratorType):
        return drive(lambda: lease, lambda _: result)
    if isinstance(result, types.AsyncGeneratorType):
        return adrive(lambda: _ready(lease), lambda _: result)
    if isinstance(result, types.CoroutineType):
        return finish(lease, result)
    return (_LeasedIterator if hasattr(type(result), "__next__") else _LeasedAsyncIterator)(result, lease)


def drive(take: Callable[[], Lease[Any]], start: Callable[[Any], Generator[Any, Any, Any]]) -> Generator[Any, Any, Any]:
    """Run a generator on one lease, taken at its first step; each step runs inside the lease's context.

    A generator shares its caller's context, so what is set for a step must be undone before it yields. That is
    why this spells out what ``yield from`` would do (PEP 380).
    """
    lease = take()
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
                raise
            except BaseException as error:  # noqa: BLE001 - it is the inner generator's to handle
                step, value = inner.throw, error
    except Exception:
        failed = True
        raise
    finally:
        lease.end(failed=failed)


async def adrive(
    take: Callable[[], Awaitable[Lease[Any]]], start: Callable[[Any], AsyncGenerator[Any, Any]]
) -> AsyncGenerator[Any, Any]:
    """:func:`drive` for asynchronous generators."""
    lease = await take()
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
    except Exception:
        failed = True
        raise
    finally:
        lease.end(failed=failed)


async def _ready(lease: Lease[Any]) -> Lease[Any]:
    return lease


async def finish(lease: Lease[Any], coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end on a lease, and end that too."""
    failed = False
    try:
        return await lease.astep(coroutine)
    except Exception:
        failed = True
        raise
    finally:
        lease.end(failed=failed)


class _LeasedIterator(_Proxy):
    """An iterator such as ``map`` or ``islice``, otherwise untouched, that ends its lease with itself."""

    def __init__(self, wrapped: Any, lease: Lease[Any]) -> None:
        super().__init__(wrapped)
        self._self_lease = lease

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            return self._self_lease.step(self.__wrapped__.__next__)
        except BaseException as error:
            self._self_lease.end(failed=isinstance(error, Exception) and not isinstance(error, StopIteration))
            raise


class _LeasedAsyncIterator(_Proxy):
    """The same for asynchronous iterators."""

    def __init__(self, wrapped: Any, lease: Lease[Any]) -> None:
        super().__init__(wrapped)
        self._self_lease = lease

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._self_lease.astep(self.__wrapped__.__anext__())
        except BaseException as error:
            self._self_lease.end(failed=isinstance(error, Exception) and not isinstance(error, StopAsyncIteration))
            raise
