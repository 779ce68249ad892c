"""``Batched``: four ways to call one queue, with real threads that wait for gates, not for time."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, BadHash, Gated, Incomparable, OnlyWithItself, queued, until

from modelguard import Fair, Weight, batched
from modelguard.errors import GuardClosed, InvalidOption, ItemRefused, ItemTooHeavy, QueueFull, WouldDeadlock

# Calls


def test_all_kinds_of_calls_share_a_batch(model: Gated) -> None:
    """A thread, a task and a future share one run of the function."""
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
    """Neither on the caller's nor on the event loop's; on one thread by default."""
    model.gate.set()
    f = batched(max_size=2, name="f")(model)

    async def main() -> list[Any]:
        return await asyncio.gather(*(f.aio(n) for n in range(10)))

    assert list(range(10)) == asyncio.run(main())
    assert {"modelguard-batch-f"} == model.threads


def test_threads_compute_side_by_side(model: Gated) -> None:
    """As many batches at once as there are threads, and no more."""
    f = batched(max_size=1, threads=2)(model)
    futures = [f.submit(n) for n in range(4)]
    model.busy()
    model.busy()
    assert 2 == f.status().running
    assert 2 == f.status().waiting
    model.gate.set()
    assert [0, 1, 2, 3] == [future.result(TIMEOUT) for future in futures]


def test_extra_keyword_arguments_reach_the_function(model: Gated) -> None:
    """Items with different arguments do not share a batch; True is not 1."""
    f = batched(max_size=8)(model)
    futures = [*queued(f, model, 1, 2, by=2), *(f.submit(n, by=3) for n in (1, 2)), f.submit(1, by=True)]
    model.gate.set()
    assert [2, 4, 3, 6, 1] == [future.result(TIMEOUT) for future in futures]
    assert [["first"], [1, 2], [1, 2], [1]] == model.batches


def test_map_yields_in_order_and_takes_no_more_than_it_needs(model: Gated) -> None:
    """The items may come from an endless iterator."""
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
    """It fails only if other callers have filled the queue and none of its own items are in it."""
    f = batched(max_size=2, max_queue=2)(model)
    futures = queued(f, model, "a", "b")
    with pytest.raises(QueueFull):
        list(f.map([1, 2]))
    model.gate.set()
    assert ["a", "b"] == [future.result(TIMEOUT) for future in futures]
    assert list(range(20)) == list(f.map(range(20)))


def test_map_raises_in_the_place_of_the_item(model: Gated) -> None:
    """Earlier results have been yielded, and what is still queued is dropped."""
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
        """The error says to call it on an instance."""
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

    def test_an_instance_with_slots_is_rejected(self) -> None:
        """The error gives the fix."""

        class Slotted:
            __slots__ = ()

            @batched(max_size=4)
            def f(self, items: list[int]) -> list[int]:
                return items

        with pytest.raises(InvalidOption, match="__slots__"):
            Slotted().f(1)

    def test_an_instance_can_be_collected(self) -> None:
        """Its queue does not keep it alive once its thread has ended."""
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


def test_an_item_is_weighed_before_it_is_queued() -> None:
    """An item that cannot be weighed, or is too heavy for any batch, is that caller's error alone."""
    f = batched(max_size=4, weight=Weight(of=len, most=5))(lambda items: [len(item) for item in items])
    assert 5 == f("abcde")
    with pytest.raises(ItemTooHeavy, match=r"weighs 6, and a whole batch may weigh 5"):
        f("abcdef")
    with pytest.raises(ItemRefused, match="cannot be weighed: TypeError"):
        f(3)
    g = batched(max_size=4, weight=float)(lambda items: items)
    for item in ("nan", "-1", "inf"):
        with pytest.raises(ItemRefused, match="must be a number of at least 0"):
            g(item)
    assert 1 == f.status().answered


def test_weights_that_no_figure_can_hold_harm_nobody() -> None:
    """A client that sends an absurd weight gets an error or its answer, and the calls after it get theirs."""
    f = batched(max_size=4, weight=Weight(of=float))(lambda items: items)
    for weight in (1e155, 1e200, 1.7e308):
        with pytest.raises(ItemTooHeavy, match="a whole batch may weigh 1e"):
            f.submit(weight)
    for weight in (1e-160, 5e-324, 1e15, 1.0) * 3:
        assert weight == f.submit(weight).result(TIMEOUT)
    for share in (5e-324, 1e300):
        with pytest.raises(InvalidOption, match="the share of 'gold' must be a number above"):
            Fair(shares={"gold": share})


def test_texts_after_empty_ones_are_answered() -> None:
    """Items that weigh nothing teach times that those with a weight are compared with, whatever their batches."""
    for seed in range(30):
        dice = random.Random(seed)
        with batched(max_size=8, weight=len, deadline="1m")(lambda texts: texts) as f:
            for text in ("", "", "", "tea", "tea"):
                futures = [f.submit(text) for _ in range(dice.choice((1, 1, 2, 3, 5, 8)))]
                assert [text] * len(futures) == [future.result(TIMEOUT) for future in futures]


def test_keyword_arguments_are_checked_before_queueing(model: Gated) -> None:
    """An unknown one, or one that is not hashable, is that caller's error alone."""
    model.gate.set()
    f = batched(max_size=4)(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bye'"):
        f(1, bye=2)
    with pytest.raises(ItemRefused, match="unhashable"):
        f(1, by=[2])
    with pytest.raises(ItemRefused, match="RuntimeError: no hash"):
        f(1, by=BadHash())
    with pytest.raises(ItemRefused, match="ValueError: neither true nor false"):
        f(1, by=Incomparable())
    assert 2 == f(1, by=2)


@pytest.mark.parametrize("options", [{}, {"fair_by": lambda item: OnlyWithItself(1)}], ids=["keyword", "key"])
def test_what_cannot_be_compared_with_what_waits_is_refused(options: dict[str, Any], model: Gated) -> None:
    """Its call alone, by name: a value with an array can be compared with itself, and with no equal one."""
    f = batched(max_size=4, **options)(model)
    extras = {} if options else {"by": OnlyWithItself(1)}
    first = f.submit(0)
    assert model.entered.acquire(timeout=TIMEOUT)
    waits = f.submit(1, **extras)
    with pytest.raises(ItemRefused, match="compared with those of others: RuntimeError: another one"):
        f.submit(2, **({} if options else {"by": OnlyWithItself(1)}))
    model.gate.set()
    assert [0, 1] == [first.result(TIMEOUT), waits.result(TIMEOUT)]
    assert (2, 0) == (f.status().answered, f.status().waiting)


def test_a_missing_required_keyword_is_an_error() -> None:
    """As for any function."""

    @batched(max_size=4)
    def f(items: list[int], *, language: str) -> list[str]:
        return [language for _ in items]

    with pytest.raises(TypeError, match="language"):
        f(1)
    assert "ja" == f(1, language="ja")


# Where it must not be called


def test_the_batch_function_cannot_call_itself() -> None:
    """It would wait for the thread that it occupies, whichever way and from whichever helper thread it is called."""

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
    """The error says what to write instead."""
    f = batched(max_size=4)(model)

    async def main() -> None:
        with pytest.raises(WouldDeadlock, match=r"await f\.aio\(item\)"):
            f(1)
        with pytest.raises(WouldDeadlock, match=r"await f\.aclose\(\)"):
            f.close()

    asyncio.run(main())
    assert [] == model.batches


def test_it_serves_one_loop_after_another(model: Gated) -> None:
    """And several event loops at once."""
    model.gate.set()
    f = batched(max_size=4)(model)
    assert [1, 2] == [asyncio.run(f.aio(1)), asyncio.run(f.aio(2))]
    with ThreadPoolExecutor(4) as pool:
        assert list(range(20)) == list(pool.map(lambda n: asyncio.run(f.aio(n)), range(20)))


def test_without_a_loop_aio_fails(model: Gated) -> None:
    """It raises, and nothing is queued."""
    f = batched(max_size=4)(model)
    with pytest.raises(RuntimeError, match="no asyncio event loop runs here, and none of trio"):
        f.aio(1).send(None)
    assert 0 == f.status().waiting


def test_a_loop_that_was_closed_meanwhile_does_not_affect_others(model: Gated) -> None:
    """The results for its items are dropped, and the next call is answered."""
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


# Closing


def test_closing_computes_what_waits(model: Gated) -> None:
    """And admits nothing more; closing twice does nothing."""
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


def test_what_still_waits_at_the_end_of_the_timeout_is_refused(model: Gated) -> None:
    """No caller waits for a model that is stuck."""
    f = batched(max_size=1)(model)
    (waiting,) = queued(f, model, 1)
    f.close(timeout=0)
    with pytest.raises(GuardClosed):
        waiting.result(TIMEOUT)


def test_entering_it_again_reopens_it(model: Gated) -> None:
    """An application that has it in its lifespan can be started several times in one process."""
    model.gate.set()
    f = batched(max_size=1)(model)
    for _ in range(2):
        with f:
            assert (1, True) == (f(1), f.ready)
        assert not f.ready
        with pytest.raises(GuardClosed):
            f(1)

    async def once() -> None:
        async with f:
            assert [1] * 50 == await asyncio.gather(*(f.aio(1) for _ in range(50)))
        with pytest.raises(GuardClosed):
            await f.aio(1)

    asyncio.run(once())
    asyncio.run(once())


def test_a_block_inside_of_another_does_not_lose_what_waits(model: Gated) -> None:
    """Entering it while it is open changes nothing."""
    with batched(max_size=1)(model) as f:
        waiting = queued(f, model, 0, 1)
        with f:
            model.gate.set()
        assert [0, 1] == [future.result(TIMEOUT) for future in waiting]


def test_a_reopening_in_the_middle_of_a_close_ends_that(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its refusal of calls and its wait, too: what waits then is computed."""
    f = batched(max_size=1)(model)
    waiting = queued(f, model, "second")
    monkeypatch.setattr(f._batcher, "_wake_all", f._batcher.reopen)
    f.close(0)
    model.gate.set()
    assert ("open", "second") == (f.status().state, waiting[0].result(TIMEOUT))


def test_a_close_that_still_waits_does_not_refuse_what_comes_after_a_reopening(model: Gated) -> None:
    """The close returns at once, and what waits then is computed."""
    f = batched(max_size=1)(model)
    before = queued(f, model, 0, 1)
    closing = threading.Thread(target=f.close, args=(TIMEOUT,))
    closing.start()
    until(lambda: not f.ready)
    with f:
        closing.join(TIMEOUT)
        assert not closing.is_alive()
        after = f.submit(2)
        model.gate.set()
        assert [0, 1, 2] == [future.result(TIMEOUT) for future in (*before, after)]


def test_it_is_closed_at_the_end_of_a_block(model: Gated) -> None:
    """At the end of ``with`` and of ``async with``."""
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
