"""What every handle of models promises, of isolated functions: of one process, over a pool, and of the host.

The promises are those of ``tests/contract/test_handles.py``. What happens at a fork and at the exit is proved here, of
the handles whose models live in this process too.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from tests.contract.handles import (
    EVERYTHING,
    IN_PROCESS,
    TIMEOUT,
    Handle,
    Running,
    Variant,
    needs,
    parametrize,
    spawn,
    until,
)
from tests.contract.test_handles import (
    Make,
    TestALoadThatFails,
    TestClose,
    TestIdle,
    TestMistakes,
    TestPause,
    TestReload,
    TestReopening,
    TestRollback,
    TestStatus,
    TestTheFirstLoad,
    TestUnload,
)
from tests.process.conftest import ROOT
from tests.process.handle_functions import make_any
from tests.process.harness import alive, in_child, run_python

from modelguard.errors import GuardClosed, NoPreviousModel

__all__ = [
    "TestALoadThatFails",
    "TestClose",
    "TestIdle",
    "TestMistakes",
    "TestPause",
    "TestReload",
    "TestReopening",
    "TestRollback",
    "TestStatus",
    "TestTheFirstLoad",
    "TestUnload",
]

pytestmark = pytest.mark.timeout(240)


class FolderLoader:
    """Tells the loads of all processes what to do, as ``modelguard_loader`` does in one."""

    def __init__(self, place: Path) -> None:
        self._place = place

    def _lines(self, name: str) -> list[int]:
        path = self._place / name
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def calls(self) -> int:
        """How many loads there were."""
        return len(self._lines("loads"))

    def unloaded(self) -> list[int]:
        """The numbers of the models that were unloaded."""
        return self._lines("unloads")

    @property
    def alive(self) -> int:
        """How many of the processes that have loaded one run."""
        return sum(map(alive, self._lines("loads")))

    def fail(self, times: int | None = 1) -> None:
        """Make all loads fail, or none."""
        if times == 0:
            (self._place / "fail").unlink(missing_ok=True)
        else:
            (self._place / "fail").touch()

    def hold(self) -> None:
        """Make loads wait."""
        (self._place / "reached").unlink(missing_ok=True)
        (self._place / "hold").touch()

    def reached(self) -> None:
        """Wait until a load is being held."""
        until((self._place / "reached").exists, "a load begins")

    def let_go(self) -> None:
        """Let the held loads continue."""
        (self._place / "hold").unlink(missing_ok=True)


class _Isolated(Handle):
    _gates = count()

    def __post_init__(self) -> None:
        self._folder: Path = self.loader._place  # type: ignore[attr-defined]

    def call(self) -> int:
        return int(self.it())

    async def acall(self) -> int:
        return int(await self.it.aio())

    def doors(self) -> dict[str, Callable[[], int]]:
        return {
            "function": self.call,
            "aio": lambda: asyncio.run(self.acall()),
            "submit": lambda: int(self.it.submit().result(TIMEOUT)),
        }

    @contextmanager
    def busy(self) -> Iterator[Running]:
        gate = self._folder / f"gate-{next(self._gates)}"
        running = Running(spawn(self.it, str(gate)), gate.touch)
        until(Path(f"{gate}.begun").exists, "the call begins")
        try:
            yield running
        finally:
            gate.touch()
            running.answer.result(TIMEOUT)

    def end(self) -> None:
        self.loader.fail(0)
        super().end()


Lacking = Mapping[str, tuple[type[Exception], str]]


class ProcessHandle(_Isolated):
    kind = "process"
    has = EVERYTHING - {"in process"}


class KeysHandle(_Isolated):
    kind = "keys"
    has = frozenset({"ready", "close timeout", "unload at exit", "closes at once"})
    lacks: ClassVar[Lacking] = {
        "rollback": (NoPreviousModel, "each key of a pool has a mold of its own"),
    }

    def load(self) -> int:
        self.call()
        return self.loader.calls


class HostHandle(_Isolated):
    """While ``close()`` waits for calls, its status is what the broker says for the other processes."""

    kind = "host"
    has = ProcessHandle.has - {"rollback"}
    lacks: ClassVar[Lacking] = {
        "rollback": (NoPreviousModel, "molds that processes share are not kept"),
    }

    def ready(self) -> bool:
        """As the broker has told this process, which may be a moment after ``load()`` has returned."""
        deadline = time.monotonic() + 2
        while not self.it.ready and time.monotonic() < deadline:
            time.sleep(0.01)
        return bool(self.it.ready)

    def gone(self) -> None:
        """The broker and its mold are ending when the last process has left."""
        until(lambda: self.alive() == 0, "the end of the mold")

    def closed(self) -> bool:
        try:
            self.it.submit().cancel()
        except GuardClosed:
            return True
        return False


ISOLATED: dict[str, type[Handle]] = {one.kind: one for one in (ProcessHandle, KeysHandle, HostHandle)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test on each handle that it is for."""
    parametrize(metafunc, ISOLATED)


@pytest.fixture
def make(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a handle of a kind, which is closed after the test."""
    monkeypatch.setenv("HANDLES_FOLDER", str(tmp_path))
    made: list[Handle] = []

    def one(variant: Variant = "plain") -> Handle:
        made.append(new(kind, variant, tmp_path))
        return made[-1]

    yield one
    for handle in made:
        handle.end()
    if kind in ISOLATED:
        until(lambda: FolderLoader(tmp_path).alive == 0, "the end of all molds")


def new(kind: str, variant: Variant, place: Path) -> Handle:
    """A fresh handle of any kind, in real time."""
    handle, loader = {**IN_PROCESS, **ISOLATED}[kind], FolderLoader(place)
    return handle(make_any(kind, variant), loader, time.sleep, lambda: time.sleep(1.0), loader.unloaded)


class TestFork:
    everywhere = True

    def test_a_child_takes_calls(self, make: Make) -> None:
        """On the parent's model where it can be shared; else it loads, or starts a mold, for itself."""
        handle = make()
        before = handle.load()

        def child() -> None:
            number, loads = handle.call(), handle.loader.calls
            if handle.kind in {"process", "keys"}:
                assert before < number <= loads
            else:
                assert (True, before) == (number <= before, loads)
            handle.it.close()

        in_child(child, TIMEOUT)
        assert handle.call() <= before

    def test_what_a_child_does_stays_there(self, make: Make) -> None:
        """Its close and, but for one mold of the whole host, its reload."""
        handle = make()
        before = handle.load()

        def child() -> None:
            handle.call()
            if handle.kind != "host":
                handle.it.reload()
                assert handle.call() > before
            handle.it.close()
            assert handle.refuses()

        in_child(child, TIMEOUT)
        assert handle.call() <= before

    def test_a_pause_holds_in_children(self, make: Make) -> None:
        """A worker that is forked during an incident starts paused."""
        handle = make("due")
        handle.it.pause()
        handle.load()

        def child() -> None:
            assert handle.paused()
            handle.call()
            loads = handle.loader.calls
            handle.pass_time()
            handle.call()
            assert loads == handle.loader.calls
            handle.it.close()

        in_child(child, TIMEOUT)
        assert handle.paused()

    def test_calls_of_other_threads_are_not_the_childs(self, make: Make) -> None:
        """It counts none, and its ``close()`` waits for none."""
        handle = make()
        handle.load()
        with handle.busy() as running:

            def child() -> None:
                assert handle.kind == "host" or 0 == handle.in_flight()  # a broker counts the calls of all processes
                handle.it.close()
                assert handle.refuses()

            in_child(child, TIMEOUT)
            assert running.end() <= handle.copies

    def test_a_child_of_a_closed_handle_may_open_it(self, make: Make) -> None:
        """The parent's stays closed."""
        handle = make()
        handle.load()
        handle.it.close()

        def child() -> None:
            assert handle.refuses()
            with handle.it:
                handle.call()
            assert handle.refuses()

        in_child(child, TIMEOUT)
        assert handle.refuses()


class TestExit:
    everywhere = True

    PROGRAM = """
        import json
        from pathlib import Path
        from tests.process.test_handles import new

        handle = new({kind!r}, "kept", Path({place!r}))
        handle.load()
        handle.it.reload()
        handle.call()
        {end}
        print(json.dumps(handle.loader.calls))
    """

    @needs("unload at exit")
    def test_the_exit_unloads_each_model(self, kind: str, tmp_path: Path) -> None:
        """Once, if nobody has closed its handle, and no process is left."""
        self.check(kind, "pass", tmp_path)

    def test_what_is_closed_is_not_unloaded_again(self, kind: str, tmp_path: Path) -> None:
        """Each model once, by the close, and no process is left."""
        self.check(kind, "handle.it.close()", tmp_path)

    def check(self, kind: str, end: str, place: Path) -> None:
        environment = {"HANDLES_FOLDER": str(place), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        loads = run_python(self.PROGRAM.format(kind=kind, place=str(place), end=end), 90, **environment)
        loader = FolderLoader(place)
        until(lambda: loader.alive == 0, "the end of all processes")
        assert list(range(1, loads + 1)) == sorted(loader.unloaded())
