"""The program of a mold: a fresh interpreter that loads a model once, and then only forks workers, which run the calls.

It has one thread while it serves, and never runs a call. Its owner starts it, and it ends with its owner.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import select
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, NoReturn

from modelguard import prefork
from modelguard._units import FunctionKind, type_name
from modelguard.errors import NotSupported, TransferRefused, text_of, told
from modelguard.isolation import _channel, _isolation_options, _processes, _supervisor
from modelguard.isolation._channel import AnswerKind, Channel, StreamStep, Unreadable
from modelguard.isolation._isolation_options import Source, source_of_stub
from modelguard.isolation._supervisor import Instructions
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.system import System
from modelguard.runtime import call_context, child_processes, fork_hooks
from modelguard.runtime.background import THREADS, green_threads
from modelguard.runtime.child_processes import exit_now, flush_output
from modelguard.telemetry import Reason


def main(control: int, news: int) -> NoReturn:
    """Load, report, fork on request, end with the owner."""
    fork_hooks.at_fork(
        fork_hooks.Rank.SERVER, in_child=lambda: child_processes.end_with_parent(os.getppid(), signal.SIGKILL)
    )
    for fd in (control, news):  # the owner waits for their end, so no program that the model starts may have them
        os.set_inheritable(fd, False)  # noqa: FBT003 - it takes no keywords
    channel = Channel(socket.socket(fileno=control))
    try:
        instructions: Instructions = channel.receive()
    except (EOFError, OSError):  # the owner is gone already
        exit_now(1)
    # While it loads, Python runs no signal handler in time.
    child_processes.end_with_parent(instructions.owner, signal.SIGKILL)
    reporter = _channel.Reporter(socket.socket(fileno=news), instructions.options.name)
    started = time.monotonic()
    plain = instructions.shared or instructions.options.stub is not None
    name, priority, beside_calls = instructions.options.name, instructions.priority, instructions.beside_calls
    with loading(channel, name, priority, beside_calls=beside_calls, plain=plain):
        mold = _Mold(channel, instructions, reporter)
    files = _supervisor.files() if instructions.shared else {}
    channel.send(("ready", time.monotonic() - started, files, mold.guard.version))
    if instructions.options.start == "fork":
        mold.serve()
    mold.become_spawned_worker()


@contextmanager
def loading(
    owner: Channel, name: str, priority: int, *, beside_calls: bool, plain: bool, unwrap: bool = True, status: int = 1
) -> Iterator[None]:
    """Load in the block, after other work if calls run meanwhile. An error is told the owner, and ends this process."""
    try:
        with _processes.at_lowest_priority(priority) if beside_calls else nullcontext():
            yield
    except BaseException as error:  # noqa: BLE001 - whatever an import or a loader raises is the load's failure
        with suppress(OSError):
            owner.send(("failed", *_channel.load_failure(error, name, plain=plain, unwrap=unwrap)))
        exit_now(status)


def unload(guards: Iterable[ModelGuard[Any]]) -> None:
    """Run the hooks of the models of a mold that ends. The memory comes back with the process, whatever they do."""
    for guard in guards:
        if guard.engine.options.unload is not None and guard.engine.state.current is not None:
            try:
                guard.close()
            except Exception:  # noqa: BLE001 - as above
                traceback.print_exc()


class _Mold:
    def __init__(self, control: Channel, instructions: Instructions, reporter: _channel.Reporter) -> None:
        self._control = control
        self._owner = instructions.owner
        self.options = instructions.options
        self._stub = self.options.stub
        self._priority = priority = instructions.priority
        self._children: dict[int, int] = {}
        self.worn: tuple[Reason, ...] = ()
        # prepare() has looked for threads by its own, better means.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        reporter.install(instructions.origin.levels)
        _processes.enter("importing")
        _supervisor.become_like(instructions.origin.preparation, main=self._stub is None)
        below, source = self._find(instructions)
        if (library := green_threads()) is not None:  # what is imported by now has Python's own
            why = f"the function's module or the main script patches threads with {library}, and a mold imports both"
            fix = 'Do that below if __name__ == "__main__":, or in the server'
            raise NotSupported("isolate", reason=f"{why}. {fix}")
        reporter.take_over()  # from what the imported modules have set up
        _supervisor.check_unchanged(instructions.code)
        self.function, self.guard = source
        _processes.enter("mold", below, self.function)
        engine = self.guard.engine
        # A spawned worker would have to keep what its loader's libraries start so.
        stands_back = self.options.start == "fork" or _processes.may_restore_priority(priority)
        behind_others = instructions.beside_calls and stands_back
        start_thread = functools.partial(_start_behind_others, priority) if behind_others else THREADS.start
        # No ticks: workers ask the policies themselves. No probes: the owner asks them.
        engine.system = System(ticks=False, probes=False, in_mold=True, start_thread=start_thread)
        if self._stub is not None:
            self._report_options(":".join(instructions.options.function), shared=instructions.shared)
        if instructions.options.start == "fork":
            self.guard.recycle_in_children(self._wear, takes_calls=False)
            # A mold lives for one generation and ends with everything in it, so no policy argues against it.
            prefork.prepare(self.guard, immortalize=prefork.immortalize_unsupported() is None)
            self._inherited = socket.socketpair()
        else:
            engine.checks.recycle_here(self._wear, renews=False)
            self.guard.load()

    def _find(self, instructions: Instructions) -> tuple[object, Source]:
        if self._stub is not None:
            self.kind: FunctionKind = self._stub.kind
            source = source_of_stub(self._stub, self.options.name, self.options.start)
            return source.function, source
        isolated = _isolation_options.find(self.options.function)
        self.kind = isolated.function_kind
        return isolated.isolated_function, isolated.source_for(instructions.key)

    def _report_options(self, target: str, *, shared: bool) -> None:
        """Tell the owner what its guard's author has chosen, and how its source is before the load."""
        from modelguard.isolation import _host  # which most molds do not need

        engine = self.guard.engine
        options = engine.options
        _host.check_shareable(options, "target", target)
        if shared:
            _host.check_shareable(options)
        self._control.send(("found", _host.for_broker(options), engine.checks.readings.before_load().files))

    def _wear(self, reasons: tuple[Reason, ...]) -> None:
        self.worn = reasons

    def serve(self) -> NoReturn:
        woken, wake = self._inherited
        for end in self._inherited:
            end.setblocking(False)  # noqa: FBT003 - its only parameter
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, child_processes.do_nothing)
        self._handle_signals()
        child_processes.end_with_parent(self._owner, signal.SIGTERM)
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(woken.fileno(), select.POLLIN)
        try:
            while True:
                asked = [fd for fd, _ in poll.poll()]
                with suppress(BlockingIOError):
                    woken.recv(4096)
                self._reap()
                if self._control.fileno() in asked:
                    self._obey()
                    while self._control.has_unread:
                        self._obey()
        except (EOFError, OSError):  # the owner is gone
            child_processes.kill_group(0)
            os._exit(0)

    def _obey(self) -> None:
        order, number, *beside_calls = self._control.receive()
        if order == "end":
            unload([self.guard])
            exit_now(0)
        # What a fresh worker does before its first call must not take the time of calls.
        with _processes.at_lower_priority(self._priority) if beside_calls == [True] else nullcontext():
            self._fork_worker(number)

    def _fork_worker(self, number: int) -> None:
        try:
            fd = self._control.take_fd()
        except Unreadable as error:
            self._control.send(("unborn", number, str(error)))
            return
        flush_output()  # otherwise the content of the buffers is written twice
        # Until the worker has handlers of its own, too, neither ends it: what is ignored stays ignored while the guards
        # of the mold warm up in it.
        _on_ending(signal.SIG_IGN)
        try:
            pid = os.fork()
        except OSError as error:
            self._handle_signals()
            os.close(fd)
            self._control.send(("unborn", number, str(error)))
            return
        if pid == 0:
            self._become_worker(fd)
        self._handle_signals()
        os.close(fd)
        self._children[pid] = number
        pidfd = child_processes.open_pidfd(pid)  # before anything can reap it, so that it is this child's
        fds = [] if pidfd is None else [pidfd]
        try:
            self._control.send(("born", number, pid, len(fds)), fds)
        finally:
            for one in fds:
                os.close(one)

    def _reap(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                number = self._children.pop(pid)
                self._control.send(("exit", number, os.waitstatus_to_exitcode(status)))

    def _handle_signals(self) -> None:
        signal.signal(signal.SIGINT, child_processes.do_nothing)  # the owner decides when its workers end
        signal.signal(signal.SIGTERM, lambda *_: self._end_if_orphan())
        self._end_if_orphan()  # its owner's end may have been signalled while signals were ignored

    def _end_if_orphan(self) -> None:
        if os.getppid() != self._owner:
            child_processes.kill_group(0)

    # In the child

    def _become_worker(self, fd: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _on_ending(child_processes.do_nothing)
            self._control.close()
            for end in self._inherited:
                end.close()
            prefork.in_child()
            self._work(fd)
            _processes.lower_priority(self._priority)  # to give back the memory takes a while
            exit_now(0)
        except BaseException:  # noqa: BLE001 - above this are frames of the mold, which must not run here
            traceback.print_exc()
        exit_now(1)

    def become_spawned_worker(self) -> NoReturn:
        """Take calls in this process, which no fork made. It dies with its owner, by SIGKILL as while it loads."""
        _on_ending(child_processes.do_nothing)
        try:
            self._control.receive()
            self._work(self._control.take_fd())
        except (EOFError, OSError):  # the owner is gone
            exit_now(0)
        unload([self.guard])
        exit_now(0)

    def _work(self, fd: int) -> None:
        _processes.set_oom_score(_processes.OOM_SCORE)
        _processes.restore_priorities(self._priority)
        _processes.enter("worker")
        with closing(Channel(socket.socket(fileno=fd))) as channel:  # else Python's development mode complains
            Serving(self, channel).run()


def _start_behind_others(priority: int, work: Callable[[], None], name: str) -> None:
    def behind_others() -> None:
        _processes.lower_priority(priority)
        work()

    THREADS.start(behind_others, name)


def _on_ending(action: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Set what the signals do that a service manager or a terminal may send to all processes of a service."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, action)


#: Seconds between two looks at what policies read besides the calls themselves, such as memory.
_LOOK = 0.05

#: Characters of the text and of the traceback of an error that is too large: enough for a person.
_SHORT = 2000


class Serving:
    """Computes the calls of a worker, one after the other."""

    def __init__(self, mold: _Mold, channel: Channel) -> None:
        self._mold = mold
        self._channel = channel
        self._name = mold.options.name
        self._call = mold.function
        self._kind = mold.kind
        self._max_bytes = mold.options.bounds.transfer
        self._asks_policies = mold.guard.engine.options.reload_on is not None
        self._pid = os.getpid()
        self._look_again = 0.0
        self._runner: asyncio.Runner | None = None

    def run(self) -> None:
        try:
            self._answer(AnswerKind.READY, os.getpid())
            while True:
                self._serve_one()
                if self._asks_policies and time.monotonic() >= self._look_again:
                    self._mold.guard.check()
                    self._look_again = time.monotonic() + _LOOK
        except (EOFError, OSError):  # of the channel: the model's own errors go to the caller
            return

    def _serve_one(self) -> None:
        try:
            args, kwargs, carrier, again = self._receive()
        except Unreadable as error:
            self._refuse("arguments", f"the worker cannot rebuild them: {error}")
            return
        call_context.rerunning.set(again)
        leave_trace = None if carrier is None else _channel.attach(carrier)
        try:
            if "generator" in self._kind:
                self._stream(args, kwargs)
                return
            result = self._call(*args, **kwargs)
            if self._kind == "coroutine":
                result = self._run(result)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._fail(error)
            return
        finally:
            if leave_trace is not None:
                leave_trace()
        self._answer(AnswerKind.RESULT, result)

    def _run(self, coroutine: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine, context=contextvars.copy_context())

    def _stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a generator one step at a time, so that it computes no more than its caller asks for."""
        items = self._call(*args, **kwargs)
        asynchronous = self._kind == "async generator"
        self._answer(AnswerKind.ITEM, None)
        while self._receive() == StreamStep.NEXT:
            try:
                item = self._run(_next(items)) if asynchronous else next(items)
            except (StopIteration, StopAsyncIteration):
                break
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                self._fail(error)
                return
            if not self._answer(AnswerKind.ITEM, item):
                _close(items, self._run)
                return
        else:
            _close(items, self._run)
        self._answer(AnswerKind.END, None)

    # Messages. All that runs between two of them may fork, and go on here in both processes: a call, a step of a
    # stream, pickling, a policy.

    def _receive(self) -> Any:
        self._stay_in_own_process()
        return self._channel.receive()

    def _send(self, content: _channel.Content) -> None:
        self._stay_in_own_process()
        self._channel.send_pickled(*content)

    def _stay_in_own_process(self) -> None:
        """End a process that the model has forked: its parent answers."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _answer(self, kind: AnswerKind, value: object) -> bool:
        """Send an answer; false if its value could not be sent, and the owner got an error instead."""
        try:
            content = _channel.dumps((int(kind), value, self._mold.worn))
        except BaseException as error:  # noqa: BLE001 - pickling runs any code
            why = f"{_describe(value)}: {told(error)}"
        else:
            if (size := _channel.size(content)) <= self._max_bytes:
                self._send(content)
                return True
            why = f"{_describe(value)} takes {size:,} bytes, and Bounds(transfer=) is {self._max_bytes:,}"
        self._refuse("result", why)
        return False

    def _refuse(self, what: Any, why: str) -> None:
        self._fail(TransferRefused(self._name, what=what, why=why))

    def _fail(self, error: BaseException) -> None:
        text = None if error.__traceback__ is None else "".join(traceback.format_exception(error))  # it was not raised
        sent = _channel.portable(error, self._name, plain=self._mold.options.stub is not None)
        content = _channel.dumps((int(AnswerKind.ERROR), (sent, text), self._mold.worn))
        size = _channel.size(content)
        if size > self._max_bytes:
            why = f"; the error takes {size:,} bytes, and Bounds(transfer=) is {self._max_bytes:,}"
            short = _channel.described(error, self._name, text_of(error)[:_SHORT] + why)
            trace = None if text is None else text[-_SHORT:]
            content = _channel.dumps((int(AnswerKind.ERROR), (short, trace), self._mold.worn))
        self._send(content)


def _describe(value: object) -> str:
    kind = type(value)
    with suppress(BaseException):  # any code, as pickling runs it; of a lazy result, what a guard's proxy stands for
        kind = value.__class__
    hint = "; write a generator function, so that its items are streamed" if hasattr(kind, "__next__") else ""
    return f"an object of type {type_name(kind)}{hint}"


async def _next(items: Any) -> Any:
    return await anext(items)


def _close(items: Any, run: Callable[[Any], Any]) -> None:
    with suppress(Exception):
        if hasattr(items, "aclose"):
            run(items.aclose())
        else:
            items.close()
