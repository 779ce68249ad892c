"""Drives a local Ray and writes what it saw as JSON: in a process of its own, as Ray's threads do not suit forks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray
import ray_services
from examples._driver import ask, free_port
from ray import serve
from ray.serve.exceptions import BackPressureError

from modelguard.frameworks import ray as served

STORE = 80_000_000
ACTOR = {"num_cpus": 0.1}
PORT = free_port()


@contextlib.contextmanager
def local() -> Iterator[None]:
    """A Ray on this machine, with Serve on a free port."""
    ray.init(
        num_cpus=2,
        object_store_memory=STORE,
        include_dashboard=False,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"port": PORT}, logging_config={"log_level": "WARNING", "enable_access_log": False})
        yield
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()


def post(path: str, body: str, **headers: str) -> tuple[int, dict[str, str], str]:
    answer = ask(PORT, path, body, headers={key.replace("_", "-"): value for key, value in headers.items()})
    return answer.status, dict(answer.headers), answer.text


def get(path: str) -> tuple[int, dict[str, str]]:
    answer = ask(PORT, path)
    return answer.status, dict(answer.headers)


def hung_up(clients: int) -> None:
    """Clients that do not wait for their answers, of whom the first are being computed already."""
    sockets = [socket.create_connection(("127.0.0.1", PORT), timeout=10) for _ in range(clients)]
    for one in sockets:
        one.sendall(b'POST /slow HTTP/1.1\r\nHost: me\r\nContent-Length: 3\r\n\r\n"x"')
    time.sleep(0.15)
    for one in sockets:
        one.close()


def error_of(call: Callable[[], Any]) -> list[str]:
    """The names of an error's classes, and its text."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - told
        return [*(one.__name__ for one in type(error).__mro__), str(error).splitlines()[-1]]
    return []


# Scenarios


def not_initialised() -> list[str]:
    """Before Ray is."""
    return error_of(lambda: served.run(ray_services.count))


def refused_options() -> list[str]:
    return error_of(lambda: served.deployment(ray_services.count, num_replica=2))


def carried_over() -> dict[str, Any]:
    made = served.deployment(ray_services.count, num_replicas=2)
    told = made._deployment_config
    return {
        "name": made.name,
        "ongoing": told.max_ongoing_requests,
        "queued": told.max_queued_requests,
        "grace": told.graceful_shutdown_timeout_s,
        "replicas": made.num_replicas,
    }


def replaced() -> dict[str, Any]:
    """Requests from several threads without a pause, until both replicas of the beginning are gone."""
    handle = served.run(
        ray_services.count,
        app_name="count",
        route_prefix="/count",
        min_lifetime=0,
        num_replicas=2,
        ray_actor_options=ACTOR,
        health_check_period_s=0.3,
        graceful_shutdown_wait_loop_s=0.5,
    )
    first: set[int] = set()
    seen: Counter[int] = Counter()
    failed: list[str] = []
    over = threading.Event()
    fewest = 2

    def send(place: int) -> int:
        sent = 0
        while not over.is_set():
            sent += 1
            try:
                length, pid = handle.remote("x" * place).result(timeout_s=60)
                assert length == place
                seen[pid] += 1
            except Exception as error:  # noqa: BLE001 - told
                failed.append(repr(error))
        return sent

    with ThreadPoolExecutor(6) as pool:
        sending = [pool.submit(send, place) for place in range(6)]
        end = time.monotonic() + 75
        while time.monotonic() < end and len(seen) < 4:
            running = serve.status().applications["count"].deployments["count"].replica_states.get("RUNNING", 0)
            fewest = min(fewest, running)
            if len(seen) == 2 and not first:
                first = set(seen)
            time.sleep(0.1)
        before = dict(seen)
        time.sleep(1)
        over.set()
        sent = sum(one.result() for one in sending)
    serve.delete("count")
    return {
        "sent": sent,
        "answered": sum(seen.values()),
        "failed": failed,
        "processes": len(seen),
        "fewest": fewest,
        "first": len(first),
        "before": list(before.values()),
    }


def isolated() -> dict[str, Any]:
    """A deployment whose function runs in worker processes of its replica."""
    handle = served.run(
        ray_services.apart, app_name="apart", route_prefix="/apart", ray_actor_options=ACTOR, health_check_period_s=0.3
    )
    failed: list[str] = []
    seen: set[tuple[int, int]] = set()
    for place in range(300):
        try:
            length, worker, mold = handle.remote("x" * (place % 7)).result(timeout_s=60)
            assert length == place % 7
            seen.add((worker, mold))
        except Exception as error:  # noqa: BLE001 - told
            failed.append(repr(error))
    crash = error_of(lambda: handle.remote("crash").result(timeout_s=60))
    after = handle.remote("xyz").result(timeout_s=60)[0]
    status = handle.status.remote().result()
    pids = [*{pid for pair in seen for pid in pair}, *(one["pid"] for one in status["isolated"]["workers"])]
    serve.delete("apart")
    end = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    return {
        "failed": failed,
        "workers": len({worker for worker, _ in seen}),
        "molds": len({mold for _, mold in seen}),
        "crash": crash,
        "after": after,
        "state": status["isolated"]["state"],
        "left": [pid for pid in pids if psutil.pid_exists(pid)],
    }


def overloaded() -> dict[str, Any]:
    handle = served.run(ray_services.slow, app_name="slow", route_prefix="/slow", ray_actor_options=ACTOR)
    handle.remote("a").result()
    responses = [handle.remote(str(place)) for place in range(30)]
    kinds: Counter[str] = Counter()
    retry = []
    for place, response in enumerate(responses):
        try:
            assert response.result(timeout_s=60) == str(place)
            kinds["answered"] += 1
        except BackPressureError as error:
            kinds["pressure"] += 1
            retry.append(error.retry_after_s)
            last = error
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda place: post("/slow", json.dumps(str(place))), range(30)))
    hung_up(6)
    end = time.monotonic() + 20
    while not (status := handle.status.remote().result())["queue"]["cancelled"] and time.monotonic() < end:
        time.sleep(0.1)
    nonsense = post("/slow", "no json")
    serve.delete("slow")
    refusal = next(answer for answer in answers if answer[0] == 503)
    return {
        "kinds": kinds,
        "retry": retry,
        "status_code": last.status_code,
        "http": Counter(answer[0] for answer in answers),
        "headers": refusal[1],
        "body": refusal[2],
        "status": status,
        "nonsense": nonsense[0],
    }


def behind_an_ingress() -> dict[str, Any]:
    """The same overload, with an application of FastAPI in front."""
    inner = served.deployment(ray_services.slow, ray_actor_options=ACTOR)
    serve.run(ray_services.Front.bind(inner.bind()), name="front", route_prefix="/front")
    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(lambda place: get(f"/front/{place}"), range(30)))
    serve.delete("front")
    return {
        "statuses": Counter(status for status, _ in answers),
        "retry": [headers.get("retry-after") for status, headers in answers if status == 503],
    }


def bounded() -> dict[str, Any]:
    handle = served.run(ray_services.late, app_name="late", route_prefix="/late", ray_actor_options=ACTOR)
    caught = {}
    for name, seconds, extras in [("deadline", 0.8, {}), ("shorter", 0.8, {"timeout": 0.1}), ("fits", 0.0, {})]:
        started = time.monotonic()
        error = error_of(lambda: handle.remote(seconds, **extras).result(timeout_s=60))  # noqa: B023 - called at once
        caught[name] = (error, time.monotonic() - started)
        time.sleep(1)  # its worker computes what nobody waits for any more
    caught["wrong"] = (error_of(lambda: handle.remote(-1.0).result(timeout_s=60)), 0.0)
    caught["heavy"] = (error_of(lambda: handle.remote(1000.0).result(timeout_s=60)), 0.0)
    answers = [post("/late", "0.8")]
    time.sleep(1)
    answers += [post("/late", "0.8", Request_Timeout="0.1")]
    time.sleep(2)  # for a second after a run that took too long, what would take as long is refused at once
    answers += [post("/late", "0.0"), post("/late", "0.0", Request_Timeout="soon"), post("/late", "1000")]
    serve.delete("late")
    return {"caught": caught, "http": [(answer[0], answer[2]) for answer in answers]}


def two_nodes() -> dict[str, Any]:
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "include_dashboard": False})
    try:
        cluster.add_node(**common)
        ray.init(address=cluster.address, logging_level=logging.WARNING, log_to_driver=False)
        cluster.wait_for_nodes()
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        # Each of four takes half a processor, so that two fit a node of one.
        handle = served.run(
            ray_services.look,
            route_prefix=None,
            num_replicas=4,
            ray_actor_options={"num_cpus": 0.45},
            max_replicas_per_node=2,
        )
        told: dict[int, Any] = {}
        end = time.monotonic() + 60
        while len(told) < 4 and time.monotonic() < end:
            for answer in [handle.remote(7) for _ in range(8)]:
                looked = answer.result(timeout_s=30)
                told[looked["pid"]] = looked
        made = {node.name: len(list(node.glob("made by *"))) for node in Path(os.environ["WEIGHTS"]).iterdir()}
        return {"told": list(told.values()), "nodes": [node["NodeID"] for node in ray.nodes()], "made": made}
    finally:
        with contextlib.suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    what, report = sys.argv[1:3]
    told: dict[str, Any] = {}
    if what == "nodes":
        told = two_nodes()
    else:
        told["not_initialised"] = not_initialised()
        told["refused_options"] = refused_options()
        told["carried_over"] = carried_over()
        with local():
            for scenario in (overloaded, behind_an_ingress, bounded, isolated, replaced):
                began = time.monotonic()
                told[scenario.__name__] = scenario()
                told[scenario.__name__]["seconds"] = time.monotonic() - began
    Path(report).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main()
