"""``modelguard_clock``: every policy, without sleeping."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.world import own_context
from tests.unit.serving.gated import TIMEOUT, Gated, until

from modelguard import (
    TTL,
    Backoff,
    Between,
    Changed,
    Errors,
    Execution,
    GpuMemoryGrowth,
    Idle,
    Loading,
    MemoryGrowth,
    MemoryLimit,
    ModelGuard,
    Modified,
    Policy,
    Snapshot,
    Swap,
    Uses,
    batched,
    guard,
    memory,
    pool,
    replicas,
)
from modelguard.errors import CircuitOpen, DeadlineExceeded, InvalidOption, LoadFailed, NoMemoryLimit
from modelguard.lifecycle.system import System, use
from modelguard.serving import Breaker, deadline, left
from modelguard.telemetry import Event, MemoryTrimmed, add_hook
from modelguard.testing import Clock, Loader


def generation(of: ModelGuard[Any]) -> int:
    """Give the number of the generation that serves."""
    return of.status().generation


def test_a_ttl_is_over_at_its_very_age(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """A TTL of an hour is due after an hour, and not a minute before; the old model is gone then."""
    nlp = guard(modelguard_loader, reload_on=TTL("1h"))
    nlp.load()
    modelguard_clock.advance("59m59s")
    assert 1 == generation(nlp)
    modelguard_clock.advance("1s")
    assert (2, 1) == (generation(nlp), modelguard_loader.alive)


def test_a_long_time_sees_many_reloads(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """A day in one step is lived through like a day: an hourly reload happens 24 times, less what deferring took."""
    nlp = guard(modelguard_loader, reload_on=TTL("1h"), swap=Swap(defer=0))
    nlp.load()
    modelguard_clock.advance("24h")
    assert 25 == generation(nlp)


def test_all_that_is_due_is_renewed(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """Replicas are replaced one after the other, and one step of the clock sees all of them."""
    pair = replicas(guard(modelguard_loader, reload_on=TTL("1h", jitter=0), swap=Swap(defer=0)), 2)
    pair.load()
    modelguard_clock.advance("1h")
    assert [2, 2] == [status.generation for status in pair.status()]


def test_uses_are_counted(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """What calls set off has been done after settle()."""
    nlp = guard(modelguard_loader, reload_on=Uses(3))
    number = nlp(lambda model: model.number)
    assert [1, 1, 1] == [number() for _ in range(3)]
    modelguard_clock.settle()
    assert 2 == number()


def test_what_a_load_starts_as_it_ends_is_waited_for(
    modelguard_clock: Clock, modelguard_loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its thread takes to begin."""
    looks, running, begin = [0], modelguard_clock._running, threading.Event()

    def look(_: Clock) -> list[threading.Thread]:
        looks[0] += 1
        if looks[0] == 3:
            begin.set()
        return running()

    class Late(threading.Thread):
        def start(self) -> None:
            assert begin.wait(10)
            super().start()

    def end() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "Thread", Late)
            nlp.reload(wait=False)

    nlp = guard(modelguard_loader, reload_on=None, swap=Swap(defer=0))
    nlp.load()
    modelguard_clock.settle()
    monkeypatch.setattr(Clock, "_running", look)
    modelguard_clock._start(end, "end")
    modelguard_clock.settle()
    assert 2 == generation(nlp)


@own_context
def test_guards_of_others_are_not_waited_for(modelguard_clock: Clock) -> None:
    """What an earlier test has left behind, a model with a call on it, ends no wait for this test's loads."""
    with use(System):
        other = guard(dict, reload_on=None, swap="load_first")

    def slowly() -> object:
        threading.Event().wait(0.05)
        return object()

    nlp = guard(slowly, reload_on=Uses(1), swap=Swap(defer=0))
    with other.lease():
        replacing = threading.Thread(target=other.reload)
        replacing.start()
        replacing.join(60)
        nlp(lambda _model: None)()
        modelguard_clock.settle()
        assert 2 == generation(nlp)


def test_errors_are_counted(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """Errors in a row reload as they do in a service."""
    nlp = guard(modelguard_loader, reload_on=Errors(consecutive=2))
    divide = nlp(lambda _model, by: 1 / by)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            divide(0)
    modelguard_clock.settle()
    assert 2 == generation(nlp)


def test_memory_grows_as_told(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """MemoryGrowth fires when the memory that the test sets has grown, and not before."""
    nlp = guard(modelguard_loader, reload_on=MemoryGrowth("500 MB"))
    nlp.load()
    modelguard_clock.advance("1m")
    modelguard_clock.memory = "599 MB"
    modelguard_clock.advance("1m")
    assert 1 == generation(nlp)
    modelguard_clock.memory = "600 MB"
    modelguard_clock.advance("1m")
    assert 2 == generation(nlp)


def test_a_share_is_of_the_limit_that_the_test_tells(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """MemoryLimit takes its share of the limit that the test sets; without one it is rejected, as in production."""
    with pytest.raises(NoMemoryLimit):
        guard(modelguard_loader, reload_on=MemoryLimit("80%"))
    modelguard_clock.limit = "1 GB"
    nlp = guard(modelguard_loader, reload_on=MemoryLimit("80%"))
    nlp.load()
    modelguard_clock.advance("1m")
    modelguard_clock.memory = "800 MB"
    modelguard_clock.advance("1m")
    assert 2 == generation(nlp)


def test_files_are_real_and_quiet_time_is_told(
    modelguard_clock: Clock, modelguard_loader: Loader, tmp_path: Path
) -> None:
    """Modified watches a real file; that it has been quiet for two seconds is a matter of the clock."""
    weights = tmp_path / "weights"
    weights.write_text("1")
    nlp = guard(modelguard_loader, reload_on=Modified(weights))
    nlp.load()
    modelguard_clock.advance("1m")
    assert 1 == generation(nlp)
    weights.write_text("22")
    modelguard_clock.advance("1m")
    assert 2 == generation(nlp)


class AtNight(Policy):
    """A user's own policy."""

    def due(self, now: Snapshot) -> bool:
        """Say when."""
        return now.age >= 12 * 3600


def test_own_and_composed_policies_are_driven(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """User-defined policies, and combinations with | and &, follow the clock too."""
    nlp = guard(modelguard_loader, reload_on=(AtNight() & TTL("1h")) | Uses(1000))
    nlp.load()
    modelguard_clock.advance("11h")
    assert 1 == generation(nlp)
    modelguard_clock.advance("2h")
    assert 2 == generation(nlp)


def test_a_failed_reload_is_retried_by_the_clock(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """The old model still serves after a failure, and the retry comes after its backoff."""
    nlp = guard(
        modelguard_loader, reload_on=TTL("1h"), loading=Loading(backoff=Backoff("10s", "10s")), swap=Swap(defer=0)
    )
    nlp.load()
    modelguard_loader.fail(1)
    modelguard_clock.advance("1h")
    assert ("degraded", 1) == (nlp.status().state, generation(nlp))
    modelguard_clock.advance("10s")
    assert ("ready", 2) == (nlp.status().state, generation(nlp))


def test_a_first_load_that_failed_waits_for_its_backoff(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """Until the backoff has passed, calls fail at once and the loader is left alone."""
    nlp = guard(modelguard_loader, reload_on=None)
    modelguard_loader.fail(1)
    for _ in range(2):
        with pytest.raises(LoadFailed):
            nlp.load()
    assert 1 == modelguard_loader.calls
    modelguard_clock.advance("1s")
    nlp.load()
    assert 2 == modelguard_loader.calls


def test_a_pool_s_idle_keys_go_by_the_clock(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """As nobody uses them."""
    voices = pool(modelguard_loader, max_memory="1 GB", reload_on=Idle("10m"))
    with voices.lease("ja"):
        modelguard_clock.advance("1h")
        assert () == voices.status().idle
    modelguard_clock.advance("12m")
    assert (("ja",), {}) == (voices.status().idle, voices.status().models)


def test_a_pool_ages_by_the_clock(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """A pool's models expire by the clock, and its loader gets the key."""
    voices = pool(modelguard_loader, max_memory="1 GB", reload_on=TTL("1h"))
    with voices.lease("anna") as voice:
        assert (1, "anna") == (voice.number, voice.key)
    modelguard_clock.advance("1h")
    with voices.lease("anna") as voice:
        assert 2 == voice.number


def test_a_call_under_way_does_not_hold_the_clock_up(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """A reload during a call: the call keeps its model, and the old one goes when it has ended."""
    nlp = guard(modelguard_loader, reload_on=TTL("1h"))
    with nlp.lease() as model:
        modelguard_clock.advance("2h")
        assert (1, 2) == (model.number, generation(nlp))
        del model
    modelguard_clock.settle()
    assert 1 == modelguard_loader.alive


def test_a_held_load_does_not_hold_the_clock_up(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """While a test holds a reload up, it can look at what calls see meanwhile."""
    nlp = guard(modelguard_loader, reload_on=TTL("1h"))
    nlp.load()
    modelguard_loader.hold()
    modelguard_clock.advance("1h")
    modelguard_loader.reached()
    assert ("reloading", 1) == (nlp.status().state, generation(nlp))
    modelguard_loader.let_go()
    modelguard_clock.settle()
    assert ("ready", 2) == (nlp.status().state, generation(nlp))


def test_headroom_decides_the_swap(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """With less headroom than a second copy needs, the old model goes first."""
    alive: list[int] = []

    def load() -> object:
        alive.append(modelguard_loader.alive)
        return modelguard_loader()

    nlp = guard(load, reload_on=TTL("1h"), warmup=lambda _: setattr(modelguard_clock, "memory", "300 MB"))
    nlp.load()
    assert 200_000_000 == nlp.status().model_bytes
    modelguard_clock.headroom = "10 MB"
    modelguard_clock.advance("1h")
    assert [0, 0] == alive


def test_the_time_of_day_is_set(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """``Between`` reads ``wall``, which advances with the clock."""
    modelguard_clock.wall = datetime(2026, 1, 10, 12, tzinfo=UTC)
    nlp = guard(modelguard_loader, reload_on=TTL("1h") & Between("02:00", "05:00", tz="UTC"))
    nlp.load()
    modelguard_clock.advance("13h")
    assert (1, 1) == (generation(nlp), modelguard_clock.wall.hour)
    modelguard_clock.advance("1h1m")
    assert 2 == generation(nlp)
    with pytest.raises(InvalidOption, match="must be a datetime with a time zone"):
        modelguard_clock.wall = datetime(2026, 1, 10)  # noqa: DTZ001 - that is the mistake


def test_a_model_that_is_idle_is_released(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """Ten minutes after the last call, and the next call loads it again."""
    nlp = guard(modelguard_loader, reload_on=Idle("10m"))
    nlp.load()
    modelguard_clock.advance("11m")
    assert ("idle", 0) == (nlp.status().state, modelguard_loader.alive)
    with nlp.lease():
        assert ("ready", 1) == (nlp.status().state, modelguard_loader.alive)


def test_a_guard_from_before_the_test_can_be_driven(modelguard_clock: Clock) -> None:
    """A guard at the top of a module, and already loaded, is taken into the test's world by its function."""
    modelguard_clock.drive(shout)
    shout("warm")
    before = generation(module_level)
    modelguard_clock.advance("1h")
    assert before + 1 == generation(module_level)


def test_a_model_from_before_the_test_loses_its_jitter(modelguard_clock: Clock) -> None:
    """A process's first model is due after half of its time at the earliest; in a test after all of it."""
    with use(lambda: System(random=lambda: 0.9, ticks=False)):
        nlp = guard(dict, reload_on=TTL("1h"))
    nlp.load()
    modelguard_clock.drive(nlp)
    modelguard_clock.advance("59m")
    assert 1 == generation(nlp)
    modelguard_clock.advance("1m")
    assert 2 == generation(nlp)


def test_what_has_many_models_is_not_driven(modelguard_clock: Clock) -> None:
    """Of a pool and of replicas the error says where to make them instead."""
    for made in (pool(dict, max_memory="1 GB"), replicas(guard(dict, reload_on=None))):
        with pytest.raises(InvalidOption, match=r"guarded=.* is neither a guard nor .* Make it in the test"):
            modelguard_clock.drive(made)  # type: ignore[arg-type] # as checkers say too


def test_a_guard_can_be_driven_again_by_another_test(modelguard_clock: Clock) -> None:
    """After a test has let its guard go, the next test drives it as well; no age is negative."""
    modelguard_clock.drive(module_level)
    shout("warm")
    before = generation(module_level)
    assert module_level.status().age >= 0
    modelguard_clock.advance("59m")
    modelguard_clock.advance("1m")
    assert before + 1 == generation(module_level)


module_level = guard(object, reload_on=TTL("1h"), name="module level")


@module_level
def shout(_model: object, text: str) -> str:
    """Stand for a function of an application."""
    return text.upper()


def test_a_clock_is_of_no_use_after_its_test() -> None:
    """A clock that is used after its test raises with that test's name; its guards continue in real time."""
    clock = Clock("test_it.py::test_it")
    with clock.installed():
        nlp = guard(object, reload_on=None)
        nlp.load()
        clock.advance("1h")
    with pytest.raises(InvalidOption, match=r"test_it\.py::test_it, which has ended"):
        clock.advance("1h")
    with pytest.raises(InvalidOption, match="which has ended"):
        clock.memory = "1 GB"
    first = clock.now
    nlp.reload()
    assert (2, True) == (generation(nlp), first <= clock.now < first + 3600)
    nlp.close()


@pytest.mark.parametrize("value", ["-1s", "soon", None])
def test_a_time_that_makes_no_sense_is_refused(modelguard_clock: Clock, value: Any) -> None:
    """Time does not go back, and is a duration."""
    with pytest.raises(InvalidOption, match="duration"):
        modelguard_clock.advance(value)


@pytest.mark.parametrize("name", ["memory", "limit", "headroom"])
def test_a_size_that_makes_no_sense_is_refused(modelguard_clock: Clock, name: str) -> None:
    """Sizes are checked where they are written, by the name that was written."""
    with pytest.raises(InvalidOption, match=f"{name}='lots'"):
        setattr(modelguard_clock, name, "lots")


def test_what_is_not_guarded_cannot_be_driven(modelguard_clock: Clock) -> None:
    """A function without a guard is rejected by name."""
    with pytest.raises(InvalidOption, match="is not decorated by a guard"):
        modelguard_clock.drive(len)


def test_guards_of_other_tests_are_left_alone(modelguard_loader: Loader) -> None:
    """Without the fixture, a guard lives in real time, whatever tests before it did."""
    nlp = guard(modelguard_loader, reload_on=None)
    assert time.monotonic is nlp.engine.system.clock


def test_a_misspelt_attribute_of_the_clock_is_an_error(modelguard_clock: Clock) -> None:
    """A typing error does not go unnoticed."""
    with pytest.raises(AttributeError, match="memmory"):
        modelguard_clock.memmory = "1 GB"  # type: ignore[attr-defined]


def test_probes_are_asked_as_time_passes(modelguard_clock: Clock) -> None:
    """What a probe returns in that time is evaluated, and the reload that follows has ended."""
    value = 0
    model = guard(object, reload_on=Changed(lambda: value), swap=Swap(defer=0))
    voices = pool(lambda key: object(), max_memory="1 GB", reload_on=Changed(lambda key: value))
    model.load()
    with voices.lease("anna"):
        pass
    modelguard_clock.advance("10m")
    assert 1 == model.status().generation
    value = 1
    modelguard_clock.advance("67s")
    assert 2 == model.status().generation
    with voices.lease("anna"):
        pass
    assert 2 == voices.status().loads
    model.close()


def test_the_process_is_trimmed_as_time_passes() -> None:
    """`memory.trim_every` goes by the test's clock, and ends with the test."""
    events: list[Event] = []
    remove = add_hook(events.append)
    clock = Clock("its test")
    with clock.installed():
        memory.trim_every("30s")
        clock.advance("1m35s")
    remove()
    assert ["process"] * 3 == [event.guard for event in events if isinstance(event, MemoryTrimmed)]
    memory.trim_every("1m").stop()  # nothing of the test's is in force any more


class CostlyReading(int):
    """Bytes of private memory whose reading takes a fiftieth of a second of processor time."""

    def __sub__(self, other: int) -> int:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return int(self) - other


def test_what_a_reading_costs_takes_no_time_of_the_test(modelguard_clock: Clock) -> None:
    """How often memory is read depends on the test's clock alone, however busy the machine is."""
    modelguard_clock.memory = CostlyReading(100_000_000)
    with memory.trim_every("10 MB") as trimming:
        modelguard_clock.advance("10s")
        assert trimming.check_interval() <= 0.1


def test_gpu_memory_is_what_the_test_says(modelguard_clock: Clock) -> None:
    """A policy on GPU memory is tried on a machine without one."""
    nlp = guard(object, reload_on=GpuMemoryGrowth("1 GB"), swap=Swap(defer=0))
    nlp.load()
    modelguard_clock.advance("10s")
    modelguard_clock.gpu_memory = "1.5 GB"
    assert (1_500_000_000, 1) == (nlp.status().gpu_allocated, nlp.status().generation)
    modelguard_clock.advance("10s")
    assert 2 == nlp.status().generation


class TestBatched:
    """What is batched, on a clock that is moved."""

    def test_deadlines_expire(self, modelguard_clock: Clock) -> None:
        """What waits and what runs gets ``DeadlineExceeded`` once its time has passed, before ``advance`` returns."""
        model = Gated()
        f = batched(max_size=1, deadline="1h")(model)
        running = f.submit("runs")
        model.busy()
        waiting, shorter = f.submit("waits"), f.submit("waits less", timeout="30m")
        modelguard_clock.advance("59m")
        assert (False, False, 1) == (running.done(), waiting.done(), f.status().expired)
        with pytest.raises(DeadlineExceeded):
            shorter.result(0)
        modelguard_clock.advance("1m")
        for late in (running, waiting):
            with pytest.raises(DeadlineExceeded, match=r"3600\."):
                late.result(0)
        model.gate.set()

    def test_the_deadline_of_a_block_passes(self, modelguard_clock: Clock) -> None:
        """``deadline()`` and ``left()`` follow the clock."""
        f = batched(max_size=1)(lambda items: items)
        with deadline("1h"):
            modelguard_clock.advance("59m")
            assert 1 == f(1)
            assert 0 < (left() or 0) <= 60
            modelguard_clock.advance("1m")
            with pytest.raises(DeadlineExceeded):
                f(2)

    def test_a_batch_becomes_due(self, modelguard_clock: Clock) -> None:
        """A batch that waits for more items begins when ``max_wait`` has passed on the clock."""
        f = batched(max_size=2, max_wait="1h")(lambda items: [len(items)] * len(items))
        alone = f.submit("alone")
        modelguard_clock.advance("59m")
        assert not alone.done()
        modelguard_clock.advance("1m")
        assert 1 == alone.result(TIMEOUT)

    def test_a_circuit_is_tried_again(self, modelguard_clock: Clock) -> None:
        """An open circuit refuses until its pause has passed on the clock."""
        healthy = False

        @batched(max_size=1, breaker=Breaker(failures=1, cooldown="1h", max_cooldown="1h"))
        def f(items: list[int]) -> list[int]:
            if not healthy:
                raise OSError("broken")
            return items

        with pytest.raises(OSError, match="broken"):
            f(1)
        until(lambda: f.status().state == "circuit open")
        healthy = True
        with pytest.raises(CircuitOpen):
            f(1)
        modelguard_clock.advance("1h")
        assert 1 == f(1)

    def test_who_gets_the_error_that_opens_a_circuit_finds_the_reload_begun(self, modelguard_clock: Clock) -> None:
        """So ``settle()`` waits for the fresh model, each time."""
        model = guard(object, reload_on=None)
        model.load()

        @batched(max_size=1, breaker=Breaker(failures=1, cooldown="1h", max_cooldown="1h", reload=model))
        def f(_items: list[int]) -> list[int]:
            raise OSError("broken")

        for generation in range(2, 12):
            with pytest.raises(OSError, match="broken"):
                f(1)
            modelguard_clock.settle()
            assert generation == model.status().generation
            modelguard_clock.advance("1h")

    def test_a_batch_overstays(self, modelguard_clock: Clock) -> None:
        """A batch that runs for longer than ``hang_after`` counts as hung."""
        model = Gated()
        f = batched(max_size=1, execution=Execution(hang_after="1h"))(model)
        running = f.submit(1)
        model.busy()
        modelguard_clock.advance("59m")
        assert f.ready
        modelguard_clock.advance("2m")
        assert (False, "hung") == (f.ready, f.status().state)
        model.gate.set()
        assert 1 == running.result(TIMEOUT)

    def test_deadlines_of_methods_expire(self, modelguard_clock: Clock) -> None:
        """Batched methods, which share their threads, follow the clock as well, also after a shorter deadline."""
        model = Gated()

        class Service:
            @batched(max_size=1)
            def f(self, items: list[str]) -> list[str]:
                return model(items)

        service = Service()
        running = service.f.submit("runs", timeout="2h")
        model.busy()
        modelguard_clock.advance("1h")
        soon = service.f.submit("waits", timeout="10ms")  # real time goes on
        with pytest.raises(DeadlineExceeded):
            soon.result(5)
        modelguard_clock.advance("1h")
        with pytest.raises(DeadlineExceeded):
            running.result(0)
        model.gate.set()


def test_guards_of_others_return_to_real_time_also_after_a_load_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test fails at its end, and the tests after it do not."""

    def settle(_: Clock) -> None:
        raise TimeoutError

    nlp = guard(dict, reload_on=TTL("1h"))
    clock, test = Clock("its test"), ExitStack()
    test.enter_context(clock.installed())
    clock.drive(nlp)
    nlp.load()
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "settle", settle)
        with pytest.raises(TimeoutError):
            test.close()
    before = nlp.engine.system.clock()
    assert before < nlp.engine.system.clock()
    with pytest.raises(InvalidOption, match="its test, which has ended"):
        clock.advance(1)
