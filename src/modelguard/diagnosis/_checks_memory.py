"""MG3xx: memory limits and swap."""

from __future__ import annotations

import shlex

from modelguard._units import format_bytes
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._findings import Check, Evidence, Level, Remedy

__all__ = ["CHECKS"]

#: Bytes. A few pages in swap that are no longer needed do not mean that memory is short.
_SWAP = 10_000_000

#: The part of the limit above which the next larger request may be the last: a tenth of 450 MB is one image.
_NEAR = 0.9

_ROOM = (
    "Start fewer workers, let them share the model (MG402, MG404), find what grows (modelguard diagnose), or raise the "
    "limit. A guard with MemoryLimit('80%') replaces its model before the kernel acts."
)


def _no_limit(facts: Facts) -> Evidence | None:
    limit = facts.machine.limit
    if limit is None or limit.bytes is not None:
        return None
    slowed = "" if limit.high is None else f"; memory.high slows it down above {format_bytes(limit.high)}"
    seen = f"no cgroup that is visible from here limits its memory{slowed}"
    fix = "Give the service a limit: MemoryMax= in its unit, --memory in docker, resources.limits.memory in Kubernetes."
    return Evidence((seen,), fix, "note")


def _swapping(facts: Facts) -> Evidence | None:
    fix = "Find what has grown (MG2xx, MG4xx), add memory to the machine, or set a limit and MemorySwapMax=0."
    swapped = [process for process in facts.processes if process.swap > _SWAP]
    if swapped:
        seen = (f"process {process.pid} has {format_bytes(process.swap)} in swap" for process in swapped)
        return Evidence(tuple(seen), fix)
    machine = facts.machine.swapped
    if facts.processes or machine is None or machine <= _SWAP:
        return None
    unassigned = f"the machine has {format_bytes(machine)} in swap; the owner is unknown until the service runs"
    return Evidence((unassigned,), fix, "note")


def _killed(facts: Facts) -> Evidence | None:
    limit, strain = facts.machine.limit, facts.machine.strain
    if strain is None or not strain.killed:
        return None
    limited = limit is not None and limit.bytes is not None
    seen = [f"the kernel has killed {strain.killed} process(es) of its cgroup, for want of memory"]
    if limited and limit is not None:
        seen.append(f"{limit.source} is {format_bytes(limit.bytes or 0)}{_peak(facts)}")
    # Without a service, or without a limit of its own, another program may have been killed.
    level: Level = "fault" if facts.words or (facts.processes and limited) else "note"
    return Evidence(tuple(seen), _ROOM, level)


def _near_limit(facts: Facts) -> Evidence | None:
    limit, strain = facts.machine.limit, facts.machine.strain
    held = None if strain is None or strain.killed else strain.held  # after kills, MG304 says it
    if limit is None or limit.bytes is None or held is None or held < limit.bytes * _NEAR:
        return None
    seen = f"{format_bytes(held)} of the {format_bytes(limit.bytes)} of {limit.source} are held{_peak(facts)}"
    return Evidence((seen,), _ROOM, "fault" if facts.processes else "note")


def _peak(facts: Facts) -> str:
    peak = None if facts.machine.strain is None else facts.machine.strain.peak
    return "" if peak is None else f"; the most that was used, file cache included, is {format_bytes(peak)}"


def _stale_metrics(facts: Facts) -> Evidence | None:
    stale, folder = facts.stale_metrics, facts.last("PROMETHEUS_MULTIPROC_DIR")
    if not stale or folder is None:
        return None
    seen = f"{folder.value} has {len(stale)} file(s) of processes that do not exist, such as {stale[0]}"
    remedy = Remedy(before=(f"rm -f {shlex.quote(folder.value)}/*.db",))
    fix = "Empty the folder before the service starts, and call mark_process_dead in gunicorn's child_exit."
    return Evidence((seen,), fix, remedy=remedy)


CHECKS = (
    Check(
        "MG301",
        "Nothing limits the service's memory",
        "Without a limit, a growing service affects the whole machine, including SSH, and policies with a percentage "
        "such as MemoryLimit('80%') have nothing to refer to.",
        _no_limit,
    ),
    Check(
        "MG302",
        "Swap is in use",
        "A whole model is read for each answer. Pages in swap must be read back one by one, so answers take seconds, "
        "and a growing service becomes slow instead of being killed.",
        _swapping,
    ),
    Check(
        "MG303",
        "Metric files of ended processes are left behind",
        "prometheus_client keeps a file for each worker in PROMETHEUS_MULTIPROC_DIR and reads all of them for each "
        "scrape. Files of ended processes are never removed, so scrapes take ever more time and memory, and gauges "
        "count workers that are gone.",
        _stale_metrics,
    ),
    Check(
        "MG304",
        "The kernel has killed processes for want of memory",
        "A server starts a new worker for each that was killed, so it seems to run, while all calls of the killed one "
        "fail and each new one loads the model again.",
        _killed,
    ),
    Check(
        "MG305",
        "The memory in use is close to the limit",
        "At the limit the kernel kills a process. Only memory that it cannot drop is counted: file cache, such as "
        "weights that are mapped from a file, does no harm.",
        _near_limit,
    ),
)
