"""Put the same load on both services, below, at and above what they can do, and compare.

From the root of the source tree: python -m examples.starlette_pipeline.drive
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from examples._driver import Answer, Panel, Server, draw, row, running, wrk

HERE = Path(__file__).parent
UVICORN = [sys.executable, "-m", "uvicorn", "--port", "0", "--no-access-log"]
COMMANDS = {"unguarded": [*UVICORN, "unguarded:app"], "guarded": [*UVICORN, "app:app"]}
#: One CPU for the model: with two, the event loop and this driver would take part of the second from it.
ONE_CPU = {"OMP_NUM_THREADS": "1"}
#: An answer is in time within so many seconds, and after so many the client gives up.
IN_TIME, PATIENCE = 1.0, 10.0
OK, REFUSED = 200, 503
#: Shares of the capacity to send, and connections for wrk.
SHARES, CONNECTIONS = (0.5, 1.0, 2.0), (1, 16, 256)
WORDS = ("the", "model", "of", "every", "request", "a", "second", "internationalisation", "memory", "allocators")


@contextlib.contextmanager
def serving(name: str) -> Iterator[Server]:
    """One of the two services, which has answered once."""
    with running(COMMANDS[name], folder=HERE, name=name, environment=ONE_CPU, stop=5) as server:
        server.ask("/", "Hello!")
        yield server


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(
    port: int, text: str, path: str = "/", *, patience: float = PATIENCE, idle: list[Connection] | None = None
) -> Answer:
    """Send a text, or without one ask for a page, over an idle connection if there is one; status 0 if it is late."""
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
        return Answer(0, {}, b"", math.inf)
    spare.append((reader, writer))
    if idle is None:
        writer.close()
    return Answer(int(status.split()[1]), headers, body, time.perf_counter() - began)


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


def line(name: str, load: str, *figures: str, answers: str) -> str:
    return f"{row(name, width=10)}{row(load, width=17)}{row(*figures, width=11)}  {answers}"


HEAD = line("", "load", "200s /s", "in time /s", "p50", "p99", answers="answers")


def drive(name: str, rate: float, seconds: float) -> tuple[float, float]:
    """Send at a rate, print what came back, and return how many a second were in time, and the p99 of the waits."""
    with serving(name) as server:  # a fresh one, without the queue of the last rate
        began = time.perf_counter()
        answers = asyncio.run(open_loop(server.port, rate, seconds))
        took = time.perf_counter() - began
    # Those that were not refused at once; a client that gave up has waited for all of its patience.
    waits = sorted(min(answer.seconds, PATIENCE) for answer in answers if answer.status != REFUSED)
    p50, p99 = (waits[int((len(waits) - 1) * share)] for share in (0.5, 0.99))
    in_time = sum(answer.status == OK and answer.seconds <= IN_TIME for answer in answers) / seconds
    counts = Counter(str(answer.status or "none") for answer in answers)
    figures = (f"{counts[str(OK)] / took:.0f}", f"{in_time:.0f}", f"{p50:.2f} s", f"{p99:.2f} s")
    statuses = ", ".join(f"{count} x {status}" for status, count in sorted(counts.items()))
    print(line(name, f"{rate:.0f}/s", *figures, answers=statuses), flush=True)
    return in_time, p99


#: Has wrk print its figures in one line.
FIGURES = """
local threads = {}
statuses = {}
function setup(thread) table.insert(threads, thread) end
function response(status) statuses[status] = (statuses[status] or 0) + 1 end
function done(summary, latency)
  local counts = {}
  for status, count in pairs(threads[1]:get("statuses")) do table.insert(counts, count .. " x " .. status) end
  table.sort(counts)
  io.write(string.format("FIGURES %f %f %f %s", summary.duration / 1e6, latency:percentile(50) / 1e6,
    latency:percentile(99) / 1e6, table.concat(counts, ", ")))
end
"""


def drive_by_wrk(name: str, connections: int, seconds: float) -> None:
    """The same by wrk, which has no rate: each connection sends the next text when the last is answered."""
    with serving(name) as server:
        output = wrk(server.url, list(itertools.islice(texts(), 1000)), connections, seconds, FIGURES)
    took, p50, p99, statuses = output.partition("FIGURES ")[2].split(" ", 3)
    good = sum(int(part.split(" x ")[0]) for part in statuses.split(", ") if part.endswith(str(OK)))
    times = [f"{float(value):.2f} s" if statuses else "" for value in (p50, p99)]  # of all answers, refusals too
    figures = (f"{good / float(took):.0f}", "", *times)
    print(line(name, f"wrk, {connections} open", *figures, answers=statuses.strip() or "none"), flush=True)


def panels(measured: dict[str, list[tuple[float, float]]], rates: list[float]) -> Iterator[Panel]:
    x = "requests per second; the middle is what the guarded service can do"
    for place, title, y in (
        (0, "Requests answered within 1 s", "answers per second"),
        (1, "Waits of requests that were not refused", "99th percentile, s"),
    ):
        yield Panel(
            title, x, y, {name: (rates, [point[place] for point in points]) for name, points in measured.items()}
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the same load on both services, and compare what they answer.")
    parser.add_argument("--seconds", type=float, default=15, metavar="S", help="of each load; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/starlette_pipeline.png"), metavar="PNG")
    options = parser.parse_args()
    capacity = {}
    for name in COMMANDS:
        with serving(name) as server:
            answers = asyncio.run(closed_loop(server.port, 16, options.seconds))
        capacity[name] = sum(answer.status == OK for answer in answers) / options.seconds
        print(f"{name}: {capacity[name]:.0f} texts a second come through with 16 clients", flush=True)
    rates = [share * capacity["guarded"] for share in SHARES]
    print(HEAD)
    measured = {name: [drive(name, rate, options.seconds) for rate in rates] for name in COMMANDS}
    if shutil.which("wrk"):
        for name, connections in itertools.product(COMMANDS, CONNECTIONS):
            drive_by_wrk(name, connections, options.seconds)
    draw(options.out, *panels(measured, rates))
    print(options.out)


if __name__ == "__main__":
    main()
