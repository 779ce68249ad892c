"""Put the same load on both services, each on a Ray of its own, and compare.

From the root of the source tree: python -m examples.ray_serve.drive
"""

import argparse
import contextlib
import http.client
import importlib
import json
import logging
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from examples import _driver
from examples._driver import free_port, megabytes, send_all

HERE = Path(__file__).parent
SERVICES = {"unguarded": "unguarded", "guarded": "app"}
#: Clients of the steady traffic, texts that each sends in a second, and new words in each text.
CLIENTS, RATE, WORDS = 4, 5, 300
#: Texts of the burst, words in each, and the seconds within which an answer is in time.
BURST, LONG, IN_TIME = 300, 1500, 3.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"
OK, BUSY, LATE = 200, 503, 504


@contextlib.contextmanager
def serving(name: str) -> Iterator[int]:
    """The service on a Ray of this machine, ended afterwards; gives its port."""
    import ray
    from ray import serve

    port = free_port()
    # Replicas import the services from here.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, str(HERE))
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray.init(
        num_cpus=2,
        object_store_memory=80_000_000,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options={"port": port}, logging_config={"log_level": "ERROR", "enable_access_log": False})
        serve.run(importlib.import_module(SERVICES[name]).app)
        yield port
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()


def text(rng: random.Random, words: int) -> str:
    """Words that nobody has seen before."""
    return " ".join("".join(rng.choices(LETTERS, k=10)) for _ in range(words))


def ask(port: int, what: str) -> tuple[int, float]:
    """Send a text; the status, 0 for no answer within a minute, and the seconds that it took."""
    try:
        answer = _driver.ask(port, data=json.dumps(what))
    except (OSError, http.client.HTTPException):
        return 0, math.inf
    return answer.status, answer.seconds


def replicas() -> dict[int, int]:
    """Private bytes of each replica, by its process."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in " ".join(child.cmdline()):
                found[child.pid] = child.memory_full_info().uss
    return found


def steady(port: int, seconds: float) -> dict[str, Any]:
    """Texts of new words, without a pause."""
    over = threading.Event()
    first = replicas()
    seen, largest = set(first), max(first.values())

    def send(seed: int) -> Counter[int]:
        rng, statuses = random.Random(seed), Counter[int]()
        due = time.monotonic()
        while not over.wait(max(due - time.monotonic(), 0)):
            due += 1 / RATE
            statuses[ask(port, text(rng, WORDS))[0]] += 1
        return statuses

    with ThreadPoolExecutor(CLIENTS) as pool:
        sending = [pool.submit(send, seed) for seed in range(CLIENTS)]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.5)
            now = replicas()
            seen |= set(now)
            largest = max(largest, *now.values()) if now else largest
        over.set()
        statuses = sum((one.result() for one in sending), Counter[int]())
    return {
        "answered": statuses[OK],
        "refused": statuses[BUSY] + statuses[LATE],
        "lost": statuses.total() - statuses[OK] - statuses[BUSY] - statuses[LATE],
        "replicas": len(seen),
        "grown": largest - min(first.values()),
    }


def burst(port: int) -> dict[str, Any]:
    """Many long texts at once."""
    rng = random.Random(0)
    texts = [text(rng, LONG) for _ in range(BURST)]
    answers = send_all(lambda one: ask(port, one), texts, BURST)
    took = [seconds for status, seconds in answers if status == OK]
    statuses = Counter(status for status, _ in answers)
    return {
        "answered": statuses[OK],
        "in_time": sum(seconds <= IN_TIME for seconds in took),
        "refused": statuses[BUSY] + statuses[LATE],
        "lost": BURST - statuses[OK] - statuses[BUSY] - statuses[LATE],
        "longest": max(seconds for _, seconds in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve in two ways under the same load, and compare.")
    parser.add_argument(
        "--seconds", type=float, default=60, metavar="S", help="of steady traffic; default: %(default)s"
    )
    parser.add_argument(
        "--uses", default="300", metavar="N", help="batches after which a replica is replaced; default: %(default)s"
    )
    parser.add_argument("--service", choices=tuple(SERVICES), help="only one of the two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args()
    os.environ["MAX_USES"] = options.uses
    told: dict[str, Any] = {}
    for name in [options.service] if options.service else SERVICES:
        with serving(name) as port:
            for _ in range(CLIENTS):
                ask(port, "Hello, Ray.")
            told[name] = {"steady": steady(port, options.seconds), "burst": burst(port)}
        one, many = told[name]["steady"], told[name]["burst"]
        print(f"{name}: {one['answered']} answered, {one['refused']} refused, {one['lost']} lost;", end=" ")
        print(f"{one['replicas']} replicas in all, the largest grew by {megabytes(one['grown'])}")
        print(f"  {BURST} long texts at once: {many['in_time']} answered within {IN_TIME:.0f} s,", end=" ")
        print(f"{many['answered'] - many['in_time']} later, {many['refused']} refused, {many['lost']} lost;", end=" ")
        print(f"the last heard after {many['longest']:.1f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
