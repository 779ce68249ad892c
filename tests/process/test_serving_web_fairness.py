"""Fair shares behind real servers: a caller below its share is served, whatever the others send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.process.web_server import MODEL, NEEDS_SERVERS, QUEUE, SIZE, UVICORN, WebServer, gunicorn, is_problem

pytestmark = [pytest.mark.timeout(120), NEEDS_SERVERS]

STARLETTE = (
    MODEL
    + """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route
    from modelguard.frameworks.asgi import ModelGuardMiddleware

    async def awaiting(request):
        return PlainTextResponse(await predict.aio(request.query_params["item"]))

    async def status(request):
        return JSONResponse(tell())

    def urgency(scope):
        return int(b"urgent" in scope["query_string"])

    options = {"fair_by": "X-Caller", "priority": urgency} if os.environ["FAIR"] == "yes" else {}
    routes = [Route("/ask", awaiting), Route("/status", status)]
    app = Starlette(routes=routes, middleware=[Middleware(ModelGuardMiddleware, **options)])
"""
)

FLASK = (
    MODEL
    + """
    from flask import Flask, request
    from modelguard.frameworks import wsgi

    app = Flask(__name__)

    @app.get("/ask")
    def blocking():
        return predict(request.args["item"])

    @app.get("/status")
    def status():
        return tell()

    def urgency(environ):
        return int("urgent" in environ["QUERY_STRING"])

    options = {"fair_by": "X-Caller", "priority": urgency} if os.environ["FAIR"] == "yes" else {}
    wsgi.install(app, **options)
"""
)

SERVERS: dict[str, Callable[..., WebServer]] = {
    "uvicorn": lambda folder, **environment: WebServer(folder, *UVICORN, app=STARLETTE, **environment),
    "gunicorn-asgi": lambda folder, **environment: gunicorn(folder, "-k", "asgi", app=STARLETTE, **environment),
    "gunicorn-threads": lambda folder, **environment: gunicorn(
        folder, "-k", "gthread", "--threads", "64", app=FLASK, **environment
    ),
}

GREEDY, POLITE = {"X-Caller": "greedy"}, {"X-Caller": "polite"}


@pytest.mark.parametrize("kind", SERVERS)
def test_a_polite_caller_is_served_beside_a_greedy_one(kind: str, tmp_path: Path) -> None:
    """It is in the next batch, and gets a place in a full queue: one of the greedy caller's requests is refused."""
    with SERVERS[kind](tmp_path, FAIR="yes") as server:
        with server.busy("/ask") as first:
            greedy = [server.begin(f"/ask?item=greedy-{n}", headers=GREEDY) for n in range(QUEUE)]
            server.seen(waiting=QUEUE)
            assert is_problem(server.ask("/ask?item=greedy-more", headers=GREEDY), 503)
            polite = server.begin("/ask?item=polite", headers=POLITE)
            server.wait_until(lambda: any(one.done() for one in greedy), "one has lost its place", seconds=20)
            server.seen(waiting=QUEUE)
            assert not polite.done()
        assert (200, "polite") == (polite.result(30).status, polite.result().text.split()[0])
        assert 200 == first.result(30).status
        answers = [one.result(30) for one in greedy]
        assert Counter({200: QUEUE - 1, 503: 1}) == Counter(answer.status for answer in answers)
        assert all(is_problem(answer, 503) for answer in answers if answer.status == 503)
        assert "polite" in server.computed[1 : 1 + SIZE]
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", SERVERS)
def test_urgent_requests_go_first(kind: str, tmp_path: Path) -> None:
    """By the middleware's ``priority``."""
    with SERVERS[kind](tmp_path, FAIR="yes") as server:
        with server.busy("/ask") as first:
            waiting = [server.begin(f"/ask?item=calm-{n}") for n in range(12)]
            server.seen(waiting=12)
            waiting.append(server.begin("/ask?item=urgent"))
            server.seen(waiting=13)
        assert {200} == {one.result(30).status for one in [first, *waiting]}
        assert "urgent" == server.computed[1]


@pytest.mark.parametrize("kind", SERVERS)
def test_a_header_changes_nothing_unless_the_application_names_it(kind: str, tmp_path: Path) -> None:
    """Clients cannot get ahead by calling themselves somebody else."""
    with SERVERS[kind](tmp_path, FAIR="no") as server:
        with server.busy("/ask") as first:
            waiting = [server.begin(f"/ask?item=greedy-{n}", headers=GREEDY) for n in range(12)]
            server.seen(waiting=12)
            waiting.append(server.begin("/ask?item=urgent", headers=POLITE))
            server.seen(waiting=13)
        assert {200} == {one.result(30).status for one in [first, *waiting]}
        assert "urgent" == server.computed[-1]
