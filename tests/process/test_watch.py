"""``diagnosis.watch()`` in a process that really grows, and in its forked child."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(480),
    pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc"),
]

PROGRAM = """
import json, os, sys, threading, time
from modelguard import guard, telemetry
from modelguard.diagnosis import watch

found, events, kept = threading.Event(), [], []

def hook(event):
    if isinstance(event, telemetry.GrowthFound):
        events.append(event)
        found.set()

telemetry.set_hooks([hook])
nlp = guard(dict, reload_on=None, name="nlp")

@nlp
def call(model):
    kept.append([0] * 2000)

def grow():
    while not found.is_set():
        call()
        time.sleep(0.001)
    return {"cause": events[-1].cause, "pid": events[-1].pid == os.getpid(), "seen": events[-1].seen}

watching = watch(every="50ms", name="service")
first = grow()
while nlp.status().growth is None:
    time.sleep(0.01)
first["status"] = nlp.status().growth is watching.found
reading, writing = os.pipe()
if os.fork() == 0:
    inherited = watching.found is None and nlp.status().growth is None
    found.clear()
    os.write(writing, json.dumps({**grow(), "forgotten": inherited}).encode())
    os._exit(0)
second = json.loads(os.read(reading, 10_000))
os.wait()
watching.stop()
print(json.dumps([first, second, nlp.status().growth is None]))
"""


def test_a_process_that_grows_and_its_child() -> None:
    """Both name the list that holds what grows; the child starts with nothing known, and a stop forgets."""
    # Python warns of a fork beside threads, as the one that watches.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=460)
    assert "" == done.stderr
    first, second, forgotten = json.loads(done.stdout)
    both: list[dict[str, Any]] = [first, second]
    for one in both:
        assert ("python objects", True) == (one["cause"], one["pid"])
        assert "held by __main__.kept (list, +" in one["seen"]
    assert first["status"]
    assert second["forgotten"]
    assert forgotten
