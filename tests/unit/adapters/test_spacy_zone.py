"""Turns in a pipeline's memory zone: one call at a time, in order, and no caller is left waiting."""

from __future__ import annotations

import asyncio
import gc
import random
import string
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from tests.unit.interrupts import interrupted_everywhere, traces_instructions

spacy = pytest.importorskip("spacy")

from modelguard import ModelGuard, guard  # noqa: E402 - after the check above
from modelguard.adapters.spacy import Part, Zoned, ZoneLock, ZoneRequest, _current, _zone_of, zoned  # noqa: E402
from modelguard.errors import NotSupported, Overloaded  # noqa: E402
from modelguard.lifecycle.system import System  # noqa: E402
from modelguard.runtime.waiting import Timeout  # noqa: E402

Nlp = Any  # a spaCy pipeline; spaCy leaves most of its own types open
Guard = ModelGuard[Nlp]
TIMEOUT = 60.0  # bounds a wait; a test that comes near it has failed
THREADS, CALLS = 8, 60


@contextmanager
def another_inside(zone: Zoned[Nlp]) -> Iterator[Callable[[], None]]:
    """Have another thread in the zone, until the block ends or calls what it is given."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with zone.lease():
            inside.set()
            assert leave.wait(TIMEOUT)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        assert inside.wait(TIMEOUT)
        yield leave.set
    finally:
        leave.set()
        thread.join(TIMEOUT)


def words_of(zone: Zoned[Nlp]) -> Callable[[str], list[str]]:
    @zone
    def words(nlp: Nlp, text: str) -> list[str]:
        return [token.text for token in nlp(text)]

    return words


# The queue


class Turn:
    """A call that waits for its turn."""

    def __init__(self, zone: ZoneLock, thread: int = 0, *, blocks: bool = True) -> None:
        self.request = ZoneRequest(thread, blocks)
        self.steps = zone.admission(self.request, Timeout(TIMEOUT))
        self.wait: Any = next(self.steps, None)

    @property
    def has_come(self) -> bool:
        return self.wait is None or self.wait.future.done()


def test_turns_come_in_order_of_arrival(english: Nlp) -> None:
    """The first has its turn at once, each other one when the one before it has gone."""
    zone = ZoneLock()
    turns = [Turn(zone) for _ in range(3)]
    for count, _ in enumerate(turns, start=1):
        assert [True] * count + [False] * (3 - count) == [turn.has_come for turn in turns]
        part = Part(zone)
        zone.open(english, part)
        assert english.vocab.in_memory_zone
        zone.leave(part)
        assert not english.vocab.in_memory_zone


def test_a_turn_that_is_given_up_is_passed_on() -> None:
    """A caller that gives up in the queue is skipped, and one that gives up its turn passes it on."""
    zone = ZoneLock()
    first, second, third = (Turn(zone) for _ in range(3))
    second.steps.close()
    zone.release(first.request)
    assert [True, False, True] == [turn.has_come for turn in (first, second, third)]
    third.steps.close()
    assert Turn(zone).has_come


def overtaken(zone: ZoneLock) -> tuple[Turn, Turn, Turn]:
    """A coroutine whose turn it was, the plain call on its event loop that went first, and a later call elsewhere."""
    before, coroutine, later = Turn(zone), Turn(zone, 1, blocks=False), Turn(zone)
    zone.release(before.request)
    assert [True, False] == [turn.has_come for turn in (coroutine, later)]
    return coroutine, Turn(zone, 1), later


def test_a_coroutine_keeps_its_place_behind_a_plain_call_on_its_loop() -> None:
    """Calls run in order of arrival: only the one that blocks its event loop goes first, and not all that wait."""
    zone = ZoneLock()
    coroutine, plain, later = overtaken(zone)
    assert plain.has_come
    zone.release(plain.request)
    assert not later.has_come
    assert next(coroutine.steps, None) is None
    zone.release(coroutine.request)
    assert later.has_come


@pytest.mark.parametrize("meanwhile", [True, False], ids=["meanwhile", "afterwards"])
def test_a_coroutine_that_is_cancelled_gives_its_place_up(meanwhile: bool) -> None:  # noqa: FBT001
    """Before the plain call on its loop has ended, or after it: the next one comes."""
    zone = ZoneLock()
    coroutine, plain, later = overtaken(zone)
    if meanwhile:
        coroutine.steps.close()
    zone.release(plain.request)
    coroutine.steps.close()
    assert later.has_come


def test_a_zone_that_cannot_be_opened_passes_the_turn_on(nlp: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error goes to the call whose turn it was, and the next call is served."""
    words = words_of(zoned(nlp))

    def fail(self: Nlp) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(spacy.language.Language, "memory_zone", fail)
        with pytest.raises(MemoryError):
            words("a b")
    assert ["a", "b"] == words("a b")


# Waiting for a turn


def test_a_call_that_waits_too_long_is_overloaded(nlp: Guard) -> None:
    """After wait_timeout it gets Overloaded, synchronous or not, block or function; the others are not disturbed."""
    zone = zoned(nlp, wait_timeout=0)
    words = words_of(zone)

    @zone
    async def words_later(nlp: Nlp, text: str) -> list[str]:
        return [token.text for token in nlp(text)]

    with another_inside(zone):
        with pytest.raises(Overloaded, match=r"'en'.*only one call at a time can run there"):
            words("a b")
        with pytest.raises(Overloaded):
            asyncio.run(words_later("a b"))
        with pytest.raises(Overloaded), zoned(nlp).lease(timeout=0):
            pytest.fail("the zone is taken")
    assert ["a", "b"] == words("a b") == asyncio.run(words_later("a b"))


def test_waiting_does_not_block_the_event_loop(nlp: Guard) -> None:
    """While a coroutine waits for its turn, the loop goes on: here it is the loop that lets the other thread leave."""
    zone = zoned(nlp)

    @zone
    async def words_later(nlp: Nlp, text: str) -> list[str]:
        return [token.text for token in nlp(text)]

    async def main() -> list[list[str]]:
        with another_inside(zone) as leave:
            tasks = [asyncio.create_task(words_later(f"a {number}")) for number in range(3)]
            asyncio.get_running_loop().call_soon(leave)  # comes after the first step of each task
            return list(await asyncio.gather(*tasks))

    assert [["a", str(number)] for number in range(3)] == asyncio.run(main())


def test_on_a_loop_that_is_not_asyncios_it_says_what_to_do(nlp: Guard) -> None:
    """Under trio, say; and the zone is free for the next call."""
    zone = zoned(nlp)
    nlp.load()
    with pytest.raises(NotSupported, match=r"no asyncio event loop runs here.*trio"):
        zone.lease().__aenter__().send(None)
    assert ["a"] == words_of(zone)("a")


def test_a_cancelled_wait_holds_nobody_up(nlp: Guard) -> None:
    """A coroutine that is cancelled while it waits leaves the queue."""
    zone = zoned(nlp)

    @zone
    async def words_later(nlp: Nlp, text: str) -> list[str]:
        return [token.text for token in nlp(text)]

    async def main() -> list[str]:
        with another_inside(zone):
            task = asyncio.create_task(words_later("a b"))
            asyncio.get_running_loop().call_soon(task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
        return await words_later("a b")

    assert ["a", "b"] == asyncio.run(main())


def test_the_loop_can_call_while_its_own_coroutine_is_inside(nlp: Guard) -> None:
    """A plain call on the loop's thread joins a coroutine that stands still in the zone: waiting would never end."""
    zone = zoned(nlp, wait_timeout=0)
    words = words_of(zone)

    async def inside(entered: asyncio.Event, leave: asyncio.Event) -> bool:
        async with zone.lease() as pipeline:
            entered.set()
            await leave.wait()
            return bool(pipeline.vocab.in_memory_zone)

    async def main() -> tuple[list[str], bool]:
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, leave))
        await entered.wait()
        got = words("a b")
        leave.set()
        return got, await task

    assert (["a", "b"], True) == asyncio.run(main())


def test_the_loop_can_call_while_its_own_coroutines_wait(nlp: Guard) -> None:
    """A plain call on the loop's thread goes before the coroutines of that loop, which cannot enter meanwhile."""
    zone = zoned(nlp, wait_timeout=TIMEOUT)
    words = words_of(zone)

    @zone
    async def words_later(nlp: Nlp, text: str) -> list[str]:
        return [token.text for token in nlp(text)]

    async def main() -> list[list[str]]:
        with another_inside(zone) as leave:
            tasks = [asyncio.create_task(words_later(text)) for text in ("a", "b")]
            await asyncio.wait(tasks, timeout=0)  # both queue
            leave()
            got = [words("c")]
            again = asyncio.create_task(words_later("d"))
            got.append(words("e"))
            return [*got, *await asyncio.gather(*tasks, again)]

    assert [["c"], ["e"], ["a"], ["b"], ["d"]] == asyncio.run(asyncio.wait_for(main(), TIMEOUT / 2))


# Nesting


def test_nested_calls_are_part_of_the_outer_one(nlp: Guard) -> None:
    """A zoned function called inside another one does not wait, and does not close the outer one's zone."""
    zone = zoned(nlp, wait_timeout=0)
    words = words_of(zone)

    @zone
    def outer(nlp: Nlp, text: str) -> list[str]:
        doc = nlp(text)
        with zone.lease():
            assert ["inner"] == words("inner")
        assert nlp.vocab.in_memory_zone
        return [token.text for token in doc]

    assert ["qwzxv", "plmokn"] == outer("qwzxv plmokn")


def test_nested_calls_do_not_wait_behind_others(nlp: Guard) -> None:
    """Others queue for the next turn; what belongs to the present one goes before them."""
    zone = zoned(nlp)
    words = words_of(zone)
    with ThreadPoolExecutor(1) as pool:
        with zone.lease() as pipeline:
            other = pool.submit(words, "other")
            while not _zone_of(pipeline)._line:  # it is on its way
                assert ["inner"] == words("inner")
            assert ["inner"] == words("inner")
            assert pipeline.vocab.in_memory_zone
            assert not other.done()
        assert ["other"] == other.result(TIMEOUT)


def test_tasks_and_threads_that_a_call_starts_are_part_of_it(nlp: Guard) -> None:
    """They inherit its context; one that outlives it keeps the zone open to its end."""
    zone = zoned(nlp, wait_timeout=0)
    words = words_of(zone)

    async def child(entered: asyncio.Event, leave: asyncio.Event) -> list[str]:
        async with zone.lease() as pipeline:
            doc = pipeline("qwzxv")
            entered.set()
            await leave.wait()
            return [token.text for token in doc]

    @zone
    async def parent(nlp: Nlp, entered: asyncio.Event, leave: asyncio.Event) -> None:
        assert ["a"] == await asyncio.to_thread(words, "a")
        started.append(asyncio.create_task(child(entered, leave)))
        await entered.wait()

    started: list[asyncio.Task[list[str]]] = []

    async def main(english: Nlp) -> list[str]:
        entered, leave = asyncio.Event(), asyncio.Event()
        await parent(entered, leave)
        assert english.vocab.in_memory_zone
        leave.set()
        got = await started[0]
        assert not english.vocab.in_memory_zone
        return got

    with nlp.lease() as pipeline:
        assert ["qwzxv"] == asyncio.run(main(pipeline))


def test_a_task_that_outlives_its_call_queues_like_any_other(nlp: Guard) -> None:
    """A task that was started in a zone waits in the queue like any other once that zone is closed."""
    zone = zoned(nlp, wait_timeout=0)
    words = words_of(zone)

    @zone
    async def start(nlp: Nlp, go: asyncio.Event) -> None:
        async def late() -> list[str]:
            await go.wait()
            return await asyncio.to_thread(words, "a b")

        started.append(asyncio.create_task(late()))

    started: list[asyncio.Task[list[str]]] = []

    async def main() -> None:
        go = asyncio.Event()
        await start(go)
        with another_inside(zone):
            go.set()
            with pytest.raises(Overloaded):
                await started[0]

    asyncio.run(main())


def test_a_call_that_schedules_the_next_leaves_nothing_behind(nlp: Guard) -> None:
    """A call whose zone starts its successor, as one that polls does, keeps nothing of the calls before it."""

    async def poll() -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        contexts: list[weakref.ref[Part]] = []

        @zoned(nlp)
        def call(_: Any) -> None:
            inside = _current.get()
            assert inside is not None
            contexts.append(weakref.ref(inside))
            if len(contexts) < 20:
                asyncio.get_running_loop().call_soon(call)
            else:
                del inside
                gc.collect()
                done.set_result(sum(context() is not None for context in contexts))

        call()
        return await done

    assert asyncio.run(poll()) <= 2  # its own, and that of the call that scheduled it


@traces_instructions
@pytest.mark.parametrize("form", ["call", "block"])
def test_an_exception_of_a_signal_handler_leaves_no_zone_taken(nlp: Guard, form: str) -> None:
    """Wherever it comes: once nothing refers to the call any more, the next one has a zone of its own."""
    zone = zoned(nlp, wait_timeout=0.0)
    call = zone(lambda _: None)

    def block(_: None) -> None:
        with zone.lease():
            pass

    nlp.load()
    for _, where in interrupted_everywhere(lambda: None, block if form == "block" else lambda _: call()):
        gc.collect()  # contextlib's frames and what they have raised refer to each other
        with zone.lease() as english:
            assert english.vocab.in_memory_zone, where
        assert not english.vocab.in_memory_zone, where
    assert [] == _zone_of(english)._blocked  # else coroutines of this thread would wait for ever


def test_two_pipelines_have_their_own_zones(nlp: Guard, system: System) -> None:
    """A call on one pipeline inside a call on another opens and closes its own zone only."""
    german = guard(lambda: spacy.blank("de"), reload_on=None)
    outer_zone, inner_zone = zoned(nlp, wait_timeout=0), zoned(german, wait_timeout=0)

    @inner_zone
    def inner(nlp: Nlp, text: str) -> list[str]:
        return [token.text for token in nlp(text)]

    with outer_zone.lease() as outer:
        assert ["a", "b"] == inner("a b")
        assert outer.vocab.in_memory_zone
        with another_inside(inner_zone), pytest.raises(Overloaded):
            inner("a b")
    german.close()


# Threads


@pytest.mark.timeout(120)
def test_threads_and_tasks_get_their_own_words(nlp: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many in a zone of one pipeline, all find their words, and no two are inside together."""
    zone = zoned(nlp)
    inside: list[int] = []

    def check(pipeline: Nlp, text: str) -> list[str]:
        inside.append(1)
        assert 1 == len(inside)
        found = [token.text for token in pipeline(text)]
        assert 1 == len(inside)
        inside.pop()
        return found

    plain, later = zone(check), zone(as_coroutine(check))

    def thread(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(CALLS):
            expected = new_words(draw)
            assert expected == plain(" ".join(expected))

    async def task(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(CALLS // 4):
            expected = new_words(draw)
            assert expected == await later(" ".join(expected))

    async def tasks() -> None:
        await asyncio.gather(*(task(100 + seed) for seed in range(2 * THREADS)))

    with many_switches(), ThreadPoolExecutor(THREADS + 1) as pool:
        done: list[Future[None]] = [pool.submit(thread, seed) for seed in range(THREADS)]
        done.append(pool.submit(asyncio.run, tasks()))
        for one in done:
            one.result(TIMEOUT)
    assert [] == inside


@pytest.mark.timeout(120)
def test_the_same_new_words_in_all_threads_make_no_lexeme_twice(nlp: Guard) -> None:
    """What would use up the cells of spaCy's table, and freeze the process in the end, does not happen."""
    expected = new_words(random.Random(7))
    words = words_of(zoned(nlp))
    with nlp.lease() as pipeline:
        lexemes = len(pipeline.vocab)
    with many_switches(), ThreadPoolExecutor(4) as pool:
        done = [pool.submit(words, " ".join(expected)) for _ in range(200)]
        assert all(expected == one.result(TIMEOUT) for one in done)
    with nlp.lease() as pipeline:
        assert 200 * len(expected) == len(pipeline.vocab) - lexemes


def as_coroutine(work: Callable[[Nlp, str], list[str]]) -> Any:
    async def later(nlp: Nlp, text: str) -> list[str]:
        return work(nlp, text)

    return later


def new_words(draw: random.Random) -> list[str]:
    return ["".join(draw.choices(string.ascii_lowercase, k=9)) for _ in range(40)]


@contextmanager
def many_switches() -> Iterator[None]:
    """Have threads take turns two hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005 / 200)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
