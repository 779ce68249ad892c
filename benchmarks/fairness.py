"""Fair shares under load: 400 greedy callers and 5 polite ones behind real web servers.

The model takes 10 ms and 3.75 ms for each item, at most 16 at once: 229 requests a second, 0.56 for each caller.
Requests arrive at random (Poisson) at 0.5, 1, 2 and 5 times that rate, whether or not earlier ones have been answered.
Each polite caller sends 0.5 a second, somewhat less than its share; the greedy ones send the rest, all as much as each
other. At half the capacity, all send alike. The middleware reads the caller from a header (``fair_by="X-Caller"``), or
does not. Servers: uvicorn (Starlette), and gunicorn with threads (Flask).

Printed: the share of the polite callers' requests, and of the greedy ones', that were answered within the deadline of a
second. What else arrives is refused with 503, or with 504 if it had to give way or its time ran out.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import _common
from examples._driver import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREEDY, POLITE = 400, 5
FIXED, EACH, SIZE = 0.010, 0.00375, 16
CAPACITY = SIZE / (FIXED + EACH * SIZE)
POLITE_RATE = 0.5
LOADS = (0.5, 1.0, 2.0, 5.0)
#: Seconds that a server may take to start, and that a request may take in all.
PATIENCE, GIVE_UP = 60.0, 5.0
#: Seconds at the start of each load that do not count.
WARM_UP = 1.5

MODEL = f"""
    import os, sys, time
    from modelguard import batched

    @batched(max_size={SIZE}, max_queue=256, deadline="1s", name="predict")
    def predict(items):
        time.sleep({FIXED} + {EACH} * len(items))
        return items

    FAIR = {{"fair_by": "X-Caller"}} if os.environ["FAIR"] == "yes" else {{}}
"""
PROGRAMS = {
    "uvicorn": MODEL
    + """
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    from modelguard.frameworks.asgi import ModelGuardMiddleware

    async def ask(request):
        return PlainTextResponse(await predict.aio("ok"))

    app = ModelGuardMiddleware(Starlette(routes=[Route("/", ask)]), **FAIR)
    """,
    "gunicorn": MODEL
    + """
    from flask import Flask
    from modelguard.frameworks import wsgi

    app = Flask(__name__)

    @app.get("/")
    def ask():
        return predict("ok")

    wsgi.install(app, **FAIR)
    """,
}
COMMANDS = {
    "uvicorn": ("-m", "uvicorn", "app:app", "--port", "0", "--no-access-log", "--backlog", "4096"),
    "gunicorn": (
        "-m",
        "gunicorn",
        "app:app",
        "-b",
        "127.0.0.1:0",
        "-k",
        "gthread",
        "--threads",
        "320",
        "--backlog",
        "4096",
    ),
}


class Client:
    """Sends requests over connections that it uses again."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def ask(self, caller: str) -> int:
        """The status of one answer; 0 if there is none."""
        try:
            async with asyncio.timeout(GIVE_UP):
                pair = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
                reader, writer = pair
                writer.write(f"GET / HTTP/1.1\r\nHost: here\r\nX-Caller: {caller}\r\n\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
        except (OSError, EOFError, TimeoutError, ValueError):
            return 0
        if b"connection: close" in head:
            writer.close()
        else:
            self._free.append(pair)
        return int(head.split()[1])

    def close(self) -> None:
        """Close what is open."""
        for _, writer in self._free:
            writer.close()


async def offer(port: int, load: float, seconds: float, seed: int) -> dict[str, Counter[int]]:
    """The statuses that both kinds of callers got."""
    dice = random.Random(seed)
    rate = load * CAPACITY
    polite = min(POLITE_RATE, rate / (GREEDY + POLITE)) * POLITE
    got: dict[str, Counter[int]] = {"polite": Counter(), "greedy": Counter()}
    client = Client(port)

    async def one(kind: str, *, counts: bool) -> None:
        number = dice.randrange(POLITE if kind == "polite" else GREEDY)
        status = await client.ask(f"{kind}-{number}")
        got[kind][status] += counts

    started, at = time.perf_counter(), 0.0
    async with asyncio.TaskGroup() as group:
        while (at := at + dice.expovariate(rate)) < seconds:
            await asyncio.sleep(max(started + at - time.perf_counter(), 0))
            kind = "polite" if dice.random() < polite / rate else "greedy"
            group.create_task(one(kind, counts=at > WARM_UP))
    client.close()
    return got


@contextlib.contextmanager
def serving(kind: str, *, fair: bool, folder: Path) -> Iterator[int]:
    """A server that answers; gives its port."""
    (folder / "app.py").write_text(textwrap.dedent(PROGRAMS[kind]), encoding="utf-8")
    command = [sys.executable, *COMMANDS[kind]]
    server = Server(command, folder=folder, name=kind, environment={"FAIR": "yes" if fair else "no"})

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return server.port is not None and server.ask("/").status == 200  # noqa: PLR2004
        return False

    try:
        server.wait_until(answers, "an answer", PATIENCE)
        assert server.port is not None
        yield server.port
    finally:
        server.stop(10)


def main() -> None:
    bench = _common.Benchmark("fairness", f"Fair shares: {GREEDY} greedy callers and {POLITE} polite ones")
    missing = [name for name in ("flask", "gunicorn", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"this needs {', '.join(missing)}")
    seconds = 3.0 if bench.quick else 8.0
    measured: dict[tuple[str, bool, float], dict[str, Counter[int]]] = {}
    for kind in PROGRAMS:
        for fair in (False, True):
            with tempfile.TemporaryDirectory() as place, serving(kind, fair=fair, folder=Path(place)) as port:
                for load in LOADS:
                    found = asyncio.run(offer(port, load, seconds, seed=int(10 * load)))
                    measured[kind, fair, load] = found
                    print(kind, "fair_by" if fair else "in order of arrival", f"{load:g} x", found, flush=True)

    def answered(kind: str, who: str, *, fair: bool, load: float) -> float:
        statuses = measured[kind, fair, load][who]
        return 100 * statuses[200] / max(statuses.total(), 1)

    rows = [
        _common.Row(
            f"{kind}, {load:g} x: {who}, {'with fair_by' if fair else 'without'}",
            [answered(kind, who, fair=fair, load=load)],
            "%",
            ours=fair,
        )
        for kind in PROGRAMS
        for load in LOADS
        for who in ("polite", "greedy")
        for fair in (False, True)
    ]
    notes = ["", f"Capacity: {CAPACITY:,.0f} requests a second, {CAPACITY / (GREEDY + POLITE):.2f} for each caller."]

    def draw(figure: Figure) -> None:
        for axes, kind in zip(figure.subplots(1, 2, sharey=True), PROGRAMS, strict=True):
            for who, style in (("polite", "-"), ("greedy", "--")):
                for fair, colour in ((True, _common.OURS), (False, _common.PEER)):
                    values = [answered(kind, who, fair=fair, load=load) for load in LOADS]
                    label = f"{who}, {'with' if fair else 'without'} fair_by"
                    axes.plot(LOADS, values, style, color=colour, marker="o", label=label)
            axes.set_xscale("log")
            axes.set_xticks(LOADS, [f"{load:g} x" for load in LOADS])
            axes.set_ylim(0, 105)
            axes.set_title(f"{kind}: {GREEDY} greedy callers, {POLITE} polite ones")
            axes.set_xlabel("requests over capacity")
        figure.axes[0].set_ylabel("answered within a second, %")
        figure.axes[0].legend(fontsize=8)

    data = [[kind, fair, load, found] for (kind, fair, load), found in measured.items()]
    bench.finish(rows, draw, size=(12, 4.2), notes=notes, measured=data)


if __name__ == "__main__":
    main()
