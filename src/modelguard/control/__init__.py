"""Control of the guards, pools and isolated functions of a running process: by ``modelguard ctl``, and by SIGHUP.

Off unless the service asks for it.

::

    from modelguard import control

    control.listen()               # then: modelguard ctl PID status|reload|unload|pause|resume [NAME]
    control.listen(sighup=True)    # and: kill -HUP PID reloads all of them

The socket is a Unix socket without a file (Linux). It takes commands from processes of the same user and of root, and
it ends with the process, however that ends. A forked worker gets a socket of its own.
"""

from __future__ import annotations

import sys

from modelguard import _units
from modelguard.errors import NotSupported
from modelguard.isolation import _processes

__all__ = ["listen", "stop"]


def listen(*, sighup: bool = False) -> None:
    """Take commands for the guards, pools and isolated functions of this process, and of processes that it forks.

    Call it once, where the application is made. Further calls change nothing, except that they may add ``sighup``. In
    the processes of isolated functions, which import the application too, it does nothing.

    Args:
        sighup: Whether the signal SIGHUP reloads every guard, pool and isolated function that has a model. A handler
            that was there before is called as well.

    Raises:
        NotSupported: This is not Linux; with ``sighup``: the server (gunicorn, uWSGI) uses the signal itself, or this
            is not the main thread.
        InvalidOption: ``sighup`` is not a bool.
        OSError: Another process holds the name of the socket.
    """
    _units.flag(sighup, "sighup")
    if sys.platform != "linux":
        raise NotSupported("modelguard.control.listen()", reason="it needs a Unix socket without a file, as on Linux")
    if _processes.role != "owner":
        return
    from modelguard.control import _listener

    if sighup:
        _listener.check()
    _listener.start()
    if sighup:
        _listener.install()


def stop() -> None:
    """Take no more commands, and give SIGHUP back to its earlier handler. Commands under way go on."""
    if "modelguard.control._listener" in sys.modules:
        from modelguard.control import _listener

        _listener.remove()
        _listener.stop()
