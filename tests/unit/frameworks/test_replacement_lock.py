"""``_replacement_lock``: one process is replaced at a time, whatever happens to any of them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from modelguard.frameworks.ray import ReplacementLock, Store


class Shared(Store):
    """The store of a whole cluster, in a dict; another process can come in between any two steps."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.between: Callable[[], object] | None = None

    def put_if_absent(self, key: str, value: str) -> bool:
        self._pause()
        return self.entries.setdefault(key, value) is value

    def get(self, key: str) -> str | None:
        self._pause()
        return self.entries.get(key)

    def delete(self, key: str) -> None:
        self._pause()
        self.entries.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.entries if key.startswith(prefix)]

    def _pause(self) -> None:
        between, self.between = self.between, None
        if between is not None:
            between()


class World:
    """Processes that take turns, each with the same clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = Shared()

    def process(self, name: str) -> ReplacementLock:
        return ReplacementLock(self.store, "app/count", name, timeout=60, clock=lambda: self.now)


def test_one_leaves_at_a_time() -> None:
    """The process that has the turn keeps it, and the others wait."""
    world = World()
    a, b = world.process("a"), world.process("b")
    assert [True, False, True] == [a.acquire(), b.acquire(), a.acquire()]


def test_the_next_may_leave_when_a_successor_has_arrived() -> None:
    """The successor of the process that left passes the turn on."""
    world = World()
    a, b = world.process("a"), world.process("b")
    assert a.acquire()
    world.process("successor of a").release()
    assert b.acquire()
    assert not a.acquire()


def test_arrivals_without_anybody_leaving_change_nothing() -> None:
    """The first replicas of a deployment have no predecessor."""
    world = World()
    world.process("a").release()
    assert {} == world.store.entries


def test_a_successor_that_never_comes_does_not_block_the_turn() -> None:
    """After the patience of the process that waits, by its own clock, the turn is free."""
    world = World()
    a, b = world.process("a"), world.process("b")
    assert a.acquire()
    assert not b.acquire()
    world.now = 59.9
    assert not b.acquire()
    world.now = 60
    assert b.acquire()
    assert not a.acquire()


def test_patience_counts_from_when_the_turn_was_taken() -> None:
    """If another process took the turn meanwhile, the wait starts again."""
    world = World()
    a, b, c = (world.process(name) for name in "abc")
    assert a.acquire()
    assert not c.acquire()
    world.now = 30
    world.process("successor of a").release()
    assert b.acquire()
    world.now = 61
    assert not c.acquire()
    world.now = 121
    assert c.acquire()


def test_two_that_come_at_the_same_time_do_not_both_get_it() -> None:
    """The other one takes it between reading and writing."""
    world = World()
    a, b = world.process("a"), world.process("b")
    got = []
    world.store.between = lambda: got.append(b.acquire())
    assert ([True], False) == (got, a.acquire())  # evaluated in order: b is inside of a's


def test_an_entry_that_is_deleted_before_it_is_read_is_no_problem() -> None:
    """The later entry that replaced it counts."""
    world = World()
    a, b, c = (world.process(name) for name in "abc")
    assert a.acquire()
    world.store.between = lambda: (world.process("successor of a").release(), b.acquire())
    assert not c.acquire()
    assert b.acquire()


def test_a_deleted_number_is_not_used_again() -> None:
    """A process that read long ago does not get the turn with an entry older than the last."""
    world = World()
    a, b, c = (world.process(name) for name in "abc")

    def meanwhile() -> None:
        assert a.acquire()
        world.process("successor of a").release()
        assert b.acquire()

    world.store.between = meanwhile
    assert not c.acquire()
    assert ["b"] == list(world.store.entries.values())


def test_groups_are_independent() -> None:
    """Each deployment has its own lock, even if one name is a prefix of another."""
    world = World()
    assert ReplacementLock(world.store, "app/count", "a", timeout=60).acquire()
    assert ReplacementLock(world.store, "app/count2", "b", timeout=60).acquire()
    assert ReplacementLock(world.store, "app", "c", timeout=60).acquire()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["acquire", "release"]), st.booleans()), max_size=30))
def test_nothing_piles_up(steps: list[tuple[str, str, bool]]) -> None:
    """However often the turn changes, one entry is left, and at most one process has the turn."""
    world = World()
    processes = {name: world.process(name) for name in "abc"}
    for name, step, late in steps:
        world.now += 61 if late else 1
        getattr(processes[name], step)()
        assert len(world.store.entries) <= 1
        holders = [value for value in world.store.entries.values() if value]
        assert len(holders) <= 1
