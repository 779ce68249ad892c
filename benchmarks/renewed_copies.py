"""Stories 1 and 4 together: gunicorn workers that share one model, which is renewed while they serve.

Two models, 300 MB of small Python objects and ``ja_ginza`` (left out where it is not installed), and four ways to have
eight workers answer:

* molds: ``modelguard.frameworks.gunicorn`` and a ``TTL``: a mold loads each generation and forks the workers;
* no policy: the same without a ``TTL``, so the master loads once, and nothing is renewed;
* host: ``@isolate(scope="host", workers=2)`` and a ``TTL``: the workers call two processes that they share;
* isolate: plain ``@isolate(workers=1)`` and a ``TTL``: each worker has a mold and a worker process of its own.

Copies are the memory (PSS) of the server and all below it, divided by what one process alone has after it has loaded
the model and read all of it. They are read before the first renewal and after each; where workers read all of the
model as they warm up. Clients (wrk, two connections) ask without a pause, through all renewals, for as many windows of
equal length without a renewal, in the same server of another run. A request is lost if it has no answer, or another
status than 200.

The slope is that of the tree's memory over 30 renewals of a model of 30 MB, a ``TTL`` of 10 s.

A call is timed alone, in one process, on a model that is nothing: what each way adds to it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
import psutil
from examples._driver import Server

from modelguard import prefork

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 8
#: Seconds that a server may take to start, and a renewal to reach all workers.
PATIENCE = 300.0
MORTAL = prefork.immortalize_unsupported()

MODELS = {
    "objects": """
        import random

        class Feature:
            __slots__ = ("index", "name", "weight")
            def __init__(self, number):
                self.name, self.weight = f"n{number}", number * 0.5
                self.index = [number, number + 1, (number, str(number))]

        COUNT = 570_000
        def load():
            return {f"feature-{number:07d}": Feature(number) for number in range(COUNT)}
        def read(model):
            for name, feature in model.items():
                first, second, (third, text) = feature.index
        def use(model):
            return sum(model[f"feature-{random.randrange(COUNT):07d}"].weight for _ in range(200))
    """,
    "ja_ginza": """
        import spacy
        TEXT = "銀座でランチをご一緒しましょう。"
        def load():
            return spacy.load("ja_ginza")
        def read(model):
            for _ in range(3):
                model(TEXT)
        def use(model):
            return len(model(TEXT))
    """,
}
MODELS["small"] = MODELS["objects"].replace("570_000", "57_000")

SERVICE = """
    import os
    from modelguard import TTL, guard, isolate
    from model import load, read, use

    nlp = guard(load, reload_on=POLICY, warmup=read, prefork=PREFORK, name="nlp")

    DECORATOR
    @nlp
    def answer(model):
        return f"{os.getpid()} {use(model)}"

    def app(environ, start_response):
        body = answer().encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]
"""
WAYS = {
    "molds": ("TTL('{ttl}s')", True, ""),
    "no policy": ("None", True, ""),
    "host": ("TTL('{ttl}s')", False, "@isolate(scope='host', workers=2)"),
    "isolate": ("TTL('{ttl}s')", False, "@isolate(workers=1)"),
}

CALLS = """
    import json, time
    from modelguard import guard, isolate
    nlp = guard(dict, reload_on=None)

    @DECORATOR
    @nlp
    def call(model, text):
        return text

    if __name__ == "__main__":
        import calls
        times = []
        for _ in range(3000):
            began = time.perf_counter()
            calls.call("a short text")
            times.append(time.perf_counter() - began)
        print(json.dumps(sorted(times)[len(times) // 2]), flush=True)
"""

ALONE = """
    import json, psutil
    from model import load, read
    from modelguard import guard
    nlp = guard(load, reload_on=None, warmup=read)
    nlp.load()
    print(json.dumps(psutil.Process().memory_full_info().pss))
"""


@dataclass
class Window:
    """What wrk counted in a window."""

    requests: int
    lost: int
    longest: float
    p99: float


@dataclass
class Run:
    """One server, from its start to its end."""

    copies: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


def write(folder: Path, model: str, way: str, ttl: float) -> None:
    policy, shared, decorator = WAYS[way]
    text = SERVICE.replace("POLICY", policy.format(ttl=ttl)).replace("PREFORK", str(shared))
    (folder / "model.py").write_text(textwrap.dedent(MODELS[model]), encoding="utf-8")
    (folder / "service.py").write_text(textwrap.dedent(text.replace("DECORATOR", decorator)), encoding="utf-8")


def python(folder: Path, text: str, name: str = "program.py") -> float:
    """Run a program in the folder; returns the number that it prints."""
    (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
    done = subprocess.run([sys.executable, name], cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1])


@contextlib.contextmanager
def serving(model: str, way: str, ttl: float) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, model, way, ttl)
        ours = ["-c", "python:modelguard.frameworks.gunicorn"] if WAYS[way][1] else ["--preload", "--no-control-socket"]
        command = [sys.executable, "-m", "gunicorn", *ours, "-w", str(WORKERS), "-t", "120", "-b", "127.0.0.1:0"]
        server = Server(
            [*command, "service:app"], folder=folder, environment={"MODELGUARD_RUNTIME_DIR": name}, name=way
        )
        try:
            server.wait_until(lambda: server.port is not None, "its port", PATIENCE)
            server.wait_until_serving(seconds=PATIENCE)
            wait_for_all(server)
            yield server
        finally:
            server.stop()


def wait_for_all(server: Server) -> None:
    server.wait_until(lambda: server.log.count("Booting worker") >= WORKERS, "all workers", PATIENCE)
    seen: set[str] = set()
    for _ in range(40 * WORKERS):  # so that each worker of an isolated function has called it
        seen.add(server.ask("/", timeout=PATIENCE).text.split()[0])
        time.sleep(0.01)


def tree(server: Server) -> int:
    """Bytes of the server and all below it, shared pages counted once, at a moment when none comes or goes."""
    while True:
        before, total = members(server), 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for pid in before:
                total += psutil.Process(pid).memory_full_info().pss
            if before == members(server):
                return total


def settled(server: Server, way: str) -> int:
    """:func:`tree`, when no replacement is under way."""
    if way == "molds":
        top = psutil.Process(server.process.pid)
        server.wait_until(lambda: len(top.children()) == WORKERS + 1, "the end of a replacement", PATIENCE)
    return tree(server)


def members(server: Server) -> set[int]:
    """The processes; a broker is in a session of its own."""
    top = psutil.Process(server.process.pid)
    folder = server_folder(server)
    environments = {one.pid: one.info["environ"] or {} for one in psutil.process_iter(["environ"])}
    below = {pid for pid, variables in environments.items() if variables.get("MODELGUARD_RUNTIME_DIR") == folder}
    return below | {one.pid for one in (top, *top.children(recursive=True))}


def server_folder(server: Server) -> str:
    return str(psutil.Process(server.process.pid).environ()["MODELGUARD_RUNTIME_DIR"])


def load_for(server: Server, seconds: float) -> Window:
    command = ["wrk", "-t", "1", "-c", "2", "-d", f"{seconds:.0f}s", "--latency", "--timeout", "30s", str(server.url)]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"Latency +\S+ +\S+ +(\S+)", text)
    p99, requests = re.search(r"99% +(\S+)", text), re.search(r"(\d+) requests in", text)
    assert found is not None, text
    assert p99 is not None, text
    assert requests is not None, text
    errors = sum(map(int, re.findall(r"(?:connect|read|write|timeout) (\d+)", text)))
    bad = re.search(r"Non-2xx.*: (\d+)", text)
    return Window(int(requests[1]), errors + int(bad[1] if bad else 0), _seconds(found[1]), _seconds(p99[1]))


def _seconds(text: str) -> float:
    for unit, factor in {"us": 1e-6, "ms": 1e-3, "m": 60.0, "s": 1.0}.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise ValueError(text)


def renewals(server: Server, way: str) -> int:
    """How many renewals have reached all workers. A mold of an isolated function is not in the log: by time alone."""
    done = server.log.count("modelguard: prepared nlp") - 1
    return done if server.log.count("is being replaced") >= done * WORKERS and way == "molds" else -1


def watch(model: str, way: str, one: int, *, ttl: float, rounds: int) -> Run:
    run = Run()
    with serving(model, way, ttl) as server:
        run.sizes.append(settled(server, way))
        for _ in range(rounds):
            run.windows.append(load_for(server, ttl))
            run.sizes.append(settled(server, way))
    run.copies = [size / one for size in run.sizes]
    return run


def settled_slope(rounds: int) -> tuple[float, float, list[float]]:
    """MB a renewal, its error, and MB after each renewal of a small model."""
    sizes: list[float] = []
    with serving("small", "molds", 10) as server:
        for number in range(1, rounds + 1):
            server.wait_until(lambda number=number: renewals(server, "molds") >= number, "a renewal", PATIENCE)
            sizes.append(settled(server, "molds") / 1e6)
    return *_common.slope(sizes[len(sizes) // 6 :]), sizes


def call_costs() -> dict[str, float]:
    decorators = {
        "in the process": "(lambda function: function)",
        "isolate": "isolate()",
        "host": "isolate(scope='host')",
    }
    costs = {}
    with tempfile.TemporaryDirectory() as name:
        for way, decorator in decorators.items():
            costs[way] = 1e6 * python(Path(name), CALLS.replace("DECORATOR", decorator), "calls.py")
    return costs


def main() -> None:
    benchmark = _common.Benchmark("renewed_copies", "Eight gunicorn workers that share a model, which is renewed")
    if shutil.which("wrk") is None:
        sys.exit("wrk is not installed")
    ttl, rounds, many = (6, 1, 4) if benchmark.quick else (20, 6, 30)
    models = [name for name in ("objects", "ja_ginza") if name != "ja_ginza" or importlib.util.find_spec("ja_ginza")]
    rows, notes, data = [], [""], dict[str, Any]()
    for model in models:
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), model, "molds", 1)
            one = int(python(Path(name), ALONE))
        runs = {
            way: watch(model, way, one, ttl=ttl, rounds=rounds if way in ("molds", "no policy") else 2) for way in WAYS
        }
        target = 1.15 if model == "objects" and MORTAL is None else None
        for way, run in runs.items():
            goal = target if way == "molds" else None
            rows.append(_common.Row(f"{model}, copies: {way}", run.copies, "x", goal, worst=True, ours=way == "molds"))
            lost = sum(window.lost for window in run.windows)
            rows.append(_common.Row(f"{model}, requests lost: {way}", [lost], "", 0 if way == "molds" else None))
            ratios = [window.longest / window.p99 for window in run.windows]
            rows.append(_common.Row(f"{model}, longest request / p99: {way}", ratios, "x"))
            served = statistics.median(window.requests / ttl for window in run.windows)
            p99, longest = (
                1e3 * statistics.median(getattr(w, what) for w in run.windows) for what in ("p99", "longest")
            )
            notes.append(f"{model}, {way}: {served:.0f} requests/s, p99 {p99:.1f} ms, longest {longest:.0f} ms")
        data[model] = {way: [run.sizes, [vars(window) for window in run.windows]] for way, run in runs.items()}
        notes.append(f"{model}: one process alone {one / 1e6:.0f} MB")
        print(*notes[-len(WAYS) - 1 :], sep="\n", flush=True)
    rise, error, sizes = settled_slope(many)
    rows.append(_common.Row(f"slope over {many} renewals of 30 MB", [rise], "MB", 0.1, ours=True))
    notes.append(
        f"slope {rise:+.3f} +- {error:.3f} MB a renewal; tree {sizes[0]:.1f} MB at first, {sizes[-1]:.1f} at last"
    )
    costs = call_costs()
    rows += [_common.Row(f"a short call: {way}", [cost], "us") for way, cost in costs.items()]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for way, colour in zip(WAYS, (_common.OURS, _common.GREY, _common.PEER, _common.THIRD), strict=True):
            copies = next(row.values for row in rows if row.name == f"objects, copies: {way}")
            axes.plot(range(len(copies)), copies, color=colour, marker="o", markersize=4, label=way)
        axes.set_xlabel(f"windows of {ttl} s")
        axes.set_ylabel("copies")
        axes.set_ylim(bottom=0)
        axes.set_title("300 MB of objects, eight gunicorn workers, renewed in each window")
        axes.legend(frameon=False)

    benchmark.finish(rows, draw, size=(9, 4), notes=notes, runs=data, sizes=sizes, costs=costs)


if __name__ == "__main__":
    main()
