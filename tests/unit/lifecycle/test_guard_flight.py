"""One load runs however many ask for it, and what comes of it when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World, outcome, until

from modelguard import Backoff, ModelGuard, Uses
from modelguard.errors import LoadFailed, LoadTimeout, ModelRejected, WouldDeadlock
from modelguard.telemetry import GenerationReleased, LoadDiscarded, LoadErrored, LoadFinished, LoadStarted

CROWD = 16
TASKS = 50


def waiting(guard: ModelGuard[Any], count: int) -> Callable[[], bool]:
    return lambda: len(guard._core.waiting) == count


def lease_number(guard: ModelGuard[Any]) -> int:
    with guard.lease() as model:
        return int(model.number)


async def alease_number(guard: ModelGuard[Any]) -> int:
    async with guard.lease() as model:
        return int(model.number)


class TestOneFlight:
    def test_under_threads(self, world: World) -> None:
        """Sixteen threads that ask for the first model at once share one load."""
        guard = world.guard()
        world.loader.hold()
        calls = [world.spawn(lease_number, guard) for _ in range(CROWD)]
        until(waiting(guard, CROWD))
        world.loader.open.set()
        assert [1] * CROWD == [outcome(call) for call in calls]
        assert (1, 1) == (world.loader.calls, len(world.seen(LoadFinished)))

    def test_under_tasks(self, world: World) -> None:
        """Fifty tasks on one event loop share one load, and the loop goes on meanwhile."""
        guard = world.guard()
        world.loader.hold()

        async def open_when_all_wait() -> None:
            while not waiting(guard, TASKS)():  # the loop would not come here if one of them blocked it
                await asyncio.wait_for(asyncio.to_thread(world.loader.reached), TIMEOUT)
            world.loader.open.set()

        async def main() -> list[int]:
            numbers = await asyncio.gather(*(alease_number(guard) for _ in range(TASKS)), open_when_all_wait())
            return numbers[:TASKS]

        assert [1] * TASKS == asyncio.run(main())
        assert 1 == world.loader.calls

    def test_under_threads_and_tasks(self, world: World) -> None:
        """Threads and tasks of several event loops may wait for the same load."""
        guard = world.guard()
        world.loader.hold()
        calls = [world.spawn(lease_number, guard)]
        calls += [world.spawn(asyncio.run, alease_number(guard)) for _ in range(2)]
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

    def test_loading_twice_loads_once(self, world: World) -> None:
        """``load()`` and ``aload()`` have a generation serve; where one does already they do nothing."""
        guard = world.guard()
        guard.load()
        guard.load()
        asyncio.run(guard.aload())
        assert 1 == world.loader.calls

    def test_nothing_is_loaded_before_it_is_needed(self, world: World) -> None:
        """Making a guard, asking for its status and decorating with it load nothing."""
        guard = world.guard()
        guard(lambda model: model)
        assert (0, "new", False) == (world.loader.calls, guard.status().state, guard.ready)


class TestAFailedLoad:
    def test_is_told_once_to_all_who_waited(self, world: World) -> None:
        """Everyone who waited for a load that failed gets an error of their own, with the loader's as its cause."""
        guard = world.guard()
        world.loader.fails = True
        world.loader.hold()
        calls = [world.spawn(lease_number, guard) for _ in range(CROWD)]
        until(waiting(guard, CROWD))
        world.loader.open.set()
        errors = [call.exception(TIMEOUT) for call in calls]
        assert {LoadFailed} == {type(error) for error in errors}
        assert {OSError} == {type(error.__cause__) for error in errors if error is not None}
        assert CROWD == len({id(error) for error in errors})
        assert 1 == world.loader.calls

    def test_is_told_at_once_until_the_backoff_has_passed(self, world: World) -> None:
        """Later callers get ``LoadFailed`` without another load, and are told when the next attempt is due."""
        guard = world.guard(backoff=Backoff("8s"))
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
        guard = world.guard(backoff=Backoff("8s"))
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
        """Once the backoff has passed the keeper retries, so that nobody has to wait for it to be found out."""
        guard = world.guard(backoff=Backoff("8s"))
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.load()
        world.loader.fails = False
        assert (False, 4.0) == (guard.check(), guard.pace())
        world.tick(4)
        assert guard.check()
        world.join()
        assert ("ready", ("retry after failure 1",)) == (guard.status().state, world.last(LoadFinished).reasons)

    def test_is_an_event(self, world: World) -> None:
        """The event says how often it failed, why, when the next attempt is due, and that none serves."""
        guard = world.guard(backoff=Backoff("8s"))
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.load()
        event = world.last(LoadErrored)
        assert (1, "OSError: no weights", 4.0, None) == (event.attempt, event.error, event.retry_after, event.serving)
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

    def test_holds_no_half_made_model(self, world: World) -> None:
        """What a failed loader had made so far is not kept alive until the next attempt."""
        guard = world.guard(validate=lambda _model: False)
        world.model_size = 7
        before = world.memory
        with pytest.raises(ModelRejected):
            guard.load()
        assert before == world.memory


class TestARejectedModel:
    def test_none(self, world: World) -> None:
        """A loader that returns None forgot to return the model: the error says so."""
        with pytest.raises(ModelRejected, match="the loader returned None; let it return the model"):
            world.guard(lambda: None).load()

    @pytest.mark.parametrize("verdict", [False, 0, ""])
    def test_a_false_verdict(self, world: World, verdict: object) -> None:
        """A model that ``validate`` finds wanting never serves; it is unloaded and dropped."""
        unloaded: list[int] = []
        guard = world.guard(validate=lambda _model: verdict, unload=lambda model: unloaded.append(model.number))
        with pytest.raises(ModelRejected, match=f"validate returned {verdict!r}"):
            guard.load()
        assert ([1], False) == (unloaded, guard.ready)
        assert "validate or warmup failed" == world.last(LoadDiscarded).why

    def test_a_raised_verdict(self, world: World) -> None:
        """``validate`` may raise as well; what it raised is the cause."""

        def validate(model: Any) -> None:
            assert model.words("a b") == ["b"], "wrong words"

        with pytest.raises(ModelRejected, match="validate raised AssertionError: wrong words") as failure:
            world.guard(validate=validate).load()
        assert isinstance(failure.value.__cause__, AssertionError)

    @pytest.mark.parametrize("verdict", [None, True, 1, "fine"])
    def test_no_verdict_is_a_good_one(self, world: World, verdict: object) -> None:
        """``validate`` may return nothing, or anything true; it may be ``async``."""

        async def validate(_model: object) -> object:
            return verdict

        guard = world.guard(validate=validate)
        guard.load()
        assert guard.ready

    def test_a_failed_warmup(self, world: World) -> None:
        """A model whose warm-up fails does not serve."""

        def warmup(_model: object) -> None:
            raise ValueError("no such word")

        with pytest.raises(LoadFailed, match="ValueError: no such word"):
            world.guard(warmup=warmup).load()


class TestLoadTimeout:
    def test_a_hanging_loader_is_left_behind(self, world: World) -> None:
        """A loader that hangs past ``load_timeout`` fails for all who wait."""
        guard = world.guard(load_timeout="10ms")
        world.loader.hold()
        with pytest.raises(LoadTimeout, match=r"not done after load_timeout=0.01 s and was abandoned") as failure:
            guard.load()
        assert isinstance(failure.value, TimeoutError)
        assert "failed" == guard.status().state

    def test_a_model_that_comes_late_is_released(self, world: World) -> None:
        """Should the loader come back after all, its model is unloaded, dropped, and said to be discarded."""
        unloaded: list[int] = []
        guard = world.guard(load_timeout="10ms", unload=lambda model: unloaded.append(model.number))
        world.loader.hold()
        with pytest.raises(LoadTimeout):
            guard.load()
        world.loader.open.set()
        world.join()
        assert ([1], ["it came after load_timeout"]) == (unloaded, [event.why for event in world.seen(LoadDiscarded)])
        assert not guard.ready

    def test_a_loader_in_time_is_not_disturbed(self, world: World) -> None:
        """Within the bound a loader returns or fails as it does without one."""
        guard = world.guard(load_timeout="1h")
        guard.load()
        world.loader.fails = True
        with pytest.raises(LoadFailed, match="OSError: no weights"):
            guard.reload()
        assert 1 == guard.status().generation

    def test_a_timeout_of_the_loader_s_own_is_its_failure(self, world: World) -> None:
        """A ``TimeoutError`` raised by the loader, say by a download, is not taken for ``load_timeout``."""

        def load() -> object:
            raise TimeoutError("the mirror does not answer")

        with pytest.raises(LoadFailed, match="the mirror does not answer") as failure:
            world.guard(load, load_timeout="1h").load()
        assert LoadFailed is type(failure.value)


class TestWarmup:
    def test_runs_decorated_functions_on_the_new_model(self, world: World) -> None:
        """Guarded functions that ``validate`` and ``warmup`` call run on the new model, before it serves."""
        ran_on: list[tuple[str, int, int]] = []

        def note(step: str) -> Callable[[Any], None]:
            return lambda model: ran_on.append((step, number(), model.number))

        guard = world.guard(validate=note("validate"), warmup=note("warmup"))

        @guard
        def number(model: Any) -> int:
            return int(model.number)

        guard.load()
        guard.reload()
        assert [("validate", 1, 1), ("warmup", 1, 1), ("validate", 2, 2), ("warmup", 2, 2)] == ran_on
        assert (2, 2) == (number(), guard.status().generation)

    def test_is_not_counted_as_use(self, world: World) -> None:
        """A generation's uses and age begin when it serves."""
        guard = world.guard(warmup=lambda _model: (words("a"), world.tick(5)))

        @guard
        def words(model: Any, text: str) -> list[str]:
            return list(model.words(text))

        guard.load()
        assert (0, 0.0) == (guard.status().uses, guard.status().age)

    def test_may_be_async(self, world: World) -> None:
        """``warmup`` may be a coroutine function."""
        warm = []

        async def warmup(model: Any) -> None:
            warm.append(model.number)

        world.guard(warmup=warmup).load()
        assert [1] == warm


class TestALoaderThatWaitsForItself:
    @pytest.mark.parametrize("options", [{}, {"load_timeout": "1h"}], ids=str)
    def test_is_told(self, world: World, options: dict[str, Any]) -> None:
        """A loader that calls a function of its own guard fails with what to do instead, and does not hang."""
        guard = world.guard(lambda: number(), **options)  # noqa: PLW0108 - `number` comes later

        @guard
        def number(model: Any) -> int:
            return int(model.number)

        with pytest.raises(LoadFailed, match=r"move the call to warmup") as failure:
            guard.load()
        assert isinstance(failure.value.__cause__, WouldDeadlock)


class TestNoThread:
    """What becomes of calls where the system gives no more threads, as it may before it gives no more memory."""

    @staticmethod
    def starve(world: World) -> None:
        def start(_work: object, _name: str) -> None:
            raise RuntimeError("can't start new thread")

        object.__setattr__(world.runtime, "start_thread", start)

    def test_a_load_fails_by_name(self, world: World) -> None:
        """Who waits for a load that cannot be started gets ``LoadFailed``, and it is tried again in time."""
        guard = world.guard()
        self.starve(world)
        with pytest.raises(LoadFailed, match="can't start new thread") as failure:
            guard.load()
        object.__setattr__(world.runtime, "start_thread", world.start)
        world.tick(failure.value.retry_after)
        guard.load()
        assert guard.ready

    def test_a_reload_fails_by_name(self, world: World) -> None:
        """The old generation serves on."""
        guard = world.guard()
        guard.load()
        self.starve(world)
        with pytest.raises(LoadFailed, match="can't start new thread"):
            guard.reload()
        assert ("degraded", 1) == (guard.status().state, lease_number(guard))

    def test_a_call_keeps_its_result(self, world: World) -> None:
        """A call whose end makes a reload due returns what it would return otherwise."""
        guard = world.guard(reload_on=Uses(1))
        guard.load()
        self.starve(world)
        assert 1 == lease_number(guard)
        assert (1, "can't start new thread") == (world.last(LoadErrored).serving, guard.status().last_error)

    def test_an_abandoned_generation_is_released(self, world: World) -> None:
        """The last call on an abandoned generation releases it itself, if nobody else can."""
        guard = world.guard(drain_timeout=0)
        with guard.lease():
            outcome(world.spawn(guard.reload))
            world.join()
            self.starve(world)
        assert [1] == [event.generation for event in world.seen(GenerationReleased)]


def test_events_tell_a_load_from_start_to_end(world: World) -> None:
    """A load is told by two events: its start with the reason, and its end with time and size."""
    guard = world.guard()
    world.model_size = 20_000_000
    guard.load()
    started, finished = world.last(LoadStarted), world.last(LoadFinished)
    assert (1, ("first use",), 0.0, "none") == (
        started.generation,
        started.reasons,
        started.deferred_seconds,
        started.slot,
    )
    assert (1, ("first use",), "first", 20_000_000, 0.0) == (
        finished.generation,
        finished.reasons,
        finished.swap,
        finished.model_bytes,
        finished.waited_seconds,
    )


def test_a_fault_of_our_own_leaves_nobody_waiting(world: World) -> None:
    """Where a reload fails before its loader is called, say because memory cannot be read, all are told."""

    def unreadable() -> int:
        raise OSError("no such cgroup")

    guard = world.guard()
    guard.load()
    object.__setattr__(world.runtime, "headroom", unreadable)
    with pytest.raises(LoadFailed, match="OSError: no such cgroup"):
        guard.reload()
    assert ("degraded", 1) == (guard.status().state, lease_number(guard))
