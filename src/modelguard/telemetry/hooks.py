"""Who receives the events. A hook is any callable of one event; a hook that raises harms nobody."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from modelguard.telemetry.events import Event

Hook = Callable[[Event], None]

logger = logging.getLogger("modelguard")
logger.addHandler(logging.NullHandler())

_lock = threading.Lock()
_hooks: tuple[Hook, ...] | None = None  # None: the defaults, chosen at the first event


def add_hook(hook: Hook) -> Callable[[], None]:
    """Have ``hook`` called with every event from now on, beside those already there.

    Hooks run in the thread in which the event happens, never while a guard holds its lock. They should be quick.

    Returns:
        A callable that removes the hook again.
    """
    global _hooks
    with _lock:
        _hooks = (*_current(), hook)

    def remove() -> None:
        global _hooks
        with _lock:
            _hooks = tuple(known for known in _current() if known is not hook)

    return remove


def set_hooks(hooks: Iterable[Hook] | None) -> None:
    """Replace all hooks; ``[]`` silences modelguard, None brings the default (logging) back."""
    global _hooks
    with _lock:
        _hooks = None if hooks is None else tuple(hooks)


def emit(event: Event) -> None:
    """Hand ``event`` to every hook."""
    for hook in _current():
        try:
            hook(event)
        except Exception:  # an observer must not break what it observes
            logger.exception("modelguard hook %r failed on %s", hook, type(event).__name__)


def _current() -> tuple[Hook, ...]:
    if _hooks is not None:
        return _hooks
    from modelguard.telemetry.logs import log_event

    return (log_event,)
