"""MG3xx: the memory that there is."""

from __future__ import annotations

from modelguard._units import format_bytes
from modelguard.diagnosis.facts import Facts
from modelguard.diagnosis.finding import Check, Evidence

__all__ = ["CHECKS"]

#: A few pages that nobody needs again are no sign of need.
_SWAP = 10_000_000


def _no_limit(facts: Facts) -> Evidence | None:
    limit = facts.machine.limit
    if limit is None or limit.bytes is not None:
        return None
    slowed = "" if limit.high is None else f"; memory.high slows it down from {format_bytes(limit.high)} on"
    seen = f"no cgroup that can be seen from here limits its memory{slowed}"
    fix = "Give the service a limit: MemoryMax= in its unit, --memory in docker, resources.limits.memory in Kubernetes."
    return Evidence((seen,), fix, "note")


def _swapping(facts: Facts) -> Evidence | None:
    fix = "Find what grew (MG2xx, MG4xx), give the machine more memory, or the service a limit and MemorySwapMax=0."
    swapped = [process for process in facts.processes if process.swap > _SWAP]
    if swapped:
        seen = (f"process {process.pid} has {format_bytes(process.swap)} in swap" for process in swapped)
        return Evidence(tuple(seen), fix)
    machine = facts.machine.swapped
    if facts.processes or machine is None or machine <= _SWAP:
        return None
    seen_here = (
        f"the machine has {format_bytes(machine)} in swap; whose they are cannot be told before the service runs"
    )
    return Evidence((seen_here,), fix, "note")


CHECKS = (
    Check(
        "MG301",
        "Nothing limits the service's memory",
        "Without a limit a service that grows takes the whole machine with it, SSH included, and policies by share "
        "of the limit such as MemoryLimit('80%') have nothing to take a share of.",
        _no_limit,
    ),
    Check(
        "MG302",
        "Swap is in use",
        "A model is read from end to end for each answer. What is in swap has to come back page by page, so answers "
        "take seconds, and a growing service shows as a slow one instead of a dead one.",
        _swapping,
    ),
)
