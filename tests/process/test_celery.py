"""Celery with one copy of the model: real workers, over a broker of plain files and over Redis."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Server, run_python, wait_until, write_app

from modelguard.sharing import report

pytest.importorskip("celery")

pytestmark = pytest.mark.timeout(240)

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
    from kombu.transport import filesystem
    from kombu.utils.json import dumps
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

        def put(self, queue, payload, **_):
            name = f"{time.monotonic_ns():020}_{os.urandom(8).hex()}.{queue}.msg"
            partial = HERE / "partial" / name
            partial.write_text(dumps(payload))
            partial.rename(HERE / "queue" / name)

        filesystem.Channel._put = put  # kombu's own loses a message that is read while it is written
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
    import json, tasks
    sent = [tasks.{name}.delay(*call) for call in {calls!r}]
    print(json.dumps([one.get(timeout=150, interval=0.02) for one in sent]))
"""


class Worker(Server):
    """A Celery worker, and the broker that it listens to."""

    def __init__(self, folder: Path, broker: str, *options: str, policy: str = "Uses(10**9)") -> None:
        for name in ("queue", "partial", "control", "results"):
            (folder / name).mkdir()
        (folder / "weights").write_text("1")
        write_app(folder, TASKS.replace("POLICY", policy), "tasks.py")
        self._redis = start_redis(folder) if broker == "redis" else None
        address = f"redis+socket://{folder / 'redis.sock'}" if self._redis else "filesystem://"
        self._environment = {
            "BROKER": address,
            "RESULTS": address if self._redis else (folder / "results").as_uri(),
            "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)]),
            "PYTHONWARNINGS": "ignore",
        }
        command = ("-m", "celery", "-A", "tasks", "worker", "-l", "INFO", "--without-mingle", "--without-gossip")
        super().__init__(folder, *command, *options, environment=self._environment)

    def call(self, name: str, *calls: tuple[Any, ...]) -> list[list[Any]]:
        """Send tasks all at once; their results, in that order."""
        return run_python(CLIENT.format(name=name, calls=calls), 160, **self._environment)

    def work(self, count: int, seconds: float = 0.0) -> list[list[Any]]:
        """Send so many tasks that each take so long."""
        return self.call("work", *((number, seconds) for number in range(count)))

    def kill(self) -> None:
        """Kill the broker as well."""
        super().kill()
        if self._redis is not None:
            self._redis.kill()


def start_redis(folder: Path) -> Server:
    """A Redis that listens on a socket in the folder."""
    path = folder / "redis.sock"
    redis = Server(folder, str(REDIS), "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no")
    redis.wait_until(path.exists, "Redis listens")
    return redis


@contextlib.contextmanager
def running(folder: Path, broker: str, *options: str, policy: str = "Uses(10**9)") -> Iterator[Worker]:
    """A worker that takes tasks."""
    with Worker(folder, broker, *options, policy=policy) as server:
        server.wait_until(lambda: " ready." in server.log, "the worker is ready")
        yield server


def assert_one_copy(server: Worker) -> None:
    """The parent and its two processes hold the model once; Celery itself takes about as much again."""
    tree = report(server.process.pid)

    def is_one_copy() -> bool:  # once those that were being replaced are gone
        nonlocal tree
        tree = report(server.process.pid)
        few = all(process.uss < MODEL_BYTES / 2 for process in tree.processes)
        return 3 == len(tree.processes) and few and MODEL_BYTES < tree.pss < 3 * MODEL_BYTES

    with contextlib.suppress(AssertionError):
        wait_until(is_one_copy, "one copy", seconds=20)
    assert is_one_copy(), tree


@every_pool
def test_processes_share_the_parents_model_and_are_warm_before_the_first_task(broker: str, tmp_path: Path) -> None:
    """Two processes and their parent hold one copy, and no result comes from a process that has not warmed up."""
    with running(tmp_path, broker, "-c", "2") as server:
        results = server.work(20, 0.02)
        assert [[number, "1", True, True] for number in range(20)] == [[one[0], *one[2:]] for one in results]
        assert {one[1] for one in results} <= server.children()
        assert_one_copy(server)
        assert "modelguard: prepared nlp in" in server.log


@every_pool
def test_no_task_is_lost_while_processes_are_replaced(broker: str, tmp_path: Path) -> None:
    """As many results as tasks, each its own, though a due policy keeps replacing the processes that make them."""
    with running(tmp_path, broker, "-c", "2", policy="Uses(5)") as server:
        processes: set[int] = set()
        for _ in range(3):
            results = server.work(60)
            assert [[number, "1", True, True] for number in range(60)] == [[one[0], *one[2:]] for one in results]
            processes |= {one[1] for one in results}
        wait_until(lambda: len(processes | server.children()) >= 4, what="two processes are replaced")
        assert_one_copy(server)
        assert 1 == server.log.count("prepared nlp"), "the parent loaded once"
        assert "exited with" not in server.log
        assert "WorkerLostError" not in server.log


def test_a_replaced_process_gives_back_what_it_had_grown_by(tmp_path: Path) -> None:
    """Memory growth ends with a fresh process that shares the parent's copy, and with no load."""
    with running(tmp_path, "filesystem", "-c", "2", policy="MemoryGrowth('50 MB')") as server:
        first = server.children()
        wait_until(lambda: bool(server.call("leak", ())) and not first <= server.children(), what="one is replaced")
        assert {True} == {word for result in server.work(4) for word in result[3:]}
        assert 1 == server.log.count("prepared nlp")


@every_pool
def test_new_weights_reach_every_process_without_a_lost_task(broker: str, tmp_path: Path) -> None:
    """The parent loads a changed file and prepares again, then each process is replaced. A broken file does nothing."""
    with running(tmp_path, broker, "-c", "2", policy="Modified(WEIGHTS, atomic=True)") as server:
        server.replace_file("weights", "broken")
        wait_until(lambda: "no weights in there" in server.log, what="the load fails")
        assert {"1"} == {one[2] for one in server.work(10)}
        server.replace_file("weights", "2")
        seen: set[str] = set()

        def rolled_out() -> bool:
            results = server.work(40, 0.01)
            assert list(range(40)) == [one[0] for one in results]
            seen.update(one[2] for one in results)
            return {"2"} == {one[2] for one in results}

        wait_until(rolled_out, what="all results are of the new weights")
        assert seen <= {"1", "2"}
        assert [True, True] == server.work(1)[0][3:]
        assert_one_copy(server)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--max-memory-per-child", "30000"),
            "each process would be replaced after every task. Give the guard a MemoryGrowth",
        ),
        (("cold",), "OSError: no warmth"),
    ],
    ids=["limit by peak", "warm-up fails"],
)
def test_a_worker_that_cannot_share_does_not_start(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    """It exits with status 1, and the log says why and what to do."""
    if options == ("cold",):
        (tmp_path / "cold").touch()
        options = ()
    with Worker(tmp_path, "filesystem", "-c", "2", *options) as server:
        assert 1 == server.process.wait(40), server.log
        assert says in server.log


def test_in_a_pool_that_does_not_fork_a_guard_works_as_anywhere(tmp_path: Path) -> None:
    """The solo pool says that it shares nothing, and serves."""
    with running(tmp_path, "filesystem", "-P", "solo") as server:
        assert "modelguard shares no model: Celery's pool celery.concurrency.solo does not fork" in server.log
        assert [[0, server.process.pid, "1", True, True]] == server.work(1)
