"""Nothing that looks like a secret is printed."""

from __future__ import annotations

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.facts.secret_forms import BLOCKS, FORMS, QUOTED, TEXTS, TOKENS, WORDS

from modelguard.cli._top import process_name
from modelguard.facts._redact import is_secret, redact, redact_command

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


LONG = ["Q" * 20_000, "eyJhbGci." * 2000, "key" * 30_000, *(each * 30_000 for each in ("..", "a:", "<key ", "://"))]


@pytest.mark.parametrize("text", LONG, ids=lambda text: text[:8])
@pytest.mark.timeout(30)
def test_long_words_are_searched_in_time(text: str) -> None:
    """A command may have whole programs, or data in base64, in one of its words."""
    assert redact_command(["app", text], {}).startswith("app ")
    assert redact(text, {})


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


#: Parts of a secret that stand in no form by chance.
PART = st.text("zqxj" + string.digits, min_size=6, max_size=12)


def joined(between: str) -> st.SearchStrategy[list[str]]:
    """The parts of a secret, with what stands between them as every second item."""
    pairs = st.tuples(st.sampled_from(between), PART)
    return st.tuples(PART, st.lists(pairs, max_size=3)).map(lambda drawn: [drawn[0], *(c for p in drawn[1] for c in p)])


def assert_hidden(shown: str, secret: list[str], form: object) -> None:
    assert not [part for part in secret[::2] if part in shown], (form, secret, shown)


def test_the_corpus_has_200_forms() -> None:
    """No form was lost or counted twice."""
    assert len(set(FORMS)) == len(FORMS) >= 200


@pytest.mark.parametrize("form", WORDS, ids=" ".join)
@given(secret=joined(" '\"=:/@\n\\&;,"))
@settings(max_examples=25)
def test_a_value_in_a_command_line_is_hidden_whole(form: tuple[str, ...], secret: list[str]) -> None:
    """Whatever it holds: spaces, quotation marks, line breaks. The same holds for the names in `top`."""
    words = ["app", *(word.replace("{s}", "".join(secret)) for word in form)]
    assert_hidden(redact_command(words, {}), secret, form)
    assert_hidden(process_name(["celery", *words[1:]]), secret, form)


@pytest.mark.parametrize("form", TEXTS)
@given(secret=joined(" '\"=:/&;,"))
@settings(max_examples=25)
def test_a_value_in_a_text_is_hidden_whole(form: str, secret: list[str]) -> None:
    """An unquoted value is hidden up to the end of its line."""
    shown = redact(form.replace("{s}", "".join(secret)), {})
    assert_hidden(shown, secret, form)


@pytest.mark.parametrize("form", QUOTED)
@given(secret=joined(" =:/@&;,\n"))
@settings(max_examples=25)
def test_a_quoted_value_is_hidden_whole(form: str, secret: list[str]) -> None:
    """Up to its closing quotation mark."""
    assert_hidden(redact(form.format(s="".join(secret)), {}), secret, form)


@pytest.mark.parametrize("form", TOKENS)
@given(secret=PART)
@settings(max_examples=25)
def test_a_token_is_hidden_by_its_shape_or_its_place(form: str, secret: str) -> None:
    """Tokens of known services need no name."""
    assert_hidden(redact(form.replace("{s}", secret), {}), [secret], form)


@pytest.mark.parametrize("form", BLOCKS)
@given(secret=joined(" =:/+\n"))
@settings(max_examples=25)
def test_a_value_over_several_lines_is_hidden_whole(form: str, secret: list[str]) -> None:
    """Private keys, YAML blocks, and values in brackets."""
    assert_hidden(redact(form.replace("{s}", "".join(secret)), {}), secret, form)


def test_the_lines_and_encodings_of_a_secret_variable_are_hidden() -> None:
    """A private key in a variable is recognised line by line, and a password when it is escaped in an address."""
    environ = {"PRIVATE_KEY": "first line\nsecond line", "DB_PASSWORD": "a b/c?d"}
    assert "*** and ***" == redact("second line and a%20b%2Fc%3Fd", environ)


def test_what_follows_a_quoted_value_is_shown() -> None:
    """Where the end of a value is certain, the rest stays readable."""
    assert "{'password': ***, 'port': 80}" == redact("{'password': 'correct horse', 'port': 80}", {})


@pytest.mark.parametrize(
    "text", ["PWD=/srv/app python main.py", "gunicorn: worker [app:app]", "no such file: /usr/lib/libjemalloc.so.2"]
)
def test_a_harmless_text_is_shown_as_it_is(text: str) -> None:
    """Redaction keeps messages readable."""
    assert text == redact(text, {})
