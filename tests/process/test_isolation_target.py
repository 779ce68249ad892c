"""``isolate(target=...)``: the owner names a function, and never imports its module."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import molds, run_python, wait_until

from modelguard import Isolated, Uses, isolate
from modelguard.errors import LoadFailed, RemoteError, TransferRefused

pytestmark = pytest.mark.timeout(180)

MODULE = "tests.process.named_functions"


@contextmanager
def using(function: Isolated[..., Any]) -> Iterator[Any]:
    """Close on exit; neither its processes nor the module are in this process."""
    try:
        yield function
    finally:
        function.close()
    assert MODULE not in sys.modules
    wait_until(lambda: not molds(), "the end of all molds")


def named(name: str, stub: Callable[..., Any], **options: Any) -> Isolated[..., Any]:
    """A stub for a function of the module."""
    return isolate(target=f"{MODULE}:{name}", **{"workers": 1, "timeout": "20s", **options})(stub)


def where(text: str, *, times: int = 1) -> list[Any]: ...


def nothing() -> Any: ...


def of_text(text: str) -> Any: ...


def of_what(what: str) -> Any: ...


def of_count(count: int) -> Any: ...


async def awaited(text: str) -> str:
    """Stand for a coroutine function."""
    raise NotImplementedError


def streamed(count: int) -> Iterator[int]: ...


def astreamed(count: int) -> AsyncIterator[int]: ...


def test_the_owner_never_imports_the_module() -> None:
    """A call by each door runs on the model of the guard in that module, which the mold has loaded."""
    with using(named("where", where)) as function:
        text, mold, worker = function("a", times=2)
        assert ("aa", function.status().mold) == (text, mold)
        assert len({os.getpid(), mold, worker}) == 3
        assert mold == asyncio.run(function.aio("b"))[1]
        assert mold == function.submit("c").result()[1]
        assert "tests.process.test_isolation_target.where" == function.name


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_ttl_in_that_module_renews_the_mold(start: str) -> None:
    """The owner goes by the policies of a guard that it has never seen."""
    with using(named("aging", nothing, start=start)) as function:
        first = function()
        wait_until(lambda: function() != first, "the next mold")
        assert 1 <= function.status().reloads


def test_a_file_that_a_guard_in_that_module_watches_renews_the_mold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was is what the mold saw before its load."""
    weights = tmp_path / "weights"
    weights.write_text("1")
    monkeypatch.setenv("NAMED_WEIGHTS", str(weights))
    with using(named("watching", nothing)) as function:
        first = function()
        weights.write_text("22")
        wait_until(lambda: function() != first, "the next mold")
        assert 1 == function.status().reloads


def test_a_guard_in_that_module_replaces_workers() -> None:
    """Uses is asked in the workers, as always."""
    with using(named("wearing", nothing)) as function:
        first = function()
        wait_until(lambda: function() != first, "a fresh worker")
        assert 0 == function.status().reloads


@pytest.mark.parametrize(("name", "stub"), [("leasing", of_text), ("isolated", nothing), ("plain", nothing)])
def test_what_a_target_may_be(name: str, stub: Callable[..., Any]) -> None:
    """A function that uses a guard by others of its module; one that is isolated there; one without a model."""
    with using(named(name, stub)) as function:
        if name == "leasing":
            first, second = function("a"), function("b")
            assert [["a", function.status().mold], ["b", function.status().mold]] == [first, second]
        elif name == "isolated":
            wait_until(lambda: len({function() for _ in range(5)}) > 1, "its own recycle_on")
            assert 2 >= len(function.status().workers), "the stub's workers count"
        else:
            assert function() not in {os.getpid(), function.status().mold}


def test_recycle_on_is_for_a_target_without_a_guard() -> None:
    """It is asked in the workers of the function that the mold finds."""
    with using(named("plain", nothing, recycle_on=Uses(1))) as function:
        first = function()
        wait_until(lambda: function() != first, "a fresh worker")


def test_coroutines_and_streams() -> None:
    """The stub says which of them the function is: by async def, or by the type of its result."""
    with using(named("coroutine", awaited)) as function:
        assert "a" == asyncio.run(function("a"))
    with using(named("items", streamed)) as function:
        assert [0, 1, 2] == list(function(3))

    async def collect(function: Any) -> list[int]:
        return [one async for one in function(3)]

    with using(named("aitems", astreamed)) as function:
        assert [0, 1, 2] == asyncio.run(collect(function))


def test_results_import_nothing_here() -> None:
    """What only that module can rebuild is refused, and its errors arrive as text; the worker serves on."""
    with using(named("odd", of_what)) as function:
        with pytest.raises(TransferRefused, match=r"needs tests.process.named_functions.*return plain values"):
            function("result")
        with pytest.raises(RemoteError, match=r"ForeignError.*odd"):
            function("error")
        assert "fine" == function("fine")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_tensor_is_refused_by_the_name_of_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without torch is told that the result needs torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with using(named("odd", of_what)) as function, pytest.raises(TransferRefused, match=r"needs torch, which is not"):
        function("tensor")


@pytest.mark.parametrize(
    ("name", "stub", "options", "why"),
    [
        (
            "wher",
            where,
            {},
            r"target='{module}:wher': is not there: .*named_functions.py has no wher; .*where \(.*stands",
        ),
        ("Foreign", nothing, {}, "has a class of this name, and no function"),
        (
            "where",
            nothing,
            {},
            r"{test}.nothing \(.*\) takes \(\) -> 'Any', and {module}.where \(.*:\d+\) takes \(text",
        ),
        ("bare", of_text, {}, r"does not fit: .*Decorate it with the guard of its model in {module}"),
        ("coroutine", of_text, {}, r"{test}.of_text \(.*\) is a function, and {module}.coroutine \(.*\) a coroutine"),
        ("items", of_count, {}, r"is a function, and {module}.items .* a generator"),
        ("two", nothing, {}, r"uses the guards 'other' and '.*load', and a mold has one model; {test}.nothing"),
        ("pooled", of_text, {}, r"takes its models from a pool, and {test}.of_text \(.*\) cannot tell"),
        ("probing", nothing, {}, r"cannot be used with Changed, which asks for new models by code of your own"),
        ("wearing", nothing, {"recycle_on": Uses(5)}, r"recycle_on=Uses\(5\): is for functions without a guard"),
    ],
)
def test_what_does_not_fit_is_a_failed_load(name: str, stub: Any, options: dict[str, Any], why: str) -> None:
    """The message names the stub, and what was found where it points to."""
    with (
        using(named(name, stub, **options)) as function,
        pytest.raises(LoadFailed, match=why.format(module=MODULE, test=__name__)),
    ):
        function.load()


def test_a_load_timeout_in_that_module_ends_the_mold() -> None:
    """Also that of the first load, of which the owner knows nothing when it begins, by a loader that holds the GIL."""
    with using(named("never", nothing)) as function, pytest.raises(LoadFailed, match="Loading"):
        function.load(30)


PROGRAM = """
import json, sys
from modelguard import isolate

@isolate(target="tests.process.named_functions:aging", workers=1, scope="host")
def aging() -> int: ...

if __name__ == "__main__":
    import time
    first, until = aging(), time.monotonic() + 60
    while aging() == first and time.monotonic() < until:
        time.sleep(0.1)
    status = aging.status()
    aging.close()
    modules = sorted(name for name in sys.modules if "named_functions" in name)
    print(json.dumps([status.reloads >= 1, status.broker is not None, modules]))
"""


def test_a_host_may_share_it(tmp_path: Path) -> None:
    """The broker goes by the guard's policies too, and neither it nor the owner imports the module."""
    folder = Path(__file__).parents[2]
    answer = run_python(PROGRAM, 120, MODELGUARD_RUNTIME_DIR=str(tmp_path / "run"), PYTHONPATH=str(folder))
    assert [True, True, []] == answer
