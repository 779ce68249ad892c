"""gunicorn with one copy of the model: real servers on loopback, under load where that is the point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from tests.process.gunicorn_server import APP, Gunicorn, running
from tests.process.harness import Clients, wait_until

from modelguard import prefork

pytest.importorskip("gunicorn")

KINDS = {
    "sync": ("-w", "2"),
    "gthread": ("-w", "2", "-k", "gthread", "--threads", "4"),
    "asgi": ("-w", "2", "-k", "asgi"),
}

every_kind = pytest.mark.parametrize("kind", KINDS)


def roll_out(server: Gunicorn, version: str) -> None:
    """Publish new weights, and wait until no worker with older ones is left."""
    old = server.children()
    server.replace_file("weights", version)
    wait_until(lambda: server.log.count("prepared nlp") == int(version), what=f"version {version} is prepared")
    wait_until(lambda: not old & server.children() and 2 == len(server.children()), what=f"all have version {version}")


@every_kind
@pytest.mark.timeout(120)
def test_workers_share_the_masters_model_and_are_warm_before_the_first_request(kind: str, tmp_path: Path) -> None:
    """The configuration alone is enough: the model is the master's, and each worker has warmed up by itself."""
    with running(tmp_path, *KINDS[kind]) as server:
        answers = [server.words() for _ in range(20)]
        assert {("1", "True", "True")} == {tuple(words[1:]) for words in answers}
        assert {int(words[0]) for words in answers} <= server.children()
        assert "modelguard: prepared nlp" in server.log


@every_kind
@pytest.mark.parametrize("connections", ["one request each", "kept alive"])
@pytest.mark.timeout(120)
def test_no_request_is_lost_while_workers_are_recycled(kind: str, connections: str, tmp_path: Path) -> None:
    """A due policy has workers replaced one by one by fresh ones that share; every request sent is answered."""
    with running(tmp_path, *KINDS[kind], policy="Uses(50)") as server:
        with Clients(server, keep_alive=connections == "kept alive") as clients:
            wait_until(lambda: server.replaced() >= 5, what="five workers are replaced")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        assert 0 == clients.closed_before_use, "a connection is closed after a response that says so"
        assert len(clients.pids) >= 4
        assert {"1": clients.answered} == clients.versions
        assert 1 == server.log.count("prepared nlp"), "the master loaded once"
        assert ["1", "True", "True"] == server.words()[1:]


@every_kind
@pytest.mark.timeout(120)
def test_new_weights_are_rolled_out_without_a_lost_request(kind: str, tmp_path: Path) -> None:
    """The master loads a changed file and all workers are replaced; a file that cannot be loaded changes nothing."""
    policy = "Modified(WEIGHTS, atomic=True) | Uses(10**9)"
    with running(tmp_path, *KINDS[kind], policy=policy) as server:
        with Clients(server) as clients:
            old = server.children()
            server.replace_file("weights", "broken")
            wait_until(lambda: "no weights in there" in server.log, what="the load fails")
            assert old == server.children(), "a failed load leaves all as it was"
            roll_out(server, "2")
            roll_out(server, "3")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        assert {"1", "2", "3"} == set(clients.versions)
        assert 4 == server.replaced()
        assert ["3", "True", "True"] == server.words()[1:]


@pytest.mark.timeout(120)
def test_a_ttl_is_the_masters_to_keep(tmp_path: Path) -> None:
    """For ``TTL`` only the master acts: it reloads and replaces workers, and no worker recycles itself for its age."""
    with running(tmp_path, "-w", "2", policy="TTL('2s')") as server:
        wait_until(lambda: server.log.count("prepared nlp") >= 3 and server.replaced() >= 2, what="two renewals")
        assert server.replaced() == server.log.count("is being replaced: there are new weights")


@pytest.mark.timeout(120)
def test_the_copies_of_a_renewed_model_are_announced(tmp_path: Path) -> None:
    """Where objects must stay mortal, a warning at the start says how many copies to expect; elsewhere there is one."""
    app = APP.replace("range(1000)", "range(150_000)")
    with running(tmp_path, "-w", "2", app=app, policy="TTL('1h')") as server:
        lines = [line for line in server.log.splitlines() if "copies of guard 'nlp'" in line]
        assert (prefork.immortalize_unsupported() is not None) == len(lines)
        assert all("[WARNING]" in line and "up to 3 copies" in line for line in lines)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["a mold", "the master"])
def test_no_worker_is_forked_in_the_middle_of_a_load(where: str, tmp_path: Path) -> None:
    """A HUP that comes while the master loads is delayed; a mold forks meanwhile. Then all have the new weights."""
    app = APP if where == "a mold" else APP.replace("warmup=warm,", "warmup=warm, validate=lambda new, old: True,")
    with running(tmp_path, "-w", "2", app=app, policy="Modified(WEIGHTS, atomic=True)") as server:
        (tmp_path / "slow").touch()
        old = server.children()
        with Clients(server, count=2) as clients:
            server.replace_file("weights", "2")
            wait_until((tmp_path / "loading").exists, what="the load begins")
            server.process.send_signal(signal.SIGHUP)
            wait_until(
                lambda: "2" == server.words()[1] and not old & server.children(), what="all have the new weights"
            )
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"


@pytest.mark.timeout(120)
def test_new_weights_that_no_child_can_warm_up_are_not_rolled_out(tmp_path: Path) -> None:
    """The trial child finds it; the log reports it, and the workers continue with the old weights."""
    with running(tmp_path, "-w", "2", policy="Modified(WEIGHTS, atomic=True)") as server:
        old = server.children()
        (tmp_path / "cold").touch()
        server.replace_file("weights", "2")
        wait_until(lambda: "workers keep the old ones" in server.log, what="it is told")
        assert {"1"} == {server.words()[1] for _ in range(10)}
        assert (old, 0) == (server.children(), server.replaced())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("policy", "path"), [("Errors(3)", "/fail"), ("MemoryGrowth('40 MB')", "/leak")], ids=["errors", "growth"]
)
def test_every_policy_about_the_process_recycles_it(policy: str, path: str, tmp_path: Path) -> None:
    """Errors in a row and grown memory end with a fresh worker of the same master."""
    with running(tmp_path, "-w", "1", policy=policy) as server:
        first = server.children()

        def replaced() -> bool:
            server.words(path)
            return server.replaced() >= 1

        wait_until(replaced, what="the worker is replaced")
        wait_until(lambda: not first & server.children(), what="the old worker is gone")
        assert ["1", "True", "True"] == server.words()[1:]


@every_kind
@pytest.mark.timeout(120)
def test_a_long_request_is_finished_before_its_worker_goes(kind: str, tmp_path: Path) -> None:
    """A worker that is replaced in the middle of a request answers it; meanwhile the fresh one serves the others."""
    with running(tmp_path, *KINDS[kind], policy="Uses(1)") as server:
        slow: list[list[str]] = []
        threads = [threading.Thread(target=lambda: slow.append(server.words("/slow"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            assert 4 == len(server.words())
        for thread in threads:
            thread.join(30)
        assert [4] * 4 == [len(words) for words in slow], server.log


@pytest.mark.timeout(120)
def test_a_single_worker_is_replaced_without_a_gap(tmp_path: Path) -> None:
    """The fresh worker serves before the only other one goes."""
    with running(tmp_path, "-w", "1", policy="Uses(50)") as server:
        with Clients(server, count=2) as clients:
            wait_until(lambda: server.replaced() >= 4, what="four workers are replaced")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"


SLEEPY_CONFIG = """
    from gunicorn.arbiter import Arbiter
    from modelguard.frameworks.gunicorn import *

    wait = Arbiter.wait_for_signals
    Arbiter.wait_for_signals = lambda self, timeout: wait(self, 600)
"""


@pytest.mark.timeout(120)
def test_the_master_is_told_and_need_not_look(tmp_path: Path) -> None:
    """A worker that is due, and a fresh one that serves, wake it: a replacement does not wait for its regular round."""
    (tmp_path / "own.py").write_text(textwrap.dedent(SLEEPY_CONFIG))
    with running(tmp_path, "-w", "1", "-c", "own.py", policy="Errors(1)") as server:
        old = server.children()
        server.words("/fail")
        wait_until(lambda: not old & server.children() and len(server.children()) == 1, what="the fresh one is alone")


@pytest.mark.timeout(120)
def test_hup_replaces_the_workers_and_keeps_the_model(tmp_path: Path) -> None:
    """Its own reload does not import a preloaded application again: fresh workers, same model, same master."""
    with running(tmp_path, "-w", "2", policy="Uses(10**9)") as server:
        old = server.children()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: not old & server.children() and 2 == len(server.children()), what="all are replaced")
        assert ["1", "True", "True"] == server.words()[1:]
        assert 1 == server.log.count("prepared nlp")
        assert server.process.poll() is None


@pytest.mark.timeout(120)
def test_workers_that_are_killed_come_back(tmp_path: Path) -> None:
    """The server's own supervision of its workers still works, and so does its orderly shutdown."""
    with running(tmp_path, "-w", "2", policy="Uses(10**9)") as server:
        old = server.children()
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        answered: set[int] = set()

        def both_answer() -> bool:
            answered.add(int(server.words()[0]))
            return server.children() <= answered - old and 2 == len(server.children())

        # gunicorn loses a request to end that comes while a worker starts, and kills that one 30 s later.
        server.wait_until(both_answer, "both come back")
        assert ["1", "True", "True"] == server.words()[1:]
        server.process.send_signal(signal.SIGTERM)
        assert 0 == server.process.wait(25)


@pytest.mark.timeout(120)
def test_a_replacement_that_cannot_warm_up_harms_nobody(tmp_path: Path) -> None:
    """The new worker ends with a clear line, the old one still serves, and gunicorn does not stop."""
    with running(tmp_path, "-w", "1", policy="Uses(5)") as server:
        (tmp_path / "cold").touch()
        old = server.children()
        with Clients(server, count=2) as clients:
            wait_until(lambda: "the old worker stays" in server.log, what="the replacement is given up")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        assert "cannot start" in server.log
        assert "OSError: no warmth" in server.log
        assert old == server.children()


@pytest.mark.timeout(120)
def test_a_worker_that_cannot_warm_up_does_not_start_again_and_again(tmp_path: Path) -> None:
    """A worker that is missing and cannot start ends the server with the reason, as gunicorn does with such workers."""
    with running(tmp_path, "-w", "1", policy="None") as server:
        (tmp_path / "cold").touch()
        for pid in server.children():
            os.kill(pid, signal.SIGKILL)
        assert 3 == server.process.wait(30)
        assert "cannot start" in server.log
        assert "OSError: no warmth" in server.log
        assert "Worker failed to boot" in server.log
        assert server.log.count("Booting worker") == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("app", "environ", "says"),
    [
        (
            APP.replace("nlp = guard(", "nlp = lambda f: f; _ = (lambda *a, **k: 0)("),
            {},
            "the application made no guard",
        ),
        (APP.replace('if (HERE / "cold").exists() and', "if"), {}, "OSError: no warmth"),
        (APP.replace('version == "broken"', "True"), {}, "no weights in there"),
        (APP, {"MODELGUARD_WARM_TIMEOUT": "soon"}, "MODELGUARD_WARM_TIMEOUT='soon'"),
    ],
    ids=["no guard", "no warm-up", "no weights", "no duration"],
)
def test_a_server_that_cannot_share_does_not_start_and_says_why(
    app: str, environ: dict[str, str], says: str, tmp_path: Path
) -> None:
    """One clear line instead of workers that die, before the port is open."""
    with Gunicorn(tmp_path, "-w", "1", app=app, **environ) as server:
        assert server.process.wait(40) not in (0, None)
        assert says in server.log
        assert "Listening" not in server.log


OWN_CONFIG = """
    from modelguard.frameworks import gunicorn as sharing
    from modelguard.frameworks.gunicorn import *

    def post_fork(server, worker):
        sharing.post_fork(server, worker)
        worker.log.info("mine too: %s", worker.pid)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", ["None", "TTL('1h')"])
def test_a_worker_imports_nothing_at_its_first_requests(policy: str, tmp_path: Path) -> None:
    """What gunicorn itself looks for then has been looked for before the fork: each search costs a worker 0.4 MB."""
    app = APP.replace(
        "PARENT, WARMED",
        """class Search:
        def find_spec(name, path, target=None):
            SEARCHED.append((os.getpid(), name))

    SEARCHED = []
    sys.meta_path.insert(0, Search)
    PARENT, WARMED""",
        1,
    ).replace("import os, time", "import os, sys, time", 1)
    app = app.replace("{os.getpid() in WARMED}", "{[name for pid, name in SEARCHED if pid == os.getpid()]}")
    with running(tmp_path, "-w", "1", app=app, policy=policy) as server:
        assert "[]" == server.words()[3]


@pytest.mark.timeout(120)
def test_a_configuration_of_ones_own_imports_it_and_keeps_its_hooks(tmp_path: Path) -> None:
    """``from modelguard.frameworks.gunicorn import *`` is enough there, and own hooks call ours."""
    (tmp_path / "own.py").write_text(textwrap.dedent(OWN_CONFIG))
    with running(tmp_path, "-w", "2", "-c", "own.py", policy="Uses(20)") as server:
        with Clients(server, count=2) as clients:
            wait_until(lambda: server.replaced() >= 2, what="two are replaced")
        assert [] == clients.failures
        assert server.log.count("mine too") >= 3, "two at the start, and one that was replaced for certain"
        assert ["1", "True", "True"] == server.words()[1:]


@pytest.mark.timeout(60)
def test_a_configuration_without_preload_is_refused(tmp_path: Path) -> None:
    """A master that imports nothing has nothing to share."""
    (tmp_path / "own.py").write_text("from modelguard.frameworks.gunicorn import *\npreload_app = False\n")
    with Gunicorn(tmp_path, "-w", "1", "-c", "own.py") as server:
        assert 1 == server.process.wait(40)
        assert "preload_app=False" in server.log


#: A batched function alone, in the shape of the other applications.
BATCHED = """
    import os
    from modelguard import batched

    PARENT = os.getpid()

    @batched(max_size=4)
    def predict(paths):
        return [f"{os.getpid()} batched {os.getpid() != PARENT}" for _ in paths]

    def app(environ, start_response):
        body = predict(environ["PATH_INFO"]).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    async def aapp(scope, receive, send):
        assert scope["type"] == "http", "no lifespan"
        body = (await predict.aio(scope["path"])).encode()
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})
"""


@every_kind
@pytest.mark.timeout(120)
def test_an_application_that_has_batched_functions_alone(kind: str, tmp_path: Path) -> None:
    """It starts with the configuration as it is, and nothing is shared."""
    with running(tmp_path, *KINDS[kind], app=BATCHED) as server:
        assert ["batched", "True"] == server.words()[1:]
        assert "modelguard: prepared a process without guards" in server.log


@pytest.mark.timeout(90)
def test_an_asgi_application_on_a_wsgi_worker_is_refused_at_the_start(tmp_path: Path) -> None:
    """Without our hook gunicorn would answer each request with status 500 and a TypeError in its log."""
    (tmp_path / "app.py").write_text("async def app(scope, receive, send):\n    pass\n")
    words = ["-c", "python:modelguard.frameworks.gunicorn", "--bind", "127.0.0.1:0", "app:app"]
    command = [sys.executable, "-m", "gunicorn", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert 1 == done.returncode
    assert "worker_class='sync': speaks WSGI only" in done.stderr
