"""``frameworks.asgi``: the answer to each error, and what passes through unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any

import pytest
from tests.unit.frameworks.asgi_by_hand import Client, a_turn, ask, raising, scope, seen, serve
from tests.unit.frameworks.refusals import ERRORS, FIGURE, IDS, NAME

from modelguard.errors import BatchFailed, DeadlineExceeded, InvalidOption, ItemRefused, QueueFull, WouldDeadlock
from modelguard.frameworks import asgi
from modelguard.frameworks.asgi import ModelGuardMiddleware
from modelguard.serving.deadlines import left

OTHERS = [
    ValueError("the application's own"),
    TimeoutError(),
    BatchFailed(NAME, "why", size=2),
    ItemRefused(NAME, why="why"),
    WouldDeadlock(NAME, why="why", fix="fix"),
    InvalidOption("x", 1, why="why", fix="fix"),
]

# Errors


@pytest.mark.parametrize(("error", "expected", "retry"), ERRORS, ids=IDS)
def test_each_error_has_its_answer(error: Exception, expected: dict[str, Any], retry: float | None) -> None:
    """A problem document that reveals nothing internal, is not cached, and maybe with the time to come back."""
    answer = ask(raising(error))
    problem = json.loads(answer.body)
    assert {"type", "title", "status", "detail"} == set(problem)
    assert expected.items() <= problem.items()
    assert expected["status"] == answer.status
    headers = answer.headers
    assert ("application/problem+json", "no-store") == (headers["content-type"], headers["cache-control"])
    assert str(len(answer.body)) == headers["content-length"]
    for inside in (NAME, NAME.split(".")[1], str(FIGURE), "Traceback", type(error).__name__):
        assert inside not in str(answer.sent)
    if retry is None:
        assert "retry-after" not in headers
    else:
        assert max(math.ceil(retry), 1) <= int(headers["retry-after"]) <= max(math.ceil(1.5 * retry), 1)


def test_clients_refused_together_do_not_come_back_together() -> None:
    """``Retry-After`` is in whole seconds, from what the error says up to half as long again."""
    app = raising(QueueFull(NAME, queued=1, retry_after=100))
    found = [ask(app).headers["retry-after"] for _ in range(100)]
    assert all(one.isdigit() and 100 <= int(one) <= 150 for one in found)
    assert 10 < len(set(found))


@pytest.mark.parametrize("error", [error for error, _, _ in ERRORS], ids=IDS)
def test_in_development_an_answer_contains_the_error(error: Exception) -> None:
    """With ``detail=True`` it contains the error's own text."""
    assert str(error) == json.loads(ask(raising(error), options={"detail": True}).body)["detail"]


@pytest.mark.parametrize("error", OTHERS, ids=lambda value: type(value).__name__)
def test_other_errors_pass_through(error: Exception) -> None:
    """They are the application's, or a mistake in it; the middleware answers nothing."""
    client = Client()
    with pytest.raises(type(error)) as raised:
        asyncio.run(serve(ModelGuardMiddleware(raising(error)), client))
    assert (error, []) == (raised.value, client.sent)


def test_refusals_of_tasks_are_answered_like_one() -> None:
    """A handler that calls several models in a task group fails with a group."""
    full, late = QueueFull(NAME, queued=FIGURE, retry_after=1), DeadlineExceeded(NAME, waited=1)
    for errors in ([full], [full, full], [ExceptionGroup("inner", [full])]):
        assert 503 == ask(raising(ExceptionGroup("tasks", errors))).status
    assert 504 == ask(raising(ExceptionGroup("tasks", [late]))).status


def test_a_refusal_does_not_hide_an_error_beside_it() -> None:
    """A group with any other error in it passes through, so that the error is seen."""
    group = ExceptionGroup("tasks", [QueueFull(NAME, queued=FIGURE, retry_after=1), ValueError("mine")])
    with pytest.raises(ExceptionGroup) as raised:
        ask(raising(group))
    assert group is raised.value


def test_nothing_is_answered_once_the_response_has_begun() -> None:
    """The error goes to the server, which closes the connection: no client takes half a response for a whole one."""
    error = DeadlineExceeded(NAME, waited=1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise error

    client = Client()
    with pytest.raises(DeadlineExceeded):
        asyncio.run(serve(ModelGuardMiddleware(app), client))
    assert ["http.response.start"] == [message["type"] for message in client.sent]


def test_an_early_hint_is_not_a_response() -> None:
    """After an early hint (103) an error is still answered."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.early_hint", "links": []})
        raise QueueFull(NAME, queued=1, retry_after=1)

    sent = ask(app).sent
    assert ["http.response.early_hint", "http.response.start"] == [message["type"] for message in sent[:2]]
    assert 503 == sent[1]["status"]


def test_an_answer_to_head_has_no_body() -> None:
    """Its headers are those of the answer to a GET."""
    app = raising(DeadlineExceeded(NAME, waited=1))
    head, get = ask(app, method="HEAD"), ask(app)
    assert (b"", get.headers) == (head.body, head.headers)


# What passes through


def test_lifespan_passes_through() -> None:
    """The application gets what the middleware got, without a deadline, and its errors pass through."""
    given: list[Any] = []

    async def app(*connection: Any) -> None:
        given.extend((*connection, left()))
        raise QueueFull(NAME, queued=1, retry_after=1)

    client = Client()
    mine = {"type": "lifespan"}
    connection = (mine, client.receive, client.send)
    with pytest.raises(QueueFull):
        asyncio.run(ModelGuardMiddleware(app, deadline="1s")(*connection))  # type: ignore[arg-type]
    assert [*connection, None] == given
    assert mine is given[0]
    assert [] == client.sent


@pytest.mark.parametrize("then", ["nothing", "an error of ours"])
def test_an_error_page_does_not_wait_for_background_tasks(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """It is held back while it may stand for an error of ours, which a framework raises at once."""
    monkeypatch.setattr(asgi, "_PATIENCE", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"mine"})
        await seen(lambda: len(client.sent) == 2)  # a background task
        if then != "nothing":
            raise QueueFull(NAME, queued=FIGURE, retry_after=3)

    client = Client()
    with pytest.raises(QueueFull) if then != "nothing" else contextlib.nullcontext():
        asyncio.run(serve(ModelGuardMiddleware(app), client))
    assert (500, b"mine") == (client.status, client.body)


def test_an_error_page_waits_on_while_the_event_loop_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The application could not raise its error in that time either, as where a load holds the interpreter's lock."""
    monkeypatch.setattr(asgi, "_PATIENCE", 60.0)

    async def main() -> None:
        client, loop = Client(), asyncio.get_running_loop()
        response = asgi.HeldResponse(scope(), asgi.Client(client.receive, None), client.send)
        await response.send({"type": "http.response.start", "status": 500, "headers": []})
        await response.send({"type": "http.response.body", "body": b"mine"})
        for late, sent in ((1000, 0), (0, 2)):
            response._look(loop, loop.time() - late)
            await a_turn()
            assert sent == len(client.sent)

    asyncio.run(main())
