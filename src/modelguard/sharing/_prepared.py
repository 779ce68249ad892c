"""What this process has been prepared for, and how its forked children repair themselves: ``in_child``."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from modelguard.errors import ForkOrder
from modelguard.lifecycle.model_guard import ModelGuard
from modelguard.sharing import _hazards, _loads, _restore, _signals
from modelguard.sharing._hazards import Hazard

__all__ = ["Prepared", "current", "forking_twice", "in_child", "install", "trying"]

#: Seconds that any fork of a prepared process waits for running loads. Short, because the forking thread may hold the
#: lease that a release waits for.
_FORK_WAIT = 10.0


@dataclass
class Prepared:
    """What a process has prepared, and whether a child has repaired itself."""

    pid: int
    guards: tuple[ModelGuard[Any], ...]
    generations: tuple[int, ...]
    hazards: tuple[Hazard, ...]
    fixes: bool
    ready_pid: int = 0
    failure: BaseException | None = None


_current: Prepared | None = None
_signal_mask = threading.local()  # of the thread that forks
_trying = False
_twice = False
_forker = 0  # the process that forked last; its child cannot ask for its parent, which may have ended
_first = threading.Lock()  # taken by the first preparation, and never released


def current() -> Prepared | None:
    """What this process, or the one that forked it, has prepared."""
    return _current


def install(prepared: Prepared | None) -> None:
    """Have children that are forked from now on repair themselves like this; None for not at all."""
    global _current
    _current = prepared
    if _first.acquire(blocking=False):  # twice, and a fork would leave the signals blocked
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)


@contextmanager
def trying() -> Iterator[None]:
    """In the block, a child is a trial: it runs no warm-up but the one that it was forked for."""
    global _trying
    _trying = True
    try:
        yield
    finally:
        _trying = False


@contextmanager
def forking_twice() -> Iterator[None]:
    """In the block, a child only forks the worker and ends: the worker repairs itself, as it would without it."""
    global _twice
    _twice = True
    try:
        yield
    finally:
        _twice = False


def in_child() -> None:
    """Repair a forked worker: its threads, random seeds and allocator threads, and run each guard's warm-up.

    Children of a prepared process do this by themselves when they are forked. In a server's hook, call this function as
    well, because it raises the errors of the repair. Further calls have no effect.

    Raises:
        ForkOrder: The parent was never prepared, or this is the parent.
        Exception: The error that a guard's ``warmup`` raised.
    """
    if _current is None:
        raise ForkOrder(
            "in_child", why="the parent was not prepared", fix="Call prefork.prepare() in it before it forks."
        )
    if os.getpid() == _current.pid:
        why = "this is the parent process"
        raise ForkOrder(
            "in_child", why=why, fix="Call it in the worker, as in gunicorn's post_fork or uWSGI's postfork."
        )
    _repair(_current)
    if _current.failure is not None:
        raise _current.failure


def _before_fork() -> None:
    """Wait for loads in other threads, and hold back signals until the child can act on them."""
    global _forker
    _forker = os.getpid()
    if _current is None or os.getpid() != _current.pid:
        return
    if not threading.current_thread().name.startswith(_hazards.OUR_THREADS):  # a loader may fork at any time
        _loads.wait_for_loads(_FORK_WAIT)
    _signal_mask.before = _signals.block()


def _after_fork_in_parent() -> None:
    mask = getattr(_signal_mask, "before", None)
    if mask is not None:
        _signal_mask.before = None
        _signals.restore_mask(mask)


def _after_fork() -> None:
    global _twice
    prepared = _current
    if prepared is None or _forker != prepared.pid:  # the children of a worker are not ours
        _after_fork_in_parent()
        return
    if _twice:
        _twice, prepared.pid = False, os.getpid()
        _after_fork_in_parent()
        return
    if _trying:
        _after_fork_in_parent()
        _restore.restore(prepared.hazards if prepared.fixes else ())
        return
    with _signals.default_actions():
        _after_fork_in_parent()
        _repair(prepared)


def _repair(prepared: Prepared) -> None:
    if prepared.ready_pid == os.getpid():
        return
    prepared.ready_pid = os.getpid()
    try:
        _restore.restore(prepared.hazards if prepared.fixes else ())
        for guard in prepared.guards:
            guard.engine.warm_up()
    except BaseException as error:  # noqa: BLE001 - a fork hook cannot raise; in_child() does
        prepared.failure = error
