"""``modelguard_env``: runs a program in a separate process, with a preset and an allocator."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from modelguard import _units
from modelguard.environment import _launcher, _presets
from modelguard.errors import InvalidOption

__all__ = ["Env", "Finished"]

_TAIL = 3000


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


class Env:
    """Runs programs as ``modelguard run`` does: the variables of a preset are set when the interpreter starts.

    If this process has its own values for variables of the preset, as on a CI machine, they are ignored.
    """

    def __init__(self, test: str) -> None:
        self._test = test
        self._over = False

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
            InvalidOption: The program is empty, there is no such preset, or the allocator is not available.
            NotSupported: An allocator was named, but nothing can be preloaded here.
            AssertionError: The program failed or did not end; the message contains its output.
        """
        if self._over:
            why = f"belongs to {self._test}, which has ended"
            fix = "Request the fixture in each test that uses it."
            raise InvalidOption("modelguard_env", program, why=why, fix=fix)
        if not isinstance(program, str) or not program.strip():
            fix = "Give Python source, such as 'import os; print(os.environ)'."
            raise InvalidOption("program", program, why="must be Python source, and not empty", fix=fix)
        wanted = _preset(preset)
        own = dict(environ or {})
        inherited = {
            name: value
            for name, value in _launcher.inherited().items() | dict(os.environ).items()
            if wanted is None or name not in {knob.name for knob in wanted.knobs}
        }
        plan = _launcher.plan(
            [sys.executable, "-c", textwrap.dedent(program)],
            preset=wanted,
            allocator=allocator,
            environ=inherited | own,
        )
        return _finished(plan, own, _units.seconds(timeout, "timeout"))

    def end(self) -> None:
        """End the test."""
        self._over = True


def _preset(preset: str | _presets.Preset | None) -> _presets.Preset | None:
    if not isinstance(preset, str):
        if preset is None or isinstance(preset, _presets.Preset):
            return preset
        fix = "Give the name of a preset, or the result of presets.get()."
        raise InvalidOption("preset", preset, why=f"must be a preset, not {_units.kind_of(preset)}", fix=fix)
    return reduce(or_, (_presets.get(name.strip()) for name in preset.split(",")))


def _finished(plan: _launcher.Plan, own: Mapping[str, str], timeout: float) -> Finished:
    command: Any = [plan.program, *plan.argv[1:]]
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter
            command, env=dict(plan.environ), capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        stderr = error.stderr or b""
        text = stderr if isinstance(stderr, str) else stderr.decode(errors="replace")
        raise AssertionError(f"the program did not end within {timeout:g} s\n{text[-_TAIL:]}") from None
    if done.returncode:
        raise AssertionError(f"the program ended with {done.returncode}\n{done.stdout[-_TAIL:]}{done.stderr[-_TAIL:]}")
    return Finished(done.stdout, done.stderr, {**plan.added, **own}, plan.notes)
