"""Requests that drive a service while it is examined."""

from __future__ import annotations

import http.client
import time
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass

from modelguard.errors import InvalidOption

__all__ = ["Driven", "check_url", "drive"]

#: Seconds that one request may take.
_TIMEOUT = 30.0

_ERRORS = 500


@dataclass(frozen=True, slots=True)
class Driven:
    """What became of the requests.

    Attributes:
        answered: How many were answered with a status below 500.
        failed: How many were not.
        last: The last status or error that was not, as text.
    """

    answered: int = 0
    failed: int = 0
    last: str = ""


def check_url(url: str) -> None:
    """Raise ``InvalidOption`` unless it is an HTTP address, or a path on the service's own port."""
    parts = urllib.parse.urlsplit(url)
    if url.startswith("/") or (parts.scheme == "http" and parts.hostname):
        return
    fix = "Write a path such as /predict?text=x, or http://127.0.0.1:8000/predict."
    raise InvalidOption("--request", url, why="must be a path or an http:// address", fix=fix)


def drive(url: str, count: int, listening: Iterable[int | str]) -> Driven:
    """Send requests, one after the other.

    Args:
        url: An address; or a path, for the first TCP port on which the service listens.
        count: How many.
        listening: Where the service listens.
    """
    parts = urllib.parse.urlsplit(url)
    ports = sorted(port for port in listening if isinstance(port, int))
    if parts.hostname:
        host, port = parts.hostname, parts.port or 80
    elif ports:
        host, port = "127.0.0.1", ports[0]
    else:
        return Driven(failed=count, last="the service listens on no TCP port")
    path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    answered, last = 0, ""
    for _ in range(count):
        try:
            status = _get(host, port, path)
        except OSError as error:
            last = type(error).__name__
            time.sleep(0.05)
            continue
        except http.client.HTTPException as error:
            last = type(error).__name__
            continue
        if status < _ERRORS:
            answered += 1
        else:
            last = f"status {status}"
    return Driven(answered, count - answered, last)


def _get(host: str, port: int, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()
