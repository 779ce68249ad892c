"""Guards, replicas, pools and batched functions that are entered more than once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from modelguard import Isolated, batched, guard, isolate, pool, replicas
from modelguard.errors import GuardClosed


def function(items: list[int]) -> list[int]:
    """Give the items back."""
    return items


def use_guard(entered: Any) -> None:
    with entered.lease():
        pass


def use_pool(entered: Any) -> None:
    with entered.lease("key"):
        pass


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "guard": (lambda: guard(dict, reload_on=None), use_guard),
    "replicas": (lambda: replicas(guard(dict, reload_on=None), 2), use_guard),
    "pool": (lambda: pool(lambda key: [key], max_memory="1 GB"), use_pool),
    "batched": (lambda: batched(max_size=2)(function), lambda entered: entered(1)),
}
CASES = pytest.mark.parametrize("kind", KINDS)


def test_the_last_exit_closes() -> None:
    """Of a batched function; of the others ``tests/contract/test_handles.py`` proves it."""
    entered = batched(max_size=2)(function)
    for _ in range(2):
        with entered:
            with entered:
                entered(1)
            entered(1)
        with pytest.raises(GuardClosed):
            entered(1)


@CASES
def test_the_last_exit_closes_on_an_event_loop(kind: str) -> None:
    """As with the lifespan of a mounted sub-application, whichever of the two ends first."""
    make, use = KINDS[kind]
    entered = make()

    async def main() -> None:
        async with entered:
            async with entered:
                pass
            await asyncio.to_thread(use, entered)

        outer, inner = entered, entered
        await outer.__aenter__()
        await inner.__aenter__()
        await outer.__aexit__(None, None, None)
        await asyncio.to_thread(use, entered)
        await inner.__aexit__(None, None, None)

    asyncio.run(main())
    with pytest.raises(GuardClosed):
        use(entered)


@CASES
def test_an_entry_while_the_last_exit_closes_leaves_it_open(kind: str) -> None:
    """The exit has begun to close it when somebody enters, in whichever order their steps come."""
    make, use = KINDS[kind]

    async def main(between: int) -> None:
        entered = make()
        await entered.__aenter__()
        exit_ = asyncio.ensure_future(entered.__aexit__(None, None, None))
        for _ in range(between):
            await asyncio.wait([exit_], timeout=0)
        async with entered:
            await exit_
            await asyncio.to_thread(use, entered)

    for between in range(5):
        asyncio.run(main(between))


def test_each_of_two_decorators_is_entered_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the attributes of the inner one are copied to the outer one."""
    monkeypatch.setattr(Isolated, "load", lambda _: None)
    monkeypatch.setattr(Isolated, "close", lambda _: None)
    isolated = isolate()(function)
    outer = batched(max_size=2)(isolated)
    with isolated:
        with outer:
            assert outer.ready
        assert not outer.ready
