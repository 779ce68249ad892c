"""The example runs as its README says, under gunicorn, and its guarded service keeps its memory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from examples.fastapi_torch_cpu import drive

if TYPE_CHECKING:
    from examples._driver import Server

NEEDED = ("torch", "fastapi", "gunicorn")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """Let threads that wait for others sleep: on a busy machine their spinning takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield


@pytest.fixture(scope="module")
def services() -> Iterator[dict[str, Server]]:
    """Both services, running."""
    with drive.serving("unguarded") as unguarded, drive.serving("guarded") as guarded:
        yield {"unguarded": unguarded, "guarded": guarded}


def test_both_say_the_same(services: dict[str, Server]) -> None:
    """The guarded service pads its texts, and the sound does not change."""
    for text in ("a", "Hello!", "Hello, world. " * 20, "銀座でランチを食べた。"):
        sounds = [drive.speak(service, text) for service in services.values()]
        assert 8 * len(text.encode()) == len(sounds[0])
        assert sounds[0] == pytest.approx(sounds[1], abs=1e-4)


def test_status_tells_of_the_guard(services: dict[str, Server]) -> None:
    """The guard's status is a page of the service, and no request finds the model unloaded."""
    status = services["guarded"].ask("/status").json
    assert ("voice", "ready", 1) == (status["name"], status["state"], status["generation"])


def test_the_guarded_service_keeps_its_memory(services: dict[str, Server]) -> None:
    """With ever new lengths the unguarded service keeps growing; the guarded one soon has all of its shapes."""
    held = drive.drive(services, 80, every=40)
    growth = {name: values[-1] - values[0] for name, values in held.items()}
    assert 30e6 < growth["unguarded"], held
    assert growth["guarded"] < growth["unguarded"] / 2, held


def test_both_end_in_order() -> None:
    """SIGTERM stops the service and closes the guard, without an error in the log."""
    for name in drive.COMMANDS:
        with drive.serving(name) as service:
            drive.speak(service, "a")
        assert "ERROR" not in service.log, service.log
        assert "Traceback" not in service.log, service.log
