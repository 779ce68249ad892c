"""Counts what a process holds that is known to leak, and empties caches that are known to grow."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = [
    "LIBRARIES",
    "cache_sizes",
    "caches",
    "count",
    "guard_uses",
    "pipelines",
    "pools",
    "switch_off_caches",
    "types",
]

LIBRARIES = ("onnxruntime", "paddle", "pyarrow", "spacy", "tensorflow", "tokenizers", "torch")

#: Entries that a cache gets by the way.
_FEW = 10

#: Objects of a type that are few are not counted by type.
_MANY = 100

#: How to ask a queue for its length without its lock, which another thread may hold.
_QUEUES: dict[str, Callable[[Any], int]] = {
    "queue": lambda queue: len(queue.queue),
    "_queue": lambda queue: int(queue.qsize()),
    "asyncio.queues": lambda queue: int(queue.qsize()),
}

#: Types that are counted under a name of their own.
_TYPES = {
    ("_asyncio", "Task"): "tasks",
    ("asyncio.tasks", "Task"): "tasks",
    ("ssl", "SSLContext"): "ssl contexts",
    ("builtins", "traceback"): "tracebacks",
    ("builtins", "frame"): "frames",
    ("mmap", "mmap"): "mappings",
}


def count() -> dict[str, int]:
    """Count objects by kind, and what libraries say of themselves. Takes 0.4 s of CPU time for a million objects."""
    found: Counter[str] = Counter({"threads": threading.active_count(), "blocks": sys.getallocatedblocks()})
    for thing in gc.get_objects():
        kind = type(thing)  # and not isinstance, which asks proxies for what they stand for
        name = _TYPES.get((kind.__module__, kind.__name__))
        if name is not None:
            found[name] += 1
        elif issubclass(kind, BaseException):
            found["caught errors"] += 1
        elif kind.__name__ == "Tensor" and kind.__module__ == "torch":
            found["tensors with a graph"] += getattr(thing, "grad_fn", None) is not None
        elif kind.__name__ == "_lru_cache_wrapper":
            info = thing.cache_info()
            found["cached results"] += info.currsize if info.maxsize is None else 0
        elif kind.__name__ == "Function" and kind.__module__.startswith("tensorflow.python.eager"):
            found["tensorflow traces"] += thing.experimental_get_tracing_count()
        elif kind.__name__.endswith("Queue") and kind.__module__ in _QUEUES:
            found["queued items"] += _QUEUES[kind.__module__](thing)
    found["spacy strings"] = sum(len(strings) for strings in _spacy_stores())
    found["metric series"] = _series()
    return dict(found)


def types() -> dict[str, int]:
    """The numbers of objects by type, of those types that have many."""
    found = Counter(type(thing) for thing in gc.get_objects())
    return {f"{kind.__module__}.{kind.__qualname__}": number for kind, number in found.items() if number > _MANY}


def guard_uses() -> list[tuple[str, int, int]]:
    """The guards of this process: name, generation, and calls that have ended on it."""
    module = sys.modules.get("modelguard.lifecycle.model_guard")
    statuses = [guard.status() for guard in module.guards()] if module is not None else []
    return [(status.name, status.generation, status.uses) for status in statuses]


def cache_sizes() -> dict[int, int]:
    """The number of entries of each ``lru_cache`` without a limit, by its id."""
    return {id(cache): cache.cache_info().currsize for cache in _unbounded()}


def caches(before: Mapping[int, int]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The caches of this process that have grown and can be emptied, each with a name that says what it is.

    Args:
        before: The earlier :func:`cache_sizes`.
    """
    for cache in _unbounded():
        with contextlib.suppress(Exception):
            info = cache.cache_info()
            if info.currsize > before.get(id(cache), 0) + _FEW:
                name = f"{getattr(cache, '__module__', '?')}.{getattr(cache, '__qualname__', '?')}"
                yield f"lru_cache:{name} ({info.currsize:,} entries)", cache.cache_clear
    prometheus = sys.modules.get("prometheus_client.registry")
    if prometheus is not None:
        for collector in list(getattr(prometheus.REGISTRY, "_collector_to_names", {})):
            if getattr(collector, "_labelnames", ()):
                yield f"metric:{getattr(collector, '_name', '?')}", collector.clear


def pools() -> Iterator[tuple[str, Callable[[], object]]]:
    """The memory that libraries keep for later, by library, and what makes them return it."""
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        yield "pyarrow", arrow.default_memory_pool().release_unused
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield "cuda", torch.cuda.empty_cache
    if "onnxruntime" in sys.modules:
        yield "onnxruntime", _shrink_arenas


def _shrink_arenas() -> None:
    """Run each session of ONNX Runtime on inputs of zeros, after which its arena returns what is free."""
    runtime, numpy = sys.modules["onnxruntime"], sys.modules["numpy"]
    for session in _of_type("onnxruntime", "InferenceSession"):
        with contextlib.suppress(Exception):  # it has no arena, or takes other inputs
            options = runtime.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
            zeros = {each.name: numpy.zeros(*_smallest(each)) for each in session.get_inputs()}
            session.run(None, zeros, options)


def _smallest(given: Any) -> tuple[list[int], str]:
    """The shape, with 1 where it is free, and the type of an input of ONNX Runtime."""
    kind: str = given.type.removeprefix("tensor(").removesuffix(")")
    shape = [length if isinstance(length, int) else 1 for length in given.shape]
    return shape, {"float": "float32", "double": "float64"}.get(kind, kind)


def switch_off_caches() -> bool:
    """Switch off the caches of tokenizers; returns whether there are any. Emptying them gives nothing back (0.23)."""
    found = [thing.model for thing in _of_type("tokenizers", "Tokenizer")]
    caches = [model for model in found if hasattr(model, "_resize_cache")]
    for model in caches:
        model._resize_cache(0)  # noqa: SLF001 - there is no other way
    return bool(caches)


def _of_type(library: str, name: str) -> list[Any]:
    return [
        thing
        for thing in gc.get_objects()
        if type(thing).__name__ == name and type(thing).__module__.partition(".")[0] == library
    ]


def _unbounded() -> list[Any]:
    found = [each for each in gc.get_objects() if type(each).__name__ == "_lru_cache_wrapper"]
    return [cache for cache in found if cache.cache_info().maxsize is None]


def pipelines() -> list[Any]:
    """The spaCy pipelines of this process."""
    kind = getattr(sys.modules.get("spacy.language"), "Language", None)
    if kind is None:
        return []
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return found or list(_referred(kind))  # those that were frozen


def _spacy_stores() -> list[Any]:
    return list({id(nlp.vocab.strings): nlp.vocab.strings for nlp in pipelines()}.values())


def _referred(kind: type) -> Iterator[Any]:
    """Objects of a type that the collector does not list, but to which others refer."""
    seen = set()
    for thing in gc.get_objects():
        for each in gc.get_referents(thing):
            if issubclass(type(each), kind) and id(each) not in seen:
                seen.add(id(each))
                yield each


def _series() -> int:
    """The number of time series of prometheus_client's metrics."""
    prometheus = sys.modules.get("prometheus_client.registry")
    if prometheus is None:
        return 0
    collectors = list(getattr(prometheus.REGISTRY, "_collector_to_names", {}))
    return sum(len(getattr(collector, "_metrics", ())) for collector in collectors)
