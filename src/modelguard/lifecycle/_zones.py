"""Time zones by name, and the machine's own."""

from __future__ import annotations

import os
from datetime import tzinfo
from functools import lru_cache
from pathlib import Path

from modelguard.errors import InvalidOption

_LOCAL = Path("/etc/localtime")


def check(name: str | None) -> str | None:
    """Check the name of a time zone; None is the machine's local time.

    Raises:
        InvalidOption: It is unknown.
    """
    if name is not None:
        named(name)
    return name


def named(name: str) -> tzinfo:
    """The time zone of this name.

    Raises:
        InvalidOption: It is unknown.
    """
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)  # cached
    except (OSError, TypeError, ValueError, LookupError) as error:
        fix = "Give a name such as 'Europe/Berlin', and install tzdata where the system has no time zones."
        raise InvalidOption("tz", name, why=f"is not a known time zone ({error})", fix=fix) from None


@lru_cache(maxsize=1)
def local() -> tzinfo:
    """The machine's time zone with its changes to daylight saving time: that of ``TZ``, else ``/etc/localtime``.

    Raises:
        InvalidOption: ``TZ`` is not the name of a time zone.
    """
    from zoneinfo import ZoneInfo

    name = os.environ.get("TZ", "").removeprefix(":")
    if name:
        try:
            return named(name)
        except InvalidOption:
            why = f"means local time, and the environment has TZ={name!r}, which is not the name of a time zone"
            raise InvalidOption("tz", None, why=why, fix="Write for example tz='Europe/Berlin'.") from None
    if not _LOCAL.exists():
        return named("UTC")
    with _LOCAL.open("rb") as file:
        return ZoneInfo.from_file(file)
