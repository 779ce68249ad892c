"""``Line``: those who wait for what a source gives, in a thread, on asyncio and on trio."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.world import until

from modelguard.errors import NotSupported
from modelguard.runtime import waiting
from modelguard.runtime.waiting import Line, TimeIsOver, Timeout, Wait, Work

TIMEOUT = 30.0


class Permits:
    """A source of so many permits. ``meanwhile`` is called in the middle of each look at it."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self.out: set[int] = set()
        self.most = 0
        self.meanwhile: Callable[[], object] = lambda: None
        self.line: Line[str, int] = Line(self.take, self.give)

    def take(self, request: str) -> int | None:
        if request == "fail":
            raise KeyError(request)
        self.meanwhile()
        try:
            permit = self.free.pop()
        except IndexError:
            return None
        assert permit not in self.out, "given twice"
        self.out.add(permit)
        self.most = max(self.most, len(self.out))
        return permit

    def give(self, permit: int) -> None:
        self.out.remove(permit)
        self.free.append(permit)
        self.line.serve()

    def wait(self, request: str = "", timeout: float = TIMEOUT) -> int:
        return waiting.block(self.line.wait(request, Timeout(timeout)))

    async def await_(self, request: str = "", timeout: float = TIMEOUT) -> int:
        return await waiting.suspend(self.line.wait(request, Timeout(timeout)))


def spawn(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


class Turn:
    """Awaited: the other tasks of the loop run once."""

    def __await__(self) -> Iterator[None]:
        yield


def test_the_oldest_is_served_first() -> None:
    """In the order in which they came, each once."""
    permits, served = Permits(1), []
    held = permits.wait()
    threads = []
    for number in range(5):

        def use(number: int = number) -> None:
            permit = permits.wait()
            served.append(number)
            permits.give(permit)

        threads.append(spawn(use))
        until(lambda number=number: len(permits.line) == number + 1)  # type: ignore[misc]
    permits.give(held)
    for thread in threads:
        thread.join(TIMEOUT)
    assert ([0, 1, 2, 3, 4], 0) == (served, len(permits.line))


def test_the_time_of_one_who_waits_ends() -> None:
    """It leaves the line, and a source's own error is told apart from that."""
    permits = Permits(0)
    for wait in (permits.wait, lambda **options: asyncio.run(permits.await_(**options))):
        with pytest.raises(TimeIsOver):
            wait(timeout=0.01)
        with pytest.raises(KeyError):
            wait(request="fail")
    assert 0 == len(permits.line)


def test_a_cancelled_task_gives_back_what_it_was_to_have() -> None:
    """Also if it was given in the very moment of the cancellation."""

    async def main() -> None:
        for _ in range(100):
            held = await permits.await_()
            task = asyncio.create_task(permits.await_())
            await Turn()
            permits.give(held)  # to the task, which does not run any more before its cancellation
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    permits = Permits(1)
    asyncio.run(main())
    assert ([0], set(), 0) == (permits.free, permits.out, len(permits.line))


def test_it_may_be_interrupted_by_itself() -> None:
    """The garbage collector may give something back, and a signal handler take something, in the middle of a look."""
    permits = Permits(2)
    first, second = permits.wait(), permits.wait()
    looks: list[None] = []

    def interrupt() -> None:
        looks.append(None)
        if len(looks) == 1:
            permits.give(first)
        if len(looks) == 3:
            permits.give(permits.wait())

    permits.meanwhile = interrupt
    third = permits.wait(timeout=5)
    permits.give(second)
    permits.give(third)
    assert ([0, 1], set()) == (sorted(permits.free), permits.out)


def test_a_loop_that_has_ended_holds_nobody_up() -> None:
    """What comes later for its tasks goes to others."""
    permits = Permits(1)
    held = permits.wait()

    async def main() -> None:
        asyncio.get_running_loop().create_task(permits.await_())
        await Turn()

    asyncio.run(main())  # cancels the task
    permits.give(held)
    assert 0 == permits.wait(timeout=5)


def test_looks_are_made_as_time_passes() -> None:
    """What one of them raises ends the wait."""

    class Circle(Exception):
        """Found by the search."""

    def search() -> None:
        raise Circle

    permits = Permits(0)
    with pytest.raises(Circle):
        waiting.block(permits.line.wait("", Timeout(None), search=search, every=0.001))
    with pytest.raises(Circle):
        asyncio.run(waiting.suspend(permits.line.wait("", Timeout(TIMEOUT), look=search, every=0.001)))
    assert 0 == len(permits.line)


def test_work_blocks_only_threads() -> None:
    """A coroutine has it done in a thread; errors reach the steps where they are."""

    def steps() -> waiting.Steps[list[Any]]:
        here = yield Work(threading.get_ident, "work", lambda work, _name: threading.Thread(target=work).start())
        try:
            yield Work(lambda: 1 / 0, "work", lambda work, _name: threading.Thread(target=work).start())
        except ZeroDivisionError as error:
            return [here == threading.get_ident(), type(error)]
        return []

    async def main() -> list[Any]:
        return await waiting.suspend(steps())

    assert [True, ZeroDivisionError] == waiting.block(steps())
    assert [False, ZeroDivisionError] == asyncio.run(main())


def test_without_a_loop_it_says_what_to_do() -> None:
    """As in a coroutine that somebody drives by hand."""
    with pytest.raises(NotSupported, match="no asyncio event loop runs here, and none of trio"):
        Wait(waiting.promise(), Timeout(None)).suspend().send(None)


@pytest.mark.timeout(120)
def test_nothing_is_lost_under_stress() -> None:
    """Threads and tasks of two loops, with deadlines and cancellations: never too many are out, and none is lost."""
    permits, end = Permits(3), time.monotonic() + 2

    def thread(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < end:
            try:
                permits.give(permits.wait(timeout=draw.choice((0, 0.0001, 0.002, 1))))
            except TimeIsOver:
                continue

    async def task(draw: random.Random) -> None:
        while time.monotonic() < end:
            try:
                permit = await permits.await_(timeout=draw.choice((0, 0.0001, 0.002, 1)))
            except TimeIsOver:
                continue
            try:
                await Turn()
            finally:
                permits.give(permit)

    async def loop(seed: int) -> None:
        draw = random.Random(seed)
        tasks = [asyncio.create_task(task(draw)) for _ in range(10)]
        while time.monotonic() < end:
            await Turn()
            chosen = draw.randrange(10)
            tasks[chosen].cancel()
            await asyncio.gather(tasks[chosen], return_exceptions=True)
            tasks[chosen] = asyncio.create_task(task(draw))
        await asyncio.gather(*tasks, return_exceptions=True)

    threads = [spawn(lambda seed=seed: thread(seed)) for seed in range(3)]  # type: ignore[misc]
    threads += [spawn(lambda seed=seed: asyncio.run(loop(seed))) for seed in (4, 5)]  # type: ignore[misc]
    for one in threads:
        one.join(TIMEOUT)
    assert [] == [one for one in threads if one.is_alive()]
    assert ([0, 1, 2], set(), 0) == (sorted(permits.free), permits.out, len(permits.line))
    assert permits.most <= 3
