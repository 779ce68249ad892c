"""Calling a loader: in time, on few threads, watched for stalls."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World

from modelguard.lifecycle import _reload
from modelguard.lifecycle._reload import Late, StallMeter
from modelguard.lifecycle._reload import _within as within
from modelguard.runtime import waiting
from modelguard.runtime.waiting import resolve
from modelguard.telemetry import LoadFinished


class Threads:
    """Starts threads, and remembers them."""

    def __init__(self) -> None:
        self.all: list[threading.Thread] = []

    def start(self, work: Callable[[], None], name: str) -> None:
        self.all.append(threading.Thread(target=work, name=name, daemon=True))
        self.all[-1].start()

    def join(self) -> None:
        for thread in self.all:
            thread.join(TIMEOUT)


class Awaitable:
    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Any:
        return self._coroutine.__await__()


class TestFinished:
    def test_what_is_there_already_is_handed_on(self) -> None:
        """A plain result is passed on unchanged."""
        result = object()
        assert resolve(result) is result

    def test_a_model_that_can_be_awaited_is_not(self) -> None:
        """Only coroutines are run; a model may have an ``__await__`` of its own."""
        model = Awaitable(None)
        assert resolve(model) is model

    def test_what_is_to_come_is_waited_for(self) -> None:
        """A coroutine is run to its end on an event loop of its own."""

        async def load() -> asyncio.AbstractEventLoop:
            return asyncio.get_running_loop()

        assert resolve(load()).is_closed()


class TestWithin:
    def run(self, timeout: float | None, work: Callable[[], Any]) -> tuple[Any, list[Any], Threads]:
        threads, late = Threads(), list[Any]()
        result = within(timeout, work, start_thread=threads.start, name="loader", when_late=late.append)
        return result, late, threads

    @pytest.mark.parametrize(("timeout", "started"), [(None, 0), (TIMEOUT, 1)])
    def test_work_in_time_returns(self, timeout: float | None, started: int) -> None:
        """Only work whose time is limited gets a thread of its own."""
        result, late, threads = self.run(timeout, lambda: "made")
        assert ("made", [], started) == (result, late, len(threads.all))

    @pytest.mark.parametrize("timeout", [None, TIMEOUT])
    @pytest.mark.parametrize("error", [ValueError, TimeoutError, SystemExit])
    def test_work_that_raises_raises_here(self, timeout: float | None, error: type[BaseException]) -> None:
        """What the work raises is raised where its result is awaited, a ``TimeoutError`` of its own included."""

        def fail() -> None:
            raise error("mine")

        with pytest.raises(error, match="mine"):
            self.run(timeout, fail)

    def test_late_work_is_left_behind(self) -> None:
        """When the time is over ``Late`` is raised, and a late result goes to ``when_late``."""
        go_on, late, threads = threading.Event(), list[str](), Threads()

        def work() -> str:
            assert go_on.wait(TIMEOUT)
            return "made"

        with pytest.raises(Late):
            within(0.001, work, start_thread=threads.start, name="loader", when_late=late.append)
        assert [] == late
        go_on.set()
        threads.join()
        assert ["made"] == late

    def test_late_work_that_raises_is_forgotten(self) -> None:
        """An error of abandoned work is ignored."""
        go_on, threads = threading.Event(), Threads()

        def work() -> None:
            assert go_on.wait(TIMEOUT)
            raise ValueError("too late")

        with pytest.raises(Late):
            within(0.001, work, start_thread=threads.start, name="loader", when_late=pytest.fail)
        go_on.set()
        threads.join()

    def test_work_that_ends_in_the_last_moment_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Work that ends just when its time is over is not thrown away."""
        threads = Threads()

        class LastMoment(waiting.Future):  # type: ignore[type-arg]
            def result(self, timeout: float | None = None) -> Any:
                if timeout is not None:
                    threads.join()  # so it ends between the time-out and its notice
                    raise TimeoutError
                return super().result()

        monkeypatch.setattr(waiting, "Future", LastMoment)
        made = within(1, lambda: "made", start_thread=threads.start, name="loader", when_late=pytest.fail)
        assert "made" == made


class TestStallMeter:
    class Clock:
        """A clock that moves when the test moves it, and records when it was read."""

        def __init__(self) -> None:
            self.now = 0.0
            self.read = threading.Event()

        def perf_counter(self) -> float:
            now = self.now
            self.read.set()
            return now

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        made = self.Clock()
        monkeypatch.setattr(_reload, "time", made)
        return made

    def test_tells_the_longest_time_without_a_turn(self, clock: Clock) -> None:
        """The meter's thread asks for a turn every 5 ms, and notes the longest that it had to wait for one."""
        with StallMeter() as meter:
            for pause in (0.2, 0.8, 0.1):
                clock.read.clear()
                assert clock.read.wait(TIMEOUT)
                clock.now += pause
        assert 0.795 == pytest.approx(meter.longest)

    def test_counts_a_stall_that_lasts_to_the_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A loader that lets no other thread run until it returns is detected."""
        reads = iter([0.0, 5.0])
        monkeypatch.setattr(_reload, "time", types.SimpleNamespace(perf_counter=lambda: next(reads)))
        meter = StallMeter()
        meter._over.set()  # before the first beat
        with meter:
            pass
        assert 4.995 == pytest.approx(meter.longest)

    def test_tells_nothing_where_nothing_stalled(self, clock: Clock) -> None:
        """A load that lets others run has no stall."""
        with StallMeter() as meter:
            assert clock.read.wait(TIMEOUT)
        assert 0 == meter.longest

    def test_is_told_in_the_event(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """The event of a load carries its longest stall in seconds."""

        class Stalled(StallMeter):
            def __exit__(self, *exc_info: object) -> None:
                super().__exit__(*exc_info)
                self.longest = 0.6

        monkeypatch.setattr(_reload, "StallMeter", Stalled)
        world.guard().load()
        assert 0.6 == world.last(LoadFinished).stall_seconds
