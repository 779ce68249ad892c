"""Nothing that looks like a secret is printed."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelguard.diagnosis._redact import is_secret, redact, redact_command

SECRET = "hunter2-word"


@pytest.mark.parametrize(
    "name",
    [
        "API_KEY",
        "hf_token",
        "DJANGO_SECRET_KEY",
        "DB_PASSWORD",
        "DB_PASS",
        "AWS_CREDENTIALS",
        "BASIC_AUTH",
        "api-key",
        "SENTRY_DSN",
    ],
)
def test_names_of_secrets(name: str) -> None:
    """Names that contain a word for secrets are secret, in any case and notation."""
    assert is_secret(name)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PATH", "PWD", "LD_PRELOAD", "LRU_CACHE_CAPACITY"])
def test_other_names(name: str) -> None:
    """The variables that the doctor reads are not secret."""
    assert not is_secret(name)


@pytest.mark.parametrize(
    "words",
    [
        ["app", "--api-key", SECRET],
        ["app", f"--api-key={SECRET}"],
        ["env", f"API_KEY={SECRET}", "app"],
        ["gunicorn", "--env", f"SECRET_KEY={SECRET}", "app:app"],
        ["gunicorn", f"--env=SECRET_KEY={SECRET}", "app:app"],
        ["app", "--db", f"postgres://me:{SECRET}@host/db"],
        ["app", f"postgres://{SECRET}@host"],
        ["app", f"postgres://me:pa/{SECRET}@host"],
        ["app", "-H", f"Authorization: Bearer {SECRET}"],
        ["app", "-p", SECRET],
        ["app", f"-p{SECRET}"],
        ["sh", "-c", f"PASSWORD='{SECRET} x' app"],
    ],
)
def test_secrets_of_a_command_line_are_hidden(words: list[str]) -> None:
    """Options, assignments, addresses and values of secret variables are hidden; the program is not."""
    shown = redact_command(words, {"MY_TOKEN": SECRET})
    assert SECRET not in shown
    assert shown.startswith(words[0])


def test_a_command_line_without_secrets_is_shown_as_it_is() -> None:
    """A harmless command line can be pasted back into a shell."""
    words = ["gunicorn", "-c", "my conf.py", "--bind", "127.0.0.1:80", "app:make()"]
    assert "gunicorn -c 'my conf.py' --bind 127.0.0.1:80 'app:make()'" == redact_command(words, {})


LETTERS = st.text(string.ascii_letters + string.digits)


@given(LETTERS.filter(lambda value: len(value) >= 4), LETTERS, LETTERS)
def test_no_value_of_a_secret_variable_survives(value: str, before: str, after: str) -> None:
    """It is hidden whatever it is, and whatever is around it."""
    assert value not in redact(before + value + after, {"X_TOKEN": value})


def test_the_repr_of_a_value_is_hidden_too() -> None:
    """Error messages contain the repr of values."""
    value = "a\nsecret"
    assert "bad value '***'" == redact(f"bad value {value!r}", {"KEY": value})


def test_a_password_in_an_address_is_hidden_wherever_it_appears() -> None:
    """A password in the address of a variable is a secret."""
    assert "login with *** failed" == redact(f"login with {SECRET} failed", {"DATABASE_URL": f"pg://me:{SECRET}@db/x"})
