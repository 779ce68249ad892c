"""What a guard adds to a call: nanoseconds compared with a bare wrapt decorator that only calls the function.

All variants alternate in short rounds of one process, so other work on the machine affects all of them alike. An
overhead is the difference between two neighbours in one round. The guard has a real policy, which the ticker's thread
evaluates meanwhile.

The comparison is what the author of story 1 wrote: the model comes from a cachetools TTLCache, which takes a lock
(``lock=``) or a condition (``condition=``, which keeps callers from loading twice).
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import _common
import wrapt
from cachetools import TTLCache, cached

from modelguard import TTL, MemoryGrowth, Uses, guard

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALLS = 1_000
TARGET = 400.0
TEXT = "銀座でランチ"

Sync = Callable[[str], object]
Async = Callable[[str], Awaitable[object]]


class Model:
    """Stands for any model: a call on it costs next to nothing, so the overhead is all there is."""


@wrapt.decorator
def through(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001 - as wrapt calls it
    """The bare decorator."""
    return wrapped(*args, **kwargs)


nlp = guard(Model, reload_on=TTL("1h") | Uses(1_000_000_000) | MemoryGrowth("500 MB"))


@cached(TTLCache(1, 3600), lock=threading.RLock())
def model_by_lock() -> Model:
    return Model()


@cached(TTLCache(1, 3600), condition=threading.Condition())
def model_by_condition() -> Model:
    return Model()


def plain(text: str) -> str:
    return text


@through
def bare(text: str) -> str:
    return text


@nlp
def guarded(model: Model, text: str) -> str:  # noqa: ARG001 - takes the model, as every guarded function does
    return text


def leased(text: str) -> str:
    with nlp.lease():
        return text


def locked(text: str) -> str:
    model_by_lock()
    return text


def conditioned(text: str) -> str:
    model_by_condition()
    return text


class Service:
    """The same as methods."""

    def plain(self, text: str) -> str:
        """Not decorated."""
        return text

    @through
    def bare(self, text: str) -> str:
        """Decorated to no purpose."""
        return text

    @nlp
    def guarded(self, model: Model, text: str) -> str:  # noqa: ARG002
        """Guarded."""
        return text


async def aplain(text: str) -> str:
    return text


@through
async def abare(text: str) -> str:
    return text


@nlp
async def aguarded(model: Model, text: str) -> str:  # noqa: ARG001
    return text


async def alocked(text: str) -> str:
    model_by_lock()
    return text


async def aconditioned(text: str) -> str:
    model_by_condition()
    return text


service = Service()

SYNC: dict[str, Sync] = {
    "function, plain": plain,
    "function, bare": bare,
    "function, guarded": guarded,
    "function, lease": leased,
    "function, cachetools lock": locked,
    "function, cachetools condition": conditioned,
    # Looked up anew for each call, as callers do: making the bound method is a part of the price.
    "method, plain": lambda text: service.plain(text),  # noqa: PLW0108
    "method, bare": lambda text: service.bare(text),  # noqa: PLW0108
    "method, guarded": lambda text: service.guarded(text),  # noqa: PLW0108
}
ASYNC: dict[str, Async] = {
    "async, plain": aplain,
    "async, bare": abare,
    "async, guarded": aguarded,
    "async, cachetools lock": alocked,
    "async, cachetools condition": aconditioned,
}


def spin(call: Sync) -> float:
    """Nanoseconds per call, loop included: it is the same for all and falls out of every difference."""
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        call(TEXT)
    return (time.perf_counter_ns() - started) / CALLS


async def aspin(call: Async) -> float:
    started = time.perf_counter_ns()
    for _ in range(CALLS):
        await call(TEXT)
    return (time.perf_counter_ns() - started) / CALLS


async def measure(rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per call of every variant in every round. The first round only warms up."""
    found: dict[str, list[float]] = {name: [] for name in (*SYNC, *ASYNC)}
    for _ in range(rounds + 1):
        for name, call in SYNC.items():
            found[name].append(spin(call))
        for name, acall in ASYNC.items():
            found[name].append(await aspin(acall))
        await asyncio.sleep(0)
    return {name: values[1:] for name, values in found.items()}


def rows(found: dict[str, list[float]]) -> list[_common.Row]:
    def over(name: str, base: str) -> list[float]:
        return [value - floor for value, floor in zip(found[name], found[base], strict=True)]

    result = []
    for kind in ("function", "method", "async"):
        values = over(f"{kind}, guarded", f"{kind}, bare")
        result.append(_common.Row(f"guarded {kind} over bare wrapt", values, "ns", TARGET, ours=True))
    values = over("function, lease", "function, plain")
    result.append(_common.Row("with guard.lease() over plain", values, "ns", ours=True))
    for kind in ("function", "async"):
        for way in ("lock", "condition"):
            values = over(f"{kind}, cachetools {way}", f"{kind}, plain")
            result.append(_common.Row(f"cachetools {way}= look-up ({kind})", values, "ns"))
    result += [_common.Row(f"  {name}", values, "ns") for name, values in found.items()]
    return result


def main() -> None:
    benchmark = _common.Benchmark("call_overhead", "Extra time of a guarded call")
    nlp.load()
    gc.collect()
    gc.disable()  # as timeit does
    found = asyncio.run(measure(40 if benchmark.quick else 600))
    gc.enable()
    lines = rows(found)

    def draw(figure: Figure) -> None:
        overheads = [row for row in lines if not row.name.startswith(" ")]
        _common.bars(figure.subplots(), overheads, "Extra time for one call", axis="nanoseconds")

    bests = ", ".join(
        f"{kind} {min(found[f'{kind}, guarded']) - min(found[f'{kind}, bare']):,.0f}"
        for kind in ("function", "method", "async")
    )
    benchmark.finish(
        lines, draw, size=(10, 4), notes=["", f"Guarded less bare, best round against best round: {bests} ns"], ns=found
    )
    nlp.close()


if __name__ == "__main__":
    main()
