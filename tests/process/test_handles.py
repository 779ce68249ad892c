"""What every handle of models promises, of isolated functions: in this process, over a pool, and for the host.

The promises are those of ``tests/contract/test_handles.py``. What forks, and what happens at the exit, is proved here of the
handles of one process too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.contract import test_handles as contract
from tests.contract.handles import EVERYTHING, TIMEOUT, Handle, Running, Variant, parametrize, spawn, until
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
from tests.process.handle_functions import FUNCTIONS, FolderLoader

from modelguard.errors import NoPreviousModel, NotSupported

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


_SHARED_FAULTS: Mapping[str, tuple[type[Exception], str]] = {
    "close(timeout)": (TypeError, "unexpected keyword argument 'timeout'")
}


class ProcessHandle(_Isolated):
    kind = "process"
    has = EVERYTHING - {"in process", "close timeout"}
    lacks = _SHARED_FAULTS


class KeysHandle(_Isolated):
    kind = "keys"
    has = frozenset({"ready", "closes at once"})
    lacks = {**_SHARED_FAULTS, "rollback": (NotSupported, "each key of a pool has a mold of its own")}

    def load(self) -> int:
        self.call()
        return self.loader.calls


class HostHandle(_Isolated):
    kind = "host"
    has = ProcessHandle.has - {"rollback"}
    lacks = {**_SHARED_FAULTS, "rollback": (NoPreviousModel, "molds that processes share are not kept")}


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
        it: Any = FUNCTIONS[kind][variant]
        it._reopen()
        handle = ISOLATED[kind](it, FolderLoader(tmp_path), time.sleep, lambda: time.sleep(1.0))
        made.append(handle)
        return handle

    yield one
    for handle in made:
        handle.end()
    until(lambda: FolderLoader(tmp_path).alive == 0, "the end of all molds")
