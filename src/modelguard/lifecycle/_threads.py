"""Background threads, kept for a while so that all loads of one guard run in the same thread.

glibc gives each thread a heap of its own, and loads in changing threads leave holes in several heaps: with a new
thread for each load, 20 reloads of ja_ginza left 10 to 60 MB behind instead of 10.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from modelguard import _shutdown

Work = Callable[[], None]

#: How long a thread waits for more work of its name, and how many wait at most.
_IDLE_SECONDS = 300.0
_IDLE_THREADS = 4


class NamedThreads:
    """Daemon threads by name. Daemons, because a hung loader must not keep the interpreter from exiting for ever."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Threads do not survive a fork."""
        # Reentrant: the garbage collector may return a dropped lease in here, which may start work.
        self._lock = threading.RLock()
        self._idle: dict[str, tuple[SimpleQueue[Work | None], threading.Thread]] = {}
        self._running = 0
        self._less = threading.Condition(self._lock)

    def start(self, work: Work, name: str) -> None:
        """Run ``work`` in a thread of that name: in the one that is waiting for work, else in a new one.

        Raises:
            RuntimeError: The system gives no thread, or the interpreter is shutting down.
        """
        with self._lock:
            idle = self._idle.pop(name, None)
            self._running += 1
        if idle is not None:
            idle[0].put(work)
            return
        inbox: SimpleQueue[Work | None] = SimpleQueue()
        inbox.put(work)  # not as an argument, which the thread would keep alive as long as it runs
        try:
            threading.Thread(target=self._serve, args=(inbox, name), name=name, daemon=True).start()
        except BaseException:
            self._end()
            raise

    def start_once(self, work: Work, name: str) -> None:
        """Run ``work`` in a new thread of that name, which ends with it.

        Raises:
            RuntimeError: The system gives no thread, or the interpreter is shutting down.
        """

        def run() -> None:
            try:
                work()
            finally:
                self._end()

        with self._lock:
            self._running += 1
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except BaseException:
            self._end()
            raise

    def finish(self, seconds: float) -> None:
        """Wait until no work runs, at most this many seconds."""
        with self._less:
            # Below zero in a child that the work itself has forked, where that work ends too.
            self._less.wait_for(lambda: self._running <= 0, seconds)

    def end_idle(self) -> None:
        """End the threads that wait for work: a process that is about to fork should have few."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), {}
        for inbox, thread in idle:
            inbox.put(None)
            thread.join()

    def _serve(self, inbox: SimpleQueue[Work | None], name: str) -> None:
        work: Work | None = inbox.get()
        while work is not None:
            try:
                work()
            finally:
                self._end()
            del work  # nothing of it may be kept alive while the thread waits
            work = self._next(inbox, name)

    def _end(self) -> None:
        with self._less:
            self._running -= 1
            self._less.notify_all()

    def _next(self, inbox: SimpleQueue[Work | None], name: str) -> Work | None:
        with self._lock:
            if name in self._idle or len(self._idle) >= _IDLE_THREADS:
                return None
            self._idle[name] = inbox, threading.current_thread()
        try:
            return inbox.get(timeout=_IDLE_SECONDS)
        except Empty:
            with self._lock:
                if (idle := self._idle.get(name)) is not None and idle[0] is inbox:
                    del self._idle[name]
                    return None
            return inbox.get()  # work was handed over in this very moment


THREADS = NamedThreads()
_shutdown.before_exit("loads", THREADS.finish)
