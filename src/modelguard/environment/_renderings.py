"""Presets in the formats of configuration files.

Each format escapes what its reader would expand: ``$`` in a Dockerfile, ``%`` in a systemd unit, ``$(`` in a
Kubernetes manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from modelguard.environment._knobs import Knob
from modelguard.errors import InvalidOption

__all__ = ["Format", "formats", "render"]

Format = Literal["shell", "env", "gunicorn", "dockerfile", "systemd", "kubernetes"]


def formats() -> tuple[str, ...]:
    """The names of all formats."""
    return get_args(Format)


def render(name: str, knobs: Sequence[Knob], format: Format) -> str:  # noqa: A002 - the command line's word for it
    """Write knobs as lines of a file, each with a comment on what it does.

    Args:
        name: Their common name, for the first comment.
        knobs: The knobs.
        format: One of :func:`formats`.

    Returns:
        Text that ends with a newline.

    Raises:
        InvalidOption: The format is unknown, or cannot represent one of the values.
    """
    if format not in _STYLES:
        why = "is not a known format"
        raise InvalidOption("format", format, why=why, fix=f"The formats are {', '.join(_STYLES)}.")
    style = _STYLES[format]
    lines = [f"# modelguard preset {name}", *style.head]
    for knob in knobs:
        lines += [f"{style.indent}# {_summary(knob)}", f"{style.indent}{style.line(knob)}"]
    return "\n".join([*lines, *style.tail]) + "\n"


class _Style(NamedTuple):
    line: Callable[[Knob], str]
    head: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    indent: str = ""


def _summary(knob: Knob) -> str:
    return " ".join(f"{knob.reader}: {knob.does}".split())


def _shell(knob: Knob) -> str:
    import shlex  # only this format needs it

    return f"export {knob.name}={shlex.quote(knob.value)}"


def _env(knob: Knob) -> str:
    """A line of a .env file; with quotes only if they are needed, because docker's --env-file keeps them."""
    if "${" in knob.value:
        why = f"cannot represent {knob.name}={knob.value}: readers of .env files expand ${{...}}, even in quotes"
        raise InvalidOption("format", "env", why=why, fix="Use another format, or another value.")
    if re.fullmatch(r"[\w@%+=:,./-]*", knob.value, re.ASCII):
        return f"{knob.name}={knob.value}"
    quoted = knob.value.replace("\\", r"\\").replace("'", r"\'")
    return f"{knob.name}='{quoted}'"


def _gunicorn(knob: Knob) -> str:
    if knob.read_at == "exec":
        return f"# left out: {knob.name} is read only when a program starts; set it where gunicorn is started"
    return f"{json.dumps(f'{knob.name}={knob.value}', ensure_ascii=False)},"


def _dockerfile(knob: Knob) -> str:
    return f"ENV {knob.name}=" + _in_double_quotes(re.sub(r'([\\"$])', r"\\\1", knob.value))


def _systemd(knob: Knob) -> str:
    escaped = re.sub(r'([\\"])', r"\\\1", knob.value).replace("%", "%%")
    return "Environment=" + _in_double_quotes(f"{knob.name}={escaped}")


def _kubernetes(knob: Knob) -> str:
    # $(NAME) would be expanded; $$ stands for one $.
    value = json.dumps(knob.value.replace("$", "$$"), ensure_ascii=False)
    return f"- name: {knob.name}\n    value: {value}"


def _in_double_quotes(text: str) -> str:
    return f'"{text}"'


_STYLES = {
    "shell": _Style(_shell),
    "env": _Style(_env),
    "gunicorn": _Style(_gunicorn, ("# for gunicorn.conf.py", "raw_env = ["), ("]",), "    "),
    "dockerfile": _Style(_dockerfile),
    "systemd": _Style(_systemd, ("[Service]",)),
    "kubernetes": _Style(_kubernetes, ("# for a container in spec.template.spec.containers", "env:"), (), "  "),
}
