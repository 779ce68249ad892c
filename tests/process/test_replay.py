"""A canary in a service under load: new models come from an HTTP server, and none that is bad answers a call."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.request import Request, urlopen

import pytest

from modelguard import Backoff, Changed, Loaded, Loading, ModelGuard, Replay, Swap, batched, guard, telemetry

pytestmark = pytest.mark.timeout(300)

#: Seconds. Bounds every wait for another thread.
TIMEOUT = 120.0


class Model:
    """Answers in upper case, unless its weights say otherwise, and takes its time."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self._weights = weights
        self.unloaded = False

    def __call__(self, text: str) -> str:
        assert not self.unloaded, "a call saw an unloaded model"
        time.sleep(self._weights.get("seconds", 0.001))
        return text.upper() if self._weights.get("upper", True) else text

    def unload(self) -> None:
        self.unloaded = True


class Registry(BaseHTTPRequestHandler):
    """Serves the weights, and their version as the ETag."""

    weights: dict[str, Any] = {"version": "1"}  # noqa: RUF012 - replaced as a whole

    def do_GET(self) -> None:
        """Answer with the weights."""
        content = json.dumps(self.weights).encode()
        self.send_response(200)
        self.send_header("ETag", self.weights["version"])
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 - as the server calls it

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    """A registry on this machine."""
    Registry.weights = {"version": "1"}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def events() -> Iterator[list[telemetry.Event]]:
    """What has happened to the canary. Functions of other tests may still end in this process."""
    seen: list[telemetry.Event] = []
    remove = telemetry.add_hook(lambda event: seen.append(event) if event.guard == "canary" else None)
    yield seen
    remove()


class Traffic:
    """Callers in several threads, until the end of the block."""

    def __init__(self, call: Callable[[str], str], threads: int) -> None:
        self._call = call
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]
        self.good = 0
        self.bad: list[object] = []

    def _run(self) -> None:
        at = 0
        while not self._over.is_set():
            try:
                answer = self._call(f"text {at}")
            except BaseException as error:  # noqa: BLE001 - none may be lost, for whatever reason
                self.bad.append(error)
                return
            if answer != f"TEXT {at}":
                self.bad.append(answer)
            self.good += 1
            at += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(TIMEOUT)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


def replays(events: list[telemetry.Event], *, accepted: bool, version: str) -> list[telemetry.ReplayFinished]:
    return [
        event
        for event in list(events)
        if isinstance(event, telemetry.ReplayFinished) and (event.version, event.accepted) == (version, accepted)
    ]


def service(url: str) -> ModelGuard[Model]:
    """A guard that follows the registry. The bound on the time is wide: these tests may run beside others."""

    def etag() -> str | None:
        with urlopen(Request(url, method="HEAD"), timeout=20) as answer:
            found: str | None = answer.headers["ETag"]
            return found

    def load() -> Loaded[Model]:
        with urlopen(url, timeout=20) as answer:
            weights = json.loads(answer.read())
            return Loaded(Model(weights), version=weights["version"])

    return guard(
        load,
        reload_on=Changed(etag, every="100ms", timeout="20s"),
        swap=Swap(replay=Replay(30, max_slowdown=20, timeout="1m"), keep_previous=True, defer=0),
        loading=Loading(backoff=Backoff("50ms", "200ms")),
        unload=Model.unload,
        name="canary",
    )


@pytest.mark.parametrize(("threads", "batches"), [(4, False), (8, True)])
def test_changed_canaried_refused_rolled_back(
    url: str, events: list[telemetry.Event], threads: int, *, batches: bool
) -> None:
    """Versions that answer otherwise or slowly are refused, a rollback undoes the last one, and no call is lost."""
    nlp = service(url)

    @nlp
    def alone(model: Model, text: str) -> str:
        return model(text)

    @batched(max_size=8)
    @nlp
    def in_batches(model: Model, texts: list[str]) -> list[str]:
        return [model(text) for text in texts]

    with nlp, Traffic(in_batches if batches else alone, threads) as traffic:
        until(lambda: traffic.good > 100)

        Registry.weights = {"version": "2"}
        until(lambda: nlp.version == "2")
        assert replays(events, accepted=True, version="2")

        Registry.weights = {"version": "3", "upper": False}
        until(lambda: replays(events, accepted=False, version="3"))
        refused = replays(events, accepted=False, version="3")[0]
        assert (30, 30, 0) == (refused.recorded, refused.compared, refused.agreed)
        assert "2" == nlp.version

        Registry.weights = {"version": "4", "seconds": 0.2 if not batches else 0.05}
        until(lambda: any(event.compared >= 10 for event in replays(events, accepted=False, version="4")))
        assert all(event.agreed == event.compared for event in replays(events, accepted=False, version="4"))
        assert "2" == nlp.version

        Registry.weights = {"version": "5"}
        until(lambda: nlp.version == "5")
        nlp.rollback()
        assert "2" == nlp.version
        made = traffic.good
        until(lambda: traffic.good > made + 100)
    assert [] == traffic.bad
    assert {"1", "2", "5"} == {event.version for event in events if isinstance(event, telemetry.LoadFinished)}
    assert {"LoadErrored"} == {type(event).__name__ for event in events if "Errored" in type(event).__name__}


def test_a_child_compares_the_calls_of_its_parent_and_its_own(url: str) -> None:
    """A fork beside calls that are being recorded leaves a guard that records, compares and rejects."""
    nlp = service(url)

    @nlp
    def alone(model: Model, text: str) -> str:
        return model(text)

    with nlp, Traffic(alone, 4) as traffic:
        until(lambda: traffic.good > 100)
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                os._exit(_compare_in_child(nlp, alone))
            assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert [] == traffic.bad


def _compare_in_child(nlp: ModelGuard[Model], call: Callable[[str], str]) -> int:
    seen: list[telemetry.Event] = []
    telemetry.set_hooks([seen.append])
    try:
        assert "A" == call("a")
        nlp.reload()
        event = next(event for event in seen if isinstance(event, telemetry.ReplayFinished))
    except BaseException as error:  # noqa: BLE001 - the parent sees the status
        os.write(2, f"{error!r} {seen}\n".encode())
        return 2
    return 0 if event.accepted and event.compared == event.recorded == 30 else 1
