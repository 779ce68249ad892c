"""The pytest plugin. pytest imports it in every run, so it imports what a fixture needs when that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from modelguard.testing._clock import Clock
    from modelguard.testing._env import Env
    from modelguard.testing._loader import Loader

__all__ = ["modelguard_clock", "modelguard_env", "modelguard_loader", "modelguard_off"]

_MARKER = (
    "modelguard_memory(limit): fail the test if it leaves the process with more private memory than before, by more "
    "than limit, such as '50 MB'. Garbage is collected and free memory given back first."
)


@pytest.fixture
def modelguard_clock(request: pytest.FixtureRequest) -> Iterator[Clock]:
    """Time, memory and chance for the guards and pools that the test makes; nothing sleeps."""
    from modelguard.testing._clock import Clock
    from modelguard.testing._loader import let_all_go

    clock = Clock(request.node.nodeid)
    clock.install()
    yield clock
    let_all_go()
    clock.end()


@pytest.fixture
def modelguard_loader(request: pytest.FixtureRequest) -> Iterator[Loader]:
    """A loader that counts, delays and fails as told, and knows which of its models are alive."""
    import time

    from modelguard.testing._loader import Loader, let_all_go

    clocked = "modelguard_clock" in request.fixturenames
    sleep = request.getfixturevalue("modelguard_clock")._sleep if clocked else time.sleep  # noqa: SLF001
    yield Loader(sleep=sleep)
    let_all_go()


@pytest.fixture
def modelguard_off(request: pytest.FixtureRequest) -> Iterator[None]:
    """Guarded and batched functions run plain: in the caller's thread, without policies, queues or reloads."""
    if "modelguard_clock" in request.fixturenames:
        pytest.fail(
            "modelguard_off takes the policies away that modelguard_clock drives: ask for one of the two",
            pytrace=False,
        )
    from modelguard.testing._off import off

    with off():
        yield


@pytest.fixture
def modelguard_env(request: pytest.FixtureRequest) -> Iterator[Env]:
    """Runs a program in a process of its own, under a preset and an allocator."""
    from modelguard.testing._env import Env

    env = Env(request.node.nodeid)
    yield env
    env.end()


# The marker


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, for ``--markers`` and ``--strict-markers``."""
    config.addinivalue_line("markers", _MARKER)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse markers that cannot be meant before any test has run."""
    if hasattr(config, "workerinput"):  # xdist knows no usage errors of its workers: there the tests fail one by one
        return
    wrong = [f"{item.nodeid}: {why}" for item in items for why in _faults(item)]
    if wrong:
        raise pytest.UsageError(*wrong)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Under xdist, fail a test whose marker cannot be meant."""
    if hasattr(item.config, "workerinput"):
        for why in _faults(item):
            pytest.fail(f"{item.nodeid}: {why}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Hold a marked test to its limit. What its fixtures set up and take down is not counted."""
    mark = item.get_closest_marker("modelguard_memory")
    if mark is None:
        return (yield)
    from modelguard import _units
    from modelguard.testing._limit import settled_memory

    limit = _units.size(mark.args[0], "modelguard_memory")
    before = settled_memory()
    result = yield
    grown = settled_memory() - before
    if grown > limit:
        told, allowed = _units.format_bytes(grown), _units.format_bytes(limit)
        pytest.fail(
            f"the test leaves {told} more private memory than it found, and {allowed} may be left", pytrace=False
        )
    return result


def _faults(item: pytest.Item) -> list[str]:
    marks = list(item.iter_markers("modelguard_memory"))
    if not marks:
        return []
    from modelguard.testing._limit import fault

    found = [fault(mark.args, mark.kwargs) for mark in marks]
    return [why for why in found if why is not None]
