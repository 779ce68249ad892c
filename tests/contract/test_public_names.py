"""The public names, pinned: adding or losing one is a decision, and this file is where it shows."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import types

import pytest

import modelguard

DISTRIBUTION = "modelguard-lifecycle"

PUBLIC = [
    "Backoff",
    "BatchStatus",
    "Batched",
    "Breaker",
    "Errors",
    "MemoryGrowth",
    "MemoryLimit",
    "ModelGuard",
    "ModelPool",
    "Modified",
    "Policy",
    "Snapshot",
    "TTL",
    "Uses",
    "allocator",
    "batched",
    "deadline",
    "errors",
    "guard",
    "guard_of",
    "memory",
    "pool",
    "prefork",
    "presets",
    "serving",
    "sharing",
    "telemetry",
    "weights",
]


def installed_version() -> str:
    """Give the version of the installed distribution, or skip."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} runs from its source folder here, without being installed")


def test_the_public_names_are_these() -> None:
    """`modelguard.__all__` is this list, no more and no less."""
    assert sorted(PUBLIC) == sorted(modelguard.__all__)


def test_nothing_else_looks_public() -> None:
    """Whatever `modelguard` shows without an underscore is public, or a module of the package."""
    shown = {name for name, value in vars(modelguard).items() if not isinstance(value, types.ModuleType)}
    assert set() == {name for name in shown if not name.startswith("_")} - set(PUBLIC) - {"annotations"}


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there(name: str) -> None:
    """Every public name can be imported from `modelguard`, wherever it is written."""
    assert getattr(modelguard, name) is not None


@pytest.mark.parametrize(
    "module",
    [
        "modelguard.errors",
        "modelguard.telemetry",
        "modelguard.telemetry.opentelemetry",
        "modelguard.telemetry.prometheus",
    ],
)
def test_public_modules_name_what_they_offer(module: str) -> None:
    """Each public module has an `__all__`, and everything in it is there."""
    offered = importlib.import_module(module)
    assert [] == [name for name in offered.__all__ if not hasattr(offered, name)]


def test_every_error_is_public() -> None:
    """Whoever catches errors finds every one of them in `modelguard.errors`."""
    errors = vars(modelguard.errors).values()
    raised = {error.__name__ for error in errors if isinstance(error, type) and issubclass(error, Exception)}
    assert raised == set(modelguard.errors.__all__)


def test_the_version_is_the_distributions() -> None:
    """`modelguard.__version__` is what pip shows."""
    assert installed_version() == modelguard.__version__


def test_the_command_tells_its_version() -> None:
    """`python -m modelguard --version` names the program and its version."""
    command = [sys.executable, "-m", "modelguard", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, f"modelguard {installed_version()}", "") == (done.returncode, done.stdout.strip(), done.stderr)
