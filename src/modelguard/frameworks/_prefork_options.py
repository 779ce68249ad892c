"""Options of ``prefork.prepare`` from environment variables, for servers whose configuration cannot contain them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from modelguard import _units, prefork
from modelguard.errors import InvalidOption
from modelguard.isolation import _registry as _isolated
from modelguard.lifecycle.model_guard import ModelGuard
from modelguard.lifecycle.model_guard import guards as all_guards
from modelguard.lifecycle.pool import pools as all_pools
from modelguard.serving import _registry as _batched
from modelguard.sharing._prefork import prepare_chosen

__all__ = ["PreforkOptions", "generations", "guards_to_share", "log_report"]

T = TypeVar("T")

_YES_OR_NO = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


class Log(Protocol):
    """The methods of a logger that are used here."""

    def info(self, msg: str, /, *args: object) -> Any:
        """Log something that is as it should be."""
        ...

    def warning(self, msg: str, /, *args: object) -> Any:
        """Log something that somebody should look at."""
        ...


@dataclass(frozen=True, slots=True)
class PreforkOptions:
    """The options of :func:`~modelguard.prefork.prepare`.

    Attributes:
        freeze: ``MODELGUARD_FREEZE``: ``yes`` (default) or ``no``.
        immortalize: ``MODELGUARD_IMMORTALIZE``: ``auto`` (default), ``yes`` or ``no``.
        on_hazard: ``MODELGUARD_ON_HAZARD``: ``fix`` (default), ``refuse`` or ``warn``.
        warm_timeout: ``MODELGUARD_WARM_TIMEOUT``: seconds, or text such as ``2m``. Default 60 s.
    """

    freeze: bool = True
    immortalize: Literal["auto"] | bool = "auto"
    on_hazard: Literal["fix", "refuse", "warn"] = "fix"
    warm_timeout: float = 60.0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PreforkOptions:
        """Read the variables that are set.

        Raises:
            InvalidOption: A variable has an invalid value.
        """
        timeout = _number(environ.get("MODELGUARD_WARM_TIMEOUT", "60s"))
        return cls(
            freeze=_choice(environ, "MODELGUARD_FREEZE", "yes", _YES_OR_NO),
            immortalize=_choice(environ, "MODELGUARD_IMMORTALIZE", "auto", {"auto": "auto", **_YES_OR_NO}),
            on_hazard=_choice(
                environ, "MODELGUARD_ON_HAZARD", "fix", {"fix": "fix", "refuse": "refuse", "warn": "warn"}
            ),
            warm_timeout=_units.seconds(timeout, "MODELGUARD_WARM_TIMEOUT"),
        )

    def prepare(self, chosen: Sequence[ModelGuard[Any]], *, renewed_here: bool = True) -> prefork.ForkReport:
        """Prepare this process to be forked, also if it has no guards; ``renewed_here`` as in ``prepare_chosen``."""
        return prepare_chosen(
            tuple(chosen),
            freeze=self.freeze,
            immortalize=self.immortalize,
            on_hazard=self.on_hazard,
            warm_timeout=self.warm_timeout,
            renewed_here=renewed_here,
        )


def guards_to_share() -> tuple[ModelGuard[Any], ...]:
    """The guards whose models are shared: those made with ``prefork=True``, or all guards if there is none.

    None for an application that has batched or isolated functions, or pools, alone: their models are not the master's.

    Raises:
        InvalidOption: There is nothing of modelguard's, so the guards are probably made too late.
    """
    found = sorted(all_guards(), key=lambda guard: guard.name)
    found = [guard for guard in found if guard.prefork] or found
    if not found and not (_batched.live() or _isolated.live() or all_pools()):
        why = "must not be empty: the application made no guard while it was imported"
        raise InvalidOption("guards", (), why=why, fix="Make it at the top of a module: nlp = guard(load_model, ...).")
    return tuple(found)


def generations(chosen: Sequence[ModelGuard[Any]]) -> tuple[int, ...]:
    """The number of each guard's current generation."""
    return tuple(guard.status().generation for guard in chosen)


def log_report(log: Log, report: prefork.ForkReport, on_hazard: str, workers: int | None = None) -> None:
    """Log what was prepared; a hazard that no child repairs is a warning.

    Args:
        log: A logger, or gunicorn's.
        report: What ``prepare`` returned.
        on_hazard: The option of the preparation.
        workers: How many there will be, if that is known.
    """
    for line in report.lines():
        log.info("modelguard: %s", line)
    for hazard in report.hazards:
        repaired = hazard.severity == "fixed" and on_hazard != "warn"
        here = f" Here: up to {workers + 1} copies." if workers and hazard.kind == "copies" else ""
        (log.info if repaired else log.warning)("modelguard: %s%s", hazard, here)


def _choice(environ: Mapping[str, str], name: str, default: str, choices: Mapping[str, T]) -> T:
    text = environ.get(name, default)
    try:
        return choices[text.strip().lower()]
    except KeyError:
        fix = f"Choose one of {', '.join(choices)}."
        raise InvalidOption(name, text, why="is not a known choice", fix=fix) from None


def _number(text: str) -> float | str:
    """Read a number without a unit as seconds, as everywhere else, although environment variables are text."""
    try:
        return float(text)
    except ValueError:
        return text
