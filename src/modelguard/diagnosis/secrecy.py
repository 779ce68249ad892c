"""What must never be printed: values of variables and options that look like secrets, and passwords in addresses.

A report is pasted into tickets. So nothing that comes from outside (a command line, a configuration's error) is
shown before it went through here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["HIDDEN", "clean", "clean_command", "is_secret"]

HIDDEN = "***"

# AUTH also finds AUTHOR: hiding too much is the safe side.
_NAME = r"[\w.-]*(?:KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|DSN|SIGNATURE|PRIVATE)[\w.-]*"
#: These are no passwords: the folder that a shell is in, and the one before.
_FOLDERS = ("PWD", "OLDPWD")
_USER_INFO = re.compile(r"(?<=://)[^\s'\"]*@")
_ASSIGNED = re.compile(rf"(\b{_NAME}['\"]?\s*[=:]\s*)('[^']*'|\"[^\"]*\"|\S+)", re.IGNORECASE)
_BEARER = re.compile(r"\b(bearer|basic)(\s+)\S+", re.IGNORECASE)

#: Shorter values are words such as "on", and hiding each of those would make a message unreadable.
_SHORTEST = 4


def is_secret(name: str) -> bool:
    """Whether the value of a variable or option of this name must not be shown."""
    return name not in _FOLDERS and re.fullmatch(_NAME, name, re.IGNORECASE) is not None


def clean(text: str, environ: Mapping[str, str]) -> str:
    """Hide every secret in text that comes from outside.

    Args:
        text: A message, or a part of a command line.
        environ: Variables whose secret values may stand in the text.
    """
    for value in sorted(_values(environ), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _USER_INFO.sub(f"{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
    return _ASSIGNED.sub(rf"\g<1>{HIDDEN}", text)


def clean_command(words: Sequence[str], environ: Mapping[str, str]) -> str:
    """Write a command line with every secret hidden."""
    return " ".join(_clean_words(words, environ))


def _clean_words(words: Sequence[str], environ: Mapping[str, str]) -> Iterable[str]:
    hide_next = False
    for word in words:
        if hide_next and not word.startswith("-"):
            yield HIDDEN
            hide_next = False
            continue
        hide_next = word.startswith("-") and "=" not in word and is_secret(word.lstrip("-"))
        cleaned = clean(word, environ)
        yield cleaned if HIDDEN in cleaned else shlex.quote(cleaned)


def _values(environ: Mapping[str, str]) -> Iterable[str]:
    """Secret values, and the passwords inside of addresses such as ``postgres://me:word@host/``."""
    for name, value in environ.items():
        if is_secret(name):
            yield from (part for part in {value, value.strip(), repr(value)[1:-1]} if len(part) >= _SHORTEST)
        for found in re.findall(r"://[^/\s:@]*:(\S+)@", value):
            if len(found) >= _SHORTEST:
                yield found
