"""One process of a user may hold two copies of a model at a time."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, Loader, World, outcome

from modelguard.lifecycle.replicas import replicas
from modelguard.runtime import host_lock
from modelguard.runtime.host_lock import MAX_WAIT, HostLock, private_folder
from modelguard.telemetry import LoadStarted


class Turn:
    """Requests the lock on its own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.cancelled = False
        self.on_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()

    def take(self, lock: HostLock) -> Any:
        return lock.held(sleep=self.sleep, clock=lambda: self.now, cancelled=lambda: self.cancelled)


@pytest.fixture
def turn() -> Turn:
    return Turn()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "modelguard"


def taken(lock: HostLock, while_taken: Callable[[], object]) -> None:
    """Do something while another thread holds the lock."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with Turn().take(lock):
            held.set()
            assert done.wait(TIMEOUT)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(TIMEOUT)
    try:
        while_taken()
    finally:
        done.set()
        thread.join(TIMEOUT)


class TestHeld:
    def test_a_free_slot_is_had_at_once(self, turn: Turn, folder: Path) -> None:
        """A free lock is acquired without a wait, and can be acquired again."""
        one = HostLock(lambda: folder)
        for _ in range(3):
            with turn.take(one) as how:
                assert ("host", 0.0) == (how, turn.now)

    def test_a_slot_is_given_back_when_the_block_fails(self, turn: Turn, folder: Path) -> None:
        """However a reload ends, the next one gets its turn."""
        one = HostLock(lambda: folder)
        with pytest.raises(ValueError, match="bad"), turn.take(one):
            raise ValueError("bad")
        with turn.take(one) as how:
            assert "host" == how

    def test_a_second_thread_waits_for_its_turn(self, turn: Turn, folder: Path) -> None:
        """While one reload holds the lock, another waits until it is free."""
        one = HostLock(lambda: folder)
        holder = Turn().take(one)
        assert "host" == holder.__enter__()

        def free_it() -> None:
            if turn.now >= 1:
                holder.__exit__(None, None, None)
                turn.on_sleep = lambda: None

        turn.on_sleep = free_it
        with turn.take(one) as how:
            assert "host" == how
        assert 1 == pytest.approx(turn.now, abs=0.1)

    def test_nobody_is_held_up_for_ever(self, turn: Turn, folder: Path) -> None:
        """After five minutes a hung holder no longer delays others; they continue without the lock."""
        one = HostLock(lambda: folder)

        def second() -> None:
            with turn.take(one) as how:
                assert "timed_out" == how

        taken(one, second)
        assert pytest.approx(turn.now, abs=0.1) == MAX_WAIT

    def test_who_no_longer_wants_it_is_let_go(self, turn: Turn, folder: Path) -> None:
        """A guard that is closed while it waits stops waiting."""
        one = HostLock(lambda: folder)
        turn.on_sleep = lambda: setattr(turn, "cancelled", True)

        def second() -> None:
            with turn.take(one) as how:
                assert "cancelled" == how

        taken(one, second)
        assert 1 > turn.now

    def test_a_slot_of_another_folder_is_another_slot(self, turn: Turn, tmp_path: Path) -> None:
        """Users and services with different folders do not wait for each other."""
        with Turn().take(HostLock(lambda: tmp_path / "a")), turn.take(HostLock(lambda: tmp_path / "b")) as how:
            assert ("host", 0.0) == (how, turn.now)


class TestALockThatIsHeldElsewhere:
    @pytest.fixture(autouse=True)
    def _other_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel says that another process holds the lock."""
        monkeypatch.setattr(host_lock, "_lock", lambda _descriptor: False)

    @pytest.mark.parametrize(("cancelled", "how"), [(False, "timed_out"), (True, "cancelled")])
    def test_is_waited_for(self, turn: Turn, folder: Path, cancelled: bool, how: str) -> None:  # noqa: FBT001
        """A reload waits for another process in the same way, with the same limits."""
        turn.on_sleep = lambda: setattr(turn, "cancelled", cancelled)
        one = HostLock(lambda: folder)
        for _ in range(2):  # what was not had is not held either
            with turn.take(one) as told:
                assert how == told


class TestThePrivateFolder:
    def test_is_made_for_its_user_alone(self, turn: Turn, folder: Path) -> None:
        """No other user can read or write the folder and the lock file."""
        with turn.take(HostLock(lambda: folder)):
            modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "reload.lock")]
        assert [0o700, 0o600] == modes

    @pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777, 0o770])
    def test_is_not_trusted_when_others_can_enter(self, turn: Turn, folder: Path, mode: int) -> None:
        """A folder that others can read or write is not used: threads of this process still take turns."""
        folder.mkdir(parents=True)
        folder.chmod(mode)
        with turn.take(HostLock(lambda: folder)) as how:
            assert ("process", []) == (how, list(folder.iterdir()))

    def test_is_not_trusted_when_it_is_a_link(self, turn: Turn, tmp_path: Path, folder: Path) -> None:
        """A link that was placed there is not followed."""
        (tmp_path / "trap").mkdir(mode=0o700)
        folder.parent.mkdir()
        folder.symlink_to(tmp_path / "trap")
        with turn.take(HostLock(lambda: folder)) as how:
            assert ("process", []) == (how, list((tmp_path / "trap").iterdir()))

    def test_is_not_trusted_when_the_lock_file_is_a_link(self, turn: Turn, tmp_path: Path, folder: Path) -> None:
        """Nor is a link in the place of the lock file."""
        folder.mkdir(mode=0o700, parents=True)
        (folder / "reload.lock").symlink_to(tmp_path / "elsewhere")
        with turn.take(HostLock(lambda: folder)) as how:
            assert ("process", False) == (how, (tmp_path / "elsewhere").exists())

    def test_is_not_trusted_when_it_is_somebody_else_s(
        self, turn: Turn, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder of another user is not used."""
        folder.mkdir(mode=0o700, parents=True)
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with turn.take(HostLock(lambda: folder)) as how:
            assert "process" == how

    def test_that_cannot_be_made_is_done_without(self, turn: Turn, tmp_path: Path) -> None:
        """If no folder can be made, for example on a read-only disk, reloads go on."""
        (tmp_path / "file").touch()
        with turn.take(HostLock(lambda: tmp_path / "file" / "below")) as how:
            assert "process" == how

    @pytest.mark.parametrize(
        ("named", "runtime", "expected"),
        [
            ("/run/mine", "/run/user/7", "/run/mine"),
            (None, "/run/user/7", "/run/user/7/modelguard"),
            ("", "", f"/tmp/modelguard-{os.getuid()}"),
        ],
    )
    def test_is_found_by_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, named: str | None, runtime: str, expected: str
    ) -> None:
        """The folder is the one that was named, else the user's runtime folder, else one in the temporary folder."""
        monkeypatch.setattr("tempfile.gettempdir", lambda: "/var/tmp")  # as it is while the other one is full
        monkeypatch.setenv("TMPDIR", "/tmp")
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        if named is None:
            monkeypatch.delenv("MODELGUARD_RUNTIME_DIR", raising=False)
        else:
            monkeypatch.setenv("MODELGUARD_RUNTIME_DIR", named)
        assert Path(expected) == private_folder()


class TestReloads:
    def test_take_turns(self, world: World) -> None:
        """Two guards reload one after the other, so at most one of them holds two copies; first loads do not wait."""
        slow = Loader(world)
        first, second = world.guard(slow, name="first"), world.guard(name="second")
        first.load()
        slow.hold()
        first.reload(wait=False)
        slow.reached()
        second.load()
        assert ["none", "host", "none"] == [event.host_lock for event in world.seen(LoadStarted)]
        waiting = threading.Event()

        def sleep(_seconds: float) -> None:
            waiting.set()
            assert slow.open.wait(TIMEOUT)

        object.__setattr__(world.system, "sleep", sleep)
        reload = world.spawn(second.reload)
        assert waiting.wait(TIMEOUT)
        assert (1, 3) == (second.status().generation, len(world.seen(LoadStarted)))
        slow.open.set()
        assert outcome(reload) is None
        assert ["first", "first", "second", "second"] == [event.guard for event in world.seen(LoadStarted)]

    @pytest.mark.parametrize("many", [False, True], ids=["guard", "replicas"])
    @pytest.mark.parametrize("timeout", [None, TIMEOUT], ids=["no timeout", "timeout"])
    @pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
    def test_of_a_loader_need_no_turn_of_their_own(
        self,
        world: World,
        asynchronous: bool,  # noqa: FBT001
        timeout: float | None,
        many: bool,  # noqa: FBT001
    ) -> None:
        """A loader that reloads another guard has the turn already, and would wait for itself for five minutes."""

        def load() -> object:
            base.reload(timeout=timeout)
            return world.loader()

        async def aload() -> object:
            await base.areload(timeout)
            return world.loader()

        guard = world.guard(name="base")
        base = replicas(guard, 2) if many else guard
        top = world.guard(aload if asynchronous else load, name="top")
        base.load()
        top.load()
        began = world.now
        top.reload()
        started = [(event.guard[:4], event.host_lock) for event in world.seen(LoadStarted)]
        assert [("top", "host"), ("base", "cancelled")] == started[-3 if many else -2 :][:2]
        assert (2, True) == (top.status().generation, world.now - began < MAX_WAIT)

    def test_go_on_after_a_hung_one(self, world: World) -> None:
        """A reload that hangs delays others for five minutes at most, and the event says so."""
        hung = Loader(world)
        first, second = world.guard(hung, name="hung"), world.guard(name="second")
        first.load()
        second.load()
        hung.hold()
        first.reload(wait=False)
        hung.reached()
        second.reload()
        assert ("timed_out", 2) == (world.last(LoadStarted).host_lock, second.status().generation)
