"""``replay``: a new model answers recorded calls as the current one does, or it is rejected."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, TIMEOUT, World, outcome, run, until

from modelguard import Idle, Loading, ModelGuard, Replay, Uses, batched, guard_of, replicas, telemetry
from modelguard.errors import LoadTimeout, ModelRejected

Answering = Callable[[Any], Any]


class Models:
    """A loader of models that answer as the test says, one function for each load; the last one again after that."""

    def __init__(self, *answering: Answering) -> None:
        self._left = list(answering)
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self) -> Any:
        answer = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        model = _Model(answer)
        self.alive.add(model)
        return model


class _Model:
    def __init__(self, answer: Answering) -> None:
        self.answer = answer


def same(value: Any) -> Any:
    return value


def other(value: Any) -> Any:
    return (value, "otherwise")


def broken(value: Any) -> Any:
    raise ValueError(f"cannot read {value}")


def guarded(
    world: World, *answering: Answering, replay: Any = 100, **options: Any
) -> tuple[ModelGuard[Any], Answering]:
    """A guard of such models, and a decorated function."""
    guard = world.guard(Models(*answering), replay=replay, **options)

    @guard
    def ask(model: Any, value: Any) -> Any:
        return model.answer(value)

    return guard, ask


def reason(guard: ModelGuard[Any]) -> str:
    """Why a reload is rejected."""
    with pytest.raises(ModelRejected) as rejected:
        guard.reload()
    return rejected.value.reason


async def pause() -> None:
    """Let the event loop do something else."""
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    await future


# The rule


def test_a_model_that_agrees_is_accepted(world: World) -> None:
    """The event says how many calls were compared, and with which result."""
    guard, ask = guarded(world, same)
    for value in range(20):
        ask(value)
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (2, 1, 20, 20, 20) == (event.generation, event.current, event.recorded, event.compared, event.agreed)
    assert (1.0, True) == (event.slowdown, event.accepted)
    assert 2 == guard.status().generation


def test_a_model_that_answers_otherwise_is_rejected(world: World) -> None:
    """The current model goes on, the new one is released, and the next attempt is compared again."""
    models = Models(same, other, same)
    guard = world.guard(models, replay=100, unload=lambda model: None)

    @guard
    def ask(model: Any, value: Any) -> Any:
        return model.answer(value)

    for value in range(20):
        ask(value)
    expected = "replay: 20 of 20 recorded calls answer otherwise than before, and min_agreement=0.9 allows 2"
    assert expected == reason(guard)
    assert ["rejected"] == [event.cause for event in world.seen(telemetry.LoadDiscarded)]
    assert (1, 5) == (guard.status().generation, ask(5))
    assert 1 == len(models.alive)
    guard.reload()
    world.join()
    assert [False, True] == [event.accepted for event in world.seen(telemetry.ReplayFinished)]
    assert 2 == guard.status().generation


@pytest.mark.parametrize(("differing", "accepted"), [(0, True), (2, True), (3, False), (20, False)])
def test_as_many_answers_may_differ_as_the_rule_says(world: World, differing: int, *, accepted: bool) -> None:
    """Of twenty answers and with a share of 0.9, two."""
    guard, ask = guarded(world, same, lambda value: value + 1000 if value < differing else value)
    for value in range(20):
        ask(value)
    if accepted:
        guard.reload()
        world.join()
    else:
        assert f"{differing} of 20 recorded calls" in reason(guard)
    assert (20 - differing, accepted) == (
        world.last(telemetry.ReplayFinished).agreed,
        world.last(telemetry.ReplayFinished).accepted,
    )


def test_only_the_latest_calls_count(world: World) -> None:
    """``replay=3`` keeps three."""
    guard, ask = guarded(world, same, replay=Replay(3, min_agreement=1))
    for value in range(3):
        ask(value)
    guard.reload()
    world.join()
    assert 3 == world.last(telemetry.ReplayFinished).recorded


def test_answers_are_compared_as_the_author_says(world: World) -> None:
    """``same`` gets the new answer first, and decides by what it returns."""
    seen = []

    def close(new: float, current: float) -> bool:
        seen.append((new, current))
        return abs(new - current) < 0.1

    guard, ask = guarded(world, same, lambda value: value + 0.01, replay=Replay(same=close))
    for value in range(3):
        ask(value)
    guard.reload()
    assert [(0.01, 0), (1.01, 1), (2.01, 2)] == seen


def test_a_comparison_that_raises_is_a_disagreement(world: World) -> None:
    """As ``==`` of arrays does; the reason names the error, so that the author finds it."""

    def ambiguous(new: Any, current: Any) -> bool:
        raise ValueError("the truth value of an array is ambiguous")

    guard, ask = guarded(world, same, replay=Replay(same=ambiguous))
    for value in range(3):
        ask(value)
    assert "3 of 3 recorded calls answer otherwise than before (raised: ValueError in same() 3 times)" in reason(guard)


def test_a_slow_model_is_rejected(world: World) -> None:
    """By the median, so a single slow call does no harm."""

    def taking(seconds: float) -> Answering:
        def answer(value: Any) -> Any:
            world.tick(seconds * (100 if value == 7 else 1))
            return value

        return answer

    guard, ask = guarded(world, taking(0.01), taking(0.015), taking(0.05))
    for value in range(20):
        ask(value)
    guard.reload()
    world.join()
    assert 1.5 == pytest.approx(world.last(telemetry.ReplayFinished).slowdown)
    expected = "replay: recorded calls take 3.3 times as long as before (the median of 20), and max_slowdown=2"
    assert expected == reason(guard)


@pytest.mark.parametrize(("calls", "timeout"), [(20, 10), (100, 2)], ids=["time enough", "not for all calls"])
def test_a_model_that_has_not_met_the_inputs_yet_is_not_slow(world: World, calls: int, timeout: float) -> None:
    """The current one has met them all, and spaCy's vocabulary, a cache and compiled kernels know that."""

    def caching() -> Answering:
        met = set[Any]()

        def answer(value: Any) -> Any:
            world.tick(0.01 if value in met else 0.05)
            met.add(value)
            return value

        return answer

    guard, ask = guarded(world, caching(), caching(), replay=Replay(timeout=timeout))
    for value in range(calls):
        ask(value)
    guard.reload()
    world.join()
    assert (2, 1.0) == (guard.status().generation, pytest.approx(world.last(telemetry.ReplayFinished).slowdown))


@pytest.mark.parametrize(("calls", "options"), [(9, {}), (20, {"max_slowdown": None})])
def test_a_slow_model_is_accepted_where_the_rule_does_not_judge(
    world: World, calls: int, options: dict[str, Any]
) -> None:
    """From fewer than ten calls no median is taken, and None turns the rule off."""
    guard, ask = guarded(world, lambda _: world.tick(0.01), lambda _: world.tick(1), replay=Replay(**options))
    for value in range(calls):
        ask(value)
    guard.reload()
    world.join()
    assert 2 == guard.status().generation


def test_a_call_that_raises_on_the_current_model_says_nothing(world: World) -> None:
    """Bad inputs are left out, whatever the new model makes of them."""

    def strict(value: int) -> int:
        if value % 2:
            raise ValueError("odd")
        return value

    guard, ask = guarded(world, strict, same)
    for value in range(20):
        if value % 2:
            with pytest.raises(ValueError, match="odd"):
                ask(value)
        else:
            ask(value)
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (20, 10, 10) == (event.recorded, event.compared, event.agreed)


def test_a_call_that_raises_on_the_new_model_alone_disagrees(world: World) -> None:
    """The reason names the type of the error, and not its text, which may show an input."""
    guard, ask = guarded(world, same, broken)
    for value in range(3):
        ask(f"secret-{value}")
    text = reason(guard)
    assert "3 of 3 recorded calls answer otherwise than before (raised: ValueError 3 times)" in text
    assert "secret" not in text


# When nothing is compared


def test_without_a_current_model_nothing_is_compared(world: World) -> None:
    """At the first load, after ``unload()`` and after ``Idle``, the model is accepted."""
    guard, ask = guarded(world, same, other, reload_on=Idle("1m"))
    ask(1)
    guard.unload()
    assert (1, "otherwise") == ask(1)
    world.join()
    assert [] == world.seen(telemetry.ReplayFinished)


def test_without_recorded_calls_the_model_is_accepted(world: World) -> None:
    """And the event says that nothing was compared."""
    guard, _ = guarded(world, same, other)
    guard.load()
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (0, 0, True) == (event.recorded, event.compared, event.accepted)


def test_memory_that_is_short_leaves_the_comparison_out(world: World) -> None:
    """Where ``swap="auto"`` drains first, there is no model to compare with."""
    world.model_size, world.headroom = 100 * MB, 110 * MB
    guard = world.guard(replay=100)

    @guard
    def words(model: Any, text: str) -> Any:
        return model.words(text)

    words("a b")
    world.join()
    guard.reload()
    world.join()
    assert "drain_first" == world.last(telemetry.SwapChosen).swap
    assert [] == world.seen(telemetry.ReplayFinished)


# What is recorded


class Service:
    """Functions of all kinds."""

    def __init__(self, guard: ModelGuard[Any]) -> None:
        @guard
        def plain(model: Any, text: str) -> list[str]:
            return list(model.answer(text.split()))

        @guard
        def lazy(model: Any, text: str) -> Iterator[str]:
            return iter(model.answer(text.split()))

        @guard
        def generator(model: Any, text: str) -> Iterator[str]:
            yield from model.answer(text.split())

        @guard
        async def coroutine(model: Any, text: str) -> list[str]:
            await pause()
            return list(model.answer(text.split()))

        @guard
        async def async_generator(model: Any, text: str) -> AsyncIterator[str]:
            for word in model.answer(text.split()):
                await pause()
                yield word

        class Methods:
            @guard
            def method(self, model: Any, text: str) -> list[str]:
                return list(model.answer(text.split()))

            @classmethod
            @guard
            def class_method(cls, model: Any, text: str) -> list[str]:
                return list(model.answer(text.split()))

            @guard
            @staticmethod
            def static_method(model: Any, text: str) -> list[str]:
                return list(model.answer(text.split()))

        self._methods = Methods()
        self.functions: dict[str, Callable[..., Any]] = {
            "plain": plain,
            "lazy": lazy,
            "generator": generator,
            "coroutine": coroutine,
            "async generator": async_generator,
            "method": self._methods.method,
            "class method": self._methods.class_method,
            "static method": self._methods.static_method,
        }


KINDS = [
    "plain",
    "lazy",
    "generator",
    "coroutine",
    "async generator",
    "method",
    "class method",
    "static method",
]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_function_is_compared(world: World, kind: str) -> None:
    """Lazy answers as lists; and nothing keeps a model alive afterwards."""
    models = Models(same, lambda words: words[::-1], same)
    guard = world.guard(models, replay=100, unload=lambda model: None)
    function = Service(guard).functions[kind]
    for _ in range(3):
        assert ["a", "b"] == run(function(text="a b"))
    assert "3 of 3 recorded calls answer otherwise" in reason(guard)
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (3, 3) == (event.compared, event.agreed)
    assert [False] == [event.alive for event in world.seen(telemetry.GenerationReleased)]
    assert 1 == len(models.alive)
    assert (0, 0) == (guard.status().uses, guard.status().in_flight)


def test_batches_are_compared(world: World) -> None:
    """A batch is one call, with the list of its items."""
    guard = world.guard(Models(same, other), replay=100)

    @batched(max_size=4)
    @guard
    def ask(model: Any, items: list[int]) -> list[Any]:
        return [model.answer(item) for item in items]

    assert [1, 2] == [ask(1), ask(2)]
    assert "2 of 2 recorded calls answer otherwise" in reason(guard)


def test_futures_are_left_out(world: World) -> None:
    """Two futures are never equal, and nobody waits for them."""
    guard = world.guard(Models(same), replay=100)

    @guard
    def submit(model: Any, value: int) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(model.answer(value))
        return future

    assert 1 == submit(1).result()
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (1, 0, True) == (event.recorded, event.compared, event.accepted)


def test_arguments_are_copies(world: World) -> None:
    """Neither the function nor its caller can change what is compared."""
    guard = world.guard(Models(same), replay=100)
    seen: list[list[int]] = []

    @guard
    def take_all(model: Any, items: list[int]) -> int:
        seen.append(list(items))
        items.clear()
        return len(items)

    given = [1, 2, 3]
    take_all(given)
    given.append(4)
    guard.reload()
    world.join()
    assert [[1, 2, 3]] * 3 == seen


def test_arguments_that_cannot_be_copied_are_left_out(world: World) -> None:
    """The call itself is not affected."""
    guard, ask = guarded(world, same)
    lock = threading.Lock()
    assert lock is ask(lock)
    ask(1)
    guard.reload()
    world.join()
    assert 1 == world.last(telemetry.ReplayFinished).recorded


class Unrestorable:
    """Can be pickled, and not be restored."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_arguments_that_cannot_be_restored_are_left_out(world: World) -> None:
    """A reload does not fail for them."""
    guard, ask = guarded(world, same)
    ask(Unrestorable())
    ask(1)
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (2, 1, 1) == (event.recorded, event.compared, event.agreed)


def test_calls_inside_calls_and_warm_ups_are_not_recorded(world: World) -> None:
    """The outer call repeats the inner one, and a warm-up is no traffic."""
    guard = world.guard(Models(same), replay=100, warmup=lambda model: inner(0))

    @guard
    def inner(model: Any, value: int) -> int:
        return int(model.answer(value))

    @guard
    def outer(model: Any, value: int) -> int:
        return inner(value) + 1

    assert 2 == outer(1)
    guard.reload()
    guard.reload()
    world.join()
    assert [1, 1] == [event.recorded for event in world.seen(telemetry.ReplayFinished)]


def test_leases_are_not_recorded(world: World) -> None:
    """That is the way for code that must not run again."""
    guard, _ = guarded(world, same)
    assert 5 == guard.lease().__enter__().answer(5)
    with guard.lease() as model:
        model.answer(5)
    world.join()
    assert 0 == len(guard.engine.recorded or ())


def test_a_method_does_not_keep_its_instance_alive(world: World) -> None:
    """A call whose instance is gone is left out."""
    guard = world.guard(Models(same), replay=100)

    class Request:
        @guard
        def answer(self, model: Any, value: int) -> int:
            return int(model.answer(value))

    request = Request()
    kept, alive = Request(), weakref.ref(request)
    assert [1, 2] == [request.answer(1), kept.answer(2)]
    del request
    assert alive() is None
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (2, 1) == (event.recorded, event.compared)


def test_what_was_recorded_is_shown_nowhere(world: World) -> None:
    """No event, status or text shows an input or an answer."""
    guard, ask = guarded(world, same, other)
    ask("secret")
    shown = reason(guard) + repr(world.events) + repr(guard.status()) + repr(guard)
    recorded = guard.engine.recorded
    assert recorded is not None
    shown += repr(recorded) + repr(recorded.snapshot())
    assert "secret" not in shown


def test_a_closed_guard_keeps_nothing(world: World) -> None:
    """What was recorded ends with it, and a guard that is opened again records anew."""
    guard, ask = guarded(world, same)
    with guard:
        ask(1)
    recorded = guard.engine.recorded
    assert recorded is not None
    assert 0 == len(recorded)
    with guard:
        ask(1)
        assert 1 == len(recorded)


def test_calls_that_are_refused_to_be_made_are_no_harm(world: World) -> None:
    """A call with wrong arguments raises on both models."""
    guard, ask = guarded(world, same)
    with pytest.raises(TypeError, match="leave the model out"):
        ask(1, 2)  # type: ignore[call-arg]
    ask(1)
    guard.reload()
    world.join()
    assert 1 == world.last(telemetry.ReplayFinished).compared


# What it does not disturb


def test_it_is_no_use(world: World) -> None:
    """Neither as calls nor as errors; also of guarded functions that the recorded ones call."""
    guard = world.guard(Models(same, other), replay=100, reload_on=Uses(1000))

    @guard
    def inner(model: Any, value: int) -> Any:
        if value == 3:
            raise ValueError("three")
        return model.answer(value)

    @guard
    def outer(model: Any, value: int) -> Any:
        try:
            return inner(value)
        except ValueError:
            return None

    for value in range(4):
        outer(value)
    world.join()
    uses = guard.status().uses
    kinds = {type(event) for event in world.events}
    reason(guard)
    assert (uses, 0) == (guard.status().uses, guard.status().in_flight)
    new = {type(event) for event in world.events} - kinds
    assert {telemetry.SwapChosen, telemetry.ReplayFinished, telemetry.LoadErrored, telemetry.LoadDiscarded} >= new - {
        telemetry.GenerationReleased
    }


def test_a_guard_without_replay_records_nothing(world: World) -> None:
    """Its functions are those that it would have anyway."""
    guard = world.guard(Models(same))
    assert guard.engine.recorded is None


def test_it_comes_after_validate_and_warm_up(world: World) -> None:
    """A model that fails them is not compared, and a cold one would be too slow."""
    order: list[str] = []
    guard = world.guard(
        Models(lambda value: order.append("answer")),
        replay=100,
        validate=lambda model: order.append("validate"),
        warmup=lambda model: order.append("warmup"),
    )

    @guard
    def ask(model: Any, value: int) -> Any:
        return model.answer(value)

    ask(1)
    order.clear()
    guard.reload()
    assert ["validate", "warmup", "answer", "answer"] == order


def test_time_is_bounded(world: World) -> None:
    """Those that were compared by then count."""
    guard, ask = guarded(world, lambda value: world.tick(1) or value, replay=Replay(timeout="10s"))
    for value in range(20):
        ask(value)
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (20, 5, 10.0, 1.0) == (event.recorded, event.compared, event.seconds, event.slowdown)


def test_a_model_that_is_too_slow_for_ten_calls_is_rejected(world: World) -> None:
    """If time is up before, those that have ended decide."""
    guard, ask = guarded(world, lambda _: world.tick(0.01), lambda _: world.tick(6), replay=Replay(timeout="10s"))
    for value in range(20):
        ask(value)
    assert "replay: recorded calls take 600.0 times as long as before (the median of 2)" in reason(guard)


def test_a_stream_that_ends_on_the_current_model_alone_is_too_slow(world: World) -> None:
    """It is cut off when time is up, and took too long by then."""
    guard = world.guard(Models(lambda _: None, lambda _: world.tick(1)), replay=Replay(timeout="10s"))

    @guard
    def numbers(model: Any) -> Iterator[int]:
        for at in range(100):
            model.answer(at)
            yield at

    assert 100 == len(list(numbers()))
    assert "times as long as before (the median of 1)" in reason(guard)
    event = world.last(telemetry.ReplayFinished)
    assert (0, False) == (event.compared, event.accepted)


def test_a_coroutine_that_ends_on_the_current_model_alone_is_too_slow(world: World) -> None:
    """It is cancelled when time is up, and once more when it is timed again."""
    guard = world.guard(Models(same, other), replay=Replay(timeout="10s"))
    cancelled = []

    @guard
    def answer(model: Any) -> Any:
        hangs = model.answer(1) != 1
        world.tick(10 if hangs else 0.01)  # before the loop is asked how much time is left

        async def later() -> int:
            try:
                await (asyncio.Event().wait() if hangs else pause())
            except asyncio.CancelledError:
                cancelled.append(True)
                raise
            return 1

        return later()

    assert 1 == asyncio.run(answer())
    assert "recorded calls take 1000.0 times as long as before (the median of 1)" in reason(guard)
    assert [True, True] == cancelled


def test_an_endless_stream_ends_with_the_time(world: World) -> None:
    """It is left out."""
    guard = world.guard(Models(same), replay=Replay(timeout="10s"))

    @guard
    def count(model: Any) -> Iterator[int]:
        at = 0
        while True:
            world.tick(1)
            yield (at := at + 1)

    numbers = count()
    assert 1 == next(numbers)
    numbers.close()
    guard.reload()
    world.join()
    assert 0 == world.last(telemetry.ReplayFinished).compared


def test_a_coroutine_that_hangs_is_left_behind(world: World) -> None:
    """As one that waits for something of the loop that it was written for."""
    guard = world.guard(Models(same), replay=Replay(timeout=0.01))
    hangs = False

    @guard
    async def ask(model: Any, value: int) -> Any:
        if hangs:
            await asyncio.Event().wait()
        return model.answer(value)

    assert 1 == asyncio.run(ask(1))
    hangs = True
    guard.reload()
    world.join()
    event = world.last(telemetry.ReplayFinished)
    assert (0, True) == (event.compared, event.accepted)


def test_a_call_that_hangs_ends_with_the_timeout_of_the_load(world: World) -> None:
    """The current model goes on, and is released in the end."""
    guard = world.guard(Models(same), replay=100, loading=Loading(0.5))
    hangs, going_on, over = threading.Event(), threading.Event(), threading.Event()
    going_on.set()

    @guard
    def ask(model: Any, value: int) -> Any:
        hangs.set()
        assert going_on.wait(TIMEOUT)
        over.set()
        return model.answer(value)

    ask(1)
    going_on.clear()
    with pytest.raises(LoadTimeout):
        guard.reload()
    going_on.set()
    world.join()
    assert 1 == guard.status().generation
    assert 0 == guard.status().in_flight


def test_closing_ends_it(world: World) -> None:
    """A guard that is closed meanwhile waits for one call at most."""
    guard, calls = world.guard(Models(same), replay=100), 0
    running, going_on = threading.Event(), threading.Event()
    going_on.set()

    @guard
    def ask(model: Any, value: int) -> Any:
        nonlocal calls
        calls += 1
        running.set()
        assert going_on.wait(TIMEOUT)
        return model.answer(value)

    for value in range(5):
        ask(value)
    running.clear()
    going_on.clear()
    calls = 0
    guard.reload(wait=False)
    assert running.wait(TIMEOUT)
    closing = world.spawn(guard.close)
    until(lambda: guard.engine.state.closed)
    going_on.set()
    outcome(closing)
    world.join()
    assert 2 >= calls
    assert "closed" == guard.status().state


def test_a_rollback_ends_it(world: World) -> None:
    """The model that comes back takes calls, and the new one is discarded."""
    guard = world.guard(Models(same), replay=100, keep_previous=True)
    running, going_on = threading.Event(), threading.Event()
    going_on.set()

    @guard
    def ask(model: Any, value: int) -> Any:
        running.set()
        assert going_on.wait(TIMEOUT)
        return model.answer(value)

    for value in range(5):
        ask(value)
    guard.reload()
    world.join()
    running.clear()
    going_on.clear()
    guard.reload(wait=False)
    assert running.wait(TIMEOUT)
    guard.rollback()
    going_on.set()
    world.join()
    assert (1, 5) == (guard.status().generation, ask(5))
    assert 2 > world.last(telemetry.ReplayFinished).compared


def test_a_model_for_one_thread_gets_no_second_one(world: World) -> None:
    """Batches of one thread and the recorded calls take turns on the current model."""
    inside = threading.Lock()
    overlaps: list[int] = []

    def answer(value: int) -> int:
        if not inside.acquire(blocking=False):
            overlaps.append(value)
            return -1
        try:
            return sum(range(value % 7 * 100))
        finally:
            inside.release()

    models = Models(answer, sorted, same)  # the new ones are rejected, so that all reloads meet the first one
    guard = world.guard(models, replay=50)

    @batched(max_size=4, max_wait=0)
    @guard
    def ask(model: Any, items: list[int]) -> list[int]:
        return [model.answer(item) for item in items]

    over = threading.Event()

    def traffic() -> int:
        made = 0
        while not over.is_set():
            ask(made)
            made += 1
        return made

    first = world.spawn(traffic)
    until(lambda: len(guard.engine.recorded or ()) == 50)
    for _ in range(5):
        reason(guard)
    over.set()
    outcome(first)
    assert [] == overlaps
    assert 1 == guard.status().generation


def test_a_new_model_that_hangs_holds_up_no_call(world: World) -> None:
    """Calls wait for recorded calls on their own model, and not for those on the new one."""
    hangs, going_on = threading.Event(), threading.Event()

    def hang(value: Any) -> Any:
        hangs.set()
        assert going_on.wait(TIMEOUT)
        return value

    guard, ask = guarded(world, same, hang, replay=Replay(timeout=TIMEOUT))
    for value in range(3):
        ask(value)
    guard.reload(wait=False)
    assert hangs.wait(TIMEOUT)
    assert 5 == ask(5)
    going_on.set()
    world.join()
    assert 2 == guard.status().generation


@pytest.mark.parametrize("threads", [1, 4])
def test_no_call_is_lost_or_waits_for_ever(world: World, threads: int) -> None:
    """Beside reloads that are accepted and rejected, in turn."""
    guard, ask = guarded(world, same, same, other, same, other, same, replay=20)
    over = threading.Event()

    def traffic() -> tuple[int, int]:
        made = wrong = 0
        while not over.is_set():
            wrong += ask(made) != made
            made += 1
        return made, wrong

    callers = [world.spawn(traffic) for _ in range(threads)]
    until(lambda: len(guard.engine.recorded or ()) == 20)
    outcomes = []
    for _ in range(5):
        try:
            guard.reload()
            outcomes.append(True)
        except ModelRejected:
            outcomes.append(False)
    over.set()
    assert all(outcome(caller)[1] == 0 and outcome(caller)[0] > 0 for caller in callers)
    assert [True, False, True, False, True] == outcomes


def test_replicas_are_refused(world: World) -> None:
    """Each takes one call at a time, so none could be called beside."""
    with pytest.raises(Exception, match=r"replay=.*a replica takes one call at a time"):
        replicas(world.guard(Models(same), replay=10), 2)


def test_the_guard_of_a_function_is_found(world: World) -> None:
    """Recording changes nothing about the decorated function."""
    guard, ask = guarded(world, same)
    assert guard is guard_of(ask)
    assert "ask" == ask.__name__
