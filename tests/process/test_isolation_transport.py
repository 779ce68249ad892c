"""What passes between an owner and its workers, under signals, forks, closed descriptors and at exit, in each scope."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.host_callers import end_all

pytestmark = pytest.mark.timeout(240)

APP = """
    import asyncio, os, sys, time
    from modelguard import Backoff, Bounds, Breaker, Loading, guard, isolate

    class BadInput(Exception):
        def __init__(self, text, data):
            super().__init__(text, data)
            self.data = data

    def load():
        if "FAIL" in os.environ:
            import numpy
            raise ValueError("bad weights", numpy.zeros(int(os.environ["FAIL"])))
        return {}

    model = guard(load, reload_on=None, loading=Loading(backoff=Backoff(0.05, 0.2)), name="model")
    options = {"scope": os.environ["SCOPE"], "timeout": "20s", "breaker": Breaker(failures=1000)}

    @isolate(workers=1, **{**options, "timeout": "1s"})
    @model
    def hangs(_):
        time.sleep(600)

    @isolate(workers=1, **{**options, "timeout": "1s"})
    @model
    def hangs_in_a_stream(_):
        yield 0
        time.sleep(600)

    @isolate(workers=2, **options)
    @model
    def echo(_, value):
        return value

    @isolate(workers=2, **options)
    @model
    def fork_in_call(_, count):
        os.fork()
        return list(range(count))

    @isolate(workers=2, **options)
    @model
    async def fork_in_coroutine(_, count):
        os.fork()
        await asyncio.sleep(0)
        return list(range(count))

    @isolate(workers=2, **options)
    @model
    def fork_in_stream(_, count):
        for number in range(count):
            if number == 3:
                os.fork()
            yield number
        os.fork()

    @isolate(workers=2, **options)
    @model
    async def fork_in_async_stream(_, count):
        for number in range(count):
            if number == 3:
                os.fork()
            await asyncio.sleep(0)
            yield number

    class Forks:
        def __init__(self, value):
            self.value = value

        def __reduce__(self):
            if self.value == 3:
                os.fork()
            return list, ([self.value],)

    @isolate(workers=2, **options)
    @model
    def fork_in_pickle(_, count):
        return [Forks(number) for number in range(count)]

    @isolate(workers=1, bounds=Bounds(transfer="2 MB"), **options)
    @model
    def bad(_, kind, size):
        if kind == "array":
            import numpy
            data = numpy.arange(size, dtype="uint8")
        else:
            data = b"x" * size
        raise BadInput("bad", data)

    @isolate(workers=1, **options)
    @model
    async def countdown(_, number, door=""):
        if door == "submit":
            return countdown.submit(number)
        return 0 if number == 0 else 1 + await countdown.aio(number - 1)

    @isolate(workers=1, **options)
    @model
    def descriptors(_):
        os.write(1, b"to the output")
        os.write(2, b"to the errors")
        return [os.path.exists(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
"""

PRELUDE = """
import asyncio, json, os, signal, sys, threading, time
sys.path.insert(0, os.environ["FOLDER"])
import app

def answer(value, *, path=os.path.join(os.environ["FOLDER"], "answer")):
    with open(path, "w") as file:
        json.dump(value, file)

def outcome(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""

Run = Callable[..., Any]


@pytest.fixture(params=["process", "host"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """Run a program in an interpreter of its own; returns what it has answered."""
    (tmp_path / "app.py").write_text(textwrap.dedent(APP))
    places = {"FOLDER": str(tmp_path), "MODELGUARD_RUNTIME_DIR": str(tmp_path / "run"), "SCOPE": request.param}

    def run_program(program: str, **environment: str) -> Any:
        with (tmp_path / "errors").open("w") as errors:
            status = subprocess.run(
                [sys.executable, "-c", PRELUDE + textwrap.dedent(program)],
                env={**os.environ, **places, **environment},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                timeout=120,
                check=False,
            ).returncode
        assert 0 == status, (tmp_path / "errors").read_text()[-3000:]
        return json.loads((tmp_path / "answer").read_text())

    yield run_program
    end_all(tmp_path)


@pytest.mark.parametrize("call", ["app.hangs()", "list(app.hangs_in_a_stream())"])
def test_signals_do_not_make_a_timeout_longer(run: Run, call: str) -> None:
    """A program with an interval timer gets its ``DeadlineExceeded`` while the timer runs, and not after it."""
    program = f"""
        function = app.{call.partition("app.")[2].partition("(")[0]}
        function.load()
        signal.signal(signal.SIGUSR1, lambda *_: None)
        me, ended, interrupted = threading.get_ident(), threading.Event(), threading.Event()

        def interrupt():
            until = time.monotonic() + 30
            while not ended.wait(0.1) and time.monotonic() < until:
                signal.pthread_kill(me, signal.SIGUSR1)
            if ended.is_set():
                interrupted.set()

        thread = threading.Thread(target=interrupt)
        thread.start()
        result = outcome(lambda: {call})
        ended.set()
        thread.join()
        answer([result.partition(":")[0], interrupted.is_set()])
    """
    assert ["DeadlineExceeded", True] == run(program)


def test_the_end_of_a_process_does_not_end_its_owner(run: Run) -> None:
    """Also where the program has set the default of SIGPIPE: idle workers, molds and brokers may be killed."""
    program = """
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        answers = []
        for victims in ("workers", "mold", "broker") * 2:
            assert 1 == app.echo(1)
            status = app.echo.status()
            pids = {"workers": [one.pid for one in status.workers], "mold": [status.mold], "broker": [status.broker]}
            for pid in filter(None, pids[victims]):
                os.kill(pid, signal.SIGKILL)
            until = time.monotonic() + 60
            while (last := outcome(lambda: app.echo(2))) != 2 and time.monotonic() < until:
                time.sleep(0.05)
            answers.append(last)
        answer(answers)
    """
    assert [2] * 6 == run(program)


KINDS = {
    "call": "app.fork_in_call(n)",
    "coroutine": "asyncio.run(app.fork_in_coroutine.aio(n))",
    "stream": "list(app.fork_in_stream(n))",
    "async stream": "asyncio.run(collect(n))",
    "pickle": "sum(app.fork_in_pickle(n), [])",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_forks_answers_once(run: Run, kind: str) -> None:
    """The process that the function has forked ends when it comes back from it; its parent's answers stay in order."""
    program = f"""
        async def collect(n):
            return [item async for item in app.fork_in_async_stream(n)]

        answer([outcome(lambda: {KINDS[kind]}) for n in range(4, 16)])
    """
    assert [list(range(n)) for n in range(4, 16)] == run(program)


def test_errors_keep_their_type_and_their_data(run: Run) -> None:
    """Arrays and bytes of any size, up to ``Bounds(transfer=)``; beyond it, the error is described."""
    pytest.importorskip("numpy")
    program = """
        def of(kind, size):
            try:
                app.bad(kind, size)
            except app.BadInput as error:
                return [len(error.data), "in bad" in str(error.__cause__)]
            except Exception as error:
                return [type(error).__name__, str(error)]

        answer([of(kind, size) for kind in ("array", "bytes") for size in (10, 4095, 4096, 300_000, 3_000_000)])
    """
    answers = run(program)
    for kept in (answers[:4], answers[5:9]):
        assert [[10, True], [4095, True], [4096, True], [300_000, True]] == kept
    for kind, text in (answers[4], answers[9]):
        assert "RemoteError" == kind
        assert "app.BadInput" in text
        assert "and Bounds(transfer=) is 2,000,000" in text
        assert len(text) < 3000


@pytest.mark.parametrize("size", ["3", "5000"])
def test_a_failed_load_with_an_array_is_reported(run: Run, size: str) -> None:
    """With what its error says; a broker imports no numpy for it."""
    pytest.importorskip("numpy")
    program = """
        from pathlib import Path

        def load():
            try:
                app.echo.load()
            except Exception as error:
                return [type(error).__name__, "bad weights" in str(error.__cause__)]

        outcome = load()
        broker = app.echo.status().broker
        maps = Path(f"/proc/{broker}/maps").read_text() if broker else ""
        answer([*outcome, "numpy" in maps])
    """
    assert ["LoadFailed", True, False] == run(program, FAIL=size)


def test_a_function_may_await_itself_in_its_worker(run: Run) -> None:
    """It runs on the model that is there, as by a plain call; what it cannot do there is named."""
    program = """
        answer([asyncio.run(app.countdown.aio(3)), outcome(lambda: asyncio.run(app.countdown.aio(1, "submit")))])
    """
    number, refusal = run(program)
    assert 3 == number
    assert refusal.startswith("NotSupported: app.countdown.submit() in its own worker")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_an_owner_without_input_and_output(run: Run, closed: tuple[int, ...]) -> None:
    """A daemon that has closed descriptors 0 to 2 calls as others do; what its workers print reaches nothing else."""
    program = f"""
        for fd in {closed}:
            os.close(fd)
        value = "x" * 300_000
        answer([app.echo(1), app.echo(value) == value, list(app.fork_in_stream(3)), app.descriptors(), app.echo(2)])
    """
    assert [1, True, [0, 1, 2], [True, True, True], 2] == run(program)


def test_a_call_of_a_finalizer_at_exit_is_refused(run: Run) -> None:
    """With ``GuardClosed``, when the modules are being cleared; no broker is started for it."""
    program = """
        import builtins

        class Late:
            def __del__(self, call=app.echo, open=os.open, write=os.write, flags=os.O_WRONLY | os.O_CREAT):
                try:
                    call(1)
                except BaseException as error:
                    name = type(error).__name__
                else:
                    name = "answered"
                write(open(self.path, flags), b'"' + name.encode() + b'"')

        Late.path = os.path.join(os.environ["FOLDER"], "answer")
        builtins.late = Late()
        app.echo(1)
    """
    assert "GuardClosed" == run(program)
