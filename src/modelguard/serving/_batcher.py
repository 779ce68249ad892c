"""One batched function at work: takes requests in, computes batches, delivers outcomes, and closes."""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from modelguard import _units, telemetry
from modelguard.errors import CallerGone, GuardClosed, ItemRefused, ModelGuardError, Overloaded, WouldDeadlock, told
from modelguard.runtime import call_context, clock, fork_hooks
from modelguard.runtime.background import LINGER, start_thread
from modelguard.runtime.clock import Watch
from modelguard.runtime.event_loops import PrivateLoop, RunOnLoop, run_on
from modelguard.runtime.fork_hooks import Wakeup, WeakRegistry
from modelguard.serving._batch_options import BatchOptions, Buffer, Changes
from modelguard.serving._execution import Answer, BatchFunction, Computed, compute, one_line
from modelguard.serving._planner import GoalSize
from modelguard.serving._queue import BatchQueue
from modelguard.serving._requests import Batch, Failure, Request, deliver, loop_of
from modelguard.serving.breaker import Circuit, CircuitChange
from modelguard.serving.deadlines import Scope, current_scope
from modelguard.serving.status import BatchStatus, Counters
from modelguard.serving.streams import AsyncSteps, StreamRequest, StreamRun
from modelguard.telemetry import logger

#: A size is reported if it has changed by this factor; unless something was configured, at most this often, in seconds.
_WORTH_REPORTING = 1.25
_REPORT_INTERVAL = 1.0


class ChosenSize:
    """Emits ``BatchSizeChosen`` when the goal gets out of reach or within reach, and when the size changes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._slo = math.inf
        self._reachable = True
        self._reported_at = -math.inf

    @property
    def chosen(self) -> bool:
        return self._slo != math.inf

    def report(self, auto: GoalSize, now: float) -> None:
        if (not auto and self._slo == math.inf) or (auto and auto.reachable is None):
            return  # nothing is chosen, or there were too few runs to say anything
        reachable = auto.reachable is not False
        alike = max(auto.size, self._size) < _WORTH_REPORTING * min(auto.size, self._size)
        same = alike and reachable == self._reachable
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


#: What counts as refused: the fields of ``RequestsRefused``, and those of the counters.
_REFUSED = {
    "full": "refused_full",
    "late": "refused_late",
    "open": "refused_open",
    "quota": "refused_quota",
    "expired": "expired",
    "cancelled": "cancelled",
}
_refused: Callable[[Counters], tuple[int, ...]] = attrgetter(*_REFUSED.values())


class BatchEvents:
    """Emits what has happened since it last did: in the batcher's own threads, never in a caller's."""

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
        if telemetry.listening():
            event = telemetry.BatchFinished(
                guard=self._name,
                size=batch.count,
                waiting=queue.waiting,
                wait_seconds=batch.started - batch.oldest,
                run_seconds=seconds,
                failed=computed.failed,
                reruns=computed.reruns,
                weight=batch.weight,
                padding=batch.padding,
                hung=len(queue.hung),
            )
            telemetry.emit(event)
        if computed.error is not None:
            self._errored(queue, computed.error, batch.count, computed.failed, computed.reruns)
        if change == "closed":
            telemetry.emit(telemetry.CircuitClosed(guard=self._name))
        elif change == "opened":
            self._opened(queue, computed.error)
        self._size.report(queue.auto_size, batch.started + seconds)

    def quiet(self, queue: BatchQueue) -> bool:
        """Whether there is nothing to emit after a batch that went well."""
        unsaid = queue.auto_size or self._size.chosen or _refused(queue.counters) != self._reported
        return not (unsaid or telemetry.listening())

    def hung(self, queue: BatchQueue, hang_after: float) -> None:
        error = TimeoutError(f"a batch has been running for more than {hang_after:g} s")
        self._errored(queue, error, sum(batch.count for batch in queue.hung))
        self._opened(queue, error)

    def _errored(self, queue: BatchQueue, error: BaseException, size: int, failed: int = 0, reruns: int = 0) -> None:
        why, hung = one_line(error), len(queue.hung)
        telemetry.emit(
            telemetry.BatchErrored(guard=self._name, size=size, failed=failed, error=why, reruns=reruns, hung=hung)
        )

    def _opened(self, queue: BatchQueue, error: BaseException | None) -> None:
        if (circuit := queue.circuit) is not None:
            why, failures = "" if error is None else one_line(error), circuit.failures
            telemetry.emit(
                telemetry.CircuitOpened(guard=self._name, failures=failures, retry_after=circuit.cooldown, error=why)
            )

    def refusals_due(self, counters: Counters) -> float:
        """When to report what was refused since the last report; infinity if there is nothing."""
        return math.inf if _refused(counters) == self._reported else self._reported_at + _REPORT_INTERVAL

    def refused(self, queue: BatchQueue, now: float) -> None:
        """Emit what was refused since the last report, at most once a second."""
        with self._lock:
            if now < self.refusals_due(queue.counters):
                return
            former, counts = self._reported, _refused(queue.counters)
            self._reported, self._reported_at = counts, now
        since: dict[str, Any] = {name: new - old for name, new, old in zip(_REFUSED, counts, former, strict=True)}
        telemetry.emit(telemetry.RequestsRefused(guard=self._name, waiting=queue.waiting, **since))


def _end(requests: list[Request], outcomes: list[Any]) -> None:
    """Answer a request that is in no queue."""
    for request in requests:
        request.state = "done"
    deliver(requests, outcomes)


class Batcher(fork_hooks.Forkable):
    """Runs a batch function for many callers; see :func:`~modelguard.batched` for what it promises."""

    fork_rank = fork_hooks.Rank.BATCHERS

    def __init__(self, run: Callable[..., Any], options: BatchOptions) -> None:
        self._options = options
        self.name = options.name
        self._breaker = options.breaker
        self._function = BatchFunction(
            run=run,
            name=options.name,
            isolate=options.on_error == "isolate",
            ignore=() if options.breaker is None else options.breaker.ignore,
        )
        self._slow_after = _units.seconds((options.buffer or Buffer()).slow_after, "slow_after", zero=True)
        # One step less for those that are simply called.
        self._run = partial(compute, self._function) if options.kind == "function" else self._run_on_loop
        self._scope = Scope(enclosing=frozenset({self}))  # of what a batch calls
        self.limits = options.limits
        self._reset()
        _list(self)
        fork_hooks.register(self)

    def after_fork_in_child(self) -> None:
        """Start again with an empty queue: what waits and runs belongs to the parent. What was closed stays closed."""
        closed = self._queue.closed
        _own.batcher = None  # also if the thread that has forked is one of its own
        self._queue.disown()
        self._reset()
        if closed:
            self._queue.close()

    def _reset(self) -> None:
        self._queue = BatchQueue(self.limits, None if self._breaker is None else Circuit(self._breaker))
        #: Reentrant, because a finalizer or signal handler may want it in a thread that holds it. What these ask for is
        #: deferred until the state is consistent again.
        self._lock = threading.RLock()
        self._deferred: deque[tuple[Request, bool]] = deque()  # to cancel; whether to notify
        self._idle: list[Wakeup] = []  # of threads without work; who takes one out sets it, without the lock
        self._wakeups: set[Wakeup] = set()  # of all threads
        self._lacking = True  # whether a call has to see to a thread that computes it
        self._ended: dict[Wakeup, float] = {}  # when the run ended after which a thread has not rested
        self._nested = False  # whether a batch function has ever called this one
        self._watch = Watch(self.name, self._lock, self._check_time, self._after_check)
        self._hung = False  # whether a batch has overstayed since the events were last emitted
        self._drained = Wakeup()  # not an Event: the garbage collector may set it in the middle of a wait
        self._events = BatchEvents(self.name)

    def __del__(self) -> None:
        self._wake_all()  # its threads, which end then

    @property
    def occupied(self) -> bool:
        """Whether the caller is a callback or a hook that one of its threads runs between two batches."""
        reference = getattr(_own, "batcher", None)
        if reference is None or reference() is not self:
            return False
        scope = current_scope.get()
        return scope is None or self not in scope.enclosing

    def configure(self, changes: Changes) -> None:
        self._refuse_interruption("configure", "Set a flag in the handler, and change the options outside of it.")
        with self._lock:
            if self._queue.closed:
                raise GuardClosed(self.name)
            now = clock.now()
            self._options = self._options.changed(changes)
            self.limits = self._options.limits
            self._queue.configure(self.limits)
            if self._queue.running:
                self._watch.schedule(now)  # a batch may count as hung sooner
        self._wake_all()  # they may be waiting for a batch to become due

    # In

    def bound(self, request: Request, timeout: float | None) -> None:
        """Set when a request has to be answered, and for whom it is, before :meth:`put`."""
        scope = current_scope.get()
        if scope is None and timeout is None and self.limits.deadline == math.inf:
            return
        deadline = clock.now() + min(self.limits.deadline, math.inf if timeout is None else timeout)
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
                request.key = request.key if self.limits.fair else scope.key
                self.order()
        request.deadline = deadline

    def put(self, *requests: Request, together: bool = False) -> None:
        """Queue one request, or several ``together``: all or none, none with a nearer deadline than the first."""
        if call_context.open_blocks and call_context.required():
            for request in requests:
                self._compute_inline(request)
            return
        try:
            with self._lock:
                if together:
                    self._queue.admit_together(requests, clock.now())
                else:
                    self._queue.admit(requests[0], clock.now())
                wakeup = self._find_thread()
                self._watch.schedule(requests[0].deadline)
            if wakeup is not None:
                wakeup.set()
            if self._deferred or self._queue.undelivered:
                self._settle()
        except ModelGuardError:
            self._report_refusals()
            raise
        except BaseException as error:  # Ctrl-C or a signal handler that raises, at any point of the above
            self._withdraw(*requests)
            self._name_comparison(error, requests)
            raise
        scope = current_scope.get()
        if scope is not None and scope.web_request is not None:
            for request in requests:
                scope.web_request.add(request, partial(self.cancel, request, notify=True))

    def put_plain(self, request: Request) -> None:
        """:meth:`put` for a call with nothing but an item; mostly without the lock.

        A lock costs as much as everything else here, and more while another thread holds it. Threads may exceed
        ``max_queue`` together, by one call each.
        """
        queue, now = self._queue, clock.now()
        if (
            len(queue.inbox) + queue.waiting >= queue.sure
            or now > queue.overdue
            or call_context.open_blocks
            or current_scope.get() is not None
        ):
            self.bound(request, None)
            self.put(request)
            return
        request.arrived, request.deadline = now, now + self.limits.deadline
        try:
            queue.inbox.append(request)
            # Read again, after the call was queued: a thread looks for work after it has written these.
            if self._lacking or queue.closed or request.deadline < self._watch.due:
                self._attend_to(request)
        except GuardClosed:
            raise
        except BaseException:  # as in put
            self._withdraw(request)
            raise

    def _attend_to(self, request: Request) -> None:
        """Have a thread compute what was put into the inbox. Raises what ``put`` does if there will be none."""
        with self._lock:
            refused = self._queue.closed and request.state == "waiting"
            if refused:
                self._queue.withdraw(request)
            else:
                self._watch.schedule(request.deadline)
            wakeup = self._find_thread()
        if wakeup is not None:
            wakeup.set()
        if refused or self._deferred or self._queue.undelivered:
            self._settle()
        if refused:
            raise GuardClosed(self.name)

    def _name_comparison(self, error: BaseException, requests: tuple[Request, ...]) -> None:
        """Refuse an item whose own code has raised, where its arguments are compared with others, and does so again."""
        try:
            with self._lock:
                for request in requests if isinstance(error, Exception) else ():
                    self._queue.find_place(request)
        except Exception as raised:  # noqa: BLE001 - whatever it raises
            why = f"its key or its keyword arguments cannot be compared with those of others: {told(raised)}"
            raise ItemRefused(self.name, why=why) from None

    def _withdraw(self, *requests: Request) -> None:
        """Undo an admission that an exception interrupted."""
        with self._lock:
            self._queue.withdraw(*requests)
        self._wake_all()  # also a thread that was chosen, and whose wakeup was never set
        self._settle()

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
        """Compute a request at once, in this thread if it may: in tests, and for the warm-up of a model."""
        scope = current_scope.get() or Scope()
        self._refuse_own_call(scope)
        if self._queue.closed:
            raise GuardClosed(self.name)
        request.state = "done"  # it never waits: a caller that leaves takes nothing out of the queue
        function, batch = replace(self._function, caught=Exception), Batch([request], clock.now())
        loop = PrivateLoop() if self._options.is_async else None
        if loop is not None:
            function = replace(function, run=partial(self._start, function.run, loop.run, loop.end))
        token = current_scope.set(Scope(enclosing=scope.enclosing | {self}))
        try:
            if isinstance(request, StreamRequest):
                request.state = "running"
                request.source = self._stream(function, batch, _end).on_demand(contextvars.copy_context())
                return
            with contextlib.nullcontext() if loop is None else contextlib.closing(loop):
                computed = compute(function, batch)
            request.deliver(computed.outcomes[0])
        finally:
            current_scope.reset(token)

    # Functions that are not simply called: awaited on an event loop, or stepped through

    def _run_on_loop(self, batch: Batch, answer: Answer) -> Computed:
        options, function = self._options, self._function
        if options.is_async:
            get_loop = partial(loop_of, batch.group) if options.own_loop is None else options.own_loop.get
            context = contextvars.copy_context() if options.streams else None  # the same one for all steps
            run = partial(run_on, get_loop, callers=batch, others_wait=self._others_wait, context=context)
            end = partial(run, cancel=False)
            function = replace(function, run=partial(self._start, function.run, run, end))
        if options.streams:
            return self._stream(function, batch, answer).compute()
        batch.watch()
        return compute(function, batch, answer)

    # No closure, which would have the batch: a frame keeps its function, also when it is emptied.
    def _start(self, run: Any, on_loop: RunOnLoop, end: RunOnLoop, items: list[Any], /, **extras: Any) -> Any:
        if self._options.streams:
            return AsyncSteps(run(items, **extras), on_loop, end)
        return on_loop(partial(run, items, **extras))

    def _stream(self, function: BatchFunction, batch: Batch, answer: Answer) -> StreamRun:
        return StreamRun(function, batch, answer, slow_after=self._slow_after, others_wait=self._others_wait)

    # What may interrupt a change of the queue is deferred, and what it decides is delivered without the lock.

    @property
    def _interrupted(self) -> bool:
        """Whether this thread holds the lock: then a finalizer or signal handler asks, in the middle of a change."""
        owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001 - as threading.Condition does
        return owned

    def cancel(self, request: Request, *, notify: bool = False) -> None:
        """Drop a request. With ``notify`` its caller still waits, and gets ``CallerGone``."""
        self._deferred.append((request, notify))
        if not self._interrupted:  # else the change ends first
            self._settle()
            self._report_refusals()

    def drop(self, request: Request) -> None:
        """:meth:`cancel` for the garbage collector, which may interrupt code that holds a lock: it waits for none.

        Who holds this one looks for what is deferred when it lets go.
        """
        self._deferred.append((request, False))
        if self._interrupted or not self._lock.acquire(blocking=False):
            return
        try:
            self._cancel_deferred()
        finally:
            self._lock.release()
        if self._queue.undelivered or self._queue.closed:
            self._settle()

    def _cancel_deferred(self) -> None:
        while self._deferred:
            request, notify = self._deferred.popleft()
            self._queue.cancel(request, notify=notify)

    def _settle(self, *, callbacks_elsewhere: bool = False) -> None:
        """Do what was deferred, and deliver the failures that the queue decided on. Called without the lock.

        Callbacks of futures may be run elsewhere, in another thread, so that this one is on time.
        """
        queue = self._queue
        pairs: list[tuple[Request, Failure]] = []
        try:
            with self._lock:
                self._cancel_deferred()
                pairs, queue.undelivered = queue.undelivered, []
                drained = queue.closed and queue.idle
            if callbacks_elsewhere and (futures := [pair for pair in pairs if pair[0].calls_back]):
                with contextlib.suppress(RuntimeError):  # no thread can be started: deliver them here
                    start_thread(partial(deliver, *zip(*futures, strict=True)), "modelguard-deliver")
                    pairs = [pair for pair in pairs if not pair[0].calls_back]
            if pairs:
                deliver(*zip(*pairs, strict=True))
        except BaseException:  # as in put: nobody may wait for ever for what this thread has taken out
            if pairs:
                deliver(*zip(*pairs, strict=True))  # again: who has an answer keeps it
            self._withdraw()
            raise
        if drained:
            with self._lock:
                if queue.closed and queue.idle:  # not reopened meanwhile
                    self._drained.set()
                    batchers.discard(self)

    def _others_wait(self) -> bool:
        return bool(self._queue.waiting or self._queue.inbox)

    def _refuse_interruption(self, method: str, fix: str) -> None:
        if self._interrupted:
            why = f"{method}() was called by a signal handler or a finalizer that interrupted a call"
            raise WouldDeadlock(self.name, why=why, fix=fix)

    # Threads. They start when there is work, and keep the batcher only while they have some.

    def _find_thread(self) -> Wakeup | None:
        """The wakeup of a thread without work. If there is none, start a thread, if more are allowed. With the lock."""
        wakeup = self._idle.pop() if self._idle else None
        if wakeup is None and len(self._wakeups) < self.limits.threads:
            self._start_thread()
        self._count_threads()
        return wakeup

    def _count_threads(self) -> None:
        self._lacking = bool(self._idle) or len(self._wakeups) < self.limits.threads

    def _start_thread(self) -> None:
        wakeup = Wakeup()
        holder: list[Batcher] = [self]
        self._wakeups.add(wakeup)
        try:
            start_thread(partial(_serve, holder, wakeup), f"modelguard-batch-{self.name}")
        except BaseException as error:
            with contextlib.suppress(IndexError):  # the thread was started all the same
                holder.pop()
                self._end_thread(wakeup)
            if not isinstance(error, RuntimeError):
                raise
            if not self._wakeups:
                self._queue.refuse_all(Overloaded(f"{self.name}(): cannot start a thread: {error}"))

    def _end_thread(self, wakeup: Wakeup) -> None:
        self._wakeups.discard(wakeup)
        if wakeup in self._idle:
            self._idle.remove(wakeup)
        self._count_threads()

    def _wake_all(self) -> None:
        """Have every thread look for work."""
        for wakeup in tuple(self._wakeups):
            wakeup.set()

    def turn(self, wakeup: Wakeup, *, expired: bool) -> float | None:
        """Compute a batch, if there is one, in the thread of this wakeup. Never raises.

        It may have waited in vain for as long as a thread does. Returns for how many seconds it waits for the next one;
        None if it has to end.
        """
        try:
            return self._turn(wakeup, expired=expired)
        except BaseException:  # noqa: BLE001 - a fault in this library; another thread takes over
            with contextlib.suppress(BaseException):
                logger.exception("modelguard: a thread of %s() failed", self.name)
            with self._lock:
                self._end_thread(wakeup)
                other = None if self._queue.idle else self._find_thread()
            if other is not None:
                other.set()
            return None

    def _turn(self, wakeup: Wakeup, *, expired: bool) -> float | None:
        queue, other, rest = self._queue, None, None
        ended = self._ended.pop(wakeup, math.inf)
        with self._lock:
            if wakeup in self._idle:
                self._idle.remove(wakeup)
                self._count_threads()
            found = queue.next_batch(clock.now())
            if isinstance(found, Batch):
                self._watch.schedule(found.started + self.limits.hang_after)
                if queue.waiting or queue.inbox:  # the rest may be due before this batch has ended
                    other = self._find_thread()
            else:
                rest = self._rest(wakeup, found, expired=expired)
        if other is not None:
            other.set()
        if queue.undelivered or self._deferred:
            self._settle()
        if not isinstance(found, Batch):
            return rest
        self._ended[wakeup] = self._compute(found, ended)
        del found  # tracebacks refer to this frame
        return 0.0

    def _rest(self, wakeup: Wakeup, seconds: float | None, *, expired: bool) -> float | None:
        """For how long a thread without work waits, of which there will be some then; None if it has to end.

        The inbox is looked at last. A call puts itself there, and then looks at what is written here.
        """
        if seconds is None and (self._queue.closed or expired):
            self._end_thread(wakeup)
            if not self._queue.inbox:
                return None
            self._wakeups.add(wakeup)
            return 0.0
        self._idle.append(wakeup)
        self._lacking = True
        if self._queue.inbox:  # since it was emptied, by a call that saw this one work
            return 0.0
        return LINGER if seconds is None else min(seconds, LINGER)

    def _compute(self, batch: Batch, ended: float) -> float:
        """Run a batch and deliver its answers; returns when its run ended.

        If this thread has come here straight from the end of the one before, what passed between the two runs (answers,
        plans, waits for the interpreter's lock) is part of what this one takes.
        """
        scope = self._scope
        if self._nested:
            scope = Scope(enclosing=scope.enclosing.union(*(request.enclosing for request in batch.requests)))
        started = clock.now()
        token = current_scope.set(scope)
        computed = self._run(batch, self._answer)
        current_scope.reset(token)  # what follows is outside of the batch function: callbacks of futures may call again
        now = clock.now()
        computed.empty_frames()
        seconds, between = now - started - computed.stalled, max(started - ended, 0.0)
        queue = self._queue
        with self._lock:
            try:
                queue.learn(batch, computed, seconds, now, between=between)
            except Exception:  # noqa: BLE001 - the answers are there, whatever becomes of the figures
                logger.exception("modelguard: %s() has not learned from a batch", self.name)
            queue.counters.bisected += bool(computed.reruns)
            requests, outcomes = queue.finish(batch, computed.outcomes, computed.failed)
            change = queue.record_verdict(batch, computed.verdict, now)
        # Before the answers: who gets one needs the interpreter's lock next, and finds the fresh model asked for.
        if change == "opened":
            self._ask_for_model()
        quiet = change is None and computed.error is None and self._events.quiet(queue)
        deliver(requests, outcomes)
        if queue.undelivered or queue.closed or self._deferred:
            self._settle()
        if not quiet:
            with self._going_on():
                self._events.batch_ended(batch, computed, queue, seconds=seconds, change=change)
                self._events.refused(queue, clock.now())
                self._report_refusals()
        del batch, computed, requests, outcomes  # tracebacks refer to this frame
        return now

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Neither an observer nor a closed guard may end a thread."""
        try:
            yield
        except Exception:  # noqa: BLE001 - as above
            logger.exception("modelguard: %s() goes on", self.name)

    def _answer(self, requests: list[Request], outcomes: list[Any]) -> None:
        with self._lock:
            requests, outcomes = self._queue.answer(requests, outcomes)
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
        self._settle(callbacks_elsewhere=True)
        hung, self._hung = self._hung, False
        with self._going_on():
            self._events.refused(self._queue, now)
            if hung:
                self._events.hung(self._queue, self.limits.hang_after)
        if hung:
            self._ask_for_model()

    def _ask_for_model(self) -> None:
        if self._breaker is not None and (source := self._breaker.reload) is not None:
            with self._going_on():
                source.reload(wait=False)

    def check_time(self) -> None:
        """Do what has become due because a test has moved the clock."""
        with self._lock:
            now = clock.now()
            self._check_time(now)
            if self._watch.due < math.inf:  # it waits for a time that was
                self._watch.schedule(now)
        self._wake_all()  # they may be waiting for a batch to become due
        self._settle()  # here: a test looks at its futures next
        self._after_check(now)

    def _report_refusals(self) -> None:
        """Have refusals reported within a second, also if no batch ends. Not by this thread: it may be a caller's."""
        if (due := self._events.refusals_due(self._queue.counters)) < self._watch.due:
            with self._lock:
                self._watch.schedule(due)

    # Closing

    def close(self, timeout: float, *, abandon: bool = False) -> None:
        """Admit nothing more, compute what waits, and refuse what still waits after so many seconds.

        If the process ends, what is still being computed then is abandoned too.
        """
        scope = current_scope.get()
        if scope is not None and self in scope.enclosing:
            why = "its batch function closes it, and would wait for itself"
            raise WouldDeadlock(self.name, why=why, fix="Close it outside of the batch function.")
        self._refuse_interruption("close", "Set a flag in the handler, and close when the program ends.")
        with self._lock:
            self._queue.close()
            drained = self._drained
        self._wake_all()
        self._settle()
        if drained.wait(timeout):
            drained.set()  # for others who wait
            return
        with self._lock:
            if self._drained is drained:  # not reopened meanwhile
                self._queue.refuse_all(GuardClosed(self.name), running=abandon)
        self._settle()

    def reopen(self) -> None:
        if not self._queue.closed:
            return
        with self._lock:
            self._queue.reopen()
            self._drained.set()  # for who still waits in close()
            self._drained = Wakeup()
            _list(self)

    @property
    def ready(self) -> bool:
        return not self._queue.closed and not self._queue.hung

    def status(self) -> BatchStatus:
        if self._deferred:
            self._settle()
        with self._lock:
            return self._queue.status(clock.now())


#: Of a thread that computes batches: whose they are.
_own = threading.local()


def _serve(holder: list[Batcher], wakeup: Wakeup) -> None:
    """Runs in each thread of a batcher. One that waits for work does not keep the batcher, nor its instance, alive."""
    batcher: Batcher | None
    try:
        batcher = holder.pop()
    except IndexError:  # whoever started this thread was interrupted meanwhile, and counts without it
        return
    _own.batcher = reference = weakref.ref(batcher)
    expired = False
    while batcher is not None:
        if (pause := batcher.turn(wakeup, expired=expired)) is None:
            return
        expired = False
        if pause:
            if pause >= LINGER:
                batcher = None
            expired = not wakeup.wait(pause) and pause >= LINGER
            batcher = reference()


#: Those of this process that are not closed for good: for readiness probes, and the end of the process. Used
#: without a lock: at any point the garbage collector may end the last request of a closed one, which is discarded then.
batchers: WeakRegistry[Batcher] = WeakRegistry()


def _list(batcher: Batcher) -> None:
    batchers.add(batcher)
    fork_hooks.before_exit("batches", _close_all)


def _close_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for batcher in batchers:
        batcher.close(max(0.0, until - time.monotonic()), abandon=True)
