"""``modelguard ctl``: what it prints, and its exit status."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modelguard import cli
from modelguard.control import _client
from modelguard.control._client import Answered, Request, Unreachable
from modelguard.facts import _proc

STATUS: dict[str, Any] = {
    "state": "ready",
    "ready": True,
    "paused": False,
    "postponed": None,
    "generation": 3,
    "age": 61.4,
    "uses": 12,
    "in_flight": 0,
    "last_error": None,
}


class Processes:
    """Processes that take commands, below a server."""

    def __init__(self, *pids: int) -> None:
        self.pids = list(pids)
        self.asked: list[tuple[int, Request]] = []
        self.answers: dict[int, Answered] = {}
        self.ended: list[int] = []

    def below(self, pid: int) -> list[int]:
        if pid == 404:
            raise ProcessLookupError(3, "process 404 does not exist")
        return self.pids

    def ask(self, pid: int, request: Request) -> Answered:
        self.asked.append((pid, request))
        if pid not in self.answers:
            raise Unreachable(f"process {pid} did not answer")
        return self.answers[pid]


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    made = Processes(10, 11)
    monkeypatch.setattr(_client, "listening_below", made.below)
    monkeypatch.setattr(_client, "ask", made.ask)
    monkeypatch.setattr(_proc, "runs", lambda pid: pid not in made.ended)
    for pid in (10, 11):
        made.answers[pid] = Answered(None, ({"name": "nlp", "kind": "guard", "error": None, "status": STATUS},))
    return made


def test_status_shows_all_processes(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """A server's process and its workers, each with its guards."""
    assert 0 == cli.main(["ctl", "10", "status"])
    row = "  nlp  ready; generation 3, 1m1s old, 12 calls"
    assert ["10", row, "11", row] == capsys.readouterr().out.splitlines()


def test_a_command_goes_to_one_process(processes: Processes) -> None:
    """To the one that is named, unless ``--all`` asks for those below it."""
    assert 0 == cli.main(["ctl", "10", "reload", "nlp", "--timeout", "90s"])
    assert 0 == cli.main(["ctl", "10", "pause", "--all"])
    once, paused = Request("reload", "nlp", wait=True, timeout=90), Request("pause")
    assert [(10, once), (10, paused), (11, paused)] == processes.asked


def test_a_number_alone_is_one_of_seconds(processes: Processes) -> None:
    """So ``--timeout`` may have a unit, and need not."""
    for timeout in ("90", "1m30s", "0"):
        cli.main(["ctl", "10", "reload", "--timeout", timeout])
    assert [90.0, 90.0, 0.0] == [request.timeout for _, request in processes.asked]


def test_a_server_that_takes_no_commands_itself(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists its workers that do; ``--all`` asks them."""
    assert 2 == cli.main(["ctl", "9", "reload"])
    assert "process 9 takes no commands; these processes below it do: 10 11 (--all" in capsys.readouterr().err
    assert 0 == cli.main(["ctl", "9", "reload", "--all"])
    assert [10, 11] == [pid for pid, _ in processes.asked]


def test_nobody_listens(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the line that is missing."""
    processes.pids = []
    for words in (["9", "status"], ["9", "reload", "--all"]):
        assert 2 == cli.main(["ctl", *words])
        assert "process 9 takes no commands; call modelguard.control.listen()" in capsys.readouterr().err


def test_what_a_guard_says(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """What is due and waits, failures and errors are in its line; an error is exit status 1."""
    waits = {"reasons": ["TTL('1h')"], "cause": "paused", "seconds": None}
    status = {**STATUS, "paused": True, "postponed": waits, "in_flight": 2, "last_error": "OSError: gone"}
    processes.answers[10] = Answered(None, ({"name": "nlp", "kind": "guard", "error": "too late", "status": status},))
    assert 1 == cli.main(["ctl", "10", "reload"])
    assert capsys.readouterr().out.splitlines()[1] == (
        "  nlp  ready, paused; generation 3, 1m1s old, 12 calls; 2 in flight; due, waits (paused): TTL('1h'); "
        "failed: OSError: gone; error: too late"
    )


def isolated(*, broker: int | None = None, error: str | None = None) -> dict[str, Any]:
    """What a process answers for an isolated function."""
    status = {name: value for name, value in STATUS.items() if name != "uses"}
    status |= {"mold": 21, "workers": [{}, {}], "broker": broker, "clients": [10, 11] if broker else []}
    return {"name": "lemmas", "kind": "isolated function", "error": error, "status": status}


def test_what_is_not_printable(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a process answers, it neither forges lines nor controls the terminal."""
    forged = "nlp\nERROR: forged\r\x1b[2J"
    guard = {"name": forged, "kind": "guard", "error": forged, "status": {**STATUS, "last_error": forged}}
    processes.answers[10] = Answered(None, (guard,))
    processes.answers[11] = Answered(forged, ())
    assert 1 == cli.main(["ctl", "10", "status"])
    shown = capsys.readouterr()
    assert [2, 1] == [len(text.splitlines()) for text in (shown.out, shown.err)]
    assert (shown.out + shown.err).replace("\n", "").isprintable()


def test_long_names_are_shortened(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """One long name makes no line wide; both ends of it are there, and JSON has it whole."""
    name = f"package.{'x' * 10_000}.lemmas"
    guards = [{"name": each, "kind": "guard", "error": None, "status": STATUS} for each in ("nlp", name)]
    processes.answers[10] = Answered(None, tuple(guards))
    assert 0 == cli.main(["ctl", "10", "status"])
    _, short, long = capsys.readouterr().out.splitlines()[:3]
    assert max(len(short), len(long)) < 120
    assert long.startswith("  package.xxx")
    assert "xxx.lemmas  ready" in long
    assert 0 == cli.main(["ctl", "10", "status", "--json"])
    assert name in capsys.readouterr().out


def test_what_an_isolated_function_says(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """Its mold and its workers, and who shares them."""
    processes.answers[10] = Answered(None, (isolated(),))
    processes.answers[11] = Answered(None, (isolated(broker=20),))
    assert 0 == cli.main(["ctl", "10", "status"])
    assert [
        "  lemmas  ready; generation 3, 1m1s old, mold 21, 2 workers",
        "  lemmas  ready; generation 3, 1m1s old, mold 21, 2 workers, shared by 2 processes",
    ] == capsys.readouterr().out.splitlines()[1::2]


@pytest.mark.parametrize(("error", "known"), [(None, {20}), ("it hangs", set())], ids=["done", "failed"])
def test_what_processes_share_is_done_once(processes: Processes, error: str | None, known: set[int]) -> None:
    """The next process hears which brokers have done it; what has failed is tried again."""
    processes.answers[10] = Answered(None, (isolated(broker=20, error=error),))
    cli.main(["ctl", "10", "reload", "--all"])
    assert [frozenset(), frozenset(known)] == [request.brokers for _, request in processes.asked]


def test_an_error_of_the_process(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is exit status 1, a process that does not answer 2; the others are asked all the same."""
    processes.answers[10] = Answered("name='x': is not a guard", ())
    assert 1 == cli.main(["ctl", "10", "pause", "x", "--all"])
    assert "process 10: name='x': is not a guard" in capsys.readouterr().err
    del processes.answers[10]
    assert 2 == cli.main(["ctl", "10", "pause", "--all"])
    assert [10, 11, 10, 11] == [pid for pid, _ in processes.asked]


def test_a_worker_that_has_just_ended(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers replace their workers all the time: one that is gone is no failure, unless it was named."""
    processes.ended = [11]
    del processes.answers[11]
    assert (0, 2) == (cli.main(["ctl", "10", "pause", "--all"]), cli.main(["ctl", "11", "pause"]))
    assert "process 11 did not answer" in capsys.readouterr().err


def test_json(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each process."""
    assert 0 == cli.main(["ctl", "10", "status", "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(10, "nlp", 3), (11, "nlp", 3)] == [
        (line["pid"], line["guards"][0]["name"], line["guards"][0]["status"]["generation"]) for line in lines
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["404", "status"], "process 404 does not exist"),
        (["zero", "status"], "PID='zero': must be a process id"),
        (["-1", "status"], "-1"),
        (["10", "reload", "--timeout", "soon"], "--timeout='soon'"),
        (["10", "reload", "--timeout", "-1.5"], "must not be negative"),
        (["10", "restart"], "invalid choice"),
        (["10"], "required"),
    ],
)
def test_bad_words(processes: Processes, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    """Exit status 2, with the word that is wrong, and nothing is done."""
    try:
        status = cli.main(["ctl", *words])
    except SystemExit as end:  # argparse's own way
        status = int(str(end.code))
    assert 2 == status
    assert says in capsys.readouterr().err
    assert [] == processes.asked
