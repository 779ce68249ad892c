"""Celery with one copy of the model: real workers, over a broker of plain files and over Redis."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from tests.process.gunicorn_server import until

from modelguard.sharing import report

pytest.importorskip("celery")

pytestmark = pytest.mark.timeout(120)

REDIS = shutil.which("redis-server") if importlib.util.find_spec("redis") else None
MODEL_BYTES = 60_000_000

#: Celery has two pools of its own, and the broker decides: plain files take the one with threads in the parent, Redis
#: the one with an event loop.
every_pool = pytest.mark.parametrize(
    "broker",
    [
        "filesystem",
        pytest.param(
            "redis", marks=pytest.mark.skipif(REDIS is None, reason="redis-server or Python's redis is not installed")
        ),
    ],
)

#: The model is 60 MB that knows its version, and a task reads every page of it. A result is the number that was sent,
#: the process, the version, whether the parent made the model, and whether the process was warm.
TASKS = """
    import os, time
    from pathlib import Path
    from celery import Celery
    from modelguard import TTL, MemoryGrowth, Modified, Uses, guard
    from modelguard.frameworks import celery as sharing

    HERE = Path(__file__).parent
    WEIGHTS = HERE / "weights"
    PARENT, WARMED, HELD = os.getpid(), [], []

    class Model(dict):
        pass

    def load():
        version = WEIGHTS.read_text()
        if version == "broken":
            raise OSError("no weights in there")
        return Model(version=version, pid=os.getpid(), weights=[bytes([n]) * 1_000_000 for n in range(60)])

    def warm(model):
        if (HERE / "cold").exists() and os.getpid() != PARENT:
            raise OSError("no warmth")
        WARMED.append(os.getpid())

    app = Celery("tasks", broker=os.environ["BROKER"], backend=os.environ["RESULTS"])
    app.conf.worker_hijack_root_logger = False
    if os.environ["BROKER"].startswith("filesystem"):
        app.conf.broker_transport_options = {
            "data_folder_in": str(HERE / "queue"),
            "data_folder_out": str(HERE / "queue"),
            "control_folder": str(HERE / "control"),
        }
    nlp = guard(load, reload_on=POLICY, warmup=warm, prefork=True, name="nlp")

    @nlp
    def read(model):
        assert 60 == sum(set(chunk[::4096]) == {chunk[0]} for chunk in model["weights"])
        return [os.getpid(), model["version"], model["pid"] == PARENT, os.getpid() in WARMED]

    @app.task
    def work(number, seconds=0.0):
        time.sleep(seconds)
        return [number, *read()]

    @app.task
    def leak():
        HELD.append(b"x" * 30_000_000)
        return read()

    sharing.install(min_lifetime=0)
"""

#: A client in a process of its own: it sends what it is told to, and prints the results.
CLIENT = """
    import json, sys, tasks
    name, calls = json.loads(sys.argv[1])
    sent = [getattr(tasks, name).delay(*call) for call in calls]
    print(json.dumps([one.get(timeout=60, interval=0.02) for one in sent]))
"""


class Server:
    """A broker and a Celery worker in processes of their own, with their log in a file."""

    def __init__(self, folder: Path, broker: str, *options: str, policy: str = "Uses(10**9)") -> None:
        self.folder = folder
        for name in ("queue", "control", "results"):
            (folder / name).mkdir()
        (folder / "weights").write_text("1")
        (folder / "tasks.py").write_text(textwrap.dedent(TASKS).replace("POLICY", policy))
        self._log = (folder / "log").open("w")
        self._started: list[subprocess.Popen[bytes]] = []
        address = self._start_redis() if broker == "redis" else "filesystem://"
        results = address if broker == "redis" else (folder / "results").as_uri()
        self._environ = {
            **os.environ,
            "BROKER": address,
            "RESULTS": results,
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
            "PYTHONWARNINGS": "ignore",
        }
        command = ["-m", "celery", "-A", "tasks", "worker", "-l", "INFO", "--without-mingle", "--without-gossip"]
        self.process = self._start(sys.executable, *command, *options)

    def _start_redis(self) -> str:
        socket = self.folder / "redis.sock"
        self._start(str(REDIS), "--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
        until(socket.exists, what="Redis listens")
        return f"redis+socket://{socket}"

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=getattr(self, "_environ", None),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def call(self, name: str, *calls: tuple[Any, ...]) -> list[list[Any]]:
        """Send tasks all at once; their results, in that order."""
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CLIENT), json.dumps([name, calls])],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=80,
            check=False,
        )
        assert 0 == done.returncode, f"{done.stderr[-2000:]}\n{self.log}"
        return json.loads(done.stdout.splitlines()[-1])

    def work(self, count: int, seconds: float = 0.0) -> list[list[Any]]:
        return self.call("work", *((number, seconds) for number in range(count)))

    def workers(self) -> set[int]:
        done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, check=False)
        return set(map(int, done.stdout.split()))

    def up(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log
            return " ready." in self.log

        until(ready, what="the worker is ready")

    def write(self, version: str) -> None:
        """Replace the weights atomically."""
        (self.folder / "new").write_text(version)
        (self.folder / "new").rename(self.folder / "weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        self._log.close()


@contextlib.contextmanager
def running(folder: Path, broker: str, *options: str, policy: str = "Uses(10**9)") -> Iterator[Server]:
    """A worker that takes tasks."""
    with Server(folder, broker, *options, policy=policy) as server:
        server.up()
        yield server


def assert_one_copy(server: Server) -> None:
    """The parent and its two processes hold the model once; Celery itself takes about as much again."""
    tree = report(server.process.pid)

    def is_one_copy() -> bool:  # once those that were being replaced are gone
        nonlocal tree
        tree = report(server.process.pid)
        few = all(process.uss < MODEL_BYTES / 2 for process in tree.processes)
        return 3 == len(tree.processes) and few and MODEL_BYTES < tree.pss < 3 * MODEL_BYTES

    with contextlib.suppress(AssertionError):
        until(is_one_copy, seconds=20)
    assert is_one_copy(), tree


@every_pool
def test_processes_share_the_parents_model_and_are_warm_before_the_first_task(broker: str, tmp_path: Path) -> None:
    """Two processes and their parent hold one copy, and no result comes from a process that has not warmed up."""
    with running(tmp_path, broker, "-c", "2") as server:
        results = server.work(20, 0.02)
        assert [[number, "1", True, True] for number in range(20)] == [[one[0], *one[2:]] for one in results]
        assert {one[1] for one in results} <= server.workers()
        assert_one_copy(server)
        assert "modelguard prepared nlp in" in server.log


@every_pool
def test_no_task_is_lost_while_processes_are_replaced(broker: str, tmp_path: Path) -> None:
    """As many results as tasks, each its own, though a due policy keeps replacing the processes that make them."""
    with running(tmp_path, broker, "-c", "2", policy="Uses(5)") as server:
        processes: set[int] = set()
        for _ in range(3):
            results = server.work(60)
            assert [[number, "1", True, True] for number in range(60)] == [[one[0], *one[2:]] for one in results]
            processes |= {one[1] for one in results}
        until(lambda: len(processes | server.workers()) >= 4, what="two processes are replaced")
        assert_one_copy(server)
        assert 1 == server.log.count("prepared nlp"), "the parent loaded once"
        assert "exited with" not in server.log
        assert "WorkerLostError" not in server.log


def test_a_replaced_process_gives_back_what_it_had_grown_by(tmp_path: Path) -> None:
    """Memory growth ends with a fresh process that shares the parent's copy, and with no load."""
    with running(tmp_path, "filesystem", "-c", "2", policy="MemoryGrowth('50 MB')") as server:
        first = server.workers()
        until(lambda: bool(server.call("leak", ())) and not first <= server.workers(), what="one is replaced")
        assert {True} == {word for result in server.work(4) for word in result[3:]}
        assert 1 == server.log.count("prepared nlp")


@every_pool
def test_new_weights_reach_every_process_without_a_lost_task(broker: str, tmp_path: Path) -> None:
    """The parent loads a changed file and prepares again, then each process is replaced. A broken file does nothing."""
    with running(tmp_path, broker, "-c", "2", policy="Modified(WEIGHTS, atomic=True)") as server:
        server.write("broken")
        until(lambda: "no weights in there" in server.log, what="the load fails")
        assert {"1"} == {one[2] for one in server.work(10)}
        server.write("2")
        seen: set[str] = set()

        def rolled_out() -> bool:
            results = server.work(40, 0.01)
            assert list(range(40)) == [one[0] for one in results]
            seen.update(one[2] for one in results)
            return {"2"} == {one[2] for one in results}

        until(rolled_out, what="all results are of the new weights")
        assert seen <= {"1", "2"}
        assert [True, True] == server.work(1)[0][3:]
        assert_one_copy(server)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-memory-per-child", "30000"), "it would be replaced after each task. Give the guard a MemoryGrowth"),
        (("cold",), "OSError: no warmth"),
    ],
    ids=["limit by peak", "warm-up fails"],
)
def test_a_worker_that_cannot_share_does_not_start(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    """It exits with status 1, and the log says why and what to do."""
    if options == ("cold",):
        (tmp_path / "cold").touch()
        options = ()
    with Server(tmp_path, "filesystem", "-c", "2", *options) as server:
        assert 1 == server.process.wait(40), server.log
        assert says in server.log


def test_in_a_pool_that_does_not_fork_a_guard_works_as_anywhere(tmp_path: Path) -> None:
    """The solo pool says that it shares nothing, and serves."""
    with running(tmp_path, "filesystem", "-P", "solo") as server:
        assert "modelguard shares no model: Celery's pool celery.concurrency.solo does not fork" in server.log
        assert [[0, server.process.pid, "1", True, True]] == server.work(1)
