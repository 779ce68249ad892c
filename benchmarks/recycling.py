"""A fresh copy of ja_ginza in a real gunicorn: time from the order to its first answer.

Three ways, each in its own gunicorn with one worker, alternating:

* recycled by fork: ``modelguard.frameworks.gunicorn``; a policy is due, and the master forks its prepared copy;
* reloaded: the same guard without pre-fork loads another copy in the worker, while calls run (``defer=0``);
* gunicorn's own: without preloading and without modelguard, the worker is stopped (``SIGTERM``, as after
  ``max_requests``), and the next one imports and loads.

The order is a request that fails, which makes ``Errors(1)`` due, or the signal. From then on one client sends a request
every two milliseconds; the time ends with the first answer from another process or another generation. Requests must
be answered meanwhile, except in the third way, where no worker is left to answer them.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import _common
from examples._driver import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The reload takes twenty times as long at least, so the promise reads as a ratio of at most 1/20.
TARGET = 0.05
#: Seconds that a start, or a fresh copy, may take.
PATIENCE = 120.0

GUARDED = """
    import os, spacy
    from modelguard import Errors, Swap, guard

    nlp = guard(lambda: spacy.load("ja_ginza"), reload_on=Errors(1), swap=Swap(defer=0), warmup=lambda nlp: nlp("銀座"))

    @nlp
    def analyse(nlp, path):
        if path == "/fail":
            raise ValueError("asked for")
        nlp("銀座でランチをご一緒しましょう。")

    def app(environ, start_response):
        status = "200 OK"
        try:
            analyse(environ["PATH_INFO"])
        except ValueError:
            status = "500 Asked For"
        body = f"{os.getpid()} {nlp.status().generation}".encode()
        start_response(status, [("Content-Length", str(len(body)))])
        return [body]
"""
PLAIN = """
    import os, spacy

    nlp = spacy.load("ja_ginza")

    def app(environ, start_response):
        nlp("銀座でランチをご一緒しましょう。")
        body = f"{os.getpid()} 1".encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]
"""
WAYS = {
    "fork": "recycled by fork",
    "reload": "reloaded in the worker",
    "respawn": "gunicorn's own: a new worker loads",
}
COLOURS = {"fork": _common.OURS, "reload": _common.THIRD, "respawn": _common.PEER}


class Service(Server):
    """One gunicorn with one worker."""

    def __init__(self, way: str, folder: Path) -> None:
        self._way = way
        (folder / "service.py").write_text(textwrap.dedent(PLAIN if way == "respawn" else GUARDED), encoding="utf-8")
        sharing = ["-c", "python:modelguard.frameworks.gunicorn"] if way == "fork" else ["--no-control-socket"]
        command = [sys.executable, "-m", "gunicorn", *sharing, "-w", "1", "-b", "127.0.0.1:0", "service:app"]
        super().__init__(command, folder=folder, environment={"MODELGUARD_RUNTIME_DIR": str(folder)}, name=way)
        self.wait_until(lambda: self.port is not None, "its port", PATIENCE)
        self.wait_for("")

    def copy(self, path: str = "/") -> str | None:
        """Which copy answered, as process and generation; None if none did."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask(path, timeout=PATIENCE).text
        return None

    def wait_for(self, old: str) -> tuple[str, int]:
        """Ask until another copy than ``old`` answers; returns which, and how many requests were not answered."""
        deadline, lost = time.monotonic() + PATIENCE, 0
        while (copy := self.copy()) in (None, old):
            self.check()
            assert time.monotonic() < deadline, f"no fresh copy: {self.log}"
            lost += copy is None
            time.sleep(0.002)
        return str(copy), lost

    def renew(self) -> tuple[float, int]:
        """Order a fresh copy; returns the seconds until its first answer, and how many requests were not answered."""
        old = self.copy()
        assert old is not None
        started = time.perf_counter()
        if self._way == "respawn":
            os.kill(int(old.split()[0]), signal.SIGTERM)
        else:
            self.copy("/fail")
        _, lost = self.wait_for(old)
        return time.perf_counter() - started, lost


@contextlib.contextmanager
def service(way: str) -> Iterator[Service]:
    with tempfile.TemporaryDirectory() as folder:
        one = Service(way, Path(folder))
        try:
            yield one
        finally:
            one.stop()


def main() -> None:
    benchmark = _common.Benchmark("recycling", "A fresh ja_ginza under gunicorn: time to its first answer")
    rounds = 1 if benchmark.quick else 9
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    lost = dict.fromkeys(WAYS, 0)
    with contextlib.ExitStack() as stack:
        services = {way: stack.enter_context(service(way)) for way in WAYS}
        for _ in range(rounds):
            for way, one in services.items():
                time.sleep(0.5)  # what the last order left to do: the old worker's end, the old copy's release
                taken, missed = one.renew()
                seconds[way].append(taken)
                lost[way] += missed
    ratios = [fork / reload for fork, reload in zip(seconds["fork"], seconds["reload"], strict=True)]
    rows = [_common.Row("recycled by fork / reloaded", ratios, "x", TARGET, ours=True)]
    rows += [_common.Row(f"  {name}", seconds[way], "s", ours=way == "fork") for way, name in WAYS.items()]
    notes = ["", "Requests without an answer: " + ", ".join(f"{way} {lost[way]}" for way in WAYS)]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for way, name in WAYS.items():
            axes.plot(range(1, rounds + 1), seconds[way], color=COLOURS[way], marker="o", markersize=4, label=name)
        axes.set_yscale("log")
        axes.set_xlabel("order for a fresh copy")
        axes.set_ylabel("seconds (logarithmic)")
        axes.set_title("ja_ginza under gunicorn: time from the order to the first answer of a fresh copy")
        axes.legend(frameon=False)

    benchmark.finish(rows, draw, size=(9, 4), notes=notes, seconds=seconds, lost=lost)


if __name__ == "__main__":
    main()
