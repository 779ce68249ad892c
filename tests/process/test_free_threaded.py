"""A Python without the GIL: what runs on several event loops and threads at once, and what counts mean there."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wrapt
from tests.unit.serving.gated import until

from modelguard import batched, guard
from modelguard.diagnosis import _inside
from modelguard.errors import InvalidOption
from modelguard.telemetry import GenerationReleased, add_hook

pytestmark = [
    pytest.mark.skipif("t" not in sys.abiflags, reason="needs a free-threaded Python"),
    pytest.mark.timeout(120),
]

LOOPS, CALLS = 8, 300


class Model:
    """Knows whether it was unloaded, and how many calls run on it."""

    def __init__(self) -> None:
        self.unloaded = False

    def __call__(self, number: int) -> int:
        assert not self.unloaded
        return 2 * number


def on_loops(work: Callable[[int], Any]) -> list[Any]:
    """Run a coroutine function on an event loop in each of eight threads, which begin together."""
    start, results = threading.Barrier(LOOPS), [None] * LOOPS
    errors: list[BaseException] = []

    def run(at: int) -> None:
        start.wait(30)
        try:
            results[at] = asyncio.run(work(at))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(at,)) for at in range(LOOPS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert [] == errors
    return results


def test_importing_and_using_modelguard_leaves_the_gil_off() -> None:
    """Neither modelguard nor what it needs switches the GIL on."""
    code = "import sys, modelguard.testing; from modelguard import *; sys.exit(sys._is_gil_enabled())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)


def test_one_guard_serves_eight_event_loops() -> None:
    """Calls on eight loops, and reloads among them: every answer is right, and no call meets an unloaded model."""
    nlp = guard(Model, unload=lambda model: setattr(model, "unloaded", True), reload_on=None)

    @nlp
    async def double(model: Model, number: int) -> int:
        first = model(number)
        await asyncio.sleep(0)
        assert first == model(number)
        return first

    @nlp
    def plain(model: Model, number: int) -> int:
        return model(number)

    async def work(at: int) -> int:
        for number in range(CALLS):
            assert 2 * number == await double(number)
            assert 2 * number == plain(number)
            if number % 50 == at:
                await nlp.areload()
        return CALLS

    with nlp:
        assert [CALLS] * LOOPS == on_loops(work)
        status = nlp.status()
        assert (0, True) == (status.in_flight, status.generation > CALLS // 50)


def test_one_batched_function_serves_eight_event_loops() -> None:
    """Each caller gets the answer to its own item, whichever loop it is on; nothing is left behind."""
    sizes: list[int] = []

    @batched(max_size=16, max_queue=64, threads=2)
    def double(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return [2 * item for item in items]

    async def work(at: int) -> int:
        for begin in range(0, CALLS, 4):
            numbers = [at * CALLS + begin + more for more in range(4)]
            assert [2 * number for number in numbers] == list(await asyncio.gather(*map(double.aio, numbers)))
            assert [2 * number for number in numbers] == await double.amap(numbers)
        return CALLS

    assert [CALLS] * LOOPS == on_loops(work)
    status = double.status()
    assert (2 * LOOPS * CALLS, 0, 0) == (status.answered, status.waiting, status.running)
    assert 2 * LOOPS * CALLS == sum(sizes)


def test_threads_that_a_call_starts_keep_nothing_of_its_context() -> None:
    """What a request has in context variables goes with it, though threads of loads and deadlines stay."""
    request: contextvars.ContextVar[Model] = contextvars.ContextVar("request")

    @batched(max_size=4, deadline="1m")
    @guard(Model, reload_on=None)
    def double(model: Model, items: list[int]) -> list[int]:
        return [model(item) for item in items]

    def first_call() -> weakref.ref[Model]:
        request.set(Model())
        assert 4 == double(2)
        return weakref.ref(request.get())

    gone = contextvars.Context().run(first_call)
    gc.collect()
    assert gone() is None
    assert {"modelguard-load", "modelguard-deadlines"} <= {
        "-".join(thread.name.split("-")[:2]) for thread in threading.enumerate()
    }


@pytest.mark.parametrize(
    "load",
    [lambda: lambda text: text, lambda: type("Model", (), {}), lambda: types.ModuleType("model"), Model],
    ids=["function", "class", "module", "object"],
)
def test_any_model_is_released(load: Callable[[], Any]) -> None:
    """Functions, classes and modules, whose counts look immortal, are released like other objects."""
    released: list[GenerationReleased] = []
    remove = add_hook(lambda event: released.append(event) if isinstance(event, GenerationReleased) else None)
    with guard(load, reload_on=None) as nlp:
        nlp.reload()
    until(lambda: len(released) == 2)  # a release may outlast the reload
    remove()
    assert [(False, False)] * 2 == [(event.alive, event.immortal) for event in released]


def test_a_nested_route_is_found() -> None:
    """A function inside another one that a framework calls already is refused, though its count does not show it."""
    flask = pytest.importorskip("flask")
    nlp = guard(Model, reload_on=None)

    def create() -> None:
        app = flask.Flask("app")

        @nlp
        @app.get("/")
        def route(model: Model) -> str:
            return ""

    with pytest.raises(InvalidOption, match="is already registered with flask"):
        create()


def test_wrapped_functions_are_replaced_concurrently() -> None:
    """Wrapt does not crash if threads set ``__wrapped__`` at once, as versions before 2.4 did."""
    proxy: Any = wrapt.CallableObjectProxy(Model())

    async def work(at: int) -> None:
        for _ in range(20 * CALLS):
            proxy.__wrapped__ = Model()
            assert 2 == proxy(1)

    on_loops(work)
    gc.collect()


OLD = """
#include <Python.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "old_extension"};
PyMODINIT_FUNC PyInit_old_extension(void) { return PyModule_Create(&definition); }
"""
ASK = "import sys, old_extension; from modelguard.diagnosis import _inside; print(_inside.describe({})['gil_for'])"


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles an extension")
def test_an_extension_that_switches_the_gil_on_is_named(tmp_path: Path) -> None:
    """The doctor's probe names it; a GIL that was asked for is no finding."""
    (tmp_path / "old.c").write_text(OLD)
    built = tmp_path / f"old_extension{sysconfig.get_config_var('EXT_SUFFIX')}"
    folders = {sysconfig.get_path("include"), str(Path(sysconfig.get_config_h_filename()).parent)}
    include = [f"-I{folder}" for folder in folders]
    subprocess.run(["cc", "-shared", "-fPIC", *include, "-o", built, tmp_path / "old.c"], check=True, timeout=60)

    def asked(**variables: str) -> str:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        environ.pop("PYTHON_GIL", None)  # of the tests' own process
        command = [sys.executable, "-c", ASK]
        done = subprocess.run(command, env=environ | variables, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert _inside.describe({})["gil_for"] is None
    assert "['old_extension']" == asked()
    assert "[]" == asked(PYTHONWARNINGS="ignore")
    assert ["None", "None"] == [asked(PYTHON_GIL=choice) for choice in "01"]


def test_the_extensions_that_modelguard_needs_are_free_threaded_builds() -> None:
    """Wrapt's and psutil's compiled parts are in use, and not a slow replacement."""
    assert importlib.util.find_spec("wrapt._wrappers") is not None
    assert not sys._is_gil_enabled()
