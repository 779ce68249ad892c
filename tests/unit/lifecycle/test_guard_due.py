"""A due policy, from the call that brings it about to the moment in which the reload begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World, number, outcome

from modelguard import TTL, Errors, MemoryGrowth, ModelGuard, Policy, Snapshot, Uses
from modelguard.telemetry import (
    CallbackErrored,
    LoadFinished,
    LoadStarted,
    PolicyIgnored,
    Reason,
    RecycleAsked,
    ReloadDue,
)


class TestADuePolicy:
    def test_replaces_the_model_at_the_end_of_a_call(self, world: World) -> None:
        """``Uses(3)``: three calls run on a generation, and the third one's end begins the reload."""
        world.inline = True
        guard = world.guard(reload_on=Uses(3))
        assert [1, 1, 1, 2, 2, 2, 3] == [number(guard) for _ in range(7)]
        due = world.seen(ReloadDue)
        assert [(1, ("Uses(3)",)), (2, ("Uses(3)",))] == [
            (event.generation, tuple(map(str, event.reasons))) for event in due
        ]
        assert ("Uses(3)",) == world.reasons(LoadFinished)

    def test_counts_errors_in_a_row(self, world: World) -> None:
        """``Errors``: a good call ends the row. One that was interrupted or cancelled says nothing about the model."""
        world.inline = True
        guard = world.guard(reload_on=Errors(consecutive=2))
        bad: list[type[BaseException] | None] = [
            ValueError,
            None,
            ValueError,
            KeyboardInterrupt,
            asyncio.CancelledError,
            ValueError,
        ]
        served = []
        for kind in bad:
            with suppress(BaseException), guard.lease() as model:
                served.append(model.number)
                if kind is not None:
                    raise kind
        assert ([1] * 6, 2) == (served, number(guard))

    @pytest.mark.parametrize("kind", ["function", "coroutine", "of a coroutine", "generator"])
    def test_overlooks_calls_that_do_not_fit(self, world: World, kind: str) -> None:
        """A call with wrong arguments between two that failed is no good call, whatever the kind of the function."""
        world.inline = True
        guard = world.guard(reload_on=Errors(consecutive=2))

        async def fail(_model: Any, value: int) -> int:
            raise ValueError(value)

        def generate(_model: Any, value: int) -> Iterator[int]:
            yield 1 // value

        functions: dict[str, Callable[..., Any]] = {
            "function": lambda _model, value: 1 // value,
            "coroutine": fail,
            "of a coroutine": lambda model, value: fail(model, value),  # noqa: PLW0108 - a plain function
            "generator": generate,
        }
        decorated = guard(functions[kind])

        def call(*arguments: int) -> None:
            with suppress(ValueError, ZeroDivisionError, TypeError):
                result = decorated(*arguments)
                if kind == "generator":
                    list(result)
                elif kind != "function":
                    asyncio.run(result)

        call(0)
        call(0, 1)
        assert guard.status().generation == 1
        call(0)
        assert guard.status().generation == 2

    def test_begins_one_reload(self, world: World) -> None:
        """Calls that end while the reload is under way do not ask for another."""
        guard = world.guard(reload_on=Uses(2))
        number(guard)
        world.loader.hold()
        assert [1] * 5 == [number(guard) for _ in range(5)]
        world.loader.reached()
        world.loader.open.set()
        world.join()
        assert (2, 1) == (world.loader.calls, len(world.seen(ReloadDue)))

    def test_is_forgotten_when_the_generation_was_replaced_meanwhile(self, world: World) -> None:
        """A verdict on a generation that is gone by the time it is reached replaces nothing."""

        class Slow(Policy):
            def due(self, now: Snapshot) -> bool:
                if now.generation == 1 and now.uses:
                    guard.reload()  # as somebody else may do in this moment
                    world.join()
                return now.generation == 1 and now.uses > 0

        guard = world.guard(reload_on=Slow())
        assert 1 == number(guard)
        world.join()
        assert (2, [], 2) == (guard.status().generation, world.seen(ReloadDue), world.loader.calls)

    def test_that_raises_harms_no_call(self, world: World) -> None:
        """A policy of your own that raises is reported, once per generation, and taken for "not due"."""

        class Broken(Policy):
            def due(self, now: Snapshot) -> bool:
                raise KeyError("uptime")

        guard = world.guard(reload_on=Broken())
        assert [1, 1, 1] == [number(guard) for _ in range(3)]
        world.join()
        assert [("reload_on", "KeyError: 'uptime' (in Broken)")] == [
            (event.callback, event.error) for event in world.seen(CallbackErrored)
        ]

    def test_whose_next_check_raises_harms_no_call(self, world: World) -> None:
        """The same holds for a ``next_check`` that raises."""

        class Broken(Policy):
            def due(self, now: Snapshot) -> bool:
                return False

            def next_check(self, now: Snapshot) -> Any:
                raise KeyError("uptime")

        guard = world.guard(reload_on=Broken())
        assert [1, 1] == [number(guard) for _ in range(2)]
        world.join()
        assert {"reload_on"} == {event.callback for event in world.seen(CallbackErrored)}

    def test_of_your_own_is_asked_after_every_call(self, world: World) -> None:
        """One method makes a policy, and it sees every call."""
        seen: list[int] = []

        class Mine(Policy):
            def due(self, now: Snapshot) -> bool:
                seen.append(now.uses)
                return False

        guard = world.guard(reload_on=Mine())
        guard.load()
        world.join()  # until its thread has ended, the load asks for calls
        for _ in range(3):
            number(guard)
        assert [1, 2, 3] == seen


class Odd(str):
    """Text of a class of a program: what others do with it fails."""

    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __hash__(self) -> int:
        raise RuntimeError("no hash")

    def __format__(self, spec: str) -> str:
        raise RuntimeError("no format")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("no pickle")


class TestWordsOfYourOwn:
    """A policy of your own may give text of a class of its own."""

    def test_become_plain_text(self, world: World) -> None:
        """Which every hook, log and process can use, and which is compared."""
        world.inline = True

        class Mine(Policy):
            kind = Odd("custom")  # type: ignore[assignment]

            def due(self, now: Snapshot) -> bool:
                return now.uses >= 1

            def ignored_because(self, now: Snapshot) -> str | None:
                return Odd("it cannot help") if now.uses == 0 else None

            def __repr__(self) -> str:
                return Odd("Mine()")

        guard = world.guard(reload_on=Mine(), defer=0)
        guard.load()
        guard.check()
        assert [1, 2] == [number(guard), number(guard)]
        assert [] == world.seen(CallbackErrored)
        told = (*world.last(ReloadDue).reasons[0], world.last(PolicyIgnored).policy, world.last(PolicyIgnored).detail)
        assert ("custom", "Mine()", "Mine()", "it cannot help") == told
        assert {str} == set(map(type, told))

    def test_have_to_be_text(self, world: World) -> None:
        """Else the policy is at fault, as one that raises."""
        world.inline = True

        class Mine(Policy):
            def due(self, now: Snapshot) -> bool:
                return True

            def reasons(self, now: Snapshot) -> tuple[Reason, ...]:
                return (Reason("custom", 3),)  # type: ignore[arg-type]

        guard = world.guard(reload_on=Mine())
        guard.load()
        guard.check()
        assert "TypeError" in world.last(CallbackErrored).error


class TestQuietMoments:
    """A loader that holds the GIL stalls every call beside it, so a due reload waits for a moment without calls."""

    def test_are_waited_for(self, world: World) -> None:
        """A reload that a policy asks for begins when no call has run for a twentieth of a second."""
        world.inline = True
        guard = world.guard(reload_on=Uses(1))
        number(guard)
        assert 0.05 == pytest.approx(world.last(LoadStarted).deferred_seconds, abs=0.02)

    def test_are_begun_with(self, world: World) -> None:
        """A reload that comes due in the middle of a pause waits for the next one, which leaves it more time."""
        world.inline = True
        calls_to_come = [3.0, 3.02]

        def sleep(seconds: float) -> None:
            world.tick(seconds)
            if calls_to_come and world.now >= due + calls_to_come[0]:
                calls_to_come.pop(0)
                number(guard)

        object.__setattr__(world.system, "sleep", sleep)
        guard = world.guard(reload_on=TTL("1h", jitter=0), defer="10s")
        number(guard)
        world.tick(3600)
        due = world.now
        assert guard.check()
        assert 3.07 == pytest.approx(world.last(LoadStarted).deferred_seconds, abs=0.03)

    def test_are_not_waited_for_where_no_call_comes(self, world: World) -> None:
        """An unused guard reloads after ``defer``."""
        world.inline = True
        guard = world.guard(reload_on=TTL("1h", jitter=0), defer="3s")
        guard.load()
        world.tick(3600)
        assert guard.check()
        assert 3 == pytest.approx(world.last(LoadStarted).deferred_seconds, abs=0.02)

    def test_are_not_waited_for_longer_than_defer(self, world: World) -> None:
        """If there is no such moment it begins after ``defer``, beside the calls."""
        world.inline = True
        guard = world.guard(reload_on=Uses(1), defer="3s", drain_timeout=0)
        with guard.lease():  # runs through it all
            number(guard)
        assert 3 == pytest.approx(world.last(LoadStarted).deferred_seconds, abs=0.02)

    @pytest.mark.parametrize("option", [{"defer": 0}, {"reload_on": None}], ids=["defer=0", "requested"])
    def test_are_not_waited_for_where_nobody_wants_to(self, world: World, option: dict[str, Any]) -> None:
        """With ``defer=0``, or when it is requested explicitly, a reload begins at once."""
        world.inline = True
        guard = world.guard(**{"reload_on": Uses(1), "drain_timeout": 0, **option})
        with guard.lease():
            number(guard)
            outcome(world.spawn(guard.reload))
        assert 0 == world.last(LoadStarted).deferred_seconds

    @pytest.mark.parametrize(
        ("headroom", "policy", "seconds"),
        [
            (124 * MB, MemoryGrowth("10 MB"), 0.0),
            (126 * MB, MemoryGrowth("10 MB"), 3.0),
            (None, MemoryGrowth("10 MB"), 3.0),
            (124 * MB, Uses(8), 3.0),
        ],
        ids=["short", "enough", "unknown", "not for memory"],
    )
    def test_are_not_waited_for_where_memory_is_short(
        self, world: World, headroom: int | None, policy: Policy, seconds: float
    ) -> None:
        """A policy that protects memory does not wait where a second copy, and a quarter of it, would not fit."""
        world.inline = True
        world.model_size = 100 * MB
        guard = world.guard(reload_on=policy, defer="3s", drain_timeout=0)
        guard.load()
        world.headroom = headroom
        with guard.lease():
            for grown in (0, 0, 0, 0, 50, 0, 0, 0):
                world.memory += grown * MB
                number(guard)
                guard.check()
                world.tick(10)
        assert seconds == pytest.approx(world.seen(LoadStarted)[1].deferred_seconds, abs=0.02)

    def test_show_how_memory_grew_in_them(self, world: World) -> None:
        """The event has the growth beside the seconds."""

        def sleep(seconds: float) -> None:
            world.tick(seconds)
            world.memory += MB

        object.__setattr__(world.system, "sleep", sleep)
        world.inline = True
        guard = world.guard(reload_on=Uses(1), defer="1s", drain_timeout=0)
        with guard.lease():
            number(guard)
        assert 100 * MB == pytest.approx(world.last(LoadStarted).deferred_growth, abs=2 * MB)

    def test_are_waited_for_without_the_turn(self, world: World) -> None:
        """Others may load meanwhile. If calls come while these have the turn, the next pause is waited for."""
        world.inline = True
        others, calls = ExitStack(), [0.02, 0.5, 0.7]
        free: list[bool] = []  # whenever it sleeps: the turn

        def sleep(seconds: float) -> None:
            with world.system.host_lock.held(sleep=world.tick, clock=lambda: world.now, cancelled=lambda: True) as held:
                free.append(held == "host")
            world.tick(seconds)
            while calls and world.now - due >= calls[0]:
                calls.pop(0)
                number(guard)
                if len(calls) == 2:
                    lock = world.system.host_lock
                    others.enter_context(lock.held(sleep=world.tick, clock=lambda: world.now, cancelled=bool))
            if not calls:
                others.close()

        guard = world.guard(reload_on=TTL("1h", jitter=0), defer="10s", system=replace(world.system, sleep=sleep))
        number(guard)
        world.tick(3600)
        due = world.now
        assert guard.check()
        assert (2, "host") == (number(guard), world.last(LoadStarted).host_lock)
        assert free[0]
        assert free[-1]
        assert 0.12 == pytest.approx(world.last(LoadStarted).deferred_seconds, abs=0.04)
        assert due + 0.75 == pytest.approx(world.now, abs=0.06)

    def test_end_when_somebody_is_in_a_hurry(self, world: World) -> None:
        """An explicit request ends the wait of a reload that was due already."""
        asked = False

        def sleep(seconds: float) -> None:
            nonlocal asked
            world.tick(seconds)
            if not asked:
                asked = True
                guard.reload(wait=False)

        object.__setattr__(world.system, "sleep", sleep)
        world.inline = True
        guard = world.guard(reload_on=Uses(1), defer="1h", drain_timeout=0)
        with guard.lease():
            number(guard)
        assert (True, 0.01) == (asked, pytest.approx(world.last(LoadStarted).deferred_seconds))


class TestInAForkedChild:
    """In a child of a prepared parent a private reload would undo the sharing."""

    def child(self, world: World, ask: Callable[[tuple[Reason, ...]], object]) -> ModelGuard[Any]:
        guard = world.guard(reload_on=Uses(2))
        guard.load()
        guard.recycle_in_children(ask)
        guard.engine.after_fork_in_child()
        return guard

    def test_a_due_policy_asks_for_a_fresh_worker(self, world: World) -> None:
        """There a due policy asks the server to replace the worker, once, with an event, and the model still serves."""
        asked: list[tuple[Reason, ...]] = []
        guard = self.child(world, asked.append)
        assert [1] * 5 == [number(guard) for _ in range(5)]
        assert not guard.check()
        assert ([(Reason("uses", "Uses(2)"),)], 1) == (asked, world.loader.calls)
        assert [(1, ("Uses(2)",))] == [
            (event.generation, tuple(map(str, event.reasons))) for event in world.seen(RecycleAsked)
        ]
        assert [] == world.seen(ReloadDue)

    def test_a_recycler_that_raises_harms_no_call(self, world: World) -> None:
        """It is reported, and the worker still serves."""

        def ask(_reasons: tuple[Reason, ...]) -> None:
            raise OSError("no arbiter")

        guard = self.child(world, ask)
        assert [1] * 3 == [number(guard) for _ in range(3)]
        assert ("recycle", "OSError: no arbiter") == (
            world.last(CallbackErrored).callback,
            world.last(CallbackErrored).error,
        )

    def test_the_parent_reloads_as_ever(self, world: World) -> None:
        """Only children recycle: the parent, and a process that never forked, replace the model themselves."""
        world.inline = True
        guard = world.guard(reload_on=Uses(1))
        guard.load()
        guard.recycle_in_children(lambda _reasons: pytest.fail("the parent was recycled"))
        assert [1, 2] == [number(guard), number(guard)]

    @pytest.mark.parametrize("policy", [TTL("1h"), TTL("1h") | Uses(3)])
    def test_new_weights_are_left_to_the_parent(self, world: World, policy: Policy) -> None:
        """A fresh worker would have the same old weights: a child asks for what is wrong with itself, and no more."""
        asked: list[tuple[Reason, ...]] = []
        guard = world.guard(reload_on=policy)
        guard.load()
        guard.recycle_in_children(asked.append)
        guard.engine.after_fork_in_child()
        world.tick(7200)
        assert not guard.check()
        assert [] == asked
        for _ in range(3):
            number(guard)
        assert ([] if isinstance(policy, TTL) else [(Reason("uses", "Uses(3)"),)]) == asked

    def test_a_parent_that_serves_nobody_decides_on_new_weights_alone(self, world: World) -> None:
        """It reloads at once, since there is no quiet moment to wait for, and its own uses do not count."""
        world.inline = True
        guard = world.guard(reload_on=TTL("1h") | Uses(1), defer="1h")
        guard.load()
        guard.recycle_in_children(print, takes_calls=False)
        assert [1, 1] == [number(guard), number(guard)]
        world.tick(3600)
        assert guard.check()
        assert 2 == guard.status().generation

    def test_counts_and_chance_are_its_own(self, world: World) -> None:
        """The child keeps the generation and starts its own counters, with a jitter of its own."""
        guard = world.guard(reload_on=Uses(5))
        for _ in range(3):
            number(guard)
        world.draw = 0.75
        guard.engine.after_fork_in_child()
        status = guard.status()
        assert ("ready", 1, 0, 0) == (status.state, status.generation, status.uses, status.in_flight)
        assert 0.75 == guard.engine.state.current.jitter  # type: ignore[union-attr]


class TestInAProcessThatIsReplaced:
    """Where a server replaces whole processes, each of which has loaded its own model."""

    def test_a_due_policy_asks_for_a_run_python(self, world: World) -> None:
        """It asks once, also for new weights, which a new process would load; the model still serves."""
        asked: list[tuple[Reason, ...]] = []
        guard = world.guard(reload_on=TTL("1h") | Uses(9))
        guard.recycle_here(asked.append)
        guard.load()
        assert [1] * 3 == [number(guard) for _ in range(3)]
        world.tick(7200)
        assert not guard.check()
        assert not guard.check()
        assert (1, 1) == (len(asked), world.loader.calls)
        assert [1] == [event.generation for event in world.seen(RecycleAsked)]
        assert [] == world.seen(ReloadDue)

    def test_a_reload_on_request_is_followed_by_a_fresh_answer(self, world: World) -> None:
        """An explicit reload makes a new generation here, and the policy is asked about that one."""
        world.inline = True
        asked: list[tuple[Reason, ...]] = []
        guard = world.guard(reload_on=Uses(2))
        guard.recycle_here(asked.append)
        assert [1, 1, 1] == [number(guard) for _ in range(3)]
        guard.reload()
        assert [2, 2] == [number(guard) for _ in range(2)]
        assert [(Reason("uses", "Uses(2)"),)] * 2 == asked
