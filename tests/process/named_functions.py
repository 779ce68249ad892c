"""What stubs stand for, in a module that no owner imports."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from modelguard import TTL, Changed, Loading, Modified, Uses, guard, isolate, pool

#: Watched by a policy.
WEIGHTS = Path(os.environ.get("NAMED_WEIGHTS", "/dev/null"))


class Foreign:
    """A result that only this module can rebuild."""


class ForeignError(Exception):
    """An error that only this module can rebuild."""


def load() -> dict[str, int]:
    """Make a model that knows where it was loaded."""
    return {"pid": os.getpid()}


def load_slowly() -> dict[str, int]:
    """Take longer than the guard allows, and hold the GIL meanwhile."""
    sum(range(3_000_000_000))
    return load()


model = guard(load, reload_on=None)
other = guard(load, reload_on=None, name="other")
many = pool(lambda _: load(), max_memory="1 GB")


@model
def where(model: dict[str, int], text: str, *, times: int = 1) -> list[Any]:
    """Name the process that has loaded the model, and the one that answers."""
    return [text * times, model["pid"], os.getpid()]


@guard(load, reload_on=TTL("1s", jitter=0))
def aging(model: dict[str, int]) -> int:
    """Use a model that is renewed by its age."""
    return model["pid"]


@guard(load, reload_on=Modified(WEIGHTS, quiet="100ms"))
def watching(model: dict[str, int]) -> int:
    """Use a model that is renewed with its file."""
    return model["pid"]


@guard(load, reload_on=Uses(1))
def wearing(model: dict[str, int]) -> int:
    """Wear out a worker."""
    return os.getpid()


@guard(load_slowly, reload_on=None, loading=Loading("1s"))
def never(model: dict[str, int]) -> int:
    """Use a model that comes too late."""
    return model["pid"]


def helper() -> int:
    """Use the model on behalf of another function."""
    with model.lease() as loaded:
        return loaded["pid"]


def leasing(text: str) -> list[Any]:
    """Use the model without being decorated."""
    return [text, helper()]


def plain() -> int:
    """Use no guard."""
    return os.getpid()


@isolate(workers=3, recycle_on=Uses(1))
def isolated() -> int:
    """Be isolated here too."""
    return os.getpid()


async def coroutine(text: str) -> str:
    """Use an event loop."""
    return text


@model
def items(model: dict[str, int], count: int) -> Iterator[int]:
    """Stream."""
    yield from range(count)


async def aitems(count: int) -> AsyncIterator[int]:
    """Stream on an event loop."""
    for one in range(count):
        yield one


def odd(what: str) -> Any:
    """Answer with what an owner cannot rebuild."""
    if what == "error":
        raise ForeignError("odd")
    if what == "tensor":
        import torch

        return torch.zeros(3)
    return Foreign() if what == "result" else what


def bare(model: dict[str, int], text: str) -> str:
    """Lack a guard."""
    return text


def two() -> list[int]:
    """Use two guards."""
    with model.lease(), other.lease():
        return []


@many(key="text")
def pooled(model: dict[str, int], text: str) -> str:
    """Use one of many models."""
    return text


@guard(load, reload_on=Changed(time.time))
def probing(model: dict[str, int]) -> int:
    """Use a model that is renewed by a function of this module."""
    return model["pid"]
