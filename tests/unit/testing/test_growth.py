"""``assert_no_growth``: leaks are found and described, and what merely fills up passes."""

from __future__ import annotations

import asyncio
import functools
import sysconfig
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import pytest
from cachetools import LRUCache

from modelguard.errors import InvalidOption, ModelGuardWarning, WouldDeadlock
from modelguard.testing import assert_no_growth

#: Python takes all its memory from an allocator of its own there, which keeps what is freed.
blocks_of_malloc = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="no block of Python's is malloc's here"
)

#: Calls between two readings. What a thread of another test frees meanwhile must not hide a small leak.
MANY = 1000


def test_what_keeps_nothing_passes() -> None:
    """A function that frees what it makes does not grow, however much that is."""
    assert_no_growth(bytearray, [10, 100_000, 3_000_000])


@pytest.mark.parametrize("calls", [1, 5])
def test_what_keeps_nothing_passes_with_few_calls_too(calls: int) -> None:
    """The readings themselves do not count as growth, however few calls they are shared among."""
    assert_no_growth(len, [[1]], calls=calls)


def test_a_leak_of_objects_is_found_and_named() -> None:
    """Kept objects are reported by type, by the line that made them, and by the figure that grew."""
    kept: list[Any] = []

    class Request:
        pass

    def predict(_: str) -> None:
        kept.append(Request())

    with pytest.raises(AssertionError) as caught:
        assert_no_growth(predict, ["a", "b"], calls=MANY)
    told = str(caught.value)
    assert "predict() grows with its calls" in told
    assert "Python's own blocks: +" in told
    assert "in 15,000 calls:" in told
    assert (
        "objects: 1,000 tests.unit.testing.test_growth.test_a_leak_of_objects_is_found_and_named.<locals>.Request"
        in told
    )
    assert "test_growth.py:" in told


@blocks_of_malloc
def test_a_leak_of_large_blocks_is_found() -> None:
    """What malloc gave out, and never got back, is found by its bytes."""
    kept: list[bytes] = []
    with pytest.raises(AssertionError, match=r"by 20(\.\d)? kB each(.|\n)*allocated by malloc"):
        assert_no_growth(lambda _: kept.append(bytes(20_000)), [1], calls=50)


def test_a_leak_on_new_inputs_only_is_found_by_a_generator() -> None:
    """What grows by new words alone passes with a list of inputs and fails with ever new ones, as it is in life."""
    vocabulary: set[str] = set()
    assert_no_growth(vocabulary.add, ["the", "same", "words"])
    with pytest.raises(AssertionError, match="grows with its calls"):
        assert_no_growth(vocabulary.add, (f"word {number}" for number in count()), calls=MANY)


def test_a_collection_without_a_length_may_be_endless() -> None:
    """As a stream of a data set is: it is read as far as it is needed, and kept nowhere."""

    class Texts:
        def __iter__(self) -> Iterator[str]:
            return (f"word {number}" for number in count())

    assert_no_growth(str.split, Texts())


def test_a_full_cache_passes() -> None:
    """Growth that ends is not a leak, even if it goes on beyond the warm-up."""
    cached = functools.lru_cache(maxsize=150)(lambda number: bytes(1000 + number % 7))
    assert_no_growth(cached, count(), calls=100)


@pytest.mark.parametrize("entries", [300, 1024, 1500, 3000])
def test_a_cache_that_fills_over_all_rounds_passes(entries: int) -> None:
    """Growth that ends when an lru_cache is full is not a leak, however many calls that takes."""
    cached = functools.lru_cache(maxsize=entries)(lambda number: bytes(1000 + number % 7))
    assert_no_growth(cached, count(), calls=100)


def test_a_cache_of_cachetools_that_fills_passes() -> None:
    """The same holds for the caches of cachetools."""
    kept: LRUCache[int, bytes] = LRUCache(1500)

    def predict(number: int) -> None:
        kept[number] = bytes(1000)

    assert_no_growth(predict, count(), calls=100)


def test_a_leak_beside_a_cache_that_fills_is_found() -> None:
    """A cache that fills does not excuse a leak."""
    kept: list[bytes] = []
    cached = functools.lru_cache(maxsize=1500)(lambda number: bytes(1000 + number % 7))

    def predict(number: int) -> None:
        cached(number)
        kept.append(bytes(1000))

    with pytest.raises(AssertionError, match="grows with its calls"):
        assert_no_growth(predict, count(), calls=100)


def test_a_cache_too_large_to_fill_is_named() -> None:
    """If the rounds end before the cache is full, the message names the cache and how full it is."""
    cached = functools.lru_cache(maxsize=10**6)(lambda number: bytes(1000 + number % 7))
    with pytest.raises(AssertionError, match=r"the lru_cache of .*lambda.* \(filled to .* of 1,000,000\) grows"):
        assert_no_growth(cached, count(), calls=20)


def test_a_leak_is_found_where_the_inputs_end_with_the_rounds() -> None:
    """An iterator with just enough inputs for the rounds is judged by these."""
    kept: list[bytes] = []
    with pytest.raises(AssertionError, match="grows with its calls"):
        assert_no_growth(lambda _: kept.append(bytes(20_000)), iter(range(16 * 50)), calls=50)


def test_a_rare_start_up_cost_passes() -> None:
    """What is built once, in the middle of the calls, is not a leak."""
    tables: list[bytes] = []
    seen = count()

    def predict(_: int) -> None:
        if next(seen) == 150:
            tables.extend(bytes(10_000) for _ in range(500))

    assert_no_growth(predict, [1])


@blocks_of_malloc
def test_a_sawtooth_that_begins_like_a_leak_passes_with_a_warning() -> None:
    """Growth that is there once, and then falls, is none; how many calls would decide it is said."""
    kept: list[bytes] = []

    def predict(_: int) -> None:
        kept.append(bytes(14_000))
        if len(kept) > 1622:
            kept.clear()

    with pytest.warns(ModelGuardWarning, match="times as many `calls`"):
        assert_no_growth(predict, [1])


def test_a_tolerated_growth_passes() -> None:
    """A log of the last words may grow by what the test allows for each call."""
    kept: list[bytes] = []

    def remember(_: int) -> None:
        kept.append(bytes(700))

    with pytest.raises(AssertionError):
        assert_no_growth(remember, [1])
    assert_no_growth(remember, [1], tolerance="1 kB")


def test_coroutines_are_awaited() -> None:
    """An async function is measured by what it does, not by the coroutine that it returns."""
    kept: list[object] = []

    async def leaky(_: int) -> None:
        kept.append({})

    async def sound(_: int) -> None:
        return

    assert_no_growth(sound, [1])
    with pytest.raises(AssertionError, match="leaky"):
        assert_no_growth(leaky, [1], calls=MANY)


def test_on_a_running_loop_it_says_so() -> None:
    """An async function cannot be measured on a running loop: this raises, and nothing hangs."""

    async def sound(_: int) -> None:
        return

    async def test() -> None:
        assert_no_growth(sound, [1])

    with pytest.raises(WouldDeadlock, match="running event loop"):
        asyncio.run(test())


def test_what_would_not_be_run_is_refused() -> None:
    """A coroutine that nobody awaits, or an asynchronous generator: the test would pass whatever leaks."""

    async def step(_: int) -> None: ...

    async def parts(_: int) -> AsyncIterator[int]:
        yield 1

    for function in (lambda item: step(item + 1), parts):
        with pytest.raises(InvalidOption, match="which would not be run"):
            assert_no_growth(function, [1])


def test_lazy_results_are_read() -> None:
    """A generator's leak shows only when it runs, so it is run."""
    kept: list[object] = []

    def leaky(_: int) -> Iterator[int]:
        kept.append([1])
        yield 1

    with pytest.raises(AssertionError, match="leaky"):
        assert_no_growth(leaky, [1], calls=MANY)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((3, [1]), "fn=3"),
        ((len, []), "inputs="),
        ((len, 5), "inputs=5"),
        ((len, ("x" for _ in range(150))), "has too few inputs"),
    ],
)
def test_impossible_arguments_are_refused(arguments: tuple[Any, Any], argument: str) -> None:
    """What cannot be called or read is rejected by name."""
    with pytest.raises(InvalidOption, match=argument):
        assert_no_growth(*arguments)


@pytest.mark.parametrize("options", [{"calls": 0}, {"calls": True}, {"tolerance": "some"}, {"tolerance": -1}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    """Invalid numbers are rejected by name, before anything runs."""
    ran: list[int] = []
    fn: Callable[[int], object] = ran.append
    with pytest.raises(InvalidOption, match=next(iter(options))):
        assert_no_growth(fn, [1], **options)
    assert [] == ran
