"""``modelguard_off``: decorated functions run plain, in the caller's thread, without policies, queues or reloads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from modelguard.lifecycle import loading
from modelguard.lifecycle.core import Ticket
from modelguard.lifecycle.generation import Generation
from modelguard.lifecycle.guard import ModelGuard
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
        self._lock = threading.RLock()
        self._loaded: list[tuple[ModelGuard[Any], int]] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Have all guards and batchers of this process run plain until ``patch`` is undone."""
        look = ModelGuard._look  # noqa: SLF001 - its own house

        def look_at_drains_only(guard: ModelGuard[Any], generation: Generation[Any]) -> None:
            if generation.retired:
                look(guard, generation)

        async def await_ready(guard: ModelGuard[Any], _: object) -> None:
            await self._aload(guard)

        patch.setattr(ModelGuard, "_look", look_at_drains_only)
        patch.setattr(ModelGuard, "check", lambda _: False)
        patch.setattr(ModelGuard, "_wait_ready", lambda guard, _: self._load(guard))
        patch.setattr(ModelGuard, "_await_ready", await_ready)
        patch.setattr(Batched, "__call__", _one)
        patch.setattr(Batched, "aio", _aio)
        patch.setattr(Batched, "submit", _submit)
        patch.setattr(Batched, "map", _map)

    def end(self) -> None:
        """The test is over: models that were loaded plainly are dropped, so that the next use loads as it should."""
        for guard, generations in self._loaded:
            core = guard._core  # noqa: SLF001
            with core.lock:
                if core.generations == generations + 1:
                    core.serving, core.generations = None, generations

    def _load(self, guard: ModelGuard[Any]) -> None:
        with self._lock:
            guard._core.refuse_if_closed()  # noqa: SLF001
            if guard._core.serving is None:  # noqa: SLF001
                self._install(guard, loading.finished(guard._settings.load()))  # noqa: SLF001

    async def _aload(self, guard: ModelGuard[Any]) -> None:
        guard._core.refuse_if_closed()  # noqa: SLF001
        if guard._core.serving is None:  # noqa: SLF001
            made = guard._settings.load()  # noqa: SLF001
            model = await made if hasattr(made, "cr_await") else made
            with self._lock:
                if guard._core.serving is None:  # noqa: SLF001 - another task may have been quicker
                    self._install(guard, model)

    def _install(self, guard: ModelGuard[Any], model: Any) -> None:
        core = guard._core  # noqa: SLF001
        self._loaded.append((guard, core.generations))
        generation = Generation(core.generations + 1, model, born=guard._runtime.clock(), jitter=0.0)  # noqa: SLF001
        core.install(Ticket(("modelguard_off",), urgent=True, replaces=False), generation, discardable=False)


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
