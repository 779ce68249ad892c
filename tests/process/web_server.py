"""Real web servers with a batched function behind them."""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Self

import pytest
from tests.process.harness import Answer, Server, wait_until, write_app

NEEDED = ("flask", "gunicorn", "h11", "starlette", "uvicorn")

#: The mark of those who need a real web server.
NEEDS_SERVERS = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in NEEDED), reason=f"needs {', '.join(NEEDED)}"
)

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

UVICORN = ("-m", "uvicorn", "app:app", "--loop", "asyncio", "--http", "h11", "--port", "0")
GUNICORN = ("-m", "gunicorn", "app:app", "-b", "127.0.0.1:0", "--no-control-socket")


class WebServer(Server):
    """A web server with the batched function behind it, serving from the start of the block."""

    def __init__(self, folder: Path, *command: str, app: str, **environment: str) -> None:
        write_app(folder, app)
        (folder / "computed").touch()
        self._hold = folder / "hold"
        super().__init__(folder, *command, environment=environment)

    @property
    def computed(self) -> list[str]:
        """What the model has seen, or sees."""
        return (self.folder / "computed").read_text().split()

    def seen(self, **expected: int) -> None:
        """Wait until the queue is in this state."""

        def is_so() -> bool:
            status = self.ask("/status").json
            return all(status[name] == number for name, number in expected.items())

        self.wait_until(is_so, f"{expected}", seconds=20)

    @contextlib.contextmanager
    def busy(self, path: str) -> Iterator[Future[Answer]]:
        """Inside, the model is at one item, and will not end; what comes waits."""
        self._hold.touch()
        try:
            first = self.begin(f"{path}?item=first")
            wait_until(lambda: self.computed == ["first"], seconds=20, what="the model is at it")
            yield first
        finally:
            self._hold.unlink()

    def end(self) -> int:
        """Ask it to end, and wait."""
        self.process.terminate()
        return self.process.wait(30)

    def __enter__(self) -> Self:
        try:
            self.wait_until_serving("/livez")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._hold.unlink(missing_ok=True)
        super().__exit__()


def gunicorn(folder: Path, *options: str, app: str, **environment: str) -> WebServer:
    """The function behind gunicorn."""
    return WebServer(folder, *GUNICORN, *options, app=app, **environment)


def is_problem(answer: Answer, status: int) -> bool:
    """Whether it is a complete refusal, and nothing more."""
    return (
        (answer.status, answer.headers["content-type"], answer.headers["cache-control"])
        == (status, "application/problem+json", "no-store")
        and {"type", "title", "status", "detail"} == set(answer.json)
        and "predict" not in answer.text
        and (status == 503) == ("retry-after" in answer.headers)
        and int(answer.headers.get("retry-after", 1)) >= 1
    )


def burst(server: WebServer, path: str, clients: int) -> Counter[int]:
    """All at once; what is refused is refused as promised."""
    answers = [server.begin(f"{path}?item=burst-{n}") for n in range(clients)]
    statuses = Counter[int]()
    for n, asked in enumerate(answers):
        answer = asked.result(30)
        statuses[answer.status] += 1
        assert answer.text.startswith(f"burst-{n} ") if answer.status == 200 else is_problem(answer, answer.status)
    return statuses
