"""A running service is read from /proc only."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from modelguard.diagnosis import examine
from modelguard.diagnosis._doctor_report import as_json, as_text
from modelguard.diagnosis._facts import Facts, Guarded, Variable
from modelguard.diagnosis._facts_process import facts_of_process, facts_of_tree
from modelguard.environment import _allocator_problems
from modelguard.errors import InvalidOption, NotSupported
from modelguard.facts._proc import Interpreter

LIBRARIES = "7f00-7f10 r-xp 00000000 08:01 11 /usr/lib/libc.so.6\n"
PYTHON = "7f20-7f30 r-xp 00000000 08:01 12 /usr/lib/libpython3.12.so.1.0\n"
TORCH = "7f40-7f50 r-xp 00000000 08:01 13 /venv/torch/lib/libtorch_cpu.so\n"
#: Machine code that comes from no file, 80 MB of addresses of which 5 MB are written; and what the kernel itself maps.
COMPILED = (
    "10000000-14c4b400 rwxp 00000000 00:00 0 \nPrivate_Dirty: 5000 kB\nShared_Dirty: 0 kB\n"
    "7fff0000-7fff2000 r-xp 00000000 00:00 0                 [vdso]\n"
)
NVIDIA = "7f60-7f70 rw-s 00000000 00:06 14 /dev/nvidiactl\n"


class Machine:
    """A tree of ``/proc`` below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc" / "self").mkdir(parents=True)
        for name, text in {"smaps": "", "smaps_rollup": "", "cgroup": "0::/", "mountinfo": "", "status": ""}.items():
            (root / "proc" / "self" / name).write_text(text)
        (root / "proc" / "meminfo").write_text("SwapTotal: 1000 kB\nSwapFree: 1000 kB\n")

    def process(
        self,
        pid: int,
        *words: str,
        parent: int = 1,
        environ: str = "",
        private: int = 0,
        swap: int = 0,
        maps: str = "",
    ) -> None:
        folder = self.root / "proc" / str(pid)
        folder.mkdir()
        rollup = f"1-2 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPrivate_Dirty: {private} kB\nShared_Dirty: 7 kB\n"
        rollup += f"Swap: {swap} kB\n"
        files = {
            "cmdline": "".join(f"{word}\0" for word in words),
            "environ": environ,
            "maps": LIBRARIES + PYTHON + maps,
            "smaps": LIBRARIES + PYTHON + maps,
            "smaps_rollup": rollup,
            "stat": f"{pid} (a (strange) name) S {parent} {' '.join(['0'] * 48)}",
            "status": f"Name:\tpython\nThreads:\t3\nVmSwap:\t{swap} kB\nCpus_allowed_list:\t0-1\n",
            "cgroup": "0::/",
        }
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / "root").symlink_to(self.root)

    def facts(self, pid: str | int = 10) -> Facts:
        return facts_of_process(pid, root=self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


GUNICORN = ("/venv/bin/python", "/venv/bin/gunicorn", "-w", "8", "app:app")


def service(machine: Machine, *, environ: str = "", maps: str = "") -> None:
    """A gunicorn with two workers, one of which runs a tool, and an unrelated process."""
    machine.process(10, *GUNICORN, environ=environ)
    machine.process(11, *GUNICORN, parent=10, private=300_000, maps=maps)
    machine.process(12, *GUNICORN, parent=10, private=310_000, swap=20_000, maps=maps)
    machine.process(13, "ffmpeg", parent=12)
    machine.process(99, *GUNICORN, parent=1)


def test_a_master_and_its_workers_are_one_service(machine: Machine) -> None:
    """Everything that it has started is read, and running workers count more than the command line."""
    service(machine, maps=TORCH + COMPILED)
    facts = machine.facts()
    assert [(10, "main"), (11, "forked"), (12, "forked"), (13, "other")] == [(p.pid, p.role) for p in facts.processes]
    assert ("gunicorn", 2, True) == (facts.server.kind, facts.server.workers, facts.server.forks)
    worker = facts.processes[2]
    assert (330_000 * 1024, 7 * 1024, 20_000 * 1024) == (worker.private, worker.shared, worker.swap)
    assert (True, False, 5_120_000) == (worker.torch, worker.cuda, worker.compiled)
    assert Interpreter((3, 12)) == facts.interpreter


def test_workers_that_each_hold_a_model(machine: Machine) -> None:
    """The memory of the workers proves it."""
    service(machine, maps=TORCH + COMPILED)
    findings = {finding.number: finding for finding in examine(machine.facts()).findings}
    assert {"MG203", "MG302", "MG402"} <= findings.keys()
    assert (
        "process 11 has written 307.2 MB for itself, and shares 7.2 kB of written memory with others"
        in findings["MG402"].seen
    )


def test_a_device_is_seen(machine: Machine) -> None:
    """A process that has an NVIDIA device mapped uses it."""
    service(machine, maps=TORCH + NVIDIA)
    assert [False, True] == [process.cuda for process in machine.facts().processes[:2]]


def test_libraries_and_molds_are_seen(machine: Machine) -> None:
    """The process that has started a mold is its owner; the mold, which has forked a worker, is none."""
    mold = (
        "python",
        "-c",
        "from modelguard.isolation._mold_program import main; main(3, 4)",
        "mold",
        "pipeline.entities",
    )
    spacy = "7f50-7f60 r-xp 00000000 08:01 14 /venv/site-packages/spacy/vocab.cpython-312-x86_64-linux-gnu.so\n"
    machine.process(10, *GUNICORN, maps=spacy + TORCH)
    machine.process(11, *mold, parent=10, maps=spacy + TORCH)
    machine.process(12, *mold, parent=11, maps=spacy + TORCH)
    machine.process(13, "ffmpeg", parent=10)
    assert [(True, ("spacy", "torch")), (False, ("spacy", "torch")), (False, ("spacy", "torch")), (False, ())] == [
        (one.isolates, one.libraries) for one in machine.facts().processes
    ]


def test_spawned_workers(machine: Machine) -> None:
    """Uvicorn starts its workers afresh; helpers of multiprocessing are not workers."""
    machine.process(10, "/venv/bin/python", "-m", "uvicorn", "app:app", "--workers", "2")
    machine.process(
        11, "/venv/bin/python", "-c", "from multiprocessing.resource_tracker import main;main(3)", parent=10
    )
    for pid in (12, 13):
        words = ("/venv/bin/python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=5)")
        machine.process(pid, *words, parent=10, private=400_000)
    facts = machine.facts()
    assert ["main", "other", "spawned", "spawned"] == [process.role for process in facts.processes]
    assert "MG404" in [finding.number for finding in examine(facts).findings]


def test_a_title_that_hides_the_command_line(machine: Machine) -> None:
    """With setproctitle options and environment are gone, but roles are still recognised."""
    machine.process(10, "gunicorn: master [app:app]")
    machine.process(11, "gunicorn: worker [app:app]", parent=10)
    facts = machine.facts()
    assert ["main", "forked"] == [process.role for process in facts.processes]
    assert (1, None) == (facts.server.workers, facts.server.preload)
    assert any("environment" in sentence and "overwritten" in sentence for sentence in facts.unknown)


def test_a_worker_refers_to_its_master(machine: Machine) -> None:
    """The report on a worker names the process id of the whole service."""
    service(machine)
    assert any("--pid 10" in sentence for sentence in machine.facts(11).unknown)


def test_a_preload_that_is_not_in_force(machine: Machine) -> None:
    """It was set when the process started, and no such library is mapped."""
    (machine.root / "lib").mkdir()
    (machine.root / "lib" / "libjemalloc.so.2").touch()
    service(machine, environ="LD_PRELOAD=/lib/libjemalloc.so.2\0")
    assert "MG101" in [finding.number for finding in examine(machine.facts()).findings]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "/venv/lib/python3.13t/lib-dynload/_json.cpython-313t-x86_64-linux-gnu.so",
            Interpreter((3, 13), free_threaded=True),
        ),
        ("/usr/lib/python3.11/lib-dynload/_json.cpython-311-x86_64-linux-gnu.so", Interpreter((3, 11))),
        ("/opt/bin/python3.14", Interpreter((3, 14))),
    ],
)
def test_the_python_that_runs(machine: Machine, name: str, expected: Interpreter) -> None:
    """It is recognised by the mapped files."""
    machine.process(10, "python")
    (machine.root / "proc" / "10" / "maps").write_text(f"1000-2000 r-xp 00000000 08:01 9 {name}\n")
    assert expected == machine.facts().interpreter


def test_the_patch_of_the_python_that_runs(machine: Machine) -> None:
    """Its program or its library has the whole version in it."""
    machine.process(10, "python")
    process = machine.root / "proc" / "10"
    (process / "maps").write_text("1000-2000 r-xp 00000000 08:01 9 /usr/bin/python3.14\n")
    (process / "root" / "usr" / "bin").mkdir(parents=True)
    (process / "root" / "usr" / "bin" / "python3.14").write_bytes(b"ELF\0 3.14.9 \0python13.14.8\0\x003.14.2\0and more")
    assert Interpreter((3, 14), micro=2) == machine.facts().interpreter
    assert "MG502" in [finding.number for finding in examine(machine.facts()).findings]


def test_secrets_of_a_process_are_never_shown(machine: Machine) -> None:
    """Neither variables nor the command line reveal one, in text or JSON."""
    machine.process(
        10, *GUNICORN, "--env", "DB_PASSWORD=hunter2", environ="API_KEY=hunter2\0LRU_CACHE_CAPACITY=9\0", maps=TORCH
    )
    facts = machine.facts()
    report = examine(facts)
    shown = as_json(report) + "".join(line for _, line in as_text(report))
    assert "hunter2" not in shown + repr(facts)
    assert "LRU_CACHE_CAPACITY=9" in shown
    assert json.loads(as_json(report))["subject"].startswith("process 10: /venv/bin/python /venv/bin/gunicorn")


@pytest.mark.parametrize("pid", ["4711", "0", "-1", "self", "1e3", "", "99999999999"])
def test_invalid_process_ids(machine: Machine, pid: str) -> None:
    """The error says what to give instead."""
    with pytest.raises(InvalidOption, match="pgrep"):
        machine.facts(pid)


def test_a_process_of_someone_else(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and what to do."""
    machine.process(10, "python")

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_allocator_problems, "observe", denied)
    with pytest.raises(InvalidOption, match="as its owner, or as root"):
        machine.facts()


def test_without_proc(tmp_path: Path) -> None:
    """The error says what is missing."""
    with pytest.raises(NotSupported, match="no /proc"):
        facts_of_process(10, root=tmp_path)


def test_what_the_processes_say_of_themselves(machine: Machine) -> None:
    """Settings and guards come from inside; variables that were set later count once."""
    service(machine)
    late = ["OMP_NUM_THREADS", "1", "after import", "/srv/app.py line 3"]
    master = {"server": {"kind": "gunicorn", "preload": True}, "frozen": 9}
    worker = {"variables": [late], "pools": {"torch": 2}, "guards": [{"name": "nlp", "policy": "Uses(5)"}]}
    facts = facts_of_tree(10, "it", {10: master, 11: worker, 12: worker}, root=machine.root)
    assert (True, 2, 0) == (facts.server.preload, facts.server.workers, facts.server.max_requests)
    assert [Variable("OMP_NUM_THREADS", "1", "after import", "/srv/app.py line 3")] == list(facts.variables)
    inside = facts.processes[1].inside
    assert inside is not None
    assert ((("torch", 2),), (Guarded("nlp", "Uses(5)"),)) == (inside.pools, inside.guards)


def test_metric_files_of_ended_processes(machine: Machine, tmp_path: Path) -> None:
    """A file counts if its process does not exist."""
    folder = tmp_path / "metrics"
    folder.mkdir()
    for name in ("counter_10.db", "gauge_all_4711.db", "other.db"):
        (folder / name).touch()
    machine.process(10, "python", environ=f"PROMETHEUS_MULTIPROC_DIR={folder}\0")
    assert ("gauge_all_4711.db",) == machine.facts().stale_metrics


@pytest.mark.parametrize(
    ("files", "stale"),
    [
        ({"counter_4711.db": 20}, 0),
        ({"counter_4711.db": -20}, 1),
        ({"gauge_livesum_4711.db": 20, "histogram_4711.db": 20}, 1),
        ({f"counter_{number}.db": 20 for number in range(4700, 4799)}, 0),
        ({f"counter_{number}.db": 20 for number in range(4700, 4800)}, 100),
    ],
    ids=["of this run", "of an earlier run", "a live gauge", "some", "many"],
)
def test_what_ended_workers_have_counted_stays(
    machine: Machine, tmp_path: Path, files: dict[str, int], stale: int
) -> None:
    """Without it the sums of a scrape would fall, and modelguard's gunicorn gives such files to new workers."""
    machine.process(10, "python", environ=f"PROMETHEUS_MULTIPROC_DIR={tmp_path}\0")
    (tmp_path / "proc" / "uptime").write_text("100.00 0.00\n")  # it has started with the machine
    for name, seconds in files.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, time.time() - 100 + seconds))
    assert stale == len(machine.facts().stale_metrics)


def test_a_folder_of_metrics_that_the_program_sets(machine: Machine, tmp_path: Path) -> None:
    """As from a .env file: it is the one that the service writes to."""
    (tmp_path / "gauge_all_4711.db").touch()
    machine.process(10, "python")
    late = ["PROMETHEUS_MULTIPROC_DIR", str(tmp_path), "app", "/srv/app.py line 3"]
    facts = facts_of_tree(10, "it", {10: {"variables": [late]}}, root=machine.root)
    assert ("gauge_all_4711.db",) == facts.stale_metrics


def test_a_relative_folder_of_metrics_lies_in_the_folder_of_the_process(machine: Machine, tmp_path: Path) -> None:
    """The doctor may run in another one."""
    machine.process(10, "python", environ="PROMETHEUS_MULTIPROC_DIR=metrics\0")
    (tmp_path / "app" / "metrics").mkdir(parents=True)
    (tmp_path / "app" / "metrics" / "gauge_all_4711.db").touch()
    (tmp_path / "proc" / "10" / "cwd").symlink_to(tmp_path / "app")
    assert ("gauge_all_4711.db",) == machine.facts().stale_metrics
