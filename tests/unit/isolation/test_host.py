"""What processes need to share a mold: who is next, which code it runs, where they meet."""

from __future__ import annotations

import os
import pickle
from collections import Counter, deque
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelguard import TTL, Backoff, Bounds, Breaker, Host, Loading, guard, isolate
from modelguard.errors import LoadFailed, NotSupported
from modelguard.isolation import _supervisor
from modelguard.isolation._channel import RemoteTraceback, Unchanged, dumps, unpickle
from modelguard.isolation._host import NAME, Folder, check_peer, for_broker, identity_of, prefix_of
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._mold_workers import CallTimes, Claim, Waiter, WaitingLine


def waiting(client: object, arrived: float = 0.0) -> Waiter:
    return Waiter(Claim(CallTimes(arrived), client=client))


class TestWaitingLine:
    def test_clients_take_turns(self) -> None:
        """One with many calls does not hold up one with few."""
        line = WaitingLine()
        for client in "aaaab":
            line.append(waiting(client))
        assert ["a", "b", "a", "a", "a"] == [line.popleft().claim.client for _ in range(5)]

    def test_who_comes_from_another_line_keeps_its_order(self) -> None:
        """A call that was made before others of its client stands before them."""
        line = WaitingLine()
        for arrived in (2.0, 4.0, 1.0, 3.0, 4.0):
            line.append(waiting("a", arrived))
        assert [1.0, 2.0, 3.0, 4.0, 4.0] == [line.popleft().claim.limits.arrived for _ in range(5)]

    @given(st.lists(st.tuples(st.sampled_from(["add", "take", "drop"]), st.integers(0, 3)), max_size=60))
    def test_nobody_is_lost_and_each_client_is_served_in_order(self, steps: list[tuple[str, int]]) -> None:
        """Whatever comes and goes: the length is right, and a client's calls keep their order."""
        line = WaitingLine()
        expected: dict[int, deque[Waiter]] = {}
        for what, client in steps:
            mine = expected.setdefault(client, deque())
            if what == "add":
                waiter = waiting(client)
                line.append(waiter)
                mine.append(waiter)
            elif what == "take" and len(line):
                taken = line.popleft()
                assert isinstance(taken.claim.client, int)
                assert taken is expected[taken.claim.client].popleft()
            elif what == "drop" and mine:
                waiter = mine.pop()
                assert line.remove(waiter)
                assert not line.remove(waiter)
            assert sum(map(len, expected.values())) == len(line) == len(list(line))

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def test_no_client_waits_for_two_turns_of_another(self, clients: list[int]) -> None:
        """Between two calls of one client, each other that waits gets at most one."""
        line = WaitingLine()
        for client in clients:
            line.append(waiting(client))
        order = [line.popleft().claim.client for _ in clients]
        for start, client in enumerate(order):
            between: list[object] = []
            for other in order[start + 1 :]:
                if other == client:
                    assert max(Counter(between).values(), default=0) <= 1
                    break
                between.append(other)


class TestCode:
    def test_a_changed_file_is_named(self, tmp_path: Path) -> None:
        """So that a warning can say which; a file that is gone has changed too."""
        path = tmp_path / "helper.py"
        path.write_text("one = 1")
        stamp = path.stat()
        known = {str(path): (stamp.st_size, stamp.st_mtime_ns)}
        assert _supervisor.changed(known) is None
        path.write_text("one = 11")
        assert str(path) == _supervisor.changed(known)
        with pytest.raises(RuntimeError, match=r"helper\.py has changed.*restart"):
            _supervisor.check_unchanged(known)
        path.unlink()
        assert str(path) == _supervisor.changed(known)

    def test_pythons_own_modules_and_generated_ones_do_not_count(self) -> None:
        """Only files found on sys.path, and of these not the standard library."""
        found = _supervisor.files()
        assert pytest.__file__ in found
        assert os.__file__ not in found


def function(text: str) -> str:
    """Do nothing."""
    return text


def options(**changes: object) -> IsolationOptions:
    """Make options."""
    chosen = {"timeout": 5.0, "bounds": Bounds(queue=8, transfer=1000), "scope": "host"}
    return isolate(**{**chosen, **changes})(function)._options  # type: ignore[arg-type]


class TestIdentity:
    SOURCE = guard(dict, reload_on=None).engine.options

    def test_what_differs_separates(self) -> None:
        """Each option has its place in the name."""
        names = {
            prefix_of(identity_of(one, self.SOURCE))
            for one in (
                options(),
                options(workers=3),
                options(scope=Host(version="2")),
                options(bounds=Bounds(queue=9)),
                options(name="x"),
            )
        }
        assert 5 == len(names)
        assert all(NAME.fullmatch(f"{name}1") for name in names)

    def test_what_is_equal_joins(self) -> None:
        """Objects that are made anew in each process do not separate, nor do what a broker does not use."""
        one = identity_of(options(breaker=Breaker()), self.SOURCE)
        other = guard(dict, reload_on=None, warmup=print, unload=print).engine.options
        assert one == identity_of(options(breaker=Breaker(failures=5)), other)

    def test_the_guards_options_count(self) -> None:
        """The broker replaces molds by them."""
        other = guard(dict, reload_on=None, loading=Loading(backoff=Backoff(5, 10))).engine.options
        assert identity_of(options(), self.SOURCE) != identity_of(options(), other)

    def test_a_broker_gets_them(self) -> None:
        """What a broker needs of a guard can be pickled, whatever the guard's functions are."""
        source = guard(dict, reload_on=TTL("1h"), warmup=lambda model: model.clear()).engine.options
        assert for_broker(source) == pickle.loads(pickle.dumps(for_broker(source)))


class TestFolder:
    def test_a_private_folder_is_made(self, tmp_path: Path) -> None:
        """With mode 700, whatever the umask is."""
        before = os.umask(0)
        try:
            with closing(Folder(tmp_path / "run" / "deep")):
                assert 0o700 == (tmp_path / "run" / "deep").stat().st_mode & 0o777
        finally:
            os.umask(before)

    @pytest.mark.parametrize("fault", ["mode", "file", "link"])
    def test_any_other_is_refused(self, tmp_path: Path, fault: str) -> None:
        """The message names the folder, and the variable that names another one."""
        path = tmp_path / "run"
        if fault == "file":
            path.touch(mode=0o700)
        elif fault == "link":
            path.symlink_to(tmp_path)
        else:
            path.mkdir()
            path.chmod(0o750)
        with pytest.raises(NotSupported, match=r"run .*MODELGUARD_RUNTIME_DIR"):
            Folder(path)

    def test_a_dead_socket_gives_no_connection(self, tmp_path: Path) -> None:
        """And its name can be taken again; so can a long one."""
        deep = tmp_path / ("x" * 120)
        with closing(Folder(deep)) as folder:
            assert folder.connect("name", 1.0) is None
            folder.listen("name").close()
            assert folder.connect("name", 1.0) is None
            with folder.listen("name") as listening, folder.connect("name", 1.0) as ours:  # type: ignore[union-attr]
                theirs, _ = listening.accept()
                assert os.getpid() == check_peer(ours) == check_peer(theirs)
                theirs.close()
            assert ["name"] == folder.names("na")
            folder.remove("name")
            folder.remove("name")
            assert [] == folder.names("")

    def test_the_lock_excludes(self, tmp_path: Path) -> None:
        """A second holder waits until it gives up; afterwards the lock is free again."""
        with closing(Folder(tmp_path / "run")) as one, closing(Folder(tmp_path / "run")) as two:
            with one.locked(lambda: True) as held:
                assert held is not None
                with two.locked(lambda: True) as refused:
                    assert refused is None
            with two.locked(lambda: True) as held:
                assert held is not None


def test_an_error_keeps_its_cause_over_the_wire() -> None:
    """Pickling drops causes: they travel beside the error."""
    error = LoadFailed("guard", "OSError: no weights")
    error.__cause__ = OSError("no weights")
    error.__cause__.__cause__ = RemoteTraceback("line 5")
    again = unpickle(*dumps(Unchanged(error, with_cause=True)))
    assert isinstance(again.__cause__, OSError)
    assert "line 5" in str(again.__cause__.__cause__)


def test_nothing_is_started_before_the_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the decorator nor by status(), ready or close()."""
    monkeypatch.setenv("MODELGUARD_RUNTIME_DIR", str(tmp_path / "run"))
    isolated = isolate(scope="host", name="early")(function)
    assert not isolated.ready
    assert ("early", "new", None, None) == (
        isolated.name,
        isolated.status().state,
        isolated.status().mold,
        isolated.status().broker,
    )
    isolated.close()
    assert "closed" == isolated.status().state
    assert [] == list((tmp_path / "run").iterdir())
