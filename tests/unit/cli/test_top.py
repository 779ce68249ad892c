"""`modelguard top`: what it shows, its errors, and what it never prints."""

from __future__ import annotations

import dataclasses
import io
import json
import os

import pytest

from modelguard.cli import _top, main
from modelguard.sharing import _memory_report
from modelguard.sharing._memory_report import Places, ProcessReport, TreeReport, TreeWatch

PROCESS = ProcessReport(
    pid=10,
    parent=1,
    command=("gunicorn", "-w", "2", "app:app"),
    threads=3,
    allocator="glibc",
    pss=400_000_000,
    uss=10_000_000,
    private=9_000_000,
    since_birth=None,
    since_seen=None,
    where=Places(python=4_000_000, heap=3_000_000, mixed=2_000_000, stacks=400_000, files=600_000),
    swap=0,
    rss=1_000_000_000,
)


def tree(*, model_bytes: int | None = None, unread: tuple[int, ...] = (), swap: int = 0) -> TreeReport:
    """Make a server with two workers."""
    return TreeReport(
        (
            PROCESS,
            dataclasses.replace(PROCESS, pid=11, parent=10, since_birth=9_000_000, since_seen=250_000, swap=swap),
            dataclasses.replace(PROCESS, pid=12, parent=10, since_birth=0, since_seen=-3_000, allocator="jemalloc"),
        ),
        unread,
        model_bytes,
    )


def shown(trees: list[TreeReport]) -> str:
    stream = io.StringIO()
    show = _top.choose(stream, live=True)
    show(trees)
    return stream.getvalue()


def run(*words: str) -> int:
    return main(["top", *words])


def test_one_line_per_process() -> None:
    """Each process has a line with its server and app, children are indented, and unknown figures are dashes."""
    heading, first, second, third, *_ = shown([tree()]).splitlines()
    assert ["10", "gunicorn", "app:app", "3", "glibc", "400", "MB"] == first.split()[:7]
    assert "10 MB            -           -" in first
    assert "  gunicorn app:app" in second
    assert ["+9", "MB", "+250", "kB"] == second.split()[9:13]
    assert ["jemalloc", "400", "MB", "10", "MB", "0", "B", "-3", "kB"] == third.split()[4:13]
    assert 1 == len({len(line) for line in (heading, first, second, third)})


def test_rss_comes_last_and_is_called_misleading() -> None:
    """The figure that counts shared pages once for each process is marked."""
    lines = shown([tree()]).splitlines()
    assert lines[0].endswith("RSS (misleading)")
    assert lines[1].endswith("1 GB")


def test_copies_by_the_largest_process() -> None:
    """Without the model's size the unit is what the largest process would hold alone."""
    assert "3 processes use 1.2 GB: 1.20 times what the largest, 10, would use alone (1 GB)." in shown([tree()])


def test_copies_of_the_model() -> None:
    """With the model's size the unit is one model."""
    assert "3 processes use 1.2 GB: 2.40 times the model (500 MB)" in shown([tree(model_bytes=500_000_000)])


def test_what_is_not_counted_is_listed() -> None:
    """Workers of another user and memory in swap have their own lines."""
    text = shown([tree(unread=(13, 14), swap=5_000_000)])
    assert "belong to other users: 13, 14. Run this as root" in text
    assert "In swap: 5 MB." in text


def test_versions_of_models_are_shown() -> None:
    """During a rollout the processes of one server have several, and one that has none is not listed."""
    several = tree()
    processes = [
        dataclasses.replace(process, versions=versions)
        for process, versions in zip(several.processes, ({}, {"nlp": "v1", "ner": "a"}, {"nlp": "v2"}), strict=True)
    ]
    processes.append(dataclasses.replace(PROCESS, pid=13, parent=10, versions={"nlp": "v1"}))
    text = shown([TreeReport(tuple(processes))])
    assert "Models: nlp is version v1 in 11, 13; ner is version a in 11; nlp is version v2 in 12." in text
    assert "Models" not in shown([several])
    as_json = _top.as_dict([TreeReport(tuple(processes))])["trees"][0]["processes"]
    assert [{}, {"nlp": "v1", "ner": "a"}, {"nlp": "v2"}, {"nlp": "v1"}] == [one["versions"] for one in as_json]


def test_paused_guards_are_shown() -> None:
    """With their processes, because a pause holds for each process alone; and nothing if none is paused."""
    several = tree()
    processes = [
        dataclasses.replace(process, paused=paused)
        for process, paused in zip(several.processes, ((), ("ner", "nlp"), ("nlp",)), strict=True)
    ]
    assert "\nPaused: ner in 11; nlp in 11, 12." in shown([TreeReport(tuple(processes))])
    assert "Paused" not in shown([several])
    as_json = _top.as_dict([TreeReport(tuple(processes))])["trees"][0]["processes"]
    assert [(), ("ner", "nlp"), ("nlp",)] == [one["paused"] for one in as_json]


def test_an_owner_that_holds_the_libraries_of_its_molds_is_named() -> None:
    """With what it holds and the remedy; a mold, and a process without such a library, are not."""
    mold = (
        "python",
        "-c",
        "from modelguard.isolation._mold_program import main; main(3, 4)",
        "mold",
        "pipeline.entities",
    )
    processes = (
        dataclasses.replace(PROCESS, private=386_000_000, libraries=("spacy", "torch")),
        dataclasses.replace(PROCESS, pid=11, parent=10, command=mold, libraries=("spacy", "torch")),
        dataclasses.replace(PROCESS, pid=12, parent=11, command=mold, libraries=("spacy", "torch")),
    )
    told = (
        "\nProcess 10 holds 386 MB of its own, with spacy, torch; the models of its isolated functions are in others."
    )
    text = shown([TreeReport(processes)])
    assert told in text
    assert 1 == text.count("@isolate(target=...)")
    assert "target=" not in shown([TreeReport((dataclasses.replace(processes[0], libraries=()), *processes[1:]))])
    assert "target=" not in shown([TreeReport((processes[0], dataclasses.replace(PROCESS, pid=11, parent=10)))])


def test_several_trees_are_apart() -> None:
    """Each tree has its own table and totals."""
    assert 2 == shown([tree(), tree()]).count("3 processes use")


def test_one_process_is_singular() -> None:
    """A tree of one process has its summary in the singular."""
    assert "1 process uses 400 MB" in shown([TreeReport((PROCESS,))])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("gunicorn", "--api-key", "s3cret", "app:app"), "gunicorn --api-key *** app:app"),
        (("celery", "-b", "redis://me:s3cret@host/0"), "celery -b redis://***@host/0"),
        (("server: worker [token=s3cret]",), "server: worker [token=***"),
        (("python", "-c", "a\n\x1b[31mb"), "python -c 'a [31mb'"),
        ((), "?"),
        (("",), "?"),
    ],
)
def test_command_lines_are_safe_to_show(words: tuple[str, ...], expected: str) -> None:
    """Secrets and control characters appear neither in the table nor in JSON."""
    process = dataclasses.replace(PROCESS, command=words)
    assert expected == _top.command(process)
    assert expected == _top.as_dict([TreeReport((process,))])["trees"][0]["processes"][0]["command"]
    assert "s3cret" not in shown([TreeReport((process,))])


def test_a_long_name_is_cut() -> None:
    """The columns stay aligned, however long the name of a process is."""
    process = dataclasses.replace(PROCESS, command=("python", "x" * 200))
    heading, line, *_ = shown([TreeReport((process,))]).splitlines()
    assert len(heading) == len(line)
    assert "xxx…" in line


def test_json_has_every_figure() -> None:
    """JSON can be read back; sizes are bytes, and RSS is labelled as misleading there, too."""
    figures = json.loads(json.dumps(_top.as_dict([tree(model_bytes=600_000_000)]), allow_nan=False))
    found = figures["trees"][0]
    assert (10, 1_200_000_000, 2.0, "model") == (found["root"], found["pss"], found["copies"], found["one_copy_is"])
    assert "rss_misleading" == list(found)[-1] == list(found["processes"][0])[-1]
    assert {"python": 4_000_000, "heap": 3_000_000}.items() <= found["processes"][1]["where"].items()


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """A terminal."""
        return True


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("200", ["gunicorn -w 2 [bold]x", "400 MB", "600 kB", "1 GB"]),
        ("140", ["gunicorn -w", "400 MB", "600 kB", "1 GB"]),
        ("80", ["gunicorn -w…", "400 MB", "10 MB"]),
    ],
)
def test_a_terminal_gets_the_live_view(monkeypatch: pytest.MonkeyPatch, columns: str, expected: list[str]) -> None:
    """In a narrow terminal names are shortened before figures are left out; markup in names is not interpreted."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    stream = Terminal()
    process = dataclasses.replace(PROCESS, command=("gunicorn -w 2 [bold]x and so forth",))
    show = _top.choose(stream, live=True)
    show([TreeReport((process,))])
    for text in (*expected, "1 process uses"):
        assert text in stream.getvalue()


@pytest.mark.parametrize("width", range(60, 190, 7))
def test_columns_that_do_not_fit_are_left_out_whole(width: int) -> None:
    """A figure is shown whole or not at all, however narrow the terminal is."""
    heading, line, *_ = _top.table(TreeReport((PROCESS,)), width).splitlines()
    assert len(heading) == len(line) <= width
    assert heading.endswith(tuple(_top.HEADINGS))
    assert line.endswith(("B", "-"))


def test_the_live_view_replaces_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second look is drawn over the first."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    show = _top.choose(stream, live=True)
    show([tree()])
    show([tree()])
    assert 2 == stream.getvalue().count("\x1b[H\x1b[J")  # to the first line, and the rest is cleared


@pytest.mark.parametrize("columns", [200, 80, 20])
def test_the_live_view_says_what_the_terminal_has_no_room_for(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """It fits, with lines that the terminal wraps, so that the first line is never scrolled away."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "10")
    stream = Terminal()
    _top.choose(stream, live=True)([tree(), tree(), tree()])
    *shown, last = stream.getvalue().removeprefix("\x1b[H\x1b[J").splitlines()
    assert sum(-(-len(line) // columns) or 1 for line in (*shown, last)) < 10
    assert "PID" in shown[0]
    everything = [*_top.table(tree(), columns).splitlines(), *_top.summary(tree()).splitlines()]
    hidden = 3 * len(everything) - sum(map(bool, shown))
    assert last.startswith(f"{hidden} more lines; --o")


def test_the_live_view_fits_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is hidden where everything fits."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    lines = [*_top.table(tree(), 200).splitlines(), *_top.summary(tree()).splitlines()]
    monkeypatch.setenv("LINES", str(len(lines) + 1))
    stream = Terminal()
    _top.choose(stream, live=True)([tree()])
    assert lines == stream.getvalue().removeprefix("\x1b[H\x1b[J").splitlines()


def test_once_is_plain_on_a_terminal() -> None:
    """A single look is plain text."""
    stream = Terminal()
    show = _top.choose(stream, live=False)
    show([tree()])
    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["web"], "PID='web': must be a process id"),
        (["0"], "PID='0'"),
        (["-5"], "PID='-5'"),
        (["٣"], "PID='٣'"),
        (["1", "--interval", "0"], "--interval"),
        (["1", "--interval", "nan"], "--interval"),
        (["1", "--interval", "soon"], "--interval"),
        (["1", "--interval", "1ms"], "must be at least 0.1 s"),
        (["1", "--model-bytes", "much"], "--model-bytes"),
        (["1", "--model-bytes", "0"], "--model-bytes"),
    ],
)
def test_invalid_arguments(capsys: pytest.CaptureFixture[str], words: list[str], complaint: str) -> None:
    """The error is one line with a fix, and the status is 2."""
    assert 2 == run(*words)
    printed = capsys.readouterr()
    assert "" == printed.out
    assert complaint in printed.err
    assert 1 == len(printed.err.splitlines())


@pytest.mark.parametrize(
    "error",
    [
        ProcessLookupError(3, "process 10 does not exist"),
        PermissionError(13, "process 10 belongs to another user"),
        FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"),
    ],
)
def test_a_command_that_the_system_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """The reason is one line, without an error number."""

    def look(self: TreeWatch) -> TreeReport:
        raise error

    monkeypatch.setattr(TreeWatch, "look", look)
    assert 2 == run(str(os.getpid()), "--once")
    assert f"modelguard top: {error.strerror}\n" == capsys.readouterr().err


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every look finds the same tree, and the third pause is interrupted; holds the pauses."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TreeWatch, "look", lambda self: tree(model_bytes=self._model_bytes))
    monkeypatch.setattr(_top.time, "sleep", pause)
    return pauses


def test_it_looks_again_until_it_is_interrupted(capsys: pytest.CaptureFixture[str], looks: list[float]) -> None:
    """A watch repeats at the given interval, and Ctrl-C ends it with status 0."""
    assert 0 == run(str(os.getpid()), "--interval", "1.5s")
    assert [1.5, 1.5, 1.5] == looks
    assert 3 == capsys.readouterr().out.count("3 processes use")


def test_once_looks_once(capsys: pytest.CaptureFixture[str], looks: list[float]) -> None:
    """With `--once` there is one table and no pause."""
    assert 0 == run(str(os.getpid()), "--once", "--model-bytes", "600000000")
    assert [] == looks
    assert "2.00 times the model (600 MB)" in capsys.readouterr().out


@pytest.mark.usefixtures("looks")
def test_json_is_one_line_for_each_look(capsys: pytest.CaptureFixture[str]) -> None:
    """Each look is one line of JSON."""
    assert 0 == run(str(os.getpid()), "--json")
    assert [10, 10, 10] == [json.loads(line)["trees"][0]["root"] for line in capsys.readouterr().out.splitlines()]


def found(monkeypatch: pytest.MonkeyPatch, *looks: list[int]) -> None:
    """The Python processes of this user are these, look by look."""
    answers = iter(looks)
    monkeypatch.setattr(_memory_report, "python_trees", lambda without: next(answers))


def test_without_a_process_id_every_tree_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python trees of this user are watched, the largest first; new ones appear, and ended ones disappear."""

    def look(self: TreeWatch) -> TreeReport:
        (pid,) = self._pids
        if pid == 40:
            raise ProcessLookupError
        return TreeReport((dataclasses.replace(PROCESS, pid=pid, pss=pid),))

    monkeypatch.setattr(TreeWatch, "look", look)
    found(monkeypatch, [10, 20], [20, 30, 40])
    trees = _top.make_reader(None, None)
    assert [20, 10] == [one.processes[0].pid for one in trees()]
    assert [30, 20] == [one.processes[0].pid for one in trees()]


def test_without_any_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is nothing to show, the error says what to give."""
    found(monkeypatch, [])
    assert 2 == run("--once")
    assert "you have no other running Python process; give the PID" in capsys.readouterr().err
