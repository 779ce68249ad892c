"""What every test shares."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import re
import signal
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from modelguard import telemetry

# The same examples in every run, so that a red run is the change's own doing, and no verdict on speed.
# To explore instead: make test ARGS="--hypothesis-profile=default".
settings.register_profile("modelguard", deadline=None, derandomize=True)
settings.load_profile("modelguard")

pytest_plugins = ["pytester"]
collect_ignore = ["downstream"]  # a project of its own, whose suite tests/process/test_downstream.py runs

# Where the sources run without having been installed, nothing tells pytest of the plugin; nor in the runs within tests.
_PLUGIN = "modelguard.testing.plugin"
if _PLUGIN not in {entry.name for entry in importlib.metadata.entry_points(group="pytest11")}:
    os.environ["PYTEST_PLUGINS"] = _PLUGIN
    pytest_plugins.append(_PLUGIN)

# One reload at a time on a host is a promise of the product; runs of this suite beside each other need not keep it.
_RUNTIME = tempfile.TemporaryDirectory(prefix="modelguard-tests-", ignore_cleanup_errors=True)
os.environ["MODELGUARD_RUNTIME_DIR"] = _RUNTIME.name

# A shell that runs the tests in the background has them ignore Ctrl-C, and their children would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

#: Files whose tests share nothing: under xdist each test goes to whichever process is free. The tests of any other file
#: stay together in one process, since they share a server, a build, or a library that takes long to import.
INDEPENDENT = {
    "test_celery.py",
    "test_corpus.py",
    "test_demo.py",
    "test_docs.py",
    "test_gunicorn.py",
    "test_handles.py",
    "test_real_models.py",
    "test_remedies.py",
    "test_uwsgi.py",
}

#: Files whose tests take more than twelve seconds of CPU time together: trained models, a server for each case of many,
#: thousands of steps. `make test-all` and `.ci/run --all` run them, `make test` does not. The others take a fifth.
THOROUGH = {
    f"test_{name}.py"
    for name in """
    allocator_pythons celery control control_isolated corpus demo diagnose doctor_services doctor_session downstream
    example_fastapi_faulty_model example_fastapi_spacy example_fastapi_torch_cpu example_field
    example_gunicorn_flask example_ray_serve example_starlette_pipeline exit_statuses gunicorn gunicorn_molds
    gunicorn_versions handles isolation isolation_chaos isolation_faults isolation_host isolation_host_servers
    isolation_idle isolation_lifetime isolation_limits isolation_pause isolation_pool isolation_servers
    isolation_target isolation_transport isolation_waiting machine model_release page prefork presets_torch ray
    real_models remedies run serving_streams_stress serving_stress serving_web_clients sources spacy_memory stress
    testing torch_compile transformers_real tutorial uwsgi watch wheel
    """.split()  # noqa: SIM905 - read as words
}

#: What a `repr` says of most functions and objects.
ADDRESS = re.compile(r" at 0x[0-9a-f]{6}")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name the tests that have to run in the same process, where there is more than one."""
    if varying := [item.nodeid for item in items if ADDRESS.search(item.nodeid)]:
        raise pytest.UsageError(f"names that differ from process to process; give ids: {', '.join(varying)}")
    for item in items:
        if item.path.name in THOROUGH and item.path.parent.name in {"process", "diagnosis"}:
            item.add_marker(pytest.mark.thorough)
    if not hasattr(config, "workerinput"):  # this is not a process of xdist's
        return
    for item in items:
        if item.path.name not in INDEPENDENT:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture(autouse=True, scope="module")
def _collections_are_short() -> None:
    """Take what other modules have left out of the garbage collector's sight.

    A collection goes through all objects that it knows of: with torch and spaCy imported it takes 0.35 s instead of
    0.01 s, and a stress test that needs some hundred collections takes 60 s instead of 1 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def seen() -> Iterator[list[telemetry.Event]]:
    """The events that hooks get during a test."""
    events: list[telemetry.Event] = []
    remove = telemetry.add_hook(events.append)
    yield events
    remove()
