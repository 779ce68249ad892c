"""Streams as responses of Flask: read to their end, left in the middle, late, and refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import flask
import pytest
from tests.unit.serving.gated import until

from modelguard import batched, deadline
from modelguard.errors import DeadlineExceeded
from modelguard.frameworks import wsgi
from modelguard.serving.deadlines import current_scope, left

if TYPE_CHECKING:
    from flask.testing import FlaskClient


@batched(max_size=4, buffer=2)
def count(items: list[int]) -> Iterator[list[str | type[StopIteration]]]:
    for number in itertools.count():
        yield [StopIteration if number == item else f"{number} " for item in items]


@pytest.fixture
def client() -> FlaskClient:
    app = flask.Flask("app")

    @app.get("/count/<int:most>")
    def answer(most: int) -> flask.Response:
        return flask.Response(count.stream(most), mimetype="text/plain")

    wsgi.install(app, timeout_header="Request-Timeout")
    return app.test_client()


def test_a_stream_is_a_response(client: FlaskClient) -> None:
    """Its parts are the response's."""
    assert "0 1 2 " == client.get("/count/3").text


def test_a_server_that_closes_the_response_leaves(client: FlaskClient) -> None:
    """That is what WSGI servers do when the client has gone: the item drops out of its batch."""
    before = count.status().cancelled
    response = client.get("/count/1000000", buffered=False)
    assert (b"0 ", b"1 ") == tuple(itertools.islice(response.response, 2))
    response.close()
    until(lambda: (before + 1, 0) == (count.status().cancelled, count.status().running))


def test_the_deadline_holds_until_the_end_of_the_response(client: FlaskClient) -> None:
    """The client's own deadline ends a stream that is being read."""
    response = client.get("/count/1000000", headers={"Request-Timeout": "0.05"}, buffered=False)
    with pytest.raises(DeadlineExceeded):
        for _ in response.response:
            pass
    response.close()


def test_a_block_holds_from_part_to_part_of_a_response() -> None:
    """The block is in a generator of the application; what surrounds that is set anew for each part."""

    def parts() -> Iterator[bytes]:
        with deadline("1h"):
            for _ in range(3):
                yield b"+" if (left() or 0) > 3500 else b"-"

    def app(environ: object, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        return parts()

    middleware = wsgi.ModelGuardMiddleware(app, fair_by="X-Tenant")
    environ = {"REQUEST_METHOD": "GET", "HTTP_X_TENANT": "a"}
    assert b"+++" == b"".join(middleware(environ, lambda *_: None))
    left_early: Any = middleware(environ, lambda *_: None)
    next(left_early)
    left_early.close()
    assert current_scope.get() is None, "the next request of this thread would be this one's caller's"


def test_a_refusal_comes_before_the_response_begins(client: FlaskClient) -> None:
    """With the status that other refusals have."""
    assert 504 == client.get("/count/3", headers={"Request-Timeout": "0"}).status_code
