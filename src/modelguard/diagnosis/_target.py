"""The function that is driven, and the inputs that it is called with in turn. Runs in the driven process."""

import asyncio
import contextlib
import dataclasses
import errno
import faulthandler
import functools
import inspect
import itertools
import json
import math
import os
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from modelguard import _units
from modelguard.diagnosis._counts import Exhausted
from modelguard.errors import ModelGuardError
from modelguard.facts import _memory, _proc
from modelguard.runtime import child_processes

Say = Callable[..., None]

#: Asks a process for what it stands in, or knows: in the middle of the real-time signals, of which servers and
#: libraries use the first and the last ones. There are none on macOS.
SIGNAL = int(getattr(signal, "SIGRTMIN", 0)) + 9

#: Errors of what the user has given. The messages of others may hold a secret.
_TOLD = (ImportError, AttributeError, NameError, SyntaxError, ValueError, TypeError, ModelGuardError)

#: Seconds that a replacement of workers may take, and between two looks.
_REPLACED, PAUSE = 10.0, 0.05

#: Seconds between two looks at how long a call takes.
_LOOK = 0.25

#: Positional arguments, and arguments by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Patience:
    """Writes down where a call stands that does not return: the parent then ends the process, and all below it.

    The C thread of faulthandler does it: it needs neither the interpreter's lock nor a signal.
    """

    def __init__(self, seconds: float, stream: IO[str]) -> None:
        self._seconds, self._stream = seconds, stream
        self._renewed = -math.inf
        # A forked child has no such thread, and would wait for it at its end.
        os.register_at_fork(before=faulthandler.cancel_dump_traceback_later, after_in_parent=self._again)

    def begin(self, seconds: float | None = None) -> bool:
        """It may take so long from now on; returns whether it was time to look."""
        now = time.monotonic()
        if now < self._renewed + _LOOK:
            return False
        self._renewed = now
        self._arm(seconds)
        return True

    def _arm(self, seconds: float | None = None) -> None:
        faulthandler.dump_traceback_later(seconds or self._seconds + _LOOK, file=self._stream)

    def _again(self) -> None:
        if self._renewed > 0:
            self._arm()

    def end(self) -> None:
        self._renewed = -math.inf
        faulthandler.cancel_dump_traceback_later()

    def watch(self, loop: asyncio.AbstractEventLoop, coroutine: Any) -> asyncio.TimerHandle:
        """The same for a coroutine that waits: its thread only shows the event loop."""
        return loop.call_later(self._seconds, self._write, coroutine)

    def _write(self, coroutine: Any) -> None:
        self.end()
        frames: list[str] = []
        while coroutine is not None:
            frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
            if frame is not None:
                code = frame.f_code
                frames.insert(0, f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}\n')
            coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
        self._stream.write("Thread (most recent call first):\n" + "".join(frames))
        self._stream.flush()


class Target:
    def __init__(
        self,
        function: Callable[..., Any],
        given: Iterator[Arguments],
        patience: Patience,
        *,
        asynchronous: bool = False,
        around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self._look = look
        self._patience = patience
        self._function = function
        self._inputs = given
        self._around = around
        self._taken = 0
        self._pid, self._folder = os.getpid(), Path.cwd()  # calls may leave it, or remove it
        self._in_loop = asynchronous or _units.function_kind(function) == "coroutine"
        self.calls = 0
        self.failures = self.failed = 0
        self.errors: dict[str, None] = {}
        self.timed = False
        self.seconds: list[float] = []

    def next_input(self) -> Arguments:
        for item in self._inputs:
            self._taken += 1
            return item
        raise ValueError(f"the generator ended after {self._taken:,} inputs, and must go on without end")

    def forget(self) -> None:
        self.calls = self.failures = 0
        self.errors.clear()
        self.seconds.clear()

    def run(self, count: int, until: float, given: Callable[[], Arguments] | None = None) -> int:
        """Call it so many times, or until the time is up; returns how many calls were made."""
        calls = self._run(count, until, given or self.next_input)
        try:
            if self._in_loop:
                return self._loop.run_until_complete(calls)
            calls.send(None)  # nothing is awaited, so it comes to its end
        except StopIteration as end:
            made: int = end.value
            return made
        finally:
            self._patience.end()
        raise AssertionError

    @functools.cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    async def _run(self, count: int, until: float, take: Callable[[], Arguments]) -> int:
        for done in range(count):
            given, named = take()
            with self._counted(), self._around():
                result = self._function(*given, **named)
                if self._in_loop:
                    await self._awaited(result)
                elif inspect.isawaitable(result) or hasattr(type(result), "__anext__"):
                    self._loop.run_until_complete(self._awaited(result))  # of a function that does not say so
                elif hasattr(type(result), "__next__"):
                    deque(result, maxlen=0)
            if time.monotonic() > until:
                return done + 1
        return count

    async def _awaited(self, result: Awaitable[object] | AsyncIterator[object]) -> None:
        timer = self._patience.watch(self._loop, result)
        try:
            if isinstance(result, AsyncIterator):
                async for _ in result:
                    pass
            else:
                await result
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.calls += 1
        if self._patience.begin():
            self._look()
        began = time.perf_counter()
        try:
            yield
        except (Exhausted, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - failures are counted, those of sys.exit() and timeouts too
            self.failures += 1
            self.failed = self.failed or self._taken
            self.errors[_described(error, self._folder)] = None
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                self._look()  # which ends it if this process has none left
        if os.getpid() != self._pid:
            os._exit(0)  # a process that the function has forked, and that came back from the call
        if self.timed:
            self.seconds.append(time.perf_counter() - began)


def _described(error: BaseException, here: Path) -> str:
    """The type of an error and where it came from. Its message may hold personal data, and is not told."""
    every = traceback.extract_tb(error.__traceback__)
    own = [each for each in every if not Path(each.filename).is_relative_to(_PACKAGE)]
    near = [each for each in own if Path(each.filename).is_relative_to(here) and "site-packages" not in each.filename]
    if not own:
        return type(error).__name__
    last = (near or own)[-1]
    return f"{type(error).__name__} at {_relative(Path(last.filename), here)}:{last.lineno}"


def _relative(path: Path, folder: Path) -> Path:
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def run_program(program: Callable[[dict[str, Any], Say, Patience], None]) -> None:
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    stack = Path(config["stack"]).open("a", encoding="utf-8")  # noqa: SIM115 - it is open to the end

    def say(**line: Any) -> None:
        with Path(config["answer"]).open("a", encoding="utf-8") as stream:  # anew: the function may close it
            stream.write(json.dumps(line, default=dataclasses.asdict) + "\n")

    sys.path.insert(0, str(Path.cwd()))
    faulthandler.enable(stack)
    faulthandler.register(SIGNAL, file=stack)
    try:
        program(config, say, Patience(float(config["patience"]), stack))
    except Exception as error:
        say(error=f"{type(error).__name__}", message=str(error) if isinstance(error, _TOLD) else "")
        raise
    os._exit(0)  # whatever threads the function has left


def load(name: str) -> Any:
    """Import a function that is given as ``"module:function"``."""
    found = pkgutil.resolve_name(name)
    if not callable(found):
        raise TypeError(f"{name} is not callable")
    return found


def held_by_workers() -> int:
    """Private memory of the workers of isolated functions: what these keep is there, and not in their caller."""
    registry = sys.modules.get("modelguard.isolation.status")
    functions = () if registry is None else registry.functions
    return sum(_memory.private_of(pid) for pid in settled_workers(functions, time.monotonic() + _REPLACED))


def settled_workers(functions: Iterable[Any], until: float, sleep: Callable[[float], None] = time.sleep) -> list[int]:
    """The workers of isolated functions, when none is being replaced: a new one beside the old one is no growth."""
    before: list[int] | None = None
    while True:
        workers = [worker for function in functions for worker in function.status().workers]
        pids = [worker.pid for worker in workers if worker.pid]
        settled = all(worker.state in ("idle", "busy") and not worker.worn and worker.pid for worker in workers)
        # In two looks: the next spare one is started a little after the last one has taken its place.
        if not workers or (settled and pids == before) or time.monotonic() >= until:
            return pids
        before = pids if settled else None
        sleep(PAUSE)


def inputs(config: Mapping[str, Any], function: Callable[..., Any]) -> Iterator[Arguments]:
    """The inputs of a configuration: generated, from a file and repeated, or none."""
    if config["generate"]:
        return (_as_arguments(each) for each in load(config["generate"])())
    given = [_as_arguments(each) for each in config["inputs"] or [()]]
    with suppress(ValueError):  # functions of C have no signature
        signature = inspect.signature(function)
        for number, (positional, named) in enumerate(given, start=1):
            try:
                signature.bind(*positional, **named)
            except TypeError as error:
                which = f"input {number}" if config["inputs"] else "neither --inputs nor --generate is given"
                raise TypeError(f"{which}: {error}") from None
    return itertools.cycle(given)


def _as_arguments(given: Any) -> Arguments:
    if isinstance(given, dict):
        return (), given
    return (tuple(given) if isinstance(given, list | tuple) else (given,)), {}


# The other end: the process that starts the program, and follows what it says.

_LOOK_PAUSE = 0.1
#: Seconds in which a process writes down where it stands.
_ANSWER = 1.0
#: Looks at which it runs on, with its stack written down: so it has not crashed.
_STUCK = 5
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
#: Where the driven program enters the code of the user.
_CALLED = re.compile(r'_target\.py", line \d+ in (?:_run|_awaited|next_input|load)\b')
_PACKAGE = Path(__file__).parents[1]

Progress = Callable[[Mapping[str, Any]], None]

#: How a program ended: it said that it is done, its process ended before that, a call did not return, it took longer
#: than it may, or the user has interrupted it.
End = Literal["done", "exited", "silent", "late", "interrupted"]


@dataclass(frozen=True, slots=True)
class Said:
    """What a program has said, how it ended, and where it stood then: the call first, as ``app.py:3 in f``."""

    lines: tuple[Mapping[str, Any], ...]
    end: End
    status: int | None = None
    stack: tuple[str, ...] = ()
    seconds: float = 0.0

    def last(self, name: str) -> Any:
        return next((line[name] for line in reversed(self.lines) if name in line), None)


def command() -> list[str]:
    """The command that runs the driven program; the file of its configuration follows."""
    return [sys.executable, "-m", "modelguard.diagnosis._driven_program"]


@contextlib.contextmanager
def in_session(
    words: Sequence[str], stop: Callable[[subprocess.Popen[bytes]], None], *, output: Any, ends_by: int, **given: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own, and stop it at the end of the block. No signal comes in between.

    Where this process is killed, the kernel sends ``ends_by`` to the command.
    """
    parent, mask, process = os.getpid(), child_processes.block(), None

    def prepare() -> None:
        child_processes.end_with_parent(parent, ends_by)
        child_processes.restore_mask(mask)

    try:
        process = subprocess.Popen[bytes](  # this very Python, or the command that the user has given
            [*words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,  # it takes no lock
            **given,
        )
        child_processes.restore_mask(mask)
        yield process
    finally:
        child_processes.block()
        try:
            if process is not None:
                stop(process)
        finally:
            child_processes.restore_mask(mask)


def follow(
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    cwd: Path,
    *,
    progress: Progress,
    silence: float,
    limit: float = math.inf,
) -> Said:
    """Run a program, and kill it with all that it has started as soon as it is done, or a signal ends this process."""
    with child_processes.ending_signals(), tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        answer, given, stack = (Path(folder, name) for name in ("answer", "config", "stack"))
        for file in (answer, stack):
            file.touch()
        # In a file: the words of a command are limited to 128 kB each.
        given.write_text(json.dumps({**config, "answer": str(answer), "stack": str(stack)}), encoding="utf-8")
        words, began, null = [*command(), str(given)], time.monotonic(), subprocess.DEVNULL
        with in_session(words, _end, output=null, ends_by=signal.SIGKILL, env=environ, cwd=cwd) as process:
            said = _follow(process, answer, progress, silence, limit)
            if said.end in ("interrupted", "silent") and not stack.stat().st_size:
                _ask(process, stack)
            seconds = time.monotonic() - began
            return dataclasses.replace(said, stack=_frames(stack.read_text(encoding="utf-8"), cwd), seconds=seconds)


def _ask(process: subprocess.Popen[bytes], stack: Path) -> None:
    """Let it write down where it stands; faulthandler's handler needs no lock of the interpreter."""
    process.send_signal(SIGNAL)  # nothing is sent to one that has ended
    until = time.monotonic() + _ANSWER
    while not stack.stat().st_size and process.poll() is None and time.monotonic() < until:
        time.sleep(_LOOK_PAUSE / 2)
    time.sleep(_LOOK_PAUSE / 2)  # the rest of it


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and all that it has started, also what has left its group."""
    started = [each.pid for each in _proc.tree(process.pid)]
    child_processes.kill_group(process.pid)
    child_processes.kill(started)
    process.wait()


def _frames(text: str, cwd: Path) -> tuple[str, ...]:
    """The frames above those of this package, from what faulthandler has written: the thread that calls comes last."""
    *_, last = re.split(r"^(?:Current thread|Thread|Stack) .*$", text, flags=re.MULTILINE)
    if str(_PACKAGE) in last and not _CALLED.search(last):
        return ()  # it was reading, and not in a call
    found: list[str] = []
    for file, line, name in _FRAME.findall(last):
        path = Path(file)
        if path.is_relative_to(_PACKAGE):
            if found:
                break
            continue
        found.append(f"{_relative(path, cwd)}:{line} in {name}")
    return tuple(found)


def _follow(process: subprocess.Popen[bytes], answer: Path, progress: Progress, silence: float, limit: float) -> Said:
    lines: list[Mapping[str, Any]] = []
    began = heard = time.monotonic()
    stuck, stack = 0, answer.with_name("stack")
    end: End | None = None
    try:
        while end is None:
            ended = process.poll() is not None
            text = answer.read_text(encoding="utf-8").splitlines(keepends=True)
            new = [json.loads(line) for line in text[len(lines) :] if line.endswith("\n")]
            lines += new
            for line in new:
                progress(line)
            now = time.monotonic()
            heard = now if new else heard
            stuck += bool(stack.stat().st_size)  # once: it may also be crashing
            if lines and (lines[-1].get("done") or "error" in lines[-1]):
                end = "done"
            elif ended:
                end = "exited"
            elif now > heard + silence or stuck > _STUCK:
                end = "silent"
            elif now > began + limit:
                end = "late"
            else:
                time.sleep(_LOOK_PAUSE)
    except KeyboardInterrupt:
        end = "interrupted"
    return Said(tuple(lines), end, process.returncode if end in ("done", "exited") else None)
