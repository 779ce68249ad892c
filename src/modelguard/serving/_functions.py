"""What can be read from a batch function when it is decorated: whether it can be batched, and what its items are."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import threading
import time
import types
import typing
import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Annotated, Any, Never, Self, Unpack, cast

from modelguard import _units
from modelguard._entered import Entered
from modelguard._function_kinds import kind_of
from modelguard.errors import InvalidOption, ItemRefused, ItemTooHeavy, ModelGuardWarning, NotSupported, WouldDeadlock
from modelguard.runtime import fork, waiting
from modelguard.runtime.background import start_thread
from modelguard.serving._batch_options import BatchOptions, Changes
from modelguard.serving._batcher import Batcher
from modelguard.serving._requests import Group, Request, TrioWaiter
from modelguard.serving.deadlines import check_priority
from modelguard.serving.status import BatchStatus, Limits

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
#: Keyword arguments of every batched call, and what they do.
_TAKEN = {"timeout": "bounds the call", "priority": "says how urgent it is"}
#: Annotations that a list satisfies.
_LISTS = (list, Sequence, MutableSequence, Collection, Iterable)
#: Types of items for which a list is certainly a mistake. Others may accept a list in place of an array, say.
_SCALARS = (str, bytes, int, float, complex, bool, dict)
#: Web frameworks whose applications know their handlers.
_WEB_FRAMEWORKS = frozenset({"fastapi", "flask", "starlette"})


# At definition


def check_function(function: Any, caller: Mapping[str, Any]) -> None:
    """Reject what cannot be called with a list of items on another thread.

    Args:
        function: What is decorated.
        caller: The local variables where it is decorated.

    Raises:
        InvalidOption: It is not a function, not a function of a list, or a route of a web framework.
    """
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise _rejected(function, why=f"it is a {kind}", fix=f"Put @batched(...) below @{kind}, next to the def.")
    if not callable(function) or isinstance(function, type):
        why = f"it must be a function or a method, not {_units.kind_of(function)}"
        raise _rejected(function, why=why, fix="Decorate: def predict(items): return [...]")
    _check_parameters(function)
    _check_no_route(function, caller)


def _check_parameters(function: Any) -> None:
    parameters = _parameters(function)
    if parameters is None:
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
    modules = (str(kind.__module__).partition(".")[0] for kind in type(value).__mro__)
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
    streams = kind_of(function) in ("generator", "async generator")
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
    parameters = _parameters(function)
    if parameters is None:
        return None
    others = [each for each in _without_self(parameters)[1:] if each.kind is not inspect.Parameter.VAR_POSITIONAL]
    keywords = [each for each in parameters if each.kind not in _POSITIONAL]
    item: Any = Annotated[_item_annotation(function), NotFromRequest(function, name)]
    taken = {each.name for each in others + keywords}
    return inspect.Signature(
        [
            inspect.Parameter("item_" if "item" in taken else "item", _POSITIONAL[0], annotation=item),
            inspect.Parameter("timeout", _KEYWORD_ONLY, default=None, annotation=_units.Duration | None),
            inspect.Parameter("priority", _KEYWORD_ONLY, default=0, annotation=int),
            *(each.replace(kind=_KEYWORD_ONLY) for each in others),
            *keywords,
        ]
    )


class NotFromRequest:
    """Marks the item in the signature of a batched function, which cannot be a route of FastAPI.

    FastAPI would read the arguments of the batch function, a list, from each request, and answer 422. It asks pydantic
    for a schema of each parameter when the route is defined, and pydantic asks this mark.
    """

    def __init__(self, function: Any, name: str) -> None:
        self._name = name
        self._fix = route_fix(function, name)

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> Any:
        """Reject the route.

        Raises:
            InvalidOption: Always.
        """
        del source, handler
        raise not_a_route(self._name, self._fix)


class NotAHandler:
    """Marks a batched function, which cannot be a handler of Litestar. Called like the function itself.

    Litestar reads the hints of ``__call__`` when the route is defined, and would fail with a ``NameError``.
    """

    def __init__(self, function: Any, name: str) -> None:
        self._name = name
        self._fix = route_fix(function, name)

    def __call__(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return type(function).__call__(function, *args, **kwargs)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        raise not_a_route(self._name, self._fix)


def not_a_route(name: str, fix: str) -> InvalidOption:
    why = "a batched function takes one item by position, so it cannot be a route or a dependency"
    return InvalidOption("route", name, why=why, fix=fix)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # many built-in functions have none
        return None


def _without_self(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """The positional parameters; methods are recognised by their first parameter's name."""
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
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
    """Checks the arguments of calls, and puts them into requests.

    Args:
        function: The batch function.
        options: Its options.

    Attributes:
        weigh: Gives the weight of an item, or raises what :meth:`fill_in` does; None if nothing is weighed.
        incomplete: Why a call without keyword arguments fails; None if it does not.
    """

    def __init__(self, function: Callable[..., Any], options: BatchOptions) -> None:
        self._function = function
        self._name = options.name
        self._max_weight = options.limits.max_weight
        self._fair_by = options.fair.by
        self._item_type = item_type_name(function)
        self._accepted: set[tuple[str, ...]] = set()
        self.weigh = None if options.weight is None else functools.partial(self._weight, options.weight.of)
        self.incomplete = self._unbound() or self._mismatch({})

    @property
    def always_checked(self) -> bool:
        """Whether even a call with nothing but an item has to be checked, whatever the item is."""
        return self.incomplete is not None or self._fair_by is not None

    def fill_in(self, request: Request, extras: dict[str, Any]) -> None:
        """Check the arguments of one call, and set the request's group, weight and key.

        Raises:
            TypeError: The function does not accept these keyword arguments, or needs others.
            ItemRefused: The item is a list by mistake, cannot be weighed or has no key, or a keyword argument is not
                hashable.
            ItemTooHeavy: It weighs more than a batch may.
        """
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
                hint = self._guard_hint() if set(passed_by_guard(self._function)) & set(names) else []
                raise TypeError(". ".join([f"{self._name}(): {why}", *hint]))
            if len(self._accepted) < _MANY_NAMES:
                self._accepted.add(names)
        group = tuple((name, type(extras[name]), extras[name]) for name in names)
        try:
            hash(group)
        except TypeError as error:
            why = f"only items with equal keyword arguments share a batch, so these must be hashable: {error}"
            raise ItemRefused(self._name, why=why) from None
        return group or None

    def check_items(self, items: object) -> None:
        """Check what ``map`` was given.

        Raises:
            ItemRefused: It is one text, whose characters would be the items.
        """
        if isinstance(items, str | bytes):
            kind = type(items).__name__
            why = f"map() needs many items, and a {kind} is one; write f(item), or f.map([item])"
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
        try:
            inspect.signature(self._function).bind([], **extras)
        except TypeError as error:
            return str(error)
        except ValueError:  # many built-in functions have no signature
            return None
        return None

    def _weight(self, weigh: Callable[[Any], float], item: Any) -> float:
        try:
            weight = float(weigh(item))
        except Exception as error:
            raise ItemRefused(self._name, why=f"the item cannot be weighed: {type(error).__name__}: {error}") from error
        if not 0 <= weight < math.inf:
            raise ItemRefused(self._name, why=f"the item's weight is {weight}, and must be a number of at least 0")
        if weight > self._max_weight:
            raise ItemTooHeavy(self._name, weight=weight, max_weight=self._max_weight)
        return weight

    def _key(self, fair_by: Callable[[Any], Hashable], item: Any) -> Hashable:
        try:
            key = fair_by(item)
        except Exception as error:
            raise ItemRefused(self._name, why=f"fair_by failed: {type(error).__name__}: {error}") from error
        try:
            hash(key)
        except Exception as error:  # noqa: BLE001 - whatever the key's own code raises
            why = f"the key from fair_by must be hashable: {type(error).__name__}: {error}"
            raise ItemRefused(self._name, why=why) from None
        return key


# A queue for each instance: what a batched method keeps among an instance's attributes.


#: So many instances that came within so many seconds are short-lived if half of them are gone.
_MANY = 100
_SOON = 60.0


class BoundMethods:
    """Makes and keeps one batched function for each instance of a class. Warns if they are made for each request.

    Args:
        function: The function in the class, for errors.
        qualified_name: Where it is written. Not its plain name, which a subclass may use for a method of its own.
        make: Makes that of an instance.
    """

    def __init__(self, function: Callable[..., Any], qualified_name: str, make: Callable[[Any], Any]) -> None:
        self._function = function
        self._attribute = f"_modelguard_batched_{qualified_name}"
        self._make = make
        self._began = time.monotonic()
        self._recent: list[weakref.ref[object]] = []
        self._warned = False

    def get(self, instance: Any) -> Any:
        """That of an instance, made on first use. Two threads that come first together get the same one.

        Raises:
            InvalidOption: The instance has no ``__dict__``.
        """
        try:
            attributes = vars(instance)
        except TypeError:
            why = f"{type(instance).__name__} has __slots__, and no room for the queue of an instance"
            fix = "Add '__dict__' to its __slots__, or batch a function at module level."
            raise InvalidOption("function", self._function, why=why, fix=fix) from None
        kept = attributes.get(self._attribute)
        if kept is None or kept.instance is not instance:  # none yet, or that of the instance this one is a copy of
            with _lock:
                kept = attributes.get(self._attribute)
                if kept is None or kept.instance is not instance:
                    kept = attributes[self._attribute] = _Kept(instance, self._make(instance))
                    if not self._warned:
                        self._recent.append(weakref.ref(kept.bound))
            if len(self._recent) >= _MANY:
                self._look_at_recent()
        return kept.bound

    def _look_at_recent(self) -> None:
        (recent, self._recent), (began, self._began) = (self._recent, []), (self._began, time.monotonic())
        self._warned = self._began - began <= _SOON and 2 * sum(one() is None for one in recent) >= _MANY
        if self._warned:
            text = (
                f"{self._function.__qualname__}(): {len(recent)} instances got a queue within a minute, and most of "
                "them are gone. Items of different instances never share a batch. Keep one instance for the process, "
                "or batch a function at module level."
            )
            warnings.warn(text, ModelGuardWarning, stacklevel=4)


class _Kept:
    """An entry among an instance's attributes. Copies of the instance get an empty one."""

    def __init__(self, instance: Any = None, bound: Any = None) -> None:
        self.instance = instance
        self.bound = bound

    def __reduce__(self) -> Any:
        return _Kept, ()


_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


fork.at_fork(fork.Rank.LOCKS, in_child=_renew_lock)

_CLOSE_TIMEOUT = 30.0


class Decorated(Entered):
    """A batch function behind a queue.

    Args:
        function: The batch function.
        options: Its options.
    """

    def __init__(self, function: Callable[..., Any], options: BatchOptions) -> None:
        functools.update_wrapper(cast("Callable[..., Any]", self), function)
        super().__init__()
        self.__signature__ = call_signature(function, options.name)
        self._function = function
        self._options = options
        self._batcher = Batcher(function, options)
        self._arguments = Arguments(function, options)
        self._always_checked = self._arguments.always_checked
        self._weigh = self._arguments.weigh
        self._methods: BoundMethods | None = None
        self._method_of: tuple[Any, str] | None = None
        self._on_callers_loop = options.is_async and options.loop == "caller"

    def _refuse_on_loop(self, why: str, instead: str) -> None:
        if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the public one raises where there is none
            raise WouldDeadlock(self.name, why=f"{why} the running event loop", fix=f"Write: {instead}.")

    def _put(
        self,
        request: Request,
        timeout: _units.Duration | None,
        priority: int,
        extras: dict[str, Any],
        others: tuple[object, ...] = (),
    ) -> None:
        self._prepare(request, timeout, priority, extras, others)
        self._batcher.put(request)

    def _prepare(
        self,
        request: Request,
        timeout: _units.Duration | None,
        priority: int,
        extras: dict[str, Any],
        others: tuple[object, ...],
    ) -> None:
        if others:
            raise self._arguments.wrong_count(1 + len(others))
        if priority:
            request.priority = check_priority(priority)
            self._batcher.order()
        if extras or self._always_checked or self._weigh is not None or type(request.item) is list:
            self._arguments.fill_in(request, extras)
        if self._on_callers_loop and request.loop is None:
            request.home = self._callers_loop()
        self._batcher.bound(request, None if timeout is None else _units.seconds(timeout, "timeout", zero=True))

    def _callers_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            reason = "it runs on the event loop of its callers (loop='caller'); await it there, or leave out loop="
            raise NotSupported(f"{self.name}() outside of an asyncio event loop", reason=reason) from None

    # Its state

    @property
    def name(self) -> str:
        """Its name in events and errors."""
        return self._options.name

    @property
    def limits(self) -> Limits:
        """The bounds in force, in items and seconds."""
        return self._batcher.limits

    def configure(self, *others: Never, **changes: Unpack[Changes]) -> None:
        """Change options while it serves: ``f.configure(max_size=8, deadline="1s")``. All of them change, or none.

        What waits keeps its deadline, and waits no longer for a fuller batch than it would have; what runs is finished.
        A forked child starts with the options in force.

        Args:
            others: None; every option is passed by keyword.
            changes: ``max_size``, ``slo``, ``max_wait``, ``max_queue``, ``deadline`` and ``hang_after``, as in
                :func:`batched`. A number for ``max_size`` also ends the choice by ``slo``.

        Raises:
            InvalidOption: One of them is invalid, does not fit the others, or cannot be changed.
            GuardClosed: After :meth:`close`.
            TypeError: It is a method, and was not called on an instance: each has a queue of its own.
            WouldDeadlock: From a signal handler or finalizer that interrupted a call.
        """
        if others:
            why = "has no name: configure() takes keywords only"
            raise InvalidOption("option", others[0], why=why, fix="Write for example f.configure(max_size=8).")
        if self._methods is not None:
            raise TypeError(f"{self.name}(): {self._arguments.incomplete}")
        self._batcher.configure(changes)

    @property
    def ready(self) -> bool:
        """Whether it admits items: false once it is being closed, and while a batch hangs.

        It is ready while the circuit is open: without traffic there would be no probe to close it.
        """
        return self._batcher.ready

    def status(self) -> BatchStatus:
        """Its state, counts and times."""
        return self._batcher.status()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    # Closing

    def close(self, timeout: _units.Duration = _CLOSE_TIMEOUT) -> None:
        """Admit nothing more, compute what waits, then end. Blocks. Closing twice does nothing.

        Args:
            timeout: How long that may take, 30 seconds by default; what still waits then is refused with
                ``GuardClosed``.

        Raises:
            WouldDeadlock: On a running event loop (use :meth:`aclose`), or from inside the batch function.
        """
        self._refuse_on_loop("close() would block", "await f.aclose()")
        self._batcher.close(_units.seconds(timeout, "timeout", zero=True))

    async def aclose(self, timeout: _units.Duration = _CLOSE_TIMEOUT) -> None:
        """:meth:`close` for coroutines; does not block the event loop."""
        close = functools.partial(self._batcher.close, _units.seconds(timeout, "timeout", zero=True))
        if waiting.on_event_loop():
            await asyncio.to_thread(close)
        else:
            waiter = TrioWaiter("await f.aclose()", "Call f.close()")
            await waiter.result(waiting.start(close, f"modelguard-close-{self.name}", start_thread))

    def _reopen(self) -> None:
        self._batcher.reopen()

    # As a method

    def __set_name__(self, owner: type, name: str) -> None:
        written = getattr(self._function, "__qualname__", "")
        if written != f"{owner.__qualname__}.{name}":
            return  # a function from elsewhere that is kept in a class
        self._methods = BoundMethods(self._function, written, functools.partial(self._bind, name))
        self._arguments.incomplete = f"it is a method of {owner.__name__}: call it on an instance"
        self._always_checked = True

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or self._methods is None:
            return self
        return self._methods.get(instance)

    def _bind(self, name: str, instance: Any) -> Self:
        method = self._function.__get__(instance, type(instance))
        bound = type(self)(method, self._options)
        bound._method_of = instance, name  # noqa: SLF001 - of its own class
        return bound

    # Functions are pickled by reference; so is this, and a method by its instance.
    def __reduce__(self) -> Any:
        if self._method_of is not None:
            return getattr, self._method_of
        return str(self.__qualname__)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: Any) -> Any:
        if self._method_of is None:
            return self
        instance, name = self._method_of
        return getattr(copy.deepcopy(instance, memo), name)
