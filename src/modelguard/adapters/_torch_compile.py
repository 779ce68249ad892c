"""What ``torch.compile`` leaves behind in a forked child: it would wait for threads that only its parent has.

The compiler (Inductor) gives C++ code to a pool of threads. Torch gives a forked child a new pool of compiling
processes, but not of threads, so that the child waits for ever at the first kernel it has to compile.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from torch._dynamo import convert_frame
from torch._inductor.async_compile import AsyncCompile

OWNER = "torch.compile"

FIX = "Children start threads of their own. To compile without threads, set TORCHINDUCTOR_COMPILE_THREADS=1."

#: Of the threads that serve the pool of compiling processes (``torch._inductor.compile_worker``).
_NAMES = ("InductorSubproc", "subproc_worker_timer")


def threads() -> list[threading.Thread]:
    """The compiler's threads that run in this process."""
    pool = AsyncCompile.pool
    compiling: Any = pool()._threads if pool.cache_info().currsize else ()  # noqa: SLF001 - nothing else names them
    return [thread for thread in threading.enumerate() if thread in compiling or thread.name in _NAMES]


def renew_in_child() -> None:
    """Let the compiler start its threads anew, even if the fork came while another thread compiled."""
    AsyncCompile.pool.cache_clear()
    progress = getattr(sys.modules.get("tqdm.std"), "TqdmDefaultWriteLock", None)
    locks: tuple[Any, ...] = (convert_frame.compile_lock, getattr(progress, "th_lock", None))
    for lock in locks:
        if lock is not None and not lock._is_owned():  # noqa: SLF001 - the fork may come from within a compilation
            lock._at_fork_reinit()  # noqa: SLF001 - as CPython does with its own locks
