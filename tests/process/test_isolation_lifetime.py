"""Nothing outlives its owner, wherever that owner runs: programs of every kind, killed in every way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import wrapt
from tests.process.harness import alive, run_python, wait_until

import modelguard

pytestmark = pytest.mark.timeout(120)

MODEL = """
import os, subprocess, time
from modelguard import guard, isolate

def load():
    return list(range(100_000))

@isolate(workers=2, timeout="60s")
@guard(load, reload_on=None)
def predict(model, delay=0.0):
    time.sleep(delay)
    return os.getpid()

@isolate(workers=1)
@guard(load, reload_on=None)
def spawns(model):
    return subprocess.Popen(["sleep", "600"]).pid

@isolate(workers=1)
@guard(lambda: time.sleep(600), reload_on=None)
def never_loads(model):
    pass

@isolate(workers=1, start="spawn")
@guard(lambda: time.sleep(600), reload_on=None)
def never_loads_alone(model):
    pass
"""

OWNER = """
import json, sys, threading, time, os
sys.path.insert(0, {folder!r})
import app
if {loading!r}:
    threading.Thread(target=getattr(app, {loading!r}), daemon=True).start()
    time.sleep(2)
    print(json.dumps([os.getpid()]), flush=True)
else:
    pids = [app.predict(), app.spawns(), app.predict.status().mold, app.spawns.status().mold]
    threading.Thread(target=app.predict, args=(600.0,), daemon=True).start()
    time.sleep(0.3)
    print(json.dumps(pids), flush=True)
{end}
"""


@contextmanager
def owner(folder: Path, end: str = "time.sleep(600)", *, loading: str = "") -> Iterator[subprocess.Popen[str]]:
    """Run a program that has workers, one of them in a long call, and whose model has started a program."""
    (folder / "app.py").write_text(MODEL)
    program = OWNER.format(folder=str(folder), end=end, loading=loading)
    command, pipe = [sys.executable, "-c", program], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe if loading else None, text=True) as process:
        yield process
        process.kill()


def family(process: subprocess.Popen[str]) -> set[psutil.Process]:
    """All descendants of the owner, once it has printed its line."""
    assert process.stdout is not None
    json.loads(process.stdout.readline())
    return set(psutil.Process(process.pid).children(recursive=True))


def gone(processes: set[psutil.Process]) -> bool:
    """Whether none of them runs any more; what init has not collected yet does not run."""
    return not [one for one in processes if alive(one.pid)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_killed_owner(tmp_path: Path, number: signal.Signals) -> None:
    """No mold, no worker, no busy worker, and no program that the model has started."""
    with owner(tmp_path) as process:
        processes = family(process)
        assert len(processes) >= 6
        process.send_signal(number)
        wait_until(lambda: gone(processes), f"the end of {processes}", 20.0)


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise SystemExit(3)", "os._exit(1)", "1 / 0", "os.abort()"])
def test_nothing_outlives_an_owner_that_ends(tmp_path: Path, end: str) -> None:
    """However it ends, and it does not wait for the call that runs."""
    with owner(tmp_path, end) as process:
        processes = family(process)
        process.wait(30)
        wait_until(lambda: gone(processes), f"the end of {processes}", 20.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_that_has_just_been_forked_outlasts_a_signal_to_all(tmp_path: Path, number: signal.Signals) -> None:
    """As older ones do: the owner decides when its workers end."""
    (tmp_path / "app.py").write_text("""
import os, time
from modelguard import guard, isolate

def load():
    os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # what modelguard's own hooks take, drawn out
    return []

@isolate(workers=1)
@guard(load, reload_on=None)
def predict(model):
    return os.getpid()
""")
    program = f"""
        import json, os, psutil, signal, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import app
        old = app.predict()
        others = set(psutil.Process().children(recursive=True))
        os.kill(old, signal.SIGKILL)
        while not (new := set(psutil.Process().children(recursive=True)) - others):
            time.sleep(0.001)
        for process in psutil.Process().children(recursive=True):
            process.send_signal({int(number)})
        app.predict()
        while any(worker.state == "starting" for worker in app.predict.status().workers):
            time.sleep(0.01)
        print(json.dumps([one.pid for one in new if not one.is_running()] + [app.predict.status().crashed]))
        """
    assert [1] == run_python(program, 60)  # the one that was killed by hand


def test_a_mold_that_loads_ends_with_its_owner(tmp_path: Path) -> None:
    """While a load holds the GIL, Python runs no handler: the kernel does it."""
    with owner(tmp_path, loading="never_loads") as process:
        processes = family(process)
        assert processes
        process.kill()
        wait_until(lambda: gone(processes), "the end of the mold", 20.0)


def test_an_exit_while_a_mold_loads_is_no_failed_load(tmp_path: Path) -> None:
    """The exit ends the load, and announces no next attempt."""
    at_exit = """
import logging
from modelguard.isolation import _mold_owner, status
logging.basicConfig()
status.refuse_calls()
_mold_owner.end_all()
time.sleep(1)
"""
    with owner(tmp_path, at_exit, loading="never_loads") as process:
        everyone = family(process)
        assert process.wait(60) == 0
        wait_until(lambda: gone(everyone), "the end of all processes")
        assert process.stderr is not None
        assert "load failed" not in process.stderr.read()


@pytest.mark.parametrize("what", ["never_loads", "never_loads_alone"])
def test_an_exit_waits_for_no_load_that_it_has_ended(tmp_path: Path, what: str) -> None:
    """Neither that of a mold nor that of a worker without one."""
    at_exit = "from modelguard.runtime import fork_hooks\nfork_hooks.GRACE = 90.0"
    with owner(tmp_path, at_exit, loading=what) as process:
        everyone = family(process)
        assert process.wait(60) == 0
        wait_until(lambda: gone(everyone), "the end of all processes")


def test_no_zombie_and_no_descriptor_is_left(tmp_path: Path) -> None:
    """After many replacements and a close, the owner is as it was."""
    (tmp_path / "app.py").write_text(MODEL)
    program = f"""
        import json, os, signal, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import app, psutil
        me = psutil.Process()

        def cycle():
            with app.predict:
                for _ in range(10):
                    os.kill(app.predict(), signal.SIGKILL)
                    try:
                        app.predict()
                    except Exception:
                        pass
        cycle()
        time.sleep(1.5)
        before = me.num_fds()
        cycle()
        time.sleep(1.5)
        print(json.dumps([me.num_fds() - before, len(me.children(recursive=True))]))
    """
    assert [0, 0] == run_python(program, 90)


class TestPrograms:
    SCRIPT = """
        import os
        from modelguard import guard, isolate

        class Text:
            def __init__(self, value):
                self.value = value

        @isolate(workers=1)
        @guard(dict, reload_on=None)
        def length(model, text):
            return len(text.value), os.getpid()
    """
    MAIN = """
        if __name__ == "__main__":
            found, pid = length(Text("abc"))
            assert pid != os.getpid()
            print(found)
    """

    def run(self, command: list[str], folder: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, timeout=60, check=False)

    def test_a_script(self, tmp_path: Path) -> None:
        """Functions and classes of the main script are found by the mold."""
        (tmp_path / "script.py").write_text(textwrap.dedent(self.SCRIPT) + textwrap.dedent(self.MAIN))
        done = self.run([sys.executable, "script.py"], tmp_path)
        assert "3\n" == done.stdout, done.stderr

    def test_a_module_run_with_m(self, tmp_path: Path) -> None:
        """So are those of `python -m package.module`."""
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "main.py").write_text(textwrap.dedent(self.SCRIPT) + textwrap.dedent(self.MAIN))
        done = self.run([sys.executable, "-m", "package.main"], tmp_path)
        assert "3\n" == done.stdout, done.stderr

    def test_a_script_without_a_main_guard(self, tmp_path: Path) -> None:
        """Its calls would run again in each mold: the error says what to write."""
        script = textwrap.dedent(self.SCRIPT) + "print(length(Text('abc')))\n"
        (tmp_path / "script.py").write_text(script)
        done = self.run([sys.executable, "script.py"], tmp_path)
        assert "if __name__ == '__main__':" in done.stderr
        assert done.returncode

    @pytest.mark.parametrize("load", ["load()", "reload(wait=False)"])
    @pytest.mark.parametrize("scope", ["process", "host"])
    def test_a_module_that_loads_what_it_defines(self, tmp_path: Path, scope: str, load: str) -> None:
        """Each mold imports it too, and starts no mold in turn."""
        module = textwrap.dedent(self.SCRIPT).replace("workers=1", f'workers=1, scope="{scope}"')
        note = "with open('imports', 'a') as file:\n    file.write('x')\n"
        (tmp_path / "module.py").write_text(f"{module}{note}length.{load}\n")
        (tmp_path / "script.py").write_text(
            "import module\nif __name__ == '__main__':\n    print(module.length(module.Text('abc'))[0])\n"
        )
        done = self.run([sys.executable, "script.py"], tmp_path)
        assert ("3\n", "xx") == (done.stdout, (tmp_path / "imports").read_text()), done.stderr

    def test_a_module_whose_folder_is_on_the_path_for_its_import_only(self, tmp_path: Path) -> None:
        """Its molds find it too. Celery takes the folder of the tasks off ``sys.path`` when it has imported them."""
        (tmp_path / "tasks").mkdir()
        (tmp_path / "tasks" / "module.py").write_text(textwrap.dedent(self.SCRIPT))
        script = """
            import os, sys
            sys.path.insert(0, os.path.abspath("tasks"))
            from module import Text, length
            del sys.path[0]
        """
        done = self.run([sys.executable, "-c", textwrap.dedent(script) + textwrap.dedent(self.MAIN)], tmp_path)
        assert "3\n" == done.stdout, done.stderr

    def test_a_program_that_keeps_each_distribution_in_a_folder_of_its_own(self, tmp_path: Path) -> None:
        """Its molds find them as it does, which puts them on ``sys.path`` itself, as PEX and buildout do."""
        folders = [str(Path(one.__path__[0]).parent) for one in (modelguard, wrapt)]
        (tmp_path / "module.py").write_text(textwrap.dedent(self.SCRIPT))
        (tmp_path / "script.py").write_text(
            f"import sys\nsys.path += {folders}\nfrom module import *{textwrap.dedent(self.MAIN)}"
        )
        done = self.run([sys.executable, "-S", "-E", "script.py"], tmp_path)
        assert "3\n" == done.stdout, done.stderr

    def test_a_program_that_comes_by_standard_input(self, tmp_path: Path) -> None:
        """Its molds need no main script, which is in no file: the function is in a module."""
        (tmp_path / "module.py").write_text(textwrap.dedent(self.SCRIPT))
        program = "from module import *\n" + textwrap.dedent(self.MAIN)
        done = self.run([sys.executable, "-"], tmp_path, program)
        assert "3\n" == done.stdout, done.stderr

    def test_an_interactive_session(self, tmp_path: Path) -> None:
        """There is no file that a mold could import."""
        done = self.run([sys.executable, "-c", textwrap.dedent(self.SCRIPT)], tmp_path)
        assert "is in no file" in done.stderr


def test_a_forked_owner_has_molds_of_its_own(tmp_path: Path) -> None:
    """The child of a server that has workers starts its own, and leaves its parent's alone."""
    (tmp_path / "app.py").write_text(MODEL)
    program = f"""
        import json, os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import app
        parents = app.predict()
        mold = app.predict.status().mold
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            app.predict()
            os.write(writer, json.dumps(app.predict.status().mold).encode())
            app.predict.close()
            os._exit(0)
        childs = json.loads(os.read(reader, 100))
        os.waitpid(pid, 0)
        app.predict()
        print(json.dumps([childs != mold, mold == app.predict.status().mold, app.predict.status().crashed]))
    """
    assert [True, True, 0] == run_python(program, 60)


FUNCTIONS = """
import threading, time
from modelguard import TTL, guard, isolate, pool

voices = pool(lambda key: [key], max_memory="1 GB")

@isolate(workers=1)
@guard(list, reload_on=TTL("1s"))
def process(model):
    return 0

@isolate(workers=1)
@voices(key="key")
def pooled(model, key="a"):
    return 0

@isolate(workers=1, start="spawn")
@guard(list, reload_on=None)
def spawned(model):
    return 0

@isolate(workers=1, scope="host")
@guard(list, reload_on=None)
def host(model):
    return 0

@isolate(workers=1)
@guard(list, reload_on=None)
def stream(model):
    yield from range(5)

@isolate(workers=1, scope="host")
@guard(list, reload_on=None)
def host_stream(model):
    yield from range(5)

@isolate(workers=1)
@guard(list, reload_on=TTL("300ms"))
def renewed(model, delay=0.0):
    time.sleep(delay)
"""


@pytest.mark.parametrize("kind", ["process", "pooled", "spawned"])
def test_a_fork_while_other_threads_call_leaves_a_child_that_runs(tmp_path: Path, kind: str) -> None:
    """A thread of the parent that was taking a worker in that moment does not exist in the child, which needs none."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = f"""
        import os, sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        import functions
        from modelguard.isolation._mold_owner import molds
        call = functions.{kind}
        call()
        held, over = threading.Event(), threading.Event()

        def hold():
            with molds()[0].workers._lock:
                held.set()
                over.wait(60)

        threading.Thread(target=hold, daemon=True).start()
        held.wait(60)
        pid = os.fork()
        if pid == 0:
            os._exit(7 if call() == 0 else 8)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        over.set()
        print(code)
    """
    assert 7 == run_python(program, 30)


@pytest.mark.parametrize("drops", ["", "1"])
@pytest.mark.parametrize("name", ["stream", "host_stream"])
def test_a_forked_child_leaves_a_stream_of_its_parent_alone(tmp_path: Path, name: str, drops: str) -> None:
    """It neither goes on with it nor ends it: the worker answers the parent."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = f"""
        import json, os, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import functions
        from modelguard.errors import NotSupported
        stream, dropped = functions.{name}(), []
        begun = [next(stream), next(stream)]
        sys.unraisablehook = lambda problem: dropped.append(problem.exc_value)
        pid = os.fork()
        if pid == 0:
            if os.environ["DROPS"]:
                del stream
                time.sleep(0.5)  # for what another thread might do about it
                os._exit(7 if not dropped else 8)
            try:
                next(stream)
            except NotSupported:
                os._exit(7)
            os._exit(8)
        begun.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(json.dumps([*begun, *stream]))
    """
    assert [0, 1, 7, 2, 3, 4] == run_python(program, 60, MODELGUARD_RUNTIME_DIR=str(tmp_path), DROPS=drops)


def test_a_forked_child_drops_calls_that_wait_in_its_parent(tmp_path: Path) -> None:
    """It gives back nothing, and logs nothing; the calls are answered in the parent."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = f"""
        import asyncio, json, logging, os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import functions

        async def main():
            await functions.renewed.aio()
            calls = [asyncio.ensure_future(functions.renewed.aio(0.5)) for _ in range(3)]
            while functions.renewed.status().queued < 2:
                await asyncio.sleep(0.01)
            pid = os.fork()
            if pid == 0:
                records = []
                logging.getLogger("concurrent.futures").addFilter(records.append)
                for call in calls:
                    call.get_coro().close()
                os._exit(7 if not records else 8)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(json.dumps([code, *await asyncio.gather(*calls)]))

        if __name__ == "__main__":
            asyncio.run(main())
    """
    assert [7, None, None, None] == run_python(program, 60)


def test_a_forked_child_replaces_no_mold_of_its_parent(tmp_path: Path) -> None:
    """The policies of the parent's molds are asked in the parent alone, though its threads were in calls."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = f"""
        import json, os, sys, threading, time
        sys.path.insert(0, {str(tmp_path)!r})
        import functions
        functions.renewed()
        threading.Thread(target=functions.renewed, args=(60.0,), daemon=True).start()
        while not functions.renewed.status().in_flight:
            time.sleep(0.01)
        reader, writer = os.pipe()
        if os.fork() == 0:
            time.sleep(1.5)  # five times its age
            threads = [thread.name for thread in threading.enumerate()]
            os.write(writer, json.dumps([name for name in threads if "load" in name]).encode())
            os._exit(0)
        os.close(writer)
        print(os.read(reader, 1000).decode(), flush=True)
        os._exit(0)
    """
    assert [] == run_python(program, 30)


@pytest.mark.parametrize(
    ("kind", "before"),
    [("process", ""), ("pooled", ""), ("spawned", ""), ("host", ""), ("process", "functions.host()")],
)
def test_exit_handlers_get_an_answer_or_an_error(tmp_path: Path, kind: str, before: str) -> None:
    """One that was registered after the first call gets an answer, an earlier one GuardClosed by every door."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    program = f"""
        import asyncio, atexit, json, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import functions
        call, outcomes = functions.{kind}, []
        {before}

        @atexit.register
        def early():
            doors = [call, lambda: call.submit().result(), lambda: asyncio.run(call.aio())]
            for door in doors:
                try:
                    outcomes.append(door())
                except Exception as error:
                    outcomes.append(type(error).__name__)
            print(json.dumps(outcomes))

        call()
        atexit.register(lambda: outcomes.append(call()))
    """
    runtime_folder = {"MODELGUARD_RUNTIME_DIR": str(tmp_path / "runtime")}
    assert [0, "GuardClosed", "GuardClosed", "GuardClosed"] == run_python(program, 60, **runtime_folder)


def test_the_exit_of_a_forked_child_ends_no_mold_of_its_parent(tmp_path: Path) -> None:
    """Whether the child has used the function or not, and though it runs the exit handlers that it has inherited."""
    (tmp_path / "app.py").write_text(MODEL)
    program = f"""
        import json, os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import app
        app.predict()
        mold = app.predict.status().mold
        for uses in (False, True):
            if os.fork() == 0:
                if uses:
                    app.predict()
                sys.exit(0)
            os.wait()
        app.predict()
        print(json.dumps(mold == app.predict.status().mold))
    """
    assert run_python(program, 60) is True


def test_a_redefined_function_leaves_no_mold(tmp_path: Path) -> None:
    """An automatic reload of the module makes a new function; the old one's processes end."""
    (tmp_path / "app.py").write_text(MODEL)
    program = f"""
        import gc, importlib, json, os, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import app, psutil
        app.predict()
        old = psutil.Process(app.predict.status().mold)
        importlib.reload(app)
        gc.collect()
        until = time.monotonic() + 10
        while old.is_running() and old.status() != "zombie" and time.monotonic() < until:
            time.sleep(0.05)
        app.predict()
        print(json.dumps([old.is_running(), app.predict.status().mold != old.pid]))
    """
    assert [False, True] == run_python(program, 60)


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_the_first_process_of_a_container_leaves_no_zombie(tmp_path: Path) -> None:
    """As process 1 it inherits the workers of a mold that was killed, and collects them."""
    (tmp_path / "app.py").write_text(MODEL)
    program = textwrap.dedent(f"""
        import json, os, signal, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import app
        app.predict()
        os.kill(app.predict.status().mold, signal.SIGKILL)
        time.sleep(3)
        app.predict()
        states = [open(f"/proc/{{pid}}/stat").read().split()[2] for pid in os.listdir("/proc") if pid.isdigit()]
        print(json.dumps([os.getpid(), states.count("Z")]))
    """)
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert [1, 0] == json.loads(done.stdout.splitlines()[-1]), done.stderr
