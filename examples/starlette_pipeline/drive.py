"""Put the same load on both services, below, at and above what they can do, and compare: python drive.py"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SERVICES = {"unguarded": "unguarded:app", "guarded": "app:app"}
RUNNING = re.compile(r"Uvicorn running on http://127\.0\.0\.1:(\d+)")
#: An answer is in time within so many seconds, and after so many the client gives up.
IN_TIME, PATIENCE = 1.0, 10.0
OK, REFUSED = 200, 503
#: Shares of the capacity to send, and connections for wrk.
SHARES, CONNECTIONS = (0.5, 1.0, 2.0), (1, 16, 256)
WORDS = ("the", "model", "of", "every", "request", "a", "second", "internationalisation", "memory", "allocators")


class Service:
    """One of the two under uvicorn."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "uvicorn", SERVICES[name], "--port", "0", "--no-access-log"]
        # One CPU for the model: with two, the event loop and this driver would take part of the second from it.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, cwd=HERE, env=environment, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := RUNNING.search(line):
                self.port = int(found[1])
                break
        else:
            self.process.communicate()
            raise RuntimeError(f"{name} did not start:\n{''.join(self.log)}")
        # Read on, so that the service never waits for room in the pipe.
        self.reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self.reader.start()

    def stop(self) -> None:
        """Ask the service to end, and wait until it has."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(5)  # the unguarded one computes what nobody waits for any more
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def serving(name: str) -> Iterator[Service]:
    """A running service that has answered once, ended afterwards."""
    service = Service(name)
    try:
        asyncio.run(ask(service.port, "Hello!", patience=60))
        yield service
    finally:
        service.stop()


@dataclass
class Answer:
    """What came back; status 0 for nothing in time."""

    status: int
    seconds: float
    headers: dict[str, str]
    body: bytes


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(
    port: int, text: str, path: str = "/", *, patience: float = PATIENCE, idle: list[Connection] | None = None
) -> Answer:
    """Send a text, or without one ask for a page, over one of the ``idle`` connections if there is one."""
    began, spare, writer = time.perf_counter(), [] if idle is None else idle, None
    try:
        async with asyncio.timeout(patience):
            while spare and spare[-1][0].at_eof():
                spare.pop()[1].close()
            reader, writer = spare.pop() if spare else await asyncio.open_connection("127.0.0.1", port)
            sent = text.encode()
            head = f"{'POST' if text else 'GET'} {path} HTTP/1.1\r\nHost: me\r\nContent-Length: {len(sent)}\r\n\r\n"
            writer.write(head.encode() + sent)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await reader.readexactly(int(headers["content-length"]))
    except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
        if writer is not None:
            writer.close()
        return Answer(0, math.inf, {}, b"")
    spare.append((reader, writer))
    if idle is None:
        writer.close()
    return Answer(int(status.split()[1]), time.perf_counter() - began, headers, body)


def texts(seed: int = 0) -> Iterator[str]:
    """Make texts without end, most of them short and some long, as people write them."""
    rng = random.Random(seed)
    while True:
        yield " ".join(rng.choices(WORDS, k=min(max(int(rng.lognormvariate(3, 0.8)), 1), 150)))


async def closed_loop(port: int, clients: int, seconds: float) -> list[Answer]:
    """Clients that each send the next text when the last is answered: what comes through is the capacity."""
    made, idle, end = texts(), list[Connection](), time.perf_counter() + seconds

    async def client() -> list[Answer]:
        answers = []
        while time.perf_counter() < end:
            answers.append(await ask(port, next(made), idle=idle))
        return answers

    return list(itertools.chain(*await asyncio.gather(*(client() for _ in range(clients)))))


async def open_loop(port: int, rate: float, seconds: float) -> list[Answer]:
    """Texts at random times, so many a second on average, whether the others are answered or not."""
    made, idle, rng = texts(), list[Connection](), random.Random(1)
    began, due = time.perf_counter(), rng.expovariate(rate)
    tasks: list[asyncio.Task[Answer]] = []
    while due < seconds:
        await asyncio.sleep(max(began + due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(ask(port, next(made), idle=idle)))
        due += rng.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def row(name: str, load: str, *figures: str, told: str) -> str:
    return f"{name:>10}{load:>17}" + "".join(f"{figure:>11}" for figure in figures) + f"  {told}"


HEAD = row("", "load", "200s /s", "in time /s", "p50", "p99", told="answers")


def drive(name: str, rate: float, seconds: float) -> tuple[float, float]:
    """Send at a rate, print what came back, and return how many a second were in time, and the p99 of the waits."""
    with serving(name) as service:  # a fresh one, without the queue of the last rate
        began = time.perf_counter()
        answers = asyncio.run(open_loop(service.port, rate, seconds))
        took = time.perf_counter() - began
    # How long they waited who were not refused at once; a client that gave up has waited for all of its patience.
    waits = sorted(min(answer.seconds, PATIENCE) for answer in answers if answer.status != REFUSED)
    p50, p99 = (waits[int((len(waits) - 1) * share)] for share in (0.5, 0.99))
    in_time = sum(answer.status == OK and answer.seconds <= IN_TIME for answer in answers) / seconds
    counts = Counter(str(answer.status or "none") for answer in answers)
    told = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    figures = (f"{counts[str(OK)] / took:.0f}", f"{in_time:.0f}", f"{p50:.2f} s", f"{p99:.2f} s")
    print(row(name, f"{rate:.0f}/s", *figures, told=told), flush=True)
    return in_time, p99


WRK = """
local texts, place, threads = {%s}, 0, {}
statuses = {}
function setup(thread) table.insert(threads, thread) end
function request()
  place = place %% #texts + 1
  return wrk.format("POST", "/", nil, texts[place])
end
function response(status) statuses[status] = (statuses[status] or 0) + 1 end
function done(summary, latency)
  local told = {}
  for status, count in pairs(threads[1]:get("statuses")) do table.insert(told, count .. " x " .. status) end
  table.sort(told)
  io.write(string.format("TOLD %%f %%f %%f %%s", summary.duration / 1e6, latency:percentile(50) / 1e6,
    latency:percentile(99) / 1e6, table.concat(told, ", ")))
end
"""


def wrk(name: str, connections: int, seconds: float) -> None:
    """The same by wrk, which has no rate: each connection sends the next text when the last is answered."""
    with serving(name) as service, tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "texts.lua")
        script.write_text(WRK % ", ".join(map(json.dumps, itertools.islice(texts(), 1000))), encoding="utf-8")
        options = ["-t", "1", "-c", str(connections), "-d", f"{seconds:.0f}s", "--timeout", "10s", "-s", str(script)]
        command = ["wrk", *options, f"http://127.0.0.1:{service.port}/"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    took, p50, p99, told = output.partition("TOLD ")[2].split(" ", 3)
    good = sum(int(part.split(" x ")[0]) for part in told.split(", ") if part.endswith(str(OK)))
    times = [f"{float(value):.2f} s" if told else "" for value in (p50, p99)]  # of all answers, refusals too
    figures = (f"{good / float(took):.0f}", "", *times)
    print(row(name, f"wrk, {connections} open", *figures, told=told.strip() or "none"), flush=True)


def draw(measured: dict[str, list[tuple[float, float]]], rates: list[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=130, layout="constrained")
    for axes, place, title in zip(
        figure.subplots(1, 2), (0, 1), ("Answered within 1 s, a second", "Wait, p99, in seconds"), strict=True
    ):
        for (name, points), colour in zip(measured.items(), ("#d55e00", "#0072b2"), strict=True):
            axes.plot(rates, [point[place] for point in points], color=colour, marker="o", label=name)
        axes.set_title(title, loc="left")
        axes.set_xlabel("requests a second; the middle is what the guarded service can do")
        axes.set_ylim(bottom=0)
        axes.grid(color="#e6e6e6")
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the same load on both services, and compare what they answer.")
    parser.add_argument("--seconds", type=float, default=15, metavar="S", help="of each load; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("starlette_pipeline.png"), metavar="PNG")
    options = parser.parse_args()
    capacity = {}
    for name in SERVICES:
        with serving(name) as service:
            answers = asyncio.run(closed_loop(service.port, 16, options.seconds))
        capacity[name] = sum(answer.status == OK for answer in answers) / options.seconds
        print(f"{name}: {capacity[name]:.0f} texts a second come through with 16 clients", flush=True)
    rates = [share * capacity["guarded"] for share in SHARES]
    print(HEAD)
    measured = {name: [drive(name, rate, options.seconds) for rate in rates] for name in SERVICES}
    if shutil.which("wrk"):
        for name, connections in itertools.product(SERVICES, CONNECTIONS):
            wrk(name, connections, options.seconds)
    draw(measured, rates, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
