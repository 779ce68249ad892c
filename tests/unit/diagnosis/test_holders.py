"""Who holds what grows: the containers, what is in them, and the way to each."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import ClassVar, NoReturn
from unittest import mock

import pytest

from modelguard.diagnosis import _census, _holders

CODE = """
import functools, collections

class Chat:
    sessions = {}
    def __init__(self):
        self.history = []
        self.cache = collections.OrderedDict()

class Slotted:
    __slots__ = ("kept",)
    def __init__(self):
        self.kept = []

@functools.lru_cache(maxsize=None)
def cached(given):
    return str(given) * 50

def make():
    kept = []
    def closure(given):
        kept.append(bytes(400))
    return closure

def default(given, kept=[]):
    kept.append(str(given) * 50)

def generator():
    kept = []
    while True:
        kept.append(str((yield)) * 50)

def fails(given):
    large = bytes(4000)
    raise ValueError(given)

chat, slotted, closure, suspended = Chat(), Slotted(), make(), generator()
next(suspended)
texts, errors, buffer, nested, recent = {}, [], bytearray(), {"a": {"b": []}}, collections.deque()

def keep_in_sessions(given):
    Chat.sessions[given] = {"state": bytes(4000)}

def keep_in_history(given):
    chat.history.append(str(given) * 50)

def keep_in_cache(given):
    chat.cache[given] = str(given) * 50

def keep_in_slot(given):
    slotted.kept.append({"given": given})

def keep_in_texts(given):
    texts[f"日本語 {given}"] = "語" * 50

def keep_in_buffer(given):
    buffer.extend(bytes(100))

def keep_nested(given):
    nested["a"]["b"].append([given])

def keep_recent(given):
    recent.append(str(given) * 50)

def send(given):
    suspended.send(given)

def keep_error(given):
    try:
        fails(given)
    except ValueError as error:
        errors.append(error)
"""


def grown(before: _census.Moment, calls: int) -> list[_holders.Held]:
    return _holders.named(_census.grown(before, calls))


@pytest.fixture
def app() -> Iterator[types.ModuleType]:
    module = types.ModuleType("held_app")
    sys.modules["held_app"] = module
    exec(CODE, module.__dict__)
    yield module
    del sys.modules["held_app"]


@pytest.mark.parametrize(
    ("function", "path", "kind", "of"),
    [
        ("keep_in_sessions", "held_app.Chat.sessions", "dict", "dict -> bytes"),
        ("keep_in_history", "held_app.chat.history", "list", "str"),
        ("keep_in_cache", "held_app.chat.cache", "collections.OrderedDict", "str"),
        ("keep_in_slot", "held_app.slotted.kept", "list", "dict"),
        ("keep_in_texts", "held_app.texts", "dict", "str"),
        ("keep_in_buffer", "held_app.buffer", "bytearray", "bytes"),
        ("keep_nested", "held_app.nested[...][...]", "list", "list"),
        ("keep_recent", "held_app.recent", "collections.deque", "str"),
        ("cached", "the lru_cache of held_app.cached", "dict", "str"),
        ("closure", "the closure of held_app.make.<locals>.closure", "list", "bytes"),
        ("default", "a default argument of held_app.default", "list", "str"),
        ("send", "the suspended call generator", "list", "str"),
        ("keep_error", "held_app.errors", "list", "ValueError -> bytes"),
    ],
)
def test_what_grows_is_named_with_its_way(app: types.ModuleType, function: str, path: str, kind: str, of: str) -> None:
    """The container with the most new bytes comes first: its way, its type, what is in it, by how many it has grown."""
    for number in range(100):
        getattr(app, function)(number)
    before = _census.moment()
    for number in range(100, 600):
        getattr(app, function)(number)
    gc.collect()
    found = grown(before, 500)[0]
    assert (path, kind, of) == (found.path, found.kind, found.of)
    assert (50_000 if kind == "bytearray" else 500) == found.more
    assert ("tracebacks" if function == "keep_error" else "") == found.about.replace("unbounded cache", "")
    assert found.size > 0


def test_keys_are_not_shown(app: types.ModuleType) -> None:
    """The keys of a table may be secrets, so only names of the program are part of a way, wherever the table is."""
    app.texts["sk_secret"] = {"sk_token": [1]}
    app.chat.cache = {"sk_secret": [1]}
    app.slotted.kept = {"sk_secret": [1]}
    app.Chat.sessions["sk_secret"] = [1]
    assert "held_app.texts[...][...]" == _holders.path(app.texts["sk_secret"]["sk_token"])
    assert "held_app.chat.cache[...]" == _holders.path(app.chat.cache["sk_secret"])
    assert "held_app.slotted.kept[...]" == _holders.path(app.slotted.kept["sk_secret"])
    assert "held_app.Chat.sessions[...]" == _holders.path(app.Chat.sessions["sk_secret"])


class Raises:
    """Whatever it is asked, it raises."""

    ran: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> object:
        Raises.ran.append(name)
        raise RuntimeError(name)

    __len__ = __iter__ = __contains__ = __reversed__ = __bool__ = __eq__ = __hash__ = None  # type: ignore[assignment]


class NoHash(type):
    """Its classes cannot be keys."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


class OfNoHash(metaclass=NoHash):
    pass


class Table(dict[str, object]):
    """A dict that cannot be used."""

    def __contains__(self, key: object) -> bool:
        raise RuntimeError

    def items(self) -> NoReturn:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


def test_no_code_of_objects_runs(app: types.ModuleType) -> None:
    """What leaks may be proxies, mocks, or broken: it is named all the same, and asked for nothing."""
    gone = weakref.proxy(Raises())
    before = _census.moment()
    for _ in range(50):
        app.errors.extend([gone, Raises(), OfNoHash(), Table(a=1), mock.Mock(spec=dict), bytes(20_000)])
    held = next(held for held in grown(before, 50) if held.path == "held_app.errors")
    assert ("list", 300, []) == (held.kind, held.more, Raises.ran)


def test_a_list_that_is_made_anew_has_not_grown(app: types.ModuleType) -> None:
    """A window over the latest texts is a new object after each call, and as long as the one before."""
    app.recent = [str(number) for number in range(1000)]
    before = _census.moment()
    for number in range(501):
        app.recent = [*app.recent[1:], str(number)]
    assert [] == [held for held in grown(before, 501) if held.path.startswith("held_app")]


def test_views_weigh_what_they_show(app: types.ModuleType) -> None:
    """A reshaped array keeps the array that it shows."""
    numpy = pytest.importorskip("numpy")
    before = _census.moment()
    for _ in range(50):
        app.errors.append(numpy.zeros(10_000).reshape(100, -1))
    held = grown(before, 50)[0]
    assert ("held_app.errors", "numpy.ndarray") == (held.path, held.of)
    assert 50 * 80_000 <= held.size < 50 * 90_000


def test_a_variable_of_a_running_call_is_named() -> None:
    """A list that only a call refers to has the names of its variable and of the call."""
    kept: list[int] = []
    assert _holders.path(kept).startswith("kept of the running call")
    assert _holders.path(kept).endswith("test_a_variable_of_a_running_call_is_named")


def test_what_only_changes_is_not_named(app: types.ModuleType) -> None:
    """A container that loses as much as it gets has not grown."""
    for number in range(1000):
        app.keep_recent(number)
    before = _census.moment()
    for number in range(1000):
        app.keep_recent(number)
        app.recent.popleft()
    assert [] == [held for held in grown(before, 1000) if held.path.startswith("held_app")]


def test_what_entries_share_is_not_theirs(app: types.ModuleType) -> None:
    """A table of one megabyte to which all entries refer does not count once for each."""
    app.table = table = {number: str(number) for number in range(10_000)}
    before = _census.moment()
    for number in range(500):
        app.Chat.sessions[number] = {"table": table, "number": number}
    found = grown(before, 500)[0]
    assert ("held_app.Chat.sessions", 500) == (found.path, found.more)
    assert found.size < 500 * 1000
