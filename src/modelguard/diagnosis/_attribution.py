"""From measurements to causes, each with its share of the growth. The rest is said to be unexplained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from modelguard._units import format_bytes
from modelguard.diagnosis._growth import Cause, CauseName, Measured
from modelguard.diagnosis._holders import Held
from modelguard.facts._growth import LEAST

__all__ = ["attribute"]

#: A cause with a smaller share is not named.
_LEAST = 0.1
#: A number of the census counts as growing with the calls if it grows by this many for each call.
_WITH_CALLS = 0.002
_FEWEST_MORE = 4
#: A rate below this share of the whole is no growth.
_NONE = 0.3
#: Bytes of machine code that a service has compiled while it was watched, as the doctor's MG203 counts them.
_COMPILED = 2_000_000
#: Of oneDNN's plans, code is taken to be at least a tenth: of the convolutions that were measured it was 36 %.
_PLAN = 10
#: Of what is held outside of Python's memory: a smaller share is what malloc and libraries need beside it.
_BESIDE = 0.5
_LINES = 3

_FIXES: dict[CauseName, str] = {
    "unbounded cache": "Give the cache a size: functools.lru_cache(maxsize=1024).",
    "retention": "The allocator keeps free memory: modelguard run --allocator auto, or memory.trim_every('30s').",
    "cycles": "Break the reference cycle, or let the collector run: do not disable it.",
    "tracebacks": "Do not keep exceptions, or drop their frames: error.with_traceback(None).",
    "tasks": "Let no task wait for ever: asyncio.timeout(), or cancel it. Remove those that are done.",
    "queues": "Read what is put into the queue, or bound it: Queue(maxsize=100).",
    "threads": "End threads, or use one ThreadPoolExecutor for all calls.",
    "ssl contexts": "Make one client, or one SSLContext, for all requests, and close it at the end.",
    "metric labels": "Take ids, paths and messages out of the labels of metrics.",
    "autograd": "Use torch.inference_mode(), or keep loss.item() and not the tensor.",
    "onednn plans": "modelguard run --preset torch-cpu-dynamic -- COMMAND, or pad inputs to few lengths (bucketed).",
    "spacy strings": "Use modelguard.adapters.spacy.zoned, or guard(..., reload_on=MemoryGrowth('500 MB')).",
    # Emptying it later gives nothing back (tokenizers 0.23).
    "tokenizer caches": "Make the model with a smaller cache (cache_capacity), or reload it by a guard's policy.",
    "arrow pool": "Call pyarrow.default_memory_pool().release_unused() after large batches.",
    # Without the arena alone it grows twice as much, and kSameAsRequested changes nothing (onnxruntime 1.32).
    "onnx runtime": "Set SessionOptions.enable_mem_pattern = False, and leave enable_cpu_mem_arena as it is.",
    "tensorflow": "Give tf.function an input_signature, so that it is traced once.",
    "cuda cache": "Set PYTORCH_ALLOC_CONF=expandable_segments:True.",
    "mappings": "Close what is mapped: mmap.close().",
    "connections": "Close each connection when its call ends (contextlib.closing), or use one for all calls.",
    "worker processes": "Replace workers in time: isolate(recycle_on=Uses(1000)), or the guard's reload_on. "
    "Diagnose the function below @isolate to learn what it keeps.",
    "python objects": "Look at the lines: they allocate what is never freed.",
    "native memory": "A native library keeps it. With memray (pip install memray) a diagnosis names the lines that "
    "call it. Until it is mended, a fresh process frees it: isolate(recycle_on=Uses(1000)).",
}
_LINES_OF_NATIVE = (
    "Close or free what these lines make. Until then a fresh process frees it: isolate(recycle_on=Uses(1000))."
)


def attribute(measured: Measured) -> tuple[tuple[Cause, ...], float]:
    """Name the causes of growth.

    Returns:
        The causes, the largest share first, and the share that is unexplained.
    """
    growth = max(1, measured.growth)
    causes: list[Cause] = []
    rest = 1.0
    for name, size, seen in (*_in_workers(measured), *_given_back(measured), *_kept(measured)):
        share = round(min(rest, size / growth), 2)
        if share >= _LEAST:
            causes.append(Cause(name, share, seen, _fix(name, measured)))
            rest = round(rest - share, 2)
    causes.sort(key=lambda cause: -cause.share)
    return tuple(_merged(causes)), rest


def _merged(causes: list[Cause]) -> Iterator[Cause]:
    """One entry for each cause."""
    by_name: dict[CauseName, list[Cause]] = {}
    for cause in causes:
        by_name.setdefault(cause.name, []).append(cause)
    for name, same in by_name.items():
        seen = "; ".join(cause.seen for cause in same)
        yield Cause(name, round(sum(cause.share for cause in same), 2), seen, same[0].fix)


def _fix(name: CauseName, measured: Measured) -> str:
    """What to do, at the holder where there is one."""
    if name == "native memory" and measured.native:
        return _LINES_OF_NATIVE
    if name == "python objects" and not measured.traced and not measured.held:
        return "modelguard diagnose MODULE:FUNCTION finds the lines that allocate them."
    first = measured.held[:1] if name in {"python objects", "native memory"} else ()
    return next((held.fix for held in (*first, *_about(name, measured)) if held.fix), _FIXES[name])


def _about(name: CauseName, measured: Measured) -> list[Held]:
    """What holds the things that are a cause themselves, such as tasks."""
    return [held for held in measured.held if held.about == name]


def _kept_in(name: CauseName, more: int, measured: Measured) -> list[Held]:
    """What holds the things that are a cause; or has as many more entries, as a dict of clients with a context each."""
    alike = [held for held in measured.held if more / 2 <= held.more <= 2 * more]
    return _about(name, measured) or alike


def _owned(name: CauseName, measured: Measured) -> str:
    """What a library's memory belongs to."""
    ways = measured.owners.get(name, ())
    return f", of {', '.join(ways)}" if ways else ""


def _in_workers(measured: Measured) -> Iterator[tuple[CauseName, float, str]]:
    """What other processes hold, in which nothing else was measured."""
    if measured.in_workers > 0:
        more = format_bytes(measured.in_workers)
        yield "worker processes", measured.in_workers, f"the workers of the isolated function hold {more} more"


def _given_back(measured: Measured) -> Iterator[tuple[CauseName, float, str]]:
    """What was freed by an act that belongs to one cause: its size is measured."""
    if measured.trimmed > LEAST:  # less stays behind any list that has grown
        risen = measured.private[-1] - measured.private[0] if measured.private else 0
        # Steps are no growth, as when a table doubles; what they left free is not blamed for more than its part.
        part = min(1.0, measured.growth / max(1, risen))
        yield (
            "retention",
            part * measured.trimmed,
            f"a trim of the allocator gave {format_bytes(measured.trimmed)} back",
        )
    if measured.garbage >= max(_FEWEST_MORE, _WITH_CALLS * _calls(measured)):
        most = f" ({_kinds(measured.freed)})" if measured.freed else ""
        garbage = f"{measured.garbage:,} objects{most}, which gave {format_bytes(measured.collected)} back"
        yield "cycles", measured.collected, f"a garbage collection freed {garbage}"
    for cache, size in measured.cleared.items():
        kind, _, name = cache.partition(":")
        if kind == "lru_cache":
            yield "unbounded cache", size, f"emptying the lru_cache {name} gave {format_bytes(size)} back"
        elif kind == "metric":
            series = measured.more("metric series")
            yield "metric labels", size, f"{series:,} new series; emptying {name} gave {format_bytes(size)} back"
        elif kind == "pyarrow":
            yield "arrow pool", size, f"Arrow's pool gave {format_bytes(size)} back"
        elif kind == "cuda":
            yield "cuda cache", size, f"torch.cuda.empty_cache() gave {format_bytes(size)} of host memory back"
        elif kind == "onnxruntime":
            yield "onnx runtime", size, f"its arena gave {format_bytes(size)} back when it was made to shrink"


class _Counted(NamedTuple):
    """What the census counts, and the cause that it proves.

    Attributes:
        counted: The name in the census.
        cause: The cause.
        most: Bytes that one of them can hold at most.
        marks: What is in the name of a container of them, or of its entries.
    """

    counted: str
    cause: CauseName
    most: float = math.inf
    marks: tuple[str, ...] = ()


#: The most that each of them has been seen to hold, several times over: what is beyond that has another cause.
_COUNTED: tuple[_Counted, ...] = (
    _Counted("threads", "threads", 1e6, ("threading.", "_thread.", "Thread")),
    _Counted("ssl contexts", "ssl contexts", 5e6),
    _Counted("tasks", "tasks", marks=("Task", "asyncio.")),
    _Counted("tensors with a graph", "autograd", marks=("Tensor",)),
    _Counted("queued items", "queues", marks=("(deque",)),  # a set of queues is a container like others
    _Counted("spacy strings", "spacy strings", 2000),
    _Counted("mappings", "mappings", marks=("mmap",)),
    _Counted("connections", "connections", 3e6, ("Connection",)),  # SQLite caches 2 MB of pages for each
    _Counted("tensorflow traces", "tensorflow"),
)

#: The same in a service that runs, where no cache is emptied.
_COUNTED_LIVE: tuple[_Counted, ...] = (
    *_COUNTED,
    _Counted("cached results", "unbounded cache"),
    _Counted("metric series", "metric labels", 50_000),
    _Counted("caught errors", "tracebacks"),
)
#: Memory blocks of Python's allocators by which each call has to grow so that Python objects are what grows.
_BLOCKS = 0.5


def _kept(measured: Measured) -> Iterator[tuple[CauseName, float, str]]:
    """What is still held: what is counted, then Python's objects with what they hold, then native memory."""
    calls = _calls(measured)
    if _only_failures(measured):
        names = ", ".join(measured.errors[:_LINES])
        seen = f"only calls that fail ({names}) let it grow; {_counted_errors(measured)}"
        yield "tracebacks", _of_failures(measured), "; ".join([seen, *_holders(measured.held)])
        return
    for each in _COUNTED_LIVE if measured.live else _COUNTED:
        more = measured.more(each.counted)
        if more >= max(_FEWEST_MORE, _WITH_CALLS * calls):
            others = [
                held
                for held in measured.held
                if held.about != each.cause and not any(mark in str(held) for mark in each.marks)
            ]
            if each.marks:
                yield from _held(others)
            size = measured.growth - sum(held.size for held in others)
            seen = f"{more:,} more {each.counted} after {calls:,} {measured.per}"
            seen = "; ".join([f"{seen}{_owned(each.cause, measured)}", *_holders(_kept_in(each.cause, more, measured))])
            yield each.cause, min(size, more * each.most), seen
            return
    if measured.live:
        yield from _live(measured, calls)
        return
    python = _python(measured, calls)
    if python > 0:
        places = [f"allocated at {where}"] if (where := _places(measured.traced)) else []
        yield _named(measured.held), python, "; ".join([*_holders(measured.held), *places])
    yield from _native(measured, calls, python)


def _calls(measured: Measured) -> int:
    return max(1, measured.calls[-1] - measured.calls[0]) if measured.calls else 1


def _of_failures(measured: Measured) -> float:
    """Bytes that failed calls have kept, or that are seen in the exceptions."""
    kept = sum(held.size for held in measured.held if held.errors)
    return max(kept, (measured.failing or 0.0) * measured.failures)


def _python(measured: Measured, calls: int) -> float:
    """Bytes of Python's objects, or of the containers that were found with what they hold outside of its memory."""
    return max(_allocated(measured, calls), sum(each.size for each in measured.held))


def _allocated(measured: Measured, calls: int) -> float:
    """Bytes that Python's allocators have given out."""
    if measured.small is None:
        return sum(measured.traced.values()) * calls
    tables = sum(each.table for each in measured.held)  # they grow too seldom to be traced
    return measured.small + measured.large * calls + tables


def _live(measured: Measured, calls: int) -> Iterator[tuple[CauseName, float, str]]:
    """Of a service that runs: Python's blocks tell which of the two it is."""
    more = measured.more("blocks")
    if measured.compiled > _COMPILED and "torch" in measured.libraries:
        yield "onednn plans", _PLAN * measured.compiled, _compiled(measured)
    elif measured.held:
        yield from _held(measured.held)
    elif more >= _BLOCKS * calls:
        most = _kinds(measured.types) or "of types that the collector does not track"
        yield "python objects", measured.growth, f"{more:,} more blocks of Python's memory; {most}"
    else:
        yield (
            "native memory",
            measured.growth,
            f"{more:,} more blocks of Python's memory after {calls:,} {measured.per}",
        )


def _held(held: Sequence[Held]) -> Iterator[tuple[CauseName, float, str]]:
    if held:
        yield _named(held), sum(each.size for each in held), "; ".join(_holders(held))


def _named(held: Sequence[Held]) -> CauseName:
    """Whether these are exceptions with their frames."""
    return "tracebacks" if held and held[0].errors else "python objects"


def _kinds(types: Mapping[str, int]) -> str:
    """The types that are most."""
    most = sorted(types.items(), key=lambda item: -item[1])[:_LINES]
    return ", ".join(f"{number:,} {kind.removeprefix('builtins.')}" for kind, number in most)


def _holders(held: Sequence[Held]) -> Iterator[str]:
    """The heaviest containers, one if it has most."""
    for each in held[:_LINES]:
        if each.size >= _LEAST * held[0].size:
            yield f"held by {each}, {format_bytes(each.size)}"


def _places(lines: Mapping[str, float]) -> str:
    """The lines that keep most, one if it keeps nearly all."""
    most = sorted(lines.items(), key=lambda line: -line[1])[:_LINES]
    shown = [(place, size) for place, size in most if size >= max(1, _LEAST * most[0][1])]
    return ", ".join(f"{place} ({format_bytes(int(size))} per call)" for place, size in shown)


def _counted_errors(measured: Measured) -> str:
    return (
        f"{measured.more('tracebacks'):,} more tracebacks, {measured.more('caught errors'):,} more exceptions are held"
    )


def _compiled(measured: Measured) -> str:
    return f"{format_bytes(measured.compiled)} more machine code was compiled"


def _only_failures(measured: Measured) -> bool:
    failing, succeeding = measured.failing or 0.0, measured.succeeding or 0.0
    return failing > 0 and succeeding < _NONE * failing and measured.more("caught errors") > 0


def _native(measured: Measured, calls: int, python: float) -> Iterator[tuple[CauseName, float, str]]:
    """What libraries have, each by its own figure, and what malloc has given out beyond that and Python's objects."""
    rate, named = measured.per_call, 0.0
    by_shape = measured.repeats is not None and max(measured.repeats, measured.same_shape or 0.0) < _NONE * rate
    if "torch" in measured.libraries and measured.compiled > 0 and by_shape:
        named = min(measured.growth - python, _PLAN * measured.compiled)
        seen = f"it grows with new shapes and not with repeated ones; {_compiled(measured)}"
        yield "onednn plans", named, seen + _owned("onednn plans", measured)
    elif measured.uncached is not None and measured.uncached < _NONE * rate:
        named = (rate - max(0.0, measured.uncached)) * calls - python
        seen = f"with the caches of tokenizers switched off, new inputs grow by {measured.uncached:,.0f} bytes per call"
        owned = _owned("tokenizer caches", measured)
        yield "tokenizer caches", named, f"{seen}, and not by {rate:,.0f}{owned}"
    repeated = "" if measured.repeats is None else f"; a repeated input grows by {measured.repeats:,.0f} bytes per call"
    traced = sum(measured.native.values())
    if measured.given_out is not None:
        size = (measured.small or 0) + measured.given_out - python - named
        if size < _BESIDE * (python - _allocated(measured, calls)):
            return  # of tensors, malloc has more than their numbers
        seen = f"malloc has given out {format_bytes(max(0, measured.given_out))} more, of which Python's objects and "
        seen += f"what they hold are {format_bytes(round(max(0.0, python - (measured.small or 0))))}"
    else:
        size, seen = traced * calls - named, "memray has traced it"
    where = f"; allocated below {_places(measured.native)}" if measured.native else ""
    yield "native memory", size, "; ".join([f"{seen}{repeated}{where}", *_holders(measured.held)])
