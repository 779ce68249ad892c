"""Isolated functions where something runs out or is wrong from the start: each call has an answer or a named error."""

from __future__ import annotations

import os
import resource
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import cgroup, run_python, wait_until

from modelguard.errors import CircuitOpen, DeadlineExceeded, LoadFailed, ModelGuardError

pytestmark = pytest.mark.timeout(120)

APP = """
from modelguard import Backoff, Loading, guard, isolate

@isolate(workers=2, timeout="30s")
@guard(dict, reload_on=None, loading=Loading(backoff=Backoff(0.05, 0.2)))
def echo(model, value):
    return value
"""

BEGIN = """
import json, os, resource, socket, sys, time
sys.path.insert(0, {folder!r})
from app import echo
from modelguard.errors import ModelGuardError
"""


def run(folder: Path, program: str) -> object:
    """Run a program that uses ``echo``; returns the JSON that it prints."""
    (folder / "app.py").write_text(APP)
    return run_python(BEGIN.format(folder=str(folder)) + textwrap.dedent(program), 60)


def no_children() -> bool:
    """Whether all processes of this one have ended."""
    return not psutil.Process().children(recursive=True)


def test_large_content_without_room_for_shared_memory(tmp_path: Path) -> None:
    """Where files and shared memory may not grow, the socket takes 10 MB there and back."""
    program = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        value = os.urandom(10_000_000)
        with echo:
            print(json.dumps([value == echo(value), value == echo([value, bytearray(value)])[0]]))
    """
    assert [True, True] == run(tmp_path, program)


FUNCTIONS = """
from modelguard import Backoff, Loading, guard, isolate, pool

QUICK = Loading(backoff=Backoff(0.05, 0.2))
loaded = guard(dict, reload_on=None, loading=QUICK)
voices = pool(lambda key: [key], max_memory="1 GB", loading=QUICK)

def answer(model, key="a"):
    return key

guarded = guard(dict, reload_on=None, loading=QUICK)(answer)
pooled = voices(key="key")(answer)

@isolate(workers=2)
@guard(dict, reload_on=None, loading=QUICK)
def process(model, key="a"):
    return key

@isolate(workers=1)
@voices(key="key")
def of_pool(model, key="a"):
    return key

@isolate(workers=1, start="spawn")
@guard(dict, reload_on=None, loading=QUICK)
def spawned(model, key="a"):
    return key

@isolate(workers=1, scope="host")
@guard(dict, reload_on=None, loading=QUICK)
def host(model, key="a"):
    return key

@isolate(workers=1, scope="host")
@guard(dict, reload_on=None, loading=QUICK)
def stream(model):
    yield from "ab"
"""


@pytest.mark.parametrize("kind", ["guarded", "pooled", "process", "of_pool", "spawned", "host"])
def test_no_descriptor_is_left_for_the_first_call(tmp_path: Path, kind: str) -> None:
    """It fails with the system's reason, and the next one succeeds when there are descriptors again."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = f"""
        import json, os, resource, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import functions
        from modelguard.errors import ModelGuardError
        call = functions.{kind}
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        seen = []
        try:
            call()
        except ModelGuardError as error:
            seen.append([type(error).__name__, "Too many open files" in str(error)])
        for fd in held:
            os.close(fd)
        until = time.monotonic() + 60
        while True:
            try:
                seen.append(call())
                break
            except ModelGuardError:
                assert time.monotonic() < until
                time.sleep(0.05)
        print(json.dumps(seen))
    """
    runtime_folder = {"MODELGUARD_RUNTIME_DIR": str(tmp_path / "runtime")}
    assert [["LoadFailed", True], "a"] == run_python(program, 90, **runtime_folder)


def test_no_descriptor_is_left_for_a_call(tmp_path: Path) -> None:
    """Small calls need none. A large result fails by name or is answered, and nothing is broken afterwards."""
    program = """
        with echo:
            echo(1)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            held = []
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                pass
            seen = [echo(2)]
            try:
                seen.append(len(echo(bytes(10_000_000))))
            except ModelGuardError as error:
                seen.append(type(error).__name__)
            seen.append(echo(3))
            for fd in held:
                os.close(fd)
            seen.append(len(echo(bytes(10_000_000))))
        print(json.dumps(seen))
    """
    small, large, after, again = run(tmp_path, program)  # type: ignore[misc]
    assert (2, 3, 10_000_000) == (small, after, again)
    assert large in ("TransferRefused", 10_000_000)


def test_no_descriptor_is_left_in_a_mold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no new worker, and is replaced; its other one ends its call before."""
    monkeypatch.setenv("ISOLATION_NO_FORKS", str(tmp_path / "unused"))
    there = tmp_path / "there"
    with functions.two_forks as function:
        function.load()
        mold = function.status().mold
        assert mold is not None
        call = function.submit(str(there))
        wait_until(lambda: "busy" in {one.state for one in function.status().workers}, "the call runs")
        used = {int(fd.name) for fd in Path(f"/proc/{mold}/fd").iterdir()}
        limit = min(set(range(max(used) + 2)) - used)
        resource.prlimit(mold, resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        (idle,) = (one.pid for one in function.status().workers if one.state == "idle")
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: function.status().mold not in (mold, None), "another mold")
        there.touch()
        assert mold == call.result(30)


def test_no_descriptor_is_left_to_ask_for_the_status(tmp_path: Path) -> None:
    """While a call has the only connection to the broker of the host, ``status()`` says what that has said last."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = f"""
        import json, os, resource, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from functions import stream
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with stream:
            part = stream()
            next(part)
            held = []
            try:
                while True:
                    held.append(os.dup(0))
            except OSError:
                pass
            seen = [stream.status().state]
            for fd in held:
                os.close(fd)
            print(json.dumps([*seen, stream.status().state, *part]))
    """
    runtime_folder = {"MODELGUARD_RUNTIME_DIR": str(tmp_path / "runtime")}
    assert ["ready", "ready", "b"] == run_python(program, 90, **runtime_folder)


def test_a_warm_up_that_ends_its_process() -> None:
    """The mold ends with it, and nothing else: the load fails, and the error has the exit status."""
    with pytest.raises(LoadFailed, match="exit status 7"), functions.dies_warming:
        pass
    functions.dies_warming.close()
    wait_until(no_children, "the end of the mold")


def test_a_timeout_that_no_call_meets() -> None:
    """Each call fails at it; then the breaker refuses them at once, instead of killing worker after worker."""
    with functions.hopeless as hopeless:
        seen: list[type] = []
        while CircuitOpen not in seen and len(seen) < 100:  # some find no worker yet, which says nothing of the model
            with pytest.raises(ModelGuardError) as raised:
                hopeless()
            seen.append(raised.type)
        assert seen == [*[DeadlineExceeded] * (len(seen) - 1), CircuitOpen]
        assert len(seen) > 2
    wait_until(no_children, "the end of the mold")


def test_a_mold_that_cannot_fork_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives it no process, it is given up after two attempts, and the next one serves."""
    switch = tmp_path / "no more forks"
    monkeypatch.setenv("ISOLATION_NO_FORKS", str(switch))
    with functions.forks as forks:
        first = forks()
        switch.write_text(str(forks.status().mold))
        for worker in forks.status().workers:
            os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: forks.status().mold not in (first, None), "the next mold")
        assert first != forks()
    wait_until(no_children, "the end of all molds")


def test_workers_that_serve_outlast_new_ones_that_do_not_come_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call is lost while a mold gets no new worker, and the model cannot be loaded: then the next mold serves."""
    switch, weights = tmp_path / "no more forks", tmp_path / "weights"
    monkeypatch.setenv("ISOLATION_NO_FORKS", str(switch))
    monkeypatch.setenv("ISOLATION_SWITCH", str(weights))
    with functions.two_forks as forks, ThreadPoolExecutor(1) as threads:
        first = forks()
        running = threads.submit(forks, str(tmp_path / "go"))
        wait_until(lambda: any(one.state == "busy" for one in forks.status().workers), "the call")
        switch.write_text(str(forks.status().mold))
        weights.write_text("fail")
        (idle,) = (one.pid for one in forks.status().workers if one.state == "idle")
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: forks.status().state == "degraded", "the load that fails")
        (tmp_path / "go").touch()
        assert first == running.result(30) == forks()
        assert forks.ready
        weights.unlink()
        wait_until(lambda: first != forks(), "the next mold")
    wait_until(no_children, "the end of all molds")


def test_a_worker_that_the_kernel_kills_for_want_of_memory_is_named(tmp_path: Path) -> None:
    """The error says who has sent SIGKILL if the cgroup has counted it, and not if somebody else has."""
    (tmp_path / "filler.py").write_text(
        "import os, signal\n"
        "from modelguard import isolate\n"
        "@isolate(workers=1)\n"
        "def fill(size):\n"
        "    return len(bytearray(b'x') * size) if size else os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    program = """
        open("CGROUP/cgroup.procs", "w").write(str(os.getpid()))
        from filler import fill
        said = []
        for size in (0, 400_000_000, 0):
            try:
                fill(size)
            except ModelGuardError as error:
                said.append(str(error).partition("the call: ")[2])
        fill.close()
        print(json.dumps(said))
    """
    with cgroup(250_000_000) as made:
        said = run(tmp_path, program.replace("CGROUP", made))
    assert ["SIGKILL", "SIGKILL, by the kernel's OOM killer, probably", "SIGKILL"] == said
