"""``doors``: three doors to one queue, with real threads that wait for gates and not for time."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, queued, until

from modelguard import batched
from modelguard.errors import (
    GuardClosed,
    InvalidOption,
    ItemRefused,
    ItemTooHeavy,
    QueueFull,
    WouldDeadlock,
)

# Three doors


def test_all_doors_lead_into_the_same_batch(model: Gated) -> None:
    """A thread, a task and a future share a run of the function."""
    f = batched(max_size=8)(model)
    queued(f, model)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(f("thread")))
    thread.start()
    until(lambda: f.status().waiting == 1)

    async def task() -> Any:
        mine = asyncio.create_task(f.aio("task"))
        await asyncio.to_thread(until, lambda: f.status().waiting == 2)
        future = f.submit("future")
        model.gate.set()
        return await mine, await asyncio.wrap_future(future)

    assert ("task", "future") == asyncio.run(task())
    thread.join(TIMEOUT)
    assert ["thread"] == results
    assert [["first"], ["thread", "task", "future"]] == model.batches


def test_the_function_runs_on_a_thread_of_its_own(model: Gated) -> None:
    """Neither the caller's nor the loop's; one unless more are asked for."""
    model.gate.set()
    f = batched(max_size=2, name="f")(model)

    async def main() -> list[Any]:
        return await asyncio.gather(*(f.aio(n) for n in range(10)))

    assert list(range(10)) == asyncio.run(main())
    assert {"modelguard-batch-f"} == model.threads


def test_workers_compute_side_by_side(model: Gated) -> None:
    """As many batches at once as there are workers, and no more."""
    f = batched(max_size=1, workers=2)(model)
    futures = [f.submit(n) for n in range(4)]
    model.busy()
    model.busy()
    assert 2 == f.status().running
    assert 2 == f.status().waiting
    model.gate.set()
    assert [0, 1, 2, 3] == [future.result(TIMEOUT) for future in futures]


def test_extra_keyword_arguments_reach_the_function(model: Gated) -> None:
    """Items with other arguments have a batch of their own; True is not 1."""
    f = batched(max_size=8)(model)
    futures = [*queued(f, model, 1, 2, by=2), *(f.submit(n, by=3) for n in (1, 2)), f.submit(1, by=True)]
    model.gate.set()
    assert [2, 4, 3, 6, 1] == [future.result(TIMEOUT) for future in futures]
    assert [["first"], [1, 2], [1, 2], [1]] == model.batches


def test_map_yields_in_order_and_takes_no_more_than_it_needs(model: Gated) -> None:
    """It may be given an endless iterator."""
    model.gate.set()
    f = batched(max_size=4)(model)
    numbers = iter(range(10**9))
    found = f.map(numbers)
    assert [0, 1, 2] == [next(found) for _ in range(3)]
    assert next(numbers) <= 12
    found.close()
    assert list(range(100)) == list(f.map(range(100)))
    assert [] == list(f.map([]))


def test_map_waits_for_its_own_items_when_the_queue_is_full(model: Gated) -> None:
    """Others may have filled it; only if none of its own are there does it fail."""
    f = batched(max_size=2, max_queue=2)(model)
    futures = queued(f, model, "a", "b")
    with pytest.raises(QueueFull):
        list(f.map([1, 2]))
    model.gate.set()
    assert ["a", "b"] == [future.result(TIMEOUT) for future in futures]
    assert list(range(20)) == list(f.map(range(20)))


def test_map_raises_in_the_items_place(model: Gated) -> None:
    """What came before has been yielded, and what is queued is dropped."""
    model.gate.set()
    f = batched(max_size=2)(model)
    found = f.map(["a", "b", "bad", "c"])
    assert ["a", "b"] == [next(found), next(found)]
    with pytest.raises(ValueError, match="bad item"):
        next(found)


class Service:
    """Batches as a method."""

    def __init__(self, by: int) -> None:
        self.by = by

    @batched(max_size=4)
    def times(self, items: list[int], *, plus: int = 0) -> list[int]:
        """Multiplies."""
        return [item * self.by + plus for item in items]


class Derived(Service):
    @batched(max_size=4)
    def times(self, items: list[int], *, plus: int = 0) -> list[int]:
        return [1000 + super().times(items[0])]


class TestMethods:
    def test_each_instance_has_a_queue_of_its_own(self) -> None:
        """And its own counts."""
        two, three = Service(2), Service(3)
        assert (10, 15, 16) == (two.times(5), three.times(5), three.times(5, plus=1))
        assert (1, 2) == (two.times.status().answered, three.times.status().answered)
        assert two.times is two.times
        assert "Multiplies." == two.times.__doc__

    def test_the_class_alone_cannot_be_called(self) -> None:
        """There is no instance to run on."""
        with pytest.raises(TypeError, match="a method of Service: call it on an instance"):
            Service.times(5)  # type: ignore[arg-type, call-arg, operator]

    def test_copies_have_queues_of_their_own(self) -> None:
        """Pickled and copied instances work, and share nothing with the original."""
        one = Service(2)
        assert 10 == one.times(5)
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            other.by = 7
            assert 35 == other.times(5)
            assert other.times is not one.times

    def test_an_instance_without_a_place_for_it_is_told_so(self) -> None:
        """With the fix."""

        class Slotted:
            __slots__ = ()

            @batched(max_size=4)
            def f(self, items: list[int]) -> list[int]:
                return items

        with pytest.raises(InvalidOption, match="__slots__"):
            Slotted().f(1)

    def test_an_instance_can_be_collected(self) -> None:
        """Its queue does not keep it, once its thread has ended."""
        before = {*threading.enumerate()}
        one = Service(2)
        one.times(1)
        one.times.close()
        gone = weakref.ref(one)
        until(lambda: {*threading.enumerate()} <= before)
        del one
        gc.collect()
        assert gone() is None


# Items


def test_an_item_is_weighed_at_the_door() -> None:
    """What cannot be weighed, or weighs more than a batch may, is that caller's error alone."""
    f = batched(max_size=4, weight=len, max_weight=5)(lambda items: [len(item) for item in items])
    assert 5 == f("abcde")
    with pytest.raises(ItemTooHeavy, match=r"weighs 6, and a whole batch may weigh 5"):
        f("abcdef")
    with pytest.raises(ItemRefused, match="cannot be weighed: TypeError"):
        f(3)
    g = batched(max_size=4, weight=float)(lambda items: items)
    for item in ("nan", "-1", "inf"):
        with pytest.raises(ItemRefused, match="which is no weight"):
            g(item)
    assert 1 == f.status().answered


def test_keyword_arguments_are_checked_at_the_door(model: Gated) -> None:
    """An unknown one, or one that cannot be compared, is that caller's error alone."""
    model.gate.set()
    f = batched(max_size=4)(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bye'"):
        f(1, bye=2)
    with pytest.raises(ItemRefused, match="unhashable"):
        f(1, by=[2])
    assert 2 == f(1, by=2)


def test_a_required_keyword_is_asked_for() -> None:
    """As by any function."""

    @batched(max_size=4)
    def f(items: list[int], *, language: str) -> list[str]:
        return [language for _ in items]

    with pytest.raises(TypeError, match="language"):
        f(1)
    assert "ja" == f(1, language="ja")


# Where it may not be called


def test_the_batch_function_cannot_call_itself() -> None:
    """It would wait for the thread that it occupies: refused by name, through every door and every helper thread."""

    @batched(max_size=4, name="f")
    def f(items: list[Any]) -> list[Any]:
        return [item() for item in items]

    def through_a_thread() -> Any:
        return asyncio.run(asyncio.to_thread(lambda: f.submit(dict)))  # type: ignore[arg-type]

    for nested in (
        lambda: f(dict),
        lambda: f.submit(dict),
        lambda: asyncio.run(f.aio(dict)),
        f.close,
        through_a_thread,
    ):
        with pytest.raises(WouldDeadlock, match="'f'"):
            f(nested)
    assert {} == f(dict)


def test_blocking_calls_are_refused_on_a_running_loop(model: Gated) -> None:
    """With the way to write it."""
    f = batched(max_size=4)(model)

    async def main() -> None:
        with pytest.raises(WouldDeadlock, match=r"await f\.aio\(item\)"):
            f(1)
        with pytest.raises(WouldDeadlock, match=r"await f\.aclose\(\)"):
            f.close()

    asyncio.run(main())
    assert [] == model.batches


def test_it_serves_one_loop_after_another(model: Gated) -> None:
    """And several at once."""
    model.gate.set()
    f = batched(max_size=4)(model)
    assert [1, 2] == [asyncio.run(f.aio(1)), asyncio.run(f.aio(2))]
    with ThreadPoolExecutor(4) as pool:
        assert list(range(20)) == list(pool.map(lambda n: asyncio.run(f.aio(n)), range(20)))


def test_without_a_loop_aio_says_so(model: Gated) -> None:
    """Nothing is queued."""
    f = batched(max_size=4)(model)
    with pytest.raises(RuntimeError, match="no running event loop"):
        f.aio(1).send(None)
    assert 0 == f.status().waiting


def test_a_loop_that_was_closed_meanwhile_harms_nobody(model: Gated) -> None:
    """Its items are computed for nobody."""
    f = batched(max_size=1)(model)
    loop = asyncio.new_event_loop()
    task = loop.create_task(f.aio(1))
    loop.call_soon(loop.stop)
    loop.run_forever()
    model.busy()
    loop.close()
    future = f.submit(2)
    model.gate.set()
    assert 2 == future.result(TIMEOUT)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# The end


def test_closing_computes_what_waits(model: Gated) -> None:
    """And lets nothing in; closing twice does nothing."""
    f = batched(max_size=1)(model)
    futures = queued(f, model, 1, 2)
    closing = threading.Thread(target=f.close)
    closing.start()
    until(lambda: not f.ready)
    with pytest.raises(GuardClosed):
        f(3)
    model.gate.set()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    assert [1, 2] == [future.result(0) for future in futures]
    f.close()
    assert "closed" == f.status().state


def test_what_still_waits_when_closing_takes_too_long_is_refused(model: Gated) -> None:
    """Nobody waits for a model that is stuck."""
    f = batched(max_size=1)(model)
    (waiting,) = queued(f, model, 1)
    f.close(timeout=0)
    with pytest.raises(GuardClosed):
        waiting.result(TIMEOUT)


def test_it_is_closed_at_the_end_of_a_block(model: Gated) -> None:
    """Of ``with`` and ``async with``."""
    model.gate.set()
    with batched(max_size=1)(model) as f:
        assert 1 == f(1)
    assert not f.ready

    async def main() -> None:
        async with batched(max_size=1)(model) as g:
            assert 1 == await g.aio(1)
        with pytest.raises(GuardClosed):
            await g.aio(1)

    asyncio.run(main())
