"""``_isolation`` and ``_suspects``: bad items are found with few runs, and remembered."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from tests.unit.serving.gated import until

from modelguard import batched
from modelguard.errors import BatchFailed, Overloaded
from modelguard.serving._execution import BatchFunction, Computed, Suspects, compute
from modelguard.serving._requests import Batch, Failure, Request


class Model:
    """Fails on bad texts, and remembers its batches. With ``named`` it works on one text at a time when it does."""

    def __init__(self, *, named: bool = False) -> None:
        self.named = named
        self.batches: list[list[str]] = []

    def __call__(self, items: list[str]) -> list[str]:
        self.batches.append(list(items))
        if self.named:
            return [self.one(item) for item in items]
        if any("bad" in item for item in items):
            raise ValueError("bad text")
        return [item.upper() for item in items]

    def one(self, item: str) -> str:
        if "bad" in item:
            raise ValueError(f"{item} is bad")
        return item.upper()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def texts(count: int, *bad: int, of: str = "bad") -> list[str]:
    return [f"{of} {n}" if n in bad else f"good {n}" for n in range(count)]


def ran(function: BatchFunction, items: list[Any], **options: Any) -> Computed:
    return compute(function, Batch([Request(item) for item in items], 0.0), **options)


def failed(computed: Computed) -> list[int]:
    return [at for at, one in enumerate(computed.outcomes) if isinstance(one, Failure)]


def test_an_item_that_the_traceback_names_takes_one_more_run() -> None:
    """The others run without it, and it fails with its own error."""
    function = BatchFunction(run=(model := Model(named=True)), name="f", isolate=True)
    computed = ran(function, texts(32, 5))
    assert [5] == failed(computed)
    assert 2 == len(model.batches)
    assert "bad 5 is bad" == str(computed.outcomes[5].error)


def test_several_named_items_take_a_run_each() -> None:
    """Each error names one."""
    function = BatchFunction(run=(model := Model(named=True)), name="f", isolate=True)
    assert [5, 11, 30] == failed(ran(function, texts(32, 5, 11, 30)))
    assert 4 == len(model.batches)


def test_a_traceback_that_names_the_wrong_item_harms_nobody() -> None:
    """The last text of a loop before the error is not at fault. After a few such errors tracebacks are not used."""

    def run(items: list[str]) -> list[str]:
        last = ""
        for item in items:
            last = item
        assert last
        if any("bad" in item for item in items):
            raise ValueError("bad text")
        return items

    function = BatchFunction(run=run, name="f", isolate=True)
    for number in range(6):
        assert [number] == failed(ran(function, texts(16, number, of=f"bad in batch {number}")))
    assert not function.suspects.trusts_tracebacks


@pytest.mark.parametrize("bad", [[0], [31], [3, 4], [0, 15, 16, 31], [7, 9, 21]])
def test_runs_are_bounded(bad: list[int]) -> None:
    """At most 4 log2(n) + 4 runs, whatever is bad; every healthy item has its result."""
    function = BatchFunction(run=(model := Model()), name="f", isolate=True)
    computed = ran(function, texts(32, *bad))
    assert bad == failed(computed)
    assert computed.reruns == len(model.batches) - 1 <= 24


def test_more_bad_items_than_can_be_found_are_refused_with_the_others() -> None:
    """With "try again" and not with another item's error."""
    function = BatchFunction(run=Model(), name="f", isolate=True)
    computed = ran(function, texts(64, *range(1, 64, 3)))
    assert computed.reruns <= 28
    healthy = [one.error for at, one in enumerate(computed.outcomes) if at % 3 != 1 and isinstance(one, Failure)]
    assert healthy
    assert all(isinstance(error, Overloaded) for error in healthy)


def test_an_error_that_does_not_happen_again_harms_nobody() -> None:
    """An item is at fault only if it fails more than once."""
    calls = []

    def run(items: list[str]) -> list[str]:
        calls.append(items)
        if len(calls) == 1:
            raise RuntimeError("out of memory, for once")
        return items

    assert not failed(ran(BatchFunction(run=run, name="f", isolate=True), texts(16)))


def test_healthy_items_have_their_answers_before_the_search_ends() -> None:
    """Nobody waits for the runs that find somebody else's bad item."""
    answered: list[int] = []
    function = BatchFunction(run=Model(), name="f", isolate=True)
    ran(function, texts(32, 31), answer=lambda requests, outcomes: answered.append(len(requests)))
    assert 16 == answered[0]
    assert 31 == sum(answered)


def test_a_bad_item_that_comes_again_is_run_last_and_then_not_at_all() -> None:
    """Its neighbours' batch succeeds at once. For ten seconds it fails with the same error, without being computed."""
    clock = Clock()
    function = BatchFunction(run=(model := Model(named=True)), name="f", isolate=True, clock=clock)
    ran(function, texts(4, 2))
    model.batches.clear()
    assert [2] == failed(ran(function, texts(4, 2)))
    assert [["good 0", "good 1", "good 3"], ["bad 2"]] == model.batches
    model.batches.clear()
    computed = ran(function, texts(4, 2))
    assert [["good 0", "good 1", "good 3"]] == model.batches
    error = computed.outcomes[2].error
    assert (ValueError, "bad 2 is bad") == (type(error), str(error))
    assert "not computed again" in error.__notes__[0]
    model.batches.clear()
    clock.now = 11.0
    ran(function, texts(4, 2))
    assert ["bad 2"] == model.batches[-1], "it is tried again"


@pytest.mark.parametrize("end", [StopIteration, StopAsyncIteration])
def test_an_item_that_ends_an_iterator_gets_an_error_again_and_again(end: type[Exception]) -> None:
    """A future rejects StopIteration, also from an item that is not computed again; in a loop it would be an end."""

    def run(items: list[str]) -> list[str]:
        if "---" in items:
            raise end
        return items

    function = BatchFunction(run=run, name="f", isolate=True)
    for _ in range(4):
        error = ran(function, ["good", "---"]).outcomes[1].error
        assert type(error) is BatchFailed
    assert "not computed again" in str(error)


def test_an_item_gets_the_same_error_again() -> None:
    """Also if the class of the error makes a text of what it is given, and so would make one of that text."""

    class UnreadError(ValueError):
        def __init__(self, text: str) -> None:
            super().__init__(f"cannot read {text}")

    def run(items: list[str]) -> list[str]:
        for item in items:
            if item == "bad":
                raise UnreadError(item)
        return items

    function = BatchFunction(run=run, name="f", isolate=True)
    errors = [ran(function, ["good", "bad"]).outcomes[1].error for _ in range(4)]
    assert [(UnreadError, "cannot read bad")] * 4 == [(type(error), str(error)) for error in errors]
    assert "not computed again" in errors[-1].__notes__[0]


def test_an_item_that_has_become_good_is_forgotten() -> None:
    """It is computed with all others again."""
    function = BatchFunction(run=(model := Model(named=True)), name="f", isolate=True)
    ran(function, ["good", "bad"])
    model.one = str.upper  # type: ignore[method-assign]
    assert not failed(ran(function, ["good", "bad"]))
    assert not function.suspects


@pytest.mark.parametrize("count", range(2, 17))
def test_no_item_gets_the_error_of_another_one(count: int) -> None:
    """Also where nothing has succeeded and a single item is left, which has not run alone."""
    function = BatchFunction(run=Model(named=True), name="f", isolate=True)
    items = texts(count, *range(count))
    errors = [outcome.error for outcome in ran(function, items).outcomes]
    for item, error in zip(items, errors, strict=True):
        assert type(error) is BatchFailed or str(error) == f"{item} is bad"


def test_a_lone_item_is_not_remembered() -> None:
    """It cannot be known whether the item or the model is at fault."""
    function = BatchFunction(run=Model(), name="f", isolate=True)
    ran(function, ["bad"])
    assert not function.suspects


def test_a_broken_model_makes_no_item_suspicious() -> None:
    """If nothing succeeds, the model is at fault."""
    function = BatchFunction(run=Model(), name="f", isolate=True)
    ran(function, texts(8, *range(8)))
    assert not function.suspects


@pytest.mark.parametrize("item", [["a", "list"], {"a": "dict"}, object(), "long" * 10_000])
def test_any_item_may_be_bad(item: Any) -> None:
    """Also one that is not hashable, or large."""

    def run(items: list[Any]) -> list[Any]:
        if any(one is item for one in items):
            raise ValueError("bad")
        return items

    function = BatchFunction(run=run, name="f", isolate=True)
    for _ in range(3):
        assert [1] == failed(ran(function, [0, item, 2, 3]))


def test_an_item_that_equals_no_other_does_not_stay_in_memory() -> None:
    """A bad tensor or an object without ``__eq__`` is freed once its caller has the error."""

    class Upload:
        def __init__(self, content: str) -> None:
            self.content = content

    @batched(max_size=8)
    def sizes(uploads: list[Upload]) -> list[int]:
        if any(not one.content for one in uploads):
            raise ValueError("empty")
        return [len(one.content) for one in uploads]

    async def serve() -> list[Any]:
        calls = [sizes.aio(one) for one in uploads]
        return await asyncio.gather(*calls, return_exceptions=True)

    uploads = [Upload("one"), Upload(""), Upload("three")]
    assert [3, "empty", 5] == [one if isinstance(one, int) else str(one) for one in asyncio.run(serve())]
    bad = weakref.ref(uploads[1])
    uploads.clear()
    until(lambda: gc.collect() >= 0 and bad() is None)  # once the thread of the batch has let it go too
    assert not sizes.status().waiting


def test_few_bad_items_are_remembered() -> None:
    """Ever new ones take bounded memory, and a long one is remembered by its hash."""
    suspects = Suspects()
    for number in range(1_000):
        suspects.failed(f"{number}" * 10_000, None, ValueError("bad"), "ValueError: bad", 0.0)
    assert len(suspects._known) == 256
    assert all(len(str(key)) < 200 for key in suspects._known)
