"""What kernels and people do to isolated functions: memory ends, disks fill, code is deployed, a machine stops."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.harness import cgroup, run_python, wait_until
from tests.process.host_callers import APP, Caller, CallFailed, end_all, family, molds, write

import modelguard

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where brokers meet; nothing that met there is left afterwards."""
    write(tmp_path)
    yield tmp_path
    if (tmp_path / "run").exists():
        end_all(tmp_path)


SIZED = """
import os
from pathlib import Path
from modelguard import Backoff, Loading, guard, isolate

def load():
    return bytearray(b"x") * int(Path(__file__).with_name("size").read_text())

@isolate(workers=2, timeout="30s")
@guard(load, reload_on=None, swap="load_first", loading=Loading(backoff=Backoff(60, 60)))
def size(model):
    return len(model), os.getpid()
"""


def test_memory_that_ends_while_a_second_model_loads_costs_the_second_model(tmp_path: Path) -> None:
    """The kernel kills what loads, and none of the workers that serve; a smaller model replaces the old one later."""
    (tmp_path / "sized.py").write_text(SIZED)
    (tmp_path / "size").write_text("100_000_000")
    program = f"""
        import json, os, pathlib, sys
        open("CGROUP/cgroup.procs", "w").write(str(os.getpid()))
        sys.path.insert(0, {str(tmp_path)!r})
        from modelguard.errors import LoadFailed
        from sized import size
        told = pathlib.Path({str(tmp_path)!r}, "size")
        with size:
            size()
            before = {{one.pid for one in size.status().workers}}
            told.write_text("900_000_000")
            try:
                size.reload()
                said = ""
            except LoadFailed as error:
                said = str(error)
            answers = [size()[0] for _ in range(10)]
            status = size.status()
            lost = sorted(before - {{one.pid for one in status.workers}})
            told.write_text("110_000_000")
            size.reload()
            print(json.dumps([said, answers, lost, status.crashed, size()[0]]))
    """
    with cgroup(400_000_000) as made:
        said, answers, lost, crashed, after = run_python(program.replace("CGROUP", made), 120)
    assert "by the kernel's OOM killer" in said
    assert [100_000_000] * 10 == answers
    assert ([], 0) == (lost, crashed)
    assert 110_000_000 == after


#: Takes memory until the kernel kills it, which kills the victim first: no other has so high a score, but this one is
#: next.
FILLER = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
open("/proc/self/oom_score_adj", "w").write("100")
kept = []
while True:
    kept.append(bytearray(b"x") * 1_000_000)
"""


@pytest.mark.parametrize("victim", ["worker", "mold", "broker"])
def test_whoever_the_kernel_kills_for_want_of_memory_is_replaced(folder: Path, victim: str) -> None:
    """A call that runs is told by name, the next one is answered, and there is one broker, one mold and no rest."""
    with cgroup(500_000_000) as made, Caller(folder) as one, Caller(folder) as two:
        for caller in (one, two):
            Path(made, "cgroup.procs").write_text(str(caller.pid))
            caller.call()
        wait_until(lambda: 2 == len(one.run("result = [w.pid for w in app.predict.status().workers]")), "the workers")
        one.begin("result = app.predict('sleep', 600.0)")
        busy = "result = [w.pid for w in app.predict.status().workers if w.state == 'busy']"
        wait_until(lambda: two.run(busy), "the call")
        if victim == "worker":
            (pid,) = two.run(busy)
        else:
            pid = two.status(victim)
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        filler = [sys.executable, "-c", FILLER, made]
        assert -signal.SIGKILL == subprocess.run(filler, check=False, timeout=60).returncode
        with pytest.raises(CallFailed, match="WorkerCrashed") as raised:
            one.result()
        if victim != "broker":  # nobody is left who could have seen how that ended
            assert "by the kernel's OOM killer" in str(raised.value)
        assert one.call()[1] == two.call()[1]
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        wait_until(lambda: (1, 1) == (len(family(folder, "broker")), len(molds(folder))), "one broker and one mold")
        for caller in (one, two):
            caller.process.kill()
        wait_until(lambda: not family(folder), "the end of all", 40.0)


FULL = """
    set -e
    mkdir -p {tmp}
    mount -t tmpfs -o size=64k,nr_inodes=32 none /dev/shm
    mount -t tmpfs -o size=64k,nr_inodes=32 none {tmp}
    for place in /dev/shm {tmp}; do
        dd if=/dev/zero of=$place/full bs=1k count=80 2>/dev/null || true
        (for n in $(seq 40); do : > $place/$n; done) 2>/dev/null || true
    done
    exec "$@"
"""


@pytest.mark.parametrize("name", ["process", "spawned", "of_pool", "host"])
def test_temporary_folders_that_are_full(tmp_path: Path, name: str) -> None:
    """With no byte and no name free in TMPDIR and /dev/shm, calls with large content are answered, or say why not."""
    if not shutil.which("unshare") or os.geteuid():
        pytest.skip("only root can mount a folder of its own that is full")
    (tmp_path / "functions.py").write_text(FULL_FUNCTIONS)
    temporary = tmp_path / "tmp"
    program = textwrap.dedent(f"""
        import os, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import functions
        from modelguard.errors import ModelGuardError
        call = functions.{name}
        said, value = "answered", os.urandom(3_000_000)
        try:
            assert value == call(value=value)
            call.reload() if hasattr(call, "reload") else None
            assert value == call(value=value)
        except ModelGuardError as error:
            said = f"{{type(error).__name__}} {{error}}"
            for folder in ("/dev/shm", os.environ["TMPDIR"]):
                for file in os.listdir(folder):
                    os.remove(os.path.join(folder, file))
            assert value == call(value=value)
        print(said)
    """)
    command = ["unshare", "--mount", "sh", "-c", textwrap.dedent(FULL).format(tmp=temporary), "sh"]
    environment = {**os.environ, "TMPDIR": str(temporary)} | dict.fromkeys(RUNTIME, "")
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=environment,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert 0 == done.returncode, done.stderr[-3000:]
    if name == "host":  # sockets are names in a folder
        assert re.fullmatch(r"(NotSupported|LoadFailed) .*No space left on device.*\n", done.stdout, re.DOTALL)
    else:
        assert "answered\n" == done.stdout


NO_PROC = "mount -t tmpfs none /proc"
PREPARED = "from modelguard import guard, prefork\nprefork.prepare(guard(dict, reload_on=None))\n"


@pytest.mark.parametrize("case", ["isolate without /proc", "prepare without /proc", "isolate where nothing is written"])
def test_containers_without_what_is_needed(case: str) -> None:
    """Where there is no /proc, or no folder that can be written, the error says so and names the remedy."""
    if not shutil.which("unshare") or os.geteuid():
        pytest.skip("only root can mount over these folders")
    done_before, code, said = {
        "isolate without /proc": (NO_PROC, HOSTED, "NotSupported .* with /proc"),
        "prepare without /proc": (NO_PROC, PREPARED, "NotSupported .*/proc cannot be read"),
        "isolate where nothing is written": (
            "for place in /tmp /var/tmp; do mount -t tmpfs -o ro none $place; done",
            HOSTED + "f()\n",
            "NotSupported .*the folder /tmp/modelguard-0 .*Read-only.*MODELGUARD_RUNTIME_DIR",
        ),
    }[case]
    program = textwrap.dedent(f"""
        import sys
        sys.modules["functions"] = functions = type(sys)("functions")
        functions.__file__ = "/nowhere/functions.py"
        try:
            exec({code!r}, vars(functions))
        except Exception as error:
            print(type(error).__name__, error)
    """)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{done_before}; exec "$@"', "sh", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd="/proc",  # where no file can be made, and a temporary one is tried at last
        env={name: value for name, value in os.environ.items() if name not in {*RUNTIME, "TMPDIR", "TEMP", "TMP"}},
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert re.fullmatch(said + ".*\n", done.stdout, re.DOTALL), (done.stdout, done.stderr[-3000:])


#: What ends threads where they start: a limit that root's processes do not have.
NO_THREAD = """
import sys
if {whose!r} in sys.orig_argv:
    import _thread
    def none(*_, **__):
        raise RuntimeError("can't start new thread")
    _thread.start_new_thread = _thread.start_joinable_thread = none
"""

HOSTED = """
from modelguard import guard, isolate

@isolate(workers=1, timeout="20s", scope="host")
@guard(dict, reload_on=None, name="words")
def f(model):
    return 1
"""


@pytest.mark.parametrize("call", ["f()", "f.submit().result(30)"])
@pytest.mark.parametrize("whose", ["broker", "owner", "folder"])
def test_what_a_broker_needs_is_missing(folder: Path, whose: str, call: str) -> None:
    """A broker or process that gets no thread, or a working directory that is gone, fails the load in one line."""
    (folder / "sitecustomize.py").write_text(NO_THREAD.format(whose=whose))
    (folder / "functions.py").write_text(HOSTED)
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    removed = "" if whose != "folder" else "os.mkdir('gone'); os.chdir('gone'); os.rmdir(os.getcwd())"
    program = textwrap.dedent(f"""
        import json, os, sys
        os.chdir({str(folder)!r})
        {removed}
        import functions
        from modelguard.errors import LoadFailed
        try:
            functions.{call}
        except LoadFailed as error:
            print(json.dumps(str(error)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, whose if whose == "owner" else "app"],
        env={**os.environ, "PYTHONPATH": path, "MODELGUARD_RUNTIME_DIR": str(folder / "run")},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    said = "working directory was removed" if whose == "folder" else "can't start new thread"
    assert said in done.stdout
    assert "Traceback" not in done.stdout


def test_a_submitted_call_without_a_thread_is_refused(folder: Path) -> None:
    """Where the system gives no thread, submit() and aio get Overloaded, and the next call gets their worker."""
    (folder / "functions.py").write_text(HOSTED.replace(', scope="host"', ""))
    program = f"""
        import asyncio, json, sys, threading
        sys.path.insert(0, {str(folder)!r})
        import functions
        from modelguard.errors import Overloaded

        async def awaited():
            return await functions.f.aio()

        def none(_):
            raise RuntimeError("can't start new thread")

        functions.f()
        said = []
        start, threading.Thread.start = threading.Thread.start, none
        for call in (lambda: functions.f.submit().result(30), lambda: asyncio.run(awaited())):
            try:
                call()
            except Overloaded as error:
                said.append(str(error))
        threading.Thread.start = start
        print(json.dumps([said, functions.f.submit().result(30), functions.f.status().in_flight]))
    """
    refused = "functions.f(): cannot start a thread: can't start new thread"
    assert [[refused, refused], 1, 0] == run_python(program, 90)


STREAM = """
from modelguard import isolate

@isolate(workers=1, timeout="20s")
async def f():
    yield 0
    yield 1
"""


def test_a_stream_without_a_thread_ends_and_gives_its_worker_back(tmp_path: Path) -> None:
    """Its step is refused, its end is none the wiser, its own error is told, and close() of its function refused."""
    (tmp_path / "functions.py").write_text(STREAM)
    program = f"""
        import asyncio, json, sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        from functions import f
        from modelguard import deadline
        from modelguard.errors import ModelGuardError
        from modelguard.runtime.background import SHARED

        async def without_threads(act):
            SHARED.end_idle()
            start, threading.Thread.start = threading.Thread.start, none
            try:
                return await act
            except ModelGuardError as error:
                return type(error).__name__
            finally:
                threading.Thread.start = start

        def none(_):
            raise RuntimeError("can't start new thread")

        async def late():
            with deadline("100ms"):
                return await anext(f())

        async def main():
            said = []
            for act in (lambda stream: anext(stream), lambda stream: stream.aclose(), lambda _: late()):
                stream = f()
                await anext(stream)
                said.append(await without_threads(act(stream)))
            await stream.aclose()
            said.append(await without_threads(f.aclose()))
            return [*said, [item async for item in f()]]

        print(json.dumps(asyncio.run(main())))
    """
    assert ["Overloaded", None, "DeadlineExceeded", "Overloaded", [0, 1]] == run_python(program, 90)


RUNTIME = ("MODELGUARD_RUNTIME_DIR", "XDG_RUNTIME_DIR")

FULL_FUNCTIONS = """
from modelguard import guard, isolate, pool

voices = pool(lambda key: [key], max_memory="1 GB")

@isolate(workers=2)
@guard(dict, reload_on=None)
def process(model, value):
    return value

@isolate(workers=1, start="spawn")
@guard(dict, reload_on=None)
def spawned(model, value):
    return value

@isolate(workers=1)
@voices(key="key")
def of_pool(model, key="a", value=None):
    return value

@isolate(workers=2, scope="host")
@guard(dict, reload_on=None)
def host(model, value):
    return value
"""


def test_a_rolling_deploy_under_kills_mixes_no_versions(folder: Path) -> None:
    """While brokers, molds, workers and callers die, each caller gets the answers of the code that it has imported."""
    chance = random.Random(5)
    with ExitStack() as stack:

        def deploy(version: int) -> None:
            # Python takes a file of the same second and the same size for the same file.
            answer = f"return [{version}, {'+' * version}os.getppid()]"
            code = APP.replace("return [os.getpid(), os.getppid()]", answer)
            (folder / "fresh").write_text(textwrap.dedent(code))
            (folder / "fresh").rename(folder / "app.py")

        def begin(version: int) -> Caller:
            caller = stack.enter_context(Caller(folder))
            caller.run(CHECKED.format(version=version))
            return caller

        deploy(0)
        serving = [begin(0), begin(0)]
        for version in (1, 2):
            for caller in serving:
                wait_until(lambda: caller.run(ANSWERED) > 5, "answers")  # noqa: B023
            deploy(version)
            for place, old in enumerate(serving):
                for _ in range(4):
                    time.sleep(chance.uniform(0.0, 0.3))
                    with suppress(psutil.NoSuchProcess, IndexError):
                        chance.choice(family(folder)).kill()
                serving[place] = begin(version)
                check(old)
                old.process.kill()
        for caller in serving:
            wait_until(lambda: caller.run(ANSWERED) > 5, "answers of the last version")  # noqa: B023
            check(caller)
        wait_until(lambda: 1 == len(molds(folder)), "the mold of the last version alone", 40.0)


CHECKED = """
    def checked():
        try:
            answer = app.predict()
        except Exception:
            time.sleep(0.1)
            raise
        assert {version} == answer[0], answer
    load = Load(2, checked)
"""

ANSWERED = "result = load.tally['answered']"


def check(caller: Caller) -> None:
    """No answer was another version's."""
    tally, longest = caller.run("result = load.end()")
    print(tally, f"longest {longest:.1f} s")  # noqa: T201 - with -s, the tally
    assert set(tally) <= {"answered", "WorkerCrashed", "LoadFailed", "CircuitOpen", "Reloading", "DeadlineExceeded"}


PRIORITIES = """
import os
from modelguard import guard, isolate

@isolate(workers=2)
@guard(lambda: os.getpriority(os.PRIO_PROCESS, 0), reload_on=None)
def priorities(of_load):
    return of_load, os.getpriority(os.PRIO_PROCESS, 0)
"""


def test_only_the_load_of_a_renewed_model_stands_back(tmp_path: Path) -> None:
    """Its workers have the priority of the first, else the next load would have as much of the processors as calls."""
    (tmp_path / "standing.py").write_text(PRIORITIES)
    program = f"""
        import json, os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from standing import priorities
        seen = []
        with priorities:
            for _ in range(3):
                seen.append(priorities())
                priorities.reload()
        print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0), seen]))
    """
    own, seen = run_python(program, 120)
    behind = min(own + 5, 19)
    assert [[own, own], [behind, own], [behind, own]] == seen


def test_a_reload_reads_the_memory_of_each_process_few_times(tmp_path: Path) -> None:
    """A reading walks page tables beside calls, and nothing that is asked for within a second needs two."""
    (tmp_path / "standing.py").write_text(PRIORITIES)
    program = f"""
        import collections, json, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        from modelguard.isolation import _mold_owner
        _mold_owner._FRESH = 100
        readings = collections.Counter()
        def hear(event, details):
            if event == "open" and "smaps" in str(details[0]):
                readings[str(details[0])] += 1
        sys.addaudithook(hear)
        from standing import priorities
        with priorities:
            priorities()
            readings.clear()
            priorities.reload()
            print(json.dumps([len(readings) > 1, max(readings.values())]))
    """
    several, most = run_python(program, 120)
    assert several
    assert most <= 4  # before and after the load, and after the release, in which its workers and the spare one come up


def test_an_old_mold_ends_where_no_descriptor_is_left(tmp_path: Path) -> None:
    """Whether it may stand back while it ends cannot be read then, and its processes must not stay."""
    (tmp_path / "standing.py").write_text(PRIORITIES)
    program = f"""
        import json, os, resource, sys
        from contextlib import suppress
        sys.path.insert(0, {str(tmp_path)!r})
        import psutil
        from modelguard import telemetry
        from standing import priorities
        held = []
        def fill(event):
            if isinstance(event, telemetry.LoadFinished) and event.generation == 2:
                resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
                with suppress(OSError):
                    while True:
                        held.append(os.open("/dev/null", os.O_RDONLY))
        with priorities:
            priorities()
            old = psutil.Process().children(recursive=True)
            telemetry.add_hook(fill)
            priorities.reload()
            _, alive = psutil.wait_procs(old, 20)
            [os.close(one) for one in held]
        print(json.dumps([len(old) > 1, len(alive)]))
    """
    assert [True, 0] == run_python(program, 120)


#: Root of another user namespace, as in a rootless container, has all capabilities and may not raise a priority.
OTHER_ROOT = ["unshare", "--user", "--map-root-user"]
WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"]


def run_as(command: list[str], program: str) -> Any:
    """As :func:`run_python`, started by a command, where that can be run."""
    if command and (not shutil.which(command[0]) or subprocess.run([*command, "true"], check=False).returncode):
        pytest.skip(f"{command[0]} cannot do this here")
    wrapped = (
        f"import os, sys; os.execvp('env', ['env', *{command!r}, sys.executable, '-c', {textwrap.dedent(program)!r}])"
    )
    return run_python(wrapped, 120)


def test_who_may_not_come_back_stays_where_it_is(tmp_path: Path) -> None:
    """Root of another user namespace may lower a priority and not raise it, so nothing of it is lowered."""
    (tmp_path / "standing.py").write_text(PRIORITIES)
    program = f"""
        import contextlib, json, os, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        from standing import priorities

        def lowest():
            found = []
            for task in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    found.append(os.getpriority(os.PRIO_PROCESS, int(task)))
            return max(found)

        with priorities:
            for _ in range(2):
                priorities.reload()
            until = time.monotonic() + 30  # a thread that only reads memory stands back for as long as it lives
            while lowest() > os.getpriority(os.PRIO_PROCESS, 0) and time.monotonic() < until:
                time.sleep(0.01)
            print(json.dumps([lowest(), priorities()[1]]))
    """
    assert 2 * [os.getpriority(os.PRIO_PROCESS, 0)] == run_as(OTHER_ROOT, program)


NATIVE = """
import os, threading
from modelguard import guard, isolate

def start(started):
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    started.append(thread.native_id)
    return started

started = []
start(started)

@isolate(start="spawn")
@guard(lambda: start(started), reload_on=None)
def priorities(model):
    return [os.getpriority(os.PRIO_PROCESS, task) for task in [0, *started]]
"""


@pytest.mark.parametrize("command", [[], WITHOUT_RIGHTS], ids=["as it is", "without CAP_SYS_NICE"])
def test_threads_that_a_load_has_started_do_not_stand_back_in_calls(tmp_path: Path, command: list[str]) -> None:
    """As BLAS and OpenMP start theirs, at the import or in the loader. A spawned worker keeps them."""
    (tmp_path / "native.py").write_text(NATIVE)
    program = f"""
        import json, os, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from native import priorities
        with priorities:
            priorities.reload()
            print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0), priorities()]))
    """
    own, seen = run_as(command, program)
    assert 3 * [own] == seen


def test_the_priority_of_who_asks_for_a_reload_is_his_own(tmp_path: Path) -> None:
    """Workers run at the nice value of their server, whatever that of the thread that asks for a reload."""
    (tmp_path / "standing.py").write_text(PRIORITIES)
    program = f"""
        import json, os, sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        from modelguard.runtime import background
        from standing import priorities
        def renew():
            os.setpriority(os.PRIO_PROCESS, 0, min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19))
            priorities.reload()
        with priorities:
            background.THREADS.end_idle()  # as after some minutes
            asks = threading.Thread(target=renew)
            asks.start(), asks.join()
            print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0), priorities()[1]]))
    """
    own, seen = run_python(program, 120)
    assert own == seen


STARTS = """
import os, subprocess, time
from pathlib import Path
from modelguard import guard, isolate

here = Path(__file__).parent

def load():
    while here.joinpath("loaded").exists():
        if here.joinpath("go").exists():
            raise ValueError("no model")
        time.sleep(0.01)
    here.joinpath("loaded").touch()
    return object()

@isolate(workers=2)
@guard(load, reload_on=None)
def allowed(model, starts):
    time.sleep(0.02)
    mask = sorted(os.sched_getaffinity(0))
    if starts and len(mask) == 1:
        return mask, [subprocess.Popen(["sleep", "60"], start_new_session=True).pid]
    return mask, []
"""


COUNTS = (
    STARTS[: STARTS.index("@isolate")]
    + """
@functools.cache
def count():
    return len(os.sched_getaffinity(0))

@isolate(workers=2)
@guard(load, reload_on=None)
def counted(model):
    time.sleep(0.05)
    return os.getpid(), count()
"""
).replace("import os", "import functools, os")


def on_two_cpus(folder: Path, source: str, name: str) -> str:
    """The opening of a program that reloads a function of a module, beside calls; the load may fail."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    (folder / "beside.py").write_text(source)
    return f"""
        import json, os, signal, sys, threading, time
        from contextlib import suppress
        from pathlib import Path
        sys.path.insert(0, {str(folder)!r})
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        from modelguard.errors import LoadFailed
        from beside import {name}
        def reload():
            with suppress(LoadFailed):
                {name}.reload()
        load = threading.Thread(target=reload)
    """


def test_a_worker_that_has_its_first_call_beside_a_load_counts_all_cpus(tmp_path: Path) -> None:
    """As OpenMP does once for its life."""
    program = f"""
        {on_two_cpus(tmp_path, COUNTS, "counted")}
        with counted:
            load.start()
            time.sleep(0.3)
            seen = dict()
            while len(seen) < 2:
                calls = [threading.Thread(target=lambda: seen.update([counted()])) for _ in range(2)]
                [call.start() for call in calls], [call.join() for call in calls]
            Path({str(tmp_path / "go")!r}).touch()
            load.join()
        print(json.dumps(sorted(seen.values())))
    """
    assert [2, 2] == run_python(program, 120)


def test_what_a_worker_has_started_beside_a_load_is_not_kept_to_its_cpu(tmp_path: Path) -> None:
    """A program that it starts meanwhile gets all CPUs back, also where the load fails."""
    program = f"""
        {on_two_cpus(tmp_path, STARTS, "allowed")}
        with allowed:
            for _ in range(20):  # each has had calls
                calls = [threading.Thread(target=allowed, args=[False]) for _ in range(2)]
                [call.start() for call in calls], [call.join() for call in calls]
            load.start()
            while not (programs := allowed(True)[1]):
                pass
            Path({str(tmp_path / "go")!r}).touch()
            load.join()
            masks = [sorted(os.sched_getaffinity(one)) for one in programs]
            [os.kill(one, signal.SIGKILL) for one in programs]
        print(json.dumps([sorted(os.sched_getaffinity(0)), masks]))
    """
    own, masks = run_python(program, 120)
    assert [own] == masks


BOUND = """
import os, time
from pathlib import Path
from modelguard import guard, isolate

def load():
    loads = Path(__file__).with_name("loads")
    with loads.open("a") as file:
        file.write("x")
    while loads.read_text() == "xx" and not loads.with_name("go").exists():
        time.sleep(0.01)
    if loads.read_text() == "xxx":
        raise ValueError("no model")
    return object()

model = guard(load, reload_on=None)

@isolate(workers=2)
@model
def cpus(model, seconds):
    time.sleep(seconds)
    return os.getpid(), sorted(os.sched_getaffinity(0))
"""


def test_old_workers_keep_to_a_cpu_each_while_a_mold_loads_and_only_then(tmp_path: Path) -> None:
    """Beside a mold both would share the CPU that it leaves them. A load that fails gives the CPUs back, too."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    (tmp_path / "bound.py").write_text(BOUND)
    program = f"""
        import json, os, sys, threading, time
        from pathlib import Path
        sys.path.insert(0, {str(tmp_path)!r})
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        from modelguard.errors import LoadFailed
        from bound import cpus, model
        def each():
            seen = dict()
            while len(seen) < 2:
                calls = [threading.Thread(target=lambda: seen.update([cpus(0.1)])) for _ in range(2)]
                [call.start() for call in calls], [call.join() for call in calls]
            return sorted(seen.values())
        with cpus:
            before = each()
            load = threading.Thread(target=cpus.reload)
            load.start()
            until = time.monotonic() + 60
            while each() == before and time.monotonic() < until:
                pass
            meanwhile = each()
            Path({str(tmp_path / "go")!r}).touch()
            load.join()
            after = each()
            try:
                cpus.reload()
            except LoadFailed:
                after_failure = each()
        print(json.dumps([sorted(os.sched_getaffinity(0)), before, meanwhile, after, after_failure]))
    """
    own, before, meanwhile, after, after_failure = run_python(program, 120)
    assert [own, own] == before == after == after_failure
    assert [[cpu] for cpu in own] == meanwhile


@pytest.mark.parametrize("scope", ["process", "host"])
def test_a_tree_that_is_stopped_and_continued(folder: Path, scope: str) -> None:
    """Whatever the clock says then, workers whose calls ran out of time meanwhile may answer, and none is ended."""
    code = APP.replace('timeout="20s", scope="host"', f'timeout="2s", scope="{scope}"')
    # In small steps, of which a stop costs one: a sleep ends by the clock.
    write(folder, code.replace("time.sleep(value)", "[time.sleep(0.02) for _ in range(round(50 * value))]"))
    with Caller(folder) as one:
        one.run("app.predict.load()")
        wait_until(lambda: 2 == one.run("result = len(app.predict.status().workers)"), "the workers")
        before = processes = one.run(PROCESSES)
        one.run("load = Load(4, lambda: app.predict('sleep', 0.5))")
        wait_until(lambda: one.run(ANSWERED) > 4, "traffic")
        tree = [psutil.Process(one.pid), *psutil.Process(one.pid).children(recursive=True), *family(folder)]
        for process in tree:
            process.suspend()
        time.sleep(9.0)  # more than the timeout and what a broker allows beyond it
        for process in tree:
            process.resume()
        count = one.run(ANSWERED)
        wait_until(lambda: one.run(ANSWERED) > count + 8, "more traffic")
        processes = one.run(PROCESSES)
        tally, longest = one.run("result = load.end()")
        print(tally, f"longest {longest:.1f} s")  # noqa: T201 - with -s, the tally
        assert before == processes
        assert set(tally) <= {"answered", "DeadlineExceeded"}  # of a call that waited for a worker
        assert tally.get("DeadlineExceeded", 0) <= 2
        assert 0 == one.status("crashed") + one.status("timed_out") + one.status("reloads")


PROCESSES = """
status = app.predict.status()
result = [status.broker, status.mold, sorted(one.pid for one in status.workers)]
"""


def test_an_owner_that_blocks_signals_hears_how_workers_end() -> None:
    """Threads that wait for signals block them in all others. Molds have no part in that, else they miss SIGCHLD."""
    told = run_python(
        """
        import json, os, signal, time
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        from modelguard.errors import WorkerCrashed
        from tests.process.isolated_functions import ends

        with ends:
            try:
                ends("exit")
            except WorkerCrashed as error:
                said = str(error)
            idle = [one.pid for one in ends.status().workers if one.state == "idle"]
            for pid in idle:
                os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + 20
            while ends.status().crashed < 1 + len(idle) and time.monotonic() < until:
                time.sleep(0.01)
            print(json.dumps([said, ends.status().crashed - len(idle)]))
        """,
        60,
    )
    assert "exit status 3" in told[0]
    assert 1 == told[1]


def test_workers_leave_nothing_that_development_mode_warns_of() -> None:
    """What ends with its process is closed all the same, or each worker that ends writes a warning to the log."""
    assert [] == run_python(
        """
        import json, logging
        from tests.process.isolated_functions import where

        said = []
        logging.getLogger("py.warnings").addFilter(lambda record: said.append(record.getMessage()) or True)
        with where:
            where()
        print(json.dumps([one for one in said if "modelguard" in one]))
        """,
        60,
        PYTHONDEVMODE="1",
    )


@pytest.mark.parametrize("where", ["the working directory", "the packages"])
@pytest.mark.parametrize("scope", ["process", "host"])
def test_modules_of_the_same_names_as_pythons_own_are_not_imported(tmp_path: Path, where: str, scope: str) -> None:
    """Where a script of another folder is run, and beside old packages, which Python itself finds after its own."""
    packages = Path(modelguard.__file__).parents[1]
    here, site, app = (tmp_path / name for name in ("here", "site", "app"))
    for folder in (here, site, app):
        folder.mkdir()
    (site / "modelguard").symlink_to(packages / "modelguard")
    for name in ("asyncio", "pathlib", "queue", "signal", "token"):
        ((here if where == "the working directory" else site) / f"{name}.py").write_text("raise ImportError")
    (app / "functions.py").write_text(
        f"from modelguard import isolate\n@isolate(workers=1, scope={scope!r})\ndef f(value):\n    return value\n"
    )
    (app / "main.py").write_text(
        textwrap.dedent(
            f"""
            import sys
            first = next(at for at, one in enumerate(sys.path) if one.endswith("-packages"))
            sys.path.insert(first, {str(site)!r})
            import functions
            if __name__ == "__main__":
                with functions.f:
                    print(functions.f(7))
            """
        )
    )
    environment = {**os.environ, "MODELGUARD_RUNTIME_DIR": str(tmp_path / "run")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(app / "main.py")],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (0, "7\n") == (done.returncode, done.stdout), done.stderr[-3000:]


@pytest.mark.parametrize("name", ["where", "shared_echo"])
def test_a_working_directory_that_is_removed_ends_no_reload(tmp_path: Path, name: str) -> None:
    """A deploy removes the folder of the old release, in which its processes are still, and a broker."""
    (tmp_path / "release").mkdir()
    program = f"""
        import json, os, sys
        sys.path[0] = os.getcwd()
        os.chdir({str(tmp_path / "release")!r})
        from tests.process.isolated_functions import {name} as isolated
        with isolated:
            isolated.load()
            os.rmdir({str(tmp_path / "release")!r})
            isolated.reload()
            isolated()
            print(json.dumps(2 == isolated.status().generation))
    """
    assert run_python(program, 60)


INTERRUPTED = """
import random, signal, time
from modelguard import Swap, guard, isolate

class Alarm(Exception):
    pass

armed = False

def handler(*_):
    if armed:  # else a call has raised by itself before
        raise Alarm

@isolate(workers=12, timeout="20s")
@guard(dict, reload_on=None, swap=Swap(drain_timeout="1s"))
def echo(model, number):
    return number

def call_for(seconds):
    global armed
    signal.signal(signal.SIGALRM, handler)
    dice, interrupted, until = random.Random(1), 0, time.monotonic() + seconds
    while interrupted < 3000 and time.monotonic() < until:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.00002, 0.0006))
            for number in range(30):
                echo(number)
            armed = False
        except Exception:
            armed = False
            interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    return interrupted
"""


def test_exceptions_of_signal_handlers_leave_no_worker_taken(tmp_path: Path) -> None:
    """Wherever in a call they come: what nobody has any more is replaced, and no model is abandoned to a call."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    program = f"""
        import json, sys, time
        sys.path.insert(0, {str(tmp_path)!r})
        import interrupted
        from modelguard import telemetry
        abandoned = []
        telemetry.set_hooks([lambda event: abandoned.extend([1] * isinstance(event, telemetry.GenerationAbandoned))])
        with interrupted.echo:
            count = interrupted.call_for(20)
            until = time.monotonic() + 30
            while (states := [one.state for one in interrupted.echo.status().workers]).count("idle") < len(states):
                assert time.monotonic() < until, states
                time.sleep(0.05)
        print(json.dumps([count, len(abandoned)]))
    """
    count, abandoned = run_python(
        program, 120, PYTHONPATH=f"{Path(modelguard.__file__).parents[1]}{os.pathsep}{tmp_path}"
    )
    assert count > 100
    assert 0 == abandoned


#: As gevent's sockets do: the flag does not keep them from waiting.
GREEN_SOCKETS = """
import socket

class Socket(socket.socket):
    def recv(self, size, flags=0):
        return super().recv(size, flags & ~socket.MSG_DONTWAIT)

socket.socket = Socket
"""

#: As gevent patches the threads of whoever imports the module.
GREEN_THREADS = """
import _thread
start = _thread.start_new_thread

def start_new_thread(*arguments):
    return start(*arguments)

start_new_thread.__module__ = "gevent.thread"
_thread.start_new_thread = start_new_thread
"""

GREEN_FUNCTION = """
from modelguard import guard, isolate

@isolate(workers=1, timeout="20s")
@guard(dict, reload_on=None, name="words")
def f(model):
    return 1
"""


def test_sockets_that_wait_as_gevents_do(tmp_path: Path) -> None:
    """In a program that gevent has patched, isolated calls are answered: no look for news waits for them."""
    (tmp_path / "functions.py").write_text(GREEN_FUNCTION)
    program = f"{GREEN_SOCKETS}\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\nimport functions\n"
    program += "print(functions.f())\nfunctions.f.close()\n"
    assert 1 == run_python(program, 40)


#: As gevent's locks do, if they are taken and not waited for: other work runs. In a forked child it is the parent's.
GREEN_LOCKS = """
import _thread, os, threading
parent = os.getpid()

class Lock:
    def __init__(self):
        self._lock = _thread.allocate_lock()

    def acquire(self, blocking=True, timeout=-1):
        if not (taken := self._lock.acquire(blocking, timeout)) and not blocking and os.getpid() != parent:
            os._exit(7)
        return taken

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()

    def __getattr__(self, name):
        return getattr(self._lock, name)

threading.Lock = Lock
"""


def test_a_child_that_starts_a_program_runs_no_work_of_its_parent(tmp_path: Path) -> None:
    """Under gevent a program is started by a fork: what prepares the child for isolated calls gives no turn away."""
    (tmp_path / "functions.py").write_text(GREEN_FUNCTION)
    program = f"{GREEN_LOCKS}\nimport sys; sys.path.insert(0, {str(tmp_path)!r})\nimport functions\n"
    program += "if not (pid := os.fork()):\n    os._exit(0)\n"
    program += "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    assert 0 == run_python(program, 40)


def test_a_module_that_patches_threads(tmp_path: Path) -> None:
    """A mold that would hang with gevent's threads is refused, and the error says where to patch instead."""
    (tmp_path / "functions.py").write_text(GREEN_THREADS + GREEN_FUNCTION)
    program = f"""
        import json, sys
        sys.path.insert(0, {str(tmp_path)!r})
        import functions
        from modelguard.errors import LoadFailed
        try:
            functions.f()
        except LoadFailed as error:
            print(json.dumps(str(error)))
    """
    assert re.search("patches threads with gevent.*__main__", run_python(program, 60))
