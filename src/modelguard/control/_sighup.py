"""SIGHUP reloads all guards, where the server does not use the signal itself."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from modelguard.errors import NotSupported

__all__ = ["check", "install", "remove"]

_FEATURE = "modelguard.control.listen(sighup=True)"

_installed: _Handler | None = None


class _Handler:
    """Wakes the listener, then does what was done before."""

    def __init__(self, wake: Callable[[], None], earlier: Any) -> None:
        self._wake = wake
        self.earlier = earlier

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._wake()
        if callable(self.earlier):
            self.earlier(number, frame)


def check() -> None:
    """Check that the signal can be used.

    Raises:
        NotSupported: It cannot; the message names the server that uses it.
    """
    if _installed is not None and signal.getsignal(signal.SIGHUP) is _installed:
        return
    server = _server()
    if server is not None:
        why = f"{server} uses SIGHUP itself; leave sighup out, and write: modelguard ctl PID reload --all"
        raise NotSupported(_FEATURE, reason=why)
    if threading.current_thread() is not threading.main_thread():
        raise NotSupported(_FEATURE, reason="only the main thread can install a handler; call it there")
    if signal.getsignal(signal.SIGHUP) is None:
        raise NotSupported(_FEATURE, reason="something outside Python handles the signal")


def install(wake: Callable[[], None]) -> None:
    """Handle the signal, once. An earlier handler is called too."""
    global _installed
    earlier = signal.getsignal(signal.SIGHUP)
    if not isinstance(earlier, _Handler):
        handler = _installed = _Handler(wake, earlier)
        signal.signal(signal.SIGHUP, handler)


def remove() -> None:
    """Give the signal back, unless another handler has been put above this one."""
    global _installed
    _installed = None
    current = signal.getsignal(signal.SIGHUP)
    if isinstance(current, _Handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, current.earlier)


def _server() -> str | None:
    """The server that this process belongs to, if it uses the signal: gunicorn and uWSGI reload their workers at it."""
    if "uwsgi" in sys.modules:
        return "uWSGI"
    # gunicorn is also imported by those who only use its classes; its arbiter sets the variable.
    if "gunicorn.arbiter" in sys.modules and os.environ.get("SERVER_SOFTWARE", "").startswith("gunicorn"):
        return "gunicorn"
    return None
