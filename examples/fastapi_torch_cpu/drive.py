"""Start both services, send both the same texts, and print what memory each holds: python drive.py"""

import argparse
import contextlib
import json
import random
import re
import signal
import string
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from modelguard import memory

HERE = Path(__file__).parent
GUNICORN = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0"]
GUARD = [sys.executable, "-m", "modelguard", "run", "--preset", "torch-cpu-dynamic", "--allocator", "auto", "--"]
COMMANDS = {
    "unguarded": [*GUNICORN, "--config", "unguarded.conf.py", "unguarded:app"],
    "guarded": [*GUARD, *GUNICORN, "app:app"],
}
#: How many workers each has, as its configuration says; each says so when it has loaded the model.
WORKERS = {"unguarded": 2, "guarded": 1}
READY = re.compile(r"ASGI server listening on (http://127\.0\.0\.1:\d+)")
#: Texts are this long, and each has a length of its own, more or less.
SHORTEST, LONGEST = 50, 2000


class Service:
    """One of the two under gunicorn."""

    def __init__(self, name: str) -> None:
        self.process = subprocess.Popen(COMMANDS[name], cwd=HERE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        ready = []
        for line in self.process.stderr:
            self.log.append(line)
            ready += READY.findall(line)
            if len(ready) == WORKERS[name]:
                self.url = ready[0]
                break
        else:
            raise RuntimeError(f"{name} did not start:\n{''.join(self.log)}")
        # Read on, so that the service never waits for room in the pipe.
        self.reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self.reader.start()

    def speak(self, text: str) -> list[float]:
        """Send a text, and give the sound."""
        body = json.dumps({"text": text}).encode()
        request = urllib.request.Request(self.url + "/speak", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def private(self) -> float:
        """MB that gunicorn and its workers have written for themselves; libraries, which both map, do not count."""
        master = psutil.Process(self.process.pid)
        readings = [memory.usage(process.pid) for process in (master, *master.children(recursive=True))]
        return sum(reading.private_dirty or 0 for reading in readings) / 1e6

    def stop(self) -> None:
        """Ask the service to end, and wait until it has."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()


@contextlib.contextmanager
def serving(name: str) -> Iterator[Service]:
    """A running service, ended afterwards."""
    service = Service(name)
    try:
        yield service
    finally:
        service.stop()


def texts(count: int, seed: int = 0) -> Iterator[str]:
    """Make texts of random lengths."""
    rng = random.Random(seed)
    for _ in range(count):
        yield "".join(rng.choices(string.ascii_lowercase + " ", k=rng.randint(SHORTEST, LONGEST)))


def drive(services: dict[str, Service], requests: int, every: int) -> dict[str, list[float]]:
    """Send each text to each service in turn; private memory before the first, and after ``every`` requests."""
    for service in services.values():
        service.speak("Hello!")
    held = {name: [service.private()] for name, service in services.items()}
    print(row("requests", *held))
    print(row("0", *(f"{values[0]:.0f} MB" for values in held.values())))
    for number, text in enumerate(texts(requests), start=1):
        for service in services.values():
            service.speak(text)
        if number % every == 0:
            for name, service in services.items():
                held[name].append(service.private())
            print(row(str(number), *(f"{values[-1]:.0f} MB" for values in held.values())), flush=True)
    return held


def row(*cells: str) -> str:
    return "".join(f"{cell:>12}" for cell in cells)


def draw(held: dict[str, list[float]], every: int, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for (name, values), colour in zip(held.items(), ("#d55e00", "#0072b2"), strict=True):
        axes.plot([place * every for place in range(len(values))], values, color=colour, marker="o", label=name)
    axes.set_title("Private memory of two services with the same model and the same texts", loc="left")
    axes.set_xlabel(f"requests, each of a random length from {SHORTEST} to {LONGEST}")
    axes.set_ylabel("MB")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e6e6e6")
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive both services and compare their private memory.")
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="to each; default: %(default)s")
    parser.add_argument("--every", type=int, default=100, metavar="N", help="requests between readings")
    parser.add_argument("--out", type=Path, default=Path("fastapi_torch_cpu.png"), metavar="PNG")
    options = parser.parse_args()
    with serving("unguarded") as unguarded, serving("guarded") as guarded:
        held = drive({"unguarded": unguarded, "guarded": guarded}, options.requests, options.every)
    print(row("grown by", *(f"{values[-1] - values[0]:+.0f} MB" for values in held.values())))
    draw(held, options.every, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
