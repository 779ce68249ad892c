"""The figures of a report's page: HTML and CSS, so that words keep their size on each screen, and SVG for lines."""

from __future__ import annotations

import bisect
import html
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from modelguard._units import format_bytes
from modelguard.diagnosis._growth import Measured
from modelguard.diagnosis._growth_text import printable
from modelguard.diagnosis._holders import Held
from modelguard.diagnosis._trial_results import Spread, Trial, Trials
from modelguard.facts.growth import Judgement

__all__ = ["STYLE", "chains", "readings", "remedies", "words"]

STYLE = (
    ".plot,.rows{margin:1rem 0 .5rem}.unit,.key{font-size:.8rem;color:var(--quiet)}.unit{margin:0}"
    ".area{position:relative;height:15rem;margin:.7rem 1.8rem 1.6rem 3.6rem;"
    "border:solid var(--quiet);border-width:0 0 1px 1px}"
    ".area svg{position:absolute;width:100%;height:100%;overflow:hidden}"
    "svg *{vector-effect:non-scaling-stroke;fill:none}"
    ".line{stroke:var(--blue)}.dots{stroke:var(--blue);stroke-width:5;stroke-linecap:round}"
    ".band{fill:var(--green);opacity:.18}.rate,.step{stroke:var(--green);stroke-width:2}.step{stroke-dasharray:4 4}"
    ".left{fill:var(--quiet);opacity:.15}"
    ".tick{position:absolute;font-size:.75rem;line-height:1;color:var(--quiet);white-space:nowrap}"
    ".area .y{left:-.4rem;transform:translate(-100%,50%)}.area .x{top:calc(100% + .4rem);transform:translateX(-50%)}"
    ".grid{position:absolute;background:var(--line)}.area .grid{left:0;right:0;height:1px}"
    ".swatch{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem;border-radius:.4rem;vertical-align:-.1rem;box-sizing:border-box}"
    ".key span{display:inline-block;margin-right:1rem}"
    ".rows{display:grid;grid-template-columns:minmax(0,16rem) minmax(0,1fr) minmax(0,1fr);column-gap:2.2rem;"
    "padding-right:1.2rem;align-items:center}"
    ".rows .scale{height:1.4rem;position:relative}.scale .tick{top:.3rem;transform:translateX(-50%)}"
    ".track{position:relative;align-self:stretch;min-height:1.9rem}.track .grid{top:0;bottom:0;width:1px}"
    ".track b,.track i{position:absolute;top:calc(50% - .35rem);height:.7rem}"
    ".track b{width:.7rem;margin-left:-.35rem;border-radius:.35rem;box-sizing:border-box}"
    ".track i{height:2px;top:calc(50% - 1px);min-width:1px}"
    ".green{background:var(--green)}.blue{background:var(--blue)}.text{background:var(--text)}"
    ".grey{background:var(--quiet)}.hollow{background:var(--page);border:2px solid var(--quiet)}"
    ".chain{display:flex;flex-wrap:wrap;list-style:none;padding:0;margin:.6rem 0 1rem;gap:.5rem 0;align-items:center}"
    ".chain li{display:flex;align-items:center;max-width:100%}.chain li+li::before{content:'\\2192';padding:0 .5rem}"
    ".chain li>div{border:1px solid var(--quiet);border-radius:.4rem;padding:.2rem .6rem;min-width:0}"
    ".chain .more{border:2px solid var(--blue)}"
    "@media(max-width:700px){.rows{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}.rows .name{grid-column:1/3;"
    "padding-top:.4rem}.rows .blank{display:none}.chain{flex-direction:column;align-items:flex-start}"
    ".chain li+li::before{padding:0 .5rem 0 0}}"
)

#: Intervals between ticks at most: five labels have room on a telephone.
_INTERVALS = 4
#: What holds a smaller share of the growth is not drawn, unless it is a cause by its number, as connections are.
_SEEN = 0.01
_BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_CALLS = ((1e6, "million calls"), (1.0, "calls"))
_TIME = ((3_600_000.0, "hours"), (60_000.0, "minutes"), (1000.0, "seconds"))


def words(text: str) -> str:
    """Text for a page."""
    return html.escape(printable(text))


class _Axis(NamedTuple):
    """What an axis shows: its ends are ticks.

    Attributes:
        low: Where it begins.
        step: From one tick to the next.
        steps: How many of these it has.
        factor: What the numbers at the ticks are multiples of.
        unit: Its name.
    """

    low: float
    step: float
    steps: int
    factor: float = 1.0
    unit: str = ""

    def at(self, value: float) -> float:
        """The place of a value, in percent from its beginning."""
        return round(100 * (value - self.low) / (self.step * self.steps), 2)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """The place of each tick in percent, and its number."""
        digits = max(0, -math.floor(math.log10(self.step / self.factor) + 1e-9))
        for number in range(self.steps + 1):
            yield 100 * number / self.steps, f"{(self.low + number * self.step) / self.factor:,.{digits}f}"


def _axis(values: Iterable[float], units: Sequence[tuple[float, str]] = ((1.0, ""),)) -> _Axis:
    """An axis with few round numbers, on which all values have a place."""
    every = list(values)
    low, high = min(every), max(every)
    factor, unit = next((each for each in units if high >= each[0]), units[-1])
    least = max(high - low, abs(high) * 1e-6, factor * 1e-3) / _INTERVALS
    power = 10.0 ** math.floor(math.log10(least))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= _INTERVALS:
            break
    return _Axis(first * step, step, max(1, last - first), factor, unit)


# Memory over calls


def readings(measured: Measured) -> str:
    """Private memory at each reading, and what was judged of it."""
    calls, sizes = measured.calls, measured.private
    if len(calls) < 2 or calls[-1] <= calls[0]:  # noqa: PLR2004 - a line has two ends
        return ""
    across = _axis((0, *calls), _CALLS if measured.per == "calls" else _TIME)
    up = _axis(sizes, _BYTES)
    points = [f"{across.at(x)} {100 - up.at(y)}" for x, y in zip(calls, sizes, strict=True)]
    ticks = "".join(
        f'<span class="grid" style="bottom:{place}%"></span><span class="tick y" style="bottom:{place}%">{label}</span>'
        for place, label in up.ticks()
    ) + "".join(f'<span class="tick x" style="left:{place}%">{label}</span>' for place, label in across.ticks())
    drawn, key = _judged(measured, across, up)
    return (
        f'<div class="plot"><p class="unit">private memory, {up.unit}</p>'
        '<div class="area" role="img" aria-label="private memory over calls">'
        f'{ticks}<svg viewBox="0 0 100 100" preserveAspectRatio="none">{drawn}'
        f'<path class="line" d="M{"L".join(points)}"/>'
        f'<path class="dots" d="{"".join(f"M{point}h0" for point in points)}"/></svg></div>'
        f'<p class="unit" style="text-align:right">{across.unit}</p>'
        f'<p class="key">{_swatch("blue", f"{len(calls)} readings")}{key}</p></div>'
    )


def _judged(measured: Measured, across: _Axis, up: _Axis) -> tuple[str, str]:
    """The rate that was judged, with its interval and the steps beside it; and the key to them."""
    first = measured.judged_from
    calls, judged = measured.calls[first:], measured.judged
    drawn, key = "", ""
    if first:
        drawn += f'<path class="left" d="M0 0H{across.at(calls[0])}V100H0Z"/>'
        key += _swatch("grey", "not judged: it was undecided")
    drawn += "".join(f'<path class="step" d="M{across.at(step.calls)} 0V100"/>' for step in judged.steps)
    if not (math.isfinite(judged.low) and math.isfinite(judged.high)):
        return drawn, key
    for part in _parts(calls, measured.private[first:], judged):
        middle, level, begin, end = _middle(part, judged.growth / (calls[-1] - calls[0]))
        low, most, rate = (
            [(x, level + growth * (x - middle) / (calls[-1] - calls[0])) for x in (begin, end)]
            for growth in (judged.low, judged.high, judged.growth)
        )
        band, line = (
            "L".join(f"{across.at(x)} {100 - up.at(y)}" for x, y in points)
            for points in ([low[0], most[1], low[1], most[0]], rate)
        )
        drawn += f'<path class="band" d="M{band}Z"/><path class="rate" d="M{line}"/>'
    least, most_of_all, growth = (format_bytes(round(one)) for one in (judged.low, judged.high, judged.growth))
    steps = "; dashed: a step" if judged.steps else ""
    return drawn, key + _swatch("green", f"judged: {growth}, between {least} and {most_of_all}{steps}")


def _parts(calls: Sequence[int], sizes: Sequence[int], judged: Judgement) -> Iterator[list[tuple[int, int]]]:
    """The readings between two steps."""
    pairs = list(zip(calls, sizes, strict=True))
    ends = [0, *(bisect.bisect_left(calls, step.calls) for step in judged.steps), len(calls)]
    return (pairs[begin:end] for begin, end in itertools.pairwise(ends) if end - begin > 1)


def _middle(part: Sequence[tuple[int, int]], rate: float) -> tuple[float, float, int, int]:
    """Where a line of this rate passes the middle of the calls, half of the readings below it; and its ends."""
    begin, end = part[0][0], part[-1][0]
    middle = (begin + end) / 2
    return middle, statistics.median(y - rate * (x - middle) for x, y in part), begin, end


def _swatch(colour: str, text: str) -> str:
    return f'<span><i class="swatch {colour}"></i>{words(text)}</span> '


# What holds it


def chains(measured: Measured) -> str:
    """For each container that has grown, the way to it from a name, and what its new entries are."""
    return "".join(_chain(one) for one in measured.held if one.about or one.size >= _SEEN * measured.growth)


def _chain(one: Held) -> str:
    """The same words as in the text: the way, the container with what came to it, and what that is."""
    way, _, rest = str(one).partition(f" ({one.kind}, ")
    grown, _, entries = rest.partition(") -> ")
    *inside, last = (f"<div>{words(link)}</div>" for link in entries.split(" -> "))
    links = [
        *(f"<div>{words(link)}</div>" for link in _links(way)),
        f'<div class="more">{words(one.kind)}<br><small>{words(grown)}</small></div>',
        *inside,
        last.replace("</div>", f"<br><small>{format_bytes(one.size)} in all</small></div>"),
    ]
    return f'<ol class="chain">{"".join(f"<li>{link}</li>" for link in links)}</ol>'


def _links(way: str) -> list[str]:
    """A way in its parts: what has the name, its attribute, and what comes after; one part if it is a sentence."""
    name, entries, rest = way.partition("[...]")
    owner, _, attribute = name.rpartition(".")
    first = [name] if " " in name or not owner else [owner, f".{attribute}"]
    return [*first, *re.findall(r"\[\.\.\.\]|\.?[^.\[]+", entries + rest)]


# Remedies


def remedies(trials: Trials) -> str:
    """What each remedy leaves of the growth, and its CPU time: a row for each, so that no name meets another."""
    assert trials.nothing is not None  # noqa: S101 - the caller has looked
    every = (trials.nothing, *trials.tried)
    growth = _axis(itertools.chain([0.0, 1e3], *(one.growth for one in every)), _BYTES)
    cpu = _axis(itertools.chain([0.0, 1.0], *(one.cpu for one in every)))
    rows = "".join(
        f'<div class="name">{words(one.name)}</div>{_track(growth, one.growth, colour)}{_track(cpu, one.cpu, colour)}'
        for one, colour in ((one, _colour(one, trials)) for one in every)
    )
    key = _swatch("text", "without a remedy") + _swatch("green", "recommended")
    key += _swatch("blue", "marked * below") + _swatch("grey", "another is better")
    return (
        '<div class="rows" role="img" aria-label="growth and CPU time with each remedy"><div class="blank"></div>'
        f'<div class="unit">{growth.unit} per 1,000 calls</div><div class="unit">CPU time, multiple</div>'
        f'{rows}<div class="blank"></div>{_scale(growth)}{_scale(cpu)}</div>'
        f'<p class="key">{key}{_swatch("hollow", "stopped")}</p>'
    )


def _colour(one: Trial, trials: Trials) -> str:
    if one is trials.nothing:
        return "text"
    if one.stopped:
        return "hollow"
    return "green" if one.name == trials.recommended else "blue" if one.front else "grey"


def _track(axis: _Axis, spread: Spread, colour: str) -> str:
    low, high = axis.at(spread.low), axis.at(spread.high)
    grid = "".join(f'<span class="grid" style="left:{place}%"></span>' for place, _ in axis.ticks())
    line = f'<i class="grey" style="left:{low}%;width:{round(high - low, 2)}%"></i>'
    return f'<div class="track">{grid}{line}<b class="{colour}" style="left:{axis.at(spread.median)}%"></b></div>'


def _scale(axis: _Axis) -> str:
    labels = "".join(f'<span class="tick" style="left:{place}%">{label}</span>' for place, label in axis.ticks())
    return f'<div class="scale">{labels}</div>'
