"""Nothing that looks like a secret is printed, wherever it comes from."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelguard.diagnosis.secrecy import clean, clean_command, is_secret

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
    """Names with a telling word in them are secret, in any case and any notation."""
    assert is_secret(name)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PATH", "PWD", "LD_PRELOAD", "LRU_CACHE_CAPACITY"])
def test_other_names(name: str) -> None:
    """What the doctor works with is none."""
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
def test_a_command_line_keeps_its_secrets(words: list[str]) -> None:
    """Options, assignments, addresses and values of secret variables are hidden; the program is not."""
    shown = clean_command(words, {"MY_TOKEN": SECRET})
    assert SECRET not in shown
    assert shown.startswith(words[0])


def test_a_command_line_without_secrets_is_shown_as_it_is() -> None:
    """What is harmless can be pasted back into a shell."""
    words = ["gunicorn", "-c", "my conf.py", "--bind", "127.0.0.1:80", "app:make()"]
    assert "gunicorn -c 'my conf.py' --bind 127.0.0.1:80 'app:make()'" == clean_command(words, {})


LETTERS = st.text(string.ascii_letters + string.digits)


@given(LETTERS.filter(lambda value: len(value) >= 4), LETTERS, LETTERS)
def test_no_value_of_a_secret_variable_survives(value: str, before: str, after: str) -> None:
    """Whatever the value is, and whatever stands around it."""
    assert value not in clean(before + value + after, {"X_TOKEN": value})


def test_the_repr_of_a_value_is_hidden_too() -> None:
    """Messages of errors quote values."""
    value = "a\nsecret"
    assert "bad value '***'" == clean(f"bad value {value!r}", {"KEY": value})


def test_a_password_in_an_address_is_hidden_wherever_it_appears() -> None:
    """An address in a variable gives its password away by itself."""
    assert "login with *** failed" == clean(f"login with {SECRET} failed", {"DATABASE_URL": f"pg://me:{SECRET}@db/x"})
