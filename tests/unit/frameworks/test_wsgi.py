"""``frameworks.wsgi``: what clients are told, by requests made by hand and by Flask."""

from __future__ import annotations

import json
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import flask
import pytest

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
    Overloaded,
    QueueFull,
    Reloading,
)
from modelguard.frameworks import wsgi
from modelguard.frameworks.wsgi import ModelGuardMiddleware
from modelguard.lifecycle import forking
from modelguard.serving import registry
from modelguard.serving.scope import left

TIMEOUT = 10.0

#: What must not be found in an answer: the function's name, and a figure.
NAME, FIGURE = "secret.function", 777

#: Each error with the status that is answered, and after how many seconds a client may come back.
ERRORS = [
    (Overloaded(f"{NAME} {FIGURE}", retry_after=3.0), 503, 3.0),
    (QueueFull(NAME, queued=FIGURE, retry_after=2.5), 503, 2.5),
    (QueueFull(NAME, queued=FIGURE, retry_after=0.001), 503, 0.001),
    (DeadlineUnreachable(NAME, estimate=FIGURE, left=FIGURE, retry_after=40.0), 503, 40.0),
    (CircuitOpen(NAME, failures=FIGURE, retry_after=10.0), 503, 10.0),
    (Reloading(NAME, waited=FIGURE), 503, 1.0),
    (LoadFailed(NAME, f"{FIGURE}", retry_after=5.0), 503, 5.0),
    (GuardClosed(NAME), 503, 1.0),
    (DeadlineExceeded(NAME, waited=FIGURE), 504, None),
    (ItemTooHeavy(NAME, weight=FIGURE, max_weight=7), 413, None),
    (CallerGone(NAME), 499, None),
]
IDS = [f"{type(error).__name__} {retry}" for error, _, retry in ERRORS]

OTHERS = [ValueError("mine"), TimeoutError(), BatchFailed(NAME, "why", size=2), ItemRefused(NAME, why="why")]

NONSENSE = ["", " ", "soon", "-1", "nan", "inf", "1e999", "2s", "1,2", "1" * 5000, "\xe9", "\xff\xfe"]

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Gated:
    """A batch function that computes when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)

    def __call__(self, items: list[Any]) -> list[Any]:
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


@dataclass
class Answer:
    """What a server was given for its client."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    app: App,
    path: str = "/",
    method: str = "GET",
    header: str | None = None,
    variable: str = "HTTP_REQUEST_TIMEOUT",
    **options: Any,
) -> Answer:
    """One request through a middleware, both sides of which are held to the standard."""
    environ: dict[str, Any] = {"QUERY_STRING": ""} | ({} if header is None else {variable: header})
    setup_testing_defaults(environ)
    environ |= {"PATH_INFO": path, "REQUEST_METHOD": method}
    begun: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], error: Any = None) -> Any:
        begun[:] = [int(status.split(" ", 1)[0]), dict(headers)]

    served = validator(ModelGuardMiddleware(validator(app), **options))
    parts = served(environ, start_response)
    try:
        body = b"".join(parts)
    finally:
        parts.close()  # type: ignore[attr-defined]
    return Answer(begun[0], begun[1], body)


def fine(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"" if environ["REQUEST_METHOD"] == "HEAD" else b"fine"]


def raising(error: Exception) -> App:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        raise error

    return app


def calling(call: Callable[[], Any]) -> App:
    """An application that answers after a call."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        call()
        return fine(environ, start_response)

    return app


def never(environ: Any, start_response: Any) -> Iterable[bytes]:
    raise AssertionError("the application is not asked")


# Errors


@pytest.mark.parametrize(("error", "status", "retry"), ERRORS, ids=IDS)
def test_each_error_has_its_answer(error: Exception, status: int, retry: float | None) -> None:
    """A problem document that tells nothing of the inside, not to be kept, with the time to come back if there is."""
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
def test_other_errors_are_let_through(error: Exception) -> None:
    """They are the application's, or a mistake in it."""
    with pytest.raises(type(error)) as raised:
        ask(raising(error))
    assert error is raised.value


def test_nothing_is_answered_once_the_response_has_begun() -> None:
    """The error goes to the server, which closes the connection: no client takes a half for a whole."""
    begun: list[str] = []

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        raise DeadlineExceeded(NAME, waited=1)

    with pytest.raises(DeadlineExceeded):
        ModelGuardMiddleware(app)({"REQUEST_METHOD": "GET"}, lambda status, headers: begun.append(status))
    assert ["200 OK"] == begun


def test_an_answer_to_head_has_no_body() -> None:
    """Its headers are those of the answer to a GET."""
    app = raising(DeadlineExceeded(NAME, waited=1))
    head, get = ask(app, method="HEAD"), ask(app)
    assert (b"", get.headers) == (head.body, head.headers)


def test_what_an_application_returns_is_passed_on_as_it_is() -> None:
    """A server may know its type, and send a file by itself."""
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
    """By the header that was named, and never lengthen it; it ends with the request."""
    found: list[float | None] = []
    assert 200 == ask(calling(lambda: found.append(left())), header=header, **options).status
    if expected is None:
        assert [None] == found
    else:
        assert found[0] is not None
        assert expected - 1 < found[0] <= expected
    assert left() is None


def test_a_request_whose_time_runs_out_is_told_so(model: Gated) -> None:
    """In the queue and in the batch, although the model is stuck."""
    f = batched(max_size=1)(model)
    app = calling(lambda: f(1))
    assert [504, 504] == [ask(app, deadline=0.05).status, ask(app, header="0.05").status]
    assert 504 == ask(app, header="0").status


@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: repr(value[:8]))
@pytest.mark.parametrize("deadline", ["1s", None])
def test_nonsense_in_the_header_is_that_callers_alone(value: str, deadline: str | None) -> None:
    """It is told what the header should be, the application is not asked, and the next caller is served."""
    answer = ask(never, header=value, deadline=deadline)
    assert (400, "application/problem+json") == (answer.status, answer.headers["content-type"])
    problem = json.loads(answer.body)
    assert {"type", "title", "status", "detail"} == set(problem)
    assert "Request-Timeout must be a number of seconds" in problem["detail"]
    assert 200 == ask(fine, deadline=deadline).status


@pytest.mark.parametrize("value", ["1e300", "99999999999"])
def test_more_time_than_anyone_has_is_no_error_of_the_server(value: str) -> None:
    """A client that would wait for centuries is served, or told that it cannot be meant."""
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
    """Every guard has one, and no batched function is being closed; or those of them that the option names."""
    nlp, f = guard(dict, reload_on=None, name=NAME), batched(max_size=1)(lambda items: items)
    assert [503, 200] == [ask(never, path="/readyz").status, ask(never, path="/readyz", guards=[f]).status]
    assert {"status": "not ready"} == json.loads(ask(never, path="/readyz").body)
    assert [NAME] == json.loads(ask(never, path="/readyz", detail=True).body)["waiting_for"]
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
def test_what_is_no_probe_is_the_applications(request_: dict[str, Any]) -> None:
    """Other methods, other paths, and probes that are turned off or live elsewhere."""
    assert b"fine" == ask(fine, **request_).body


def test_a_request_without_a_path_is_no_probe() -> None:
    """The standard lets a server leave it out."""
    assert [b"fine"] == ModelGuardMiddleware(fine)({"REQUEST_METHOD": "GET"}, lambda status, headers: None)


# Flask


def service(f: Any = None, **config: Any) -> flask.Flask:
    """An application with views in itself and in a blueprint."""
    app = flask.Flask("app")
    app.config.update(config)
    parts = flask.Blueprint("parts", "parts")

    @app.get("/")
    @parts.get("/in-a-blueprint")
    def answer() -> str:
        return str(f(1))

    @app.get("/left")
    def rest() -> str:
        return str(left())

    @app.get("/fail")
    def fail() -> str:
        raise ValueError("mine")

    @app.before_request
    def before() -> None:
        if flask.request.args.get("refuse"):
            raise QueueFull(NAME, queued=1, retry_after=2)

    app.register_blueprint(parts)
    return app


MODES = {
    "plain": {},
    "testing": {"TESTING": True},
    "debug": {"DEBUG": True},
    "propagating": {"PROPAGATE_EXCEPTIONS": True},
    "trapping": {"TRAP_HTTP_EXCEPTIONS": True},
}


@pytest.mark.parametrize("path", ["/", "/in-a-blueprint"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("error", "status", "retry"), ERRORS, ids=IDS)
def test_flask_answers_each_error(error: Exception, status: int, retry: float | None, mode: str, path: str) -> None:
    """In a blueprint as elsewhere, and in every mode: a refusal is no crash to look into."""

    def refuse(item: Any) -> Any:
        raise error

    app = service(refuse, **MODES[mode])
    wsgi.install(app)
    with app.test_client() as client:
        answer, head = client.get(path), client.head(path)
    assert (status, "application/problem+json", "no-store") == (
        answer.status_code,
        answer.headers["content-type"],
        answer.headers["cache-control"],
    )
    assert {"type", "title", "status", "detail"} == set(json.loads(answer.data))
    assert NAME not in answer.text
    assert (retry is None) == ("retry-after" not in answer.headers)
    assert (status, b"") == (head.status_code, head.data)


def test_flask_and_a_real_queue(model: Gated) -> None:
    """Full is 503, and out of time is 504; by the option as by the header."""
    f = batched(max_size=1, max_queue=1)(model)
    f.submit("first")
    model.busy()
    app = service(f)
    wsgi.install(app, deadline="0.05s")
    with app.test_client() as client:
        assert 504 == client.get("/").status_code
        f.submit("second")
        assert 503 == client.get("/").status_code
    app = service(f)
    wsgi.install(app)
    with app.test_client() as client:
        refused = client.get("/")
        assert 503 == refused.status_code
        assert refused.headers["retry-after"].isdigit()


def test_flask_reads_the_deadline_and_its_header() -> None:
    """It holds in a view; nonsense is the caller's alone."""
    app = service()
    wsgi.install(app, deadline="1m")
    with app.test_client() as client:
        assert 59 < float(client.get("/left").text) <= 60
        assert 4 < float(client.get("/left", headers={"Request-Timeout": "5"}).text) <= 5
        nonsense = client.get("/left", headers={"Request-Timeout": "soon"})
        assert (400, "application/problem+json") == (nonsense.status_code, nonsense.headers["content-type"])
        assert 400 == client.get("/left", headers={"Request-Timeout": "\xe9"}).status_code


def test_flask_has_probes(nobody: None) -> None:
    """They do not pass through what the application does before each request."""
    app = service()
    nlp = guard(dict, reload_on=None)
    wsgi.install(app)
    with app.test_client() as client:
        assert [200, 503] == [client.get(path).status_code for path in ("/livez?refuse=1", "/readyz?refuse=1")]
        nlp.load()
        assert 200 == client.get("/readyz").status_code
        assert (200, b"") == ((head := client.head("/livez")).status_code, head.data)
        assert 404 == client.post("/livez").status_code


def test_flask_answers_what_is_refused_before_a_view() -> None:
    """A hook that asks a model is refused like a view; those that come after a response see it."""
    app = service()
    seen: list[int] = []
    app.after_request(lambda response: (seen.append(response.status_code), response)[1])
    wsgi.install(app)
    with app.test_client() as client:
        assert 503 == client.get("/left?refuse=1").status_code
    assert [503] == seen


@pytest.mark.parametrize("mode", MODES)
def test_flask_keeps_its_own_errors(mode: str) -> None:
    """They are 500, or propagated, as without modelguard; one of its own handlers has them first."""
    app = service(**MODES[mode])
    wsgi.install(app)
    with app.test_client() as client:
        if mode in ("plain", "trapping"):
            assert 500 == client.get("/fail").status_code
        else:
            with pytest.raises(ValueError, match="mine"):
                client.get("/fail")
    app = service(**MODES[mode])
    app.register_error_handler(Exception, lambda error: ("its own", 418))
    wsgi.install(app)
    with app.test_client() as client:
        assert (418, 503) == (client.get("/fail").status_code, client.get("/left?refuse=1").status_code)


def test_flask_tells_the_error_in_development() -> None:
    """Where that was asked for."""
    app = service()
    wsgi.install(app, detail=True)
    with app.test_client() as client:
        told = json.loads(client.get("/left?refuse=1").data)
    assert f"{NAME}(): 1 requests wait already, which is the limit" == told["detail"]


def test_the_handler_does_not_swallow_another_error() -> None:
    """One that an application has registered it for besides."""
    app = service()
    wsgi.install(app)
    handle = app.error_handler_spec[None][None][Overloaded]
    with pytest.raises(ValueError, match="mine"):
        handle(ValueError("mine"))


# Options


@pytest.mark.parametrize("app", [fine, flask.Blueprint("b", "b"), None, object(), ModelGuardMiddleware(fine)])
def test_what_is_no_flask_application_is_refused(app: Any) -> None:
    """With the way to wrap any other."""
    with pytest.raises(InvalidOption, match=r"application = ModelGuardMiddleware\(application\)"):
        wsgi.install(app)


@pytest.mark.parametrize(
    ("option", "value"),
    [("deadline", 0), ("deadline", "soon"), ("livez", "livez"), ("readyz", 3), ("timeout_header", "a b")],
)
def test_an_option_that_cannot_be_meant_is_refused_by_name(option: str, value: Any) -> None:
    """By both, and the application is left as it was."""
    app = service()
    before = app.wsgi_app
    with pytest.raises(InvalidOption, match=option):
        wsgi.install(app, **{option: value})
    assert before == app.wsgi_app
    with pytest.raises(InvalidOption, match=option):
        ModelGuardMiddleware(fine, **{option: value})
