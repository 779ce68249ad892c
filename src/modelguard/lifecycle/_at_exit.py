"""Models at interpreter exit: their ``unload`` hooks are called, so that files, threads and connections are closed."""

from __future__ import annotations

import os
import time
from typing import Any

from modelguard import _shutdown, telemetry
from modelguard._weak_registry import WeakRegistry
from modelguard.lifecycle import _release
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._generation import Generation

_guards: WeakRegistry[GuardContext[Any]] = WeakRegistry()


def unload(guard: GuardContext[Any]) -> None:
    """Unload the guard's model at interpreter exit, if the guard has a hook for it and is not closed by then."""
    if guard.options.unload is not None:
        _guards.add(guard)
        _shutdown.before_exit("models", _unload_all)


def _unload_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for guard in list(_guards):
        _unload(guard, max(0.0, until - time.monotonic()))


def _unload(guard: GuardContext[Any], seconds: float) -> None:
    """Call the hook, unless calls still run on the model after ``seconds`` or a parent process loaded it."""
    current, previous = guard.state.close(), guard.state.take_previous()
    for old in (current, previous):
        if old is not None and old.pid == os.getpid() and not guard.state.drain(old, seconds):
            _call(guard, old)


def _call(guard: GuardContext[Any], old: Generation[Any]) -> None:
    error = _release.unload(guard, guard.state.take_model(old))
    if error is not None:
        telemetry.emit(telemetry.CallbackErrored(guard=guard.name, callback="unload", error=error))
