"""Isolated functions that nobody calls for a while, in a module that a mold can import."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from tests.process.isolated_functions import QUICK, WEIGHTS, Model, load

from modelguard import Breaker, Idle, Modified, Uses, guard, isolate, pool

#: Written by each worker, so it is its own and not the mold's.
CACHE = 20_000_000


@isolate(workers=2, timeout="10s")
@guard(load, reload_on=Idle("300ms", keep="mold"), loading=QUICK)
def kept(model: Model, seconds: float = 0.0) -> tuple[int, int]:
    """Tell the mold's and the worker's process id, and take memory."""
    if not model.leak:
        model.leak.append(bytearray(os.urandom(1000)) * (CACHE // 1000))
    time.sleep(seconds)
    return model.pid, os.getpid()


@isolate(workers=1, timeout="10s")
@guard(load, reload_on=Idle("300ms", keep="mold") | Idle("2s"), loading=QUICK)
def in_two_steps(model: Model) -> int:
    """Tell the mold's process id."""
    return model.pid


@isolate(workers=1, timeout="10s")
@guard(load, reload_on=Idle("300ms", keep="mold", ready=False), loading=QUICK)
def unready(model: Model) -> int:
    """Tell the mold's process id."""
    return model.pid


@isolate(workers=1, timeout="10s")
@guard(load, reload_on=Idle("300ms", keep="mold") | Modified(WEIGHTS) | Uses(3), loading=QUICK)
def renewed(model: Model) -> int:
    """Tell the mold's process id."""
    return model.pid


@isolate(workers=2, timeout="10s", breaker=Breaker(failures=100))
@guard(load, reload_on=Idle("50ms", keep="mold"), loading=QUICK)
def often(_: Model, number: int, crash: bool = False) -> int:  # noqa: FBT001, FBT002 - as a user would write it
    """Answer, or crash."""
    if crash:
        os._exit(3)
    return number


@isolate(workers=1, timeout="10s")
@guard(load, reload_on=Idle("300ms", keep="mold"), loading=QUICK)
def steps(model: Model, count: int) -> Iterator[int]:
    """The mold's process id, some times."""
    for _ in range(count):
        yield model.pid


@isolate(workers=1, recycle_on=Idle("300ms", keep="mold"))
def without_guard() -> int:
    """Tell the worker's process id."""
    return os.getpid()


def voice(key: str) -> Model:
    """The model of one key."""
    model = load()
    model.leak.append(bytearray(key.encode()))
    return model


voices = pool(voice, max_memory="2 GB", reload_on=Idle("500ms"), loading=QUICK)


@isolate(workers=1, timeout="10s")
@voices(key="name")
def speak(model: Model, name: str, seconds: float = 0.0) -> tuple[str, int]:
    """The key as the model knows it, and the mold's process id."""
    time.sleep(seconds)
    assert name
    return model.leak[0].decode(), model.pid


@voices(key="name")
def speak_here(model: Model, name: str) -> int:
    """In this process."""
    assert name
    return id(model)
