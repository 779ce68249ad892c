"""``frameworks.asgi`` and ``.wsgi``: whose a request is, by a header that the application names, or by a function."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from tests.unit.frameworks import asgi_by_hand, wsgi_by_hand
from tests.unit.serving.gated import TIMEOUT, Gated

from modelguard import Fair, batched
from modelguard.errors import InvalidOption
from modelguard.serving.deadlines import current_scope

ASGI, WSGI = "asgi", "wsgi"
both = pytest.mark.parametrize("kind", [ASGI, WSGI])


def caller_of(kind: str, header: str | None = "gold", **options: Any) -> tuple[Any, int]:
    """The key and the priority that an application's batched calls get; the header is X-Tenant."""
    found: list[tuple[Any, int]] = []

    def look() -> None:
        scope = current_scope.get()
        assert scope is not None
        found.append((scope.key, scope.priority))

    async def look_later() -> None:
        look()

    if kind == ASGI:
        headers = {} if header is None else {b"x-tenant": header.encode()}
        assert 200 == asgi_by_hand.ask(asgi_by_hand.calling(look_later), options=options, headers=headers).status
    else:
        app = wsgi_by_hand.calling(look)
        assert 200 == wsgi_by_hand.ask(app, header=header, variable="HTTP_X_TENANT", **options).status
    return found[0]


@both
def test_no_header_is_trusted_by_default(kind: str) -> None:
    """A client cannot choose its key or its priority unless the application names a header."""
    assert (None, 0) == caller_of(kind)


@both
def test_the_application_names_the_header(kind: str) -> None:
    """Its value is the key; requests without it share one."""
    assert ("gold", 0) == caller_of(kind, fair_by="X-Tenant")
    assert (None, 0) == caller_of(kind, None, fair_by="X-Tenant")
    assert (None, 0) == caller_of(kind, fair_by="X-Other")


@both
def test_a_function_of_the_request_gives_key_and_priority(kind: str) -> None:
    """Of the ASGI scope or the WSGI environment."""

    def path(request: dict[str, Any]) -> str:
        return str(request["path" if kind == ASGI else "PATH_INFO"])

    assert ("/", 2) == caller_of(kind, fair_by=path, priority=lambda request: 2 * (path(request) == "/"))


@both
@pytest.mark.parametrize(
    ("option", "given"),
    [("fair_by", []), ("priority", -1), ("priority", "high"), ("priority", 0.5)],
)
def test_a_function_that_gives_nonsense_is_an_error_by_name(kind: str, option: str, given: Any) -> None:
    """That request fails in the server's log, with what to return instead."""
    with pytest.raises(InvalidOption, match=option):
        caller_of(kind, **{option: lambda _: given})


@both
def test_a_function_that_raises_fails_its_own_request(kind: str) -> None:
    """With its own error; the application is not called."""
    with pytest.raises(KeyError, match="tenant"):
        caller_of(kind, fair_by=lambda request: request["tenant"])


def test_several_headers_are_one_key() -> None:
    """Joined as a proxy would, so that a client does not choose which one counts."""
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        current = current_scope.get()
        assert current is not None
        found.append(current.key)
        await asgi_by_hand.fine(scope, receive, send)

    client = asgi_by_hand.Client()
    scope = asgi_by_hand.scope() | {"headers": [(b"x-tenant", b"a"), (b"X-Tenant", b"b")]}
    middleware = asgi_by_hand.ModelGuardMiddleware(app, fair_by="X-Tenant")
    asyncio.run(middleware(scope, client.receive, client.send))
    assert ["a, b"] == found


def test_a_generator_of_a_wsgi_application_has_its_caller_to_the_end() -> None:
    """What it calls while it is read is the same caller's."""
    keys: list[Any] = []

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain")])
        for _ in range(3):
            scope = current_scope.get()
            keys.append(None if scope is None else scope.key)
            yield b"x"

    answer = wsgi_by_hand.ask(app, header="gold", variable="HTTP_X_TENANT", fair_by="X-Tenant")
    assert (200, ["gold"] * 3) == (answer.status, keys)


@both
def test_a_caller_over_its_quota_is_told_so(kind: str, model: Gated) -> None:
    """429 with the time to come back, and nothing about the function or the key."""
    f = batched(max_size=1, fair_by=Fair(by=lambda _: "gold", quota=1), name="secret.function")(model)
    first, *waiting = queued_first(f, model)
    if kind == ASGI:
        client = asgi_by_hand.ask(asgi_by_hand.calling(lambda: f.aio(3)))
        status, headers, body = client.status, client.headers, client.body
    else:
        answer = wsgi_by_hand.ask(wsgi_by_hand.calling(lambda: f(3)))
        status, headers, body = answer.status, answer.headers, answer.body
    model.gate.set()
    assert [1, 2] == [one.result(TIMEOUT) for one in (first, *waiting)]
    assert 429 == status
    assert 1 <= int(headers["retry-after"]) <= 2
    assert b"secret" not in body
    assert b"gold" not in body


def queued_first(f: Any, model: Gated) -> list[Future[Any]]:
    """One item is being computed, and one waits."""
    first = f.submit(1)
    model.busy()
    return [first, f.submit(2)]
