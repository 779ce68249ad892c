"""``scope="host"``: processes of one host share one mold, whoever started it and whoever of them dies."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
from tests.process.harness import wait_until
from tests.process.host_callers import APP, Caller, CallFailed, end_all, family, molds, nothing_left, sockets, write

pytestmark = pytest.mark.timeout(240)

#: The hook of a model that takes a while to close.
UNLOAD = """
    def unload(model):
        (HERE / "unloading").touch()
        time.sleep(1)
        (HERE / "unloaded").touch()

    model = guard"""

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the app's folder is."""
    return tmp_path


@pytest.fixture
def folder(place: Path) -> Iterator[Path]:
    """A folder with the app; nothing that met there is left afterwards."""
    write(place)
    yield place
    if (place / "run").exists() and not (place / "run").is_symlink():
        end_all(place)


def loads(folder: Path) -> int:
    """How often the model was loaded."""
    return len((folder / "loads").read_text().splitlines())


class TestOneMold:
    def test_all_processes_use_it(self, folder: Path) -> None:
        """The model is loaded once, whoever calls first, and each process sees the same mold and workers."""
        with Caller(folder) as one, Caller(folder) as two, Caller(folder) as three:
            everybody = (one, two, three)
            for caller in everybody:  # at once: they elect one broker
                caller.begin("result = app.predict()")
            answers = [caller.result() for caller in everybody]
            assert 1 == len({mold for _, mold in answers})
            assert 1 == loads(folder)
            assert 1 == len({caller.status("broker") for caller in everybody})
            assert {one.pid, two.pid, three.pid} == set(one.status("clients"))
            assert two.status("mold") == answers[0][1]
            for caller in everybody:  # the broker reports it beside the answers
                wait_until(lambda: caller.run("result = app.predict.ready"), "readiness")  # noqa: B023

    def test_every_kind_of_call(self, folder: Path) -> None:
        """Blocking, awaited, submitted and streamed calls, errors with their type, and large values."""
        with Caller(folder) as one, Caller(folder) as two:
            for caller in (one, two):
                assert 5 == caller.call("'echo', 5")
                assert 6 == caller.run("result = asyncio.run(app.predict.aio('echo', 6))")
                assert 7 == caller.run("result = app.predict.submit('echo', 7).result()")
                assert [0, 1, 2] == caller.run("result = list(app.numbers(3))")
                assert 5_000_000 == caller.run("result = len(app.predict('echo', bytes(5_000_000)))")
                with pytest.raises(CallFailed, match=r"KeyError.*missing"):
                    caller.call("'raise', 'missing'")
                with pytest.raises(CallFailed, match="TransferRefused"):
                    caller.call("'echo', threading.Lock()")

    def test_models_that_cannot_fork(self, folder: Path) -> None:
        """With start="spawn", two processes share the one model of a single worker: on a graphics card, say."""
        write(folder, APP.replace("workers=1, timeout", 'workers=1, start="spawn", timeout'))
        with Caller(folder) as one, Caller(folder) as two:
            assert one.call("", "narrow")[0] == two.call("", "narrow")[0]
            assert 1 == loads(folder)

    def test_a_reload_is_everybodys(self, folder: Path) -> None:
        """One process asks for it, and the others get the next mold; status counts it once."""
        with Caller(folder) as one, Caller(folder) as two:
            _, before = one.call()
            assert before == two.call()[1]
            one.run("app.predict.reload()")
            _, after = two.call()
            assert after != before
            assert after == one.call()[1]
            assert [1, 1] == [caller.status("reloads") for caller in (one, two)]
            assert 2 == loads(folder)

    def test_a_probe_is_ready_before_the_first_call(self, folder: Path) -> None:
        """A web worker that has made no call yet is ready if the others' mold is; alone it starts nothing."""
        with Caller(folder) as one, Caller(folder) as two:
            assert not two.run("result = app.predict.ready")
            assert [] == family(folder)
            one.run("app.predict.load()")
            two.run("""
                until = time.monotonic() + 30
                while not app.predict.ready and time.monotonic() < until:
                    time.sleep(0.01)
                result = app.predict.ready
                assert result
            """)

    def test_a_probe_where_no_thread_or_descriptor_is_left(self, folder: Path) -> None:
        """A process that cannot join the others now is not ready. It gets no error, and joins when it can."""
        with Caller(folder) as one, Caller(folder) as two:
            one.call()
            two.run("""
                import contextlib, resource
                from modelguard.isolation import _supervisor

                def no_thread(*_):
                    raise RuntimeError("can't start new thread")

                found, held = [], []
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (64, limit[1]))
                with contextlib.suppress(OSError):
                    while True:
                        held.append(os.dup(0))
                for fd in held[:6]:
                    found += app.predict.ready, app.predict.status().ready
                    os.close(fd)
                for fd in held[6:]:
                    os.close(fd)
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
                start_thread, _supervisor.start_thread = _supervisor.start_thread, no_thread
                found += app.predict.ready, app.predict.status().ready
                _supervisor.start_thread = start_thread
                assert not any(found), found
            """)
            wait_until(lambda: two.run("result = app.predict.ready"), "ready")

    def test_an_idle_mold_ends_for_all(self, folder: Path) -> None:
        """Idle counts the calls of all processes. The broker stays, all stay ready, and the next call loads again."""
        app = APP.replace("load, reload_on=None", 'load, reload_on=Idle("1s")').replace(
            "Backoff, Uses", "Backoff, Idle"
        )
        write(folder, app)
        with Caller(folder) as one, Caller(folder) as two:
            one.call()
            broker = two.status("broker")
            wait_until(lambda: [] == molds(folder), "the mold's end")
            for caller in (one, two):
                wait_until(lambda: caller.run("result = app.predict.ready"), "ready")  # noqa: B023
            assert two.call()
            assert broker == one.status("broker")
            assert 2 == loads(folder)

    def test_a_failed_load_is_told_with_its_cause(self, folder: Path) -> None:
        """LoadFailed with the loader's error and its traceback, as without a broker; the next load may succeed."""
        (folder / "fail").touch()
        with Caller(folder) as one:
            told = one.run("""
                try:
                    app.predict()
                except Exception as error:
                    cause = error.__cause__
                    result = [type(error).__name__, str(error), repr(cause), str(cause.__cause__)]
            """)
            assert "LoadFailed" == told[0]
            assert "OSError: no weights" in told[1]
            assert "OSError('no weights')" == told[2]
            assert "in load" in told[3]
            (folder / "fail").unlink()
            wait_until(lambda: answers(one), "the next load")

    def test_logs_of_a_call_reach_its_caller(self, folder: Path) -> None:
        """And no other process: each record is handled once, but for those that a busy caller misses."""
        with Caller(folder) as one, Caller(folder) as two:
            sent = 0

            def has_five(caller: Caller, name: str) -> bool:
                nonlocal sent
                sent += 1
                caller.call(f"'log', 'from {name}, {sent}.'")
                return caller.text().count(f"seen from {name}") >= 5

            wait_until(lambda: has_five(one, "one"), "one's records")
            wait_until(lambda: has_five(two, "two"), "two's records")
            assert "from two" not in one.text()
            assert "from one" not in two.text()
            seen = one.text() + two.text()
            assert all(seen.count(f", {number}.") <= 1 for number in range(1, sent + 1))

    def test_each_event_is_counted_once(self, folder: Path) -> None:
        """So that the sum over all web workers is right: of loads, and of workers that start."""
        with Caller(folder) as one, Caller(folder) as two:
            for caller in (one, two):
                caller.run("""
                    from modelguard import telemetry
                    seen = []
                    telemetry.set_hooks([lambda event: seen.append([type(event).__name__, event.guard])])
                    app.predict.load()
                """)

            def count(kind: str) -> int:
                return sum(caller.run(f"result = seen.count([{kind!r}, 'app.predict'])") for caller in (one, two))

            two.run("app.predict.reload()")
            wait_until(lambda: count("LoadFinished") == 2, "both loads")
            wait_until(lambda: count("WorkerStarted") == 4, "two workers of each mold")
            one.run("app.predict()")
            assert 2 == count("LoadFinished")
            assert 4 == count("WorkerStarted")

    def test_max_queue_counts_the_calls_of_all(self, folder: Path) -> None:
        """The queue is the host's: with one worker and two places, the fourth call is refused, whoever makes it."""
        with ExitStack() as stack:
            callers = [stack.enter_context(Caller(folder)) for _ in range(4)]
            for caller in callers:
                caller.run("app.narrow()")
            callers[0].begin("app.narrow(8.0)")
            wait_until(lambda: 1 == callers[3].status("in_flight", "narrow"), "a call")
            for caller in callers[1:3]:
                caller.begin("result = app.narrow()")
            wait_until(lambda: 3 == callers[3].status("in_flight", "narrow"), "two that wait")
            with pytest.raises(CallFailed, match="QueueFull"):
                callers[3].call("", "narrow")
            for caller in callers[:3]:
                caller.result()

    def test_deadlines_hold_in_the_queue(self, folder: Path) -> None:
        """A call whose time ends while it waits leaves the queue, and its connection serves on."""
        with Caller(folder) as one, Caller(folder) as two:
            two.run("app.narrow()")
            one.begin("app.narrow(3.0)")
            wait_until(lambda: 1 == two.status("in_flight", "narrow"), "a call")
            with pytest.raises(CallFailed, match="DeadlineExceeded"):
                two.run("with deadline(0.3): app.narrow()")
            one.result()
            assert two.call("", "narrow")
            assert 0 == one.status("crashed", "narrow")

    def test_deadlines_that_race_with_grants_keep_no_worker(self, folder: Path) -> None:
        """Withdrawn in the very moment of the grant or not: in the end no worker is held by a call that is over."""
        with Caller(folder) as one, Caller(folder) as two:
            for caller in (one, two):
                caller.run("app.predict.load()")
                caller.run("""
                    import random
                    patience = 0.002  # about as long as a call takes, on a busy machine too: half of them are in time
                    def hurried():
                        global patience
                        in_time = False
                        try:
                            with deadline(random.uniform(0.1, 2) * patience):
                                answer = app.predict()
                            in_time = True
                            return answer
                        finally:
                            patience *= 0.98 if in_time else 1.02
                    load = Load(6, hurried)
                """)
            for caller in (one, two):
                wait_until(lambda: caller.run("result = load.tally['answered']") > 300, "answers")  # noqa: B023
                wait_until(lambda: caller.run("result = load.tally['DeadlineExceeded']") > 300, "deadlines")  # noqa: B023
            for caller in (one, two):
                tally, longest = caller.run("result = load.end()")
                print(tally, f"longest {longest:.2f} s")  # noqa: T201 - with -s, the tally
                assert set(tally) <= {"answered", "DeadlineExceeded", "CircuitOpen", "Reloading"}
            wait_until(lambda: 0 == one.status("in_flight"), "the end of all calls")
            wait_until(lambda: answers(one) and answers(two), "answers without a hurry")


class TestDeaths:
    def test_the_starter_is_killed_under_load(self, folder: Path) -> None:
        """The others lose no call, and go on with the same mold."""
        with Caller(folder) as starter, Caller(folder) as one, Caller(folder) as two:
            _, mold = starter.call()
            for caller in (starter, one, two):
                caller.run("load = Load(3, app.predict)")
            wait_until(lambda: one.run("result = load.tally['answered']") > 100, "traffic")
            starter.process.kill()
            counts = [caller.run("result = load.tally['answered']") for caller in (one, two)]
            for caller, count in zip((one, two), counts, strict=True):
                wait_until(lambda: caller.run("result = load.tally['answered']") > count + 100, "more of it")  # noqa: B023
            for caller in (one, two):
                tally, longest = caller.run("result = load.end()")
                print(tally, f"longest {longest:.2f} s")  # noqa: T201 - with -s, the tally
                assert ["answered"] == list(tally)
                assert mold == caller.call()[1]
            assert 1 == loads(folder)

    def test_a_dead_client_frees_its_worker(self, folder: Path) -> None:
        """A call whose caller was killed does not hold up the others until it ends."""
        with Caller(folder) as one, Caller(folder) as two:
            two.run("app.narrow()")
            one.begin("app.narrow(600.0)")
            wait_until(lambda: 1 == two.status("in_flight", "narrow"), "a call")
            one.process.kill()
            assert two.call("", "narrow")

    def test_a_stopped_client_gives_its_worker_back(self, folder: Path) -> None:
        """Some seconds after the call's timeout the broker takes it: one frozen process must not hold up the others."""
        write(folder, APP.replace('workers=1, timeout="20s"', 'workers=1, timeout="1s"'))
        with Caller(folder) as one, Caller(folder) as two:
            two.run("app.narrow()")
            one.begin("app.narrow(600.0)")
            wait_until(lambda: 1 == two.status("in_flight", "narrow"), "a call")
            os.kill(one.pid, signal.SIGSTOP)
            wait_until(lambda: answers(two, "narrow"), "an answer")
            os.kill(one.pid, signal.SIGCONT)
            with pytest.raises(CallFailed, match=r"WorkerCrashed|DeadlineExceeded"):
                one.result()
            assert one.call("", "narrow")

    def test_a_client_that_is_stopped_in_a_stream_gives_its_worker_back(self, folder: Path) -> None:
        """As in a call; one that lives may take as long as it likes from step to step."""
        write(folder, APP.replace('workers=1, timeout="20s"', 'workers=1, timeout="1s"'))
        with Caller(folder) as one, Caller(folder) as two:
            one.run("stream = app.numbers(5); assert 0 == next(stream)")
            time.sleep(8.0)  # longer than it might be stopped
            one.run("assert 1 == next(stream)")
            os.kill(one.pid, signal.SIGSTOP)
            wait_until(lambda: answers(two, "numbers", "2"), "an answer")
            os.kill(one.pid, signal.SIGCONT)
            with pytest.raises(CallFailed, match="WorkerCrashed"):
                one.run("next(stream)")

    def test_the_broker_is_killed(self, folder: Path) -> None:
        """Calls that ran end with WorkerCrashed, the others wait for the next broker; there is one again."""
        with Caller(folder) as one, Caller(folder) as two:
            for caller in (one, two):
                caller.run("load = Load(3, app.predict)")
            wait_until(lambda: one.run("result = load.tally['answered']") > 50, "traffic")
            wait_until(lambda: two.run("result = load.tally['answered']") > 50, "traffic")
            broker = one.status("broker")
            os.kill(broker, signal.SIGKILL)
            wait_until(lambda: one.status("broker") not in (None, broker), "another broker")
            counts = [caller.run("result = load.tally['answered']") for caller in (one, two)]
            for caller, count in zip((one, two), counts, strict=True):
                wait_until(lambda: caller.run("result = load.tally['answered']") > count + 50, "more of it")  # noqa: B023
            for caller in (one, two):
                tally, longest = caller.run("result = load.end()")
                print(tally, f"longest {longest:.2f} s")  # noqa: T201 - with -s, the tally
                assert set(tally) <= {"answered", "WorkerCrashed"}
                assert tally.get("WorkerCrashed", 0) <= 3
            assert one.status("broker") == two.status("broker")
            assert 1 == len(molds(folder))

    def test_a_broker_that_hangs_keeps_nobody_waiting(self, folder: Path) -> None:
        """Deadlines and timeouts of loads hold, and status() answers; once it goes on, nothing was lost."""
        with Caller(folder) as one, Caller(folder) as two:
            one.call()
            broker = psutil.Process(one.status("broker"))
            broker.suspend()
            wait_until(lambda: broker.status() == psutil.STATUS_STOPPED, "its stop")
            with pytest.raises(CallFailed, match="DeadlineExceeded"):
                one.run("with deadline(0.3): app.predict()")
            with pytest.raises(CallFailed, match="Reloading"):
                two.run("app.predict.load(timeout=0.3)")
            assert ("ready", True) == (one.status("state"), one.status("ready"))  # as it was heard last
            broker.resume()
            assert one.call()[1] == two.call()[1]
            assert broker.pid == two.status("broker")
            assert 0 == one.status("crashed")

    def test_a_broker_that_is_killed_while_nobody_calls_comes_back(self, folder: Path) -> None:
        """Probes of all web workers are false then, and may keep away the call that would start the next one."""
        with Caller(folder) as one, Caller(folder) as two:
            one.run("app.predict.load()")
            two.run("app.predict.load()")
            broker = one.status("broker")
            os.kill(broker, signal.SIGKILL)
            ready = "result = app.predict.ready and app.predict.status().broker"
            wait_until(lambda: one.run(ready) not in (False, None, broker), "a ready mold")
            wait_until(lambda: one.run(ready) == two.run(ready), "the same one")
            assert 2 == loads(folder)

    def test_the_mold_is_killed(self, folder: Path) -> None:
        """The broker makes another one for all."""
        with Caller(folder) as one, Caller(folder) as two:
            _, mold = one.call()
            assert mold == two.call()[1]
            os.kill(mold, signal.SIGKILL)
            both = (one, two)  # one of its workers may still answer in this very moment
            wait_until(
                lambda: all(answers(each) and each.run("result = app.predict.status().mold") != mold for each in both),
                "answers",
            )
            assert one.call()[1] == two.call()[1] != mold

    def test_a_worker_crash_is_told_with_its_cause(self, folder: Path) -> None:
        """As without a broker: how the worker ended, and its process id."""
        with Caller(folder) as one:
            one.call()
            with pytest.raises(CallFailed, match=r"worker [1-9]\d* ended during the call: exit status 3"):
                one.call("'exit'")
            assert 1 == one.status("crashed")


class TestTheEnd:
    def test_the_last_one_that_closes_ends_it(self, folder: Path) -> None:
        """The others only leave; when the last close() returns, its socket is gone, and all processes are ending."""
        with Caller(folder) as one, Caller(folder) as two:
            _, mold = one.call()
            two.call()
            one.run("app.predict.close()")
            assert mold == two.call()[1]
            with pytest.raises(CallFailed, match="GuardClosed"):
                one.call()
            two.run("app.predict.close()")
            assert [] == sockets(folder)
            wait_until(lambda: nothing_left(folder), "the end", 20.0)

    def test_the_last_one_that_closes_hears_of_the_end(self, folder: Path) -> None:
        """Each worker's end, and the mold's, are reported once, to a process that is still there."""
        with Caller(folder) as one, Caller(folder) as two:
            for caller in (one, two):
                caller.run("""
                    from modelguard import telemetry
                    seen = []
                    telemetry.set_hooks([lambda event: seen.append(type(event).__name__)])
                    app.predict()
                """)
            for caller in (one, two):
                caller.run("app.predict.close()")
            told = one.run("result = seen") + two.run("result = seen")
            kinds = ("WorkerStarted", "WorkerEnded", "GenerationReleased")
            assert [2, 2, 1] == [told.count(kind) for kind in kinds]

    def test_an_unload_under_way_is_waited_for(self, folder: Path) -> None:
        """The guard's `unload` runs to its end where the last process closes beside it."""
        write(folder, APP.replace('name="words"', 'name="words", unload=unload').replace("    model = guard", UNLOAD))
        with Caller(folder) as one:
            one.call()
            one.run("threading.Thread(target=app.predict.unload).start()")
            wait_until((folder / "unloading").exists, "the unload begins")
            one.run("app.predict.close()")
            wait_until(lambda: nothing_left(folder), "the end", 20.0)
        assert (folder / "unloaded").exists()

    def test_a_closed_function_is_opened_again(self, folder: Path) -> None:
        """`with` serves twice in one process, as a lifespan of a test does."""
        with Caller(folder) as one:
            for _ in range(2):
                assert one.run("""
                    with app.predict:
                        result = app.predict()
                """)
            assert 2 == loads(folder)

    def test_a_call_that_waits_for_a_broker_hears_that_the_function_is_closed(self, folder: Path) -> None:
        """Not that there is no broker."""
        with Caller(folder) as one:
            one.run("""
                with app.predict:
                    app.predict()
                app.predict._reopen()
            """)
            lock = os.open(folder / "run", os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                assert ["GuardClosed"] == one.run("""
                    result = []

                    def call(heard):
                        try:
                            app.predict()
                        except Exception as error:
                            heard.append(type(error).__name__)

                    thread = threading.Thread(target=call, args=(result,))
                    thread.start()
                    thread.join(1.0)  # by then it waits for the lock
                    app.predict.close()
                    thread.join()
                """)
            finally:
                os.close(lock)

    def test_closing_that_is_overtaken_by_opening_leaves_the_broker_to_the_calls(self, folder: Path) -> None:
        """It would end their workers."""
        with Caller(folder) as one:
            assert one.run("""
                app.predict()
                app.predict._scope._leave()
                result = app.predict._scope.membership is not None
            """)

    @pytest.mark.parametrize("end", ["exit", "SIGTERM", "SIGKILL"])
    def test_nothing_outlives_the_last_one(self, folder: Path, end: str) -> None:
        """However they end, all at once: no process and no socket is left."""
        with Caller(folder) as one, Caller(folder) as two:
            one.call()
            two.call()
            processes = family(folder)
            assert len(processes) >= 4
            for caller in (one, two):
                if end == "exit":
                    assert caller.process.stdin is not None
                    caller.process.stdin.close()
                else:
                    caller.process.send_signal(signal.Signals[end])
            wait_until(lambda: nothing_left(folder), f"the end of {processes}", 40.0)

    def test_all_are_killed_with_their_broker(self, folder: Path) -> None:
        """Nobody is left who could remove the socket: the next process takes its place and serves."""
        with Caller(folder) as one:
            one.call()
            broker = one.status("broker")
            one.process.kill()
            os.kill(broker, signal.SIGKILL)
        wait_until(lambda: not family(folder), "the end of the mold", 20.0)
        assert 1 == len(sockets(folder))
        with Caller(folder) as two:
            two.call()
            assert 1 == len(sockets(folder))
            two.run("app.predict.close()")
            assert [] == sockets(folder)

    def test_a_single_process_that_is_started_again_finds_its_model(self, folder: Path) -> None:
        """A server with one worker process replaces it after a crash; the model outlasts that."""
        with Caller(folder) as one, Caller(folder) as two:
            _, mold = one.call()
            one.process.kill()
            assert mold == two.call()[1]
            assert 1 == loads(folder)

    def test_a_broker_ignores_sigterm_while_it_has_clients(self, folder: Path) -> None:
        """A service manager sends it to all processes of a service, and calls under way get their answers."""
        with Caller(folder) as one:
            one.call()
            one.begin("result = app.predict('sleep', 2.0)")
            for process in family(folder):
                process.terminate()
            assert one.result()
            assert 0 == one.status("crashed")

    @NEEDS_ROOT
    def test_the_first_process_of_a_container_leaves_no_zombie(self, folder: Path) -> None:
        """It inherits the processes of a broker that was killed, and collects them."""
        program = textwrap.dedent(f"""
            import json, os, signal, sys, time
            sys.path.insert(0, {str(folder)!r})
            import app

            def zombies():
                pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
                return [open(f"/proc/{{pid}}/stat").read().split()[2] for pid in pids].count("Z")

            app.predict()
            os.kill(app.predict.status().broker, signal.SIGKILL)
            app.predict.load()
            until = time.monotonic() + 20
            while (left := zombies()) and time.monotonic() < until:
                time.sleep(0.1)
            print(json.dumps([os.getpid(), left]))
        """)
        command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
        environment = {**os.environ, "MODELGUARD_RUNTIME_DIR": str(folder / "run")}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, check=False, env=environment, cwd=folder
        )
        if "unshare" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert "[1, 0]" == done.stdout.splitlines()[-1], done.stderr

    def test_the_output_of_the_process_that_started_it_ends_with_that_process(self, folder: Path) -> None:
        """Whoever reads a server's output, as ``subprocess.run(capture_output=True)`` does, waits for no broker."""
        with Caller(folder) as one, Caller(folder) as two:
            _, mold = one.call()
            assert mold == two.call()[1]
            one.process.kill()
            assert one.process.stdout is not None
            assert "" == one.process.stdout.read()  # else it waits for the others too
            assert mold == two.call()[1]

    def test_the_process_that_starts_it_is_killed_before_it_becomes_a_client(self, folder: Path) -> None:
        """Nobody comes, so it ends within seconds."""
        with Caller(folder) as one:
            one.begin("""
                import signal
                from modelguard.isolation import _host
                start_broker = _host.start_broker

                def start_and_die(*arguments):
                    start_broker(*arguments)
                    os.kill(os.getpid(), signal.SIGKILL)

                _host.start_broker = start_and_die
                app.predict()
            """)
            one.process.wait(60)
            wait_until(lambda: nothing_left(folder), "the broker's end", 20.0)  # it would wait for 30 seconds

    def test_the_process_that_started_it_is_killed_while_the_mold_loads(self, folder: Path) -> None:
        """A load that takes long keeps nothing alive."""
        write(folder, APP.replace("def load():", "def load():\n        (HERE / 'loading').touch(); time.sleep(600)"))
        with Caller(folder) as one:
            one.begin("app.predict()")
            wait_until((folder / "loading").exists, "the load", 60.0)
            one.process.kill()
            one.process.wait()
            wait_until(lambda: nothing_left(folder), "the end of broker and mold", 20.0)


class TestForks:
    def test_a_forked_child_is_a_client_of_its_own(self, folder: Path) -> None:
        """As under gunicorn with preload_app: parent and children share the mold, and leave each other alone."""
        with Caller(folder) as one:
            _, mold = one.call()
            told = one.run("""
                reader, writer = os.pipe()
                pid = os.fork()
                if pid == 0:
                    answer = app.predict()
                    clients = len(app.predict.status().clients)
                    app.predict.close()
                    os.write(writer, f"{answer[1]} {clients}".encode())
                    os._exit(0)
                os.waitpid(pid, 0)
                result = os.read(reader, 100).decode()
            """)
            assert f"{mold} 2" == told
            assert mold == one.call()[1]
            assert 1 == len(one.status("clients"))


@contextmanager
def open_to_all(path: Path) -> Iterator[None]:
    """Let every user of the machine use it inside the block."""
    places = (path, *path.parents[:-1])
    modes = [place.stat().st_mode for place in places]
    try:
        for place, mode in zip(places, modes, strict=True):
            with suppress(PermissionError):
                place.chmod(mode | 0o077)
        yield
    finally:
        for place, mode in zip(places, modes, strict=True):
            with suppress(PermissionError, FileNotFoundError):
                place.chmod(mode)


class TestCode:
    def test_changed_code_gets_a_mold_of_its_own(self, folder: Path) -> None:
        """In a rolling deploy old and new processes serve side by side, and neither gets the other's model."""
        with Caller(folder) as old:
            _, mold = old.call()
            write(folder, APP.replace("return [os.getpid(), os.getppid()]", 'return ["new", os.getppid()]'))
            with Caller(folder) as new:
                answer, its_mold = new.call()
                assert "new" == answer
                assert mold != its_mold
                assert mold == old.call()[1]
                wait_until(lambda: "app.py has changed" in new.text(), "the reason in the log")
                assert 2 == len(sockets(folder))
                with pytest.raises(CallFailed, match=r"LoadFailed.*app.py has changed.*restart"):
                    old.run("app.predict.reload()")
                assert mold == old.call()[1]

    def test_another_version_is_not_shared(self, folder: Path) -> None:
        """A model that is chosen by an environment variable, named by `version`."""
        versioned = APP.replace('scope="host")', 'scope=Host(version=os.environ["MODEL"]))', 1)
        write(folder, versioned)
        with Caller(folder, MODEL="a") as one, Caller(folder, MODEL="b") as two, Caller(folder, MODEL="a") as three:
            answers = [caller.call()[1] for caller in (one, two, three)]
            assert answers[0] == answers[2] != answers[1]


class TestOtherUsers:
    @pytest.fixture
    def place(self) -> Iterator[Path]:
        """Not among pytest's folders: only its owner may enter these, and other tests change that at the same time."""
        with TemporaryDirectory() as name:
            yield Path(name)

    @NEEDS_ROOT
    def test_a_foreign_client_is_refused_unread(self, folder: Path) -> None:
        """Even if it gets into the folder: nothing that it sends is unpickled."""
        marker = folder / "unpickled"
        with Caller(folder) as one:
            one.call()
            path = folder / "run" / sockets(folder)[0]
            program = textwrap.dedent(f"""
                import os, pickle, socket, struct
                class Mark:
                    def __reduce__(self):
                        return open, ({str(marker)!r}, "w")
                os.setgid(65534); os.setuid(65534)
                line = socket.socket(socket.AF_UNIX)
                line.connect({str(path)!r})
                body = pickle.dumps(Mark())
                try:
                    line.sendall(struct.pack("<QIHH", len(body), 0, 0, 0) + body)
                    print(line.recv(100))
                except (BrokenPipeError, ConnectionResetError):
                    print(b"")
            """)
            with open_to_all(path):
                done = subprocess.run(
                    [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
                )
            assert "b''\n" == done.stdout, done.stderr
            assert one.call()
        assert not marker.exists()

    @NEEDS_ROOT
    def test_a_foreign_broker_is_refused(self, folder: Path) -> None:
        """Nothing is sent to it, and the error says whose it is."""
        with Caller(folder) as one:
            one.call()
            name = sockets(folder)[0]
            one.run("app.predict.close()")
        foreign = folder / "foreign"
        foreign.mkdir()
        program = textwrap.dedent(f"""
            import os, socket, time
            os.setgid(65534); os.setuid(65534)
            listening = socket.socket(socket.AF_UNIX)
            listening.bind({str(foreign / name)!r})
            listening.listen()
            print("listening", flush=True)
            time.sleep(600)
        """)
        with (
            open_to_all(foreign),
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other,
        ):
            assert other.stdout is not None
            assert "listening\n" == other.stdout.readline()
            (foreign / name).rename(folder / "run" / name)
            with Caller(folder) as two, pytest.raises(CallFailed, match=r"LoadFailed.*user 65534"):
                two.call()
            other.kill()

    @pytest.mark.parametrize(
        ("fault", "said"), [("mode", "has mode 755"), ("link", "it is a link"), ("owner", "user 65534")]
    )
    def test_a_folder_that_is_not_private_is_refused(self, folder: Path, fault: str, said: str) -> None:
        """With what is wrong with it, before anything is put there."""
        run = folder / "run"
        if fault == "link":
            (folder / "elsewhere").mkdir(mode=0o700)
            run.symlink_to(folder / "elsewhere")
        else:
            run.mkdir(mode=0o700)
        if fault == "mode":
            run.chmod(0o755)
        elif fault == "owner":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder away")
            os.chown(run, 65534, 65534)
        with Caller(folder) as one, pytest.raises(CallFailed, match=rf"NotSupported.*{said}.*MODELGUARD_RUNTIME_DIR"):
            one.call()
        assert [] == list(run.iterdir())


def answers(caller: Caller, function: str = "predict", arguments: str = "") -> bool:
    """Whether its call is answered, and its stream begins."""
    with suppress(CallFailed):
        return bool(caller.run(f"got = app.{function}({arguments}); result = got if type(got) is list else [*got]"))
    return False
