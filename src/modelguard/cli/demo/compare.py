"""The run itself: two servers, the same traffic to both, and a look at them four times a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from modelguard import memory
from modelguard.cli.demo.record import Record, Sample
from modelguard.cli.demo.servers import Server
from modelguard.cli.demo.traffic import TIMEOUT, Driver, Shot, plan, warm_up

#: Seconds between two looks. Reading a process's memory walks its page tables, about 6 ms for 600 MB.
LOOK = 0.25

GUARDED, UNGUARDED = "guarded", "unguarded"
APPS = {UNGUARDED: "unguarded", GUARDED: "app"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of.

    Attributes:
        folder: Where ``app.py`` and ``unguarded.py`` are.
        seconds: Length of the traffic.
        growth: Growth of private memory after which the guard reloads, in words of ``MemoryGrowth``.
        seed: Chooses the words.
    """

    folder: Path
    seconds: float
    growth: str
    seed: int = 0


Show = Callable[[str, float, Sequence[Record]], None]


def compare(settings: Settings, show: Show) -> dict[str, Record]:
    """Run both services under the same traffic.

    Args:
        settings: What to run.
        show: Called often with what happens now, the share of it that is done (0 to 1), and both records.

    Returns:
        What was seen, by the server's name.

    Raises:
        DemoFailed: A server died, or was not ready in time.
    """
    records = {name: Record(name) for name in (GUARDED, UNGUARDED)}
    shown = list(records.values())
    show("making up words", 0.0, shown)
    shots = plan(settings.seconds, seed=settings.seed)
    with ExitStack() as stack:
        servers = []
        for name, app in APPS.items():
            # One after the other, the guarded one last: two loads at once on two cores would slow each other.
            show(f"starting the {name} server, which loads ja_ginza", 0.0, shown)
            server = Server(
                name,
                f"{app}:app",
                settings.folder,
                environment={"MAX_GROWTH": settings.growth},
                on_event=records[name].events.append,
            )
            servers.append(stack.enter_context(server))
            server.wait_ready()
            warm_up(server.connect(TIMEOUT))
        _drive(settings.seconds, shots, servers, records, show)
    return records


def _drive(
    seconds: float, shots: Sequence[Shot], servers: Sequence[Server], records: dict[str, Record], show: Show
) -> None:
    began, epoch = time.perf_counter(), time.time()
    drivers = []
    for server in servers:
        driver = Driver(server.connect, shots, began)
        records[server.name].answers = driver.answers
        records[server.name].epoch = epoch
        records[server.name].last_lines = server.last_lines
        drivers.append(driver)
    try:
        while True:
            now = time.perf_counter() - began
            for server in servers:
                records[server.name].samples.append(Sample(now, _look(server)))
            show("ever-new words to both servers", min(1.0, now / seconds), list(records.values()))
            if now >= seconds and all(driver.done for driver in drivers):
                return
            time.sleep(LOOK)
    finally:
        for driver in drivers:
            driver.stop()


def _look(server: Server) -> int:
    server.check_alive()
    try:
        return private_memory(server.pid)
    except ProcessLookupError:  # it died since
        server.check_alive()
        raise


def private_memory(pid: int) -> int:
    """Bytes that a process alone holds and has written to, whether in memory or swapped out.

    Unlike all of USS it leaves out unwritten pages of mapped files, such as the tokenizer's dictionary: when one server
    unmaps a file, such pages become private to the other, which would look like growth there.
    """
    usage = memory.usage(pid)
    if usage.private_dirty is None:
        return usage.rss if usage.uss is None else usage.uss
    return usage.private_dirty + (usage.swap or 0)
