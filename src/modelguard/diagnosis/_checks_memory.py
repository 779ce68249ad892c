"""MG3xx: memory limits and swap."""

from __future__ import annotations

import shlex

from modelguard._units import format_bytes
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._findings import Check, Evidence, Remedy

__all__ = ["CHECKS"]

#: Bytes. A few pages in swap that are no longer needed do not mean that memory is short.
_SWAP = 10_000_000


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
)
