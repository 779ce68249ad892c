"""The options of the middlewares for frameworks with requests of their own kind, and what they mean for one request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from modelguard import _units
from modelguard.frameworks._answers import Answer, Ready, WebOptions, check_names
from modelguard.frameworks.admin import Admin, check_admin
from modelguard.serving.deadlines import WebRequest, on_behalf_of

__all__ = ["RequestOptions"]

Header = Callable[[str], str | None]


class RequestOptions:
    """The options of :class:`modelguard.frameworks.wsgi.ModelGuardMiddleware`; functions get the framework's request.

    Raises:
        InvalidOption: An option is invalid, or there is no such option.
    """

    @check_names
    def __init__(
        self,
        *,
        deadline: _units.Duration | None = None,
        timeout_header: str | None = "Request-Timeout",
        livez: str | None = "/livez",
        readyz: str | None = "/readyz",
        admin: Admin | None = None,
        guards: Iterable[Ready] | None = None,
        detail: bool = False,
        fair_by: str | Callable[[Any], Hashable] | None = None,
        priority: Callable[[Any], int] | None = None,
    ) -> None:
        self._admin = check_admin(admin)
        self._options = WebOptions(
            deadline=deadline,
            timeout_header=timeout_header,
            livez=livez,
            readyz=readyz,
            guards=guards,
            detail=detail,
            fair_by=fair_by,
            priority=priority,
        )

    def command(self, method: str, path: str, query: str, header: Header) -> Answer | Callable[[], Answer] | None:
        """As :meth:`Admin.command`; None without an admin route."""
        admin = self._admin
        return None if admin is None else admin.command(method, path, query, lambda: header("Authorization"))

    def timeout(self, method: str, path: str, header: Header) -> float | Answer | None:
        """The time limit of a request in seconds, None for no limit; or the answer to a probe or an invalid header."""
        name = self._options.timeout_header
        return self._options.probe(method, path) or self._options.timeout(None if name is None else header(name))

    def on_behalf_of(self, web_request: WebRequest, request: Any, header: Header) -> AbstractContextManager[None]:
        """The block for the batched calls of a request.

        Raises:
            InvalidOption: ``fair_by`` returned a key that is not hashable, or ``priority`` no priority.
            Exception: What these functions raised.
        """
        name = self._options.fair_by
        key, priority = self._options.identify(request, header(name) if isinstance(name, str) else None)
        return on_behalf_of(web_request, key, priority)

    def answer(self, error: Exception) -> Answer | None:
        """The answer to an error; None if it is not an error for clients."""
        return self._options.answer(error)
