"""The doctor at services that are really started: what is wrong is found and mended, what is right is left alone."""

from __future__ import annotations

import importlib.util
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tests.process.doctor_services import HEALTHY, ILL, JEMALLOC, MIMALLOC, Service
from tests.process.harness import cgroup

from modelguard.diagnosis import DoctorReport, Facts, examine, facts_of_command

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="running processes are read from /proc"),
]

#: These depend on the machine, not on the service.
OF_THE_MACHINE = ("MG301", "MG302")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def port() -> int:
    return free_port()


def facts_of(
    words: Sequence[str], environ: Mapping[str, str], folder: Path, request: str | None, limit: int = 0
) -> Facts:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MALLOC_", "LD_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{clean.get('PATH', '')}"
    given = {**clean, "PATH": path, **environ}
    with cgroup(limit) as made:
        words = [word.replace("{cgroup}", made) for word in words]
        return facts_of_command(words, given, cwd=folder, request=request, count=150, patience=90)


def look(facts: Facts) -> DoctorReport:
    return examine(facts, ignore=OF_THE_MACHINE)


def prepare(service: Service, folder: Path, port: int) -> tuple[list[str], dict[str, str]]:
    for module in service.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    named = f"{service.command}{service.environ}{service.files}"
    missing = [library for library in (JEMALLOC, MIMALLOC) if library in named and not Path(library).exists()]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    for name, text in service.files.items():
        (folder / name).write_text(text.replace("{port}", str(port)))
    fill = lambda text: text.replace("{port}", str(port)).replace("{folder}", str(folder))  # noqa: E731
    return [fill(word) for word in service.command], {name: fill(value) for name, value in service.environ.items()}


@pytest.mark.parametrize("service", [service for service in ILL if service.quick], ids=lambda service: service.name)
def test_what_is_wrong_is_found_and_its_fix_helps(service: Service, tmp_path: Path, port: int) -> None:
    """Exactly the known illness is found, and the line to paste makes it go away."""
    words, environ = prepare(service, tmp_path, port)
    facts = facts_of(words, environ, tmp_path, service.request, service.limit)
    report = look(facts)
    found = {finding.number for finding in report.findings}
    assert service.expected == found, f"{report}\n{facts}"
    if service.expected <= service.stays:
        assert "" == report.fix or "MG404" in found
        return
    fixed = ["sh", "-c", f"exec {report.fix}" if " && " not in report.fix else report.fix]
    assert shlex.split(report.fix)
    again = look(facts_of(fixed, environ, tmp_path, service.request))
    assert service.stays >= {finding.number for finding in again.findings}, f"{report.fix}\n{again}"


@pytest.mark.parametrize("service", [service for service in HEALTHY if service.quick], ids=lambda service: service.name)
def test_what_is_right_is_left_alone(service: Service, tmp_path: Path, port: int) -> None:
    """There is no finding."""
    words, environ = prepare(service, tmp_path, port)
    facts = facts_of(words, environ, tmp_path, service.request, service.limit)
    assert () == look(facts).findings, f"{facts}"


def grid() -> None:
    """Look at all of them once, and print how many were found and how many were accused."""
    right = {"ill": 0, "healthy": 0}
    for kind, services in (("ill", ILL), ("healthy", HEALTHY)):
        for service in services:
            with tempfile.TemporaryDirectory() as folder:
                words, environ = prepare(service, Path(folder), free_port())
                report = look(facts_of(words, environ, Path(folder), service.request, service.limit))
            found = {finding.number for finding in report.findings}
            as_expected = service.expected == found
            right[kind] += as_expected
            print("  " if as_expected else "!!", kind, service.name, *sorted(found), sep="  ", flush=True)  # noqa: T201
    print(f"{right['ill']} of {len(ILL)} faults found, {right['healthy']} of {len(HEALTHY)} healthy not accused")  # noqa: T201


if __name__ == "__main__":
    grid()
