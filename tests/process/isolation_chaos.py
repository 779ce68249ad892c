"""A storm over an isolated function, with eight callers: python -m tests.process.isolation_chaos --seconds 180.

Workers exit, crash, hang, take memory, are stopped and killed; molds are killed, stopped, replaced; owners are killed.
Every call must get its own answer or one named error in bounded time, and in the end nothing may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
from tests.process import isolated_functions as functions
from tests.process.harness import wait_until

from modelguard import memory
from modelguard.errors import DeadlineExceeded, LoadFailed, Overloaded, WorkerCrashed

CALLERS = 8
#: What a call may end with, besides its answer.
NAMED = (WorkerCrashed, DeadlineExceeded, Overloaded, LoadFailed)
ORDERS = [
    *["x"] * 200,
    *["exit", "segfault", "SIGKILL", "SIGABRT", "SIGSTOP", "hang"],
    *["slow", "slow", "balloon", "balloon", "bubble", "bubble"],
]
BLOWS = ["kill worker", "kill worker", "stop worker", "kill mold", "stop mold", "reload"]
#: How long a stopped mold stays so: until then nobody can fork, and calls go to the workers that are left.
STOPPED = 1.5
#: Seconds that any call may take: waiting for a mold takes at most ``wait_timeout``, 30 seconds.
LONGEST = 40.0
#: Looks in a row, a tenth of a second apart, that find nothing left: /proc has no environment of a process in its exec.
QUIET_LOOKS = 3
#: Names the processes of one owner, in their environment.
MARK = "MODELGUARD_CHAOS_OWNER"


@dataclass
class Tally:
    """What a storm has brought.

    Attributes:
        calls: What the calls got.
        blows: What was done from outside.
        wrong: Answers to other calls, and errors that are not named.
        longest: Seconds of the longest call.
        descriptors: How many are open in the owner at the start, and at the end.
        opened: What is open at the end under numbers that were free at the start, or stood for something else.
        memory: Private bytes of the owner at the start, and at the end.
        left: Processes that are still there.
    """

    calls: Counter[str] = field(default_factory=Counter)
    blows: Counter[str] = field(default_factory=Counter)
    wrong: list[object] = field(default_factory=list)
    longest: float = 0.0
    descriptors: tuple[int, int] = (0, 0)
    opened: list[tuple[str, str]] = field(default_factory=list)
    memory: tuple[int, int] = (0, 0)
    left: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            (
                f"calls: {sum(self.calls.values()):,}: "
                + ", ".join(f"{count:,} {what}" for what, count in self.calls.most_common()),
                f"longest call: {self.longest:.1f} s; wrong answers and errors without a name: {len(self.wrong)}",
                "blows: " + ", ".join(f"{count} x {what}" for what, count in self.blows.most_common()),
                "descriptors: {} at the start, {} at the end".format(*self.descriptors),
                "private memory of the owner: {:.1f} MB at the start, {:.1f} MB at the end".format(
                    *(size / 1e6 for size in self.memory)
                ),
                f"processes left: {len(self.left)}",
            )
        )


class Callers:
    """Threads that call one after the other, each by one of the three doors, and note what came of each call."""

    def __init__(self, function: Any, tally: Tally) -> None:
        self._function = function
        self._tally = tally
        self._noting = threading.Lock()
        self._stop = threading.Event()
        doors = [self._by_call, self._by_call, self._by_future, self._by_coroutine]
        self._threads = [
            threading.Thread(target=self._run, args=(seed, doors[seed % len(doors)])) for seed in range(CALLERS)
        ]

    def _by_call(self, order: str, token: str) -> object:
        return self._function(order, token)

    def _by_future(self, order: str, token: str) -> object:
        return self._function.submit(order, token).result(2 * LONGEST)

    def _by_coroutine(self, order: str, token: str) -> object:
        return asyncio.run(self._function.aio(order, token))

    def _run(self, seed: int, call: Callable[[str, str], object]) -> None:
        chance = random.Random(seed)
        while not self._stop.is_set():
            order, token, started = chance.choice(ORDERS), uuid.uuid4().hex, time.monotonic()
            wrong: object = None
            try:
                answer = call(order, token)
            except NAMED as error:
                outcome = type(error).__name__
            except BaseException as error:  # noqa: BLE001 - the test reports it
                outcome, wrong = "wrong", error
            else:
                outcome = "answered"
                if answer != (order, token):
                    wrong = (order, token, answer)
            with self._noting:
                self._tally.calls[outcome] += 1
                self._tally.longest = max(self._tally.longest, time.monotonic() - started)
                if wrong is not None:
                    self._tally.wrong.append(wrong)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def storm(seconds: float, *, owners: bool = False) -> Tally:
    """Let it rage for so long; ``owners``: also start other owners beside this one, and kill them."""
    function, tally = functions.storm, Tally()
    with function:
        with Callers(function, Tally()):  # what is built on first use is no growth
            time.sleep(min(5.0, seconds / 4))
        settle(function)
        before, held = descriptors(), memory.usage().uss or 0
        until = time.monotonic() + seconds
        with Callers(function, tally):
            threads = [threading.Thread(target=strike, args=(function, until, tally))]
            if owners:
                threads.append(threading.Thread(target=kill_owners, args=(until, tally)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        settle(function)
        with suppress(AssertionError):  # a thread that ends, or the collector, may have them still
            wait_until(lambda: len(descriptors()) <= len(before), "the end of descriptors", 20.0)
        after = descriptors()
        tally.memory = held, memory.usage().uss or 0
    tally.descriptors = len(before), len(after)
    tally.opened = sorted(after.items() - before.items())
    with suppress(AssertionError):
        wait_until(lambda: not descendants(), "the end of all processes")
    tally.left += [one.pid for one in descendants()]
    return tally


def strike(function: Any, until: float, tally: Tally) -> None:
    """Strike the processes of the function at random times."""
    chance = random.Random(7)
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.2, 1.0))
        blow = chance.choice(BLOWS)
        status = function.status()
        if blow == "reload":
            function.reload(wait=False)
        elif "worker" in blow:
            pids = [one.pid for one in status.workers if one.pid]
            if not pids:
                continue
            hit(chance.choice(pids), signal.SIGKILL if "kill" in blow else signal.SIGSTOP)
        elif status.mold is None:
            continue
        elif "kill" in blow:
            hit(status.mold, signal.SIGKILL)
        else:
            hit(status.mold, signal.SIGSTOP)
            time.sleep(STOPPED)
            hit(status.mold, signal.SIGCONT)
        tally.blows[blow] += 1


def hit(pid: int, number: signal.Signals) -> None:
    """Send a signal to what may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def settle(function: Any) -> None:
    """Wait until the function answers, and all of its workers are idle."""

    def is_calm() -> bool:
        with suppress(*NAMED):
            function("x", "calm")
        status = function.status()
        states = [one.state for one in status.workers]  # a spare one too, from the first replacement on
        return status.ready and states in (["idle"] * 3, ["idle"] * 4) and not status.in_flight

    wait_until(is_calm, "calm after the storm", 90.0)
    time.sleep(1.5)  # threads of callers end, and what a dead mold has left is collected
    gc.collect()


def descriptors() -> dict[str, str]:
    """The open descriptors of this process, and what they stand for."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            found[entry.name] = str(entry.readlink())
    return found


def descendants() -> list[psutil.Process]:
    """The molds of this process, and their workers."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "mold" in child.cmdline():
                found.append(child)
    return found


def kill_owners(until: float, tally: Tally) -> None:
    """Start owners with callers, kill each at a random moment, and see all of its processes end."""
    chance = random.Random(11)
    while time.monotonic() < until:
        name = uuid.uuid4().hex
        command = [sys.executable, "-m", __spec__.name, "--owner"]
        environment = {**os.environ, MARK: name}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            if chance.random() < 0.8:  # else it is killed while it starts
                process.stdout.readline()
            time.sleep(chance.uniform(0.0, 2.0))
            process.kill()
        until_all_ended = time.monotonic() + 60.0
        left, quiet = marked(name), 0
        while quiet < QUIET_LOOKS and time.monotonic() < until_all_ended:
            time.sleep(0.1)
            left = marked(name)
            quiet = 0 if left else quiet + 1
        tally.left += left
        tally.blows["kill owner"] += 1


def marked(name: str) -> list[int]:
    """The processes that have this mark in their environment, and run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def own() -> None:
    """Be an owner until killed."""
    with functions.storm as function:
        print("loaded", flush=True)  # noqa: T201 - its parent waits for it
        with Callers(function, Tally()):
            time.sleep(600)


def main() -> int:
    """Run a storm and print its tally."""
    parser = argparse.ArgumentParser(description="A storm over an isolated function; prints what came of each call.")
    parser.add_argument("--seconds", type=float, default=180.0, metavar="S", help="default: %(default)s")
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner:
        own()
        return 0
    tally = storm(options.seconds, owners=True)
    print(tally, *tally.wrong[:10], sep="\n")  # noqa: T201 - it is what the script is for
    return 1 if tally.wrong or tally.left or tally.longest > LONGEST else 0


if __name__ == "__main__":
    sys.exit(main())
