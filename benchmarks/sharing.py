"""Story 4: N forked workers that read one model. How many copies they hold, and what it costs to keep that at one.

Three models: 300 MB of small Python objects, ``ja_ginza``, 500 MB of tensors; missing ones are left out. Ways:

* no preload: each worker loads its own;
* preload: the parent loads and serves one request, then forks;
* preload + gc.freeze: it freezes before it forks, as the story's author did;
* prepare: ``prefork.prepare``, which also makes the model's objects immortal on CPython 3.12 and newer. On 3.11 it
  cannot, so its figure there is that of freezing.

Each way runs in its own process, which forks the workers. Each worker serves a few requests, reads every object of
the model, runs a full collection, and reports that it is done. Then the memory (PSS) of parent and workers is added up
and divided by what the parent of the way "preload" holds before it forks: one copy, with everything else that a process
needs. Then each worker serves further requests and collects again, which shows the growth.

Nothing writes to the 500 MB of tensors, but each worker that uses them has memory of the library's own. So every tree
is measured a second time with almost no tensors, and that memory is subtracted; the rest is divided by the tensors'
size. Under uvicorn, which spawns its workers, each one either makes its own tensors or maps the file that the first
one published.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import random
import sys
import tempfile
import types
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import _common

from modelguard import allocator, guard, memory, prefork, weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MB = 1e6
#: Objects of the graph, about 525 bytes each with all that it refers to.
FEATURES = 570_000
#: Layers of the tensors, each of WIDTH * WIDTH * 4 bytes; and enough of them to make torch set itself up.
LAYERS, FEW_LAYERS, WIDTH = 477, 1, 512
TENSORS_MB = (LAYERS - FEW_LAYERS) * WIDTH * WIDTH * 4 / MB
TEXTS = ("銀座でランチを食べた。", "山田太郎は東京に住んでいる。", "吾輩は猫である。", "明日の天気は晴れでしょう。")
#: Requests of each worker before it reads the whole model.
FIRST = 20

FORKED = {"none": "no preload", "preload": "preload", "freeze": "preload + gc.freeze", "prepare": "prefork.prepare"}
STARTED = {"own": "each its own", "mapped": "weights.load"}
OURS = ("prepare", "mapped")
WAYS = FORKED | STARTED
WHY_MORTAL = prefork.immortalize_unsupported()


# The models


@dataclass(frozen=True)
class Subject:
    """A model, and what is done with it."""

    title: str
    needs: tuple[str, ...]  # modules without which it is left out
    load: Callable[[], Any]
    serve: Callable[[Any, random.Random], object]  # one request
    read: Callable[[Any], None]  # every object of it
    target: float  # how many copies a prepared tree may hold
    requests: int  # how many each prepared worker serves in the end


class Feature:
    """What the graph is made of."""

    __slots__ = ("index", "name", "weight")

    def __init__(self, number: int) -> None:
        self.name, self.weight = f"n{number}", number * 0.5
        self.index: list[Any] = [number, number + 1, (number, str(number))]


def load_graph() -> dict[str, Feature]:
    return {f"feature-{number:07d}": Feature(number) for number in range(FEATURES)}


def look_up(model: dict[str, Feature], rng: random.Random) -> float:
    return sum(model[f"feature-{rng.randrange(FEATURES):07d}"].weight for _ in range(20))


def read_graph(model: dict[str, Feature]) -> None:
    for name, feature in model.items():
        first, second, (third, text) = feature.index
        assert name, (first, second, third, text, feature.name, feature.weight)


def load_ginza() -> Any:
    import spacy

    return spacy.load("ja_ginza")


def parse(nlp: Any, rng: random.Random) -> object:
    return nlp(rng.choice(TEXTS))


def read_objects(model: Any) -> None:
    """Follow every reference but those that lead out of the model."""
    others = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
    seen: set[int] = set()
    stack = [model]
    while stack:
        one = stack.pop()
        if id(one) not in seen and not isinstance(one, others):
            seen.add(id(one))
            stack += gc.get_referents(one)
            if isinstance(one, dict):  # the collector does not show its keys if all of them are text
                stack += one
    del seen, stack
    allocator.trim()  # the walk took memory of its own, which is no part of the figure


def make_layers(count: int) -> Any:
    import torch

    torch.set_num_threads(1)  # a pool of threads does not survive a fork, and there are more workers than CPUs
    return torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)).eval()


def run_layers(layers: Iterable[Any]) -> None:
    import torch

    with torch.inference_mode():
        out = torch.ones(1, WIDTH)
        for layer in layers:
            out = torch.tanh(layer(out))


def run_some_layers(model: Any, rng: random.Random) -> None:
    run_layers(rng.choices(model, k=4))


def layers(title: str, count: int) -> Subject:
    return Subject(
        title, ("torch",), functools.partial(make_layers, count), run_some_layers, run_layers, 1.1, requests=10_000
    )


SUBJECTS = {
    "graph": Subject("300 MB of objects", (), load_graph, look_up, read_graph, 1.05, requests=10_000),
    "ginza": Subject("ja_ginza", ("spacy", "ja_ginza"), load_ginza, parse, read_objects, 1.3, requests=500),
    "tensors": layers("500 MB of tensors", LAYERS),
    "few": layers("next to no tensors", FEW_LAYERS),
}


OBJECTS, MODELS = ("graph", "ginza"), ("graph", "ginza", "tensors")


# A tree of forks


def work(name: str, way: str, workers: int, requests: int) -> dict[str, Any]:
    """Fork workers, and read their memory: after some requests, after reading the whole model, after the rest."""
    subject, found = SUBJECTS[name], dict[str, Any]()
    model = None if way == "none" else prepared(subject, found) if way == "prepare" else subject.load()
    if way in ("preload", "freeze"):
        subject.serve(model, random.Random(0))
        gc.collect()
        found["alone"] = pss()
    if way == "freeze":
        gc.freeze()
    children = [Worker(subject, model, requests, seed) for seed in range(workers)]
    for phase in ("served", "read", "grown"):
        for child in children:
            child.wait()
        found[phase] = pss(*(child.pid for child in children))
        for child in children:
            child.go_on()
    for child in children:
        os.waitpid(child.pid, 0)
    return found


def prepared(subject: Subject, found: dict[str, Any]) -> Any:
    """Load the model behind a guard and prepare it; note what the preparing alone took."""
    shared = guard(subject.load, reload_on=None, warmup=lambda model: subject.serve(model, random.Random(0)))
    shared.load()
    before = memory.private(fresh=True)
    report = prefork.prepare(shared)
    found["prepare"] = {
        "seconds": report.seconds,
        "MB": (report.private - before) / MB,
        "objects": report.immortal.objects if report.immortal else 0,
    }
    with shared.lease() as model:
        return model


class Worker:
    """A forked process that does one step after another, each on request."""

    def __init__(self, subject: Subject, model: Any, requests: int, seed: int) -> None:
        self._memory_report, ours = os.pipe()
        theirs, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _live(subject, model, requests, random.Random(seed), (theirs, ours))
        os.close(ours)
        os.close(theirs)

    def wait(self) -> None:
        """Wait until it has done the next step."""
        if not os.read(self._memory_report, 1):
            raise RuntimeError(f"worker {self.pid} died")

    def go_on(self) -> None:
        """Make it do the next step, or end."""
        os.write(self._tell, b".")


def _live(subject: Subject, model: Any, requests: int, rng: random.Random, pipes: tuple[int, int]) -> NoReturn:
    status, (orders, answers) = 1, pipes
    try:
        model = subject.load() if model is None else model
        for step, count in (("serve", FIRST), ("read", 0), ("serve", requests)):
            for _ in range(count):
                subject.serve(model, rng)
            if step == "read":
                subject.read(model)
            gc.collect()
            os.write(answers, b".")
            os.read(orders, 1)
        status = 0
    finally:
        os._exit(status)


def pss(*pids: int) -> float:
    """MB that this process and these hold, each shared page divided by the processes that map it."""
    return sum(memory.usage(pid).pss or 0 for pid in (os.getpid(), *pids)) / MB


# Under uvicorn


def create() -> Callable[..., Awaitable[None]]:
    """What each of uvicorn's workers runs: it has read all of the model before it would serve."""
    build = functools.partial(make_layers, int(os.environ["SHARING_LAYERS"]))
    folder = Path(os.environ["SHARING_FOLDER"])
    if os.environ["SHARING_MAPPED"]:
        weights.publish(build, folder / "weights", key="1")  # the first one makes them, the others wait for it
        model = weights.load(build, folder / "weights")
    else:
        model = build()
    run_layers(model)
    gc.collect()

    async def app(*_: Any) -> None:
        run_layers(model)  # no request comes, but the model stays in use

    (folder / f"{os.getpid()}.ready").touch()
    return app


def uvicorn(count: int, workers: int, *, mapped: bool) -> dict[str, Any]:
    """What uvicorn and its workers hold, in MB, once each worker has read the model."""
    from examples._driver import Server  # here, so that no tree that is measured has imported it

    with tempfile.TemporaryDirectory() as folder:
        settings = {"SHARING_LAYERS": str(count), "SHARING_FOLDER": folder, "SHARING_MAPPED": "1" if mapped else ""}
        command = [sys.executable, "-m", "uvicorn", "--factory", f"{Path(__file__).stem}:create", "--port", "0"]
        options = ["--workers", str(workers), "--app-dir", str(Path(__file__).parent), "--log-level", "error"]
        patience = ["--timeout-worker-healthcheck", "100"]  # that many imports of torch at once take their time
        server = Server([*command, *options, *patience], folder=Path(folder), environment=settings)
        try:
            server.wait_until(lambda: len(list(Path(folder).glob("*.ready"))) == workers, "every worker has read", 100)
            pids = (server.process.pid, *(int(file.stem) for file in Path(folder).glob("*.ready")))
            return {"read": sum(memory.usage(pid).pss or 0 for pid in pids) / MB}
        finally:
            server.stop(60)


# The table


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def rows(found: dict[str, dict[str, Any]], workers: int, requests: dict[str, int]) -> list[_common.Row]:
    return [
        *(row for name in OBJECTS if name in found for row in copies(name, found[name])),
        *(tensors("tensors", found["tensors"], found["few"]) if "tensors" in found else ()),
        *(tensors("tensors, uvicorn", found["uvicorn"], found["uvicorn few"]) if "uvicorn" in found else ()),
        *(row for name in MODELS if name in found for row in costs(name, found[name], workers, requests[name])),
    ]


def copies(name: str, trees: dict[str, Any]) -> list[_common.Row]:
    """What each tree holds, relative to what one process holds."""
    subject, alone = SUBJECTS[name], trees["preload"]["alone"]
    # Where no object can be immortal, a worker that reads all of a graph copies all of it.
    judged = name != "graph" or WHY_MORTAL is None
    phases = {"read": "every object read"} | ({"served": f"{FIRST} requests served"} if name == "ginza" else {})
    return [
        row(f"{subject.title}, {phase}: {WAYS[way]}", tree[key] / alone, "x", way, subject.target if judged else None)
        for key, phase in phases.items()
        for way, tree in trees.items()
    ]


def tensors(title: str, trees: dict[str, Any], few: dict[str, Any]) -> list[_common.Row]:
    """What each tree holds in addition to the same tree without tensors, in copies of the tensors."""
    return [
        row(f"{title}: {WAYS[way]}", (tree["read"] - few[way]["read"]) / TENSORS_MB, "x", way, 1.1)
        for way, tree in trees.items()
    ]


def costs(name: str, trees: dict[str, Any], workers: int, requests: int) -> list[_common.Row]:
    """What preparing took, and what further requests add."""
    subject, tree = SUBJECTS[name], trees["prepare"]
    grown = (tree["grown"] - tree["read"]) / workers
    return [
        row(f"  {subject.title}: one process", trees["preload"]["alone"], "MB", "preload"),
        row(f"  {subject.title}: preparing takes", tree["prepare"]["seconds"], "s", "prepare"),
        row(f"  {subject.title}: preparing adds", tree["prepare"]["MB"], "MB", "prepare"),
        row(f"  {subject.title}: objects made immortal", tree["prepare"]["objects"], "", "prepare"),
        row(f"  {subject.title}: {requests:,} further requests add to a worker", grown, "MB", "prepare"),
    ]


def row(name: str, value: float, unit: str, way: str, target: float | None = None) -> _common.Row:
    return _common.Row(name, [value], unit, target if way in OURS else None, ours=way in OURS)


def paint(figure: Figure, lines: list[_common.Row], workers: int, python: str) -> None:
    shown = [line for line in lines if line.unit == "x"]
    title = f"What a parent and {workers} workers hold on {python}"
    _common.bars(figure.subplots(), shown, title, axis="copies of the model; a single process holds one")


def main() -> None:
    benchmark = _common.Benchmark("sharing", "Story 4: memory of N workers with one model")
    workers, share = (2, 0.02) if benchmark.quick else (8, 1.0)
    requests = {name: int(subject.requests * share) for name, subject in SUBJECTS.items()}
    found: dict[str, dict[str, Any]] = {}
    missing = []
    for name, subject in SUBJECTS.items():
        if not installed(*subject.needs):
            missing.append(subject.title)
            continue
        found[name] = {}
        for way in ("preload", "prepare") if benchmark.quick else FORKED:
            print(f"{subject.title}, {WAYS[way]} ...", flush=True)
            count = requests[name] if way == "prepare" else 0
            found[name][way] = _common.fresh(__file__, name, way, str(workers), str(count))
    if installed("torch", "uvicorn"):
        for name, count in (("uvicorn", LAYERS), ("uvicorn few", FEW_LAYERS)):
            found[name] = {}
            for way in STARTED:
                print(f"{count} MB of tensors, {WAYS[way]} ...", flush=True)
                found[name][way] = uvicorn(count, workers, mapped=way == "mapped")
    else:
        missing.append("tensors under uvicorn")
    lines = rows(found, workers, requests)
    notes = [
        "",
        f"A parent and {workers} workers; memory is PSS. x: memory of all of them relative to one process. For",
        "tensors: relative to their size, after the memory of the same tree without them was subtracted.",
        *([f"No object was made immortal: {WHY_MORTAL}."] if WHY_MORTAL else []),
        *([f"Not installed, so left out: {', '.join(missing)}."] if missing else []),
    ]
    python = benchmark.machine["python"]
    benchmark.finish(
        lines, lambda figure: paint(figure, lines, workers, python), size=(10, 8), notes=notes, trees=found
    )


if __name__ == "__main__":
    job = _common.job()
    if job is None:
        main()
    else:
        _common.answer(work(job[0], job[1], int(job[2]), int(job[3])))
