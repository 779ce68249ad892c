"""Batched functions behind uvicorn and gunicorn's ASGI worker: disconnects, refusals, deadlines, shutdown."""

from __future__ import annotations

import contextlib
import http.client
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest
from tests.process.harness import read, wait_until
from tests.process.web_server import MODEL, NEEDS_SERVERS, QUEUE, UVICORN, WebServer, burst, gunicorn, is_problem

pytestmark = [pytest.mark.timeout(120), NEEDS_SERVERS]

#: Each kind of handler under each arrangement of middleware, by environment.
STARLETTE = (
    MODEL
    + """
    from contextlib import asynccontextmanager
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route
    from modelguard.frameworks.asgi import ModelGuardMiddleware

    class Seen(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            response = await call_next(request)
            response.headers["x-seen"] = "yes"
            return response

    async def awaiting(request):
        await request.body()
        return PlainTextResponse(await predict.aio(request.query_params["item"]))

    def blocking(request):
        return PlainTextResponse(predict(request.query_params["item"]))

    async def early(request):
        told = await predict.aio(request.query_params["item"])
        return PlainTextResponse((await request.body()).decode() + told)

    async def later(request):
        return PlainTextResponse("later", background=BackgroundTask(predict.aio, request.query_params["item"]))

    async def twice(request):
        task = BackgroundTask(predict.aio, request.query_params["item"] + "-again")
        return PlainTextResponse(await predict.aio(request.query_params["item"]), background=task)

    async def status(request):
        return JSONResponse(tell())

    @asynccontextmanager
    async def lifespan(app):
        async with predict:
            yield
        (HERE / "closed").touch()

    mine = Middleware(ModelGuardMiddleware, deadline="30s")
    stacks = {"alone": [mine], "above": [Middleware(Seen), mine], "below": [mine, Middleware(Seen)]}
    routes = [
        Route("/async", awaiting, methods=["GET", "POST"]),
        Route("/sync", blocking, methods=["GET", "POST"]),
        Route("/early", early, methods=["POST"]),
        Route("/later", later),
        Route("/twice", twice),
        Route("/status", status),
    ]
    app = Starlette(routes=routes, middleware=stacks[os.environ.get("STACK", "alone")], lifespan=lifespan)
"""
)


def uvicorn(folder: Path, **environ: str) -> WebServer:
    return WebServer(folder, *UVICORN, app=STARLETTE, **environ)


def disconnect_half(server: WebServer, path: str, method: str) -> None:
    """Every other waiting client disconnects: their items are not computed, and the rest is answered."""
    with server.busy(path) as first:
        items = [f"item-{n}" for n in range(36)]
        lines = [server.connect(f"{path}?item={item}", method) for item in items]
        server.seen(waiting=36, cancelled=0)
        for line in lines[::2]:
            line.close()
        server.seen(waiting=18, cancelled=18)
    staying = items[1::2]
    for line, item in zip(lines[1::2], staying, strict=True):
        with contextlib.closing(line):
            response = http.client.HTTPResponse(line)
            response.begin()
            answer = read(response)
            assert (200, item) == (answer.status, answer.text.split()[0])
    assert 200 == first.result(30).status
    assert sorted(["first", *staying]) == sorted(server.computed)
    server.seen(running=0, waiting=0, cancelled=18)
    assert "Traceback" not in server.log, server.log
    assert "ERROR" not in server.log, server.log


@pytest.mark.parametrize("stack", ["alone", "above", "below"])
def test_calls_of_disconnected_clients_are_not_computed(stack: str, tmp_path: Path) -> None:
    """Behind uvicorn, with and without a body, before and after BaseHTTPMiddleware; and the log stays clean."""
    with uvicorn(tmp_path, STACK=stack) as server:
        disconnect_half(server, "/async", method="POST" if stack == "alone" else "GET")
        assert (stack == "above") == ("x-seen" in server.ask("/livez").headers)


def test_a_disconnect_frees_the_thread_of_a_handler(tmp_path: Path) -> None:
    """Starlette's thread pool gets its threads back for other requests, and nothing is computed."""
    with uvicorn(tmp_path) as server:
        disconnect_half(server, "/sync", method="GET")


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_refusals_and_deadlines_behind_uvicorn(kind: str, tmp_path: Path) -> None:
    """A full queue is 503 at once, a client's own deadline 504, an invalid header 400; after that all is served."""
    with uvicorn(tmp_path) as server:
        with server.busy("/async") as first:
            late = server.ask(f"/{kind}?item=late", headers={"Request-Timeout": "0.2"})
            assert is_problem(late, 504), late.text
            waiting = [server.begin(f"/async?item=waits-{n}") for n in range(QUEUE)]
            server.seen(waiting=QUEUE)
            for _ in range(5):
                refused = server.ask(f"/{kind}?item=refused")
                assert is_problem(refused, 503), refused.text
            assert [200, 200] == [server.ask(path).status for path in ("/livez", "/readyz")]
            for nonsense in ("soon", "-1", "nan", "1e999", ""):
                assert is_problem(server.ask(f"/{kind}?item=no", headers={"Request-Timeout": nonsense}), 400)
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert not {"late", "refused", "no"} & set(server.computed)
        told = burst(server, f"/{kind}", clients=60)
        assert {200} <= set(told) <= {200, 503, 504}, told
        assert 200 == server.ask(f"/{kind}?item=after", headers={"Request-Timeout": "20"}).status
        assert "Traceback" not in server.log, server.log


def test_a_burst_that_is_too_much_is_refused_in_part(tmp_path: Path) -> None:
    """Some clients with little time are served, and the others are refused at once or at their deadline."""
    with uvicorn(tmp_path) as server:
        assert [200] * 3 == [server.ask("/async?item=warm").status for _ in range(3)]
        asked = [server.begin(f"/async?item={n}", headers={"Request-Timeout": "1"}) for n in range(60)]
        answers = [one.result(30) for one in asked]
        told = Counter(answer.status for answer in answers)
        assert {200} < set(told) <= {200, 503, 504}, told
        assert all(answer.status == 200 or is_problem(answer, answer.status) for answer in answers)


def test_requests_that_wait_when_uvicorn_ends_are_answered(tmp_path: Path) -> None:
    """It admits nothing more, computes what waits, closes the function, and ends normally."""
    with uvicorn(tmp_path) as server:
        with server.busy("/async") as first:
            waiting = [server.begin(f"/{kind}?item={kind}-{n}") for n in range(6) for kind in ("async", "sync")]
            server.seen(waiting=12)
            server.process.terminate()
            wait_until(lambda: "Shutting down" in server.log, what="it has begun to end")
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        # uvicorn ends by the signal that it was sent, once all is done.
        assert server.process.wait(30) in (0, -signal.SIGTERM)
        assert (tmp_path / "closed").exists()
        assert "Application shutdown complete" in server.log
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", ["uvicorn", "gunicorn"])
def test_a_body_that_comes_after_the_model_was_called(kind: str, tmp_path: Path) -> None:
    """The watcher for disconnects and the application wait for the same message, and the application gets it."""
    with uvicorn(tmp_path) if kind == "uvicorn" else gunicorn(tmp_path, "-k", "asgi", app=STARLETTE) as server:
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as line:
            line.sendall(b"POST /early?item=1 HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\n")
            wait_until(lambda: server.computed == ["1"], seconds=20, what="the model is asked")
            server.seen(running=0, waiting=0)
            line.sendall(b"text ")
            response = http.client.HTTPResponse(line)
            response.begin()
            assert ["text", "1"] == read(response).text.split()[:2]
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", ["uvicorn", "gunicorn"])
def test_calls_of_background_tasks_are_computed(kind: str, tmp_path: Path) -> None:
    """A background task outlives the answer, and a client that closes after its answer cancels nothing."""
    with uvicorn(tmp_path) if kind == "uvicorn" else gunicorn(tmp_path, "-k", "asgi", app=STARLETTE) as server:
        assert "later" == server.ask("/later?item=1").text
        assert ["2"] == server.ask("/twice?item=2").text.split()[:1]
        wait_until(
            lambda: {"1", "2", "2-again"} == set(server.computed), seconds=5, what=f"all is computed: {server.log}"
        )
        server.seen(running=0, waiting=0, cancelled=0)
        assert "Traceback" not in server.log, server.log


def test_starlette_behind_gunicorn(tmp_path: Path) -> None:
    """Its own ASGI worker reports disconnects, refuses as promised, and answers what waits when it ends."""
    with gunicorn(tmp_path, "-k", "asgi", app=STARLETTE) as server:
        disconnect_half(server, "/async", method="POST")
        told = burst(server, "/async", clients=60)
        assert {200} <= set(told) <= {200, 503, 504}, told
        (tmp_path / "computed").write_text("")
        with server.busy("/async") as first:
            late = server.ask("/async?item=late", headers={"Request-Timeout": "0.2"})
            assert is_problem(late, 504) or is_problem(late, 503)  # where runs have been slow, it is refused at once
            waiting = [server.begin(f"/async?item={n}") for n in range(10)]
            server.seen(waiting=10)
            server.process.terminate()
            wait_until(lambda: "Handling signal: term" in server.log, what="it has begun to end")
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert 0 == server.process.wait(30), server.log
        assert (tmp_path / "closed").exists()
