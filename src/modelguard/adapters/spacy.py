"""Support for spaCy pipelines, and ways to limit the growth of their memory.

A pipeline keeps every word that it has ever seen. A memory zone frees the words of one call at its end; :func:`zoned`
gives each call its own zone, safely. A zone cannot free the tables that index the words: :class:`IndexGrowth` reloads
the pipeline when these have grown.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, overload

from modelguard import _extras, _units

try:
    from spacy.language import Language
except ModuleNotFoundError as error:
    raise _extras.not_installed(error, "modelguard.adapters.spacy") from error

from modelguard.adapters._spacy_escape import refuse_escaped
from modelguard.adapters._spacy_zone import ZoneContext
from modelguard.errors import InvalidOption, NotSupported
from modelguard.lifecycle._policy import Horizon, Policy, Snapshot
from modelguard.lifecycle._signatures import plain_function
from modelguard.lifecycle._wrappers import Guarded
from modelguard.lifecycle.model_guard import ModelGuard
from modelguard.telemetry.reasons import ReasonKind

if TYPE_CHECKING:
    from types import TracebackType

    from modelguard.lifecycle._leases import Lease

__all__ = ["ADAPTER", "IndexGrowth", "Zoned", "ZonedLease", "zoned"]

L = TypeVar("L", bound=Language)
S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

#: A cell of preshed's hash map is a 64-bit key and a 64-bit value. Two maps grow together: strings and lexemes.
_BYTES_PER_CELL = 16 * 2

#: Bytes. ``IndexGrowth(16)`` means megabytes; the service would reload every second. Text says its unit, so that tests
#: may watch small tables.
_LEAST_NUMBER = 1_000_000


class SpacyAdapter:
    """Figures of a pipeline's vocabulary."""

    def size(self, model: Any) -> int | None:  # noqa: ARG002 - its arrays are in many places
        """Unknown: the guard measures the load."""
        return None

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

    def released(self) -> None:
        """Do nothing: spaCy keeps no cache of its own."""


ADAPTER = SpacyAdapter()


@dataclass(frozen=True, init=False, repr=False)
class IndexGrowth(Policy):
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

    kind: ClassVar[ReasonKind] = "index_growth"
    size: int

    def __init__(self, size: int | str = "16 MB") -> None:
        parsed = _units.size(size, "size")
        if isinstance(size, int) and parsed < _LEAST_NUMBER:
            why = f"is only {_units.format_bytes(parsed)}: a number is bytes"
            fix = f"Write '{size} MB' for megabytes, or the unit that is meant, as in '{size} B'."
            raise InvalidOption("size", size, why=why, fix=fix)
        object.__setattr__(self, "size", parsed)

    def due(self, now: Snapshot) -> bool:
        """Compare the gauge ``index_bytes``; never due for a model without this gauge."""
        grown = now.gauges.get("index_bytes", 0) - now.first_gauges.get("index_bytes", 0)
        return grown >= self.size

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - a large table doubles in minutes, not in calls
        """Check once a second."""
        return Horizon(uses=math.inf, seconds=1.0)

    def __repr__(self) -> str:
        return f"IndexGrowth({_units.format_bytes(self.size)!r})"


class ZonedLease(Generic[L]):
    """A lease of the pipeline together with exclusive use of its memory zone, for ``with`` or ``async with``."""

    def __init__(self, lease: Lease[L], *, timeout: float, guard: str) -> None:
        self._lease = lease
        self._timeout = timeout
        self._guard = guard

    def __enter__(self) -> L:
        with ExitStack() as stack:
            model = stack.enter_context(self._lease)
            stack.enter_context(self._zone(model))
            self._entered = stack.pop_all()
        return model

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, trace)

    async def __aenter__(self) -> L:
        async with AsyncExitStack() as stack:
            model = await stack.enter_async_context(self._lease)
            await stack.enter_async_context(self._zone(model))
            self._aentered = stack.pop_all()
        return model

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._aentered.__aexit__(kind, error, trace)

    def _zone(self, model: L) -> ZoneContext:
        if not isinstance(model, Language):
            kind = type(model)
            why = f"must be a spaCy pipeline, and the guard {self._guard!r} loads a {kind.__qualname__}"
            raise InvalidOption("nlp", kind, why=why, fix="Let the guard load a spaCy pipeline.")
        self._context = ZoneContext(model, timeout=self._timeout, guard=self._guard)
        return self._context


class Zoned(Generic[L]):
    """A guarded pipeline that runs calls in memory zones. Made by :func:`zoned`; a decorator, like the guard."""

    def __init__(self, guard: ModelGuard[L], timeout: float) -> None:
        self._guard = guard
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<Zoned {self._guard!r}>"

    @overload
    def __call__(self, function: classmethod[S, Concatenate[L, P], R], /) -> classmethod[S, P, R]: ...
    @overload
    def __call__(self, function: staticmethod[Concatenate[L, P], R], /) -> staticmethod[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[L, P], R], /) -> Callable[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[S, L, P], R], /) -> Callable[Concatenate[S, P], R]: ...
    def __call__(self, function: Any, /) -> Any:
        """Decorate a function that takes the pipeline as its first parameter, after ``self`` or ``cls`` in a class.

        This works like the guard's own decorator, and each call also has exclusive use of the pipeline's zone. Results
        must not refer to the pipeline's memory: strings, numbers, and containers of these.

        Raises:
            InvalidOption: The decorated object is not a function, does not take a pipeline, or is a generator function.
        """
        plain = plain_function(function)
        if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
            raise InvalidOption(
                "function",
                plain,
                why="is a generator function, and the memory zone would be closed before its results are read",
                fix="Return a list, or use the zone as a block: with zoned.lease() as nlp: ...",
            )
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
    if not isinstance(nlp, ModelGuard):
        raise InvalidOption(
            "nlp", nlp, why="must be a guard", fix="Write zoned(guard(lambda: spacy.load(...), reload_on=...))."
        )
    if not hasattr(Language, "memory_zone"):
        raise NotSupported("zoned", reason=f"spaCy {version('spacy')} has no memory zones; install spacy>=3.8")
    return Zoned(nlp, _units.seconds(wait_timeout, "wait_timeout", zero=True))
