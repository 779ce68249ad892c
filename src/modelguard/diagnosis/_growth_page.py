"""A growth report as a single HTML page with inline figures, which opens offline."""

import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from modelguard._units import format_bytes, printable
from modelguard.diagnosis._counts import counted
from modelguard.diagnosis._growth_causes import GrowthReport, Measured, Spread, Trial, Trials
from modelguard.facts._holders import Held

# A growth report as text for a terminal, and the sentences that its page has too.


def as_text(report: GrowthReport) -> Iterator[str]:
    measured = report.measured
    yield f"Diagnosed: {report.subject}"
    yield f"Verdict: {verdict(report)}"
    causes = ((f"{one.share:.0%} {one.name}", one.seen, one.fix) for one in report.causes)
    growing = ((one.told(measured.per), one.seen, one.fix) for one in measured.growing)
    for head, seen, fix in (*causes, *growing):
        yield from ("", head, f"  seen  {printable(seen)}", f"  fix   {printable(fix)}")
    if report.causes:
        yield from ("", f"{report.unexplained:.0%} is unexplained.")
    if measured.libraries:
        yield f"Loaded: {', '.join(measured.libraries)}."
    yield from (f"{printable(sentence[0].upper() + sentence[1:])}." for sentence in report.seen)
    yield from (f"Note: {printable(sentence)}" for sentence in report.unknown)
    if report.trials is not None:
        yield ""
        yield from _remedies_text(report.trials)


def verdict(report: GrowthReport) -> str:
    measured = report.measured
    calls = counted(measured.calls[-1] if measured.calls else 0, measured.per)
    judged = measured.judged.verdict if measured.growing else report.verdict
    by = " with the calls" if measured.per == "calls" else ""
    if judged != "grows" and measured.growing:
        names = " and ".join(each.name for each in measured.growing)
        memory = "memory does not" if judged == "steady" else "of memory nothing is known"
        return f"{names} grow{by}; {memory}"
    if report.verdict == "undecided":
        return f"undecided after {calls}"
    moved = f"{format_bytes(max(0, measured.growth))} in {calls}"
    if report.verdict == "steady":
        return f"memory does not grow{by} ({moved})"
    if not by:
        return f"memory grows: {moved}; its calls are not known, as it has no guard"
    return f"memory grows{by}: {moved}, {measured.per_call * 1000 / 1e6:.2f} MB per 1,000 calls"


def advice(trials: Trials) -> str:
    best = _recommended(trials)
    undecided = ", ".join(one.name for one in trials.tried if one.undecided)
    if best is None and undecided:
        return f"Undecided, as the runs were too short: {undecided}. --try {trials.needed} is likely to be enough."
    if best is None:
        return "None of the remedies helps enough."
    costs = f"with which {mega(best.growth)} MB per 1,000 calls are left, at {times(best.cpu)} the CPU time"
    if trials.contains:
        return f"Mend the cause in the program. Until then {best.name} contains it, {costs}."
    return f"Recommended: {best.name}, {costs}."


def _recommended(trials: Trials) -> Trial | None:
    return next((one for one in trials.tried if one.name == trials.recommended), None)


def mega(spread: Spread) -> str:
    """Bytes as megabytes: the median, and the lowest and the highest."""
    return times(Spread(*(value / 1e6 for value in spread)), "")


def times(spread: Spread, unit: str = "x") -> str:
    """A multiple: the median, and the lowest and the highest."""
    median, low, high = (f"{value:.2f}" for value in spread)
    return f"{median}{unit}" if low == high else f"{median}{unit} ({low}-{high})"


def milliseconds(seconds: float) -> str:
    amount = seconds * 1000
    return f"{amount:,.0f} ms" if amount >= 100 else f"{amount:.2g} ms"  # noqa: PLR2004 - where digits say nothing more


#: The columns of the table of remedies.
_COLUMNS = ("remedy", "MB per 1,000 calls", "CPU time per call", "p99", "held at the end", "rounds")


def _rows(trials: Trials) -> list[tuple[str, ...]]:
    """The cells of each remedy, of doing nothing first; no row if nothing could be tried."""
    found: list[tuple[str, ...]] = []
    for one in (trials.nothing, *trials.tried) if trials.nothing is not None else ():
        name, growth = f"{one.name}{' *' if one.front else ''}", "undecided" if one.undecided else mega(one.growth)
        cpu = f"{times(one.cpu)} {milliseconds(one.cpu_seconds)}"
        p99 = f"{times(one.p99)} {milliseconds(one.p99_seconds)}"
        found.append((name, growth, cpu, p99, format_bytes(one.held), str(one.rounds)))
    return found


def _told(trials: Trials) -> Iterator[str]:
    """What there is to say of single remedies."""
    for one in trials.tried:
        if one.stopped:
            yield f"Stopped: {one.name}, because {one.stopped}"
        elif one.undecided:
            yield f"Undecided: {one.name}, because {one.undecided}; --try {trials.needed} may decide it"
    yield from (f"Not tried: {line}" for line in trials.left_out)


_STAR = "* No other remedy is better in one figure and as good in the others."


def _remedies_text(trials: Trials) -> Iterator[str]:
    if rows := _rows(trials):
        yield from (f"Remedies, in fresh processes with {trials.calls:,} calls each:", "")
        yield from _table_text([_COLUMNS, *rows])
        yield from ("", _STAR, advice(trials))
        if (best := _recommended(trials)) is not None:
            yield from (f"  {line}" for line in best.lines)
    yield from map(printable, _told(trials))


def _table_text(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


# The figures of a report's page: HTML, so that words keep their size on each screen, and SVG for lines.

#: Intervals between ticks at most: five labels have room on a telephone.
_INTERVALS = 4
#: What holds a smaller share of the growth is not drawn, unless it is a cause by its number, as connections are.
_SEEN = 0.01
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_CALLS = ((1e6, "million calls"), (1.0, "calls"))
_TIME = ((3_600_000.0, "hours"), (60_000.0, "minutes"), (1000.0, "seconds"))


def words(text: str) -> str:
    return html.escape(printable(text))


class _Axis:
    """What an axis shows: its ends are ticks, and between them are steps of a round number of units."""

    def __init__(self, values: Iterable[float], units: Sequence[tuple[float, str]]) -> None:
        every = list(values)
        low, high = min(every), max(every)
        self._factor, self.unit = next((each for each in units if high >= each[0]), units[-1])
        least = max(high - low, abs(high) * 1e-6, self._factor * 1e-3) / _INTERVALS
        power = 10.0 ** math.floor(math.log10(least))
        for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
            first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
            if last - first <= _INTERVALS:
                break
        self._low, self._step, self._steps = first * step, step, max(1, last - first)

    def at(self, value: float) -> float:
        return round(100 * (value - self._low) / (self._step * self._steps), 2)

    def ticks(self) -> Iterator[tuple[float, str]]:
        digits = max(0, -math.floor(math.log10(self._step / self._factor) + 1e-9))
        for number in range(self._steps + 1):
            yield 100 * number / self._steps, f"{(self._low + number * self._step) / self._factor:,.{digits}f}"


# Memory over calls


def readings(measured: Measured) -> str:
    calls, sizes = measured.calls, measured.private
    if len(calls) < 2 or calls[-1] <= calls[0]:  # noqa: PLR2004 - a line has two ends
        return ""
    across = _Axis((0, *calls), _CALLS if measured.per == "calls" else _TIME)
    up = _Axis(sizes, _BYTES)
    points = [f"{across.at(x)} {100 - up.at(y)}" for x, y in zip(calls, sizes, strict=True)]
    ticks = "".join(
        f'<span class="grid" style="bottom:{place}%"></span><span class="tick y" style="bottom:{place}%">{label}</span>'
        for place, label in up.ticks()
    ) + "".join(f'<span class="tick x" style="left:{place}%">{label}</span>' for place, label in across.ticks())
    drawn, key = _judged(measured, across)
    return (
        f'<div class="plot"><p class="unit">private memory, {up.unit}</p>'
        '<div class="area" role="img" aria-label="private memory over calls">'
        f'{ticks}<svg viewBox="0 0 100 100" preserveAspectRatio="none">{drawn}'
        f'<path class="line" d="M{"L".join(points)}"/>'
        f'<path class="dots" d="{"".join(f"M{point}h0" for point in points)}"/></svg></div>'
        f'<p class="unit" style="text-align:right">{across.unit}</p>'
        f'<p class="key">{_swatch("blue", f"{len(calls)} readings")}{key}</p></div>'
    )


def _judged(measured: Measured, across: _Axis) -> tuple[str, str]:
    """What was not judged, and the steps; and the key to them, with the rate and its interval."""
    first, judged = measured.judged_from, measured.judged
    drawn = "".join(f'<path class="step" d="M{across.at(step.calls)} 0V100"/>' for step in judged.steps)
    key = _swatch("green", "a step") if judged.steps else ""
    if first:
        drawn += f'<path class="left" d="M0 0H{across.at(measured.calls[first])}V100H0Z"/>'
        key += _swatch("grey", "not judged: it was undecided")
    if math.isfinite(judged.low) and math.isfinite(judged.high):
        growth, low, high = (format_bytes(round(one)) for one in (judged.growth, judged.low, judged.high))
        key += f"<span>judged: {growth}, between {low} and {high}</span>"
    return drawn, key


def _swatch(colour: str, text: str) -> str:
    return f'<span><i class="swatch {colour}"></i>{words(text)}</span> '


# What holds it


def _chain(one: Held) -> str:
    """The same words as in the text: the way, the container with what came to it, and what that is."""
    where, _, entries = str(one).partition(f" ({one.kind}, +{one.more:,} {one.unit}) -> ")
    links = [
        *(f"<div>{words(link)}</div>" for link in _links(where)),
        f'<div class="more">{words(one.kind)}<br><small>+{one.more:,} {words(one.unit)}</small></div>',
        *(f"<div>{words(link)}</div>" for link in entries.split(" -> ")),
    ]
    links[-1] = links[-1].replace("</div>", f"<br><small>{format_bytes(one.size)} in all</small></div>")
    return f'<ol class="chain">{"".join(f"<li>{link}</li>" for link in links)}</ol>'


def _links(way: str) -> list[str]:
    """A way in its parts: what has the name, its attribute, and what comes after; one part if it is a sentence."""
    name, entries, rest = way.partition("[...]")
    owner, _, attribute = name.rpartition(".")
    first = [name] if " " in name or not owner else [owner, f".{attribute}"]
    return [*first, *re.findall(r"\[\.\.\.\]|\.?[^.\[]+", entries + rest)]


def as_html(report: GrowthReport) -> str:
    """Write a report as one page without any other file."""
    subject, measured = words(report.subject), report.measured
    about = "".join(f"<dt>{words(name)}</dt><dd>{words(value)}</dd>" for name, value in report.about.items())
    growing = (f"{each.told(measured.per)}: {each.seen}. {each.fix}" for each in measured.growing)
    drawn = (one for one in measured.held if one.about or one.size >= _SEEN * measured.growth)
    sections = {
        "Causes": _causes(report),
        "More with the calls": _list(growing),
        "Notes": _list((*report.seen, *report.unknown)),
        "What holds it": "".join(map(_chain, drawn)),
        "Remedies": "" if report.trials is None else _remedies(report.trials),
        "This run": f"<dl>{about}</dl>" if about else "",
    }
    inside = "".join(f"<h2>{title}</h2>{content}" for title, content in sections.items() if content)
    style = files("modelguard.diagnosis").joinpath("_growth_page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{subject}</title><style>{style}</style></head><body><h1>{subject}</h1>"
        f"<p>{words(verdict(report))}.</p>{readings(measured)}{inside}</body></html>\n"
    )


def _causes(report: GrowthReport) -> str:
    rows = []
    for one in report.causes:
        share = f'{one.share:.0%}<div class="bar" style="width:{one.share:.0%}"></div>'
        rows.append((words(one.name), share, words(one.seen), words(one.fix)))
    table = _table("causes", ("cause", "share", "seen", "fix"), rows)
    return f"{table}<p>{report.unexplained:.0%} is unexplained.</p>" if rows else ""


def _remedies(trials: Trials) -> str:
    """What each remedy leaves of the growth, and what it costs."""
    told, rows = _list(_told(trials)), _rows(trials)
    if not rows:
        return told
    best = _recommended(trials)
    lines = f"<pre>{'<br>'.join(map(words, best.lines))}</pre>" if best else ""
    row_of_best = 1 + trials.tried.index(best) if best else None  # below that of doing nothing
    table = _table("remedies", _COLUMNS, [tuple(map(words, row)) for row in rows], row_of_best)
    return (
        f"<p>{words(advice(trials))}</p>{lines}{table}"
        "<p><small>Medians, with the lowest and the highest, over rounds of fresh processes with "
        f"{trials.calls:,} calls each. CPU time and p99 are multiples of those of doing nothing in the same round. "
        f"{_STAR}</small></p>{told}"
    )


def _table(kind: str, heads: Sequence[str], rows: Iterable[Sequence[str]], best: int | None = None) -> str:
    """A table whose cells name their columns: a narrow page shows them below each other."""
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f'<td data-of="{head}">{cell}</td>' for head, cell in zip(heads, row, strict=True))
        body += f'<tr class="best">{cells}</tr>' if number == best else f"<tr>{cells}</tr>"
    return f'<table class="{kind}"><tr class="head">{"".join(f"<th>{head}</th>" for head in heads)}</tr>{body}</table>'


def _list(lines: Iterable[str]) -> str:
    inside = "".join(f"<li>{words(line)}</li>" for line in lines)
    return f"<ul>{inside}</ul>" if inside else ""
