"""A command is examined by its words and its files, and is not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelguard.diagnosis._commands import interpreter, resolve
from modelguard.diagnosis._facts import Facts, Interpreter
from modelguard.diagnosis._facts_command import facts_of_command
from modelguard.errors import CannotRun, InvalidOption

APP = "import torch\nfrom modelguard import guard\nmodel = guard(load, reload_on=policy)\n"


class Place:
    """A folder with an app, and a PATH with the programs that are looked up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("env", "granian", "gunicorn", "modelguard", "python3.12", "uvicorn"):
            self.write(f"bin/{name}", f"#!{self.programs}/python3.12\n").chmod(0o755)
        self.write("app.py", APP)

    def write(self, name: str, text: str) -> Path:
        file = self.folder / name
        file.write_text(text, encoding="utf-8")
        return file

    def facts(self, *words: str, **environ: str) -> Facts:
        given = {"PATH": str(self.programs), **environ}
        return facts_of_command(words, given, cwd=self.folder, root=self.folder)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def told(facts: Facts) -> dict[str, tuple[str | None, str]]:
    return {variable.name: (variable.value, variable.moment) for variable in facts.variables}


def test_gunicorn_by_its_options(place: Place) -> None:
    """Workers, preload and recycling are on the command line, and so is the app."""
    facts = place.facts("gunicorn", "-w", "3", "--preload", "--max-requests=50", "app:app")
    server = facts.server
    assert server is not None
    assert (3, True, 50) == (server.workers, server.preload, server.max_requests)
    assert "app.py line 1 imports torch" == facts.imported(["torch"])
    assert facts.app is not None
    assert "app.py line 3" == facts.app.reloads
    assert Interpreter((3, 12)) == facts.interpreter


def test_gunicorn_by_its_configuration(place: Place) -> None:
    """Its literals are read; the command line and GUNICORN_CMD_ARGS win, in gunicorn's order."""
    place.write(
        "conf.py",
        "workers = 2\nmax_requests: int = 100\npreload_app = True\nwsgi_app = 'app:app'\n"
        "raw_env = ['LD_PRELOAD=/x.so', 'API_KEY=secret']\n",
    )
    facts = place.facts("gunicorn", "-c", "conf.py", "--workers", "5", GUNICORN_CMD_ARGS="--max-requests 7 -w 9")
    server = facts.server
    assert server is not None
    assert (5, True, 7) == (server.workers, server.preload, server.max_requests)
    assert ("max-requests on GUNICORN_CMD_ARGS", "preload_app in conf.py line 3") == (
        server.max_requests_by.lstrip("-"),
        server.preload_by,
    )
    assert {"LD_PRELOAD": ("/x.so", "server")} == told(facts)
    assert facts.imported(["torch"])


def test_gunicorns_own_default_configuration(place: Place) -> None:
    """Without -c, gunicorn.conf.py beside the app counts."""
    place.write("gunicorn.conf.py", "workers = 6\n")
    server = place.facts("gunicorn", "app:app").server
    assert server is not None
    assert 6 == server.workers


def test_what_a_configuration_computes_is_not_known(place: Place) -> None:
    """The report says so, with the option that runs the configuration."""
    place.write("conf.py", "import multiprocessing\nworkers = multiprocessing.cpu_count() * 2 + 1\n")
    facts = place.facts("gunicorn", "-c", "conf.py", "app:app")
    assert facts.server is not None
    assert None is facts.server.workers
    assert any(sentence.startswith("workers is computed") and "--gunicorn" in sentence for sentence in facts.unknown)


@pytest.mark.parametrize("setting", ["if production:\n    workers = 8\n", "def f():\n    workers = 8\n"])
def test_a_setting_under_a_condition_is_not_known(place: Place, setting: str) -> None:
    """Whether the condition holds is unknown without running it."""
    place.write("conf.py", setting)
    server = place.facts("gunicorn", "-c", "conf.py", "app:app").server
    assert server is not None
    assert 8 != server.workers


def test_the_default_number_of_workers(place: Place) -> None:
    """WEB_CONCURRENCY counts for gunicorn and for uvicorn."""
    for words in (["gunicorn", "app:app"], ["uvicorn", "app:app"]):
        server = place.facts(*words, WEB_CONCURRENCY="4").server
        assert server is not None
        assert (4, "WEB_CONCURRENCY") == (server.workers, server.workers_by)


@pytest.mark.parametrize(
    ("words", "kind", "workers", "forks"),
    [
        (["uvicorn", "app:app", "--workers", "2"], "uvicorn", 2, False),
        (["uvicorn", "app:app", "--reload"], "uvicorn", 1, False),
        (["granian", "--workers", "3", "app:app"], "granian", 3, False),
        (["python3.12", "-m", "uvicorn", "--workers=2", "app:app"], "uvicorn", 2, False),
        (["python3.12", "-W", "ignore", "-mgunicorn", "-w2", "app:app"], "gunicorn", 2, True),
        (["python3.12", "bin/gunicorn", "-w2", "app:app"], "gunicorn", 2, True),
        (["env", "-u", "X", "A=B", "gunicorn", "-w", "2", "app:app"], "gunicorn", 2, True),
    ],
)
def test_servers(place: Place, words: list[str], kind: str, workers: int, forks: bool) -> None:  # noqa: FBT001
    """Each is recognised behind whatever starts it."""
    facts = place.facts(*words)
    assert facts.server is not None
    assert (kind, workers, forks) == (facts.server.kind, facts.server.workers, facts.server.forks)
    assert facts.imported(["torch"])


def test_variables_before_the_command_count(place: Place) -> None:
    """Prefix env sets, unsets and clears."""
    given = {"OMP_NUM_THREADS": "9", "MALLOC_ARENA_MAX": "1"}
    facts = place.facts("env", "-u", "MALLOC_ARENA_MAX", "LRU_CACHE_CAPACITY=8", "uvicorn", "app:app", **given)
    assert {"OMP_NUM_THREADS": ("9", "exec"), "LRU_CACHE_CAPACITY": ("8", "exec")} == told(facts)


def test_modelguard_run_before_the_command_counts(place: Place) -> None:
    """What it would set is set at the start."""
    words = ["modelguard", "run", "--preset", "torch-cpu-dynamic", "--distinct-shapes", "1", "--", "uvicorn", "app:app"]
    facts = place.facts(*words)
    assert ("exec", "exec") == tuple(told(facts)[name][1] for name in ("LRU_CACHE_CAPACITY", "OMP_NUM_THREADS"))
    assert facts.server is not None
    assert "uvicorn" == facts.server.kind


@pytest.mark.parametrize("words", [["python3.12", "app.py"], ["python3.12", "-m", "app"]])
def test_a_custom_program(place: Place, words: list[str]) -> None:
    """A script or a module is its own app, without a server."""
    facts = place.facts(*words)
    assert None is facts.server
    assert facts.imported(["torch"])


@pytest.mark.parametrize("words", [["python3.12", "-c", "import torch"], ["env", "-S", "gunicorn app:app"], ["env"]])
def test_what_is_not_understood_is_reported(place: Place, words: list[str]) -> None:
    """Nothing is claimed of it."""
    facts = place.facts(*words)
    assert (None, None) == (facts.server, facts.app)
    assert "what this program starts is not known to modelguard" in facts.unknown


def test_an_app_that_is_elsewhere(place: Place) -> None:
    """--app-dir, --chdir and PYTHONPATH are looked into; a module that is in none of them is named."""
    (place.folder / "src").mkdir()
    place.write("src/shop.py", "import spacy\n")
    for facts in (
        place.facts("uvicorn", "--app-dir", "src", "shop:app"),
        place.facts("gunicorn", "--chdir", "src", "shop:app"),
        place.facts("gunicorn", "--pythonpath", "src", "shop:app"),
        place.facts("uvicorn", "shop:app", PYTHONPATH="src"),
    ):
        assert "shop.py line 1 imports spacy" == facts.imported(["spacy"])
    assert any("module shop was not found" in sentence for sentence in place.facts("uvicorn", "shop:app").unknown)


def test_a_preload_that_does_not_exist(place: Place) -> None:
    """An entry with a path is checked; the dynamic linker searches bare names."""
    facts = place.facts("uvicorn", "app:app", LD_PRELOAD="/no/such.so libc.so.6:$ORIGIN/x.so")
    assert ["LD_PRELOAD names /no/such.so, but that file does not exist"] == [
        problem.seen for problem in facts.problems
    ]


def test_secrets_in_a_command_and_its_variables(place: Place) -> None:
    """They get into no fact at all."""
    facts = place.facts(
        "env", "API_KEY=hunter2", "uvicorn", "--ssl-keyfile-password", "hunter2", "app:app", TOKEN="hunter2"
    )
    assert "hunter2" not in repr(facts)


@pytest.mark.parametrize("words", [["no-such-command"], ["env", "A=B", "no-such-command"]])
def test_a_command_that_does_not_exist(place: Place, words: list[str]) -> None:
    """Its status is a shell's."""
    with pytest.raises(CannotRun) as caught:
        place.facts(*words)
    assert 127 == caught.value.status


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["modelguard", "run", "--"],
        ["modelguard", "run", "--preset", "torch-gpu", "--", "uvicorn", "app:app"],
        ["modelguard", "run", "--allocator", "hoard", "--", "uvicorn", "app:app"],
        ["modelguard", "run", "--workers", "many", "--", "uvicorn", "app:app"],
    ],
)
def test_invalid_commands(place: Place, words: list[str]) -> None:
    """A command that would be rejected when it is run is rejected here."""
    with pytest.raises(InvalidOption):
        place.facts(*words)


def test_which_python_runs_a_program(tmp_path: Path) -> None:
    """By the first line of a script, the name of the file, or the virtual environment around it."""
    make: Callable[[str, str], str] = lambda name, text: str(_executable(tmp_path / name, text))  # noqa: E731
    assert Interpreter((3, 13), free_threaded=True) == interpreter(make("python3.13t", ""))
    assert Interpreter((3, 14), micro=3) == interpreter(make("python3.14", "\0003.14.3\000"))
    assert Interpreter((3, 10), "PyPy") == interpreter(make("pypy3.10", ""))
    assert Interpreter((3, 13), free_threaded=True) == interpreter(make("gunicorn", f"#!{tmp_path}/python3.13t -s\n"))
    assert None is interpreter(make("other", "#!/usr/bin/env ruby\n"))
    _executable(tmp_path / "venv" / "pyvenv.cfg", "home = /usr/bin\nversion = 3.12.4\n")
    assert Interpreter((3, 12), micro=4) == interpreter(str(_executable(tmp_path / "venv" / "bin" / "python", "")))
    assert None is interpreter(str(tmp_path / "nothing"))


def test_this_python_is_recognised() -> None:
    """Its own file shows the version."""
    found = interpreter(sys.executable)
    assert found is not None
    assert sys.version_info[:2] == found.version


def test_a_process_needs_no_path() -> None:
    """A running command is not searched on PATH."""
    assert "gunicorn" == resolve(["/gone/gunicorn", "app:app"], {}, look_up=False).kind


def _executable(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file
