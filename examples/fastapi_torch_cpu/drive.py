"""Start both services, send both the same texts, and print what memory each holds.

From the root of the source tree: python -m examples.fastapi_torch_cpu.drive
"""

import argparse
import contextlib
import itertools
import json
import random
import string
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from examples._driver import Panel, Server, draw, megabytes, row, running

HERE = Path(__file__).parent
GUNICORN = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0"]
GUARD = [sys.executable, "-m", "modelguard", "run", "--preset", "torch-cpu-dynamic", "--allocator", "auto", "--"]
COMMANDS = {
    "unguarded": [*GUNICORN, "--config", "unguarded.conf.py", "unguarded:app"],
    "guarded": [*GUARD, *GUNICORN, "app:app"],
}
#: How many workers each has, as its configuration says. Each says that it listens when it has loaded the model.
WORKERS = {"unguarded": 2, "guarded": 1}
#: Texts are this long, and nearly each has a length of its own.
SHORTEST, LONGEST = 50, 2000


@contextlib.contextmanager
def serving(name: str) -> Iterator[Server]:
    """One of the two services, all of whose workers have loaded the model."""
    with running(COMMANDS[name], folder=HERE, name=name) as server:
        server.wait_until(lambda: server.log.count("ASGI server listening") == WORKERS[name], "a model in every worker")
        yield server


def speak(server: Server, text: str) -> list[float]:
    """Send a text and return the sound."""
    answer = server.ask("/speak", json.dumps({"text": text}), headers={"Content-Type": "application/json"}, timeout=120)
    sound: list[float] = answer.json
    return sound


def texts(seed: int = 0) -> Iterator[str]:
    """Make texts of random lengths, without end."""
    rng = random.Random(seed)
    while True:
        yield "".join(rng.choices(string.ascii_lowercase + " ", k=rng.randint(SHORTEST, LONGEST)))


def drive(servers: Mapping[str, Server], requests: int, every: int) -> dict[str, list[int]]:
    """Send each text to each service in turn; private memory before the first, and after ``every`` requests."""
    for server in servers.values():
        speak(server, "Hello!")
    held = {name: [server.private_bytes()] for name, server in servers.items()}
    print(row("requests", *held))
    print(row("0", *(megabytes(values[0]) for values in held.values())))
    for number, text in enumerate(itertools.islice(texts(), requests), start=1):
        for server in servers.values():
            speak(server, text)
        if number % every == 0:
            for name, server in servers.items():
                held[name].append(server.private_bytes())
            print(row(str(number), *(megabytes(values[-1]) for values in held.values())), flush=True)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description="Drive both services and compare their private memory.")
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="to each; default: %(default)s")
    parser.add_argument("--every", type=int, default=100, metavar="N", help="requests between readings")
    parser.add_argument("--out", type=Path, default=Path("build/fastapi_torch_cpu.png"), metavar="PNG")
    options = parser.parse_args()
    with serving("unguarded") as unguarded, serving("guarded") as guarded:
        held = drive({"unguarded": unguarded, "guarded": guarded}, options.requests, options.every)
    print(row("grown by", *(f"+{megabytes(values[-1] - values[0])}" for values in held.values())))
    curves = {
        name: ([place * options.every for place in range(len(values))], [value / 1e6 for value in values])
        for name, values in held.items()
    }
    title = "Two services with the same model and the same texts"
    x = f"requests, each of a random length from {SHORTEST} to {LONGEST} letters"
    draw(options.out, Panel(title, x, "private memory, MB", curves))
    print(options.out)


if __name__ == "__main__":
    main()
