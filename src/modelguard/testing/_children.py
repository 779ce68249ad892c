"""Processes that a test starts: ``modelguard_env``, and ``assert_shared_after_fork``, which forks a reader."""

import gc
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from modelguard import _units
from modelguard.environment import _launcher, _presets
from modelguard.errors import ForkHazard, InvalidOption, NotSupported
from modelguard.facts import _memory
from modelguard.lifecycle import _models
from modelguard.lifecycle.guard import ModelGuard
from modelguard.runtime.child_processes import run_trial
from modelguard.sharing import _graph, _prefork
from modelguard.sharing._prefork import Immortalize
from modelguard.testing._loader import OfTest

#: Bytes of the smallest model that can be tested: any forked interpreter copies about this much.
_SMALLEST = 4_000_000
_NOISE = 1_000_000
_COPIED_PART = 0.2

Reader = Callable[[Any], object]

_UNPREPARED = "it was forked without preparation; give its guard"
_ELSEWHERE = "none of its objects; then its own code, or a library, writes to it while it is read"
_ADVICE = (
    "What stayed mortal: {}. Keep large data in arrays, or make it immortal: immortalize=True, CPython 3.12 or newer"
)


def assert_shared_after_fork(
    model: Any,
    read: Reader,
    *,
    tolerance: int | str | None = None,
    immortalize: Immortalize = "auto",
    timeout: _units.Duration = 60.0,
) -> None:
    """Fork, read the model in the child, and fail if this has copied the model in the child.

    A :class:`~modelguard.ModelGuard` is first prepared for the fork, as ``prefork.prepare`` and the servers' hooks do
    it, in a separate child, so that this process does not change. What they leave mortal, such as a model with ``TTL``
    or one of less than 16 MB, is mortal here. Any other model is forked without preparation. Reading an ordinary
    Python object writes to it (to its reference count), which copies its page; reading arrays and tensors writes
    nothing.

    Args:
        model: The model, or its guard.
        read: Called with the model in the child; it should read all of the model, as many requests would.
        tolerance: How much may be copied, such as ``"10 MB"``. Default: a fifth of the model, and at least 1 MB.
        immortalize: As in your call of ``prefork.prepare``, or in ``MODELGUARD_IMMORTALIZE``.
        timeout: How long the child may take. Default: one minute.

    Raises:
        AssertionError: More was copied, or the child failed or hung; the message contains the child's output.
        InvalidOption: ``read`` is not callable, ``immortalize`` is no such choice, or the model takes less than 4 MB,
            which is too small to test.
        NotSupported: This is not Linux, or the memory that a process has written cannot be read; or
            ``immortalize=True`` in an interpreter without immortal objects.
        LoadFailed: The guard's model could not be loaded.
    """
    __tracebackhide__ = True
    _units.function(read, "read", "the model", fix="Give for example lambda model: model('a text').", arguments=1)
    if not sys.platform.startswith("linux"):
        raise NotSupported("assert_shared_after_fork", reason=f"it requires Linux, and this is {sys.platform}")
    _prefork.check_immortalize(immortalize)
    allowed = None if tolerance is None else _units.size(tolerance, "tolerance")
    wait = _units.seconds(timeout, "timeout")
    taken = _size_of(model)
    if taken < _SMALLEST:
        why = f"takes {_units.format_bytes(taken)}, and any forked child copies about that much"
        raise InvalidOption("model", model, why=why, fix="Test with a model of 4 MB or more.")
    bound = max(_NOISE, int(taken * _COPIED_PART)) if allowed is None else allowed
    copied, why_mortal = _in_child(lambda: _prepared(model, read, immortalize, wait), wait)
    if copied > bound:
        raise AssertionError(
            f"reading the model copied {_units.format_bytes(copied)} of its {_units.format_bytes(taken)} in a forked "
            f"child; {_units.format_bytes(bound)} are allowed. Reading a Python object writes to it, which copies its "
            f"page, even if it is frozen, unless it is immortal. {_ADVICE.format(why_mortal or _UNPREPARED)}"
        )


def _prepared(model: Any, read: Reader, immortalize: Immortalize, timeout: float) -> tuple[int, str]:
    if not isinstance(model, ModelGuard):
        return _copied(model, read), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForkHazard)  # such as the event loops of the test process; a server has its own
        report = _prefork.prepare(model, warm_timeout=timeout, immortalize=immortalize)
    made = report.immortal
    why = report.why_mortal or "; ".join(map(str, made.mortal if made else ())) or _ELSEWHERE
    with model.lease() as leased:
        copied, _ = _in_child(lambda: (_copied(leased, read), ""), timeout)
    return copied, why


def _copied(model: Any, read: Reader) -> int:
    gc.disable()  # a collection writes to objects that are not frozen, even without a read
    _memory.private(fresh=True)  # its own code and buffers are copied now
    before = _memory.private(fresh=True)
    read(model)
    return max(0, _memory.private(fresh=True) - before)


def _in_child(work: Callable[[], tuple[int, str]], timeout: float) -> tuple[int, str]:
    """Fork, and read a number and a text from the child."""
    with warnings.catch_warnings():
        # The child uses none of its threads.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        result = run_trial(lambda: "{} {}".format(*work()), timeout)
    if not result.ok:
        how = f"did not end within {timeout:g} s" if result.hung else "failed"
        raise AssertionError(f"the forked child that reads the model {how}:\n{result.report}")
    number, _, text = result.report.partition(" ")
    return int(number), text


def _size_of(model: Any) -> int:
    if isinstance(model, ModelGuard):
        with model.lease() as leased:
            return _size_of(leased)
    reported = _models.find(model).size(model) or 0
    return max(reported, _graph.measure(model))


# ``modelguard_env``: runs a program in a separate process, with a preset and an allocator.

_OUTPUT = 3000


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that ended successfully.

    Attributes:
        stdout: Its standard output.
        stderr: Its standard error output.
        environ: The variables that it got from the preset, the allocator and the test.
        notes: The notes that ``modelguard run`` would have printed.
    """

    stdout: str
    stderr: str
    environ: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The lines of its standard output."""
        return self.stdout.splitlines()


class Env(OfTest):
    """Runs programs as ``modelguard run`` does: the variables of a preset are set when the interpreter starts.

    If this process has its own values for variables of the preset, as on a CI machine, they are ignored.
    """

    def __init__(self, test: str) -> None:
        super().__init__("modelguard_env", test)

    def __call__(
        self,
        program: str,
        *,
        preset: str | _presets.Preset | None = None,
        allocator: _launcher.Allocator = "none",
        environ: Mapping[str, str] | None = None,
        timeout: _units.Duration = 60.0,
    ) -> Finished:
        """Run Python source in a new process of the same interpreter, in the current folder.

        Args:
            program: The source; it may be indented as a whole.
            preset: A preset, or names of presets, separated by commas: ``"torch-cpu,low-memory"``.
            allocator: What serves ``malloc``, as for ``modelguard run``.
            environ: Additional variables. They take precedence over the preset, like a user's own variables.
            timeout: How long it may take. Default: one minute.

        Returns:
            The finished program.

        Raises:
            InvalidOption: The program is empty, there is no such preset, the allocator is not available, or a variable
                is none.
            NotSupported: An allocator was named, but nothing can be preloaded here.
            AssertionError: The program failed or did not end; the message contains its output.
        """
        self._require_test(program)
        if not isinstance(program, str) or not program.strip():
            fix = "Give Python source, such as 'import os; print(os.environ)'."
            raise InvalidOption("program", program, why="must be Python source, and not empty", fix=fix)
        wanted, own = _preset(preset), _variables(environ or {})
        replaced = () if wanted is None else {knob.name for knob in wanted.knobs}
        inherited = {name: value for name, value in _launcher.inherited().items() if name not in replaced}
        words = [sys.executable, "-c", textwrap.dedent(program)]
        plan = _launcher.plan(words, preset=wanted, allocator=allocator, environ=inherited | own)
        return _finished(plan, own, _units.seconds(timeout, "timeout"))


def _preset(preset: str | _presets.Preset | None) -> _presets.Preset | None:
    if isinstance(preset, str):
        return reduce(or_, (_presets.get(name.strip()) for name in preset.split(",")))
    fix = "Give the name of a preset, or the result of presets.get()."
    return None if preset is None else _units.instance(preset, "preset", _presets.Preset, "a preset", fix=fix)


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(environ, Mapping) or not all(_is_variable(*one) for one in environ.items()):
        why = "must have names and values of text, without '=' in a name and without null characters"
        raise InvalidOption("environ", environ, why=why, fix="Write environ={'OMP_NUM_THREADS': '5'}.")
    return dict(environ)


def _is_variable(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, str) and "=" not in name and "\0" not in name + value


def _finished(plan: _launcher.Plan, own: Mapping[str, str], timeout: float) -> Finished:
    command: Any = [plan.program, *plan.argv[1:]]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter
            command, env=dict(plan.environ), capture_output=True, errors="replace", check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise _unfinished(f"did not end within {timeout:g} s", error.stdout, error.stderr) from None
    if done.returncode:
        raise _unfinished(f"ended with {done.returncode}", done.stdout, done.stderr)
    return Finished(done.stdout, done.stderr, {**plan.added, **own}, plan.notes)


def _unfinished(how: str, *outputs: str | bytes | None) -> AssertionError:
    texts = (each.decode(errors="replace") if isinstance(each, bytes) else each or "" for each in outputs)
    return AssertionError(f"the program {how}\n" + "".join(text[-_OUTPUT:] for text in texts))
