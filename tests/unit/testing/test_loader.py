"""``modelguard_loader``: counts, delays, failures, and live models."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from modelguard import guard
from modelguard.errors import InvalidOption, LoadFailed
from modelguard.testing import Clock, Loader, Model


def test_models_are_numbered_and_counted(modelguard_loader: Loader) -> None:
    """Each load makes a model with the next number."""
    assert [1, 2] == [modelguard_loader().number, modelguard_loader().number]
    assert 2 == modelguard_loader.calls


def test_the_living_are_known(modelguard_loader: Loader) -> None:
    """A model counts as alive until nothing refers to it, and garbage in circles does not count."""
    kept = modelguard_loader()
    circle = modelguard_loader()
    circle.me = circle
    gc.disable()
    try:
        del circle
        assert 1 == modelguard_loader.alive
    finally:
        gc.enable()
    del kept
    assert 0 == modelguard_loader.alive


def test_a_leak_of_models_is_seen(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """Code that keeps models beyond their reload is found by counting live models."""
    nlp = guard(modelguard_loader, reload_on=None)
    hoard = []
    for _ in range(3):
        with nlp.lease() as model:
            hoard.append(model)
        del model
        nlp.reload()
    modelguard_clock.settle()
    assert 4 == modelguard_loader.alive
    hoard.clear()
    assert 1 == modelguard_loader.alive


def test_it_fails_as_often_as_it_is_told(modelguard_loader: Loader) -> None:
    """So many loads fail with the error that was given, and the next one works."""
    modelguard_loader.fail(2, error=ValueError("torn file"))
    for _ in range(2):
        with pytest.raises(ValueError, match="torn file"):
            modelguard_loader()
    assert 3 == modelguard_loader().number


def test_it_fails_until_it_is_mended(modelguard_loader: Loader) -> None:
    """None means every load, until the test says otherwise."""
    modelguard_loader.fail(None)
    for _ in range(5):
        with pytest.raises(OSError, match=r"modelguard_loader fails because of fail\(\)"):
            modelguard_loader()
    modelguard_loader.fail(0)
    modelguard_loader()


def test_a_delay_passes_on_the_clock(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """With modelguard_clock a load of ten minutes takes ten minutes of that clock and no time."""
    modelguard_loader.delay = "10m"
    before = modelguard_clock.now
    modelguard_loader()
    assert 600 == modelguard_clock.now - before == modelguard_loader.delay


def test_a_delay_passes_on_the_clock_that_is_asked_for_later(
    request: pytest.FixtureRequest, modelguard_loader: Loader
) -> None:
    """The order in which a test asks for the two makes no difference."""
    modelguard_loader.delay = "10m"
    clock: Clock = request.getfixturevalue("modelguard_clock")
    before = clock.now
    modelguard_loader()
    assert 600 == clock.now - before


def test_a_loader_of_ones_own_is_tracked(modelguard_loader: Loader) -> None:
    """A real loader is counted, failed and tracked like the plain one, and gets its key."""
    load = modelguard_loader.of(lambda key: Model(7, key))
    model = load("anna")
    assert (7, "anna", 1, 1) == (model.number, model.key, load.calls, load.alive)
    assert 0 == modelguard_loader.calls


def test_what_cannot_be_tracked_is_refused(modelguard_loader: Loader) -> None:
    """A dict has no weak references, so nothing could tell that it is alive: the error says what to do."""
    nlp = guard(modelguard_loader.of(dict), reload_on=None)
    with pytest.raises(LoadFailed, match="Return an object of your own class"):
        nlp.load()


@pytest.mark.parametrize(("argument", "value"), [("times", -1), ("times", "two"), ("times", True), ("error", "torn")])
def test_failures_that_make_no_sense_are_refused(modelguard_loader: Loader, argument: str, value: Any) -> None:
    """Invalid arguments are rejected by name."""
    with pytest.raises(InvalidOption, match=f"{argument}="):
        modelguard_loader.fail(**{argument: value})


def test_other_nonsense_is_refused(modelguard_loader: Loader) -> None:
    """A delay is a duration, and a loader can be called."""
    with pytest.raises(InvalidOption, match="delay='a while'"):
        modelguard_loader.delay = "a while"
    with pytest.raises(InvalidOption, match="make=3"):
        modelguard_loader.of(3)  # type: ignore[arg-type]


def test_the_models_say_what_they_are() -> None:
    """A model in a failed assert shows its number and key."""
    assert ["<Model 1>", "<Model 2 of 'anna'>"] == [repr(Model(1)), repr(Model(2, "anna"))]


def test_an_exception_is_made_before_it_is_raised(modelguard_loader: Loader) -> None:
    """A class in place of an exception is rejected with what to write."""
    with pytest.raises(InvalidOption, match=r"Write error=OSError\('...'\)"):
        modelguard_loader.fail(error=OSError)  # type: ignore[arg-type]


def test_a_misspelt_attribute_of_the_loader_is_an_error(modelguard_loader: Loader) -> None:
    """A typing error does not go unnoticed."""
    with pytest.raises(AttributeError, match="dealy"):
        modelguard_loader.dealy = "2s"  # type: ignore[attr-defined]
