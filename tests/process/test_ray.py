"""Ray Serve, with a real Ray on this machine: replacement amid traffic, bounds, deadlines, two nodes.

Ray lives in processes of its own (``ray_driver.py``), one for all tests of a kind, since its threads would be in the
way of the fork tests here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.timeout(360),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11) or importlib.util.find_spec("ray") is None,
        reason="Ray is tested on Python 3.11, where it is installed",
    ),
]


def driven(what: str) -> Any:
    """What the driver saw."""
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # short: Ray's sockets lie in there
    try:
        (folder / "ray").mkdir()
        (folder / "weights").mkdir()
        found = [str(HERE), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in found),
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            # By default Serve kills a proxy that takes five seconds to start, and on a busy machine each one does.
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "50",
            "WEIGHTS": str(folder / "weights"),
        }
        command = [sys.executable, str(HERE / "ray_driver.py"), what, str(folder / "report.json")]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as driver:
            try:
                log, _ = driver.communicate(timeout=330)
            except subprocess.TimeoutExpired:
                driver.send_signal(signal.SIGTERM)  # Ray ends its own processes with it
                log, _ = driver.communicate(timeout=15)
            finally:
                driver.kill()
        assert 0 == driver.returncode, log[-5000:]
        return json.loads((folder / "report.json").read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def local() -> Iterator[Any]:
    """One Ray with one node."""
    return driven("local")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """One Ray with two nodes."""
    return driven("nodes")


def test_replicas_are_replaced_amid_traffic_and_no_request_is_lost(local: Any) -> None:
    """When a policy is due, every replica of the beginning makes room for a fresh one; each request has its answer."""
    told = local["replaced"]
    assert [] == told["failed"]
    assert told["sent"] == told["answered"] > 100
    assert 2 == told["first"]
    assert told["processes"] >= 4, told


def test_replicas_leave_one_at_a_time(local: Any) -> None:
    """Both of them are due at the same time, and at any moment one serves."""
    assert local["replaced"]["fewest"] >= 1, local["replaced"]


def test_bounds_are_carried_over(local: Any) -> None:
    """Serve's limits leave room for the queue's, and a replica has time to end what it has let in."""
    assert {"name": "count", "ongoing": 520, "queued": 520, "grace": 25.0, "replicas": 2} == local["carried_over"]


def test_a_deployment_may_isolate(local: Any) -> None:
    """Its workers are replaced inside of the replica: no request fails, a crash costs one, and nothing is left over."""
    told = local["isolated"]
    assert [] == told["failed"]
    assert told["workers"] >= 4
    assert 1 == told["molds"]
    assert "WorkerCrashed" in told["crash"]
    assert (3, "ready") == (told["after"], told["state"])
    assert [] == told["left"]


def test_overload_is_rays_own_back_pressure(local: Any) -> None:
    """Of too many calls at once those that fit are answered, and the others refused as Ray itself refuses."""
    told = local["overloaded"]
    kinds = told["kinds"]
    assert 30 == kinds["answered"] + kinds["pressure"]
    assert kinds["answered"] >= 5  # one at once, since it does not wait for company, and four in the queue
    assert kinds["pressure"]
    assert 503 == told["status_code"]
    assert told["status"]["queue"]["refused_full"] > 0  # it was the queue that refused, and told when to try again
    assert any(seconds != 1.0 for seconds in told["retry"]), told["retry"]


def test_overload_over_http_is_503_with_retry_after(local: Any) -> None:
    """Clients get a time to try again, and nothing else happens to them."""
    told = local["overloaded"]
    assert {"200", "503"} == set(told["http"])
    assert int(told["headers"]["retry-after"]) >= 1
    assert 400 == told["nonsense"]


def test_overload_behind_an_ingress_is_503_with_retry_after(local: Any) -> None:
    """An application of FastAPI that asks by a handle need not know of it."""
    told = local["behind_an_ingress"]
    assert {"200", "503"} == set(told["statuses"])
    assert all(int(seconds) >= 1 for seconds in told["retry"]), told["retry"]


def test_a_client_that_hangs_up_is_not_computed_for(local: Any) -> None:
    """Serve cancels its request, and the queue drops what waits."""
    assert local["overloaded"]["status"]["queue"]["cancelled"] > 0


def test_errors_keep_their_types(local: Any) -> None:
    """What a function raised for an item, and what the queue refused it for, come out of a handle as such."""
    caught = local["bounded"]["caught"]
    assert "ValueError" in caught["wrong"][0]
    assert "sleep length must be non-negative" in caught["wrong"][0][-1]
    assert "ItemTooHeavy" in caught["heavy"][0]


@pytest.mark.parametrize(("name", "least"), [("deadline", 0.5), ("shorter", 0.1)])
def test_a_deadline_holds(local: Any, name: str, least: float) -> None:
    """The function's deadline bounds a call, and its own timeout shortens it; callers get our error through Ray."""
    names, seconds = local["bounded"]["caught"][name]
    assert {"DeadlineExceeded", "TimeoutError", "RayTaskError"} <= set(names)
    assert seconds >= least


def test_what_is_in_time_is_answered(local: Any) -> None:
    """A deadline does not affect requests that meet it."""
    assert [] == local["bounded"]["caught"]["fits"][0]


def test_deadlines_over_http(local: Any) -> None:
    """504 when the time is over, by either bound; 400 for a bound that is nonsense; 413 for what is too heavy."""
    over, shorter, *others = [status for status, _ in local["bounded"]["http"]]
    assert [504, 200, 400, 413] == [over, *others]
    assert shorter in {503, 504}  # refused at once where the runs before have shown that none is so fast


def test_a_ray_that_is_not_initialised_is_named(local: Any) -> None:
    """Serve would quietly start a Ray of its own; we say what is missing instead."""
    *names, text = local["not_initialised"]
    assert "NotSupported" in names
    assert "Ray is not initialised in this process; call ray.init()" in text


def test_an_option_that_serve_does_not_know_is_named(local: Any) -> None:
    """It is rejected where it is given, not when the replicas start."""
    *names, text = local["refused_options"]
    assert "InvalidOption" in names
    assert "num_replica" in text


def test_the_replicas_of_a_node_share_their_weights(nodes: Any) -> None:
    """On each of two nodes one replica makes the weights, and both map the same file."""
    assert 2 == len(nodes["nodes"])
    told = nodes["told"]
    assert [7.0] * 4 == [one["value"] for one in told]
    assert dict.fromkeys(nodes["nodes"], 2) == Counter(one["node"] for one in told)
    files = {one["node"]: one["maps"] for one in told}
    assert [1, 1] == [len(mapped) for mapped in files.values()]
    assert 2 == len({mapped[0] for mapped in files.values()})
    assert all(one["maps"] == files[one["node"]] for one in told)
    assert dict.fromkeys(nodes["nodes"], 1) == nodes["made"]
