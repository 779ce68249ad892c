"""Parse sizes, percentages and durations (``"500 MB"``, ``"80%"``, ``"1h30m"``), and format figures for messages."""

from __future__ import annotations

import math
import operator
import os
import re
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, cast, get_args

from modelguard.errors import InvalidOption, UnhashableKey, of_a_signal, shortened
from modelguard.errors import printable as printable  # noqa: PLC0414 - offered here too

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable, Collection, Iterable, Sequence

T = TypeVar("T")

#: A duration as an argument: seconds, a timedelta, or text such as ``"1h30m"``.
Duration: TypeAlias = float | timedelta | str

#: What a call of a function gives: a result, a coroutine, or a generator of either kind.
FunctionKind: TypeAlias = Literal["function", "coroutine", "generator", "async generator"]

_DECIMAL = ("B", "kB", "MB", "GB", "TB")
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_KILO = 1000
_BYTES: dict[str, int] = {
    **{unit.lower(): _KILO**power for power, unit in enumerate(_DECIMAL)},
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY, start=1)},
}
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}

# Compiled on first use (re keeps them), not on import.
# No more digits than any size or duration has: int() of very long text raises an error of its own.
_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_AMOUNT = rf"({_NUMBER})\s*([A-Za-z%]*)"
# From large to small, each unit once, so that a slip such as "1h30h" is rejected.
_DURATION = r"\s*".join(rf"(?:(?P<{unit}>{_NUMBER})\s*{unit}(?![A-Za-z]))?" for unit in _SECONDS)

#: The smallest bound on memory, in bytes: an allocator alone takes memory in pieces of up to a megabyte.
_LEAST_BOUND = 1_000_000

#: Longer than any wait, and still within what every lock and clock accepts.
_LONGEST = 100 * 365 * _SECONDS["d"]

_DURATION_FIX = "Give seconds as a number, a timedelta, or text such as '90s', '1h30m', '1.5h', '250ms' or '2d'."
_SIZE_FIX = "Give bytes as a whole number, or text such as '500 MB' or '1.5 GiB'."
_PERCENTAGE_FIX = f"{_SIZE_FIX[:-1]}, or a percentage of the memory limit such as '80%'."


@dataclass(frozen=True, slots=True)
class Percentage:
    """A percentage of the memory limit, where 1 is the whole of it."""

    fraction: float

    def __str__(self) -> str:
        return f"{self.fraction * 100:.12g}%"


def seconds(value: Duration, argument: str, *, zero: bool = False) -> float:
    """Read a duration in seconds: an int or float, a ``timedelta``, or text such as ``"1h30m"`` or ``"250ms"``.

    Here and below, ``argument`` is the name of the caller's argument, for the :class:`InvalidOption`.
    """
    amount = _parse_seconds(value, argument) if isinstance(value, str) else _seconds(value, argument)
    faults = {
        "must be a number": math.isnan(amount),
        "must not be negative": amount < 0,
        "must be at most a hundred years": amount > _LONGEST,
        "must not be zero": amount == 0 and not zero,
    }
    for why, found in faults.items():
        if found:
            raise InvalidOption(argument, value, why=why, fix=_DURATION_FIX)
    return amount


def size(value: int | str, argument: str, *, at_least: int = 1, fix: str = _SIZE_FIX) -> int:
    """Read a size of memory in bytes: an int, or text with a unit, in upper or lower case.

    A number below ``at_least`` is one of megabytes whose unit is missing.
    """
    count = _parse_size(value, argument, fix) if isinstance(value, str) else value
    if isinstance(value, bool) or not isinstance(count, int):
        raise InvalidOption(argument, value, why="must be a whole number of bytes", fix=fix)
    if count < 1:
        why = "must not be negative" if count < 0 else "must not be zero"
        raise InvalidOption(argument, value, why=why, fix=fix)
    if count < at_least:
        why = f"is only {format_bytes(count)}, and must be at least {format_bytes(at_least)}"
        if isinstance(value, int):
            fix = fix.replace(_SIZE_FIX[:-1], f"Write '{value} MB' for megabytes")
        raise InvalidOption(argument, value, why=why, fix=fix)
    return count


def size_or_percentage(value: int | str, argument: str) -> int | Percentage:
    """Read a bound on the memory of models: a size of at least 1 MB, or a percentage of the limit such as ``"80%"``."""
    if isinstance(value, str) and value.rstrip().endswith("%"):
        return _percentage(value, argument)
    given, fix = cast("object", value), _PERCENTAGE_FIX
    if isinstance(given, float) and 0 < given <= 1:  # such as 0.8
        fix = f"Write '{Percentage(given)}' for a percentage of the memory limit."
    return size(value, argument, at_least=_LEAST_BOUND, fix=fix)


def whole_number(value: object, argument: str, *, at_least: int = 1, most: int = sys.maxsize, fix: str = "") -> int:
    """Check a whole number; True and False are not numbers here."""
    fix = fix or f"Write for example {argument}={max(at_least, 8)}."
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise InvalidOption(argument, value, why=f"must be a whole number of at least {at_least}", fix=fix)
    if value > most:
        raise InvalidOption(argument, value, why=f"must be at most {most:,}", fix=fix)
    return value


#: The largest number that is not infinite.
_MOST = sys.float_info.max


def number(
    value: object, argument: str, *, fix: str, above: float = 0.0, at_least: float | None = None, most: float = _MOST
) -> float:
    """Check a number, which may have a fraction; True and False are not numbers here."""
    least = math.nextafter(above, math.inf) if at_least is None else at_least
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        low = f"above {above:g}" if at_least is None else f"of at least {at_least:g}"
        high = "" if most == _MOST else f" and at most {most:g}"
        raise InvalidOption(argument, value, why=f"must be a number {low}{high}", fix=fix)
    return float(value)


def flag(value: object, argument: str) -> bool:
    """Check that a value is True or False, and no other object."""
    return instance(value, argument, bool, "True or False", fix=f"Write {argument}=True.")


def one_of(value: object, argument: str, known: Iterable[str], *, fix: str = "", what: str = "value") -> None:
    """Check that a value is one of the texts in ``known``, each of which is a ``what``."""
    names = tuple(known)
    if not isinstance(value, str) or value not in names:  # the comparison of another object may raise
        near = nearest(value if isinstance(value, str) else shortened(value), names)
        choice = f"{near}Write one of {', '.join(map(repr, names))}."
        raise InvalidOption(argument, value, why=f"is not a known {what}", fix=fix or choice)


def nearest(text: str, names: Iterable[str]) -> str:
    import difflib  # here, because only errors need it

    near = difflib.get_close_matches(text, names, n=1, cutoff=0.7)
    return f"Did you mean {near[0]!r}? " if near else ""


def instance(value: object, argument: str, kind: type[T], what: str, *, fix: str) -> T:
    """Check the type of a value, which is ``what``, such as ``"a Breaker"``."""
    if not isinstance(value, kind):
        raise InvalidOption(argument, value, why=f"must be {what}, not {kind_of(value)}", fix=fix)
    return value


def function(value: object, argument: str, of: str, *, fix: str, arguments: int | None = None) -> None:
    """Check that a value is a function of something; if ``arguments`` are given, one whose result is used at once."""
    if arguments is not None and callable(value) and (kind := function_kind(value)) != "function":
        why = f"must be a plain function of {of}, not a {kind} function"
        raise InvalidOption(argument, value, why=why, fix=fix)
    called_as(f"a function of {of}", value, argument, arguments, fix=fix)


def called_as(what: str, value: object, argument: str, arguments: int | None, *, fix: str) -> None:
    """Check that a value can be called, and with so many positional arguments if their number is given."""
    if not callable(value):
        raise InvalidOption(argument, value, why=f"must be {what}, not {kind_of(value)}", fix=fix)
    if arguments is not None and (found := misfit(value, arguments)) is not None:
        raise InvalidOption(argument, value, why=f"is called as {what}: {found}", fix=fix)


def signature_of(function: Any) -> inspect.Signature | None:
    import inspect  # as below

    try:
        return inspect.signature(function)
    except (ValueError, TypeError):  # many built-in functions have none
        return None


def misfit(function: Callable[..., object], arguments: int) -> str | None:
    """Why it cannot be called with so many positional arguments; None if it can, as far as its signature is known."""
    if (signature := signature_of(function)) is None:
        return None
    try:
        signature.bind(*(None for _ in range(arguments)))
    except TypeError as error:
        return str(error)
    return None


def function_kind(function: Any) -> FunctionKind:
    """The kind of what can be called. What gives something else than its code says has a ``function_kind``."""
    import inspect  # here, because few need it

    declared = getattr(function, "function_kind", None)
    if isinstance(declared, str) and declared in get_args(FunctionKind):
        return declared  # type: ignore[return-value] # narrowed by the line above
    for called in (function, type(function).__call__):
        if inspect.isasyncgenfunction(called):
            return "async generator"
        if inspect.iscoroutinefunction(called):
            return "coroutine"
        if inspect.isgeneratorfunction(called):
            return "generator"
    return "function"


def name(value: object) -> str:
    """Read the name of a guard, a pool or a function, for one line of a log or a table."""
    if not isinstance(value, str) or not value.strip():
        why = "must be text that is not empty"
        raise InvalidOption("name", value, why=why, fix="Give a short name, or leave it out.")
    return printable(value if isinstance(value, KeyedName) else plain(value))


def plain(text: str) -> str:
    """Text of a class of the author's, as an enum is, without that class.

    Others could not pickle it, each way to write it may give another text, and its methods may do anything.
    """
    return str.__str__(text)


def text_of_own(value: object) -> str:
    """The ``repr`` of a pool's key or of a policy, which is code of the user's and may raise."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - whatever it raises
        return shortened(value)


def check_pool_key(key: object) -> None:
    """Check the key of a pool. Its hash and its comparison are code of the user's."""
    try:
        try_key(key)
    except Exception as error:  # noqa: BLE001 - whatever it raises
        raise key_error(key, error) from None


def key_error(key: object, error: Exception) -> Exception:
    """What to raise for what was raised as a key was hashed or compared."""
    return error if of_a_signal(error) else UnhashableKey(key, error)


def try_key(key: object) -> None:
    """Hash a key of a dict and compare it, as with an equal one: that of an array is neither true nor false."""
    hash(key)
    bool(operator.eq(key, key))


class KeyedName(str):
    """The name of one model of a pool, such as ``voices['ja']``. It knows that of the pool, for what counts by name."""

    __slots__ = ("pool",)
    pool: str

    def __new__(cls, pool: str, key: object, text: str | None = None) -> Self:
        if text is None:
            text = f"{pool}[{text_of_own(key)}]"
        made = super().__new__(cls, printable(text))
        made.pool = printable(pool)
        return made

    def __getnewargs__(self) -> tuple[str, None, str]:  # type: ignore[override] # events come from other processes
        return self.pool, None, str(self)


def as_number(text: str) -> int | str:
    """The whole number from 1 to 999,999,999 that text is, as from a command line; any other text as it is."""
    return int(text) if re.fullmatch(r"(?!0+$)[0-9]{1,9}", text, re.ASCII) else text


_PROCESS_FIX = "Give the id of a running process as an int, as os.getpid() returns it and pgrep prints it."


def process_id(value: object, argument: str, *, fix: str = _PROCESS_FIX) -> int:
    """Check the number of a process."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOption(argument, value, why="must be a process id", fix=fix)
    return value


def unnameable(text: str) -> str:
    """Why the system takes no such name of a file or word of a command; empty if it does."""
    try:
        if b"\0" not in os.fsencode(text):
            return ""
    except UnicodeEncodeError:
        return "has a character that cannot be encoded"
    return "has a NUL character"


def no_path(text: str) -> str:
    """Why text is not the path of a file; empty if it is."""
    if text.startswith("~"):
        return "begins with ~, which only a shell and Path.expanduser() replace by the home folder"
    return unnameable(text)


def command(words: Sequence[str]) -> None:
    """Check the words of a command: there is one, and the system can pass all of them on."""
    if not words:
        raise InvalidOption("command", "", why="must not be empty", fix="Write it after --, with its arguments.")
    for word in words:
        if why := unnameable(word):
            raise InvalidOption("command", word, why=why, fix="Remove it.")


def kind_of(value: object) -> str:
    """What kind of object a value is, for messages: ``"a str"``, ``"an int"``, ``"a class"``, ``"None"``."""
    if value is None or isinstance(value, type):
        return "None" if value is None else "a class"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def type_name(kind: type) -> str:
    """The full name of a type. Those of SWIG 4.1 to 4.3, as in faiss, are of no module."""
    return f"{getattr(kind, '__module__', '?')}.{kind.__qualname__}"


def format_bytes(count: int) -> str:
    """Write bytes for a message, in powers of 1000: ``"1.2 GB"``, ``"500 MB"``, ``"-3 kB"``."""
    power = 0
    # Compared after rounding, so that 999,999 bytes are "1 MB" and not "1000 kB".
    while round(abs(count) / _KILO**power, 1) >= _KILO and power < len(_DECIMAL) - 1:
        power += 1
    return f"{count / _KILO**power:.1f}".removesuffix(".0") + f" {_DECIMAL[power]}"


def format_seconds(amount: float) -> str:
    """Write a duration for a message, in at most two units: ``"250ms"``, ``"1.5s"``, ``"1h30m"``."""
    if amount < _SECONDS["s"]:
        return f"{amount / _SECONDS['ms']:.0f}ms"
    if amount < _SECONDS["m"]:
        return f"{amount:.1f}".removesuffix(".0") + "s"
    left = round(amount)
    parts: list[str] = []
    for unit in ("d", "h", "m", "s"):
        count, left = divmod(left, int(_SECONDS[unit]))
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts[:2])


def _seconds(value: object, argument: str) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float):
        why = f"must be a duration, not {kind_of(value)}"
        raise InvalidOption(argument, value, why=why, fix=_DURATION_FIX)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _parse_seconds(text: str, argument: str) -> float:
    found = re.fullmatch(_DURATION, text.strip(), re.ASCII)
    parts = {unit: amount for unit, amount in found.groupdict().items() if amount} if found else {}
    if not parts:
        why = _why_unreadable(text, _SECONDS, "duration")
        raise InvalidOption(argument, text, why=why, fix=_DURATION_FIX)
    return math.fsum(float(amount) * _SECONDS[unit] for unit, amount in parts.items())


def _parse_size(text: str, argument: str, fix: str) -> int:
    found = re.fullmatch(_AMOUNT, text.strip(), re.ASCII)
    number, unit = found.groups() if found else ("", "")
    factor = _BYTES.get(unit.lower())
    if factor is None:
        why = _why_unreadable(text, _BYTES, "size")
        raise InvalidOption(argument, text, why=why, fix=fix)
    # A float holds whole numbers only up to 2**53.
    return round(float(number) * factor) if "." in number else int(number) * factor


def _percentage(text: str, argument: str) -> Percentage:
    found = re.fullmatch(_AMOUNT, text.strip(), re.ASCII)
    if found is None or found[2] != "%":
        raise InvalidOption(argument, text, why=_why_unreadable(text, ("%",), "percentage"), fix=_PERCENTAGE_FIX)
    fraction = float(found[1]) / 100
    if not 0 < fraction <= 1:
        why = "must be more than 0% and at most 100%"
        raise InvalidOption(argument, text, why=why, fix=_PERCENTAGE_FIX)
    return Percentage(fraction)


def _why_unreadable(text: str, units: Collection[str], kind: str) -> str:
    if not text.strip():
        return "must not be empty"
    if text.strip().startswith(("-", "\N{MINUS SIGN}")):
        return "must not be negative"
    if re.fullmatch(_NUMBER, text.strip()):
        return "has no unit"
    words = re.findall(r"[^\W\d_]+|%", text) if re.search(r"[0-9]", text) else []
    # Only the units of sizes may be written in either case: "5M" does not mean five minutes.
    unknown = next((word for word in words if (word if kind == "duration" else word.lower()) not in units), None)
    return f"is not a valid {kind}" if unknown is None else f"has the unknown unit {unknown!r}"
