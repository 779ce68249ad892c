"""Who holds a model that should be gone, or what grows: the way to it from a module, a class, a call or a thread.

Only the standard library is used, because a process that is looked at may have no modelguard. And no code of the
objects runs: a proxy that is asked for its class may open a connection, or raise.

The way is found backwards: one pass of the collector over all objects finds who refers to a few of them, and takes
0.07 s for a million objects. From all modules on, a table of what has been seen would take 80 bytes for each object.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import sys
import threading
import time
import traceback
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

#: How many containers are named, and of how many entries their size is estimated.
_NAMED, _SAMPLED = 4, 24
#: So many objects of an entry are weighed at most. A container with more entries belongs to no entry alone.
_WEIGHED = 3000
#: A dict with more entries is a table, and no namespace.
_TABLE = 10_000
#: References from a root to a container: so many at most, and so many objects at each distance.
_LONGEST, _WIDEST = 12, 8
#: What holds it because it is looked at, and calls that do nothing else.
_LOOKING = ("modelguard.diagnosis.", "modelguard.facts.", "modelguard.lifecycle._release", "modelguard_")
_OWN = (*_LOOKING, "the closure of modelguard.", "the thread 'modelguard-")
#: Seconds of CPU time after which a look ends, whatever is missing.
_PATIENCE = 8.0


class Held(NamedTuple):
    """A container that has grown, or objects of which each holds the one before."""

    path: str  # the way to it from a module, a class, a call or a thread; empty if none was found
    kind: str  # its type
    more: int  # by how many entries or objects it has grown
    of: str  # what the new ones are, and what they consist of for the most part
    size: int  # bytes of the new ones, estimated from a few of them
    #: The cause that these entries are themselves, as tasks and connections are; empty if they are only kept.
    about: str = ""
    #: What one of them does: where a task waits, what a traceback's frame holds; empty if that is not known.
    state: str = ""
    fix: str = ""  # what to do
    unit: str = "entries"  # what ``more`` counts
    table: int = 0  # bytes of ``size`` that are the container's own, for the places of these entries

    def __str__(self) -> str:
        where = self.path or "something without a name"
        return f"{where} ({self.kind}, +{self.more:,} {self.unit}) -> {self.of}" + (self.state and f", {self.state}")


def of_growth(grown: Any) -> list[Held]:
    """What holds what has grown; what weighs most comes first, and then what leaks something else than memory."""
    end = time.thread_time() + _PATIENCE
    weighed = []
    for more, length, one in grown.containers:
        newest = _newest(one, min(more, _SAMPLED))
        own = weight(one) if newest else sum(map(weight, _below((one,)).values()))  # a view, with what it shows
        entries = _weigh(newest, more, grown.native, own * more // length, {id(one)})
        if not entries.weak and time.thread_time() < end:
            weighed.append((entries, more, one))
    weighed.sort(key=lambda each: -each[0].size)
    found: list[Held] = []
    inside: set[int] = set()
    for at, (entries, more, one) in enumerate(weighed):
        if time.thread_time() > end or id(one) in inside:  # an entry of a container that is named already
            continue
        if len(found) >= _NAMED and (at > 2 * _NAMED or not entries.about[0]):
            continue
        inside |= entries.ids
        hidden = {id(grown.containers), id(grown.chains), id(weighed), *map(id, grown.containers), *map(id, weighed)}
        way = _find(one, hidden, end)
        # One object without a name is what another one shows, as the tensor below a view.
        if not way.text.startswith(_OWN) and (way.text or entries.ids):
            _add(_held(way, one, more, entries), found)
    found += _chained(grown, end)
    return sorted(found, key=lambda each: -each.size)


def _add(held: Held, found: list[Held]) -> None:
    """Add one. Those at the same way, such as the lists of a dict of lists, are one."""
    for at, each in enumerate(found):
        if held.path and (each.path, each.kind, each.of) == (held.path, held.kind, held.of):
            more, size, table = each.more + held.more, each.size + held.size, each.table + held.table
            found[at] = each._replace(more=more, size=size, table=table)
            return
    found.append(held)


def _chained(grown: Any, end: float) -> Iterator[Held]:
    for chain in grown.chains:
        if time.thread_time() > end or _is_program(chain.top) or _is(chain.top, types.FrameType):
            continue
        links = {id(type(one)) for one in (*chain.new, chain.top)}
        weight = _weigh([(one,) for one in chain.new], chain.more, grown.native, 0, links)
        hidden = {id(grown.chains), *map(id, grown.chains), *(id(each.new) for each in grown.chains)}
        way = _find(chain.top, hidden, end)
        if way.text and not way.text.startswith(_OWN):
            yield _held(way, chain.top, chain.more, weight, chain.new[0])


def _held(found: _Node, one: Any, more: int, weight: _Weight, link: Any = None) -> Held:
    kind, unit = name(type(one)), "entries" if link is None else "in a chain"
    if link is not None and type(link) is not type(one):
        unit = f"{name(type(link))} below it"
    (about, special, state), where = weight.about, found.text or f"the {kind}"
    if about:
        how = _FINISHED if state == "finished" else "give the wait a limit, asyncio.timeout(), or cancel them"
        fix = _FIXES[about].format(where=where, of=special, state=state, how=how)
    elif link is not None:
        fix = f"Cut the chain at {where}: each {name(type(link))} holds others, so all of them stay."
    elif where.startswith("the lru_cache of"):
        about, fix = "unbounded cache", f"Give {where} a size: functools.lru_cache(maxsize=1024)."
    else:
        about, fix = _bound(where, one, _owner(found))
    return Held(found.text, kind, more, weight.of, weight.size, about, state, fix, unit, weight.table)


def _bound(where: str, one: Any, owner: Any) -> tuple[str, str]:
    """The cause that a container is by what it is of, if any, and how to keep it from growing."""
    if (known := next((known for end, known in _STANDARD.items() if where.endswith(end)), "")) != "":
        return "", known
    if _comes_from(owner, _QUEUES):
        queue = where.removesuffix(_dotted(_attribute(owner, one)))
        limit = "submit less at a time" if queue.endswith("._work_queue") else "bound it: Queue(maxsize=100)"
        return "queues", f"Read what is put into {queue}, or {limit}."
    if _comes_from(owner, ("prometheus_client.metrics",)):
        return "metric labels", f"Take ids, paths and messages out of the labels of {where.rpartition('.')[0]}."
    if (keeper := _keeper(owner)) != "":
        return "", f"{where} is kept by Python's {keeper}, and takes no bound: {_ONCE}"
    if not _is(one, (dict, list, deque, set)):
        return "", f"Keep less in {where}: it is one {name(type(one))}, which calls make longer."
    like = "" if _is(one, (Counter, set)) else ", as cachetools.LRUCache(maxsize=1024) has"
    like = ", as collections.deque(maxlen=1000) has" if _is(one, (list, deque)) else like
    return "", f"Give {where} a bound{like}, or remove entries that are done with."


def name(kind: type) -> str:
    return f"{getattr(kind, '__module__', '?')}.{kind.__qualname__}".removeprefix("builtins.")


# Who refers to an object that should be gone

#: How many are named, and seconds of CPU time after which no further way is looked for.
MOST, _BRIEFLY = 5, 2.0
#: What is said where the collector, which ignores what is frozen, finds none; CPython 3.12 freezes 375 by itself.
_HIDDEN, FROZEN_AT_START = "itself, or an object that gc.freeze() hides from the garbage collector", 1000
#: Types of suspended calls, and how the names of their attributes begin.
_SUSPENDED = {types.GeneratorType: "gi", types.CoroutineType: "cr", types.AsyncGeneratorType: "ag"}


def of_object(watch: weakref.ref[Any]) -> tuple[str, ...]:
    """Who refers to an object: the way to each from a root, and its type; five of them at most."""
    target, end = watch(), time.thread_time() + _BRIEFLY
    if target is None:
        return ()
    found: dict[str, None] = {}
    # A plain loop: a comprehension or generator would itself hold `target`, and be found.
    referrers = gc.get_referrers(target)
    for referrer in referrers:
        way = _call(referrer) or path(target, {id(referrers)}, end=end, by=referrer)
        found[way or _kind(referrer)] = None
        if len(found) == MOST:
            break
    if not found and gc.get_freeze_count() > FROZEN_AT_START:
        return (_HIDDEN,)
    return tuple(found)


def is_counting() -> bool:
    """Whether another thread counts all objects now, as for a diagnosis: it holds what should be gone, too."""
    own = threading.get_ident()
    frames = [frame for thread, frame in sys._current_frames().items() if thread != own]  # noqa: SLF001 - as below
    running = (each.f_globals for frame in frames for each, _ in traceback.walk_stack(frame))
    return any(map("modelguard.diagnosis._census".__eq__, map(_module, running)))


def _kind(one: Any) -> str:
    kind = f"a {name(type(one))}"
    return f"{kind} of {len(one)}" if type(one) in {list, tuple, set, dict} else kind


def _call(referrer: Any) -> str:
    """What it is if it is a call that has ended or waits, or a method; empty if it is something else."""
    if _is(referrer, types.FrameType):  # the garbage collector does not track the frames of running calls
        return f"a traceback, through an ended call of {_line(referrer.f_code, referrer)}"
    for kind, its in _SUSPENDED.items():
        if _is(referrer, kind):
            return f"a suspended call of {_line(getattr(referrer, f'{its}_code'), getattr(referrer, f'{its}_frame'))}"
    return f"the bound method {referrer.__qualname__}" if _is(referrer, types.MethodType) else ""


def _line(code: types.CodeType, frame: types.FrameType | None) -> str:
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno if frame is None else frame.f_lineno})"


# What entries weigh


class _Weight(NamedTuple):
    """What entries are: their bytes, those of the container's table among them, and the cause that they prove."""

    size: int
    of: str
    ids: set[int]
    table: int = 0
    about: tuple[str, str, str] = ("", "", "")
    weak: bool = False


def _weigh(entries: list[tuple[Any, ...]], more: int, native: dict[str, int], table: int, outside: set[int]) -> _Weight:
    """Estimate what entries weigh, from some of them; what several of them share is not theirs."""
    if not entries:
        return _Weight(table, "bytes", set(), table)
    below = [_below(entry, outside) for entry in entries]
    shared = Counter(itertools.chain.from_iterable(below))
    kinds: Counter[str] = Counter()
    for each in below:
        for key, one in each.items():
            if shared[key] == 1 or len(below) == 1:
                kind = _SHOWN.get(name(type(one)), name(type(one)))
                kinds[kind] += weight(one) + native.get(kind, 0)
    outer = Counter(name(type(entry[-1])) for entry in entries).most_common(1)[0][0]
    heaviest = kinds.most_common(1)[0][0] if kinds else outer
    of = outer if heaviest == outer else f"{outer} -> {heaviest}"
    own = {key for key, times in shared.items() if times == 1} if len(below) > 1 else set(shared)
    about = _about([entries[0][-1], *(one for key, one in below[0].items() if key in own)])
    weak = all(_is(entry[-1], weakref.ReferenceType) for entry in entries)
    return _Weight(sum(kinds.values()) * more // len(entries) + table, of, own, table, about, weak)


#: Types that are shown as what a programmer has.
_SHOWN = {"torch.storage.UntypedStorage": "torch.Tensor"}


def _newest(container: Any, count: int) -> list[tuple[Any, ...]]:
    """The entries that came last, each as key and value or as a value alone; of a set, any of them."""
    with contextlib.suppress(RuntimeError):  # changed meanwhile
        if _is(container, dict):
            found: list[tuple[Any, ...]] = list(itertools.islice(reversed(dict.items(container)), count))
            linked = found and name(type(found[0][1])) == "functools._lru_list_elem"
            return _results(found, container) if linked else found
        for kind, entries in _ENTRIES:
            if _is(container, kind):
                return [(one,) for one in itertools.islice(entries(container), count)]
    return []


def _results(links: list[tuple[Any, ...]], table: dict[Any, Any]) -> list[tuple[Any, ...]]:
    """The keys and results of a bounded ``lru_cache``: its links show them to nobody, and the cache does."""
    kind = type(links[0][1])
    shown = next((gc.get_referents(cache) for cache in gc.get_referrers(table) if _is_cache(cache)), [])
    ends = [at for at, one in enumerate(shown) if one is kind][: len(table)]
    return [(shown[at - 2], shown[at - 1]) for at in ends[-len(links) :]]


_ENTRIES: tuple[tuple[type, Callable[[Any], Iterator[Any]]], ...] = (
    (list, list.__reversed__), (deque, deque.__reversed__), (set, set.__iter__),
)  # fmt: skip


def _below(entry: tuple[Any, ...], outside: Collection[int] = ()) -> dict[int, Any]:
    """The objects that an entry consists of, by id; of large containers in it, the container alone.

    Outside is what an entry may refer to, and of what type: its container, as timers do, and the links of a chain.
    """
    found: dict[int, Any] = {}
    # A module that a call has made is all the entry's own. It is not asked for what it refers to.
    imported = set() if id(sys.modules) in outside else set(map(id, sys.modules.values()))
    level = [_attributes(one) if _is(one, types.ModuleType) and id(one) not in imported else one for one in entry]
    own = {id(one) for one in level if _is(one, dict)}
    while level and len(found) < _WEIGHED:
        level = [one for one in level if id(one) not in found and not _is_program(one, own)][: _WEIGHED - len(found)]
        found.update((id(one), one) for one in level)
        below = [_base_of(one) for one in level]
        for one in level:
            referred = () if _is(one, threading.Thread) else gc.get_referents(one)
            if len(referred) <= 2 * _WEIGHED:
                below += referred
                below += dict.keys(one) if type(one) is dict else ()  # CPython shows the values alone
        level = [one for one in below if not (one is None or id(one) in outside or id(type(one)) in outside)]
    return found


def _base_of(one: Any) -> Any:
    """The array that a view shows, or a tensor's storage, which the collector is not told; None of anything else."""
    with contextlib.suppress(Exception):  # a sparse tensor has none
        if type(one).__module__ == "numpy" and hasattr(type(one), "base"):
            return one.base
        if name(type(one)) in {"torch.Tensor", "torch.nn.parameter.Parameter"}:
            return one.untyped_storage()
    return None


def _is(one: Any, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` by the type alone: proxies have a ``__class__`` of their own."""
    return issubclass(type(one), kinds)


def _is_program(one: Any, own: Collection[int] = ()) -> bool:
    """Whether it belongs to the program and not to an entry, whose own namespaces are these, by id."""
    if _is(one, types.BuiltinFunctionType):  # a method may be all that refers to its object, as to a task
        return one.__self__ is None or _is(one.__self__, (types.ModuleType, type))
    if _is(one, dict):
        return dict.__contains__(one, "__builtins__") and id(one) not in own
    return _is_imported(one, own) if _is(one, (type, types.FunctionType)) else _is(one, types.ModuleType)


def _is_imported(one: Any, own: Collection[int]) -> bool:
    """Whether a class or function is found by its name, as in a module; a call has made the others."""
    with contextlib.suppress(Exception):  # its module may be anything
        space, names = _attributes(sys.modules[one.__module__]), one.__qualname__.split(".")
        if space is not None and id(space) not in own and "<locals>" not in names:
            return names[0] in space if len(names) > 1 else space.get(names[0]) is one
    return False


def weight(one: Any) -> int:
    with contextlib.suppress(Exception):  # a foreign object may raise anything
        kind = name(type(one))
        if kind == "torch.storage.UntypedStorage":
            return int(one.nbytes())
        return sys.getsizeof(one, 0) + (len(one) if kind == "mmap.mmap" else 0)
    return 0


# What entries do


_ONCE = "add to it once, when the program starts, or take out at the end of each call what the call has added."
#: Tables of the standard library for which there is more to say than that they take no bound, by the end of the way.
_STANDARD = {
    "weakref.finalize._registry": "Each callback waits for an object that lives on: detach() it when its call ends.",
    "the event loop._scheduled": "Keep what call_later() returns, and cancel() it when its call ends.",
    ".__warningregistry__": "Leave ids out of the texts of warnings: each new text is kept.",
    ".manager.loggerDict": "Make one logger per module: they are never freed. Ids belong into messages or extra=.",
    "').handlers": "Call addHandler() once, when the program starts, or removeHandler() at the end of each call.",
    "posix.environ": "Put nothing of a call into os.environ: hand it over, or give it to a child process as env=.",
}
#: Whose containers are queues: the modules of their types.
_QUEUES = ("queue", "_queue", "asyncio.queues", "multiprocessing.queues")
#: Objects of the standard library whose attributes are the program's.
_SPACES = {"types.SimpleNamespace", "argparse.Namespace", "_thread._local", "threading.Thread", "threading._MainThread"}
#: What to do about entries that are a cause themselves.
_FIXES = {
    "tasks": "The tasks in {where} are {state}: {how}.",
    "threads": "The threads in {where} do not end: let their target return, or use one ThreadPoolExecutor for all.",
    "tracebacks": "Keep no exceptions in {where}, or let go of their frames: error.with_traceback(None), and "
    "raise ... from None where one exception holds another.",
    "connections": "Close each {of} when its call ends (contextlib.closing), or use one for all calls; {where} keeps "
    "them.",
    "mappings": "Close what is mapped, mmap.close(), and remove it from {where}.",
    "ssl contexts": "Make one client, or one SSLContext, for all requests; {where} keeps one for each.",
    "autograd": "Use torch.inference_mode(), or keep loss.item() and not the tensor in {where}.",
}
_FINISHED = "remove each when it is done, task.add_done_callback()"
_CONNECTION = ("Connection", "Client", "ClientSession", "Session", "socket", "Socket", "Transport", "Channel")


def _about(objects: Iterable[Any]) -> tuple[str, str, str]:
    """The cause that an object is itself, as which type, and what it does; of some objects the first that is one."""
    for one in objects:
        with contextlib.suppress(Exception):  # a foreign object may raise anything
            cause, state = _cause(one)
            if cause:
                return cause, name(type(one)), state
    return "", "", ""


def _cause(one: Any) -> tuple[str, str]:
    kind = type(one)
    if _is(one, BaseException):
        return ("tracebacks", _frames(one)) if one.__traceback__ is not None else ("", "")
    if kind.__name__ == "Task" and kind.__module__ in {"_asyncio", "asyncio.tasks"}:
        return "tasks", _waiting(one)
    if _is(one, threading.Thread):
        return "threads", _running(one)
    if name(kind) == "torch.Tensor":
        return "autograd" if one.grad_fn is not None else "", ""
    if kind.__name__.endswith(_CONNECTION) and any("close" in vars(each) for each in kind.__mro__):
        return "connections", ""
    return {"mmap.mmap": "mappings", "ssl.SSLContext": "ssl contexts"}.get(name(kind), ""), ""


def _frames(error: BaseException) -> str:
    heaviest, state = 0, ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        for variable, value in list(frame.f_locals.items()):
            size = sum(map(weight, _below((value,)).values())) if value is not error else 0
            if size > heaviest:
                where = _place(frame.f_code, line)
                heaviest, state = size, f"whose frame of {where} holds {variable} ({name(type(value))})"
    return state


def _waiting(task: Any) -> str:
    if task.done():
        return "finished"
    coroutine: Any = task.get_coro()
    state = "pending"
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        awaited = coroutine.cr_await
        if not _is_library(frame.f_code) or state == "pending":
            kind = name(type(awaited)) if awaited is not None else "its turn"
            what = getattr(awaited, "__qualname__", None) or kind
            state = f"pending in {_place(frame.f_code, frame.f_lineno)}, waiting for {what}"
        coroutine = awaited
    return state


def _running(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001 - CPython's own
    timed = (_attributes(thread) or {}).get("function") if _is(thread, threading.Timer) else None
    target = timed or getattr(thread, "_target", None) or type(thread).run
    state = f"running {getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', name(type(target)))}"
    while frame is not None and _is_library(frame.f_code):
        frame = frame.f_back
    return state if frame is None else f"{state} at {_place(frame.f_code, frame.f_lineno)}"


def _place(code: types.CodeType, line: int) -> str:
    return f"{code.co_qualname} ({os.path.basename(code.co_filename)} line {line})"  # noqa: PTH119 - as it is compiled


def _is_library(code: types.CodeType) -> bool:
    file = code.co_filename
    return "site-packages" not in file and file.startswith((os.path.dirname(os.__file__), "<frozen"))  # noqa: PTH120


# The way to a root


class _Node(NamedTuple):
    """A place on the way from a root to a container, and the place after it."""

    one: Any
    next: _Node | None = None
    text: str = ""  # the whole way, of a root


def path(target: Any, hidden: Iterable[int] = (), *, end: float = math.inf, by: Any = None) -> str:
    """The shortest way to an object from a module, a class, a call or a thread; empty if none is found.

    What is hidden, by id, is on no way. ``end`` is in this thread's CPU time. ``by`` is the last place on the way.
    """
    return _find(target, hidden, end, by).text


def _find(target: Any, hidden: Iterable[int], end: float, by: Any = None) -> _Node:
    # Of a module's names the first counts: where multiprocessing is imported, __main__ has another one.
    modules = {id(_attributes(module)): label for label, module in reversed(list(sys.modules.items()))}
    start = _Node(target)
    first = start if by is None else _before(by, [start], modules)
    while first.text == "":
        found = _search(first, modules, {id(target), id(first.one), *hidden}, end)
        if found.text or by is not None or time.thread_time() > end or not (unlisted := _unlisted(first.one)):
            return found
        first = _before(unlisted[0], [first], modules)
    return first


def _search(start: _Node, modules: dict[int, str], seen: set[int], end: float) -> _Node:
    calls = dict(_variables())
    level, running = [start], start
    for _ in range(_LONGEST):
        if not running.text:
            known = ((node, *calls[id(node.one)]) for node in level if id(node.one) in calls)
            ways = (node._replace(text=f"{variable}{_way(None, node)} {where}") for node, variable, where in known)
            running = next(ways, running)
        children = [node.one for node in level]
        found: list[_Node] = []
        seen |= {id(level), id(children), id(found), *map(id, level)}
        if time.thread_time() > end:
            break
        parents = [one for one in gc.get_referrers(*children) if id(one) not in seen]
        seen |= {id(parents), *map(id, parents)}
        parents.sort(key=lambda one: (id(one) not in modules, _is(one, (list, tuple))))
        for parent in parents[:_WIDEST]:
            if _is(parent, (types.FrameType, _Node)):
                continue
            before = _before(parent, level, modules)
            if before.text:
                return before
            found.append(before)
        if not found:
            break
        level = found
    return running  # whatever else refers to it is there longer than a call


def _unlisted(child: Any) -> list[Any]:
    """The dicts and tuples that refer to it and that the collector does not list, as nothing in them is listed."""
    # No modules, as in _refers; and of long lists there would be too much.
    listed = [one for one in gc.get_objects() if not _is(one, types.ModuleType)]
    listed = [one for one in listed if type(one) is not list or len(one) < _SAMPLED]
    found: list[Any] = []
    for at in range(0, len(listed), 500):
        below = itertools.filterfalse(gc.is_tracked, gc.get_referents(*listed[at : at + 500]))
        found += [one for one in below if _is(one, (dict, tuple))]
    for one in found:  # and in those
        found += [each for each in gc.get_referents(one) if _is(each, (dict, tuple))]
    return [one for one in found if _refers(one, child)]


def _before(parent: Any, level: list[_Node], modules: dict[int, str]) -> _Node:
    """What comes before some of these places on the way; with the whole way if it is a root."""
    node = next((each for each in level if _refers(parent, each.one)), level[0])
    if id(parent) in modules:
        return _Node(parent, node, f"{modules[id(parent)]}{_dotted(_key(parent, node.one))}{_way(parent, node)}")
    return _Node(parent, node, _root(parent, node))


def _owner(way: _Node) -> Any:
    """Whose attribute it is at the end of a way: an object, a class, the namespace of a module; None of an entry."""
    holders: list[Any] = []
    while way.next is not None:
        holders.insert(0, way.one)
        way = way.next
    for holder in holders:
        if _is(holder, (list, set, deque)):
            return None
        if _is(holder, types.FunctionType):
            return holder.__globals__
        if _is(holder, type) or (_is(holder, dict) and dict.__contains__(holder, "__spec__")):
            return holder
        if _attribute(holder, way.one) or _comes_from(holder, ("_queue", "_asyncio")):  # in C, without a name for it
            return holder
    return None


def _keeper(owner: Any) -> str:
    """What of the standard library an owner is; empty if it is another's."""
    kind = _module(owner) if type(owner) is dict else name(owner if _is(owner, type) else type(owner))
    return kind if kind.partition(".")[0] in sys.stdlib_module_names and kind not in _SPACES else ""


def _comes_from(one: Any, modules: tuple[str, ...]) -> bool:
    """Whether its type, or one of which that is made, is of one of these modules."""
    return any(getattr(kind, "__module__", "") in modules for kind in type(one).__mro__)


def _way(before: Any, node: _Node) -> str:
    """The way from a place on, which something else refers to."""
    way = ""
    while (after := node.next) is not None:
        way += _link(before, node.one, after.one)
        before, node = node.one, after
    return way


def _link(before: Any, one: Any, child: Any) -> str:
    """How an object holds another: by an attribute, or as an entry, whose key nobody should see."""
    if _is(one, dict):
        # Its keys are names only where it is the namespace of what comes before.
        own = one is _attributes(before) or (_is(before, type) and dict.__contains__(one, "__module__"))
        return (own and _dotted(_key(one, child))) or "[...]"
    if _is(one, (list, tuple, set, deque)):
        return "[...]"
    # The way from a namespace on names the attribute already.
    return "" if child is _attributes(one) else _dotted(_attribute(one, child))


def _variables() -> Iterator[tuple[int, tuple[str, str]]]:
    """What running calls have in their variables, by id: the collector does not know their frames."""
    for frame in sys._current_frames().values():  # noqa: SLF001 - CPython's own
        for running, _ in traceback.walk_stack(frame):
            code = running.f_code
            own = _module(running.f_globals).startswith(_LOOKING)
            if not own and code.co_name != "<module>":
                where = f"of the running call {running.f_globals.get('__name__', '?')}.{code.co_qualname}"
                yield from ((id(value), (variable, where)) for variable, value in list(running.f_locals.items()))


def _root(parent: Any, node: _Node) -> str:
    """The way from there on; empty if it is no root."""
    if _is(parent, type):
        return name(parent) + ("" if _is(node.one, dict) else f" -> {name(type(node.one))}") + _way(parent, node)
    if _is(parent, types.FunctionType):
        return _of_function(parent, node)
    if (what := next((_KEPT[kind] for kind in map(name, type(parent).__mro__) if kind in _KEPT), "")) != "":
        what = what.format(getattr(parent, "name", ""))
        return f"{what}{_dotted(_attribute(parent, node.one))}{_way(parent, node)}"
    if _is_cache(parent) and hasattr(parent, "__qualname__"):  # that of a connection of SQLite has none
        return f"the lru_cache of {getattr(parent, '__module__', '?')}.{parent.__qualname__}"
    if _is(parent, tuple(_SUSPENDED)):
        return f"the suspended call {parent.__qualname__}{_way(parent, node)}"
    return ""


#: Objects that the interpreter keeps, wherever else they are: what to call them.
_KEPT = {
    "asyncio.base_events.BaseEventLoop": "the event loop",
    "logging.Logger": "logging.getLogger({!r})",
    "logging.Manager": "logging.Logger.manager",
    "threading.Thread": "the thread {!r}",
}


def _module(namespace: dict[str, Any]) -> str:
    return str(getattr(namespace.get("__spec__"), "name", None) or namespace.get("__name__"))


def _is_cache(one: Any) -> bool:
    return type(one).__name__ == "_lru_cache_wrapper"


def _of_function(function: types.FunctionType, node: _Node) -> str:
    where, way = f"{_module(function.__globals__)}.{function.__qualname__}", _way(function, node)
    if function.__code__.co_qualname != function.__qualname__:  # under functools.wraps
        where = f"{function.__module__}.{function.__qualname__} ({function.__code__.co_qualname})"
    if node.one is function.__closure__ or _is(node.one, types.CellType):
        return f"the closure of {where}{way.removeprefix('[...]')}"
    if node.one is function.__defaults__ or node.one is function.__kwdefaults__:
        return f"a default argument of {where}{way.removeprefix('[...]')}"
    return f"{where}{way}"


def _refers(parent: Any, child: Any) -> bool:
    # Not of a module: that of _asyncio lists freed objects (CPython 3.12), which would then be freed once more.
    return not _is(parent, types.ModuleType) and any(one is child for one in gc.get_referents(parent))


def _attributes(one: Any) -> dict[Any, Any] | None:
    """The namespace of an object, without its own code; None if it has none."""
    with contextlib.suppress(Exception):  # a foreign object may raise anything
        if _is(one, types.ModuleType):
            found = vars(types.ModuleType)["__dict__"].__get__(one)
        else:
            found = object.__getattribute__(one, "__dict__")
        return found if type(found) is dict else None
    return None


def _key(holder: dict[Any, Any], child: Any) -> str:
    """The key by which a dict holds an object, if it is a name; of a large one, which is no namespace, none."""
    if dict.__len__(holder) > _TABLE:
        return ""
    items = list(dict.items(holder))
    return next((key for key, value in items if value is child and type(key) is str and key.isidentifier()), "")


def _attribute(holder: Any, child: Any) -> str:
    """The name of the attribute by which an object holds another; empty if it has none."""
    if (key := _key(_attributes(holder) or {}, child)) != "":
        return key
    for kind in type(holder).__mro__:
        for slot, member in list(vars(type)["__dict__"].__get__(kind).items()):
            if type(member) is types.MemberDescriptorType:
                with contextlib.suppress(Exception):  # it is empty
                    if member.__get__(holder) is child:
                        return str(slot)
    return ""


def _dotted(attribute: str) -> str:
    return f".{attribute}" if attribute else ""
