"""``_streaming``: one batch of streams, from its first step to its end, without threads and on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from modelguard.errors import BatchFailed, ConsumerTooSlow, Overloaded, WrongResults
from modelguard.serving._execution import BatchFunction, Computed
from modelguard.serving._requests import Batch, Request
from modelguard.serving.streams import ENDED, NOTHING_YET, StreamRequest, StreamRun

NO_PARTS = "yielded anything; for an item without parts, yield StopIteration"


class World:
    """What surrounds a batch: its queue, a clock, and consumers that act while the batch waits for them."""

    def __init__(self, *items: Any, max_buffer: int = 100) -> None:
        self.requests = [StreamRequest(item, max_buffer) for item in items]
        self.now = 0.0
        self.others_wait = False
        self.waits: list[float] = []
        self.while_waiting: Callable[[], object] = lambda: None

    def answer(self, requests: list[Request], outcomes: list[Any]) -> None:
        for request, outcome in zip(requests, outcomes, strict=True):
            if request.state != "done":
                request.state = "done"
                request.deliver(outcome)

    def leave(self, at: int) -> None:
        self.requests[at].state = "done"

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds
        self.while_waiting()

    def run(self, function: Any, *, slow_after: float = 1.0, ignore: Any = (), **extras: Any) -> Computed:
        batch = BatchFunction(run=function, name="f", isolate=True, ignore=ignore, clock=lambda: self.now)
        for request in self.requests:
            request.group = tuple((name, type(value), value) for name, value in extras.items()) or None
        stream = StreamRun(
            batch,
            Batch([*self.requests], 0.0),
            self.answer,
            slow_after=slow_after,
            others_wait=lambda: self.others_wait,
            wait=self.wait,
        )
        computed = stream.compute()
        self.answer([*self.requests], computed.outcomes)
        return computed


def parts_of(request: StreamRequest) -> list[Any]:
    """All parts that there are; then the end as ``ENDED``, or the error."""
    parts: list[Any] = []
    while True:
        try:
            part = request.take()
        except Exception as error:  # noqa: BLE001 - it is what the consumer gets
            parts.append(error)
            return parts
        parts.append(part)
        if part is ENDED or part is NOTHING_YET:
            return parts


def counting(items: list[int], *, to: int = 3) -> Iterator[list[Any]]:
    for number in range(to):
        yield [item + number for item in items]


# What consumers get


def test_each_item_gets_its_parts_in_order_and_then_the_end() -> None:
    """One part for each item at each step."""
    world = World(10, 20)
    computed = world.run(counting)
    assert [[10, 11, 12, ENDED], [20, 21, 22, ENDED]] == [parts_of(one) for one in world.requests]
    assert ("succeeded", True, None) == (computed.verdict, computed.whole, computed.error)


def test_extras_reach_the_function() -> None:
    """Keyword arguments are those of the batch function."""
    world = World(10)
    world.run(counting, to=1)
    assert [10, ENDED] == parts_of(world.requests[0])


@pytest.mark.parametrize("end", [StopIteration, StopAsyncIteration, StopIteration(), StopAsyncIteration()])
def test_an_item_ends_early(end: Any) -> None:
    """StopIteration in place of a part ends that item; what is yielded for it later is dropped."""
    world = World("short", "long")

    def f(_items: list[str]) -> Iterator[list[Any]]:
        yield ["a", "b"]
        yield [end, "c"]
        yield ["dropped", "d"]

    world.run(f)
    assert [["a", ENDED], ["b", "c", "d", ENDED]] == [parts_of(one) for one in world.requests]


def test_an_item_ends_with_an_error() -> None:
    """An exception in place of a part belongs to its item, as it does among results."""
    world = World("bad", "good")

    def f(_items: list[str]) -> Iterator[list[Any]]:
        yield [1, 2]
        yield [ValueError("bad item"), 3]
        yield [4, 5]

    computed = world.run(f)
    first, error = parts_of(world.requests[0])
    assert (1, "bad item") == (first, str(error))
    assert isinstance(error, ValueError)
    assert [2, 3, 5, ENDED] == parts_of(world.requests[1])
    assert ("succeeded", None, 1) == (computed.verdict, computed.error, computed.failed)


def test_the_function_ends_when_all_items_have_ended() -> None:
    """Nothing more is computed for nobody: the generator is closed where it is."""
    world = World(1, 2)
    steps: list[str] = []

    def f(items: list[int]) -> Iterator[list[Any]]:
        try:
            yield items
            yield [StopIteration] * 2
            steps.append("went on")
        finally:
            steps.append("closed")

    computed = world.run(f)
    assert (["closed"], "succeeded", True) == (steps, computed.verdict, computed.whole)


def test_the_function_learns_who_has_left() -> None:
    """``yield`` returns a truth value for each item: whether its consumer still takes parts."""
    world = World("leaves", "ends", "stays")
    seen: list[Any] = []

    def f(_items: list[str]) -> Iterator[list[Any]]:
        seen.append((yield [1, 1, 1]))
        world.leave(0)
        seen.append((yield [2, StopIteration, 2]))
        yield [3, 3, 3]

    world.run(f)
    assert [[True, True, True], [False, False, True]] == seen
    assert [1, 2, 3, ENDED] == parts_of(world.requests[2])
    assert [1, NOTHING_YET] == parts_of(world.requests[0])[:2], "what is computed later is not kept for those who left"


def test_a_batch_that_everybody_has_left_says_nothing_about_the_model() -> None:
    """It is cut short: its time is not learned, and the breaker does not count it."""
    world = World(1, 2)

    def f(items: list[int]) -> Iterator[list[int]]:
        yield items
        world.leave(0)
        world.leave(1)
        yield items
        raise AssertionError("nobody is left")

    computed = world.run(f)
    assert ("inconclusive", False, None) == (computed.verdict, computed.whole, computed.error)


# Bad functions


def returns_none(_items: list[int]) -> Any:
    yield None


def yields_text(_items: list[int]) -> Any:
    yield "ab"


def yields_a_generator(items: list[int]) -> Any:
    yield (item for item in items)


def yields_too_few(items: list[int]) -> Any:
    yield items
    yield items[1:]


def yields_too_many(items: list[int]) -> Any:
    yield [*items, 3]


def ends_at_once(_items: list[int]) -> Any:
    yield from ()


@pytest.mark.parametrize(
    ("function", "first", "says"),
    [
        (returns_none, [], "it yielded None instead of a list of 2 parts, one for each item in order"),
        (yields_text, [], "it yielded a str instead of a list of 2 parts"),
        (yields_a_generator, [], "it yielded a generator instead of a list of 2 parts"),
        (yields_too_few, [1], "it yielded a list of 1 instead of 2 parts"),
        (yields_too_many, [], "it yielded a list of 3 instead of 2 parts"),
        (ends_at_once, [], NO_PARTS),
    ],
)
def test_what_is_not_one_part_for_each_item_fails_the_batch(function: Any, first: list[int], says: str) -> None:
    """Every consumer gets the parts before it, and then the same clear error."""
    world = World(1, 2)
    computed = world.run(function)
    for at, request in enumerate(world.requests):
        *parts, error = parts_of(request)
        assert [part + at for part in first] == parts
        assert isinstance(error, WrongResults)
        assert says in str(error)
    assert ("failed", 2) == (computed.verdict, computed.failed)


def test_an_error_comes_after_the_parts() -> None:
    """A function that raises midway: each consumer has its parts, then an error of its own that names the cause."""
    world = World(1, 2)

    def f(items: list[int]) -> Iterator[list[int]]:
        yield items
        raise OSError("device lost")

    computed = world.run(f)
    errors = []
    for at, request in enumerate(world.requests):
        part, error = parts_of(request)
        assert at + 1 == part
        assert isinstance(error, BatchFailed)
        assert isinstance(error.__cause__, OSError)
        errors.append(error)
        assert ENDED is request.take(), "an error is raised once"
    assert errors[0] is not errors[1]
    assert ("failed", 2) == (computed.verdict, computed.failed)


def test_the_last_consumer_gets_the_error_itself() -> None:
    """As in a batch of one: there is nobody to share it with."""
    world = World(1, 2)

    def f(items: list[int]) -> Iterator[list[Any]]:
        yield [StopIteration, items[1]]
        raise OSError("device lost")

    world.run(f)
    assert [ENDED] == parts_of(world.requests[0])
    assert isinstance(parts_of(world.requests[1])[1], OSError)


@pytest.mark.parametrize("stops", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_not_even_an_exit_ends_the_thread(stops: type[BaseException]) -> None:
    """It becomes an error of the batch."""
    world = World(1)

    def f(items: list[int]) -> Iterator[list[int]]:
        yield items
        raise stops

    world.run(f)
    assert isinstance(parts_of(world.requests[0])[1], BatchFailed)


@pytest.mark.parametrize(("error", "verdict"), [(Overloaded("later"), "inconclusive"), (KeyError(1), "inconclusive")])
def test_errors_that_say_nothing_about_the_model(error: Exception, verdict: str) -> None:
    """The breaker counts neither overload nor what it was told to ignore."""
    world = World(1)

    def f(items: list[int]) -> Iterator[list[int]]:
        yield items
        raise error

    assert verdict == world.run(f, ignore=(KeyError,)).verdict


def test_a_function_that_cannot_be_called() -> None:
    """An error before the first step is one of the batch."""
    world = World(1)
    world.run(counting, colour="red")
    assert isinstance(parts_of(world.requests[0])[0], TypeError)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_function_that_goes_on_after_it_was_closed() -> None:
    """It yields although nobody is left: the batch ends all the same, and the error is reported."""
    world = World(1)

    def f(items: list[int]) -> Iterator[list[int]]:
        try:
            yield items
            world.leave(0)
            yield items
        finally:
            yield items

    assert "generator ignored GeneratorExit" == str(world.run(f).error)


def test_an_error_while_it_is_closed_is_reported() -> None:
    """The consumers have gone and get nothing; the event has it."""
    world = World(1)

    def f(items: list[int]) -> Iterator[list[int]]:
        try:
            yield items
            world.leave(0)
            yield items
        finally:
            raise OSError("cannot free")

    assert "cannot free" == str(world.run(f).error)


# Slow consumers


def test_stalls_are_counted_for_each_consumer() -> None:
    """Each has so many seconds in all, whoever else is slow."""
    world = World(1, 2, max_buffer=1)
    first, second = world.requests
    world.others_wait = True
    passes = iter([(2.0, second), (0.5, first), (0.6, None), (0.1, second)])
    got: list[Any] = []

    def wait(seconds: float) -> None:
        world.waits.append(seconds)
        passed, takes = next(passes)
        world.now += passed
        if takes is not None:
            got.append(takes.take())

    world.wait = wait  # type: ignore[method-assign]
    world.run(counting, to=2, slow_after=3.0)
    assert [3.0, 1.0, 0.53, 0.43] == pytest.approx(world.waits)
    assert isinstance(parts_of(first)[-1], ConsumerTooSlow)
    assert [ENDED] == parts_of(second)


def test_the_batch_waits_for_a_full_buffer() -> None:
    """A generator that is faster than its consumer is held back: the buffer never has more than its bound."""
    world = World(0, max_buffer=2)
    request = world.requests[0]
    got: list[int] = []
    world.while_waiting = lambda: got.append(request.take())
    most = 0

    def f(_items: list[int]) -> Iterator[list[int]]:
        nonlocal most
        for number in range(20):
            yield [number]
            most = max(most, len(request._parts))

    computed = world.run(f)
    assert [*range(20), ENDED] == got + parts_of(request)
    assert (19, 1) == (len(world.waits), most)
    assert 19.0 == computed.stalled, "which is not the model's time"


def test_a_consumer_that_keeps_others_waiting_is_dropped() -> None:
    """It gets what is in its buffer and then ConsumerTooSlow; its neighbour loses nothing."""
    world = World("slow", "quick", max_buffer=2)
    slow, quick = world.requests
    got: list[Any] = []

    def f(_items: list[str]) -> Iterator[list[int]]:
        for number in range(10):
            yield [number, number]
            got.append(quick.take())

    computed = world.run(f, slow_after=1.5)
    assert [1.5] == world.waits
    zero, one, error = parts_of(slow)
    assert (0, 1) == (zero, one)
    assert isinstance(error, ConsumerTooSlow)
    assert [*range(10), ENDED] == got + parts_of(quick)
    assert "succeeded" == computed.verdict


def test_the_time_counts_in_all() -> None:
    """But for a hundredth with each part: a consumer that takes one just in time cannot hold the batch for ever."""
    world = World("slow", "quick", max_buffer=2)
    slow, quick = world.requests

    def wait(seconds: float) -> None:
        world.waits.append(seconds)
        world.now += 0.4
        slow.take()

    world.wait = wait  # type: ignore[method-assign]

    def f(_items: list[str]) -> Iterator[list[int]]:
        for number in range(10):
            yield [number, number]
            quick.take()

    world.run(f, slow_after=1.0)
    assert [1.0, 0.61, 0.22] == pytest.approx(world.waits)
    assert isinstance(parts_of(slow)[-1], ConsumerTooSlow)


def test_who_is_a_little_slower_than_others_may_go_on() -> None:
    """Each part gives a hundredth of the time back: a long stream does not add up what its consumer cost."""
    world = World("slow", "quick", max_buffer=2)
    slow, quick = world.requests
    got: list[Any] = []

    def wait(_seconds: float) -> None:
        world.now += 0.009
        got.append(slow.take())

    world.wait = wait  # type: ignore[method-assign]

    def f(_items: list[str]) -> Iterator[list[int]]:
        for number in range(500):
            yield [number, number]
            quick.take()

    world.run(f, slow_after=1.0)
    assert [*range(500), ENDED] == got + parts_of(slow)


def test_nobody_is_dropped_while_nobody_waits() -> None:
    """A single slow consumer holds back its own generator for as long as it likes."""
    world = World("alone", max_buffer=1)
    request = world.requests[0]
    got: list[Any] = []

    def take_every_fifth_time() -> None:
        if len(world.waits) % 5 == 0:
            got.append(request.take())

    world.while_waiting = take_every_fifth_time
    world.run(lambda items: counting([0 for _ in items], to=4))
    assert [0, 1, 2, 3, ENDED] == got + parts_of(request)
    assert 20 == len(world.waits)


def test_items_in_the_queue_are_others_too() -> None:
    """A slow consumer that is alone in its batch keeps those waiting who come after it."""
    world = World("slow", max_buffer=1)
    world.others_wait = True
    world.run(counting_from_zero, slow_after=0.5)
    assert [0.5] == world.waits
    assert isinstance(parts_of(world.requests[0])[-1], ConsumerTooSlow)


def counting_from_zero(items: list[Any]) -> Iterator[list[int]]:
    return counting([0 for _ in items])


def test_slow_after_zero_waits_for_nobody() -> None:
    """The bound of the buffer is then hard."""
    world = World("slow", "quick", max_buffer=1)
    world.run(counting_from_zero, slow_after=0.0)
    assert [] == world.waits
    assert isinstance(parts_of(world.requests[0])[-1], ConsumerTooSlow)


def test_who_leaves_is_not_waited_for() -> None:
    """A full buffer whose consumer has gone holds nobody up."""
    world = World("leaves", "stays", max_buffer=1)
    stays = world.requests[1]
    got: list[Any] = []

    def act() -> None:
        world.leave(0)
        got.append(stays.take())

    world.while_waiting = act
    world.run(counting_from_zero, slow_after=100.0)
    assert [0, 1, 2, ENDED] == got + parts_of(stays)
