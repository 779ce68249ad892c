"""MG2xx: caches and threads, and whether their settings took effect."""

from __future__ import annotations

import math
from collections.abc import Iterable

from modelguard._units import format_bytes
from modelguard.diagnosis._facts import CAPS, Facts, ServiceProcess, Variable
from modelguard.diagnosis._findings import Check, Evidence, Level
from modelguard.diagnosis._sources import THREAD_VARIABLES
from modelguard.environment import _capacities, _knobs

__all__ = ["CHECKS", "TORCH"]

#: Packages that run their models on torch.
TORCH = ("torch", "torchaudio", "torchvision", "diffusers", "sentence_transformers", "ultralytics", "whisper")
#: Packages that start a pool of OpenMP or BLAS threads.
_POOLS = (*TORCH, "numpy", "scipy", "sklearn")

#: oneDNN also reads the first of these under an older name.
_ONEDNN = (CAPS[0], "DNNL_PRIMITIVE_CACHE_CAPACITY")
_IDEEP = CAPS[1]

#: The most bytes that one compiled primitive takes, and that other compiled code may take. Measured: 0.65 MB for each
#: shape of a 1-d convolution (torch 2.13, x86-64); 2 MB with a cap of 8, and 262 MB without one, after 400 shapes.
_PER_ENTRY, _OTHER_CODE = 2_000_000, 32_000_000

#: Entries in each cache where the number of input shapes is unknown, as the preset has them.
_DEFAULT = _knobs.DEFAULT_ENTRIES

_PRESET = "modelguard run --preset torch-cpu-dynamic -- COMMAND"


def _one_cap(facts: Facts) -> Evidence | None:
    onednn, ideep = facts.last(*_ONEDNN), facts.last(_IDEEP)
    given = onednn or ideep
    if given is None or (onednn and ideep) or _applies_something(facts):
        return None
    missing = _IDEEP if onednn else _ONEDNN[0]
    seen = f"{given.where} sets {_written(given)}; {missing} is not set in any place that could be read"
    how = " to the same value" if given.value is None else f"={_wanted(missing, given)}"
    return Evidence((seen,), f"Also set {missing}{how}, or use: {_PRESET}")


def _wanted(missing: str, given: Variable) -> int:
    """The capacity for one cache, given that of the other, as the library understands it."""
    entries = _capacities.capacity(given.name, given.value or "")
    if entries is None or entries < 0 or (entries == 0 and given.name == _IDEEP):
        return _DEFAULT  # no limit, or a crash
    # ideep's must not be 0, even if oneDNN's is: see MG205.
    return max(1, entries) if missing == _IDEEP else entries


def _crash(facts: Facts) -> Evidence | None:
    cap = facts.last(_IDEEP)
    if cap is None or cap.value is None or _capacities.why_unusable(_IDEEP, cap.value) is None:
        return None
    return Evidence((f"{cap.where} sets {_written(cap)}",), f"Set {_IDEEP}=1 or more, or use: {_PRESET}")


def _written(variable: Variable) -> str:
    return variable.name if variable.value is None else f"{variable.name}={variable.value}"


def _too_late(facts: Facts) -> Evidence | None:
    seen = [
        f"{variable.where} sets {variable.name} after the import of a library that reads it on load"
        for variable in facts.named(*THREAD_VARIABLES)
        if variable.moment == "after import" and not _in_time(facts.named(variable.name))
    ]
    cap = facts.last(*_ONEDNN)
    if cap is not None and cap.moment not in ("exec", "server"):
        allowed = _allowed(cap)
        seen += [
            f"{cap.where} sets {cap.name}={cap.value}, but process {process.pid} has "
            f"{format_bytes(process.compiled)} of compiled code, more than this cap allows"
            for process in facts.processes
            if allowed is not None and process.torch and process.compiled > allowed
        ]
    if not seen:
        return None
    return Evidence(tuple(seen), f"Set it before the program starts: {_PRESET}")


def _no_caps(facts: Facts) -> Evidence | None:
    if facts.named(*_ONEDNN, _IDEEP) or _applies_something(facts) or _may_use_cuda(facts):
        return None
    running = [process for process in facts.processes if process.torch]
    imported = facts.imported(TORCH)
    if not running and imported is None:
        return None
    seen = [imported] if imported else []
    seen += [_describe(process) for process in running]
    seen.append(f"neither {CAPS[0]} nor {CAPS[1]} is set in any place that could be read")
    grown = any(process.compiled > _OTHER_CODE for process in running)
    # If the app's own source was not read, it may set them itself.
    level: Level = "fault" if facts.app is not None or grown else "note"
    return Evidence(tuple(seen), f"Start it with: {_PRESET}", level)


def _threads(facts: Facts) -> Evidence | None:
    cpus, workers = facts.machine.cpus, facts.server.workers if facts.server else 1
    pools = facts.imported(_POOLS) or next((_describe(each) for each in facts.processes if each.torch), None)
    if cpus is None or workers is None or pools is None:
        return None
    threads, by = _threads_of_one(facts)
    if threads is None or threads * workers <= math.ceil(cpus.count):
        return None
    share = max(1, int(cpus.count / workers))
    seen = f"{workers} worker(s) with {threads} thread(s) each ({by}) on {cpus.count:g} CPU(s) ({cpus.source})"
    fix = f"Start it with: modelguard run --preset torch-cpu --workers {workers} -- COMMAND (OMP_NUM_THREADS={share})"
    if threads == 1:
        fix = f"Run {max(1, int(cpus.count))} worker(s) if the model takes most of the time."
    return Evidence((seen, pools), fix, "note" if threads == 1 else "fault")


def _threads_of_one(facts: Facts) -> tuple[int | None, str]:
    if facts.app and facts.app.threads is not None:
        return facts.app.threads, facts.app.threads_by
    for name in THREAD_VARIABLES:
        for variable in reversed(_in_time(facts.named(name))):
            if variable.value and variable.value.isdecimal():
                return int(variable.value), f"{name} by {variable.where}"
    return facts.machine.affinity, "by default one for each CPU that it may run on"


def _in_time(variables: Iterable[Variable]) -> list[Variable]:
    return [variable for variable in variables if variable.moment in ("exec", "server", "app")]


def _applies_something(facts: Facts) -> bool:
    return any(source is not None and source.applies is not None for source in (facts.app, facts.config))


def _may_use_cuda(facts: Facts) -> bool:
    if facts.processes:
        return any(process.cuda for process in facts.processes)
    visible = facts.last("CUDA_VISIBLE_DEVICES")
    return facts.machine.cuda and not (visible is not None and visible.value in ("", "-1"))


def _allowed(cap: Variable) -> int | None:
    entries = None if cap.value is None else _capacities.capacity(cap.name, cap.value)
    return None if entries is None or entries < 0 else entries * _PER_ENTRY + _OTHER_CODE


def _describe(process: ServiceProcess) -> str:
    code = f" and has {format_bytes(process.compiled)} of code compiled at run time" if process.compiled else ""
    return f"process {process.pid} runs torch{code}"


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
        "torch runs on CPU without caps for inputs of many shapes",
        "torch keeps compiled code for up to 1024 shapes and layers, which takes hundreds of MB. If inputs differ in "
        "length, memory grows with each new length; if all have the same shape, it does not grow.",
        _no_caps,
    ),
    Check(
        "MG204",
        "More threads than CPUs",
        "Each worker starts a thread for each CPU of the machine, regardless of the quota and the other workers. The "
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
