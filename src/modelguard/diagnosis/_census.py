"""Counts what a process holds that is known to leak, and empties caches that are known to grow."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["LIBRARIES", "cache_sizes", "caches", "count", "pipelines"]

LIBRARIES = ("onnxruntime", "paddle", "pyarrow", "spacy", "tensorflow", "tokenizers", "torch")

#: Entries that a cache gets by the way.
_FEW = 10

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
    """Count objects by kind, and what libraries say of themselves."""
    found: Counter[str] = Counter({"threads": threading.active_count()})
    for thing in gc.get_objects():
        kind = type(thing)
        name = _TYPES.get((kind.__module__, kind.__name__))
        if name is not None:
            found[name] += 1
        elif kind.__name__ == "Tensor" and kind.__module__ == "torch":
            found["tensors with a graph"] += getattr(thing, "grad_fn", None) is not None
        elif kind.__name__ in ("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue") and hasattr(thing, "qsize"):
            found["queued items"] += thing.qsize()
    found["caught errors"] = sum(isinstance(thing, BaseException) for thing in gc.get_objects())
    found["spacy strings"] = sum(len(strings) for strings in _spacy_stores())
    found["metric series"] = _series()
    return dict(found)


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
    yield from _of_libraries()


def _of_libraries() -> Iterator[tuple[str, Callable[[], object]]]:
    prometheus = sys.modules.get("prometheus_client.registry")
    if prometheus is not None:
        for collector in list(getattr(prometheus.REGISTRY, "_collector_to_names", {})):
            if getattr(collector, "_labelnames", ()):
                yield f"metric:{getattr(collector, '_name', '?')}", collector.clear
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        yield "pyarrow", arrow.default_memory_pool().release_unused
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield "cuda", torch.cuda.empty_cache


def _unbounded() -> list[Any]:
    found = [each for each in gc.get_objects() if type(each).__name__ == "_lru_cache_wrapper"]
    return [cache for cache in found if cache.cache_info().maxsize is None]


def pipelines() -> list[Any]:
    """The spaCy pipelines of this process."""
    return list(_reachable("spacy.language", ("Language",))) if "spacy" in sys.modules else []


def _spacy_stores() -> list[Any]:
    return list({id(nlp.vocab.strings): nlp.vocab.strings for nlp in pipelines()}.values())


def _reachable(module: str, names: tuple[str, ...]) -> Iterator[Any]:
    """Objects of types of a library and of their subclasses; the collector tracks only some of them itself."""
    library = sys.modules.get(module)
    kinds = tuple(kind for name in names if isinstance(kind := getattr(library, name, None), type))
    seen = set()
    for thing in gc.get_objects():
        for each in (thing, *gc.get_referents(thing)):
            if isinstance(each, kinds) and id(each) not in seen:
                seen.add(id(each))
                yield each


def _series() -> int:
    """The number of time series of prometheus_client's metrics."""
    prometheus = sys.modules.get("prometheus_client.registry")
    if prometheus is None:
        return 0
    collectors = list(getattr(prometheus.REGISTRY, "_collector_to_names", {}))
    return sum(len(getattr(collector, "_metrics", ())) for collector in collectors)
