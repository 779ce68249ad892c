"""Isolated functions for the contract of handles, in a module that a mold can import.

Their loads and calls do what the files in ``HANDLES_FOLDER`` say, which molds and brokers inherit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract.handles import IN_PROCESS, Times, Variant, make_in_process

from modelguard import Backoff, Isolated, isolate

#: Real time: short, and long enough for what a test does meanwhile.
REAL = Times(due="400ms", idle="400ms", backoff=Backoff(3.0, 3.0))

_PAUSE = 0.005


def folder() -> Path:
    """Where the files of this test are."""
    return Path(os.environ["HANDLES_FOLDER"])


def wait_while(condition: Callable[[], bool]) -> None:
    """Wait in a load or in a call, and not for ever."""
    until = time.monotonic() + 60
    while condition() and time.monotonic() < until:
        time.sleep(_PAUSE)


class Model:
    """Knows which load has made it."""

    def __init__(self, number: int) -> None:
        self.number = number


def load(key: str = "a") -> Model:
    """Note this load and the process in which it happens; fail or wait if the test wants it."""
    del key
    place = folder()
    log = place / "loads"
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    number = len(log.read_text().splitlines())
    fails = (place / "fail").exists()
    if (place / "hold").exists():
        (place / "reached").touch()
        wait_while((place / "hold").exists)
    if fails:
        raise OSError("modelguard_loader fails because of fail()")
    return Model(number)


def note_unload(model: Model) -> None:
    """Note that a model was unloaded."""
    with (folder() / "unloads").open("a") as file:
        file.write(f"{model.number}\n")


def _work(model: Model, gate: str) -> int:
    """Answer with the number of the model; with a gate, when it is opened."""
    if gate:
        Path(f"{gate}.begun").touch()
        wait_while(lambda: not Path(gate).exists())
    return model.number


def _source(kind: str, variant: Variant) -> Any:
    return make_in_process(kind, variant, load, REAL, unload=note_unload)


OPTIONS: dict[str, Any] = {"workers": 1, "timeout": "60s"}


@isolate(**OPTIONS, name="handle plain")
@_source("guard", "plain")
def plain(model: Model, gate: str = "") -> int:
    return _work(model, gate)


@isolate(**OPTIONS, name="handle due")
@_source("guard", "due")
def due(model: Model, gate: str = "") -> int:
    return _work(model, gate)


@isolate(**OPTIONS, name="handle idle")
@_source("guard", "idle")
def idle(model: Model, gate: str = "") -> int:
    return _work(model, gate)


@isolate(**OPTIONS, name="handle kept")
@_source("guard", "kept")
def kept(model: Model, gate: str = "") -> int:
    return _work(model, gate)


@isolate(**OPTIONS, scope="host", name="handle shared plain")
@_source("guard", "plain")
def shared_plain(model: Model, gate: str = "") -> int:
    return _work(model, gate)


@isolate(**OPTIONS, scope="host", name="handle shared due")
@_source("guard", "due")
def shared_due(model: Model, gate: str = "") -> int:
    return _work(model, gate)


@isolate(**OPTIONS, scope="host", name="handle shared idle")
@_source("guard", "idle")
def shared_idle(model: Model, gate: str = "") -> int:
    return _work(model, gate)


@isolate(**OPTIONS, name="handle keys plain")
@_source("pool", "plain")(key="key")
def keys_plain(model: Model, gate: str = "", key: str = "a") -> int:
    del key
    return _work(model, gate)


@isolate(**OPTIONS, name="handle keys due")
@_source("pool", "due")(key="key")
def keys_due(model: Model, gate: str = "", key: str = "a") -> int:
    del key
    return _work(model, gate)


@isolate(**OPTIONS, name="handle keys idle")
@_source("pool", "idle")(key="key")
def keys_idle(model: Model, gate: str = "", key: str = "a") -> int:
    del key
    return _work(model, gate)


_FUNCTIONS: dict[str, dict[Variant, Isolated[..., Any]]] = {
    "process": {"plain": plain, "due": due, "idle": idle, "kept": kept},
    "keys": {"plain": keys_plain, "due": keys_due, "idle": keys_idle, "kept": keys_plain},
    "host": {"plain": shared_plain, "due": shared_due, "idle": shared_idle, "kept": shared_plain},
}


def make_any(kind: str, variant: Variant) -> Any:
    """The public object of any handle: of an isolated function a fresh one, since those above have seen other tests."""
    if kind in IN_PROCESS:
        return make_in_process(kind, variant, load, REAL, unload=note_unload)
    function = _FUNCTIONS[kind][variant]
    scope: Any = "host" if kind == "host" else "process"
    return isolate(**OPTIONS, scope=scope, name=function.name)(function.isolated_function)
