"""The verdict on growth, its causes, and the report."""

from __future__ import annotations

import pytest

from modelguard.diagnosis import _growth_page
from modelguard.diagnosis._growth_causes import Cause, GrowthReport, Measured, attribute, notes_on
from modelguard.facts._holders import Held

MB = 10**6


def grown(**fields: object) -> Measured:
    """100 MB in 1,000 calls, with these measurements."""
    return Measured(calls=(0, 1000), private=(0, 100 * MB), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "share", "fields"),
    [
        ("worker processes", 0.8, {"in_workers": 80 * MB, "traced": {"a.py:1": 20_000.0}}),
        ("retention", 0.8, {"trimmed": 80 * MB, "traced": {"a.py:1": 20_000.0}}),
        ("cycles", 0.8, {"collected": 80 * MB, "garbage": 900, "traced": {"a.py:1": 20_000.0}}),
        ("unbounded cache", 0.7, {"cleared": {"lru_cache:app.f (9 entries)": 70 * MB}, "traced": {"a:1": 30_000.0}}),
        ("metric labels", 1.0, {"cleared": {"metric:requests": 120 * MB}}),
        ("arrow pool", 1.0, {"cleared": {"pyarrow": 100 * MB}}),
        ("cuda cache", 1.0, {"cleared": {"cuda": 100 * MB}}),
        ("onnx runtime", 1.0, {"cleared": {"onnxruntime": 100 * MB}}),
        ("tasks", 1.0, {"after": {"tasks": 1000}}),
        ("threads", 1.0, {"before": {"threads": 3}, "after": {"threads": 503}}),
        ("autograd", 1.0, {"after": {"tensors with a graph": 1000}}),
        ("spacy strings", 1.0, {"before": {"spacy strings": 500}, "after": {"spacy strings": 90_000}}),
        ("tensorflow", 1.0, {"after": {"tensorflow traces": 300}}),
        ("tracebacks", 1.0, {"failing": 1e5, "succeeding": 9.0, "after": {"caught errors": 500}, "failures": 1000}),
        ("python objects", 1.0, {"traced": {"app.py:7": 100_000.0}}),
        ("onednn plans", 1.0, {"repeats": 0.0, "compiled": 15 * MB, "libraries": ("torch",)}),
        ("tokenizer caches", 1.0, {"repeats": 0.0, "uncached": 9.0}),
        ("native memory", 1.0, {"repeats": 1e5, "small": 1000, "given_out": 100 * MB}),
        ("native memory", 1.0, {"native": {"app.py:7": 100_000.0}, "traced_by": "memray"}),
        ("databases", 1.0, {"after": {"sqlite bytes": 100 * MB}, "small": 1000, "given_out": 100 * MB}),
        ("databases", 1.0, {"live": True, "after": {"sqlite bytes": 100 * MB, "blocks": 300}}),
        ("unbounded cache", 1.0, {"live": True, "after": {"cached results": 900, "blocks": 90_000}}),
        ("metric labels", 1.0, {"live": True, "after": {"metric series": 9000}}),
        ("tracebacks", 1.0, {"live": True, "after": {"caught errors": 900}}),
        ("onednn plans", 1.0, {"live": True, "compiled": 15 * MB, "libraries": ("torch",)}),
        ("python objects", 1.0, {"live": True, "after": {"blocks": 3000}, "types": {"app.Row": 1000}}),
        ("native memory", 1.0, {"live": True, "after": {"blocks": 300}}),
    ],
)
def test_each_cause_is_told_by_its_own_evidence(name: str, share: float, fields: dict[str, object]) -> None:
    """Its share is what was measured, and the evidence is said."""
    causes, rest = attribute(grown(**fields))
    assert (name, share) == (causes[0].name, causes[0].share)
    assert causes[0].seen
    assert causes[0].fix
    assert 0 == rest


@pytest.mark.parametrize(("rise", "notes"), [(900_000, 1), (200_000, 0)])
def test_a_slight_rise_is_said_though_it_does_not_count(rise: int, notes: int) -> None:
    """Somebody may want to make more calls; what is next to nothing is not mentioned."""
    measured = Measured(calls=tuple(range(0, 2400, 100)), private=tuple(at * rise // 23 for at in range(24)))
    assert "steady" == measured.judged.verdict
    assert notes == len([note for note in notes_on(measured.judged) if "three times as many calls" in note])


def test_growth_that_has_ended_is_not_said_to_go_on() -> None:
    """A cache that has filled with 5 MB is steady, and that is more than too little to count."""
    measured = Measured(calls=tuple(range(24)), private=tuple(min(at, 14) * 5 * MB // 14 for at in range(24)))
    assert "steady" == measured.judged.verdict
    assert [] == notes_on(measured.judged)


def test_entries_that_are_a_cause_name_it() -> None:
    """Series of a registry of the service's own are labels, and connections to other servers are connections."""
    for about in ("metric labels", "unbounded cache", "connections"):
        held = Held("app.kept", "dict", 900, "app.Entry", 90 * MB, about=about, fix="Mend it.")
        cause = attribute(grown(small=100 * MB, held=(held,)))[0][0]
        assert (about, "Mend it.") == (cause.name, cause.fix)


def test_a_few_objects_are_not_taken_for_many_blocks() -> None:
    """Of a service whose texts grow, what else has become more by the way is not said to be them."""
    few = grown(live=True, after={"blocks": 9000}, types={"weakref.ReferenceType": 36, "dict": 9})
    seen = attribute(few)[0][0].seen
    assert seen.endswith("; of no counted type a tenth (text, numbers, classes and functions are not counted)")


def test_what_the_collector_cannot_show_is_said() -> None:
    """Python freezes a few hundred objects by itself; more may hold what grows, and are not looked at in a service."""
    for frozen, said in ((400, False), (135_000, True)):
        causes, _ = attribute(grown(live=True, after={"blocks": 9000, "frozen": frozen}))
        assert said == ("gc.freeze() hides 135,000 objects, which may hold them" in causes[0].seen)


@pytest.mark.parametrize("counted", ["tasks", "threads", "queued items"])
def test_requests_at_work_are_not_what_grows(counted: str) -> None:
    """A service under load has more tasks, threads and queued items than at its start; the holder is named."""
    log = Held("app.log", "list", 1000, "bytes", 90 * MB)
    busy = grown(live=True, after={counted: 50, "blocks": 2000}, held=(log,))
    assert [("python objects", 0.9)] == [(cause.name, cause.share) for cause in attribute(busy)[0]]


def test_what_is_too_small_hides_no_cause() -> None:
    """Four threads more hold 4 MB at most: the rest of 100 MB has another cause."""
    causes, _ = attribute(grown(after={"threads": 4}, traced={"app.py:7": 100_000.0}))
    assert ["python objects"] == [cause.name for cause in causes]


def test_rules_of_a_pipeline_are_no_strings() -> None:
    """What a matcher keeps is named beside the strings that its rules have added."""
    rules = Held("app.MATCHER", "dict", 900, "set", 60 * MB)
    causes, rest = attribute(grown(after={"spacy strings": 20_000}, held=(rules,)))
    assert [("python objects", 0.6), ("spacy strings", 0.4)] == [(each.name, each.share) for each in causes]
    assert 0 == rest


def test_native_memory_by_line() -> None:
    """With memray, the lines of Python below which it was allocated are named."""
    causes, _ = attribute(grown(native={"app.py:7": 9e4, "app.py:9": 1e4}, traced_by="memray"))
    assert causes[0].seen.endswith("; allocated below app.py:7 (90 kB per call), app.py:9 (10 kB per call)")
    assert "Close or free" in causes[0].fix


def test_a_line_that_resizes_is_named_without_a_figure() -> None:
    """How much longer it has made what was there before the trace is not known."""
    held = Held("app.buffer", "bytearray", MB, "bytes", 100 * MB, table=100 * MB)
    causes, rest = attribute(
        grown(held=(held,), small=0, given_out=100 * MB, traced={"app.py:9": 0.0, "app.py:7": 60.0})
    )
    assert [("python objects", 1.0)] == [(cause.name, cause.share) for cause in causes]
    assert causes[0].seen.endswith("allocated at app.py:7 (60 B per call), app.py:9")
    assert 0 == rest


@pytest.mark.parametrize("library", ["tokenizers", "onnxruntime", "tensorflow", "torch", "spacy", "pyarrow"])
def test_no_library_is_accused_because_it_is_loaded(library: str) -> None:
    """Not either because memory grows with new inputs alone: without a figure of its own, all is unexplained."""
    measured = grown(repeats=0.0, same_shape=0.0, libraries=(library,), traced={"app.py:7": 900.0}, trimmed=MB)
    assert ((), 1.0) == attribute(measured)


def test_held_tensors_are_the_cause_and_no_library() -> None:
    """What containers hold, with what is outside of Python's memory, comes before what is measured by elimination."""
    held = Held("app.cache", "dict", 1000, "torch.Tensor", 96 * MB, fix="Give app.cache a bound.", table=MB)
    causes, rest = attribute(
        grown(held=(held,), small=MB, given_out=95 * MB, repeats=0.0, uncached=96_000.0, libraries=("tokenizers",))
    )
    assert ([("python objects", 0.96)], 0.04) == ([(cause.name, cause.share) for cause in causes], rest)
    assert "app.cache" in causes[0].fix


def test_native_memory_that_objects_keep_is_named_with_them() -> None:
    """A dict of a library's objects, whose own memory is unknown, is the holder, and the fix is a bound for it."""
    held = Held("app.sessions", "dict", 1000, "library.Session", 9000, fix="Give app.sessions a bound.")
    causes, _ = attribute(grown(held=(held,), small=9000, given_out=100 * MB))
    assert ("native memory", "Give app.sessions a bound.") == (causes[0].name, causes[0].fix)
    assert "app.sessions (dict, +1,000 entries)" in causes[0].seen


def test_many_queues_are_not_one_full_queue() -> None:
    """A set of queues that are never removed is what holds the items: no bound of a queue would help."""
    held = Held(
        "app.subscribers", "set", 1000, "asyncio.queues.Queue -> collections.deque", 95 * MB, fix="Remove them."
    )
    causes, _ = attribute(grown(held=(held,), after={"queued items": 5000}))
    assert [("python objects", "Remove them.")] == [(cause.name, cause.fix) for cause in causes]


def test_what_a_doubling_table_leaves_free_is_blamed_for_its_part_only() -> None:
    """Of 20 MB, 10 came in a step, which is no growth: 5 MB that a trim gives back are a quarter of both."""
    calls = tuple(range(0, 2500, 100))
    private = tuple(100 * MB + number * MB * 10 // 24 + (10 * MB if number > 10 else 0) for number in range(25))
    found = Measured(calls=calls, private=private, trimmed=5 * MB, traced={"a.py:1": 8_000.0}, judged_from=0)
    assert [("python objects", 0.75), ("retention", 0.25)] == [
        (cause.name, round(cause.share, 2)) for cause in attribute(found)[0]
    ]


def test_few_objects_of_garbage_are_no_cycles() -> None:
    """Growth with the calls leaves garbage with the calls; its types are named."""
    assert () == attribute(grown(collected=50 * MB, garbage=2))[0]
    causes, _ = attribute(grown(collected=50 * MB, garbage=900, freed={"app.Node": 600, "builtins.list": 300}))
    assert "900 objects (600 app.Node, 300 list)" in causes[0].seen


def test_exceptions_that_are_held_are_the_cause_though_no_call_fails() -> None:
    """A function that catches its errors and keeps them pins their frames."""
    held = Held("app.errors", "list", 1000, "ValueError", 90 * MB, about="tracebacks", fix="Keep no exceptions.")
    causes, _ = attribute(grown(held=(held,), small=90 * MB))
    assert ("tracebacks", "Keep no exceptions.") == (causes[0].name, causes[0].fix)


def test_what_is_counted_names_whose_it_is() -> None:
    """The pipeline whose strings they are; and a container with as many more entries."""
    strings = {"after": {"spacy strings": 90_000}, "owners": {"spacy strings": ["app.nlp"]}}
    assert "of app.nlp" in attribute(grown(**strings))[0][0].seen
    clients = Held("app.clients", "dict", 400, "httpx.Client", 9000, about="connections")
    contexts = attribute(grown(held=(clients,), after={"ssl contexts": 410}))[0][0]
    assert "held by app.clients" in contexts.seen


def test_what_malloc_needs_beside_held_tensors_is_no_second_cause() -> None:
    """It is unexplained: each tensor has more than its numbers. A leak that is as large as they are is one."""
    held = Held("app.cache", "dict", 1000, "torch.Tensor", 78 * MB)
    causes, rest = attribute(grown(held=(held,), small=MB, given_out=99 * MB))
    assert ([("python objects", 0.78)], 0.22) == ([(cause.name, cause.share) for cause in causes], rest)
    held = Held("app.cache", "dict", 1000, "torch.Tensor", 50 * MB)
    causes, _ = attribute(grown(held=(held,), small=MB, given_out=99 * MB))
    assert ["python objects", "native memory"] == [cause.name for cause in causes]


def test_rounding_of_small_objects_is_no_native_memory() -> None:
    """What pymalloc has given out counts, and not what was asked for; so do the tables of containers."""
    held = Held("app.kept", "list", 1000, "float", 60 * MB, table=20 * MB)
    causes, rest = attribute(grown(held=(held,), small=80 * MB, given_out=20 * MB, traced={"app.py:7": 60_000.0}))
    assert ([("python objects", 1.0)], 0.0) == ([(cause.name, cause.share) for cause in causes], rest)


def test_what_is_counted_explains_no_more_than_it_can_hold() -> None:
    """Nor what other containers hold: a few threads beside a cache are not the cause."""
    held = Held("app.cache", "dict", 1000, "numpy.ndarray", 90 * MB)
    causes, rest = attribute(grown(held=(held,), after={"threads": 12}))
    assert ([("python objects", 0.9), ("threads", 0.1)], 0.0) == ([(each.name, each.share) for each in causes], rest)
    assert ((("threads", 0.12),), 0.88) == (
        tuple((cause.name, cause.share) for cause in attribute(grown(after={"threads": 12}))[0]),
        attribute(grown(after={"threads": 12}))[1],
    )


def test_the_rest_is_unexplained() -> None:
    """Shares never add up to more than the growth."""
    causes, rest = attribute(grown(trimmed=95 * MB, collected=50 * MB, garbage=900, traced={"a.py:1": 1.0}))
    assert ([0.95], 0.05) == ([cause.share for cause in causes], rest)


REPORT = GrowthReport(
    "app:predict", "grows", (Cause("cycles", 0.8, "<b>\x1b", "break it"),), 0.2, grown(), ("3 of 1,000 calls failed",)
)


def test_text() -> None:
    """The verdict with its rate, each cause with its share, the rest, and notes; control characters are escaped."""
    text = "\n".join(_growth_page.as_text(REPORT))
    assert "memory grows with the calls: 100 MB in 1,000 calls, 100.00 MB per 1,000 calls" in text
    assert "80% cycles\n  seen  <b>\\x1b\n  fix   break it" in text
    assert "20% is unexplained." in text
    assert text.endswith("Note: 3 of 1,000 calls failed")


def test_the_page_is_one_file() -> None:
    """It refers to no other file, has a figure, and what was measured is escaped."""
    page = _growth_page.as_html(REPORT)
    assert "<svg" in page
    assert "&lt;b&gt;\\x1b" in page
    assert not [word for word in ("http:", "https:", "src=", "url(", "<script") if word in page]


def test_a_page_without_readings() -> None:
    """An undecided diagnosis has a page too."""
    assert "undecided after 0 calls" in _growth_page.as_html(GrowthReport("app:f", "undecided"))


def test_tasks_are_named_with_their_holder_and_what_they_wait_for() -> None:
    """The fix is that of the holder, and not to remove tasks that are never done."""
    fix = "The tasks in app.tasks are pending in work (app.py line 7), waiting for Event.wait: give the wait a limit."
    state = "pending in work (app.py line 7), waiting for Event.wait"
    held = Held("app.tasks", "set", 1000, "_asyncio.Task -> bytes", MB, about="tasks", state=state, fix=fix)
    (cause,), _ = attribute(grown(held=(held,), before={"tasks": 0}, after={"tasks": 1000}))
    assert ("tasks", fix) == (cause.name, cause.fix)
    assert "held by app.tasks (set, +1,000 entries) -> _asyncio.Task -> bytes, pending in work" in cause.seen
