"""The demo as a user runs it: from the command line, with real servers, ended in every way."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("spacy", "ja_ginza", "fastapi", "uvicorn", "matplotlib")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the demo needs {', '.join(NEEDED)}",
    ),
]

#: An application without a framework or a model. `{answer}` is what it does with a request for tokens.
APP = """
import os

asked = 0

async def reply(send, status):
    await send({{"type": "http.response.start", "status": status, "headers": [(b"content-length", b"2")]}})
    await send({{"type": "http.response.body", "body": b"[]"}})

async def app(scope, receive, send):
    global asked
    assert scope["type"] == "http"
    if scope["method"] == "GET":
        return await reply(send, 200)
    while (await receive()).get("more_body"):
        pass
    asked += 1
    {answer}
"""
GOOD = "await reply(send, 200)"
#: Twenty requests warm a server up and are not counted.
DIES = "os._exit(3) if asked > 25 else await reply(send, 200)"
FAILS = "await reply(send, 500 if asked == 25 else 200)"


def services(folder: Path, *, guarded: str = GOOD, isolated: str = GOOD) -> Path:
    """Write three services that need no model, with a behaviour each."""
    for name, answer in (("unguarded.py", GOOD), ("app.py", guarded), ("isolated.py", isolated)):
        (folder / name).write_text(APP.format(answer=answer), encoding="utf-8")
    return folder


def command(app_dir: Path, out: Path, *more: str) -> list[str]:
    """The command line of a demo."""
    return [sys.executable, "-m", "examples.demo", "--app-dir", str(app_dir), "--out", str(out), *more]


def demo(app_dir: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a demo to its end, by default of services that need no model."""
    quick = ("--seconds", "5", "--reloads", "0", *more)
    return subprocess.run(command(app_dir, out, *quick), cwd=ROOT, capture_output=True, text=True, check=False)


def figures(out: Path) -> Any:
    """What a demo has left behind for other programs."""
    return json.loads((out / "demo.json").read_text(encoding="utf-8"))


@contextlib.contextmanager
def running(app_dir: Path, out: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A demo that sends words to its servers by now, and the processes of those."""
    options = command(app_dir, out, "--seconds", "100")
    with subprocess.Popen(options, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        children: list[psutil.Process] = []
        try:
            assert process.stderr is not None
            assert any("ever-new words" in line for line in process.stderr)
            children = psutil.Process(process.pid).children(recursive=True)
            yield process, children
        finally:
            for left in [process, *children]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    left.kill()


def survivors(children: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a while."""
    _, alive = psutil.wait_procs(children, timeout=30)
    return alive


def test_the_real_demo(tmp_path: Path) -> None:
    """A short run of the example's own services ends well, and leaves a picture, figures and a report behind."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    done = demo(ROOT / "examples" / "fastapi_spacy", tmp_path, "--seconds", "8", "--growth", "2 MB", "--reloads", "1")
    assert 0 == done.returncode, done.stderr
    assert before == {child.pid for child in psutil.Process().children(recursive=True)}
    assert b"\x89PNG\r\n\x1a\n" == (tmp_path / "demo.png").read_bytes()[:8]
    assert "](demo.png)" in (tmp_path / "report.md").read_text(encoding="utf-8")

    told = figures(tmp_path)
    unguarded, guarded, isolated = (told["servers"][name] for name in ("unguarded", "guarded", "isolated"))
    # On a busy machine the slower ones get a few less.
    assert min(server["requests"] for server in (unguarded, guarded, isolated)) > 0
    assert [[], []] == [guarded["errors"], isolated["errors"]]
    assert 0 == told["differing_answers"]
    assert [[], []] == [unguarded["reloads"], isolated["reloads"]]
    assert isolated["replaced"]
    assert unguarded["growth"] > 2_000_000
    assert "MemoryGrowth" in guarded["reloads"][0]["reasons"][0]
    assert guarded["reloads"][0]["freed"] > 100_000_000


def test_a_table_for_people(tmp_path: Path) -> None:
    """A run ends with a table, and says where the rest is."""
    done = demo(services(tmp_path), tmp_path / "out")
    assert 0 == done.returncode, done.stderr
    assert "| requests " in done.stdout
    assert str(tmp_path / "out" / "demo.png") in done.stdout


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    """The demo ends with what the server said last."""
    services(tmp_path)
    (tmp_path / "app.py").write_text("raise RuntimeError('no model here')", encoding="utf-8")
    done = demo(tmp_path, tmp_path / "out")
    assert 1 == done.returncode
    assert "The guarded server died" in done.stderr
    assert "RuntimeError: no model here" in done.stderr


def test_a_server_that_dies_under_way(tmp_path: Path) -> None:
    """A death during the run ends the demo at once, not after two minutes."""
    done = demo(services(tmp_path, guarded=DIES), tmp_path / "out", "--seconds", "100")
    assert 1 == done.returncode
    assert "The guarded server died with status 3" in done.stderr


@pytest.mark.parametrize("name", ["guarded", "isolated"])
def test_a_request_that_fails(tmp_path: Path, name: str) -> None:
    """One failed request of a server with modelguard is a failed demo, and the figures are there to look into."""
    done = demo(services(tmp_path, **{name: FAILS}), tmp_path / "out")
    assert 1 == done.returncode
    server = figures(tmp_path / "out")["servers"][name]
    assert f"The {name} server failed 1 of {server['requests']} requests" in done.stderr
    assert 1 == len(server["errors"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """A Ctrl-C, or a request to end, stops all servers before the demo itself ends."""
    with running(services(tmp_path), tmp_path / "out") as (process, children):
        assert 3 == len(children)
        process.send_signal(number)
        assert process.stderr is not None
        assert "Interrupted" in process.stderr.read()
        assert 130 == process.wait()
        assert [] == survivors(children)


def test_killed(tmp_path: Path) -> None:
    """Even a demo that is given no chance to clean up leaves no server behind."""
    with running(services(tmp_path), tmp_path / "out") as (process, children):
        assert 3 == len(children)
        process.kill()
        assert [] == survivors(children)
