"""``frameworks.django``: its middleware around views in threads and coroutines, under WSGI and ASGI."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.frameworks.asgi_by_hand import TIMEOUT, Client, behind, disconnect, piece, scope, seen
from tests.unit.frameworks.refusals import ERRORS, IDS, NAME

from modelguard import Fair, batched, guard
from modelguard.errors import CallerGone, InvalidOption, Overloaded
from modelguard.frameworks.admin import Admin
from modelguard.frameworks.django import ModelGuardMiddleware
from modelguard.serving.deadlines import left

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.serving.gated import Gated

django = pytest.importorskip("django", reason="needs Django")

from django.conf import settings  # noqa: E402 - after the look for Django
from django.core.handlers.asgi import ASGIHandler  # noqa: E402
from django.core.handlers.wsgi import WSGIHandler  # noqa: E402
from django.http import HttpResponse, StreamingHttpResponse  # noqa: E402
from django.test import AsyncClient  # noqa: E402
from django.test import Client as SyncClient  # noqa: E402
from django.test.utils import override_settings  # noqa: E402
from django.urls import path  # noqa: E402

SECRET = "0123456789abcdef"
MIDDLEWARE = ["modelguard.frameworks.django.ModelGuardMiddleware"]

if not settings.configured:
    settings.configure(USE_TZ=True)


class Site:
    """A site of one view, and how to ask it under one kind of server."""

    def __init__(self, server: str) -> None:
        self.server = server

    def ask(self, view: Any, method: str = "get", where: str = "/", options: Any = None, **request: Any) -> Any:
        """Ask the site of this view for its answer."""
        with self.of(view, options or {}):
            if self.server == "wsgi":
                return getattr(SyncClient(raise_request_exception=False), method)(where, **request)
            return asyncio.run(self._ask(method, where, request))

    @staticmethod
    async def _ask(method: str, where: str, request: Any) -> Any:
        return await getattr(AsyncClient(raise_request_exception=False), method)(where, **request)

    @staticmethod
    def of(view: Any, options: Any = None) -> Any:
        """Settings of a site with this view."""
        urls = ModuleType("urls")
        urls.urlpatterns = [path("", view)]  # type: ignore[attr-defined]
        return override_settings(ROOT_URLCONF=urls, MIDDLEWARE=MIDDLEWARE, MODELGUARD=options or {})


@pytest.fixture(params=["wsgi", "asgi"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    return Site(request.param)


def view(work: Any, kind: str) -> Any:
    """A view in a thread or a coroutine that answers what ``work`` returns."""

    def blocking(request: Any) -> Any:
        return HttpResponse(str(work()))

    async def awaiting(request: Any) -> Any:
        result = work()
        return HttpResponse(str(await result if inspect.isawaitable(result) else result))

    return {"sync": blocking, "async": awaiting}[kind]


both_kinds = pytest.mark.parametrize("kind", ["sync", "async"])


def raising(error: Exception) -> Any:
    def work() -> None:
        raise error

    return work


@both_kinds
@pytest.mark.parametrize(("error", "status", "retry"), ERRORS, ids=IDS)
def test_each_error_has_its_answer(site: Site, kind: str, error: Exception, status: Any, retry: float | None) -> None:
    """Django's own answer would be 500, for an expired deadline too; the right one reveals nothing."""
    answer = site.ask(view(raising(error), kind))
    assert (status["status"], "application/problem+json", "no-store") == (
        answer.status_code,
        answer.headers["content-type"],
        answer.headers["cache-control"],
    )
    assert (retry is None) == ("retry-after" not in answer.headers)
    assert {"type", "title", "status", "detail"} == set(json.loads(answer.content))
    assert NAME not in answer.content.decode()


@both_kinds
def test_its_own_errors_stay_its_own(site: Site, kind: str) -> None:
    """Others are 500, and a request without a view is 404."""
    assert 500 == site.ask(view(raising(ValueError("mine")), kind)).status_code
    assert 404 == site.ask(view(list, kind), where="/nowhere").status_code


@both_kinds
def test_a_full_queue_and_a_passed_deadline(site: Site, kind: str, model: Gated) -> None:
    """503 and 504, by the option and by the client's header."""
    f = batched(max_size=1, max_queue=1)(model)
    f.submit("first")
    model.busy()
    counted = view((lambda: f(1)) if kind == "sync" else (lambda: f.aio(1)), kind)
    assert 504 == site.ask(counted, options={"deadline": "0.05s"}).status_code
    assert 504 == site.ask(counted, headers={"Request-Timeout": "0.05"}).status_code
    f.submit("second")
    assert 503 == site.ask(counted).status_code


@both_kinds
def test_the_deadline_and_its_header_reach_a_view(site: Site, kind: str) -> None:
    """A client can only shorten it, and an invalid header is 400."""
    rest = view(left, kind)
    assert 59 < float(site.ask(rest, options={"deadline": "1m"}).content) <= 60
    short = site.ask(rest, options={"deadline": "1m"}, headers={"Request-Timeout": "5"})
    assert 4 < float(short.content) <= 5
    assert 400 == site.ask(rest, headers={"Request-Timeout": "soon"}).status_code


class SyncOnly:
    """A middleware as many sites have one, which knows nothing of coroutines."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        response = self.get_response(request)
        response["x-seen"] = str(response.status_code)
        return response


@both_kinds
def test_other_middleware_may_be_in_between(site: Site, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Middleware without coroutines moves the view to another thread; deadlines and answers are the same."""
    monkeypatch.setitem(sys.modules, "sync_only", SimpleNamespace(SyncOnly=SyncOnly))  # type: ignore[arg-type]
    monkeypatch.setattr(sys.modules[__name__], "MIDDLEWARE", [*MIDDLEWARE, "sync_only.SyncOnly"])
    assert 59 < float(site.ask(view(left, kind), options={"deadline": "1m"}).content) <= 60
    refused = site.ask(view(raising(Overloaded("full")), kind))
    assert (503, "503") == (refused.status_code, refused.headers["x-seen"])


def test_probes(site: Site, nobody: None) -> None:
    """They are answered before the site, which gets what is not a probe."""
    nlp = guard(dict, reload_on=None)
    asked = [site.ask(view(list, "sync"), where=where).status_code for where in ("/livez", "/readyz")]
    assert [200, 503] == asked
    nlp.load()
    assert 200 == site.ask(view(list, "sync"), where="/readyz").status_code
    assert (200, b"") == ((head := site.ask(view(list, "sync"), "head", "/livez")).status_code, head.content)
    assert 404 == site.ask(view(list, "sync"), "post", "/livez").status_code


def test_the_admin_route(site: Site, nobody: None) -> None:
    """With its secret, and without it 401."""
    nlp = guard(dict, reload_on=None, name="nlp")
    nlp.load()
    options = {"admin": Admin(SECRET, path="/ops")}
    assert 401 == site.ask(view(list, "sync"), where="/ops/status", options=options).status_code
    headers = {"Authorization": f"Bearer {SECRET}"}
    reloaded = site.ask(view(list, "sync"), "post", "/ops/reload?name=nlp", options, headers=headers)
    assert (200, 2) == (reloaded.status_code, nlp.status().generation)


def test_callers_share_by_a_header_or_a_function_of_the_request(site: Site, model: Gated) -> None:
    """A caller above its quota gets 429, and the others go on."""
    f = batched(max_size=1, fair_by=Fair(quota=1))(model)
    f.submit("first")
    model.busy()
    for fair_by in ("X-Tenant", lambda request: request.headers.get("X-Tenant")):
        waiting = f.submit("second", timeout=60)
        waiting.cancel()

        def work() -> str:
            f.submit("waits")
            f.submit("is too many")
            return "both wait"

        refused = site.ask(view(work, "sync"), options={"fair_by": fair_by}, headers={"X-Tenant": str(fair_by)[:9]})
        assert 429 == refused.status_code


def test_it_shows_the_error_in_development(site: Site) -> None:
    """With ``detail``."""
    answer = site.ask(view(raising(Overloaded("full of texts")), "sync"), options={"detail": True})
    assert "full of texts" == json.loads(answer.content)["detail"]


@both_kinds
def test_a_disconnect_cancels_what_waits(kind: str, model: Gated) -> None:
    """Under ASGI: the view is cancelled, and one in a thread gets CallerGone; its item is not computed."""
    f = batched(max_size=1)(model)
    seen: list[type[BaseException]] = []

    def blocking() -> Any:
        try:
            return f(1)
        except CallerGone as error:
            seen.append(type(error))
            raise

    async def main() -> None:
        await behind(f, model)
        await disconnect(ASGIHandler(), Client(piece()), f)

    with Site.of(view(blocking if kind == "sync" else (lambda: f.aio(1)), kind)):
        asyncio.run(main())
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches
    assert ([CallerGone] if kind == "sync" else []) == seen


def test_an_async_view_sends_a_stream_part_by_part() -> None:
    """Under ASGI: a part is sent before the next one is computed, and a client that leaves ends the stream."""
    goes_on, over = threading.Event(), threading.Event()

    @batched(max_size=1)
    def spell(texts: list[str]) -> Iterator[list[str]]:
        try:
            for letter in texts[0]:
                yield [letter]
                goes_on.wait(TIMEOUT)
        finally:
            over.set()

    async def streaming(request: Any) -> Any:
        return StreamingHttpResponse(spell.stream("ab"))

    async def main() -> None:
        client = Client(piece())
        serving = asyncio.create_task(ASGIHandler()(scope(), client.receive, client.send))
        try:
            await seen(lambda: len(client.sent) > 1)
            client.disconnect()
            await asyncio.wait_for(serving, TIMEOUT)
        finally:
            goes_on.set()
        assert (b"a", True) == (client.body, await asyncio.to_thread(over.wait, TIMEOUT))

    with Site.of(streaming), spell:
        asyncio.run(main())


@pytest.mark.parametrize("handler", [WSGIHandler, ASGIHandler])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dedline": "2s"}, "Did you mean .deadline."),
        ({"deadline": "2"}, "has no unit"),
        (["2s"], r"MODELGUARD=\['2s'\]: must be a dict of options"),
        ({1: 2}, "must be a dict of options"),
    ],
)
def test_an_invalid_option_stops_the_start(handler: Any, options: Any, message: str) -> None:
    """The server's import of the application fails, with the option and the fix."""
    with (
        override_settings(MIDDLEWARE=MIDDLEWARE, MODELGUARD=options),
        pytest.raises(InvalidOption, match=message),
    ):
        handler()


def test_without_options_it_has_the_defaults(nobody: None) -> None:
    """The setting may be left out."""
    with override_settings(MIDDLEWARE=MIDDLEWARE):
        assert ModelGuardMiddleware(lambda request: None).sync_capable
