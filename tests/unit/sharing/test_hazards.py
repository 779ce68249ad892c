"""Everything that does not survive a fork is found, with its owner and what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard.sharing import _hazards
from modelguard.sharing._hazards import ThisProcess, end_threads, find_hazards

PAGE = Path(__file__).parents[3] / "docs/fork-safety.md"
THREADS = [owner for owner in _hazards.OWNERS if owner.has == "thread"]
CONNECTIONS = [owner for owner in _hazards.OWNERS if owner.has == "connection"]


@dataclass
class Process(ThisProcess):
    """A process as a test describes it; by default without hazards."""

    python: list[tuple[str, str]] = field(default_factory=list)
    compilers: list[tuple[str, list[str], str]] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    runtimes: list[str] = field(default_factory=list)
    jemalloc: bool = False
    on_gpu: bool = False
    with_grpc: bool = False
    in_loop: str | None = None
    loops: list[str] = field(default_factory=list)
    caller: str | None = None
    peers: list[str] = field(default_factory=list)
    queues: int = 0

    def python_threads(self) -> Iterable[tuple[str, str]]:
        return self.python

    def compiler_threads(self) -> Iterable[tuple[str, list[str], str]]:
        return self.compilers

    def native_threads(self) -> list[str]:
        return self.native

    def openmp(self) -> list[str]:
        return self.runtimes

    def has_allocator_threads(self) -> bool:
        return self.jemalloc

    def uses_cuda(self) -> bool:
        return self.on_gpu

    def has_unsafe_grpc(self) -> bool:
        return self.with_grpc

    def event_loop(self) -> str | None:
        return self.in_loop

    def event_loops_elsewhere(self) -> Iterable[str]:
        return self.loops

    def forking_thread(self) -> str | None:
        return self.caller

    def connections(self) -> Iterable[str]:
        return self.peers

    def event_queues(self) -> int:
        return self.queues


def test_a_quiet_process_has_none() -> None:
    """One thread, no accelerator, no event loop: nothing is found."""
    assert () == find_hazards(Process())


@pytest.mark.parametrize(
    ("process", "kind", "owner", "severity"),
    [
        (Process(python=[("poller", "app.metrics.poll")]), "python thread", "app.metrics.poll", "warning"),
        (Process(compilers=[("c", ["pool-1"], "Do without.")]), "compiler threads", "c", "fixed"),
        (Process(native=["python"], runtimes=["/x/libgomp-1.so"]), "thread pool", "libgomp-1.so", "fixed"),
        (Process(jemalloc=True), "allocator threads", "jemalloc", "fixed"),
        (Process(on_gpu=True), "cuda", "torch", "fatal"),
        (Process(with_grpc=True), "grpc", "grpcio", "warning"),
        (Process(in_loop="asyncio"), "event loop", "asyncio", "fatal"),
        (Process(loops=["MainThread"]), "event loop", "asyncio", "warning"),
        (Process(caller="worker-1"), "python thread", "thread 'worker-1'", "warning"),
        (Process(peers=["10.0.0.5:5432"]), "connection", "10.0.0.5:5432", "warning"),
        (Process(queues=2), "event queue", "epoll", "warning"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_each_is_named_with_its_owner(process: Process, kind: str, owner: str, severity: str) -> None:
    """Every kind of hazard has an owner and a fix."""
    (hazard,) = find_hazards(process)
    assert (kind, owner, severity) == (hazard.kind, hazard.owner, hazard.severity)
    assert hazard.seen
    assert hazard.fix.endswith(".")
    assert str(hazard).startswith(f"{severity}: {kind} of {owner}: ")


def test_the_worst_comes_first() -> None:
    """A hazard that forbids the fork is listed before one that is repaired."""
    process = Process(python=[("poller", "app.poll")], jemalloc=True, on_gpu=True)
    assert ["fatal", "warning", "fixed"] == [hazard.severity for hazard in find_hazards(process)]


def test_our_own_threads_are_not_hazards() -> None:
    """Modelguard's threads hold no lock while the process forks, and start again in the child."""
    assert () == find_hazards(Process(python=[("modelguard-ticker", "modelguard.runtime.background.Ticker._run")]))


def test_native_threads_without_openmp_are_not_hazards() -> None:
    """OpenBLAS ends its threads before a fork by itself; only pools of OpenMP are known to hang."""
    assert () == find_hazards(Process(native=["python", "python"]))


class Poller:
    """Runs as a thread, and has a text that nobody should see."""

    def __repr__(self) -> str:
        raise AssertionError

    def __call__(self, *_: object) -> None: ...


@pytest.mark.parametrize(
    ("target", "owner"),
    [(partial(partial(Poller.__call__, Poller()), "a secret"), "Poller.__call__"), (Poller(), "Poller")],
    ids=["partial", "an object"],
)
def test_what_a_thread_runs_is_named_without_its_arguments(target: Callable[[], None], owner: str) -> None:
    """A warning shows the function or the class, and no value that is bound to it: it may be a secret."""
    assert f"{__name__}.{owner}" == _hazards.origin(threading.Thread(target=target))


class TestWhatLibrariesLeaveBehind:
    """Threads and connections that users did not start."""

    @staticmethod
    def forget(monkeypatch: pytest.MonkeyPatch) -> None:
        """Let no library of the table be loaded, whatever other tests have imported."""
        for owner in _hazards.OWNERS:
            monkeypatch.delitem(sys.modules, owner.restarts.partition(":")[0], raising=False)
            monkeypatch.delitem(sys.modules, owner.where, raising=False)

    @pytest.mark.parametrize("owner", THREADS, ids=lambda owner: owner.name)
    def test_a_thread_has_the_name_and_the_remedy_of_its_library(
        self, owner: _hazards.Owner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each row names the library and what to do, if the library does not start the thread again by itself."""
        self.forget(monkeypatch)
        (hazard,) = find_hazards(Process(python=[("Thread-1", f"{owner.where}Some.run")]))
        assert (owner.name, owner.remedy, "warning") == (hazard.owner, hazard.fix, hazard.severity)
        assert hazard.seen.startswith("thread 'Thread-1' is running")

    @pytest.mark.parametrize("owner", [one for one in THREADS if one.restarts], ids=lambda owner: owner.name)
    def test_a_thread_that_starts_again_is_no_matter(
        self, owner: _hazards.Owner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nothing is to do for a release that starts it again in each child; an older one is warned about."""
        self.forget(monkeypatch)
        module, _, name = owner.restarts.partition(":")
        kind, _, method = name.partition(".")
        process = Process(python=[("Thread-1", f"{owner.where}Some.run")])
        for known, severity in ((method, "fixed"), ("of_an_older_release", "warning")):
            monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{kind: SimpleNamespace(**{known: print})}))
            (hazard,) = find_hazards(process)
            assert (owner.name, severity) == (hazard.owner, hazard.severity)

    def test_a_connection_may_be_that_of_any_loaded_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The owner of a connection or an event queue cannot be seen, so each loaded library has its remedy there."""
        self.forget(monkeypatch)
        plain = find_hazards(Process(peers=["10.0.0.5:5432"], queues=1))
        assert [] == [owner.name for owner in CONNECTIONS for hazard in plain if owner.name in hazard.fix]
        for owner in CONNECTIONS:
            monkeypatch.setitem(sys.modules, owner.where, SimpleNamespace())
        for hazard in find_hazards(Process(peers=["10.0.0.5:5432"], queues=1)):
            assert [] == [owner.name for owner in CONNECTIONS if f" {owner.name}: {owner.remedy}." not in hazard.fix]

    def test_are_in_the_documentation(self) -> None:
        """The table of docs/fork-safety.md has each row as it is in the code, and no other."""

        def row(owner: _hazards.Owner) -> str:
            done = "ends it" if owner.stop else "leaves it" if owner.restarts else "warns"
            return f"| {owner.name} | {owner.has} | `{owner.where}` | {done} | {owner.remedy} |"

        _, _, rest = PAGE.read_text(encoding="utf-8").partition(
            "| library | what | recognised by | `prepare` | to do, or to do without |\n"
        )
        table = rest.partition("\n\n")[0].splitlines()[1:]
        assert [row(owner) for owner in _hazards.OWNERS] == table

    def test_only_what_ends_is_said_to_have_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A thread that does not end in time stays a hazard; one without the way to end it is left alone."""
        over = threading.Event()

        class Deaf(threading.Thread):
            was_killed = SimpleNamespace(set=lambda: None)

            def run(self) -> None:
                over.wait()

        class Other(Deaf):
            was_killed = SimpleNamespace()

        row = _hazards.Owner("it", "thread", f"{__name__}.TestWhat", "Do without.", stop="was_killed.set")
        monkeypatch.setattr(_hazards, "OWNERS", (row,))
        monkeypatch.setattr(_hazards, "_PATIENCE", 0.0)
        threads = [Deaf(), Other()]
        for thread in threads:
            thread.start()
        try:
            assert () == end_threads()
            assert [("it", "warning")] * 2 == [(one.owner, one.severity) for one in find_hazards() if one.owner == "it"]
        finally:
            over.set()
            for thread in threads:
                thread.join()


class TestThisProcess:
    def test_lists_its_python_threads(self) -> None:
        """Each other thread is listed with the function that it runs."""
        over = threading.Event()
        thread = threading.Thread(target=over.wait, name="poller")
        thread.start()
        try:
            assert ("poller", "threading.Event.wait") in ThisProcess().python_threads()
            assert threading.current_thread().name not in [name for name, _ in ThisProcess().python_threads()]
        finally:
            over.set()
            thread.join()

    def test_names_a_thread_by_its_class(self) -> None:
        """A thread of a subclass, without a target, is named by that class."""

        class Poller(threading.Thread):
            def run(self) -> None:
                over.wait()

        over = threading.Event()
        thread = Poller(name="own")
        thread.start()
        try:
            (where,) = [where for name, where in ThisProcess().python_threads() if name == "own"]
            assert where.endswith("Poller")
        finally:
            over.set()
            thread.join()

    def test_recognises_a_running_loop(self) -> None:
        """A coroutine runs in an event loop; a plain function does not."""

        async def inside() -> str | None:
            return ThisProcess().event_loop()

        assert "asyncio" == asyncio.run(inside())
        assert ThisProcess().event_loop() is None

    def test_recognises_a_loop_of_trio(self) -> None:
        """Preparing inside one is refused as inside one of asyncio."""
        trio: Any = pytest.importorskip("trio", reason="needs trio")

        async def inside() -> list[tuple[str, str]]:
            return [(hazard.owner, hazard.severity) for hazard in find_hazards() if hazard.kind == "event loop"]

        assert ("trio", "fatal") in trio.run(inside)

    def test_recognises_a_loop_that_runs_in_another_thread(self) -> None:
        """Work that a loop hands to a thread may prepare there: the loop is named by its thread."""

        async def elsewhere() -> list[str]:
            return await asyncio.to_thread(lambda: list(ThisProcess().event_loops_elsewhere()))

        before = list(ThisProcess().event_loops_elsewhere())  # functions that other tests have left
        assert threading.current_thread().name in asyncio.run(elsewhere())
        assert threading.current_thread().name not in before
        assert threading.current_thread().name not in list(ThisProcess().event_loops_elsewhere())

    def test_names_the_thread_that_prepares_unless_it_is_the_main_one_or_ours(self) -> None:
        """A server forks from its main thread, and modelguard's renewals are followed by forks from native code."""
        seen: list[str | None] = [ThisProcess().forking_thread()]
        for name in ("mine", "modelguard-renewal"):
            thread = threading.Thread(target=lambda: seen.append(ThisProcess().forking_thread()), name=name)
            thread.start()
            thread.join()
        assert [None, "mine", None] == seen

    def test_names_the_other_end_of_connections_only(self) -> None:
        """A server's own listening socket is meant to be shared, and a pair of sockets leads nowhere else."""
        earlier = set(ThisProcess().connections())
        with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as pair:
            for end in socket.socketpair():
                pair.enter_context(end)
            assert earlier == set(ThisProcess().connections())
            port = listening.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)):
                assert {f"127.0.0.1:{port}"} == set(ThisProcess().connections()) - earlier

    def test_names_the_path_of_a_unix_socket(self, tmp_path: Path) -> None:
        """A database on the same host is often reached by a path."""
        path = str(tmp_path / "redis.sock")
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as connected:
            listening.bind(path)
            listening.listen()
            connected.connect(path)
            assert path in ThisProcess().connections()

    @pytest.mark.skipif(not hasattr(select, "epoll"), reason="epoll is Linux's")
    def test_counts_event_queues(self) -> None:
        """An event loop that is not running has one too."""
        before = ThisProcess().event_queues()
        with select.epoll():
            assert before + 1 == ThisProcess().event_queues()

    def test_asks_torch_only_if_it_is_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Torch itself reports whether it uses CUDA, and is never imported for that."""
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))
        assert ThisProcess().uses_cuda()
        monkeypatch.delitem(sys.modules, "torch")
        assert not ThisProcess().uses_cuda()

    @pytest.mark.parametrize("forks", [False, True], ids=["without", "with"])
    @pytest.mark.parametrize("later", ["0", "1"])
    def test_asks_grpc_how_it_was_imported(self, monkeypatch: pytest.MonkeyPatch, later: str, *, forks: bool) -> None:
        """GRPC reads its variable when it is imported: a value that is set later changes nothing."""
        monkeypatch.setitem(sys.modules, "grpc._cython.cygrpc", SimpleNamespace(_GRPC_ENABLE_FORK_SUPPORT=forks))
        monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", later)
        assert (not forks) == ThisProcess().has_unsafe_grpc()

    def test_has_no_hazard_in_a_grpc_that_is_not_imported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Workers may import it."""
        monkeypatch.delitem(sys.modules, "grpc._cython.cygrpc", raising=False)
        assert not ThisProcess().has_unsafe_grpc()
