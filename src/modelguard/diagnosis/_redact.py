"""Hide what must never be printed: values of variables and options that look like secrets, and passwords in addresses.

Users paste reports into tickets. So all text from outside (a command line, the error of a configuration) is redacted
before it is shown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["HIDDEN", "is_secret", "redact", "redact_command"]

HIDDEN = "***"

# AUTH also matches AUTHOR: hiding too much is safer than too little.
_NAME = r"[\w.-]*(?:KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|DSN|SIGNATURE|PRIVATE)[\w.-]*"
#: Not passwords, but a shell's current and previous folders.
_FOLDERS = ("PWD", "OLDPWD")
_USER_INFO = re.compile(r"(?<=://)[^\s'\"]*@")
_ASSIGNED = re.compile(rf"(\b{_NAME}['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|\S+)", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)\S+", re.IGNORECASE)

#: Shorter values are words such as "on"; hiding them would make messages unreadable.
_SHORTEST = 4


def is_secret(name: str) -> bool:
    """Whether the value of a variable or option of this name must not be shown."""
    return name not in _FOLDERS and re.fullmatch(_NAME, name, re.IGNORECASE) is not None


def redact(text: str, environ: Mapping[str, str]) -> str:
    """Hide every secret in a text.

    Args:
        text: A message, or a part of a command line.
        environ: Variables whose secret values may be in the text.
    """
    for value in sorted(_values(environ), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
    return _ASSIGNED.sub(rf"\g<1>{HIDDEN}", text)


def redact_command(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Write a command line with every secret hidden."""
    return " ".join(_redacted_words(words, environ))


def _redacted_words(words: Sequence[str], environ: Mapping[str, str]) -> Iterable[str]:
    hide_next = False
    for word in words:
        if hide_next and not word.startswith("-"):
            yield HIDDEN
            hide_next = False
            continue
        hide_next = word.startswith("-") and "=" not in word and is_secret(word.lstrip("-"))
        redacted = redact(word, environ)
        yield redacted if HIDDEN in redacted else shlex.quote(redacted)


def _values(environ: Mapping[str, str]) -> Iterable[str]:
    """The values of secret variables, and passwords in addresses such as ``postgres://me:word@host/``."""
    for name, value in environ.items():
        if is_secret(name):
            yield from (part for part in {value, value.strip(), repr(value)[1:-1]} if len(part) >= _SHORTEST)
        for found in re.findall(r"://[^/\s:@]*:(\S+)@", value):
            if len(found) >= _SHORTEST:
                yield found
