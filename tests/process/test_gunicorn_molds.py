"""Models that are renewed under gunicorn: a mold loads each generation, and all workers have one copy of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from tests.process.gunicorn_server import APP, Gunicorn, running
from tests.process.harness import Clients, alive, wait_until

from modelguard import prefork

pytest.importorskip("gunicorn")
pytestmark = [
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform != "linux", reason="molds need Linux"),
]

POLICY = "Modified(WEIGHTS, atomic=True)"

#: The model has many objects, all of which each worker reads when it warms up.
LARGE = APP.replace("range(1000)", "range(250_000)").replace(
    "WARMED.append", "sum(len(word) + len(one) for word, one in model.items() if isinstance(one, list)); WARMED.append"
)

#: It takes commands, and can be broken by files that appear.
CONTROLLED = "    from modelguard import control\n    control.listen()\n" + APP.lstrip("\n")


def renew(server: Gunicorn, version: str) -> None:
    """Publish new weights, and wait until only workers and the mold that have them are left."""
    server.replace_file("weights", version)
    wait_for_version(server, version)


def wait_for_version(server: Gunicorn, version: str, count: int = 12) -> None:
    def all_new() -> bool:
        settled = len(server.children()) == server.size and len(server.molds()) == 1
        return settled and {version} == {server.words()[1] for _ in range(count)}

    wait_until(all_new, what=f"all have version {version}")


def tree(server: Gunicorn) -> int:
    """Bytes of the server and all its children, shared pages counted once."""
    top = psutil.Process(server.process.pid)
    return sum(one.memory_full_info().pss for one in (top, *top.children(recursive=True)))


def family(server: Gunicorn) -> list[int]:
    return [server.process.pid, *(one.pid for one in psutil.Process(server.process.pid).children(recursive=True))]


def ctl(pid: int, *words: str) -> str:
    command = [sys.executable, "-m", "modelguard", "ctl", str(pid), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_renewed_models_stay_one_copy(tmp_path: Path) -> None:
    """After each of three renewals four workers that have read the whole model hold little more than one of it."""
    with running(tmp_path, "-w", "4", app=LARGE, policy=POLICY) as server:
        wait_for_version(server, "1")
        sizes = [tree(server)]
        for version in "234":
            renew(server, version)
            sizes.append(tree(server))
        one = sizes[0] if prefork.immortalize_unsupported() else largest_alone(server)
        most = 1.15 if prefork.immortalize_unsupported() else 1.6  # of a model of 50 MB; four copies make more than 3
        assert max(sizes) < most * one, f"{sizes}, one process {one}"


def largest_alone(server: Gunicorn) -> int:
    """What the mold would use if nothing were shared."""
    (mold,) = server.molds()
    info = psutil.Process(mold).memory_full_info()
    return int(info.rss - info.shared)


def test_only_the_mold_loads(tmp_path: Path) -> None:
    """The master has imported the application and holds no model, also not one that was loaded on import."""
    app = LARGE + "\n    nlp.load()\n    LOADED_ON_IMPORT = True\n"
    with running(tmp_path, "-w", "2", app=app, policy=POLICY) as server:
        (mold,) = server.molds()
        master = psutil.Process(server.process.pid).memory_full_info().uss
        assert master < 0.5 * psutil.Process(mold).memory_info().rss
        assert ["1", "True", "True"] == server.words()[1:]


def test_a_reload_renews_all_workers(tmp_path: Path) -> None:
    """Asked of the master or of a worker, by the control socket: all workers get the new weights, in a new mold."""
    with running(tmp_path, "-w", "2", app=CONTROLLED, policy="TTL('1h')") as server:
        old = server.molds()
        server.replace_file("weights", "2")
        ctl(server.process.pid, "reload", "nlp")
        wait_for_version(server, "2")
        server.replace_file("weights", "3")
        ctl(min(server.children()), "reload", "nlp")
        wait_for_version(server, "3")
        assert not old & server.molds()
        status = ctl(server.process.pid, "status", "--all")
        assert 4 == status.count("generation 3"), status  # the master, the mold and two workers


def test_new_weights_may_take_their_time(tmp_path: Path) -> None:
    """``wait_timeout`` is how long calls wait for a model. It bounds no renewal, as it bounds no first load."""
    app = APP.replace("prefork=True", "prefork=True, wait_timeout=0")
    with running(tmp_path, "-w", "1", app=app, policy=POLICY) as server:
        renew(server, "2")
        assert "load failed" not in server.log


def test_a_failed_load_keeps_mold_and_workers(tmp_path: Path) -> None:
    """The reason is in the log, and a worker that is due meanwhile comes from the mold that there is."""
    with running(tmp_path, "-w", "1", policy=f"{POLICY} | Errors(1)") as server:
        old, molds = server.children(), server.molds()
        server.replace_file("weights", "broken")
        wait_until(lambda: "OSError: no weights in there" in server.log, what="the load fails")
        assert (old, molds) == (server.children(), server.molds())
        server.words("/fail")
        wait_until(lambda: not old & server.children() and len(server.children()) == 1, what="the worker is replaced")
        assert ["1", "True", "True"] == server.words()[1:]


#: Descriptors run out in the master while there is a file "full".
FULL = """
    import errno, os
    import modelguard.frameworks._gunicorn_molds as molds

    def short_of(function):
        def give(*args):
            if os.path.exists("full"):
                raise OSError(errno.EMFILE, "Too many open files")
            return function(*args)
        return give

    {0} = short_of({0})
"""


@pytest.mark.parametrize("call", ["molds.pair", "os.pidfd_open"])
def test_a_master_without_descriptors_keeps_workers_and_tries_again(call: str, tmp_path: Path) -> None:
    """The renewal fails as any load does, and the server goes on; gunicorn would end at an error in its main loop."""
    with running(tmp_path, "-w", "2", app=FULL.format(call) + APP, policy=POLICY) as server:
        wait_for_version(server, "1")
        (tmp_path / "full").touch()
        server.replace_file("weights", "2")
        wait_until(lambda: "Too many open files; generation 1 stays in use" in server.log, what="the load fails")
        assert "1" == server.words()[1]
        (tmp_path / "full").unlink()
        wait_for_version(server, "2")


def test_a_mold_that_is_killed_harms_no_request(tmp_path: Path) -> None:
    """The workers serve on; another mold is made, replaces them, and can fork."""
    with running(tmp_path, "-w", "2", policy="TTL('1h')") as server:
        (mold,), old = server.molds(), server.children()
        with Clients(server, count=2) as clients:
            os.kill(mold, signal.SIGKILL)
            wait_until(lambda: f"the mold {mold} has ended" in server.log, what="it is told")
            wait_until(lambda: not old & server.children() and len(server.children()) == 2, what="all are replaced")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        for pid in server.children():
            os.kill(pid, signal.SIGKILL)
        gone = server.children()
        wait_until(lambda: len(server.children() - gone) == 2, what="killed workers come back")


#: A hook of the application's starts a process in the master, by a fork.
HELPER = """
    import os
    import time
    from pathlib import Path
    from modelguard.frameworks.gunicorn import *

    def when_ready(server):
        pid = os.fork()
        if pid == 0:
            time.sleep(120)
            os._exit(0)
        Path("helper").write_text(str(pid))
"""


def test_a_mold_ends_beside_what_hooks_have_forked(tmp_path: Path) -> None:
    """A process that the master has forked, as gunicorn's dirty workers are, keeps no old model in memory."""
    (tmp_path / "own.py").write_text(textwrap.dedent(HELPER))
    with running(tmp_path, "-w", "1", "-c", "own.py", policy=POLICY) as server:
        helper = int((tmp_path / "helper").read_text())
        (first,) = server.molds() - {helper}
        server.replace_file("weights", "2")
        wait_until(lambda: not alive(first), what="the first mold ends", seconds=30)
        assert alive(helper)
        assert "2" == server.words()[1]


def test_workers_that_are_killed_come_from_the_mold(tmp_path: Path) -> None:
    """They have its model, and nothing is loaded for them."""
    with running(tmp_path, "-w", "2", policy="TTL('1h')") as server:
        old = server.children()
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(server.children() - old) == 2, what="they come back")
        assert ["1", "True", "True"] == server.words()[1:]
        assert 1 == server.log.count("prepared nlp")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
@pytest.mark.parametrize("to", ["master", "group"])
def test_no_process_is_left_behind(number: signal.Signals, to: str, tmp_path: Path) -> None:
    """However the master ends, and also if the signal goes to all processes, as from a terminal."""
    with running(tmp_path, "-w", "2", policy="TTL('1h')") as server:
        processes = family(server)
        assert 4 == len(processes)
        if to == "group":
            os.killpg(server.process.pid, number)
        else:
            server.process.send_signal(number)
        assert server.process.wait(25) in (0, -signal.SIGKILL)
        wait_until(lambda: not any(map(alive, processes)), what="all have ended")
        assert "Traceback" not in server.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_master_that_ends_while_a_mold_loads_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """The mold that loads ends with it, without a traceback in the log."""
    with running(tmp_path, "-w", "1", policy=POLICY) as server:
        (tmp_path / "slow").touch()
        server.replace_file("weights", "2")
        wait_until((tmp_path / "loading").exists, what="the load begins")
        processes = family(server)
        assert 4 == len(processes)
        server.process.send_signal(number)
        server.process.wait()
        wait_until(lambda: not any(map(alive, processes)), what="all have ended")
        assert "Traceback" not in server.log


def test_a_master_that_ends_waits_for_no_load(tmp_path: Path) -> None:
    """However long the mold would load: its exit takes no five seconds for that, nor five for the guard that waits."""
    app = APP.replace("time.sleep(2)", "time.sleep(100)")
    with running(tmp_path, "-w", "1", app=app, policy=POLICY) as server:
        (tmp_path / "slow").touch()
        server.replace_file("weights", "2")
        wait_until((tmp_path / "loading").exists, what="the load begins")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(9) == 0
        assert "failed" not in server.log


TWO = """
    other = guard(lambda: (HERE / "others").read_text(), reload_on=Modified(HERE / "others", atomic=True),
                  prefork=True, name="other")
    first = answer

    def answer(path):
        worker, version, *rest = first(path).split(" ")
        with other.lease() as model:
            return " ".join([worker, version + model, *rest])
"""


def test_several_guards_share_one_mold(tmp_path: Path) -> None:
    """New weights of one make a mold with all; new weights of both at once end with both, in few molds."""
    (tmp_path / "others").write_text("a")
    app = textwrap.dedent(APP)
    at = app.index("def app(")
    app = app[:at] + textwrap.dedent(TWO) + app[at:]
    with running(tmp_path, "-w", "2", app=app, policy=POLICY) as server:
        assert "1a" == server.words()[1]
        server.replace_file("others", "b")
        wait_for_version(server, "1b")
        assert 2 == server.log.count("prepared nlp, other")
        server.replace_file("others", "c")
        server.replace_file("weights", "2")
        wait_for_version(server, "2c")
        assert server.log.count("prepared nlp, other") <= 4
        assert 1 == len(server.molds())


def test_models_are_unloaded_when_their_last_worker_has_ended(tmp_path: Path) -> None:
    """The hook is called once for each generation, by its mold, and that of the last when the server ends."""
    app = APP.replace("warmup=warm,", "warmup=warm, unload=gone,").replace(
        "    PARENT, WARMED",
        "    def gone(model):\n"
        "        with open(HERE / 'gone', 'a') as file:\n"
        '            file.write(f\'{model["version"]} {os.getpid()} {model["pid"]}\\n\')\n\n'
        "    PARENT, WARMED",
    )
    with running(tmp_path, "-w", "2", app=app, policy=POLICY) as server:
        renew(server, "2")
        (first,) = (tmp_path / "gone").read_text().splitlines()
        server.process.terminate()
        assert 0 == server.process.wait(25)
        last = (tmp_path / "gone").read_text().splitlines()[1:]
    version, ended, loaded = first.split(" ")
    assert ("1", ended) == (version, loaded)
    assert ["2"] == [line.split(" ")[0] for line in last]


HUP_CONFIG = """
    from pathlib import Path
    from modelguard.frameworks import gunicorn as sharing
    from modelguard.frameworks.gunicorn import *

    said = Path("said").read_text()

    def post_fork(server, worker):
        sharing.post_fork(server, worker)
        worker.log.info("configuration %s in %s", said, worker.pid)
"""


def test_hup_brings_a_new_configuration_to_all_workers(tmp_path: Path) -> None:
    """At once there are fresh workers with the old one; a new mold then has the new one. No request is lost."""
    (tmp_path / "said").write_text("one")
    (tmp_path / "own.py").write_text(textwrap.dedent(HUP_CONFIG))
    with running(tmp_path, "-w", "2", "-c", "own.py", policy="TTL('1h')") as server:
        (tmp_path / "said").write_text("two")
        with Clients(server, count=2) as clients:
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda: server.log.count("configuration two") >= 2, what="the workers have it")
            wait_until(
                lambda: (
                    {f"configuration two in {pid}" in server.log for pid in server.children()} == {True}
                    and len(server.children()) == 2
                ),
                what="all have it",
            )
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        assert 2 == server.log.count("prepared nlp")
        assert server.process.poll() is None


#: As gevent's patches do: it collects every child that ends, and tells of those whose forks it has seen.
GEVENT_CONFIG = """
    import os
    from modelguard.frameworks.gunicorn import *

    fork_, waitpid_, seen = os.fork, os.waitpid, set()

    def fork(callback=None, loop=None, ref=False, fork=fork_):
        pid = fork()
        seen.add(pid)
        return pid

    def waitpid(pid, options):
        found = waitpid_(pid, options)
        return found if found[0] in seen else (0, 0)

    fork.__module__ = waitpid.__module__ = "gevent.os"
    os.fork, os.waitpid = fork, waitpid
"""


def test_a_worker_that_ends_is_replaced_where_gevent_collects_children(tmp_path: Path) -> None:
    """The end of a worker that a mold has forked is known to gunicorn, and the server ends with its workers."""
    (tmp_path / "own.py").write_text(textwrap.dedent(GEVENT_CONFIG))
    with running(tmp_path, "-w", "1", "-c", "own.py", policy="TTL('1h')") as server:
        os.kill(int(server.words()[0]), signal.SIGKILL)
        server.wait_until(lambda: 2 == server.log.count("Booting worker"), "another worker")
        server.process.send_signal(signal.SIGTERM)
        assert 0 == server.process.wait(25)


def test_objects_stay_mortal_if_that_is_asked_for(tmp_path: Path) -> None:
    """``MODELGUARD_IMMORTALIZE=no`` holds in a mold."""
    with running(tmp_path, "-w", "1", app=LARGE, policy="TTL('1h')", MODELGUARD_IMMORTALIZE="no") as server:
        assert "none immortal (not asked for)" in server.log


def test_a_unix_socket_is_handed_on(tmp_path: Path) -> None:
    """Workers of a mold that is younger than the socket, and of the first, which is older, both listen on it."""
    path = tmp_path / "socket"
    with Gunicorn(tmp_path, "-w", "1", "-b", f"unix:{path}", policy=POLICY) as server:

        def version() -> str:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(20)
                line.connect(str(path))
                line.sendall(b"GET / HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
                answer = b""
                while more := line.recv(65_536):
                    answer += more
            return answer.rpartition(b"\r\n\r\n")[2].decode().split(" ")[1]

        wait_until(lambda: "Booting worker" in server.log, what="it starts")
        assert "1" == version()
        server.replace_file("weights", "2")
        wait_until(lambda: "2" == version(), what="the new weights serve")


def test_each_worker_may_have_a_port_of_its_own(tmp_path: Path) -> None:
    """With ``reuse_port`` there is no socket to hand on: each worker makes its own, and serves on it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Gunicorn(tmp_path, "-w", "2", "--reuse-port", "-b", f"127.0.0.1:{port}", policy=POLICY) as server:
        server._port = port
        wait_until(lambda: server.log.count("Booting worker") == 2, what="both start")
        wait_for_version(server, "1")


def test_old_and_new_weights_that_are_compared_are_loaded_in_the_master(tmp_path: Path) -> None:
    """A mold has the new model alone, so ``validate(new, old)`` keeps the master's way, and says what it costs."""
    app = LARGE.replace("warmup=warm,", "warmup=warm, validate=lambda new, old: True,")
    with running(tmp_path, "-w", "1", app=app, policy=POLICY) as server:
        assert not server.molds()
        (line,) = [line for line in server.log.splitlines() if "copies of guard 'nlp'" in line]
        assert "up to 2 copies" in line
