"""Hooks, which receive the events. A hook is a callable with one event as its argument; its errors are only logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from modelguard.errors import InvalidOption

if TYPE_CHECKING:
    from modelguard.telemetry.events import Event

Hook = Callable[["Event"], None]

logger = logging.getLogger("modelguard")
logger.addHandler(logging.NullHandler())

_lock = threading.Lock()
_hooks: tuple[Hook, ...] | None = None  # None: the defaults, chosen at the first event


def add_hook(hook: Hook) -> Callable[[], None]:
    """Call ``hook`` with every event from now on, in addition to the existing hooks.

    Hooks run in the thread in which the event happens, but never while a guard holds its lock. They should be fast.

    Returns:
        A callable that removes the hook again.

    Raises:
        InvalidOption: ``hook`` cannot be called.
    """
    global _hooks
    if not callable(hook):
        raise InvalidOption("hook", hook, why="must be a callable of one event", fix="Pass the function itself.")
    with _lock:
        _hooks = (*_current(), hook)
    added = True

    def remove() -> None:
        global _hooks
        nonlocal added
        with _lock:
            left = list(_current())
            if added and hook in left:
                left.remove(hook)  # only once: it may have been added elsewhere too
                _hooks = tuple(left)
            added = False

    return remove


def set_hooks(hooks: Iterable[Hook] | None) -> None:
    """Replace all hooks; ``[]`` silences modelguard, None restores the default (logging).

    Raises:
        InvalidOption: One of them cannot be called.
    """
    global _hooks
    if hooks is not None:
        hooks = tuple(hooks)
        for hook in hooks:
            if not callable(hook):
                raise InvalidOption("hooks", hook, why="must be callables of one event", fix="Pass functions.")
    with _lock:
        _hooks = None if hooks is None else tuple(hooks)


def emit(event: Event) -> None:
    """Pass ``event`` to every hook."""
    for hook in _current():
        try:
            hook(event)
        except BaseException:  # an observer must not break what it observes, not even by sys.exit()
            logger.exception("modelguard hook %r failed on %s", hook, type(event).__name__)


def listening() -> bool:
    """Whether a hook or the log receives the events of every batch."""
    return _hooks is not None or logger.isEnabledFor(logging.DEBUG)


def _current() -> tuple[Hook, ...]:
    if _hooks is not None:
        return _hooks
    from modelguard.telemetry._logging import log_event

    return (log_event,)
