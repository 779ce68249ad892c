"""The manifest in examples/kubernetes is valid, and says what the service beside it needs."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from modelguard import presets
from modelguard.lifecycle.system import System, use
from modelguard.runtime.fork_hooks import GRACE

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "deployment.yaml"
SCHEMAS = Path(__file__).with_name("kubernetes-1.37.json")
DEFINITIONS = {
    "Deployment": "io.k8s.api.apps.v1.Deployment",
    "Service": "io.k8s.api.core.v1.Service",
    "PodDisruptionBudget": "io.k8s.api.policy.v1.PodDisruptionBudget",
}

Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def manifests() -> dict[str, Manifest]:
    """The objects of the file, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


@pytest.fixture
def deployment(manifests: dict[str, Manifest]) -> Manifest:
    return copy.deepcopy(manifests["Deployment"])


@pytest.fixture
def pod(deployment: Manifest) -> Manifest:
    return dict(deployment["spec"]["template"]["spec"])


@pytest.fixture
def container(pod: Manifest) -> Manifest:
    (only,) = pod["containers"]
    return dict(only)


@pytest.fixture
def app(container: Manifest) -> Iterator[Any]:
    """The module of the service that the manifest runs, under the memory limit that it sets."""
    pytest.importorskip("fastapi")
    (gibibytes,) = re.fullmatch(r"(\d+)Gi", container["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
    with use(lambda: System(limit=lambda: int(gibibytes) * 2**30, ticks=False)):
        names = runpy.run_path(str(MANIFEST.with_name("app.py")))
    yield SimpleNamespace(**names)
    names["words"].close()


def problems(manifest: Manifest) -> list[str]:
    """What Kubernetes' published schema has against it."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = {**json.loads(SCHEMAS.read_text(encoding="utf-8")), "$ref": f"#/$defs/{DEFINITIONS[manifest['kind']]}"}
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in validator.iter_errors(manifest)]


def seconds(probe: Manifest) -> int:
    """How long a probe may fail before it counts."""
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


class TestSchema:
    """Kubernetes accepts the file as it stands."""

    @pytest.mark.parametrize("kind", list(DEFINITIONS))
    def test_each_object_is_valid(self, manifests: dict[str, Manifest], kind: str) -> None:
        """Every field exists in Kubernetes 1.37, and has the right type."""
        assert set(DEFINITIONS) == set(manifests)
        assert [] == problems(manifests[kind])

    def test_a_misspelt_field_is_noticed(self, deployment: Manifest) -> None:
        """The schemas are closed: a field that Kubernetes does not know is no silent loss."""
        deployment["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
        (problem,) = problems(deployment)
        assert "terminationGraceSeconds" in problem

    def test_a_wrong_type_is_noticed(self, deployment: Manifest) -> None:
        """A variable's value is text, and a number of seconds a number."""
        only = deployment["spec"]["template"]["spec"]["containers"][0]
        only["env"][0]["value"] = 256
        only["lifecycle"]["preStop"]["sleep"]["seconds"] = "5s"
        assert 2 == len(problems(deployment))


class TestTheService:
    """The manifest agrees with the code that it runs."""

    @pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
    def test_its_probes_exist(self, app: Any, container: Manifest, probe: str) -> None:
        """The readiness probe waits for the model, and the liveness probe does not."""
        path = container[probe]["httpGet"]["path"]
        without_model = asyncio.run(status_of(app.app, path))
        app.words.load()
        with_model = asyncio.run(status_of(app.app, path))
        assert (200 if probe == "livenessProbe" else 503, 200) == (without_model, with_model)

    def test_its_variables_are_those_of_the_preset(self, container: Manifest) -> None:
        """What modelguard renders for these CPUs is what the container gets."""
        cpus = int(container["resources"]["limits"]["cpu"])
        rendered = yaml.safe_load(presets.get("torch-cpu-dynamic", cpus=cpus, workers=1).render("kubernetes"))
        assert rendered["env"] == container["env"]

    def test_no_probe_ends_a_load(self, app: Any, container: Manifest) -> None:
        """A pod is not killed because its model loads, even if the loader holds the GIL."""
        longest = app.words.engine.options.loading.timeout
        assert seconds(container["startupProbe"]) > longest
        assert seconds(container["livenessProbe"]) > longest

    def test_its_grace_is_enough_for_the_longest_load_and_the_calls(
        self, app: Any, pod: Manifest, container: Manifest
    ) -> None:
        """A pod that is told to end is not killed before its calls are answered."""
        options = app.words.engine.options
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert (
            pod["terminationGracePeriodSeconds"] >= pause + options.loading.timeout + options.swap.drain_timeout + GRACE
        )

    def test_memory_has_a_limit_for_the_policy(self, app: Any, container: Manifest) -> None:
        """``MemoryLimit("80%")`` is of the container's limit, and the scheduler reserves all of it."""
        assert "MemoryLimit('80%')" in repr(app.words.reload_on)
        resources = container["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]

    def test_the_command_starts_it(self, container: Manifest) -> None:
        """The server runs this module on the port that the probes and the Service ask."""
        command, (port,) = container["command"], container["ports"]
        assert (MANIFEST.parent / f"{command[1].partition(':')[0]}.py").exists()
        assert str(port["containerPort"]) == command[command.index("--port") + 1]
        names = {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
        assert {port["name"]} == names


class TestTheFleet:
    """A roll-out or a drained node takes 5 % of the capacity at most, and never asks the registry for more at once."""

    def test_a_rolling_update_is_bounded(self, manifests: dict[str, Manifest], deployment: Manifest) -> None:
        """Kubernetes rounds a surge up, and a budget too."""
        replicas, update = deployment["spec"]["replicas"], deployment["spec"]["strategy"]["rollingUpdate"]
        share = int(update["maxSurge"].removesuffix("%")) / 100
        assert (0, 1) == (update["maxUnavailable"], math.ceil(share * replicas))
        budget = int(manifests["PodDisruptionBudget"]["spec"]["maxUnavailable"].removesuffix("%")) / 100
        assert math.ceil(budget * replicas) / replicas <= 0.05

    def test_every_selector_finds_the_pods(self, manifests: dict[str, Manifest], deployment: Manifest) -> None:
        """The Service, the budget and the Deployment itself mean the same pods."""
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert labels == deployment["spec"]["selector"]["matchLabels"] == manifests["Service"]["spec"]["selector"]
        assert labels == manifests["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]


async def status_of(app: Any, path: str) -> int:
    """The status of a GET request, from the application itself."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asked = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    scope = {**asked, "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "root_path": ""}
    await app(scope, receive, send)
    return int(sent[0]["status"])
