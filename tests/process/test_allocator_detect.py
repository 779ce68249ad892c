"""Reports about the allocator in force: really preloaded ones, ineffective ones, a private copy, two at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import run_python

from modelguard import allocator
from modelguard.allocator import AllocatorFile, Kind

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="allocators are told apart on Linux only"),
]

needs_glibc = pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="this Python does not run on glibc")

# Debian's jemalloc is built to be preloaded; opened later, it needs more of this than glibc sets aside.
ROOM = {"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=32768"}

# An allocator of one's own: all that it has in common with any other is the four functions.
UNKNOWN = """
#include <stddef.h>
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
void *malloc(size_t size) { return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return __libc_calloc(count, size); }
void *realloc(void *block, size_t size) { return __libc_realloc(block, size); }
void free(void *block) { __libc_free(block); }
"""

DETECT = """
import ctypes, dataclasses, json, os, sys
{first}
from modelguard import allocator
print(json.dumps(dataclasses.asdict(allocator.detect())))
"""

# Takes 100 MB, and half of it in another thread: what an allocator tells must be of the whole process.
FIGURES = """
import dataclasses, json, threading
from modelguard import allocator

def take(blocks):
    blocks += (bytes(1000 + i % 100) for i in range(50_000))

before, first, second = allocator.stats(), [], []
take(first)
thread = threading.Thread(target=take, args=[second])
thread.start()
thread.join()
full = allocator.stats()
first.clear(), second.clear()
allocator.trim()
print(json.dumps([dataclasses.asdict(each) for each in (before, full, allocator.stats())]))
"""

# Set by whoever runs the tests, they would change what is found.
FOREIGN = {"LD_PRELOAD", "MALLOC_CONF", "PYTHONMALLOC", "PYTHONDEVMODE"}


def library(kind: Kind) -> Path:
    """The file of an installed allocator; without it the test is skipped."""
    found = allocator.find(kind)
    if not found:
        pytest.skip(f"{kind} is not installed")
    return Path(found[0].path)


def answer(script: str, **variables: str) -> str:
    """The output of a script, run with these variables besides the usual ones."""
    environment = {name: value for name, value in os.environ.items() if name not in FOREIGN} | variables
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def detected(first: str = "", **variables: str) -> dict[str, Any]:
    """What a process reports of its allocator, after doing something first."""
    told: dict[str, Any] = json.loads(answer(DETECT.format(first=first), **variables))
    return told


VERSION = r"\d+\.\d+(\.\d+)?"


@needs_glibc
def test_without_a_preload_glibc_is_told_with_its_version_and_no_problem() -> None:
    """A plain Python runs on the C library that it is linked to, without problems."""
    told = detected()
    assert ("glibc", "linked", "pymalloc", []) == tuple(told[name] for name in ("kind", "how", "python", "problems"))
    assert os.confstr("CS_GNU_LIBC_VERSION") == f"glibc {told['version']}"
    assert Path(told["path"]).is_file()


@pytest.mark.parametrize("kind", ["jemalloc", "mimalloc", "tcmalloc"])
def test_a_preloaded_allocator_is_told_with_its_file_and_version(kind: Kind) -> None:
    """The report has the library that really serves, how it came in, and no problems."""
    file = library(kind)
    told = detected(LD_PRELOAD=str(file))
    assert (kind, "preloaded", []) == (told["kind"], told["how"], told["problems"])
    assert file.resolve() == Path(told["path"])
    assert re.fullmatch(VERSION, told["version"])


@pytest.mark.parametrize("kind", ["jemalloc", "mimalloc", "tcmalloc"])
def test_a_library_may_be_preloaded_by_its_bare_name(kind: Kind) -> None:
    """The dynamic linker searches for it, and the file that it found is recognised."""
    told = detected(LD_PRELOAD=library(kind).name)
    assert (kind, "preloaded", []) == (told["kind"], told["how"], told["problems"])


@pytest.mark.parametrize("kind", [pytest.param("glibc", marks=needs_glibc), "jemalloc", "tcmalloc"])
def test_figures_are_those_of_the_whole_process(kind: Kind) -> None:
    """What is allocated follows what all threads took and freed, and a trim gives most of it back."""
    preload = "" if kind == "glibc" else str(library(kind))
    before, full, trimmed = json.loads(answer(FIGURES, LD_PRELOAD=preload))
    assert 90e6 < full["allocated"] - before["allocated"] < 150e6
    assert trimmed["allocated"] - before["allocated"] < 20e6
    assert full["allocated"] <= full["resident"] == full["allocated"] + full["retained"]
    if kind != "glibc":  # which counts what a trim gave back from the middle of its heap as its own
        assert full["allocated"] <= full["active"] <= full["resident"]
        assert trimmed["resident"] < full["resident"] - 50e6


def test_mimalloc_tells_only_what_it_has_committed() -> None:
    """What the program holds is unknown rather than wrong."""
    _, full, _ = json.loads(answer(FIGURES, LD_PRELOAD=str(library("mimalloc"))))
    assert (None, None, None) == (full["allocated"], full["active"], full["retained"])
    assert 90e6 < full["resident"]


@needs_glibc
def test_a_variable_set_from_inside_is_told_as_a_placebo() -> None:
    """The file exists, but it is too late to preload it, as with gunicorn's raw_env."""
    file = str(library("jemalloc"))
    told = detected(f"os.environ['LD_PRELOAD'] = {file!r}")
    assert ("glibc", "linked") == (told["kind"], told["how"])
    (problem,) = told["problems"]
    assert "placebo" == problem["kind"]
    assert file in problem["seen"]
    assert "modelguard run --allocator jemalloc" in problem["fix"]


@needs_glibc
def test_a_placebo_is_told_even_if_the_library_was_opened_later() -> None:
    """A loaded library is not necessarily in force."""
    file = str(library("jemalloc"))
    first = f"os.environ['LD_PRELOAD'] = {file!r}; ctypes.CDLL({file!r})"
    told = detected(first, **ROOM)
    assert ("glibc", ["placebo"]) == (told["kind"], [problem["kind"] for problem in told["problems"]])


@needs_glibc
def test_a_file_to_preload_that_is_not_there_is_told() -> None:
    """The dynamic linker prints one line and continues without it."""
    told = detected(LD_PRELOAD="/nowhere/libjemalloc.so.2")
    assert ("glibc", ["missing"]) == (told["kind"], [problem["kind"] for problem in told["problems"]])


@needs_glibc
def test_a_file_that_cannot_be_preloaded_is_told(tmp_path: Path) -> None:
    """A file that is not a library is reported as not loaded."""
    broken = tmp_path / "libjemalloc.so.2"
    broken.write_bytes(b"")
    told = detected(LD_PRELOAD=str(broken))
    assert ("glibc", ["placebo"]) == (told["kind"], [problem["kind"] for problem in told["problems"]])
    assert "could not load it" in told["problems"][0]["seen"]


@needs_glibc
@pytest.mark.parametrize("kind", ["jemalloc", "mimalloc", "tcmalloc"])
def test_a_copy_that_a_wheel_bundles_is_told_as_private(kind: Kind, tmp_path: Path) -> None:
    """It is loaded for the package alone; glibc continues to serve malloc."""
    bundled = tmp_path / "site-packages" / "pyarrow" / f"lib{kind}-1a2b3c4d.so.2"
    bundled.parent.mkdir(parents=True)
    shutil.copy(library(kind), bundled)
    told = detected(f"ctypes.CDLL({str(bundled)!r})", **ROOM)
    assert ("glibc", ["private copy"]) == (told["kind"], [problem["kind"] for problem in told["problems"]])
    assert str(bundled) in told["problems"][0]["seen"]


@pytest.mark.parametrize(("first", "second"), [("jemalloc", "tcmalloc"), ("tcmalloc", "jemalloc")])
def test_of_two_preloaded_the_first_serves_and_the_other_is_told(first: Kind, second: Kind) -> None:
    """The second allocator in the variable is reported."""
    told = detected(LD_PRELOAD=f"{library(first)}:{library(second)}")
    assert (first, "preloaded") == (told["kind"], told["how"])
    (problem,) = told["problems"]
    assert "two allocators" == problem["kind"]
    assert str(library(second)) in problem["seen"]


def test_jemallocs_background_threads_are_told() -> None:
    """They are reported, because a fork loses them."""
    told = detected(LD_PRELOAD=str(library("jemalloc")), MALLOC_CONF="background_thread:true")
    assert ["background threads"] == [problem["kind"] for problem in told["problems"]]
    assert [] == detected(LD_PRELOAD=str(library("jemalloc")), MALLOC_CONF="dirty_decay_ms:1000")["problems"]


@needs_glibc
def test_jemallocs_setting_without_jemalloc_is_told() -> None:
    """The C library does not read MALLOC_CONF."""
    assert ["unused setting"] == [problem["kind"] for problem in detected(MALLOC_CONF="narenas:1")["problems"]]


def test_jemallocs_setting_set_from_inside_is_told() -> None:
    """Its variable is read once, before Python's first line."""
    told = detected("os.environ['MALLOC_CONF'] = 'narenas:1'", LD_PRELOAD=str(library("jemalloc")))
    assert ("jemalloc", ["unused setting"]) == (told["kind"], [problem["kind"] for problem in told["problems"]])


@pytest.mark.parametrize("first", ["", "import tracemalloc; tracemalloc.start()"])
@pytest.mark.parametrize("choice", ["pymalloc", "malloc", "mimalloc", "malloc_debug"])
def test_what_serves_pythons_small_objects_is_told(choice: str, first: str) -> None:
    """PYTHONMALLOC is respected, and a profiler does not hide it."""
    if choice == "mimalloc" and sys.version_info < (3, 13):
        pytest.skip("Python has its own mimalloc from 3.13 on")
    assert choice.removesuffix("_debug") == detected(first, PYTHONMALLOC=choice)["python"]


@needs_glibc
def test_pythons_allocator_set_from_inside_is_not_believed() -> None:
    """PYTHONMALLOC is read when Python starts."""
    assert "pymalloc" == detected("os.environ['PYTHONMALLOC'] = 'malloc'")["python"]
    assert "malloc" == detected("os.environ['PYTHONMALLOC'] = 'pymalloc'", PYTHONMALLOC="malloc")["python"]


@needs_glibc
def test_an_allocator_that_is_a_part_of_the_program_is_static(tmp_path: Path) -> None:
    """A program with its own malloc is reported by the program's file."""
    compiler, config = shutil.which("cc"), sysconfig.get_config_vars()
    if compiler is None:
        pytest.skip("there is no C compiler to make a program with")
    code = DETECT.format(first="")
    main = """
int Py_BytesMain(int, char **);
int main(int argc, char **argv) { char *to[] = {argv[0], "-c", argv[1], 0}; return Py_BytesMain(3, to); }
"""
    source, program = tmp_path / "main.c", tmp_path / "program"
    source.write_text(UNKNOWN + main)
    flags = ["-rdynamic", f"-L{config['LIBDIR']}", f"-lpython{config['LDVERSION']}", *config["LIBS"].split(), "-lm"]
    built = subprocess.run([compiler, "-o", program, source, *flags], capture_output=True, timeout=50, check=False)
    if built.returncode:
        pytest.skip("this Python cannot be built into another program")
    # The new program is no part of this virtual environment, so it is told where everything is.
    paths = {"LD_LIBRARY_PATH": config["LIBDIR"], "PYTHONHOME": sys.base_prefix, "PYTHONPATH": ":".join(sys.path)}
    environment = {**os.environ, **paths}
    done = subprocess.run([program, code], env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert 0 == done.returncode, done.stderr
    told = json.loads(done.stdout)
    assert ("unknown", "static", str(program)) == (told["kind"], told["how"], told["path"])
    assert (None, None) == (told["version"], told["figures"])


def test_another_process_is_looked_at_from_outside() -> None:
    """Another process shows its preloads, its libraries and jemalloc's threads, and is not disturbed."""
    file = library("jemalloc")
    environment = {**os.environ, "LD_PRELOAD": f"{file}:/nowhere/it.so", "MALLOC_CONF": "background_thread:true"}
    script = "print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as other:  # fmt: skip
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        seen = allocator.observe(other.pid)
        other.stdin.close()
    assert ("jemalloc", str(file.resolve())) == (seen.kind, seen.path)
    assert (str(file), "/nowhere/it.so") == seen.preload
    assert AllocatorFile("jemalloc", str(file.resolve())) in seen.mapped
    assert ["missing", "background threads"] == [problem.kind for problem in seen.problems]


def test_a_process_that_is_gone_or_not_ours_is_told_by_the_builtin_errors() -> None:
    """The errors are those of reading its memory."""
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()
        with pytest.raises(ProcessLookupError, match=f"process {other.pid} does not exist"):
            allocator.observe(other.pid)


@pytest.mark.timeout(90)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's dynamic linker")
def test_threads_that_list_the_loaded_files_do_not_wait_for_each_other() -> None:
    """Two releases at once, or one beside an import, end: nothing waits for the linker's lock with the GIL in hand."""
    program = """
        import json, os, sys, threading
        from modelguard.environment._loaded_files import listed

        sys.setswitchinterval(1e-6)
        counts = []

        def work():
            for _ in range(300):
                counts.append(len(list(listed())))

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
        print(json.dumps([len(counts), min(counts) > 2]), flush=True)
        os._exit(0)
    """
    assert [1200, True] == run_python(program, 80)
