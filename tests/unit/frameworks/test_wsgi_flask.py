"""``frameworks.wsgi`` in Flask: its views, hooks and modes, and what can be installed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import flask
import pytest
from tests.unit.frameworks.refusals import NAME
from tests.unit.frameworks.wsgi_by_hand import ERRORS, IDS, fine

from modelguard import batched, guard
from modelguard.errors import InvalidOption, ModelGuardError, Overloaded, QueueFull
from modelguard.frameworks import wsgi
from modelguard.frameworks.wsgi import ModelGuardMiddleware
from modelguard.serving.deadlines import left

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated

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
    """In the application and in blueprints, and in every mode: a refusal does not start a debugger."""

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


@pytest.mark.parametrize("mode", MODES)
def test_flask_answers_a_group_of_refusals(mode: str) -> None:
    """As tasks of a view raise it. One with another error stays with the application's own handler of all errors."""
    refusal = QueueFull(NAME, queued=1, retry_after=2)
    errors = [ExceptionGroup("tasks", [refusal]), ExceptionGroup("tasks", [refusal, ValueError("mine")])]

    def refuse(item: Any) -> Any:
        raise errors.pop(0)

    app = service(refuse, **MODES[mode])
    wsgi.install(app)
    app.register_error_handler(Exception, lambda error: (f"{len(error.exceptions)} errors", 418))
    with app.test_client() as client:
        assert (503, "application/problem+json") == ((answer := client.get("/")).status_code, answer.content_type)
        assert (418, "2 errors") == ((answer := client.get("/")).status_code, answer.text)


def test_flasks_own_handler_of_all_errors_may_be_async() -> None:
    """It gets a group with other errors than refusals, as without modelguard."""

    def fail(item: Any) -> Any:
        raise ExceptionGroup("tasks", [ValueError("mine")])

    async def own(error: Any) -> tuple[str, int]:
        return f"{len(error.exceptions)} errors", 418

    app = service(fail)
    wsgi.install(app)
    app.register_error_handler(Exception, own)
    with app.test_client() as client:
        assert (418, "1 errors") == ((answer := client.get("/")).status_code, answer.text)


def test_flask_and_a_real_queue(model: Gated) -> None:
    """A full queue is 503, a passed deadline 504, by the option and by the header."""
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
    """It applies in a view; an invalid header is answered with 400."""
    app = service()
    wsgi.install(app, deadline="1m")
    with app.test_client() as client:
        assert 59 < float(client.get("/left").text) <= 60
        assert 4 < float(client.get("/left", headers={"Request-Timeout": "5"}).text) <= 5
        nonsense = client.get("/left", headers={"Request-Timeout": "soon"})
        assert (400, "application/problem+json") == (nonsense.status_code, nonsense.headers["content-type"])
        assert 400 == client.get("/left", headers={"Request-Timeout": "\xe9"}).status_code


def test_flask_has_probes(nobody: None) -> None:
    """They skip what the application does before each request."""
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
    """A refusal in a hook is answered like one in a view, and hooks after the response see it."""
    app = service()
    seen: list[int] = []
    app.after_request(lambda response: (seen.append(response.status_code), response)[1])
    wsgi.install(app)
    with app.test_client() as client:
        assert 503 == client.get("/left?refuse=1").status_code
    assert [503] == seen


@pytest.mark.parametrize("mode", MODES)
def test_flask_keeps_its_own_errors(mode: str) -> None:
    """They are 500, or propagate, as without modelguard; the application's own handlers get them first."""
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


@pytest.mark.parametrize("kind", [Overloaded, ModelGuardError])
@pytest.mark.parametrize("first", [True, False])
def test_the_applications_own_handler_comes_first(kind: type[Exception], first: bool) -> None:  # noqa: FBT001
    """For one of the errors, or for all of them if it is there already."""
    app = service()
    if first:
        app.register_error_handler(kind, lambda error: ("its own", 418))
    wsgi.install(app)
    if not first:
        app.register_error_handler(Overloaded, lambda error: ("its own", 418))
    with app.test_client() as client:
        assert 418 == client.get("/left?refuse=1").status_code


def test_flask_shows_the_error_in_development() -> None:
    """With ``detail=True``."""
    app = service()
    wsgi.install(app, detail=True)
    with app.test_client() as client:
        told = json.loads(client.get("/left?refuse=1").data)
    assert f"{NAME}(): the queue is full, with 1 requests" == told["detail"]


def test_the_handler_does_not_swallow_another_error() -> None:
    """An application may register the handler for other errors as well."""
    app = service()
    wsgi.install(app)
    handle = app.error_handler_spec[None][None][Overloaded]
    with pytest.raises(ValueError, match="mine"):
        handle(ValueError("mine"))


# Options


@pytest.mark.parametrize(
    "app", [fine, flask.Blueprint("b", "b"), None, object(), ModelGuardMiddleware(flask.Flask("b"))]
)
def test_anything_but_a_flask_application_is_rejected(app: Any) -> None:
    """The error says how to wrap other applications."""
    with pytest.raises(InvalidOption, match=r"application = ModelGuardMiddleware\(application\)"):
        wsgi.install(app)


@pytest.mark.parametrize(
    ("option", "value"),
    [("deadline", 0), ("deadline", "soon"), ("livez", "livez"), ("readyz", 3), ("timeout_header", "a b")],
)
def test_an_invalid_option_is_rejected_by_name(option: str, value: Any) -> None:
    """By both ways to install it, and the application is not changed."""
    app = service()
    before = app.wsgi_app
    with pytest.raises(InvalidOption, match=option):
        wsgi.install(app, **{option: value})
    assert before == app.wsgi_app
    with pytest.raises(InvalidOption, match=option):
        ModelGuardMiddleware(fine, **{option: value})


def test_an_unknown_option_is_rejected_with_the_known_ones() -> None:
    """``install()`` names the misspelt option, lists those that exist, and leaves the application as it was."""
    app = service()
    before = app.wsgi_app
    with pytest.raises(
        InvalidOption, match=r"timeout='2s': is not an option .* Its options are deadline, timeout_header, "
    ):
        wsgi.install(app, timeout="2s")
    assert before == app.wsgi_app
