"""Guards, replicas, pools and batched functions that are entered more than once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from modelguard import Isolated, batched, guard, isolate, pool, replicas
from modelguard.errors import GuardClosed, LoadFailed


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


@CASES
def test_the_last_exit_closes(kind: str) -> None:
    """A part of an application that enters it too does not close it for the others; afterwards it is closed."""
    make, use = KINDS[kind]
    entered = make()
    with entered:
        with entered:
            use(entered)
        use(entered)
    with pytest.raises(GuardClosed):
        use(entered)
    with entered:
        use(entered)
    with pytest.raises(GuardClosed):
        use(entered)


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


def test_an_entry_that_fails_does_not_count() -> None:
    """Nobody leaves it, so the next exit closes."""
    broken = [True]

    def load() -> dict[str, str]:
        if broken:
            raise OSError(broken.pop())
        return {}

    nlp = guard(load, reload_on=None)
    with pytest.raises(LoadFailed), nlp:
        pass
    nlp.reload()
    with nlp:
        use_guard(nlp)
    with pytest.raises(GuardClosed):
        use_guard(nlp)


def test_an_explicit_close_closes_at_once() -> None:
    """However many have entered."""
    nlp = guard(dict, reload_on=None)
    with nlp, nlp:
        nlp.close()
        with pytest.raises(GuardClosed):
            use_guard(nlp)


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
