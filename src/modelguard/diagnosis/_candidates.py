"""The remedies that may help against a cause, each with how it is tried and what to write to have it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from modelguard.diagnosis import _child
from modelguard.diagnosis._growth import Cause, CauseName, Measured
from modelguard.environment import _allocator, _allocator_files, _launcher, _presets
from modelguard.errors import ModelGuardError

__all__ = ["AGAINST", "Candidate", "Declared", "candidates"]

#: What is changed: variables alone; freed memory is returned; spaCy's memory zones; the model is reloaded; the function
#: runs in worker processes that are replaced; inputs are padded.
Act = Literal["variables", "trim", "zones", "reload", "isolate", "bucketed"]

Kind = Literal["low-memory", "torch-cpu-dynamic", "allocators", "trim", "zones", "bucketed", "reload", "isolate"]

#: Which remedies can help against which cause, the simplest first. All others are mended in the program, and only
#: contained by fresh models and processes.
AGAINST: dict[CauseName, tuple[Kind, ...]] = {
    "retention": ("low-memory", "allocators", "trim", "isolate"),
    "onednn plans": ("torch-cpu-dynamic", "allocators", "bucketed", "isolate"),
    "spacy strings": ("zones", "reload", "isolate"),
    "native memory": ("low-memory", "allocators", "trim", "reload", "isolate"),
    "arrow pool": ("allocators", "trim", "isolate"),
}
_ALWAYS: tuple[Kind, ...] = ("reload", "isolate")

#: Remedies against causes with a smaller share are not tried, unless no cause has a larger one.
_MAIN = 0.3

#: Growth after which freed memory is returned: small enough to happen several times in a trial.
_TRIM = "10 MB"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A remedy to try.

    Attributes:
        name: Its name in reports.
        act: What is changed.
        lines: What to write to have it.
        environ: The variables of the process that tries it.
        options: What the process needs to know.
    """

    name: str
    act: Act
    lines: tuple[str, ...]
    environ: Mapping[str, str]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Declared:
    """What the user says about the function.

    Attributes:
        bucketed: Names of parameters that may be padded to the length of a bucket.
        load: The function that makes the model, as ``"module:function"``; the driven one takes the model first.
    """

    bucketed: tuple[str, ...] = ()
    load: str | None = None


def candidates(
    causes: Sequence[Cause], measured: Measured, declared: Declared, environ: Mapping[str, str], uses: int
) -> tuple[list[Candidate], list[str]]:
    """Choose the remedies to try.

    Args:
        causes: What makes memory grow.
        measured: What was measured.
        declared: What the user says about the function.
        environ: The variables of the function's process.
        uses: After how many calls the model, or a worker, is replaced.

    Returns:
        The remedies, and those that could help and cannot be tried, each with the reason.
    """
    main = [cause for cause in causes if cause.share >= _MAIN] or causes[:1]
    kinds: dict[Kind, None] = dict.fromkeys(kind for cause in main for kind in AGAINST.get(cause.name, _ALWAYS))
    found: list[Candidate] = []
    left_out: list[str] = []
    for kind in kinds:
        if why := _why_not(kind, measured, declared, environ):
            left_out.append(f"{kind}: {why}")
        else:
            found += _of_kind(kind, measured, declared, environ, uses)
    return found, left_out


def _why_not(kind: Kind, measured: Measured, declared: Declared, environ: Mapping[str, str]) -> str:
    if kind == "bucketed" and not declared.bucketed:
        return "--bucketed NAME declares a parameter that may be padded"
    if kind == "zones" and not measured.zones:
        return "no spaCy pipeline with memory zones was found"
    if kind == "reload" and not (measured.guarded or declared.load):
        return "the function has no guard; --load MODULE:FUNCTION names what makes its model, which it takes first"
    if kind == "isolate" and not measured.importable:
        return "a worker process cannot import the function by its name"
    if kind == "allocators" and "LD_PRELOAD" in environ:
        return "LD_PRELOAD is set"
    return ""


def _of_kind(
    kind: Kind, measured: Measured, declared: Declared, environ: Mapping[str, str], uses: int
) -> Iterator[Candidate]:
    if kind == "allocators":
        for allocator in _installed():
            yield from _variables(environ, allocator=allocator)
    elif kind == "low-memory":
        yield from _variables(environ, "low-memory")
    elif kind == "torch-cpu-dynamic":
        yield from _variables(environ, "torch-cpu-dynamic")
        if "LD_PRELOAD" not in environ:
            for allocator in _installed()[:1]:  # caps bound what oneDNN holds, and glibc keeps the holes between
                yield from _variables(environ, "torch-cpu-dynamic", allocator)
    else:
        yield _in_process(kind, measured, declared, environ, uses)


def _installed() -> list[Any]:
    """The allocators that can be preloaded, the best first."""
    if _allocator.detect().how == "preloaded":
        return []
    return list(dict.fromkeys(file.kind for file in _allocator_files.find(None, environ=os.environ)))


def _variables(environ: Mapping[str, str], preset: str | None = None, allocator: Any = "none") -> Iterator[Candidate]:
    """A remedy that is nothing but variables; none if the environment has them already."""
    options = [] if preset is None else ["--preset", preset]
    options += [] if allocator == "none" else ["--allocator", allocator]
    chosen = None if preset is None else _presets.get(preset)
    try:
        plan = _launcher.plan(_child.command("_tried"), preset=chosen, allocator=allocator, environ=dict(environ))
    except ModelGuardError:
        return
    if plan.added:
        name = " + ".join(options[1::2])
        line = f"modelguard run {' '.join(options)} -- COMMAND"
        yield Candidate(name, "variables", (line,), plan.environ, {})


def _in_process(kind: Kind, measured: Measured, declared: Declared, environ: Mapping[str, str], uses: int) -> Candidate:
    if kind == "trim":
        lines = ("from modelguard import memory", f'memory.trim_every("{_TRIM}")')
        return Candidate("trim_every", "trim", lines, environ, {"trim_every": _TRIM})
    if kind == "zones":
        line = '@zoned(guard(load, reload_on=IndexGrowth("16 MB")))'
        lines = ("from modelguard.adapters.spacy import IndexGrowth, zoned", line)
        return Candidate("zoned", "zones", lines, environ, {})
    if kind == "bucketed":
        names = ", ".join(f'"{name}"' for name in declared.bucketed)
        lines = ("from modelguard.adapters.torch import bucketed", f"@bucketed({names}, cut=None)")
        return Candidate("bucketed", "bucketed", lines, environ, {"bucketed": list(declared.bucketed)})
    replaced = f"guard(load, reload_on=Uses({uses:_}))"
    if kind == "reload":
        return Candidate(
            "reload_on", "reload", ("from modelguard import Uses, guard", replaced), environ, {"uses": uses}
        )
    owned = measured.guarded or declared.load is not None
    own = (
        ("@isolate()  # above the guard's decorator", replaced) if owned else (f"@isolate(recycle_on=Uses({uses:_}))",)
    )
    return Candidate("isolate", "isolate", ("from modelguard import Uses, isolate", *own), environ, {"uses": uses})
