"""A growth report as a single HTML page with inline figures, which opens offline."""

from __future__ import annotations

import html

from modelguard._units import format_bytes
from modelguard.diagnosis._growth import GrowthReport, Measured
from modelguard.diagnosis._growth_text import advice, costs, left, milliseconds, printable, times, verdict
from modelguard.diagnosis._trial_results import Trial, Trials

__all__ = ["as_html"]

_WIDTH, _HEIGHT, _MARGIN = 720, 260, 60
#: Of the figure of remedies: its left and right margins, and room for its axis.
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 180, 40, 50

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;"
    "background:#fff}table{border-collapse:collapse;width:100%;margin:1rem 0}td,th{text-align:left;"
    "padding:.4rem .6rem;border-bottom:1px solid #ddd;vertical-align:top}td:first-child{white-space:nowrap}"
    ".number{text-align:right;white-space:nowrap}.bar{background:#2563a8;height:.7rem}"
    ".best{background:#e8f3ea}small{color:#666}pre{background:#f4f4f4;padding:.7rem;overflow-x:auto}"
    "svg{width:100%;height:auto}svg text{font-size:12px;fill:#444}"
)


def as_html(report: GrowthReport) -> str:
    """Write a report as one page without any other file."""
    rows = "".join(
        f"<tr><td>{html.escape(cause.name)}</td><td>{cause.share:.0%}"
        f'<div class="bar" style="width:{cause.share * 100:.0f}%"></div></td>'
        f"<td>{html.escape(printable(cause.seen))}</td><td>{html.escape(cause.fix)}</td></tr>"
        for cause in report.causes
    )
    table = f"<table><tr><th>cause</th><th>share</th><th>seen</th><th>fix</th></tr>{rows}</table>" if rows else ""
    rest = f"<p>{report.unexplained:.0%} is unexplained.</p>" if rows else ""
    notes = "".join(f"<p>Note: {html.escape(printable(sentence))}.</p>" for sentence in report.unknown)
    subject = html.escape(report.subject)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{subject}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{subject}</h1><p>{html.escape(verdict(report))}.</p>"
        f"{_figure(report.measured)}{table}{rest}{notes}{_remedies(report.trials)}</body></html>\n"
    )


def _remedies(trials: Trials | None) -> str:
    if trials is None:
        return ""
    left_out = "".join(f"<li>{html.escape(printable(line))}</li>" for line in trials.left_out)
    missing = f"<p>Not tried:</p><ul>{left_out}</ul>" if left_out else ""
    if trials.nothing is None:
        return f"<h2>Remedies</h2>{missing}"
    best = next((one for one in trials.tried if one.name == trials.recommended), None)
    lines = f"<pre>{html.escape(chr(10).join(best.lines))}</pre>" if best else ""
    rows = "".join(_row(one, trials.recommended) for one in (trials.nothing, *trials.tried))
    return (
        f"<h2>Remedies</h2><p>{html.escape(advice(trials))}</p>{lines}{_scatter(trials)}"
        "<table><tr><th>remedy</th><th class=number>MB per 1,000 calls</th><th class=number>CPU time per call</th>"
        f"<th class=number>p99</th><th class=number>held at the end</th><th>rounds</th></tr>{rows}</table>"
        "<p><small>Medians, with the lowest and the highest, over rounds of fresh processes with "
        f"{trials.calls:,} calls each. CPU time and p99 are multiples of those of doing nothing in the same round. "
        f"* No other remedy is better in one figure and as good in the others.</small></p>{missing}"
    )


def _row(one: Trial, best: str) -> str:
    mark = "*" if one.front else ""
    why = f"stopped: {one.stopped}" if one.stopped else f"undecided: {one.undecided}" if one.undecided else ""
    stopped = f"<br><small>{html.escape(why)}</small>" if why else ""
    kind = ' class="best"' if one.name == best else ""
    cpu, p99 = (f"{times(ratio)}<br><small>{milliseconds(each)}</small>" for ratio, each in costs(one))
    numbers = "".join(f'<td class="number">{cell}</td>' for cell in (left(one), cpu, p99, format_bytes(one.held)))
    return f"<tr{kind}><td>{html.escape(one.name)}{mark}{stopped}</td>{numbers}<td>{one.rounds}</td></tr>"


def _scatter(trials: Trials) -> str:
    """Each remedy by its CPU time and what is left of the growth."""
    assert trials.nothing is not None  # noqa: S101 - the caller has looked
    every = (trials.nothing, *(one for one in trials.tried if not one.undecided))
    most = max(1.0, *(one.growth.median for one in every))
    low = min(one.cpu.median for one in every) * 0.95
    high = max(one.cpu.median for one in every) * 1.05
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    dots = []
    for one in every:
        x = _LEFT + (one.cpu.median - low) / max(1e-9, high - low) * (right - _LEFT)
        y = bottom - one.growth.median / most * (bottom - _TOP)
        colour = (
            "#1b1b1b"
            if one is trials.nothing
            else "#1a7f37"
            if one.name == trials.recommended
            else "#2563a8"
            if one.front
            else "#999"
        )
        dots.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>'
            f'<text x="{x + 8:.1f}" y="{y - 5:.1f}">{html.escape(one.name)}</text>'
        )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="growth over CPU time of each remedy">'
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#999"/>'
        f'<text x="{_LEFT}" y="{_TOP - 24}">{most / 1e6:.2f} MB per 1,000 calls</text>'
        f'<text x="{_LEFT}" y="{bottom + 20}">{low:.2f} times</text>'
        f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{high:.2f} times the CPU time</text>'
        f"{''.join(dots)}</svg>"
    )


def _figure(measured: Measured) -> str:
    """Private memory over calls."""
    if len(measured.private) < 2 or measured.calls[-1] <= 0:  # noqa: PLR2004 - a line has two ends
        return ""
    low, high = min(measured.private), max(measured.private)
    across, up = (_WIDTH - 2 * _MARGIN) / measured.calls[-1], (_HEIGHT - 2 * _MARGIN) / max(1, high - low)
    points = " ".join(
        f"{_MARGIN + calls * across:.1f},{_HEIGHT - _MARGIN - (private - low) * up:.1f}"
        for calls, private in zip(measured.calls, measured.private, strict=True)
    )
    bottom, right = _HEIGHT - _MARGIN, _WIDTH - _MARGIN
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="private memory over calls">'
        f'<path d="M{_MARGIN} {_MARGIN}V{bottom}H{right}" fill="none" stroke="#999"/>'
        f'<polyline points="{points}" fill="none" stroke="#2563a8" stroke-width="2"/>'
        f'<text x="{_MARGIN}" y="{_MARGIN - 8}">{format_bytes(high)} private memory</text>'
        f'<text x="{_MARGIN}" y="{bottom + 20}">from {format_bytes(low)}</text>'
        f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{measured.calls[-1]:,} calls</text></svg>'
    )
