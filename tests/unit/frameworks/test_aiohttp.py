"""``frameworks.aiohttp``: its middleware around handlers, and what can be installed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.frameworks.asgi_by_hand import behind, seen
from tests.unit.frameworks.refusals import ERRORS, IDS, NAME

from modelguard import Fair, batched, guard
from modelguard.errors import CallerGone, InvalidOption, Overloaded
from modelguard.frameworks import aiohttp as frameworks_aiohttp
from modelguard.frameworks.admin import Admin
from modelguard.serving.deadlines import left

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated

pytest.importorskip("aiohttp", reason="needs aiohttp")

from aiohttp import ClientPayloadError, web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

SECRET = "0123456789abcdef"


def application(handler: Any, **options: Any) -> Any:
    """An application with one handler."""
    app = web.Application()
    app.router.add_route("*", "/", handler)
    frameworks_aiohttp.install(app, **options)
    return app


def ask(app: Any, *requests: tuple[str, str | URL], **request: Any) -> list[Any]:
    """The answers to some requests, with their bodies as text."""

    async def main() -> list[Any]:
        answers = []
        async with TestClient(TestServer(app)) as client:
            for method, where in requests or (("GET", "/"),):
                answer = await client.request(method, where, **request)
                answer.body_text = await answer.text()  # type: ignore[attr-defined]
                answers.append(answer)
        return answers

    return asyncio.run(main())


def raising(error: Exception) -> Any:
    async def handler(request: Any) -> Any:
        raise error

    return handler


async def fine(request: Any) -> Any:
    return web.Response(text=str(left()))


@pytest.mark.parametrize(("error", "status", "retry"), ERRORS, ids=IDS)
def test_each_error_has_its_answer(error: Exception, status: Any, retry: float | None) -> None:
    """The answer of aiohttp itself would be 500; the right one reveals nothing."""
    (answer,) = ask(application(raising(error)))
    assert (status["status"], "application/problem+json", "no-store") == (
        answer.status,
        answer.headers["content-type"],
        answer.headers["cache-control"],
    )
    assert (retry is None) == ("retry-after" not in answer.headers)
    assert NAME not in answer.body_text


def test_its_own_errors_stay_its_own() -> None:
    """Others are 500, a response that a handler raises is passed on, and a request without a handler is 404."""
    assert 500 == ask(application(raising(ValueError("mine"))))[0].status
    assert 409 == ask(application(raising(web.HTTPConflict())))[0].status
    assert [404] == [answer.status for answer in ask(application(fine), ("GET", "/nowhere"))]


def test_a_full_queue_and_a_passed_deadline(model: Gated) -> None:
    """503 and 504, by the option and by the client's header."""
    f = batched(max_size=1, max_queue=1)(model)
    f.submit("first")
    model.busy()

    async def handler(request: Any) -> Any:
        return web.Response(text=str(await f.aio(1)))

    assert 504 == ask(application(handler, deadline="0.05s"))[0].status
    assert 504 == ask(application(handler), headers={"Request-Timeout": "0.05"})[0].status
    f.submit("second")
    assert 503 == ask(application(handler))[0].status


def test_the_deadline_and_its_header_reach_a_handler() -> None:
    """A client can only shorten it; an invalid header, or two of them, are 400."""
    assert 59 < float(ask(application(fine, deadline="1m"))[0].body_text) <= 60
    assert 4 < float(ask(application(fine, deadline="1m"), headers={"Request-Timeout": "5"})[0].body_text) <= 5
    for invalid in ("soon", "", "\u0663"):  # aiohttp reads headers as UTF-8, and Python the last one as three
        assert 400 == ask(application(fine), headers={"Request-Timeout": invalid})[0].status
    two = [("Request-Timeout", "1"), ("Request-Timeout", "2")]
    assert 400 == ask(application(fine), headers=two)[0].status


def test_probes(nobody: None) -> None:
    """They are answered before the application, which gets what is not a probe."""
    nlp = guard(dict, reload_on=None)
    requests = ("GET", "/livez"), ("GET", "/readyz"), ("POST", "/livez")
    assert [200, 503, 404] == [answer.status for answer in ask(application(fine), *requests)]
    nlp.load()
    (head,) = ask(application(fine), ("HEAD", "/readyz"))
    assert (200, "") == (head.status, head.body_text)


def test_the_admin_route(nobody: None) -> None:
    """With its secret, and without it 401."""
    nlp = guard(dict, reload_on=None, name="nlp")
    nlp.load()
    options = {"admin": Admin(SECRET, path="/ops")}
    assert 401 == ask(application(fine, **options), ("GET", "/ops/status"))[0].status
    headers = {"Authorization": f"Bearer {SECRET}"}
    (reloaded,) = ask(application(fine, **options), ("POST", "/ops/reload?name=nlp"), headers=headers)
    assert (200, 2) == (reloaded.status, nlp.status().generation)


def test_the_admin_route_decodes_a_name_once(nobody: None) -> None:
    """A name may have a percent sign."""
    nlp = guard(dict, reload_on=None, name="50%25")
    path = URL("/modelguard/status?name=50%2525", encoded=True)
    headers = {"Authorization": f"Bearer {SECRET}"}
    assert 200 == ask(application(fine, admin=Admin(SECRET)), ("GET", path), headers=headers)[0].status, nlp.name


@pytest.mark.parametrize("mounted", [False, True])
def test_a_response_that_has_begun_is_not_answered_again(mounted: bool) -> None:  # noqa: FBT001
    """Its connection ends, as for any other error; also if the application is mounted in another one."""

    async def handler(request: Any) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"a part")
        raise Overloaded("full")

    app = application(handler)
    if mounted:
        app, part = application(fine), app
        app.add_subapp("/part", part)

    async def main() -> bytes:
        read = b""
        async with TestClient(TestServer(app)) as client:
            answer = await client.get("/part/" if mounted else "/")
            assert 200 == answer.status
            with contextlib.suppress(ClientPayloadError):
                async for part in answer.content.iter_any():
                    read += part
        return read

    assert b"a part" == asyncio.run(main())


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_a_disconnect_cancels_what_waits(kind: str, model: Gated) -> None:
    """With ``handler_cancellation=True``; calls in threads get CallerGone."""
    f = batched(max_size=1)(model)
    gone = threading.Event()

    def blocking() -> Any:
        try:
            return f(1)
        except CallerGone:
            gone.set()
            raise

    async def handler(request: Any) -> Any:
        return web.Response(text=str(await (f.aio(1) if kind == "coroutine" else asyncio.to_thread(blocking))))

    async def main() -> None:
        await behind(f, model)
        async with TestClient(TestServer(application(handler))) as client:  # it cancels handlers
            asking = asyncio.create_task(client.get("/"))
            await seen(lambda: f.status().waiting == 1)
            asking.cancel()
            await seen(lambda: f.status().waiting == 0)
        if kind == "thread":
            await asyncio.to_thread(gone.wait, 20)

    asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_the_functions_of_the_request_get_that_of_aiohttp(model: Gated) -> None:
    """A caller above its quota gets 429."""
    f = batched(max_size=1, fair_by=Fair(quota=1))(model)
    f.submit("first")
    model.busy()

    async def handler(request: Any) -> Any:
        f.submit("waits")
        f.submit("is too many")
        return web.Response()

    app = application(handler, fair_by=lambda request: request.headers["X-Tenant"], priority=lambda request: 1)
    assert 429 == ask(app, headers={"X-Tenant": "seven"})[0].status


# What can be installed


@pytest.mark.parametrize("app", [None, object(), fine])
def test_anything_but_an_application_is_rejected(app: Any) -> None:
    """The error names what was given."""
    with pytest.raises(InvalidOption, match="must be an aiohttp"):
        frameworks_aiohttp.install(app)


def test_an_invalid_option_changes_nothing() -> None:
    """It is rejected by its name, before the application has a middleware."""
    app = web.Application()
    with pytest.raises(InvalidOption, match=r"Did you mean .deadline."):
        frameworks_aiohttp.install(app, dedline="2s")
    assert [] == list(app.middlewares)


def test_an_application_that_runs_is_rejected() -> None:
    """The library does not allow it to be changed any more."""
    app = web.Application()
    app.freeze()
    with pytest.raises(InvalidOption, match="must not run already"):
        frameworks_aiohttp.install(app)
