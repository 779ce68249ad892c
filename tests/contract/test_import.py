"""`import modelguard` does nothing that its importer could notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

# Runs in a process of its own: takes stock, imports, takes stock again.
PROBE = """
import json, logging, os, sys, threading, warnings
from pathlib import Path

TASKS = Path("/proc/self/task")

def stock():
    return {
        "environment": dict(os.environ),
        "threads": threading.active_count(),
        "native threads": len(list(TASKS.iterdir())) if TASKS.exists() else 1,
        "root handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "root level": logging.getLogger().level,
        "warning filters": [repr(entry) for entry in warnings.filters],
    }

before = stock()
from modelguard import TTL, guard, pool
after = stock()
own = [logging.getLogger(name) for name in logging.getLogger().manager.loggerDict if name.split(".")[0] == "modelguard"]
print(json.dumps({
    "before": before,
    "after": after,
    "modules": sorted(sys.modules),
    "own handlers": sorted({type(handler).__name__ for logger in own for handler in logger.handlers}),
    "own levels": sorted({logger.level for logger in own}),
    "silenced": [logger.name for logger in own if logger.disabled or not logger.propagate],
}))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Import modelguard in a fresh interpreter and tell what changed."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=False)
    assert "" == done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize(
    "heavy",
    [
        "torch",
        "spacy",
        "transformers",
        "starlette",
        "fastapi",
        "prometheus_client",
        "opentelemetry",
        "matplotlib",
        "numpy",
        "psutil",
    ],
)
def test_brings_in_nothing_heavy(report: dict[str, Any], heavy: str) -> None:
    """Model libraries, frameworks, displays and psutil are imported when they are needed, not before."""
    assert heavy not in report["modules"]


@pytest.mark.parametrize("kind", ["threads", "native threads"])
def test_starts_no_thread(report: dict[str, Any], kind: str) -> None:
    """A process that only imports modelguard can still fork safely."""
    assert report["before"][kind] == report["after"][kind]


def test_changes_no_environment_variable(report: dict[str, Any]) -> None:
    """The environment is the user's."""
    assert report["before"]["environment"] == report["after"]["environment"]


@pytest.mark.parametrize("setting", ["root handlers", "root level"])
def test_configures_no_logging(report: dict[str, Any], setting: str) -> None:
    """What is logged, where and from which level on is the application's business."""
    assert report["before"][setting] == report["after"][setting]


def test_own_logger_is_silent_and_unconfigured(report: dict[str, Any]) -> None:
    """The logger `modelguard` has a NullHandler, no level of its own, and passes everything on."""
    assert ["NullHandler"] == report["own handlers"]
    assert [0] == report["own levels"]
    assert [] == report["silenced"]


def test_leaves_warning_filters_alone(report: dict[str, Any]) -> None:
    """Which warnings are shown is the application's business."""
    assert report["before"]["warning filters"] == report["after"]["warning filters"]


def own_modules(statement: str) -> list[str]:
    """Modelguard's modules that a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys\nprint(*sorted(name for name in sys.modules if name.startswith('modelguard')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_package_alone_imports_none_of_its_modules() -> None:
    """``import modelguard`` costs next to nothing: each name is imported when it is first used."""
    assert ["modelguard"] == own_modules("import modelguard")


def test_the_pytest_plugin_imports_nothing_until_a_test_asks() -> None:
    """Pytest imports the plugin in every run, also where no test uses it."""
    expected = ["modelguard", "modelguard.testing", "modelguard.testing.plugin"]
    assert expected == own_modules("import modelguard.testing.plugin")


def test_the_command_imports_no_diagnosis_until_it_is_asked_for_one() -> None:
    """``modelguard run`` does not make a service wait for what only ``doctor`` and ``diagnose`` need."""
    imported = own_modules("import modelguard.cli, modelguard.environment._launcher")
    assert [] == [name for name in imported if name.startswith(("modelguard.diagnosis", "modelguard.lifecycle"))]


def test_unknown_names_are_attribute_errors() -> None:
    """A misspelt name is an AttributeError of the package, as for any other module."""
    import modelguard

    with pytest.raises(AttributeError, match="module 'modelguard' has no attribute 'gaurd'"):
        modelguard.gaurd  # noqa: B018


def test_a_batched_function_brings_what_its_events_need() -> None:
    """So the first event, under overload, stalls no batch by an import."""
    program = (
        "import sys; from modelguard import batched; f = batched(max_size=1)(sorted); before = {*sys.modules}; "
        "from modelguard import telemetry; telemetry.RequestsRefused, telemetry.describe; "
        "print({name for name in {*sys.modules} - before if name.startswith('modelguard')} or 'nothing more')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ("nothing more\n", "") == (done.stdout, done.stderr)


def test_it_works_without_the_extension_of_wrapt() -> None:
    """Where wrapt has no wheel, its classes are made in Python, and have a metaclass."""
    program = """
        import weakref, wrapt
        from modelguard import guard

        class Service:
            @guard(lambda: 2, reload_on=None)
            def times(self, model, number):
                return model * number

        service = Service()
        print(weakref.WeakMethod(service.times)()(21), type(wrapt.FunctionWrapper) is not type)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    environment = {**os.environ, "WRAPT_DISABLE_EXTENSIONS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "42 True\n" == done.stdout
