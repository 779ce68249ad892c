"""One load runs for any number of callers, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.lifecycle.world import World, number, outcome, until

from modelguard import Backoff, Loading, ModelGuard, Uses
from modelguard.errors import LoadFailed, ModelRejected
from modelguard.telemetry import GenerationReleased, LoadErrored, LoadFinished, LoadStarted
from modelguard.telemetry.reasons import Reason

CROWD = 16
TASKS = 50


def waiting(guard: ModelGuard[Any], count: int) -> Callable[[], bool]:
    return lambda: len(guard.engine.state.waiting) == count


async def anumber(guard: ModelGuard[Any]) -> int:
    async with guard.lease() as model:
        return int(model.number)


class TestOneFlight:
    def test_under_threads_and_tasks(self, world: World) -> None:
        """Threads and tasks of several event loops may wait for the same load."""
        guard = world.guard()
        world.loader.hold()
        calls = [world.spawn(number, guard)]
        calls += [world.spawn(asyncio.run, anumber(guard)) for _ in range(2)]
        until(waiting(guard, 3))
        world.loader.open.set()
        assert [1, 1, 1] == [outcome(call) for call in calls]

    def test_of_an_async_loader(self, world: World) -> None:
        """A loader may be ``async``: it runs on an event loop of its own, beside the caller's."""

        async def load() -> str:
            return await asyncio.to_thread(lambda: "model")

        async def main() -> str:
            async with world.guard(load).lease() as model:
                return str(model)

        assert "model" == asyncio.run(main())


class TestAFailedLoad:
    def test_is_told_at_once_until_the_backoff_has_passed(self, world: World) -> None:
        """Later callers get ``LoadFailed`` without another load, with the time of the next attempt."""
        guard = world.guard(loading=Loading(backoff=Backoff("8s")))
        world.loader.fails = True
        for left in (4.0, 3.0, 1.0):  # a draw of 0 halves the backoff
            world.now = 1004.0 - left
            with pytest.raises(LoadFailed) as failure:
                guard.load()
            expected = ("model", "OSError: no weights", 1, left)
            error = failure.value
            assert expected == (error.guard, error.reason, error.attempt, error.retry_after)
        assert 1 == world.loader.calls

    def test_is_retried_when_the_backoff_has_passed(self, world: World) -> None:
        """The first caller after the backoff begins the next load; each failure makes the wait longer."""
        guard = world.guard(loading=Loading(backoff=Backoff("8s")))
        world.loader.fails = True
        for attempt, wait in [(1, 4.0), (2, 8.0), (3, 16.0)]:
            with pytest.raises(LoadFailed) as failure:
                guard.load()
            assert (attempt, wait) == (failure.value.attempt, failure.value.retry_after)
            world.tick(wait)
        world.loader.fails = False
        guard.load()
        assert (4, 0, "ready", None) == (
            world.loader.calls,
            guard.status().failures,
            guard.status().state,
            guard.status().last_error,
        )

    def test_is_retried_in_the_background(self, world: World) -> None:
        """Once the backoff has passed the ticker retries, without waiting for a call."""
        guard = world.guard(loading=Loading(backoff=Backoff("8s")))
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.load()
        world.loader.fails = False
        assert (False, 4.0) == (guard.check(), guard.engine.check_interval())
        world.tick(4)
        assert guard.check()
        world.join()
        assert ("ready", ("retry after failure 1",)) == (guard.status().state, world.reasons(LoadFinished))

    def test_is_an_event(self, world: World) -> None:
        """The event says how often it failed, why, when the next attempt is due, and that none serves."""
        guard = world.guard(loading=Loading(backoff=Backoff("8s")))
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.load()
        event = world.last(LoadErrored)
        assert (1, "OSError: no weights", 4.0, None) == (event.attempt, event.error, event.retry_after, event.current)
        assert ("failed", 1, "OSError: no weights") == (
            guard.status().state,
            guard.status().failures,
            guard.status().last_error,
        )

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, MemoryError])
    def test_may_fail_in_any_way(self, world: World, error: type[BaseException]) -> None:
        """Whatever a loader raises is its failure, and not its caller's interrupt or cancellation."""

        def load() -> object:
            raise error

        with pytest.raises(LoadFailed, match=error.__name__) as failure:
            world.guard(load).load()
        assert isinstance(failure.value.__cause__, error)

    def test_says_what_it_took_when_memory_runs_out(self, world: World) -> None:
        """After a ``MemoryError`` the error says what the load had taken, what the process has and what is free."""

        def load() -> object:
            world.memory += 700_000_000
            world.headroom = 300_000_000
            raise MemoryError("Unable to allocate 1.2 GB")

        world.memory = 500_000_000
        with pytest.raises(LoadFailed) as failure:
            world.guard(load).load()
        took = "the load had taken 700 MB; this process has 1.2 GB of private memory, and 300 MB is free"
        assert f"MemoryError: Unable to allocate 1.2 GB; {took}" in str(failure.value)
        assert took in world.last(LoadErrored).error

    def test_holds_no_half_made_model(self, world: World) -> None:
        """What a failed loader had made so far is not kept alive until the next attempt."""
        guard = world.guard(validate=lambda _model: False)
        world.model_size = 7
        before = world.memory
        with pytest.raises(ModelRejected):
            guard.load()
        assert before == world.memory


class TestNoThread:
    """What happens to calls when the system cannot start another thread."""

    @staticmethod
    def starve(world: World) -> None:
        def start(_work: object, _name: str) -> None:
            raise RuntimeError("can't start new thread")

        object.__setattr__(world.system, "start_thread", start)

    def test_a_load_fails_by_name(self, world: World) -> None:
        """Callers that wait for a load that cannot be started get ``LoadFailed``, and it is tried again later."""
        guard = world.guard()
        self.starve(world)
        with pytest.raises(LoadFailed, match="can't start new thread") as failure:
            guard.load()
        object.__setattr__(world.system, "start_thread", world.start)
        world.tick(failure.value.retry_after)
        guard.load()
        assert guard.ready

    def test_a_reload_fails_by_name(self, world: World) -> None:
        """The old generation still serves."""
        guard = world.guard()
        guard.load()
        self.starve(world)
        with pytest.raises(LoadFailed, match="can't start new thread"):
            guard.reload()
        assert ("degraded", 1) == (guard.status().state, number(guard))

    def test_a_call_keeps_its_result(self, world: World) -> None:
        """A call whose end makes a reload due returns what it would return otherwise."""
        guard = world.guard(reload_on=Uses(1))
        guard.load()
        self.starve(world)
        assert 1 == number(guard)
        assert (1, "can't start new thread") == (world.last(LoadErrored).current, guard.status().last_error)

    def test_an_abandoned_generation_is_released(self, world: World) -> None:
        """The last call on an abandoned generation releases it itself, if nothing else can."""
        guard = world.guard(drain_timeout=0)
        with guard.lease():
            outcome(world.spawn(guard.reload))
            world.join()
            self.starve(world)
        assert [1] == [event.generation for event in world.seen(GenerationReleased)]

    def test_an_unload_needs_none(self, world: World) -> None:
        """It releases in the thread that asks for it."""
        guard = world.guard()
        guard.load()
        self.starve(world)
        guard.unload()
        assert ("idle", 1) == (guard.status().state, world.last(GenerationReleased).generation)

    def test_an_unload_on_an_event_loop_says_so(self, world: World) -> None:
        """A loop must not wait for calls that need it, so the model stays, and the error tells it."""
        guard = world.guard()
        guard.load()
        self.starve(world)
        with pytest.raises(RuntimeError, match="was not unloaded: the system gives no thread"):
            asyncio.run(guard.aunload())
        assert "ready" == guard.status().state


def test_events_tell_a_load_from_start_to_end(world: World) -> None:
    """A load emits two events: its start with the reason, and its end with time and size."""
    guard = world.guard()
    world.model_size = 20_000_000
    guard.load()
    started, finished = world.last(LoadStarted), world.last(LoadFinished)
    assert (1, ("first use",), 0.0, "none") == (
        started.generation,
        tuple(map(str, started.reasons)),
        started.deferred_seconds,
        started.host_lock,
    )
    assert (1, ("first use",), "first", 20_000_000, 0.0) == (
        finished.generation,
        tuple(map(str, finished.reasons)),
        finished.swap,
        finished.model_bytes,
        finished.waited_seconds,
    )


def test_a_fault_of_our_own_leaves_nobody_waiting(world: World) -> None:
    """If a reload fails before its loader is called, because memory cannot be read, all callers get the error."""

    def unreadable() -> int:
        raise OSError("no such cgroup")

    guard = world.guard()
    guard.load()
    object.__setattr__(world.system, "headroom", unreadable)
    with pytest.raises(LoadFailed, match="OSError: no such cgroup"):
        guard.reload()
    assert ("degraded", 1) == (guard.status().state, number(guard))


def test_a_load_that_failed_starts_no_other_load_when_its_thread_ends(world: World) -> None:
    """A retry may begin and end while the thread of the failed load still runs: it is not repeated for that."""
    state = world.guard().engine.state
    failure = LoadFailed("model", "no weights", attempt=1, retry_after=1.0)
    jobs = []
    for _ in range(2):
        _, job = state.request((Reason("requested", "requested"),))
        assert job is not None
        assert state.begin(job)
        state.fail(job, failure, retry_at=0.0)
        jobs.append(job)
    assert [None, None] == [state.finish(job, ()) for job in jobs]
