"""What a process has beside memory, and runs out of: open files, threads and child processes."""

import gc
import importlib.util
import os
import re
import socket
import struct
import tempfile
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from modelguard._units import format_bytes
from modelguard.environment import _allocator_problems
from modelguard.errors import ModelGuardError
from modelguard.facts import _proc, _redact
from modelguard.facts._growth_judge import judge
from modelguard.facts._proc import MemoryMapping

#: So many more end a run: going on would only endanger the machine.
MOST = {"open files": 2000, "threads": 2000, "child processes": 200}
#: Kinds that are named, and kinds that are kept for one number.
_SHOWN, _KEPT = 3, 20
#: Growth by fewer in a run is not accused.
_LEAST = 8
_SPARE = 16


def counted(count: float, per: str) -> str:
    """So many calls, or milliseconds where a service's calls are not known, in words."""
    return f"{count:,.0f} calls" if per == "calls" else f"{count / 1000:.0f} seconds"


@dataclass(frozen=True, slots=True)
class Growing:
    """A number that grows with the calls."""

    name: str
    more: int
    calls: int
    seen: str
    fix: str

    def told(self, per: str) -> str:
        return f"{self.more:,} more {self.name} in {counted(self.calls, per)}"


FIXES = {
    "open files": "Close what each call opens: with open(...), client.close(), or one client for all calls.",
    "threads": "End threads, or use one ThreadPoolExecutor for all calls.",
    "child processes": "Wait for the processes that calls start: with Popen(...), or process.wait().",
}


def numbers(pid: int | None = None) -> dict[str, int]:
    """How many a process has, without a process id this one."""
    files, threads = (len(os.listdir(_proc.folder(pid) / name)) for name in ("fd", "task"))  # noqa: PTH208 - only numbers
    return {"open files": files, "threads": threads, "child processes": len(_proc.children(pid or os.getpid()))}


def kinds(pid: int | None = None) -> dict[str, dict[str, int]]:
    found = {"open files": _files(pid), "threads": _threads(pid), "child processes": _processes(pid)}
    return {name: dict(Counter(each).most_common(_KEPT)) for name, each in found.items()}


class Exhausted(BaseException):
    """The function has used up what a process may have: no call is to catch it."""


class Counts:
    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self.own: list[object] = []
        self.calls: list[int] = []
        self.judged = False
        # The call may use up all descriptors, and then nothing could be read.
        self._spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE if pid is None else 0)]
        self.begin()

    def begin(self) -> None:
        self.calls.clear()
        self._kinds, self._first = kinds(self._pid), numbers(self._pid)
        self._read: list[dict[str, int]] = []

    def read(self, calls: int) -> None:
        self.calls.append(calls)
        self._read.append(numbers(self._pid))

    def require_few(self) -> None:
        if any(number > MOST[name] for name, number in self._more().items()):
            raise Exhausted

    def _more(self) -> dict[str, int]:
        return {name: number - self._first[name] for name, number in numbers(self._pid).items()}

    def growing(self, since: int) -> list[Growing]:
        self.judged = True
        calls, found = self.calls[since:], []
        for name in MOST:
            counts = [each[name] for each in self._read[since:]]
            if judge(calls, counts, least=_LEAST).verdict == "grows":
                found.append(self._grown(name, counts[-1] - counts[0], calls[-1] - calls[0]))
        return found

    def exhausted(self, calls: int) -> list[Growing]:
        """What has used up all there may be; nothing where it is the limit that has fallen."""
        spare, self._spare = self._spare, []
        for number in spare:
            os.close(number)
        more = self._more()
        more["open files"] += len(spare)
        most = max(MOST, key=lambda name: more[name] / MOST[name])
        return [self._grown(most, more[most], calls)] if more[most] >= _LEAST else []

    def _grown(self, name: str, more: int, calls: int) -> Growing:
        now = Counter(kinds(self._pid)[name])
        now.subtract(self._kinds[name])
        seen = ", ".join(f"{count:,} {kind}" for kind, count in now.most_common(_SHOWN) if count > 0)
        return Growing(name, more, calls, seen, FIXES[name])


def _files(pid: int | None) -> Iterator[str]:
    """What descriptors refer to: files by their paths, or by their folders if there are many; sockets by where to."""
    opened = list(_proc.open_files(pid).values())
    sockets = {f"socket:[{inode}]": _socket(table, words) for table, inode, words in _proc.sockets(pid)}
    paths = Counter(each for each in opened if each.startswith("/"))
    folders = Counter(str(PurePath(each).parent) for each in paths)
    for each in opened:
        kind, _, inode = each.partition(":")
        if kind == "socket":
            yield sockets.get(each, "sockets")
        elif each.startswith("/"):
            folder = str(PurePath(each).parent)
            many = folders[folder] > max(_SHOWN, paths[each])
            yield _redact.redact(f"files in {folder}" if many else each, {})
        else:
            yield {"pipe": "pipes", "anon_inode": inode.strip("[]")}.get(kind, kind)


def _socket(table: str, words: list[str]) -> str:
    if table == "unix":
        return " ".join(["Unix sockets", *words[7:]])
    host, _, port = words[2].partition(":")
    to = f"sockets to {_address(host)}:{int(port, 16)}" if int(port, 16) else f"{table} sockets"
    return to + (", closed by the other side" if words[3] == "08" else "")  # TCP_CLOSE_WAIT


def _address(text: str) -> str:
    """An address as the kernel writes it: words of four bytes in the order of this machine."""
    words = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)  # noqa: PLR2004 - bytes


def _threads(pid: int | None) -> Iterator[str]:
    """Threads by their names, numbers left out: those that Python names have their targets in them."""
    known = {each.native_id: each.name for each in threading.enumerate()} if pid is None else {}
    for thread, name in _proc.thread_names(pid).items():
        yield re.sub(r"\d+", "N", known.get(thread) or f"native {name}")


def _processes(parent: int | None) -> Iterator[str]:
    for child in _proc.children(parent or os.getpid()):
        words = _proc.if_readable(_proc.command_line, child.pid)
        yield _redact.redact_command(words, os.environ) if words else "ended, and not waited for"


# Which lines of Python allocate what stays: by memray, which sees native memory too, or else by tracemalloc.

_FRAMES = 1
_MOST = 20
#: Bytes above which Python asks malloc for an object.
_SMALL = 512
#: A line that keeps fewer blocks for each call has resized a container, which is older than what is traced: how much
#: larger it has become is not known. Of smaller ones the line is not named.
_OFTEN, _RESIZED = 0.02, 64_000


#: What was allocated and not freed: the file, the line, bytes and blocks, and whether Python's allocators did it.
_Record = tuple[str, int, int, int, bool]


def kept_by_line(run: Callable[[], int]) -> dict[str, Any]:
    """Run calls, and find what they have allocated and not freed. Calls become slower meanwhile."""
    gc.collect()
    if importlib.util.find_spec("memray") is not None:
        # A folder of that name, or a profiler that is active.
        with suppress(AttributeError, ImportError, OSError, RuntimeError):
            return _kept(*_by_memray(run), "memray")
    return _kept(*_by_tracemalloc(run), "tracemalloc")


def _kept(calls: int, records: Iterable[_Record], tool: str) -> dict[str, Any]:
    """By the line: by Python, by libraries, and in blocks of malloc's for Python. Of what was resized, the lines."""
    python, native, large, blocks = (Counter[str]() for _ in range(4))
    for file, number, size, count, of_python in records:
        if file in (__file__, tracemalloc.__file__):
            continue
        line = f"{file}:{number}"
        (python if of_python else native)[line] += size
        blocks[line] += count
        if of_python and size > _SMALL * count:
            large[line] += size
    calls = max(1, calls)
    often = {line for line, count in blocks.items() if count >= _OFTEN * calls}

    def per_call(sizes: Counter[str]) -> dict[str, float]:
        named = ((line, size) for line, size in sizes.most_common(_MOST) if line in often or size > _RESIZED)
        return {line: size / calls * (line in often) for line, size in named}

    of_malloc = sum(size for line, size in large.items() if line in often) / calls
    found = {"traced": per_call(python), "native": per_call(native), "large": of_malloc}
    return found | {"traced_calls": calls, "traced_by": tool}


def _by_tracemalloc(run: Callable[[], int]) -> tuple[int, list[_Record]]:
    tracing = tracemalloc.is_tracing()
    tracemalloc.start(_FRAMES)  # does nothing if it traces
    try:
        before = _traced()
        calls = run()
        gc.collect()
        kept = _traced() - before
    finally:
        if not tracing:
            tracemalloc.stop()
    return calls, [(file, line, size * count, count, True) for (file, line, size), count in kept.items()]


def _traced() -> Counter[tuple[str, int, int]]:
    """How many blocks there are of each line and size."""
    blocks: Counter[tuple[str, int, int]] = Counter()
    for each in tracemalloc.take_snapshot().traces:
        place = each.traceback[-1]  # the innermost, where more frames are traced
        blocks[place.filename, place.lineno, each.size] += 1  # in this file, whose blocks do not count
    return blocks


def _by_memray(run: Callable[[], int]) -> tuple[int, list[_Record]]:
    memray, found = importlib.import_module("memray"), []
    with tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        file = Path(folder, "allocations")
        with memray.Tracker(file, trace_python_allocators=True):
            calls = run()
            gc.collect()
        for record in memray.FileReader(file).get_leaked_allocation_records(merge_threads=True):
            of_python = memray.AllocatorType(record.allocator).name.startswith("PYMALLOC")
            for _, place, number in record.stack_trace(max_stacks=_FRAMES):
                found.append((place, number, record.size, record.n_allocations, of_python))
    return calls, found


# Machine code that libraries have compiled at run time, as oneDNN does for each input shape.


def compiled(pid: int | None = None) -> int:
    return compiled_in(_proc.if_readable(_proc.smaps, pid) or [])


def compiled_in(mappings: Iterable[MemoryMapping]) -> int:
    """The same in these mappings: executable memory without a file. Address space that was only reserved is none."""
    code = (each for each in mappings if "x" in each.access and not each.is_file)
    sizes = (each.sizes for each in code if not each.name.startswith("[v"))  # [vdso], [vsyscall]
    return sum(each.get("Private_Dirty", 0) + each.get("Shared_Dirty", 0) for each in sizes)


# What a process shows of its memory from outside, Python or not.

#: Kinds of memory with less growth are not shown.
_SMALL_MAPPING = 500_000
_SHARED = ("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")  # noqa: S108 - where the kernel shows shared memory


def kinds_of(pid: int) -> dict[str, int]:
    found: Counter[str] = Counter()
    for mapping in _proc.if_readable(_proc.smaps, pid) or []:
        found[_kind(mapping)] += _held(mapping)
    return dict(found)


def _held(mapping: MemoryMapping) -> int:
    dirty = mapping.sizes.get("Private_Dirty", 0)
    if not mapping.name.startswith(_SHARED):
        dirty = min(dirty, mapping.sizes.get("Anonymous", dirty))
    return dirty + mapping.sizes.get("SwapPss", mapping.sizes.get("Swap", 0))


def _kind(one: MemoryMapping) -> str:
    if one.name.startswith(_SHARED):
        return "shared memory"
    if compiled_in([one]):
        return "machine code compiled at run time"
    if one.is_file:
        return "changed pages of files"
    # glibc's names, from 2.39 on if glibc.mem.decorate_maps is set. MAP_NORESERVE: its arenas, and other allocators.
    if one.name in ("[heap]", "[anon: glibc: malloc arena]") or "nr" in one.flags:
        return "the heap of malloc"
    # No huge pages: the kernel's mark of stacks, since 6.7.
    if one.name.startswith(("[stack", "[anon: glibc: pthread stack")) or "nh" in one.flags:
        return "stacks of threads"
    return "anonymous memory (Python's objects, large blocks)"


def moved(first: Mapping[str, int], last: Mapping[str, int]) -> str:
    """By how much each kind of memory has grown, in words; empty if none has."""
    more = Counter({kind: size - first.get(kind, 0) for kind, size in last.items()}).most_common()
    return ", ".join(f"{kind} +{format_bytes(size)}" for kind, size in more if size >= _SMALL_MAPPING)


def allocator_of(pid: int) -> str:
    """What most probably serves ``malloc``; empty if that cannot be seen."""
    with suppress(ModelGuardError, OSError):
        return _allocator_problems.observe(pid).kind
    return ""
