"""The example runs as its README says, under gunicorn, and its guarded service keeps its memory."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "fastapi_torch_cpu"
NEEDED = ("torch", "fastapi", "gunicorn")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}",
    ),
]


@pytest.fixture(scope="module")
def drive() -> ModuleType:
    """The example's own driver."""
    spec = importlib.util.spec_from_file_location("drive", FOLDER / "drive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """Let threads that wait for others sleep: on a busy machine their spinning takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        yield


@pytest.fixture(scope="module")
def services(drive: ModuleType) -> Iterator[dict[str, Any]]:
    """Both services, running."""
    with drive.serving("unguarded") as unguarded, drive.serving("guarded") as guarded:
        yield {"unguarded": unguarded, "guarded": guarded}


def test_both_say_the_same(services: dict[str, Any]) -> None:
    """The guarded service pads its texts, and nobody can hear it."""
    for text in ("a", "Hello!", "Hello, world. " * 20, "銀座でランチを食べた。"):
        sounds = [service.speak(text) for service in services.values()]
        assert 8 * len(text.encode()) == len(sounds[0])
        assert sounds[0] == pytest.approx(sounds[1], abs=1e-4)


def test_status_tells_of_the_guard(services: dict[str, Any]) -> None:
    """The guard's own account is a page of the service, and no request finds the model unloaded."""
    with urllib.request.urlopen(services["guarded"].url + "/status", timeout=60) as response:
        status = json.load(response)
    assert ("voice", "ready", 1) == (status["name"], status["state"], status["generation"])


def test_the_guarded_service_keeps_its_memory(drive: ModuleType, services: dict[str, Any]) -> None:
    """Over ever new lengths the unguarded service grows and grows; the guarded one has soon met all of its shapes."""
    held = drive.drive(services, 80, every=40)
    growth = {name: values[-1] - values[0] for name, values in held.items()}
    assert 30 < growth["unguarded"], held
    assert growth["guarded"] < growth["unguarded"] / 2, held


def test_both_end_in_order(drive: ModuleType) -> None:
    """A request to end stops the service and closes the guard, without a complaint."""
    for name in drive.COMMANDS:
        with drive.serving(name) as service:
            service.speak("a")
        assert [] == [line for line in service.log if "ERROR" in line or "Traceback" in line], name
