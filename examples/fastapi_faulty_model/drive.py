"""Put a load on the service for two minutes, and count what came of each request.

From the root of the source tree: python -m examples.fastapi_faulty_model.drive
"""

import argparse
import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from examples._driver import Panel, Server, draw, megabytes, running, wrk
from examples.fastapi_faulty_model.model import CRASH, HANG, LEAK

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "uvicorn", "--port", "0", "--no-access-log", "app:app"]
CONNECTIONS = 8
#: Of so many texts, one crashes the model, and one makes it hang.
EVERY = 6_000
#: Seconds between two looks at the service.
LOOK = 0.5


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """The service, whose workers can answer."""
    with running(COMMAND, folder=HERE, path="/status", stop=10) as server:
        yield server


def texts(count: int = EVERY) -> list[str]:
    """Make texts, one of which crashes the model and another one makes it hang, far from each other."""
    made = [f"text number {number}" for number in range(count)]
    made[count // 4] = f"{CRASH} {count // 4}"
    made[3 * count // 4] = f"{HANG} {3 * count // 4}"
    return made


#: Has wrk count the faults that it asks for, and the answers by their status and error.
TALLY = f"""
local threads = {{}}
local plain = request
tally = {{}}
local function note(what) tally[what] = (tally[what] or 0) + 1 end
function setup(thread) table.insert(threads, thread) end
function request()
  local made = plain()
  local fault = texts[place]:match("^{CRASH}") or texts[place]:match("^{HANG}")
  if fault then note("sent " .. fault) end
  return made
end
function response(status, headers, body)
  note(status == 200 and "answered" or body:match('"error": ?"(%a+)"') or ("unnamed " .. status))
end
function done(summary)
  for what, count in pairs(threads[1]:get("tally")) do io.write(string.format("TALLY %d %s\\n", count, what)) end
  local errors = summary.errors
  local lost = errors.connect + errors.read + errors.write + errors.timeout
  io.write(string.format("TALLY %d lost\\n", lost))
end
"""


def load(server: Server, seconds: float) -> Counter[str]:
    """Send texts by wrk for so many seconds; what came of the requests, and how many faults were asked for."""
    lines = wrk(server.url, texts(), CONNECTIONS, seconds, TALLY).splitlines()
    found = [line.split(" ", 2)[1:] for line in lines if line.startswith("TALLY ")]
    return Counter({what: int(count) for count, what in found})


class Watch:
    """Looks at the service in a thread of its own: seconds, bytes held by all its processes, bytes leaked so far."""

    def __init__(self, server: Server) -> None:
        self.seen: list[tuple[float, int, int]] = []
        self._server = server
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.wait(LOOK):
            leaked = LEAK * int(self._server.ask("/status").json.get("answered", 0))
            self.seen.append((time.monotonic() - self._began, self._server.private_bytes(), leaked))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def report(tally: Counter[str], watch: Watch, status: dict[str, object]) -> Iterator[str]:
    """What happened, in lines."""
    asked = {name: tally.pop(f"sent {name}", 0) for name in (CRASH, HANG)}
    yield f"{sum(tally.values()):>9,} requests, of which {asked[CRASH]} crash the model and {asked[HANG]} hang it"
    for what, count in sorted(tally.items(), key=lambda one: -one[1]):
        yield f"{count:>9,} {what}"
    held = [size for _, size, _ in watch.seen]
    yield f"held by all processes: {megabytes(min(held))} to {megabytes(max(held))}"
    yield f"leaked by the model: {megabytes(watch.seen[-1][2])}"
    replaced = ", ".join(
        f"{count} {name.removeprefix('workers ')}" for name, count in status.items() if "workers" in name
    )
    yield f"workers replaced: {replaced}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Put a load on the service, and count what came of each request.")
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/fastapi_faulty_model.png"), metavar="PNG")
    options = parser.parse_args()
    with serving() as server:
        with Watch(server) as watch:
            tally = load(server, options.seconds)
        status = server.ask("/status").json
    print(*report(tally, watch, status), sep="\n")
    times, held, leaked = zip(*watch.seen, strict=True)
    draw(
        options.out,
        Panel("Held by all processes", "time, s", "MB", {"held": (times, [size / 1e6 for size in held])}),
        Panel("Leaked by the model so far", "time, s", "MB", {"leaked": (times, [size / 1e6 for size in leaked])}),
    )
    print(options.out)


if __name__ == "__main__":
    main()
