"""``modelguard_off``: decorated functions run plain."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from modelguard import Batched, Uses, batched, guard, pool
from modelguard.errors import GuardClosed, WrongResults
from modelguard.runtime.call_context import inline

made: list[str] = []


class Voice:
    """A model that says where it was loaded."""

    def __init__(self) -> None:
        made.append(threading.current_thread().name)

    def say(self, text: str) -> str:
        """Answer."""
        return text.upper()


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    made.clear()


at_module_level = guard(Voice, reload_on=Uses(1), name="at module level")


@at_module_level
def shout(voice: Voice, text: str) -> str:
    """Stand for a function of an application."""
    return voice.say(text)


def test_a_guarded_function_runs_on_a_plainly_loaded_model(modelguard_off: None) -> None:
    """The model is loaded once, in the caller's thread, and no policy replaces it."""
    assert ["A", "B", "C"] == [shout(text) for text in "abc"]
    assert [threading.current_thread().name] == made


def test_the_next_test_begins_anew() -> None:
    """Models of plain calls are gone after the test, so a guard loads as usual in the next one."""
    assert "new" == at_module_level.status().state
    assert "D" == shout("d")
    assert made == [name for name in made if name.startswith("modelguard-load")] != []
    at_module_level.close()


def test_a_block_inside_another_ends_nothing(modelguard_off: None) -> None:
    """Only after the outermost one do guards load as usual, with their warm-up."""
    warm: list[Voice] = []
    guarded = guard(Voice, reload_on=None, warmup=warm.append)(Voice.say)
    with inline():
        assert "A" == guarded("a")
    assert ("B", []) == (guarded("b"), warm)
    assert 1 == len(made)


def test_methods_coroutines_and_generators_run_plain(modelguard_off: None) -> None:
    """Every kind of function gets its model in the caller's thread."""
    nlp = guard(Voice, reload_on=None)

    class Service:
        @nlp
        def method(self, voice: Voice, text: str) -> str:
            return voice.say(text)

    @nlp
    async def coroutine(voice: Voice, text: str) -> str:
        return voice.say(text)

    @nlp
    def generator(voice: Voice, texts: str) -> Iterator[str]:
        yield from map(voice.say, texts)

    @nlp
    async def async_generator(voice: Voice, texts: str) -> AsyncIterator[str]:
        for text in texts:
            yield voice.say(text)

    async def all_of_it() -> list[str]:
        return [text async for text in async_generator("ab")]

    assert ["X", "Y"] == [Service().method("x"), asyncio.run(coroutine("y"))]
    assert ["A", "B"] == list(generator("ab")) == asyncio.run(all_of_it())
    assert 1 == len(made)


def test_an_async_loader_runs_on_the_loop_that_calls(modelguard_off: None) -> None:
    """A coroutine awaits its loader on its own loop."""
    loops = []

    async def load() -> Voice:
        loops.append(asyncio.get_running_loop())
        return Voice()

    nlp = guard(load, reload_on=None)

    @nlp
    async def answer(voice: Voice, text: str) -> tuple[str, bool]:
        return voice.say(text), loops == [asyncio.get_running_loop()]

    assert ("A", True) == asyncio.run(answer("a"))


def test_the_loaders_own_error_is_raised(modelguard_off: None) -> None:
    """A failing loader fails the call with its own error, each time, without backoff."""
    nlp: Any = guard(lambda: 1 / 0, reload_on=None)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            nlp.load()


def test_a_closed_guard_stays_closed(modelguard_off: None) -> None:
    """A closed guard is still closed: calls raise as usual."""
    nlp = guard(Voice, reload_on=None)
    nlp.close()
    with pytest.raises(GuardClosed), nlp.lease():
        pass


def test_a_pool_loads_plainly_by_key(modelguard_off: None) -> None:
    """Each key's model is loaded in the caller's thread."""
    voices = pool(lambda key: (key, Voice()), max_memory="1 GB")

    @voices(key="who")
    def say(model: tuple[str, Voice], who: str) -> str:
        return model[0]

    assert ["anna", "bert"] == [say("anna"), say("bert")]
    assert [threading.current_thread().name] * 2 == made


def where(items: list[int]) -> list[Any]:
    """Return the thread, and how many items came together; reject 13."""
    return [(threading.current_thread().name, len(items), item) if item != 13 else ValueError(item) for item in items]


def test_a_batched_function_runs_one_item_in_the_callers_thread(modelguard_off: None) -> None:
    """All four doors call the function with a list of the one item, at once."""
    f: Batched[int, Any] = batched(max_size=8, max_wait="1h")(where)
    me = threading.current_thread().name
    assert (me, 1, 1) == f(1) == f(1, timeout="1ms") == asyncio.run(f.aio(1)) == f.submit(1).result(0)
    assert [(me, 1, 1), (me, 1, 2)] == list(f.map([1, 2]))


def test_an_items_own_error_is_raised(modelguard_off: None) -> None:
    """An exception among the results is raised, and a future carries it."""
    f: Batched[int, Any] = batched(max_size=8)(where)
    with pytest.raises(ValueError, match="13"):
        f(13)
    assert "13" == str(f.submit(13).exception(0))


def test_wrong_calls_and_results_fail_as_ever(modelguard_off: None) -> None:
    """It hides no mistake: unknown keywords and results of the wrong length raise."""
    f: Batched[int, Any] = batched(max_size=8)(lambda items: [1, 2])
    with pytest.raises(WrongResults):
        f(1)
    with pytest.raises(TypeError):
        f(1, colour="red")


def test_batched_methods_run_plain(modelguard_off: None) -> None:
    """A batched method is called on its instance."""

    class Adder:
        by = 5

        @batched(max_size=4)
        def add(self, items: list[int]) -> list[int]:
            return [item + self.by for item in items]

    assert 6 == Adder().add(1)


def test_guarded_and_batched_together_run_plain(modelguard_off: None) -> None:
    """The usual pair: a batch function that takes a guarded model."""
    nlp = guard(Voice, reload_on=Uses(1))

    @batched(max_size=4)
    @nlp
    def shout_all(voice: Voice, texts: list[str]) -> list[str]:
        return [voice.say(text) for text in texts]

    assert ["A", "B"] == [shout_all("a"), asyncio.run(shout_all.aio("b"))]
    assert [threading.current_thread().name] == made
