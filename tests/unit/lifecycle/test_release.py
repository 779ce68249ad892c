"""A release is verified: how much it returned, whether the model is gone, and if not, what holds it."""

from __future__ import annotations

import gc
import re
import sys
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, TIMEOUT, Model, World, number, outcome

from modelguard import telemetry
from modelguard.facts import _holders
from modelguard.lifecycle import _release
from modelguard.telemetry import CallbackErrored, GenerationReleased, LoadFinished


class Holder:
    def __init__(self, model: object) -> None:
        self.model = model


class Slotted:
    __slots__ = ("model",)

    def __init__(self, model: object) -> None:
        self.model = model


def stuck(model: object) -> Iterator[object]:
    yield
    yield model


class Pause:
    def __await__(self) -> Iterator[None]:
        yield


async def astuck(model: object) -> object:
    await Pause()
    return model


async def agstuck(model: object) -> AsyncIterator[object]:
    yield
    yield model


def begun(call: Any) -> Any:
    """Let a generator or coroutine come to its first stop."""
    with suppress(StopIteration):  # so an asynchronous generator says that it has yielded
        (call.asend(None) if hasattr(call, "asend") else call).send(None)
    return call


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each ``gc.collect()`` of a release; no others run meanwhile."""
    seen: list[str] = []
    collect = gc.collect

    class Watched:
        get_referrers, get_stats = staticmethod(gc.get_referrers), staticmethod(gc.get_stats)

        @staticmethod
        def collect() -> int:
            seen.append("collect")
            return collect()

    collect()
    monkeypatch.setattr(_release, "gc", Watched)
    return seen


@pytest.fixture(autouse=True)
def _undisturbed() -> Iterator[None]:
    """Cycles are collected when a release requests it, not by chance."""
    gc.disable()
    yield
    gc.enable()


def released(world: World, load: Callable[[], Any] | None = None, **options: Any) -> GenerationReleased:
    """Load a model and let it go again."""
    guard = world.guard(load, **options)
    guard.load()
    guard.close()
    return world.last(GenerationReleased)


def test_what_came_back_is_told(world: World) -> None:
    """The event carries private memory before and after, and who trimmed."""
    world.model_size = 300 * MB
    event = released(world)
    assert (400 * MB, 100 * MB, 300 * MB) == (event.bytes_before, event.bytes_after, event.freed)
    assert (1, "fake", None) == (event.generation, event.trimmed_by, event.error)


class TestWhatDidNotComeBack:
    """A release that returns little although the model is gone says why."""

    class Plain:
        pass

    def released(
        self, world: World, *, freed: int, returned: int = 0, in_use: int | None = 0, size: int = 100 * MB
    ) -> GenerationReleased:
        """Let a model go of which the allocators get ``freed`` bytes back, and the system ``returned``."""
        world.in_use, world.python_in_use = in_use, 0

        def load() -> Any:
            world.memory += size
            world.python_in_use = size
            return self.Plain()

        def unload(_: Any) -> None:
            world.memory -= returned
            world.python_in_use = size - freed

        return released(world, load, unload=unload)

    def test_lies_between_blocks_in_use(self, world: World) -> None:
        """It was freed, and the allocator cannot return it."""
        event = self.released(world, freed=100 * MB, returned=2 * MB)
        assert "2 MB of 100 MB came back: 100 MB were freed, but lie between blocks that are in use" == event.kept
        assert (False, None) == (event.alive, event.trim_error)

    def test_is_still_in_use(self, world: World) -> None:
        """A result may refer to the model's parts."""
        why = "parts of it or libraries that it imported are in use, or as much was allocated meanwhile"
        expected = f"0 B of 100 MB came back: {why}"
        assert expected == self.released(world, freed=1 * MB).kept

    def test_cannot_be_told_without_figures(self, world: World) -> None:
        """Some allocators have none."""
        expected = "0 B of 100 MB came back; the allocator does not say how much of it was freed"
        assert expected == self.released(world, freed=0, in_use=None).kept

    def test_is_nothing_to_speak_of(self, world: World) -> None:
        """Other calls change memory by as much as half of a model, or by 16 MB."""
        assert self.released(world, freed=0, returned=60 * MB).kept is None
        assert self.released(world, freed=0, size=15 * MB).kept is None

    def test_has_its_reason_already(self, world: World) -> None:
        """A model that is held, and an allocator that cannot trim, are told elsewhere."""
        world.in_use, held = 0, []

        def load() -> Any:
            world.memory += 100 * MB
            held.append(self.Plain())
            return held[-1]

        event = released(world, load)
        assert (True, None) == (event.alive, event.kept)


def test_the_steps_come_in_order(world: World, collections: list[str]) -> None:
    """The unload hook sees the whole model, then it is dropped and collected, then the allocator is trimmed."""
    steps: list[str] = []

    class Cyclic(Model):
        def __init__(self) -> None:
            super().__init__(world, 1)
            self.itself = self

        def __del__(self) -> None:
            steps.append("died")
            super().__del__()

    trim = world.trim
    object.__setattr__(world.system, "trim", lambda: (steps.append(f"trimmed after {len(collections)}"), trim())[1])
    guard = world.guard(Cyclic, unload=lambda model: steps.append(f"unload {model.number}"))
    guard.load()
    steps.clear()
    guard.close()
    assert ["unload 1", "died", "trimmed after 1"] == steps


class TestCollection:
    """A collection stalls an application of 1.5 million objects for 80 ms, so it is the last resort."""

    def test_is_not_needed_for_a_model_that_dies_by_count(self, world: World, collections: list[str]) -> None:
        """A model that dies with its last reference costs no collection."""
        event = released(world)
        assert (False, False, []) == (event.alive, event.collected, collections)

    def test_breaks_cycles(self, world: World, collections: list[str]) -> None:
        """A model that refers to itself is collected, and then it is gone."""

        def load() -> Model:
            model = Model(world, 1)
            model.key = model
            return model

        event = released(world, load)
        assert (False, True, ["collect"]) == (event.alive, event.collected, collections)

    def test_waits_for_the_collection_of_another_thread(self, world: World, collections: list[str]) -> None:
        """Beside one Python begins no other, and that one may have passed the model while it was in use."""
        begun, go_on = threading.Event(), threading.Event()

        class Late:
            def __init__(self) -> None:
                self.me = self

            def __del__(self) -> None:
                begun.set()
                go_on.wait(TIMEOUT)

        def sleep(_seconds: float) -> None:
            go_on.set()
            other.join(TIMEOUT)

        def load() -> Model:
            model = world.loader()
            model.key = model
            return model

        guard = world.guard(load, system=replace(world.system, sleep=sleep))
        guard.load()
        Late()
        other = threading.Thread(target=gc.collect)
        other.start()
        assert begun.wait(TIMEOUT)
        guard.close()
        assert world.last(GenerationReleased).alive is False
        assert 2 == len(collections)

    def test_follows_memory_that_a_cycle_inside_the_model_holds(self, world: World, collections: list[str]) -> None:
        """If the model is gone and most of its memory is not, a cycle inside it holds that: it is collected."""
        world.model_size = 200 * MB

        class Shell:
            def __init__(self) -> None:
                inside = Model(world, 1)
                inside.key = inside

        event = released(world, Shell)
        assert (False, True, 200 * MB) == (event.alive, event.collected, event.freed)
        assert ["collect"] == collections

    def test_is_done_for_what_cannot_be_watched(self, world: World) -> None:
        """A dict or list cannot be watched: whether it is gone stays unknown."""
        event = released(world, lambda: {"weights": [1, 2]})
        assert (None, (), True) == (event.alive, event.holders, event.collected)

    def test_keeps_small_leftovers_from_adding_up(self, world: World, collections: list[str]) -> None:
        """What each model leaves in cycles is collected once it is a twentieth of its size, however much came back."""
        world.model_size = 400 * MB

        class Leftover(Model):
            """Most of it dies by count; a tenth of it is in a cycle."""

            def __init__(self) -> None:
                super().__init__(world, 1)
                size, world.model_size = world.model_size, 10 * MB
                inside = Model(world, 2)
                world.model_size = size
                inside.key = inside

        guard = world.guard(Leftover)
        guard.load()
        for _ in range(5):
            guard.reload()
            world.join()
        assert world.memory <= (100 + 410 + 20) * MB
        assert collections

    def test_is_not_called_for_by_what_calls_allocate_meanwhile(self, world: World, collections: list[str]) -> None:
        """Of a model with 10 MB, half may seem to stay behind because a call has taken as much just now."""
        world.model_size = 10 * MB
        guard = world.guard(unload=lambda model: setattr(world, "memory", world.memory + 6 * MB))
        guard.load()
        for _ in range(3):
            guard.reload()
            world.join()
            assert [False, False] == [world.last(GenerationReleased).collected, bool(collections)]
            world.memory -= 6 * MB

    def test_is_not_called_for_by_libraries_that_the_first_load_brings(
        self, world: World, collections: list[str]
    ) -> None:
        """They stay in memory with the next model, and do not count as the first one's."""
        world.model_size = 50 * MB
        libraries = [300 * MB]

        def load() -> Model:
            world.memory += libraries.pop() if libraries else 0
            return Model(world, 1)

        guard = world.guard(load, swap="load_first")
        guard.load()
        assert 350 * MB == guard.status().model_bytes
        guard.reload()
        world.join()
        released = world.last(GenerationReleased)
        assert (50 * MB, False, []) == (released.freed, released.collected, collections)

    def test_is_called_for_by_noise_that_adds_up(self, world: World, collections: list[str]) -> None:
        """However small a model is, what stays behind is collected before it is more than 16 MB."""
        world.model_size = 10 * MB

        class Shell:
            def __init__(self) -> None:
                inside = Model(world, 1)
                inside.key = inside

        guard = world.guard(Shell, swap="load_first")
        guard.load()
        for _ in range(8):
            guard.reload()
            world.join()
            assert world.memory <= (100 + 2 * 10 + 16) * MB
        assert 1 <= len(collections) <= 4


class TestAReleaseThatFails:
    def test_harms_nobody(self, world: World) -> None:
        """If memory cannot be trimmed or read, the new generation still serves, and an event reports it."""

        def broken() -> str:
            raise OSError("no malloc")

        guard = world.guard()
        guard.load()
        trim = world.system.trim
        loaded = threading.Event()
        object.__setattr__(world.system, "trim", lambda: broken() if loaded.is_set() else trim())
        remove = telemetry.add_hook(lambda event: loaded.set() if isinstance(event, LoadFinished) else None)
        guard.reload()
        world.join()
        remove()
        assert ("release", "OSError: no malloc") == (
            world.last(CallbackErrored).callback,
            world.last(CallbackErrored).error,
        )
        assert ("ready", 2, []) == (guard.status().state, guard.status().generation, world.seen(GenerationReleased))
        assert 0 == len(guard.engine.state.draining)

    def test_of_an_abandoned_generation_tells_no_drain(self, world: World) -> None:
        """A generation that was released after its drain timeout reports no drain time."""
        guard = world.guard(drain_timeout=0)
        with guard.lease():
            outcome(world.spawn(guard.reload))
            world.join()
        world.join()
        assert world.last(GenerationReleased).drain_seconds is None


class TestAModelThatLivesOn:
    def holders(self, world: World, hold: Callable[[Any], Any]) -> tuple[str, ...]:
        model = world.loader()
        held = hold(model)
        guard = world.guard([model].pop)
        guard.load()
        del model
        guard.close()
        event = world.last(GenerationReleased)
        assert (True, True) == (event.alive, event.collected)
        del held
        return event.holders

    def test_is_not_reported_where_another_thread_lets_it_go_at_once(self, world: World) -> None:
        """Who takes its figures, as for a status, has it for a moment, which is no leak."""
        model = Model(world, 1)
        held = [model]
        guard = world.guard([model].pop, system=replace(world.system, sleep=lambda _: held.clear()))
        guard.load()
        del model
        guard.close()
        assert (False, ()) == (world.last(GenerationReleased).alive, world.last(GenerationReleased).holders)

    def test_is_not_reported_while_a_census_lists_all_objects(self, world: World) -> None:
        """As those of ``diagnosis.watch()`` and ``diagnose --pid``: the collection waits for their end."""
        space: dict[str, Any] = {"__name__": "modelguard.diagnosis._census"}
        exec("def look(objects, started, ended): started.set(); ended.wait(60)", space)
        started, ended, model, slept = threading.Event(), threading.Event(), Model(world, 1), count()
        counting = threading.Thread(target=space["look"], args=([model], started, ended))
        counting.start()
        started.wait(60)

        def sleep(_: float) -> None:
            if next(slept) == 100:
                ended.set()
                counting.join(60)

        guard = world.guard([model].pop, system=replace(world.system, sleep=sleep))
        guard.load()
        del model
        guard.close()
        assert (False, ()) == (world.last(GenerationReleased).alive, world.last(GenerationReleased).holders)

    def test_is_reported_with_its_holder(self, world: World) -> None:
        """If the old model is still alive the event says so and names what holds it."""
        held = "held.model of the running call"
        assert (f"{held} {__name__}.TestAModelThatLivesOn.holders",) == self.holders(world, Holder)

    @pytest.mark.parametrize(
        ("hold", "who"),
        [
            (lambda model: [model, 1, 2], "held[...] of the running call"),
            (lambda model: (model,), "held[...] of the running call"),
            (lambda model: {model}, "held[...] of the running call"),
            (lambda model: {"nlp": model}, "held[...] of the running call"),
            (lambda model: model.words, "the bound method Model.words"),
            (
                lambda model: lambda: model,
                f"the closure of {__name__}.TestAModelThatLivesOn.<lambda>.<locals>.<lambda>",
            ),
            (Slotted, "held.model of the running call"),
        ],
        ids=["list", "tuple", "set", "dict", "method", "closure", "slots"],
    )
    def test_names_its_holders_in_words(self, world: World, hold: Callable[[Any], Any], who: str) -> None:
        """Each kind of holder is named so that it can be found."""
        (found,) = self.holders(world, hold)
        assert found.startswith(who)

    def test_names_the_type_where_no_way_is_found_in_time(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each look at all objects stops the other threads, so a release looks for two seconds at most."""
        monkeypatch.setattr(_holders, "_BRIEFLY", -1.0)
        assert ("a list of 1",) == self.holders(world, lambda model: [[model]])

    def test_names_globals(self, world: World) -> None:
        """A global variable is named with its module."""
        module = types.ModuleType("service_globals")
        sys.modules[module.__name__] = module
        try:
            found = self.holders(world, lambda model: setattr(module, "nlp", model))
        finally:
            del sys.modules[module.__name__]
        assert ("service_globals.nlp",) == found

    @pytest.mark.parametrize("kind", ["generator", "coroutine", "async generator"])
    def test_names_suspended_calls(self, world: World, kind: str) -> None:
        """A suspended generator or coroutine with the model in a variable is named with its place."""
        call: dict[str, Callable[[Any], Any]] = {"generator": stuck, "coroutine": astuck, "async generator": agstuck}
        name = call[kind].__name__
        (found,) = self.holders(world, lambda model: begun(call[kind](model)))
        assert re.fullmatch(rf"a suspended call of {name} \({re.escape(__file__)}:\d+\)", found), found

    def test_names_tracebacks(self, world: World) -> None:
        """A stored error holds the variables of the calls that it went through."""

        def fail(model: object) -> None:
            raise ValueError(type(model))

        def hold(model: object) -> object:
            try:
                fail(model)
            except ValueError as error:
                return error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]

        found = "\n".join(self.holders(world, hold))
        assert re.search(rf"a traceback, through an ended call of .*\.fail \({re.escape(__file__)}:\d+\)", found)

    def test_names_holders_that_resist(self, world: World) -> None:
        """A holder whose attributes cannot be looked at is named by its type."""

        class Shy:
            __slots__ = ("model",)

            @property
            def __dict__(self) -> Any:
                raise RuntimeError("private")

        def hold(model: object) -> Shy:
            shy = Shy()
            shy.model = model  # type: ignore[attr-defined]
            return shy

        (found,) = self.holders(world, hold)
        assert found.startswith("held.model of the running call")

    def test_names_five_at_most(self, world: World) -> None:
        """The list is bounded, and names no holder twice."""
        names = [f"list_{n}" for n in range(8)]
        several = self.holders(world, lambda model: types.SimpleNamespace(**{name: [model] for name in names}))
        assert 5 == len(several)
        (found,) = self.holders(world, lambda model: [[model] for _ in range(8)])
        assert found.startswith("held[...][...] of the running call")

    def test_says_that_frozen_objects_are_hidden(self, world: World) -> None:
        """The collector lists none of them, and frees none that hold each other: a program that froze them is told."""

        def hold(model: Any) -> object:
            held = [model]
            gc.freeze()
            return held

        try:
            (found,) = self.holders(world, hold)
        finally:
            gc.unfreeze()
        assert "gc.freeze()" in found

    def test_has_no_holders_when_it_dies_meanwhile(self, world: World) -> None:
        """A model that dies while it is looked for has none."""
        model = world.loader()
        watch = _release._watch(model)
        del model
        assert watch is not None
        assert () == _holders.of_object(watch)


class TestUnload:
    def test_may_be_async(self, world: World) -> None:
        """``unload`` may be a coroutine function."""
        unloaded: list[int] = []

        async def unload(model: Any) -> None:
            unloaded.append(model.number)

        assert (None, [1]) == (released(world, unload=unload).error, unloaded)

    @pytest.mark.parametrize(("swap", "ran_on"), [("load_first", [2]), ("drain_first", [])])
    def test_may_call_guarded_functions(self, world: World, swap: str, ran_on: list[int]) -> None:
        """They run on the new model; if there is none yet they raise, and the reload goes on."""
        seen: list[int] = []
        guard = world.guard(swap=swap, unload=lambda _model: seen.append(number(guard)))
        guard.load()
        guard.reload(timeout=TIMEOUT)
        world.join()
        assert (ran_on, 2) == (seen, guard.status().generation)
        error = world.last(GenerationReleased).error
        assert (error is None) == bool(ran_on)
        assert error is None or error.startswith("WouldDeadlock")

    @pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
    def test_that_raises_is_reported(self, world: World, error: type[BaseException]) -> None:
        """The release goes on whatever ``unload`` does, the event reports it, and the model is gone."""

        def unload(_model: object) -> None:
            raise error("stuck")

        event = released(world, unload=unload)
        assert (f"{error.__name__}: stuck", False) == (event.error, event.alive)

    def test_runs_once_for_each_model(self, world: World) -> None:
        """Over many reloads each model is unloaded once, and none is left."""
        unloaded: list[int] = []
        world.model_size = 10 * MB
        guard = world.guard(unload=lambda model: unloaded.append(model.number))
        guard.load()
        for _ in range(20):
            guard.reload()
        world.join()
        guard.close()
        assert (list(range(1, 22)), 100 * MB) == (unloaded, world.memory)
        assert {False} == {event.alive for event in world.seen(GenerationReleased)}
