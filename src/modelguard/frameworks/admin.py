"""An HTTP route for the guards, pools and isolated functions of a service: status, reload, unload, pause and resume.

Off unless a secret is given.

::

    from modelguard.frameworks.admin import Admin

    app.add_middleware(ModelGuardMiddleware, admin=Admin(os.environ["ADMIN_SECRET"]))    # Starlette, FastAPI
    wsgi.install(app, admin=Admin(os.environ["ADMIN_SECRET"]))                           # Flask

    curl -H "Authorization: Bearer $ADMIN_SECRET" localhost:8000/modelguard/status
    curl -H "Authorization: Bearer $ADMIN_SECRET" -X POST "localhost:8000/modelguard/reload?name=nlp"

A request reaches one worker. ``modelguard ctl PID --all`` reaches all of a server.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs

from modelguard import _units
from modelguard.control import _listener
from modelguard.errors import InvalidOption
from modelguard.frameworks._answers import Answer, json_answer, problem
from modelguard.telemetry import logger

__all__ = ["Admin"]

_SHORTEST_SECRET = 16
#: The longest query string that is read, in characters. Bodies are not read at all.
_LONGEST_QUERY = 2048


class _Hidden:
    def __repr__(self) -> str:
        return "..."


class Admin:
    """The route, for ``ModelGuardMiddleware(admin=...)`` of ASGI and WSGI.

    ``GET PATH/status``, and ``POST PATH/reload``, ``/unload``, ``/pause`` and ``/resume``, each for all guards, pools
    and isolated functions or for ``?name=``. The answer is JSON: the process id, and the figures of each. 401 without
    the secret, 404 for an unknown name or command, 405 for a wrong method, 409 if one of them could not do it. A reload
    is awaited, unless the query has ``wait=false``. Nothing is read of a request but its first lines.

    Args:
        secret: What the header ``Authorization: Bearer`` must have: at least 16 printable ASCII characters without
            spaces. Take it from the environment. It is shown in no message, log or ``repr``.
        path: Where the route is.
        timeout: How long a request waits at most. Default five minutes.

    Raises:
        InvalidOption: The secret is missing or too short, or another option is invalid.
    """

    __slots__ = ("_digest", "_path", "_timeout")

    def __init__(self, secret: str, *, path: str = "/modelguard", timeout: _units.Duration = 300.0) -> None:
        self._digest = _digest(_check_secret(secret))
        if not (isinstance(path, str) and path.startswith("/") and path.strip("/")):
            why = "must be a path that begins with '/'"
            raise InvalidOption("path", path, why=why, fix="Write path='/modelguard'.")
        self._path = path.rstrip("/")
        self._timeout = _units.seconds(timeout, "timeout")

    def __repr__(self) -> str:
        return f"<Admin at {self._path}>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("Admin cannot be pickled: it would write its secret down")

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each command, for frameworks that look for a route before they call any middleware."""
        return tuple(f"{self._path}/{command}" for command in _listener.COMMANDS)

    def command(
        self, method: str, path: str, query: str, header: Callable[[str], str | None]
    ) -> Answer | Callable[[], Answer] | None:
        """The answer to a request for the route, or what gives it and may block; None if it is for the application."""
        if path != self._path and not path.startswith(f"{self._path}/"):
            return None
        refusal = self._refusal(header("Authorization"))
        return refusal or functools.partial(self._answer, method, path, query)

    def _refusal(self, authorization: str | None) -> Answer | None:
        """The answer to a request without the secret; None if it has it."""
        scheme, _, given = (authorization or "").partition(" ")
        # Digests, so that the time of the comparison does not depend on the length either.
        fits = hmac.compare_digest(_digest(given.strip()), self._digest)
        if fits and scheme.lower() == "bearer":
            return None
        if authorization is not None:
            logger.warning("modelguard: a request to %s had a wrong secret", self._path)
        headers = {"www-authenticate": "Bearer"}
        return problem(HTTPStatus.UNAUTHORIZED, "This needs the header Authorization: Bearer SECRET.", headers)

    def _answer(self, method: str, path: str, query: str) -> Answer:
        """Do what a request with the secret asks for. Blocks."""
        word = path.removeprefix(self._path).strip("/")
        if word not in _listener.COMMANDS:
            known = ", ".join(_listener.COMMANDS)
            return problem(HTTPStatus.NOT_FOUND, f"There is no such command. The commands are {known}.")
        command: _listener.Command = word
        allowed = ("GET", "HEAD") if command == "status" else ("POST",)
        if method not in allowed:
            headers = {"allow": ", ".join(allowed)}
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, f"{command} takes {allowed[0]}.", headers)
        try:
            name, wait = _read_query(query)
        except ValueError:
            return problem(HTTPStatus.BAD_REQUEST, "The query may have name=GUARD and wait=true or wait=false.")
        try:
            results = _listener.run(command, name, wait=wait, timeout=self._timeout)
        except InvalidOption as error:
            return problem(HTTPStatus.NOT_FOUND, str(error))
        status = HTTPStatus.CONFLICT if any(result.error is not None for result in results) else HTTPStatus.OK
        content = {"pid": os.getpid(), "guards": [result._asdict() for result in results]}
        return json_answer(status, content)


def check_admin(admin: object) -> None:
    """Check the option ``admin`` of a middleware."""
    if not isinstance(admin, Admin | None):  # it may be the secret itself
        fix = "Write admin=Admin(os.environ['ADMIN_SECRET'])."
        raise InvalidOption("admin", _Hidden(), why="must be an Admin", fix=fix)


def _check_secret(secret: object) -> str:
    fix = "Take it from the environment: Admin(os.environ['ADMIN_SECRET'])."
    if not isinstance(secret, str):
        why = f"must be text, not {_units.kind_of(secret)}"
    elif len(secret) < _SHORTEST_SECRET:
        why = f"has {len(secret)} characters, and must have at least {_SHORTEST_SECRET}"
        fix = "Make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'."
    elif not (secret.isascii() and secret.isprintable()) or " " in secret:
        why = "must be printable ASCII without spaces, as a header carries it"
    else:
        return secret
    raise InvalidOption("secret", _Hidden(), why=why, fix=fix)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def _read_query(query: str) -> tuple[str | None, bool]:
    """The name, and whether to wait; ValueError if the query has anything else, as of ``parse_qs``."""
    if len(query) > _LONGEST_QUERY:
        raise ValueError(f"it has {len(query)} characters")
    words = parse_qs(query, keep_blank_values=True, max_num_fields=2)
    (name,), (wait,) = words.pop("name", [None]), words.pop("wait", ["true"])
    if words or wait not in {"true", "false"}:
        raise ValueError(query)
    return name, wait == "true"
