"""All fixes of a report in one line to paste."""

from __future__ import annotations

import pytest

from modelguard.diagnosis._doctor_report import one_line
from modelguard.diagnosis._facts import Finding, Remedy


def line(*remedies: Remedy | None, words: tuple[str, ...], server: str = "") -> str:
    findings = [Finding("MG101", "title", "fault", (), "why", "fix", "page", remedy) for remedy in remedies]
    return one_line(findings, words, server)


GUNICORN = ("gunicorn", "app:app")


@pytest.mark.parametrize(
    ("remedies", "words", "expected"),
    [
        ((Remedy(environ=("A=1",)),), GUNICORN, "env A=1 gunicorn app:app"),
        ((Remedy(unset=("A",)),), ("env", "A=2", "B=3", *GUNICORN), "env -u A env B=3 gunicorn app:app"),
        ((Remedy(unset=("A",)),), ("env", "A=2", *GUNICORN), "env -u A gunicorn app:app"),
        ((Remedy(unset=("A ",)),), ("env", "A =2", "B=3", *GUNICORN), "env -u 'A ' env B=3 gunicorn app:app"),
        ((Remedy(environ=("A=1",)), Remedy(unset=("A",))), GUNICORN, "env A=1 gunicorn app:app"),
        ((Remedy(options=("--max-requests", "0")),), GUNICORN, "gunicorn app:app --max-requests 0"),
        (
            (Remedy(options=("--preload",)), Remedy(options=("--timeout", "9")), Remedy(options=("--timeout", "8"))),
            GUNICORN,
            "gunicorn app:app --preload --timeout 9",
        ),
        ((Remedy(drop=("--reload",)),), ("gunicorn", "--reload", "app:app"), "gunicorn app:app"),
        ((Remedy(drop=("--most=",)),), ("uvicorn", "app:app", "--most", "9", "--reload"), "uvicorn app:app --reload"),
        ((Remedy(drop=("--most=",)),), ("uvicorn", "--most=9", "app:app"), "uvicorn app:app"),
        (
            (Remedy(run=("--preset", "a")), Remedy(run=("--allocator", "x")), Remedy(run=("--allocator", "y"))),
            GUNICORN,
            "modelguard run --preset a --allocator x -- gunicorn app:app",
        ),
        ((Remedy(before=("rm -f /m/*.db",)),), GUNICORN, "rm -f /m/*.db && gunicorn app:app"),
        (
            (Remedy(options=("--preload",)),),
            ("./start.sh",),
            'env GUNICORN_CMD_ARGS="$GUNICORN_CMD_ARGS --preload" ./start.sh',
        ),
        (
            (Remedy(options=("--timeout", "9")),),
            ("env", "GUNICORN_CMD_ARGS=--timeout 3", "./start.sh"),
            "env 'GUNICORN_CMD_ARGS=--timeout 3 --timeout 9' ./start.sh",
        ),
        ((Remedy(environ=("A=a b",)),), ("app", "--password=***"), "env 'A=a b' app --password=***"),
        ((None,), GUNICORN, ""),
        ((Remedy(environ=("A=1",)),), (), ""),
    ],
)
def test_the_line(remedies: tuple[Remedy | None, ...], words: tuple[str, ...], expected: str) -> None:
    """Each change stands where it takes effect, once, and what the command sets itself gives way."""
    assert expected == line(*remedies, words=words, server="gunicorn")


def test_options_of_another_server_need_its_command() -> None:
    """A program that starts uvicorn itself cannot be given options, and a line without a fix is none."""
    assert "" == line(Remedy(options=("--workers", "1")), words=("python", "main.py"), server="uvicorn")
