"""``Loaded``: a loader that says which version its model is, and where that version shows."""

from __future__ import annotations

import enum
import json
import logging
import os
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World, run, until

from modelguard import Loaded, telemetry
from modelguard.errors import InvalidOption, ModelRejected
from modelguard.facts._proc import ShownVersion, maps, versions_in
from modelguard.frameworks._web import Web
from modelguard.runtime import call_context

linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no /proc")


def versioned(world: World, load: Any = None) -> Any:
    """A loader of that world whose models have the versions v1, v2 and so on."""

    def loader(*key: Any) -> Loaded[Any]:
        model = world.loader.load(*key) if key else (load or world.loader)()
        return Loaded(model, version=f"v{model.number}")

    return loader


def test_callers_get_the_model_and_status_the_version(world: World) -> None:
    """Every hook and call gets the model itself; ``status()`` and ``version`` say which one it is."""
    seen = []
    guard = world.guard(versioned(world), validate=seen.append, warmup=seen.append, unload=seen.append, name="nlp")
    assert (None, None) == (guard.version, guard.status().version)
    guard.load()
    assert ("v1", "v1") == (guard.version, guard.status().version)
    guard.reload()
    world.join()
    assert "v2" == guard.status().version
    with guard.lease() as model:
        assert 2 == model.number
    guard.close()
    assert [1, 1, 2, 2, 1, 2] == [model.number for model in seen]
    assert None is guard.version


def test_names_and_versions_of_an_enum_are_its_values(world: World) -> None:
    """The same text in logs, labels and JSON."""

    class Word(str, enum.Enum):  # noqa: UP042 - each way to write it gives another text
        NLP = "nlp"
        FIRST = "v1"

    guard = world.guard(lambda: Loaded(world.loader(), version=Word.FIRST), name=Word.NLP)
    guard.load()
    event = world.last(telemetry.LoadFinished)
    assert ("nlp", "v1") == (f"{guard.name}", f"{guard.version}")
    assert {str} == set(map(type, (guard.name, guard.version, event.guard, event.version)))


def test_an_async_loader_may_return_it(world: World) -> None:
    """As it may return the model alone."""

    async def load() -> Loaded[Any]:
        return Loaded(world.loader(), version="async")

    guard = world.guard(load)
    guard.load()
    assert "async" == guard.status().version


def test_without_it_there_is_no_version(world: World) -> None:
    """A loader that changes its mind is taken at its word each time."""
    guard = world.guard(lambda: Loaded(object(), version="first") if world.loader().number == 1 else object())
    guard.load()
    guard.reload()
    world.join()
    assert None is guard.status().version
    assert ["first", None] == [event.version for event in world.seen(telemetry.LoadFinished)]


def test_events_say_which_version_came_and_which_went(world: World) -> None:
    """Also the one that was rejected, and the one whose calls outlasted the drain."""
    rejected = {3}
    guard = world.guard(versioned(world), validate=lambda model: model.number not in rejected, drain_timeout=0)
    guard.load()
    with guard.lease():
        guard.reload(wait=False)
        until(lambda: bool(world.seen(telemetry.GenerationAbandoned)))
    with pytest.raises(ModelRejected):
        guard.reload()
    world.join()
    assert ["v1", "v2"] == [event.version for event in world.seen(telemetry.LoadFinished)]
    assert "v3" == world.last(telemetry.LoadDiscarded).version
    assert "v1" == world.last(telemetry.GenerationAbandoned).version
    assert "v1" == world.last(telemetry.GenerationReleased).version


def test_log_lines_name_it(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever reads the log sees which model came and which one went."""
    caplog.set_level(logging.INFO, logger="modelguard")
    world.model_size = 5 * MB
    guard = world.guard(versioned(world))
    guard.load()
    guard.reload()
    world.join()
    lines = [telemetry.describe(event) for event in world.events]
    assert any(line.startswith("generation 2 (version v2) is ready after") for line in lines)
    assert any(line.startswith("generation 1 (version v1) released") for line in lines)


def test_the_readiness_probe_shows_versions(world: World) -> None:
    """A rollout is seen from outside; a guard without a version adds nothing to the body."""
    first, second, plain = (world.guard(versioned(world), name=name) for name in ("a", "b", "c"))
    guards = [first, second, world.guard(name="d")]
    for guard in [*guards, plain]:
        guard.load()
    answer = Web(guards=guards).probe("GET", "/readyz")
    assert answer is not None
    assert {"status": "ready", "versions": {"a": "v1", "b": "v2"}} == json.loads(answer.body)
    answer = Web(guards=guards[2:]).probe("GET", "/readyz")
    assert answer is not None
    assert {"status": "ready"} == json.loads(answer.body)


def test_a_pool_has_a_version_for_each_key(world: World) -> None:
    """Keys whose loader gives none are left out."""
    pool = world.pool(lambda key: versioned(world)(key) if key != "plain" else world.loader.load(key))
    for key in ("x", "plain", "y"):
        with pool.lease(key):
            pass
    assert {"x": "v1", "y": "v3"} == pool.status().versions


@linux
def test_other_processes_can_read_it(world: World) -> None:
    """``modelguard top`` reads it from ``/proc``: one version for each guard, gone when its model is gone."""

    def shown() -> str | None:
        return versions_in(maps()).get(f"other-{os.getpid()}")

    guard = world.guard(versioned(world), name=f"other-{os.getpid()}")
    guard.load()
    assert "v1" == shown()
    guard.reload()
    world.join()
    assert "v2" == shown()
    guard.unload()
    assert None is shown()
    guard.load()
    guard.close()
    assert None is shown()


@linux
@pytest.mark.parametrize("version", ["v=1 ü", "v" * 128])
@pytest.mark.parametrize("name", ["a=b", "two\nlines", "名" * 80, "名" * 100, "x" * 230, "x" * 300])
def test_odd_names_do_no_harm(name: str, version: str) -> None:
    """Whatever the guard is called, its version is whole; a long name is cut for it."""
    own = ShownVersion(name)
    before = versions_in(maps())
    own.show(version)
    shown = {guard: version for guard, version in versions_in(maps()).items() if guard not in before}
    assert [version] == [*shown.values()]
    (guard,) = shown
    assert name.replace("=", "-").replace("\n", " ").startswith(guard.removesuffix("…"))
    own.show(None)
    assert before == versions_in(maps())


def test_inline_guards_have_it_too(world: World) -> None:
    """In tests that run inline the function still gets the model."""
    guard = world.guard(versioned(world))

    @guard
    def words(model: Any, text: str) -> list[str]:
        return list(model.words(text))

    with call_context.inline():
        assert ["a"] == run(words("a"))
        assert "v1" == guard.version


@pytest.mark.parametrize("version", ["", "  ", None, 3, b"v1", 1.5, "x" * 129, "two\nlines", "\x00", ["v1"]])
def test_a_version_that_is_not_a_short_text_is_rejected(version: Any) -> None:
    """It becomes a label of a metric and a part of a log line."""
    with pytest.raises(InvalidOption, match=r"^version="):
        Loaded(object(), version=version)


def test_a_number_as_version_shows_the_fix() -> None:
    """A registry counts its versions: the message shows how to write them."""
    with pytest.raises(InvalidOption, match=r"version=3: must be text, not an int. Write version='3'\."):
        Loaded(object(), version=3)  # type: ignore[arg-type]


def test_one_inside_another_is_rejected() -> None:
    """There would be two versions of one model."""
    with pytest.raises(InvalidOption, match="is a Loaded itself"):
        Loaded(Loaded(object(), version="a"), version="b")


def test_a_version_without_a_model_is_no_model(world: World) -> None:
    """``Loaded(None, ...)`` fails as a loader that returns None does."""
    with pytest.raises(ModelRejected, match="the loader returned None"):
        world.guard(lambda: Loaded(None, version="v1")).load()


def test_the_same_model_with_a_new_version_is_rejected(world: World) -> None:
    """A cache in the loader is found though each ``Loaded`` is new."""
    model = world.loader()
    guard = world.guard(lambda: Loaded(model, version="v1"))
    guard.load()
    with pytest.raises(ModelRejected, match="has returned before"):
        guard.reload()


def test_an_adapter_sees_the_model(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and gauges are those of the model inside."""
    from modelguard.lifecycle import _models

    seen = []
    find = _models.find
    monkeypatch.setattr(_models, "find", lambda model: (seen.append(type(model)), find(model))[1])
    guard = world.guard(versioned(world))
    guard.load()
    guard.close()
    assert Loaded not in seen
