"""``frameworks.asgi``: invalid options."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.testclient import TestClient
from tests.unit.frameworks.asgi_by_hand import Client, fine

from modelguard import guard
from modelguard.errors import InvalidOption
from modelguard.frameworks import wsgi
from modelguard.frameworks.asgi import ModelGuardMiddleware


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("deadline", value) for value in (0, -1, "soon", "2", float("nan"), float("inf"), True, object())),
        *(("livez", value) for value in ("", "livez", 3, b"/livez")),
        *(("readyz", value) for value in ("", "readyz", 3)),
        *(("timeout_header", value) for value in ("", "a b", "a:b", "Ø", "a\r\nb", 3, b"a")),
        *(("guards", value) for value in ([1], [None], 5, "ab")),
        ("detail", "yes"),
        *(("fair_by", value) for value in ("", "a b", "a\r\nb", 3, b"X-Tenant", ["X-Tenant"])),
        *(("priority", value) for value in ("X-Priority", 1)),
    ],
)
def test_an_invalid_option_is_rejected_by_name(option: str, value: Any) -> None:
    """When the application is made, not at the first request."""
    with pytest.raises(InvalidOption, match=option):
        ModelGuardMiddleware(fine, **{option: value})


def test_a_guard_in_place_of_a_list_of_guards_is_rejected_by_name() -> None:
    """The error names the option."""
    with pytest.raises(InvalidOption, match="guards"):
        ModelGuardMiddleware(fine, guards=guard(dict, reload_on=None))


MIDDLEWARES: list[Any] = [ModelGuardMiddleware, wsgi.ModelGuardMiddleware]


@pytest.mark.parametrize("middleware", MIDDLEWARES, ids=["asgi", "wsgi"])
def test_an_unknown_option_is_rejected_by_name(middleware: Any) -> None:
    """The error of a misspelt option names it, its value, the option that was meant, and all others."""
    with pytest.raises(
        InvalidOption, match=r"dedline='2s': is not an option.* Did you mean 'deadline'\? Its options are d"
    ):
        middleware(fine, dedline="2s")
    with pytest.raises(
        InvalidOption, match=r"timeout='2s': is not an option of ModelGuardMiddleware\. Its options are d"
    ):
        middleware(fine, timeout="2s")
    with pytest.raises(InvalidOption, match="ModelGuardMiddleware='2s': takes its options by keyword only"):
        middleware(fine, "2s")


LAZY: dict[str, Callable[[dict[str, Any]], Any]] = {
    "Starlette": lambda options: Starlette(middleware=[Middleware(ModelGuardMiddleware, **options)]),
    "FastAPI": lambda options: FastAPI(middleware=[Middleware(ModelGuardMiddleware, **options)]),
    "below another": lambda options: Starlette(
        middleware=[Middleware(GZipMiddleware), Middleware(ModelGuardMiddleware, **options)]
    ),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("options", [{"dedline": "2s"}, {"deadline": "2"}, {"detail": 1}], ids=repr)
def test_an_invalid_option_stops_the_start_of_starlette(kind: str, options: dict[str, Any]) -> None:
    """It makes its middleware at the first connection, and servers take an error there for a lack of lifespan."""
    client = Client({"type": "lifespan.startup"})
    app = LAZY[kind](options)
    with pytest.raises(InvalidOption):
        asyncio.run(app({"type": "lifespan"}, client.receive, client.send))
    (failed,) = client.sent
    assert "lifespan.startup.failed" == failed["type"]
    (name,) = options
    assert f"modelguard: {name}=" in failed["message"]


@pytest.mark.parametrize("kind", LAZY)
def test_test_clients_raise_an_invalid_option(kind: str) -> None:
    """With lifespan when the client starts, without it at the first request: a test of the service sees it."""
    with pytest.raises(InvalidOption, match="dedline"), TestClient(LAZY[kind]({"dedline": "2s"})):
        pass
    with pytest.raises(InvalidOption, match="dedline"):
        TestClient(LAZY[kind]({"dedline": "2s"})).get("/")


def test_litestar_rejects_an_invalid_option_when_the_application_is_made() -> None:
    """It makes its middleware at once."""
    litestar = pytest.importorskip("litestar")
    from litestar.middleware import DefineMiddleware

    @litestar.get("/", sync_to_thread=False)  # type: ignore[misc]
    def route() -> str:
        return "fine"

    with pytest.raises(InvalidOption, match="dedline"):
        litestar.Litestar([route], middleware=[DefineMiddleware(ModelGuardMiddleware, dedline="2s")])
