"""The lifecycle guard against a model of its contract, under any order of events that Hypothesis can think of.

One thread plays everything: background work is queued and run by a rule, and a loader may be made to act while it
loads, so that interleavings are chosen, shrunk and repeated rather than hoped for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelguard import Backoff, Loading, Swap, Uses, guard, telemetry
from modelguard.errors import GuardClosed, LoadFailed, WouldDeadlock
from modelguard.lifecycle._lease import Lease
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.system import System, use
from modelguard.runtime.host_lock import HostLock

pytestmark = pytest.mark.timeout(300)

USES = 5


class Record:
    """What the test knows of a model. It does not hold the model, so that a dropped model dies at once."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.unloaded = 0


class Model:
    """A model that knows whether it was unloaded."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def predict(self) -> Record:
        assert self.record.unloaded == 0, "a call saw an unloaded model"
        return self.record


class World:
    """A clock that the test moves, and background work that the test releases."""

    def __init__(self, folder: object) -> None:
        self.now = 0.0
        self.queue: list[Callable[[], None]] = []
        self.queued = False
        self.system = System(
            clock=lambda: self.now,
            sleep=self.tick,
            private=lambda: 0,
            headroom=lambda: None,
            limit=lambda: None,
            trim=lambda: "none",
            random=lambda: 0.0,
            start_thread=self.start,
            host_lock=HostLock(lambda: folder),  # type: ignore[arg-type, return-value]
            ticks=False,
        )

    def tick(self, seconds: float) -> None:
        self.now += seconds

    def start(self, work: Callable[[], None], name: str) -> None:
        if self.queued:
            self.queue.append(work)
        else:
            work()


class LifecycleMachine(RuleBasedStateMachine):
    """Every rule first computes what the contract promises, then acts and compares."""

    folder: object = None

    @initialize(swap=st.sampled_from(["load_first", "drain_first"]))
    def open(self, swap: str) -> None:
        telemetry.set_hooks([])
        self.world = World(self.folder)
        self.swap = swap
        self.outcome = "ok"
        self.during: list[str] = []
        self.loading = 0
        self.made: list[Record] = []
        self.leases: list[tuple[Lease[Model], Record]] = []
        self.generators: list[tuple[Generator[Record, None, None], Record]] = []
        self.closed = False
        with use(lambda: self.world.system):
            self.guard: ModelGuard[Model] = guard(
                self.load,
                reload_on=Uses(USES),
                swap=Swap(swap, drain_timeout=0, defer=0),  # type: ignore[arg-type]
                validate=self.validate,
                unload=self.unload,
                wait_timeout=0,
                loading=Loading(backoff=Backoff(10, 10)),
                name="machine",
            )
        self.call = self.guard(Model.predict)

        def twice(model: Model):  # type: ignore[no-untyped-def] # noqa: ANN202
            yield model.predict()
            yield model.predict()

        self.generate = self.guard(twice)

    def teardown(self) -> None:
        if hasattr(self, "guard"):
            while self.leases:
                self.leases.pop()[0].end(failed=False)
            while self.generators:
                self.generators.pop()[0].close()
            self.run_queued()
            self.guard.close()
            assert [1] * len(self.made) == [model.unloaded for model in self.made], "unloaded once each, none kept"
        telemetry.set_hooks(None)

    # The loader and its friends

    def load(self) -> Model | None:
        self.loading += 1
        try:
            assert self.loading == 1, "two loads at a time"
            acts, self.during = self.during, []
            for act in acts:
                self.act_while_loading(act)
            if self.outcome == "raise":
                raise ValueError("no weights")
            if self.outcome == "none":
                return None
            self.made.append(Record(len(self.made) + 1))
            return Model(self.made[-1])
        finally:
            self.loading -= 1

    def act_while_loading(self, act: str) -> None:
        serving = self.serving()
        if act == "request":
            with suppress(GuardClosed):
                self.guard.reload(wait=False)
        elif serving is not None:
            assert serving is self.call()
        elif not self.closed:
            with pytest.raises(WouldDeadlock):
                self.call()

    def validate(self, model: Model) -> bool:
        return self.outcome != "refuse"

    def unload(self, model: Model) -> None:
        # The guard goes on whatever this hook raises, so what it finds is kept for the invariants.
        model.record.unloaded += 1

    # What the contract says

    def serving(self) -> Record | None:
        generation = self.guard.engine.state.current
        return None if generation is None else generation.model.record

    def in_backoff(self) -> bool:
        core = self.guard.engine.state
        return core.failure is not None and self.world.now < core.retry_at

    def use(self, run: Callable[[], Record]) -> Record | None:
        """Use the guard, and compare with the expected result."""
        serving, waiting, works = self.serving(), bool(self.world.queue), self.outcome == "ok"
        if self.closed:
            with pytest.raises(GuardClosed):
                run()
            return None
        if serving is not None:
            got = run()
            assert got is serving
            return got
        if waiting:  # the load is queued, and whoever waits for it waits for this thread
            return None
        if self.in_backoff() or not works:
            before = len(self.made)
            with pytest.raises(LoadFailed):
                run()
            assert self.in_backoff()
            assert before == len(self.made) - (not works and self.outcome == "refuse" and len(self.made) > before)
            return None
        got = run()
        assert got is self.made[-1]
        return got

    # What may happen

    @rule(outcome=st.sampled_from(["ok", "ok", "raise", "none", "refuse"]))
    def decide_outcome(self, outcome: str) -> None:
        self.outcome = outcome

    @rule(acts=st.lists(st.sampled_from(["call", "request"]), max_size=3))
    def decide_what_happens_during_the_next_load(self, acts: list[str]) -> None:
        self.during = acts

    @rule()
    def call_it(self) -> None:
        self.use(self.call)

    @rule()
    def call_nested(self) -> None:
        def outer(model: Model) -> Record:
            assert model.record is self.call(), "a nested call joins the outer generation"
            return model.record

        self.use(self.guard(outer))

    @rule()
    def take_a_lease(self) -> None:
        lease = self.guard.lease()
        model = self.use(lambda: lease.__enter__().record)
        if model is not None:
            # Each lease stands for another caller, whose context is not that of the next rule.
            self.guard.engine.state.enclosing.set(None)
            lease._token = None
            self.leases.append((lease, model))

    @precondition(lambda self: getattr(self, "leases", None))
    @rule(data=st.data())
    def end_a_lease(self, data: st.DataObject) -> None:
        lease, model = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert model.unloaded == 0
        lease.end(failed=False)

    @rule()
    def start_a_generator(self) -> None:
        generator = self.generate()
        model = self.use(lambda: next(generator))
        if model is not None:
            self.generators.append((generator, model))

    @precondition(lambda self: getattr(self, "generators", None))
    @rule(how=st.sampled_from(["finish", "close", "drop"]))
    def end_a_generator(self, how: str) -> None:
        generator, model = self.generators.pop()
        assert model.unloaded == 0
        if how == "finish":
            self.generators.append((generator, model))
            assert model is next(generator)
            self.generators.pop()
            assert [] == list(generator)
        elif how == "close":
            generator.close()
        del generator

    @rule()
    def request_a_reload(self) -> None:
        if self.closed:
            with pytest.raises(GuardClosed):
                self.guard.reload(wait=False)
            return
        self.world.queued = True
        self.guard.reload(wait=False)
        self.world.queued = False

    @rule()
    def run_queued(self) -> None:
        while self.world.queue:
            self.world.queue.pop(0)()

    @rule(seconds=st.sampled_from([0.1, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.tick(seconds)
        self.guard.check()

    @rule()
    def close(self) -> None:
        self.guard.close()
        self.closed = True
        assert self.serving() is None
        assert "closed" == self.guard.status().state

    @precondition(lambda self: hasattr(self, "guard") and not self.world.queue)
    @rule()
    def fork(self) -> None:
        child = os.fork()
        if child == 0:
            os._exit(self.in_child())
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "the child could not go on"

    def in_child(self) -> int:
        """A ready generation is carried over, and the child may do all that its parent may."""
        try:
            serving, self.outcome, self.during = self.serving(), "ok", []
            if self.closed:
                return 0
            if serving is not None:
                assert serving is self.call()
            assert 0 == self.guard.status().failures
            self.guard.reload()
            assert self.made[-1] is self.call()
            assert 1 == self.guard.status().uses
            self.guard.close()
            assert 1 == self.made[-1].unloaded
        except BaseException:  # noqa: BLE001 - the exit status tells the parent
            return 1
        return 0

    # What always holds

    @invariant()
    def nobody_holds_an_unloaded_model(self) -> None:
        for _, model in getattr(self, "leases", []) + getattr(self, "generators", []):
            assert model.unloaded == 0

    @invariant()
    def no_lease_leaks(self) -> None:
        if hasattr(self, "guard"):
            assert len(self.leases) + len(self.generators) == self.guard.status().in_flight

    @invariant()
    def nothing_is_unloaded_twice_or_kept(self) -> None:
        if not hasattr(self, "guard"):
            return
        held = {id(model) for _, model in self.leases + self.generators}
        for model in self.made:
            alive = model is self.serving() or id(model) in held
            assert int(not alive) == model.unloaded


def test_the_contract_holds_under_any_order_of_events(tmp_path: Path) -> None:
    """No call sees an unloaded model, no lease leaks, one load runs at a time, whatever happens in whatever order."""
    tmp_path.chmod(0o700)

    class Machine(LifecycleMachine):
        folder = tmp_path

    Machine.TestCase.settings = settings(
        max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    Machine.TestCase("runTest").runTest()
