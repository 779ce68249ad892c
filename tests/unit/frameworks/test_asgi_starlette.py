"""``frameworks.asgi`` under Starlette and FastAPI, before and after other middleware."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations of handlers
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from tests.unit.frameworks.asgi_by_hand import Client, ask, behind, disconnect, piece, raising, serve
from tests.unit.frameworks.refusals import ERRORS, FIGURE, IDS, NAME

from modelguard import batched
from modelguard.errors import Overloaded, QueueFull
from modelguard.frameworks.asgi import ModelGuardMiddleware, exception_handlers

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated


class Above(BaseHTTPMiddleware):
    """What many applications use: it gives the application below it another ``receive`` and a task."""

    async def dispatch(self, request: Request, call_next: Any) -> Any:
        response = await call_next(request)
        response.headers["x-seen"] = "yes"
        return response


class Reader(Above):
    """The same, and it reads the body first."""

    async def dispatch(self, request: Request, call_next: Any) -> Any:
        await request.body()
        return await super().dispatch(request, call_next)


MINE = Middleware(ModelGuardMiddleware)

STACKS = {
    "alone": [MINE],
    "above": [Middleware(Above), MINE],
    "below": [MINE, Middleware(Above)],
    "around": [Middleware(Reader), MINE, Middleware(Reader)],
}

every_stack = pytest.mark.parametrize("stack", STACKS)


def starlette(f: Any, kind: str, stack: str) -> Starlette:
    """An application with handlers of one kind."""

    async def awaiting(request: Request) -> PlainTextResponse:
        await request.body()
        return PlainTextResponse(str(await f.aio(1)))

    def blocking(request: Request) -> PlainTextResponse:  # Starlette gives it a thread
        return PlainTextResponse(str(f(1)))

    async def streaming(request: Request) -> StreamingResponse:
        async def parts() -> Any:
            yield str(await f.aio(1))

        return StreamingResponse(parts())

    handler: Any = {"async": awaiting, "sync": blocking, "stream": streaming}[kind]
    return Starlette(routes=[Route("/", handler, methods=["GET", "POST"])], middleware=STACKS[stack])


@every_stack
@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_disconnect_reaches_handlers_of_starlette(model: Gated, stack: str, kind: str, method: str) -> None:
    """In its thread pool and on its loop, before and after BaseHTTPMiddleware; and nothing fails because of it."""
    f = batched(max_size=1)(model)

    async def main() -> None:
        await behind(f, model)
        await disconnect(starlette(f, kind, stack), Client(piece(b"text")), f, method=method)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


@every_stack
@pytest.mark.parametrize("kind", ["async", "sync", "stream"])
def test_starlette_answers_as_without_the_middleware(model: Gated, stack: str, kind: str) -> None:
    """A client that stays gets its answer, and no task is left."""
    f = batched(max_size=1)(model)
    model.gate.set()
    client = asyncio.run(serve(starlette(f, kind, stack), Client(piece(b"text")), method="POST"))
    assert (200, b"1") == (client.status, client.body)


@every_stack
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_starlette_handlers_are_refused_with_an_answer(model: Gated, stack: str, kind: str) -> None:
    """A full queue is 503 and a deadline 504, before and after BaseHTTPMiddleware."""
    f = batched(max_size=1, max_queue=1)(model)
    f.submit("first")
    model.busy()
    with TestClient(starlette(f, kind, stack)) as client:
        assert 504 == client.get("/", headers={"Request-Timeout": "0.05"}).status_code
        f.submit("second")
        refused = client.get("/")
    assert (503, "application/problem+json") == (refused.status_code, refused.headers["content-type"])
    assert ("above" in stack or stack == "around") == ("x-seen" in refused.headers)


def test_it_works_in_fastapi(nobody: None, model: Gated) -> None:
    """With the application's own handlers for other errors, with probes, and with both kinds of routes."""
    app = FastAPI()
    app.add_middleware(ModelGuardMiddleware, deadline="0.05s")
    f = batched(max_size=1)(model)

    @app.exception_handler(ValueError)
    async def mine(request: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"mine": str(error)}, 418)

    @app.get("/async")
    async def awaiting() -> Any:
        return await f.aio(1)

    @app.get("/sync")
    def blocking() -> Any:
        return f(1)

    @app.get("/fail")
    async def fail() -> Any:
        raise ValueError("mine")

    @app.post("/item")
    async def item(item: dict[str, int]) -> Any:
        return item

    with TestClient(app) as client:
        for path in ("/async", "/sync"):
            late = client.get(path)
            assert (504, "application/problem+json") == (late.status_code, late.headers["content-type"])
        assert (418, {"mine": "mine"}) == ((told := client.get("/fail")).status_code, told.json())
        assert (200, {"a": 1}) == ((told := client.post("/item", json={"a": 1})).status_code, told.json())
        assert 422 == client.post("/item", json=1).status_code
        assert [200, 200] == [client.get(path).status_code for path in ("/livez", "/readyz")]
        assert 400 == client.get("/async", headers={"Request-Timeout": "soon"}).status_code


def test_around_starlette_the_answers_are_the_same() -> None:
    """Starlette answers 500 before it raises the error again: that page is held back, and the right answer is sent."""

    async def full(request: Request) -> PlainTextResponse:
        raise QueueFull(NAME, queued=FIGURE, retry_after=3)

    routes = [Route("/", full)]
    for kind in (Starlette, FastAPI):
        for handlers in ({}, exception_handlers()):
            inner: Any = kind(routes=routes, exception_handlers=handlers)
            with TestClient(ModelGuardMiddleware(inner)) as client:
                answer = client.get("/")
            check(answer)


def check(answer: Any) -> None:
    assert (503, "application/problem+json") == (answer.status_code, answer.headers["content-type"])
    assert 3 <= int(answer.headers["retry-after"]) <= 5
    assert {"type", "title", "status", "detail"} == set(answer.json())
    assert NAME not in answer.text


def test_a_mounted_application_is_answered_for_like_any_other() -> None:
    """It has an error page of its own, which would hide that the service is overloaded."""

    async def full(request: Request) -> PlainTextResponse:
        raise QueueFull(NAME, queued=FIGURE, retry_after=3)

    async def broken(request: Request) -> PlainTextResponse:
        raise ValueError("a mistake")

    mounted = Starlette(routes=[Route("/full", full), Route("/broken", broken)])
    app = Starlette(routes=[Mount("/mounted", app=mounted)], middleware=[Middleware(ModelGuardMiddleware)])
    client = TestClient(app, raise_server_exceptions=False)
    check(client.get("/mounted/full"))
    answer = client.get("/mounted/broken")
    assert (500, "Internal Server Error") == (answer.status_code, answer.text)


def test_two_timeout_headers_are_an_error() -> None:
    """Nobody can know which of them the client meant."""

    async def fine(request: Request) -> PlainTextResponse:
        return PlainTextResponse("fine")

    client = TestClient(ModelGuardMiddleware(Starlette(routes=[Route("/", fine)])))
    assert 400 == client.get("/", headers=[("Request-Timeout", "1"), ("Request-Timeout", "2")]).status_code


@pytest.mark.parametrize("error", [error for error, _, _ in ERRORS], ids=IDS)
def test_the_handlers_know_every_error_that_has_an_answer(error: Exception) -> None:
    """And show its text in development only."""

    async def fail(request: Request) -> PlainTextResponse:
        raise error

    plain, open_ = (
        TestClient(Starlette(routes=[Route("/", fail)], exception_handlers=exception_handlers(detail=detail))).get("/")
        for detail in (False, True)
    )
    assert ask(raising(error)).status == plain.status_code == open_.status_code
    assert str(error) not in plain.text
    assert str(error) == open_.json()["detail"]


def test_the_handlers_know_refusals_of_tasks() -> None:
    """Those of a handler that waits for several calls at once; a group with another error stays what it is."""
    full = Overloaded("full")

    def status(*errors: Exception) -> int:
        async def fail(request: Request) -> PlainTextResponse:
            raise ExceptionGroup("tasks", errors)

        app = Starlette(routes=[Route("/", fail)], exception_handlers=exception_handlers())
        return int(TestClient(app, raise_server_exceptions=False).get("/").status_code)

    assert (503, 500) == (status(full, full), status(full, ValueError("mine")))


def test_a_handler_registered_for_another_error_does_not_swallow_it() -> None:
    """It raises the error again."""
    handle = exception_handlers()[Overloaded]
    with pytest.raises(ValueError, match="mine"):
        asyncio.run(handle(None, ValueError("mine")))  # type: ignore[arg-type]
