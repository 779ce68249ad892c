"""A running process is watched from outside and from inside, and judged."""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard.control import _client
from modelguard.diagnosis import GrowthReport, _counts, _inside, diagnose, diagnose_process
from modelguard.diagnosis._watch import Watched
from modelguard.errors import InvalidOption
from modelguard.facts._proc import parse_mappings

MB = 10**6


class Process:
    """Answers as a process would whose guard has 100 calls between two questions."""

    pid = os.getpid()

    def __init__(self, *, calls: int = 100, guards: bool = True) -> None:
        self.calls = calls
        self.guards = guards
        self.asked = 0
        self.threads = 1
        self.left = 0

    def ask(self, question: str) -> dict[str, Any]:
        self.left = 0 if question == "trim" else self.left
        if question == "uses":
            self.asked += 1
            return {"uses": [["nlp", 1, self.calls * self.asked]] if self.guards else []}
        if question == "look":
            self.threads += 400
            return {"census": {"threads": self.threads}, "types": {}, "libraries": ["torch"]}
        return {}


def watched(
    process: Process,
    growth: int,
    sleep: Callable[[int], None] = lambda _: None,
    *,
    inside: bool = True,
) -> GrowthReport:
    """The report on a process that grows by so much between two looks."""
    now, private = [0.0], [100 * MB]

    def wait(seconds: float) -> None:
        now[0] += seconds
        private[0] += growth
        sleep(int(now[0]))

    watching = Watched(
        process.pid,
        process.ask if inside else None,
        lambda: now[0],
        wait,
        lambda _: None,
        private=lambda _: private[0] + process.left,
        why="it runs no Python",
    )
    return watching.report("process 7", 24.0)


def test_growth_with_the_calls_of_its_guards() -> None:
    """The cause is what the two looks inside have counted."""
    report = watched(Process(), MB)
    assert ("grows", "threads") == (report.verdict, report.causes[0].name)
    assert ((0, 2400), "calls") == ((report.measured.calls[0], report.measured.calls[-1]), report.measured.per)
    assert "400 more threads after 2,400 calls" == report.causes[0].seen


def test_what_a_look_has_left_is_not_what_the_process_has_freed() -> None:
    """A census of many objects needs memory and frees it again: only what was freed between the looks counts."""

    class Large(Process):
        def ask(self, question: str) -> dict[str, Any]:
            said = super().ask(question)
            self.left += 50 * MB * (question == "look" or question.startswith("held"))
            return said

    measured = watched(Large(), MB).measured
    assert (0, 24 * MB) == (measured.trimmed, measured.growth)


def test_calls_before_the_watch_hide_no_holder() -> None:
    """A service with a million calls behind it: what holds something is compared with the calls of the watch."""
    process = Holding()
    process.asked = 10_000
    assert "grows" == watched(process, MB).verdict


def test_without_guards_time_is_counted() -> None:
    """Its calls are not known."""
    report = watched(Process(guards=False), MB)
    assert ("grows", "milliseconds", 24_000) == (report.verdict, report.measured.per, report.measured.calls[-1])


def test_without_requests_nothing_is_decided() -> None:
    """The report says what it needs."""
    report = watched(Process(calls=0), MB)
    assert "undecided" == report.verdict
    assert any("send it requests" in sentence for sentence in report.unknown)


def test_files_that_stay_open_are_growth_too() -> None:
    """As those of a function that is called: the exit status goes by that verdict."""
    kept: list[int] = []
    report = watched(Process(), 0, lambda _: kept.append(os.open(os.devnull, os.O_RDONLY)), inside=False)
    for number in kept:
        os.close(number)
    assert ("grows", ["open files"]) == (report.verdict, [each.name for each in report.measured.growing])


def test_files_with_two_descriptors_each_are_named_by_their_folder(tmp_path: Path) -> None:
    """As each block of shared memory has: else the first twenty files would stand for all of them, before and after."""
    kept: list[int] = []

    def open_two(now: int) -> None:
        file = tmp_path / str(now)
        file.touch()
        kept.extend(os.open(file, os.O_RDONLY) for _ in range(2))

    for number in range(20):
        open_two(-number)
    report = watched(Process(), 0, open_two, inside=False)
    for number in kept:
        os.close(number)
    assert f"files in {tmp_path}" in report.measured.growing[0].seen


def test_steady() -> None:
    """No cause is named."""
    report = watched(Process(), 0)
    assert ("steady", ()) == (report.verdict, report.causes)


@pytest.mark.parametrize(("at", "verdict"), [(3, "undecided"), (15, "grows")])
def test_ctrl_c_keeps_what_there_is(at: int, verdict: str) -> None:
    """What was read until then is judged."""

    def interrupted(now: int) -> None:
        if now >= at:
            raise KeyboardInterrupt

    report = watched(Process(), MB, interrupted)
    assert verdict == report.verdict
    assert "it was interrupted" in report.unknown


def test_ctrl_c_before_the_first_reading() -> None:
    """There is a report all the same, and it says that nothing is known."""

    class Interrupted(Process):
        def ask(self, question: str) -> dict[str, Any]:
            if question == "uses":
                raise KeyboardInterrupt
            return super().ask(question)

    report = watched(Interrupted(), MB)
    assert ("undecided", ()) == (report.verdict, report.measured.calls)
    assert "it was interrupted" in report.unknown


def test_a_process_with_too_many_objects_to_compare() -> None:
    """They are counted all the same, and no holder is named: without a count all growth would be native memory's."""
    package = Path(_inside.__file__).parents[1]
    sources = {name: (package / file).read_text() for name, file in _inside.SCRIPTS.items()}
    assert "_PATIENCE = 10.0" in sources["_census"]
    sources["_census"] = sources["_census"].replace("_PATIENCE = 10.0", "_PATIENCE = -1.0")
    asking, asked = socket.socketpair()
    thread = threading.Thread(target=_inside.answer, args=(asked, sources))
    thread.start()
    with asking, asking.makefile("rw") as talk:

        def ask(question: str) -> dict[str, Any]:
            talk.write(f"{question}\n")
            talk.flush()
            answer: dict[str, Any] = json.loads(talk.readline())
            return answer

        look, held = ask("look"), ask("held 100")
    thread.join(60)
    asked.close()
    assert look["census"]["blocks"] > 0
    assert {"held": []} == held


def test_the_holder_is_named() -> None:
    """What a container holds explains so much of the growth as its entries weigh, and the fix names the container."""
    held = {
        "path": "app.sessions",
        "kind": "dict",
        "more": 2400,
        "of": "str",
        "size": 18 * MB,
        "fix": "Give it a bound.",
    }
    report = watched(Holding(held), MB)
    first = report.causes[0]
    assert ("python objects", 0.75) == (first.name, first.share)
    assert "held by app.sessions (dict, +2,400 entries) -> str, 18 MB" == first.seen
    assert "Give it a bound." == first.fix


def test_what_nobody_holds_is_not_named() -> None:
    """Nothing was collected in the service, so what has no way from a root may be garbage."""
    held = {"path": "", "kind": "dict", "more": 2400, "of": "str", "size": 18 * MB}
    assert () == watched(Holding(held), MB).measured.held


def test_what_has_grown_by_the_way_hides_no_cause() -> None:
    """A buffer that is longer by some bytes is not what holds thousands of objects."""
    buffer = {"path": "app.buffer", "kind": "bytearray", "more": 21, "of": "bytes", "size": 21, "fix": "Bound it."}
    first = watched(Holding(buffer, blocks=60_000), MB).causes[0]
    assert ("python objects", 1.0) == (first.name, first.share)
    assert "app.buffer" not in first.seen + first.fix


def test_what_holds_native_memory_is_named() -> None:
    """A dict of a library's objects, of which Python does not know what they have, is named with its fix."""
    sessions = {
        "path": "app.sessions",
        "kind": "dict",
        "more": 900,
        "of": "library.Session",
        "size": 9000,
        "fix": "Bound it.",
    }
    first = watched(Holding(sessions, blocks=900), MB).causes[0]
    assert ("native memory", "Bound it.") == (first.name, first.fix)
    assert "held by app.sessions" in first.seen


def test_blocks_are_compared_with_the_growth_where_calls_are_not_known() -> None:
    """A second without a guard is no thousand calls: eleven thousand objects in 24 MB are Python's."""
    for blocks, cause in ((11_000, "python objects"), (300, "native memory")):
        assert cause == watched(Holding(blocks=blocks, guards=False), MB).causes[0].name


class Holding(Process):
    """Holds something, and has no more threads than before."""

    def __init__(self, *held: dict[str, Any], blocks: int = 0, guards: bool = True) -> None:
        super().__init__(guards=guards)
        self.held = held
        self.more = blocks
        self.blocks = -blocks

    def ask(self, question: str) -> dict[str, Any]:
        if question.startswith("held"):
            assert ("held 2400" if self.guards else "held 0") == question
            return {"held": self.held}
        if question == "look":
            self.blocks += self.more
            return {"census": {"blocks": self.blocks}}
        return super().ask(question)


def test_from_outside_no_cause_is_named() -> None:
    """The report says what was looked at, and what was not and why."""
    report = watched(Process(), MB, inside=False)
    assert ("grows", (), 1.0, "milliseconds") == (
        report.verdict,
        report.causes,
        report.unexplained,
        report.measured.per,
    )
    looked, missing, *_ = report.seen
    assert looked.startswith("looked at: from outside, private memory by kind")
    assert "not looked at: its Python objects, what holds them, and its calls, because it runs no Python" == missing


def test_a_process_whose_socket_others_wait_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is watched from outside, and the report says why."""

    def inspect(pid: int) -> None:
        raise _client.Busy(f"process {pid} does not take commands now")

    monkeypatch.setattr(_client, "inspect", inspect)
    report = diagnose_process(os.getpid(), seconds=1, sleep=lambda _: None)
    assert any("because process" in each and "does not take commands now" in each for each in report.seen)


def test_a_process_that_ends_meanwhile() -> None:
    """The error says so: its readings would fall to nothing."""
    process = Process()
    process.pid = 2**22 + 1  # beyond the kernel's largest
    with pytest.raises(InvalidOption, match="has ended meanwhile"):
        watched(process, -100 * MB, inside=False)


@pytest.mark.parametrize(
    "options", [{"pid": "gunicorn"}, {"pid": -1}, {"pid": 1, "seconds": 0.5}, {"pid": 1, "seconds": "soon"}]
)
def test_bad_input(options: dict[str, Any]) -> None:
    """The error comes before anything is touched."""
    with pytest.raises(InvalidOption):
        diagnose_process(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": len}, "MODULE:FUNCTION=.*must be text, not a builtin"),
        ({"target": "app:f", "seconds": "soon"}, "--time='soon'.*not a valid duration"),
        ({"target": "app:f", "trial_seconds": "2 days"}, "--try='2 days'"),
        ({"target": "app:f", "bucketed": "x"}, r"bucketed='x'.*is text and no list of names.*Write \['x'\]"),
        ({"target": "app:f", "inputs": ["a text"]}, "--inputs=.*cannot be read .*one input in JSON per line"),
    ],
)
def test_what_is_no_name_no_duration_and_no_file(options: dict[str, Any], says: str) -> None:
    """The function itself and its inputs stand in another process: the error says what to give instead."""
    with pytest.raises(InvalidOption, match=says):
        diagnose(**options)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("[anon: glibc: malloc arena]", "the heap of malloc"),
        ("[anon: glibc: pthread stack: 4711]", "stacks of threads"),
    ],
)
def test_memory_by_the_names_of_newer_glibc(name: str, kind: str) -> None:
    """From 2.39 on glibc can name what it maps."""
    (mapping,) = parse_mappings(f"7f12-7f34 rw-p 00000000 00:00 0   {name}")
    assert kind == _counts._kind(mapping)


def test_a_partial_of_a_coroutine_function_is_an_asgi_application() -> None:
    """As one whose first arguments are bound."""

    async def serve(name: str, scope: object, receive: object, send: object) -> None:
        """Answer nothing."""

    worker = SimpleNamespace(app=None, wsgi=functools.partial(serve, "name"))
    assert _inside._asgi(SimpleNamespace(app=worker), [worker])
