"""The recipes of docs/recipes.md against real servers, under load: new models, bad ones, outages, and no call lost."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Clients, Server, wait_until
from tests.process.source_servers import KINDS, WEIGHTS, Proxy, Source, proxied, root

FIRST, SECOND, BAD, FOURTH, FIFTH = WEIGHTS

#: Polls that a test waits for to see that nothing happens.
POLLS = 8
#: A value that changes at each poll may be the same twice by chance, and each such load makes the next one rarer.
LOADS_WHILE_IT_FLAPS = 8


class Service(Server):
    """A web server whose model comes from a source."""

    def __init__(self, folder: Path, kind: str, source: Source, url: str) -> None:
        environment = {
            **source.environment,
            "SOURCE": kind,
            "URL": url,
            "MLFLOW_TRACKING_URI": url,
            "PYTHONPATH": root(),
        }
        command = ("-m", "uvicorn", "tests.process.source_service:app", "--http", "h11", "--port", "0")
        super().__init__(folder, *command, environment=environment)
        self.wait_until_serving()

    def now(self, name: str) -> Any:
        """One of its figures; 0 if there is none yet."""
        return self.ask("/status").json.get(name, 0)

    def waits_for(self, what: str, condition: Callable[[], object]) -> None:
        self.wait_until(condition, what, 120)

    def says(self, weights: str) -> None:
        self.waits_for(f"the model {weights}", lambda: weights == self.ask("/").text.split()[1])

    def answers(self, clients: Clients, weights: str) -> None:
        """Wait until the model has answered one of the clients."""
        self.waits_for(f"an answer of {weights}", lambda: clients.versions[weights])

    def polls(self, count: int = POLLS) -> None:
        """Wait until the source was asked so many times."""
        begun = self.now("begun")
        self.waits_for(f"{count} polls", lambda: self.now("begun") >= begun + count)


@contextlib.contextmanager
def wrk(url: str, printed: Path) -> Iterator[None]:
    """Load by wrk besides, where it is installed; it may see no answer but 200, and no broken connection."""
    if shutil.which("wrk") is None:
        yield
        return
    with printed.open("w") as file:
        running = subprocess.Popen(["wrk", "-t1", "-c4", "-d600s", "--timeout", "60s", url], stdout=file)
        try:
            yield
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(60)
    text = printed.read_text()
    sys.stdout.write(text)
    assert re.search(r"[1-9]\d* requests in", text)
    assert "Non-2xx" not in text
    assert "Socket errors" not in text


@contextlib.contextmanager
def source_of(kind: str, folder: Path) -> Iterator[Source]:
    """The source, with its first version published."""
    source = KINDS[kind](folder)
    try:
        source.publish(FIRST)
        yield source
    finally:
        source.close()


def changes_and_goes_back(service: Service, source: Source, clients: Clients) -> None:
    """Versions come, a bad one is rejected, and a good one is undone."""
    service.answers(clients, FIRST)
    source.publish(SECOND)
    service.answers(clients, SECOND)
    source.publish(BAD)
    service.waits_for("the canary", lambda: service.now("rejected") >= 1)
    source.publish(FOURTH)
    service.answers(clients, FOURTH)
    assert SECOND == service.ask("/rollback", method="POST").text.split()[1]
    service.polls()
    assert service.now("pinned")
    service.says(SECOND)


def survives_an_outage(service: Service, proxy: Proxy) -> None:
    """A source that hangs, and then fails, changes nothing, and is reported once."""
    generation = service.now("generation")
    for mode, about in (("hang", "TimeoutError"), ("refuse", "")):
        reported = len(service.now("errors"))
        proxy.mode = mode  # type: ignore[assignment] # one of its modes
        service.waits_for(f"the report of {mode}", lambda before=reported: len(service.now("errors")) > before)
        assert about in service.now("errors")[-1]
        service.polls(3)
        proxy.mode = "pass"
        answered = service.now("ended")
        service.waits_for("good answers", lambda before=answered: service.now("ended") >= before + 12)
    assert generation == service.now("generation")


def flaps(service: Service, source: Source) -> None:
    """A source whose value changes all the time causes few loads."""
    generation, begun = service.now("generation"), service.now("begun")
    while service.now("begun") < begun + 2 * POLLS:
        source.publish(FOURTH)
        time.sleep(0.05)
        source.publish(FIFTH)
        time.sleep(0.05)
    assert service.now("generation") - generation <= LOADS_WHILE_IT_FLAPS


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", KINDS)
def test_a_service_follows_its_source_and_loses_no_call(kind: str, tmp_path: Path) -> None:
    """New models, a canary, a rollback, a source that hangs, fails and flaps: every call under load is answered."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(source_of(kind, tmp_path))
        proxy, url = stack.enter_context(proxied(source.url)) if source.url else (None, "")
        service = stack.enter_context(Service(tmp_path, kind, source, url))
        service.says(FIRST)
        with Clients(service) as clients, wrk(service.url, tmp_path / "wrk"):
            changes_and_goes_back(service, source, clients)
            if proxy is not None:
                survives_an_outage(service, proxy)
            flaps(service, source)
            source.publish(FIFTH)
            service.says(FIFTH)
            service.answers(clients, FIFTH)
        sys.stdout.write(f"{kind}: {clients}, {dict(clients.versions)}\n{service.ask('/status').text}\n")
        assert [] == clients.failures
        assert clients.sent == clients.answered > 0
        assert {FIRST, SECOND, FOURTH, FIFTH} == set(clients.versions)
        wait_until(lambda: 0 == service.now("in_flight"), "the last call to end")
