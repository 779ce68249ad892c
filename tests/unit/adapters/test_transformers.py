"""Pipelines as batched functions, with a stub in place of transformers: what it gets, and what callers get."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from modelguard import Batched, guard
from modelguard.adapters.transformers import batched_pipeline, portions
from modelguard.errors import InvalidOption, ItemRefused, WrongResults
from modelguard.lifecycle.system import System

TIMEOUT = 20.0


class Shape(list[Any]):
    """Input ids, as far as anybody asks: how many there are."""

    @property
    def shape(self) -> tuple[int, int]:
        return 1, len(self)


class Tokenizer:
    """One token for each word."""

    padding_side = "right"

    def __init__(self, pad: int | None) -> None:
        self.pad_token_id = pad

    def __call__(self, text: str, *, verbose: bool) -> dict[str, Any]:
        return {"input_ids": text.split()}


class Pipeline:
    """Behaves as pipelines do: pads, leaves the padding in, and unpacks the result of a list of one."""

    def __init__(self, task: str = "text-classification", pad: int | None = 0, device: str = "cpu") -> None:
        self.task = task
        self.tokenizer: Tokenizer | None = Tokenizer(pad)
        self.device = SimpleNamespace(type=device)
        self._preprocess_params = {"stop": "."}
        self.runs: list[list[Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def preprocess(self, text: str, stop: str, most: int = 1000) -> dict[str, Any]:
        return {"input_ids": Shape([*text.split()[:most], stop])}

    def _sanitize_parameters(self, most: int = 1000, **_: Any) -> tuple[dict[str, Any], ...]:
        return {"most": most}, {}, {}

    def __call__(self, inputs: Any, *, batch_size: int, **given: Any) -> Any:
        self.entered.set()
        assert self.gate.wait(TIMEOUT)
        items = list(inputs)
        assert batch_size == 1 or (self.tokenizer is not None and self.tokenizer.pad_token_id is not None)
        if items != ["first"]:  # which only keeps the thread busy
            self.runs += [items[at : at + batch_size] for at in range(0, len(items), batch_size)]
        if self.task != "feature-extraction":
            results = [[item, sorted(given.items())] for item in items]
            return results[0] if isinstance(inputs, list) and len(inputs) == 1 else iter(results)
        counts = [self.preprocess(item, **{**self._preprocess_params, **given})["input_ids"].shape[1] for item in items]
        rows = []
        for item, count in zip(items, counts, strict=True):
            real, padding = [item] * count, ["pad"] * (max(counts) - count)
            side = self.tokenizer.padding_side if self.tokenizer else ""
            rows.append([padding + real if side == "left" else real + padding])
        return rows


def words(*counts: int) -> list[str]:
    return [" ".join([f"w{at}"] * count) for at, count in enumerate(counts)]


@pytest.fixture
def together() -> Iterator[Callable[..., list[Any]]]:
    """Make callables whose items share one batch: they wait behind another item."""
    made: list[Batched[Any, Any]] = []

    def compute(pipe: Pipeline, items: list[Any], extras: dict[str, Any] | None = None, **options: Any) -> list[Any]:
        f = options.pop("f", None) or batched_pipeline(pipe, max_size=64, **options)
        made.append(f)
        pipe.runs.clear()
        pipe.gate.clear()
        pipe.entered.clear()
        first: Future[Any] = f.submit("first")
        assert pipe.entered.wait(TIMEOUT)
        futures = [f.submit(item, **(extras or {})) for item in items]
        pipe.gate.set()
        first.result(TIMEOUT)
        return [future.result(TIMEOUT) for future in futures]

    yield compute
    for f in made:
        f.close()


def test_results_come_in_the_order_of_the_items(together: Callable[..., list[Any]]) -> None:
    """However a batch was sorted and cut, each item gets its own result."""
    texts = words(3, 200, 1, 90, 3, 100)
    pipe = Pipeline()
    assert [[text, []] for text in texts] == together(pipe, texts)
    assert sorted(texts) == sorted(chain(*pipe.runs))


def test_similar_lengths_share_a_run(together: Callable[..., list[Any]]) -> None:
    """Long texts are computed with long ones, and first; short texts are not padded up to them."""
    texts = words(3, 200, 1, 190, 3)
    pipe = Pipeline()
    together(pipe, texts)
    assert [[1, 3], [0, 4, 2]] == [[texts.index(text) for text in run] for run in pipe.runs]


def test_elsewhere_than_on_a_cpu_a_batch_is_one_run(together: Callable[..., list[Any]]) -> None:
    """Where a run costs more than its padding, a batch is cut only where ``tokens`` requires it."""
    pipe = Pipeline(device="cuda")
    together(pipe, words(3, 200, 1))
    assert 1 == len(pipe.runs)
    together(pipe, words(3, 200, 1), tokens=100)
    assert [1, 2] == [len(run) for run in pipe.runs]


def test_length_decides_how_to_sort(together: Callable[..., list[Any]]) -> None:
    """With ``length``, items of any type are sorted, and it is their weight too."""
    items = [{"n": 1}, {"n": 500}, {"n": 2}]
    pipe = Pipeline()
    together(pipe, items, f=batched_pipeline(pipe, max_size=8, length=lambda item: item["n"] if item != "first" else 0))
    assert [[{"n": 500}], [{"n": 2}, {"n": 1}]] == pipe.runs
    with batched_pipeline(pipe, max_size=8, length=len) as f, pytest.raises(ItemRefused, match="cannot be weighed"):
        f(3)


def test_items_that_are_not_text_stay_in_order(together: Callable[..., list[Any]]) -> None:
    """Without a known length they are computed in one run, in the order of arrival."""
    pipe = Pipeline()
    together(pipe, [b"12345", "a b", 7])
    assert [[b"12345", "a b", 7]] == pipe.runs


def test_tokens_cannot_bound_items_without_a_length() -> None:
    """Such an item fails, and its error says which option is missing."""
    with batched_pipeline(Pipeline(), max_size=8, tokens=10) as f:
        assert ["a", []] == f("a")
        with pytest.raises(TypeError, match="needs length="):
            f(b"12345")


@pytest.mark.parametrize("without", ["pad token", "tokenizer"])
def test_what_cannot_pad_runs_one_at_a_time(without: str, together: Callable[..., list[Any]]) -> None:
    """A pipeline without a pad token computes the items of a batch in turn, and all get their results."""
    pipe = Pipeline(pad=None)
    if without == "tokenizer":
        pipe.tokenizer = None
    texts = words(3, 200, 1)
    assert [[text, []] for text in texts] == together(pipe, texts)
    assert [[text] for text in texts] == pipe.runs


def test_what_pads_without_a_tokenizer_runs_together() -> None:
    """Images are padded by their processor: a batch is one run."""
    pipe: Any = Pipeline()
    pipe.tokenizer, pipe.image_processor = None, object()
    pipe.__class__ = type("Images", (Pipeline,), {"__call__": lambda self, inputs, batch_size: list(inputs)})
    with batched_pipeline(pipe, max_size=8) as f:
        assert [b"1", b"22"] == list(f.map([b"1", b"22"]))


@pytest.mark.parametrize("side", ["left", "right"])
def test_features_are_cut_back_to_their_own(side: str, together: Callable[..., list[Any]]) -> None:
    """A text has as many positions as alone, on whichever side it is padded."""
    pipe = Pipeline("feature-extraction")
    assert pipe.tokenizer is not None
    pipe.tokenizer.padding_side = side
    texts = words(3, 5, 1, 4)
    assert [[[text] * (count + 1)] for text, count in zip(texts, (3, 5, 1, 4), strict=True)] == together(pipe, texts)
    assert 1 == len(pipe.runs)
    cut = together(pipe, texts, call={"most": 2})
    assert [3, 3, 2, 3] == [len(one[0]) for one in cut], "positions are counted as this call makes them"


def test_arguments_of_the_pipeline_form_groups(together: Callable[..., list[Any]]) -> None:
    """``call`` applies to all items; an item's own arguments are added, and items with others do not share its run."""
    pipe = Pipeline()
    f = batched_pipeline(pipe, max_size=8, call={"top_k": 5, "truncation": True})
    assert [["a", [("top_k", 2), ("truncation", True)]]] == together(pipe, ["a"], {"top_k": 2}, f=f)
    assert [["b", [("top_k", 5), ("truncation", True)]]] == together(pipe, ["b"], f=f)


def test_the_callers_arguments_are_not_written_to() -> None:
    """Pipelines write into a dictionary that they are given; ``call`` is the same for every batch."""
    pipe: Any = Pipeline()
    pipe.__class__ = type(
        "Writes", (Pipeline,), {"__call__": lambda self, inputs, batch_size, how: [how.setdefault("n", len(how))]}
    )
    with batched_pipeline(pipe, max_size=8, call={"how": {}}) as f:
        assert [0, 0] == [f("a"), f("b")]


def test_each_batch_leases_once(system: System, together: Callable[..., list[Any]]) -> None:
    """A guard's batch is one use of the model, however many portions it is cut into; its name is the guard's."""
    pipe = Pipeline()
    nlp = guard(lambda: pipe, reload_on=None, name="nlp")
    f = batched_pipeline(nlp, max_size=8)
    together(pipe, words(3, 200, 1), f=f)
    assert 2 == len(pipe.runs)
    assert ("nlp", 2) == (f.name, nlp.status().uses)  # the first item, and the batch


def test_a_wrong_number_of_results_is_an_error() -> None:
    """Results that cannot be matched with their items are given to no caller."""
    pipe: Any = Pipeline()
    pipe.__class__ = type("Forgets", (Pipeline,), {"__call__": lambda self, inputs, batch_size: []})
    with batched_pipeline(pipe, max_size=8) as f, pytest.raises(WrongResults, match="returned 0 results for 1 items"):
        f("a")


@pytest.mark.parametrize(
    ("argument", "arguments"),
    [
        ("pipe", {"pipe": "feature-extraction"}),
        ("pipe", {"pipe": words}),  # a loader, without its guard
        ("pipe", {"pipe": Pipeline}),
        ("max_size", {"max_size": 0}),
        ("tokens", {"tokens": 0}),
        ("tokens", {"tokens": 1.5}),
        ("length", {"length": 5}),
        ("call", {"call": ["top_k"]}),
        ("call", {"call": {1: 2}}),
        ("call", {"call": {"batch_size": 8}}),
        ("max_queue", {"max_queue": 2}),
    ],
)
def test_an_invalid_argument_is_rejected_where_it_is_written(argument: str, arguments: dict[str, Any]) -> None:
    """Each bad argument is named, with its value, before the first request."""
    with pytest.raises(InvalidOption) as caught:
        batched_pipeline(**{"pipe": Pipeline(), "max_size": 8, **arguments})
    assert argument == caught.value.argument


lengths = some.lists(some.integers(0, 200), max_size=7).map(lambda made: sorted(made, reverse=True))


@given(lengths, some.integers(0, 100), some.one_of(some.just(float("inf")), some.integers(1, 400)))
def test_no_other_cut_costs_less(lengths: list[int], cost: int, most: float) -> None:
    """Portions cover all items in order, stay below ``most`` or have one item, and are the cheapest of this kind."""

    def price(cuts: list[tuple[int, int]]) -> float:
        fits = all(end - first == 1 or (end - first) * lengths[first] <= most for first, end in cuts)
        return sum(cost + (end - first) * lengths[first] for first, end in cuts) if fits else float("inf")

    def every(first: int) -> Iterator[list[tuple[int, int]]]:
        if first == len(lengths):
            yield []
        for end in range(first + 1, len(lengths) + 1):
            yield from ([(first, end), *rest] for rest in every(end))

    found = portions(lengths, cost, most)
    assert list(range(len(lengths))) == [at for first, end in found for at in range(first, end)]
    assert min(map(price, every(0))) == price(found)
