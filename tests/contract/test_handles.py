"""What every handle of models promises, whichever it is: guard, replicas, pool.

``tests/process/test_handles.py`` runs the same on isolated functions, whose models live in processes of their own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from itertools import count, product
from typing import Any

import pytest
from tests.contract.handles import (
    CLOCKED,
    IN_PROCESS,
    TIMEOUT,
    Handle,
    How,
    Variant,
    make_in_process,
    needs,
    parametrize,
    spawn,
)

from modelguard import guard, telemetry
from modelguard.errors import (
    GuardClosed,
    InvalidOption,
    LoadFailed,
    NoPreviousModel,
    Overloaded,
    Reloading,
    WouldDeadlock,
)
from modelguard.testing import Clock, Loader

Make = Callable[..., Handle]

both = pytest.mark.parametrize("how", ["plain", "async"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test on each handle that it is for."""
    parametrize(metafunc, IN_PROCESS)


@pytest.fixture
def make(kind: str, modelguard_clock: Clock, modelguard_loader: Loader) -> Iterator[Make]:
    """Make a handle of a kind, which is closed after the test."""
    made: list[Handle] = []

    def one(variant: Variant = "plain") -> Handle:
        unloaded: list[int] = []
        note = {"unload": lambda model: unloaded.append(model.number)}
        it = make_in_process(kind, variant, modelguard_loader, CLOCKED, **note)
        passing = {"due": CLOCKED.due, "kept": CLOCKED.due, "idle": CLOCKED.idle}.get(variant, "1h")
        handle = IN_PROCESS[kind](
            it,
            modelguard_loader,
            modelguard_clock.advance,
            lambda: modelguard_clock.advance(passing),
            lambda: unloaded,
            modelguard_clock.settle,
        )
        made.append(handle)
        return handle

    yield one
    for handle in made:
        handle.end()


class TestTheFirstLoad:
    def test_nothing_is_loaded_before_it_is_needed(self, make: Make) -> None:
        """To make a handle, to decorate with it, and to ask for its status, loads nothing."""
        handle = make()
        repr(handle.it)
        assert ({"new"}, 0, False, 0) == (handle.states(), handle.in_flight(), handle.paused(), handle.loader.calls)
        assert "load" not in handle.has or not handle.ready()

    def test_the_first_call_loads_and_later_ones_do_not(self, make: Make) -> None:
        """One model answers all of them, by whichever way they come."""
        handle = make()
        assert {1} == {handle.call() for _ in range(3)}
        assert {1} == {use() for use in handle.doors().values()}
        assert (1, 1) == (handle.loader.calls, handle.alive())
        assert "ready" in handle.states()

    def test_calls_that_come_at_once_share_a_load(self, make: Make) -> None:
        """However many threads wait for it."""
        handle = make()
        handle.loader.hold()
        calls = [spawn(handle.call) for _ in range(8)]
        handle.loader.reached()
        handle.loader.let_go()
        assert {call.result(TIMEOUT) for call in calls} <= set(range(1, handle.copies + 1))
        assert handle.loader.calls <= handle.copies

    def test_tasks_that_come_at_once_share_a_load(self, make: Make) -> None:
        """And the loop goes on meanwhile: it is the loop that lets the load end."""
        handle = make()
        handle.loader.hold()

        async def main() -> list[int]:
            calls = [asyncio.create_task(handle.acall()) for _ in range(8)]
            await asyncio.to_thread(handle.loader.reached)
            handle.loader.let_go()
            return await asyncio.gather(*calls)

        assert set(asyncio.run(main())) <= set(range(1, handle.copies + 1))
        assert handle.loader.calls <= handle.copies

    @needs("load")
    @both
    def test_load_loads_unless_it_is_loaded(self, make: Make, how: How) -> None:
        """Once for each model that the handle keeps, and no call has to load then."""
        handle = make()
        for _ in range(2):
            handle.do("load", how)
            assert (handle.copies, {"ready"}, True) == (handle.loader.calls, handle.states(), handle.ready())
        handle.call()
        assert handle.copies == handle.loader.calls

    @needs("load")
    @both
    def test_a_bounded_load_goes_on(self, make: Make, how: How) -> None:
        """``timeout`` ends the wait with ``Reloading``, and the model is there for the next call."""
        handle = make()
        handle.loader.hold()
        with pytest.raises(Reloading) as late:
            handle.do("load", how, timeout="50ms")
        assert isinstance(late.value, Overloaded)
        assert isinstance(late.value, TimeoutError)
        handle.loader.let_go()
        assert handle.call() <= handle.copies
        assert handle.loader.calls <= handle.copies

    @needs("load")
    def test_load_does_not_block_an_event_loop(self, make: Make) -> None:
        """The error names the twin that does not."""
        handle = make()
        with pytest.raises(WouldDeadlock, match=r"await .*aload"):
            handle.on_loop(handle.it.load)
        assert 0 == handle.loader.calls


class TestALoadThatFails:
    def test_its_caller_gets_the_reason(self, make: Make) -> None:
        """With the number of the attempt and the seconds until the next one, until which no other load begins."""
        handle = make()
        handle.loader.fail(None)
        for _ in range(3):
            with pytest.raises(LoadFailed, match=r"OSError: .*fail\(\)") as failed:
                handle.call()
            assert (1, None) == (failed.value.attempt, failed.value.current)
            assert failed.value.retry_after > 0
        assert handle.loader.calls <= handle.copies

    def test_all_who_waited_get_the_reason(self, make: Make) -> None:
        """Each an error of its own, threads and tasks alike, and the loader's own is a cause."""
        handle = make()
        handle.loader.fail(None)
        handle.loader.hold()
        calls = [spawn(use) for use in (handle.call, lambda: asyncio.run(handle.acall())) for _ in range(3)]
        handle.loader.reached()
        handle.loader.let_go()
        errors = [call.exception(TIMEOUT) for call in calls]
        assert ({LoadFailed}, len(calls)) == ({type(one) for one in errors}, len({id(one) for one in errors}))
        assert OSError in {type(one.__cause__) for one in errors if one is not None}

    def test_it_is_tried_again_after_its_backoff(self, make: Make) -> None:
        """By the next call, at the latest, and then all is well."""
        handle = make()
        handle.loader.fail(None)
        with pytest.raises(LoadFailed) as failed:
            handle.call()
        handle.loader.fail(0)
        handle.wait(failed.value.retry_after)
        handle.call()
        assert "ready" in handle.states()

    @needs("retries")
    def test_it_is_tried_again_without_a_call(self, make: Make) -> None:
        """So a service comes up by itself; meanwhile its probe says that it is not ready."""
        handle = make()
        handle.loader.fail(None)
        with pytest.raises(LoadFailed) as failed:
            handle.load()
        assert (True, False) == ("failed" in handle.states(), handle.ready())
        failures = [(one.failures, one.last_error) for one in handle.statuses() if one.failures]
        assert [(1, failed.value.reason)] == failures
        handle.loader.fail(0)
        handle.wait(failed.value.retry_after)
        handle.until(handle.ready, "the retry")
        assert "failed" not in handle.states()

    @needs("reload waits")
    @both
    def test_a_reload_that_fails_changes_nothing(self, make: Make, how: How) -> None:
        """The old model takes calls; the error and the status say so."""
        handle = make()
        handle.load()
        handle.loader.fail(None)
        with pytest.raises(LoadFailed, match="has not replaced generation 1, which serves on") as failed:
            handle.do("reload", how)
        assert (1, True) == (failed.value.current, handle.ready())
        assert handle.call() <= handle.copies
        assert "degraded" in handle.states()
        assert handle.states() <= {"degraded", "ready"}
        handle.loader.fail(0)
        handle.wait(failed.value.retry_after)
        handle.until(lambda: handle.states() == {"ready"}, "the retry, which no call has to ask for")


class TestReload:
    @both
    def test_the_next_call_has_a_new_model(self, make: Make, how: How) -> None:
        """And the old one is gone."""
        handle = make()
        before = handle.load()
        handle.do("reload", how)
        assert handle.call() > before
        handle.until(lambda: handle.alive() == handle.copies, "the end of the old model")

    def test_a_call_that_runs_keeps_its_model(self, make: Make) -> None:
        """Until its end, and the next call has the new one."""
        handle = make()
        before = handle.load()
        with handle.busy() as running:
            reload = spawn(handle.it.reload)
            assert running.end() <= before
            reload.result(TIMEOUT)
        assert before < handle.call()
        handle.until(lambda: handle.alive() == handle.copies, "the end of the old model")

    @needs("reload waits")
    def test_calls_beside_it_have_the_new_model(self, make: Make) -> None:
        """They do not wait for it."""
        handle = make()
        before = handle.load()
        with handle.busy() as running:
            handle.it.reload()
            handle.until(lambda: handle.call() > before, "the next model")
            assert running.end() <= before

    @needs("reload waits")
    def test_it_need_not_be_waited_for(self, make: Make) -> None:
        """The old model takes calls until the new one is there."""
        handle = make()
        before = handle.load()
        handle.loader.hold()
        handle.it.reload(wait=False)
        handle.loader.reached()
        assert handle.call() <= before
        assert "reloading" in handle.states()
        handle.loader.let_go()
        handle.until(lambda: handle.call() > before, "the next model")

    @needs("reload waits")
    @both
    def test_a_bounded_reload_goes_on(self, make: Make, how: How) -> None:
        """``timeout`` ends the wait with ``Reloading``, not the reload."""
        handle = make()
        before = handle.load()
        handle.loader.hold()
        with pytest.raises(Reloading):
            handle.do("reload", how, timeout="50ms")
        assert handle.call() <= before
        handle.loader.let_go()
        handle.until(lambda: handle.call() > before, "the next model")

    @needs("reload waits")
    def test_it_does_not_block_an_event_loop(self, make: Make) -> None:
        """The error names the twin that does not; with ``wait=False`` there is nothing to wait for."""
        handle = make()
        before = handle.load()
        with pytest.raises(WouldDeadlock, match=r"await .*areload"):
            handle.on_loop(handle.it.reload)
        assert before == handle.loader.calls
        handle.on_loop(lambda: handle.it.reload(wait=False))
        handle.until(lambda: handle.call() > before, "the next model")

    @needs("reload waits")
    @pytest.mark.parametrize("wait", [5, "yes", None])
    def test_wait_is_true_or_false(self, make: Make, wait: Any) -> None:
        """A number of seconds is meant as a timeout, and the error says so."""
        handle = make()
        with pytest.raises(InvalidOption, match="wait="):
            handle.it.reload(wait=wait)

    @needs("reload waits", "in process")
    def test_inside_a_call_it_would_wait_for_its_caller(self, make: Make) -> None:
        """So it is refused, and the call goes on."""
        handle = make()
        with pytest.raises(WouldDeadlock):
            handle.inside(handle.it.reload)
        assert 1 == handle.call()

    @needs("reload waits")
    @both
    def test_the_loader_of_another_guard_may_wait_for_it(self, make: Make, how: How) -> None:
        """That has the turn of this host already, and would wait for itself for five minutes."""
        handle = make()
        before = handle.load()
        renew = count()

        def load() -> object:
            if next(renew):
                handle.it.reload()
            return object()

        async def aload() -> object:
            if next(renew):
                await handle.it.areload()
            return object()

        with guard(aload if how == "async" else load, reload_on=None) as outer:
            outer.reload(timeout=TIMEOUT)
        assert handle.call() > before


class TestUnload:
    @both
    def test_it_releases_until_the_next_use(self, make: Make, how: How, seen: list[telemetry.Event]) -> None:
        """All models are gone when it returns, state and event say so, and the next call loads."""
        handle = make()
        before = handle.load()
        handle.do("unload", how)
        assert (0, True) == (handle.alive(), handle.idle())
        told = [event.reasons for event in seen if isinstance(event, telemetry.UnloadStarted)]
        assert [["requested"]] * handle.copies == [[reason.kind for reason in reasons] for reasons in told]
        assert before < handle.call()
        assert "ready" in handle.states()

    @both
    def test_it_waits_for_calls(self, make: Make, how: How) -> None:
        """As long as ``timeout`` says; they run to their end on their model, which is gone then."""
        handle = make()
        handle.load()
        with handle.busy() as running:
            with pytest.raises(Reloading):
                handle.do("unload", how, timeout="50ms")
            assert not running.answer.done()
            assert running.end() <= handle.copies
        handle.do("unload", how)
        assert 0 == handle.alive()

    @both
    def test_without_a_model_it_does_nothing(self, make: Make, how: How) -> None:
        """Neither before the first load, nor twice."""
        handle = make()
        handle.do("unload", how)
        assert (0, 1) == (handle.loader.calls, handle.call())
        for _ in range(2):
            handle.do("unload", how, timeout="30s")
        assert (0, True) == (handle.alive(), handle.idle())

    @needs("ready")
    def test_it_is_ready_afterwards_if_its_policy_is_idle(self, make: Make) -> None:
        """Since it sleeps at times, its probe must not take it out of the service."""
        handle = make("idle")
        handle.load()
        handle.it.unload()
        assert (True, True) == (handle.idle(), handle.ready())

    @needs("rollback")
    def test_else_it_is_not_ready_until_it_is_loaded(self, make: Make) -> None:
        """Whoever unloads by hand wants no calls."""
        handle = make()
        handle.load()
        handle.it.unload()
        assert not handle.ready()
        handle.it.load()
        assert handle.ready()

    def test_it_does_not_block_an_event_loop(self, make: Make) -> None:
        """The error names the twin that does not."""
        handle = make()
        handle.load()
        with pytest.raises(WouldDeadlock, match=r"await .*aunload"):
            handle.on_loop(handle.it.unload)
        assert handle.copies == handle.alive()

    @needs("in process")
    def test_inside_a_call_it_would_wait_for_its_caller(self, make: Make) -> None:
        """So it is refused, and the call goes on."""
        handle = make()
        with pytest.raises(WouldDeadlock):
            handle.inside(handle.it.unload)
        assert 1 == handle.call()


class TestIdle:
    def test_a_model_that_nobody_uses_is_released(self, make: Make) -> None:
        """Until the next call, which loads it; the state says so."""
        handle = make("idle")
        before = handle.load()
        handle.pass_time()
        handle.until(lambda: handle.idle() and handle.alive() == 0, "idleness")
        assert before < handle.call()

    def test_a_call_that_runs_is_use(self, make: Make) -> None:
        """However long it takes."""
        handle = make("idle")
        handle.call()
        with handle.busy() as running:
            handle.pass_time()
            assert 1 == handle.alive()
            assert 1 == running.end()

    @needs("ready")
    def test_it_is_ready_while_it_is_idle(self, make: Make) -> None:
        """Else no load balancer would send the call that wakes it."""
        handle = make("idle")
        handle.load()
        handle.pass_time()
        handle.until(handle.idle, "idleness")
        assert handle.ready()

    def test_a_pause_holds_it_back(self, make: Make) -> None:
        """It is a policy like the others."""
        handle = make("idle")
        handle.load()
        handle.it.pause()
        handle.pass_time()
        assert handle.copies == handle.alive()
        handle.it.resume()
        handle.pass_time()
        handle.until(lambda: handle.alive() == 0, "idleness")


class TestPause:
    def test_no_policy_replaces_a_model(self, make: Make) -> None:
        """However long it is due, also if the pause came before the first load; ``resume()`` ends that."""
        handle = make("due")
        handle.it.pause()
        before = handle.load()
        assert handle.paused()
        for _ in range(2):
            handle.pass_time()
            assert handle.call() <= before
        handle.it.resume()
        assert not handle.paused()
        handle.pass_time()
        handle.until(lambda: handle.call() > before, "the next model")

    @needs("postponed")
    def test_the_status_says_what_waits(self, make: Make) -> None:
        """Which policy is due, and that it waits for the end of the pause."""
        handle = make("due")
        handle.load()
        handle.it.pause()
        handle.pass_time()
        handle.until(handle.postponed, "it is due")
        waiting = handle.postponed()[0]
        assert ("paused", None, ["ttl"]) == (waiting.cause, waiting.seconds, [one.kind for one in waiting.reasons])
        handle.it.resume()
        handle.pass_time()
        handle.until(lambda: not handle.postponed(), "the next model")

    def test_what_is_asked_for_goes_on(self, make: Make) -> None:
        """Calls and the loads that they need, ``reload()`` and ``unload()``; the pause stays."""
        handle = make("due")
        handle.it.pause()
        first = handle.call()
        handle.it.reload()
        second = handle.call()
        handle.it.unload()
        assert first < second < handle.call()
        assert handle.paused()

    def test_twice_is_once(self, make: Make, seen: list[telemetry.Event]) -> None:
        """It is no counter, and each change is one event of each model."""
        handle = make()
        for verb in ("resume", "pause", "pause", "resume", "resume"):
            getattr(handle.it, verb)()
        told = [type(one) for one in seen if isinstance(one, telemetry.GuardPaused | telemetry.GuardResumed)]
        assert [telemetry.GuardPaused] * handle.copies + [telemetry.GuardResumed] * handle.copies == told
        assert not handle.paused()


@needs("rollback")
class TestRollback:
    @staticmethod
    def reloaded(make: Make) -> Handle:
        handle = make("kept")
        handle.load()
        handle.it.reload()
        return handle

    def test_the_next_call_has_the_previous_model(self, make: Make) -> None:
        """Nothing is loaded, the other model is gone, and the status says that this one was chosen."""
        handle = self.reloaded(make)
        loads = handle.loader.calls
        assert [(2, 1)] * handle.copies == [(one.generation, one.previous) for one in handle.statuses()]
        handle.it.rollback()
        assert handle.call() <= handle.copies
        assert [(1, 0, True)] * handle.copies == [
            (one.generation, one.previous, one.pinned) for one in handle.statuses()
        ]
        assert loads == handle.loader.calls
        handle.until(lambda: handle.alive() == handle.copies, "the end of the other model")

    def test_it_waits_for_nothing(self, make: Make) -> None:
        """So it may be called on an event loop, and while a call runs on the model that is left."""
        handle = self.reloaded(make)
        with handle.busy() as running:
            handle.on_loop(handle.it.rollback)
            assert running.end() > handle.copies
        assert handle.call() <= handle.copies

    @needs("in process")
    def test_a_call_may_ask_for_it(self, make: Make) -> None:
        """It runs to its end on the model that is left."""
        handle = self.reloaded(make)
        assert handle.inside(handle.it.rollback) > handle.copies
        handle.until(lambda: handle.alive() <= 2 * handle.copies - 1, "the end of what is left")

    def test_it_stays_until_a_reload(self, make: Make) -> None:
        """No policy replaces what came back, since it would load what is bad."""
        handle = self.reloaded(make)
        handle.it.rollback()
        loads = handle.loader.calls
        handle.pass_time()
        assert (True, loads) == (handle.call() <= handle.copies, handle.loader.calls)
        handle.it.reload()
        assert handle.call() > loads
        assert {False} == {one.pinned for one in handle.statuses()}

    def test_there_is_one_way_back(self, make: Make) -> None:
        """Another one is a clear error, which changes nothing."""
        handle = self.reloaded(make)
        handle.it.rollback()
        loads = handle.loader.calls
        with pytest.raises(NoPreviousModel, match="handle"):
            handle.it.rollback()
        assert (True, loads) == (handle.call() <= handle.copies, handle.loader.calls)

    @pytest.mark.parametrize("variant", ["plain", "kept"])
    def test_where_none_is_kept_there_is_no_way_back(self, make: Make, variant: Variant) -> None:
        """Without ``keep_previous``, and before the first reload: the same clear error."""
        handle = make(variant)
        for _ in range(2):
            with pytest.raises(NoPreviousModel, match="handle"):
                handle.it.rollback()
            handle.load()
        assert handle.call() <= handle.copies

    def test_what_is_kept_goes_with_the_current_model(self, make: Make) -> None:
        """``unload()`` releases both."""
        handle = self.reloaded(make)
        assert 2 * handle.copies == handle.alive()
        handle.it.unload()
        assert 0 == handle.alive()
        with pytest.raises(NoPreviousModel):
            handle.it.rollback()

    def test_a_load_under_way_is_cancelled(self, make: Make) -> None:
        """Who waits for it is told so, and its model takes no call."""
        handle = self.reloaded(make)
        handle.loader.hold()
        reload = spawn(handle.it.reload)
        handle.loader.reached()
        handle.it.rollback()
        handle.loader.let_go()
        error = reload.exception(TIMEOUT)
        assert isinstance(error, LoadFailed)
        assert "rollback" in error.reason
        assert handle.call() <= handle.copies


class TestClose:
    @both
    @pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "never loaded"])
    def test_every_use_is_refused(self, make: Make, how: How, loaded: bool) -> None:  # noqa: FBT001 - of the test
        """With ``GuardClosed``, which names the handle, by every way to call and every verb; nothing is loaded."""
        handle = make("kept")
        if loaded:
            handle.load()
        before = handle.loader.calls
        handle.do("close", how)
        handle.gone()
        assert {"closed"} == handle.states()
        for use in (*handle.doors().values(), *handle.verbs()):
            with pytest.raises(GuardClosed, match="is closed") as refused:
                use()
            assert "handle" in refused.value.guard
        assert before == handle.loader.calls

    @needs("ready")
    def test_it_is_not_ready(self, make: Make) -> None:
        """Whatever its policy."""
        handle = make("idle")
        handle.load()
        handle.it.close()
        assert not handle.ready()

    @both
    def test_it_waits_for_calls(self, make: Make, how: How) -> None:
        """They run to their end on their model."""
        handle = make()
        handle.load()
        with handle.busy() as running:
            closing = spawn(handle.do, "close", how)
            handle.until(handle.closed, "the beginning of its end")
            assert not closing.done()
            assert running.end() <= handle.copies
            closing.result(TIMEOUT)
        handle.gone()
        assert handle.refuses()

    @needs("closes at once")
    def test_it_refuses_new_calls_while_it_waits(self, make: Make) -> None:
        """From its beginning."""
        handle = make()
        handle.load()
        with handle.busy():
            spawn(handle.it.close)
            handle.until(handle.closed, "the beginning of its end")
            assert handle.refuses()

    @needs("close timeout")
    @both
    @pytest.mark.parametrize("timeout", [0, "50ms"])
    def test_it_waits_no_longer_than_it_may(
        self, make: Make, how: How, timeout: Any, seen: list[telemetry.Event]
    ) -> None:
        """Calls that take longer end as usual, an event counts them, and the last of them releases the model."""
        handle = make()
        handle.load()
        with handle.busy() as running:
            handle.do("close", how, timeout=timeout)
            assert (True, False) == (handle.refuses(), running.answer.done())
            assert [1] == [event.in_flight for event in seen if isinstance(event, telemetry.GenerationAbandoned)]
            assert running.end() <= handle.copies
        handle.until(lambda: handle.alive() == 0, "the end of the model")

    @both
    def test_twice_is_once(self, make: Make, how: How) -> None:
        """Its models are unloaded by the first."""
        handle = make()
        before = handle.load()
        for _ in range(2):
            handle.do("close", how)
        assert {"closed"} == handle.states()
        handle.until(lambda: list(range(1, before + 1)) == sorted(handle.unloaded()), "one unload of each")

    @needs("in process")
    def test_who_waits_for_a_load_is_told(self, make: Make) -> None:
        """With ``GuardClosed``, and the model that comes too late is dropped."""
        handle = make()
        handle.loader.hold()
        calls = [spawn(handle.call), spawn(lambda: asyncio.run(handle.acall()))]
        handle.loader.reached()
        closing = spawn(handle.it.close)
        handle.until(handle.closed, "the beginning of its end")
        handle.loader.let_go()
        assert {GuardClosed} == {type(call.exception(TIMEOUT)) for call in calls}
        closing.result(TIMEOUT)
        handle.until(lambda: handle.alive() == 0, "the end of the model")

    def test_it_does_not_block_an_event_loop(self, make: Make) -> None:
        """The error names the twin that does not, and it stays open."""
        handle = make()
        handle.load()
        with pytest.raises(WouldDeadlock, match=r"await .*aclose"):
            handle.on_loop(handle.it.close)
        assert handle.call() <= handle.copies

    @needs("in process")
    def test_inside_a_call_it_would_wait_for_its_caller(self, make: Make) -> None:
        """So it is refused, and it stays open."""
        handle = make()
        with pytest.raises(WouldDeadlock):
            handle.inside(handle.it.close)
        assert 1 == handle.call()

    @needs("in process")
    def test_each_model_is_unloaded_once(self, make: Make) -> None:
        """The hook gets each that was loaded."""
        handle = make("kept")
        handle.load()
        handle.it.reload()
        handle.call()
        handle.it.close()
        handle.until(lambda: handle.alive() == 0, "the end of all models")
        assert list(range(1, handle.loader.calls + 1)) == sorted(handle.unloaded())


class TestReopening:
    @both
    def test_entering_opens_and_the_exit_closes(self, make: Make, how: How) -> None:
        """As often as an application is started in one process."""
        handle = make()
        before = 0
        for _ in range(2):
            with handle.entered(how):
                number = handle.call()
                assert before < number
            before = handle.loader.calls
            handle.gone()
            assert handle.refuses()

    @needs("load")
    @both
    def test_entering_loads(self, make: Make, how: How) -> None:
        """So no request waits for it."""
        handle = make()
        with handle.entered(how):
            assert (handle.copies, True) == (handle.loader.calls, handle.ready())

    @both
    def test_the_last_exit_closes(self, make: Make, how: How) -> None:
        """Where an application and one that is mounted in it enter it both."""
        handle = make()
        with handle.entered(how):
            with handle.entered(how):
                handle.call()
            handle.call()
            assert handle.loader.calls <= handle.copies
        assert handle.refuses()

    def test_an_explicit_close_closes_at_once(self, make: Make) -> None:
        """However many have entered."""
        handle = make()
        with handle.it, handle.it:
            handle.it.close()
            assert handle.refuses()

    @needs("load")
    def test_an_entry_that_fails_does_not_count(self, make: Make) -> None:
        """Nobody leaves it, so the next exit closes."""
        handle = make()
        handle.loader.fail(None)
        with pytest.raises(LoadFailed), handle.it:
            pass
        handle.loader.fail(0)
        handle.it.reload()
        with handle.it:
            handle.call()
        assert handle.refuses()

    @needs("in process")
    def test_what_has_failed_before_is_forgotten(self, make: Make) -> None:
        """An application that is started again tries at once, whatever was to be waited for when it was closed."""
        handle = make()
        handle.loader.fail(None)
        with pytest.raises(LoadFailed):
            handle.call()
        handle.it.close()
        handle.loader.fail(0)
        with handle.it:
            handle.call()

    def test_a_pause_outlasts_it(self, make: Make) -> None:
        """Only ``resume()`` ends it."""
        handle = make()
        handle.it.pause()
        handle.it.close()
        with handle.it:
            assert handle.paused()
            handle.it.resume()
            assert not handle.paused()


class TestStatus:
    def test_it_is_a_value(self, make: Make) -> None:
        """It cannot be changed, does not change by itself, and is plain values for a status route."""
        handle = make()
        before = handle.statuses()
        text = repr(before)
        handle.load()
        assert text == repr(before) != repr(handle.statuses())
        for one in before:
            with pytest.raises(dataclasses.FrozenInstanceError):
                one.paused = True
            assert one.name == dataclasses.asdict(one)["name"]
            assert "handle" in one.name

    def test_calls_that_run_are_counted(self, make: Make) -> None:
        """And no longer when they have ended."""
        handle = make()
        handle.load()
        with handle.busy() as running:
            handle.until(lambda: handle.in_flight() == 1, "the call is counted")
            running.end()
        handle.until(lambda: handle.in_flight() == 0, "its end is counted")

    @needs("state")
    def test_each_state_of_its_life_has_a_word(self, make: Make) -> None:
        """New, loading, ready, reloading, idle, closed; ``degraded`` and ``failed`` come with loads that fail."""
        handle = make()
        assert {"new"} == handle.states()
        handle.loader.hold()
        load = spawn(handle.it.load)
        handle.loader.reached()
        assert "loading" in handle.states()
        handle.loader.let_go()
        load.result(TIMEOUT)
        handle.until(lambda: handle.states() == {"ready"}, "readiness")
        handle.loader.hold()
        reload = spawn(handle.it.reload)
        handle.loader.reached()
        assert "reloading" in handle.states()
        handle.loader.let_go()
        reload.result(TIMEOUT)  # of all replicas: the first one is ready before the next is reloaded
        handle.until(lambda: handle.states() == {"ready"}, "readiness")
        handle.it.unload()
        assert {"idle"} == handle.states()
        handle.it.close()
        assert {"closed"} == handle.states()

    def test_its_name_is_shown(self, make: Make) -> None:
        """By ``repr``, and as an attribute."""
        handle = make()
        assert handle.it.name in repr(handle.it)
        assert "handle" in handle.it.name

    @needs("in process")
    def test_it_cannot_be_pickled(self, make: Make) -> None:
        """Another process makes its own."""
        with pytest.raises(TypeError, match="import the module that makes"):
            pickle.dumps(make().it)


class TestMistakes:
    def test_a_timeout_is_a_duration(self, make: Make) -> None:
        """Each verb that takes one names it, does nothing, and leaves the handle as it was."""
        handle = make()
        before = handle.load()
        for verb, how, timeout in product(handle.bounded(), ("plain", "async"), (-1, "soon", float("nan"), True)):
            with pytest.raises(InvalidOption) as refused:
                handle.do(verb, how, timeout=timeout)
            assert "timeout" == refused.value.argument
        handle.wait(1)
        assert (True, before) == (handle.call() <= handle.copies, handle.loader.calls)

    def test_what_it_does_not_have(self, make: Make, lacking: str) -> None:
        """Is said by a clear error."""
        handle = make()
        handle.load()
        error, text = handle.lacks[lacking]
        with pytest.raises(error, match=text):
            handle.try_lacking(lacking)
        handle.call()
