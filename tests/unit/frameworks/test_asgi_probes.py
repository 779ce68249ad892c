"""``frameworks.asgi``: the probes for whether a process is alive and ready."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from tests.unit.frameworks.asgi_by_hand import TIMEOUT, Client, ask, fine, never, serve
from tests.unit.frameworks.refusals import NAME
from tests.unit.serving.gated import Gated, until

from modelguard import batched, guard
from modelguard.errors import QueueFull
from modelguard.frameworks.asgi import ModelGuardMiddleware


def test_a_process_that_answers_is_alive(nobody: None) -> None:
    """Whatever its models do; and the answer is not cached."""
    nlp = guard(dict, reload_on=None, name=NAME)
    answer = ask(never, path="/livez")
    assert (200, {"status": "alive"}) == (answer.status, json.loads(answer.body))
    assert ("application/json", "no-store") == (answer.headers["content-type"], answer.headers["cache-control"])
    assert not nlp.ready


def test_a_service_is_ready_when_its_models_are(nobody: None) -> None:
    """Every guard has a model, and no batched function is being closed; what is missing is named."""
    nlp = guard(dict, reload_on=None, name=NAME)
    f = batched(max_size=1, name="f")(lambda items: items)
    assert 503 == ask(never, path="/readyz").status
    told = json.loads(ask(never, path="/readyz").body)
    assert {"status": "not ready", "waiting_for": [NAME]} == told
    nlp.load()
    assert 200 == ask(never, path="/readyz").status
    assert {"status": "ready"} == json.loads(ask(never, path="/readyz").body)
    f.close()
    assert 200 == ask(never, path="/readyz").status, "what was closed for good does not count"
    told = json.loads(ask(never, path="/readyz", options={"guards": [f]}).body)
    assert ["f"] == told["waiting_for"]


def test_a_batched_function_that_is_being_closed_is_not_ready(nobody: None, model: Gated) -> None:
    """From the start of closing: what waits is computed, and no new requests should come."""
    f = batched(max_size=1)(model)
    f.submit(1)
    model.busy()
    assert 200 == ask(never, path="/readyz").status
    closing = threading.Thread(target=f.close)
    closing.start()
    until(lambda: not f.ready)
    assert 503 == ask(never, path="/readyz").status
    model.gate.set()
    closing.join(TIMEOUT)


def test_the_readiness_probe_can_be_limited(nobody: None) -> None:
    """It asks the guards that it was given, even by a generator; with none it is ready."""
    nlp, f, cold = guard(dict, reload_on=None), batched(max_size=1)(lambda items: items), guard(dict, reload_on=None)
    nlp.load()
    app = ModelGuardMiddleware(never, guards=(one for one in (nlp, f)))
    for _ in range(2):
        assert 200 == asyncio.run(serve(app, Client(), path="/readyz")).status
    assert 200 == ask(never, path="/readyz", options={"guards": []}).status
    assert 503 == ask(never, path="/readyz", options={"guards": [nlp, cold]}).status


@pytest.mark.parametrize("path", ["/livez", "/readyz"])
def test_a_probe_by_head_has_no_body(nobody: None, path: str) -> None:
    """Its headers are those of the answer to a GET."""
    head, get = ask(never, path=path, method="HEAD"), ask(never, path=path)
    assert (b"", 200, get.headers) == (head.body, head.status, head.headers)


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        ({"path": "/livez", "method": "POST"}, {}),
        ({"path": "/readyz", "method": "DELETE"}, {}),
        ({"path": "/livez/"}, {}),
        ({"path": "/livez"}, {"livez": None}),
        ({"path": "/readyz"}, {"readyz": None}),
        ({"path": "/livez"}, {"livez": "/health"}),
    ],
)
def test_other_requests_reach_the_application(request_: dict[str, Any], options: dict[str, Any]) -> None:
    """Other methods, other paths, and probes that are turned off or have another path."""
    assert b"fine" == ask(fine, options=options, **request_).body


def test_a_probe_can_have_another_path(nobody: None) -> None:
    """The one that the option gives."""
    assert 200 == ask(never, path="/health", options={"livez": "/health", "readyz": "/up"}).status
    assert 200 == ask(never, path="/up", options={"livez": "/health", "readyz": "/up"}).status


def test_a_probe_ignores_the_timeout_header(nobody: None) -> None:
    """An invalid header does not make a probe fail."""
    assert 200 == ask(never, path="/livez", headers={b"request-timeout": b"soon"}).status


def test_a_probe_is_found_behind_a_prefix(nobody: None) -> None:
    """With ``uvicorn --root-path /api`` a path begins with the prefix that a proxy has cut off."""
    assert 200 == ask(never, path="/api/livez", root_path="/api").status
    assert 200 == ask(never, path="/livez", root_path="/api").status


def test_without_asyncio_everything_but_disconnects_works() -> None:
    """Hypercorn can run applications on Trio, where no asyncio loop can be asked to watch the client."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert "http.request" == (await receive())["type"]
        raise QueueFull("f", queued=1, retry_after=1)

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    steps = ModelGuardMiddleware(app)(scope, receive, send)
    with pytest.raises(StopIteration):
        steps.send(None)  # as any loop runs a coroutine
    assert 503 == sent[0]["status"]
