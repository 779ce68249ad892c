"""The report of real process trees, and `modelguard top` on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import pytest
from tests.process.harness import run_python

from modelguard.sharing._memory_report import ProcessReport, TreeWatch, python_trees, report

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="reads other processes through /proc"),
]

MB = 1_000_000

# A parent with 100 MB in one block and as much in objects, and three workers that run until their input ends. The
# second reads every object, the third writes to the block.
SERVER = """
import os, sys

objects = [{"number": str(number)} for number in range(400_000)]
block = bytearray(os.urandom(1)) * 100_000_000

def read():
    return sum(len(one["number"]) for one in objects)

def write():
    block[:] = bytes(1) * len(block)

ready, told = os.pipe()
for work in (lambda: None, read, write):
    if os.fork() == 0:
        work()
        os.write(told, b".")
        sys.stdin.read()
        os._exit(0)
for _ in range(3):
    os.read(ready, 1)
print("ready", flush=True)
sys.stdin.read()
"""

# Another 50 MB for every line that it reads.
GROWING = """
import os, sys

held = []
print("ready", flush=True)
for line in sys.stdin:
    held.append(bytearray(os.urandom(1)) * 50_000_000)
    print("grown", flush=True)
"""

# Blocks of a size that Python leaves to malloc, and that malloc keeps in its heap.
BLOCKS = """
import sys

held = [bytes(1000) for _ in range(60_000)]
print("ready", flush=True)
sys.stdin.read()
"""


# A guard that is paused, a child that is forked then, and resumes, and one that does not.
PAUSED = """
import os, sys

from modelguard import guard

nlp = guard(dict, reload_on=None, name="nlp")
nlp.pause()
ready, told = os.pipe()
for resume in (True, False):
    if os.fork() == 0:
        if resume:
            nlp.resume()
        os.write(told, b".")
        sys.stdin.read()
        os._exit(0)
for _ in range(2):
    os.read(ready, 1)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A program in an interpreter of its own, once it is ready; its input ends with the block."""
    command = [sys.executable, "-c", program, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert "ready\n" == stream(process.stdout).readline()
            yield process
        finally:
            stream(process.stdin).close()


def stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A server of one parent and three workers, with a secret on its command line."""
    with running(SERVER, "--api-key", "s3cret") as process:
        yield process


@pytest.fixture(scope="module")
def workers(server: subprocess.Popen[str]) -> list[ProcessReport]:
    """The reports of the three workers."""
    return list(report(server.pid).processes[1:])


def test_pss_tells_copies_and_rss_does_not() -> None:
    """Four processes that share 100 MB hold about one copy, while RSS shows four."""
    lazy = SERVER.replace("(lambda: None, read, write)", "[lambda: None] * 3").replace("400_000", "1")
    with running(lazy) as server:
        tree = report(server.pid, model_bytes="100 MB")
        assert 4 == len(tree.processes)
        assert 90 * MB < tree.pss < 180 * MB
        assert 380 * MB < tree.rss
        assert tree.copies < 1.8
        assert report(server.pid).copies < 1.6  # in copies of the parent, its libraries included


def test_an_idle_worker_has_hardly_grown(workers: list[ProcessReport]) -> None:
    """A fork that only waits holds almost nothing alone, known at the first look."""
    idle = workers[0]
    assert idle.since_birth is not None
    assert idle.since_birth < 15 * MB
    assert 180 * MB < idle.rss


def test_reading_objects_copies_pages_of_pythons_arenas(workers: list[ProcessReport]) -> None:
    """Every read writes reference counts, and the report shows where."""
    reading = workers[1]
    assert reading.since_birth is not None
    assert reading.where.python is not None
    assert 25 * MB < reading.since_birth
    assert 20 * MB < reading.where.python + reading.where.mixed
    assert 5 * MB < reading.where.python  # those arenas that lie alone: how many is up to chance
    assert reading.where.heap < 10 * MB


def test_writing_to_a_block_copies_no_arenas(workers: list[ProcessReport]) -> None:
    """Written tensors and arrays are distinguished from Python's objects."""
    writing = workers[2]
    assert writing.where.python is not None
    assert 95 * MB < writing.where.mixed
    assert writing.where.python < 15 * MB


def test_the_places_add_up(workers: list[ProcessReport]) -> None:
    """Private memory is accounted for to the last page."""
    for worker in workers:
        where = worker.where
        parts = (where.python or 0, where.heap, where.mixed, where.stacks, where.files)
        assert worker.uss == sum(parts)


def test_small_blocks_are_in_the_heap() -> None:
    """What malloc keeps in its heap is neither Python's nor a large block."""
    with running(BLOCKS) as process:
        where = report(process.pid).processes[0].where
        assert 50 * MB < where.heap
        assert where.mixed < 15 * MB


def test_growth_since_the_first_look() -> None:
    """A program that was executed is watched from the first look on."""
    with running(GROWING) as process:
        watch = TreeWatch(process.pid)
        first = watch.look().processes[0]
        stream(process.stdin).write("more\n")
        stream(process.stdin).flush()
        stream(process.stdout).readline()
        second = watch.look().processes[0]
        assert [None, None] == [first.since_seen, first.since_birth]
        assert second.since_birth is None
        assert second.since_seen is not None
        assert 45 * MB < second.since_seen < 80 * MB


def test_a_python_that_was_started_by_one_is_no_fork_of_it() -> None:
    """A spawned worker, which is a new interpreter, is not reported as a fork."""
    with running(GROWING) as process:
        tree = report([os.getpid(), process.pid])
        assert [None, None] == [one.since_birth for one in tree.processes]


def test_a_server_is_found_without_its_number(server: subprocess.Popen[str]) -> None:
    """The server's parent is the top of a tree, and its workers are not."""
    found = python_trees(without=(os.getpid(),))
    assert server.pid in found
    assert {process.pid for process in report(server.pid).processes[1:]}.isdisjoint(found)


def test_a_process_that_has_ended() -> None:
    """A watch gives an error when its process is gone, and never shows another one instead."""
    with running(GROWING) as process:
        watch = TreeWatch(process.pid)
        watch.look()
        stream(process.stdin).close()
        process.wait()
        with pytest.raises(ProcessLookupError, match=f"process {process.pid} does not exist"):
            watch.look()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused() -> None:
    """Without permission nothing is guessed, and the error says who may read it."""
    program = """
    import json, os
    from modelguard.sharing._memory_report import report
    report()  # what is imported late is there before the rights go
    read, write = os.pipe()
    if os.fork() == 0:
        os.setuid(65534)
        try:
            report(os.getppid())
        except PermissionError as error:
            os.write(write, error.strerror.encode())
        os._exit(0)
    os.close(write)
    print(json.dumps(os.read(read, 1000).decode()))
    """
    assert "belongs to another user; inspect it as its owner or as root" in run_python(program, 30)


def top(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelguard", "top", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_the_table(server: subprocess.Popen[str]) -> None:
    """One table of the whole tree is printed, without the secret on its command line."""
    done = top(str(server.pid), "--once")
    assert (0, "") == (done.returncode, done.stderr)
    assert "4 processes use" in done.stdout
    assert "s3cret" not in done.stdout
    assert done.stdout.splitlines()[0].endswith("RSS (misleading)")


def test_json(server: subprocess.Popen[str]) -> None:
    """Another program gets the same figures in bytes."""
    done = top(str(server.pid), "--once", "--json", "--model-bytes", "200 MB")
    (tree,) = json.loads(done.stdout)["trees"]
    assert [server.pid] * 3 == [process["parent"] for process in tree["processes"][1:]]
    assert tree["pss"] == sum(process["pss"] for process in tree["processes"])
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize("words", [("2147483647",), ("web",), ("1", "--interval", "never")])
def test_what_cannot_be_looked_at(words: tuple[str, ...]) -> None:
    """Unknown and invalid process ids end with status 2 and one line."""
    done = top(*words)
    assert (2, "") == (done.returncode, done.stdout)
    assert 1 == len(done.stderr.splitlines())


def test_a_watch_ends_well_when_it_is_interrupted(server: subprocess.Popen[str]) -> None:
    """Ctrl-C ends it with status 0 and without a traceback."""
    command = [sys.executable, "-m", "modelguard", "top", str(server.pid), "--json", "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watch:
        looks = [json.loads(stream(watch.stdout).readline()) for _ in range(2)]
        watch.send_signal(signal.SIGINT)
        _, complaint = watch.communicate(timeout=30)
    assert (0, "") == (watch.returncode, complaint)
    seen = [look["trees"][0]["processes"][1]["since_seen"] for look in looks]
    assert seen[0] is None
    assert isinstance(seen[1], int)


def test_a_watch_ends_with_its_terminal(server: subprocess.Popen[str]) -> None:
    """Also where no SIGHUP tells it that the terminal has gone."""
    ours, its = os.openpty()
    command = [sys.executable, "-m", "modelguard", "top", str(server.pid), "--interval", "0.2"]
    with subprocess.Popen(command, stdout=its, stderr=subprocess.PIPE, text=True, start_new_session=True) as watch:
        os.close(its)
        os.read(ours, 1)
        os.close(ours)
        try:
            _, complaint = watch.communicate(timeout=30)
        finally:
            watch.kill()
    assert (2, "modelguard: the output could not be written: Input/output error\n") == (watch.returncode, complaint)


def test_a_pause_is_seen_from_outside() -> None:
    """In the process that is paused and in a child that was forked then, until that one resumes."""
    with running(PAUSED) as process:
        tree = report(process.pid)
        assert [("nlp",), (), ("nlp",)] == [one.paused for one in tree.processes]
        shown = top(str(process.pid), "--once").stdout
        paused = [str(one.pid) for one in tree.processes if one.paused]
        assert f"Paused: nlp in {', '.join(paused)}." in shown
