"""`modelguard run` as a user starts it: it becomes the command, and what it sets is in force in it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Server, wait_until, write_app

from modelguard import allocator

pytestmark = [
    pytest.mark.timeout(90),
    pytest.mark.skipif(sys.platform != "linux", reason="what a command inherits is read from /proc here"),
]

RUN = [sys.executable, "-m", "modelguard", "run"]

#: What starts the tests may have variables of its own for what is tested here.
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("LD_", "MALLOC_", "OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "LRU_"))
}

#: Which allocator serves malloc in a Python program, and what it has been given.
TELL = """
import json, os
from modelguard import allocator
print(json.dumps({"kind": allocator.in_force().kind, "environ": dict(os.environ)}))
"""
#: The same of a program that this one starts.
TELL_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {TELL!r}], check=True)"

APP = """
import json, os
from modelguard import allocator

def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "application/json")])
    threads = os.environ.get("OMP_NUM_THREADS")
    return [json.dumps([os.getpid(), os.getppid(), allocator.in_force().kind, threads]).encode()]
"""


def library(kind: Any) -> str:
    """An allocator's file; without it the test is skipped."""
    found = allocator.find(kind)
    if not found:
        pytest.skip(f"{kind} is not installed")
    return found[0].path


def start(*words: str | Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start `modelguard run`, and let the caller talk to the command."""
    options = {"env": CLEAN, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([*RUN, *map(str, words)], **options)


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    options = {"env": CLEAN, "capture_output": True, "text": True, "timeout": 60} | options
    return subprocess.run([*RUN, *map(str, words)], check=False, **options)


def direct(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command itself, for comparison."""
    options = {"env": CLEAN, "capture_output": True, "text": True, "timeout": 60} | options
    return subprocess.run(words, check=False, **options)


def tell(*options: str, program: str = TELL, **variables: str) -> dict[str, Any]:
    """What a Python program prints that was started with these options."""
    done = run(*options, "--", sys.executable, "-c", program, env=CLEAN | variables)
    assert 0 == done.returncode, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


# It becomes the command


def test_the_process_stays() -> None:
    """The command has the process id that the caller knows, and the caller is its parent."""
    with start("--", "sh", "-c", "echo $$ $PPID") as process:
        out, _ = process.communicate(timeout=60)
    assert [process.pid, os.getpid()] == [int(word) for word in out.split()]


@pytest.mark.parametrize("status", [0, 3, 255])
def test_the_exit_status_is_the_commands(status: int) -> None:
    """Every exit status reaches the caller."""
    assert status == run("--", "sh", "-c", f"exit {status}").returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_the_command(number: signal.Signals) -> None:
    """A signal reaches the command itself, and the caller sees which one."""
    # A shell that runs the tests in the background has Ctrl-C ignored, and that is handed down.
    reset = functools.partial(signal.signal, number, signal.SIG_DFL)
    with start("--", "sh", "-c", "echo ready; exec sleep 60", preexec_fn=reset) as process:
        assert process.stdout is not None
        assert b"ready\n" == process.stdout.readline()
        process.send_signal(number)
        assert -number == process.wait(30)


def test_a_writer_ends_with_its_reader() -> None:
    """SIGPIPE, which Python ignores from its start, is at its default in the command."""
    with start("--", "yes") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert -signal.SIGPIPE == process.wait(30)


@pytest.mark.parametrize("ignored", [(), (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)])
def test_signals_are_as_they_were_inherited(ignored: tuple[signal.Signals, ...]) -> None:
    """Ignored ones stay ignored, blocked ones blocked, and none is added."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, ignored[1:])

    command = ("grep", "-E", "^Sig(Blk|Ign|Cgt):", "/proc/self/status")
    expected = direct(*command, preexec_fn=prepare).stdout
    assert 3 == len(expected.splitlines())
    assert expected == run("--", *command, preexec_fn=prepare).stdout


def test_files_limits_and_folder_stay(tmp_path: Path) -> None:
    """Open files, working directory, umask and limits are passed on unchanged."""
    script = "cd . && pwd && umask && ulimit -n && ls /proc/self/fd && cat && echo through >/proc/self/fd/$1"
    with pipe() as (reading, writing):
        options: dict[str, Any] = {"cwd": tmp_path, "pass_fds": [writing], "input": "words\n", "umask": 0o027}
        expected = direct("sh", "-c", script, "sh", str(writing), **options)
        assert 0 == expected.returncode, expected.stderr
        done = run("--", "sh", "-c", script, "sh", str(writing), **options)
        assert (0, expected.stdout) == (done.returncode, done.stdout)
        assert b"through\nthrough\n" == os.read(reading, 100)


@contextlib.contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """The two ends of a pipe."""
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)


def test_a_command_in_a_path_with_spaces(tmp_path: Path) -> None:
    """By its path, by a relative one, and by its name on PATH."""
    folder = tmp_path / "my tools"
    folder.mkdir()
    (folder / "my tool").write_text('#!/bin/sh\necho "$0"\n')
    (folder / "my tool").chmod(0o755)
    expected = f"{folder / 'my tool'}\n"
    assert expected == run("--", folder / "my tool").stdout
    assert "./my tool\n" == run("--", "./my tool", cwd=folder).stdout
    assert expected == run("--", "my tool", env=CLEAN | {"PATH": f"{folder}:{CLEAN['PATH']}"}).stdout


def test_the_script_that_pip_installs() -> None:
    """`modelguard run` is the same as `python -m modelguard run`."""
    script = Path(sys.executable).with_name("modelguard")
    if not script.exists():
        pytest.skip("modelguard is run from its source tree, so there is no such script")
    done = direct(str(script), "run", "--", "sh", "-c", "exit 7")
    assert 7 == done.returncode, done.stderr


# What it sets


@pytest.mark.parametrize("locale", [{}, {"LANG": "C"}, {"LC_ALL": "C"}, {"LC_CTYPE": "C"}])
def test_nothing_else_is_set(locale: dict[str, str]) -> None:
    """The environment is passed on byte by byte, without what Python sets for itself in the C locale."""
    environ = {name: value for name, value in CLEAN.items() if not name.startswith(("LC_", "LANG"))}
    options: dict[str, Any] = {"env": environ | locale | {"ODD": os.fsdecode(b"caf\xe9\n=")}, "text": False}
    expected = direct("env", "-0", **options).stdout
    assert sorted(expected.split(b"\0")) == sorted(run("--", "env", "-0", **options).stdout.split(b"\0"))


@pytest.mark.parametrize("program", [TELL, TELL_CHILD], ids=["command", "its child"])
def test_presets_are_in_force(program: str) -> None:
    """They are set in the command and its children; the user's own values stay, with a note."""
    told = tell("--preset", "torch-cpu-dynamic", program=program, OMP_NUM_THREADS="17")
    assert "17" == told["environ"]["OMP_NUM_THREADS"]
    assert {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"} <= told["environ"].keys()
    done = run("--preset", "torch-cpu-dynamic", "--", "true", env=CLEAN | {"OMP_NUM_THREADS": "17"})
    assert "OMP_NUM_THREADS=17 stays" in done.stderr


@pytest.mark.parametrize("value", ["", "0", "abc"])
def test_a_value_that_would_crash_the_command(value: str) -> None:
    """The command is not started with a variable of the preset that crashes torch."""
    done = run("--preset", "torch-cpu-dynamic", "--", "true", env=CLEAN | {"LRU_CACHE_CAPACITY": value})
    assert 2 == done.returncode
    assert f"LRU_CACHE_CAPACITY={value!r}: is read as 0" in done.stderr


@pytest.mark.parametrize("kind", ["jemalloc", "mimalloc", "tcmalloc"])
@pytest.mark.parametrize("program", [TELL, TELL_CHILD], ids=["command", "its child"])
def test_the_allocator_really_serves(kind: str, program: str) -> None:
    """The named allocator serves malloc in the command and its children."""
    path = library(kind)
    told = tell("--allocator", kind, program=program)
    assert (kind, path) == (told["kind"], told["environ"]["LD_PRELOAD"])


def test_the_best_allocator() -> None:
    """`auto` takes the first of those that are found."""
    found = allocator.find()
    if not found:
        pytest.skip("no allocator is installed")
    assert found[0].kind == tell("--allocator", "auto")["kind"]


@pytest.mark.parametrize("separator", [":", " "])
def test_the_callers_own_preload_stays_first(separator: str) -> None:
    """The caller's entries are loaded as before, and the allocator serves."""
    path, own = library("jemalloc"), separator.join(["libdl.so.2", "libm.so.6"])
    told = tell("--allocator", "jemalloc", LD_PRELOAD=own)
    assert ("jemalloc", f"{own}:{path}") == (told["kind"], told["environ"]["LD_PRELOAD"])


def test_a_second_allocator_is_not_added() -> None:
    """The caller's allocator stays the only one, with a note, also with one `run` behind another."""
    path = library("tcmalloc")
    told = tell("--allocator", "auto", LD_PRELOAD=path)
    assert ("tcmalloc", path) == (told["kind"], told["environ"]["LD_PRELOAD"])
    done = run("--allocator", "tcmalloc", "--", *RUN, "--allocator", "auto", "--", "sh", "-c", "echo $LD_PRELOAD")
    assert f"{path}\n" == done.stdout
    assert "preloaded already" in done.stderr


def test_a_preload_that_is_missing_decides_nothing() -> None:
    """The variables are those for the allocator that really serves, and what is said names it."""
    missing = CLEAN | {"LD_PRELOAD": "/nonexistent/libjemalloc.so.2"}
    done = run("--preset", "low-memory", "--", sys.executable, "-c", TELL, env=missing)
    told = json.loads(done.stdout)
    if "glibc" != told["kind"]:
        pytest.skip("the C library is not glibc")
    assert (True, False) == tuple(name in told["environ"] for name in ("MALLOC_ARENA_MAX", "MALLOC_CONF"))
    assert "malloc is served by the C library" in done.stderr


def test_glibc_is_set_to_give_memory_back() -> None:
    """The variables of glibc are set, and glibc serves malloc."""
    told = tell("--allocator", "glibc")
    assert "MALLOC_TRIM_THRESHOLD_" in told["environ"]
    assert "LD_PRELOAD" not in told["environ"]
    if os.confstr("CS_GNU_LIBC_VERSION"):
        assert "glibc" == told["kind"]


def test_a_static_program(tmp_path: Path) -> None:
    """Nothing can be preloaded into it: a named allocator is rejected, and `auto` notes the reason."""
    compiler, source, program = shutil.which("cc"), tmp_path / "static.c", tmp_path / "static"
    source.write_text("int main(void) { return 5; }\n")
    if (
        compiler is None
        or subprocess.run(
            [compiler, "-static", "-o", program, source], capture_output=True, check=False, timeout=50
        ).returncode
    ):
        pytest.skip("no static program can be made here")
    library("jemalloc")
    refused, done = run("--allocator", "jemalloc", "--", program), run("--allocator", "auto", "--", program)
    assert (2, 5) == (refused.returncode, done.returncode)
    assert "statically linked" in refused.stderr
    assert "statically linked" in done.stderr


def compiled(tmp_path: Path, *command: str) -> str:
    """A program that becomes the command that its arguments name."""
    source, program = tmp_path / "launcher.c", tmp_path / "launcher"
    source.write_text(
        "#include <unistd.h>\nint main(int count, char **words) { execvp(words[1], words + 1); return 5; }\n"
    )
    if shutil.which(command[0]) is None or subprocess.run([*command, "-o", program, source], check=False).returncode:
        pytest.skip(f"{' '.join(command)} makes no program here")
    return str(program)


@pytest.mark.parametrize("launcher", ["own", "gosu"])
@pytest.mark.parametrize("kind", ["auto", "jemalloc"])
def test_a_static_launcher(kind: str, launcher: str, tmp_path: Path) -> None:
    """A launcher that is statically linked, as gosu is, hands the allocator on to the program that it starts."""
    library("jemalloc")
    if launcher == "gosu":
        if shutil.which("gosu") is None or os.getuid() != 0:
            pytest.skip("gosu is not installed, or this user may not use it")
        command = ["gosu", "root"]
    else:
        command = [compiled(tmp_path, "cc", "-static")]
    code = "from modelguard import allocator; print(allocator.in_force().kind)"
    done = run("--allocator", kind, "--", *command, sys.executable, "-c", code)
    assert (0, "jemalloc\n") == (done.returncode, done.stdout), done.stderr
    assert "changes only in the programs that it starts" in done.stderr


def test_a_program_for_another_c_library(tmp_path: Path) -> None:
    """A musl program is not given glibc's libraries, with which it could not start."""
    library("jemalloc")
    program = compiled(tmp_path, "musl-gcc")
    done = run("--allocator", "auto", "--", program, "echo", "it runs")
    assert (0, "it runs\n") == (done.returncode, done.stdout), done.stderr
    assert "for another C library" in done.stderr
    refused = run("--allocator", "jemalloc", "--", program, "echo", "it runs")
    assert (2, "") == (refused.returncode, refused.stdout)


def test_a_library_that_others_may_write_to(tmp_path: Path) -> None:
    """It is preloaded neither by name nor by `auto`, and the reason is printed."""
    path = library("jemalloc")
    folder = tmp_path / "lib"
    folder.mkdir()
    shutil.copy(path, folder / "libjemalloc.so.2")
    folder.chmod(folder.stat().st_mode | stat.S_IWOTH)
    done = run("--allocator", "auto", "--print", "--", "true", env=CLEAN | {"VIRTUAL_ENV": str(tmp_path)})
    assert str(folder) not in done.stdout
    assert f"other users may write to {folder}" in done.stderr


def test_print_is_a_command_that_does_the_same() -> None:
    """A shell that runs the line starts the command with the same environment."""
    options = ["--preset", "torch-cpu", "--allocator", "glibc"]
    script = "printf '%s|' \"$@\"; env | grep -E '^(OMP|MKL|OPENBLAS|MALLOC)_' | sort"
    command = ["sh", "-c", script, "sh", "it's", "a  b", "$HOME", ""]
    printed = run(*options, "--print", "--", *command)
    assert (0, 1) == (printed.returncode, printed.stdout.count("\n"))
    assert run(*options, "--", *command).stdout == direct("sh", "-c", printed.stdout).stdout
    assert "it's|a  b|$HOME||" in direct("sh", "-c", printed.stdout).stdout


@pytest.mark.parametrize("how", ["plain", "preload"])
def test_gunicorns_workers_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A real gunicorn is the process that was started, and jemalloc serves in it and in every worker."""
    pytest.importorskip("gunicorn", reason="gunicorn is not installed")
    library("jemalloc")
    for name in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(name)
    write_app(tmp_path, APP)
    options = ["--preset", "torch-cpu", "--allocator", "jemalloc"]
    gunicorn = [sys.executable, "-m", "gunicorn", "-b", "127.0.0.1:0", "-w", "2", *(["--preload"] * (how == "preload"))]
    with Server(tmp_path, *RUN, *options, "--", *gunicorn, "app:app") as server:
        server.wait_until_serving()
        answers: list[Any] = []

        def both_have_answered() -> bool:
            answers.append(server.ask().json)
            return 2 == len({pid for pid, *_ in answers})

        wait_until(both_have_answered, "both workers")  # gunicorn loses a SIGTERM to one that is starting
        assert 0 == server.stop()
    assert {server.process.pid} == {parent for _, parent, *_ in answers}
    assert {"jemalloc"} == {kind for *_, kind, _ in answers}
    assert None not in {threads for *_, threads in answers}


# What it refuses


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--", "no-such-command"], 127),
        (["--", "/"], 126),
        (["--", "./script"], 126),
        (["--", "./headless"], 126),
        (["--allocator", "auto", "--", "./orphan"], 126),
        (["--"], 2),
        (["--preset", "torch-cup", "--", "touch", "started"], 2),
        (["--allocator", "malloc", "--", "touch", "started"], 2),
        (["--preset", "torch-cpu", "--workers", "many", "--", "touch", "started"], 2),
    ],
)
def test_bad_input(tmp_path: Path, words: list[str], status: int) -> None:
    """One line has the fix, the status is that of a shell, and nothing was started."""
    for name, mode, content in (
        ("script", 0o644, "#!/bin/sh\n"),
        ("headless", 0o755, "touch started\n"),
        ("orphan", 0o755, "#!/nowhere/python\n"),
    ):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(mode)
    # Asked for something, so that the remark on nothing being set does not come first.
    asked = words if words[0] != "--" else ["--allocator", "glibc", *words]
    done = run(*asked, cwd=tmp_path)
    assert (status, "") == (done.returncode, done.stdout)
    # What only the exec itself tells comes behind the line that says what is in force.
    assert 1 == len([line for line in done.stderr.splitlines() if "in force" not in line]), done.stderr
    assert done.stderr.startswith("modelguard run: ")
    assert not (tmp_path / "started").exists()
