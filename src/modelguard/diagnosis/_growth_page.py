"""A growth report as a single HTML page with inline figures, which opens offline."""

from __future__ import annotations

from collections.abc import Iterable

from modelguard._units import format_bytes
from modelguard.diagnosis import _figures
from modelguard.diagnosis._figures import words
from modelguard.diagnosis._growth import GrowthReport
from modelguard.diagnosis._growth_text import advice, costs, left, milliseconds, times, verdict
from modelguard.diagnosis._trial_results import Trial, Trials

__all__ = ["as_html"]

_STYLE = (
    ":root{color-scheme:light dark;--page:#fff;--text:#1b1b1b;--quiet:#666;--line:#ddd;--soft:#f4f4f4;--best:#e8f3ea;"
    "--blue:#2563a8;--green:#1a7f37}"
    "@media(prefers-color-scheme:dark){:root{--page:#16181b;--text:#e6e6e6;--quiet:#a0a0a0;--line:#3a3d42;"
    "--soft:#24272c;--best:#173321;--blue:#6ea8e8;--green:#4cc26b}}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:1.5rem auto;padding:0 1rem;color:var(--text);"
    "background:var(--page);overflow-wrap:anywhere}h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}"
    "table{border-collapse:collapse;width:100%;margin:1rem 0;table-layout:fixed}"
    "td,th{text-align:left;padding:.4rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}"
    "th{overflow-wrap:normal}.causes th:first-child{width:15%}.causes th:nth-child(2){width:9%}"
    ".causes th:last-child{width:36%}.remedies th:first-child{width:26%}"
    ".number{text-align:right}.number small{white-space:nowrap}.bar{background:var(--blue);height:.5rem}"
    ".best{background:var(--best)}small{color:var(--quiet)}"
    "pre{background:var(--soft);padding:.7rem;white-space:pre-wrap}"
    "dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:0 1rem;font-size:.85rem}"
    "dt{color:var(--quiet)}dd{margin:0}"
    "@media(max-width:700px){table,tbody,tr,td{display:block}tr.head{display:none}tr{padding:.5rem;"
    "border-bottom:1px solid var(--line)}td,.number{border:0;padding:.1rem 0;text-align:left}"
    "td:not(:first-child)::before{content:attr(data-of)': ';color:var(--quiet)}td:first-child{font-weight:bold}"
    "td br{display:none}}"
)


def as_html(report: GrowthReport) -> str:
    """Write a report as one page without any other file."""
    subject = words(report.subject)
    held = _figures.chains(report.measured)
    chains = f"<h2>What holds it</h2>{held}" if held else ""
    found = [f"{each.told(report.measured.per)}: {each.seen}. {each.fix}" for each in report.measured.growing]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{subject}</title><style>{_STYLE}{_figures.STYLE}</style></head><body><h1>{subject}</h1>"
        f"<p>{words(verdict(report))}.</p>{_figures.readings(report.measured)}{_causes(report)}"
        f"{_list('More with the calls', found)}{_list('Notes', (*report.seen, *report.unknown))}{chains}"
        f"{_remedies(report.trials)}{_about(report)}</body></html>\n"
    )


def _causes(report: GrowthReport) -> str:
    heads = ("cause", "share", "seen", "fix")
    rows = [
        _row(
            heads,
            (
                words(cause.name),
                f'{cause.share:.0%}<div class="bar" style="width:{cause.share * 100:.0f}%"></div>',
                words(cause.seen),
                words(cause.fix),
            ),
        )
        for cause in report.causes
    ]
    return (
        f"<h2>Causes</h2>{_table('causes', heads, rows)}<p>{report.unexplained:.0%} is unexplained.</p>" if rows else ""
    )


def _remedies(trials: Trials | None) -> str:
    if trials is None:
        return ""
    missing = _list("Not tried", trials.left_out)
    if trials.nothing is None:
        return missing
    best = next((one for one in trials.tried if one.name == trials.recommended), None)
    lines = f"<pre>{'<br>'.join(map(words, best.lines))}</pre>" if best else ""
    heads = ("remedy", "MB per 1,000 calls", "CPU time per call", "p99", "held at the end", "rounds")
    rows = [_trial(heads, one, trials.recommended) for one in (trials.nothing, *trials.tried)]
    return (
        f"<h2>Remedies</h2><p>{words(advice(trials))}</p>{lines}{_figures.remedies(trials)}"
        f"{_table('remedies', heads, rows, numbers=True)}"
        "<p><small>Medians, with the lowest and the highest, over rounds of fresh processes with "
        f"{trials.calls:,} calls each. CPU time and p99 are multiples of those of doing nothing in the same round. "
        f"* No other remedy is better in one figure and as good in the others.</small></p>{missing}"
    )


def _trial(heads: Iterable[str], one: Trial, best: str) -> str:
    mark = "*" if one.front else ""
    why = f"stopped: {one.stopped}" if one.stopped else f"undecided: {one.undecided}" if one.undecided else ""
    stopped = f"<br> <small>{words(why)}</small>" if why else ""
    cpu, p99 = (f"{_broken(times(ratio))}<br> <small>{milliseconds(each)}</small>" for ratio, each in costs(one))
    growth = _broken(left(one))
    cells = (words(one.name) + mark + stopped, growth, cpu, p99, format_bytes(one.held), str(one.rounds))
    return _row(heads, cells, numbers=True, kind="best" if one.name == best else "")


def _broken(spread: str) -> str:
    """A median, and its range below it."""
    median, _, rest = spread.partition(" (")
    return f"{median}<br> <small>({rest}</small>" if rest else median


def _table(kind: str, heads: Iterable[str], rows: Iterable[str], *, numbers: bool = False) -> str:
    cells = "".join(
        f"<th{' class=number' if numbers and place else ''}>{head}</th>" for place, head in enumerate(heads)
    )
    return f'<table class="{kind}"><tr class="head">{cells}</tr>{"".join(rows)}</table>'


def _row(heads: Iterable[str], cells: Iterable[str], *, numbers: bool = False, kind: str = "") -> str:
    """A row, whose cells name their columns: a narrow page shows them below each other."""
    pairs = enumerate(zip(heads, cells, strict=True))
    inside = "".join(
        f'<td{" class=number" if numbers and place else ""} data-of="{head}">{cell}</td>'
        for place, (head, cell) in pairs
    )
    return f'<tr class="{kind}">{inside}</tr>'


def _list(title: str, lines: Iterable[str]) -> str:
    inside = "".join(f"<li>{words(line)}</li>" for line in lines)
    return f"<h2>{title}</h2><ul>{inside}</ul>" if inside else ""


def _about(report: GrowthReport) -> str:
    """Where the figures come from."""
    rows = "".join(f"<dt>{words(name)}</dt><dd>{words(value)}</dd>" for name, value in report.about.items())
    return f"<h2>This run</h2><dl>{rows}</dl>" if rows else ""
