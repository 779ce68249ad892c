"""The admin route of both middlewares: who gets in, what it answers, and what it never shows."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.frameworks.asgi_by_hand import Client, fine, scope, serve

from modelguard import ModelGuard, guard
from modelguard.errors import InvalidOption
from modelguard.frameworks import asgi, wsgi
from modelguard.frameworks.admin import Admin
from modelguard.isolation import status
from modelguard.lifecycle import guard as guard_module

SECRET = "correct-horse-battery-staple"
BEARER = f"Bearer {SECRET}"


@dataclass(frozen=True)
class Got:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def over_asgi(method: str, path: str, query: str, authorization: str | None) -> Got:
    """One request to the ASGI middleware; its body is never asked for."""
    headers = {} if authorization is None else {b"authorization": authorization.encode("latin-1")}

    async def main() -> Client:
        app = asgi.ModelGuardMiddleware(fine, admin=Admin(SECRET))
        return await serve(app, Client(), method=method, path=path, query_string=query.encode(), headers=headers)

    client = asyncio.run(main())
    assert [] == client.received or client.body == b"fine"
    return Got(client.status, client.headers, client.body)


class Unread:
    """The body of a request that nobody must read."""

    def read(self, *_: object) -> bytes:
        raise AssertionError("the body is read")

    readline = readlines = __iter__ = read


def over_wsgi(method: str, path: str, query: str, authorization: str | None) -> Got:
    """One request to the WSGI middleware, with a body of a terabyte."""
    started: list[Any] = []

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        start_response("200 OK", [])
        return [b"fine"]

    environ: dict[str, Any] = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    environ |= {"wsgi.input": Unread(), "CONTENT_LENGTH": str(10**12)}
    environ |= {} if authorization is None else {"HTTP_AUTHORIZATION": authorization}
    body = b"".join(wsgi.ModelGuardMiddleware(app, admin=Admin(SECRET))(environ, lambda *args: started.append(args)))
    (line, headers) = started[0]
    return Got(int(line.split()[0]), dict(headers), body)


Ask = Callable[[str, str, str, str | None], Got]


@pytest.fixture(params=[over_asgi, over_wsgi], ids=["asgi", "wsgi"])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def nlp(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelGuard[Any]]:
    """The only guard of this process that has a model, without isolated functions."""
    monkeypatch.setattr(guard_module.guards, "_references", set())
    monkeypatch.setattr(status, "functions", weakref.WeakSet())
    monkeypatch.setattr("modelguard.lifecycle.pool.pools._references", set())
    with guard(dict, reload_on=None, name="nlp") as made:
        yield made


class TestCommands:
    def test_status(self, ask: Ask, nlp: ModelGuard[Any]) -> None:
        """Each guard's figures, and the worker that answers; no cache keeps it."""
        got = ask("GET", "/modelguard/status", "", BEARER)
        assert (200, "application/json", "no-store") == (
            got.status,
            got.headers["content-type"],
            got.headers["cache-control"],
        )
        (one,) = got.json["guards"]
        assert ("nlp", None, "ready", 1) == (
            one["name"],
            one["error"],
            one["status"]["state"],
            one["status"]["generation"],
        )

    @pytest.mark.parametrize(
        ("command", "expected"),
        [("reload", ("ready", 2, False)), ("unload", ("idle", 0, False)), ("pause", ("ready", 1, True))],
    )
    def test_post(self, ask: Ask, nlp: ModelGuard[Any], command: str, expected: tuple[str, int, bool]) -> None:
        """When the answer comes, it is done."""
        got = ask("POST", f"/modelguard/{command}", "name=nlp", BEARER)
        status = nlp.status()
        assert (200, expected) == (got.status, (status.state, status.generation, status.paused))

    def test_resume(self, ask: Ask, nlp: ModelGuard[Any]) -> None:
        """As ``resume()``."""
        nlp.pause()
        assert 200 == ask("POST", "/modelguard/resume", "", BEARER).status
        assert not nlp.status().paused

    def test_without_waiting(self, ask: Ask, nlp: ModelGuard[Any]) -> None:
        """``wait=false`` starts the reload, and answers at once."""
        assert 200 == ask("POST", "/modelguard/reload", "wait=false&name=nlp", BEARER).status
        nlp.reload()
        assert nlp.status().generation >= 2

    @pytest.mark.parametrize("query", ["name=asr", "name=", "name=%00", "name=" + "x" * 1000])
    def test_an_unknown_name(self, ask: Ask, nlp: ModelGuard[Any], query: str) -> None:
        """404, with the names of those that there are, and nothing is done."""
        got = ask("POST", "/modelguard/reload", query, BEARER)
        assert (404, True, 1) == (got.status, "'nlp'" in got.json["detail"], nlp.status().generation)

    def test_what_cannot_be_done(self, ask: Ask, nlp: ModelGuard[Any]) -> None:
        """409, with the guard's own error."""
        nlp.close()
        got = ask("POST", "/modelguard/reload", "name=nlp", BEARER)
        assert (409, True) == (got.status, "closed" in got.json["guards"][0]["error"])

    @pytest.mark.parametrize("path", ["/modelguard", "/modelguard/", "/modelguard/restart", "/modelguard/reload/nlp"])
    def test_an_unknown_command(self, ask: Ask, nlp: ModelGuard[Any], path: str) -> None:
        """404, with the commands."""
        got = ask("POST", path, "", BEARER)
        assert (404, True) == (got.status, "pause" in got.json["detail"])

    @pytest.mark.parametrize(
        ("method", "command", "allowed"),
        [
            ("GET", "reload", "POST"),
            ("PUT", "pause", "POST"),
            ("POST", "status", "GET, HEAD"),
            ("OPTIONS", "unload", "POST"),
        ],
    )
    def test_a_wrong_method(self, ask: Ask, nlp: ModelGuard[Any], method: str, command: str, allowed: str) -> None:
        """405: a link that is followed, or a crawler, changes nothing."""
        got = ask(method, f"/modelguard/{command}", "", BEARER)
        assert (405, allowed, 1) == (got.status, got.headers["allow"], nlp.status().generation)

    @pytest.mark.parametrize("query", ["wait=no", "nmae=nlp", "name=a&name=b", "a=1&b=2&c=3", "name=" + "x" * 5000])
    def test_a_bad_query(self, ask: Ask, nlp: ModelGuard[Any], query: str) -> None:
        """400: a misspelt name must not reload everything."""
        assert 400 == ask("POST", "/modelguard/reload", query, BEARER).status
        assert 1 == nlp.status().generation


class TestSecret:
    @pytest.mark.parametrize(
        "authorization",
        [
            None,
            "",
            "Bearer",
            "Bearer ",
            f"Basic {SECRET}",
            SECRET,
            f"Bearer {SECRET}x",
            f"Bearer {SECRET[:-1]}",
            f"Bearer {SECRET.upper()}",
            "Bearer " + "x" * 100_000,
            "Bearer \xff\xfe",
        ],
        ids=range(11),
    )
    @pytest.mark.parametrize("path", ["/modelguard/status", "/modelguard/reload", "/modelguard/none", "/modelguard"])
    def test_without_it_nobody_gets_in(
        self, ask: Ask, nlp: ModelGuard[Any], authorization: str | None, path: str
    ) -> None:
        """401 for every path below, so that nothing is learned; nothing is done."""
        got = ask("POST", path, "", authorization)
        assert (401, "Bearer", 1) == (got.status, got.headers["www-authenticate"], nlp.status().generation)
        assert b"nlp" not in got.body

    def test_it_is_never_shown(self, ask: Ask, nlp: ModelGuard[Any], caplog: pytest.LogCaptureFixture) -> None:
        """In no log, answer, message or ``repr``, neither the right one nor one that was tried."""
        caplog.set_level(logging.DEBUG)
        tried = "tried-and-wrong-secret"
        bodies = [ask("POST", "/modelguard/reload", "", f"Bearer {one}").body for one in (SECRET, tried)]
        shown = caplog.text + repr(Admin(SECRET)) + "".join(map(bytes.decode, bodies))
        assert "had a wrong secret" in shown
        assert (False, False) == (SECRET in shown, tried in shown)
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(Admin(SECRET))

    @pytest.mark.parametrize(
        "secret", [None, "", "short", "x" * 15, b"x" * 32, 5, "with spaces in it .....", "ünicode-ünicode-ü"]
    )
    def test_a_bad_one_stops_the_start(self, secret: Any) -> None:
        """Where the application is made; the message does not show it."""
        with pytest.raises(InvalidOption, match=r"^secret=\.\.\.: ") as caught:
            Admin(secret)
        assert not secret or str(secret) not in str(caught.value)

    @pytest.mark.parametrize("middleware", [asgi.ModelGuardMiddleware, wsgi.ModelGuardMiddleware], ids=["asgi", "wsgi"])
    def test_the_secret_instead_of_the_route(self, middleware: Any) -> None:
        """``admin=`` takes an ``Admin``; the message does not show what was given."""
        with pytest.raises(InvalidOption, match=r"^admin=\.\.\.: must be an Admin"):
            middleware(fine, admin=SECRET)

    @pytest.mark.parametrize("path", ["", "/", "admin", None])
    def test_a_bad_path(self, path: Any) -> None:
        """It must be a path of its own."""
        with pytest.raises(InvalidOption, match="path="):
            Admin(SECRET, path=path)


@pytest.mark.parametrize("path", ["/", "/modelguardian", "/modelguard2/status", "/other/modelguard/status"])
def test_other_paths_are_the_applications(ask: Ask, path: str) -> None:
    """Also those that begin alike."""
    assert b"fine" == ask("GET", path, "", None).body


def test_off_by_default() -> None:
    """Without ``admin=`` the path is the application's."""

    async def main() -> Client:
        headers = {b"authorization": BEARER.encode()}
        return await serve(asgi.ModelGuardMiddleware(fine), Client(), path="/modelguard/status", headers=headers)

    assert b"fine" == asyncio.run(main()).body


def test_the_event_loop_goes_on(nlp: ModelGuard[Any]) -> None:
    """While a request waits for a reload, others are served."""

    async def main() -> tuple[int, bytes]:
        app = asgi.ModelGuardMiddleware(fine, admin=Admin(SECRET))
        with nlp.lease():
            slow, quick = Client(), Client()
            headers = {b"authorization": BEARER.encode()}
            unload = asyncio.ensure_future(
                app(scope(method="POST", path="/modelguard/unload", headers=headers), slow.receive, slow.send)
            )
            await app(scope(), quick.receive, quick.send)
            assert not unload.done()
        await unload
        return slow.status, quick.body

    assert (200, b"fine") == asyncio.run(main())


def test_on_trio(nlp: ModelGuard[Any]) -> None:
    """Servers that run on Trio get their answer too."""
    trio = pytest.importorskip("trio")
    client = Client()

    async def send(message: Any) -> None:
        client.sent.append(message)

    async def main() -> None:
        app = asgi.ModelGuardMiddleware(fine, admin=Admin(SECRET))
        headers = {b"authorization": BEARER.encode()}
        await app(scope(method="POST", path="/modelguard/pause", headers=headers), client.receive, send)

    trio.run(main)
    assert (200, True) == (client.status, nlp.status().paused)
