"""The fork gate's eyes: what in this process does not survive a fork, whose it is, and what to do about it.

``fork`` copies the thread that calls it and no other. A pool of threads is then a pool without threads, a lock that
one of them held stays locked for ever, and a child that waits for either hangs. So every thread is a hazard, and so is
whatever keeps state about this very process elsewhere: in a graphics card, in an event loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from modelguard.environment import threads

__all__ = ["Hazard", "Here", "Kind", "Scene", "look"]

Kind = Literal["python thread", "thread pool", "allocator threads", "grpc", "cuda", "event loop", "hang", "warm-up"]

#: Threads of ours: they hold no lock while the process forks, and a child starts its own.
_OURS = "modelguard-"

_POOL_FIX = (
    "Children use one thread. Better: run no inference in the parent before it forks, or call "
    "torch.set_num_threads(1) before the first."
)


@dataclass(frozen=True, slots=True)
class Hazard:
    """One thing that does not survive a fork.

    Attributes:
        kind: What it is.
        owner: Whose it is: a thread, a module, a library, a guard.
        seen: What was seen that says so.
        fix: What to do about it, or what was done.
        severity: ``"fixed"``: children are put right by :func:`~modelguard.sharing.prefork.in_child`. ``"warning"``:
            it may be harmless, and only its owner knows. ``"fatal"``: no child could work.
    """

    kind: Kind
    owner: str
    seen: str
    fix: str
    severity: Literal["fixed", "warning", "fatal"]

    def __str__(self) -> str:
        return f"{self.severity}: {self.kind} of {self.owner}: {self.seen}. {self.fix}"


class Scene(Protocol):
    """What is looked at: this process, or a test's idea of one."""

    def python_threads(self) -> Iterable[tuple[str, str]]:
        """Name of each other Python thread, and where what it runs is defined."""
        ...

    def native_threads(self) -> list[str]:
        """Names of the threads that Python knows nothing of."""
        ...

    def openmp(self) -> list[str]:
        """The OpenMP runtimes that are loaded."""
        ...

    def allocator_threads(self) -> bool:
        """Whether jemalloc runs threads of its own."""
        ...

    def cuda(self) -> bool:
        """Whether torch has started CUDA."""
        ...

    def grpc(self) -> bool:
        """Whether gRPC is loaded and was not told to support forks."""
        ...

    def loop(self) -> bool:
        """Whether this thread runs an event loop."""
        ...


def look(scene: Scene) -> tuple[Hazard, ...]:
    """Name every hazard, the worst first."""
    found = [*_fatal(scene), *_python_threads(scene), *_native(scene)]
    return tuple(sorted(found, key=lambda hazard: ("fatal", "warning", "fixed").index(hazard.severity)))


def _fatal(scene: Scene) -> Iterable[Hazard]:
    if scene.cuda():
        seen = "torch.cuda is initialised, and a forked child cannot use CUDA again"
        fix = "Use no CUDA before the fork (PYTORCH_NVML_BASED_CUDA_CHECK=1 asks for it without starting it), or spawn."
        yield Hazard("cuda", "torch", seen, fix, "fatal")
    if scene.loop():
        seen = "an event loop runs in this thread; a child would inherit its sockets and wake-ups"
        yield Hazard(
            "event loop", "asyncio", seen, "Prepare before the loop starts, outside of any coroutine.", "fatal"
        )


def _python_threads(scene: Scene) -> Iterable[Hazard]:
    for name, where in scene.python_threads():
        if not name.startswith(_OURS):
            seen = f"thread {name!r} runs; in a child it does not, and a lock that it holds stays locked"
            yield Hazard("python thread", where, seen, "Start it in each worker, after the fork.", "warning")


def _native(scene: Scene) -> Iterable[Hazard]:
    native = scene.native_threads()
    openmp = scene.openmp()
    if scene.allocator_threads():
        seen = "background_thread:true started threads that no child has, so freed memory would stay there"
        yield Hazard("allocator threads", "jemalloc", seen, "They are started again in each child.", "fixed")
    if native and openmp:
        seen = (
            f"{len(native)} native threads run; if they are a pool of the forking thread, a child waits for it for ever"
        )
        yield Hazard("thread pool", ", ".join(map(os.path.basename, openmp)), seen, _POOL_FIX, "fixed")
    if scene.grpc():
        seen = "gRPC is loaded without fork support, and its threads do not survive"
        fix = "Set GRPC_ENABLE_FORK_SUPPORT=1 before grpc is imported (the preset 'prefork' does), or import it later."
        yield Hazard("grpc", "grpcio", seen, fix, "warning")


class Here:
    """This process."""

    def python_threads(self) -> Iterable[tuple[str, str]]:
        """Every thread but the calling one, and the main one, which a server may have do the forking."""
        ours = (threading.current_thread(), threading.main_thread())
        return [(thread.name, _origin(thread)) for thread in threading.enumerate() if thread not in ours]

    def native_threads(self) -> list[str]:
        """Those in ``/proc/self/task`` that Python did not start."""
        known = {thread.native_id for thread in threading.enumerate()}
        found = []
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) not in known:
                try:
                    found.append((task / "comm").read_text(encoding="utf-8", errors="replace").strip())
                except OSError:  # it has just ended
                    continue
        return found

    def openmp(self) -> list[str]:
        """By the files that are mapped."""
        return sorted(threads.loaded_openmp())

    def allocator_threads(self) -> bool:
        """By the allocator's own word."""
        from modelguard.environment import allocator

        return any(problem.kind == "background threads" for problem in allocator.detect().problems)

    def cuda(self) -> bool:
        """By torch's own word, if torch is there at all."""
        torch = sys.modules.get("torch")
        return torch is not None and bool(torch.cuda.is_initialized())

    def grpc(self) -> bool:
        """By its module and its variable."""
        supported = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes")
        return "grpc._cython.cygrpc" in sys.modules and not supported

    def loop(self) -> bool:
        """By asyncio's own word."""
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
