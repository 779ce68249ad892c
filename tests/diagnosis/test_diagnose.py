"""``modelguard diagnose``: its input, its output, and functions that misbehave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import wait_until

from modelguard.diagnosis import diagnose
from modelguard.errors import InvalidOption, NotSupported
from modelguard.facts import _proc

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

APP = """
import asyncio, ctypes, errno, mmap, os, resource, signal, socket, subprocess, sys, tempfile, threading, time
kept = []
class Deep:
    async def predict(self, text, *, times=1):
        kept.append(text * times * 2000)
model = Deep()
def none(): print("noise"); os.write(1, b"noise")
def hangs():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open("started", "w").write(str(child.pid)); time.sleep(1000)
def forks():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
def comes_back(): os.fork() and os.wait()
def exits(): os._exit(7)
def slow(): time.sleep(1)
def steps(number):
    kept.append(b"x" * 20_000)
    open("driven", "w").close()
def three(): yield from (1, 2, 3)
def raises(number):
    if number % 2: raise KeyError(number)
async def waits(): await asyncio.sleep(1000)
def native(): ctypes.PyDLL(None).sleep(1000)
def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True: pass
def opens(): kept.append(open("app.py"))
def of_a_limit(): raise OSError(errno.EMFILE, "inotify_init1")
def closes():
    kept.append(bytearray(100_000))
    if len(kept) == 2: os.closerange(3, 1000)
def lowers(): resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); open("app.py").close()
def takes_all():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    try:
        while True: kept.append(os.open("app.py", os.O_RDONLY))
    except OSError: time.sleep(0.3)
def connects():
    if not kept: kept.append(socket.create_server(("127.0.0.1", 0), backlog=1000))
    kept.append(socket.create_connection(kept[0].getsockname()))
def threads(): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
def starts(): kept.append(subprocess.Popen(["sleep", "1000"]))
def pool():
    if len(kept) < 20: kept.append(open("app.py"))
def lazily(text):
    yield text
def later(): return model.predict("x")
async def streams():
    yield await later()
def leaves():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    sys.exit(7)
def maps():
    kept.append(mmap.mmap(-1, 8192)); kept[-1].write(b"x" * 8192)
    loop = [bytearray(10_000)]; loop.append(loop)
def dies(size=2400):
    kept.append(bytearray(size))
    if len(kept) == 700: os.kill(os.getpid(), 9)
def bursts(): dies(100_000)
def floods(): kept.append(b"x" * 20_000_000)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def inputs(folder: Path, *lines: str) -> str:
    (folder / "inputs.jsonl").write_text("\n".join(lines))
    return str(folder / "inputs.jsonl")


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "modelguard", "diagnose", *words]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=100, cwd=folder)


def test_an_async_method_with_inputs_from_a_file(folder: Path) -> None:
    """JSON and a page are written; the status is 1, and the line that keeps memory is named."""
    file = inputs(folder, '["text"]', "", '{"text": "word", "times": 2}', '"text"')
    words = ("app:model.predict", "--inputs", file, "--time", "5s", "--try", "0", "--json")
    done = command(folder, *words, "--report", str(folder / "out"))
    assert 1 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert ("grows", "python objects") == (report["verdict"], report["causes"][0]["name"])
    assert "app.py:6" in report["causes"][0]["seen"]
    assert "3, in turn" == report["about"]["inputs"]
    assert report == json.loads((folder / "out" / "report.json").read_text())
    assert "<svg" in (folder / "out" / "report.html").read_text()


def test_a_function_without_arguments_that_prints(folder: Path) -> None:
    """What it prints does not disturb the report; the status is 0."""
    done = command(folder, "app:none", "--time", "4s")
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "noise" not in done.stdout
    assert "does not grow" in done.stdout


def test_failures_are_counted(folder: Path) -> None:
    """A function may raise on some inputs."""
    report = diagnose("app:raises", inputs=inputs(folder, "1", "2"), seconds=4, cwd=folder)
    assert "steady" == report.verdict
    assert any("calls failed (KeyError at app.py:24)" in sentence for sentence in report.unknown)


def test_calls_that_all_fail_say_nothing_of_those_that_do_not(folder: Path) -> None:
    """A function that always raises is not taken for one that keeps no memory."""
    report = diagnose("app:raises", inputs=inputs(folder, "1"), calls=240, seconds=30, cwd=folder)
    assert "undecided" == report.verdict
    assert "no call succeeded, so nothing is known about those that do" in report.unknown


@pytest.mark.parametrize(
    ("decorators", "expected"),
    [
        ("@isolate(workers=1)", ("grows", ["worker processes"])),
        ("@batched(max_size=4)\n@isolate(workers=1)", ("grows", ["worker processes"])),
        # Few uses: their sawtooth must not beat with the readings.
        ("@isolate(workers=1, recycle_on=Uses(5))", ("steady", [])),
        ("@isolate(workers=1, recycle_on=Uses(100), start='spawn')", ("steady", [])),
    ],
)
def test_what_workers_keep_is_counted(folder: Path, decorators: str, expected: tuple[str, list[str]]) -> None:
    """An isolated function keeps its memory in worker processes, until they are replaced."""
    code = f"{decorators}\ndef keeps(given):\n    kept.append(b'x' * 20_000)\n    return given\n"
    (folder / "lent.py").write_text(f"from modelguard import Uses, batched, isolate\nkept = []\n{code}")
    report = diagnose("lent:keeps", inputs=inputs(folder, "1"), calls=800, seconds=60, trial_seconds=0, cwd=folder)
    assert expected == (report.verdict, [cause.name for cause in report.causes])


def test_a_generator_function_is_consumed(folder: Path) -> None:
    """A lazy result belongs to the call."""
    assert "steady" == diagnose("app:lazily", inputs=inputs(folder, '"x\u2028y"'), seconds=4, cwd=folder).verdict


@pytest.mark.parametrize("target", ["app:forks", "app:comes_back"])
def test_a_function_that_forks(folder: Path, target: str) -> None:
    """Its children are its own; one that comes back from the call ends there, and says nothing."""
    report = diagnose(target, calls=240, seconds=30, cwd=folder)
    assert "steady" == report.verdict
    assert report.measured.calls[-1] in (24 * 6, 3 * 24 * 6)  # the second where one run leaves it undecided


@pytest.mark.parametrize("name", ["later", "streams"])
def test_what_a_call_gives_is_awaited(folder: Path, name: str) -> None:
    """Asynchronous generators, and coroutines of functions that are not ``async`` themselves: else nothing runs."""
    report = diagnose(f"app:{name}", seconds=4, cwd=folder)
    assert "grows" == report.verdict
    assert "app.kept (list" in report.causes[0].seen


def test_calls_that_leave_the_program_are_failures(folder: Path) -> None:
    """As ``sys.exit()`` does, a cancellation, and the timeouts of some libraries; also in a folder that is removed."""
    measured = diagnose("app:leaves", seconds=4, cwd=folder).measured
    assert measured.failures == measured.calls[-1] > 0
    assert ["SystemExit"] == [error.partition(" at ")[0] for error in measured.errors]


def test_calls_decide_and_not_the_time(folder: Path) -> None:
    """The number of calls is the same on any machine."""
    reports = [diagnose("app:none", calls=200, seconds=30, cwd=folder) for _ in range(2)]
    assert reports[0].measured.calls == reports[1].measured.calls


def test_what_is_counted_is_counted_over_the_calls_that_are_named(folder: Path) -> None:
    """Neither over the calls before the readings, nor over those after them; young garbage counts as what it is."""
    report = diagnose("app:maps", calls=300, seconds=30, cwd=folder)
    measured = report.measured
    assert {"cycles", "mappings"} == {cause.name for cause in report.causes}
    assert measured.count == measured.more("mappings") == measured.held[0].more <= measured.garbage


@pytest.mark.parametrize(("way", "add"), [("kept", "kept.append"), ("deep.table", "deep.table.__setitem__")])
def test_what_is_frozen_is_named(folder: Path, way: str, add: str) -> None:
    """As before a fork of workers: the collector shows nothing of it, but nothing is forked here."""
    made = "import app, gc, itertools\nkept, deep = [], app.Deep()\ndeep.table = {}\ngc.freeze()\n"
    inputs = "def inputs(): return itertools.count()\n"
    call = f"def f(n): {add}({'n, ' if 'item' in add else ''}bytearray(5000))\n"
    (folder / "cold.py").write_text(made + inputs + call)
    report = diagnose("cold:f", generate="cold:inputs", calls=400, seconds=30, cwd=folder)
    assert f"cold.{way}" == report.measured.held[0].path


def test_so_much_per_call_that_few_readings_would_be_left(folder: Path) -> None:
    """Readings come sooner, and what holds it is named: no variable of the diagnosis itself."""
    report = diagnose("app:floods", calls=300, seconds=30, trial_seconds=0, cwd=folder)
    assert ("grows", ["python objects"]) == (report.verdict, [cause.name for cause in report.causes])
    assert "held by app.kept (list" in report.causes[0].seen
    assert "running call" not in report.causes[0].seen
    assert report.measured.calls[-1] < 60


def test_too_little_time(folder: Path) -> None:
    """It is undecided, and the report says how long it needs."""
    report = diagnose("app:slow", seconds=1, cwd=folder)
    assert "undecided" == report.verdict
    assert re.search(r"it needs --time \d+s", report.unknown[0]), report


def test_ctrl_c_keeps_what_there_is(folder: Path) -> None:
    """The readings so far are reported; the status says that nothing is decided, or what was."""
    program = [sys.executable, "-m", "modelguard", "diagnose", "app:steps", "--inputs", inputs(folder, "1"), "--time"]
    with subprocess.Popen([*program, "1h", "--json"], stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        wait_until((folder / "driven").exists, "the function is called")
        process.send_signal(signal.SIGINT)
        report = json.loads(process.communicate(timeout=60)[0])
    assert 3 == process.returncode
    assert any(re.match(r"it was interrupted after \d+ seconds", each) for each in report["unknown"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_what_is_driven(folder: Path, number: signal.Signals) -> None:
    """A runner that gives up sends SIGTERM: neither a call that hangs nor, unless it is killed, a child outlives it."""
    program = [sys.executable, "-m", "modelguard", "diagnose", "app:hangs", "--time", "1h"]
    with subprocess.Popen(program, stderr=subprocess.PIPE, cwd=folder) as process:
        wait_until(lambda: (folder / "started").exists() and (folder / "started").read_text() != "", "the call")
        child = int((folder / "started").read_text())
        found = _proc.descendants(process.pid, _proc.processes())
        driven = [each.pid for each in found if each.pid not in (process.pid, child)]
        process.send_signal(number)
        assert -number == process.wait(60)
    if number == signal.SIGKILL:
        os.kill(child, signal.SIGKILL)
    else:
        driven.append(child)
    assert driven
    wait_until(lambda: all((each := _proc.stat(pid)) is None or not each.alive for pid in driven), "all to end")


def test_ctrl_c_amid_the_readings(folder: Path) -> None:
    """What was read until then is in the report."""

    def interrupt(line: Mapping[str, Any]) -> None:
        if line.get("phase") == "drive" and line["calls"] > 20:
            raise KeyboardInterrupt

    report = diagnose("app:none", calls=200, seconds=30, cwd=folder, progress=interrupt)
    assert report.measured.calls[-1] > 20
    assert report.unknown[0].startswith("it was interrupted after ")


def test_many_inputs(folder: Path) -> None:
    """A file may be larger than a command line."""
    lines = (json.dumps({"text": f"{number} {'x' * 1000}"}) for number in range(1000))
    assert diagnose("app:lazily", inputs=inputs(folder, *lines), calls=60, seconds=30, cwd=folder).measured.calls


def test_without_proc(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is missing."""
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with pytest.raises(NotSupported, match="there is no /proc"):
        diagnose("app:none", cwd=folder)


@pytest.mark.parametrize("name", ["hangs", "waits", "native", "deaf"])
def test_a_call_that_does_not_return(folder: Path, name: str) -> None:
    """It ends at its limit with the stack of the call, and all that it has started with it."""
    report = diagnose(f"app:{name}", seconds=1, cwd=folder)
    assert "undecided" == report.verdict
    assert "a call has not returned for 3 seconds" in report.unknown[0]
    assert re.search(rf"app\.py:\d+ in {name}$", report.unknown[0]), report.unknown
    assert "6s or more for --time" in report.unknown[1]
    if name == "hangs":
        pid = int((folder / "started").read_text())
        wait_until(lambda: not (found := _proc.stat(pid)) or not found.alive, "what it has started has ended")


def test_a_function_that_ends_the_process(folder: Path) -> None:
    """It is undecided, and the report says why."""
    report = diagnose("app:exits", seconds=4, cwd=folder)
    assert "undecided" == report.verdict
    assert "status 7" in report.unknown[0]


@pytest.mark.parametrize(("name", "verdict"), [("dies", "undecided"), ("bursts", "grows")])
def test_a_process_that_is_killed_is_never_cleared(folder: Path, name: str, verdict: str) -> None:
    """As for want of memory: in fewer calls less is seen. Growth that was proved before is growth."""
    report = diagnose(f"app:{name}", calls=1500, seconds=30, cwd=folder)
    assert verdict == report.verdict
    assert "before the diagnosis did: SIGKILL" in report.unknown[0]


def test_a_function_that_closes_what_it_has_not_opened(folder: Path) -> None:
    """As a daemon does with all descriptors: it is driven to the end."""
    report = diagnose("app:closes", calls=100, cwd=folder)
    assert "grows" == report.verdict
    assert ["python objects"] == [cause.name for cause in report.causes]


@pytest.mark.parametrize(("code", "says"), [("raise SystemExit(5)", "status 5"), ("while True: pass", "hung.py:1 in ")])
def test_a_module_that_ends_or_hangs_while_it_is_imported(folder: Path, code: str, says: str) -> None:
    """Nothing could be driven, which is an error and no verdict."""
    (folder / "hung.py").write_text(code)
    with pytest.raises(InvalidOption, match=says):
        diagnose("hung:f", seconds=1, cwd=folder, silence=3)


def test_calls_that_all_fail_end_it_early(folder: Path) -> None:
    """The type and the line of the error are told, and how to see its message, which may hold personal data."""
    file = inputs(folder, "1")
    report = diagnose("app:raises", inputs=file, seconds=20, cwd=folder)
    told = " ".join(report.unknown)
    assert report.measured.seconds < 10
    assert "KeyError at app.py:24" in told
    assert f"call raises with input 1 of {file} yourself" in told


@pytest.mark.parametrize(
    ("name", "counted", "seen"),
    [
        ("opens", "open files", "app.py"),
        ("connects", "open files", "sockets to 127.0.0.1:"),
        ("threads", "threads", "Thread-N (sleep)"),
        ("starts", "child processes", "sleep 1000"),
    ],
)
def test_what_runs_out_beside_memory(folder: Path, name: str, counted: str, seen: str) -> None:
    """Open files, threads and child processes that grow are findings, with what they are."""
    report = diagnose(f"app:{name}", calls=120, seconds=30, cwd=folder)
    assert "grows" == report.verdict
    found = {each.name: each for each in report.measured.growing}[counted]
    assert seen in found.seen
    assert found.more == pytest.approx(found.calls, abs=8 if name != "connects" else found.calls)


def test_a_function_that_takes_all_descriptors(folder: Path) -> None:
    """It raises nothing itself, and nothing more can be read: what it has opened is the finding."""
    report = diagnose("app:takes_all", calls=120, seconds=30, cwd=folder)
    assert ["open files"] == [each.name for each in report.measured.growing]
    assert "app.py" in report.measured.growing[0].seen


def test_a_function_that_lowers_its_limit_of_open_files(folder: Path) -> None:
    """It opens none that it does not close: no open file is accused, and it is measured to the end."""
    report = diagnose("app:lowers", calls=120, seconds=30, cwd=folder)
    assert ("steady", (), 0) == (report.verdict, report.measured.growing, report.measured.failures)


def test_another_limit_of_that_name_is_a_failure(folder: Path) -> None:
    """The system has fewer watches of files than descriptors, and says the same: no open file is accused."""
    report = diagnose("app:of_a_limit", calls=120, seconds=30, cwd=folder)
    assert ("undecided", ()) == (report.verdict, report.measured.growing)
    assert report.measured.failures


def test_a_pool_that_fills_is_no_finding(folder: Path) -> None:
    """What is opened once and kept does not grow with the calls."""
    assert () == diagnose("app:pool", calls=240, seconds=30, cwd=folder).measured.growing


@pytest.mark.parametrize(
    ("target", "lines", "says"),
    [
        ("app", None, "must be module:function"),
        ("nope:f", None, "No module named 'nope'"),
        ("app:nope", None, "no attribute 'nope'"),
        ("app:kept", None, "not callable"),
        ("app:model.predict", None, "neither --inputs nor --generate is given: missing a required argument: 'text'"),
        ("app:model.predict", ['"x"', "{"], "line 2 is not JSON"),
        ("app:model.predict", [], "must not be empty"),
        ("app:model.predict", ['"x"', "[1, 2]"], "input 2: too many positional arguments"),
        ("app:model.predict", ['{"txt": 1}'], "input 1: missing a required argument: 'text'"),
    ],
)
def test_bad_input(folder: Path, target: str, lines: list[str] | None, says: str) -> None:
    """One error says what is wrong."""
    with pytest.raises(InvalidOption) as caught:
        diagnose(target, inputs=None if lines is None else inputs(folder, *lines), seconds=4, cwd=folder)
    assert says in str(caught.value)


def test_a_generator_that_ends(folder: Path) -> None:
    """The error says after how many inputs."""
    with pytest.raises(InvalidOption, match="the generator ended after 3 inputs"):
        diagnose("app:raises", generate="app:three", seconds=4, cwd=folder)


def test_a_function_whose_name_looks_like_a_secret(folder: Path) -> None:
    """An error shows it, and what is wrong: ``tokenizer:`` is no password."""
    (folder / "tokenizer.py").write_text("")
    said = command(folder, "tokenizer:encode", "--time", "1s").stderr
    assert "'tokenizer:encode': could not be driven: AttributeError" in said
    assert "--load='tokenizer:': must be" in command(folder, "tokenizer:encode", "--load", "tokenizer:").stderr


def test_a_secret_of_the_variables_that_it_is_given(folder: Path) -> None:
    """An error at the import does not show it, though this process does not have it."""
    (folder / "telling.py").write_text("import os\nraise ImportError(os.environ['DB_PASSWORD'])")
    with pytest.raises(InvalidOption, match="ImportError") as caught:
        diagnose("telling:f", environ={**os.environ, "DB_PASSWORD": "hunter2-word"}, cwd=folder)
    assert "hunter2-word" not in str(caught.value)


def test_errors_of_the_command(folder: Path) -> None:
    """One line, and status 2."""
    for words in (
        ("app:none", "--time", "never"),
        ("app:none", "--inputs", "no.jsonl"),
        ("nope:f",),
        (),
        ("app:none", "--pid", "1"),
        ("--pid", "1", "--calls", "100"),
        ("--pid", "1", "--try", "1m"),
        ("--pid", "1", "--bucketed", "ids"),
        ("app:none", "--calls", "many"),
        ("app:none", "--calls", "5"),
        ("app:none", "--try", "soon"),
        ("app:none", "--load", "app"),
    ):
        done = command(folder, *words)
        assert (2, "", 1) == (done.returncode, done.stdout, len(done.stderr.splitlines())), done.stderr
