"""Each check finds its problem, and reports nothing where all is well."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelguard.allocator import Problem
from modelguard.diagnosis import CHECKS, examine
from modelguard.diagnosis._facts import Facts, Interpreter, Machine, Moment, Server, ServiceProcess, Source, Variable
from modelguard.environment import _knobs
from modelguard.environment._cpus import Cpus
from modelguard.environment._limits import Limit

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
MB = 10**6

ONEDNN, IDEEP = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
TORCH = (("torch", "app.py line 3"),)
ROOMY = Machine(Cpus(64, "/sys/fs/cgroup/cpu.max"), 64, Limit(10**9, "memory.max", 1, None), 0)
PREFORK = Server("gunicorn", 4, "-w", forks=True, preload=True, preload_by="--preload")
COPIES = replace(PREFORK, preload=False)


def variable(name: str, value: str | None = "64", moment: Moment = "exec") -> Variable:
    return Variable(name, value, moment, "somewhere")


def caps(moment: Moment = "exec") -> tuple[Variable, ...]:
    return variable(ONEDNN, moment=moment), variable(IDEEP, moment=moment)


def app(**fields: Any) -> Source:
    return Source(**{"files": ("app.py",), "imports": TORCH, **fields})


def facts(**fields: Any) -> Facts:
    return Facts(**{"subject": "a service", "machine": ROOMY, **fields})


def found(facts: Facts) -> dict[str, str]:
    return {finding.number: finding.level for finding in examine(facts).findings}


def test_a_service_that_is_right() -> None:
    """Nothing is found where nothing is wrong."""
    right = facts(
        variables=(*caps(), variable("OMP_NUM_THREADS", "8"), variable("LD_PRELOAD", "/lib/libjemalloc.so.2")),
        interpreter=Interpreter((3, 12)),
        server=PREFORK,
        processes=(ServiceProcess(1, torch=True), ServiceProcess(2, "forked", private=900 * MB, torch=True)),
        app=app(freezes="app.py line 9"),
    )
    assert {} == found(right)


def test_nothing_known() -> None:
    """Without facts nothing is claimed."""
    assert {} == found(Facts("something"))


@pytest.mark.parametrize(
    ("number", "level", "fields"),
    [
        pytest.param("MG101", "fault", {"variables": (variable("LD_PRELOAD", "x.so", "server"),)}, id="raw_env"),
        pytest.param("MG101", "fault", {"variables": (variable("LD_PRELOAD", None, "later"),)}, id="in a function"),
        pytest.param("MG101", "fault", {"problems": (Problem("placebo", "seen", "fix"),)}, id="seen by the allocator"),
        pytest.param("MG102", "fault", {"problems": (Problem("missing", "seen", "fix"),)}, id="no such file"),
        pytest.param(
            "MG103",
            "fault",
            {"problems": (Problem("background threads", "seen", "fix"),), "server": PREFORK},
            id="threads that run",
        ),
        pytest.param(
            "MG103",
            "fault",
            {
                "variables": (
                    variable("LD_PRELOAD", "/lib/libjemalloc.so.2"),
                    variable("MALLOC_CONF", "background_thread:true"),
                ),
                "server": COPIES,
            },
            id="threads that will run",
        ),
        pytest.param("MG104", "fault", {"variables": (variable("MALLOC_ARENA_MAX", "2", "app"),)}, id="too late"),
        pytest.param("MG105", "note", {"problems": (Problem("unused setting", "seen", "fix"),)}, id="no jemalloc"),
        pytest.param("MG106", "note", {"problems": (Problem("private copy", "seen", "fix"),)}, id="a wheel's own"),
        pytest.param("MG106", "fault", {"problems": (Problem("two allocators", "seen", "fix"),)}, id="two preloaded"),
        pytest.param("MG201", "fault", {"variables": (variable(ONEDNN),)}, id="oneDNN's alone"),
        pytest.param("MG201", "fault", {"variables": (variable(IDEEP, None),)}, id="ideep's alone"),
        pytest.param(
            "MG202",
            "fault",
            {"variables": (variable("OMP_NUM_THREADS", "1", "after import"),)},
            id="threads after the import",
        ),
        pytest.param(
            "MG202",
            "fault",
            {"variables": caps("later"), "processes": (ServiceProcess(7, torch=True, compiled=262 * MB),)},
            id="caps after the first use",
        ),
        pytest.param("MG203", "fault", {"app": app()}, id="torch is imported"),
        pytest.param("MG203", "note", {"processes": (ServiceProcess(7, torch=True),)}, id="torch runs, source unknown"),
        pytest.param(
            "MG203",
            "fault",
            {"processes": (ServiceProcess(7, torch=True, compiled=90 * MB),)},
            id="torch runs, and has grown",
        ),
        pytest.param(
            "MG204",
            "fault",
            {"variables": (*caps(), variable("OMP_NUM_THREADS", "32")), "app": app(freezes="x"), "server": PREFORK},
            id="4 x 32 on 64",
        ),
        pytest.param(
            "MG204",
            "fault",
            {"variables": caps(), "app": app(), "machine": replace(ROOMY, cpus=Cpus(1.5, "quota"))},
            id="the default ignores the quota",
        ),
        pytest.param(
            "MG204",
            "fault",
            {"variables": caps(), "app": app(threads=65, threads_by="app.py line 4")},
            id="torch.set_num_threads",
        ),
        pytest.param(
            "MG204",
            "note",
            {
                "variables": (*caps(), variable("OMP_NUM_THREADS", "1")),
                "app": app(freezes="x"),
                "server": replace(PREFORK, workers=65),
            },
            id="more workers than CPUs",
        ),
        pytest.param("MG205", "fault", {"variables": (variable(ONEDNN, "0"), variable(IDEEP, "0"))}, id="a cap of 0"),
        pytest.param(
            "MG301", "note", {"machine": replace(ROOMY, limit=Limit(None, None, None, None))}, id="no memory limit"
        ),
        pytest.param("MG302", "fault", {"processes": (ServiceProcess(7, swap=50 * MB),)}, id="the service is swapped"),
        pytest.param("MG302", "note", {"machine": replace(ROOMY, swapped=50 * MB)}, id="the machine swaps"),
        pytest.param(
            "MG401", "fault", {"variables": caps(), "server": PREFORK, "app": app(threads=1)}, id="preload, no freeze"
        ),
        pytest.param(
            "MG402", "fault", {"variables": caps(), "server": COPIES, "app": app(threads=1)}, id="four copies planned"
        ),
        pytest.param(
            "MG402",
            "fault",
            {
                "server": COPIES,
                "processes": (
                    ServiceProcess(1),
                    ServiceProcess(2, "forked", private=300 * MB),
                    ServiceProcess(3, "forked", private=300 * MB),
                ),
            },
            id="two copies measured",
        ),
        pytest.param(
            "MG403",
            "fault",
            {
                "variables": caps(),
                "server": replace(COPIES, workers=1, max_requests=500),
                "app": app(reloads="app.py line 8"),
            },
            id="recycled and reloaded",
        ),
        pytest.param(
            "MG404",
            "fault",
            {"variables": caps(), "server": Server("uvicorn", 2, "--workers"), "app": app(threads=1)},
            id="uvicorn --workers",
        ),
        pytest.param(
            "MG405",
            "fault",
            {"server": PREFORK, "processes": (ServiceProcess(1, cuda=True), ServiceProcess(2, "forked"))},
            id="the master holds a GPU",
        ),
        pytest.param(
            "MG405",
            "fault",
            {
                "server": PREFORK,
                "app": app(cuda="app.py line 5", freezes="x", threads=1),
                "machine": replace(ROOMY, cuda=True),
            },
            id="the source names a GPU",
        ),
        pytest.param(
            "MG501",
            "note",
            {
                "variables": caps(),
                "server": PREFORK,
                "interpreter": Interpreter((3, 11)),
                "app": app(freezes="x", threads=1),
            },
            id="before 3.12",
        ),
        pytest.param(
            "MG501",
            "note",
            {
                "variables": caps(),
                "server": PREFORK,
                "interpreter": Interpreter((3, 13), free_threaded=True),
                "app": app(freezes="x", threads=1),
            },
            id="free-threaded",
        ),
        pytest.param("MG502", "note", {"interpreter": Interpreter((3, 14), micro=0)}, id="3.14.0"),
        pytest.param("MG502", "note", {"interpreter": Interpreter((3, 14), micro=4)}, id="3.14.4"),
    ],
)
def test_what_is_wrong_is_found(number: str, level: str, fields: dict[str, Any]) -> None:
    """The check of this number finds it, and no other check does."""
    assert {number: level} == found(facts(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {"variables": (variable("LD_PRELOAD", "x.so"), variable("LD_PRELOAD", "x.so", "server"))},
            id="set again to what it was",
        ),
        pytest.param({"problems": (Problem("background threads", "seen", "fix"),)}, id="threads without a fork"),
        pytest.param(
            {"variables": (variable("MALLOC_CONF", "background_thread:true"),), "server": COPIES},
            id="MALLOC_CONF without jemalloc",
        ),
        pytest.param(
            {"variables": (variable("DNNL_PRIMITIVE_CACHE_CAPACITY"), variable(IDEEP)), "app": app()},
            id="oneDNN's older name",
        ),
        pytest.param({"variables": caps("app"), "app": app()}, id="caps set by the app in time"),
        pytest.param({"app": app(applies="app.py line 2")}, id="a preset whose name is computed"),
        pytest.param({"app": app(), "machine": replace(ROOMY, cuda=True)}, id="it may run on a GPU"),
        pytest.param({"processes": (ServiceProcess(1, torch=True, cuda=True),)}, id="it runs on a GPU"),
        pytest.param({"app": Source(("app.py",), (("flask", "app.py line 1"),)), "server": COPIES}, id="no model"),
        pytest.param(
            {"variables": (variable("OMP_NUM_THREADS", "1"), variable("OMP_NUM_THREADS", "1", "after import"))},
            id="set in time, and again",
        ),
        pytest.param(
            {"variables": caps("app"), "processes": (ServiceProcess(7, torch=True, compiled=90 * MB),)},
            id="as much code as the caps allow",
        ),
        pytest.param(
            {"server": replace(COPIES, workers=None), "app": app(), "variables": caps()}, id="workers unknown"
        ),
        pytest.param(
            {"server": replace(PREFORK, preload=None), "app": app(threads=1), "variables": caps()}, id="preload unknown"
        ),
        pytest.param({"server": PREFORK}, id="source unknown"),
        pytest.param({"interpreter": Interpreter((3, 14), micro=5)}, id="3.14.5"),
        pytest.param({"interpreter": Interpreter((3, 14))}, id="3.14 of unknown patch"),
        pytest.param({"interpreter": Interpreter((3, 14), free_threaded=True, micro=1)}, id="another collector"),
        pytest.param({"interpreter": Interpreter((3, 13), micro=1)}, id="3.13.1"),
        pytest.param(
            {
                "variables": caps(),
                "server": COPIES,
                "app": app(threads=1),
                "processes": (
                    ServiceProcess(1),
                    ServiceProcess(2, "forked", private=40 * MB),
                    ServiceProcess(3, "forked", private=40 * MB),
                ),
            },
            id="workers that hold little",
        ),
        pytest.param(
            {"variables": caps(), "server": replace(COPIES, workers=1, max_requests=500), "app": app()},
            id="recycled alone",
        ),
        pytest.param(
            {"server": PREFORK, "app": app(cuda="app.py line 5", freezes="x", threads=1), "variables": caps()},
            id="the source names a GPU that is not there",
        ),
        pytest.param(
            {"processes": (ServiceProcess(1, swap=4096),), "machine": replace(ROOMY, swapped=10**9)}, id="a page"
        ),
    ],
)
def test_what_is_right_or_unknown_is_not_claimed(fields: dict[str, Any]) -> None:
    """No check reports correct settings, or settings that could not be seen."""
    assert {} == found(facts(**fields))


def test_numbers_are_unique_and_in_order() -> None:
    """Each number belongs to one check."""
    numbers = [check.number for check in CHECKS]
    assert sorted(set(numbers)) == numbers


def test_every_finding_has_its_page() -> None:
    """docs/doctor.md has a section for each number, with the title that the doctor prints."""
    sections = dict(re.findall(r"^### (MG\d+)\n\n\*\*(.+?)\*\*", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert {check.number: f"{check.title}." for check in CHECKS} == sections


def test_a_finding_says_what_to_do() -> None:
    """It has evidence, a reason, a fix and a page."""
    finding = examine(facts(app=app())).findings[0]
    assert "modelguard docs doctor#mg203" == finding.page
    assert finding.seen[0] == "app.py line 3 imports torch"
    assert "modelguard run --preset torch-cpu-dynamic" in finding.fix
    assert finding.why


def test_the_fix_for_threads_names_the_share() -> None:
    """Four workers on six and a half CPUs get one thread each."""
    machine = replace(ROOMY, cpus=Cpus(6.5, "/sys/fs/cgroup/cpu.max"))
    report = examine(facts(app=app(freezes="x"), variables=caps(), server=PREFORK, machine=machine))
    assert "--workers 4 -- COMMAND (OMP_NUM_THREADS=1)" in report.findings[0].fix
    assert "on 6.5 CPU(s) (/sys/fs/cgroup/cpu.max)" in report.findings[0].seen[0]


def test_no_fix_leads_into_a_crash() -> None:
    """Beside a oneDNN cache of 0, which is harmless, the fix for ideep is 1, since 0 crashes the process."""
    (finding,) = [
        one for one in examine(Facts("x", variables=(variable(ONEDNN, "0"),))).findings if one.number == "MG201"
    ]
    assert f"Also set {IDEEP}=1" in finding.fix


@pytest.mark.parametrize("value", ["", "0", "00", " 0", "abc", "0x10"])
def test_every_notation_of_a_crash(value: str) -> None:
    """What ideep reads as 0 is found however it is written, and no fix for the other cache repeats it."""
    assert "MG205" in found(Facts("x", variables=(variable(ONEDNN, "64"), variable(IDEEP, value))))
    (finding,) = [
        one for one in examine(Facts("x", variables=(variable(IDEEP, value),))).findings if one.number == "MG201"
    ]
    assert f"Also set {ONEDNN}={_knobs.DEFAULT_ENTRIES}, or" in finding.fix


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("", _knobs.DEFAULT_ENTRIES),
        ("abc", 1),
        ("0x10", 1),
        ("12abc", 12),
        ("-1", _knobs.DEFAULT_ENTRIES),
        ("0" * 20, _knobs.DEFAULT_ENTRIES),
    ],
)
def test_the_fix_is_what_the_other_value_means(value: str, fix: int) -> None:
    """The fix for ideep has a number that ideep can use, whatever oneDNN's variable has."""
    (finding,) = [
        one for one in examine(Facts("x", variables=(variable(ONEDNN, value),))).findings if one.number == "MG201"
    ]
    assert f"Also set {IDEEP}={fix}, or" in finding.fix


@pytest.mark.parametrize("value", ["1", "64", None])
def test_room_for_one_is_no_crash(value: str | None) -> None:
    """Only a cap of 0 for ideep is fatal."""
    assert "MG205" not in found(Facts("x", variables=(variable(ONEDNN, "64"), variable(IDEEP, value))))
