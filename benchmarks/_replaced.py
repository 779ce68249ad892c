"""The server of ``isolation_replacement.py``: one model, replaced in several ways. ``SIDE`` names the way.

``/`` analyses a text, ``/replace`` orders a replacement, ``/count`` tells how many have been completed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, Protocol

import _isolated
import _isolation_peers

#: Of the isolated function, and of gunicorn's arbiter.
WORKERS = 2


class Side(Protocol):
    """A way of having the model, and of replacing it."""

    async def analyse(self) -> int:
        """Analyse a text; returns the process that did it."""

    async def replace(self) -> None:
        """Order a replacement."""

    def count(self) -> int:
        """How many replacements are complete."""


class Worker:
    """An isolated function, one of whose workers is worn."""

    async def analyse(self) -> int:
        return (await _isolated.entities.aio(_isolated.TEXT))[0]

    async def replace(self) -> None:
        with contextlib.suppress(ValueError):
            await _isolated.entities.aio("fail")

    def count(self) -> int:
        status = _isolated.entities.status()
        complete = all(one.state != "starting" for one in status.workers) and len(status.workers) >= WORKERS
        return status.recycled if complete else status.recycled - 1


class Mold(Worker):
    """An isolated function with a new mold."""

    async def replace(self) -> None:
        _isolated.entities.reload(wait=False)

    def count(self) -> int:
        return _isolated.entities.status().generation - 1


class Here:
    """A guard in the server's process."""

    async def analyse(self) -> int:
        return (await asyncio.to_thread(_isolated.entities_here, _isolated.TEXT))[0]

    async def replace(self) -> None:
        _isolated.in_process.reload(wait=False)

    def count(self) -> int:
        return _isolated.in_process.status().generation - 1


class Dirty:
    """gunicorn's dirty workers, one of which is told to end: it is how one is replaced there."""

    def __init__(self) -> None:
        self._call: Callable[[Any], Any] = _isolation_peers.caller(os.environ["DIRTY_SOCKET"], _isolation_peers.SPACY)
        self._met: list[int] = []

    async def analyse(self) -> int:
        pid: int = (await asyncio.to_thread(self._call, _isolated.TEXT))[0]
        if pid not in self._met:
            self._met.append(pid)
        return pid

    async def replace(self) -> None:
        os.kill(self._met[-1], signal.SIGTERM)

    def count(self) -> int:
        return len(self._met) - WORKERS


SIDES: dict[str, Callable[[], Side]] = {"worker": Worker, "mold": Mold, "here": Here, "dirty": Dirty}
_side: Side = SIDES[os.environ.get("SIDE", "worker")]()


async def app(scope: Any, _receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    status, body = 200, "ok"
    try:
        if scope["path"] == "/replace":
            await _side.replace()
        elif scope["path"] == "/count":
            body = str(_side.count())
        else:
            body = str(await _side.analyse())
    except Exception as error:  # noqa: BLE001 - a call that fails in a replacement is what is looked for
        status, body = 500, type(error).__name__
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})
