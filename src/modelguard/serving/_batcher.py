"""One batched function at work: takes requests in, computes batches, delivers outcomes, and closes."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from typing import Any

from modelguard import telemetry
from modelguard.errors import CallerGone, GuardClosed, ModelGuardError, WouldDeadlock
from modelguard.runtime import own_thread
from modelguard.runtime.fork import Wakeup
from modelguard.serving import _shared_threads, deadlines
from modelguard.serving._batch_options import BatchOptions, Changes
from modelguard.serving._execution import BatchCallable, BatchFunction, Computed, one_line
from modelguard.serving._planner import AutoSize
from modelguard.serving._queue import BatchQueue, CircuitChange
from modelguard.serving._requests import QueuedCall, Request, deliver, request_of
from modelguard.serving._runners import runner_of
from modelguard.serving._shared_threads import BatchThreads, LockedQueue, Watch, Work
from modelguard.serving.breaker import Circuit
from modelguard.serving.deadlines import Scope, current_scope
from modelguard.serving.status import (
    Batch,
    BatchStatus,
    Counters,
    Limits,
    PlainBatch,
    count_hung,
    is_plain,
    items_in_hung,
)
from modelguard.telemetry import logger

# Reports which size of batches ``max_size="auto"`` has chosen.


#: A size is reported if it has changed by this factor; unless something was configured, at most this often, in seconds.
_WORTH_REPORTING = 1.25
_REPORT_INTERVAL = 1.0


class ChosenSize:
    """Emits ``BatchSizeChosen`` when the goal gets out of reach or within reach, and when the size changes.

    Args:
        name: The batcher's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._slo = math.inf
        self._reachable = True
        self._reported_at = -math.inf

    @property
    def chosen(self) -> bool:
        return self._slo != math.inf

    def report(self, auto: AutoSize, now: float) -> None:
        """Emit what was chosen, if that has changed since the last event."""
        if (not auto and self._slo == math.inf) or (auto and auto.reachable is None):
            return  # nothing is chosen, or there were too few runs to say anything
        reachable = auto.reachable is not False
        same = reachable == self._reachable and not self._differs(auto.size)
        if auto.slo == self._slo and (same or now - self._reported_at < _REPORT_INTERVAL):
            return
        event = telemetry.BatchSizeChosen(
            guard=self._name,
            size=auto.size,
            previous=self._size,
            slo=auto.slo if auto else None,
            item_seconds=auto.item_seconds,
            reachable=reachable,
        )
        self._size, self._slo, self._reachable = (auto.size if auto else 0), auto.slo, reachable
        self._reported_at = now
        telemetry.emit(event)

    def _differs(self, size: int) -> bool:
        return max(size, self._size) >= _WORTH_REPORTING * min(size, self._size)


# The events of a batcher. They are emitted in the batcher's own threads, never in a caller's.


class BatchEvents:
    """Emits what has happened since it last did.

    Args:
        name: The batcher's name.
    """

    def __init__(self, name: str) -> None:
        telemetry.import_events()
        self._name = name
        self._lock = threading.Lock()  # a batch may end while the thread that looks after time reports
        self._reported = _refused(Counters())
        self._reported_at = -math.inf
        self._size = ChosenSize(name)

    def batch_ended(
        self, batch: Batch, computed: Computed, queue: BatchQueue, *, seconds: float, change: CircuitChange
    ) -> None:
        """Emit the events of a batch that has ended.

        Args:
            batch: The batch.
            computed: Its outcome.
            queue: The queue it came from.
            seconds: How long it ran, reruns included.
            change: What its verdict changed about the circuit.
        """
        if telemetry.listening():
            hung = count_hung(queue.running)
            telemetry.emit(
                telemetry.BatchFinished(
                    guard=self._name,
                    size=batch.count,
                    waiting=queue.waiting,
                    wait_seconds=batch.started - batch.oldest,
                    run_seconds=seconds,
                    failed=computed.failed,
                    reruns=computed.reruns,
                    weight=batch.weight,
                    padding=batch.padding,
                    hung=hung,
                )
            )
        if computed.error is not None:
            telemetry.emit(
                telemetry.BatchErrored(
                    guard=self._name,
                    size=batch.count,
                    failed=computed.failed,
                    error=one_line(computed.error),
                    reruns=computed.reruns,
                    hung=count_hung(queue.running),
                )
            )
        if change is not None:
            self._emit_circuit(queue, change, computed.error)
        self._size.report(queue.auto_size, batch.started + seconds)

    def quiet(self, queue: BatchQueue) -> bool:
        """Whether there is nothing to emit after a batch that went well."""
        unsaid = queue.auto_size or self._size.chosen or _refused(queue.counters) != self._reported
        return not (unsaid or telemetry.listening())

    def hung(self, queue: BatchQueue, hang_after: float) -> None:
        error = TimeoutError(f"a batch has been running for more than {hang_after:g} s")
        telemetry.emit(
            telemetry.BatchErrored(
                guard=self._name,
                size=items_in_hung(queue.running),
                failed=0,
                error=one_line(error),
                reruns=0,
                hung=count_hung(queue.running),
            )
        )
        if queue.circuit is not None:
            self._emit_circuit(queue, "opened", error)

    def refusals_due(self, counters: Counters) -> float:
        """When to report what was refused since the last report; infinity if there is nothing."""
        return math.inf if _refused(counters) == self._reported else self._reported_at + _REPORT_INTERVAL

    def _emit_circuit(self, queue: BatchQueue, change: CircuitChange, error: BaseException | None) -> None:
        if change == "closed" or queue.circuit is None:
            telemetry.emit(telemetry.CircuitClosed(guard=self._name))
            return
        telemetry.emit(
            telemetry.CircuitOpened(
                guard=self._name,
                failures=queue.circuit.failures,
                retry_after=queue.circuit.cooldown,
                error="" if error is None else one_line(error),
            )
        )

    def refused(self, queue: BatchQueue, now: float) -> None:
        """Emit what was refused since the last report, at most once a second."""
        with self._lock:
            if now < self.refusals_due(queue.counters):
                return
            former, counts = self._reported, _refused(queue.counters)
            self._reported, self._reported_at = counts, now
        full, late, opened, quota, expired, cancelled = (new - old for new, old in zip(counts, former, strict=True))
        telemetry.emit(
            telemetry.RequestsRefused(
                guard=self._name,
                full=full,
                late=late,
                open=opened,
                quota=quota,
                expired=expired,
                cancelled=cancelled,
                waiting=queue.waiting,
            )
        )


def _refused(counters: Counters) -> tuple[int, ...]:
    return (
        counters.refused_full,
        counters.refused_late,
        counters.refused_open,
        counters.refused_quota,
        counters.expired,
        counters.cancelled,
    )


class Batcher:
    """Runs a batch function for many callers; see :func:`~modelguard.batched` for what it promises.

    Args:
        run: Computes a batch.
        options: Bounds, and how to treat errors.
        lingers: Whether a thread without work waits for some. An instance's goes to others at once: there may be one
            for each request.
    """

    def __init__(self, run: BatchCallable, options: BatchOptions, *, lingers: bool = True) -> None:
        self._options = options
        self._lingers = lingers
        self._breaker = options.breaker
        self._function = BatchFunction(
            run=run,
            name=options.name,
            isolate=options.on_error == "isolate",
            ignore=() if options.breaker is None else options.breaker.ignore,
        )
        self._runner = runner_of(self._function, options, self._others_wait)
        self._scope = Scope(enclosing=frozenset({self}))  # of what a batch calls
        self._own_keys = options.limits.fair
        self._take_limits(options.limits)
        self._reset()
        _shared_threads.add(self)

    def _take_limits(self, limits: Limits) -> None:
        self._limits = limits
        self._bounded = limits.deadline != math.inf

    def after_fork_in_child(self) -> None:
        """Start again with an empty queue: what waits and runs belongs to the parent. What was closed stays closed."""
        closed = self._queue.closed
        self._queue.disown()
        self._reset()
        if closed:
            self._queue.close()

    def _reset(self) -> None:
        self._locked = LockedQueue(
            BatchQueue(self._limits, None if self._breaker is None else Circuit(self._breaker)), self._on_drained
        )
        self._lock, self._queue = self._locked.lock, self._locked.queue
        self._threads = BatchThreads(
            self.name, self._locked, self._take, self._compute, most=self._limits.threads, lingers=self._lingers
        )
        self._process = os.getpid()
        self._nested = False  # whether a batch function has ever called this one
        self._watch = Watch(self.name, self._lock, self._check_time, self._after_check)
        self._hung = False  # whether a batch has overstayed since the events were last emitted
        self._drained = Wakeup()  # not an Event: the garbage collector may set it in the middle of a wait
        self._events = BatchEvents(self.name)
        self._function.suspects.renew_lock()

    @property
    def name(self) -> str:
        return self._limits.name

    @property
    def limits(self) -> Limits:
        return self._limits

    def configure(self, changes: Changes) -> None:
        """Change options while requests are served, all of them or none. What waits keeps its deadline.

        Raises:
            InvalidOption: One of them cannot be changed, is invalid, or does not fit the others.
            GuardClosed: It is closed.
            WouldDeadlock: Called by a signal handler or finalizer in the middle of a call.
        """
        self._refuse_interruption("configure", "Set a flag in the handler, and change the options outside of it.")
        with self._lock:
            if self._queue.closed:
                raise GuardClosed(self.name)
            now = deadlines.clock()
            self._options = self._options.changed(changes)
            self._take_limits(self._options.limits)
            self._queue.configure(self._limits, now)
            if self._queue.running and self._watch.due > now:
                self._watch.schedule(now)  # a batch may count as hung sooner
            idle = self._threads.take_idle()
        for wakeup in idle:  # they may be waiting for a batch to become due
            wakeup.set()

    # In

    def put(self, request: Request, timeout: float | None = None) -> None:  # noqa: C901 - a function call costs a tenth
        """Queue a request; its outcome comes from another thread.

        Raises:
            WouldDeadlock: Called by the batch function itself, or by one that it waits for.
            CallerGone: The web request for which it is called has lost its client.
            Overloaded, DeadlineExceeded, GuardClosed: It was not queued.
        """
        if own_thread.open_blocks and own_thread.required():
            self._compute_inline(request)
            return
        scope = current_scope.get()
        bounded = scope is not None or timeout is not None or self._bounded
        if bounded:
            self._apply_bounds(request, timeout, scope)
        queue, threads, wakeup = self._queue, self._threads, None
        try:
            with self._lock:
                queue.admit(request, deadlines.clock())
                if threads.idle:
                    wakeup = threads.idle.pop()
                elif threads.count < threads.most:
                    threads.start()
                if bounded and request.deadline < self._watch.due:
                    self._watch.schedule(request.deadline)
            if wakeup is not None:
                wakeup.set()
            if self._locked.deferred or queue.undelivered:
                self._locked.settle()
        except ModelGuardError:
            self._report_refusals()
            raise
        except BaseException:  # Ctrl-C or a signal handler that raises, at any point of the above
            self._withdraw(request)
            raise
        if scope is not None and scope.web_request is not None:
            scope.web_request.add(QueuedCall(request, self.cancel))

    def bound(self, request: Request, timeout: float | None) -> None:
        """Set when a request has to be answered, and for whom it is, before :meth:`put_together`."""
        self._apply_bounds(request, timeout, current_scope.get())

    def put_together(self, requests: list[Request]) -> None:
        """:meth:`put` for several requests with their bounds: all of them are queued, or none."""
        if own_thread.open_blocks and own_thread.required():
            for request in requests:
                self._compute_inline(request)
            return
        try:
            with self._lock:
                self._queue.admit_together(requests, deadlines.clock())
                wakeup = self._threads.find() if requests else None
                nearest = min((request.deadline for request in requests), default=math.inf)
                if nearest < self._watch.due:
                    self._watch.schedule(nearest)
            if wakeup is not None:
                wakeup.set()
            self._locked.settle()
        except ModelGuardError:
            self._report_refusals()
            raise
        except BaseException:  # as in put
            self._withdraw(*requests)
            raise
        scope = current_scope.get()
        if scope is not None and scope.web_request is not None:
            for request in requests:
                scope.web_request.add(QueuedCall(request, self.cancel))

    def put_plain(self, item: Any, future: asyncio.Future[Any], loop: asyncio.AbstractEventLoop, weight: float) -> None:
        """:meth:`put` for a coroutine's call with nothing but an item; mostly without the lock.

        A lock costs as much as everything else here, and more while another thread holds it. Loops in several threads
        may exceed ``max_queue`` together, by one call each.
        """
        queue, now = self._queue, deadlines.clock()
        if (
            len(queue.inbox) + queue.waiting >= queue.sure
            or now > queue.overdue
            or own_thread.open_blocks
            or current_scope.get() is not None
        ):
            self.put(request_of((item, future, loop, now, weight), math.inf))
            return
        threads, until = self._threads, now + self._limits.deadline
        try:
            queue.inbox.append((item, future, loop, now, weight))
            # Read again, after the call was queued: a thread looks for work after it has written these.
            if threads.idle or threads.count < threads.most or queue.closed or until < self._watch.due:
                self._attend_to(future, until)
        except GuardClosed:
            raise
        except BaseException:  # as in put
            with self._lock:
                request = queue.request_of(future)
            if request is not None:
                self._withdraw(request)
            raise

    def _attend_to(self, future: asyncio.Future[Any], until: float) -> None:
        """Have a thread compute what was put into the inbox. Raises what ``put`` does if there will be none."""
        with self._lock:
            request = self._queue.request_of(future) if self._queue.closed else None
            closed = request is not None and request.state == "waiting"
            if request is not None and closed:
                self._queue.withdraw(request)
            elif until < self._watch.due:
                self._watch.schedule(until)
            wakeup = self._threads.find()
        if wakeup is not None:
            wakeup.set()
        if closed or self._locked.deferred or self._queue.undelivered:
            self._locked.settle()
        if closed:
            raise GuardClosed(self.name)

    def _withdraw(self, *requests: Request) -> None:
        """Undo an admission that an exception interrupted."""
        with self._lock:
            self._queue.withdraw(*requests)
        self._threads.wake_all()

    def _apply_bounds(self, request: Request, timeout: float | None, scope: Scope | None) -> None:
        deadline = deadlines.clock() + min(self._limits.deadline, math.inf if timeout is None else timeout)
        if scope is not None:
            deadline = min(deadline, scope.nearest_deadline)
            self._refuse_own_call(scope)
            if scope.web_request is not None and scope.web_request.cancelled:
                raise CallerGone(self.name)
            if scope.enclosing:
                request.enclosing = scope.enclosing
                self._nested = True
            if scope.key is not None or scope.priority:
                request.priority = max(request.priority, scope.priority)
                request.key = request.key if self._own_keys else scope.key
                self.order()
        request.deadline = deadline

    def order(self) -> None:
        """From now on, requests have keys or priorities."""
        if not self._queue.ordered:
            with self._lock:
                self._queue.order()

    def _refuse_own_call(self, scope: Scope) -> None:
        if self in scope.enclosing:
            why = "its batch function calls it, and would wait for the thread that it occupies"
            raise WouldDeadlock(self.name, why=why, fix="Call the function that computes a batch instead.")

    def _compute_inline(self, request: Request) -> None:
        """Compute a request at once in this thread: in tests, and for the warm-up of a model."""
        scope = current_scope.get() or Scope()
        self._refuse_own_call(scope)
        if self._queue.closed:
            raise GuardClosed(self.name)
        token = current_scope.set(Scope(enclosing=scope.enclosing | {self}))
        try:
            self._runner.inline(request)
        finally:
            current_scope.reset(token)

    def cancel(self, request: Request | asyncio.Future[Any], *, notify: bool = False) -> None:
        """Drop a request, or a plain call. With ``notify`` its caller still waits, and gets ``CallerGone``."""
        self._locked.cancel(request, notify=notify)
        if not self._locked.interrupted:
            self._report_refusals()

    def drop(self, request: Request) -> None:
        """:meth:`cancel` for the garbage collector: it waits for no lock."""
        self._locked.drop(request)

    def _others_wait(self) -> bool:
        return bool(self._queue.waiting or self._queue.inbox)

    def _refuse_interruption(self, method: str, fix: str) -> None:
        if self._locked.interrupted:
            why = f"{method}() was called by a signal handler or a finalizer that interrupted a call"
            raise WouldDeadlock(self.name, why=why, fix=fix)

    # What the threads that compute do

    def _take(self) -> Work:
        found = self._queue.next_batch(deadlines.clock())
        if isinstance(found, Batch) and self._watch.due == math.inf and self._limits.hang_after != math.inf:
            self._watch.schedule(found.started + self._limits.hang_after)
        return found

    def _compute(self, batch: Batch) -> None:
        scope = self._scope
        if self._nested and not is_plain(batch):
            scope = Scope(enclosing=scope.enclosing.union(*(request.enclosing for request in batch.requests)))
        started = deadlines.clock()
        token = current_scope.set(scope)
        computed = self._runner.batch(batch, self._answer)
        current_scope.reset(token)  # what follows is outside of the batch function: callbacks of futures may call again
        now = deadlines.clock()
        seconds = now - started - computed.stalled
        queue = self._queue
        with self._lock:
            if computed.error is None and computed.whole:
                queue.record_run(batch, seconds, now)
            for part in computed.parts:
                queue.record_part(batch, *part, now)
            queue.record_end(batch, seconds, now, reruns=computed.reruns, bad=computed.bad)
            queue.counters.bisected += bool(computed.reruns)
            plain = batch if isinstance(batch, PlainBatch) and queue.finish_plain(batch, computed.failed) else None
            requests, outcomes = queue.finish(batch, computed.outcomes, computed.failed) if plain is None else ([], [])
            change = queue.record_verdict(batch, computed.verdict, now)
        # Before the answers: who gets one needs the interpreter's lock next.
        quiet = change is None and computed.error is None and self._events.quiet(queue)
        if plain is not None:
            plain.deliver(computed.outcomes)
        elif requests:
            deliver(requests, outcomes)
        if queue.undelivered or queue.closed or self._locked.deferred:
            self._locked.settle()
        if not quiet:
            self._report(batch, computed, seconds, change)

    def _report(self, batch: Batch, computed: Computed, seconds: float, change: CircuitChange) -> None:
        queue, now = self._queue, deadlines.clock()
        try:
            self._events.batch_ended(batch, computed, queue, seconds=seconds, change=change)
            if self._events.refusals_due(queue.counters) <= now:
                self._events.refused(queue, now)
            self._report_refusals()
            if change == "opened" and self._breaker is not None and self._breaker.reload is not None:
                self._breaker.reload.reload(wait=False)
        except Exception:  # noqa: BLE001 - neither a closed guard nor an observer may end this thread
            logger.exception("modelguard: %s() goes on", self.name)

    def _answer(self, requests: list[Request], outcomes: list[Any]) -> None:
        with self._lock:
            requests, outcomes = self._queue.answer(requests, outcomes)
        if requests:
            deliver(requests, outcomes)

    # What the thread that looks after time does

    def _check_time(self, now: float) -> float:
        """Fail requests at their deadlines, and note batches that overstay. Returns when to look again."""
        queue = self._queue
        queue.expire_all(now)
        if queue.note_hung(now):
            self._hung = True
        return min(queue.next_check(), self._events.refusals_due(queue.counters))

    def _after_check(self, now: float) -> None:
        self._locked.settle(callbacks_elsewhere=True)
        hung, self._hung = self._hung, False
        try:
            self._events.refused(self._queue, now)
            if hung:
                self._events.hung(self._queue, self._limits.hang_after)
                if self._breaker is not None and self._breaker.reload is not None:
                    self._breaker.reload.reload(wait=False)
        except Exception:  # noqa: BLE001 - neither a closed guard nor an observer may end this thread
            logger.exception("modelguard: %s() goes on", self.name)

    def check_time(self) -> None:
        """Do what has become due because a test has moved the clock."""
        with self._lock:
            now = deadlines.clock()
            self._check_time(now)
            if self._watch.due < math.inf:  # it waits for a time that was
                self._watch.schedule(now)
            idle = self._threads.take_idle()
        for wakeup in idle:  # they may be waiting for a batch to become due
            wakeup.set()
        self._locked.settle()  # here: a test looks at its futures next
        self._after_check(now)

    def _report_refusals(self) -> None:
        """Have refusals reported within a second, also if no batch ends. Not by this thread: it may be a caller's."""
        due = self._events.refusals_due(self._queue.counters)
        if due < self._watch.due:
            with self._lock:
                if due < self._watch.due:
                    self._watch.schedule(due)

    # Closing

    def close(self, timeout: float, *, abandon: bool = False) -> None:
        """Admit nothing more, compute what waits, and refuse what still waits after so many seconds.

        Args:
            timeout: Seconds.
            abandon: Whether to refuse what is still being computed then, too: the process ends.

        Raises:
            WouldDeadlock: Called by the batch function, or by a signal handler or finalizer in the middle of a call.
        """
        scope = current_scope.get()
        if scope is not None and self in scope.enclosing:
            why = "its batch function closes it, and would wait for itself"
            raise WouldDeadlock(self.name, why=why, fix="Close it outside of the batch function.")
        self._refuse_interruption("close", "Set a flag in the handler, and close when the program ends.")
        with self._lock:
            self._queue.close()
            idle = self._threads.take_idle()
        for wakeup in idle:
            wakeup.set()
        self._locked.settle()
        if self._drained.wait(timeout):
            self._drained.set()  # for others who wait
        else:
            with self._lock:
                self._queue.refuse_waiting(GuardClosed(self.name))
                if abandon:
                    self._queue.refuse_running(GuardClosed(self.name))
            self._locked.settle()

    def _on_drained(self) -> None:
        self._drained.set()
        _shared_threads.discard(self)

    def reopen(self) -> None:
        if not self._queue.closed:
            return
        if self._process != os.getpid():
            self._reset()  # forks pass by what has been closed and emptied
            _shared_threads.add(self)
        else:
            with self._lock:
                self._queue.reopen()
                self._drained.set()  # for who still waits in close()
                self._drained = Wakeup()
                _shared_threads.add(self)

    @property
    def ready(self) -> bool:
        """Whether it admits items, and no batch hangs.

        An open circuit does not count: without traffic there would be no probe.
        """
        return not self._queue.closed and not items_in_hung(self._queue.running)

    def status(self) -> BatchStatus:
        if self._locked.deferred:
            self._locked.settle()
        with self._lock:
            return self._queue.status(deadlines.clock())

    def __repr__(self) -> str:
        return f"<Batcher {self.name!r}>"
