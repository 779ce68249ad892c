"""Planning how a program is started, and becoming it."""

from __future__ import annotations

import errno
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from modelguard import presets
from modelguard.diagnosis import examine
from modelguard.diagnosis._facts import Facts, Inside, Server, ServiceProcess, known_variables, misspelt_variables
from modelguard.environment import _allocator_problems, _launcher
from modelguard.errors import CannotRun, InvalidOption

GLIBC = {"MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}


# The plan


def plan(*command: str, **options: Any) -> _launcher.Plan:
    options.setdefault(
        "choose", lambda wanted, program, environ, arguments: ({"LD_PRELOAD": "/lib/a b.so"}, ["a remark"])
    )
    options.setdefault("environ", {"PATH": "/bin:/usr/bin", "OMP_NUM_THREADS": "7"})
    return _launcher.plan(command, **options)


def test_a_plan_holds_the_whole_environment() -> None:
    """It has the caller's variables, the preset's and the allocator's; the caller's values win."""
    preset = presets.get("torch-cpu", cpus=4)
    planned = plan("sh", "-c", "exit", preset=preset)
    assert ("sh", "-c", "exit") == planned.argv
    assert planned.program in {"/bin/sh", "/usr/bin/sh"}
    assert "7" == planned.environ["OMP_NUM_THREADS"]
    assert "4" == planned.environ["MKL_NUM_THREADS"] == planned.added["MKL_NUM_THREADS"]
    assert "/lib/a b.so" == planned.environ["LD_PRELOAD"]
    assert "OMP_NUM_THREADS" not in planned.added
    assert planned.environ == {"PATH": "/bin:/usr/bin", "OMP_NUM_THREADS": "7"} | planned.added


def test_a_plan_notes_which_values_of_the_user_stay() -> None:
    """A preset that has no effect in part is noted; an equal value is not."""
    preset = presets.get("torch-cpu", cpus=4)
    assert ("your OMP_NUM_THREADS=7 stays; the preset has 4", "a remark") == plan("sh", preset=preset).notes
    assert ("a remark",) == plan("sh", preset=presets.get("torch-cpu", cpus=7)).notes


def test_the_allocator_is_chosen_knowing_the_preset() -> None:
    """Glibc settings of a preset count like the user's own."""
    preset = presets.get("low-memory")
    planned = plan("sh", preset=preset, choose=lambda wanted, program, environ, arguments: ({}, [*environ]))
    assert GLIBC <= set(planned.notes)


LIBRARIES = {
    "none": "",
    "glibc": "",
    **{kind: f"/usr/lib/lib{kind}.so.2" for kind in ("jemalloc", "mimalloc", "tcmalloc")},
}


@pytest.mark.parametrize("name", presets.names())
@pytest.mark.parametrize("allocator", LIBRARIES)
def test_the_doctor_finds_nothing_in_what_is_set_up(name: str, allocator: Any, tmp_path: Path) -> None:
    """No variable of a preset is one that the chosen allocator does not read, and no name or value is wrong."""
    file = LIBRARIES[allocator]
    chosen = {"LD_PRELOAD": file} if file else {}
    planned = plan("sh", preset=presets.get(name), environ={"PATH": "/bin"}, choose=lambda *_, **__: (chosen, []))
    kind, serves = (allocator, file) if file else ("glibc", "/lib/libc.so.6")
    seen = _allocator_problems.ProcessView({serves: 1}, planned.environ, (), tmp_path)
    facts = Facts(
        "a service",
        variables=known_variables(planned.environ, "the environment"),
        problems=tuple(_allocator_problems.problems(seen, planned.environ, kind, serves)),
        server=Server("gunicorn", 1, forks=True, preload=True, worker_class="sync", threads=2),
        processes=(ServiceProcess(1, torch=True, inside=Inside(malloc=serves)),),
        misspelt=tuple(misspelt_variables(planned.environ, "the environment")),
    )
    assert () == examine(facts).findings
    assert planned.in_force.endswith(f"served by {'the C library' if kind == 'glibc' else kind}")


def test_a_value_that_crashes_torch_is_refused_without_a_preset() -> None:
    """The command would die of SIGSEGV later."""
    with pytest.raises(InvalidOption, match="LRU_CACHE_CAPACITY='abc': is read as 0"):
        plan("sh", environ={"PATH": "/bin", "LRU_CACHE_CAPACITY": "abc"})


def test_a_plan_as_a_line_for_a_shell() -> None:
    """It is quoted so that a shell reads back the same words."""
    line = str(plan("sh", "-c", "echo 'a  b' $HOME"))
    assert ["env", "LD_PRELOAD=/lib/a b.so", "sh", "-c", "echo 'a  b' $HOME"] == shlex.split(line)


def test_planning_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning sets nothing, neither in this process nor in its arguments."""
    environ = {"PATH": "/bin:/usr/bin"}
    before = dict(os.environ)
    plan("sh", environ=environ, preset=presets.get("torch-cpu", cpus=4))
    assert {"PATH": "/bin:/usr/bin"} == environ
    assert before == dict(os.environ)


def test_bad_commands() -> None:
    """A missing command and a NUL byte are rejected before anything is searched."""
    with pytest.raises(InvalidOption, match="command='': must not be empty"):
        plan()
    with pytest.raises(InvalidOption, match="NUL"):
        plan("sh", "-c", "a\0b")


def test_the_environment_is_what_was_inherited(tmp_path: Path) -> None:
    """LC_CTYPE, which Python sets for itself in the C locale, is not passed on; the user's own value is."""
    initial = tmp_path / "proc" / "self" / "environ"
    initial.parent.mkdir(parents=True)
    initial.write_bytes(b"LANG=C\0HOME=/root\0")
    own = {"LANG": "C", "LC_CTYPE": "C.UTF-8"}
    assert {"LANG": "C"} == _launcher.inherited(own, root=tmp_path)
    initial.write_bytes(b"LANG=C\0LC_CTYPE=C\0")
    assert {"LANG": "C", "LC_CTYPE": "C"} == _launcher.inherited(own, root=tmp_path)
    assert own == _launcher.inherited(own, root=tmp_path / "none")


# Becoming it


class Exec:
    """Replaces execve, and records its arguments."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.called: list[Any] = []

    def __call__(self, path: str, argv: Any, environ: Any) -> None:
        self.called = [path, argv, environ, signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGINT)]
        if self.error is not None:
            raise self.error


def test_becoming_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is executed as planned, with the signals that Python ignores at their default."""
    stand_in = Exec(OSError(8, "Exec format error"))
    monkeypatch.setattr(os, "execve", stand_in)
    planned = plan("sh", "-c", "exit")
    with pytest.raises(CannotRun, match="Exec format error") as refused:
        _launcher.become(planned)
    assert 126 == refused.value.status
    assert [planned.program, planned.argv, planned.environ] == stand_in.called[:3]
    assert signal.SIG_DFL == stand_in.called[3]


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOEXEC, "#!/bin/sh"), (errno.E2BIG, "shorter"), (errno.ENOENT, "dynamic linker"), (errno.EPERM, "execve")],
)
def test_an_exec_that_fails_says_what_to_do(monkeypatch: pytest.MonkeyPatch, number: int, fix: str) -> None:
    """The error has the system's reason and a fix."""
    monkeypatch.setattr(os, "execve", Exec(OSError(number, os.strerror(number))))
    with pytest.raises(CannotRun, match=os.strerror(number)) as refused:
        _launcher.become(plan("sh"))
    assert fix in refused.value.fix


def test_an_exec_that_fails_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signal handlers are restored."""
    names = ("SIGPIPE", "SIGXFSZ", "SIGINT")
    before = [signal.getsignal(getattr(signal, name)) for name in names]
    monkeypatch.setattr(os, "execve", Exec(OSError(7, "Argument list too long")))
    with pytest.raises(CannotRun):
        _launcher.become(plan("sh"))
    assert before == [signal.getsignal(getattr(signal, name)) for name in names]


@pytest.mark.parametrize(
    ("handler", "expected"),
    [(signal.default_int_handler, signal.SIG_DFL), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_an_ignored_ctrl_c_stays_ignored(monkeypatch: pytest.MonkeyPatch, handler: Any, expected: Any) -> None:
    """A shell that starts a command in the background makes it ignore Ctrl-C, and that stays."""
    stand_in = Exec(OSError(8, "Exec format error"))
    monkeypatch.setattr(os, "execve", stand_in)
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(CannotRun):
            _launcher.become(plan("sh"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert expected == stand_in.called[4]
