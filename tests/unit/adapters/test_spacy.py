"""The spaCy adapter: figures of the vocabulary, and functions that run in memory zones."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
import threading
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

spacy = pytest.importorskip("spacy")

from spacy.training import Example  # noqa: E402 - after the check above

from modelguard import ModelGuard, Snapshot, Swap, guard, guard_of, telemetry  # noqa: E402
from modelguard.adapters.spacy import ADAPTER, IndexGrowth, zoned  # noqa: E402
from modelguard.errors import EscapedResult, InvalidOption, NotSupported  # noqa: E402
from modelguard.lifecycle import _models  # noqa: E402
from modelguard.lifecycle.system import System  # noqa: E402
from modelguard.telemetry import Reason  # noqa: E402

Nlp = Any  # a spaCy pipeline; spaCy leaves most of its own types open
Guard = ModelGuard[Nlp]
MB = 10**6
TIMEOUT = 60.0  # bounds a wait; a test that comes near it has failed


# The adapter


def test_a_pipeline_finds_its_adapter() -> None:
    """A pipeline of any language is known by its base class."""
    assert ADAPTER is _models.find(spacy.blank("de"))


def test_the_gauges_tell_how_the_vocabulary_has_grown() -> None:
    """New words count as lexemes and strings, and the index has doubled once they no longer fit in."""
    pipeline = spacy.blank("en")
    before = ADAPTER.gauges(pipeline)
    pipeline(" ".join(f"w{number}" for number in range(5000)))
    after = ADAPTER.gauges(pipeline)
    assert {"lexemes", "strings", "index_bytes"} == set(after)
    assert 5000 <= after["lexemes"] - before["lexemes"]
    assert 5000 <= after["strings"] - before["strings"]
    assert 0 == after["index_bytes"] % before["index_bytes"]
    assert before["index_bytes"] < after["index_bytes"]


def test_a_zone_takes_back_strings_and_not_the_index() -> None:
    """What a zone leaves behind is what the gauges show: the count of lexemes, and the grown index."""
    pipeline = spacy.blank("en")
    before = ADAPTER.gauges(pipeline)
    with pipeline.memory_zone():
        pipeline(" ".join(f"w{number}" for number in range(5000)))
        inside = ADAPTER.gauges(pipeline)
    after = ADAPTER.gauges(pipeline)
    assert before["strings"] == after["strings"] < inside["strings"]
    assert inside["lexemes"] == after["lexemes"]
    assert inside["index_bytes"] == after["index_bytes"]


def test_a_pipelines_size_is_left_to_measurement() -> None:
    """The adapter does not guess at bytes."""
    assert ADAPTER.size(spacy.blank("en")) is None


def test_a_spacy_without_that_table_has_fewer_figures() -> None:
    """The index is looked up in a part of spaCy that may go; then the other figures are still there."""

    class Vocab(list[str]):
        strings = ("a", "b")

    assert {"lexemes": 1, "strings": 2} == ADAPTER.gauges(SimpleNamespace(vocab=Vocab("a")))


# IndexGrowth


def grown(by: int, since: int = 5 * MB) -> Snapshot:
    return Snapshot(gauges={"index_bytes": since + by}, first_gauges={"index_bytes": since})


def test_index_growth_is_due_when_the_index_has_grown_by_its_size() -> None:
    """Growth counts from what the index was when the generation began."""
    policy = IndexGrowth("16 MB")
    assert [False, True, True] == [policy.due(grown(by)) for by in (16 * MB - 1, 16 * MB, 33 * MB)]
    assert (Reason("index_growth", "IndexGrowth('16 MB')"),) == policy.reasons(grown(20 * MB))


def test_index_growth_says_nothing_of_other_models() -> None:
    """A model without an index is never due by it."""
    assert not IndexGrowth("1 B").due(Snapshot())


def test_index_growth_is_asked_once_a_second() -> None:
    """No call pays for asking."""
    assert (math.inf, 1.0) == IndexGrowth().next_check(Snapshot())


def test_index_growth_is_a_value() -> None:
    """It compares by value, has a default, combines with others, and rejects what is not a size."""
    assert IndexGrowth(16 * MB) == IndexGrowth()
    assert "IndexGrowth('16 MB') | IndexGrowth('1 MB')" == repr(IndexGrowth() | IndexGrowth("1 MB"))
    with pytest.raises(InvalidOption, match="size"):
        IndexGrowth(0)


def test_index_growth_without_its_unit_is_refused() -> None:
    """``IndexGrowth(16)`` would reload every second; text with a unit may be small."""
    with pytest.raises(InvalidOption, match=r"size=16: is only 16 B.*'16 MB'"):
        IndexGrowth(16)
    assert 1_000 == IndexGrowth("1 kB").size
    assert 1_000_000 == IndexGrowth(1_000_000).size


def test_a_guard_replaces_a_pipeline_whose_index_has_grown(system: System) -> None:
    """Measured on the real thing: new words in zones bring a new generation, and the index is small again."""
    growing = guard(lambda: spacy.blank("en"), reload_on=IndexGrowth("500 kB"), swap=Swap(defer=0))

    @zoned(growing)
    def work(nlp: Nlp, words: int, start: int) -> int:
        nlp(" ".join(f"w{start + number}" for number in range(words)))
        return len(nlp.vocab.strings._map)

    work(1, 0)
    assert not growing.check()
    small = [work(5000, number * 5000) for number in range(4)]
    assert growing.check()
    growing.reload()  # joins the one that was begun, or makes another
    assert 2 <= growing.status().generation
    assert work(1, 0) < max(small)
    growing.close()


# zoned


def test_a_zoned_function_runs_in_a_zone_that_is_closed_after_it(nlp: Guard) -> None:
    """The pipeline is injected, is in a zone during the call, and remembers none of its words afterwards."""
    zone = zoned(nlp)

    @zone
    def words(nlp: Nlp, text: str) -> tuple[bool, list[str]]:
        return nlp.vocab.in_memory_zone, [token.text for token in nlp(text)]

    with nlp.lease() as pipeline:
        strings = len(pipeline.vocab.strings)
    assert (True, ["qwzxv", "plmokn"]) == words("qwzxv plmokn")
    with nlp.lease() as pipeline:
        assert not pipeline.vocab.in_memory_zone
        assert strings == len(pipeline.vocab.strings)


def test_a_zoned_function_looks_like_the_written_one(nlp: Guard) -> None:
    """Name, documentation and signature are its own, less the pipeline; its guard is found."""

    @zoned(nlp)
    def words(nlp: Nlp, text: str, *, limit: int = 3) -> list[str]:
        """Split."""
        return [token.text for token in nlp(text)][:limit]

    @zoned(nlp)
    async def words_later(nlp: Nlp, text: str) -> list[str]:
        return [token.text for token in nlp(text)]

    assert ("words", "Split.") == (words.__name__, words.__doc__)
    assert ["text", "limit"] == list(inspect.signature(words).parameters)
    assert ["a", "b"] == words(text="a b c", limit=2)
    assert inspect.iscoroutinefunction(words_later)
    assert ["a", "b"] == asyncio.run(words_later("a b"))
    assert nlp is guard_of(words) is guard_of(words_later)
    assert copy.deepcopy(words) is words


def test_zoned_methods_of_every_kind(nlp: Guard) -> None:
    """The pipeline comes after self or cls, whichever decorator stands on top."""
    zone = zoned(nlp)

    class Service:
        @zone
        def method(self, nlp: Nlp, text: str) -> Any:
            return type(self), [token.text for token in nlp(text)]

        @zone
        async def coroutine(self, nlp: Nlp, text: str) -> Any:
            return type(self), [token.text for token in nlp(text)]

        @zone
        @classmethod
        def over_class(cls, nlp: Nlp, text: str) -> Any:
            return cls, [token.text for token in nlp(text)]

        @classmethod
        @zone
        def under_class(cls, nlp: Nlp, text: str) -> Any:
            return cls, [token.text for token in nlp(text)]

        @zone
        @staticmethod
        def over_static(nlp: Nlp, text: str) -> Any:
            return Service, [token.text for token in nlp(text)]

        @staticmethod
        @zone
        def under_static(nlp: Nlp, text: str) -> Any:
            return Service, [token.text for token in nlp(text)]

    service = Service()
    bound = [service.method, service.over_class, service.under_class, service.over_static, service.under_static]
    unbound = [Service.over_class, Service.under_class, Service.over_static, Service.under_static]
    for call in (*bound, *unbound):
        assert (Service, ["a", "b"]) == call("a b")
    assert (Service, ["a", "b"]) == Service.method(service, "a b")
    assert (Service, ["a", "b"]) == asyncio.run(service.coroutine("a b"))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, asyncio.CancelledError])
def test_whatever_ends_a_call_closes_its_zone(nlp: Guard, error: type[BaseException]) -> None:
    """Errors, interrupts and cancellations pass through, and the next call finds the pipeline in order."""
    zone = zoned(nlp)

    @zone
    def fails(nlp: Nlp) -> None:
        nlp("qwzxv")
        raise error

    @zone
    async def fails_later(nlp: Nlp) -> None:
        nlp("qwzxv")
        raise error

    with pytest.raises(error):
        fails()
    with pytest.raises(error):
        asyncio.run(fails_later())
    with nlp.lease() as pipeline:
        assert not pipeline.vocab.in_memory_zone
        assert "qwzxv" not in pipeline.vocab.strings
    with zone.lease() as pipeline:
        assert pipeline.vocab.in_memory_zone


def test_documents_in_a_traceback_can_be_printed(nlp: Guard) -> None:
    """An error reporter that prints a frame's variables meets an error of spaCy's at worst, and no freed memory."""

    @zoned(nlp)
    def fails(nlp: Nlp) -> None:
        doc = nlp("qwzxv plmokn uhbygv")  # noqa: F841 - found in the traceback
        raise ValueError

    with pytest.raises(ValueError, match=r"^$") as caught:
        fails()
    (lease,), (doc,) = variables(caught.value, "lease"), variables(caught.value, "doc")
    assert 3 <= len(lease._pool.addresses)
    with pytest.raises(KeyError, match="E018"):
        str(doc)


def variables(error: BaseException, name: str) -> Iterator[Any]:
    """Find a local variable in the frames of a traceback."""
    trace = error.__traceback__
    while trace is not None:
        if name in trace.tb_frame.f_locals:
            yield trace.tb_frame.f_locals[name]
        trace = trace.tb_next


def test_a_zone_as_a_block(nlp: Guard) -> None:
    """The lease gives the pipeline in its zone, for `with` and `async with`, once."""
    zone = zoned(nlp)
    assert f"<Zoned {nlp!r}>" == repr(zone)

    async def block() -> bool:
        async with zone.lease() as pipeline:
            return bool(pipeline.vocab.in_memory_zone)

    assert asyncio.run(block())
    lease = zone.lease(timeout="1s")
    with lease as pipeline:
        assert pipeline.vocab.in_memory_zone
        assert 1 == nlp.status().in_flight
    assert not pipeline.vocab.in_memory_zone
    assert 0 == nlp.status().in_flight
    with pytest.raises(RuntimeError, match="can be used once"):
        lease.__enter__()


def test_an_own_pipeline_for_each_generation(system: System) -> None:
    """A reload inside a zone gives later calls the new pipeline, and nothing of the zone keeps the old one alive."""
    reloading = guard(lambda: spacy.blank("en"), reload_on=None)
    zone = zoned(reloading)
    released = threading.Event()
    telemetry.set_hooks([lambda event: isinstance(event, telemetry.GenerationReleased) and released.set()])

    @zone
    def pipeline_id(nlp: Nlp) -> int:
        assert nlp.vocab.in_memory_zone
        return id(nlp)

    with zone.lease() as old:
        reloading.reload(wait=False)
        assert id(old) == pipeline_id()
        watch = weakref.ref(old)
        del old
    reloading.reload()
    assert pipeline_id()
    assert released.wait(TIMEOUT)
    assert watch() is None
    reloading.close()


# Refusals


def test_a_generator_function_is_refused_where_it_is_defined(nlp: Guard) -> None:
    """Its results come after the zone is closed; the error says what to write instead."""
    zone = zoned(nlp)

    def each(nlp: Nlp, text: str) -> Iterator[str]:
        yield from (token.text for token in nlp(text))

    async def each_later(nlp: Nlp, text: str) -> Any:
        yield nlp(text)

    for function in (each, each_later, staticmethod(each), classmethod(each)):
        with pytest.raises(InvalidOption, match="Return a list"):
            zone(function)


def test_only_guarded_pipelines_can_be_zoned(nlp: Guard, system: System) -> None:
    """A pipeline without its guard, an invalid duration, a class, and a guard of something else are rejected."""
    with pytest.raises(InvalidOption, match=r"zoned\(guard\("):
        zoned(spacy.blank("en"))
    with pytest.raises(InvalidOption, match="wait_timeout"):
        zoned(nlp, wait_timeout=-1)
    with pytest.raises(InvalidOption, match="class"):
        zoned(nlp)(dict)
    other = zoned(guard(lambda: "a model", reload_on=None))  # type: ignore[type-var]
    with pytest.raises(InvalidOption, match="loads a str"):
        other(lambda model: len(model))()  # noqa: PLW0108 - a function is decorated


def test_a_spacy_without_zones_is_refused(nlp: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 3.8 there are none, and the error says which version has them."""
    monkeypatch.delattr(spacy.language.Language, "memory_zone")
    with pytest.raises(NotSupported, match=r"spacy>=3\.8"):
        zoned(nlp)


# Escaped results

Pair = namedtuple("Pair", "first second")  # noqa: PYI024 - the untyped kind is looked into as well


@dataclass
class Answer:
    text: str
    tokens: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    doc: Any


class Later:
    """An awaitable that is not a coroutine."""

    def __await__(self) -> Iterator[Any]:
        return iter(())


async def later() -> None:
    """Never awaited."""


async def agenerator() -> Any:
    """Never iterated."""
    yield


KINDS: dict[str, Callable[[Nlp, Any], Any]] = {
    "Doc": lambda nlp, doc: doc,
    "Span": lambda nlp, doc: doc[0:2],
    "Token": lambda nlp, doc: doc[0],
    "Lexeme": lambda nlp, doc: nlp.vocab["qwzxv"],
    "SpanGroup": lambda nlp, doc: spacy.tokens.SpanGroup(doc, spans=[doc[0:1]]),
    "SpanGroups": lambda nlp, doc: doc.spans,
    "MorphAnalysis": lambda nlp, doc: doc[0].morph,
    "Underscore": lambda nlp, doc: doc._,
    "Example": lambda nlp, doc: Example(doc, doc),
    "Vocab": lambda nlp, doc: nlp.vocab,
    "StringStore": lambda nlp, doc: nlp.vocab.strings,
    "English": lambda nlp, doc: nlp,
    "generator": lambda nlp, doc: (token.text for token in doc),
    "map": lambda nlp, doc: map(str, doc),
    "list_iterator": lambda nlp, doc: iter([1]),
    "coroutine": lambda nlp, doc: later(),
    "async_generator": lambda nlp, doc: agenerator(),
    "Later": lambda nlp, doc: Later(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_points_into_the_zone_is_refused(nlp: Guard, kind: str) -> None:
    """The error names the function, the place and the kind; the zone is closed, and the next call is served."""
    zone = zoned(nlp)

    @zone
    def escapes(nlp: Nlp, make: Callable[[Nlp, Any], Any]) -> Any:
        return {"ok": 1, "it": [None, make(nlp, nlp("qwzxv plmokn"))]}

    with pytest.raises(EscapedResult) as caught:
        escapes(KINDS[kind])
    assert ("result['it'][1]", kind) == (caught.value.path, caught.value.kind)
    assert caught.value.function.endswith("escapes")
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value)))
    assert {"ok": 1, "it": [None, "qwzxv"]} == escapes(lambda nlp, doc: doc[0].text)


WRAPS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "itself": ("result", lambda doc: doc),
    "list": ("result[1]", lambda doc: [0, doc]),
    "tuples": ("result[0][0]", lambda doc: ((doc,), [doc])),
    "deque": ("result[2]", lambda doc: deque([0, 0, doc])),
    "set": ("list(result)[0]", lambda doc: {doc}),
    "frozenset": ("list(result)[0]", lambda doc: frozenset({doc})),
    "key": ("list(result)[1]", lambda doc: {"a": 0, doc: 1}),
    "value": ("result['a'][2]", lambda doc: {"a": (1, 2, doc)}),
    "values": ("list(result)[0]", lambda doc: {"a": doc}.values()),
    "items": ("list(result)[0][1]", lambda doc: {"a": doc}.items()),
    "named tuple": ("result.second", lambda doc: Pair(0, doc)),
    "dataclass": ("result.tokens[0]", lambda doc: Answer("a", [doc])),
    "slotted dataclass": ("result.doc", Slotted),
    "namespace": ("result.doc", lambda doc: SimpleNamespace(doc=doc)),
}


@pytest.mark.parametrize("container", WRAPS)
def test_a_result_is_looked_through(nlp: Guard, container: str) -> None:
    """Containers, records and their nesting are looked into, and the path can be read as an expression."""
    path, wrap = WRAPS[container]

    @zoned(nlp)
    def escapes(nlp: Nlp) -> Any:
        return wrap(nlp("qwzxv"))

    with pytest.raises(EscapedResult) as caught:
        escapes()
    assert (path, "Doc") == (caught.value.path, caught.value.kind)


def test_plain_results_pass(nlp: Guard) -> None:
    """Values, containers of them, vectors, classes, and rings of containers are returned as they are."""
    ring: list[Any] = []
    ring.append({"ring": ring})
    plain = [None, 1, 2.5, "a", b"a", [1, ("a", {"b"})], {"a": {}}, Answer("a", ["b"]), Answer, ring, range(3)]

    @zoned(nlp)
    def returns(nlp: Nlp) -> Any:
        return [*plain, nlp("a").to_array("ORTH"), Pair(1, 2)]

    assert plain == returns()[: len(plain)]


def test_a_large_result_is_looked_through_within_bounds(nlp: Guard) -> None:
    """The first ten thousand items of each container are looked at, twenty levels deep, and no more."""
    deep: Any = "end"
    for _ in range(2000):
        deep = [deep]
    many = [[number] for number in range(100_000)]

    @zoned(nlp)
    def returns(nlp: Nlp, before: int) -> Any:
        return [deep, ["a"] * before, *["b"] * before, nlp("a")]

    with pytest.raises(EscapedResult, match="Doc"):
        returns(9000)
    assert 20_003 == len(returns(20_000))
    assert many is zoned(nlp)(lambda nlp: many)()


def test_a_coroutines_result_is_looked_through(nlp: Guard) -> None:
    """What an asynchronous function returns is rejected as well."""

    @zoned(nlp)
    async def escapes(nlp: Nlp) -> Any:
        return [nlp("qwzxv")]

    with pytest.raises(EscapedResult, match=r"escapes\(\) returned a Doc at result\[0\]"):
        asyncio.run(escapes())
