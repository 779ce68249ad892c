"""The only module that reads ``/proc``. It returns what the kernel shows about processes as plain data.

Functions take a process id, None for this process, and the folder that holds ``proc`` (``/`` outside of tests).
If a file cannot be read, they raise the kernel's error: ``FileNotFoundError`` or ``ProcessLookupError`` if the
process has exited, ``PermissionError`` if it belongs to another user. :func:`if_readable` turns these into None.
"""

import errno
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

# The memory mappings of a process, made of the text of ``maps`` and ``smaps``. This module reads no file.


_LIBRARIES = """
ctranslate2 flair gensim jax keras lightgbm onnxruntime paddle sentence_transformers sklearn spacy stanza tensorflow
torch transformers vllm xgboost
"""
#: Packages that compute models, and take tens to hundreds of megabytes for their import alone.
MODEL_LIBRARIES = frozenset(_LIBRARIES.split())

#: The kernel appends this to the name of a file that was removed or replaced since it was mapped.
DELETED = " (deleted)"

# "7f12-7f34 r-xp 00001000 08:02 173521   /usr/lib/libc.so.6". Compiled on first use: importing stays cheap.
_MAPPING = r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)"


@dataclass(slots=True)
class MemoryMapping:
    """One mapping of a process, as ``maps`` and ``smaps`` show it: sizes in bytes and flags are in the latter alone."""

    start: int
    end: int
    access: str
    is_file: bool
    name: str
    deleted: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    @property
    def private(self) -> int:
        return self.sizes.get("Private_Clean", 0) + self.sizes.get("Private_Dirty", 0)


def parse_mappings(text: str) -> list[MemoryMapping]:
    """Read ``maps`` or ``smaps``: in the latter, lines with figures follow each mapping's own line."""
    pattern = re.compile(_MAPPING)
    found: list[MemoryMapping] = []
    for line in text.split("\n"):  # names may contain whatever else splitlines() splits at
        head = pattern.match(line)
        if head:
            start, end, access, inode, name = head.groups()
            gone = name.endswith(DELETED)
            ends = int(start, 16), int(end, 16)
            found.append(MemoryMapping(*ends, access, inode != "0", name.removesuffix(DELETED), gone))
        elif found:
            _add_figure(found[-1], line)
    return found


def mapped_files(mappings: Iterable[MemoryMapping]) -> dict[str, int]:
    files: dict[str, int] = {}
    for mapping in mappings:
        if mapping.name.startswith("/"):
            files.setdefault(mapping.name, mapping.start)
    return files


def model_libraries(mappings: Iterable[MemoryMapping]) -> tuple[str, ...]:
    folders = (name.split("/")[1:-1] for name in mapped_files(mappings) if ".so" in name)
    return tuple(sorted({word for words in folders for word in words} & MODEL_LIBRARIES))


class Interpreter(NamedTuple):
    """The Python that a process runs on."""

    version: tuple[int, int]
    name: str = "CPython"
    free_threaded: bool = False
    micro: int | None = None

    def __str__(self) -> str:
        build = " free-threaded" if self.free_threaded else ""
        return f"{self.name} {self.version[0]}.{self.version[1]}{build}"


#: The program or the library of a Python, and its compiled modules, such as those of the standard library:
#: ``.cpython-313t-``.
_PYTHON = r"/(?:lib)?python(\d)\.(\d+)(t?)(?:\.so[\d.]*)?$|\.(cpython|pypy)-?(\d)(\d+)(t?)[-.]"


def interpreter_in(mappings: Iterable[MemoryMapping]) -> Interpreter | None:
    """The Python of a process with these mappings, as its program or inside of it; None if it has none."""
    pattern = re.compile(_PYTHON)
    for mapping in mappings:
        if found := pattern.search(mapping.name):
            major, minor, free_threaded = found.group(1, 2, 3) if found[1] else found.group(5, 6, 7)
            name = "PyPy" if found[4] == "pypy" else "CPython"
            return Interpreter((int(major), int(minor)), name, bool(free_threaded))
    return None


def _add_figure(mapping: MemoryMapping, line: str) -> None:
    name, _, value = line.partition(":")
    words = value.split()
    if name == "VmFlags":
        mapping.flags = frozenset(words)
    elif words[1:] == ["kB"]:
        mapping.sizes[name] = int(words[0]) * 1024


T = TypeVar("T")

ROOT = Path("/")

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the kernel's sched.h
_EXITED = frozenset("ZXx")
_LISTENING = "0A"  # TCP_LISTEN in the kernel's tcp_states.h
_ACCEPTING = 0x10000  # __SO_ACCEPTCON in the kernel's net.h


class MemoryLayout(NamedTuple):
    """The addresses of a program in memory. Linux picks new ones for each exec; a fork keeps those of its parent."""

    code: int
    stack: int

    @property
    def known(self) -> bool:
        """Whether this user may see the addresses; otherwise the kernel shows 0 or 1."""
        return min(self) > 1


class ProcessStat(NamedTuple):
    """``/proc/PID/stat`` of a process.

    It started so many clock ticks after the machine. The kernel reuses process ids, but id and start are unique.
    """

    pid: int
    parent: int
    started: int
    threads: int
    layout: MemoryLayout
    alive: bool
    kernel: bool

    @property
    def identity(self) -> tuple[int, int, MemoryLayout]:
        return self.pid, self.started, self.layout


class Mount(NamedTuple):
    """One line of ``mountinfo``."""

    root: str
    point: str
    kind: str
    options: tuple[str, ...]


def if_readable(read: Callable[..., T], *arguments: object) -> T | None:
    """Call one of the readers below; None if the file cannot be read."""
    with suppress(OSError):
        return read(*arguments)
    return None


def not_found(pid: int, why: str = "does not exist, or is a kernel thread") -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"process {pid} {why}")


def not_permitted(pid: int) -> PermissionError:
    fix = "inspect it as its owner or as root"
    return PermissionError(errno.EACCES, f"process {pid} belongs to another user; {fix}")


def is_mounted(root: Path = ROOT) -> bool:
    return (root / "proc" / "self").exists()


def folder(pid: int | None = None, root: Path = ROOT) -> Path:
    return root / "proc" / ("self" if pid is None else str(pid))


def stat(pid: int, root: Path = ROOT) -> ProcessStat | None:
    """Read the stat of a process; None if there is no such process."""
    try:
        fields = _stat_fields(pid, root)
    except (FileNotFoundError, ProcessLookupError):
        return None
    parent, flags, threads, started, code, stack = (int(fields[number]) for number in (4, 9, 20, 22, 26, 28))
    is_kernel = bool(flags & _KERNEL_THREAD)
    return ProcessStat(pid, parent, started, threads, MemoryLayout(code, stack), fields[3] not in _EXITED, is_kernel)


def runs(pid: int, root: Path = ROOT) -> bool:
    """Whether there is such a process, and it has not ended: its parent may not have collected it yet."""
    found = if_readable(stat, pid, root)
    return found is not None and found.alive


def absence(pid: int, root: Path = ROOT) -> str:
    found = if_readable(stat, pid, root)
    if found is None:
        return "does not exist" if folder(None, root).exists() else "cannot be seen, as there is no /proc"
    return "is a kernel thread, which has no memory of its own" if found.kernel else "has ended"


def is_busy(pid: int, root: Path = ROOT) -> bool:
    """Whether a process runs at this moment, or waits for a disk."""
    return _stat_fields(pid, root)[3] in "RD"


def cpu_seconds(pid: int, root: Path = ROOT) -> float:
    """Processor time of a process, and of its children that it has waited for."""
    fields = _stat_fields(pid, root)
    return sum(int(fields[number]) for number in (14, 15, 16, 17)) / os.sysconf("SC_CLK_TCK")


def _stat_fields(pid: int, root: Path) -> dict[int, str]:
    """The fields of a process's stat from the third on, by their numbers in proc_pid_stat(5)."""
    # The name is in parentheses, and may itself contain parentheses and spaces.
    return dict(enumerate(_text(pid, "stat", root).rpartition(")")[2].split(), start=3))


def sockets(pid: int | None, root: Path = ROOT) -> Iterator[tuple[str, str, list[str]]]:
    """The sockets of a process's network: the kernel's table, the inode, and the words of its line in the table."""
    for table in ("tcp", "tcp6", "udp", "udp6", "unix"):
        of_unix = table == "unix"
        for line in (if_readable(_lines, pid, f"net/{table}", root) or [])[1:]:
            words = line.split(maxsplit=7 if of_unix else -1)  # a path may have blanks
            yield table, words[6 if of_unix else 9], words


def listening(pid: int, root: Path = ROOT) -> set[int | str]:
    """The TCP ports and the paths of Unix sockets on which a process accepts connections."""
    opened, found = set(open_files(pid, root).values()), set[int | str]()
    for table, inode, words in sockets(pid, root):
        if f"socket:[{inode}]" not in opened:
            continue
        if table == "unix" and int(words[3], 16) & _ACCEPTING:
            found.update(words[7:])
        elif table in ("tcp", "tcp6") and words[3] == _LISTENING:
            found.add(int(words[1].rpartition(":")[2], 16))
    return found


def processes(root: Path = ROOT) -> dict[int, ProcessStat]:
    """Read the stat of every running process, by process id; kernel threads are left out."""
    return {found.pid: found for found in _stats(root) if found.alive and not found.kernel}


def _stats(root: Path) -> Iterator[ProcessStat]:
    pids = (int(name) for name in os.listdir(root / "proc") if name.isdecimal())  # noqa: PTH208 - only names are needed
    return filter(None, (if_readable(stat, pid, root) for pid in sorted(pids)))


def descendants(pid: int, known: Mapping[int, ProcessStat]) -> Iterator[ProcessStat]:
    children: dict[int, list[ProcessStat]] = {}
    for process in known.values():
        children.setdefault(process.parent, []).append(process)
    waiting = [known[pid]] if pid in known else []
    seen = set()
    while waiting:
        process = waiting.pop()
        if process.pid not in seen:  # ids that are reused during the listing could form a cycle
            seen.add(process.pid)
            yield process
            waiting += reversed(children.get(process.pid, []))


def tree(pid: int, root: Path = ROOT) -> list[ProcessStat]:
    """A process and all its descendants that run now, parents before children; empty if it does not run."""
    return list(descendants(pid, processes(root)))


def children(pid: int, root: Path = ROOT) -> list[ProcessStat]:
    """The children of a process; those that have ended too, until they are waited for."""
    return [found for found in _stats(root) if found.parent == pid]


def is_fork(process: ProcessStat, others: Iterable[ProcessStat]) -> bool:
    alike = (other for other in others if other.layout == process.layout)
    return process.layout.known and any((each.started, each.pid) < (process.started, process.pid) for each in alike)


def owner(pid: int, root: Path = ROOT) -> int:
    return folder(pid, root).stat().st_uid


def command_line(pid: int, root: Path = ROOT) -> tuple[str, ...]:
    """The words of a process's command line; one word with spaces if the program has overwritten it with a title."""
    text = _text(pid, "cmdline", root).rstrip("\0")
    return tuple(text.split("\0")) if text else ()


def environment(pid: int | None = None, root: Path = ROOT) -> dict[str, str]:
    """The environment variables that a process was started with.

    Programs that change their title in ps (gunicorn with setproctitle) overwrite this memory; the result is then
    empty.
    """
    pairs = [entry.partition("=") for entry in _text(pid, "environ", root).split("\0") if entry]
    if not all(name and equals for name, equals, _ in pairs):
        return {}
    return {name: value for name, _, value in pairs}


def executable(pid: int | None = None, root: Path = ROOT) -> str:
    return str((folder(pid, root) / "exe").readlink()).removesuffix(DELETED)


def thread_names(pid: int | None = None, root: Path = ROOT) -> dict[int, str]:
    """The names of a process's threads, by thread id; threads that end in the meantime are left out."""
    return _each(folder(pid, root) / "task", _name)


def open_files(pid: int | None = None, root: Path = ROOT) -> dict[int, str]:
    """What each open descriptor refers to, such as ``/etc/hosts`` or ``socket:[4711]``; closed ones are left out."""
    return _each(folder(pid, root) / "fd", os.readlink)  # not a Path: "socket:[4711]" is none


def _each(numbered: Path, read: Callable[[Path], str]) -> dict[int, str]:
    """What is read at each entry of a folder of numbers; without those that are gone by then."""
    found = {int(name): if_readable(read, numbered / name) for name in os.listdir(numbered)}  # noqa: PTH208 - as above
    return {number: text for number, text in found.items() if text is not None}


def status(pid: int | None = None, root: Path = ROOT) -> dict[str, str]:
    """The fields of a process's status, such as ``{"Threads": "4", "VmSwap": "12 kB"}``."""
    pairs = (line.partition(":") for line in _lines(pid, "status", root))
    return {name: value.strip() for name, _, value in pairs}


def memory_sums(pid: int | None = None, root: Path = ROOT) -> dict[str, int]:
    """The figures of ``smaps``, added up over all mappings of a process, in bytes.

    Reading them walks the page tables: about 6 ms in a process of 600 MB.
    """
    # Kernels before 4.14 and some sandboxes have no rollup.
    for name in ("smaps_rollup", "smaps"):
        try:
            text = (folder(pid, root) / name).read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        return _sum_up(text)
    return {}


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """The machine's memory figures in bytes, such as ``{"MemAvailable": 1024}``."""
    return _sum_up((root / "proc" / "meminfo").read_bytes())


def maps(pid: int | None = None, root: Path = ROOT) -> list[MemoryMapping]:
    """The mappings of a process, by address; empty if it has exited or is a kernel thread."""
    return parse_mappings(_text(pid, "maps", root))


def smaps(pid: int | None = None, root: Path = ROOT) -> list[MemoryMapping]:
    """The mappings of a process with their sizes and flags. Takes 50 - 150 ms in a process with torch or spaCy."""
    return parse_mappings(_text(pid, "smaps", root))


def cgroups(pid: int | None = None, root: Path = ROOT) -> list[tuple[str, tuple[str, ...], str]]:
    """The cgroups of a process: the hierarchy's number, its controllers, and the cgroup's path."""
    lines = (line.split(":", 2) for line in _lines(pid, "cgroup", root))
    return [(hierarchy, tuple(controllers.split(",")), path) for hierarchy, controllers, path in lines]


def mounts(root: Path = ROOT) -> list[Mount]:
    return [_mount(line) for line in _lines(None, "mountinfo", root)]


def _text(pid: int | None, name: str, root: Path) -> str:
    # Not opened as text, which would turn "\r" in a variable or a name into "\n".
    return (folder(pid, root) / name).read_bytes().decode("utf-8", "surrogateescape")


def _lines(pid: int | None, name: str, root: Path) -> list[str]:
    # Not splitlines(): of the characters that it splits at, the kernel escapes only "\n" in names.
    return [line for line in _text(pid, name, root).split("\n") if line]


def _name(task: Path) -> str:
    return (task / "comm").read_text(encoding="utf-8", errors="replace").strip()


def _sum_up(text: bytes) -> dict[str, int]:
    """Add up lines such as ``"Rss:   123 kB"``; other lines describe the mapping itself."""
    sums: dict[str, int] = {}
    for line in text.split(b"\n"):
        words = line.split()
        if len(words) == 3 and words[2] == b"kB" and words[0].endswith(b":"):  # noqa: PLR2004 - the three words above
            key = words[0][:-1].decode()
            sums[key] = sums.get(key, 0) + int(words[1]) * 1024
    return sums


def _mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    # Split at each single space: the middle field, the mount's source, may be empty.
    fields, (kind, _, options) = before.split(" "), after.split(" ", 2)
    return Mount(_unescape(fields[3]), _unescape(fields[4]), kind, tuple(options.split(",")))


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


# Who is at the other end of a Unix socket, as the kernel knows it.

#: ``struct ucred`` of unix(7): process id, user, group.
_CREDENTIALS = struct.Struct("3i")


def peer(connected: socket.socket) -> tuple[int, int]:
    """The process id and the user at the other end (Linux only)."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _group = _CREDENTIALS.unpack(credentials)
    return pid, user


# What a process shows of its guards to whoever reads its ``/proc``, such as ``modelguard top``: versions and pauses.
#
# Each is the name of a mapping of one page that is never touched, so it takes no memory. It ends with the process and
# leaves no file behind, and a forked child, which has its parent's models and pauses, shows it too. The alternatives do
# less: servers close descriptors when they start, files stay behind a crash, and the name of a thread has 15
# characters.

_VERSION = "modelguard:"
_PAUSE = "modelguard-paused:"
#: The kernel shows the name of a memory file with this in front.
_MEMORY_FILE = "/memfd:"
#: Bytes of a name of a memory file, from the kernel's mm/memfd.c: NAME_MAX less the prefix.
_LONGEST = 249
#: Bytes of a version that are shown at most: more than 128 characters of ASCII, and room for some of the guard's name.
_LONGEST_VERSION = 160


class _Shown:
    """A text that this process shows of a guard. Not thread safe."""

    def __init__(self, guard: str) -> None:
        self._guard = _printable(guard)
        self._text: str | None = None
        self._address = 0

    def _show(self, text: str | None) -> None:
        """Show this text instead of the last one; None shows none. Does nothing where the system cannot."""
        if text == self._text:
            return
        self._text = text
        if self._address:
            _libc().munmap(self._address, 1)
            self._address = 0
        if text is not None and hasattr(os, "memfd_create"):
            with suppress(OSError):
                self._address = _map(text)


class ShownVersion(_Shown):
    """The version of one guard's model."""

    def show(self, version: str | None) -> None:
        if version is None:
            self._show(None)
            return
        end = f"={_cut(version, _LONGEST_VERSION)}"  # half a version would be another one, so the name gives way
        name = _cut(self._guard.replace("=", "-"), _LONGEST - len(_VERSION) - len(end.encode()))
        self._show(f"{_VERSION}{name}{end}")


class ShownPause(_Shown):
    """Whether one guard is paused."""

    def show(self, *, paused: bool) -> None:
        self._show(_PAUSE + _cut(self._guard, _LONGEST - len(_PAUSE)) if paused else None)


def versions_in(mappings: Iterable[MemoryMapping]) -> dict[str, str]:
    pairs = (text.partition("=") for text in _shown(mappings, _VERSION))
    return {_printable(guard): _printable(version) for guard, _, version in pairs}


def paused_in(mappings: Iterable[MemoryMapping]) -> tuple[str, ...]:
    return tuple(sorted({_printable(guard) for guard in _shown(mappings, _PAUSE)}))


def _shown(mappings: Iterable[MemoryMapping], kind: str) -> Iterator[str]:
    """What stands behind this prefix. Any program may name a memory file like this."""
    prefix = _MEMORY_FILE + kind
    return (one.name.removeprefix(prefix) for one in mappings if one.name.startswith(prefix))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _cut(text: str, most: int) -> str:
    """Text of at most so many bytes; if something is left out, it ends with an ellipsis."""
    content = text.encode()
    return text if len(content) <= most else content[: most - len("…".encode())].decode(errors="ignore") + "…"


def _libc() -> Any:
    import ctypes  # takes 2 - 3 ms, and only models with a version and paused guards need it

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_ssize_t
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def _map(name: str) -> int:
    """Map a byte, and so a page, of a memory file of this name; returns the address, 0 if that has failed."""
    import mmap

    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, 1)
        # Not a mmap object, which would keep a descriptor that servers close behind its back.
        address = int(_libc().mmap(None, 1, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0))
    finally:
        os.close(fd)
    return max(0, address)  # MAP_FAILED is -1
