"""The shell around the core: its lock, its threads, and the answers it hands over.

A thread that has had nothing to do for a while ends, and the next item starts another one: an idle batcher costs
nothing, and one that nobody refers to any more can be collected.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING

from modelguard import _units
from modelguard.errors import Overloaded, WouldDeadlock
from modelguard.serving import registry, telling
from modelguard.serving.breaker import Breaker, Circuit
from modelguard.serving.core import Batch, Core, Limits
from modelguard.serving.entries import DONE, Entry, answer
from modelguard.serving.running import Function, Run, compute
from modelguard.serving.scope import Scope, current
from modelguard.telemetry.hooks import logger

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
        self._deadline = deadline
        self._breaker = breaker
        self._clock = time.monotonic
        self.after_fork_in_child()
        registry.remember(self)

    def after_fork_in_child(self) -> None:
        """What waits and runs is the parent's; here nothing does."""
        self._lock = threading.Lock()
        self._core = Core(self._limits, None if self._breaker is None else Circuit(self._breaker))
        self._idle: list[Bell] = []
        self._threads = 0
        self._alarm = math.inf  # the time for which the timekeeper has been woken
        self._timekeeper: Bell | None = None
        self._drained = threading.Event()
        self._telling = telling.Telling(self.name)

    # In

    def put(self, entry: Entry, timeout: float | None = None) -> None:
        """Queue an entry; its answer comes from another thread.

        Raises:
            WouldDeadlock: Called by the batch function itself.
            Overloaded, DeadlineExceeded, GuardClosed: It was not queued.
        """
        scope = current.get()
        if scope is not None or timeout is not None or self._deadline != math.inf:
            entry.deadline = self._until(timeout, scope)
        with self._lock:
            self._core.admit(entry, self._clock())
            bell = self._idle.pop() if self._idle else None
            if bell is None and self._threads < self._limits.workers:
                self._start(entry)
            if entry.deadline < self._alarm:
                self._set_alarm(entry.deadline)
        if bell is not None:
            bell.ring()
        if scope is not None and scope.hangup is not None:
            scope.hangup.add(_Call(self, entry))

    def _until(self, timeout: float | None, scope: Scope | None) -> float:
        until = self._clock() + min(self._deadline, math.inf if timeout is None else timeout)
        if scope is None:
            return until
        if scope.inside is self:
            raise WouldDeadlock(
                self.name,
                why="its batch function calls it, and would wait for the thread that it occupies",
                fix="Call the function that computes a batch instead.",
            )
        return min(until, scope.deadline)

    def cancel(self, entry: Entry, *, told: bool = False) -> None:
        """Nobody waits for the answer any more; or somebody who is to be told so."""
        with self._lock:
            self._core.cancel(entry, told=told)
        self._flush()

    # Threads

    def _start(self, entry: Entry) -> None:
        try:
            threading.Thread(target=self._serve, name=f"modelguard-batch-{self.name}", daemon=True).start()
        except RuntimeError as error:
            if self._threads:
                return  # there are others
            self._core.cancel(entry)
            raise Overloaded(f"{self.name}(): no thread to be had: {error}") from error
        self._threads += 1

    def _serve(self) -> None:
        """A worker: whatever waits when it is free is its next batch."""
        bell = Bell()
        core = self._core  # a forked child has another one, and none of these threads
        current.set(Scope(inside=self))
        while True:
            with self._lock:
                found = core.take(self._clock())
                leaves = found is None and core.closed
                if leaves:
                    self._threads -= 1
                elif not isinstance(found, Batch):
                    self._idle.append(bell)
            if core.outbox:
                self._flush()
            if leaves:
                return
            if isinstance(found, Batch):
                self._compute(found)
            elif not self._waits(bell, found):
                return

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
        started = self._clock()
        computed = compute(self._function, batch.entries, batch.extras)
        now = self._clock()
        core = self._core
        with self._lock:
            if computed.error is None:
                core.record(batch, now - started, now)
            core.tally.bisected += bool(computed.reruns)
            entries, outcomes = core.finish(batch, computed.outcomes, computed.failed)
            change = core.judge(batch, computed.verdict, now)
        if entries:
            answer(entries, outcomes)
        if core.outbox or core.closed:
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
                core.expire(now := self._clock())
                due = self._alarm = core.next_deadline()
                if due == math.inf and not rang:
                    self._timekeeper = None
            self._flush()
            if due == math.inf and not rang:
                return
            rang = bell.wait(min(due - now, _LINGER)) or due != math.inf

    def _flush(self) -> None:
        """Hand over what the core has answered by itself."""
        core = self._core
        with self._lock:
            settled, core.outbox = core.outbox, []
            drained = core.closed and core.idle
        if settled:
            answer([entry for entry, _ in settled], [failure for _, failure in settled])
        if drained:
            self._drained.set()

    # Out

    def close(self, timeout: _units.Duration) -> None:
        """Admit nothing more, compute what waits, and refuse what still does when the time is over.

        Raises:
            WouldDeadlock: Called by the batch function.
        """
        patience = _units.seconds(timeout, "timeout", zero=True)
        scope = current.get()
        if scope is not None and scope.inside is self:
            raise WouldDeadlock(
                self.name, why="its batch function closes it, and would wait for itself", fix="Close it outside."
            )
        with self._lock:
            self._core.close()
            bells, self._idle = self._idle, []
        for bell in bells:
            bell.ring()
        self._flush()
        if not self._drained.wait(patience):
            with self._lock:
                self._core.give_up()
            self._flush()

    @property
    def ready(self) -> bool:
        """Whether it lets items in. An open circuit does not count: without traffic there would be no probe."""
        return not self._core.closed

    def status(self) -> BatchStatus:
        """What there is to know of it now."""
        from modelguard.serving.status import describe

        with self._lock:
            return describe(self.name, self._core, self._clock())

    def __repr__(self) -> str:
        return f"<Batcher {self.name!r}>"
