"""``trim_every`` in a real process under glibc, which keeps what is freed below something that is not."""

from __future__ import annotations

import platform
import time
from pathlib import Path

import pytest
from tests.process.harness import Server, run_python, wait_until, write_app

from modelguard import memory

pytestmark = [
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="what glibc keeps is judged here"),
    pytest.mark.timeout(60),
]

MB = 10**6

HOLES = """
    import json, time
    from modelguard import memory

    kept = []
    {trim}

    def holes():
        blocks = [bytearray(100_000) for _ in range(2_000)]  # each too small for a mapping of its own
        kept.append(bytearray(100_000))  # holds the heap's end where it is

    start, end = memory.private(fresh=True), time.monotonic() + {patience}
    holes()
    held = lambda: memory.private(fresh=True) - start
    while held() > 50_000_000 and time.monotonic() < end:
        time.sleep(0.1)
    print(json.dumps(held()))
"""


@pytest.mark.parametrize("every", ["300ms", "50 MB"])
def test_what_glibc_keeps_is_given_back_beside_the_calls(every: str) -> None:
    """200 MB are freed in the middle of the heap: the ticker's thread returns them within the interval."""
    assert run_python(HOLES.format(trim=f"memory.trim_every({every!r})", patience=30), 50) < 50 * MB


def test_without_the_option_glibc_keeps_it() -> None:
    """The same without it: else the test above would show nothing."""
    assert run_python(HOLES.format(trim="", patience=1), 50) > 150 * MB


#: A web service without a guard; each request for `/holes` frees 200 MB in the middle of the worker's heap.
SERVICE = """
    import os
    from modelguard import memory

    TRIM
    kept = []

    def answer(path):
        if path == "/holes":
            blocks = [bytearray(100_000) for _ in range(2_000)]
            kept.append(bytearray(100_000))
        return str(os.getpid()).encode()

    def app(environ, start_response):
        body = answer(environ["PATH_INFO"])
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    async def aapp(scope, receive, send):
        body = answer(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})
"""
SERVERS = {
    "gunicorn": ("-m", "gunicorn", "--preload", "-w", "2", "-b", "127.0.0.1:0", "app:app"),  # forks its workers
    "uvicorn": ("-m", "uvicorn", "--workers", "2", "--lifespan", "off", "--port", "0", "app:aapp"),  # spawns them
}


def held_by_worker(folder: Path, server: str, trim: str, *, until: int) -> list[int]:
    """What a worker holds more than before its requests, read for two seconds, once it is less than ``until``."""
    write_app(folder, SERVICE.replace("TRIM", trim))
    with Server(folder, *SERVERS[server]) as running:
        running.wait_until_serving()
        pid = int(running.ask("/").text)
        start = uss(pid)
        while int(running.ask("/holes").text) != pid:
            pass
        wait_until(lambda: uss(pid) - start < until, "the worker to return what it has freed", 30)
        readings = []
        for _ in range(10):
            time.sleep(0.2)
            readings.append(uss(pid) - start)
        return readings


def uss(pid: int) -> int:
    """What the system would get back if a process ended."""
    found = memory.usage(pid).uss
    assert found is not None
    return found


@pytest.mark.parametrize("server", SERVERS)
def test_one_line_is_enough_in_the_workers_of_a_server(tmp_path: Path, server: str) -> None:
    """A worker without a guard, forked or spawned, returns the 200 MB that a request has freed, and they stay away."""
    pytest.importorskip(server)
    assert max(held_by_worker(tmp_path, server, 'memory.trim_every("300ms")', until=50 * MB)) < 50 * MB


def test_without_the_line_a_worker_keeps_it(tmp_path: Path) -> None:
    """The same service without it holds what its request freed: else the test above would show nothing."""
    pytest.importorskip("gunicorn")
    assert min(held_by_worker(tmp_path, "gunicorn", "", until=10**12)) > 150 * MB
