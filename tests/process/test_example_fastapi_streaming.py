"""The example streams over HTTP, under uvicorn: batches are shared, and a client that leaves harms nobody."""

from __future__ import annotations

import http.client
import importlib.util
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Server

NEEDED = ("fastapi", "uvicorn")
EXAMPLE = Path(__file__).parents[2] / "examples" / "fastapi_streaming"
MOST = 30

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED), reason=f"needs {', '.join(NEEDED)}"
    ),
]


@pytest.fixture
def server() -> Iterator[Server]:
    command = ("-m", "uvicorn", "app:app", "--port", "0", "--no-access-log")
    with Server(EXAMPLE, *command, environment={"STEP": "0.04", "MOST": str(MOST)}) as started:
        started.wait_until(lambda: started.port and started.ask("/livez").status == 200, "it serves")
        yield started


class Client:
    """One client of a stream, which reads event after event."""

    def __init__(self, server: Server, prompt: str, header: str = "X-Client: test") -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port or 0), timeout=30)
        self.socket.sendall(f"GET /generate?prompt={prompt} HTTP/1.1\r\nHost: here\r\n{header}\r\n\r\n".encode())
        self.response: http.client.HTTPResponse | None = None

    def begin(self) -> http.client.HTTPResponse:
        if self.response is None:
            self.response = http.client.HTTPResponse(self.socket)
            self.response.begin()
            assert 200 == self.response.status
            assert "text/event-stream; charset=utf-8" == self.response.headers["content-type"]
        return self.response

    def event(self) -> dict[str, Any]:
        """The next event."""
        fields: dict[str, Any] = {}
        while line := self.begin().readline().decode().rstrip("\n"):
            name, value = line.split(": ", 1)
            fields[name] = json.loads(value) if name == "data" else value
        return fields

    def words(self) -> list[str]:
        """All words up to the end."""
        words = []
        while "event" not in (event := self.event()):
            words.append(event["data"])
        assert "end" == event["event"], event
        assert b"" == self.begin().read()
        self.leave()
        return words

    def leave(self) -> None:
        """Close the connection."""
        if self.response is not None:
            self.response.close()
        self.socket.close()


def queue(server: Server) -> dict[str, Any]:
    return server.ask("/status").json["queue"]


def settled(server: Server) -> None:
    """Wait until nothing runs, waits or holds the model."""

    def is_so() -> bool:
        status = server.ask("/status").json
        return (0, 0, 0) == (status["queue"]["running"], status["queue"]["waiting"], status["model"]["in_flight"])

    server.wait_until(is_so, "everything is freed")


def test_words_come_one_by_one_and_the_same_for_all(server: Server) -> None:
    """The same prompt gives the same text, alone or in a batch; and the last event says that it is the last."""
    alone = Client(server, "the").words()
    assert MOST == len(alone)
    clients = [Client(server, "the") for _ in range(5)]
    assert [alone] * 5 == [client.words() for client in clients]
    settled(server)
    assert 6 == queue(server)["answered"]


def test_a_client_that_leaves_drops_out_of_its_batch(server: Server) -> None:
    """The others' words are unharmed, what it held is freed, and the log has no error."""
    prompts = ["model", "word", "client", "text"]
    expected = {prompt: Client(server, prompt).words() for prompt in prompts}
    first = Client(server, "the")
    first.event()
    clients = {prompt: Client(server, prompt) for prompt in prompts}
    server.wait_until(lambda: queue(server)["waiting"] == len(prompts), "they wait for the first one's batch")
    first.leave()
    for prompt, client in clients.items():
        assert expected[prompt][:2] == [client.event()["data"], client.event()["data"]]
    assert len(prompts) == queue(server)["running"], "they share a batch"
    clients.pop("word").leave()
    server.wait_until(lambda: queue(server)["cancelled"] == 2, "it has dropped out")
    assert {prompt: expected[prompt][2:] for prompt in clients} == {
        prompt: client.words() for prompt, client in clients.items()
    }
    settled(server)
    status = queue(server)
    assert (2, 7, 0) == (status["cancelled"], status["answered"], status["failed"])
    assert "Traceback" not in server.log, server.log
    assert "ERROR" not in server.log, server.log


def test_a_batch_that_everybody_leaves_is_freed(server: Server) -> None:
    """Nothing more is computed, and the model is not held any more, long before the text would have ended."""
    clients = [Client(server, "the") for _ in range(4)]
    for client in clients:
        client.event()
    for client in clients:
        client.leave()
    settled(server)
    status = queue(server)
    assert len(clients) == status["cancelled"] + status["answered"]
    assert status["cancelled"] > 0
    assert "Traceback" not in server.log, server.log
    assert MOST == len(Client(server, "the").words()), "and the next client is served"


def test_deadlines_and_refusals(server: Server) -> None:
    """A client's own deadline ends its stream with an event; one that has passed at once is 504."""
    client = Client(server, "the", "Request-Timeout: 0.6")
    events = [client.event()]
    while "event" not in events[-1]:
        events.append(client.event())
    client.leave()
    assert {"event": "error", "data": "DeadlineExceeded"} == events[-1]
    assert len(events) < MOST
    assert 504 == server.ask("/generate?prompt=the", headers={"Request-Timeout": "0"}).status
    settled(server)
