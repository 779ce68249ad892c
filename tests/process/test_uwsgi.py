"""uWSGI with one copy of the model: real servers on loopback, under load where that is the point."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.harness import Clients, Server, wait_until, write_app

from modelguard.sharing import report


def of_this_python() -> str | None:
    """The uWSGI beside the interpreter; linked to another Python, it could not import what this one has."""
    found = shutil.which("uwsgi", path=str(Path(sys.executable).parent))
    version = found and subprocess.run([found, "--python-version"], capture_output=True, text=True, check=False).stdout
    return found if version and version.strip() == platform.python_version() else None


UWSGI = of_this_python()

pytestmark = [
    pytest.mark.skipif(
        UWSGI is None, reason="uWSGI is not installed beside this Python, or not for it: pip install uwsgi"
    ),
    pytest.mark.timeout(120),
]

FIT = ("--master", "--py-call-uwsgi-fork-hooks", "--need-app", "--skip-atexit-teardown")
MODEL_BYTES = 60_000_000

#: The model is 60 MB that knows its version, and a call reads every page of it. An answer is the worker, the version,
#: whether the model was made in the master, and whether the worker was warm.
APP = """
    import logging, os, time
    from pathlib import Path
    from modelguard import TTL, MemoryGrowth, Modified, Uses, guard
    from modelguard.frameworks import uwsgi

    logging.basicConfig(level=logging.INFO)
    HERE = Path(__file__).parent
    WEIGHTS = HERE / "weights"
    MASTER, WARMED, HELD = os.getpid(), [], []

    class Model(dict):
        pass

    def load():
        version = WEIGHTS.read_text()
        if version == "broken":
            raise OSError("no weights in there")
        return Model(version=version, pid=os.getpid(), weights=[bytes([n]) * 1_000_000 for n in range(60)])

    def warm(model):
        if (HERE / "cold").exists() and os.getpid() != MASTER:
            raise OSError("no warmth")
        WARMED.append(os.getpid())

    nlp = guard(load, reload_on=POLICY, warmup=warm, prefork=True, name="nlp")

    @nlp
    def answer(model, path):
        if path == "/slow":
            time.sleep(1)
        if path == "/leak":
            HELD.append(b"x" * 5_000_000)
        assert 60 == sum(set(chunk[::4096]) == {chunk[0]} for chunk in model["weights"])
        return f"{os.getpid()} {model['version']} {model['pid'] == MASTER} {os.getpid() in WARMED}"

    def application(environ, start_response):
        body = answer(environ["PATH_INFO"]).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    print(uwsgi.install(min_lifetime=0), flush=True)
"""


class Uwsgi(Server):
    """uWSGI with the model behind it."""

    def __init__(self, folder: Path, *options: str, policy: str = "Uses(10**9)", app: str = APP) -> None:
        (folder / "weights").write_text("1")
        write_app(folder, app.replace("POLICY", policy))
        command = (str(UWSGI), "--http-socket", "127.0.0.1:0", "--module", "app", "--disable-logging", *options)
        super().__init__(folder, *command, environment={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})

    def words(self, path: str = "/") -> list[str]:
        """What the application says: worker, version, whether the model is the master's, whether it was warm."""
        return self.ask(path, timeout=20).text.split(" ")

    def replaced(self) -> int:
        """How many workers uWSGI has replaced, for whatever reason."""
        return self.log.count("Respawned uWSGI worker")


@contextlib.contextmanager
def running(folder: Path, *options: str, policy: str = "Uses(10**9)") -> Iterator[Uwsgi]:
    """A server that answers."""
    with Uwsgi(folder, *FIT, *options, policy=policy) as server:
        server.wait_until_serving()
        yield server


def all_answer(server: Uwsgi, workers: int) -> set[int]:
    """The workers, when none is starting any more: one that answers says nothing about the others."""
    asked: set[int] = set()

    def so_many() -> bool:
        asked.add(int(server.words()[0]))
        return len(server.children()) == workers and server.children() <= asked

    wait_until(so_many, what="every worker has answered")
    return server.children()


def assert_one_copy(server: Uwsgi, workers: int) -> None:
    """Every worker has read the whole model, and there is one of it."""
    all_answer(server, workers)
    tree = report(server.process.pid)
    assert workers + 1 == len(tree.processes)
    assert MODEL_BYTES < tree.pss < 2 * MODEL_BYTES, tree
    assert all(process.uss < MODEL_BYTES / 2 for process in tree.processes), tree


def test_workers_share_the_masters_model_and_are_warm_before_the_first_request(tmp_path: Path) -> None:
    """Three workers and the master hold one copy, and no answer comes from a worker that has not warmed up."""
    with running(tmp_path, "--processes", "3") as server:
        assert {("1", "True", "True")} == {tuple(server.words()[1:]) for _ in range(20)}
        assert_one_copy(server, workers=3)
        assert "prepared nlp in" in server.log


@pytest.mark.parametrize("threads", ["1", "4"])
def test_no_request_is_lost_while_workers_are_recycled(threads: str, tmp_path: Path) -> None:
    """A due policy has workers replaced by fresh ones that share; every request that was sent is answered."""
    with running(tmp_path, "--processes", "2", "--threads", threads, policy="Uses(20)") as server:
        with Clients(server) as clients:
            wait_until(lambda: server.replaced() >= 4, what="four workers are replaced")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        assert {"1": clients.answered} == clients.versions
        assert len(clients.pids) >= 4
        assert 1 == server.log.count("prepared nlp"), "the master loaded once"
        assert ["1", "True", "True"] == server.words()[1:]


def test_a_recycled_worker_gives_back_what_it_had_grown_by(tmp_path: Path) -> None:
    """Memory growth ends with a fresh worker that shares the master's copy, and with no clients."""
    with running(tmp_path, "--processes", "1", policy="MemoryGrowth('40 MB')") as server:
        first = server.children()
        wait_until(lambda: bool(server.words("/leak")) and not first & server.children(), what="the worker is replaced")
        server.wait_until_serving()
        assert_one_copy(server, workers=1)
        assert 1 == server.log.count("prepared nlp")


def test_a_long_request_is_finished_before_its_worker_goes(tmp_path: Path) -> None:
    """The request that makes the policy due is answered by the worker that ends after it."""
    with running(tmp_path, "--processes", "1", "--threads", "2", policy="Uses(1)") as server:
        for _ in range(2):
            assert ["1", "True", "True"] == server.words("/slow")[1:], server.log
        wait_until(lambda: server.replaced() >= 1, what="a worker is replaced")


def test_new_weights_are_rolled_out_without_a_lost_request(tmp_path: Path) -> None:
    """The master loads a changed file and prepares again, then each worker is replaced. A broken file does nothing."""
    with running(tmp_path, "--processes", "2", policy="Modified(WEIGHTS, atomic=True)") as server:
        with Clients(server) as clients:
            old = server.children()
            server.replace_file("weights", "broken")
            wait_until(lambda: "no weights in there" in server.log, what="the load fails")
            assert old == server.children(), "a failed load leaves all as it was"
            server.replace_file("weights", "2")
            wait_until(lambda: not old & server.children() and server.replaced() == 2, what="both workers are replaced")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        assert {"1", "2"} == set(clients.versions)
        assert ["2", "True", "True"] == server.words()[1:]
        assert_one_copy(server, workers=2)


#: The log of this one takes its time, with a lock of its own as every buffered stream has; workers write to it too.
LOGGED = APP.replace(
    "    logging.basicConfig(level=logging.INFO)\n",
    """
    import sys, threading

    class Slow:
        lock = threading.Lock()

        def write(self, text):
            with self.lock:
                if os.environ["LINE"] in text:
                    (Path(__file__).parent / "writing").touch()
                    time.sleep(2)
                os.write(2, text.encode())

        def flush(self):
            with self.lock:
                pass

    sys.stderr = Slow()
    logging.basicConfig(level=logging.INFO)
""",
).replace('if path == "/slow"', 'logging.info("asked for %s", path)\n        if path == "/slow"')


def words_of_the_next(server: Uwsgi, moment: Path) -> list[str]:
    """What the next worker answers, if the only one ends at that moment of a renewal."""
    server.wait_until_serving()
    (old,) = server.children()
    server.replace_file("weights", "2")
    wait_until(moment.exists, what=f"the master is {moment.name}")
    os.kill(old, signal.SIGKILL)
    return server.words()


@pytest.mark.parametrize("line", ["reload due", "loading generation 2", "prepared nlp"])
def test_no_worker_is_forked_in_the_middle_of_a_line_about_new_weights(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the log's lock for ever, at its first line."""
    monkeypatch.setenv("LINE", line)
    with Uwsgi(tmp_path, *FIT, "--processes", "1", policy="Modified(WEIGHTS, atomic=True)", app=LOGGED) as server:
        assert ["True", "True"] == words_of_the_next(server, tmp_path / "writing")[2:]


#: The master takes a while to fork the child that tries the warm-up of new weights.
PREPARED = (
    APP
    + """
    import threading

    def wait_to_try():
        if threading.current_thread().name == "modelguard-renewal":
            (HERE / "preparing").touch()
            time.sleep(2)

    os.register_at_fork(before=wait_to_try)
"""
)


def test_a_worker_that_ends_while_the_master_prepares_new_weights_is_replaced(tmp_path: Path) -> None:
    """The fork waits for the preparation, which forks a child itself, for a trial."""
    with Uwsgi(tmp_path, *FIT, "--processes", "1", policy="Modified(WEIGHTS, atomic=True)", app=PREPARED) as server:
        assert ["2", "True", "True"] == words_of_the_next(server, tmp_path / "preparing")[1:]


def test_a_worker_that_cannot_warm_up_does_not_accept(tmp_path: Path) -> None:
    """It ends with the reason, and uWSGI tries again; meanwhile the other one answers every request."""
    with running(tmp_path, "--processes", "2") as server:
        killed, other = sorted(all_answer(server, workers=2))
        (tmp_path / "cold").touch()
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: server.replaced() >= 1, what="uWSGI has noticed")
        answers: set[tuple[str, ...]] = set()

        def three_failed() -> bool:
            answers.add(tuple(server.words()))
            return server.log.count("failed loading app in worker") >= 3

        wait_until(three_failed, what="uWSGI tries again")
        assert {(str(other), "1", "True", "True")} == answers, server.log
        assert "OSError: no warmth" in server.log
        (tmp_path / "cold").unlink()
        assert other in all_answer(server, workers=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (FIT[1:], "master=False: must be true: without a master the first worker is the parent of the others"),
        ((*FIT, "--lazy-apps"), "lazy-apps=True: must be false: each worker would load the application by itself"),
        ((FIT[0], *FIT[2:]), "py-call-uwsgi-fork-hooks=False: must be true: without it Python does not notice forks"),
        ((*FIT, "--async", "4", "--ugreen"), "recycling under uWSGI's loop 'async' is not supported here"),
    ],
    ids=["no master", "lazy-apps", "no fork hooks", "async"],
)
def test_a_configuration_that_cannot_share_is_refused_by_name(
    options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    """With need-app uWSGI does not start, and its log says which option is wrong and what to write."""
    with Uwsgi(tmp_path, *options, "--processes", "2") as server:
        wait_until(lambda: says in server.log, what="the refusal")
        server.process.wait(20)
        assert 0 != server.process.returncode


def test_what_uwsgi_should_be_told_besides_is_advised(tmp_path: Path) -> None:
    """Two options that are needed for good service, though not for sharing, are named in the log."""
    with Uwsgi(tmp_path, *FIT[:2], "--processes", "1") as server:
        server.wait_until_serving()
        assert "uWSGI: set 'need-app = true'" in server.log
        assert "uWSGI: set 'skip-atexit-teardown = true'" in server.log


BATCHED = """
    import os
    from modelguard import batched
    from modelguard.frameworks import uwsgi

    MASTER = os.getpid()

    @batched(max_size=4)
    def predict(paths):
        return [f"{os.getpid()} batched {os.getpid() != MASTER}" for _ in paths]

    def application(environ, start_response):
        body = predict(environ["PATH_INFO"]).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    print(uwsgi.install(), flush=True)
"""


def test_an_application_that_has_batched_functions_alone(tmp_path: Path) -> None:
    """It starts, and nothing is shared."""
    with Uwsgi(tmp_path, *FIT, "--enable-threads", app=BATCHED) as server:
        server.wait_until_serving()
        assert ["batched", "True"] == server.words()[1:]
        assert "prepared a process without guards" in server.log
