"""Who holds what grows: the containers, what is in them, and the way to each."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import sqlite3
import sys
import types
import weakref
from collections.abc import Iterator
from typing import ClassVar, NoReturn
from unittest import mock

import pytest
from tests.unit.of_no_module import SwigPyObject

from modelguard.diagnosis import _census
from modelguard.facts import _holders

shows_items = pytest.mark.skipif(sys.version_info >= (3, 13), reason="known: a SimpleQueue shows no items there")

CODE = """
import asyncio, collections, concurrent.futures, contextlib, functools, io, logging, mmap, multiprocessing
import queue, sched, socket, sqlite3, threading, types

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

@functools.lru_cache(maxsize=100_000)
def embed(given):
    return [str(given) * 50]

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

loggers, __warningregistry__ = logging.Manager(logging.root), {}

def set_timer(given):
    loops[0].call_later(1000, bytes(400).count, b"")

executor = concurrent.futures.ThreadPoolExecutor(1)

def submit(given):
    executor.submit(over.wait)

def make_logger(given):
    loggers.getLogger(f"request-{given}")

def warn(given):
    __warningregistry__[f"{given} is slow", UserWarning, 1] = True

def keep_recent(given):
    recent.append(str(given) * 50)

by_user = {"a": [], "b": [], "c": []}

def keep_by_user(given):
    by_user["abc"[given % 3]].append(str(given) * 50)

def send(given):
    suspended.send(given)

class Node:
    def __init__(self, before=None):
        self.before, self.after, self.data = before, None, bytes(400)

class Leaf:
    def __init__(self, number):
        self.number, self.left, self.right = number, None, None

newest, first, tail, tree = None, Node(), Node(), Leaf(0)
handler, last_error = None, None
mapped, connections, sockets, tasks, threads, loops, stream = [], [], {}, set(), [], [], io.BytesIO()
over, never = threading.Event(), []

def link(given):
    global newest
    newest = Node(newest)

def link_at_the_end(given):
    one = first
    while one.after is not None:
        one = one.after
    one.after = Node()

def link_both_ways(given):
    global tail
    tail.after = Node(tail)
    tail = tail.after

def grow_tree(given):
    one, number = tree, given * 7919 % 10007
    while True:
        side = "left" if number < one.number else "right"
        if getattr(one, side) is None:
            return setattr(one, side, Leaf(number))
        one = getattr(one, side)

def wrap(given):
    global handler
    inner, data = handler, bytes(400)
    handler = lambda: (inner, data)

def chain_errors(given):
    global last_error
    large = bytes(4000)
    try:
        raise ValueError(given) from last_error
    except ValueError as error:
        last_error = error

def map_memory(given):
    mapped.append(mmap.mmap(-1, 16384))

def connect(given):
    connection = sqlite3.connect(":memory:")
    connection.execute("create table words (word)")
    connections.append(connection)

def open_sockets(given):
    sockets[given] = {"socket": socket.socket()}

def write(given):
    stream.write(bytes(100))

async def wait_for_ever(given):
    data = bytes(1000)
    await never[0].wait()

async def finish(given):
    return bytes(1000)

async def start(work, given):
    never or never.append(asyncio.Event())
    task = asyncio.create_task(work(given))
    tasks.add(task)
    if work is wait_for_ever:
        task.add_done_callback(tasks.discard)
    else:
        await task
    loop_turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(loop_turn.set)
    await loop_turn.wait()

def wait_in_task(given):
    loops[0].run_until_complete(start(wait_for_ever, given))

def finish_task(given):
    loops[0].run_until_complete(start(finish, given))

def start_timer(given):
    if given % 4 == 0:
        threads.append(threading.Timer(1000, give_up))
        threads[-1].start()

def give_up():
    pass

def remember(function):
    seen = {}
    @functools.wraps(function)
    def wrapper(given):
        seen[given] = function(given)
    return wrapper

@remember
def answer(given):
    return str(given) * 50

def start_thread(given):
    if given % 4 == 0:
        threads.append(threading.Thread(target=block, daemon=True))
        threads[-1].start()

def block():
    over.wait()

logger, stack, timers, futures = logging.Logger("of_held_app"), contextlib.ExitStack(), sched.scheduler(), []

def add_handler(given):
    logger.addHandler(logging.StreamHandler(io.StringIO()))

def enter(given):
    stack.callback(str, given)

def enter_time(given):
    timers.enter(1000, 1, print)

def add_callback(given):
    futures or futures.append(loops[0].create_future())
    global future
    future = futures[0]
    future.add_done_callback(lambda done: given)

@functools.singledispatch
def show(given):
    return str(given)

def register(given):
    show.register(type("Of", (), {}), lambda shown: given)

class Router:
    def __init__(self):
        self.queue, self._work_queue, self._metrics = {}, [], {}

class Jobs(queue.Queue):
    pass

router, jobs, simple, of_loop = Router(), Jobs(), queue.SimpleQueue(), asyncio.Queue()
counter, tables = collections.Counter(), type("Ordered", (collections.OrderedDict,), {})()

def route(given):
    router.queue[given] = str(given) * 50

def work(given):
    router._work_queue.append(str(given) * 50)

def measure(given):
    router._metrics[given] = str(given) * 50

def put(given):
    jobs.put(str(given) * 50)

def put_simply(given):
    simple.put(str(given) * 50)

def put_in_loop(given):
    of_loop.put_nowait(str(given) * 50)

def count(given):
    counter[given] += 1

def keep_in_order(given):
    tables[given] = str(given) * 50

latest = {}

def link_dicts(given):
    global latest
    latest = {"given": str(given) * 50, "before": latest}

class State:
    latest = {}

def link_dicts_of_a_class(given):
    State.latest = {"given": str(given) * 50, "before": State.latest}

def copy_history(given):
    chat.history = [*chat.history, str(given) * 50]

classes, modules, functions = [], {}, []

def make_class(given):
    classes.append(type("Made", (State,), {"texts": [f"{given} {at}" for at in range(40)]}))

def make_module(given):
    modules[given] = made = types.ModuleType(f"made_{given}")
    exec(f"texts = [f'{given} {{at}}' for at in range(40)]", made.__dict__)

def make_function(given):
    space = {"__name__": "made"}
    exec(f"def made(texts=[f'{given} {{at}}' for at in range(40)]): pass", space)
    functions.append(space["made"])

def set_timer_with_data(given):
    texts = [f"{given} {at}" for at in range(40)]
    loops[0].call_later(1000, lambda: texts)

def keep_error(given):
    try:
        fails(given)
    except ValueError as error:
        errors.append(error)
"""


def grown(before: _census.ObjectCounts, calls: int) -> list[_holders.Held]:
    return _holders.of_growth(_census.grown(before, calls))


@pytest.fixture
def app() -> Iterator[types.ModuleType]:
    gc.collect()  # what an earlier test has left
    module = types.ModuleType("held_app")
    sys.modules["held_app"] = module
    exec(compile(CODE, "held_app.py", "exec"), module.__dict__)
    yield module
    del sys.modules["held_app"]
    module.over.set()
    for each in module.threads:
        getattr(each, "cancel", each.is_alive)()
    for each in (*module.threads, *module.connections, *(one["socket"] for one in module.sockets.values())):
        (each.join if each in module.threads else each.close)()


@pytest.fixture
def loop(app: types.ModuleType) -> Iterator[None]:
    """A loop for the tasks of the app; in the end those that wait are cancelled."""
    with asyncio.Runner() as runner:
        app.loops.append(runner.get_loop())
        yield


def grown_by(app: types.ModuleType, function: str, calls: int = 500) -> list[_holders.Held]:
    """What a function has let grow, after a warm-up."""
    for number in range(100):
        getattr(app, function)(number)
    gc.collect()
    before = _census.moment()
    for number in range(100, 100 + calls):
        getattr(app, function)(number)
    gc.collect()
    return grown(before, calls)


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
        ("embed", "the lru_cache of held_app.embed", "dict", "list -> str"),
        ("closure", "the closure of held_app.make.<locals>.closure", "list", "bytes"),
        ("answer", "the closure of held_app.answer (remember.<locals>.wrapper)", "dict", "str"),
        ("default", "a default argument of held_app.default", "list", "str"),
        ("send", "the suspended call generator", "list", "str"),
        ("keep_error", "held_app.errors", "list", "ValueError -> bytes"),
    ],
)
def test_what_grows_is_named_with_its_way(app: types.ModuleType, function: str, path: str, kind: str, of: str) -> None:
    """The container with the most new bytes comes first: its way, its type, what is in it, by how many it has grown."""
    found = grown_by(app, function)[0]
    assert (path, kind, of) == (found.path, found.kind, found.of)
    assert (50_000 if kind == "bytearray" else 500) == found.more
    assert ("tracebacks" if function == "keep_error" else "") == found.about.replace("unbounded cache", "")
    assert found.size > 0


@pytest.mark.parametrize(
    ("function", "path", "kind"),
    [
        ("link", "held_app.newest", "held_app.Node"),
        ("link_at_the_end", "held_app.first", "held_app.Node"),
        ("link_both_ways", "held_app.t", "held_app.Node"),
        ("grow_tree", "held_app.tree", "held_app.Leaf"),
        ("wrap", "held_app.handler", "function"),
        ("chain_errors", "held_app.last_error", "ValueError"),
        ("link_dicts", "held_app.latest", "dict"),
        ("link_dicts_of_a_class", "held_app.State.latest", "dict"),
    ],
)
def test_a_chain_is_named_where_it_begins(app: types.ModuleType, function: str, path: str, kind: str) -> None:
    """Objects that hold each other, in no container: the one to which something else refers."""
    found = grown_by(app, function)[0]
    assert (kind, "in a chain") == (found.kind, found.unit)
    assert 500 <= found.more < 510  # dicts are made by the way
    assert found.path.startswith(path)
    assert found.size > 500 * 48
    assert ("raise ... from None" if found.about == "tracebacks" else f"Cut the chain at {found.path}") in found.fix


def test_a_chain_of_many_is_named_too(app: types.ModuleType) -> None:
    """A quick function makes hundreds of thousands of objects before its memory is judged."""
    assert "held_app.newest" == grown_by(app, "link", 150_000)[0].path


def test_containers_at_one_way_are_one_holder(app: types.ModuleType) -> None:
    """As the lists in a dict of lists: what all of them keep is added up."""
    found = grown_by(app, "keep_by_user", 600)
    assert [("held_app.by_user[...]", 600)] == [(held.path, held.more) for held in found]


@pytest.mark.parametrize(
    ("function", "about", "of", "said"),
    [
        ("map_memory", "mappings", "mmap.mmap", ("", "mmap.close(), and remove it from held_app.mapped")),
        ("connect", "connections", "sqlite3.Connection", ("", "Close each sqlite3.Connection when its call ends")),
        ("open_sockets", "connections", "dict", ("", "Close each socket.socket when its call ends")),
        ("keep_error", "tracebacks", "ValueError", ("whose frame of fails (held_app.py line", "error.with_traceback")),
        ("wait_in_task", "tasks", "_asyncio.Task", ("pending in wait_for_ever (held_app.py line", "asyncio.timeout()")),
        ("finish_task", "tasks", "_asyncio.Task", ("finished", "remove each when it is done")),
        ("start_timer", "threads", "threading.Timer", ("running held_app.give_up", "do not end")),
        ("start_thread", "threads", "threading.Thread", ("running held_app.block at block (held_app.py", "do not end")),
    ],
)
@pytest.mark.usefixtures("loop")
def test_what_entries_are_is_said_with_a_fix(
    app: types.ModuleType, function: str, about: str, of: str, said: tuple[str, str]
) -> None:
    """What leaks something else than memory, or waits, or holds frames: what it does, and what to do about it."""
    found = next(held for held in grown_by(app, function, 200) if held.about == about)
    assert found.of.startswith(of)
    assert found.state.startswith(said[0])
    assert said[1] in found.fix
    assert ("large (bytes)" in found.state) == (function == "keep_error")
    assert ("waiting for Event.wait" in found.state) == (function == "wait_in_task")


@pytest.mark.parametrize(
    ("function", "path", "said"),
    [
        ("set_timer", "the event loop._scheduled", "cancel() it"),
        pytest.param(
            "submit",
            "held_app.executor._work_queue",
            "submit less at a time",
            marks=shows_items,
        ),
        ("make_logger", "logging.Logger.manager.loggerDict", "one logger per module"),
        ("warn", "held_app.__warningregistry__", "texts of warnings"),
        ("add_handler", "logging.getLogger('of_held_app').handlers", "Call addHandler() once"),
        ("enter", "held_app.stack._exit_callbacks", "kept by Python's contextlib.ExitStack"),
        ("enter_time", "held_app.timers._queue", "kept by Python's sched.scheduler"),
        ("keep_in_texts", "held_app.texts", "kept by Python's held_app, and takes no bound"),
        ("add_callback", "held_app.future", "kept by Python's _asyncio.Future"),
        ("register", "held_app.show (singledispatch.<locals>.wrapper).registry", "kept by Python's functools"),
    ],
)
@pytest.mark.usefixtures("loop")
def test_tables_of_the_standard_library_are_not_to_be_bounded(
    app: types.ModuleType, function: str, path: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can give them a bound: the fix says what to do in the program. Loggers go by their own names."""
    if function == "keep_in_texts":  # as if it were linecache, whose own dict another test may have frozen
        monkeypatch.setattr(sys, "stdlib_module_names", {"held_app", *sys.stdlib_module_names})
    found = grown_by(app, function)[0]
    assert path == found.path
    assert said in found.fix
    assert "a bound" not in found.fix


@pytest.mark.parametrize(
    ("function", "about", "said"),
    [
        ("route", "", "Give held_app.router.queue a bound, as cachetools.LRUCache"),
        ("work", "", "Give held_app.router._work_queue a bound, as collections.deque"),
        ("measure", "", "Give held_app.router._metrics a bound, as cachetools.LRUCache"),
        ("put", "queues", "Read what is put into held_app.jobs, or bound it"),
        pytest.param(
            "put_simply",
            "queues",
            "Read what is put into held_app.simple, or bound it",
            marks=shows_items,
        ),
        ("put_in_loop", "queues", "Read what is put into held_app.of_loop, or bound it"),
        ("count", "", "Give held_app.counter a bound, or remove"),
        ("keep_in_order", "", "Give held_app.tables a bound, as cachetools.LRUCache"),
        ("keep_in_buffer", "", "it is one bytearray, which calls make longer"),
    ],
)
def test_the_fix_goes_by_the_type_and_not_by_the_name(
    app: types.ModuleType, function: str, about: str, said: str
) -> None:
    """A dict that is called queue is no queue, and only what can have a bound is to get one."""
    found = grown_by(app, function)[0]
    assert about == found.about
    assert said in found.fix


@pytest.mark.parametrize("function", ["make_class", "make_module", "make_function", "set_timer_with_data"])
@pytest.mark.usefixtures("loop")
def test_what_a_call_has_made_weighs_all_that_it_consists_of(app: types.ModuleType, function: str) -> None:
    """Classes, modules and functions too; and not the program to which they refer, nor what holds them."""
    found = grown_by(app, function, 2000)[0]
    assert 2000 == found.more
    assert 2000 * 40 * 50 < found.size < 2000 * 6000


def test_the_program_weighs_nothing(app: types.ModuleType) -> None:
    """An entry that refers to a class or module of the program by the way does not consist of it."""
    app.errors = [None] * 100
    before = _census.moment()
    app.errors += [(number, each) for number, each in enumerate(list(sys.modules.values())[:200])]
    app.errors += [app.Node() for _ in range(200)]
    assert grown(before, 200)[0].size < 400 * 800


def test_connections_weigh_what_sqlite_has(app: types.ModuleType) -> None:
    """SQLite says how much memory its connections have; Python knows of 200 bytes each."""
    before, bytes_before = _census.look()[0], _census.look()[0]["sqlite bytes"]
    found = grown_by(app, "connect", 100)[0]
    after = _census.look()[0]
    assert 200 == after["connections"] - before.get("connections", 0)
    assert 200 * 10_000 < after["sqlite bytes"] - bytes_before
    assert 100 * 10_000 < found.size


def test_metrics_are_emptied_only_if_they_have_more_series() -> None:
    """Else what another thread frees in that moment, as a replaced model, would count as theirs."""
    client = pytest.importorskip("prometheus_client")
    metrics = [client.Counter(f"modelguard_tests_{name}", "For this test.", ["id"]) for name in ("few", "many")]
    try:
        sizes = _census.cache_sizes()
        for metric, series in zip(metrics, (1, 100), strict=True):
            for number in range(series):
                metric.labels(number)
        names = [name for name, _ in _census.caches(sizes)]
    finally:
        for metric in metrics:
            client.REGISTRY.unregister(metric)
    assert ["metric:modelguard_tests_many"] == [name for name in names if "modelguard_tests" in name]


@pytest.mark.parametrize("own", [{}, None], ids=["more and more", "none"])
def test_collectors_of_the_application_are_no_metrics(own: dict[int, int] | None) -> None:
    """What they keep under the same name is their own, and `clear` may be missing, or do anything."""
    client = pytest.importorskip("prometheus_client")

    class Store:
        _metrics = own

        def collect(self) -> list[object]:
            return []

    store = Store()
    client.REGISTRY.register(store)
    try:
        sizes = _census.cache_sizes()
        if own is not None:
            own.update((number, number) for number in range(1000))
        names = [name for name, _ in _census.caches(sizes)]
    finally:
        client.REGISTRY.unregister(store)
    assert "metric:?" not in names


def test_a_connection_is_held_by_what_refers_to_it(app: types.ModuleType) -> None:
    """And not by its own cache of statements, which refers to it too."""
    with contextlib.closing(sqlite3.connect(":memory:")) as app.chat.database:
        app.chat.database.execute("select 1")
        assert "held_app.chat.database" == _holders.path(app.chat.database)


def test_a_buffer_is_a_container(app: types.ModuleType) -> None:
    """What is written to a stream in memory is held by it."""
    assert "held_app.stream" == grown_by(app, "write", 1000)[0].path


@pytest.mark.usefixtures("loop")
def test_the_collector_works_on_after_a_look(app: types.ModuleType) -> None:
    """No module is asked for what it refers to: _asyncio of CPython 3.12 lists freed objects, to be freed once more."""
    grown_by(app, "finish_task", 200)
    assert gc.collect() >= 0
    assert gc.get_referrers(app.tasks) != []


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
    app.errors.extend([None] * 20)
    before = _census.moment()
    for _ in range(50):
        app.errors.extend([gone, Raises(), OfNoHash(), Table(a=1), mock.Mock(spec=dict), bytes(20_000)])
    gc.collect()  # what making a mock leaves in cycles, which a free-threaded build collects later
    held = next(held for held in grown(before, 50) if held.path == "held_app.errors")
    assert ("list", 300, []) == (held.kind, held.more, Raises.ran)


def test_a_list_that_is_made_anew_has_not_grown(app: types.ModuleType) -> None:
    """A window over the latest texts is a new object after each call, and as long as the one before."""
    app.recent = [str(number) for number in range(1000)]
    before = _census.moment()
    for number in range(501):
        app.recent = [*app.recent[1:], str(number)]
    assert [] == [held for held in grown(before, 501) if held.path.startswith("held_app")]


@pytest.mark.parametrize("kind", ["str", "bytes", "numpy.ndarray", "torch.Tensor"])
@pytest.mark.parametrize("where", ["text", "nested[...]", "by_user[...][...]", "latest[...][...]", "chat.text"])
def test_one_object_that_gets_longer_is_held_by_name(app: types.ModuleType, kind: str, where: str) -> None:
    """Each call replaces it by a longer one: what counts is the difference."""

    def set_length(length: int) -> None:
        if kind in {"str", "bytes"}:
            made: object = "x" * length if kind == "str" else bytes(length)
        else:
            module = pytest.importorskip(kind.partition(".")[0])
            made = module.zeros(length // 4, dtype=module.float32).reshape(2, -1)
        if where == "by_user[...][...]":
            app.by_user["a"] = [made]
        elif where == "nested[...]":
            app.nested = {"a": made}
        elif where == "latest[...][...]":
            app.latest = (1, {"a": made})
        else:
            (app.chat if where == "chat.text" else app).text = made

    set_length(400_000)
    before = _census.moment()
    for number in range(1, 11):
        set_length(400_000 + number * 100_000)
    found = grown(before, 10)
    assert [(f"held_app.{where}", kind, "bytes")] == [(held.path, held.kind, held.of) for held in found]
    assert 1_000_000 == pytest.approx(found[0].size, rel=0.01)
    assert found[0].size == found[0].table


def test_a_longer_copy_has_grown_by_the_difference(app: types.ModuleType) -> None:
    """A list that each call makes anew, with one entry more."""
    app.chat.history = first = ["a"] * 100
    before = _census.moment()
    for number in range(500):
        app.copy_history(number)
    assert first is not app.chat.history
    del first
    found = grown(before, 500)[0]
    assert ("held_app.chat.history", 500) == (found.path, found.more)


def test_views_weigh_what_they_show(app: types.ModuleType) -> None:
    """A reshaped array keeps the array that it shows."""
    numpy = pytest.importorskip("numpy")
    before = _census.moment()
    for _ in range(50):
        app.errors.append(numpy.zeros(10_000).reshape(100, -1))
    held = grown(before, 50)[0]
    assert ("held_app.errors", "numpy.ndarray") == (held.path, held.of)
    assert 50 * 80_000 <= held.size < 50 * 90_000


def test_types_may_have_no_module(app: types.ModuleType) -> None:
    """As those of C libraries: the container is named all the same, and the objects are counted."""
    before = _census.moment()
    app.errors += [SwigPyObject() for _ in range(200)]
    assert ["held_app.errors (list, +200 entries) -> ?.SwigPyObject"] == [str(held) for held in grown(before, 200)]
    assert 200 == _census.look()[1]["?.SwigPyObject"]


def test_a_queue_that_is_being_made_has_no_items_yet() -> None:
    """Another thread may stand between its creation and its first line: the rest is counted."""
    begun, full = (queue.Queue.__new__(queue.Queue), queue.Queue[int]())  # type: ignore[type-arg] # as it is called
    before = _census.look()[0].get("queued items", 0)
    full.put(1)
    assert before + 1 == _census.look()[0]["queued items"]
    del begun


def test_a_variable_of_a_running_call_is_named() -> None:
    """A list that only a call refers to has the names of its variable and of the call."""
    kept: list[int] = []
    assert _holders.path(kept).startswith("kept of the running call")
    assert _holders.path(kept).endswith("test_a_variable_of_a_running_call_is_named")
    named = {"key": [1]}
    found = _holders.path(named["key"])
    assert found.startswith("named[...] of the running call")


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
    app.Chat.sessions.update(dict.fromkeys("abcdefghijklmnopqrst"))
    before = _census.moment()
    for number in range(500):
        app.Chat.sessions[number] = {"table": table, "number": number}
    found = grown(before, 500)[0]
    assert ("held_app.Chat.sessions", 500) == (found.path, found.more)
    assert found.size < 500 * 1000


def test_a_look_keeps_nothing() -> None:
    """What is deleted after a look is gone at once, and not with the next collection."""
    looks = (_census.look, lambda: _census.grown(_census.moment(), 100))
    gc.disable()
    try:
        for look in looks:
            one = Probe()
            gone = weakref.ref(one)
            look()
            del one
            assert gone() is None, look
    finally:
        gc.enable()


class Probe:
    """Something to look at."""
