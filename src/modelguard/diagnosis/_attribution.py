"""From measurements to causes, each with its share of the growth. The rest is said to be unexplained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from modelguard._units import format_bytes
from modelguard.diagnosis._growth import Cause, CauseName, Measured
from modelguard.diagnosis._holders import Held

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
_LINES = 3

_FIXES: dict[CauseName, str] = {
    "unbounded cache": "Give the cache a size: functools.lru_cache(maxsize=1024).",
    "retention": "The allocator keeps free memory: modelguard run --allocator auto, or guard(..., trim_every='30s').",
    "cycles": "Break the reference cycle, or let the collector run: do not disable it.",
    "tracebacks": "Do not keep exceptions, or drop their frames: error.with_traceback(None).",
    "tasks": "Do not keep finished tasks: add task.add_done_callback(kept.discard).",
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
    "worker processes": "Replace workers in time: isolate(recycle_on=Uses(1000)), or the guard's reload_on. "
    "Diagnose the function below @isolate to learn what it keeps.",
    "python objects": "Look at the lines: they allocate what is never freed.",
    "native memory": "A native library keeps it: reload by guard(..., reload_on=MemoryGrowth('500 MB')).",
}


def attribute(measured: Measured) -> tuple[tuple[Cause, ...], float]:
    """Name the causes of growth.

    Returns:
        The causes, the largest share first, and the share that is unexplained.
    """
    growth = max(1, measured.growth)
    causes: list[Cause] = []
    rest = 1.0
    for name, size, seen in (*_in_workers(measured), *_given_back(measured), *_kept(measured)):
        share = min(rest, size / growth)
        if share >= _LEAST:
            causes.append(Cause(name, round(share, 2), seen, _fix(name, measured)))
            rest -= share
    causes.sort(key=lambda cause: -cause.share)
    return tuple(_merged(causes)), round(max(0.0, rest), 2)


def _merged(causes: list[Cause]) -> Iterator[Cause]:
    """One entry for each cause."""
    by_name: dict[CauseName, list[Cause]] = {}
    for cause in causes:
        by_name.setdefault(cause.name, []).append(cause)
    for name, same in by_name.items():
        seen = "; ".join(cause.seen for cause in same)
        yield Cause(name, round(sum(cause.share for cause in same), 2), seen, same[0].fix)


def _fix(name: CauseName, measured: Measured) -> str:
    """What to do about a cause: of Python's objects, in the container that holds them if it is known."""
    if name == "python objects" and measured.held:
        return _bounded(measured.held[0])
    if name == "python objects" and not measured.traced:
        return "modelguard diagnose MODULE:FUNCTION finds the lines that allocate them."
    return _FIXES[name]


def _bounded(held: Held) -> str:
    """What to do about a container that grows."""
    where = held.path or f"the {held.kind}"
    if held.errors:
        return f"Keep no exceptions in {where}, or let go of their frames: error.with_traceback(None)."
    if held.kind.endswith("ict"):
        return f"Give {where} a bound, as cachetools.LRUCache(maxsize=1024) has, or delete entries that are done with."
    return f"Give {where} a bound, as collections.deque(maxlen=1000) has, or remove entries that are done with."


def _in_workers(measured: Measured) -> Iterator[tuple[CauseName, float, str]]:
    """What other processes hold, in which nothing else was measured."""
    if measured.in_workers > 0:
        more = format_bytes(measured.in_workers)
        yield "worker processes", measured.in_workers, f"the workers of the isolated function hold {more} more"


def _given_back(measured: Measured) -> Iterator[tuple[CauseName, float, str]]:
    """What was freed by an act that belongs to one cause: its size is measured."""
    if measured.trimmed:
        yield "retention", measured.trimmed, f"a trim of the allocator gave {format_bytes(measured.trimmed)} back"
    if measured.collected:
        garbage = f"{measured.garbage:,} objects, which gave {format_bytes(measured.collected)} back"
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


#: What the census counts, and the cause that it proves.
_COUNTED: tuple[tuple[str, CauseName], ...] = (
    ("threads", "threads"),
    ("ssl contexts", "ssl contexts"),
    ("tasks", "tasks"),
    ("tensors with a graph", "autograd"),
    ("queued items", "queues"),
    ("spacy strings", "spacy strings"),
    ("mappings", "mappings"),
)


#: The same in a service that runs, where no cache is emptied.
_COUNTED_LIVE: tuple[tuple[str, CauseName], ...] = (
    *_COUNTED,
    ("cached results", "unbounded cache"),
    ("metric series", "metric labels"),
    ("caught errors", "tracebacks"),
)
#: Memory blocks of Python's allocators by which each call has to grow so that Python objects are what grows.
_BLOCKS = 0.5


def _kept(measured: Measured) -> Iterator[tuple[CauseName, float, str]]:
    """What is still held. A cause that is counted explains what is left; then lines of Python, then the rest."""
    calls = max(1, measured.calls[-1] - measured.calls[0]) if measured.calls else 1
    traced = sum(measured.traced.values()) * calls
    if measured.failing is not None and _only_failures(measured):
        names = ", ".join(measured.errors[:_LINES])
        seen = f"only calls that fail ({names}) let it grow; {_counted(measured)}"
        yield "tracebacks", measured.growth, "; ".join([seen, *_holders(measured.held)])
        return
    for counted, name in _COUNTED_LIVE if measured.live else _COUNTED:
        more = measured.more(counted)
        if more >= max(_FEWEST_MORE, _WITH_CALLS * calls):
            seen = f"{more:,} more {counted} after {calls:,} {measured.per}"
            yield name, measured.growth, "; ".join([seen, *_holders(measured.held)])
            return
    if measured.live and measured.compiled > _COMPILED and "torch" in measured.libraries:
        yield "onednn plans", measured.growth, f"{format_bytes(measured.compiled)} more machine code was compiled"
        return
    if measured.live and not measured.held and measured.more("blocks") >= _BLOCKS * calls:
        kinds = sorted(measured.types.items(), key=lambda item: -item[1])[:_LINES]
        most = ", ".join(f"{number:,} {kind}" for kind, number in kinds) or "of types that the collector does not track"
        yield "python objects", measured.growth, f"{measured.more('blocks'):,} more blocks of Python's memory; {most}"
        return
    held = sum(each.size for each in measured.held)
    if traced or held:
        places = [f"allocated at {_places(measured.traced)}"] if traced else []
        yield "python objects", max(traced, held), "; ".join([*_holders(measured.held), *places])
    yield from _native(measured)


def _holders(held: Sequence[Held]) -> Iterator[str]:
    """The heaviest containers, one if it has most."""
    for each in held[:_LINES]:
        if each.size >= _LEAST * held[0].size:
            yield f"held by {each}, {format_bytes(each.size)}"


def _places(lines: Mapping[str, float]) -> str:
    """The lines that keep most."""
    return ", ".join(f"{place} ({format_bytes(int(size))} per call)" for place, size in list(lines.items())[:_LINES])


def _counted(measured: Measured) -> str:
    return (
        f"{measured.more('tracebacks'):,} more tracebacks, {measured.more('caught errors'):,} more exceptions are held"
    )


def _only_failures(measured: Measured) -> bool:
    failing, succeeding = measured.failing or 0.0, measured.succeeding or 0.0
    return failing > 0 and succeeding < _NONE * failing and measured.more("caught errors") > 0


def _native(measured: Measured) -> Iterator[tuple[CauseName, float, str]]:
    rate = measured.per_call
    by_shape = (
        measured.repeats is not None
        and measured.repeats < _NONE * rate
        and (measured.same_shape is None or measured.same_shape < _NONE * rate)
    )
    compiled = f"{format_bytes(measured.compiled)} more machine code was compiled"
    if "torch" in measured.libraries and measured.compiled > 0 and by_shape:
        yield "onednn plans", measured.growth, f"it grows with new shapes and not with repeated ones; {compiled}"
    elif "onnxruntime" in measured.libraries and by_shape:
        yield "onnx runtime", measured.growth, "it grows with new shapes and not with repeated ones"
    elif "tensorflow" in measured.libraries and by_shape:
        yield "tensorflow", measured.growth, "it grows with new shapes and not with repeated ones"
    elif "tokenizers" in measured.libraries and measured.repeats is not None and measured.repeats < _NONE * rate:
        yield "tokenizer caches", measured.growth, "it grows with new texts and not with repeated ones"
    else:
        depends = (
            "" if measured.repeats is None else f"; a repeated input grows by {measured.repeats:,.0f} bytes per call"
        )
        where = f"; allocated below {_places(measured.native)}" if measured.native else ""
        seen = (
            "no container that has grown holds it"
            if measured.live
            else "neither freed by a collection nor allocated by Python"
        )
        yield "native memory", measured.growth, f"{seen}{depends}{where}"
