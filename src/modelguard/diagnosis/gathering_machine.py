"""Facts about this machine and this environment, which are all there is when nothing else is asked about."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from modelguard.diagnosis.describing import inherited
from modelguard.diagnosis.facts import Facts, Interpreter, Machine
from modelguard.environment import allocator, cpus, limits
from modelguard.environment.allocator import Problem
from modelguard.errors import NotSupported

__all__ = ["gather_here", "machine", "this_interpreter"]


def gather_here(environ: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> Facts:
    """Look at this process's own environment: its variables, its allocator, its limits.

    Args:
        environ: The variables.
        root: Where ``/proc``, ``/sys`` and ``/dev`` are found.
    """
    python = this_interpreter()
    return Facts(
        f"this environment, {python} in {sys.prefix}",
        machine(root),
        inherited(environ, "this environment"),
        python,
        _problems(),
    )


def machine(root: Path, pid: int | None = None) -> Machine:
    """Look at what a process may use.

    Args:
        root: Where ``/proc``, ``/sys`` and ``/dev`` are found.
        pid: The process, by default this one.

    Raises:
        ProcessLookupError: There is no such process.
    """
    if not (root / "proc" / "self").exists():
        return Machine(cpus=cpus.effective(root), affinity=os.cpu_count())
    return Machine(
        cpus=cpus.effective(root, pid=pid),
        affinity=_affinity(root / "proc" / ("self" if pid is None else str(pid)) / "status"),
        limit=limits.effective(root, pid=pid),
        swapped=_swapped(root / "proc" / "meminfo"),
        cuda=any((root / "dev").glob("nvidia[0-9]*")),
    )


def this_interpreter() -> Interpreter:
    """The Python that runs this."""
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return Interpreter((sys.version_info[0], sys.version_info[1]), platform.python_implementation(), free_threaded)


def _problems() -> tuple[Problem, ...]:
    with suppress(NotSupported):
        return allocator.detect().problems
    return ()


def _affinity(status: Path) -> int | None:
    """How many CPUs a process may run on: the bits of ``Cpus_allowed``, commas in between."""
    mask = fields(status).get("Cpus_allowed", "").replace(",", "")
    return int(mask, 16).bit_count() if mask else None


def _swapped(meminfo: Path) -> int | None:
    told = fields(meminfo)
    if "SwapTotal" not in told or "SwapFree" not in told:
        return None
    total, free = (int(told[name].split()[0]) for name in ("SwapTotal", "SwapFree"))
    return (total - free) * 1024


def fields(file: Path) -> dict[str, str]:
    """Read a file of lines such as ``"VmSwap:  12 kB"``; empty if it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}
