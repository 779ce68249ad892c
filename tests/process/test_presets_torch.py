"""The knobs that torch and its libraries read, each against the real library: what it does, and from when on nothing.

The convolutions see ever-new lengths, as in a service whose inputs have no fixed size. Growth is private dirty memory
after glibc was asked to give back what is free, so that only what is really held counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from modelguard import presets
from modelguard.environment import _knobs
from modelguard.facts import _memory

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="what a process has done is read from /proc"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

LENGTHS = 300
#: Doing nothing was seen to grow by 87 MB on one kind of processor and by 49 MB on another, both caps by 23 MB.
HELD, GROWN = 35e6, 45e6

START = """
import ctypes, json, os, random, re
from modelguard import presets

preset = presets.get("torch-cpu-dynamic", cpus=1)

def apply():
    report = preset.apply()
    found = {outcome.knob.name: [outcome.state, outcome.value, outcome.evidence] for outcome in report}
    print(json.dumps({"ok": report.ok, **found}))
"""

TORCH = """
import torch

layers = [torch.nn.Conv1d(32, 32, width, padding=width // 2) for width in (3, 5, 7, 11)] * 2

def convolve(length):
    inputs = torch.zeros(1, 32, length)
    with torch.inference_mode():
        for layer in layers:
            inputs = layer(inputs)
"""

GROW = f"""
def held():
    ctypes.CDLL(None).malloc_trim(0)
    rollup = open("/proc/self/smaps_rollup").read()
    return 1024 * int(re.search(r"Private_Dirty: +([0-9]+)", rollup)[1])

convolve(2000)
before, lengths = held(), random.Random(0)
for _ in range({LENGTHS}):
    convolve(lengths.randint(700, 2000))
print(json.dumps(held() - before))
"""

#: The variables that the presets set; a test starts without any of the caller's own.
OURS = {knob.name for name in presets.names() for knob in presets.get(name, cpus=1).knobs}

#: Growth is the same with any number of threads, and on a busy machine one is done much sooner.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

CAPS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def run(*parts: str, **environment: str) -> list[Any]:
    """Run a script, and return its output, line by line."""
    inherited = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(parts)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_without_a_preset_new_lengths_grow() -> None:
    """Without the preset each new length leaves something behind in every layer."""
    (grown,) = run(START, TORCH, GROW, **ONE_THREAD)
    assert GROWN < grown


@pytest.mark.parametrize("parts", [("apply()", TORCH), (TORCH, "apply()")], ids=["before torch", "after torch"])
def test_caps_hold_if_set_before_the_first_convolution(parts: tuple[str, str]) -> None:
    """Set before or after the import of torch, both caps are reported as applied, and memory stays bounded."""
    report, grown = run(START, *parts, GROW, **ONE_THREAD)
    assert ["applied", "applied"] == [report[name][0] for name in CAPS]
    assert grown < HELD


def test_caps_are_too_late_after_the_first_convolution() -> None:
    """After the first convolution it sets nothing, reports the sizes in force, and memory grows."""
    report, same, grown = run(START, TORCH, "convolve(2000)", "apply()", "apply()", GROW, **ONE_THREAD)
    assert not report["ok"]
    for name in CAPS:
        state, value, evidence = report[name]
        assert ("too late", None) == (state, value)
        assert "room for 1024 entries" in evidence
    assert report == same
    assert GROWN < grown


def test_caps_that_the_report_calls_too_late_indeed_do_nothing() -> None:
    """Caps that are set after the first convolution are reported as without effect, and memory grows."""
    force = "\n".join(f"os.environ[{name!r}] = '64'" for name in CAPS)
    report, grown = run(START, TORCH, "convolve(2000)", force, "apply()", GROW, **ONE_THREAD)
    assert ["too late", "too late"] == [report[name][0] for name in CAPS]
    assert all("which has no effect" in report[name][2] for name in CAPS)
    assert GROWN < grown


def test_caps_that_a_program_was_started_with() -> None:
    """A new program with the preset's variables stays bounded, and reports them as applied at any time."""
    grown, report = run(START, TORCH, GROW, "apply()", **presets.get("torch-cpu-dynamic", cpus=1).environment({}))
    assert grown < HELD
    assert report["ok"]
    assert ["applied", "applied"] == [report[name][0] for name in CAPS]
    assert all(f"room for {_knobs.DEFAULT_ENTRIES} entries" in report[name][2] for name in CAPS)


@pytest.mark.parametrize(("value", "crashes"), [("", True), ("0x10", True), ("abc", True), (" +2 entries", False)])
def test_a_value_is_refused_exactly_if_torch_crashes_on_it(value: str, crashes: bool) -> None:  # noqa: FBT001
    """The rule that presets and the doctor apply is that of torch's own parser."""
    inherited = {name: text for name, text in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", f"{TORCH}\nconvolve(2000)"],
        env={**inherited, "LRU_CACHE_CAPACITY": value},
        stderr=subprocess.DEVNULL,
        timeout=200,
        check=False,
    )
    assert (-signal.SIGSEGV if crashes else 0) == done.returncode
    (report,) = run(START, "apply()", LRU_CACHE_CAPACITY=value)
    assert crashes is not report["ok"]
    assert ("invalid" if crashes else "kept") == report["LRU_CACHE_CAPACITY"][0]


def test_caps_of_the_user_are_kept() -> None:
    """The user's own capacity is in force, and the report shows it."""
    (report,) = run(START, TORCH, "convolve(2000)", "apply()", **dict.fromkeys(CAPS, "7"))
    for name in CAPS:
        state, value, evidence = report[name]
        assert ("kept", "7") == (state, value)
        assert "room for 7 entries" in evidence


def test_each_thread_reads_ideeps_cap_for_itself() -> None:
    """A thread that has made no convolution yet still reads it; oneDNN's own cap belongs to the process."""
    thread = "import threading; threading.Thread(target=apply).start()"
    (report,) = run(START, TORCH, "convolve(2000)", thread)
    assert ["too late", "applied"] == [report[name][0] for name in CAPS]


def test_a_child_inherits_what_its_parent_has_done() -> None:
    """A worker that was forked after a convolution has the parent's cache, and the report says so."""
    (report,) = run(
        START, "apply_later = apply", TORCH, "convolve(2000)", "os.fork() or (apply(), os._exit(0)); os.wait()"
    )
    assert ["too late", "too late"] == [report[name][0] for name in CAPS]


THREADS = "print(json.dumps([torch.get_num_threads(), len(os.listdir('/proc/self/task'))]))"
needs_two_cpus = pytest.mark.skipif(_memory.available_cpus().count < 2, reason="one CPU: one thread either way")


@needs_two_cpus
def test_threads_follow_the_preset() -> None:
    """Set before the import of torch, an operation runs on as many threads as the worker has CPUs."""
    report, (threads, _) = run(START, "apply()", TORCH, "convolve(2000)", THREADS)
    assert "applied" == report["OMP_NUM_THREADS"][0] == report["MKL_NUM_THREADS"][0]
    assert 1 == threads


@needs_two_cpus
def test_threads_are_too_late_after_the_import() -> None:
    """After the import the report names the library and its number of threads, and setting them does nothing."""
    force = "\n".join(f"os.environ[{name!r}] = '1'" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    report, exposed, (threads, _) = run(START, TORCH, "apply()", force, "apply()", "convolve(2000)", THREADS)
    assert 1 < threads
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name != "MKL_NUM_THREADS" or "is loaded" in report[name][2]:  # there is no MKL in torch for ARM
            assert ["too late", None] == report[name][:2]
            assert f"uses {threads} threads" in report[name][2]
            assert "too late" == exposed[name][0]
