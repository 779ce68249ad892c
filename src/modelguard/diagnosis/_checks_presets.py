"""MG2xx: caches and threads, and whether their settings took effect."""

from __future__ import annotations

import math

from modelguard._units import format_bytes
from modelguard.diagnosis._facts import CAPS, Facts, ServiceProcess, Variable
from modelguard.diagnosis._findings import Check, Evidence, Level, Remedy
from modelguard.diagnosis._variables import THREAD_VARIABLES
from modelguard.environment import _capacities, _knobs

__all__ = ["CHECKS"]

#: oneDNN also reads the first of these under an older name.
_ONEDNN = (CAPS[0], "DNNL_PRIMITIVE_CACHE_CAPACITY")
_IDEEP = CAPS[1]

#: Entries in each cache where the number of input shapes is unknown, as the preset has them.
_DEFAULT = _knobs.DEFAULT_ENTRIES

#: The most bytes that the code of one compiled primitive takes, and that other compiled code may take, as written
#: memory. Measured: 31 kB for each shape of a 1-d convolution, whose data take eight times as much beside it. 200
#: shapes of two of them: 12.4 MB of code and 93 MB of data; with a cap of 8, 0.1 MB of code (torch 2.13, x86-64).
_PER_ENTRY, _OTHER_CODE = 100_000, 2_000_000

_PRESET = "modelguard run --preset torch-cpu-dynamic -- COMMAND"


_CAPPED = Remedy(run=("--preset", "torch-cpu-dynamic"))


def _one_cap(facts: Facts) -> Evidence | None:
    onednn, ideep = facts.last(*_ONEDNN), facts.last(_IDEEP)
    given = onednn or ideep
    if given is None or (onednn and ideep) or not _may_run_torch(facts):
        return None
    missing = _IDEEP if onednn else _ONEDNN[0]
    seen = f"{given.where} sets {given.name}={given.value}; {missing} is not set"
    wanted = _wanted(missing, given)
    fix = f"Also set {missing}={wanted}, or use: {_PRESET}"
    return Evidence((seen,), fix, remedy=Remedy(environ=(f"{missing}={wanted}",)))


def _wanted(missing: str, given: Variable) -> int:
    """The capacity for one cache, given that of the other, as the library understands it."""
    entries = _capacities.capacity(given.name, given.value)
    if entries is None or entries < 0 or (entries == 0 and given.name == _IDEEP):
        return _DEFAULT  # no limit, or a crash
    # ideep's must not be 0, even if oneDNN's is: see MG205.
    return max(1, entries) if missing == _IDEEP else entries


def _crash(facts: Facts) -> Evidence | None:
    cap = facts.last(_IDEEP)
    if cap is None or _capacities.why_unusable(_IDEEP, cap.value) is None or not _may_run_torch(facts):
        return None
    fix = f"Set {_IDEEP}=1 or more, or use: {_PRESET}"
    return Evidence((f"{cap.where} sets {cap.name}={cap.value}",), fix, remedy=Remedy(environ=(f"{_IDEEP}=1",)))


def _may_run_torch(facts: Facts) -> bool:
    return not facts.processes or any(process.torch for process in facts.processes)


def _too_late(facts: Facts) -> Evidence | None:
    late = [variable for variable in facts.named(*THREAD_VARIABLES) if variable.moment == "after import"]
    ignored = [(variable, pool) for variable in late if (pool := _larger_pool(facts, variable))]
    seen = [
        f"{variable.where} sets {variable.name}={variable.value}, but {pool[0]} has {pool[1]} threads"
        for variable, pool in ignored
    ]
    needed = [f"{variable.name}={variable.value}" for variable, _ in ignored]
    cap = facts.last(*_ONEDNN)
    if cap is not None and cap.moment != "exec":
        above = _above_cap(facts, cap)
        seen += above
        needed += [f"{each.name}={each.value}" for each in facts.named(*_ONEDNN, _IDEEP) if above]
    if not seen:
        return None
    fix = f"Set it before the program starts: env {' '.join(dict.fromkeys(needed))} COMMAND"
    return Evidence(tuple(seen), fix, remedy=Remedy(environ=tuple(dict.fromkeys(needed))))


def _larger_pool(facts: Facts, variable: Variable) -> tuple[str, int] | None:
    """A thread pool that is larger than a variable allows."""
    pools = [pool for process in facts.serving if process.inside for pool in process.inside.pools]
    wanted = int(variable.value) if variable.value.isdecimal() else None
    return next((pool for pool in pools if wanted is not None and pool[1] > wanted), None)


def _above_cap(facts: Facts, cap: Variable) -> list[str]:
    entries = _capacities.capacity(cap.name, cap.value)
    allowed = None if entries is None or entries < 0 else entries * _PER_ENTRY + _OTHER_CODE
    return [
        f"{cap.where} sets {cap.name}={cap.value}, but process {process.pid} has written {_code(process)}, "
        "more than this cap allows"
        for process in facts.processes
        if allowed is not None and process.torch and process.compiled > allowed
    ]


def _no_caps(facts: Facts) -> Evidence | None:
    if facts.named(*_ONEDNN, _IDEEP):
        return None
    grown = [process for process in facts.processes if process.torch and process.compiled > _OTHER_CODE]
    if not grown:
        return None
    seen = [f"process {process.pid} runs torch and has written {_code(process)}" for process in grown]
    seen += [
        f"process {process.pid} has grown by {format_bytes(process.grown)} during the requests"
        for process in grown
        if process.grown
    ]
    seen.append(f"neither {CAPS[0]} nor {CAPS[1]} is set")
    return Evidence(tuple(seen), f"Start it with: {_PRESET}", remedy=_CAPPED)


def _code(process: ServiceProcess) -> str:
    return f"{format_bytes(process.compiled)} of machine code compiled at run time"


def _threads(facts: Facts) -> Evidence | None:
    cpus, serving = facts.machine.cpus, facts.serving
    pools = [pool for process in serving if process.inside for pool in process.inside.pools]
    if cpus is None or not pools:
        return None
    library, threads = max(pools, key=lambda pool: (pool[1], pool[0] == "torch"))
    if threads * len(serving) <= math.ceil(cpus.count) or threads == 1:
        return None
    share = max(1, int(cpus.count / len(serving)))
    seen = (
        f"{len(serving)} process(es) answer requests, each with {threads} threads of {library}, on {cpus.count:g} "
        f"CPU(s) ({cpus.source})"
    )
    fix = f"Start it with OMP_NUM_THREADS={share}, and remove torch.set_num_threads if the program calls it."
    level: Level = "fault" if any(name == "torch" for name, _ in pools) else "note"
    names = [name for name in THREAD_VARIABLES if name == "OMP_NUM_THREADS" or facts.named(name)]
    return Evidence((seen,), fix, level, Remedy(environ=tuple(f"{name}={share}" for name in names)))


CHECKS = (
    Check(
        "MG201",
        "One of the two oneDNN caches is capped, the other is not",
        "Neither cap is enough alone: 400 lengths through 8 convolutions grew by 339 MB without a cap, by 77 MB with "
        "only oneDNN's, and by 319 MB with only ideep's.",
        _one_cap,
    ),
    Check(
        "MG202",
        "A variable is set too late",
        "OpenMP and BLAS libraries read their variables when they are loaded, oneDNN and ideep at their first use. "
        "Variables that are set afterwards silently have no effect.",
        _too_late,
    ),
    Check(
        "MG203",
        "torch keeps compiled code for many input shapes, without caps",
        "oneDNN compiles code for each shape of an input and keeps it for up to 1024 shapes and layers: hundreds of "
        "MB. If inputs differ in length, memory grows with each new length.",
        _no_caps,
    ),
    Check(
        "MG204",
        "More threads than CPUs",
        "Unless told otherwise, each worker has a thread for each CPU, regardless of the quota and other workers. The "
        "threads then wait for each other, and with a quota the kernel stops all of them for most of each tenth of a "
        "second.",
        _threads,
    ),
    Check(
        "MG205",
        "LRU_CACHE_CAPACITY is read as 0, which crashes the process",
        "ideep needs room for at least one entry: torch 2.13 crashes with SIGSEGV at its first convolution on CPU. "
        "It reads the decimal digits at the start, so '', 'abc' and '0x10' are 0 too. "
        "The capacity of oneDNN's own cache may be 0.",
        _crash,
    ),
)
