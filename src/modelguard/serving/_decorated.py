"""What all batched functions have: a name, limits, a state, an end, and what makes them methods and pickles."""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Generic, Never, Self, TypeVar, Unpack, cast

from modelguard import _units
from modelguard._entered import Entered
from modelguard.errors import InvalidOption, ModelGuardWarning, NotSupported, WouldDeadlock
from modelguard.serving import _loops, _shared_threads
from modelguard.serving._batcher import Batcher
from modelguard.serving._functions import Arguments, call_signature
from modelguard.serving._options import BatchOptions, Changes
from modelguard.serving._requests import Request
from modelguard.serving.deadlines import check_priority
from modelguard.serving.status import BatchStatus, Limits

# Notices that instances with batched methods are made for each request.


#: So many instances that came within so many seconds are short-lived if half of them are gone.
_MANY = 100
_SOON = 60.0


class ShortLived:
    """Counts what is made for the instances of a class.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._recent: list[weakref.ref[object]] = []
        self._found = False

    def note(self, made: object) -> int:
        """Note what was made for another instance, and lives as long as it.

        Returns:
            How many instances of the last minute were short-lived, once; else 0.
        """
        if self._found:
            return 0
        self._recent.append(weakref.ref(made))
        if len(self._recent) < _MANY:
            return 0
        recent, self._recent = self._recent, []
        now = self._clock()
        began, self._began = self._began, now
        gone = sum(reference() is None for reference in recent)
        self._found = now - began <= _SOON and 2 * gone >= _MANY
        return _MANY if self._found else 0


# A queue for each instance: what a batched method keeps among an instance's attributes.


B = TypeVar("B")


class BoundMethods(Generic[B]):
    """Makes and keeps one object for each instance of a class.

    Args:
        function: The function in the class, for errors.
        qualified_name: Where it is written. Not its plain name, which a subclass may use for a method of its own.
        make: Makes the object of an instance.
    """

    def __init__(self, function: Callable[..., Any], qualified_name: str, make: Callable[[Any], B]) -> None:
        self._function = function
        self._attribute = f"_modelguard_batched_{qualified_name}"
        self._make = make
        self._short_lived = ShortLived()

    def get(self, instance: Any) -> B:
        """The object of an instance, made on first use. Two threads that come first together get the same one.

        Raises:
            InvalidOption: The instance has no ``__dict__``.
        """
        try:
            attributes = vars(instance)
        except TypeError:
            raise self._no_room(instance) from None
        kept = attributes.get(self._attribute)
        if kept is None or kept.instance is not instance:  # none yet, or that of the instance this one is a copy of
            short_lived = 0
            with _lock:
                kept = attributes.get(self._attribute)
                if kept is None or kept.instance is not instance:
                    kept = attributes[self._attribute] = _Kept(instance, self._make(instance))
                    short_lived = self._short_lived.note(kept.bound)
            if short_lived:
                self._warn(short_lived)
        return kept.bound  # type: ignore[no-any-return]

    def _warn(self, instances: int) -> None:
        text = (
            f"{self._function.__qualname__}(): {instances} instances got a queue within a minute, and most of them are "
            "gone. Items of different instances never share a batch. Keep one instance for the process, or batch a "
            "function at module level."
        )
        warnings.warn(text, ModelGuardWarning, stacklevel=4)

    def _no_room(self, instance: Any) -> InvalidOption:
        why = f"{type(instance).__name__} has __slots__, and no room for the queue of an instance"
        fix = "Add '__dict__' to its __slots__, or batch a function at module level."
        return InvalidOption("function", self._function, why=why, fix=fix)


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


_shared_threads.add_renewal(_renew_lock)

_CLOSE_TIMEOUT = 30.0


class Decorated(Entered):
    """A batch function behind a queue.

    Args:
        function: The batch function.
        options: Its options.
        instance: What it is bound to, if it is a method.
    """

    def __init__(self, function: Callable[..., Any], options: BatchOptions, *, instance: object = None) -> None:
        functools.update_wrapper(cast("Callable[..., Any]", self), function)
        super().__init__()
        self.__signature__ = call_signature(function, options.limits.name)
        self._function = function
        self._options = options
        self._batcher = Batcher(function, options, lingers=instance is None)
        self._arguments = Arguments(function, options)
        self._always_checked = self._arguments.always_checked
        self._methods: BoundMethods[Any] | None = None
        self._method_of: tuple[Any, str] | None = None
        self._on_callers_loop = options.function.is_async and options.function.loop == "caller"

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
        *,
        put: Callable[[Request, float | None], object] | None = None,
    ) -> None:
        if others:
            raise self._arguments.wrong_count(1 + len(others))
        if priority:
            request.priority = check_priority(priority)
            self._batcher.order()
        if extras or self._always_checked or type(request.item) is list:
            self._arguments.fill_in(request, extras)
        if self._on_callers_loop and request.loop is None:
            request.home = self._callers_loop()
        (put or self._batcher.put)(request, None if timeout is None else _units.seconds(timeout, "timeout", zero=True))

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
        return self._options.limits.name

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
        await (_loops.run_in_thread(close) if asyncio._get_running_loop() is None else asyncio.to_thread(close))  # noqa: SLF001 - as above

    def _reopen(self) -> None:
        self._batcher.reopen()

    # As a method

    def __set_name__(self, owner: type, name: str) -> None:
        written = getattr(self._function, "__qualname__", "")
        if written != f"{owner.__qualname__}.{name}":
            return  # a function from elsewhere that is kept in a class
        self._methods = BoundMethods(self._function, written, functools.partial(self._bind, name))
        self._arguments.refuse_all(f"it is a method of {owner.__name__}: call it on an instance")
        self._always_checked = True

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or self._methods is None:
            return self
        return self._methods.get(instance)

    def _bind(self, name: str, instance: Any) -> Self:
        method = self._function.__get__(instance, type(instance))
        bound = type(self)(method, self._options, instance=instance)
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
