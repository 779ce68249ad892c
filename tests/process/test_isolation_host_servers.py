"""``scope="host"`` behind real web servers with several worker processes, and chaos of bounded length."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from tests.process import isolated_servers
from tests.process.harness import Clients, Server, wait_until
from tests.process.host_callers import (
    APP,
    Caller,
    CallFailed,
    end_all,
    family,
    molds,
    molds_and_workers,
    nothing_left,
    write,
)
from tests.process.web_server import NEEDS_SERVERS

from modelguard import memory

pytestmark = pytest.mark.timeout(300)

SECONDS = float(os.environ.get("CHAOS_SECONDS", "12"))

MODEL = """
    import os
    from modelguard import guard, isolate

    def load():
        return [f"word {n}" for n in range(1_000_000)]  # 70 MB of Python objects

    @isolate(workers=2, timeout="30s", scope=os.environ["SCOPE"])
    @guard(load, reload_on=None)
    def predict(words):
        return os.getppid()  # the mold

    AT_STARTUP = True

    def content(answer):
        return f"{os.getpid()} {answer}".encode()
"""
ASGI = MODEL + isolated_servers.ASGI
WSGI = MODEL + isolated_servers.WSGI
UVICORN = (*isolated_servers.UVICORN, "--workers", "3")
GUNICORN = (*isolated_servers.GUNICORN, "-w", "3")

SERVERS = pytest.mark.parametrize(
    ("app", "command"),
    [(ASGI, UVICORN), (WSGI, GUNICORN), (WSGI, (*GUNICORN, "--preload"))],
    ids=["uvicorn", "gunicorn", "gunicorn-preload"],
)


def started(folder: Path, app: str, command: tuple[str, ...], scope: str = "host") -> Server:
    """Start a server whose workers meet in the folder."""
    return isolated_servers.started(folder, app, *command, MODELGUARD_RUNTIME_DIR=str(folder / "run"), SCOPE=scope)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder where brokers meet. The end of a test kills servers with all their descendants; sockets may remain."""
    yield tmp_path
    end_all(tmp_path)


def tree_pss(server: Server, folder: Path) -> float:
    """Proportional memory of a server and of all processes that compute for it, in MB."""
    processes = {process.pid for process in family(folder)}
    processes |= {process.pid for process in psutil.Process(server.process.pid).children(recursive=True)}
    total = 0
    for pid in processes:
        with suppress(ProcessLookupError):
            total += memory.usage(pid).pss or 0
    return total / 1e6


@NEEDS_SERVERS
@SERVERS
def test_all_web_workers_share_one_mold(folder: Path, app: str, command: tuple[str, ...]) -> None:
    """One mold for all, and less memory than with a mold for each."""
    found = {}
    for scope in ("process", "host"):
        with started(folder, app, command, scope) as server:
            with Clients(server, count=8) as clients:
                wait_until(lambda: len(clients.pids) == 3, "answers of all web workers")
            assert [] == clients.failures, clients
            wait_until(lambda: len(molds(folder)) == (1 if scope == "host" else 3), "the molds")  # noqa: B023
            assert len(molds(folder)) == len(clients.versions)
            found[scope] = tree_pss(server, folder)
            print(f"{scope}: {found[scope]:.0f} MB of proportional memory")  # noqa: T201 - with -s, the figures
        wait_until(lambda: not family(folder), "the end of all")
    assert found["host"] < found["process"] - 80


@NEEDS_SERVERS
@SERVERS
def test_the_mold_survives_the_web_worker_that_started_it(folder: Path, app: str, command: tuple[str, ...]) -> None:
    """It is killed under load: its own connections break, and everybody else goes on with the same mold."""
    with started(folder, app, command) as server:
        with Clients(server, count=4) as clients:
            wait_until(lambda: len(clients.pids) == 3, "answers of all web workers")
            (broker,) = family(folder, "broker")
            starter = broker.ppid()
            assert str(starter) in clients.pids or "preload" in command[-1]
            os.kill(starter, signal.SIGKILL)
            before = clients.answered
            wait_until(lambda: len(clients.pids) == 4, "an answer of the web worker that took its place")
            wait_until(lambda: clients.answered > before + 100, "more answers")
        print(clients)  # noqa: T201 - with -s, the tally
        assert len(clients.failures) <= 4  # each client has at most one connection to it
        assert 1 == len(clients.versions)
        assert [broker] == family(folder, "broker")


@NEEDS_SERVERS
@SERVERS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server(folder: Path, app: str, command: tuple[str, ...], number: signal.Signals) -> None:
    """Neither after its graceful end, nor when all of its processes are killed at once."""
    with started(folder, app, command) as server:
        everybody = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
        members = {process.pid for process in family(folder)}
        if number == signal.SIGTERM:
            server.process.send_signal(number)
        else:
            for process in everybody:
                if process.pid not in members:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
        wait_until(lambda: nothing_left(folder), "the end", 40.0)


#: What a call may end with, besides its answer.
NAMED = {"WorkerCrashed", "DeadlineExceeded", "QueueFull", "CircuitOpen", "Reloading", "LoadFailed"}


def test_chaos(folder: Path) -> None:
    """Callers, workers, molds and brokers are killed and stopped: each call gets its answer or a named error."""
    chance = random.Random(11)
    total: Counter[str] = Counter()
    blows: Counter[str] = Counter()
    longest = 0.0
    write(folder, APP.replace('timeout="20s"', 'timeout="2s"'))
    with ExitStack() as stack:
        callers = [begin(stack.enter_context(Caller(folder))) for _ in range(3)]
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.2, 1.0))
            blow = chance.choice(["worker", "worker", "stop", "mold", "broker", "caller", "reload"])
            blows[blow] += 1
            if blow == "caller":
                number = chance.randrange(len(callers))
                callers[number].process.kill()
                callers[number] = begin(stack.enter_context(Caller(folder)))
            elif blow == "reload":
                with suppress(CallFailed):
                    callers[0].run("app.predict.reload(wait=False)")
            else:
                strike(chance, folder, blow)
        for caller in callers:
            tally, seconds = caller.run("result = load.end()")
            total.update(tally)
            longest = max(longest, seconds)
        print(dict(total), dict(blows), f"longest {longest:.1f} s")  # noqa: T201 - with -s, the tally
        assert set(total) <= NAMED | {"answered"}, [caller.run("result = load.last") for caller in callers]
        assert total["answered"] > 10
        assert longest < 60
        for caller in callers:
            wait_until(lambda: answered(caller), "an answer after the storm")  # noqa: B023
        wait_until(lambda: 1 == len(molds(folder)), "one mold")


def begin(caller: Caller) -> Caller:
    """Have a new caller call without a break."""
    caller.run("load = Load(3, app.predict)")
    return caller


def strike(chance: random.Random, folder: Path, blow: str) -> None:
    """Kill or stop a process that is no caller."""
    its_molds, workers = molds_and_workers(folder)
    targets = {"broker": family(folder, "broker"), "mold": its_molds}.get(blow, workers)
    with suppress(psutil.NoSuchProcess, IndexError):
        chance.choice(targets).send_signal(signal.SIGSTOP if blow == "stop" else signal.SIGKILL)


def answered(caller: Caller) -> bool:
    """Whether its call is answered."""
    with suppress(CallFailed):
        return bool(caller.call())
    return False
