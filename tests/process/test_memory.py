"""Memory readings across processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from modelguard import memory

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="reads other processes through /proc"),
]

FORK = """
import os, sys
from modelguard import memory

ballast = bytearray(os.urandom(1)) * 100_000_000
parent = memory.private(fresh=True)
child = os.fork()
if child == 0:
    # The ballast is shared with the parent now. Asked for at once, not fresh: only a cached reading could count it.
    own = memory.private()
    print(parent, own, flush=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_a_child_never_gets_its_parents_reading() -> None:
    """Right after a fork the child's private memory is small: it shares the parent's data."""
    parent, own = map(int, run(FORK).split())
    assert 90_000_000 < parent - own


NEW_FILE = """
import json, mmap, multiprocessing, os, sys
from modelguard import memory

SIZE = 60_000_000
access, forked, folder = sys.argv[1], sys.argv[2] == "forked", sys.argv[3]
all_have_read = multiprocessing.Barrier(3 if forked else 1)
ballast = bytearray(b"1") * 80_000_000
if forked:
    siblings = []
    while len(siblings) < 3 and (child := os.fork()):
        siblings.append(child)
    if len(siblings) == 3:
        sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in siblings))
    # Nearly all becomes the child's own: what it shares would too, where the system takes the idle parent's pages.
    for at in range(0, 77_000_000, 4096):
        ballast[at] = 2
memory.usage()
path = f"{folder}/{os.getpid()}"
before = memory.private(fresh=True)
with open(path, "wb+") as file:
    for _ in range(600):
        file.write(b"1" * 100_000)  # larger blocks would stay with glibc
    file.flush()
    view = mmap.mmap(file.fileno(), SIZE, access=getattr(mmap, f"ACCESS_{access}"))
os.unlink(path)
sum(view[at] for at in range(0, SIZE, 4096))
read = memory.private(fresh=True)
if access == "COPY":
    for at in range(0, SIZE // 2, 4096):
        view[at] = 1
answer = json.dumps([read - before, memory.private(fresh=True) - read]) + "\\n"
os.write(1, answer.encode())  # in one piece, since siblings write too
all_have_read.wait(60)  # what a sibling that ends has shared becomes private
os._exit(0)
"""


@pytest.mark.parametrize("forked", ["alone", "forked"])
@pytest.mark.parametrize(("access", "expected"), [("READ", 0), ("COPY", 30_000_000)])
def test_a_file_that_was_just_written_is_not_private_memory(
    tmp_path: Path, access: str, expected: int, forked: str
) -> None:
    """Mapping a model that was downloaded a moment ago is no growth, whether its pages are on the disk yet or not."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    inside = max((m for m in mounts if tmp_path.is_relative_to(m[1])), key=lambda m: len(m[1]))
    if inside[2] == "tmpfs":
        pytest.skip("the folder of the tests is memory, and not on a disk")
    for line in run(NEW_FILE, access, forked, str(tmp_path)).splitlines():
        read, written = json.loads(line)
        assert (0, expected) == (pytest.approx(read, abs=5e6), pytest.approx(written, abs=5e6))


def test_another_process_is_read_until_it_is_gone() -> None:
    """A running process has figures; one that has exited is gone, waited for or not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert 0 < memory.usage(other.pid).rss
        other.stdin.close()
        # Leaves it a zombie: it has exited, and nobody has taken its exit status.
        assert other.pid == waited_for(other.pid)
        with pytest.raises(ProcessLookupError, match=f"process {other.pid} does not exist"):
            memory.usage(other.pid)
        other.wait()
        with pytest.raises(ProcessLookupError, match=f"process {other.pid} does not exist"):
            memory.usage(other.pid)


def waited_for(pid: int) -> int | None:
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return found.si_pid if found else None


def test_psutil_is_not_imported_where_proc_tells() -> None:
    """Reading memory on Linux costs no import."""
    script = "import sys; from modelguard import memory; memory.private(); memory.usage(); "
    assert "False" == run(script + "print('psutil' in sys.modules)").strip()


SHORT = """
import resource
from modelguard import guard
from modelguard.errors import LoadFailed

def load():
    parts = []
    while True:
        parts.append(bytearray(20_000_000))

nlp = guard(load, reload_on=None)
resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000, 1_000_000_000))
try:
    nlp.load()
except LoadFailed as error:
    print(error.reason)
"""


def test_a_load_without_memory_says_what_it_had_and_what_limits_it() -> None:
    """Where ``malloc`` fails in a load, the error says what the load took, what is free, and which limit it met."""
    said = run(SHORT)
    assert (took := re.search(r"MemoryError: the load had taken ([0-9.]+) MB; this process has", said)), said
    assert 300 < float(took[1]) < 1000
    assert said.endswith("is free; 1 GB is the most that ulimit -v allows it to map\n"), said


NO_DESCRIPTORS = """
import os, resource, threading
from modelguard import guard, memory, telemetry

class Model:
    pass

releases, released = [], threading.Event()

def note(event):
    if isinstance(event, telemetry.GenerationReleased):
        releases.append(event.bytes_before)
        released.set()

telemetry.add_hook(note)
models = guard(Model, reload_on=None)
models.load()
models.status()  # imports what it needs
with models.lease():  # the old model is released when there are no descriptors any more
    reload = threading.Thread(target=models.reload)
    reload.start()
    reload.join()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
assert released.wait(30)
models.reload()
status = models.status()
assert all(releases) and memory.private() > 0, releases
print(status.generation, status.failures)
"""


def test_a_guard_goes_on_without_descriptors() -> None:
    """Models are loaded and released where no descriptor is left for a reading: the last one counts."""
    assert "3 0" == run(NO_DESCRIPTORS).strip()
