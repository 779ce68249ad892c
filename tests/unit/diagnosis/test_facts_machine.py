"""This machine and this environment, from files only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelguard.diagnosis import examine
from modelguard.diagnosis._facts import Machine
from modelguard.diagnosis._facts_process import facts_of_machine, machine, this_interpreter
from modelguard.facts._proc import Interpreter


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text("Name:\tpython\nCpus_allowed_list:\t0-3,32-39\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nSwapTotal: 100000 kB\nSwapFree: 40000 kB\n")
    return tmp_path


def test_what_the_machine_offers(root: Path) -> None:
    """CPUs follow the affinity, swap is what is not free, and without a cgroup there is no limit."""
    found = machine(root)
    assert found.cpus is not None
    assert (12, 60_000 * 1024) == (found.cpus.count, found.swapped)
    assert found.limit is not None
    assert None is found.limit.bytes


def test_an_empty_proc(tmp_path: Path) -> None:
    """What cannot be read is unknown, and nothing is raised."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    assert None is machine(tmp_path).swapped


def test_no_proc_at_all(tmp_path: Path) -> None:
    """On other systems a limit would not show, so none is reported."""
    assert Machine(None, None) == Machine(limit=machine(tmp_path).limit)


def test_this_environment(root: Path) -> None:
    """Its variables are examined, and only those that modelguard knows are kept."""
    facts = facts_of_machine({"LRU_CACHE_CAPACITY": "8", "API_KEY": "hunter2"}, root=root)
    assert "hunter2" not in repr(facts)
    assert {"MG201", "MG301", "MG302"} <= {finding.number for finding in examine(facts).findings}


def test_the_real_environment() -> None:
    """Every machine can be examined."""
    report = examine(facts_of_machine())
    assert report.checks >= 18
    assert isinstance(this_interpreter(), Interpreter)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MALLOC_TRIM_THRESHOLD", "MALLOC_TRIM_THRESHOLD_"),
        ("MALLOC_ARENAS_MAX", "MALLOC_ARENA_MAX"),
        ("OMP_NUM_THREAD", "OMP_NUM_THREADS"),
        ("OPM_NUM_THREADS", "OMP_NUM_THREADS"),
        ("MALOC_CONF", "MALLOC_CONF"),
        ("PYTHONMALOC", "PYTHONMALLOC"),
        ("MIMALLOC_PURGE_DELAYS", "MIMALLOC_PURGE_DELAY"),
        ("ONEDNN_PRIMITIVE_CAHCE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"),
        ("MODELGUARD_IMORTALIZE", "MODELGUARD_IMMORTALIZE"),
        ("TCMALLOC_RELEASE_RATES", "TCMALLOC_RELEASE_RATE"),
    ],
)
def test_misspelt_names(name: str, meant: str) -> None:
    """They are found with the name that is meant, and their value is kept only if it is a number."""
    for value, kept in (("64", "64"), ("a secret", "")):
        (found,) = facts_of_machine({name: value}).misspelt
        assert (name, meant, kept) == (found.name, found.meant, found.value)


OTHERS = (
    "APP_NUM_THREADS NM_NUM_THREADS MP_NUM_THREADS BLIS_NUM_THREADS PYTHONPATH2 PYTHONPATH_OLD MALLOC_CHECK_ "
    "OMP_PLACES PYTHON_VERSION PYTHON_PIP_VERSION MODEL_CONF TORCH_HOME MKL_ROOT PATH HOME DNNL_VERBOSE "
    "PYTORCH_VERSION PYTHON_EXECUTABLE PYTHON_HOME PYTHON_PATH"
)


@pytest.mark.parametrize("name", OTHERS.split())
def test_names_of_other_programs(name: str) -> None:
    """They are nobody's mistake."""
    assert () == facts_of_machine({name: "1"}).misspelt


def test_a_misspelt_name_beside_the_right_one() -> None:
    """It does no harm."""
    assert () == facts_of_machine({"OMP_NUM_THREAD": "1", "OMP_NUM_THREADS": "1"}).misspelt


@pytest.mark.skipif(sys.platform != "linux", reason="there is no LD_PRELOAD elsewhere")
def test_a_preload_among_the_variables_that_are_given() -> None:
    """What they name is looked for, as if this process had them."""
    found = examine(facts_of_machine({"LD_PRELOAD": "/nowhere/libjemalloc.so"})).findings
    assert "MG102" in {finding.number for finding in found}
