"""Sets of environment variables for model servers, as data, and whether they took effect.

>>> from modelguard import presets
>>> preset = presets.get("torch-cpu-dynamic", workers=2) | presets.get("low-memory")
>>> print(preset.explain())
>>> print(preset.apply())

A preset never overrides what the user has set, and its report is based on what the process has actually done.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from modelguard import _units
from modelguard.environment import _knobs
from modelguard.environment._effect import State, ThisProcess, effect_of
from modelguard.environment._knobs import Knob, When
from modelguard.errors import InvalidOption
from modelguard.facts import _memory

# Presets in the formats of configuration files.
#
# Each format escapes what its reader would expand: ``$`` in a Dockerfile, ``%`` in a systemd unit, ``$(`` in a
# Kubernetes manifest.


Format = Literal["shell", "env", "gunicorn", "dockerfile", "systemd", "kubernetes"]


class _Style(NamedTuple):
    line: Callable[[Knob], str]
    head: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    indent: str = ""


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
    value = re.sub(r'([\\"$])', r"\\\1", knob.value)
    return f'ENV {knob.name}="{value}"'


def _systemd(knob: Knob) -> str:
    escaped = re.sub(r'([\\"])', r"\\\1", knob.value).replace("%", "%%")
    return f'Environment="{knob.name}={escaped}"'


def _kubernetes(knob: Knob) -> str:
    # $(NAME) would be expanded; $$ stands for one $.
    value = json.dumps(knob.value.replace("$", "$$"), ensure_ascii=False)
    return f"- name: {knob.name}\n    value: {value}"


_STYLES = {
    "shell": _Style(_shell),
    "env": _Style(_env),
    "gunicorn": _Style(_gunicorn, ("# for gunicorn.conf.py", "raw_env = ["), ("]",), "    "),
    "dockerfile": _Style(_dockerfile),
    "systemd": _Style(_systemd, ("[Service]",)),
    "kubernetes": _Style(_kubernetes, ("# for a container in spec.template.spec.containers", "env:"), (), "  "),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to one knob when a preset was applied.

    Attributes:
        knob: The knob.
        state: ``"applied"``: its value is set and is in force, or will be once its reader reads it. ``"kept"``: the
            user's own value stays. ``"invalid"``: so does this one, but its reader crashes on it. ``"too late"``: its
            reader has read the variable already, with another value. ``"needs exec"``: it has an effect only if it is
            set when the program starts. ``"not supported"``: nothing in this process reads it.
        value: The current value of the variable; None if it is not set.
        evidence: The reason for the state.
    """

    knob: Knob
    state: State
    value: str | None
    evidence: str

    def __str__(self) -> str:
        value = self.knob.value if self.value is None else self.value
        return f"{self.state:13} {self.knob.name}={value}: {self.evidence}"


class ApplyReport(tuple[Outcome, ...]):
    """The outcome for every knob of a preset, in the preset's order."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is left to do: no value is invalid, no knob was too late, and none needs an exec."""
        return not any(outcome.state in ("invalid", "too late", "needs exec") for outcome in self)

    def __str__(self) -> str:
        return "\n".join(map(str, self))


@dataclass(frozen=True, slots=True)
class Preset:
    """A set of knobs for one purpose.

    Attributes:
        name: Its name; for a combined preset the names joined by ``" | "``.
        does: Its purpose.
        knobs: Its knobs; no variable appears twice.

    Raises:
        InvalidOption: The name is empty or has a line break or another control character: files of configuration begin
            with it. Or the knobs are not a tuple of knobs, or set a variable twice.
    """

    name: str
    does: str
    knobs: tuple[Knob, ...]

    def __post_init__(self) -> None:
        _units.instance(self.name, "name", str, "text", fix="Give a short name.")
        if not self.name or not self.name.isprintable():
            why = "must be printable text in one line"
            raise InvalidOption("name", self.name, why=why, fix="Use a short name without line breaks.")
        for knob in _units.instance(self.knobs, "knobs", tuple, "a tuple", fix="Write knobs=(Knob(...),)."):
            _units.instance(knob, "knobs", Knob, "a Knob", fix="Write knobs=(Knob(...),).")
        variables = [knob.name for knob in self.knobs]
        if len(set(variables)) < len(variables):
            raise InvalidOption("knobs", variables, why="must set no variable twice", fix="Remove one of the two.")

    def __or__(self, other: Preset) -> Preset:
        """Combine two presets; if both set a variable, the value on the right wins, as with ``dict``.

        Raises:
            InvalidOption: ``other`` is not a preset.
        """
        _require_preset(other)
        together = {knob.name: knob for knob in (*self.knobs, *other.knobs)}
        return Preset(f"{self.name} | {other.name}", f"{self.does} {other.does}", tuple(together.values()))

    def __ror__(self, other: object) -> Preset:
        _require_preset(other)
        return NotImplemented  # two presets are composed by __or__

    def explain(self) -> str:
        """Describe every knob: its value, when it is read and by what, what it does and costs, and the source."""
        return "\n\n".join([f"{self.name}: {self.does}", *map(_explain, self.knobs)])

    def apply(
        self, environ: MutableMapping[str, str] = os.environ, *, process: ThisProcess | None = None
    ) -> ApplyReport:
        """Set the variables that can still take effect in this process, and report the outcome of each knob.

        Variables that the user has set stay. Those that are too late, need an exec or are not read here are not set.

        Args:
            environ: The variables to read and set.
            process: What this process has done so far. Default: this process is inspected.

        Returns:
            One outcome per knob, in the preset's order.
        """
        process, outcomes = process or ThisProcess(), []
        for knob in self.knobs:
            value = environ.get(knob.name)
            state, evidence = effect_of(knob, value, process)
            if state == "applied":
                environ[knob.name] = value = knob.value
            outcomes.append(Outcome(knob, state, value, evidence))
        return ApplyReport(outcomes)

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The variables to add to ``environ`` for a program to be started; what the user has set stays.

        Args:
            environ: The variables that the program would get without the preset.

        Raises:
            InvalidOption: A variable of the preset is set in ``environ``, and its reader crashes on its value.
        """
        for knob in self.knobs:
            _knobs.require_usable(knob.name, environ.get(knob.name, knob.value))
        return {knob.name: knob.value for knob in self.knobs if knob.name not in environ}

    def render(self, format: Format) -> str:  # noqa: A002 - the command line's word for it
        """Write the preset in the format of a service's configuration file.

        Args:
            format: ``"shell"``, ``"env"`` (a .env file), ``"gunicorn"`` (``raw_env`` of its configuration, without the
                variables that must be set when the program starts), ``"dockerfile"``, ``"systemd"`` (a unit's
                ``[Service]`` section), or ``"kubernetes"`` (a container's ``env``).

        Returns:
            Lines of text, with a comment on what each variable does.

        Raises:
            InvalidOption: The format is unknown, or cannot represent one of the values.
        """
        _units.one_of(format, "format", _STYLES, what="format")
        style = _STYLES[format]
        lines = [f"# modelguard preset {self.name}", *style.head]
        for knob in self.knobs:
            does = " ".join(f"# {knob.reader}: {knob.does}".split())  # in one line, whatever they contain
            lines += [f"{style.indent}{does}", f"{style.indent}{style.line(knob)}"]
        return "\n".join([*lines, *style.tail]) + "\n"


def _require_preset(given: object) -> None:
    if not isinstance(given, Preset):
        fix = f"Write presets.get({given!r})." if given in names() else "Write for example presets.get('low-memory')."
        why = f"must be a preset, because | joins two presets, not {_units.kind_of(given)}"
        raise InvalidOption("preset", given, why=why, fix=fix)


def names() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(_PRESETS)


def describe(name: str) -> str:
    """The purpose of a preset, in one sentence.

    Raises:
        InvalidOption: There is no such preset.
    """
    return _recipe(name).does


def get(name: str, *, workers: int = 1, distinct_shapes: int | None = None, cpus: float | None = None) -> Preset:
    """Make a preset for a service.

    Args:
        name: One of :func:`names`.
        workers: How many processes share the CPUs; ``torch-cpu`` and ``prefork`` divide the CPUs among them, and
            ``torch-cuda-shared`` the GPU.
        distinct_shapes: How many different input shapes the traffic has, such as lengths after bucketing, if known;
            ``torch-cpu-dynamic`` makes oneDNN's caches large enough for all of them, ``torch-cuda-dynamic`` cuDNN's.
        cpus: The number of CPUs to share. Default: what this process may use, which is the smaller of its affinity and
            its cgroups' quota.

    Returns:
        The preset; nothing is set yet.

    Raises:
        InvalidOption: There is no such preset, or a number is out of range.
    """
    recipe = _recipe(name)
    _units.whole_number(workers, "workers")
    if distinct_shapes is not None:
        _units.whole_number(distinct_shapes, "distinct_shapes")
    if cpus is not None:  # more than any machine has, infinity and NaN are slips
        _units.number(cpus, "cpus", fix="Write for example cpus=4 or cpus=2.5.", most=100_000)
    return Preset(name, recipe.does, recipe.knobs(_Service(workers, distinct_shapes, cpus)))


#: The largest number of entries in any documentation (Intel's tuning guide for its PyTorch extension).
_MAX_ENTRIES = 65_536


@dataclass(frozen=True, slots=True)
class _Service:
    workers: int
    distinct_shapes: int | None
    cpus: float | None

    def entries(self, default: int, most: int) -> int:
        """How many entries a cache needs that has some for each shape."""
        shapes = self.distinct_shapes
        return default if shapes is None else min(most, shapes * _knobs.ENTRIES_PER_SHAPE)

    def threads_per_worker(self) -> tuple[int, str]:
        count, source = self.cpus, ""
        if count is None:
            found = _memory.available_cpus()
            count, source = found.count, f" by {found.source}"
        workers = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        cpus = "1 CPU" if count == 1 else f"{count:g} CPUs"
        return max(1, int(count / self.workers)), f"{cpus}{source} for {workers}"


def _torch_cpu(service: _Service) -> tuple[Knob, ...]:
    count, why = service.threads_per_worker()
    return (*_knobs.threads(count, why), _knobs.openblas_threads(count, why))


def _torch_cpu_dynamic(service: _Service) -> tuple[Knob, ...]:
    return (*_knobs.onednn_caches(service.entries(_knobs.DEFAULT_ENTRIES, _MAX_ENTRIES)), *_torch_cpu(service))


def _prefork(service: _Service) -> tuple[Knob, ...]:
    count, why = service.threads_per_worker()
    return (
        *_knobs.threads(count, why),
        _knobs.openblas_threads(1, "a process that forks should have only one thread"),
        _knobs.CUDA_CHECK,
        _knobs.GRPC_FORK_SUPPORT,
        _knobs.TOKENIZERS_THREADS,
        _knobs.JEMALLOC_MEMORY,
    )


def _torch_cuda_dynamic(service: _Service) -> tuple[Knob, ...]:
    entries = service.entries(_knobs.CUDNN_DEFAULT_ENTRIES, _knobs.CUDNN_MOST_ENTRIES)
    return _knobs.EXPANDABLE_SEGMENTS, _knobs.cudnn_plans(entries)


class _Recipe(NamedTuple):
    does: str
    knobs: Callable[[_Service], tuple[Knob, ...]]


_PRESETS = {
    "torch-cpu": _Recipe("torch on CPUs: as many threads as each worker's share of the CPU quota.", _torch_cpu),
    "torch-cpu-dynamic": _Recipe(
        "torch on CPUs with inputs of many shapes: torch-cpu, and bounded oneDNN caches.", _torch_cpu_dynamic
    ),
    "torch-cuda-dynamic": _Recipe(
        "torch on a GPU with inputs of many sizes: fewer holes in GPU memory, and a bounded cache of convolutions.",
        _torch_cuda_dynamic,
    ),
    "torch-cuda-latency": _Recipe(
        "torch on a GPU where no call may wait until the allocator frees its whole cache.",
        lambda _: (_knobs.RECLAIMING,),
    ),
    "torch-cuda-shared": _Recipe(
        "torch in several processes on one GPU: each takes at most its part of the memory.",
        lambda service: (_knobs.fraction(service.workers), _knobs.LAZY_MODULES, _knobs.CUDA_CHECK),
    ),
    "prefork": _Recipe("A server that loads the model and then forks its workers.", _prefork),
    "low-memory": _Recipe(
        "Freed memory is returned to the system, at the cost of some CPU time.",
        lambda _: (*_knobs.GLIBC_MEMORY, _knobs.JEMALLOC_MEMORY),
    ),
}


_WHEN: dict[When, str] = {
    "exec": "when the program starts",
    "library load": "when the library is loaded",
    "first use": "at its first use",
    "any time": "each time",
}


def _explain(knob: Knob) -> str:
    return "\n".join(
        [
            f"{knob.name}={knob.value}",
            f"    read    {_WHEN[knob.read_at]}, by {knob.reader}",
            f"    does    {knob.does}",
            f"    costs   {knob.costs}",
            f"    source  {knob.source}",
        ]
    )


def _recipe(name: str) -> _Recipe:
    _units.one_of(name, "name", _PRESETS, what="preset")
    return _PRESETS[name]
