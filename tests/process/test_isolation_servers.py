"""Isolated functions behind real web servers: a reload under traffic, readiness, and the server's end."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from tests.process import isolated_servers
from tests.process.harness import Clients, Server, alive, wait_until, write_app
from tests.process.isolated_servers import GUNICORN, UVICORN, started
from tests.process.web_server import NEEDS_SERVERS

pytestmark = [pytest.mark.timeout(180), NEEDS_SERVERS]

MODEL = """
    import os, time
    from modelguard import guard, isolate

    def load():
        until = time.monotonic() + 1.0
        while time.monotonic() < until:  # holds the GIL, as ja_ginza's loader does
            pass
        return os.getpid()

    @isolate(workers=2, timeout="20s")
    @guard(load, reload_on=None)
    def predict(model):
        return f"{os.getpid()} {model}"

    AT_STARTUP = False  # readiness is judged before the first load

    def content(answer):
        return answer.encode()
"""
ASGI = MODEL + isolated_servers.ASGI
WSGI = MODEL + isolated_servers.WSGI


@pytest.mark.parametrize(
    ("app", "command"),
    [
        (ASGI, UVICORN),
        (ASGI, (*UVICORN, "--workers", "2")),
        (WSGI, GUNICORN),
        (WSGI, (*GUNICORN, "-w", "2", "--preload")),
    ],
    ids=["uvicorn", "uvicorn-workers", "gunicorn", "gunicorn-preload"],
)
def test_a_reload_fails_no_request(tmp_path: Path, app: str, command: tuple[str, ...]) -> None:
    """The model is found by the server's own way of importing it, and is replaced while clients ask."""
    with started(tmp_path, app, *command) as server:
        with Clients(server, count=4) as clients:
            wait_until(lambda: clients.answered > 50, "traffic")
            before = set(clients.versions)
            server.ask("/reload", timeout=60)
            wait_until(lambda: set(clients.versions) - before, "answers of the next mold")
        assert [] == clients.failures, clients
        assert str(server.process.pid) not in clients.pids


def test_the_probe_is_true_while_a_worker_can_answer(tmp_path: Path) -> None:
    """Ready after the first mold has loaded, and not before."""
    write_app(tmp_path, ASGI)
    with Server(tmp_path, *UVICORN) as server:
        server.wait_until(lambda: server.port is not None, "its port", 60.0)
        assert 503 == server.ask("/readyz").status
        server.ask("/", timeout=60)
        assert 200 == server.ask("/readyz").status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server(tmp_path: Path, number: signal.Signals) -> None:
    """Neither after its graceful end, nor after SIGKILL."""
    with started(tmp_path, ASGI, *UVICORN) as server:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) >= 3  # the mold and two workers
        server.process.send_signal(number)
        wait_until(lambda: not [one for one in processes if alive(one.pid)], "their end")
