"""Start the service in three ways, put the same load on each, and print what each tree holds: python drive.py"""

import argparse
import contextlib
import http.client
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from modelguard import sharing

HERE = Path(__file__).parent
GUNICORN = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0", "--no-control-socket"]
WAYS = {
    "naive": [*GUNICORN, "naive:app"],
    "preload": [*GUNICORN, "--preload", "naive:app"],
    "guarded": [*GUNICORN, "--config", "python:modelguard.frameworks.gunicorn", "app:app"],
}
LISTENS = re.compile(r"Listening at: http://127\.0\.0\.1:(\d+)")
#: Requests at a time.
CONNECTIONS = 8


class Service:
    """gunicorn and its workers."""

    def __init__(self, way: str, model: str, workers: int) -> None:
        self.workers = workers
        self.process = subprocess.Popen(
            [*WAYS[way], "--workers", str(workers)],
            cwd=HERE,
            env=os.environ | {"MODEL": model},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := LISTENS.search(line):
                self.port = int(found[1])
                break
        else:
            self.process.communicate()
            raise RuntimeError(f"{way} did not start:\n{''.join(self.log)}")
        # Read on, so that the service never waits for room in the pipe.
        self.reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self.reader.start()

    def ask(self, text: str, path: str = "/labelservice/") -> dict[str, Any]:
        """Send a text; the words in it, and which worker has found them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", path, text.encode(), {"Content-Type": "text/plain"})
            answer = connection.getresponse()
            body = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise RuntimeError(f"status {answer.status}: {body!r}")
        answered: dict[str, Any] = json.loads(body)
        return answered

    def reach_all(self, text: str, path: str = "/labelservice/", patience: float = 120.0) -> None:
        """Ask until every worker has answered."""
        deadline, met = time.monotonic() + patience, set[int]()
        while len(met) < self.workers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {len(met)} workers answer:\n{''.join(self.log)}")
            met.update(answer["worker"] for answer in self.send([text] * CONNECTIONS, path))

    def send(self, texts: list[str], path: str = "/labelservice/") -> list[dict[str, Any]]:
        """Send texts, several at a time; an answer for each."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(self.ask, texts, itertools.repeat(path)))

    def holds(self) -> sharing.TreeReport:
        """What gunicorn and its workers hold."""
        return sharing.report(self.process.pid)

    def top(self) -> str:
        """What ``modelguard top`` says of them."""
        command = [sys.executable, "-m", "modelguard", "top", "--once", str(self.process.pid)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def stop(self) -> None:
        """Ask the service to end, and wait until it has."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()


@contextlib.contextmanager
def serving(way: str, model: str = "jieba", workers: int = 4) -> Iterator[Service]:
    """A service whose workers all answer, ended afterwards."""
    service = Service(way, model, workers)
    try:
        service.reach_all(texts(model, 1)[0])
        yield service
    finally:
        service.stop()


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


def load(service: Service, sent: list[str], seconds: float) -> None:
    """Send the texts again and again, by wrk if it is installed."""
    if shutil.which("wrk") is None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            service.send(sent[:200])
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "texts.lua")
        listed = ",\n".join(json.dumps(text, ensure_ascii=False) for text in sent)
        script.write_text(
            f"local texts = {{\n{listed}\n}}\nlocal place = 0\nfunction request()\n  place = place % #texts + 1\n"
            '  return wrk.format("POST", nil, {["Content-Type"] = "text/plain"}, texts[place])\nend\n',
            encoding="utf-8",
        )
        url = f"http://127.0.0.1:{service.port}/labelservice/"
        options = ["-t", "1", "-c", str(CONNECTIONS), "-d", f"{seconds:.0f}s", "-s", str(script)]
        told = subprocess.run(["wrk", *options, url], check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in told:
        raise RuntimeError(told)


def row(*cells: str) -> str:
    return "".join(f"{cell:>20}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve in three ways under the same load, and compare their memory.")
    parser.add_argument("--model", choices=("jieba", "ja_ginza"), default="jieba", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="of load on each; default: %(default)s")
    options = parser.parse_args()
    sent, lines = texts(options.model, 1000), []
    for way in WAYS:  # in turn, so that none shares the pages of a library with another
        with serving(way, options.model, options.workers) as service:
            load(service, sent, options.seconds)
            loaded = service.holds()
            # Each worker does at once what Python does by itself sooner or later: a full collection.
            service.reach_all("", "/collect")
            print(f"{way}\n\n{service.top()}", flush=True)
            collected = service.holds()
        both = [f"{held.pss / 1e6:.0f} MB, {held.copies:.2f}" for held in (loaded, collected)]
        lines.append(row(way, *both))
    print(row("PSS, in copies", "after the load", "after a collection"), *lines, sep="\n")


if __name__ == "__main__":
    main()
