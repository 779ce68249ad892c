"""The readings behind a verdict: memory in its own time, files as they were when the load began."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World, look, outcome

from modelguard import MemoryGrowth, MemoryLimit, ModelGuard, Modified, Policy, Snapshot, Uses
from modelguard.lifecycle import _models, system
from modelguard.telemetry import GrowthFound, PolicyIgnored, ReloadDue

OLD = (("", 1, 1, 100, 1),)
HALF = (("", 1, 2, 50, 2),)
NEW = (("", 1, 2, 100, 3),)


def use(guard: ModelGuard[Any], times: int = 1) -> None:
    for _ in range(times):
        with guard.lease():
            pass


class TestMemory:
    @pytest.fixture
    def guard(self, world: World) -> ModelGuard[Any]:
        """A guard whose generation has settled at 100 MB."""
        made = world.guard(reload_on=MemoryGrowth("50 MB"))
        made.load()
        use(made, 10)
        assert not look(world, made, 3)
        return made

    def test_growth_is_due_after_three_readings(self, world: World, guard: ModelGuard[Any]) -> None:
        """Growth since the generation settled is a reason to reload when three readings in a row say so."""
        world.memory += 50 * MB
        assert [False, False, True] == [look(world, guard) for _ in range(3)]
        world.join()
        assert (2, ("MemoryGrowth('50 MB')",)) == (guard.status().generation, world.reasons(ReloadDue))

    def test_a_spike_is_no_growth(self, world: World, guard: ModelGuard[Any]) -> None:
        """A call with large buffers, even two readings long, does not cost a reload."""
        for _ in range(5):
            world.memory += 500 * MB
            assert not look(world, guard, 2)
            world.memory -= 500 * MB
            assert not look(world, guard)
        assert 1 == guard.status().generation

    @pytest.mark.parametrize(("uses", "seconds"), [(10, 0), (0, 5)], ids=["by calls", "by time"])
    def test_counts_from_where_the_generation_settled(self, world: World, uses: int, seconds: int) -> None:
        """What a generation builds up in its first ten calls or five seconds is not growth."""
        guard = world.guard(reload_on=MemoryGrowth("50 MB"))
        guard.load()
        world.memory += 500 * MB  # lazily built tables
        use(guard, uses)
        world.tick(seconds)
        assert not look(world, guard, 10)
        world.memory += 50 * MB
        assert look(world, guard, 3)

    def test_is_not_read_before_the_generation_has_settled(self, world: World) -> None:
        """Readings of a fresh generation would count its loading as growth."""
        guard = world.guard(reload_on=MemoryGrowth("50 MB"))
        guard.load()
        use(guard, 9)
        for _ in range(4):
            world.tick(1)
            guard.check()
            world.memory += 100 * MB
        assert not look(world, guard, 9)

    def test_never_costs_two_reloads_in_a_row(self, world: World, guard: ModelGuard[Any]) -> None:
        """A newly loaded generation is not checked until it has settled, even if memory did not come back."""
        world.memory += 500 * MB
        assert look(world, guard, 3)
        world.join()
        assert not look(world, guard, 20)  # the new generation settles where it finds memory
        assert 2 == guard.status().generation

    def test_is_not_judged_while_an_old_generation_drains(self, world: World) -> None:
        """While the old generation has calls, two copies are in memory: the new one has not settled."""
        guard = world.guard(reload_on=MemoryGrowth("50 MB"))
        guard.load()
        use(guard, 10)
        with guard.lease():
            outcome(world.spawn(guard.reload))
            assert not look(world, guard, 20)
            world.memory += 500 * MB
            assert not look(world, guard, 20)

    def test_is_read_only_for_policies_that_ask(self, world: World) -> None:
        """A guard without a policy on memory costs no readings."""
        guard = world.guard(reload_on=Uses(100))
        guard.load()
        use(guard, 20)
        reading = world.memory
        object.__setattr__(world.system, "private", lambda: pytest.fail("it was read"))
        assert (False, reading) == (look(world, guard, 5), world.memory)

    @pytest.mark.parametrize(("cost", "gap"), [(0.0, 0.1), (0.06, 6), (0.5, 10)])
    def test_readings_take_little_of_the_time(self, world: World, cost: float, gap: float) -> None:
        """A reading is repeated after a hundred times what it took, within a tenth of a second and ten seconds."""
        read: list[float] = []

        def private() -> int:
            read.append(world.now)
            world.tick(cost)
            return world.memory

        guard = world.guard(reload_on=MemoryGrowth("50 MB"))
        guard.load()
        use(guard, 10)
        object.__setattr__(world.system, "private", private)
        while len(read) < 2:
            world.tick(0.01)
            guard.check()
        assert gap == pytest.approx(read[1] - read[0], abs=0.02)

    def test_the_ticker_learns_when_to_check_again(self, world: World, guard: ModelGuard[Any]) -> None:
        """A guard in use is checked when its next reading is due, an idle one each second."""
        use(guard)
        guard.check()
        busy = guard.engine.check_interval()
        guard.check()
        assert (pytest.approx(0.1), 1.0) == (busy, guard.engine.check_interval())

    def test_a_bound_below_a_fresh_model_is_ignored(self, world: World) -> None:
        """If even a new model is above the bound a reload cannot help: none is made, and this is reported once."""
        guard = world.guard(reload_on=MemoryLimit("80 MB"))
        guard.load()
        use(guard, 10)
        assert not look(world, guard, 20)
        ignored = world.seen(PolicyIgnored)
        assert [(1, "MemoryLimit('80 MB')")] == [(event.generation, event.policy) for event in ignored]
        assert "the process holds 100 MB with a fresh model, and the bound is 80 MB" == ignored[0].detail

    def test_a_cause_that_is_known_is_named(self, world: World) -> None:
        """If the process is watched, the event says what makes it grow."""
        found = GrowthFound(guard="service", cause="threads", share=1.0, seen="", fix="", growth=9 * MB, calls=9)
        system.note(found)
        try:
            guard = world.guard(reload_on=MemoryLimit("80 MB"))
            guard.load()
            use(guard, 10)
            look(world, guard, 20)
            assert ["threads"] == [event.cause for event in world.seen(PolicyIgnored)]
            assert found is guard.status().growth
        finally:
            system.note(None)

    def test_a_share_is_of_the_effective_limit(self, world: World) -> None:
        """``MemoryLimit("80%")`` asks about the limit that this process runs under."""
        world.limit = 200 * MB
        guard = world.guard(reload_on=MemoryLimit("80%"))
        guard.load()
        use(guard, 10)
        assert not look(world, guard, 9)
        world.memory = 160 * MB
        assert look(world, guard, 3)


class TestFiles:
    @pytest.fixture
    def path(self, tmp_path: Path, world: World) -> Path:
        path = tmp_path / "weights.bin"
        path.touch()  # or guard() would warn
        world.files[path] = OLD
        return path

    def guard(self, world: World, path: Path, **options: Any) -> ModelGuard[Any]:
        made = world.guard(reload_on=Modified(path, **options))
        made.load()
        assert not look(world, made)
        return made

    def test_a_change_counts_when_it_has_been_quiet(self, world: World, path: Path) -> None:
        """A file that is being written is not loaded: it must be unchanged for two seconds first."""
        guard = self.guard(world, path)
        world.files[path] = HALF
        assert not look(world, guard, 2)
        world.files[path] = NEW
        assert [False, False, True] == [look(world, guard) for _ in range(3)]
        world.join()
        assert (f"Modified({str(path)!r})",) == world.reasons(ReloadDue)

    def test_an_atomic_change_counts_at_once(self, world: World, path: Path) -> None:
        """Writers that replace the file by a rename need not be waited for."""
        guard = self.guard(world, path, atomic=True)
        world.files[path] = NEW
        assert look(world, guard)

    def test_one_change_costs_one_reload(self, world: World, path: Path) -> None:
        """After the reload the file is as it was when that began, so nothing is due."""
        guard = self.guard(world, path)
        world.files[path] = NEW
        assert look(world, guard, 4)
        world.join()
        assert (False, 2) == (look(world, guard, 10), guard.status().generation)

    def test_a_change_during_the_load_is_not_missed(self, world: World, path: Path) -> None:
        """What changes while the loader reads it is loaded again: the comparison is with the load's beginning."""

        def load() -> Any:
            if world.loader.calls == 0:
                world.files[path] = NEW
            return world.loader()

        guard = world.guard(load, reload_on=Modified(path))
        guard.load()
        assert look(world, guard, 3)
        world.join()
        assert (False, 2) == (look(world, guard, 10), guard.status().generation)

    def test_a_missing_file_is_no_change(self, world: World, path: Path) -> None:
        """While the file is gone nothing is due; when it comes back changed, that is."""
        guard = self.guard(world, path)
        world.files[path] = None
        assert not look(world, guard, 10)
        world.files[path] = OLD
        assert not look(world, guard, 10)
        world.files[path] = None
        assert not look(world, guard)
        world.files[path] = NEW
        assert look(world, guard, 3)

    def test_the_end_of_a_call_does_not_look_at_files(self, world: World, path: Path) -> None:
        """The ticker reads files and memory; no call waits for a disk."""
        guard = world.guard(reload_on=Modified(path) | Uses(1000))
        guard.load()
        object.__setattr__(world.system, "fingerprint", lambda _path: pytest.fail("a call looked at a file"))
        use(guard, 20)
        assert 1 == guard.status().generation


class TestGauges:
    def test_are_read_off_the_model_by_its_adapter(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """A policy of your own may compare what the adapter reads now with what it read at first."""
        model = types.SimpleNamespace(strings=100)

        class Adapter:
            size = staticmethod(lambda _model: None)
            gauges = staticmethod(lambda model: {"strings": model.strings})
            released = staticmethod(lambda: None)

        class Crowded(Policy):
            def due(self, now: Snapshot) -> bool:
                return now.gauges["strings"] > 2 * now.first_gauges["strings"]

        fake = types.ModuleType("fake_adapter")
        fake.ADAPTER = Adapter()  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_adapter", fake)
        monkeypatch.setitem(_models._MODULES, "types.SimpleNamespace", "fake_adapter")
        world.inline = True
        models = [types.SimpleNamespace(strings=100), model]
        guard = world.guard(models.pop, reload_on=Crowded())
        use(guard, 3)
        assert 1 == guard.status().generation
        model.strings = 201
        use(guard)
        assert 2 == guard.status().generation

    def test_are_empty_for_other_models(self, world: World) -> None:
        """A model of an unknown library has no figures."""
        seen: list[Snapshot] = []

        class Mine(Policy):
            def due(self, now: Snapshot) -> bool:
                seen.append(now)
                return False

        guard = world.guard(reload_on=Mine())
        guard.load()
        world.join()  # until its thread has ended, the load asks for calls
        use(guard)
        assert [({}, {})] == [(dict(now.gauges), dict(now.first_gauges)) for now in seen]


def test_a_snapshot_tells_what_there_is(world: World) -> None:
    """A policy of your own sees number, age, uses and errors in a row of the serving generation, and its jitter."""
    seen: list[Snapshot] = []

    class Mine(Policy):
        def due(self, now: Snapshot) -> bool:
            seen.append(now)
            return False

    world.draw = 0.25
    guard = world.guard(reload_on=Mine())
    guard.load()
    world.tick(90)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"), guard.lease():
            raise ValueError("bad")
    now = seen[-1]
    assert (1, 90, 2, 2, 0.25) == (now.generation, now.age, now.uses, now.consecutive_errors, now.jitter)


def test_a_snapshot_during_the_end_of_a_load_is_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The load's thread begins anew with readings while another one asks the policies, at the end of a call."""
    (tmp_path / "one").touch()
    guard = world.guard(reload_on=MemoryGrowth("50 MB") | Modified(tmp_path / "one"))
    guard.load()
    use(guard, 10)
    assert not look(world, guard, 3)
    readings, generation = guard.engine.checks.readings, guard.engine.state.current
    assert generation is not None
    change = readings._change

    class Interrupted(list[int]):
        def __len__(self) -> int:
            readings.start(generation)
            return super().__len__()

    def interrupted(*found: Any) -> Any:
        readings._seen[tmp_path / f"{len(readings._seen)}"] = (None, 0.0)
        return change(*found)

    monkeypatch.setattr(readings, "_change", interrupted)
    assert [tmp_path / "one"] == list(readings.snapshot(generation, settled=True, sample=False).files)
    readings._first = Interrupted([100 * MB] * 3)
    assert 100 * MB == readings.snapshot(generation, settled=True, sample=False).baseline
