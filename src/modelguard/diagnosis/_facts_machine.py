"""Facts about this machine and this environment: everything there is where no service was named."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from modelguard.diagnosis._facts import Facts, Interpreter, Machine
from modelguard.diagnosis._variables import known_variables, misspelt_variables
from modelguard.environment import _allocator, _cpus, _limits, _proc
from modelguard.environment._allocator_kinds import Problem
from modelguard.errors import NotSupported

__all__ = ["facts_of_machine", "machine", "this_interpreter"]


def facts_of_machine(environ: Mapping[str, str] = os.environ, *, root: Path = _proc.ROOT) -> Facts:
    """Look at this process's own environment: its variables, its allocator, its limits.

    Args:
        environ: The variables.
        root: The folder that holds ``proc``, ``sys`` and ``dev``.
    """
    python = this_interpreter()
    return Facts(
        f"this environment, {python} in {sys.prefix}",
        machine(root),
        known_variables(environ, "this environment"),
        python,
        _problems(),
        misspelt=tuple(misspelt_variables(environ, "this environment")),
    )


def machine(root: Path, pid: int | None = None) -> Machine:
    """The resources that a process may use.

    Args:
        root: The folder that holds ``proc``, ``sys`` and ``dev``.
        pid: The process. Default: this one.

    Raises:
        ProcessLookupError: There is no such process.
    """
    if not _proc.is_mounted(root):
        return Machine(cpus=_cpus.available_cpus(root=root))
    limit = _limits.memory_limit(pid, root=root)
    return Machine(
        cpus=_cpus.available_cpus(pid, root=root),
        limit=limit,
        swapped=_swapped(root),
        strain=_limits.strain(limit, pid, root=root),
    )


def this_interpreter() -> Interpreter:
    """The Python that runs this."""
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    version = sys.version_info
    return Interpreter((version[0], version[1]), platform.python_implementation(), free_threaded, version[2])


def _problems() -> tuple[Problem, ...]:
    with suppress(NotSupported):
        return _allocator.detect().problems
    return ()


def _swapped(root: Path) -> int | None:
    figures = _proc.if_readable(_proc.meminfo, root) or {}
    if "SwapTotal" not in figures or "SwapFree" not in figures:
        return None
    return figures["SwapTotal"] - figures["SwapFree"]
