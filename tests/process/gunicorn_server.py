"""gunicorn with a small model behind it, which knows its version and where it was made."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.process.harness import Server, write_app

CONFIG = "python:modelguard.frameworks.gunicorn"

#: The model is a dictionary that knows its version, read from a file. `/` answers with worker, version, whether the
#: model was made in another process, which all workers share, and whether the worker was warm; paths ask for more.
APP = """
    import os, time
    from pathlib import Path
    from modelguard import TTL, Errors, MemoryGrowth, Modified, Uses, guard

    HERE = Path(__file__).parent
    WEIGHTS = HERE / "weights"

    class Model(dict):
        pass

    def load():
        version = WEIGHTS.read_text()
        if (HERE / "slow").exists():
            (HERE / "loading").touch()
            time.sleep(2)
        if version == "broken":
            raise OSError("no weights in there")
        return Model({f"feature-{n}": [n] for n in range(1000)}, version=version, pid=os.getpid())

    def warm(model):
        if (HERE / "cold").exists() and os.getpid() != PARENT:
            raise OSError("no warmth")
        WARMED.append(os.getpid())

    PARENT, WARMED, HELD = os.getpid(), [], []
    nlp = guard(load, reload_on=POLICY, warmup=warm, prefork=True, name="nlp")

    @nlp
    def answer(model, path):
        if path == "/slow":
            time.sleep(0.5)
        if path == "/fail":
            raise ValueError("asked for")
        if path == "/leak":
            HELD.append(b"x" * 5_000_000)
        return f"{os.getpid()} {model['version']} {model['pid'] != os.getpid()} {os.getpid() in WARMED}"

    def app(environ, start_response):
        try:
            text, status = answer(environ["PATH_INFO"]), "200 OK"
        except ValueError as error:
            text, status = str(error), "500 Asked For"
        body = text.encode()
        start_response(status, [("Content-Length", str(len(body)))])
        return [body]

    async def aapp(scope, receive, send):
        assert scope["type"] == "http", "no lifespan"
        body = answer(scope["path"]).encode()
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})
"""


class Gunicorn(Server):
    """gunicorn with modelguard's configuration, or with another one that is among the options."""

    def __init__(self, folder: Path, *options: str, app: str = APP, policy: str = "None", **environment: str) -> None:
        (folder / "weights").write_text("1")
        write_app(folder, app.replace("POLICY", policy))
        self.size = int(options[options.index("-w") + 1])
        config = () if "-c" in options else ("-c", CONFIG)
        command = (
            "-m",
            "gunicorn.app.wsgiapp",  # what "-m gunicorn" runs, which 20.0 does not have
            "-b",
            "127.0.0.1:0",
            *config,
            *options,
            "app:aapp" if "asgi" in options else "app:app",
        )
        super().__init__(folder, *command, environment=environment)

    def words(self, path: str = "/") -> list[str]:
        """What the application says: worker, version, whether the model is the master's, whether it was warm."""
        return self.ask(path, timeout=20).text.split(" ")

    def wait_until_up(self) -> None:
        """Wait until all workers are there; each has warmed up before it says so."""
        self.wait_until_serving()
        self.wait_until(lambda: self.log.count("Booting worker") >= self.size, "all workers")

    def children(self) -> set[int]:
        """The workers, without molds."""
        booted = set(map(int, re.findall(r"Booting worker with pid: (\d+)", self.log)))
        return super().children() & booted

    def molds(self) -> set[int]:
        """The processes that load the models and fork the workers."""
        return super().children() - self.children()

    def replaced(self) -> int:
        """How many workers have been replaced because a policy was due."""
        return self.log.count("is being replaced: ")


@contextlib.contextmanager
def running(folder: Path, *options: str, **more: Any) -> Iterator[Gunicorn]:
    """A gunicorn all of whose workers are there."""
    with Gunicorn(folder, *options, **more) as server:
        server.wait_until_up()
        yield server
