"""``frameworks.litestar``: what its plugin adds to an application, and what it leaves to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.frameworks.asgi_by_hand import Client, behind, disconnect, piece
from tests.unit.frameworks.refusals import ERRORS, IDS, NAME

from modelguard import batched, guard
from modelguard.errors import InvalidOption, ItemTooHeavy, ModelGuardError, Overloaded
from modelguard.frameworks.admin import Admin
from modelguard.frameworks.litestar import ModelGuardPlugin
from modelguard.serving.deadlines import left

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated

litestar = pytest.importorskip("litestar", reason="needs Litestar")

from litestar.testing import TestClient  # noqa: E402 - after the look for Litestar

SECRET = "0123456789abcdef"


def client(*handlers: Any, plugin: ModelGuardPlugin | None = None, **config: Any) -> Any:
    """A client of an application with these handlers and the plugin."""
    app = litestar.Litestar(handlers, plugins=[plugin or ModelGuardPlugin()], logging_config=None, **config)
    return TestClient(app, raise_server_exceptions=False)


def refusing(error: Exception) -> Any:
    """A route that raises an error."""

    @litestar.get("/")  # type: ignore[misc]
    async def refuse() -> None:
        raise error

    return refuse


@pytest.mark.parametrize(("error", "status", "retry"), ERRORS, ids=IDS)
@pytest.mark.parametrize("debug", [True, False])
def test_each_error_has_its_answer(error: Exception, status: Any, retry: float | None, debug: bool) -> None:  # noqa: FBT001
    """Litestar's own answer would be 500; the right one reveals nothing, in debug mode too."""
    with client(refusing(error), debug=debug) as asked:
        answer = asked.get("/")
    assert (status["status"], "application/problem+json", "no-store") == (
        answer.status_code,
        answer.headers["content-type"],
        answer.headers["cache-control"],
    )
    assert (retry is None) == ("retry-after" not in answer.headers)
    assert NAME not in answer.text


def test_its_own_errors_stay_its_own() -> None:
    """Others are 500, and a request without a route is 404."""
    with client(refusing(ValueError("mine"))) as asked:
        assert (500, 404) == (asked.get("/").status_code, asked.get("/nowhere").status_code)


def test_a_full_queue_and_a_passed_deadline(model: Gated) -> None:
    """503 and 504, by the option and by the client's header, in coroutines and in threads."""
    f = batched(max_size=1, max_queue=1)(model)
    f.submit("first")
    model.busy()

    @litestar.get("/async")  # type: ignore[misc]
    async def awaiting() -> str:
        return str(await f.aio(1))

    @litestar.get("/sync", sync_to_thread=True)  # type: ignore[misc]
    def blocking() -> str:
        return str(f(1))

    with client(awaiting, blocking, plugin=ModelGuardPlugin(deadline="0.05s")) as asked:
        assert [504, 504] == [asked.get(path).status_code for path in ("/async", "/sync")]
    with client(awaiting, blocking) as asked:
        assert 504 == asked.get("/async", headers={"Request-Timeout": "0.05"}).status_code
        f.submit("second")
        assert [503, 503] == [asked.get(path).status_code for path in ("/async", "/sync")]


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_a_disconnect_cancels_what_waits(kind: str, model: Gated) -> None:
    """The item of a client that has disconnected is not computed."""
    f = batched(max_size=1)(model)

    @litestar.get("/")  # type: ignore[misc]
    async def awaiting() -> str:
        return str(await f.aio(1))

    @litestar.get("/", sync_to_thread=True)  # type: ignore[misc]
    def blocking() -> str:
        return str(f(1))

    handler = awaiting if kind == "coroutine" else blocking
    app = litestar.Litestar([handler], plugins=[ModelGuardPlugin()], logging_config=None)

    async def main() -> None:
        await behind(f, model)
        await disconnect(app, Client(piece()), f)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_the_deadline_and_its_header_reach_a_handler() -> None:
    """An invalid header is 400."""

    @litestar.get("/left", sync_to_thread=True)  # type: ignore[misc]
    def rest() -> float:
        return left() or 0.0

    with client(rest, plugin=ModelGuardPlugin(deadline="1m")) as asked:
        assert 59 < asked.get("/left").json() <= 60
        assert 4 < asked.get("/left", headers={"Request-Timeout": "5"}).json() <= 5
        assert 400 == asked.get("/left", headers={"Request-Timeout": "soon"}).status_code


def test_probes_need_no_routes_of_the_application(nobody: None) -> None:
    """Litestar calls middleware only where there is a route, so the plugin has some; they are not in the schema."""
    nlp = guard(dict, reload_on=None)
    with client(refusing(ValueError())) as asked:
        assert [200, 503] == [asked.get(path).status_code for path in ("/livez", "/readyz")]
        nlp.load()
        assert [200, 200] == [asked.head(path).status_code for path in ("/livez", "/readyz")]
        assert 404 == asked.post("/livez").status_code
        assert {"/"} == set(asked.app.openapi_schema.paths)
    with client(plugin=ModelGuardPlugin(livez=None, readyz="/ready")) as asked:
        assert [404, 404, 200] == [asked.get(path).status_code for path in ("/livez", "/readyz", "/ready")]


@pytest.mark.parametrize("path", ["/api", "api/", "/api/v1/", "/"])
def test_probes_are_below_the_path_of_the_application(nobody: None, path: str) -> None:
    """As its routes are, and so is the admin route: nothing else of the application can be reached."""
    below = f"/{path.strip('/')}".rstrip("/")
    with client(plugin=ModelGuardPlugin(admin=Admin(SECRET)), path=path) as asked:
        assert [200, 200] == [asked.get(f"{below}{probe}").status_code for probe in ("/livez", "/readyz")]
        assert 401 == asked.get(f"{below}/modelguard/status").status_code


def test_refusals_of_tasks_are_answered_like_one() -> None:
    """Those of a handler that waits for several calls at once; a group with another error is Litestar's own 500."""
    full = Overloaded("full")
    with client(refusing(ExceptionGroup("tasks", [full, full]))) as asked:
        assert 503 == asked.get("/").status_code
    with client(refusing(ExceptionGroup("tasks", [full, ValueError("mine")]))) as asked:
        assert (500, "Internal Server Error") == ((answer := asked.get("/")).status_code, answer.json()["detail"])


def test_the_admin_route_is_there(nobody: None) -> None:
    """With its secret, and without it 401."""
    nlp = guard(dict, reload_on=None, name="nlp")
    nlp.load()
    with client(plugin=ModelGuardPlugin(admin=Admin(SECRET, path="/ops/"))) as asked:
        headers = {"Authorization": f"Bearer {SECRET}"}
        assert 401 == asked.get("/ops/status").status_code
        assert 200 == asked.get("/ops/status", headers=headers).status_code
        assert 200 == asked.post("/ops/reload?name=nlp", headers=headers).status_code
    assert 2 == nlp.status().generation


@pytest.mark.parametrize("kind", [Overloaded, ModelGuardError])
def test_the_applications_own_handler_comes_first(kind: type[Exception]) -> None:
    """For one of the errors, or for all of them."""

    def mine(_: Any, error: Exception) -> Any:
        return litestar.Response("mine", status_code=418)

    with client(refusing(Overloaded("full")), exception_handlers={kind: mine}) as asked:
        assert (418, "mine") == ((answer := asked.get("/")).status_code, answer.text)


@pytest.mark.parametrize(
    ("error", "code"), [(Overloaded(NAME), 1013), (ItemTooHeavy(NAME, weight=9, max_weight=7), 1009)]
)
def test_a_websocket_is_closed_with_a_code(error: Exception, code: int) -> None:
    """Litestar would close it with 4500."""

    @litestar.websocket("/ws")  # type: ignore[misc]
    async def talk(socket: litestar.WebSocket[Any, Any, Any]) -> None:
        await socket.accept()
        raise error

    from litestar.exceptions import WebSocketDisconnect

    with client(talk) as asked, asked.websocket_connect("/ws") as socket, pytest.raises(WebSocketDisconnect) as ended:
        socket.receive_json()
    assert code == ended.value.code
    assert NAME not in ended.value.detail


def test_an_invalid_option_is_rejected_where_it_is_written() -> None:
    """By the plugin, before there is an application."""
    with pytest.raises(InvalidOption, match=r"Did you mean .deadline."):
        ModelGuardPlugin(dedline="2s")


def test_guards_may_be_given_by_a_generator(nobody: None) -> None:
    """Each route's middleware sees all of them."""
    nlp = guard(dict, reload_on=None)
    with client(plugin=ModelGuardPlugin(guards=(each for each in [nlp]))) as asked:
        assert 503 == asked.get("/readyz").status_code
