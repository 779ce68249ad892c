"""What is checked when a function is batched and when it is called: options, the function itself, arguments."""

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, TypedDict, get_args

from modelguard import _units
from modelguard._units import FunctionKind
from modelguard.errors import InvalidOption, ItemRefused, ItemTooHeavy, told
from modelguard.runtime.event_loops import OwnLoop
from modelguard.serving._requests import Group, Request
from modelguard.serving.breaker import Breaker
from modelguard.serving.status import Limits

# Without `from __future__ import annotations`: some of these classes are public under another module's name, where
# typing.get_type_hints() could not resolve text.


@dataclass(frozen=True, kw_only=True)
class AutoSize:
    """Batches as large as a latency goal allows, by the measured times.

    Args:
        slo: The goal: seconds from arrival to answer, as long as the load can be computed. Nothing is refused because
            of it; that is what ``deadline`` does. If one item alone takes longer, items run alone, and a
            ``BatchSizeChosen`` at level WARNING says so. A batch never has more than ``max_queue`` items.

    Raises:
        InvalidOption: It is not a duration.
    """

    slo: _units.Duration

    def __post_init__(self) -> None:
        _units.seconds(self.slo, "slo")


#: What weights and shares lie between, so that their squares and quotients are numbers. A client may send a weight: a
#: larger one overflowed in the figures of a batch that had run, whose answers were lost.
_LEAST, _MOST = 1e-9, 1e15


@dataclass(frozen=True, kw_only=True)
class Weight:
    """What items count for in a batch.

    Args:
        of: The weight of an item, such as ``len``. The function gets the heaviest item first, which saves padding if it
            works in portions.
        most: Most weight in a batch. Default: no bound.
        padded: Whether the function pads all items of a batch to the heaviest one, so that each costs as much. Batches
            are then made of items of like weight from all that waits, around the one whose turn it is, and ``most``
            bounds the heaviest weight times the number of items.

    Raises:
        InvalidOption: One of these is invalid.
    """

    of: Callable[[Any], float]
    most: float | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        _units.function(self.of, "of", "one item", fix="Write Weight(of=len), for the length of a text.", arguments=1)
        if self.most is not None:
            _units.number(self.most, "most", fix="Give the total weight of a full batch.")
        _units.flag(self.padded, "padded")


@dataclass(frozen=True, kw_only=True)
class Fair:
    """Whose turn it is: how keys share what is computed, and the queue.

    Args:
        by: Whose an item is: a function of the item that gives a key, anything hashable. Keys get equal shares of what
            is computed, however much each of them sends; an item costs its weight, at least 1. When the queue is full,
            an item whose turn is earlier takes the place of the last one. Default: the key of the context, which the
            web middleware or ``serving.caller`` sets; calls without any key share one.
        shares: The shares of keys, such as ``{"gold": 4}``; 1 for all others.
        quota: Most items of one key that wait; further ones get ``QuotaExceeded``. Default: no bound.
        ageing: How much waiting counts as much as one step of a call's ``priority=``, so that nothing stays in the
            queue for ever. A full queue keeps the highest priorities all the same. Default: ten seconds.

    Raises:
        InvalidOption: One of these is invalid.
    """

    by: Callable[[Any], Hashable] | None = None
    shares: Mapping[Hashable, float] = field(default_factory=dict, hash=False)
    quota: int | None = None
    ageing: _units.Duration = 10.0

    def __post_init__(self) -> None:
        if self.by is not None:
            fix = "Write Fair(by=lambda item: item.tenant), or leave it out and name the header in the middleware."
            _units.function(self.by, "by", "one item", fix=fix, arguments=1)
        fix = 'Write shares={"gold": 4}; all other keys have 1.'
        _units.instance(self.shares, "shares", Mapping, "a dict of keys and their shares", fix=fix)  # type: ignore[type-abstract]
        for key, share in self.shares.items():
            try:
                _units.number(share, "shares", fix=fix, above=_LEAST, most=_MOST)
            except InvalidOption:
                why = f"the share of {key!r} must be a number above {_LEAST:g} and at most {_MOST:g}, not {share!r}"
                raise InvalidOption("shares", self.shares, why=why, fix=fix) from None
        if self.quota is not None:
            _units.whole_number(self.quota, "quota")
        _units.seconds(self.ageing, "ageing")


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """How far the consumers of streams may fall behind.

    Args:
        parts: Most parts of an item that wait for its consumer.
        slow_after: How long, in all, the consumer of one item may keep others waiting, because its parts fill its
            buffer, before it gets ``ConsumerTooSlow``; each part gives a hundredth of it back. Default: one second.

    Raises:
        InvalidOption: One of these is invalid.
    """

    parts: int = 64
    slow_after: _units.Duration = 1.0

    def __post_init__(self) -> None:
        _units.whole_number(self.parts, "parts")
        _units.seconds(self.slow_after, "slow_after", zero=True)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How batches run, where the default does not do.

    Args:
        loop: Where an ``async`` function runs. ``"own"``: on an event loop in a thread of its own, which stays the same
            one, so that what blocks it blocks nobody else. ``"caller"``: on that of its callers, who must be
            coroutines, for functions that use what belongs to that loop. Default: ``"own"``.
        hang_after: How long a batch may run. After that the function is not ready, its state is ``"hung"``, a
            ``BatchErrored`` is emitted, and a breaker opens; the batch itself cannot be stopped. Default: ten times
            ``deadline``, at least a minute; never without a deadline.

    Raises:
        InvalidOption: One of these is invalid.
    """

    loop: Literal["own", "caller"] | None = None
    hang_after: _units.Duration | None = None

    def __post_init__(self) -> None:
        if self.loop is not None:
            _units.one_of(self.loop, "loop", ("own", "caller"), fix="Write 'own' or 'caller'.")
        if self.hang_after is not None:
            _units.seconds(self.hang_after, "hang_after")


class Changes(TypedDict, total=False):
    """What :meth:`modelguard.Batched.configure` can change; see :func:`~modelguard.batched` for their meaning."""

    max_size: int | AutoSize
    max_wait: _units.Duration
    max_queue: int
    deadline: _units.Duration | None
    execution: Execution | None


#: The other options of :func:`~modelguard.batched`, which hold as long as the function does.
_FIXED = frozenset({"threads", "weight", "fair_by", "on_error", "breaker", "buffer", "name"})

OnError = Literal["isolate", "fail"]

_SIZE_FIX = "Write max_size=8, or max_size=AutoSize(slo='100ms')."

#: A batch counts as hung after so many times the deadline, but not before a minute.
_HANG = 10
_SHORTEST_HANG = 60.0


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The options of :func:`~modelguard.batched`, checked as they are put together. Methods share them."""

    max_size: int | AutoSize
    max_wait: _units.Duration
    max_queue: int
    deadline: _units.Duration | None
    threads: int
    weight: Weight | None
    fair: Fair
    on_error: OnError
    breaker: Breaker | None
    execution: Execution | None
    buffer: Buffer | None
    name: str
    kind: FunctionKind = "function"
    own_loop: OwnLoop | None = None  # on which the function runs, if it is async and has one of its own
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        _units.one_of(self.on_error, "on_error", get_args(OnError), fix="Write 'isolate' or 'fail'.")
        if self.breaker is not None:
            fix = "Write breaker=Breaker(failures=5, cooldown='10s')."
            _units.instance(self.breaker, "breaker", Breaker, "a Breaker", fix=fix)
        if self.execution is not None:
            fix = "Write execution=Execution(hang_after='1m')."
            _units.instance(self.execution, "execution", Execution, "an Execution", fix=fix)
        object.__setattr__(self, "limits", self._limits())

    def _limits(self) -> Limits:
        queue, weight = _units.whole_number(self.max_queue, "max_queue"), self.weight
        slo = self.max_size.slo if isinstance(self.max_size, AutoSize) else None
        size = queue if slo is not None else _units.whole_number(self.max_size, "max_size", fix=_SIZE_FIX)
        bound = math.inf if self.deadline is None else _units.seconds(self.deadline, "deadline")
        hang = None if self.execution is None else self.execution.hang_after
        limits = Limits(
            name=self.name,
            max_size=size,
            max_queue=queue,
            max_wait=_units.seconds(self.max_wait, "max_wait", zero=True),
            max_weight=math.inf if weight is None or weight.most is None else float(weight.most),
            deadline=bound,
            threads=_units.whole_number(self.threads, "threads"),
            hang_after=max(_HANG * bound, _SHORTEST_HANG) if hang is None else _units.seconds(hang, "hang_after"),
            weighed=weight is not None,
            slo=math.inf if slo is None else _units.seconds(slo, "slo"),
            padded=weight is not None and weight.padded,
            fair=self.fair.by is not None,
            shares=dict(self.fair.shares),
            quota=self.fair.quota,
            ageing=_units.seconds(self.fair.ageing, "ageing"),
        )
        _check_together(limits, slo)
        return limits

    @property
    def streams(self) -> bool:
        return self.kind in ("generator", "async generator")

    @property
    def is_async(self) -> bool:
        return self.kind in ("coroutine", "async generator")

    def suited_to(self, function: Any, name: str) -> Self:
        """The same options for this function of this name, which have to be for functions of its kind."""
        made = replace(self, kind=_units.function_kind(function), name=name)
        loop = None if self.execution is None else self.execution.loop
        if loop is not None and not made.is_async:
            why = "only an async function runs on an event loop, and this one runs on a thread"
            raise InvalidOption("loop", loop, why=why, fix="Leave it out, or write: async def predict(items): ...")
        if self.buffer is not None and not made.streams:
            why = "only a generator function has a stream to buffer"
            fix = "Leave it out, or yield parts: def generate(items): yield [...]"
            raise InvalidOption("buffer", self.buffer, why=why, fix=fix)
        return replace(made, own_loop=OwnLoop(name)) if made.is_async and loop != "caller" else made

    def changed(self, changes: Changes) -> Self:
        """The same options with some of them changed."""
        known, why = ", ".join(Changes.__annotations__), "cannot be changed while the function serves"
        for option, value in changes.items():
            if option in _FIXED:
                raise InvalidOption(option, value, why=why, fix=f"Write it in @batched(...), or change {known}.")
            if option not in Changes.__annotations__:
                raise InvalidOption(option, value, why="is no option of batched", fix=f"Change {known}.")
        made = replace(self, **changes)
        before, after = (one.execution or Execution() for one in (self, made))
        if after.loop not in (None, before.loop):
            raise InvalidOption("loop", after.loop, why=why, fix="Write it in @batched(...), or leave it out.")
        return made


def read_weight(given: Callable[[Any], float] | Weight | None) -> Weight | None:
    if given is None or isinstance(given, Weight):
        return given
    _units.function(given, "weight", "one item", fix="Write weight=len, for the length of a text.", arguments=1)
    return Weight(of=given)


def read_fair(given: Callable[[Any], Hashable] | Fair | None) -> Fair:
    if isinstance(given, Fair):
        return given
    if given is not None:
        fix = "Write fair_by=lambda item: item.tenant, or leave it out and name the header in the middleware."
        _units.function(given, "fair_by", "one item", fix=fix, arguments=1)
    return Fair(by=given)


def read_buffer(given: int | Buffer | None) -> Buffer | None:
    if given is None or isinstance(given, Buffer):
        return given
    return Buffer(parts=_units.whole_number(given, "buffer"))


def _check_together(limits: Limits, slo: _units.Duration | None) -> None:
    """Check what no option says by itself. ``slo``: as it was given, for the errors."""
    size, queue, quota = limits.max_size, limits.max_queue, limits.quota
    if queue < size:
        why = f"must not be less than max_size={size}, or no batch would ever be full"
        raise InvalidOption("max_queue", queue, why=why, fix=f"Give max_queue={4 * size}, four batches.")
    if quota is not None and quota > queue:
        why = f"must not be more than max_queue={queue}, or it would never be reached"
        fix = f"Give quota={max(queue // 8, 1)}, an eighth of the queue."
        raise InvalidOption("quota", quota, why=why, fix=fix)
    if limits.deadline <= limits.max_wait:
        bound = _units.format_seconds(limits.deadline)
        why = f"must be shorter than deadline, which is {bound}, or an item alone would wait for nearly all of it"
        fix = "Leave it out: a batch never waits for items then."
        raise InvalidOption("max_wait", _units.format_seconds(limits.max_wait), why=why, fix=fix)
    if slo is not None and limits.slo <= limits.max_wait:
        why = f"must be longer than max_wait, which is {_units.format_seconds(limits.max_wait)}"
        raise InvalidOption("slo", slo, why=why, fix="Leave max_wait out: a batch never waits for items then.")
    if slo is not None and limits.slo > limits.deadline:
        why = f"must not be longer than deadline, which is {_units.format_seconds(limits.deadline)}"
        fix = "Give the goal for most items as slo, the end of waiting as deadline."
        raise InvalidOption("slo", slo, why=why, fix=fix)


# What can be read from a batch function when it is decorated: whether it can be batched, and what its items are.


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_BY_NAME = (_KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
#: Keyword arguments of every batched call, and what they do.
_TAKEN = {"timeout": "bounds the call", "priority": "says how urgent it is"}
#: Annotations that a list satisfies.
_LISTS = (list, Sequence, MutableSequence, Collection, Iterable)
#: Types of items for which a list is certainly a mistake. Others may accept a list in place of an array, say.
_SCALARS = (str, bytes, int, float, complex, bool, dict)
#: Web frameworks whose applications know their handlers.
_WEB_FRAMEWORKS = frozenset({"fastapi", "flask", "starlette"})


def check_function(function: Any, caller: Mapping[str, Any]) -> None:
    """Reject what cannot be called with a list of items on another thread. ``caller``: the variables around it."""
    if isinstance(function, classmethod | staticmethod):
        fix = "Put @batched(...) below @staticmethod, next to the def."
        if isinstance(function, classmethod):  # below it, no call would know its class
            fix = "Write a method of an instance, or a static method."
        raise _rejected(function, why=f"it is a {type(function).__name__}", fix=fix)
    if not callable(function) or isinstance(function, type) or hasattr(function, "lease"):  # as guards and pools have
        why = f"it must be a function or a method, not {_units.kind_of(function)}"
        raise _rejected(function, why=why, fix="Decorate: def predict(items): return [...]")
    _check_parameters(function)
    _check_no_route(function, caller)


def _check_parameters(function: Any) -> None:
    if (parameters := _parameters(function)) is None:
        return
    positional = _without_self(parameters)
    if not positional:
        why = "it has no positional parameter for the items"
        fix = "Make its first parameter (after self) the list of items: def predict(items): ..."
        raise _rejected(function, why=why, fix=fix)
    for name, meaning in _TAKEN.items():
        if any(parameter.name == name for parameter in parameters):
            why = f"its parameter '{name}' could never be passed: f(item, {name}=...) {meaning}"
            raise _rejected(function, why=why, fix="Give that parameter another name.")
    _check_first_parameter(function, *positional)


def _check_first_parameter(function: Any, first: inspect.Parameter, *others: inspect.Parameter) -> None:
    """Reject a function whose annotations say that the list of items does not come first."""
    annotation = _annotation(first, function)
    if _is_list(annotation):
        return
    for other in others:
        required = other.default is inspect.Parameter.empty and other.kind is not inspect.Parameter.VAR_POSITIONAL
        # A call could never pass a list: keyword arguments have to be hashable. So this is the list of items.
        if required and _is_list(_annotation(other, function)):
            why = f"its first parameter is '{first.name}', and the list of items '{other.name}' comes after it"
            fix = (
                f"If '{first.name}' is a guarded model, put @batched(...) above the guard's decorator, which passes it."
            )
            raise _rejected(function, why=why, fix=fix)
    if _is_scalar(annotation):
        kind = _type_name(annotation)
        why = f"its first parameter '{first.name}' is one item ({kind}), not a list of items"
        raise _rejected(function, why=why, fix=f"Write: def predict(items: list[{kind}]): ...")


def _check_no_route(function: Any, caller: Mapping[str, Any]) -> None:
    """Reject a function that a web application already serves, because ``@batched`` stands above ``@app.get``."""
    plain = inspect.unwrap(function)
    for value in [*getattr(plain, "__globals__", {}).values(), *caller.values()]:
        if any(plain is handler or function is handler for handler in _handlers(value)):
            why = "it is a route of a web application already, which would call it without batches"
            raise _rejected(function, why=why, fix=route_fix(function, plain.__name__))


def _handlers(value: Any) -> Iterator[Any]:
    modules = (_units.type_name(kind).partition(".")[0] for kind in type(value).__mro__)
    if _WEB_FRAMEWORKS.isdisjoint(modules):
        return
    for route in getattr(value, "routes", None) or ():
        yield getattr(route, "endpoint", None)
    yield from (getattr(value, "view_functions", None) or {}).values()


def _rejected(function: Any, *, why: str, fix: str) -> InvalidOption:
    return InvalidOption("function", function, why=why, fix=fix)


# Names and types


def function_name(function: Any) -> str:
    qualified = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', None) or '?'}.{qualified.replace('<locals>.', '')}"


def route_fix(function: Any, name: str) -> str:
    """What to write for a route of a web framework, in place of the batched function of this name."""
    short = name.rpartition(".")[2]
    streams = _units.function_kind(function) in ("generator", "async generator")
    answer = f"StreamingResponse({short}.stream(text))" if streams else f"await {short}.aio(text)"
    return f"Write a function for the route: async def route(text: str): return {answer}"


def passed_by_guard(function: Any) -> list[str]:
    """The parameters of the written function that its guard passes, such as ``model``."""
    written, visible = _parameters(inspect.unwrap(function)), _parameters(function)
    if written is None or visible is None:
        return []
    shown = {parameter.name for parameter in visible}
    return [parameter.name for parameter in _without_self(written) if parameter.name not in shown]


def item_type_name(function: Any) -> str | None:
    """The annotated type of an item, if a list cannot be meant as an item; else None."""
    item = _item_annotation(function)
    return _type_name(item) if _is_scalar(item) else None


def call_signature(function: Any, name: str) -> inspect.Signature | None:
    """The signature of the batched function: one item, then keywords. None if the function has no signature."""
    if (parameters := _parameters(function)) is None:
        return None
    others = [each for each in _without_self(parameters)[1:] if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    keywords = [each for each in parameters if each.kind in _BY_NAME]
    item: Any = Annotated[_item_annotation(function), NotARoute(function, name)]
    shown = "item_" if any(each.name == "item" for each in others + keywords) else "item"
    return inspect.Signature(
        [
            inspect.Parameter(shown, inspect.Parameter.POSITIONAL_ONLY, annotation=item),
            inspect.Parameter("timeout", _KEYWORD_ONLY, default=None, annotation=_units.Duration | None),
            inspect.Parameter("priority", _KEYWORD_ONLY, default=0, annotation=int),
            *(each.replace(kind=_KEYWORD_ONLY) for each in others),
            *keywords,
        ]
    )


class NotARoute:
    """Rejects a batched function as a route or handler, when that is defined. Called like the function itself.

    It marks the item in the signature: FastAPI, which would read the arguments of the batch function, a list, from each
    request, asks pydantic for a schema of each parameter, and pydantic asks this mark. And it stands for ``__call__``,
    whose hints Litestar reads.
    """

    def __init__(self, function: Any, name: str) -> None:
        self._name = name
        self._fix = route_fix(function, name)

    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return type(function).__call__(function, *args, **kwargs)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        raise self._rejected()

    def __get_pydantic_core_schema__(self, _source: object, _handler: object) -> Any:
        """Reject the route."""
        raise self._rejected()

    def _rejected(self) -> InvalidOption:
        why = "a batched function takes one item by position, so it cannot be a route or a dependency"
        return InvalidOption("route", self._name, why=why, fix=self._fix)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    signature = _units.signature_of(function)
    return None if signature is None else list(signature.parameters.values())


def _without_self(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """The positional parameters; methods are recognised by their first parameter's name."""
    positional = [parameter for parameter in parameters if parameter.kind not in _BY_NAME]
    return positional[1:] if positional and positional[0].name in {"self", "cls"} else positional


def _item_annotation(function: Callable[..., Any]) -> Any:
    """The type of an item by the annotation of the list of items; Any if that says nothing."""
    for parameter in _without_self(_parameters(function) or ())[:1]:
        items = _annotation(parameter, function)
        if _is_list(items) and typing.get_args(items):
            return typing.get_args(items)[0]
    return Any


def _annotation(parameter: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """A parameter's annotation as a type; Any if there is none, or its names exist for type checkers only."""
    if parameter.annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    try:
        return typing.get_type_hints(holder, globalns=getattr(inspect.unwrap(function), "__globals__", {}))["it"]
    except Exception:  # noqa: BLE001 - evaluating text can raise anything
        return Any


def _is_list(annotation: Any) -> bool:
    return (typing.get_origin(annotation) or annotation) in _LISTS


def _is_scalar(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return all(one is types.NoneType or _is_scalar(one) for one in typing.get_args(annotation))
    return (origin or annotation) in _SCALARS


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


# What a caller passes to a batched function: checked before the item is queued, so that a mistake is that caller's.


#: Sets of keyword names that are remembered as accepted. A function with ``**kwargs`` may be given ever new ones.
_MANY_NAMES = 64
#: ASGI applications are called with scope, receive and send.
_ASGI_ARGUMENTS = 3


class Arguments:
    """Checks the arguments of calls, and puts them into requests."""

    def __init__(self, function: Callable[..., Any], options: BatchOptions) -> None:
        self._function = function
        self._name = options.name
        self._max_weight = min(options.limits.max_weight, _MOST)
        self._fair_by = options.fair.by
        self._item_type = item_type_name(function)
        self._accepted: set[tuple[str, ...]] = set()
        #: Gives the weight of an item, or raises what :meth:`fill_in` does; None if nothing is weighed.
        self.weigh = None if options.weight is None else functools.partial(self._weight, options.weight.of)
        #: Why a call without keyword arguments fails; None if it does not.
        self.incomplete = self._unbound() or self._mismatch({})
        #: Whether even a call with nothing but an item has to be checked, whatever the item is.
        self.always_checked = self.incomplete is not None or self._fair_by is not None

    def fill_in(self, request: Request, extras: dict[str, Any]) -> None:
        """Check the arguments of one call, and set the request's group, weight and key."""
        if type(request.item) is list and self._item_type is not None:
            why = f"one item ({self._item_type}) is needed, not a list; for many items, write f.map(items)"
            raise ItemRefused(self._name, why=why)
        if extras or self.incomplete is not None:
            request.group = self._group(extras)
        if self.weigh is not None:
            request.weight = self.weigh(request.item)
        if self._fair_by is not None:
            request.key = self._key(self._fair_by, request.item)

    def wrong_count(self, count: int) -> TypeError:
        if count > 1 and (why := self._unbound()) is not None:  # since 3.13, @classmethod passes the class
            return TypeError(f"{self._name}(): {why}")
        hints = [f"{self._name}() takes one item by position, and got {count or 'none'}"]
        if count > 1:
            hints += ["Pass everything else by keyword", *self._guard_hint()]
        if count in (0, _ASGI_ARGUMENTS):  # as Flask and Starlette call their routes
            hints.append(f"If a web framework called it: {route_fix(self._function, self._name)}")
        return TypeError(". ".join(hints))

    def _guard_hint(self) -> list[str]:
        names = " and ".join(map(repr, passed_by_guard(self._function)))
        return [f"Leave out {names}, which the guard passes"] if names else []

    def _group(self, extras: dict[str, Any]) -> Group | None:
        names = tuple(sorted(extras))
        if names not in self._accepted:
            why = self._mismatch(extras) if extras else self.incomplete
            if why is not None:
                known = (*_TAKEN, *(one.name for one in _parameters(self._function) or ()))
                near = [_units.nearest(name, known).strip() for name in names if name not in known]
                hint = self._guard_hint() if set(passed_by_guard(self._function)) & set(names) else filter(None, near)
                raise TypeError(". ".join([f"{self._name}(): {why}", *hint]))
            if len(self._accepted) < _MANY_NAMES:
                self._accepted.add(names)
        group = tuple((name, type(extras[name]), extras[name]) for name in names)
        why = "only items with equal keyword arguments share a batch, so these must be hashable"
        for name in names:
            self._try_key(extras[name], why)
        return group or None

    def check_items(self, items: object) -> None:
        """Refuse to ``map`` one text, whose characters would be the items, or what is no collection."""
        if isinstance(items, str | bytes) or not (hasattr(items, "__iter__") or hasattr(items, "__getitem__")):
            why = f"map() needs many items, and {_units.kind_of(items)} is one; write f(item), or f.map([item])"
            raise ItemRefused(self._name, why=why)

    def _unbound(self) -> str | None:
        """Why no call can work, if the function is a method and no instance was bound to it."""
        parameters = _parameters(self._function)
        if not parameters or parameters[0].name not in {"self", "cls"}:
            return None
        return (
            "it is a method: call it on an instance, and put no other decorator above @batched(...), such as "
            "@classmethod, @property or one that uses functools.wraps"
        )

    def _mismatch(self, extras: dict[str, Any]) -> str | None:
        signature = _units.signature_of(self._function)
        try:
            if signature is not None:
                signature.bind([], **extras)
        except TypeError as error:
            return str(error)
        return None

    def _weight(self, weigh: Callable[[Any], float], item: Any) -> float:
        try:
            weight = float(weigh(item))
        except Exception as error:
            raise ItemRefused(self._name, why=f"the item cannot be weighed: {told(error)}") from error
        if not 0 <= weight < math.inf:
            raise ItemRefused(self._name, why=f"the item's weight is {weight}, and must be a number of at least 0")
        if weight > self._max_weight:
            raise ItemTooHeavy(self._name, weight=weight, max_weight=self._max_weight)
        return weight if weight > _LEAST else 0.0

    def _key(self, fair_by: Callable[[Any], Hashable], item: Any) -> Hashable:
        try:
            key = fair_by(item)
        except Exception as error:
            raise ItemRefused(self._name, why=f"fair_by failed: {told(error)}") from error
        self._try_key(key, "the key from fair_by must be hashable")
        return key

    def _try_key(self, value: object, why: str) -> None:
        try:
            _units.try_key(value)
        except Exception as error:  # noqa: BLE001 - whatever the value's own code raises
            raise ItemRefused(self._name, why=f"{why}: {told(error)}") from None
