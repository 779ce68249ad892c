"""Find what in this process does not survive a fork, what it belongs to, and what to do about it.

``fork`` copies only the thread that calls it. In the child, a thread pool has no threads, a lock that another thread
held stays locked forever, and waiting for either hangs. So every thread is a hazard, and so is anything that keeps
state about this process elsewhere: on a graphics card, or in an event loop.
"""

import asyncio
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from modelguard.environment import _openmp, _proc

__all__ = ["ForkingProcess", "Hazard", "HazardKind", "ThisProcess", "find_hazards"]

HazardKind = Literal[
    "python thread", "thread pool", "allocator threads", "grpc", "cuda", "event loop", "hang", "warm-up"
]

#: The names of modelguard's own threads: they hold no lock while the process forks, and a child starts its own.
_OURS = "modelguard-"

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
        severity: ``"fixed"``: :func:`modelguard.prefork.in_child` repairs it in each child. ``"warning"``: it may be
            harmless, which modelguard cannot know. ``"fatal"``: no child would work.
    """

    kind: HazardKind
    owner: str
    seen: str
    fix: str
    severity: Literal["fixed", "warning", "fatal"]

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind} of {self.owner}: {self.seen}. {self.fix}"


class ForkingProcess(Protocol):
    """The process that is about to fork: this process, or a test's description of one."""

    def python_threads(self) -> Iterable[tuple[str, str]]:
        """The name of each other Python thread, and where its function is defined."""
        ...

    def native_threads(self) -> list[str]:
        """The names of the threads that Python did not start."""
        ...

    def openmp(self) -> list[str]:
        """The files of the OpenMP runtimes that are loaded."""
        ...

    def has_allocator_threads(self) -> bool:
        """Whether jemalloc runs background threads."""
        ...

    def uses_cuda(self) -> bool:
        """Whether torch has started CUDA."""
        ...

    def has_unsafe_grpc(self) -> bool:
        """Whether gRPC is loaded without fork support."""
        ...

    def runs_event_loop(self) -> bool:
        """Whether this thread runs an event loop."""
        ...


def find_hazards(process: ForkingProcess | None = None) -> tuple[Hazard, ...]:
    """Find everything that would not survive a fork.

    Args:
        process: The process to examine. Default: this one.

    Returns:
        The hazards, worst first.
    """
    process = ThisProcess() if process is None else process
    found = [*_fatal(process), *_python_threads(process), *_native(process)]
    return tuple(sorted(found, key=lambda hazard: ("fatal", "warning", "fixed").index(hazard.severity)))


def _fatal(process: ForkingProcess) -> Iterable[Hazard]:
    if process.uses_cuda():
        seen = "torch.cuda is initialised, and a forked child cannot initialise it again"
        fix = "Do not use CUDA before the fork (PYTORCH_NVML_BASED_CUDA_CHECK=1 checks without starting it), or spawn."
        yield Hazard("cuda", "torch", seen, fix, "fatal")
    if process.runs_event_loop():
        seen = "an event loop runs in this thread; a child would inherit its sockets and wake-ups"
        fix = "Prepare before the loop starts, outside of any coroutine."
        yield Hazard("event loop", "asyncio", seen, fix, "fatal")


def _python_threads(process: ForkingProcess) -> Iterable[Hazard]:
    for name, where in process.python_threads():
        if not name.startswith(_OURS):
            seen = f"thread {name!r} is running; a child does not have it, and a lock that it holds stays locked"
            yield Hazard("python thread", where, seen, "Start it in each worker, after the fork.", "warning")


def _native(process: ForkingProcess) -> Iterable[Hazard]:
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


class ThisProcess:
    """The current process."""

    def python_threads(self) -> Iterable[tuple[str, str]]:
        """Every thread except the calling one and the main one, because a server may fork from the main thread."""
        ours = (threading.current_thread(), threading.main_thread())
        return [(thread.name, _origin(thread)) for thread in threading.enumerate() if thread not in ours]

    def native_threads(self) -> list[str]:
        """The threads in ``/proc/self/task`` that Python did not start."""
        known = {thread.native_id for thread in threading.enumerate()}
        return [name for thread, name in _proc.thread_names().items() if thread not in known]

    def openmp(self) -> list[str]:
        """The runtimes among the mapped files."""
        return sorted(_openmp.loaded_openmp())

    def has_allocator_threads(self) -> bool:
        """Whether jemalloc reports background threads."""
        from modelguard.environment import _allocator

        return any(problem.kind == "background threads" for problem in _allocator.detect().problems)

    def uses_cuda(self) -> bool:
        """Whether torch has been imported and reports that CUDA is initialised."""
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def has_unsafe_grpc(self) -> bool:
        """Whether gRPC has been imported, and its variable does not enable fork support."""
        supported = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes")
        return "grpc._cython.cygrpc" in sys.modules and not supported

    def runs_event_loop(self) -> bool:
        """Whether asyncio reports a running event loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True


def _origin(thread: threading.Thread) -> str:
    target = getattr(thread, "_target", None)
    if target is None:
        kind = type(thread)
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"
