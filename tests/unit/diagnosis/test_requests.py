"""Requests that drive a service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from modelguard.diagnosis._facts_command import check_url, drive
from modelguard.errors import InvalidOption


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/bad": 500, "/nowhere": 404}.get(self.path, 200))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_path_goes_to_the_services_own_port(port: int) -> None:
    """Unix sockets are passed over."""
    assert [] == drive("/good?x=1", 3, [port, "/run/app.sock"])


def test_failures_are_counted(port: int) -> None:
    """Statuses other than 2xx and refused connections are failures, each with why."""
    assert 2 * ["status 500"] == drive(f"http://127.0.0.1:{port}/bad", 2, [])
    assert 2 * ["status 404"] == drive("/nowhere", 2, [port])
    assert ["ConnectionRefusedError"] == drive("http://127.0.0.1:1/", 1, [])
    assert 1 == len(drive("/", 1, []))


@pytest.mark.parametrize("url", ["", "localhost:80/x", "https://a/", "ftp://a/", "http:///x"])
def test_invalid_addresses(url: str) -> None:
    """The error gives an example."""
    with pytest.raises(InvalidOption, match="/predict"):
        check_url(url)
