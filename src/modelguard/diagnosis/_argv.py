"""Command lines split into options with their values, and other words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["GUNICORN", "UVICORN", "Arguments", "OptionTable", "split"]


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options of a program.

    Attributes:
        flags: Options that take no value.
        short: The long option of each short one.
        names: Long options that may be abbreviated; empty for a program that does not accept abbreviations.
    """

    flags: frozenset[str]
    short: Mapping[str, str]
    names: tuple[str, ...] = ()

    def full_name(self, option: str) -> str:
        """The full name of a long option."""
        if option in self.flags or option in self.names:
            return option
        candidates = [name for name in (*self.names, *self.flags) if self.names and name.startswith(option)]
        return candidates[0] if len(candidates) == 1 else option


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line that was split.

    Attributes:
        options: The values of each option in their order; the value of a flag is empty.
        rest: All other words.
    """

    options: Mapping[str, tuple[str, ...]]
    rest: tuple[str, ...]

    def last(self, *names: str) -> str | None:
        """The value that counts of an option that may be given several times."""
        return next((self.options[name][-1] for name in names if name in self.options), None)


def split(words: Sequence[str], table: OptionTable) -> Arguments:
    """Split a command line.

    Args:
        words: What follows the program's name.
        table: The program's options. An option that is not a flag takes one value.
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
        name, value = _option(word, table)
        if value is None and name not in table.flags:
            value = left.pop(0) if left else ""
        options[name] = (*options.get(name, ()), value or "")
    return Arguments(options, tuple(rest))


def _option(word: str, table: OptionTable) -> tuple[str, str | None]:
    """The name of an option, and its value if that is in the same word: ``--workers=4``, ``-w4``."""
    if word.startswith("--"):
        name, has_value, value = word.partition("=")
        return table.full_name(name), value if has_value else None
    name = table.short.get(word[:2], word[:2])
    return name, word[2:].removeprefix("=") or None


def _table(flags: str, short: str = "", names: str = "") -> OptionTable:
    pairs = (pair.partition("=") for pair in short.split())
    return OptionTable(frozenset(flags.split()), {key: value for key, _, value in pairs}, tuple(names.split()))


#: gunicorn 27 reads its options by argparse, so they may be abbreviated (gunicorn/config.py).
GUNICORN = _table(
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

#: uvicorn 0.54 reads its options by click, which does not accept abbreviations (uvicorn/main.py).
UVICORN = _table(
    "--access-log --date-header --factory --help --http2 --no-access-log --no-date-header --no-proxy-headers "
    "--no-server-header --no-use-colors --proxy-headers --reload --reset-contextvars --server-header --use-colors "
    "--version",
)
