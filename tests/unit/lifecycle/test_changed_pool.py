"""``pool(reload_on=Changed(probe))``: the probe takes the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.lifecycle.world import outcome

from modelguard import TTL, Changed, Uses, telemetry
from modelguard.errors import InvalidOption, Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.lifecycle.sources import Source
    from tests.unit.lifecycle.world import World


def test_a_key_whose_source_has_changed_is_loaded_anew(world: World) -> None:
    """At its next use, and only that key."""
    values = {"x": 1, "y": 1}
    pool = world.pool(reload_on=Changed(values.__getitem__))
    assert [1, 2] == [use(pool, key) for key in ("x", "y")]
    values["x"] = 2
    assert [1, 2] == [use(pool, key) for key in ("x", "y")]
    polls(world, pool, 2)
    assert [3, 2] == [use(pool, key) for key in ("x", "y")]
    assert [3, 2] == [use(pool, key) for key in ("x", "y")]
    assert (3, 1) == (pool.status().loads, pool.status().evictions)


def test_a_call_keeps_its_model(world: World) -> None:
    """The model is released when its last lease ends."""
    values = {"x": 1}
    pool = world.pool(reload_on=Changed(values.__getitem__))
    with pool.lease("x") as model:
        values["x"] = 2
        polls(world, pool, 2)
        assert not model.unloaded
        assert 1 == model.number
    assert 2 == use(pool, "x")


def test_a_loop_over_a_generator_may_call_its_pool(world: World) -> None:
    """Between two steps its calls run on the generator's model, for up to half of ``wait_timeout`` after the change."""
    values = {"x": 1}
    pool = world.pool(reload_on=Changed(values.__getitem__), wait_timeout=0.2)

    @pool(key="key")
    def numbers(model: Any, key: str) -> Iterator[int]:
        for _ in range(2):
            yield model.number

    steps = numbers("x")
    next(steps)
    values["x"] = 2
    polls(world, pool, 2)
    assert 1 == use(pool, "x")
    world.tick(1)
    with pytest.raises(Overloaded):
        use(pool, "x")
    assert [1] == list(steps)
    assert 2 == use(pool, "x")


def test_only_loaded_keys_are_asked(world: World) -> None:
    """A key without a model has nothing to compare; its next load asks anew."""
    asked: list[str] = []
    pool = world.pool(reload_on=Changed(asked.append), max_models=1)
    use(pool, "x")
    use(pool, "y")
    asked.clear()
    polls(world, pool, 3)
    assert {"y"} == set(asked)


def test_a_probe_that_fails_is_reported_with_its_key(world: World, source: Source) -> None:
    """Once for each key, and the model stays."""
    source.error = OSError("down")
    pool = world.pool(reload_on=Changed(lambda key: source()))
    use(pool, "x")
    polls(world, pool, 5)
    assert 1 == use(pool, "x")
    assert ["pool['x']"] == [event.guard for event in world.seen(telemetry.CallbackErrored)]


def test_a_flapping_key_settles(world: World) -> None:
    """What is known of a key's probe outlives its models, so reloads become rarer."""
    answers = iter("aabb" * 10**4)
    pool = world.pool(reload_on=Changed(lambda key: next(answers)))
    for _ in range(200):
        use(pool, "x")
        polls(world, pool, 1)
    assert pool.status().loads <= 5


def test_after_a_fork_the_child_asks(world: World) -> None:
    """With the values at its parent's loads."""
    values = {"x": 1}
    pool = world.pool(reload_on=Changed(values.__getitem__))
    use(pool, "x")
    pool._engine.after_fork_in_child()
    values["x"] = 2
    polls(world, pool, 2)
    assert 2 == use(pool, "x")


def test_a_child_asks_the_probe_of_a_model_that_was_evicted(world: World) -> None:
    """A thread of the parent may have been about to note its answer, and does not exist in the child."""
    pool = world.pool(reload_on=Changed({"x": 1, "y": 1}.__getitem__), max_models=1)
    assert [1, 2] == [use(pool, key) for key in ("x", "y")]
    probe = pool._engine._known["x"].probe
    outcome(world.spawn(probe._lock.acquire))  # type: ignore[union-attr]
    pool._engine.after_fork_in_child()
    assert 3 == outcome(world.spawn(use, pool, "x"))


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (Uses(5), r"reload_on=Uses\(5\): must be TTL, Idle, Changed or None, not a Uses.*each once"),
        (Changed(lambda key: key) | Uses(5), r"must be TTL, Idle, Changed or None"),
        (TTL("1h") | TTL("2h"), r"has TTL twice"),
        (type("Own", (TTL,), {})("1h"), r"must be TTL, Idle, Changed or None"),
        (Changed(lambda: 1), r"probe=.*: is called as a function of one argument.*It gets the key"),
    ],
)
def test_other_policies_are_rejected(world: World, policy: Any, says: str) -> None:
    """The message says which policy a pool takes."""
    with pytest.raises(InvalidOption, match=says):
        world.pool(reload_on=policy)


def use(pool: Any, key: str) -> int:
    with pool.lease(key) as model:
        return int(model.number)


def polls(world: World, pool: Any, count: int) -> None:
    for _ in range(count):
        world.tick(60)
        pool._engine.tick()
        world.join()
