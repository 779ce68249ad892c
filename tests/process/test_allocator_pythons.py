"""Every way in which a Python is built: which library serves malloc there, and whether freed memory comes back.

Not among them: conda's Python, since no machine that runs the tests has conda; and Pythons that are linked statically
with musl, which have no loader that could preload a library, and whose malloc gives nothing back on demand.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelguard import allocator
from modelguard.allocator import Kind
from modelguard.environment import _loaded_files

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these allocators"),
    pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="this Python does not run on glibc"),
]

#: Freed memory stays with the allocator until it is asked for; otherwise some would come back by itself, with time.
KEEP = {"MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1", "TCMALLOC_RELEASE_RATE": "0"}

EMBEDDING = """
#include <stdlib.h>
int Py_BytesMain(int, char **);
int main(int argc, char **argv) {
    void *(*volatile allocate)(size_t) = malloc;  /* the program uses the address, as Debian's Python does */
    free(allocate(1));
    return Py_BytesMain(argc, argv);
}
"""

DETECT = """
import dataclasses, json
from modelguard import allocator
print(json.dumps(dataclasses.asdict(allocator.detect())))
"""

#: Prints what the doctor's probe says that serves malloc, and what modelguard says.
PROBE = """
import json
from modelguard import allocator
names = {{"__name__": "probe"}}
exec(open({file!r}).read(), names)
print(json.dumps([names["file_of"]("malloc")[1], allocator.detect().path]))
"""

#: Prints how much the process has grown by 200 MB of blocks, by how much a trim shrinks it, and what is left.
TRIM = """
import json
from modelguard import allocator, memory

start = memory.private(fresh=True)
size = 1000  # past what Python's own small-object allocator serves
blocks = [b"x" * size for _ in range(200_000)]
full = memory.private(fresh=True)
pin = b"y" * size  # the heap's top stays in use, so that glibc cannot shrink it by itself
del blocks
returned = allocator.trim()
print(json.dumps([full - start, returned, memory.private(fresh=True) - start]))
"""

#: Prints what a guard's releases return of 200 MB of blocks, one in 200 of which survives, and what trimmed.
RELEASES = """
import json, threading
from modelguard import guard, telemetry

releases, survivors, released = [], [], threading.Event()

class Model:
    def __init__(self):
        self.blocks = [bytearray(8000) for _ in range(25_000)]
        survivors.extend(bytearray(8000) for _ in range(125))

def note(event):
    if isinstance(event, telemetry.GenerationReleased):
        releases.append(event)
        released.set()

telemetry.add_hook(note)
model = guard(Model, reload_on=None)
model.load()
for _ in range(3):
    released.clear()
    model.reload()
    assert released.wait(30)
print(json.dumps([[each.trimmed_by, each.trim_error, each.freed] for each in releases]))
"""


def embedding(folder: Path, *flags: str) -> list[str]:
    """A program that has Python as a shared library."""
    compiler, config = shutil.which("cc"), sysconfig.get_config_vars()
    if compiler is None:
        pytest.skip("there is no C compiler to make a program with")
    source, program = folder / "main.c", folder / "program"
    source.write_text(EMBEDDING)
    libraries = [f"-L{config['LIBDIR']}", f"-lpython{config['LDVERSION']}", *config["LIBS"].split(), "-lm"]
    command = [compiler, *flags, f"-Wl,-rpath,{config['LIBDIR']}", "-o", str(program), str(source), *libraries]
    built = subprocess.run(command, capture_output=True, timeout=50, check=False)
    if built.returncode:
        pytest.skip("this Python has no shared library")
    return [str(program)]


def distribution(_: Path) -> list[str]:
    """The Python of Debian and Ubuntu, which is not position-independent."""
    supported = "import sys; sys.exit(sys.version_info < (3, 11))"
    for name in ("/usr/bin/python3.11", "/usr/bin/python3"):
        if Path(name).exists() and not subprocess.run([name, "-c", supported], timeout=50, check=False).returncode:
            return [name, "-S"]  # without its own packages
    pytest.skip("there is no /usr/bin/python3 of 3.11 or newer")


PYTHONS: dict[str, Callable[[Path], list[str]]] = {
    "this one": lambda _: [sys.executable],
    "the distribution's": distribution,
    "shared library": lambda folder: embedding(folder, "-pie", "-fPIE"),
    "shared library, fixed address": lambda folder: embedding(folder, "-no-pie", "-fno-pie"),
}


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Each kind of Python, as a command."""
    return PYTHONS[request.param](tmp_path)


def preloads(kind: Kind) -> dict[str, str]:
    """The variables that make an allocator serve a program; without its library the test is skipped."""
    if kind == "glibc":
        return {"LD_PRELOAD": ""}
    found = allocator.find(kind)
    if not found:
        pytest.skip(f"{kind} is not installed")
    return {"LD_PRELOAD": found[0].path}


def answer(python: list[str], script: str, kind: Kind, **variables: str) -> Any:
    # The programs are not part of this virtual environment, so they are told where everything is.
    home = {"PYTHONHOME": sys.base_prefix} if "python" not in Path(python[0]).name else {}
    environment = {**os.environ, "PYTHONPATH": ":".join(packages()), **home, **preloads(kind), **variables}
    environment.pop("PYTHONMALLOC", None)
    done = subprocess.run(
        [*python, "-c", script], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


def packages() -> list[str]:
    """Where modelguard and its dependencies are; not this Python's own modules, which other versions cannot use."""
    own = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return [each for each in sys.path if each and ("site-packages" in each or not each.startswith(own))]


@pytest.mark.parametrize("kind", ["glibc", "jemalloc", "mimalloc", "tcmalloc"])
def test_the_library_that_serves_malloc_is_found(python: list[str], kind: Kind) -> None:
    """The report names the library, and not the program whose jump table leads to it."""
    found = answer(python, DETECT, kind)
    how = "linked" if kind == "glibc" else "preloaded"
    assert (kind, how, []) == (found["kind"], found["how"], found["problems"])
    assert ".so" in found["path"]
    assert found["version"] is not None
    assert found["figures"] is not None


@pytest.mark.parametrize("kind", ["glibc", "jemalloc", "mimalloc", "tcmalloc"])
def test_the_doctors_probe_finds_it_too(python: list[str], kind: Kind) -> None:
    """It works without modelguard, and names the same file."""
    probe, library = answer(python, PROBE.format(file=str(_loaded_files.__file__)), kind)
    assert os.path.realpath(library) == os.path.realpath(probe)


@pytest.mark.parametrize("kind", ["glibc", "jemalloc", "mimalloc", "tcmalloc"])
def test_a_trim_returns_freed_memory(python: list[str], kind: Kind) -> None:
    """At least half of what was freed comes back at once."""
    grown, returned, left = answer(python, TRIM, kind, **KEEP)
    assert 190e6 < grown
    assert grown / 2 < returned
    assert left < grown / 2


def test_releases_return_the_model(python: list[str]) -> None:
    """A guard that reloads under glibc returns its models' memory, release by release."""
    check_releases(python, "glibc")


@pytest.mark.parametrize("kind", ["jemalloc", "tcmalloc"])
def test_releases_return_the_model_under_what_auto_prefers(kind: Kind) -> None:
    """So do the allocators that `find` lists first."""
    check_releases([sys.executable], kind)


def test_releases_return_the_model_under_mimalloc_with_its_setting() -> None:
    """Its releases return it with the variables that `modelguard run` names, for versions before and from 2.1."""
    check_releases([sys.executable], "mimalloc", MIMALLOC_RESET_DELAY="0", MIMALLOC_PURGE_DELAY="0")


def check_releases(python: list[str], kind: Kind, **variables: str) -> None:
    for trimmed_by, error, freed in answer(python, RELEASES, kind, **variables):
        assert (kind, None) == (trimmed_by, error)
        assert 150e6 < freed


def test_a_program_with_a_malloc_of_its_own_is_static(tmp_path: Path) -> None:
    """The distribution's kind of program, at a fixed address: its own malloc is not taken for a jump table's entry."""
    own = """
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void __libc_free(void *);
void *malloc(size_t size) { return __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return __libc_calloc(count, size); }
void *realloc(void *block, size_t size) { return __libc_realloc(block, size); }
void free(void *block) { __libc_free(block); }
"""
    extra = tmp_path / "own.c"
    extra.write_text("#include <stddef.h>\n" + own)
    program = embedding(tmp_path, "-no-pie", "-fno-pie", "-rdynamic", str(extra))
    found = answer(program, DETECT, "glibc")
    assert ("unknown", "static", program[0]) == (found["kind"], found["how"], found["path"])
