"""Start the service in three ways, put the same load on each, and print what all its processes hold.

From the root of the source tree: python -m examples.gunicorn_flask.drive
"""

import argparse
import contextlib
import functools
import importlib.util
import itertools
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples._driver import Server, megabytes, row, running, send_all, wrk

from modelguard import sharing

HERE = Path(__file__).parent
GUNICORN = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0", "--no-control-socket"]
COMMANDS = {
    "naive": [*GUNICORN, "naive:app"],
    "preload": [*GUNICORN, "--preload", "naive:app"],
    "guarded": [*GUNICORN, "--config", "python:modelguard.frameworks.gunicorn", "app:app"],
}
LABEL, COLLECT = "/labelservice/", "/collect"
#: Requests at a time.
CONNECTIONS = 8
OK = 200


@contextlib.contextmanager
def serving(way: str, model: str = "jieba", workers: int = 4) -> Iterator[Server]:
    """A service whose workers all answer."""
    command = [*COMMANDS[way], "--workers", str(workers)]
    with running(command, folder=HERE, environment={"MODEL": model}, name=way) as server:
        reach_all(server, texts(model, 1)[0], workers=workers)
        yield server


def ask(server: Server, text: str, path: str = LABEL) -> dict[str, Any]:
    """Send a text; the words in it, and which worker has found them."""
    answer = server.ask(path, text, headers={"Content-Type": "text/plain"})
    if answer.status != OK:
        raise RuntimeError(f"status {answer.status}: {answer.text}")
    found: dict[str, Any] = answer.json
    return found


def send(server: Server, sent: list[str], path: str = LABEL) -> list[dict[str, Any]]:
    """Send texts, several at a time; an answer for each."""
    return send_all(functools.partial(ask, server, path=path), sent, CONNECTIONS)


def reach_all(server: Server, text: str, path: str = LABEL, *, workers: int) -> None:
    """Send a text until every worker has answered it."""
    met: set[int] = set()

    def all_have_answered() -> bool:
        met.update(answer["worker"] for answer in send(server, [text] * CONNECTIONS, path))
        return len(met) >= workers

    server.wait_until(all_have_answered, f"an answer from each of {workers} workers")


def top(server: Server) -> str:
    """What ``modelguard top`` prints of the service."""
    command = [sys.executable, "-m", "modelguard", "top", "--once", str(server.process.pid)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def texts(model: str, count: int, seed: int = 0) -> list[str]:
    """Make texts of words that the model knows, so that they read much of it."""
    rng = random.Random(seed)
    if model == "jieba":
        spec = importlib.util.find_spec("jieba")
        assert spec is not None
        assert spec.origin is not None
        lines = Path(spec.origin).with_name("dict.txt").read_text(encoding="utf-8").splitlines()
        known = [line.split()[0] for line in lines]
        return ["".join(rng.choices(known, k=100)) for _ in range(count)]
    people, places, things = ("山田さん", "友人", "先生"), ("銀座", "東京駅", "図書館"), ("ランチ", "会議", "勉強")
    sentences = [f"{who}は{where}で{what}をした。" for who, where, what in itertools.product(people, places, things)]
    return [rng.choice(sentences) for _ in range(count)]


def load(server: Server, sent: list[str], seconds: float) -> None:
    """Send the texts again and again, by wrk if it is installed."""
    if shutil.which("wrk") is not None:
        printed = wrk(server.url + LABEL, sent, CONNECTIONS, seconds)
        if "Non-2xx" in printed:
            raise RuntimeError(printed)
        return
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        send(server, sent[:200])


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve in three ways under the same load, and compare their memory.")
    parser.add_argument("--model", choices=("jieba", "ja_ginza"), default="jieba", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="of load on each; default: %(default)s")
    options = parser.parse_args()
    sent, lines = texts(options.model, 1000), []
    for way in COMMANDS:  # in turn, so that none shares the pages of a library with another
        with serving(way, options.model, options.workers) as server:
            load(server, sent, options.seconds)
            loaded = sharing.report(server.process.pid)
            # Each worker does at once what Python does by itself sooner or later: a full collection.
            reach_all(server, "", COLLECT, workers=options.workers)
            print(f"{way}\n\n{top(server)}", flush=True)
            collected = sharing.report(server.process.pid)
        lines.append(row(way, *(f"{megabytes(held.pss)}, {held.copies:.2f}" for held in (loaded, collected)), width=20))
    print(row("PSS, in copies", "after the load", "after a collection", width=20), *lines, sep="\n")


if __name__ == "__main__":
    main()
