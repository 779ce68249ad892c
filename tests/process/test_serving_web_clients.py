"""Clients that disconnect, websockets, Trio and invalid options behind gunicorn, uvicorn and Hypercorn."""

from __future__ import annotations

import base64
import contextlib
import http.client
import importlib.util
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.harness import read, wait_until, write_app
from tests.process.web_server import GUNICORN, MODEL, NEEDS_SERVERS, UVICORN, WebServer

pytestmark = [pytest.mark.timeout(120), NEEDS_SERVERS]

#: Hypercorn brings a library for websockets, which uvicorn uses too.
NEEDS_HYPERCORN = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("hypercorn", "trio", "wsproto")),
    reason="needs hypercorn[trio]",
)

APP = (
    MODEL
    + """
    import contextlib, json
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocketDisconnect
    from modelguard.frameworks.asgi import ModelGuardMiddleware

    async def early(request):
        told = await predict.aio(request.query_params["item"])
        return PlainTextResponse(f"{len(await request.body())} {told}")

    @batched(max_size=4, name="ticks")
    def ticks(items):
        while True:
            time.sleep(0.02)
            yield ["data: tick\\n\\n" for _ in items]

    async def events(request):
        return StreamingResponse(ticks.stream(None), media_type="text/event-stream")

    async def status(request):
        return JSONResponse({**tell(), "left": ticks.status().cancelled, "stays": ticks.status().running})

    async def talk(websocket):
        await websocket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                await websocket.send_text(await predict.aio(await websocket.receive_text()))

    routes = [Route("/early", early, methods=["GET", "POST"]), Route("/events", events), Route("/status", status)]
    routes.append(WebSocketRoute("/talk", talk))
    options = json.loads(os.environ.get("OPTIONS", "{}"))
    app = Starlette(routes=routes, middleware=[Middleware(ModelGuardMiddleware, **options)])
"""
)

HYPERCORN = ("-m", "hypercorn", "app:app", "-b", "127.0.0.1:0", "-w", "0")
SERVERS = {
    "gunicorn": (*GUNICORN, "-k", "asgi"),
    "uvicorn": (*UVICORN, "--ws", "wsproto"),
    "hypercorn": HYPERCORN,
    "hypercorn on trio": (*HYPERCORN, "-k", "trio"),
}
KINDS = [pytest.param(kind, marks=NEEDS_HYPERCORN if kind != "gunicorn" else ()) for kind in SERVERS]
WATCHED = KINDS[:3]


def serve(kind: str, folder: Path) -> WebServer:
    return WebServer(folder, *SERVERS[kind], app=APP)


def post(server: WebServer, path: str, body: bytes) -> list[str]:
    """The first two words of the answer to a body."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(client):
        client.request("POST", path, body)
        return read(client.getresponse()).text.split()[:2]


class Socket:
    """A websocket client, as small as it can be."""

    def __init__(self, server: WebServer, path: str) -> None:
        self.line = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        key = base64.b64encode(os.urandom(16)).decode()
        self.line.sendall(
            f"GET {path} HTTP/1.1\r\nHost: here\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._reader = self.line.makefile("rb")
        head = iter(lambda: self._reader.readline().strip(), b"")
        assert b" 101" in next(head)
        list(head)

    def send(self, text: str) -> None:
        content = text.encode()
        self.line.sendall(bytes([0x81, 0x80 | len(content), 0, 0, 0, 0]) + content)  # a mask of zeros

    def receive(self) -> str | int:
        """The next text, or the code with which the connection was closed."""
        kind, size = self._reader.read(2)
        content = self._reader.read(size)
        return int(struct.unpack("!H", content[:2])[0]) if kind == 0x88 else content.decode()

    def close(self) -> None:
        """Hang up."""
        self._reader.close()
        self.line.close()


def talking(server: WebServer) -> contextlib.closing[Socket]:
    return contextlib.closing(Socket(server, "/talk"))


@pytest.mark.parametrize("kind", WATCHED)
def test_a_disconnect_before_the_body_is_read_is_noticed(kind: str, tmp_path: Path) -> None:
    """The application has read nothing of it yet, and the client has sent all of it or a part: nothing is computed."""
    with serve(kind, tmp_path) as server:
        with server.busy("/early") as first:
            for number, (length, body) in enumerate([(5, b"whole"), (9, b"part"), (200_000, bytes(150_000))], 1):
                line = socket.create_connection(("127.0.0.1", server.port), timeout=30)
                head = f"POST /early?item={number} HTTP/1.1\r\nHost: here\r\nContent-Length: {length}\r\n\r\n"
                line.sendall(head.encode() + body)
                server.seen(waiting=1)
                line.close()
                server.seen(waiting=0, cancelled=number)
        assert 200 == first.result(30).status
        assert ["500000", "last"] == post(server, "/early?item=last", bytes(500_000))
        assert ["first", "last"] == server.computed
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_leaves_a_stream_of_events_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    """Its stream ends, and the log stays clean."""
    with serve(kind, tmp_path) as server:
        for number in range(1, 4):
            with contextlib.closing(server.connect("/events")) as line:
                assert b"data: tick\n" in iter(line.makefile("rb").readline, b"")
            server.seen(left=number, stays=0)
        server.end()
        assert "Traceback" not in server.log, server.log
        assert "CallerGone" not in server.log, server.log


@pytest.mark.parametrize("kind", KINDS)
def test_websockets_are_served_and_closed_under_overload(kind: str, tmp_path: Path) -> None:
    """Each message gets its answer; a full queue closes the connection with "try again later"; the log stays clean."""
    with serve(kind, tmp_path) as server:
        with talking(server) as talk:
            for word in ("a", "b", "c"):
                talk.send(word)
                assert word == str(talk.receive()).split()[0]
        (tmp_path / "computed").write_text("")
        with server.busy("/early") as first:
            waiting = [server.begin(f"/early?item={n}") for n in range(40)]
            server.seen(waiting=40)
            with talking(server) as talk:
                talk.send("refused")
                assert 1013 == talk.receive()
        assert {200} == {one.result(30).status for one in [first, *waiting]}
        assert "refused" not in server.computed
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", WATCHED)
def test_a_websocket_that_is_hung_up_is_not_computed(kind: str, tmp_path: Path) -> None:
    """Its item leaves the queue while the model is busy, and the log stays clean."""
    with serve(kind, tmp_path) as server:
        with server.busy("/early") as first:
            with talking(server) as talk:
                talk.send("gone")
                server.seen(waiting=1)
            server.seen(waiting=0, cancelled=1)
        assert 200 == first.result(30).status
        assert ["first"] == server.computed
        assert "Traceback" not in server.log, server.log


@NEEDS_HYPERCORN
def test_hypercorn_serves_on_trio(tmp_path: Path) -> None:
    """Batched calls of coroutines, deadlines and probes work there; only disconnects are not noticed."""
    with serve("hypercorn on trio", tmp_path) as server:
        assert ["4", "one"] == post(server, "/early?item=one", b"body")
        (tmp_path / "computed").write_text("")
        with server.busy("/early") as first:
            assert 504 == server.ask("/early?item=late", headers={"Request-Timeout": "0.2"}).status
            assert [200, 200] == [server.ask(path).status for path in ("/livez", "/readyz")]
        assert 200 == first.result(30).status
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", KINDS)
def test_an_invalid_option_stops_the_start(kind: str, tmp_path: Path) -> None:
    """The server ends, and its log names the option and the one that was meant."""
    write_app(tmp_path, APP)
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, *SERVERS[kind]],
            cwd=tmp_path,
            env={**os.environ, "OPTIONS": '{"dedline": "2s"}'},
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: server.poll() is not None, what="it has ended")
    finally:
        server.kill()
        server.wait()
    said = "modelguard: dedline='2s': is not an option of ModelGuardMiddleware. Did you mean 'deadline'?"
    assert said in (tmp_path / "log").read_text()
