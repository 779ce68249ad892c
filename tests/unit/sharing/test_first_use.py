"""Uses of an immortal object that would write to it if they came first in a forked child."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import functools
import ipaddress
import operator
import pathlib
import pickle
import sqlite3
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from tests.unit.sharing.immortals import is_immortal, needs_immortals, text

from modelguard.prefork import immortalize

pytestmark = needs_immortals


class Entry:
    """A plain instance, as models are full of."""

    def __init__(self) -> None:
        self.name, self.weight = text(1), 0.25


class Title(str):
    """Text with its own type."""

    __slots__ = ()


class Pair(NamedTuple):
    left: int
    right: str


def content(one: object) -> bytes:
    """The bytes of an object, and those before it that its type uses: for the collector, and for the dict."""
    import ctypes

    flags = type(one).__flags__
    before = 0 if not flags & 1 << 14 else 32 if flags & 0b11 << 3 else 16  # HAVE_GC; MANAGED_WEAKREF, MANAGED_DICT
    own = min(type(one).__basicsize__, one.__sizeof__())  # a short text is smaller than its type says
    return ctypes.string_at(id(one) - before, before + own)


def bind(value: str) -> None:
    """Have native code read a text."""
    connection = sqlite3.connect(":memory:")
    assert connection.execute("select ?", (value,)).fetchone() == (value,)
    connection.close()


MOMENT = dt.datetime(2026, 11, 3, 12, 30)  # noqa: DTZ001 - what is not aware of zones is common, and hashed otherwise

HASHED: dict[str, Callable[[], object]] = {
    "text": lambda: text(1),
    "text of a type of its own": lambda: Title(text(2)),
    "bytes": lambda: text(3).encode(),
    "frozenset": lambda: frozenset([text(4), (text(5),)]),
    "date": lambda: dt.date(2026, 11, 3),
    "time": lambda: dt.time(12, 30, 1),
    "datetime": lambda: MOMENT + dt.timedelta(1),
    "datetime with a zone": lambda: MOMENT.replace(tzinfo=dt.UTC),
    "timedelta": lambda: dt.timedelta(3, 4),
    "Decimal": lambda: decimal.Decimal(22) / 7,
    "path": lambda: pathlib.PurePosixPath("/srv") / text(11),
    "path of another system": lambda: pathlib.PureWindowsPath("C:/") / text(12),
    "tuple": lambda: (text(6), 7.5, (text(8), None, (9,))),
    "named tuple": lambda: Pair(1, text(10)),
}


@pytest.mark.parametrize("make", HASHED.values(), ids=HASHED)
def test_the_first_hash_writes_nothing(make: Callable[[], object]) -> None:
    """An object that keeps its hash has it before the fork."""
    one = make()
    immortalize([one])
    before = content(one)
    assert isinstance(hash(one), int)
    assert before == content(one)


@pytest.mark.parametrize("make", [str, Title], ids=["text", "type of its own"])
@pytest.mark.parametrize("written", ["日本語の単語", "слово", "café", "a word"])
def test_the_first_read_of_text_by_native_code_writes_nothing(make: type[str], written: str) -> None:
    """Text that is not ASCII has the UTF-8 form that native libraries ask for before the fork."""
    one = make(written + text(1))
    immortalize([one])
    before, size = content(one), sys.getsizeof(one)
    bind(one)
    assert (before, size) == (content(one), sys.getsizeof(one))


def test_text_that_python_itself_keeps_is_ready_too() -> None:
    """A name that the interpreter has made immortal is not counted as the model's, but is still read."""
    name = sys.intern("имя " + text(2))
    immortalize([name])
    immortalize([name])
    size = sys.getsizeof(name)
    bind(name)
    assert size == sys.getsizeof(name)


@pytest.mark.parametrize("use", [vars, copy.copy, pickle.dumps], ids=["vars", "copy", "pickle"])
def test_the_first_use_of_an_instances_dict_writes_nothing(use: Callable[[Any], object]) -> None:
    """``vars``, copies and pickles of a plain instance find its dict made, and do not count references to it."""
    entry = Entry()
    immortalize([entry])
    before = content(entry)
    assert use(entry)
    assert before == content(entry)
    assert is_immortal(vars(entry))


@pytest.mark.parametrize(
    "use", [str, operator.attrgetter("parts"), operator.attrgetter("name")], ids=["text", "parts", "name"]
)
def test_the_first_look_at_a_path_writes_nothing(use: Callable[[Any], object]) -> None:
    """Its text and its parts are found before the fork."""
    path = pathlib.Path("/srv") / text(1)
    immortalize([path])
    before = content(path)
    assert use(path)
    assert before == content(path)
    assert is_immortal(str(path))


@pytest.mark.parametrize("given", ["10.0.0.0/8", "fd00::/8"])
@pytest.mark.parametrize("make", [ipaddress.ip_network, ipaddress.ip_interface], ids=["network", "interface"])
def test_the_cached_properties_of_a_network_are_there(given: str, make: Callable[[str], Any]) -> None:
    """What the standard library keeps in an instance is computed before the fork, and is immortal."""
    one = make(given)
    immortalize([one])
    before, attributes = content(one), dict(vars(one))
    names = [name for name, found in vars_of_classes(one) if isinstance(found, functools.cached_property)]
    assert names
    assert all(is_immortal(getattr(one, name)) for name in names)
    assert (before, attributes) == (content(one), vars(one))


def vars_of_classes(one: object) -> list[tuple[str, object]]:
    """What the classes of an object define."""
    return [item for base in type(one).__mro__ for item in vars(base).items()]


def test_no_code_of_the_models_is_called() -> None:
    """Hashes, properties, zones and dicts that a model's classes have written themselves are left alone."""

    class Rude:
        def __hash__(self) -> int:
            raise AssertionError

    class RudeZone(dt.tzinfo):
        def utcoffset(self, moment: object) -> dt.timedelta:
            raise AssertionError

    class RudeDict:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            raise AssertionError

    class RudePath(pathlib.PurePosixPath):
        def __hash__(self) -> int:
            raise AssertionError

    class RudeNetwork(ipaddress.IPv4Network):
        @functools.cached_property
        def hostmask(self) -> ipaddress.IPv4Address:
            raise AssertionError

    paths = [RudePath("/srv"), RudeNetwork("10.0.0.0/8")]
    model = [(Rude(), 1), ((Rude(),),), MOMENT.replace(tzinfo=RudeZone()), RudeDict(), *paths]
    immortalize(model)
    assert all(map(is_immortal, model))


def test_what_has_no_hash_or_no_utf_8_is_made_immortal_as_it_is() -> None:
    """A list in a tuple, a signalling NaN and half a surrogate pair stop nothing."""
    model = [(1, [2]), decimal.Decimal("sNaN"), "\ud800" + text(3)]
    assert immortalize(model).complete
    assert all(map(is_immortal, model))


@pytest.mark.parametrize("module", [None, property(id)], ids=["None", "a property"])
def test_a_class_may_have_anything_as_its_module(module: object) -> None:
    """Its objects become immortal as those of any class."""
    cls = type("Generated", (), {"__module__": module})
    assert immortalize([cls()]).complete


def test_deep_tuples_are_no_danger() -> None:
    """A chain of tuples without end is walked, not hashed: a hash would need as much stack."""
    deep: tuple[Any, ...] = (text(4),)
    for _ in range(100_000):
        deep = (deep,)
    immortalize([deep])
    assert is_immortal(deep)
