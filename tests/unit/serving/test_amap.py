"""``amap``: the items of one request are admitted together."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, next_turn, queued, until

from modelguard import Fair, Weight, batched
from modelguard.errors import (
    CallerGone,
    CircuitOpen,
    DeadlineUnreachable,
    GuardClosed,
    ItemRefused,
    ItemTooHeavy,
    QueueFull,
    QuotaExceeded,
)
from modelguard.serving import Breaker, caller
from modelguard.serving.deadlines import WebRequest, on_behalf_of
from modelguard.testing import Clock


def double(items: list[int], *, by: int = 2) -> list[int]:
    return [item * by for item in items]


def test_the_results_come_in_order() -> None:
    """However many batches the items take; keyword arguments reach the function; nothing is nothing."""
    f = batched(max_size=3)(double)

    async def main() -> None:
        assert [0, 2, 4, 6, 8, 10, 12] == await f.amap(range(7))
        assert [0, 3] == await f.amap([0, 1], by=3)
        assert [] == await f.amap([])

    asyncio.run(main())


def test_the_items_share_batches_with_others(model: Gated) -> None:
    """They are queued like any others, and a batch takes what waits."""
    f = batched(max_size=3)(model)
    others = queued(f, model, "other")

    async def main() -> list[str]:
        task = asyncio.create_task(f.amap(["a", "b", "c"]))
        await next_turn()
        model.gate.set()
        return await task

    assert ["a", "b", "c"] == asyncio.run(main())
    assert "other" == others[0].result(TIMEOUT)
    assert [["first"], ["other", "a", "b"], ["c"]] == model.batches


def test_all_of_them_find_room_or_none(model: Gated) -> None:
    """Where there is room for two, three are refused at once, and nothing of them is computed or stays in the queue."""
    f = batched(max_size=1, max_queue=4)(model)
    others = queued(f, model, "x", "y")

    async def main() -> None:
        with pytest.raises(QueueFull):
            await f.amap(["a", "b", "c"])
        assert (2, 3) == (f.status().waiting, f.status().refused_full)
        fits = asyncio.create_task(f.amap(["d", "e"]))
        await next_turn()
        assert 4 == f.status().waiting
        model.gate.set()
        assert ["d", "e"] == await fits

    asyncio.run(main())
    assert ["x", "y"] == [other.result(TIMEOUT) for other in others]
    assert [["first"], ["x"], ["y"], ["d"], ["e"]] == model.batches


def test_all_of_them_are_in_time_or_none(modelguard_clock: Clock) -> None:
    """If by the measured times the last item would be late, no item is queued."""
    model = Gated()
    f = batched(max_size=1, max_queue=8)(model)
    for _ in range(3):  # which is enough for an estimate
        measured = f.submit("measured")
        model.busy()
        modelguard_clock.advance("10s")
        model.gate.set()
        measured.result(TIMEOUT)
        model.gate.clear()
    f.submit("under way")
    model.busy()

    async def main() -> None:
        with pytest.raises(DeadlineUnreachable):
            await f.amap(["a", "b", "c"], timeout="25s")
        assert (0, 3) == (f.status().waiting, f.status().refused_late)
        task = asyncio.create_task(f.amap(["d"], timeout="25s"))
        await next_turn()
        assert 1 == f.status().waiting
        model.gate.set()
        assert ["d"] == await task

    asyncio.run(main())


def test_a_quota_holds_for_all_of_them(model: Gated) -> None:
    """Items of one key that are more than its quota are refused together."""
    f = batched(max_size=1, max_queue=8, fair_by=Fair(quota=2))(model)
    queued(f, model)

    async def main() -> None:
        with caller("tenant"):
            with pytest.raises(QuotaExceeded):
                await f.amap(["a", "b", "c"])
            assert (0, 3) == (f.status().waiting, f.status().refused_quota)
            task = asyncio.create_task(f.amap(["a", "b"]))
            await next_turn()
            assert 2 == f.status().waiting
            model.gate.set()
            await task

    asyncio.run(main())


def test_nobody_loses_a_place(model: Gated) -> None:
    """Under fair shares, one item may take the place of a greedy caller's; items that come together do not."""
    f = batched(max_size=1, max_queue=2, fair_by=lambda item: item[0])(model)
    others = queued(f, model, "g1", "g2")

    async def main() -> None:
        with pytest.raises(QueueFull):
            await f.amap(["h1"])

    asyncio.run(main())
    model.gate.set()
    assert ["g1", "g2"] == [other.result(TIMEOUT) for other in others]


def test_the_first_error_ends_the_call() -> None:
    """The caller gets it at once, and what still waits is not computed."""
    computed: list[str] = []
    go_on = threading.Event()

    @batched(max_size=1)
    def f(items: list[str]) -> list[str]:
        computed.extend(items)
        if items == ["bad"]:
            raise ValueError("bad item")
        assert go_on.wait(TIMEOUT)
        return items

    async def main() -> None:
        with pytest.raises(ValueError, match="bad item"):
            await f.amap(["bad", "next", "last"])
        go_on.set()
        assert "after" == await f.aio("after")

    asyncio.run(main())
    assert computed in (["bad", "next", "after"], ["bad", "after"])


def test_all_of_them_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    """One error is raised, and the others are not reported as never retrieved."""
    f = batched(max_size=8)(lambda items: [OSError(str(item)) for item in items])

    async def main() -> None:
        with pytest.raises(OSError, match="0"):
            await f.amap(range(5))

    asyncio.run(main())
    assert "never retrieved" not in caplog.text


def test_cancelling_drops_all_of_them(model: Gated) -> None:
    """A task that is cancelled leaves nothing in the queue."""
    f = batched(max_size=1)(model)
    queued(f, model)

    async def main() -> None:
        task = asyncio.create_task(f.amap(["a", "b"]))
        await next_turn()
        assert 2 == f.status().waiting
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert (0, 2) == (f.status().waiting, f.status().cancelled)
    model.gate.set()


def test_a_client_that_leaves_cancels_all_of_them(model: Gated) -> None:
    """Inside the web middleware they belong to the request."""
    f = batched(max_size=1)(model)
    queued(f, model)
    request = WebRequest()

    async def main() -> None:
        with on_behalf_of(request):
            task = asyncio.create_task(f.amap(["a", "b"]))
        await next_turn()
        request.disconnect()
        with pytest.raises(CallerGone):
            await task

    asyncio.run(main())
    assert 0 == f.status().waiting
    model.gate.set()


def test_they_are_the_probe_of_an_open_circuit(modelguard_clock: Clock) -> None:
    """When the circuit lets one request through, that may be one of many items, whose success closes it."""
    broken = True

    @batched(max_size=4, breaker=Breaker(failures=1, cooldown="1m"))
    def f(items: list[int]) -> list[int]:
        if broken:
            raise OSError("broken")
        return items

    async def main() -> None:
        nonlocal broken
        with pytest.raises(OSError, match="broken"):
            await f.aio(0)
        await asyncio.to_thread(until, lambda: f.status().state == "circuit open")
        with pytest.raises(CircuitOpen):
            await f.amap([1, 2, 3])
        broken = False
        modelguard_clock.advance("1m")
        assert [1, 2, 3] == await f.amap([1, 2, 3])
        await asyncio.to_thread(until, lambda: f.status().state not in ("circuit open", "half-open"))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("items", "error", "why"),
    [
        ("text", ItemRefused, "needs many items, and a str is one"),
        (["a"] * 5, ItemTooHeavy, "5 items never fit into a queue of max_queue=4"),
        (["a", "much too long"], ItemTooHeavy, "weighs"),
        ([["a"]], ItemRefused, "not a list"),
    ],
)
def test_a_mistake_queues_nothing(items: Any, error: type[Exception], why: str) -> None:
    """What can never be computed is refused by name, before any item is queued."""

    @batched(max_size=2, max_queue=4, weight=Weight(of=len, most=5))
    def f(items: list[str]) -> list[str]:
        return items

    with pytest.raises(error, match=why):
        asyncio.run(f.amap(items))
    assert (0, 0) == (f.status().waiting, f.status().answered)


def test_a_closed_function_refuses_all_of_them() -> None:
    """As it refuses one."""
    f = batched(max_size=2)(double)
    f.close()
    with pytest.raises(GuardClosed):
        asyncio.run(f.amap([1, 2]))
    assert 0 == f.status().waiting


def test_it_works_on_trio() -> None:
    """Results come in order, and errors are raised."""
    trio: Any = pytest.importorskip("trio", reason="needs trio")
    f = batched(max_size=2)(double)

    async def main() -> None:
        assert [2, 4, 6] == await f.amap([1, 2, 3])
        with pytest.raises(ValueError, match="bad"):
            await batched(max_size=2)(lambda items: [ValueError("bad") for _ in items]).amap([1, 2])

    trio.run(main)


def test_it_works_inline(modelguard_off: None) -> None:
    """With ``modelguard_off`` each item is computed at once."""
    f = batched(max_size=2, max_queue=2)(double)
    assert [2, 4] == asyncio.run(f.amap([1, 2]))
