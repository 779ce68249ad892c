"""The pytest plugin. pytest imports it in every run, so it imports what a fixture needs only when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from modelguard.testing._children import Env
    from modelguard.testing._clock import Clock
    from modelguard.testing._loader import Loader

__all__ = ["modelguard_clock", "modelguard_env", "modelguard_loader", "modelguard_off"]

_MARKER = (
    "modelguard_memory(limit): fail the test if private memory has grown by more than limit, such as '50 MB', at its "
    "end. Before each reading, garbage is collected and free memory is returned to the system."
)


@pytest.fixture
def modelguard_clock(request: pytest.FixtureRequest) -> Iterator[Clock]:
    """Time, memory and randomness for the guards and pools that the test makes; nothing sleeps."""
    from modelguard.testing._clock import Clock

    clock = Clock(request.node.nodeid)
    with clock.installed():
        yield clock


@pytest.fixture
def modelguard_loader() -> Iterator[Loader]:
    """A loader that counts its calls, delays or fails as the test requires, and knows which models are alive."""
    from modelguard.testing._loader import Loader, let_all_go

    yield Loader()
    let_all_go()


@pytest.fixture
def modelguard_off(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run guarded and batched functions directly in the caller's thread, without policies, queues or reloads.

    For a guarded function, the loader is simply called at the first use in the test, and its own errors are raised;
    there is no warm-up, no validation and no policy. A batched function is called with a list of one item, and the
    caller gets its result or error for that item. At the end, models that were loaded in the test are dropped, so that
    the next use loads in the normal way.
    """
    if "modelguard_clock" in request.fixturenames:
        pytest.fail(
            "modelguard_off switches off the policies that modelguard_clock drives: use only one of them", pytrace=False
        )
    from modelguard.runtime import call_context

    with call_context.inline():
        yield


@pytest.fixture
def modelguard_env(request: pytest.FixtureRequest) -> Iterator[Env]:
    """Run a program in a separate process, with a preset and an allocator."""
    from modelguard.testing._children import Env

    env = Env(request.node.nodeid)
    yield env
    env.end()


# The marker


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for ``--markers`` and ``--strict-markers``."""
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reject invalid markers before any test has run."""
    if hasattr(config, "workerinput"):  # xdist does not report usage errors of its workers: there each test fails
        return
    wrong = [f"{item.nodeid}: {why}" for item in items for why in _faults(item)]
    if wrong:
        raise pytest.UsageError(*wrong)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Under xdist, fail a test with an invalid marker."""
    if hasattr(item.config, "workerinput"):
        for why in _faults(item):
            pytest.fail(f"{item.nodeid}: {why}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Enforce the limit of a marked test. Memory of its fixtures is not counted."""
    mark = item.get_closest_marker("modelguard_memory")
    if mark is None:
        return (yield)
    from modelguard import _units
    from modelguard.errors import NotSupported
    from modelguard.testing._no_growth import settled_memory

    limit = _units.size(mark.args[0], "modelguard_memory")
    try:
        before = settled_memory()
    except NotSupported as error:
        pytest.fail(f"modelguard_memory({mark.args[0]!r}): {error}. Skip the test on this platform.", pytrace=False)
    result = yield
    grown = settled_memory() - before
    if grown > limit:
        amount, allowed = _units.format_bytes(grown), _units.format_bytes(limit)
        pytest.fail(f"private memory grew by {amount} during the test; {allowed} are allowed", pytrace=False)
    return result


def _faults(item: pytest.Item) -> list[str]:
    marks = list(item.iter_markers("modelguard_memory"))
    if not marks:
        return []
    from modelguard.testing._no_growth import fault

    return [why for mark in marks if (why := fault(mark.args, mark.kwargs)) is not None]
