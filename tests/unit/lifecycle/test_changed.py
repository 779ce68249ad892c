"""``Changed``: a probe that is asked in a thread of its own says when the source of the model has changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from tests.unit.lifecycle.sources import Source, errors, polls
from tests.unit.lifecycle.world import TIMEOUT, Loader, World, number, until

from modelguard import TTL, Between, Changed, Idle, ModelGuard, Snapshot, Uses, telemetry
from modelguard.errors import InvalidOption
from modelguard.lifecycle._readings import MOST_HANGING
from modelguard.lifecycle.policies import ProbeAnswers, subset


def probing(world: World, policy: Any, **options: Any) -> ModelGuard[Any]:
    """A loaded guard with that policy."""
    guard = world.guard(reload_on=policy, **{"defer": 0, **options})
    guard.load()
    return guard


def test_a_new_value_replaces_the_model(world: World, source: Source) -> None:
    """Once two polls in a row have returned it, and only once."""
    guard = probing(world, Changed(source))
    assert 1 == polls(world, guard, 3)
    source.value = "b"
    assert 1 == polls(world, guard)
    assert 2 == polls(world, guard)
    assert 2 == polls(world, guard, 5)
    assert (f"Changed({Source.__qualname__})",) == world.reasons(telemetry.ReloadDue)
    assert "changed" == world.last(telemetry.ReloadDue).reasons[0].kind


def test_the_confirmation_comes_after_a_tenth_of_the_interval(world: World, source: Source) -> None:
    """A change is loaded 66 seconds after it happened at the latest, and not after two minutes."""
    guard = probing(world, Changed(source, every="1m"))
    source.value = "b"
    assert 1 == polls(world, guard)
    assert 1 == polls(world, guard, every=5.9)
    assert 2 == polls(world, guard, every=0.2)


def test_it_is_asked_in_threads_of_its_own(world: World, source: Source) -> None:
    """Never in the thread of a call, of the loader or of the policies' check."""
    guard = probing(world, Changed(source) | Uses(3))
    for _ in range(10):
        number(guard)
        guard.check()
    world.join()
    polls(world, guard, 3)
    assert {"modelguard-probe-model"} == set(source.threads)


def test_calls_do_not_ask(world: World, source: Source) -> None:
    """However many calls there are, it is asked once before each load and once in each interval."""
    guard = probing(world, Changed(source))
    for _ in range(100):
        number(guard)
    world.join()
    assert 1 == source.asked
    for _ in range(100):
        guard.check()
        world.join()
    assert 1 == source.asked
    polls(world, guard, 4)
    assert 5 == source.asked


def test_a_probe_may_have_two_policies(world: World, source: Source) -> None:
    """As one that is asked seldom by day and often at night: the first that sees a change replaces the model."""
    often, seldom = Changed(source, every="1m"), Changed(source, every="1h")
    pair = [probing(world, policy) for policy in (often | seldom, seldom | often)]
    source.value = "b"
    assert [2, 2] == [polls(world, guard, 3) for guard in pair]


def test_a_change_while_the_model_loads_is_not_lost(world: World, source: Source) -> None:
    """The value counts that was there before the loader ran, because the loader may have read the older model."""
    world.loader.hold()
    guard = world.guard(reload_on=Changed(source), defer=0)
    loading = world.spawn(guard.load)
    world.loader.reached()
    source.value = "b"
    world.loader.open.set()
    loading.result(TIMEOUT)
    assert 2 == polls(world, guard, 2)
    assert 2 == polls(world, guard, 5)


def test_jitter_spreads_replicas(world: World, source: Source) -> None:
    """Each pause is shortened by a random part of at most ``jitter``."""
    world.draw = 1.0
    probing(world, Changed(source, every=100, jitter=0.2)).check()
    guard = probing(world, Changed(source, every=100, jitter=0.2), name="other")
    source.asked = 0
    polls(world, guard, every=79.9)
    assert 0 == source.asked
    polls(world, guard, every=0.2)
    assert 1 == source.asked


@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_probe_that_raises_is_reported_once_and_recovers(world: World, source: Source, error: BaseException) -> None:
    """It causes no reload, calls go on, and a change is seen when it answers again."""
    guard = probing(world, Changed(source))
    source.error = error
    assert 1 == polls(world, guard, 20)
    assert [f"{type(error).__name__}: {error} (in Changed({Source.__qualname__}))"] == errors(world)
    source.error, source.value = None, "b"
    assert 2 == polls(world, guard, 2)
    assert "ready" == guard.status().state


def test_an_error_is_new_again_after_ten_answers(world: World, source: Source) -> None:
    """A registry that is down every night is reported each time; one that flickers is reported once."""
    guard = probing(world, Changed(source))
    for _ in range(5):
        source.error = OSError("down")
        polls(world, guard)
        source.error = None
        polls(world, guard)
    assert 1 == len(errors(world))
    polls(world, guard, 10)
    source.error = OSError("down")
    polls(world, guard)
    assert 2 == len(errors(world))


def test_a_probe_that_fails_at_the_load_does_not_fail_the_load(world: World, source: Source) -> None:
    """The value at the load is then that of the first answer."""
    source.error = OSError("down")
    guard = probing(world, Changed(source))
    assert ["OSError: down (in Changed(Source))"] == errors(world)
    source.error = None
    assert 1 == polls(world, guard, 5)
    source.value = "b"
    assert 2 == polls(world, guard, 2)


def test_a_failure_at_a_later_load_loses_no_change(world: World, source: Source) -> None:
    """The last value before counts: a model that was loaded in the dark is loaded once more."""
    guard = probing(world, Changed(source))
    polls(world, guard, 3)
    source.error = OSError("down")
    guard.reload()
    world.join()
    source.error, source.value = None, "b"
    assert 3 == polls(world, guard, 3)


def test_a_probe_that_hangs_is_reported_once_and_left_behind(world: World, source: Source) -> None:
    """Calls, checks and loads go on; at most three calls of it hang at a time; when they end, it is asked again."""
    guard = probing(world, Changed(source, timeout="10s"))
    source.open.clear()
    for _ in range(20):
        world.tick(60)
        guard.check()
        assert 1 == number(guard)
    assert 1 + MOST_HANGING == source.asked
    assert ["TimeoutError: no answer within 10 s (in Changed(Source))"] == errors(world)
    guard.reload()
    assert 1 + MOST_HANGING == source.asked
    source.value = "b"
    source.open.set()
    world.join()
    assert 3 == polls(world, guard, 3)


def test_an_answer_that_comes_too_late_does_not_count(world: World, source: Source) -> None:
    """It may be from before a change that has been loaded since."""
    guard = probing(world, Changed(source, timeout="10s"))
    source.open.clear()
    world.tick(60)
    guard.check()  # this call hangs, and will return "a"
    until(lambda: source.asked == 2)
    world.tick(60)
    guard.check()
    source.value = "b"
    source.open.set()
    world.join()
    guard.reload()
    world.join()
    assert 2 == polls(world, guard, 5)


def test_a_probe_that_hangs_delays_a_load_by_its_timeout(world: World, source: Source) -> None:
    """And not longer, however long it hangs."""
    source.open.clear()
    guard = probing(world, Changed(source, timeout="10ms"))
    assert 1 == number(guard)
    assert ["TimeoutError: no answer within 0.01 s (in Changed(Source))"] == errors(world)


def test_drain_first_asks_before_the_outage(world: World, source: Source) -> None:
    """A registry that answers slowly does not make calls wait longer."""
    guard = probing(world, Changed(source), swap="drain_first")
    source.open.clear()
    reload = world.spawn(guard.reload)
    until(lambda: source.asked == 2)
    assert 1 == number(guard)
    source.open.set()
    reload.result(TIMEOUT)
    assert 2 == number(guard)


def test_a_value_that_changes_at_each_poll_causes_no_reload(world: World, source: Source) -> None:
    """A clock, a counter, a random number: it is reported as a policy that cannot help."""
    count = iter(range(10**6))
    guard = probing(world, Changed(lambda: next(count)))
    assert 1 == polls(world, guard, 30)
    assert [1] == [event.generation for event in world.seen(telemetry.PolicyIgnored)]
    assert "no change can be told from noise" in world.last(telemetry.PolicyIgnored).detail


def test_two_servers_that_disagree_cause_no_storm(world: World, source: Source) -> None:
    """Answers that come in turn are never confirmed."""
    answers = iter("ab" * 10**4)
    guard = probing(world, Changed(lambda: next(answers)))
    assert 1 == polls(world, guard, 50)


@pytest.mark.parametrize("answer", [None, [], {}, 0, "", float("nan")])
def test_any_value_but_none_can_be_compared(world: World, source: Source, answer: object) -> None:
    """None is what a function returns that returns nothing."""
    source.value = answer
    guard = probing(world, Changed(source))
    assert 1 == polls(world, guard, 4)
    expected = 0 if answer is not None else 1
    assert expected == len([error for error in errors(world) if "it returned None; return a value" in error])


def test_a_value_that_cannot_be_compared_is_an_error_of_the_probe(world: World, source: Source) -> None:
    """Such as an array, whose comparison is not true or false."""

    class Array:
        def __eq__(self, other: object) -> Any:
            raise ValueError("ambiguous")

        __hash__ = None  # type: ignore[assignment]

    guard = probing(world, Changed(Array))
    assert 1 == polls(world, guard, 5)
    assert ["ValueError: ambiguous (in Changed("] == [error.partition("test_")[0] for error in errors(world)]


def test_an_async_probe_is_awaited(world: World, source: Source) -> None:
    """On a loop of its own, in the probe's thread."""

    async def probe() -> object:
        return source()

    guard = probing(world, Changed(probe))
    source.value = "b"
    assert 2 == polls(world, guard, 2)


def test_it_waits_for_the_night(world: World, source: Source) -> None:
    """``Changed & Between``: a model that changes at noon is loaded at night; one that changes back is not."""
    world.wall = datetime(2026, 1, 10, 12, tzinfo=UTC).timestamp()
    guard = probing(world, Changed(source, every="1h", jitter=0) & Between("02:00", "05:00", tz="UTC"))
    source.value = "b"
    assert 1 == polls(world, guard, 13, every=3600)
    assert 2 == polls(world, guard, 3, every=3600)
    source.value = "c"
    assert 2 == polls(world, guard, 10, every=3600)
    source.value = "b"
    assert 2 == polls(world, guard, 30, every=3600)


def test_an_idle_guard_is_not_asked(world: World, source: Source) -> None:
    """A model that nobody uses has no source to watch; the load that wakes it asks anew."""
    guard = probing(world, Changed(source) | Idle("30s"))
    polls(world, guard, 2)
    assert "idle" == guard.status().state
    asked, source.value = source.asked, "b"
    polls(world, guard, 10)
    assert asked == source.asked
    assert 2 == number(guard)
    world.join()
    assert 2 == polls(world, guard, 1, every=20)


def test_a_closed_guard_is_not_asked(world: World, source: Source) -> None:
    """No thread is left after ``close()``."""
    guard = probing(world, Changed(source))
    polls(world, guard, 2)
    guard.close()
    asked = source.asked
    for _ in range(10):
        world.tick(60)
        guard.check()
    world.join()
    assert asked == source.asked
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "modelguard-probe-model"]


def test_replicas_roll(world: World, source: Source) -> None:
    """Each copy of the model is replaced, one at a time."""
    from modelguard import replicas

    pair = replicas(world.guard(reload_on=Changed(source), defer=0), 2)
    pair.load()
    world.join()
    guards = pair._guards
    source.value = "b"
    for _ in range(6):
        world.tick(60)
        for guard in guards:
            guard.check()
            world.join()
            guard.check()
            world.join()
    assert [2, 2] == [status.generation for status in pair.status()]
    pair.close()


def test_who_shares_a_model_decides_as_for_modified() -> None:
    """It asks for new weights: the process that loaded the model decides, and forked workers leave it alone."""
    policy = Changed(max) | Uses(5)
    assert ["Changed(max)", "Uses(5)"] == [repr(subset(policy, renews=renews)) for renews in (True, False)]


def test_children_that_share_a_model_do_not_ask(world: World, source: Source) -> None:
    """Only the process that loaded it does."""
    guard = probing(world, Changed(source))
    guard.recycle_in_children(lambda reasons: None)
    asked = source.asked
    guard.engine.after_fork_in_child()
    polls(world, guard, 3)
    assert asked == source.asked


def test_a_child_asks_for_itself(world: World, source: Source) -> None:
    """After a plain fork, at its own pace, and it knows the value at its parent's load."""
    guard = probing(world, Changed(source))
    source.open.clear()
    world.tick(60)
    guard.check()  # a thread that the child does not have
    until(lambda: source.asked == 2)
    guard.engine.after_fork_in_child()
    source.value = "b"
    source.open.set()
    assert 2 == polls(world, guard, 3)


def test_a_runtime_without_probes_asks_none(world: World, source: Source) -> None:
    """In a mold, whose owner asks."""
    guard = world.guard(reload_on=Changed(source), system=replace(world.system, probes=False))
    guard.load()
    polls(world, guard, 3)
    assert 0 == source.asked


def test_no_thread_is_no_answer(world: World, source: Source) -> None:
    """Where the system gives no thread, the model stays, and the next poll tries again."""
    guard = probing(world, Changed(source))
    real = guard.engine.system

    def refuse(work: Callable[[], None], name: str) -> None:
        raise RuntimeError("can't start new thread")

    guard.engine.system = replace(real, start_once=refuse)
    assert 1 == polls(world, guard, 3)
    assert ["RuntimeError: can't start new thread (in Changed(Source))"] == errors(world)
    guard.engine.system = real
    source.value = "b"
    assert 2 == polls(world, guard, 2)


def test_a_policy_is_tested_by_a_snapshot(source: Source) -> None:
    """Without a guard, a clock or a thread."""
    policy = Changed(source)
    assert not policy.due(Snapshot())
    assert policy.due(Snapshot(probes={source: ProbeAnswers(changed=True)}))
    assert None is policy.ignored_because(Snapshot(probes={source: ProbeAnswers(changed=False)}))


def test_policies_with_the_same_probe_are_equal(source: Source) -> None:
    """As values are; another interval makes another policy."""
    assert Changed(source) == Changed(source, every="60s")
    assert Changed(source) != Changed(source, every="61s")
    assert 1 == len({Changed(source), Changed(source, "1m", jitter=0.1, timeout=10)})


@pytest.mark.parametrize(
    ("probe", "name"),
    [(len, "len"), (partial(partial(max, 1), 2), "max"), (Source(), "Source"), (Source().__call__, "Source.__call__")],
)
def test_events_name_the_probe(probe: Any, name: str) -> None:
    """Whatever kind of callable it is."""
    assert f"Changed({name})" == repr(Changed(probe))


def generator() -> Any:
    """Yields instead of returning."""
    yield "etag"


@dataclass
class Unhashable:
    """A dataclass has no hash, unless it is frozen."""

    def __call__(self) -> str:
        return "etag"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Changed("etag"), r"probe='etag': must be a function, not a str. Pass the function itself"),  # type: ignore[arg-type]
        (lambda: Changed(generator), r"is a generator function.*Return the value"),
        (lambda: Changed(Unhashable()), r"cannot be hashed.*Changed\(probe.__call__\)"),
        (lambda: Changed(len, every=0), r"every=0"),
        (lambda: Changed(len, timeout="10"), r"timeout='10'.*has no unit"),
        (lambda: Changed(len, timeout=None), r"timeout=None"),  # type: ignore[arg-type]
        (lambda: Changed(len, jitter=2), r"jitter=2: must be a number of at least 0 and at most 1"),
    ],
)
def test_bad_input_is_rejected_at_the_definition(make: Callable[[], object], says: str) -> None:
    """The message names the argument and the fix."""
    with pytest.raises(InvalidOption, match=says):
        make()


def test_a_probe_with_arguments_is_rejected_by_the_guard(world: World) -> None:
    """A pool's probe takes the key; a guard has none."""
    with pytest.raises(InvalidOption, match=r"probe=.*: is called as a function without arguments"):
        world.guard(reload_on=TTL("1h") | Changed(lambda key: key))


def test_loads_and_polls_at_once_stay_consistent(world: World, source: Source) -> None:
    """Reloads, polls, changes and failures from several threads: in the end the newest value is loaded."""
    loaded: list[object] = []
    loader = Loader(world)

    def load() -> Any:
        loaded.append(source.value)
        return loader()

    guard = world.guard(load, reload_on=Changed(source), defer=0)
    guard.load()
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            world.tick(60)
            guard.check()

    threads = [threading.Thread(target=disturb) for _ in range(3)]
    for thread in threads:
        thread.start()
    for value in range(200):
        source.error = OSError("down") if value % 7 == 0 else None
        source.value = value
        if value % 20 == 0:
            guard.reload()
    source.error, source.value = None, "last"
    until(lambda: loaded[-1] == "last")
    over.set()
    for thread in threads:
        thread.join(TIMEOUT)
    world.join()
    assert "ready" == guard.status().state
