"""What all batched functions have: a name, limits, a state, an end, and what makes them methods and pickles."""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Callable
from typing import Any, Never, Self, Unpack, cast

from modelguard import _units
from modelguard._entered import Entered
from modelguard.errors import InvalidOption, NotSupported, WouldDeadlock
from modelguard.serving import _trio
from modelguard.serving._arguments import Arguments
from modelguard.serving._batcher import Batcher
from modelguard.serving._batches import Limits
from modelguard.serving._bound_methods import BoundMethods
from modelguard.serving._functions import call_signature
from modelguard.serving._options import BatchOptions, Changes
from modelguard.serving._requests import Request
from modelguard.serving.deadlines import check_priority
from modelguard.serving.status import BatchStatus

__all__ = ["Decorated"]

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
        self._batcher = Batcher(function, options, shared=instance is not None)
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
        await (_trio.run_in_thread(close) if asyncio._get_running_loop() is None else asyncio.to_thread(close))  # noqa: SLF001 - as above

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
