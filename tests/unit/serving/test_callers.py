"""Whose calls they are, and how urgent: ``fair_by``, ``caller`` and ``priority``, with real threads and event loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, BadHash, Gated, queued, until

from modelguard import Fair, Weight, batched, telemetry
from modelguard.errors import InvalidOption, ItemRefused, QueueFull, QuotaExceeded
from modelguard.serving import caller, deadline


def in_blocks(f: Any, key: Hashable, *items: Any) -> list[Future[Any]]:
    with caller(key):
        return [f.submit(item) for item in items]


# Keys


def test_callers_take_turns(model: Gated) -> None:
    """Whoever comes after a crowd of another's calls is in the next batch."""
    f = batched(max_size=2)(model)
    with caller("greedy"):
        queued(f, model, *"abcdef")
    polite = in_blocks(f, "polite", "x")
    model.gate.set()
    assert "x" == polite[0].result(TIMEOUT)
    f.close()
    assert [["first"], ["a", "x"], ["b", "c"]] == model.batches[:3]


def test_a_function_can_say_whose_an_item_is(model: Gated) -> None:
    """``fair_by`` counts before the caller of the context."""
    f = batched(max_size=2, fair_by=lambda item: item[0])(model)
    with caller("all the same"):
        queued(f, model, "a1", "a2", "a3", "b1")
    model.gate.set()
    f.close()
    assert ["a1", "b1"] == model.batches[1]


@pytest.mark.parametrize(
    ("fair_by", "why"),
    [
        (lambda item: item["tenant"], "fair_by failed: TypeError"),
        (lambda item: [item], "the key from fair_by must be hashable: TypeError: unhashable type: 'list'"),
        (lambda _: BadHash(), "the key from fair_by must be hashable: RuntimeError: no hash"),
    ],
)
def test_an_item_without_a_usable_key_fails_alone(fair_by: Callable[[Any], Any], why: str, model: Gated) -> None:
    """That call gets ``ItemRefused`` with the reason; what waits is not affected."""
    f = batched(max_size=2, fair_by=lambda item: "key" if item in ("first", "a") else fair_by(item))(model)
    (waits,) = queued(f, model, "a")
    with pytest.raises(ItemRefused, match=why):
        f.submit("b")
    model.gate.set()
    assert "a" == waits.result(TIMEOUT)
    assert (0, 2) == (f.status().waiting, f.status().answered)


@pytest.mark.parametrize("key", [[], {}, BadHash()], ids=["list", "dict", "raises"])
def test_a_caller_has_a_key_that_can_be_hashed(key: Any) -> None:
    """The error comes where the block begins."""
    with pytest.raises(InvalidOption, match="hash"), caller(key):
        raise AssertionError("the block is not entered")


def test_blocks_nest(model: Gated) -> None:
    """The inner caller counts inside, the outer one after it; a deadline between them changes nothing."""
    f = batched(max_size=3)(model)
    f.submit("first")
    model.busy()
    with caller("outer"), deadline("1m"):
        waiting = [f.submit("o1"), f.submit("o2")]
        with caller("inner"):
            waiting.append(f.submit("i1"))
        waiting.append(f.submit("o3"))
    model.gate.set()
    f.close()
    assert ["o1", "i1", "o2"] == model.batches[1]


def test_the_key_follows_a_task_and_a_thread(model: Gated) -> None:
    """Into ``asyncio`` tasks and ``asyncio.to_thread``, as a deadline does."""
    f = batched(max_size=2)(model)
    with caller("greedy"):
        queued(f, model, *"abcd")

    async def main() -> list[Any]:
        with caller("polite"):
            task = asyncio.create_task(f.aio("task"))
            other = asyncio.create_task(asyncio.to_thread(f, "thread"))
        await asyncio.to_thread(until, lambda: f.status().waiting == 6)
        model.gate.set()
        return [await task, await other]

    assert ["task", "thread"] == asyncio.run(main())
    f.close()
    assert all(len({*batch} & {"task", "thread"}) == 1 for batch in model.batches[1:3])


def test_calls_of_a_batch_function_have_no_caller() -> None:
    """A batch is computed for several callers, so what it calls is nobody's."""
    inner = batched(max_size=4, fair_by=Fair(quota=1))(lambda items: items)
    seen: list[Any] = []

    @batched(max_size=4)
    def outer(items: list[int]) -> list[int]:
        with contextlib.suppress(QuotaExceeded):
            seen.append(inner(1))
        return items

    with caller("me", priority=3):
        assert 1 == outer(1)
    assert [1] == seen


def test_a_call_that_loses_its_place_is_told(model: Gated) -> None:
    """It gets ``QueueFull`` while it waits, in a thread, a task and a future alike; nothing else is lost."""
    f = batched(max_size=1, max_queue=4)(model)
    errors: list[BaseException] = []

    def block() -> None:
        with caller("greedy"):
            try:
                f("thread")
            except QueueFull as error:
                errors.append(error)

    async def main() -> None:
        with caller("greedy"):
            first = f.submit("first")
            await asyncio.to_thread(model.busy)
            stays = f.submit("stays")
            thread = threading.Thread(target=block)
            thread.start()
            await asyncio.to_thread(until, lambda: f.status().waiting == 2)
            task = asyncio.create_task(f.aio("task"))
            await asyncio.to_thread(until, lambda: f.status().waiting == 3)
            future = f.submit("future")
        polite = [in_blocks(f, name, name)[0] for name in ("x", "y", "z")]
        await asyncio.to_thread(thread.join, TIMEOUT)
        for lost in (task, asyncio.wrap_future(future)):
            with pytest.raises(QueueFull, match="took the place"):
                await lost
        model.gate.set()
        assert ["first", "stays", "x", "y", "z"] == [one.result(TIMEOUT) for one in (first, stays, *polite)]

    asyncio.run(main())
    assert 1 == len(errors)
    status = f.status()
    assert (5, 3) == (status.answered, status.refused_full)


def test_a_key_over_its_quota_is_refused_at_once(model: Gated) -> None:
    """Whether the key comes from the item or from the context; the status counts it."""
    f = batched(max_size=1, fair_by=Fair(quota=2))(model)
    f.submit("first")
    model.busy()
    in_blocks(f, "a", 1, 2)
    with pytest.raises(QuotaExceeded, match="'a'"):
        in_blocks(f, "a", 3)
    in_blocks(f, "b", 4)
    assert (3, 1) == (f.status().waiting, f.status().refused_quota)


def test_events_show_quotas_and_padding(model: Gated, events: list[telemetry.Event]) -> None:
    """``RequestsRefused`` counts what was over its quota, ``BatchFinished`` has the batch's weight and padding."""
    f = batched(max_size=2, fair_by=Fair(quota=2), weight=Weight(of=len, padded=True), name="words of quotas")(model)
    queued(f, model, "12345678", "1234")
    with pytest.raises(QuotaExceeded):
        f.submit("more")
    model.gate.set()
    f.close()

    def of(kind: type[Any]) -> list[Any]:
        # Those of functions that another test has left may still come.
        return [event for event in events if isinstance(event, kind) and event.guard == f.name]

    until(lambda: sum(event.size for event in of(telemetry.BatchFinished)) == 3)  # emitted after the answers
    found = [(event.size, event.weight, event.padding) for event in of(telemetry.BatchFinished)]
    # By the measured times, the last two may also be batches of their own, without padding.
    assert found in ([(1, 5, 0), (2, 16, 4)], [(1, 5, 0), (1, 8, 0), (1, 4, 0)])
    until(lambda: len(of(telemetry.RequestsRefused)) == 1)
    assert [1] == [event.quota for event in of(telemetry.RequestsRefused)]
    assert sum(padding for *_, padding in found) / sum(weight for _, weight, _ in found) == f.status().padding


def test_no_key_is_kept() -> None:
    """Once its calls have ended, nothing refers to it."""

    class Key:
        pass

    f = batched(max_size=2)(lambda items: items)
    key = Key()
    gone = weakref.ref(key)
    with caller(key):
        assert 1 == f(1)
    del key
    gc.collect()
    until(lambda: gone() is None)  # the thread that computed it lets go of it after the answer


# Priority


def each_call(f: Any, item: Any, **options: Any) -> Iterator[Callable[[], Any]]:
    yield lambda: f(item, **options)
    yield lambda: asyncio.run(f.aio(item, **options))
    yield lambda: f.submit(item, **options).result(TIMEOUT)
    yield lambda: next(f.map([item], **options))


def test_urgent_calls_go_first(model: Gated) -> None:
    """In the order of their priorities, whatever waits."""
    f = batched(max_size=2)(model)
    queued(f, model, *"abc")
    f.submit("urgent", priority=1)
    f.submit("more urgent", priority=2)
    model.gate.set()
    f.close()
    assert [["first"], ["more urgent", "urgent"], ["a", "b"], ["c"]] == model.batches


def test_every_kind_of_call_has_a_priority() -> None:
    """A call, ``aio``, ``submit`` and ``map``; it does not reach the function."""
    f = batched(max_size=2)(lambda items: [2 * item for item in items])
    assert [6] * 4 == [call() for call in each_call(f, 3, priority=7)]


@pytest.mark.parametrize("priority", [-1, 1.5, "high", True, 1001, 10**400])
def test_a_priority_is_a_whole_number(priority: Any) -> None:
    """The error names the value, for every kind of call and for a block; nothing is queued."""
    f = batched(max_size=2)(lambda items: items)
    for call in each_call(f, 3, priority=priority):
        with pytest.raises(InvalidOption, match="priority=") as rejected:
            call()
        assert rejected.value.fix
    with pytest.raises(InvalidOption, match="priority="), caller("me", priority=priority):
        raise AssertionError("the block is not entered")
    assert 0 == f.status().batches


def test_the_priority_of_a_block_is_the_least(model: Gated) -> None:
    """A call inside can be more urgent than its block, and not less."""
    f = batched(max_size=1)(model)
    queued(f, model, "a")
    with caller(None, priority=1):
        f.submit("block")
        f.submit("call", priority=2)
    model.gate.set()
    f.close()
    assert [["first"], ["call"], ["block"], ["a"]] == model.batches


def test_a_function_with_a_parameter_called_priority_is_rejected() -> None:
    """Nobody could ever pass it."""

    def ranked(items: list[int], priority: int) -> list[int]:
        return items

    with pytest.raises(InvalidOption, match=r"f\(item, priority=\.\.\.\) says how urgent it is"):
        batched(max_size=2)(ranked)
