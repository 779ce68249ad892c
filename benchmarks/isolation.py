"""Isolated functions: what a call costs, how fast workers and molds are replaced, and what calls notice of it.

* Transport: a call with a short text, and one with a 6 MB array that comes back, over the same on a bare
  ``multiprocessing`` Connection to a process that echoes. Peers: ``ProcessPoolExecutor``, and loky, pebble and
  gunicorn's dirty workers where they are installed.
* Replacement of ja_ginza: seconds from the order to the first answer of a fresh worker, over those of a reload in this
  process. The private memory of the fresh worker after its first answer, over the model's size.
  The same with spawned workers, which load for themselves.
* The stall: a real uvicorn, eight clients without gaps. The longest request during a replacement of the mold over the
  p99 of the others; beside it the same with spawned workers, with the model in the server's process, and in windows of
  the same length without a reload, which shows how much of it is chance.
* Slopes: proportional memory (PSS) of the whole tree over 50 replacements of workers and 20 of molds.
* A leak of 4 KB a call: 100,000 calls under ``MemoryGrowth("50 MB")``, the largest private memory of a worker, and the
  rate of the same model without the leak over that with it; beside it the rate of the same leak that nobody stops.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
import _isolated
import _isolation_peers
import psutil
from _callers import Callers, Span, outside, within
from examples._driver import Server

from modelguard import memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS = 8
#: Seconds of traffic before the first order and after each.
STEADY = 5.0
HERE = Path(__file__).parent


def echoing(connection: Any) -> None:
    while True:
        try:
            connection.send(connection.recv())
        except EOFError:
            return


def per_call(call: Callable[[], object], count: int) -> float:
    for _ in range(max(3, count // 20)):
        call()
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def same(value: Any) -> Any:
    return value


def transport(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds for a call there and back, by what is sent and by who sends it. The ways take turns."""
    import numpy as np

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=echoing, args=(theirs,), daemon=True)
    process.start()

    def by_connection(value: Any) -> Any:
        ours.send(value)
        return ours.recv()

    ways: dict[str, Callable[[Any], Any]] = {"Connection": by_connection, "isolate": _isolated.echo}
    executor = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
    ways["ProcessPoolExecutor"] = lambda value: executor.submit(same, value).result()
    if importlib.util.find_spec("loky"):
        import loky

        workers = loky.get_reusable_executor(max_workers=1)
        ways["loky"] = lambda value: workers.submit(same, value).result()
    if importlib.util.find_spec("pebble"):
        import pebble

        pool = pebble.ProcessPool(max_workers=1, context=context)
        ways["pebble"] = lambda value: pool.schedule(same, args=[value]).result()
    dirty = contextlib.ExitStack()
    if _isolation_peers.has_dirty_workers():
        ways["gunicorn, dirty"] = dirty.enter_context(_isolation_peers.echo())
    sent = {"small": ("a short text", 500), "array": (np.zeros(750_000), 10)}
    found: dict[str, dict[str, list[float]]] = {what: {way: [] for way in ways} for what in sent}
    for what, (value, count) in sent.items():
        for _ in range(rounds):
            for way, call in ways.items():
                found[what][way].append(per_call(lambda call=call, value=value: call(value), count))  # type: ignore[misc]
    process.terminate()
    _isolated.echo.close()
    executor.shutdown()
    dirty.close()
    if "pebble" in ways:
        pool.stop()
    return found


def replacement(start: str, rounds: int) -> dict[str, Any]:
    """Seconds to the first answer of a fresh worker, and of a reload; private memory of a fresh worker."""
    worker, reload, private = [], [], []
    here, isolated = _isolated.in_process, {"fork": _isolated.one_worker, "spawn": _isolated.one_spawned}[start]
    here.load()
    isolated.load()
    for _ in range(rounds):
        old, _ = isolated(_isolated.TEXT)
        started = time.perf_counter()
        with contextlib.suppress(ValueError):
            isolated("fail")
        while (pid := isolated(_isolated.TEXT)[0]) == old:
            time.sleep(0.001)
        worker.append(time.perf_counter() - started)
        private.append(memory.usage(pid).private_dirty or 0)
        started = time.perf_counter()
        here.reload()
        _isolated.entities_here(_isolated.TEXT)
        reload.append(time.perf_counter() - started)
    size = here.status().model_bytes
    isolated.close()
    here.close()
    return {"worker": worker, "reload": reload, "private": private, "model": size}


def stall(side: str, reloads: int) -> dict[str, list[float]]:
    """The longest request during each reload over the p99 of the others, and that of a window without one."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "uvicorn", "--port", "0", "--app-dir", str(HERE), "_isolated:app"]
        server = Server(command, folder=Path(folder), environment={"MODELGUARD_RUNTIME_DIR": folder}, name=side)
        try:
            server.wait_until(lambda: server.port is not None, "its port", 120.0)
            assert server.port is not None
            server.ask(f"/{side}", timeout=120)
            spans, calm = [], []
            with Callers(server.port, f"/{side}", threads=CLIENTS) as traffic:
                time.sleep(STEADY)
                for number in range(reloads):
                    started = time.monotonic()
                    server.ask(f"/{side}/reload", timeout=120)
                    while int(server.ask(f"/status?{side}", timeout=120).text) < number + 2:
                        time.sleep(0.05)
                    spans.append((started, time.monotonic()))
                    time.sleep(1.0)  # the old mold's end
                    calm.append((time.monotonic(), time.monotonic() + spans[-1][1] - started))
                    time.sleep(max(STEADY, spans[-1][1] - started))
        finally:
            server.stop()
    calls = traffic.calls
    assert all(call.answered for call in calls)
    margin = 0.5  # the old mold's end, the old model's release
    p99 = _common.quantile(outside(calls, spans, margin)[CLIENTS * 5 :], 0.99)

    def longest(spans: list[Span]) -> list[float]:
        return [max(call.seconds for call in within(calls, span)) / p99 for span in spans]

    return {"reload": longest(spans), "calm": longest(calm)}


def tree_pss() -> float:
    """Proportional memory of the mold and its workers, in MB."""
    status = _isolated.entities.status()
    assert status.mold is not None
    total = 0
    for process in [psutil.Process(status.mold), *psutil.Process(status.mold).children(recursive=True)]:
        try:
            total += memory.usage(process.pid).pss or 0
        except ProcessLookupError:
            continue
    return total / 1e6


def slopes(workers: int, molds: int) -> dict[str, list[float]]:
    """PSS of the tree after each replacement."""
    isolated = _isolated.entities
    found: dict[str, list[float]] = {"workers": [], "molds": []}
    isolated.load()
    for _ in range(workers):
        before = isolated.status().recycled
        with contextlib.suppress(ValueError):
            isolated("fail")
        while isolated.status().recycled == before:
            isolated(_isolated.TEXT)
        for _ in range(4):
            isolated(_isolated.TEXT)
        found["workers"].append(tree_pss())
    for _ in range(molds):
        isolated.reload()
        for _ in range(8):
            isolated(_isolated.TEXT)
        time.sleep(0.3)
        found["molds"].append(tree_pss())
    isolated.close()
    return found


def leak(calls: int) -> dict[str, Any]:
    """Seconds for so many calls with and without the leak, taking turns; the largest private memory of a worker."""
    functions = {"sound": _isolated.sound, "leaking": _isolated.leaking, "leaking on": _isolated.leaking_on}
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    largest = 0
    share = 10
    with _isolated.leaking, _isolated.sound, _isolated.leaking_on:
        for _ in range(share):
            for name, function in functions.items():
                started = time.perf_counter()
                for number in range(calls // share):
                    function(number)
                seconds[name].append(time.perf_counter() - started)
            for worker in _isolated.leaking.status().workers:
                largest = max(largest, memory.usage(worker.pid).private_dirty or 0)
        recycled = _isolated.leaking.status().recycled
    return {**seconds, "largest": largest, "recycled": recycled}


JOBS: dict[str, Callable[..., Any]] = {
    "transport": lambda rounds: transport(int(rounds)),
    "replacement": lambda start, rounds: replacement(start, int(rounds)),
    "slopes": lambda workers, molds: slopes(int(workers), int(molds)),
    "leak": lambda calls: leak(int(calls)),
}


def over_reload(renewed: dict[str, Any]) -> list[float]:
    return [fresh / load for fresh, load in zip(renewed["worker"], renewed["reload"], strict=True)]


def own_share(renewed: dict[str, Any]) -> list[float]:
    return [100 * one / renewed["model"] for one in renewed["private"]]


def main() -> None:
    benchmark = _common.Benchmark("isolation", "Isolated functions: calls, replacements, memory")
    quick = benchmark.quick
    row = _common.Row
    costs = _common.fresh(__file__, "transport", "2" if quick else "9")
    renewed = _common.fresh(__file__, "replacement", "fork", "2" if quick else "9")
    spawned = _common.fresh(__file__, "replacement", "spawn", "1" if quick else "3")
    stalls = {side: stall(side, 1 if quick else 3) for side in ("isolated", "spawned", "here")}
    trends = _common.fresh(__file__, "slopes", *(("6", "3") if quick else ("50", "20")))
    leaked = _common.fresh(__file__, "leak", "5000" if quick else "100000")

    def over(what: str, way: str) -> list[float]:
        return [one / base for one, base in zip(costs[what][way], costs[what]["Connection"], strict=True)]

    rows = []
    for what, text, target in (("small", "small call", 2.0), ("array", "6 MB array", 0.3)):
        for way in costs[what]:
            ours = way == "isolate"
            if way != "Connection":
                rows.append(
                    row(f"{text}: {way} / Connection", over(what, way), "x", target if ours else None, ours=ours)
                )
    ratios, shares = over_reload(renewed), own_share(renewed)
    rows += [
        row("fresh worker / reload, to the first answer", ratios, "x", 0.05, ours=True),
        row("  fresh worker", [1000 * one for one in renewed["worker"]], "ms", ours=True),
        row("  reload in the process", [1000 * one for one in renewed["reload"]], "ms"),
        row("private memory of a fresh worker / model", shares, "%", 5.0, ours=True),
        row("  spawned: fresh worker / reload, to the first answer", over_reload(spawned), "x", ours=True),
        row("  spawned: private memory of a fresh worker / model", own_share(spawned), "%", ours=True),
        row("longest request during a reload / p99: isolated", stalls["isolated"]["reload"], "x", 1.5, ours=True),
        row("  as long without a reload", stalls["isolated"]["calm"], "x", ours=True),
        row("  spawned workers", stalls["spawned"]["reload"], "x", ours=True),
        row("longest request during a reload / p99: in the process", stalls["here"]["reload"], "x"),
        row("  as long without a reload, in the process", stalls["here"]["calm"], "x"),
    ]
    notes = [""]
    for what, values in trends.items():
        rise, error = _common.slope(values)
        rows.append(row(f"PSS of the tree, slope over replaced {what}", [rise], "MB", max(2 * error, 0.1), ours=True))
        notes.append(f"slope over replaced {what}: {rise:.3f} MB, standard error {error:.3f}, of {values[-1]:.0f} MB")
    rates = [without / leak for without, leak in zip(leaked["sound"], leaked["leaking"], strict=True)]
    rows.append(row("rate with a leak / without", [statistics.median(rates)], "x", ours=True))
    rows.append(row("rate without a leak / with", [1 / statistics.median(rates)], "x", 1 / 0.95, ours=True))
    kept = [on / bounded for on, bounded in zip(leaked["leaking on"], leaked["leaking"], strict=True)]
    rows.append(
        row("rate with a leak that is bounded / with one that goes on", [statistics.median(kept)], "x", ours=True)
    )
    rows.append(row("largest private memory of a leaking worker", [leaked["largest"] / 1e6], "MB", ours=True))
    notes.append(f"the leaking worker was replaced {leaked['recycled']} times; without, it would have grown by 400 MB")

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _common.bars(
            left, [one for one in rows if "Connection" in one.name], "A call there and back", axis="x Connection"
        )
        for what, values in trends.items():
            right.plot(range(1, len(values) + 1), values, label=f"replaced {what}")
        right.set_ylim(bottom=0)
        right.set_xlabel("replacements")
        right.set_ylabel("PSS of mold and workers, MB")
        right.set_title("ja_ginza, isolated: memory of the whole tree")
        right.legend(frameon=False)

    benchmark.finish(
        rows,
        draw,
        size=(13, 4),
        notes=notes,
        costs=costs,
        renewed=renewed,
        spawned=spawned,
        stalls=stalls,
        trends=trends,
        leaked=leaked,
    )


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        name, *arguments = words
        _common.answer(JOBS[name](*arguments))
        os._exit(0)  # peers leave threads behind that would wait for ever
