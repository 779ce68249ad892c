"""Each check finds its problem, and reports nothing where all is well."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelguard.allocator import Problem
from modelguard.diagnosis import CHECKS, examine
from modelguard.diagnosis._facts import (
    Facts,
    Guarded,
    Inside,
    Machine,
    Moment,
    Server,
    ServiceProcess,
    Variable,
)
from modelguard.environment import _knobs
from modelguard.facts._memory import Cpus, Limit, Strain
from modelguard.facts._proc import Interpreter

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"
MB = 10**6

ONEDNN, IDEEP = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"
ROOMY = Machine(Cpus(64, "/sys/fs/cgroup/cpu.max"), Limit(10**9, "memory.max", 1, None), 0)
PREFORK = Server("gunicorn", 2, forks=True, preload=True, worker_class="sync", max_requests=0)
COPIES = replace(PREFORK, preload=False)
TORCH = ServiceProcess(7, torch=True)
HEAP = Inside(tracked=600_000)
HEAVY = (
    ServiceProcess(1),
    ServiceProcess(2, "forked", private=300 * MB),
    ServiceProcess(3, "forked", private=300 * MB),
)


def variable(name: str, value: str = "64", moment: Moment = "exec") -> Variable:
    return Variable(name, value, moment, "somewhere")


def caps(moment: Moment = "exec") -> tuple[Variable, ...]:
    return variable(ONEDNN, moment=moment), variable(IDEEP, moment=moment)


def facts(**fields: Any) -> Facts:
    return Facts(**{"subject": "a service", "machine": ROOMY, **fields})


def found(facts: Facts) -> dict[str, str]:
    return {finding.number: finding.level for finding in examine(facts).findings}


def forks(master: Inside = HEAP, **fields: Any) -> tuple[ServiceProcess, ...]:
    """A master that has said this of itself, and a worker."""
    return ServiceProcess(1, inside=master), ServiceProcess(2, "forked", **fields)


def pool(threads: int, library: str = "torch") -> Inside:
    return Inside(pools=((library, threads),))


def test_a_service_that_is_right() -> None:
    """Nothing is found where nothing is wrong."""
    right = facts(
        variables=(*caps(), variable("OMP_NUM_THREADS", "8"), variable("LD_PRELOAD", "/lib/libjemalloc.so.2")),
        interpreter=Interpreter((3, 12)),
        server=PREFORK,
        processes=(
            ServiceProcess(1, torch=True, inside=replace(HEAP, frozen=600_000, tracked=9)),
            ServiceProcess(2, "forked", private=900 * MB, torch=True, inside=pool(8)),
        ),
    )
    assert {} == found(right)


def test_an_owner_that_may_use_its_libraries() -> None:
    """One with a model of its own, one without such a library, and one without molds."""
    loaded = Inside(guards=(Guarded("nlp", load_seconds=2.0),))
    for process in (
        ServiceProcess(1, libraries=("spacy",), isolates=True, inside=loaded),
        ServiceProcess(1, isolates=True),
        ServiceProcess(1, libraries=("spacy",)),
    ):
        assert {} == found(facts(processes=(process,)))


def test_nothing_known() -> None:
    """Without facts nothing is claimed."""
    assert {} == found(Facts("something"))


@pytest.mark.parametrize(
    ("number", "level", "fields"),
    [
        pytest.param("MG101", "fault", {"variables": (variable("LD_PRELOAD", "x.so", "app"),)}, id="set later"),
        pytest.param("MG101", "fault", {"problems": (Problem("placebo", "seen", "fix"),)}, id="seen by the allocator"),
        pytest.param("MG102", "fault", {"problems": (Problem("missing", "seen", "fix"),)}, id="no such file"),
        pytest.param(
            "MG103",
            "fault",
            {"problems": (Problem("background threads", "seen", "fix"),), "processes": forks(Inside())},
            id="threads that run",
        ),
        pytest.param("MG104", "fault", {"variables": (variable("MALLOC_ARENA_MAX", "2", "app"),)}, id="too late"),
        pytest.param("MG105", "note", {"problems": (Problem("unused setting", "seen", "fix"),)}, id="no jemalloc"),
        pytest.param("MG106", "note", {"problems": (Problem("private copy", "seen", "fix"),)}, id="a wheel's own"),
        pytest.param("MG106", "fault", {"problems": (Problem("two allocators", "seen", "fix"),)}, id="two preloaded"),
        pytest.param(
            "MG107",
            "note",
            {
                "variables": (variable("MALLOC_ARENA_MAX", "2"),),
                "processes": (ServiceProcess(1, inside=Inside(malloc="/lib/libjemalloc.so.2")),),
            },
            id="settings of glibc under jemalloc",
        ),
        pytest.param("MG201", "fault", {"variables": (variable(ONEDNN),)}, id="oneDNN's alone"),
        pytest.param("MG201", "fault", {"variables": (variable(IDEEP),), "processes": (TORCH,)}, id="ideep's alone"),
        pytest.param(
            "MG202",
            "fault",
            {
                "variables": (variable("OMP_NUM_THREADS", "1", "after import"),),
                "processes": (ServiceProcess(1, inside=pool(8)),),
            },
            id="threads after the import",
        ),
        pytest.param(
            "MG202",
            "fault",
            {"variables": caps("after import"), "processes": (replace(TORCH, compiled=12 * MB),)},
            id="caps after the first use",
        ),
        pytest.param("MG203", "fault", {"processes": (replace(TORCH, compiled=3 * MB),)}, id="torch has grown"),
        pytest.param(
            "MG204",
            "fault",
            {
                "processes": (
                    ServiceProcess(1),
                    *(ServiceProcess(pid, "forked", inside=pool(32)) for pid in (2, 3, 4)),
                )
            },
            id="3 x 32 on 64",
        ),
        pytest.param(
            "MG204",
            "note",
            {"processes": (ServiceProcess(1, inside=pool(65, "libscipy_openblas64_.so")),)},
            id="a pool of BLAS, which may be idle",
        ),
        pytest.param("MG205", "fault", {"variables": (variable(ONEDNN, "0"), variable(IDEEP, "0"))}, id="a cap of 0"),
        pytest.param(
            "MG301", "note", {"machine": replace(ROOMY, limit=Limit(None, None, None, None))}, id="no memory limit"
        ),
        pytest.param("MG302", "fault", {"processes": (ServiceProcess(7, swap=50 * MB),)}, id="the service is swapped"),
        pytest.param("MG302", "note", {"machine": replace(ROOMY, swapped=50 * MB)}, id="the machine swaps"),
        pytest.param(
            "MG303",
            "fault",
            {"variables": (variable("PROMETHEUS_MULTIPROC_DIR", "/m"),), "stale_metrics": ("counter_9.db",)},
            id="files of ended processes",
        ),
        pytest.param("MG401", "fault", {"server": PREFORK, "processes": forks()}, id="preload, no freeze"),
        pytest.param(
            "MG401",
            "fault",
            {"server": PREFORK, "processes": forks(replace(HEAP, frozen=375))},
            id="preload, frozen by 3.12 itself",
        ),
        pytest.param("MG402", "fault", {"server": COPIES, "processes": HEAVY}, id="two copies"),
        pytest.param(
            "MG402", "fault", {"server": Server("gunicorn", 2, forks=True), "processes": HEAVY}, id="from outside"
        ),
        pytest.param(
            "MG403",
            "fault",
            {
                "server": replace(COPIES, workers=1, max_requests=500),
                "processes": (ServiceProcess(1, inside=Inside(guards=(Guarded("nlp", "Uses(9)"),))),),
            },
            id="recycled and reloaded",
        ),
        pytest.param(
            "MG404",
            "fault",
            {"server": Server("uvicorn", 2), "processes": tuple(replace(each, role="spawned") for each in HEAVY)},
            id="uvicorn --workers",
        ),
        pytest.param(
            "MG405",
            "fault",
            {"server": PREFORK, "processes": (ServiceProcess(1, cuda=True), ServiceProcess(2, "forked"))},
            id="the master holds a GPU",
        ),
        pytest.param(
            "MG405", "fault", {"server": PREFORK, "processes": forks(Inside(cuda=True))}, id="the master has used CUDA"
        ),
        pytest.param(
            "MG406", "fault", {"server": COPIES, "processes": (ServiceProcess(1, inside=Inside(asgi=True)),)}, id="ASGI"
        ),
        pytest.param("MG407", "fault", {"server": replace(COPIES, max_requests=500)}, id="in step"),
        pytest.param("MG408", "fault", {"server": Server("uvicorn", reload=True)}, id="--reload"),
        pytest.param(
            "MG409",
            "fault",
            {
                "server": replace(COPIES, workers=1, worker_class="sync", timeout=30.0, grace=60.0),
                "processes": (ServiceProcess(1, inside=Inside(guards=(Guarded("nlp", "Uses(9)", 31.0),))),),
            },
            id="a load longer than the timeout",
        ),
        pytest.param(
            "MG409",
            "note",
            {
                "server": replace(COPIES, workers=1, worker_class="gthread", timeout=30.0, grace=30.0),
                "processes": (ServiceProcess(1, inside=Inside(guards=(Guarded("nlp", "Uses(9)", 31.0),))),),
            },
            id="a load longer than the grace",
        ),
        pytest.param(
            "MG501",
            "note",
            {
                "server": PREFORK,
                "interpreter": Interpreter((3, 11)),
                "processes": forks(replace(HEAP, frozen=600_000, tracked=0)),
            },
            id="before 3.12",
        ),
        pytest.param(
            "MG501",
            "note",
            {
                "server": PREFORK,
                "interpreter": Interpreter((3, 13), free_threaded=True),
                "processes": forks(replace(HEAP, frozen=600_000, tracked=0)),
            },
            id="free-threaded",
        ),
        pytest.param("MG502", "note", {"interpreter": Interpreter((3, 14), micro=0)}, id="3.14.0"),
        pytest.param("MG502", "note", {"interpreter": Interpreter((3, 14), micro=4)}, id="3.14.4"),
        pytest.param(
            "MG503",
            "fault",
            {
                "variables": (variable("PYTHON_PYMALLOC_HUGEPAGES", "1"),),
                "processes": forks(Inside(), inside=Inside(huge_pages=True)),
            },
            id="huge pages",
        ),
        pytest.param(
            "MG108",
            "fault",
            {"misspelt": (Variable("MALLOC_ARENAS_MAX", "2", "exec", "here", "MALLOC_ARENA_MAX"),)},
            id="a misspelt name",
        ),
        pytest.param("MG109", "fault", {"variables": (variable("OMP_NUM_THREADS", "two"),)}, id="a word for a number"),
        pytest.param("MG110", "note", {"server": replace(COPIES, workers=1, threads=32)}, id="32 threads"),
        pytest.param("MG504", "fault", {"variables": (variable("PYTHONMALLOC", "debug"),)}, id="debug checks"),
        pytest.param("MG504", "fault", {"variables": (variable("PYTHONDEVMODE", "1"),)}, id="the development mode"),
        pytest.param(
            "MG505", "fault", {"processes": (ServiceProcess(1, inside=Inside(gil_for=("old",))),)}, id="the GIL is back"
        ),
        pytest.param(
            "MG505", "fault", {"processes": (ServiceProcess(1, inside=Inside(gil_for=())),)}, id="for an unknown module"
        ),
        pytest.param(
            "MG304", "note", {"machine": replace(ROOMY, strain=Strain(killed=2))}, id="whose it was, is unknown"
        ),
        pytest.param(
            "MG304",
            "fault",
            {"machine": replace(ROOMY, strain=Strain(killed=2)), "processes": (ServiceProcess(1),)},
            id="killed for want of memory",
        ),
        pytest.param(
            "MG304",
            "fault",
            {"machine": Machine(strain=Strain(killed=2)), "words": ("python", "app.py")},
            id="killed while a command was examined",
        ),
        pytest.param(
            "MG305",
            "fault",
            {"machine": replace(ROOMY, strain=Strain(held=950 * MB)), "processes": (ServiceProcess(1),)},
            id="close to the limit",
        ),
        pytest.param(
            "MG410",
            "fault",
            {
                "server": COPIES,
                "processes": forks(Inside(), inside=Inside(guards=(Guarded("nlp", unshared=True),))),
            },
            id="prefork=True without the hook",
        ),
        pytest.param(
            "MG411",
            "note",
            {"processes": (ServiceProcess(1, private=386 * MB, libraries=("spacy", "torch"), isolates=True),)},
            id="libraries beside a mold",
        ),
    ],
)
def test_what_is_wrong_is_found(number: str, level: str, fields: dict[str, Any]) -> None:
    """The check of this number finds it, and no other check does."""
    assert {number: level} == found(facts(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {"variables": (variable("LD_PRELOAD", "x.so"), variable("LD_PRELOAD", "x.so", "app"))},
            id="set again to what it was",
        ),
        pytest.param(
            {
                "variables": (variable("LD_PRELOAD", "/usr/lib/libjemalloc.so.2", "app"),),
                "processes": (ServiceProcess(1, inside=Inside(malloc="/lib/libjemalloc.so.2")),),
            },
            id="set later to the allocator that serves already",
        ),
        pytest.param({"problems": (Problem("background threads", "seen", "fix"),)}, id="threads without a fork"),
        pytest.param(
            {"variables": (variable(ONEDNN),), "processes": (ServiceProcess(1),)}, id="a cap where torch does not run"
        ),
        pytest.param(
            {"variables": (variable("DNNL_PRIMITIVE_CACHE_CAPACITY"), variable(IDEEP)), "processes": (TORCH,)},
            id="oneDNN's older name",
        ),
        pytest.param({"processes": (replace(TORCH, compiled=MB),)}, id="torch with few shapes"),
        pytest.param(
            {"variables": caps("app"), "processes": (replace(TORCH, compiled=8 * MB),)},
            id="as much code as the caps allow",
        ),
        pytest.param(
            {
                "variables": (variable("OMP_NUM_THREADS", "1", "after import"),),
                "processes": (ServiceProcess(1, inside=pool(1)),),
            },
            id="set late, and made up for",
        ),
        pytest.param({"processes": (ServiceProcess(1, inside=pool(64)),)}, id="a thread for each CPU"),
        pytest.param({"server": PREFORK, "processes": HEAVY}, id="private memory after a preload has another cause"),
        pytest.param(
            {
                "server": Server("gunicorn", 2, forks=True),
                "processes": (replace(HEAVY[0], private=400 * MB), *HEAVY[1:]),
            },
            id="from outside, a master that holds it too",
        ),
        pytest.param({"server": PREFORK, "processes": forks(Inside(tracked=30_000))}, id="a small heap"),
        pytest.param({"server": COPIES, "processes": forks()}, id="no preload"),
        pytest.param({"server": COPIES, "processes": HEAVY[:2]}, id="one worker"),
        pytest.param({"server": replace(COPIES, max_requests=500, jitter=50)}, id="a jitter"),
        pytest.param(
            {
                "server": replace(COPIES, workers=1, max_requests=500),
                "processes": (ServiceProcess(1, inside=Inside(guards=(Guarded("nlp"),))),),
            },
            id="recycled, and a guard without a policy",
        ),
        pytest.param(
            {
                "server": replace(COPIES, worker_class="asgi"),
                "processes": (ServiceProcess(1, inside=Inside(asgi=True)),),
            },
            id="an ASGI worker",
        ),
        pytest.param(
            {
                "server": replace(COPIES, threads=32),
                "variables": (variable("GLIBC_TUNABLES", "glibc.malloc.arena_max=2"),),
            },
            id="32 threads with two arenas",
        ),
        pytest.param(
            {
                "server": replace(COPIES, workers=1, threads=32),
                "processes": (ServiceProcess(1, inside=Inside(malloc="/lib/libjemalloc.so.2")),),
            },
            id="32 threads with jemalloc",
        ),
        pytest.param({"variables": (variable("PYTHONMALLOC", "malloc"),)}, id="small objects by malloc"),
        pytest.param(
            {"variables": (variable("PYTHONDEVMODE", "1"), variable("PYTHONMALLOC", "malloc"))},
            id="the development mode without debug checks",
        ),
        pytest.param(
            {"machine": replace(ROOMY, strain=Strain(killed=0, held=800 * MB, peak=10**9))}, id="a peak of file cache"
        ),
        pytest.param(
            {
                "server": replace(COPIES, workers=1),
                "processes": (ServiceProcess(1, inside=Inside(guards=(Guarded("nlp", unshared=True),))),),
            },
            id="one worker has nothing to share",
        ),
        pytest.param({"interpreter": Interpreter((3, 14), micro=5)}, id="3.14.5"),
        pytest.param({"interpreter": Interpreter((3, 14))}, id="3.14 of unknown patch"),
        pytest.param({"interpreter": Interpreter((3, 14), free_threaded=True, micro=1)}, id="another collector"),
        pytest.param({"interpreter": Interpreter((3, 13), micro=1)}, id="3.13.1"),
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
    """It has evidence in written bytes, a reason, a fix and a page."""
    finding = examine(facts(processes=(replace(TORCH, compiled=5 * MB, grown=40 * MB),))).findings[0]
    assert "modelguard docs doctor#mg203" == finding.page
    assert finding.seen[:2] == (
        "process 7 runs torch and has written 5 MB of machine code compiled at run time",
        "process 7 has grown by 40 MB during the requests",
    )
    assert "modelguard run --preset torch-cpu-dynamic" in finding.fix
    assert finding.why


def test_the_fix_for_threads_names_the_share() -> None:
    """Four workers on six and a half CPUs get one thread each."""
    machine = replace(ROOMY, cpus=Cpus(6.5, "/sys/fs/cgroup/cpu.max"))
    workers = tuple(ServiceProcess(pid, "forked", inside=pool(6)) for pid in range(4))
    (finding,) = examine(facts(processes=(ServiceProcess(9), *workers), machine=machine)).findings
    assert "OMP_NUM_THREADS=1" in finding.fix
    assert "on 6.5 CPU(s) (/sys/fs/cgroup/cpu.max)" in finding.seen[0]


def test_no_fix_leads_into_a_crash() -> None:
    """Beside a oneDNN cache of 0, which is harmless, the fix for ideep is 1, since 0 crashes the process."""
    (finding,) = [
        one for one in examine(Facts("x", variables=(variable(ONEDNN, "0"),))).findings if one.number == "MG201"
    ]
    assert f"Also set {IDEEP}=1" in finding.fix


@pytest.mark.parametrize("value", ["1", "64"])
def test_room_for_one_is_no_crash(value: str) -> None:
    """Only a cap of 0 for ideep is fatal."""
    assert "MG205" not in found(Facts("x", variables=(variable(ONEDNN, "64"), variable(IDEEP, value))))


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
