"""The short names of processes in `modelguard top`."""

from __future__ import annotations

import pytest

from modelguard.cli._top import process_name

SPAWN = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/srv/a-very-long-path-to-an-environment/bin/gunicorn -w 4 shop.api:app", "gunicorn shop.api:app"),
        ("/usr/bin/python3.12 /srv/.venv/bin/gunicorn -b 0.0.0.0:8000 shop.api:make()", "gunicorn shop.api:make()"),
        ("gunicorn -c gunicorn.conf.py", "gunicorn"),
        ("gunicorn -c python:modelguard.frameworks.gunicorn -w 4 shop.api:app", "gunicorn shop.api:app"),
        ("gunicorn -m 007 app:app", "gunicorn app:app"),
        ("python -m uvicorn --host localhost --port 80 app:app", "uvicorn app:app"),
        ("python3.13t -X dev -W error -m hypercorn app:app", "hypercorn app:app"),
        ("pypy3.10 -m granian --interface asgi app:app", "granian app:app"),
        ("/venv/bin/celery -A shop.tasks worker", "celery shop.tasks"),
        ("python -m celery --app=shop.tasks worker", "celery shop.tasks"),
        ("flask --app shop run", "flask shop"),
        ("uwsgi --http :80 --module shop.wsgi:app", "uwsgi shop.wsgi:app"),
        ("python -u /srv/jobs/train.py --epochs 3", "train.py"),
        ("python -m pytest tests", "pytest"),
        ("python", "python"),
        ("/usr/sbin/nginx -g daemon", "nginx"),
    ],
)
def test_a_process_has_the_name_of_its_program_and_its_app(command: str, expected: str) -> None:
    """Folders, the interpreter and options are left out; servers have their app."""
    assert expected == process_name(command.split())


def test_source_on_the_command_line_is_not_shown() -> None:
    """Code behind -c is not a name, and a spawned worker is recognised."""
    assert "python3 -c" == process_name(["/usr/bin/python3", "-c", "import this; print(9)"])
    assert "python (spawned worker)" == process_name(["python", "-c", SPAWN, "--multiprocessing-fork"])


def test_molds_and_their_workers() -> None:
    """The processes of an isolated function have its name."""
    program = "from modelguard.isolation._mold_program import main; main(5, 7)"
    assert "isolated app.predict" == process_name(["python", "-c", program, "mold", "app.predict"])
    assert "broker app.predict" == process_name(["python", "-c", program, "broker", "app.predict"])


def test_a_title_is_shown_as_it_is() -> None:
    """Programs with setproctitle name themselves."""
    assert "gunicorn: worker [shop]" == process_name(["gunicorn: worker [shop]"])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["server: worker [token=s3cret]"], "server: worker [token=***"),
        (["curl", "-u", "user:s3cret"], "curl"),
        (["gunicorn", "--api-key", "s3cret", "app:app"], "gunicorn app:app"),
        (["a\n\x1b[31mb"], "a [31mb"),
        ([], "?"),
        ([""], "?"),
    ],
)
def test_secrets_and_control_characters_are_hidden(command: list[str], expected: str) -> None:
    """A name is safe to print, whatever the command line holds."""
    assert expected == process_name(command)
