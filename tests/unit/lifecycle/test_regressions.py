"""Regressions: each fault stays fixed."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import functools
import gc
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.lifecycle.world import MB, TIMEOUT, number, outcome, own_context, until

from modelguard import TTL, MemoryGrowth, MemoryLimit, Policy, Snapshot, Uses, batched, guard, telemetry
from modelguard.errors import InvalidOption, LoadFailed, ModelRejected, NotSupported, Reloading, WouldDeadlock
from modelguard.telemetry import CallbackErrored, Event, GenerationReleased, LoadErrored, LoadFinished

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World


class TestMethodsUnderOtherDecorators:
    """A decorator above the guard's calls the function with the instance first, unbound."""

    @pytest.fixture
    def service(self, world: World) -> Any:
        nlp = world.guard(lambda: "model")

        def through(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs)

            return call

        class Service:
            name = "service"

            @through
            @nlp
            def wrapped(self, model: str, text: str) -> tuple[str, str, str]:
                return self.name, model, text

            @functools.lru_cache  # noqa: B019 - the very thing that is tried
            @nlp
            def cached(self, model: str, text: str) -> tuple[str, str, str]:
                return self.name, model, text

            @property
            @nlp
            def prop(self, model: str) -> tuple[str, str]:  # noqa: PLR0206 - the guard passes it
                return self.name, model

            @functools.cached_property
            @nlp
            def once(self, model: str) -> tuple[str, str]:  # noqa: PLR0206 - as above
                return self.name, model

            @through
            @nlp
            async def later(self, model: str, text: str) -> tuple[str, str, str]:
                return self.name, model, text

            @nlp
            def plain(self, model: str, text: str) -> tuple[str, str, str]:
                return self.name, model, text

        return Service()

    @pytest.mark.parametrize("name", ["wrapped", "cached", "plain"])
    def test_get_the_instance_and_the_model_in_their_places(self, service: Any, name: str) -> None:
        """``self`` is the instance and the model comes second, whatever stands above."""
        assert ("service", "model", "text") == getattr(service, name)("text")
        assert ("service", "model", "text") == getattr(type(service), name)(service, "text")

    def test_of_every_kind(self, service: Any) -> None:
        """Properties and coroutines too."""
        assert ("service", "model") == service.prop == service.once
        assert ("service", "model", "text") == asyncio.run(service.later("text"))

    def test_take_self_by_name(self, service: Any) -> None:
        """A wrapper may pass the instance by keyword."""
        assert ("service", "model", "text") == type(service).wrapped(self=service, text="text")

    def test_without_an_instance_say_so(self, service: Any) -> None:
        """A method that is called without an instance says what it needs."""
        with pytest.raises(TypeError, match=r"wrapped\(\) is a method: call it on an instance"):
            type(service).wrapped()


class TestSignaturesOfMethodsThatExist:
    class Model:
        def predict(self, text: str) -> str:
            return text

        def with_model(self, model: Any, text: str) -> tuple[Any, str]:
            return model, text

    def test_a_models_own_method(self, world: World) -> None:
        """In ``guard(Model.predict)`` the model is ``self``; callers and frameworks see the other parameters."""
        predict = world.guard(self.Model)(self.Model.predict)
        assert (["text"], "a") == (list(inspect.signature(predict).parameters), predict("a"))

    def test_a_bound_method(self, world: World) -> None:
        """A method of an object is bound already: the model comes first, and callers see what follows it."""
        call = world.guard(lambda: "model")(self.Model().with_model)
        assert (["text"], ("model", "a")) == (list(inspect.signature(call).parameters), call("a"))


class TestWarmups:
    def test_may_call_the_service_s_own_batched_function(self, world: World) -> None:
        """The batch is computed at once, on the model that is warmed up, at the first load and at every other."""
        nlp = world.guard(warmup=lambda _: warmed.append((predict("a"), list(predict.map(["b", "c"])))))
        warmed: list[Any] = []

        @batched(max_size=4)
        @nlp
        def predict(model: Any, texts: list[str]) -> list[tuple[int, str]]:
            return [(model.number, text) for text in texts]

        world.spawn(nlp.load).result(TIMEOUT)
        nlp.reload()
        assert [((n, "a"), [(n, "b"), (n, "c")]) for n in (1, 2)] == warmed
        assert (2, "d") == predict("d")
        predict.close()

    def test_may_fail_in_it(self, world: World) -> None:
        """The function's queue is as it was: it counts nothing, and ends when it is closed."""
        nlp = world.guard(warmup=lambda _: predict("bad"))

        @batched(max_size=4)
        @nlp
        def predict(_: Any, texts: list[str]) -> list[int]:
            return [int(text) for text in texts]

        with pytest.raises(LoadFailed, match="ValueError"):
            world.spawn(nlp.load).result(TIMEOUT)
        assert (0, 0) == (predict.status().waiting, predict.status().cancelled)
        predict.close()
        assert "closed" == predict.status().state

    def test_may_await_it(self, world: World) -> None:
        """An ``async`` warm-up does the same on its own loop."""

        async def warm(_: Any) -> None:
            warmed.append(await predict.aio("a"))

        nlp = world.guard(warmup=warm)
        warmed: list[Any] = []

        @batched(max_size=4)
        @nlp
        def predict(model: Any, texts: list[str]) -> list[int]:
            return [model.number for _ in texts]

        world.spawn(nlp.load).result(TIMEOUT)
        assert [1] == warmed
        predict.close()

    @pytest.mark.parametrize("wait", ["result", "map", "shutdown"])
    @own_context
    def test_that_wait_for_themselves_through_an_executor_are_refused(self, world: World, wait: str) -> None:
        """The call in the executor waits for the model whose warm-up waits for the call: an error, not a hang."""

        def warm(_: Any) -> None:
            with ThreadPoolExecutor(1) as executor:
                if wait == "map":
                    list(executor.map(call, ["a"]))
                elif wait == "result":
                    executor.submit(call, "a").result()
                else:
                    failures.append(executor.submit(call, "a"))
            if wait == "shutdown":
                failures[0].result()

        failures: list[Any] = []
        nlp = world.guard(warmup=warm)
        call = nlp(lambda model, text: (model, text))
        with pytest.raises(LoadFailed, match="the warm-up in it, waits for this thread"):
            nlp.load(timeout=TIMEOUT)

    @pytest.mark.parametrize("own", [False, True], ids=["the loop's", "another"])
    @own_context
    def test_that_await_themselves_through_an_executor_are_refused(self, world: World, own: bool) -> None:  # noqa: FBT001 - pytest's
        """The same for a coroutine: ``run_in_executor`` hands no context on, so the call waits for the new model."""

        async def warm(_: Any) -> None:
            with ThreadPoolExecutor(1) as executor:
                await asyncio.get_running_loop().run_in_executor(executor if own else None, call, "a")

        nlp = world.guard(warmup=warm)
        call = nlp(lambda model, text: (model, text))
        with pytest.raises(LoadFailed, match="the warm-up in it, waits for this thread"):
            nlp.load(timeout=TIMEOUT)

    def test_may_await_a_thread_in_their_own_context(self, world: World) -> None:
        """``asyncio.to_thread`` hands the context on."""

        async def warm(_: Any) -> None:
            warmed.append(await asyncio.to_thread(call))

        warmed: list[int] = []
        nlp = world.guard(warmup=warm)
        call = nlp(lambda model: model.number)
        nlp.load(timeout=TIMEOUT)
        nlp.reload()
        assert [1, 2] == warmed

    def test_may_use_an_executor_in_their_own_context(self, world: World) -> None:
        """With a copy of the context the executor's thread runs on the new model."""

        def warm(_: Any) -> None:
            with ThreadPoolExecutor(1) as executor:
                warmed.append(executor.submit(contextvars.copy_context().run, call).result())

        warmed: list[int] = []
        nlp = world.guard(warmup=warm)
        call = nlp(lambda model: model.number)
        nlp.load(timeout=TIMEOUT)
        assert [1] == warmed


class Broken(Policy):
    """Raises whenever it is asked, in both of its methods."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def due(self, now: Snapshot) -> bool:
        raise self.error

    def next_check(self, now: Snapshot) -> Any:
        raise self.error


class Nameless(Broken):
    """Nor can it be written."""

    def __repr__(self) -> str:
        raise self.error


class Unwritable(Exception):
    """Its text fails."""

    def __str__(self) -> str:
        raise ValueError("no text")


class TestAPolicyThatRaises:
    @pytest.mark.parametrize(
        "error",
        [KeyError("uptime"), SystemExit(3), asyncio.CancelledError(), Unwritable()],
        ids=["error", "exit", "cancelled", "unwritable"],
    )
    def test_does_not_silence_the_others(self, world: World, error: BaseException) -> None:
        """The other members of ``|`` still count, memory policies included; the broken one is named once."""
        world.inline = True
        nlp = world.guard(reload_on=Broken(error) | Uses(3) | MemoryGrowth("50 MB"))
        assert [1, 1, 1, 2] == [number(nlp) for _ in range(4)]
        reported = [event.error for event in world.seen(CallbackErrored)]
        assert all("in Broken" in text for text in reported)
        assert len(reported) <= 2, "once per generation"

    def test_may_be_one_that_cannot_be_written(self, world: World) -> None:
        """Joined to another one by ``&``, its own ``repr`` is part of the name; the call that ends gets its result."""
        world.inline = True
        nlp = world.guard(reload_on=Nameless(KeyError("uptime")) & Uses(1) | Uses(3))
        assert [1, 1, 1, 2] == [number(nlp) for _ in range(4)]
        assert all("KeyError: 'uptime'" in event.error for event in world.seen(CallbackErrored))
        assert world.seen(CallbackErrored)

    def test_in_what_it_returns_does_not_silence_the_others(self, world: World) -> None:
        """``next_check`` that returns nothing is reported like one that raises."""

        class Silent(Policy):
            def due(self, now: Snapshot) -> bool:
                return False

            def next_check(self, now: Snapshot) -> Any:
                pass

        world.inline = True
        nlp = world.guard(reload_on=Silent() | Uses(3))
        assert [1, 1, 1, 2] == [number(nlp) for _ in range(4)]
        assert all("in Silent" in event.error for event in world.seen(CallbackErrored))
        assert world.seen(CallbackErrored)

    def test_has_reasons_and_no_texts(self, world: World) -> None:
        """``reasons`` that returns a text is reported: its letters would be the reasons of the next load."""

        class Wordy(Policy):
            def due(self, now: Snapshot) -> bool:
                return True

            def reasons(self, now: Snapshot) -> Any:
                return "old"

        world.inline = True
        nlp = world.guard(reload_on=Wordy() | Uses(3))
        assert [1, 1, 1, 2] == [number(nlp) for _ in range(4)]
        assert all("Reason, not 'o'" in event.error for event in world.seen(CallbackErrored))
        assert world.seen(CallbackErrored)

    def test_does_not_silence_a_memory_limit(self, world: World) -> None:
        """The safety net holds beside a policy that fails."""
        world.inline = True
        nlp = world.guard(reload_on=MemoryLimit("500 MB") | Broken(KeyError("uptime")))
        nlp.load()
        world.tick(6)
        for memory in (100, 100, 100, 600, 600, 600):
            world.memory = memory * MB
            nlp.check()
            world.tick(10)
        assert 2 == nlp.status().generation

    def test_lets_an_interrupt_through(self, world: World) -> None:
        """Ctrl-C while a policy is asked raises KeyboardInterrupt."""

        class Interrupted(Policy):
            def due(self, now: Snapshot) -> bool:
                raise KeyboardInterrupt

        nlp = world.guard(reload_on=Interrupted())
        nlp.load()
        with pytest.raises(KeyboardInterrupt):
            nlp.check()


def test_a_policy_that_blocks_delays_no_other_guard(world: World) -> None:
    """The ticker asks a policy of the author's in a thread of its own, and asks again when that has ended."""

    class Blocking(Policy):
        def due(self, now: Snapshot) -> bool:
            asked.append(threading.current_thread().name)
            assert gate.wait(TIMEOUT)
            return False

    asked: list[str] = []
    gate = threading.Event()
    nlp = world.guard(reload_on=Blocking())
    nlp.load()
    nlp.engine.tick()
    until(lambda: bool(asked))
    nlp.engine.tick()  # does not wait, and does not ask a second time
    assert ["modelguard-check-model"] == asked
    gate.set()
    world.join()
    nlp.engine.tick()
    world.join()
    assert 2 == len(asked)


def test_a_policy_is_asked_again_after_a_lack_of_threads(world: World) -> None:
    """A moment in which the system gives no thread does not silence a policy of the author's for ever."""

    class Own(Policy):
        def due(self, now: Snapshot) -> bool:
            asked.append(threading.current_thread().name)
            return False

    def start(work: Callable[[], None], name: str) -> None:
        if short and "check" in name:
            raise RuntimeError("can't start new thread")
        world.start(work, name)

    asked: list[str] = []
    short = True
    nlp = world.guard(reload_on=Own(), system=dataclasses.replace(world.system, start_thread=start))
    nlp.load()
    with pytest.raises(RuntimeError):
        nlp.engine.tick()
    short = False
    nlp.engine.tick()
    world.join()
    assert ["modelguard-check-model"] == asked


@pytest.mark.parametrize(
    "join",
    [lambda: TTL("1h") and Uses(5), lambda: TTL("1h") or Uses(5), lambda: not Uses(5)],
    ids=["and", "or", "not"],
)
def test_policies_have_no_truth(join: Callable[[], object]) -> None:
    """``and`` would silently drop one of two policies: the error says to write ``&`` and ``|``."""
    with pytest.raises(InvalidOption, match=r"Join policies with \| and &, not with `or` and `and`"):
        join()


@pytest.mark.parametrize("kind", [MemoryGrowth, MemoryLimit])
def test_a_size_without_its_unit_is_refused(kind: Any) -> None:
    """``MemoryGrowth(500)`` would reload every few seconds."""
    with pytest.raises(InvalidOption, match=r"is only 500 B.*'500 MB'"):
        kind(500)


@pytest.mark.parametrize(
    "use",
    [lambda: telemetry.add_hook(None), lambda: telemetry.set_hooks([None])],  # type: ignore[arg-type, list-item]
    ids=["add", "set"],
)
def test_a_hook_that_cannot_be_called_is_refused(use: Callable[[], object]) -> None:
    """It would fail with every event, far from the line that added it."""
    with pytest.raises(InvalidOption, match="must be a function of one event, not None"):
        use()


class TestALoaderWithACache:
    @pytest.mark.parametrize("swap", ["load_first", "drain_first"])
    def test_is_refused_at_the_reload(self, world: World, swap: Any) -> None:
        """The model that serves would be unloaded under its calls: the load fails, and says why."""
        nlp = world.guard(functools.cache(world.loader), swap=swap, unload=lambda model: model.unload())
        nlp.load()
        with pytest.raises(ModelRejected, match="returned a model that it has returned before"):
            nlp.reload()

    def test_keeps_serving(self, world: World) -> None:
        """With ``load_first`` the model is not unloaded, and calls go on."""
        nlp = world.guard(functools.cache(world.loader), swap="load_first", unload=lambda model: model.unload())
        words = nlp(lambda model, text: model.words(text))
        nlp.load()
        with pytest.raises(ModelRejected):
            nlp.reload()
        assert ["a", "b"] == words("a b")

    def test_of_plain_values_is_none(self, world: World) -> None:
        """Texts and numbers stand for models in tests, and may well be the same object twice."""
        nlp = world.guard(lambda: "model")
        nlp.load()
        nlp.reload()
        assert 2 == nlp.status().generation


@pytest.mark.parametrize("swap", ["load_first", "drain_first"])
def test_a_loop_over_a_guarded_generator_may_call_its_guard(world: World, swap: Any) -> None:
    """The calls between two steps run on the generator's model: the drain does not wait for them, nor they for it."""
    nlp = world.guard(swap=swap, drain_timeout=TIMEOUT)

    @nlp
    def numbers(model: Any) -> Iterator[int]:
        for _ in range(4):
            yield model.number

    current = nlp(lambda model: model.number)
    seen = []
    reload = None
    started = time.monotonic()
    for step in numbers():
        if reload is None:
            reload = world.spawn(nlp.reload)
            until(lambda: nlp.status().state in {"draining", "ready"} and nlp.status().generation != 1)
        seen.append((step, current()))
    assert reload is not None
    outcome(reload)
    assert time.monotonic() - started < TIMEOUT / 2
    expected = (1, 1) if swap == "drain_first" else (1, 2)
    assert [expected] * 4 == seen
    assert 2 == current()


def test_calls_of_other_threads_wait_for_the_new_model(world: World) -> None:
    """Only the thread whose generator is drained runs on; the others cannot keep the old model alive."""
    nlp = world.guard(swap="drain_first", wait_timeout=0)

    @nlp
    def numbers(model: Any) -> Iterator[int]:
        yield model.number
        yield model.number

    steps = numbers()
    next(steps)
    reload = world.spawn(nlp.reload)
    until(lambda: nlp.status().state == "draining")
    assert isinstance(world.spawn(number, nlp).exception(TIMEOUT), Reloading)
    steps.close()
    outcome(reload)


def test_a_model_whose_drain_was_given_up_takes_no_new_calls(world: World) -> None:
    """After ``drain_timeout`` nothing waits for the generator, so the calls between its steps wait like all others."""
    nlp = world.guard(swap="drain_first", drain_timeout=0)

    @nlp
    def numbers(model: Any) -> Iterator[int]:
        yield model.number
        yield model.number

    steps = numbers()
    assert 1 == next(steps)
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        nlp.reload()
    with pytest.raises(LoadFailed, match="no weights"):
        number(nlp)
    assert [1] == list(steps)


class TestClosing:
    def test_on_a_loop_needs_no_thread_of_the_loop_s_own(self, world: World) -> None:
        """The loop's few threads may all wait for the model that ``aclose`` is to end their wait for."""
        world.loader.hold()
        nlp = world.guard()
        call = nlp(lambda model: model.number)

        async def main() -> list[Any]:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1))
            waiting = [loop.run_in_executor(None, call) for _ in range(3)]
            until(lambda: len(nlp.engine.state.waiting) == 1)
            await asyncio.wait_for(nlp.aclose(), TIMEOUT)
            return await asyncio.gather(*waiting, return_exceptions=True)

        results = asyncio.run(main())
        assert {"GuardClosed"} == {type(result).__name__ for result in results}

    def test_keeps_the_context_of_its_caller(self, world: World) -> None:
        """Inside a call it would wait for itself, and says so on a loop as well."""
        nlp = world.guard()

        @nlp
        async def inside(_model: Any) -> None:
            await nlp.aclose()

        with pytest.raises(WouldDeadlock):
            asyncio.run(inside())


def test_under_trio_a_wait_says_what_to_do(world: World) -> None:
    """A loop that is not asyncio's cannot wait for a load: an error by name instead of one from asyncio's inside."""
    nlp = world.guard()

    @nlp
    async def call(model: Any) -> int:
        return int(model.number)

    coroutine = call()
    with pytest.raises(NotSupported, match=r"no asyncio event loop runs here.*trio"):
        coroutine.send(None)
    nlp.load()
    with pytest.raises(StopIteration) as done:  # loaded, it needs no loop
        call().send(None)
    assert 1 == done.value.value


class Registry:
    def __init__(self, models: list[Any]) -> None:
        self.models = models


def test_holders_are_named_from_a_root_on(world: World) -> None:
    """A list that holds the model is found by the way to it."""
    nlp = world.guard()
    with nlp.lease() as model:
        registry = Registry([model, 1, 2])
    del model
    nlp.reload()
    world.join()
    (found,) = world.last(GenerationReleased).holders
    assert found.startswith("registry.models[...] of the running call")
    registry.models.clear()
    gc.collect()


def test_a_failed_load_answers_only_requests_that_it_covers(world: World) -> None:
    """Events of both loads are emitted: one failure, then a success without waiting for the backoff."""
    nlp = world.guard()
    nlp.load()
    world.loader.hold()
    world.loader.fails = world.loader.recovers_after_this = True
    first = world.spawn(nlp.reload)
    world.loader.reached()
    second = world.spawn(nlp.reload)
    until(lambda: len(nlp.engine.state.waiting) == 2)
    world.loader.open.set()
    assert isinstance(first.exception(TIMEOUT), LoadFailed)
    assert second.result(TIMEOUT) is None
    assert [1] == [event.attempt for event in world.seen(LoadErrored)]


def test_guards_of_the_module_are_not_affected_by_a_world(world: World) -> None:
    """A guard that is made outside of a test's system lives in real time."""
    nlp = guard(lambda: "model", reload_on=None)
    assert nlp.engine.system is not world.system


def test_a_guard_that_is_reopened_while_its_last_load_ends_loads_again(world: World) -> None:
    """A call between the installation of a model and the end of that load's thread is served."""
    installed, gate = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if isinstance(event, LoadFinished) and not installed.is_set():
            installed.set()
            assert gate.wait(TIMEOUT)

    remove = telemetry.add_hook(hold)
    try:
        nlp = world.guard()
        first = world.spawn(number, nlp)
        assert installed.wait(TIMEOUT)
        assert 1 == number(nlp)
        nlp.close()
        nlp.engine.reopen()
        call = world.spawn(number, nlp)
        until(lambda: bool(nlp.engine.state.waiting))
        gate.set()
        assert 2 == outcome(call)
        outcome(first)
    finally:
        remove()


def test_a_call_that_ends_before_its_load_does_is_counted(world: World) -> None:
    """A policy that is due by then is acted on when the load has ended, not at the end of a later call."""
    installed, gate = threading.Event(), threading.Event()

    def hold(event: Event) -> None:
        if isinstance(event, LoadFinished) and not installed.is_set():
            installed.set()
            assert gate.wait(TIMEOUT)

    remove = telemetry.add_hook(hold)
    try:
        nlp = world.guard(reload_on=Uses(1), defer=0)
        first = world.spawn(number, nlp)
        assert installed.wait(TIMEOUT)
        assert 1 == number(nlp)
        gate.set()
        until(lambda: nlp.status().generation == 2)
        outcome(first)
    finally:
        remove()
