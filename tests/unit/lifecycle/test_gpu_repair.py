"""A call that runs out of GPU memory, on a GPU that a test makes: no line here runs on a real one."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.gpus import GB, OutOfMemory, Tensor
from tests.unit.lifecycle.test_gpu_policies import GpuModel
from tests.unit.lifecycle.world import World, outcome

from modelguard import Errors, ModelGuard
from modelguard.errors import InvalidOption, LoadFailed
from modelguard.telemetry import GpuOutOfMemory, ReloadDue, ReloadPostponed


class Calls:
    """A function whose first call, or all of them, fill the device."""

    def __init__(self, world: World, *, fills: int = 1) -> None:
        self._gpu = world.gpu
        self._fills = fills
        self.runs = 0
        self.beside: list[int] = []  # what was allocated when a run began

    def __call__(self, _model: object) -> str:
        self.runs += 1
        self.beside.append(self._gpu.allocated[0])
        activations = Tensor(self._gpu, 50 * GB)
        if self.runs <= self._fills:
            Tensor(self._gpu, 50 * GB)
        del activations
        return "done"


@pytest.fixture
def make(world: World) -> Callable[..., ModelGuard[Any]]:
    """Makes a loaded guard whose model has 1 GB on the GPU."""
    world.gpu.start()

    def made(**options: Any) -> ModelGuard[Any]:
        guard = world.guard(lambda: GpuModel(world, GB), **options)
        guard.load()
        return guard

    return made


Make = Callable[..., ModelGuard[Any]]


def run(function: Callable[..., Any], kind: str, guard: ModelGuard[Any]) -> Any:
    """Call a function of the model as a plain function, a coroutine or a method."""
    if kind == "coroutine":

        async def body(model: object) -> Any:
            return function(model)

        return asyncio.run(guard(body)())
    if kind == "method":

        class Owner:
            @guard
            def method(self, model: object) -> Any:
                return function(model)

        return Owner().method()
    return guard(function)()


@pytest.mark.parametrize("kind", ["function", "coroutine", "method"])
class TestCalls:
    def test_the_tensors_of_the_failed_call_are_freed(self, world: World, make: Make, kind: str) -> None:
        """The error that a service logs and keeps no longer keeps 50 GB on the GPU."""
        guard, calls = make(), Calls(world)
        with pytest.raises(OutOfMemory) as caught:
            run(calls, kind, guard)
        assert (GB, GB) == (world.gpu.allocated[0], world.gpu.reserved[0])
        assert "__call__" in "".join(traceback.format_exception(caught.value)), "its lines are still there"
        assert (1, 1, False) == (calls.runs, len(world.seen(GpuOutOfMemory)), world.last(GpuOutOfMemory).retry)

    def test_an_idempotent_call_is_run_once_more(self, world: World, make: Make, kind: str) -> None:
        """With retry=True the caller gets its answer, from a run that found the memory free."""
        guard, calls = make(retry=True), Calls(world)
        assert "done" == run(calls, kind, guard)
        assert (2, [GB, GB]) == (calls.runs, calls.beside)
        assert (1, 0) == (guard.status().uses, guard.status().in_flight)

    def test_it_is_run_only_once_more(self, world: World, make: Make, kind: str) -> None:
        """An input that is too large for the device fails after two runs, and neither leaves tensors behind."""
        guard, calls = make(retry=True), Calls(world, fills=9)
        with pytest.raises(OutOfMemory) as caught:
            run(calls, kind, guard)
        assert (2, 0) == (calls.runs, guard.status().in_flight)
        assert (GB, GB) == (world.gpu.allocated[0], world.gpu.reserved[0])
        assert "__call__" in "".join(traceback.format_exception(caught.value))
        assert [True, False] == [event.retry for event in world.seen(GpuOutOfMemory)]

    def test_errors_counts_it(self, world: World, make: Make, kind: str) -> None:
        """Calls that run out of memory one after the other replace the model."""
        guard, calls = make(reload_on=Errors(consecutive=2)), Calls(world, fills=9)
        for _ in range(2):
            with pytest.raises(OutOfMemory):
                run(calls, kind, guard)
        world.join()
        assert (2, ("Errors(consecutive=2)",)) == (guard.status().generation, world.reasons(ReloadDue))

    def test_other_errors_are_left_alone(self, world: World, make: Make, kind: str) -> None:
        """Whoever debugs a ValueError finds its local variables."""
        guard = make(retry=True)

        def fails(_model: object) -> None:
            kept = "local"
            raise ValueError(kept)

        with pytest.raises(ValueError, match="local") as caught:
            run(fails, kind, guard)
        trace = caught.value.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        assert trace is not None
        assert "local" == trace.tb_frame.f_locals["kept"]
        assert [] == world.seen(GpuOutOfMemory)


class TestReload:
    def test_what_stays_allocated_replaces_the_model(self, world: World, make: Make) -> None:
        """A call that left a tenth of the GPU behind, in a cache of the model say, costs a reload."""
        guard = make()

        def leaks(model: Any) -> None:
            model.cache = Tensor(world.gpu, 20 * GB)
            Tensor(world.gpu, 70 * GB)

        with pytest.raises(OutOfMemory):
            guard(leaks)()
        world.join()
        assert (2, GB) == (guard.status().generation, world.gpu.allocated[0])
        assert ("a call ran out of GPU memory and left 20 GB there",) == world.reasons(ReloadDue)

    def test_a_repaired_model_stays(self, world: World, make: Make) -> None:
        """An input that was too large is no reason to load anew."""
        guard = make()
        with pytest.raises(OutOfMemory):
            guard(Calls(world))()
        world.join()
        assert 1 == guard.status().generation

    def test_calls_beside_it_do_not_count_as_left_behind(self, world: World, make: Make) -> None:
        """While another call has tensors of its own, nobody can know what was left."""
        guard = make()
        with guard.lease():
            other = Tensor(world.gpu, 20 * GB)
            failed = world.spawn(guard(Calls(world, fills=9)))
            with pytest.raises(OutOfMemory):
                outcome(failed)
        del other
        assert 1 == guard.status().generation

    @pytest.mark.parametrize("cause", ["paused", "min_lifetime"])
    @pytest.mark.parametrize("policy", [None, Errors(consecutive=9)], ids=["alone", "beside a policy"])
    def test_it_waits_where_policies_do(self, world: World, make: Make, cause: str, policy: Any) -> None:
        """What holds policies back holds this back too, and no longer: it is not forgotten meanwhile."""
        guard = make(reload_on=policy, min_lifetime=60.0 if cause == "min_lifetime" else 0.0)
        if cause == "paused":
            guard.pause()
        kept = []

        def leaks(_model: object) -> None:
            kept.append(Tensor(world.gpu, 20 * GB))
            Tensor(world.gpu, 70 * GB)

        with pytest.raises(OutOfMemory):
            guard(leaks)()
        assert not guard.check()
        world.join()
        assert (1, cause) == (guard.status().generation, world.last(ReloadPostponed).cause)
        guard.resume()
        world.tick(60.0)
        assert guard.check()
        world.join()
        assert (2, 1) == (guard.status().generation, len(world.seen(ReloadDue)))


class TestLoads:
    def test_half_a_model_does_not_stay(self, world: World) -> None:
        """Whoever waited for a load keeps its error, but not its tensors, so the next attempt finds room."""
        world.gpu.start()
        sizes = [60 * GB, 60 * GB]

        def load() -> object:
            return [Tensor(world.gpu, size) for size in sizes]

        guard = world.guard(load)
        with pytest.raises(LoadFailed) as caught:
            guard.load()
        assert isinstance(caught.value.__cause__, OutOfMemory)
        assert 0 == world.gpu.allocated[0]
        sizes.pop()
        world.tick(60)
        guard.load()
        assert guard.ready

    @pytest.mark.parametrize("step", ["validate", "warmup"])
    def test_nor_what_its_first_call_has_taken(self, world: World, step: str) -> None:
        """The same if validation or warm-up runs out of memory."""
        world.gpu.start()

        def fill(_model: object) -> None:
            kept = [Tensor(world.gpu, 60 * GB)]
            kept.append(Tensor(world.gpu, 60 * GB))

        guard = world.guard(lambda: GpuModel(world, GB), **{step: fill})
        with pytest.raises(LoadFailed):
            guard.load()
        world.join()
        assert 0 == world.gpu.allocated[0]


class TestLazyResults:
    def test_a_generator_is_repaired_and_not_run_again(self, world: World, make: Make) -> None:
        """Parts that were sent cannot be taken back; the memory of the rest is freed."""
        guard, calls = make(retry=True), Calls(world, fills=9)

        @guard
        def parts(model: object) -> Iterator[str]:
            yield "first"
            yield calls(model)

        got = []
        with pytest.raises(OutOfMemory):
            got.extend(parts())
        assert (1, GB) == (calls.runs, world.gpu.allocated[0])
        assert 1 == len(world.seen(GpuOutOfMemory))

    def test_an_asynchronous_generator_too(self, world: World, make: Make) -> None:
        """The same on an event loop."""
        guard, calls = make(retry=True), Calls(world, fills=9)

        @guard
        async def parts(model: object) -> AsyncIterator[str]:
            yield "first"
            yield calls(model)

        async def read() -> None:
            async for _ in parts():
                pass

        with pytest.raises(OutOfMemory):
            asyncio.run(read())
        assert (1, 1, GB) == (calls.runs, len(world.seen(GpuOutOfMemory)), world.gpu.allocated[0])

    def test_a_retry_may_return_a_lazy_result(self, world: World, make: Make) -> None:
        """A plain function that returns an iterator keeps its lease after a second run too."""
        guard, calls = make(retry=True), Calls(world)
        result = guard(lambda model: iter([calls(model)]))()
        assert 1 == guard.status().in_flight
        assert ["done"] == list(result)
        assert 0 == guard.status().in_flight

    def test_a_lease_is_repaired(self, world: World, make: Make) -> None:
        """The functions that a with block calls leave nothing behind either."""
        guard, calls = make(), Calls(world, fills=9)
        with pytest.raises(OutOfMemory), guard.lease() as model:
            calls(model)
        assert (GB, 1) == (world.gpu.allocated[0], len(world.seen(GpuOutOfMemory)))

    def test_a_pool_is_repaired(self, world: World) -> None:
        """Calls on a pool's models too."""
        world.gpu.start()
        calls = Calls(world, fills=9)
        pool = world.pool(lambda _key: GpuModel(world, GB))

        @pool(key="voice")
        def speak(model: object, voice: str) -> str:
            return calls(model) + voice

        with pytest.raises(OutOfMemory):
            speak("ja")
        assert (GB, 1) == (world.gpu.allocated[0], len(world.seen(GpuOutOfMemory)))


@pytest.mark.parametrize("retry", [1, "yes", None])
def test_retry_is_a_bool(world: World, retry: Any) -> None:
    """A number of attempts is not taken for yes."""
    with pytest.raises(InvalidOption, match="retry"):
        world.guard(retry=retry)
