"""Applications with an isolated function ``predict`` for real web servers; a test's own text defines the function."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.process.harness import Server, wait_until, write_app

#: What follows the definition of ``predict`` and of ``content``, which makes a response's body of its answer.
ASGI = """
    from modelguard.frameworks.asgi import ModelGuardMiddleware

    async def answer(scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                if message["type"] == "lifespan.startup" and AT_STARTUP:
                    await predict.aload()
                if message["type"] == "lifespan.shutdown":
                    await predict.aclose()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        if scope["path"] == "/reload":
            predict.reload(wait=False)
        body = content(await predict.aio())
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    app = ModelGuardMiddleware(answer)
"""
WSGI = """
    def app(environ, start_response):
        if environ["PATH_INFO"] == "/reload":
            predict.reload(wait=False)
        body = content(predict())
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]
"""
UVICORN = ("-m", "uvicorn", "app:app", "--port", "0")
GUNICORN = ("-m", "gunicorn", "app:app", "-b", "127.0.0.1:0", "--no-control-socket", "--threads", "4")


def started(folder: Path, app: str, *command: str, **environment: str) -> Server:
    """Start a server and wait until it has answered."""
    write_app(folder, app)
    server = Server(folder, *command, environment=environment)
    server.wait_until(lambda: server.port is not None, "its port", 60.0)
    wait_until(lambda: answers(server), "an answer")
    return server


def answers(server: Server) -> bool:
    """Whether it answers; one that has bound its port may not listen yet."""
    with suppress(ConnectionRefusedError):
        return server.ask("/", timeout=60).status == 200
    return False
