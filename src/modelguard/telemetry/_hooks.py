"""Hooks, which receive the events, and the one that is there from the start: a line on the logger ``modelguard``.

modelguard sets no level and no handler: the application decides what is shown.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.runtime import fork_hooks

if TYPE_CHECKING:
    from modelguard.telemetry._events import Event

__all__ = ["Hook", "add_hook", "describe", "emit", "import_events", "level_of", "listening", "logger", "set_hooks"]


def _in_one_line(record: logging.LogRecord) -> bool:
    """Escape what would begin a line of its own, or control a terminal: names and the texts of errors are not ours."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_printable, record.args))
    elif isinstance(record.args, Mapping) and "%(" in str(record.msg):  # else it is shown as a whole, by its repr
        record.args = {name: _printable(value) for name, value in record.args.items()}
    return True


def _printable(value: object) -> object:
    if not isinstance(value, str | BaseException):
        return value
    try:
        return _units.printable(str(value))
    except Exception:  # noqa: BLE001 - its own code; handlers report it, and do not raise into whoever logs
        return value


logger = logging.getLogger("modelguard")
logger.addHandler(logging.NullHandler())
logger.addFilter(_in_one_line)


def _handle(record: logging.LogRecord) -> None:
    """Keep errors of the application's handlers and filters from whoever logs: a model would not be loaded then."""
    try:
        logging.Logger.handle(logger, record)
    except Exception:  # noqa: BLE001 - of their own code
        _complain()


def _complain() -> None:
    """What logging's own handlers do with their errors."""
    if logging.raiseExceptions:
        traceback.print_exc()


logger.handle = _handle  # type: ignore[method-assign] # loggers are made by logging, and once for a name


def level_of(event: Event) -> int:
    """The level of an event, as a number of ``logging``.

    WARNING if it needs attention, DEBUG for ``BatchFinished``, which comes with every batch, and INFO for all others.
    """
    return event._level()  # noqa: SLF001 - of this package


def describe(event: Event) -> str:
    """Describe an event in one line: newlines and escape sequences in it are escaped."""
    return _units.printable(event._sentence())  # noqa: SLF001 - of this package


def log_event(event: Event) -> None:
    level = level_of(event)
    if logger.isEnabledFor(level):
        named = {"event": type(event).__name__, **dataclasses.asdict(event)}
        fields = {f"modelguard_{name}": value for name, value in named.items()}
        logger.log(level, "%s: %s", event.guard, describe(event), extra=fields)


Hook = Callable[["Event"], object]

#: The modules whose functions make hooks.
_FACTORIES = ("modelguard.telemetry.prometheus", "modelguard.telemetry.opentelemetry")

_lock = threading.Lock()
# Held during a fork, so that no thread has it that does not exist in the child.
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, before=_lock.acquire, in_parent=_lock.release, in_child=_lock.release)

#: A hook, and the lowest level of the events that it gets.
_Added = tuple[Hook, int]

_LOG: _Added = (log_event, logging.DEBUG)
_hooks: tuple[_Added, ...] = (_LOG,)
#: Whether another one than the log gets the events of every batch.
_batches_wanted = False
_muted = False


def _set(hooks: tuple[_Added, ...]) -> None:
    global _hooks, _batches_wanted
    _hooks = hooks
    _batches_wanted = any(added is not _LOG and added[1] <= logging.DEBUG for added in hooks)


def add_hook(hook: Hook, *, level: int | str = logging.DEBUG) -> Callable[[], None]:
    """Call ``hook`` with the events from now on, in addition to the existing hooks.

    Hooks run in the thread in which the event happens, but never while a guard holds its lock. They should be fast:
    who waits for a load goes on when its events have been told.

    Args:
        hook: A function of one event.
        level: The lowest level of the events that it gets, as :func:`level_of` gives them: ``"INFO"`` leaves out
            ``BatchFinished``, which comes with every batch. Default: every event.

    Returns:
        A callable that removes the hook again.

    Raises:
        InvalidOption: ``hook`` cannot be called, or is the function that makes a hook; ``level`` is no level.
    """
    _check(hook)
    least = logging.getLevelNamesMapping().get(level) if isinstance(level, str) else level
    if not isinstance(least, int) or isinstance(least, bool):
        fix = 'Write level="INFO", "WARNING" or "DEBUG".'
        raise InvalidOption("level", level, why="is not a level of logging", fix=fix)
    added = (hook, least)
    with _lock:
        _set((*_hooks, added))

    def remove() -> None:
        with _lock:
            _set(tuple(each for each in _hooks if each is not added))

    return remove


def set_hooks(hooks: Iterable[Hook] | None) -> None:
    """Replace all hooks; ``[]`` silences modelguard, None restores the default (logging).

    Raises:
        InvalidOption: It is not a collection of hooks.
    """
    if callable(hooks) or isinstance(hooks, str) or not isinstance(hooks, Iterable | None):
        why = f"must be a list of hooks or None, not {_units.kind_of(hooks)}"
        fix = "Write set_hooks([hook]), or add_hook(hook) to keep the others."
        raise InvalidOption("hooks", hooks, why=why, fix=fix)
    chosen = (_LOG,) if hooks is None else tuple((hook, logging.DEBUG) for hook in hooks)
    for hook, _ in chosen:
        _check(hook)
    with _lock:
        _set(chosen)


@contextmanager
def muted() -> Iterator[None]:
    """In the block, no hook receives an event: another process reports what happens here."""
    global _muted
    _muted = True
    try:
        yield
    finally:
        _muted = False


def emit(event: Event) -> None:
    """Pass ``event`` to every hook."""
    level = level_of(event)
    for hook, least in _hooks:
        if _muted or level < least:
            continue
        try:
            hook(event)
        except BaseException:  # noqa: BLE001 - an observer must not break what it observes, not even by sys.exit()
            try:
                logger.exception("modelguard hook %r failed on %s", hook, type(event).__name__)
            except Exception:  # noqa: BLE001 - of the application's record factory
                _complain()


def import_events() -> None:
    """Import what the first event needs (7 to 200 ms): where nobody waits, and as soon as something may fail.

    What fails for lack of a file descriptor could not import what reports it.
    """
    from modelguard.telemetry import _events  # noqa: F401


def listening() -> bool:
    """Whether a hook or the log receives the events of every batch."""
    return _batches_wanted or logger.isEnabledFor(logging.DEBUG)


def _check(hook: Hook) -> None:
    if getattr(hook, "__module__", None) in _FACTORIES and isinstance(hook, FunctionType):
        name = hook.__name__
        raise InvalidOption("hook", hook, why="makes a hook and is not one", fix=f"Call it: add_hook({name}()).")
    fix = "Pass the function itself, without calling it: add_hook(note)."
    _units.function(hook, "hook", "one event", fix=fix, arguments=1)
