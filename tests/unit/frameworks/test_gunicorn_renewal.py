"""The master's renewal in the gunicorn configuration, with a server that forks nothing."""

from __future__ import annotations

import _thread
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gunicorn")

from modelguard import guard
from modelguard.frameworks import gunicorn as ours
from modelguard.frameworks._workers import PreforkOptions


class Settings:
    preload_app = True
    worker_class_str = "asgi"


class Server:
    """What the master uses of gunicorn's arbiter."""

    def __init__(self) -> None:
        self.cfg = Settings()
        self.log = logging.getLogger("a gunicorn")
        self.num_workers = 2
        self.WORKERS: dict[int, Any] = {11: object(), 12: object()}
        self.managed = 0

    def manage_workers(self) -> None:
        self.managed += 1

    def spawn_worker(self) -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    "error",
    [BlockingIOError(11, "Resource temporarily unavailable"), MemoryError(), RuntimeError("can't start new thread")],
    ids=lambda error: type(error).__name__,
)
def test_a_renewal_that_fails_ends_neither_the_master_nor_its_workers(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system has no process or memory left: it is logged once for each load, and the next load is tried."""
    nlp = guard(dict, reload_on=None, name="nlp")
    nlp.load()
    monkeypatch.setattr(ours, "guards_to_share", lambda: (nlp,))
    monkeypatch.setattr(ours._prefork, "loading", lambda: None)  # the old generation may still be on its way out
    server = Server()
    master = ours._Master(server)
    os.set_blocking(master._requests, False)
    try:
        master._models.prepared = (nlp.status().generation,)
        master._manage_workers = server.manage_workers
        tried: list[int] = []

        def refuse(_options: PreforkOptions, guards: Any) -> None:
            tried.append(guards[0].status().generation)
            raise error

        monkeypatch.setattr(PreforkOptions, "prepare", refuse)
        for _ in range(2):
            nlp.reload()
            master._manage()
            master._manage()
        assert [2, 3] == tried
        failures = [line for line in caplog.records if "the new weights cannot be shared" in line.getMessage()]
        assert 2 == len(failures)
        assert all(line.exc_info and line.exc_info[1] is error for line in failures)
        assert {11, 12} == set(server.WORKERS)
        assert 4 == server.managed, "missing workers are still started"

        _the_fork_of_a_replacement_fails(master, server)
    finally:
        nlp.close()
        for end in (master._requests, master._send_requests):
            os.close(end)


def _the_fork_of_a_replacement_fails(master: Any, server: Server) -> None:
    """The old worker stays."""
    master.replacement.request(11, "Uses(5)")
    master._manage()
    assert {11, 12} == set(server.WORKERS)


@pytest.mark.parametrize("kind", ["gevent", "eventlet"])
def test_workers_that_patch_threads_are_refused_unless_these_are_patched_before(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The application and modelguard have real locks by then, and a thread that is none: a call would wait for ever."""
    monkeypatch.setattr(ours, "guards_to_share", lambda: ())
    server = Server()
    monkeypatch.setattr(server.cfg, "worker_class_str", kind, raising=False)
    server.app = SimpleNamespace(wsgi=lambda: lambda environ, start_response: [])  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        ours.on_starting(server)
    assert f"worker_class={kind!r}: patches threads in each worker" in caplog.text

    def green(*_arguments: Any) -> None: ...

    green.__module__ = f"{kind}.thread"
    monkeypatch.setattr(_thread, "start_new_thread", green)
    master = ours._Master(server)
    for end in (master._requests, master._send_requests):
        os.close(end)
