"""Find what in this process does not survive a fork, what it belongs to, and what to do about it.

``fork`` copies only the thread that calls it. In the child, a thread pool has no threads, a lock that another thread
held stays locked forever, and waiting for either hangs. So every thread is a hazard, and so is anything that keeps
state about this process elsewhere: on a graphics card, or in an event loop.
"""

import functools
import os
import socket
import sys
import threading
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

from modelguard import _units
from modelguard.environment import _allocator, _effect
from modelguard.errors import NotSupported
from modelguard.facts import _proc
from modelguard.lifecycle import _models
from modelguard.runtime import fork_hooks, waiting

# Libraries whose threads and connections users did not start themselves, and what to do about each at a fork.
#
# Each row was tried with the real library (``tests/process/test_fork_owners.py``); ``docs/fork-safety.md`` shows them.


#: Seconds that a thread may take to end: tqdm's waits for the lock of a progress bar.
_PATIENCE = 5.0


_TQDM = "tqdm.tqdm.monitor_interval = 0, before the first progress bar."
_METRICS = "Call start_http_server() in each worker, with a port of its own; the parent's shows only its own figures."
_GRPC = "Start the server in each worker; the parent's: server.stop(None).wait(), and shutdown() of its executor."
_QUEUE = (
    "DataLoader: num_workers=0 in the parent; or end its loop, and drop it if it has persistent_workers=True. "
    "Queue: close() and join_thread()."
)
_EXECUTOR = "Make the executor in each worker; the parent's: shutdown()."
_EXPORTER = "make its provider in each worker, or export nothing before"

_OPENTELEMETRY = "opentelemetry.sdk._shared_internal:BatchProcessor._at_fork_reinit"
_SENTRY = "sentry_sdk.worker:BackgroundWorker._ensure_thread"
_POSTHOG = "posthog.client:Client._reinit_after_fork"
_LANGFUSE = "langfuse._client.resource_manager:LangfuseResourceManager._at_fork_reinit"


class Owner(NamedTuple):
    name: str
    has: Literal["thread", "connection"]
    #: The beginning of the name of what the thread runs. The owner of a connection cannot be seen: a loaded module.
    where: str
    remedy: str
    #: An attribute of the thread that ends it without loss: the library starts it again when it needs it.
    stop: str = ""
    #: What starts the thread again in a forked child, as ``module:name``: a release without it does not.
    restarts: str = ""


OWNERS = (
    # What its exit() does waits without a limit.
    Owner("tqdm", "thread", "tqdm._monitor.", _TQDM, stop="was_killed.set"),
    Owner("OpenTelemetry", "thread", "opentelemetry.sdk.", "Make its provider in each worker.", "", _OPENTELEMETRY),
    Owner("Sentry", "thread", "sentry_sdk.", "Call sentry_sdk.init() in each worker.", restarts=_SENTRY),
    Owner("PostHog", "thread", "posthog.", "Make its client in each worker.", restarts=_POSTHOG),
    Owner("Langfuse", "thread", "langfuse.", "Make its client in each worker.", restarts=_LANGFUSE),
    Owner("prometheus_client", "thread", "prometheus_client.", _METRICS),
    Owner("gRPC", "thread", "grpc.", _GRPC),
    Owner("a DataLoader or multiprocessing.Queue", "thread", "multiprocessing.queues.", _QUEUE),
    Owner("ThreadPoolExecutor", "thread", "concurrent.futures.thread.", _EXECUTOR),
    Owner("OpenTelemetry", "connection", "opentelemetry.exporter.otlp", _EXPORTER),
    Owner("Sentry", "connection", "sentry_sdk", "call sentry_sdk.init() in each worker, or send nothing before"),
    Owner("SQLAlchemy", "connection", "sqlalchemy.pool", "engine.dispose()"),
    Owner("aiohttp", "connection", "aiohttp.client", "await session.close(), and close its event loop"),
    Owner("gRPC", "connection", "grpc", "channel.close()"),
)


def owner_of(where: str) -> Owner | None:
    """The library that has a thread which runs the function of this name."""
    return next((owner for owner in OWNERS if owner.has == "thread" and where.startswith(owner.where)), None)


def restarts(owner: Owner) -> bool:
    """Whether the installed release starts the thread again in a forked child."""
    module, _, name = owner.restarts.partition(":")
    return bool(name) and _attribute(sys.modules.get(module), name) is not None


def origin(thread: threading.Thread) -> str:
    """The name of what a thread runs: a function, a method with the class of its object, or the object's own class."""
    target = getattr(thread, "_target", None)
    while isinstance(target, functools.partial):
        target = target.func
    if target is None:
        return _class_of(thread)
    if isinstance(target, types.MethodType) and not isinstance(target.__self__, type):
        return f"{_class_of(target.__self__)}.{target.__name__}"
    name = getattr(target, "__qualname__", None)
    # Never its text, which may hold a secret or a whole table.
    return _class_of(target) if name is None else f"{getattr(target, '__module__', '?')}.{name}"


def _class_of(value: object) -> str:
    return _units.type_name(type(value))


def _attribute(start: object, name: str) -> Any:
    return functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), start)


_Found = Literal["python thread", "thread pool", "allocator threads", "compiler threads", "grpc", "cuda"]
HazardKind = Literal[_Found, "event loop", "connection", "event queue", "hang", "warm-up", "copies"]

#: The names of modelguard's own threads: they hold no lock while the process forks, and a child starts its own.
OUR_THREADS = "modelguard-"

#: Modules whose frames are on the stack of a thread that runs an event loop, uvloop's included.
_LOOPS = ("asyncio.base_events", "asyncio.runners")

#: Descriptors 0 to 2 belong to whoever started the process: a journal gives it a socket as its output.
_FIRST_OWN_DESCRIPTOR = 3

_POOL_FIX = (
    "Children use one thread. Better: run no inference in the parent before it forks, or call "
    "torch.set_num_threads(1) before the first."
)


@dataclass(frozen=True, slots=True)
class Hazard:
    """Something that does not survive a fork.

    Attributes:
        kind: What it is.
        owner: What it belongs to: a thread, a module, a library or a guard.
        seen: The evidence.
        fix: What to do about it, or what was done.
        severity: ``"fixed"``: :func:`modelguard.prefork.in_child` or its owner repairs it in each child, or it was
            ended. ``"warning"``: it may be harmless, which modelguard cannot know. ``"fatal"``: no child would work.
    """

    kind: HazardKind
    owner: str
    seen: str
    fix: str
    severity: Literal["fixed", "warning", "fatal"]

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind} of {self.owner}: {self.seen}. {self.fix}"


class ThisProcess:
    """The current process."""

    def python_threads(self) -> Iterable[tuple[str, str]]:
        """Every thread except a compiler's, the calling one and the main one: a server may fork from the main one."""
        ours = [threading.current_thread(), threading.main_thread()]
        ours += (thread for compiler in _models.compilers() for thread in compiler.threads())
        return [(thread.name, origin(thread)) for thread in threading.enumerate() if thread not in ours]

    def compiler_threads(self) -> Iterable[tuple[str, list[str], str]]:
        for compiler in _models.compilers():
            if names := sorted(thread.name for thread in compiler.threads()):
                yield compiler.OWNER, names, compiler.FIX

    def native_threads(self) -> list[str]:
        known = {thread.native_id for thread in threading.enumerate()}
        if (names := _proc.if_readable(_proc.thread_names)) is None:
            raise NotSupported("preparing a fork", reason="/proc cannot be read, and with it the threads")
        return [name for thread, name in names.items() if thread not in known]

    def openmp(self) -> list[str]:
        return sorted(_effect.loaded_openmp())

    def has_allocator_threads(self) -> bool:
        return any(problem.kind == "background threads" for problem in _allocator.detect().problems)

    def uses_cuda(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def has_unsafe_grpc(self) -> bool:
        """Whether gRPC was imported without fork support: it reads its variable then, and never again."""
        return _effect.ThisProcess().grpc_forks() is False

    def event_loop(self) -> str | None:
        """The library whose event loop runs in this thread."""
        return "asyncio" if waiting.on_event_loop() else "trio" if waiting.on_any_loop() else None

    def event_loops_elsewhere(self) -> Iterable[str]:
        """Every other thread with a frame of asyncio's on its stack."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()  # noqa: SLF001 - there is no public way to the stacks of other threads
        others = {ident: frame for ident, frame in frames.items() if ident != threading.get_ident()}
        return [names.get(ident, "?") for ident, frame in others.items() if _runs_loop(frame)]

    def forking_thread(self) -> str | None:
        """The calling thread's name, unless servers fork from it or from native code."""
        thread = threading.current_thread()
        is_expected = thread is threading.main_thread() or thread.name.startswith(OUR_THREADS)
        return None if is_expected else thread.name

    def connections(self) -> Iterable[str]:
        """The connected stream sockets that have an address."""
        return [peer for number in self._descriptors("socket:") if (peer := _peer(number)) is not None]

    def event_queues(self) -> int:
        return len(self._descriptors("anon_inode:[eventpoll]"))

    def _descriptors(self, kind: str) -> list[int]:
        if threading.current_thread().name.startswith(OUR_THREADS):  # new weights: by now the server has its own
            return []
        files = _proc.if_readable(_proc.open_files) or {}
        found = {number for number, file in files.items() if number >= _FIRST_OWN_DESCRIPTOR and file.startswith(kind)}
        for one in fork_hooks.closed_in_child:
            with suppress(ValueError):  # a closed queue
                found.discard(one.fileno())
        return sorted(found)


def _peer(descriptor: int) -> str | None:
    """The other end of a stream socket; None if it listens, or is one end of a pair that this process made."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            name = copy.getpeername() if copy.type == socket.SOCK_STREAM else None
    except OSError:
        return None
    if isinstance(name, tuple):
        return ":".join(map(str, name[:2]))
    return os.fsdecode(name) if name else None


def _runs_loop(thread: FrameType) -> bool:
    return any(frame.f_globals.get("__name__") in _LOOPS for frame, _ in traceback.walk_stack(thread))


def find_hazards(process: ThisProcess | None = None) -> tuple[Hazard, ...]:
    """Find everything that would not survive a fork.

    Args:
        process: The process to examine. Default: this one.

    Returns:
        The hazards, worst first.
    """
    process = ThisProcess() if process is None else process
    found = [*_fatal(process), *_python_threads(process), *_native(process), *_descriptors(process)]
    return tuple(sorted(found, key=lambda hazard: ("fatal", "warning", "fixed").index(hazard.severity)))


def _fatal(process: ThisProcess) -> Iterable[Hazard]:
    if process.uses_cuda():
        seen = "torch.cuda is initialised, and a forked child cannot initialise it again"
        fix = (
            "Do not use CUDA before the fork (PYTORCH_NVML_BASED_CUDA_CHECK=1 checks without starting it), or start "
            "processes by spawn: isolate(start='spawn')."
        )
        yield Hazard("cuda", "torch", seen, fix, "fatal")
    if (library := process.event_loop()) is not None:
        seen = "an event loop runs in this thread; a child would inherit its sockets and wake-ups"
        fix = "Prepare before the loop starts, outside of any coroutine."
        yield Hazard("event loop", library, seen, fix, "fatal")


def _python_threads(process: ThisProcess) -> Iterable[Hazard]:
    for name, where in process.python_threads():
        if not name.startswith(OUR_THREADS):
            yield _python_thread(name, where)
    for name in process.event_loops_elsewhere():
        seen = f"thread {name!r} runs an event loop; a child has its sockets and its queue, but nothing that runs it"
        yield Hazard("event loop", "asyncio", seen, "Prepare before the loop starts.", "warning")
    caller = process.forking_thread()
    if caller is not None:
        seen = (
            f"prepare() runs in thread {caller!r}, so its trials do too; they cannot show what workers that are forked "
            "from the main thread find there, such as the pool of an earlier inference"
        )
        yield Hazard("python thread", f"thread {caller!r}", seen, "Call prepare() in the thread that forks.", "warning")


def _python_thread(name: str, where: str) -> Hazard:
    owner = owner_of(where)
    seen = f"thread {name!r} is running; a child does not have it"
    if owner is not None and restarts(owner):
        return Hazard("python thread", owner.name, seen, "It starts it again in each child by itself.", "fixed")
    seen += ", and a lock that it holds stays locked"
    if owner is None:
        return Hazard("python thread", where, seen, "Start it in each worker, after the fork.", "warning")
    return Hazard("python thread", owner.name, seen, owner.remedy, "warning")


def end_threads() -> tuple[Hazard, ...]:
    """End the threads that can be ended without loss: their libraries start them again when they are needed."""
    ended = []
    for thread in threading.enumerate():
        owner = owner_of(origin(thread))
        if owner is None or not owner.stop or (stop := _attribute(thread, owner.stop)) is None:
            continue
        stop()
        thread.join(_PATIENCE)
        if not thread.is_alive():
            seen = f"thread {thread.name!r} was running"
            fix = f"Ended. To do without: {owner.remedy}"
            ended.append(Hazard("python thread", owner.name, seen, fix, "fixed"))
    return tuple(ended)


def _native(process: ThisProcess) -> Iterable[Hazard]:
    for compiler, names, fix in process.compiler_threads():
        seen = f"it runs {', '.join(names)}; at the next code to compile a child would wait for them forever"
        yield Hazard("compiler threads", compiler, seen, fix, "fixed")
    native = process.native_threads()
    openmp = process.openmp()
    if process.has_allocator_threads():
        seen = "background_thread:true started threads that no child has, so a child would keep freed memory"
        yield Hazard("allocator threads", "jemalloc", seen, "Each child starts them again.", "fixed")
    if native and openmp:
        seen = (
            f"{len(native)} native threads are running; "
            "if they are the forking thread's pool, a child would wait for them forever"
        )
        yield Hazard("thread pool", ", ".join(map(os.path.basename, openmp)), seen, _POOL_FIX, "fixed")
    if process.has_unsafe_grpc():
        seen = "gRPC is loaded without fork support, and its threads do not survive"
        fix = "Set GRPC_ENABLE_FORK_SUPPORT=1 before grpc is imported (the preset 'prefork' does), or import it later."
        yield Hazard("grpc", "grpcio", seen, fix, "warning")


def _descriptors(process: ThisProcess) -> Iterable[Hazard]:
    loaded = (owner for owner in OWNERS if owner.has == "connection" and owner.where in sys.modules)
    perhaps = "".join(f" {owner.name}: {owner.remedy}." for owner in loaded)
    for peer in process.connections():
        seen = "a connection is open; all workers would read and write the same one, and mix up their messages"
        fix = f"Open it in each worker, after the fork.{perhaps}"
        yield Hazard("connection", peer, seen, fix, "warning")
    has_loop = process.event_loop() is not None or any(process.event_loops_elsewhere())
    queues = 0 if has_loop else process.event_queues()  # the queue of a loop that is named already says nothing new
    if queues:
        seen = f"{queues} open; what a child adds to one or removes from it, it changes for its parent too"
        fix = "Create event loops and their clients in each worker, after the fork; close those of the parent."
        yield Hazard("event queue", "epoll", seen, fix + perhaps, "warning")


# Repair a forked child before it does anything else.


def restore(found: Iterable[Hazard]) -> None:
    """Repair what the fork broke, by what was found in the parent."""
    kinds = {hazard.kind for hazard in found}
    if "thread pool" in kinds:
        _use_one_thread()
    if "allocator threads" in kinds:
        _allocator.restart_threads()
    for compiler in _models.compilers():  # whatever was found: it may have begun to compile since
        compiler.renew_in_child()
    _reseed()


@contextmanager
def with_childrens_threads(found: Iterable[Hazard]) -> Iterator[bool]:
    """In the block, torch computes on as many threads as in a repaired child; whether that is another number."""
    torch = sys.modules.get("torch")
    before = 1
    if torch is not None and any(hazard.kind == "thread pool" for hazard in found):
        before = torch.get_num_threads()
    if torch is None or before == 1:
        yield False
        return
    torch.set_num_threads(1)
    try:
        yield True
    finally:
        torch.set_num_threads(before)


def _use_one_thread() -> None:
    """Use one thread, which needs no pool: the pool of the forking thread does not exist in the child."""
    _effect.cap_openmp(1)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # this also sets the number of threads of MKL inside torch


def _reseed() -> None:
    """Give each child its own random numbers. Python's ``random`` does this by itself."""
    for module, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if (library := sys.modules.get(module)) is not None:
            getattr(library, seed)(int.from_bytes(os.urandom(4)))
