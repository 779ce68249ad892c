"""Threads that work in the background: those that are kept for more work, and the one that looks as time passes."""

from __future__ import annotations

import _thread
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol, TypeAlias

from modelguard.runtime import fork_hooks
from modelguard.runtime.fork_hooks import Wakeup, WeakRegistry

Work = Callable[[], object]
_Inbox: TypeAlias = "SimpleQueue[tuple[Work, str] | None]"

#: How long a thread waits for more work of its name, and how many wait at most.
_IDLE_SECONDS = 300.0
_IDLE_THREADS = 4
#: The same for threads of any short work.
LINGER = 10.0
_SHARED_THREADS = 8


def green_threads() -> str | None:
    """The library that has patched this process's threads; None if they are real."""
    library = str(_thread.start_new_thread.__module__).partition(".")[0]
    return library if library in {"gevent", "eventlet"} else None


def start_thread(work: Work, name: str) -> threading.Thread:
    """Run ``work`` in a new thread of that name. A daemon: nothing that hangs may keep the interpreter from exiting.

    Raises:
        RuntimeError: The system gives no thread, or the interpreter is shutting down.
    """
    if sys.is_finalizing():  # start() would wait for a thread that never runs, up to Python 3.11
        raise RuntimeError("the interpreter is shutting down")
    thread = threading.Thread(target=work, name=name, daemon=True)
    # Free-threaded interpreters give a thread the context of whoever starts it: it would count as part of a call, and
    # keep alive what that has in its context.
    Context().run(thread.start)
    return thread


class KeptThreads:
    """Threads that wait for more work. Daemons, because a hung loader must not keep the interpreter from exiting.

    Args:
        shared: Whether a thread takes work of any name, which it has while that runs. Else it takes that of its own
            name alone: what libraries keep for each thread that calls them is there again.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        # Reentrant: the garbage collector may return a dropped lease in here, which may start work.
        self._lock = threading.Condition(threading.RLock())  # notified when less work runs
        self._idle: dict[str | int, tuple[_Inbox, threading.Thread]] = {}
        self._running = 0

    def start(self, work: Work, name: str, *, keep: bool = True) -> None:
        """Run ``work`` in a thread of that name: in one that is waiting for work, else in a new one.

        Args:
            work: The work.
            name: Of the thread.
            keep: Whether that is so; if not, the thread is new, and ends with the work.

        Raises:
            RuntimeError: The system gives no thread, or the interpreter is shutting down.
        """
        with self._lock:
            key = next(iter(self._idle), 0) if self._shared else name
            # A thread that waits runs no more while the interpreter shuts down.
            idle = self._idle.pop(key, None) if keep and not sys.is_finalizing() else None
            self._running += 1
        inbox: _Inbox = SimpleQueue() if idle is None else idle[0]
        inbox.put((work, name))  # not as an argument, which the thread would keep alive as long as it runs
        if idle is None:
            try:
                start_thread(partial(self._serve, inbox, keep=keep), name)
            except BaseException:
                self._end()
                raise

    def start_once(self, work: Work, name: str) -> None:
        """Run ``work`` in a new thread of that name, which ends with it."""
        self.start(work, name, keep=False)

    def finish(self, seconds: float) -> None:
        """Wait until no work runs, at most this many seconds."""
        with self._lock:
            # Below zero in a child that the work itself has forked, where that work ends too.
            self._lock.wait_for(lambda: self._running <= 0, seconds)

    def end_idle(self) -> None:
        """End the threads that wait for work: a process that is about to fork should have few."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), {}
        for inbox, thread in idle:
            inbox.put(None)
            thread.join()

    def _serve(self, inbox: _Inbox, *, keep: bool) -> None:
        job = inbox.get()
        while job is not None:
            work, name = job
            threading.current_thread().name = name
            try:
                work()
            finally:
                self._end()
            del work, job  # nothing of it may be kept alive while the thread waits
            job = self._next(inbox, name) if keep else None

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            self._lock.notify_all()

    def _next(self, inbox: _Inbox, name: str) -> tuple[Work, str] | None:
        thread = threading.current_thread()
        most, seconds = (_SHARED_THREADS, LINGER) if self._shared else (_IDLE_THREADS, _IDLE_SECONDS)
        key = id(inbox) if self._shared else name
        with self._lock:
            if key in self._idle or len(self._idle) >= most:
                return None
            if self._shared:
                thread.name = "modelguard-idle"
            self._idle[key] = inbox, thread
        try:
            return inbox.get(timeout=seconds)
        except Empty:
            with self._lock:
                if self._idle.get(key) == (inbox, thread):
                    del self._idle[key]
                    return None
            return inbox.get()  # work was handed over in this very moment


#: For loads, each in the thread of its name.
THREADS = KeptThreads()
#: For short work.
SHARED = KeptThreads(shared=True)
fork_hooks.before_exit("loads", THREADS.finish)
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=THREADS.after_fork_in_child)
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=SHARED.after_fork_in_child)


_SHORTEST, _LONGEST = 0.05, 1.0


class Ticked(Protocol):
    """What the ticker needs of a guard."""

    def tick(self) -> None: ...

    def check_interval(self) -> float: ...


class Ticker(fork_hooks.Forkable):
    """Checks its guards at the interval that they ask for, one to twenty times a second; ends when none is left."""

    def __init__(self) -> None:
        self._guards: WeakRegistry[Ticked] = WeakRegistry()
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        # Reentrant: the garbage collector may return a dropped lease in here, which may add a guard.
        self._lock = threading.RLock()
        self._wakeup = Wakeup()  # not an Event: the garbage collector may set it in the middle of a wait
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, guard: Ticked) -> None:
        """Check ``guard`` from now on, as long as somebody else refers to it."""
        with self._lock:
            self._guards.add(guard)
            # If the system gives no thread, or a signal handler raises before there is one, the next call tries again.
            if not self._stopped and self._thread is None:
                self._thread = start_thread(self._run, "modelguard-ticker")
        self._wakeup.set()

    def remove(self, guard: Ticked) -> None:
        """Stop checking ``guard``. Takes no lock: the garbage collector may call it in any thread at any point."""
        self._guards.discard(guard)
        self._wakeup.set()

    def stop(self) -> None:
        """End the thread for good: a process that forks checks its guards itself, between two forks.

        Children that are forked from now on start their own thread.
        """
        with self._lock:
            self._stopped = True
            thread = self._thread
        self._wakeup.set()
        if thread is not None:  # one that is about to start sees it by itself
            thread.join()

    def _run(self) -> None:
        interval, me = _SHORTEST, threading.current_thread()
        while True:
            self._wakeup.wait(interval)
            with self._lock:
                if self._thread not in (None, me):  # who started this one was interrupted before it could be noted
                    return
                self._thread = me
                if self._stopped or not self._guards:
                    self._thread = None
                    return
            interval = max(_SHORTEST, self._check_all())

    def _check_all(self) -> float:
        """Check every guard; in a frame of its own, so that no guard is kept alive while the thread waits."""
        interval = _LONGEST
        for guard in self._guards:
            try:
                guard.tick()
                interval = min(interval, guard.check_interval())
            except BaseException:
                with suppress(BaseException):  # nor may a log handler that raises
                    logging.getLogger("modelguard").exception("modelguard could not ask the policies of %r", guard)
        return interval

    # Fork

    fork_rank = fork_hooks.Rank.TICKER

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def start_again(self) -> None:
        """Start a thread for the child, once its guards have locks of their own."""
        for guard in self._guards:
            self.add(guard)


TICKER = Ticker()
fork_hooks.register(TICKER)
fork_hooks.at_fork(fork_hooks.Rank.THREADS, in_child=TICKER.start_again)
