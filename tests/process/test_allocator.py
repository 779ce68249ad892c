"""Every allocator, really preloaded: what serves malloc, and whether trimming gives memory back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="allocators are told apart on Linux only"),
]

SETTINGS = {
    # Freed memory stays with the allocator until it is asked for: otherwise some would go back by itself, by time.
    "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1",
    "TCMALLOC_RELEASE_RATE": "0",
    # Debian's jemalloc is built to be preloaded; opened later, it needs more of this than glibc sets aside.
    "GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=32768",
}

FILES = {
    "jemalloc": ("libjemalloc.so.2",),
    "mimalloc": ("libmimalloc.so.2", "libmimalloc.so.2.0"),
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
}

TRIM = """
from modelguard import allocator, memory

start = memory.private(fresh=True)
size = 1000  # past what Python's own small-object allocator serves
blocks = [b"x" * size for _ in range(200_000)]
full = memory.private(fresh=True)
pin = b"y" * size  # the heap's top stays in use, so that glibc cannot shrink it by itself
del blocks
freed = allocator.trim()
print(allocator.in_force().kind, full - start, freed, memory.private(fresh=True) - start)
"""

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

# Notes every function that is even looked up for a call or a comparison.
LOOKED_UP = """
import ctypes
from modelguard import allocator
from modelguard.environment import _linker

looked_up = set()

class Noting(ctypes.CDLL):
    def __getitem__(self, name):
        looked_up.add(name)
        return super().__getitem__(name)

_linker.ctypes.CDLL = Noting
{first}
allocator.trim()
print(allocator.in_force().kind, *sorted(looked_up & {{"malloc", "malloc_trim"}}))
"""


def library(kind: str) -> Path:
    """The file of an allocator, as distributions install it; without it the test is skipped."""
    folders = [
        *Path("/usr/lib").glob("*-linux-*"),
        *Path("/lib").glob("*-linux-*"),
        Path("/usr/lib64"),
        Path("/usr/lib"),
    ]
    found = [folder / name for folder in folders for name in FILES[kind] if (folder / name).exists()]
    if not found:
        pytest.skip(f"{kind} is not installed ({FILES[kind][0]})")
    return found[0]


def run(script: str, preload: Path | None = None) -> list[str]:
    environment = {**os.environ, **SETTINGS, "LD_PRELOAD": str(preload or "")}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=50, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout.split()


def glibc_serves() -> bool:
    return os.confstr("CS_GNU_LIBC_VERSION") is not None


needs_glibc = pytest.mark.skipif(not glibc_serves(), reason="this Python does not run on glibc")


def check_that_memory_comes_back(kind: str, preload: Path | None) -> None:
    served_by, grown, freed, left = run(TRIM, preload)
    assert kind == served_by
    assert 190e6 < int(grown)
    # At least half of it at once. mimalloc gives the rest back a moment later; the others keep a few blocks.
    assert int(grown) / 2 < int(freed)
    assert int(left) < int(grown) / 2


@needs_glibc
def test_glibc_gives_memory_back() -> None:
    """Without any preload, freed blocks go back to the system when trimmed."""
    check_that_memory_comes_back("glibc", None)


@pytest.mark.parametrize("kind", ["jemalloc", "mimalloc", "tcmalloc"])
def test_a_preloaded_allocator_gives_memory_back(kind: str) -> None:
    """The allocator that serves is recognised, and its own call returns freed blocks."""
    check_that_memory_comes_back(kind, library(kind))


@pytest.mark.parametrize("kind", ["jemalloc", "mimalloc", "tcmalloc"])
def test_glibcs_trim_is_never_called_under_another_allocator(kind: str) -> None:
    """It is not even looked up: glibc's trim does nothing at best while another allocator serves."""
    assert [kind, "malloc"] == run(LOOKED_UP.format(first=""), library(kind))


@needs_glibc
@pytest.mark.parametrize("kind", ["jemalloc", "mimalloc", "tcmalloc"])
def test_a_private_copy_of_an_allocator_is_not_taken_for_the_one_in_force(kind: str) -> None:
    """A library that a package opened exports its functions, but does not serve malloc."""
    load = f"ctypes.CDLL({str(library(kind))!r}, mode=ctypes.RTLD_GLOBAL)"
    assert ["glibc", "malloc", "malloc_trim"] == run(LOOKED_UP.format(first=load))


@needs_glibc
def test_a_preload_set_from_inside_is_not_in_force() -> None:
    """The variable is read when a program starts; setting it in a running one changes nothing."""
    script = f"""
import os
os.environ["LD_PRELOAD"] = {str(library("jemalloc"))!r}
from modelguard import allocator
print(allocator.in_force().kind)
"""
    assert ["glibc"] == run(script)


@needs_glibc
def test_an_unknown_allocator_is_refused(tmp_path: Path) -> None:
    """The error names an unknown allocator, and glibc's trim is not called."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make an allocator with")
    source, preload = tmp_path / "mine.c", tmp_path / "mine.so"
    source.write_text(UNKNOWN)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", preload, source], check=True, timeout=50)
    script = """
from modelguard import allocator
from modelguard.errors import NotSupported
try:
    allocator.trim()
except NotSupported as error:
    print(allocator.in_force().kind, error.reason)
"""
    kind, *reason = run(script, preload)
    assert "unknown" == kind
    assert str(preload) in " ".join(reason)


def test_importing_the_environment_imports_no_ctypes() -> None:
    """Importing ctypes takes milliseconds that only a first trim needs."""
    script = "import sys; import modelguard.allocator, modelguard.memory; print('ctypes' in sys.modules)"
    assert ["False"] == run(script)
