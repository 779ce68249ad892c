"""The fork gate names whatever does not survive a fork, whose it is, and what to do about it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from modelguard.sharing.hazards import Here, look


@dataclass
class Scene:
    """A process as a test wants it; by default without hazards."""

    python: list[tuple[str, str]] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    runtimes: list[str] = field(default_factory=list)
    jemalloc: bool = False
    on_gpu: bool = False
    with_grpc: bool = False
    in_loop: bool = False

    def python_threads(self) -> Iterable[tuple[str, str]]:
        return self.python

    def native_threads(self) -> list[str]:
        return self.native

    def openmp(self) -> list[str]:
        return self.runtimes

    def allocator_threads(self) -> bool:
        return self.jemalloc

    def cuda(self) -> bool:
        return self.on_gpu

    def grpc(self) -> bool:
        return self.with_grpc

    def loop(self) -> bool:
        return self.in_loop


def test_a_quiet_process_has_none() -> None:
    """One thread, no accelerator, no loop: nothing to name."""
    assert () == look(Scene())


@pytest.mark.parametrize(
    ("scene", "kind", "owner", "severity"),
    [
        (Scene(python=[("poller", "app.metrics.poll")]), "python thread", "app.metrics.poll", "warning"),
        (Scene(native=["python"], runtimes=["/x/libgomp-1.so"]), "thread pool", "libgomp-1.so", "fixed"),
        (Scene(jemalloc=True), "allocator threads", "jemalloc", "fixed"),
        (Scene(on_gpu=True), "cuda", "torch", "fatal"),
        (Scene(with_grpc=True), "grpc", "grpcio", "warning"),
        (Scene(in_loop=True), "event loop", "asyncio", "fatal"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_is_named_with_its_owner(scene: Scene, kind: str, owner: str, severity: str) -> None:
    """Every kind of hazard has an owner, and a fix to read."""
    (hazard,) = look(scene)
    assert (kind, owner, severity) == (hazard.kind, hazard.owner, hazard.severity)
    assert hazard.seen
    assert hazard.fix.endswith(".")
    assert str(hazard).startswith(f"{severity}: {kind} of {owner}: ")


def test_the_worst_comes_first() -> None:
    """What forbids the fork is read before what is put right."""
    scene = Scene(python=[("poller", "app.poll")], jemalloc=True, on_gpu=True)
    assert ["fatal", "warning", "fixed"] == [hazard.severity for hazard in look(scene)]


def test_our_own_threads_are_none() -> None:
    """Modelguard's threads hold no lock while the process forks, and start anew in the child."""
    assert () == look(Scene(python=[("modelguard-keeper", "modelguard.lifecycle._ticker.Ticker._run")]))


def test_native_threads_without_openmp_are_none() -> None:
    """OpenBLAS ends its threads before a fork by itself; without OpenMP nothing else is known to hang."""
    assert () == look(Scene(native=["python", "python"]))


class TestThisProcess:
    def test_tells_its_python_threads(self) -> None:
        """Each other thread is told with what it runs."""
        over = threading.Event()
        thread = threading.Thread(target=over.wait, name="poller")
        thread.start()
        try:
            assert ("poller", "threading.Event.wait") in Here().python_threads()
            assert threading.current_thread().name not in [name for name, _ in Here().python_threads()]
        finally:
            over.set()
            thread.join()

    def test_tells_a_thread_by_its_class(self) -> None:
        """A thread that is a class of its own, without a target, is told by that class."""

        class Poller(threading.Thread):
            def run(self) -> None:
                over.wait()

        over = threading.Event()
        thread = Poller(name="own")
        thread.start()
        try:
            (where,) = [where for name, where in Here().python_threads() if name == "own"]
            assert where.endswith("Poller")
        finally:
            over.set()
            thread.join()

    def test_knows_a_running_loop(self) -> None:
        """A coroutine runs on a loop; a plain function does not."""

        async def asked() -> bool:
            return Here().loop()

        assert asyncio.run(asked())
        assert not Here().loop()

    def test_asks_torch_only_if_it_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA is asked for by torch's own word, and torch is never imported for it."""
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
        assert Here().cuda()
        monkeypatch.delitem(sys.modules, "torch")
        assert not Here().cuda()

    @pytest.mark.parametrize(("value", "hazard"), [(None, "yes"), ("0", "yes"), ("1", "no"), ("true", "no")])
    def test_knows_grpc_without_fork_support(
        self, monkeypatch: pytest.MonkeyPatch, value: str | None, hazard: str
    ) -> None:
        """GRPC is a hazard unless its variable says that it shall support forks."""
        monkeypatch.setitem(sys.modules, "grpc._cython.cygrpc", SimpleNamespace())
        monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
        if value is not None:
            monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", value)
        assert (hazard == "yes") == Here().grpc()
