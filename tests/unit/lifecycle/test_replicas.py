"""``replicas``: copies of a model, each for one call at a time, replaced one after another."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from tests.unit.interrupts import interrupted_everywhere, traces_instructions
from tests.unit.lifecycle.world import until

from modelguard import TTL, Idle, MemoryGrowth, MemoryLimit, Swap, Uses, batched, guard
from modelguard.errors import (
    InvalidOption,
    LoadFailed,
    ModelRejected,
    Overloaded,
    Reloading,
    WouldDeadlock,
)
from modelguard.lifecycle.guard import guards
from modelguard.lifecycle.replicas import ModelReplicas, replicas
from modelguard.testing import Clock, Loader

TIMEOUT = 20.0


def generations(of: ModelReplicas[Any]) -> list[int]:
    return [status.generation for status in of.status()]


async def one_turn() -> None:
    """Let the tasks that were made begin."""
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


def in_use(of: ModelReplicas[Any]) -> int:
    return sum(status.in_flight for status in of.status())


@pytest.fixture
def pair(modelguard_clock: Clock, modelguard_loader: Loader) -> ModelReplicas[Any]:
    """Two replicas without a policy."""
    del modelguard_clock
    made = replicas(guard(modelguard_loader, reload_on=None, name="nlp"), 2)
    made._free._wait = 0.05  # for a free one; a load may take longer on a busy machine
    return made


def test_a_loader_with_a_cache_is_refused() -> None:
    """Copies that are one object would be used by two calls at once."""

    class Model:
        """Not thread-safe."""

    pair = replicas(guard(functools.cache(Model), reload_on=None, name="nlp"), 2)
    with pytest.raises(ModelRejected, match="returned a model that it has returned before"):
        pair.load()
    with pair.lease() as model:  # the first one serves
        assert isinstance(model, Model)


# Calls


def test_each_call_has_a_replica_for_itself(pair: ModelReplicas[Any]) -> None:
    """Two calls at once run on two models; a third has to wait, and is refused when its time is over."""
    pair.load()
    number = pair(lambda model: model.number)
    entered, leave = threading.Barrier(3), threading.Event()

    @pair
    def hold(_model: Any) -> None:
        entered.wait(TIMEOUT)
        assert leave.wait(TIMEOUT)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    entered.wait(TIMEOUT)
    with pytest.raises(Overloaded, match="all 2 replicas were in use"):
        number()
    with pytest.raises(Overloaded):
        asyncio.run(take_async(pair))
    leave.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert number() in {1, 2}


def test_a_replica_that_cannot_be_loaded_fails_no_call_while_another_serves(
    pair: ModelReplicas[Any], modelguard_clock: Clock, modelguard_loader: Loader
) -> None:
    """Calls wait for the one that has its model. Once it has none either, they get the error of the load."""
    number = pair(lambda model: model.number)
    assert number() == 1
    modelguard_loader.fail(None)
    for _ in range(3):  # each of them tries to load the other one
        with pair.lease(), pytest.raises(Overloaded, match="all 2 replicas were in use"):
            in_another_thread(number)
        assert in_another_thread(number) == 1
        modelguard_clock.advance("2m")  # its backoff is over
    pair.unload()
    with pytest.raises(LoadFailed):
        number()


def test_a_replica_that_cannot_be_loaded_keeps_no_other_from_it(
    modelguard_clock: Clock, modelguard_loader: Loader
) -> None:
    """While the second one waits for its backoff, a call that has to wait gets the third."""
    del modelguard_clock
    three = replicas(guard(modelguard_loader, reload_on=None, name="nlp"), 3)
    three._free._wait = 0.05
    number = three(lambda model: model.number)
    assert number() == 1
    modelguard_loader.fail(1)
    with three.lease():
        with pytest.raises(Overloaded):
            in_another_thread(number)
        three._free._wait = TIMEOUT
        assert in_another_thread(number) == 3


def in_another_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(contextvars.Context().run, work).result(TIMEOUT)  # also where threads inherit one


async def take_async(pair: ModelReplicas[Any]) -> int:
    async with pair.lease() as model:
        number: int = model.number
        return number


def test_a_call_inside_a_call_runs_on_the_same_replica(pair: ModelReplicas[Any]) -> None:
    """It would otherwise wait for a replica that its caller keeps."""
    number = pair(lambda model: model.number)

    @pair
    def outer(model: Any) -> bool:
        return bool(model.number == number() == number())

    with pair.lease():
        assert outer()
    assert 0 == in_use(pair)


def compare_beside_a_call(end: threading.Event, **options: Any) -> tuple[list[bool], Exception | None]:
    """Replace two replicas beside a call on the first; whether `validate` met it on each old model, and the error."""

    class Model:
        in_call = False

    met: list[bool] = []
    made = guard(Model, reload_on=None, validate=lambda _, old: old is None or not met.append(old.in_call), **options)
    pair = replicas(made, 2)
    pair.load()
    entered = threading.Event()

    @pair
    def hold(model: Model) -> None:
        model.in_call = True
        entered.set()
        assert end.wait(TIMEOUT)
        model.in_call = False

    failed: list[Exception] = []

    def reload() -> None:
        try:
            pair.reload()
        except ModelRejected as error:
            failed.append(error)

    calling, reloading = threading.Thread(target=hold), threading.Thread(target=reload)
    calling.start()
    assert entered.wait(TIMEOUT)
    reloading.start()
    until(lambda: bool(met or failed or pair._free.line))
    if not options:
        end.set()
    reloading.join(TIMEOUT)
    end.set()
    calling.join(TIMEOUT)
    return met, next(iter(failed), None)


def test_a_model_is_compared_with_the_current_one_when_no_call_has_that() -> None:
    """`validate` of a new and an old model is a call on the old one, which may not be thread-safe."""
    assert ([False, False], None) == compare_beside_a_call(threading.Event())


def test_a_comparison_waits_for_a_call_as_long_as_for_its_end() -> None:
    """A call that does not end must not hold up the reload for ever."""
    met, error = compare_beside_a_call(threading.Event(), swap=Swap(drain_timeout=0.05))
    assert [] == met
    assert "the current model, which it is compared with, was in use for all of drain_timeout" in str(error)


def test_every_kind_of_function(pair: ModelReplicas[Any]) -> None:
    """A generator, a coroutine and an asynchronous generator keep their replica to their end."""

    @pair
    def steps(model: Any) -> Iterator[int]:
        yield model.number
        yield model.number

    @pair
    async def later(model: Any) -> int:
        assert 1 == in_use(pair)
        number: int = model.number
        return number

    @pair
    async def steps_later(model: Any) -> AsyncIterator[int]:
        yield model.number
        assert 1 == in_use(pair)

    async def both() -> tuple[int, list[int]]:
        return await later(), [number async for number in steps_later()]

    running = steps()
    assert 1 == next(running)
    assert 1 == in_use(pair)
    assert [1] == list(running)
    assert (1, [1]) == asyncio.run(both())
    dropped = steps()
    next(dropped)
    del dropped
    assert 0 == in_use(pair)


def test_errors_give_the_replica_back(pair: ModelReplicas[Any]) -> None:
    """A call that raises leaves nothing behind, nor does one whose model cannot be loaded."""

    @pair
    def fails(_model: Any) -> None:
        raise KeyError

    for _ in range(3):
        with pytest.raises(KeyError):
            fails()
    broken = replicas(guard(lambda: None, reload_on=None, name="broken"), 2)
    for _ in range(3):
        with pytest.raises(LoadFailed), broken.lease():
            pass
    assert (0, 0) == (in_use(pair), in_use(broken))


@traces_instructions
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "first call"])
def test_an_exception_of_a_signal_handler_leaves_no_replica_in_use(*, loaded: bool) -> None:
    """Wherever in a call it comes: the next calls find all of them free."""

    def made() -> tuple[ModelReplicas[Any], Callable[[], None]]:
        pair = replicas(guard(dict, reload_on=None, name="nlp", wait_timeout=TIMEOUT), 2)
        if loaded:
            pair.load()
        return pair, pair(lambda _: None)

    for (pair, _), where in interrupted_everywhere(made, lambda made: made[1]()):
        assert 0 == in_use(pair), where
        with pair.lease(timeout=TIMEOUT), pair.lease(timeout=TIMEOUT):
            assert 2 == in_use(pair), where


def test_a_cancelled_wait_takes_no_replica(pair: ModelReplicas[Any]) -> None:
    """A task that is cancelled while it waits leaves the replica to others."""
    pair._free._wait = TIMEOUT

    held = [pair._free.take() for _ in range(2)]

    async def main() -> None:
        waiting = asyncio.create_task(take_async(pair))
        await one_turn()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    for lease in held:
        lease.end(failed=False)
    assert [0, 1] == sorted(pair._free._free)


def test_a_wait_that_is_cancelled_as_it_ends_gives_its_replica_back(pair: ModelReplicas[Any]) -> None:
    """At once, also while somebody keeps the error and with it the frames that have waited."""
    pair._free._wait = TIMEOUT
    held = [pair._free.take() for _ in range(2)]

    async def main() -> BaseException:
        waiting = asyncio.create_task(take_async(pair))
        await one_turn()  # it is in line then
        held[0].end(failed=False)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await waiting
        return cancelled.value

    kept = asyncio.run(main())
    assert (1, 1) == (len(pair._free._free), in_use(pair)), kept


def test_the_collector_may_return_a_replica_while_another_is_chosen() -> None:
    """It runs in the middle of any step that makes an object."""
    many = replicas(guard(dict, reload_on=None, name="nlp"), 25)
    many.load()
    gc.collect()
    for objects in range(1, 200):
        gc.disable()
        cycle: list[Any] = [many._free.take()]
        cycle.append(cycle)
        del cycle
        threshold = gc.get_threshold()
        gc.set_threshold(objects)
        gc.enable()
        try:
            many._free.take().end(failed=False)
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
    assert 25 == len(many._free._free)


def test_a_waiting_task_gets_the_next_free_replica(pair: ModelReplicas[Any]) -> None:
    """It is woken when a call ends, in whichever thread that is."""
    pair._free._wait = TIMEOUT
    held = [pair._free.take() for _ in range(2)]

    async def main() -> int:
        waiting = asyncio.create_task(take_async(pair))
        await one_turn()
        thread = threading.Thread(target=held[1].end, kwargs={"failed": False})
        thread.start()
        return await waiting

    assert 2 == asyncio.run(main())
    held[0].end(failed=False)


def test_one_queue_feeds_all(pair: ModelReplicas[Any]) -> None:
    """Batches run side by side, each on a model of its own."""
    together = threading.Barrier(2)

    @batched(max_size=1, threads=2)
    @pair
    def number(model: Any, items: list[int]) -> list[int]:
        together.wait(TIMEOUT)
        return [model.number for _ in items]

    assert {1, 2} == {future.result(TIMEOUT) for future in [number.submit(1), number.submit(2)]}


def test_a_stream_keeps_its_replica(pair: ModelReplicas[Any]) -> None:
    """Two batches of streams run side by side, each on a model of its own from the first part to the last."""

    @batched(max_size=1, threads=2)
    @pair
    def numbers(model: Any, items: list[int]) -> Iterator[list[int]]:
        while True:
            yield [model.number for _ in items]

    with numbers.stream(1) as one, numbers.stream(2) as two:
        first, second = next(one), next(two)
        assert {1, 2} == {first, second}
        assert ([first] * 100, [second] * 100) == ([next(one) for _ in range(100)], [next(two) for _ in range(100)])
    numbers.close()
    assert 0 == in_use(pair)


class Exclusive:
    """A model that fails if it is used twice at once."""

    def __init__(self) -> None:
        self._used = False

    def __enter__(self) -> None:
        assert not self._used
        self._used = True
        os.sched_yield()

    def __exit__(self, *_error: object) -> None:
        self._used = False


def calls_of(pair: ModelReplicas[Exclusive]) -> list[Any]:
    """One function of each kind, which fails if it is told to."""

    @pair
    def call(model: Exclusive, fails: bool) -> None:  # noqa: FBT001
        with model:
            if fails:
                raise KeyError

    @pair
    def steps(model: Exclusive, fails: bool) -> Iterator[bool]:  # noqa: FBT001
        with model:
            yield fails

    @pair
    async def call_later(model: Exclusive, fails: bool) -> None:  # noqa: FBT001
        with model:
            if fails:
                raise KeyError

    return [call, lambda fails: next(steps(fails)), lambda fails: asyncio.run(call_later(fails))]


def test_no_replica_is_ever_used_twice_at_once() -> None:
    """Threads and event loops, calls and streams, while reloads roll and calls fail."""
    pair = replicas(guard(Exclusive, reload_on=Uses(50), swap=Swap(defer=0), name="exclusive"), 2)
    calls = calls_of(pair)
    done: list[None] = []

    def thread(number: int) -> None:
        for step in range(100):
            with suppress(KeyError):
                calls[(number + step) % 3](step % 7 == 0)
            done.append(None)

    threads = [threading.Thread(target=thread, args=(number,)) for number in range(4)]
    with pair:
        for one in threads:
            one.start()
        pair.reload()
        for one in threads:
            one.join(TIMEOUT)
        assert (400, 0) == (len(done), in_use(pair))
        assert sum(status.reloads for status in pair.status()) >= 2


# Reloads


def test_a_reload_rolls(pair: ModelReplicas[Any], modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """All are replaced, one after another, and never are there more than one too many."""
    pair.load()
    pair.reload()
    modelguard_clock.settle()  # a reload returns when the new model takes calls; the old one is released behind it
    assert ([2, 2], 2) == (generations(pair), modelguard_loader.alive)


def test_an_unload_ends_a_reload_that_rolls(pair: ModelReplicas[Any], modelguard_clock: Clock) -> None:
    """What it has released is not loaded again by a reload that was asked for before, and waits for its turn."""
    pair.load()
    with pair._free.rolling:
        pair.reload(wait=False)
        pair.unload()
    for thread in threading.enumerate():
        if thread.name == "modelguard-roll-nlp":
            thread.join(TIMEOUT)
    modelguard_clock.settle()
    assert {"idle"} == {status.state for status in pair.status()}


def test_requests_join_the_reload_that_has_not_begun(pair: ModelReplicas[Any], modelguard_loader: Loader) -> None:
    """As those of one guard: 200 make one more, and no thread each. Who asks again after an unload gets a model."""
    pair.load()
    with pair._free.rolling:
        for _ in range(200):
            pair.reload(wait=False)
        pair.unload()
        pair.reload(wait=False)
        assert 1 == sum(thread.name == "modelguard-roll-nlp" for thread in threading.enumerate())
    until(lambda: not (pair._free.next_roll or pair._free.rolling.locked()))
    assert ([2, 2], {"ready"}) == (generations(pair), {status.state for status in pair.status()})


def test_who_waits_for_a_reload_that_others_asked_for_hears_of_its_failure(
    pair: ModelReplicas[Any], modelguard_loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the first to ask for it does not wait."""
    pair.load()
    errors: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(LoadFailed) as caught:
            pair.reload()
        errors.append(caught.value)

    with pair._free.rolling:
        pair.reload(wait=False)
        waits = [threading.Thread(target=wait) for _ in range(2)]
        for one in waits:
            one.start()
        until(lambda: len(pair._free.next_roll) == 1 and all(one.is_alive() for one in waits))
        modelguard_loader.fail()
    for one in waits:
        one.join(TIMEOUT)
    assert 2 == len(set(map(id, errors)))
    assert "were not all replaced" in caplog.text


def test_a_due_policy_rolls(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """When the TTL of all is over at once, one is replaced while the other takes calls."""
    most = 0

    def load() -> Any:
        nonlocal most
        loading = sum(status.state in {"reloading", "draining", "loading"} for status in pair.status())
        most = max(most, loading)
        return modelguard_loader()

    pair = replicas(guard(load, reload_on=TTL("1h"), swap=Swap(defer=0)), 3)
    pair.load()
    modelguard_clock.advance("59m")
    assert [1, 1, 1] == generations(pair)
    modelguard_clock.advance("5m")
    assert [2, 2, 2] == generations(pair)
    assert 1 == most


def test_uses_count_for_each_replica(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """The one that was used is replaced."""
    pair = replicas(guard(modelguard_loader, reload_on=Uses(3), swap=Swap(defer=0)), 2)
    pair.load()
    number = pair(lambda model: model.number)
    held = pair._free.take()  # the first one
    assert [2, 2, 2] == [number() for _ in range(3)]
    held.end(failed=False)
    modelguard_clock.settle()
    assert [1, 2] == generations(pair)


@pytest.mark.parametrize("policy", [MemoryGrowth("50 MB"), MemoryLimit("150 MB")])
def test_memory_is_that_of_the_process(policy: Any, modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """Growth replaces the oldest replica, and the load of a replica is no growth of another one."""
    pair = replicas(guard(modelguard_loader, reload_on=policy, swap=Swap(defer=0)), 2)
    pair.load()
    modelguard_clock.advance("5m")
    assert [1, 1] == generations(pair)
    modelguard_clock.memory += 60_000_000
    modelguard_clock.advance("2s")
    modelguard_clock.settle()
    replaced = generations(pair)
    assert 1 in (replaced[0], replaced[1])
    if isinstance(policy, MemoryGrowth):
        modelguard_clock.advance("10m")
        assert [2, 1] == generations(pair), "growth counts from the replica that came last"
        modelguard_clock.memory += 60_000_000
        modelguard_clock.advance("1m")
        assert [2, 2] == generations(pair)


def test_idle_replicas_are_released(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """A copy that is not needed for a while gives its memory back, and is loaded again when it is."""
    pair = replicas(guard(modelguard_loader, reload_on=Idle("10m"), swap=Swap(defer=0)), 2)
    number = pair(lambda model: model.number)
    pair.load()
    for _ in range(3):
        modelguard_clock.advance("6m")
        assert 1 == number(), "calls prefer the copy that has its model"
    assert (1, True) == (modelguard_loader.alive, pair.ready)
    held = [pair._free.take() for _ in range(2)]
    assert 2 == modelguard_loader.alive
    for lease in held:
        lease.end(failed=False)
    pair.unload()
    assert (0, True) == (modelguard_loader.alive, pair.ready)
    assert asyncio.run(take_async(pair)) > 2
    asyncio.run(pair.aunload())
    assert 0 == modelguard_loader.alive


# Names and mistakes


def test_each_replica_has_a_name_and_a_status(modelguard_loader: Loader) -> None:
    """Probes and metrics see the replicas, and not the guard whose options they have."""
    options = guard(modelguard_loader, reload_on=None, name="only here")
    pair = replicas(options, 2)
    assert ["only here[0]", "only here[1]"] == [status.name for status in pair.status()]
    assert {"only here[0]", "only here[1]"} == {one.name for one in guards if one.name.startswith("only here")}
    assert ("only here", "<ModelReplicas 'only here', 2 of them>") == (pair.name, repr(pair))
    assert "only here" == options.name


def test_wrong_arguments(modelguard_loader: Loader) -> None:
    """At the definition."""
    nlp = guard(modelguard_loader, reload_on=None)
    for wrong in (modelguard_loader, "nlp", None):
        with pytest.raises(InvalidOption, match="must be a guard"):
            replicas(wrong, 2)
    for count in (1, 0, True, "2"):
        with pytest.raises(InvalidOption, match="whole number of at least 2"):
            replicas(nlp, count)
    with pytest.raises(InvalidOption, match="at most 1,000"):
        replicas(nlp, 10**400)
    nlp.load()
    with pytest.raises(InvalidOption, match="has loaded a model of its own"):
        replicas(nlp, 2)
    with pytest.raises(TypeError, match="is not called directly"):
        ModelReplicas(nlp)  # type: ignore[arg-type, call-arg]


# Timeouts


@pytest.fixture
def held() -> Iterator[tuple[ModelReplicas[Any], threading.Event]]:
    """Two replicas, each of whose loads after the first waits for an event."""
    release, loads = threading.Event(), iter(range(100))

    def load() -> list[int]:
        number = next(loads)
        if number >= 2:
            assert release.wait(TIMEOUT)
        return [number]

    made = replicas(guard(load, reload_on=None, name="nlp"), 2)
    made.load()
    yield made, release
    release.set()
    made.close()


def test_a_reload_may_be_bounded(held: tuple[ModelReplicas[Any], threading.Event]) -> None:
    """As a guard's; the reload of all goes on, one after another."""
    pair, release = held
    for reload in (lambda: pair.reload(timeout=0.01), lambda: asyncio.run(pair.areload(timeout="10ms"))):
        with pytest.raises(Reloading, match="nlp"):
            reload()
    assert [1, 1] == generations(pair)
    release.set()
    pair.reload(timeout=TIMEOUT)
    asyncio.run(pair.areload(TIMEOUT))
    assert [4, 4] == generations(pair)  # the second of those that were given up and the third are one


def test_a_loader_that_waits_for_a_reload_of_all_is_told() -> None:
    """The reload waits for the load, and is found by what the loader waits for."""

    async def load() -> Any:
        await asyncio.to_thread(pair.reload)

    pair = replicas(guard(load, reload_on=None, name="nlp"), 2)
    with pytest.raises(LoadFailed, match="waits for this thread"):
        pair.load(TIMEOUT)
    pair.close()


def test_a_bounded_reload_says_why_it_failed(modelguard_loader: Loader) -> None:
    """What the load raised reaches who waits."""
    pair = replicas(guard(modelguard_loader, reload_on=None, name="nlp"), 2)
    pair.load(timeout=TIMEOUT)
    modelguard_loader.fail()
    with pytest.raises(LoadFailed):
        pair.reload(timeout=TIMEOUT)


def test_a_bounded_reload_does_not_block_a_loop(held: tuple[ModelReplicas[Any], threading.Event]) -> None:
    """It says what to write instead."""

    async def main() -> None:
        held[0].reload(timeout=1)

    with pytest.raises(WouldDeadlock, match=r"await replicas\.areload"):
        asyncio.run(main())


def test_a_reload_behind_another_one_does_not_block_a_loop(held: tuple[ModelReplicas[Any], threading.Event]) -> None:
    """It is refused at once, and not when the one before it has ended."""
    pair, release = held
    pair.reload(wait=False)
    until(pair._free.rolling.locked)

    async def main() -> None:
        pair.reload()

    with pytest.raises(WouldDeadlock, match=r"await replicas\.areload"):
        asyncio.run(main())
    assert not release.is_set()
    assert pair._free.rolling.locked()


def test_nothing_is_replaced_or_released_inside_a_call(pair: ModelReplicas[Any]) -> None:
    """The call may be on any replica: what cannot be done to that one is not done to the others either."""
    pair.load()
    commands: tuple[Any, ...] = (pair.reload, lambda: pair.reload(timeout=TIMEOUT), pair.unload)

    async def from_a_coroutine() -> None:
        for command in (pair.areload, pair.aunload):
            with pytest.raises(WouldDeadlock):
                await command()

    def inside() -> None:
        with pair.lease():
            for command in commands:
                with pytest.raises(WouldDeadlock):
                    command()
            asyncio.run(from_a_coroutine())

    with pair.lease():  # the first one
        contextvars.Context().run(inside)
    assert ([1, 1], ["ready", "ready"]) == (generations(pair), [status.state for status in pair.status()])


def test_loads_and_releases_may_be_bounded() -> None:
    """The time counts for all of them together."""
    release = threading.Event()
    pair = replicas(guard(lambda: [release.wait(TIMEOUT)], reload_on=None, name="nlp"), 2)
    with pytest.raises(Reloading):
        pair.load(timeout=0.01)
    with pytest.raises(Reloading):
        asyncio.run(pair.aload(timeout=0.01))
    with pytest.raises(Reloading):
        pair.unload(timeout=0.01)
    with pytest.raises(Reloading):
        asyncio.run(pair.aunload(timeout=0.01))
    release.set()
    pair.load(timeout=TIMEOUT)
    pair.unload(timeout=TIMEOUT)
    assert ["idle", "idle"] == [one.state for one in pair.status()]
    pair.close()


def test_what_is_reopened_while_it_closes_stays_open(pair: ModelReplicas[Any]) -> None:
    """An exit that was cancelled goes on in its thread, and must not close what the next entry has opened."""
    pair.load()
    with ExitStack() as held:
        for _ in range(2):
            held.enter_context(pair.lease())
        closing = threading.Thread(target=contextvars.Context().run, args=(pair.close,))
        closing.start()
        until(lambda: pair.status()[0].state == "closed")
        pair.__enter__()
    closing.join(TIMEOUT)
    assert ["ready", "ready"] == [status.state for status in pair.status()]
