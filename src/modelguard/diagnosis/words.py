"""Command lines taken apart, as far as it matters here: options with their values, and what is left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["GUNICORN", "UVICORN", "Grammar", "Words", "split"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """How a program reads its command line.

    Attributes:
        flags: Options that take no value.
        short: What short options stand for.
        names: Long options that may be abbreviated; empty for a program that accepts no abbreviations.
    """

    flags: frozenset[str]
    short: Mapping[str, str]
    names: tuple[str, ...] = ()

    def meant(self, option: str) -> str:
        """The full name of a long option."""
        if option in self.flags or option in self.names:
            return option
        candidates = [name for name in (*self.names, *self.flags) if self.names and name.startswith(option)]
        return candidates[0] if len(candidates) == 1 else option


@dataclass(frozen=True, slots=True)
class Words:
    """A command line taken apart.

    Attributes:
        options: The values of each option in their order; a flag has an empty one.
        rest: All other words.
    """

    options: Mapping[str, tuple[str, ...]]
    rest: tuple[str, ...]

    def last(self, *names: str) -> str | None:
        """The value that counts, of an option that may be given several times."""
        return next((self.options[name][-1] for name in names if name in self.options), None)


def split(words: Sequence[str], grammar: Grammar) -> Words:
    """Take a command line apart.

    Args:
        words: What follows the program's name.
        grammar: How the program reads it. An option that is not a flag takes one value.
    """
    options: dict[str, tuple[str, ...]] = {}
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            rest += left
            break
        if not word.startswith("-") or word == "-":
            rest.append(word)
            continue
        name, value = _option(word, grammar)
        if value is None and name not in grammar.flags:
            value = left.pop(0) if left else ""
        options[name] = (*options.get(name, ()), value or "")
    return Words(options, tuple(rest))


def _option(word: str, grammar: Grammar) -> tuple[str, str | None]:
    """The name of an option, and the value if it stands in the same word: ``--workers=4``, ``-w4``."""
    if word.startswith("--"):
        name, has_value, value = word.partition("=")
        return grammar.meant(name), value if has_value else None
    name = grammar.short.get(word[:2], word[:2])
    return name, word[2:].removeprefix("=") or None


def _grammar(flags: str, short: str = "", names: str = "") -> Grammar:
    pairs = (pair.partition("=") for pair in short.split())
    return Grammar(frozenset(flags.split()), {key: value for key, _, value in pairs}, tuple(names.split()))


#: gunicorn 27 reads its options by argparse, so they may be abbreviated (gunicorn/config.py).
GUNICORN = _grammar(
    "--capture-output --check-config --daemon --disable-redirect-access-to-syslog "
    "--do-handshake-on-connect --enable-backlog-metric --enable-stdio-inheritance --help --http2-cleartext "
    "--initgroups --log-syslog --no-control-socket --no-sendfile --permit-obsolete-folding "
    "--permit-unconventional-http-method --permit-unconventional-http-version --casefold-http-method --preload "
    "--print-config --reload --reuse-port --spew --strip-header-spaces --suppress-ragged-eofs --version",
    "-w=--workers -c=--config -k=--worker-class -b=--bind -e=--env -t=--timeout -p=--pid -u=--user -g=--group "
    "-m=--umask -n=--name -D=--daemon -R=--enable-stdio-inheritance -h=--help -v=--version",
    "--bind --backlog --chdir --config --env --max-requests --max-requests-jitter --name --paste --pid --pythonpath "
    "--threads --timeout --worker-class --worker-connections --worker-tmp-dir --workers",
)

#: uvicorn 0.54 reads its own by click, which knows no abbreviations (uvicorn/main.py).
UVICORN = _grammar(
    "--access-log --date-header --factory --help --http2 --no-access-log --no-date-header --no-proxy-headers "
    "--no-server-header --no-use-colors --proxy-headers --reload --reset-contextvars --server-header --use-colors "
    "--version",
)
