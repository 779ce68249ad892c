"""Middleware for Django: error responses, deadlines, disconnects and probes, under WSGI and ASGI.

In the settings::

    MIDDLEWARE = ["modelguard.frameworks.django.ModelGuardMiddleware", ...]  # the first
    MODELGUARD = {"deadline": "2s"}

Django answers 500 to an error of a view before any ASGI or WSGI middleware sees it, so those of modelguard cannot help.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from modelguard import _extras
from modelguard.errors import InvalidOption
from modelguard.frameworks._answers import Answer, answer_of
from modelguard.frameworks.wsgi import RequestOptions
from modelguard.serving.deadlines import WebRequest

__all__ = ["ModelGuardMiddleware"]


class ModelGuardMiddleware:
    """Turns modelguard's errors in views into responses: 503, 504, a deadline for each request, and the two probes.

    It responds as :class:`modelguard.frameworks.asgi.ModelGuardMiddleware` does. The setting ``MODELGUARD`` is a dict
    of the same options, of which ``fair_by`` and ``priority`` may be functions of the ``HttpRequest``. Put it first in
    ``MIDDLEWARE``: probes then need neither a session nor an allowed host, and other middleware counts in the deadline.

    When the client of an ASGI server disconnects, Django cancels the view. Batched calls of a view in a thread are
    cancelled too: it gets ``CallerGone``.

    The deadline ends when the view has returned. What a streaming response computes later has only the deadlines of the
    batched functions; ``stream()`` in the view queues the item at once, so a refusal is still answered.

    Args:
        get_response: Given by Django.

    Raises:
        InvalidOption: ``MODELGUARD`` is not a dict, an option is invalid, or there is no such option.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        self._options = _read_settings()
        sync = _import("asgiref.sync")
        self._is_async = bool(sync.iscoroutinefunction(get_response))
        if self._is_async:
            sync.markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        """Serve one request."""
        if self._is_async:
            return self._serve_async(request)
        command = self._options.command(*_line_of(request), request.headers.get)
        if command is not None:
            return _respond(request, command if isinstance(command, Answer) else command())
        timeout = self._timeout(request)
        if isinstance(timeout, Answer):
            return _respond(request, timeout)
        web_request = WebRequest(timeout)
        try:
            with self._options.on_behalf_of(web_request, request, request.headers.get):
                return self.get_response(request)
        finally:
            web_request.answered()

    async def _serve_async(self, request: Any) -> Any:
        command = self._options.command(*_line_of(request), request.headers.get)
        if command is not None:
            return _respond(request, await answer_of(command))
        timeout = self._timeout(request)
        if isinstance(timeout, Answer):
            return _respond(request, timeout)
        web_request = WebRequest(timeout)
        try:
            with self._options.on_behalf_of(web_request, request, request.headers.get):
                return await self.get_response(request)
        except asyncio.CancelledError:
            web_request.disconnect()
            raise
        finally:
            web_request.answered()

    def process_exception(self, request: Any, exception: Exception) -> Any:
        """Called by Django with an error of a view."""
        answer = self._options.answer(exception)
        return None if answer is None else _respond(request, answer)

    def _timeout(self, request: Any) -> float | Answer | None:
        return self._options.timeout(request.method, request.path_info, request.headers.get)


def _read_settings() -> RequestOptions:
    options = getattr(_import("django.conf").settings, "MODELGUARD", {})
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        fix = "Write MODELGUARD = {'deadline': '2s'}."
        raise InvalidOption("MODELGUARD", options, why="must be a dict of options", fix=fix)
    return RequestOptions(**options)


def _line_of(request: Any) -> tuple[str, str, str]:
    return request.method, request.path_info, request.META.get("QUERY_STRING", "")


def _respond(request: Any, answer: Answer) -> Any:
    body = b"" if request.method == "HEAD" else answer.body
    make = _import("django.http").HttpResponse
    reason = answer.status_line.partition(" ")[2]
    return make(body, status=answer.status, reason=reason, headers=dict(answer.headers))


def _import(module: str) -> Any:
    return _extras.load(module, "modelguard.frameworks.django")
