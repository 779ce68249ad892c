"""Isolated functions with real processes: calls, policies, reloads, deaths."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import molds, wait_until

from modelguard import Isolated, batched, deadline, telemetry
from modelguard.errors import (
    CircuitOpen,
    DeadlineExceeded,
    LoadFailed,
    LoadTimeout,
    NoPreviousModel,
    NotSupported,
    Overloaded,
    QueueFull,
    RemoteError,
    TransferRefused,
    WorkerCrashed,
    WouldDeadlock,
)
from modelguard.isolation import _mold_owner
from modelguard.runtime.call_context import inline
from modelguard.testing import Clock

pytestmark = pytest.mark.timeout(180)


@contextmanager
def using(function: Isolated[..., Any]) -> Iterator[Any]:
    """Load on entry and close on exit; no process of it is left afterwards."""
    with function:
        wait_until(lambda: "starting" not in {one.state for one in function.status().workers}, "all workers")
        yield function
    wait_until(lambda: not molds(), "the end of all molds")


@pytest.fixture
def switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Tell the loaders of molds what to do."""
    path = tmp_path / "switch"
    monkeypatch.setenv("ISOLATION_SWITCH", str(path))

    def write(order: str) -> None:
        (tmp_path / "new").write_text(order)
        (tmp_path / "new").rename(path)

    write("")
    return write


class TestCalls:
    def test_the_model_lives_elsewhere(self) -> None:
        """Calls run in workers, which share the mold's model; the caller's process never loads it."""
        with using(functions.where) as where:
            mold, worker = where()
            assert len({os.getpid(), mold, worker}) == 3
            assert mold == where.status().mold
            assert "new" == functions.model.status().state

    def test_the_signature_stays(self) -> None:
        """Callers and tools see the function without its model."""
        assert "(delay: 'float' = 0.0) -> 'tuple[int, int]'" == str(inspect.signature(functions.where))
        assert "where" == functions.where.__name__  # type: ignore[attr-defined]

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Litestar's, of parameters that are found by their names
    def test_litestar_serves_isolated_handlers(self) -> None:
        """Plain and coroutine functions: it reads the hints of the function, and awaits what has to be awaited."""
        litestar = pytest.importorskip("litestar")
        from litestar.testing import TestClient

        handlers = [
            litestar.get("/where", sync_to_thread=True)(functions.where),
            litestar.get("/next/{value:int}")(functions.coroutine),
        ]
        assert asyncio.iscoroutinefunction(functions.coroutine)
        with (
            using(functions.where) as where,
            functions.coroutine,
            TestClient(litestar.Litestar(handlers)) as client,
        ):
            assert where.status().mold == client.get("/where").json()[0]
            assert 4 == client.get("/next/3").json()

    def test_several_calls_run_at_once(self) -> None:
        """Two workers take two calls at a time."""
        with using(functions.where) as where, ThreadPoolExecutor(2) as pool:
            workers = {worker for _, worker in pool.map(where, [0.5, 0.5])}
        assert 2 == len(workers)

    def test_a_file_in_memory_crosses(self) -> None:
        """An image or a sound that is returned is a result like others, though Python can iterate over it."""
        with using(functions.echo) as echo:
            assert b"RIFF" == echo(io.BytesIO(b"RIFF")).getvalue()

    def test_an_error_crosses_with_its_traceback(self) -> None:
        """The caller gets the function's own error, and sees where in the worker it was raised."""
        with using(functions.failing) as failing:
            with pytest.raises(KeyError, match="missing") as caught:
                failing(fail=True)
            assert "in failing" in str(caught.value.__cause__)
            assert failing(fail=False)

    def test_an_error_has_the_text_that_it_had(self) -> None:
        """Also if its class makes a text of what it is given, and so would make one of that text."""
        with using(functions.echo) as echo, pytest.raises(functions.Unread, match=r"^cannot read this$"):
            echo(do="error with a text")

    def test_an_error_that_cannot_be_pickled_is_described(self) -> None:
        """No answer is lost because its error cannot cross."""
        with using(functions.echo) as echo, pytest.raises(RemoteError, match=r"Unpicklable: 1 and 2"):
            echo(do="unpicklable error")

    def test_sys_exit_in_a_call_ends_nothing(self) -> None:
        """It is an error of that call, in the worker and in the owner."""
        with using(functions.echo) as echo:
            with pytest.raises(RemoteError, match="SystemExit: 4"):
                echo(do="exit")
            assert 5 == echo(5)
        with using(functions.items) as items:
            with pytest.raises(RemoteError, match=r"SystemExit: \(no text\)"):
                list(items(1, end="exit"))
            assert 0 == items.status().crashed

    def test_a_load_is_told_once(self, seen: list[telemetry.Event]) -> None:
        """Also where the function and its guard have one name: its loads, and its releases, can be counted."""
        with using(functions.of_one_name) as function:
            function()
        wait_until(lambda: [event for event in seen if isinstance(event, telemetry.GenerationReleased)], "the release")
        told = [type(event) for event in seen if event.guard == "of one name"]
        assert (1, 1) == (told.count(telemetry.LoadFinished), told.count(telemetry.GenerationReleased))

    def test_log_records_and_events_reach_the_owner(
        self, caplog: pytest.LogCaptureFixture, seen: list[telemetry.Event]
    ) -> None:
        """What a worker logs and reports, the owner's handlers and hooks receive."""
        with using(functions.counted) as counted, caplog.at_level(logging.INFO):
            for _ in range(12):
                counted()
            wait_until(
                lambda: [event for event in seen if isinstance(event, telemetry.RecycleAsked)], "the worker's event"
            )
        with using(functions.echo) as echo:
            echo("this", do="log")
            wait_until(lambda: "seen this" in caplog.text, "the worker's record")
        kinds = {type(event) for event in seen}
        assert {telemetry.WorkerStarted, telemetry.WorkerEnded, telemetry.LoadFinished} <= kinds

    def test_the_trace_follows_the_call(self) -> None:
        """A span of the worker belongs to the request's trace, by every door."""
        trace = pytest.importorskip("opentelemetry.trace")
        sdk = pytest.importorskip("opentelemetry.sdk.trace")
        tracer = sdk.TracerProvider().get_tracer("tests")
        with using(functions.echo) as echo:
            with tracer.start_as_current_span("request") as span:
                own = span.get_span_context().trace_id
                assert [own, own] == [echo(do="trace"), echo.submit(do="trace").result(60)]
            assert trace.INVALID_TRACE_ID == echo(do="trace")

    def test_a_function_without_a_guard(self) -> None:
        """recycle_on decides when its workers are replaced."""
        with using(functions.plain) as plain:
            pids = set()
            wait_until(lambda: pids.add(plain()) or len(pids) > 2, "replaced workers")

    def test_a_static_method(self) -> None:
        """It is found in its class, and called like any other."""
        with using(functions.Service.static) as static:
            assert (static.status().mold, 5) == functions.Service.static(5) == functions.Service().static(5)


class TestDoors:
    def test_aio_and_submit(self) -> None:
        """The doors are those of batched functions."""
        with using(functions.where) as where:
            assert 2 == len(where.submit().result())

            async def main() -> list[tuple[int, int]]:
                return await asyncio.gather(*(where.aio(0.1) for _ in range(6)))

            assert 6 == len(asyncio.run(main()))

    def test_a_test_that_moves_the_clock_takes_no_time_from_them(self, modelguard_clock: Clock) -> None:
        """Processes live in real time: a call waits for its worker as long as before, with a deadline too."""
        with using(functions.where) as where:
            modelguard_clock.advance("1h")

            async def main() -> list[tuple[int, int]]:
                with deadline("1m"):
                    return await asyncio.gather(*(where.aio(0.1) for _ in range(6)))

            assert 6 == len(asyncio.run(main()))
            with pytest.raises(DeadlineExceeded), deadline("150ms"):
                asyncio.run(main())

    def test_batches_can_be_awaited_where_they_run_inline(self) -> None:
        """``modelguard_off`` and warm-ups compute them on the loop of their caller, which is blocked anyway."""
        with using(functions.doubled), inline():
            one = batched(max_size=8)(functions.doubled)
            assert [4, 6] == [asyncio.run(one.aio(2)), *asyncio.run(one.amap([3]))]

    def test_a_call_on_the_event_loop_is_refused(self) -> None:
        """It would block the loop; the message names the door that does not."""

        async def main() -> None:
            functions.where()

        with pytest.raises(WouldDeadlock, match=r"await f\.aio"):
            asyncio.run(main())

    def test_coroutine_functions_are_awaited(self) -> None:
        """They keep their kind, and run on an event loop in the worker."""
        with using(functions.coroutine) as coroutine:

            async def main() -> list[int]:
                return await asyncio.gather(*(coroutine(n) for n in range(4)))

            assert [1, 2, 3, 4] == asyncio.run(main())

    def test_they_are_open_on_trio(self) -> None:
        """Awaited calls, coroutine functions and streams; a cancelled one leaves the line, and its worker is free."""
        trio: Any = pytest.importorskip("trio", reason="needs trio")

        async def main() -> None:
            async with functions.where as where, functions.coroutine as coroutine, functions.aitems as aitems:
                assert 2 == len(await where.aio())
                assert 2 == await coroutine(1)
                assert [0, 1, 2] == [item async for item in aitems(3)]
                async with trio.open_nursery() as nursery:
                    for _ in range(6):
                        nursery.start_soon(where.aio, 1.0)
                    while not where.status().queued:
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()
                assert 0 == where.status().queued
                with trio.move_on_after(0.2) as moved_on:
                    async for _ in aitems(10**9):
                        pass
                assert moved_on.cancelled_caught
                await aitems(3).aclose()
                assert [0] == [item async for item in aitems(1)]

        trio.run(main)

    def test_generators_are_streamed(self) -> None:
        """Items come one by one, errors in their place, and closing early frees the worker."""
        with using(functions.items) as items:
            assert [0, 1, 2] == list(items(3))
            with pytest.raises(ValueError, match="at the end"):
                list(items(2, end="raise"))
            endless = items(10**9)
            assert 0 == next(endless)
            endless.close()
            assert [0] == list(items(1))
            with pytest.raises(WorkerCrashed, match="exit status 5"):
                list(items(1, end="die"))
            with pytest.raises(TypeError, match="iterate"):
                items.submit(1)

    def test_a_stream_whose_worker_dies_between_two_items_fails(self) -> None:
        """It does not begin anew behind the items that the caller has already."""
        with using(functions.items) as items:
            stream = items(10)
            assert [0, 1] == [next(stream), next(stream)]
            (busy,) = (one.pid for one in items.status().workers if one.state == "busy")
            os.kill(busy, signal.SIGKILL)
            wait_until(lambda: not psutil.pid_exists(busy), "its end")
            with pytest.raises(WorkerCrashed, match="SIGKILL"):
                next(stream)
            assert [0] == list(items(1))

    def test_async_generators_are_streamed(self) -> None:
        """They keep their kind too."""
        with using(functions.aitems) as aitems:

            async def main() -> list[int]:
                return [item async for item in aitems(3)]

            assert [0, 1, 2] == asyncio.run(main())

    def test_batches_go_to_workers(self) -> None:
        """@batched over @isolate sends whole batches."""
        with using(functions.doubled), batched(max_size=8, threads=2)(functions.doubled) as one:
            assert [0, 2, 4, 6] == list(one.map(range(4)))

    @pytest.mark.parametrize("function", [functions.counted_up, functions.acounted_up], ids=["plain", "async"])
    def test_batches_of_streams_go_to_workers(self, function: Any) -> None:
        """@batched over @isolate streams parts; who leaves gives the worker back for the next batch."""
        with using(function), batched(max_size=8)(function) as stream:
            for _ in range(2):
                left = stream.stream(10)
                assert 10 == next(left)
                left.close()
                assert [20, 21, 22] == list(stream.stream(20))

    def test_batches_of_coroutines_go_to_workers(self) -> None:
        """@batched over @isolate keeps the kind of the function."""
        with using(functions.adoubled), batched(max_size=8, threads=2)(functions.adoubled) as one:
            assert [0, 2, 4, 6] == list(one.map(range(4)))

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("bad", ["crash", "hang", "raise"])
    @pytest.mark.parametrize("name", ["sifts", "asifts", "sifts_again", "sifts_for_host"])
    def test_a_bad_item_of_a_batch_costs_its_neighbours_nothing(self, name: str, bad: str) -> None:
        """The search for it does not open the breaker, nor reload the model: only the first run of a batch counts."""
        function = getattr(functions, name)
        with using(function), batched(max_size=8)(function) as one:
            for _ in range(3):
                running = [one.submit(item) for item in ("first", bad, *"abcdefg")]
                errors = [future.exception(60) for future in running]
                assert [1] == [at for at, error in enumerate(errors) if error is not None]
                assert not isinstance(errors[1], CircuitOpen)
                if bad == "raise":
                    assert 1 == len({future.result() for future in running if future is not running[1]})
                    assert 0 == function.status().recycled

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("on_error", ["isolate", "fail"])
    @pytest.mark.parametrize("name", ["sifts", "asifts"])
    def test_an_error_keeps_no_items(self, name: str, on_error: Any) -> None:
        """Those of a batch are freed with the errors that its callers got, not when the garbage collector comes."""
        function, seen = getattr(functions, name), list[weakref.ref[Any]]()

        def fail(item: str) -> None:
            text = functions.Text(item)
            seen.append(weakref.ref(text))
            future = one.submit(text)
            del text
            try:
                assert future.exception(60) or item != "raise"
            finally:
                del future

        with using(function), batched(max_size=8, on_error=on_error)(function) as one:
            gc.collect()
            gc.disable()
            try:
                with ThreadPoolExecutor(8) as threads:
                    list(threads.map(fail, ["a", "raise", "b", "raise", "c", "d"] * 3))
                one.submit("last").result(60)  # the thread has let go of the batch before
                assert {*[text() for text in seen]} <= {None, "raise"}  # a bad item is remembered
            finally:
                gc.enable()

    @pytest.mark.timeout(60)
    def test_a_model_that_crashes_on_everything_opens_the_breaker(self) -> None:
        """Once for each batch, with and without retry=True, however often its items are run again."""
        for function in (functions.sifts, functions.sifts_again):
            with using(function), batched(max_size=8)(function) as one:
                seen = [type(one.submit("crash").exception(60)) for _ in range(3)]
                assert [WorkerCrashed, WorkerCrashed, CircuitOpen] == seen

    def test_the_queue_is_bounded(self) -> None:
        """Calls beyond Bounds(queue=) are refused at once."""
        with using(functions.where) as where:
            running = [where.submit(0.5) for _ in range(2)]
            waiting = []
            with pytest.raises(QueueFull):
                waiting.extend(where.submit() for _ in range(1000))
            for future in [*running, *waiting]:
                future.cancel()


class TestDeaths:
    @pytest.mark.parametrize(
        ("how", "cause"),
        [("SIGKILL", "SIGKILL"), ("SIGABRT", "SIGABRT"), ("segfault", "SIGSEGV"), ("exit", "exit status 3")],
    )
    def test_a_crash_costs_one_call(self, how: str, cause: str) -> None:
        """The call gets an error that names the end, and the next call an answer."""
        with using(functions.ends) as ends:
            with pytest.raises(WorkerCrashed) as caught:
                ends(how)
            assert cause == caught.value.cause
            assert "x" == ends("x")

    def test_a_hung_call_is_killed_at_its_timeout(self) -> None:
        """Not before, not much later, and nobody else waits for it."""
        with using(functions.ends) as ends:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                ends("hang")
            assert 0.9 < time.monotonic() - started < 10
            assert "x" == ends("x")
            assert 1 == ends.status().timed_out

    def test_a_callers_own_deadline_counts_too(self) -> None:
        """deadline() shortens the timeout of the calls in its block."""
        with using(functions.where) as where, deadline("300ms"), pytest.raises(DeadlineExceeded):
            where(4.0)

    def test_idempotent_functions_are_retried(self, tmp_path: Path) -> None:
        """With retry=True a crash costs nothing but time."""
        with using(functions.crashes_once) as crashes_once:
            assert crashes_once(str(tmp_path / "marker"))

    def test_workers_that_keep_dying_open_the_breaker(self) -> None:
        """Calls are refused at once, until a probe succeeds."""
        with using(functions.breaks) as breaks:
            for _ in range(2):
                with pytest.raises(WorkerCrashed):
                    breaks("crash")
            with pytest.raises(CircuitOpen):
                breaks("x")
            assert not breaks.ready

            def answered() -> bool:
                try:
                    return "x" == breaks("x")
                except CircuitOpen:
                    return False

            wait_until(answered, "the breaker to close")
            wait_until(lambda: breaks.ready, "readiness")

    def test_an_idle_worker_that_is_killed_is_replaced(self) -> None:
        """No call notices it, and soon there are as many workers as before."""
        with using(functions.where) as where:
            for _ in range(20):
                idle = [one.pid for one in where.status().workers if one.state == "idle" and one.pid]
                for pid in idle:
                    with suppress(ProcessLookupError):  # one that was killed before, and is not missed yet
                        os.kill(pid, signal.SIGKILL)
                assert where()
            wait_until(lambda: 3 == sum(one.state == "idle" for one in where.status().workers), "the replacements")

    def test_a_call_that_its_worker_has_not_read_is_sent_to_another_one(self, tmp_path: Path) -> None:
        """A worker that dies in the moment of a call costs nothing: the call runs once, and has its answer."""
        path = tmp_path / "ran"
        with using(functions.notes) as notes:
            workers = {one.pid for one in notes.status().workers}
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)  # so that the request stays in its socket
            call = notes.submit(str(path), 7)
            wait_until(
                lambda: any(one.state == "busy" and one.pid for one in notes.status().workers), "it has a worker"
            )
            (taken,) = (one.pid for one in notes.status().workers if one.state == "busy")
            time.sleep(0.1)  # in which the request is written
            os.kill(taken, signal.SIGKILL)
            for pid in workers - {taken}:
                os.kill(pid, signal.SIGCONT)
            assert 7 == call.result(30)
        assert "7\n" == path.read_text()

    def test_a_dead_worker_is_noticed_though_its_child_lives(self) -> None:
        """A process that the model has forked holds the worker's socket open; the call ends at once all the same."""
        with using(functions.ends) as ends:
            with pytest.raises(WorkerCrashed, match="exit status 3"):
                ends("leaves a child")
            assert "x" == ends("x")

    def test_a_mold_that_is_killed_is_replaced(self) -> None:
        """Calls wait for the next one, and get their answers."""
        with using(functions.where) as where:
            first = where.status().mold
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: where.status().mold not in (first, None), "the next mold")
            assert where()[0] != first

    def test_a_mold_that_hangs_is_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One that is stopped forks no more: when a worker is missing too long, another mold takes its place."""
        monkeypatch.setattr(_mold_owner, "_START", 1.0)
        with using(functions.where) as where:
            first, workers = where.status().mold, where.status().workers
            os.kill(first, signal.SIGSTOP)
            for worker in workers:
                os.kill(worker.pid, signal.SIGKILL)

            def is_replaced() -> bool:
                with suppress(WorkerCrashed, DeadlineExceeded, LoadFailed, Overloaded):
                    where()
                return where.status().mold not in (first, None)

            wait_until(is_replaced, "the next mold")
            assert where()[0] != first


class TestPolicies:
    def test_uses_replaces_workers_and_not_the_mold(self, seen: list[telemetry.Event]) -> None:
        """Each worker is replaced after its share of calls, by a fork."""
        with using(functions.counted) as counted:
            mold = counted.status().mold
            pids: set[int] = set()
            wait_until(lambda: pids.add(counted()) or len(pids) > 3, "fresh workers")
            assert mold == counted.status().mold
            ends = [event.cause for event in seen if isinstance(event, telemetry.WorkerEnded)]
            assert {"recycled"} == set(ends)

    def test_a_leak_is_bounded(self) -> None:
        """MemoryGrowth replaces the worker that has grown, and the memory comes back with its process."""
        with using(functions.leaks) as leaks:
            first = leaks()

            def replaced() -> bool:
                return leaks() != first

            wait_until(replaced, "a fresh worker")

    def test_errors_replace_the_worker(self) -> None:
        """Errors(3) counts in the worker."""
        with using(functions.failing) as failing:
            first = failing(fail=False)
            for _ in range(3):
                with pytest.raises(KeyError):
                    failing(fail=True)
            wait_until(lambda: failing(fail=False) != first, "a fresh worker")

    def test_new_weights_make_a_new_mold(self) -> None:
        """Modified is asked in the owner, and replaces the mold."""
        with using(functions.watching) as watching:
            first = watching()
            functions.WEIGHTS.write_text(str(time.time()))
            wait_until(lambda: watching() != first, "the next mold")

    @pytest.mark.parametrize("name", ["revised", "revised_by_spawn"])
    def test_a_changed_source_makes_a_new_mold_with_a_new_version(self, name: str) -> None:
        """The owner asks the probe, molds and workers do not, and the owner knows the version of each mold."""
        functions.WEIGHTS.write_text("1")
        with using(getattr(functions, name)) as revised:
            first = revised()
            assert ("revision 1", "revision 1") == (revised.version, revised.status().version)
            functions.WEIGHTS.write_text("2")
            wait_until(lambda: revised() != first, "the next mold")
            assert "revision 2" == revised.version
            assert {str(os.getpid())} == set(functions.ASKED.read_text().split())
        functions.ASKED.unlink()
        assert None is revised.version

    def test_a_rollback_returns_to_the_previous_mold(self) -> None:
        """It answers the next call, with its version, and stays until the source has another revision."""
        functions.WEIGHTS.write_text("1")
        with using(functions.undoable) as undoable:
            first = undoable()
            with pytest.raises(NoPreviousModel):
                undoable.rollback()
            functions.WEIGHTS.write_text("2")
            wait_until(lambda: undoable() != first, "the next mold")
            second = undoable()
            undoable.rollback()
            assert (first, "revision 1") == (undoable(), undoable.version)
            assert (True, 0) == (undoable.status().pinned, undoable.status().previous)
            wait_until(lambda: second not in [mold.pid for mold in molds()], "the end of the mold that was replaced")
            asked = len(functions.ASKED.read_text().split())
            wait_until(lambda: len(functions.ASKED.read_text().split()) > asked + 5, "some polls")
            assert first == undoable()
            functions.WEIGHTS.write_text("3")
            wait_until(lambda: undoable.version == "revision 3", "the next revision")
        functions.ASKED.unlink()

    def test_a_rollback_ends_the_mold_that_loads(self, switch: Callable[[str], None]) -> None:
        """Nobody would use it. The next reload has its turn at once."""
        functions.WEIGHTS.write_text("1")
        with using(functions.undoable) as undoable:
            first = undoable()
            undoable.reload()
            switch("hang")
            seen: list[telemetry.Event] = []
            remove = telemetry.add_hook(seen.append)
            undoable.reload(wait=False)
            wait_until(
                lambda: [mold.pid for mold in _mold_owner.molds() if not mold._loaded.done()] not in ([], [None]),
                "a load",
            )
            (loading,) = [mold for mold in _mold_owner.molds() if not mold._loaded.done()]
            undoable.rollback()
            wait_until(loading.ended.is_set, "the end of the mold that loads")
            switch("")
            undoable.reload(timeout="10s")
            remove()
            assert first != undoable()
        assert ["rolled_back"] == [one.cause for one in seen if isinstance(one, telemetry.LoadDiscarded)]
        functions.ASKED.unlink()

    def test_a_kept_mold_that_died_is_no_way_back(self) -> None:
        """The current one serves on, and the error says why."""
        functions.WEIGHTS.write_text("1")
        with using(functions.undoable) as undoable:
            first = undoable()
            undoable.reload()
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: undoable._scope._molds.previous.died is not None, "the news of its death")
            with pytest.raises(NoPreviousModel, match="have ended"):
                undoable.rollback()
            assert first != undoable()
        functions.ASKED.unlink()


class TestReloads:
    def test_no_call_waits_for_a_reload(self) -> None:
        """The old mold serves until the new one can, and then it is gone with its workers."""
        with using(functions.where) as where:
            old, first = {process.pid for process in molds()}, where.status().generation
            failures: list[BaseException] = []
            stop = threading.Event()

            def traffic() -> None:
                while not stop.is_set():
                    try:
                        where()
                    except BaseException as error:  # noqa: BLE001 - the test reports it
                        failures.append(error)

            callers = [threading.Thread(target=traffic) for _ in range(4)]
            for caller in callers:
                caller.start()
            where.reload()
            new = where.status()
            stop.set()
            for caller in callers:
                caller.join()
            assert [] == failures
            assert first + 1 == new.generation
            wait_until(lambda: not old & {process.pid for process in molds()}, "the end of the old mold")

    def test_a_load_that_fails_is_reported(self, switch: Callable[[str], None]) -> None:
        """LoadFailed has the loader's own error and its traceback as causes."""
        switch("fail")
        with pytest.raises(LoadFailed, match="OSError: no weights") as caught, functions.ends:
            pass
        assert isinstance(caught.value.__cause__, OSError)
        assert "in load" in str(caught.value.__cause__.__cause__)
        functions.ends.close()
        wait_until(lambda: not molds(), "the end of the mold")

    def test_a_mold_that_dies_while_it_loads_is_reported(self, switch: Callable[[str], None]) -> None:
        """Its exit status is in the error."""
        switch("die")
        time.sleep(0.3)  # the backoff of an earlier failure
        with pytest.raises(LoadFailed, match="exit status 7"), functions.ends:
            pass
        functions.ends.close()

    def test_a_load_that_never_ends_is_ended(self, switch: Callable[[str], None]) -> None:
        """The timeout of a load kills the mold, which a thread could not be."""
        switch("hang")
        with pytest.raises(LoadTimeout), functions.impatient:
            pass
        wait_until(lambda: not molds(), "the end of the mold")
        functions.impatient.close()

    @pytest.mark.parametrize("start", ["fork", "spawn"])
    @pytest.mark.parametrize("closings", [1, 2])
    def test_closing_ends_a_load_that_is_under_way(
        self, switch: Callable[[str], None], seen: list[telemetry.Event], start: str, closings: int
    ) -> None:
        """Its mold is gone soon, and it is discarded, not failed. Opened again, the function has a mold of its own."""
        with using(functions.where if start == "fork" else functions.where_spawned) as where:
            before = len(molds())
            switch("hang")
            where.reload(wait=False)
            wait_until(lambda: len(molds()) > before, "another mold")
            for _ in range(closings):
                where.close()
            wait_until(lambda: not molds(), "the end of both molds", 10.0)
            ends = [one for one in seen if isinstance(one, telemetry.LoadDiscarded | telemetry.LoadErrored)]
            assert ["closed"] == [getattr(one, "cause", None) for one in ends]
            causes = {one.cause for one in seen if isinstance(one, telemetry.WorkerEnded)}
            assert {"closed"} == causes
            switch("")
            with where:
                assert where()[0] in {where.status().mold, *(one.pid for one in where.status().workers)}

    def test_who_opens_it_again_at_once_gets_a_mold(
        self, switch: Callable[[str], None], seen: list[telemetry.Event]
    ) -> None:
        """The load that closing has ended is done once more, for who waits now, with a time and events of its own."""
        where = functions.where
        for _ in range(5):
            with where:
                assert where()[0] == where.status().mold
                assert 0 == where.status().failures
                where.reload(wait=False)
        wait_until(lambda: not molds(), "the end of all molds", 10.0)
        ends = telemetry.LoadFinished | telemetry.LoadDiscarded
        begun = [one for one in seen if isinstance(one, telemetry.LoadStarted)]
        wait_until(lambda: len(begun) == sum(isinstance(one, ends) for one in seen), "the end of each load")

    def test_a_mold_that_closing_has_ended_takes_no_calls(
        self, switch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the function is opened again just before its load would have ended."""
        with using(functions.where) as where:
            engine = where._scope._engine
            system = engine.system

            def reopen_at_the_end_of_the_load() -> int:
                job = engine.state.job
                if engine.state.closed and job is not None and threading.get_ident() in job.threads:
                    where._reopen()
                return system.private()

            before = len(molds())
            switch("hang")
            monkeypatch.setattr(engine, "system", replace(system, private=reopen_at_the_end_of_the_load))
            where.reload(wait=False)
            wait_until(lambda: len(molds()) > before, "another mold")
            where.close()
            wait_until(lambda: not engine.loading, "the end of the load")
            switch("")
            where._reopen()
            assert where()[0] == where.status().mold


class _Exits:
    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


class _Interrupted:
    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return str, (os.getpid(),)


class TestTransfer:
    @pytest.mark.parametrize("size", [1, 3000, 70_000, 300_000, 7_000_000])
    def test_bytes_of_any_size_arrive(self, size: int) -> None:
        """Small ones through the socket, large ones through shared memory."""
        with using(functions.echo) as echo:
            value = os.urandom(size)
            assert value == echo(value)

    def test_arrays_arrive_writable(self) -> None:
        """Their content is in memory that belongs to the receiver alone."""
        numpy = pytest.importorskip("numpy")
        with using(functions.echo) as echo:
            for count in (10, 2000, 20_000, 1_000_000):
                array = numpy.arange(count, dtype="float64")
                back = echo([array, array[:5]])
                assert (back[0] == array).all()
                back[0][0] = 7
                assert 0 == array[0]

    def test_tensors_arrive(self) -> None:
        """Of every type, and on both sides of the limits."""
        torch = pytest.importorskip("torch")
        with using(functions.echo) as echo:
            for tensor in (
                torch.arange(6).reshape(2, 3),
                torch.zeros(0),
                torch.tensor(3.0),
                torch.rand(500, 500, dtype=torch.float32).to(torch.bfloat16),
                torch.rand(500, 500, requires_grad=True),
            ):
                assert torch.equal(tensor, echo(tensor))

    def test_arguments_that_cannot_be_pickled_are_named(self) -> None:
        """That call fails before it is sent, and says which argument it is."""
        with using(functions.echo) as echo:
            with pytest.raises(TransferRefused, match=r"argument 1, of type _thread\.lock"):
                echo(threading.Lock())
            with pytest.raises(TransferRefused, match=r"value, of type builtins\.generator"):
                echo(value=(n for n in ()))
            assert 1 == echo(1)

    def test_results_that_cannot_be_pickled_are_named(self) -> None:
        """That call fails, and the worker serves on."""
        with using(functions.echo) as echo:
            pid = echo.status().workers[0].pid
            with pytest.raises(TransferRefused, match=r"type _thread\.lock"):
                echo(do="lock")
            with pytest.raises(TransferRefused, match="range_iterator; write a generator function"):
                echo(do="iterator")
            with pytest.raises(TransferRefused, match=r"isolated_functions\.Lazy: .*no database"):
                echo(do="lazy")
            assert pid == echo.status().workers[0].pid

    def test_an_argument_that_exits_as_it_is_rebuilt_is_refused(self) -> None:
        """Its sys.exit() ends neither the worker nor the call of another."""
        with using(functions.echo) as echo:
            pid = echo.status().workers[0].pid
            with pytest.raises(TransferRefused, match="SystemExit"):
                echo(_Exits())
            assert pid == echo.status().workers[0].pid

    def test_a_signal_that_ends_the_caller_is_not_taken_for_an_error_of_the_result(self) -> None:
        """Its handler may call sys.exit() while a result is rebuilt, which takes most of the time of large ones."""
        before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        try:
            with using(functions.echo) as echo:
                with pytest.raises(SystemExit):
                    echo(functions.Signals(os.getpid()))
                assert 1 == echo(1)
                with ThreadPoolExecutor() as threads, pytest.raises(TransferRefused, match="SystemExit"):
                    threads.submit(echo, functions.Exits(os.getpid())).result(30)
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_a_signal_that_ends_a_call_ends_it_while_something_is_pickled(self) -> None:
        """What its handler raises reaches the caller as it is, as Celery's soft time limit does."""

        def raise_timeout(*_: object) -> None:
            raise TimeoutError("the soft limit")

        before = signal.signal(signal.SIGUSR1, raise_timeout)
        try:
            with using(functions.echo) as echo:
                for value in (_Interrupted(), functions.Signals(os.getpid())):
                    with pytest.raises(TimeoutError, match="the soft limit"):
                        echo(value)
                assert 1 == echo(1)
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_what_is_too_large_is_refused(self) -> None:
        """Bounds(transfer=) bounds arguments and results."""
        with using(functions.echo) as echo:
            with pytest.raises(TransferRefused, match=r"Bounds\(transfer=\)"):
                echo(bytes(31_000_000))
            with pytest.raises(TransferRefused, match="40,000"):
                echo(do="large")
            assert 1 == echo(1)

    def test_shared_memory_and_descriptors_come_back(self) -> None:
        """Large arguments leave nothing open on either side."""
        numpy = pytest.importorskip("numpy")
        with using(functions.echo) as echo:
            array = numpy.zeros(1_000_000)
            echo(array)
            worker = psutil.Process(max(echo.status().workers, key=lambda one: one.calls).pid)
            time.sleep(0.2)  # the worker has answered a moment before its call ends
            before = psutil.Process().num_fds(), worker.num_fds()
            for _ in range(20):
                echo(array)
            wait_until(lambda: before == (psutil.Process().num_fds(), worker.num_fds()), "no descriptor more", 5.0)


class TestInside:
    def test_a_function_may_call_itself(self) -> None:
        """In its worker it runs at once, on the model that is there."""
        with using(functions.echo) as echo:
            assert 5 == echo(5, do="self")

    def test_another_isolated_function_is_refused(self) -> None:
        """A worker starts no workers of its own, and says so."""
        with using(functions.echo) as echo, pytest.raises(NotSupported, match="inside an isolated function"):
            echo(do="other")

    def test_a_model_may_fork(self) -> None:
        """The copy of the worker gives no second answer."""
        with using(functions.echo) as echo:
            assert 1 == echo(1, do="fork")
            assert 2 == echo(2)


class TestSpawn:
    def test_each_worker_loads_for_itself(self) -> None:
        """start="spawn" keeps the promises where no fork is possible: crash, timeout, policy, reload."""
        with using(functions.spawned) as spawned:
            where, pid = spawned()
            assert where == pid != os.getpid()
            assert None is spawned.status().mold
            with pytest.raises(WorkerCrashed, match="exit status 3"):
                spawned("crash")
            with pytest.raises(DeadlineExceeded):
                spawned("hang")
            wait_until(lambda: 2 == sum(one.state == "idle" for one in spawned.status().workers), "both workers")
            pids: set[int] = set()
            wait_until(lambda: pids.add(spawned()[1]) or len(pids) > 2, "a fresh worker")
            first = spawned.status().generation
            spawned.reload()
            assert first + 1 == spawned.status().generation
            assert spawned()[1] not in pids

    def test_a_load_that_fails_is_reported(
        self, switch: Callable[[str], None], caplog: pytest.LogCaptureFixture
    ) -> None:
        """With the loader's own error, as from a mold, and once: that ends the other workers that load."""
        switch("fail")
        with pytest.raises(LoadFailed, match="OSError: no weights"), functions.spawned:
            pass
        wait_until(lambda: functions.spawned.status().failures > 1, "a second attempt")
        functions.spawned.close()
        wait_until(lambda: not molds(), "the end of all workers")
        assert [] == [one for one in caplog.messages if "before it could take a call" in one]
