"""What can be asked of the guards of a process."""

from __future__ import annotations

import json
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from modelguard import TTL, ModelGuard, ModelPool, control, guard, pool
from modelguard.control import _listener
from modelguard.errors import InvalidOption, LoadFailed, NotSupported
from modelguard.isolation import _processes, status
from modelguard.isolation.status import IsolationStatus, WorkerStatus
from modelguard.lifecycle import guard as guard_module
from modelguard.lifecycle.status import Postponed, State
from modelguard.telemetry import Reason


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModelGuard[Any], ModelGuard[Any]]]:
    """The only guards of this process: one with a model, one that was never loaded."""
    monkeypatch.setattr(guard_module.guards, "_references", set())
    monkeypatch.setattr(status, "functions", weakref.WeakSet())
    monkeypatch.setattr("modelguard.lifecycle.pool.pools._references", set())
    loaded, new = guard(dict, reload_on=None, name="nlp"), guard(dict, reload_on=None, name="asr")
    with loaded:
        yield loaded, new


Pair = tuple[ModelGuard[Any], ModelGuard[Any]]


def ask(command: str, name: str | None = None) -> dict[str, str | None]:
    """The error of each guard."""
    results = _listener.run(command, name, wait=True, timeout=60)  # type: ignore[arg-type]
    return {result.name: result.error for result in results}


class TestCommands:
    def test_reload_replaces_what_is_loaded(self, pair: Pair) -> None:
        """Without a name, guards without a model are left alone: a server's master need not load one."""
        assert {"asr": None, "nlp": None} == ask("reload")
        assert (2, "new") == (pair[0].status().generation, pair[1].status().state)

    def test_reload_by_name_of_what_was_never_loaded(self, pair: Pair) -> None:
        """It loads nothing, and says so."""
        assert "never loaded" in str(ask("reload", "asr")["asr"])
        assert "new" == pair[1].status().state

    def test_an_answer_has_no_long_texts(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error of a load may be a whole page, and an answer has a longest length."""

        def refuse(*_: object, **__: object) -> None:
            raise LoadFailed("nlp", "x" * 10_000, retry_after=1.0)

        monkeypatch.setattr(type(pair[0]), "reload", refuse)
        assert 1000 == len(str(ask("reload", "nlp")["nlp"]))
        keyed = pool(lambda _: {}, max_memory="1 GB", name="keyed")
        with keyed.lease("k" * 10_000):
            (key,) = _listener.figures(keyed)["models"]
        assert 1000 == len(key)

    def test_keys_that_look_alike_are_told_apart(self) -> None:
        """Each model of a pool is counted, also where the keys have one ``repr``; the second of them gets a number."""

        class Voice:
            def __repr__(self) -> str:
                return "Voice()"

        keyed = pool(lambda _: {}, max_memory="1 GB", name="keyed")
        with keyed.lease(Voice()), keyed.lease(Voice()):
            assert ["Voice()", "Voice() (2)"] == list(_listener.figures(keyed)["models"])
        keyed.unload()
        assert ["Voice()", "Voice() (2)"] == _listener.figures(keyed)["idle"]

    def test_a_policy_that_cannot_be_written_stands_in_the_way_of_nothing(self, pair: Pair) -> None:
        """Its own code may raise: it is shown by its type, and the guards behind it are reloaded all the same."""

        class Mine(TTL):
            def __repr__(self) -> str:
                raise RuntimeError("mine")

        with guard(dict, reload_on=Mine("1h"), name="mine") as mine:
            assert "Mine" in _listener.figures(mine)["reload_on"]
            assert {"asr": None, "mine": None, "nlp": None} == ask("reload")
        assert 2 == pair[0].status().generation

    def test_what_raises_is_an_error(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        """The client learns that it did, and the next command is heard."""
        monkeypatch.setattr(_listener, "figures", lambda _: 1 / 0)
        said = "status failed with ZeroDivisionError; its log says where"
        assert {"error": said} == _listener._answer({"command": "status"})

    def test_unload_pause_and_resume(self, pair: Pair) -> None:
        """Each does what the method of the guard does."""
        ask("unload")
        assert "idle" == pair[0].status().state
        ask("pause", "nlp")
        assert [True, False] == [one.status().paused for one in pair]
        ask("pause")
        ask("resume")
        assert [False, False] == [one.status().paused for one in pair]

    def test_a_refusal_is_an_answer(self, pair: Pair) -> None:
        """A closed guard has nothing to reload: the error is its own, and the others are done."""
        pair[0].close()
        assert "closed" in str(ask("reload", "nlp")["nlp"])
        assert {"asr": None, "nlp": None} == ask("reload")

    def test_an_unknown_name(self, pair: Pair) -> None:
        """The error names those that there are, and nothing is done."""
        with pytest.raises(
            InvalidOption,
            match=r"name='x': is not a guard, a pool or an isolated function of this process. There are: 'asr', 'nlp'",
        ):
            ask("reload", "x")
        assert 1 == pair[0].status().generation

    def test_the_status_is_plain(self, pair: Pair) -> None:
        """Numbers, texts and None, so that JSON can carry it."""
        (_, result) = _listener.run("status", None, wait=True, timeout=None)
        assert ("ready", True, 1, None) == tuple(
            result.status[key] for key in ("state", "ready", "generation", "postponed")
        )
        values = {type(value) for value in result.status.values()}
        assert values <= {str, int, float, bool, type(None)}


class Isolated:
    """Stands for an isolated function; writes down what is asked of it."""

    _what = "isolated function"

    def __init__(self, name: str, *, state: State = "ready", broker: int | None = None) -> None:
        self.name, self.state, self.broker, self.ready = name, state, broker, True
        self.paused = False
        self.did: list[str] = []
        self.refusal: Exception | None = None
        status.functions.add(self)

    def status(self) -> IsolationStatus:
        """As a function with one worker."""
        return IsolationStatus(
            name=self.name,
            state=self.state,
            mold=4711,
            workers=(WorkerStatus(pid=4712, state="idle", worn=True, calls=7, age=1.5),),
            broker=self.broker,
            clients=(1, 2),
            paused=self.paused,
            postponed=Postponed(reasons=(Reason("uses", "Uses(5)"),), cause="paused", seconds=None),
        )

    def do(self, what: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.did.append(what)

    def reload(self, *, wait: bool = True, timeout: object = None) -> None:
        """With what it was asked for."""
        assert timeout is None or isinstance(timeout, float)
        self.do(f"reload, wait={wait}")

    def unload(self, timeout: object = None) -> None:
        """End the mold."""
        assert timeout is None or isinstance(timeout, float)
        self.do("unload")

    def pause(self) -> None:
        """Hold back."""
        self.paused = True
        self.do("pause")

    def resume(self) -> None:
        """Go on."""
        self.paused = False
        self.do("resume")

    def renew_in_child(self) -> None:
        """No test forks."""


class TestPools:
    @pytest.fixture(autouse=True)
    def voices(self, pair: Pair) -> Iterator[ModelPool[str, dict[str, str]]]:
        """A pool beside the guards."""
        del pair
        with pool(lambda key: {"key": key}, max_memory="1 GB", name="voices") as voices:
            yield voices

    def test_they_take_every_command(self, voices: ModelPool[str, Any]) -> None:
        """Beside the guards, in the order of the names, or by name."""
        with voices.lease("ja"):
            assert ["asr", "nlp", "voices"] == list(ask("status"))
        assert {"voices": None} == ask("unload", "voices")
        assert ("ja",) == voices.status().idle
        with voices.lease("ja"):
            pass
        ask("reload")
        assert (("ja",), 2) == (voices.status().idle, voices.status().unloads)
        ask("pause")
        assert voices.status().paused
        ask("resume")
        assert not voices.status().paused

    def test_one_without_models(self, voices: ModelPool[str, Any]) -> None:
        """It is left alone, and by name a reload is an error, as for a guard."""
        assert None is ask("reload")["voices"]
        assert "never loaded" in str(ask("reload", "voices")["voices"])
        voices.close()
        assert None is ask("unload")["voices"]
        assert "closed" in str(ask("unload", "voices")["voices"])

    def test_the_status_says_what_it_is(self, voices: ModelPool[Any, Any]) -> None:
        """Its room and its keys, as JSON can carry them."""

        def state() -> str:
            return str(_listener.run("status", "voices", wait=True, timeout=None)[0].status["state"])

        assert "new" == state()
        with voices.lease(("ja", 2)):
            (result,) = _listener.run("status", "voices", wait=True, timeout=None)
            shown = json.loads(json.dumps(result._asdict()))
        assert ("voices", "pool", "ready", True, 1) == (
            shown["name"],
            shown["kind"],
            shown["status"]["state"],
            shown["status"]["ready"],
            shown["status"]["in_flight"],
        )
        assert (["('ja', 2)"], 10**9) == (list(shown["status"]["models"]), shown["status"]["max_memory"])
        voices.unload()
        assert "idle" == state()
        voices.close()
        assert "closed" == state()

    def test_a_key_that_cannot_be_written_is_shown_by_its_type(self, voices: ModelPool[Any, Any]) -> None:
        """The figures of all others are shown beside it."""

        class Nameless:
            def __repr__(self) -> str:
                raise LookupError("no name")

        with voices.lease(Nameless()):
            (result,) = _listener.run("status", "voices", wait=True, timeout=None)
        (shown,) = result.status["models"]
        assert "Nameless" in shown

    def test_a_bounded_unload(self, voices: ModelPool[str, Any]) -> None:
        """What it could not wait for is its error."""
        with voices.lease("ja"):
            caller = threading.Thread(
                target=lambda: errors.extend(_listener.run("unload", "voices", wait=True, timeout=0))
            )
            errors: list[_listener.Result] = []
            caller.start()
            caller.join(60)
        assert "voices" in str(errors[0].error)


class TestIsolatedFunctions:
    @pytest.fixture(autouse=True)
    def _only(self, pair: Pair) -> None:
        """They stand beside guards."""

    def test_they_take_every_command(self, pair: Pair) -> None:
        """Beside the guards, in the order of the names, or by name."""
        lemmas = Isolated("lemmas")
        assert ["asr", "lemmas", "nlp"] == list(ask("status"))
        for command in ("reload", "unload", "pause", "resume"):
            ask(command)
        assert ["reload, wait=True", "unload", "pause", "resume"] == lemmas.did
        assert {"lemmas": None} == ask("pause", "lemmas")
        assert (True, False) == (lemmas.paused, pair[0].status().paused)

    def test_one_that_was_never_loaded(self) -> None:
        """It is left alone, and by name that is an error, as for a guard; it can be paused."""
        lemmas = Isolated("lemmas", state="new")
        ask("reload")
        ask("unload")
        assert "never loaded" in str(ask("reload", "lemmas")["lemmas"])
        ask("pause")
        assert ["pause"] == lemmas.did

    def test_a_closed_one(self) -> None:
        """Nothing is reloaded but by name, which says why not."""
        lemmas = Isolated("lemmas", state="closed")
        lemmas.refusal = LoadFailed("lemmas", "it is closed")
        assert None is ask("reload")["lemmas"]
        assert "closed" in str(ask("reload", "lemmas")["lemmas"])

    def test_a_refusal_is_an_answer(self, pair: Pair) -> None:
        """What one cannot do is its error, and the others are done."""
        lemmas = Isolated("lemmas")
        lemmas.refusal = NotSupported("lemmas: pause", reason="its pool has none")
        assert {
            "asr": None,
            "lemmas": "lemmas: pause is not supported here: its pool has none",
            "nlp": None,
        } == ask("pause")
        assert pair[0].status().paused

    def test_what_a_broker_has_done_already_is_only_shown(self) -> None:
        """So a command to all processes that share a mold replaces it once."""
        mine, other = Isolated("mine", broker=11), Isolated("other", broker=12)
        results = _listener.run("reload", None, wait=False, timeout=None, brokers=[11])
        assert ([], ["reload, wait=False"]) == (mine.did, other.did)
        assert [None] * 4 == [result.error for result in results]
        assert {11, 12} == {result.status.get("broker") for result in results} - {None}

    def test_the_status_says_what_it_is(self) -> None:
        """With its mold and its workers, as JSON can carry them."""
        lemmas = Isolated("lemmas")
        (result,) = _listener.run("status", lemmas.name, wait=True, timeout=None)
        shown = json.loads(json.dumps(result._asdict()))
        assert ("lemmas", "isolated function") == (shown["name"], shown["kind"])
        assert (4711, [4712], [True]) == (
            shown["status"]["mold"],
            [worker["pid"] for worker in shown["status"]["workers"]],
            [worker["worn"] for worker in shown["status"]["workers"]],
        )
        assert {"reasons": ["Uses(5)"], "cause": "paused", "seconds": None} == shown["status"]["postponed"]

    def test_sighup_reports_what_it_could_not_reload(self, caplog: pytest.LogCaptureFixture) -> None:
        """Nobody waits for its answer, so the log has it; it does not wait itself."""
        lemmas, refusing = Isolated("lemmas"), Isolated("refusing")
        refusing.refusal = LoadFailed("refusing", "no weights")
        _listener._reload_all()
        assert ["reload, wait=False"] == lemmas.did
        assert ["no weights" in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]


@pytest.mark.parametrize(
    "request_",
    [
        None,
        [],
        {},
        {"command": "shutdown"},
        {"command": ["status"]},
        {"command": "status", "name": 5},
        {"command": "reload", "wait": "no"},
        {"command": "reload", "timeout": "5s"},
        {"command": "reload", "brokers": 4711},
        {"command": "reload", "brokers": ["4711"]},
    ],
    ids=str,
)
def test_what_is_no_command_does_nothing(request_: object, pair: Pair) -> None:
    """Whatever comes over the socket, the answer is an error."""
    assert {"error": "the request is not a known command"} == _listener._answer(request_)
    assert 1 == pair[0].status().generation


class TestListen:
    @pytest.mark.parametrize("sighup", [1, "yes", None])
    def test_a_bad_sighup(self, sighup: Any) -> None:
        """The message names it."""
        with pytest.raises(InvalidOption, match="sighup="):
            control.listen(sighup=sighup)

    def test_elsewhere_than_on_linux(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error says what is missing."""
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(NotSupported, match="as on Linux"):
            control.listen()

    def test_in_the_processes_of_isolated_functions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """They import the application, and its line does nothing there."""
        monkeypatch.setattr(_processes, "role", "importing")
        control.listen(sighup=True)
        assert None is _listener._listener

    def test_under_uwsgi(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It uses SIGHUP itself, and is named, with what to do instead."""
        monkeypatch.setitem(sys.modules, "uwsgi", types.ModuleType("uwsgi"))
        with pytest.raises(NotSupported, match=r"uWSGI uses SIGHUP itself; .*modelguard ctl PID reload --all"):
            control.listen(sighup=True)
        assert None is _listener._listener

    def test_under_gunicorn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So does gunicorn; a program that only imports it may use the signal."""
        monkeypatch.setitem(sys.modules, "gunicorn.arbiter", types.ModuleType("gunicorn.arbiter"))
        monkeypatch.delenv("SERVER_SOFTWARE", raising=False)
        _listener.check()
        monkeypatch.setenv("SERVER_SOFTWARE", "gunicorn/27.0")
        with pytest.raises(NotSupported, match="gunicorn uses SIGHUP itself"):
            control.listen(sighup=True)

    def test_in_another_thread(self) -> None:
        """Only the main thread can install a handler."""
        errors: list[Exception] = []

        def work() -> None:
            try:
                control.listen(sighup=True)
            except NotSupported as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert ["main thread" in str(error) for error in errors] == [True]


class TestHandler:
    @pytest.fixture(autouse=True)
    def _restore(self) -> Iterator[None]:
        before = signal.getsignal(signal.SIGHUP)
        yield
        _listener.remove()
        signal.signal(signal.SIGHUP, before)

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What the signal has done."""
        calls: list[str] = []
        monkeypatch.setattr(_listener, "wake", lambda: calls.append("ours"))
        return calls

    @pytest.mark.parametrize("earlier", [signal.SIG_DFL, signal.SIG_IGN], ids=str)
    def test_without_an_earlier_handler(self, earlier: signal.Handlers, calls: list[str]) -> None:
        """It wakes the listener, and the end gives the signal back."""
        signal.signal(signal.SIGHUP, earlier)
        _listener.install()
        signal.raise_signal(signal.SIGHUP)
        _listener.remove()
        assert (["ours"], earlier) == (calls, signal.getsignal(signal.SIGHUP))

    def test_an_earlier_handler_is_called_too(self, calls: list[str]) -> None:
        """Once for each signal, also if the line is written twice."""
        signal.signal(signal.SIGHUP, lambda *_: calls.append("earlier"))
        _listener.install()
        _listener.install()
        signal.raise_signal(signal.SIGHUP)
        assert ["ours", "earlier"] == calls

    def test_a_later_handler_is_left_alone(self) -> None:
        """What somebody has put above it stays."""
        _listener.install()
        later = signal.default_int_handler
        signal.signal(signal.SIGHUP, later)
        _listener.remove()
        assert later is signal.getsignal(signal.SIGHUP)

    def test_a_later_handler_that_calls_it_stays(self, calls: list[str]) -> None:
        """After the end too, the signal does what both did."""
        signal.signal(signal.SIGHUP, lambda *_: calls.append("earlier"))
        _listener.install()
        ours: Any = signal.getsignal(signal.SIGHUP)
        signal.signal(signal.SIGHUP, lambda *signalled: [calls.append("later"), ours(*signalled)])
        _listener.remove()
        signal.raise_signal(signal.SIGHUP)
        assert ["later", "earlier"] == calls

    def test_removed_in_another_thread(self, calls: list[str]) -> None:
        """Which may not give the signal back: the next signal does, and is the earlier handler's. It can come again."""
        earlier: Callable[..., None] = lambda *_: calls.append("earlier")  # noqa: E731 - compared below
        signal.signal(signal.SIGHUP, earlier)
        _listener.install()
        thread = threading.Thread(target=_listener.remove)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGHUP)
        assert (["earlier"], earlier) == (calls, signal.getsignal(signal.SIGHUP))
        _listener.install()
        signal.raise_signal(signal.SIGHUP)
        assert ["earlier", "ours", "earlier"] == calls


def test_a_reload_that_fails_on_sighup_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that takes commands goes on, for example when a policy of one's own has no repr."""

    def fail(*_args: object, **_options: object) -> None:
        raise ValueError("no repr")

    monkeypatch.setattr(_listener, "run", fail)
    _listener._reload_all()
    assert "could not reload after SIGHUP" in caplog.text
