"""``frameworks.asgi``: what clients are told, by connections made by hand and by Starlette and FastAPI."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations of handlers
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from modelguard import batched, guard
from modelguard.errors import (
    BatchFailed,
    CallerGone,
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    InvalidOption,
    ItemRefused,
    ItemTooHeavy,
    LoadFailed,
    LoadTimeout,
    ModelRejected,
    Overloaded,
    QueueFull,
    Reloading,
    WouldDeadlock,
)
from modelguard.frameworks.asgi import ModelGuardMiddleware, exception_handlers
from modelguard.lifecycle import forking
from modelguard.serving import registry
from modelguard.serving.scope import left

TIMEOUT = 10.0

#: What must not be found in an answer: the function's name, and a figure.
NAME, FIGURE = "secret.function", 777

BUSY = {"type": "about:blank", "title": "Service Unavailable", "status": 503}
LATE = {"type": "about:blank", "title": "Gateway Timeout", "status": 504}
HEAVY = {"type": "about:blank", "status": 413}  # its title is Python's to say
GONE = {"type": "about:blank", "title": "Client Closed Request", "status": 499}

#: Each error with what is answered, and after how many seconds a client may come back.
ERRORS = [
    (Overloaded(f"{NAME} {FIGURE}", retry_after=3.0), BUSY, 3.0),
    (QueueFull(NAME, queued=FIGURE, retry_after=2.5), BUSY, 2.5),
    (QueueFull(NAME, queued=FIGURE, retry_after=0.001), BUSY, 0.001),
    (DeadlineUnreachable(NAME, estimate=FIGURE, left=FIGURE, retry_after=40.0), BUSY, 40.0),
    (CircuitOpen(NAME, failures=FIGURE, retry_after=10.0), BUSY, 10.0),
    (Reloading(NAME, waited=FIGURE), BUSY, 1.0),
    (LoadFailed(NAME, f"{FIGURE}", retry_after=5.0), BUSY, 5.0),
    (LoadFailed(NAME, f"{FIGURE}"), BUSY, 0.0),
    (LoadTimeout(NAME, f"{FIGURE}", retry_after=5.0), BUSY, 5.0),
    (ModelRejected(NAME, f"{FIGURE}", retry_after=5.0), BUSY, 5.0),
    (GuardClosed(NAME), BUSY, 1.0),
    (DeadlineExceeded(NAME, waited=FIGURE), LATE, None),
    (ItemTooHeavy(NAME, weight=FIGURE, max_weight=7), HEAVY, None),
    (CallerGone(NAME), GONE, None),
]

IDS = [f"{type(error).__name__} {retry}" for error, _, retry in ERRORS]

OTHERS = [
    ValueError("the application's own"),
    TimeoutError(),
    BatchFailed(NAME, "why", size=2),
    ItemRefused(NAME, why="why"),
    WouldDeadlock(NAME, why="why", fix="fix"),
    InvalidOption("x", 1, why="why", fix="fix"),
]

NONSENSE = [b"", b" ", b"soon", b"-1", b"nan", b"inf", b"-inf", b"1e999", b"2s", b"1,2", b"0x10"]
NONSENSE += [b"1" * 5000, b"0." + b"0" * 5000, b"\xe9", b"\xff\xfe", "\N{ARABIC-INDIC DIGIT FIVE}".encode(), b"\x00"]

DISCONNECT = {"type": "http.disconnect"}

Message = Any
App = Callable[[Any, Any, Any], Awaitable[None]]


class Gated:
    """A batch function that computes when it is let, and remembers its batches."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[Any]] = []

    def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(list(items))
        self.entered.release()
        assert self.gate.wait(2 * TIMEOUT)
        return items

    def busy(self) -> None:
        """Wait until a batch is being computed."""
        assert self.entered.acquire(timeout=TIMEOUT)


@pytest.fixture
def model() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guard and no batched function is known from before."""
    monkeypatch.setattr(forking, "_guards", weakref.WeakSet())
    monkeypatch.setattr(registry, "_batchers", weakref.WeakSet())


def until(told: Callable[[], bool]) -> None:
    """Spin until it is so; for what another thread does next."""
    end = time.monotonic() + TIMEOUT
    while not told():
        assert time.monotonic() < end
        os.sched_yield()


async def seen(told: Callable[[], bool]) -> None:
    """The same for a coroutine; the loop goes on."""
    await asyncio.to_thread(until, told)


async def a_turn() -> None:
    """Let the others on the loop go on for a while."""
    await asyncio.to_thread(lambda: None)


async def alone() -> None:
    """Tasks that were left behind end by themselves, at once."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, pending = await asyncio.wait(others, timeout=1)
        assert not pending


def piece(body: bytes = b"", *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def scope(method: str = "GET", path: str = "/", headers: dict[bytes, bytes] | None = None, **more: Any) -> Any:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list((headers or {}).items()),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        **more,
    }


class Client:
    """A client by hand, with the server between: what it says can be received, and what it was told is kept."""

    def __init__(self, *says: Message) -> None:
        self.received: list[Message] = []
        self.told: list[Message] = []
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._over = False
        for message in says or (piece(),):
            self.say(message)

    def say(self, message: Message) -> None:
        self._inbox.put_nowait(message)

    def hang_up(self) -> None:
        self.say(DISCONNECT)

    async def receive(self) -> Message:
        message = DISCONNECT if self._over else await self._inbox.get()
        self._over = message == DISCONNECT
        self.received.append(message)
        return message

    async def send(self, message: Message) -> None:
        self.told.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.say(DISCONNECT)  # as servers do: what comes after the answer is no part of this request

    @property
    def status(self) -> int:
        return int(self.told[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.told[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.told[1:])


async def serve(app: App, client: Client, **request: Any) -> Client:
    """One request, to its end; nothing of it is left."""
    await asyncio.wait_for(app(scope(**request), client.receive, client.send), TIMEOUT)
    await alone()
    return client


def ask(app: App, *, options: dict[str, Any] | None = None, **request: Any) -> Client:
    """The same through a middleware, from outside of any loop."""

    async def main() -> Client:
        return await serve(ModelGuardMiddleware(app, **(options or {})), Client(), **request)

    return asyncio.run(main())


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


def raising(error: Exception) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    return app


def calling(call: Callable[[], Awaitable[Any]]) -> App:
    """An application that answers after a call."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await call()
        await fine(scope, receive, send)

    return app


def never(scope: Any, receive: Any, send: Any) -> Any:
    raise AssertionError("the application is not asked")


# Errors


@pytest.mark.parametrize(("error", "told", "retry"), ERRORS, ids=IDS)
def test_each_error_has_its_answer(error: Exception, told: dict[str, Any], retry: float | None) -> None:
    """A problem document that tells nothing of the inside, not to be kept, with the time to come back if there is."""
    answer = ask(raising(error))
    problem = json.loads(answer.body)
    assert {"type", "title", "status", "detail"} == set(problem)
    assert told.items() <= problem.items()
    assert told["status"] == answer.status
    headers = answer.headers
    assert ("application/problem+json", "no-store") == (headers["content-type"], headers["cache-control"])
    assert str(len(answer.body)) == headers["content-length"]
    for inside in (NAME, NAME.split(".")[1], str(FIGURE), "Traceback", type(error).__name__):
        assert inside not in str(answer.told)
    if retry is None:
        assert "retry-after" not in headers
    else:
        assert max(math.ceil(retry), 1) <= int(headers["retry-after"]) <= max(math.ceil(1.5 * retry), 1)


def test_those_who_were_refused_together_do_not_come_back_together() -> None:
    """Whole seconds, from what the error says to half as long again."""
    app = raising(QueueFull(NAME, queued=1, retry_after=100))
    told = [ask(app).headers["retry-after"] for _ in range(100)]
    assert all(one.isdigit() and 100 <= int(one) <= 150 for one in told)
    assert 10 < len(set(told))


@pytest.mark.parametrize("error", [error for error, _, _ in ERRORS], ids=IDS)
def test_in_development_an_answer_tells_the_error(error: Exception) -> None:
    """Its own text, where that was asked for."""
    assert str(error) == json.loads(ask(raising(error), options={"detail": True}).body)["detail"]


@pytest.mark.parametrize("error", OTHERS, ids=lambda value: type(value).__name__)
def test_other_errors_are_let_through(error: Exception) -> None:
    """They are the application's, or a mistake in it; nothing is answered for it."""
    client = Client()
    with pytest.raises(type(error)) as raised:
        asyncio.run(serve(ModelGuardMiddleware(raising(error)), client))
    assert (error, []) == (raised.value, client.told)


def test_refusals_of_tasks_are_answered_like_one() -> None:
    """A handler that asks several models in a task group fails with a group."""
    full, late = QueueFull(NAME, queued=FIGURE, retry_after=1), DeadlineExceeded(NAME, waited=1)
    for errors in ([full], [full, full], [ExceptionGroup("inner", [full])]):
        assert 503 == ask(raising(ExceptionGroup("tasks", errors))).status
    assert 504 == ask(raising(ExceptionGroup("tasks", [late]))).status


def test_a_refusal_does_not_hide_an_error_beside_it() -> None:
    """A group that holds anything else is let through: somebody has to look into that."""
    group = ExceptionGroup("tasks", [QueueFull(NAME, queued=FIGURE, retry_after=1), ValueError("mine")])
    with pytest.raises(ExceptionGroup) as raised:
        ask(raising(group))
    assert group is raised.value


def test_nothing_is_answered_once_the_response_has_begun() -> None:
    """The error goes to the server, which closes the connection: no client takes a half for a whole."""
    error = DeadlineExceeded(NAME, waited=1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    client = Client()
    with pytest.raises(DeadlineExceeded):
        asyncio.run(serve(ModelGuardMiddleware(app), client))
    assert ["http.response.start"] == [message["type"] for message in client.told]


def test_a_hint_is_no_response_yet() -> None:
    """After an early hint (103) there is still an answer to give."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.early_hint", "links": []})
        raise QueueFull(NAME, queued=1, retry_after=1)

    told = ask(app).told
    assert ["http.response.early_hint", "http.response.start"] == [message["type"] for message in told[:2]]
    assert 503 == told[1]["status"]


def test_an_answer_to_head_has_no_body() -> None:
    """Its headers are those of the answer to a GET."""
    app = raising(DeadlineExceeded(NAME, waited=1))
    head, get = ask(app, method="HEAD"), ask(app)
    assert (b"", get.headers) == (head.body, head.headers)


# Deadlines


def bound(options: dict[str, Any], headers: dict[bytes, bytes] | None = None) -> float | None:
    """What an application has left of its time."""
    found: list[float | None] = []

    async def look() -> None:
        found.append(left())

    assert 200 == ask(calling(look), options=options, headers=headers).status
    return found[0]


@pytest.mark.parametrize(
    ("options", "headers", "expected"),
    [
        ({}, {}, None),
        ({"deadline": "1m"}, {}, 60),
        ({}, {b"request-timeout": b"5"}, 5),
        ({}, {b"request-timeout": b"0.25"}, 0.25),
        ({"deadline": "1m"}, {b"request-timeout": b"5"}, 5),
        ({"deadline": "1m"}, {b"Request-Timeout": b"5"}, 5),
        ({"deadline": "1m"}, {b"request-timeout": b"3600"}, 60),
        ({"deadline": "1m", "timeout_header": "X-Patience"}, {b"x-patience": b"5"}, 5),
        ({"deadline": "1m", "timeout_header": "X-Patience"}, {b"request-timeout": b"5"}, 60),
        ({"deadline": "1m", "timeout_header": None}, {b"request-timeout": b"5"}, 60),
        ({"timeout_header": None}, {b"request-timeout": b"soon"}, None),
    ],
)
def test_a_client_can_shorten_the_deadline(
    options: dict[str, Any], headers: dict[bytes, bytes], expected: float | None
) -> None:
    """By the header that was named, and never lengthen it; without either there is none."""
    found = bound(options, headers)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert expected - 1 < found <= expected


def test_the_deadline_ends_with_the_request() -> None:
    """What the caller of the middleware does next is not bounded by it."""

    async def main() -> float | None:
        await serve(ModelGuardMiddleware(fine, deadline="1s"), Client())
        return left()

    assert asyncio.run(main()) is None


def test_a_request_whose_time_runs_out_is_told_so(model: Gated) -> None:
    """In the queue and in the batch, although the model is stuck."""
    f = batched(max_size=1)(model)
    app = calling(lambda: f.aio(1))
    for options, headers in (({"deadline": 0.05}, {}), ({}, {b"request-timeout": b"0.05"})):
        assert 504 == ask(app, options=options, headers=headers).status


def test_no_time_at_all_lets_nothing_through(model: Gated) -> None:
    """A client that gives no time is told that it is over."""
    f = batched(max_size=1)(model)
    assert 504 == ask(calling(lambda: f.aio(1)), headers={b"request-timeout": b"0"}).status
    assert [] == model.batches


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: repr(value[:8]))
@pytest.mark.parametrize("deadline", ["1s", None])
def test_nonsense_in_the_header_is_that_callers_alone(value: bytes, deadline: str | None) -> None:
    """It is told what the header should be, the application is not asked, and the next caller is served."""
    options = {"deadline": deadline}
    answer = ask(never, options=options, headers={b"request-timeout": value})
    assert (400, "application/problem+json") == (answer.status, answer.headers["content-type"])
    problem = json.loads(answer.body)
    assert {"type", "title", "status", "detail"} == set(problem)
    assert "Request-Timeout must be a number of seconds" in problem["detail"]
    assert 200 == ask(fine, options=options).status


@pytest.mark.parametrize("value", [b"1e300", b"99999999999", b"3153600001", b"1e18"])
@pytest.mark.parametrize("deadline", ["1s", None])
def test_more_time_than_anyone_has_is_no_error_of_the_server(value: bytes, deadline: str | None) -> None:
    """A client that would wait for centuries is served, or told that it cannot be meant."""
    assert ask(fine, options={"deadline": deadline}, headers={b"request-timeout": value}).status in (200, 400)


# Probes


def test_a_process_that_answers_is_alive(nobody: None) -> None:
    """Whatever its models do; and nothing is kept of it on the way."""
    nlp = guard(dict, reload_on=None, name=NAME)
    answer = ask(never, path="/livez")
    assert (200, {"status": "alive"}) == (answer.status, json.loads(answer.body))
    assert ("application/json", "no-store") == (answer.headers["content-type"], answer.headers["cache-control"])
    assert not nlp.ready


def test_a_service_is_ready_when_its_models_are(nobody: None) -> None:
    """Every guard has one, and no batched function is being closed; names are told in development alone."""
    nlp = guard(dict, reload_on=None, name=NAME)
    f = batched(max_size=1, name="f")(lambda items: items)
    assert 503 == ask(never, path="/readyz").status
    assert {"status": "not ready"} == json.loads(ask(never, path="/readyz").body)
    told = json.loads(ask(never, path="/readyz", options={"detail": True}).body)
    assert {"status": "not ready", "waiting_for": [NAME]} == told
    nlp.load()
    assert 200 == ask(never, path="/readyz").status
    assert {"status": "ready"} == json.loads(ask(never, path="/readyz", options={"detail": True}).body)
    f.close()
    assert 200 == ask(never, path="/readyz").status, "nobody waits for what was closed for good"
    told = json.loads(ask(never, path="/readyz", options={"detail": True, "guards": [f]}).body)
    assert ["f"] == told["waiting_for"]


def test_a_batched_function_that_is_being_closed_is_not_ready(nobody: None, model: Gated) -> None:
    """From the beginning of the end on: what waits is computed, and nobody new should come."""
    f = batched(max_size=1)(model)
    f.submit(1)
    model.busy()
    assert 200 == ask(never, path="/readyz").status
    closing = threading.Thread(target=f.close)
    closing.start()
    until(lambda: not f.ready)
    assert 503 == ask(never, path="/readyz").status
    model.gate.set()
    closing.join(TIMEOUT)


def test_the_readiness_probe_can_be_limited(nobody: None) -> None:
    """It asks those that it was given, also if they came from a generator; none at all is ready."""
    nlp, f, cold = guard(dict, reload_on=None), batched(max_size=1)(lambda items: items), guard(dict, reload_on=None)
    nlp.load()
    app = ModelGuardMiddleware(never, guards=(one for one in (nlp, f)))
    for _ in range(2):
        assert 200 == asyncio.run(serve(app, Client(), path="/readyz")).status
    assert 200 == ask(never, path="/readyz", options={"guards": []}).status
    assert 503 == ask(never, path="/readyz", options={"guards": [nlp, cold]}).status


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_a_probe_by_head_has_no_body(nobody: None, path: str) -> None:
    """Its headers are those of the answer to a GET."""
    head, get = ask(never, path=path, method="HEAD"), ask(never, path=path)
    assert (b"", 200, get.headers) == (head.body, head.status, head.headers)


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        ({"path": "/livez", "method": "POST"}, {}),
        ({"path": "/readyz", "method": "DELETE"}, {}),
        ({"path": "/livez/"}, {}),
        ({"path": "/livez"}, {"livez": None}),
        ({"path": "/readyz"}, {"readyz": None}),
        ({"path": "/livez"}, {"livez": "/health"}),
    ],
)
def test_what_is_no_probe_is_the_applications(request_: dict[str, Any], options: dict[str, Any]) -> None:
    """Other methods, other paths, and probes that are turned off or live elsewhere."""
    assert b"fine" == ask(fine, options=options, **request_).body


def test_a_probe_can_live_elsewhere(nobody: None) -> None:
    """Where it was put."""
    assert 200 == ask(never, path="/health", options={"livez": "/health", "readyz": "/up"}).status
    assert 200 == ask(never, path="/up", options={"livez": "/health", "readyz": "/up"}).status


def test_a_probe_needs_no_patience(nobody: None) -> None:
    """The header of a deadline is none of its business."""
    assert 200 == ask(never, path="/livez", headers={b"request-timeout": b"soon"}).status


def test_a_probe_is_found_behind_a_prefix(nobody: None) -> None:
    """With ``uvicorn --root-path /api`` a path begins with the prefix that a proxy has cut off."""
    assert 200 == ask(never, path="/api/livez", root_path="/api").status
    assert 200 == ask(never, path="/livez", root_path="/api").status


# What passes through


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
def test_other_connections_pass_through(kind: str) -> None:
    """The application gets what the middleware got, not bounded by a deadline, and its errors are its own."""
    given: list[Any] = []

    async def app(*connection: Any) -> None:
        given.extend((*connection, left()))
        raise QueueFull(NAME, queued=1, retry_after=1)

    client = Client()
    mine = {"type": kind, "path": "/livez", "headers": [(b"request-timeout", b"soon")]}
    connection = (mine, client.receive, client.send)
    with pytest.raises(QueueFull):
        asyncio.run(ModelGuardMiddleware(app, deadline="1s")(*connection))  # type: ignore[arg-type]
    assert [*connection, None] == given
    assert mine is given[0]
    assert [] == client.told


# Clients that hang up


async def behind(f: Any, model: Gated) -> None:
    """One item is being computed; the next one waits."""
    f.submit("first")
    await asyncio.to_thread(model.busy)


async def hang_up(app: App, client: Client, f: Any, **request: Any) -> None:
    """Begin a request, hang up when its item waits, and see it called off."""
    serving = asyncio.create_task(app(scope(**request), client.receive, client.send))
    try:
        await seen(lambda: serving.done() or f.status().waiting == 1)
        assert not serving.done()
        client.hang_up()
        await asyncio.wait_for(serving, TIMEOUT)
    finally:
        serving.cancel()
    await alone()
    assert (0, 1) == (f.status().waiting, f.status().cancelled)
    assert not client.told or 499 == client.status, "there is nobody to tell"


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        assert "http.request" == message["type"]
        body += message["body"]
        if not message["more_body"]:
            return body


@pytest.mark.parametrize("body", ["unread", "read", "in pieces"])
def test_a_hang_up_calls_off_what_waits(model: Gated, body: str) -> None:
    """The item is not computed, whether the application has read the body or not."""
    f = batched(max_size=1)(model)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if body != "unread":
            await read(receive)
        await f.aio(1)

    async def main() -> None:
        await behind(f, model)
        pieces = [piece(b"a", more=True), piece(b"b", more=True), piece()] if body == "in pieces" else [piece()]
        await hang_up(ModelGuardMiddleware(app), Client(*pieces), f)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_a_hang_up_before_the_body_is_complete_calls_off_what_waits(model: Gated) -> None:
    """The application streams the body, and asks the model on the way."""
    f = batched(max_size=1)(model)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await f.aio(1)

    async def main() -> None:
        await behind(f, model)
        await hang_up(ModelGuardMiddleware(app), Client(piece(b"a", more=True)), f)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_each_call_on_the_way_through_a_body_can_be_called_off(model: Gated) -> None:
    """Not the first alone: the look-out comes back when the application has read what it had found."""
    quick = batched(max_size=1)(lambda items: items)
    f = batched(max_size=1)(model)
    client = Client(piece(b"a", more=True), piece(b"b", more=True))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await quick.aio(1)
        await seen(lambda: len(client.received) == 2)
        await receive()
        await f.aio(2)

    async def main() -> None:
        await behind(f, model)
        await hang_up(ModelGuardMiddleware(app), client, f)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_a_body_is_not_read_ahead_of_the_application(model: Gated) -> None:
    """Of what the application has not asked for, one piece at most is held: a slow one still slows its client."""
    f = batched(max_size=64)(model)
    client = Client(*(piece(b"x", more=True) for _ in range(50)), piece())
    ahead: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for asked in range(51):
            await f.aio(asked)
            await a_turn()
            ahead.append(len(client.received) - asked)
            assert (asked < 50) == (await receive())["more_body"]
        await fine(scope, receive, send)

    model.gate.set()
    asyncio.run(serve(ModelGuardMiddleware(app), client))
    assert 200 == client.status
    assert max(ahead) <= 1


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_application_can_ask_before_it_reads_the_body(model: Gated, pieces: int) -> None:
    """What the look-out has found is the application's, in order, also if it came while both were waiting for it."""
    f = batched(max_size=1)(model)
    model.gate.set()
    client = Client(piece(b"0", more=True))
    client.received.append(client._inbox.get_nowait())
    body: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.aio(1)
        body.append(await read(receive))
        await fine(scope, receive, send)

    async def main() -> None:
        serving = asyncio.create_task(ModelGuardMiddleware(app)(scope("POST"), client.receive, client.send))
        await seen(lambda: f.status().answered == 1)
        for n in range(pieces):
            await a_turn()
            client.say(piece(b"%d" % n, more=n < pieces - 1))
        await asyncio.wait_for(serving, 2)
        await alone()

    asyncio.run(main())
    assert ([b"012"[:pieces]], 200) == (body, client.status)


def test_the_application_hears_of_the_hang_up_too(model: Gated) -> None:
    """What the look-out has read it can read, as often as it asks; and it may answer, although nobody listens."""
    f = batched(max_size=1)(model)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await f.aio(1)
        except CallerGone:
            heard.extend([(await receive())["type"] for _ in range(3)])
            raise

    async def main() -> None:
        await behind(f, model)
        await hang_up(ModelGuardMiddleware(app), Client(), f)

    asyncio.run(main())
    assert ["http.request", "http.disconnect", "http.disconnect"] == heard


def test_a_handler_that_wants_to_goes_on_without_its_client(model: Gated) -> None:
    """It gets the error where it waits; nothing else of it is cancelled, and later calls of it are called off."""
    f = batched(max_size=1)(model)
    other = batched(max_size=1)(lambda items: items)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        beside = asyncio.create_task(asyncio.to_thread(model.gate.wait, TIMEOUT))
        with pytest.raises(CallerGone):
            await f.aio(1)
        with pytest.raises(CallerGone):
            await other.aio(2)
        model.gate.set()
        heard.append(await beside)

    async def main() -> None:
        await behind(f, model)
        await hang_up(ModelGuardMiddleware(app), Client(), f)

    asyncio.run(main())
    assert [True] == heard


def test_what_is_being_computed_is_not_waited_for(model: Gated) -> None:
    """The handler ends although the model is still at it."""
    f = batched(max_size=1)(model)
    client = Client()

    async def main() -> None:
        app = ModelGuardMiddleware(calling(lambda: f.aio(1)))
        serving = asyncio.create_task(app(scope(), client.receive, client.send))
        await asyncio.to_thread(model.busy)
        client.hang_up()
        await asyncio.wait_for(serving, TIMEOUT)
        await alone()

    asyncio.run(main())
    assert 1 == f.status().cancelled


def test_all_that_a_request_waits_for_is_called_off(model: Gated) -> None:
    """Side by side, and of several functions."""
    f, g = batched(max_size=1)(model), batched(max_size=1)(model)

    async def both() -> None:
        with pytest.raises(CallerGone):
            await g.aio(1)
        with pytest.raises(CallerGone):
            await f.aio(2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.gather(f.aio(1), both(), return_exceptions=True)

    async def main() -> None:
        await behind(f, model)
        await behind(g, model)
        await hang_up(ModelGuardMiddleware(app), Client(), g)

    asyncio.run(main())
    assert 2 == f.status().cancelled
    model.gate.set()
    f.close()
    g.close()
    assert [["first"], ["first"]] == model.batches


def test_a_neighbour_is_not_called_off(model: Gated) -> None:
    """One client hangs up, the others are answered."""
    f = batched(max_size=8)(model)
    app = ModelGuardMiddleware(calling(lambda: f.aio(1)))
    others = [Client() for _ in range(3)]

    async def main() -> None:
        await behind(f, model)
        gone = Client()
        serving = [asyncio.create_task(app(scope(), one.receive, one.send)) for one in (*others, gone)]
        await seen(lambda: f.status().waiting == 4)
        gone.hang_up()
        await asyncio.wait_for(serving[-1], TIMEOUT)
        model.gate.set()
        await asyncio.wait_for(asyncio.gather(*serving), TIMEOUT)
        await alone()

    asyncio.run(main())
    assert [200, 200, 200] == [one.status for one in others]
    assert [["first"], [1, 1, 1]] == model.batches


def test_an_application_that_listens_for_the_hang_up_itself_is_not_disturbed(model: Gated) -> None:
    """It reads while its call waits; what it hears calls the call off."""
    f = batched(max_size=1)(model)
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.create_task(receive())
        with pytest.raises(CallerGone):
            await f.aio(1)
        heard.append(await listening)

    async def main() -> None:
        await behind(f, model)
        client = Client()
        await hang_up(ModelGuardMiddleware(app), client, f)
        assert [piece(), DISCONNECT] == client.received

    asyncio.run(main())
    assert [DISCONNECT] == heard


def test_the_look_out_begins_when_an_application_stops_listening(model: Gated) -> None:
    """A listener that is cancelled, as Starlette does it, leaves the client watched."""
    f = batched(max_size=1)(model)
    client = Client()
    stopped = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listening = asyncio.create_task(receive())
        await a_turn()
        waiting = asyncio.create_task(f.aio(1))
        await seen(lambda: f.status().waiting == 1)
        await a_turn()
        listening.cancel()
        await asyncio.wait([listening])
        stopped.set()
        await waiting

    async def main() -> None:
        await behind(f, model)
        serving = asyncio.create_task(ModelGuardMiddleware(app)(scope(), client.receive, client.send))
        await stopped.wait()
        await a_turn()
        client.hang_up()
        await asyncio.wait([serving], timeout=2)
        model.gate.set()
        await serving
        await alone()

    asyncio.run(main())
    assert 1 == f.status().cancelled


def test_a_request_that_asks_no_model_costs_no_task() -> None:
    """Nor is anything received that the application did not ask for."""
    client = Client()
    tasks: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await a_turn()
        tasks.append(len(asyncio.all_tasks()))
        await fine(scope, receive, send)

    async def main() -> None:
        await ModelGuardMiddleware(app, deadline="1s")(scope(), client.receive, client.send)
        tasks.append(len(asyncio.all_tasks()))

    asyncio.run(main())
    assert ([1, 1], []) == (tasks, client.received)


def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What another test has left is not this one's."""
    gc.collect()
    caplog.clear()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What asyncio has to say: a task whose exception nobody wanted, one that was destroyed while it waited."""
    return [one.getMessage() for one in caplog.records if (one.name, one.levelname) == ("asyncio", "ERROR")]


@pytest.mark.parametrize("end", ["answer", "error", "deadline", "cancelled"])
def test_the_look_out_ends_with_the_request(model: Gated, end: str, caplog: pytest.LogCaptureFixture) -> None:
    """However that ends: no task is left, and asyncio has nothing to complain of."""
    quiet(caplog)
    f = batched(max_size=1)(model)
    if end in ("answer", "error"):
        model.gate.set()
    client = Client()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.aio(1)
        assert 2 <= len(asyncio.all_tasks()), "the look-out"
        if end == "error":
            raise ValueError("mine")
        await fine(scope, receive, send)

    async def main() -> None:
        served = ModelGuardMiddleware(app, deadline=0.05 if end == "deadline" else None)
        serving = asyncio.create_task(served(scope(), client.receive, client.send))
        if end == "cancelled":
            await asyncio.to_thread(model.busy)
            serving.cancel()
        await asyncio.wait([serving])
        await alone()
        if end in ("error", "cancelled"):
            with pytest.raises(ValueError if end == "error" else asyncio.CancelledError):
                serving.result()
        else:
            assert {"answer": 200, "deadline": 504}[end] == client.status

    asyncio.run(main(), debug=True)
    gc.collect()
    assert [] == complaints(caplog)


def test_a_server_that_fails_to_receive_harms_nobody(model: Gated, caplog: pytest.LogCaptureFixture) -> None:
    """The application is answered by the model, hears of the failure when it reads, and nothing is logged."""
    quiet(caplog)
    f = batched(max_size=1)(model)
    model.gate.set()
    client = Client()

    async def receive() -> Any:
        raise OSError("the connection is broken")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.aio(1)
        for _ in range(2):
            with pytest.raises(OSError, match="broken"):
                await receive()
            await a_turn()
        await fine(scope, receive, send)

    async def main() -> None:
        await ModelGuardMiddleware(app)(scope(), receive, client.send)
        await alone()

    asyncio.run(main())
    gc.collect()
    assert 200 == client.status
    assert [] == complaints(caplog)


def test_what_a_request_leaves_to_be_done_is_done(model: Gated) -> None:
    """A background task outlives the answer and its deadline; the client that has it and goes is none that hangs up."""
    f = batched(max_size=1)(model)
    model.gate.set()
    done: list[Any] = []

    async def later() -> None:
        await a_turn()
        done.extend([left(), await f.aio("later")])

    async def now(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await f.aio("now"), background=BackgroundTask(later))

    app = Starlette(routes=[Route("/", now)], middleware=[Middleware(ModelGuardMiddleware, deadline="1m")])
    assert 200 == asyncio.run(serve(app, Client())).status
    assert [None, "later"] == done


@pytest.mark.parametrize("before", [True, False])
def test_a_task_that_outlives_its_request_is_not_called_off(model: Gated, before: bool) -> None:  # noqa: FBT001
    """Whether the request had asked a model itself or not: the answer was given, and nobody has hung up."""
    f = batched(max_size=1)(model)
    model.gate.set()
    tasks: list[asyncio.Task[Any]] = []
    go = asyncio.Event()

    async def later() -> Any:
        await go.wait()
        return await f.aio("later")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if before:
            await f.aio("now")
        tasks.append(asyncio.create_task(later()))
        await fine(scope, receive, send)

    async def main() -> Any:
        client = Client()
        await ModelGuardMiddleware(app)(scope(), client.receive, client.send)
        await a_turn()
        model.gate.clear()
        go.set()
        await asyncio.to_thread(until, lambda: f.status().running + f.status().cancelled == 1)
        await a_turn()
        model.gate.set()
        return await tasks[0]

    assert "later" == asyncio.run(main())


# Starlette and FastAPI


class Above(BaseHTTPMiddleware):
    """What many applications have somewhere: it gives what is below another ``receive``, and a task."""

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
def test_a_hang_up_reaches_handlers_of_starlette(model: Gated, stack: str, kind: str, method: str) -> None:
    """In its thread pool and on its loop, wherever BaseHTTPMiddleware stands; and nothing fails over it."""
    f = batched(max_size=1)(model)

    async def main() -> None:
        await behind(f, model)
        await hang_up(starlette(f, kind, stack), Client(piece(b"text")), f, method=method)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


@every_stack
@pytest.mark.parametrize("kind", ["async", "sync", "stream"])
def test_starlette_answers_as_without_the_middleware(model: Gated, stack: str, kind: str) -> None:
    """One that stays has its answer, and nothing is left."""
    f = batched(max_size=1)(model)
    model.gate.set()
    client = asyncio.run(serve(starlette(f, kind, stack), Client(piece(b"text")), method="POST"))
    assert (200, b"1") == (client.status, client.body)


@every_stack
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_starlette_handlers_are_refused_with_an_answer(model: Gated, stack: str, kind: str) -> None:
    """A full queue is 503 and a deadline 504, wherever BaseHTTPMiddleware stands."""
    f = batched(max_size=1, max_queue=1)(model)
    f.submit("first")
    model.busy()
    with TestClient(starlette(f, kind, stack)) as client:
        assert 504 == client.get("/", headers={"Request-Timeout": "0.05"}).status_code
        f.submit("second")
        refused = client.get("/")
    assert (503, "application/problem+json") == (refused.status_code, refused.headers["content-type"])
    assert ("above" in stack or stack == "around") == ("x-seen" in refused.headers)


def test_fastapi_takes_it_by_add_middleware(nobody: None, model: Gated) -> None:
    """With its own handlers for other errors, with probes, and with dependencies that ask a model."""
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


def test_outside_of_starlette_its_handlers_are_needed() -> None:
    """With them the answers are the same; without them Starlette has answered 500 before the middleware knows."""

    async def full(request: Request) -> PlainTextResponse:
        raise QueueFull(NAME, queued=FIGURE, retry_after=3)

    routes = [Route("/", full)]
    for kind in (Starlette, FastAPI):
        inner: Any = kind(routes=routes, exception_handlers=exception_handlers())
        with TestClient(ModelGuardMiddleware(inner)) as client:
            answer = client.get("/")
        assert (503, "application/problem+json") == (answer.status_code, answer.headers["content-type"])
        assert 3 <= int(answer.headers["retry-after"]) <= 5
        assert {"type", "title", "status", "detail"} == set(answer.json())
        assert NAME not in answer.text
        bare = TestClient(ModelGuardMiddleware(kind(routes=routes)), raise_server_exceptions=False)
        assert 500 == bare.get("/").status_code


@pytest.mark.parametrize("error", [error for error, _, _ in ERRORS], ids=IDS)
def test_the_handlers_know_every_error_that_has_an_answer(error: Exception) -> None:
    """And tell its text in development alone."""

    async def fail(request: Request) -> PlainTextResponse:
        raise error

    plain, open_ = (
        TestClient(Starlette(routes=[Route("/", fail)], exception_handlers=exception_handlers(detail=detail))).get("/")
        for detail in (False, True)
    )
    assert ask(raising(error)).status == plain.status_code == open_.status_code
    assert str(error) not in plain.text
    assert str(error) == open_.json()["detail"]


def test_a_handler_that_was_given_another_error_does_not_swallow_it() -> None:
    """It is raised again."""
    handle = exception_handlers()[Overloaded]
    with pytest.raises(ValueError, match="mine"):
        asyncio.run(handle(None, ValueError("mine")))  # type: ignore[arg-type]


# Options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("deadline", value) for value in (0, -1, "soon", "2", float("nan"), float("inf"), True, object())),
        *(("livez", value) for value in ("", "livez", 3, b"/livez")),
        *(("readyz", value) for value in ("", "readyz", 3)),
        *(("timeout_header", value) for value in ("", "a b", "a:b", "Ø", "a\r\nb", 3, b"a")),
        *(("guards", value) for value in ([1], [None], 5, "ab")),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused_by_name(option: str, value: Any) -> None:
    """Where the application is made, not with the first request."""
    with pytest.raises(InvalidOption, match=option):
        ModelGuardMiddleware(fine, **{option: value})


def test_a_guard_in_place_of_guards_is_refused_by_name() -> None:
    """It is an easy slip."""
    with pytest.raises(InvalidOption, match="guards"):
        ModelGuardMiddleware(fine, guards=guard(dict, reload_on=None))
