"""A growth report as text for a terminal, and the sentences that its page has too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from modelguard._units import format_bytes
from modelguard.diagnosis._growth import GrowthReport
from modelguard.diagnosis._trial_results import Spread, Trial, Trials

__all__ = ["advice", "as_text", "costs", "left", "mega", "milliseconds", "printable", "times", "verdict"]


def as_text(report: GrowthReport) -> Iterator[str]:
    """Write a report as lines of text."""
    measured = report.measured
    yield f"Diagnosed: {report.subject}"
    yield f"Verdict: {verdict(report)}"
    for cause in report.causes:
        yield ""
        yield f"{cause.share:.0%} {cause.name}"
        yield f"  seen  {printable(cause.seen)}"
        yield f"  fix   {cause.fix}"
    for each in measured.growing:
        yield ""
        yield each.told(measured.per)
        yield f"  seen  {printable(each.seen)}"
        yield f"  fix   {each.fix}"
    if report.causes:
        yield ""
        yield f"{report.unexplained:.0%} is unexplained."
    if measured.libraries:
        yield f"Loaded: {', '.join(measured.libraries)}."
    for sentence in report.seen:
        yield f"{printable(sentence[0].upper() + sentence[1:])}."
    for sentence in report.unknown:
        yield f"Note: {printable(sentence)}"
    if report.trials is not None:
        yield ""
        yield from _remedies(report.trials)


def verdict(report: GrowthReport) -> str:
    """The verdict with its figures, in a sentence."""
    measured = report.measured
    count = measured.calls[-1] if measured.calls else 0
    calls = f"{count:,} calls" if measured.per == "calls" else f"{count / 1000:.0f} seconds"
    judged = measured.judged.verdict if measured.growing else report.verdict
    if judged != "grows" and measured.growing:
        names = " and ".join(each.name for each in measured.growing)
        memory = "memory does not" if judged == "steady" else "of memory nothing is known"
        return f"{names} grow with the calls; {memory}"
    if report.verdict == "undecided":
        return f"undecided after {calls}"
    moved = f"{format_bytes(max(0, measured.growth))} in {calls}"
    if report.verdict == "steady":
        return f"memory does not grow with the calls ({moved})"
    if measured.per != "calls":
        return f"memory grows: {moved}; its calls are not known, as it has no guard"
    return f"memory grows with the calls: {moved}, {measured.per_call * 1000 / 1e6:.2f} MB per 1,000 calls"


def advice(trials: Trials) -> str:
    """What the trials recommend, in a sentence."""
    best = next((one for one in trials.tried if one.name == trials.recommended), None)
    undecided = ", ".join(one.name for one in trials.tried if one.undecided)
    if best is None and undecided:
        return f"Undecided, as the runs were too short: {undecided}. --try {trials.needed} is likely to be enough."
    if best is None:
        return "None of the remedies helps enough."
    costs = f"with which {mega(best.growth)} MB per 1,000 calls are left, at {times(best.cpu)} the CPU time"
    if trials.contains:
        return f"Mend the cause in the program. Until then {best.name} contains it, {costs}."
    return f"Recommended: {best.name}, {costs}."


def mega(spread: Spread) -> str:
    """Bytes as megabytes: the median, and the lowest and the highest."""
    return _spread(Spread(*(value / 1e6 for value in spread)), "")


def left(one: Trial) -> str:
    """What is left of the growth, in MB per 1,000 calls."""
    return "undecided" if one.undecided else mega(one.growth)


def times(spread: Spread) -> str:
    """A multiple: the median, and the lowest and the highest."""
    return _spread(spread, "x")


def costs(one: Trial) -> tuple[tuple[Spread, float], tuple[Spread, float]]:
    """CPU time per call and p99, each as a multiple and in seconds."""
    return (one.cpu, one.cpu_seconds), (one.p99, one.p99_seconds)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    amount = seconds * 1000
    return f"{amount:,.0f} ms" if amount >= 100 else f"{amount:.2g} ms"  # noqa: PLR2004 - where digits say nothing more


def printable(text: str) -> str:
    """Escape characters that control a terminal, or that a stream cannot encode."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _spread(spread: Spread, unit: str) -> str:
    median, low, high = (f"{value:.2f}" for value in spread)
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}-{high})"


def _remedies(trials: Trials) -> Iterator[str]:
    if trials.nothing is not None:
        yield f"Remedies, in fresh processes with {trials.calls:,} calls each:"
        yield ""
        heads = ("", "MB per 1,000 calls", "CPU time", "p99", "held", "rounds")
        yield from _table([heads, *(_row(one) for one in (trials.nothing, *trials.tried))])
        yield ""
        yield "* No other remedy is better in one figure and as good in the others."
        yield advice(trials)
        best = next((one for one in trials.tried if one.name == trials.recommended), None)
        yield from (f"  {line}" for line in (best.lines if best else ()))
        for one in trials.tried:
            if one.stopped:
                yield f"Stopped: {one.name}, because {printable(one.stopped)}"
            elif one.undecided:
                yield f"Undecided: {one.name}, because {printable(one.undecided)}; --try {trials.needed} may decide it"
    for line in trials.left_out:
        yield f"Not tried: {printable(line)}"


def _row(one: Trial) -> tuple[str, ...]:
    name = f"{one.name}{' *' if one.front else ''}"
    cpu, p99 = (f"{times(ratio)} {milliseconds(each)}" for ratio, each in costs(one))
    return name, left(one), cpu, p99, format_bytes(one.held), str(one.rounds)


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
