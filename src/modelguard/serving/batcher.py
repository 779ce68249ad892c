"""The shell around the core: its lock, its threads, and the answers it hands over.

A thread that has had nothing to do for a while ends, and the next item starts another one: an idle batcher costs
nothing, and one that nobody refers to any more can be collected.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from modelguard import _units
from modelguard.errors import CallerGone, GuardClosed, ModelGuardError, Overloaded, WouldDeadlock
from modelguard.serving import registry, telling
from modelguard.serving.batches import Batch, Limits
from modelguard.serving.breaker import Breaker, Circuit
from modelguard.serving.core import Core
from modelguard.serving.entries import DONE, Entry, Failure, FutureEntry, answer
from modelguard.serving.running import Function, Run, compute
from modelguard.serving.scope import Scope, current
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.serving.status import BatchStatus

#: Seconds after which a thread without work ends.
_LINGER = 10.0


class Bell:
    """Wakes one thread. Rung twice before it is heard, it is heard once."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the one who waits, or who will."""
        with contextlib.suppress(RuntimeError):  # rung already
            self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Whether it rang within so many seconds."""
        return self._lock.acquire(timeout=max(timeout, 0.0))


class _Call:
    """One entry, as the one who watches its client sees it."""

    __slots__ = ("_batcher", "_entry")

    def __init__(self, batcher: Batcher, entry: Entry) -> None:
        self._batcher = batcher
        self._entry = entry

    @property
    def done(self) -> bool:
        return self._entry.place == DONE

    def hang_up(self) -> None:
        self._batcher.cancel(self._entry, told=True)


class Batcher:
    """Runs a batch function for many callers; see :func:`~modelguard.serving.making.batched` for what it promises.

    Args:
        run: Computes a batch.
        limits: What bounds a batch and the queue.
        deadline: Seconds from arrival that every item has at most; infinity for no bound.
        isolate: Whether a batch that raised is bisected.
        breaker: When to leave the model alone.
    """

    def __init__(self, run: Run, limits: Limits, *, deadline: float, isolate: bool, breaker: Breaker | None) -> None:
        self.name = limits.name
        ignore = () if breaker is None else breaker.ignore
        self._function = Function(run=run, name=limits.name, isolate=isolate, ignore=ignore)
        self._limits = limits
        self._workers = limits.workers
        self._deadline = deadline
        self._bounded = deadline != math.inf
        self._breaker = breaker
        self._begin()
        registry.remember(self)

    def after_fork_in_child(self) -> None:
        """What waits and runs is the parent's; here nothing does. What was closed stays so."""
        closed = self._core.closed
        self._begin()
        if closed:
            self._core.close()

    def _begin(self) -> None:
        # Reentrant: the garbage collector and signal handlers may call in from anywhere, under the lock as well. What
        # they want is put off until the state is whole again; see cancel().
        self._lock = threading.RLock()
        self._late: deque[tuple[Entry, bool]] = deque()
        self._core = Core(self._limits, None if self._breaker is None else Circuit(self._breaker))
        self._idle: list[Bell] = []
        self._bells: set[Bell] = set()  # of all workers
        self._threads = 0
        self._nested = False  # whether a batch function has ever called this one
        self._alarm = math.inf  # the time for which the timekeeper has been woken
        self._timekeeper: Bell | None = None
        self._drained = threading.Event()
        self._telling = telling.Telling(self.name)

    # In

    def put(self, entry: Entry, timeout: float | None = None) -> None:  # noqa: C901 - each call less is a tenth of it
        """Queue an entry; its answer comes from another thread.

        Raises:
            WouldDeadlock: Called by the batch function itself, or by one that it waits for.
            CallerGone: The client for whom it is called has hung up.
            Overloaded, DeadlineExceeded, GuardClosed: It was not queued.
        """
        scope = current.get()
        bounded = scope is not None or timeout is not None or self._bounded
        if bounded:
            self._dress(entry, timeout, scope)
        core, bell = self._core, None
        try:
            with self._lock:
                core.admit(entry, time.monotonic())
                if self._idle:
                    bell = self._idle.pop()
                elif self._threads < self._workers:
                    self._start()
                if bounded and entry.deadline < self._alarm:
                    self._set_alarm(entry.deadline)
            if bell is not None:
                bell.ring()
            if self._late or core.outbox:
                self._flush()
        except ModelGuardError:
            raise
        except BaseException:  # Ctrl-C, a time limit by signal: at any point of the above
            with self._lock:
                core.withdraw(entry)
            for each in tuple(self._bells):  # one of them may have been chosen, and not been told
                each.ring()
            raise
        if scope is not None and scope.request is not None:
            scope.request.add(_Call(self, entry))

    def _dress(self, entry: Entry, timeout: float | None, scope: Scope | None) -> None:
        """See to what bounds the call, and whom it is made for."""
        until = time.monotonic() + min(self._deadline, math.inf if timeout is None else timeout)
        if scope is not None:
            until = min(until, scope.until)
            if self in scope.inside:
                raise WouldDeadlock(
                    self.name,
                    why="its batch function calls it, and would wait for the thread that it occupies",
                    fix="Call the function that computes a batch instead.",
                )
            if scope.request is not None and scope.request.called_off:
                raise CallerGone(self.name)
            if scope.inside:
                entry.inside = scope.inside
                self._nested = True
        entry.deadline = until

    def cancel(self, entry: Entry, *, told: bool = False) -> None:
        """Nobody waits for the answer any more; or somebody who is to be told so."""
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition asks it
            self._late.append((entry, told))  # by the collector, amid a change; this thread sees to it when it is done
            return
        with self._lock:
            self._core.cancel(entry, told=told)
        self._flush()

    # Threads

    def _wake(self) -> Bell | None:
        """A worker that is to be woken for what waits, if one is free; else start one, if there may be more."""
        if self._idle:
            return self._idle.pop()
        if self._threads < self._workers:
            self._start()
        return None

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=f"modelguard-batch-{self.name}", daemon=True)
        self._threads += 1
        try:
            if sys.is_finalizing():  # it would wait for a thread that never runs
                raise RuntimeError("the interpreter is shutting down")  # noqa: TRY301
            thread.start()
        except RuntimeError as error:
            self._threads -= 1
            if not self._threads:
                self._core.give_up(Overloaded(f"{self.name}(): no thread to be had: {error}"))
        except BaseException:
            self._threads -= thread.ident is None
            raise

    def _serve(self) -> None:
        """A worker: whatever waits when it is free is its next batch."""
        bell = Bell()
        core = self._core  # a forked child has another one, and none of these threads
        self._bells.add(bell)
        try:
            while self._turn(core, bell):
                pass
        except BaseException:  # noqa: BLE001 - a fault of ours; another thread takes over
            with contextlib.suppress(BaseException):
                logger.exception("modelguard: a worker of %s() failed", self.name)
            with self._lock:
                self._threads -= 1
                other = self._wake() if core.waiting else None
            if other is not None:
                other.ring()
        finally:
            self._bells.discard(bell)

    def _turn(self, core: Core, bell: Bell) -> bool:
        """Compute a batch, or wait for one; false if this thread is to end."""
        other = None
        with self._lock:
            found = core.take(time.monotonic())
            if isinstance(found, Batch):
                other = self._wake() if core.waiting else None  # what is left may be due before this one has ended
            elif found is None and core.closed:
                self._threads -= 1
                return False
            else:
                self._idle.append(bell)
        if other is not None:
            other.ring()
        if core.outbox or self._late:
            self._flush()
        if not isinstance(found, Batch):
            return self._waits(bell, found)
        self._compute(found)
        return True

    def _waits(self, bell: Bell, seconds: float | None) -> bool:
        """Wait for work, or until a batch is due; false if none came and the thread is to end."""
        rang = bell.wait(_LINGER if seconds is None else min(seconds, _LINGER))
        with self._lock:
            if bell in self._idle:
                self._idle.remove(bell)
            if rang or seconds is not None or self._core.waiting:
                return True
            self._threads -= 1
            return False

    def _compute(self, batch: Batch) -> None:
        inside: frozenset[object] = frozenset({self})
        if self._nested:
            inside = inside.union(*(entry.inside for entry in batch.entries))
        started = time.monotonic()
        token = current.set(Scope(inside=inside))
        computed = compute(self._function, batch.entries, batch.extras)
        current.reset(token)  # what comes now is no longer inside: callbacks of futures may call again
        now = time.monotonic()
        core = self._core
        with self._lock:
            if computed.error is None:
                core.record(batch, now - started, now)
            core.tally.bisected += bool(computed.reruns)
            entries, outcomes = core.finish(batch, computed.outcomes, computed.failed)
            change = core.judge(batch, computed.verdict, now)
        if entries:
            answer(entries, outcomes)
        if core.outbox or core.closed or self._late:
            self._flush()
        try:
            self._telling.batch(batch, computed, core, seconds=now - started, change=change)
            if change == "opened" and self._breaker is not None and self._breaker.reload is not None:
                self._breaker.reload.reload(wait=False)
        except Exception:  # noqa: BLE001 - neither a closed guard nor an observer may end this thread
            logger.exception("modelguard: %s() goes on", self.name)

    def _set_alarm(self, deadline: float) -> None:
        self._alarm = deadline
        if self._timekeeper is not None:
            self._timekeeper.ring()
            return
        self._timekeeper = Bell()
        name = f"modelguard-deadlines-{self.name}"
        try:
            threading.Thread(target=self._keep_time, args=(self._timekeeper,), name=name, daemon=True).start()
        except RuntimeError:  # no thread to be had: a worker looks at the deadlines whenever it is free
            self._timekeeper, self._alarm = None, math.inf

    def _keep_time(self, bell: Bell) -> None:
        """Answer those whose deadline has come, whatever the workers are doing."""
        core = self._core
        rang = True
        while True:
            with self._lock:
                core.expire(now := time.monotonic())
                due = self._alarm = core.next_deadline()
                if due == math.inf and not rang:
                    self._timekeeper = None
            self._flush(aside=True)
            if due == math.inf and not rang:
                return
            rang = bell.wait(min(due - now, _LINGER)) or due != math.inf

    def _flush(self, *, aside: bool = False) -> None:
        """Hand over what the core has answered by itself, and see to what was put off.

        Args:
            aside: Whether to run the callbacks of futures in another thread, since this one has appointments.
        """
        core = self._core
        with self._lock:
            while self._late:
                entry, told = self._late.popleft()
                core.cancel(entry, told=told)
            settled, core.outbox = core.outbox, []
            drained = core.closed and core.idle
        if aside and any(isinstance(entry, FutureEntry) for entry, _ in settled):
            callbacks = [pair for pair in settled if isinstance(pair[0], FutureEntry)]
            settled = [pair for pair in settled if not isinstance(pair[0], FutureEntry)]
            with contextlib.suppress(RuntimeError):  # no thread to be had: here, then
                threading.Thread(target=_answer, args=(callbacks,), daemon=True).start()
                callbacks = []
            settled += callbacks
        if settled:
            _answer(settled)
        if drained:
            self._drained.set()
            registry.forget(self)

    # Out

    def close(self, timeout: _units.Duration) -> None:
        """Admit nothing more, compute what waits, and refuse what still does when the time is over.

        Raises:
            WouldDeadlock: Called by the batch function, or by a signal handler or finalizer amid a call.
        """
        patience = _units.seconds(timeout, "timeout", zero=True)
        scope = current.get()
        if scope is not None and self in scope.inside:
            raise WouldDeadlock(
                self.name, why="its batch function closes it, and would wait for itself", fix="Close it outside."
            )
        if self._lock._is_owned():  # type: ignore[attr-defined]  # noqa: SLF001 - as in cancel()
            raise WouldDeadlock(
                self.name,
                why="close() was called by a signal handler or a finalizer that interrupted a call",
                fix="Set a flag in the handler, and close at the end of the program.",
            )
        with self._lock:
            self._core.close()
            bells, self._idle = self._idle, []
        for bell in bells:
            bell.ring()
        self._flush()
        if not self._drained.wait(patience):
            with self._lock:
                self._core.give_up(GuardClosed(self.name))
            self._flush()

    @property
    def ready(self) -> bool:
        """Whether it lets items in. An open circuit does not count: without traffic there would be no probe."""
        return not self._core.closed

    def status(self) -> BatchStatus:
        """What there is to know of it now."""
        from modelguard.serving.status import describe

        if self._late:
            self._flush()
        with self._lock:
            return describe(self.name, self._core, time.monotonic())

    def __repr__(self) -> str:
        return f"<Batcher {self.name!r}>"


def _answer(settled: list[tuple[Entry, Failure]]) -> None:
    answer([entry for entry, _ in settled], [failure for _, failure in settled])
