"""The tutorial, followed literally: its files are written and its commands are run, in the order of the page."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.process.harness import Server, write_app

from modelguard import sharing

for needed in ("fastapi", "gunicorn", "spacy", "uvicorn"):
    pytest.importorskip(needed, reason="the tutorial's service needs it")
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"^(?:<!-- (?P<how>file|change): (?P<file>\S+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SERVER = re.compile(r"(^|-- |\n  )(uvicorn|gunicorn) ")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="forked workers"),
]


class Step(NamedTuple):
    """What the page asks its reader to do.

    Attributes:
        file: The name of the file to write, None for a command.
        text: The file's contents, or the command.
    """

    file: str | None
    text: str


def steps() -> list[Step]:
    """Read the page; what it installs is installed here already."""
    found = []
    files: dict[str, str] = {}
    for match in BLOCK.finditer(TUTORIAL.read_text(encoding="utf-8")):
        text, file = match["text"], match["file"]
        if file is not None:
            text = files[file] = changed(files[file], text) if match["how"] == "change" else text
        found.append(Step(file, text))
    return [step for step in found if "pip install" not in step.text]


def changed(text: str, parts: str) -> str:
    """A file in which each part takes the place of the one that had its name, as a reader writes it."""
    lines, new = text.splitlines(), parts.splitlines()
    tree = {name(node): node for node in ast.parse(text).body}
    for node in reversed(ast.parse(parts).body):
        old = tree.get(name(node)) or max(
            (tree[each] for each in tree if "import" in each), key=lambda each: each.lineno
        )
        start = old.end_lineno if name(node) not in tree else first(old) - 1
        lines[start : old.end_lineno] = new[first(node) - 1 : node.end_lineno]
        tree = {name(node): node for node in ast.parse("\n".join(lines)).body}
    return "\n".join(lines) + "\n"


def name(node: ast.stmt) -> str:
    """What a part of a file is called: what it defines, or the module that it imports from."""
    match node:
        case ast.ImportFrom(module=module):
            return f"import {module}"
        case ast.Import(names=[alias, *_]):
            return f"import {alias.name}"
        case ast.Assign(targets=[ast.Name(id=defined)]):
            return defined
    return str(getattr(node, "name", ast.dump(node)))


def first(node: ast.stmt) -> int:
    """Its first line, with its decorators."""
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])


class Reader:
    """Follows the tutorial in a folder of its own, with free ports in place of the page's port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: Server | None = None
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MODELGUARD_RUNTIME_DIR": str(folder),
            "UVICORN_PORT": "0",
            "GUNICORN_CMD_ARGS": "--bind 127.0.0.1:0",
        }

    def do(self, step: Step) -> str:
        """Write a file, start a server in place of the one before, or run a command and return its output."""
        text = step.text
        if self.server is not None:
            text = text.replace("localhost:8000", f"127.0.0.1:{self.server.port}")
        if step.file is not None:
            write_app(self.folder, text, step.file)
            return ""
        if SERVER.search(text):
            self.stop()
            self.start(text)
            return ""
        if self.server is not None:  # other servers of this machine may have the same name
            text = re.sub(r'"\$\(pgrep [^"]*\)"', str(self.server.process.pid), text)
        done = subprocess.run(
            ["sh", "-c", text],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or "doctor" in text, f"{text}{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str) -> None:
        """Start a server and wait until it answers, with all its workers."""
        server = self.server = Server(self.folder, "sh", "-c", f"exec {command}", environment=self.environment)
        server.wait_until_serving("/openapi.json")
        count = 4 if "-w 4" in command else 0
        server.wait_until(lambda: len(self.workers()) == count, "all workers")

    def workers(self) -> set[int]:
        """The server's worker processes, without the mold that they are forked from."""
        assert self.server is not None
        booted = set(map(int, re.findall(r"Booting worker with pid: (\d+)", self.server.log)))
        return self.server.children() & booted

    def stop(self) -> None:
        """End the server, if there is one."""
        if self.server is not None:
            self.server.kill()
            self.server = None

    def get(self, path: str) -> Any:
        """Return the JSON of an answer with status 200."""
        assert self.server is not None
        answer = self.server.ask(path)
        assert 200 == answer.status, answer.text
        return answer.json


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Follow the tutorial; whatever server is left in the end is stopped."""
    found = Reader(tmp_path)
    try:
        yield found
    finally:
        found.stop()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_reader_who_follows_the_tutorial_gets_what_it_promises(reader: Reader) -> None:
    """Every file and command works as shown; four workers share one model in the end, and no request is lost."""
    said: dict[str, list[str]] = {}
    for step in steps():
        output = reader.do(step)
        if step.file is None:
            said.setdefault(step.text.split("\n")[0].split(" --")[0], []).append(output)
    unguarded, guarded = (int(output.removesuffix(" MB\n")) for output in said["python grow.py"])
    assert guarded < unguarded / 2
    (reload,) = said["python reload.py"]
    assert "generation 2 is ready" in reload
    assert "generation 1 released" in reload
    (asked,) = said["curl -X POST 'localhost:8000/words?text=One%20model,%20one%20service.'"]
    assert ["One", "model", ",", "one", "service", "."] == json.loads(asked)
    assert "Examined: process" in said["modelguard doctor"][0]
    assert "gunicorn app:app" in said["modelguard top"][0]
    assert '{"status": "ready"}' in said["curl -i localhost:8000/readyz"][0]
    answers, hurried, _ = said["python crowd.py"][0].splitlines()
    assert "Counter({200: 400})" == answers
    assert hurried in {"503", "504"}

    assert reader.server is not None
    status = reader.get("/status")
    assert (1, "ready") == (status["model"]["generation"], status["model"]["state"])
    assert 4 == len(reader.workers())
    assert 3 > sharing.report(reader.server.process.pid).copies  # five processes that do not share hold about five
    environment = Path(f"/proc/{reader.server.process.pid}/environ").read_bytes().split(b"\0")
    assert b"TOKENIZERS_PARALLELISM=false" in environment  # the preset was there from the start


def test_the_files_of_the_tutorial_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """A reader whose project uses `mypy --strict` can paste every file."""
    pytest.importorskip("mypy", reason="the checkers are installed beside the main interpreter only")
    files = [step for step in steps() if step.file is not None]
    for number, step in enumerate(files):
        last = step.file not in {later.file for later in files[number + 1 :]}
        (tmp_path / (str(step.file) if last else f"before_{number}_{step.file}")).write_text(step.text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports",
        "silent",
        *sorted(path.name for path in tmp_path.iterdir()),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
