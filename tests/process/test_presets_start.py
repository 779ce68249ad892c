"""The knobs that are read as a program or a library starts, each against its real reader, with and without."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelguard import presets
from modelguard.facts import _memory

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="what a process has done is read from /proc"),
]

needs_glibc = pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="this Python does not run on glibc")
needs_two_cpus = pytest.mark.skipif(_memory.available_cpus().count < 2, reason="one CPU: one thread either way")

#: The variables that the presets set; a test starts without any of the caller's own.
KNOBS = {knob.name: knob for name in presets.names() for knob in presets.get(name, cpus=1).knobs}

HELD = """
import json, os, re, sys, threading, time
from modelguard import presets

def held():
    rollup = open("/proc/self/smaps_rollup").read()
    return 1024 * int(re.search(r"Private_Dirty: +([0-9]+)", rollup)[1])
"""

APPLY = """
def apply(name):
    report = presets.get(name, cpus=1).apply()
    found = {outcome.knob.name: [outcome.state, outcome.value, outcome.evidence] for outcome in report}
    print(json.dumps({"ok": report.ok, **found}))
"""

# One thread after the other, so that no two need memory at the same time.
THREADS = """
done, pins = threading.Event(), []

def use():
    blocks = [bytes(1000) for _ in range(20_000)]
    pins.append(bytes(1000))  # the end of this heap stays in use
    del blocks
    ready.set()
    done.wait()

before = held()
for _ in range(12):
    ready = threading.Event()
    threading.Thread(target=use).start()
    ready.wait()
print(held() - before)
done.set()
"""

# The first large block that is freed teaches glibc to serve all smaller ones from its heap.
LARGE = """
block = bytes(32_000_000)
del block
before = held()
blocks = [b"x" * 1_000_000 for _ in range(60)]
pin = b"x" * 100_000
del blocks
print(held() - before)
"""

# What is left at the end of the heap.
END = """
block = b"x" * 32_000_000
del block
before = held()
blocks = [b"x" * 100_000 for _ in range(300)]
del blocks
print(held() - before)
"""

# jemalloc gives freed pages back as the process goes on allocating. It is waited for as long as the test says.
DECAY = """
before = held()
blocks = [b"x" * 100_000 for _ in range(1_000)]
del blocks
end = time.monotonic() + float(os.environ["PATIENCE"])
while time.monotonic() < end and held() - before > 10e6:
    [b"x" * 100_000 for _ in range(10)]
    time.sleep(0.01)
print(held() - before)
"""


def run(*parts: str, **environment: str) -> list[Any]:
    """Run a script, and return its output, line by line."""
    inherited = {name: value for name, value in os.environ.items() if name not in KNOBS}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(parts)],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_and_without(script: str, name: str) -> tuple[int, int]:
    """Bytes that are held after a script, with a knob of the presets in force and without it."""
    (held,) = run(HELD, script, **{name: KNOBS[name].value})
    (grown,) = run(HELD, script)
    return held, grown


@needs_glibc
def test_fewer_arenas_hold_less() -> None:
    """Twelve threads that each freed 20 MB leave two heaps behind, and not one per thread."""
    held, grown = with_and_without(THREADS, "MALLOC_ARENA_MAX")
    assert 100e6 < grown
    assert held < 70e6


@needs_glibc
def test_a_fixed_mmap_threshold_holds_less() -> None:
    """Large blocks go back as they are freed, also after a larger one was freed."""
    held, grown = with_and_without(LARGE, "MALLOC_MMAP_THRESHOLD_")
    assert 40e6 < grown
    assert held < 10e6


@needs_glibc
def test_a_fixed_trim_threshold_holds_less() -> None:
    """The free end of the heap goes back, also after a large block was freed."""
    held, grown = with_and_without(END, "MALLOC_TRIM_THRESHOLD_")
    assert 20e6 < grown
    assert held < 10e6


def jemalloc() -> str:
    """The file that Debian installs; without it the test is skipped."""
    found = [str(file) for file in Path("/usr/lib").glob("*-linux-*/libjemalloc.so.2")]
    if not found:
        pytest.skip("jemalloc is not installed (libjemalloc.so.2)")
    return found[0]


def test_jemalloc_gives_back_sooner() -> None:
    """Freed pages are given back within two seconds, of which jemalloc's default of ten leaves most of them."""
    name = "MALLOC_CONF"
    (held,) = run(HELD, DECAY, **{name: KNOBS[name].value}, LD_PRELOAD=jemalloc(), PATIENCE="8")
    (grown,) = run(HELD, DECAY, LD_PRELOAD=jemalloc(), PATIENCE="2")
    assert 30e6 < grown
    assert held < 20e6


@needs_glibc
def test_what_must_be_there_at_the_start_needs_an_exec() -> None:
    """Applied inside a process it sets nothing and reports that; nothing reads jemalloc's variable here."""
    report, *_ = run(HELD, APPLY, "apply('low-memory')")
    assert not report["ok"]
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        assert ["needs exec", None] == report[name][:2]
    assert "not supported" == report["MALLOC_CONF"][0]
    assert "malloc is served by glibc" in report["MALLOC_CONF"][2]


@needs_glibc
def test_what_was_there_at_the_start_is_in_force() -> None:
    """In a program that was started with the preset's variables the report is ok."""
    (report,) = run(HELD, APPLY, "apply('low-memory')", **presets.get("low-memory").environment({}))
    assert report["ok"]
    assert "applied" == report["MALLOC_ARENA_MAX"][0]


@needs_glibc
def test_a_placebo_is_exposed_and_does_nothing() -> None:
    """Set from inside, as by gunicorn's raw_env, it is reported as needing an exec, and memory does grow."""
    name = "MALLOC_MMAP_THRESHOLD_"
    placebo = f"os.environ[{name!r}] = {KNOBS[name].value!r}"
    report, grown = run(HELD, APPLY, placebo, "apply('low-memory')", LARGE)
    assert "needs exec" == report[name][0]
    assert "which has no effect" in report[name][2]
    assert 40e6 < grown


def test_under_jemalloc_its_own_variable_counts() -> None:
    """Nothing reads glibc's variables there, and the report names the allocator that serves."""
    (report,) = run(HELD, APPLY, "apply('low-memory')", LD_PRELOAD=jemalloc())
    assert "needs exec" == report["MALLOC_CONF"][0]
    assert "not supported" == report["MALLOC_ARENA_MAX"][0]
    assert "jemalloc" in report["MALLOC_ARENA_MAX"][2]


def needs(module: str) -> pytest.MarkDecorator:
    """Skip a test where a module is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


TASKS = "print(len(os.listdir('/proc/self/task')))"


@needs("numpy")
@needs_two_cpus
def test_openblas_starts_no_threads() -> None:
    """Set before the import of numpy, the process has one thread; afterwards it is too late."""
    report, tasks = run(HELD, APPLY, "apply('prefork')", "import numpy", TASKS)
    assert "applied" == report["OPENBLAS_NUM_THREADS"][0]
    assert 1 == tasks
    tasks, late, exposed = run(
        HELD,
        APPLY,
        "import numpy",
        TASKS,
        "apply('prefork')",
        "os.environ['OPENBLAS_NUM_THREADS'] = '1'",
        "apply('prefork')",
    )
    if tasks == 1:
        pytest.skip("this numpy does not start threads as it is imported")
    assert ["too late", None] == late["OPENBLAS_NUM_THREADS"][:2]
    assert f"uses {tasks} threads" in late["OPENBLAS_NUM_THREADS"][2]
    assert "too late" == exposed["OPENBLAS_NUM_THREADS"][0]


TOKENIZERS = """
from tokenizers import Tokenizer, models, pre_tokenizers
tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
"""
ENCODE = "encoded = tokenizer.encode_batch(['a b'] * 1000)"


@needs("tokenizers")
@needs_two_cpus
def test_tokenizers_start_no_threads() -> None:
    """The variable counts also after the import; without it a batch starts threads that a fork would lose."""
    (without,) = run(HELD, TOKENIZERS, ENCODE, TASKS)
    report, within = run(HELD, APPLY, TOKENIZERS, "apply('prefork')", ENCODE, TASKS)
    assert "applied" == report["TOKENIZERS_PARALLELISM"][0]
    assert (1, 1) < (within, without)
    assert 1 == within


GRPC = "from grpc._cython import cygrpc; print(json.dumps(cygrpc.is_fork_support_enabled()))"


@needs("grpc")
def test_grpc_supports_forks() -> None:
    """Set before the import of grpc it is in force, and the report says so; afterwards it is too late."""
    report, forks, again = run(HELD, APPLY, "apply('prefork')", GRPC, "apply('prefork')")
    assert "applied" == report["GRPC_ENABLE_FORK_SUPPORT"][0] == again["GRPC_ENABLE_FORK_SUPPORT"][0]
    assert forks
    forks, late = run(HELD, APPLY, GRPC, "apply('prefork')")
    assert not forks
    assert "too late" == late["GRPC_ENABLE_FORK_SUPPORT"][0]


def test_importing_presets_is_light() -> None:
    """Modules that only an inspection, an error or a rendering needs are not imported."""
    script = "import json, sys; import modelguard.presets; print(json.dumps(sorted(sys.modules)))"
    (modules,) = run(script)
    heavy = {"ctypes", "difflib", "mmap", "shlex", "torch"}
    assert set() == heavy & {*modules}
