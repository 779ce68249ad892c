"""Control of real processes: ``modelguard ctl`` and SIGHUP, with forks and beside real servers."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.harness import Server, wait_until, write_app

from modelguard.control import _client

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the socket is Linux's"),
    pytest.mark.timeout(120),
]

#: A process with one guard. It does what it is told on standard input, one line of Python after another.
PROGRAM = """
    import os, signal, sys
    from modelguard import Uses, control, guard

    class Model(dict):
        pass

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, of the tests, has it ignored
    nlp = guard(Model, reload_on=Uses(5), name="nlp")
    nlp.load()
    {line}
    print("ready", flush=True)
    for line in sys.stdin:
        exec(line)
"""


class Program:
    """A process with a guard."""

    def __init__(self, line: str) -> None:
        code = textwrap.dedent(PROGRAM.format(line=line))
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        assert "ready\n" == self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def do(self, line: str) -> str:
        """Run a line there that prints one."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.line().strip()


@contextmanager
def program(line: str = "control.listen()") -> Iterator[Program]:
    """The process, killed at the end with its children."""
    made = Program(line)
    try:
        yield made
    finally:
        children = psutil.Process(made.pid).children(recursive=True) if made.process.poll() is None else []
        made.process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with its parent
                child.kill()
        made.process.communicate()


def ctl(*words: object) -> tuple[int, str]:
    """The command's exit status, and all that it prints."""
    command = [sys.executable, "-m", "modelguard", "ctl", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def statuses(pid: int) -> dict[int, dict[str, Any]]:
    """The status of the guard in each process below ``pid`` that takes commands."""
    status, text = ctl(pid, "status", "--json")
    if status != 0:
        return {}
    return {line["pid"]: line["guards"][0]["status"] for line in map(json.loads, text.splitlines())}


def listens(pid: int) -> bool:
    """Whether the kernel knows the socket of a process."""
    return _client.address(pid).replace("\0", "@") in Path("/proc/net/unix").read_text(encoding="ascii")


class TestOneProcess:
    def test_each_command(self) -> None:
        """Reload returns when the new model serves; unload, pause and resume act at once."""
        with program() as service:
            assert 0 == ctl(service.pid, "reload")[0]
            assert "2" == service.do("print(nlp.status().generation, flush=True)")
            assert 0 == ctl(service.pid, "pause", "nlp")[0]
            assert "True" == service.do("print(nlp.status().paused, flush=True)")
            assert 0 == ctl(service.pid, "resume")[0]
            assert 0 == ctl(service.pid, "unload")[0]
            found = statuses(service.pid)[service.pid]
            assert ("idle", False, 1) == (found["state"], found["paused"], found["reloads"])

    def test_off_by_default(self) -> None:
        """A process that has not asked for it has no socket and no thread, and SIGHUP ends it as usual."""
        with program("pass") as service:
            assert not listens(service.pid)
            threads = "sum(t.name.startswith('modelguard-c') for t in threading.enumerate())"
            assert "0" == service.do(f"import threading; print({threads}, flush=True)")
            status, text = ctl(service.pid, "status")
            assert (2, True) == (status, "call modelguard.control.listen()" in text)
            os.kill(service.pid, signal.SIGHUP)
            assert -signal.SIGHUP == service.process.wait(30)

    def test_stop(self) -> None:
        """Nothing is left of it, and the line works again."""
        with program("control.listen(sighup=True)") as service:
            service.do("control.stop(); print(flush=True)")
            assert not listens(service.pid)
            assert "True" == service.do("print(signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, flush=True)")
            service.do("control.listen(); control.listen(); print(flush=True)")
            assert 0 == ctl(service.pid, "status")[0]

    def test_stop_in_another_thread(self) -> None:
        """SIGHUP does again what it did before: here it ends the process."""
        with program("control.listen(sighup=True)") as service:
            service.do(
                "import threading; t = threading.Thread(target=control.stop); t.start(); t.join(); print(flush=True)"
            )
            os.kill(service.pid, signal.SIGHUP)
            assert -signal.SIGHUP == service.process.wait(30)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=str)
    def test_the_socket_ends_with_the_process(self, number: signal.Signals) -> None:
        """However it ends: there is no file to leave behind."""
        with program() as service:
            assert listens(service.pid)
            os.kill(service.pid, number)
            service.process.wait(30)
            wait_until(lambda: not listens(service.pid), "the socket is gone")
            assert 2 == ctl(service.pid, "status")[0]

    def test_a_client_that_goes_away_ends_nothing(self) -> None:
        """Also where the program has set the default of SIGPIPE: the next client is served."""
        with program("signal.signal(signal.SIGPIPE, signal.SIG_DFL); control.listen()") as service:
            for _ in range(5):
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(_client.address(service.pid))
                    client.sendall(b'{"command": "reload"}\n')
            wait_until(lambda: int(service.do("print(nlp.status().generation, flush=True)")) > 1, "a reload")
            assert 0 == ctl(service.pid, "status")[0]

    def test_an_unknown_guard(self) -> None:
        """Exit status 1, with the names of those that there are."""
        with program() as service:
            status, text = ctl(service.pid, "reload", "asr")
            assert (1, True) == (status, "There are: 'nlp'" in text)

    def test_a_guard_with_a_very_long_name(self) -> None:
        """It takes commands by its name too."""
        with program(
            "long = guard(Model, reload_on=None, name='名' * 10_000); long.load(); control.listen()"
        ) as service:
            assert 0 == ctl(service.pid, "reload", "名" * 10_000)[0]
            assert "2" == service.do("print(long.status().generation, flush=True)")

    @pytest.mark.parametrize(
        "sent", [b"", b"\n", b"{", b"[" * 4000 + b"\n", b"x" * 100_000, b'{"command": "stop"}\n', b"\xff\n"], ids=repr
    )
    def test_what_is_no_command_changes_nothing(self, sent: bytes) -> None:
        """It gets an error or nothing, and the next client is served."""
        with program() as service:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(_client.address(service.pid))
                try:
                    client.sendall(sent)
                    client.shutdown(socket.SHUT_WR)
                    answer = client.recv(65_536)
                except (BrokenPipeError, ConnectionResetError):  # it does not read more than it needs
                    answer = b""
            assert answer == b"" or "error" in json.loads(answer)
            assert 0 == ctl(service.pid, "status")[0]

    def test_silent_clients_do_not_keep_others_out_forever(self) -> None:
        """As many as are served at once: the next one is refused at once, and served when they have gone."""
        with program() as service:
            silent = [socket.socket(socket.AF_UNIX) for _ in range(8)]
            for client in silent:
                client.connect(_client.address(service.pid))
            wait_until(lambda: ctl(service.pid, "pause")[0] != 0, "the slots are taken", seconds=9)
            for _ in range(20):  # it has hung up before or after the request: both get the reason
                assert "8 other commands" in str(_client.ask(service.pid, _client.Request("status")).error)
            with pytest.raises(_client.Unreachable, match="8 other commands"):
                _client.inspect(service.pid)
            for client in silent:
                client.close()
            wait_until(lambda: ctl(service.pid, "pause")[0] == 0, "the slots are free")

    def test_more_clients_than_may_wait(self) -> None:
        """They wait for the process, and then say that it is busy, and not that it takes no commands."""
        with program() as service, contextlib.ExitStack() as stack:
            os.kill(service.pid, signal.SIGSTOP)
            with contextlib.suppress(BlockingIOError):
                while True:
                    client = stack.enter_context(socket.socket(socket.AF_UNIX))
                    client.settimeout(0)
                    client.connect(_client.address(service.pid))
            assert [service.pid] == _client.listening_below(service.pid)
            with pytest.raises(_client.Busy, match="others wait"):
                _client._connect(service.pid, patience=0.2)
            threading.Timer(1, os.kill, (service.pid, signal.SIGCONT)).start()
            assert "8 other commands are under way" in str(_client.ask(service.pid, _client.Request("status")).error)

    def test_a_process_without_descriptors_left(self) -> None:
        """A client waits until there is one again. Meanwhile the process does not look for it without a pause."""
        with program() as service:
            service.do(
                "import resource, time; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
                "kept = [os.dup(0) for _ in range(65 - len(os.listdir('/proc/self/fd')))]; print(flush=True)"
            )
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(_client.address(service.pid))
                client.sendall(b'{"command": "status"}\n')
                busy = service.do(
                    "began = time.process_time(); time.sleep(1); print(time.process_time() - began, flush=True)"
                )
                assert float(busy) < 0.3
                service.do("os.closerange(kept[0], kept[-1] + 1); print(flush=True)")
                client.settimeout(30)
                assert b'"nlp"' in client.recv(65_536)

    def test_a_process_without_threads_left(self) -> None:
        """The client is told that the process has no thread for its command."""
        with program() as service:
            service.do(
                "import threading; threading.Thread.start = lambda _: (_ for _ in ()).throw("
                'RuntimeError("can\'t start new thread")); print(flush=True)'
            )
            status, said = ctl(service.pid, "status")
            assert (1, True) == (status, "can't start new thread" in said), said

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_other_users_are_refused(self) -> None:
        """The kernel says who they are; nothing is read from them, and they learn why."""
        program_of_nobody = """
            import os, socket, sys
            os.setuid(65534)
            client = socket.socket(socket.AF_UNIX)
            client.connect(sys.argv[1].replace("@", chr(0)))
            client.settimeout(30)
            try:
                client.sendall(b'{"command": "pause"}' + bytes([10]))
            except ConnectionError:
                pass
            print(client.recv(1000).decode())
        """
        with program() as service:
            address = _client.address(service.pid).replace("\0", "@")
            command = [sys.executable, "-c", textwrap.dedent(program_of_nobody), address]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert (True, "") == ("and not of user 65534" in done.stdout, done.stderr)
            assert "False" == service.do("print(nlp.status().paused, flush=True)")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_root_commands_the_services_of_others(self) -> None:
        """A service that is started as another user takes root's commands, and shows root what it does."""
        prepared = "nlp.status(); control.listen(); control.stop()"  # nobody may not read every Python
        with program(f"{prepared}; os.setuid(65534); control.listen()") as service:
            assert 0 == ctl(service.pid, "pause")[0]
            assert statuses(service.pid)[service.pid]["paused"]

    def test_a_name_that_another_process_has_taken(self) -> None:
        """The client asks the kernel who listens, and sends it nothing."""
        with program("pass") as service, socket.socket(socket.AF_UNIX) as other:
            other.bind(_client.address(service.pid))
            other.listen()
            other.settimeout(30)
            status, _ = ctl(service.pid, "reload")
            with other.accept()[0] as seen:
                assert (2, b"") == (status, seen.recv(100))


class TestForks:
    FORK = "pid = os.fork(); pid or [exec(line) for line in sys.stdin]; print(pid, flush=True)"

    def test_a_child_has_a_socket_of_its_own(self) -> None:
        """Commands to it do not reach the parent, and ``--all`` reaches both; the child's outlives the parent."""
        with program() as service:
            child = int(service.do(self.FORK))
            wait_until(lambda: listens(child), "the child listens")
            assert 0 == ctl(child, "pause")[0]
            assert {service.pid: False, child: True} == {
                pid: one["paused"] for pid, one in statuses(service.pid).items()
            }
            assert 0 == ctl(service.pid, "reload", "--all")[0]
            assert [2, 2] == [one["generation"] for one in statuses(service.pid).values()]
            service.process.kill()
            service.process.wait(30)
            wait_until(lambda: not listens(service.pid), "the parent's is gone")
            try:
                assert 0 == ctl(child, "status")[0]
            finally:
                os.kill(child, signal.SIGKILL)

    def test_a_childs_child_has_one_too(self) -> None:
        """The hooks hold in every generation."""
        with program() as service:
            child = int(service.do("pid = os.fork(); pid or os.fork(); pid or signal.pause(); print(pid, flush=True)"))
            wait_until(lambda: len(statuses(service.pid)) == 3, "parent, child and grandchild listen")
            assert child in statuses(service.pid)

    def test_children_that_end_leave_nothing(self) -> None:
        """A hundred of them, while commands come: the parent answers, and has no more descriptors than before."""
        with program() as service:
            before = psutil.Process(service.pid).num_fds()
            loop = "for _ in range(100): (lambda pid: os._exit(0) if pid == 0 else os.waitpid(pid, 0))(os.fork())"
            assert service.process.stdin is not None
            service.process.stdin.write(f"{loop}\nprint('done', flush=True)\n")
            service.process.stdin.flush()
            assert [0, 0, 0] == [ctl(service.pid, "status")[0] for _ in range(3)]
            assert "done\n" == service.line()
            wait_until(lambda: psutil.Process(service.pid).num_fds() <= before, "descriptors are closed")
            assert 0 == ctl(service.pid, "status")[0]

    def test_listening_again_beside_forks(self) -> None:
        """A child holds its parent's socket until it comes to close it; the parent's next line waits for that."""
        fork = "[os._exit(0) if (pid := os.fork()) == 0 else os.waitpid(pid, 0) for _ in range(300)]"
        again = "[(control.stop(), control.listen()) for _ in range(50)]"
        with program() as service:
            service.do(f"import threading; t = threading.Thread(target=lambda: {fork}); t.start(); print(flush=True)")
            assert "50" == service.do(f"print(len({again}), flush=True); t.join()")
            assert 0 == ctl(service.pid, "status")[0]


class TestSighup:
    def test_reloads_what_has_a_model(self) -> None:
        """Also in a child that was forked afterwards, whose guards are its own."""
        with program("control.listen(sighup=True)") as service:
            child = int(service.do(TestForks.FORK))
            wait_until(lambda: listens(child), "the child listens")
            os.kill(service.pid, signal.SIGHUP)
            wait_until(lambda: statuses(service.pid)[service.pid]["generation"] == 2, "it has reloaded")
            assert 1 == statuses(service.pid)[child]["generation"]
            os.kill(child, signal.SIGHUP)
            wait_until(lambda: statuses(service.pid)[child]["generation"] == 2, "the child has reloaded")

    def test_a_storm_of_signals(self) -> None:
        """While calls, loads and commands run: the process serves on, and the last signal is followed by a load."""
        with program("control.listen(sighup=True)") as service:
            for _ in range(300):
                os.kill(service.pid, signal.SIGHUP)
            assert 0 == ctl(service.pid, "status")[0]
            wait_until(lambda: statuses(service.pid)[service.pid]["state"] == "ready", "it has settled")
            assert statuses(service.pid)[service.pid]["generation"] >= 2

    def test_an_earlier_handler_is_called_too(self) -> None:
        """That of the service, installed before."""
        line = "signal.signal(signal.SIGHUP, lambda *_: os.write(1, b'earlier\\n')); control.listen(sighup=True)"
        with program(line) as service:
            os.kill(service.pid, signal.SIGHUP)
            assert "earlier\n" == service.line()
            wait_until(lambda: statuses(service.pid)[service.pid]["generation"] == 2, "it has reloaded")


APP = """
    import os
    from modelguard import control, guard
    from modelguard.errors import NotSupported

    nlp = guard(dict, reload_on=None, name="nlp")
    REFUSED = ""
    try:
        control.listen(sighup=SIGHUP)
    except NotSupported as error:
        REFUSED = str(error)

    @nlp
    def answer(model):
        return f"{os.getpid()} {nlp.status().generation} {REFUSED}"

    def app(environ, start_response):
        body = answer().encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    async def aapp(scope, receive, send):
        assert scope["type"] == "http", "no lifespan"
        await nlp.aload()
        body = answer().encode()
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})
"""


@contextmanager
def server(folder: Path, *command: str, sighup: bool = False) -> Iterator[Server]:
    """A real server, which serves."""
    write_app(folder, APP.replace("SIGHUP", str(sighup)))
    with Server(folder, *command) as started:
        started.wait_until_serving("/")
        yield started


def workers_of(started: Server, count: int) -> dict[int, dict[str, Any]]:
    """The processes that take commands, once there are as many as expected, each with a loaded model."""

    def loaded() -> bool:
        started.ask("/")
        found = statuses(started.process.pid)
        return len(found) == count and sum(one["generation"] > 0 for one in found.values()) >= min(count, 2)

    wait_until(loaded, f"{count} processes take commands")
    return statuses(started.process.pid)


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="needs uvicorn")
class TestUvicorn:
    COMMAND = ("-m", "uvicorn", "app:aapp", "--port", "0", "--lifespan", "off")

    def test_one_process(self, tmp_path: Path) -> None:
        """Reload and SIGHUP, while it serves; its own end by SIGTERM is as usual."""
        with server(tmp_path, *self.COMMAND, sighup=True) as started:
            pid = started.process.pid
            assert 0 == ctl(pid, "reload")[0]
            assert f"{pid} 2" == started.ask("/").text.strip()
            os.kill(pid, signal.SIGHUP)
            wait_until(lambda: started.ask("/").text.split()[1] == "3", "it has reloaded")
            started.process.terminate()
            assert started.process.wait(30) in {0, -signal.SIGTERM}

    def test_workers(self, tmp_path: Path) -> None:
        """The server's own process lists them, and ``--all`` pauses each."""
        with server(tmp_path, *self.COMMAND, "--workers", "2") as started:
            found = workers_of(started, 2)
            status, text = ctl(started.process.pid, "pause")
            assert (2, True) == (status, all(str(pid) in text for pid in found))
            assert 0 == ctl(started.process.pid, "pause", "--all")[0]
            assert [True, True] == [one["paused"] for one in statuses(started.process.pid).values()]


@pytest.mark.skipif(importlib.util.find_spec("gunicorn") is None, reason="needs gunicorn")
class TestGunicorn:
    COMMAND = ("-m", "gunicorn", "app:app", "-b", "127.0.0.1:0", "--no-control-socket", "-w", "2")

    def test_workers(self, tmp_path: Path) -> None:
        """Each has a socket; the master, which has not imported the application, lists them."""
        with server(tmp_path, *self.COMMAND) as started:
            found = workers_of(started, 2)
            assert started.process.pid not in found
            assert 0 == ctl(started.process.pid, "reload", "--all")[0]
            assert all(one["generation"] >= 2 for one in statuses(started.process.pid).values())

    def test_preloaded(self, tmp_path: Path) -> None:
        """Master and workers take commands, a new worker too; to reload all does not load in the master."""
        with server(tmp_path, *self.COMMAND, "--preload") as started:
            master = started.process.pid
            found = workers_of(started, 3)
            assert 0 == ctl(master, "reload", "--all")[0]
            assert "new" == statuses(master)[master]["state"]
            victim = next(pid for pid in found if pid != master)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: len(statuses(master)) == 3 and victim not in statuses(master), "its successor listens")

    @pytest.mark.parametrize("preload", [True, False])
    def test_sighup_stays_gunicorns(self, tmp_path: Path, preload: bool) -> None:  # noqa: FBT001 - a parameter
        """The line is refused, with the server's name, and the signal replaces the workers as usual."""
        options = ("--preload",) if preload else ()
        with server(tmp_path, *self.COMMAND, *options, sighup=True) as started:
            first = started.ask("/").text
            assert "gunicorn uses SIGHUP itself" in first
            before = {child.pid for child in psutil.Process(started.process.pid).children()}
            os.kill(started.process.pid, signal.SIGHUP)
            wait_until(
                lambda: before.isdisjoint(child.pid for child in psutil.Process(started.process.pid).children()),
                "other workers serve",
            )
            assert 200 == started.ask("/").status
