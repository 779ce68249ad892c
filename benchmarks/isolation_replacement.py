"""What calls notice while ja_ginza is replaced under a real uvicorn, with eight threads that call without a pause.

The longest call during each replacement over the p99 of all calls outside of one, and over the longest call of an
equal time without a replacement, right after it; and how many calls failed. The ways: a worker of an isolated
function (which a policy has asked for), its mold (``TTL``, ``reload()``), a guard in the server's process, and one of
gunicorn's dirty workers, which is replaced by ending it.
"""

from __future__ import annotations

import contextlib
import http
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import _common
import _isolation_peers
from _callers import Callers, outside, within
from examples._driver import Server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THREADS = 8
HERE = Path(__file__).parent
#: Seconds of traffic before the first order and after each.
STEADY = 5.0
#: Seconds after a replacement that still belong to it: the old mold's end, the old model's release.
MARGIN = 0.5
NAMES = {
    "worker": "isolate, a worker",
    "mold": "isolate, the mold",
    "here": "a guard in the server's process",
    "dirty": "gunicorn, a dirty worker",
}
TARGET = 1.5
#: Over the longest call of an equal time without a replacement.
TARGET_OF_EQUAL_TIME = 1.3


class Found(NamedTuple):
    """What calls have noticed of each replacement, by the side.

    Attributes:
        ratios: The longest call during each replacement, over ``p99``.
        equal: The same over the longest call of an equal time after each replacement.
        p99: Seconds, of the calls outside of replacements.
        seconds: How long each replacement took.
        failed: Calls that failed during each.
    """

    ratios: list[float]
    equal: list[float]
    p99: float
    seconds: list[float]
    failed: list[float]


@contextlib.contextmanager
def serving(side: str) -> Iterator[Server]:
    """The server, which has answered on all of its workers."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        environment = {"MODELGUARD_RUNTIME_DIR": folder, "SIDE": side}
        if side == "dirty":
            environment["DIRTY_SOCKET"] = stack.enter_context(_isolation_peers.arbiter(_isolation_peers.SPACY, 2))
        command = [sys.executable, "-m", "uvicorn", "--port", "0", "--no-access-log", "--app-dir", str(HERE)]
        server = Server([*command, "_replaced:app"], folder=Path(folder), environment=environment, name=side)
        stack.callback(server.stop)
        server.wait_until_serving("/", 120.0)
        server.wait_until(lambda: server.ask("/").status == http.HTTPStatus.OK and count(server) == 0, "its workers")
        yield server


def count(server: Server) -> int:
    return int(server.ask("/count", timeout=120).text)


def replace(side: str, times: int) -> Found:
    """Replace the model so often under traffic."""
    spans = []
    with serving(side) as server:
        assert server.port is not None
        with Callers(server.port, "/", threads=THREADS) as callers:
            time.sleep(STEADY)
            for number in range(1, times + 1):
                began = time.monotonic()
                server.ask("/replace", timeout=120)
                while count(server) < number:
                    time.sleep(0.02)
                spans.append((began, time.monotonic()))
                time.sleep(STEADY + 2 * MARGIN + spans[-1][1] - began)
    calls = callers.calls[THREADS * 5 :]
    p99 = _common.quantile(outside(calls, spans, MARGIN), 0.99)
    met = [within(calls, span) for span in spans]
    longest = [max(call.seconds for call in some) for some in met]
    after = [within(calls, (b + 2 * MARGIN, b + 2 * MARGIN + b - a)) for a, b in spans]
    return Found(
        ratios=[one / p99 for one in longest],
        equal=[one / max(call.seconds for call in some) for one, some in zip(longest, after, strict=True)],
        p99=p99,
        seconds=[b - a for a, b in spans],
        failed=[float(sum(not one.answered for one in some)) for some in met],
    )


def main() -> None:
    benchmark = _common.Benchmark("isolation_replacement", "What calls notice while ja_ginza is replaced")
    sides = [side for side in NAMES if side != "dirty" or _isolation_peers.has_dirty_workers()]
    found = {side: replace(side, 1 if benchmark.quick else 3) for side in sides}
    rows = []
    for side, one in found.items():
        name, ours = NAMES[side], side in {"worker", "mold"}
        target = TARGET if ours else None
        rows.append(_common.Row(f"longest call during a replacement / p99: {name}", one.ratios, "x", target, ours=ours))
        target = TARGET_OF_EQUAL_TIME if ours else None
        rows.append(_common.Row(f"longest call / of an equal time without: {name}", one.equal, "x", target, ours=ours))
        rows.append(_common.Row(f"  p99 without one: {name}", [1e3 * one.p99], "ms", ours=ours))
        rows.append(_common.Row(f"  a replacement takes: {name}", one.seconds, "s", ours=ours))
        rows.append(_common.Row(f"  calls that fail in a replacement: {name}", one.failed, "", ours=ours))

    def draw(figure: Figure) -> None:
        shown = [row for row in rows if row.name.startswith("longest call during")]
        title = "The longest call while ja_ginza is replaced under uvicorn, 8 threads without a pause"
        prefix = "longest call during a replacement / p99: "
        _common.bars(figure.subplots(), shown, title, axis="x p99 of the other calls", prefix=prefix)

    benchmark.finish(rows, draw, size=(11, 3), found={side: one._asdict() for side, one in found.items()})


if __name__ == "__main__":
    main()
