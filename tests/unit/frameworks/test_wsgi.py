"""``frameworks.wsgi``: the answers to requests made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.frameworks.refusals import FIGURE, NAME
from tests.unit.frameworks.wsgi_by_hand import ERRORS, IDS, ask, calling, fine, never, raising

from modelguard import batched, guard
from modelguard.errors import BatchFailed, DeadlineExceeded, ItemRefused, QueueFull
from modelguard.frameworks.wsgi import ModelGuardMiddleware
from modelguard.serving import left

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated

OTHERS = [ValueError("mine"), TimeoutError(), BatchFailed(NAME, "why", size=2), ItemRefused(NAME, why="why")]

INVALID = ["", " ", "soon", "-1", "nan", "inf", "1e999", "2s", "1,2", "1" * 5000, "\xe9", "\xff\xfe"]

# Errors


@pytest.mark.parametrize(("error", "status", "retry"), ERRORS, ids=IDS)
def test_each_error_has_its_answer(error: Exception, status: int, retry: float | None) -> None:
    """A problem document that reveals nothing internal, is not cached, and maybe with the time to come back."""
    answer = ask(raising(error))
    problem = json.loads(answer.body)
    assert {"type", "title", "status", "detail"} == set(problem)
    assert (status, status, "about:blank") == (answer.status, problem["status"], problem["type"])
    headers = answer.headers
    assert ("application/problem+json", "no-store") == (headers["content-type"], headers["cache-control"])
    assert str(len(answer.body)) == headers["content-length"]
    for inside in (NAME, NAME.split(".")[1], str(FIGURE), "Traceback", type(error).__name__):
        assert inside not in f"{answer.body!r} {headers}"
    if retry is None:
        assert "retry-after" not in headers
    else:
        assert max(math.ceil(retry), 1) <= int(headers["retry-after"]) <= max(math.ceil(1.5 * retry), 1)
    assert str(error) == json.loads(ask(raising(error), detail=True).body)["detail"]


@pytest.mark.parametrize("error", OTHERS, ids=lambda value: type(value).__name__)
def test_other_errors_pass_through(error: Exception) -> None:
    """They are the application's, or a mistake in it."""
    with pytest.raises(type(error)) as raised:
        ask(raising(error))
    assert error is raised.value


def test_nothing_is_answered_once_the_response_has_begun() -> None:
    """The error goes to the server, which closes the connection: no client takes half a response for a whole one."""
    begun: list[str] = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        yield b"half"
        raise DeadlineExceeded(NAME, waited=1)

    body = iter(ModelGuardMiddleware(app)({"REQUEST_METHOD": "GET"}, lambda status, headers: begun.append(status)))
    assert b"half" == next(body)
    with pytest.raises(DeadlineExceeded):
        next(body)
    assert ["200 OK"] == begun


@pytest.mark.parametrize("started", [False, True])
def test_a_generator_that_fails_before_its_first_bytes_is_answered(*, started: bool) -> None:
    """A streamed answer is computed while it is read, and overload comes before anything has been sent."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        if started:
            start_response("200 OK", [("Content-Type", "text/plain")])
        raise QueueFull(NAME, queued=3, retry_after=2)
        yield b"never"

    assert 503 == ask(app).status


def test_the_deadline_holds_while_a_generator_is_read() -> None:
    """Each part is computed on behalf of the request; afterwards nothing is bound any more."""
    lefts: list[float | None] = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        for part in (b"a", b"", b"b"):
            lefts.append(left())
            yield part

    assert b"ab" == ask(app, deadline="10s").body
    assert all(one is not None and 0 < one <= 10 for one in lefts)
    assert left() is None


def test_a_generator_is_closed_when_the_server_gives_up() -> None:
    """What it holds is let go when the client has disconnected."""
    closed: list[bool] = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            yield b"a"
            yield b"b"
        finally:
            closed.append(True)

    body: Any = ModelGuardMiddleware(app)({"REQUEST_METHOD": "GET"}, lambda status, headers: None)
    assert b"a" == next(body)
    body.close()
    assert [True] == closed


@pytest.mark.parametrize("header", ["1_0", "1,2", "0.5, 3"])
def test_a_header_that_is_not_one_number_is_an_error(header: str) -> None:
    """Python reads 1_0 as ten, and a proxy joins two headers with a comma; no client means either."""
    assert 400 == ask(fine, header=header).status


def test_an_answer_to_head_has_no_body() -> None:
    """Its headers are those of the answer to a GET."""
    app = raising(DeadlineExceeded(NAME, waited=1))
    head, get = ask(app, method="HEAD"), ask(app)
    assert (b"", get.headers) == (head.body, head.headers)


def test_what_an_application_returns_is_passed_on_unchanged() -> None:
    """A server may recognise its type, and send a file by itself."""
    parts = [b"fine"]
    served = ModelGuardMiddleware(lambda environ, start_response: parts)
    assert served({"REQUEST_METHOD": "GET"}, print) is parts


# Deadlines


@pytest.mark.parametrize(
    ("options", "header", "expected"),
    [
        ({}, None, None),
        ({"deadline": "1m"}, None, 60),
        ({}, "5", 5),
        ({"deadline": "1m"}, "0.5", 0.5),
        ({"deadline": "1m"}, "3600", 60),
        ({"deadline": "1m", "timeout_header": None}, "5", 60),
        ({"deadline": "1m", "timeout_header": "X-Patience"}, "5", 60),
        ({"deadline": "1m", "timeout_header": "X-Patience", "variable": "HTTP_X_PATIENCE"}, "5", 5),
    ],
)
def test_a_client_can_shorten_the_deadline(options: dict[str, Any], header: str | None, expected: float | None) -> None:
    """With the header that the option names, and never lengthen it; it ends with the request."""
    found: list[float | None] = []
    assert 200 == ask(calling(lambda: found.append(left())), header=header, **options).status
    if expected is None:
        assert [None] == found
    else:
        assert found[0] is not None
        assert expected - 1 < found[0] <= expected
    assert left() is None


def test_a_request_whose_time_runs_out_is_answered_504(model: Gated) -> None:
    """In the queue and in the batch, even if the model is stuck."""
    f = batched(max_size=1)(model)
    app = calling(lambda: f(1))
    assert [504, 504] == [ask(app, deadline=0.05).status, ask(app, header="0.05").status]
    assert 504 == ask(app, header="0").status


@pytest.mark.parametrize("value", INVALID, ids=lambda value: repr(value[:8]))
@pytest.mark.parametrize("deadline", ["1s", None])
def test_an_invalid_header_is_answered_400(value: str, deadline: str | None) -> None:
    """The answer says what the header must be, the application is not called, and the next request is served."""
    answer = ask(never, header=value, deadline=deadline)
    assert (400, "application/problem+json") == (answer.status, answer.headers["content-type"])
    problem = json.loads(answer.body)
    assert {"type", "title", "status", "detail"} == set(problem)
    assert "Request-Timeout must be a number of seconds" in problem["detail"]
    assert 200 == ask(fine, deadline=deadline).status


@pytest.mark.parametrize("value", ["1e300", "99999999999"])
def test_a_huge_timeout_is_not_an_error_of_the_server(value: str) -> None:
    """A client that would wait for centuries is served, or its header is answered with 400."""
    assert ask(fine, header=value).status in (200, 400)


# Probes


def test_a_process_that_answers_is_alive(nobody: None) -> None:
    """Whatever its models do."""
    nlp = guard(dict, reload_on=None)
    answer = ask(never, path="/livez", header="soon")
    assert (200, {"status": "alive"}) == (answer.status, json.loads(answer.body))
    assert ("application/json", "no-store") == (answer.headers["content-type"], answer.headers["cache-control"])
    assert not nlp.ready


def test_a_service_is_ready_when_its_models_are(nobody: None) -> None:
    """Every guard has a model, and no batched function is being closed; or only those that the option names."""
    nlp, f = guard(dict, reload_on=None, name=NAME), batched(max_size=1)(lambda items: items)
    assert [503, 200] == [ask(never, path="/readyz").status, ask(never, path="/readyz", guards=[f]).status]
    assert {"status": "not ready", "waiting_for": [NAME]} == json.loads(ask(never, path="/readyz").body)
    nlp.load()
    assert (200, {"status": "ready"}) == ((told := ask(never, path="/readyz")).status, json.loads(told.body))
    f.close()
    assert [200, 503] == [ask(never, path="/readyz").status, ask(never, path="/readyz", guards=[f]).status]


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_a_probe_by_head_has_no_body(nobody: None, path: str) -> None:
    """Its headers are those of the answer to a GET."""
    head, get = ask(never, path=path, method="HEAD"), ask(never, path=path)
    assert (b"", 200, get.headers) == (head.body, head.status, head.headers)


@pytest.mark.parametrize(
    "request_",
    [
        {"path": "/livez", "method": "POST"},
        {"path": "/livez/"},
        {"path": "/livez", "livez": None},
        {"path": "/readyz", "readyz": None},
        {"path": "/livez", "livez": "/health"},
    ],
)
def test_other_requests_reach_the_application(request_: dict[str, Any]) -> None:
    """Other methods, other paths, and probes that are turned off or have another path."""
    assert b"fine" == ask(fine, **request_).body


def test_a_request_without_a_path_is_not_a_probe() -> None:
    """The standard lets a server leave the path out."""
    assert [b"fine"] == ModelGuardMiddleware(fine)({"REQUEST_METHOD": "GET"}, lambda status, headers: None)
