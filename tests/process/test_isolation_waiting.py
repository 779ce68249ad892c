"""Calls of isolated functions that wait: whoever has a worker goes on, and whoever gives up leaves no place behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import run_python, wait_until

from modelguard import deadline
from modelguard.errors import DeadlineExceeded, QueueFull, RemoteError
from modelguard.serving import left

pytestmark = pytest.mark.timeout(180)

#: Seconds: far more than any of this takes, also on a busy machine.
PATIENCE = 60.0

HELD = pytest.mark.parametrize("function", [functions.held, functions.shared_held], ids=["process", "host"])


async def collected(items: Any) -> list[int]:
    """All items of a stream."""
    return [item async for item in items]


async def attempted(call: Any) -> Any:
    """Await a call, and not for ever."""
    return await asyncio.wait_for(call, PATIENCE)


def by_aio(function: Any, *args: Any) -> Any:
    return asyncio.run(attempted(function.aio(*args)))


def by_submit(function: Any, *args: Any) -> Any:
    return function.submit(*args).result(PATIENCE)


def by_call(function: Any, *args: Any) -> Any:
    return function(*args)


DOORS: tuple[Callable[..., Any], ...] = (by_call, by_aio, by_submit)


def by_all_doors(function: Any, *args: Any, within: str | None = None) -> list[Future[Any]]:
    """A call by each door at the same time, each in a thread and with a deadline of its own."""

    def call(door: Callable[..., Any]) -> Any:
        with nullcontext() if within is None else deadline(within):
            return door(function, *args)

    threads = ThreadPoolExecutor(len(DOORS))
    calls = [threads.submit(call, door) for door in DOORS]
    threads.shutdown(wait=False)
    return calls


def errors_of(calls: list[Future[Any]]) -> list[type | None]:
    """What each of the calls has raised."""
    return [None if (error := call.exception(PATIENCE)) is None else type(error) for call in calls]


@contextmanager
def keeping_workers(function: Any) -> Iterator[None]:
    """The block ends no worker of it."""
    with function:
        function.load()
        before = {one.pid for one in function.status().workers}
        yield
        assert before == {one.pid for one in function.status().workers}


class Holder:
    """Keeps the only worker of ``held`` until it is told to let go."""

    def __init__(self, function: Any, path: Path) -> None:
        self.path = path
        self.call: Future[str] = function.submit(str(path))
        wait_until(lambda: "busy" in {one.state for one in function.status().workers}, "the worker is held")
        wait_until(lambda: 0 == function.status().queued, "this process knows it")

    def let_go(self) -> None:
        assert not self.call.done()
        self.path.touch()
        assert str(self.path) == self.call.result(PATIENCE)


class TestStreams:
    @pytest.mark.parametrize("function", [functions.ticks, functions.shared_ticks], ids=["process", "host"])
    def test_more_async_streams_than_workers_all_end(self, function: Any) -> None:
        """Those that have a worker take their steps, whoever waits for one."""

        async def main() -> list[list[int]]:
            return await asyncio.gather(*(collected(function(5)) for _ in range(8)))

        with function:
            assert 8 * [[0, 1, 2, 3, 4]] == asyncio.run(attempted(main()))

    @pytest.mark.parametrize("function", [functions.ticks, functions.shared_ticks], ids=["process", "host"])
    def test_a_stream_that_is_cancelled_answers_before_its_step_has_ended(self, function: Any, tmp_path: Path) -> None:
        """The worker ends the step that it has begun, and then takes other calls."""
        there = tmp_path / "there"

        async def main() -> None:
            streams = [asyncio.ensure_future(collected(function(1, str(there)))) for _ in range(2)]
            await asyncio.to_thread(
                wait_until, lambda: 2 == sum(one.state == "busy" for one in function.status().workers), "two steps"
            )
            for stream in streams:
                stream.cancel()
            ended = await attempted(asyncio.gather(*streams, return_exceptions=True))
            assert [asyncio.CancelledError] * 2 == [type(one) for one in ended]
            assert not there.exists()
            there.touch()
            assert [0, 1] == await attempted(collected(function(2)))

        with function:
            asyncio.run(main())

    @pytest.mark.parametrize("function", [functions.ticks, functions.shared_ticks], ids=["process", "host"])
    def test_a_stream_that_is_dropped_in_a_cycle_gives_its_worker_back(self, function: Any) -> None:
        """However many are, and no worker has to end for it."""

        async def main() -> None:
            for _ in range(3):
                in_cycle: list[Any] = [function(5)]
                in_cycle.append(in_cycle)
                assert 0 == await anext(in_cycle[0])
                del in_cycle
                gc.collect()
            assert [0, 1] == await attempted(collected(function(2)))

        with keeping_workers(function):
            asyncio.run(main())

    def test_a_stream_whose_loop_was_closed_gives_its_worker_back(self) -> None:
        """Before or after its first item, and without a trace."""

        async def one_item(stream: Any) -> int:
            return await anext(stream)

        with functions.ticks as ticks:
            for wait in (False, True):
                loop, stream = asyncio.new_event_loop(), ticks(5)
                if wait:
                    assert 0 == loop.run_until_complete(one_item(stream))
                else:
                    step = loop.create_task(one_item(stream))
                    loop.run_until_complete(asyncio.sleep(0))
                    step._log_destroy_pending = False  # type: ignore[attr-defined]
                    del step
                loop.close()
                del loop, stream
                wait_until(lambda: gc.collect() >= 0 == ticks.status().in_flight, "it has ended")
            wait_until(lambda: {"idle"} == {one.state for one in ticks.status().workers}, "all workers are free")


class TestErrors:
    def test_an_error_that_would_end_its_caller_is_named(self) -> None:
        """What would end the iteration, the task or the process of the caller arrives as an error, by every door."""
        with functions.signalling as signalling:
            for which, door in itertools.product(functions.SIGNALS, DOORS):
                with pytest.raises(RemoteError, match=r"signalling\(\) raised") as caught:
                    door(signalling, which)
                assert type(functions.SIGNALS[which]()) is type(caught.value.__cause__)


class TestGivingUp:
    @HELD
    def test_a_deadline_ends_the_wait_for_a_worker(self, function: Any, tmp_path: Path) -> None:
        """By every door, while the worker still has the call before."""
        with function:
            holder = Holder(function, tmp_path / "there")
            assert [DeadlineExceeded] * 3 == errors_of(by_all_doors(function, within="200ms"))
            assert 0 == function.status().queued
            holder.let_go()

    @pytest.mark.parametrize("function", [functions.loads_late, functions.shared_loads_late], ids=["process", "host"])
    def test_a_deadline_ends_the_wait_for_a_load(
        self, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By every door, while the model still loads."""
        there = tmp_path / "there"
        monkeypatch.setenv("ISOLATION_LOADS_AT", str(there))
        function._reopen()
        try:
            assert [DeadlineExceeded] * 3 == errors_of(by_all_doors(function, within="200ms"))
            there.touch()
            assert ["answer"] * 3 == [call.result(PATIENCE) for call in by_all_doors(function)]
        finally:
            there.touch()
            function.close()

    def test_a_deadline_ends_the_wait_for_the_model_of_a_key(self, tmp_path: Path) -> None:
        """By every door, while that model still loads."""
        there = tmp_path / "there"
        with functions.loads_when_there as loads_when_there:
            calls = by_all_doors(loads_when_there, str(there), within="200ms")
            assert [DeadlineExceeded] * 3 == errors_of(calls)
            there.touch()
            calls = by_all_doors(loads_when_there, str(there))
            assert [str(there)] * 3 == [call.result(PATIENCE) for call in calls]

    @HELD
    def test_calls_that_are_cancelled_leave_the_line(self, function: Any, tmp_path: Path) -> None:
        """They do not count, and others have their places at once."""

        async def main() -> None:
            calls = [asyncio.ensure_future(function.aio()) for _ in range(10)]
            await asyncio.sleep(0)
            assert 10 == function.status().queued
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
            assert 0 == function.status().queued

        with function:
            holder = Holder(function, tmp_path / "there")
            asyncio.run(main())
            submitted = [function.submit() for _ in range(10)]
            # The broker hears a moment later that the first ten have gone, and may have no place yet.
            assert all(call.cancel() or type(call.exception()) is QueueFull for call in submitted)
            wait_until(lambda: 0 == function.status().queued, "an empty line")
            others: list[Future[str]] = []

            def admitted() -> bool:
                with suppress(QueueFull):  # the broker hears a moment later that a call has gone
                    others.append(function.submit())
                return 10 == len(others)

            def answer(call: Future[str]) -> str:
                with suppress(QueueFull):  # or later still, on a busy machine
                    return call.result(PATIENCE)
                return str(function())

            wait_until(admitted, "ten places")
            holder.let_go()
            assert [""] * 10 == [answer(other) for other in others]


class TestDeadlines:
    @HELD
    def test_nothing_begins_after_the_deadline(self, function: Any) -> None:
        """By every door, and no worker has to do with it."""
        with function:
            assert "" == function()
            with deadline("1ms"):
                wait_until(lambda: left() < 0, "the deadline")
                for door in DOORS:
                    with pytest.raises(DeadlineExceeded):
                        door(function)
            assert [1] == [one.calls for one in function.status().workers]

    @pytest.mark.parametrize("function", [functions.ticks, functions.shared_ticks], ids=["process", "host"])
    def test_a_stream_ends_at_the_deadline_however_short_its_steps_are(self, function: Any) -> None:
        """Its worker serves on."""

        async def main() -> None:
            with deadline("200ms"), pytest.raises(DeadlineExceeded):
                await collected(function(20_000))
            assert [0, 1] == await attempted(collected(function(2)))

        with keeping_workers(function):
            asyncio.run(main())

    def test_short_deadlines_of_one_caller_do_not_stop_the_others(self) -> None:
        """What has more time than they had gets a worker at once: the model is not to blame."""
        with functions.breaks as breaks:
            for _ in range(4):
                with deadline("50ms"), pytest.raises(DeadlineExceeded):
                    breaks("hang")
                wait_until(lambda: "idle" in {one.state for one in breaks.status().workers}, "the next worker")
            assert "x" == breaks("x")
            assert 0 == breaks.status().timed_out


class TestCrashes:
    @HELD
    @pytest.mark.parametrize("door", [by_call, by_submit])
    def test_a_call_that_is_sent_again_is_not_refused(self, function: Any, door: Callable[..., Any]) -> None:
        """Its worker has ended before it has read it: it keeps its place, though the line has become full."""
        with function, ThreadPoolExecutor(1) as threads:
            function.load()
            (worker,) = (one.pid for one in function.status().workers)
            os.kill(worker, signal.SIGSTOP)
            first = threads.submit(door, function)
            wait_until(lambda: "busy" in {one.state for one in function.status().workers}, "the call has its worker")
            others = [function.submit() for _ in range(10)]
            wait_until(lambda: 10 == function.status().queued, "a full line")
            os.kill(worker, signal.SIGKILL)
            assert 11 * [""] == [call.result(PATIENCE) for call in (first, *others)]


class TestLoads:
    def test_callers_of_a_key_that_loads_hold_up_no_other_key(self, tmp_path: Path) -> None:
        """However many they are: the calls of a loaded key are answered meanwhile."""
        there = tmp_path / "there"

        async def main() -> None:
            function = functions.loads_when_there
            assert "" == await attempted(function.aio(""))
            waiting = [asyncio.ensure_future(function.aio(str(there))) for _ in range(45)]
            for _ in range(3):
                assert "" == await attempted(function.aio(""))
                assert "" == await attempted(asyncio.to_thread(function, ""))
            assert (False, 45) == (any(call.done() for call in waiting), function.status().queued)
            there.touch()
            assert [str(there)] * 45 == await attempted(asyncio.gather(*waiting))

        with functions.loads_when_there:
            asyncio.run(main())

    @HELD
    def test_who_waits_goes_to_the_new_mold(self, function: Any, tmp_path: Path) -> None:
        """Calls that wait when the mold is replaced are answered by the new one; the old one serves its call."""
        with function:
            holder = Holder(function, tmp_path / "there")
            calls = by_all_doors(function)
            wait_until(lambda: 3 == function.status().queued, "the calls wait")
            function.reload()
            assert [""] * 3 == [call.result(PATIENCE) for call in calls]
            holder.let_go()

    def test_who_waits_keeps_its_place_when_the_line_of_the_new_mold_is_full(self, tmp_path: Path) -> None:
        """A call that was admitted is not refused later, however many come first at the new mold."""
        function = functions.held
        first, second = tmp_path / "first", tmp_path / "second"

        calls: list[Future[str]] = []
        over = threading.Event()

        def fill() -> None:
            while not over.wait(0.001):
                with suppress(QueueFull):
                    while not over.is_set():
                        calls.append(function.submit(str(second)))

        with function:
            holder = Holder(function, first)
            others = threading.Thread(target=fill)
            others.start()
            try:
                wait_until(lambda: len(calls) >= 10, "a full line")
                function.reload()
                wait_until(lambda: len(calls) > 10, "calls that go to the new mold")
            finally:
                second.touch()
                over.set()
                others.join(PATIENCE)
            assert len(calls) * [str(second)] == [call.result(PATIENCE) for call in calls]
            holder.let_go()


class Inquiry:
    """An argument that makes two calls while it is sent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (functions.late_echo(functions.late_echo(7, 0.3), 0.1),)


def test_an_argument_that_makes_calls_as_it_is_sent_holds_up_nobody() -> None:
    """Awaited calls that wait meanwhile get the workers of its calls, and threads of their own."""

    async def main() -> list[int]:
        call = functions.late_echo.aio
        return await attempted(asyncio.gather(call(Inquiry(), 0), *(call(number, 0.2) for number in range(3))))

    with functions.late_echo:
        functions.late_echo(0, 0)
        assert [7, 0, 1, 2] == asyncio.run(main())


class Sent(set[int]):
    """An argument, and a result, whose end can be seen."""


@pytest.fixture
def _without_garbage_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_garbage_collector")
class TestMemory:
    @pytest.mark.parametrize("function", [functions.echo, functions.shared_echo], ids=["process", "host"])
    @pytest.mark.parametrize("action", ["", "refuse"], ids=["result", "error"])
    def test_a_call_that_has_ended_keeps_nothing(self, function: Any, action: str) -> None:
        """By every door, its argument and its result, or its error, are freed without a garbage collection."""

        async def awaited(refs: list[weakref.ref[Any]]) -> None:  # what asyncio raises to its own caller, that keeps
            sent = Sent([1])
            refs.append(weakref.ref(sent))
            try:
                refs.append(weakref.ref(await function.aio(sent, action)))
            except functions.Refused as error:
                refs.append(weakref.ref(error))

        def called(door: Callable[..., Any], refs: list[weakref.ref[Any]]) -> None:
            sent = Sent([1])
            refs.append(weakref.ref(sent))
            try:
                refs.append(weakref.ref(door(function, sent, action)))
            except functions.Refused as error:
                refs.append(weakref.ref(error))

        refs: list[weakref.ref[Any]] = []
        with function:
            called(by_call, refs)
            called(by_submit, refs)
            asyncio.run(awaited(refs))
            assert 6 == len(refs)
            wait_until(lambda: 6 * [None] == [ref() for ref in refs], "nothing is kept", PATIENCE / 6)

    def test_a_thread_that_goes_from_call_to_call_keeps_none(self) -> None:
        """Under a load that never ends, what the first calls had is freed."""
        first: list[weakref.ref[Sent]] = []

        def nothing_is_kept() -> bool:
            return not any(ref() is not None for ref in first[:50])

        async def client(until: asyncio.Event) -> None:
            while not until.is_set():
                sent = Sent([1])
                first.append(weakref.ref(sent))
                await functions.echo.aio(sent)
                del sent

        async def main() -> None:
            over = asyncio.Event()
            clients = [asyncio.ensure_future(client(over)) for _ in range(6)]
            await asyncio.to_thread(wait_until, lambda: len(first) > 100, "a hundred calls")
            try:
                await asyncio.to_thread(wait_until, nothing_is_kept, "the end of the first calls", PATIENCE / 6)
            finally:
                over.set()
                await attempted(asyncio.gather(*clients))

        with functions.echo:
            asyncio.run(main())


FORKS = """
import json, os, sys
sys.path.insert(0, {folder!r})
from app import echo

with echo:
    assert 1 == echo.submit(1).result(30)
    child = os.fork()
    if not child:
        os._exit(0 if 2 == echo.submit(2).result(60) else 1)
    status = os.waitpid(child, 0)[1]
    print(json.dumps([os.waitstatus_to_exitcode(status), echo.submit(3).result(30)]))
"""


def test_a_forked_child_submits_calls_too(tmp_path: Path) -> None:
    """With threads of its own: those of its parent are not there."""
    (tmp_path / "app.py").write_text(
        "from modelguard import isolate\n\n@isolate(workers=1)\ndef echo(value):\n    return value\n"
    )
    assert [0, 3] == run_python(FORKS.format(folder=str(tmp_path)), 120)
