"""Batched functions in Flask behind gunicorn: refusals, deadlines, shutdown, the fork."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.process.gunicorn_server import CONFIG
from tests.process.harness import wait_until
from tests.process.web_server import MODEL, NEEDS_SERVERS, QUEUE, burst, gunicorn, is_problem

pytestmark = [pytest.mark.timeout(120), NEEDS_SERVERS]

FLASK = (
    MODEL
    + """
    from flask import Flask, request
    from modelguard.frameworks import wsgi

    app = Flask(__name__)

    @app.get("/sync")
    def blocking():
        return predict(request.args["item"])

    @app.get("/status")
    def status():
        return tell()

    wsgi.install(app, deadline="30s")
"""
)

#: The batcher has worked in the master, and its thread is alive there when gunicorn forks.
PRELOADED = (
    FLASK
    + """
    nlp = guard(lambda: {"made by": os.getpid()}, reload_on=None, prefork=True, name="nlp")

    @batched(max_size=4, name="guarded")
    @nlp
    def guarded(model, items):
        return [f"{item} {os.getpid()} {model['made by']}" for item in items]

    @app.get("/guarded")
    def ask_guarded():
        return guarded(request.args["item"])

    assert predict("master") == f"master {os.getpid()}"
    assert guarded("master").startswith("master")
    MASTER = os.getpid()
"""
)


def test_flask_behind_gunicorn(tmp_path: Path) -> None:
    """A burst is served or refused, nothing else; probes and deadlines work; it ends normally."""
    with gunicorn(tmp_path, "-k", "gthread", "--threads", "64", app=FLASK) as server:
        assert [200, 200] == [server.ask(path).status for path in ("/livez", "/readyz")]
        head = server.ask("/readyz", method="HEAD")
        assert (200, "") == (head.status, head.text)
        with server.busy("/sync") as first:
            assert is_problem(server.ask("/sync?item=late", headers={"Request-Timeout": "0.2"}), 504)
            waiting = [server.begin(f"/sync?item=waits-{n}") for n in range(QUEUE)]
            server.seen(waiting=QUEUE)
            assert is_problem(server.ask("/sync?item=refused"), 503)
            assert is_problem(server.ask("/sync?item=no", headers={"Request-Timeout": "soon"}), 400)
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert not {"late", "refused", "no"} & set(server.computed)
        told = burst(server, "/sync", clients=60)
        assert {200} <= set(told) <= {200, 503, 504}, told
        assert 0 == server.end(), server.log
        assert "Traceback" not in server.log, server.log


def test_requests_that_wait_when_gunicorn_ends_are_answered(tmp_path: Path) -> None:
    """None of its threads is ended before its answer."""
    with gunicorn(tmp_path, "-k", "gthread", "--threads", "16", app=FLASK) as server:
        with server.busy("/sync") as first:
            waiting = [server.begin(f"/sync?item={n}") for n in range(10)]
            server.seen(waiting=10)
            server.process.terminate()
            wait_until(lambda: "Handling signal: term" in server.log, what="it has begun to end")
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert 0 == server.process.wait(30), server.log


def test_a_batcher_that_worked_before_the_fork_works_in_every_worker(tmp_path: Path) -> None:
    """Its thread stays in the master, and each worker has its own; a guarded function runs on the master's model."""
    options = ("-c", CONFIG, "-w", "2", "-k", "gthread", "--threads", "16")
    with gunicorn(tmp_path, *options, app=PRELOADED) as server:
        wait_until(lambda: len(server.children()) == 2, what="both workers are there")
        workers = server.children()
        pids: set[int] = set()

        def all_have() -> bool:
            asked = [server.begin(f"/sync?item={n}") for n in range(16)]
            for n, answer in enumerate(one.result(30) for one in asked):
                assert 200 == answer.status, server.log
                item, pid = answer.text.split()
                assert str(n) == item
                pids.add(int(pid))
            return pids == workers

        wait_until(all_have, what="both workers have answered")
        words = [server.ask(f"/guarded?item={n}").text.split() for n in range(10)]
        assert {str(server.process.pid)} == {made_by for _, _, made_by in words}
        assert {int(pid) for _, pid, _ in words} <= workers
        assert 200 == server.ask("/readyz").status
        assert 0 == server.end(), server.log
        assert "Traceback" not in server.log, server.log
