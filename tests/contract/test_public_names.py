"""The public names, pinned: adding or losing one is a decision, and this file is where it shows."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import pickle
import pkgutil
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator

import pytest

import modelguard

DISTRIBUTION = "modelguard-lifecycle"

PUBLIC = [
    "AutoSize",
    "Backoff",
    "BatchStatus",
    "Batched",
    "Between",
    "Bounds",
    "Breaker",
    "Buffer",
    "Changed",
    "Cron",
    "Errors",
    "Execution",
    "Fair",
    "GpuMemoryGrowth",
    "GpuMemoryLimit",
    "Host",
    "Idle",
    "Isolated",
    "Loaded",
    "Loading",
    "MemoryGrowth",
    "MemoryLimit",
    "ModelGuard",
    "ModelPool",
    "ModelReplicas",
    "Modified",
    "Policy",
    "Replay",
    "Snapshot",
    "Swap",
    "TTL",
    "Uses",
    "Weight",
    "allocator",
    "batched",
    "control",
    "deadline",
    "errors",
    "guard",
    "guard_of",
    "isolate",
    "memory",
    "pool",
    "prefork",
    "presets",
    "replicas",
    "serving",
    "sharing",
    "telemetry",
    "weights",
]


#: What each public module offers that re-exports names of private ones.
OFFERED = {
    "modelguard.allocator": [
        "AllocatorFile",
        "AllocatorInForce",
        "AllocatorInfo",
        "Figures",
        "How",
        "Kind",
        "Library",
        "Observed",
        "Problem",
        "ProblemKind",
        "SmallObjects",
        "check_preload",
        "detect",
        "find",
        "in_force",
        "observe",
        "restart_threads",
        "stats",
        "trim",
    ],
    "modelguard.control": ["listen", "stop"],
    "modelguard.environment": ["Cpus", "Limit", "available_cpus", "memory_limit"],
    "modelguard.memory": ["MemoryUsage", "PrivateMeter", "Trimming", "private", "trim_every", "usage"],
    "modelguard.prefork": [
        "ForkReport",
        "Hazard",
        "HazardKind",
        "ImmortalReport",
        "Mortal",
        "Skipped",
        "find_hazards",
        "immortalize",
        "immortalize_unsupported",
        "in_child",
        "prepare",
    ],
    "modelguard.presets": [
        "ApplyReport",
        "Format",
        "Knob",
        "Outcome",
        "Preset",
        "State",
        "When",
        "describe",
        "get",
        "names",
    ],
    "modelguard.sharing": ["Places", "ProcessReport", "TreeReport", "TreeWatch", "report"],
    "modelguard.weights": ["Published", "current", "load", "publish"],
}

#: Every module without an underscore in its path; those of missing libraries are skipped.
PUBLIC_MODULES = [
    "modelguard",
    *(
        module.name
        for module in pkgutil.walk_packages(modelguard.__path__, "modelguard.")
        if not re.search(r"\._|^modelguard\.cli", module.name)
    ),
]


def public_values(module: str) -> Iterator[tuple[str, object]]:
    """Give each name that a public module offers, with its value; skip if its library is missing."""
    try:
        offered = importlib.import_module(module)
    except (ImportError, modelguard.errors.NotSupported) as error:
        pytest.skip(f"{module} cannot be imported here: {error}")
    own = (name for name, value in vars(offered).items() if getattr(value, "__module__", "") == module)
    for name in getattr(offered, "__all__", [name for name in own if not name.startswith("_")]):
        yield name, getattr(offered, name)


def public_dataclasses(module: str) -> list[type]:
    """Give the dataclasses that a public module offers."""
    values = (value for _, value in public_values(module))
    return [value for value in values if isinstance(value, type) and dataclasses.is_dataclass(value)]


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


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_everything_that_a_public_module_offers_exists(module: str) -> None:
    """Each name in an `__all__` can be imported."""
    assert all(name.isidentifier() for name, _ in public_values(module))


@pytest.mark.parametrize(("module", "names"), OFFERED.items(), ids=OFFERED)
def test_a_public_module_offers_these_names(module: str, names: list[str]) -> None:
    """Adding or losing a name of a public module is a decision."""
    assert names == importlib.import_module(module).__all__


@pytest.mark.parametrize("module", OFFERED)
def test_public_modules_are_imported_as_they_are_written(module: str) -> None:
    """Each can be imported by its dotted name, in a process that has imported nothing else."""
    program = f"import {module}; import json; print(json.dumps({module}.__all__))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert ("", OFFERED[module]) == (done.stderr, json.loads(done.stdout))


@pytest.mark.parametrize("module", [*OFFERED, "modelguard.diagnosis", "modelguard.testing"])
def test_public_objects_show_their_public_name(module: str) -> None:
    """Tracebacks, `repr` and the documentation name the module that users import."""
    shown = {
        name: value.__module__
        for name, value in public_values(module)
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert dict.fromkeys(shown, module) == shown


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_the_types_of_public_dataclasses_can_be_resolved(module: str) -> None:
    """`typing.get_type_hints`, which frameworks call, works on each of them."""
    for kind in public_dataclasses(module):
        hints = typing.get_type_hints(kind)
        assert {field.name for field in dataclasses.fields(kind)} <= hints.keys()


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_public_classes_can_be_pickled_by_name(module: str) -> None:
    """A class is found again by the name that it shows, so its objects cross process borders."""
    for name, value in public_values(module):
        if isinstance(value, type) and getattr(value, "__module__", "").startswith("modelguard"):
            assert value is pickle.loads(pickle.dumps(value)), name


def test_values_cross_process_borders() -> None:
    """A report that was pickled is the same in a process that has not imported its module."""
    values = [
        modelguard.memory.usage(),
        modelguard.environment.available_cpus(),
        modelguard.presets.get("low-memory"),
        modelguard.sharing.report(),
    ]
    program = "import pickle, sys; print([repr(one) for one in pickle.load(sys.stdin.buffer)])"
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, input=pickle.dumps(values), capture_output=True, check=False)
    assert (b"", str([repr(value) for value in values])) == (done.stderr, done.stdout.decode().strip())


def test_the_version_is_the_distributions() -> None:
    """`modelguard.__version__` is what pip shows."""
    assert installed_version() == modelguard.__version__


def test_the_command_tells_its_version() -> None:
    """`python -m modelguard --version` names the program and its version."""
    command = [sys.executable, "-m", "modelguard", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, f"modelguard {installed_version()}", "") == (done.returncode, done.stdout.strip(), done.stderr)


def test_an_error_of_the_users_own_code_is_not_taken_for_a_wrong_call() -> None:
    """A TypeError of an object that is given as an option comes through as it is."""

    class Shares(dict[str, float]):
        def items(self) -> typing.Any:
            raise TypeError("no shares today")

    with pytest.raises(TypeError, match=r"^no shares today$"):
        modelguard.Fair(shares=Shares())
