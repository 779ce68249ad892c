"""``modelguard_off``: decorated functions run plain, in the caller's thread, without policies, queues or reloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from modelguard.lifecycle._inline import inline
from modelguard.serving.doors import Batched
from modelguard.serving.running import Function

if TYPE_CHECKING:
    import pytest

__all__ = ["Off"]


class Off:
    """Guards and batchers without what makes them guards and batchers.

    A guarded function gets a model that was loaded by a plain call of the loader, at the first use in the test, whose
    own error is raised; there is no warm-up, no validation and no policy. A batched function is called with a list of
    the one item, and what it raises or returns for that item is the caller's.
    """

    def __init__(self) -> None:
        self._inline = ExitStack()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have all guards and batchers of this process run plain until ``patch`` is undone."""
        self._inline.enter_context(inline())
        patch.setattr(Batched, "__call__", _one)
        patch.setattr(Batched, "aio", _aio)
        patch.setattr(Batched, "submit", _submit)
        patch.setattr(Batched, "map", _map)

    def end(self) -> None:
        """End the test: models that were loaded inline are dropped, so that the next use loads in the normal way."""
        self._inline.close()


def _one(batched: Batched[Any, Any], item: Any, /, *, timeout: object = None, **extras: Any) -> Any:
    del timeout  # nothing waits
    if batched._unfit is not None or extras:  # noqa: SLF001
        batched._group(extras)  # noqa: SLF001 - the errors of a wrong call are the same
    run = Function(run=batched._function, name=batched.name, isolate=False)  # noqa: SLF001
    (result,) = run([item], extras)
    if isinstance(result, BaseException):
        raise result
    return result


async def _aio(batched: Batched[Any, Any], item: Any, /, **options: Any) -> Any:
    return _one(batched, item, **options)


def _submit(batched: Batched[Any, Any], item: Any, /, **options: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(_one(batched, item, **options))
    except Exception as error:  # noqa: BLE001 - it is raised where the result is asked for
        future.set_exception(error)
    return future


def _map(batched: Batched[Any, Any], items: Iterable[Any], /, **options: Any) -> Iterator[Any]:
    return (_one(batched, item, **options) for item in items)
