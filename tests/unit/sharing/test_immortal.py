"""Which objects become immortal, which never do, and what stays as it was."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import pickle
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.sharing.immortals import Slotted, is_immortal, needs_immortals, text

from modelguard import prefork
from modelguard.errors import InvalidOption, NotSupported
from modelguard.prefork import immortalize
from modelguard.sharing._graph import behind_code, measure


class Entry:
    """An entry of a dictionary, as models have them."""

    def __init__(self, number: int) -> None:
        self.name = text(number)
        self.parts = [number * 10_000 + 7, (number + 0.25, text(number))]


# What is rejected


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python may have immortal objects")
def test_before_3_12_there_are_no_immortal_objects() -> None:
    """On 3.11 the check gives the reason, and the call raises it."""
    assert "the first version that has them is 3.12" in str(prefork.immortalize_unsupported())
    with pytest.raises(
        NotSupported, match=r"making objects immortal is not supported here: CPython 3\.11 has no immortal objects"
    ):
        immortalize([1])


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "9"])
def test_an_invalid_limit_is_rejected(limit: Any) -> None:
    """A limit is a whole number of objects."""
    with pytest.raises(InvalidOption, match="must be a whole number of at least 1"):
        immortalize([1], limit=limit)


def test_nothing_to_make_immortal_is_rejected() -> None:
    """A call without roots is a mistake."""
    with pytest.raises(InvalidOption, match=r"roots=\(\): must not be empty"):
        immortalize()


# What becomes immortal


@needs_immortals
def test_every_object_of_the_model_becomes_immortal() -> None:
    """Containers, instances, attributes, keys and leaves, and no more than these."""
    entry = Entry(1)
    model = {text(2): entry}
    report = immortalize(model)
    number, (fraction, label) = entry.parts
    for one in (model, *model, entry, entry.name, entry.parts, number, entry.parts[1], fraction, label):
        assert is_immortal(one), one
    assert 10 == report.objects  # with the dict of the attributes
    assert report.complete
    assert () == report.skipped


CONTAINERS: dict[str, Callable[[str], object]] = {
    "list": lambda leaf: [leaf],
    "tuple": lambda leaf: (leaf,),
    "set": lambda leaf: {leaf},
    "frozenset": lambda leaf: frozenset([leaf]),
    "value": lambda leaf: {1: leaf},
    "text key": lambda leaf: {leaf: 1},
    "mixed keys": lambda leaf: {leaf: 1, 2: 3},
    "OrderedDict": lambda leaf: collections.OrderedDict({leaf: 1}),
    "defaultdict": lambda leaf: collections.defaultdict(list, {leaf: [1]}),
    "Counter": lambda leaf: collections.Counter([leaf]),
    "deque": lambda leaf: collections.deque([leaf]),
    "ChainMap": lambda leaf: collections.ChainMap({1: leaf}),
    "mappingproxy": lambda leaf: types.MappingProxyType({1: leaf}),
    "namespace": lambda leaf: types.SimpleNamespace(leaf=leaf),
    "slots": Slotted,
    "partial": lambda leaf: functools.partial(len, leaf),
    "dict's method": lambda leaf: {leaf: 1}.get,
    "list's method": lambda leaf: [leaf].__len__,
    "slots' method": lambda leaf: Slotted(leaf).own,
    "iterator": lambda leaf: iter([leaf]),
    "items": lambda leaf: {leaf: 1}.items(),
    "exception": ValueError,
    "slice": slice,
}


@needs_immortals
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_the_walk_sees_into_every_container(make: Callable[[str], object]) -> None:
    """What a container of Python's own holds is reached, text keys of dicts included."""
    leaf = text(3)
    immortalize(make(leaf))
    assert is_immortal(leaf)


@needs_immortals
def test_attributes_are_reached_in_whichever_form_they_are_kept() -> None:
    """CPython keeps attributes without a dict until ``__dict__`` is used; both forms are reached."""
    plain, asked, unpickled = Entry(4), Entry(5), pickle.loads(pickle.dumps(Entry(6)))
    assert {"name", "parts"} == set(asked.__dict__)
    immortalize(plain, asked, unpickled)
    assert all(is_immortal(entry.name) and is_immortal(entry.parts) for entry in (plain, asked, unpickled))


@needs_immortals
def test_circles_and_depth_end() -> None:
    """Circles and a chain of a hundred thousand objects are walked to their end."""
    deep: list[Any] = []
    bottom = deep
    for _ in range(100_000):
        bottom.append([])
        bottom = bottom[0]
    bottom.append(deep)
    assert 100_001 == immortalize(deep, deep).objects
    assert is_immortal(bottom)


@needs_immortals
def test_objects_in_numpy_arrays_are_reached() -> None:
    """Numpy hides the elements of an object array from the garbage collector; they are reached nevertheless."""
    numpy = pytest.importorskip("numpy")
    leaf, other = text(5), text(6)
    model = {"flat": numpy.array([leaf, None], dtype=object), "square": numpy.array([[other] * 2] * 2, dtype=object).T}
    weights = numpy.zeros(3)
    immortalize(model, weights)
    for one in (leaf, other, weights, *model.values()):
        assert is_immortal(one)


@needs_immortals
def test_objects_in_the_fields_of_numpy_arrays_are_reached() -> None:
    """Arrays and records with fields may have objects in some of them, in fields of fields, and in small arrays."""
    numpy = pytest.importorskip("numpy")
    kind = numpy.dtype([("number", "i8"), ("one", object), ("inner", [("two", object, (2,))])])
    parts = [text(number) for number in range(6)]
    table = numpy.zeros(1, dtype=kind)
    table[0] = (7, parts[0], ((parts[1], parts[2]),))
    record = numpy.zeros(1, dtype=kind)[0]
    record["one"], record["inner"]["two"] = parts[3], (parts[4], parts[5])
    immortalize({"table": table, "record": record})
    for one in (*parts, table, record):
        assert is_immortal(one)


@needs_immortals
def test_the_limit_bounds_the_walk() -> None:
    """A walk ends at the limit, and the report says that there was more."""
    report = immortalize([object() for _ in range(100)], limit=30)
    assert (30, False) == (report.objects, report.complete)


@needs_immortals
def test_every_limit_holds_and_an_exact_one_is_enough() -> None:
    """Whatever object comes last; a walk that had room for all of them says that it is complete."""

    def model(number: int) -> Entry:
        entry = Entry(number)
        entry.more = [text(number), [number * 1.5, [number * 2.5]]]  # type: ignore[attr-defined]
        return entry

    most = immortalize(model(50)).objects
    reports = [immortalize(model(50 + limit), limit=limit) for limit in range(1, most + 1)]
    assert [(limit, limit == most) for limit in range(1, most + 1)] == [(one.objects, one.complete) for one in reports]


@needs_immortals
def test_what_is_immortal_already_is_left_alone() -> None:
    """A second call finds nothing to do, but looks into its roots for what is new."""
    model: dict[str, Any] = {text(7): Entry(8), text(8): [None, True, 1, "", ()]}
    assert 0 < immortalize(model).objects
    assert 0 == immortalize(model).objects
    model["new"] = new = [text(9)]
    assert 2 <= immortalize(model).objects <= 3  # the key may be immortal, as a constant of this file
    assert is_immortal(new[0])


def test_sizes_are_taken_without_running_the_models_code() -> None:
    """A class's own ``__sizeof__`` is not called: it may fail, or walk the whole model."""

    class Rude:
        def __sizeof__(self) -> int:
            raise RuntimeError

    assert 0 < measure([Rude(), text(10)]) < 1000


# What stays mortal


def table() -> list[str]:
    """More than a report leaves out: 1 MB."""
    return [text(number) for number in range(20_000)]


class Registering(type):
    """A metaclass that may keep a table."""

    known: list[str]


class Registered(metaclass=Registering):
    """A model of a class that it has made."""


class Shop:
    """A model whose data is attached to its code."""

    BIG: list[str]
    SMALL = ("a", "b")

    def find(self) -> object:
        return self.BIG


def closing_over(held: list[str]) -> Callable[[], object]:
    return lambda: held


def defaulting_to(held: list[str]) -> Callable[[], object]:
    def find(held: list[str] = held) -> object:
        return held

    return find


def remembering(held: list[str]) -> Callable[[int], object]:
    cached = functools.lru_cache(lambda number: held[number:])
    cached(0)
    return cached


@needs_immortals
@pytest.mark.parametrize(
    ("make", "place"),
    [
        (closing_over, "closure or defaults of .*closing_over.<locals>.<lambda>"),
        (defaulting_to, "closure or defaults of .*defaulting_to.<locals>.find"),
        (remembering, "cache of .*remembering.<locals>.<lambda>"),
    ],
    ids=["closure", "default", "cache"],
)
def test_what_only_functions_lead_to_is_named(make: Callable[[list[str]], object], place: str) -> None:
    """Data in a closure, a default or a cache stays mortal, and the report says where it is and how much."""
    held = table()
    report = immortalize({text(1): make(held), "small": lambda: text(1)})
    assert not is_immortal(held[1])
    assert not report.complete
    (mortal,) = report.mortal
    assert re.fullmatch(place, mortal.place)
    assert 20_001 <= mortal.objects <= 20_020
    assert 1_000_000 < mortal.bytes_held < 2_000_000


@needs_immortals
def test_what_only_a_class_leads_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of the class stays mortal, and is named with its attribute; on the instance it would not."""
    monkeypatch.setattr(Shop, "BIG", table(), raising=False)
    shop = Shop()
    report = immortalize([shop])
    assert (False, [f"attribute 'BIG' of class {__name__}.Shop"]) == (
        report.complete,
        [mortal.place for mortal in report.mortal],
    )
    immortalize(Shop.BIG)
    assert () == immortalize([Shop()]).mortal, "what was made immortal on its own is not told again"


def test_the_table_of_a_metaclass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry of classes belongs to the metaclass: it is code too, and is named with its attribute."""
    monkeypatch.setattr(Registering, "known", table(), raising=False)
    places = [mortal.place for mortal in behind_code([Registered])]
    assert [f"attribute 'known' of class {__name__}.Registering"] == places


@needs_immortals
def test_a_model_whose_metaclass_has_a_table_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of the whole model says so."""
    monkeypatch.setattr(Registering, "known", table(), raising=False)
    report = immortalize([Registered()])
    assert (False, 1) == (report.complete, len(report.mortal))


# What stays as it was


@needs_immortals
def test_an_immortal_model_behaves_as_before() -> None:
    """It is compared, copied, pickled, changed and iterated as any other; copies are mortal."""
    model = {text(number): Entry(number) for number in range(50)}
    before = pickle.dumps(model)
    immortalize(model)
    assert before == pickle.dumps(model)
    for twin in (copy.deepcopy(model), pickle.loads(before)):
        assert [entry.parts for entry in model.values()] == [entry.parts for entry in twin.values()]
        assert not is_immortal(twin)
        assert not is_immortal(twin[text(3)].parts)
    shallow = copy.copy(model)
    assert not is_immortal(shallow)
    model[text(3)].parts.append("more")
    model["new"] = Entry(51)
    del model[text(4)], model[text(5)].name
    model[text(6)].parts.sort(key=str)
    model.update(shallow)
    assert 51 == len(model)
    model.clear()
    assert 50 == len(shallow)


@needs_immortals
def test_what_is_dropped_after_a_change_is_freed_if_it_is_mortal() -> None:
    """Only objects that were made immortal stay for ever; later ones are freed."""
    model: list[Any] = [Slotted(1)]
    first = weakref.ref(model[0])
    immortalize(model)
    model[0] = Slotted(2)
    second = weakref.ref(model[0])
    model[0] = None
    gc.collect()
    assert first() is not None
    assert None is second()


@needs_immortals
def test_the_collector_still_frees_what_hangs_on_an_immortal_object() -> None:
    """Many collections leave the model whole, and find circles among what is no longer reachable from it."""
    model: dict[str, Any] = {text(number): Entry(number) for number in range(1000)}
    immortalize(model)
    for round_ in range(20):
        circle = Slotted(None)
        circle.value = [circle, model]
        model["circle"] = circle
        gone = weakref.ref(circle)
        del circle
        gc.collect(round_ % 3)
        assert gone() is not None
        del model["circle"]
        gc.collect()
        assert None is gone()
    assert text(999) == model[text(999)].name


@needs_immortals
def test_a_collection_no_longer_writes_to_the_immortal_objects() -> None:
    """They are out of the collector's generations, so that a forked process's collections leave their pages alone."""
    model = [[number] for number in range(1000)]
    immortalize(model)
    mine = {id(one) for one in model}
    assert not any(id(one) in mine for generation in range(3) for one in gc.get_objects(generation))


@needs_immortals
def test_nothing_outside_the_model_changes() -> None:
    """An object that refers to the model, or lives beside it, keeps its count."""
    part = [text(14)]
    beside = [Slotted(part), [text(15)], (text(16), part)]
    before = [sys.getrefcount(one) for one in beside]
    immortalize(part)
    assert before == [sys.getrefcount(one) for one in beside]
    assert not is_immortal(beside[2][0])


@needs_immortals
def test_threads_may_use_and_change_the_model_meanwhile() -> None:
    """Other threads read, extend and shrink the model while it becomes immortal."""
    model: dict[int, Any] = {number: Entry(number) for number in range(20_000)}
    stop, errors = threading.Event(), []

    def work(count: int) -> None:
        try:
            while not stop.is_set():
                count += 1
                model[count] = Entry(count)
                assert text(count) == model[count].name
                del model[count]
                assert 20_000 <= len(list(model.values())) <= 20_003
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(start << 20,)) for start in (1, 2, 3)]
    for thread in threads:
        thread.start()
    immortalize(model)
    stop.set()
    for thread in threads:
        thread.join()
    assert [] == errors
    assert all(is_immortal(model[number].name) for number in range(0, 20_000, 500))


@needs_immortals
def test_text_may_be_interned_before_and_after() -> None:
    """Interning goes on as before, whichever came first."""
    early, late = sys.intern(text(17)), text(18)
    immortalize([early, late])
    assert sys.intern(text(17)) is early
    assert sys.intern(late) is late
    assert sys.intern(text(18)) is late
    assert {late: 1}[text(18)] == 1
    assert re.fullmatch(r"TEXT \d+", late)
