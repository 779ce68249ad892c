"""Middleware for Django: error responses, deadlines, disconnects and probes, under WSGI and ASGI.

In the settings::

    MIDDLEWARE = ["modelguard.frameworks.django.ModelGuardMiddleware", ...]  # the first
    MODELGUARD = {"deadline": "2s"}

Django answers 500 to an error of a view before any ASGI or WSGI middleware sees it, so those of modelguard cannot help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from modelguard import _extras
from modelguard.errors import InvalidOption
from modelguard.frameworks._answers import Answer
from modelguard.frameworks._web import Header, Web
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
        self._web = _read_settings()
        sync = _import("asgiref.sync")
        self._is_async = bool(sync.iscoroutinefunction(get_response))
        if self._is_async:
            sync.markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        """Serve one request."""
        if self._is_async:
            return self._serve_async(request)
        step = self._web.receive(*_first_lines(request))
        if isinstance(step, Answer):
            return _respond(request, step)
        with self._web.serving(WebRequest(step), request, request.headers.get) as scope, scope:
            return self.get_response(request)

    async def _serve_async(self, request: Any) -> Any:
        step = await self._web.areceive(*_first_lines(request))
        if isinstance(step, Answer):
            return _respond(request, step)
        with self._web.serving(WebRequest(step), request, request.headers.get) as scope, scope:
            return await self.get_response(request)

    def process_exception(self, request: Any, exception: Exception) -> Any:
        """Called by Django with an error of a view."""
        answer = self._web.answer(exception)
        return None if answer is None else _respond(request, answer)


def _read_settings() -> Web:
    options = getattr(_import("django.conf").settings, "MODELGUARD", {})
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        fix = "Write MODELGUARD = {'deadline': '2s'}."
        raise InvalidOption("MODELGUARD", options, why="must be a dict of options", fix=fix)
    return Web.read(options)


def _first_lines(request: Any) -> tuple[str, str, str, Header]:
    return request.method, request.path_info, request.META.get("QUERY_STRING", ""), request.headers.get


def _respond(request: Any, answer: Answer) -> Any:
    make = _import("django.http").HttpResponse
    return make(answer.body_for(request.method), status=answer.status, reason=answer.reason, headers=answer.headers)


def _import(module: str) -> Any:
    return _extras.load(module, "modelguard.frameworks.django")
