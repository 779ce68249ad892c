"""Batched functions behind real web servers on loopback: hang-ups, refusals, deadlines, the end."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from tests.process.gunicorn_server import CONFIG, free_port, until

NEEDED = ("flask", "gunicorn", "h11", "starlette", "uvicorn")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED), reason=f"needs {', '.join(NEEDED)}"
    ),
]

#: What a batch takes in seconds, how many items it has, and how many wait at most.
TAKES, SIZE, QUEUE = 0.1, 4, 40

#: The model writes down what it computes, and waits as long as there is a file `hold`.
MODEL = f"""
    import os, time
    from pathlib import Path
    from modelguard import batched, guard
    from modelguard.errors import ModelGuardError

    HERE = Path(__file__).parent

    @batched(max_size={SIZE}, max_queue={QUEUE}, name="predict")
    def predict(items):
        with (HERE / "computed").open("a") as log:
            log.writelines(f"{{item}}\\n" for item in items)
        while (HERE / "hold").exists():
            time.sleep(0.01)
        time.sleep({TAKES})
        return [f"{{item}} {{os.getpid()}}" for item in items]

    def tell():
        status = predict.status()
        return {{"running": status.running, "waiting": status.waiting, "cancelled": status.cancelled}}
"""

#: Each kind of handler under each arrangement of middleware, by environment.
STARLETTE = (
    MODEL
    + """
    from contextlib import asynccontextmanager
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route
    from modelguard.frameworks.asgi import ModelGuardMiddleware

    class Seen(BaseHTTPMiddleware):
        async def dispatch(self, request, call_next):
            response = await call_next(request)
            response.headers["x-seen"] = "yes"
            return response

    async def awaiting(request):
        await request.body()
        return PlainTextResponse(await predict.aio(request.query_params["item"]))

    def blocking(request):
        return PlainTextResponse(predict(request.query_params["item"]))

    async def early(request):
        told = await predict.aio(request.query_params["item"])
        return PlainTextResponse((await request.body()).decode() + told)

    async def later(request):
        return PlainTextResponse("later", background=BackgroundTask(predict.aio, request.query_params["item"]))

    async def twice(request):
        task = BackgroundTask(predict.aio, request.query_params["item"] + "-again")
        return PlainTextResponse(await predict.aio(request.query_params["item"]), background=task)

    async def status(request):
        return JSONResponse(tell())

    @asynccontextmanager
    async def lifespan(app):
        async with predict:
            yield
        (HERE / "closed").touch()

    mine = Middleware(ModelGuardMiddleware, deadline="30s")
    stacks = {"alone": [mine], "above": [Middleware(Seen), mine], "below": [mine, Middleware(Seen)]}
    routes = [
        Route("/async", awaiting, methods=["GET", "POST"]),
        Route("/sync", blocking, methods=["GET", "POST"]),
        Route("/early", early, methods=["POST"]),
        Route("/later", later),
        Route("/twice", twice),
        Route("/status", status),
    ]
    app = Starlette(routes=routes, middleware=stacks[os.environ.get("STACK", "alone")], lifespan=lifespan)
"""
)

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

UVICORN = ("-m", "uvicorn", "app:app", "--loop", "asyncio", "--http", "h11", "--port", "PORT")
GUNICORN = ("-m", "gunicorn", "app:app", "-b", "127.0.0.1:PORT", "--no-control-socket")


class Answer:
    """What a client was told."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.text = response.read().decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    def is_problem(self, status: int) -> bool:
        """Whether it is all that a refusal should be, and no more."""
        return (
            (self.status, self.headers["content-type"], self.headers["cache-control"])
            == (status, "application/problem+json", "no-store")
            and {"type", "title", "status", "detail"} == set(self.json)
            and "predict" not in self.text
            and (status == 503) == ("retry-after" in self.headers)
            and int(self.headers.get("retry-after", 1)) >= 1
        )


class Server:
    """A web server in a process of its own, with its log in a file."""

    def __init__(self, folder: Path, *command: str, app: str, **environ: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._hold = folder / "hold"
        (folder / "app.py").write_text(textwrap.dedent(app))
        (folder / "computed").touch()
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *(part.replace("PORT", str(self.port)) for part in command)],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._clients = ThreadPoolExecutor(64)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def computed(self) -> list[str]:
        """What the model has seen, or sees."""
        return (self.folder / "computed").read_text().split()

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(client):
            client.request(method, path, headers=headers or {})
            return Answer(client.getresponse())

    def begin(self, path: str, **request: Any) -> Future[Answer]:
        """Ask, and do not wait."""
        return self._clients.submit(self.ask, path, **request)

    def connect(self, path: str, method: str = "GET") -> socket.socket:
        """Ask, and keep the connection, to hang it up."""
        line = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        body = b"text" if method == "POST" else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        return line

    def seen(self, **expected: int) -> None:
        """Wait until the queue is as it should be."""

        def so() -> bool:
            status = self.ask("/status").json
            return all(status[name] == number for name, number in expected.items())

        until(so, seconds=20, what=f"{expected}; log: {self.log}")

    @contextlib.contextmanager
    def busy(self, path: str) -> Iterator[Future[Answer]]:
        """Inside, the model is at one item, and will not end; what comes waits."""
        self._hold.touch()
        try:
            first = self.begin(f"{path}?item=first")
            until(lambda: self.computed == ["first"], seconds=20, what="the model is at it")
            yield first
        finally:
            self._hold.unlink()

    def up(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.ask("/livez").status == 200
            return False

        until(answers, what="it answers")

    def end(self) -> int:
        """Ask it to end, and wait."""
        self.process.terminate()
        return self.process.wait(30)

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._hold.unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self._clients.shutdown()
        self._log.close()


def uvicorn(folder: Path, **environ: str) -> Server:
    return Server(folder, *UVICORN, app=STARLETTE, **environ)


def gunicorn(folder: Path, *options: str, app: str, **environ: str) -> Server:
    return Server(folder, *GUNICORN, *options, app=app, **environ)


def hang_up_half(server: Server, path: str, method: str) -> None:
    """Of those who wait for a model every other one goes: these are not computed, and the rest is answered."""
    with server.busy(path) as first:
        items = [f"item-{n}" for n in range(36)]
        lines = [server.connect(f"{path}?item={item}", method) for item in items]
        server.seen(waiting=36, cancelled=0)
        for line in lines[::2]:
            line.close()
        server.seen(waiting=18, cancelled=18)
    staying = items[1::2]
    for line, item in zip(lines[1::2], staying, strict=True):
        with contextlib.closing(line):
            response = http.client.HTTPResponse(line)
            response.begin()
            answer = Answer(response)
            assert (200, item) == (answer.status, answer.text.split()[0])
    assert 200 == first.result(30).status
    assert sorted(["first", *staying]) == sorted(server.computed)
    server.seen(running=0, waiting=0, cancelled=18)
    assert "Traceback" not in server.log, server.log
    assert "ERROR" not in server.log, server.log


def burst(server: Server, path: str, clients: int) -> Counter[int]:
    """All at once; what is refused is refused as promised."""
    answers = [server.begin(f"{path}?item=burst-{n}") for n in range(clients)]
    told = Counter[int]()
    for n, asked in enumerate(answers):
        answer = asked.result(30)
        told[answer.status] += 1
        assert answer.text.startswith(f"burst-{n} ") if answer.status == 200 else answer.is_problem(answer.status)
    return told


# uvicorn


@pytest.mark.parametrize("stack", ["alone", "above", "below"])
def test_who_hangs_up_is_not_computed(stack: str, tmp_path: Path) -> None:
    """Behind uvicorn, with and without a body, wherever BaseHTTPMiddleware stands; and the log stays clean."""
    with uvicorn(tmp_path, STACK=stack) as server:
        hang_up_half(server, "/async", method="POST" if stack == "alone" else "GET")
        assert (stack == "above") == ("x-seen" in server.ask("/livez").headers)


def test_who_hangs_up_on_a_handler_in_a_thread_is_not_computed(tmp_path: Path) -> None:
    """Starlette's thread pool gets its threads back, too: they serve the others."""
    with uvicorn(tmp_path) as server:
        hang_up_half(server, "/sync", method="GET")


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_refusals_and_deadlines_behind_uvicorn(kind: str, tmp_path: Path) -> None:
    """A full queue is 503 at once, a client's own deadline 504 when it comes, and nonsense 400; then all is well."""
    with uvicorn(tmp_path) as server:
        with server.busy("/async") as first:
            late = server.ask(f"/{kind}?item=late", headers={"Request-Timeout": "0.2"})
            assert late.is_problem(504), late.text
            waiting = [server.begin(f"/async?item=waits-{n}") for n in range(QUEUE)]
            server.seen(waiting=QUEUE)
            for _ in range(5):
                refused = server.ask(f"/{kind}?item=refused")
                assert refused.is_problem(503), refused.text
            assert [200, 200] == [server.ask(path).status for path in ("/livez", "/readyz")]
            for nonsense in ("soon", "-1", "nan", "1e999", ""):
                assert server.ask(f"/{kind}?item=no", headers={"Request-Timeout": nonsense}).is_problem(400)
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert not {"late", "refused", "no"} & set(server.computed)
        told = burst(server, f"/{kind}", clients=60)
        assert {200} <= set(told) <= {200, 503, 504}, told
        assert 200 == server.ask(f"/{kind}?item=after", headers={"Request-Timeout": "20"}).status
        assert "Traceback" not in server.log, server.log


def test_a_burst_that_is_too_much_is_refused_in_part(tmp_path: Path) -> None:
    """Clients with little time: some are served, and the others know at once, or in time, that they are not."""
    with uvicorn(tmp_path) as server:
        assert [200] * 3 == [server.ask("/async?item=warm").status for _ in range(3)]
        asked = [server.begin(f"/async?item={n}", headers={"Request-Timeout": "1"}) for n in range(60)]
        answers = [one.result(30) for one in asked]
        told = Counter(answer.status for answer in answers)
        assert {200} < set(told) <= {200, 503, 504}, told
        assert all(answer.status == 200 or answer.is_problem(answer.status) for answer in answers)


def test_who_waits_when_uvicorn_ends_is_answered(tmp_path: Path) -> None:
    """It stops letting anyone in, computes what waits, closes the function, and ends in order."""
    with uvicorn(tmp_path) as server:
        with server.busy("/async") as first:
            waiting = [server.begin(f"/{kind}?item={kind}-{n}") for n in range(6) for kind in ("async", "sync")]
            server.seen(waiting=12)
            server.process.terminate()
            until(lambda: "Shutting down" in server.log, what="it has begun to end")
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        # uvicorn ends by the signal that it was sent, once all is done.
        assert server.process.wait(30) in (0, -signal.SIGTERM)
        assert (tmp_path / "closed").exists()
        assert "Application shutdown complete" in server.log
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", ["uvicorn", "gunicorn"])
def test_a_body_that_comes_after_the_model_was_asked(kind: str, tmp_path: Path) -> None:
    """The look-out for a hang-up and the application wait for the same message, and the application has it."""
    with uvicorn(tmp_path) if kind == "uvicorn" else gunicorn(tmp_path, "-k", "asgi", app=STARLETTE) as server:
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=10)) as line:
            line.sendall(b"POST /early?item=1 HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\n")
            until(lambda: server.computed == ["1"], seconds=20, what="the model is asked")
            server.seen(running=0, waiting=0)
            line.sendall(b"text ")
            response = http.client.HTTPResponse(line)
            response.begin()
            assert ["text", "1"] == Answer(response).text.split()[:2]
        assert "Traceback" not in server.log, server.log


@pytest.mark.parametrize("kind", ["uvicorn", "gunicorn"])
def test_what_is_left_for_after_the_answer_is_computed(kind: str, tmp_path: Path) -> None:
    """A background task outlives its answer, and who has that and goes is no client that hangs up."""
    with uvicorn(tmp_path) if kind == "uvicorn" else gunicorn(tmp_path, "-k", "asgi", app=STARLETTE) as server:
        assert "later" == server.ask("/later?item=1").text
        assert ["2"] == server.ask("/twice?item=2").text.split()[:1]
        until(lambda: {"1", "2", "2-again"} == set(server.computed), seconds=5, what=f"all is computed: {server.log}")
        server.seen(running=0, waiting=0, cancelled=0)
        assert "Traceback" not in server.log, server.log


# gunicorn


def test_flask_behind_gunicorn(tmp_path: Path) -> None:
    """A burst is served or refused, nothing else; probes and deadlines work; it ends in order."""
    with gunicorn(tmp_path, "-k", "gthread", "--threads", "64", app=FLASK) as server:
        assert [200, 200] == [server.ask(path).status for path in ("/livez", "/readyz")]
        head = server.ask("/readyz", method="HEAD")
        assert (200, "") == (head.status, head.text)
        with server.busy("/sync") as first:
            assert server.ask("/sync?item=late", headers={"Request-Timeout": "0.2"}).is_problem(504)
            waiting = [server.begin(f"/sync?item=waits-{n}") for n in range(QUEUE)]
            server.seen(waiting=QUEUE)
            assert server.ask("/sync?item=refused").is_problem(503)
            assert server.ask("/sync?item=no", headers={"Request-Timeout": "soon"}).is_problem(400)
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert not {"late", "refused", "no"} & set(server.computed)
        told = burst(server, "/sync", clients=60)
        assert {200} <= set(told) <= {200, 503, 504}, told
        assert 0 == server.end(), server.log
        assert "Traceback" not in server.log, server.log


def test_who_waits_when_gunicorn_ends_is_answered(tmp_path: Path) -> None:
    """Of its threads none is cut off."""
    with gunicorn(tmp_path, "-k", "gthread", "--threads", "16", app=FLASK) as server:
        with server.busy("/sync") as first:
            waiting = [server.begin(f"/sync?item={n}") for n in range(10)]
            server.seen(waiting=10)
            server.process.terminate()
            until(lambda: "Handling signal: term" in server.log, what="it has begun to end")
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert 0 == server.process.wait(30), server.log


def test_starlette_behind_gunicorn(tmp_path: Path) -> None:
    """Its own ASGI worker tells of hang-ups, refuses as promised, and answers those who wait when it ends."""
    with gunicorn(tmp_path, "-k", "asgi", app=STARLETTE) as server:
        hang_up_half(server, "/async", method="POST")
        told = burst(server, "/async", clients=60)
        assert {200} <= set(told) <= {200, 503, 504}, told
        (tmp_path / "computed").write_text("")
        with server.busy("/async") as first:
            assert server.ask("/async?item=late", headers={"Request-Timeout": "0.2"}).is_problem(504)
            waiting = [server.begin(f"/async?item={n}") for n in range(10)]
            server.seen(waiting=10)
            server.process.terminate()
            until(lambda: "Handling signal: term" in server.log, what="it has begun to end")
        assert {200} == {asked.result(30).status for asked in [first, *waiting]}
        assert 0 == server.process.wait(30), server.log
        assert (tmp_path / "closed").exists()


def test_a_batcher_that_worked_before_the_fork_works_in_every_worker(tmp_path: Path) -> None:
    """Its thread stays in the master, and each worker has its own; a guarded one runs on the master's model."""
    options = ("-c", CONFIG, "-w", "2", "-k", "gthread", "--threads", "16")
    with gunicorn(tmp_path, *options, app=PRELOADED) as server:
        until(lambda: len(children(server)) == 2, what="both workers are there")
        workers = children(server)
        pids: set[int] = set()

        def all_have() -> bool:
            asked = [server.begin(f"/sync?item={n}") for n in range(16)]
            for n, answer in enumerate(one.result(30) for one in asked):
                assert 200 == answer.status, server.log
                item, pid = answer.text.split()
                assert str(n) == item
                pids.add(int(pid))
            return pids == workers

        until(all_have, what="both workers have answered")
        words = [server.ask(f"/guarded?item={n}").text.split() for n in range(10)]
        assert {str(server.process.pid)} == {made_by for _, _, made_by in words}
        assert {int(pid) for _, pid, _ in words} <= workers
        assert 200 == server.ask("/readyz").status
        assert 0 == server.end(), server.log
        assert "Traceback" not in server.log, server.log


def children(server: Server) -> set[int]:
    return {child.pid for child in psutil.Process(server.process.pid).children()}
