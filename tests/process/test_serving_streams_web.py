"""Streams behind uvicorn: a client that does not read harms nobody, and a client that reads slowly gets everything."""

from __future__ import annotations

import contextlib
import http.client
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.process.harness import Server, write_app
from tests.process.web_server import NEEDS_SERVERS, UVICORN

pytestmark = [pytest.mark.timeout(120), NEEDS_SERVERS]

#: Bytes of a part, and parts of a response: more than the buffers of two sockets hold.
PART, PARTS = 200_000, 200

APP = f"""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route
    from modelguard import Buffer, batched
    from modelguard.frameworks.asgi import ModelGuardMiddleware

    @batched(max_size=4, buffer=Buffer(parts=4, slow_after="2s"), max_wait="20s", name="blocks")
    def blocks(items):
        for number in range({PARTS}):
            yield [bytes([number]) * {PART} for _ in items]

    async def get(request):
        return StreamingResponse(blocks.stream(request.query_params["client"]))

    async def status(request):
        status = blocks.status()
        return JSONResponse({{"waiting": status.waiting, "running": status.running, "failed": status.failed,
                             "answered": status.answered, "cancelled": status.cancelled}})

    app = Starlette(routes=[Route("/blocks", get), Route("/status", status)])
    app.add_middleware(ModelGuardMiddleware)
"""

WHOLE = b"".join(bytes([number]) * PART for number in range(PARTS))


def answer(line: socket.socket) -> bytes:
    with contextlib.closing(line):
        response = http.client.HTTPResponse(line)
        response.begin()
        assert 200 == response.status
        return response.read()


def test_a_client_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    """Its neighbours in the batch get all of their parts, and the next batch runs."""
    write_app(tmp_path, APP)
    with Server(tmp_path, *UVICORN) as server:
        server.wait_until(lambda: server.port and server.ask("/livez").status == 200, "it serves")
        stuck = server.connect("/blocks?client=stuck")
        readers = [server.connect(f"/blocks?client={number}") for number in range(3)]  # the batch is full, and begins
        with ThreadPoolExecutor() as pool:
            assert [WHOLE] * 3 == [*pool.map(answer, readers)]
        server.wait_until(lambda: server.ask("/status").json["running"] == 0, "the batch has ended")
        status = server.ask("/status").json
        assert (1, 3) == (status["failed"], status["answered"]), status
        with pytest.raises(http.client.IncompleteRead):
            answer(stuck)


def test_a_lone_slow_client_gets_everything(tmp_path: Path) -> None:
    """While nobody waits behind it, the generator waits for it."""
    write_app(tmp_path, APP.replace('max_wait="20s", ', ""))
    with Server(tmp_path, *UVICORN) as server:
        server.wait_until(lambda: server.port and server.ask("/livez").status == 200, "it serves")
        line = server.connect("/blocks?client=slow")
        server.wait_until(lambda: server.ask("/status").json["running"] == 1, "it is computed")
        server.ask("/status")  # the buffers are full by now or soon; and the batch is still there
        assert WHOLE == answer(line)
        server.wait_until(lambda: server.ask("/status").json["answered"] == 1, "it has ended")
