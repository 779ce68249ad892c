"""``frameworks.asgi``: the time that a request has, by the option and by the client's header."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.frameworks.asgi_by_hand import Client, ask, calling, fine, never, serve

from modelguard import batched
from modelguard.frameworks.asgi import ModelGuardMiddleware
from modelguard.serving.deadlines import left

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated

INVALID = [b"", b" ", b"soon", b"-1", b"nan", b"inf", b"-inf", b"1e999", b"2s", b"1,2", b"0x10", b"1_0", b"\xa05"]
INVALID += [b"1" * 5000, b"0." + b"0" * 5000, b"\xe9", b"\xff\xfe", "\N{ARABIC-INDIC DIGIT FIVE}".encode(), b"\x00"]


def time_left(options: dict[str, Any], headers: dict[bytes, bytes] | None = None) -> float | None:
    """The seconds that an application sees as left."""
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
    """With the header that the option names, and never lengthen it; without either there is no deadline."""
    found = time_left(options, headers)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert expected - 1 < found <= expected


def test_the_deadline_ends_with_the_request() -> None:
    """It does not apply to what the caller of the middleware does next."""

    async def main() -> float | None:
        await serve(ModelGuardMiddleware(fine, deadline="1s"), Client())
        return left()

    assert asyncio.run(main()) is None


def test_a_request_whose_time_runs_out_is_answered_504(model: Gated) -> None:
    """In the queue and in the batch, even if the model is stuck."""
    f = batched(max_size=1)(model)
    app = calling(lambda: f.aio(1))
    for options, headers in (({"deadline": 0.05}, {}), ({}, {b"request-timeout": b"0.05"})):
        assert 504 == ask(app, options=options, headers=headers).status


def test_no_time_at_all_is_answered_504(model: Gated) -> None:
    """A timeout of zero admits nothing."""
    f = batched(max_size=1)(model)
    assert 504 == ask(calling(lambda: f.aio(1)), headers={b"request-timeout": b"0"}).status
    assert [] == model.batches


@pytest.mark.parametrize("value", INVALID, ids=lambda value: repr(value[:8]))
@pytest.mark.parametrize("deadline", ["1s", None])
def test_an_invalid_header_is_answered_400(value: bytes, deadline: str | None) -> None:
    """The answer says what the header must be, the application is not called, and the next request is served."""
    options = {"deadline": deadline}
    answer = ask(never, options=options, headers={b"request-timeout": value})
    assert (400, "application/problem+json") == (answer.status, answer.headers["content-type"])
    problem = json.loads(answer.body)
    assert {"type", "title", "status", "detail"} == set(problem)
    assert "Request-Timeout must be a number of seconds" in problem["detail"]
    assert 200 == ask(fine, options=options).status


@pytest.mark.parametrize("value", [b"1e300", b"99999999999", b"3153600001", b"1e18"])
@pytest.mark.parametrize("deadline", ["1s", None])
def test_a_huge_timeout_is_not_an_error_of_the_server(value: bytes, deadline: str | None) -> None:
    """A client that would wait for centuries is served, or its header is answered with 400."""
    assert ask(fine, options={"deadline": deadline}, headers={b"request-timeout": value}).status in (200, 400)
