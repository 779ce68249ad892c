"""Support for spaCy pipelines, and ways to limit the growth of their memory.

A pipeline keeps every word that it has ever seen. A memory zone frees the words of one call at its end; :func:`zoned`
gives each call its own zone, safely. A zone cannot free the tables that index the words: :class:`IndexGrowth` reloads
the pipeline when these have grown.
"""

from __future__ import annotations

import contextvars
import dataclasses
import inspect
import threading
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, suppress
from contextvars import ContextVar
from importlib.metadata import version
from itertools import islice
from types import CoroutineType, MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from modelguard import _extras, _units
from modelguard.errors import EscapedResult, InvalidOption, NotSupported, Overloaded
from modelguard.lifecycle._engine import is_lazy
from modelguard.lifecycle._lease import Guarded
from modelguard.lifecycle._misuse import plain_function
from modelguard.lifecycle._models import Adapter
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.handle import Decorator
from modelguard.lifecycle.policies import Snapshot, Value
from modelguard.runtime import fork_hooks, waiting
from modelguard.runtime.waiting import Line, Steps, TimeIsOver, Timeout

if TYPE_CHECKING:
    from modelguard.lifecycle._lease import Lease

try:
    from spacy.language import Language
    from spacy.lexeme import Lexeme
    from spacy.strings import StringStore
    from spacy.tokens import Doc, MorphAnalysis, Span, SpanGroup, Token
    from spacy.tokens._dict_proxies import SpanGroups
    from spacy.tokens.underscore import Underscore
    from spacy.training import Example
    from spacy.vocab import Vocab
except ModuleNotFoundError as error:
    raise _extras.not_installed(error, "modelguard.adapters.spacy") from error

__all__ = ["ADAPTER", "IndexGrowth", "Zoned", "ZonedLease", "zoned"]


# Find results that would outlive the memory that they point into.


#: The limits of the search: the number of objects, and of items in each container; and the depth.
MAX_OBJECTS = 10_000
MAX_DEPTH = 20

_POINTING: tuple[type, ...] = (Doc, Span, SpanGroup, SpanGroups, Token, Lexeme, MorphAnalysis, Underscore)
_POINTING += (Example, Vocab, StringStore, Language)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})


def refuse_escaped(function: Any, result: Any) -> None:
    """Search a result for objects that point into the zone, or would do their work later.

    The search covers lists, tuples, sets, deques, dicts and their views, dataclasses and namespaces: at most 10,000
    objects, 10,000 items of each, 20 levels deep; plain values are not counted.
    """
    found = None if type(result) in _PLAIN else _find(result)
    if found is None:
        return
    path, escaped = found
    if isinstance(escaped, CoroutineType):
        escaped.close()  # the caller does not get it, so nothing can await it
    kind = type(escaped).__qualname__
    # The error's traceback holds this frame, which must not keep the escaped object alive.
    del result, found, escaped
    raise EscapedResult(getattr(function, "__qualname__", repr(function)), path=path, kind=kind)


def _find(result: Any) -> tuple[str, Any] | None:
    """The path and the value of the first object that must not leave the zone."""
    todo, seen = [("result", result, 0)], set()
    for _ in range(MAX_OBJECTS):
        if not todo:
            break
        path, value, depth = todo.pop()
        if _escapes(value):
            return path, value
        if depth < MAX_DEPTH and id(value) not in seen:
            seen.add(id(value))
            todo += reversed([(place, child, depth + 1) for place, child in _children(path, value)])
    return None


def _escapes(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, _POINTING) or is_lazy(kind) or hasattr(kind, "__await__")


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a container that are not plain values, with their paths."""
    if isinstance(value, list | tuple | deque) and not hasattr(value, "_fields"):
        yield from _items(path, enumerate(value))
    elif isinstance(value, dict | set | frozenset | KeysView | ValuesView | ItemsView):
        yield from _items(f"list({path})", enumerate(value))
        yield from _items(path, value.items() if isinstance(value, dict) else ())
    else:
        yield from ((f"{path}.{name}", getattr(value, name, None)) for name in _fields(value))


def _items(path: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    few = islice(items, MAX_OBJECTS)
    return ((f"{path}[{place!r}]", item) for place, item in few if type(item) not in _PLAIN)


def _fields(value: Any) -> Iterable[str]:
    """The field names of a record; empty for any other object."""
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (field.name for field in dataclasses.fields(value))
    return getattr(value, "_fields", ()) if isinstance(value, tuple) else ()


# Exclusive access to a pipeline's memory zone: one call at a time, each in its own zone.
#
# Calls do not share a zone: two threads in one can make the same lexeme twice. Each time its end then uses up an empty
# cell of spaCy's hash table without counting it. When none is left, the next look-up of a new word never ends, and it
# holds the GIL: shared zones froze a process after four minutes (docs/design/decisions.md).


class ZoneRequest(NamedTuple):
    """A call's request for the zone: the thread that it is made in, and whether the call blocks that thread."""

    thread: int
    blocks: bool


class ZoneLock(fork_hooks.Forkable):
    """Admits one call after the other to the zone of a pipeline. It refers to the pipeline only while a call is inside.

    What is inside, and was there before the last fork, has the request of the call that is admitted.
    """

    fork_rank = fork_hooks.Rank.LOCKS

    def __init__(self) -> None:
        self._opened: tuple[Language, AbstractContextManager[Any]] | None = None
        self._line: Line[ZoneRequest, ZoneRequest] = Line(self._take, self.release)
        self._renew()
        fork_hooks.register(self)

    def _renew(self) -> None:
        # Reentrant, because the garbage collector may end a coroutine inside the zone in any thread at any time.
        self._lock = threading.RLock()
        self._line.renew()
        self._blocked: list[int] = []  # the threads that calls block while they wait
        self._admitted: ZoneRequest | None = None
        self._overtaken: ZoneRequest | None = None  # whose turn it was, and is again after that of the admitted one
        self._inside = 0

    def admission(self, request: ZoneRequest, limit: Timeout) -> Steps[None]:
        """Wait until the caller may open the zone.

        One that blocks its thread goes before the coroutines of that thread's event loop: they cannot enter meanwhile.
        """
        if request.blocks:
            self._blocked.append(request.thread)
        try:
            while self._admitted is not request:  # another time if a plain call on the loop went first
                yield from self._line.wait(request, limit)
        finally:
            if request.blocks:
                self._unblock(request)
                self._line.serve()

    def _unblock(self, request: ZoneRequest) -> None:
        with suppress(ValueError):  # a child that was forked in the meantime has its own list
            self._blocked.remove(request.thread)

    def _take(self, request: ZoneRequest) -> ZoneRequest | None:
        with self._lock:
            other = self._admitted
            if other is request:  # after the one that went first
                return request
            if other is None:
                admitted = request.blocks or request.thread not in self._blocked
            else:
                admitted = request.blocks and not (other.blocks or self._inside) and other.thread == request.thread
            if admitted:
                self._admitted, self._overtaken = request, other
            return request if admitted else None

    def release(self, request: ZoneRequest) -> None:
        """Let the next one open the zone, if it is this caller's turn and it has not opened it."""
        if request.blocks:
            self._unblock(request)  # where an exception of a signal handler has kept admission() from it
        if self._overtaken is request:
            self._overtaken = None
        if self._admitted is request:
            self._close()

    # What is entered is noted in the same step as the count: no signal handler, which may raise, runs in between.

    def join(self, part: Part, *, waits: bool) -> bool:
        """Enter together with the call that is inside, if the caller is a part of that call.

        One that would block its thread may also join on the thread of the event loop whose coroutine is inside: that
        coroutine is suspended, and could not leave before the caller is done.
        """
        with self._lock:
            if self._admitted is None or not self._inside:
                return False
            on_its_loop = waits and self._admitted.thread == threading.get_ident() and waiting.on_any_loop()
            joins = on_its_loop or any(outer.zone is self for outer in _entered())
            if joins:
                self._inside += 1
                part.inside, part.request = True, self._admitted
            return joins

    def open(self, language: Language, part: Part) -> Any:
        """Open the zone, for the admitted waiter; returns the pool that holds its lexemes and strings."""
        manager = language.memory_zone()
        self._opened = language, manager
        pool = manager.__enter__()
        self._inside = 1
        part.inside, part.request = True, self._admitted
        return pool

    def leave(self, part: Part) -> None:
        """Leave the zone; the last one to leave closes it. Leaving again does what an exception has interrupted."""
        if part.request is not self._admitted:  # of a process that this one was forked from
            return
        with self._lock:
            self._inside -= part.inside
            part.inside = False
            is_last = not self._inside
        if is_last:
            self._close()
        part.request = None

    def leave_dropped(self, part: Part) -> None:
        """Leave where an exception of a signal handler has kept a call from it."""
        if part.request is not None:
            self.leave(part)
            self._line.serve()

    def _close(self) -> None:
        try:
            if self._opened is not None:
                self._opened[1].__exit__(None, None, None)
        finally:
            self._opened = None
            with self._lock:
                self._inside, self._admitted, self._overtaken = 0, self._overtaken, None
            self._line.serve()

    def after_fork_in_child(self) -> None:
        """Keep the zone open if the forking thread is inside; close it if another thread was."""
        self._renew()
        mine = [part for part in _entered() if part.zone is self]
        if mine:
            self._inside, self._admitted = len(mine), ZoneRequest(threading.get_ident(), blocks=True)
            for part in mine:
                part.request = self._admitted
        elif self._opened is not None:
            language, manager = self._opened
            self._opened = None
            with suppress(Exception):  # the other thread may have been in the middle of opening or closing it
                manager.__exit__(None, None, None)
            with language.memory_zone():
                pass  # its end clears all transient entries, whoever made them


class Part:
    """A call's part in a zone, as what runs inside sees it. Who outlives the call may keep it, and nothing else."""

    def __init__(self, zone: ZoneLock) -> None:
        self.zone = zone
        self.outer: Part | None = None  # that it began inside of, of any zone
        self.inside = False
        self.request: ZoneRequest | None = None  # of the call that has opened the zone, until this part has left it


_current: ContextVar[Part | None] = ContextVar("modelguard zone", default=None)

_zones: WeakKeyDictionary[Language, ZoneLock] = WeakKeyDictionary()


def _entered() -> Iterator[Part]:
    """The parts that the running code is inside of. A task that was started inside may have outlived some."""
    part = _current.get()
    while part is not None:
        if part.inside:
            yield part
        part = part.outer


def _zone_of(language: Language) -> ZoneLock:
    zone = _zones.get(language)
    return _zones.setdefault(language, ZoneLock()) if zone is None else zone


L = TypeVar("L", bound=Language)

#: A cell of preshed's hash map is a 64-bit key and a 64-bit value. Two maps grow together: strings and lexemes.
_BYTES_PER_CELL = 16 * 2

#: Bytes. ``IndexGrowth(16)`` means megabytes; the service would reload every second. Text says its unit, so that tests
#: may watch small tables.
_LEAST_NUMBER = 1_000_000


class SpacyAdapter(Adapter):
    """Figures of a pipeline's vocabulary. Its arrays are in many places: the guard measures the load."""

    def gauges(self, model: Any) -> Mapping[str, int]:
        """The numbers of lexemes and strings made so far, and the bytes of the two tables that index them.

        The number of lexemes still counts those that a zone has freed, so it does not show how much memory is used.
        """
        strings = model.vocab.strings
        figures = {"lexemes": len(model.vocab), "strings": len(strings)}
        # Declared public in spaCy's strings.pxd, and the only way to see what a zone cannot free.
        table = getattr(strings, "_map", None)
        if table is not None:
            figures["index_bytes"] = table.capacity * _BYTES_PER_CELL
        return MappingProxyType(figures)


ADAPTER = SpacyAdapter()


class IndexGrowth(Value):
    """Due when the tables that index a spaCy pipeline's words have grown by ``size`` since the generation began.

    The tables never shrink, not even at the end of a memory zone; only a reload replaces them. They double when they
    are full, so the actual growth may be twice ``size``, or as much as the tables took when the pipeline was loaded.
    Without zones the words themselves are kept too, and take several times as much memory.

    Args:
        size: Bytes, or text such as ``"16 MB"``, which is the default: in zones, ``spacy.blank("en")`` reaches it after
            about 450,000 new words.

    Raises:
        InvalidOption: ``size`` is not a positive size, or a number below 1,000,000, whose unit is missing.
    """

    kind = "index_growth"
    size: int

    def __init__(self, size: int | str = "16 MB") -> None:
        self._set(size=_units.size(size, "size", at_least=1 if isinstance(size, str) else _LEAST_NUMBER))

    def due(self, now: Snapshot) -> bool:
        """Compare the gauge ``index_bytes``; never due for a model without this gauge."""
        grown = now.gauges.get("index_bytes", 0) - now.first_gauges.get("index_bytes", 0)
        return grown >= self.size

    def __repr__(self) -> str:
        return f"IndexGrowth({_units.format_bytes(self.size)!r})"


class ZonedLease(Generic[L]):
    """A lease of the pipeline together with exclusive use of its memory zone, for ``with`` or ``async with``."""

    def __init__(self, lease: Lease[L], *, timeout: float, guard: str) -> None:
        self._lease = lease
        self._timeout = timeout
        self._guard = guard
        self._pool: Any = None

    def __enter__(self) -> L:
        with ExitStack() as stack:
            model = stack.enter_context(self._lease)
            if not self._join(model, waits=True):
                waiting.block(self._entry(model, blocks=True))
            self._begin()
            stack.push(self._leave)
            self._entered = stack.pop_all()
        return model

    def __exit__(self, *exc_info: Any) -> None:  # noqa: PYI036 - passed on
        self._entered.__exit__(*exc_info)

    async def __aenter__(self) -> L:
        async with AsyncExitStack() as stack:
            model = await stack.enter_async_context(self._lease)
            if not self._join(model, waits=False):
                await waiting.suspend(self._entry(model, blocks=False))
            self._begin()
            stack.push(self._leave)
            self._aentered = stack.pop_all()
        return model

    async def __aexit__(self, *exc_info: Any) -> None:  # noqa: PYI036 - passed on
        await self._aentered.__aexit__(*exc_info)

    def __del__(self) -> None:
        if (part := getattr(self, "_part", None)) is not None:
            part.zone.leave_dropped(part)

    def _join(self, model: L, *, waits: bool) -> bool:
        if not isinstance(model, Language):
            kind = type(model)
            why = f"must be a spaCy pipeline, and the guard {self._guard!r} loads a {kind.__qualname__}"
            raise InvalidOption("nlp", kind, why=why, fix="Let the guard load a spaCy pipeline.")
        self._part = Part(_zone_of(model))
        return self._part.zone.join(self._part, waits=waits)

    def _entry(self, model: L, *, blocks: bool) -> Steps[None]:
        part, request = self._part, ZoneRequest(threading.get_ident(), blocks)
        try:
            yield from part.zone.admission(request, Timeout(self._timeout))
            self._pool = part.zone.open(model, part)
        except BaseException as error:
            part.inside, part.request = False, None
            part.zone.release(request)
            if isinstance(error, TimeIsOver):
                raise Overloaded(
                    f"guard {self._guard!r}: other calls were in the pipeline's memory zone for {self._timeout:g} s, "
                    "and only one call at a time can run there"
                ) from None
            raise

    def _begin(self) -> None:
        # Not one that has ended: a task may start its successor inside, for ever.
        self._part.outer = next(_entered(), None)
        self._token: contextvars.Token[Part | None] = _current.set(self._part)

    def _leave(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # The frames of a traceback refer to documents, and error reporters print the variables of frames. As long as
        # such a frame lives, so does this object, and with it the memory that the documents point into.
        if error is None:
            self._pool = None
        try:
            with suppress(ValueError):  # it may end in another context than it began in (dependency injection)
                _current.reset(self._token)
            del self._token  # it refers to the part before
        finally:
            self._part.zone.leave(self._part)


class Zoned(Decorator[L]):
    """A guarded pipeline that runs calls in memory zones. Made by :func:`zoned`; a decorator, like the guard.

    It decorates a function that takes the pipeline as its first parameter, after ``self`` or ``cls`` in a class, as the
    guard's own decorator does. Each call also has exclusive use of the pipeline's zone. Results must not refer to the
    pipeline's memory: strings, numbers, and containers of these. What is not a function, takes no pipeline, or is a
    generator function, is refused (``InvalidOption``).
    """

    def __init__(self, guard: ModelGuard[L], timeout: float) -> None:
        self._guard = guard
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<Zoned {self._guard!r}>"

    def _decorate(self, function: Any) -> Any:
        plain = plain_function(function)
        if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
            why = "is a generator function, and the memory zone would be closed before its results are read"
            fix = "Return a list, or use the zone as a block: with zoned.lease() as nlp: ..."
            raise InvalidOption("function", plain, why=why, fix=fix)
        self._guard(function)  # raises if this cannot be decorated
        inside = self._coroutine if inspect.iscoroutinefunction(plain) else self._function
        return Guarded(function, inside, self._guard)

    def lease(self, timeout: _units.Duration | None = None) -> ZonedLease[L]:
        """Use the pipeline in its zone for a block: ``with zoned.lease() as nlp:``, or ``async with``.

        Objects made inside must not be used after the block: no document, span, token or iterator over them. This is
        not checked here.

        Args:
            timeout: How long to wait for a pipeline, and then for its zone. Default: ``wait_timeout`` of the guard for
                the pipeline, and of :func:`zoned` for the zone.

        Raises:
            GuardClosed, LoadFailed, Reloading, Overloaded: On entry.
        """
        zone_timeout = self._timeout if timeout is None else _units.seconds(timeout, "timeout", zero=True)
        return ZonedLease(self._guard.lease(timeout), timeout=zone_timeout, guard=self._guard.name)

    # The lease is a local variable, so that a traceback through these frames keeps the zone's memory readable.

    def _function(self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lease = self.lease()
        with lease as nlp:
            result = wrapped(nlp, *args, **kwargs)
            refuse_escaped(wrapped, result)
            return result

    async def _coroutine(
        self, wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        lease = self.lease()
        async with lease as nlp:
            result = await wrapped(nlp, *args, **kwargs)
            refuse_escaped(wrapped, result)
            return result


def zoned(nlp: ModelGuard[L], *, wait_timeout: _units.Duration = 30.0) -> Zoned[L]:
    """Run calls on a guarded spaCy pipeline in memory zones, so that it forgets the words of each call.

    Each call, or ``lease()`` block, has its own zone. Calls run one at a time, in order of arrival; a nested call is a
    part of the outer one. spaCy's zones do not allow more: threads that share a pipeline break each other's zones
    (``KeyError`` E018), and threads that share a zone eventually freeze the process. To use several processors, run
    several processes.

    This applies to all uses of the pipeline: if some calls use zones, all others must use them too.

    Args:
        nlp: The guard of the pipeline.
        wait_timeout: How long a call waits for earlier calls before it raises ``Overloaded``.

    Raises:
        InvalidOption: ``nlp`` is not a guard, or ``wait_timeout`` is not a duration.
        NotSupported: This spaCy has no memory zones.
    """
    fix = "Write zoned(guard(lambda: spacy.load(...), reload_on=...))."
    _units.instance(nlp, "nlp", ModelGuard, "a guard", fix=fix)
    if not hasattr(Language, "memory_zone"):
        raise NotSupported("zoned", reason=f"spaCy {version('spacy')} has no memory zones; install spacy>=3.8")
    return Zoned(nlp, _units.seconds(wait_timeout, "wait_timeout", zero=True))
