"""Hide what must never be printed: values that look like secrets, whole, wherever they stand.

Users paste reports into tickets, so all text from outside (a command line, a process title, an error) is redacted
before it is shown. Where the end of a value cannot be known, everything up to the end is hidden: hiding too much is
safer than showing the second word of a password.
"""

import base64
import json
import re
import shlex
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence

HIDDEN = "***"

# AUTH also matches AUTHOR, and KEY matches MONKEY. Short words count only where they stand alone: DB_PW, sig.
_WORD = (
    r"(?:KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|DSN|SIGNATURE|PRIVATE|SESSION|JWT|WEBHOOK|SALT|BEARER"
    r"|CONNECTION[_-]?STRING|(?<![A-Z0-9])(?:PW|SIG|SAS|PIN|OTP)(?![A-Z0-9]))"
)
#: Looked for where a name begins, and to its end: a word of a command may have thousands of letters.
_NAME = rf"(?<![\w.-])(?=[\w.-]*{_WORD})[\w.-]++"
_IS_NAME = re.compile(_NAME, re.IGNORECASE)

#: Not passwords, but a shell's current and previous folders.
_FOLDERS = ("PWD", "OLDPWD")

#: A private key, and an XML element.
_KEY_BLOCK = re.compile(r"-----BEGIN [^\n-]*-----.*?(?:-----END [^\n-]*-----|\Z)", re.DOTALL)
_ELEMENT = re.compile(rf"(<{_NAME}(?:\s[^<>]*)?>).*?(?=</|\Z)", re.IGNORECASE | re.DOTALL)

#: Tokens that are known by their shape, without a name: GitHub, GitLab, Slack, Hugging Face, OpenAI, AWS, Google, npm,
#: PyPI, and every JSON web token.
_SHAPES = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|hf_|sk-|rk_live_|sk_live_|npm_|pypi-|dop_v1_|SG\.)[\w.-]{6,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}|\bAIza[\w-]{20,}|\beyJ[\w-]{4,}\.[\w-]+(?:\.[\w-]*)?"
)

_QUOTED = (
    r"[bru]{0,2}'''.*?(?:'''|\Z)",
    r'[bru]{0,2}""".*?(?:"""|\Z)',
    r"[bru]{0,2}'(?:\\.|[^'\\])*(?:'|\Z)",
    r'[bru]{0,2}"(?:\\.|[^"\\])*(?:"|\Z)',
    r'\\+".*?(?:\\+"|\Z)',
)
#: A value in quotation marks ends with them, unless more is attached, as in a shell's ``'a'"b"``. A bracket or a YAML
#: block may span lines. Of anything else only the end of the line, or of the word, is certain.
_IN_QUOTES = rf"(?:{'|'.join(_QUOTED)})+(?=[\s,;)\]}}>&|]|\Z)"
_OPENS = r"[\[({|>'\"].*\Z"
_LINE_END = r"(?:\\.|[^\n\\])*"

_BEFORE_VALUE = (
    # password=..., "password": "...", password => ...
    rf"{_NAME}(?:\\*['\"])?\]?\s*(?:=>|:=|==|[=:])\s*",
    # --password ..., -p ...; in SQL: PASSWORD '...', IDENTIFIED BY '...'
    rf"(?<!\S)(?=-){_NAME}\s+",
    rf"{_NAME}\s+(?=['\"])",
    r"\bIDENTIFIED\s+BY\s+",
    r"(?<!\S)(?-i:-[pa])\s+(?=\S)",
    r"(?<!\S)(?-i:-p)(?=\S)",
    r"(?<!\S)(?:-[uU]|--(?:\w+-)?user)[\s=]*(?=\S*:)",
    r"\b(?:bearer|basic|digest|negotiate|ntlm|apikey)\s+",
    # A line of .netrc, and words of a conversation with a server.
    r"(?<!\S)(?:password|passwd|passphrase|requirepass|masterauth)\s+",
)
_LINE = re.compile(rf"({'|'.join(_BEFORE_VALUE)})({_IN_QUOTES}|{_OPENS}|{_LINE_END})", re.IGNORECASE | re.DOTALL)
_ALL = re.compile(rf"({'|'.join(_BEFORE_VALUE)})({_IN_QUOTES}|.*\Z)", re.IGNORECASE | re.DOTALL)

#: The user and password in an address. Passwords may contain anything, also what should have been escaped.
_ADDRESS_LINE, _ADDRESS_ALL = re.compile(r"://[^\n]*"), re.compile(r"://.*", re.DOTALL)
#: Where one may stand without a scheme: what has no blank and no slash, to its last "@".
_BEFORE_AT, _LOGIN = re.compile(r"(?<![^\s/])[^\s/]+@"), re.compile(r"(?<![\w.+-])[\w.+-]+:.+@")

#: Options whose value is a password, and options whose value is one if it has a colon, as ``user:password``.
_SHORT = ("-p", "-a")
_LOGINS = re.compile(r"-[uU]|--(?:\w+-)?user")
_BARE = re.compile(
    r"(?:[\w.-]*[._-])?(?:password|passwd|passphrase|requirepass|token|secret|api[_-]?key)", re.IGNORECASE
)

#: Shorter values are words such as "on"; hiding them would make messages unreadable.
_SHORTEST = 4


def is_secret(name: str) -> bool:
    """Whether the value of a variable or option of this name must not be shown."""
    return name not in _FOLDERS and _IS_NAME.fullmatch(name) is not None


def redact(text: str, environ: Mapping[str, str]) -> str:
    return _hide(text, environ, _LINE, _ADDRESS_LINE)


def redact_command(words: Sequence[str], environ: Mapping[str, str]) -> str:
    return " ".join(shown if HIDDEN in shown else shlex.quote(shown) for shown in redacted_words(words, environ))


def redacted_words(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[str]:
    hide_next = login_next = False
    for word in words:
        hidden = hide_next or (login_next and ":" in word)
        hide_next, login_next = _announces(word), _LOGINS.fullmatch(word) is not None
        yield HIDDEN if hidden else _hide_in_word(word, environ)


def _announces(word: str) -> bool:
    if word in _SHORT or _BARE.fullmatch(word):
        return True
    return word.startswith("-") and "=" not in word and is_secret(word.lstrip("-"))


def _hide_in_word(word: str, environ: Mapping[str, str]) -> str:
    name, assigned, _ = word.partition("=")
    if assigned and re.fullmatch(r"[\w.-]+", name) and is_secret(name.lstrip("-")):
        return f"{name}={HIDDEN}"
    return _hide(word, environ, _ALL, _ADDRESS_ALL)


def _hide(text: str, environ: Mapping[str, str], value: re.Pattern[str], address: re.Pattern[str]) -> str:
    for part in sorted(_values(environ), key=len, reverse=True):
        text = text.replace(part, HIDDEN)
    text = _KEY_BLOCK.sub(HIDDEN, text)
    text = _ELEMENT.sub(rf"\g<1>{HIDDEN}", text)
    text = value.sub(_hidden_value, text)
    text = address.sub(_hidden_login, text)
    text = _BEFORE_AT.sub(lambda found: _LOGIN.sub(f"{HIDDEN}@", found[0]), text)
    return _SHAPES.sub(HIDDEN, text)


def _hidden_value(found: re.Match[str]) -> str:
    name = found[1].rstrip("=: \t")
    return found[0] if name in _FOLDERS or not found[2] else f"{found[1]}{HIDDEN}"


def _hidden_login(found: re.Match[str]) -> str:
    _, at, after = found[0].rpartition("@")
    return f"://{HIDDEN}@{after}" if at else found[0]


def _values(environ: Mapping[str, str]) -> set[str]:
    """The values of secret variables, and passwords in addresses such as ``postgres://me:word@host/``."""
    parts: set[str] = set()
    for name, value in environ.items():
        if is_secret(name):
            parts.update(_written(value))
        for found in re.findall(r"://[^/\s:@]*:(.+)@", value):
            parts.update(_written(found))
    return {part for part in parts if len(part) >= _SHORTEST}


def _written(value: str) -> Iterable[str]:
    """The ways in which a value may stand in a text: as it is, escaped, encoded, and each of its lines."""
    yield from (value, value.strip(), repr(value)[1:-1], json.dumps(value)[1:-1])
    encoded = value.encode("utf-8", "surrogateescape")
    yield from (urllib.parse.quote(encoded), urllib.parse.quote(encoded, safe=""), urllib.parse.quote_plus(encoded))
    yield from (base64.b64encode(encoded).decode().rstrip("="), base64.urlsafe_b64encode(encoded).decode().rstrip("="))
    if "\n" in value:
        yield from (line.strip() for line in value.splitlines())
