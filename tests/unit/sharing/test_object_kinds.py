"""What never becomes immortal: code, handles, and what only they lead to."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import io
import logging
import math
import mmap
import multiprocessing.connection
import multiprocessing.pool
import multiprocessing.synchronize
import queue
import socket
import ssl
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.unit.of_no_module import SwigPyObject
from tests.unit.sharing.immortals import Slotted, is_immortal, needs_immortals, text

from modelguard.sharing._graph import ObjectKinds
from modelguard.sharing._immortal import Skipped, immortalize


class Model:
    """Accepts any attribute."""

    def __init__(self, **attributes: object) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


def module_level() -> None:
    """A function for a model to hold."""


@functools.lru_cache
def remembering(key: str) -> str:
    return key


def generate() -> Iterator[int]:
    yield 1


class Hub:
    """Something that is not the model's own."""

    def __init__(self) -> None:
        self.inside = [text(11)]

    def method(self) -> None: ...


HUB = Hub()


OUTSIDE = {
    "class": Hub,
    "module": sys.modules[__name__],
    "function": module_level,
    "closure": lambda: HUB.inside,
    "cache": remembering,
    "code": module_level.__code__,
    "generator": generate(),
    "module's builtin": math.sin,
    "class's builtin": dict.fromkeys,
    "method": str.lower,
    "slot": str.__len__,
    "class method": dict.__dict__["fromkeys"],
    "member": Slotted.__dict__["value"],
    "property": property(module_level),
    "staticmethod": staticmethod(module_level),
    "classmethod": classmethod(module_level),
    "class namespace": Hub.__dict__,
    "weak reference": weakref.ref(HUB),
    "weak proxy": weakref.proxy(HUB),
    "logger": logging.getLogger("modelguard.tests"),
    "context variable": contextvars.ContextVar("outside", default=HUB),
    "context": contextvars.copy_context(),
}


@needs_immortals
@pytest.mark.parametrize("outside", OUTSIDE.values(), ids=OUTSIDE)
def test_code_and_what_only_code_leads_to_is_never_touched(outside: Any) -> None:
    """Types, modules, functions, generators, weak references and the like keep their reference counts, silently."""
    already = is_immortal(outside)  # types and modules of the interpreter's own are
    report = immortalize({"own": Slotted(outside)})
    assert already == is_immortal(outside)
    assert not any(map(is_immortal, (Hub, Hub.method, HUB, HUB.inside, Slotted, module_level, logging.root)))
    assert () == report.skipped


@needs_immortals
def test_types_may_have_no_module() -> None:
    """As those of C libraries: what is beside their objects in the model becomes immortal."""
    model = Model(this=SwigPyObject(), words=[text(13)])
    immortalize(model)
    assert is_immortal(model.words[0])  # type: ignore[attr-defined]


@needs_immortals
def test_namespaces_of_modules_are_never_touched() -> None:
    """A model that holds ``globals()`` or ``sys.modules`` does not make the whole program immortal."""
    immortalize([globals(), sys.modules])
    for one in (globals(), sys.modules, HUB):
        assert not is_immortal(one)


@needs_immortals
def test_a_bound_method_belongs_to_its_object() -> None:
    """A bound method leads to its object; its function does not become immortal."""
    hub = Hub()
    immortalize([hub.method])
    assert is_immortal(hub.inside[0])
    assert not is_immortal(Hub.method)


@needs_immortals
def test_a_compiled_function_is_known_by_its_code() -> None:
    """Functions that Cython and others compile count as functions, whatever their type."""

    class Compiled:
        __code__ = None

        def __init__(self) -> None:
            self.globals = [text(12)]

    compiled = Compiled()
    immortalize([compiled])
    assert not is_immortal(compiled)
    assert not is_immortal(compiled.globals)


@needs_immortals
@pytest.mark.parametrize("root", [module_level, Hub, math, generate()], ids=["function", "type", "module", "generator"])
def test_a_root_that_is_code_is_reported(root: Any) -> None:
    """A function as a root has nothing that could be made immortal, and is reported as skipped."""
    report = immortalize(root)
    assert 0 == report.objects
    assert [("code", 1)] == [(entry.kind, entry.count) for entry in report.skipped]


@needs_immortals
def test_handles_are_named_with_their_place_and_left_alone(tmp_path: Path) -> None:
    """Locks, threads, sockets and files belong to a process: each kind is reported with an example and a count."""
    ctypes = pytest.importorskip("ctypes")
    near, far = socket.socketpair()
    pool = ThreadPoolExecutor(1)
    with near, far, pool, (tmp_path / "file").open("wb") as file:
        handles = [threading.Lock(), threading.RLock(), threading.Event(), threading.main_thread(), pool, near, file]
        handles += [queue.SimpleQueue(), ctypes.c_int(3)]
        model = Model(lock=handles[0], others=[*handles[1:], handles[0]], work={"socket": far})
        report = immortalize(model)
        assert not any(map(is_immortal, [*handles, far]))
    found = {entry.kind: entry for entry in report.skipped}
    model_type = f"{Model.__module__}.Model"
    assert Skipped("lock", f"_thread.lock, attribute 'lock' of a {model_type}", 4) == found["lock"]
    assert Skipped("thread", "concurrent.futures.thread.ThreadPoolExecutor, in a builtins.list", 2) == found["thread"]
    assert 2 == found["socket"].count
    assert "_io.BufferedWriter, in a builtins.list" == found["file"].example
    assert "ctypes.c_int, in a builtins.list" == found["native handle"].example
    assert is_immortal(vars(model)["others"])


@needs_immortals
def test_the_key_of_a_handle_is_told() -> None:
    """A handle in a dict is reported with its key, and a root as a root."""
    lock = threading.Lock()
    assert ("_thread.lock, key 'guard' of a builtins.dict",) == tuple(
        entry.example for entry in immortalize({"guard": lock}).skipped
    )
    assert ("_thread.lock, given as a root",) == tuple(entry.example for entry in immortalize(lock).skipped)


@needs_immortals
def test_a_file_in_memory_is_the_models_own() -> None:
    """BytesIO and StringIO are memory, not files."""
    buffer = io.BytesIO(b"weights" * 9)
    assert () == immortalize(buffer).skipped
    assert is_immortal(buffer)


@pytest.mark.parametrize(
    ("kind", "met"),
    [
        ("lock", queue.SimpleQueue),
        ("lock", threading.BoundedSemaphore),
        ("lock", threading.Barrier),
        ("lock", multiprocessing.synchronize.Lock),
        ("thread", threading.Timer),
        ("thread", threading.local),
        ("thread", ProcessPoolExecutor),
        ("thread", multiprocessing.pool.ThreadPool),
        ("process", multiprocessing.pool.Pool),
        ("process", multiprocessing.Process),
        ("process", subprocess.Popen),
        ("socket", ssl.SSLSocket),
        ("socket", ssl.SSLContext),
        ("pipe", multiprocessing.connection.Connection),
        ("file", io.TextIOWrapper),
        ("file", mmap.mmap),
        ("event loop", asyncio.SelectorEventLoop),
        ("event loop", asyncio.Task),
    ],
    ids=lambda entry: getattr(entry, "__name__", entry),
)
def test_handles_are_known_by_their_types(kind: str, met: type) -> None:
    """The kind of a handle follows from its type or a base of it."""
    assert kind == ObjectKinds()[met]
